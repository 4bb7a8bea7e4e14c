"""A checkpoint is committed as a whole or not at all, and every byte of it is verified."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resumable import Boundary, CannotRead, CheckpointDamaged, FormatTooNew, SaveFailed
from resumable.files import large_files
from resumable.files.large_files import Content, Way, Written
from resumable.run import checkpoint, manifest
from resumable.run.checkpoint import Checkpoint
from resumable.run.manifest import FileRecord, Manifest

FILES = {
    "state.json": b"{}",
    "model.safetensors": b"weights of the model",
    "model-frozen.safetensors": b"weights that nobody trains",
    "ranks/00000.json": b"[1, 2]",
}


def _about(number: int = 1, step: int = 10) -> Manifest:
    return Manifest(
        number=number,
        parent=None,
        run_id="a1b2",
        saved="2026-01-01T00:00:00+00:00",
        boundary=Boundary.STEP,
        epoch=0,
        batch=0,
        step=step,
        samples=0,
        metrics={},
        best=None,
        files={},
        parts={},
        built={},
        environment={},
    )


def _commit(folder: Path, number: int = 1, way: Way = "paced") -> Checkpoint:
    return checkpoint.commit(folder, _about(number), _contents(FILES), way)[0]


def _contents(files: Mapping[str, bytes], before: Mapping[str, Written] | None = None) -> dict[str, Content]:
    return {name: Content(data, None, (before or {}).get(name)) for name, data in files.items()}


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _failing(error: int) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise OSError(error, os.strerror(error))

    return fail


@pytest.mark.parametrize("way", ["paced", "plain", "direct"])
def test_what_was_committed_is_what_is_opened_and_read(tmp_path: Path, way: Way) -> None:
    committed = _commit(tmp_path, way=way)

    found = checkpoint.open_checkpoint(tmp_path / "000001-step-00000010")

    assert found == committed
    assert found.read() == FILES
    found.verify()


def test_a_checkpoint_is_its_files_and_its_manifest_and_leaves_no_stage(tmp_path: Path) -> None:
    _commit(tmp_path)

    assert os.listdir(tmp_path) == ["000001-step-00000010"]
    assert _names(tmp_path / "000001-step-00000010") == sorted([*FILES, "manifest.json", "ranks"])


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750)])
def test_all_permissions_follow_the_umask(tmp_path: Path, umask: int, file: int, folder: int) -> None:
    before = os.umask(umask)
    try:
        found = _commit(tmp_path)
    finally:
        os.umask(before)

    for path in [found.path, *found.path.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (folder if path.is_dir() else file)


def test_all_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name.partition("-")[0])
        real_fsync(fd)

    def rename(old: Path, new: Path) -> None:
        events.append("rename")
        real_rename(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    _commit(tmp_path)

    files = [Path(name).name.partition("-")[0] for name in FILES]
    assert events == [*files, "ranks", "manifest.json", ".stage", "rename", tmp_path.name.partition("-")[0]]


# What has not changed


def _in_a_row(folder: Path, count: int) -> list[Checkpoint]:
    """Return checkpoints of the same content, each one told what the one before it wrote."""
    found, written = [], {}
    for number in range(1, count + 1):
        done, written = checkpoint.commit(folder, _about(number), _contents(FILES, written))
        found.append(done)
    return found


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files of any size be shared."""
    monkeypatch.setattr(large_files, "_WORTH_A_LINK", 0)


@pytest.mark.usefixtures("links")
def test_a_file_that_has_not_changed_is_the_same_file_in_every_checkpoint(tmp_path: Path) -> None:
    found = _in_a_row(tmp_path, 3)

    for name in FILES:
        assert len({(one.path / name).stat().st_ino for one in found}) == 1
    assert len({(one.path / "manifest.json").stat().st_ino for one in found}) == 3
    assert len({str(one.about.files) for one in found}) == 1


@pytest.mark.usefixtures("links")
@pytest.mark.parametrize(
    "pruned", [s for n in range(5) for s in itertools.combinations(range(4), n)], ids=str
)
def test_pruning_some_leaves_the_others_whole(tmp_path: Path, pruned: Sequence[int]) -> None:
    found = _in_a_row(tmp_path, 4)
    for number in pruned:
        checkpoint.remove(found[number].path)

    fifth, _ = checkpoint.commit(tmp_path, _about(5), _contents(FILES, _written(found[3])))

    for one in (*(one for number, one in enumerate(found) if number not in pruned), fifth):
        assert one.read() == FILES
        one.verify()


