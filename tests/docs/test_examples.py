"""The examples: killed in the middle, started again by the same command, compared with one left alone."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import compare
import pytest
from example_scripts import EXAMPLES, NEEDS, SIZES
from places import ROOT, SUPPORT

from resumable import Run
from resumable.audit import audit, verdicts

PAGE = EXAMPLES / "README.md"


class Stage:
    """Where an example is started again and again, each time as a process of its own."""

    def __init__(self, example: str, folder: Path, rehearsal: subprocess.Popen[str]) -> None:
        self._example, self._folder, self._rehearsal = example, folder, rehearsal
        self.said = ""

    def start(self, run: str, kill: tuple[int, float, int] | None = None) -> int:
        """Start it; return its exit code, negative for the signal that has ended it."""
        log, arguments = self._folder / "log", [str(self._folder / run), *SIZES[self._example].arguments]
        order = {
            "arguments": [*arguments, "--device=cpu"],
            "environment": {"RESUMABLE_TRACE": str(self.trace(run))},
            "kill": kill,
            "log": str(log),
        }
        assert self._rehearsal.stdin
        assert self._rehearsal.stdout
        print(json.dumps(order), file=self._rehearsal.stdin, flush=True)
        code = int(self._rehearsal.stdout.readline())
        self.said = log.read_text()
        return code

    def trace(self, run: str) -> Path:
        """Return where a run writes down its boundaries."""
        return self._folder / f"{run}.jsonl"

    def result(self, run: str) -> dict[str, str]:
        """Finish a run; return what it says of its weights, and what its last checkpoint holds."""
        assert self.start(run) == 0, self.said
        weights = re.search(r"^weights (\w+)$", self.said, re.MULTILINE)
        assert weights
        return {"weights": weights[1], **digests(self._folder / run)}


def digests(folder: Path) -> dict[str, str]:
    """Verify all checkpoints of the runs in a folder, and return what the last of each holds."""
    found = {}
    for path in folder.rglob("run.json"):
        checkpoints = Run(path.parent).checkpoints()
        for checkpoint in checkpoints:
            checkpoint.verify()
        for name, data in checkpoints[-1].read().items():
            # Not ranks/: a script that seeds only torch draws from Python and NumPy as each process likes.
            if not name.startswith("ranks/"):
                found[f"{path.parent.relative_to(folder)}/{name}"] = hashlib.sha256(data).hexdigest()
    return found


@contextmanager
def rehearsed(example: str, folder: Path) -> Iterator[Stage]:
    if example in NEEDS:
        pytest.importorskip(NEEDS[example])
    command = [sys.executable, str(SUPPORT / "forked_starts.py"), str(EXAMPLES / example)]
    # Of two threads on two busy cores one waits for the other most of the time
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": env}
    with subprocess.Popen(command, cwd=folder, **pipes) as rehearsal:  # type: ignore[call-overload]
        yield Stage(example, folder, rehearsal)


def moments(example: str, seed: int, count: int) -> Sequence[tuple[int, float, int]]:
    """Return when the starts of a run are killed, and how: each gets some way, and none to the end."""
    dice, steps = random.Random(f"{example} {seed}"), SIZES[example].steps
    signals = [signal.SIGKILL] * (count - 1) + [signal.SIGTERM]
    share = 0.8 * steps / count
    after = [dice.randint(int(share / 2), int(share)) for _ in signals]
    if (edge := SIZES[example].edge) and count == 2:
        after[0] = edge
    return [(step, dice.uniform(0, 20), int(number)) for step, number in zip(after, signals, strict=True)]


def assert_killed_or_not_all_the_same(example: str, folder: Path, seed: int, count: int) -> None:
    with rehearsed(example, folder) as stage:
        for moment in moments(example, seed, count):
            code = stage.start("killed", moment)
            assert code == {signal.SIGKILL: -9, signal.SIGTERM: 143}[signal.Signals(moment[2])], stage.said
        killed, left_alone = stage.result("killed"), stage.result("left alone")
        assert killed == left_alone, compare.first_of_traces(stage.trace("left alone"), stage.trace("killed"))


@pytest.mark.heavy
@pytest.mark.parametrize("example", SIZES)
@pytest.mark.sampled(6)
def test_an_example_that_is_killed_twice_ends_with_the_same_bits(example: str, tmp_path: Path) -> None:
    assert_killed_or_not_all_the_same(example, tmp_path, seed=0, count=2)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("example", SIZES)
def test_an_example_that_is_killed_five_times_ends_with_the_same_bits(
    example: str, seed: int, tmp_path: Path
) -> None:
    assert_killed_or_not_all_the_same(example, tmp_path, seed, count=5)


def test_every_example_is_started_here_and_listed_with_its_own_command() -> None:
    scripts = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    rows = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|.*\| `(.*)` \|", PAGE.read_text(), re.MULTILINE)

    assert scripts.keys() == {*SIZES}
    assert [name for name, _ in rows] == [*SIZES]
    assert all(f"\n\n{command}\n" in scripts[name] for name, command in rows)


@pytest.mark.nightly
@pytest.mark.parametrize("example", SIZES)
def test_an_audit_finds_nothing_that_an_example_has_forgotten(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if example in NEEDS:
        pytest.importorskip(NEEDS[example])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments, steps, _ = SIZES[example]

    # So many that an epoch comes to its end
    found = audit.audit(
        [sys.executable, str(EXAMPLES / example), "run", *arguments, "--device=cpu"], steps=steps // 2 + 4
    )

    assert found.is_exact, verdicts.headline(found)
    assert not [one for one in found.lost if one.weight == "state"]
