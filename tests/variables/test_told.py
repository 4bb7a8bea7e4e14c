"""The script's variables as people see them: in the line of a resume, in `show` and in `diff`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from forks import Forks, Life

from resumable.cli.app import main
from resumable.files import codec
from resumable.views import variables

SCRIPT = """
import collections, os, signal, sys
import numpy as np, torch
from resumable import RunState
torch.manual_seed(0)

class Average:
    def __init__(self):
        self.n, self.shadow = 0, {'conv.weight': torch.zeros(2)}

average, noise, dice = Average(), torch.randn(3), np.random.default_rng(3)
replay, window = collections.deque(maxlen=80), np.zeros(2000)

def main():
    best, history, seen = np.float64(9), [], {'train': 0, 'val': {}}
    loader = torch.utils.data.DataLoader(torch.arange(12.0), 4)
    state = RunState.load('exp', loader=loader, every=None, keep=None, **eval(os.environ.get('GIVEN', '{}')))
    for epoch in state.epochs(9):
        last = {'made in': [epoch, torch.ones(2) * epoch]}
        for number, batch in enumerate(state.batches()):
            history.append(batch.sum().item() + best)
            seen['train'] += 4
            average.n += 1
            average.shadow['conv.weight'] += 1
            replay.append((batch.numpy().copy(), number))
            window[average.n] = dice.random()
        best = best / 2
        seen['val'][epoch] = float(best)
        state.save()
        print('at', epoch, float(best), len(history), last['made in'][0])
        if epoch == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGTERM)
    state.close()
main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_line_of_a_resume_names_the_variables(folder: Path, forks: Forks) -> None:
    first, then = (forks.run(["train.py", epoch], folder).out for epoch in "12")

    assert " of train.py" not in first
    line = r"resumed exp .*, step 6; of train.py: best, epoch, last, history, seen, and 4 more \([\d.]+ m?s\)"
    assert re.search(line, then)


def test_show_and_diff_have_the_paths_of_code(
    folder: Path, forks: Forks, capsys: pytest.CaptureFixture[str]
) -> None:
    forks.run(["train.py", "1"], folder)

    assert main(["show", "exp"]) == 0
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert main(["diff", "exp@1", "exp@2"]) == 1
    differing = re.sub(" +", " ", capsys.readouterr().out)

    assert "entries" not in shown + differing
    for line in (
        "best float64 4 B 2.25",
        "last dict of 1 ",
        "history list of 6 ",
        "seen['train'] int 2 B 24",
        "seen['val'] dict 7 B 4.5, 2.25",
        "average.n int 1 B 6",
        "average.shadow['conv.weight'] Tensor 2 float32 8 B norm 8.485",
        "replay deque of 6, maxlen 80 ",
        "left alone 12 B noise",
    ):
        assert f"\n {line}" in shown
    assert re.search(r"\n window ndarray 2000 <f8 16 kB \(\d\d %\) ", shown)
    for line in (
        "best 4.5 -> 2.25",
        "history list of 3 -> list of 6",
        "history[5] - -> 42.5",
        "replay deque of 3, maxlen 80 -> deque of 6, maxlen 80 9 only in B",
        "seen['val'][1] - -> 2.25",
        "average.shadow['conv.weight'] 2 of 2 3 1",
        "last['made in'][1] 2 of 2 1\n",
        "last['made in'][0] 0 -> 1",
    ):
        assert f"\n {line}" in differing
    assert main(["diff", "exp@2", "exp@2"]) == 0


