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
    def inside(self) -> Any:
        """The loader of torch; where this process does not iterate over that, the loader itself."""
        is_shared = self._way.is_shared(self.loader)
        return self.loader if is_shared else getattr(self.loader, self._way.inside)

    @property
    def looks_ahead(self) -> bool:
        """Whether it loads a batch before the training wants it."""
        return self._way.looks_ahead and self.inside is not self.loader

    def begin(self, *, is_new_epoch: bool) -> None:
        """Let the samplers draw for the epoch that is to begin, or to continue."""
        self._epoch = self._way.count(self.loader)
        self._way.begin(self.loader, self._epoch, is_new_epoch)

    def through(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches as the loader's iterator does; its count moves on as it would."""
        if self.inside is self.loader:
            yield from batches
            return
        first = next(batches, _NO_BATCH)
        # Some fail where there is no batch, as after a resume behind the last one.
        iterator = iter(()) if first is _NO_BATCH else iter(self.loader)
        stand = _Stand(getattr(self.loader, self._way.inside), chain([first], batches))
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
            self._way.end(self.loader, self._epoch, has_ended)

    @contextlib.contextmanager
    def _standing(self, stand: _Stand) -> Iterator[None]:
        own = vars(self.loader)
        held = {name: own[name] for name in (self._way.inside, *self._way.off) if name in own}
        own.update(dict.fromkeys(self._way.off), **{self._way.inside: stand})
        try:
            yield
        finally:
            own.update(held)

    def collect(self, *, is_under_way: bool) -> dict[str, Any]:
        """Return the epoch that a resume begins or continues, and the seed of its order."""
        epoch = self._epoch if is_under_way else self._way.count(self.loader)
        seeds = [sampler.initial_seed for sampler in _seeded(self.loader)]
        return {"epoch": epoch, "seeds": seeds}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `collect` returned."""
        self._epoch = saved["epoch"]
        vars(self.loader)[self._way.counter] = saved["epoch"]
        for sampler, seed in zip(_seeded(self.loader), saved["seeds"], strict=False):
            sampler.initial_seed = seed


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


class _Fabric:
    """What Lightning Fabric's loaders are made of."""

    inside, counter, looks_ahead = "_dataloader", "_num_iter_calls", False
    off: tuple[str, ...] = ()
    """The attributes that are None while its iterator runs."""
    needs: tuple[str, ...] = ("_dataloader", "_num_iter_calls")
    uses: tuple[str, ...] = ("_set_sampler_epoch",)

    def count(self, loader: Any) -> int:
        return int(vars(loader)[self.counter])

    def is_shared(self, loader: Any) -> bool:
        return False

    def begin(self, loader: Any, epoch: int, is_new_epoch: bool) -> None:
        _module(loader)._set_sampler_epoch(loader._dataloader, epoch)

    def end(self, loader: Any, epoch: int, has_ended: bool) -> None:
        loader._num_iter_calls = epoch + 1


class _Accelerate(_Fabric):
    """What Accelerate's loaders are made of: one of each process (a shard), or one that rank 0 deals out."""

    inside, counter, looks_ahead = "base_dataloader", "iteration", True
    # It synchronizes the generators as an epoch begins: `begin` has done that, before the order was drawn.
    off = ("rng_types",)
    needs = ("base_dataloader", "iteration", "gradient_state", "skip_batches")
    uses = ("synchronize_rng_states",)

    def is_shared(self, loader: Any) -> bool:
        # Only rank 0 iterates, and deals out what it loads: all run an epoch again together.
        return "slice_fn" in vars(loader) and loader.state.num_processes > 1

    def begin(self, loader: Any, epoch: int, is_new_epoch: bool) -> None:
        if is_new_epoch and vars(loader).get("rng_types") is not None:
            _module(loader).synchronize_rng_states(loader.rng_types, loader.synchronized_generator)
        loader.set_epoch(epoch)

    def end(self, loader: Any, epoch: int, has_ended: bool) -> None:
        if has_ended:
            loader.iteration = epoch + 1
        else:
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


def _way_of(name: str, loader: Any) -> _Fabric:
    kind = _kind(loader)
    assert kind
    way = _WAYS[f"{kind.__module__}.{kind.__qualname__}"]
    missing = [each for each in way.needs if each not in vars(loader)]
    missing += [each for each in way.uses if not hasattr(_module(loader), each)]
    if missing:
        raise Unsupported(
            f"{name} is a {kind.__name__} of a version of {kind.__module__.partition('.')[0]} that has no "
            f"{', '.join(missing)}.",
            fix="use a version that docs/tested.md names, or give RunState the DataLoader inside it.",
        )
    if vars(loader).get("skip_batches"):
        raise UsageError(
            f"{name} skips its first {loader.skip_batches} batches.",
            fix="give RunState the prepared loader itself, not what skip_first_batches returned: "
            "state.batches() continues at the right batch.",
        )
    return way


def _module(loader: Any) -> Any:
    kind = _kind(loader)
    assert kind
    return sys.modules[kind.__module__]


def _seeded(loader: Any) -> list[Any]:
    """Return the samplers inside that seed their order by an epoch and a seed that they keep."""
    found, one = [], loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while one is not None:
        if type(getattr(one, "initial_seed", None)) is int:
            found.append(one)
        one = getattr(one, "batch_sampler", getattr(one, "sampler", None))
    return found
