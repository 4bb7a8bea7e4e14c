"""Plain iterables that are several batches ahead of the training, or draw from its generators in a thread."""

from __future__ import annotations

import queue
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stopping import differences
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import ResumableWarning, RunState

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:.* keeps no position"),
]

Draw = Callable[[], float]

DRAWS: dict[str, Draw] = {
    "torch": lambda: torch.rand(()).item(),
    "numpy": lambda: float(np.random.rand()),
    "python": lambda: random.random(),
    "normal": lambda: random.gauss(0, 1) + float(np.random.randn()) + torch.randn(()).item(),
}


def nothing() -> float:
    return 0.0


def all_of_them() -> float:
    return sum(draw() for draw in DRAWS.values())


class Ahead:
    """An iterable that loads so many batches ahead, in the training's own thread."""

    def __init__(self, ahead: int, draw: Draw = all_of_them, batches: int = 10) -> None:
        self.ahead, self.draw, self.batches = ahead, draw, batches

    def load(self, number: int) -> torch.Tensor:
        return torch.tensor([number, self.draw()])

    def __iter__(self) -> Iterator[torch.Tensor]:
        waiting: deque[torch.Tensor] = deque()
        for number in range(self.batches):
            waiting.append(self.load(number))
            if len(waiting) > self.ahead:
                yield waiting.popleft()
        yield from waiting


class OwnGenerator(Ahead):
    """The same, with a generator that is made with the first batch, once or in every epoch."""

    def __init__(self, ahead: int, anew: bool, is_missing: bool) -> None:
        super().__init__(ahead)
        self.anew = anew
        if not is_missing:
            self.rng: np.random.Generator | None = None

    def load(self, number: int) -> torch.Tensor:
        if getattr(self, "rng", None) is None or (self.anew and number == 0):
            self.rng = np.random.default_rng(random.getrandbits(31))
        assert self.rng is not None
        return torch.tensor([number, self.rng.random(), self.draw()])


