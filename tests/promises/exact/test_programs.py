"""Random scripts, stopped in every way: each is exact, or the library warns or refuses."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import carriers
import chosen
import programs
import pytest
from counted import Tally
from forks import Forks

SCRIPTS, SCRIPTS_NIGHTLY = 300, 600
CARRYING, CARRYING_NIGHTLY = 120, 3000
EACH, EACH_NIGHTLY = 10, 30
EVERY_TICK = 20
NOT_YET = {392}
"""The script that is not as it should be yet: it is trained on silently."""
CARRYING_NOT_YET = {114, 496, 624, 636, 643, 894, 936, 1209, 1248, 1412, 1618, 1643, 1827, 1989, 2978, 2995}
"""The same of those that carry state; of those that only the night has, not all were tried."""
FORGETFUL = """
torch.manual_seed(1)
model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
RATES
with RunState.load(run_dir, model=model, optimizer=optimizer, every=every, progress=False) as state:
    t.watch(state, model=model, optimizer=optimizer)
    for step in state.steps(5):
        x = rate() * torch.randn(3, 4)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        t(x)
"""
IN_A_LIST = """\
rates = [0.9]
def rate():
    rates.append(0.9 * rates[-1])
    return rates[-2]
"""
IN_A_NUMBER = """\
last = 1.0
def rate():
    global last
    last = 0.9 * last
    return last
"""
IN_AN_ITERATOR = """\
from itertools import accumulate, repeat
rates = accumulate(repeat(0.9), lambda rate, factor: rate * factor)
def rate():
    return next(rates)
"""


def groups(scripts: int, nightly: int, nights: int = 1) -> list[Any]:
    """Return the seeds of scripts in groups: the first for the sample, the others for the nights in turn."""
    heavy = (range(first, first + EACH) for first in range(0, scripts, EACH))
    others = [range(first, first + EACH_NIGHTLY) for first in range(scripts, nightly, EACH_NIGHTLY)]
    tonight = others[chosen.of_run() % nights :: nights]
    return [
        *(pytest.param(one, marks=pytest.mark.heavy) for one in heavy),
        *(pytest.param(one, marks=pytest.mark.nightly) for one in tonight),
    ]


def examined(
    scripts: Iterable[programs.Program],
    most: int | None,
    forks: Forks,
    folder: Path,
    kinds: Sequence[programs.Kind] = programs.KINDS,
) -> list[programs.Verdict]:
    """Examine scripts in a small process: the library looks for who holds an iterator among all objects."""
    given = [*scripts], kinds, most, folder / "found"
    forks.call(programs.examine_all, *given, folder=folder, deadline=7200).checked()
    found: list[programs.Verdict] = pickle.loads((folder / "found").read_bytes())
    return found


@pytest.mark.proves("exact")
@pytest.mark.timeout(1200)
@pytest.mark.sampled(15)
@pytest.mark.parametrize(
    "seeds", groups(SCRIPTS, SCRIPTS_NIGHTLY), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}"
)
def test_no_random_script_trains_something_else_without_a_warning(
    seeds: range, tally: Tally, forks: Forks, tmp_path: Path
) -> None:
    _hold("random scripts", examined(map(programs.write, seeds), 2, forks, tmp_path), NOT_YET, seeds, tally)


@pytest.mark.proves("exact")
@pytest.mark.timeout(1200)
@pytest.mark.sampled(15)
@pytest.mark.parametrize(
    "seeds", groups(CARRYING, CARRYING_NIGHTLY, nights=6), ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}"
)
def test_nor_one_that_carries_state_in_its_variables(
    seeds: range, tally: Tally, forks: Forks, tmp_path: Path
) -> None:
    verdicts = examined(map(carriers.write, seeds), 2, forks, tmp_path)
    _hold("scripts that carry state", verdicts, CARRYING_NOT_YET, seeds, tally)


def _hold(
    what: str, verdicts: Sequence[programs.Verdict], not_yet: set[int], seeds: range, tally: Tally
) -> None:
    """Let none be bad but those that are known to be."""
    print(f"seeds {seeds.start} to {seeds.stop - 1}\n{programs.table(verdicts)}")
    bad = {one.program.seed: programs.line(one) for one in verdicts if one.worst.outcome in programs.BAD}
    known = not_yet & {*seeds}
    tally(what, len(verdicts), [line for seed, line in bad.items() if seed not in known])
    assert known <= bad.keys(), "some of these are right now: they are no longer to be named"
    for outcome, count in Counter(one.worst.outcome for one in verdicts).items():
        tally(f"{what}, {outcome}", count, [])


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("first", range(0, EVERY_TICK, EACH))
def test_nor_one_that_is_stopped_at_every_tick_in_every_way(
    first: int, tally: Tally, forks: Forks, tmp_path: Path
) -> None:
    verdicts = examined(map(programs.write, range(first, first + EACH)), None, forks, tmp_path)

    bad = [programs.line(one) for one in verdicts if one.worst.outcome in programs.BAD]
    tally("random scripts, every tick", len(verdicts), bad)


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", programs.KINDS)
def test_a_script_that_keeps_state_is_exact_or_warned(
    kind: programs.Kind, forks: Forks, tmp_path: Path
) -> None:
    sources = [FORGETFUL.replace("RATES\n", one) for one in (IN_A_LIST, IN_A_NUMBER, IN_AN_ITERATOR)]
    sources.append(sources[1].replace("run_dir, ", "run_dir, variables=False, "))
    scripts = [programs.Program(0, "steps with own data", (), programs.IMPORTS + one) for one in sources]

    verdicts = examined(scripts, None, forks, tmp_path, [kind])

    assert [one.worst.outcome for one in verdicts] == ["exact", "exact", "warned", "silent"]


def test_a_warning_of_what_the_script_does_not_do_counts_as_misled() -> None:
    told = programs.Found("warned", None, "the loop over batches is cut by islice(), which counts from 0")
    program = programs.Program(0, "", (), "for x in islice(state.batches(), 3):")

    assert programs.named_rightly(told, program) == told
    assert programs.named_rightly(told, program._replace(source="for x in zip(a, b):")).outcome == "misled"


def test_a_seed_means_the_same_script_each_time() -> None:
    for write in (programs.write, carriers.write):
        assert [*map(write, range(50))] == [*map(write, range(50))]


def test_every_shape_is_among_the_scripts_of_each_commit() -> None:
    assert {programs.write(seed).shape for seed in range(SCRIPTS)} == programs.SHAPES.keys()


def test_every_value_and_every_place_is_among_those_that_carry_state() -> None:
    traits = " ".join(trait for seed in range(SCRIPTS) for trait in carriers.write(seed).traits)

    assert not [one for one in (*carriers.VALUES, *carriers.PLACES, *carriers.AROUND) if one not in traits]
