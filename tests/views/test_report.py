"""The report: what it tells of a run, which saves it shows, and where it is written."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped import grouped
from places import CLI_PAGE
from torch.utils.data import DataLoader, TensorDataset

from resumable import Preempted, RunState, UsageError
from resumable.cli.app import main
from resumable.errors import warn
from resumable.files.lock import holder
from resumable.run.directory import Run
from resumable.run.history import NO_EXIT
from resumable.views import report
from resumable.views.charts import MOST, data, shown
from resumable.views.overview import overview


def train(run_dir: Path, upto: int, each: Callable[[], object] | None = None, **options: Any) -> None:
    """Train from wherever the run stands, and save at each step, or do something else."""
    given: dict[str, Any] = {"maximize": "acc", "keep": 4, "progress": False} | options
    with RunState.load(run_dir, model=torch.nn.Linear(4, 4), **grouped(**given)) as state:
        for step in state.steps(upto):
            if each:
                each()
                continue
            state.save(acc=step / 20, loss=float("nan") if step == 3 else 1 / (step + 1))


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that went back once, was ended by SIGTERM once, and has been resumed twice."""
    run_dir = tmp_path_factory.mktemp("told") / "exp"
    train(run_dir, 8)
    with RunState.load(run_dir, model=torch.nn.Linear(4, 4), maximize="acc", keep=4) as state:
        state.restore(6)
        for step in state.steps(10):
            state.save(acc=step / 20 - 0.01, loss=1 / (step + 1))
    with contextlib.suppress(Preempted):
        train(run_dir, 20, on_preempt="raise", each=lambda: os.kill(os.getpid(), signal.SIGTERM))
    train(run_dir, 14)
    return run_dir


def events(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(event["kind"], event["attempt"], event["number"], event["step"]) for event in found["events"]]


