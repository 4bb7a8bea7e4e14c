"""Q-learning: a replay buffer and a target network in extra, exploration that falls with the step."""

import random
from collections import deque

import torch
from torch import nn

from resumable import RunState


class Replay:
    def __init__(self, size):
        self.moves = deque(maxlen=size)

    def add(self, *move):
        self.moves.append(move)

    def sample(self, count):
        return zip(*random.sample(list(self.moves), count), strict=True)

    def state_dict(self):
        return {"moves": list(self.moves)}

    def load_state_dict(self, state):
        self.moves = deque(state["moves"], maxlen=self.moves.maxlen)


def make_net():
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))


random.seed(0)
torch.manual_seed(0)
online, target = make_net(), make_net()
target.load_state_dict(online.state_dict())
optimizer = torch.optim.Adam(online.parameters(), lr=1e-3)
replay = Replay(200)
extra = {"replay": replay, "target": target}

with RunState.load("runs/exp", model=online, optimizer=optimizer, extra=extra, every=6) as state:
    for episode in state.steps(24):
        epsilon = max(0.05, 0.9**episode)
        place = random.uniform(-1, 1)
        for _ in range(12):
            seen = (place, abs(place))
            action = random.randrange(2) if random.random() < epsilon else online(torch.tensor(seen)).argmax()
            place += 0.1 if action else -0.1
            replay.add(seen, int(action), -abs(place), (place, abs(place)))
        seen, actions, rewards, after = map(torch.tensor, replay.sample(8))
        values = online(seen).gather(1, actions.unsqueeze(1)).squeeze(1)
        with torch.no_grad():
            wanted = rewards + 0.9 * target(after).max(1).values
        loss = nn.functional.smooth_l1_loss(values, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if state.step % 5 == 0:
            target.load_state_dict(online.state_dict())
            print(f"episode {episode}: loss {loss.item():.4f}")
