"""Brings checkpoints of a remote folder into a run: verified while they come, and then committed."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import CheckpointDamaged, RemoteError, SaveFailed
from ..files import disk, large_files
from ..run import manifest
from ..run.checkpoint import Checkpoint, Stage
from ..run.directory import Run
from ..run.manifest import FileRecord, Manifest
from ..run.policy import bytes_of
from .deadline import Moved
from .filesystem import PIECE
from .run_copy import FOLDER, Remote
from .storage import AT_ONCE, Store

T = TypeVar("T")


def pull(remote: Remote, name: str, run: Run, moved: Moved) -> Checkpoint:
    """Copy a checkpoint into a run, which this process writes; return it when it is durable.

    One of that name that is here, and is damaged, is replaced. What a pull that was ended has brought
    is not brought again.
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
        # Not replace(): what a kill left of that would be in the checkpoint for good.
        (stage.path / manifest.NAME).unlink(missing_ok=True)
        disk.write(stage.path / manifest.NAME, text)
    except OSError as exc:
        if isinstance(exc, RemoteError):
            raise
        raise SaveFailed(
            f"{remote}/{FOLDER}/{name} could not be written to {run}: {exc}.",
            fix="mend the cause (room on the disk, permissions) and start again: it goes on from there.",
        ) from exc
    return run.take_in(stage, about)


def adopt(run: Run, run_id: str) -> None:
    """Make a run that has no checkpoint, and that this process writes, the one of that id."""
    if run.identity(run_id) != run_id:
        # Of a start that has saved nothing.
        run.adopt(run_id)


def look(remote: Remote, name: str) -> tuple[Manifest, bytes]:
    """Return what a checkpoint there says about itself, and the text; CheckpointDamaged if files lack."""
    about, text = remote.about(name)
    if (known := remote.run_id()) not in (None, about.run_id):
        raise remote.damaged(name, f"it is of another run ({about.run_id}) than the others ({known})")
    _check_sizes(remote, name, about)
    return about, text


def _check_sizes(remote: Remote, name: str, about: Manifest) -> None:
    there = remote.store.sizes(f"{FOLDER}/{name}")
    for file, record in about.files.items():
        if file not in there:
            raise remote.damaged(name, f"{file} is missing")
        if there[file] != record.size:
            raise remote.damaged(name, f"{file} has {there[file]:,} bytes, its manifest says {record.size:,}")


def _check_room(remote: Remote, name: str, about: Manifest, run: Run, stage: Path) -> None:
    # (of what is there already the files take what they take)
    here = sum((stage / file).stat().st_size for file in about.files if (stage / file).exists())
    if (free := shutil.disk_usage(run.path).free) < about.size - here:
        raise SaveFailed(
            f"{remote}/{FOLDER}/{name} takes {bytes_of(about.size)}; {bytes_of(free)} are free for {run}.",
            fix="make room there, or give a run directory on a larger disk.",
        )


def _bring(remote: Remote, name: str, stage: Path, file: str, record: FileRecord, moved: Moved) -> None:
    path = stage / file
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        with contextlib.suppress(CheckpointDamaged):
            large_files.scan(stage, file, *record)
            # Who brought it may have been killed before it was flushed.
            with disk.joined(path):
                moved(record.size)
            return
        os.unlink(path)
    try:
        _fetch(remote, name, stage, file, record, moved)
    except CheckpointDamaged:
        # What turns a bit over on the way does not do so twice; an older checkpoint is training that is lost.
        moved(-record.size)
        _fetch(remote, name, stage, file, record, moved)


def _fetch(remote: Remote, name: str, stage: Path, file: str, record: FileRecord, moved: Moved) -> None:
    path, source = stage / file, f"{FOLDER}/{name}/{file}"
    if remote.store.can_read_ranges():

        def read(begin: int, end: int) -> bytes | memoryview:
            piece = remote.store.read_range(source, begin, end)
            moved(len(piece))
            return piece

        found = large_files.receive(path, record.size, read, PIECE, AT_ONCE)
        if found != record.xxh3_128:
            os.unlink(path)
            raise remote.damaged(name, f"{file} has the digest {found}, its manifest says {record.xxh3_128}")
        return
    remote.store.fetch(source, path, record.size, moved)
    try:
        large_files.scan(stage, file, *record)
    except CheckpointDamaged as exc:
        os.unlink(path)
        raise remote.damaged(name, exc.problem.partition("damaged: ")[2].rstrip(".")) from exc
    with disk.joined(path):
        pass


def attended(store: Store, job: Callable[[], T]) -> T:
    """Return what a job with a store returns. Who interrupts it does not wait for what hangs.

    >>> attended(Store("memory://exp"), lambda: 3)
    3
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            answers.append(job())
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=work, name="resumable-attended", daemon=True)
    try:
        thread.start()
        thread.join()
    except KeyboardInterrupt:
        store.abandon()
        # It takes its bar off the terminal, and lets go of the run (if it has begun at all).
        with contextlib.suppress(RuntimeError):
            thread.join(_TO_LEAVE)
        raise
    if errors:
        raise errors[0]
    return answers[0]


_TO_LEAVE = 5.0
