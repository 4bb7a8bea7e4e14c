"""The environment of this process: versions, devices, flags, git."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..version import __version__


def describe() -> dict[str, Any]:
    """Return the versions, devices and flags that numerical results depend on, as JSON.

    Devices that the process has not used yet are not asked: that would create a context on them.
    """
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        # Text: torch compares its own kind of version with care, in 0.3 ms.
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if started else None,  # type: ignore[no-untyped-call]
        "driver": driver() if started else None,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if started else [],
        **flags(),
        "git": _git_commit(_script_folder()),
    }


def flags() -> dict[str, Any]:
    """Return the settings of torch that numerical results depend on, as JSON, without touching a device.

    >>> flags()["cudnn_benchmark"]
    False
    """
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32": _tf32(),
        "cudnn_tf32": _cudnn_tf32(),
    }


def _tf32() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # If a script has used the newer settings, torch refuses to read the older ones.
        return str(torch.backends.cuda.matmul.fp32_precision)


def _cudnn_tf32() -> bool | str:
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return str(torch.backends.cudnn.conv.fp32_precision)  # type: ignore[attr-defined]


@cache
def driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """Return the version of NVIDIA's driver; torch would have to make a context to get it."""
    with contextlib.suppress(OSError):
        found = re.search(r"NVRM version:.*?\s([0-9]+\.[0-9.]+)\s", file.read_text(errors="replace"))
        return found and found[1]
    return None


def attempt() -> dict[str, Any]:
    """Return which process this is, of which program and with which versions, as JSON.

    >>> sorted(attempt())
    ['argv', 'boot', 'dirty', 'git', 'host', 'pid', 'versions']
    """
    folder = _script_folder()
    commit = _git_commit(folder)
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "argv": [*sys.argv],
        "git": commit,
        "dirty": commit and _is_dirty(folder),
        "boot": _boot_id(),
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "resumable": __version__,
        },
    }


def _boot_id(file: Path = Path("/proc/sys/kernel/random/boot_id")) -> str | None:
    with contextlib.suppress(OSError):
        return file.read_text().strip()
    return None


def _script_folder() -> Path:
    return _folder_of(sys.argv[0] or ".")


@cache
def _folder_of(script: str) -> Path:
    """Return the folder at the first look: the script may go to another one, and its name may be relative."""
    return Path(script).resolve().parent


@cache
def _is_dirty(folder: Path, seconds: float = 2) -> bool | None:
    """Return whether files that git tracks have changed; None if git does not answer in time."""
    command = ["git", "status", "--porcelain", "--untracked-files=no"]
    # Without the lock of the index: a commit by the user would fail meanwhile.
    settings = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(
            command,
            cwd=folder,
            env=settings,
            timeout=seconds,
            check=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        return bool(found.stdout)
    return None


@cache
def _git_commit(folder: Path) -> str | None:
    """Return the commit at the first look: the process runs that code, whatever is committed later."""
    # Only a note for people: an unusual repository must not stop a save.
    with contextlib.suppress(OSError, ValueError):
        if git := _git_folder(folder):
            head = (git / "HEAD").read_text().strip()
            return _commit_of(git, head.removeprefix("ref: ")) if head.startswith("ref: ") else head
    return None


def _git_folder(folder: Path) -> Path | None:
    for parent in (folder, *folder.parents):
        git = parent / ".git"
        if git.is_file():  # in a worktree or a submodule
            return parent / git.read_text().strip().removeprefix("gitdir: ")
        if git.is_dir():
            return git
    return None


def _commit_of(git: Path, branch: str) -> str | None:
    common = git
    # A worktree has a HEAD of its own, and the branches of the repository.
    with contextlib.suppress(FileNotFoundError):
        common = git / (git / "commondir").read_text().strip()
    with contextlib.suppress(FileNotFoundError):
        return (common / branch).read_text().strip()
    packed = (line.split() for line in (common / "packed-refs").read_text().splitlines())
    return next((words[0] for words in packed if words[1:] == [branch]), None)
