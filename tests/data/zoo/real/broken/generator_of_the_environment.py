"""Broken, after pytorch/examples reinforce: the generator of the environment is in no part."""

import sys
import types

import numpy as np
import torch
from torch import nn

from resumable import RunState

# A library's class: in the shape of gymnasium, with one environment around another.
gym = types.ModuleType("gym_installed")
gym.__file__ = "/usr/lib/python3/site-packages/gym_installed/__init__.py"
sys.modules[gym.__name__] = gym
exec(
    """
class Wrapper:
    def __init__(self, env):
        self.env = env
    def reset(self):
        return self.env.reset()

class CartPole:
    def __init__(self, generator):
        self._np_random = generator
    def reset(self):
        return self._np_random.uniform(-0.05, 0.05, size=4).astype("float32")
""",
    gym.__dict__,
)
env = gym.CartPole(np.random.default_rng(543))
for _ in range(3):
    env = gym.Wrapper(env)

torch.manual_seed(543)
policy = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.6), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
state = RunState.load("runs/exp", model=policy, optimizer=optimizer)
for episode in state.steps(24):
    place, chosen = torch.from_numpy(env.reset()), []
    for _ in range(4):
        actions = torch.distributions.Categorical(logits=policy(place))
        action = actions.sample()
        chosen.append(actions.log_prob(action) * (1 - place.abs().sum()))
        place = place + 0.02 * (2 * action - 1)
    optimizer.zero_grad()
    (-torch.stack(chosen).sum()).backward()
    optimizer.step()
state.close()
