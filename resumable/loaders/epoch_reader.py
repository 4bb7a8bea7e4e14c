"""Opens an epoch of a DataLoader, counts its batches, and tracks the state of each worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from ..errors import StateMismatch, warn
from ..files import large_files
from .generators import rng, search, worker_rng
from .generators.worker_rng import States
from .source import Source
from .workers import resharding
from .workers.datasets import Stream, StreamEnded
from .workers.order import Draws, Generators, Order, Pulled
from .workers.states import Stamp, Standing, Standings, Start, freeze

Saved = Mapping[str, Any]
"""A state that `LoaderSource.collect` returned."""


class Opening:
    """An epoch that begins in this process, with new workers or those of the epoch before."""

    is_new_epoch = True
    """Whether the epoch is opened at its beginning."""

    def __init__(self) -> None:
        self.workers: Mapping[int, Standing] = {}
        self.starts: Mapping[int, Start] = {}
        self.turn = 0

    def seed_workers(self, generators: Generators) -> None:
        """Prepare the generators from which workers are seeded."""

    def draw_order(self, order: Order) -> None:
        """Prepare the generators, and the sampler, for the order that is drawn next."""


class NextEpoch(Opening):
    """An epoch that begins with workers in their states at the end of the one before."""

    def __init__(self, saved: Saved, generators: Generators) -> None:
        super().__init__()
        self.workers = _standings(saved, generators)
        self.starts = {number: Start(at, is_next_epoch=True) for number, at in self.workers.items()}
        self._made: Draws | None = saved["made"]
        self._generators = generators
        self._live: Draws | None = generators.read()

    def seed_workers(self, generators: Generators) -> None:
        """Restore the generators as they were before the workers were made."""
        if self._made is not None:
            generators.write(self._made)

    def draw_order(self, order: Order) -> None:
        """Restore this process's generators: the order is drawn from them."""
        if self._live is not None:
            self._generators.write(self._live)
            self._live = None


class MidEpoch(Opening):
    """An epoch that continues: its order is drawn again, and what is done is skipped without loading."""

    is_new_epoch = False

    def __init__(
        self, saved: Saved, generators: Generators, loader: DataLoader[Any], shows: Callable[[], bool]
    ) -> None:
        super().__init__()
        self.live = generators.read()
        """The generators of this process."""
        self._draws_at_save = worker_rng.read({})
        self._loader = loader
        self._order = {**saved["order"], "is_left": saved["is_left"], "samples": saved["samples"]}
        self._made: Draws | None = None
        if saved["num_workers"] == loader.num_workers:
            self.workers = _standings(saved, generators)
            self.turn, self._made = saved["turn"], saved["made"]
            self.starts = _starts(self.workers, shows)

    @property
    def began(self) -> worker_rng.States:
        """Return the generators as a stream began that is loaded in this process."""
        return self.starts[0].standing.began if self.starts else {}

    def seed_workers(self, generators: Generators) -> None:
        """Restore the generators as they were before the workers were made; give other workers new seeds."""
        if self._made is not None:
            generators.write(self._made)
            return
        # As many workers, on as many ranks, would have continued from their own states. These begin with
        # new seeds, the same at every resume: with the old ones they would draw the epoch's first numbers.
        loader, rank = self._loader, resharding.deal(self._loader).rank
        text = f"{torch.initial_seed()} {self._order['samples']} {rank} {loader.num_workers}"
        seed = int(large_files.digest(text.encode())[:15], 16)
        (loader.generator or torch.default_generator).manual_seed(seed)
        for path, generator in search.find([loader.dataset, loader.collate_fn]).items():
            rng.seed_one(generator, f"{text} {path}")

    def draw_order(self, order: Order) -> None:
        """Let the order be drawn again from the same generators."""
        order.go_on(self._order, self.live if self._loader.num_workers else None)

    def warn_of_shared_draws(self, stream: Stream) -> None:
        """Warn of a stream run again in this process that drew where the training draws too."""
        at = self.starts[0].standing if self.starts else Standing()
        if not self.starts or (at.data and stream.continues_exactly(at)):
            return
        began, now, live = self.began, worker_rng.read({}), self._draws_at_save
        if not began:
            # Stopped in the first batch: nothing was run again.
            return
        shared = [
            name
            for name in now
            if not rng.is_same(began[name], now[name]) and not rng.is_same(live[name], now[name])
        ]
        if shared:
            name = type(stream.dataset).__name__
            warn(
                f"{name} and the training draw from the same generators ({', '.join(shared)}). What the "
                "stream keeps of its draws (a shuffle buffer) may not be what it was: let it draw from a "
                "generator of its own, give it a state_dict, or load it in a worker. [R26]"
            )


