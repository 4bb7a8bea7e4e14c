"""`RunState` as a user meets it: how it resumes, what it prints, keeps, warns of and refuses."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import Forks
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from resumable import (
    CheckpointNotFound,
    NotARun,
    ResumableWarning,
    Run,
    RunInUse,
    RunState,
    SaveFailed,
    StateMismatch,
    UsageError,
    load_weights,
)
from resumable.files.large_files import Content
from resumable.run import checkpoint, history
from resumable.run.history_writer import History


class Training:
    """One weight, its optimizer, and a state of the run that is loaded; each is new."""

    def __init__(self, run_dir: Path | str, **options: Any) -> None:
        self.weight = nn.Parameter(torch.zeros(1))
        self.model = nn.ParameterDict({"weight": self.weight})
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, momentum=0.5)
        self.state = RunState.load(run_dir, model=self.model, optimizer=self.optimizer, **options)

    def step(self) -> None:
        self.weight.grad = torch.ones(1)
        self.optimizer.step()

    def saved(self, **metrics: Any) -> int:
        """Take a step, and save it durably."""
        self.step()
        pending = self.state.save(**metrics)
        pending.wait()
        return pending.number


def five(run_dir: Path, **options: Any) -> None:
    """Leave five checkpoints behind, each one step after the one before; the third is the best."""
    with Training(run_dir, keep=None, minimize="loss", **options).state:
        pass
    training = Training(run_dir, keep=None, minimize="loss", **options)
    for loss in (3.0, 2.0, 1.0, 4.0, 5.0):
        training.saved(loss=loss)
    training.state.close()


def numbers(run_dir: Path) -> list[int]:
    """Return the save numbers that are there, after every byte of them was verified."""
    run = Run(run_dir)
    for number in run.numbers():
        run.open(number).verify()
    return run.numbers()


# Resuming, and its line.


def test_a_new_run_says_that_it_starts_fresh(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training(run_dir)

    assert capsys.readouterr().out == f"{run_dir} is empty: starting fresh\n"
    assert not training.state.resumed
    assert training.state.best is None


def test_a_resumed_run_says_in_one_line_where_it_continues(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        training = Training(run_dir, loader=DataLoader(range(10), 4), maximize="accuracy")
        for _ in training.state.batches():
            training.saved(accuracy=0.81234)
            break
        training.state.close()
    capsys.readouterr()
    state = Training(run_dir, loader=DataLoader(range(10), 4), maximize="accuracy").state

    line = (
        r"resumed (.*) from checkpoint 2: epoch 0, batch 2/3, step 2, best accuracy 0\.8123 \([\d.]+ m?s\)\n"
    )
    found = re.fullmatch(line, capsys.readouterr().out)
    assert found is not None
    assert found[1] == str(run_dir)
    assert state.resumed


def test_after_the_last_batch_the_line_says_that_none_is_left(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        training = Training(run_dir, loader=DataLoader(range(10), 4))
        for _ in training.state.epochs(1):
            for _ in training.state.batches():
                if training.state.batch == 2:
                    training.saved()
            break
        training.state.close()

    last = capsys.readouterr().out.splitlines()[-1]
    assert re.search(r": epoch 0, batch 3/3 \(only the rest of its body is left\), step \d", last)


@pytest.mark.parametrize(
    ("resume", "step"), [("auto", 5), ("must", 5), ("newest", 5), ("best", 3), (2, 2), ("2", 2)]
)
def test_each_way_to_resume_finds_its_checkpoint(run_dir: Path, resume: str | int, step: int) -> None:
    five(run_dir)

    for _ in range(2):
        training = Training(run_dir, minimize="loss", resume=resume)
        training.state.close()

        assert training.state.step == step
        assert torch.equal(training.weight, weight_after(step))


def weight_after(steps: int) -> torch.Tensor:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    for _ in range(steps):
        weight.grad = torch.ones(1)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("resume", ["must", "best", 7, "./nonsense"])
def test_a_resume_that_finds_nothing_is_an_error_and_lets_go_of_the_run(
    run_dir: Path, resume: str | int
) -> None:
    for _ in range(2):
        with pytest.raises(CheckpointNotFound):
            Training(run_dir, resume=resume)

    assert Training(run_dir).saved() == 1


def test_a_checkpoint_of_another_run_starts_a_run_without_a_parent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    five(tmp_path / "old")
    path = Run(tmp_path / "old").open(4).path
    capsys.readouterr()

    training = Training(tmp_path / "new", minimize="loss", resume=path)
    line = f"resumed {tmp_path / 'new'} from {path}, checkpoint 4: epoch 0, step 4 ("
    assert capsys.readouterr().out.startswith(line)
    assert training.saved(loss=9.0) == 1
    about = Run(tmp_path / "new").open(1).about
    assert (about.parent, about.step) == (None, 5)
    assert about.run_id != Run(tmp_path / "old").open(4).about.run_id


def test_a_checkpoint_of_this_run_is_a_parent_however_its_path_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    five(Path("exp"))

    training = Training("exp", minimize="loss", resume=Run(tmp_path / "exp").open(2).path)

    training.saved()
    assert Run("exp").open(6).about.parent == 2


def test_the_environment_overrides_the_run_directory_and_the_way_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    five(tmp_path / "real")
    monkeypatch.setenv("RESUMABLE_RUN_DIR", str(tmp_path / "real"))
    monkeypatch.setenv("RESUMABLE_RESUME", "3")

    for _ in range(2):
        training = Training(tmp_path / "script", minimize="loss", resume="never")
        training.state.close()
        assert training.state.step == 3

    assert not (tmp_path / "script").exists()


def test_an_empty_environment_variable_overrides_nothing(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESUMABLE_RUN_DIR", "")
    monkeypatch.setenv("RESUMABLE_RESUME", "")
    five(run_dir)

    assert Training(run_dir, minimize="loss", resume=2).state.step == 2


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"model": 5}', b'{"model": {"model": {"$unknown": 1}}}'])
def test_an_unreadable_checkpoint_is_named_and_an_older_one_used(run_dir: Path, content: bytes) -> None:
    five(run_dir)
    about = replace(Run(run_dir).open(5).about, number=6)
    files = {"state.json": Content(content), "ranks/00000.json": Content(b"{}")}
    checkpoint.commit(run_dir / "checkpoints", about, files)

    for _ in range(2):
        with pytest.warns(ResumableWarning, match=r"000006-step-00000005 is damaged: its content is not a"):
            training = Training(run_dir, minimize="loss")
        training.state.close()

    assert torch.equal(training.weight, weight_after(5))


def test_a_run_restored_in_inference_mode_can_be_trained_on(run_dir: Path) -> None:
    for _ in range(2):
        model = nn.Linear(20, 20)
        optimizer = torch.optim.Adam(model.parameters())
        with torch.inference_mode():
            state = RunState.load(run_dir, model=model, optimizer=optimizer)
        for _ in range(2):
            model(torch.ones(1, 20)).sum().backward()
            optimizer.step()
            with torch.inference_mode():
                state.save().wait()
            state.save().wait()
            expected = model.weight.detach().clone()
            with torch.inference_mode():
                state.restore("newest")

            assert torch.equal(model.weight, expected)
        state.close()


# Numbers and branches.


def test_after_going_back_the_newest_number_wins_and_not_the_highest_step(run_dir: Path) -> None:
    five(run_dir)
    back = Training(run_dir, keep=None, minimize="loss", resume=3)
    assert back.saved() == 6
    back.state.close()

    for step in (5, 6):
        training = Training(run_dir, keep=None, minimize="loss")
        assert training.saved() == step + 2
        assert training.state.step == step
        training.state.close()

    parents = {found.about.number: found.about.parent for found in Run(run_dir).checkpoints()}
    assert parents == {1: None, 2: 1, 3: 2, 4: 3, 5: 4, 6: 3, 7: 6, 8: 7}


def test_numbers_only_grow_though_the_newest_was_deleted(run_dir: Path) -> None:
    training = Training(run_dir, keep=1)
    training.saved(), training.saved()
    path = Run(run_dir).open(2).path
    for file in sorted(path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()

    assert training.saved() == 3
    assert numbers(run_dir) == [3]


def test_a_run_keeps_its_id_over_resumes(run_dir: Path) -> None:
    ids = set()
    for _ in range(3):
        training = Training(run_dir)
        training.saved()
        ids.add(training.state.run_id)
        training.state.close()

    assert ids == {json.loads((run_dir / "run.json").read_text())["run_id"]}
    assert {found.about.run_id for found in Run(run_dir).checkpoints()} == ids


# keep= and the best.


def test_the_newest_and_the_best_stay_and_the_others_go(run_dir: Path) -> None:
    for loss in (5.0, 1.0, 4.0, 3.0, 2.0):
        training = Training(run_dir, keep=2, minimize="loss")
        training.saved(loss=loss)
        training.state.close()

    assert numbers(run_dir) == [2, 4, 5]
    assert (run_dir / "best").resolve() == Run(run_dir).open(2).path
    assert (run_dir / "newest").resolve() == Run(run_dir).open(5).path


@pytest.mark.parametrize(
    ("goal", "values", "best"),
    [
        ("minimize", [1.0, 2.0, 3.0], 1.0),
        ("maximize", [3.0, 2.0, 1.0], 3.0),
        ("minimize", [1.0, 1.0, 1.0], 1.0),
        ("minimize", [1.0, math.nan, -math.inf], 1.0),
        ("maximize", [1.0, math.nan, math.inf], 1.0),
    ],
)
def test_what_is_not_better_after_a_resume_never_becomes_the_best(
    run_dir: Path, goal: str, values: list[float], best: float
) -> None:
    for value in values:
        training = Training(run_dir, keep=1, **{goal: "metric"})
        training.saved(metric=value)
        assert training.state.best == best
        training.state.close()

    assert numbers(run_dir) == [1, 3]
    assert Training(run_dir, resume="best", **{goal: "metric"}).state.step == 1


def test_a_save_without_the_metric_is_not_the_best_and_does_not_forget_it(run_dir: Path) -> None:
    for metrics in ({"loss": 1.0}, {}, {"other": -5.0}):
        training = Training(run_dir, keep=1, minimize="loss")
        training.saved(**metrics)
        training.state.close()

    assert training.state.best == 1.0
    assert numbers(run_dir) == [1, 3]


def test_the_best_of_an_abandoned_branch_stays_on_disk(run_dir: Path) -> None:
    five(run_dir)
    for resume, loss in ((2, 1.5), ("auto", 1.4)):
        training = Training(run_dir, keep=1, minimize="loss", resume=resume)
        training.saved(loss=loss)
        training.state.close()

    assert training.state.best == 1.4
    assert numbers(run_dir) == [3, 7]


def test_without_a_goal_only_the_newest_stay(run_dir: Path) -> None:
    for _ in range(3):
        training = Training(run_dir, keep=2)
        training.saved(loss=1.0)
        training.state.close()

    assert numbers(run_dir) == [2, 3]
    with pytest.raises(CheckpointNotFound, match="known to be the best"):
        Training(run_dir, resume="best")


def test_another_goal_that_is_asked_for_takes_the_best_of_the_whole_run(run_dir: Path) -> None:
    five(run_dir)

    state = Training(run_dir, maximize="loss", override=["best"]).state
    assert state.best == 5.0
    state.restore(1)
    assert state.best == 5.0


def test_a_goal_that_is_new_takes_the_best_of_the_whole_run(run_dir: Path) -> None:
    for loss in (2.0, 1.0, 3.0):
        training = Training(run_dir)
        training.saved(loss=loss)
        training.state.close()

    assert Training(run_dir, minimize="loss").state.best == 1.0


def test_a_goal_that_is_left_out_keeps_the_best(run_dir: Path) -> None:
    five(run_dir)
    for _ in range(2):
        training = Training(run_dir, keep=1)
        training.saved(loss=0.0)
        training.state.close()

    assert training.state.best == 1.0
    assert numbers(run_dir) == [3, 7]


@pytest.mark.parametrize(
    "options", [{"keep": True}, {"keep": 1.5}, {"maximize": ["acc"]}, {"maximize": True}]
)
def test_options_that_cannot_be_meant_are_usage_errors(run_dir: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        RunState.load(run_dir, **options)

    assert not run_dir.exists()


# Metrics, vars, extra.


def test_metrics_of_many_kinds_are_stored_as_numbers(run_dir: Path) -> None:
    training = Training(run_dir)
    given = {"a": torch.tensor(0.5), "b": np.float32(0.25), "c": 3, "d": np.int64(4), "e": True}

    training.saved(**given, f=math.nan, g=torch.ones(1, requires_grad=True))

    assert {**training.state.metrics, "f": 0} == {"a": 0.5, "b": 0.25, "c": 3, "d": 4, "e": 1, "f": 0, "g": 1}
    about = Run(run_dir).open(1).about
    assert str(dict(about.metrics)) == str(training.state.metrics)


@pytest.mark.parametrize("value", ["0.5", None, [1.0], torch.ones(2), 1j])
def test_a_metric_that_is_no_number_is_a_usage_error_and_nothing_is_saved(run_dir: Path, value: Any) -> None:
    training = Training(run_dir)

    with pytest.raises(UsageError, match="the metric loss is not a number"):
        training.state.save(loss=value)

    assert numbers(run_dir) == []
    assert training.saved(loss=1.0) == 1


def test_metrics_vars_and_extra_come_back_twice(run_dir: Path) -> None:
    for turn in range(3):
        extra: dict[str, Any] = {"queue": [], "noise": np.random.default_rng(turn)}
        training = Training(run_dir, extra=extra)
        assert training.state.vars == ({"seen": (1, turn), "none": None} if turn else {})
        assert extra["queue"] == list(range(turn))
        assert training.state.metrics == ({"loss": turn} if turn else {})
        training.state.vars.update(seen=(1, turn + 1), none=None)
        extra["queue"].append(turn)
        training.saved(loss=turn + 1)
        training.state.close()


def test_vars_that_are_assigned_come_back_twice(run_dir: Path) -> None:
    for turn in range(3):
        training = Training(run_dir)
        assert training.state.vars == ({"seen": turn, "late": 1} if turn else {})
        training.state.vars = {"seen": turn + 1}
        training.state.vars |= {"late": 1}
        training.saved()
        training.state.close()


def test_vars_that_are_no_dict_are_a_usage_error(run_dir: Path) -> None:
    with Training(run_dir).state as state, pytest.raises(UsageError, match="list was assigned"):
        state.vars = [1]  # type: ignore[assignment]


@pytest.mark.parametrize("digits", [16, 39])
def test_a_folder_with_a_huge_number_leads_no_save_astray(run_dir: Path, digits: int) -> None:
    five(run_dir)
    (run_dir / "checkpoints" / f"{'9' * digits}-step-00000001").mkdir()

    for turn in range(2):
        training = Training(run_dir, keep=2, minimize="loss")
        assert training.saved(loss=9.0) == 6 + turn
        training.state.close()

    assert numbers(run_dir) == [3, 6, 7]


def test_no_save_gets_a_number_that_a_name_has_no_room_for(run_dir: Path) -> None:
    five(run_dir)
    (run_dir / "checkpoints" / f"{'9' * 15}-step-00000001").mkdir()
    with pytest.warns(ResumableWarning, match="is skipped"):
        training = Training(run_dir, keep=2, minimize="loss")

    for _ in range(2):
        with pytest.raises(UsageError, match="the highest save number"):
            training.state.save(loss=0.0)


# restore().


def _generators() -> list[Any]:
    of_numpy: Any = np.random.get_state()
    return [random.getstate(), of_numpy[1].tolist(), of_numpy[2:], torch.get_rng_state().tolist()]


def test_restoring_only_the_best_model_leaves_everything_else(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    five(run_dir)
    training = Training(run_dir, minimize="loss")
    momentum = training.optimizer.state_dict()["state"][0]["momentum_buffer"]
    random.random(), np.random.rand(), torch.rand(1)
    drawn = _generators()
    capsys.readouterr()

    for _ in range(2):
        training.state.restore("best", only="model")

    line = (
        rf"(put back model of {run_dir} from checkpoint 3: epoch 0, step 5, best loss 1 \(\S+ m?s\)\n){{2}}"
    )
    assert re.fullmatch(line, capsys.readouterr().out)
    assert torch.equal(training.weight, weight_after(3))
    assert _generators() == drawn
    assert torch.equal(training.optimizer.state_dict()["state"][0]["momentum_buffer"], momentum)
    training.saved()
    assert Run(run_dir).open(6).about.parent == 5


def test_going_back_puts_everything_back_and_the_next_save_is_a_new_branch(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    five(run_dir)
    training = Training(run_dir, keep=None, minimize="loss")
    capsys.readouterr()

    for number in (6, 7):
        training.state.restore("best")
        assert (training.state.step, training.state.best, training.state.metrics) == (3, 1.0, {"loss": 1.0})
        assert training.saved() == number
        assert Run(run_dir).open(number).about.parent == 3

    assert capsys.readouterr().out.startswith(f"went back in {run_dir} to checkpoint 3: epoch 0, step 3")
    assert torch.equal(training.weight, weight_after(4))


def test_restoring_the_newest_waits_for_the_save_in_flight(run_dir: Path) -> None:
    training = Training(run_dir)
    for which in ("newest", "auto"):
        training.step()
        training.state.save()
        training.step()
        training.state.restore(which)

    assert torch.equal(training.weight, weight_after(2))


@pytest.mark.parametrize(("which", "error"), [(9, CheckpointNotFound), ("never", UsageError)])
def test_a_restore_that_finds_nothing_is_an_error_and_changes_nothing(
    run_dir: Path, which: Any, error: type[Exception]
) -> None:
    five(run_dir)
    training = Training(run_dir, minimize="loss")

    for _ in range(2):
        with pytest.raises(error):
            training.state.restore(which)

    assert torch.equal(training.weight, weight_after(5))
    assert training.saved() == 6


def test_restoring_a_part_that_is_not_there_is_a_usage_error(run_dir: Path) -> None:
    five(run_dir)

    with pytest.raises(UsageError, match="there is no part 'modle'"):
        Training(run_dir, minimize="loss").state.restore("best", only="modle")


# Objects that never loaded, were closed, dropped or replaced.


def test_after_close_saves_and_restores_are_refused_and_the_run_is_free(run_dir: Path) -> None:
    training = Training(run_dir)
    training.saved()
    training.state.close()

    for call in (training.state.save, lambda: training.state.restore("newest")):
        with pytest.raises(UsageError, match="has been closed"):
            call()
    training.state.wait(), training.state.close()
    Run(run_dir).acquire()


def save_and_crash(run_dir: Path) -> None:
    with Training(run_dir).state as state:
        state.save()
        raise KeyError


def test_leaving_a_with_block_by_an_exception_still_makes_the_save_durable(run_dir: Path) -> None:
    for number in (1, 2):
        with pytest.raises(KeyError):
            save_and_crash(run_dir)
        assert numbers(run_dir)[-1] == number


def test_after_close_the_steps_are_not_counted_any_more(run_dir: Path) -> None:
    training = Training(run_dir)
    training.step(), training.state.close(), training.step()

    assert training.state.step == 1


def test_a_load_that_fails_lets_go_of_the_run_at_once(run_dir: Path) -> None:
    five(run_dir)

    for _ in range(2):
        with pytest.raises(StateMismatch) as kept:
            RunState.load(run_dir, model=nn.Linear(2, 2))
        other = Run(run_dir)
        other.acquire(), other.release()
        assert kept.tb is not None


def test_a_second_object_for_the_run_takes_over_from_the_first(run_dir: Path) -> None:
    first = Training(run_dir)
    first.saved()
    second = Training(run_dir)
    second.saved()
    third = Training(run_dir.parent / "." / run_dir.name)

    for replaced in (first, second):
        with pytest.raises(UsageError, match="another has taken its place"):
            replaced.state.save()
    assert third.saved() == 3
    assert numbers(run_dir) == [1, 2, 3]


def test_an_object_dropped_without_close_leaves_the_run_to_the_next(run_dir: Path) -> None:
    for number in (1, 2, 3):
        training = Training(run_dir)
        training.step()
        pending = training.state.save()
        assert pending.number == number
        pending.wait() if number > 1 else None
        del training

    assert Training(run_dir).state.step == 3


def test_an_object_that_another_thread_is_dropping_is_waited_for(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on, ended = threading.Event(), threading.Event(), History.ended

    def slowly(self: History, *args: Any, **kwargs: Any) -> None:
        began.set()
        goes_on.wait(30)
        ended(self, *args, **kwargs)

    last = [Training(run_dir)]
    last[0].saved()
    monkeypatch.setattr(History, "ended", slowly)
    dropping = threading.Thread(target=last.clear)
    dropping.start()
    began.wait(30)
    monkeypatch.undo()
    threading.Timer(0.2, goes_on.set).start()
    again = Training(run_dir)
    dropping.join()

    assert again.state.step == 1
    assert again.saved() == 2


def test_a_run_that_another_object_in_the_process_holds_is_in_use(run_dir: Path) -> None:
    Training(run_dir).state.close()
    other = Run(run_dir)
    other.acquire()

    with pytest.raises(RunInUse, match="this process"):
        Training(run_dir)
    other.release()
    assert Training(run_dir).saved() == 1


CHILD = """
import sys, torch
torch.set_num_threads(1)
from resumable import RunState
model = torch.nn.Linear(1, 1)
state = RunState.load(sys.argv[1], model=model)
for step in state.steps(10):
    with torch.no_grad():
        model.weight.fill_(step + 1)
    state.save()
    if step % 2:
        if sys.argv[2] == "raise":
            raise RuntimeError("crashed")
        break
