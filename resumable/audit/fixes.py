"""Writes the line of code that gives an object of the script to RunState."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from . import scopes
from .registered import Held

_CONTAINERS = ("list", "dict", "set", "deque")
_VALUES = ("number", "text", "none", "tensor", "array", "tuple", "frozenset")

REBOUND, RESTARTED = "rebound", "restarted"
"""What a loop does with a variable: assigns it, or resets it in each epoch."""


class Nth(NamedTuple):
    """Stands for a key that is an object, whose repr may contain an address or a whole tensor."""

    number: int
    kind: str


class Place(NamedTuple):
    """The place of an object: a readable name, and the expression for it in the script."""

    name: str
    code: str
    part: str = ""
    """The part that it belongs to."""
    owner: object = None
    """The object whose attribute it is."""
    owner_code: str = ""
    leaf_of: str = ""

    @property
    def leaf(self) -> str:
        """The last of its names, which can stand alone."""
        words: list[str] = re.findall(r"[^\W\d]\w*", self.leaf_of or self.code)
        return words[-1] if words else "state"

    def attribute(self, name: str, owner: object) -> Place:
        """Return the place of an attribute."""
        # A list of modules has numbers for names.
        code = f"{self.code}[{name}]" if name.isdigit() else f"{self.code}.{name}"
        leaf = self.leaf if name.isdigit() else name
        return Place(f"{self.name}.{name}", code, self.part, owner, self.code, leaf)

    def item(self, path: tuple[Any, ...]) -> Place:
        """Return the place of an item of a container."""
        name, code = self.name, self.code
        for key in path:
            if type(key) is Nth:
                name, code = f"{name}[{key.kind} {key.number}]", f"[*{code}.values()][{key.number}]"
            else:
                name += f".{key}" if type(key) is str else f"[{key!r}]"
                code += f"[{key!r}]".replace("'", '"')
        leaf = next((key for key in reversed(path) if type(key) is str), "")
        return self._replace(name=name, code=code, leaf_of=leaf or self.leaf)


def of_module(name: str, code: str, path: str, part: str) -> Place:
    """Return the place of a module inside a model, or of an object of a loader.

    >>> of_module("model", "net", "blocks.0.norm", "model").code
    'net.blocks[0].norm'
    """
    steps = "".join(f"[{step}]" if step.isdigit() else f".{step}" for step in path.split(".") if step)
    return Place(f"{name}.{path}" if path else name, code + steps, part)


def counted(count: int, what: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "tensor"), counted(3, "tensor")
    ('1 tensor', '3 tensors')
    """
    return f"{count:,} {what}" + "s" * (count != 1)


def fix(place: Place, kind: str, value: Any, held: Held, use: str = "") -> str:
    """Return the line of code that makes it part of the state; `use` says what the loop does with it."""
    kinds = type(value).__mro__
    if nn.Module in kinds:
        return _of_module(place, value, held)
    for slot, base in (("optimizer", torch.optim.Optimizer), ("scheduler", LRScheduler)):
        if base in kinds:
            return _of_slot(slot, place, held)
    if torch.amp.GradScaler in kinds:
        return _of_slot("scaler", place, held)
    if kind.endswith(("Generator", "RandomState", ".Random")):
        return _extra(place)
    if place.owner is not None and (own := _of_attribute(place, kind)):
        return own
    if kind == "parameter":
        return f'make it an nn.Parameter, and extra={{"{place.leaf}": {{"{place.leaf}": {place.code}}}}}'
    if is_named_tuple(value):
        return _of_named_tuple(place)
    if kind in _VALUES or (use and (kind in _CONTAINERS or kind.endswith("tensors"))):
        return _of_plain(place.leaf, use)
    return _extra(place)


def is_named_tuple(value: Any) -> bool:
    """Whether a value is a tuple with named fields, which no checkpoint stores as such."""
    return issubclass(type(value), tuple) and hasattr(type(value), "_fields")


def _of_named_tuple(place: Place) -> str:
    """Return where its fields are kept.

    >>> _of_named_tuple(Place("plan", "plan"))
    'state.vars["plan"], as tuple(plan)'
    """
    return f'state.vars["{place.leaf}"], as tuple({place.code})'


def _of_plain(name: str, use: str) -> str:
    if use != RESTARTED:
        return f'state.vars["{name}"]'
    # A plain assignment there would reset it after each resume.
    return (
        f'state.vars["{name}"], by state.vars.setdefault("{name}", ...) before the loop over the batches and '
        f'state.vars.pop("{name}") after it'
    )


def _extra(place: Place) -> str:
    return f'extra={{"{place.leaf}": {place.code}}}'


def _of_slot(slot: str, place: Place, held: Held) -> str:
    if not held.slots.get(slot):
        return f"{slot}={place.code}"
    return f'{slot}={{..., "{place.leaf}": {place.code}}}'


def _of_module(place: Place, module: Any, held: Held) -> str:
    parameters = nn.Module.parameters(module)
    is_trained = any(id(parameter) in held.optimized for parameter in parameters)
    is_first = not held.slots.get("model")
    return _of_slot("model", place, held) if is_trained or is_first else _extra(place)


def is_metric(kind: type) -> bool:
    """Whether a class is a metric of torchmetrics, whose state_dict leaves out its sums."""
    return any(
        (one.__module__, one.__qualname__) == ("torchmetrics.metric", "Metric") for one in kind.__mro__
    )


def _of_metric(place: Place) -> str:
    """Return the lines that save a metric of torchmetrics, whose state_dict leaves out its sums.

    >>> _of_metric(Place("accuracy", "accuracy"))
    'accuracy.persistent(True), and then RunState.load(..., extra={"accuracy": accuracy})'
    """
    given = "" if place.part else f"(..., {_extra(place)})"
    return f"{place.code}.persistent(True), and then RunState.load{given}"


def _of_attribute(place: Place, kind: str) -> str:
    """Return how its owner can save the attribute; "" if the owner need not change."""
    owner = place.owner if isinstance(place.owner, type) else type(place.owner)
    names = {name for one in owner.__mro__ for name in vars(one)}
    if is_metric(owner):
        return _of_metric(Place(place.owner_code, place.owner_code, place.part))
    if place.part and not scopes.is_users_class(owner):
        # A class of a library cannot be given another method.
        return f'keep it: state.vars["{place.leaf}"], and set it from there after RunState.load'
    if nn.Module in owner.__mro__ and place.part:
        if kind not in ("number", "tensor"):
            return (
                f"let {owner.__name__}.get_extra_state() return {place.leaf}, and set_extra_state() take it"
            )
        what = "torch.tensor(0)" if kind == "number" else "..."
        return f'self.register_buffer("{place.leaf}", {what}) in {owner.__name__}'
    is_stateful = {"state_dict", "load_state_dict"} <= names
    if place.part and is_stateful:
        return f"let {owner.__name__}.state_dict() return {place.leaf}, and load_state_dict() take it"
    if place.part:
        return f"give {owner.__name__} a state_dict() and a load_state_dict() with {place.leaf}"
    if is_stateful or "__dataclass_fields__" in names:
        return _extra(Place(place.owner_code, place.owner_code))
    return ""
