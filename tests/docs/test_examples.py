"""The examples: killed in the middle, started again by the same command, compared with one left alone."""

from __future__ import annotations

import hashlib
import random
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import compare
import pytest
from example_scripts import EXAMPLES, NEEDS, SIZES
from forks import Forks, Life, Stop

from resumable import Run
from resumable.audit import audit, verdicts

PAGE = EXAMPLES / "README.md"
WARNINGS = (
    *("-W", "error::resumable.ResumableWarning"),
    # How fast this machine's disk is just now is not the script's business.
    *("-W", "ignore:save() has waited:resumable.ResumableWarning"),
)


class Stage:
    """Where an example is started again and again, each time as a process of its own."""

    def __init__(self, example: str, folder: Path, forks: Forks) -> None:
        script = EXAMPLES / example
        self._command = [*WARNINGS, str(script), "", *SIZES[example].arguments, "--device=cpu"]
        self._folder, self._forks = folder, forks.preload(str(script))

    def start(self, run: str, stop: Stop | None = None) -> Life:
        """Start it, and wait until it ends."""
        command = [one or str(self._folder / run) for one in self._command]
        environment = {"RESUMABLE_TRACE": str(self.trace(run)), "HF_HUB_OFFLINE": "1"}
        return self._forks.begin(command, self._folder, environment=environment, stop=stop).ended()

    def trace(self, run: str) -> Path:
        """Return where a run writes down its boundaries."""
        return self._folder / f"{run}.jsonl"

    def result(self, run: str) -> dict[str, str]:
        """Finish a run; return what it says of its weights, and what its last checkpoint holds."""
        weights = re.search(r"^weights (\w+)$", self.start(run).checked().out, re.MULTILINE)
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


def moments(example: str, seed: int, count: int) -> Sequence[Stop]:
    """Return when the starts of a run are killed, and how: each gets some way, and none to the end."""
    dice, steps = random.Random(f"{example} {seed}"), SIZES[example].steps
    signals = [signal.SIGKILL] * (count - 1) + [signal.SIGTERM]
    share = 0.8 * steps / count
    after = [dice.randint(int(share / 2), int(share)) for _ in signals]
    if (edge := SIZES[example].edge) and count == 2:
        after[0] = edge
    return [Stop(step, dice.uniform(0, 0.02), int(how)) for step, how in zip(after, signals, strict=True)]


def assert_killed_or_not_all_the_same(
    example: str, folder: Path, forks: Forks, seed: int, count: int
) -> None:
    if example in NEEDS:
        pytest.importorskip(NEEDS[example])
    stage = Stage(example, folder, forks)
    for stop in moments(example, seed, count):
        life = stage.start("killed", stop)
        assert life.code == {signal.SIGKILL: -9, signal.SIGTERM: 143}[signal.Signals(stop.signal)], life.err
    killed, left_alone = stage.result("killed"), stage.result("left alone")
    assert killed == left_alone, compare.first_of_traces(stage.trace("left alone"), stage.trace("killed"))


@pytest.mark.heavy
@pytest.mark.parametrize("example", SIZES)
def test_an_example_that_is_killed_twice_ends_with_the_same_bits(
    example: str, tmp_path: Path, forks: Forks
) -> None:
    assert_killed_or_not_all_the_same(example, tmp_path, forks, seed=0, count=2)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("example", SIZES)
def test_an_example_that_is_killed_five_times_ends_with_the_same_bits(
    example: str, seed: int, tmp_path: Path, forks: Forks
) -> None:
    assert_killed_or_not_all_the_same(example, tmp_path, forks, seed, count=5)


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
    assert not found.lost
