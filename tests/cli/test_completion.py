"""Completion in bash, zsh and fish, as the shells themselves give it."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from resumable.cli.app import main


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run, a folder of runs and a file; `resumable` is on the path."""
    for name in ("exp", "runs/a", "runs/b"):
        (tmp_path / name / "checkpoints" / "000041-step-00000410").mkdir(parents=True)
        (tmp_path / name / "run.json").write_text("{}")
    (tmp_path / "extra.txt").touch()
    program = tmp_path / ".bin" / "resumable"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m resumable "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


BASH = """
eval "$(resumable completion bash)"
COMP_LINE=$1 COMP_POINT=${#1}
_resumable
printf '%s\\n' "${COMPREPLY[@]}"
"""
FISH = 'resumable completion fish | source; complete -C "$argv[1]"'
# zsh completes only in a terminal.
ZSH = """
zmodload zsh/zpty
zpty shell zsh -f -i
send() { zpty -w shell "$1"; }
send 'PS1= RPS1= ; unsetopt beep; autoload -Uz compinit; compinit -u -D'
send 'eval "$(resumable completion zsh)"'
send 'LISTMAX=0; bindkey "^I" complete-word; zle_highlight=(none)'
send 'done_typing() { print -r -- "LINE<$BUFFER>"; BUFFER=; zle accept-line }; zle -N done_typing'
send 'bindkey "^X" done_typing; print REA""DY'
while zpty -r shell line; do [[ $line == *READY* ]] && break; done
zpty -w -n shell "$1"$'\\t'$'\\x18'
while zpty -r shell line; do
    [[ $line == *LINE\\<*\\>* ]] && { print -r -- "${${line##*LINE<}%%>*}"; break }
done
zpty -d shell
"""


def asked(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the candidates that a shell gets."""
    assert main(["__complete", "resumable", *words]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["p"], ["push", "pull", "prune"]),
        (["help", "l"], ["ls"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["prune", "exp", "--keep-"], ["--keep-best", "--keep-every"]),
        (["ls", ""], ["exp", "runs/"]),
        (["ls", "exp", "runs/"], ["runs/a", "runs/b"]),
        (["show", "exp@"], ["exp@newest", "exp@best", "exp@41"]),
        (["export", "exp", "-o", ""], []),
        (["lss", ""], []),
    ],
)
def test_a_shell_completes_commands_flags_runs_and_checkpoints(
    place: Path, words: list[str], found: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(words, capsys) == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("resumable pru", ["prune"]),
        ("resumable ls ru", ["runs/"]),
        ("resumable ls runs/", ["runs/a", "runs/b"]),
        ("resumable prune exp --dr", ["--dry-run"]),
        # bash replaces what stands behind the @
        ("resumable show exp@b", ["best"]),
    ],
)
def test_bash_completes(place: Path, line: str, found: list[str]) -> None:
    done = subprocess.run(["bash", "-c", BASH, "bash", line], capture_output=True, text=True, check=True)

    assert done.stdout.split() == found


needs_fish = pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
needs_zsh = pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed")


@needs_fish
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("resumable pru", ["prune"]),
        ("resumable ls runs/", ["runs/a", "runs/b"]),
        ("resumable prune exp --dr", ["--dry-run"]),
        ("resumable show exp@b", ["exp@best"]),
        ("resumable export exp -o ex", ["exp/", "extra.txt"]),
    ],
)
def test_fish_completes(place: Path, line: str, found: list[str]) -> None:
    done = subprocess.run(["fish", "-c", FISH, line], capture_output=True, text=True, check=True)

    assert sorted(row.partition("\t")[0] for row in done.stdout.splitlines()) == found


@pytest.mark.quick(2)
@needs_zsh
@pytest.mark.parametrize(
    ("line", "typed"),
    [
        ("resumable pru", "resumable prune "),
        ("resumable ls ru", "resumable ls runs/"),
        ("resumable prune exp --dr", "resumable prune exp --dry-run "),
        ("resumable show exp@b", "resumable show exp@best "),
        ("resumable export exp -o extr", "resumable export exp -o extra.txt "),
    ],
)
def test_zsh_completes(place: Path, line: str, typed: str) -> None:
    done = subprocess.run(
        ["zsh", "-f", "-c", ZSH, "zsh", line], capture_output=True, text=True, check=True, timeout=60
    )

    assert done.stdout.rstrip("\n") == typed
