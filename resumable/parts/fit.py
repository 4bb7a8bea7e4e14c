"""Decides, without changing anything, what a restore from a checkpoint would do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ..errors import StateMismatch
from ..files import codec
from ..files.strict_json import Json
from ..files.threads import no_garbage_collection
from ..run import changes
from .other_parts import LoaderPart
from .part import Difference, Part, Trees
from .parts import Parts
from .reading import Reading

_NOT_GIVEN = "in the checkpoint, but not given to RunState"
_LACKING = "given to RunState, but not in the checkpoint"


class Plan(NamedTuple):
    """What a restore from one checkpoint will do."""

    reading: Reading
    chosen: Sequence[Part]
    """The parts to restore, in order."""
    unfit: Mapping[str, AbstractSet[str]]
    """By part: the names that stay as they are."""
    code_wins: Mapping[str, AbstractSet[str]]
    """By part: the settings that keep the script's value."""
    changed: Sequence[changes.Difference]
    """The settings that differ from those that the run was built with."""
    foreign: frozenset[str]
    """The parts whose restore runs code of the script or of other libraries."""
    kept: Sequence[Difference]
    """What `allow=` has left as the script made it."""
    is_whole: bool
    """Whether no part was left out by name."""


@no_garbage_collection()
def fit(
    parts: Parts,
    reading: Reading,
    allow: Sequence[str] = (),
    override: Sequence[str] | None = None,
    only: Collection[str] | None = None,
) -> Plan:
    """Return what a restore will do; StateMismatch lists everything that does not fit and is not allowed.

    Without `override` the settings are not compared.
    """
    found = _allowed(parts, reading, allow, only)
    unfit = _unfit(parts, found, allow)
    kept = [one for one in found if any(map(one.matches, allow))]
    changed = [] if override is None else _changed_settings(parts, reading, unfit, override)
    overridden = [one.name for one in changed if one.used == changes.OVERRIDES]
    chosen = [
        part
        for part in parts.all
        if "" not in unfit.get(part.name, ()) and (only is None or part.name in only)
    ]
    foreign = frozenset(part.name for part in chosen if not part.is_torchs_own())
    code_wins = _code_wins(parts, overridden)
    code_wins.get("script", set()).update(one for one in override or () if one.startswith("script"))
    return Plan(reading, chosen, unfit, code_wins, changed, foreign, kept, is_whole=only is None)


def _allowed(
    parts: Parts, reading: Reading, allow: Sequence[str], only: Collection[str] | None
) -> list[Difference]:
    """Return the differences, all of them allowed; StateMismatch for the others."""
    found, refused = [], []
    for difference in _differences(parts, reading):
        if only is None or difference.part in only:
            may_lack = difference.part in parts.found and difference.text == _LACKING
            if may_lack or any(map(difference.matches, allow)):
                found.append(difference)
            elif not difference.is_open:
                refused.append(difference)
    if refused:
        raise _mismatch(refused)
    return found


def _unfit(parts: Parts, found: Sequence[Difference], allow: Sequence[str]) -> dict[str, set[str]]:
    unfit: dict[str, set[str]] = {}
    loaders = {part.name for part in parts.all if isinstance(part, LoaderPart)}
    for difference in found:
        # A loader that is allowed as a whole starts the epoch's data again.
        is_whole = difference.part in loaders & {*allow}
        unfit.setdefault(difference.part, set()).add("" if is_whole else difference.name)
    # A weight that keeps its new value must not get the moments of the old one.
    fresh = {part.prefix_in_optimizers + name for part in parts.models for name in unfit.get(part.name, ())}
    if fresh:
        for optimizer in parts.optimizers:
            unfit.setdefault(optimizer.name, set()).update(fresh)
    return unfit


def _differences(parts: Parts, reading: Reading) -> Iterator[Difference]:
    about, live = reading.about, {part.name: part for part in parts.all}
    for name in sorted(about.parts.keys() - live.keys() - parts.elsewhere - {"script"}):
        yield Difference(name, "", _NOT_GIVEN)
    for name, part in live.items():
        kind = about.parts.get(name, {}).get("kind")
        if kind is None:
            yield Difference(name, "", _LACKING)
        elif kind != part.kind:
            yield Difference(name, "", f"{kind} in the checkpoint, {part.kind} in the code")
        elif (stem := part.rest_stem) not in reading.trees or name not in reading.trees[stem].json:
            there, here = ("for each rank", "once") if stem != "rank" else ("once", "for each rank")
            yield Difference(name, "", f"saved {there} in the checkpoint, {here} in the code (per_rank)")
        else:
            yield from _differences_of(part, reading)
            then, now = about.data_size, parts.position.processes
            if then != now:
                yield from part.resized(reading.saved(name), then, now)


def _differences_of(part: Part, reading: Reading) -> Iterator[Difference]:
    prefix = f"{part.name}."
    built = {
        path.removeprefix(prefix): value for path, value in reading.built.items() if path.startswith(prefix)
    }
    try:
        yield from part.differences(reading.saved(part.name), built)
    except (KeyError, IndexError, TypeError, AttributeError) as exc:
        # The bytes are intact, but another program wrote them.
        yield Difference(part.name, "", f"its state in the checkpoint is not that of a {part.kind}: {exc!r}")


def _mismatch(refused: Sequence[Difference]) -> StateMismatch:
    lines = [f"  {d.part}{d.name and '.'}{d.name}: {d.text}" for d in refused]
    return StateMismatch(
        "the checkpoint does not fit the objects in the script:\n" + "\n".join(lines),
        fix=f"{'; or '.join(_ways(refused))}, or {_way_without(refused)} Nothing was changed.",
    )


