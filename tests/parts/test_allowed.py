"""The patterns of `allow=` over several starts of the same command."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from resumable import RunState, UsageError


def _start(run_dir: Path, names: str, allow: list[str]) -> None:
    model = nn.ModuleDict({name: nn.Linear(1, 1) for name in names.split()})
    with RunState.load(run_dir, model=model, allow=allow) as state:
        state.save()


def test_allow_may_name_what_is_gone_already(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _start(run_dir, "body old", [])
    for _ in range(3):
        _start(run_dir, "body", ["model.old.*"])

    first, *later = capsys.readouterr().out.splitlines()[1:]
    assert first.endswith("; left out of the checkpoint: old.weight, old.bias")
    assert not any("left out" in line for line in later)


def test_an_old_name_may_be_allowed_at_a_fresh_start_and_not_later(run_dir: Path) -> None:
    _start(run_dir, "body", ["model.previous.*"])

    with pytest.raises(UsageError, match="of checkpoint 1 is called that"):
        _start(run_dir, "body", ["model.previous.*"])
