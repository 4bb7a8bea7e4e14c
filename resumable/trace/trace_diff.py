"""The diff of two traces, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import UsageError
from ..files import jsonl
from ..files.strict_json import Json
from . import trace_file
from .trace_file import At, Comparison, Difference, Record

_FEW = 3


class Compared(NamedTuple):
    """The traces of one rank, compared."""

    rank: int
    found: Comparison
    environment: Mapping[str, tuple[Json, Json]]
    """The differences between the environments of the two trainings."""
    paths: Sequence[str]


def compare(before: str, after: str) -> list[Compared]:
    """Compare two trainings by their traces; those of other ranks are beside the given ones."""
    found = [Compared(0, *_compared(Path(before), Path(after)))]
    while True:
        rank = len(found)
        one, other = trace_file.path_of(before, rank), trace_file.path_of(after, rank)
        if not (one.exists() and other.exists()):
            return found
        found.append(Compared(rank, *_compared(one, other)))


def _compared(before: Path, after: Path) -> tuple[Comparison, Mapping[str, tuple[Json, Json]], Sequence[str]]:
    one, other = trace_file.read(before), trace_file.read(after)
    found = trace_file.compare(one, other)
    if not found.compared:
        raise UsageError(
            f"{before} and {after} have no boundary in common: {_reach(one)}, and {_reach(other)}.",
            fix="give the traces of two trainings that begin at the same place and loop over the same data.",
        )
    then, now = _environment(one), _environment(other)
    unlike = {key: (then[key], now[key]) for key in then if key in now and then[key] != now[key]}
    return found, unlike, (str(before), str(after))


def _reach(records: Sequence[Record]) -> str:
    if not records:
        return "one has no records"
    return f"one goes from {records[0].at} to {records[-1].at}"


def _environment(records: Sequence[Record]) -> Mapping[str, Json]:
    for record in reversed(records):
        if isinstance(found := record.more.get("environment"), dict):
            return found
    return {}


def are_equal(compared: Sequence[Compared]) -> bool:
    """Return whether no rank diverges, and parts were compared on all of them."""
    return all(one.found.is_equal for one in compared)


def first(compared: Sequence[Compared]) -> Compared:
    """Return the first rank to diverge; else a rank with too little data; else rank 0."""
    parted = [one for one in compared if one.found.parted]
    return min(parted, key=_order) if parted else min(compared, key=lambda one: one.found.is_equal)


def _order(compared: Compared) -> tuple[int, int, int]:
    at = compared.found.parted
    assert at
    return at.at.step, at.at.epoch, at.at.batch


def facts(compared: Sequence[Compared]) -> dict[str, Json]:
    """Return the JSON that `--json` prints."""
    rank, found, environment, paths = first(compared)
    parted: Json = None
    if found.parted:
        differences: list[Json] = [_fact(one) for one in found.differences]
        parted = {"rank": rank, "why": found.parted.why, "at": _place(found.parted.at)}
        parted |= {"differences": differences}
    return {
        "equal": are_equal(compared),
        "compared": found.compared if parted else sum(one.found.compared for one in compared),
        "looked": found.looked if parted else sum(one.found.looked for one in compared),
        "looked_later": found.looked_later if parted else sum(one.found.looked_later for one in compared),
        "noted": [*found.noted],
        "ranks": len(compared),
        "last_equal": _place(found.equal),
        "last_equal_parts": _place(found.equal_parts),
        "parted": parted,
        "further": [
            {"trace": path, "boundaries": len(rest), "last": _place(rest[-1])}
            for path, rest in zip(paths, found.rest, strict=True)
            if rest
        ],
        "unlike": [*found.unlike],
        "environment": [{"name": k, "before": a, "after": b} for k, (a, b) in environment.items()],
    }


def _fact(one: Difference) -> dict[str, Json]:
    return {
        "part": one.part,
        "name": one.name,
        "before": jsonl.plain(one.before),
        "after": jsonl.plain(one.after),
    }


def _place(at: At | None) -> dict[str, Json] | None:
    return dict(at._asdict()) if at else None


def lines(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the text that people read; its first line is the result."""
    rank, found, environment, paths = first(compared)
    on = f" on rank {rank}" if len(compared) > 1 else ""
    if found.parted:
        yield f"part at {_where(found.parted)}{on}: {_what(found)}"
        if found.equal:
            yield f"equal before: {_boundaries(found.compared - 1)}{_until(found.equal)}"
    elif found.is_equal:
        ranks = f" of {len(compared)} ranks" if len(compared) > 1 else ""
        yield (
            f"equal: {_boundaries(found.compared)}{ranks}{_until(found.equal)}; "
            f"at {found.looked:,} of them the parts were looked at, last at {found.equal_parts}"
        )
    else:
        yield f"weights not compared{on}: {_alike(found)}"
        yield (
            "Fix: trace both again with a lower trace_every= (such as 10), or up to an epoch's end, or until "
            "both are closed; state.note(loss=loss) shows at each step what the weights do"
        )
    for path, rest in zip(paths, found.rest, strict=True):
        if rest:
            yield f"{path} goes on for {_boundaries(len(rest))} more{_until(rest[-1])}"
    if found.unlike:
        named = ", ".join(found.unlike)
        yield f"generators that are not seeded alike (where they are used, it shows): {named}"
    if environment:
        told = (f"{name} {then} -> {now}" for name, (then, now) in environment.items())
        yield f"environment: {', '.join(told)}"


