"""Every state in which a power cut, or a kill, could leave a disk while a program was at work on it.

*kill*: all calls up to one have been made, the last write perhaps half. *ordered*: names come on the disk in
the order in which they were given, as a journal does it; of the bytes that were not flushed all, half, none
or zeros. *posix*: what was not flushed is on the disk or is not, name by name and write by write.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from strace_log import Disk, Flushed, Named, Op, Said, Sized, Told, Traced, Wrote

Fate = Literal["lost", "half", "zeros"]


class Cut(NamedTuple):
    """A moment at which the power goes, and what has become of the operations that were not flushed."""

    model: str
    count: int
    """How many operations had been made."""
    fates: tuple[tuple[int, Fate], ...]


class State(NamedTuple):
    """What a cut has left, and what had been said before it."""

    cut: Cut
    disk: Disk
    said: list[Said]


def states(traced: Traced, most: int, seed: int = 0) -> Iterator[State]:
    """Yield at most so many states; no two have the same names and bytes when the same had been promised.

    Where there are more than that, the kills come first, then half of the rest is "ordered".
    """
    chance, seen = random.Random(seed), set[object]()
    kills, ordered, posix = [*_kills(traced.ops)], [*_ordered(traced.ops)], _posix(traced.ops, chance)
    chance.shuffle(ordered)
    left = most
    for cuts, share in ((kills, 1.0), (ordered, 0.4), (posix, 1.0)):
        room = left if share == 1.0 else int(left * share)
        for state in _distinct(traced, cuts, seen):
            if room == 0:
                break
            yield state
            room, left = room - 1, left - 1


def _distinct(traced: Traced, cuts: Iterable[Cut], seen: set[object]) -> Iterator[State]:
    repeated = 0
    for cut in cuts:
        disk = left_by(traced, cut)
        said = [op.said for op in traced.ops[: cut.count] if isinstance(op, Told)]
        # The same files, when more has been promised, are another case
        key = (len(said), frozenset(_content(disk)))
        repeated += 1
        if key not in seen:
            seen.add(key)
            repeated = 0
            yield State(cut, disk, traced.known + said)
        elif repeated > _DULL:
            return


def _content(disk: Disk) -> Iterator[object]:
    for path, node in disk.walk():
        yield path, disk.files.get(node, disk.links.get(node))


def left_by(traced: Traced, cut: Cut) -> Disk:
    """Return the disk as it is found after a cut."""
    fates, disk = dict(cut.fates), traced.before.copy()
    for index, op in enumerate(traced.ops[: cut.count]):
        fate = fates.get(index)
        if fate != "lost":
            disk.change(_torn(op, fate) if fate else op)
    return disk


def _torn(op: Op, fate: Fate) -> Op:
    assert isinstance(op, Wrote)
    data = op.data[: len(op.data) // 2] if fate == "half" else bytes(len(op.data))
    return op._replace(data=data)


def _kills(ops: Sequence[Op]) -> Iterator[Cut]:
    # The later ones first: more has been promised by then.
    for count in range(len(ops), -1, -1):
        yield Cut("kill", count, ())
        if count and isinstance(last := ops[count - 1], Wrote) and len(last.data) > 1:
            yield Cut("kill", count, ((count - 1, "half"),))


def _moments(ops: Sequence[Op]) -> list[int]:
    """Return when to cut: what can be lost before can be lost at the next flush, when more is promised."""
    return [*reversed([count for count, op in enumerate(ops) if isinstance(op, Flushed)]), len(ops)]


def _pending(ops: Sequence[Op], count: int) -> list[int]:
    """Return the operations that a cut at this moment could undo."""
    flushed: dict[int, int] = {}
    for op in ops[:count]:
        if isinstance(op, Flushed):
            flushed[op.node] = max(op.began, flushed.get(op.node, 0))
    return [index for index, op in enumerate(ops[:count]) if not _is_durable(op, index, flushed)]


def _is_durable(op: Op, index: int, flushed: dict[int, int]) -> bool:
    if isinstance(op, Named):
        # Moved from folder to folder, it is in both places or in none.
        return any(index < flushed.get(folder, 0) for folder, _, _ in op.changes)
    return not isinstance(op, (Wrote, Sized)) or index < flushed.get(op.node, 0)


def _ordered(ops: Sequence[Op]) -> Iterator[Cut]:
    for count in _moments(ops):
        pending = _pending(ops, count)
        names = [index for index in pending if isinstance(ops[index], Named)]
        writes = [index for index in pending if not isinstance(ops[index], Named)]
        # The journal has come so far: all names after that are lost.
        for lost in {len(names), *range(min(len(names), _NAMES)), len(names) // 2}:
            gone: list[tuple[int, Fate]] = [(index, "lost") for index in names[len(names) - lost :]]
            for fates in _fates_of_files(ops, writes):
                yield Cut("ordered", count, tuple(sorted(gone + fates)))


def _fates_of_files(ops: Sequence[Op], writes: Sequence[int]) -> Iterator[list[tuple[int, Fate]]]:
    """Yield what may have become of the bytes: all files have met with the same, or only one of them."""
    by_file: dict[int, list[int]] = {}
    for index in writes:
        op = ops[index]
        assert isinstance(op, (Wrote, Sized))
        by_file.setdefault(op.node, []).append(index)
    yield []
    fates: tuple[Fate, ...] = ("lost", "half", "zeros")
    for fate in fates:
        for files in ([*by_file.values()], *([one] for one in by_file.values() if len(by_file) > 1)):
            yield [(index, fate) for one in files for index in one if _can_meet(ops[index], fate)]


def _can_meet(op: Op, fate: Fate) -> bool:
    return fate == "lost" or isinstance(op, Wrote)


def _posix(ops: Sequence[Op], chance: random.Random) -> Iterator[Cut]:
    """Yield the plain cases of all moments, in no order, and then any others without end."""
    moments = [(count, pending) for count in _moments(ops) if (pending := _pending(ops, count))]
    plain = [Cut("posix", count, fates) for count, pending in moments for fates in _plain(ops, pending)]
    chance.shuffle(plain)
    yield from plain
    many = [(count, pending) for count, pending in moments if len(pending) > _FEW]
    while many:
        count, pending = chance.choice(many)
        yield Cut("posix", count, _any(ops, pending, chance))


def _plain(ops: Sequence[Op], pending: Sequence[int]) -> Iterator[tuple[tuple[int, Fate], ...]]:
    def lost(some: Iterable[int]) -> tuple[tuple[int, Fate], ...]:
        return tuple((index, "lost") for index in some)

    if len(pending) <= _FEW:
        for size in range(len(pending) + 1):
            yield from map(lost, itertools.combinations(pending, size))
    else:
        yield from (lost(()), lost(pending))
        for index in pending:
            yield lost([index])
            yield lost(other for other in pending if other != index)
    for index in pending:
        if isinstance(ops[index], Wrote):
            yield ((index, "half"),)
            yield ((index, "zeros"),)


def _any(ops: Sequence[Op], pending: Sequence[int], chance: random.Random) -> tuple[tuple[int, Fate], ...]:
    few = chance.sample(pending, 2)
    unlucky = few if chance.random() < 0.3 else [one for one in pending if chance.random() < 0.5]
    fates: list[tuple[int, Fate]] = []
    for index in sorted(unlucky):
        is_torn = isinstance(ops[index], Wrote) and chance.random() < 0.3
        fates.append((index, chance.choice(("half", "zeros")) if is_torn else "lost"))
    return tuple(fates)


_FEW = 8  # of so many every subset is tried
_NAMES = 12
_DULL = 1000  # if so many in a row have been there before, there are hardly any others
