"""Frameworks take seconds to import in each process: the quick part leaves their tests out, unimported."""

from __future__ import annotations

import chosen
import pytest


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return True if config.option.markexpr == chosen.QUICK else None
