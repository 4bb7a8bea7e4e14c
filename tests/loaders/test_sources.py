"""Loaders that are not torch's own: those that keep their position, and those that keep none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix_loaders import LOADERS, Sticks, all_three

from resumable import CannotStore, ResumableWarning, RunState, StateMismatch, progress

pytestmark = [
    # What torch says of torchdata, and Python of every worker that is forked while a save is on its way.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]

EPOCHS = 3

Seen = list[Any]
Stop = tuple[int, int | str]


# One training, which is stopped and continues.


def draw() -> list[float]:
    """Draw from every global generator, as dropout and augmentation do."""
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def seeded(seed: int) -> None:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def uninterrupted(make: Callable[[], Any]) -> Seen:
    """Return what a training sees that loops over the loader itself."""
    seeded(0)
    loader, seen = make(), []
    for epoch in range(EPOCHS):
        for number, batch in enumerate(loader() if callable(loader) else loader, 1):
            seen.append(((epoch, number), batch.tolist(), draw()))
        seen.append(((epoch, "end"), [], draw()))
    return seen


def leg(
    run_dir: Path, make: Callable[[], Any], stop: Stop | None = None, seed: int = 0, **options: Any
) -> Seen:
    """Go on from the newest checkpoint up to a save, and return what the training sees."""
    seeded(seed)
    loader, seen = make(), []
    with RunState.load(run_dir, loader=loader, **options) as state:
        for key, batch in training(state):
            seen.append((key, batch, draw()))
            if key == stop:
                state.save()
                break
    return seen


def training(state: RunState) -> Iterator[tuple[Stop, list[float]]]:
    """Yield what a body sees: each batch, and the end of each epoch."""
    for epoch in state.epochs(EPOCHS):
        for batch in state.batches():
            yield (epoch, state.batch + 1), batch.tolist()
        yield (epoch, "end"), []


# Loaders that keep their own position.


def of(name: str) -> Callable[[], Any]:
    """Return what makes a loader of the matrix; each draws from all generators as it loads."""
    return partial(LOADERS[name], all_three)


@pytest.mark.parametrize("name", ["torchdata", "own-state", "stays-at-its-end"])
def test_a_save_before_the_first_batch_changes_nothing(run_dir: Path, name: str) -> None:
    seeded(0)
    with RunState.load(run_dir, loader=of(name)()) as state:
        state.save()
        seen = [(key, batch, draw()) for key, batch in training(state)]

    assert seen == uninterrupted(of(name))


@pytest.mark.filterwarnings("ignore:loader keeps no position")
@pytest.mark.parametrize(
    "name",
    [
        *("torchdata", "begins-anew", "own-state", "stays-at-its-end"),
        *("list", "iterable", "function-generator"),
    ],
)
@pytest.mark.quick(3)
def test_a_loader_can_go_back_again_and_again(run_dir: Path, name: str) -> None:
    make = of(name)
    expected = uninterrupted(make)
    seeded(0)
    with RunState.load(run_dir, loader=make(), keep=None) as state:
        state.save()
        for key, _ in training(state):
            draw()
            if key in ((0, 2), (0, "end")):
                state.save()
        end = [key for key, *_ in expected].index((0, "end")) + 1
        for number, place in (3, end), (2, 2), (1, 0), (2, 2):
            state.restore(number)
            seen = [(key, batch, draw()) for key, batch in training(state)]

            assert seen == expected[place:]


def left_early(run_dir: Path, make: Callable[[], Any], legs: int) -> list[list[float]]:
    """Train on three batches of each epoch, in as many processes, and return them."""
    seen = []
    for seed, last in enumerate([*range(1, legs), EPOCHS]):
        seeded(seed)
        with RunState.load(run_dir, loader=make()) as state:
            for _ in state.epochs(last):
                for batch in state.batches():
                    if state.batch == 3:
                        break
                    seen.append(batch.tolist())
            state.save()
    return seen


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["sticks", "begins-anew", "torchdata", "torchdata-generator"])
def test_an_epoch_left_early_is_followed_by_the_same_one(tmp_path: Path, name: str) -> None:
    assert left_early(tmp_path / "three", of(name), 3) == left_early(tmp_path / "one", of(name), 1)


def test_a_generator_in_extra_that_a_loader_begins_with_is_put_back(run_dir: Path) -> None:
    def leg(seed: int, stop: int | None) -> Iterator[list[float]]:
        own = np.random.default_rng(seed)
        loader = DrawsInIter(lambda: [own.random()])
        with RunState.load(run_dir, loader=loader, extra={"own": own}) as state:
            for batch in state.batches():
                yield [*batch.tolist(), own.random()]
                if state.batch + 1 == stop:
                    state.save()
                    return

    seen = [event for seed, stop in enumerate([1, 3, None]) for event in leg(seed, stop)]

    own = np.random.default_rng(0)
    assert seen == [[*batch.tolist(), own.random()] for batch in DrawsInIter(lambda: [own.random()])]


class DrawsInIter(Sticks):
    def __iter__(self) -> Iterator[torch.Tensor]:
        self.noise()
        return super().__iter__()


def test_the_counters_of_a_loader_that_keeps_its_position_continue(run_dir: Path) -> None:
    leg(run_dir, of("begins-anew"), (0, 2))
    leg(run_dir, of("begins-anew"), (1, 3))

    with RunState.load(run_dir, loader=of("begins-anew")()) as state:
        assert (state.epoch, state.batch, state.samples, len(state.batches())) == (1, 3, 6 + 3, 6)


def test_a_state_that_cannot_be_stored_is_named_at_the_save(run_dir: Path) -> None:
    loader = of("begins-anew")()
    loader.state_dict = lambda: {"order": draw}  # type: ignore[method-assign, assignment, dict-item]
    with RunState.load(run_dir, loader=loader) as state:
        for _ in state.batches():
            with pytest.raises(CannotStore, match="order"):
                state.save()
            break


# Iterables that keep none.


keeps_none = pytest.mark.filterwarnings("ignore:loader keeps no position")


def endless() -> Iterator[torch.Tensor]:
    return (torch.tensor([number, *draw()]) for number in itertools.count())


def test_an_iterator_that_is_asked_to_go_back_is_a_mismatch(run_dir: Path) -> None:
    with RunState.load(run_dir, loader=endless(), keep=None) as state:
        state.save()
        for _ in state.batches():
            if state.batch == 2:
                state.save()
            if state.batch == 4:
                break
        for number, trained in (1, 0), (2, 3):
            state.restore(number)
            with pytest.raises(
                StateMismatch, match=f"cannot go back: it has given 5 batches, and {trained} were"
            ):
                next(iter(state.batches()))


def test_an_iterator_that_has_not_gone_on_since_the_save_may_go_back_to_it(run_dir: Path) -> None:
    seen = []
    with RunState.load(run_dir, loader=iter(range(6))) as state:
        for _ in range(3):
            for batch in state.batches():
                seen.append(batch)
                if len(seen) % 2:
                    state.save()
                    break
            state.restore("newest")

    assert seen == [0, 1, 2, 3, 4]


@keeps_none
def test_a_generator_in_extra_that_an_iterable_draws_from_is_put_back(run_dir: Path) -> None:
    def leg(seed: int, stop: int | None) -> Iterator[list[float]]:
        global GENERATOR
        GENERATOR = np.random.default_rng(seed)
        with RunState.load(run_dir, loader=of_the_module, extra={"own": GENERATOR}) as state:
            for batch in state.batches():
                yield [batch, GENERATOR.random()]
                if state.batch + 1 == stop:
                    state.save()
                    return

    seen = [event for seed, stop in enumerate([1, 3, None]) for event in leg(seed, stop)]

    own = np.random.default_rng(0)
    assert seen == [[own.random(), own.random()] for _ in range(5)]


GENERATOR = np.random.default_rng(0)


def of_the_module() -> Iterator[float]:
    for _ in range(5):
        yield GENERATOR.random()


def test_what_is_loaded_once_more_is_reported_with_its_cost(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LONG", 0.0)
    leg(run_dir, of("iterable"), (0, 4))

    with pytest.warns(
        ResumableWarning, match="loader keeps no position, so 4 batches of it are loaded again"
    ):
        leg(run_dir, of("iterable"), (0, 5), progress=True)

    assert "skipping what loader gave before: 4/4 batches\n" in capsys.readouterr().err


@pytest.mark.parametrize("make", [lambda: range(3, 8), lambda: [*range(3, 8)], lambda: (3, 4, 5, 6, 7)])
def test_a_range_or_a_list_continues_without_a_warning(run_dir: Path, make: Callable[[], Any]) -> None:
    seen = []
    for stop in (2, 2, None):
        with RunState.load(run_dir) as state:
            before = state.batch
            for item in state.batches(make()):
                seen.append(item)
                if state.batch + 1 - before == stop:
                    state.save()
                    break

    assert seen == [*range(3, 8)]


@keeps_none
def test_an_iterable_that_ends_while_it_is_run_again_is_a_mismatch(run_dir: Path) -> None:
    leg(run_dir, of("list"), (1, 5))

    for _ in range(2):
        with pytest.raises(StateMismatch, match="has come to its end after 2 batches, and 5 were trained"):
            leg(run_dir, lambda: [*torch.arange(2.0)])
    assert [key for key, *_ in leg(run_dir, of("list"))][:2] == [(1, 6), (1, "end")]


# Iterables that were never given.


@pytest.mark.filterwarnings("ignore:.* keeps no position")
def test_two_iterables_of_one_kind_that_were_never_given_both_continue(run_dir: Path) -> None:
    def leg(stop: int | None) -> Iterator[tuple[int, int]]:
        with RunState.load(run_dir) as state:
            both = state.batches([*range(6)]), state.batches([*range(10, 16)])
            for number, pair in enumerate(zip(*both, strict=True), 1):
                yield pair
                if number == stop:
                    state.save()
                    return

    assert [*leg(2), *leg(1), *leg(None)] == [(number, number + 10) for number in range(6)]


# Another kind of loader than before.


@pytest.mark.parametrize(
    ("before", "after"),
    [*itertools.permutations(["torchdata", "begins-anew", "list"], 2)],
)
def test_another_kind_of_loader_in_mid_epoch_is_a_mismatch_or_allowed(
    run_dir: Path, before: str, after: str
) -> None:
    leg(run_dir, of(before), (0, 2))

    with pytest.raises(StateMismatch, match="loader"):
        leg(run_dir, of(after))
    with pytest.warns(ResumableWarning, match="may change bits  loader.kind +"):
        seen = leg(run_dir, of(after), allow=["loader"])

    assert next(key for key, *_ in seen) == (0, 1)


@pytest.mark.parametrize(("before", "after"), [("torchdata", "list"), ("list", "begins-anew")])
def test_another_kind_of_loader_at_the_epochs_end_begins_at_its_beginning(
    run_dir: Path, before: str, after: str
) -> None:
    leg(run_dir, of(before), (0, "end"))

    with pytest.warns(ResumableWarning, match="may change bits  loader.kind +"):
        seen = leg(run_dir, of(after), allow=["loader.sampler.generator"])

    assert [key for key, *_ in seen][:2] == [(1, 1), (1, 2)]
