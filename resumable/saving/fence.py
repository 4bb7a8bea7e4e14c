"""What keeps an optimizer from writing before the image is taken."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import torch

from ..files import sharded_tensor
from .save_cost import Waiting

_ONLY_IN_STEPS = ("torch.optim.", "bitsandbytes.optim.")  # their methods write to parameters only in step()

untraced: Any = torch.compiler.disable
"""Keeps a hook out of what `torch.compile` makes of a step: there it would not wait, or crash the process."""


class Fence:
    """Stands before the steps of some optimizers, and opens when the image of what they change is taken.

    Only a hook tells of a step, so only what hooked steps change is guarded. An optimizer with methods
    that torch's do not have may also write elsewhere (in `eval()`, in a `first_step()`), and a captured
    graph calls no hook: of those nothing is guarded.
    """

    def __init__(self, optimizers: Iterable[Any], waiting: Waiting = contextlib.nullcontext) -> None:
        self._waiting = waiting
        self._gates = [_Gate(live, self._pass) for live in optimizers]
        self._wait: Callable[[], None] | None = None
        self._owner = os.getpid()
        self._may_settle = True

    def guarded(self, is_wanted: bool = True) -> set[int]:
        """Return the addresses of the tensors that change only in steps that wait here, if wanted.

        An optimizer counts only if its hook has seen a step since the last call: other code that has
        changed its parameters may do so again at any moment. Within a step none does: it has passed already.
        """
        is_wanted = is_wanted and not self._is_in_a_step()
        theirs: dict[bool, set[int]] = {True: set(), False: set()}
        for gate in self._gates:
            theirs[gate.is_proven()].update(gate.places() if is_wanted else ())
        return theirs[True] - theirs[False] - {0}

    def _is_in_a_step(self) -> bool:
        """Whether a step calls this: the handler of a signal that interrupts it, or a hook of the user."""
        steps = {gate.step_code() for gate in self._gates}
        frame = inspect.currentframe()
        while frame and frame.f_code not in steps:
            frame = frame.f_back
        return frame is not None

    def left_alone(self, places: set[int]) -> set[int]:
        """Return the addresses that are of no optimizer's parameter; none after `distrust_frozen`."""
        if not places or not self._may_settle:
            return set()
        return places - {sharded_tensor.place(p) for p in self.parameters() if _has_place(p)}

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of all optimizers."""
        for gate in self._gates:
            yield from gate.parameters()

    def steps(self) -> int:
        """Return the largest number of steps that the hooks of one optimizer have seen."""
        return max((gate.steps for gate in self._gates), default=0)

    def catch_up(self) -> None:
        """Let this thread's current streams wait for the streams in which the last steps were queued."""
        for gate in self._gates:
            for device, stream in gate.streams.items():
                if stream != (here := torch.cuda.current_stream(device)):
                    here.wait_stream(stream)

    def shut(self, wait: Callable[[], None]) -> None:
        """Let every step call `wait` first, until `open`."""
        self._wait, self._owner = wait, os.getpid()

    def open(self) -> None:
        """Let the steps pass."""
        self._wait = None

    def distrust(self) -> None:
        """Guard nothing from now on: other code writes to the parameters without passing here."""
        self.distrust_frozen()
        for gate in self._gates:
            gate.is_blind = True

    def distrust_frozen(self) -> None:
        """Guard no frozen tensor from now on: other code writes to them."""
        self._may_settle = False

    def _pass(self) -> None:
        passed: Callable[[], None] | None = None
        # The thread that opens it did not come along into a process that was forked meanwhile. While a step
        # waits, the handler of a signal may save, too.
        while (wait := self._wait) and wait is not passed and self._owner == os.getpid():
            with self._waiting():
                wait()
            passed = wait

    def remove(self) -> None:
        """Take the hooks away."""
        for gate in self._gates:
            gate.remove()


class _Gate:
    def __init__(self, live: Any, passed: Callable[[], None]) -> None:
        self._live = live
        self._passed = passed
        self._recent = 0
        self._devices: tuple[int, list[torch.device]] = (0, [])
        self.steps = 0
        self.streams: dict[torch.device, Any] = {}
        """By device: the stream in which the last step was queued."""
        # One that does not call torch's constructor has hooks that nothing calls.
        is_hooked = isinstance(live, torch.optim.Optimizer) and getattr(type(live).step, "hooked", False)
        self.is_blind = not is_hooked or _has_more_methods(live)
        self._waits = not self.is_blind
        self._hooks: list[Any] = []
        if is_hooked:
            # One hook: what keeps it out of a compiled step takes longer than what it does.
            self._hooks.append(live.register_step_pre_hook(untraced(self._before_step)))

    def _before_step(self, *_: object) -> None:
        self.steps += 1
        self._recent += 1
        # Replays of the graph will not come this way.
        if is_capturing():
            self.is_blind = True
        elif self._waits:
            self._passed()
        for device in self._gpus() if _is_gpu_in_use() else ():
            self.streams[device] = torch.cuda.current_stream(device)

    def _gpus(self) -> list[torch.device]:
        # Thousands of parameters at each step would take too long.
        count = sum(len(group["params"]) for group in self._live.param_groups)
        if count != self._devices[0]:
            found = dict.fromkeys(p.device for p in self.parameters() if p.is_cuda)
            self._devices = count, [*found]
        return self._devices[1]

    def parameters(self) -> list[Any]:
        return [p for group in getattr(self._live, "param_groups", ()) for p in group["params"]]

    def step_code(self) -> CodeType | None:
        step = getattr(type(self._live), "step", None)
        code: CodeType | None = getattr(step, "__code__", None)
        return code

    def is_proven(self) -> bool:
        steps, self._recent = self._recent, 0
        return steps > 0 and not self.is_blind

    def places(self) -> set[int]:
        values = [v for state in getattr(self._live, "state", {}).values() for v in _values(state)]
        return {sharded_tensor.place(t) for t in (*self.parameters(), *values) if _has_place(t)}

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def is_capturing() -> bool:
    """Whether this thread captures a CUDA graph: what it queues runs whenever the graph is replayed."""
    return _is_gpu_in_use() and torch.cuda.is_current_stream_capturing()


def _is_gpu_in_use() -> bool:
    # To look for a GPU would take most of the time of the hooks.
    is_in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_in_use


def _has_more_methods(live: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has public methods of an unknown kind, which may write to the parameters."""
    kinds = [kind for kind in type(live).__mro__ if not kind.__module__.startswith(_ONLY_IN_STEPS)]
    known = {*dir(torch.optim.Optimizer)}
    for own in (live, *kinds):
        for name in vars(own).keys() - known:
            if not name.startswith("_") and callable(vars(own)[name]):
                return True
    return False


def _values(state: Any) -> Iterable[Any]:
    return state.values() if isinstance(state, dict) else ()


def _has_place(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested
