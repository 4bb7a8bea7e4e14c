"""All errors and warnings of the library, each with a fix.

ResumableError
 ├── UsageError            (ValueError)          an argument or a call is invalid
 ├── NotARun               (NotADirectoryError)  the path is not a run directory
 ├── RunInUse              (BlockingIOError)     another process is writing this run
 ├── RunExists             (FileExistsError)     a new run was requested in a directory with a run
 ├── CheckpointNotFound    (FileNotFoundError)   no checkpoint to load
 ├── CheckpointDamaged     (ValueError)          the bytes differ from those written
 ├── CheckpointNotExpected (ValueError)          the content differs from expect=
 ├── CannotRead            (OSError)             a file exists, but this process cannot read it
 ├── FormatTooNew          (ValueError)          written by a newer version of this library
 ├── StateMismatch         (ValueError)          the checkpoint and the live objects do not match
 ├── CannotStore           (TypeError)           a checkpoint cannot store a value
 ├── Unsupported           (NotImplementedError) the result would silently be inexact
 ├── RanksDiffer           (ValueError)          the processes of a training do not agree
 ├── RankLost              (TimeoutError)        a process has ended, is stopped or is late
 ├── Preempted             (InterruptedError)    a signal or the time limit ended the loop; all is saved
 ├── SaveFailed            (OSError)             a checkpoint could not be written
 ├── RemoteError           (OSError)             a remote is unreachable or fails
 └── Diverged              (ArithmeticError)     the loss spikes repeatedly

ResumableWarning          (UserWarning)         issued at most once a run

Where a resume may not be exact, the warning has a number, and this is what to do and when it comes:

R01 | `save()` in a loop inside of a body: a resume leaves out what is left of that loop. Call `save()`
      behind it. | at the first such save
R02 | A `break` or `return` behind `save()` in the same body, as in early stopping: a resume from that
      checkpoint trains on. Decide at the top of a body, by a variable that was set before, or by
      `state.patience()`. | at the first such save, or as the loop is left
R03 | What changes behind `save()` in the same body. Call `save()` last. | at the next save
R04 | `save()` in the body of `epochs()` before its last step, or between the loops over two loaders: it
      means that the epoch is finished. | at the save, or at the next step
R05 | A loop over `epochs()` or `steps()` that is left by a `break`, with another such loop after it: a
      resume in the second enters the first again. Note in a variable which of them is due. | as the second
      begins
R06 | Batches that are asked for before the training wants them: by a generator or a thread (give it to
      `through=`), by `list(state.batches())`. | at the second batch, or at the epoch's end
R07 | `itertools.islice`, `itertools.cycle`, or `zip` with a range, around `state.batches()`, or `next()` on
      it in a `for` loop that counts: after a resume they begin again. Write `if state.batch >= n: break`,
      or, in place of `cycle`, [a generator](data.md#a-loader-that-goes-on-from-epoch-to-epoch). | at the
      first batch
R08 | Random numbers that are drawn between `RunState.load` and the first loop, or in a loop of your own
      before it reads a counter or asks for a batch by `next()`: a resume puts the generators back at
      another moment. Loop over `epochs()`, `steps()` or `batches()`, and set seeds before the load. | at
      the save, or as the loop continues
R09 | An iterator over a second loader's batches that goes on from epoch to epoch, and no loop over
      `state.epochs()`: a resume from a checkpoint of the first epoch's end begins its pass again. | at a
      save in the second epoch
R10 | `save()` where a batch was drawn and is not trained: after an exception has left the loop, or behind
      the first batch of a stream without workers. | at the save
R11 | Variables of the script [that cannot come back](what-comes-back.md#what-cannot-come-back). | at the
      first save after it shows, by name
R12 | A variable that was renamed or moved, or is something else now. | at the resume, by name
R13 | A gradient scaler, or an optimizer inside of another, that the checkpoint lacks: it begins as the script
      makes it. | at the load
R14 | Gradients that are kept after a step, for the next one: checkpoints saved before this was seen lack
      them. `zero_grad(set_to_none=False)` before the loop, which zeroes those of a window that a resume
      continues. | at the next backward pass, or as the loop continues
R15 | What grows after it was given. With another group of parameters, module or persistent buffer, or more
      items of a dataset in mid-epoch, a resume is refused; items added between epochs, which are in no
      part, it does without. | at the first save after it, and at the resume
R16 | A tensor in `extra=` or `state.vars` that shares memory with what a resume makes again, and comes back
      as a copy. Save the whole tensor, or a clone. | at the save, by name
R17 | A CUDA graph that captures an optimizer's step, with a scheduler and a learning rate that is a number
      or a tensor on the CPU: a resume captures the rate of that moment. Use one on the GPU,
      `lr=torch.tensor(1e-3, device="cuda")`. | at the capture
R18 | Dropout in `nn.LSTM`, `nn.GRU` or `nn.RNN` on cuDNN, whose state cannot be read. Set
      `torch.backends.cudnn.enabled = False`, or `dropout=0`. | at the load
R19 | A write to a few elements of a parameter, through `.data` or NumPy, while it is copied after `save()`
      ([what a save costs](autosave.md#what-a-save-costs)): most are found, and that checkpoint is not made.
      | at the next save
R20 | A training loop over a `DataLoader` itself, given or not. Give it, and loop over `state.batches()`. |
      at a save in the middle of its pass
R21 | `persistent_workers=True` of a `DataLoader` that was not given and was begun before the load, or looks
      like another. Give it a `generator=` of its own. | as it is looped over
R22 | What a dataset or a `collate_fn` without `state_dict` keeps from batch to batch in a worker: a count,
      a running mean. Caches, what is larger than 1 MB, and objects of libraries are left out. | at the
      first save after two of the worker's batches; of a stream in persistent workers, in its second epoch
R23 | Generators out of reach: more than 256 in one container, OpenCV's (`cv2.randu`, `randn`,
      `randShuffle`), one that is gone as a worker begins. | at the load
R24 | Data that no two runs get alike: `in_order=False` (every sample comes once); `drop_last=True` and
      `persistent_workers=True` over a Hugging Face `IterableDataset` whose workers draw; a
      [WebDataset](../integrations/loaders.md#webdataset) with `resampled=True`, or whose `shuffle()` has no
      seed; a MosaicML `StreamingDataset` in another loader than a `StreamingDataLoader`. | at the load
R25 | Threads that draw: a plain iterable as `loader=` that starts some (give what loads ahead to
      `through=`), or `map()` before `shuffle()` in a Hugging Face `IterableDataset`. | at the load, or at
      the first batch
R26 | A stream without `state_dict` that keeps what it draws (a shuffle buffer, more than 32 batches of a
      plain iterable), from a generator that the training draws from too. Give it one of its own. | as the
      loop continues
R27 | `state_dict()` of a given `StatefulDataLoader`, called by the script: it begins a pass of its own and
      draws a seed. | at the next save
R28 | Fewer devices or processes than before, other windows of gradient accumulation, or another set-up of
      `DistributedDataParallel`. | at the load
"""

