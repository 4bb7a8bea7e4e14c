"""`resumable ls`: several runs, a remote, one checkpoint, and tables that fit the terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import Forks
from places import CLI_PAGE
from tables import rows_of
from terminals import in_a_terminal

from resumable import RunState
from resumable.cli.app import main

Captured = pytest.CaptureFixture[str]


def train(path: Path, *values: float, metrics: int = 1, close: bool = True) -> RunState:
    """Make a run with a checkpoint for each value of `acc`, and more metrics beside it."""
    state = RunState.load(path, model=torch.nn.Linear(2, 2), maximize="acc", keep=None)
    for value in values:
        more = {f"metric_{at}": value * at for at in range(1, metrics)}
        state.save(**more, acc=value)
    if close:
        state.close()
    return state


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> Path:
    """A folder with runs, two of them one and two levels down, and other folders."""
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "runs" / "exp", 0.5, 0.9, 0.1)
    train(tmp_path / "runs" / "sweep" / "a", 0.2)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / ".hidden").mkdir()
    capsys.readouterr()
    return tmp_path / "runs"


def listed(capsys: Captured, *words: str, code: int = 0) -> Any:
    """Return what a command prints as JSON."""
    assert main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("words", [[], ["runs"], ["runs/exp", "runs/sweep"]])
def test_a_folder_several_runs_or_nothing_lists_a_line_for_each_run(
    runs: Path, words: list[str], capsys: Captured
) -> None:
    assert main(["ls", *words]) == 0

    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:7] == ["run", "state", "epoch", "step", "best", "acc", "checkpoints"]
    assert re.match(r"runs/exp +finished +0 +0 +0\.9 @2 +3 +[\d.]+ kB +\d+ s$", first)
    assert second.startswith("runs/sweep/a")


def test_the_list_of_runs_has_just_the_documented_fields(runs: Path, capsys: Captured) -> None:
    rows = listed(capsys, "ls", "runs")

    table = CLI_PAGE.read_text().partition("the list of runs is a list of objects")[2]
    assert all(row.keys() == rows_of(table.partition("One run or remote")[0]) for row in rows)
    assert [row["run"] for row in rows] == ["runs/exp", "runs/sweep/a"]
    assert rows[0]["best"] == {"metric": "acc", "value": 0.9, "number": 2}


def test_a_folder_without_runs_is_not_found(runs: Path, capsys: Captured) -> None:
    assert main(["ls", "runs/notes"]) == 3
    error = capsys.readouterr().err
    assert "there are no runs in runs/notes, nor up to three levels below it." in error
    assert "name the folder that holds them: resumable ls FOLDER" in error


@pytest.mark.parametrize("command", ["ls", "show", "report"])
def test_an_address_with_one_slash_is_corrected(command: str, capsys: Captured) -> None:
    assert main([command, "s3:/bucket/exp"]) == 2
    assert "Did you mean 's3://bucket/exp'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["runs/exp/newest", "runs/exp@2", "runs/exp/newest/"])
def test_a_command_about_a_run_takes_the_run_of_a_checkpoint(runs: Path, name: str, capsys: Captured) -> None:
    assert [Path(one["run"]).name for one in listed(capsys, "report", name)["runs"]] == ["exp"]
    assert [Path(one["run"]).name for one in listed(capsys, "ls", name, "runs/sweep")] == ["exp", "a"]
    assert main(["prune", name, "--keep", "1"]) == 2


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["verify", "A", "B"], "unrecognized arguments: B"),
        (["verify", "A", "--jsn"], "unrecognized arguments: --jsn. Did you mean --json?"),
    ],
)
def test_an_unknown_argument_shows_the_usage_of_its_command(
    words: list[str], error: str, capsys: Captured
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)

    said = capsys.readouterr().err
    assert said.startswith("usage: resumable verify ")
    assert said.endswith(f"resumable verify: error: {error}\n")


ENDS = """
import os, signal, sys, torch
from resumable import RunState
path, how = sys.argv[1:]
state = RunState.load(path, model=torch.nn.Linear(2, 2))
state.save()
state.wait()
if how == "stopped":
    for _ in state.epochs(2):
        os.kill(os.getpid(), signal.SIGTERM)
