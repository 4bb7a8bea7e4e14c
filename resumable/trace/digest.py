"""What tells tensors and batches apart, short enough to be written down at every boundary."""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from ..files import tensor_file
from .pending import Late

MOST = 1024
"""How many numbers of a tensor are looked at where not all of them are: enough for a training that has
parted from another, since that soon shows in all numbers."""

_WHOLE = 64
"""One with up to so many times as many is looked at as a whole: one after the other they are read fast."""

_DEEPEST = 16
_FLAT = 3
"""What is deeper than this has a digest of its own, which is made once however often it is there."""
_SMALL = 8
"""One of up to so many values is made again: to remember it takes longer."""
_ITEMS = 5_000
"""So many values of a batch are looked at: an object may lead to a whole dataset."""
_OBJECTS = 50_000
"""Of so many objects the attributes are looked at where a digest is one of everything."""

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
"""What take() of torch does not know, and as what it takes it."""


def of(value: Any, most: int | None = None) -> str:
    """Return a digest of a batch, or of any value: of all its bits, or of a sample of each large tensor.

    No code of the script is run for it, and nothing is drawn from an iterator.

    >>> of({"x": torch.zeros(3), "y": [1, 2]}) == of({"x": torch.zeros(3), "y": [1, 2]})
    True
    >>> of(torch.zeros(3)) == of(-torch.zeros(3))
    False
    """
    found = soon(value, most)
    return found if isinstance(found, str) else str(found.value())


def soon(value: Any, most: int | None = None) -> str | Late:
    """Return the same; if part of the value is on a GPU, as soon as that has come so far."""
    pieces = _Pieces(most)
    pieces.add(value)
    if not pieces.on_device:
        return _hash(pieces.found)
    late = _LatePieces(_kept(pieces.found), True)
    return Late(pieces.on_device, lambda copies: late.digest([*map(_content, copies)], {}))


def of_tensors(text: str, tensors: Iterable[Tensor], most: int, whole: int) -> str | Late:
    """Return a digest of a text and many tensors, at little more than what it costs to look at them.

    Of those with more than `whole` numbers it is one of `most`; which have which shape is not in it.
    """
    found: list[Any] = [text.encode(errors="surrogatepass")]
    alive: list[Tensor] = []
    rows: dict[Any, dict[int, Tensor]] = {}
    with torch.no_grad():
        for tensor in tensors:
            picked = tensor if tensor.numel() <= whole else sample(tensor, most)
            if picked.is_cpu:
                alive.append(picked)
                found.append(_content(picked))
            else:
                rows.setdefault((picked.dtype, picked.device), {})[len(found)] = picked
                found.append(b"")
    return _joined(found, rows) if rows else _hash(found)


def _joined(found: list[Any], rows: Mapping[Any, Mapping[int, Tensor]]) -> Late:
    """Return the digest of pieces of which some are on devices, from each of which one copy is made."""
    found = [bytes(piece) for piece in found]
    lengths = [{index: tensor.numel() for index, tensor in row.items()} for row in rows.values()]

    def put_in(copies: Sequence[Tensor]) -> str:
        for row, copy in zip(lengths, copies, strict=True):
            for index, part in zip(row, torch.split(copy, [*row.values()]), strict=True):
                found[index] = bytes(_content(part))
        return _hash(found)

    with torch.no_grad():
        flat = [[_as_numbers(tensor.reshape(-1)) for tensor in row.values()] for row in rows.values()]
        return Late([torch.cat(row) for row in flat], put_in)


def _as_numbers(tensor: Tensor) -> Tensor:
    # (torch cannot join 8-bit floats)
    plain = tensor.resolve_conj().resolve_neg()
    return plain.view(torch.uint8) if plain.dtype.itemsize == 1 else plain


def sample(tensor: Tensor, most: int | None) -> Tensor:
    """Return at most so many of a tensor's numbers, evenly spread over it; None: all."""
    live = tensor.detach()
    if most is None or live.numel() <= most or _is_strange(live):
        return live
    # Not reshape: it would copy all of the tensor first, and an expanded one can be larger than the memory.
    numbers = live.view(_UNTAKEN[live.dtype]) if live.dtype in _UNTAKEN else live
    return numbers.take(_places(live.numel(), most, live.device)).view(live.dtype)


@functools.lru_cache(256)
def _places(count: int, most: int, device: torch.device | None = None) -> Tensor:
    """Return where the numbers lie that are looked at: in rows of four, which are fetched at once."""
    # In no regular distance: one that fits the length of a row would see a few columns of all rows.
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
    """Return the bytes of a tensor in host memory; what it returns must not outlive the tensor."""
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return bytes(_content(plain))
    # Not numpy(): the script could not resize the tensor's memory any more.
    size, address = tensor.nbytes, tensor.data_ptr()
    return (ctypes.c_char * size).from_address(address) if address and size else b""


