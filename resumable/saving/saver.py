"""The saves of one run: an image is taken, then written, committed and tidied after in the background."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any

import torch

from .. import options
from ..boundary import Boundary
from ..errors import CannotRead, FormatTooNew, Once, RemoteError, ResumableError, SaveFailed, warn
from ..files import codec, large_files
from ..files.strict_json import Json
from ..files.threads import no_garbage_collection
from ..parts import capture
from ..parts.capture import Capture, Held, Trees
from ..parts.reading import Reading
from ..position.position import Position
from ..processes.roles import Crew
from ..progress import Progress
from ..remote.in_training import Copies
from ..run import checkpoint, environment, policy, splits
from ..run.checkpoint import Checkpoint
from ..run.directory import Run
from ..run.history import History
from ..run.manifest import Best, Goal, Manifest
from ..run.policy import Interval, Keep, moment
from .image import Image, Taken, WrittenAround
from .pace import Pace
from .writer import PendingSave, Writer


class Saving:
    """Makes the saves of a run, at most one at a time, and knows what the last ones were."""

    def __init__(
        self,
        run: Run,
        crew: Crew,
        parts: Capture,
        position: Position,
        goal: Goal | None,
        progress: Progress,
        copies: Copies | None,
        *,
        keep: Keep | None,
        checks_replicas: bool,
        once: Once,
    ) -> None:
        self._run = run
        self._crew = crew
        self._capture = parts
        self._position = position
        self._goal = goal
        self._keep = keep
        self._checks_replicas = checks_replicas
        self._progress = progress
        self.once = once
        self._copies = copies
        self.history = History(run)
        self.pace = Pace()
        self.built = parts.settings
        """The settings that the training began with, or took over from a checkpoint."""
        self.best: Best | None = None
        self.parent: int | None = None
        self.number = 0
        """The last save of this process."""
        self._place: Mapping[str, Any] = {}
        """The counters of that save."""
        self._unheard: int | None = None
        """The save of which this process has not heard yet what rank 0 gave as metrics."""
        self._failed = 0
        self._has_started = False
        self._seen: _Seen | None = None
        self._writer = Writer()
        self._image = Image(parts.optimizers(), parts.written_in_forward)
        self._way: large_files.Way = "paced"
        self._written: Mapping[str, large_files.Written] = {}
        self._is_closed = False

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
            return self._begin(number, values, _Told(why, interval, self.pace.save_began(waited), own_run))
        except BaseException as exc:
            self._crew.fail(number, exc)
            raise

    def _begin(self, number: int, values: dict[str, float] | None, told: _Told) -> PendingSave:
        self._warn_of_no_goal(values or {})
        before = _Before(self.best, self.parent, self._position.metrics)
        if values is None:
            # (later nobody could tell any more)
            self.hear_first()
        else:
            self._position.note_metrics(values)
        # What the last one saw is in the memory that this one takes.
        self._seen = None
        with _failing(f"checkpoint {number}"):
            self._position.splits = splits.records(self._run.path) if self._crew.is_first else {}
        self._image.catch_up()
        # (save() may be called where a model is evaluated)
        with no_garbage_collection(), torch.inference_mode(False):
            trees, parts = self._capture.collect()
            for text in self._capture.notes():
                self.once.warn(text)
            groups = codec.to_groups(trees, self._crew.ranks.rank)
            if self._checks_replicas:
                self._crew.compare(groups, self._capture.differing())
            mine = self._crew.share(self._image.sizes(groups), self._image.headers)
            taken = self._image.take(groups, mine)
        self._warn_of_slow_copies(taken)
        about = self._describe(number, values or {}, parts)
        self.number = self.parent = number
        if self._crew.is_first:
            self.best = about.best
        elif values is not None:
            self._unheard = number
        self._place = self._position.counters()
        step, body = self._position.step, self._position.body()
        sums = self._position.means.version
        self._seen = _Seen(number, step, body, sums, capture.versions(trees), Held(trees, taken))
        path = self._run.folder / checkpoint.name(number, about.step)
        # While the disk writes, the training may need the memory of tensors that it has dropped.
        texts = {stem: replace(tree, tensors={}) for stem, tree in trees.items()}
        return self._writer.submit(number, path, lambda: self._commit(about, texts, taken, before, told))

    def _warn_of_slow_copies(self, taken: Taken) -> None:
        if taken.waited_for:
            self.once.warn(
                f"the device has no room for a copy of {taken.waited_for:,} bytes of the state, so the "
                "training waits while each save copies them to host memory. Parameters and moments of an "
                "optimizer of torch.optim need no such copy.",
                about="room on the device",
            )
        if self._image.is_pageable():
            self.once.warn(
                "the driver refused to register the host memory for saves, so copies from the GPU are "
                "slower, and the step after each save waits for them. Raise the limit of locked memory "
                "(ulimit -l), if there is one.",
                about="pageable memory",
            )

    def _wait_for_the_one_before(self) -> float:
        started = time.perf_counter()
        try:
            self._writer.wait()
        except WrittenAround as exc:
            # It cannot happen again in this process, and would end each start at the same save.
            self.once.warn(str(exc))
        waited = time.perf_counter() - started
        if waited > _A_LONG_WAIT:
            self.once.warn(
                f"save() has waited {waited:.1f} s for the save before it: {self._run} is written more "
                "slowly than saves follow each other. Save less often, or to a faster disk.",
                about="waiting",
            )
        return waited

    def _warn_of_no_goal(self, metrics: Mapping[str, float]) -> None:
        if metrics and self._goal and self._goal.metric not in metrics and self.best is None:
            self.once.warn(
                f"save() was given {', '.join(metrics)}, but {self._goal} says which checkpoint is the best."
            )

    def _describe(self, number: int, metrics: Mapping[str, float], parts: Mapping[str, Json]) -> Manifest:
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
            built=self.built,
            environment=environment.describe(),
            world_size=self._crew.ranks.size,
            **self._position.counters(),
        )

    def _commit(self, about: Manifest, trees: Trees, taken: Taken, before: _Before, told: _Told) -> None:
        files = taken.contents(self._written)
        for path, text in codec.to_texts(trees, self._crew.ranks.rank).items():
            if self._crew.leads or codec.rank_of(path) is not None:
                files[path] = large_files.Content(text)
        try:
            with self._progress.saving(about.number), _failing(f"checkpoint {about.number}"):
                if self._crew.leads:
                    about = self._crew.decided(about.number) or about
                    with self._run.adding(about):
                        self._written = self._crew.commit(about, files, self._way)
                else:
                    self._written = self._crew.commit(about, files, self._way)
        except BaseException:
            # A flush can fail after the rename: then the checkpoint is there all the same.
            if not self._is_there(about.number):
                self._failed, self._unheard = about.number, None
                self.best, self.parent = before.best, before.parent
                self._position.note_metrics(before.metrics)
            raise
        durable = told.ended()
        if self._crew.leads:
            self._note(about, told, durable)
            self._tidy_after(about)

    def _is_there(self, number: int) -> bool:
        # (of a disk that is gone nobody knows)
        with contextlib.suppress(CannotRead):
            return number in self._run.numbers()
        return False

    def _note(self, about: Manifest, told: _Told, durable: float) -> None:
        # What it cost the training only the bodies after it will have shown.
        lost = self.pace.cost.lost if self.pace.cost else None
        interval = asdict(told.interval) if told.interval else None
        self.history.saved(about.number, told.why, interval=interval, lost=lost, durable=durable)

    def _tidy_after(self, about: Manifest) -> None:
        # First: what goes wrong here must not keep it from the remote.
        if self._copies:
            self._copies.saved(about.number, about.best)
        try:
            self._run.point("newest", self._run.path_of(about.number))
            if about.best:
                self._run.point("best", self._run.path_of(about.best.number))
            if self._keep is not None and self._run.holds_more_than(self._keep.newest):
                self._prune(self._keep, about.best)
        except (CannotRead, FormatTooNew) as exc:
            # The checkpoint is durable. Which of all is the best cannot be told, so all of them stay.
            self.once.warn(f"nothing was pruned: {exc.problem}")

    def _prune(self, keep: Keep, best: Best | None) -> None:
        protected = [found.number for found in (best, self._run.best(self._goal)) if found]
        protected += self._copies.pinned() if self._copies else ()
        self._run.prune(keep, protected, self._goal)

    def hear_first(self) -> None:
        """Take over what rank 0 gave as metrics at the last save: it decides for all."""
        if self._unheard is not None:
            number, self._unheard = self._unheard, None
            # (of what went wrong the next call tells)
            with contextlib.suppress(ResumableError):
                about = self._crew.decided(number)
                if about and self._failed != number:
                    self.best = about.best
                    self._position.note_metrics(dict(about.metrics))

    def go_on_from(self, chosen: Checkpoint, best: Best | None, reading: Reading) -> None:
        """Let the next save be one that follows this checkpoint."""
        self.best, self._unheard, self._place = best, None, {}
        ranks, position = self._crew.ranks, self._position
        position.note_metrics(dict(ranks.first("the metrics", lambda: position.metrics)))
        is_ours = self._run.holds(chosen)
        self.parent = chosen.about.number if is_ours else None
        self._written = reading.written() if is_ours else {}
        if is_ours and (saved := moment(chosen.about.saved)) is not None:
            self._progress.saved(chosen.about.number, saved)

    def note_start(self, facts: Mapping[str, Json]) -> None:
        """Let the history begin, at the first call."""
        if self._crew.leads and not self._has_started:
            self._has_started = True
            where = {"remote": self._copies.told()} if self._copies else {}
            self.history.begin({**environment.attempt(), **where, **facts}, self.parent)
            if self.history.last_took:
                self.pace.expect(*self.history.last_took)
            if self._copies:
                self._copies.start(self.history, self.best)

    def lost_since(self) -> list[str]:
        """Return the parts that have changed since the save in this body; what it has is lost by a resume."""
        seen, self._seen = self._seen, None
        if seen is None or seen.body != self._position.body():
            return []
        # A fused optimizer changes tensors without counting it, so steps are looked at too.
        stepped = self._capture.trained() if self._position.step > seen.step else []
        # (what went wrong with the image the writer tells)
        changed = []
        self._image.catch_up()
        with contextlib.suppress(SaveFailed):
            changed = self._capture.changed_since(seen.versions, seen.held)
        # (an epoch that is finished has no more use for its means)
        is_finished = self._place["boundary"] is Boundary.EPOCH
        summed = [] if is_finished or self._position.means.version == seen.sums else ["means"]
        changed = [*dict.fromkeys([*stepped, *changed, *summed])]
        if changed:
            self.once.warn(
                f"{', '.join(changed)} changed after save() in the same body: a resume from checkpoint "
                f"{seen.number} would not have the change. Call save() last in the body.",
                about="what is lost",
            )
        return changed

    def prepare(self) -> None:
        """Get the memory for the first save, and try the disk, before they are needed."""
        size = self._capture.size() if self._capture.saves_all else 0
        self.warn_of_room(size)
        if self._crew.writers > 1:
            # (shares are of whole blocks)
            size = size // self._crew.writers + large_files.BLOCK
        if size >= _WORTH_PREPARING and not self._is_closed:
            self._image.reserve(size + size // 1000, self._try_disk)

    def _try_disk(self, scratch: memoryview) -> None:
        if os.path.isdir(self._run.path) and self._crew.leads:
            # (a save has more use for the disk)
            self._way = large_files.fastest_way(
                self._run.path, scratch, lambda: not self.number and not self._is_closed
            )

    def warn_of_room(self, size: int) -> None:
        """Warn where the disk has no room for all that is to be kept, if a checkpoint takes so much."""
        if not self._crew.leads or not os.path.isdir(self._run.path):
            return
        # (that a disk cannot be asked is told by the save)
        with contextlib.suppress(OSError):
            there, free = len(self._run.numbers()), shutil.disk_usage(self._run.path).free
            if text := policy.room(self._keep, self._goal, size, there, free):
                self.once.warn(f"{self._run}: {text}", about="room")

    def settle(self) -> None:
        """Wait until nothing looks at the tensors any more."""
        self._writer.wait()
        self._image.settle()

    def forget_seen(self) -> None:
        """Compare nothing with the last save any more: the training has gone elsewhere."""
        self._seen = None

    def wait(self) -> None:
        """Wait until the last save is durable; raise what went wrong with it."""
        self._writer.wait()

    def close(self, leave: Callable[[], None], how: str) -> None:
        """Wait for the last save, `leave` the other processes, and let go of the run."""
        self._is_closed = True
        failed: type[BaseException] | None = None
        try:
            self._writer.wait()
        except BaseException as exc:
            failed = type(exc)
            raise
        finally:
            try:
                self.hear_first()
                leave()
                self._close_copies(failed)
            finally:
                # An interrupted wait leaves the writer at work: nobody else may begin until it has ended.
                if not self._writer.is_busy():
                    self._seen = None
                    self._image.close()
                    end(self.history, self._run, self._position, how)

    def _close_copies(self, failed: type[BaseException] | None) -> None:
        if self._copies is None:
            return
        if failed and not issubclass(failed, Exception):
            # Who has interrupted one wait does not want another one.
            self._copies.leave()
            return
        try:
            self._copies.close()
        except RemoteError as exc:
            if failed is None:
                raise
            # Else nobody would see that a save has failed.
            warn(exc.problem)


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    # Whoever saves looks out for one kind of error, whichever call the disk has refused.
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


def end(history: History, run: Run, position: Position, how: str) -> None:
    """Note how a process has ended, and let another one write the run."""
    epoch, batch, step = position.stands_at()
    history.ended(how, epoch=epoch, batch=batch, step=step)
    run.release()


@dataclass(frozen=True, slots=True)
class _Told:
    """What the history tells of a save besides the manifest, and what is to be called when it is durable."""

    why: str
    interval: Interval | None
    ended: Callable[[], float]
    owner: object
    """Who owns the run: dropped before the save has ended, it would let others write the run."""


@dataclass(frozen=True, slots=True)
class _Before:
    """What was known before a save, and is again if there will be none."""

    best: Best | None
    parent: int | None
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a save saw, to be compared with what there is when its body ends."""

    number: int
    step: int
    body: Any
    sums: int
    """The version of the means."""
    versions: capture.Versions
    held: Held


_A_LONG_WAIT = 0.5
_WORTH_PREPARING = 64 << 20
