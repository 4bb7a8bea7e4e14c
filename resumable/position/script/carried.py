"""Finds the variables that a loop of the script carries from one body to the next, in its bytecode."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from types import CodeType
from typing import NamedTuple

from .bytecode import Bytecode, loops_around, read_code
from .events import Call, Calls, Name, Written, owner_of, root_of
from .statements import Statement

_TRAINS = {"backward", "step"}
"""Methods that change what is trained: what they are called on or given decides how."""
_ASKS = {"batches", "enumerate"}
"""Methods of RunState that begin a loop over batches."""
_SEEDS = {"manual_seed", "seed", "set_state", "setstate"}
_SETTINGS = ("['lr']", "['weight_decay']", "['momentum']", "['betas']")
"""Items by which a script changes the settings of an optimizer."""
_CLOCKS = {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "now"}


class Carried(NamedTuple):
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
    summed: frozenset[Name] = frozenset()
    """The restarted ones that decide nothing, and are saved as metrics."""
    named: frozenset[Name] = frozenset()
    """All that the loops read or assign."""
    stored: frozenset[Name] = frozenset()
    """All that the loops assign."""
    replaced: frozenset[Name] = frozenset()
    """Those that each body assigns whichever way it takes, and does not read before."""
    written: frozenset[Name] = frozenset()
    """Those of which a body assigns some elements, and leaves the others."""
    filled: frozenset[Name] = frozenset()
    """Those of which each body assigns all elements."""
    renewed: frozenset[Name] = frozenset()
    """Those to which a body gives values made from their own."""
    placed: frozenset[Name] = frozenset()
    """Those that a body assigns, or writes to, after the batches of the next one may have been asked for."""
    called: frozenset[str] = frozenset()
    """The functions and methods that the innermost loop calls, and those that these call."""


def carried_in(code: CodeType, at: int, states: frozenset[Name], calls: Calls = ()) -> Carried:
    """Return the variables that decide in the loops around a place.

    `states` are the names of the RunState: what it assigns before the loops is restored.
    """
    around = loops_around(code, at)
    if not around:
        return Carried()
    read = read_code(code, calls) if calls else read_code(code)
    # A loop that makes the RunState is not one of its training.
    begins = [offset for offset, names in read.stores if names & states]
    loops = [(head, end) for head, end in around if not any(head <= one <= end for one in begins)]
    return _carried_by(code, read, tuple(loops), states) if loops else Carried()


@cache
def _carried_by(
    code: CodeType, read: Bytecode, around: tuple[tuple[int, int], ...], states: frozenset[Name]
) -> Carried:
    loops = dict(around)
    start, innermost = min(loops), max(loops)
    found, kept, replaced, written = set[Name](), set[Name](), set[Name](), set[Name]()
    owners = set[Name]()
    for head, end in loops.items():
        body = read.between(head, end)
        stored = read.accessed("store", body)
        found |= read.read_first(body) & stored
        owners |= read.owners_read_first(body)
        replaced |= stored - read.left_at_end(body)
        kept |= read.accessed("load", body)
        written |= _written_in_part(read, head, end) | _shuffled(read, head, end)
    whole = read.between(start, loops[start])
    outer, assigned = read.read_first(whole), read.accessed("store", whole)
    outer_written = written - (assigned - outer)
    found |= written
    assigned = assigned | outer_written
    kept -= assigned
    statements = [one for one in read.statements if start <= one.first <= loops[start]]
    restored, known = _known(code, [one for one in read.statements if one.first < start], states)
    known |= _from_clocks(statements)
    seeded = {name for one in statements if one.methods & _SEEDS for name in one.names("load")}
    owners -= known | restored
    made, restarted = assigned - found - owners, (found & assigned) - outer
    found -= {name for name in found if name in known or owner_of(name) in restored}
    placed = _placed(read, start, loops[start], states) | (outer & assigned)
    others = known | found
    named = assigned | outer | kept | found
    kept -= {name for name in kept if name in others or owner_of(name) in restored or root_of(name) in made}
    remade = owners - {name for name in found if not _is_replaced(name, statements)}
    fields = {name for name in kept if root_of(name) in remade}
    passed, decisive = _passed_on(fields, statements)
    kept -= fields - decisive
    found |= passed
    come = read.owners_read_first(whole) if passed else set[Name]()
    restarted |= {name for name in passed if root_of(name) not in come}
    found -= {name for name in found if root_of(name) in made}
    decides = {name for name in found if _decides(name, read, statements, states)}
    # Without the RunState's names no call of save() counts.
    summed = {name for name in decides & restarted if not _decides(name, read, statements, frozenset())}
    return Carried(
        assigned=frozenset(decides),
        kept=frozenset(name for name in kept if _decides(name, read, statements, states)),
        used=frozenset(outer - seeded - states),
        made=frozenset(made),
        restarted=frozenset(restarted),
        summed=frozenset(summed),
        named=frozenset({*named, *map(owner_of, named)}),
        stored=frozenset(assigned),
        replaced=frozenset(replaced - outer),
        written=frozenset(written),
        filled=frozenset(name for at, (name, _) in read.written if start <= at <= loops[start]) - written,
        renewed=frozenset(name for name in decides if _is_renewed(name, statements)),
        placed=frozenset(name for name in placed if root_of(name) not in made),
        called=read.called(innermost, loops[innermost]),
    )


def states_of(code: CodeType, states: frozenset[Name]) -> frozenset[Name]:
    """Return the variables that are the RunState by a function's code: its values cannot be read."""
    statements = read_code(code).statements
    made = {
        name
        for one in statements
        if one.reads(states) and "load" in one.methods
        for name in one.names("store")
    }
    loaded = {name for one in statements for name in one.names("load")}
    return frozenset(made | {name.removesuffix(".vars") for name in loaded if name.endswith(".vars")})


