"""A safetensors file, from tensors and back, without copying them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch

from .sealed import Json, parse, typed

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
_ENTRY = ("dtype", "shape", "data_offsets")
_MOST_DIMENSIONS = 64
_ALIGNMENT = 16  # what the widest dtype, complex128, needs


def to_safetensors(tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> list[memoryview]:
    """Return the content of a safetensors file, in pieces that share the tensors' memory.

    Tied names stand in the metadata, as `safetensors.torch.load_model` expects them.
    """
    # The widest first: every tensor then begins at a multiple of its element's size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Json] = {"__metadata__": {**aliases, "format": "pt"}}
    pieces = []
    position = 0
    for name, tensor in ordered:
        raw = as_bytes(tensor)
        code = DTYPES.get(tensor.dtype)
        shape = [*tensor.shape] if code else [*tensor.shape, tensor.element_size()]
        offsets = [position, position + raw.nbytes]
        header[name] = {"dtype": code or "U8", "shape": shape, "data_offsets": offsets}
        pieces.append(raw)
        position += raw.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return [memoryview(struct.pack("<Q", len(text)) + text), *pieces]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory, one row after the other."""
    # Not reshape: what counts as contiguous can have any stride where its length is 1.
    flat = tensor.contiguous().as_strided([tensor.numel()], [1]).view(torch.uint8)
    if tensor.dtype == torch.bool:
        # Memory that nobody has set yet holds any byte, and readers refuse all but 0 and 1.
        flat = flat.ne(0).view(torch.uint8)
    array: Any = flat.numpy()
    return memoryview(array)


def from_safetensors(data: memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file as views of `data`; ValueError if it is not one."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 + length:
        raise ValueError("the header is longer than the file")
    header = typed(dict, parse(data[8 : 8 + length]))
    body = data[8 + length :]
    typed(dict, header.pop("__metadata__", {}))
    entries = [(name, _entry(entry)) for name, entry in header.items()]
    found = {}
    position = 0
    for name, (dtype, shape, begin, end) in sorted(entries, key=lambda item: item[1][2:]):
        if begin != position or end > len(body):
            raise ValueError(f"{name} does not begin where the tensor before it ends")
        found[name] = _from_bytes(body[begin:end], dtype, shape)
        position = end
    if position != len(body):
        raise ValueError("there are bytes that belong to no tensor")
    return found


def _entry(entry: Json) -> tuple[torch.dtype, list[int], int, int]:
    try:
        dtype, shape, (begin, end) = (entry[k] for k in _ENTRY)
        sizes = [*typed(list, shape), begin, end]
        if len(entry) != len(_ENTRY):
            raise ValueError("unknown")
        if any(type(n) is not int or n < 0 for n in sizes) or len(shape) > _MOST_DIMENSIONS:
            raise ValueError("negative")
        if end - begin != math.prod(shape) * _DTYPES_BY_CODE[dtype].itemsize:
            raise ValueError("size")
    except (KeyError, TypeError, ValueError) as exc:
        raise ValueError(f"{entry!r} does not describe a tensor") from exc
    return _DTYPES_BY_CODE[dtype], shape, begin, end


def _from_bytes(raw: memoryview, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    if not len(raw):
        return _empty(dtype, shape)
    flat = torch.frombuffer(raw, dtype=torch.uint8)
    if dtype == torch.bool and bool((flat > 1).any()):
        raise ValueError("a boolean is neither 0 nor 1")
    return viewed(flat, dtype).reshape(shape)


def viewed(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as numbers of another dtype, in the same memory if they lie well in it."""
    # On an odd address the processor may refuse to work: a segmentation fault.
    aligned = flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()
    return aligned.view(dtype)


def _empty(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except (RuntimeError, TypeError) as exc:
        # Nothing times 2**63 is nothing, but torch cannot count to it.
        raise ValueError(f"no tensor has the shape {shape}") from exc


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, wherever they lie."""
    return one.shape == other.shape and as_bytes(one.cpu()) == as_bytes(other.cpu())
