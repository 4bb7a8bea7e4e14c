"""JSON that is read strictly, and that can vouch for its own bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import xxhash

Json = Any
"""Dicts with string keys, lists, strings, finite numbers, booleans and None."""

_Kind = TypeVar("_Kind")
_ENCODER = json.JSONEncoder(allow_nan=False)


def seal(body: Mapping[str, Json]) -> bytes:
    """Return the JSON text of `body`, with the checksum of all that follows as its first key."""
    # Not indent=: for that, json has only its slow encoder.
    lines = (_ENCODER.encode({key: value})[1:-1] for key, value in body.items())
    rest = ("\n " + ",\n ".join(lines) + "\n}").encode()
    return _first_line(rest) + rest


def unseal(data: bytes) -> dict[str, Json]:
    """Return what `seal` was given; ValueError if one bit of the text has changed."""
    rest = data[len(_first_line(b"")) :]
    if data != _first_line(rest) + rest:
        raise ValueError("its checksum does not match its content")
    body: dict[str, Json] = parse(data)
    del body["checksum"]
    return body


def parse(data: bytes | memoryview) -> Json:
    """Return the value of a JSON text: no key twice, no NaN, no bottomless nesting.

    >>> parse(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: it has a key twice
    """
    try:
        return json.loads(
            str(data, "utf-8"), object_pairs_hook=_unique, parse_constant=_finite, parse_float=_finite
        )
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


def typed(kind: type[_Kind], value: Json) -> _Kind:
    """Return `value` if it is of that very type: True is no int.

    >>> typed(int, True)
    Traceback (most recent call last):
    ValueError: True stands where int belongs
    """
    if type(value) is not kind:
        raise ValueError(f"{value!r:.200} stands where {kind.__name__} belongs")
    return value


def _first_line(rest: bytes) -> bytes:
    return f'{{"checksum": "{xxhash.xxh3_128_hexdigest(rest)}",'.encode()


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a key twice")
    return found


def _finite(text: str) -> float:
    # "1e999" is correct JSON, and infinite.
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text:.50} is not a finite number")
    return value
