"""Copies the checkpoints of a run to its remote, in the background, for as long as the training lasts."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..errors import (
    CannotRead,
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
from ..run import history
from ..run.directory import Run
from ..run.history import History
from ..run.manifest import Best, Goal
from ..run.policy import Facts, Keep, Push, bytes_of, duration, to_prune
from .run_copy import AnotherRun, Remote, Sent


class Pusher:
    """Copies to a remote what is to be there: the newest first, one after the other, and prunes there.

    There is a thread only while there is something to do. What goes wrong is told once, and tried
    again ever more slowly; the training never waits.
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
    ) -> None:
        self._run = run
        self._remote = remote
        self._push = push
        self._keep = keep
        self._goal = goal
        self._history = history
        self._progress = progress
        self._tell = tell
        self._seen = seen
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._lock: lock.Lock | None = None
        self._run_id: str | None = None
        self._best: int | None = None
        self._there: set[int] | None = None
        """The checkpoints that are complete there; None if nobody has looked yet."""
        self._refused: set[int] = set()
        """Those that cannot be pushed, because they are damaged here."""
        self._pruned: set[int] = set()
        """Those that went there, and that the remote does not keep."""
        self._in_hand: int | None = None
        self._were_due: set[int] = set()
        self._is_closing = False
        self._is_abandoned = False
        self._is_hopeless = False
        self._error: Exception | None = None

    def start(self, run_id: str, best: Best | None) -> None:
        """Look in the background whether the remote can be used, and push what it lacks."""
        self._run_id, self._best = run_id, best.number if best else None
        self._wake()

    def saved(self, number: int, best: Best | None) -> None:
        """Note that there is a new checkpoint."""
        with self._changed:
            self._best = best.number if best else None
            # What is there under its number is of a training that went on elsewhere: it is not this one.
            if self._there:
                self._there.discard(number)
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
            if self._thread is None and not self._is_closing:
                # A daemon: what it waits for may never come, and a process that ends must not wait for it.
                self._thread = threading.Thread(target=self._work, name="resumable-push", daemon=True)
                self._thread.start()

    def close(self, patience: float) -> None:
        """Wait for what is not there yet, for so many seconds at most; RemoteError says what is missing."""
        if self._run_id is None or self._is_abandoned:
            return
        try:
            with self._changed:
                self._is_closing = True
                self._changed.notify_all()
                is_done = self._is_done_in(min(patience, _A_LONG_WAIT)) or self._wait_longer(patience)
        except BaseException:
            self._abandon()
            # The same process may start again: a notebook does.
            self._let_go()
            raise
        if not is_done:
            self._abandon()
        self._let_go()
        if missing := self._missing():
            raise self._not_there(missing, patience) from None

    def _is_done_in(self, seconds: float) -> bool:
        return self._changed.wait_for(lambda: self._thread is None, seconds)

    def _wait_longer(self, patience: float) -> bool:
        due = ", ".join(map(str, self._due()))
        if due:
            most = duration(patience)
            self._progress.print(f"waiting for {self._remote} to get checkpoint {due}: at most {most}")
        return self._is_done_in(patience - _A_LONG_WAIT)

    def leave(self) -> None:
        """Let go at once, and say what is not there yet; for a training that does not close its run."""
        if self._run_id is None or self._is_closing:
            return
        self.hand_over()
        if missing := self._missing():
            warn(self._not_there(missing, 0).problem + " The next start pushes what is missing.")

    def hand_over(self) -> None:
        """Let go at once, without a word: another one of this process pushes what is missing."""
        self._is_closing = True
        self._abandon()
        self._let_go()

    def _let_go(self) -> None:
        # (paramiko) It has a thread, which would go on for as long as the process.
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

    def _missing(self) -> list[int]:
        with self._changed:
            refused, self._refused = self._refused, set()
            missing, self._refused = self._due(), refused
            return missing

    def _not_there(self, missing: Sequence[int], patience: float) -> RemoteError:
        few = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if len(missing) > _MOST_NAMED else "")
        many = "checkpoint" if len(missing) == 1 else "checkpoints"
        why = "there was no time for it" if not patience else f"it was not done in {duration(patience)}"
        if {*missing} <= self._refused:
            why = "damaged on the local disk"
        elif self._error:
            why = _text(self._error)
        elif trouble := self._remote.store.trouble:
            why += f": {trouble}"
        fix = "the same command pushes what is on the local disk at its next start, and so does "
        fix += f"`resumable push {self._run} {self._remote}`."
        if isinstance(self._error, AnotherRun):
            fix = self._error.fix
        elif isinstance(self._error, RemoteError) and self._error.is_final:
            fix = f"{self._error.fix.rstrip('.')}. Then {fix}"
        return RemoteError(
            f"{many} {few} of {self._run} did not get to {self._remote}: {why.rstrip('.')}.", fix=fix
        )

    def pinned(self) -> set[int]:
        """Return the checkpoints that must not be pruned here yet."""
        with self._changed:
            if self._run_id is None:
                return set()
            in_hand = set() if self._in_hand is None else {self._in_hand}
            return in_hand | {*self._due()[:_MOST_PINNED]}

    def _due(self) -> list[int]:
        there = self._there or set()
        wanted = self._wanted()
        if self._push == "all":
            # What the remote would not keep need not go there.
            wanted -= {*self._going({*self._run.numbers()} | there)}
        return sorted(wanted - there - self._refused - self._pruned, reverse=True)

    def _wanted(self) -> set[int]:
        here = self._run.numbers()
        if self._push == "all":
            return {*here}
        newest = here[-1:] if self._push == "newest" else []
        return {*here} & {*newest, self._best}

    def _going(self, numbers: Iterable[int]) -> list[int]:
        if self._keep is None or self._keep.every or self._keep.best > 1:
            return []
        facts = [Facts(number, 0) for number in sorted(numbers)]
        return to_prune(facts, self._keep, None, [self._best])

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
            has_looked = self._there is not None or self._is_closing
            if self._is_abandoned or self._is_hopeless or (has_looked and not self._due()):
                self._thread = None
                self._changed.notify_all()
                return False
            return True

    def _fail(self, error: Exception) -> None:
        if self._is_abandoned:
            return
        self._error, text = error, _text(error)
        # (what came before may have been mended since)
        is_another = isinstance(error, AnotherRun)
        self._is_hopeless = is_another or (self._is_closing and _is_final(error))
        hope = "Nothing is pushed." if is_another else "It is tried again; until then nothing is pushed."
        # (where warnings are errors, close() is the place to raise one)
        with contextlib.suppress(Warning):
            self._tell(f"{text} {hope}", text)

    def _do_next(self) -> None:
        if self._there is None:
            self._look()
        with self._changed:
            due = self._due()
            self._tell_of_missed(due)
            self._in_hand = due[0] if due else None
        if self._in_hand is None:
            return
        try:
            self._push_one(self._in_hand)
        finally:
            self._in_hand = None

    def _tell_of_missed(self, due: Iterable[int]) -> None:
        here, there = {*self._run.numbers()}, self._there or set()
        gone = self._were_due - here - there if self._push == "all" else set()
        self._were_due = {*due}
        if gone - {*self._going(here | there | gone)}:
            self._tell(
                f"checkpoint {min(gone)} was pruned before it could be pushed to {self._remote}, which is "
                "slower than saves follow each other. Save less often, or keep more (keep=).",
                "what was not pushed",
            )

    def _look(self) -> None:
        assert self._run_id is not None
        if self._lock is None:
            self._lock = lock.Lock(self._run.path / LOCK)
        names = self._remote.begin(self._run_id)
        if names:
            self._seen(max(names))
        wanted = self._wanted()
        others = {number for number in wanted & names.keys() if not self._is_same(number, names[number])}
        with self._changed:
            # (nobody has compared what was saved meanwhile)
            self._there = {*names} - others - (self._wanted() - wanted)
        self._note_known(wanted & self._there, names)

    def _is_same(self, number: int, name: str) -> bool:
        """Whether what is there under a number is what is here; if not, it will be replaced."""
        try:
            here = self._run.open(number)
        except (CheckpointDamaged, CheckpointNotFound):
            return True
        try:
            if here.path.name == name and self._remote.about(name)[0] == here.about:
                return True
        except CheckpointDamaged as exc:
            self._tell(f"{exc.problem} It is replaced.", "another")
            return False
        self._tell(
            f"{self._remote} has another checkpoint {number} than {self._run}, from a training that went on "
            "elsewhere. It is replaced.",
            "another",
        )
        return False

    def _note_known(self, numbers: set[int], names: Mapping[int, str]) -> None:
        """Note what a process has pushed that was killed before it could, and point at it."""
        noted: set[int] = set()
        with contextlib.suppress(CannotRead):
            noted = history.pushed(history.read(self._run.path)).get(str(self._remote), set())
        for number in sorted(numbers - noted):
            self._history.pushed(number, str(self._remote), sent=0, copied=0, seconds=0)
            self._remote.point_at(names[number], max(names), self._best)

    def _push_one(self, number: int) -> None:
        try:
            found = self._run.open(number)
        except CheckpointNotFound:
            # Pruned in the meantime.
            return
        except CheckpointDamaged as exc:
            self._refuse(number, exc)
            return
        started = time.perf_counter()
        what = f"pushing checkpoint {number}"
        try:
            with self._progress.moving(what, found.about.size) as moved:
                sent = self._remote.push(found, moved)
        except CheckpointDamaged as exc:
            self._refuse(number, exc)
            return
        assert self._there is not None
        self._there.add(number)
        seconds = time.perf_counter() - started
        gone: list[int] = []
        try:
            gone = self._tidy(found.path.name, number)
        except ResumableError as exc:
            self._tell(f"{exc.problem} The checkpoints that are there are complete.", "tidying")
        self._note(number, sent, seconds, gone)

    def _refuse(self, number: int, error: CheckpointDamaged) -> None:
        self._refused.add(number)
        self._tell(f"{error.problem} It is not pushed to {self._remote}.", f"pushing {number}")

    def _tidy(self, name: str, number: int) -> list[int]:
        assert self._there is not None
        newest = max(self._there)
        self._remote.point_at(name, newest, self._best)
        gone = self._remote.prune(self._keep, self._goal, [number, newest, self._best])
        self._there -= {*gone}
        # Else two of them, of which the remote keeps neither, would take each other's place for ever.
        self._pruned |= {*gone}
        return gone

    def _note(self, number: int, sent: Sent, seconds: float, gone: Sequence[int]) -> None:
        self._history.pushed(
            number, str(self._remote), sent=sent.sent, copied=sent.copied, seconds=seconds, removed=gone
        )
        if not self._progress.is_shown():
            self._progress.print(told(f"pushed checkpoint {number} to {self._remote}", sum(sent), seconds))


def _text(error: Exception) -> str:
    return error.problem if isinstance(error, ResumableError) else f"{type(error).__name__}: {error}"


def _is_final(error: Exception) -> bool:
    # (another process that pushes this run will have ended one day)
    return isinstance(error, ResumableError) and getattr(error, "is_final", not isinstance(error, RunInUse))


def told(what: str, size: int, seconds: float) -> str:
    """Return the line that tells of a transfer.

    >>> told("pushed checkpoint 41 to s3://bucket/exp", 1_400_000_000, 12.1)
    'pushed checkpoint 41 to s3://bucket/exp: 1.4 GB in 12 s (116 MB/s)'
    """
    return f"{what}: {bytes_of(size)} in {duration(seconds)} ({bytes_of(size / max(seconds, 1e-3))}/s)"


LOCK = ".push.lock"
"""Held by the one process that pushes a run."""

# Python's own generator is the training's: a draw here would give it other numbers.
_DICE = random.SystemRandom()
_FIRST_DELAY = 1.0
_LONGEST_DELAY = 120.0
_CLOSING_DELAY = 2.0
_MOST_PINNED = 4
_MOST_NAMED = 5
_TO_LEAVE = 5.0
_A_LONG_WAIT = 3.0
