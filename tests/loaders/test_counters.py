"""What a dataset or a collate function keeps in workers: warned of by name, or exact with a state."""

from __future__ import annotations

import functools
import itertools
import os
import random
import re
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stopping import differences
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
)

from resumable import RunState
from resumable.loaders.workers.memory import signature

SAMPLES, BATCH, EPOCHS = 12, 3, 2
STOPS = [2, 4, 7]
"""In mid-epoch, at the last batch and then at the epoch's end, and in the second epoch."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.* and the training draw from the same generators"),
]


class Stateful:
    """Tells all its attributes as its state: the very objects, as many do."""

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Quiet(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index, 0])


class Numbered(Quiet):
    """Numbers its samples."""

    def __init__(self) -> None:
        self.calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return torch.tensor([index, self.calls])


class StatefulNumbered(Stateful, Numbered):
    pass


class Augment:
    """Numbers what goes through it; its class has the first number."""

    calls = 0

    def __call__(self, samples: Any) -> Any:
        self.calls += 1
        return default_collate(samples) + self.calls


class StatefulAugment(Stateful, Augment):
    pass


class Seeded(Sampler[int]):
    """Seeds its order by the epochs that it has counted."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(SAMPLES), SAMPLES))


class StatefulSeeded(Stateful, Seeded):
    pass


class Batches(Seeded):
    """Counts at its end, and gives batches."""

    def __iter__(self) -> Iterator[Any]:
        order = random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)
        yield from (order[at : at + BATCH] for at in range(0, SAMPLES, BATCH))
        self.epoch += 1


class StatefulBatches(Stateful, Batches):
    pass


class Shuffling(Sampler[int]):
    """Shuffles its own list, so that each order is made of the one before."""

    def __init__(self) -> None:
        self.indices: Any = [*range(SAMPLES)]

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        return iter(list(map(int, self.indices)))


class StatefulShuffling(Stateful, Shuffling):
    pass


class Passes(IterableDataset[Any]):
    """Counts its passes."""

    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for index in range(SAMPLES):
            yield torch.tensor([index, self.passes])


class Totals(Passes):
    """Counts its samples over all epochs, and where it is in this one."""

    def __iter__(self) -> Iterator[Any]:
        self.at = 0
        for index in range(SAMPLES):
            self.at += 1
            self.passes += 1
            yield torch.tensor([index, self.passes])


class Counting(Quiet):
    """Keeps something of every sample; `keep` is one of the functions below."""

    def __init__(self, keep: Callable[[Any, int], object], **held: Any) -> None:
        self.keep = keep
        vars(self).update(held)

    def __getitem__(self, index: int) -> Any:
        self.keep(self, index)
        return super().__getitem__(index)


def appends(one: Any, index: int) -> None:
    one.kept.append(torch.tensor(index))


def counts_labels(one: Any, index: int) -> None:
    one.kept[index % 2] += 1


def adds_up(one: Any, index: int) -> None:
    one.kept += index + 1


def is_asked(one: Any, index: int) -> None:
    next(one.kept)


def fills(one: Any, index: int) -> None:
    one.kept[index] = torch.tensor(index)


def opens(one: Any, index: int) -> None:
    if one.kept is None:
        one.kept, one.size = open(os.devnull), SAMPLES  # noqa: SIM115


def draws(one: Any, index: int) -> None:
    one.kept.random()


def looks_up(one: Any, index: int) -> None:
    one.kept(index)


def learns(one: Any, index: int) -> None:
    one.kept.parts.append(index)


class Vocabulary:
    """As one of a library: its caches fill."""

    __module__ = "torch.nn"

    def __init__(self) -> None:
        self.parts: list[int] = []


class Stage:
    def __init__(self) -> None:
        self.seen = 0


class Staged(Quiet):
    def __init__(self, stages: list[Stage]) -> None:
        self.stages = stages

    def __getitem__(self, index: int) -> Any:
        self.stages[1].seen += 1
        return super().__getitem__(index)


