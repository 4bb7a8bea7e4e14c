"""Names and small files become durable, and nothing but a file of ours is read."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resumable import CannotRead, CheckpointDamaged, ResumableWarning, Run, RunState, SaveFailed
from resumable.files import disk


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


def test_a_file_that_is_there_is_never_written_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"committed")

    with pytest.raises(FileExistsError):
        disk.write(tmp_path / "file", b"other")

    assert (tmp_path / "file").read_bytes() == b"committed"


def test_a_file_is_flushed_after_its_last_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:1]))
    calls = _record(monkeypatch, "write", "fsync", "close")

    disk.write(tmp_path / "file", b"ab")

    assert calls == ["write file", "write file", "fsync file", "close file"]


def _failing(code: int) -> Callable[..., Any]:
    def fail(*_: object) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def test_a_file_that_could_not_be_written_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _record(monkeypatch, "fsync", "close")

    with pytest.raises(KeyError), disk.created(tmp_path / "file"):
        raise KeyError

    assert calls == ["close file"]


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_a_failed_write_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    descriptors = os.listdir("/dev/fd")
    monkeypatch.setattr(os, name, _failing(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device: '.*weights'"):
        disk.write(tmp_path / "weights", b"x")

    assert len(os.listdir("/dev/fd")) == len(descriptors)


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


def test_a_file_is_as_it_was_if_replacing_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.replace(tmp_path / "run.json", b"old")

    monkeypatch.setattr(os, "write", _failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        disk.replace(tmp_path / "run.json", b"new")

    assert (tmp_path / "run.json").read_bytes() == b"old"


def test_each_new_folder_is_flushed_into_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _record(monkeypatch, "mkdir", "fsync")

    disk.make_folder(tmp_path / "a" / "b")

    assert calls == ["mkdir a", f"fsync {tmp_path.name}", "mkdir b", "fsync a"]


def test_a_folder_that_another_process_made_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.mkdir

    def slower(path: Path) -> None:
        real(path)
        real(path)

    monkeypatch.setattr(os, "mkdir", slower)
    disk.make_folder(tmp_path / "folder")

    assert (tmp_path / "folder").is_dir()


def test_a_folder_that_cannot_be_flushed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        disk.make_folder(tmp_path / "folder")

    assert _content(tmp_path) == []


# Publishing, links, removing


def test_a_stage_is_published_and_its_name_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stage").mkdir()
    (tmp_path / "stage" / "file").touch()
    calls = _record(monkeypatch, "rename", "fsync")

    disk.publish(tmp_path / "stage", tmp_path / "target")

    assert calls == ["rename stage", f"fsync {tmp_path.name}"]
    assert _content(tmp_path) == ["target", "target/file"]


@pytest.mark.parametrize("occupy", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_an_occupied_target_is_refused(tmp_path: Path, occupy: Callable[[Path], object]) -> None:
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


def test_a_link_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.point(tmp_path / "best", tmp_path / "1")

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        disk.point(tmp_path / "best", tmp_path / "2")

    assert os.listdir(tmp_path) == ["best"]
    assert os.readlink(tmp_path / "best") == "1"


def test_removing_fails_where_something_was_not_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.txt").touch()

    with pytest.raises(OSError, match="not empty"):
        disk.remove(folder, [])

    assert _content(tmp_path) == ["folder", "folder/notes.txt"]


# Reading


def _link_out(path: Path) -> None:
    (path.parent.parent / "outside").write_bytes(b"content")
    path.symlink_to("../outside")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
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
    monkeypatch.chdir(folder)  # A socket's path must be short
    damage(Path("file"))
    descriptors = os.listdir("/dev/fd")

    with pytest.raises(CheckpointDamaged, match=rf"(?s)folder is damaged: {problem}.*\nFix: resume='auto'"):
        disk.read_small(folder, "file")

    assert len(os.listdir("/dev/fd")) == len(descriptors)


def test_a_subfolder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"content")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "ranks").symlink_to("../outside")

    with pytest.raises(CheckpointDamaged, match="folder is damaged: ranks is a symbolic link"):
        disk.read_small(tmp_path / "folder", "ranks/file")


def test_a_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "scratch" / "ranks").mkdir(parents=True)
    (tmp_path / "scratch" / "ranks" / "file").write_bytes(b"content")
    (tmp_path / "folder").symlink_to("scratch")

    for name in ("file", "ranks/file"):
        with pytest.raises(CheckpointDamaged, match=f"{name} cannot be read: Not a directory"):
            disk.read_small(tmp_path / "folder", name)


def test_a_system_without_dir_fd_opens_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "supports_dir_fd", {*os.supports_dir_fd} - {os.open})
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "file").write_bytes(b"content")

    assert disk.read_small(tmp_path, "ranks/file") == b"content"


def test_a_file_that_shrinks_meanwhile_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"content")
    real, looks = os.fstat, iter(range(9))

    def shrinking(fd: int) -> os.stat_result:
        found = real(fd)
        if next(looks) == 1:
            os.truncate(tmp_path / "file", 3)
        return found

    monkeypatch.setattr(os, "fstat", shrinking)
    with pytest.raises(CheckpointDamaged, match="file cannot be read: the file ended 4 bytes early"):
        disk.read_small(tmp_path, "file")


def test_a_file_without_a_known_size_is_not_read_beyond_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 2**40)

    with pytest.raises(CheckpointDamaged, match="file has 1,099,511,627,776 bytes; at most 67,108,864 make"):
        disk.read_small(tmp_path, "file")


@pytest.mark.parametrize(
    "number", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.EPERM, errno.ENOMEM], ids=errno.errorcode.get
)
def test_other_errors_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    (tmp_path / "file").write_bytes(b"x")
    monkeypatch.setattr(os, "open", _failing(number))

    with pytest.raises(
        CannotRead, match=rf"file cannot be read: {os.strerror(number)}\.\n.*nothing says that"
    ):
        disk.read_small(tmp_path, "file")


def test_names_of_other_disks_are_not_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "mount" / "runs" / "exp").mkdir(parents=True)
    found = os.stat

    def mounted(path: Any, *args: Any, **kwargs: Any) -> Any:
        is_outside = isinstance(path, Path) and path == tmp_path
        return found("/proc" if is_outside else path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", mounted)
    calls = _record(monkeypatch, "fsync")

    disk.flush_names(folder)

    assert calls == ["fsync exp", "fsync runs", "fsync mount"]


def test_a_folder_above_may_be_closed_to_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "runs" / "exp").mkdir(parents=True)
    opened = os.open

    def refusing(path: Any, *args: Any, **kwargs: Any) -> int:
        if path != folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)

    disk.flush_names(folder)


@pytest.mark.proves("durable")
def test_names_behind_a_link_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere" / "runs" / "exp").mkdir(parents=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "runs").symlink_to(tmp_path / "elsewhere" / "runs")
    calls = _record(monkeypatch, "fsync")

    disk.flush_names(tmp_path / "home" / "runs" / "exp")

    assert calls[:3] == ["fsync exp", "fsync runs", "fsync elsewhere"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_folders_that_cannot_be_flushed(run_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    flush = os.fsync

    def refusing(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        flush(fd)

    monkeypatch.setattr(os, "fsync", refusing)
    with pytest.warns(ResumableWarning, match="of .* cannot flush folders: a power cut may take") as told:
        state = RunState.load(run_dir, model=torch.nn.Linear(1, 1))
    with state:
        state.save().wait()

    assert len(told) == 1
    Run(run_dir).open(1).verify()


def test_a_failed_flush_of_a_folder_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error") as failed:
        disk.flush_folder(tmp_path)

    assert failed.value.filename == str(tmp_path)


@pytest.mark.parametrize(
    ("cause", "is_proof"),
    [
        (None, True),
        (FileNotFoundError(errno.ENOENT, "missing"), True),
        (OSError(errno.ELOOP, "a link"), True),
        (OSError(errno.EIO, "unreadable"), False),
        (PermissionError(errno.EACCES, "denied"), False),
    ],
)
def test_an_unreadable_disk_is_no_proof_of_damage(cause: OSError | None, is_proof: bool) -> None:
    damaged = CheckpointDamaged("a checkpoint", fix="none")
    damaged.__cause__ = cause

    assert disk.is_proof(damaged) == is_proof


# Looking


def test_a_look_opens_nothing_and_tells_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    calls = _record(monkeypatch, "open")

    assert disk.look(tmp_path, "file").st_size == 3
    assert calls == []


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/null", path)])
def test_what_is_no_file_is_damage_at_a_look(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "file")

    with pytest.raises(CheckpointDamaged, match="file is not a regular file"):
        disk.look(tmp_path, "file")


def test_a_look_tells_missing_from_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointDamaged, match="file is missing"):
        disk.look(tmp_path, "file")

    def refuse(_: str) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "lstat", refuse)
    with pytest.raises(CannotRead, match="cannot be read: Permission denied"):
        disk.look(tmp_path, "file")


def test_what_is_damaged_in_a_run_is_said_with_the_command_that_removes_it(tmp_path: Path) -> None:
    inside = disk.damaged(tmp_path / "exp" / "checkpoints" / "000001-step-00000001", "it is torn")
    elsewhere = disk.damaged(tmp_path / "copied", "it is torn")

    assert f"resumable prune {tmp_path / 'exp'} --damaged" in inside.fix
    assert "prune" not in elsewhere.fix


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = []
    for name in ("HOME", "XDG_CACHE_HOME", "RESUMABLE_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
        if not found:
            monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
            monkeypatch.delenv("RESUMABLE_CACHE", raising=False)
        found.append(str(disk.cache().relative_to(tmp_path)))

    assert found == ["HOME/.cache/resumable", "XDG_CACHE_HOME/resumable", "RESUMABLE_CACHE"]
