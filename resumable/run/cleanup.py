"""Which checkpoints `resumable prune` removes; a pure decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from . import policy
from .manifest import Goal
from .policy import Facts, Keep


@dataclass(frozen=True, slots=True)
class Wish:
    """The checkpoints to remove: those that `keep` does not keep, damaged ones, abandoned ones."""

    keep: Keep | None = None
    damaged: bool = False
    abandoned: bool = False


class Verdict(NamedTuple):
    """The verdict on a checkpoint: whether it is removed, and why."""

    number: int
    goes: bool
    why: str


@dataclass(frozen=True, slots=True)
class Standing:
    """The known facts about the checkpoints of a run."""

    intact: Sequence[Facts]
    """Oldest first; those that are not known to be damaged."""
    damaged: Collection[int]
    unread: Collection[int]
    """Those that cannot be read at the moment, which proves nothing: they stay."""
    abandoned: Collection[int]
    """Those that are not ancestors of the newest."""
    newest: int
    """The newest one whose every byte was verified: a resume uses it."""
    best: int | None
    goal: Goal | None


def verdicts(run: Standing, wish: Wish) -> list[Verdict]:
    """Return whether each checkpoint goes, oldest first; the newest intact one and the best never do.

    >>> facts = [Facts(number, step=10 * number) for number in (1, 2, 3, 4)]
    >>> found = verdicts(Standing(facts, [5], [], [], newest=4, best=1, goal=None), Wish(Keep(2)))
    >>> [(one.number, one.why) for one in found if one.goes], [one.why for one in found if not one.goes]
    ([(2, 'not kept')], ['best', 'kept', 'newest', 'damaged'])
    """
    why = {number: Verdict(number, wish.damaged, "damaged") for number in run.damaged}
    why |= {number: Verdict(number, False, "cannot be read") for number in run.unread}
    for facts in run.intact:
        why[facts.number] = Verdict(facts.number, False, "")
    others = [facts for facts in run.intact if not (wish.abandoned and facts.number in run.abandoned)]
    gone = {*policy.to_prune(others, wish.keep, run.goal, [run.newest, run.best])}
    for facts in run.intact:
        number = facts.number
        if number == run.newest:
            why[number] = Verdict(number, False, "newest")
        elif number == run.best:
            why[number] = Verdict(number, False, "best")
        elif wish.abandoned and number in run.abandoned:
            why[number] = Verdict(number, True, "abandoned")
        elif wish.keep:
            why[number] = Verdict(number, number in gone, "not kept" if number in gone else "kept")
    return [why[number] for number in sorted(why)]


class Link(NamedTuple):
    """A file of a checkpoint: its identity on the disk, its number of hard links, its size."""

    identity: tuple[int, int]
    names: int
    size: int


def freed(going: Collection[int], files: Mapping[int, Collection[Link]]) -> int:
    """Return the bytes that are freed: those of files whose last hard link is removed.

    >>> shared, own = Link((0, 7), 2, 500), Link((0, 8), 1, 30)
    >>> freed([1], {1: [shared, own], 2: [shared]}), freed([1, 2], {1: [shared, own], 2: [shared]})
    (30, 530)
    """
    going_names = Counter(link for number in going for link in files.get(number, ()))
    return sum(link.size for link, count in going_names.items() if count >= link.names)
