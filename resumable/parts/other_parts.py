"""The other kinds of parts: anything with a state_dict, generators, containers, the position in the data."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..errors import CannotStore, UsageError
from ..files.strict_json import Json
from ..loaders import loader_changes
from ..loaders.generators import rng, sharded_rng
from ..loaders.loader_source import LoaderSource
from ..loaders.workers import memory
from ..position.loader_position import LoaderPosition
from .models import ModulePart
from .optimizers import OptimizerPart
from .part import Difference, Part, Saved, kind_of, plain, same_device
from .sharded import refuse_split
from .slots import refuse_others

Tree = dict[str, Any]


class StatefulPart(Part):
    """Anything with `state_dict` and `load_state_dict`: schedulers, scalers, the user's own."""

    def __init__(self, name: str, live: Any, stem: str = "extra", rank: int | None = None) -> None:
        super().__init__(name, live, stem, rank)
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
        """Whether its class is torch's."""
        return type(self.live).__module__.startswith("torch.") and "load_state_dict" not in vars(self.live)

    def collect(self) -> dict[str, Any]:
        """Return its own `state_dict`."""
        return {self.stem: self._state()}

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Pass the state to its own `load_state_dict`."""
        state = saved.copy(self.stem, same_device)
        if code_wins:
            _overlay(state, self._state(), code_wins, "")
        # A scaler that is off has no state, and a scaler that is on rejects an empty one.
        if state or not isinstance(self.live, torch.amp.GradScaler):
            self.live.load_state_dict(state)


def _without_torch_functions(state: Tree) -> Tree:
    # Some schedulers keep a function of torch in their state; their constructor sets it again.
    kept: Tree = {}
    for key, value in state.items():
        if callable(value) and (getattr(value, "__module__", None) or "").startswith("torch."):
            continue
        kept[key] = value
        if key == "_schedulers":
            kept[key] = [_without_torch_functions(inner) for inner in value]
    return kept


def settings(state: Any, prefix: str) -> Tree:
    """Return the settings of a scheduler or a scaler, from its state."""
    found: Tree = {}
    for key, value in state.items() if isinstance(state, dict) else ():
        if key == "_schedulers":
            for number, inner in enumerate(value):
                found |= settings(inner, f"{prefix}_schedulers.{number}.")
        elif key not in _COUNTERS:
            found[prefix + key] = value
    return plain(found)


# Counters, and values that follow from the learning rate.
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
    """A random generator that the script passed."""

    kind = "generator"

    def collect(self) -> dict[str, Any]:
        """Return its state."""
        return {self.stem: rng.read(self.live)}

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield that its algorithm has changed."""
        if isinstance(self.live, np.random.Generator):
            then = saved.view(self.stem)["bit_generator"]
            if then != (now := rng.read(self.live)["bit_generator"]):
                yield Difference(self.name, "", f"{then} in the checkpoint, {now} in the code")

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Restore its state."""
        rng.write(self.live, saved.view(self.stem))


class ContainerPart(Part):
    """A dict, list, set or deque of plain values and tensors, restored in place."""

    kind = "container"
    is_container = True

    def collect(self) -> dict[str, Any]:
        """Return the container itself."""
        return {self.stem: self.live}

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield that its type has changed."""
        then, now = type(saved.view(self.stem)), type(self.live)
        if then is not now:
            yield Difference(self.name, "", f"{then.__name__} in the checkpoint, {now.__name__} in the code")

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Replace its content."""
        content = saved.restoring.into(self)
        if content is not self.live:
            # It was the same object as another part, and no longer is.
            saved.restoring.fill(self.live, content)


class DataclassPart(Part):
    """A dataclass of plain values, whose fields are assigned."""

    kind = "dataclass"
    is_container = True

    def __init__(self, name: str, live: Any, stem: str = "extra", rank: int | None = None) -> None:
        super().__init__(name, live, stem, rank)
        # A dataclass that the training assigns later could not be made again: the file names no classes.
        self._nested = set(_nested_in(live, ""))

    def fields(self) -> list[tuple[Any, str, Any]]:
        """Return the fields: for each, the dataclass that has it, its name and its value."""
        return [(owner, name, getattr(owner, name)) for _, owner, name in self._fields(self.live, "")]

    def collect(self) -> dict[str, Any]:
        """Return the fields by their paths, including those of nested dataclasses."""
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


class RandomPart(Part):
    """The global random generators."""

    kind = "random"
    is_last = True

    def __init__(self, name: str, mesh: Callable[[], Any]) -> None:
        """`mesh` returns the mesh of a sharded tensor of the training, or None."""
        super().__init__(name, None, "rank")
        self._mesh = mesh

    def collect(self) -> dict[str, Any]:
        """Return their states."""
        return {self.stem: rng.collect()}

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Restore their states, on the devices that this process uses."""
        states = rng.moved(saved.view(self.stem), saved.moved(self.stem))
        if "sharded" in states and (mesh := self._mesh()) is not None:
            sharded_rng.make(mesh)
        rng.restore(states)


