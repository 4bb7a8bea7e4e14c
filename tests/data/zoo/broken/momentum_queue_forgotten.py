"""Broken: the negatives of a contrastive loss wait in a queue that is a tensor of the script."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import RunState

torch.manual_seed(0)
x = torch.randn(48, 12)
loader = DataLoader(TensorDataset(x), batch_size=8, shuffle=True)
encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9)
queue = F.normalize(torch.randn(32, 8), dim=1)

with RunState.load("runs/exp", model=encoder, optimizer=optimizer, loader=loader) as state:
    for epoch in state.epochs(5):
        for (batch,) in state.batches():
            one = F.normalize(encoder(batch + 0.1 * torch.randn_like(batch)), dim=1)
            with torch.no_grad():
                other = F.normalize(encoder(batch + 0.1 * torch.randn_like(batch)), dim=1)
            logits = torch.cat([(one * other).sum(1, keepdim=True), one @ queue.T], dim=1) / 0.2
            loss = F.cross_entropy(logits, torch.zeros(len(batch), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue = torch.cat([other, queue[: -len(other)]])
            if state.batch == 0:
                print(f"epoch {epoch}: loss {loss.item():.4f}")
        state.save()
