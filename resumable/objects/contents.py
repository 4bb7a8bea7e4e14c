"""What of an object itself counts: its atoms, and which objects are in it, but not what is in those."""

from __future__ import annotations

import array
import collections
import json
import random
from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash

from ..files import fingerprint, sharded_tensor, tensor_file
from . import kinds, slots
from .kinds import Kind

MOST_ITEMS = 4096
"""Of a larger dict or object only a digest is kept."""
_JSON = {bool, int, float, str, type(None)}
_EQUAL = {bool, int, str, bytes, type(None), type(...)}
_MOST_BITS = 4000
"""Of an integer that is written in decimals."""
_ROWS = {int: "q", float: "d"}


T = TypeVar("T", torch.Tensor, np.ndarray[Any, Any])


class Content(NamedTuple):
    """What of an object counts: equal only for the same, bit for bit, in this process."""

    whole: Hashable
    items: Mapping[Any, Hashable] | None = None
    """By name or key, if there are not too many."""
    order: bytes = b""
    """Of a dict: a loop over it comes to its items in that order."""

    def without(self, names: Collection[str]) -> Content:
        """Return the content of an object but for some of its attributes."""
        but = {mark(name) for name in names}
        items = {name: one for name, one in (self.items or {}).items() if name not in but}
        return self._replace(items=self.items and items)

    def but(self, identities: Collection[int]) -> Content:
        """Return a content that differs from any with an object of these identities."""
        if self.items is None:
            return Content(())
        return self._replace(
            items={
                name: (one[0], None) if one[1] in identities and one[0] not in kinds.ATOMS else one
                for name, one in self.items.items()
                if isinstance(one, tuple)
            }
        )

    def changed(self, before: Content) -> list[Any] | None:
        """Return the names or keys that are new or have another value; None if that is not known."""
        if self.items is None or before.items is None or self.whole != before.whole:
            return None
        return [name for name, one in self.items.items() if before.items.get(name, ()) != one]


def content(value: Any, kind: Kind | None = None) -> Content:
    """Return what of an object counts.

    >>> before, same, other = content([1, 2.0]), content([1, 2.0]), content([1, 2])
    >>> before == same, before == other
    (True, False)
    """
    kind = kind or kinds.kind_of(value)
    if kind in ("list", "tuple"):
        return Content((digest(kinds.held_in(value)), getattr(value, "maxlen", None)))
    if kind == "dict":
        held = kinds.entries_of(value)
        return _mapping(
            held, mark(getattr(value, "default_factory", None)), order=digest([key for key, _ in held])
        )
    if kind == "set":
        return Content(frozenset(map(mark, kinds.held_in(value))))
    if kind == "buffer":
        return Content((getattr(value, "typecode", ""), xxhash.xxh3_128_digest(value)))
    if kind == "array":
        return Content(_of_array(value))
    if kind == "tensor":
        return Content(_of_tensor(value), _mapping(slots.attributes(value).items()).items)
    if kind == "generator":
        return Content(digest([state_of(value)]))
    if kind in ("count", "enum"):
        return Content(repr(value) if kind == "count" else id(value))
    if kind in ("object", "library"):
        return _mapping(slots.attributes(value).items(), _inherited(value), id(type(value)))
    return _mapping([(tuple(step), one) for step, one in kinds.everything(value, kind)], id(type(value)))


def _inherited(value: Any) -> Hashable:
    if issubclass(type(value), dict):
        return tuple(digest([*half]) for half in zip(*kinds.entries_of(value), strict=True))
    if issubclass(type(value), (set, frozenset)):
        return frozenset(map(mark, kinds.held_in(value)))
    return digest(kinds.held_in(value)) if issubclass(type(value), (list, collections.deque)) else ()


def _mapping(held: Collection[tuple[Any, Any]], *more: Hashable, order: bytes = b"") -> Content:
    if len(held) > MOST_ITEMS:
        return Content((*more, *(digest([*half]) for half in zip(*held, strict=True))), None, order)
    return Content(more, {mark(key): mark(one) for key, one in held}, order)


