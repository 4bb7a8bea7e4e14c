"""System calls that fail, in real processes: each failure is reported, and no checkpoint is lost by it."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import injection
import pytest
from counted import Tally
from injection import Child, Fault, needs_strace  # noqa: F401 (a fixture)
from tiny import (
    Training,
    assert_all_verify,
    assert_goes_on,
    debris,
    fresh,
    load,
    save_next,
    uninterrupted,
    what_differs,
)

from resumable import ResumableError, ResumableWarning, RunState, SaveFailed
from resumable.files import block_queue, large_files
from resumable.run import environment

pytestmark = [pytest.mark.proves("durable"), pytest.mark.usefixtures("needs_strace", "small_blocks")]

FULL = ("ENOSPC", "EDQUOT")
WRITES: dict[str, tuple[str, ...]] = {
    "pwrite64": ("EIO", *FULL),
    "write": ("EIO", *FULL),
    "fallocate": (*FULL, "EIO"),
    "ftruncate": ("EIO", *FULL),
    "fsync": ("EIO", *FULL),
    "fdatasync": ("EIO", *FULL),
    "openat": ("EMFILE", "EACCES", "EIO", "ENOSPC", "EROFS", "EDQUOT", "ENFILE", "ENOMEM", "ESTALE"),
    "mkdir": ("ENOSPC", "EROFS", "EACCES", "EIO", "EDQUOT"),
    "rename": ("EIO", "ENOSPC", "EROFS", "EACCES", "EDQUOT"),
    "symlink": ("ENOSPC", "EPERM", "EIO"),
    "link": ("EMLINK", "EPERM", "EXDEV", "EIO"),
    "unlink": ("EIO", "EROFS", "EACCES"),
    "rmdir": ("EIO", "EROFS", "EACCES"),
}
"""What a save changes a disk by, and what it may be answered."""
READS: dict[str, tuple[str, ...]] = {
    "read": ("EIO", "ENOMEM", "ESTALE"),
    "pread64": ("EIO", "ENOMEM", "ESTALE"),
    "preadv": ("EIO", "ENOMEM"),
    "getdents64": ("EIO", "ESTALE"),
    "newfstatat": ("EIO", "EACCES", "ESTALE"),
}
CALLS = {**WRITES, **READS}
FILLS = ("pwrite64", "write", "fallocate")
"""What takes room: each of these meets every error, once, in every run."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files of a small model have room that is reserved, and links."""
    monkeypatch.setattr(large_files, "_PREALLOCATE", 1)
    monkeypatch.setattr(large_files, "_WORTH_A_LINK", 0)
    monkeypatch.setattr(block_queue, "_WRITERS", 1)
    # Once a process, by a process of its own, git is asked.
    environment.attempt()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if there is one: what fails here is not the disk."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path)


def _prepare(folder: Path, steps: int = 2) -> Path:
    for loss in (1.0, 5.0)[:steps]:
        training, state = load(folder / "run" / "exp")
        with state:
            save_next(training, state, loss)
    return folder / "run"


