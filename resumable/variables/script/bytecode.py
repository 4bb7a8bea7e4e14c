"""Which variables code assigns in its loops, and which it may read before it assigns them again."""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import pairwise
from types import CodeType
from typing import Any, TypeVar

T = TypeVar("T")
_MOST = 1 << 16

_READS = (
    "LOAD_FAST",
    "LOAD_NAME",
    "LOAD_GLOBAL",
    "LOAD_DEREF",
    "LOAD_CLASSDEREF",
    "LOAD_CLOSURE",
    "LOAD_FROM_DICT",
    "DELETE_",
)
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_GLOBAL", "STORE_DEREF")
_ENDS = ("RETURN_", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_CONSTRUCTORS = ("__init__", "__post_init__", "__new__")
_SETTING = ("update", "setdefault")
_ADDING = ("append", "appendleft", "extend", "extendleft", "insert", "add", "heappush", "put")

Accesses = tuple[frozenset[str], frozenset[str]]
"""The variables that an instruction reads, and those that it stores."""


def by_code(function: Callable[[CodeType], T], most: int = _MOST) -> Callable[[CodeType], T]:
    """Remember what a function says of code: to hash code takes long, and a script may have much of it."""
    known: dict[int, tuple[CodeType, T]] = {}

    @functools.wraps(function)
    def found(code: CodeType) -> T:
        entry = known.get(id(code))
        if entry is None:
            if len(known) > most:
                known.clear()
            entry = known[id(code)] = code, function(code)
        return entry[1]

    return found


def _steps(code: CodeType) -> list[dis.Instruction]:
    return [*dis.get_instructions(code)]


steps_of = by_code(_steps, 64)
"""Returns the instructions of code; those of code with a loop are read several times."""


def accesses(one: dis.Instruction) -> Accesses:
    """Return what an instruction reads before it stores, and what it stores."""
    name, given = one.opname, one.argval
    if isinstance(given, tuple) and "_FAST" in name:
        # Python 3.13 joins two instructions.
        first, second = given
        if name == "STORE_FAST_LOAD_FAST":
            return frozenset({second} - {first}), frozenset({first})
        both = frozenset(given)
        return (frozenset(), both) if name.startswith("STORE") else (both, frozenset())
    if not isinstance(given, str):
        return frozenset(), frozenset()
    stores, reads = name.startswith(_STORES), name.startswith(_READS)
    return frozenset({given} if reads else ()), frozenset({given} if stores else ())


@by_code
def live_before(code: CodeType) -> dict[int, frozenset[str]]:
    """Return for each instruction the variables that may be read from there on before they are assigned."""
    steps = steps_of(code)
    read, stored = [accesses(one)[0] for one in steps], [accesses(one)[1] for one in steps]
    before: list[list[int]] = [[] for _ in steps]
    for number, following in ways(code, steps):
        before[following].append(number)
    live, waiting = [set(one) for one in read], [*range(len(steps))]
    while waiting:
        number = waiting.pop()
        for earlier in before[number]:
            if new := live[number] - stored[earlier] - live[earlier]:
                live[earlier] |= new
                waiting.append(earlier)
    return {one.offset: frozenset(found) for one, found in zip(steps, live, strict=True)}


def ways(
    code: CodeType, steps: list[dis.Instruction], *, with_errors: bool = True
) -> Iterator[tuple[int, int]]:
    """Yield each instruction with one that may run right after it, by their numbers.

    `with_errors`: also the handler of an error that it may raise.
    """
    at = {one.offset: number for number, one in enumerate(steps)}
    for number, one in enumerate(steps):
        if not one.opname.startswith(_ENDS) and number + 1 < len(steps):
            yield number, number + 1
        if one.opcode in _JUMPS and one.argval in at:
            yield number, at[one.argval]
    # Python 3.10 has instructions for them, which are jumps.
    if with_errors and hasattr(code, "co_exceptiontable"):
        for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
            for number, one in enumerate(steps):
                if entry.start <= one.offset < entry.end and entry.target in at:
                    yield number, at[entry.target]


@by_code
def loops(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Return where each loop begins and ends."""
    steps, moved = steps_of(code), dict[int, int]()
    for one, after in zip(reversed(steps[:-1]), reversed(steps[1:]), strict=True):
        if one.opname == "EXTENDED_ARG":
            # A jump leads to the prefix of an instruction, and a frame is at the instruction itself.
            moved[one.offset] = moved.get(after.offset, after.offset)
    ends = dict[int, int]()
    for one in steps:
        if one.opcode in _JUMPS and one.argval <= one.offset:
            # A `continue` jumps back as well.
            ends[moved.get(one.argval, one.argval)] = one.offset
    return tuple(ends.items())


@lru_cache(1024)
def asking(code: CodeType, offsets: frozenset[int]) -> frozenset[int]:
    """Return where loops ask for their items, if they make their iterators at some of these offsets.

    An iterator may be made around another one, by a call: `for index, batch in enumerate(...)`.
    """
    steps = [one for one in steps_of(code) if one.opname != "EXTENDED_ARG"]
    made, found, later = dict[int, int](), -1, steps[-1]
    for one, after in reversed([*pairwise(steps)]):
        if one.opname == "GET_ITER":
            found = after.offset
        elif one.opname == "GET_YIELD_FROM_ITER":
            # A constant is loaded first.
            found = later.offset
        elif one.opname.startswith(("STORE_", "POP_TOP", "FOR_ITER")) or one.opcode in _JUMPS:
            found = -1
        made[one.offset], later = found if found >= 0 else one.offset, after
    return frozenset(made.get(one, one) for one in offsets)


def is_in_loop(code: CodeType, offset: int | None) -> bool:
    """Whether an instruction is in a loop, and may run again in the same call."""
    return offset is not None and any(begin <= offset <= end for begin, end in loops(code))


@by_code
def assigned(code: CodeType) -> frozenset[str]:
    """Return the variables that code assigns."""
    return frozenset(name for one in steps_of(code) for name in accesses(one)[1])


@by_code
def never_assigned(code: CodeType) -> frozenset[str]:
    """Return the variables of a function that it is called with, and that nothing assigns."""
    return frozenset(code.co_varnames) - assigned(code) - {*code.co_cellvars}


@by_code
def assigned_in_loops(code: CodeType) -> frozenset[str]:
    """Return the variables that code assigns in a loop, or that functions inside of it assign."""
    return assigned_inside(code).union(*(accesses(one)[1] for one in _in_loops(code)))


def _in_loops(code: CodeType) -> list[dis.Instruction]:
    around = loops(code)
    return [one for one in steps_of(code) if any(begin <= one.offset <= end for begin, end in around)]


@by_code
def assigned_inside(code: CodeType) -> frozenset[str]:
    """Return the variables that functions inside of code assign by `global` and `nonlocal`."""
    found = set[str]()
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= assigned_globals(inner) | assigned_inside(inner)
            found.update(_stored("STORE_DEREF", inner) & {*inner.co_freevars})
    return frozenset(found)


@by_code
def assigned_globals(code: CodeType) -> frozenset[str]:
    """Return the variables of its module that code assigns, as a function has to say by `global`."""
    return _stored("STORE_GLOBAL", code)


def _stored(opname: str, code: CodeType) -> frozenset[str]:
    """Return what code stores by one instruction, which most code does not have."""
    if dis.opmap[opname] not in code.co_code[::2]:
        return frozenset()
    return frozenset(one.argval for one in dis.get_instructions(code) if one.opname == opname)


@by_code
def may_bind(code: CodeType) -> frozenset[str]:
    """Return the variables of its module, and of functions around it, that code may assign."""
    return assigned_globals(code) | assigned_inside(code)


@by_code
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that code uses, and the functions inside of it."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return frozenset((*code.co_names, *code.co_freevars)).union(*map(names_in, inner))


@by_code
def places(code: CodeType) -> frozenset[str]:
    """Return where code, and the functions inside of it, store: but for constructors, which run once.

    A place is written as in a path: `.name`, `.<cell>`, `['key']`; `[]` is any item, `[+]` one that is added.
    """
    return frozenset() if code.co_name in _CONSTRUCTORS else _places(code, in_loops=False)


@by_code
def places_in_loops(code: CodeType) -> frozenset[str]:
    """Return where code stores in its loops, and the functions inside of it store."""
    return _places(code, in_loops=True)


def _places(code: CodeType, *, in_loops: bool) -> frozenset[str]:
    steps = _in_loops(code) if in_loops else dis.get_instructions(code)
    found = {place for before, one in pairwise([None, *steps]) if one for place in _stored_by(one, before)}
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return frozenset(found.union(*map(places, inner)))


def _constant(one: dis.Instruction) -> Any:
    return one.argval if one.opname == "LOAD_CONST" else None


def _stored_by(one: dis.Instruction, before: dis.Instruction | None) -> Iterator[str]:
    if one.opname == "STORE_ATTR":
        yield f".{one.argval}"
    elif one.opname == "STORE_DEREF":
        yield f".<{one.argval}>"
    elif one.opname == "STORE_SUBSCR" and before and isinstance(_constant(before), str):
        yield f"[{before.argval!r}]"
    elif one.opname in ("STORE_SUBSCR", "STORE_SLICE") or one.argval in _SETTING:
        yield "[]"
    elif one.argval in _ADDING or one.opname in ("INPLACE_ADD", "INPLACE_OR") or one.argrepr in ("+=", "|="):
        yield "[+]"