def mark(value: Any) -> Hashable:
    """Return a stand-in for a value: an atom itself, to the bit, or the identity of an object."""
    of = type(value)
    if of is int and value.bit_length() > _MOST_BITS:
        # Python writes no decimals of it.
        return of, hex(value)
    if of in _EQUAL:
        return of, value
    if of is float:
        return of, value.hex()
    if of is tuple and kinds.is_atom(value):
        return of, tuple(map(mark, value))
    if issubclass(of, np.generic):
        return of, value.dtype.str, value.tobytes()
    return (of, repr(value)) if of in kinds.ATOMS else (of, id(value))


def digest(items: list[Any]) -> bytes:
    """Return a digest of values, of atoms to the bit and of others by their identity."""
    types: set[type] = {*map(type, items)}
    if len(types) == 1 and (code := _ROWS.get(next(iter(types)), "")):
        try:
            return xxhash.xxh3_128_digest(array.array(code, items)) + code.encode()
        except OverflowError:
            # An integer of more than eight bytes.
            pass
    if types <= _JSON:
        try:
            return xxhash.xxh3_128_digest(json.dumps(items, separators=(",", ":")).encode())
        except ValueError:
            # An integer of thousands of digits.
            pass
    return xxhash.xxh3_128_digest(repr([*map(mark, items)]).encode(errors="surrogatepass"))


def state_of(generator: Any) -> Any:
    """Return the state of a random generator."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    found = (
        generator.get_state(legacy=False)
        if isinstance(generator, np.random.RandomState)
        else generator.bit_generator.state
    )
    return repr(_plain(found))


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return [(name, _plain(one)) for name, one in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _of_array(value: Any) -> Hashable:
    shape = id(type(value)), value.shape, str(value.dtype), value.strides
    if value.dtype.hasobject:
        return *shape, digest(kinds.flat(value).tolist())
    if (place := mapped(value)) is not None:
        return *shape, place
    data: Any = np.ascontiguousarray(kinds.flat(memory_of(value))).view(np.uint8)
    return *shape, xxhash.xxh3_128_digest(data)


def mapped(value: Any) -> Hashable:
    """Return where in a file the memory of an array is that nothing in this process can write to."""
    base, file = value, None
    while isinstance(base, np.ndarray):
        base, file = base.base, base if isinstance(base, np.memmap) else file
    if file is None or file.mode != "r" or file.filename is None:
        return None
    return str(file.filename), file.offset, value.ctypes.data - file.ctypes.data


def memory_of(value: T) -> T:
    """Return a tensor or an array, or the memory that it shows where it repeats parts of that."""
    if isinstance(value, torch.Tensor):
        held = value.untyped_storage()
        is_more = value.is_cpu and held.nbytes() < value.nbytes
        return torch.empty(0, dtype=torch.uint8).set_(held) if is_more else value
    base: Any = value
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base if base.nbytes < value.nbytes else value


def _of_tensor(value: Any) -> Hashable:
    with torch._C.DisableTorchFunctionSubclass():
        return id(type(value)), value.requires_grad, *digest_of_tensor(value)


def digest_of_tensor(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return what of a tensor counts: its type, shape and device, and its bits that are here."""
    tensor = sharded_tensor.local(tensor).detach()
    facts = str(tensor.dtype), tuple(tensor.shape), str(tensor.device)
    if tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return *facts, tensor.data_ptr() if not tensor.is_meta else 0, tensor._version
    if tensor.layout is torch.sparse_coo:
        return *facts, *map(digest_of_tensor, (tensor._indices(), tensor._values()))
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = memory_of(tensor)
    if tensor.is_cpu:
        return *facts, xxhash.xxh3_128_digest(tensor_file.as_bytes(tensor.resolve_conj().resolve_neg()))
    return *facts, int(fingerprint.on_device(tensor.contiguous()))
