"""Gradients that are on their way to a later step."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from stopping import differences
from torch import nn
from torch.utils.data import DataLoader

from resumable import ResumableWarning, RunState


def make(loader: bool = False) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    if loader:
        objects["loader"] = DataLoader(torch.arange(12.0).view(6, 2) / 12, 1)
    return objects


def backward(objects: dict[str, Any], x: torch.Tensor) -> None:
    objects["model"](x).square().mean().backward()


def step(objects: dict[str, Any]) -> None:
    objects["optimizer"].step(), objects["optimizer"].zero_grad()


def window_of_steps(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for number in state.steps(6):
        backward(objects, torch.randn(2, 2))
        if number % 3 == 2:
            step(objects)
        tick(objects["model"].weight)


def window_by_hand(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for number in range(state.vars.get("done", 0), 6):
        backward(objects, torch.randn(2, 2))
        if number % 3 == 2:
            step(objects)
        state.vars["done"] = number + 1
        tick(objects["model"].weight)


def window_over_epochs(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for epoch in state.epochs(4):
        for number in (2 * epoch, 2 * epoch + 1):
            backward(objects, torch.randn(2, 2))
            if number % 3 == 2:
                step(objects)
        tick(objects["model"].weight)


def window_with_a_break(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for epoch in state.epochs(4):
        for x in state.batches():
            if state.batch == 2:
                break
            backward(objects, x)
            if (epoch + state.batch) % 3 == 2:
                step(objects)
            tick(objects["model"].weight)


def window_with_an_error(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(3):
        for x in state.batches():
            try:
                backward(objects, x)
                if state.batch == 1:
                    raise MemoryError
                step(objects)
            except MemoryError:
                pass
            tick(objects["model"].weight)


@pytest.mark.parametrize("loop", [window_with_a_break, window_with_an_error])
@pytest.mark.heavy
def test_a_window_that_a_break_or_an_error_lengthens_is_exact(run_dir: Path, loop: Any) -> None:
    assert differences(run_dir, lambda: make(loader=True), loop) == []


@pytest.mark.quick(3)
@pytest.mark.parametrize("loop", [window_of_steps, window_by_hand, window_over_epochs])
def test_a_window_over_several_bodies_is_exact(run_dir: Path, loop: Any) -> None:
    assert differences(run_dir, make, loop) == []


def step_and_more(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(2):
        for x in state.batches():
            backward(objects, x)
            if state.batch % 2:
                step(objects)
                backward(objects, -x)
            tick(objects["model"].weight)


def decayed(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(2):
        for x in state.batches():
            for parameter in objects["model"].parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
            backward(objects, x)
            objects["optimizer"].step()
            tick(objects["model"].weight)


@pytest.mark.heavy
def test_gradients_that_are_made_after_a_step_are_exact(run_dir: Path) -> None:
    assert differences(run_dir, lambda: make(loader=True), step_and_more) == []


@pytest.mark.filterwarnings("ignore:this script keeps gradients after a step")
@pytest.mark.heavy
def test_gradients_that_are_kept_are_exact_once_that_was_seen(run_dir: Path) -> None:
    assert differences(run_dir, lambda: make(loader=True), decayed) == [1]


def save_before_zero(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(2):
        for x in state.batches():
            backward(objects, x)
            objects["optimizer"].step()
            tick(objects["model"].weight)
            objects["optimizer"].zero_grad()


@pytest.mark.heavy
def test_a_save_between_the_step_and_zero_grad_is_exact(run_dir: Path) -> None:
    assert differences(run_dir, lambda: make(loader=True), save_before_zero, at=(1, 4, 6, 9)) == []


def zero_before_steps(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    objects["optimizer"].zero_grad()
    window_of_steps(state, objects, tick)


def zero_before_steps_by_hand(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    objects["optimizer"].zero_grad()
    window_by_hand(state, objects, tick)


def zero_before_batches(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(2):
        objects["optimizer"].zero_grad()
        for x in state.batches():
            backward(objects, x)
            if state.batch % 2:
                step(objects)
            tick(objects["model"].weight)


@pytest.mark.parametrize("loop", [zero_before_steps, zero_before_steps_by_hand, zero_before_batches])
@pytest.mark.heavy
def test_zero_grad_before_the_loop_keeps_the_gradients_of_a_resumed_window(run_dir: Path, loop: Any) -> None:
    assert differences(run_dir, lambda: make(loader=loop is zero_before_batches), loop) == []


def save_in_first_body(run_dir: Path) -> None:
    objects = make()
    with RunState.load(run_dir, **objects) as state:
        for _ in state.steps(1):
            backward(objects, torch.ones(1, 2))
            objects["optimizer"].step()
            state.save()


def test_a_resume_from_a_checkpoint_that_lacks_kept_gradients_is_reported(run_dir: Path) -> None:
    save_in_first_body(run_dir)

    objects = make()
    with RunState.load(run_dir, **objects) as state:
        for step in state.steps(3):
            context = (
                pytest.warns(ResumableWarning, match="resumed from lacks them")
                if step == 2
                else contextlib.nullcontext()
            )
            with context:
                backward(objects, torch.ones(1, 2))
            objects["optimizer"].step()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_checkpoint_that_lacks_kept_gradients_is_known_two_resumes_later(run_dir: Path, steps: int) -> None:
    save_in_first_body(run_dir)
    for _ in range(2):
        objects = make()
        with RunState.load(run_dir, **objects) as state:
            for _ in state.steps(state.step + steps):
                backward(objects, torch.ones(1, 2))
                objects["optimizer"].step()
            state.save()

    objects = make()
    with RunState.load(run_dir, **objects) as state:
        for _ in state.steps(state.step + 1):
            backward(objects, torch.ones(1, 2))
            objects["optimizer"].step()
        with pytest.warns(ResumableWarning, match="resumed from lacks them"):
            backward(objects, torch.ones(1, 2))
        objects["optimizer"].step()
        state.save()

    # This one has them.
    written = json.loads((run_dir / "newest" / "state.json").read_text())
    assert written["optimizer"]["optimizer"]["left_out"] is False


def test_a_script_that_zeroes_its_gradients_first_lacks_nothing(run_dir: Path) -> None:
    save_in_first_body(run_dir)

    objects = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with RunState.load(run_dir, **objects) as state:
            for step in state.steps(5):
                if step < 3:
                    objects["optimizer"].zero_grad()
                backward(objects, torch.ones(1, 2))
                objects["optimizer"].step()


def test_gradients_of_a_window_that_are_zeroed_in_place_are_warned_of(run_dir: Path) -> None:
    objects = make()
    with RunState.load(run_dir, **objects) as state:
        for number in state.steps(4):
            backward(objects, torch.ones(1, 2))
            if number == 1:
                state.save().wait()
    again = make()
    with RunState.load(run_dir, **again, resume=1) as state:
        again["optimizer"].zero_grad(set_to_none=False)
        with pytest.warns(ResumableWarning, match="zeroed the gradients of a window"):
            next(state.steps(4))


@pytest.mark.heavy
def test_the_second_optimizer_steps_now_and_then(run_dir: Path) -> None:
    def two() -> dict[str, Any]:
        model = nn.ModuleDict({"d": nn.Linear(2, 1), "g": nn.Linear(2, 2)})
        parts = {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in model}
        return {"model": model, "optimizer": parts}

    def loop(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
        model, optimizers = objects["model"], objects["optimizer"]
        for number in state.steps(6):
            x = torch.randn(3, 2)
            optimizers["d"].zero_grad()
            model["d"](model["g"](x).detach()).square().mean().backward()
            optimizers["d"].step()
            model["g"](x).square().mean().backward()
            if number % 3 == 2:
                optimizers["g"].step(), optimizers["g"].zero_grad()
            tick(model.state_dict())

    assert differences(run_dir, two, loop, at=(1, 2, 3)) == []


def saved(run_dir: Path) -> list[str]:
    with safe_open(run_dir / "newest" / "optimizer.safetensors", "pt") as file:
        return [name for name in file.keys() if name.startswith("gradients")]  # noqa: SIM118


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zero_first", [True, False])
def test_used_gradients_are_not_saved(run_dir: Path, zero_first: bool, set_to_none: bool) -> None:
    objects = make()
    objects["optimizer"] = torch.optim.Adam(objects["model"].parameters())
    with RunState.load(run_dir, **objects) as state:
        for _ in state.steps(4):
            if zero_first:
                objects["optimizer"].zero_grad(set_to_none)
            backward(objects, torch.ones(1, 2))
            objects["optimizer"].step()
            if not zero_first:
                objects["optimizer"].zero_grad(set_to_none)
        state.save()

    assert saved(run_dir) == []


def test_used_gradients_that_may_be_kept_are_saved_at_an_epochs_end(run_dir: Path) -> None:
    objects = make(loader=True)
    with RunState.load(run_dir, **objects, progress=False) as state:
        for _ in state.epochs(1):
            for x in state.batches():
                backward(objects, x)
                objects["optimizer"].step()
                break
            state.save()

    assert saved(run_dir) != []


def test_gradients_that_are_kept_from_a_late_step_on_are_reported(run_dir: Path) -> None:
    objects = make()
    with RunState.load(run_dir, **objects) as state:
        for step in state.steps(7):
            if step != 6:
                objects["optimizer"].zero_grad()
            if step == 6:
                with pytest.warns(ResumableWarning, match="this script keeps gradients after a step.*R14"):
                    backward(objects, torch.ones(1, 2))
            else:
                backward(objects, torch.ones(1, 2))
            objects["optimizer"].step()
            state.save()

    assert saved(run_dir) != []


@pytest.mark.parametrize("is_kept", [True, False], ids=["in place", "to none"])
def test_saves_between_windows_of_a_foreign_optimizer_lose_nothing(run_dir: Path, is_kept: bool) -> None:
    objects = make()
    optimizer = objects.pop("optimizer")
    with RunState.load(run_dir, **objects) as state, warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(state.step, 6):
            backward(objects, torch.ones(1, 2))
            if number % 2:
                optimizer.step()
                state.save()
                optimizer.zero_grad(set_to_none=not is_kept)
                state.save()
