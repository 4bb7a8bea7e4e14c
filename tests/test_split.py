"""A split is drawn once: nothing that was trained on is validated on, whatever is resumed where."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resumable import CheckpointDamaged, FormatTooNew, RunState, SaveFailed, StateMismatch, UsageError
from resumable.run import manifest, splits

if sys.platform != "win32":
    import fcntl

ABC = [[2, 9, 6, 4, 0, 3, 1, 7], [8, 5]]


@pytest.fixture(autouse=True)
def _few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "_PATIENCE", 0.05 if sys.platform != "win32" else 0)


def _draw(run_dir: Path, n: int = 10, *fractions: float, **how: Any) -> list[list[int]]:
    return splits.split(run_dir, n, fractions or [0.8, 0.2], **{"seed": 1, **how})


def test_a_split_is_the_same_at_each_start_and_deals_each_index_once(run_dir: Path) -> None:
    assert [_draw(run_dir) for _ in range(3)] == [ABC] * 3
    assert sorted(ABC[0] + ABC[1]) == [*range(10)]
    assert {type(index) for part in _draw(run_dir) for index in part} == {int}
    assert sorted(os.listdir(run_dir)) == [".splits.lock", "splits.json"]


def test_what_is_written_never_changes_again(run_dir: Path) -> None:
    _draw(run_dir)
    before = (run_dir / "splits.json").read_bytes()

    _draw(run_dir)

    assert (run_dir / "splits.json").read_bytes() == before
    assert splits.records(run_dir) == {
        "split": {
            "n": 10,
            "fractions": [0.8, 0.2],
            "seed": 1,
            "digest": "ab43e3378896a1a59b661de284c63029",
        }
    }


def test_several_names_are_several_splits_in_one_file(run_dir: Path) -> None:
    _draw(run_dir)

    other = _draw(run_dir, name="other", seed=2)

    assert other != ABC
    assert _draw(run_dir, name="other", seed=2) == other
    assert _draw(run_dir) == ABC
    assert sorted(splits.records(run_dir)) == ["other", "split"]


@pytest.mark.parametrize(
    ("n", "fractions", "lengths"),
    [
        (10, [0.9, 0.1], [9, 1]),
        (11, [0.5, 0.5], [6, 5]),
        (11, [0.25] * 4, [3, 3, 3, 2]),
        (10, [0.7, 0.2, 0.1], [7, 2, 1]),
        (3, [1.0], [3]),
        (100, [0.29, 0.71], [29, 71]),
        (100, [99, 1], [99, 1]),
        (7, [7], [7]),
    ],
)
def test_the_parts_are_as_long_as_torchs_and_the_rest_goes_to_the_first(
    run_dir: Path, n: int, fractions: list[float], lengths: list[int]
) -> None:
    assert [len(part) for part in splits.split(run_dir, n, fractions)] == lengths


@given(st.integers(1, 3000), st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_the_parts_are_never_more_nor_less_than_all(n: int, weights: list[int]) -> None:
    fractions = [weight / sum(weights) for weight in weights]
    # (of few indices one part may get none)
    with contextlib.suppress(UsageError):
        assert sum(splits._lengths(n, fractions)) == n


@pytest.mark.parametrize(
    ("n", "fractions", "how", "problem"),
    [
        (10, [0.9, 0.2], {}, r"\[0.9, 0.2\] are not the parts of 10"),
        (10, [1.1, -0.1], {}, "are not the parts"),
        (10, [1.0, 0.0], {}, "are not the parts"),
        (10, [float("nan"), 1.0], {}, "are not the parts"),
        (10, [9, 2], {}, "counts that sum to 10"),
        (10, [11, -1], {}, "are not the parts"),
        (10, [], {}, "are not the parts"),
        (0, [1.0], {}, "one part has nothing"),
        (5, [0.9, 0.1], {}, r"\[0.9, 0.1\] of 5 are \[5, 0\]: one part has nothing"),
        (10, ["0.9", 0.1], {}, "'0.9' is not a fraction"),
        (10, [True], {}, "True is not a fraction"),
        (-1, [1.0], {}, "n=-1 is not a count"),
        (10.0, [1.0], {}, "n=10.0 is not a count"),
        (True, [1.0], {}, "n=True is not a count"),
        (10, [1.0], {"seed": -1}, "seed=-1 is not a count"),
        (10, [1.0], {"seed": 1 << 32}, "a whole number below 4294967296"),
        (10, [1.0], {"seed": None}, "seed=None is not a count"),
        (10, [1.0], {"name": 3}, "name=3 is not a name"),
    ],
)
def test_what_is_no_split_is_refused_before_anything_is_written(
    run_dir: Path, n: Any, fractions: Any, how: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        splits.split(run_dir, n, fractions, **how)

    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("change", "now"),
    [
        ({"n": 12}, r"n=12, \[0.8, 0.2\], seed=1"),
        ({"fractions": [0.9, 0.1]}, r"n=10, \[0.9, 0.1\], seed=1"),
        ({"fractions": [0.2, 0.8]}, r"n=10, \[0.2, 0.8\], seed=1"),
        ({"seed": 2}, r"n=10, \[0.8, 0.2\], seed=2"),
    ],
)
def test_another_split_under_the_same_name_is_refused_with_both(
    run_dir: Path, change: dict[str, Any], now: str
) -> None:
    _draw(run_dir)

    with pytest.raises(
        StateMismatch, match=rf"(?s)drawn with n=10, \[0.8, 0.2\], seed=1; now it is {now}.*another name="
    ):
        splits.split(run_dir, **{"n": 10, "fractions": [0.8, 0.2], "seed": 1, **change})

    assert _draw(run_dir) == ABC


def _rewrite(run_dir: Path, body: dict[str, Any]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "splits.json").write_bytes(manifest.seal(body))


def test_indices_that_come_out_otherwise_are_noticed(run_dir: Path) -> None:
    _draw(run_dir)
    _rewrite(run_dir, {"splits": {"split": {**splits.records(run_dir)["split"], "digest": "abc"}}})

    with pytest.raises(
        StateMismatch, match=r"(?s)it was abc when it was drawn first.*the numpy that drew it"
    ):
        _draw(run_dir)


def test_one_changed_bit_anywhere_in_the_file_is_noticed_and_nothing_is_drawn_anew(run_dir: Path) -> None:
    _draw(run_dir)
    path = run_dir / "splits.json"
    intact = path.read_bytes()

    for at in range(len(intact)):
        path.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
        broken = path.read_bytes()
        with pytest.raises(CheckpointDamaged, match=r"(?s)splits.json.*put it back from a copy"):
            _draw(run_dir)
        assert path.read_bytes() == broken


GOOD = {"n": 1, "fractions": [1.0], "seed": 0, "digest": ""}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"splits": {}, "more": 1},
        {"splits": []},
        {"splits": {"a": 3}},
        {"splits": {"a": {**GOOD, "more": 1}}},
        {"splits": {"a": {**GOOD, "n": True}}},
        {"splits": {"a": {**GOOD, "fractions": 1.0}}},
        {"splits": {"a": {**GOOD, "seed": "0"}}},
        {"splits": {"a": {**GOOD, "digest": 0}}},
    ],
)
def test_what_is_sealed_but_no_splits_is_damaged(run_dir: Path, body: dict[str, Any]) -> None:
    _rewrite(run_dir, body)

    with pytest.raises(CheckpointDamaged, match=r"splits.json is damaged: "):
        _draw(run_dir)


def test_a_link_or_a_folder_in_its_place_is_damaged(run_dir: Path, tmp_path: Path) -> None:
    _draw(tmp_path / "other")
    run_dir.mkdir(parents=True)
    (run_dir / "splits.json").symlink_to(tmp_path / "other" / "splits.json")

    with pytest.raises(CheckpointDamaged, match=r"splits.json .*(?s:.)*put it back"):
        _draw(run_dir)


def test_a_file_of_a_newer_version_says_so(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", manifest.FORMAT + 1)
    _draw(run_dir)
    monkeypatch.undo()

    with pytest.raises(FormatTooNew, match=r"splits.json cannot be read: it was written in format"):
        _draw(run_dir)


def test_a_run_that_cannot_be_written_is_an_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SaveFailed, match=r"splits.json cannot be written: .*(?s:.)*mend the cause"):
        _draw(tmp_path / "file" / "run")


def test_a_run_that_cannot_be_written_can_still_be_read(
    run_dir: Path, forbid_writing: Callable[[], None]
) -> None:
    _draw(run_dir)
    forbid_writing()

    assert _draw(run_dir) == ABC


@pytest.fixture
def forbid_writing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """(The tests run as root, which may write everywhere.)"""
    before = os.open

    def reading(path: Any, flags: int, *mode: int, **how: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise PermissionError(13, "Permission denied", path)
        return before(path, flags, *mode, **how)

    return lambda: monkeypatch.setattr(os, "open", reading)


# A checkpoint's copy


def test_a_copy_of_one_checkpoint_is_enough(run_dir: Path, tmp_path: Path) -> None:
    _draw(run_dir)
    _draw(run_dir, name="other", seed=2)
    other = tmp_path / "copy"

    for _ in range(2):
        splits.adopt(other, splits.records(run_dir))

    assert (other / "splits.json").read_bytes() == (run_dir / "splits.json").read_bytes()
    with pytest.raises(StateMismatch, match=r"now it is n=10, .*, seed=3"):
        _draw(other, seed=3)


def test_what_the_run_knows_beyond_the_checkpoint_stays(run_dir: Path, tmp_path: Path) -> None:
    _draw(run_dir)
    _draw(tmp_path / "new", name="other")

    splits.adopt(tmp_path / "new", splits.records(run_dir))

    assert sorted(splits.records(tmp_path / "new")) == ["other", "split"]


def test_a_run_and_a_checkpoint_that_contradict_are_an_error_and_nothing_is_written(
    run_dir: Path, tmp_path: Path
) -> None:
    _draw(run_dir)
    _draw(run_dir, name="another")
    _draw(tmp_path / "new", seed=2)

    with pytest.raises(StateMismatch, match=r"was drawn with n=10, .*, seed=1; now it is n=10, .*, seed=2"):
        splits.adopt(tmp_path / "new", splits.records(run_dir))

    assert sorted(splits.records(tmp_path / "new")) == ["split"]


def test_a_checkpoint_without_splits_leaves_no_file(run_dir: Path) -> None:
    splits.adopt(run_dir, splits.records(run_dir))

    assert not run_dir.exists()


def test_what_is_in_the_place_of_a_checkpoints_splits_is_no_file(run_dir: Path) -> None:
    with pytest.raises(ValueError, match="3 stands where dict belongs"):
        splits.adopt(run_dir, {"a": 3})

    assert not run_dir.exists()


# Several processes


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of this kind")
def test_of_many_at_the_same_moment_no_name_is_lost(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "_PATIENCE", 60)
    names = [f"split {number % 6}" for number in range(24)]

    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda name: _draw(run_dir, name=name), names)]

    assert found == [ABC] * 24
    assert sorted(splits.records(run_dir)) == sorted({*names})
    assert sorted(os.listdir(run_dir)) == [".splits.lock", "splits.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of this kind")
def test_of_processes_that_draw_differently_the_first_one_decides(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splits, "_PATIENCE", 60)
    flock, met = fcntl.flock, threading.Barrier(2)

    def together(fd: int, how: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            met.wait(10)
        met.abort()
        flock(fd, how)

    def draw(seed: int) -> str:
        try:
            return f"{len(_draw(run_dir, seed=seed))} parts"
        except StateMismatch as exc:
            return exc.problem

    monkeypatch.setattr(fcntl, "flock", together)
    with ThreadPoolExecutor(2) as pool:
        found = sorted(pool.map(draw, (1, 2)))

    assert found[0] == "2 parts"
    assert "was drawn with" in found[1]


def test_processes_draw_the_same_without_a_meeting(run_dir: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from resumable.run.splits import split\n"
        "print([split(Path(sys.argv[1]), 10, [0.8, 0.2], name=name, seed=1) for name in 'ab'])"
    )
    run = [sys.executable, "-c", script, str(run_dir)]

    started = [subprocess.Popen(run, stdout=subprocess.PIPE, text=True) for _ in range(3)]

    assert {process.communicate()[0] for process in started} == {f"{[ABC, ABC]}\n"}
    assert sorted(splits.records(run_dir)) == ["a", "b"]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks of this kind")
def test_one_that_is_stopped_while_it_writes_holds_up_no_other(run_dir: Path) -> None:
    run_dir.mkdir(parents=True)
    with open(run_dir / ".splits.lock", "w") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)

        assert _draw(run_dir) == ABC


def test_a_disk_without_locks_will_do(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(fd: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)

    assert [_draw(run_dir), _draw(run_dir)] == [ABC, ABC]


def test_a_resume_knows_the_split_though_its_file_is_gone(run_dir: Path) -> None:
    for seed in (1, 1):
        parts = RunState.load(run_dir).split(10, [0.8, 0.2], seed=seed)
        with RunState.load(run_dir) as state:
            state.save()
        (run_dir / "splits.json").unlink()

    RunState.load(run_dir).close()
    assert parts == ABC
    assert splits.records(run_dir)["split"]["seed"] == 1
    (run_dir / "splits.json").unlink()
    RunState.load(run_dir).split(10, [0.8, 0.2], seed=2)
    with pytest.raises(StateMismatch, match=r"was drawn with n=10, .*, seed=1; now it is n=10, .*, seed=2"):
        RunState.load(run_dir)