def _known(code: CodeType, before: list[Statement], states: frozenset[Name]) -> tuple[set[Name], set[Name]]:
    """Return what comes from the RunState before the loops, and all that a resume has as it was."""
    restored = {name for one in before if one.reads(states) for _, name in one.events}
    restored |= {name for one in before for name in one.made_from({*states})}
    given = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    given -= {name for one in before for name in one.names("store")}
    return restored, {*states} | restored | given


def _written_in_part(read: Bytecode, head: int, end: int) -> set[Name]:
    """Return the containers of which a body assigns some elements, and leaves the others.

    One that an inner loop fills counts as filled by each body.
    """
    written = [one for at, one in read.written if head <= at <= end]
    if not written:
        return set()
    body = read.between(head, end)
    first, filling = read.read_first(body), set[Name]()
    for inner, last in read.inner_loops(head, end).items():
        own = read.between(inner, last)
        filling |= read.targets(inner, last)
        filling |= (read.read_first(own) & read.accessed("store", own)) - first
    filling = _following(filling, [one for one in read.statements if head <= one.first <= end])
    return {name for name, keys in written if name in first and not keys & filling}


def _shuffled(read: Bytecode, head: int, end: int) -> set[Name]:
    """Return what a body gives to a function that shuffles it in place, and has not made itself."""
    given = {
        name
        for one in read.statements
        if head <= one.first <= end and "shuffle" in one.methods | one.functions
        for name in one.names("load")
    }
    return given & read.read_first(read.between(head, end))


def _is_replaced(name: Name, statements: list[Statement]) -> bool:
    """Whether a body gives a variable only copies of what it is, with other fields."""
    stores = [one for one in statements if name in one.names("store")]
    return all({"replace", "_replace"} & (one.methods | one.functions) for one in stores)


def _passed_on(names: set[Name], statements: list[Statement]) -> tuple[set[Name], set[Name]]:
    """Return the attributes from which a body makes their object again, and those that a condition reads."""
    passed = {name for name in names if root_of(name) in _following({name}, statements)}
    read = {name for one in statements if one.is_condition for name in one.names("load")}
    return passed, (names & read) - passed


def _placed(read: Bytecode, head: int, end: int, states: frozenset[Name]) -> set[Name]:
    """Return what a body assigns, or writes to, behind the place where its loop over batches begins.

    What it assigns before, too, and not in that loop, is what it was where the next body loads.
    """
    asks = [
        one.first
        for one in read.statements
        if head <= one.first <= end and one.methods & _ASKS and one.reads(states)
    ]
    begin = min(asks or read.inner_loops(head, end), default=end)
    written = {name for at, (name, _) in read.written if begin <= at <= end}
    loops = [last for first, last in read.inner_loops(head, end).items() if first >= begin]
    last = min(loops, default=begin)
    before, inside, behind = (
        read.accessed("store", read.between(*place))
        for place in ((head, begin - 1), (begin, last), (last + 1, end))
    )
    return written | inside | (behind - before)


