"""Pushing in the background: what goes to the remote and when, and that no training waits for it."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import random
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import gloo
import numpy as np
import pytest
import torch
from forks import Forks
from fsspec.implementations.memory import MemoryFileSystem
from grouped import grouped
from servers import S3, Place
from test_copies import HERE, Training, at, damage, events, heard, saved, step_of, there, verified

from resumable import RemoteError, ResumableWarning, Run, RunState, SaveFailed
from resumable.files.lock import Lock
from resumable.remote import in_training
from resumable.remote.run_copy import Remote
from resumable.remote.storage import Store


class Gated(MemoryFileSystem):  # type: ignore[misc, unused-ignore]
    """A remote that takes what is written only while its gate is open, or refuses it."""

    protocol = "gated"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    gate = threading.Event()
    asked = threading.Event()
    written: ClassVar[list[str]] = []
    error: ClassVar[OSError | None] = None
    refused: ClassVar[list[str]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        found: str = super()._strip_protocol(path.replace("gated://", "memory://"))
        return found

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode and "/checkpoints/" in path:
            if error := Gated.error:
                Gated.refused.append(path)
                raise error
            Gated.asked.set()
            Gated.gate.wait()
            Gated.written.append(path)
        return super()._open(path, mode, **options)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a start wait for the remote: a busy machine is silent for longer than five seconds."""
    monkeypatch.setattr(in_training, "_QUICK", 60.0)


@pytest.fixture
def gated() -> Iterator[dict[str, Any]]:
    """A remote that takes nothing before its gate is opened."""
    fsspec.register_implementation("gated", Gated, clobber=True)
    for each in (Gated.store, Gated.written, Gated.refused, Gated.gate, Gated.asked):
        each.clear()
    Gated.pseudo_dirs[:] = [""]
    Gated.error = None
    yield {"remote": "gated://exp"}
    Gated.gate.set()


def names(path: str = "/exp/checkpoints/") -> list[int]:
    """Return the save numbers whose manifests the gated remote has, in the order in which they came."""
    there = [name for name in Gated.written if name.endswith("manifest.json")]
    return [int(name.removeprefix(path)[:6]) for name in there]


