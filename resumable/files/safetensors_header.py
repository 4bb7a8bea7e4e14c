"""The header of a safetensors file, which lists its tensors; without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter, mul, sub
from typing import Any, NamedTuple

from .strict_json import Json, parse, typed

SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 1),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
"""The bytes of one element, by the name of its dtype in the file."""

LONGEST = 100_000_000
"""The longest header that the safetensors library reads."""
_MOST_DIMENSIONS = 64


class Entry(NamedTuple):
    """A tensor in its file: its dtype, shape and byte range."""

    name: str
    code: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_size(start: bytes | memoryview, size: int) -> int:
    """Return where the data of a file of `size` bytes begins, from its first eight bytes."""
    if len(start) < 8 or size < (found := 8 + int.from_bytes(start[:8], "little")):
        raise ValueError("the header is longer than the file")
    if found > LONGEST:
        raise ValueError(f"the header has {found:,} bytes; at most {LONGEST:,} are read")
    return found


def entries_of(header: bytes | memoryview, size: int) -> list[Entry]:
    """Return the tensors of a file of `size` bytes; ValueError if it is not a safetensors file."""
    start = len(header)
    entries = typed(dict, parse(header[8:]))
    typed(dict, entries.pop("__metadata__", {}))
    found = _entries(entries, start)
    found.sort(key=itemgetter(3, 4))
    ends = [start, *map(attrgetter("end"), found)]
    if [*map(attrgetter("begin"), found)] != ends[:-1]:
        wrong = next(entry for entry, end in zip(found, ends, strict=False) if entry.begin != end)
        raise ValueError(f"{wrong.name} does not begin where the tensor before it ends")
    if ends[-1] != size:
        raise ValueError("there are bytes that belong to no tensor")
    return found


def _entries(entries: Mapping[str, Json], start: int) -> list[Entry]:
    """Return the entries of a header, whose questions are asked of all at once."""
    try:
        shapes, offsets, codes = (
            [*map(itemgetter(key), entries.values())] for key in ("shape", "data_offsets", "dtype")
        )
        widths = [*map(SIZES.__getitem__, codes)]
        begins, ends = zip(*offsets, strict=True) if offsets else ((), ())
        are_plain = (
            {*map(len, entries.values())} <= {3}
            and {*map(type, shapes)} <= {list}
            and {*map(type, chain(begins, ends, *shapes))} <= {int}
            and min(chain(begins, *shapes), default=0) >= 0
            and max(map(len, shapes), default=0) <= _MOST_DIMENSIONS
            and [*map(sub, ends, begins)] == [*map(mul, map(math.prod, shapes), widths)]
        )
    except (KeyError, TypeError, ValueError):
        are_plain = False
    if not are_plain:
        # One of them raises an error that says which it is.
        return [_entry(name, entry, start) for name, entry in entries.items()]
    places = [map(start.__add__, row) for row in (begins, ends)]
    # Not Entry(...), which is a function of Python.
    return [
        *map(partial(tuple.__new__, Entry), zip(entries, codes, map(tuple, shapes), *places, strict=True))
    ]


_BOXES, _BEGIN = "DCP_SHARDING_INFO", "saved_offsets"  # as torch.distributed.checkpoint names them


def box_metadata(begins: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the metadata of a file of boxes: where each begins in its whole tensor.

    >>> box_metadata({"weight": (4, 0)})
    {'DCP_SHARDING_INFO': '{"weight":{"saved_offsets":[4,0]}}'}
    """
    places = {name: {_BEGIN: [*begin]} for name, begin in begins.items()}
    return {_BOXES: json.dumps(places, separators=(",", ":"))}


def begins_of(header: bytes | memoryview, entries: Iterable[Any]) -> dict[str, tuple[int, ...]]:
    """Return where each tensor of a file of boxes begins in its whole; ValueError if that is not said."""
    metadata = typed(dict, typed(dict, parse(header[8:])).get("__metadata__", {}))
    places = typed(dict, parse(typed(str, metadata.get(_BOXES)).encode()))
    found = {}
    for entry in entries:
        place = places.pop(entry.name, None)
        begin = place.get(_BEGIN) if isinstance(place, dict) and len(place) == 1 else None
        if not isinstance(begin, list) or len(begin) != len(entry.shape) or not {*map(type, begin)} <= {int}:
            raise ValueError(f"{place!r} does not say where {entry.name} begins")
        if min(begin, default=0) < 0:
            raise ValueError(f"{entry.name} begins at {begin}")
        found[entry.name] = tuple(begin)
    if places:
        raise ValueError(f"there is no {', '.join(sorted(places))}")
    return found


def _entry(name: str, entry: Json, start: int) -> Entry:
    try:
        shape, (begin, end), code = entry["shape"], entry["data_offsets"], entry["dtype"]
        width = SIZES[code]
        if (
            len(entry) != 3
            or type(shape) is not list
            or not {*map(type, shape), type(begin), type(end)} <= {int}
        ):
            raise ValueError("unknown")
        if min(begin, end, *shape) < 0 or len(shape) > _MOST_DIMENSIONS:
            raise ValueError("negative")
        if end - begin != math.prod(shape) * width:
            raise ValueError("size")
    except (KeyError, TypeError, ValueError) as exc:
        raise ValueError(f"{entry!r} does not describe a tensor") from exc
    return Entry(name, code, tuple(shape), start + begin, start + end)
