"""The shape of minGPT's Trainer: an endless loop, next(data_iter), callbacks."""

from collections import defaultdict
from types import SimpleNamespace

import torch
from digest import print_digest
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class SortDataset(Dataset):
    """Digits, and the same ones sorted."""

    def __len__(self):
        return 52

    def __getitem__(self, index):
        numbers = torch.randint(4, (6,))
        return numbers, numbers.sort().values


class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Embedding(4, 8), nn.Flatten(), nn.Dropout(0.1), nn.Linear(48, 24))

    def forward(self, x, y):
        logits = super().forward(x).view(-1, 6, 4)
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def configure_optimizers(self, config):
        return torch.optim.AdamW(self.parameters(), lr=config.learning_rate)


class Trainer:
    def __init__(self, config, model, train_dataset):
        self.config, self.model, self.train_dataset = config, model, train_dataset
        self.callbacks = defaultdict(list)

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks[onevent]:
            callback(self)

    def run(self):
        model, config = self.model, self.config
        self.optimizer = model.configure_optimizers(config)
        train_loader = DataLoader(self.train_dataset, shuffle=True, batch_size=config.batch_size)
        model.train()
        self.iter_num = 0
        data_iter = iter(train_loader)
        while True:
            # fetch the next batch (x, y) and re-init iterator if needed
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = batch

            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()

            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break


def batch_end_callback(trainer):
    if trainer.iter_num % 5 == 0:
        print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}")
    if trainer.iter_num % 10 == 0:
        model.eval()
        with torch.no_grad():
            logits, _ = model(held_out, held_out)
        model.train()
        print(f"iter {trainer.iter_num}: sorted {(logits.argmax(2) == held_out.sort(1).values).sum().item()}")


torch.set_num_threads(1)
torch.manual_seed(3407)
held_out = torch.randint(4, (16, 6))
model = Model()
config = SimpleNamespace(batch_size=8, learning_rate=5e-3, grad_norm_clip=1.0, max_iters=40)
trainer = Trainer(config, model, SortDataset())
trainer.add_callback("on_batch_end", batch_end_callback)
trainer.run()
print_digest(model=model, optimizer=trainer.optimizer)
