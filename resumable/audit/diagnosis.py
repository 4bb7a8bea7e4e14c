"""Compares the records of several runs, and finds what is wrong; it starts nothing itself."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..files.strict_json import Json
from ..trace import trace_file
from ..trace.trace_file import At, Difference, Record
from . import naming
from .trials import Trial

Leaf = tuple[str, str]
"""A part, and the name of one of its values."""

REPEAT, DATA, RANDOMNESS, STATE, NUMBERS, SCRIPT = (
    "repeat",
    "data",
    "randomness",
    "state",
    "numbers",
    "script",
)


class Finding(NamedTuple):
    """What is wrong, and how to fix it."""

    kind: str
    """"repeat": the runs differ without a stop. "data", "randomness", "state" or "numbers" (unknown): what
    a resume does not restore. "script": the script failed."""
    what: str
    """The first thing that differs."""
    at: At | None
    """The first boundary at which it differs."""
    text: str
    """One sentence that states it."""
    cause: str = ""
    """One word for why the runs differ without a stop, if it is known."""
    names: Sequence[str] = ()
    """The objects that no part holds, or the operations."""
    fix: str = ""
    evidence: Sequence[str] = ()
    """What is equal, and therefore not the cause."""
    rank: int = 0


class Lost(NamedTuple):
    """Something that changes in the training and is missing after a resume."""

    name: str
    kind: str
    """What it is, or why no checkpoint can have it."""
    fix: str
    at: At
    before: Json
    after: Json


class Unlike(NamedTuple):
    """The first difference between two runs."""

    one: Record
    other: Record
    differences: Sequence[Difference]
    first: Difference
    """The one that may have caused the others."""
    place: int
    """How many records before it were equal."""
    rank: int = 0


def is_essential(part: str, name: str, kinds: Mapping[str, str]) -> bool:
    """Whether a difference in it makes a different training, and is more than a label or a seed."""
    if part in ("random", "vars", "noted") or kinds.get(part) == "generator":
        return False
    return not name.startswith(("metrics", "generators"))


def _is_serious(found: Difference, kinds: Mapping[str, str]) -> bool:
    # Opaque bytes may differ although they mean the same.
    is_opaque = all(isinstance(one, dict) and "$bytes" in one for one in (found.before, found.after))
    return not is_opaque and is_essential(found.part, found.name, kinds)


def kinds_of(trial: Trial) -> dict[str, str]:
    """Return what kind of object each part is."""
    found: dict[str, str] = next((r.more["kinds"] for r in trial.records if "kinds" in r.more), {})
    return found


def first_unlike(one: Trial, other: Trial) -> Unlike | None:
    """Return the first essential difference between two runs that were not stopped, or None."""
    kinds = kinds_of(one)
    found = []
    for rank, (records, others) in enumerate(zip(one.ranks, other.ranks, strict=False)):
        for place, (record, met) in enumerate(zip(records, others, strict=False)):
            differ = trace_file.differences(record, met)
            serious = [one for one in differ if _is_serious(one, kinds)]
            if record.at != met.at and not serious:
                serious = [Difference(record.at, "position", "step", record.at.step, met.at.step)]
            if serious:
                found.append(Unlike(record, met, differ, first_of(serious), place, rank))
                break
        else:
            found += _of_length(records, others, rank)
    return min(found, key=lambda unlike: unlike.place, default=None)


def _of_length(records: Sequence[Record], others: Sequence[Record], rank: int) -> Iterator[Unlike]:
    place = min(len(records), len(others))
    more = [record for record in (*records[place:], *others[place:]) if record.why == "boundary"]
    if place and more:
        ends = str(records[-1].at), str(others[-1].at)
        differ = [Difference(more[0].at, "position", LENGTH, *ends)]
        one = records[place] if place < len(records) else records[-1]
        yield Unlike(one, others[min(place, len(others) - 1)], differ, differ[0], place, rank)


_ELSEWHERE = "boundary"

LENGTH = "length"
"""The name of the difference if one run continues and the other has ended."""


def unsteady(trials: Sequence[Trial]) -> set[Leaf]:
    """Return what differs between equal runs, and therefore says nothing about a resume."""
    first, *others = trials
    return {
        (found.part, found.name)
        for other in others
        for records, met in zip(first.ranks, other.ranks, strict=False)
        for one, two in zip(records, met, strict=False)
        for found in trace_file.differences(one, two)
    }


def after_resume(straight: Trial, stopped: Trial, stops: Sequence[At], ignored: set[Leaf]) -> Unlike | None:
    """Return the first difference between a stopped training and a straight one, or None."""
    ranks = range(min(len(straight.ranks), len(stopped.ranks)))
    found = [next(_of_rank(straight, stopped, stops, ignored, rank), None) for rank in ranks]
    return min(filter(None, found), key=lambda unlike: unlike.place, default=None)


def _of_rank(
    straight: Trial, stopped: Trial, stops: Sequence[At], ignored: set[Leaf], rank: int
) -> Iterator[Unlike]:
    boundaries = straight.boundaries(rank)
    kinds = kinds_of(straight)
    for place, (record, reference) in enumerate(pairs(straight, stopped, stops, rank)):
        if reference is None:
            there = min(boundaries.values(), key=lambda one: abs(one.at.step - record.at.step))
            differ = [Difference(record.at, "position", _ELSEWHERE, str(there.at), str(record.at))]
            yield Unlike(there, record, differ, differ[0], place, rank)
            return
        is_same_place = reference.why == record.why
        differ = [
            found
            for found in trace_file.differences(reference, record)
            if (found.part, found.name) not in ignored
            and (is_same_place or _counts(found, record.why, kinds))
        ]
        if differ:
            yield Unlike(reference, record, differ, first_of(differ), place, rank)


def pairs(
    straight: Trial, stopped: Trial, stops: Sequence[At], rank: int
) -> Iterator[tuple[Record, Record | None]]:
    """Yield each record of a stopped training with the straight one's record of the same place."""
    there = unasked(straight.ranks[rank], {*stopped.boundaries(rank), *stops})
    boundaries = Trial("", straight.folder, ranks=[there]).boundaries()
    firsts = {record.at: record for record in straight.ranks[rank] if record.why == "first"}
    resumes, met = 0, set[At]()
    for record in unasked(stopped.ranks[rank], straight.boundaries(rank)):
        resumes += record.why == "resumed"
        if record.why == "boundary":
            if record.at not in met:
                yield record, boundaries.get(record.at)
            met.add(record.at)
        elif record.why == "first" and record.at in firsts:
            yield record, firsts[record.at]
        elif record.why in ("resumed", "first") and resumes:
            # A script may restore or load again by itself.
            yield record, boundaries[stops[min(resumes, len(stops)) - 1]]