from __future__ import annotations

import difflib
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any


class ResumableError(Exception):
    """Base class of all errors of this library.

    ``fix`` says what to do; the message ends with it.

    >>> try:
    ...     raise ResumableError("the disk is on fire.", fix="leave the room")
    ... except ResumableError as error:
    ...     print(error)
    the disk is on fire.
    Fix: leave the room
    """

    fix: str
    command: str
    """What to do on the command line, where arguments of Python are of no use; usually the same."""

    def __init__(self, problem: str, *, fix: str, command: str | None = None) -> None:
        # A message may quote a file from someone else; a terminal would obey its escape sequences.
        problem, fix = printable(problem), printable(fix)
        # The builtin twins (OSError, ...) keep `args`, so the text is built once, here.
        super().__init__(f"{problem}\nFix: {fix}")
        self.problem = problem
        self.fix = fix
        self.command = fix if command is None else printable(command)

    def __str__(self) -> str:
        return f"{self.problem}\nFix: {self.fix}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes send each other their errors; `args` alone cannot rebuild this one.
        return partial(type(self), fix=self.fix), (self.problem,), self.__dict__


class UsageError(ResumableError, ValueError):
    """An argument or a call is invalid.

    Correct the named line. Nothing was read or written: all arguments are checked first.
    """


