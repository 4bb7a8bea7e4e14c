"""Tells torchdata's StatefulDataLoader and its samplers from others; all names of torchdata are here."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

PACKAGE = "torchdata.stateful_dataloader"
ATTRIBUTES = ("next_iter_state", "_initial_iter_for_state_dict")
"""What its loader keeps of calls to its own load_state_dict() and state_dict()."""


def is_of_its_loader(method: Any) -> bool:
    """Whether a method is StatefulDataLoader's own; by name: importing torchdata takes seconds."""
    return _is_of(method, f"StatefulDataLoader.{method.__name__}")


def counts_its_samples(sampler: object) -> bool:
    """Whether its state is only the number of samples it has yielded, as StatefulDistributedSampler's."""
    own = getattr(type(sampler), "state_dict", None)
    return own is not None and _is_of(own, "StatefulDistributedSampler.state_dict")


def is_distributed(kind: type) -> bool:
    """Whether a class is StatefulDistributedSampler: its order is that of torch's DistributedSampler."""
    return _is_of(kind, "StatefulDistributedSampler")


def was_given_a_state(loader: DataLoader[Any]) -> bool:
    """Whether the script has called `load_state_dict()`, and no pass has begun since."""
    return getattr(loader, ATTRIBUTES[0], None) is not None


def was_asked_for_its_state(loader: DataLoader[Any]) -> bool:
    """Whether the script has called `state_dict()` outside a pass, which begins one."""
    return bool(getattr(loader, ATTRIBUTES[1], False))


def _is_of(value: Any, name: str) -> bool:
    return str(value.__module__).startswith(PACKAGE) and value.__qualname__ == name
