"""Stand-ins for the user's dataset: a stream that begins where it was, and samples with their own seeds."""

from __future__ import annotations

import hashlib
import random
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...errors import warn
from ...progress import counted
from ..generators import search, worker_rng
from ..generators.worker_rng import States, Watch
from . import hugging_face
from .states import Standing, Start, freeze, is_stateful, thaw


class Stream(IterableDataset[Any]):
    """The user's iterable dataset, with its iterator, beginning where a checkpoint left it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.dataset = loader.dataset
        self.iterator: Any = None
        self.began: States | None = None
        """The generators as it began, until they are taken."""
        self._start: Start | None = None
        self._root: object = None
        self._watch: Watch | None = None
        self._has_ended: Callable[[], None] | None = None
        self._collate = loader.collate_fn
        self._batch_size = loader.batch_size
        self._drop_last = loader.drop_last
        self._first: Any = None
        """The dataset's state before the first load_state_dict()."""
        self._is_stuck = False

    def prepare(
        self,
        start: Start | None,
        root: object,
        watch: Watch | None = None,
        has_ended: Callable[[], None] | None = None,
    ) -> None:
        """Begin at `start` when it is iterated next.

        The generators hang off `root`, and `watch` knows them; `has_ended` is called after the last sample.
        """
        self._start, self._root, self._watch, self._has_ended = start, root, watch, has_ended
        if start and not self.continues_exactly(start.standing):
            self._start = start._replace(standing=replace(start.standing, data={}))

    def continues_exactly(self, at: Standing) -> bool:
        """Whether the dataset continues exactly from its state."""
        if "dataset" in at.data and not is_stateful(self.dataset):
            return False
        # In this process the generators of the state are those of the training too.
        may_have_drawn = bool(at.generators) or self._watch is None
        return at.is_short or not (may_have_drawn and hugging_face.loads_in_chunks(self.dataset))

    def take_began(self) -> States | None:
        """Return the generators as it began; None from the second call on."""
        began, self.began = self.began, None
        return began

    def __iter__(self) -> Iterator[Any]:
        start, self._start, self.began = self._start, None, None
        if start is None:
            self.iterator = self._fresh()
        elif start.is_next_epoch:
            self.iterator = self._next_epoch(start.standing)
        elif start.standing.data:
            self.iterator = self._go_on(start.standing)
        else:
            self.iterator = self._run_again(start)
        # Between two samples no code of ours runs: chain() is written in C.
        return chain(self.iterator, self._at_end()) if self._has_ended else self.iterator

    def _at_end(self) -> Iterator[Any]:
        if self._has_ended:
            self._has_ended()
        yield from ()

    def state(self) -> dict[str, Any]:
        """Return the states of the dataset and of its iterator."""
        found = {}
        if is_stateful(self.dataset) and self.iterator is not self.dataset:
            found["dataset"] = self.dataset.state_dict()  # type: ignore[attr-defined]
        if is_stateful(self.iterator):
            found["iterator"] = self.iterator.state_dict()
        return found

    def _fresh(self) -> Any:
        # Before iter(): a dataset may draw its order there, and not only with its first sample.
        self.began = self._watch.states() if self._watch else worker_rng.read(search.find(self._root))
        if self._is_stuck:
            self._load(self._first)
        return iter(self.dataset)

    def _load(self, frozen: Any) -> None:
        dataset: Any = self.dataset
        self._first = self._first or freeze(dataset.state_dict())
        dataset.load_state_dict(thaw(frozen))
        # Hugging Face's datasets begin every epoch where they were put last, and their state hides it.
        self._is_stuck = frozen is not self._first and freeze(dataset.state_dict()) != frozen

    def _go_on(self, at: Standing) -> Any:
        if "dataset" in at.data:
            self._load(at.data["dataset"])
        # To iterate again after the last sample would be to begin again.
        iterator: Any = iter(()) if at.is_short else iter(self.dataset)
        if "iterator" in at.data:
            # A dataset that is its own iterator has a state though it is not iterated again.
            owner: Any = self.dataset if at.is_short and "dataset" not in at.data else iterator
            if is_stateful(owner):
                owner.load_state_dict(thaw(at.data["iterator"]))
        put_back(at.generators, self._root)
        return iterator

    def _next_epoch(self, at: Standing) -> Any:
        # Put where another epoch has ended, one of Hugging Face begins: set_epoch() has been called by now.
        if not at.data or hugging_face.is_streamed(self.dataset):
            # The stamp of a short batch is made after the stream has ended, so it has all draws.
            draws_late = at.draws_late and not at.is_short
            if at.is_through and (draws_late or (self._drop_last and at.generators)):
                self._run_through(at)
            else:
                put_back(at.generators, self._root)
            return self._fresh()
        iterator = self._go_on(at)
        if at.is_through:
            # Changes after the last sample count too, such as a counter or a shuffle of the rest.
            deque(iterator, maxlen=0)
        return _OrAnew(self, self._fresh())

    def _run_through(self, at: Standing) -> None:
        # Draws after the last batch, and for a batch that is dropped, are in no stamp.
        put_back(at.began, self._root)
        iterator, size = iter(self.dataset), self._batch_size or 1
        while len(samples := list(islice(iterator, size))) == size:
            self._collate(samples if self._batch_size else samples[0])

    def _run_again(self, start: Start) -> Any:
        at = start.standing
        put_back(at.began, self._root)
        iterator = iter(self.dataset)
        what = f"running {type(self.dataset).__name__} again up to where it was; a state_dict would save this"
        for number in counted(at.batches, what, start.shows_progress):
            samples = list(islice(iterator, self._batch_size or 1))
            if not samples or (self._drop_last and len(samples) < (self._batch_size or 1)):
                raise StreamEnded(f"{number - 1} batches now, {at.batches} before")
            self._collate(samples if self._batch_size else samples[0])
        put_back(at.generators, self._root)
        return iterator


