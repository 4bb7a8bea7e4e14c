"""The script's variables as a part of the training."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from ..objects import own, slots, walks
from ..objects.kinds import Step
from ..parts.optimizers import OptimizerPart
from ..parts.other_parts import GeneratorPart, StatefulPart
from ..parts.part import Difference, Part, Saved, same_device
from ..parts.parts import Parts
from ..position.batch_loop import Loop
from . import checking, libraries, passes
from .choice import ALL, Choice, is_named, wins
from .owned import Owned
from .variables import Variables

_GROUPS = ("param_groups", "state", "defaults")
_INSIDE = ("object", "library")
_DATA = {*_INSIDE, "list", "dict", "set", "buffer", "array", "tensor", "generator"}


class ScriptPart(Part):
    """What the loops have changed in the variables of the script."""

    kind = "script"
    is_last = True

    def __init__(self, choice: Choice = ALL) -> None:
        super().__init__("script", None, "rank")
        self.choice = choice
        self._parts: Parts | None = None
        self._shared: Sequence[Sequence[str]] = ()
        """The tensors of optimizers that were one, by their names, in the checkpoint."""
        self._last: dict[str, Any] | None = None
        """What the next look finds, where nothing of the script runs before the body ends."""
        self._is_still = False
        self._loaded: dict[str, Any] | None = None
        """What a checkpoint had of them, until a body is handed out."""
        self.variables = Variables(self.owned, choice)

    def bind(self, parts: Parts) -> None:
        """Know what the other parts restore."""
        self._parts = parts

    def owned(self) -> Owned:
        """Return what the other parts restore."""
        if self._parts is None:
            return Owned()
        streams = self._parts.position.streams
        generators = streams.read() if any(map(_may_draw, self._parts.all)) else None
        try:
            loaders = self._parts.position.loaders
            behind = {name: passes.behind(name, at.source.loader) for name, at in loaders.items()}
            others = [one for _, some in behind.values() for one in some]
            changed = {name: some for name, (some, _) in behind.items()}
            return Owned([*_owned_by(self._parts), *others], _covered_by(self._parts), changed)
        finally:
            if generators is not None:
                streams.write(generators)

    def collect(self) -> dict[str, Any]:
        """Return what has changed since the loop began."""
        if self._parts and self._parts.position.streams.is_holding() and self._loaded is not None:
            # The next head puts that back, whatever the lines before it change.
            return {self.stem: self._loaded}
        self._loaded = None
        if self._last is not None:
            return self._last
        more = {"shared": [*self._found_shared()], "overridden": [*self.choice.override]}
        found = {self.stem: self.variables.look(self._loops()) | more}
        self._last = found if self._is_still else None
        return found

    def forget_loaded(self) -> None:
        """Know that a body begins."""
        self._loaded = None

    def expect(self, *, is_still: bool) -> None:
        """Know whether the script does nothing from now on until the body ends."""
        self._is_still, self._last = is_still, None

    def _loops(self) -> dict[str, Loop]:
        """Return the loops over batches that are in their middle, by their loaders."""
        if self._parts is None or not self._parts.position.is_mid_epoch():
            return {}
        loops = {name: at.open_loop() for name, at in self._parts.position.loaders.items()}
        return {name: one for name, one in loops.items() if isinstance(one, Loop)}

    def _states(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        optimizers = self._parts.optimizers if self._parts else ()
        for part in optimizers:
            for name, parameter in part.parameters().items():
                state = part.live.state.get(parameter, {})
                yield from (
                    (f"{part.name}.state[{name}][{key!r}]", state, key)
                    for key, one in state.items()
                    if isinstance(one, torch.Tensor)
                )

    def _found_shared(self) -> Iterator[list[str]]:
        first: dict[int, str] = {}
        for name, state, key in self._states():
            if (other := first.setdefault(id(state[key]), name)) != name:
                yield [other, name]

    def share(self) -> None:
        """Let optimizers share the tensors that they shared as the checkpoint was made."""
        if not self._shared:
            return
        there = {name: (state, key) for name, state, key in self._states()}
        for first, second in self._shared:
            if first in there and second in there:
                (state, key), (other, name) = there[first], there[second]
                facts = [(one.shape, one.dtype, one.device) for one in (state[key], other[name])]
                if facts[0] == facts[1]:
                    other[name] = state[key]

    def outgrown(self) -> Iterator[str]:
        """Yield what the last look could not store."""
        if lost := [one for one in self.variables.lost if not self.accepts(one[0])]:
            rows = "".join(f"\n  {where}: {why}" for where, why in lost)
            yield f"the loop changes variables of the script that no checkpoint can have [R11]:{rows}"

    def accepts(self, path: str) -> bool:
        """Whether `allow=` names what may not come back."""
        return is_named(path, self.choice.allow)

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield that it is not what a look stores."""
        try:
            checking.check(saved.view(self.stem))
        except ValueError as exc:
            yield Difference(self.name, "", str(exc))

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Let the next heads of the loops put the variables back."""
        tree = saved.copy(self.stem, same_device)
        tree = self._loaded = {**self.choice.without(tree, wins(tree, code_wins))}
        self._shared = tree.get("shared", ())
        self.variables.load(tree)


def _may_draw(part: Part) -> bool:
    """Whether asking a part for its state may move random generators: a `state_dict` of the script's may."""
    return isinstance(part, StatefulPart) and not own.module_of(type(part.live)).startswith("torch.")


def _owned_by(parts: Parts) -> Iterator[tuple[str, Any]]:
    """Yield the objects that other parts restore, with their names."""
    for part in parts.all:
        yield from ((f"{part.name}.{name}", one) for name, one in part.tensors().items())
        if isinstance(part, OptimizerPart):
            yield from _inside_of(part)
        elif isinstance(part, StatefulPart) or part.is_container:
            root = part.live if part.is_container else part.collect()[part.stem]
            for node in walks.walk([(Step("", part.name), root)], lambda one: one.kind in _INSIDE):
                if node.kind in _DATA:
                    yield str(node), node.value
        elif isinstance(part, GeneratorPart):
            yield part.name, part.live
        if isinstance(part, StatefulPart) and own.is_own_class(type(part.live)):
            # It says what the state of a simulator is that it leads to.
            ways = walks.walk([(Step("", part.name), part.live)], lambda one: one.kind not in _INSIDE)
            yield from ((str(node), node.value) for node in ways if libraries.is_compiled(node.value))


def _covered_by(parts: Parts) -> Iterator[tuple[Any, Collection[str]]]:
    """Yield the parts that may have more attributes than they save, each with those that they save."""
    for part in parts.all:
        if isinstance(part, (OptimizerPart, StatefulPart)):
            saved = _GROUPS if isinstance(part, OptimizerPart) else part.collect()[part.stem]
            # A scheduler counts the steps of its optimizer by a method that it puts there.
            known = {name for name in slots.attributes(part.live) if name.startswith("_")} | {"step"}
            yield part.live, known.union(saved if isinstance(saved, (dict, tuple)) else ())


def _inside_of(part: OptimizerPart) -> Iterator[tuple[str, Any]]:
    optimizer = part.live
    yield from ((f"{part.name}.{name}", getattr(optimizer, name)) for name in _GROUPS)
    for number, group in enumerate(optimizer.param_groups):
        yield f"{part.name}.param_groups[{number}]", group
        yield f"{part.name}.param_groups[{number}]['params']", group["params"]
    for name, parameter in part.parameters().items():
        state = optimizer.state.get(parameter, {})
        yield f"{part.name}.state[{name}]", state
        yield from ((f"{part.name}.state[{name}][{key!r}]", one) for key, one in state.items())
