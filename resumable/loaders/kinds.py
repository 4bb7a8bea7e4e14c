"""What an object of the user is, and the slot of `RunState.load` that it belongs in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset

from . import wrappers
from .workers import torch_iterators

_KINDS: dict[str, tuple[type, ...]] = {
    "model": (nn.Module,),
    "optimizer": (torch.optim.Optimizer,),
    "scheduler": (LRScheduler, ReduceLROnPlateau),
    "scaler": (torch.amp.GradScaler,),
    "loader": (DataLoader,),
}
_ARTICLES = {
    "model": "a model",
    "optimizer": "an optimizer",
    "scheduler": "a learning-rate scheduler",
    "scaler": "a gradient scaler",
    "loader": "a DataLoader",
}


def slots_of(live: object) -> list[str]:
    """Return the slots that an object of a class of torch belongs in; none for any other."""
    live = wrappers.inside(live)
    return [slot for slot, kinds in _KINDS.items() if isinstance(live, kinds)]


def described(live: Any) -> str:
    """Return what an object is, for a message.

    >>> described(nn.Linear(1, 1)), described([nn.ReLU()]), described(nn.ReLU().state_dict())
    ('a model (Linear)', 'a list that holds a model (ReLU)', 'a state_dict')
    >>> described(10), described(nn.Linear), described(iter([]))
    ('10', 'the class Linear', 'a list_iterator')
    """
    kind = type(live).__name__
    if live is None or isinstance(live, (bool, int, float, str)):
        return f"{live!r:.100}"
    if isinstance(live, type):
        return f"the class {live.__name__}"
    if found := slots_of(live):
        return _ARTICLES[found[0]] + (f" ({kind})" if kind != "DataLoader" else "")
    if is_state_dict(live):
        return "a state_dict"
    if is_dataset(live):
        return f"a dataset ({kind})"
    if torch_iterators.handed_out(live) is not None:
        return "the iterator of a DataLoader"
    if isinstance(live, (list, tuple)) and live:
        return f"a {kind} that holds {described(live[0])}"
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"


def is_state_dict(live: object) -> bool:
    """Whether this is what the `state_dict()` of a model, an optimizer or a scheduler returns."""
    if not isinstance(live, Mapping):
        return False
    is_of_model = hasattr(live, "_metadata") or any(isinstance(one, torch.Tensor) for one in live.values())
    return is_of_model or {"state", "param_groups"} <= live.keys() or "last_epoch" in live


def is_dataset(live: object) -> bool:
    """Whether this is a dataset that only a loader makes batches of."""
    return isinstance(live, Dataset) and not isinstance(live, (IterableDataset, DataLoader))


def loaders_in(live: object) -> Iterator[DataLoader[Any]]:
    """Yield the DataLoaders in a list or a tuple."""
    if isinstance(live, (list, tuple)):
        yield from (one for one in live if isinstance(one, DataLoader))


def is_iterator_of_loader(live: object) -> bool:
    """Whether this is an iterator that torch has made of a DataLoader: it ends with the epoch."""
    return torch_iterators.handed_out(live) is not None
