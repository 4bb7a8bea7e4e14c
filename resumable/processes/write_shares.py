"""Who writes what, where several processes write the files of one checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction

from ..files import large_files

Range = tuple[int, int]
"""Where some bytes of a file begin and end."""


def plan(sizes: Mapping[str, int], count: int, whole: Collection[str] = ()) -> list[dict[str, Range]]:
    """Return for each of `count` writers what it writes, by file: whole blocks, and all about as much.

    Every process finds the same, whatever the order of `sizes`. Files in `whole` and small
    ones have one writer each. The others lie in a row, of which each writer has one stretch.

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
        # The last of the least busy: the first one has more to do than to write these files.
        writer = min(reversed(range(count)), key=loads.__getitem__)
        found[writer][path] = (0, sizes[path])
        loads[writer] += sizes[path]
    row = {path: sizes[path] for path in sorted(large)}
    cuts = [_block(row, position) for position in _positions(loads, sum(row.values()))]
    for mine, begin, end in zip(found, cuts, cuts[1:], strict=False):
        mine.update(_stretch(row, begin, end))
    return found


def _positions(loads: Sequence[int], total: int) -> Iterator[Fraction]:
    """Yield where the stretches begin and end with which all have the same to write, as far as possible."""
    lower = sorted(loads)
    while lower[-1] > (level := Fraction(total + sum(lower), len(lower))):
        lower.pop()
    position = Fraction()
    yield position
    for load in loads:
        position += max(level - load, Fraction())
        yield position


def _block(row: Mapping[str, int], position: Fraction) -> int:
    """Return where the block begins in which a position lies: the first writer never gets more."""
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
