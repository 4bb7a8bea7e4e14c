"""Objects of libraries that give their state and take it: `state_dict` and `load_state_dict`."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from ..errors import ResumableError
from ..files import codec
from ..objects.contents import Content, digest_of_tensor
from ..objects.kinds import Kind
from .atoms import Hole


def has_state(value: Any, kind: Kind) -> bool:
    """Whether an object of a library says what its state is."""
    methods = (getattr(type(value), name, None) for name in ("state_dict", "load_state_dict"))
    return kind == "library" and all(map(callable, methods))


def state(value: Any) -> Any:
    """Return the state of an object; Hole if it cannot be stored."""
    try:
        found = value.state_dict()
        codec.encode(found)
    except ResumableError as exc:
        raise Hole(str(exc).partition("\n")[0]) from exc
    return found


def state_content(value: Any) -> Content:
    """Return a digest of the state of an object; that of one that cannot be stored is always the same."""
    try:
        stored = codec.encode(state(value))
    except Hole:
        return Content("no state")
    text = json.dumps([stored.json, stored.aliases]).encode()
    tensors = tuple((name, digest_of_tensor(one)) for name, one in stored.tensors.items())
    return Content((xxhash.xxh3_128_digest(text), tensors))
