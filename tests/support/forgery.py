"""Checkpoints that somebody has changed who knows the format: what it checks by itself fits again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from resumable.files import large_files
from resumable.run import manifest
from resumable.run.checkpoint import Checkpoint


def forge(found: Checkpoint, change: Callable[[bytes], bytes], file: str = "model.safetensors") -> None:
    """Change a file of a checkpoint, and its manifest to fit."""
    content = change((found.path / file).read_bytes())
    (found.path / file).write_bytes(content)
    view, size = memoryview(content), large_files.BLOCK
    digests = [large_files.digest(view[at : at + size]) for at in range(0, len(content), size)]
    blocks = tuple(digests) if found.about.files[file].blocks else ()
    record = manifest.FileRecord(len(content), large_files.digest(content), blocks)
    about = replace(found.about, files={**found.about.files, file: record})
    (found.path / manifest.NAME).write_bytes(manifest.to_json(about))


def flip_last(content: bytes) -> bytes:
    """Return another content of the same size."""
    return content[:-1] + bytes([content[-1] ^ 1])
