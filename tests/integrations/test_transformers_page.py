"""The page on Trainer: its script runs, twice, and its diff changes two lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from places import ROOT

pytest.importorskip("transformers")

PAGE = (ROOT / "docs" / "integrations" / "transformers.md").read_text()


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_the_pages_script_trains_and_is_complete_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (script,) = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)

    for _ in range(2):
        exec(compile(script, "page", "exec"), {"__name__": "page"})

    assert "resumed runs/exp from checkpoint" in capsys.readouterr().out


def test_the_pages_diff_adds_two_lines_and_takes_none_away() -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)

    assert [line[0] for line in diff.splitlines() if line[0] != " "] == ["+", "+"]
