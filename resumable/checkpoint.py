"""One checkpoint: stage it, commit it, open it, verify it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from . import blocks, disk, manifest
from .blocks import Content, Way, Written
from .errors import FormatTooNew, SaveFailed
from .manifest import FILE_NAME, FileRecord, Manifest

NAME = re.compile(r"([0-9]{6,})-step-([0-9]{8,})")
"""Save number and optimizer steps. Folders with other names are not ours."""

DEBRIS = re.compile(r"\.(?:stage|trash)-[0-9]{6,}-[0-9a-f]{8}")
"""What a killed save or a killed prune leaves behind."""

_RANKS = "ranks/"


def name(number: int, step: int) -> str:
    """Return the name of a checkpoint's folder.

    >>> name(41, 12400)
    '000041-step-00012400'
    """
    return f"{number:06}-step-{step:08}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed folder, as its own manifest describes it."""

    path: Path
    about: Manifest

    def __str__(self) -> str:
        return f"checkpoint {self.about.number} (step {self.about.step}) in {self.path.parent.parent}"

    def read(self) -> dict[str, memoryview]:
        """Return the content of every file, verified in the memory that is returned."""
        return {file: self.read_file(file) for file in self.about.files}

    def read_file(self, file: str) -> memoryview:
        """Return the content of one file, verified."""
        return blocks.read(self.path, file, *self.about.files[file])

    def verify(self) -> None:
        """Raise CheckpointDamaged unless every byte is the one that was written."""
        for file, record in self.about.files.items():
            blocks.scan(self.path, file, *record)


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder; its manifest is verified, its files are not yet."""
    text = disk.read_small(path, manifest.NAME)
    try:
        return Checkpoint(path, manifest.from_json(text))
    except FormatTooNew as exc:
        raise FormatTooNew(f"{path} cannot be read: {exc.problem}", fix=exc.fix) from exc
    except ValueError as exc:
        raise disk.damaged(path, f"{manifest.NAME}: {exc}") from exc


def commit(
    folder: Path, about: Manifest, files: Mapping[str, Content], way: Way = "paced"
) -> tuple[Checkpoint, dict[str, Written]]:
    """Write the files and the manifest, flushed, and make them visible in `folder` as one checkpoint.

    Until the rename there is only a stage, which nobody reads: a crash at any
    moment leaves the checkpoint as a whole or not at all.
    """
    stage = folder / f".stage-{about.number:06}-{secrets.token_hex(4)}"
    target = folder / name(about.number, about.step)
    try:
        disk.make_folder(folder)
        os.mkdir(stage)
        written = _write_files(stage, files, way)
        about = replace(about, files={file: FileRecord(w.size, w.digest) for file, w in written.items()})
        disk.write(stage / manifest.NAME, manifest.to_json(about))
        disk.flush_folder(stage)
        disk.publish(stage, target)
    except BaseException as exc:
        # The first error is the one to report. What stays is debris; the next start removes it.
        with contextlib.suppress(OSError):
            remove(stage)
        if isinstance(exc, OSError) and not isinstance(exc, SaveFailed):
            raise _save_failed(folder, about, exc) from exc
        raise
    return Checkpoint(target, about), {file: w._replace(path=target / file) for file, w in written.items()}


def _write_files(stage: Path, files: Mapping[str, Content], way: Way) -> dict[str, Written]:
    subfolders = {(stage / file).parent for file in files} - {stage}
    for subfolder in subfolders:
        os.mkdir(subfolder)
    written = {file: blocks.put(stage / file, content, way) for file, content in files.items()}
    for subfolder in subfolders:
        disk.flush_folder(subfolder)
    return written


def _save_failed(folder: Path, about: Manifest, cause: OSError) -> SaveFailed:
    advice = "mend the cause and call save() again"
    if cause.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = f"make room on the disk of {folder} and call save() again, or keep fewer (keep=)"
    return SaveFailed(
        f"checkpoint {about.number} (step {about.step}) could not be written: {cause}.",
        fix=f"{advice}. The checkpoints before it are untouched.",
    )


def remove(folder: Path) -> None:
    """Remove a folder of ours; OSError, and nothing is removed, if it holds anything else."""
    if others := unknown(folder):
        raise FileExistsError(f"{folder} holds {', '.join(others)}, which is not ours")
    disk.remove(folder, _entries(folder))


def unknown(folder: Path) -> list[str]:
    """Return the names in a checkpoint's folder that this library did not write."""
    return [n for n in _entries(folder) if n != _RANKS and not FILE_NAME.fullmatch(n)]


def _entries(folder: Path) -> list[str]:
    found = sorted(_names(folder))
    return [*found, *(f"{_RANKS}{name}" for name in _names(folder / _RANKS))] if _RANKS in found else found


def _names(folder: Path) -> list[str]:
    # With a slash, so that a folder with the name of a file of ours is not taken for that file.
    return [f"{e.name}/" if e.is_dir(follow_symlinks=False) else e.name for e in os.scandir(folder)]
