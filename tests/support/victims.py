"""Trainings that end at a moment that nobody chose, and what the next start of each has to find."""

from __future__ import annotations

import functools
import os
import random
import secrets
import select
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tiny

from resumable import RunState

Tell = Callable[[str], None]

LONGEST = 60
"""So many steps are known; a run that has made them is left, and another one begun."""

_PATIENCE = 60.0


@functools.cache
def known() -> list[bytes]:
    """Return what the tiny training is after so many steps, if nothing ever happens to it."""
    training = tiny.fresh()
    digests = [training.digest()]
    for _ in range(LONGEST + 20):
        training.step()
        digests.append(training.digest())
    return digests


def dice() -> random.Random:
    """Return what chooses the moments; the variable VICTIMS chooses the same ones as an earlier run."""
    seed = int(os.environ.get("VICTIMS") or secrets.randbits(32))
    print(f"the moments are those of VICTIMS={seed}")
    return random.Random(seed)


def tries(
    count: int, found: Counter[str], minimums: Mapping[str, int], bad: Sequence[object]
) -> Iterator[int]:
    """Yield at least `count` numbers, and more until each count in `found` exceeds its minimum.

    Of random moments few may hit what is meant: only after ten times as many is it taken for unreachable.
    It ends after `count` if something went wrong, which the caller then reports.
    """
    number = 0
    while number < count or (not bad and any(found[one] <= least for one, least in minimums.items())):
        assert number < 10 * count, f"{number} tries found {dict(found)}, which should exceed {minimums}"
        yield number
        number += 1
    print(f"{number} tries found {dict(found)}")


def loss(step: int) -> float:
    """Return a metric that is the best so far now and then, and mostly not."""
    return random.Random(step).random() - step / 50


def best(step: int) -> int:
    """Return the save that has the best loss, of those up to this step."""
    return min(range(1, step + 1), key=loss)


class Victim:
    """A process that is forked from this one, which has torch already; it tells how far it has come.

    Its body is a closure of the test, which no other process has, and what it has forked outlives it.
    """

    def __init__(self, body: Callable[[Tell], object]) -> None:
        self._pipe, theirs = os.pipe()
        self.said: list[str] = []
        self._rest = b""
        with warnings.catch_warnings():
            # Newer Pythons warn of threads, of which the test runner may have some: the child uses none.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        self.born = time.monotonic()
        if self.pid == 0:
            _live(body, theirs)
        os.close(theirs)

    def wait_for(self, word: str) -> float | None:
        """Return how long it took to say that; None if it has ended without."""
        while not self.has_said(word):
            if not self._hear():
                return None
        return time.monotonic() - self.born

    def has_said(self, word: str) -> bool:
        """Whether a line of it begins so."""
        return any(line.startswith(word) for line in self.said)

    def _hear(self) -> bool:
        if not select.select([self._pipe], [], [], _PATIENCE)[0]:
            self.said.append(f"bad: not a word for {_PATIENCE} s")
            os.kill(self.pid, signal.SIGKILL)
        came = os.read(self._pipe, 65536)
        *lines, self._rest = (self._rest + came).split(b"\n")
        self.said += [line.decode() for line in lines]
        return bool(came)

    def kill(self) -> None:
        """End it at once, if it lives, and hear what it had to say."""
        os.kill(self.pid, signal.SIGKILL)
        self._leave()

    def bury(self) -> None:
        """Wait for its end, and hear what it had to say."""
        while not any(line.startswith(("ended", "bad")) for line in self.said) and self._hear():
            pass
        self._leave()

    def _leave(self) -> None:
        os.waitpid(self.pid, 0)
        # What it has forked itself may live, and hold the other end open
        while select.select([self._pipe], [], [], 0)[0] and self._hear():
            pass
        os.close(self._pipe)


def _live(body: Callable[[Tell], object], pipe: int) -> None:
    def tell(line: str) -> None:
        os.write(pipe, f"{line}\n".encode())

    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        body(tell)
        tell("ended")
    except BaseException:
        tell("bad: " + traceback.format_exc().replace("\n", " | ")[-1500:])
    finally:
        os._exit(0)


