"""Environments, replay buffers and metrics in variables come back, or the loop is told that they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import ticked

SCRIPTS = ticked.read("reinforcement.txt")


@pytest.mark.heavy
@pytest.mark.proves("exact")
@pytest.mark.sampled(6)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_loop_of_reinforcement_learning_is_exact_or_told(name: str, tmp_path: Path) -> None:
    ticked.check(name, *SCRIPTS[name], tmp_path)
