"""The states of the workers after their last batches, and of the user's own objects, kept as bytes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ...errors import CannotStore
from ...files import codec
from ..generators import worker_rng
from ..generators.worker_rng import States
from . import hugging_face

Stamp = tuple[int, int, bool, States, "States | None", dict[str, Any], "list[str]"]
"""Worker, samples, whether the stream has ended, and what changed with the batch: generators, those when
the stream began, states of the data, and what it keeps that no state has.

A plain tuple: sending a class of ours would cost twice as much."""


_MOST = 64
"""Stamps that are kept before they are merged: the words of three generators in each are 10 KB."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of one worker: all its stamps in one."""

    generators: States = field(default_factory=dict)
    began: States = field(default_factory=dict)
    """The generators when the stream began this epoch."""
    data: dict[str, Any] = field(default_factory=dict)
    """The states of the dataset, and of a stream's iterator; frozen."""
    is_short: bool = False
    """Whether the last batch took the stream's last sample."""
    is_through: bool = False
    """Whether the stream was asked for more after that."""
    batches: int = 0
    """Batches of this epoch."""
    failed: Sequence[Any] = ()
    """The indices that it failed to load since its last stamp: trying has moved its generators too."""
    draws_late: bool = False
    """Whether the stream has drawn after its last batch, which is in no stamp."""

    def after(self, stamps: Sequence[Stamp]) -> Standing:
        """Return its state after these batches too."""
        generators, began, data = worker_rng.merged(self.generators, {}), self.began, {**self.data}
        for _, _, _, changed, begun, states, _ in stamps:
            worker_rng.merge(generators, changed)
            began = began if begun is None else begun
            data |= states
        return Standing(
            generators=generators,
            began=began,
            data=data,
            is_short=stamps[-1][2],
            batches=self.batches + len(stamps),
        )

    def renamed(self, now: Collection[str]) -> Standing:
        """Return it with the generators by the paths of `now`."""
        generators, began = (worker_rng.renamed(states, now) for states in (self.generators, self.began))
        return replace(self, generators=generators, began=began)

    def collect(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "generators": self.generators,
            "began": self.began,
            "data": {name: thaw(frozen) for name, frozen in self.data.items()},
            "is_short": self.is_short,
            "is_through": self.is_through,
            "batches": self.batches,
            "failed": list(self.failed),
            # Earlier versions do not know this one.
            **({"draws_late": True} if self.draws_late else {}),
        }

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Standing:
        """Return the state that `collect` returned."""
        return cls(**{**saved, "data": {name: freeze(state) for name, state in saved["data"].items()}})


class Standings:
    """The states of all workers, as the stamps that have come: few are ever asked for."""

    def __init__(self, first: Mapping[int, Standing]) -> None:
        self._first = first
        self.stamps: list[Stamp] = []
        """Those that have come since; only ever added to."""

    def add(self, stamped: Stamp) -> Standings:
        """Add a stamp; return what the next one is to be added to."""
        self.stamps.append(stamped)
        # The states of data may be large, and each stamp has them whole.
        return Standings(self.at()) if stamped[5] or len(self.stamps) >= _MOST else self

    def put(self, worker: int, standing: Standing) -> Standings:
        """Return these with another state of one worker."""
        return Standings({**self.at(), worker: standing})

    def at(self, count: int | None = None) -> dict[int, Standing]:
        """Return the states after that many of the stamps, or after all."""
        by_worker: dict[int, list[Stamp]] = {}
        for stamped in self.stamps[:count]:
            by_worker.setdefault(stamped[0], []).append(stamped)
        now = {worker: self._of(worker).after(stamps) for worker, stamps in by_worker.items()}
        return {**self._first, **now}

    def _of(self, worker: int) -> Standing:
        return self._first.get(worker) or Standing()


class Start(NamedTuple):
    """The state in which a worker begins."""

    standing: Standing
    is_next_epoch: bool = False
    """Whether that is the end of an epoch, and the next one begins."""
    shows_progress: bool = False


def freeze(state: Any) -> Any:
    """Return a state as immutable bytes, or the CannotStore error if it cannot be stored.

    The error is raised only if a checkpoint needs the state.
    """
    try:
        files = codec.to_files({"rank": codec.encode({"state": state})})
    except CannotStore as exc:
        return exc
    return {name: bytes(content) for name, content in files.items()}


def thaw(frozen: Any) -> Any:
    """Return the state that was frozen."""
    if isinstance(frozen, CannotStore):
        raise frozen
    files = {name: memoryview(bytearray(content)) for name, content in frozen.items()}
    tree = codec.from_files(files)["rank"]
    return codec.decode(tree.json, tree.tensors)["state"]


def is_stateful(value: object) -> bool:
    """Whether it has `state_dict()` and `load_state_dict()`, and its state is its whole state."""
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        return False
    if hugging_face.loses_samples(value):
        return False
    # MosaicML's datasets need the number of trained samples as an argument: only their loader knows it.
    with contextlib.suppress(ValueError):
        try:
            inspect.signature(value.state_dict).bind()
        except TypeError:
            return False
    return True


def states_of(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the parts that have one; a model's may be large, and seldom changes."""
    return {
        name: part.state_dict()
        for name, part in parts.items()
        if is_stateful(part) and (name == "dataset" or not isinstance(part, torch.nn.Module))
    }
