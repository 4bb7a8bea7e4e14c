"""Chooses the source of batches for each kind of loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

from ..errors import UsageError
from .generators import rng, search
from .loader_source import LoaderSource
from .plain_iterable import PlainSource
from .prepared import Prepared, is_prepared
from .source import Source
from .stateful_loader import StatefulSource
from .workers.states import is_stateful
from .workers.torch_iterators import iterates_as_torch_does


def make(
    name: str,
    loader: Any,
    own: Mapping[str, rng.Generator],
    seeds: Callable[[], tuple[int, int] | None],
    shows: Callable[[], bool],
) -> Source:
    """Return the source for what the user loops over; `shows`: whether it shows how far it has come."""
    if is_prepared(loader):
        prepared = Prepared(name, loader)
        source = _source(name, prepared.inside, own, seeds, shows)
        source.prepared = prepared
        return source
    return _source(name, loader, own, seeds, shows)


def _source(
    name: str,
    loader: Any,
    own: Mapping[str, rng.Generator],
    seeds: Callable[[], tuple[int, int] | None],
    shows: Callable[[], bool],
) -> Source:
    is_plain = isinstance(loader, DataLoader) and iterates_as_torch_does(loader)
    # Torch seeds and shards data pipes in ways of their own.
    if is_plain and not isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return LoaderSource(loader, own, seeds, shows)
    if is_stateful(loader) and isinstance(loader, Iterable):
        return StatefulSource(loader, own)
    if isinstance(loader, Iterable) or (callable(loader) and not isinstance(loader, torch.nn.Module)):
        _refuse_kept_workers(name, loader)
        return PlainSource(loader, name.removeprefix("loader."), own, shows)
    raise UsageError(
        f"{name} is a {type(loader).__name__}, which cannot be looped over.",
        fix="pass a torch DataLoader, another iterable, a function that returns an iterator, or a dict of "
        "named ones.",
    )


def _refuse_kept_workers(name: str, loader: Any) -> None:
    """Raise UsageError for what wraps a DataLoader with persistent workers: it cannot put them back."""
    if any(inner.persistent_workers and inner.num_workers for inner in search.inside(loader, DataLoader)):
        kind = type(loader).__name__
        raise UsageError(
            f"{name} is a {kind} around a DataLoader with persistent_workers=True: to continue in the "
            "middle of an epoch it would load that epoch again, with other random numbers in its workers.",
            fix="give RunState the DataLoader itself, and put the rest around its batches: "
            f"state.batches(through=lambda batches: {kind}(batches, ...)).",
        )
