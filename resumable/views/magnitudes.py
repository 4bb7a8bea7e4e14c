"""How large the numbers of a tensor are, and how far those of two lie apart; from bytes, without torch."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class Size:
    """How large numbers are, added up piece by piece."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    squares: float = 0.0
    """The sum of the squares of those that are finite."""
    is_known: bool = True
    """False for bytes that are no numbers."""

    @property
    def norm(self) -> float | None:
        """The square root of the sum of the squares; None where they are no numbers."""
        return math.sqrt(self.squares) if self.is_known else None

    def add(self, other: Size) -> None:
        """Take in another piece."""
        self.count += other.count
        self.nan += other.nan
        self.inf += other.inf
        self.squares += other.squares
        self.is_known &= other.is_known


@dataclass(slots=True)
class Distance:
    """How far numbers lie apart, added up piece by piece."""

    changed: int = 0
    """How many differ in a bit."""
    most: float = 0.0
    """The largest difference of two that are both finite."""
    squares: float = 0.0
    """The sum of the squares of those differences."""
    before: Size = field(default_factory=Size)
    not_finite: int = 0
    """How many were finite, and are not any more."""

    @property
    def relative(self) -> float | None:
        """The norm of the difference, as a share of the norm before; None where that is none."""
        norm = self.before.norm
        if norm is None or (not norm and self.squares):
            return None
        return math.sqrt(self.squares) / norm if norm else 0.0

    def add(self, other: Distance) -> None:
        """Take in another piece."""
        self.changed += other.changed
        self.most = max(self.most, other.most)
        self.squares += other.squares
        self.before.add(other.before)
        self.not_finite += other.not_finite


def width(dtype: str) -> int | None:
    """Return the bytes of one element; None if nobody here knows the dtype.

    >>> width("bfloat16"), width("<U3"), width("complex32")
    (2, 12, None)
    """
    if dtype in _WIDTHS:
        return _WIDTHS[dtype]
    known = _numpy(dtype)
    return known.itemsize if known else None


def is_number(dtype: str) -> bool:
    """Whether numbers of that dtype can be added up here.

    >>> is_number("float8_e5m2"), is_number("complex32")
    (True, False)
    """
    known = _numpy(dtype)
    return dtype in _WIDTHS or (known is not None and known.kind in "biufc")


def size_of(raw: memoryview, dtype: str, width: int) -> Size:
    """Return how large the numbers are that lie in `raw`.

    >>> import struct
    >>> size_of(memoryview(struct.pack("<3f", 3, 4, float("nan"))), "float32", 4)
    Size(count=3, nan=1, inf=0, squares=25.0, is_known=True)
    """
    if not is_number(dtype):
        return Size(raw.nbytes // width, is_known=False)
    with _quietly():
        return _size(_decoded(raw, dtype))


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
    with _quietly():
        values = _decoded(before, dtype)
        size = _size(values)
        return _distance(values, _decoded(after, dtype), changed, size) if changed else Distance(before=size)


def _quietly() -> AbstractContextManager[None]:
    import numpy as np

    # What is not finite is counted; numpy would warn of it on the terminal.
    return np.errstate(all="ignore")


def _distance(values: Array, gaps: Array, changed: int, size: Size) -> Distance:
    import numpy as np

    # In place: to be given fresh memory again and again takes longer than to compute.
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
    import numpy as np

    squares = _squares(values)
    if math.isfinite(squares):
        return Size(values.size, squares=squares)
    finite = values[np.isfinite(values)]
    nan = int(np.count_nonzero(np.isnan(values)))
    return Size(values.size, nan, values.size - finite.size - nan, _squares(finite))


def _squares(values: Array) -> float:
    import numpy as np

    if values.dtype.kind == "c":
        return _squares(values.real) + _squares(values.imag)
    # Not dot(): its threads and those that read would be in each other's way.
    return float(np.einsum("i,i->", values, values))


def _changed(before: memoryview, after: memoryview, width: int) -> int:
    import numpy as np

    kind = f"u{width}" if width in (1, 2, 4, 8) else "u1"
    differ = np.frombuffer(before, kind) != np.frombuffer(after, kind)
    if kind == "u1" and width > 1:
        differ = differ.reshape(-1, width).any(axis=1)
    return int(np.count_nonzero(differ))


def _decoded(raw: memoryview, dtype: str) -> Array:
    """Return the numbers as float64 or complex128."""
    import numpy as np

    if dtype == "bfloat16":
        # The upper half of a float32.
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    if dtype in _EIGHT_BITS:
        return _table(dtype)[np.frombuffer(raw, np.uint8)]
    known = _numpy(dtype)
    assert known is not None
    if known.kind == "b":
        known = np.dtype(np.uint8)
    return np.frombuffer(raw, known).astype(np.complex128 if known.kind == "c" else np.float64)


_EIGHT_BITS = {
    # bits of the exponent and the mantissa, and what is added to the exponent
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2fnuz": (5, 2, 16),
    "float8_e8m0fnu": (8, 0, 127),
}
_WIDTHS = {"bfloat16": 2, **dict.fromkeys(_EIGHT_BITS, 1)}


@functools.cache
def _table(dtype: str) -> Array:
    """Return what each of the 256 bytes means."""
    import numpy as np

    return np.array([_meaning(dtype, byte) for byte in range(256)])


def _meaning(dtype: str, byte: int) -> float:
    exponent_bits, mantissa_bits, bias = _EIGHT_BITS[dtype]
    if dtype == "float8_e8m0fnu":
        return math.nan if byte == 255 else 2.0 ** (byte - bias)
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    if dtype.endswith("fnuz"):
        if byte == 0x80:
            return math.nan
    elif dtype == "float8_e4m3fn":
        if byte & 0x7F == 0x7F:
            return math.nan
    elif exponent == (1 << exponent_bits) - 1:
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


@functools.cache
def _numpy(dtype: str) -> Any | None:
    """Return numpy's dtype of that name, if it has one."""
    import numpy as np

    # (numpy's own parser would also take "O", whose bytes are pointers)
    if _KNOWN.fullmatch(dtype):
        with contextlib.suppress(TypeError, ValueError):
            return np.dtype(dtype)
    return None


_KNOWN = re.compile(
    r"bool|u?int(?:8|16|32|64)|float(?:16|32|64)|complex(?:64|128)|"
    r"[<>|][biufcSUmM][1-9][0-9]{0,8}(?:\[[0-9a-zA-Z]{1,8}\])?"
)