def unasked(records: Sequence[Record], there: Container[At]) -> list[Record]:
    """Return the records without the ends of last batches that another run recorded as an epoch's end.

    A library's loop may ask for one batch more than there are, or know that there are no more.
    """
    found: list[Record] = []
    batches: Sequence[str] = ()
    for record in records:
        at = record.at
        end = At("epoch", at.epoch + 1, 0, at.step)
        if record.why == "boundary" and at.kind == "batch" and at not in there and end in there:
            batches = [*batches, *record.batches]
            continue
        found.append(replace(record, batches=[*batches, *record.batches]) if batches else record)
        batches = ()
    return found


def _counts(found: Difference, why: str, kinds: Mapping[str, str]) -> bool:
    if found.part in ("batches", "noted") or kinds.get(found.part) == "position":
        return False
    # By its first batch a training may have drawn numbers or be in eval mode: the rest of a body does that.
    return why == "resumed" or (
        found.name != "eval" and found.part != "random" and kinds.get(found.part) != "generator"
    )


def of_resume(straight: Trial, stopped: Trial, unlike: Unlike, culprits: Sequence[Lost]) -> Finding:
    """Return what is wrong with a training that differs after a stop."""
    first = unlike.first
    kind = _class_of(unlike, first, culprits)
    settings = settings_unlike(unlike) if kind == NUMBERS else []
    when = {
        "resumed": f"after the resume at {unlike.one.at}",
        "first": f"between the resume at {unlike.one.at} and the first batch",
    }.get(unlike.other.why, f"at {unlike.one.at}")
    text = f"{naming.of(first)} {how_far(straight, stopped, first, unlike.rank)} {when}"
    if first.name == _ELSEWHERE:
        text = f"the resumed training came to {first.after}, and the other one to {first.before} in its place"
    return Finding(
        kind,
        naming.of(first),
        unlike.other.at,
        text,
        names=settings or [f"{one.name} ({one.kind})" for one in culprits],
        fix=_SAME_SETTINGS if settings else _fix_of(kind, unlike, first, culprits),
        evidence=evidence(unlike),
        rank=unlike.rank,
    )


_SAME_SETTINGS = "set what decides how numbers are computed the same way at every start, before RunState.load"


def settings_unlike(unlike: Unlike) -> list[str]:
    """Return the settings of torch that differ, such as the number of threads."""
    one, other = (record.more.get("settings", {}) for record in (unlike.one, unlike.other))
    return [f"{name}: {one[name]} and {other[name]}" for name in one if one[name] != other.get(name)]


def first_of(differences: Sequence[Difference]) -> Difference:
    """Return the difference that may have caused the others: a batch before what was computed from it."""
    return min(differences, key=_cause_before_effect)


def _cause_before_effect(found: Difference) -> tuple[int, bool]:
    order = ("position", "batches", "random", "scheduler", "scaler", "optimizer", "model")
    group = next((i for i, word in enumerate(order) if found.part.split(".")[0] == word), len(order))
    is_setting = found.part.startswith("optimizer") and found.name.startswith("groups")
    return (group if not is_setting else order.index("random")), isinstance(found.before, dict)


