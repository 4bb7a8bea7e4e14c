"""Mistakes that are made in a copy of the library on purpose: the tests that are named with each see it.

To run all of them, and see how long each takes:

    pytest -n 2 -m "" -k mistake_is_caught --durations 0 -vv tests/promises/test_mutants.py
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE

import pytest
from counted import Tally
from places import PROMISES, ROOT, SUPPORT

PATCHES = sorted((PROMISES / "mutants").glob("*.patch"))
FAILED = 1
"""The exit code of pytest for tests that ran and failed, and not for such as could not be collected."""

pytestmark = pytest.mark.timeout(300)


def caught_by(patch: Path) -> list[str]:
    """Return what pytest is told to run: a line of the patch says so."""
    found = re.search(r"^Caught by: (.+)$", patch.read_text(), re.MULTILINE)
    assert found, f"{patch.name} does not say which tests catch it"
    return shlex.split(found[1])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a copy of the library; the tests stay where they are."""
    shutil.copytree(ROOT / "resumable", tmp_path / "copy" / "resumable")
    return tmp_path / "copy"


class Nursery:
    """A process that runs tests on a copy, without importing torch each time."""

    def __init__(self) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        command = [sys.executable, str(SUPPORT / "forked_tests.py")]
        self._process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, env=environ, text=True)

    def run(self, copy: Path, tests: list[str]) -> tuple[int, str]:
        """Return the exit code of pytest, and what it printed."""
        log = copy / "log"
        # To show how a megabyte differs from another takes a minute.
        options = ["-x", "-rs", "-m", "", "-p", "no:cacheprovider", "-p", "pytest_timeout", "--assert=plain"]
        options += ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
        # In a folder that pytest picks, it ends by removing those of earlier runs, which can take minutes.
        options += ["--basetemp", str(copy.with_name("tmp"))]
        # A test that hangs is told with the stacks of all threads, before this one is out of time itself.
        options += ["-o", "faulthandler_timeout=120", "-o", "timeout=240"]
        there = [str(ROOT / one) if one.startswith("tests/") else one for one in tests]
        order = {"folder": str(copy), "log": str(log), "arguments": [*options, *there]}
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{json.dumps(order)}\n")
        self._process.stdin.flush()
        try:
            code = int(self._process.stdout.readline())
        except BaseException:
            print(log.read_text(errors="replace"))
            raise
        return code, log.read_text(errors="replace")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery()
    yield found
    found.close()


def test_each_mistake_can_be_made() -> None:
    for patch in PATCHES:
        subprocess.run(["git", "apply", "--check", str(patch)], cwd=ROOT, check=True)


@pytest.mark.heavy
@pytest.mark.parametrize("patch", PATCHES, ids=[patch.stem for patch in PATCHES])
@pytest.mark.sampled(6)
def test_a_mistake_is_caught_by_the_tests_that_are_named_with_it(
    copy: Path, nursery: Nursery, patch: Path, tally: Tally
) -> None:
    subprocess.run(["git", "apply", str(patch)], cwd=copy, check=True)

    code, told = nursery.run(copy, caught_by(patch))

    assert "Failed: Timeout" not in told, told
    if code == 0 and not re.search(r"\d passed", told):
        pytest.skip(f"what would catch it does not run here: {told[-500:]}")
    tally("mistakes on purpose", 1, [] if code == FAILED else [f"{patch.stem}: {told[-2000:]}"])


@pytest.mark.heavy
def test_it_is_the_copy_that_is_tested(copy: Path, nursery: Nursery) -> None:
    test = copy / "test_which.py"
    test.write_text(
        f"import resumable\n\ndef test_it(): assert resumable.__file__.startswith({str(copy)!r})\n"
    )

    code, told = nursery.run(copy, [str(test)])

    assert code == 0, told


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", sorted({caught_by(patch)[0] for patch in PATCHES}))
def test_without_a_mistake_the_same_tests_pass(copy: Path, nursery: Nursery, file: str) -> None:
    # After the file comes -k, or nothing: then it is the whole file.
    named = [caught_by(patch)[2:] for patch in PATCHES if caught_by(patch)[0] == file]
    which = " or ".join(sorted({f"({one[0]})" for one in named if one})) if all(named) else ""

    code, told = nursery.run(copy, [file, "-k", which])

    assert code == 0, told
