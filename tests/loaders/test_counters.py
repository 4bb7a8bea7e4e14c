"""Counters in datasets, samplers and collate functions: warned of by name, or exact with a state."""

from __future__ import annotations

import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from stopping import differences
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    default_collate,
)

from resumable import RunState

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


class ShufflingTensor(Shuffling):
    def __init__(self) -> None:
        self.indices = torch.arange(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        self.indices.copy_(self.indices[torch.randperm(SAMPLES)])
        return iter(self.indices.tolist())


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


class Served(Quiet):
    """Counts its samples, and shows the number; no sample depends on it."""

    def __init__(self) -> None:
        self.served = 0

    def __getitem__(self, index: int) -> Any:
        self.served += 1
        if self.served % 5 == 0:
            print(f"{self.served} samples")
        return super().__getitem__(index)

    def __repr__(self) -> str:
        return "Served()"


class Passing(Seeded):
    """Counts its passes, and shuffles by another number."""

    def __init__(self) -> None:
        super().__init__()
        self.begun_passes = 0

    def __iter__(self) -> Iterator[int]:
        self.begun_passes = self.begun_passes + 1
        print("pass", self.begun_passes)
        return iter(random.sample(range(SAMPLES), SAMPLES))


class Refilled(Sampler[int]):
    """Makes its order again in each epoch, in the same list."""

    def __init__(self) -> None:
        self.refilled = [*range(SAMPLES)]

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.refilled.clear()
        self.refilled.extend(random.sample(range(SAMPLES), SAMPLES))
        return iter(self.refilled)


class Redrawn(Refilled):
    def __init__(self) -> None:
        self.redrawn = torch.arange(SAMPLES)

    def __iter__(self) -> Iterator[int]:
        self.redrawn.copy_(torch.randperm(SAMPLES))
        return iter(self.redrawn.tolist())


class Clipped(Quiet):
    """Depends on the number of its samples by way of a variable."""

    def __init__(self) -> None:
        self.clipped = 0

    def __getitem__(self, index: int) -> Any:
        self.clipped += 1
        number = min(self.clipped, 9)
        return torch.tensor([index, number])


class Copied(Quiet):
    """Gives the number of its samples to another attribute too."""

    def __init__(self) -> None:
        self.copied = self.other = 0

    def __getitem__(self, index: int) -> Any:
        self.other = self.copied = self.copied + 1
        return torch.tensor([index, self.other])


class Named(Quiet):
    """Reads the number of its samples by its name."""

    def __init__(self) -> None:
        self.named = 0

    def __getitem__(self, index: int) -> Any:
        self.named += 1
        return torch.tensor([index, getattr(self, "named")])  # noqa: B009


USED = [Clipped, Copied, Named]


def over(dataset: Any = None, **how: Any) -> Callable[..., DataLoader[Any]]:
    """Return what makes the loader: `sampler`, `batch_sampler` and `collate_fn` are classes."""

    def make(**workers: Any) -> DataLoader[Any]:
        made = {name: kind() for name, kind in how.items()}
        size = {} if "batch_sampler" in how else {"batch_size": BATCH}
        return DataLoader((dataset or Quiet)(), **size, **made, **workers)

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


def told(
    run_dir: Path,
    make_loader: Callable[[], DataLoader[Any]],
    epochs: int = EPOCHS,
    between: Callable[[DataLoader[Any], int, int], object] = lambda *_: None,
    **options: Any,
) -> list[str]:
    """Return what is warned of in a training that saves after every batch."""
    objects = make(make_loader)
    loader = objects["loader"]
    with (
        warnings.catch_warnings(record=True) as caught,
        RunState.load(run_dir, **objects, **options) as state,
    ):
        warnings.simplefilter("always")
        for epoch in state.epochs(epochs):
            between(loader, epoch, 0)
            for number, _ in enumerate(state.batches(), 1):
                objects["optimizer"].step()
                between(loader, epoch, number)
                state.save().wait()
            state.save().wait()
    return [str(one.message) for one in caught if "changes as batches" in str(one.message)]


LOST = {
    "dataset": (over(Numbered), "Numbered.calls", "dataset"),
    "collate_fn": (over(collate_fn=Augment), "Augment.calls", "collate_fn"),
    "sampler": (over(sampler=Seeded), "Seeded.epoch", "sampler"),
    "list": (over(sampler=Shuffling), "Shuffling.indices", "sampler"),
    "tensor": (over(sampler=ShufflingTensor), "ShufflingTensor.indices", "sampler"),
    "passes": (over(Passes), "Passes.passes", "dataset"),
    "totals": (over(Totals), "Totals.passes", "dataset"),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("dataset", USED)
def test_a_counter_on_which_something_may_depend_is_warned_of(run_dir: Path, dataset: Any) -> None:
    (text,) = told(run_dir, over(dataset))

    assert f".{dataset.__name__.lower()} changes" in text


@pytest.mark.parametrize("workers", WORKERS, ids=["here", "new", "kept"])
@pytest.mark.parametrize("name", LOST)
@pytest.mark.quick(24)
def test_a_counter_that_a_resume_loses_is_warned_of_once_by_name(
    run_dir: Path, name: str, workers: dict[str, Any]
) -> None:
    make_loader, attribute, role = LOST[name]

    found = told(run_dir, partial(make_loader, **workers))

    if workers is NEW and name in ("passes", "totals"):
        # Workers that are new in each epoch run such a stream from its beginning: nothing is lost.
        assert not differences(run_dir, partial(make, partial(make_loader, **workers)), train, STOPS)
        assert found == []
    else:
        (text,) = found
        has_order = attribute.endswith("indices")
        first = "what the script gives it" if has_order else "0"
        assert text.startswith(f"loader: {attribute} changes as batches are loaded, and is in no checkpoint")
        assert f"begins it with {first}. If" in text
        assert f"give the {role} state_dict()" in text


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


# What is no counter.


class Lazy(Quiet):
    """Opens its file, fills its cache and notes that, with its first samples."""

    def __init__(self) -> None:
        self.file: Any = None
        self.is_open, self.size, self.opened = False, None, -1.0

    def __getitem__(self, index: int) -> Any:
        if not self.is_open:
            self.file, self.is_open, self.size, self.opened = object(), True, SAMPLES, 17.5
        return super().__getitem__(index)


class Positions(Shuffling):
    """Counts from 0 in every epoch, and makes a new order each time."""

    def __iter__(self) -> Iterator[int]:
        self.at, self.indices = 0, random.sample(range(SAMPLES), SAMPLES)
        for index in self.indices:
            self.at += 1
            yield index


class Restarting(Totals):
    def __iter__(self) -> Iterator[Any]:
        self.passes = 0
        return super().__iter__()


def distributed(**how: Any) -> DataLoader[Any]:
    sampler = DistributedSampler(Quiet(), 1, 0)
    return DataLoader(Quiet(), BATCH, sampler=sampler, **how)


def set_epoch(loader: DataLoader[Any], epoch: int, number: int) -> None:
    if not number:
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]


def set_progress(loader: DataLoader[Any], epoch: int, number: int) -> None:
    loader.dataset.step = 10 * epoch + number  # type: ignore[attr-defined]
    loader.sampler.step = 10 * epoch + number  # type: ignore[attr-defined]


def nothing(loader: DataLoader[Any], epoch: int, number: int) -> None:
    pass


QUIET = {
    "opened late": (over(Lazy), nothing),
    "distributed": (distributed, set_epoch),
    "positions": (over(sampler=Positions), nothing),
    "progress": (over(Lazy, sampler=Positions), set_progress),
    "stream": (over(Restarting), nothing),
    "samples that are only counted": (over(Served), nothing),
    "passes that are only counted": (over(sampler=Passing), nothing),
    "refilled": (over(sampler=Refilled), nothing),
    "redrawn": (over(sampler=Redrawn), nothing),
}


@pytest.mark.parametrize("workers", WORKERS, ids=["here", "new", "kept"])
@pytest.mark.parametrize("name", QUIET)
@pytest.mark.quick(20)
def test_what_the_script_sets_or_loading_sets_once_is_no_counter(
    run_dir: Path, name: str, workers: dict[str, Any]
) -> None:
    make_loader, between = QUIET[name]

    assert told(run_dir, partial(make_loader, **workers), between=between) == []


@pytest.mark.heavy
@pytest.mark.proves("exact")
@pytest.mark.parametrize("workers", WORKERS, ids=["here", "new", "kept"])
@pytest.mark.parametrize("name", ["refilled", "redrawn", "samples that are only counted"])
def test_what_is_not_warned_of_is_exact(run_dir: Path, name: str, workers: dict[str, Any]) -> None:
    make_loader, _ = QUIET[name]

    assert differences(run_dir, partial(make, partial(make_loader, **workers)), train, STOPS) == []


def test_a_proxy_of_an_object_that_is_gone_does_no_harm(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_loader, between = QUIET["samples that are only counted"]
    monkeypatch.setitem(globals(), "gone", weakref.proxy(Quiet()))

    assert told(run_dir, make_loader, between=between) == []


def test_an_order_in_extra_is_in_the_checkpoint(run_dir: Path) -> None:
    sampler = Shuffling()
    loader = DataLoader(Quiet(), BATCH, sampler=sampler)

    assert told(run_dir, lambda: loader, extra={"order": sampler.indices}) == []
