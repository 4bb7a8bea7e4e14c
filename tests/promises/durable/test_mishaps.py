"""Mishaps in mid-run: each is reported, what was saved stays, and the training continues."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import injection
import pytest
from counted import Tally
from injection import Child
from places import SUPPORT
from tiny import Training, assert_all_verify, assert_goes_on, load, save_next, uninterrupted

from resumable import ResumableError, ResumableWarning, Run, RunInUse, RunState, SaveFailed
from resumable.files.lock import Lock

pytestmark = [
    pytest.mark.proves("durable"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"),
]


@pytest.fixture
def begun(run_dir: Path) -> Iterator[tuple[Training, RunState]]:
    """A training that has saved twice, and continues."""
    training, state = load(run_dir)
    with state:
        for loss in (1.0, 5.0):
            save_next(training, state, loss)
        yield training, state


def _elsewhere(path: Path) -> Path:
    return path.with_name(f"{path.name}-elsewhere")


def _delete(path: Path) -> None:
    shutil.rmtree(path)


def _move(path: Path) -> None:
    path.rename(_elsewhere(path))


def _put_a_file_in_place(path: Path) -> None:
    _move(path)
    path.write_text("notes")


def _put_a_link_to_nothing_in_place(path: Path) -> None:
    _move(path)
    path.symlink_to("nothing")


def _put_a_link_to_itself_in_place(path: Path) -> None:
    _move(path)
    path.symlink_to(path.name)


def _put_back(path: Path) -> None:
    path.unlink()
    _elsewhere(path).rename(path)


@pytest.mark.parametrize(
    "do", [_put_a_file_in_place, _put_a_link_to_nothing_in_place, _put_a_link_to_itself_in_place]
)
@pytest.mark.parametrize("what", [".", "checkpoints"])
def test_what_stands_in_the_place_of_a_folder_is_named_and_left_alone(
    begun: tuple[Training, RunState], run_dir: Path, do: Callable[[Path], None], what: str
) -> None:
    training, state = begun
    do(run_dir / what)

    with pytest.raises(
        SaveFailed, match=r"(?s)(cannot|could not) be written: .*Fix: mend the cause"
    ) as failed:
        save_next(training, state, 0.5)
    assert str(run_dir) in str(failed.value)

    assert (run_dir / what).is_symlink() or (run_dir / what).read_text() == "notes"
    _put_back(run_dir / what)
    assert_all_verify(state.run)
    save_next(training, state, 0.4)
    state.close()
    assert_goes_on(run_dir, 4)


@pytest.mark.parametrize("do", [_delete, _move])
def test_a_run_that_is_gone_is_reported_and_a_new_one_begun(
    begun: tuple[Training, RunState], run_dir: Path, do: Callable[[Path], None]
) -> None:
    training, state = begun
    do(run_dir)

    with pytest.warns(
        ResumableWarning, match=rf"{run_dir} is not what this process has locked: it was moved"
    ):
        save_next(training, state, 0.5)

    state.close()
    assert_goes_on(run_dir, 3)
    assert_goes_on(_elsewhere(run_dir), 2) if do is _move else None


def test_deleted_checkpoints_are_missed_only_where_they_are_asked_for(
    begun: tuple[Training, RunState], run_dir: Path
) -> None:
    training, state = begun
    _delete(run_dir / "checkpoints")

    save_next(training, state, 5.0)

    assert state.run.numbers() == [3]
    state.close()
    with pytest.warns(
        ResumableWarning, match="checkpoint 1, the best, is not there any more; it is forgotten"
    ):
        load(run_dir)[1].close()
    assert_all_verify(Run(run_dir))


def test_a_lock_on_a_silent_disk_is_not_taken_for_a_moved_one(tmp_path: Path) -> None:
    (folder := tmp_path / "exp").mkdir()
    held = Lock(folder / ".lock")
    _put_a_link_to_itself_in_place(folder)

    assert held.is_in_place()

    _put_back(folder)
    _put_a_link_to_nothing_in_place(folder)
    assert not held.is_in_place()
    held.release()


def test_two_trainings_never_write_one_run_even_after_it_was_moved_away(
    run_dir: Path,
) -> None:
    with Child(lambda child: _hold(child, run_dir)) as child:
        assert child.heard() == "waits"
        training, state = load(run_dir, every=None)
        save_next(training, state, 1.0)
        _move(run_dir)
        child.go()
        assert child.heard() == "held"

        with pytest.raises(RunInUse, match=rf"{run_dir} is being written by process {child.pid} on "):
            save_next(training, state, 0.5)

        child.go()
        assert child.heard() == [1]
    state.close()
    assert_goes_on(run_dir, 1)


def _hold(child: Child, run_dir: Path) -> None:
    child.tell("waits")
    training, state = load(run_dir)
    child.tell("held")
    save_next(training, state, 1.0)
    state.close()
    child.tell(state.run.numbers())


def test_a_disk_unmounted_in_mid_run_is_reported_and_loses_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with _mounted("-t", "tmpfs", "-o", "size=9m", "tmpfs", str(disk)):
        training, state = load(disk / "exp")
        save_next(training, state, 1.0)
        held = Path(f"/proc/self/fd/{os.open(disk, os.O_PATH)}")
    with pytest.warns(ResumableWarning, match="or its disk is not mounted any more"):
        save_next(training, state, 0.5)

    state.close()
    assert_goes_on(disk / "exp", 2)
    assert Run(held / "exp").numbers() == [1]
    assert_all_verify(Run(held / "exp"))
    os.close(int(held.name))


class _mounted:  # noqa: N801 (a context manager)
    def __init__(self, *options: str) -> None:
        self._options = options

    def __enter__(self) -> None:
        done = subprocess.run(["mount", *self._options], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"needs a mount: {done.stderr.strip()}")

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "--lazy", self._options[-1]], check=True)


def test_a_run_on_a_read_only_disk_is_refused_and_can_be_read(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with _mounted("-t", "tmpfs", "-o", "size=9m", "tmpfs", str(disk)):
        training, state = load(disk / "exp")
        with state:
            save_next(training, state, 1.0)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

        with pytest.raises(
            SaveFailed, match=r"(?s)exp cannot be written: .*Read-only file system.*Fix: mend"
        ):
            load(disk / "exp")

        assert_all_verify(Run(disk / "exp"))
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert_goes_on(disk / "exp", 1)


def _told(training: Training, state: RunState) -> tuple[str, str]:
    """Save, and return how a failure was reported."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            save_next(training, state, 0.5)
        except SaveFailed as error:
            return "raised", str(error)
    assert all(issubclass(warning.category, ResumableWarning) for warning in warned), warned
    return "warned" if warned else "fine", "\n".join(str(warning.message) for warning in warned)


NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter: each start of pytest closes the one above `tmp_path` to others."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


def _as_nobody(child: Child, run_dir: Path, path: str, mode: int) -> None:
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    training, state = load(run_dir)
    target = os.path.normpath(run_dir / path)
    before = os.stat(target).st_mode
    os.chmod(target, mode)
    told = _told(training, state)
    os.chmod(target, before)
    assert_all_verify(state.run)
    save_next(training, state, 0.4)
    state.close()
    child.tell(told)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs root, to become nobody")
@pytest.mark.parametrize("mode", [0o000, 0o444, 0o555])
@pytest.mark.parametrize("path", ["..", ".", "checkpoints"])
@pytest.mark.quick(3)
def test_permissions_that_are_lost_in_mid_run_cost_a_save_and_nothing_else(
    open_folder: Path, path: str, mode: int
) -> None:
    run_dir = open_folder / "runs" / "exp"
    training, state = load(run_dir)
    with state:
        save_next(training, state, 1.0)
        save_next(training, state, 5.0)
    for found in (run_dir.parent, *run_dir.parent.rglob("*")):
        os.chown(found, NOBODY, NOBODY, follow_symlinks=False)

    with Child(lambda child: _as_nobody(child, run_dir, path, mode)) as child:
        told, text = child.heard()

    is_harmless = mode == 0o555 and path == ".."
    assert told == ("fine" if is_harmless else "warned" if mode == 0o555 and path == "." else "raised"), text
    assert is_harmless or ("Permission denied" in text and str(run_dir) in text)
    assert_goes_on(run_dir, 4)


def _limited(child: Child, run_dir: Path, kind: int, limit: int, does_load: bool) -> None:
    """Save, or load, within a limit, and save again without it."""
    training, state = load(run_dir)
    step = state.step
    before, (soft, hard) = injection.open_files(), resource.getrlimit(kind)
    room = limit + (_lowest_free() if kind == resource.RLIMIT_NOFILE else 0)
    if does_load:
        state.close()
    resource.setrlimit(kind, (room, hard))
    try:
        told = _told_of_load(run_dir) if does_load else _told(training, state)
    finally:
        resource.setrlimit(kind, (soft, hard))
    if does_load:
        training, state = load(run_dir)
        assert (state.step, training.digest()) == (step, uninterrupted()[step])
    save_next(training, state, 0.1)
    assert_all_verify(state.run)
    leaked = injection.open_files() - before
    state.close()
    child.tell([*told, [*leaked], state.step])


def _lowest_free() -> int:
    # A limit of open files is one of their numbers
    os.close(found := os.open(os.devnull, os.O_RDONLY))
    return found


def _told_of_load(run_dir: Path) -> tuple[str, str]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            load(run_dir)[1].close()
        except ResumableError as error:
            return "raised", str(error)
    return "warned" if warned else "fine", "\n".join(str(warning.message) for warning in warned)