def _alike(found: Comparison) -> str:
    names = ", ".join([*(["batches"] if found.has_batches else []), *found.noted])
    what = f"{names} equal" if names else "nothing differs"
    return (
        f"{what} at {_boundaries(found.compared)}{_until(found.equal)}, but at none after they began have "
        "both looked at the parts"
    )


def _where(record: Record) -> str:
    named = {"start": "the start, ", "resumed": "the resume, ", trace_file.CLOSED: "the end, "}
    return f"{named.get(record.why, '')}{record.at}"


def _boundaries(count: int) -> str:
    return "1 boundary" if count == 1 else f"{count:,} boundaries"


def _until(at: At | None) -> str:
    return f", up to {at}" if at else ""


def _what(found: Comparison) -> str:
    by_part: dict[str, list[Difference]] = {}
    for one in found.differences:
        by_part.setdefault(one.part, []).append(one)
    said = []
    batches, noted = by_part.pop("batches", None), by_part.pop("noted", [])
    if batches:
        said.append(_batches(batches[0]))
    said += [f"{one.name} {_value(one.before, one.after)}" for one in noted]
    if by_part:
        said.append(_parts(by_part, found))
    has_batches = bool(found.parted and found.parted.batches)
    return ", ".join(said) + ("; the batches are equal" if has_batches and not batches else "")


def _batches(one: Difference) -> str:
    before, after = one.before, one.after
    assert isinstance(before, list)
    assert isinstance(after, list)
    if len(before) != len(after):
        return f"{len(before)} -> {len(after)} batches"
    other = sum(then != now for then, now in zip(before, after, strict=True))
    whole = "the batch differs" if len(before) == 1 else "the batches differ"
    return whole if other == len(before) else f"{other} of {len(before)} batches differ"


def _value(before: Json, after: Json) -> str:
    both = (before, after)
    if any(isinstance(value, str) and value.startswith("#") for value in both):
        return "differs"
    return f"{before} -> {after}"


def _parts(by_part: Mapping[str, Sequence[Difference]], found: Comparison) -> str:
    told = f"{', '.join(_named(part, some) for part, some in by_part.items())} "
    told += "differs" if len(by_part) == 1 else "differ"
    if found.parted and found.parted.why in ("boundary", trace_file.CLOSED):
        # The hash of a part shows that it differs, not since when.
        last = f"last equal at step {found.equal_parts.step}" if found.equal_parts else "never before"
        told += f" (looked at now and then: {last})"
    return told


def _named(part: str, some: Sequence[Difference]) -> str:
    names = [one.name for one in some if one.name]
    if not names:
        return part
    more = ", ..." if len(names) > _FEW else ""
    return f"{part} ({', '.join(names[:_FEW])}{more})"
