"""The variables of the script: of its functions that are running, of its modules, and behind loaders."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from operator import attrgetter
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from ..objects import own
from ..objects.contents import ATOMS
from .looks import Namespace
from .owned import Loaders
from .script import bytecode, frames

_PACKAGE = __name__.partition(".")[0]
_code = attrgetter("f_code")


class Running(NamedTuple):
    """A namespace of a frame that is running, or of a module."""

    namespace: Namespace
    identity: int
    """That of the frame, or of the module's variables."""
    head: int | None
    """Where the frame is, as an offset in its code."""
    code: CodeType | None
    number: int | None = None
    """How many frames of the script are around it."""


def running(
    stack: list[FrameType],
    waiting: Mapping[str, FrameType],
    heads_in: Callable[[str], frozenset[int]],
    loaders: Loaders,
) -> Iterator[Running]:
    """Yield each namespace of the running frames, of generators that wait, and of the modules.

    `heads_in`: returns where the loops of a namespace are, by its key.
    """
    tops = {id(one.f_globals): one for one in stack if not frames.is_function(one)}
    held = [(f"module:{name}", module) for name, module in modules(stack)]
    functions = [(key_of(one, n), one, n) for n, one in enumerate(stack) if frames.is_function(one)]
    for key, one, number in (*functions, *((key, one, None) for key, one in waiting.items())):
        namespace = _of_frame(key, one, _live(one, heads_in(key)))
        yield Running(namespace, id(one), one.f_lasti, one.f_code, number)
    for key, module in held:
        top = tops.get(id(module))
        live_at_top = _live(top, heads_in(key)) if top else None
        of_module = _of_module(key, module, top, live_at_top, stack)
        yield Running(of_module, id(module), top and top.f_lasti, None)
    for loader, objects in loaders.items():
        yield Running(of_objects(f"loader:{loader}", objects), 0, None, None)


def key_of(frame: FrameType, number: int) -> str:
    """Return the key of a function that is running."""
    return f"frame:{number}:{frames.name_of(frame.f_code)}"


def _live(frame: FrameType, heads: frozenset[int]) -> frozenset[str]:
    """Return the variables that a resume may read: it goes on at a head, or where one was called."""
    here = bytecode.live_before(frame.f_code)
    return frozenset[str]().union(*(here.get(at, ()) for at in heads))


def _of_frame(key: str, frame: FrameType, live: frozenset[str]) -> Namespace:
    code = frame.f_code
    inner = {*code.co_cellvars, *code.co_freevars, *frames.code_names(frame)}
    may_bind = bytecode.assigned_in_loops(code)
    kept = _kept(frames.variables(frame))
    return Namespace(key, kept, live | inner, may_bind, lambda values: frames.bind(frame, values))


def _of_module(
    key: str,
    held: dict[str, Any],
    top: FrameType | None,
    live: frozenset[str] | None,
    stack: list[FrameType],
) -> Namespace:
    codes = [*codes_in(held), *(one.f_code for one in stack if one.f_globals is held)]
    may_bind = frozenset[str]().union(*map(bytecode.may_bind, codes))
    if top is not None:
        may_bind |= bytecode.assigned_in_loops(top.f_code)
        live = (live or frozenset()) | frozenset(frames.code_names(top)).union(
            *(code.co_names for code in codes if code is not top.f_code)
        )
    is_cell, places = (
        top is not None and "__file__" not in held,
        partial(_places, codes, [*map(_code, stack)]),
    )
    return Namespace(key, _kept(dict(held)), live, may_bind, held.update, is_cell, places)


def _places(codes: list[CodeType], running: list[CodeType]) -> frozenset[str]:
    """Return where the code of a module stores: that of functions that run the loop in their loops only."""
    in_loops = {*map(id, running)}
    others = (bytecode.places(one) for one in codes if id(one) not in in_loops)
    return frozenset[str]().union(*others, *map(bytecode.places_in_loops, running))


def places(namespaces: Iterable[Namespace]) -> Callable[[], frozenset[str]]:
    """Return what reads, when it is asked first, where the code of all namespaces stores."""
    each = [one.places for one in namespaces]
    return cache(lambda: frozenset[str]().union(*(one() for one in each)))


def of_objects(key: str, objects: Mapping[str, Any]) -> Namespace:
    """Return objects that are found by themselves, and never bound to a name."""
    return Namespace(key, dict(objects), frozenset(), frozenset(), lambda values: None)


def _kept(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the variables that are the script's: not Python's, and no object of this package."""
    return {
        name: one
        for name, one in variables.items()
        if not (name[:2] == "__" == name[-2:]) and (type(one) in ATOMS or not _is_packages(one))
    }


def _is_packages(value: Any) -> bool:
    """Whether a value is this package's, or a list of such, as `check()` returns it."""
    if type(value) is list and value:
        return type(value[0]) is not list and _is_packages(value[0])
    return _is_packages_class(type(value))


@own.by_class
def _is_packages_class(of: type) -> bool:
    return own.module_of(of).partition(".")[0] == _PACKAGE


def functions(stack: list[FrameType]) -> set[str]:
    """Return the names of all functions of the script, as the keys of their frames have them."""
    waiting, found = [code for _, held in modules(stack) for code in codes_in(held)], set[str]()
    waiting += map(_code, stack)
    while waiting:
        code = waiting.pop()
        found.add(frames.name_of(code))
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
    return found


def codes_in(held: Mapping[str, Any]) -> Iterator[CodeType]:
    """Yield the code of the functions of a module, and of those of its classes."""
    for one in [*held.values()]:
        if type(one) is FunctionType:
            yield one.__code__
        elif isinstance(one, type) and own.is_own_class(one):
            yield from _codes_of(one)


@own.by_class
def _codes_of(of: type) -> list[CodeType]:
    methods = map(own.unwrapped, own.namespace(of).values())
    return [one.__code__ for one in methods if type(one) is FunctionType]


def modules(stack: list[FrameType]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the modules of the script with their variables, those of the frames first."""
    found: dict[str, dict[str, Any]] = {}
    for frame in stack:
        if not any(one is frame.f_globals for one in found.values()):
            # A script that runs another one by exec() has given it its own name.
            name = str(frame.f_globals.get("__name__", ""))
            found[f"{name}:{len(found)}" if name in found else name] = frame.f_globals
    for name in _own_modules(len(sys.modules), next(reversed(sys.modules))):
        if (module := sys.modules.get(name)) is not None:
            found.setdefault(name, vars(module))
    yield from found.items()


@lru_cache(1)
def _own_modules(count: int, last: str) -> list[str]:
    """Return the names of the script's modules, as long as no other is imported."""
    found, installed = list[str](), set[str]()
    for name, module in [*sys.modules.items()]:
        package = name.partition(".")[0]
        if package in installed or type(module) is not ModuleType:
            continue
        if not own.is_own_module(module):
            is_installed = name == package and "__file__" in vars(module)
            installed |= {package} if is_installed else set()
        elif module.__name__ == name:
            found.append(name)
    return found