if how == "crashed":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "failed":
    with state:
        raise ValueError("no more data")
if how == "running":
    print("ready", flush=True)
    signal.pause()
state.close()
"""


@pytest.mark.parametrize(
    ("how", "state", "detail"),
    [
        ("closed", "finished", "closed"),
        ("stopped", "stopped", "SIGTERM"),
        ("crashed", "crashed", "no exit recorded"),
        ("failed", "crashed", "ValueError: no more data"),
    ],
)
@pytest.mark.heavy
def test_the_state_says_how_a_run_ended(
    tmp_path: Path, how: str, state: str, detail: str, capsys: Captured, forks: Forks
) -> None:
    forks.run(["-c", ENDS, tmp_path / "exp", how], tmp_path)

    [row] = listed(capsys, "ls", str(tmp_path))
    assert (row["state"], row["detail"]) == (state, detail)


@pytest.mark.heavy
def test_a_run_is_running_while_its_process_holds_the_lock(
    tmp_path: Path, capsys: Captured, forks: Forks
) -> None:
    process = forks.begin(["-c", ENDS, tmp_path / "exp", "running"], tmp_path)
    process.wait_for("ready")
    [during] = listed(capsys, "ls", str(tmp_path))
    process.kill()
    process.ended()
    [after] = listed(capsys, "ls", str(tmp_path))

    assert during["state"] == "running"
    assert during["detail"].startswith(f"process {process.pid} on ")
    assert after["state"] == "crashed"


def test_asking_who_writes_a_run_leaves_its_lock_alone(runs: Path, capsys: Captured, forks: Forks) -> None:
    state = train(runs / "exp", close=False)
    capsys.readouterr()

    assert listed(capsys, "ls", "runs/exp")["state"] == "running"

    # Another process still cannot take it.
    code = f"from resumable.run.directory import Run; Run({str(runs / 'exp')!r}).acquire()"
    other = forks.run(["-c", code], runs)
    state.close()
    assert "is being written by process" in other.err


@pytest.mark.parametrize("place", ["runs/exp@2", "runs/exp@best", "runs/exp/best", "{folder}"])
@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_every_way_to_name_a_checkpoint_is_understood(
    runs: Path, place: str, command: str, capsys: Captured
) -> None:
    [folder] = runs.glob("exp/checkpoints/000002-*")

    found = listed(capsys, command, place.format(folder=folder))

    rows = {"ls": lambda: found["checkpoints"], "verify": lambda: found, "show": lambda: [found]}[command]()
    assert [row["number"] for row in rows] == [2]


def test_a_word_for_a_checkpoint_needs_no_link(runs: Path, capsys: Captured) -> None:
    (runs / "exp" / "newest").unlink()

    assert listed(capsys, "show", "runs/exp/newest")["number"] == 3


def test_the_last_few_are_the_newest(runs: Path, capsys: Captured) -> None:
    assert [row["number"] for row in listed(capsys, "ls", "runs/exp", "-n", "2")["checkpoints"]] == [2, 3]
    main(["ls", "runs/exp", "-n", "1"])
    assert capsys.readouterr().out.startswith("the last 1 of 3 checkpoints\n")


def test_a_remote_is_listed_like_a_run(runs: Path, capsys: Captured) -> None:
    place = f"file://{runs.parent}/there"
    main(["push", "runs/exp", place, "--which", "all"])
    capsys.readouterr()

    here, there = listed(capsys, "ls", "runs/exp"), listed(capsys, "ls", place)

    assert there.keys() == here.keys()
    for one, other in zip(here["checkpoints"], there["checkpoints"], strict=True):
        assert one.keys() == other.keys()
        same = ("number", "step", "metrics", "size", "saved", "newest", "best", "problem")
        assert all(one[key] == other[key] for key in same)
    main(["ls", place])
    assert capsys.readouterr().out.splitlines()[2].endswith("best")


def test_what_is_wrong_in_a_remote_is_named(runs: Path, capsys: Captured) -> None:
    main(["push", "runs/exp", f"file://{runs.parent}/there", "--which", "all"])
    [short] = runs.parent.glob("there/checkpoints/000003-*/model.safetensors")
    short.write_bytes(b"")
    capsys.readouterr()

    rows = listed(capsys, "ls", f"file://{runs.parent}/there")["checkpoints"]

    assert "model.safetensors has 0 bytes" in rows[2]["problem"]
    assert [row["newest"] for row in rows] == [False, True, False]


def test_a_remote_without_checkpoints_is_not_found(tmp_path: Path, capsys: Captured) -> None:
    assert main(["ls", f"file://{tmp_path}"]) == 3
    assert "holds no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["runs/exp@2", "runs/exp@best"])
def test_a_checkpoint_can_be_named_to_push(runs: Path, which: str, capsys: Captured) -> None:
    assert main(["push", which, f"file://{runs.parent}/there"]) == 0
    assert [path.name[:6] for path in (runs.parent / "there" / "checkpoints").iterdir()] == ["000002"]
    assert main(["push", which, f"file://{runs.parent}/there", "--which", "all"]) == 2


def test_export_writes_to_stdout(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load

    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO()))
    assert main(["export", "runs/exp@2", "-o", "-"]) == 0

    [folder] = runs.glob("exp/checkpoints/000002-*")
    there = load((folder / "model.safetensors").read_bytes())
    sent = load(written.getvalue())
    assert sorted(sent) == ["bias", "weight"]
    assert {str(one.tolist()) for one in sent.values()} == {str(one.tolist()) for one in there.values()}


METRICS = 12


@pytest.fixture
def wide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> Iterator[Path]:
    """A run with twelve metrics; `acc`, the goal, comes last."""
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "wide", 0.25, 0.5, metrics=METRICS)
    capsys.readouterr()
    return tmp_path / "wide"


@pytest.mark.parametrize("width", [60, 140])
def test_a_list_is_no_wider_than_the_terminal_and_names_what_went(wide: Path, width: int) -> None:
    printed = in_a_terminal([sys.executable, "-m", "resumable", "ls", "wide"], width)

    assert max(map(len, printed.splitlines())) <= width
    head = printed.splitlines()[0].split()
    assert head[head.index("step") + 1] == "acc"
    assert "metric_11" not in head
    assert "no room for: " in printed


def test_a_pipe_gets_every_metric(wide: Path, capsys: Captured) -> None:
    main(["ls", "wide"])

    head = capsys.readouterr().out.splitlines()[0].split()
    assert {f"metric_{at}" for at in range(1, METRICS)} < {*head}


@pytest.mark.parametrize(("answer", "left"), [("y\n", 1), ("n\n", 3), ("\n", 3), ("\x04", 3)])
@pytest.mark.quick(2)
def test_prune_asks_on_a_terminal_and_shows_what_goes(runs: Path, answer: str, left: int) -> None:
    command = [sys.executable, "-m", "resumable", "prune", "runs/exp", "--keep", "1"]

    printed = in_a_terminal(command, 80, answer=answer, after="[y/N]")

    assert "would go" in printed.partition("[y/N]")[0]
    there = [*(runs / "exp" / "checkpoints").glob("0*")]
    # The newest and the best.
    assert len(there) == (2 if left == 1 else 3)


def test_prune_with_yes_does_not_ask(runs: Path) -> None:
    command = [sys.executable, "-m", "resumable", "prune", "runs/exp", "--keep", "1", "--yes"]

    assert "[y/N]" not in in_a_terminal(command, 80)
    assert len([*(runs / "exp" / "checkpoints").glob("0*")]) == 2
