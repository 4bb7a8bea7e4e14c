"""The shape of CleanRL's dqn.py: a replay buffer, an epsilon schedule, a target network."""

import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from digest import print_digest
from torch import nn

TOTAL_TIMESTEPS, LEARNING_STARTS, TRAIN_FREQUENCY, TARGET_FREQUENCY = 160, 20, 2, 25
BATCH_SIZE, BUFFER_SIZE, GAMMA = 16, 100, 0.9


@dataclass
class Env:
    """A walk on a line, with a drift; it ends where it comes too far."""

    place: float = 0.0
    episodic_return: float = 0.0

    def reset(self):
        self.place, self.episodic_return = env_rng.normal(), 0.0
        return np.array([self.place], np.float32)

    def step(self, action):
        self.place += (1 if action else -1) + 0.5 * env_rng.normal()
        reward, done = -abs(self.place), abs(self.place) > 4
        self.episodic_return += reward
        return np.array([self.place], np.float32), reward, done


class ReplayBuffer:
    def __init__(self, size):
        self.obs, self.next_obs = np.zeros((size, 1), np.float32), np.zeros((size, 1), np.float32)
        self.actions, self.rewards = np.zeros(size, np.int64), np.zeros(size, np.float32)
        self.dones = np.zeros(size, np.float32)
        self.size, self.pos, self.full = size, 0, False

    def add(self, obs, next_obs, action, reward, done):
        at = self.pos
        self.obs[at], self.next_obs[at] = obs, next_obs
        self.actions[at], self.rewards[at], self.dones[at] = action, reward, done
        self.pos = (at + 1) % self.size
        self.full |= self.pos == 0

    def sample(self, batch_size):
        at = np.random.randint(0, self.size if self.full else self.pos, batch_size)
        arrays = self.obs, self.next_obs, self.actions, self.rewards, self.dones
        return [torch.from_numpy(array[at]) for array in arrays]


def linear_schedule(start_e, end_e, duration, t):
    return max((end_e - start_e) / duration * t + start_e, end_e)


def make_network():
    return nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 2))


torch.set_num_threads(1)
random.seed(1)
np.random.seed(1)
torch.manual_seed(1)
env_rng = np.random.default_rng(1)
env = Env()
q_network, target_network = make_network(), make_network()
target_network.load_state_dict(q_network.state_dict())
optimizer = torch.optim.Adam(q_network.parameters(), lr=2.5e-3)
rb = ReplayBuffer(BUFFER_SIZE)

obs = env.reset()
for global_step in range(TOTAL_TIMESTEPS):
    epsilon = linear_schedule(1.0, 0.05, 80, global_step)
    if random.random() < epsilon:
        action = random.randrange(2)
    else:
        action = q_network(torch.from_numpy(obs)).argmax().item()
    next_obs, reward, done = env.step(action)
    if done:
        print(f"global_step={global_step}, episodic_return={env.episodic_return:.6f}")
    rb.add(obs, next_obs, action, reward, done)
    obs = env.reset() if done else next_obs

    if global_step > LEARNING_STARTS and global_step % TRAIN_FREQUENCY == 0:
        b_obs, b_next_obs, b_actions, b_rewards, b_dones = rb.sample(BATCH_SIZE)
        with torch.no_grad():
            td_target = b_rewards + GAMMA * target_network(b_next_obs).amax(1) * (1 - b_dones)
        old_val = q_network(b_obs).gather(1, b_actions[:, None]).squeeze(1)
        loss = F.mse_loss(td_target, old_val)
        if global_step % 10 == 0:
            print(f"global_step={global_step}, td_loss={loss.item():.6f}, q={old_val.mean().item():.6f}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if global_step > LEARNING_STARTS and global_step % TARGET_FREQUENCY == 0:
        target_network.load_state_dict(q_network.state_dict())
generators = random.getstate(), np.random.get_state(), env_rng.bit_generator.state
networks = {"q": q_network.state_dict(), "target": target_network.state_dict()}
memory = {"rb": vars(rb), "env": vars(env), "obs": obs}
print_digest(networks=networks, optimizer=optimizer, memory=memory, generators=generators)
