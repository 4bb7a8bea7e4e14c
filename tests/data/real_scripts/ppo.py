"""The shape of CleanRL's ppo.py: environments whose state lives across updates, epochs of minibatches."""

from dataclasses import dataclass

import numpy as np
import torch
from digest import print_digest
from torch import nn
from torch.distributions import Categorical

NUM_ENVS, NUM_STEPS, NUM_ITERATIONS, UPDATE_EPOCHS, NUM_MINIBATCHES = 4, 8, 6, 2, 2
GAMMA, GAE_LAMBDA, LEARNING_RATE, CLIP_COEF = 0.99, 0.95, 2.5e-3, 0.2


@dataclass
class VectorEnv:
    """Walks on a line, with a drift; each ends where it comes too far."""

    place: np.ndarray
    length: np.ndarray

    def reset(self):
        self.place[:] = env_rng.normal(size=NUM_ENVS)
        self.length[:] = 0
        return self.observe()

    def observe(self):
        return np.stack([self.place, self.length / 10], 1).astype(np.float32)

    def step(self, action):
        self.place += np.where(action == 1, 0.5, -0.5) + 0.3 * env_rng.normal(size=NUM_ENVS)
        self.length += 1
        reward, done = -np.abs(self.place), np.abs(self.place) > 3
        self.place[done], self.length[done] = 0.0, 0
        return self.observe(), reward.astype(np.float32), done


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x).flatten()


torch.set_num_threads(1)
np.random.seed(1)
torch.manual_seed(1)
env_rng = np.random.default_rng(1)
envs = VectorEnv(np.zeros(NUM_ENVS), np.zeros(NUM_ENVS))
agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)

obs = torch.zeros(NUM_STEPS, NUM_ENVS, 2)
actions, logprobs, rewards, dones, values = (torch.zeros(NUM_STEPS, NUM_ENVS) for _ in range(5))
next_obs = torch.tensor(envs.reset())
next_done = torch.zeros(NUM_ENVS)
for iteration in range(NUM_ITERATIONS):
    optimizer.param_groups[0]["lr"] = (1.0 - iteration / NUM_ITERATIONS) * LEARNING_RATE
    for step in range(NUM_STEPS):
        obs[step], dones[step] = next_obs, next_done
        with torch.no_grad():
            action, logprobs[step], _, values[step] = agent.get_action_and_value(next_obs)
        actions[step] = action
        next_obs, reward, next_done = envs.step(action.numpy())
        rewards[step] = torch.tensor(reward)
        next_obs, next_done = torch.tensor(next_obs), torch.tensor(next_done, dtype=torch.float32)

    with torch.no_grad():
        next_value = agent.critic(next_obs).flatten()
        advantages, lastgaelam = torch.zeros_like(rewards), 0
        for t in reversed(range(NUM_STEPS)):
            is_last = t == NUM_STEPS - 1
            nonterminal = 1.0 - (next_done if is_last else dones[t + 1])
            delta = rewards[t] + GAMMA * (next_value if is_last else values[t + 1]) * nonterminal - values[t]
            advantages[t] = lastgaelam = delta + GAMMA * GAE_LAMBDA * nonterminal * lastgaelam
        returns = advantages + values

    b_inds = np.arange(NUM_ENVS * NUM_STEPS)
    for _ in range(UPDATE_EPOCHS):
        np.random.shuffle(b_inds)
        for mb_inds in np.split(b_inds, NUM_MINIBATCHES):
            mb_obs, mb_actions = obs.flatten(0, 1)[mb_inds], actions.flatten()[mb_inds]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(mb_obs, mb_actions)
            ratio = (newlogprob - logprobs.flatten()[mb_inds]).exp()
            mb_advantages = advantages.flatten()[mb_inds]
            clipped = torch.clamp(ratio, 1 - CLIP_COEF, 1 + CLIP_COEF)
            pg_loss = torch.max(-mb_advantages * ratio, -mb_advantages * clipped).mean()
            v_loss = 0.5 * (newvalue - returns.flatten()[mb_inds]).square().mean()
            loss = pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    print(f"iteration {iteration}: reward {rewards.mean().item():.6f}, value loss {v_loss.item():.6f}")
generators = np.random.get_state(), env_rng.bit_generator.state
print_digest(agent=agent, optimizer=optimizer, envs=vars(envs), generators=generators)
