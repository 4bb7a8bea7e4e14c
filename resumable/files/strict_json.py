"""JSON that is read strictly, and that can carry a checksum of itself."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import chain
from typing import Any, TypeVar

import xxhash

Json = Any
"""Dicts with string keys, lists, strings, finite numbers, booleans and None."""

_Kind = TypeVar("_Kind")
_ENCODER = json.JSONEncoder(allow_nan=False)


def seal(body: Mapping[str, Json]) -> bytes:
    """Return the JSON text of `body`; its first key is the checksum of everything after it."""
    # Not indent=: that uses the slow encoder of json.
    lines = [_ENCODER.encode({key: value})[1:-1] for key, value in body.items()]
    rest = ("\n " + ",\n ".join(lines) + "\n}").encode()
    return _first_line(rest) + rest


def unseal(data: bytes) -> dict[str, Json]:
    """Return what `seal` was given; ValueError if one bit of the text has changed."""
    # A manifest of 100,000 processes has 800,000.
    rest = data[len(_first_line(b"")) :]
    if data != _first_line(rest) + rest:
        raise ValueError("its checksum does not match its content")
    body: dict[str, Json] = parse(data, most=1_000_000)
    del body["checksum"]
    return body


LONGEST = 256 << 20
"""The most bytes of a JSON text; 64 MiB if its size is not in a manifest."""

MOST = 4_000_000
"""The most lists, objects and keys of a JSON text; 48 MB of text can hold 16 million."""


def parse(data: bytes | memoryview, most: int = MOST) -> Json:
    """Return the value of a JSON text: no key twice, no NaN, no bottomless nesting, not too much for memory.

    >>> parse(b'{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: it has a key twice
    """
    text = str(data, "utf-8")
    # Checked before parsing: an empty list takes 3 bytes of text, and at least 64 of memory.
    if is_more_than(most, text):
        raise ValueError(f"it has more than {most:,} lists, objects and keys, which is more than is read")
    try:
        found = json.loads(text, parse_constant=_finite, parse_float=_finite)
        # A function of Python for each object takes longer than all else; texts may have colons, too.
        if not _has_as_many_keys(found, text.count(":") - text.count("cuda:")):
            # Both at once would take twice the memory.
            del found
            found = json.loads(text, object_pairs_hook=_unique)
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    return found


def is_more_than(most: int, text: str) -> bool:
    """Return whether a JSON text has more than `most` lists, objects and keys.

    >>> is_more_than(3, '{"a": [[], "[[["]}'), is_more_than(4, '{"a": [[], "[[["]}')
    (True, False)
    """
    if len(text) <= most or sum(map(text.count, _PIECES)) <= most:
        return False
    # Brackets inside strings do not count. Remove strings part by part: doing it at once would take the
    # memory that this check protects.
    found, at, is_in_string = 0, 0, False
    while at < len(text) and found <= most:
        # No part ends in the middle of an escape.
        end = _WHOLE.match(text, at + _PART)
        assert end
        plain = text[at : end.end()].replace("\\\\", "").replace('\\"', "").split('"')
        found += sum(map("".join(plain[is_in_string::2]).count, _PIECES))
        is_in_string ^= len(plain) % 2 == 0
        at = end.end()
    return found > most


_PIECES = ("[", "{", ":")
_PART = 1 << 18
_WHOLE = re.compile(r"(?<!\\)|\\*[^\\]?", re.DOTALL)


def typed(kind: type[_Kind], value: Json) -> _Kind:
    """Return `value` if it has exactly that type: True is not an int.

    >>> typed(int, True)
    Traceback (most recent call last):
    ValueError: True stands where int belongs
    """
    if type(value) is not kind:
        raise ValueError(f"{value!r:.200} stands where {kind.__name__} belongs")
    return value


def check_types(values: Mapping[str, Json], kinds: Mapping[str, type]) -> None:
    """Raise ValueError unless these values have exactly these types.

    >>> check_types({"number": True, "name": ""}, {"name": str, "number": int})
    Traceback (most recent call last):
    ValueError: True stands where int belongs
    """
    for key, kind in kinds.items():
        if type(values[key]) is not kind:
            typed(kind, values[key])


def _first_line(rest: bytes) -> bytes:
    return f'{{"checksum": "{xxhash.xxh3_128_hexdigest(rest)}",'.encode()


def _has_as_many_keys(value: Json, most: int) -> bool:
    count, level = 0, [value]
    while level and count < most:
        dicts = [one for one in level if type(one) is dict]
        count += sum(map(len, dicts))
        if count < most:
            lists = [one for one in level if type(one) is list]
            level = [*chain.from_iterable(map(dict.values, dicts)), *chain.from_iterable(lists)]
    return count == most


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
