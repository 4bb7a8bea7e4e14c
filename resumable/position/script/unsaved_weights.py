"""Finds what changes in models as they train, and copies of their weights, that no checkpoint has."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from functools import cache
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from ...files import sharded_tensor
from ...loaders.generators import code_names
from ...processes.signals import is_of_a_handler
from . import bytecode, loop_variables, loops
from .events import Name, root_of
from .loops import Running

_DEEPEST = 3
_WIDEST = 256
_MOST_SEEN = 8
_LONGEST = 10_000
"""The most tensors in a container that may be a copy of a model's weights."""
_MOST = 20_000
"""The most objects that one look passes."""
_CLOSED = (
    *loop_variables.PLAIN,
    DataLoader,
    Dataset,
    Optimizer,
    torch.Tensor,
    type,
    ModuleType,
    FunctionType,
)
"""Kinds whose attributes are not looked at."""
_ASIDE = ("__init__", "__repr__", "__str__", "extra_repr")
"""Methods that make a module or show it."""
_CONTAINERS = (dict, list, tuple)


class UnsavedWeights:
    """Looks at models and the variables of the script, at saves whose number is a power of two.

    `given` returns the objects that a checkpoint has.
    """

    def __init__(self, given: Callable[[], Collection[Any]]) -> None:
        self._given = given
        self._saves = 0
        self._attributes, self._copies = _Changes(), _Changes()

    def begin(self, functions: Collection[Running]) -> None:
        """Look at the copies around the first batch or body, which the first save is compared with."""
        given = self._given()
        self._copies.since(_copies(given, modules_of(given), functions))

    def changed(self, functions: Collection[Running]) -> tuple[list[Name], list[Name]]:
        """Return attributes of models, and holders of weights, that have changed for the first time."""
        self._saves += 1
        if self._saves & (self._saves - 1):
            return [], []
        given = self._given()
        modules = modules_of(given)
        attributes, copies = _attributes(given, modules, functions), _copies(given, modules, functions)
        return self._attributes.since(attributes), self._copies.since(copies)


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


def _attributes(
    given: Collection[Any], modules: Collection[nn.Module], functions: Collection[Running]
) -> dict[tuple[int, Name], Any]:
    """Return the attributes of models that training carries along, and that are in no state_dict."""
    saved = {id(one) for one in given}
    in_loops = _of_loops(functions)
    called = next((one.carried.called for one in functions if one.carried.called), None)
    found: dict[tuple[int, Name], Any] = {}
    for module in modules:
        kind: type = type(module)
        updated, used, *_ = _of_methods(kind)
        changed, decides = in_loops.get(id(module), (set(), set()))
        names = (updated | changed) & (used | decides)
        if not names or has_extra_state(module):
            continue
        own: dict[str, Any] = vars(module)
        for name in names & own.keys() - (_begun(kind, called) - changed):
            if id(own[name]) not in saved:
                parts = loop_variables.glance(f"{kind.__name__}.{name}", own[name])
                found |= {(id(module), part): value for part, value in parts.items()}
    return found


@cache
def _of_methods(
    kind: type,
) -> tuple[frozenset[str], frozenset[str], dict[str, set[str]], dict[str, set[str]]]:
    """Return the attributes to which methods give values made from their own, and those that they use.

    With them come those that each method assigns again, such as `reset`, and the methods that each calls.
    """
    updated, used = set[Name](), set[Name]()
    begun, calls = dict[str, set[str]](), dict[str, set[str]]()
    for owner in kind.__mro__:
        methods = vars(owner).items() if code_names.is_own(str(owner.__module__)) else ()
        for name, method in methods:
            if isinstance(method, FunctionType) and name not in _ASIDE:
                read, stored = bytecode.of_method(method.__code__)
                own_updated, own_used = bytecode.updated_and_used(method.__code__)
                updated |= own_updated
                used |= own_used
                begun.setdefault(name, set()).update(_of_self(stored - read))
                calls.setdefault(name, set()).update(bytecode.called_by(method.__code__))
    return _of_self(updated), _of_self(used), begun, calls


