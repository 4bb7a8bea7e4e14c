"""What a checkpoint notes down about where it was made, and what of it is compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from resumable import environment


def test_the_description_is_json_and_starts_no_device() -> None:
    found = environment.describe()

    assert json.loads(json.dumps(found)) == found
    assert found["torch"] == torch.__version__
    assert (found["gpus"], found["cudnn"]) == ([], None)
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize(
    ("then", "now", "named"),
    [
        ({"torch": "2.12"}, {"torch": "2.13"}, ["torch was 2.12 and is 2.13 now"]),
        ({"deterministic": False}, {"deterministic": True}, ["deterministic was False and is True now"]),
        ({"deterministic": True}, {"deterministic": False}, ["deterministic was True and is False now"]),
        ({"gpus": ["H200"]}, {"gpus": ["A100"]}, ["gpus was ['H200'] and is ['A100'] now"]),
        ({"threads": 1, "numpy": "2"}, {"threads": 1, "numpy": "2"}, []),
        ({"gpus": ["H200"], "cudnn": 9}, {"gpus": [], "cudnn": None}, []),
        ({"gpus": [], "cudnn": None}, {"gpus": ["H200"], "cudnn": 9}, []),
        ({}, {"new in this version": 1}, []),
        ({"gone in this version": 1}, {}, []),
        ({"git": "a"}, {"git": "b"}, []),
    ],
)
def test_what_both_sides_know_and_is_not_as_it_was_is_named(
    then: dict[str, Any], now: dict[str, Any], named: list[str]
) -> None:
    assert environment.differences(then, now) == named


def test_a_flag_that_results_depend_on_is_in_the_description() -> None:
    before = environment.describe()
    torch.use_deterministic_algorithms(True)
    try:
        named = environment.differences(before, environment.describe())
    finally:
        torch.use_deterministic_algorithms(False)

    assert named == ["deterministic was False and is True now"]


@pytest.mark.parametrize(
    ("files", "commit"),
    [
        ({"HEAD": b"0123abc\n"}, "0123abc"),
        ({"HEAD": b"ref: refs/heads/main\n", "refs/heads/main": b"4567def\n"}, "4567def"),
        ({"HEAD": b"ref: refs/heads/packed\n"}, None),
        ({"HEAD": b"\xff\xfe"}, None),
        ({}, None),
    ],
)
def test_the_commit_of_the_scripts_repository_is_noted_if_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], commit: str | None
) -> None:
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    for name, content in files.items():
        (tmp_path / ".git" / name).write_bytes(content)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "scripts" / "train.py")])

    assert environment.describe()["git"] == commit


@pytest.mark.parametrize("script", ["train.py", ""])
def test_a_script_outside_of_any_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script])

    assert environment.describe()["git"] is None
