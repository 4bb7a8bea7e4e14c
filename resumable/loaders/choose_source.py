"""Chooses the source of batches for each kind of loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

from ..errors import UsageError
from . import kinds
from .generators import rng, search
from .loader_source import LoaderSource
from .plain_iterable import PlainSource
from .prepared import Prepared, is_prepared
from .source import Source
from .stateful_loader import StatefulSource
from .workers import hugging_face
from .workers.states import is_stateful
from .workers.torch_iterators import iterates_as_torch_does, iterates_as_torchdata_does


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
        source = (
            PlainSource(loader, name.removeprefix("loader."), own, shows)
            if prepared.is_shared
            else _source(name, prepared.inside, own, seeds, shows)
        )
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
    is_plain = isinstance(loader, DataLoader) and _iterates_as_known(loader)
    # Torch seeds and shards data pipes in ways of their own.
    if is_plain and not isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return LoaderSource(loader, own, seeds, shows)
    if is_stateful(loader) and isinstance(loader, Iterable) and not hugging_face.loads_in_chunks(loader):
        return StatefulSource(loader, own)
    refuse_others(name, loader)
    _refuse_kept_workers(name, loader)
    return PlainSource(loader, name.removeprefix("loader."), own, shows)


def _can_be_looped_over(loader: object) -> bool:
    is_function = callable(loader) and not isinstance(loader, torch.nn.Module)
    return isinstance(loader, Iterable) or is_function


def refuse_others(name: str, loader: Any) -> None:
    """Raise UsageError for what is no loader, and for a list of them; the name may be "batches()"."""
    what = f"{name} {'was given' if name == 'batches()' else 'is'} {kinds.described(loader)}"
    if kinds.is_dataset(loader) and not isinstance(loader, Iterable):
        problem = f"{what}, and should be a loader, which makes batches of it."
        problem = problem.replace("should be", "takes") if name == "batches()" else problem
        fix = "wrap it: RunState.load(..., loader=torch.utils.data.DataLoader(dataset, batch_size=...)), and "
        fix += "loop over state.batches()."
    elif kinds.is_iterator_of_loader(loader):
        problem = f"{what}, which ends with the epoch and cannot begin again."
        fix = "give the DataLoader itself: loader=loader, not iter(loader)."
    elif [*kinds.loaders_in(loader)]:
        problem = f"{what}: its batches would be loaders."
        fix = "name them: loader={'train': ..., 'val': ...}; then loop over state.batches('train')."
    elif not _can_be_looped_over(loader):
        problem = f"{what}, which cannot be looped over."
        fix = "give a DataLoader, another iterable, a function that returns an iterator, or a dict of "
        fix += "named ones."
    else:
        return
    raise UsageError(problem, fix=fix)


def _iterates_as_known(loader: DataLoader[Any]) -> bool:
    return iterates_as_torch_does(loader) or iterates_as_torchdata_does(loader)


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
