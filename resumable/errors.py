"""Every error and warning of the library, each built with what to do about it.

ResumableError
 ├── UsageError            (ValueError)          an argument or a call that cannot be meant
 ├── NotARun               (NotADirectoryError)  the run directory is something else
 ├── RunInUse              (BlockingIOError)     another process is writing this run
 ├── RunExists             (FileExistsError)     a new run was asked for where one already is
 ├── CheckpointNotFound    (FileNotFoundError)   nothing there to go on from
 ├── CheckpointDamaged     (ValueError)          the bytes are not the ones that were written
 ├── CheckpointNotExpected (ValueError)          the content is not the one that expect= names
 ├── CannotRead            (OSError)             a file is there, but this process may not or cannot read it
 ├── FormatTooNew          (ValueError)          written by a newer version of this library
 ├── StateMismatch         (ValueError)          the checkpoint and the live objects do not fit
 ├── CannotStore           (TypeError)           a value that has no place in a checkpoint
 ├── Unsupported           (NotImplementedError) something that would silently be inexact
 ├── RanksDiffer           (ValueError)          the processes of a training do not agree
 ├── RankLost              (TimeoutError)        one of the processes has ended, is stopped or late
 ├── Preempted             (InterruptedError)    a signal or the time has ended the loop; all is saved
 ├── SaveFailed            (OSError)             a checkpoint could not be written
 ├── RemoteError           (OSError)             a remote cannot be reached, or does not do what it should
 └── Diverged              (ArithmeticError)     the loss spikes whatever checkpoint it goes on from

ResumableWarning          (UserWarning)         said at most once a run
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from types import FrameType
from typing import Any


class ResumableError(Exception):
    """What every error of this library is.

    ``fix`` says what to do; the message ends with it.

    >>> try:
    ...     raise ResumableError("the disk is on fire.", fix="leave the room")
    ... except ResumableError as error:
    ...     print(error)
    the disk is on fire.
    Fix: leave the room
    """

    fix: str

    def __init__(self, problem: str, *, fix: str) -> None:
        # It may quote a file that somebody else made, and a terminal would obey what stands there.
        problem, fix = printable(problem), printable(fix)
        # The builtin twins (OSError, ...) keep `args`, so the text is built once, here.
        super().__init__(f"{problem}\nFix: {fix}")
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.problem}\nFix: {self.fix}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes send each other their errors, and `args` alone cannot make this one again.
        return partial(type(self), fix=self.fix), (self.problem,), self.__dict__


class UsageError(ResumableError, ValueError):
    """An argument or a call that cannot be meant.

    Correct the line that is named. Nothing was touched: arguments are checked together, before anything is
    read or written.
    """


class NotARun(ResumableError, NotADirectoryError):
    """The run directory is a file, or is not this library's.

    Give the directory of a run, or one that is empty or does not exist yet.
    """


class RunInUse(ResumableError, BlockingIOError):
    """Another process is writing this run.

    Wait for it, or end it; the message says which it is. The lock goes with its process, whatever ends
    that: there is no file to delete.
    """


class RunExists(ResumableError, FileExistsError):
    """A new run was asked for in a directory that already holds one.

    Give a new directory, or leave out ``resume="never"`` to go on with the run that is there.
    """


class CheckpointNotFound(ResumableError, FileNotFoundError):
    """There is nothing to go on from.

    ``resumable ls`` tells what is there; ``resume="auto"`` starts fresh where nothing is.
    """


class CheckpointDamaged(ResumableError, ValueError):
    """The bytes on disk are not the ones that were written.

    Asked for the newest, a training goes on from the one before it by itself, with a warning; this error
    means that a certain one was asked for, or that none is intact. ``resumable verify RUN --all`` reads all
    of them.
    """


class CheckpointNotExpected(ResumableError, ValueError):
    """The content is not the one that `expect` names, whoever may have changed it.

    Find out who has changed it. No older one is used in its place.
    """


class CannotRead(ResumableError, OSError):
    """A file is there, but this process may not or cannot read it now.

    Mend the permission, the mount or the limit, and start again. Nothing says that the checkpoint is
    damaged, so no older one is used in its place.
    """


class FormatTooNew(ResumableError, ValueError):
    """The checkpoint was written by a newer version of this library.

    Upgrade, or go on with the version that wrote it.
    """


class StateMismatch(ResumableError, ValueError):
    """The checkpoint and the live objects do not fit each other.

    Make the objects as they were, or allow by name what has changed on purpose: ``allow=["model.head.*"]``.
    All objects are as they were before the call.
    """


class CannotStore(ResumableError, TypeError):
    """A value that has no place in a checkpoint; the message names its path.

    Give plain values, tensors, or an object with ``state_dict`` and ``load_state_dict``. It comes at the
    first save, and nothing was written.
    """


class Unsupported(ResumableError, NotImplementedError):
    """Something that this version could only do inexactly, so it refuses.

    Do what the message says instead; nothing is done halfway.
    """


class RanksDiffer(ResumableError, ValueError):
    """The processes of one training stand at different places, or were made differently.

    Do the same on every rank: the same parts, and ``save()`` at the same place, not under ``if rank ==
    0:``. To start again does not mend it.
    """


class RankLost(ResumableError, TimeoutError):
    """One of the processes of a training has ended, is stopped, or did not come in time.

    See what the others said last, and start again; torchrun does that by itself. If one is only busy for
    long, make ``timeout=`` longer.
    """


class Preempted(ResumableError, InterruptedError):
    """A signal, or the time that was given, has ended the loop; everything is saved.

    Only with ``on_preempt="raise"``; otherwise the process exits with that code. Start the same command
    again.

    ``signal`` is the one that came; ``128 + error.signal`` is the exit code that says so.
    """

    signal: int

    def __init__(self, problem: str, *, fix: str, signal: int = 15) -> None:
        super().__init__(problem, fix=fix)
        self.signal = signal


class SaveFailed(ResumableError, OSError):
    """A checkpoint could not be written; the ones before it are untouched.

    Make room, or mend the disk. A training that catches it can go on and save again.
    """


class RemoteError(ResumableError, OSError):
    """A remote cannot be reached, refuses, or holds what it should not; local checkpoints are untouched.

    The training goes on without it, and tries again until it works: look at the address, the credentials
    and the room there. ``resumable push`` sends what is missing.

    ``is_final``: trying again makes no sense until somebody has done something.
    """

    is_final = True


class Diverged(ResumableError, ArithmeticError):
    """The loss spikes again and again, or there is no checkpoint to go back to.

    Change what makes it spike (a lower learning rate, other data) and go on from a checkpoint that was good:
    ``resume=NUMBER``.
    """


def printable(text: str, but: str = "\n") -> str:
    """Return text as a terminal can show it: what would move the cursor, or cannot be printed, is escaped.

    >>> printable("acc\\x1b[2J"), printable("up\\u202enwod")
    ('acc\\\\x1b[2J', 'up\\\\u202enwod')
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in but else ascii(one)[1:-1] for one in text)


