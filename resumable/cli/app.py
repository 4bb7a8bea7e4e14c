"""Parse, call one function, choose the exit code; nothing else."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from ..errors import ResumableError, ResumableWarning, UsageError
from ..terminal import TERMINAL, is_terminal
from ..version import __version__
from ..views import tables
from .command import CODES, EXIT_CODES, sub_of

_GROUPS = {
    "look": ("ls", "show", "diff", "report"),
    "trust": ("verify", "audit"),
    "move": ("push", "pull", "export"),
    "tidy": ("prune",),
    "tour": ("demo", "help", "completion"),
}
"""The commands that each of the modules `look`, `trust`, ... declares."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = sys.argv[1:] if arguments is None else [*arguments]
    if not words or (words[0] == "help" and words[1:2] not in (["-h"], ["--help"])):
        words = [*words[1:2], "--help"]
    if words[:1] == ["__complete"]:
        from . import completion

        for found in completion.candidates(words[1:], parser(next(iter(words[2:3]), None)), _names()):
            print(found)
        return 0
    _remove_rows()
    if problem := _unknown(words):
        print(tables.error_text(f"resumable: {problem}"), file=sys.stderr)
        return CODES[UsageError]
    given = _parsed(words)
    with warnings.catch_warnings():
        warnings.simplefilter("always", ResumableWarning)
        warnings.showwarning = partial(_print_warning, warnings.showwarning)
        return _run_command(given)


def _remove_rows() -> None:
    """Remove the rows that a killed training has left, if this command was typed at a prompt."""
    # A command that a training starts is in its process group: the rows are in use.
    if is_terminal() and sys.stdout.isatty() and os.getpgrp() == os.getpid():
        TERMINAL.recover()


def _names() -> list[str]:
    return [name for group in _GROUPS.values() for name in group]


def _unknown(words: Sequence[str]) -> UsageError | None:
    """Return the error for a command that does not exist."""
    if words[0].startswith("-") or words[0] in _names():
        return None
    similar = difflib.get_close_matches(words[0], _names(), n=1)
    meant = f" Did you mean {similar[0]}?" if similar else ""
    return UsageError(f"there is no command {words[0]!r}.{meant}", fix="`resumable help` lists them.")


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    top = parser(words[0])
    given, unknown = top.parse_known_args(words)
    if unknown:
        sub = sub_of(top, words[0])
        flags = [flag for action in sub._actions for flag in action.option_strings]
        misspelt = [word for word in unknown if word.startswith("--")]
        near = [flag for word in misspelt for flag in difflib.get_close_matches(word, flags, n=1)]
        meant = f". Did you mean {' '.join(near)}?" if near else ""
        sub.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    return given


def _run_command(given: argparse.Namespace) -> int:
    try:
        code = int(given.command(given))
        # Flush here: at exit Python would turn a closed pipe into an error.
        sys.stdout.flush()
        return code
    except ResumableError as exc:
        print(tables.error_text(f"resumable: {exc.problem}\nFix: {exc.command}"), file=sys.stderr)
        return next((code for kind, code in CODES.items() if isinstance(exc, kind)), 1)
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe: discard the rest of the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _print_warning(
    before: Callable[..., None], text: Warning | str, kind: type[Warning], *place: Any
) -> None:
    # The library's line number does not help on the command line.
    if issubclass(kind, ResumableWarning):
        print(tables.error_text(f"resumable: {text}"), file=sys.stderr)
    else:
        before(text, kind, *place)


def parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands, which the documentation is made from; or of one and its group."""
    top = argparse.ArgumentParser(
        prog="resumable",
        description="Inspect and manage runs of trainings that resume bit for bit.",
        usage="resumable COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"resumable {__version__}")
    # argparse would list all commands in one row, without groups.
    commands = top.add_subparsers(prog="resumable", metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    listed: dict[str, list[tuple[str, str]]] = {}
    # Import only this command's group: imports take longer than the command itself.
    wanted = [group for group, names in _GROUPS.items() if command in names] or _GROUPS
    for group in wanted:
        import_module(f".{group}", __package__).declare(commands)
        subs = ((name, commands.choices[name]) for name in _GROUPS[group])
        listed[group] = [(name, sub.get_default("summary")) for name, sub in subs]
    top.epilog = f"{_listed(listed)}\n\nRun resumable COMMAND --help for details.\n\n{EXIT_CODES}"
    return top


def _listed(groups: dict[str, list[tuple[str, str]]]) -> str:
    return "\n\n".join(
        "\n".join([f"{group}:", *(f"  {name:<12}{summary}" for name, summary in commands)])
        for group, commands in groups.items()
    )
