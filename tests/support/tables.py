"""Reads the tables of the documentation."""

from __future__ import annotations

import re


def rows_of(table: str) -> set[str]:
    """Return the fields that a table in the documentation has."""
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}
