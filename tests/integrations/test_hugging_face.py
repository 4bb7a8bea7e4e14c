"""Datasets of Hugging Face: what their state can continue from, and what is run again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from resumable import ResumableWarning, RunState
from resumable.loaders import loader_warnings
from resumable.loaders.workers import hugging_face

datasets = pytest.importorskip("datasets")
from datasets.distributed import split_dataset_by_node  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:.* keeps no position"),
    # Looped over by samples, more of them than draws are kept: nothing is drawn before the buffer.
    pytest.mark.filterwarnings("ignore:loader and the training draw from the same generators"),
]

EPOCHS = 3
Stop = tuple[int, int | str]
Seen = list[Any]


def draw() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def noisy(example: dict[str, Any]) -> dict[str, Any]:
    return {**example, "noise": draw()}


def noisy_batch(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": batch["x"], "noise": [draw() for _ in batch["x"]]}


def doubled_batch(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": [2 * x for x in batch["x"]]}


def indexed() -> Any:
    return datasets.Dataset.from_dict({"x": [*range(28)]})


def streamed(shards: int = 4) -> Any:
    return indexed().to_iterable_dataset(num_shards=shards)


def mixed() -> Any:
    return streamed().shuffle(seed=5, buffer_size=6)


DATA: dict[str, Callable[[], Any]] = {
    "indexed": lambda: indexed().shuffle(seed=3).with_transform(noisy_batch),
    "streamed": lambda: streamed().map(noisy).with_format("torch"),
    "filtered": lambda: streamed().filter(lambda one: one["x"] % 3 != 0).map(noisy),
    "mixed": lambda: mixed().map(noisy),
    "in chunks": lambda: streamed().map(noisy_batch, batched=True, batch_size=4),
    "in chunks without draws": lambda: streamed().map(doubled_batch, batched=True, batch_size=4),
    "interleaved": lambda: datasets.interleave_datasets(
        [streamed(), mixed()], probabilities=[0.6, 0.4], seed=3
    ).map(noisy),
    "concatenated": lambda: datasets.concatenate_datasets([streamed(), streamed()]).map(noisy),
    "repeated": lambda: streamed().skip(3).take(11).repeat(2).map(noisy),
    "by shard": lambda: split_dataset_by_node(mixed().map(noisy), 1, 2),
    "by sample": lambda: split_dataset_by_node(streamed().map(noisy), 1, 3),
}
WAYS: dict[str, Any] = {
    "alone": {},
    "workers": {"num_workers": 2},
    "kept workers": {"num_workers": 2, "persistent_workers": True},
}
EXACT = [
    *((name, way) for name in DATA for way in ("workers", "kept workers", None)),
    *((name, "alone") for name in ("indexed", "streamed", "filtered", "in chunks without draws")),
]


def collate(samples: list[dict[str, Any]]) -> torch.Tensor:
    rows = [[float(one["x"]), *map(float, one.get("noise", []))] for one in samples]
    return torch.tensor(rows, dtype=torch.float64)


def loader_over(data: Any, way: str | None) -> Any:
    """Return a DataLoader, or the dataset itself to loop over."""
    return data if way is None else DataLoader(data, batch_size=3, collate_fn=collate, **WAYS[way])


def numbers(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else collate([batch]).tolist()


def seeded(seed: int) -> None:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def events(data: Any, batches: Callable[[], Any], epochs: Any) -> Iterator[Any]:
    """Yield what a training sees: its batches, and the ends of epochs, each with its own draws."""
    for epoch in epochs:
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        for number, batch in batches():
            yield (epoch, number), numbers(batch), draw()
        yield (epoch, "end"), [], draw()


def uninterrupted(name: str, way: str | None) -> Seen:
    seeded(0)
    data = DATA[name]()
    loader = loader_over(data, way)
    return [*events(data, lambda: enumerate(loader, 1), range(EPOCHS))]


def leg(run_dir: Path, name: str, way: str | None, stop: Stop | None, seed: int) -> Seen:
    seeded(seed)
    data, seen = DATA[name](), []
    with RunState.load(run_dir, loader=loader_over(data, way)) as state:
        for event in events(
            data,
            lambda: ((state.batch + 1, batch) for batch in state.batches()),
            state.epochs(EPOCHS),
        ):
            seen.append(event)
            if event[0] == stop:
                state.save()
                break
    return seen


def chain(run_dir: Path, name: str, way: str | None, stops: list[Stop]) -> Seen:
    """Return what a training sees that is stopped again and again; each leg has another seed."""
    legs = enumerate([*stops, None])
    return [event for seed, stop in legs for event in leg(run_dir, name, way, stop, seed)]


@pytest.mark.quick(4)
@pytest.mark.parametrize(("name", "way"), EXACT)
def test_a_dataset_stopped_in_mid_epoch_gives_what_it_would_have_given(
    run_dir: Path, name: str, way: str | None
) -> None:
    stops: list[Stop] = [(0, 2), (0, 3), (1, 2), (2, 1)]
    assert chain(run_dir, name, way, stops) == uninterrupted(name, way)


@pytest.mark.parametrize(("name", "way"), EXACT)
def test_a_dataset_stopped_at_an_epochs_edge_gives_the_same(
    request: pytest.FixtureRequest, run_dir: Path, name: str, way: str | None
) -> None:
    if (name, way) == ("interleaved", "kept workers"):
        request.applymarker(pytest.mark.xfail(strict=True, reason="it is not exact yet"))
    expected = uninterrupted(name, way)
    last = max(number for (epoch, number), *_ in expected if epoch == 0 and number != "end")

    assert chain(run_dir, name, way, [(0, last), (0, "end"), (1, "end")]) == expected


def test_a_buffer_that_shares_generators_with_the_training_is_warned_of(run_dir: Path) -> None:
    leg(run_dir, "in chunks", "alone", (0, 2), 0)

    with pytest.warns(UserWarning, match="draw from the same generators"):
        leg(run_dir, "in chunks", "alone", (0, 3), 1)


@pytest.mark.parametrize("drops", [True, False])
def test_draws_for_a_dropped_batch_in_kept_workers_are_warned_of(drops: bool) -> None:
    loader = DataLoader(streamed(), drop_last=drops, **WAYS["kept workers"])

    assert ["drop_last=True" in text for text in loader_warnings.of(loader)] == [True] * drops


def test_only_states_that_lack_nothing_are_used() -> None:
    for data in mixed(), DATA["interleaved"](), DATA["by sample"]():
        assert hugging_face.loses_samples(data)
    for data in (
        indexed(),
        streamed(),
        DATA["filtered"](),
        DATA["repeated"](),
        split_dataset_by_node(streamed(), 1, 2),
    ):
        assert not hugging_face.loses_samples(data)


def test_the_threads_of_a_shuffle_are_told_from_those_that_call_functions() -> None:
    assert hugging_face.only_reads_in_threads(mixed().map(noisy))
    assert not hugging_face.only_reads_in_threads(streamed().map(noisy).shuffle(seed=5, buffer_size=6))


def interleaved(first: Any, **how: Any) -> Any:
    return datasets.interleave_datasets([first, streamed()], **how)


@pytest.mark.parametrize(
    ("data", "is_warned_of"),
    [
        (lambda: streamed().map(noisy).shuffle(seed=5, buffer_size=6), True),
        (lambda: interleaved(streamed().map(noisy)), True),
        (lambda: interleaved(streamed().map(noisy), probabilities=[0.6, 0.4], seed=3), True),
        (lambda: interleaved(streamed().filter(bool), probabilities=[0.6, 0.4]).with_format("torch"), True),
        (lambda: interleaved(streamed()).map(noisy), False),
        (lambda: mixed().map(noisy), False),
        (lambda: indexed().map(noisy, keep_in_memory=True), False),
    ],
)
def test_functions_that_are_called_in_threads_are_warned_of(data: Any, is_warned_of: bool) -> None:
    for loader in data(), DataLoader(data()), DataLoader(data(), num_workers=2):
        found = [text for text in loader_warnings.of(loader) if "in several threads" in text]

        assert len(found) == is_warned_of


def test_functions_that_are_called_in_threads_are_warned_of_at_the_load(run_dir: Path) -> None:
    with pytest.warns(ResumableWarning, match="Put the map.. that draws after it"):
        RunState.load(run_dir, loader=DataLoader(interleaved(streamed().map(noisy)))).close()


def test_the_names_of_datasets_that_are_used_are_there() -> None:
    kinds = vars(datasets.iterable_dataset)

    names = hugging_face.EXACT | hugging_face.EXACT_ALONE | hugging_face.MIXERS
    assert not [name for name in names if name not in kinds]
    assert hugging_face.is_streamed(streamed())
    assert not hugging_face.is_streamed(indexed())
    assert hugging_face.loads_in_chunks(DATA["in chunks"]())
    assert not hugging_face.loads_in_chunks(mixed())
