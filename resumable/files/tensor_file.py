"""Safetensors files, from tensors and back, without copies."""

from __future__ import annotations

import functools
import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ..errors import CannotStore
from . import safetensors_header, sharded_tensor
from .strict_json import MOST, Json, is_more_than

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float64: "F64",
    # The oldest torch that this library runs with lacks it.
    **({torch.float8_e8m0fnu: "F8_E8M0"} if hasattr(torch, "float8_e8m0fnu") else {}),
}
"""Other dtypes are stored as their bytes (U8), and the JSON beside them says what they are."""

_DTYPES_BY_CODE = {code: dtype for dtype, code in DTYPES.items()}
_MOST_REMEMBERED = 2 << 20
_ALIGNMENT = 16  # what the widest dtype, complex128, needs


class Slot(NamedTuple):
    """A tensor in its file: dtype, shape and byte range."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class Slots(tuple[Slot, ...]):
    """The tensors of a file, in its order; what is asked of all of them is made once."""

    @functools.cached_property
    def names(self) -> list[str]:
        """Their names."""
        return [slot.name for slot in self]

    @functools.cached_property
    def kinds(self) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Their dtypes and shapes."""
        return [slot[1:3] for slot in self]

    @functools.cached_property
    def dtypes(self) -> set[torch.dtype]:
        """Their dtypes, each once."""
        return {slot.dtype for slot in self}

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Their bytes."""
        return [slot.end - slot.begin for slot in self]


class Layout(NamedTuple):
    """A safetensors file without its data: the same for as long as no tensor changes its shape."""

    header: bytes
    slots: tuple[Slot, ...]
    size: int

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of a file that lies in `memory`, as views of it."""
        return [
            memory[slot.begin : slot.end].view(slot.dtype).view(slot.shape)
            if slot.end > slot.begin
            else torch.empty(slot.shape, dtype=slot.dtype, device="cpu")
            for slot in self.slots
        ]


def layout(
    tensors: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    begins: Mapping[str, Sequence[int]] | None = None,
) -> Layout:
    """Return the layout of these tensors in a safetensors file.

    The names of tied tensors are in the metadata, as `safetensors.torch.load_model` expects them. If the
    tensors are boxes of larger ones, `begins` says where each begins in its whole.
    """
    # The widest dtype first: every tensor then begins at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    boxes = {} if begins is None else safetensors_header.box_metadata(begins)
    header: dict[str, Json] = {"__metadata__": {**aliases, **boxes, "format": "pt"}}
    places = []
    position = 0
    for name, tensor in ordered:
        code = DTYPES.get(tensor.dtype)
        shape = [*tensor.shape] if code else [*tensor.shape, tensor.element_size()]
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [position, end]}
        places.append((name, tensor.dtype, tuple(tensor.shape), position, end))
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    # Refuse here what no load would read.
    if 8 + len(text) > safetensors_header.LONGEST or is_more_than(MOST, text.decode()):
        raise CannotStore(
            f"{len(ordered):,} tensors are more than one file can describe.",
            fix="keep what is many in fewer, larger tensors. Nothing was written.",
        )
    start = 8 + len(text)
    slots = tuple(Slot(n, kind, shape, start + begin, start + end) for n, kind, shape, begin, end in places)
    return Layout(struct.pack("<Q", len(text)) + text, slots, start + position)


