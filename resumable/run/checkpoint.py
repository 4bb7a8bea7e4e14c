"""One checkpoint: stage, commit, open and verify it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CannotRead, FormatTooNew, ResumableError, SaveFailed
from ..files import block_queue, disk, file_reader, large_files, safetensors_header
from ..files.file_reader import Lane, Target
from ..files.large_files import Content, Way, Written
from ..files.pin import Pin
from . import manifest
from .manifest import FILE_NAME, FileRecord, Manifest

if TYPE_CHECKING:
    from ..progress import Told

NAME = re.compile(r"([0-9]{6,15})-step-([0-9]{8,})")
"""The save number and the optimizer steps. Folders with other names are not ours."""

HIGHEST = 10**15 - 1
"""The highest save number that a name has room for."""

DEBRIS = re.compile(r"\.(?:stage|trash)-[0-9]{6,}-[0-9a-f]{8}")
"""Folders that a killed save or a killed prune leaves behind."""

PULL = re.compile(r"\.pull-[0-9]{6,}-[0-9a-f]{8}")
"""Folders that a killed pull leaves behind, and the next pull completes."""

RANKS = "ranks/"
"""The folder in a checkpoint for the state that differs between processes."""

FOLDERS = (RANKS, "model/", "optimizer/", "extra/")
"""The folders in a checkpoint; in the others each process writes its boxes of sharded tensors."""

_MOST_HEADERS = 64 << 10  # longer than those of most models


def name(number: int, step: int) -> str:
    """Return the name of a checkpoint's folder.

    >>> name(41, 12400)
    '000041-step-00012400'
    """
    return f"{number:06}-step-{step:08}"


class IsElsewhere(CannotRead):
    """A part of a checkpoint is needed that lies on another disk."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed folder, as its own manifest describes it."""

    path: Path
    """The folder."""
    about: Manifest
    """Its manifest: number, parent, epoch, batch, step, samples, metrics, best, files, environment, ..."""

    def __str__(self) -> str:
        return f"checkpoint {self.about.number} (step {self.about.step}) in {self.path.parent.parent}"

    def read(self) -> dict[str, memoryview]:
        """Return the content of every file, verified in the memory that is returned."""
        return {file: self.read_file(file) for file in self.about.files}

    def read_file(self, file: str, pin: Pin | None = None) -> memoryview:
        """Return the content of one file, verified."""
        return file_reader.read(
            self.path, file, *self.about.files[file][:2], also=pin.file(file) if pin else None
        )

    def read_header(self, file: str) -> memoryview:
        """Return the header of a file with tensors, not verified."""
        size = self.about.files[file].size
        start = file_reader.read_start(self.path, file, size, _MOST_HEADERS)
        end = safetensors_header.header_size(start, size)
        return start[:end] if end <= len(start) else file_reader.read_start(self.path, file, size, end)

    def verify(self, told: Told | None = None) -> None:
        """Raise CheckpointDamaged unless every byte is as it was written.

        Args:
            told: A function that is called with the number of bytes of each read, by any thread.
        """
        for file in self.about.files:
            self.scan_file(file, told=told)

    def scan_file(self, file: str, pin: Pin | None = None, told: Told | None = None) -> None:
        """Raise CheckpointDamaged unless every byte of one file is as it was written."""
        size, digest, _ = self.about.files[file]
        targets = [Target(0, size, None, partial(_tell, told))] if told else []
        also = pin.file(file) if pin else None
        file_reader.scan(self.path, file, size, digest, targets, also=also)

    def refuse_part(self) -> None:
        """Raise IsElsewhere if some of its files lie on other disks."""
        if self.about.elsewhere:
            few, more = sorted(self.about.elsewhere)[:2], ", ..." if len(self.about.elsewhere) > 2 else ""
            raise IsElsewhere(
                f"only a part of {self} is on this disk: {len(self.about.elsewhere)} of its files "
                f"({', '.join(few)}{more}) are on other nodes.",
                fix=f"copy what other nodes have in {self.path.name} into {self.path}, or take all from the "
                "remote: with remote= in the training, or `resumable pull`.",
                command=f"copy what other nodes have in {self.path.name} into {self.path}, or take all from "
                "the remote: resumable pull RUN REMOTE.",
            )

    def look(self) -> dict[str, os.stat_result]:
        """Return the stat of each file; CheckpointDamaged if one is missing or has another size.

        Nothing is read: only `verify` detects changed bytes.
        """
        found = {file: disk.look(self.path, file) for file in self.about.files}
        for file, (size, *_) in self.about.files.items():
            if (there := found[file].st_size) != size:
                raise disk.damaged(self.path, f"{file} has {there:,} bytes, its manifest says {size:,}")
        return found

    def pin(self, told: Told | None = None) -> str:
        """Return a hash of all of its content, verified, to pass as `expect=` where it is loaded.

        The digests in the manifest detect accidental changes; this one cannot be forged. It is the
        SHA-256 of a line for each file, the manifest too, as `sha256sum` prints it, sorted by name.

        Args:
            told: As in `verify()`.
        """
        pin = self.begin_pin()
        for file in self.about.files:
            self.scan_file(file, pin, told)
        return str(pin)

    def begin_pin(self) -> Pin:
        """Return a pin that has been fed the manifest."""
        self.refuse_part()
        pin = Pin()
        text = disk.read_small(self.path, manifest.NAME)
        pin.file(manifest.NAME).update(text)
        # The manifest may have been replaced since it was opened.
        there = _parsed(self.path, text)
        if manifest.to_json(self.about) not in (manifest.to_json(there), manifest.to_json(there.whole())):
            raise disk.damaged(self.path, f"{manifest.NAME} has changed since it was opened")
        return pin


