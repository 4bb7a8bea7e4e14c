"""Broken: the split is drawn after load, which has put torch's generator where the run stood."""

import torch
from torch import nn
from torch.utils.data import TensorDataset, random_split

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(60, 4)
data = TensorDataset(x, (x.sum(1) > 0).float())
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

state = RunState.load("runs/exp", model=model, optimizer=optimizer, minimize="val_loss")
train, val = random_split(data, [48, 12])


def batches():
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(state.epoch))
    for chosen in order.split(8):
        rows = [train[index] for index in chosen.tolist()]
        yield torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


for epoch in state.epochs(5):
    for inputs, labels in state.batches(batches):
        loss = nn.functional.binary_cross_entropy_with_logits(model(inputs).squeeze(1), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        inputs, labels = (torch.stack(one) for one in zip(*val))
        val_loss = nn.functional.binary_cross_entropy_with_logits(model(inputs).squeeze(1), labels)
    state.save(val_loss=val_loss.item())
    print(f"epoch {epoch}: {val_loss:.4f}")
state.close()