def _ways(refused: Sequence[Difference]) -> Iterator[str]:
    """Yield what to change in the script."""
    if any(" parameter groups in the checkpoint" in d.text for d in refused):
        # After add_param_group in mid-training, leaving the optimizer out would lose its moments.
        yield (
            "make all groups before RunState.load (at a learning rate of 0, or frozen, until they are needed)"
        )
    if names := _likely_names(refused):
        yield f"say that it was renamed: rename={names}"
    missing = [one.part for one in refused if one.text == _NOT_GIVEN]
    if missing:
        yield f"give RunState.load {', '.join(map(_given, missing))}"
    if len(missing) < len(refused):
        yield "undo the change in the script"


def _way_without(refused: Sequence[Difference]) -> str:
    allow = sorted({f"{d.part}{d.name and '.'}{d.name}" for d in refused})
    if {(_slot(one), one.name) for one in refused} == {("loader", "batch_size")}:
        return f"continue at the same sample with the new batch size: allow={allow}."
    if {one.text for one in refused} == {_NOT_GIVEN}:
        return f"continue without {'it' if len(refused) == 1 else 'them'}: allow={allow}."
    has_tensors = any(one.name and _slot(one) in ("model", "optimizer") for one in refused)
    patterns = " Patterns such as 'model.head.*' work too." if has_tensors else ""
    stays = "continue without what does not fit (it then stays as the script made it)"
    return f"{stays}: allow={allow}.{patterns}"


def _given(part: str) -> str:
    """Return a part as an argument of `RunState.load`."""
    slot, dot, name = part.partition(".")
    return f"{slot}={{{name!r}: ...}}" if dot else f"{slot}={slot}"


def _slot(difference: Difference) -> str:
    return difference.part.partition(".")[0]


def _likely_names(refused: Sequence[Difference]) -> dict[str, str]:
    """Return the modules of a model that most likely have another name in the code, and nothing else."""
    old, new = (
        {(one.name.rpartition(".")[2], one.text.partition(", ")[2]): one.name for one in there}
        for there in (
            [one for one in refused if one.part.startswith("model") and one.text.startswith(start)]
            for start in ("missing in the code", "new in the code")
        )
    )
    both = [(old[key].rpartition(".")[0], new[key].rpartition(".")[0]) for key in old.keys() & new.keys()]
    names = dict(both)
    is_clear = old.keys() == new.keys() and len({*both}) == len(names) == len({*names.values()})
    return names if is_clear and "" not in {*names, *names.values()} else {}


def _changed_settings(
    parts: Parts, reading: Reading, unfit: Mapping[str, AbstractSet[str]], override: Sequence[str]
) -> list[changes.Difference]:
    built, left_out = reading.about.built, tuple(f"{part}." for part, names in unfit.items() if "" in names)

    def used(path: str) -> str:
        if changes.is_named(path, override):
            return changes.OVERRIDES
        # A checkpoint cannot decide how data is loaded, whether a scaler is on, or about parts left out.
        is_the_codes = path.startswith(("loader", *left_out)) or path.endswith((".enabled", ".sharding"))
        return changes.CODES if is_the_codes else changes.CHECKPOINTS

    changed = [
        (path, setting)
        for path, setting in parts.settings.items()
        if path in built and built[path] != setting and not path.endswith(".frozen")
    ]
    effects = _effects(parts, reading) if changed else {}
    return [
        changes.of_setting(path, reading.built[path], codec.decode(now, {}), used(path), effects.get(path))
        for path, now in changed
    ]


def _effects(parts: Parts, reading: Reading) -> dict[str, tuple[str, str]]:
    return {
        f"{part.name}.{setting}": effect
        for part in parts.all
        if isinstance(part, LoaderPart)
        for setting, effect in part.effects(reading.saved(part.name)).items()
    }


def _code_wins(parts: Parts, overridden: Collection[str]) -> dict[str, set[str]]:
    wins = {p.name: {key for key in p.built if f"{p.name}.{key}" in overridden} for p in parts.all}
    for scheduler, optimizer in parts.schedules():
        if "lr" in wins[optimizer.name]:
            wins[scheduler.name].add("base_lrs")
    return wins


def devices(parts: Parts, trees: Trees) -> tuple[set[str], set[str]]:
    """Return the types of the devices that the models were on, and are on; the CPU counts only alone."""
    modules = [part.live for part in parts.models if part.stem == "model"]
    if not modules or "model" not in trees:
        return set(), set()
    facts = codec.tensor_facts(trees["model"].json).values()
    then = {str(about["device"]).partition(":")[0] for about in facts if "device" in about}
    now = {one.device.type for live in modules for one in (*live.parameters(), *live.buffers())} - {"cpu"}
    return then or {"cpu"}, now or {"cpu"}


def orders(reading: Reading) -> dict[str, Json]:
    """Return the order in which the gradients of each model are summed, as the checkpoint has it."""
    there = reading.trees["extra"].json if "extra" in reading.trees else {}
    found = {name: tree.get("buckets") for name, tree in there.items() if isinstance(tree, dict)}
    return {name: order for name, order in found.items() if order}


def sum_in_order(reading: Reading, orders: Mapping[str, Json]) -> None:
    """Use rank 0's order on every rank: gradients that are summed in different orders get mixed up."""
    for name, order in orders.items():
        reading.trees["extra"].json[name]["buckets"] = order
        reading.forget_view("extra", name)
