"""The attributes of an object, read without its properties and its `__getattr__`."""

from __future__ import annotations

from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

from . import own

DESCRIPTORS = (GetSetDescriptorType, MemberDescriptorType)
_OF_PYTHON = ("__dict__", "__weakref__")


def attributes(value: Any) -> dict[str, Any]:
    """Return a copy of an object's attributes: of its `__dict__` and of its slots that are filled.

    >>> class Point:
    ...     __slots__ = ("x", "y")
    >>> point = Point()
    >>> point.x = 3
    >>> attributes(point)
    {'x': 3}
    """
    has_dictionary, slots = _layout(type(value))
    held = object.__getattribute__(value, "__dict__") if has_dictionary else None
    found = dict.copy(held) if type(held) is dict else {}
    for name, slot in slots.items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            continue
    return found


def dictionary(value: Any) -> dict[str, Any] | None:
    """Return the `__dict__` of an object, or None if it has none, or another than Python's."""
    held = object.__getattribute__(value, "__dict__") if _layout(type(value))[0] else None
    return held if type(held) is dict else None


@own.by_class
def _layout(kind: type) -> tuple[bool, dict[str, MemberDescriptorType]]:
    """Return whether objects of a class have a `__dict__` of Python's, and their slots."""
    found = (vars(one)["__dict__"] for one in kind.__mro__ if "__dict__" in vars(one))
    return type(next(found, None)) in DESCRIPTORS, members(kind)


def members(kind: type) -> dict[str, MemberDescriptorType]:
    """Return the slots of a class and of its bases, by the names that a class gives them."""
    slots = (vars(one).items() for one in reversed(kind.__mro__) if "__slots__" in vars(one))
    found = {name: slot for some in slots for name, slot in some if type(slot) is MemberDescriptorType}
    return {name: slot for name, slot in found.items() if name not in _OF_PYTHON}
