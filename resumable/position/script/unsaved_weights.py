"""Finds what changes in models as they train, and copies of their weights, that no checkpoint has."""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from functools import cache
from itertools import islice
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from ...loaders.generators import code_names
from . import bytecode, loop_variables, script_frames
from .bytecode import Name

_DEEPEST = 3
_MOST = 1_000
_WIDEST = 256
_SAMPLED = 8
_TOP = __name__.partition(".")[0]
_CLOSED = (
    DataLoader,
    Dataset,
    Optimizer,
    torch.Tensor,
    type,
    ModuleType,
    FunctionType,
    *loop_variables.PLAIN,
)
"""Kinds whose attributes are not looked at."""


class UnsavedWeights:
    """Looks at models and the variables of the script, at saves whose number is a power of two.

    `given` returns the objects that a checkpoint has.
    """

    def __init__(self, given: Callable[[], Collection[Any]]) -> None:
        self._given = given
        self._saves = 0
        self._attributes, self._copies = _Changes(), _Changes()

    def begin(self) -> None:
        """Look at the copies around the first batch or body, which the first save is compared with."""
        self._copies.since(_copies(self._given()))

    def changed(self) -> tuple[list[Name], list[Name]]:
        """Return attributes of models, and holders of weights, that have changed for the first time."""
        self._saves += 1
        if self._saves & (self._saves - 1):
            return [], []
        given = self._given()
        return self._attributes.since(_attributes(given)), self._copies.since(_copies(given))


class _Changes:
    """Tells what has changed since the last look, each name once."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, Name], Any] = {}
        self._named: set[Name] = set()

    def since(self, now: dict[tuple[int, Name], Any]) -> list[Name]:
        """Return the names whose values differ from those of the last look, and keep the new ones."""
        changed = {key[1] for key, value in now.items() if self._seen.get(key, value) != value}
        self._seen = now
        new = sorted(changed - self._named)
        self._named |= changed
        return new


def _attributes(given: Collection[Any]) -> dict[tuple[int, Name], Any]:
    """Return the attributes of models that training carries along, and that are in no state_dict."""
    saved = {id(one) for one in given}
    in_loops = {*_changed_by_loops()}
    found: dict[tuple[int, Name], Any] = {}
    for module in _modules(given):
        own: dict[str, Any] = vars(module)
        kind: type = type(module)
        if kind.get_extra_state is not nn.Module.get_extra_state:
            continue
        read, carried = _of_methods(kind)
        names = carried | {name for name in read if type(own.get(name)) is torch.Tensor}
        names |= {name for owner, name in in_loops if owner == id(module)}
        for name in names & own.keys():
            if id(own[name]) not in saved:
                parts = loop_variables.glance(f"{kind.__name__}.{name}", own[name])
                found |= {(id(module), part): value for part, value in parts.items()}
    return found


@cache
def _of_methods(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """Return the attributes that methods of a class read before they assign them, and those of both."""
    all_read: set[str] = set()
    carried: set[str] = set()
    for owner in kind.__mro__:
        methods = vars(owner).items() if code_names.is_own(str(owner.__module__)) else ()
        for name, method in methods:
            if isinstance(method, FunctionType) and name != "__init__":
                read, stored = bytecode.of_method(method.__code__)
                all_read |= read
                carried |= read & stored
    return _of_self(all_read), _of_self(carried)


def _of_self(names: Collection[Name]) -> frozenset[str]:
    return frozenset(name.removeprefix("self.") for name in names if name.startswith("self."))


def _changed_by_loops() -> Iterator[tuple[int, str]]:
    """Yield each attribute that the script's loops carry along: its owner, by id, and its name."""
    for frame, variables, carried in _loops():
        for name in carried.used & carried.stored:
            root, dot, attribute = name.partition(".")
            if dot:
                yield id(variables.get(root, frame.f_globals.get(root))), attribute


def _copies(given: Collection[Any]) -> dict[tuple[int, Name], Any]:
    """Return the tensors of each other module, and of each copy of a model's weights, that a script has."""
    modules = _modules(given)
    saved = {id(one) for one in [*given, *modules, *(held for one in given for held in _held(one))]}
    in_models = {_memory(tensor) for module in modules for tensor in _tensors(module)}
    models = [Counter(one.shape for one in model.parameters()) for model in _models(given)]
    found: dict[tuple[int, Name], Any] = {}
    for name, holder in _holders(saved):
        tensors = [one for one in _tensors(holder) if id(one) not in saved and _memory(one) not in in_models]
        shapes = Counter(one.shape for one in tensors)
        if isinstance(holder, nn.Module) or any(model and model <= shapes for model in models):
            found[0, name] = [_glance(one) for one in tensors[:_SAMPLED]]
    return found


def _holders(saved: Collection[int]) -> Iterator[tuple[Name, Any]]:
    """Yield the modules and containers that hang off the script's variables, but for what is saved."""
    waiting = deque((name, value, 0) for name, value in _variables())
    seen = {*saved}
    while waiting and len(seen) < len(saved) + _MOST:
        name, value, depth = waiting.popleft()
        if id(value) in seen or isinstance(value, _CLOSED):
            continue
        seen.add(id(value))
        if isinstance(value, (nn.Module, dict, list, tuple)):
            yield name, value
        if depth < _DEEPEST and not isinstance(value, nn.Module):
            held = [*islice(_named(name, value), _WIDEST)]
            waiting.extend((inner, one, depth + 1) for inner, one in held)


def _variables() -> Iterator[tuple[Name, Any]]:
    """Yield the variables of the script that its loops do not assign in each body."""
    for frame, variables, carried in _loops():
        for name, value in {**frame.f_globals, **variables}.items():
            is_ours = type(value).__module__.partition(".")[0] == _TOP
            if name not in carried.replaced and not name.startswith("__") and not is_ours:
                yield name, value


def _loops() -> Iterator[tuple[FrameType, dict[str, Any], bytecode.Carried]]:
    for frame in script_frames.of_script(sys._getframe()):
        variables = loop_variables.variables_of(frame)
        states = loop_variables.states_in(variables, frame)
        yield frame, variables, bytecode.carried(frame.f_code, frame.f_lasti, states)


def _models(given: Collection[Any]) -> list[nn.Module]:
    return [one for one in given if isinstance(one, nn.Module)]


def _modules(given: Collection[Any]) -> list[nn.Module]:
    return [module for model in _models(given) for module in model.modules()]


def _named(name: Name, value: Any) -> Iterator[tuple[Name, Any]]:
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", one) for key, one in [*value.items()] if isinstance(key, str))
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{number}]", one) for number, one in enumerate(value))
    else:
        yield from ((f"{name}.{key}", one) for key, one in [*getattr(value, "__dict__", {}).items()])


def _held(value: Any) -> list[Any]:
    """Return what hangs directly off an object."""
    return [one for _, one in _named("", value)]


def _tensors(holder: Any) -> list[torch.Tensor]:
    if isinstance(holder, nn.Module):
        return [*holder.parameters(), *holder.buffers()]
    return [one for one in _held(holder) if isinstance(one, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    """Return what is the same for a tensor and its views, such as those in a state_dict."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _glance(tensor: torch.Tensor) -> tuple[int, int, str]:
    """Return what differs if a tensor has changed: a write through `.data` is not in its version."""
    version = 0 if tensor.is_inference() else tensor._version
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    if not is_plain or tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return id(tensor), version, ""
    row = tensor.detach()[(0,) * (tensor.dim() - 1)]
    # As text, since nan is not equal to itself.
    return id(tensor), version, str((row[:_SAMPLED] if row.dim() else row).tolist())
