"""Finds the names that functions and classes use: some generators are reachable only by name."""

from __future__ import annotations

import dis
import random
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FunctionType, GeneratorType, ModuleType
from typing import Any, TypeGuard

import numpy as np
import torch

Generator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)

# Their code is never searched: they draw from generators that they are given, or from global ones.
_LIBRARIES = {"numpy", "resumable", "torch", "torchaudio", "torchdata", "torchvision"}
PLAIN = (str, bytes, int, float, complex, type(None))
_CV2_DRAWS = {"randn", "randu", "randShuffle"}

Scope = tuple[str, Mapping[str, Any], tuple[str, ...]]
"""A module's name, its variables, and the names of them that code may use."""


def behind(groups: Iterable[Iterable[object]]) -> list[list[tuple[str, object]]]:
    """Return for each group what functions' code names, or objects' classes have, each as `module:name`.

    In the user's own code all names count, in installed modules only those of generators. A value in a module
    has the same name on every path to it, because paths come and go with objects that are made late.
    """
    found = []
    for group in groups:
        own: list[tuple[str, object]] = []
        for value in group:
            if isinstance(value, (FunctionType, GeneratorType)):
                for module, variables, names in scopes(value):
                    own += _picked(module, variables, names)
            elif isinstance(value, type):
                own += _of_class(value)
            elif not is_known(_module(type(value))):
                own.append((_place(type(value), ""), type(value)))
        found.append(own)
    return found


def scopes(value: FunctionType | GeneratorType[Any, Any, Any]) -> Iterator[Scope]:
    """Yield the variables that a function's code may use: of its own module, and of modules that it names."""
    if isinstance(value, FunctionType):
        code, variables = value.__code__, value.__globals__
    elif value.gi_frame is not None:
        code, variables = value.gi_code, value.gi_frame.f_globals
    else:
        return
    module = _name(variables)
    if is_known(module):
        return
    names = _names(code)
    if not is_own(module):
        names = tuple(name for name in names if name in _constants(module))
    yield module, variables, names
    seen = {id(variables)}
    waiting = _modules(variables, names)
    # Modules that are imported only in the function's body count too.
    waiting += _modules(sys.modules, tuple(name for name in names if name not in variables))
    while waiting:
        inside = vars(waiting.pop())
        module = _name(inside)
        if id(inside) not in seen and not is_known(module):
            seen.add(id(inside))
            yield module, inside, names
            waiting += _modules(inside, names) if is_own(module) else []


def _modules(variables: Mapping[str, Any], names: tuple[str, ...]) -> list[ModuleType]:
    return [one for name in names if isinstance(one := variables.get(name), ModuleType)]


def imports(code: CodeType) -> Iterator[str]:
    """Yield the modules that code imports as it runs."""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            yield str(step.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from imports(inner)


def cv2_draws(function: FunctionType) -> set[str]:
    """Return the functions of OpenCV's that a function draws with; none if it seeds OpenCV itself."""
    names, variables = set(_names(function.__code__)), function.__globals__
    drawing = {name for name in names & _CV2_DRAWS if _is_of_cv2(variables.get(name))}
    steps = [*dis.get_instructions(function.__code__)]
    for owner, attribute in pairwise(steps):
        if attribute.argval in _CV2_DRAWS and (owner.argval == "cv2" or _is_cv2(variables.get(owner.argval))):
            drawing.add(str(attribute.argval))
    return set() if "setRNGSeed" in names else drawing


def _is_of_cv2(value: object) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] == "cv2"


def _is_cv2(value: object) -> bool:
    return isinstance(value, ModuleType) and value.__name__ == "cv2"


def _of_class(kind: type) -> Iterator[tuple[str, object]]:
    module = _module(kind)
    if is_known(module):
        return
    place, is_users = _place(kind, ""), is_own(module)
    has_code = is_users or bool(_constants(module))
    for name, value in list(vars(kind).items()):
        one = _unwrapped(value)
        leads_on = is_users and not name.startswith("__") and _may_lead_on(one)
        if is_generator(one) or (has_code if isinstance(one, FunctionType) else leads_on):
            yield f"{place}.{name}", one
    for above in kind.__bases__:
        if not is_known(_module(above)):
            yield _place(above, ""), above


