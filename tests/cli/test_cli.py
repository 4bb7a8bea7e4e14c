"""The command line: what it prints, what it exits with, and that its documented fields are there."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from places import CLI_PAGE

from resumable import RunState
from resumable.cli import app
from resumable.cli.app import main
from resumable.run.directory import Run
from resumable.run.history_writer import History


@pytest.fixture
def run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run with three checkpoints, the second of which is the best."""
    with RunState.load(run_dir, model=torch.nn.Linear(2, 2), maximize="acc", keep=None) as state:
        for value in (0.5, 0.9, float("nan")):
            state.save(acc=value)
    capsys.readouterr()
    return run_dir


RULE = {"seconds": 84.0, "reason": "1 % of 8400 s"}


@pytest.fixture
def told(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run of two starts; the last of its four checkpoints comes from the first."""
    with RunState.load(run_dir, model=torch.nn.Linear(2, 2), maximize="acc", keep=None) as state:
        for value in (0.5, 0.9, 0.1):
            state.save(acc=value)
        state.restore(1)
        state.save(acc=float("nan"))
    (run_dir / "history.jsonl").unlink(missing_ok=True)
    run = Run(run_dir)
    first, second = History(run), History(run)
    first.begin({"host": "node7", "pid": 1}, None)
    first.saved(run.open(1).about, "every 1 %", interval=RULE)
    first.saved(run.open(2).about, "SIGTERM")
    first.ended("SIGTERM")
    second.begin({"host": "longer-8", "pid": 2}, 1)
    second.saved(run.open(4).about, "called")
    capsys.readouterr()
    return run_dir


def table(printed: str) -> list[str]:
    """The lines of the checkpoints, of what `ls` has printed."""
    return printed.partition("\n\n")[0].splitlines()


def damage(run: Path, number: int, name: str) -> None:
    [path] = run.glob(f"checkpoints/{number:06}-*/{name}")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_shows_each_checkpoint_and_which_is_newest_and_best(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(run)]) == 0

    head, first, second, third = table(capsys.readouterr().out)
    assert head.split() == ["number", "epoch", "batch", "step", "acc", "size", "age", "why"]
    assert first.split()[:5] == ["1", "0", "0", "0", "0.5"]
    assert second.endswith("best")
    assert "newest" in third
    assert third.split()[4] == "nan"


def test_ls_json_has_just_the_documented_fields(told: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["ls", str(told), "--json"])

    section = (
        CLI_PAGE.read_text().partition("## `resumable show")[0].partition("One run or remote is an object")[2]
    )
    documented = [
        {
            name
            for row in re.findall(r"^\| (`.*?) \|", part, re.MULTILINE)
            for name in re.findall(r"`(\w+)`", row)
        }
        for part in section.split("`attempts` has an object")
    ]
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"run", "state", "detail", "goal", "checkpoints", "attempts", "remote"}
    assert [row["number"] for row in found["checkpoints"]] == [1, 2, 3, 4]
    assert all(row.keys() == documented[0] for row in found["checkpoints"])
    assert found["checkpoints"][3]["metrics"] == {"acc": "nan"}
    assert found["attempts"]
    assert all(row.keys() == documented[1] for row in found["attempts"])


def test_ls_says_why_each_was_made_and_which_are_abandoned(
    told: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["ls", str(told)])

    _, *rows = table(capsys.readouterr().out)
    assert [re.split(r" s  (?! )| s  ", row, maxsplit=1)[1] for row in rows] == [
        "every 1 %  best",
        "SIGTERM    abandoned",
        "           abandoned",
        "called     newest",
    ]


def test_ls_json_tells_what_a_rule_chose_and_how_each_start_ended(
    told: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["ls", str(told), "--json"])

    found = json.loads(capsys.readouterr().out)
    assert [row["interval"] for row in found["checkpoints"]] == [RULE, None, None, None]
    assert [row["why"] for row in found["checkpoints"]] == ["every 1 %", "SIGTERM", None, "called"]
    assert [row["abandoned"] for row in found["checkpoints"]] == [False, True, True, False]
    told_of = [(row["attempt"], row["from"], row["last"], row["ended"]) for row in found["attempts"]]
    assert told_of == [(1, None, 2, "SIGTERM"), (2, 1, 4, None)]


@pytest.mark.parametrize(
    "content", [None, "a folder", b"\0\xff\n[3]\n{", b'{"event": "save", "number": 1}\n']
)
def test_ls_needs_no_history(run: Path, content: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "history.jsonl").unlink(missing_ok=True)
    if content == "a folder":
        (run / "history.jsonl").mkdir()
    elif content is not None:
        (run / "history.jsonl").write_bytes(content)

    assert main(["ls", str(run)]) == 0

    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 4
    assert ("history.jsonl cannot be read" in printed.err) == (content == "a folder")


def test_ls_names_a_damaged_manifest_and_still_lists_the_others(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run, 3, "manifest.json")

    assert main(["ls", str(run)]) == 0

    printed = capsys.readouterr()
    assert table(printed.out)[-1].split() == ["3", "damaged"]
    assert table(printed.out)[-2].endswith("newest, best")
    assert "manifest.json: its checksum does not match" in printed.err


def test_ls_names_checkpoints_with_a_missing_and_with_a_short_file(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [missing], [short] = (run.glob(f"checkpoints/00000{n}-*/model.safetensors") for n in (1, 3))
    missing.unlink()
    short.write_bytes(short.read_bytes()[:-1])

    assert main(["ls", str(run)]) == 0

    printed = capsys.readouterr()
    _, first, second, third = table(printed.out)
    assert first.endswith("damaged")
    assert second.endswith("newest, best")
    assert third.endswith("damaged")
    assert "model.safetensors is missing" in printed.err
    assert re.search(r"model\.safetensors has \d+ bytes, its manifest says \d+", printed.err)


def test_ls_tells_which_bytes_no_other_checkpoint_has(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(600, 600), "head": torch.nn.Linear(600, 1)})
    model["body"].requires_grad_(False)
    with RunState.load(run_dir, model=model, keep=None) as state:
        state.save()
        state.save()
    capsys.readouterr()

    main(["ls", str(run_dir), "--json"])
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    main(["ls", str(run_dir)])
    head, *_ = table(capsys.readouterr().out)

    frozen = next(run_dir.glob("checkpoints/000001-*/model-frozen.safetensors")).stat().st_size
    assert [row["size"] - row["own"] for row in rows] == [frozen, frozen]
    assert "own" in head.split()


def test_verify_reads_what_a_resume_would_use(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out.split()[1::5] == ["3", "2"]


def test_verify_goes_back_until_one_is_intact(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, 3, "model.safetensors")
    damage(run, 2, "model.safetensors")

    assert main(["verify", str(run)]) == 4

    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in lines] == [["3", "damaged"], ["2", "damaged"], ["1", "intact"]]


@pytest.mark.parametrize(("place", "number"), [("@1", "1"), ("@best", "2"), ("@newest", "3"), ("/best", "2")])
def test_verify_of_one_checkpoint_reads_that_one(
    run: Path, place: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", f"{run}{place}"]) == 0
    assert capsys.readouterr().out.split()[1::5] == [number]


def test_verify_of_all_of_an_intact_run_exits_with_0(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run), "--all"]) == 0
    assert capsys.readouterr().out.count("intact") == 3


def test_verify_finds_one_flipped_bit_and_exits_with_4(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, 2, "model.safetensors")

    assert main(["verify", str(run), "--all"]) == 4

    printed = capsys.readouterr()
    assert [line.split()[2] for line in printed.out.splitlines()] == ["intact", "damaged", "intact"]
    assert "model.safetensors has the digest" in printed.err
    assert main(["verify", f"{run}@2"]) == 4


def test_verify_json_has_just_the_documented_fields(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, 1, "state.json")

    assert main(["verify", str(run), "--all", "--json"]) == 4

    section = CLI_PAGE.read_text().partition("## `resumable verify")[2].partition("\n## ")[0]
    documented = {
        name
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    rows = json.loads(capsys.readouterr().out)
    assert all(row.keys() == documented - {"pin"} for row in rows)
    assert main(["verify", str(run), "--all", "--json", "--pin"]) == 4
    assert all(row.keys() == documented for row in json.loads(capsys.readouterr().out))
    assert [bool(row["problem"]) for row in rows] == [True, False, False]


@pytest.mark.parametrize("path", ["{run}@oldest", "{run}@"])
def test_a_word_that_names_no_checkpoint_is_a_usage_error(
    run: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", path.format(run=run)]) == 2
    assert f"say {run}@41" in capsys.readouterr().err


def test_a_folder_may_have_the_sign_before_a_number_in_its_name(run: Path) -> None:
    other = run.rename(run.with_name("exp@2"))

    assert main(["verify", str(other)]) == main(["verify", f"{other}@1"]) == 0


def test_what_is_not_a_terminal_gets_no_colours(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["ls", str(run)])

    assert "\x1b" not in capsys.readouterr().out


def test_a_run_that_is_not_there_exits_with_3_and_suggests_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(run.with_name("exq"))]) == 3
    assert f"Did you mean {run}?" in capsys.readouterr().err


def test_a_file_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert main(["verify", str(tmp_path / "file")]) == 3


@pytest.mark.parametrize("words", [[], ["help"]])
def test_no_command_prints_the_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 0
    assert "verify" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["lss"], ["help", "lss"]])
def test_a_misspelt_command_is_told_what_may_be_meant(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert "no command 'lss'. Did you mean ls?" in capsys.readouterr().err


def test_demo_refuses_a_folder_that_is_there(tmp_path: Path) -> None:
    assert main(["demo", "--dir", str(tmp_path)]) == 2


@pytest.mark.parametrize("command", [name for names in app._GROUPS.values() for name in names])
def test_each_help_page_has_an_example_and_the_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])

    page = capsys.readouterr().out
    assert f"resumable {command}" in page.partition("example:")[2]
    assert "4 damaged" in page


@pytest.mark.parametrize("buffering", ["", "1"])
def test_output_that_is_not_read_to_its_end_is_no_error(run: Path, buffering: str) -> None:
    command = f"{sys.executable} -m resumable ls {run} | true; exit ${{PIPESTATUS[0]}}"
    settings = {**os.environ, "PYTHONUNBUFFERED": buffering}

    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=settings)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_checkpoint_that_is_pruned_meanwhile_is_left_out(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {**Run(run).names(), 9: "000009-step-00000000"}
    monkeypatch.setattr("resumable.run.directory.Run.numbers", lambda _: [*names])
    monkeypatch.setattr("resumable.run.directory.Run.names", lambda _: names)

    assert main(["verify", str(run), "--all"]) == 0
    assert main(["ls", str(run)]) == 0
    assert main(["prune", str(run), "--damaged", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("intact") == 3
    assert "damaged" not in printed.out + printed.err


def test_the_command_line_answers_without_torch_and_numpy(run: Path) -> None:
    script = (
        "import sys; before = {*sys.modules}; from resumable.cli.app import main\n"
        f"main(['ls', {str(run)!r}]); print(*{{*sys.modules}} - before)"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    heavy = {"torch", "numpy", "safetensors", "fsspec", "asyncio", "tqdm", "logging", "hashlib", "html"}
    assert not heavy & {*done.stdout.splitlines()[-1].split()}


@pytest.mark.heavy
def test_what_verifies_prunes_and_copies_a_run_does_without_torch(run: Path, tmp_path: Path) -> None:
    remote = f"file://{tmp_path}/remote"
    commands = [
        ["verify", str(run)],
        ["prune", str(run), "--keep=1"],
        ["push", str(run), remote],
        ["pull", str(tmp_path / "pulled"), remote],
    ]
    script = (
        "import sys; from resumable.cli.app import main\n"
        f"print([main(words) for words in {commands!r}]); print(*sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    *_, codes, modules = done.stdout.splitlines()
    assert codes == "[0, 0, 0, 0]"
    assert not {"torch", "numpy"} & {*modules.split()}


@pytest.mark.nightly
@pytest.mark.parametrize("name", [None, *app._names()])
def test_every_help_page_fits_80_columns(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    top = app.parser()
    [group] = [action for action in top._actions if isinstance(action, argparse._SubParsersAction)]

    text = (group.choices[name] if name else top).format_help()

    assert [line for line in text.splitlines() if len(line) > 80] == []