def test_a_run_is_reported_with_what_happened_to_it_and_where(trained: Path) -> None:
    found: dict[str, Any] = overview(Run(trained))

    assert events(found) == [
        ("resume", 2, 8, 8),
        ("back", 2, 6, 6),
        ("resume", 3, 12, 10),
        ("preempted", 3, None, 11),
        ("resume", 4, 13, 11),
    ]
    assert found["events"][3]["how"] == "SIGTERM"
    assert [save["number"] for save in found["saves"] if save["abandoned"]] == [7, 8]
    assert (found["newest"], found["best"]) == (16, 16)
    assert [attempt["saves"] for attempt in found["attempts"]] == [8, 4, 1, 3]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_silenced_warning_is_kept_counted_and_shown(
    run_dir: Path, capsys: pytest.CaptureFixture[str], is_killed: bool
) -> None:
    unordered = DataLoader(TensorDataset(torch.zeros(4)), num_workers=1, in_order=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(run_dir, 2, loader=unordered)
        train(run_dir, 4, loader=unordered, each=lambda: warn("it is\n<b>hot</b>"))
    if is_killed:
        path = run_dir / "history.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    train(run_dir, 5, allow=["loader"])
    train(run_dir, 6)

    told = capsys.readouterr().out
    assert re.findall(r"; (\d) warnings? at the last start \(resumable report", told) == ["1", "2"]
    page = report.page([overview(Run(run_dir))])
    assert "<h2>Warnings</h2>" in page
    assert "&lt;b&gt;hot" in page
    assert main(["ls", str(run_dir)]) == 0
    listed = capsys.readouterr().out.splitlines()[-4:]
    assert [re.findall(r"\d warnings?", line) for line in listed] == [["1 warning"], ["2 warnings"], [], []]


def test_of_a_checkpoint_that_was_pruned_the_metrics_stay(trained: Path) -> None:
    found: dict[str, Any] = overview(Run(trained))

    here = [save["number"] for save in found["saves"] if save["here"]]
    assert here == Run(trained).numbers()
    assert len(here) < len(found["saves"]) == 16
    assert found["saves"][3]["metrics"] == {"acc": 0.15, "loss": "nan"}


@pytest.mark.parametrize(
    ("harm", "problem"),
    [
        (lambda path: path.unlink(), "model.safetensors is missing"),
        (lambda path: os.truncate(path, 10), "model.safetensors has 10 bytes, its manifest says"),
    ],
)
def test_a_file_that_is_missing_or_short_is_reported_without_reading(
    run_dir: Path, harm: Any, problem: str
) -> None:
    train(run_dir, 3)
    [path] = run_dir.glob("checkpoints/000002-*/model.safetensors")
    harm(path)

    found: dict[str, Any] = overview(Run(run_dir))

    assert problem in found["saves"][1]["problem"]
    assert [bool(save["problem"]) for save in found["saves"]] == [False, True, False]
    assert [save["own"] is None for save in found["saves"]] == [False, True, False]
    assert found["newest"] == 3


def test_one_flipped_bit_is_found_where_every_byte_is_read(run_dir: Path) -> None:
    train(run_dir, 3)
    [path] = run_dir.glob("checkpoints/000003-*/model.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    [by_sizes], [by_bytes] = report.facts([Run(run_dir)]), report.facts([Run(run_dir)], reads_all=True)

    assert (by_sizes["checked"], by_sizes["newest"]) == ("sizes", 3)
    assert (by_bytes["checked"], by_bytes["newest"]) == ("bytes", 2)


@pytest.mark.parametrize("content", [b"", b"\0\n[1]\n", b'{"event": "start"}\n{"event": "end", "how": 3}\n'])
def test_a_history_that_says_nothing_leaves_what_the_checkpoints_say(run_dir: Path, content: bytes) -> None:
    train(run_dir, 3)
    (run_dir / "history.jsonl").write_bytes(content)

    found: dict[str, Any] = overview(Run(run_dir))

    assert [save["step"] for save in found["saves"]] == [1, 2, 3]
    assert report.page([found])


@pytest.mark.parametrize("value", [None, 3, "x", [], {}, 1e400, -1, True, [{"a": 1}], {"a": [None]}])
def test_a_line_of_the_history_may_hold_anything(run_dir: Path, value: Any) -> None:
    train(run_dir, 2)
    file = run_dir / "history.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    known = ("event", "number", "attempt", "superseded", "parent")
    wild = [{key: line[key] if key in known else value for key in line} for line in lines]
    told = [json.dumps(line) for one, odd in zip(lines, wild, strict=True) for line in (one, odd)]
    file.write_text("\n".join([*told, *map(json.dumps, wild)]).replace("Infinity", "1e999") + "\n")

    assert report.page([overview(Run(run_dir))])


def test_of_very_many_saves_those_that_matter_and_the_extremes_are_shown() -> None:
    run = many(10_000)
    some = shown(run, 600)

    numbers = {save["number"] for save in some}
    assert len(some) <= 600
    assert {1, 10_000, run["best"], 5_000, 7_777} <= numbers
    assert numbers >= {event["number"] for event in run["events"]}


def many(count: int) -> dict[str, Any]:
    """What there is to tell of a run with so many saves; no. 5000 is a spike, no. 7777 is damaged."""
    saves = [
        {
            **{"number": n, "parent": n - 1 or None, "attempt": 1, "time": "2026-07-30T12:00:00+00:00"},
            **{"epoch": n // 100, "batch": n % 100, "step": n * 10, "samples": n * 320, "size": 1000},
            **{"metrics": {"loss": 99.0 if n == 5_000 else 1 / n, "acc": n % 7 / 7}, "why": "every 1 %"},
            **{"held": 0.01, "durable": 0.5, "here": True, "own": 900, "abandoned": False, "pushed": False},
            "problem": "it is damaged" if n == 7_777 else None,
        }
        for n in range(1, count + 1)
    ]
    event = {"kind": "resume", "attempt": 2, "number": 1234, "step": 12340, "epoch": 12, "batch": 34}
    return {
        **{
            "run": "runs/many",
            "run_id": "1",
            "checked": "sizes",
            "problem": None,
            "newest": count,
            "best": 6,
        },
        **{"goal": {"metric": "acc", "maximize": True, "value": 6 / 7}, "size": 900, "size_unshared": 1000},
        **{"remote": None, "saves": saves, "attempts": [], "state": "unknown", "seconds": None},
        **{"done": {"epoch": count // 100, "batch": 0, "step": count * 10}, "planned": None},
        "events": [event | {"time": "2026-07-30T12:00:00+00:00", "how": None}],
    }


def test_a_branch_goes_past_a_save_that_is_not_drawn(trained: Path) -> None:
    run: dict[str, Any] = overview(Run(trained))
    run["saves"][6]["step"] = None

    assert branches(run) == [(6, 8)]


def branches(run: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the numbers of the saves between which lines of abandoned branches are drawn."""
    [drawn] = data([run], ["acc"])["runs"]
    return [(drawn["number"][before], drawn["number"][after]) for before, after in drawn["branches"]]


def test_the_page_is_written_as_a_whole_and_again(trained: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"

    assert main(["report", str(trained), "-o", str(page)]) == 0
    first = page.read_bytes()
    assert main(["report", str(trained), "-o", str(page)]) == 0

    assert first.startswith(b"<!doctype html>")
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.parametrize("content", [b"", b"<!doctype html>\n<html>my thesis"])
def test_what_is_no_report_is_not_overwritten(
    trained: Path, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    page.write_bytes(content)

    assert main(["report", str(trained), "-o", str(page)]) == 2

    assert page.read_bytes() == content
    assert "is not a page that `resumable report` has written" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_to_is_named(trained: Path, tmp_path: Path) -> None:
    run = Run(trained)

    with pytest.raises(UsageError, match="is a folder"):
        report.write([run], tmp_path)
    with pytest.raises(UsageError, match="there is no folder"):
        report.write([run], tmp_path / "none" / "page.html")


def test_json_has_just_the_documented_fields(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(trained), "--json"]) == 0

    section = CLI_PAGE.read_text().partition("## `resumable report")[2].partition("\n## ")[0]
    heads = [re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for part in section.split("\n**")]
    documented = [{name for head in part for name in re.findall(r"`(\w+)`", head)} for part in heads]
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"page", "runs"}
    [run] = found["runs"]
    assert run.keys() == documented[1]
    for name, fields in zip(("saves", "events", "attempts"), documented[2:], strict=True):
        assert all(row.keys() == fields for row in run[name]), name


def test_a_report_in_the_home_folder_is_written_there(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with RunState.load(run_dir) as state:
        state.report("~/page.html")

    assert (tmp_path / "page.html").exists()


def test_a_training_writes_its_report_and_a_notebook_shows_it(run_dir: Path, tmp_path: Path) -> None:
    train(run_dir, 3)
    with RunState.load(run_dir, model=torch.nn.Linear(4, 4), maximize="acc", keep=4) as state:
        made = state.report(tmp_path / "page.html")
        shown = state._repr_html_()

    assert made is not None
    assert os.fspath(made) == str(tmp_path / "page.html")
    assert 'srcdoc="&lt;!doctype html&gt;' in made._repr_html_()
    assert "3 checkpoints" in shown
    assert len(shown) < 3000


def test_a_notebook_shows_the_newest_checkpoints_and_the_damaged_one(run_dir: Path) -> None:
    train(run_dir, 7, keep=None)
    [path] = run_dir.glob("checkpoints/000007-*/manifest.json")
    path.write_bytes(b"<script>")

    shown = Run(run_dir)._repr_html_()

    assert "7 checkpoints, the newest 5" in shown
    assert re.findall(r'<tr><td class="number">(\d+)', shown) == ["7", "6", "5", "4", "3"]
    assert "damaged" in shown


# How a run stands, and what saving has taken.


def test_a_run_that_did_all_its_steps_is_finished(trained: Path) -> None:
    found: dict[str, Any] = overview(Run(trained))

    assert (found["state"], found["planned"]) == ("finished", {"steps": 14})
    assert found["done"] == {"epoch": 0, "batch": 0, "step": 14}


@pytest.mark.parametrize(
    ("how", "state"),
    [("closed", "unfinished"), ("SIGTERM", "stopped"), ("ValueError: boom", "crashed"), (None, "crashed")],
)
def test_the_last_line_says_what_became_of_a_run(run_dir: Path, how: str | None, state: str) -> None:
    train(run_dir, 3)
    file = run_dir / "history.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    told = [line | {"steps": 9} if line["event"] == "loop" else line for line in lines[:-1]]
    told += [lines[-1] | {"how": how}] if how else []
    file.write_text("".join(json.dumps(line) + "\n" for line in told))

    found: dict[str, Any] = overview(Run(run_dir))

    assert (found["state"], found["done"]["step"]) == (state, 3)


@pytest.fixture
def killed_twice(run_dir: Path) -> Path:
    """A run of two starts that have not noted their ends."""
    train(run_dir, 3)
    train(run_dir, 5)
    file = run_dir / "history.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line for line in lines if line["event"] != "end"]
    lines[0]["time"], lines[-1]["time"] = "2026-01-01T00:00:00+00:00", "2026-01-01T00:00:30+00:00"
    for line in lines:
        if line.get("previous"):
            line["previous"]["how"] = NO_EXIT
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def test_the_end_of_a_killed_last_attempt_counts_too(killed_twice: Path) -> None:
    found: dict[str, Any] = overview(Run(killed_twice))

    failed = [
        (e["attempt"], e["number"], e["step"], e["how"]) for e in found["events"] if e["kind"] == "failed"
    ]
    assert failed == [(1, 3, 3, NO_EXIT), (2, 5, 5, NO_EXIT)]
    page = report.page([found])
    assert "2 failures" in page
    assert f"attempt 2 ended: {NO_EXIT}, after step 5<" in page
    assert "after 5" in page


def test_a_hint_about_bold_stands_only_where_something_is_bold(trained: Path, tmp_path: Path) -> None:
    train(tmp_path / "other", 2, every=7)
    one, other = overview(Run(trained)), overview(Run(tmp_path / "other"))

    assert "Bold: " not in report.page([one, one])
    assert "Bold: " in report.page([one, other])


def test_a_run_that_is_trained_is_running_and_stays_locked(run_dir: Path) -> None:
    with RunState.load(run_dir, model=torch.nn.Linear(4, 4)):
        assert overview(Run(run_dir))["state"] == "running"
        assert holder(run_dir / ".lock")

    assert holder(run_dir / ".lock") is None


def test_a_start_notes_its_settings_without_what_is_long(run_dir: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2).requires_grad_(False) for _ in range(60)))
    head = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.25)
    parts = {"backbone": model, "head": head}
    torch.manual_seed(7)
    with RunState.load(run_dir, model=parts, optimizer=optimizer, keep=5):
        pass

    settings = overview(Run(run_dir))["attempts"][0]["settings"]
    assert (settings["optimizer.lr"], settings["optimizer.betas"]) == ("0.25", "(0.9, 0.999)")
    assert (settings["seed"], settings["keep"], settings["processes"]) == ("7", "5", "1")
    assert {name: size for name, size in settings.items() if name.endswith(".parameters")} == {
        "model.backbone.parameters": "360",
        "model.head.parameters": "3",
    }
    assert "model.backbone.frozen" not in settings


def test_one_page_has_far_less_than_two_megabytes() -> None:
    run = many(2500)
    names = [f"metric{number}" for number in range(12)]
    for save in run["saves"]:
        save["metrics"] = {name: save["number"] ** 0.5 + place for place, name in enumerate(names)}

    page = report.page([run | {"goal": None}])

    assert len(page.encode()) < 1_000_000
    assert len(data([run], names)["runs"][0]["x"]) == MOST
