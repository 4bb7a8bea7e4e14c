"""Broken: what the agent has seen lies in a deque, and a resume begins with an empty one."""

import random
from collections import deque

import torch
from torch import nn

from resumable import RunState

random.seed(0)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
replay = deque(maxlen=200)


def play(length=12):
    """Walk on a line from a random place; to be near 0 is good."""
    place = random.uniform(-1, 1)
    for _ in range(length):
        seen = (place, abs(place))
        action = random.randrange(2) if random.random() < 0.2 else net(torch.tensor(seen)).argmax().item()
        place += 0.1 if action else -0.1
        replay.append((seen, action, -abs(place), (place, abs(place))))


state = RunState.load("runs/exp", model=net, optimizer=optimizer, every=6)
for episode in state.steps(24):
    play()
    seen, actions, rewards, after = zip(*random.sample(list(replay), 8))
    values = net(torch.tensor(seen)).gather(1, torch.tensor(actions).unsqueeze(1)).squeeze(1)
    with torch.no_grad():
        targets = torch.tensor(rewards) + 0.9 * net(torch.tensor(after)).max(1).values
    loss = nn.functional.smooth_l1_loss(values, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if episode % 6 == 5:
        print(f"episode {episode}: loss {loss.item():.4f}")
state.close()
