"""How large the numbers of a tensor are, and how far those of two are apart, from their bytes."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..files.tensor_file import DTYPES

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Size:
    """How large numbers are, added up piece by piece."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    squares: float = 0.0
    """The sum of the squares of the finite ones."""
    is_known: bool = True
    """False for bytes that are not numbers."""

    @property
    def norm(self) -> float | None:
        """The square root of the sum of the squares; None if they are not numbers."""
        return math.sqrt(self.squares) if self.is_known else None

    def add(self, other: Size) -> None:
        """Add another piece."""
        self.count += other.count
        self.nan += other.nan
        self.inf += other.inf
        self.squares += other.squares
        self.is_known &= other.is_known


@dataclass(slots=True)
class Distance:
    """How far numbers are apart, added up piece by piece."""

    changed: int = 0
    """How many differ in a bit."""
    most: float = 0.0
    """The largest difference of two finite numbers."""
    squares: float = 0.0
    """The sum of the squares of those differences."""
    before: Size = field(default_factory=Size)
    not_finite: int = 0
    """How many were finite before and are not after."""

    @property
    def relative(self) -> float | None:
        """The norm of the difference as a share of the norm before; None if that is zero or unknown."""
        norm = self.before.norm
        if norm is None or (not norm and self.squares):
            return None
        return math.sqrt(self.squares) / norm if norm else 0.0

    def add(self, other: Distance) -> None:
        """Add another piece."""
        self.changed += other.changed
        self.most = max(self.most, other.most)
        self.squares += other.squares
        self.before.add(other.before)
        self.not_finite += other.not_finite


def width(dtype: str) -> int | None:
    """Return the bytes of one element; None for an unknown dtype.

    >>> width("bfloat16"), width("<U3"), width("complex32")
    (2, 12, None)
    """
    if dtype in _FLOATS:
        return _FLOATS[dtype].itemsize
    known = _numpy(dtype)
    return known.itemsize if known else None


def is_number(dtype: str) -> bool:
    """Whether numbers of that dtype can be added up.

    >>> is_number("float8_e5m2"), is_number("complex32")
    (True, False)
    """
    known = _numpy(dtype)
    return dtype in _FLOATS or (known is not None and known.kind in "biufc")


# What is not finite is counted; NumPy would warn about it on the terminal.
@np.errstate(all="ignore")
def size_of(raw: memoryview, dtype: str, width: int) -> Size:
    """Return how large the numbers in `raw` are.

    >>> import struct
    >>> size_of(memoryview(struct.pack("<3f", 3, 4, float("nan"))), "float32", 4)
    Size(count=3, nan=1, inf=0, squares=25.0, is_known=True)
    """
    return _size(_decoded(raw, dtype)) if is_number(dtype) else Size(raw.nbytes // width, is_known=False)


@np.errstate(all="ignore")
def distance_of(before: memoryview, after: memoryview, dtype: str, width: int) -> Distance:
    """Return how far the numbers in `after` are from those in `before`.

    >>> import struct
    >>> one, other = (memoryview(struct.pack("<2f", 3, x)) for x in (4, 4.5))
    >>> found = distance_of(one, other, "float32", 4)
    >>> found.changed, found.most, found.relative
    (1, 0.5, 0.1)
    """
    changed = _changed(before, after, width)
    if not is_number(dtype):
        return Distance(changed, before=Size(before.nbytes // width, is_known=False))
    values = _decoded(before, dtype)
    size = _size(values)
    return _distance(values, _decoded(after, dtype), changed, size) if changed else Distance(before=size)


def _distance(values: Array, gaps: Array, changed: int, size: Size) -> Distance:
    # In place: allocating fresh memory for each piece takes longer than the computation.
    gaps -= values
    gaps = np.abs(gaps, out=None if gaps.dtype.kind == "c" else gaps)
    squares = _squares(gaps)
    not_finite = 0
    if not math.isfinite(squares):
        are_far = np.isfinite(gaps)
        not_finite = int(np.count_nonzero(np.isfinite(values) & ~are_far))
        gaps = gaps[are_far]
        squares = _squares(gaps)
    return Distance(changed, float(gaps.max(initial=0.0)), squares, size, not_finite)


def _size(values: Array) -> Size:
    squares = _squares(values)
    if math.isfinite(squares):
        return Size(values.size, squares=squares)
    finite = values[np.isfinite(values)]
    nan = int(np.count_nonzero(np.isnan(values)))
    return Size(values.size, nan, values.size - finite.size - nan, _squares(finite))


def _squares(values: Array) -> float:
    if values.dtype.kind == "c":
        return _squares(values.real) + _squares(values.imag)
    # Not dot(): its threads would compete with those that read.
    return float(np.einsum("i,i->", values, values))


def _changed(before: memoryview, after: memoryview, width: int) -> int:
    kind = f"u{width}" if width in (1, 2, 4, 8) else "u1"
    differ = np.frombuffer(before, kind) != np.frombuffer(after, kind)
    if kind == "u1" and width > 1:
        differ = differ.reshape(-1, width).any(axis=1)
    return int(np.count_nonzero(differ))


def _decoded(raw: memoryview, dtype: str) -> Array:
    """Return the numbers as float64 or complex128."""
    known = _numpy(dtype)
    if known is None:
        # Copied: torch cannot view what lies on an odd address.
        bits = torch.tensor(np.frombuffer(raw, np.uint8))
        wide: Array = bits.view(_FLOATS[dtype]).to(torch.float64).numpy()
        return wide
    if known.kind == "b":
        known = np.dtype(np.uint8)
    return np.frombuffer(raw, known).astype(np.complex128 if known.kind == "c" else np.float64)


_FLOATS = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES if dtype.is_floating_point}
"""The dtypes of torch that NumPy may lack, by name."""


@functools.cache
def _numpy(dtype: str) -> np.dtype[Any] | None:
    """Return NumPy's dtype of that name, if it has one."""
    # NumPy's own parser would also take "O", whose bytes are pointers.
    if _KNOWN.fullmatch(dtype):
        with contextlib.suppress(TypeError, ValueError):
            return np.dtype(dtype)
    return None


_KNOWN = re.compile(
    r"bool|u?int(?:8|16|32|64)|float(?:16|32|64)|complex(?:64|128)|"
    r"[<>|][biufcSUmM][1-9][0-9]{0,8}(?:\[[0-9a-zA-Z]{1,8}\])?"
)
