"""Completion in a shell: commands, flags, run directories and checkpoints."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence

from ..errors import ResumableError
from ..run import address
from ..run.directory import Run
from .command import sub_of

_BASH = """_resumable() {
    local line word prefix=
    local -a words
    read -ra words <<< "${COMP_LINE:0:COMP_POINT}"
    [[ ${COMP_LINE:COMP_POINT-1:1} == " " ]] && words+=("")
    word=${words[-1]}
    # bash takes an @ for the end of a word, and replaces only what stands behind it.
    [[ $word == *@* ]] && prefix=${word%"${word##*@}"}
    COMPREPLY=()
    while IFS= read -r line; do
        COMPREPLY+=("${line#"$prefix"}")
        [[ $line == */ ]] && compopt -o nospace 2> /dev/null
    done < <(resumable __complete "${words[@]}" 2> /dev/null)
}
complete -o default -F _resumable resumable
"""
_ZSH = """#compdef resumable
_resumable() {
    local -a found folders
    found=("${(@f)$(resumable __complete "${(@)words[1,CURRENT]}" 2> /dev/null)}")
    folders=("${(@M)found:#*/}")
    found=("${(@)found:#*/}")
    found=("${(@)found:#}")
    (( $#folders )) && compadd -S '' -- "${folders[@]}"
    (( $#found )) && compadd -- "${found[@]}"
    (( $#found + $#folders )) || _files
}
compdef _resumable resumable
"""
_FISH = """function __resumable_complete
    set -l words (commandline -opc)
    set -l word (commandline -ct)
    set -l found (resumable __complete $words "$word" 2> /dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path "$word"
    end
end
complete -c resumable -f -a '(__resumable_complete)'
"""
SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""What each shell has to read."""


def candidates(words: Sequence[str], parser: argparse.ArgumentParser, names: Sequence[str]) -> list[str]:
    """Return what the last of the words may become; nothing where any file may stand.

    `words`: the line from the program's name on. `names`: the commands, whose `parser` this is.
    """
    *before, last = words[1:] or [""]
    if not before or (before[0] == "help" and len(before) == 1):
        found: list[str] = [*names, *(() if before else ("--help", "--version"))]
    elif before[0] not in names:
        found = []
    else:
        found = [*_of_command(sub_of(parser, before[0]), before, last)]
    return [one for one in found if one.startswith(last)]


def _of_command(sub: argparse.ArgumentParser, before: Sequence[str], last: str) -> Iterator[str]:
    flags = {flag: action for action in sub._actions for flag in action.option_strings}
    if last.startswith("-"):
        yield from flags
        return
    option = flags.get(before[-1])
    if option and option.nargs != 0:
        return
    for action in sub._actions:
        if not action.option_strings and action.choices:
            yield from map(str, action.choices)
        elif action.metavar in _RUNS:
            yield from _runs(last)
            return


_RUNS = ("RUN", "RUN[@N]", "A")
_MOST = 50


def _runs(last: str) -> Iterator[str]:
    """Yield the runs and folders that a word may become, and the checkpoints of one with an @ behind it."""
    path, at, _ = last.rpartition("@")
    if at and address.is_run(path):
        yield from (f"{path}@{word}" for word in ("newest", "best"))
        try:
            yield from (f"{path}@{number}" for number in Run(path).numbers()[: -_MOST - 1 : -1])
        except ResumableError:
            # A run that cannot be read has nothing to offer.
            return
        return
    folder, begin = os.path.split(last)
    try:
        names = sorted(one.name for one in os.scandir(folder or ".") if one.is_dir())
    except OSError:
        return
    for name in names:
        if name.startswith(begin) and (begin or not name.startswith(".")):
            there = os.path.join(folder, name)
            yield there if address.is_run(there) else f"{there}/"