def until(is_so: Callable[[], Any]) -> None:
    """Return once something is so; fail if it is not in half a minute."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.01)


def step_and_save(state: RunState, training: Training, loss: float) -> None:
    training.learn(torch.ones(2, 4))
    state.save(loss=loss).wait()


# What goes there.


@HERE
@pytest.mark.parametrize(
    ("push", "keep", "expected"),
    [
        ("best", 1, [2]),
        ("best", 2, [1, 2]),
        ("newest", 1, [2, 4]),
        ("all", 2, [2, 3, 4]),
        ("all", None, [1, 2, 3, 4]),
    ],
)
@pytest.mark.quick(5)
def test_only_what_is_asked_for_stays_there(
    place: Place, tmp_path: Path, push: str, keep: Any, expected: list[int]
) -> None:
    options = {"keep": None, "push": push, "remote_keep": keep, **at(place)}
    for loss in (3.0, 1.0, 2.5, 2.0):
        saved(tmp_path / "run", [loss], **options)

    assert there(place) == expected
    assert verified(tmp_path / "run") == [1, 2, 3, 4]
    newest, best = (
        json.loads(Path(place.url.removeprefix("file://"), f"{word}.json").read_text())["number"]
        if Path(place.url.removeprefix("file://"), f"{word}.json").exists()
        else None
        for word in ("newest", "best")
    )
    assert best == 2
    assert newest in (expected[-1], 2)


def test_a_training_without_news_sends_nothing_again(gated: dict[str, Any], tmp_path: Path) -> None:
    Gated.gate.set()
    saved(tmp_path / "run", [3.0], **gated)
    Gated.written.clear()

    for _ in range(2):
        assert step_of(tmp_path / "run", **gated) == 1
    assert Gated.written == []


def test_what_was_missed_is_pushed_newest_first(gated: dict[str, Any], tmp_path: Path) -> None:
    saved(tmp_path / "run", [1.0, 2.0, 3.0], keep=None)
    Gated.gate.set()

    assert step_of(tmp_path / "run", push="all", keep=None, **gated) == 3
    assert names() == [3, 2, 1]


def test_a_slow_remote_gets_the_newest_and_the_best_of_what_it_missed(
    gated: dict[str, Any], tmp_path: Path
) -> None:
    training = Training()
    with training.load(tmp_path / "run", **gated) as state:
        step_and_save(state, training, 9.0)
        Gated.asked.wait(30)
        for loss in (8.0, 1.0, 2.0, 3.0, 4.0):
            step_and_save(state, training, loss)
        Gated.gate.set()

    assert names() == [1, 6, 3]
    assert verified(tmp_path / "run") == [1, 3, 4, 5, 6]


def test_two_that_the_remote_does_not_keep_are_pushed_once_each(
    gated: dict[str, Any], tmp_path: Path
) -> None:
    saved(tmp_path / "run", [4.0, 3.0, 1.0, 2.0], keep=None)
    Gated.gate.set()

    options = {"keep": None, "push": "all", "remote_keep": {"newest": 1, "every": "9 steps"}, **gated}
    assert step_of(tmp_path / "run", push_timeout=20, **options) == 4

    assert names() == [4, 3, 2, 1]


# Nobody waits.


@pytest.mark.proves("local first")
@pytest.mark.proves("quiet")
def test_a_save_does_not_wait_for_a_remote_that_takes_nothing(gated: dict[str, Any], tmp_path: Path) -> None:
    training = Training()
    state = training.load(tmp_path / "run", push_timeout=0.1, **gated)
    step_and_save(state, training, 3.0)
    Gated.asked.wait(30)

    for loss in (2.0, 1.0):
        step_and_save(state, training, loss)

    assert not Gated.gate.is_set()
    assert names() == []
    with pytest.raises(
        RemoteError, match=r"checkpoint 3 of .* did not get to gated://exp: it was not done in"
    ):
        state.close()
    assert verified(tmp_path / "run") == [1, 2, 3]


def test_what_is_on_its_way_is_not_pruned_here(gated: dict[str, Any], tmp_path: Path) -> None:
    training = Training()
    with training.load(tmp_path / "run", keep=1, push="all", **gated) as state:
        step_and_save(state, training, 1.0)
        Gated.asked.wait(30)
        for loss in (2.0, 3.0, 4.0):
            step_and_save(state, training, loss)
        assert verified(tmp_path / "run") == [1, 2, 3, 4]
        Gated.gate.set()
        until(lambda: len(names()) == 4)
        until(lambda: len(events(tmp_path / "run", "push")) == 4)
        step_and_save(state, training, 5.0)

    assert names() == [1, 4, 3, 2, 5]
    assert 2 not in verified(tmp_path / "run")


def test_a_remote_that_never_keeps_up_does_not_fill_the_disk(gated: dict[str, Any], tmp_path: Path) -> None:
    training = Training()
    with (
        heard() as told,
        training.load(tmp_path / "run", keep=1, push="all", remote_keep=None, **gated) as state,
    ):
        for loss in (1.0, 2.0):
            step_and_save(state, training, loss)
            Gated.asked.wait(30)
        for loss in range(3, 12):
            step_and_save(state, training, float(loss))
        assert len(verified(tmp_path / "run")) <= 6
        Gated.gate.set()

    assert names()[:2] == [1, 11]
    assert [each for each in told if "checkpoint 2 was pruned before it could be pushed" in each] == told


@pytest.mark.heavy
@HERE
def test_workers_are_forked_while_a_push_is_on_its_way(place: Place, tmp_path: Path) -> None:
    options = {"keep": None, "push": "all", "remote_keep": None, **at(place)}
    training = Training(workers=2)

    with training.load(tmp_path / "run", **options) as state:
        for _ in state.epochs(4):
            for x in state.batches():
                state.save(loss=training.learn(x))

    # The last one is of the end of the loop.
    assert there(place) == verified(tmp_path / "run") == [*range(1, 22)]


# Trouble.


def test_what_failed_is_tried_again_and_reported_once(gated: dict[str, Any], tmp_path: Path) -> None:
    Gated.gate.set()
    Gated.error = PermissionError(13, "this bucket is read only")
    training = Training()

    with heard() as told, training.load(tmp_path / "run", **gated) as state:
        step_and_save(state, training, 3.0)
        step_and_save(state, training, 2.0)
        until(lambda: Gated.refused)
        Gated.error = None
        # At the end, what is refused for good is not tried again.
        until(names)

    assert names() == [2]
    assert len(told) == 1
    assert "this bucket is read only. It is tried again" in told[0]


@pytest.mark.parametrize("error", [OSError(5, "the line is bad"), PermissionError(13, "it is read only")])
@pytest.mark.heavy
def test_trouble_draws_nothing_from_the_generators_of_the_training(
    gated: dict[str, Any], tmp_path: Path, error: OSError
) -> None:
    Gated.error = error
    training = Training()
    random.seed(1)

    with heard():
        state = training.load(tmp_path / "run", push_timeout=3, **gated)
        before = random.getstate()
        step_and_save(state, training, 3.0)
        until(lambda: len(Gated.refused) >= 2)
        after = random.getstate()
        with pytest.raises(RemoteError):
            state.close()

    assert after == before


@pytest.mark.heavy
@pytest.mark.proves("local first")
def test_close_names_all_that_is_missing_and_the_command_that_pushes_it(
    gated: dict[str, Any], tmp_path: Path
) -> None:
    Gated.error = PermissionError(13, "this bucket is read only")

    with heard(), pytest.raises(RemoteError) as caught:
        saved(tmp_path / "run", [1.0, 2.0, 3.0], push="all", **gated)

    assert f"checkpoints 3, 2, 1 of {tmp_path / 'run'} did not get to gated://exp: " in caught.value.problem
    assert "this bucket is read only" in caught.value.problem
    assert f"resumable push {tmp_path / 'run'} gated://exp" in caught.value.fix


def test_the_error_of_a_training_is_not_hidden_by_one_of_its_remote(
    gated: dict[str, Any], tmp_path: Path
) -> None:
    Gated.error = PermissionError(13, "this bucket is read only")
    training = Training()

    def train() -> None:
        with training.load(tmp_path / "run", **gated) as state:
            step_and_save(state, training, 3.0)
            raise ZeroDivisionError

    with heard() as told, pytest.raises(ZeroDivisionError):
        train()

    assert "checkpoint 1 of" in told[-1]
    assert verified(tmp_path / "run") == [1]


def test_what_is_damaged_here_is_not_pushed_and_the_others_are(gated: dict[str, Any], tmp_path: Path) -> None:
    run = saved(tmp_path / "run", [3.0, 2.0], keep=None)
    damage(run.path_of(1) or tmp_path)
    Gated.gate.set()

    with heard() as told, pytest.raises(RemoteError, match=r"checkpoint 1 of .*: damaged on the local disk"):
        step_of(tmp_path / "run", push="all", **gated)

    assert names() == [2]
    assert "is damaged" in told[0]


def test_two_processes_do_not_push_one_run_at_once(gated: dict[str, Any], tmp_path: Path) -> None:
    Gated.gate.set()
    run = saved(tmp_path / "run", [3.0])
    other = Lock(run.path / ".push.lock")

    with heard() as told, pytest.raises(RemoteError, match="checkpoint 1"):
        step_of(tmp_path / "run", push_timeout=0.5, **gated)
    other.release()

    assert len(told) == 1
    assert names() == []
    assert step_of(tmp_path / "run", **gated) == 1
    assert names() == [1]


# Leaving.


def test_what_an_unclosed_run_did_not_push_the_next_start_pushes(
    gated: dict[str, Any], tmp_path: Path
) -> None:
    model = torch.nn.Linear(2, 1)
    state = RunState.load(tmp_path / "run", model=model, **gated)
    state.save().wait()
    Gated.asked.wait(30)

    with heard() as told:
        del state
        gc.collect()

    assert len(told) == 1
    assert "checkpoint 1 of" in told[0]
    assert told[0].endswith("The next start pushes what is missing.")
    Gated.gate.set()
    with RunState.load(tmp_path / "run", model=model, **gated):
        pass
    assert 1 in names()


SCRIPT = """
import sys
import torch
from resumable import Remote, RunState

