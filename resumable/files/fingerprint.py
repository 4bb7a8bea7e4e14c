"""Fingerprints of tensors, which tell without a copy whether they have changed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash
from torch import Tensor

from . import sharded_tensor, tensor_file

_AT_A_TIME = 8 << 20


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
