"""Pipelines of WebDataset, which are run again up to where they were."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from resumable import RunState
from resumable.loaders import loader_warnings
from resumable.loaders.generators import stages

wds = pytest.importorskip("webdataset")

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # it leaves its tar files open
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:.* keeps no position"),
]

EPOCHS, SHARDS, SAMPLES = 3, 4, 7


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write 28 samples into 4 shards."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for number in range(SAMPLES * shard, SAMPLES * (shard + 1)):
                about = tarfile.TarInfo(f"{number:04d}.txt")
                about.size = len(content := str(number).encode())
                archive.addfile(about, io.BytesIO(content))
    return [str(folder / f"{shard}.tar") for shard in range(SHARDS)]


def draw() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def augmented(text: str) -> torch.Tensor:
    return torch.tensor([float(text), *draw()], dtype=torch.float64)


def collate(samples: list[Any]) -> torch.Tensor:
    return torch.stack([sample[0] for sample in samples])


def web(urls: list[str]) -> Any:
    """Return the usual pipeline: the order of its shards is drawn from a seed that its constructor draws."""
    data = wds.WebDataset(urls, shardshuffle=4).shuffle(5, rng=random.Random(random.random()))
    return data.decode().to_tuple("txt").map_tuple(augmented)


def counted(urls: list[str]) -> Any:
    """Return a pipeline whose order depends on the number of the pass."""
    return wds.DataPipeline(
        wds.SimpleShardList(urls),
        wds.detshuffle(4),
        wds.split_by_worker,
        wds.tarfile_to_samples(),
        wds.detshuffle(5),
        wds.decode(),
        wds.to_tuple("txt"),
        wds.map_tuple(augmented),
    )


def resampled(urls: list[str]) -> Any:
    """Return a pipeline that chooses its shards at random, for ever, cut into epochs."""
    return wds.DataPipeline(
        wds.ResampledShards(urls, deterministic=True),
        wds.tarfile_to_samples(),
        wds.shuffle(5, seed=7),
        wds.decode(),
        wds.to_tuple("txt"),
        wds.map_tuple(augmented),
    ).with_epoch(14)


def batched(pipeline: Callable[..., Any], **how: Any) -> Callable[[list[str]], Any]:
    return lambda urls: DataLoader(pipeline(urls), batch_size=3, collate_fn=collate, **how)


def by_web_loader(urls: list[str]) -> Any:
    loader = wds.WebLoader(web(urls).batched(2), batch_size=None, num_workers=2)
    return loader.unbatched().shuffle(6, rng=random.Random(1)).batched(3, collation_fn=collate)


def cut_by_web_loader(urls: list[str]) -> Any:
    return wds.WebLoader(counted(urls), batch_size=3, collate_fn=collate, num_workers=2).with_epoch(5)


KEPT = {"num_workers": 2, "persistent_workers": True}
KINDS: dict[str, Callable[[list[str]], Any]] = {
    "alone": lambda urls: web(urls).batched(3, collation_fn=collate),
    "workers": batched(web, num_workers=2),
    "kept workers": batched(web, **KEPT),
    "counted, alone": lambda urls: counted(urls).compose(wds.batched(3, collation_fn=collate)),
    "counted, workers": batched(counted, num_workers=2),
    "counted, kept workers": batched(counted, **KEPT),
    "resampled, alone": lambda urls: resampled(urls).compose(wds.batched(3, collation_fn=collate)),
    "resampled, kept workers": batched(resampled, **KEPT),
    "WebLoader": by_web_loader,
    "WebLoader, cut": cut_by_web_loader,
}

Stop = tuple[int, int | str]
Seen = list[Any]


def events(batches_of: Callable[[int], Any], epochs: Any) -> Iterator[Any]:
    """Yield what a training sees: its batches, and the ends of epochs, each with its own draws."""
    for epoch in epochs:
        for number, batch in batches_of(epoch):
            yield (epoch, number), batch.tolist(), draw()
        yield (epoch, "end"), [], draw()


def seeded(seed: int) -> None:
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)


def uninterrupted(make: Callable[[], Any]) -> Seen:
    seeded(0)
    loader = make()
    return [*events(lambda _: enumerate(loader, 1), range(EPOCHS))]


def counted_batches(state: RunState, _: int) -> Iterator[tuple[int, Any]]:
    return ((state.batch + 1, batch) for batch in state.batches())


def chain(run_dir: Path, make: Callable[[], Any], stops: list[Stop]) -> Seen:
    """Return what a training sees that is stopped again and again; each leg has another seed."""
    seen = []
    for seed, stop in enumerate([*stops, None]):
        seeded(seed)
        with RunState.load(run_dir, loader=make()) as state:
            for event in events(partial(counted_batches, state), state.epochs(EPOCHS)):
                seen.append(event)
                if event[0] == stop:
                    state.save()
                    break
    return seen


@pytest.mark.parametrize("name", KINDS)
def test_a_pipeline_stopped_in_mid_epoch_gives_what_it_would_have_given(
    run_dir: Path, urls: list[str], name: str
) -> None:
    stops: list[Stop] = [(0, 2), (0, 4), (1, 3), (2, 1)]
    assert chain(run_dir, lambda: KINDS[name](urls), stops) == uninterrupted(lambda: KINDS[name](urls))


@pytest.mark.parametrize("name", KINDS)
def test_a_pipeline_stopped_at_an_epochs_edge_gives_the_same(
    run_dir: Path, urls: list[str], name: str
) -> None:
    expected = uninterrupted(lambda: KINDS[name](urls))
    last = max(number for (epoch, number), *_ in expected if epoch == 0 and number != "end")

    assert chain(run_dir, lambda: KINDS[name](urls), [(0, last), (0, "end"), (1, "end")]) == expected


@pytest.mark.parametrize(
    ("shuffle", "is_warned_of"),
    [({}, True), ({"seed": 3}, False), ({"rng": random.Random(3)}, False)],
)
def test_a_buffer_that_is_mixed_by_the_clock_is_warned_of(
    urls: list[str], shuffle: dict[str, Any], is_warned_of: bool
) -> None:
    pipeline = wds.WebDataset(urls, shardshuffle=4).shuffle(5, **shuffle)
    for loader in pipeline, DataLoader(pipeline), wds.WebLoader(pipeline):
        found = [text for text in loader_warnings.of(loader) if "by the clock" in text]

        assert len(found) == is_warned_of


def test_shards_that_are_chosen_by_the_systems_entropy_are_warned_of(urls: list[str]) -> None:
    assert [*loader_warnings.of(DataLoader(wds.WebDataset(urls, resampled=True, shardshuffle=False)))]
    assert not [*loader_warnings.of(DataLoader(resampled(urls)))]


class Unnamed:
    """A filter that has no name."""

    def __call__(self, samples: Iterator[Any]) -> Iterator[Any]:
        return samples


@pytest.mark.parametrize("stage", [Unnamed(), partial(map, int)])
def test_a_filter_without_a_name_is_read(run_dir: Path, stage: Any) -> None:
    loader = DataLoader(wds.DataPipeline(lambda: iter(range(4)), wds.filters.FilterFunction(stage)))
    seen = []
    for stop in 2, 3, 9:
        with RunState.load(run_dir, loader=loader) as state:
            for batch in state.batches():
                seen.append(int(batch))
                if len(seen) == stop:
                    state.save()
                    break

    assert seen == [0, 1, 2, 3]


def test_the_names_of_webdataset_that_are_used_are_there(urls: list[str]) -> None:
    by_seed, by_count, chosen = wds.shuffle(5, seed=1), wds.detshuffle(5, seed=2), resampled(urls).pipeline[0]

    assert len(stages.kinds()) == 4
    assert stages.read(by_seed) == {"seed": 1}
    assert stages.read(by_count) == {"seed": 2, "epoch": -1}
    assert stages.read(chosen) == {"seed": 0, "epoch": -1}
