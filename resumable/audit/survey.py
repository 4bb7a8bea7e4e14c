"""Finds all that is alive in the script and in no part, with names and fixes."""

from __future__ import annotations

import enum
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..errors import ResumableError
from ..files.strict_json import Json
from ..files.threads import no_garbage_collection
from ..loaders.generators import rng, search
from ..parts.collect import collect
from ..parts.models import ModulePart
from ..parts.part import Part, Trees
from ..parts.parts import Parts
from ..position.loader_position import LoaderPosition
from ..session.observer import Unregistered
from ..trace import digest
from . import containers, fixes, scopes
from .containers import BARE, CONTAINERS, NUMBERS, TEXTS, Inside
from .fixes import Place
from .losses import rank_of
from .registered import TENSORS, Held
from .scopes import FRESH, NOTE, STATE, Scope

_MOST = 10_000
_DEEPEST = 12
_FOREIGN = 6
"""How many objects of libraries may enclose one that is examined."""
_LONGEST = 80
"""The longest text that is kept; of others, only a digest."""

Assign = Callable[[Any], None]


class Seen(NamedTuple):
    """Something alive in the process that is in no part."""

    kind: str
    digest: str
    value: Json
    """The value itself, if it is plain and short."""
    where: str
    """Where it is first assigned, such as "train.py:31"; empty if that is not known."""
    weight: str
    """Whether losing it is an error ("state"), or may not matter to the training ("note")."""
    fix: str


class Item(NamedTuple):
    """An object, or a value, of the script."""

    value: Any
    place: Place
    weight: str = STATE
    where: str = ""
    depth: int = 0
    foreign: int = 0
    """How many objects of libraries enclose it."""
    use: str = ""
    """What the loop does with it, if it is a variable."""
    assign: Assign | None = None
    """Puts another value in its place, if the place is known."""

    def inside(self, value: Any, place: Place, assign: Assign | None = None, **more: Any) -> Item:
        """Return an item inside this one."""
        weight = NOTE if self.weight == NOTE else STATE
        return Item(value, place, **{"weight": weight, **more}, depth=self.depth + 1, assign=assign)


def take(parts: Parts, frame: FrameType | None, trees: Trees | None = None) -> dict[str, Seen]:
    """Return what is alive and in no part, by a name that is the same in every process.

    `frame` is where the script stands; `trees` are what the parts hold, if the caller has them. Nothing is
    changed, and no code of the script is called but the parts' own.
    """
    return look(parts, frame, trees).found


@no_garbage_collection()
@torch.inference_mode(False)
def look(parts: Parts, frame: FrameType | None, trees: Trees | None = None) -> Survey:
    """Examine all that is alive and in no part."""
    if trees is None:
        try:
            trees, _ = collect(parts)
        except ResumableError:  # the next save reports it
            trees = {}
    survey = Survey(parts, Held(parts, trees))
    survey.run(frame)
    return survey


def changed(first: Mapping[str, Seen], now: Mapping[str, Seen]) -> list[Unregistered]:
    """Return what has changed, or is new and carried along, the most serious first."""
    found = [
        Unregistered(name, one.kind, one.where, one.weight, one.fix)
        for name, one in now.items()
        if (first[name].digest != one.digest if name in first else one.weight == STATE)
    ]
    return sorted(found, key=lambda one: (one.weight != STATE, rank_of(one.kind), one.name))


