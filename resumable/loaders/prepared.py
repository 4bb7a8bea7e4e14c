"""Follows the loaders that Accelerate or Fabric has prepared: one of torch, and an iterator around it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from ..errors import Unsupported, UsageError

_NO_BATCH = object()


class Prepared:
    """A loader that counts its epochs, shards by them, and iterates over a loader of torch inside it.

    Its own iterator runs, with our batches in the place of that loader's.
    """

    def __init__(self, name: str, loader: Any) -> None:
        self.loader = loader
        self._way = _way_of(name, loader)
        self._epoch = self._way.count(loader)
        """The epoch of the pass that is under way, as the loader counts them."""

    @property
    def is_shared(self) -> bool:
        """Whether rank 0 loads for all processes, so that they run an epoch again together."""
        return self._way.is_shared(self.loader)

    @property
    def inside(self) -> Any:
        """The loader of torch."""
        return getattr(self.loader, self._way.inside)

    @property
    def looks_ahead(self) -> bool:
        """Whether it loads a batch before the training wants it."""
        return self._way.looks_ahead and not self.is_shared

    def begin(self, *, is_new_epoch: bool) -> None:
        """Let the samplers draw for the epoch that is to begin, or to continue."""
        if is_new_epoch:
            self._epoch = self._way.count(self.loader)
        self._way.begin(self.loader, self._epoch, is_new_epoch)

    def through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches as the loader's iterator does; its count moves on as it would."""
        if self.is_shared:
            yield from batches
            return
        first = next(batches, _NO_BATCH)
        if first is _NO_BATCH:
            # As after a resume behind the last one: some iterators fail there.
            self._count_from(self._epoch + 1)
            return
        # The iterator counts on by itself. Nothing is counted as it is dropped, which may be much later.
        self._count_from(self._epoch)
        iterator, stand = iter(self.loader), _Stand(self.inside, chain([first], batches))
        has_ended = False
        try:
            while True:
                with self._standing(stand):
                    batch = next(iterator, _NO_BATCH)
                if batch is _NO_BATCH:
                    break
                yield batch
            has_ended = True
        finally:
            if not has_ended:
                self._way.leave(self.loader)

    @contextlib.contextmanager
    def _standing(self, stand: _Stand) -> Iterator[None]:
        own = vars(self.loader)
        held = {name: own[name] for name in (self._way.inside, *self._way.off) if name in own}
        own.update(dict.fromkeys(self._way.off), **{self._way.inside: stand})
        try:
            yield
        finally:
            own.update(held)

    def collect(self) -> dict[str, Any]:
        """Return the epoch that is under way, the loader's count, and the seeds of its order."""
        seeds = [sampler.initial_seed for sampler in _seeded(self.loader)]
        return {"epoch": self._epoch, "count": self._way.count(self.loader), "seeds": seeds}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `collect` returned."""
        self._epoch = saved["epoch"]
        self._count_from(saved["count"])
        for sampler, seed in zip(_seeded(self.loader), saved["seeds"], strict=False):
            sampler.initial_seed = seed

    def restore_epoch(self, epoch: int) -> None:
        """Continue with an epoch of a loader that had not been prepared."""
        self.restore({"epoch": epoch, "count": epoch, "seeds": []})

    def _count_from(self, epoch: int) -> None:
        vars(self.loader)[self._way.counter] = epoch


class _Stand:
    """Stands in for torch's loader while the one around it asks for batches."""

    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        self._loader = loader
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        # A state of the loader would be that of an iterator of its own.
        if name in ("state_dict", "load_state_dict", "_loader"):
            raise AttributeError(name)
        return getattr(self._loader, name)