def _begun(kind: type, called: Collection[str] | None) -> set[str]:
    """Return the attributes that a model begins with in each body; `called`: what the loop calls."""
    _, _, begun, calls = _of_methods(kind)
    names = {*begun} if called is None else {"forward"}
    if called is not None:
        names |= {name for name in begun if any(_is_meant(name, one) for one in called)}
        for _ in range(_DEEPEST):
            names |= {deeper for one in names for deeper in calls.get(one, ())}
    return set[str]().union(*(begun[name] for name in names & begun.keys()))


def _is_meant(method: str, called: str) -> bool:
    """Whether a call is one of a method, or of a function that calls it on modules, such as `reset_net`."""
    called = "train" if called == "eval" else called
    return called == method or called.startswith(f"{method}_") or called.endswith(f"_{method}")


def _of_self(names: Collection[Name]) -> frozenset[str]:
    return frozenset(name.removeprefix("self.") for name in names if name.startswith("self."))


def _of_loops(functions: Collection[Running]) -> dict[int, tuple[set[str], set[str]]]:
    """Return the attributes that the loops carry along, and those that decide, by the id of their owner."""
    found: dict[int, tuple[set[str], set[str]]] = {}
    for one in functions:
        carried = one.carried
        for place, names in enumerate([carried.used & carried.stored, carried.assigned | carried.kept]):
            for name in names:
                inside = name[len(root_of(name)) :]
                if inside.startswith("."):
                    both = found.setdefault(id(one.root(name)), (set(), set()))
                    both[place].add(inside[1:])
    return found


def _copies(
    given: Collection[Any], modules: Collection[nn.Module], functions: Collection[Running]
) -> dict[tuple[int, Name], Any]:
    """Return the tensors of each other module, and of each copy of a model's weights, that a script has."""
    saved = {id(one) for one in [*given, *modules]}
    saved |= {id(held) for one in given if not isinstance(one, nn.Module) for _, held in _held(one)}
    holders = [
        (name, holder, [one for one in tensors if id(one) not in saved])
        for name, holder, tensors in _holders(functions, saved)
    ]
    if not holders:
        return {}
    parameters = {model: [*model.parameters()] for model in given if isinstance(model, nn.Module)}
    in_models = {_memory(one) for own in parameters.values() for one in own}
    in_models |= {_memory(one) for module in modules for one in module.buffers(recurse=False)}
    # An optimizer saves those of its parameters that no model has.
    groups = [group for one in given if isinstance(one, Optimizer) for group in one.param_groups]
    in_models |= {_memory(one) for group in groups for one in group["params"]}
    shapes = [Counter(one.shape for one in own) for own in parameters.values() if own]
    found: dict[tuple[int, Name], Any] = {}
    for name, holder, all_tensors in holders:
        tensors = [one for one in all_tensors if _memory(one) not in in_models]
        is_copy = isinstance(holder, nn.Module) or any(
            own <= Counter(t.shape for t in tensors) for own in shapes
        )
        if tensors and is_copy:
            found[0, name] = [_glance(one) for one in tensors[:_MOST_SEEN]]
    return found


def _holders(
    functions: Collection[Running], saved: Collection[int]
) -> list[tuple[Name, Any, list[torch.Tensor]]]:
    """Return what has tensors and hangs off the script's variables, but for what is saved."""
    waiting = _variables(functions)
    found: list[tuple[Name, Any, list[torch.Tensor]]] = []
    seen, passed = {*saved}, 0
    while waiting and passed < _MOST:
        name, value, depth = waiting.popleft()
        kind = type(value)
        if id(value) in seen or issubclass(kind, _CLOSED):
            continue
        seen.add(id(value))
        is_module = issubclass(kind, nn.Module)
        tensors = _weights(value) if is_module else []
        held = [] if is_module else _held(value)
        for key, one in held:
            if issubclass(type(one), torch.Tensor):
                tensors.append(one)
            elif depth < _DEEPEST and not issubclass(type(one), _CLOSED) and id(one) not in seen:
                waiting.append((_joined(name, key, issubclass(kind, _CONTAINERS)), one, depth + 1))
        if tensors:
            found.append((name, value, tensors))
        passed += 1 + len(held)
    return found


