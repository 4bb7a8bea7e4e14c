"""Which tests run: the quick ones, at each commit a sample of the others, and nightly all of them."""

from __future__ import annotations

import os
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

QUICK = "not heavy and not nightly and not cuda"
"""What pytest takes for -m unless it is given; see addopts in pyproject.toml."""
OF_HEAVY = 24
"""Of the heavy tests of a file every 24th runs at a commit, of the cases of a sampled(n) one every n-th."""
_SEED = "TESTS_SEED"


def of_today() -> int:
    """Return the seed of this day, such as 20261128: the sample changes daily."""
    return int(datetime.now(timezone.utc).strftime("%Y%m%d"))


def of_run() -> int:
    """Return the seed that this run was begun with."""
    return int(os.environ[_SEED])


def begin(config: pytest.Config) -> None:
    """Fix the seed for this process and all that it starts."""
    config.option.seed = config.option.seed or of_today()
    config.option.hypothesis_seed = config.option.seed
    os.environ[_SEED] = str(config.option.seed)
    if config.option.markexpr == QUICK and all("::" in one for one in config.args):
        # A test that is named is meant, whatever it costs.
        config.option.markexpr = ""
    elif config.option.markexpr == QUICK and all("integrations" in one for one in config.args):
        config.option.markexpr = "not nightly and not cuda"


def is_slow(file: Path, root: Path) -> bool:
    """Whether a mark of a file leaves all its tests out of the quick part: it need not even be imported."""
    marks = r"^pytestmark = \[?\s*pytest\.mark\.(heavy|nightly|cuda)\b"
    return "integrations" in file.relative_to(root).parts or bool(
        re.search(marks, file.read_text(), re.MULTILINE)
    )


def dice() -> random.Random:
    """Return the dice of the test that runs: the same ones with the same seed."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    return random.Random(f"{os.environ[_SEED]} {test}")


def sample(items: list[pytest.Item], seed: int) -> None:
    """Leave every n-th case of a test that is marked as quick(n), and make the others heavy.

    Those of the integrations are heavy: a framework takes seconds to import.
    Of the heavy ones of a file, and of the cases of one that is marked as sampled(n), leave every n-th by the
    seed, and make the others nightly. The quick part is the same every day, so that coverage is too.
    """
    for item in items:
        if "integrations" in item.path.relative_to(item.config.rootpath).parts:
            item.add_marker("heavy")
    # What takes longest begins first: at the end one process would work, and the others wait.
    items.sort(key=lambda item: ("test_remote_proofs" not in item.nodeid, "promises" not in item.path.parts))
    for name, elsewhere, salt in (("quick", "heavy", ""), ("sampled", "nightly", str(seed))):
        seen: Counter[tuple[str, bool]] = Counter()
        # In an order of chance: every third of them may have the same argument.
        for item in sorted(items, key=lambda item: zlib.crc32(f"{salt}{item.nodeid}".encode())):
            is_heavy, mark = item.get_closest_marker("heavy") is not None, item.get_closest_marker(name)
            each = mark.args[0] if mark else OF_HEAVY if is_heavy and name == "sampled" else 1
            if not item.get_closest_marker(elsewhere):
                # What is heavy is a series of its own: of both there is some at every commit.
                series = item.nodeid.partition("[" if mark else "::")[0], is_heavy
                if seen[series] % each:
                    item.add_marker(elsewhere)
                seen[series] += 1


def commands(config: pytest.Config, failed: Iterator[Any]) -> Iterator[str]:
    """Yield for each test that failed the command that repeats it alone."""
    nightly = " --nightly" if config.option.nightly else ""
    for report in failed:
        yield f"scripts/test{nightly} --seed {config.option.seed} '{report.nodeid}'"
