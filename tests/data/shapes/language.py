"""A language model in the shape of nanoGPT's train.py: flat, with its settings as globals."""

import math
import time

import torch
from torch import nn

from resumable import RunState

eval_interval, eval_iters, log_interval = 2, 2, 1
gradient_accumulation_steps, batch_size, block_size = 2, 4, 8
learning_rate, warmup_iters, max_iters, min_lr = 1e-2, 2, 6, 1e-3

torch.manual_seed(1337)
data = {"train": torch.randint(32, (400,)), "val": torch.randint(32, (100,))}


def get_batch(split):
    source = data[split]
    ix = torch.randint(len(source) - block_size - 1, (batch_size,))
    x = torch.stack([source[i : i + block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.lm_head.weight = nn.Parameter(self.wte.weight)

    def forward(self, idx, targets):
        logits = self.lm_head(self.wte(idx))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def estimate_mfu(self, fwdbwd_per_iter, dt):
        return fwdbwd_per_iter * sum(p.numel() for p in self.parameters()) / dt / 312e12


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            losses[k] = model(*get_batch(split))[1].item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    decay_ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
state = RunState.load("runs/exp", model=model, optimizer=optimizer)
best_val_loss = state.vars.get("best_val_loss", 1e9)
running_mfu = -1.0
t0 = time.time()
lost = []
for iter_num in state.steps(max_iters):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    for _ in range(gradient_accumulation_steps):
        X, Y = get_batch("train")
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    dt = t1 - t0
    t0 = t1
    if iter_num % log_interval == 0:
        lossf = loss.item() * gradient_accumulation_steps
        mfu = model.estimate_mfu(batch_size * gradient_accumulation_steps, dt)
        running_mfu = mfu if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 * mfu
        print(f"iter {iter_num}: loss {lossf:.4f}, time {dt * 1000:.2f}ms, mfu {running_mfu * 100:.2f}%")
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"].item()
            state.vars["best_val_loss"] = best_val_loss
            state.save()
    if iter_num % 2:
        lost = state.check()
state.close()
