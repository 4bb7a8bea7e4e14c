"""Training scripts that call `tick`, stopped at six of their ticks, and started until they have ended."""

from __future__ import annotations

import json
import random
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from forks import WARM
from places import DATA, SUPPORT

HEAD = f"""
import sys
sys.path.insert(0, {str(SUPPORT / "site-packages")!r})
from ticking import ended, load, tick
"""
CODES = {"term": (0, 128 + signal.SIGTERM, -signal.SIGTERM), "kill": (0, -signal.SIGKILL)}
"""How a start may end: by the signal itself where a loop was left by a break before it could save."""
PEERS = re.compile(r"^import .*\b(gymnasium|torchmetrics)\b", re.MULTILINE)
"""What a script may need, and is imported once: it takes longer than the training."""
Scripts = dict[str, tuple[str, str]]
"""For each script its source, and what it is told: "" if it is exact."""


class Life(NamedTuple):
    """One start of a script."""

    noted: list[object]
    told: list[str]
    code: int


def read(name: str) -> Scripts:
    """Return the scripts of a file in tests/data: its first section stands before each of the others.

    Each has a line `## NAME`, and `## NAME -> REGEX` if the library has to warn of it.
    """
    first, *others = (DATA / name).read_text().split("\n## ")[1:]
    head = HEAD + first.partition("\n")[2]
    parted = ((*title.partition(" -> "), body) for title, _, body in (one.partition("\n") for one in others))
    return {name: (f"{head}\n{body}\n", told) for name, _, told, body in parted}


def lives(source: str, folder: Path, stops: tuple[int, ...] = (), how: str = "term") -> list[Life]:
    """Start a script as often as there are stops, and then until it has ended."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(source)
    found: list[Life] = []
    forks = WARM.preload(*peers) if (peers := PEERS.findall(source)) else WARM
    for stop in (*stops, None):
        environment = {"HOW": how} | ({"STOP": str(stop)} if stop else {})
        life = forks.run(["train.py"], folder, environment=environment)
        assert life.code in CODES[how], life.err
        found.append(Life(*(_taken(folder / name) for name in ("noted", "told")), life.code))
        if not life.code:
            break
    return found


def _taken(path: Path) -> list[object]:
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return [json.loads(one) for one in lines]


def exact(found: list[Life], whole: list[object]) -> list[Life]:
    """Return the first starts, as far as each continues and trains what the whole training does."""
    done = 0
    for number, life in enumerate(found):
        # Bodies that began after the last save are trained again
        places = range(done, -1, -1) if number and found[number - 1].code < 0 else [done]
        begun = next((at for at in places if whole[at : at + len(life.noted)] == life.noted), None)
        if begun is None or (life is found[-1] and begun + len(life.noted) != len(whole)):
            return found[:number]
        done = begun + len(life.noted)
    return found


def stops(name: str, ticks: int) -> Mapping[tuple[int, int], str]:
    """Return six pairs of ticks of two starts, and how the starts end."""
    dice = random.Random(name)
    firsts = [1, 2, 3, 4, ticks // 2, ticks - 1]
    begins = dice.randrange(2)
    pairs = ((one, min(dice.randint(1, 3), ticks - one)) for one in firsts)
    return {pair: [*CODES][(begins + n) % 2] for n, pair in enumerate(pairs)}


def check(name: str, source: str, told: str, folder: Path) -> None:
    """Check that a script is exact at each stop without a word, or told of what is not, and not in vain."""
    for peer in PEERS.findall(source):
        pytest.importorskip(peer)
    (whole,) = lives(source, folder / "whole")
    differs = False
    for pair, how in stops(name, len(whole.noted) - 1).items():
        found = lives(source, folder / f"{how}-{pair}", pair, how)
        said = [one for life in (whole, *found) for one in life.told]
        right = exact(found, whole.noted)
        assert right == found or any(life.told for life in right), f"silent after {how} at {pair}"
        assert right == found or told, f"not exact after {how} at {pair}: {said}"
        assert all(told and re.search(told, one) for one in said), f"told after {how} at {pair}: {said}"
        differs |= right != found
    assert not told or differs, "told in vain"
