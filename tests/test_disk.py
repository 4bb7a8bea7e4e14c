"""Bytes become durable, are read back verified, and one folder has one writer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resumable import CannotRead, CheckpointDamaged, RunInUse, SaveFailed, disk


def _content(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _record(patch: pytest.MonkeyPatch, *names: str) -> list[str]:
    """Note each call of these functions of `os`, and what it was about."""
    calls: list[str] = []
    paths: dict[int, str] = {}

    def recording(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(first: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(first, *args, **kwargs)
            path = paths.get(first, "") if isinstance(first, int) else Path(first).name
            if name == "open":
                paths[result] = path
            if name in names:
                calls.append(f"{name} {path}")
            return result

        return recorded

    for name in {"open", *names}:
        patch.setattr(os, name, recording(name, getattr(os, name)))
    return calls


# Writing


def test_a_file_is_written_from_its_pieces_with_size_and_digest(tmp_path: Path) -> None:
    size, digest = disk.write(tmp_path / "file", [b"ab", memoryview(b""), bytearray(b"cde")])

    assert (tmp_path / "file").read_bytes() == b"abcde"
    assert (size, digest) == (5, disk.digest(b"abcde"))


def test_a_file_that_is_there_is_never_written_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"committed")

    with pytest.raises(FileExistsError):
        disk.write(tmp_path / "file", [b"other"])

    assert (tmp_path / "file").read_bytes() == b"committed"


def test_a_disk_that_takes_only_a_part_at_a_time_gets_all_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))

    disk.write(tmp_path / "file", [bytes(range(100)), b"end"])

    assert (tmp_path / "file").read_bytes() == bytes(range(100)) + b"end"


def test_a_file_is_flushed_after_its_last_byte_and_before_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _record(monkeypatch, "write", "fsync", "close")

    disk.write(tmp_path / "file", [b"a", b"b"])

    assert calls == ["write file", "write file", "fsync file", "close file"]


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664)])
def test_the_permissions_of_a_file_follow_the_umask(tmp_path: Path, umask: int, expected: int) -> None:
    before = os.umask(umask)
    try:
        disk.write(tmp_path / "file", [b"x"])
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == expected


def test_a_replaced_file_is_never_seen_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    disk.replace(path, b"old")
    calls = _record(monkeypatch, "write", "fsync", "replace")

    disk.replace(path, b"new")

    assert path.read_bytes() == b"new"
    fresh = calls[0].removeprefix("write ")
    assert fresh != path.name
    assert calls == [f"write {fresh}", f"fsync {fresh}", f"replace {fresh}", f"fsync {tmp_path.name}"]
    assert _content(tmp_path) == ["run.json"]


def test_a_file_whose_replacement_fails_keeps_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.replace(tmp_path / "run.json", b"old")

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        disk.replace(tmp_path / "run.json", b"new")

    assert (tmp_path / "run.json").read_bytes() == b"old"


def test_every_folder_that_is_made_is_flushed_into_the_one_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _record(monkeypatch, "mkdir", "fsync")

    disk.make_folder(tmp_path / "a" / "b")

    assert calls == ["mkdir a", f"fsync {tmp_path.name}", "mkdir b", "fsync a"]


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()

    disk.make_folder(tmp_path)

    assert _content(tmp_path) == ["mine"]


def test_a_folder_that_another_process_makes_first_is_the_same_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def slower(path: Path) -> None:
        real(path)
        real(path)

    monkeypatch.setattr(os, "mkdir", slower)
    disk.make_folder(tmp_path / "folder")

    assert (tmp_path / "folder").is_dir()


# Publishing, links, removing


def test_a_stage_is_published_as_a_whole_and_its_new_name_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stage").mkdir()
    (tmp_path / "stage" / "file").touch()
    calls = _record(monkeypatch, "rename", "fsync")

    disk.publish(tmp_path / "stage", tmp_path / "target")

    assert calls == ["rename stage", f"fsync {tmp_path.name}"]
    assert _content(tmp_path) == ["target", "target/file"]


@pytest.mark.parametrize("occupy", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_an_occupied_target_is_refused_and_not_touched(
    tmp_path: Path, occupy: Callable[[Path], object]
) -> None:
    (tmp_path / "stage").mkdir()
    occupy(tmp_path / "target")
    before = os.lstat(tmp_path / "target")

    with pytest.raises(SaveFailed, match="target already exists"):
        disk.publish(tmp_path / "stage", tmp_path / "target")

    assert os.lstat(tmp_path / "target") == before
    assert (tmp_path / "stage").is_dir()


def test_a_link_leads_to_its_target_after_both_were_moved(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "2").mkdir()
    disk.point(tmp_path / "run" / "best", tmp_path / "run" / "checkpoints" / "1")

    disk.point(tmp_path / "run" / "best", tmp_path / "run" / "checkpoints" / "2")
    (tmp_path / "run").rename(tmp_path / "moved")

    assert (tmp_path / "moved" / "best").resolve() == tmp_path / "moved" / "checkpoints" / "2"
    assert sorted(os.listdir(tmp_path / "moved")) == ["best", "checkpoints"]


def test_removing_takes_the_named_files_the_folders_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "ranks").mkdir(parents=True)
    (folder / "ranks" / "0").touch()
    (folder / "file").touch()

    disk.remove(folder, ["file", "ranks/", "ranks/0"])

    assert _content(tmp_path) == []


def test_removing_fails_where_something_was_not_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").touch()

    with pytest.raises(OSError, match="not empty"):
        disk.remove(folder, [])

    assert _content(tmp_path) == ["folder", "folder/notes.txt"]


# Reading


def _read(folder: Path, content: bytes = b"content") -> memoryview:
    return disk.read(folder, "file", len(content), disk.digest(content))


def test_what_is_read_is_private_memory_that_the_file_cannot_change(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")

    found = _read(tmp_path)
    with open(tmp_path / "file", "r+b") as file:
        file.write(b"CHANGED")

    assert found == b"content"
    assert not found.readonly


def _link_out(path: Path) -> None:
    (path.parent.parent / "outside").write_bytes(b"content")
    path.symlink_to("../outside")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda path: path.write_bytes(b"bontent"), r"file has the digest \w+, its manifest says"),
    "truncated": (lambda path: path.write_bytes(b"conten"), "file has 6 bytes, its manifest says 7"),
    "extended": (lambda path: path.write_bytes(b"content!"), "file has 8 bytes, its manifest says 7"),
    "emptied": (Path.touch, "file has 0 bytes, its manifest says 7"),
    "missing": (lambda path: None, "file is missing"),
    "link": (_link_out, "file cannot be read: .*symbolic links"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "file cannot be read: .*symbolic links"),
    "folder": (Path.mkdir, "file cannot be read: Is a directory"),
    "pipe": (os.mkfifo, "file is not a regular file"),
    "socket": (_socket, "file cannot be read: No such device"),
}


@pytest.mark.parametrize(("damage", "problem"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_and_what_to_do_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object], problem: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)  # (a socket's path must be short)
    damage(Path("file"))
    descriptors = os.listdir("/dev/fd")

    with pytest.raises(CheckpointDamaged, match=rf"(?s)folder is damaged: {problem}.*\nFix: resume='auto'"):
        _read(folder)

    assert len(os.listdir("/dev/fd")) == len(descriptors)


def test_a_device_is_not_read() -> None:
    with pytest.raises(CheckpointDamaged, match="zero is not a regular file"):
        disk.read_small(Path("/dev"), "zero")


def test_a_subfolder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"content")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "ranks").symlink_to("../outside")

    with pytest.raises(CheckpointDamaged, match="folder is damaged: ranks is a symbolic link"):
        disk.read(tmp_path / "folder", "ranks/file", 7, disk.digest(b"content"))


def test_a_run_folder_that_is_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "file").write_bytes(b"content")
    (tmp_path / "exp").symlink_to("scratch")

    assert disk.read_small(tmp_path / "exp", "file") == b"content"


def test_a_file_that_shrinks_while_it_is_read_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"content")
    real, looks = os.fstat, iter(range(9))

    def shrinking(fd: int) -> os.stat_result:
        found = real(fd)
        if next(looks) == 1:
            os.truncate(tmp_path / "file", 3)
        return found

    monkeypatch.setattr(os, "fstat", shrinking)
    with pytest.raises(CheckpointDamaged, match="file cannot be read: the file ended 4 bytes early"):
        _read(tmp_path)


def test_a_file_without_a_known_size_is_not_read_beyond_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 2**40)

    with pytest.raises(CheckpointDamaged, match="file has 1,099,511,627,776 bytes; at most 67,108,864 make"):
        disk.read_small(tmp_path, "file")


# The lock


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


def test_a_lock_that_another_process_holds_is_refused_with_its_number_and_host(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(f"process 1 on {'a-longer-host' * 9}")
    with forked(lambda: disk.Lock(tmp_path / ".lock")) as (child, hear):
        hear()
        holder, descriptors = f"process {child} on {socket.gethostname()}", os.listdir("/dev/fd")
        with pytest.raises(RunInUse, match=f"{tmp_path} is being written by {holder}.\nFix: wait for it"):
            disk.Lock(tmp_path / ".lock")
        assert len(os.listdir("/dev/fd")) == len(descriptors)

    disk.Lock(tmp_path / ".lock").release()


def test_a_lock_is_taken_over_at_once_from_a_process_that_was_killed(tmp_path: Path) -> None:
    with forked(lambda: disk.Lock(tmp_path / ".lock")) as (child, hear):
        hear()
        _die(child)

        disk.Lock(tmp_path / ".lock").release()


def test_a_killed_holder_does_not_keep_the_lock_through_what_it_forked(tmp_path: Path) -> None:
    def hold_and_fork() -> int:
        disk.Lock(tmp_path / ".lock")
        return os.fork()

    with forked(hold_and_fork) as (child, hear):
        grandchild = max(int(hear()), int(hear()))
        _die(child)
        os.kill(grandchild, 0)  # (it lives)

        disk.Lock(tmp_path / ".lock").release()


def test_what_is_forked_from_the_holder_does_not_release_the_lock(tmp_path: Path) -> None:
    lock = disk.Lock(tmp_path / ".lock")

    with forked(lock.release) as (_, released), forked(lambda: disk.Lock(tmp_path / ".lock")) as (_, hear):
        assert released() == "None"
        assert f"is being written by process {os.getpid()} on " in hear()
        assert lock.is_held()
    lock.release()


def test_what_is_forked_from_the_holder_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = disk.Lock(tmp_path / ".lock")

    with forked(lock.is_held) as (_, hear):
        assert hear() == "False"
    lock.release()


def test_what_was_forked_from_a_holder_can_take_the_lock_after_it(tmp_path: Path) -> None:
    lock = disk.Lock(tmp_path / ".lock")
    go, start = os.pipe()

    def wait_and_take() -> bool:
        os.read(go, 1)
        return disk.Lock(tmp_path / ".lock").is_held()

    with forked(wait_and_take) as (_, hear):
        lock.release()
        os.write(start, b".")
        assert hear() == "True"


def test_a_process_cannot_take_a_lock_twice_by_whatever_name(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "alias").symlink_to("run")
    lock = disk.Lock(tmp_path / "run" / ".lock")

    with pytest.raises(RunInUse, match=rf"alias is being written by this process \({os.getpid()}\)"):
        disk.Lock(tmp_path / "alias" / ".lock")
    with forked(lambda: disk.Lock(tmp_path / "run" / ".lock")) as (_, hear):
        assert "is being written by" in hear()
    lock.release()


def test_a_lock_that_was_released_can_be_taken_again(tmp_path: Path) -> None:
    for _ in range(2):
        lock = disk.Lock(tmp_path / ".lock")
        assert lock.is_held()
        lock.release()
        assert not lock.is_held()

    lock.release()
    with forked(lambda: disk.Lock(tmp_path / ".lock").is_held()) as (_, hear):
        assert hear() == "True"


def test_a_lock_whose_holder_wrote_nothing_is_refused_too(tmp_path: Path) -> None:
    with forked(lambda: [disk.Lock(tmp_path / ".lock"), os.truncate(tmp_path / ".lock", 0)]) as (_, hear):
        hear()
        with pytest.raises(RunInUse, match="is being written by another process"):
            disk.Lock(tmp_path / ".lock")


def test_a_disk_without_room_for_a_name_does_not_cost_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    lock = disk.Lock(tmp_path / ".lock")

    assert lock.is_held()
    lock.release()


def test_a_disk_that_knows_no_locks_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlocked(fd: int, command: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", unlocked)
    with pytest.raises(OSError, match="No locks available"):
        disk.Lock(tmp_path / ".lock")

    monkeypatch.undo()
    disk.Lock(tmp_path / ".lock").release()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.ENOMEM])
def test_what_is_not_the_files_fault_is_not_called_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "a").write_bytes(b"x")

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)

    with pytest.raises(CannotRead, match="nothing says that the file is damaged"):
        disk.read(tmp_path, "a", 1, "")


def test_an_error_of_a_write_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)

    with pytest.raises(OSError, match=r"No space left on device: '.*weights'"):
        disk.write(tmp_path / "weights", [b"x"])


def test_a_lock_that_was_lost_to_another_process_is_not_believed_in(tmp_path: Path) -> None:
    lock = disk.Lock(tmp_path / "lock")
    (tmp_path / "lock").read_bytes()
    code = f"from resumable import disk; disk.Lock(__import__('pathlib').Path({str(tmp_path / 'lock')!r}))"
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
