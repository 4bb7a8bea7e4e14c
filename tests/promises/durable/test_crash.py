"""A save that is killed, or refused by the disk, at any call leaves a run that continues exactly."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tiny import DEBRIS, Training, assert_all_verify, assert_goes_on, debris, load, save_next

from resumable import ResumableWarning, RunState, SaveFailed
from resumable.files import block_queue, large_files
from resumable.files.large_files import Way
from resumable.run import environment

CALLS = (
    "open",
    "write",
    "pwrite",
    "posix_fallocate",
    "link",
    "fsync",
    "close",
    "mkdir",
    "rename",
    "replace",
    "symlink",
    "unlink",
    "rmdir",
    "ftruncate",
)
"""Everything through which the library changes a disk."""

HARMLESS = ("link", "posix_fadvise")
"""What a save can do without."""


def _only_reads(name: str, args: Sequence[Any]) -> bool:
    if name == "open":
        return _is_for_reading(args[1], os.O_CREAT)
    # Of what was only read, nothing can be lost
    return name == "close" and _is_for_reading(fcntl.fcntl(args[0], fcntl.F_GETFL), os.O_RDWR)


def _is_for_reading(flags: int, writes: int) -> bool:
    # A folder whose names are to be flushed may be a link, one whose files are to be read may not
    is_flushed = flags & os.O_DIRECTORY and not flags & os.O_NOFOLLOW
    return not (flags & writes or is_flushed)


def _set(patch: pytest.MonkeyPatch, name: str, call: Callable[..., Any]) -> None:
    """Have the library make a call of `os` through this function."""
    patch.setattr(os, name, call)
    if name == "pwrite":
        patch.setattr(large_files, "_pwrite", call)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files of a small model have several blocks, room that is reserved, and links."""
    monkeypatch.setattr(large_files, "BLOCK", 4096)
    monkeypatch.setattr(large_files, "_PREALLOCATE", 1)
    monkeypatch.setattr(large_files, "_WORTH_A_LINK", 0)
    # In more threads the calls would come in another order each time
    monkeypatch.setattr(block_queue, "_WRITERS", 1)


