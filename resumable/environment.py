"""What this process runs on."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch


def describe() -> dict[str, Any]:
    """Return the versions, devices and flags that numerical results depend on, as JSON.

    Devices that the process has not used yet are not asked: that would create a context on them.
    """
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if started else None,  # type: ignore[no-untyped-call]
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if started else [],
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "tf32": _tf32(),
        "git": _git_commit(Path(sys.argv[0] or ".").resolve().parent),
    }


def _tf32() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        # Where a script has used the newer settings, torch refuses to answer by the older.
        return str(torch.backends.cuda.matmul.fp32_precision)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what numerical results depend on and is not as it was, as far as both sides know it.

    >>> differences({"torch": "2.12.0", "git": "a"}, {"torch": "2.13.0", "git": "b"})
    ['torch was 2.12.0 and is 2.13.0 now']
    """
    return [
        f"{key} was {then[key]} and is {now[key]} now"
        for key in now
        if key != "git" and _is_known(then.get(key)) and _is_known(now[key]) and then[key] != now[key]
    ]


def _is_known(value: Any) -> bool:
    # False is a flag's value; None, and no GPUs, are all that a process knows that has not used any.
    return value is not None and value != []


def _git_commit(folder: Path) -> str | None:
    # A note for people: an odd repository must not stop a save.
    with contextlib.suppress(OSError, ValueError):
        for parent in (folder, *folder.parents):
            if (git := parent / ".git").is_dir():
                head = (git / "HEAD").read_text().strip()
                if not head.startswith("ref: "):
                    return head
                return (git / head.removeprefix("ref: ")).read_text().strip()
    return None
