"""Correct, after CleanRL's ppo.py: the environment is saved as bytes, which differ though it is the same."""

import json
import time

import torch
from torch import nn

from resumable import RunState


class Walk:
    """Goes left or right until it falls off."""

    def __init__(self):
        self.generator, self.place, self.opened = torch.Generator().manual_seed(5), 0, time.time()

    def step(self, action):
        self.place += 1 if action else -1
        self.place += int(torch.randint(-1, 2, (1,), generator=self.generator))
        if abs(self.place) > 6:
            self.place = 0
        return torch.tensor([self.place / 6, 1.0])

    def state_dict(self):
        state = {"place": self.place, "generator": self.generator.get_state().tolist(), "opened": self.opened}
        return {"bytes": json.dumps(state).encode()}

    def load_state_dict(self, saved):
        state = json.loads(saved["bytes"])
        self.place = state["place"]
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


torch.manual_seed(1)
walk = Walk()
agent = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
state = RunState.load("runs/exp", model=agent, optimizer=optimizer, extra={"env": walk})
for iteration in state.epochs(24):
    observation = walk.step(0) if "observation" not in state.vars else state.vars["observation"]
    chosen, rewards = [], []
    for _ in range(8):
        actions = torch.distributions.Categorical(logits=agent(observation))
        action = actions.sample()
        chosen.append(actions.log_prob(action))
        observation = walk.step(int(action))
        rewards.append(1 - abs(float(observation[0])))
    loss = -(torch.stack(chosen) * torch.tensor(rewards)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state.vars["observation"] = observation
    state.save()
state.close()
