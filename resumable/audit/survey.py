"""A look at all that is alive in the script and that no part holds, each with its name and its remedy."""

from __future__ import annotations

import enum
import functools
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import ResumableError
from ..files.strict_json import Json
from ..files.threads import no_garbage_collection
from ..loaders import rng
from ..parts.capture import Capture, Trees
from ..parts.models import ModulePart
from ..parts.part import Part
from ..position.loader_position import LoaderPosition
from ..trace import digest
from . import containers, fixes, iterables, script_variables, unreachable
from .containers import BARE, CONTAINERS, NUMBERS, TEXTS, Inside
from .fixes import Place
from .registered import TENSORS, Held
from .script_variables import Scope
from .source import meters, uses
from .source.uses import NOBODY_KNOWS, Fact, Use
from .unregistered import Seen

_MOST = 10_000
_DEEPEST = 12
_SHALLOW = 3
"""How deep objects of other classes than the user's are looked into, for what is state whoever holds it."""
_LONGEST = 80
"""Texts of more letters are not told, only that they have changed."""


@no_garbage_collection()
@torch.inference_mode(False)
def take(capture: Capture, frame: FrameType | None, trees: Trees | None = None) -> dict[str, Seen]:
    """Return what is alive and held by no part, by a name that is the same in every process.

    `frame` is where the script stands; `trees` are what the parts hold, if the caller has them. Nothing is
    changed, and no code of the script is called but the parts' own.
    """
    if trees is None:
        try:
            trees, _ = capture.collect()
        except ResumableError:  # the next save says it better
            trees = {}
    return _Survey(capture, Held(capture, trees)).run(frame)


class _Item(NamedTuple):
    """Something to look at."""

    value: Any
    place: Place
    use: Use
    where: str = ""
    depth: int = 0
    shallow: int = 0
    """How many objects of other classes than the user's are around it."""

    def inside(self, value: Any, place: Place, use: Use | None = None, where: str = "") -> _Item:
        """Return something that it has."""
        if self.use is Use.RESET:
            use = Use.RESET
        return _Item(value, place, use or self.use, where or self.where, self.depth + 1, self.shallow)


