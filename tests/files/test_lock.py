"""One folder has one writer, for as long as that process lives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resumable import RunInUse
from resumable.files import lock as lock_module
from resumable.files.lock import Lock, holder


@contextlib.contextmanager
def forked(thing: Callable[[], object]) -> Iterator[tuple[int, Callable[[], str]]]:
    """A child process that does one thing, says how that ended, and lives until the block is left."""
    (said, say), (held, hold) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn of threads, of which the test runner may have some; this child uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(hold)
        os.write(say, f"{_outcome(thing)}\n".encode())
        os.read(held, 1)
        os._exit(0)
    os.close(say)
    os.close(held)
    try:
        with os.fdopen(said) as pipe:
            yield child, lambda: pipe.readline().rstrip("\n")
    finally:
        os.close(hold)
        os.waitpid(child, 0)


def _outcome(thing: Callable[[], object]) -> str:
    try:
        return str(thing())
    except BaseException as error:
        return str(error).replace("\n", " ")


def _die(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)


@pytest.mark.proves("durable")
def test_a_lock_that_another_process_holds_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(f"process 1 on {'a-longer-host' * 9}")
    with forked(lambda: Lock(tmp_path / ".lock")) as (child, hear):
        hear()
        holder, descriptors = f"process {child} on {socket.gethostname()}", os.listdir("/dev/fd")
        with pytest.raises(RunInUse, match=f"{tmp_path} is being written by {holder}.\nFix: wait for it"):
            Lock(tmp_path / ".lock")
        assert len(os.listdir("/dev/fd")) == len(descriptors)

    Lock(tmp_path / ".lock").release()


def test_a_holder_leaves_no_number_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, text: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / ".lock").write_text("process 1 on node7\n")
    monkeypatch.setattr(os, "write", full)
    Lock(tmp_path / ".lock").release()

    assert (tmp_path / ".lock").read_text() == ""


@pytest.mark.proves("durable")
def test_a_lock_is_taken_over_at_once_from_a_process_that_was_killed(tmp_path: Path) -> None:
    with forked(lambda: Lock(tmp_path / ".lock")) as (child, hear):
        hear()
        _die(child)

        Lock(tmp_path / ".lock").release()


def test_a_killed_holder_does_not_keep_the_lock_through_what_it_forked(tmp_path: Path) -> None:
    def hold_and_fork() -> int:
        Lock(tmp_path / ".lock")
        return os.fork()

    with forked(hold_and_fork) as (child, hear):
        grandchild = max(int(hear()), int(hear()))
        _die(child)
        os.kill(grandchild, 0)  # It lives

        Lock(tmp_path / ".lock").release()


def test_what_is_forked_from_the_holder_does_not_release_the_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path / ".lock")

    with forked(lock.release) as (_, released), forked(lambda: Lock(tmp_path / ".lock")) as (_, hear):
        assert released() == "None"
        assert f"is being written by process {os.getpid()} on " in hear()
        assert lock.is_held()
    lock.release()


def test_what_was_forked_from_a_holder_can_take_the_lock_after_it(tmp_path: Path) -> None:
    lock = Lock(tmp_path / ".lock")
    go, start = os.pipe()

    def wait_and_take() -> bool:
        os.read(go, 1)
        return Lock(tmp_path / ".lock").is_held()

    with forked(wait_and_take) as (_, hear):
        lock.release()
        os.write(start, b".")
        assert hear() == "True"


def test_a_process_cannot_take_a_lock_twice_by_whatever_name(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "alias").symlink_to("run")
    lock = Lock(tmp_path / "run" / ".lock")

    with pytest.raises(RunInUse, match=rf"alias is being written by this process \({os.getpid()}\)"):
        Lock(tmp_path / "alias" / ".lock")
    with forked(lambda: Lock(tmp_path / "run" / ".lock")) as (_, hear):
        assert "is being written by" in hear()
    lock.release()


def test_a_disk_without_locks_is_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlocked(fd: int, command: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", unlocked)
    with pytest.raises(OSError, match="No locks available"):
        Lock(tmp_path / ".lock")

    monkeypatch.undo()
    Lock(tmp_path / ".lock").release()


def test_a_lock_that_was_lost_to_another_process_is_not_believed_in(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock")
    (tmp_path / "lock").read_bytes()
    code = (
        f"from resumable.files.lock import Lock; Lock(__import__('pathlib').Path({str(tmp_path / 'lock')!r}))"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", f"{code}; print(flush=True); input()"], stdin=-1, stdout=-1
    )
    with other:
        assert other.stdout
        other.stdout.readline()
        with pytest.raises(RunInUse, match="lost its lock"):
            lock.renew()
        assert not lock.is_held()
        other.kill()


def test_a_lock_that_was_lost_unheard_is_taken_again(tmp_path: Path) -> None:
    lock = Lock(tmp_path / ".lock")
    (tmp_path / ".lock").read_bytes()
    with forked(lambda: Lock(tmp_path / ".lock").release()) as (_, hear):
        assert hear() == "None"

    lock.renew()

    assert lock.is_held()
    with forked(lambda: Lock(tmp_path / ".lock")) as (_, hear):
        assert "is being written by process " in hear()
    lock.release()


def test_a_lock_is_released_if_its_close_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.close

    def failing(fd: int) -> None:
        real(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    lock = Lock(tmp_path / ".lock")
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", failing)
        lock.release()
    lock.release()

    assert not lock.is_held()
    Lock(tmp_path / ".lock").release()


def test_a_holder_is_named_while_its_process_lives_and_no_longer(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    assert holder(path) is None

    with forked(lambda: Lock(path)) as (child, hear):
        hear()
        assert holder(path) == f"process {child} on {socket.gethostname()}"
        path.write_bytes(b"")
        assert holder(path) == "another process"
        _die(child)
        assert holder(path) is None


def test_a_process_finds_itself_without_opening_its_lock(tmp_path: Path) -> None:
    lock = Lock(tmp_path / ".lock")
    descriptors = os.listdir("/dev/fd")

    assert holder(tmp_path / ".lock") == f"process {os.getpid()} on {socket.gethostname()}"
    assert os.listdir("/dev/fd") == descriptors
    with forked(lambda: Lock(tmp_path / ".lock")) as (_, hear):
        assert "is being written by" in hear()
    lock.release()


@pytest.mark.parametrize("why", ["system", "file system"])
def test_no_holder_where_nothing_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def refused(*_: object) -> bytes:
        raise OSError(errno.ENOLCK, "No locks available")

    with forked(lambda: Lock(tmp_path / ".lock")) as (_, hear):
        hear()
        if why == "system":
            monkeypatch.setattr(lock_module, "_FLOCK", {})
        else:
            monkeypatch.setattr(fcntl, "fcntl", refused)

        assert holder(tmp_path / ".lock") is None
