"""The command that demonstrates the library: demo."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from ..errors import UsageError
from .command import add, add_json, print_json


def declare(commands: Any) -> None:
    """Declare the command."""
    summary = "kill a training twice and show that it ends with the same bits"
    sub = add(commands, "demo", _demo, summary, "resumable demo")
    sub.add_argument("--dir", type=Path, help="a new folder that keeps the two runs")
    add_json(sub)


def _demo(given: argparse.Namespace) -> int:
    # Imported here, because torch takes seconds to import.
    from . import demo

    if given.dir and given.dir.exists():
        raise UsageError(f"{given.dir} exists already.", fix="name a folder that does not exist yet.")
    with contextlib.redirect_stdout(sys.stderr if given.json else sys.stdout):
        digests = demo.show(given.dir)
    is_equal = digests.straight == digests.killed
    if given.json:
        print_json({**digests._asdict(), "equal": is_equal, "dir": given.dir and str(given.dir)})
    return 0 if is_equal else 1
