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

from . import rng
from .errors import UsageError
from .modules import ModulePart
from .optimizers import OptimizerPart
from .part import Difference, Part, Saved, plain, same_device

Tree = dict[str, Any]


class StatefulPart(Part):
    """Anything with `state_dict` and `load_state_dict`: schedulers, scalers, the user's own."""

    def __init__(self, name: str, live: Any, stem: str = "extra") -> None:
        super().__init__(name, live, stem)
        if not name.startswith("extra"):
            self.built = _settings(self._state(), "")

    def _state(self) -> Any:
        state = self.live.state_dict()
        return _without_torch_functions(state) if isinstance(state, dict) else state

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


def _settings(state: Any, prefix: str) -> Tree:
    found: Tree = {}
    for key, value in state.items() if isinstance(state, dict) else ():
        if key == "_schedulers":
            for number, inner in enumerate(value):
                found |= _settings(inner, f"{prefix}_schedulers.{number}.")
        elif not key.startswith("_") and key not in ("last_epoch", "base_lrs"):
            found[prefix + key] = plain(value)
    return found


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

    def collect(self) -> dict[str, Any]:
        """Return the container itself."""
        return {self.stem: self.live}

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Empty it and fill it with what was saved."""
        then = saved.copy(self.stem, same_device)
        self.live.clear()
        if isinstance(self.live, (list, deque)):
            self.live.extend(then)
        else:
            self.live.update(then)


class DataclassPart(Part):
    """A dataclass of plain values, whose fields are set again."""

    kind = "dataclass"

    def collect(self) -> dict[str, Any]:
        """Return the fields, those of dataclasses inside it too."""
        return {self.stem: _fields_out(self.live)}

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Set the fields."""
        _fields_in(self.live, saved.copy(self.stem, same_device))


def _fields_out(live: Any) -> Tree:
    values = {field.name: getattr(live, field.name) for field in dataclasses.fields(live)}
    return {name: _fields_out(v) if _is_dataclass(v) else v for name, v in values.items()}


def _fields_in(live: Any, saved: Tree) -> None:
    for name, value in saved.items():
        if _is_dataclass(inner := getattr(live, name)):
            _fields_in(inner, value)
        else:
            setattr(live, name, value)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def make(name: str, live: Any, stem: str, modules: Sequence[ModulePart]) -> Part:
    """Return the part for a live object; UsageError if nothing could put it back."""
    if isinstance(live, nn.Module):
        return ModulePart(name, live, stem)
    if isinstance(live, torch.optim.Optimizer):
        return OptimizerPart(name, live, stem, modules)
    if isinstance(live, rng.GENERATORS):
        return GeneratorPart(name, live)
    if hasattr(live, "state_dict") and hasattr(live, "load_state_dict"):
        return StatefulPart(name, live)
    if isinstance(live, (dict, list, set, deque)):
        return ContainerPart(name, live)
    if _is_dataclass(live) and not live.__dataclass_params__.frozen:
        return DataclassPart(name, live)
    raise UsageError(
        f"{name} is a {type(live).__name__}, which cannot be put back in place.",
        fix="pass an object with state_dict and load_state_dict, a random generator, a dict or a "
        "dataclass; keep single numbers and strings in state.vars.",
    )