class _OrAnew:
    """The iterator of a stream that was put at the end of an epoch: it may have to begin again first."""

    def __init__(self, stream: Stream, iterator: Any) -> None:
        self._stream = stream
        self._inner = iterator
        self._is_first = True

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        is_first, self._is_first = self._is_first, False
        try:
            return next(self._inner)
        except StopIteration:
            if not is_first:
                raise
        self._inner = iter(self._stream.dataset)
        return next(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class EpochTooShort(Exception):
    """An epoch has come to its end before the batch at which it was to begin."""

    def __init__(self, batches: int) -> None:
        super().__init__(batches)
        self.batches = batches


class StreamEnded(Exception):
    """A stream that was run again had fewer batches than before."""


def put_back(generators: States, root: object) -> None:
    """Put the generators of this process into these states."""
    if lost := worker_rng.restore(generators, root):
        warn(
            f"the generators {', '.join(lost)} were there when the checkpoint was made, and are not there "
            "when a worker begins: what they draw is not what it would have been. [R23]"
        )


Place = tuple[int, int, Any]
"""Epoch, position in the epoch's order, and the sample's index."""


class Seeded(Dataset[Any]):
    """The user's dataset, which seeds the generators of its process before each sample."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __getitem__(self, place: Place) -> Any:
        epoch, position, index = place
        self._reseed(epoch, position)
        return self.dataset[index]

    @property
    def __getitems__(self) -> Callable[[Sequence[Place]], Any] | None:
        # A batch that is loaded at once has the seed of its first sample.
        load_all = getattr(self.dataset, "__getitems__", None)
        if not load_all:
            return None

        def load(places: Sequence[Place]) -> Any:
            self._reseed(*places[0][:2])
            return load_all([index for _, _, index in places])

        return load

    def _reseed(self, epoch: int, position: int) -> None:
        text = f"{self._seed}/{epoch}/{position}".encode()
        digest = hashlib.blake2b(text, digest_size=20).digest()
        for_python, for_numpy, for_torch = struct.unpack("<QIQ", digest)
        random.seed(for_python)
        # A seed of more than 32 bits would take numpy twenty times as long.
        np.random.seed(for_numpy)
        # torch.manual_seed looks at every device, which takes a hundred times as long.
        torch.default_generator.manual_seed(for_torch >> 1)
