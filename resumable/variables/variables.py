"""The variables of a training's script: `begin` at a loop's head, `look` at a save, `put_back` at a head."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from ..files.threads import no_garbage_collection
from ..objects import own, walks
from ..objects.contents import mark
from ..objects.walks import Met
from .holds import Hold
from .looks import Look, Namespace
from .owned import Owned
from .putting import Putting
from .script import bytecode, frames

_PACKAGE = __name__.partition(".")[0]
_STARTED = time.time()


class _Base(NamedTuple):
    """A namespace as the loop began."""

    frame: int
    """The identity of the frame, or of the module's variables."""
    marks: Mapping[str, Any]
    met: Mapping[int, Met]
    heads: frozenset[int]
    """Where the loops are, as offsets in the code of the frame."""


class Variables:
    """What the loops of ours change in the variables of the script."""

    def __init__(self, owned: Callable[[], Owned] = Owned) -> None:
        self._owned = owned
        self._bases: dict[str, _Base] = {}
        self._putting: Putting | None = None
        self._hold: Hold | None = None
        self._digests: dict[int, str] = {}
        """Of what the loop leaves alone, by identity."""
        self._restored: set[tuple[str, str]] = set()
        """The variables that were put back once: they are stored even if they change no more."""

    @no_garbage_collection()
    def begin(self, frame: FrameType | None) -> None:
        """Note what the variables are before a loop, if it is not known yet."""
        owned, known = self._owned(), self._known()
        for namespace, identity, heads in self._namespaces(frame):
            base = self._bases.get(namespace.key)
            if base is not None and base.frame == identity:
                self._bases[namespace.key] = base._replace(heads=base.heads | heads)
                continue
            look = Look(owned, {})
            nodes = walks.walk(namespace.roots(), look.is_leaf)
            # One that is known by the address of another that is gone is new.
            new = (one for one in nodes if not ((was := known.get(id(one.value))) and was.is_of(one.value)))
            ours = [one for one in new if not owned.name(one.value)]
            met = walks.met(ours, look.content_of)
            marks = {name: mark(one) for name, one in namespace.variables.items()}
            self._bases[namespace.key] = _Base(identity, marks, met, heads)
            # An object that is new may have the identity of one that is gone.
            self._digests.clear()
            known |= met

    @no_garbage_collection()
    def look(self, frame: FrameType | None) -> dict[str, Any]:
        """Return what has changed since the loop began."""
        look, rows = Look(self._owned(), self._known()), []
        found = [one for one, _, _ in self._namespaces(frame) if one.key in self._bases]
        look.changes(root for one in found for root in one.roots())
        for namespace in found:
            base = self._bases[namespace.key]
            changed = (
                (name, one)
                for name, one in namespace.variables.items()
                if self._is_stored(namespace, base, name, one, look)
            )
            rows.append([namespace.key, look.bound(changed)])
        look.keep_constants(self._digests)
        return {"namespaces": rows, "entries": look.entries, "lost": look.lost}

    def _is_stored(self, namespace: Namespace, base: _Base, name: str, value: Any, look: Look) -> bool:
        if namespace.may_be_read is not None and name not in namespace.may_be_read:
            return False
        if type(value) is float and _STARTED - 1 <= value <= time.time() + 1:
            # A time of this process.
            return False
        is_same = base.marks.get(name, ()) == mark(value) and look.is_known(value)
        return not is_same or (namespace.key, name) in self._restored

    def load(self, tree: Mapping[str, Any]) -> None:
        """Take what a look has stored; the next heads put it back."""
        self._putting = Putting(tree)

    def put_back(self, frame: FrameType | None) -> tuple[list[str], list[str]]:
        """Put back what was loaded; return the variables that were bound, and what cannot be put back."""
        if self._putting is None:
            return [], []
        namespaces, owned = [one for one, _, _ in self._namespaces(frame)], self._owned()
        if self._hold is not None:
            self._hold.put_back(namespaces)
            namespaces = [one for one, _, _ in self._namespaces(frame)]
        names = self._putting.put(namespaces, owned)
        if self._hold is None:
            # As they are now, with what was bound.
            self._hold = Hold([one for one, _, _ in self._namespaces(frame)], owned)
        self._restored |= self._putting.bound
        return names, self._putting.problems

    def handed(self) -> None:
        """A body was handed out: nothing is put back any more."""
        self._putting = self._hold = None

    def _known(self) -> dict[int, Met]:
        return {at: met for base in self._bases.values() for at, met in base.met.items()}

    def _namespaces(self, frame: FrameType | None) -> Iterator[tuple[Namespace, int, frozenset[int]]]:
        """Yield each namespace, with what tells it from another of its name, and where its loop is."""
        stack = frames.own_frames(frame)
        for number, one in enumerate(stack):
            if frames.is_function(one):
                key = f"frame:{number}:{frames.name_of(one)}"
                yield _of_frame(key, one, self._heads(key, one)), id(one), frozenset({one.f_lasti})
        tops = {id(one.f_globals): one for one in stack if not frames.is_function(one)}
        for name, module in _modules(stack):
            key, top = f"module:{name}", tops.get(id(module))
            heads = frozenset({top.f_lasti}) if top else frozenset[int]()
            yield _of_module(key, module, top, self._heads(key, top), stack), id(module), heads

    def _heads(self, key: str, frame: FrameType | None) -> frozenset[int]:
        heads = self._bases[key].heads if key in self._bases else frozenset[int]()
        return heads | ({frame.f_lasti} if frame else set())


