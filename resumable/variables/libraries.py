"""Objects of installed packages: which are looked into, what of them may be filled, and their own states."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from types import FunctionType
from typing import Any

import numpy as np
import torch
import xxhash

from ..errors import ResumableError
from ..files import codec, fingerprint
from ..objects import kinds, own
from ..objects.contents import Content
from ..objects.kinds import Kind, Step
from ..objects.walks import Node
from . import signs
from .atoms import Hole
from .owned import Owned

_MOST = 2_000
"""How many objects are looked at to see whether one leads to what no checkpoint can have."""
_CLOSED = (
    *("torch.utils.data.dataset.", "torch.utils.data.dataloader.", "torch.utils.data._"),
    *("torch.distributed.", "torch._dynamo.", "torch.fx.", "torch._inductor."),
    *("tqdm.", "rich.", "matplotlib.", "accelerate.state.", f"{__name__.partition('.')[0]}."),
)
"""Packages whose objects are left alone: data belong to their loaders, what shows the training is made again
by the script, and what is ours is no variable."""
_NOT_ENTERED = {"class", "function", "module", "method", "partial"}
CALLED = ("function", "method", "partial", "class")
"""The kinds of what may be called later: all of them the script's."""
_WITHOUT_STATE = {*sys.stdlib_module_names, "torch", "numpy.dtypes"}
"""The modules of compiled classes whose objects do not change, or show what they hold."""
_UNKNOWN = Content(("a compiled object of which nothing is known",))
_NUMBERS = (bool, int, float, complex, np.number, np.bool_)


class Libraries:
    """Which objects of libraries are looked into: none that leads to a file, a lock or a process."""

    def __init__(self, owned: Owned, has_changed: Callable[[Any], bool]) -> None:
        self._owned, self._has_changed = owned, has_changed
        self._found: dict[int, tuple[Any, bool]] = {}
        self._with_processes: set[int] = set()
        self._halves: set[int] = set()

    def is_open(self, value: Any) -> bool:
        """Whether an object of a library is looked into."""
        if id(value) not in self._found:
            seen = self._reached(value)
            # What an open object leads to is open too: each object is looked at once.
            known = (value, *(seen or {}).values())
            self._found |= {id(one): (one, seen is not None) for one in known}
        return self._found[id(value)][1]

    def has_processes(self, value: Any) -> bool:
        """Whether an object of an installed package works in processes of its own."""
        return not self.is_open(value) and id(value) in self._with_processes

    def is_half(self, value: Any) -> bool:
        """Whether an object is, or is in, one of a library that leads to a compiled one which has changed."""
        return id(value) in self._halves

    def _reached(self, root: Any) -> dict[int, Any] | None:
        """Return all that an object leads to; None if that is too much, or cannot be in a checkpoint."""
        seen: dict[int, Any] = {}
        waiting = deque([root])
        while waiting:
            value = waiting.popleft()
            kind = kinds.kind_of(value)
            if id(value) in seen or kind in _NOT_ENTERED or self._owned.name(value) is not None:
                continue
            if not self._found.get(id(value), (None, True))[1]:
                return None
            if (found := signs.live(value)) is not None:
                is_installed = own.module_of(type(root)).partition(".")[0] not in sys.stdlib_module_names
                if found == "a process" and is_installed:
                    self._with_processes.add(id(root))
                return None
            if f"{own.module_of(type(value))}.".startswith(_CLOSED) or len(seen) >= _MOST:
                return None
            seen[id(value)] = value
            waiting.extend(one for _, _, one in kinds.look_into(value).children())
        compiled = [one for one in seen.values() if is_compiled(one)]
        if any(compiled_content(one) == _UNKNOWN or self._has_changed(one) for one in compiled):
            self._halves |= seen.keys()
        return seen


def is_compiled(value: Any) -> bool:
    """Whether an object of a library may have a state in C that no attribute shows, such as a simulator's."""
    return kinds.kind_of(value) == "library" and _is_compiled(type(value))


@own.by_class
def _is_compiled(of: type) -> bool:
    return any(map(_has_no_attributes, of.__mro__[:-1]))


def _has_no_attributes(of: type) -> bool:
    module = own.module_of(of)
    if not {module, module.partition(".")[0]}.isdisjoint(_WITHOUT_STATE) or module == "numpy":
        return False
    return not any({"__dict__", "__slots__"} & own.namespace(one).keys() for one in of.__mro__[:-1])


def compiled_content(value: Any) -> Content:
    """Return what `__reduce_ex__` says of a compiled object; nothing of it is ever stored."""
    try:
        whole = _digests(codec.encode(_plain(value)))
    except Exception:
        # Most cannot be pickled.
        return _UNKNOWN
    return kinds.content(value)._replace(whole=whole)


def _plain(value: Any) -> Any:
    if callable(value) or isinstance(value, str):
        return getattr(value, "__qualname__", value)
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return [_plain(one) for one in value.items()]
    return _plain([*value.__reduce_ex__(4)[:3]]) if is_compiled(value) else value