def collating(seen: list[int]) -> Callable[[Any], Any]:
    def collate(samples: Any) -> Any:
        seen.append(len(samples))
        return default_collate(samples)

    return collate


def over(dataset: Callable[[], Any] = Quiet, **how: Any) -> Callable[..., DataLoader[Any]]:
    """Return what makes the loader: `sampler`, `batch_sampler` and `collate_fn` are classes."""

    def make(batch_size: int = BATCH, **workers: Any) -> DataLoader[Any]:
        made = {name: kind() for name, kind in how.items()}
        size = {} if "batch_sampler" in how else {"batch_size": batch_size}
        return DataLoader(dataset(), **size, **made, **workers)

    return make


WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
HERE, NEW, KEPT = WORKERS


def train(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(EPOCHS):
        for batch in state.batches():
            objects["optimizer"].step()
            tick(batch)
        tick("end")


def make(make_loader: Callable[[], DataLoader[Any]]) -> dict[str, Any]:
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1, 1)).sum().backward()
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": make_loader(),
    }


def told(run_dir: Path, make_loader: Callable[[], Any], epochs: int = EPOCHS, **options: Any) -> list[str]:
    """Return what is warned of in a training that saves after every epoch."""
    objects = make(make_loader)
    with (
        warnings.catch_warnings(record=True) as caught,
        RunState.load(run_dir, **objects, **options) as state,
    ):
        warnings.simplefilter("always")
        for _ in state.epochs(epochs):
            for _ in state.batches():
                objects["optimizer"].step()
            state.save().wait()
    return [str(one.message) for one in caught if "as batches are loaded" in str(one.message)]


