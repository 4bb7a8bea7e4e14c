"""The saves of one run: an image is taken, then written, committed and tidied after in the background."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

import torch

from .. import options
from ..errors import CannotRead, ResumableError, SaveFailed, UsageError
from ..files import codec
from ..files.strict_json import Json
from ..files.threads import no_garbage_collection
from ..parts.collect import collect, notes, split
from ..parts.part import Trees
from ..parts.reading import Reading
from ..run import checkpoint, environment, policy
from ..run.checkpoint import Checkpoint
from ..run.history_writer import History
from ..run.manifest import NO_CHECKPOINT, Best, Manifest
from ..run.policy import Interval, Took, moment
from ..training import Training
from .closing import closed, end
from .goal_metric import GoalMetric
from .image import Image
from .late_changes import LateChanges
from .preparation import Preparation
from .save_cost import SaveCost
from .saved_files import SavedFiles
from .snapshot import Snapshot, WrittenAround
from .started_with import started_with
from .tidying import tidy_after
from .writer import PendingSave, Writer


class Saving:
    """Makes the saves of a run, at most one at a time, and knows what the last ones were."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._run = training.run
        self._crew = training.crew
        self._parts = training.parts
        self._position = training.position
        self._goal = training.goal
        self._checks_replicas = training.checks_replicas
        self._progress = training.progress
        self.once = training.once
        self.goal_metric = GoalMetric(training.goal, training.once)
        self._copies = training.copies
        self.history = History(training.run, issued=training.once.issued)
        self.save_cost = SaveCost()
        self._built = training.parts.settings
        """The settings that the training began with, or took over from a checkpoint."""
        self.best: Best | None = None
        self.parent: int | None = None
        self.number = 0
        """The last save of this process."""
        self._place: Mapping[str, Any] = {}
        """The counters of that save."""
        self._unheard: int | None = None
        """The save whose metrics, as rank 0 gave them, this process does not have yet."""
        self._failed = 0
        self._has_started = False
        self._is_closed = self._has_let_go = False
        waiting = self.save_cost.waiting
        self._writer = Writer(waiting)
        optimizers = [part.live for part in self._parts.optimizers]
        self._image = Image(optimizers, self._parts.written_in_forward, waiting=waiting)
        self.late = LateChanges(training, self._image)
        self.preparation = Preparation(training)
        self.files = SavedFiles(training)

    @property
    def stood_at(self) -> tuple[int, int]:
        """Step and epoch of the last save."""
        return self._place["step"], self._place["epoch"]

    def is_saved(self, counters: Mapping[str, Any]) -> bool:
        """Whether the last save was made here, as far as is known."""
        return counters == self._place and self._failed != self.number

    @property
    def is_busy(self) -> bool:
        """Whether a save is on its way to the disk."""
        return self._writer.is_busy()

    def save(
        self,
        why: str,
        metrics: Mapping[str, Any] | None,
        own_run: Callable[[], None],
        interval: Interval | None,
    ) -> PendingSave:
        """Take the image, and write it in the background; without metrics, those given before stay."""
        with _failing("the next checkpoint"):
            number = self._crew.next_number(self.number)
        try:
            waited = self._wait_for_the_one_before()
        except BaseException as exc:
            self._crew.skip(number, exc)
            raise
        try:
            values = None if metrics is None else options.numbers(metrics)
            own_run()
            self.note_start({})
            save = self._take(number, values, why, interval, self.save_cost.save_began(waited), own_run)
            if save:
                path = self._run.folder / checkpoint.name(number, save.about.step)
                handle = self._writer.submit(number, path, partial(self._commit, save))
                if self._is_closed:
                    handle.wait()
                return handle
        except BaseException as exc:
            self._crew.fail(number, exc)
            if self._is_closed:
                if self._has_let_go:
                    # It may have taken memory and the lock once more.
                    self._let_go()
                if isinstance(exc, Exception):
                    raise closed(self._run) from exc
            raise
        # The handler of a signal has made the save of this number meanwhile.
        return self.save(why, metrics, own_run, interval)

    def _take(
        self,
        number: int,
        metrics: dict[str, float] | None,
        why: str,
        interval: Interval | None,
        durable_after: Callable[[], float],
        owner: object,
    ) -> _Save | None:
        """Take the image of everything, and note that this is the last save now; None if another is."""
        self.goal_metric.note(metrics or {}, has_best=self.best is not None)
        before = self.best, self.parent, self._position.metrics
        if metrics is None:
            # Once this save has begun, those of the last one cannot be asked for any more.
            self.hear_first()
        else:
            self._position.note_metrics(metrics)
        # A model may be evaluated where save() is called.
        with no_garbage_collection(), torch.inference_mode(False):
            # A kill before this save is durable leaves the last one, whose memory it takes.
            self.late.find()
            self._image.catch_up()
            self._parts.refuse_hidden_gradients()
            trees, kinds = collect(self._parts)
            self.once.warn_of(notes(self._parts))
            whole, shards = split(self._parts, trees)
            groups = {**codec.to_groups(whole, self._crew.ranks.rank), **shards}
            if self._checks_replicas:
                self._crew.compare(groups, self._parts.differing())
            mine = self._crew.share(partial(self._image.sizes, groups), self._image.headers)
            taken = self._image.take(groups, mine, self.files.settled)
            # The handler of a signal may have closed the image before all tensors were in it.
            self._refuse_closed()
        self.preparation.warn_of_slow_copies(self._image, taken)
        counters = self._position.counters()
        about = self._describe(number, metrics or {}, kinds, counters)
        # In one line: the handler of a signal may save before it or after it.
        last, self.number, self.parent = self.number, number, number
        if last >= number:
            self.number = self.parent = last
            return None
        self._place = counters
        if self._crew.is_first:
            self.best = about.best
        elif metrics is not None:
            self._unheard = number
        self.late.begin(number, counters["boundary"], trees, taken)
        # While the disk writes, the training may need the memory of tensors that it has dropped.
        texts = {stem: replace(tree, tensors={}) for stem, tree in trees.items()}
        return _Save(about, why, interval, texts, taken, durable_after, before, owner)

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise closed(self._run)

    def _wait_for_the_one_before(self) -> float:
        started = time.perf_counter()
        try:
            self._writer.wait()
        except WrittenAround as exc:
            # It cannot happen again in this process, and would end each start at the same save.
            self.once.warn(f"{exc} [R19]")
        waited = time.perf_counter() - started
        if waited > A_LONG_WAIT:
            self.once.warn(
                f"save() has waited {waited:.1f} s for the save before it: {self._run} is written more "
                "slowly than saves follow each other. Save less often, or to a faster disk.",
                about="waiting",
            )
        return waited

    def warn_of_missing_metric(self, *, is_end: bool) -> None:
        """Warn if no save was given the metric that says which checkpoint is the best."""
        if self._crew.is_first:
            self.goal_metric.warn_of_none(is_end=is_end, has_best=self.best is not None)

    def _describe(
        self,
        number: int,
        metrics: Mapping[str, float],
        parts: Mapping[str, Json],
        counters: Mapping[str, Any],
    ) -> Manifest:
        assert self._crew.run_id is not None
        return Manifest(
            number=number,
            parent=self.parent,
            run_id=self._crew.run_id,
            saved=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            metrics=metrics,
            best=policy.update_best(self.best, self._goal, metrics, number),
            files={},
            parts=parts,
            built={**self._parts.sharding.built, **self._built},
            environment=environment.describe(),
            world_size=self._crew.ranks.size,
            data_ranks=self._parts.sharding.data_ranks,
            **counters,
        )

    def _commit(self, save: _Save) -> None:
        # This thread has the interpreter, and save() would wait until it gives it up. Not by a sleep, which
        # fails where the clock jumps under it.
        threading.Event().wait(_UNTIL_SAVE_HAS_RETURNED)
        if self._has_let_go:
            raise closed(self._run)
        about, files = save.about, self.files.contents(save.taken, save.trees)
        try:
            with self._progress.saving(about.number, about.metrics), _failing(f"checkpoint {about.number}"):
                if self._crew.leads:
                    about = self._crew.decided(about.number) or about
                committed, wrote = self.files.commit(about, files, save.why)
        except BaseException:
            # A flush can fail after the rename: then the checkpoint is there all the same.
            if not self._is_there(about.number):
                self._failed, self._unheard = about.number, None
                self.best, self.parent, metrics = save.before
                self._position.metrics = metrics
            raise
        durable = save.durable_after()
        if committed:
            self._run.added(about)
            # The cost of this save only the bodies after it will show.
            lost = self.save_cost.cost.lost if self.save_cost.cost else None
            took = Took(lost, durable, self.save_cost.lost_since())
            interval = save.interval._asdict() if save.interval else None
            self.history.saved(committed, save.why, interval=interval, took=took, wrote=wrote)
            tidy_after(self._training, committed)

    def _is_there(self, number: int) -> bool:
        # Of a disk that cannot be read nothing is known.
        with contextlib.suppress(CannotRead):
            return number in self._run.numbers()
        return False

    def hear_first(self) -> None:
        """Take over what rank 0 gave as metrics at the last save: it decides for all."""
        if self._unheard is not None:
            number, self._unheard = self._unheard, None
            # The next call raises what went wrong.
            with contextlib.suppress(ResumableError):
                about = self._crew.decided(number)
                if about and self._failed != number:
                    self.best = about.best
                    self._position.metrics = dict(about.metrics)

    def go_on_from(self, chosen: Checkpoint, best: Best | None, reading: Reading) -> None:
        """Let the next save be one that follows this checkpoint."""
        self.best, self._unheard, self._place = best, None, {}
        ranks, position = self._crew.ranks, self._position
        position.metrics = dict(ranks.first("the metrics", lambda: position.metrics))
        is_ours = self._run.holds(chosen)
        self.parent = chosen.about.number if is_ours else None
        self.files.start_from(reading.written() if is_ours else {})
        if is_ours and (saved := moment(chosen.about.saved)) is not None:
            self._progress.saved(chosen.about.number, saved, position.metrics)

    def begin_with(self, best: float) -> None:
        """Let only a better value than this one, which no checkpoint of the run has, be the best."""
        if self._goal is None:
            raise UsageError(
                "begin_at(best=...) has no metric: nothing says which save is the best.",
                fix="give RunState.load maximize= or minimize=.",
            )
        # Scripts begin with infinity where they have no best value yet.
        self.best = Best(self._goal, best, NO_CHECKPOINT) if math.isfinite(best) else None

    def keep_settings(self, kept: Mapping[str, Json]) -> None:
        """Record the checkpoint's values of these settings in later saves, not the script's."""
        self._built = {**self._built, **kept}

    def note_start(self, facts: Mapping[str, Json]) -> None:
        """Let the history begin, at the first call."""
        if self._crew.leads and not self._has_started:
            self._has_started = True
            where = {"remote": self._copies.told()} if self._copies else {}
            about = {**environment.attempt(), "settings": started_with(self._training)}
            self.history.begin({**about, **where, **facts}, self.parent)
            self.files.ways.recall(self.history.wrote)
            if self.history.last_took:
                self.save_cost.expect(*self.history.last_took)
            if self._copies:
                self._copies.start(self.history, self.best)

    def prepare(self) -> None:
        """Get the memory for the first save before it is needed."""
        self.preparation.prepare(self._image, is_first=not self.number)

    def distrust(self) -> None:
        """Copy everything at once from now on: other optimizers than those given write to it."""
        self._image.distrust()

    def settle(self) -> None:
        """Wait until nothing looks at the tensors any more."""
        self._writer.wait()
        self._image.settle()

    def wait(self) -> None:
        """Wait until the last save is durable; raise what went wrong with it."""
        self._writer.wait()

    def close(self, leave: Callable[[], None], how: str) -> None:
        """Wait for the last save, `leave` the other processes, and unlock the run."""
        failed: type[BaseException] | None = None
        self._is_closed = True
        try:
            self._writer.wait()
        except BaseException as exc:
            failed = type(exc)
            raise
        finally:
            try:
                self.hear_first()
                leave()
                if self._copies:
                    self._copies.close_after(failed)
            finally:
                # After an interrupted wait the writer is still at work: the run stays locked until it ends.
                if not self._writer.is_busy():
                    self._has_let_go = True
                    self._let_go(how)

    def _let_go(self, how: str = "closed") -> None:
        self.late.forget()
        self._image.close()
        end(self.history, self._run, self._position, how)


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    # A caller of save() catches one kind of error, whichever disk call has failed.
    try:
        yield
    except OSError as exc:
        if isinstance(exc, ResumableError) and not isinstance(exc, CannotRead):
            raise
        problem = exc.problem if isinstance(exc, CannotRead) else f"{exc}."
        raise SaveFailed(
            f"{what} could not be written: {problem}",
            fix="mend the cause and call save() again. The checkpoints before it are untouched.",
        ) from exc


class _Save(NamedTuple):
    """One save, from its image to the durable checkpoint."""

    about: Manifest
    why: str
    interval: Interval | None
    trees: Trees
    """The state without its tensors."""
    taken: Snapshot
    durable_after: Callable[[], float]
    """Returns how long it took to become durable, once it is."""
    before: tuple[Best | None, int | None, dict[str, float]]
    """The best, the parent and the metrics, which are restored if there will be no checkpoint."""
    owner: object
    """What owns the run: dropped before the save has ended, it would let others write the run."""


A_LONG_WAIT = 0.5
"""After so many seconds a save tells that the one before it is written slowly."""

_UNTIL_SAVE_HAS_RETURNED = 0.0002