def is_data(value: Any, depth: int = 0) -> bool:
    """Whether a value is made of numbers, arrays, tensors and generators alone, in plain containers.

    >>> is_data([1.0, {"a": np.zeros(2)}]), is_data(["text"]), is_data([print])
    (True, False, False)
    """
    of = type(value)
    if value is None or issubclass(of, _NUMBERS) or of in (torch.Tensor, torch.nn.Parameter):
        return True
    kind = kinds.kind_of(value)
    if kind in ("generator", "array", "count"):
        return of is not np.ndarray or value.dtype.kind in "biufc"
    if kind == "dict" and depth < 8:
        pairs = kinds.items_of(value)
        return all(type(key) in (bool, int, float, str) and is_data(one, depth + 1) for key, one in pairs)
    if (of in (tuple, torch.Size) or kind in ("list", "set")) and depth < 8:
        return all(is_data(one, depth + 1) for one in kinds.items_of(value))
    return False


def may_be_at(place: str, value: Any, places: Callable[[], frozenset[str]]) -> bool:
    """Whether an object of the script may get a value at a place: no text and no code but where it stores.

    `places`: where the code of its loop stores, as `bytecode.places` says it.
    """
    if is_data(value):
        return True
    return place in (found := places()) or (place[0] == "[" and "[]" in found)


def is_imported(value: Any) -> bool:
    """Whether a value is a function or a class that the script does not define itself."""
    if isinstance(value, type):
        return not own.is_own_class(value)
    if type(value) is FunctionType:
        return not own.is_own_code(value.__code__)
    return (
        callable(value)
        and own.module_of(type(value)) in ("builtins", "functools", "numpy")
        and (kinds.kind_of(value) == "library")
    )


def no_place(value: Any) -> str:
    """Return why a value is left out of a place."""
    return f"no line of the loop stores a {type(value).__name__} there by its name"


def is_inside(kinds_on_way: Iterable[str]) -> bool:
    """Whether a way, as the kinds of its objects from its end on, is in an object of a library."""
    for kind in kinds_on_way:
        if kind in ("library", "object"):
            return kind == "library"
    return False


OWN = {"object", "function", "class"}
"""The kinds that are the script's own, wherever they are."""
FILLED = {"list", "dict", "set", "array", "tensor", "generator", "buffer", "library"}
"""The kinds that are filled in objects of libraries."""


def takes(of: type, step: Step, before: type | None, value: Any) -> bool:
    """Whether an object of a library may get a value at a step; `before`: of which type it has one there."""
    name = str(step.name)
    if step.how != "attribute" or not is_data(value):
        return False
    if before is None:
        # No method, no property, nothing that Python looks for; but what a class has for want of a value.
        defaults = (vars(one).get(name) for one in of.__mro__)
        return name.isidentifier() and name[:2] != "__" and all(map(is_data, defaults))
    now = type(value)
    # What is computed from an array without dimensions is a number.
    is_scalar = before is np.ndarray and issubclass(now, np.number)
    return (
        before is now or type(None) in (before, now) or (_is_number(before) and _is_number(now)) or is_scalar
    )


def _is_number(of: type) -> bool:
    return issubclass(of, (int, float, np.number)) and of is not bool


def lacks_some(value: Any) -> bool:
    """Whether the state of an object lacks the parameters or the functions that it was given."""
    return issubclass(type(value), (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler))


def holder(node: Node) -> Any:
    """Return the optimizer or scheduler that has an object in its containers; None if there is none."""
    above = node.owner
    while above is not None and above.kind not in ("library", *OWN):
        above = above.owner
    return above.value if above is not None and lacks_some(above.value) else None


def has_state(value: Any, kind: Kind) -> bool:
    """Whether an object of a library says what its state is."""
    return kind == "library" and gives_state(type(value))


@own.by_class
def gives_state(of: type) -> bool:
    """Whether the objects of a class say what their state is."""
    return all(callable(getattr(of, name, None)) for name in ("state_dict", "load_state_dict"))


def state(value: Any) -> Any:
    """Return the state of an object; Hole if it cannot be stored."""
    try:
        found = value.state_dict()
        codec.encode(found)
    except ResumableError as exc:
        raise Hole(str(exc).partition("\n")[0]) from exc
    except Exception as exc:
        # A prepared loader of Accelerate has the method, and nothing that it could return.
        raise Hole(f"a {type(value).__name__} gives no state: {exc!r}") from exc
    return found


def state_content(value: Any) -> Content:
    """Return a digest of the state of an object; that of one that cannot be stored is always the same."""
    try:
        return Content(_digests(codec.encode(state(value))))
    except Hole:
        return Content(("no state",))


def _digests(stored: codec.Encoded) -> tuple[Hashable, ...]:
    text = json.dumps([stored.json, stored.aliases]).encode()
    tensors = tuple((name, fingerprint.of_tensor(one)) for name, one in stored.tensors.items())
    return xxhash.xxh3_128_digest(text), tensors
