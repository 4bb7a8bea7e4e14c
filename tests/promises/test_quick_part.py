"""What runs by default proves something of every promise."""

from __future__ import annotations

import re

import chosen
import pytest
from places import ROOT


def test_the_quick_part_touches_every_promise(request: pytest.FixtureRequest) -> None:
    config, items = request.config, request.session.items
    is_whole = config.args == config.getini("testpaths") and not config.option.ignore
    if config.option.markexpr != chosen.QUICK or not is_whole:
        pytest.skip("only a run of all quick tests shows it")

    promises = re.findall(r"<!-- proved by: ([a-z ]+) -->", (ROOT / "docs" / "guarantees.md").read_text())

    assert {*promises} <= {mark.args[0] for item in items for mark in item.iter_markers("proves")}