def to_safetensors(tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> bytearray:
    """Return the content of a safetensors file, in memory of its own."""
    planned = layout(tensors, aliases)
    content = bytearray(planned.size)
    content[: len(planned.header)] = planned.header
    for slot in planned.slots:
        content[slot.begin : slot.end] = as_bytes(tensors[slot.name])
    return content


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, in row-major order."""
    # Not reshape: a contiguous tensor can have any stride in a dimension of length 1.
    flat = tensor.detach().contiguous().as_strided([tensor.numel()], [1]).view(torch.uint8)
    if tensor.dtype == torch.bool:
        # Uninitialized memory holds any byte, and readers accept only 0 and 1.
        flat = flat.ne(0).view(torch.uint8)
    array: Any = flat.numpy()
    return memoryview(array)


def read_header(header: bytes | memoryview, size: int) -> Slots:
    """Return the tensors of a file of `size` bytes; ValueError if it is not a safetensors file."""
    # The next load of a run mostly reads the same header again.
    read = _remembered if len(header) <= _MOST_REMEMBERED else _read_header
    return read(bytes(header), size)


def _read_header(header: bytes, size: int) -> Slots:
    try:
        entries = safetensors_header.entries_of(header, size)
        names, codes, shapes, begins, ends = zip(*entries, strict=True) if entries else [()] * 5
        dtypes = map(_DTYPES_BY_CODE.__getitem__, codes)
        rows = zip(names, dtypes, shapes, begins, ends, strict=True)
        return Slots(map(functools.partial(tuple.__new__, Slot), rows))
    except KeyError as exc:
        raise ValueError(f"this version of torch has no {exc.args[0]}") from exc


_remembered = functools.lru_cache(4)(_read_header)


def from_safetensors(data: memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file as views of `data`; ValueError if it is not one."""
    start = safetensors_header.header_size(data[:8], len(data))
    slots = read_header(data[:start], len(data))
    return dict(zip((slot.name for slot in slots), from_row(data[start:], slots), strict=True))


def from_row(
    raw: memoryview, slots: Sequence[Slot], device: torch.device | None = None
) -> list[torch.Tensor]:
    """Return the tensors whose bytes are in `raw`, one after the other, as views where alignment allows.

    On a device they are views too: of what is copied there in one go for each dtype.
    """
    found: list[torch.Tensor] = []
    for flat, row in _by_dtype(raw, slots, device):
        shapes = [slot.shape for slot in row]
        if flat is None:
            found += [empty(slot, device) for slot in row]
        elif shapes.count(shapes[0]) == len(shapes):
            found += flat.view(len(row), *shapes[0]).unbind()
        else:
            parts = torch.split(flat, [*map(math.prod, shapes)])
            found += [
                empty(slot, device)
                if not part.numel()
                else part
                if len(slot.shape) == 1
                else part.view(slot.shape)
                for slot, part in zip(row, parts, strict=True)
            ]
    return found


def copied_from_row(raw: memoryview, slots: Sequence[Slot]) -> list[torch.Tensor]:
    """Return the tensors whose bytes are in `raw`, each in host memory of its own."""
    found: list[torch.Tensor] = []
    for flat, row in _by_dtype(raw, slots, None):
        shapes = [slot.shape for slot in row]
        if flat is not None and shapes.count(shapes[0]) == len(shapes):
            found += _UNBIND_COPY(flat.view(len(row), *shapes[0]))
        else:
            begin, end = row[0].begin - slots[0].begin, row[-1].end - slots[0].begin
            found += map(torch.clone, from_row(raw[begin:end], row))
    return found


_UNBIND_COPY: Any = torch.unbind_copy  # its type says that it returns nothing


def _by_dtype(
    raw: memoryview, slots: Sequence[Slot], device: torch.device | None
) -> Iterator[tuple[torch.Tensor | None, list[Slot]]]:
    """Yield the tensors of each dtype, as one on the device that has their bytes; None if there are none."""
    for dtype, same in itertools.groupby(slots, key=attrgetter("dtype")):
        row = [*same]
        content = raw[row[0].begin - slots[0].begin : row[-1].end - slots[0].begin]
        if not content.nbytes:
            yield None, row
            continue
        flat = torch.frombuffer(content, dtype=torch.uint8)
        refuse_no_booleans(flat, dtype)
        yield viewed(flat.to(device) if device else flat, dtype), row


def refuse_no_booleans(flat: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError if a boolean is neither 0 nor 1."""
    if dtype == torch.bool and bool((flat > 1).any()):
        raise ValueError("a boolean is neither 0 nor 1")


def viewed(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as numbers of another dtype, as a view if they are aligned."""
    # Access to an unaligned address may be a segmentation fault.
    aligned = flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()
    return aligned.view(dtype)


def empty(slot: Slot, device: torch.device | None = None) -> torch.Tensor:
    """Return an uninitialized tensor for the slot."""
    try:
        torch.empty(slot.shape, dtype=slot.dtype, device="meta")
    except (RuntimeError, TypeError) as exc:
        # A shape such as (0, 2**63) has no elements, but torch cannot count to 2**63.
        raise ValueError(f"no tensor has the shape {list(slot.shape)}") from exc
    return torch.empty(slot.shape, dtype=slot.dtype, device=device or "cpu")


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, on whatever device; of sharded ones what is here."""
    one, other = sharded_tensor.local(one), sharded_tensor.local(other)
    return one.shape == other.shape and as_bytes(one.cpu()) == as_bytes(other.cpu())