class PositionPart(Part):
    """The counters, and the position in the data."""

    kind = "position"
    is_last = True

    def collect(self) -> dict[str, Any]:
        """Return what its `collect` returns."""
        return {self.stem: self.live.collect()}

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Restore it, with the states of generators on the devices that this process uses."""
        state = saved.copy(self.stem, same_device)
        for states in (state.get("body_start"), *state.get("loop_ends", ())):
            if states:
                states["global"] = rng.moved(states["global"], saved.moved(self.stem))
        self.live.restore(state, unfit)

    def resized(self, saved: Saved, then: int, now: int) -> Iterator[Difference]:
        """Yield the iterables in mid-epoch, which each process loops over by itself."""
        for name, at in saved.view(self.stem).get("iterables", {}).items():
            if at["batch"]:
                text = f"in mid-epoch, looped over by each of {then} processes for itself, and {now} now"
                yield Difference(self.name, name, text)


class LoaderPart(PositionPart):
    """The position in one loader."""

    def __init__(self, name: str, live: LoaderPosition, is_saved: Callable[[Any], bool]) -> None:
        """`is_saved`: whether an object is saved with the training."""
        super().__init__(name, live, "rank")
        self.built = live.source.settings()
        self._is_saved = is_saved

    def collect(self) -> dict[str, Any]:
        """Return the position; a collection has read the generators before, since other parts may draw."""
        return {self.stem: self.live.collect(is_searched=True)}

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Restore the position."""
        self.live.restore(saved.copy(self.stem, same_device), unfit)

    def effects(self, saved: Saved) -> dict[str, tuple[str, str]]:
        """Return the effect of each changed setting on the order of the data, and a note."""
        try:
            effects: dict[str, tuple[str, str]] = self.live.source.effects(saved.view(self.stem)["source"])
            return effects
        except KeyError:
            return {}

    def resized(self, saved: Saved, then: int, now: int) -> Iterator[Difference]:
        """Yield why the rest of the epoch cannot be resharded."""
        for text in loader_changes.resized(self.live.source, saved.view(self.stem), then, now):
            yield Difference(self.name, "", text)

    def differences(self, saved: Saved, built: Mapping[str, Json]) -> Iterator[Difference]:
        """Yield the changes that make the saved position meaningless."""
        at = saved.view(self.stem)
        for name, text in loader_changes.differences(self.live.source, at):
            # A dataset that grew in the training may reach that length again before the loop begins.
            is_grown = name == "dataset_length" and built.get(name) == self.live.source.settings().get(name)
            is_checked = bool(at["source"].get("lengths"))
            yield Difference(self.name, name, text, is_open=is_grown and is_checked)

    def outgrown(self) -> Iterator[str]:
        """Yield how its data has changed since the script passed it."""
        source, is_under_way = self.live.source, self.live.is_under_way()
        if isinstance(source, LoaderSource):
            text = source.outgrown(self._is_saved, is_under_way=is_under_way)
            yield from [f"{self.name}: {text}"] if text else []
            yield from (memory.warning(self.name, one) for one in sorted(source.kept_by_workers))


def make(name: str, live: Any, stem: str, modules: Sequence[ModulePart], rank: int | None = None) -> Part:
    """Return the part for a live object; UsageError if nothing could restore it."""
    has_state = hasattr(live, "state_dict") and hasattr(live, "load_state_dict")
    if hasattr(live, "param_groups"):
        # Not only torch's optimizers can be sharded.
        refuse_split(name, live)
    refuse_others(name, live)
    if isinstance(live, nn.Module):
        return ModulePart(name, live, stem, rank)
    if isinstance(live, torch.optim.Optimizer):
        return OptimizerPart(name, live, stem, modules, rank)
    if rng.is_generator(live):
        return GeneratorPart(name, live, stem, rank)
    if has_state:
        return StatefulPart(name, live, stem, rank)
    if isinstance(live, (dict, list, set, deque)):
        return ContainerPart(name, live, stem, rank)
    if _is_dataclass(live) and _is_settable(live):
        return DataclassPart(name, live, stem, rank)
    raise UsageError(
        f"{name} is a {type(live).__name__}, which cannot be put back in place.",
        fix="pass an object with state_dict and load_state_dict, a random generator, a dict or a "
        "dataclass; keep single numbers and strings in state.vars.",
    )
