"""Broken, after CleanRL's ppo.py: the environment, and what it showed last, are in no part."""

import numpy as np
import torch
from torch import nn

from resumable import RunState


class Walk:
    """Goes left or right until it falls off."""

    def __init__(self):
        self.generator, self.place = np.random.default_rng(5), 0

    def step(self, action):
        self.place += (1 if action else -1) + int(self.generator.integers(-1, 2))
        if abs(self.place) > 6:
            self.place = 0
        return torch.tensor([self.place / 6, 1.0])


torch.manual_seed(1)
env = Walk()
agent = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
state = RunState.load("runs/exp", model=agent, optimizer=optimizer)
next_obs, global_step = env.step(0), 0
for iteration in state.epochs(24):
    chosen, rewards = [], []
    for _ in range(8):
        global_step += 1
        actions = torch.distributions.Categorical(logits=agent(next_obs))
        action = actions.sample()
        chosen.append(actions.log_prob(action))
        next_obs = env.step(int(action))
        rewards.append(1 - abs(float(next_obs[0])))
    loss = -(torch.stack(chosen) * torch.tensor(rewards)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    state.save()
    print(f"global_step={global_step}")
state.close()