def _written(found: Checkpoint) -> dict[str, Written]:
    return {
        name: Written(path, record.size, [bytes.fromhex(record.xxh3_128)], large_files.identity(path.stat()))
        for name, record in found.about.files.items()
        if (path := found.path / name).exists()
    }


@pytest.mark.usefixtures("links")
def test_a_failed_save_harms_no_shared_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, written = checkpoint.commit(tmp_path, _about(1), _contents(FILES))
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", _failing(errno.EIO))
        with pytest.raises(SaveFailed):
            checkpoint.commit(tmp_path, _about(2), _contents(FILES, written))

    third, _ = checkpoint.commit(tmp_path, _about(3), _contents(FILES, written))

    assert sorted(os.listdir(tmp_path)) == [first.path.name, third.path.name]
    first.verify()
    third.verify()


# Refusing


@pytest.mark.parametrize("occupy", [Path.mkdir, Path.touch], ids=["empty-folder", "file"])
def test_a_commit_refuses_an_occupied_name(tmp_path: Path, occupy: Callable[[Path], object]) -> None:
    target = tmp_path / "000001-step-00000010"
    occupy(target)

    with pytest.raises(SaveFailed, match="already exists") as caught:
        _commit(tmp_path)

    assert caught.value.__cause__ is None
    assert _names(tmp_path) == [target.name]


