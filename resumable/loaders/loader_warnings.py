"""Warns of the parts of a loader that no resume can restore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from .generators import code_names, search, stages
from .workers import hugging_face
from .workers.order import ROOTS


def of(loader: Any) -> Iterator[str]:
    """Yield what will differ after a resume, and what to do about it.

    >>> [*of(DataLoader(range(4)))]
    []
    """
    workers = getattr(loader, "num_workers", 0)
    if workers and not getattr(loader, "in_order", True):
        yield (
            "in_order=False gives batches in the order in which workers finish them: no two runs are the "
            "same. Every sample comes exactly once after a resume too. For an exact one leave it out. [R24]"
        )
    dataset = getattr(loader, "dataset", None)
    is_kept = workers and getattr(loader, "persistent_workers", False)
    if is_kept and loader.drop_last and hugging_face.is_streamed(dataset):
        yield (
            "drop_last=True and persistent_workers=True over an IterableDataset of Hugging Face: what the "
            "workers draw for a batch that is dropped is not restored at the end of an epoch, and the next "
            "ones differ. Leave out one of the two. If nothing is drawn there, nothing is lost. [R24]"
        )
    for data in dataset, loader:
        if hugging_face.is_streamed(data) and not hugging_face.only_reads_in_threads(data):
            yield _IN_THREADS
    if _is_a(dataset, "streaming", "StreamingDataset") and not _is_a(
        loader, "streaming", "StreamingDataLoader"
    ):
        yield (
            f"a StreamingDataset keeps its place only in a StreamingDataLoader, and this is a "
            f"{type(loader).__name__}. [R24]"
        )
    yield from _of_generators(_root(loader))


def _root(loader: Any) -> object:
    is_torchs = isinstance(loader, DataLoader)
    return {name: getattr(loader, name) for name in ROOTS if hasattr(loader, name)} if is_torchs else loader


def _of_generators(root: object) -> Iterator[str]:
    reached = search.walk(root)
    for path, length in search.overlong(reached):
        yield (
            f"{path or 'the loader'} holds {length:,} objects, and random generators are among them: of "
            f"more than {search.WIDEST} none are saved, and what they draw differs after a resume. Make one "
            "where a sample is made: np.random.default_rng([seed, epoch, index]). [R23]"
        )
    for path, stage, _ in reached:
        if stages.is_unrepeatable(stage):
            yield _UNREPEATABLE.format(path)
    for function in search.functions(reached):
        for name in sorted(code_names.cv2_draws(function)):
            yield (
                f"{function.__qualname__} draws with cv2.{name}, and OpenCV's generator cannot be read: what "
                "it draws differs after a resume. Draw with NumPy. [R23]"
            )


_IN_THREADS = (
    "an IterableDataset of Hugging Face calls the functions of map() or filter() that come before shuffle() "
    "or interleave_datasets() in several threads: what they draw at random is not restored by a resume in "
    "mid-epoch. Put the map() that draws after it. If nothing is drawn there, nothing is lost. [R25]"
)
_UNREPEATABLE = (
    "{0} of the WebDataset mixes its data by the clock or the system's entropy: no two runs are the same, "
    "and a resume in mid-epoch has some samples twice and others not at all. Give shuffle() a seed= or an "
    "rng=random.Random(...), or use wds.detshuffle(); in place of resampled=True begin a wds.DataPipeline "
    "with wds.ResampledShards(urls, deterministic=True). [R24]"
)


def _is_a(value: Any, package: str, name: str) -> bool:
    """Whether a value is of this class of a package, or of a subclass, without importing either."""
    kinds = type(value).__mro__
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == package for kind in kinds)