class _Survey:
    """One look at everything."""

    def __init__(self, capture: Capture, held: Held) -> None:
        self._parts = capture.all_parts()
        self._held = held
        self._seen: dict[int, Any] = {}
        self._found: dict[str, Seen] = {}
        self._scripts: dict[str, uses.Script] = {}
        self._facts: dict[tuple[type, str], tuple[Fact, str]] = {}
        self._is_users: dict[type, bool] = {}
        self._running: set[str] = set()
        self._named: dict[int, str] = {}
        """By the identity of a container: the name under which it was found."""
        self._mixed: set[int] = set()
        """The containers that have objects in them."""
        self._variables: dict[int, str] = {}
        self._summed: set[int] = set()
        """The metrics whose sums are told."""

    def run(self, frame: FrameType | None) -> dict[str, Seen]:
        """Look at what the parts have, at the variables, and at what else there is."""
        modules, functions = script_variables.of_modules(frame), script_variables.of_functions(frame)
        outer = [*modules, *(scope for scope in functions if not scope.is_inner)]
        for scope in reversed(outer):
            self._variables |= {id(value): name for name, value in scope.variables.items()}
        self._running = {name for scope in functions for name in scope.variables}
        for scope in (*modules, *functions):
            if script := uses.script(scope.filename):
                self._scripts.setdefault(scope.filename, script)
        for part in self._parts:
            self._walk(self._of_part(part))
        # Those that were called in a loop come last: what has a name elsewhere too keeps that one.
        for group in (outer, [scope for scope in functions if scope.is_inner]):
            self._walk(item for scope in group for item in self._of_scope(scope))
        self._walk(self._nameless())
        return self._found

    def _walk(self, roots: Iterable[_Item]) -> None:
        # Breadth first: what is near has the better name.
        waiting, most = deque(roots), len(self._seen) + _MOST
        while waiting and len(self._seen) < most:
            item = waiting.popleft()
            try:
                waiting.extend(self._look(item))
            except Exception:  # (somebody's object may do anything; the others are still there)
                continue

    def _of_scope(self, scope: Scope) -> Iterator[_Item]:
        for name, value in scope.variables.items():
            if type(value) in BARE and type(value) is not types.FunctionType:
                continue
            if scope.is_inner and name in scope.arguments and type(value) in (*NUMBERS, *TEXTS):
                # (each call gives it another one)
                continue
            is_made_once = not scope.line and type(value) in _DEFINED
            fact = Fact(Use.KEPT, 0) if is_made_once else scope.fact(name)
            if fact.use is not Use.FRESH:
                is_self = name == "self" and scope.function is not None
                shown = type(value).__name__ if is_self else f"{scope.prefix}{name}"
                place = Place(shown, name)
                yield _Item(value, place, fact.use, scope.where(fact.line))

    def _of_part(self, part: Part) -> list[_Item]:
        """Return what an object that is given may have besides what is saved of it."""
        name = part.name.removeprefix("extra.")
        if isinstance(part, ModulePart):
            return [
                _Item(module, fixes.of_module(name, self._code(part, name), path, part.name), Use.KEPT)
                for path, module in part.live.named_modules()
            ]
        if isinstance(part.live, LoaderPosition):
            root = part.live.source.root()
            there = root if type(root) is dict else {"": root}
            return [
                _Item(value, fixes.of_module(name, self._code(part, name), key, part.name), Use.KEPT)
                for key, value in there.items()
            ]
        is_object = part.kind not in ("container", "dataclass", "random", "generator")
        place = Place(name, self._code(part, name), part.name)
        return [_Item(part.live, place, Use.KEPT)] if is_object else []

    def _code(self, part: Part, otherwise: str) -> str:
        """Return the variable in which the script has the object that it has given."""
        live = part.live.source.loader if isinstance(part.live, LoaderPosition) else part.live
        return self._variables.get(id(live), otherwise)

    def _look(self, item: _Item) -> Iterator[_Item]:
        value, kind = item.value, type(item.value)
        if kind in NUMBERS or kind in TEXTS or value is None or np.generic in kind.__mro__:
            self._note_plain(item)
            return
        if id(value) in self._seen or item.depth > _DEEPEST:
            self._note_again(item)
            return
        self._seen[id(value)] = value
        if not item.place.part and self._held.has(value):
            return
        yield from self._look_into(item, kind)

    def _note_again(self, item: _Item) -> None:
        """Take what a variable tells of something that was found elsewhere: that it is carried on."""
        name = self._named.get(id(item.value), "")
        if item.use is Use.CARRIED and not item.place.part and name:
            seen = self._found[name]
            fix = fixes.fix(item.place, seen.kind, item.value, Use.KEPT, self._held)
            self._found[name] = seen._replace(weight="state", fix=fix)

    def _look_into(self, item: _Item, kind: type) -> Iterator[_Item]:
        value, kinds = item.value, kind.__mro__
        if kind in TENSORS or (kind is np.ndarray and not containers.is_of_objects(value)):
            self._note_tensor(item)
        elif any(one in kinds for one in rng.GENERATORS) and rng.is_generator(value):
            if not self._held.has(value):
                self._note(item, _kind_of_generator(value), digest.of(rng.read(value)))
        elif nn.Module in kinds:
            yield from self._look_into_module(item)
        elif kind is functools.partial:
            for name in ("func", "args", "keywords"):
                yield item.inside(getattr(value, name), item.place.attribute(name, None), Use.KEPT)
        elif any(one in kinds for one in (*CONTAINERS, np.ndarray)) and not self._is_package(kind):
            yield from self._look_into_container(item)
        elif kind is types.FunctionType or kind is types.MethodType:
            yield from self._look_into_function(item)
        elif type in kinds:
            yield from self._attributes(item) if script_variables.is_users_class(value) else ()
        elif DataLoader in kinds:
            there = script_variables.attributes(value)
            for name in ("generator", "sampler", "batch_sampler", "dataset"):
                yield item.inside(there.get(name), item.place.attribute(name, value), Use.KEPT)
        elif enum.Enum in kinds:
            self._note(item, "text", digest.of(value))
        elif not self._is_package(kind):
            yield from self._look_into_object(item, kinds)

    def _look_into_object(self, item: _Item, kinds: tuple[type, ...]) -> Iterator[_Item]:
        value = item.value
        if (standing := iterables.standing(value)) is not None:
            self._note(item, "iterator", standing)
        elif self._users(type(value)) or Sampler in kinds:
            # (a script may well set the weights of one of torch's)
            yield from self._attributes(item)
        elif item.place.part:
            return
        elif _is_stateful(kinds):
            self._note(item, type(value).__name__, self._inside(value).hexdigest())
        elif item.shallow < _SHALLOW:
            for name, inner in script_variables.attributes(value).items():
                if _may_be_state(inner):
                    deeper = item.inside(inner, item.place.attribute(name, value))
                    yield deeper._replace(shallow=item.shallow + 1)

    def _users(self, kind: type) -> bool:
        if kind not in self._is_users:
            has_names = kind is types.SimpleNamespace or kind.__qualname__ == "Namespace"
            self._is_users[kind] = has_names or bool(script_variables.users_classes(kind))
        return self._is_users[kind]

    def _is_package(self, kind: type) -> bool:
        own = "resumable."
        return any(one.__module__.startswith(own) for one in kind.__mro__)

    def _attributes(self, item: _Item) -> Iterator[_Item]:
        value = item.value
        owner = value if type in type(value).__mro__ else type(value)
        found = dict(vars(owner)) if owner is value else script_variables.attributes(value)
        for name, inner in found.items():
            if name.startswith("__") or name in _OPTIMIZERS_OWN or type(inner) in _MEMBERS:
                continue
            fact, where = self._fact(owner, name)
            place = item.place.attribute(name, value)
            if fact.use is Use.FRESH:
                continue
            yield item.inside(inner, place, fact.use, where)

    def _fact(self, owner: type, name: str) -> tuple[Fact, str]:
        """Return what is done with an attribute, and where it is made."""
        if (owner, name) not in self._facts:
            kinds = script_variables.users_classes(owner)
            scripts = {**dict(script_variables.scripts_of(kinds)), **self._scripts}
            known = [one.__name__ for one in kinds]
            found = [
                (fact, script_variables.place(filename, fact.line))
                for filename, script in scripts.items()
                if (fact := script.attribute(name, known))
            ]
            found.sort(key=lambda one: _PRECEDENCE.index(one[0].use))
            self._facts[owner, name] = found[0] if found else (NOBODY_KNOWS, "")
        return self._facts[owner, name]

    def _look_into_module(self, item: _Item) -> Iterator[_Item]:
        module, kinds = item.value, type(item.value).__mro__
        if metrics := [one for one in meters.of(module) if id(one) not in self._summed]:
            self._note_metrics(item, metrics)
        if not item.place.part:
            every = dict(containers.tensors_of(module))
            loose = {name: one for name, one in every.items() if not self._held.has_tensor(one)}
            if (
                loose
                and not meters.of(module)
                and not any(map(self._held.has, containers.modules_of(module)))
            ):
                self._note_module(item, loose)
                return
            for group in ("_parameters", "_buffers", "_modules"):
                for name, inner in dict(module.__dict__.get(group, {})).items():
                    yield item.inside(inner, item.place.attribute(name, module), Use.KEPT)
        is_users = self._users(type(module))
        for name, inner in script_variables.attributes(module).items():
            if name in _MODULES_OWN or (not is_users and type(inner) not in NUMBERS):
                continue
            if meters.is_metric(kinds) and meters.is_own(module, name, is_given=bool(item.place.part)):
                continue
            fact, where = self._fact(kinds[0], name)
            if fact.use is not Use.FRESH:
                yield item.inside(inner, item.place.attribute(name, module), fact.use, where)

    def _note_metrics(self, item: _Item, metrics: list[Any]) -> None:
        sums = meters.lost(metrics, is_given=bool(item.place.part))
        # (those of a collection are looked at again, for what is inside of them)
        self._summed |= set(map(id, metrics))
        if sums and item.place.name not in self._found:
            weight = "state" if meters.decides(item.place.leaf, self._scripts) else "note"
            fix = fixes.of_metric(item.place)
            told = digest.of(sums, digest.MOST)
            self._found[item.place.name] = Seen(
                type(item.value).__name__, told, None, item.where, weight, fix
            )

    def _note_module(self, item: _Item, tensors: dict[str, Any]) -> None:
        for one in containers.modules_of(item.value):
            self._seen[id(one)] = one
        told = [f"{name} {containers.of_tensor(one)}" for name, one in tensors.items()]
        count = fixes.counted(len(tensors), "tensor")
        self._note(item, f"{type(item.value).__name__}, {count}", digest.of(told))

    def _look_into_container(self, item: _Item) -> Iterator[_Item]:
        value, kind = item.value, type(item.value)
        content = self._inside(value)
        if content.objects:
            self._mixed.add(id(value))
        if content.is_told or not (content.objects or content.has_held):
            tensors = fixes.counted(content.tensors, "tensor") if content.tensors else ""
            name = next((one.__name__ for one in kind.__mro__ if one in CONTAINERS), "array")
            self._note(item, tensors or name, content.hexdigest())
            if item.place.name in self._found:
                self._named[id(value)] = item.place.name
        for path, inner in content.objects:
            yield item.inside(inner, item.place.item(path), Use.KEPT)

    def _look_into_function(self, item: _Item) -> Iterator[_Item]:
        function = item.value
        if type(function) is types.MethodType:
            yield item.inside(function.__self__, item.place.attribute("__self__", None), Use.KEPT)
            return
        if not script_variables.is_users(function.__code__.co_filename):
            return
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        for name, cell in cells:
            if name in self._running:
                # (a variable of a function that is running, which is looked at there)
                continue
            yield item.inside(
                containers.content_of(cell), item.place.attribute(name, None), self._of_cell(function, name)
            )
        for name, code, inner in _defaults(function):
            if _may_be_state(inner):
                place = item.place.attribute(name, None)
                yield item.inside(inner, place._replace(code=f"{item.place.code}.{code}"), Use.KEPT)

    def _of_cell(self, function: types.FunctionType, name: str) -> Use:
        code = function.__code__
        script = uses.script(code.co_filename)
        return script.of_cell(name, code.co_name, code.co_firstlineno) if script else Use.UNKNOWN

    def _inside(self, value: object) -> Inside:
        content = Inside(self._held)
        content.add(value, (), 0)
        for one in content.kept:
            self._seen[id(one)] = one
        return content

    def _nameless(self) -> list[_Item]:
        """Return what only the garbage collector knows of the kinds that are state whoever holds them."""
        everything = unreachable.find()
        modules = [one for one in everything if nn.Module in type(one).__mro__]
        inner_ones = {
            id(inner) for one in modules for inner in containers.modules_of(one) if inner is not one
        }
        unseen = [
            one
            for one in everything
            if id(one) not in self._seen and id(one) not in inner_ones and not self._held.has(one)
        ]
        return [
            _Item(one, fixes.nameless(type(one).__name__, unreachable.number_of(one)), Use.KEPT)
            for one in unreachable.nobodys(unseen, but=(everything, self._seen))
        ]

    def _note_plain(self, item: _Item) -> None:
        value, kind = item.value, type(item.value)
        if kind in TEXTS:
            told = value if kind is str and len(value) <= _LONGEST else None
            self._note(item, "text", digest.of(value), told)
        elif value is None:
            self._note(item, "none", digest.of(value))
        else:
            plain = value.item() if np.generic in kind.__mro__ else value
            is_told = type(plain) in (bool, int) or (type(plain) is float and abs(plain) < float("inf"))
            self._note(item, "number", digest.of(value), plain if is_told else repr(plain))

    def _note_tensor(self, item: _Item) -> None:
        value = item.value
        if type(value) is np.ndarray:
            self._note(item, "array", containers.of_tensor(value))
        elif not self._held.has_tensor(value):
            kind = "parameter" if value.requires_grad and value.is_leaf else "tensor"
            self._note(item, kind, containers.of_tensor(value))

    def _is_saved(self, item: _Item, found: str, is_plain: bool) -> bool:
        """Whether the part that it hangs off saves it, or the script itself by what RunState saves."""
        parts = [item.place.part] if item.place.part else []
        if item.use is Use.RESTORED:
            parts = ["vars", "position"]
        is_whole = is_plain and id(item.value) not in self._mixed
        values = {found, digest.of(item.value, digest.MOST)} if parts and is_whole else {found}
        name = "" if item.use is Use.RESTORED else item.place.leaf
        return any(self._held.saves(part, name, values) for part in parts)

    def _note(self, item: _Item, kind: str, found: str, value: Json = None) -> None:
        place, is_plain = item.place, kind in _PLAIN or kind.endswith(("tensor", "tensors"))
        if self._is_saved(item, found, is_plain):
            return
        if item.use is Use.FRESH or place.name in self._found:
            return
        fix = fixes.fix(place, kind, item.value, item.use, self._held)
        weight = "state" if _is_state(item, kind, is_plain) else "note"
        if _is_epoch_of(type(place.owner), place.leaf):
            weight = "set"
        self._found[place.name] = Seen(kind, found, value, item.where, weight, fix)