@functools.lru_cache(4096)
def _head(kind: type, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return f"{kind.__qualname__}({dtype}{[*shape]}".encode()


class _LatePieces(NamedTuple):
    """Pieces of which some are on a GPU: of those they have the number."""

    pieces: list[Any]
    is_ordered: bool

    def digest(self, copies: Sequence[Any], known: dict[int, str]) -> str:
        """Return the digest, once those are there."""
        if id(self) not in known:
            found = [self._bytes(piece, copies, known) for piece in self.pieces]
            known[id(self)] = _hash(found if self.is_ordered else sorted(found))
        return known[id(self)]

    def _bytes(self, piece: Any, copies: Sequence[Any], known: dict[int, str]) -> Any:
        if isinstance(piece, _LatePieces):
            return piece.digest(copies, known).encode()
        return copies[piece] if isinstance(piece, int) else piece


_LATE = frozenset({int, _LatePieces})


def _closed(pieces: list[Any], is_ordered: bool = True) -> Any:
    """Return the digest of pieces; or what it can be made from, if some are on a GPU."""
    if not _LATE.isdisjoint(map(type, pieces)):
        return _LatePieces(_kept(pieces), is_ordered)
    return _hash(pieces if is_ordered else sorted(pieces)).encode()


def _kept(pieces: Iterable[Any]) -> list[Any]:
    # (what is on the host may be written to before the device has come so far)
    return [piece if isinstance(piece, (bytes, int, _LatePieces)) else bytes(piece) for piece in pieces]


class _Known(NamedTuple):
    """What was made of a value that is deep inside."""

    value: Any
    """Kept, since another may get the identity of one that is gone."""
    piece: Any
    taken: int
    """So many values are in it."""


class _Pieces:
    """The bytes that a digest is made from."""

    def __init__(self, most: int | None) -> None:
        self.found: list[Any] = []
        self.on_device: list[Tensor] = []
        """In `found` stand their numbers."""
        self._alive: list[Tensor] = []
        self._most = most
        self._whole = _WHOLE * most if most else 0
        self._left = _ITEMS
        self._objects = _OBJECTS
        self._known: dict[tuple[int, int], _Known] = {}

    def add(self, value: Any, depth: int = 0) -> None:
        """Add a value, and what is in it."""
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
        # As deep as this: what leads to itself has no end.
        if depth < _FLAT:
            self._add_items(value, depth + 1)
        elif depth < _DEEPEST:
            self._add_known(value, depth)

    def _add_known(self, value: Any, depth: int) -> None:
        """Add what is in a value by a digest of its own: that of an equal one, and of itself elsewhere."""
        known = self._known.get((id(value), depth))
        if known is not None and (known.taken <= self._left or not self._most):
            self._left -= known.taken
            self.found.append(known.piece)
            return
        before = self._left
        piece = self._apart(self._add_items, value, depth + 1)
        taken = before - self._left
        # (one that was cut short is not what it would be elsewhere)
        if taken > _SMALL and (self._left >= 0 or not self._most):
            self._known[id(value), depth] = _Known(value, piece, taken)
        self.found.append(piece)

    def _apart(self, add: Callable[[Any, int], None], value: Any, depth: int) -> Any:
        outer, self.found = self.found, []
        add(value, depth)
        inner, self.found = self.found, outer
        return _closed(inner)

    def _add_tensor(self, value: Tensor) -> None:
        if type(value) is not Tensor:
            self.found.append(type(value).__qualname__.encode())
        if _is_strange(value):
            self._add_strange(value.detach())
            return
        if type(value) is not Tensor:
            # (its own class may have its own idea of what the functions below do)
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
            self.found.append(len(self.on_device))
            self.on_device.append(picked.detach())

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
        # (which numpy named a dtype how does not count)
        self.found.append(f"{value.dtype.str}{value.shape}".encode())
        if value.dtype.kind in "OVT":
            # (what lies in the memory of these are addresses, or gaps)
            self._add_within(value, depth)
            return
        if self._most and value.size > self._whole:
            flat: Any = value.reshape(-1) if value.flags.c_contiguous else value.flat
            self.found.append(flat[_places(value.size, self._most).numpy()].tobytes())
        else:
            self.found.append(value.tobytes())

    def _add_items(self, value: Any, depth: int) -> None:
        # Not by the methods of the value: they are the script's, and may draw from a generator.
        if isinstance(value, dict):
            # (only its own method knows the order of an OrderedDict)
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
            # (their order changes from process to process)
            inside = set.__iter__(value) if isinstance(value, set) else frozenset.__iter__(value)
            found = [self._apart(self.add, item, depth) for item in inside]
            self.found.append(_closed(found, is_ordered=False))
        elif isinstance(value, np.ndarray):
            self._add_row(value.reshape(-1).tolist(), depth)
        elif isinstance(value, (memoryview, array.array)):
            self.found.append(value.tobytes())
        elif isinstance(value, enum.Enum):
            # (a flag of which no bit is set has no name, and one of the script's may have another .name)
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
        # (one that was not read from its file yet would be read now, and perhaps not as the script wants)
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
                # (a name with two underscores in front lies under another one)
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
        # (not in decimal: Python refuses to write many digits)
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