class NotARun(ResumableError, NotADirectoryError):
    """The run directory is a file, or does not belong to this library.

    Give the directory of a run, or one that is empty or does not exist yet.
    """


class RunInUse(ResumableError, BlockingIOError):
    """Another process is writing this run.

    Wait for that process, or end it; the message names it. Its lock ends with it: there is no file to
    delete.
    """


class RunExists(ResumableError, FileExistsError):
    """A new run was requested in a directory that already contains one.

    Give a new directory, or leave out ``resume="never"`` to resume the existing run.
    """


class CheckpointNotFound(ResumableError, FileNotFoundError):
    """There is no checkpoint to load.

    List the checkpoints with ``resumable ls``. ``resume="auto"`` starts fresh if there is none.
    """


class CheckpointDamaged(ResumableError, ValueError):
    """The bytes on disk differ from those that were written.

    Choose another checkpoint; ``resumable verify RUN --all`` shows which are intact. A training that asks
    for the newest uses the one before it, with a warning. This error means that you requested a specific
    one, or that none is intact.
    """


class CheckpointNotExpected(ResumableError, ValueError):
    """The content differs from the one that `expect` names.

    Find out who has changed it. No older checkpoint is used in its place.
    """


class CannotRead(ResumableError, OSError):
    """A file exists, but this process cannot read it.

    Fix the permission, the mount or the limit, and start again. The checkpoint may well be intact, so no
    older one is used in its place.
    """


class FormatTooNew(ResumableError, ValueError):
    """The checkpoint was written by a newer version of this library.

    Upgrade, or use the version that wrote it.
    """


class StateMismatch(ResumableError, ValueError):
    """The checkpoint and the live objects do not match.

    Create the objects as they were, or name intended changes: ``allow=["model.head.*"]``. The call has
    changed no object.
    """


class CannotStore(ResumableError, TypeError):
    """A checkpoint cannot store a value; the message names its path.

    Give plain values, tensors, or an object with ``state_dict`` and ``load_state_dict``. The first save
    raises this error, and writes nothing.
    """


class Unsupported(ResumableError, NotImplementedError):
    """This version could only do the operation inexactly, so it refuses.

    Use the alternative that the message names. Nothing is done halfway.
    """


class RanksDiffer(ResumableError, ValueError):
    """The processes of a training are at different positions, or have different parts.

    Do the same on every rank: the same parts, and ``save()`` at the same place, not under ``if rank ==
    0:``. A restart does not help.
    """


class RankLost(ResumableError, TimeoutError):
    """A process of a training has ended, is stopped, or exceeded the timeout.

    Read the last output of the processes and start again; torchrun restarts automatically. If a process is
    just busy for a long time, raise ``Ranks(timeout=...)``.
    """


class Preempted(ResumableError, InterruptedError):
    """A signal or the time limit has ended the loop; everything is saved.

    Start the same command again. Raised only with ``Preempt(on_preempt="raise")``; otherwise the process
    exits.

    ``signal`` is the signal received; ``128 + error.signal`` is the exit code for it.
    """

    signal: int

    def __init__(self, problem: str, *, fix: str, signal: int = 15) -> None:
        super().__init__(problem, fix=fix)
        self.signal = signal


class SaveFailed(ResumableError, OSError):
    """A checkpoint could not be written; the ones before it are untouched.

    Make room, or repair the disk. A training that catches this error can continue and save again.
    """


class RemoteError(ResumableError, OSError):
    """A remote is unreachable, refuses access, or has unexpected content; local checkpoints are untouched.

    Check the address, the credentials and the free space. The training continues and retries;
    ``resumable push`` sends missing checkpoints.

    ``is_final``: a retry cannot succeed until someone fixes the cause.
    """

    is_final = True


