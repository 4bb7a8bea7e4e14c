"""Fingerprints of tensors and arrays, which tell without a copy whether they have changed."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from . import sharded_tensor, tensor_file

_AT_A_TIME = 8 << 20
T = TypeVar("T", torch.Tensor, np.ndarray[Any, Any])


def of(tensors: Sequence[Tensor]) -> list[Any]:
    """Return a fingerprint of each tensor, equal only for the same bits; None is equal to nothing.

    That of a sharded tensor is of what is here.

    >>> weight = torch.zeros(3)
    >>> before = of([weight])
    >>> is_same(before, of([weight]))
    True
    >>> is_same(before, of([weight.add_(1)]))
    False
    """
    tensors = [*map(sharded_tensor.local, tensors)]
    on_host = [tensor for tensor in tensors if tensor.is_cpu]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = pool.map(_digest, on_host)
        # In this thread: its stream is the one of the training's kernels.
        return [next(digests) if tensor.is_cpu else _sum(tensor) for tensor in tensors]


def is_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two fingerprints are of the same bits."""
    return len(one) == len(other) and all(map(_is_same, one, other))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return bool(torch.equal(one, other))
    return one is not None and type(one) is type(other) and bool(one == other)


def _digest(tensor: Tensor) -> bytes:
    return xxhash.xxh3_128_digest(tensor_file.as_bytes(tensor))


def _sum(tensor: Tensor) -> Tensor | None:
    try:
        return on_device(tensor) if tensor.is_contiguous() else None
    except torch.OutOfMemoryError:
        return None


def on_device(tensor: Tensor) -> Tensor:
    """Return a weighted sum of the numbers of a contiguous tensor, computed on its device."""
    flat = tensor.detach().view(-1).view(torch.uint8)
    words = flat[: flat.numel() // 4 * 4].view(torch.int32) if flat.data_ptr() % 4 == 0 else flat
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # No two numbers have the same weight: otherwise swapping them would not show.
    for first, numbers in ((0, words), (words.numel(), flat[words.nbytes :])):
        for begin in range(0, numbers.numel(), _AT_A_TIME):
            part = numbers[begin : begin + _AT_A_TIME]
            at = first + begin
            weights = _mixed(torch.arange(at, at + part.numel(), device=tensor.device))
            # Odd weights, modulo 2^64: a change of one number is never lost.
            total += (part.to(torch.int64) * weights).sum()
    return total


def _mixed(numbers: Tensor) -> Tensor:
    # Consecutive weights would not notice +1, -2, +1.
    mixed = (numbers + 1) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 31)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 29)) | 1


def flat(value: Any) -> Any:
    """Return a view of an array with one dimension, or a copy, as Python's own class of arrays has it."""
    return np.ndarray.reshape(np.ndarray.view(value, np.ndarray), -1)


def of_array(array: Any) -> tuple[Hashable, ...]:
    """Return what of an array counts: its type, shape and strides, and its numbers or where they are."""
    facts = array.shape, str(array.dtype), array.strides
    if array.dtype.hasobject:
        return facts
    return *facts, mapped(array) or xxhash.xxh3_128_digest(bytes_of(array))


def bytes_of(value: Any) -> Any:
    """Return the bytes of an array, in row-major order."""
    return np.ascontiguousarray(flat(memory_of(value))).view(np.uint8)


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
    if isinstance(value, Tensor):
        held = value.untyped_storage()
        is_more = value.is_cpu and held.nbytes() < value.nbytes
        return torch.empty(0, dtype=torch.uint8).set_(held) if is_more else value
    base: Any = value
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base if base.nbytes < value.nbytes else value


def of_tensor(tensor: Tensor) -> tuple[Hashable, ...]:
    """Return what of a tensor counts: its type, shape and device, and its bits that are here."""
    tensor = sharded_tensor.local(tensor).detach()
    facts = str(tensor.dtype), tuple(tensor.shape), str(tensor.device)
    if tensor.is_meta or tensor.is_nested or tensor.is_quantized:
        return *facts, tensor.data_ptr() if not tensor.is_meta else 0, tensor._version
    if tensor.layout is torch.sparse_coo:
        return *facts, *map(of_tensor, (tensor._indices(), tensor._values()))
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    tensor = memory_of(tensor)
    if tensor.is_cpu:
        return *facts, _digest(tensor.resolve_conj().resolve_neg())
    return *facts, int(on_device(tensor.contiguous()))
