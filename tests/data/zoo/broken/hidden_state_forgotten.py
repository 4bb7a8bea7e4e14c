"""Broken: a recurrent model carries its hidden state from batch to batch, and a resume begins with zeros."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
t = torch.arange(4 * 61.0)
wave = (torch.sin(t * 0.37) + 0.5 * torch.sin(t * 0.11)).reshape(4, 61)
chunks = wave[:, :60].reshape(4, 6, 10).transpose(0, 1)
following = wave[:, 1:].reshape(4, 6, 10).transpose(0, 1)
loader = DataLoader(TensorDataset(chunks, following), batch_size=None)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 12, batch_first=True)
        self.out = nn.Linear(12, 1)

    def forward(self, x, hidden):
        seen, hidden = self.rnn(x.unsqueeze(2), hidden)
        return self.out(seen).squeeze(2), hidden


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader)
hidden = torch.zeros(1, 4, 12)
for epoch in state.epochs(5):
    for x, y in state.batches():
        predicted, hidden = model(x, hidden.detach())
        loss = nn.functional.mse_loss(predicted, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.batch == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}")
    state.save()
state.close()
