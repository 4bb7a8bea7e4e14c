"""Where the repository's files are that tests read."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
DOCS = ROOT / "docs"
CLI_PAGE = DOCS / "cli.md"
DATA = TESTS / "data"
PROMISES = TESTS / "promises"
