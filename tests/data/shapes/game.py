"""Deep Q-learning in the shape of the tutorial: an environment, a replay memory, a target network."""

import math
import random
from collections import deque, namedtuple

import numpy as np
import torch
from torch import nn

from resumable import RunState

Transition = namedtuple("Transition", ("state", "action", "next_state", "reward"))
BATCH_SIZE, GAMMA, EPS_START, EPS_END, EPS_DECAY, TAU = 4, 0.99, 0.9, 0.05, 20, 0.005


class Walk:
    """A walk on a line, which drifts at random."""

    def __init__(self):
        self.rng = np.random.default_rng(0)
        self.place = 0.0

    def step(self, action):
        self.place += (1 if action else -1) + self.rng.normal()
        done = abs(self.place) > 5
        reward = -abs(self.place)
        if done:
            self.place = 0.0
        return np.array([self.place], dtype=np.float32), reward, done

    def state_dict(self):
        return {"rng": self.rng.bit_generator.state, "place": self.place}

    def load_state_dict(self, saved):
        self.rng.bit_generator.state, self.place = saved["rng"], saved["place"]


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque(maxlen=capacity)

    def push(self, *what):
        self.memory.append(Transition(*what))

    def sample(self, batch_size):
        return random.sample(self.memory, batch_size)

    def __len__(self):
        return len(self.memory)

    def state_dict(self):
        return {"memory": [tuple(one) for one in self.memory]}

    def load_state_dict(self, saved):
        self.memory.extend(Transition(*one) for one in saved["memory"])


random.seed(0)
torch.manual_seed(0)
env, memory = Walk(), ReplayMemory(100)
policy_net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2))
target_net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2))
target_net.load_state_dict(policy_net.state_dict())
optimizer = torch.optim.AdamW(policy_net.parameters(), lr=1e-3)
current = {"observation": torch.zeros(1)}
extra = {"env": env, "memory": memory, "target": target_net, "current": current}
training = RunState.load("runs/exp", model=policy_net, optimizer=optimizer, extra=extra)


def select_action(observation, steps_done):
    eps = EPS_END + (EPS_START - EPS_END) * math.exp(-1.0 * steps_done / EPS_DECAY)
    if random.random() > eps:
        with torch.no_grad():
            return int(policy_net(observation).argmax())
    return random.randrange(2)


def optimize_model():
    if len(memory) < BATCH_SIZE:
        return
    batch = Transition(*zip(*memory.sample(BATCH_SIZE), strict=True))
    values = policy_net(torch.stack(batch.state)).gather(1, torch.tensor(batch.action)[:, None])
    with torch.no_grad():
        following = target_net(torch.stack(batch.next_state)).max(1).values
    expected = following * GAMMA + torch.tensor(batch.reward)
    loss = nn.functional.smooth_l1_loss(values, expected[:, None])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


episode_durations, lost = [], []
length = 0
for step in training.steps(12):
    observation = current["observation"]
    action = select_action(observation, step)
    following, reward, done = env.step(action)
    memory.push(observation, action, torch.from_numpy(following), reward)
    current["observation"] = torch.from_numpy(following)
    optimize_model()
    with torch.no_grad():
        for ours, theirs in zip(target_net.parameters(), policy_net.parameters(), strict=True):
            ours.lerp_(theirs, TAU)
    length += 1
    if done:
        episode_durations.append(length)
        print(f"step {step}: {length} moves")
        length = 0
    if step % 4 == 3:
        lost = training.check()
training.close()
