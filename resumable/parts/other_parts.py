"""The other kinds of objects that a training is made of, and which object is of which kind."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..errors import CannotStore, UsageError
from ..loaders import rng
from .models import ModulePart, refuse_split
from .optimizers import OptimizerPart
from .part import Difference, Part, Saved, kind_of, plain, same_device

Tree = dict[str, Any]


class StatefulPart(Part):
    """Anything with `state_dict` and `load_state_dict`: schedulers, scalers, the user's own."""

    def __init__(self, name: str, live: Any, stem: str = "extra") -> None:
        super().__init__(name, live, stem)
        self.kind = kind_of(live, self.kind)
        self._is_schedule = name.startswith("scheduler") or isinstance(live, LRScheduler)
        if not name.startswith("extra"):
            self.built = settings(self._state(), "")
        if isinstance(live, torch.amp.GradScaler):
            self.built["enabled"] = live.is_enabled()

    def _state(self) -> Any:
        state = self.live.state_dict()
        return _without_torch_functions(state) if self._is_schedule else state

    def is_torchs_own(self) -> bool:
        """Whether it is of a class of torch's."""
        return type(self.live).__module__.startswith("torch.") and "load_state_dict" not in vars(self.live)

    def collect(self) -> dict[str, Any]:
        """Return what its own `state_dict` says."""
        return {self.stem: self._state()}

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Give it to its own `load_state_dict`."""
        state = saved.copy(self.stem, same_device)
        if code_wins:
            _overlay(state, self._state(), code_wins, "")
        # A scaler that is switched off has nothing to say, and one that is on refuses nothing.
        if state or not isinstance(self.live, torch.amp.GradScaler):
            self.live.load_state_dict(state)


def _without_torch_functions(state: Tree) -> Tree:
    # Some schedulers keep a function of torch's own among their state; their constructor sets it again.
    kept: Tree = {}
    for key, value in state.items():
        if callable(value) and (getattr(value, "__module__", None) or "").startswith("torch."):
            continue
        kept[key] = value
        if key == "_schedulers":
            kept[key] = [_without_torch_functions(inner) for inner in value]
    return kept


def settings(state: Any, prefix: str) -> Tree:
    """Return how a schedule or a scaler was made, by its state."""
    found: Tree = {}
    for key, value in state.items() if isinstance(state, dict) else ():
        if key == "_schedulers":
            for number, inner in enumerate(value):
                found |= settings(inner, f"{prefix}_schedulers.{number}.")
        elif key not in _COUNTERS:
            found[prefix + key] = plain(value)
    return found


# What moves by itself, and what follows from the learning rate.
_COUNTERS = {
    *("last_epoch", "_step_count", "_is_initial", "_get_lr_called_within_step", "_growth_tracker"),
    *("base_lrs", "_last_lr"),
}


def _overlay(then: Tree, now: Tree, code_wins: AbstractSet[str], prefix: str) -> None:
    for key in then.keys() & now.keys():
        if key == "_schedulers":
            for number, (before, after) in enumerate(zip(then[key], now[key], strict=False)):
                _overlay(before, after, code_wins, f"{prefix}_schedulers.{number}.")
        elif prefix + key in code_wins or (key == "base_lrs" and key in code_wins):
            then[key] = now[key]


class GeneratorPart(Part):
    """A random generator of the user's own."""

    kind = "generator"

    def collect(self) -> dict[str, Any]:
        """Return its state."""
        return {self.stem: rng.read(self.live)}

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield that it is of another algorithm now."""
        if isinstance(self.live, np.random.Generator):
            then = saved.view(self.stem)["bit_generator"]
            if then != (now := rng.read(self.live)["bit_generator"]):
                yield Difference(self.name, "", f"{then} in the checkpoint, {now} in the code")

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Put it into its saved state."""
        rng.write(self.live, saved.view(self.stem))