model = torch.nn.Linear(2, 1)
state = RunState.load(sys.argv[1], model=model, remote=Remote(sys.argv[2], timeout=1))
for _ in state.steps(state.step + 1):
    state.save().wait()
"""


@pytest.mark.heavy
def test_a_script_that_ends_without_close_says_what_is_missing(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "file").touch()
    command = ["-c", SCRIPT, tmp_path / "run"]
    forks.run([*command, f"file://{tmp_path}/place"], tmp_path).checked()

    ended = forks.run([*command, f"file://{tmp_path}/file/exp"], tmp_path).checked()

    assert "Not a directory. It is tried again" in ended.err
    assert "did not get to" in ended.err
    assert "weakref" not in ended.err
    assert verified(tmp_path / "run") == [1, 2]


def preempted(rank: int, run_dir: Path, options: dict[str, Any]) -> None:
    """Be told to leave, with a remote that is gone."""
    warnings.simplefilter("ignore", ResumableWarning)
    training = Training()
    with training.load(run_dir, **options) as state:
        for step in state.steps(9):
            training.learn(torch.ones(2, 4))
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.proves("local first")
@pytest.mark.heavy
def test_a_signal_ends_a_training_although_the_remote_is_gone(s3: S3, tmp_path: Path) -> None:
    saved(tmp_path / "run", [3.0])
    gone = {**s3.options(), "endpoint_url": "http://127.0.0.1:9"}
    options = {"remote": "s3://bucket/exp", "remote_options": gone, "push_timeout": 1}

    (ended,) = gloo.run(1, preempted, tmp_path / "run", options, folder=tmp_path)

    assert isinstance(ended.error, SystemExit)
    assert ended.error.code == 128 + signal.SIGTERM
    assert verified(tmp_path / "run") == [1, 2]
    assert ended.seconds < 30


# Secrets.


@pytest.mark.heavy
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_secret_is_in_nothing_that_is_written_or_reported(
    s3: S3, tmp_path: Path, is_wrong: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run", [3.0])
    secret = "never-to-be-shown" if is_wrong else s3.secret
    options = {"remote": f"s3://{s3.bucket()}/exp", "remote_options": s3.options(secret=secret)}

    began = time.monotonic()
    with heard() as told, contextlib.ExitStack() as stack:
        caught = stack.enter_context(pytest.raises(RemoteError)) if is_wrong else None
        saved(tmp_path / "run", [2.0], push="all", **options)

    if caught:
        assert "checkpoints 2, 1 of" in str(caught.value)
        assert len(told) == 1, "once, though both the load and the push meet it"
        assert time.monotonic() - began < 60
    shown = "".join([*told, str(caught and caught.value), *capfd.readouterr()])
    assert secret not in shown
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


@pytest.mark.heavy
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_the_files_on_the_remote_hold_no_secret(place: Place, s3: S3, tmp_path: Path) -> None:
    saved(tmp_path / "run", [3.0], **at(place))

    fs, path = place.open()
    found = fs.find(path)
    assert len(found) > 4
    assert all(s3.secret.encode() not in fs.cat_file(name) for name in found)


# Many at once.


@pytest.mark.heavy
@HERE
def test_saves_prunings_and_pushes_at_the_same_time_lose_nothing(place: Place, tmp_path: Path) -> None:
    training = Training()
    with training.load(tmp_path / "run", keep=2, push="newest", remote_keep=2, **at(place)) as state:
        for step in range(60):
            training.learn(torch.ones(2, 4))
            state.save(loss=random.random() + np.sin(step))

    newest = verified(tmp_path / "run")
    assert there(place)[-1] == newest[-1] == 60
    shutil.rmtree(tmp_path / "run")
    assert step_of(tmp_path / "run", **at(place)) == 60
    assert Run(tmp_path / "run").open(60).verify() is None


# What comes together.


@pytest.mark.heavy
@HERE
def test_what_has_the_number_of_one_there_from_elsewhere_is_pushed(place: Place, tmp_path: Path) -> None:
    keeps = {"keep": None, "remote_keep": None, "push": "all", **at(place)}
    saved(tmp_path / "here", [3.0], **keeps)
    shutil.copytree(tmp_path / "here", tmp_path / "elsewhere")
    saved(tmp_path / "elsewhere", [2.0, 1.0], **keeps)

    # Loaded from a path, it does not ask which numbers there are, and the lock keeps the push from asking.
    other = Lock(tmp_path / "here" / ".push.lock")
    path = Run(tmp_path / "here").open(1).path
    training = Training()
    parts = {"model": training.model, "optimizer": training.optimizer, "loader": training.loader}
    state = RunState.load(tmp_path / "here", **parts, minimize="loss", resume=path, **grouped(**keeps))  # type: ignore[arg-type]
    with heard(), state:
        for _ in range(2):
            step_and_save(state, training, 7.0)
            other.release()
            until(lambda: not state._training.copies.pinned())  # type: ignore[union-attr]

    remote = Remote(Store(place.url, place.options()))
    metrics = [remote.about(name)[0].metrics["loss"] for name in remote.numbers().values()]
    # By the second save it is known which numbers are taken
    assert (there(place), metrics) == ([1, 2, 3, 4], [3.0, 7.0, 1.0, 7.0])


@pytest.mark.heavy
def test_a_close_that_is_interrupted_leaves_the_pushing_to_the_next_start(
    gated: dict[str, Any], tmp_path: Path
) -> None:
    training = Training()
    state = training.load(tmp_path / "run", signals=(), **gated)
    step_and_save(state, training, 1.0)
    assert Gated.asked.wait(30)

    timer = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        state.close()
    timer.join()

    Gated.gate.set()
    assert step_of(tmp_path / "run", **gated) == 1
    assert names() == [1]
    assert state.run.numbers() == verified(tmp_path / "run") == [1]


def test_the_error_of_a_save_is_not_hidden_by_one_of_the_remote(
    gated: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    state = training.load(tmp_path / "run", push_timeout=0.1, **gated)
    step_and_save(state, training, 1.0)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    training.learn(torch.ones(2, 4))
    state.save(loss=0.5)
    with heard() as told, pytest.raises(SaveFailed, match="No space left"):
        state.close()

    assert any("checkpoint 1 of" in text for text in told)
    assert verified(tmp_path / "run") == [1]


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["sftp"], indirect=True)
def test_a_run_that_is_closed_leaves_no_connection_behind(place: Place, tmp_path: Path) -> None:
    def connections() -> list[str]:
        return [each.name for each in threading.enumerate() if type(each).__name__ == "Transport"]

    before = connections()
    for _ in range(2):
        saved(tmp_path / "run", [1.0], **at(place))
        until(lambda: connections() == before)
    shutil.rmtree(tmp_path / "run")
    assert step_of(tmp_path / "run", **at(place)) == 2
    until(lambda: connections() == before)
    assert verified(tmp_path / "run") == [2]


@pytest.mark.heavy
def test_a_cell_that_runs_again_does_not_wait_for_the_remote(gated: dict[str, Any], tmp_path: Path) -> None:
    training = Training()
    first = training.load(tmp_path / "run", **gated)
    step_and_save(first, training, 1.0)
    assert Gated.asked.wait(30)

    began = time.monotonic()
    with heard() as told:
        second = training.load(tmp_path / "run", **gated)
    assert time.monotonic() - began < 30

    Gated.gate.set()
    second.close()
    assert (told, names(), verified(tmp_path / "run")) == ([], [1], [1])