@pytest.mark.parametrize("name", ["_pwrite", "write"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_with_how_to_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, name: str
) -> None:
    monkeypatch.setattr(os if name == "write" else large_files, name, _failing(error))

    with pytest.raises(SaveFailed, match=r"checkpoint 1 \(step 10\) could not be written: ") as caught:
        _commit(tmp_path)

    assert os.strerror(error) in caught.value.problem
    where = "within the quota" if error == errno.EDQUOT else "on the disk"
    assert caught.value.fix.startswith(f"make room {where} of {tmp_path} ")
    assert _names(tmp_path) == []


def test_a_file_that_several_write_is_what_one_would_write(tmp_path: Path) -> None:
    whole = os.urandom(2 * large_files.BLOCK + 5)
    cuts = [(0, large_files.BLOCK), (large_files.BLOCK, len(whole))]
    stage = checkpoint.Stage(tmp_path, 1, 10)

    with stage.making(shared={"model.safetensors": len(whole)}):
        for begin, end in cuts:
            share = Content(memoryview(whole)[begin:end], begin=begin, size=len(whole))
            stage.write({"model.safetensors": share})

        assert (stage.path / "model.safetensors").read_bytes() == whole


def test_a_full_disk_that_does_not_say_what_is_free_is_named_anyway(tmp_path: Path) -> None:
    stage = checkpoint.Stage(tmp_path / "gone", 1, 10)

    error = stage.failed(OSError(errno.ENOSPC, "No space left on device"))

    assert error.problem.endswith("No space left on device. There were 0 bytes to write.")


def test_a_disk_that_takes_no_more_files_says_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_disk = SimpleNamespace(f_files=1000, f_favail=0, f_bavail=10, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: of_disk)

    error = checkpoint.Stage(tmp_path, 1, 10).failed(OSError(errno.ENOSPC, "No space left on device"))

    assert error.problem.endswith("There were 0 bytes to write, and no more files can be made on its disk.")


def test_a_broken_disk_is_not_taken_for_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", _failing(errno.EIO))

    with pytest.raises(SaveFailed, match="Input/output error") as caught:
        _commit(tmp_path)

    assert "room" not in caught.value.fix
    assert "untouched" in caught.value.fix
    assert _names(tmp_path) == []


def test_the_first_of_two_errors_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", _failing(errno.EIO))
    monkeypatch.setattr(os, "unlink", _failing(errno.EROFS))

    with pytest.raises(SaveFailed, match="Input/output error"):
        _commit(tmp_path)

    (stage,) = os.listdir(tmp_path)
    assert checkpoint.DEBRIS.fullmatch(stage)


# Damage


def test_a_manifest_of_a_newer_format_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", 7)
    found = _commit(tmp_path)
    monkeypatch.undo()

    with pytest.raises(
        FormatTooNew, match=r"step-00000010 cannot be read: it was written in format 7.*\n.*upg"
    ):
        checkpoint.open_checkpoint(found.path)


def test_every_file_is_read_as_one_that_can_be_damaged_alone(tmp_path: Path) -> None:
    found = _commit(tmp_path)
    (found.path / "model.safetensors").unlink()

    assert found.read_file("state.json") == b"{}"
    with pytest.raises(CheckpointDamaged, match=r"model\.safetensors is missing"):
        found.read()


def test_a_look_finds_what_is_missing_or_of_another_size_without_reading(tmp_path: Path) -> None:
    found = _commit(tmp_path)
    files = found.look()
    assert {name: file.st_size for name, file in files.items()} == {
        n: r.size for n, r in found.about.files.items()
    }
    assert len({checkpoint.identity(file) for file in files.values()}) == len(files)

    content = (found.path / "state.json").read_bytes()
    (found.path / "state.json").write_bytes(content + b" ")
    with pytest.raises(CheckpointDamaged, match=r"state\.json has 3 bytes, its manifest says 2"):
        found.look()
    (found.path / "state.json").unlink()
    with pytest.raises(CheckpointDamaged, match=r"state\.json is missing"):
        found.look()


@pytest.mark.parametrize("way", ["verify", "pin"])
def test_a_callback_gets_every_byte_that_is_read(tmp_path: Path, way: str) -> None:
    found, told = _commit(tmp_path), list[int]()

    getattr(found, way)(told.append)

    assert sum(told) == found.about.size


# Names and removing


@pytest.mark.parametrize(("number", "step"), [(0, 0), (41, 12400), (10**6, 10**8), (10**9, 10**12)])
def test_a_name_says_its_number_however_large(number: int, step: int) -> None:
    match = checkpoint.NAME.fullmatch(checkpoint.name(number, step))

    assert match is not None
    assert [int(group) for group in match.groups()] == [number, step]


def test_what_a_kill_left_of_a_checkpoint_is_removed(tmp_path: Path) -> None:
    found = _commit(tmp_path)
    (found.path / "ranks" / "00000.json").unlink()
    (found.path / "manifest.json").unlink()

    checkpoint.remove(found.path)

    assert _names(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["notes.txt", "ranks/notes.txt", ".hidden", "model.safetensors.bak", "Model.json"]
)
def test_a_file_that_is_not_ours_keeps_all_of_its_folder(tmp_path: Path, name: str) -> None:
    found = _commit(tmp_path)
    (found.path / name).write_text("mine")
    before = _names(tmp_path)

    assert checkpoint.unknown(found.path) == [name]
    with pytest.raises(FileExistsError, match=f"holds {name}, which is not ours"):
        checkpoint.remove(found.path)

    assert _names(tmp_path) == before


@pytest.mark.parametrize("name", ["optimizer.safetensors", "ranks/00001.json", "mine"])
def test_a_folder_is_not_ours_whatever_its_name(tmp_path: Path, name: str) -> None:
    found = _commit(tmp_path)
    (found.path / name).mkdir()
    before = _names(tmp_path)

    with pytest.raises(FileExistsError, match=f"holds {name}/, which is not ours"):
        checkpoint.remove(found.path)

    assert _names(tmp_path) == before


def test_a_link_in_place_of_the_ranks_is_not_followed_to_remove(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "00000.json").write_text("mine")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "ranks").symlink_to("../outside")

    with pytest.raises(FileExistsError, match="holds ranks, which is not ours"):
        checkpoint.remove(tmp_path / "checkpoint")

    assert (tmp_path / "outside" / "00000.json").read_text() == "mine"


@pytest.mark.parametrize("count", [1, 3])
def test_a_part_names_what_is_on_other_nodes_until_it_is_copied_here(tmp_path: Path, count: int) -> None:
    names = [f"model/shard-0000{number}-model-00001-of-00001.safetensors" for number in range(1, count + 1)]
    record = FileRecord(6, large_files.digest(b"shards"), (large_files.digest(b"shards"),))
    about = replace(_about(), elsewhere=dict.fromkeys(names, record))
    found, _ = checkpoint.commit(tmp_path, about, _contents(FILES))

    part = checkpoint.open_checkpoint(found.path)
    part.verify()
    for refused in (part.refuse_part, part.pin):
        with pytest.raises(CannotRead, match=rf"{count} of its files \({names[0]}.* are on other nodes"):
            refused()

    (found.path / "model").mkdir()
    for name in names:
        (found.path / name).write_bytes(b"shards")
    whole = checkpoint.open_checkpoint(found.path)
    whole.refuse_part()
    whole.verify()
    assert whole.pin()
