"""Divides the files of one checkpoint between the processes that write them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..files import large_files

if TYPE_CHECKING:
    from fractions import Fraction

Range = tuple[int, int]
"""The begin and the end of some bytes of a file."""


def plan(sizes: Mapping[str, int], count: int, whole: Collection[str] = ()) -> list[dict[str, Range]]:
    """Return for each of `count` writers the ranges it writes, by file: whole blocks, in about equal amounts.

    Every process gets the same result, whatever the order of `sizes`. Files in `whole` and small files have
    one writer each. The others are laid end to end, and each writer gets one stretch of them.

    >>> for mine in plan({"model": 3 << 24, "optimizer": 6 << 24, "rank": 800}, 2):
    ...     print(mine)
    {'model': (0, 50331648), 'optimizer': (0, 16777216)}
    {'rank': (0, 800), 'optimizer': (16777216, 100663296)}
    """
    if count < 1:
        raise ValueError(f"{count} processes cannot write anything")
    large = {path for path, size in sizes.items() if size >= 2 * large_files.BLOCK} - {*whole}
    found: list[dict[str, Range]] = [{} for _ in range(count)]
    loads = [0] * count
    for path in sorted(sizes.keys() - large, key=lambda path: (-sizes[path], path)):
        # Of the least busy the last one: the first has more to do than to write these files.
        writer = min(reversed(range(count)), key=loads.__getitem__)
        found[writer][path] = (0, sizes[path])
        loads[writer] += sizes[path]
    row = {path: sizes[path] for path in sorted(large)}
    cuts = [_block(row, position) for position in _positions(loads, sum(row.values()))]
    for mine, begin, end in zip(found, cuts, cuts[1:], strict=False):
        mine.update(_stretch(row, begin, end))
    return found


def _positions(loads: Sequence[int], total: int) -> Iterator[Fraction]:
    """Yield the bounds of the stretches that level the amounts as far as possible."""
    # Not above: each start of a training would wait for decimal numbers, too.
    from fractions import Fraction

    lower = sorted(loads)
    while lower[-1] > (level := Fraction(total + sum(lower), len(lower))):
        lower.pop()
    position = Fraction()
    yield position
    for load in loads:
        position += max(level - load, Fraction())
        yield position


def _block(row: Mapping[str, int], position: Fraction) -> int:
    """Return the begin of the block that a position is in, so that the first writer never gets more."""
    start = 0
    for size in row.values():
        if position < start + size:
            return start + int(position - start) // large_files.BLOCK * large_files.BLOCK
        start += size
    return start


def _stretch(row: Mapping[str, int], begin: int, end: int) -> Iterator[tuple[str, Range]]:
    start = 0
    for path, size in row.items():
        first, last = max(begin - start, 0), min(end - start, size)
        if first < last:
            yield path, (first, last)
        start += size