def saved(lines: list[str], word: str = "saved") -> int:
    """Return the last number that was reported with a word, 0 if there is none."""
    return max((int(line.split()[1]) for line in lines if line.startswith(f"{word} ")), default=0)


class Aim:
    """When to end something whose length is not known, and changes: half of the ends come before its own."""

    def __init__(self, since: str | None, until: str) -> None:
        """Both are what it says; without `since` it begins with its process."""
        self._since, self._until = since, until
        self._longest = 0.1

    def wait(self, victim: Victim, dice: random.Random) -> None:
        """Let it begin, and go on for a while."""
        if self._since:
            victim.wait_for(self._since)
        time.sleep(dice.uniform(0, self._longest))

    def hit(self, victim: Victim) -> None:
        """Take in what it had said when it was ended."""
        self._longest *= 0.85 if victim.has_said(self._until) else 1 / 0.85


class Chain:
    """One run, started and ended again and again."""

    def __init__(self, run_dir: Path, keep: int | None = 1, is_copied: bool = False) -> None:
        self.run_dir = run_dir
        self.copy = run_dir.with_name(f"{run_dir.name}-copy")
        self.way: Any = "paced"
        self.bad: list[str] = []
        self.found: Counter[str] = Counter()
        """What the ends have left, and how often."""
        self.durable = 0
        """The newest save that has to be there."""
        self._keep, self._is_copied, self._is_bad = keep, is_copied, False

    def another(self, run_dir: Path) -> Chain:
        """Return another run that is treated alike, and counted with this one."""
        chain = type(self)(run_dir, self._keep, self._is_copied)
        chain.bad, chain.found = self.bad, self.found
        return chain

    def load(self) -> tuple[tiny.Training, RunState]:
        """Start the script."""
        copied = {"remote": self.copy.as_uri(), "remote_keep": 1} if self._is_copied else {}
        return tiny.load(self.run_dir, keep=self._keep, **copied)

    def start(self) -> Victim:
        """Start the script once more: it continues, from what is checked first, until it is ended."""
        known()
        return Victim(self._go_on)

    def ended(self, victim: Victim) -> None:
        """Take in what it has said, and what it left."""
        bad = [f"{self.run_dir}: {line}" for line in victim.said if line.startswith("bad")]
        self.bad += bad
        self._is_bad |= bool(bad)
        self.durable = max(self.durable, saved(victim.said), saved(victim.said, "found"))
        left = {tiny.DEBRIS.sub(r"\1", path.name).partition("-")[0] for path in tiny.debris(self.run_dir)}
        there = {int(path.name.partition("-")[0]) for path in self.run_dir.glob("checkpoints/0*")}
        if max(there, default=0) > self.durable:
            left.add("not acknowledged")
        self.found.update(left or {"nothing"})

    def is_over(self) -> bool:
        """Whether another run should be begun: more steps would not be known, or this one is spoilt."""
        return self._is_bad or self.durable >= LONGEST

    def _go_on(self, tell: Tell) -> None:
        training, state = self.load()
        state._saving.files.ways.small = self.way
        self.check(training, state)
        tell(f"found {state.step}")
        found = state.step
        while state.step < LONGEST + 10:
            tiny.save_next(training, state, loss(state.step + 1))
            if not self._is_copied:
                assert state.run.numbers() == self.kept(state.step)
            tell(f"saved {state.step}")
            tell(f"save {state.step - found} done")

    def check(self, training: tiny.Training, state: RunState) -> None:
        """Look at what a start has found: the newest state, to the last bit, and all of it whole."""
        # One more may be there: what was committed, and could not say so any more
        assert self.durable <= state.step <= self.durable + 1, (self.durable, state.step)
        assert training.digest() == known()[state.step], tiny.what_differs(training, state.step)
        assert tiny.debris(self.run_dir) == []
        tiny.assert_all_verify(state.run)
        if state.step:
            assert {*self.kept(state.step)} <= {*state.run.numbers()}
            assert state.best == loss(best(state.step))

    def kept(self, step: int) -> list[int]:
        """Return the saves that are there after this one."""
        first = max(1, step - self._keep + 1) if self._keep else 1
        return sorted({*range(first, step + 1), best(step)} if step else ())