def subset(dataset: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: ConcatDataset([Subset(dataset(), range(SAMPLES))])


LOST = {
    "a number": (over(Numbered), "dataset.calls"),
    "behind torch's": (over(subset(Numbered)), "dataset.datasets[0].dataset.calls"),
    "of a collate_fn": (over(collate_fn=Augment), "collate_fn.calls"),
    "of a closure": (over(collate_fn=lambda: collating([0])), "collate_fn.<seen>"),
    "of a stage": (over(lambda: Staged([Stage(), Stage()])), "dataset.stages[1].seen"),
    "list": (over(lambda: Counting(appends, kept=[])), "dataset.kept"),
    "window": (over(lambda: Counting(appends, kept=deque(maxlen=3))), "dataset.kept"),
    "dict": (over(lambda: Counting(counts_labels, kept=Counter())), "dataset.kept"),
    "tensor": (over(lambda: Counting(adds_up, kept=torch.zeros(2))), "dataset.kept"),
    "array": (over(lambda: Counting(adds_up, kept=np.zeros(2))), "dataset.kept"),
    "count": (over(lambda: Counting(is_asked, kept=itertools.count())), "dataset.kept"),
}


@pytest.mark.parametrize("workers", [NEW, KEPT], ids=["new", "kept"])
@pytest.mark.parametrize("name", LOST)
@pytest.mark.quick(10)
def test_what_a_worker_keeps_is_warned_of_once_by_name(
    run_dir: Path, name: str, workers: dict[str, Any]
) -> None:
    make_loader, attribute = LOST[name]

    (text,) = told(run_dir, partial(make_loader, batch_size=1, **workers))

    assert text.startswith(f"loader.{attribute} changes as batches are loaded in a worker")
    assert re.search(rf"give the {attribute.partition('.')[0]} state_dict\(\).*R22", text)


def test_a_worker_tells_it_with_its_second_batch(run_dir: Path) -> None:
    objects = make(partial(over(Numbered), batch_size=1, num_workers=1))
    with warnings.catch_warnings(record=True) as caught, RunState.load(run_dir, **objects) as state:
        warnings.simplefilter("always")
        at = [
            sum("dataset.calls changes" in str(one.message) for one in caught)
            for _ in state.epochs(1)
            for _ in state.batches()
            if state.save()
        ]

    assert at[:3] == [0, 1, 1]


@pytest.mark.heavy
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_is_not_forked_tells_it_too(run_dir: Path, method: str) -> None:
    how = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": method}

    (text,) = told(run_dir, lambda: DataLoader(Numbered(), 1, **how), epochs=1)

    assert text.startswith("loader.dataset.calls changes")


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("variables", [True, False])
@pytest.mark.quick(20)
def test_nothing_is_told_of_the_trainings_own_process(run_dir: Path, name: str, variables: bool) -> None:
    assert told(run_dir, partial(LOST[name][0], batch_size=1), variables=variables) == []


STREAMS = {"passes": Passes, "totals": Totals}


@pytest.mark.parametrize("name", STREAMS)
def test_what_a_stream_keeps_from_epoch_to_epoch_is_told(run_dir: Path, name: str) -> None:
    (text,) = told(run_dir, partial(over(STREAMS[name]), **KEPT), epochs=2)

    assert text.startswith("loader.dataset.passes changes")


@pytest.mark.heavy
@pytest.mark.proves("exact")
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_whose_workers_end_with_its_epoch_is_exact(run_dir: Path, name: str) -> None:
    make_loader = partial(over(STREAMS[name]), **NEW)

    assert differences(run_dir / "stopped", partial(make, make_loader), train, STOPS) == []
    assert told(run_dir / "told", make_loader, epochs=3) == []


KEEPING = {
    "dataset": over(StatefulNumbered),
    "collate_fn": over(collate_fn=StatefulAugment),
    "sampler": over(sampler=StatefulSeeded),
    "batch_sampler": over(batch_sampler=StatefulBatches),
    "list": over(sampler=StatefulShuffling),
}


@pytest.mark.heavy
@pytest.mark.proves("exact")
@pytest.mark.parametrize("workers", WORKERS, ids=["here", "new", "kept"])
@pytest.mark.parametrize("name", KEEPING)
def test_with_a_state_it_is_exact_and_not_warned_of(
    run_dir: Path, name: str, workers: dict[str, Any]
) -> None:
    make_loader = partial(KEEPING[name], **workers)

    assert differences(run_dir / "stopped", partial(make, make_loader), train, STOPS) == []
    assert told(run_dir / "told", make_loader) == []


class Touchy(dict[str, int]):
    """Refuses to be looked at."""

    def __len__(self) -> int:
        raise AssertionError

    __iter__ = items = __getattribute__ = __len__  # type: ignore[assignment]


class Restarting(Totals):
    def __iter__(self) -> Iterator[Any]:
        self.passes = 0
        return super().__iter__()


def numbers() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": [*range(SAMPLES)]}).with_format("torch")


QUIET = {
    "plain": over(Quiet),
    "tensors": over(lambda: TensorDataset(torch.arange(SAMPLES))),
    "hugging face": over(numbers),
    "opened late": over(lambda: Counting(opens, kept=None)),
    "cache": over(lambda: Counting(fills, kept={})),
    "large cache": over(lambda: Counting(fills, kept=dict.fromkeys(range(-20_000, 0), 0))),
    "places of a cache": over(lambda: Counting(fills, kept=[None] * SAMPLES)),
    "lru_cache": over(lambda: Counting(looks_up, kept=functools.lru_cache(lambda index: [index]))),
    "generator": over(lambda: Counting(draws, kept=random.Random(3))),
    "of a library": over(lambda: Counting(learns, kept=Vocabulary())),
    "large": over(lambda: Counting(adds_up, kept=np.zeros(200_000))),
    "with a state": over(StatefulNumbered),
    "stream": over(Restarting),
}


@pytest.mark.parametrize("workers", [NEW, KEPT], ids=["new", "kept"])
@pytest.mark.parametrize("name", QUIET)
@pytest.mark.quick(10)
def test_what_every_start_makes_again_is_not_told(run_dir: Path, name: str, workers: dict[str, Any]) -> None:
    assert told(run_dir, partial(QUIET[name], batch_size=1, **workers), epochs=3) == []


def test_looking_runs_no_code_of_a_dataset(run_dir: Path) -> None:
    signature({"dataset": [weakref.proxy(one := Quiet()), Touchy()]})

    assert one is not None