def _class_of(unlike: Unlike, first: Difference, culprits: Sequence[Lost]) -> str:
    if unlike.other.why != "boundary" or first.part == "position":
        return STATE
    # The batches of a loader that the script loops over itself are not compared.
    if first.part == "batches" or (culprits and all(map(_chooses_data, culprits))):
        return DATA
    is_drawn = culprits and all(is_generator(one.kind) for one in culprits)
    if first.part == "random" or first.part.startswith("loader") or is_drawn:
        return RANDOMNESS
    is_setting = first.part.startswith(("scheduler", "scaler", "optimizer")) and first.name.startswith(
        "groups"
    )
    return STATE if culprits or is_setting else NUMBERS


def _chooses_data(one: Lost) -> bool:
    return "iterator" in one.kind or one.kind.endswith(("DataLoader", "Sampler"))


def is_generator(kind: str) -> bool:
    """Whether a thing of this kind is a random generator."""
    return kind in ("torch.Generator", "random.Random") or kind.startswith("numpy.random")


def _fix_of(kind: str, unlike: Unlike, first: Difference, culprits: Sequence[Lost]) -> str:
    if culprits:
        return "; ".join(dict.fromkeys(one.fix for one in culprits[:_FIXES]))
    if first.name == _ELSEWHERE:
        return (
            "look for what decides when an optimizer steps, or a loop ends: a count of the script's own "
            "starts at 0 in a resumed process, where state.batch, state.step and state.epoch continue."
        )
    if first.part == "position" and first.name.startswith("metrics."):
        given = f"save({first.name.partition('.')[2]}=...)"
        return (
            f"compute what {given} is given after the loop over the batches, or keep in state.vars what it "
            "is made of: after a stop at an epoch's last batch, no batch is trained before it."
        )
    if unlike.other.why == "first":
        return (
            f"something between RunState.load and the first batch changes {naming.of(first)}: do it before "
            "load, which then puts back what it was."
        )
    if _is_layout(first):
        return "make the model lie in memory in the same order at every start (memory_format), before load."
    if unlike.other.why == "resumed":
        return f"give RunState all that {first.part} is made of, and let its state_dict return all of it."
    return {
        DATA: "what chooses the data is in no part: give the loader to RunState (loader=), loop over "
        "state.batches(), and give a dataset that changes in its workers a state_dict() and a "
        "load_state_dict().",
        RANDOMNESS: "something draws more or less often than in the training that was not stopped: look for "
        "what depends on the time, on the process, or on state.resumed.",
    }.get(
        kind,
        "something that no part holds takes part in the computation, or an operation is not deterministic: "
        "try --deterministic.",
    )


_FIXES = 3
"""The most fixes that are shown at once."""


def evidence(unlike: Unlike) -> list[str]:
    """Return which possible causes are equal at the first difference."""
    differ = {found.part for found in unlike.differences}
    told = []
    if unlike.one.batches and "batches" not in differ:
        told.append("batch digests are equal")
    generators = {naming.generator(d.name) for d in unlike.differences if d.part == "random"}
    if "random" in unlike.other.parts and not generators:
        told.append("all global generators are equal")
    if not any(d.part.startswith("optimizer") and d.name.startswith("groups") for d in unlike.differences):
        told.append("learning rates are equal")
    return told


def how_far(one: Trial, other: Trial, found: Difference, rank: int) -> str:
    """Describe how something differs, and by how much."""
    before, after = found.before, found.after
    if found.part == "random" or found.name.startswith("generators"):
        return "stands elsewhere"
    if isinstance(before, dict) and isinstance(after, dict) and "sample" in before and "sample" in after:
        if before["dtype"] != after["dtype"] or before["shape"] != after["shape"]:
            return "has another dtype or shape"
        if _is_layout(found):
            return "lies in memory in another order (its strides)"
        return f"differs{_by(one, other, before, after, rank)}"
    if found.part == "batches":
        return "is another one"
    if before is None or after is None:
        return "is there in only one of both"
    text = naming.values(found)
    return f"differs ({text})" if text else "differs"


def _is_layout(found: Difference) -> bool:
    before, after = found.before, found.after
    if not isinstance(before, dict) or not isinstance(after, dict):
        return False
    return before.get("layout") != after.get("layout")


def _by(one: Trial, other: Trial, before: Mapping[str, Any], after: Mapping[str, Any], rank: int) -> str:
    # It imports torch, which takes a second: no exact training needs it.
    from ..views.magnitudes import distance_of, width

    pieces = [
        memoryview(trial.sample(rank, *about["sample"])) for trial, about in ((one, before), (other, after))
    ]
    size = width(before["dtype"])
    if size is None or len(pieces[0]) != len(pieces[1]):
        return ""
    distance = distance_of(pieces[0], pieces[1], before["dtype"], size)
    count = len(pieces[0]) // size
    if not distance.changed:
        return f", but in none of the {count:,} numbers that were looked at"
    return f" by up to {distance.most:.1g} (in {distance.changed:,} of {count:,} numbers)"
