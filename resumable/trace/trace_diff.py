"""The diff of two traces, as JSON and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..files import jsonl
from ..files.strict_json import Json
from . import trace_file
from .trace_file import BEGIN, CLOSED, RANDOM, At, Difference, Record

Row = dict[str, Any]

_FEW = 3
_SUMS = ("compared", "looked", "looked_later")
_UNSAID = ("rank", "sums", "has_batches", "has_batches_there")


def compare(before: str, after: str) -> Row:
    """Compare two trainings by their traces; those of other ranks are beside the given ones.

    The facts are those of the first rank to diverge; else of one with too little data; else of rank 0.
    """
    found = [_of_rank(0, Path(before), Path(after))]
    paths = _paths(before, after, 1)
    while paths[0].exists() and paths[1].exists():
        found.append(_of_rank(len(found), *paths))
        paths = _paths(before, after, len(found))
    parted = [one for one in found if one["parted"]]
    chosen = min(parted, key=_order) if parted else min(found, key=lambda one: bool(one["equal"]))
    sums = {} if parted else {key: sum(one[key] for one in found) for key in _SUMS}
    return {**chosen, "sums": sums, "equal": all(one["equal"] for one in found), "ranks": len(found)}


def _paths(before: str, after: str, rank: int) -> tuple[Path, Path]:
    return trace_file.path_of(before, rank), trace_file.path_of(after, rank)


def _order(found: Row) -> tuple[int, int, int]:
    at = found["parted"]["at"]
    return at["step"], at["epoch"], at["batch"]


def _of_rank(rank: int, before: Path, after: Path) -> Row:
    """Compare the traces of one rank up to the first boundary at which they differ."""
    one, other = trace_file.read(before), trace_file.read(after)
    pairs, parted, unlike = _walked(one, other)
    if not pairs:
        raise UsageError(
            f"{before} and {after} have no boundary in common: {_reach(one)}, and {_reach(other)}.",
            fix="give the traces of two trainings that begin at the same place and loop over the same data.",
        )
    looks = [record for record, met in pairs if record.parts and met.parts]
    # At the start they may have trained nothing yet.
    later = sum(look.why not in BEGIN or look.at[1:] != pairs[0][0].at[1:] for look in looks)
    last, last_met = pairs[-1]
    alike = [record for record, _ in (pairs[:-1] if parted else pairs)]
    rest = [] if parted else [(before, _after(one, last)), (after, _after(other, last_met))]
    then, now = _environment(one), _environment(other)
    return {
        "rank": rank,
        "equal": not parted and later > 0,
        "compared": len(pairs),
        "looked": len(looks),
        "looked_later": later,
        "noted": [*dict.fromkeys(name for mine, met in pairs for name in mine.noted if name in met.noted)],
        "last_equal": _place(alike[-1].at if alike else None),
        "last_equal_parts": _place(
            next((look.at for look in reversed(looks) if not parted or look is not last), None)
        ),
        "parted": {
            "rank": rank,
            "why": last.why,
            "at": _place(last.at),
            "differences": [jsonl.plain({k: v for k, v in d._asdict().items() if k != "at"}) for d in parted],
        }
        if parted
        else None,
        "further": [
            {"trace": str(path), "boundaries": len(more), "last": _place(more[-1])}
            for path, more in rest
            if more
        ],
        "unlike": unlike,
        "environment": [
            {"name": key, "before": then[key], "after": now[key]}
            for key in then
            if key in now and then[key] != now[key]
        ],
        "has_batches": any(record.batches for record, _ in pairs),
        "has_batches_there": bool(last.batches),
    }


def _walked(
    one: Sequence[Record], other: Sequence[Record]
) -> tuple[list[tuple[Record, Record]], list[Difference], list[str]]:
    """Return the records that were compared, the first differences, and the generators unlike from the start.

    Those generators matter only if they are used.
    """
    pairs: list[tuple[Record, Record]] = []
    unlike: dict[str, None] = {}
    for record, met in trace_file.pairs(one, other):
        pairs.append((record, met))
        found = trace_file.differences(record, met)
        if record.why != "boundary":
            unlike |= dict.fromkeys(_generator(one) for one in found if one.part == RANDOM)
        if parted := [one for one in found if one.part != RANDOM or _generator(one) not in unlike]:
            return pairs, parted, [*unlike]
    return pairs, [], [*unlike]


def _generator(found: Difference) -> str:
    return found.name.partition(".")[0]


def _after(records: Sequence[Record], last: Record) -> list[At]:
    place = next(place for place, record in enumerate(records) if record is last)
    return [record.at for record in records[place + 1 :] if record.why == "boundary"]


def _reach(records: Sequence[Record]) -> str:
    return f"one goes from {records[0].at} to {records[-1].at}" if records else "one has no records"


def _environment(records: Sequence[Record]) -> Mapping[str, Json]:
    found = (record.more.get("environment") for record in reversed(records))
    return next((one for one in found if isinstance(one, dict)), {})


def _place(at: At | None) -> dict[str, Json] | None:
    return dict(at._asdict()) if at else None


def to_json(found: Row) -> Row:
    """Return what `--json` prints."""
    return {key: value for key, value in (found | found["sums"]).items() if key not in _UNSAID}


def lines(found: Row) -> Iterator[str]:
    """Yield the text that people read; its first line is the result."""
    parted, count = found["parted"], found["compared"]
    until = _until(found["last_equal"])
    on = f" on rank {found['rank']}" if found["ranks"] > 1 else ""
    if parted:
        begins = {"start": "the start, ", "resumed": "the resume, ", CLOSED: "the end, "}
        yield f"part at {begins.get(parted['why'], '')}{_at(parted['at'])}{on}: {_what(found)}"
        if found["last_equal"]:
            yield f"equal before: {_boundaries(count - 1)}{until}"
    elif found["equal"]:
        ranks = f" of {found['ranks']} ranks" if found["ranks"] > 1 else ""
        yield (
            f"equal: {_boundaries(count)}{ranks}{until}; at {found['looked']:,} of them the parts were "
            f"looked at, last at {_at(found['last_equal_parts'])}"
        )
    else:
        names = ", ".join([*(["batches"] if found["has_batches"] else []), *found["noted"]])
        what = f"{names} equal" if names else "nothing differs"
        yield (
            f"weights not compared{on}: {what} at {_boundaries(count)}{until}, but at none after they began "
            "have both looked at the parts"
        )
        yield (
            "Fix: trace both again more often (Trace(..., every=10)), or up to an epoch's end, or until "
            "both are closed; state.note(loss=loss) shows at each step what the weights do"
        )
    for rest in found["further"]:
        yield f"{rest['trace']} continues for {_boundaries(rest['boundaries'])} more{_until(rest['last'])}"
    if found["unlike"]:
        named = ", ".join(found["unlike"])
        yield f"generators that are not seeded alike (where they are used, it shows): {named}"
    if found["environment"]:
        told = (f"{one['name']} {one['before']} -> {one['after']}" for one in found["environment"])
        yield f"environment: {', '.join(told)}"


def _at(place: Mapping[str, Any]) -> str:
    return str(At(**place))


def _boundaries(count: int) -> str:
    return "1 boundary" if count == 1 else f"{count:,} boundaries"


def _until(place: Mapping[str, Any] | None) -> str:
    return f", up to {_at(place)}" if place else ""


def _what(found: Row) -> str:
    by_part: dict[str, list[Row]] = {}
    for one in found["parted"]["differences"]:
        by_part.setdefault(one["part"], []).append(one)
    said = []
    batches, noted = by_part.pop("batches", None), by_part.pop("noted", [])
    if batches:
        said.append(_batches(batches[0]["before"], batches[0]["after"]))
    said += [f"{one['name']} {_value(one['before'], one['after'])}" for one in noted]
    if by_part:
        said.append(_parts(by_part, found))
    return ", ".join(said) + ("; the batches are equal" if found["has_batches_there"] and not batches else "")


def _batches(before: Sequence[str], after: Sequence[str]) -> str:
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


def _parts(by_part: Mapping[str, Sequence[Row]], found: Row) -> str:
    told = f"{', '.join(_named(part, some) for part, some in by_part.items())} "
    told += "differs" if len(by_part) == 1 else "differ"
    if found["parted"]["why"] in ("boundary", CLOSED):
        # The hash of a part shows that it differs, not since when.
        last = found["last_equal_parts"]
        since = f"last equal at step {last['step']}" if last else "never before"
        told += f" (looked at now and then: {since})"
    return told


def _named(part: str, some: Sequence[Row]) -> str:
    names = [one["name"] for one in some if one["name"]]
    if not names:
        return part
    more = ", ..." if len(names) > _FEW else ""
    return f"{part} ({', '.join(names[:_FEW])}{more})"
