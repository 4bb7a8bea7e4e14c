"""What a script draws outside its loops, and where a resume puts the generators back."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stopping import differences
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from resumable import Preempt, Preempted, ResumableWarning, RunState

RAISES = {"preempt": Preempt(on_preempt="raise")}


def train(objects: dict[str, Any], x: torch.Tensor) -> None:
    objects["optimizer"].zero_grad()
    objects["model"](x).square().mean().backward()
    objects["optimizer"].step()


def make(loaders: int = 1) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2), nn.Linear(2, 1))
    data = torch.arange(12.0).view(6, 2) / 12
    found = {name: DataLoader(data, 2, shuffle=True) for name in "ab"[:loaders]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "loader": found if loaders > 1 else found["a"]}


def without_loader() -> dict[str, Any]:
    objects = make()
    del objects["loader"]
    return objects


def counted_in_vars(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for done in range(state.vars.get("done", 0), 4):
        x = torch.randn(2, 2)
        train(objects, x)
        state.vars["done"] = done + 1
        tick(x)


def epochs_by_hand(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in range(state.epoch, 3):
        for x in state.batches():
            train(objects, x)
            tick(x)


def epochs_in_a_while_loop(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    while state.epoch < 3:
        strength = torch.rand(2)
        for x in state.batches():
            train(objects, x * strength)
            tick(x, strength)
        torch.randn(3)


def two_phases(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(1):
        for x in state.batches():
            train(objects, x)
            tick(x)
    between = torch.randn(2)
    for _ in state.epochs(2):
        for x in state.batches():
            train(objects, x)
            tick(x, between)


def a_loader_for_each_phase(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for total, name in ((1, "a"), (2, "b")):
        for _ in state.epochs(total):
            for x in state.batches(name):
                train(objects, x)
                tick(x)


def steps_then_epochs(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.steps(3):
        x = torch.randn(2, 2)
        train(objects, x)
        tick(x)
    for _ in state.epochs(2):
        for x in state.batches():
            train(objects, x)
            tick(x)


def draw_before_steps_in_an_epoch(state: RunState, objects: Any, tick: Callable[..., None]) -> None:
    for epoch in state.epochs(2):
        order = torch.randperm(5)
        for _ in state.steps(3 * (epoch + 1)):
            x = torch.randn(2, 2)
            train(objects, x)
            tick(x, order)


def draw_before_next(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(2):
        batches = iter(state.batches())
        while True:
            noise = torch.randn(2, 2)
            if (x := next(batches, None)) is None:
                break
            train(objects, x + noise)
            tick(x, noise)


@pytest.mark.filterwarnings("ignore:random numbers are drawn before next")
@pytest.mark.parametrize(
    ("loop", "objects"),
    [
        (counted_in_vars, without_loader),
        (epochs_by_hand, make),
        (epochs_in_a_while_loop, make),
        (two_phases, make),
        (a_loader_for_each_phase, lambda: make(loaders=2)),
        (steps_then_epochs, make),
        (draw_before_steps_in_an_epoch, without_loader),
        (draw_before_next, make),
    ],
)
@pytest.mark.quick(9)
def test_draws_around_the_loops_are_exact(run_dir: Path, loop: Any, objects: Any) -> None:
    assert differences(run_dir, objects, loop) == []


def noise_then_epochs(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    fixed = torch.randn(2) + nn.Linear(2, 2).bias + random.random() + float(np.random.rand())
    for _ in state.epochs(3):
        for x in state.batches():
            train(objects, x + fixed)
            tick(x, fixed)


def noise_then_steps(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    fixed = torch.randn(2)
    for _ in state.steps(4):
        x = torch.randn(2, 2) + fixed
        train(objects, x)
        tick(x, fixed)


def noise_then_steps_by_hand(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    fixed = torch.randn(2)
    for _ in range(state.step, 4):
        x = torch.randn(2, 2) + fixed
        train(objects, x)
        tick(x, fixed)


def noise_of_its_own_generator(state: RunState, objects: Any, tick: Callable[..., None]) -> None:
    noise = objects["extra"]["noise"]
    fixed = torch.rand(2, generator=noise)
    for _ in state.epochs(2):
        for x in state.batches():
            train(objects, x + torch.rand(2, generator=noise))
            tick(x, fixed)


def make_with_a_generator() -> dict[str, Any]:
    return {**make(), "extra": {"noise": torch.Generator().manual_seed(3)}}


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("loop", "objects"),
    [
        (noise_then_epochs, make),
        (noise_then_steps, without_loader),
        (noise_then_steps_by_hand, without_loader),
        (noise_of_its_own_generator, make_with_a_generator),
    ],
)
def test_draws_between_the_load_and_the_loop_are_those_of_the_first_start(
    run_dir: Path, loop: Any, objects: Any
) -> None:
    assert differences(run_dir, objects, loop) == []


@pytest.mark.parametrize("read", [lambda state: None, lambda state: state.epoch, lambda state: state.vars])
def test_they_are_so_in_a_script_that_seeds_nothing(run_dir: Path, read: Any) -> None:
    drawn = []
    for start in range(3):
        torch.seed()
        random.seed()
        np.random.seed()
        state = RunState.load(run_dir, **make())
        read(state)
        drawn.append((torch.randn(2).tolist(), random.random(), np.random.rand()))
        with state:
            for _ in state.epochs(3):
                for _ in state.batches():
                    pass
                state.save()
                break
        assert state.resumed == (start > 0)
    assert drawn[1:] == drawn[:1] * 2


def saved_before_the_loop(run_dir: Path, *, is_killed: bool) -> list[Any]:
    torch.manual_seed(1)
    objects, seen = make(), []
    with RunState.load(run_dir, **objects) as state:
        first = torch.randn(2)
        state.save().wait()
        fixed = torch.randn(2) + first
        for _ in state.epochs(0 if is_killed else 2):
            for x in state.batches():
                train(objects, x + fixed)
                seen.append((x.tolist(), fixed.tolist(), torch.get_rng_state().tolist()))
    return seen


def test_draws_around_a_save_before_the_loop_are_those_of_the_first_start(run_dir: Path) -> None:
    whole = saved_before_the_loop(run_dir / "whole", is_killed=False)
    for _ in range(2):
        saved_before_the_loop(run_dir / "stopped", is_killed=True)

    assert saved_before_the_loop(run_dir / "stopped", is_killed=False) == whole


def asked_now_and_then(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(2):
        other = iter(state.batches("b"))
        for x in state.batches("a"):
            if state.batch % 2:
                x = torch.cat([x, next(other)])
            train(objects, x)
            tick(x)


def left_unfinished(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(2):
        other = iter(state.batches("b"))
        for x in state.batches("a"):
            y = next(other)
            train(objects, x + y)
            tick(x, y)
        state.vars["ended"] = state.vars.get("ended", 0) + 1
        tick(state.vars["ended"])


@pytest.mark.quick(2)
@pytest.mark.parametrize("loop", [asked_now_and_then, left_unfinished])
def test_a_second_loader_that_is_asked_by_hand_is_exact(run_dir: Path, loop: Any) -> None:
    assert differences(run_dir, lambda: make(loaders=2), loop) == []


@pytest.mark.heavy
def test_the_first_lines_of_a_resumed_body_change_nothing(run_dir: Path) -> None:
    def objects() -> dict[str, Any]:
        found = make()
        found["extra"] = {"counts": {"epochs": 0}}
        return found

    def loop(state: RunState, found: dict[str, Any], tick: Callable[..., None]) -> None:
        for _ in state.epochs(2):
            found["extra"]["counts"]["epochs"] += 1
            found["optimizer"].param_groups[0]["lr"] *= 0.5
            state.vars["batches"] = 0
            for x in state.batches():
                state.vars["batches"] += 1
                train(found, x)
                tick(x, state.vars["batches"], found["extra"]["counts"]["epochs"])

    assert differences(run_dir, objects, loop) == []


@dataclass
class Bag:
    seen: list[int]
    total: torch.Tensor


def with_own_values() -> dict[str, Any]:
    table, same = torch.zeros(4), [0]
    own = {"table": table, "row": table[:2], "a": same, "b": same, "array": np.zeros(2)}
    bag = Bag([0], torch.zeros(2))
    return {**make(), "own": own, "bag": bag, "table": table, "extra": {"own": own, "bag": bag}}


@pytest.mark.heavy
def test_what_first_lines_change_in_place_is_put_back_in_the_same_objects(run_dir: Path) -> None:
    def loop(state: RunState, found: dict[str, Any], tick: Callable[..., None]) -> None:
        own, bag = found["own"], found["bag"]
        ema = state.vars.setdefault("ema", torch.zeros(2))
        for epoch in state.epochs(2):
            own["a"].append(epoch)
            own["table"] += 1
            own["array"] += 1
            bag.seen.append(epoch)
            bag.total = bag.total + 1
            for x in state.batches():
                train(found, x)
                found["table"].add_(x.sum())
                own["b"].append(1)
                state.vars["ema"].mul_(0.9).add_(x.mean(0))
                told = own["row"], own["a"] is own["b"], own["a"], own["array"].tolist(), bag.seen, bag.total
                tick(x, found["table"], *told, ema if not state.resumed else state.vars["ema"])

    assert differences(run_dir, with_own_values, loop) == []


def test_draws_between_two_reads_of_a_counter_are_reported(run_dir: Path) -> None:
    objects = without_loader()
    with RunState.load(run_dir, **objects) as state:
        print("starting at step", state.step)
        torch.rand(1)
        for _ in range(state.step, 1):
            train(objects, torch.ones(1, 2))
            with pytest.warns(ResumableWarning, match=r"between reading state\.step"):
                state.save()


@pytest.mark.parametrize(("draws", "is_warned"), [("before", False), ("after", False), ("both", True)])
def test_other_draws_before_the_batches_of_a_loop_by_hand_are_warned_of(
    run_dir: Path, draws: str, is_warned: bool
) -> None:
    expected = "have drawn other random numbers than in the training that was stopped"
    for start in range(2):
        torch.manual_seed(1)
        with (
            RunState.load(run_dir, **(objects := make())) as state,
            warnings.catch_warnings(record=True) as seen,
        ):
            warnings.simplefilter("always")
            for _ in range(state.epoch, 2):
                if draws != "after":
                    torch.rand(2)
                for x in state.batches():
                    train(objects, x)
                    if start == 0 and state.epoch == 1:
                        state.save().wait()
                        break
                if draws != "before":
                    torch.rand(2)
    assert [expected in str(one.message) for one in seen] == [True] * is_warned


def test_a_step_without_a_loop_after_a_resume_is_reported(run_dir: Path) -> None:
    for start in range(2):
        torch.manual_seed(0)
        objects = without_loader()
        with RunState.load(run_dir, **objects) as state:
            if start:
                with pytest.warns(ResumableWarning, match="no loop of RunState has begun"):
                    train(objects, torch.randn(1, 2))
            else:
                for _ in state.steps(2):
                    train(objects, torch.randn(1, 2))
                    state.save()


@pytest.mark.parametrize("draws_first", [True, False])
def test_a_save_among_draws_before_the_first_loop_is_reported(run_dir: Path, draws_first: bool) -> None:
    with RunState.load(run_dir, model=make()["model"]) as state:
        if draws_first:
            torch.rand(1)
        state.save()
        if not draws_first:
            torch.rand(1)
        with pytest.warns(ResumableWarning, match=r"drawn between RunState\.load and .* \[R08"):
            next(state.epochs(1))


def test_a_second_loop_after_one_that_was_left_is_reported(run_dir: Path) -> None:
    objects = make()
    with RunState.load(run_dir, **objects) as state:
        for _ in state.epochs(3):
            for x in state.batches():
                train(objects, x)
            break
        with pytest.warns(ResumableWarning, match=r"the loop over state.epochs\(3\) was left .* \[R05"):
            next(state.epochs(5))


def test_an_iterator_that_ends_after_its_run_leaves_the_generators_alone(run_dir: Path) -> None:
    def start() -> tuple[RunState, Any]:
        state = RunState.load(run_dir, **make(loaders=2))
        for _ in state.epochs(1):
            kept = iter(state.batches("b"))
            for _ in state.batches("a"):
                if not state.resumed:
                    next(kept)
                state.save().wait()
                return state, kept
        raise AssertionError("there was no batch")

    start()[0].close()
    state, kept = start()
    state.close()
    torch.manual_seed(5)
    before = torch.get_rng_state()

    del state, kept
    gc.collect()

    assert torch.equal(torch.get_rng_state(), before)


class Counter:
    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, saved: dict[str, int]) -> None:
        self.done = saved["done"]


@pytest.mark.parametrize("draws", [True, False])
def test_draws_before_a_loop_that_counts_by_itself_are_warned_of(run_dir: Path, draws: bool) -> None:
    model, counter = nn.Linear(2, 1), Counter()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        RunState.load(run_dir, model=model, optimizer=optimizer, extra={"counter": counter}) as state,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        noise = torch.randn(1, 2) if draws else torch.ones(1, 2)
        while counter.done < 3:
            model(noise).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counter.done += 1
            state.save()

    assert len(told) == draws
    assert all("does not see where its loop begins" in str(one.message) for one in told)


@pytest.mark.quick(3)
@pytest.mark.parametrize("failing", [(0, 0), (0, 1), (1, 2)])
def test_a_loop_left_before_a_step_and_entered_again_trains_that_batch(
    run_dir: Path, failing: tuple[int, int]
) -> None:
    seen: list[list[float]] = []

    def make() -> dict[str, Any]:
        model = nn.Linear(1, 1)
        loader = DataLoader(torch.arange(6.0).view(6, 1), batch_size=2, shuffle=True)
        return {
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            "loader": loader,
        }

    def loop(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
        for _ in state.epochs(2):
            for _ in range(2):
                try:
                    for batch in state.batches():
                        if (state.epoch, state.batch) == failing and not state.vars.get("failed"):
                            state.vars["failed"] = True
                            raise MemoryError
                        seen.append(sorted(batch.flatten().tolist()))
                        objects["optimizer"].zero_grad()
                        objects["model"](batch + torch.rand(1)).sum().backward()
                        objects["optimizer"].step()
                        tick()
                    break
                except MemoryError:
                    continue

    assert differences(run_dir, make, loop) == []
    # The first six are of the training that never stopped.
    assert sorted(seen[0] + seen[1] + seen[2]) == sorted(seen[3] + seen[4] + seen[5]) == [*range(6)]


@pytest.mark.parametrize(
    ("fails", "at"),
    [
        ("preempted", ("a", 2)),
        ("preempted", ("b", 0)),
        ("error", ("b", 1)),
        ("error", ("a", 0)),
    ],
)
@pytest.mark.heavy
def test_loops_over_two_loaders_that_are_entered_again_leave_out_nothing(
    run_dir: Path, fails: str, at: tuple[str, int]
) -> None:
    def loop(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
        def passes() -> None:
            for epoch in state.epochs(2):
                for name in ("a", "b"):
                    for x in state.batches(name):
                        is_due = (epoch, name, state.batch) == (1, *at) and "failed" not in state.vars
                        if is_due and fails == "error":
                            state.vars["failed"] = True
                            raise MemoryError
                        train(objects, x)
                        seen.append((epoch, name, state.batch))
                        if is_due:
                            state.vars["failed"] = True
                            signal.raise_signal(signal.SIGUSR1)
                        tick(x)

        while True:
            try:
                passes()
                break
            except (MemoryError, Preempted):
                pass

    seen: list[tuple[int, str, int]] = []
    every = [(epoch, name, number) for epoch in (0, 1) for name in "ab" for number in range(3)]

    # Otherwise a signal that no loop has noted ends the tests.
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert differences(run_dir, lambda: make(loaders=2) | RAISES, loop) == []
    finally:
        signal.signal(signal.SIGUSR1, before)
    # The first ones are of the training that never stopped.
    assert seen[: len(every)] == every


@pytest.mark.parametrize("is_made_before", [False, True])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.quick(4)
def test_steps_left_by_preempted_continue_with_another_iterator(
    run_dir: Path, is_made_before: bool, at: int
) -> None:
    def loop(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
        def steps() -> None:
            batches = iter(state.batches()) if is_made_before else None
            for step in state.steps(8):
                batches = batches or iter(state.batches())
                try:
                    x = next(batches)
                except StopIteration:
                    batches = iter(state.batches())
                    x = next(batches)
                train(objects, x)
                seen.append((state.epoch, state.batch))
                if step == at and "sent" not in state.vars:
                    state.vars["sent"] = True
                    signal.raise_signal(signal.SIGUSR1)
                tick(x)

        while True:
            try:
                steps()
                break
            except Preempted:
                pass

    seen: list[tuple[int, int]] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        # A start with nothing left to do makes no iterator: dropping one ends the epoch that it is in.
        at_ticks = range(1, 7)
        assert differences(run_dir, lambda: make() | RAISES, loop, at_ticks) == []
    finally:
        signal.signal(signal.SIGUSR1, before)
    # The first ones are of the training that never stopped.
    assert seen[:8] == [divmod(step, 3) for step in range(8)]


class Drawing(IterableDataset[Any]):
    """Draws its samples from torch's global generator."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(6):
            yield torch.randn(2)


class Counting(IterableDataset[Any]):
    """Draws nothing."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(12.0).view(6, 2)


@pytest.mark.parametrize(("stream", "workers"), [(Drawing, 0), (Drawing, 1), (Counting, 0)])
def test_a_save_with_an_untrained_first_batch_that_was_drawn_is_warned_of(
    run_dir: Path, stream: type[IterableDataset[Any]], workers: int
) -> None:
    objects = make() | {"loader": DataLoader(stream(), 2, num_workers=workers)}
    with (
        warnings.catch_warnings(record=True) as caught,
        RunState.load(run_dir, **objects, progress=False) as state,
    ):
        warnings.simplefilter("always")
        with contextlib.suppress(RuntimeError):
            for _ in state.epochs(2):
                for _ in state.batches():
                    raise RuntimeError
        state.save().wait()

    found = [str(one.message) for one in caught if "has drawn random numbers" in str(one.message)]

    assert len(found) == (stream is Drawing and not workers)