class _Way:
    """What the loaders of one library are made of."""

    inside: str
    """The attribute with the loader of torch."""
    counter: str
    """The attribute that counts the epochs."""
    needs: tuple[str, ...] = ()
    """Other attributes that are used."""
    uses: str
    """A function of its module that is used."""
    off: tuple[str, ...] = ()
    """The attributes that are None while its iterator runs."""
    looks_ahead = False

    def count(self, loader: Any) -> int:
        """Return the number of the epoch that the next new pass has."""
        return int(vars(loader)[self.counter])

    def is_shared(self, loader: Any) -> bool:
        """Whether rank 0 loads for all processes."""
        return False

    def begin(self, loader: Any, epoch: int, is_new_epoch: bool) -> None:
        """Do what comes before an order is drawn."""
        raise NotImplementedError

    def leave(self, loader: Any) -> None:
        """Note that a pass was left before its end."""


class _Fabric(_Way):
    inside, counter, uses = "_dataloader", "_num_iter_calls", "_set_sampler_epoch"

    def begin(self, loader: Any, epoch: int, is_new_epoch: bool) -> None:
        _module(loader)._set_sampler_epoch(loader._dataloader, epoch)


class _Accelerate(_Way):
    inside, counter, uses = "base_dataloader", "iteration", "synchronize_rng_states"
    needs = ("gradient_state", "skip_batches", "use_stateful_dataloader")
    # It synchronizes the generators as an epoch begins: `begin` has done that, before the order was drawn.
    off = ("rng_types",)
    looks_ahead = True

    def is_shared(self, loader: Any) -> bool:
        return "slice_fn" in vars(loader) and loader.state.num_processes > 1

    def begin(self, loader: Any, epoch: int, is_new_epoch: bool) -> None:
        if is_new_epoch and vars(loader).get("rng_types") is not None:
            _module(loader).synchronize_rng_states(loader.rng_types, loader.synchronized_generator)
        loader.set_epoch(epoch)

    def leave(self, loader: Any) -> None:
        loader.end()


_WAYS = {
    "lightning_fabric.wrappers._FabricDataLoader": _Fabric(),
    "lightning.fabric.wrappers._FabricDataLoader": _Fabric(),
    "accelerate.data_loader.DataLoaderAdapter": _Accelerate(),
}
"""By name: importing these packages takes seconds."""


def is_prepared(loader: Any) -> bool:
    """Whether Accelerate or Fabric has prepared a loader."""
    return _kind(loader) is not None


def _kind(loader: Any) -> type | None:
    # Look at type(): by its __class__ it claims to be torch's.
    kinds = type(loader).__mro__
    return next((kind for kind in kinds if f"{kind.__module__}.{kind.__qualname__}" in _WAYS), None)


def _module(loader: Any) -> Any:
    return sys.modules[str(getattr(_kind(loader), "__module__", ""))]


def _way_of(name: str, loader: Any) -> _Way:
    kind: Any = _kind(loader)
    way = _WAYS[f"{kind.__module__}.{kind.__qualname__}"]
    missing = [each for each in (way.inside, way.counter, *way.needs) if each not in vars(loader)]
    missing += [] if hasattr(_module(loader), way.uses) else [way.uses]
    if missing:
        raise Unsupported(
            f"{name} is a {kind.__name__} of a version of {kind.__module__.partition('.')[0]} that has no "
            f"{', '.join(missing)}.",
            fix="use a version that docs/tested.md names, or give RunState the DataLoader inside it.",
        )
    if vars(loader).get("use_stateful_dataloader"):
        raise Unsupported(
            f"{name} is prepared with use_stateful_dataloader=True: Accelerate asks such a loader for its "
            "state before its first epoch, and with that draws its order.",
            fix="leave use_stateful_dataloader out: RunState restores the position of the usual loader.",
        )
    skipped = vars(loader).get("skip_batches") or getattr(loader.batch_sampler, "skip_batches", 0)
    if skipped:
        raise UsageError(
            f"{name} skips its first {skipped} batches.",
            fix="give RunState the prepared loader itself, not what skip_first_batches returned: "
            "state.batches() continues at the right batch.",
        )
    return way


def _seeded(loader: Any) -> list[Any]:
    """Return the samplers inside that seed their order by an epoch and a seed that they keep."""
    found, one = [], loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while one is not None:
        if type(getattr(one, "initial_seed", None)) is int:
            found.append(one)
        one = getattr(one, "batch_sampler", getattr(one, "sampler", None))
    return found