"""


@pytest.mark.heavy
def test_an_interpreter_that_ends_without_close_commits_its_last_save(run_dir: Path) -> None:
    for step, how in ((2, "end"), (4, "raise")):
        done = subprocess.run([sys.executable, "-c", CHILD, str(run_dir), how], stderr=subprocess.DEVNULL)
        assert done.returncode == (how == "raise")
        assert numbers(run_dir)[-1] == step

    model = nn.Linear(1, 1)
    assert RunState.load(run_dir, model=model).step == 4
    assert model.weight.item() == 4


# Saves that fail.


def refuse_to_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk fail at the moment of the commit."""

    def failing(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "rename", failing)


NEXT_CALLS: dict[str, Callable[[RunState], object]] = {
    "save": lambda state: state.save(),
    "wait": lambda state: state.wait(),
    "restore": lambda state: state.restore("newest"),
    "close": lambda state: state.close(),
    "the end of a with block": lambda state: state.__exit__(None, None, None),
    "the end of epochs": lambda state: list(state.epochs(0)),
    "the end of steps": lambda state: list(state.steps(0)),
}


@pytest.mark.parametrize("call", NEXT_CALLS.values(), ids=NEXT_CALLS)
def test_a_save_that_failed_in_the_background_is_raised_by_the_next_call(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[RunState], object]
) -> None:
    training = Training(run_dir)
    training.saved()
    refuse_to_rename(monkeypatch)
    training.state.save()

    with pytest.raises(SaveFailed, match=r"checkpoint 2 .* could not be written"):
        call(training.state)

    training.state.wait(), training.state.close()
    assert numbers(run_dir) == [1]


