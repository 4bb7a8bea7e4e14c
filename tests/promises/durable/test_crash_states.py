"""In every state that a power cut could leave, the run has all that was promised, and continues."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import disk_states
import pytest
import scenarios
import strace_log
from counted import Tally
from next_start import Opening, scratch
from strace_log import Tell, Traced

from resumable.files import block_queue, large_files

pytestmark = pytest.mark.proves("durable")

Look = Callable[[str, int, int], int]

FEW = ("again", "back")
"""What there are hardly more than 300 states of."""

NIGHTLY = ("two-first-is-slow", "two-late", "shards-first-is-slow")


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally) -> Iterator[Look]:
    """Return what opens the run in so many states of a scenario, and in one of `each` continues with it."""
    root, place = tmp_path / "traced" / "disk", scratch(tmp_path)
    root.mkdir(parents=True)

    def through(name: str, most: int, each: int) -> int:
        scenario = scenarios.ALL[name]
        for key, value in scenario.blocks.items():
            monkeypatch.setattr(block_queue if key == "_WRITERS" else large_files, key, value)
        found = strace_log.trace(scenario.begin(root), root, tmp_path / "logs", scenario.delays)
        opening = Opening(scenario, found, place, scenarios.remote(root))
        problems = [
            opening.problem(state, goes_on=number % each == 0)
            for number, state in enumerate(disk_states.states(found, most))
        ]
        tally("crash states", len(problems), [problem for problem in problems if problem])
        return len(problems)

    yield through
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else []) for name in scenarios.ALL],
)
@pytest.mark.sampled(3)
def test_no_power_cut_takes_back_what_was_promised(look: Look, times: int, name: str) -> None:
    most = 150 * times

    assert look(name, most, 15) >= min(most, 250 if name in FEW else 440)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["in-a-folder-that-was-there", "one-kept", "back"])
def test_a_small_part_of_the_power_cuts_takes_back_nothing(look: Look, name: str) -> None:
    assert look(name, 220, 20) == 220


def _trace(tmp_path: Path, body: Callable[[Path, Tell], object]) -> Traced:
    (root := tmp_path / "disk").mkdir()
    (root / "old").write_bytes(b"old")

    def program(rank: int, tell: Tell) -> Iterator[None]:
        yield
        body(root, tell)

    return strace_log.trace(program, root, tmp_path / "logs")


def _put(path: Path, *, flushed: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    os.write(fd, b"news")
    if flushed:
        os.fsync(fd)
    os.close(fd)


def _flush(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _contents(found: Traced, name: str, *, told: bool = True) -> set[bytes | None]:
    """Return what a file may hold after a cut: after a report, or before; None: it is not there."""
    return {
        None if (node := state.disk.at(name)) is None else state.disk.files[node]
        for state in disk_states.states(found, 1000)
        if bool(state.said) == told
    }


def test_what_was_flushed_with_its_name_is_in_every_state(tmp_path: Path) -> None:
    def body(root: Path, tell: Tell) -> None:
        _put(root / "new", flushed=True)
        _flush(root)
        tell(written=True)

    found = _trace(tmp_path, body)

    assert _contents(found, "new") == {b"news"}
    assert _contents(found, "new", told=False) == {None, b"", b"ne", bytes(4), b"news"}
    assert _contents(found, "old") == {b"old"}


def test_what_was_not_flushed_may_be_lost_whatever_was_reported(tmp_path: Path) -> None:
    def body(root: Path, tell: Tell) -> None:
        _put(root / "new", flushed=False)
        _put(root / "nameless", flushed=True)
        os.rename(root / "old", root / "older")
        tell(written=True)

    found = _trace(tmp_path, body)

    assert _contents(found, "new") == {None, b"", b"ne", bytes(4), b"news"}
    assert _contents(found, "nameless") == {None, b"news"}
    assert _contents(found, "old") == {None, b"old"}


def test_what_a_link_leads_to_outlives_its_other_name(tmp_path: Path) -> None:
    def body(root: Path, tell: Tell) -> None:
        os.link(root / "old", root / "twin")
        _flush(root)
        os.unlink(root / "old")
        tell(linked=True)

    found = _trace(tmp_path, body)

    assert _contents(found, "twin") == {b"old"}
    assert _contents(found, "old") == {None, b"old"}


@pytest.mark.parametrize("call", [lambda path: os.chmod(path, 0o600), lambda path: os.truncate(path, 1)])
def test_a_call_that_is_unknown_is_not_left_out(tmp_path: Path, call: Callable[[Path], None]) -> None:
    with pytest.raises(NotImplementedError, match=r"a call that nobody understands: (ch|trunc)"):
        _trace(tmp_path, lambda root, tell: call(root / "old"))


def test_a_program_that_fails_under_the_trace_fails_the_test(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="has failed"):
        _trace(tmp_path, lambda root, tell: os.unlink(root / "nothing"))

    assert "FileNotFoundError" in capfd.readouterr().err
