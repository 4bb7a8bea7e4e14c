"""Reads a torch DataLoader, from the beginning of an epoch or from its middle."""

from __future__ import annotations

import multiprocessing
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader

from ..errors import UsageError
from . import loader_changes
from .epoch_reader import Batches, EpochReader, Mark, MidEpoch, NextEpoch, Opening
from .generators import rng
from .workers import torchdata
from .workers.datasets import Seeded
from .workers.order import Draws, draws_at_once
from .workers.shelter import sheltered
from .workers.states import is_stateful, states_of
from .workers.torch_iterators import Workers, in_process, iterates_as_torchdata_does, stand_in
from .workers.worker import Worker


class LoaderSource(EpochReader):
    """The batches of a DataLoader of torch."""

    draws_late = True

    def __init__(
        self,
        loader: DataLoader[Any],
        own: Mapping[str, rng.Generator],
        seeds: Callable[[], tuple[int, int] | None],
        shows: Callable[[], bool],
    ) -> None:
        """`seeds`: returns the seed of the samples, and the epoch; `shows`: whether progress is shown."""
        self._shows = shows
        self._seeds = seeds
        self._latest: weakref.ref[Workers] | None = None
        self._dataset_length = loader_changes.DatasetLength(loader)
        super().__init__(loader, own)
        self._split = loader_changes.split_of(loader.dataset)
        self._saved: Mapping[str, Any] | None = None
        """Where to continue from when it is opened next."""

    def _forget(self) -> None:
        super()._forget()
        self._ended: Mapping[str, Any] | None = None
        """The loader's own state, in a checkpoint of an earlier version, after an epoch's last batch."""
        self._pool: Workers | None = None
        """The workers that stay from epoch to epoch."""
        self._view: DataLoader[Any] = self.loader
        self._made: Draws | None = None
        """The generators before the workers were made."""
        self._length: int | None = None

    def settings(self) -> dict[str, Any]:
        found = {"split": self._split, "sample_seeds": self._seeds() is not None}
        if iterates_as_torchdata_does(self.loader):
            # The order of its sampler is another than that of torch's.
            found["kind"] = type(self.loader).__name__
        return {**loader_changes.settings(self.loader), **found}

    def root(self) -> object:
        return self._generators.at_loader()

    def __len__(self) -> int:
        return len(self.loader) if self._length is None else self._length

    # How an epoch is opened.

    def open(self, *, loads_ahead: bool = False) -> Iterator[Any]:
        self._loads_ahead = loads_ahead
        ended, self._ended = self._ended, None
        if ended is not None:
            return iter(())
        if torchdata.was_given_a_state(self.loader):
            raise _put_elsewhere(self.loader)
        saved, self._saved = self._saved, None
        if saved and (lengths := saved.get("lengths")):
            is_drawn = bool(saved["order"]) and not saved["is_left"]
            self._dataset_length.check(*lengths, is_drawn=is_drawn)
        self._dataset_length.order_drawn()
        ahead: Sequence[Any] = ()
        if saved and saved["order"]:
            batches, ahead = self._open_mid_epoch(saved)
            if saved["is_left"]:
                batches, ahead = self._open_fresh(), ()
        elif saved and saved["workers"]:
            batches = self._make(NextEpoch(saved, self._generators))
        else:
            batches = self._open_fresh()
        self._is_open = True
        return Batches(self, batches, ahead)

    def open_at(
        self, batch: int, drawing: AbstractContextManager[None], *, loads_ahead: bool
    ) -> Iterator[Any]:
        """Return the batches from this one on; only a stream loads those before it."""
        if self._stream:
            batches = self.open(loads_ahead=loads_ahead)
            with drawing:
                return self._without(batches, batch)
        self._order.skip(batch, drawing)
        batches = self.open(loads_ahead=loads_ahead)
        self._order.start()
        self._batches, self._samples = batch, self._order.skipped
        return batches

    def load_ahead(self) -> None:
        self._loads_ahead = True

    def _open_fresh(self) -> Iterator[Any]:
        if self._pool is None:
            return self._make(Opening())
        self._open_as(Opening(), self._seeded_now())
        self._pool.begin_epoch(self._view)
        return self._pool

    def _open_mid_epoch(self, saved: Mapping[str, Any]) -> tuple[Iterator[Any], list[Any]]:
        """Draw the epoch's order again, and skip what is done without loading it; move no generator."""
        opening = MidEpoch(saved, self._generators, self.loader, self._shows)
        has_own_order = bool(self.loader.num_workers) and self._stream is None
        try:
            batches = self._make(opening)
            if self._stream and not self.loader.num_workers:
                opening.warn_of_shared_draws(self._stream)
            if not has_own_order:
                # Otherwise the order has restored them, and further draws may have followed.
                self._generators.write(opening.live)
            self._resume(saved["batches"], saved["samples"], opening.began if self._stream else {})
            ahead = [(draws, self._loaded_again(batches, draws)) for draws in saved["ahead"]]
        except BaseException:
            self._generators.write(opening.live)
            raise
        return batches, ahead

    def _loaded_again(self, batches: Iterator[Any], draws: Draws) -> Any:
        live = self._generators.read()
        self._generators.write(draws)
        try:
            return next(batches)
        finally:
            self._generators.write(live)

    def _seeded_now(self) -> int | None:
        """Return the epoch, if each sample has its own seed."""
        seeds = None if self._stream else self._seeds()
        return seeds[1] if seeds else None

    def _make(self, opening: Opening) -> Iterator[Any]:
        loader = self.loader
        seeds = None if self._stream else self._seeds()
        seeded = Seeded(loader.dataset, seeds[0]) if seeds else None
        context = loader.multiprocessing_context or multiprocessing
        is_kept = self._stream is not None and loader.persistent_workers
        late = context.RawArray("b", loader.num_workers) if is_kept else None
        self._stand(opening.workers, opening.turn, late)
        self._open_as(opening, self._seeded_now())
        # In this process only a stream has to report what each batch has changed.
        is_stamped = bool(loader.num_workers) or self._stream is not None
        own = self._generators.own
        worker = Worker(loader, self._stream, own, opening.starts, seeded is not None, late)
        dataset = self._stream or seeded or loader.dataset
        self._view = stand_in(loader, dataset, self._order, worker if is_stamped else None)
        if not loader.num_workers:
            if self._stream:
                self._stream.prepare(opening.starts.get(0), self._generators.root())
            self.order_begins()
            return in_process(self._view)
        # Seeds and copies of the dataset come from the state in which the workers were first made.
        opening.seed_workers(self._generators)
        self._made = self._generators.read()
        pool = self._sent_to_workers(worker, opening.turn)
        self._pool = pool if loader.persistent_workers else None
        return pool

    def _sent_to_workers(self, worker: Worker, turn: int) -> Workers:
        context = self.loader.multiprocessing_context or multiprocessing
        try:
            with sheltered(self._view, worker.spared):
                found = Workers(self._view, self._order, turn, self)
        except Exception as exc:
            is_of_pickling = isinstance(exc, (TypeError, AttributeError)) or "Pickl" in type(exc).__name__
            if context.get_start_method() == "fork" or not is_of_pickling:
                raise
            raise _unsendable(exc) from exc
        self._latest = weakref.ref(found)
        return found

    def can_load_ahead(self) -> bool:
        samplers = (self.loader.sampler, self.loader.batch_sampler)
        return bool(self.loader.num_workers) and all(map(draws_at_once, samplers))

    def outgrown(self, keeps: Callable[[Any], bool], *, is_under_way: bool) -> str | None:
        """Return a warning of changes to the loader or its dataset that a resume would lose.

        `keeps`: whether an object is saved with the training.
        """
        if torchdata.was_asked_for_its_state(self.loader):
            return _BEGUN.format(type(self.loader).__name__)
        outgrown = self._of_untrained()
        if self._saved is None and outgrown is None:
            outgrown = self._dataset_length.outgrown(keeps, is_under_way=is_under_way)
        return outgrown

    # The state in a checkpoint.

    def collect(self, mark: Mark | None, ahead: Sequence[Mark], is_under_way: bool) -> dict[str, Any]:
        if (saved := self._ended or self._saved) is not None:
            return dict(saved)
        if mark is not None or not is_under_way:
            self._is_untrained = mark is not None and is_under_way and self._leaves_out_draws(mark)
        mark = mark or self.mark()
        is_left = self._pool is not None and self._is_open and not is_under_way and not self._is_through
        on_its_way = [*(at.last for at in ahead if at.last), *self._order.on_its_way]
        # Workers that end with the epoch leave no state. Without workers, the stream itself stays.
        keeps_workers = is_under_way or self._pool is not None or not self.loader.num_workers
        workers, dataset = mark.standings(), self._states("dataset").get("dataset")
        number = max(workers, default=-1)
        return {
            "num_workers": self.loader.num_workers,
            "dealt": loader_changes.dealt(self.loader),
            "batches": mark.batches,
            "samples": mark.samples,
            "samplers": self._order.states(),
            "turn": mark.turn,
            "made": self._made if is_under_way or self._pool is not None else None,
            "workers": [workers[i].collect() if i in workers else None for i in range(number + 1)]
            if keeps_workers
            else [],
            "order": self._order.collect(mark.last, on_its_way) if is_under_way or is_left else None,
            "is_left": is_left,
            "ahead": [at.draws for at in ahead if at.draws is not None],
            "dataset": None if dataset is None else {"state": dataset},
            "is_untrained": self._is_untrained,
            "lengths": self._dataset_length.collect(),
            **{name: {"state": state} for name, state in self._states("collate_fn").items()},
        }

    def _states(self, name: str) -> dict[str, Any]:
        return {} if self._stream else states_of({name: getattr(self.loader, name)})

    def restore(self, saved: Mapping[str, Any], other: AbstractSet[str]) -> None:
        self._forget()
        if "workers" not in saved:
            # Between two epochs a script may change to another kind of loader.
            self._saved, self._ended = None, saved if self._has_ended(saved) else None
            return
        if "dataset_length" in other:
            saved = {**saved, "lengths": None}
        for name in ("dataset", "collate_fn"):
            part: Any = getattr(self.loader, name)
            if saved.get(name) is not None and is_stateful(part):
                part.load_state_dict(saved[name]["state"])
        self._order.load_states(saved["samplers"])
        # Checkpoints of older versions do not say it.
        self._is_untrained = saved.get("is_untrained", False)
        self._saved = saved if self._stream else loader_changes.adapted(self.loader, saved, other)
        if self._saved["order"] and not self._stream:
            self._length = loader_changes.length_from(self.loader, self._order.deal, self._saved["order"])

    def reads(self, saved: Mapping[str, Any]) -> bool:
        return "workers" in saved or self._has_ended(saved)

    def _has_ended(self, saved: Mapping[str, Any]) -> bool:
        """Whether a state of the loader's own has no batches left in its epoch."""
        length = loader_changes.length_of(self.loader)
        return bool(saved.get("is_under_way")) and length is not None and saved["given"] == length

    def in_question(self, setting: str, saved: Mapping[str, Any]) -> tuple[str, str] | None:
        return loader_changes.in_question(self.loader, setting, saved)

    def effects(self, saved: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
        return loader_changes.effects(self.loader, saved, has_seeds=self._seeds() is not None)

    def begin_own_streams(self) -> None:
        if self._saved is not None:
            self._saved = {**self._saved, "workers": [], "made": None}

    def rewind(self) -> None:
        self._length = self._ended = None
        if self._saved is not None and self._saved["order"]:
            # The saved epoch was never continued: only its persistent workers are left of it.
            self._saved = {**self._saved, "is_left": True} if self.loader.persistent_workers else None

    def workers(self) -> Workers | None:
        """Return torch's iterator over the newest workers, if it exists."""
        return None if self._latest is None else self._latest()

    def processes(self) -> set[int | None]:
        """Return the process ids of the workers."""
        return set() if (latest := self.workers()) is None else latest.processes()

    def close(self, *, now: bool) -> None:
        self._pool = None
        if now and (latest := self.workers()) is not None:
            latest.end()


_BEGUN = (
    "the script has called state_dict() of the {0}, which begins a pass of its own and draws a seed for it: "
    "random numbers differ from those of a training without that call. Leave it out: the checkpoint has the "
    "position. [R27]"
)


def _put_elsewhere(loader: object) -> UsageError:
    return UsageError(
        f"the script has called load_state_dict() of the {type(loader).__name__} itself.",
        fix="leave that call out: the position comes from the newest checkpoint of the run. After another "
        "tool's checkpoint, call state.begin_at(epoch=..., batch=...): docs/migrating.md shows how.",
    )


def _unsendable(exc: Exception) -> UsageError:
    return UsageError(
        f"the loader cannot be sent to its workers: {exc}.",
        fix="define its dataset, collate_fn and worker_init_fn at the top of a module (no lambda, nothing "
        'inside a function), or let the workers be forked: multiprocessing_context="fork".',
    )