def test_a_save_that_failed_is_neither_the_best_nor_a_parent(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(run_dir, minimize="loss")
    training.saved(loss=3.0)
    with monkeypatch.context() as patch:
        refuse_to_rename(patch)
        with pytest.raises(SaveFailed):
            training.saved(loss=1.0)

    assert training.state.best == 3.0
    assert training.saved(loss=2.0) == 3
    about = Run(run_dir).open(3).about
    assert (about.parent, about.best and about.best.value) == (1, 2.0)


def test_a_save_that_is_refused_for_the_one_before_it_is_no_parent_either(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(run_dir, minimize="loss")
    training.saved(loss=3.0)
    with monkeypatch.context() as patch:
        refuse_to_rename(patch)
        training.state.save(loss=1.0)
        [thread.join() for thread in threading.enumerate() if thread.name == "resumable-save-2"]
        with pytest.raises(SaveFailed):
            training.state.save(loss=0.5)

    training.saved(loss=2.0)
    about = Run(run_dir).checkpoints()[-1].about
    assert (about.parent, about.best and about.best.value) == (1, 2.0)


@contextmanager
def files_at_most(size: int) -> Iterator[None]:
    """Let the kernel refuse to let any file grow beyond a size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_the_old_checkpoints_and_the_next_save_works(run_dir: Path) -> None:
    ballast = {"tensor": torch.zeros(10_000)}
    training = Training(run_dir, keep=1, extra={"ballast": ballast})
    training.saved()

    for _ in range(2):
        ballast["tensor"] += 1
        with pytest.raises(SaveFailed, match="File too large"), files_at_most(20_000):
            training.state.save().wait()
        assert numbers(run_dir) == [1]

    assert training.saved() == 4
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["000004-step-00000002"]


def read_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the system refuse to make anything in a folder, as on a file system mounted read-only."""
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if str(path).startswith(str(folder)) and flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)


def test_a_read_only_run_gives_its_weights_and_refuses_a_training(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    five(run_dir)
    read_only(monkeypatch, run_dir)
    model = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(1))})

    load_weights(model, run_dir)

    assert torch.equal(model["weight"].detach(), weight_after(5))
    with pytest.raises(OSError, match="Read-only file system"):
        RunState.load(run_dir, model=model)
    assert numbers(run_dir) == [1, 2, 3, 4, 5]