def _told(training: Training, state: RunState) -> tuple[str, str]:
    """Save, and return how a failure was reported."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            save_next(training, state, 0.5)
        except SaveFailed as error:
            return "raised", str(error)
        except Exception as error:
            return f"escaped: {error!r}", injection.frames(error)
    assert all(issubclass(warning.category, ResumableWarning) for warning in warned), warned
    return "warned" if warned else "fine", "\n".join(str(warning.message) for warning in warned)


def _save(child: Child, run_dir: Path) -> None:
    """Save while the calls fail, and once more when they do not."""
    training, state = load(run_dir)
    before = injection.open_files()
    child.tell("ready")
    told = _told(training, state)
    child.tell(told)
    numbers = state.run.numbers()
    assert_all_verify(state.run)
    save_next(training, state, 0.1)
    leaked = injection.open_files() - before
    state.close()
    child.tell([numbers, state.step, [*leaked, *(path.name for path in debris(run_dir))]])


class Outcome(NamedTuple):
    """What came of one faulty save."""

    run_dir: Path
    lines: list[injection.Line]
    told: str
    text: str
    numbers: list[int]
    """What was there when it had been told, and the calls did not fail any more."""
    step: int
    leaked: list[str]
    """Files that it has still open, and what it has left in the run."""

    def hit(self) -> list[injection.Line]:
        """Return the calls about this run that failed."""
        return [line for line in self.lines if line.is_injected and str(self.run_dir) in line.text]


def _with(folder: Path, fault: Fault | None, body: Callable[[Child, Path], None] = _save) -> Outcome:
    name = str(fault).replace(":", "-") if fault else "whole"
    run_dir = shutil.copytree(folder / "run", folder / name, symlinks=True) / "exp"
    log = folder / f"{name}.log"
    calls = {"fsync", "fdatasync", "rename", fault.call} if fault else CALLS
    with Child(lambda child: body(child, run_dir)) as child:
        assert child.heard() == "ready"
        with injection.attached(child.pid, log, [*calls], fault):
            child.go()
            told = child.heard()
        child.go()
        after = child.heard()
        return Outcome(run_dir, injection.lines(log), *told, *after)


def _problems(fault: Fault, found: Outcome) -> Iterator[str]:
    """Yield what is wrong with what came of a fault."""
    if found.told.startswith("escaped"):
        yield f"{found.told}\n{found.text}"
    if found.told == "fine" and fault.error != "EINTR" and not _does_no_harm(found):
        yield "nothing was told"
    if found.told == "raised":
        cause = os.strerror(getattr(errno, fault.error))
        for word in (str(found.run_dir), cause, "\nFix: ", *(["make room"] if fault.error in FULL else [])):
            if word not in found.text:
                yield f"the error does not say {word!r}: {found.text}"
    if not {1, 2} <= {*found.numbers} and found.told == "raised":
        yield f"checkpoints have gone: {found.numbers} are left"
    if 3 not in found.numbers and found.told in ("fine", "warned"):
        yield f"told to be durable, and not there: {found.numbers} are"
    # What cannot be removed waits for the next start,
    # and what may still have its old name after a power cut must stay whole
    cannot_tidy = fault.persists or fault.call in ("unlink", "rmdir", "openat", *READS)
    waits = (".",) if cannot_tidy else (".trash-",) if fault.call == "fsync" else ()
    if leaked := [name for name in found.leaked if not name.startswith(waits)]:
        yield f"left behind: {leaked}"
    yield from _flushed_again(found.lines)


def _does_no_harm(found: Outcome) -> bool:
    """Whether a save can do without what failed: a link instead of a copy, room ahead of time, a look."""
    return all(
        line.call in ("link", *READS) or ("O_RDONLY" in line.text and _FLUSHED not in line.text)
        for line in found.hit()
    )


_FLUSHED = "O_RDONLY|O_CLOEXEC|O_DIRECTORY"  # what a folder is opened with to be flushed


def _flushed_again(lines: list[injection.Line]) -> Iterator[str]:
    """Yield what was flushed again, or published, after its flush had failed: that would report a success."""
    failed: set[str] = set()
    for line in lines:
        path = injection.path_of(line)
        if line.call == "fsync" and "/.stage-" in path:
            if path in failed:
                yield f"flushed again: {path}"
            if " = -1 " in line.text:
                failed.add(path)
        if line.call == "rename" and any(path.startswith(line.text.split('"')[1]) for path in failed):
            yield f"published after a failed flush: {line.text}"


def _ordinals(folder: Path, body: Callable[[Child, Path], None] = _save) -> dict[str, int]:
    whole = _with(folder, None, body)
    assert (whole.told, whole.text) == ("fine", "")
    return injection.counts(whole.lines, whole.run_dir)


def _faults(most: dict[str, int], times: int, strides: Sequence[int]) -> Iterator[Fault]:
    """Yield a fault for each call, once and for good, with each error.

    Or with one error after the other, and of those that change a disk, and of those that read, every so many
    (an odd number, lest all are of one kind).
    """
    for calls, stride in zip((WRITES, READS), strides, strict=True):
        for call, errors in calls.items():
            turns = itertools.cycle(errors)
            modes = itertools.product(range(1, most.get(call, 0) + 1), (False, True))
            for number, persists in itertools.islice(modes, 0, None, stride // times | 1):
                chosen = errors if call in FILLS and not persists else [next(turns)]
                yield from (Fault(call, number, error, persists) for error in chosen)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(4))
def test_a_system_call_failing_in_a_save_is_told_and_costs_nothing(
    folder: Path, times: int, tally: Tally, shard: int
) -> None:
    _prepare(folder)
    faults = [*_faults(_ordinals(folder), times, strides=(1, 13))]
    count, bad = 0, []
    for fault in faults[shard::4]:
        found = _with(folder, fault)
        count += bool(found.hit())
        bad += [f"{fault}: {problem}" for problem in (*_problems(fault, found), *_goes_on(found, 4))]
        shutil.rmtree(found.run_dir.parent)
    tally("faults at system calls", count, bad)


def _goes_on(found: Outcome, step: int) -> Iterator[str]:
    try:
        assert_goes_on(found.run_dir, step)
    except (AssertionError, ResumableError) as exc:
        yield f"does not go on from step {step}: {exc!r}"


def _start(child: Child, run_dir: Path) -> None:
    """Start while the calls fail, and again when they do not, if that has failed."""
    training = fresh()
    before, there = training.digest(), injection.open_files()
    child.tell("ready")
    told, text, state = _told_of_start(training, run_dir)
    if state is None and training.digest() != before and "now hold a mixture" not in text:
        told = "escaped: what it was given is touched, and nobody is told"
    child.tell([told, text])
    if state is None:
        training, state = load(run_dir)
        assert state.step == 2
    step = state.step
    assert training.digest() == uninterrupted()[step], (
        f"put back other than saved: {what_differs(training, step)}"
    )
    save_next(training, state, 0.1)
    state.close()
    child.tell([state.run.numbers(), step, [*injection.open_files() - there]])


def _told_of_start(training: Training, run_dir: Path) -> tuple[str, str, RunState | None]:
    parts = {"model": training.model, "optimizer": training.optimizer, "extra": {"seen": training.seen}}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            state = RunState.load(run_dir, minimize="loss", keep=1, **parts)
            state._position.streams.put_back()
        except ResumableError as error:
            return "raised", str(error), None
        except Exception as error:
            return f"escaped: {error!r}", injection.frames(error), None
    return "warned" if warned else "fine", "\n".join(str(warning.message) for warning in warned), state


def _problems_of_start(fault: Fault, found: Outcome) -> Iterator[str]:
    if found.told.startswith("escaped"):
        yield f"{found.told}\n{found.text}"
    if found.step != 2 and not (found.step == 1 and "It is skipped" in found.text):
        yield f"gone on from step {found.step}, and told: {found.text}"
    if found.told == "raised" or found.step == 1:
        # A folder above it may be the one that does not answer
        is_named = any(f"{path} cannot be read" in found.text for path in found.run_dir.parents)
        if not (is_named or str(found.run_dir) in found.text):
            yield f"what was told names no path: {found.text}"
        if os.strerror(getattr(errno, fault.error)) not in found.text:
            yield f"what was told does not say why: {found.text}"
    if found.leaked:
        yield f"left open: {found.leaked}"


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shard", range(2))
def test_a_call_that_fails_at_a_start_is_reported_and_the_next_continues(
    folder: Path, times: int, tally: Tally, shard: int
) -> None:
    _prepare(folder)
    uninterrupted()
    faults = [*_faults(_ordinals(folder, _start), times, strides=(3, 3))]
    count, bad = 0, []
    for fault in faults[shard::2]:
        found = _with(folder, fault, _start)
        count += bool(found.hit())
        problems = [*_problems_of_start(fault, found), *_goes_on(found, found.step + 1)]
        bad += [f"{fault}: {problem}" for problem in problems]
        shutil.rmtree(found.run_dir.parent)
    tally("faults at system calls", count, bad)
