"""The order of an epoch's samples: what was drawn for it, and the same drawn again."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from . import disk, rng, stamp
from .errors import StateMismatch
from .worker import is_stateful

Draws = dict[str, Any]
"""The states of all generators that an order can be drawn from."""


_ROOTS = ("dataset", "sampler", "batch_sampler", "generator", "collate_fn", "worker_init_fn")


class Generators:
    """All generators of this process that a loader may draw from."""

    def __init__(self, loader: DataLoader[Any], own: Mapping[str, rng.Generator]) -> None:
        self._loader = loader
        self.own = own

    @property
    def root(self) -> dict[str, Any]:
        """Where they hang."""
        return {**{name: getattr(self._loader, name) for name in _ROOTS}, "extra": self.own}

    def read(self) -> Draws:
        """Return the states of all."""
        states = {path: rng.read(generator) for path, generator in rng.find(self.root).items()}
        return {"random": rng.collect(devices=False), "generators": states}

    def write(self, draws: Mapping[str, Any]) -> None:
        """Put all into these states."""
        rng.restore(draws["random"])
        found = rng.find(self.root)
        for path in found.keys() & draws["generators"].keys():
            rng.write(found[path], draws["generators"][path])


@dataclass(frozen=True, slots=True)
class Pulled:
    """One batch of indices, as the sampler gave it."""

    number: int
    first: int
    """The place of its first sample in the epoch."""
    samples: int
    indices: Any


class Order:
    """A loader's index sampler, in its place: it knows what was drawn, and what is on its way.

    It draws nothing itself, so the order is the one that the sampler alone would have made.
    """

    def __init__(self, loader: DataLoader[Any], generators: Generators, keeps_draws: bool = False) -> None:
        self._loader = loader
        self._keeps_draws = keeps_draws
        self._is_batched = loader.batch_sampler is not None
        self._sampler: Any = loader.batch_sampler if self._is_batched else loader.sampler
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._stateful: list[Any] = [s for s in (loader.sampler, loader.batch_sampler) if is_stateful(s)]
        self._generators = generators
        self._again: tuple[Mapping[str, Any], Draws | None] | None = None
        self.on_its_way: deque[Pulled] = deque()
        """What was pulled and has not come out of the loader, the oldest first."""
        self.seeded_epoch: int | None = None
        """The epoch, if each index is to carry its place in it."""
        self.kept: dict[str, Any] | None = None
        """The global generators as they were before the samples were seeded, in the training's process."""
        self.begin()

    def begin(self) -> None:
        """Stand at the beginning of an epoch."""
        self._drawn: Draws | None = None
        self._begun: Draws | None = None
        self._states: list[Any] = []
        self._has_ended = self._is_drawn_late = False
        self.pulled = self._samples = 0
        self.on_its_way.clear()

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        again, self._again = self._again, None
        if again is not None:
            return self._draw_again(iter(self._sampler), *again)
        if not self._is_stream:
            self._drawn = self._generators.read()
            self._states = [sampler.state_dict() for sampler in self._stateful]
        return self._draw(iter(self._sampler))

    def came_out(self, number: int | None = None) -> Pulled | None:
        """Note that a batch has come out of the loader: the one of a number, or the oldest."""
        for pulled in self.on_its_way:
            if number is None or pulled.number == number:
                self.on_its_way.remove(pulled)
                return pulled
        return None

    def collect(self, last: Pulled | None, on_its_way: Sequence[Pulled]) -> dict[str, Any]:
        """Return what draws the same order again, to go on with what is on its way."""
        # What is drawn in between the training's own draws cannot be drawn again.
        is_late = self._is_drawn_late
        number = min((pulled.number for pulled in on_its_way), default=self.pulled)
        is_in_order = last is not None and last.number == number - 1
        return {
            "drawn": self._drawn,
            "begun": self._begun,
            "samplers": self._states,
            "has_ended": self._has_ended,
            "pulled": self.pulled,
            "on_its_way": [pulled.number for pulled in on_its_way],
            "indices": [pulled.indices for pulled in on_its_way] if is_late else None,
            "is_in_order": is_in_order,
            "fingerprint": None
            if is_late or self._is_stream
            else _fingerprint(last if is_in_order else None, on_its_way),
        }

    def go_on(self, saved: Mapping[str, Any], live: Draws | None = None) -> None:
        """Let the next `iter` give what is left of the saved epoch.

        It draws from where that was drawn, and then puts the generators into the states `live`, or
        where they were before.
        """
        self._again = saved, live
        self._drawn, self._begun, self._states = saved["drawn"], saved["begun"], saved["samplers"]
        self._is_drawn_late = saved["indices"] is not None
        if self._drawn is not None:
            self._generators.write(self._drawn)
        for sampler, state in zip(self._stateful, self._states, strict=False):
            sampler.load_state_dict(state)

    def _draw(self, inner: Iterator[Any]) -> Iterator[Any]:
        if not self._is_stream:
            self._begun = self._generators.read()
            yield from self._give(islice(inner, 1))
        yield from self._rest(inner)

    def _rest(self, inner: Iterator[Any]) -> Iterator[Any]:
        # The first batch's draws may be those of the whole order.
        before = stamp.read({})
        for indices in islice(inner, 1):
            self._is_drawn_late |= not stamp.is_same(before, stamp.read({}))
            yield from self._give([indices])
        yield from self._give(inner)
        # (a sampler may draw once more as it ends)
        self._has_ended = True

    def _draw_again(
        self, inner: Iterator[Any], saved: Mapping[str, Any], live: Draws | None
    ) -> Iterator[Any]:
        if not self._is_stream:
            live = live or self._generators.read()
            self._generators.write(self._begun or live)
        ahead, inner = self._left(inner, saved)
        self._has_ended = saved["has_ended"]
        if self._has_ended:
            # Let it end here, and not once more where its draws would count.
            ahead, inner = [*ahead, *map(self._next, inner)], iter(())
        if live:
            self._generators.write(live)
        for pulled in ahead:
            yield self._sent(pulled)
        if not self._has_ended and not saved["is_left"]:
            yield from self._rest(inner)

    def _give(self, inner: Iterable[Any]) -> Iterator[Any]:
        for indices in inner:
            yield self._sent(self._next(indices))

    def _next(self, indices: Any) -> Pulled:
        samples = len(indices) if self._is_batched else 1
        pulled = Pulled(self.pulled, self._samples, samples, indices)
        self.pulled, self._samples = self.pulled + 1, self._samples + samples
        return pulled

    def _sent(self, pulled: Pulled) -> Any:
        self.on_its_way.append(pulled)
        epoch, indices = self.seeded_epoch, pulled.indices
        if epoch is None:
            return indices
        if self._keeps_draws:
            self.kept = rng.collect(devices=False)
        if self._is_batched:
            return [(epoch, place, index) for place, index in enumerate(indices, pulled.first)]
        return epoch, pulled.first, indices

    def _left(self, inner: Iterator[Any], saved: Mapping[str, Any]) -> tuple[list[Pulled], Iterator[Any]]:
        """Return what was on its way, and the sampler's iterator after it."""
        if saved["is_other"] and not self._is_stream:
            self.pulled, self._samples = saved["batches"], saved["samples"]
            return [], self._from_there(saved["batches"], saved["samples"])
        numbers: list[int] = saved["on_its_way"]
        first = min(numbers, default=saved["pulled"])
        last = None
        if self._is_stream:
            self.pulled = first
        for indices in islice(inner, first - self.pulled):
            last = self._next(indices)
        window = [self._next(indices) for indices in islice(inner, saved["pulled"] - first)]
        if self._is_stream:
            return window, inner
        if saved["indices"] is not None:
            drawn_late = zip(numbers, saved["indices"], strict=True)
            return [Pulled(number, 0, 0, indices) for number, indices in drawn_late], inner
        if self.pulled < saved["pulled"]:
            raise _other_data(f"it has {self.pulled} batches now, and {saved['pulled']} were drawn")
        on_its_way = [pulled for pulled in window if pulled.number in numbers]
        fingerprint = _fingerprint(last if saved["is_in_order"] else None, on_its_way)
        if saved["fingerprint"] != fingerprint:
            raise _other_data(f"batch {first} is of other samples now, or those around it")
        return on_its_way, inner

    def _from_there(self, batches: int, samples: int) -> Iterator[Any]:
        if self._is_batched and self._loader.batch_size is None:
            return islice(iter(self._sampler), batches, None)
        rest = islice(iter(self._loader.sampler), samples, None)
        if self._loader.batch_size is None:
            return rest
        return iter(BatchSampler(rest, self._loader.batch_size, self._loader.drop_last))


def _fingerprint(last: Pulled | None, on_its_way: Sequence[Pulled]) -> str:
    text = repr([_plain(pulled.indices) for pulled in (last, *on_its_way) if pulled])
    return disk.digest(text.encode())


def _plain(indices: Any) -> Any:
    # A numpy integer is written otherwise by each version of numpy.
    if isinstance(indices, (list, tuple)):
        return [_plain(index) for index in indices]
    return operator.index(indices) if hasattr(indices, "__index__") else indices


def _other_data(problem: str) -> StateMismatch:
    return StateMismatch(
        f"the loader does not give the batches that it gave before: {problem}.",
        fix="give it the dataset, sampler and batch size that the run was started with, or begin the "
        "epoch's data anew with allow=['loader'].",
    )
