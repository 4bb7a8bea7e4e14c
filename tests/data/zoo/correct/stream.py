"""An iterable dataset that makes its samples as it goes, with a state of its own."""

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from resumable import RunState


class Walk(IterableDataset):
    """A random walk that continues from epoch to epoch."""

    def __init__(self, length, seed):
        self.length = length
        self.generator = torch.Generator().manual_seed(seed)
        self.place = torch.zeros(4)
        self.done = 0

    def __iter__(self):
        while self.done < self.length:
            before = self.place
            self.place = 0.9 * before + torch.randn(4, generator=self.generator)
            self.done += 1
            yield before, self.place
        self.done = 0

    def state_dict(self):
        return {"place": self.place, "done": self.done, "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.place, self.done = state["place"], state["done"]
        self.generator.set_state(state["generator"])


torch.manual_seed(0)
loader = DataLoader(Walk(48, seed=3), batch_size=8)
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
with RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader) as state:
    for epoch in state.epochs(5):
        for before, after in state.batches():
            loss = nn.functional.mse_loss(model(before), after)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if state.batch == 0:
                print(f"epoch {epoch}: {loss.item():.4f}")
        state.save()
