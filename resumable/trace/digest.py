"""Hashes of tensors and batches, cheap enough for every boundary."""

from __future__ import annotations

import array
import ctypes
import datetime
import decimal
import enum
import functools
import struct
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..files import sharded_tensor, tensor_file
from .pending import Late

MOST = 1024
"""The elements of a large tensor that are sampled: enough, since a training that diverges soon differs in
all of them."""

_WHOLE = 64
"""A tensor is hashed as a whole up to this many times the sample: reading it in order is fast."""

_DEEPEST = 16
_FLAT = 3
"""Below this depth a value has a hash of its own, computed once even if the value occurs often."""
_SMALL = 8
"""Up to this many values the hash is computed again: a cache lookup takes longer."""
_ITEMS = 5_000
"""The most values of a batch that are hashed: an object may refer to a whole dataset."""
_OBJECTS = 50_000
"""The most objects whose attributes are hashed where everything is hashed."""

_PLAIN = frozenset({int, float, bool, str, type(None)})
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_WITHOUT_ATTRIBUTES = frozenset({list, tuple, dict, set, frozenset, deque})
_TOLD = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, range, torch.dtype, torch.device)
_DOUBLE = struct.Struct("<d").pack
_ROW = 4
_GOLDEN = 2_654_435_769
_UNTAKEN = {
    **{dtype: torch.uint8 for dtype in tensor_file.DTYPES if dtype.itemsize == 1 and dtype.is_floating_point},
    **{torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64},
}
"""The dtypes that torch.take() lacks, and those of the same size that it has."""


def of(value: Any, most: int | None = None) -> str:
    """Return the hash of a batch, or of any value: of all its bits, or with a sample of each large tensor.

    It runs no code of the script, and takes nothing from an iterator.

    >>> of({"x": torch.zeros(3), "y": [1, 2]}) == of({"x": torch.zeros(3), "y": [1, 2]})
    True
    >>> of(torch.zeros(3)) == of(-torch.zeros(3))
    False
    """
    found = soon(value, most)
    return found if isinstance(found, str) else str(found.value())


def soon(value: Any, most: int | None = None) -> str | Late:
    """Return the same hash, or a pending one if part of the value is on a GPU."""
    pieces = _Pieces(most)
    pieces.add(value)
    return _finished(pieces.found)


def of_tensors(text: str, tensors: Iterable[Tensor], most: int, whole: int) -> str | Late:
    """Return the hash of a text and many tensors, at little more than the cost of reading them.

    Tensors with more than `whole` elements are sampled, with `most` of them. Shapes are not hashed.
    """
    with torch.no_grad():
        here = map(sharded_tensor.local, tensors)
        picked = [tensor if tensor.numel() <= whole else sample(tensor, most) for tensor in here]
        found: list[Any] = [_content(tensor) if tensor.is_cpu else tensor for tensor in picked]
    return _finished([text.encode(errors="surrogatepass"), *found])


def _finished(pieces: Sequence[Any]) -> str | Late:
    """Return the hash of pieces; a pending one if some of them are tensors on a GPU."""
    late = [place for place, piece in enumerate(pieces) if isinstance(piece, Tensor)]
    if not late:
        return _hash(pieces)
    # Copied: the host's memory may be written to before the device is ready.
    kept: list[Any] = [piece if isinstance(piece, Tensor) else bytes(piece) for piece in pieces]

    def digest(copies: Sequence[Tensor]) -> str:
        there = dict(zip(late, copies, strict=True))
        return _hash(_content(there[place]) if place in there else one for place, one in enumerate(kept))

    return Late([kept[place] for place in late], digest)


def sample(tensor: Tensor, most: int | None) -> Tensor:
    """Return at most `most` elements of a tensor, evenly spread over it, or all of them."""
    live = sharded_tensor.local(tensor).detach()
    if most is None or live.numel() <= most or _is_strange(live):
        return live
    # Not reshape: it would first copy the whole tensor, and an expanded one can be larger than the memory.
    numbers = live.view(_UNTAKEN[live.dtype]) if live.dtype in _UNTAKEN else live
    return numbers.take(_places(live.numel(), most, live.device)).view(live.dtype)


