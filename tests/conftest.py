"""What all tests share: one thread (so that sums have one order) and fixed seeds."""

from __future__ import annotations

import gc
import math
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chosen
import counted
import pytest
from counted import tally, times  # noqa: F401 (pytest finds fixtures here)
from forks import WARM, forks, leave_variables_alone  # noqa: F401 (pytest finds fixtures here)
from servers import place, proxied_s3, proxies, s3, sftp  # noqa: F401 (pytest finds fixtures here)
from turns import switching  # noqa: F401 (pytest finds fixtures here)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background lets them ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    # torch.manual_seed formats the stack for each kind of device that is not in use: milliseconds a test.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True, scope="module")
def _quick_to_look_through() -> None:
    """Let what looks through the objects of the process pass over a million of pytest's and other tests'."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory that does not exist yet."""
    return tmp_path / "runs" / "exp"


@pytest.fixture
def as_in_a_script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of another test: its modules and objects would count as the script's, and be looked through."""
    here = str(Path(__file__).parent)
    for name, module in [*sys.modules.items()]:
        if module is not request.module and (getattr(module, "__file__", None) or "").startswith(here):
            monkeypatch.delitem(sys.modules, name)
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run all cases")
    parser.addoption("--times", type=int, help="count so many times as far as at a commit")
    parser.addoption("--seed", type=int, help="chooses the sample and the moments of kills: today")


@pytest.hookimpl(tryfirst=True)  # hypothesis and xdist read the options after
def pytest_configure(config: pytest.Config) -> None:
    chosen.begin(config)
    config.option.times = config.option.times or 1
    if work := getattr(config, "workerinput", None):
        WARM.join(work.get("forks", ""))
    # What only hands out the tests to others need not import torch.
    if not config.getoption("numprocesses", 0):
        _prepare()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    if sys.platform == "linux":
        node.workerinput["forks"] = WARM.share()


def _prepare() -> None:
    import torch

    from resumable.saving import saver

    leave_variables_alone()

    torch.set_num_threads(1)
    # On a busy machine the disk may be slow at any time, and a warning of it is no test's business. A process
    # that a test starts has the warning, unless it ignores it.
    saver.A_LONG_WAIT = math.inf


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_quick = config.option.markexpr == chosen.QUICK and collection_path.name.startswith("test_")
    return (
        is_quick and collection_path.is_file() and chosen.is_slow(collection_path, config.rootpath)
    ) or None


@pytest.hookimpl(tryfirst=True)  # -m leaves out what is nightly right after
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen.sample(items, config.option.seed)
    for item in [] if config.option.times > 1 else items:
        # Some take a minute, and three times as long where others work on the same cores.
        if item.get_closest_marker("heavy") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(600))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = (one for kind in ("passed", "failed") for one in terminalreporter.stats.get(kind, ()))
    failed = (one for kind in ("failed", "error") for one in terminalreporter.stats.get(kind, ()))
    sections = {"counted": counted.lines(reports), "to repeat one alone": chosen.commands(config, failed)}
    for title, lines in sections.items():
        if told := [*lines]:
            terminalreporter.section(title)
            for line in told:
                terminalreporter.write_line(line)
    terminalreporter.write_line(f"the sample is that of --seed {config.option.seed}")