def _unwrapped(value: object) -> object:
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _picked(
    module: str, variables: Mapping[str, Any], names: tuple[str, ...]
) -> Iterator[tuple[str, object]]:
    is_users = is_own(module)
    for name in names:
        value = variables.get(name)
        if value is None:
            continue
        if is_generator(value):
            yield f"{module}:{name}", value
        elif is_users and _may_lead_on(value):
            is_code = isinstance(value, (FunctionType, type))
            yield _place(value, f"{module}:{name}") if is_code else f"{module}:{name}", value


def is_generator(value: object) -> TypeGuard[Generator]:
    """Whether the value is a random generator with a state; the operating system's has none."""
    # isinstance() takes ten times as long for torch.Generator.
    return issubclass(type(value), GENERATORS) and not issubclass(type(value), random.SystemRandom)


def _may_lead_on(value: object) -> bool:
    # The script's objects that this library holds are saved in other ways.
    return not isinstance(value, (*PLAIN, ModuleType)) and not _is_ours(type(value))


def _is_ours(kind: type) -> bool:
    return _module(kind).partition(".")[0] == "resumable"


def _place(value: Any, otherwise: str) -> str:
    """Return the path of a class or a function, if a name in its module leads there."""
    module, name = _module(value), str(value.__qualname__)
    return otherwise if otherwise and "<" in name else f"{module}:{name}"


def is_own(module: str) -> bool:
    """Whether a module is the user's: not Python's, and not installed, unless it is the program itself."""
    return _is_own(module, getattr(sys.modules.get(module), "__file__", None))


@cache
def _is_installed(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


@cache
def _is_own(module: str, file: str | None) -> bool:
    if is_known(module):
        return False
    return not _is_installed(file or "") or module.partition(".")[0] in {"__main__", *_packages_run()}


def is_known(module: str) -> bool:
    """Whether a module is Python's, or of a library that has no generators of its own in modules."""
    package = module.partition(".")[0]
    return package in _LIBRARIES or (
        package in sys.stdlib_module_names
        and _is_pythons(getattr(sys.modules.get(package), "__file__", None))
    )


@cache
def _is_pythons(file: str | None) -> bool:
    """Whether the file is one of Python's own: a script may have a package of the same name."""
    return file is None or any(
        Path(file).is_relative_to(sysconfig.get_path(one)) for one in ("stdlib", "platstdlib")
    )


@cache
def _packages_run() -> set[str]:
    """Return the package of `python -m package.train`, or of the function that an installed command runs."""
    main = sys.modules.get("__main__")
    found = {str(getattr(main, "__package__", None) or "")}
    if Path(getattr(main, "__file__", None) or "").parent == Path(sys.executable).parent:
        found |= {one.__module__ for one in [*vars(main).values()] if isinstance(one, FunctionType)}
    return {name.partition(".")[0] for name in found}


@cache
def _constants(module: str) -> frozenset[str]:
    """Return the names of the generators that an installed module has, as it was when first asked for."""
    variables = vars(sys.modules[module]) if module in sys.modules else {}
    return frozenset(name for name, value in [*variables.items()] if isinstance(value, GENERATORS))


@lru_cache(maxsize=16_384)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names that code uses, and those of the code within it."""
    inner = (name for one in code.co_consts if isinstance(one, CodeType) for name in _names(one))
    return tuple(dict.fromkeys([*code.co_names, *inner]))


# A worker that is not forked has the script under another name.
_PUBLIC = {"__mp_main__": "__main__"}


def _module(value: Any) -> str:
    # A class may have any value there, even one that cannot be hashed.
    module = str(value.__module__)
    return _PUBLIC.get(module, module)


def _name(variables: Mapping[str, Any]) -> str:
    name = str(variables.get("__name__"))
    return _PUBLIC.get(name, name)
