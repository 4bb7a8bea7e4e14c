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


def write(value: Any, name: str, one: Any) -> None:
    """Set an attribute of an object, in its `__dict__` or in a slot."""
    if (slot := _layout(type(value))[1].get(name)) is not None:
        slot.__set__(value, one)
    elif (held := dictionary(value)) is not None:
        held[name] = one


def delete(value: Any, name: str) -> None:
    """Delete an attribute of an object."""
    if (slot := _layout(type(value))[1].get(name)) is not None:
        slot.__delete__(value)
    else:
        (dictionary(value) or {}).pop(name, None)


@own.by_class
def _layout(kind: type) -> tuple[bool, dict[str, MemberDescriptorType]]:
    """Return whether objects of a class have a `__dict__` of Python's, and their slots."""
    spaces = [vars(one) for one in kind.__mro__]
    dictionary = next((one["__dict__"] for one in spaces if "__dict__" in one), None)
    slots = [pair for one in reversed(spaces) if "__slots__" in one for pair in one.items()]
    return type(dictionary) in DESCRIPTORS, {
        name: slot for name, slot in slots if type(slot) is MemberDescriptorType and name not in _OF_PYTHON
    }