class Wire:
    """Tells the parent about every disk call of this process before it is made, and dies at the n-th."""

    def __init__(self, pipe: int, inside: Path, die_at: int | None, torn: bool) -> None:
        self._inside = inside
        self._pipe, self._die_at, self._torn, self._count = pipe, die_at, torn, itertools.count(1)
        self.is_tapped = False
        self._write = os.write
        for name in CALLS:
            _set(pytest.MonkeyPatch(), name, self._tap(name, getattr(os, name)))

    def tell(self, line: str) -> None:
        self._write(self._pipe, f"{line}\n".encode())

    def _is_elsewhere(self, what: Any) -> bool:
        # Torch makes folders for itself
        path = Path(what) if isinstance(what, (str, Path)) else self._inside
        return path.is_absolute() and not (
            path.is_relative_to(self._inside) or self._inside.is_relative_to(path)
        )

    def _name(self, path: Path) -> str:
        # What is above the run has another name in each copy
        is_above = path.is_absolute() and not path.is_relative_to(self._inside)
        return "above" if is_above else DEBRIS.sub(r"\1", path.name)

    def _tap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def tapped(*args: Any, **kwargs: Any) -> Any:
            if not self.is_tapped or _only_reads(name, args) or self._is_elsewhere(args[0]):
                return call(*args, **kwargs)
            number = next(self._count)
            target = "" if isinstance(args[0], int) else self._name(Path(args[0]))
            self.tell(f"{name} {target}")
            if number == self._die_at:
                if self._torn:
                    call(args[0], args[1][: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return tapped


class Scenario(NamedTuple):
    steps: int
    """Steps that are committed before."""
    loss: float
    tapped: tuple[str, ...]
    way: Way = "paced"


FIRST_SAVE = Scenario(0, 1.0, ("load", "save"))
NEW_BEST = Scenario(2, 0.5, ("save",))
OLD_BEST_STAYS = Scenario(3, 9.0, ("save",), "direct")
CLEANING = Scenario(2, 0.5, ("load",))


def _prepare(tmp_path: Path, steps: int) -> Path:
    """Return a folder with the run "exp", which has made so many steps and starts."""
    (folder := tmp_path / "runs").mkdir()
    for loss in (1.0, 5.0, 7.0)[:steps]:
        training, state = load(folder / "exp")
        with state:
            save_next(training, state, loss)
    return folder


def _copy(folder: Path, name: str) -> Path:
    return shutil.copytree(folder, folder.parent / name / "runs", symlinks=True) / "exp"


class Outcome(NamedTuple):
    calls: list[str]
    acknowledged: bool
    was_killed: bool

    @property
    def committed(self) -> bool:
        """Whether the rename that is the commit was made: something came after it."""
        renames = [i for i, call in enumerate(self.calls) if call.startswith("rename .stage-")]
        return self.acknowledged or (bool(renames) and renames[0] < len(self.calls) - 1)


def _save_in_child(
    run_dir: Path, scenario: Scenario, die_at: int | None = None, torn: bool = False
) -> Outcome:
    # Once a process, by a process of its own, git is asked: not in the one whose calls are counted.
    environment.attempt()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn of threads, of which the test runner may have some; this child uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            _child(run_dir, scenario, Wire(writer, run_dir.parent, die_at, torn))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read().splitlines()
    status = os.waitpid(child, 0)[1]
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert was_killed or status == 0
    return Outcome([line for line in said if line != "acknowledged"], "acknowledged" in said, was_killed)


def _child(run_dir: Path, scenario: Scenario, wire: Wire) -> None:
    wire.is_tapped = "load" in scenario.tapped
    training, state = load(run_dir)
    state._saving.files.ways.small = scenario.way
    wire.is_tapped = "save" in scenario.tapped
    save_next(training, state, scenario.loss)
    wire.tell("acknowledged")
    state.close()


def _kill_at_every_call(folder: Path, scenario: Scenario) -> Iterator[tuple[Outcome, Path]]:
    """Yield what each kill leaves of the run in `folder`, which then has to continue."""
    whole = _copy(folder, "whole")
    clean = _save_in_child(whole, scenario)
    for number, call in enumerate(clean.calls, 1):
        for torn in (False, True)[: 1 + call.startswith(("write", "pwrite"))]:
            run_dir = _copy(folder, f"killed-{number}-{torn}")
            outcome = _save_in_child(run_dir, scenario, number, torn)
            assert outcome.was_killed
            assert outcome.calls == clean.calls[:number]
            assert outcome.committed or not outcome.acknowledged
            yield outcome, run_dir
            assert_goes_on(run_dir, scenario.steps + outcome.committed)
    assert clean.acknowledged
    assert_goes_on(whole, scenario.steps + 1)


@pytest.mark.proves("durable")
@pytest.mark.heavy
@pytest.mark.parametrize(
    "scenario",
    [FIRST_SAVE, NEW_BEST, pytest.param(OLD_BEST_STAYS, marks=pytest.mark.nightly)],
    ids=["first", "new-best", "old-best-stays-direct"],
)
def test_a_kill_at_any_disk_call_leaves_the_newest_committed_state(
    tmp_path: Path, scenario: Scenario
) -> None:
    folder = _prepare(tmp_path, scenario.steps)

    outcomes = [outcome for outcome, _ in _kill_at_every_call(folder, scenario)]

    assert {outcome.committed for outcome in outcomes} == {False, True}
    assert {outcome.acknowledged for outcome in outcomes} == {False, True}
    made = {call.partition(" ")[0] for call in outcomes[-1].calls}
    assert made >= {"pwrite", "posix_fallocate", "fsync", "rename"}
    assert ("link" in made) == (scenario.steps > 0)


@pytest.mark.proves("durable")
@pytest.mark.heavy
def test_a_kill_while_threads_write_leaves_the_newest_committed_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_queue, "_WRITERS", 3)
    monkeypatch.setattr(large_files, "BLOCK", 512)
    folder = _prepare(tmp_path, 1)
    scenario = Scenario(1, 0.5, ("save",))
    calls = _save_in_child(_copy(folder, "whole"), scenario).calls
    assert sum(call.startswith("pwrite") for call in calls) > 20

    for number in range(2, len(calls), 7):
        run_dir = _copy(folder, f"killed-{number}")
        outcome = _save_in_child(run_dir, scenario, number)
        assert outcome.was_killed
        assert_goes_on(run_dir, 1 + outcome.committed)


@pytest.mark.proves("durable")
@pytest.mark.heavy
def test_a_kill_amid_tidying_leaves_a_run_that_the_next_start_tidies(tmp_path: Path) -> None:
    folder = _prepare(tmp_path, CLEANING.steps)
    _litter(folder)

    outcomes = [outcome for outcome, _ in _kill_at_every_call(folder, CLEANING)]

    removed = {call for call in outcomes[-1].calls if call.startswith(("unlink .", "rmdir ."))}
    assert removed == {"rmdir .stage-000003", "rmdir .trash-000001", "unlink .newest", "unlink .best"}


def _litter(folder: Path) -> None:
    """Put into the run what kills at four places of a save leave behind."""
    calls = _save_in_child(_copy(folder, "calls"), NEW_BEST).calls
    for call in ("rename .stage-000003", "replace .newest", "replace .best", "rmdir ranks"):
        killed = _copy(folder, call)
        _save_in_child(killed, NEW_BEST, calls.index(call) + 1)
        for path in debris(killed):
            path.rename(folder / "exp" / path.relative_to(killed))


def _fail(patch: pytest.MonkeyPatch, name: str, number: int, code: int = errno.ENOSPC) -> list[Any]:
    """Let the n-th call of one function of `os` fail, if it writes; the list then holds its argument."""
    call, calls, failed = getattr(os, name), itertools.count(1), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        if _only_reads(name, args) or next(calls) != number:
            return call(*args, **kwargs)
        failed.append(args[0])
        if name == "close":
            call(*args)
        raise OSError(code, os.strerror(code))

    _set(patch, name, failing)
    return failed


def _told(training: Training, state: RunState) -> str:
    """Save, and return how a failure was reported."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            save_next(training, state, 0.5)
        except SaveFailed:
            return "raised"
    assert all(issubclass(warning.category, ResumableWarning) for warning in warned)
    return "warned" if warned else "fine"


@pytest.mark.heavy
@pytest.mark.proves("durable")
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("ftruncate", *HARMLESS)])
@pytest.mark.sampled(6)
def test_a_disk_call_that_fails_is_reported_and_harms_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = _prepare(tmp_path, 2)
    told = []
    while "fine" not in told:
        run_dir = _copy(folder, f"failed-{len(told)}")
        training, state = load(run_dir)
        with monkeypatch.context() as patch:
            failed = _fail(patch, name, len(told) + 1)
            told.append(_told(training, state))
        assert (told[-1] == "fine") == (not failed)
        assert_all_verify(state.run)
        save_next(training, state, 0.1)
        state.close()
        assert_goes_on(run_dir, 4)
    assert len(told) > 1
    # Until the checkpoint is durable it is an error, and only from then on a warning.
    assert told == sorted(told, key=["raised", "warned", "fine"].index)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", HARMLESS)
def test_a_disk_call_that_a_save_can_do_without_fails_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = _prepare(tmp_path, 2)
    for number in itertools.count(1):
        run_dir = _copy(folder, f"failed-{number}")
        training, state = load(run_dir)
        with monkeypatch.context() as patch:
            failed = _fail(patch, name, number)
            assert _told(training, state) == "fine"
        state.close()
        assert_goes_on(run_dir, 3)
        if not failed:
            break
    assert number > 1


def test_what_is_not_trained_is_one_file_that_pruning_leaves_whole(
    tmp_path: Path,
) -> None:
    folder = _prepare(tmp_path, 2) / "exp"
    (newest, best) = sorted((folder / "checkpoints").glob("*/model-frozen.safetensors"))
    assert newest.stat().st_ino == best.stat().st_ino

    assert_goes_on(folder, 2)

    assert not newest.exists() or not best.exists()
    assert len({path.stat().st_ino for path in (folder / "checkpoints").glob("*/model-frozen*")}) == 1


def _told_of_start(run_dir: Path) -> str:
    with warnings.catch_warnings():
        # A training does not need its history
        warnings.filterwarnings("ignore", r".*history\.jsonl cannot be written", ResumableWarning)
        try:
            load(run_dir)[1].close()
        except SaveFailed as error:
            return error.problem.partition(": '")[0].rstrip(".")
    return ""


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ["open", "write", "fsync", "close", "mkdir", "replace", "ftruncate"])
@pytest.mark.sampled(3)
def test_a_disk_call_that_fails_at_a_start_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    failed: list[Any] = [None]
    for number in itertools.count(1):
        run_dir = tmp_path / f"failed-{number}" / "exp"
        if name == "ftruncate":
            run_dir.mkdir(parents=True)
            (run_dir / ".lock").write_text("process 1 on a host with a longer name than this one has\n")
        with monkeypatch.context() as patch:
            failed = _fail(patch, name, number)
            told = _told_of_start(run_dir)
        assert told in ("", f"{run_dir} cannot be written: [Errno 28] No space left on device")
        assert_goes_on(run_dir, 0)
        if not failed:
            break
    assert number > 1


@pytest.mark.parametrize("next_call", [RunState.save, RunState.wait, RunState.close])
def test_a_save_that_failed_is_raised_once_by_the_next_call(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, next_call: Callable[[RunState], object]
) -> None:
    _, state = load(run_dir)
    with monkeypatch.context() as patch:
        failed = _fail(patch, "rename", 1, errno.EIO)
        state.save()
        with pytest.raises(SaveFailed, match=r"checkpoint 1 .* could not be written: .*Input/output error"):
            next_call(state)
    assert failed
    state.close()
    assert_all_verify(load(run_dir)[1].run)


@pytest.mark.proves("durable")
def test_a_file_whose_flush_failed_is_given_up_and_never_flushed_again(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, state = load(run_dir)
    opened: dict[int, str] = {}
    flushed: list[str] = []
    real_open, real_fsync = os.open, os.fsync

    def recording_open(path: Any, *args: Any, **kwargs: Any) -> int:
        fd = real_open(path, *args, **kwargs)
        opened[fd] = str(path)
        return fd

    def failing_fsync(fd: int) -> None:
        flushed.append(opened[fd])
        if flushed[-1].endswith("model.safetensors") and flushed.count(flushed[-1]) == 1 and len(failed) < 2:
            failed.append(flushed[-1])
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real_fsync(fd)

    failed: list[str] = []
    monkeypatch.setattr(os, "open", recording_open)
    monkeypatch.setattr(os, "fsync", failing_fsync)
    for _ in range(2):
        with pytest.raises(SaveFailed):
            save_next(training, state, 1.0)
    save_next(training, state, 1.0)
    state.close()

    assert len(set(failed)) == 2
    assert [flushed.count(path) for path in failed] == [1, 1]
    assert not any(os.path.lexists(path) for path in failed)
    assert_all_verify(load(run_dir)[1].run)


def test_what_cannot_be_tidied_after_a_save_does_not_fail_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def refusing(*_: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    training, state = load(run_dir)
    with state, monkeypatch.context() as patch:

        def renaming(stage: Path, target: Path) -> None:
            rename(stage, target)
            # So that the folder has to be looked at again.
            (target.parent / "of-somebody").mkdir()
            patch.setattr(os, "scandir", refusing)

        save_next(training, state, 5.0)
        patch.setattr(os, "rename", renaming)
        with pytest.warns(ResumableWarning, match="nothing was pruned: .*checkpoints cannot be read: Input/"):
            save_next(training, state, 1.0)

    assert state.run.numbers() == [1, 2]
    assert_all_verify(state.run)
