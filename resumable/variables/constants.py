"""Tensors, arrays and generators that the loop leaves alone: the next start may make others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash

from ..files import fingerprint, sharded_tensor, tensor_file
from ..objects import contents
from ..objects.walks import Node

KINDS = {"tensor", "array", "generator"}
LARGEST = 16 << 20
"""Of so many bytes in all the values are stored, beside a digest of each."""


def is_constant(node: Node) -> bool:
    """Whether an object that has not changed may be another one at the next start."""
    value = node.value
    if node.kind == "array":
        return type(value) is np.ndarray and not value.dtype.hasobject and fingerprint.mapped(value) is None
    return node.kind == "generator" or (
        node.kind == "tensor" and value.layout is torch.strided and not value.is_meta
    )


def size_of(value: Any) -> int:
    """Return how many bytes a constant takes in a checkpoint."""
    return int(getattr(value, "nbytes", 0)) or 5_000


def digest_of(value: Any) -> str:
    """Return a digest that is the same in every process, wherever the value lies."""
    if isinstance(value, torch.Tensor):
        here = sharded_tensor.local(value).detach().resolve_conj().resolve_neg().cpu()
        data: Any = fingerprint.memory_of(here)
        return f"{here.dtype} {[*here.shape]} {xxhash.xxh3_128_hexdigest(tensor_file.as_bytes(data))}"
    if isinstance(value, np.ndarray):
        data = fingerprint.bytes_of(value)
        return f"{value.dtype.str} {[*value.shape]} {xxhash.xxh3_128_hexdigest(data)}"
    return contents.digest([contents.of_generator(value)]).hex()