def _weights(module: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a module; none of one that is broken, and hides no other."""
    try:
        parameters = [*module.parameters()]
        # What has no weights and a reset() is a metric, which begins again with each epoch.
        is_metric = hasattr(type(module), "reset") and not parameters
        return [] if is_metric else [*parameters, *module.buffers()]
    except Exception as exc:
        if is_of_a_handler(exc):
            raise
        return []


def _variables(functions: Collection[Running]) -> deque[tuple[Name, Any, int]]:
    """Return the variables of the script that its loops do not assign in each body, each at depth 0."""
    found = deque[tuple[Name, Any, int]]()
    for one in functions:
        for name, value in {**one.others, **one.variables}.items():
            is_ours = type(value).__module__.partition(".")[0] == loops.TOP
            if name not in one.carried.replaced and not name.startswith("__") and not is_ours:
                found.append((name, value, 0))
    return found


_SAVING: WeakSet[nn.Module] = WeakSet()


def saves_itself(module: nn.Module) -> None:
    """Note that a module saves its attributes in a way of its own, as by a hook of a framework."""
    _SAVING.add(module)


def has_extra_state(module: nn.Module) -> bool:
    """Whether a module saves more than its parameters and buffers."""
    return type(module).get_extra_state is not nn.Module.get_extra_state or module in _SAVING


def modules_of(given: Collection[Any]) -> list[nn.Module]:
    """Return the modules of all models: in less time than modules() takes, which nests its generators."""
    found = [one for one in given if isinstance(one, nn.Module)]
    seen = {id(one) for one in found}
    for module in found:
        for one in module._modules.values():
            if one is not None and id(one) not in seen:
                seen.add(id(one))
                found.append(one)
    return found


def _held(value: Any) -> list[tuple[Any, Any]]:
    """Return what hangs directly off an object, by key; nothing of a long container, unless it has weights.

    It is copied at once: another thread of the script may add to it meanwhile.
    """
    own: Any = value if issubclass(type(value), _CONTAINERS) else getattr(value, "__dict__", None)
    copied: list[tuple[Any, Any]] = []
    # By the methods of dict, list and tuple: those of a subclass are code of the script.
    if issubclass(type(own), dict):
        copied = [*dict.items(own)] if dict.__len__(own) <= _LONGEST else []
    elif issubclass(type(own), list):
        copied = [*enumerate(list.copy(own))] if list.__len__(own) <= _LONGEST else []
    elif issubclass(type(own), tuple):
        copied = [*enumerate(tuple.__iter__(own))] if tuple.__len__(own) <= _LONGEST else []
    is_long = len(copied) > _WIDEST and not issubclass(type(copied[0][1]), torch.Tensor)
    return [] if is_long else copied


def _joined(name: Name, key: Any, is_item: bool) -> Name:
    if not is_item:
        return f"{name}.{key}"
    # The repr of another key is code of the script.
    return f"{name}[{key!r}]" if type(key) in loop_variables.PLAIN else f"{name}[<{type(key).__name__}>]"


def _memory(tensor: torch.Tensor) -> int:
    """Return what is the same for a tensor and its views, such as those in a state_dict."""
    live = sharded_tensor.local(tensor)
    return live.untyped_storage().data_ptr() if live.layout is torch.strided else id(tensor)


def _glance(tensor: torch.Tensor) -> tuple[int, int, str]:
    """Return what differs if a tensor has changed: a write through `.data` is not in its version."""
    version = 0 if tensor.is_inference() else tensor._version
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return id(tensor), version, loop_variables.sample(tensor) if is_plain and not tensor.is_meta else ""
