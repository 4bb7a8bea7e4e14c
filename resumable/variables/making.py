"""Modules, optimizers and schedulers that a loop makes: made again without a call of their constructors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler, swa_utils

from ..objects import kinds, own, slots
from ..objects.kinds import Kind
from .atoms import Hole

if TYPE_CHECKING:
    from .looks import Look
    from .putting import Putting
    from .writing import Entry

_TENSORS = {"_parameters": torch.nn.Parameter, "_buffers": torch.Tensor, "_modules": torch.nn.Module}
_KEPT = {*_TENSORS, "_non_persistent_buffers_set", "training"}
_FRESH = frozenset(vars(torch.nn.Module()))
_STATE = ("defaults", "state", "param_groups")


def _classes(base: type, *modules: Any) -> dict[str, type]:
    found = (one for module in modules for one in vars(module).values())
    return {
        f"{one.__module__}:{one.__qualname__}": one
        for one in found
        if isinstance(one, type) and issubclass(one, base) and not inspect.isabstract(one)
    }


_NETWORKS = _classes(torch.nn.Module, torch.nn, swa_utils)
_OPTIMIZERS = _classes(torch.optim.Optimizer, torch.optim)
_SCHEDULERS = _classes(lr_scheduler.LRScheduler, lr_scheduler, swa_utils)
_OF_TORCH = {**_NETWORKS, **_OPTIMIZERS, **_SCHEDULERS}


def can_be_made(value: Any, kind: Kind) -> bool:
    """Whether an object that a loop has made can be made again."""
    of = type(value)
    name = f"{own.module_of(of)}:{type.__dict__['__qualname__'].__get__(of)}"
    return _OF_TORCH.get(name) is of or (kind == "network" and own.is_own_class(of))


def content(look: Look, value: Any, where: str) -> Entry:
    """Return all of an object as a tree has it."""
    held = slots.attributes(value)
    if hooks := [name for name, one in held.items() if name.endswith("_hooks") and one]:
        raise Hole(f"it has {', '.join(hooks)}")
    if isinstance(value, torch.nn.Module):
        held = {name: one for name, one in held.items() if name not in _FRESH or name in _KEPT}
    elif isinstance(value, torch.optim.Optimizer):
        held = {name: held[name] for name in _STATE}
    return look.pairs(held.items(), None, where, "attribute")


def is_free(live: Any, name: str) -> bool:
    """Whether an attribute is one that the script gives a module."""
    return not isinstance(live, torch.nn.Module) or name == "training" or name not in _FRESH


def made(put: Putting, entry: Entry) -> Any:
    """Return a new object without content, of a class of the script or of torch."""
    of = put.own_class(entry, torch.nn.Module) if "of" in entry else _OF_TORCH.get(entry["class"])
    if of is None or (entry["kind"] == "network") is not issubclass(of, torch.nn.Module):
        raise Hole(f"a {entry['class']} is never made")
    live: Any = object.__new__(of)
    if isinstance(live, torch.nn.Module):
        torch.nn.Module.__init__(live)
    return live


def fill(put: Putting, live: Any, entry: Entry) -> None:
    """Fill an object that was made."""
    values = {name: put.value(stored) for name, stored in entry["set"]}
    if isinstance(live, torch.nn.Module):
        for name, of in _TENSORS.items():
            _check(values.get(name, {}), of)
        if type(values.get("_non_persistent_buffers_set", set())) is not set:
            raise Hole("names of buffers")
        if not own.is_own_class(type(live)):
            _check_plain(one for name, one in values.items() if name not in _KEPT)
        vars(live).update(values)
        if any(one is live for child in live.children() for one in child.modules()):
            live._modules = {}
            raise Hole("a module that holds itself")
        return
    if isinstance(live, torch.optim.Optimizer):
        if values.keys() != {*_STATE} or not isinstance(values["param_groups"], list):
            raise Hole("the state of an optimizer")
        live.__setstate__(values)
        return
    optimizer = values.get("optimizer")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Hole("a scheduler without its optimizer")
    _check_plain(
        one for name, one in values.items() if name not in ("optimizer", "lr_lambdas", "_schedulers")
    )
    vars(live).update(values)
    _let_steps_be_counted(optimizer)


def _let_steps_be_counted(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer tell its schedulers of its steps, as it does once it has had one."""
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        before = [dict(group) for group in optimizer.param_groups]
        lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        for group, then in zip(optimizer.param_groups, before, strict=True):
            group.clear()
            group.update(then)


def _check(held: Any, of: type) -> None:
    is_right = isinstance(held, dict) and all(
        type(name) is str and (one is None or isinstance(one, of)) for name, one in held.items()
    )
    if not is_right:
        raise Hole(f"what is no {of.__name__}")


def _check_plain(values: Iterable[Any]) -> None:
    for one in values:
        if kinds.kind_of(one) not in ("atom", "list", "tuple", "dict", "set", "tensor", "array"):
            raise Hole(f"a {type(one).__name__}")
