"""The shape of nanoGPT's train.py: `while True`, a batch fetched ahead, micro steps, estimate_loss()."""

import math

import numpy as np
import torch
from digest import print_digest
from torch import nn
from torch.nn import functional as F

from resumable import RunState

out_dir, eval_interval, eval_iters, log_interval = "out", 8, 3, 3
gradient_accumulation_steps, batch_size, block_size = 2, 4, 8
learning_rate, max_iters, warmup_iters, min_lr, grad_clip = 1e-2, 30, 4, 1e-3, 1.0


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(12, 16), nn.Embedding(block_size, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.lm_head = nn.Linear(16, 12, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        logits = self.lm_head(self.block(x, src_mask=mask, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(split):
    tokens = data[split]
    ix = torch.randint(len(tokens) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(tokens[i : i + block_size]) for i in ix])
    y = torch.stack([torch.from_numpy(tokens[i + 1 : i + 1 + block_size]) for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ["train", "val"]:
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch(split)
            _, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


torch.set_num_threads(1)
torch.manual_seed(1337)
tokens = np.random.default_rng(0).integers(0, 3, 400).cumsum() % 12
data = {"train": tokens[:320], "val": tokens[320:]}
model = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))

state = RunState.load(out_dir, model=model, optimizer=optimizer, scaler=scaler, minimize="val_loss", every=3)
X, Y = state.vars.setdefault("next", get_batch("train"))  # fetch the very first batch
for iter_num in state.steps(max_iters + 1):
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr

    # evaluate the loss on train/val sets and write checkpoints
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")

    for _ in range(gradient_accumulation_steps):
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        # prefetch the next batch while the model is busy with this one
        X, Y = state.vars["next"] = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    if iter_num % log_interval == 0:
        print(f"iter {iter_num}: loss {loss.item() * gradient_accumulation_steps:.4f}")
    if iter_num % eval_interval == 0:
        state.save(val_loss=losses["val"])
state.close()
print_digest(model=model, optimizer=optimizer, scaler=scaler)