class ContainerPart(Part):
    """A dict, list, set or deque of plain values and tensors, filled again in place."""

    kind = "container"
    is_container = True

    def collect(self) -> dict[str, Any]:
        """Return the container itself."""
        return {self.stem: self.live}

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield that it is a container of another kind now."""
        then, now = type(saved.view(self.stem)), type(self.live)
        if then is not now:
            yield Difference(self.name, "", f"{then.__name__} in the checkpoint, {now.__name__} in the code")

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Empty it and fill it with what was saved."""
        content = saved.restoring.into(self)
        if content is not self.live:
            # (it was one with another part, and is not any more)
            saved.restoring.fill(self.live, content)


class DataclassPart(Part):
    """A dataclass of plain values, whose fields are set again."""

    kind = "dataclass"
    is_container = True

    def __init__(self, name: str, live: Any, stem: str = "extra") -> None:
        super().__init__(name, live, stem)
        # One that the training puts into a field later could not be made again: no class is in the file.
        self._nested = set(_nested_in(live, ""))

    def fields(self) -> list[tuple[Any, str, Any]]:
        """Return the fields: the dataclass that has each, its name, and its value."""
        return [(owner, name, getattr(owner, name)) for _, owner, name in self._fields(self.live, "")]

    def collect(self) -> dict[str, Any]:
        """Return the fields by their paths, those of dataclasses inside it too."""
        return {self.stem: {path: getattr(owner, name) for path, owner, name in self._fields(self.live, "")}}

    def _fields(self, owner: Any, prefix: str) -> Iterator[tuple[str, Any, str]]:
        for field in dataclasses.fields(owner):
            path, inner = prefix + field.name, getattr(owner, field.name)
            if path not in self._nested:
                yield path, owner, field.name
            elif _is_dataclass(inner):
                yield from self._fields(inner, f"{path}.")
            else:
                raise CannotStore(
                    f"{self.name}.{path} was a dataclass when RunState was made, and is {inner!r} now.",
                    fix="leave the dataclass where it is and change its fields. Nothing was written.",
                )

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield the fields that are missing or new."""
        then, now = saved.view(self.stem), [path for path, _, _ in self._fields(self.live, "")]
        for path in sorted(then.keys() ^ set(now)):
            yield Difference(self.name, path, f"{'missing' if path in then else 'new'} in the code")

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Set the fields."""
        then = saved.restoring.into(self)
        for path, owner, name in [*self._fields(self.live, "")]:
            if path not in unfit:
                saved.restoring.set(owner, name, then[path])


def _is_settable(live: Any) -> bool:
    if live.__dataclass_params__.frozen:
        return False
    values = [getattr(live, field.name) for field in dataclasses.fields(live)]
    return all(_is_settable(value) for value in values if _is_dataclass(value))


def _nested_in(live: Any, prefix: str) -> Iterator[str]:
    for field in dataclasses.fields(live):
        if _is_dataclass(inner := getattr(live, field.name)):
            yield prefix + field.name
            yield from _nested_in(inner, f"{prefix}{field.name}.")


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def make(name: str, live: Any, stem: str, modules: Sequence[ModulePart]) -> Part:
    """Return the part for a live object; UsageError if nothing could put it back."""
    slot = name.partition(".")[0]
    has_state = hasattr(live, "state_dict") and hasattr(live, "load_state_dict")
    if hasattr(live, "param_groups"):
        # (not every optimizer is one of torch's)
        refuse_split(name, live)
    if slot != "extra" and (not has_state or isinstance(live, nn.Module) is not (slot == "model")):
        raise UsageError(
            f"{name} is a {type(live).__name__}.",
            fix=f"give {slot} one object of its kind or a dict of named ones; all else goes into extra=.",
        )
    if isinstance(live, nn.Module):
        return ModulePart(name, live, stem)
    if isinstance(live, torch.optim.Optimizer):
        return OptimizerPart(name, live, stem, modules)
    if rng.is_generator(live):
        return GeneratorPart(name, live, stem)
    if has_state:
        return StatefulPart(name, live, stem)
    if isinstance(live, (dict, list, set, deque)):
        return ContainerPart(name, live, stem)
    if _is_dataclass(live) and _is_settable(live):
        return DataclassPart(name, live, stem)
    raise UsageError(
        f"{name} is a {type(live).__name__}, which cannot be put back in place.",
        fix="pass an object with state_dict and load_state_dict, a random generator, a dict or a "
        "dataclass; keep single numbers and strings in state.vars.",
    )
