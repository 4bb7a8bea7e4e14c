"""The commands that show what this is about: demo."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .command import add
from .errors import UsageError


def declare(commands: Any) -> None:
    """Declare them."""
    summary = "a training is killed twice and ends the same"
    sub = add(commands, "demo", _demo, summary, "resumable demo")
    sub.add_argument("--dir", type=Path, help="a folder to keep the two runs in, to look at them")


def _demo(given: argparse.Namespace) -> int:
    # The only command that needs torch, which takes seconds to import.
    from . import demo

    if given.dir and given.dir.exists():
        raise UsageError(f"{given.dir} exists already.", fix="name a folder that does not exist yet.")
    return demo.main(given.dir)
