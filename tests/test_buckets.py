"""Gradients are summed in the same order after a resume, so that the sums are rounded the same."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from resumable import buckets, codec
from resumable.modules import ModulePart
from resumable.part import Saved

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without processes")

STEPS = 7


class Net(nn.Module):
    """Layers that take several buckets; two of them can swap places from one step to the next."""

    def __init__(self, swaps: bool = False, unused: bool = False, mixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 120)
        self.middle = nn.ModuleList(nn.Linear(120, 120) for _ in range(3))
        self.last = nn.Linear(120, 3)
        self.swaps, self.step = swaps, 0
        if unused:
            self.unused = nn.Linear(4, 4)
        if mixed:
            self.middle[1].double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        for layer in reversed(self.middle) if self.swaps and self.step % 2 else self.middle:
            hidden = torch.tanh(layer(hidden.to(layer.weight.dtype)))
        out: Tensor = self.last(hidden.float())
        return out


class Training:
    """A model in DDP and its optimizer, as a new process makes them."""

    def __init__(self, net: dict[str, Any], ddp: dict[str, Any], prepare: Callable[[Any], None]) -> None:
        self.model = Net(**net)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.05, **ddp)
        prepare(self.ddp)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.part = ModulePart("model", self.ddp, "model")

    def train(self, rank: int, begin: int, end: int, window: int) -> list[str]:
        hashes = []
        for step in range(begin, end):
            self.model.step = step
            for micro in range(window):
                seed = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                with self.ddp.no_sync() if micro < window - 1 else contextlib.nullcontext():
                    self.ddp(torch.randn(4, 20, generator=seed)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            content = b"".join(parameter.detach().numpy().tobytes() for parameter in self.model.parameters())
            hashes.append(hashlib.sha256(content).hexdigest())
        return hashes

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        trees = {stem: codec.encode({"model": tree}) for stem, tree in self.part.collect().items()}
        return copy.deepcopy(trees), copy.deepcopy(self.optimizer.state_dict())

    def load(self, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
        trees, optimizer = saved
        self.part.restore(Saved(trees, "model"), set(), set())
        self.optimizer.load_state_dict(optimizer)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Any], None], int, int]] = {
    # what the model is, how DDP is made, what is done with it then, batches a step, from which step on
    "plain": ({}, {}, lambda ddp: None, 1, 1),
    "accumulating": ({}, {}, lambda ddp: None, 2, 1),
    "views": ({}, {"gradient_as_bucket_view": True}, lambda ddp: None, 1, 1),
    # (what the first step was like, nothing tells)
    "static": ({}, {"static_graph": True}, lambda ddp: None, 1, 2),
    "static, unused": ({"unused": True}, {"static_graph": True}, lambda ddp: None, 1, 2),
    "unused": ({"unused": True}, {"find_unused_parameters": True}, lambda ddp: None, 1, 1),
    "another order at each step": ({"swaps": True}, {}, lambda ddp: None, 1, 1),
    "two dtypes": ({"mixed": True}, {}, lambda ddp: None, 1, 1),
    "a hook": ({}, {}, lambda ddp: ddp.register_comm_hook(None, fp16_compress_hook), 1, 1),
    "torch's hook": (
        {},
        {},
        lambda ddp: ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS),
        1,
        1,
    ),
}
FORGETS = "forgets"


def _run(rank: int, names: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return what each training was like, straight and stopped at every two of its steps."""
    found = {}
    for name in names:
        *made, window, first = CASES[name.removesuffix(FORGETS).strip()]
        found[name] = [Training(*made).train(rank, 0, STEPS, window)]
        for stops in ((first, first + 1, STEPS), (first + 1, first + 3, STEPS)):
            hashes, begin, saved = [], 0, None
            for end in stops:
                training = Training(*made)
                if saved:
                    training.load(saved)
                hashes += training.train(rank, begin, end, window)
                begin, saved = end, training.save()
                if name.endswith(FORGETS):
                    saved[0]["extra"].json["model"].pop("buckets", None)
            found[name].append(hashes)
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[processes.Ended]:
    names = [*CASES, f"plain {FORGETS}", f"static {FORGETS}"]
    return processes.run(4, _run, names, folder=tmp_path_factory.mktemp("ranks"), limit=90)


@pytest.mark.parametrize("name", CASES)
def test_a_training_of_four_processes_that_was_stopped_twice_is_the_same_to_the_bit(
    ended: list[processes.Ended], name: str
) -> None:
    for rank in ended:
        assert rank.error is None
        straight, *stopped = rank.value[name]
        assert stopped == [straight, straight]


@pytest.mark.parametrize("name", ["plain", "static"])
def test_who_forgets_the_order_rounds_otherwise(ended: list[processes.Ended], name: str) -> None:
    # Were this to hold no more, torch would not need us; the tests above would say nothing.
    straight, *stopped = ended[0].value[f"{name} {FORGETS}"]

    assert all(hashes[0] == straight[0] and hashes != straight for hashes in stopped)