@functools.lru_cache(256)
def _places(count: int, most: int, device: torch.device | None = None) -> Tensor:
    """Return the indices of a sample, in rows of four, which are fetched together."""
    # Not at a regular distance: one that fits the row length would sample the same few columns of every row.
    rows = torch.arange(most // _ROW, dtype=torch.int64) * _GOLDEN % (1 << 32)
    begins = (rows.double() / (1 << 32) * (count - _ROW)).long().sort().values
    return (begins[:, None] + torch.arange(_ROW)).flatten().to(device or "cpu")


def _is_strange(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized


def _hash(pieces: Iterable[Any]) -> str:
    found = xxhash.xxh3_64()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def _content(tensor: Tensor) -> Any:
    """Return the bytes of a tensor in host memory, which must not outlive the tensor."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return bytes(_content(plain))
    # Not numpy(): after it, the script could not resize the tensor's memory.
    size, address = tensor.nbytes, tensor.data_ptr()
    return (ctypes.c_char * size).from_address(address) if address and size else b""


@functools.lru_cache(4096)
def _head(kind: type, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{kind.__qualname__}({dtype}{[*shape]}".encode()


class _Known(NamedTuple):
    """The hash of a deeply nested value."""

    value: Any
    """Kept alive, since another object could get its identity."""
    piece: bytes
    taken: int
    """The number of values in it."""


class _Pieces:
    """Collects the bytes to hash."""

    def __init__(self, most: int | None) -> None:
        self.found: list[Any] = []
        """Bytes, and tensors on a GPU."""
        self._alive: list[Tensor] = []
        self._most = most
        self._whole = _WHOLE * most if most else 0
        self._left = _ITEMS
        self._objects = _OBJECTS
        self._known: dict[tuple[int, int], _Known] = {}

    def add(self, value: Any, depth: int = 0) -> None:
        """Add a value and its content."""
        self._left -= 1
        if self._left < 0 and self._most:
            return
        if isinstance(value, Tensor):
            self._add_tensor(value)
            return
        if isinstance(value, (np.ndarray, np.generic)):
            self._add_array(np.asarray(value), depth)
            return
        self.found.append(f"{type(value).__qualname__}(".encode())
        if isinstance(value, (int, float, complex, str, bytes, bytearray, PurePath)):
            self.found.append(_plain(value))
        elif isinstance(value, _NAMED):
            self.found.append(getattr(value, "__qualname__", value.__name__).encode())
        else:
            self._add_within(value, depth)
        self.found.append(b")")

    def _add_within(self, value: Any, depth: int) -> None:
        # Bounded: an object may contain itself.
        if depth < _FLAT:
            self._add_items(value, depth + 1)
        elif depth < _DEEPEST:
            self._add_known(value, depth)

    def _add_known(self, value: Any, depth: int) -> None:
        """Add the content of a value as a hash of its own, which is cached."""
        known = self._known.get((id(value), depth))
        if known is not None and (known.taken <= self._left or not self._most):
            self._left -= known.taken
            self.found.append(known.piece)
            return
        before = self._left
        piece = self._apart(self._add_items, value, depth + 1)
        taken = before - self._left
        # An incomplete one would be different elsewhere.
        if taken > _SMALL and (self._left >= 0 or not self._most):
            self._known[id(value), depth] = _Known(value, piece, taken)
        self.found.append(piece)

    def _apart(self, add: Callable[[Any, int], None], value: Any, depth: int) -> bytes:
        outer, self.found = self.found, []
        add(value, depth)
        inner, self.found = self.found, outer
        return _hash(_content(one.cpu()) if isinstance(one, Tensor) else one for one in inner).encode()

    def _add_tensor(self, value: Tensor) -> None:
        if type(value) is not Tensor:
            self.found.append(type(value).__qualname__.encode())
        value = sharded_tensor.local(value)
        if _is_strange(value):
            self._add_strange(value.detach())
            return
        if type(value) is not Tensor:
            # A subclass may override the functions below.
            value = value.as_subclass(Tensor)
        self.found.append(_head(Tensor, value.dtype, value.shape))
        if value.is_meta or not value.numel():
            return
        picked = value
        if self._most and value.numel() > self._whole:
            picked = sample(value, self._most)
        if picked.is_cpu:
            self._alive.append(picked)
            self.found.append(_content(picked))
        else:
            self.found.append(picked.detach())

    def _add_strange(self, value: Tensor) -> None:
        self.found.append(f"{value.layout}{value.dtype}".encode())
        if value.is_quantized:
            self.add(value.int_repr())
        elif value.layout is torch.sparse_coo:
            value = value.coalesce()
            self.add([value.shape, value.indices(), value.values()])
        elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
            self.add([value.shape, value.crow_indices(), value.col_indices(), value.values()])
        elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
            self.add([value.shape, value.ccol_indices(), value.row_indices(), value.values()])
        elif value.is_nested:
            self.add([*value.unbind()])

    def _add_array(self, value: np.ndarray[Any, Any], depth: int) -> None:
        # Not the name of the dtype, which differs between versions of numpy.
        self.found.append(f"{value.dtype.str}{value.shape}".encode())
        if value.dtype.kind in "OVT":
            # Their memory holds addresses, or gaps.
            self._add_within(value, depth)
            return
        if self._most and value.size > self._whole:
            flat: Any = value.reshape(-1) if value.flags.c_contiguous else value.flat
            self.found.append(flat[_places(value.size, self._most).numpy()].tobytes())
        else:
            self.found.append(value.tobytes())

    def _add_items(self, value: Any, depth: int) -> None:
        # Not by methods that the script may override: they may draw from a generator.
        if isinstance(value, dict):
            # Only its own method knows the order of an OrderedDict.
            items = OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value)
            for key, item in items:
                self.add(key, depth)
                self.add(item, depth)
        elif isinstance(value, (list, tuple)):
            self._add_row(
                list(list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)), depth
            )
        elif isinstance(value, deque):
            self._add_row([*deque.__iter__(value)], depth)
        elif isinstance(value, (set, frozenset)):
            # Their order differs between processes.
            inside = set.__iter__(value) if isinstance(value, set) else frozenset.__iter__(value)
            found = [self._apart(self.add, item, depth) for item in inside]
            self.found.append(_hash(sorted(found)).encode())
        elif isinstance(value, np.ndarray):
            self._add_row(value.reshape(-1).tolist(), depth)
        elif isinstance(value, (memoryview, array.array)):
            self.found.append(value.tobytes())
        elif isinstance(value, enum.Enum):
            # Not .name: a flag without bits has none, and the script may override it.
            self.add([value.__dict__.get("_name_"), value.__dict__.get("_value_")], depth)
        elif isinstance(value, _TOLD):
            self.found.append(repr(value).encode())
        elif isinstance(value, types.MappingProxyType):
            self.add({**value}, depth)
        elif _is_image(value):
            self._add_image(value)
        if type(value) not in _WITHOUT_ATTRIBUTES:
            self._add_attributes(value, depth)

    def _add_row(self, items: list[Any], depth: int) -> None:
        self.found.append(f"{len(items)} ".encode())
        if self._most and len(items) > self._whole:
            items = [items[place] for place in _places(len(items), self._most).tolist()]
        if _PLAIN.issuperset(map(type, items)) and _is_short(items):
            self.found.append(repr(items).encode(errors="surrogatepass"))
            return
        for item in items:
            self.add(item, depth)

    def _add_image(self, value: Any) -> None:
        self.found.append(f"{value.mode}{value.size}".encode())
        # An image that was not loaded yet would be loaded now, perhaps not as the script wants.
        if not getattr(value, "tile", None):
            self.found.append(value.tobytes())

    def _add_attributes(self, value: Any, depth: int) -> None:
        self._objects -= 1
        if isinstance(value, enum.Enum) or _is_image(value) or self._objects < 0:
            return
        if isinstance(own := getattr(value, "__dict__", None), dict) and own:
            self.add(own, depth)
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                # Python mangles names with two leading underscores.
                member = kind.__dict__.get(name) or kind.__dict__.get(f"_{kind.__name__.lstrip('_')}{name}")
                if isinstance(member, types.MemberDescriptorType):
                    self.add([name, _or_none(member, value)], depth)


def _or_none(member: types.MemberDescriptorType, value: Any) -> Any:
    try:
        return member.__get__(value)
    except AttributeError:
        return None


def _plain(value: Any) -> bytes:
    if isinstance(value, str):
        return str.encode(value, errors="surrogatepass")
    if isinstance(value, int):
        # In hexadecimal: Python refuses to print long decimal numbers.
        return int.__format__(value, "x").encode()
    if isinstance(value, float):
        return _DOUBLE(value)
    if isinstance(value, complex):
        return _DOUBLE(value.real) + _DOUBLE(value.imag)
    return bytes(value) if isinstance(value, (bytes, bytearray)) else str(value).encode()


def _is_short(items: Sequence[Any]) -> bool:
    return all(-(1 << 63) <= item < 1 << 63 for item in items if type(item) is int)


def _is_image(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)
