"""Whole trainings that are killed again and again, and end as if nothing had ever happened."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import chosen
import compare
import killed_training
import pytest
import tiny
from counted import Tally
from victims import Tell, Victim

from resumable import Run
from resumable.run import environment

pytestmark = [pytest.mark.heavy, pytest.mark.proves("exact")]


def _script(run_dir: Path, seed: int, tell: Tell) -> None:
    # Its workers belong to it
    os.setpgid(0, 0)
    killed_training.main(run_dir, seed)


def _train(run_dir: Path, seed: int) -> tuple[str, float]:
    """Return what becomes of a training that nothing happens to, and how long it takes."""
    victim = Victim(partial(_script, run_dir, seed))
    seconds = victim.wait_for("ended")
    victim.bury()
    assert seconds, victim.said
    return (run_dir / killed_training.RESULT).read_text(), seconds


def _killed_and_started_again(
    run_dir: Path, seed: int, kills: int, seconds: float, dice: random.Random
) -> int:
    """Kill a training so many times, if it is not done before; return how often it was."""
    for number in range(kills):
        victim = Victim(partial(_script, run_dir, seed))
        time.sleep(dice.uniform(0, 0.6 * seconds))
        victim.kill()
        # Else its workers notice it later, when the next start has workers too
        if dice.random() < 0.5:
            _end_group(victim.pid)
        if "ended" in victim.said:
            return number
        assert not victim.said, victim.said
        tiny.assert_all_verify(Run(run_dir))
    return kills


def _end_group(number: int) -> None:
    try:
        os.killpg(number, signal.SIGKILL)
    except ProcessLookupError:
        return


def _what_differs(whole: Path, killed: Path) -> str:
    return compare.first_of_traces(whole / killed_training.TRACE, killed / killed_training.TRACE)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_a_training_that_is_killed_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, tally: Tally, times: int, seed: int
) -> None:
    environment.attempt()
    # What each process imports at its first step, those that are forked from this one have
    killed_training.main(tmp_path / "warm", 0)
    expected, seconds = _train(tmp_path / "whole", seed)
    count, dice, kills, bad = 5 * times, chosen.dice(), 0, []

    for number in range(count):
        run_dir = tmp_path / f"killed-{number}"
        kills += _killed_and_started_again(run_dir, seed, 5, seconds, dice)
        if _train(run_dir, seed)[0] != expected:
            bad.append(f"{run_dir} has ended otherwise: {_what_differs(tmp_path / 'whole', run_dir)}")

    print(f"{kills} kills")
    tally("killed trainings", count, bad)
    # Else none was killed twice
    assert kills > count


@pytest.mark.parametrize("seed", [4, 5])
def test_a_script_killed_and_started_again_ends_with_the_same_bits(
    tmp_path: Path, tally: Tally, seed: int
) -> None:
    environment.attempt()
    expected, _ = _train(tmp_path / "whole", seed)
    run_dir, dice = tmp_path / "killed", chosen.dice()
    command = [sys.executable, killed_training.__file__, str(run_dir), str(seed)]

    for number in (2, dice.randrange(4, 9)):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        while process.poll() is None and (Run(run_dir).highest() or 0) < number:
            time.sleep(0.001)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        _end_group(process.pid)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    is_same = (run_dir / killed_training.RESULT).read_text() == expected
    bad = [] if is_same else [f"it has ended otherwise: {_what_differs(tmp_path / 'whole', run_dir)}"]
    tally("killed trainings", 1, bad)
