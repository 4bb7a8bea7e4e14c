"""Finds optimizers whose steps no hook sees: in a captured CUDA graph, or not given to RunState."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..files import fingerprint

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


class Others:
    """Finds out if an optimizer that was not given trains what was: the fence does not know it."""

    def __init__(
        self,
        given: Collection[Any],
        parameters: Callable[[], Iterable[torch.Tensor]],
        found: Callable[[], None],
    ) -> None:
        self._given = given
        self._parameters = parameters
        self._found = found
        self._known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        """By optimizer: whether it trains what was given, and was not given itself."""

    def stepped(self, optimizer: Any) -> bool:
        """Return whether an optimizer that has made a step is such a one."""
        if optimizer not in self._known:
            self._known[optimizer] = is_other = self._is_other(optimizer)
            if is_other:
                self._found()
        return self._known[optimizer]

    def _is_other(self, optimizer: Any) -> bool:
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if any(_leads_to(live, optimizer) for live in self._given):
            return False
        return any(id(parameter) in own for parameter in self._parameters())


def _leads_to(live: Any, optimizer: Any) -> bool:
    """Whether this is what is given, or what it steps by."""
    if live is optimizer or getattr(live, "state", None) is optimizer.state:
        return True
    # In its attributes, and in lists and dicts there.
    inner = [*vars(live).values()] if hasattr(live, "__dict__") else []
    inner += [one for value in inner if isinstance(value, (list, tuple)) for one in value]
    inner += [one for value in inner if isinstance(value, dict) for one in value.values()]
    return any(one is optimizer for one in inner)


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
