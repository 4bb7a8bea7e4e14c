"""Processes that are killed at a random moment of what they do with a run: nothing that was saved is lost."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import chosen
import pytest
import tiny
import victims
from counted import Tally
from victims import Aim, Chain, Tell, Victim

from resumable import Run
from resumable.files import large_files
from resumable.remote import filesystem
from resumable.remote.by_hand import Copying
from resumable.remote.run_copy import Remote
from resumable.remote.storage import Store
from resumable.run import checkpoint, environment

pytestmark = [pytest.mark.heavy, pytest.mark.proves("durable")]


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in memory, if there is one: a kill takes nothing from a disk, and flushes take their time."""
    # So that files are on their way for long enough to be hit.
    monkeypatch.setattr(filesystem, "PIECE", 16)
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as made:
        yield Path(made)


@pytest.fixture(autouse=True)
def links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let small files be linked; and what each process does once, it has done before it is forked."""
    monkeypatch.setattr(large_files, "_WORTH_A_LINK", 0)
    environment.attempt()
    training, state = tiny.load(tmp_path / "warm")
    tiny.save_next(training, state, 1.0)
    state.close()


@pytest.fixture
def many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a small file have several blocks, written by two threads, and room that is reserved."""
    monkeypatch.setattr(large_files, "BLOCK", 1024)
    monkeypatch.setattr(large_files, "_PREALLOCATE", 1)


def _kill(chain: Chain, count: int, of_starts: float, minimums: Mapping[str, int], tally: Tally) -> None:
    """Kill trainings, a share of them while they start, until each count exceeds its minimum."""
    dice, folder = chosen.dice(), chain.run_dir.parent
    start, first, second = Aim(None, "found"), Aim("found", "save 1 "), Aim("save 1 ", "save 2 ")
    for number in victims.tries(count, chain.found, minimums, chain.bad):
        if chain.is_over():
            chain = chain.another(folder / f"exp-{number}")
        chain.way = dice.choice(["paced", "direct", "plain"])
        victim = chain.start()
        aim = start if dice.random() < of_starts else dice.choice([first, second])
        aim.wait(victim, dice)
        victim.kill()
        aim.hit(victim)
        chain.ended(victim)
        chain.found["in a start"] += not any(line.startswith("found") for line in victim.said)
    tally("kills", number + 1, chain.bad)


@pytest.mark.parametrize("keep", [1, 3])
def test_saves_and_prunes_that_are_killed_lose_nothing(
    tmp_path: Path, many_blocks: None, tally: Tally, times: int, keep: int
) -> None:
    count = 90 * times
    # Else they were not killed in the middle of anything
    minimums = {".stage": count // 10, ".trash": count // 100, "not acknowledged": count // 100}

    _kill(Chain(tmp_path / "exp", keep), count, 0, minimums, tally)


def test_starts_killed_amid_what_killed_saves_left_lose_nothing(
    tmp_path: Path, tally: Tally, times: int
) -> None:
    count = 175 * times

    _kill(Chain(tmp_path / "exp"), count, 0.7, {"in a start": count // 4, ".stage": count // 50}, tally)


def _whole(folder: Path) -> list[int]:
    """Return the checkpoints that are listed in a remote copy on a disk, every byte of them verified."""
    numbers = Remote(Store(folder.as_uri())).numbers()
    for name in numbers.values():
        checkpoint.open_checkpoint(folder / "checkpoints" / name).verify()
    return [*numbers]


def _run_of(folder: Path, steps: int) -> Path:
    training, state = tiny.load(folder, keep=None)
    with state:
        for step in range(1, steps + 1):
            tiny.save_next(training, state, victims.loss(step))
    return folder


def _seconds(body: Any) -> float:
    victim = Victim(body)
    taken = victim.wait_for("ended")
    victim.bury()
    assert taken, victim.said
    return taken


def _push(run_dir: Path, folder: Path, tell: Tell) -> None:
    Copying(Run(run_dir), Remote(Store(folder.as_uri()))).push("all")


@pytest.mark.proves("local first")
def test_what_a_remote_lists_is_whole_whenever_a_push_is_killed(
    memory: Path, tally: Tally, times: int
) -> None:
    run_dir, folder = _run_of(memory / "exp", 2), memory / "copy"
    seconds = _seconds(partial(_push, run_dir, memory / "timed"))
    count, dice, found, bad = 75 * times, chosen.dice(), Counter[str](), list[str]()

    minimums = {"begun": count // 10, "0 listed": 0, "1 listed": 0, "2 listed": 0}
    for _ in victims.tries(count, found, minimums, bad):
        victim = Victim(partial(_push, run_dir, folder))
        time.sleep(dice.uniform(0, seconds))
        victim.kill()
        found["kills"] += 1
        bad += [line for line in victim.said if line.startswith("bad")]
        listed = _whole(folder)
        found[f"{len(listed)} listed"] += 1
        found["begun"] += bool([*folder.glob("checkpoints/*/pushing.json")])
        if "ended" in victim.said or (listed == [1, 2] and dice.random() < 0.5):
            _seconds(partial(_push, run_dir, folder))
            assert _whole(folder) == [1, 2]
            shutil.rmtree(folder)

    tally("kills", found["kills"], bad)


@pytest.mark.proves("local first")
def test_a_training_that_pushes_and_is_killed_loses_nothing_here_nor_there(
    tmp_path: Path, tally: Tally, times: int
) -> None:
    count, dice = 25 * times, chosen.dice()
    chain = Chain(tmp_path / "exp", keep=2, is_copied=True)
    aims = [Aim("found", "save 2 "), Aim("save 2 ", "save 4 ")]

    minimums = {"begun": count // 20, "something listed": count // 5}
    for number in victims.tries(count, chain.found, minimums, chain.bad):
        if chain.is_over():
            chain = chain.another(tmp_path / f"exp-{number}")
        aim, victim = dice.choice(aims), chain.start()
        aim.wait(victim, dice)
        victim.kill()
        aim.hit(victim)
        chain.ended(victim)
        listed = _whole(chain.copy)
        assert max(listed, default=0) <= chain.durable + 1
        chain.found["something listed"] += bool(listed)
        chain.found["begun"] += bool([*chain.copy.glob("checkpoints/*/pushing.json")])

    tally("kills", number + 1, chain.bad)
    _, state = chain.load()
    state.close()
    assert _whole(chain.copy) == sorted({state.step, victims.best(state.step)} if state.step else ())


def _pull(run_dir: Path, folder: Path, steps: int, tell: Tell) -> None:
    training, state = tiny.load(run_dir, remote=folder.as_uri(), keep=None, remote_keep=None)
    assert state.step == steps
    assert training.digest() == victims.known()[steps], tiny.what_differs(training, steps)
    tiny.assert_all_verify(state.run)
    state.close()


@pytest.mark.timeout(300)
@pytest.mark.proves("local first")
def test_a_start_from_a_remote_copy_that_is_killed_is_made_up_by_the_next(
    memory: Path, tally: Tally, times: int
) -> None:
    folder, steps = memory / "copy", 3
    _push(_run_of(memory / "exp", steps), folder, print)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    victims.known()
    seconds = _seconds(partial(_pull, memory / "timed", folder, steps))
    count, dice, found, bad = 65 * times, chosen.dice(), Counter[str](), list[str]()

    for number in victims.tries(count, found, {"begun": count // 40}, bad):
        run_dir = memory / f"pulled-{number // 5}"
        victim = Victim(partial(_pull, run_dir, folder, steps))
        if number % 5 == 4:
            victim.bury()
            bad += [] if "ended" in victim.said else victim.said
            continue
        time.sleep(dice.uniform(0, seconds))
        victim.kill()
        found["kills"] += 1
        bad += [line for line in victim.said if line.startswith("bad")]
        tiny.assert_all_verify(Run(run_dir))
        found["begun"] += bool([*run_dir.glob("checkpoints/.pull-*")])

    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    tally("kills", found["kills"], bad)
