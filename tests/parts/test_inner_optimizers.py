"""Optimizers that step by another one, whose state their own `state_dict()` leaves out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stopping import differences
from torch import nn
from torch.utils.data import DataLoader

from resumable import ResumableWarning, Run, RunState


class Perturbed(torch.optim.Optimizer):
    """Steps by another optimizer, with the gradients beside the weights (sharpness-aware minimization)."""

    def __init__(self, parameters: Any, inner: Callable[..., torch.optim.Optimizer], **settings: Any) -> None:
        super().__init__(parameters, {"rho": 0.1, **settings})
        self.inner = inner(self.param_groups, **settings)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def perturb(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = parameter.clone()
                parameter.add_(group["rho"] * parameter.grad)
        self.zero_grad()

    @torch.no_grad()
    def step_there(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["kept"])
        self.inner.step()
        self.zero_grad()


class Both(torch.optim.Optimizer):
    """Steps by several optimizers, each for some of the parameters."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([parameter for one in inner for parameter in one.param_groups[0]["params"]], {})

    def step(self, closure: Any = None) -> None:
        for one in self.inner:
            one.step()


class WithState(Perturbed):
    """Knows the other's state."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.inner.load_state_dict(state_dict["inner"])


def make(kind: type[Perturbed] = Perturbed) -> dict[str, Any]:
    model = nn.Linear(1, 1)
    return {
        "model": model,
        "optimizer": kind(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
        "loader": DataLoader(torch.arange(6.0).view(6, 1), batch_size=2, shuffle=True),
    }


def train(found: dict[str, Any], batch: torch.Tensor) -> None:
    found["model"](batch).square().mean().backward()
    found["optimizer"].perturb()
    found["model"](batch).square().mean().backward()
    found["optimizer"].step_there()


def loop(state: RunState, found: dict[str, Any], tick: Callable[..., None]) -> None:
    for epoch in state.epochs(3):
        for group in found["optimizer"].param_groups:
            group["lr"] = 0.5**epoch
        for batch in state.batches():
            train(found, batch)
            tick(state.step, [group["lr"] for group in found["optimizer"].inner.param_groups])
        tick()


@pytest.mark.heavy
def test_the_state_of_the_other_is_exact(run_dir: Path) -> None:
    assert differences(run_dir, make, loop, at=(2, 4, 7, 11)) == []


def accumulating(state: RunState, found: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(4):
        for number, batch in state.enumerate():
            found["model"](batch).square().mean().backward()
            if number == 1:
                found["optimizer"].perturb()
                found["model"](batch).square().mean().backward()
                found["optimizer"].step_there()
            tick(state.step, [p.grad for p in found["model"].parameters()])


class Partly(Perturbed):
    """Leaves only the weight to the other one, and writes to the bias itself."""

    def __init__(self, parameters: Any, inner: Callable[..., torch.optim.Optimizer], **settings: Any) -> None:
        weight, bias = parameters
        super().__init__([weight], inner, **settings)
        self.param_groups = [*self.inner.param_groups, {**self.inner.param_groups[0], "params": [bias]}]

    @torch.no_grad()
    def step_there(self) -> None:
        bias = self.param_groups[1]["params"][0]
        bias.sub_(0.1 * bias.grad)
        super().step_there()


@pytest.mark.heavy
def test_gradients_of_what_the_other_does_not_have_are_exact(run_dir: Path) -> None:
    assert differences(run_dir, lambda: make(Partly), accumulating, at=(1, 2, 5, 9)) == []


def test_a_batch_that_only_adds_to_the_gradients_is_no_step(run_dir: Path) -> None:
    found, steps = make(), list[int]()
    with RunState.load(run_dir, **found) as state:
        accumulating(state, found, lambda step, _: steps.append(step))

    assert steps == [0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]


class Keeping(Perturbed):
    """Leaves it to the script to zero the gradients."""

    @torch.no_grad()
    def step_there(self) -> None:
        self.inner.step()


def test_used_gradients_are_not_saved_in_the_middle_of_a_body(run_dir: Path) -> None:
    found = make(Keeping)
    with RunState.load(run_dir, **found) as state:
        for batch in state.batches():
            found["optimizer"].zero_grad()
            found["model"](batch).square().mean().backward()
            found["optimizer"].step_there()
            state.save().wait()
    files = [one.path / "optimizer.safetensors" for one in Run(run_dir).checkpoints()]
    names = {name for file in files for name in load_file(file)}

    assert [name for name in names if "grad" in name] == []


def saved_parts(run_dir: Path) -> list[str]:
    return [name for name in Run(run_dir).checkpoints()[-1].about.parts if name.startswith("optimizer")]


def test_each_optimizer_is_saved_once(run_dir: Path) -> None:
    found = make()
    state_of = {
        "found": found["optimizer"],
        "given": {"a": found["optimizer"], "b": found["optimizer"].inner},
        "its own": make(WithState)["optimizer"],
    }
    for name, optimizer in state_of.items():
        with RunState.load(run_dir / name, optimizer=optimizer) as state:
            state.save()

    assert saved_parts(run_dir / "found") == ["optimizer.inner", "optimizer"]
    assert saved_parts(run_dir / "given") == ["optimizer.b", "optimizer.a"]
    assert saved_parts(run_dir / "its own") == ["optimizer"]


@pytest.mark.heavy
def test_several_are_exact(run_dir: Path) -> None:
    def both() -> dict[str, Any]:
        found = make()
        weight, bias = found["model"].parameters()
        inner = torch.optim.SGD([weight], 0.1, momentum=0.9), torch.optim.Adam([bias], 0.1)
        return {**found, "optimizer": Both(*inner)}

    def several(state: RunState, found: dict[str, Any], tick: Callable[..., None]) -> None:
        for _ in state.epochs(3):
            for batch in state.batches():
                found["optimizer"].zero_grad()
                found["model"](batch).square().mean().backward()
                found["optimizer"].step()
                tick(state.step)

    assert differences(run_dir, both, several, at=(1, 3, 8)) == []


def test_a_checkpoint_without_the_other_is_reported(run_dir: Path) -> None:
    with RunState.load(run_dir, optimizer=make(WithState)["optimizer"]) as state:
        state.save()

    with (
        pytest.warns(ResumableWarning, match=r"steps by another optimizer, .* lacks \(optimizer.inner\)"),
        RunState.load(run_dir, optimizer=make()["optimizer"]),
    ):
        pass
