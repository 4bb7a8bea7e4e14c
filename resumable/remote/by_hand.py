"""Pushes and pulls checkpoints on command, of a run that no process trains or that another one trains."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from ..errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    RemoteError,
    RunInUse,
    SaveFailed,
    warn,
)
from ..files import lock
from ..progress import Progress
from ..run.checkpoint import Checkpoint
from ..run.directory import Run
from ..run.history_writer import History
from ..run.manifest import Manifest
from .pull import adopt, look, pull
from .push import LOCK, OthersDue, is_there, missing, noted, push
from .run_copy import Remote


class Transfer(NamedTuple):
    """What was done with a checkpoint; "there" and "here": it was already; "to ...": in a dry run."""

    number: int
    result: Literal["pushed", "pulled", "there", "here", "to push", "to pull", "in part", "damaged"]
    size: int | None = None
    """The bytes of its files."""
    sent: int = 0
    """The bytes that a push has sent, or would have to."""
    copied: int = 0
    """The bytes that the remote has copied from another checkpoint there."""
    seconds: float = 0.0
    problem: str | None = None


class Copying:
    """Moves checkpoints between a run and a remote, and reports each; a `dry` one only reports.

    >>> from resumable.remote.storage import Store
    >>> run = Run("runs/exp")
    >>> Copying(run, Remote(Store("memory://nobody"))).pull("newest")
    Traceback (most recent call last):
    resumable.errors.CheckpointNotFound: memory://nobody holds no checkpoint.
    Fix: check the address, and whether anything was pushed there.
    """

    def __init__(
        self,
        run: Run,
        remote: Remote,
        *,
        dry: bool = False,
        progress: Progress | None = None,
        tell: Callable[[Transfer], object] = lambda transfer: None,
    ) -> None:
        self._run = run
        self._remote = remote
        self._dry = dry
        self._progress = progress or Progress(False)
        self._tell = tell
        self._there: dict[int, str] = {}
        self._best: int | None = None

    def _each(
        self, move: Callable[[int], Transfer | None], numbers: Iterable[int], is_one_enough: bool = False
    ) -> list[Transfer]:
        done = []
        for number in numbers:
            if one := move(number):
                done.append(one)
                self._tell(one)
                if is_one_enough and one.result != "damaged":
                    break
        return done

    def push(self, which: str | int) -> list[Transfer]:
        """Push "newest" (and the best), "best", "all" or a save number; damaged checkpoints are left out."""
        about = self._newest_about()
        self._best = about.best.number if about.best else None
        newest_first = [*reversed(self._run.numbers())]
        numbers = newest_first if which in ("newest", "all") else [self._number(which)]
        with self._right_to_push(about.run_id, about.is_first_part):
            done = self._each(self._push, numbers, is_one_enough=which == "newest")
            if not done:
                # Raises: the training in progress has pruned it in the meantime.
                self._run.open(numbers[0])
            tried = {one.number for one in done}
            best = [number for number in newest_first if number == self._best and number not in tried]
            return done + self._each(self._push, best if which == "newest" else [])

    def _newest_about(self) -> Manifest:
        for number in reversed(self._run.numbers()):
            with contextlib.suppress(CheckpointDamaged, CheckpointNotFound):
                return self._run.open(number).about
        raise CheckpointDamaged(
            f"no checkpoint in {self._run} can be opened.", fix=f"look at them: resumable ls {self._run}"
        )

    def _number(self, which: str | int) -> int:
        number = self._best if which == "best" else int(which)
        if number is None or self._run.path_of(number) is None:
            what = "checkpoint that is known to be the best" if which == "best" else f"checkpoint {number}"
            raise CheckpointNotFound(
                f"there is no {what} in {self._run}.", fix=f"look at what is there: resumable ls {self._run}"
            )
        return number

    @contextlib.contextmanager
    def _right_to_push(self, run_id: str, commits: bool) -> Iterator[None]:
        if self._dry:
            self._remote.is_of(run_id)
            yield
            return
        path = self._run.path / LOCK
        try:
            held = lock.Lock(path)
        except RunInUse as exc:
            raise RunInUse(
                f"{exc.problem.rstrip('.')}, which pushes it.",
                fix="wait for it. A training that has a remote pushes for as long as it lasts.",
            ) from exc
        except OSError as exc:
            raise SaveFailed(
                f"{path} cannot be written: {exc.strerror}.",
                fix="push as the user who trains it: the file keeps two processes from pushing one run.",
            ) from exc
        try:
            self._there = self._remote.begin(run_id, commits=commits)
            yield
        finally:
            held.release()

    def _push(self, number: int) -> Transfer | None:
        try:
            return self._push_found(self._run.open(number))
        except OthersDue as exc:
            return Transfer(number, "in part", problem=exc.problem)
        except (CheckpointDamaged, FileNotFoundError, RemoteError) as exc:
            if self._run.path_of(number) is None:
                # The training in progress has pruned it in the meantime.
                return None
            if isinstance(exc, CheckpointDamaged):
                return Transfer(number, "damaged", problem=exc.problem)
            raise

    def _push_found(self, found: Checkpoint) -> Transfer:
        number, size = found.about.number, found.about.size
        lacking = missing(self._remote, found)
        if self._dry:
            return Transfer(number, "there" if lacking is None else "to push", size, sent=lacking or 0)
        done, started = Transfer(number, "there", size), time.perf_counter()
        if lacking is not None:
            with self._progress.moving(f"pushing checkpoint {number}", size) as moved:
                sent = push(self._remote, found, moved)
            done = Transfer(number, "pushed", size, *sent, time.perf_counter() - started)
        if not found.about.is_first_part:
            # The disk with the first part commits it.
            return done._replace(result="in part")
        self._there[number] = found.path.name
        self._remote.point_at(found.path.name, max(self._there), self._best)
        # A process that was killed may have pushed it without a note.
        if lacking is not None or number not in noted(self._remote, self._run):
            self._note_push(done)
        return done

    def _note_push(self, done: Transfer) -> None:
        try:
            # Only for this moment: a training must be able to start while gigabytes are pushed.
            self._run.acquire()
        except RunInUse:
            # A training writes the history.
            return
        except SaveFailed as exc:
            warn(f"{exc.problem} What is pushed is not noted in the history.")
            return
        try:
            History(self._run, by_hand=True).pushed(
                done.number, str(self._remote), sent=done.sent, copied=done.copied, seconds=done.seconds
            )
        finally:
            self._run.release()

    def pull(self, which: str | int) -> list[Transfer]:
        """Pull "newest" (the newest that is intact, and the best), "best" or a save number."""
        run_id, self._there = self._remote.whose()
        if not self._there or run_id is None:
            raise CheckpointNotFound(
                f"{self._remote} holds no checkpoint.",
                fix="check the address, and whether anything was pushed there.",
            )
        numbers = self._to_pull(which)
        with self._own_run(run_id):
            if which != "newest":
                return self._each(self._pull, numbers)
            done = self._each(self._pull_or_skip, numbers, is_one_enough=True)
            if done[-1].result == "damaged":
                raise CheckpointDamaged(
                    f"none of the {len(done)} checkpoints in {self._remote} is intact.",
                    fix="look at what the messages above name; nothing was pulled.",
                )
            # Without it the training would forget which one was the best, and how good.
            return done + self._each(self._pull_or_skip, self._best_of(done))

    def _best_of(self, done: Sequence[Transfer]) -> list[int]:
        with contextlib.suppress(CheckpointDamaged):
            best = self._remote.about(self._there[done[-1].number])[0].best
            if best and best.number in self._there and best.number not in [one.number for one in done]:
                return [best.number]
        return []

    def _to_pull(self, which: str | int) -> list[int]:
        if which == "newest":
            return sorted(self._there, reverse=True)
        number = self._remote.best(self._there) if which == "best" else int(which)
        if number is None:
            raise CheckpointNotFound(
                f"no checkpoint in {self._remote} is known to be the best.",
                fix="name one by its save number, or pull the newest.",
            )
        if number not in self._there:
            raise CheckpointNotFound(
                f"there is no checkpoint {number} in {self._remote}; there are: "
                f"{', '.join(map(str, self._there))}.",
                fix="name one of these, or pull the newest.",
            )
        return [number]

    @contextlib.contextmanager
    def _own_run(self, run_id: str) -> Iterator[None]:
        self._refuse_another(self._run.known_id(), run_id)
        if self._dry:
            yield
            return
        self._run.acquire()
        try:
            if self._run.highest() is None:
                adopt(self._run, run_id)
            # Where all manifests are damaged, only run.json tells.
            self._refuse_another(self._run.identity(run_id), run_id)
            yield
        finally:
            self._run.release()

    def _refuse_another(self, here: str | None, there: str) -> None:
        if here not in (None, there):
            raise RemoteError(
                f"{self._remote} holds another run ({there}) than {self._run} ({here}).",
                fix="pull it into a directory of its own; nothing in this one was touched.",
            )

    def _pull_or_skip(self, number: int) -> Transfer:
        try:
            return self._pull(number)
        except CheckpointDamaged as exc:
            return Transfer(number, "damaged", problem=exc.problem)

    def _pull(self, number: int) -> Transfer:
        name = self._there[number]
        if found := self._intact_here(number, name):
            return Transfer(number, "here", found.about.size)
        size, started = look(self._remote, name)[0].size, time.perf_counter()
        if self._dry:
            return Transfer(number, "to pull", size)
        with self._progress.moving(f"pulling checkpoint {number}", size) as moved:
            pull(self._remote, name, self._run, moved)
        seconds = time.perf_counter() - started
        History(self._run, by_hand=True).pulled(number, str(self._remote), size=size, seconds=seconds)
        self._point()
        return Transfer(number, "pulled", size, seconds=seconds)

    def _intact_here(self, number: int, name: str) -> Checkpoint | None:
        path = self._run.path_of(number)
        if path is None:
            return None
        if path.name == name:
            try:
                found = self._run.open(number)
                found.verify()
            except CheckpointDamaged as exc:
                warn(f"{exc.problem} It is taken from {self._remote}.")
                return None
            if self._is_as_there(found):
                return None if found.about.elsewhere else found
        raise RemoteError(
            f"{self._remote} has another checkpoint {number} than {self._run}, from a training that "
            "continued elsewhere.",
            fix="pull it into a directory of its own; nothing in this one was touched.",
        )

    def _is_as_there(self, found: Checkpoint) -> bool:
        try:
            return is_there(self._remote, found, found.path.name, commits=not found.about.elsewhere)
        except CheckpointDamaged:
            # The one here is better.
            return True

    def _point(self) -> None:
        newest = self._newest_about()
        self._run.point("newest", self._run.path_of(newest.number))
        if newest.best:
            self._run.point("best", self._run.path_of(newest.best.number))
