"""The sections, each in a process of its own: what crashes or hangs there loses nothing of the others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TESTS = {
    "saves": ("tests/saving/test_cuda.py",),
    "killed trainings": ("tests/promises/exact/test_on_a_device.py",),
    "traces and means": (
        *("tests/trace/test_tracing.py", "tests/trace/test_digest.py"),
        *("tests/position/test_means.py", "tests/position/test_far_ahead.py"),
    ),
}
"""The files with tests marked `cuda`, by the name of the process that runs them."""
SIDE_BY_SIDE = (("killed trainings", "traces and means"), ("saves",))
"""What runs at the same time. The tests of saves fill the memory of the GPU: others would find no room."""
TINY = "tests/promises/exact/test_on_a_device.py::test_a_training_that_is_killed_ends_as_an_uninterrupted_one"
_INI = """[pytest]
pythonpath = {support}
tmp_path_retention_count = 1000000
markers =
    cuda: needs a GPU
    heavy: takes long
    nightly: takes longer
    quick(n): sampled
    sampled(n): sampled
    proves(promise): proves a promise
    timeout(seconds): of a plugin that need not be there
"""
"""Settings that need no plugin, unlike those of pyproject.toml.

Folders of earlier runs stay: to remove them can take longer than the tests may.
"""
_OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED(?: \(.*\))?) +\[", re.MULTILINE)
_FAILURE = re.compile(r"^FAILED (\S+::.+?) - (.*)$", re.MULTILINE)


def tests(name: str, folder: Path, seconds: float, *, is_tiny: bool) -> dict[str, Any]:
    """Run the tests of some files that need a GPU; return the outcome of each.

    A tiny run selects them all, which then skip themselves, and one that can run on the CPU.
    """
    files = TESTS[name]
    (folder / f"{name}.ini").write_text(_INI.format(support=ROOT / "tests" / "support"))
    chosen = [f"{TINY}[channels_last]"] if is_tiny and files[0] in TINY else [*files, "-m", "cuda"]
    command = [
        *(sys.executable, "-m", "pytest", "-v", "-rf", "-c", str(folder / f"{name}.ini")),
        *("--rootdir", str(ROOT), "-p", "no:cacheprovider", *chosen),
    ]
    ended = _run(command, seconds)
    # What was printed before a run is cut off counts: not every test has hung.
    outcomes = {found[1]: found[2] for found in _OUTCOME.finditer(ended["printed"])}
    outcomes |= {found[1]: f"FAILED: {found[2]}" for found in _FAILURE.finditer(ended["printed"])}
    return {"outcomes": outcomes, "error": None if ended["code"] in (0, 1, 5) else ended["error"]}


def saves(megabytes: float, folder: Path, seconds: float, *, is_tiny: bool) -> dict[str, Any]:
    """Measure saves and loads of a state of this size; return the figures, or the error."""
    folder.mkdir()
    out = folder / "saves.json"
    device = "cpu" if is_tiny else "cuda"
    arguments = map(str, (megabytes, device, folder, seconds, out))
    # What it has measured by then is there even if it does not come to its end.
    ended = _run([sys.executable, "-m", "benchmarks.gpu.saves", *arguments], seconds + 30)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    # What a process that was cut off has started may still write there.
    shutil.rmtree(folder, ignore_errors=True)
    return found | ({"error": ended["error"]} if ended["code"] else {})


def _run(command: list[str], seconds: float) -> dict[str, Any]:
    # In a narrow terminal pytest leaves out why a test failed.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "300"}
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=max(1.0, seconds)
        )
    except subprocess.TimeoutExpired as exc:
        printed = exc.stdout or ""
        text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        return {"code": -1, "error": f"it took more than {seconds:.0f} s", "printed": text}
    last = [*ended.stdout.splitlines()[-15:], *ended.stderr.splitlines()[-15:]]
    error = "\n".join([f"exit code {ended.returncode}", *last])
    return {"code": ended.returncode, "error": error, "printed": ended.stdout}