def _following(names: set[Name], statements: list[Statement]) -> set[Name]:
    """Return variables, and those that are made from them."""
    known, size = {*names}, -1
    while size < len(known):
        size = len(known)
        for one in statements:
            known |= one.made_from(known)
    return known


def _is_renewed(name: Name, statements: list[Statement]) -> bool:
    """Whether a variable gets a value that is made from its own."""
    known = _following({name}, statements)
    return any(name in one.made_from(known) for one in statements)


def _from_clocks(statements: list[Statement]) -> set[Name]:
    """Return the variables that depend on a clock: no two runs of a script have the same."""
    found: set[Name] = set()
    size = -1
    while size < len(found):
        size = len(found)
        for one in statements:
            found |= one.names("store") if one.calls(_CLOCKS) else one.made_from(found)
    return found


def _decides(name: Name, read: Bytecode, statements: list[Statement], states: frozenset[Name]) -> bool:
    """Whether a variable, or what comes of it, decides which way the code takes or what is trained."""
    known, size = {name}, 0
    while size < len(known):
        size = len(known)
        for one in statements:
            if one.decides & known:
                return True
            known |= one.made_from(known)
            if not one.names("load") & known:
                continue
            is_metric = "save" in one.methods and one.reads(states)
            is_setting = any(other.endswith(_SETTINGS) for other in one.names("store"))
            shown = read.shown_by(one) if one.is_condition else []
            if shown is None:
                shown = read.returned_by(one)
            if shown is None or is_metric or is_setting or one.methods & _TRAINS:
                return True
            stored = set[Name]().union(*(other.names("store") for other in shown))
            if name in stored:
                # It decides what it is itself, such as the best so far.
                return True
            known |= stored
    return False


@cache
def summary_of(
    code: CodeType, calls: Calls, names: tuple[tuple[Name, Name], ...], states: frozenset[Name]
) -> Call:
    """Return what a function does with the variables outside of it.

    `names` are the names that its variables have in the script; those of its own begin with "<".
    """
    read = read_code(code, calls, names)
    statements, whole = read.statements, read.instructions
    loaded, stored = read.accessed("load", whole), read.accessed("store", whole)
    timed = _from_clocks(statements)
    outer = {name for name in loaded | stored if name[0] != "<" and name not in timed}
    read_first = read.read_first(whole)
    count, local = code.co_argcount + code.co_kwonlyargcount, dict(names)
    parameters = tuple(one for one in code.co_varnames[:count] if local[one][0] == "<")
    stars = code.co_varnames[count:][: _stars(code)]
    keys = {local[one]: "*" if one in stars else one for one in (*parameters, *stars)}
    given = {key for name, key in keys.items() if _decides(name, read, statements, states)}
    following = {name: _following({name}, statements) for name in outer}
    for name in keys:
        following[name] = _following({name, *(one for one in loaded if root_of(one) == name)}, statements)
    returned = [one.names("load") for one in statements if one.is_return or _chooses_return(one, read)]
    renewed = {name for name in outer & stored if _is_renewed(name, statements)}
    passes = [
        (name, frozenset(found & outer & stored - ({name} - renewed))) for name, found in following.items()
    ]
    return Call(
        read=frozenset(outer & read_first),
        stored=frozenset(outer & stored),
        left=frozenset(outer & stored & read.left_at_return()),
        returned=frozenset(name for name in outer if any(one & following[name] for one in returned)),
        passes=frozenset((keys.get(name, name), targets) for name, targets in passes if targets),
        decides=frozenset(name for name in outer if _decides(name, read, statements, states)),
        written=frozenset(_written_outside(read, outer, keys)),
        parameters=parameters,
        given=frozenset(given),
        called=read.called(0, whole[-1].offset),
    )


def _chooses_return(one: Statement, read: Bytecode) -> bool:
    return one.is_condition and read.shown_by(one) is None and read.returned_by(one) is not None


def _stars(code: CodeType) -> int:
    return bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)


def _written_outside(
    read: Bytecode, outside: set[Name], parameters: Mapping[Name, Name]
) -> Iterator[Written]:
    """Yield the containers outside of a function of which it assigns some elements, with their keys."""
    in_part = _written_in_part(read, 0, read.instructions[-1].offset)
    for _, (name, keys) in read.written:
        if name in in_part and name in outside:
            made_from = {one for one in {*outside, *parameters} if _following({one}, read.statements) & keys}
            yield name, frozenset(parameters.get(one, one) for one in made_from | keys & outside)
