"""Random trainings: any tree of modules, any tree of values, stopped twice, continues as if never stopped."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import compare
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from resumable import RunState
from resumable.files import codec, tensor_file

MORE = 5
"""Steps after each stop."""

LAYERS = {
    "linear": lambda: nn.Linear(4, 4),
    "norm": lambda: nn.BatchNorm1d(4),
    "layernorm": lambda: nn.LayerNorm(4),
    "dropout": lambda: nn.Dropout(0.3),
    "prelu": nn.PReLU,
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
SCHEDULES = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 7),
    "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40, cycle_momentum=False),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
}

modules = st.recursive(
    st.sampled_from(sorted(LAYERS)), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=6
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


class Training:
    """One training made of random things, and what it does in a step."""

    def __init__(self, tree: Any, optimizer: str, schedule: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 4), made(tree))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler: Any = SCHEDULES[schedule](self.optimizer)
        self.log: dict[str, Any] = {"history": []}

    def state(self, run_dir: Path) -> RunState:
        return RunState.load(run_dir, **self.parts())

    def parts(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**parts, "extra": {"log": self.log}}

    def train(self, state: RunState, total: int, value: Any) -> None:
        for _ in state.steps(total):
            loss = self.model(torch.randn(6, 4)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            plateau = isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(loss.item()) if plateau else self.scheduler.step()
            self.log["history"].append((state.step, value))
            state.vars["last"] = value

    def picture(self, state: RunState) -> tuple[str, list[bytes]]:
        whole = [self.model.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()]
        encoded = codec.encode([*map(dict, whole), self.log, state.vars, torch.rand(3)])
        return repr(encoded.json), [bytes(tensor_file.as_bytes(t)) for t in encoded.tensors.values()]


def made(tree: Any) -> nn.Module:
    return LAYERS[tree]() if isinstance(tree, str) else nn.Sequential(*map(made, tree))


@pytest.mark.heavy
@pytest.mark.proves("exact")
@settings(max_examples=20, deadline=None)
@given(
    modules, st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from(sorted(SCHEDULES)), plain, st.integers(1, 4)
)
def test_any_training_continues_after_two_resumes_as_if_never_stopped(
    tree: Any, optimizer: str, schedule: str, value: Any, first: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        straight = Training(tree, optimizer, schedule, seed=0)
        with straight.state(Path(folder, "straight")) as state:
            straight.train(state, first + 2 * MORE, value)
            expected = straight.picture(state)

        stopped = Training(tree, optimizer, schedule, seed=0)
        for total in (first, first + MORE, first + 2 * MORE):
            with stopped.state(Path(folder, "stopped")) as state:
                stopped.train(state, total, value)
                seen = stopped.picture(state) if total == first + 2 * MORE else None
                state.save()
            if seen is None:
                stopped = Training(tree, optimizer, schedule, seed=total)

    trails = (compare.trail_of(total, one.parts(), ["torch"]) for one in (straight, stopped))
    assert seen == expected, compare.first(*trails)
