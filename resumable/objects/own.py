"""Whose code it is: the script's own, or that of Python, of an installed library or of this package."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_INSTALLED = tuple(f"{os.sep}{one}{os.sep}" for one in ("site-packages", "dist-packages"))


def is_own_code(code: CodeType) -> bool:
    """Whether code is the script's own; that of a notebook's cell, of `-c` and of `exec` is."""
    return _is_own_file(code.co_filename)


def is_torchs_or_ours(code: CodeType) -> bool:
    """Whether code is PyTorch's, or this package's."""
    return code.co_filename.startswith(_libraries()[:2])


def is_own_module(module: ModuleType | None) -> bool:
    """Whether a module is the script's own, the script itself among them."""
    if module is None:
        return False
    file = vars(module).get("__file__")
    return module.__name__ == "__main__" if not isinstance(file, str) else _is_own_file(file)


def by_class(function: Callable[[type], T]) -> Callable[[type], T]:
    """Remember what a function says of a class, without keeping the class, or asking for its hash."""
    known: dict[int, tuple[weakref.ref[type], T]] = {}

    @functools.wraps(function)
    def found(of: type) -> T:
        if (entry := known.get(at := id(of))) is None:
            entry = known[at] = weakref.ref(of, lambda _: known.pop(at, None)), function(of)
        return entry[1]

    return found


@by_class
def is_own_class(kind: type) -> bool:
    """Whether the script defines a class: by the module that it names, or by the code of its methods."""
    module = sys.modules.get(module_of(kind))
    if module is not None:
        return is_own_module(module)
    # The module of a script that `runpy` runs is gone when it ends, or never was there.
    held = map(unwrapped, namespace(kind).values())
    return any(is_own_code(one.__code__) for one in held if type(one) is FunctionType)


def module_of(kind: type) -> str:
    """Return the name of the module of a class, whatever its metaclass says."""
    try:
        return str(type.__dict__["__module__"].__get__(kind))
    except AttributeError:
        # What SWIG makes is of none.
        return ""


def namespace(kind: type) -> dict[str, Any]:
    """Return a copy of what a class itself defines, whatever its metaclass says."""
    return dict(type.__dict__["__dict__"].__get__(kind))


def unwrapped(value: Any) -> Any:
    """Return the function in a method, a property, or a static or class method; any other value as it is."""
    if type(value) is property:
        return value.fget
    return value.__func__ if type(value) in (staticmethod, classmethod, MethodType) else value


@functools.lru_cache(4096)
def _is_own_file(file: str) -> bool:
    if file.startswith("<"):
        return not file.startswith(("<frozen", "<__array_function__", "<attrs", "<eval_with_key>"))
    if file.startswith(_libraries()) or any(one in file for one in _INSTALLED):
        # Most files are: to make two thousand paths absolute takes long.
        return False
    return not os.path.abspath(file).startswith(_libraries())


@functools.lru_cache(1)
def _libraries() -> tuple[str, ...]:
    """Return the folders of Python, and of what may be installed from a folder of its own."""
    packages = [os.path.dirname(str(one.__file__)) for one in (torch, np)]
    python = [sysconfig.get_path(one) for one in ("stdlib", "platstdlib")]
    return _PACKAGE, *(os.path.join(one, "") for one in (*packages, *python))
