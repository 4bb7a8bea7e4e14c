"""A character GPT in the style of nanoGPT: batches drawn at random, warm-up and cosine, the best weights.

python examples/gpt.py runs/gpt
"""

import argparse
import hashlib
import math
from pathlib import Path

import torch
from torch import nn

from resumable import RunState

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", nargs="?", default="runs/gpt", help="the run directory")
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "docs" / "guarantees.md")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

text = args.text.read_text()
characters = sorted(set(text))
data = torch.tensor([characters.index(one) for one in text])
train_data, test_data = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]
context, width, heads, layers, micro_batches = 64, 64, 4, 2, 2
warm_up, peak = 50, 3e-3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (*x.shape[:2], heads, width // heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).reshape(x.shape)))
        return x + self.dropout(self.mlp(self.between(x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(characters), width)
        self.places = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, len(characters), bias=False)
        self.head.weight = self.letters.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(0.1 * self.letters(x) + self.places[: x.shape[1]]))


def get_batch(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - context, (16,)).tolist()
    x = torch.stack([data[start : start + context] for start in starts])
    y = torch.stack([data[start + 1 : start + context + 1] for start in starts])
    return x.to(args.device), y.to(args.device)


def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def learning_rate(step: int) -> float:
    done = (step - warm_up) / max(1, args.steps - warm_up)
    return peak * min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * max(0.0, done)))


@torch.no_grad()
def test_loss() -> float:
    model.eval()
    loss = torch.stack([loss_of(get_batch(test_data)) for _ in range(10)]).mean().item()
    model.train()
    return loss


torch.manual_seed(0)
model = GPT().to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
state = RunState.load(args.run, model=model, optimizer=optimizer, minimize="test_loss", every=10)
for step in state.steps(args.steps):
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step)
    optimizer.zero_grad()
    for _ in range(micro_batches):
        loss = loss_of(get_batch(train_data)) / micro_batches
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    state.mean(loss=micro_batches * loss)
    if state.step % (args.steps // 5) == 0:
        loss = state.means.reset()["loss"]
        state.save(test_loss=test_loss(), loss=loss)
        print(f"step {state.step}: loss {loss:.3f}, best {state.best:.3f}", flush=True)

weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
print("weights", hashlib.sha256(weights).hexdigest()[:16])

state.restore("best", only="model")
state.close()
model.eval()
written = data[:1][None].to(args.device)
for _ in range(200):
    chances = model(written[:, -context:])[:, -1].softmax(-1)
    written = torch.cat([written, torch.multinomial(chances, 1)], 1)
print("".join(characters[one] for one in written[0].tolist()))