def _within_limits(
    tmp_path: Path, kind: int, limits: Iterator[int] | range, does_load: bool, code: int
) -> Iterator[str | None]:
    """Yield what is wrong with each limit, until there is one that does not matter."""
    training, state = load(tmp_path / "runs" / "exp")
    with state:
        save_next(training, state, 1.0)
        save_next(training, state, 5.0)
    for limit in limits:
        run_dir = shutil.copytree(tmp_path / "runs", tmp_path / str(limit), symlinks=True) / "exp"
        with Child(
            lambda child, run_dir=run_dir, limit=limit: _limited(child, run_dir, kind, limit, does_load)
        ) as child:
            told, text, leaked, step = child.heard()
        is_told = told == "fine" or (os.strerror(code) in text and str(run_dir) in text)
        yield None if is_told and not leaked else f"{limit}: {told}, left open: {leaked}, and told: {text}"
        assert_goes_on(run_dir, step)
        if told == "fine":
            return
    raise AssertionError("it never was fine")


@pytest.mark.quick(2)
@pytest.mark.parametrize("does_load", [False, True])
def test_a_limit_of_open_files_is_reported_and_costs_no_checkpoint(
    tmp_path: Path, tally: Tally, does_load: bool
) -> None:
    found = [*_within_limits(tmp_path, resource.RLIMIT_NOFILE, range(99), does_load, errno.EMFILE)]

    assert len(found) > 1
    tally("limits of a process", len(found), [*filter(None, found)])


@pytest.mark.heavy
def test_a_limit_of_the_size_of_files_tears_a_write_and_is_reported(tmp_path: Path, tally: Tally) -> None:
    limits = iter((1, 400, 1000, 2000, 3010, 5000, 8000, 1 << 20))

    found = [*_within_limits(tmp_path, resource.RLIMIT_FSIZE, limits, False, errno.EFBIG)]

    assert len(found) == 8
    tally("limits of a process", len(found), [*filter(None, found)])


MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A group of processes that are killed when they take more than 24 MB together."""
    group = MEMORY / f"resumable-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(24 << 20))
        # Else a machine that has swap makes room there
        (group / "memory.swappiness").write_text("0")
    except OSError as exc:
        pytest.skip(f"needs a memory cgroup (version 1) and the right to make one: {exc}")
    yield group
    group.rmdir()


def _train_until_killed(child: Child, run_dir: Path, group: Path, megabytes: int) -> None:
    training, state = load(run_dir, keep=2)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    hoard, acknowledged = [], 0
    for step in range(1, 8):
        child.note([step, acknowledged])
        for _ in state.steps(step):
            training.step()
            saved = state.save(loss=1.0 / step)
        # In the middle of the save
        hoard += [b"x" * (1 << 18) for _ in range(4 * megabytes)]
        saved.wait()
        acknowledged = step


@pytest.mark.parametrize("megabytes", [4, 5, 7, 9, 13, 30])
@pytest.mark.quick(3)
def test_a_training_killed_for_memory_continues_from_the_newest_save(
    run_dir: Path, little_memory: Path, tally: Tally, megabytes: int
) -> None:
    uninterrupted()
    with Child(lambda child: _train_until_killed(child, run_dir, little_memory, megabytes)) as child:
        notes = child.notes()

    assert child.status == signal.SIGKILL
    begun, acknowledged = notes[-1]
    found = max((at.about.step for at in Run(run_dir).checkpoints()), default=0)
    assert acknowledged <= found <= begun
    assert_goes_on(run_dir, found, keep=2)
    tally("kills for memory", 1, [])


CLOCK = """
import os, sys, threading, time, warnings
from pathlib import Path
from tiny import assert_all_verify, assert_goes_on, load, save_next, uninterrupted

def set_clock(text):
    Path(os.environ["FAKETIME_TIMESTAMP_FILE"]).write_text(text)

run_dir, jumps = Path(sys.argv[1]), sys.argv[2:]
expected = uninterrupted()
for start in range(2):
    # Each start finds another time than the one before it, and so does each save.
    training, state = load(run_dir, keep=3, every="10 min")
    with state:
        assert training.digest() == expected[state.step]
        for jump in jumps[3 * start : 3 * start + 3]:
            set_clock(jump)
            now = time.time()
            save_next(training, state, 9.0 - state.step)
            assert state.run.numbers()[-1] == state.step, "the newest is not the one that was saved last"
            assert state.run.best(state._training.goal).number == state.step
        assert_all_verify(state.run)
saved = [found.about.saved for found in state.run.checkpoints()]
assert saved != sorted(saved), "the clock has not jumped"
print(state.run.numbers())
assert_goes_on(run_dir, 6, keep=3)
"""


@pytest.mark.heavy
def test_a_clock_that_jumps_changes_neither_the_order_nor_what_is_kept(run_dir: Path, tmp_path: Path) -> None:
    if not (found := [*Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")]):
        pytest.skip("needs libfaketime (apt-get install faketime)")
    clock = tmp_path / "clock"
    clock.write_text("+0d")
    jumps = ["-3d", "+400d", "-400d", "-20y", "+10y", "-1h"]
    env = os.environ | {"FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"}
    # As where a real clock is set, what counts seconds continues.
    env |= {"LD_PRELOAD": str(found[0]), "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), *sys.path])

    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:save() has waited", "-c", CLOCK, str(run_dir), *jumps],
        env=env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "[4, 5, 6]" in done.stdout
