"""What is the same in every process where an audit stills it, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resumable.audit import trials

pytestmark = pytest.mark.nightly

DRAWS = {
    "python": "import random; print(random.random())",
    "numpy": "import numpy; print(numpy.random.rand())",
    "system": "import os, random; print(os.urandom(8), random.Random().random())",
    "system of numpy": "import numpy; print(numpy.random.default_rng().random())",
    "system for a seed": "import random; random.seed(); print(random.random())",
    "clock": "import time; print(time.time(), time.time_ns())",
    "clock that measures": "import time; print(time.perf_counter(), time.perf_counter_ns())",
    "clock of datetime": "import datetime; print(datetime.datetime.now())",
    "clock and all": "import time, datetime, os; print(time.time(), os.urandom(4))",
    "clock as a date": "import datetime; print(datetime.datetime.today().timestamp())",
}
"""What a script draws, by the words that still it."""


def words(name: str) -> list[str]:
    return {"clock and all": ["clock", "system"]}.get(name, [name.split()[0]])


def said(text: str, *stills: str, **environment: str) -> str:
    """Return what a script prints while these are stilled."""
    variables = {**os.environ, **(trials.stilled(*stills) if stills else {}), **environment}
    done = subprocess.run([sys.executable, "-c", text], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_stilled_is_the_same_in_every_process(name: str) -> None:
    assert said(DRAWS[name], *words(name)) == said(DRAWS[name], *words(name))


@pytest.mark.parametrize("name", DRAWS)
def test_what_is_not_stilled_is_another_in_every_process(name: str) -> None:
    every = ("clock", "python", "numpy", "torch", "system", "benchmark")
    others = [word for word in every if word not in words(name)]

    assert said(DRAWS[name], *others) != said(DRAWS[name], *others)


def test_a_stilled_clock_continues_so_that_no_loop_waits_forever() -> None:
    text = "import time; end = time.time() + 0.05\nwhile time.time() < end: pass\nprint('over')"

    assert said(text, "clock") == "over\n"


def test_the_sitecustomize_that_was_there_is_imported_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")

    assert (
        said("print('mine')", "python", PYTHONPATH=f"{trials.STILLED}{os.pathsep}{tmp_path}")
        == "theirs\nmine\n"
    )


@pytest.mark.heavy
def test_cudnn_measures_nothing_whatever_a_script_asks_for() -> None:
    text = (
        "import torch\n"
        "torch.backends.cudnn.benchmark = True\n"
        "with torch.backends.cudnn.flags(benchmark=True):\n"
        "    print(torch.backends.cudnn.benchmark, torch._C._get_cudnn_benchmark())\n"
    )

    assert said(text, "benchmark") == "False False\n"
