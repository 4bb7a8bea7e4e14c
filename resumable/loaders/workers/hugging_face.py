"""Says how exact the state of a Hugging Face IterableDataset is; all names of datasets are here."""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info

EXACT = {
    "ArrowExamplesIterable",
    "CyclingMultiSourcesExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "MappedExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "RepeatExamplesIterable",
    "SelectColumnsIterable",
    "SkipExamplesIterable",
    "TakeExamplesIterable",
}
"""The steps of a dataset whose state is exact; a shuffle buffer, whose items are in no state, is not."""
EXACT_ALONE = {"VerticallyConcatenatedMultiSourcesExamplesIterable"}
"""Those whose state is exact outside workers."""

MIXERS = {
    "CyclingMultiSourcesExamplesIterable",
    "InterleavedShardsExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
}
"""Those that read from several others at once, each in a thread of its own."""


def loses_samples(dataset: object) -> bool:
    """Whether the state of a dataset lacks samples that it has read and not yielded."""
    if not is_streamed(dataset):
        return False
    # A worker has a share of the shards, for which the state of a concatenation has no place.
    exact = EXACT if get_worker_info() else EXACT | EXACT_ALONE
    return _is_dealt_by_sample(dataset) or any(type(step).__name__ not in exact for step in _steps(dataset))


def loads_in_chunks(dataset: object) -> bool:
    """Whether it calls functions with several samples: after a resume it calls them again with a chunk."""
    return is_streamed(dataset) and any(getattr(step, "batched", False) for step in _steps(dataset))


def only_reads_in_threads(dataset: object) -> bool:
    """Whether the threads that it starts to mix its shards or sources call no function of the script."""
    if not is_streamed(dataset):
        return False
    mixers = [step for step in _steps(dataset) if type(step).__name__ in MIXERS]
    return not any(hasattr(inner, "function") for step in mixers for inner in _below(step))


def is_streamed(dataset: object) -> bool:
    """Whether it is an IterableDataset of Hugging Face."""
    kinds = type(dataset).__mro__
    is_theirs = any(kind.__module__ == "datasets.iterable_dataset" for kind in kinds)
    return is_theirs and hasattr(dataset, "_ex_iterable")


def _steps(dataset: Any) -> list[Any]:
    return _below(dataset._ex_iterable)


def _below(step: Any) -> list[Any]:
    """Return a step, and those from which it takes its samples."""
    inner = getattr(step, "ex_iterable", None)
    further = [inner] if inner is not None else getattr(step, "ex_iterables", [])
    return [step, *(found for one in further for found in _below(one))]


def _is_dealt_by_sample(dataset: Any) -> bool:
    """Whether each rank takes every n-th sample, because the shards are not divided among the ranks."""
    about = getattr(dataset, "_distributed", None)
    strategy = getattr(about, "strategy", "auto")
    if about is None or strategy == "shards":
        return False
    return strategy != "auto" or bool(dataset._ex_iterable.num_shards % about.world_size)
