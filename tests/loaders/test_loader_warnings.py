"""What no resume can restore of some loaders, and is warned of at the load."""

from __future__ import annotations

import random
import re
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from resumable import ResumableWarning, RunState
from resumable.loaders import loader_warnings


def named(package: str, name: str, base: type = object) -> type:
    """Return a class that has the name of one of a package that is not installed."""
    return type(name, (base,), {"__module__": f"{package}.inner"})


class Noisy:
    """Samples, each with a generator of its own."""

    def __init__(self, count: int) -> None:
        self.rngs = [random.Random(index) for index in range(count)]

    def __len__(self) -> int:
        return len(self.rngs)

    def __getitem__(self, index: int) -> float:
        return self.rngs[index].random()


cv2 = ModuleType("cv2")


def blurred(samples: Any) -> Any:
    return cv2.randn(samples, 0, 1)


def seeded(samples: Any) -> Any:
    cv2.setRNGSeed(1)
    return cv2.randn(samples, 0, 1)


def resized(samples: Any) -> Any:
    return cv2.resize(samples)


def kept_elsewhere(kind: type) -> Any:
    loader = kind()
    loader.dataset = named("streaming", "StreamingDataset")()
    return loader


def loading(order: bool, workers: int) -> Any:
    return DataLoader([1, 2], num_workers=workers, in_order=order)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(
    ("loader", "what"),
    [
        (lambda: loading(False, 1), "the order in which workers finish them"),
        (lambda: loading(True, 1), None),
        (lambda: loading(False, 0), None),
        (lambda: StatefulDataLoader([1, 2], num_workers=1), None),
        (lambda: kept_elsewhere(named("torch", "DataLoader")), "only in a StreamingDataLoader"),
        (lambda: kept_elsewhere(named("streaming", "StreamingDataLoader")), None),
        (lambda: [1, 2], None),
        (lambda: DataLoader(Noisy(257)), r"dataset\.rngs holds 257 objects.*R23"),
        (lambda: DataLoader(Noisy(256)), None),
        (lambda: Noisy(257), r"rngs holds 257 objects.*default_rng\(\[seed, epoch, index\]\)"),
        (lambda: DataLoader([1], batch_sampler=dict.fromkeys(range(300), random.Random(0))), "batch_sampler"),
        (lambda: DataLoader(range(1000)), None),
        (lambda: DataLoader([random.random] * 1000), None),
        (lambda: DataLoader([1, 2], collate_fn=blurred), r"blurred draws with cv2\.randn.*NumPy"),
        (lambda: DataLoader([1, 2], sampler=[0], worker_init_fn=lambda number: blurred(0)), "cv2"),
        (lambda: blurred, "cv2"),
        (lambda: DataLoader([1, 2], collate_fn=seeded), None),
        (lambda: DataLoader([1, 2], collate_fn=resized), None),
    ],
)
def test_what_a_loader_cannot_restore_is_said(loader: Any, what: str | None) -> None:
    found = [*loader_warnings.of(loader())]

    assert [bool(re.search(str(what), text)) for text in found] == ([True] if what else [])


@pytest.mark.heavy
def test_it_is_warned_of_at_the_load_once(run_dir: Path) -> None:
    loaders = {name: loading(False, 1) for name in "ab"}
    with pytest.warns(ResumableWarning, match="in_order=False.*R24") as seen:
        RunState.load(run_dir, loader=loaders).close()

    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RunState.load(run_dir, loader=loading(True, 1)).close()
