"""The commands that show the way: demo, help, completion."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

from ..errors import UsageError
from . import completion
from .command import add, add_json, print_json


def declare(commands: Any) -> None:
    """Declare the command."""
    summary = "kill a training twice and show that it ends with the same bits"
    sub = add(commands, "demo", _demo, summary, "resumable demo")
    sub.add_argument("--dir", type=Path, help="a new folder that keeps the two runs")
    add_json(sub)
    summary = "the help of all commands, or of one"
    sub = add(commands, "help", _help, summary, "resumable help ls")
    sub.add_argument("of", metavar="COMMAND", nargs="?", help="the command; default: all of them")
    _declare_completion(commands)


def _declare_completion(commands: Any) -> None:
    summary = "completion of commands, flags and runs for bash, zsh or fish"
    sub = add(commands, "completion", _completion, summary, "resumable completion bash >> ~/.bashrc")
    sub.add_argument("shell", metavar="SHELL", choices=[*completion.SCRIPTS], help="bash, zsh or fish")
    sub.description = f"{sub.description}\n\n{_WHERE}"


_WHERE = """Prints what the shell has to read when it starts:
  bash  resumable completion bash >> ~/.bashrc
  zsh   resumable completion zsh >> ~/.zshrc   (below compinit)
  fish  resumable completion fish > ~/.config/fish/completions/resumable.fish"""


def _help(given: argparse.Namespace) -> int:
    # The line `resumable help ls` has become `resumable ls --help` before.
    raise AssertionError("unreachable")


def _completion(given: argparse.Namespace) -> int:
    print(completion.SCRIPTS[given.shell], end="")
    return 0


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
