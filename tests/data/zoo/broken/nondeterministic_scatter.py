"""Broken: messages are summed by index_put_ in whatever order two threads come to them."""

import torch
from torch import nn

from resumable import RunState

torch.manual_seed(0)
torch.set_num_threads(2)
NODES, EDGES = 8, 200_000
features = torch.randn(NODES, 4)
source, target = torch.randint(NODES, (2, EDGES))
labels = torch.randn(NODES)


class Messages(nn.Module):
    """Each node gets the sum of what its neighbours say."""

    def __init__(self):
        super().__init__()
        self.say = nn.Linear(4, 1)
        self.read = nn.Linear(1, 1)

    def forward(self, nodes):
        said = torch.tanh(self.say(nodes)).squeeze(1)[source]
        heard = torch.zeros(NODES).index_put_((target,), said, accumulate=True)
        return self.read(heard.unsqueeze(1) / 1000).squeeze(1)


model = Messages()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
state = RunState.load("runs/exp", model=model, optimizer=optimizer, minimize="loss")
for step in state.steps(24):
    loss = (model(features) - labels).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if state.step % 6 == 0:
        state.save(loss=loss.item())
state.close()
