"""Scripts in the shapes people write: NAME.py in tests/data/real_scripts, and NAME.diff that converts it."""

from __future__ import annotations

import ast
import difflib
import random
import re
import signal
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import tiny
from forks import WARM
from places import DATA, SUPPORT

from resumable import Run
from resumable.run import history

REAL = DATA / "real_scripts"
NAMES = (
    *("mnist", "imagenet", "dcgan", "vae", "word_language_model", "nanogpt", "mingpt", "time_sequence"),
    *("ppo", "dqn", "torchvision_reference", "timm_train"),
)
LIBRARY = re.compile(
    "(is empty|has no checkpoint yet): starting fresh|^resumed |is complete: |is saved, checkpoint "
)
"""What tells a line of the library from those of a script."""
HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? .*\n((?:[-+].*\n)+)", re.MULTILINE)
MOST = 8
"""How many lines a conversion may change or add: those that `git diff` marks with a `+`."""


class Ended(NamedTuple):
    """What a process left behind."""

    lines: list[str]
    code: int
    errors: str

    @property
    def warnings(self) -> list[str]:
        # How fast this machine's disk is just now does not matter here.
        lines = [line for line in self.errors.splitlines() if "save() has waited" not in line]
        return [line for line in lines if "Warning" in line]


def start(command: Sequence[object], folder: Path) -> Ended:
    """Run a command; return what the script printed, without the library's lines."""
    life = WARM.run(command, folder, environment={"PYTHONPATH": str(REAL)})
    return Ended(_of_script(life.out), life.code, life.err)


def stopped(how: str, tick: int, script: Path) -> list[str]:
    return [str(SUPPORT / "site-packages" / "stopped.py"), how, str(tick), str(script)]


def _of_script(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if not LIBRARY.search(line)]


@lru_cache
def plain(name: str) -> tuple[list[str], int]:
    """Return what the plain script prints, and how many backward passes and steps it makes."""
    with TemporaryDirectory() as folder:
        ended = start(stopped("never", 0, REAL / f"{name}.py"), Path(folder))
    assert ended.code == 0, ended.errors
    assert len({*ended.lines}) == len(ended.lines), "two lines that are alike tell nothing"
    return ended.lines, int(ended.errors.split("ticks ")[-1])


def goes_on(name: str, how: str, ticks: Sequence[int], folder: Path) -> None:
    """Stop the script at these ticks, one in each start; check that all print what the plain one does."""
    script, expected = folder / f"{name}.py", plain(name)[0]
    script.write_text(converted(name))
    starts = [start(stopped(how, tick, script), folder) for tick in ticks]
    last = start([script], folder)
    for ended in (*starts, last):
        code = 0 if ended is last else {"kill": -signal.SIGKILL, "term": 128 + signal.SIGTERM}[how]
        assert ended.code == code, ended.errors
        assert not ended.warnings, ended.errors
    # What was trained again is printed again, so each line may come several times.
    assert {line for ended in (*starts, last) for line in ended.lines} == {*expected}
    assert last.lines[-1] == expected[-1]
    tiny.assert_all_verify(_run(folder))


def _run(folder: Path) -> Run:
    (history,) = folder.rglob("history.jsonl")
    return Run(history.parent)


def converted(name: str) -> str:
    """Return the script as its diff converts it."""
    lines = (REAL / f"{name}.py").read_text().splitlines(keepends=True)
    for begin, count, changed in reversed(HUNK.findall((REAL / f"{name}.diff").read_text())):
        at, rows = int(begin) - (count != "0"), changed.splitlines(keepends=True)
        old, new = ([row[1:] for row in rows if row[0] == sign] for sign in "-+")
        assert lines[at : at + len(old)] == old
        lines[at : at + len(old)] = new
    return "".join(lines)


def lines_of(script: str) -> list[str]:
    """Return the lines of a script, with each statement that the formatter has split on one."""
    return ast.unparse(ast.parse(script)).splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_a_conversion_changes_at_most_eight_lines(name: str) -> None:
    before, after = lines_of((REAL / f"{name}.py").read_text()), lines_of(converted(name))
    diff = [*difflib.unified_diff(before, after, n=0, lineterm="")][2:]
    changed = [line for line in diff if line.startswith("+") and line[1:].strip()]

    assert 0 < len(changed) <= MOST, "\n".join(changed)


@pytest.mark.proves("transparent")
@pytest.mark.heavy
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMES)
def test_a_converted_script_prints_what_the_plain_one_does(name: str, tmp_path: Path) -> None:
    goes_on(name, "kill", (), tmp_path)


@pytest.mark.proves("exact")
@pytest.mark.heavy
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", NAMES)
def test_a_script_that_is_killed_three_times_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    total = plain(name)[1]
    first, second, third = (
        total * twelfth // 12 for twelfth in sorted(random.Random(name).sample(range(3, 12), 3))
    )
    # A start continues at the last kill or before it, so each of these is reached.
    ticks = [first, second - first, third - second]
    print(f"killed after {ticks} of {total}")

    goes_on(name, "kill", ticks, tmp_path)

    attempts = history.attempts(history.read(_run(tmp_path).path))
    assert sum(attempt["from"] is not None for attempt in attempts) >= 2


@pytest.mark.proves("exact")
@pytest.mark.heavy
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMES)
def test_a_script_whose_group_gets_sigterm_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    tick = random.Random(name).randrange(1, plain(name)[1])
    print(f"SIGTERM after {tick} of {plain(name)[1]}")

    goes_on(name, "term", [tick], tmp_path)
