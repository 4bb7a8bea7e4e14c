"""Scripts that keep state in variables as people write them are exact, or told that they are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import ticked

NATURAL = ticked.read("natural.txt")


@pytest.mark.proves("exact")
@pytest.mark.quick(17)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NATURAL)
def test_a_natural_script_is_exact_or_told(name: str, tmp_path: Path) -> None:
    ticked.check(name, *NATURAL[name], tmp_path)