# A part that changes after the save in the same body.


class Whole:
    """A training with a part of every kind."""

    def __init__(self, run_dir: Path) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.ema = AveragedModel(self.model)
        self.noise = np.random.default_rng(0)
        self.state = RunState.load(
            run_dir,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=DataLoader(torch.arange(6.0), 2, shuffle=True),
            extra={"ema": self.ema, "noise": self.noise},
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.rand(1)).backward()
        self.optimizer.step()


CHANGES: dict[str, tuple[str, Callable[[Whole], object]]] = {
    "a scheduler's step": ("optimizer, scheduler changed", lambda t: t.scheduler.step()),
    "an optimizer's step": ("model, optimizer changed", lambda t: t.optimizer.step()),
    "an update of the averaged model": ("extra.ema changed", lambda t: t.ema.update_parameters(t.model)),
    "a draw from torch": ("random changed", lambda t: torch.rand(1)),
    "a draw from numpy": ("random changed", lambda t: np.random.rand()),
    "a draw from Python": ("random changed", lambda t: random.random()),
    "a draw from a generator": ("extra.noise changed", lambda t: t.noise.random()),
    "a new value in vars": ("vars changed", lambda t: t.state.vars.update(at=t.state.batch + t.state.epoch)),
}


def save_in_batch(training: Whole, change: Callable[[Whole], object]) -> None:
    for number, _ in enumerate(training.state.batches()):
        training.step()
        if number == 1:
            training.state.save()
            change(training)