def test_all_that_a_look_stores_has_one_path(
    folder: Path, forks: Forks, capsys: pytest.CaptureFixture[str]
) -> None:
    forks.run(["train.py", "1"], folder)
    main(["show", "exp", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    look = json.loads((folder / "exp/newest/ranks/00000.json").read_text())["script"]

    rows = {row["name"]: row for row in found["variables"]}
    tensors = [one["name"] for one in found["tensors"] if one["part"] == "script"]

    assert len(rows) == len(found["variables"])
    assert (rows["history[5]"]["value"], rows["history[5]"]["of"]) == (42.5, "history")
    assert [rows[name]["is_left_alone"] for name in ("noise", "window")] == [True, False]
    assert {f"script.{name}" for name, row in rows.items() if row["norm"] is not None} == {*tensors}
    assert len(tensors) == len({*codec.tensor_names(look)})
    assert not [name for name in found["values"] if name.startswith("script")]


def test_variables_of_one_name_and_objects_of_two_are_told_apart() -> None:
    shared = {"kind": "list", "class": "builtins:list", "items": [{"entry": 0}, 7], "maxlen": None}
    names = [["frame:0:main", [["best", 1], ["a", {"entry": 0}]]], ["module:__main__", [["best", 2]]]]

    found = [*variables.rows({"namespaces": names, "entries": [shared]})]

    assert [(row.path, row.kind, row.value) for row in found] == [
        ("best", "int", 1),
        ("a", "list of 2", None),
        ("a[0]", "the same as", "a"),
        ("a[1]", "int", 7),
        ("__main__: best", "int", 2),
    ]


@pytest.mark.parametrize(
    "entry", [{"kind": 3}, {"class": ":"}, {"at": 7}, {"items": [{"entry": 9}]}, {"steps": [[1]]}, {"set": 5}]
)
def test_a_forged_look_is_damage_and_no_traceback(entry: dict[str, Any]) -> None:
    forged = {"kind": "list", "class": "a:b", "at": [["module:a", "x"]], "items": [], **entry}

    with pytest.raises(ValueError, match="as a checkpoint has them"):
        [*variables.rows({"namespaces": [], "entries": [forged]}), *variables.rows([])]


def starts(forks: Forks, folder: Path, *given: str) -> list[Life]:
    """Return how starts with these arguments of `load` end, each of which trains one epoch."""
    return [
        forks.run(["train.py", str(epoch)], folder, environment={"GIVEN": one})
        for epoch, one in enumerate(given)
    ]


def test_an_override_of_a_variable_counts_once(folder: Path, forks: Forks) -> None:
    override = "{'override': ['script.best', 'script.seen']}"
    first, second, third = (one.out for one in starts(forks, folder, "{}", override, override))

    assert "at 0 4.5 3 0" in first
    assert "; the script's own: best, seen (" in second
    assert "at 1 4.5 6 1" in second
    assert "own" not in third
    assert "at 2 2.25 9 2" in third


def test_an_override_of_an_unknown_variable_is_refused(folder: Path, forks: Forks) -> None:
    _, mistyped = starts(forks, folder, "{}", "{'override': ['script.bset']}")

    assert "override='script.bset' names no saved variable. Did you mean 'script.best'?" in mistyped.err
    assert "the checkpoint has: script.average, script.best, script.dice" in mistyped.err


def test_a_run_that_begins_with_an_override_goes_on_exactly(folder: Path, forks: Forks) -> None:
    override = "{'override': ['script.*']}"

    assert "at 1 2.25 6 1" in starts(forks, folder, override, override)[1].out


def test_a_variable_that_is_left_out_is_neither_stored_nor_put_back(folder: Path, forks: Forks) -> None:
    without = "{'variables': ['-hist*', '-average']}"
    _, second, third = starts(forks, folder, "{}", without, "{}")

    assert "of train.py: best, epoch, last, seen, dice, and 2 more (" in second.out
    assert "at 1 2.25 3 1" in second.out
    assert "history" not in third.out
    assert "at 2 1.125 3 2" in third.out
    assert not second.err + third.err


def test_allow_accepts_what_does_not_come_back(folder: Path, forks: Forks) -> None:
    allow = "{'allow': ['script.reader', 'script.window']}"
    reading = SCRIPT.replace("best = best / 2", "best = best / 2 + 0 * next(reader)")
    (folder / "train.py").write_text(reading.replace("def main", "reader = iter(range(9))\ndef main"))
    lost, _, accepted = starts(forks, folder, "{}", "{}", allow)
    (folder / "train.py").write_text(SCRIPT.replace("window", "wide"))
    gone, accepted_too = starts(forks, folder, "{}", allow)

    assert "\n  reader: " in lost.err
    assert "window: it is not there any more" in gone.err
    assert not accepted.err + accepted_too.err


def test_what_changes_after_a_save_is_named(folder: Path, forks: Forks) -> None:
    (folder / "train.py").write_text(SCRIPT.replace("state.save()", "state.save(); history.append(0.0)"))

    assert ": history changed after save() in the same body" in forks.run(["train.py", "0"], folder).err


EDITED = """
import os, signal, sys, time
from torch.utils.data import DataLoader
from resumable import RunState
best, patience, name, begun, unread = 0, 5, 'a', time.perf_counter(), 1
EDIT
state = RunState.load('exp', loader=DataLoader(range(4)), every=None)
for epoch in state.epochs(3):
    for batch in state.batches():
        best, begun = best + patience + len(name), time.perf_counter()
    if epoch == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGTERM)
state.close()
"""


def test_an_edited_start_value_is_told_once(folder: Path, forks: Forks) -> None:
    outs = []
    for epoch, edit in (
        ("0", ""),
        ("1", "best, patience, name, unread = 9, 7, 'b', 2"),
        ("2", "best, patience, name = 9, 7, 'b'"),
    ):
        (folder / "train.py").write_text(EDITED.replace("EDIT", edit))
        outs.append(forks.run(["train.py", epoch], folder).out)

    assert [re.findall(r"of the script: (.*)", out) for out in outs] == [
        [],
        [
            "best was 0 as the training began, and is 9 now: it goes on as the checkpoint has it",
            "patience was 5 as the training began, and is 7 now: that of the script is used",
            "name was 'a' as the training began, and is 'b' now: that of the script is used",
        ],
        [],
    ]


BY_HAND = """
from torch.utils.data import DataLoader
from resumable import RunState
state = RunState.load('exp', loader=DataLoader(range(6)), every=None)
"""


@pytest.mark.parametrize(
    ("loop", "is_told"),
    [
        ("for _ in state.epochs(2):\n    it = iter(state.batches())\n    for _ in range(2): next(it)", True),
        (
            "for _ in state.epochs(2):\n    it = iter(state.batches())\n    for n in 1, 2: print(next(it))",
            True,
        ),
        ("for _ in state.epochs(2):\n    it = iter(state.batches())\n    while next(it, None): pass", False),
        ("for _ in state.epochs(2):\n    it = iter(state.batches())\n    next(it)", False),
        ("it = iter(state.batches())\nfor _ in state.steps(2):\n    for _ in range(2): next(it)", False),
        (
            "for _ in state.epochs(2):\n    for batch in state.batches():\n        for _ in range(2): pass",
            False,
        ),
        (
            "for n in 1, 2:\n  for _ in state.epochs(n):\n    it = iter(state.batches())\n"
            "    for _ in state.steps(3 * n):\n      for _ in range(2): next(it)",
            False,
        ),
    ],
)
def test_a_for_loop_that_counts_the_batches_itself_is_told(
    loop: str, is_told: bool, tmp_path: Path, forks: Forks
) -> None:
    (tmp_path / "train.py").write_text(BY_HAND + loop)

    life = forks.run(["train.py"], tmp_path).checked()

    assert ("next() asks for the batches in a for loop" in life.err) == is_told


NESTED = """
from torch.utils.data import DataLoader
from resumable import RunState
state = RunState.load('exp', loader={'a': DataLoader(range(3)), 'b': DataLoader(range(3))}, every=None)
def handed(batches):
    for batch in batches:
        yield batch
def nested(hand):
    for x in hand(state.batches('a')):
        for y in hand(state.batches('b')) if x == 0 else ():
            state.save()
            yield x, y
for epoch in state.epochs(1):
    LOOP
"""


@pytest.mark.parametrize(
    ("loop", "is_told"),
    [
        ("for x in nested(handed): pass", True),
        ("for x in nested(iter): pass", True),
        ("for x in zip(handed(state.batches('a')), handed(state.batches('b'))): state.save()", False),
        ("b = handed(state.batches('b'))\n    for x in state.batches('a'): next(b, 0); state.save()", False),
    ],
)
def test_a_save_in_an_inner_loop_over_batches_is_told_whoever_hands_them_on(
    loop: str, is_told: bool, tmp_path: Path, forks: Forks
) -> None:
    (tmp_path / "train.py").write_text(NESTED.replace("LOOP", loop))

    life = forks.run(["train.py"], tmp_path).checked()

    assert ("in a loop inside of the body" in life.err) == is_told


MANY = """
import sys
from resumable import RunState

class Word:
    def __init__(self, n):
        self.n, self.text = n, str(n)

few, words = [Word(n) for n in range(9)], [Word(n) for n in range(int(sys.argv[1]))]
with RunState.load(sys.argv[1], every=None) as state:
    for epoch in state.epochs(3):
        few[0].n += 1
        state.save()
"""


@pytest.mark.heavy
def test_many_objects_are_named_once_with_what_leaves_them_out(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "train.py").write_text(MANY)

    outs = [forks.run(["train.py", count], tmp_path).out for count in ("99900", "100001")]

    assert [re.findall(r"of the script: (.*)", re.sub(r"\d+\.\d s", "2.0 s", one)) for one in outs] == [
        [],
        [
            "a look at the 100,002 objects of words takes 2.0 s at each save; where a resume can do without "
            'them, variables=["*", "-words"] leaves them out'
        ],
    ]