def _of_frame(key: str, frame: FrameType, heads: frozenset[int]) -> Namespace:
    code = frame.f_code
    live = bytecode.live_after(code, frame.f_lasti).union(
        *(bytecode.live_before(code).get(at, ()) for at in heads)
    )
    inner = {*code.co_cellvars, *code.co_freevars, *frames.code_names(frame)}
    may_bind = bytecode.assigned_in_loops(code)
    return Namespace(
        key, _kept(frames.variables(frame)), live | inner, may_bind, lambda values: frames.bind(frame, values)
    )


def _of_module(
    key: str, held: dict[str, Any], top: FrameType | None, heads: frozenset[int], stack: list[FrameType]
) -> Namespace:
    codes = {*_codes_in(held), *(one.f_code for one in stack if one.f_globals is held)}
    may_bind = frozenset().union(
        *map(bytecode.assigned_globals, codes), *map(bytecode.assigned_inside, codes)
    )
    live = None
    if top is not None:
        may_bind |= bytecode.assigned_in_loops(top.f_code)
        here = bytecode.live_before(top.f_code)
        live = bytecode.live_after(top.f_code, top.f_lasti).union(*(here.get(at, ()) for at in heads))
        live |= frozenset(frames.code_names(top)).union(*(code.co_names for code in codes - {top.f_code}))
    return Namespace(key, _kept(dict(held)), live, may_bind, held.update)


def _kept(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the variables that are the script's: not Python's, and no object of this package."""
    return {
        name: one
        for name, one in variables.items()
        if not (name.startswith("__") and name.endswith("__"))
        and own.module_of(type(one)).partition(".")[0] != _PACKAGE
    }


def _codes_in(held: Mapping[str, Any]) -> Iterator[CodeType]:
    """Yield the code of the functions of a module, and of those of its classes."""
    for one in [*held.values()]:
        inside = own.namespace(one).values() if type(one) is type and own.is_own_class(one) else (one,)
        for function in map(own.unwrapped, inside):
            if type(function) is FunctionType:
                yield function.__code__


def _modules(stack: list[FrameType]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the modules of the script with their variables, those of the frames first."""
    found: dict[str, dict[str, Any]] = {}
    for frame in stack:
        if not any(one is frame.f_globals for one in found.values()):
            # A script that runs another one by exec() has given it its own name.
            name = str(frame.f_globals.get("__name__", ""))
            found[f"{name}:{len(found)}" if name in found else name] = frame.f_globals
    for name, module in [*sys.modules.items()]:
        if type(module) is ModuleType and own.is_own_module(module) and module.__name__ == name:
            found.setdefault(name, vars(module))
    yield from found.items()
