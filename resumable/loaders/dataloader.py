"""The batches of a torch DataLoader, from the beginning of an epoch or from its middle."""

from __future__ import annotations

import multiprocessing
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from ..errors import StateMismatch, UsageError, warn
from ..files import large_files
from ..run.changes import HARMLESS, MAY, WILL
from . import resharding as shards
from . import rng, worker_rng
from .counters import Counter, Counters
from .order import Draws, Generators, Order, Pulled, draws_at_once, other_data, plain
from .sample_seeds import Seeded
from .torch_iterators import Workers, in_process, sheltered, stand_in
from .worker import Stamp, Standing, Start, Stream, StreamEnded, Worker, freeze, is_stateful, states_of
from .worker_rng import States


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a loader stands with the batch that it gave last."""

    batches: int
    samples: int
    """The samples of the epoch's order that all ranks together have had: each as many as this one."""
    turn: int
    last: Pulled | None
    workers: Mapping[int, Standing]
    draws: Draws | None
    """What the generators were before that batch was loaded, where it is loaded in this process."""


class LoaderSource:
    """The batches of a DataLoader of torch."""

    has_cheap_marks = True

    def __init__(
        self,
        loader: DataLoader[Any],
        own: Mapping[str, rng.Generator],
        seeds: Callable[[], tuple[int, int] | None],
        shows: Callable[[], bool],
    ) -> None:
        self.loader = loader
        self._shows = shows
        self._latest: weakref.ref[Workers] | None = None
        self._size = 0
        self._loads_ahead = False
        """Whether batches are asked for before the training wants them."""
        self._seeds = seeds
        self._generators = Generators(loader, own)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._stream = Stream(loader) if self._is_stream else None
        self._split = _split(loader.dataset)
        self._saved: Mapping[str, Any] | None = None
        self._given = self._drawn = self._dataset_length()
        """How long the dataset was when the script gave it, and when the last order was drawn."""
        roots = {} if loader.num_workers else {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
        self._counters = [Counters(role, root) for role, root in roots.items()]
        self._counted: dict[str, Counter] = {}
        """Counters that no checkpoint has, by name."""
        self._told: set[str] = set()
        self._forget()

    def _dataset_length(self) -> int | None:
        return None if self._is_stream else _length(self.loader.dataset)

    def _forget(self) -> None:
        self._order = Order(self.loader, self._generators, keeps_draws=not self.loader.num_workers)
        self._pool: Workers | None = None
        self._late: Any = None
        """Shared with the workers that persist: which of them have drawn what no stamp tells of."""
        self._view: DataLoader[Any] = self.loader
        self._workers: dict[int, Standing] = {}
        self._made: Draws | None = None
        self._again: Mapping[str, Any] | None = None
        self._live: Draws | None = None
        self._length: int | None = None
        self._stand_at_beginning()

    def _stand_at_beginning(self) -> None:
        self._order.begin()
        self._batches = self._samples = self._turn = 0
        self._last: Pulled | None = None
        self.draws: Draws | None = None
        self._began: States = {}
        self._is_short = self._is_through = self._is_open = False
        self._failed: deque[tuple[int | None, int | None]] = deque()

    def settings(self) -> dict[str, Any]:
        """Return how the script made the loader."""
        loader, dataset = self.loader, self.loader.dataset
        return {
            "batch_size": loader.batch_size,
            "drop_last": loader.drop_last,
            "num_workers": loader.num_workers,
            **self._dealt(),
            "batch_sampler": type(loader.batch_sampler).__name__,
            "dataset_length": _length(dataset),
            "split": self._split,
            "sample_seeds": self._seeds() is not None,
        }

    def _dealt(self) -> dict[str, Any]:
        """Return by whom the samples are dealt out, and to how many ranks."""
        return {"sampler": type(self.loader.sampler).__name__, "shards": shards.count(self.loader)}

    def root(self) -> object:
        """Return what the loader's generators hang off."""
        return self._generators.at_loader()

    def __len__(self) -> int:
        return len(self.loader) if self._length is None else self._length

    def load_ahead(self) -> None:
        """Note that from now on batches are asked for before the training wants them."""
        self._loads_ahead = True

    def open(self, *, loads_ahead: bool = False) -> Iterator[Any]:
        """Return the batches that are left of the epoch. In mid-epoch, no generator is moved."""
        self._loads_ahead = loads_ahead
        saved, self._saved = self._saved, None
        loaded: Sequence[Any] = ()
        if saved and (lengths := saved.get("lengths")):
            self._check_lengths(*lengths, is_drawn=bool(saved["order"]) and not saved["is_left"])
        self._drawn = self._dataset_length()
        if saved is None:
            batches = self._begin_anew()
        elif saved["is_left"]:
            self._go_on(saved)
            batches = self._begin_anew()
        elif saved["order"]:
            batches, loaded = self._go_on(saved)
        elif saved["workers"]:
            batches = self._begin_from(saved)
        else:
            batches = self._begin_anew()
        self._is_open = True
        return _FromWorkers(self, batches) if self.loader.num_workers else _Here(self, batches, loaded)

    def _check_lengths(self, drawn: int | None, then: int | None, *, is_drawn: bool) -> None:
        """Look whether the dataset has what was added to it before the checkpoint."""
        now = self._dataset_length()
        if is_drawn and not now == drawn == then:
            raise StateMismatch(
                f"the dataset has {now} items. It had {drawn} when this epoch's order was drawn, and {then} "
                "at the checkpoint.",
                fix="let the script add the items again before it loops over the batches (a list of them "
                "in extra= is restored by then), and add items only between two epochs; or begin the "
                "epoch's data anew with allow=['loader'].",
            )
        if now == self._given != then:
            warn(
                f"the dataset has {now} items, as the script makes it, and had {then} at the checkpoint: "
                "what was added or removed is lost, and the training goes on without it. Keep the items "
                "in extra= (the very list that the dataset has), or give the dataset state_dict and "
                "load_state_dict."
            )

    def outgrown(self, keeps: Callable[[Any], bool], *, is_under_way: bool) -> str | None:
        """Return what a resume would not have of a dataset, a sampler or a collate_fn that has changed.

        `keeps`: whether an object is saved with the training.
        """
        return self._resized(keeps, is_under_way=is_under_way) or self._carried(keeps)

    def _carried(self, keeps: Callable[[Any], bool]) -> str | None:
        """Return the counters that were found since the last call."""
        found = [one for counters in self._counters for one in counters.new()]
        self._note([*found, *self._order.counters.new(keeps)])
        new = [str(counter) for name, counter in self._counted.items() if name not in self._told]
        self._told.update(self._counted)
        return " ".join(new) or None

    def _note(self, found: Iterable[Counter]) -> None:
        for counter in found:
            self._counted.setdefault(counter.name, counter)

    def _resized(self, keeps: Callable[[Any], bool], *, is_under_way: bool) -> str | None:
        now, drawn = self._dataset_length(), self._drawn
        if now == drawn or self._saved is not None:
            return None
        if is_under_way:
            return (
                f"the dataset has {now} items, and had {drawn} when this epoch's order was drawn: a resume "
                "from here is refused, as the order cannot be drawn again. Add items only after the loop "
                "over the batches has ended."
            )
        dataset = self.loader.dataset
        if is_stateful(dataset) or any(map(keeps, getattr(dataset, "__dict__", {}).values())):
            return None
        return (
            f"the dataset has {now} items, and had {drawn} before: a resume has those that the script "
            "makes, and not what was added. Keep the items in extra= (the very list that the dataset "
            "has), or give the dataset state_dict and load_state_dict."
        )

    def _begin_anew(self) -> Iterator[Any]:
        if self._pool is None:
            self._workers = {}
            return self._make({})
        self._pool.begin_anew(self._view)
        return self._pool

    def _begin_from(self, saved: Mapping[str, Any]) -> Iterator[Any]:
        """Begin an epoch with workers that stand where they stood at the end of the one before."""
        self._live = self._generators.read()
        self._take(saved)
        starts = {number: Start(at, is_next_epoch=True) for number, at in self._workers.items()}
        return self._make(starts, saved["made"])

    def _go_on(self, saved: Mapping[str, Any]) -> tuple[Iterator[Any], list[Any]]:
        """Draw the epoch's order again and leave out what is done, unloaded; move no generator."""
        live = self._live = self._generators.read()
        self._draws_at_save = worker_rng.read({})
        self._take(saved)
        self._turn = saved["turn"]
        self._again = {**saved["order"], "is_left": saved["is_left"], "samples": saved["samples"]}
        starts: dict[int, Start] = {}
        made = saved["made"]
        if saved["num_workers"] == self.loader.num_workers:
            starts = self._starts()
        else:
            self._workers, self._turn, made = {}, 0, None
        has_own_order = bool(self.loader.num_workers) and not self._is_stream
        try:
            batches = self._make(starts, made)
            self._warn_of_shared_draws(starts)
            if not has_own_order:
                # (else the order has put them back, and more may have been drawn from there)
                self._generators.write(live)
            self._batches, self._samples, self._is_open = saved["batches"], saved["samples"], True
            self._began = starts[0].standing.began if self._stream and starts else {}
            loaded = [(draws, self._loaded_again(batches, draws)) for draws in saved["ahead"]]
        except BaseException:
            self._generators.write(live)
            raise
        finally:
            self._again = self._live = None
        return batches, loaded

    def _loaded_again(self, batches: Iterator[Any], draws: Draws) -> Any:
        live = self._generators.read()
        self._generators.write(draws)
        try:
            return next(batches)
        finally:
            self._generators.write(live)

    def _warn_of_shared_draws(self, starts: Mapping[int, Start]) -> None:
        """Look whether a stream that was run again in this process drew where the training draws too."""
        if self._stream is None or self.loader.num_workers or not starts or starts[0].standing.data:
            return
        began, now, live = starts[0].standing.began, worker_rng.read({}), self._draws_at_save
        if not began:
            # Stopped in the first batch: nothing was run again.
            return
        shared = [
            name
            for name in now
            if not worker_rng.is_same(began[name], now[name])
            and not worker_rng.is_same(live[name], now[name])
        ]
        if shared:
            name = type(self.loader.dataset).__name__
            warn(
                f"{name} and the training draw from the same generators ({', '.join(shared)}). What the "
                "stream keeps of its draws (a shuffle buffer) may not be what it was: let it draw from a "
                "generator of its own, give it a state_dict, or load it in a worker."
            )

    def _take(self, saved: Mapping[str, Any]) -> None:
        workers = enumerate(saved["workers"])
        self._workers = {number: Standing.restored(at) for number, at in workers if at is not None}

    def _starts(self) -> dict[int, Start]:
        most = max((at.batches for at in self._workers.values()), default=0)
        shown = next((number for number, at in self._workers.items() if at.batches == most), None)
        return {
            number: Start(at, is_next_epoch=at.batches == 0, shows_progress=number == shown and self._shows())
            for number, at in self._workers.items()
        }

    def _make(self, starts: Mapping[int, Start], made: Draws | None = None) -> Iterator[Any]:
        loader = self.loader
        seeds = None if self._stream else self._seeds()
        seeded = Seeded(loader.dataset, seeds[0]) if seeds else None
        context = loader.multiprocessing_context or multiprocessing
        is_kept = self._stream is not None and loader.persistent_workers
        self._late = context.RawArray("b", loader.num_workers) if is_kept else None
        own = self._generators.own
        # In this process only a stream has to say of each batch what it has changed.
        is_stamped = bool(loader.num_workers) or self._is_stream
        worker = Worker(loader, self._stream, own, starts, seeded is not None, self._late)
        dataset = self._stream or seeded or loader.dataset
        self._view = stand_in(loader, dataset, self._order, worker if is_stamped else None)
        if not loader.num_workers:
            if self._stream:
                self._stream.start, self._stream.root = starts.get(0), self._generators.root()
                for counters in self._counters:
                    # (before iter(): many count there)
                    counters.begin()
            self.order_begins()
            return in_process(self._view)
        # Workers are seeded, and their datasets copied, from what was there when they were made first.
        if made is not None:
            self._generators.write(made)
        elif self._again:
            self._reseed(self._again)
        self._made = self._generators.read()
        pool = self._sent_to_workers(worker)
        self._pool = pool if loader.persistent_workers else None
        return pool

    def _reseed(self, again: Mapping[str, Any]) -> None:
        # As many workers, on as many ranks, would have gone on from their own states. These begin with new
        # seeds, the same at every resume: with the old ones they would draw the epoch's first numbers again.
        text = f"{torch.initial_seed()} {again['samples']} {self._order.deal.rank} {self.loader.num_workers}"
        seed = int(large_files.digest(text.encode())[:15], 16)
        (self.loader.generator or torch.default_generator).manual_seed(seed)
        for path, generator in rng.find([self.loader.dataset, self.loader.collate_fn]).items():
            rng.begin_own(generator, f"{text} {path}")

    def _sent_to_workers(self, worker: Worker) -> Workers:
        context = self.loader.multiprocessing_context or multiprocessing
        try:
            with sheltered(self._view, worker.spared):
                found = Workers(self._view, self._order, self._turn if self._again else 0, self)
        except Exception as exc:
            is_of_pickling = isinstance(exc, (TypeError, AttributeError)) or "Pickl" in type(exc).__name__
            if context.get_start_method() == "fork" or not is_of_pickling:
                raise
            raise _unsendable(exc) from exc
        self._latest = weakref.ref(found)
        return found

    def order_begins(self) -> None:
        """Let the order be drawn: that of a new epoch, or again that of one that is gone on with."""
        if self._again is not None:
            self._order.go_on(self._again, self._live if self.loader.num_workers else None)
        else:
            if self._live is not None:
                self._generators.write(self._live)
                self._live = None
            self._stand_at_beginning()
        seeds = None if self._is_stream else self._seeds()
        self._order.seeded_epoch = seeds[1] if seeds else None

    def batches_begin(self) -> None:
        """Count from the beginning, now that nothing of the epoch before is to come."""
        if self._again is None:
            self._workers = {number: replace(at, batches=0) for number, at in self._workers.items()}

    def thrown_away(self, stamped: Stamp) -> None:
        """Note what a batch that nobody gets has made of its worker."""
        self._workers[stamped[0]] = self._workers.get(stamped[0], Standing()).after(stamped)

    def ran_out(self, worker: int) -> None:
        """Note that a worker's stream has come to its end."""
        self._workers[worker] = self._through(worker, self._workers.get(worker, Standing()))

    def _through(self, worker: int, at: Standing) -> Standing:
        draws_late = bool(self._late and self._late[worker])
        return replace(at, is_through=True, draws_late=draws_late)

    def came_out(self, stamped: Stamp | None, number: int | None, worker: int | None = None) -> None:
        """Count a batch, and note what it has made of its worker."""
        if stamped is None:
            # It counts when the training goes on all the same, and not if it ends with the error.
            self._failed.append((number, worker))
            return
        worker, self._size, self._is_short, *_, found = stamped
        self._note(Counter(*one) for one in found)
        self._count(number)
        if worker >= 0:
            self._workers = {**self._workers, worker: self._workers.get(worker, Standing()).after(stamped)}
            self._turn = (worker + 1) % self.loader.num_workers

    def _count(self, number: int | None) -> None:
        self._last = self._order.came_out(number)
        self._batches += 1
        if self._last:
            self._samples += self._last.samples * self._order.deal.shards
            # What loads a batch as one may give something that has another length.
            self._size = self._size if self._is_stream else self._last.samples

    def can_load_ahead(self) -> bool:
        """Whether asking for a batch early leaves all that is drawn as it is."""
        samplers = (self.loader.sampler, self.loader.batch_sampler)
        return bool(self.loader.num_workers) and all(map(draws_at_once, samplers))

    def size(self, batch: Any) -> int:
        """Return the samples in the batch that it gave last."""
        return self._size

    def forgive(self) -> int:
        """Count the batches that failed, as the training goes on without them."""
        count = len(self._failed)
        while self._failed:
            number, worker = self._failed.popleft()
            self._count(number)
            if self.loader.num_workers:
                by = self._turn if worker is None else worker
                at = self._workers.get(by, Standing())
                if self._last:
                    self._workers = {
                        **self._workers,
                        by: replace(at, failed=[*at.failed, self._last.indices]),
                    }
                self._turn = (by + 1) % self.loader.num_workers
        return count

    def load(self, batches: Iterator[Any]) -> Any:
        """Load a batch in this process; that of a stream has its stamp."""
        if self._stream and not self._began:
            self._began = self._stream.began or worker_rng.read(rng.find(self._generators.root()))
        self.draws = self._generators.read() if self._loads_ahead else None
        # A thread that loads ahead does so while the script runs.
        number = self._batches
        is_look_due = number & (number + 1) == 0 and threading.current_thread() is threading.main_thread()
        if is_look_due:
            self._look_before_batch()
        try:
            batch = next(batches)
        except StopIteration:
            for counters in self._counters:
                counters.epoch_ended()
            raise
        except Exception:
            if self._order.on_its_way:
                self._failed.append((None, None))
            raise
        finally:
            if self._order.kept is not None:
                # A dataset that is seeded for each sample leaves the training's generators alone.
                rng.restore(self._order.kept)
        if is_look_due:
            self._look_after_batch()
        return batch

    def load_again(self, draws: Draws, loaded: Any) -> Any:
        """Return a batch that was ahead at the save, and may be ahead again at the next."""
        self.draws = draws
        return loaded

    def came_out_here(self, loaded: Any) -> Any:
        """Count a batch that was loaded in this process, and return it without its stamp."""
        if self._is_stream:
            batch, stamped = loaded
            self.came_out(stamped, None)
            return batch
        on_its_way = self._order.on_its_way
        self._last = last = on_its_way.popleft() if on_its_way else None
        self._batches += 1
        if last is not None:
            self._samples += last.samples * self._order.deal.shards
            self._size = last.samples
        return loaded

    def _look_before_batch(self) -> None:
        for counters in self._counters:
            if self._batches == 1:
                counters.script_ran()
            elif not self._is_stream:
                counters.begin()

    def _look_after_batch(self) -> None:
        for counters in self._counters:
            if not self._is_stream:
                counters.loaded()
            elif not self._batches:
                counters.epoch_begun()
            elif self._batches == 1:
                counters.epoch_goes_on()

    def ended(self) -> None:
        """Note that the epoch's batches have come to their end."""
        self._is_through = True
        if self.loader.num_workers and self._is_stream:
            self._workers = {number: self._through(number, at) for number, at in self._workers.items()}

    def mark(self) -> Mark:
        """Return where the loader stands with the batch that it gave last."""
        workers = self._workers
        if not self.loader.num_workers and self._stream and self._is_open:
            data = {name: freeze(state) for name, state in self._stream.state().items()}
            at = Standing(
                began=self._began,
                data=data,
                is_short=self._is_short or self._is_through,
                is_through=self._is_through,
                batches=self._batches,
            )
            workers = {0: at}
        return Mark(self._batches, self._samples, self._turn, self._last, workers, self.draws)

    def collect(self, mark: Mark | None, ahead: Sequence[Mark], is_under_way: bool) -> dict[str, Any]:
        """Return what goes on after the batch of the mark (None: the last one that was given)."""
        if self._saved is not None:
            return dict(self._saved)
        mark = mark or self.mark()
        is_left = self._pool is not None and self._is_open and not is_under_way and not self._is_through
        on_its_way = [*(at.last for at in ahead if at.last), *self._order.on_its_way]
        # Workers that end with the epoch leave nothing behind; without any, the stream itself stays.
        keeps_workers = is_under_way or self._pool is not None or not self.loader.num_workers
        number = max(mark.workers, default=-1)
        return {
            "num_workers": self.loader.num_workers,
            "dealt": self._dealt(),
            "batches": mark.batches,
            "samples": mark.samples,
            "samplers": self._order.states(),
            "turn": mark.turn,
            "made": self._made if is_under_way or self._pool is not None else None,
            "workers": [mark.workers[i].collect() if i in mark.workers else None for i in range(number + 1)]
            if keeps_workers
            else [],
            "order": self._order.collect(mark.last, on_its_way) if is_under_way or is_left else None,
            "is_left": is_left,
            "ahead": [at.draws for at in ahead if at.draws is not None],
            "dataset": self._dataset_state(),
            "lengths": [self._drawn, self._dataset_length()],
            **{name: {"state": state} for name, state in self._states("collate_fn").items()},
        }

    def _states(self, name: str) -> dict[str, Any]:
        return {} if self._is_stream else states_of({name: getattr(self.loader, name)})

    def _dataset_state(self) -> Any:
        return {"state": state} if (state := self._states("dataset").get("dataset")) is not None else None

    def in_question(self, setting: str, saved: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return what a changed setting puts in question in mid-epoch: itself or everything (""), and why."""
        if setting == "num_workers":
            # What each worker reads of a stream depends on how many there are.
            return ("", "") if self._is_stream else None
        if setting in ("shards", "sampler", "batch_size") and not self._is_stream:
            return self._dealt_in_question(setting, saved)
        has_position = any(at and at["data"] for at in saved["workers"])
        return ("" if self._is_stream and not has_position else setting, "")

    def _dealt_in_question(self, setting: str, saved: Mapping[str, Any]) -> tuple[str, str] | None:
        obstacle, has_other_shards = self._obstacle(saved), self._has_other_shards(saved)
        if obstacle and setting == "shards":
            return "", f"{obstacle}; if that is allowed, the epoch's data begins anew"
        if has_other_shards or (not obstacle and setting == "sampler"):
            # What is left is dealt out anew; if it cannot be, that is told of the shards.
            return None
        return setting, obstacle if obstacle and setting == "sampler" else ""

    def _has_other_shards(self, saved: Mapping[str, Any]) -> bool:
        return bool(saved["dealt"]["shards"] != shards.count(self.loader))

    def _obstacle(self, saved: Mapping[str, Any]) -> str | None:
        """Return why the samples that are left of an epoch cannot be dealt out anew."""
        if not saved["order"]["is_in_order"] or _has_gaps(saved):
            return _ANY_ORDER
        return shards.obstacle(saved["order"]["base"], self.loader)

    def effects(self, saved: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        """Return what a change of a setting does to the bits, and why, where its name alone does not tell."""
        if self._is_stream:
            return {}
        is_in_epoch = bool(saved["order"])
        draws = any(at and at["generators"] for at in saved["workers"])
        lost = "what is drawn at random while loading is not what it would be"
        anew = f"{'what is left of the epoch' if is_in_epoch else 'every epoch'} is dealt out anew"
        # (a batch that is loaded as one has one seed)
        is_seeded = self._seeds() and not hasattr(self.loader.dataset, "__getitems__")
        workers, shards = (WILL if draws else MAY, f"the order stays; {lost}"), f"{anew}; {lost}"
        if self._seeds():
            workers = HARMLESS, "each sample has its seed, so the batches stay the same"
        elif is_in_epoch and saved["num_workers"] and not draws:
            workers = HARMLESS, "nothing was drawn at random in the workers, so the batches stay the same"
        if is_seeded or (not self._seeds() and workers[0] == HARMLESS):
            shards = anew
        return {"shards": (WILL, shards), "num_workers": workers}

    def restore(self, saved: Mapping[str, Any], other: AbstractSet[str]) -> None:
        """Go on from what `collect` returned. Of the settings, the `other` ones have changed since."""
        self._forget()
        if "dataset_length" in other:
            saved = {**saved, "lengths": None}
        for name in ("dataset", "collate_fn"):
            part: Any = getattr(self.loader, name)
            if saved.get(name) is not None and is_stateful(part):
                part.load_state_dict(saved[name]["state"])
        self._order.load_states(saved["samplers"])
        self._saved = saved if self._is_stream else self._dealt_anew(saved, other)
        if self._saved["order"] and not self._is_stream:
            self._length = self._length_from(self._saved["order"])

    def _dealt_anew(self, saved: Mapping[str, Any], other: AbstractSet[str]) -> Mapping[str, Any]:
        is_dealt_otherwise = saved["dealt"] != self._dealt()
        is_in_epoch = bool(saved["order"]) and not saved["is_left"]
        if self._has_other_shards(saved):
            # Those of another number of ranks have had other samples; what was loaded is of no use.
            saved = {**saved, "workers": [], "made": None, "turn": 0, "ahead": []}
        if is_dealt_otherwise:
            saved = {**saved, "dealt": self._dealt()}
        if is_in_epoch and (is_dealt_otherwise or other):
            return self._with_other_batches(saved)
        # Nobody wants what is left of an epoch that was left, if not for workers that stand there.
        return {**saved, "order": None, "is_left": False} if is_dealt_otherwise else saved

    def _with_other_batches(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        # From here on other batches are made of the samples that are left.
        if _has_gaps(saved):
            raise other_data(f"{_ANY_ORDER}, and other batches cannot be made of what is left of them")
        batches, order = saved["batches"], saved["order"]
        obstacle = shards.obstacle(order["base"], self.loader)
        # (at the end of an epoch some samples come a second time)
        samples = saved["samples"] if obstacle else min(saved["samples"], order["base"]["samples"])
        order = {
            **order,
            "base": obstacle or order["base"],
            "has_ended": order["has_ended"] or order["is_short"],
            "from": [batches, samples],
            "pulled": batches,
            "on_its_way": [],
            "has_last": False,
            "fingerprint": None,
        }
        return {**saved, "samples": samples, "order": order}

    def _length_from(self, order: Mapping[str, Any]) -> int | None:
        batches, samples = order["from"]
        if not samples:
            return None
        if isinstance(order["base"], str):
            left = len(self.loader.sampler) - samples // self._order.deal.shards  # type: ignore[arg-type]
        else:
            left = self._order.deal.each(order["base"]["samples"] - samples)
        size = self.loader.batch_size or 1
        return int(batches + (left // size if self.loader.drop_last else -(-left // size)))

    def begin_own_streams(self) -> None:
        """Go on without the workers that were saved: they are another rank's."""
        if self._saved is not None:
            self._saved = {**self._saved, "workers": [], "made": None}

    def rewind(self) -> None:
        """Stand at the beginning of an epoch."""
        self._length = None
        if self._saved is not None and self._saved["order"]:
            # An epoch that was never gone on with: its workers are what is left of it.
            self._saved = {**self._saved, "is_left": True} if self.loader.persistent_workers else None

    def workers(self) -> Workers | None:
        """Return torch's iterator over the workers that were made last, if there is one."""
        return None if self._latest is None else self._latest()

    def processes(self) -> set[int | None]:
        """Return the process ids of the workers."""
        return set() if (latest := self.workers()) is None else latest.processes()

    def close(self, *, now: bool) -> None:
        """Let the workers go; end them `now`, though a loop may still hold them."""
        self._pool = None
        if now and (latest := self.workers()) is not None:
            latest.end()


class _FromWorkers:
    """The batches of one epoch, from workers."""

    def __init__(self, source: LoaderSource, batches: Iterator[Any]) -> None:
        self._source = source
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._source.ended()
            raise
        except StreamEnded as exc:
            raise _ended_early(exc) from exc


class _Here:
    """The batches of one epoch, loaded in this process."""

    def __init__(self, source: LoaderSource, batches: Iterator[Any], ahead: Sequence[Any]) -> None:
        self._source = source
        self._batches = batches
        self._ahead = deque(ahead)
        """What was ahead at the save: where its draws began, and the batch."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        source = self._source
        try:
            loaded = source.load_again(*self._ahead.popleft()) if self._ahead else source.load(self._batches)
        except StopIteration:
            source.ended()
            raise
        except StreamEnded as exc:
            raise _ended_early(exc) from exc
        return source.came_out_here(loaded)


def _ended_early(exc: StreamEnded) -> StateMismatch:
    return StateMismatch(
        f"the stream that is run again has come to its end too early: {exc}.",
        fix="give it the data that the run was started with, or begin the epoch's data anew with "
        "allow=['loader'].",
    )


_ANY_ORDER = "its batches came in any order (in_order=False)"


def _has_gaps(saved: Mapping[str, Any]) -> bool:
    """Whether batches have come out before others that were asked for earlier."""
    return bool(min(saved["order"]["on_its_way"], default=saved["batches"]) < saved["batches"])


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _split(dataset: Any) -> str | None:
    # A split that is drawn anew at every start lets the samples to validate on into the training.
    if isinstance(dataset, Subset):
        return large_files.digest(repr(plain(list(dataset.indices))).encode())[:8]
    return None


def _unsendable(exc: Exception) -> UsageError:
    return UsageError(
        f"the loader cannot be sent to its workers: {exc}.",
        fix="define its dataset, collate_fn and worker_init_fn at the top of a module (no lambda, nothing "
        'inside a function), or let the workers be forked: multiprocessing_context="fork".',
    )
