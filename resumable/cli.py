"""Parse, call one function, choose the exit code; nothing else."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from . import __version__, cli_look, cli_move, cli_trust, cli_try
from .command import CODES, EXIT_CODES
from .errors import ResumableError, ResumableWarning

_GROUPS = {"look": cli_look, "trust": cli_trust, "move": cli_move, "try": cli_try}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    given = _parser().parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("always", ResumableWarning)
        warnings.showwarning = partial(_print_warning, warnings.showwarning)
        return _run_command(given)


def _run_command(given: argparse.Namespace) -> int:
    try:
        return int(given.command(given))
    except ResumableError as exc:
        print(f"resumable: {exc}", file=sys.stderr)
        return next((code for kind, code in CODES.items() if isinstance(exc, kind)), 1)
    except BrokenPipeError:
        # Whoever read the output (head, less) has seen enough.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return 130


def _print_warning(
    before: Callable[..., None], text: Warning | str, kind: type[Warning], *place: Any
) -> None:
    # Which line of ours has warned helps nobody who has typed a command.
    if issubclass(kind, ResumableWarning):
        print(f"resumable: {text}", file=sys.stderr)
    else:
        before(text, kind, *place)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resumable",
        description="Look at trainings that can be killed anywhere and go on bit for bit.",
        usage="resumable COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"resumable {__version__}")
    # (argparse would list them in one row, without the groups)
    commands = parser.add_subparsers(
        prog="resumable", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    listed: dict[str, list[tuple[str, str]]] = {}
    for group, module in _GROUPS.items():
        known = {*commands.choices}
        module.declare(commands)
        new = [(name, sub) for name, sub in commands.choices.items() if name not in known]
        listed[group] = [(name, sub.get_default("summary")) for name, sub in new]
    parser.epilog = f"{_listed(listed)}\n\nresumable COMMAND --help tells more of one.\n\n{EXIT_CODES}"
    return parser


def _listed(groups: dict[str, list[tuple[str, str]]]) -> str:
    return "\n\n".join(
        "\n".join([f"{group}:", *(f"  {name:<8}{summary}" for name, summary in commands)])
        for group, commands in groups.items()
    )
