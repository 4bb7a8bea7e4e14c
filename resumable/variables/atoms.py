"""Values without parts of their own, as a tree has them, and back."""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch


class Hole(Exception):
    """Something that no checkpoint can have, or that the script does not have any more."""


class _Way(NamedTuple):
    """How a value of a class becomes plain ones, and the value is made of them."""

    out: Callable[[Any], Any]
    back: Callable[[Any], Any]


AS_THEY_ARE = {type(None), bool, int, float, complex, str, bytes}


def _of_torch(kind: type) -> _Way:
    def back(name: str) -> Any:
        found = vars(torch).get(name)
        if type(found) is not kind:
            raise Hole(f"torch.{name}")
        return found

    return _Way(lambda one: str(one).removeprefix("torch."), back)


def _date(kind: Any) -> _Way:
    return _Way(
        lambda one: [_plain_zone(one).isoformat(), getattr(one, "fold", 0)], lambda one: _dated(kind, *one)
    )


def _plain_zone(one: Any) -> Any:
    if type(getattr(one, "tzinfo", None)) not in (type(None), datetime.timezone):
        # Its name is not in the text.
        raise Hole(f"a time of the zone {one.tzinfo}")
    return one


def _dated(kind: Any, text: str, fold: int) -> Any:
    found = kind.fromisoformat(text)
    return found.replace(fold=fold) if fold else found


_WAYS: dict[type, _Way] = {
    range: _Way(lambda one: [one.start, one.stop, one.step], lambda given: range(*given)),
    slice: _Way(lambda one: [one.start, one.stop, one.step], lambda given: slice(*given)),
    type(...): _Way(lambda _: None, lambda _: ...),
    type(NotImplemented): _Way(lambda _: None, lambda _: NotImplemented),
    datetime.date: _date(datetime.date),
    datetime.datetime: _date(datetime.datetime),
    datetime.time: _date(datetime.time),
    datetime.timedelta: _Way(
        lambda one: [one.days, one.seconds, one.microseconds], lambda given: datetime.timedelta(*given)
    ),
    torch.device: _Way(str, torch.device),
    **{kind: _of_torch(kind) for kind in (torch.dtype, torch.layout, torch.memory_format)},
    **{
        kind: _Way(str, kind)
        for kind in (type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath)
    },
}
_BY_NAME = {kind.__name__: way for kind, way in _WAYS.items()}


def out(value: Any) -> Any:
    """Return an atom as a tree has it; Hole if it cannot be stored."""
    of = type(value)
    if of in AS_THEY_ARE or issubclass(of, np.generic):
        return value
    if of is tuple:
        return tuple(map(out, value))
    if (way := _WAYS.get(of)) is None:
        raise Hole(f"a {of.__name__}")
    return {"atom": [of.__name__, way.out(value)]}


def back(name: str, given: Any) -> Any:
    """Return the value that `out` was given."""
    if (way := _BY_NAME.get(name)) is None:
        raise Hole(f"a {name}")
    return way.back(given)


def check(name: Any, given: Any) -> None:
    """Raise ValueError unless `back` can return the value."""
    try:
        back(name, given)
    except (Hole, TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as exc:
        raise ValueError(f"no {name!r}: {exc}") from exc