_PLAIN = {
    "number",
    "text",
    "none",
    "array",
    "parameter",
    "list",
    "tuple",
    "dict",
    "set",
    "frozenset",
    "deque",
}
_GATHERED = {"list", "tuple", "dict", "set", "frozenset", "deque"}
_PRECEDENCE = [Use.RESTORED, Use.RESET, Use.CARRIED, Use.SET, Use.KEPT, Use.SHOWN, Use.FRESH, Use.UNKNOWN]
_MODULES_OWN = {*vars(nn.Module())} | {
    "_compiled_call_impl",
    "_forward_hooks_always_called",
    "_is_hf_initialized",
}
_OPTIMIZERS_OWN = {
    "param_groups",
    "state",
    "defaults",
    "_zero_grad_profile_name",
    "_warned_capturable_if_run_uncaptured",
}
_DEFINED = (types.FunctionType, type)
_MEMBERS = (property, staticmethod, classmethod, types.GetSetDescriptorType, types.MemberDescriptorType)


def _is_state(item: _Item, kind: str, is_plain: bool) -> bool:
    """Whether to lose it is a defect."""
    if not is_plain:
        return True
    if item.shallow and kind in _GATHERED:
        # (what a library gathers in an object of its own is mostly a log)
        return False
    owner = type(item.place.owner).__mro__
    if (
        Dataset in owner
        and item.use is not Use.CARRIED
        and any(one in CONTAINERS for one in type(item.value).__mro__)
    ):
        # (what it has read already: it can read that again)
        return False
    return item.use in (Use.CARRIED, Use.COUNTED, Use.KEPT)


def _is_epoch_of(owner: type, name: str) -> bool:
    # The script sets it in every epoch; whether it does so in time only a second run can tell.
    return name.lstrip("_") == "epoch" and any("set_epoch" in vars(one) for one in owner.__mro__)


def _is_stateful(kinds: tuple[type, ...]) -> bool:
    return all(any(name in vars(one) for one in kinds) for name in ("state_dict", "load_state_dict"))


def _may_be_state(value: object) -> bool:
    """Whether an object of any class may have state that is worth a look."""
    return type(value) not in (*NUMBERS, *TEXTS, *BARE, type, type(None), *TENSORS, np.ndarray)


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, str, object]]:
    """Yield the arguments of a function that have a value, with the code for it."""
    values, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        yield name, f"__defaults__[{place}]", value
    for name, value in (function.__kwdefaults__ or {}).items():
        yield name, f'__kwdefaults__["{name}"]', value


def _kind_of_generator(value: rng.Generator) -> str:
    kind = next(one for one in rng.GENERATORS if isinstance(value, one))
    module = {np.random.Generator: "numpy.random", np.random.RandomState: "numpy.random"}.get(kind)
    return f"{module or ('random' if kind is random.Random else 'torch')}.{kind.__name__}"
