"""What only the garbage collector knows of: found by its kind, and told from others of that kind."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import compress
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler

from ..loaders import rng
from . import script_variables

_Key = tuple[int, str]
_Fact = TypeVar("_Fact")
_STATE = (nn.Module, torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
_OFTEN_A_LIBRARYS = (DataLoader, Sampler, *rng.GENERATORS)
"""Those that have names first: what is inside of one that is found is told under its name."""
_FARTHEST = 4
_WIDEST = 64
"""Of so many the owners are looked for: to ask the garbage collector takes long."""
_BETWEEN = ("builtins", "collections", "functools", "itertools")
"""The modules of what holds things for somebody else."""
_CODE = (types.FunctionType, types.GeneratorType, types.FrameType, types.ModuleType, type)


def find() -> list[Any]:
    """Return what is alive of the kinds that are state, whoever holds it."""
    kinds = [_kinds(base) for base in (*_STATE, *_OFTEN_A_LIBRARYS)]
    wanted = set[type]().union(*kinds)
    objects = gc.get_objects()
    found = [*compress(objects, map(wanted.__contains__, map(type, objects)))]
    return sorted(found, key=lambda one: next(i for i, group in enumerate(kinds) if type(one) in group))


def nobodys(found: list[Any], *, but: Iterable[object]) -> list[Any]:
    """Return those that no library holds for itself; `but` are what of the caller holds them too."""
    doubtful = [one for one in found if any(base in _OFTEN_A_LIBRARYS for base in type(one).__mro__)]
    new = [one for one in doubtful if _known(_owned, _key(one)) is None]
    new, beyond = new[:_WIDEST], {id(one) for one in new[_WIDEST:]}
    if new:
        librarys = _librarys(new, {id(one) for one in (found, doubtful, new, *but)})
        for one in new:
            _owned[_key(one)] = _reference(one), id(one) in librarys
    others = {id(one) for one in doubtful if id(one) in beyond or _known(_owned, _key(one))}
    return [one for one in found if id(one) not in others]


def _librarys(candidates: list[Any], known: set[int]) -> set[int]:
    """Return the identities of those that a library holds, directly or in what only holds things."""
    # (all at once: each question takes a look at everything that is alive)
    whose = {id(one): {id(one)} for one in candidates}
    found, waiting = _of_modules(candidates), candidates
    for _ in range(_FARTHEST):
        waiting = [one for one in waiting if not whose[id(one)] <= found]
        known.add(id(waiting))
        referrers = [one for one in gc.get_referrers(*waiting) if id(one) not in known] if waiting else []
        known |= {id(referrers), *map(id, referrers)}
        there = {id(one) for one in waiting}
        waiting = []
        for holder in referrers:
            held = set[int]().union(*(whose[id(one)] for one in gc.get_referents(holder) if id(one) in there))
            if _is_of_a_library(holder):
                found |= held
            elif _is_between(holder):
                whose[id(holder)] = held
                waiting.append(holder)
    return found


def _of_modules(candidates: list[Any]) -> set[int]:
    ids = {id(one) for one in candidates}
    modules = [vars(one) for one in [*sys.modules.values()] if type(one) is types.ModuleType]
    return {
        id(value)
        for module in modules
        if _is_of_a_library(module)
        for value in [*module.values()]
        if id(value) in ids
    }


def _is_of_a_library(holder: Any) -> bool:
    kind = type(holder)
    if kind is types.FunctionType:
        return not script_variables.is_users(holder.__code__.co_filename)
    if kind is types.GeneratorType:
        return not script_variables.is_users(holder.gi_code.co_filename)
    if _is_of_a_module(holder) and holder["__name__"] != "__main__":
        return not script_variables.is_users(str(holder.get("__file__") or sys.executable))
    if type in kind.__mro__:
        return not script_variables.is_users_class(holder)
    # (a Scope has the user's variables, while they are looked at)
    is_nobodys = kind.__module__ in _BETWEEN or kind is script_variables.Scope
    return not is_nobodys and not script_variables.users_classes(kind)


def _is_between(holder: Any) -> bool:
    kind = type(holder)
    return kind.__module__ in _BETWEEN and kind not in _CODE and not _is_of_a_module(holder)


def _is_of_a_module(holder: Any) -> bool:
    return type(holder) is dict and "__name__" in holder and "__spec__" in holder


def number_of(value: Any) -> int:
    """Return a number that no other object of its class has had in this process."""
    key = _key(value)
    number = _known(_numbers, key)
    if number is None:
        kind = type(value).__name__
        number = _counts[kind] = _counts.get(kind, 0) + 1
        _numbers[key] = _reference(value), number
    return number


def _known(facts: Mapping[_Key, tuple[Callable[[], object], _Fact]], key: _Key) -> _Fact | None:
    reference, fact = facts.get(key, (None, None))
    return fact if reference is not None and reference() is not None else None


def _key(value: Any) -> _Key:
    # (nothing can refer to NumPy's without keeping them alive: another in their place has another seed)
    bits = value.bit_generator if type(value) is np.random.Generator else None
    return id(value), repr(getattr(bits, "seed_seq", getattr(bits, "_seed_seq", "")))


def _reference(value: Any) -> Callable[[], object]:
    try:
        return weakref.ref(value)
    except TypeError:
        return bool


_numbers: dict[_Key, tuple[Callable[[], object], int]] = {}
_counts: dict[str, int] = {}
_owned: dict[_Key, tuple[Callable[[], object], bool]] = {}


def _kinds(base: Any) -> set[type]:
    found, waiting = {base}, [base]
    while waiting:
        for one in type.__subclasses__(waiting.pop()):
            if one not in found:
                found.add(one)
                waiting.append(one)
    return found
