"""The shape of PyTorch's word language model: truncated BPTT, and an update by hand, with no optimizer."""

import math
from dataclasses import dataclass

import torch
from digest import print_digest
from torch import nn

from resumable import RunState

EPOCHS, BATCH_SIZE, BPTT, CLIP, LOG_INTERVAL = 4, 4, 5, 0.25, 4


class RNNModel(nn.Module):
    def __init__(self, ntoken, nhid):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(ntoken, nhid)
        self.rnn = nn.LSTM(nhid, nhid)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(1, bsz, 8), weight.new_zeros(1, bsz, 8)


@dataclass
class Annealing:
    """The learning rate, which is divided by four where the validation gets no better."""

    lr: float = 20.0
    best_val_loss: float = math.inf

    def step(self, val_loss):
        if val_loss < self.best_val_loss:
            self.best_val_loss = val_loss
        else:
            self.lr /= 4.0


def batchify(data, bsz):
    return data[: len(data) // bsz * bsz].view(bsz, -1).t().contiguous()


def get_batch(source, i):
    seq_len = min(BPTT, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].flatten()


def repackage_hidden(hidden):
    """Detach the hidden state from its history."""
    return tuple(one.detach() for one in hidden)


def evaluate(source):
    model.eval()
    total_loss, hidden = 0.0, model.init_hidden(BATCH_SIZE)
    with torch.no_grad():
        for i in range(0, len(source) - 1, BPTT):
            inputs, targets = get_batch(source, i)
            output, hidden = model(inputs, hidden)
            total_loss += len(inputs) * criterion(output, targets).item()
    return total_loss / (len(source) - 1)


def train(epoch):
    model.train()
    hidden = state.vars["hidden"] if state.batch else model.init_hidden(BATCH_SIZE)
    for batch, i in state.enumerate(range(0, len(train_data) - 1, BPTT)):
        inputs, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(inputs, hidden)
        state.vars["hidden"] = repackage_hidden(hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-annealing.lr)
        if batch % LOG_INTERVAL == 0:
            print(f"| epoch {epoch} | {batch} batches | lr {annealing.lr:.4f} | loss {loss.item():.6f}")


torch.set_num_threads(1)
torch.manual_seed(1111)
corpus = torch.randint(3, (480,)).cumsum(0) % 10
train_data, val_data = batchify(corpus[:320], BATCH_SIZE), batchify(corpus[320:], BATCH_SIZE)
model = RNNModel(10, 8)
criterion = nn.CrossEntropyLoss()
annealing = Annealing()
state = RunState.load("runs/lm", model=model, extra={"annealing": annealing}, minimize="val_loss", every=3)
for epoch in state.epochs(EPOCHS):
    train(epoch)
    val_loss = evaluate(val_data)
    print(f"| end of epoch {epoch} | valid loss {val_loss:.6f} | valid ppl {math.exp(val_loss):.4f}")
    annealing.step(val_loss)
    state.save(val_loss=val_loss)
state.close()
print_digest(model=model, annealing=vars(annealing))
