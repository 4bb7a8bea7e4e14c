"""The machine and the versions that figures belong to."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from .contenders import CONTENDERS


def describe(folder: Path, device: str) -> dict[str, str]:
    """Return what a reader has to know of the machine."""
    about = {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB",
        "disk": _file_system(folder),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(_versions()),
    }
    if device == "cuda":
        about["gpu"] = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    return about


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    under = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    device, _, kind, *_ = max(under, key=lambda mount: len(mount[1]))
    return f"{kind} on {device}"


def _versions() -> list[str]:
    found = []
    for distribution in dict.fromkeys(contender.distribution for contender in CONTENDERS.values()):
        try:
            found.append(f"{distribution} {metadata.version(distribution)}")
        except metadata.PackageNotFoundError:
            continue
    return found
