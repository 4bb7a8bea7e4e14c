"""Finds the variables that a loop of the script carries from one body to the next, in its bytecode."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import CodeType

from .bytecode import Bytecode
from .events import Name, names_of
from .statements import Statement

_TRAINS = {"backward", "step"}
"""Methods that change what is trained: what they are called on or given decides how."""
_SEEDS = {"manual_seed", "seed", "set_state", "setstate"}
_CLOCKS = {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "now"}


@dataclass(frozen=True)
class Carried:
    """The variables that decide in the loops around a place, and come there from the body before."""

    assigned: frozenset[Name] = frozenset()
    """Those that a body assigns."""
    kept: frozenset[Name] = frozenset()
    """Those that it only reads: an object, or a list, may change all the same."""
    used: frozenset[Name] = frozenset()
    """All that a body reads from the one before and does not seed."""
    made: frozenset[Name] = frozenset()
    """Those that each body assigns before it reads them."""
    restarted: frozenset[Name] = frozenset()
    """Those that an inner loop carries, and that each body of the outermost one assigns first."""
    named: frozenset[Name] = frozenset()
    """All that the loops read or assign."""
    stored: frozenset[Name] = frozenset()
    """All that the loops assign."""
    replaced: frozenset[Name] = frozenset()
    """Those that each body assigns whichever way it takes, and does not read before."""


@cache
def carried_in(code: CodeType, at: int, states: frozenset[Name]) -> Carried:
    """Return the variables that decide in the loops around a place.

    `states` are the names of the RunState: what it assigns before the loops is restored.
    """
    read = Bytecode(code)
    if not (loops := _of_training(read, at, states)):
        return Carried()
    start = min(loops)
    found, kept, replaced = set[Name](), set[Name](), set[Name]()
    for head, end in loops.items():
        body = read.between(head, end)
        stored = read.accessed("store", body)
        found |= read.read_first(body) & stored
        replaced |= stored - read.left_at_end(body)
        kept |= read.accessed("load", body)
    whole = read.between(start, loops[start])
    outer, assigned = read.read_first(whole), read.accessed("store", whole)
    kept -= assigned
    statements = [one for one in read.statements if start <= one.first <= loops[start]]
    restored, known = _known(code, [one for one in read.statements if one.first < start], states)
    known |= _from_clocks(statements)
    seeded = {name for one in statements if one.methods & _SEEDS for name in one.names("load")}
    made, restarted = assigned - found, (found & assigned) - outer
    found -= {name for name in found if name in known or _owner(name) in restored}
    others = known | found
    named = assigned | outer | kept | found
    kept -= {name for name in kept if name in others or _owner(name) in restored or _root(name) in made}
    found -= {name for name in found if _root(name) in made}
    return Carried(
        frozenset(name for name in found if _decides(name, read, statements, states)),
        frozenset(name for name in kept if _decides(name, read, statements, states)),
        frozenset(outer - seeded - states),
        frozenset(made),
        frozenset(restarted),
        frozenset(named),
        frozenset(assigned),
        frozenset(replaced - outer),
    )


def _of_training(read: Bytecode, at: int, states: frozenset[Name]) -> dict[int, int]:
    """Return the first and the last offset of each loop around a place that does not make the RunState."""
    if not (loops := read.loops_around(at)):
        return {}
    begins = [offset for offset, events in read.events.items() if names_of(events, "store") & states]
    return {head: end for head, end in loops.items() if not any(head <= one <= end for one in begins)}


def _known(code: CodeType, before: list[Statement], states: frozenset[Name]) -> tuple[set[Name], set[Name]]:
    """Return what comes from the RunState before the loops, and all that a resume has as it was."""
    restored = {name for one in before if one.reads(states) for _, name in one.events}
    given = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    given -= {name for one in before for name in one.names("store")}
    return restored, {*states} | restored | given


def _owner(name: Name) -> Name:
    """Return the name of the container that an item is in, or the name itself."""
    return name.partition("[")[0]


def _root(name: Name) -> Name:
    return _owner(name).partition(".")[0]


def _from_clocks(statements: list[Statement]) -> set[Name]:
    """Return the variables that depend on a clock: no two runs of a script have the same."""
    found: set[Name] = set()
    size = -1
    while size < len(found):
        size = len(found)
        for one in statements:
            if one.calls(_CLOCKS) or one.names("load") & found:
                found |= one.names("store")
    return found


def _decides(name: Name, read: Bytecode, statements: list[Statement], states: frozenset[Name]) -> bool:
    """Whether a variable, or what comes of it, decides which way the code takes or what is trained."""
    known, size = {name}, 0
    while size < len(known):
        size = len(known)
        for one in statements:
            if not one.names("load") & known:
                continue
            is_metric = "save" in one.methods and one.reads(states)
            shown = read.shown_by(one) if one.is_condition else []
            if shown is None or is_metric or one.methods & _TRAINS:
                return True
            stored = set[Name]().union(*(other.names("store") for other in shown))
            if name in stored:
                # It decides what it is itself, such as the best so far.
                return True
            known |= one.names("store") | stored
    return False
