"""What a training does with its run: each a real program, of which every call is looked at.

What comes before the first `yield` is done before, and is durable. What a scenario tells is a promise: from
then on no power cut may take it back.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import gloo
import pytest
import tiny
from strace_log import Tell
from tiny import Training

from resumable import ResumableWarning, Run, RunState, SaveFailed
from resumable.remote.by_hand import Copying
from resumable.remote.run_copy import Remote
from resumable.remote.storage import Store
from resumable.run import environment

RUN = "runs/exp"
"""Where the run is, in the folder that is traced."""


class Script:
    """A training script that tells what has been promised to it."""

    def __init__(self, root: Path, rank: int, tell: Tell, options: Mapping[str, Any]) -> None:
        self.rank = rank
        self.run_dir = root / RUN
        self.source = root.parent / "source"
        self.remote = remote(root)
        self.tell = tell
        self.options = dict(options)

    def load(self, **more: Any) -> tuple[Training, RunState]:
        """Start, fresh or from what is there."""
        return tiny.load(self.run_dir, **{**self.options, **more})

    def save(self, training: Training, state: RunState, loss: float) -> None:
        """Train a step and save, and tell when it is durable."""
        for _ in state.steps(state.step + 1):
            training.step()
            handle = state.save(loss=loss)
            handle.wait()
        tiny.assert_stands_at(training, state, state.step)
        if self.rank == 0:
            self.saved(state.run, handle.number)

    def saved(self, run: Run, number: int) -> None:
        """Tell that a checkpoint is durable, and which one is the best."""
        about = run.open(number).about
        best = about.best.number if about.best else None
        self.tell(number=number, step=about.step, best=best)

    def saves(self, *losses: float, **more: Any) -> None:
        """Start, and save once for each loss."""
        training, state = self.load(**more)
        with state:
            for loss in losses:
                self.save(training, state, loss)


def remote(root: Path) -> str:
    """Return the address of the remote, beside the folder that is traced."""
    return f"file://{root.parent}/remote"


def pull(run: Run, address: str) -> None:
    """Bring the newest of a remote, and the best."""
    Copying(run, Remote(Store(address))).pull("newest")


Program = Callable[[Script], Iterator[None]]


@dataclass(frozen=True)
class Scenario:
    """A program, and what its next start looks like."""

    program: Program
    options: Mapping[str, Any] = field(default_factory=dict)
    blocks: Mapping[str, int] = field(default_factory=dict)
    """What a small file shall have that else only a large one has: several blocks, links, room."""
    damaged: frozenset[int] = frozenset()
    """The checkpoints that are damaged when it begins, until it tells of them."""
    delays: tuple[str, ...] = ("",)
    """Of each of its processes: what strace shall hold up."""
    warns: str = ""
    """What the next start may warn of."""
    pulls: bool = False
    """Whether the next start is one that pulls."""

    def begin(self, root: Path) -> Callable[[int, Tell], Iterator[None]]:
        """Return what is to be traced, in this folder."""
        # It draws from the generator that the trainings draw from: not while one of them is at work
        tiny.uninterrupted()

        def program(rank: int, tell: Tell) -> Iterator[None]:
            # Once a process git is asked, by a process of its own.
            environment.attempt()
            return self.program(Script(root, rank, tell, self.options))

        return program


def first(script: Script) -> Iterator[None]:
    yield
    script.saves(1.0)


def in_a_folder_that_was_there(script: Script) -> Iterator[None]:
    yield
    script.run_dir.mkdir(parents=True)
    script.saves(1.0)


def after_a_failed_flush(script: Script) -> Iterator[None]:
    yield
    training, state = script.load()
    flush = os.fsync

    def failing(fd: int) -> None:
        if os.path.samestat(os.fstat(fd), os.stat(script.run_dir)):
            raise OSError(errno.EIO, "the disk is gone")
        flush(fd)

    with state:
        with mock.patch.object(os, "fsync", failing), pytest.raises(SaveFailed, match="the disk is gone"):
            state.save(loss=1.0).wait()
        script.save(training, state, 1.0)


def again(script: Script) -> Iterator[None]:
    training, state = script.load()
    script.save(training, state, 1.0)
    script.save(training, state, 2.0)
    yield
    with state:
        script.save(training, state, 3.0)


def one_kept(script: Script) -> Iterator[None]:
    training, state = script.load()
    script.save(training, state, 5.0)
    yield
    with state:
        for loss in (4.0, 3.0):
            script.save(training, state, loss)


def best_moves(script: Script) -> Iterator[None]:
    training, state = script.load()
    script.save(training, state, 1.0)
    yield
    with state:
        for loss in (5.0, 7.0, 0.5):
            script.save(training, state, loss)


def in_threads(script: Script) -> Iterator[None]:
    training, state = script.load()
    script.save(training, state, 1.0)
    yield
    with state:
        for loss in (0.5, 2.0):
            script.save(training, state, loss)


def past_the_cache(script: Script) -> Iterator[None]:
    training, state = script.load()
    script.save(training, state, 1.0)
    yield
    state._saving.files.ways.small = "direct"
    with state:
        script.save(training, state, 0.5)


def linked(script: Script) -> Iterator[None]:
    script.saves(2.0, 3.0)
    yield
    script.saves(1.0, 4.0)


def from_an_older_one(script: Script) -> Iterator[None]:
    script.saves(3.0, 2.0, 1.0, keep=None)
    yield
    script.saves(0.5, resume=1)


def back(script: Script) -> Iterator[None]:
    training, state = script.load()
    for loss in (1.0, 2.0, 3.0):
        script.save(training, state, loss)
    yield
    with state:
        state.restore(1)
        script.tell(superseded=[2, 3])
        script.save(training, state, 2.0)
        state.restore("best")
        script.tell(superseded=[2, 3, 4])


def over_debris(script: Script) -> Iterator[None]:
    script.saves(1.0, 2.0)
    _litter(script.run_dir)
    yield
    script.saves(0.5)


def without_its_run_json(script: Script) -> Iterator[None]:
    script.saves(1.0)
    (script.run_dir / "run.json").unlink()
    history = script.run_dir / "history.jsonl"
    history.write_bytes(history.read_bytes()[:-20])
    yield
    script.saves(2.0)


def prunes_many(script: Script) -> Iterator[None]:
    script.saves(1.0, 2.0, 3.0, 4.0, keep=None)
    yield
    script.saves(5.0)


def pulled(script: Script) -> Iterator[None]:
    _push(script, 1.0, 2.0)
    yield
    _pull(script)
    script.saves(3.0, remote=None)


def pulled_over_damage(script: Script) -> Iterator[None]:
    _push(script, 1.0, 2.0)
    shutil.copytree(script.source, script.run_dir, symlinks=True)
    damaged = next(script.run_dir.glob("checkpoints/000002-*/model.safetensors"))
    damaged.write_bytes(bytes(damaged.stat().st_size))
    script.saved(Run(script.run_dir), 1)
    yield
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* It is taken from", ResumableWarning)
        script.load(remote=script.remote)[1].close()
    script.saved(Run(script.run_dir), 2)
    script.saves(0.5)


def pulled_after_a_kill(script: Script) -> Iterator[None]:
    _push(script, 1.0)
    yield
    _killed_at_flush("optimizer.safetensors", 1, lambda: _pull(script))
    _pull(script)


def by_two(script: Script) -> Iterator[None]:
    gloo.join(script.rank, 2, script.source.with_name("port"))
    yield from _saves_of_two(script, *script.load())


def in_shards(script: Script) -> Iterator[None]:
    gloo.join(script.rank, 2, script.source.with_name("port"))
    yield from _saves_of_two(script, *script.load(sharded=True))


def _saves_of_two(script: Script, training: Training, state: RunState) -> Iterator[None]:
    script.save(training, state, 3.0)
    yield
    with state:
        for loss in (2.0, 4.0):
            script.save(training, state, loss)
    _wait_for_the_other(script)


def _wait_for_the_other(script: Script) -> None:
    # The store is in rank 0, and the other one may still ask it something
    done = script.source.with_name("done")
    if script.rank:
        done.touch()
    for _ in range(6000):
        if done.exists():
            return
        time.sleep(0.01)
    raise AssertionError("the other process has not ended")


def started_after_a_kill(flush: int) -> Program:
    def program(script: Script) -> Iterator[None]:
        yield
        _killed_at_flush(str(script.run_dir.parent), flush, lambda: script.saves(1.0))
        script.saves(1.0)

    return program


def _killed_at_flush(where: str, number: int, body: Callable[[], object]) -> None:
    """Do something in a process that is killed when it is about to flush such a path for the n-th time."""
    if (child := os.fork()) == 0:
        left = [number]
        real = os.fsync

        def fsync(fd: int) -> None:
            left[0] -= where in os.readlink(f"/proc/self/fd/{fd}")
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            real(fd)

        os.fsync = os.fdatasync = fsync  # type: ignore[assignment]
        body()
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _litter(run_dir: Path) -> None:
    folder = run_dir / "checkpoints"
    newest = max(folder.iterdir())
    for name in (".stage-000003-0a1b2c3d", ".trash-000001-0a1b2c3d"):
        shutil.copytree(newest, folder / name)
        (folder / name / "model.safetensors").write_bytes(b"")
    (folder / ".stage-000003-0a1b2c3d" / "manifest.json").unlink()
    for name in ("run.json", "probe"):
        (run_dir / f".{name}-0a1b2c3d").write_bytes(b"{")
    (run_dir / ".newest-0a1b2c3d").symlink_to(os.path.relpath(newest, run_dir))


def _push(script: Script, *losses: float) -> None:
    """Save in a run elsewhere, and push all of it."""
    training, state = tiny.load(script.source, **{**script.options, "keep": None})
    with state:
        for loss in losses:
            tiny.save_next(training, state, loss)
    Copying(Run(script.source), Remote(Store(script.remote))).push("all")


def _pull(script: Script) -> None:
    run = Run(script.run_dir)
    pull(run, script.remote)
    for number in run.numbers():
        script.saved(run, number)


LINKS = {"_WORTH_A_LINK": 0, "_PREALLOCATE": 1}

SLOW = "pwrite64,pwritev,pwritev2,write,fsync:delay_enter=15ms"
OPENS = "openat:delay_enter=5ms"


def two(*delays: str, write: str = "one", program: Program = by_two) -> Scenario:
    """Return a save by two processes, one of which may be held up at each of some calls."""
    small, options = {**LINKS, "BLOCK": 512}, {"write": write, "timeout": 30}
    return Scenario(program, options, blocks=small, delays=delays, warns="has changed")


ALL: dict[str, Scenario] = {
    "first": Scenario(first),
    "in-a-folder-that-was-there": Scenario(in_a_folder_that_was_there),
    "after-a-failed-flush": Scenario(after_a_failed_flush),
    "again": Scenario(again, {"keep": 2}),
    "one-kept": Scenario(one_kept),
    "best-moves": Scenario(best_moves),
    "in-threads": Scenario(in_threads, blocks={**LINKS, "BLOCK": 1024, "_WRITERS": 3}),
    "past-the-cache": Scenario(past_the_cache, blocks=LINKS),
    "linked": Scenario(linked, {"keep": 2}, blocks=LINKS),
    "from-an-older-one": Scenario(from_an_older_one),
    "back": Scenario(back, {"keep": None}),
    "over-debris": Scenario(over_debris),
    "without-its-run-json": Scenario(without_its_run_json),
    "prunes-many": Scenario(prunes_many),
    "pulled": Scenario(pulled, pulls=True),
    "pulled-over-damage": Scenario(pulled_over_damage, damaged=frozenset({2}), pulls=True),
    "pulled-after-a-kill": Scenario(pulled_after_a_kill, pulls=True),
    **{f"after-a-kill-{flush}": Scenario(started_after_a_kill(flush)) for flush in range(1, 20, 4)},
    "two": two("", "", write="one"),
    "two-write": two("", "", write="all"),
    "two-one-is-slow": two("", SLOW, write="all"),
    "two-first-is-slow": two(SLOW, "", write="all"),
    "two-late": two("", OPENS, write="one"),
    "shards": two("", "", program=in_shards),
    "shards-one-is-slow": two("", SLOW, program=in_shards),
    "shards-first-is-slow": two(SLOW, "", program=in_shards),
}
