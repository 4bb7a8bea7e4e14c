"""Pushes the checkpoints of a run to its remote in the background, for as long as the training lasts."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ..errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    RemoteError,
    ResumableError,
    RunInUse,
    warn,
)
from ..files import lock
from ..files.threads import yield_to_training
from ..progress import Progress
from ..run.directory import Run
from ..run.history_writer import History
from ..run.manifest import Best, Goal
from ..run.policy import Keep, Push, duration
from .backlog import Backlog
from .push import LOCK, OthersDue, Sent, is_there, noted, push, summary
from .run_copy import AnotherRun, Remote


class Pusher:
    """Pushes what the remote lacks, one checkpoint after the other, the newest first, and prunes there.

    It has a thread only while there is something to do. A failure is reported once, and retried at growing
    intervals; the training never waits.
    """

    def __init__(
        self,
        run: Run,
        remote: Remote,
        push: Push,
        keep: Keep | None,
        goal: Goal | None,
        *,
        history: History,
        progress: Progress,
        tell: Callable[[str, str], object],
        seen: Callable[[int], object],
        commits: bool = True,
    ) -> None:
        """`commits`: False on a disk with only shards of the checkpoints, which another one commits."""
        self._run = run
        self._remote = remote
        self._keep = keep
        self._goal = goal
        self._history = history
        self._progress = progress
        self._tell = tell
        self._seen = seen
        self._commits = commits
        self._begun: int | None = None
        """The checkpoint that waits for what other disks have of it."""
        self._began_at, self._sent = 0.0, Sent(0, 0)
        """Since when, and what was sent of it."""
        self._lacking: dict[int, int] = {}
        """How many files of each checkpoint were missing, at the last look."""
        self._made_now: set[int] = set()
        """The checkpoints of this start of the training."""
        self._given_up: set[int] = set()
        """Checkpoints of which other disks have, or send, nothing."""
        self._heard_at = time.monotonic()
        """When something came from another disk, or there was something new for it."""
        self._backlog = Backlog(run, push, keep)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._lock: lock.Lock | None = None
        self._run_id: str | None = None
        self._in_hand: int | None = None
        self._is_closing = False
        self._is_abandoned = False
        self._is_hopeless = False
        self._error: Exception | None = None
        self._waits_for: OthersDue | None = None

    def start(self, run_id: str, best: Best | None) -> None:
        """Check in the background whether the remote can be used, and push what it lacks."""
        self._run_id, self._backlog.best = run_id, best.number if best else None
        self._wake()

    def saved(self, number: int, best: Best | None) -> None:
        """Note a new checkpoint."""
        with self._changed:
            self._backlog.best = best.number if best else None
            self._backlog.saved(number)
            self._made_now.add(number)
            self._heard_at = time.monotonic()
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            if self._thread is None and not self._is_closing:
                # A daemon: it may hang for ever, and a process that ends must not wait for it.
                self._thread = threading.Thread(target=self._work, name="resumable-push", daemon=True)
                self._thread.start()

    def pinned(self) -> set[int]:
        """Return the checkpoints that must not be pruned here yet."""
        with self._changed:
            if self._run_id is None:
                return set()
            in_hand = set() if self._in_hand is None else {self._in_hand}
            begun = set() if self._begun is None else {self._begun}
            return in_hand | begun | {*self._backlog.due()[:_MOST_PINNED]}

    def close(self, patience: float) -> None:
        """Wait up to `patience` seconds for what is missing there; RemoteError says what still is."""
        if self._run_id is None or self._is_abandoned:
            return
        try:
            with self._changed:
                self._is_closing, self._heard_at = True, time.monotonic()
                self._changed.notify_all()
                is_done = self._is_done_in(min(patience, _A_LONG_WAIT)) or self._wait_longer(patience)
        except BaseException:
            # The same process may start again, as a notebook does.
            self.hand_over()
            raise
        if not is_done:
            self._abandon()
        self._release()
        if error := self._incomplete(patience):
            raise error

    def _is_done_in(self, seconds: float) -> bool:
        return self._changed.wait_for(lambda: self._thread is None, seconds)

    def _wait_longer(self, patience: float) -> bool:
        due = ", ".join(map(str, self._backlog.due()))
        if due:
            most = duration(patience)
            self._progress.print(f"waiting for {self._remote} to get checkpoint {due}: at most {most}")
        return self._is_done_in(patience - _A_LONG_WAIT)

    def leave(self) -> None:
        """Stop at once, and warn of what is missing there: for a training that does not close its run."""
        if self._run_id is None or self._is_closing:
            return
        self.hand_over()
        if error := self._incomplete(0):
            warn(error.problem + " The next start pushes what is missing.")

    def hand_over(self) -> None:
        """Stop at once, without a warning: another training of this process pushes what is missing."""
        self._is_closing = True
        self._abandon()
        self._release()

    def _release(self) -> None:
        # A paramiko client has a thread, which would live as long as the process.
        self._remote.store.close()
        if self._lock:
            self._lock.release()
            self._lock = None

    def _abandon(self) -> None:
        self._is_abandoned = True
        self._remote.store.abandon()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._thread is None, _TO_LEAVE)

    def _incomplete(self, patience: float) -> RemoteError | None:
        """Return the error that names what is missing there, and why; None if nothing is."""
        with self._changed:
            missing = self._backlog.missing()
        if not missing:
            return None
        few = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if len(missing) > _MOST_NAMED else "")
        many = "checkpoint" if len(missing) == 1 else "checkpoints"
        fix = (
            "the same command pushes what is on the local disk at its next start, and so does "
            f"`resumable push {self._run} {self._remote}`."
        )
        if isinstance(self._error, AnotherRun):
            fix = self._error.fix
        elif isinstance(self._error, RemoteError) and self._error.is_final:
            fix = f"{self._error.fix.rstrip('.')}. Then {fix}"
        why = self._why_incomplete(patience).rstrip(".")
        return RemoteError(f"{many} {few} of {self._run} did not get to {self._remote}: {why}.", fix=fix)

    def _why_incomplete(self, patience: float) -> str:
        if self._backlog.has_only_damaged():
            return "damaged on the local disk"
        if error := self._error or self._waits_for:
            return _text(error)
        why = "there was no time for it" if not patience else f"it was not done in {duration(patience)}"
        return f"{why}: {trouble}" if (trouble := self._remote.store.trouble) else why

    def _work(self) -> None:
        yield_to_training()
        delay = _FIRST_DELAY
        while self._has_work():
            try:
                self._do_next()
                self._error, delay = None, _FIRST_DELAY
            except Exception as exc:
                self._fail(exc)
                with self._changed:
                    longest = _CLOSING_DELAY if self._is_closing else _LONGEST_DELAY
                    self._changed.wait(min(delay, longest) * _DICE.uniform(0.5, 1))
                delay = min(2 * delay, _LONGEST_DELAY)

    def _has_work(self) -> bool:
        with self._changed:
            is_known = self._backlog.is_known or self._is_closing
            is_done = is_known and not self._backlog.due() and self._begun is None
            if self._is_abandoned or self._is_hopeless or is_done:
                self._thread = None
                self._changed.notify_all()
                return False
            return True

    def _fail(self, error: Exception) -> None:
        if self._is_abandoned:
            return
        self._error, text = error, _text(error)
        is_another = isinstance(error, AnotherRun)
        # While the training lasts, the user may mend the cause.
        self._is_hopeless = is_another or (self._is_closing and _is_final(error))
        hope = "Nothing is pushed." if is_another else "It is tried again; until then nothing is pushed."
        # Where warnings are errors, close() raises.
        with contextlib.suppress(Warning):
            self._tell(f"{text} {hope}", cause(text))

    def _do_next(self) -> None:
        if not self._backlog.is_known:
            self._look()
        begun = () if self._commits else self._remote.begun()
        if begun:
            # The disk that commits is still at work.
            self._heard_at = time.monotonic()
        with self._changed:
            missed = self._backlog.missed()
            self._in_hand = self._chosen(begun)
        if missed is not None:
            self._tell(
                f"checkpoint {missed} was pruned before it could be pushed to {self._remote}, which is "
                "slower than saves follow each other. Save less often, or keep more (keep=).",
                "what was not pushed",
            )
        if self._in_hand is None:
            self._wait_for_first()
            return
        try:
            self._push_one(self._in_hand)
        finally:
            self._in_hand = None

    def _chosen(self, begun: Sequence[int]) -> int | None:
        """Return the checkpoint to push next; of `begun` ones this disk has to push its shards."""
        due = self._backlog.due()
        if not self._commits:
            here = {*self._run.numbers()}
            return next(
                (n for n in begun if n in here - self._given_up and not self._backlog.is_there(n)), None
            )
        if self._begun is not None:
            return self._begun
        if self._given_up.issuperset(due):
            self._given_up.clear()
        return next((number for number in due if number not in self._given_up), None)

    def _wait_for_first(self) -> None:
        """Wait for the disk that commits to begin with a checkpoint."""
        with self._changed:
            if self._is_closing and time.monotonic() - self._heard_at > _GIVES_UP:
                # That disk does not have them, or does not push them any more.
                self._backlog.pruned(self._backlog.due())
            elif self._backlog.due():
                self._changed.wait(_FIRST_DELAY)

    def _wait_for_others(self, number: int, error: OthersDue) -> None:
        """Wait a while for what other disks have of a checkpoint; go on with another if nothing comes."""
        self._begun, self._waits_for = number, error
        with self._changed:
            if error.lacking < self._lacking.get(number, error.lacking):
                self._heard_at = time.monotonic()
            self._lacking[number] = error.lacking
            # Nodes that have made it with this one may be sending a large file; others may be gone.
            patience = _LONGEST_FILE if number in self._made_now else _GIVES_UP
            if time.monotonic() - self._heard_at <= patience:
                self._changed.wait(_FIRST_DELAY)
                return
            self._begun = None
            self._given_up.add(number)
            if {*self._backlog.due()} - self._given_up:
                return
            if not self._is_closing:
                self._changed.wait(_LONGEST_DELAY)
                return
            self._is_hopeless = bool(self._given_up & {*self._run.numbers()[-1:]})
            if not self._is_hopeless:
                # Of an earlier training, on nodes that are gone.
                self._backlog.pruned(self._given_up)
        if not self._is_hopeless:
            self._tell(f"{error.problem} They send nothing any more: it is left out.", "other nodes")

    def _look(self) -> None:
        assert self._run_id is not None
        if self._lock is None:
            self._lock = lock.Lock(self._run.path / LOCK)
        names = self._remote.begin(self._run_id, commits=self._commits)
        if names:
            self._seen(max(names))
        wanted = self._backlog.wanted()
        others = {number for number in wanted & names.keys() if not self._is_same(number, names[number])}
        with self._changed:
            # Checkpoints saved in the meantime were not compared.
            there = {*names} - others - (self._backlog.wanted() - wanted)
            self._backlog.know(there)
        self._note_known(wanted & there, names)

    def _is_same(self, number: int, name: str) -> bool:
        """Return whether what is there under a number is what is here; if not, it will be replaced."""
        try:
            here = self._run.open(number)
        except (CheckpointDamaged, CheckpointNotFound):
            return True
        try:
            if is_there(self._remote, here, name, commits=self._commits):
                return True
        except CheckpointDamaged as exc:
            self._tell(f"{exc.problem} It is replaced.", "another")
            return False
        self._tell(
            f"{self._remote} has another checkpoint {number} than {self._run}, from a training that "
            "continued elsewhere. It is replaced.",
            "another",
        )
        return False

    def _note_known(self, numbers: set[int], names: Mapping[int, str]) -> None:
        """Note checkpoints in the history that a process has pushed and was killed before it noted them."""
        if not self._commits:
            return
        for number in sorted(numbers - noted(self._remote, self._run)):
            self._history.pushed(number, str(self._remote), sent=0, copied=0, seconds=0)
            self._remote.point_at(names[number], max(names), self._backlog.best)

    def _push_one(self, number: int) -> None:
        if self._begun is None:
            self._began_at, self._sent = time.perf_counter(), Sent(0, 0)
        try:
            found = self._run.open(number)
            with self._progress.moving(f"pushing checkpoint {number}", found.about.size) as moved:
                sent = push(self._remote, found, moved, commits=self._commits)
        except CheckpointNotFound:
            # Pruned in the meantime.
            self._begun = None
            return
        except OthersDue as exc:
            if not self._commits:
                # What was begun there under this number is another checkpoint than the one here.
                self._given_up.add(number)
                return
            self._sent = _sum(self._sent, exc.sent)
            self._wait_for_others(number, exc)
            return
        except CheckpointDamaged as exc:
            self._backlog.damaged(number)
            self._begun = None
            self._tell(f"{exc.problem} It is not pushed to {self._remote}.", f"pushing {number}")
            return
        self._backlog.pushed(number)
        self._begun = self._waits_for = None
        if not self._commits:
            return
        seconds = time.perf_counter() - self._began_at
        gone: list[int] = []
        try:
            gone = self._prune(found.path.name, number)
        except ResumableError as exc:
            self._tell(f"{exc.problem} The checkpoints that are there are complete.", "tidying")
        self._note(number, _sum(self._sent, sent), seconds, gone)

    def _prune(self, name: str, number: int) -> list[int]:
        newest, best = self._backlog.newest(), self._backlog.best
        self._remote.point_at(name, newest, best)
        gone = self._remote.prune(self._keep, self._goal, [number, newest, best], self._backlog.due())
        self._backlog.pruned(gone)
        return gone

    def _note(self, number: int, sent: Sent, seconds: float, gone: Sequence[int]) -> None:
        self._history.pushed(
            number, str(self._remote), sent=sent.sent, copied=sent.copied, seconds=seconds, removed=gone
        )
        self._progress.pushed(number)
        text = summary(f"pushed checkpoint {number} to {self._remote}", sum(sent), seconds)
        self._progress.print(text, logging.DEBUG)


def _sum(one: Sent, other: Sent) -> Sent:
    return Sent(one.sent + other.sent, one.copied + other.copied)


def _text(error: Exception) -> str:
    return error.problem if isinstance(error, ResumableError) else f"{type(error).__name__}: {error}"


def cause(problem: str) -> str:
    """Return what a warning is about: one cause is reported once, whatever it keeps from being done.

    >>> cause("s3://bucket/exp/run.json cannot be written: Access Denied.")
    'Access Denied.'
    """
    return problem.rpartition(": ")[2]


def _is_final(error: Exception) -> bool:
    # Another process that pushes this run will end some day.
    return isinstance(error, ResumableError) and getattr(error, "is_final", not isinstance(error, RunInUse))


# Python's own generator is the training's: a draw here would give it other numbers.
_DICE = random.SystemRandom()
_FIRST_DELAY = 1.0
_LONGEST_DELAY = 120.0
_CLOSING_DELAY = 2.0
_GIVES_UP = 30.0
_LONGEST_FILE = 3600.0
_MOST_PINNED = 4
_MOST_NAMED = 5
_TO_LEAVE = 5.0
_A_LONG_WAIT = 3.0
