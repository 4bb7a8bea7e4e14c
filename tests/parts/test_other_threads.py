"""Containers that change in a save: another thread fills them, or the state_dict of another part."""

from __future__ import annotations

import threading
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resumable import Run, RunState
from resumable.files import codec

# What is added after a save is in no checkpoint yet, and it says so.
pytestmark = pytest.mark.filterwarnings("ignore:extra.replay(, extra.actor)? changed after save")

LENGTH = 200


class Actor:
    """Fills a replay buffer, whose transitions share their observations with the next ones."""

    def __init__(self, replay: deque[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.replay = replay
        self.steps = 0
        self._last = torch.tensor([0.0])
        while len(replay) < LENGTH:
            self.act()

    def act(self) -> None:
        self.steps += 1
        # An episode ends now and then: the next transition begins elsewhere.
        begin = torch.tensor([1000.0 * self.steps]) if self.steps % 3 == 0 else self._last
        self._last = begin + 1
        self.replay.append((begin, self._last))


def wrong(replay: deque[Any]) -> list[tuple[float, float]]:
    """Return the transitions that no actor has added."""
    return [pair for pair in numbers(replay) if pair[1] != pair[0] + 1]


def numbers(replay: deque[Any]) -> list[tuple[float, float]]:
    return [(float(one), float(two)) for one, two in replay]


def neighbours(replay: deque[Any]) -> list[Any]:
    """Return the transitions of which the second begins where the first ends."""
    return [(one, two) for one, two in pairwise(replay) if one[1] == two[0]]


def start(run_dir: Path, replay: deque[Any], **more: Any) -> RunState:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return RunState.load(
        run_dir, model=model, optimizer=optimizer, extra={"replay": replay, **more}, keep=None
    )


def test_what_comes_as_it_looks_at_the_parts_waits(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, encode = None, codec.encode
    for _ in range(3):
        replay: deque[Any] = deque(maxlen=LENGTH)
        actor = Actor(replay)

        def acting(*args: Any, actor: Actor = actor) -> Any:
            actor.act()
            return encode(*args)

        with start(run_dir, replay) as state:
            assert before in (None, numbers(replay))
            assert all(one[1] is two[0] for one, two in neighbours(replay))
            for _ in state.steps(state.step + 2):
                before = numbers(replay)
                with monkeypatch.context() as patch:
                    patch.setattr(codec, "encode", acting)
                    state.save().wait()


class Counting:
    """Counts in other parts, whenever it is asked for its state."""

    def __init__(self, *counts: Any) -> None:
        self.counts = counts

    def state_dict(self) -> dict[str, Any]:
        for one in self.counts:
            one["asked"] = one.get("asked", 0) + 1
        return {"asked": self.counts[0]["asked"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["asked"]


@pytest.mark.filterwarnings("ignore:.* changed after save")
def test_what_a_state_dict_writes_elsewhere_is_in_the_same_checkpoint(run_dir: Path) -> None:
    for life in range(3):
        first, last = dict[str, Any](), dict[str, Any]()
        counting = Counting(first, last)
        with start(run_dir, deque(), a=first, counting=counting, z=last) as state:
            if life:
                assert first == last == {"asked": counting.loaded}
            for _ in state.steps(state.step + 2):
                state.save().wait()


@pytest.mark.heavy
def test_checkpoints_of_a_buffer_that_a_thread_fills_have_what_it_added(run_dir: Path) -> None:
    replay: deque[Any] = deque(maxlen=LENGTH)
    actor, over = Actor(replay), threading.Event()

    def fill() -> None:
        while not over.wait(0.001):
            actor.act()

    other = {f"a{number}": {"b": [*range(60)]} for number in range(200)}
    filling = threading.Thread(target=fill)
    with start(run_dir, replay, other=other) as state:
        filling.start()
        try:
            for _ in state.steps(8):
                state.save()
        finally:
            over.set()
            filling.join()

    for number in Run(run_dir).numbers():
        found: deque[Any] = deque(maxlen=LENGTH)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        extra = {"replay": found, "other": dict[str, Any]()}
        RunState.load(
            run_dir, model=model, optimizer=optimizer, extra=extra, resume=number, keep=None
        ).close()
        assert len(found) == LENGTH
        assert wrong(found) == []
