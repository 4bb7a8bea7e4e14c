"""Compares the settings of a loader with those in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...loaders.generators import search
from ...loaders.source import Source


def differences(source: Source, saved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the changes that make a position in mid-epoch meaningless: a name and a description."""
    now = source.settings()
    for key, then in saved["settings"].items():
        if not saved["batch"] or then == now.get(key):
            continue
        if question := source.in_question(key, saved["source"]):
            name, why = question
            text = f"{then} in the checkpoint, {now.get(key)} in the code, in mid-epoch"
            text = f"{text}: {why}" if why else text
            yield name, text if name else f"{key} {text}"
    root = source.root()
    is_other_sampler = saved["settings"].get("sampler") != now.get("sampler")
    generators = search.renamed(saved["generators"], root)
    for path in generators.keys() ^ search.find(root).keys():
        if is_other_sampler and (path == "generator" or path.startswith("sampler.")):
            continue
        # Many datasets make theirs at the first sample. Old checkpoints have none that modules have.
        is_in_doubt = path in generators or not search.is_in_module(path)
        if is_in_doubt and (path not in generators or not search.is_free(root, path)):
            yield path, "a random generator in the checkpoint or in the code, but not in both"


def resized(source: Source, saved: Mapping[str, Any], then: int, now: int) -> Iterator[str]:
    """Yield that the rest of the epoch cannot be divided among another number of processes."""
    shards = [settings.get("shards", 1) for settings in (saved["settings"], source.settings())]
    for count, processes in zip(shards, (then, now), strict=True):
        if saved["batch"] and processes > 1 and count == 1:
            yield (
                f"in mid-epoch, with {then} processes in the checkpoint and {now} in the code: each of "
                f"{processes} loads all of the data for itself (no DistributedSampler)"
            )
            return
