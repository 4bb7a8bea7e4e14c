"""One process's use of a run, from `RunState.load` to `close`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import determinism
from ..boundary import Boundary, Due
from ..errors import Preempted, RemoteError, ResumableError, UsageError, warn
from ..files import pin
from ..files.strict_json import Json
from ..files.threads import no_garbage_collection
from ..loaders import loader_warnings
from ..options import Options
from ..parts import allowed
from ..position.position import Position
from ..processes.signals import LeftAtOnce, Signals
from ..progress import Progress
from ..run import changes, directory
from ..run.directory import Run
from ..run.history_writer import History
from ..run.policy import counted
from ..run.resume_choice import Which
from ..saving.autosave import Autosave
from ..saving.closing import closed, end
from ..saving.saver import Saving
from ..saving.writer import PendingSave
from ..terminal import is_notebook
from ..training import Training
from .heads import Heads
from .observer import observer
from .rest import Rest
from .resuming import Resuming
from .step_counter import StepCounter

if TYPE_CHECKING:
    from ..remote.in_training import Copies

# By text: a Path compares itself by a module that is gone when the interpreter removes the last entries.
_open: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
_written: weakref.WeakValueDictionary[str, Run] = weakref.WeakValueDictionary()
_PATIENCE = 30.0
"""The seconds that another thread may take to release a run whose state it has dropped."""


class Session:
    """Begins a training or resumes it, saves it, and lets go of it."""

    def __init__(self, options: Options) -> None:
        self.training = training = Training.of(options)
        self.saving = Saving(training)
        self.resuming = Resuming(training, self.saving)
        self.heads = Heads(training, self.resuming)
        self.signals = Signals(
            options.save_on,
            shows_hint=training.crew.is_first and not options.quiet,
            exits=not options.raises and not is_notebook(),
        )
        ranks, pace = training.crew.ranks, self.saving.save_cost
        self.autosave = Autosave(ranks, self.signals, pace, options.rules, options.limit)
        self.steps = StepCounter(training, self.saving, self.autosave)
        self.trace = observer(
            training.parts,
            training.position,
            training.crew.rank,
            options.trace,
            options.trace_every,
            run=training.run.path,
            given=options.run_dir,
        )
        self.has_resumed = False
        """Whether this training continues from a checkpoint."""
        self.rest = Rest(training.position, is_saved=options.saves_at_end)
        self._around = id(sys.exc_info()[1])
        """The error that is being handled around the whole training: a reference would keep its variables."""
        self._is_closed, self._process = False, os.getpid()
        # One that is dropped without close() must not lock its run for the rest of the process.
        what = self.saving.history, training.run, training.position, training.copies, self.rest
        self._say_left = partial(_say_left, training.run, training.progress, is_first=training.crew.is_first)
        self._dropped = weakref.finalize(self, _end, self._process, *what, self.signals, self._say_left)

    @classmethod
    def load(cls, options: Options) -> Session:
        """Begin with the checkpoint that the options name, or fresh where there is none."""
        session = cls(options)
        try:
            session._load()
            session.rest.note_saved()
            position = session.training.position
            position.outside.look()
            return session
        except BaseException:
            session._close("closed")
            raise

    @no_garbage_collection()
    def _load(self) -> None:
        started, options, training = time.perf_counter(), self.training.options, self.training
        run, crew, copies = training.run, training.crew, training.copies
        training.progress.recover()
        expect = pin.checked(options.expect)
        resume = pin.due(options.resume, expect)
        facts: dict[str, Json] = {
            "resume": str(resume),
            "allow": [*options.allow],
            "override": [*options.override],
            "expect": expect,
            "remote": copies and str(copies),
        }
        is_copied = copies is not None
        training.meet(facts, lambda: run.check(resume, is_copied), is_copied=is_copied)
        self.resuming.warn_of_dropout()
        self._warn_of_loaders()
        ranks, position = crew.ranks, training.position
        position.share_seed(ranks.first("the seed of the samples", lambda: position.seed))
        ranks.each("the arguments", lambda: self._check_arguments(resume))
        if copies:
            if copies.are_cached():
                training.print(f"{copies} is kept in {run}")
            copies.look(resume)
        is_empty = directory.is_empty(run.path)
        if ranks.first("the run", lambda: os.path.exists(run.path)):
            self.own()
        found = self.resuming.choose(resume, expect)
        if found is None:
            check = partial(allowed.refuse_unknown, options.allow, training.parts, None, set())
            ranks.each("the names in allow=", check)
            self._begin()
            what = "is empty" if is_empty else "has no checkpoint yet"
            training.print(f"{run} {what}: starting fresh")
            self._begin_trace()
            return
        fit = self.resuming.fit(*found, options.allow, options.override)
        self.own()
        self.resuming.go_on(*found, fit)
        self.heads.loaded()
        self._count_on()
        self.has_resumed = True
        self.steps.set_prepared()
        determinism.hold(self, str(run))
        told: dict[str, Json] = {"changed": [one.to_json() for one in fit.differences]}
        if options.allow:
            told["allowed"] = [*options.allow]
        self.saving.note_start(told)
        # What was pruned may be in a remote under its number: the next save must not take its place there.
        crew.count_from(ranks.first("the numbers", lambda: self.saving.history.highest))
        self.saving.preparation.warn_of_room(found[0].about.size)
        self.saving.prepare()
        self._begin_trace()
        line = self.resuming.line("resumed", found[0], started, "from", self.resuming.variables(fit))
        about = found[1].about
        shares = about.data_size, position.processes
        resized = changes.resized(about.world_size, ranks.size, *shares)
        training.print(line + resized + self.resuming.told(fit) + self._warned())

    def _warned(self) -> str:
        """Return the addition to the resume line about warnings of the start before."""
        count = self.saving.history.warned_before
        what = f"; {counted(count, 'warning')} at the last start (resumable report {self.training.run})"
        return what if count else ""

    def _begin(self) -> None:
        self.own()
        self.training.position.streams.begin()
        self.saving.note_start({})
        self.saving.preparation.warn_of_room(self.training.parts.size())

    def _begin_trace(self) -> None:
        if self.trace:
            self.trace.begin(is_resumed=self.has_resumed)

    def _check_arguments(self, resume: Which) -> None:
        self.training.parts.check_patterns(self.training.options.override)
        if self.training.crew.leads:
            self.training.run.check(resume, self.training.copies is not None)

    def _warn_of_loaders(self) -> None:
        for loader in self.training.position.loaders.values():
            self.training.once.warn_of(loader_warnings.of(loader.source.loader))

    def _count_on(self) -> None:
        position = self.training.position
        self.autosave.saved(position.step, position.epoch)
        self.training.progress.go_to(epochs=position.epoch, steps=position.step)

    def own(self) -> None:
        """Become the only session that writes the run."""
        # The handler of a signal may have closed it during a save, and another may write the run since.
        self.refuse_closed()
        # In a notebook a cell runs again: the new session takes over from the one that it replaces.
        run, copies = self.training.run, self.training.copies
        path = os.path.realpath(run.path)
        if (older := _open.get(path)) and older is not self:
            older._give_way(pushes=copies is None)
        elif older is None and (last := _written.get(path)):
            # The thread that wrote its save was the last to keep it, and is letting go of the run just now.
            last.wait_until_free(_PATIENCE)
        self.training.crew.own(is_copied=bool(copies and copies.numbers))
        _open[path], _written[path] = self, run

    def _give_way(self, *, pushes: bool) -> None:
        # What this session has not pushed the next one will, so there is no need to wait for it.
        if not pushes and self.training.copies:
            self.training.copies.hand_over()
        try:
            self._close("closed")
        except RemoteError as exc:
            warn(exc.problem)

    def begin_at(self, epoch: int, batch: int, step: int, samples: int, best: float | None) -> None:
        """Continue a training whose checkpoint the script has loaded into the parts by itself."""
        self.refuse_closed()
        streams = self.training.position.streams
        if self.has_resumed or streams.has_trained or streams.elsewhere:
            raise UsageError(
                f"this training has begun already: it stands at {', '.join(self.resuming.place())}.",
                fix="call begin_at() once, at the first start only: if not state.resumed: ...",
            )
        if best is not None:
            self.saving.begin_with(best)
        self.training.position.begin_at(epoch, batch, step, samples)
        self.training.parts.note_steps(step)
        self._count_on()
        self.rest.note_saved()

    def refuse_closed(self) -> None:
        """Raise UsageError if this session has ended."""
        if self._is_closed:
            raise closed(self.training.run)

    def save(self, why: str, metrics: Mapping[str, Any] | None = None) -> PendingSave:
        """Save everything; without metrics, those given before stay."""
        with self.saving.save_cost.waiting():
            return self._save(why, metrics)

    def _save(self, why: str, metrics: Mapping[str, Any] | None) -> PendingSave:
        self.training.meet()
        self.heads.saving(is_called=why == "called")
        # What follows a save at an epoch's end is the next epoch, as after a save by itself.
        has_ended = why != "called" or self.training.position.boundary() is Boundary.EPOCH
        with self.training.parts.where_a_body_ended(has_ended):
            handle = self.saving.save(why, metrics, self.own, self.autosave.chosen)
        self.autosave.saved(*self.saving.stood_at)
        self.rest.note_saved()
        return handle

    def save_rest(self, why: str, *, is_boundary: bool = True) -> None:
        """Save what was trained since the last save, unless the script wants no saves but its own."""
        # In the middle of a window of accumulation some gradients can be in no checkpoint.
        is_boundary = is_boundary and not self.training.parts.hides_gradients()
        if self.rest.is_due(why, self.training.crew.ranks, is_boundary=is_boundary):
            self.save(why)

    def went_back(self) -> None:
        """Count from where a checkpoint has put the training back."""
        self.heads.went_back()
        self._count_on()
        self.rest.note_saved()
        if self.trace:
            self.trace.went_back()

    def leave(self, due: Due, number: signal.Signals) -> None:
        """End the training in good order, after its save: raise Preempted, or exit."""
        self.saving.wait()
        place = ", ".join(self.resuming.place())
        what = f"{due.why}: {self.training.run} is saved, checkpoint {self.saving.number}: {place}"
        self.signals.acted_on()
        if self.training.options.raises:
            raise Preempted(f"{what}.", fix="leave; the same command continues from there.", signal=number)
        self.training.progress.close()
        is_cell = is_notebook()
        # Ctrl-C may have ended the reader of a pipe, such as tee, too.
        with contextlib.suppress(OSError):
            if not is_cell:
                self.training.print(f"{what}; the same command continues from there")
        # A notebook keeps the loop, with its workers, for as long as it keeps the traceback.
        self.training.position.close(now=True)
        try:
            self.close(due.why)
        except RemoteError as exc:
            # The exit code tells the queue to start again: then what is missing is pushed.
            warn(exc.problem)
        if is_cell:
            # SystemExit ends no kernel; IPython would tell its user how to leave.
            raise KeyboardInterrupt(f"{what}; run the cell again to go on")
        raise SystemExit(128 + number)

    def close(self, how: str = "closed") -> None:
        """Save the rest, wait for it, and let go of the run; `how` is the reason that the history tells."""
        if self._is_closed or os.getpid() != self._process:
            return
        try:
            if how == "closed":
                self._save_at_end(is_calm=self._error() is None)
        finally:
            self._close(how)

    def _error(self) -> BaseException | None:
        """Return the error that is being handled, and was not yet when the training was loaded."""
        error = sys.exc_info()[1]
        is_exit = isinstance(error, SystemExit) and not error.code
        return None if is_exit or id(error) == self._around else error

    def _save_at_end(self, *, is_calm: bool) -> None:
        position = self.training.position
        is_boundary = position.is_outside() and not position.is_left_early()
        self.save_rest("close()", is_boundary=is_calm and (is_boundary or position.has_trained_in_hand()))
        self.saving.warn_of_missing_metric(is_end=True)

    def _close(self, how: str) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        error, training = self._error(), self.training
        determinism.let_go(self)
        self.signals.close()
        if self.trace:
            self.trace.close(is_at_end=how == "closed" and error is None)
        self.steps.close()
        if error is None:
            training.position.warn_of_left_after_save()
        training.position.close()
        training.progress.close()
        reason = "it has closed its RunState" if how == "closed" else how
        try:
            self.saving.close(partial(training.crew.leave, reason), how)
        finally:
            training.position.logged.close()
        # What it keeps may lead to the variables of the script.
        self._dropped.detach()
        if isinstance(error, LeftAtOnce):
            self._say_left()
        if error is None:
            self.signals.pass_on()


def _end(
    process: int,
    history: History,
    run: Run,
    at: Position,
    copies: Copies | None,
    rest: Rest,
    signals: Signals,
    say_left: Callable[[], None],
) -> None:
    # A forked child has no part in this.
    if process == os.getpid():
        if copies:
            # A warning may be an error.
            with contextlib.suppress(Warning):
                copies.leave()
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None and not signals.has_left:
            rest.warn_at_exit(str(run))
        how = "SIGINT" if signals.has_left else "left without close()"
        end(history, run, at, told(error) if error else how)
        if signals.has_left:
            say_left()


def _say_left(run: Run, progress: Progress, *, is_first: bool) -> None:
    """Say where the next start continues after a second Ctrl-C."""
    if not is_first:
        return
    way = "starts fresh"
    with contextlib.suppress(ResumableError):
        if numbers := run.numbers():
            about = run.open(numbers[-1]).about
            way = f"continues from checkpoint {about.number} (step {about.step})"
    progress.print(f"left at once, without saving; the same command {way}")


def told(error: BaseException) -> str:
    """Return an error as the history tells of it."""
    if isinstance(error, LeftAtOnce):
        return "SIGINT"
    return f"{type(error).__name__}: {error}".removesuffix(": ")