def save_in_epoch(training: Whole, change: Callable[[Whole], object]) -> None:
    for _ in training.state.epochs(2):
        for _ in training.state.batches():
            training.step()
        training.state.save()
        change(training)


def save_in_step(training: Whole, change: Callable[[Whole], object]) -> None:
    for _ in training.state.steps(3):
        training.step()
        training.state.save()
        change(training)


@pytest.mark.quick(3)
@pytest.mark.parametrize("loop", [save_in_batch, save_in_epoch, save_in_step])
@pytest.mark.parametrize(("text", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change_after_the_save_in_the_same_body_is_warned_of_once(
    run_dir: Path,
    text: str,
    change: Callable[[Whole], object],
    loop: Callable[[Whole, Callable[[Whole], object]], None],
) -> None:
    training = Whole(run_dir)

    # A step after the save that ends an epoch is reported in words of its own
    text = f"^{text} after save\\(\\) in the same body|the training continues in it"
    with pytest.warns(ResumableWarning, match=text) as caught:
        loop(training, change)

    assert len(caught) == 1
    training.state.close()


def test_loops_that_save_last_in_their_bodies_are_not_warned_of(run_dir: Path) -> None:
    training = Whole(run_dir)
    training.state.save()
    for _ in training.state.epochs(2):
        torch.rand(1)
        training.state.save()
        for _ in training.state.batches():
            training.step()
            training.scheduler.step()
            training.ema.update_parameters(training.model)
            training.state.save(loss=random.random())
            training.optimizer.zero_grad()
        training.model.eval(), torch.rand(1), training.model.train()
        training.state.save()
    training.step()

    training.state.close()
    assert numbers(run_dir)[-1] == 12


def test_batches_may_change_what_was_saved_before_the_first_of_them(run_dir: Path) -> None:
    training = Whole(run_dir)

    for _ in training.state.epochs(2):
        training.state.save()
        for _ in training.state.batches():
            training.step()

    training.state.close()
    assert numbers(run_dir) == [1, 2, 3]


def test_a_body_run_again_after_a_restore_is_not_warned_of(
    run_dir: Path,
) -> None:
    training = Whole(run_dir)
    has_gone_back = False

    for step in training.state.steps(3):
        training.step()
        if has_gone_back:
            torch.rand(1)
        else:
            training.state.save()
        if step == 1 and not has_gone_back:
            training.state.restore(1)
            has_gone_back = True

    training.state.close()
    assert numbers(run_dir) == [1, 2, 3]


def test_a_model_put_back_after_a_save_in_one_body_is_warned_of(run_dir: Path) -> None:
    training = Whole(run_dir)

    with pytest.warns(ResumableWarning, match="model changed after save.*R03"):
        save_in_step(training, lambda t: t.state.restore(1, only="model"))


def test_a_change_between_two_saves_in_one_body_is_warned_of(run_dir: Path) -> None:
    training = Whole(run_dir)

    for _ in training.state.steps(1):
        training.step()
        training.state.save()
        training.state.save()
        torch.rand(1)
        with pytest.warns(ResumableWarning, match=r"random changed after save\(\) .* checkpoint 2 "):
            training.state.save()


def test_changes_between_saves_outside_of_any_loop_are_none_after_a_save(run_dir: Path) -> None:
    training = Whole(run_dir)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(training.state.step, 3):
            training.step()
            training.state.save()


# The rest.


def test_another_environment_is_warned_of_at_every_resume(run_dir: Path) -> None:
    five(run_dir)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if precision != "medium" else "high")
    try:
        for _ in range(2):
            with pytest.warns(ResumableWarning, match=f"may change bits  tf32  {precision} +-> "):
                Training(run_dir, minimize="loss").state.close()
    finally:
        torch.set_float32_matmul_precision(precision)


def test_a_run_stays_where_it_was_when_the_script_changes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    for number in (1, 2, 3):
        monkeypatch.chdir(tmp_path)
        with RunState.load("exp") as state:
            monkeypatch.chdir(tmp_path / "elsewhere")
            state.save()
        assert Run(tmp_path / "exp").numbers()[-1] == number
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_run_json_of_another_tool_is_left_alone(run_dir: Path) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text('{"id": 7}')

    with pytest.raises(NotARun, match=r"run\.json was not written by resumable"):
        RunState.load(run_dir)

    assert (run_dir / "run.json").read_text() == '{"id": 7}'


def test_a_load_that_is_refused_makes_no_run(run_dir: Path) -> None:
    with RunState.load(run_dir / "old", model=torch.nn.Linear(1, 1)) as state:
        path = state.save().path

    with pytest.raises(StateMismatch):
        RunState.load(run_dir / "new", model=torch.nn.Linear(2, 1), resume=path)

    assert not (run_dir / "new").exists()


def test_a_deleted_best_checkpoint_is_forgotten_with_a_warning(run_dir: Path) -> None:
    with RunState.load(run_dir, maximize="acc") as state:
        best = state.save(acc=0.9)
        state.save(acc=0.5)
    shutil.rmtree(best.path)

    with pytest.warns(ResumableWarning, match="checkpoint 1, the best, is not there any more"):
        state = RunState.load(run_dir, maximize="acc")
    with state:
        assert state.best == 0.5
        state.save(acc=0.6)
    assert (run_dir / "best").resolve().name.startswith("000003")


def test_the_best_link_follows_what_is_tracked_now(run_dir: Path) -> None:
    with RunState.load(run_dir, maximize="acc", keep=None) as state:
        state.save(acc=0.9, loss=2.0)
        state.save(acc=0.1, loss=1.0)
    for _ in range(2):
        with RunState.load(run_dir, minimize="loss", keep=None, override=["best"]) as state:
            state.save(loss=3.0)

    assert (run_dir / "best").resolve().name.startswith("000002")


def test_a_step_of_a_fused_optimizer_after_save_is_reported(run_dir: Path) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        loop = state.steps(1)
        next(loop)
        model(torch.ones(1)).backward()
        state.save()
        optimizer.step()

        with pytest.warns(ResumableWarning, match="model, optimizer changed after save"):
            list(loop)


@pytest.mark.heavy
def test_a_run_that_was_copied_by_its_own_process_keeps_its_lock(
    run_dir: Path, tmp_path: Path, forks: Forks
) -> None:
    with RunState.load(run_dir) as state:
        shutil.copytree(run_dir, tmp_path / "copy")
        state.save()

        code = f"from resumable import RunState; RunState.load({str(run_dir)!r})"
        other = forks.run(["-c", code], tmp_path)

    assert "RunInUse" in other.err


@pytest.mark.heavy
def test_the_newer_way_to_set_tf32_does_not_stop_a_save(run_dir: Path, forks: Forks) -> None:
    code = f"""
import torch
from resumable import RunState
torch.set_float32_matmul_precision("high")
if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
for _ in range(2):
    with RunState.load({str(run_dir)!r}) as state:
        state.save()
"""

    forks.run(["-W", "error", "-c", code], Path.cwd()).checked()

    assert Run(run_dir).numbers() == [1, 2]


def test_a_warning_of_a_load_points_at_the_line_of_the_script(run_dir: Path) -> None:
    unordered = DataLoader(range(4), num_workers=1, in_order=False)

    with pytest.warns(ResumableWarning) as told, RunState.load(run_dir, loader=unordered):
        pass

    assert {warning.filename for warning in told} == {__file__}


def test_a_checkpoint_whose_rename_was_not_flushed_may_be_the_best(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, fsync, renamed = os.rename, os.fsync, []

    def note(*paths: Any) -> None:
        renamed.append(paths)
        rename(*paths)

    def refuse(fd: int) -> None:
        if renamed:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    with RunState.load(run_dir, maximize="acc") as state:
        with monkeypatch.context() as broken:
            broken.setattr(os, "rename", note)
            broken.setattr(os, "fsync", refuse)
            with pytest.raises(SaveFailed):
                state.save(acc=0.9).wait()
        state.save(acc=0.5)
        assert state.best == 0.9

    for _ in range(2):
        with RunState.load(run_dir, maximize="acc") as state:
            assert state.best == 0.9


def test_a_state_that_is_dropped_is_gone_at_once(run_dir: Path) -> None:
    model = nn.Linear(2, 1)
    # It hangs hooks on the optimizer, which lives on
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = RunState.load(run_dir, model=model, optimizer=optimizer, extra={"values": {"one": 1}})
    state.save().wait()
    kept = weakref.ref(state)
    gc.disable()
    try:
        del state
        assert kept() is None, "something in it leads back to it: its run stays locked until a collection"
    finally:
        gc.enable()


# Processes that are forked in a loop.


def _looped(run_dir: Path, workers: int, forks_at: int | None) -> list[int]:
    """Return what is trained on; at one step a child is forked, which leaves as sys.exit does."""
    parent, seen = os.getpid(), []
    loader = DataLoader(range(24), 1, shuffle=True, num_workers=workers, timeout=20 if workers else 0)
    try:
        with Training(run_dir, loader=loader, keep=None).state as state:
            for _ in state.epochs(1):
                for x in state.batches():
                    seen.append(int(x))
                    if len(seen) in (2, 20):
                        state.save()
                    if len(seen) == forks_at and (child := os.fork()):
                        assert os.waitpid(child, 0)[1] == 0
                    elif len(seen) == forks_at:
                        sys.exit()
    except SystemExit:
        if os.getpid() == parent:
            raise
    if os.getpid() != parent:
        gc.collect()
        os._exit(0)
    return seen


@pytest.mark.quick(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_a_forked_child_that_exits_leaves_the_run_and_its_workers_alone(tmp_path: Path, workers: int) -> None:
    torch.manual_seed(0)
    expected = _looped(tmp_path / "straight", workers, None)
    torch.manual_seed(0)

    seen = _looped(tmp_path / "forked", workers, 3)

    assert seen == expected
    events = [line["event"] for line in history.read(tmp_path / "forked")]
    assert events == ["start", "loop", "save", "save", "save", "end"]
    assert numbers(tmp_path / "forked") == [1, 2, 3]


SCRIPT = """
import torch
from torch.utils.data import DataLoader, IterableDataset
from resumable import RunState

class Data(IterableDataset):
    def __iter__(self):
        yield torch.ones(1)

loader = DataLoader(Data())
with RunState.load(run_dir, loader=loader) as state:
    for batch in state.batches():
        state.save()
"""


def test_a_closed_run_keeps_nothing_of_the_script_alive(run_dir: Path) -> None:
    scope = {"run_dir": run_dir, "__name__": "script"}
    exec(SCRIPT, scope)
    loader = weakref.ref(scope["loader"])

    del scope
    gc.collect()

    assert loader() is None
