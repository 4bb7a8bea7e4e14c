"""What keeps an optimizer from writing before the image is taken."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch


class Fence:
    """Stands before the steps of some optimizers, and opens when the image of what they change is taken.

    Only a hook tells of a step, so only what hooked steps change is guarded. Optimizers that are not
    torch's own may also write elsewhere (in `eval()`, in a `first_step()`), and a captured graph calls
    no hook: of those nothing is guarded.
    """

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._gates = [_Gate(live, self._pass) for live in optimizers]
        self._wait: Callable[[], None] | None = None
        self._owner = os.getpid()

    def guarded(self, is_wanted: bool = True) -> set[int]:
        """Return the addresses of the tensors that nobody changes but a step that waits here, if wanted.

        An optimizer counts only if the hook has told of a step since the last call: what else has
        changed its parameters may do so again at any moment.
        """
        theirs: dict[bool, set[int]] = {True: set(), False: set()}
        for gate in self._gates:
            theirs[gate.is_proven()].update(gate.places() if is_wanted else ())
        return theirs[True] - theirs[False] - {0}

    def shut(self, wait: Callable[[], None]) -> None:
        """Let every step call `wait` first, until `open`."""
        self._wait, self._owner = wait, os.getpid()

    def open(self) -> None:
        """Let the steps pass."""
        self._wait = None

    def distrust(self) -> None:
        """Guard nothing from now on: somebody writes to the parameters who does not pass here."""
        for gate in self._gates:
            gate.is_blind = True

    def _pass(self) -> None:
        # The thread that opens it did not come along into a process that was forked meanwhile.
        if (wait := self._wait) and self._owner == os.getpid():
            wait()

    def remove(self) -> None:
        """Take the hooks away."""
        for gate in self._gates:
            gate.remove()


class _Gate:
    def __init__(self, live: Any, passed: Callable[[], None]) -> None:
        self._live = live
        self._passed = passed
        self._steps = 0
        # A method of that name switches the parameters between two sets of values.
        switches = hasattr(live, "train") or hasattr(live, "eval")
        self.is_blind = not type(live).__module__.startswith("torch.optim.") or switches
        self._hook = None if self.is_blind else live.register_step_pre_hook(self._before_step)

    def _before_step(self, *_: object) -> None:
        self._steps += 1
        # Replays of the graph will not come this way.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.is_blind = True
        else:
            self._passed()

    def is_proven(self) -> bool:
        steps, self._steps = self._steps, 0
        return steps > 0 and not self.is_blind

    def places(self) -> set[int]:
        parameters = [p for group in getattr(self._live, "param_groups", ()) for p in group["params"]]
        values = [v for state in getattr(self._live, "state", {}).values() for v in _values(state)]
        return {t.data_ptr() for t in (*parameters, *values) if _has_place(t)}

    def remove(self) -> None:
        if self._hook:
            self._hook.remove()


def _values(state: Any) -> Iterable[Any]:
    return state.values() if isinstance(state, dict) else ()


def _has_place(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested
