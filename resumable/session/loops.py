"""The loops over epochs, batches and steps, and what is due at their boundaries."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from .. import determinism, options
from ..errors import UsageError, did_you_mean
from ..loaders import choose_source
from ..loaders.prepared import is_prepared
from ..position.batch_loop import Hooks
from ..position.counted_loops import Batches
from ..position.loader_position import LoaderPosition
from ..position.prefetching import Through, Way
from ..position.to_device import ToDevice
from ..position.training_counters import End
from ..tracebacks import short_loop
from .session import Session


class Loops:
    """Runs the loops of a session, and saves between two bodies when it is time to."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._training, self._saving = session.training, session.saving
        self._position, self._progress = session.training.position, session.training.progress

    @short_loop
    def epochs(self, total: int) -> Iterator[int]:
        """Loop over the epochs that are left of `total`."""
        self._session.refuse_closed()
        done = self._position.epoch
        self._print_if_complete(done, options.count("total", total), "epochs")
        self._note_loop(epochs=total)
        with self._progress.loop("epochs", total, done):
            yield from self._watched(
                self._position.epochs(total, self._epoch_ended, self._session.heads.come)
            )

    @short_loop
    def steps(self, total: int) -> Iterator[int]:
        """Loop over the steps that are left of `total`."""
        self._session.refuse_closed()
        done = self._position.step
        self._print_if_complete(done, options.count("total", total), "steps")
        self._note_loop(steps=total)
        with self._progress.loop("steps", total, done):
            yield from self._watched(self._position.steps(total, self._step_ended, self._session.heads.come))

    def batches(
        self, loader: Any, device: str | int | torch.device | None, through: Through | None
    ) -> Batches[Any]:
        """Loop over the batches that are left of this epoch."""
        self._session.refuse_closed()
        name = self._loader_name(loader)
        at = self._position.at(name)
        loads_ahead = draws = through is not None
        if at.prepared:
            loads_ahead |= at.prepared.looks_ahead
            through = _both(at.prepared.through, through)
        if device is not None:
            ahead = at.source.can_load_ahead()
            loads_ahead |= ahead
            through = _both(through, ToDevice(device, ahead))
        begin, end = partial(self._begin_batches, name, at), partial(self._end_batches, at)
        heads = self._session.heads
        hooks = Hooks(heads.come, begin, partial(heads.asked, name), partial(self._batch_ended, at), end)
        return self._position.batches(name, hooks, Way(through, loads_ahead, draws))

    def _print_if_complete(self, done: int, total: int, what: str) -> None:
        if self._session.has_resumed and done >= total:
            self._training.print(f"{self._training.run} is complete: {done} of {total} {what} are done")

    def _note_loop(self, **total: int) -> None:
        if self._position.is_outside():
            self._saving.history.loop(**total)

    def _watched(self, loop: Iterator[int]) -> Iterator[int]:
        self._begin()
        try:
            yield from loop
            if self._position.is_outside():
                self._session.save_rest("end of the loop")
            self._saving.wait()
        finally:
            self._session.signals.end()

    def _begin(self) -> None:
        if self._position.is_outside():
            self._position.outside.begin_loop()
            self._position.accelerate.begin_loop()
        determinism.let_go(self._session)
        self._session.signals.begin()
        self._saving.save_cost.begin()

    def _begin_batches(self, name: str, at: LoaderPosition) -> None:
        self._begin()
        self._session.heads.begin_pass(name, at)
        if not at.prepared:
            self._position.accelerate.begin(name, at, self._position.processes)
        self._session.steps.find_unseen()
        self._progress.begin_batches(at, at.length(), at.done)

    def _end_batches(self, at: LoaderPosition) -> None:
        at.source.drawn()
        self._progress.end_batches(at)
        self._position.accelerate.end(at)
        self._session.signals.end()

    def _loader_name(self, loader: Any) -> str:
        loaders = self._position.loaders
        found = [
            name
            for name, position in loaders.items()
            if loader is None or position.source.is_of(loader) or name == f"loader.{loader}"
        ]
        if len(found) == 1:
            return found[0]
        names = [name.removeprefix("loader.") for name in loaders]
        if loader is None or isinstance(loader, str):
            raise no_loader(loader, names)
        if isinstance(loader, DataLoader) or is_prepared(loader):
            there = (
                f": {', '.join(names)}"
                if loaders.keys() - {"loader"}
                else " another" * len(names) or ": none"
            )
            raise UsageError(
                f"this DataLoader was not given to RunState, which was given{there}.",
                fix="give it to RunState (loader=...), which then keeps its position; loop over a loader to "
                "validate with as it is.",
            )
        if isinstance(loader, int):
            raise UsageError(
                f"batches() was given {loader!r}, and takes a loader.",
                fix=f"loop over state.steps({loader}) for a number of steps, or over state.batches() for the "
                "loader that RunState.load was given.",
            )
        choose_source.refuse_others("batches()", loader)
        return self._position.find(loader)

    def _batch_ended(self, at: LoaderPosition) -> None:
        session = self._session
        if session.steps.unseen.optimizers:
            session.steps.find_unseen()
        has_changed = self._body_ended()
        # One look at the clock for all: this is the way of every batch.
        now = time.monotonic()
        if self._progress.batches_of is at:
            self._progress.count_batches(at, at.done + 1, now)
        if (end := self._position.batch_ends(at)) is not None:
            self._saving.save_cost.body_ended(now)
            if session.trace or session.autosave.may_be_due(end[0], end[1], now):
                self._at_boundary(has_changed, End(*end))

    def _step_ended(self) -> None:
        has_changed = self._body_ended()
        end = End(self._position.steps_done(), self._position.epochs_done())
        self._progress.count("steps", end.step)
        self._saving.save_cost.body_ended()
        self._at_boundary(has_changed, end)

    def _epoch_ended(self) -> None:
        has_changed = self._body_ended()
        end = End(self._position.step, self._position.epochs_done() + 1)
        self._progress.count("epochs", end.epoch)
        self._saving.save_cost.rest_ended()
        self._at_boundary(has_changed, end)
        self._saving.warn_of_missing_metric(is_end=False)
        self._saving.save_cost.begin()

    def _body_ended(self) -> bool:
        """Return whether parts have changed since the save in the body that has ended."""
        # Checked inline: a call at every batch costs time, and there is rarely trouble or a save.
        if self._training.crew.ranks.trouble:
            self._training.crew.ranks.refuse_trouble()
        if self._saving.late.save is None:
            return False
        changed = self._saving.late.find()
        self._session.heads.body_ended()
        return bool(changed)

    def _at_boundary(self, has_changed: bool, end: End) -> None:
        """Save, or save and leave, if it is time to."""
        session = self._session
        due = session.trace.boundary() if session.trace else None
        if due is None and session.autosave.may_be_due(end.step, end.epoch, time.monotonic()):
            if self._training.parts.hides_gradients():
                # After the step they can be read.
                return
            is_saving, is_rest_next = self._saving.is_busy, end.is_rest_next
            due = session.autosave.due(end.step, end.epoch, is_rest_next=is_rest_next, is_saving=is_saving)
        if due is None:
            return
        # What one process has to save again, all have to.
        is_saved = self._saving.is_saved(self._position.counters()) and not any(
            self._training.crew.ranks.agree("what has changed since the save", lambda: has_changed)
        )
        if not is_saved:
            session.save(due.why)
        if due.leaves:
            session.leave(due, due.leaves)


def no_loader(name: str | None, names: Sequence[str]) -> UsageError:
    """Return the error for a name of no loader, or for none where one is needed."""
    several = f"RunState was given: {', '.join(names)}"
    if not names:
        problem = "batches() needs a loader, and RunState was given none."
        fix = "give RunState.load the loader: loader=loader."
    elif name is None:
        problem, fix = f"batches() needs one loader; {several}.", f"name it: state.batches({names[0]!r})."
    elif names == ["loader"]:
        problem = f"batches({name!r}) names a loader, and RunState was given one without a name."
        fix = f"loop over state.batches(), or name it in RunState.load: loader={{{name!r}: loader}}."
    else:
        problem = f"there is no loader {name!r}; {several}.{did_you_mean(name, names)}"
        fix = "name one of them."
    return UsageError(problem, fix=fix)


def _both(first: Through | None, second: Through | None) -> Through | None:
    if first is None or second is None:
        return first or second
    return lambda batches: second(iter(first(batches)))
