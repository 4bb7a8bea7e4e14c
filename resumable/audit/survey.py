"""Finds all that the script's variables lead to and no part holds, with names and fixes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from ..files import fingerprint
from ..files.strict_json import Json
from ..files.threads import no_garbage_collection
from ..objects import contents, kinds, walks
from ..objects.kinds import Step
from ..objects.walks import Node
from ..parts.parts import Parts
from ..session.observer import Unregistered
from ..trace import digest
from ..variables import libraries
from ..variables.looks import Look, Namespace
from ..variables.part import ScriptPart
from . import fixes
from .losses import rank_of

_LONGEST = 80
"""The longest text that is kept; of others, only a digest."""
_CONTAINERS = {"list", "tuple", "dict", "set"}
_DATA = {*_CONTAINERS, "array", "tensor", "buffer"}
_WHOLE = {"generator", "count"}
_NO_STATE = ("__", "training")
"""How the names of attributes begin that are no state: loops and parts set the mode of a model."""
_WITH_ATTRIBUTES = {"object", "library", "network", "class", "function"}
"""The kinds of objects with attributes that have values of their own."""


class Seen(NamedTuple):
    """Something alive in the process that is in no part."""

    kind: str
    digest: str
    value: Json
    """The value itself, if it is plain and short."""
    fix: str


@dataclass(slots=True)
class _Item:
    """A variable, an attribute of an object, or objects that belong together."""

    value: Any
    root: Step | None
    """That of a variable."""
    pieces: list[str]
    """What its digest is of."""
    tensors: int = 0


def check(parts: Parts, first: Mapping[str, Seen] | None) -> tuple[Mapping[str, Seen], list[Unregistered]]:
    """Return a first survey, to be given at the next call, and what a resume would lose.

    A script whose variables are part of its checkpoints loses what no checkpoint can have; another one loses
    everything that changes and is in no part.
    """
    if (script := _script_of(parts)) is not None:
        script.collect()
        lost = dict(script.variables.lost)
        return {}, [Unregistered(name, why, fixes.of_lost(why)) for name, why in lost.items()]
    now = take(parts)
    first = now if first is None else first
    changed = [
        Unregistered(name, one.kind, one.fix)
        for name, one in now.items()
        if name not in first or first[name].digest != one.digest
    ]
    return first, sorted(changed, key=lambda one: (rank_of(one.name, one.kind), one.name))


def unstorable(parts: Parts) -> list[tuple[str, str]]:
    """Return what the last save could not store of the script's variables: where it is, and why."""
    script = _script_of(parts)
    return [] if script is None else script.variables.lost


def take(parts: Parts) -> dict[str, Seen]:
    """Return what is alive and in no part, by a name that is the same in every process.

    Nothing is changed, and no code of the script is called but the parts' own.
    """
    return _Survey(parts).found


class _Survey:
    """One examination of the script."""

    @no_garbage_collection()
    @torch.inference_mode(False)
    def __init__(self, parts: Parts) -> None:
        script = _script_of(parts) or ScriptPart()
        script.bind(parts)
        self._owned = owned = script.owned()
        namespaces = script.variables.namespaces(owned)
        self._read = {one.key: one.may_be_read for one in namespaces} if _script_of(parts) else {}
        self._look = Look(owned)
        self._items: dict[str, _Item] = {}
        self._prefixes = _prefixes(namespaces)
        for one in namespaces:
            for name, value in one.variables.items():
                self._add_plain(f"{self._prefixes[one.key]}{name}", value, Step(one.key, name))
        # An object with several names keeps the shortest, and of these the first.
        namespaces.sort(key=lambda one: one.key.startswith(("frame:", "loader:")))
        for node in walks.walk((root for one in namespaces for root in one.roots()), self._look.is_leaf):
            if owned.name(node.value) is None and owned.base(node.value) is None:
                # An object of a library may raise anything; the others remain.
                with contextlib.suppress(Exception):
                    self._add(node)
        self.found = {
            name: self._seen(name, item) for name, item in self._items.items() if not self._is_dead(item.root)
        }

    def _add(self, node: Node) -> None:
        if node.kind in _DATA:
            home = _home(node)
            self._add_piece(home, node, _digest_of(self._look, node))
        elif node.kind in _WHOLE:
            told = contents.of_generator(node.value) if node.kind == "generator" else repr(node.value)
            self._add_piece(node, node, digest.of(told))
        elif libraries.has_state(node.value, node.kind) and self._owned.covered(node.value) is None:
            self._add_piece(node, node, repr(libraries.state_content(node.value).whole))
        elif node.kind in _WITH_ATTRIBUTES and not (node.kind == "library" and self._look.is_leaf(node)):
            covered = self._owned.covered(node.value) or ()
            for step, value in kinds.look_into(node.value).steps():
                if step.name not in covered and not str(step.name).startswith(_NO_STATE):
                    self._add_plain(f"{self._name(node)}{step}", value)

    def _add_piece(self, home: Node, node: Node, told: str) -> None:
        name = self._name(home)
        root = Step(home.how, home.name) if home.owner is None else None
        item = self._items.setdefault(name, _Item(home.value, root, []))
        if item.value is home.value:
            item.tensors += node.kind == "tensor"
            item.pieces.append(f"{str(node)[len(str(home)) :]} {told}")

    def _add_plain(self, name: str, value: Any, root: Step | None = None) -> None:
        if (contents.is_atom(value) and type(value) is not ModuleType) or kinds.kind_of(value) == "enum":
            self._items.setdefault(name, _Item(value, root, [digest.of(_plain(value))]))

    def _name(self, node: Node) -> str:
        return f"{self._prefixes[node.path[0].how]}{node}"

    def _is_dead(self, root: Step | None) -> bool:
        """Whether it is a variable that no checkpoint needs: a resume assigns it before it is read."""
        read = self._read.get(root.how) if root is not None else None
        return root is not None and read is not None and root.name not in read

    def _seen(self, name: str, item: _Item) -> Seen:
        code = name if item.root is None else name.removeprefix(self._prefixes[item.root.how])
        kind, fix = _kind_of(item.value, item.tensors), fixes.of_value(code, item.value)
        return Seen(kind, digest.of(item.pieces), _told(item.value), fix)