class Survey:
    """One examination of the script."""

    def __init__(self, parts: Parts, held: Held) -> None:
        self._parts = parts.all
        self._held = held
        self._seen: dict[int, Any] = {}
        self.found: dict[str, Seen] = {}
        self.items: dict[str, Item] = {}
        """The objects themselves and their places, by the same names."""
        self._facts: dict[tuple[type, str], tuple[str, str]] = {}
        self._running: set[str] = set()
        self._mixed: set[int] = set()
        """The containers that have objects in them."""
        self._variables: dict[int, str] = {}

    def run(self, frame: FrameType | None) -> None:
        """Examine what the parts have, and the variables."""
        modules, functions = scopes.of_modules(frame), scopes.of_functions(frame)
        outer = [*modules, *(scope for scope in functions if not scope.is_inner)]
        for scope in reversed(outer):
            self._variables |= {id(value): name for name, value in scope.variables.items()}
        self._running = {name for scope in functions for name in scope.variables}
        for part in self._parts:
            self._walk(self._of_part(part))
        # An object with several names keeps the first.
        for group in (outer, [scope for scope in functions if scope.is_inner]):
            self._walk(item for scope in group for item in _of_scope(scope))

    def _walk(self, roots: Iterable[Item]) -> None:
        # Breadth first, since shorter paths make better names.
        waiting, most = deque(roots), len(self._seen) + _MOST
        while waiting and len(self._seen) < most:
            item = waiting.popleft()
            try:
                waiting.extend(self._look(item))
            except Exception:  # an object of the script may raise anything; the others remain
                continue

    def _of_part(self, part: Part) -> list[Item]:
        """Return the objects of a part that may have unsaved state."""
        name = part.name.removeprefix("extra.")
        live = part.live.source.loader if isinstance(part.live, LoaderPosition) else part.live
        code = self._variables.get(id(live), name)
        if isinstance(part, ModulePart):
            inner = dict(part.live.named_modules())
        elif isinstance(part.live, LoaderPosition):
            root = part.live.source.root()
            inner = root if type(root) is dict else {"": root}
        else:
            is_object = part.kind not in ("container", "dataclass", "random", "generator")
            return [Item(live, Place(name, code, part.name))] if is_object else []
        return [Item(one, fixes.of_module(name, code, path, part.name)) for path, one in inner.items()]

    def _look(self, item: Item) -> Iterator[Item]:
        value, kind = item.value, type(item.value)
        if kind in NUMBERS or kind in TEXTS or value is None or np.generic in kind.__mro__:
            self._note_plain(item)
            return
        if id(value) in self._seen or item.depth > _DEEPEST:
            return
        self._seen[id(value)] = value
        if not item.place.part and self._held.has(value):
            return
        yield from self._look_into(item, kind)

    def _look_into(self, item: Item, kind: type) -> Iterator[Item]:
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
                yield item.inside(getattr(value, name), item.place.attribute(name, None))
        elif any(one in kinds for one in (*CONTAINERS, np.ndarray)) and not _is_package(kind):
            yield from self._look_into_container(item)
        elif kind is types.FunctionType or kind is types.MethodType:
            yield from self._look_into_function(item)
        elif type in kinds:
            yield from self._attributes(item) if scopes.is_users_class(value) else ()
        elif DataLoader in kinds:
            there = scopes.attributes(value)
            for name in ("generator", "sampler", "batch_sampler", "dataset"):
                yield item.inside(there.get(name), item.place.attribute(name, value))
        elif enum.Enum in kinds:
            self._note(item, "text", digest.of(value))
        elif not _is_package(kind):
            yield from self._look_into_object(item, kinds)

    def _look_into_object(self, item: Item, kinds: tuple[type, ...]) -> Iterator[Item]:
        value = item.value
        is_users = types.SimpleNamespace in kinds or any(map(scopes.is_users_class, kinds))
        if is_users or item.place.part:
            yield from self._attributes(item)
        elif all(any(name in vars(one) for one in kinds) for name in ("state_dict", "load_state_dict")):
            self._note(item, type(value).__name__, self._inside(value).hexdigest())
        elif item.foreign < _FOREIGN:
            for one in self._attributes(item):
                yield one._replace(foreign=item.foreign + 1)

    def _attributes(self, item: Item) -> Iterator[Item]:
        value = item.value
        owner = value if type in type(value).__mro__ else type(value)
        found = dict(vars(owner)) if owner is value else scopes.attributes(value)
        for name, inner in found.items():
            if name.startswith("__") or name in _OPTIMIZERS_OWN or type(inner) in _MEMBERS:
                continue
            yield self._attribute(item, owner, name, inner)

    def _attribute(self, item: Item, owner: type, name: str, value: Any) -> Item:
        if (owner, name) not in self._facts:
            self._facts[owner, name] = scopes.of_attribute(owner, name)
        weight, where = self._facts[owner, name]
        is_read_again = Dataset in owner.__mro__ and any(one in CONTAINERS for one in type(value).__mro__)
        is_shown = bool(item.place.part) and fixes.is_metric(owner)
        weight = NOTE if item.weight == NOTE or is_read_again or is_shown else weight
        assign = functools.partial(scopes.assign_attribute, item.value, name)
        place = item.place.attribute(name, item.value)
        return item.inside(value, place, assign, weight=weight, where=where or item.where)

    def _look_into_module(self, item: Item) -> Iterator[Item]:
        module, kinds = item.value, type(item.value).__mro__
        if not item.place.part:
            every = dict(containers.tensors_of(module))
            loose = {name: one for name, one in every.items() if not self._held.has_tensor(one)}
            if loose and not any(map(self._held.has, containers.modules_of(module))):
                self._note_module(item, loose)
            for group in ("_parameters", "_buffers", "_modules"):
                for name, inner in dict(module.__dict__.get(group, {})).items():
                    yield item.inside(inner, item.place.attribute(name, module))
        is_metric = fixes.is_metric(type(module))
        saved = module.__dict__.get("_persistent", {}) if is_metric and item.place.part else {}
        for name, inner in scopes.attributes(module).items():
            is_own = name in _MODULES_OWN or saved.get(name) or (is_metric and name.startswith("_"))
            if not is_own:
                yield self._attribute(item, kinds[0], name, inner)

    def _note_module(self, item: Item, tensors: dict[str, Any]) -> None:
        for one in (*containers.modules_of(item.value)[1:], *tensors.values()):
            self._seen[id(one)] = one
        told = [f"{name} {containers.of_tensor(one)}" for name, one in tensors.items()]
        count = fixes.counted(len(tensors), "tensor")
        self._note(item, f"{type(item.value).__name__}, {count}", digest.of(told))

    def _look_into_container(self, item: Item) -> Iterator[Item]:
        value, kind = item.value, type(item.value)
        content = self._inside(value)
        if content.objects:
            self._mixed.add(id(value))
        if content.is_told or not (content.objects or content.has_held):
            tensors = fixes.counted(content.tensors, "tensor") if content.tensors else ""
            name = next((one.__name__ for one in kind.__mro__ if one in CONTAINERS), "array")
            self._note(item, tensors or name, content.hexdigest())
        for path, inner in content.objects:
            yield item.inside(inner, item.place.item(path))

    def _look_into_function(self, item: Item) -> Iterator[Item]:
        function = item.value
        if type(function) is types.MethodType:
            yield item.inside(function.__self__, item.place.attribute("__self__", None))
            return
        if not scopes.is_users_class(function):
            return
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        for name, cell in cells:
            # The variables of running functions are examined with those.
            if name not in self._running:
                assign = functools.partial(setattr, cell, "cell_contents")
                yield item.inside(
                    search.content_of(cell), item.place.attribute(name, None), assign, weight=STATE
                )
        for name, code, inner in _defaults(function):
            if _may_be_state(inner):
                place = item.place.attribute(name, None)
                yield item.inside(inner, place._replace(code=f"{item.place.code}.{code}"))

    def _inside(self, value: object) -> Inside:
        content = Inside(self._held)
        content.add(value, (), 0)
        for one in content.kept:
            self._seen[id(one)] = one
        return content

    def _note_plain(self, item: Item) -> None:
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

    def _note_tensor(self, item: Item) -> None:
        value = item.value
        if type(value) is np.ndarray:
            self._note(item, "array", containers.of_tensor(value))
        elif not self._held.has_tensor(value):
            kind = "parameter" if value.requires_grad and value.is_leaf else "tensor"
            self._note(item, kind, containers.of_tensor(value))

    def _is_saved(self, item: Item, found: str, is_plain: bool) -> bool:
        """Whether the part that it belongs to saves it."""
        if not item.place.part:
            return False
        is_whole = is_plain and id(item.value) not in self._mixed
        values = {found, digest.of(item.value, digest.MOST)} if is_whole else {found}
        return self._held.saves(item.place.part, item.place.leaf, values)

    def _note(self, item: Item, kind: str, found: str, value: Json = None) -> None:
        place, is_plain = item.place, kind in _PLAIN or kind.endswith(("tensor", "tensors"))
        if self._is_saved(item, found, is_plain) or place.name in self.found:
            return
        fix = fixes.fix(place, kind, item.value, self._held, item.use)
        weight = item.weight if is_plain else STATE
        if item.foreign and kind in _GATHERED:
            # What a library collects in its own object is mostly a log.
            weight = NOTE
        self.found[place.name] = Seen(kind, found, value, item.where, weight, fix)
        self.items[place.name] = item


