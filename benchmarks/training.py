"""The trainings whose state is saved: a GPT, ten layers of which some are frozen, many small tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn import functional

Parts = Mapping[str, Any]
"""What is saved, by name; each has `state_dict` and `load_state_dict`."""


@dataclass
class Training:
    """The parts of a training, and what does one step of it."""

    parts: Parts
    step: Callable[[], object]
    device: str = "cpu"
    step_seconds: float = 0.0
    _own: dict[torch.Tensor, dict[str, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.step()
        self.step_seconds = statistics.median(self.steps(1) for _ in range(3))
        if optimizer := self.parts.get("optimizer"):
            self._own = {parameter: dict(state) for parameter, state in optimizer.state.items()}

    def steps(self, count: int) -> float:
        """Do so many steps and return how long they take."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        self.synchronize()
        return time.perf_counter() - start

    def each(self, count: int, *, reads: bool = False, ends: bool = True) -> list[float]:
        """Do so many steps and return how long each takes.

        `reads` the loss after each, as a script does that prints it. If it `ends`, the last step takes until
        the device is done.
        """
        found, last = [], time.perf_counter()
        for left in range(count - 1, -1, -1):
            loss = self.step()
            if reads and isinstance(loss, torch.Tensor):
                loss.item()
            if ends and not left:
                self.synchronize()
            now = time.perf_counter()
            found.append(now - last)
            last = now
        return found

    def synchronize(self) -> None:
        """Wait for what the device has been told to do."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def settle(self) -> None:
        """Move what a load left in the optimizer back into the optimizer's own memory.

        Optimizer.load_state_dict keeps the tensors that it is given: the next contender would train on
        pages of a file of the one before.
        """
        for parameter, own in self._own.items():
            state = self.parts["optimizer"].state[parameter]
            for name, tensor in own.items():
                if state[name] is not tensor:
                    state[name] = tensor.copy_(state[name])


def gpt_parts(megabytes: float, device: str) -> dict[str, Any]:
    """Return a GPT and an AdamW that has no moments yet; with them the state takes so much.

    GPT-2 small at 1493 MB, GPT-2 medium at 4257.
    """
    parameters = megabytes * 1e6 / 12
    width = 1024 if parameters > 3e8 else 768 if parameters > 3e7 else 256 if parameters > 3e6 else 64
    blocks = max(1, round(0.68 * parameters / (12 * width * width)))
    words = max(256, round((parameters - blocks * 12 * width * width) / width))
    model = Gpt(width, blocks, words).to(device)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)}


def gpt(megabytes: float, device: str) -> Training:
    """Return the training of a GPT whose weights and AdamW moments take so much."""
    parts = gpt_parts(megabytes, device)
    model, optimizer = parts["model"], parts["optimizer"]
    shape = (8, 1024) if device == "cuda" else (1, 64)
    tokens = torch.randint(0, model.words.num_embeddings, shape, device=device)

    def step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(parts, step, device)


class Gpt(nn.Module):
    """A small GPT with tied embeddings."""

    def __init__(self, width: int, blocks: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the words."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.words.weight)


class Block(nn.Module):
    """Attention and two layers after it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the next block gets."""
        query, key, value = self.mix(self.before(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.narrow(functional.gelu(self.wide(self.between(x))))
        return out


def layers(megabytes: float, device: str, trained: int) -> Training:
    """Return the training of ten equal layers of which the last `trained` are not frozen."""
    side = max(8, round((megabytes * 1e6 / 40) ** 0.5))
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(10))).to(device)
    model[: 10 - trained].requires_grad_(False)
    # Without moments, so that nine frozen layers are 90 % of the bytes.
    optimizer = torch.optim.SGD(model[10 - trained :].parameters(), lr=1e-3)
    inputs = torch.ones(1, side, device=device)

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        # The vanishing gradients of the first layers may leave their weights as they were.
        with torch.no_grad():
            for weight in model[10 - trained :].parameters():
                weight.mul_(0.999)
        optimizer.zero_grad()

    return Training({"model": model, "optimizer": optimizer}, step, device)


class Tensors:
    """Many small tensors that are no module: what a save or a load of them costs is the library's alone."""

    def __init__(self, count: int, device: str) -> None:
        self.tensors = {f"tensor{index:05}": torch.randn(64, device=device) for index in range(count)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors."""
        return dict(self.tensors)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy into the tensors."""
        torch._foreach_copy_(list(self.tensors.values()), [state[name] for name in self.tensors])


def small_tensors(count: int, device: str) -> Training:
    """Return a training of so many tensors of 256 bytes, which are all there is to it."""
    tensors = Tensors(count, device)
    values = list(tensors.tensors.values())
    return Training({"tensors": tensors}, lambda: torch._foreach_add_(values, 1.0), device)


def small_parameters(count: int, device: str) -> Training:
    """Return a training of so many parameters of 256 bytes, of one module."""
    model = nn.Module()
    for name, tensor in Tensors(count, device).tensors.items():
        model.register_parameter(name, nn.Parameter(tensor))
    values = [parameter.detach() for parameter in model.parameters()]
    return Training({"model": model}, lambda: torch._foreach_add_(values, 1.0), device)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors of a tree, in its order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def tensors_of(parts: Parts) -> list[torch.Tensor]:
    """Return all tensors of the state, live."""
    return [tensor for part in parts.values() for tensor in tensors_in(part.state_dict())]


def bytes_of(parts: Parts) -> int:
    """Return how many bytes the tensors of the state take."""
    return sum(tensor.nbytes for tensor in tensors_of(parts))


def digest(parts: Parts) -> str:
    """Return what tells this state from all others."""
    total = xxhash.xxh3_128()
    for tensor in tensors_of(parts):
        total.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
