"""The next start after a power cut: what it has to find, and that it can continue."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import scenarios
import tiny
from disk_states import State
from scenarios import RUN, Scenario
from strace_log import Disk, Said, Told, Traced

from resumable import ResumableWarning, Run, RunState
from resumable.run import checkpoint, history
from resumable.run.checkpoint import PULL, Checkpoint
from resumable.run.history_writer import History

Files = Mapping[str, bytes]


class Opening:
    """Opens a run in the states that a scenario could have left, and says what is wrong there."""

    def __init__(self, scenario: Scenario, traced: Traced, place: Path, remote: str) -> None:
        self._scenario = scenario
        self._remote = remote
        self._place = place
        self._known = _checkpoints(traced)
        said = [*traced.known, *(op.said for op in traced.ops if isinstance(op, Told))]
        self._saves = {one["number"]: one for one in said if "number" in one}

    def problem(self, state: State, *, goes_on: bool) -> str | None:
        """Return what is wrong with a state, if anything is; `goes_on`: with a real training, that saves."""
        state.disk.write_to(self._place)
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                if self._scenario.pulls:
                    self._pull(state.said)
                self._look(state.said)
                if goes_on:
                    self._go_on(state.said)
            self._refuse(warned)
        except Exception as exc:
            at = traceback.extract_tb(exc.__traceback__)[-1]
            return f"{state.cut}: {type(exc).__name__} in {at.name}, `{at.line}`: {exc}"
        finally:
            shutil.rmtree(self._place)
        return None

    @functools.cached_property
    def _run_dir(self) -> Path:
        return self._place / RUN

    def _refuse(self, warned: list[warnings.WarningMessage]) -> None:
        # What a cut leaves behind is no news to anybody.
        texts = [f"{one.category.__name__}: {one.message}" for one in warned if not self._is_expected(one)]
        assert not texts, f"it has warned: {texts}"

    def _is_expected(self, warned: warnings.WarningMessage) -> bool:
        expected = self._scenario.warns
        return bool(expected and expected in str(warned.message) and warned.category is ResumableWarning)

    def _pull(self, said: list[Said]) -> None:
        run = Run(self._run_dir)
        damaged = self._scenario.damaged - {*_numbers(said)}
        self._assert_as_saved(run, damaged)
        with warnings.catch_warnings():
            if damaged:
                warnings.filterwarnings("ignore", ".* It is taken from", ResumableWarning)
            scenarios.pull(run, self._remote)

    def _look(self, said: list[Said]) -> None:
        """Do what a start does with the run directory, without a training."""
        run = Run(self._run_dir)
        run.acquire()
        try:
            assert debris(run) == []
            run.identity()
            self._assert_as_saved(run)
            found = run.choose("auto", lambda found: found.about.number)
            number = found[1] if found else 0
            assert number >= max(_numbers(said), default=0), f"{number} is what it goes on from"
            if number and (best := self._saves[number]["best"]):
                self._assert_best(run, best)
            self._assert_history(run, number, said)
        finally:
            run.release()

    def _assert_as_saved(self, run: Run, damaged: Collection[int] = ()) -> None:
        for number in {*run.numbers()} - {*damaged}:
            found, known = run.open(number), self._known[number]
            files = found.read()
            assert files.keys() == known.keys() - {"manifest.json"}
            assert all(files[name] == known[name] for name in files), f"{number} has other bytes"
            # What nobody knows would keep it from being pruned.
            assert checkpoint.unknown(found.path) == []

    def _assert_best(self, run: Run, best: int) -> None:
        found = run.choose("best", Checkpoint.verify)
        assert found, "the best is lost"
        assert found[0].about.number == best, f"{found[0].about.number} is taken for the best, not {best}"

    def _assert_history(self, run: Run, number: int, said: list[Said]) -> None:
        marked = {line["number"] for line in _saves(run) if line["superseded"]}
        told = [one["superseded"] for one in said if "superseded" in one]
        assert marked >= {*(told[-1] if told else ())}, f"only {marked} are superseded"
        notes = History(run)
        notes.begin({}, number or None)
        notes.ended("closed")
        lost = {*_numbers(said)} - {line["number"] for line in _saves(run)}
        assert not lost, f"the history has lost {lost}"

    def _go_on(self, said: list[Said]) -> None:
        """Start the training, save, and start it once more."""
        options = self._options()
        training, state = tiny.load(self._run_dir, **options)
        with state:
            step = self._step(state)
            tiny.assert_stands_at(training, state, step)
            tiny.save_next(training, state, 9.0)
        training, state = tiny.load(self._run_dir, **options)
        with state:
            tiny.assert_stands_at(training, state, step + 1)
            assert debris(state.run) == []
            tiny.assert_all_verify(state.run)
            newest = state.run.path_of(max(state.run.numbers()))
            assert newest
            assert (state.run.path / "newest").resolve() == newest.resolve()

    def _options(self) -> dict[str, Any]:
        return {**self._scenario.options, "keep": self._scenario.options.get("keep", 1)}

    def _step(self, state: RunState) -> int:
        number = state._saving.parent
        step = self._saves[number]["step"] if number else 0
        assert state.step == step
        return int(step)


def debris(run: Run) -> list[Path]:
    """Return what should have been tidied away: not what was pulled, with which the next pull continues."""
    return [path for path in tiny.debris(run.path) if not PULL.fullmatch(path.name)]


def _checkpoints(traced: Traced) -> dict[int, Files]:
    """Return what lay in each checkpoint when the program told of it."""
    found = {}
    for count, op in enumerate(traced.ops):
        if isinstance(op, Told) and "number" in op.said:
            found[op.said["number"]] = _of(traced.after(count), op.said["number"])
    for said in traced.known:
        if "number" in said:
            found.setdefault(said["number"], _of(traced.before, said["number"]))
    return found


def _numbers(said: Iterable[Said]) -> list[int]:
    return [one["number"] for one in said if "number" in one]


def _saves(run: Run) -> list[dict[str, Any]]:
    return [line for line in history.read(run.path) if history.is_save(line)]


def _of(disk: Disk, number: int) -> Files:
    folders = disk.folders[disk.at(f"{RUN}/checkpoints") or 0]
    name = next((name for name in folders if name.startswith(f"{number:06}-")), None)
    # What was pruned before is not looked at
    return dict(_files(disk, folders[name])) if name else {}


def _files(disk: Disk, node: int) -> Iterator[tuple[str, bytes]]:
    for path, inner in disk.walk(node):
        if inner in disk.files:
            yield path, disk.files[inner]


def scratch(tmp_path: Path) -> Path:
    """Return a folder in memory, if there is one: thousands of runs are made in it."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        return tmp_path
    return memory / f"resumable-{os.getpid()}-{tmp_path.name}"