class Diverged(ResumableError, ArithmeticError):
    """The loss spikes repeatedly, or there is no checkpoint to go back to.

    Remove the cause (a lower learning rate, other data) and resume from a good checkpoint:
    ``resume=NUMBER``.
    """


def printable(text: str, but: str = "\n") -> str:
    """Return the text with unprintable characters and cursor movements escaped.

    >>> printable("acc\\x1b[2J"), printable("up\\u202enwod")
    ('acc\\\\x1b[2J', 'up\\\\u202enwod')
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in but else ascii(one)[1:-1] for one in text)


def did_you_mean(word: object, known: Iterable[str], shown: Callable[[str], str] = repr) -> str:
    """Return the end of a message that names the known word most like this one; "" if none is like it.

    >>> did_you_mean("bset", ["auto", "best"]), did_you_mean("latest", ["best", "newest"])
    (" Did you mean 'best'?", " Did you mean 'newest'?")
    >>> did_you_mean("loss", ["val_acc"])
    ''
    """
    by_letters = {_letters(one): one for one in known}
    if not isinstance(word, str) or not by_letters:
        return ""
    wanted = _letters(word)
    same = by_letters.get(_SYNONYMS.get(wanted, wanted))
    near = difflib.get_close_matches(wanted, by_letters, n=1, cutoff=0.7)
    meant = same or (by_letters[near[0]] if near else None)
    return f" Did you mean {shown(meant)}?" if meant else ""


def _letters(word: str) -> str:
    return "".join(filter(str.isalnum, word)).casefold()


_SYNONYMS = {"latest": "newest", "last": "newest"}


def to_json(error: ResumableError) -> dict[str, str]:
    """Return the error as a dict, from which another process can rebuild it.

    >>> from_json(to_json(SaveFailed("the disk is full.", fix="make room")))
    SaveFailed('the disk is full.\\nFix: make room')
    """
    kinds = _kinds(ResumableError)
    kind = next(kind.__name__ for kind in type(error).mro() if kind.__name__ in kinds)
    return {"kind": kind, "problem": error.problem, "fix": error.fix}


def from_json(told: dict[str, str]) -> ResumableError:
    """Return the error of another process."""
    return _kinds(ResumableError)[told["kind"]](told["problem"], fix=told["fix"])


def _kinds(kind: type[ResumableError]) -> dict[str, type[ResumableError]]:
    found = {kind.__name__: kind}
    for narrower in kind.__subclasses__():
        found |= _kinds(narrower)
    return found


class ResumableWarning(UserWarning):
    """Category of all warnings of this library."""


def _top(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def warn(text: str) -> None:
    """Warn at the line of the script that called the library; a number, [R07], gets its place in the docs."""
    text = re.sub(r"\[R(\d\d)\]", r"[R\1, docs/guide/inexact.md#r\1]", printable(text))
    # First of all: a filter may silence the warning, or make an error of it.
    for one in [*_all]:
        one.issued.setdefault(text)
    level, frame = 2, sys._getframe(1)
    while frame.f_back and _top(frame) in (__package__, "torch", "contextlib"):
        level, frame = level + 1, frame.f_back
    if frame.f_globals.get("__name__") in ("threading", "weakref"):
        # In a background thread or at exit, no line of the script is on the stack.
        warnings.warn_explicit(text, ResumableWarning, sys.argv[0] or "resumable", 0)
        return
    warnings.warn(text, ResumableWarning, stacklevel=level)


class Once:
    """Issues each warning once; `issued` has the texts of all of this process since it was made."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self.issued: dict[str, None] = {}
        _all.add(self)

    def has_told(self, about: str) -> bool:
        """Whether there was a warning about this."""
        return about in self._told

    def warn(self, text: str, about: str | None = None) -> None:
        """Warn, unless this text or this `about` has already been used."""
        if (about or text) not in self._told:
            self._told.add(about or text)
            warn(text)

    def warn_of(self, texts: Iterable[str]) -> None:
        """Warn of each text that has not been used."""
        for text in texts:
            self.warn(text)


_all: weakref.WeakSet[Once] = weakref.WeakSet()
