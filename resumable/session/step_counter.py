"""Counts the steps of the optimizers, by the hooks that torch calls after each."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..parts.slots import named
from ..saving.autosave import Autosave
from ..saving.fence import is_capturing, untraced
from ..saving.saver import Saving
from ..saving.unseen_optimizers import Others, Unseen
from ..training import Training


class StepCounter:
    """Tells the parts and the position of each step of an optimizer that was given."""

    def __init__(self, training: Training, saving: Saving, autosave: Autosave) -> None:
        self._parts, self._position = training.parts, training.position
        self._saving, self._autosave = saving, autosave
        self._is_prepared = False
        self._is_default_rule = training.options.is_default_rule and training.options.limit is None
        given = named("optimizer", training.options.parts["optimizer"])
        hooked = {name: live for name, live in given.items() if hasattr(live, "register_step_post_hook")}
        self._first = next(iter(given), None)
        self.unseen = Unseen(hooked)
        """The optimizers whose steps have called no hook yet."""
        self._others = Others(self._parts.given(), self._parts.parameters, saving.distrust)
        self._hooks: list[Any] = []
        for name, live in hooked.items():
            hook = untraced(_weakly(self._stepped, name, name == self._first))
            self._hooks.append(live.register_step_post_hook(hook))
        # `untraced` takes a second to import torch's compiler, unless an optimizer has done so already.
        if "torch._dynamo" in sys.modules:
            hook = untraced(_weakly(self._other_stepped))
            self._hooks.append(register_optimizer_step_post_hook(hook))
        self._position.watch_optimizers(
            [*given.values()], are_hooked=bool(hooked), counts_steps=self._first in hooked
        )

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def set_prepared(self) -> None:
        """Note that the optimizers have their state already: a checkpoint has given it to them."""
        self._is_prepared = True

    def find_unseen(self) -> None:
        """Find the optimizers that step without calling hooks: their steps are in a captured CUDA graph."""
        for name in self.unseen.stepped():
            self._note_captured(name)

    def _stepped(self, name: str, is_first: bool, optimizer: Any) -> None:
        self.unseen.seen(name)
        if is_capturing():
            self._note_captured(name)
            self._warn_of_rate(name, optimizer)
            return
        if _is_inner_step(optimizer, sys._getframe(1)):
            return
        for outer in self._parts.stepped(optimizer):
            self.unseen.seen(outer)
        self._position.count_step(name, is_first)
        if is_first and self._position.is_step_without_loop() and self._lacks_saves():
            self._saving.once.warn(
                "every= and Preempt(max_time=...) save only in loops over state.epochs(), state.steps() and "
                "state.batches(), and the optimizer steps outside of them. Loop over state.steps(total), or "
                "call save() yourself; every=None then silences this warning.",
                about="a loop that saves nothing",
            )
        if not self._is_prepared:
            # Before its first step most optimizers have no state.
            self._is_prepared = True
            self._saving.prepare()

    def _other_stepped(self, optimizer: Any) -> None:
        """Know that one that was not given, such as one made in the loop, has ended a window of gradients."""
        if self._others.stepped(optimizer):
            self._position.note_step("")

    def _lacks_saves(self) -> bool:
        # The default rule was not asked for: a script that calls save() itself is right.
        return self._autosave.is_overdue() if self._is_default_rule else self._autosave.is_on

    def _note_captured(self, name: str) -> None:
        self._parts.note_captured(name)
        self._position.note_captured(name == self._first)

    def _warn_of_rate(self, name: str, optimizer: Any) -> None:
        """Warn of a learning rate that a graph keeps from its capture, although a scheduler changes it."""
        is_scheduled = any(part.live is optimizer for _, part in self._parts.schedules())
        if is_scheduled and any(map(_has_number_as_rate, optimizer.param_groups)):
            self._saving.once.warn(
                f"a CUDA graph is captured with {name}, whose learning rate is a number, or a tensor on the "
                "CPU: the graph keeps the one of the capture, whatever the scheduler does, and a resume "
                'captures another. Make it lr=torch.tensor(1e-3, device="cuda"), capturable=True. [R17]',
                about="a captured learning rate",
            )


def _has_number_as_rate(group: dict[str, Any]) -> bool:
    # A tensor on the CPU is read at the capture, too.
    rate = group.get("lr")
    return rate is not None and not (isinstance(rate, torch.Tensor) and rate.is_cuda)


def _weakly(method: Callable[..., object], *given: Any) -> Callable[..., None]:
    """Return a hook that does not keep alive what it calls: it hangs on the user's own objects."""
    known = weakref.WeakMethod(method)

    def hook(live: Any, *_: Any) -> None:
        if found := known():
            found(*given, live)

    return hook


def _is_inner_step(optimizer: Any, frame: FrameType | None) -> bool:
    """Whether this step of an optimizer was called by another: its class calls super().step()."""
    kind = type(optimizer)
    if kind.__module__.startswith(_TORCHS) and kind.step.__module__.startswith(_TORCHS):
        return False
    wrappers = 0
    while frame is not None and wrappers < 2:
        is_wrapper = frame.f_code is _STEP_WRAPPER and frame.f_locals["args"][0] is optimizer
        wrappers, frame = wrappers + is_wrapper, frame.f_back
    return wrappers == 2


_TORCHS = "torch.optim."  # the optimizers there call no step() in theirs
_STEP_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__
"""What torch wraps around the step() of every optimizer class: it calls the hooks."""
