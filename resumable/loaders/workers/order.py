"""The order of an epoch's samples: records what was drawn for it, and draws it again."""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
)

from ...errors import StateMismatch
from ...files import large_files
from ...files.container_copies import copied
from ..generators import draws_between, rng, search, worker_rng
from ..generators.worker_rng import States
from . import resharding
from .datasets import EpochTooShort
from .drawn import Drawn
from .states import is_stateful
from .torchdata import counts_its_samples

Draws = dict[str, Any]
"""The states of all generators from which an order can be drawn."""


ROOTS = ("generator", "sampler", "batch_sampler", "collate_fn", "worker_init_fn", "dataset")


class Generators:
    """All generators of this process that a loader may draw from."""

    def __init__(self, loader: DataLoader[Any], own: Mapping[str, rng.Generator]) -> None:
        self._loader = loader
        self.own = own
        self._reader: search.Reader | None = None

    def at_loader(self) -> dict[str, Any]:
        """Return the loader's objects that may have generators of their own."""
        return {name: getattr(self._loader, name) for name in ROOTS}

    def root(self) -> dict[str, Any]:
        """Return these objects, and the generators that the script gave to RunState."""
        return {**self.at_loader(), "extra": self.own}

    def read(self) -> Draws:
        """Return the states of all."""
        return draws_between.read(self.root())

    def read_each_time(self) -> Draws:
        """Return the states of all, seldom searched for, before each of many batches."""
        self._reader = self._reader or search.Reader(self.root())
        return {"random": rng.collect(devices=False), "generators": self._reader.read()}

    def write(self, draws: Mapping[str, Any]) -> None:
        """Put all into these states."""
        draws_between.write(self.root(), draws)


class Pulled(NamedTuple):
    """One batch of indices, as the sampler gave it."""

    number: int
    first: int
    """The place of its first sample in the order that all ranks share."""
    samples: int
    indices: Any


_Rest = tuple[Sequence[Pulled], Iterator[Any] | None]
"""Batches that were pulled already, and the sampler's iterator after them, if it is not at its end."""


class _Indices:
    """The indices of each batch of an epoch, as they are sent.

    No generator: in one, a function of NumPy's may leave the exception that is handled around it, which would
    keep the script's frames alive, and the loop with its workers.
    """

    def __init__(self, order: Order, start: Callable[[], _Rest]) -> None:
        self._order = order
        self._start: Callable[[], _Rest] | None = start
        self._ahead: deque[Pulled] = deque()
        self._inner: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def start(self) -> None:
        """Draw the order, unless it is drawn."""
        if (start := self._start) is not None:
            self._start = None
            ahead, self._inner = start()
            self._ahead.extend(ahead)
            self._order.drawn()

    def __next__(self) -> Any:
        if self._start is not None:
            self.start()
        if self._ahead:
            return self._order.placed(self._ahead.popleft())
        if self._inner is None:
            self._order.kept = None
            raise StopIteration
        try:
            return self._order.pull(self._inner)
        except StopIteration:
            self._inner = None
            raise


class Order:
    """Stands in for a loader's index sampler: records what was drawn, and what is on its way.

    It draws nothing itself, so the order is the one that the sampler alone would have made.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        generators: Generators,
        drawn: Drawn,
        keeps_draws: bool = False,
    ) -> None:
        self._loader = loader
        self.drawn = drawn
        self._keeps_draws = keeps_draws
        self._is_batched = loader.batch_sampler is not None
        self._batch_size = loader.batch_size or 0
        self._sampler: Any = loader.batch_sampler if self._is_batched else loader.sampler
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        samplers = (loader.sampler, loader.batch_sampler)
        # The count of one that counts is that of the whole pass as it ends: loaded, it would be empty.
        self._stateful: list[Any] = [s for s in samplers if is_stateful(s) and not counts_its_samples(s)]
        self._logs_draws = not (self._is_stream or draws_at_once(self._sampler))
        """Whether the sampler may draw after its first batch."""
        self._generators = generators
        self.deal = resharding.deal(loader)
        # With in_order=False a batch may overtake one that was requested earlier.
        self._is_in_order = not loader.num_workers or getattr(loader, "in_order", True)
        self._again: tuple[Mapping[str, Any], Draws | None] | None = None
        self.on_its_way: deque[Pulled] = deque()
        """The batches that were pulled and have not come out of the loader, oldest first."""
        self._seeded_epoch: int | None = None
        """The epoch, if each index is to carry its place in it."""
        self.kept: dict[str, Any] | None = None
        """The global generators before a batch's samples were seeded in the training's process."""
        self._to_skip: tuple[int, AbstractContextManager[None]] | None = None
        self._skipping: _Indices | None = None
        """The indices of an epoch that begins in its middle."""
        self.skipped = 0
        """The samples, of all ranks, that such an epoch leaves out."""
        self.begin()

    def begin(self) -> None:
        """Return to the beginning of an epoch."""
        self._drawn: Draws | None = None
        self._begun: Draws | None = None
        self._states: list[Any] = []
        self._base: resharding.Base | str = "its dataset is a stream"
        """The source of the order that all ranks share, or why it is unknown."""
        self._log: dict[int, States] = {}
        """The global generators before each batch, by number, for which the sampler drew late."""
        self._logged: States = {}
        self._from = (0, 0)
        """The batch and the place from which the rest of the epoch is batched differently."""
        self._has_ended = self._is_short = False
        self.pulled = self._samples = 0
        self.sent = -1
        self.on_its_way.clear()

    def skip(self, batches: int, drawing: AbstractContextManager[None]) -> None:
        """Leave out that many batches of the next order, which is drawn in this context."""
        self._to_skip = batches, drawing

    def start(self) -> None:
        """Draw an order that begins in its middle, unless the workers have asked for it already."""
        indices, self._skipping = self._skipping, None
        if indices:
            indices.start()

    def seed_samples(self, epoch: int | None) -> None:
        """Send each index with this epoch and its place in it, which seed the sample; None: send it alone."""
        self._seeded_epoch = epoch

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        again, self._again = self._again, None
        if again is not None:
            return _Indices(self, partial(self._draw_again, iter(self._sampler), *again))
        if not self._is_stream:
            self._drawn = self._generators.read()
            self._states = self.states()
        # Some samplers draw as their iterator is made.
        with self._to_skip[1] if self._to_skip else nullcontext():
            inner = iter(self._sampler)
        indices = _Indices(self, partial(self._begin_order, inner))
        self._skipping = indices if self._to_skip else None
        return indices

    def states(self) -> list[Any]:
        """Return the states of samplers that have one."""
        # A copy: many samplers keep counting in the object that they return.
        states = {str(number): sampler.state_dict() for number, sampler in enumerate(self._stateful)}
        return [copy.deepcopy(state) for state in copied(states).values()]

    def load_states(self, states: Sequence[Any]) -> None:
        """Put the samplers that have one into their states."""
        for sampler, state in zip(self._stateful, states, strict=False):
            # A copy: many samplers keep counting in the object that they are given.
            sampler.load_state_dict(copy.deepcopy(state))

    def came_out(self, number: int | None = None) -> Pulled | None:
        """Note that a batch has come out of the loader: that of a number, or the oldest."""
        on_its_way = self.on_its_way
        if on_its_way and (number is None or on_its_way[0].number == number):
            return on_its_way.popleft()
        for pulled in on_its_way:
            if number is None or pulled.number == number:
                self.on_its_way.remove(pulled)
                return pulled
        return None

    def collect(self, last: Pulled | None, on_its_way: Sequence[Pulled]) -> dict[str, Any]:
        """Return the state from which the same order is drawn again, to continue with what is on its way."""
        number = min((pulled.number for pulled in on_its_way), default=self.pulled)
        has_last = last is not None and last.number == number - 1
        return {
            "drawn": self._drawn,
            "begun": self._begun,
            "base": self._base,
            "is_in_order": self._is_in_order,
            "samplers": self._states,
            "drawn_late": self._log,
            "from": list(self._from),
            "has_ended": self._has_ended,
            "is_short": self._is_short,
            "pulled": self.pulled,
            "on_its_way": [pulled.number for pulled in on_its_way],
            "has_last": has_last,
            "fingerprint": None
            if self._is_stream
            else _fingerprint([*([last] if last and has_last else []), *on_its_way]),
        }

    def go_on(self, saved: Mapping[str, Any], live: Draws | None = None) -> None:
        """Let the next `iter` yield the rest of the saved epoch.

        It draws from the generators as they were then, and afterwards restores the states `live`, or
        the current ones.
        """
        self._again = saved, live
        self._drawn, self._begun, self._states = saved["drawn"], saved["begun"], saved["samplers"]
        self._base = saved["base"]
        if self._drawn is not None:
            self._generators.write(self._drawn)
        self.load_states(self._states)

    def _drawn_from(self) -> resharding.Base | str:
        base, own = resharding.base(self._loader), getattr(self._loader.sampler, "generator", None)
        if isinstance(base, str) or own is None or type(self._loader.sampler) is not RandomSampler:
            return base
        found = search.find(self._generators.root())
        path = next((path for path, generator in found.items() if generator is own), None)
        return "its sampler's generator was not found" if path is None else {**base, "generator": path}

    def _begin_order(self, inner: Iterator[Any]) -> _Rest:
        if not self._is_stream:
            self._begun = self._generators.read()
            self._base = self._drawn_from()
        if self._to_skip:
            (count, drawing), self._to_skip = self._to_skip, None
            with drawing:
                self._skip(inner, count)
        return (), inner

    def _skip(self, inner: Iterator[Any], count: int) -> None:
        while self.pulled < count:
            if (indices := self._ask(inner)) is _END:
                raise EpochTooShort(self.pulled)
            self._numbered(indices)
        self.skipped = self._samples

    def _draw_again(self, inner: Iterator[Any], saved: Mapping[str, Any], live: Draws | None) -> _Rest:
        """Draw what was drawn up to the save; return what was on its way, and the sampler's iterator."""
        if not self._is_stream:
            live = live or self._generators.read()
            self._generators.write(self._begun or live)
        ahead, inner = self._left(inner, saved)
        self._has_ended = saved["has_ended"]
        if self._has_ended:
            # Let the sampler end here, where its last draws are undone; they were counted at the save.
            ahead, inner = [*ahead, *map(self._numbered, inner)], iter(())
        if live:
            self._generators.write(live)
        self.on_its_way.extend(ahead)
        return ahead, None if self._has_ended or saved["is_left"] else inner

    def pull(self, inner: Iterator[Any]) -> Any:
        """Return the indices of the next batch; StopIteration if there is none."""
        is_plain = self._seeded_epoch is None and not self._logs_draws
        indices = next(inner, _END) if is_plain else self._ask(inner)
        if indices is _END:
            # A sampler may draw again as it ends.
            self._has_ended = True
            raise StopIteration
        pulled = self._numbered(indices)
        self.on_its_way.append(pulled)
        if self._seeded_epoch is not None:
            return self.placed(pulled)
        self.sent, _, _, indices = pulled
        return indices

    def _ask(self, inner: Iterator[Any]) -> Any:
        """Ask the sampler for a batch, and log its late draws."""
        self.kept = None
        # The draws for the first batch may be those of the whole order.
        is_logged = self._logs_draws and self.pulled
        return self._ask_logged(inner) if is_logged else next(inner, _END)

    def _ask_logged(self, inner: Iterator[Any]) -> Any:
        """Ask the sampler for a batch, and log its late draws."""
        before = worker_rng.read({})
        indices = next(inner, _END)
        now = worker_rng.read({})
        drawn = [name for name, pieces in now.items() if not rng.is_same(before[name], pieces)]
        if drawn and indices is not _END:
            late = {name: before[name] for name in drawn}
            self._log[self.pulled] = worker_rng.differences(self._logged, late)
            self._logged = worker_rng.merged(self._logged, late)
        return indices

    def _ask_again(self, inner: Iterator[Any]) -> Any:
        """Ask the sampler for a batch, with the generators from which it drew it before."""
        if late := self._log.get(self.pulled):
            self._logged = worker_rng.merged(self._logged, late)
            worker_rng.restore({name: self._logged[name] for name in late}, None)
        return next(inner, _END)

    def _numbered(self, indices: Any) -> Pulled:
        samples, deal = 1, self.deal
        if self._is_batched:
            if type(indices) is not list and not hasattr(indices, "__len__"):
                indices = list(indices)
            samples = len(indices)
            # After a short batch the sampler has ended.
            self._is_short = samples < self._batch_size
        number, before = self.pulled, self._samples
        self.pulled, self._samples = number + 1, before + samples * deal.shards
        # Not by its own constructor, which is a function of Python.
        return tuple.__new__(Pulled, (number, before + deal.rank, samples, indices))

    def placed(self, pulled: Pulled) -> Any:
        """Return the indices as they are sent: each with its place in the epoch, if that seeds it."""
        self.sent = pulled.number
        epoch, indices = self._seeded_epoch, pulled.indices
        if epoch is None:
            return indices
        if self._keeps_draws:
            self.kept = rng.collect(devices=False)
        if self._is_batched:
            places = count(pulled.first, self.deal.shards)
            return [(epoch, place, index) for place, index in zip(places, indices, strict=False)]
        return epoch, pulled.first, indices

    def _left(self, inner: Iterator[Any], saved: Mapping[str, Any]) -> tuple[list[Pulled], Iterator[Any]]:
        """Return the batches that were on their way, and the sampler's iterator after them."""
        numbers: list[int] = saved["on_its_way"]
        first = min(numbers, default=saved["pulled"])
        if self._is_stream:
            self.pulled = first
            return [self._numbered(next(inner)) for _ in range(saved["pulled"] - first)], inner
        self._log, self._from = dict(saved["drawn_late"]), tuple(saved["from"])
        if any(self._from) and not isinstance(self._base, str):
            self._log = {}
        if any(number < self._from[0] for number in self._log):
            raise other_data("its sampler draws as it runs, so batches of another size cannot be drawn")
        self.pulled, self._samples = self._from
        if self.pulled or self._samples:
            inner = self._from_there(*self._from)
        found = []
        if not self._log:
            # There may be millions of samples: only count them.
            skipped = islice(inner, max(0, first - 1 - self.pulled))
            sizes = list(map(len, skipped) if self._is_batched else [1 for _ in skipped])
            self.pulled += len(sizes)
            self._samples += sum(sizes) * self.deal.shards
        while self.pulled < saved["pulled"] and (indices := self._ask_again(inner)) is not _END:
            pulled = self._numbered(indices)
            if pulled.number in numbers or (saved["has_last"] and pulled.number == first - 1):
                found.append(pulled)
        if self.pulled < saved["pulled"]:
            raise other_data(f"it has {self.pulled} batches now, and {saved['pulled']} were drawn")
        if saved["fingerprint"] not in (None, _fingerprint(found)):
            raise other_data(f"batch {first} is of other samples now, or those around it")
        return [pulled for pulled in found if pulled.number in numbers], inner

    def _from_there(self, batches: int, samples: int) -> Iterator[Any]:
        if not isinstance(self._base, str):
            rest = self._resharded(self._base, samples)
        else:
            has_own_batches = self._is_batched and self._loader.batch_size is None
            rest = iter(self._sampler if has_own_batches else self._loader.sampler)
            # Consume them now: the order is drawn with the first one.
            ours = samples // self.deal.shards
            deque(islice(rest, batches if has_own_batches else ours), maxlen=0)
        if self._loader.batch_size is None:
            return rest
        return iter(BatchSampler(rest, self._loader.batch_size, self._loader.drop_last))

    def _resharded(self, base: resharding.Base, start: int) -> Iterator[int]:
        """Return this rank's share of the epoch's order from a place on."""
        problem = resharding.obstacle(base, self._loader) or resharding.other_draw(base, self._loader)
        if problem:
            raise other_data(problem)
        return chain(self.deal.ours(self._whole(base), start), self._end(base))

    def _whole(self, base: resharding.Base) -> list[int]:
        """Return the order that all ranks share; the generators are as they were when it was drawn."""
        samples: Any = range(base["samples"])
        if base["sampler"] == DistributedSampler.__name__:
            dealt_to_one = DistributedSampler[int](samples, 1, 0, base["shuffle"], base["seed"])
            dealt_to_one.set_epoch(base["epoch"])
            return list(dealt_to_one)
        if base["sampler"] == RandomSampler.__name__:
            own = None
            if "generator" in base and self._begun:
                rng.write(own := torch.Generator(), self._begun["generators"][base["generator"]])
            return list(RandomSampler(samples, generator=own))
        return list(samples)

    def _end(self, base: resharding.Base) -> Iterator[int]:
        sampler = self._loader.sampler
        if type(sampler) is RandomSampler and sampler.generator is not None:
            # The sampler draws this when it ends, and the next epoch's order depends on it.
            torch.randperm(base["samples"], generator=sampler.generator)
        yield from ()


_END = object()


def draws_at_once(sampler: Any) -> bool:
    """Whether a sampler, and those inside it, are of libraries whose samplers draw nothing late."""
    if sampler is None:
        return True
    if not type(sampler).__module__.startswith(("torch.", "torchdata.", "accelerate.")):
        return False
    has_own = getattr(sampler, "generator", None) is not torch.default_generator
    inside = (getattr(sampler, name, None) for name in ("sampler", "batch_sampler"))
    return has_own and all(map(draws_at_once, inside))


def _fingerprint(batches: Sequence[Pulled]) -> str:
    text = repr([plain(pulled.indices) for pulled in batches])
    return large_files.digest(text.encode())


def plain(indices: Any) -> Any:
    """Return indices as numbers and lists, whose repr is the same on every version."""
    # The repr of a numpy integer depends on the version of numpy.
    if isinstance(indices, (np.ndarray, torch.Tensor)):
        return indices.tolist()
    if isinstance(indices, (list, tuple)):
        return [plain(index) for index in indices]
    return operator.index(indices) if hasattr(indices, "__index__") else indices


def other_data(problem: str) -> StateMismatch:
    """Return the error for a loader that yields other samples than before."""
    return StateMismatch(
        f"the loader does not give the batches that it gave before: {problem}.",
        fix="give it the dataset, sampler and batch size that the run was started with. What the script "
        "changes in them as it trains, such as the weights of a sampler, needs a state_dict() and a "
        "load_state_dict(). Or begin the epoch's data again with allow=['loader'].",
    )