def _script_of(parts: Parts) -> ScriptPart | None:
    return next((one for one in parts.all if isinstance(one, ScriptPart)), None)


def _prefixes(namespaces: Iterable[Namespace]) -> dict[str, str]:
    """Return what tells apart the variables of several namespaces: nothing for the script itself."""
    keys = [one.key for one in namespaces]
    script = next((key for key in keys if key.startswith("module:")), "")
    found = dict.fromkeys(keys, "")
    for key in keys:
        what, _, name = key.partition(":")
        last = name.rpartition(":")[2].rpartition(".")[2]
        if what != "loader" and key != script and last.isidentifier():
            found[key] = f"{last}."
    return found


def _home(node: Node) -> Node:
    """Return the outermost object of those that are told as one: nested containers, or a network."""
    while node.kind in _DATA and node.owner is not None and node.owner.kind in _CONTAINERS:
        node = node.owner
    if node.how in ("_parameters", "_buffers"):
        while node.owner is not None and node.owner.kind == "network":
            node = node.owner
    return node


def _digest_of(look: Look, node: Node) -> str:
    """Return a digest of what an object itself has, the same in every process."""
    value = node.value
    if node.kind == "tensor":
        with torch._C.DisableTorchFunctionSubclass():
            return repr(fingerprint.of_tensor(value))
    if node.kind == "buffer":
        return digest.of(bytes(value))
    if node.kind == "array":
        if value.dtype.hasobject:
            return f"{value.shape} {_digest_of_items(fingerprint.flat(value).tolist())}"
        # A file may be far larger than the memory.
        return repr(fingerprint.mapped(value)) if fingerprint.mapped(value) else digest.of(np.asarray(value))
    if node.kind == "list" and look.table(value) is not None:
        return repr(look.content(node).whole)
    if node.kind == "dict":
        return _digest_of_items([one for pair in kinds.items_of(value) for one in pair])
    if node.kind == "set":
        # Their order is another in every process.
        told = (repr(contents.mark(_plain(one))) for one in kinds.items_of(value))
        return digest.of(sorted(told))
    return _digest_of_items(kinds.items_of(value))


def _digest_of_items(held: list[Any]) -> str:
    return contents.digest([*map(_plain, held)]).hex()


def _plain(value: Any) -> Any:
    """Return an atom as it is, and the class of any other object, which is told by itself."""
    if contents.is_atom(value):
        return value
    member = f".{value._name_}" if kinds.kind_of(value) == "enum" else ""
    return type(value).__qualname__ + member


def _told(value: Any) -> Json:
    """Return a short plain value."""
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) is float and not abs(value) < float("inf"):
        return repr(value)
    is_short = type(value) in (bool, int, float) or (type(value) is str and len(value) <= _LONGEST)
    return value if is_short else None


def _kind_of(value: Any, tensors: int) -> str:
    kind = kinds.kind_of(value)
    if kind == "tensor":
        return "parameter" if value.requires_grad and value.is_leaf else "tensor"
    if kind == "generator":
        module = type(value).__module__.partition(".")[0]
        return f"{'numpy.random' if module == 'numpy' else module.lstrip('_')}.{type(value).__name__}"
    if value is None or kind == "atom":
        is_text = isinstance(value, (str, bytes))
        return "none" if value is None else "text" if is_text else "number"
    if tensors:
        count = fixes.counted(tensors, "tensor")
        return f"{type(value).__name__}, {count}" if kind == "network" else count
    return type(value).__name__