def _of_scope(scope: Scope) -> Iterator[Item]:
    for name, value in scope.variables.items():
        if type(value) in BARE and type(value) is not types.FunctionType:
            continue
        is_defined = scope.code is None and type(value) in _DEFINED
        weight = STATE if is_defined else scope.weight(name)
        if weight != FRESH:
            is_self = name == "self" and scope.code is not None
            shown = type(value).__name__ if is_self else f"{scope.prefix}{name}"
            assign = functools.partial(scope.assign, name)
            yield Item(
                value, Place(shown, name), weight, scope.where(name), use=scope.use(name), assign=assign
            )


_PLAIN = {
    *("number", "text", "none", "array", "parameter", "list", "tuple", "dict", "set", "frozenset", "deque"),
}
_GATHERED = {"list", "tuple", "dict", "set", "frozenset", "deque"}
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


def _is_package(kind: type) -> bool:
    return any(one.__module__.startswith("resumable.") for one in kind.__mro__)


def _may_be_state(value: object) -> bool:
    """Whether an object may have state that is worth examining."""
    return type(value) not in (*NUMBERS, *TEXTS, *BARE, type, type(None), *TENSORS, np.ndarray)


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, str, object]]:
    """Yield the arguments with defaults of a function, each with the code that reads it."""
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