def _standings(saved: Saved, generators: Generators) -> dict[int, Standing]:
    """Return the states of a checkpoint's workers, by number."""
    now = search.find(generators.root())
    workers = {number: Standing.restored(at) for number, at in enumerate(saved["workers"]) if at is not None}
    return {number: at.renamed(now) for number, at in workers.items()}


def _starts(workers: Mapping[int, Standing], shows: Callable[[], bool]) -> dict[int, Start]:
    most = max((at.batches for at in workers.values()), default=0)
    shown = next((number for number, at in workers.items() if at.batches == most), None)
    return {
        number: Start(at, is_next_epoch=at.batches == 0, shows_progress=number == shown and shows())
        for number, at in workers.items()
    }


class Mark(NamedTuple):
    """A loader's place after a batch."""

    batches: int
    samples: int
    """The samples that all ranks together have had: each as many as this one."""
    turn: int
    last: Pulled | None
    workers: Standings
    stamps: int
    draws: Draws | None
    """The generators before that batch was loaded, if it is loaded in this process."""

    def standings(self) -> dict[int, Standing]:
        """Return the states of the workers."""
        return self.workers.at(self.stamps)


class EpochReader(Source):
    """Counts the batches of one epoch, and tracks the state of each worker."""

    def __init__(self, loader: DataLoader[Any], own: Mapping[str, rng.Generator]) -> None:
        self.loader = loader
        self._generators = Generators(loader, own)
        self._stream = Stream(loader) if isinstance(loader.dataset, IterableDataset) else None
        self.kept_by_workers = set[str]()
        """The attributes that fetch after fetch changes in a worker, and no checkpoint has."""
        self._size = 0
        self._forget()

    def _forget(self) -> None:
        self._order = Order(
            self.loader, self._generators, self.drawn, keeps_draws=not self.loader.num_workers
        )
        self._opening: Opening | None = None
        self._seeded_epoch: int | None = None
        self._loads_ahead = False
        """Whether batches are requested before the training wants them."""
        self._late: Any = None
        """Shared with persistent workers: which of them have drawn since their last stamp."""
        self._workers = Standings({})
        self._stand_at_beginning()

    def _stand_at_beginning(self) -> None:
        self._order.begin()
        self._batches = self._samples = self._turn = 0
        self._last: Pulled | None = None
        self._draws: Draws | None = None
        self._began: States = {}
        self._has_drawn = False
        """Whether a stream has drawn for its first batch, in this process."""
        self._is_untrained = False
        """Whether the next save leaves out such a batch, because it was not trained."""
        self._is_short = self._is_through = self._is_open = False
        self._failed: deque[tuple[int | None, int | None]] = deque()

    def _stand(self, workers: Mapping[int, Standing], turn: int, late: Any) -> None:
        """Set the states in which the workers begin, and whose turn it is."""
        self._workers, self._turn, self._late = Standings(workers), turn, late

    def _resume(self, batches: int, samples: int, began: States) -> None:
        """Continue to count from the checkpoint."""
        self._batches, self._samples, self._began, self._is_open = batches, samples, began, True

    def _open_as(self, opening: Opening, seeded_epoch: int | None) -> None:
        """Open an epoch; its order is drawn when the workers, or the first batch, request it."""
        self._opening, self._seeded_epoch = opening, seeded_epoch

    # Events of the iterator over the workers.

    def order_begins(self) -> None:
        """Prepare the order to be drawn: of a new epoch, or again of a resumed one."""
        assert self._opening
        self._opening.draw_order(self._order)
        if self._opening.is_new_epoch:
            self._stand_at_beginning()
        self._order.seed_samples(self._seeded_epoch)

    def batches_begin(self) -> None:
        """Count from the beginning: no batch of the epoch before is left."""
        if self._opening and self._opening.is_new_epoch:
            now = {number: replace(at, batches=0) for number, at in self._workers.at().items()}
            self._workers = Standings(now)

    def discarded(self, stamped: Stamp) -> None:
        """Note the worker's state after a batch that is discarded."""
        self._workers = self._workers.add(stamped)

    def ran_out(self, worker: int) -> None:
        """Note that a worker's stream has ended."""
        at = self._workers.at().get(worker, Standing())
        self._workers = self._workers.put(worker, self._through(worker, at))

    def _through(self, worker: int, at: Standing) -> Standing:
        draws_late = bool(self._late and self._late[worker])
        return replace(at, is_through=True, draws_late=draws_late)

    def came_out(self, stamped: Stamp | None, number: int | None, worker: int | None = None) -> None:
        """Count a batch, and note its worker's state after it."""
        if stamped is None:
            # A failed batch counts only if the training continues without it.
            self._failed.append((number, worker))
            return
        worker, self._size, self._is_short, _, _, _, found = stamped
        self.kept_by_workers.update(found)
        self._count(number)
        if worker >= 0:
            self._workers = self._workers.add(stamped)
            self._turn = (worker + 1) % self.loader.num_workers

    def _came_out_here(self, loaded: Any) -> Any:
        """Count a batch that was loaded in this process, and return it without its stamp."""
        if self._stream is not None:
            batch, stamped = loaded
            self.came_out(stamped, None)
            return batch
        self._batches += 1
        self._last = None
        if on_its_way := self._order.on_its_way:
            self._last = last = on_its_way.popleft()
            self._size = last.samples
            self._samples += self._size * self._order.deal.shards
        return loaded

    def _count(self, number: int | None) -> None:
        self._last = self._order.came_out(number)
        self._batches += 1
        if self._last:
            self._samples += self._last.samples * self._order.deal.shards
            # A dataset that loads whole batches may return an object of another length.
            self._size = self._size if self._stream else self._last.samples

    def load(self, batches: Iterator[Any]) -> Any:
        """Load a batch in this process, and count it."""
        if self._stream and not self._began:
            self._began = self._stream.began or worker_rng.read(search.find(self._generators.root()))
        self._draws = self._generators.read_each_time() if self._loads_ahead else None
        try:
            batch = next(batches)
        except StopIteration:
            raise
        except Exception:
            if self._order.on_its_way:
                self._failed.append((None, None))
            raise
        finally:
            if self._order.kept is not None:
                # Seeding each sample must not move the training's generators.
                rng.restore(self._order.kept)
        if self._stream and not self._batches:
            now = worker_rng.read(search.find(self._generators.root()))
            self._has_drawn = not rng.is_same(now, self._began)
        return self._came_out_here(batch)

    def load_again(self, draws: Draws, loaded: Any) -> Any:
        """Count a batch that was loaded ahead at the save, and may be ahead again at the next one."""
        self._draws = draws
        return self._came_out_here(loaded)

    def forgive(self) -> int:
        count = len(self._failed)
        while self._failed:
            number, worker = self._failed.popleft()
            self._count(number)
            if self.loader.num_workers:
                by = self._turn if worker is None else worker
                at = self._workers.at().get(by, Standing())
                if self._last:
                    failed = [*at.failed, self._last.indices]
                    self._workers = self._workers.put(by, replace(at, failed=failed))
                self._turn = (by + 1) % self.loader.num_workers
        return count

    def _leaves_out_draws(self, mark: Mark) -> bool:
        """Whether a stream has drawn for its first batch, which was not trained."""
        return not mark.batches and self._has_drawn and self._stream is not None and not self._stream.state()

    def _of_untrained(self) -> str | None:
        if not self._is_untrained or self._stream is None:
            return None
        return (
            f"{type(self._stream.dataset).__name__} has drawn random numbers for the first batch of this "
            "epoch, which is not trained: a resume from this checkpoint draws others for it. Save before the "
            "batch is loaded or after it is trained, or load it in a worker. [R10]"
        )

    def ended(self) -> None:
        """Note that the epoch has no more batches."""
        self._is_through = True
        if self.loader.num_workers and self._stream is not None:
            for number, at in self._workers.at().items():
                self._workers = self._workers.put(number, self._through(number, at))

    def mark(self) -> Mark:
        workers = self._workers
        if self._stream is not None and self._is_open and not self.loader.num_workers:
            workers = Standings({0: self._standing_here(self._stream)})
        place = self._batches, self._samples, self._turn, self._last, workers, len(workers.stamps)
        return tuple.__new__(Mark, (*place, self._draws))  # its constructor is a function of Python

    def _standing_here(self, stream: Stream) -> Standing:
        return Standing(
            began=self._began,
            data={name: freeze(state) for name, state in stream.state().items()},
            is_short=self._is_short or self._is_through,
            is_through=self._is_through,
            batches=self._batches,
        )

    def size(self, batch: Any) -> int:
        return self._size


class Batches:
    """The batches of one epoch, from workers or loaded in this process."""

    def __init__(self, reader: EpochReader, batches: Iterator[Any], ahead: Iterable[Any]) -> None:
        self._reader = reader
        self._batches = batches
        self._are_from_workers = bool(reader.loader.num_workers)
        self._ahead = deque(ahead)
        """The batches that were loaded ahead at the save, each with the generators before it."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            if self._are_from_workers:
                return next(self._batches)
            if self._ahead:
                return self._reader.load_again(*self._ahead.popleft())
            return self._reader.load(self._batches)
        except StopIteration:
            self._reader.ended()
            raise
        except StreamEnded as exc:
            raise StateMismatch(
                f"the stream that is run again has come to its end too early: {exc}.",
                fix="give it the data that the run was started with, or begin the epoch's data again with "
                "allow=['loader'].",
            ) from exc
