"""The command line: what it prints, what it exits with, and that its documented fields are there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from resumable import RunState
from resumable.cli import main

DOCS = Path(__file__).parent.parent / "docs" / "cli.md"


@pytest.fixture
def run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run with three checkpoints, the second of which is the best."""
    with RunState(run_dir, model=torch.nn.Linear(2, 2), maximize="acc", keep=None) as state:
        for value in (0.5, 0.9, float("nan")):
            state.save(acc=value)
    capsys.readouterr()
    return run_dir


def damage(run: Path, number: int, name: str) -> None:
    [path] = run.glob(f"checkpoints/{number:06}-*/{name}")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_shows_each_checkpoint_and_which_is_newest_and_best(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(run)]) == 0

    head, first, second, third = capsys.readouterr().out.splitlines()
    assert head.split() == ["number", "epoch", "batch", "step", "metrics", "size", "saved"]
    assert first.split()[:6] == ["1", "0", "0", "0", "acc", "0.5"]
    assert second.endswith("best")
    assert "newest" in third
    assert "acc nan" in third


def test_ls_json_has_just_the_documented_fields(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["ls", str(run), "--json"])

    section = DOCS.read_text().partition("## `resumable verify")[0].partition("## `resumable ls")[2]
    documented = {
        name
        for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    rows = json.loads(capsys.readouterr().out)
    assert [row["number"] for row in rows] == [1, 2, 3]
    assert all(row.keys() == documented for row in rows)
    assert rows[2]["metrics"] == {"acc": "nan"}


def test_ls_names_a_damaged_manifest_and_still_lists_the_others(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run, 3, "manifest.json")

    assert main(["ls", str(run)]) == 0

    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].split() == ["3", "damaged"]
    assert printed.out.splitlines()[-2].endswith("newest, best")
    assert "manifest.json: its checksum does not match" in printed.err


def test_verify_of_an_intact_run_exits_with_0(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out.count("intact") == 3


def test_verify_finds_one_flipped_bit_and_exits_with_4(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, 2, "model.safetensors")

    assert main(["verify", str(run)]) == 4

    printed = capsys.readouterr()
    assert [line.split()[2] for line in printed.out.splitlines()] == ["intact", "damaged", "intact"]
    assert "model.safetensors has the digest" in printed.err


def test_verify_json_has_just_the_documented_fields(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, 1, "state.json")

    assert main(["verify", str(run), "--json"]) == 4

    section = DOCS.read_text().partition("## `resumable verify")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`(\w+)`", section))
    rows = json.loads(capsys.readouterr().out)
    assert all(row.keys() == documented for row in rows)
    assert [bool(row["problem"]) for row in rows] == [True, False, False]


def test_a_run_that_is_not_there_exits_with_3_and_suggests_one(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(run.with_name("exq"))]) == 3
    assert f"Did you mean {run}?" in capsys.readouterr().err


def test_a_file_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert main(["verify", str(tmp_path / "file")]) == 3


def test_no_command_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as ended:
        main([])

    assert ended.value.code == 2


def test_demo_refuses_a_folder_that_is_there(tmp_path: Path) -> None:
    assert main(["demo", "--dir", str(tmp_path)]) == 2


@pytest.mark.parametrize("command", ["ls", "verify", "demo"])
def test_each_help_page_has_an_example_and_the_exit_codes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])

    page = capsys.readouterr().out
    assert f"resumable {command}" in page.partition("example:")[2]
    assert "4 damaged" in page


def test_output_that_nobody_reads_to_its_end_is_no_error(run: Path) -> None:
    command = f"{sys.executable} -m resumable ls {run} | true; exit ${{PIPESTATUS[0]}}"

    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")


def test_sizes_and_ages_are_as_people_write_them() -> None:
    from datetime import datetime, timedelta, timezone

    from resumable.cli import _age, _size

    def ago(**length: float) -> str:
        return _age((datetime.now(timezone.utc) - timedelta(**length)).isoformat())

    assert [_size(n) for n in (0, 999, 1000, 999_600, 5 * 10**12)] == ["0 B", "999 B", "1 kB", "1 MB", "5 TB"]
    assert [ago(hours=1), ago(hours=3), ago(days=9), ago(seconds=-5)] == [
        "60 min ago",
        "3 h ago",
        "9 days ago",
        "0 s ago",
    ]


def test_a_checkpoint_that_is_pruned_meanwhile_is_left_out(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resumable.cli.Run.numbers", lambda _: [1, 2, 3, 9])

    assert main(["verify", str(run)]) == 0
    assert main(["ls", str(run)]) == 0
    assert capsys.readouterr().out.count("intact") == 3
