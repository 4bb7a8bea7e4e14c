"""Finds optimizers whose steps no hook sees: in a captured CUDA graph, or not given to RunState."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from types import FrameType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..errors import warn
from ..files import fingerprint
from ..loaders import wrappers
from ..parts.gradients import Gradients

_SMALL = 1 << 20


class Unseen:
    """The optimizers that have not called a hook yet, and what their state was."""

    def __init__(self, optimizers: Mapping[str, Any]) -> None:
        self.optimizers = dict(optimizers)
        """Those that have not called a hook yet."""
        self._before: dict[str, list[Any]] = {}

    def seen(self, name: str) -> None:
        """Note that a hook was called for a step of this optimizer."""
        self.optimizers.pop(name, None)

    def stepped(self) -> list[str]:
        """Return the optimizers whose state has changed since the last call although no hook was called."""
        if not self.optimizers:
            return []
        states = {name: [*_states(live)] for name, live in self.optimizers.items()}
        # Before its first step an optimizer has no state, and this is asked after each batch.
        now = {name: fingerprint.of(tensors) if tensors else [] for name, tensors in states.items()}
        before, self._before = self._before, now
        known = now.keys() & before.keys()
        found = [name for name in now if name in known and _has_changed(before[name], now[name])]
        for name in found:
            self.seen(name)
        return found


class NotGiven:
    """Warns of an optimizer or a scheduler that trains what was given, and is in no part itself."""

    def __init__(
        self,
        given: Collection[Any],
        parameters: Callable[[], Iterable[torch.Tensor]],
        found: Callable[[], None] | None,
    ) -> None:
        """`found`: called instead of a warning where the script's variables are stored, these among them."""
        self._found = found
        self._given = given
        self._parameters = parameters
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._gradients: weakref.WeakKeyDictionary[Any, Gradients] = weakref.WeakKeyDictionary()
        """Those of optimizers that were not given."""
        self._has_lost_gradients = False
        """Whether a checkpoint lacks gradients, if an optimizer that was not given makes a step with them."""
        self._rates = self._read_rates()

    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer, given or not, has made a step."""
        if optimizer in self._known:
            if gradients := self._gradients.get(optimizer):
                gradients.stepped()
            return
        self._known.add(optimizer)
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if any(_leads_to(live, optimizer) for live in self._given):
            return
        if any(id(parameter) in own for parameter in self._parameters()):
            if self._found:
                self._found()
                return
            if _has_state(optimizer):
                _warn_of(optimizer, "its state is in no checkpoint, and a resume starts it with empty state")
                return
            self._gradients[optimizer] = gradients = Gradients(weakref.proxy(optimizer))
            gradients.stepped()
            if self._has_lost_gradients:
                self._warn_of_gradients(optimizer)

    def look(self) -> None:
        """Look, at a save, for what it lacks."""
        if self._found:
            return
        self._look_for_schedulers()
        for optimizer, gradients in [*self._gradients.items()]:
            own = {id(one) for group in optimizer.param_groups for one in group["params"]}
            trained = (parameter for parameter in self._parameters() if id(parameter) in own)
            if gradients.pending({str(number): one for number, one in enumerate(trained)}):
                self._warn_of_gradients(optimizer)
        if not self._known:
            # One call for all: to ask each of ten thousand would delay the training.
            held = [one for one in map(attrgetter("grad"), self._parameters()) if one is not None]
            self._has_lost_gradients |= any(one.is_cpu and bool(one.any()) for one in held)

    def _warn_of_gradients(self, optimizer: Any) -> None:
        del self._gradients[optimizer]
        _warn_of(
            optimizer,
            "save() was called between two of its steps: the gradients of that window are in no checkpoint",
        )

    def _look_for_schedulers(self) -> None:
        if self._rates == (rates := self._read_rates()):
            return
        self._rates = rates
        given = [wrappers.inside(live) for live in self._given]
        if any(isinstance(live, LRScheduler) for live in given):
            return
        held = _schedulers_in(given)
        for optimizer in given:
            for scheduler in _schedulers(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else ():
                if scheduler not in self._known and not any(one is scheduler for one in held):
                    self._known.add(scheduler)
                    warn(
                        f"a scheduler ({type(scheduler).__name__}) has changed the learning rate, and was "
                        "not given to RunState: it is in no checkpoint, and starts again after a resume. "
                        "Give it: scheduler=scheduler."
                    )

    def _read_rates(self) -> list[Any]:
        groups = [group for live in self._given for group in getattr(live, "param_groups", ())]
        rates = [group.get("lr") for group in groups]
        # Compare versions: reading the value would wait for a GPU.
        return [(id(rate), rate._version) if isinstance(rate, torch.Tensor) else rate for rate in rates]


def _warn_of(optimizer: Any, what: str) -> None:
    warn(
        f"an optimizer ({type(optimizer).__name__}) trains a model that was given to RunState, and was not "
        f"given itself: {what}. Give it too: optimizer={{...}}, by names of your choice."
    )


def _schedulers(optimizer: Any) -> list[LRScheduler]:
    """Return the schedulers of an optimizer that have made a step."""
    # Without frames: this one would be kept alive by what it is given, and the optimizer with it.
    holders = [one for one in gc.get_referrers(optimizer) if type(one) is not FrameType]
    for attributes in [one for one in holders if type(one) is dict and "optimizer" in one]:
        holders += [one for one in gc.get_referrers(attributes) if type(one) is not FrameType]
    schedulers = [one for one in holders if isinstance(one, LRScheduler) and one.optimizer is optimizer]
    return [one for one in schedulers if one.last_epoch > 0]


def _schedulers_in(given: Collection[Any]) -> list[LRScheduler]:
    """Return the schedulers in what is given, and those in them."""
    # The state of a module has its tensors and modules only.
    found = [live for live in given if not isinstance(live, torch.nn.Module)]
    for live in found:
        inner = [one for one in _attributes(live) if isinstance(one, LRScheduler)]
        found += [one for one in inner if not any(one is other for other in found)]
    return [one for one in found if isinstance(one, LRScheduler)]


def _has_state(optimizer: Any) -> bool:
    states = [one for one in optimizer.state.values() if isinstance(one, dict)]
    return any(isinstance(value, torch.Tensor) for one in states for value in one.values())


def _leads_to(live: Any, optimizer: Any) -> bool:
    """Whether this is what is given, or what it steps by."""
    if live is optimizer or getattr(live, "state", None) is optimizer.state:
        return True
    return any(one is optimizer for one in _attributes(live))


def _attributes(live: Any) -> list[Any]:
    """Return what an object keeps in its attributes, and in lists and dicts there."""
    inner = [*vars(live).values()] if hasattr(live, "__dict__") else []
    inner += [one for value in inner if isinstance(value, (list, tuple)) for one in value]
    inner += [one for value in inner if isinstance(value, dict) for one in value.values()]
    return inner


def _has_changed(before: list[Any], now: list[Any]) -> bool:
    # The state that a first step makes, or a load, is not a change by a step.
    return len(before) == len(now) and not fingerprint.is_same(before, now)


def _states(live: Any) -> Iterator[torch.Tensor]:
    """Yield the small tensors of an optimizer's own, which nothing but its step writes to."""
    states = [*getattr(live, "state", {}).values()]
    for state in states[:1] + states[1:][-1:]:
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, torch.Tensor) and value.is_contiguous() and value.nbytes <= _SMALL:
                yield value
