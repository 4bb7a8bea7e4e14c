"""Runs that earlier versions have written continue, bit for bit. Never write their files again.

Each is of a training in old_trainings.py, which names the revision that wrote it.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import old_trainings
import pytest
from old_trainings import TRAININGS, Log
from places import DATA
from sharded_training import CAN_SHARD, WHY_NOT

OLD = DATA / "old_runs"
SIZE = 800_000
"""The bytes that all runs may take."""
STOPS = [
    pytest.param(
        name,
        number,
        id=f"{name}-{training.stops[number]}",
        marks=[pytest.mark.heavy, pytest.mark.skipif(not CAN_SHARD, reason=WHY_NOT)]
        if training.ranks > 1
        else [],
    )
    for name, training in TRAININGS.items()
    for number in range(len(training.stops))
]

pytestmark = [
    # The machine, and its libraries, may be others than those that wrote the run.
    pytest.mark.filterwarnings("ignore:.* has changed since checkpoint"),
    pytest.mark.filterwarnings("ignore:this epoch was resumed in the middle"),
    # What the trainings are told, for what they do on purpose.
    pytest.mark.filterwarnings("ignore:minimize='loss' says"),
    pytest.mark.filterwarnings("ignore:start.log controls this loop"),
    pytest.mark.filterwarnings("ignore:Stream and the training draw from the same generators"),
    pytest.mark.filterwarnings("ignore:drawn keeps no position"),
    pytest.mark.filterwarnings("ignore:the order of this epoch is drawn from generators .generator."),
]


@cache
def straight(name: str, folder: Path) -> list[Log]:
    """Return what the training is without a stop."""
    return old_trainings.run(name, folder / "straight" / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainings")


@pytest.mark.proves("exact")
@pytest.mark.parametrize(("name", "number"), STOPS)
@pytest.mark.quick(2)
def test_a_run_of_an_earlier_version_continues_bit_for_bit(
    name: str, number: int, folder: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(OLD / name, tmp_path / "run")
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())[number]

    first = old_trainings.run(name, run, 2, resume=int(saved.partition("-")[0]))
    second = old_trainings.run(name, run, 1)
    rest = old_trainings.run(name, run)

    stop = TRAININGS[name].stops[number]
    legs = zip(first, second, rest, strict=True)
    assert [[*one, *two, *three] for one, two, three in legs] == [
        log[stop:] for log in straight(name, folder)
    ]


def test_the_best_checkpoint_of_an_earlier_version_is_found(folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(OLD / "parts", tmp_path / "run")

    assert old_trainings.run("parts", run, resume="best") == [straight("parts", folder)[0][5:]]


def test_every_stored_run_is_of_a_training() -> None:
    assert {path.name for path in OLD.iterdir()} == {*TRAININGS}
    files = [path for path in OLD.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < SIZE