def to_json(error: ResumableError) -> dict[str, str]:
    """Return what makes the same error again in another process.

    >>> from_json(to_json(SaveFailed("the disk is full.", fix="make room")))
    SaveFailed('the disk is full.\\nFix: make room')
    """
    kinds = _kinds(ResumableError)
    kind = next(kind.__name__ for kind in type(error).mro() if kind.__name__ in kinds)
    return {"kind": kind, "problem": error.problem, "fix": error.fix}


def from_json(told: dict[str, str]) -> ResumableError:
    """Return the error that another process met."""
    return _kinds(ResumableError)[told["kind"]](told["problem"], fix=told["fix"])


def _kinds(kind: type[ResumableError]) -> dict[str, type[ResumableError]]:
    found = {kind.__name__: kind}
    for narrower in kind.__subclasses__():
        found |= _kinds(narrower)
    return found


class ResumableWarning(UserWarning):
    """What every warning of this library is."""


def _top(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def warn(text: str) -> None:
    """Warn at the line of the script that called the library, not at one of ours or of torch's."""
    text = printable(text)
    level, frame = 2, sys._getframe(1)
    while frame.f_back and _top(frame) in (__package__, "torch"):
        level, frame = level + 1, frame.f_back
    if frame.f_globals.get("__name__") in ("threading", "weakref"):
        # In the background, or when the process ends: no line of the script has called.
        warnings.warn_explicit(text, ResumableWarning, sys.argv[0] or "resumable", 0)
        return
    warnings.warn(text, ResumableWarning, stacklevel=level)


class Once:
    """Warns of each thing once."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def warn(self, text: str, about: str | None = None) -> None:
        """Warn, unless this text, or something `about` the same, was told before."""
        if (about or text) not in self._told:
            self._told.add(about or text)
            warn(text)
