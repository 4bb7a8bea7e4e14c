"""Completion in bash, zsh and fish, as the shells themselves give it."""

from __future__ import annotations

import os
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


@pytest.mark.nightly
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