def training(loader: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    def make() -> dict[str, Any]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return {"model": model, "optimizer": optimizer, "loader": loader()}

    return make


def train(objects: dict[str, Any], x: torch.Tensor, noise: float) -> None:
    loss = objects["model"](x[:2].float() / 10 + noise).square().mean()
    objects["optimizer"].zero_grad()
    loss.backward()
    objects["optimizer"].step()


def two_epochs(state: RunState, objects: dict[str, Any], tick: Callable[..., None], **how: Any) -> None:
    """Train with noise of the generators that the data draws from, and draw at the end of an epoch too."""
    for _ in state.epochs(2):
        for x in state.batches(**how):
            train(objects, x, all_of_them())
            tick(x)
        tick(all_of_them())


@pytest.mark.heavy
@pytest.mark.parametrize("ahead", [3, *(pytest.param(n, marks=pytest.mark.heavy) for n in (1, 2, 8))])
def test_an_iterable_that_is_batches_ahead_is_exact(run_dir: Path, ahead: int) -> None:
    assert differences(run_dir, training(lambda: Ahead(ahead)), two_epochs, at=(1, 5, 9, 10, 11, 16)) == []


@pytest.mark.cuda
@pytest.mark.parametrize("ahead", [1, 3])
def test_an_iterable_that_draws_on_the_gpu_is_exact(run_dir: Path, ahead: int) -> None:
    def draw() -> float:
        return torch.rand((), device="cuda").item()

    def make() -> dict[str, Any]:
        torch.cuda.manual_seed(1)
        return training(lambda: Ahead(ahead, draw, batches=6))()

    def loop(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
        for _ in state.epochs(2):
            for x in state.batches():
                train(objects, x, draw())
                tick(x)
            tick(draw())

    assert differences(run_dir, make, loop) == []


@pytest.mark.heavy
def test_an_endless_iterator_that_is_batches_ahead_is_exact_over_epochs(run_dir: Path) -> None:
    def loop(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
        for _ in state.epochs(3):
            for x in state.batches():
                if state.batch == 4:
                    break
                train(objects, x, all_of_them())
                tick(x)
            tick(all_of_them())

    assert differences(run_dir, training(lambda: iter(Ahead(3, batches=30))), loop) == []


def one_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    waiting = next(batches, None)
    while waiting is not None:
        now, waiting = waiting, next(batches, None)
        yield now


def three_ahead(batches: Iterator[Any]) -> Iterator[Any]:
    return one_ahead(one_ahead(one_ahead(batches)))


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.heavy
def test_what_is_ahead_in_through_too_is_exact(run_dir: Path, ahead: int) -> None:
    def loop(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
        two_epochs(state, objects, tick, through=three_ahead)

    assert differences(run_dir, training(lambda: Ahead(ahead, batches=7)), loop, at=(1, 4, 6, 7, 8)) == []


def test_batches_that_were_ahead_in_through_are_kept_for_a_loop_without_it(run_dir: Path) -> None:
    def leg(name: str, stop: int, **how: Any) -> list[Any]:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        seen = []
        with RunState.load(run_dir / name, loader=Ahead(2, batches=9)) as state:
            for x in state.batches(**how):
                seen.append(x.tolist())
                all_of_them()
                if state.batch + 1 == stop:
                    state.save()
                    break
        return seen

    whole = leg("whole", 5, through=three_ahead)
    rest = [leg("stopped", 2, through=three_ahead), *(leg("stopped", stop) for stop in (3, 4, 5))]

    assert [x for seen in rest for x in seen] == whole


@pytest.mark.heavy
@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("is_missing", [False, True])
@pytest.mark.parametrize("ahead", [1, 3])
def test_a_generator_that_is_made_with_the_first_batch_is_exact(
    run_dir: Path, ahead: int, anew: bool, is_missing: bool
) -> None:
    assert differences(run_dir, training(lambda: OwnGenerator(ahead, anew, is_missing)), two_epochs) == []


def test_a_save_before_the_loop_has_a_generator_that_the_loop_makes_again(run_dir: Path) -> None:
    seen: list[Any] = []
    for stop in (1, 2, 4, None):
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        with RunState.load(run_dir, loader=OwnGenerator(2, False, False)) as state:
            if seen:
                state.save()
            for x in state.batches():
                seen.append([x.tolist(), all_of_them()])
                if len(seen) == stop:
                    state.save()
                    break
    torch.manual_seed(0), np.random.seed(0), random.seed(0)

    assert seen == [[x.tolist(), all_of_them()] for x in OwnGenerator(2, False, False)]


# What no resume can repeat.


def trained(run_dir: Path, make: Callable[[], Any], stops: Iterable[int], noise: Draw) -> list[str]:
    """Return the warnings of a training that is stopped after these batches."""
    told: list[str] = []
    for stop in stops:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        with warnings.catch_warnings(record=True) as found, RunState.load(run_dir, loader=make()) as state:
            warnings.simplefilter("always")
            for _ in state.batches():
                noise()
                if state.batch + 1 == stop:
                    state.save()
                    break
        # Python 3.12 warns of each fork of a process with threads.
        usual = ("keeps no position", "use of fork()")
        told += [str(one.message) for one in found if not any(text in str(one.message) for text in usual)]
    return told


@pytest.mark.parametrize("name", DRAWS)
def test_draws_kept_for_more_than_32_batches_are_reported(run_dir: Path, name: str) -> None:
    first, *others = trained(run_dir, lambda: Ahead(50, DRAWS[name], 100), [40, 45], DRAWS[name])

    assert not others
    assert "from the same generators (" + ("numpy, python, torch" if name == "normal" else name) in first


@pytest.mark.parametrize(
    ("draw", "noise", "stop"),
    [
        (nothing, all_of_them, 40),
        (all_of_them, nothing, 40),
        (DRAWS["torch"], DRAWS["numpy"], 40),
        (all_of_them, all_of_them, 32),
    ],
)
def test_nothing_is_reported_where_only_one_of_them_draws_or_all_is_known(
    run_dir: Path, draw: Draw, noise: Draw, stop: int
) -> None:
    assert trained(run_dir, lambda: Ahead(50, draw, 100), [stop, stop + 1], noise) == []


def test_nothing_is_reported_an_order_that_is_drawn_as_the_epoch_begins(run_dir: Path) -> None:
    def shuffled() -> Iterator[int]:
        yield from torch.randperm(100).tolist()

    assert trained(run_dir, lambda: shuffled, [40, 45], all_of_them) == []


def test_an_own_generator_that_both_draw_from_is_named_by_its_path(run_dir: Path) -> None:
    class Own(Ahead):
        def __init__(self) -> None:
            self.rng = random.Random(0)
            super().__init__(50, self.rng.random, 100)

    loaders: list[Own] = []

    def make() -> Own:
        loaders.append(Own())
        return loaders[-1]

    (told,) = trained(run_dir, make, [40, 45], lambda: loaders[-1].rng.random())

    assert "(rng)" in told


# Threads.


class InThread:
    """The usual iterable that loads in a thread."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        waiting: queue.Queue[Any] = queue.Queue(2)

        def load() -> None:
            for batch in self.loader:
                waiting.put(batch)
            waiting.put(None)

        thread = threading.Thread(target=load, daemon=True, name="loads ahead")
        thread.start()
        while (batch := waiting.get()) is not None:
            yield batch
        thread.join()


def in_a_pool() -> Iterator[int]:
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(abs, range(4))


@pytest.mark.parametrize("make", [lambda: InThread(range(4)), lambda: in_a_pool], ids=["own", "pool"])
def test_an_iterable_that_starts_threads_is_reported_once(run_dir: Path, make: Any) -> None:
    told: list[Any] = []
    with warnings.catch_warnings(record=True) as found, RunState.load(run_dir, loader=make()) as state:
        warnings.simplefilter("always")
        for _ in state.epochs(2):
            for _ in state.batches():
                told += [len(found)]

    assert told == [1] * 8
    assert (found[0].category, "starts threads" in str(found[0].message)) == (ResumableWarning, True)


def test_a_resume_in_mid_epoch_tells_of_threads_too(run_dir: Path) -> None:
    for stop in (2, 3, 4):
        (told,) = trained(run_dir, lambda: InThread(range(6)), [stop], nothing)

        assert "starts threads as it is looped over (loads ahead)" in told
        assert "[R25" in told


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Around:
    """An iterable around a DataLoader."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


@pytest.mark.parametrize("workers", [0, 2])
def test_the_threads_of_a_data_loader_are_no_reason_for_a_warning(run_dir: Path, workers: int) -> None:
    def make() -> Around:
        return Around(DataLoader(Numbers(), num_workers=workers, pin_memory=torch.cuda.is_available()))

    assert trained(run_dir, make, [2, 3], nothing) == []


def test_a_thread_of_the_training_itself_is_no_reason_for_a_warning(run_dir: Path) -> None:
    ends = threading.Event()
    try:
        with RunState.load(run_dir, loader=Ahead(1)) as state:
            batches = iter(state.batches())
            threading.Thread(target=ends.wait).start()
            next(batches)
            threading.Thread(target=ends.wait).start()
            assert len([*batches]) == 9
    finally:
        ends.set()
