"""Collects operations without a deterministic implementation, as torch itself names them."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

import torch

_REFUSED = re.compile(r"^(\S+) does not have a deterministic implementation")


def watch() -> list[str]:
    """Have torch warn of them from now on; return the list to which each is added with its line."""
    names: list[str] = []
    show = warnings.showwarning

    def showwarning(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if met := _REFUSED.match(str(message)):
            name = f"{met[1]} ({os.path.basename(filename)}:{lineno})"
            if name not in names:
                names.append(name)
        else:
            show(message, category, filename, lineno, *rest)

    # A script that turns warnings into errors should not fail here.
    warnings.filterwarnings("always", message=".*does not have a deterministic implementation")
    warnings.showwarning = showwarning  # type: ignore[assignment]
    torch.use_deterministic_algorithms(True, warn_only=True)
    return names