def identity(found: os.stat_result) -> tuple[int, int]:
    """Return the identity of a file, the same for all of its hard links."""
    return found.st_dev, found.st_ino


def _tell(told: Told, lane: Lane, at: int, piece: memoryview) -> None:
    told(piece.nbytes)


def open_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a folder; only its manifest is verified.

    It is a whole one, too, if the files of other disks were copied into the folder.
    """
    about = _parsed(path, disk.read_small(path, manifest.NAME))
    if about.elsewhere and all((path / file).exists() for file in about.elsewhere):
        about = about.whole()
    return Checkpoint(path, about)


def _parsed(path: Path, text: bytes) -> Manifest:
    try:
        return manifest.from_json(text)
    except FormatTooNew as exc:
        raise FormatTooNew(f"{path} cannot be read: {exc.problem}", fix=exc.fix) from exc
    except ValueError as exc:
        raise disk.damaged(path, f"{manifest.NAME}: {exc}") from exc


def commit(
    folder: Path, about: Manifest, files: Mapping[str, Content], way: Way = "paced"
) -> tuple[Checkpoint, dict[str, Written]]:
    """Write the files and the manifest, flushed, and publish them in `folder` as a checkpoint."""
    stage = Stage(folder, about.number, about.step)
    with stage.making():
        written = stage.write(files, way)
        about = stage.close(about, {file: FileRecord(w.size, w.digest) for file, w in written.items()})
        return stage.publish(about), stage.published(written)


class Stage:
    """A checkpoint that one or several processes are writing; it is not read before it is published.

    A crash at any moment leaves the checkpoint as a whole or not at all.
    """

    def __init__(
        self, folder: Path, number: int, step: int, token: str | None = None, kind: str = "stage"
    ) -> None:
        self._folder = folder
        self._number, self._step = number, step
        self.path = folder / f".{kind}-{number:06}-{token or os.urandom(4).hex()}"
        self.target = folder / name(number, step)
        self._size = 0

    @contextlib.contextmanager
    def making(self, shared: Mapping[str, int] | None = None) -> Iterator[None]:
        """Make the folder, and remove it if the body fails; several processes write the `shared` files."""
        try:
            disk.make_folder(self._folder)
            os.mkdir(self.path)
            for file, size in (shared or {}).items():
                large_files.create(self.path / file, size)
            yield
        except BaseException as exc:
            self.remove()
            if isinstance(exc, OSError) and not isinstance(exc, ResumableError):
                raise self.failed(exc) from exc
            raise

    def remove(self) -> None:
        """Remove what was written so far, as far as possible."""
        # The first error is the one to report; the next start removes what stays.
        with contextlib.suppress(OSError):
            remove(self.path)

    def failed(self, cause: OSError) -> SaveFailed:
        """Turn a disk error into a SaveFailed with advice."""
        advice, known = "mend the cause and call save() again", ""
        if cause.errno in (errno.ENOSPC, errno.EDQUOT):
            is_quota = cause.errno == errno.EDQUOT
            known = f" There were {self._size:,} bytes to write{'' if is_quota else _free(self._folder)}."
            where = f"{'within the quota' if is_quota else 'on the disk'} of {self._folder}"
            advice = f"make room {where} and call save() again, or keep fewer (keep=)"
        return SaveFailed(
            f"checkpoint {self._number} (step {self._step}) could not be written: {cause}.{known}",
            fix=f"{advice}. The checkpoints before it are untouched.",
        )

    def write(self, files: Mapping[str, Content], way: Way = "paced") -> dict[str, Written]:
        """Write files, or link the unchanged ones of the last save, flushed."""
        self._size += sum([content.data.nbytes for content in files.values()])
        for folder in dict.fromkeys((self.path / file).parent for file in files):
            if not folder.is_dir():
                # Another process may have made it first.
                folder.mkdir(exist_ok=True)
        # A small file may be complete only with the last tensor: in front, it would hold up the large ones.
        small_last = sorted(files, key=lambda file: files[file].data.nbytes < large_files.BLOCK)
        return block_queue.write(self.path, {file: files[file] for file in small_last}, way)

    def flush(self) -> None:
        """Make the names in the folders of the stage durable."""
        for folder in FOLDERS:
            if (self.path / folder).is_dir():
                disk.flush_folder(self.path / folder)

    def close(self, about: Manifest, records: Mapping[str, FileRecord]) -> Manifest:
        """Write the manifest, once all files are there and flushed."""
        about = replace(about, files=dict(records))
        self.flush()
        disk.write(self.path / manifest.NAME, manifest.to_json(about))
        disk.flush_folder(self.path)
        return about

    def publish(self, about: Manifest) -> Checkpoint:
        """Give it its final name: this is the commit."""
        disk.publish(self.path, self.target)
        return Checkpoint(self.target, about)

    def published(self, written: Mapping[str, Written]) -> dict[str, Written]:
        """Return the files at their final place."""
        return {file: one._replace(path=self.target / file) for file, one in written.items()}


def _free(folder: Path) -> str:
    with contextlib.suppress(OSError, AttributeError):  # Windows has no statvfs
        found = os.statvfs(folder)
        # Some file systems do not count files, and report 0.
        if found.f_files and not found.f_favail:
            return ", and no more files can be made on its disk"
        return f", and {found.f_bavail * found.f_frsize:,} are free"
    return ""


def remove(folder: Path) -> None:
    """Remove a folder of ours; OSError, and nothing is removed, if it holds anything else."""
    if others := unknown(folder):
        raise FileExistsError(f"{folder} holds {', '.join(others)}, which is not ours")
    disk.remove(folder, _entries(folder))


def unknown(folder: Path) -> list[str]:
    """Return the names in a checkpoint's folder that this library has not written."""
    return [n for n in _entries(folder) if n not in FOLDERS and not FILE_NAME.fullmatch(n)]


def _entries(folder: Path) -> list[str]:
    found = sorted(_names(folder))
    there = [name for name in FOLDERS if name in found]
    return [*found, *(f"{name}{file}" for name in there for file in _names(folder / name))]


def _names(folder: Path) -> list[str]:
    # With a slash, so that a folder is not taken for a file of the same name.
    return [f"{e.name}/" if e.is_dir(follow_symlinks=False) else e.name for e in os.scandir(folder)]
