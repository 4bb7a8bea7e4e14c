"""Pulls a checkpoint of a remote into a run: verified while it arrives, and then committed."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from ..errors import CheckpointDamaged, ResumableError, SaveFailed
from ..files import disk, file_reader, large_files
from ..run import manifest
from ..run.checkpoint import Checkpoint, Stage
from ..run.directory import Run
from ..run.manifest import FileRecord, Manifest
from ..run.policy import bytes_of
from . import filesystem
from .deadline import Moved
from .run_copy import FOLDER, Remote


def pull(remote: Remote, name: str, run: Run, moved: Moved) -> Checkpoint:
    """Copy a checkpoint into a run that this process writes; return it when it is durable.

    A damaged one of that name here is replaced. Files that an interrupted pull has fetched are not fetched
    again.
    """
    about, text = look(remote, name)
    stage = Stage(run.folder, about.number, about.step, large_files.digest(text)[:8], kind="pull")
    _check_room(remote, name, about, run, stage.path)
    run.remove_pulls(but=stage.path)
    try:
        disk.make_folder(run.folder)
        stage.path.mkdir(exist_ok=True)
        for file, record in about.files.items():
            _bring(remote, name, stage.path, file, record, moved)
        stage.flush()
        # Not replace(): a kill in it would leave a file in the checkpoint for good.
        (stage.path / manifest.NAME).unlink(missing_ok=True)
        disk.write(stage.path / manifest.NAME, text)
        return run.take_in(stage, about)
    except OSError as exc:
        if isinstance(exc, ResumableError):
            raise
        raise SaveFailed(
            f"{remote}/{FOLDER}/{name} could not be written to {run}: {exc}.",
            fix="mend the cause (room on the disk, permissions) and start again: it continues from there.",
        ) from exc


def adopt(run: Run, run_id: str) -> None:
    """Give a run that has no checkpoint, and that this process writes, the id of the remote's run."""
    if run.identity(run_id) != run_id:
        # The id of a start that has saved nothing.
        run.adopt(run_id)


def look(remote: Remote, name: str) -> tuple[Manifest, bytes]:
    """Return the manifest of a checkpoint there; CheckpointDamaged if a file is missing or cut short."""
    about, text = remote.about(name)
    if (known := remote.run_id()) not in (None, about.run_id):
        raise remote.damaged(name, f"it is of another run ({about.run_id}) than the others ({known})")
    there = remote.store.sizes(f"{FOLDER}/{name}")
    for file, record in about.files.items():
        if file not in there:
            raise remote.damaged(name, f"{file} is missing")
        if there[file] != record.size:
            raise remote.damaged(name, f"{file} has {there[file]:,} bytes, its manifest says {record.size:,}")
    return about, text


def _check_room(remote: Remote, name: str, about: Manifest, run: Run, stage: Path) -> None:
    # Files that are here already take no more room.
    sizes = {file: record.size for file, record in about.files.items()}
    here = sum(
        size
        for file, size in sizes.items()
        if any(_size(folder / file) == size for folder in (stage, stage.parent / name))
    )
    if (free := shutil.disk_usage(run.path).free) < about.size - here:
        raise SaveFailed(
            f"{remote}/{FOLDER}/{name} takes {bytes_of(about.size)}; {bytes_of(free)} are free for {run}.",
            fix="make room there, or give a run directory on a larger disk.",
        )


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


def _bring(remote: Remote, name: str, stage: Path, file: str, record: FileRecord, moved: Moved) -> None:
    path = stage / file
    path.parent.mkdir(exist_ok=True)
    with contextlib.suppress(OSError):
        # A disk with only a part of the checkpoint needs only the rest.
        os.link(stage.parent / name / file, path)
    if path.exists():
        with contextlib.suppress(CheckpointDamaged):
            file_reader.scan(stage, file, record.size, record.xxh3_128)
            # The pull that fetched it may have been killed before the flush.
            with disk.joined(path):
                moved(record.size)
            return
        os.unlink(path)
    try:
        _fetch(remote, name, path, file, record, moved)
    except CheckpointDamaged:
        # A bit flipped on the way will not flip twice; an older checkpoint would cost training.
        moved(-record.size)
        _fetch(remote, name, path, file, record, moved)


def _fetch(remote: Remote, name: str, path: Path, file: str, record: FileRecord, moved: Moved) -> None:
    source = f"{FOLDER}/{name}/{file}"

    def read(begin: int, end: int) -> bytes:
        piece = remote.store.read_range(source, begin, end)
        moved(len(piece))
        return piece

    found = large_files.receive(path, record.size, read, filesystem.PIECE, remote.store.at_once)
    if found != record.xxh3_128:
        os.unlink(path)
        raise remote.damaged(name, f"{file} has the digest {found}, its manifest says {record.xxh3_128}")
