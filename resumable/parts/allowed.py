"""What the patterns of `allow=` name, and what they have left as the script made it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeGuard

from ..errors import UsageError, did_you_mean
from .models import ModulePart
from .optimizers import OptimizerPart
from .part import Difference, Part
from .parts import SLOTS, Parts
from .reading import Reading

_MOST = 3


def refuse_unknown(
    allow: Collection[str], parts: Parts, reading: Reading | None, earlier: AbstractSet[str]
) -> None:
    """Raise UsageError for a pattern that names nothing, in the script or in the checkpoint.

    `earlier`: the patterns that named something at an earlier start, whose checkpoint may be gone. Without
    a checkpoint only a pattern that is nearly a name is refused: it may be meant for another run's.
    """
    names = [*_names(parts, reading)]
    for pattern in allow:
        # What is inside of these is not known by name: other processes have it, or code of the script does.
        opaque = {*parts.elsewhere, *(part.name for part in parts.all if not _has_tensors(part))}
        is_elsewhere = pattern.startswith(tuple(f"{name}." for name in opaque))
        if pattern in earlier or is_elsewhere or " = " in pattern:
            continue
        if any(Difference(*name, "").matches(pattern) for name in names):
            continue
        meant = _meant(pattern, names)
        if reading is not None or meant:
            where = "" if reading is None else f" or of checkpoint {reading.about.number}"
            raise UsageError(
                f"allow={pattern!r} names nothing: no part or tensor of the script{where} is called that."
                + meant,
                fix="correct the name, or leave it out; patterns such as 'model.head.*' work too.",
            )


def _has_tensors(part: Part) -> TypeGuard[ModulePart | OptimizerPart]:
    return isinstance(part, (ModulePart, OptimizerPart))


def _names(parts: Parts, reading: Reading | None) -> Iterable[tuple[str, str]]:
    """Return the names of what may differ, each with its part."""
    yield from ((slot, "") for slot in (*SLOTS, "loader"))
    for part in parts.all:
        yield part.name, ""
        own = part.tensors() if _has_tensors(part) else part.built
        for name in own:
            yield part.name, name
            yield part.name, f"{name}.requires_grad"
    for name in reading.about.parts if reading else ():
        yield name, ""
    for stem, tree in reading.trees.items() if reading else ():
        for part_name, json in tree.json.items():
            for name in _names_in(stem, json):
                yield part_name, name


def _names_in(stem: str, json: object) -> Iterable[str]:
    if stem == "model" and isinstance(json, dict):
        yield from json
    elif isinstance(json, dict):
        for key in ("weights", "values", "buffers", "loose", "iterables", "gradients"):
            found = json.get(key)
            yield from found if isinstance(found, dict) else ()
        yield from ("gradients",)
        groups = json.get("groups")
        for group in groups if isinstance(groups, list) else ():
            yield from group.get("params", ()) if isinstance(group, dict) else ()


def _meant(pattern: str, names: Iterable[tuple[str, str]]) -> str:
    """Return the end of the message for a pattern that is nearly a name."""
    stem = pattern
    for wildcard in "*?[":
        stem = stem.partition(wildcard)[0]
    rest, stem = pattern[len(stem.rstrip(".")) :], stem.rstrip(".")
    known = set[str]()
    for part, name in names:
        words = name.split(".") if name else []
        inner = {".".join(words[:count]) for count in range(1, len(words) + 1)}
        known |= {part} | inner | {f"{part}.{one}" for one in inner}
    return did_you_mean(stem, sorted(known), lambda one: repr(one + rest))


def told(kept: Sequence[Difference], parts: Parts) -> str:
    """Return what to add to the line of a resume about the differences that `allow=` names.

    Moments are not told where their weight is.
    """
    live = {part.name: part for part in parts.all}
    tensors: dict[str, None] = {}
    left: dict[str, None] = {}
    wholes: dict[str, None] = {}
    for one in kept:
        part = live.get(one.part)
        if not one.name:
            (left if part is None else wholes)[one.part] = None
        elif isinstance(part, ModulePart) and not one.name.endswith(".requires_grad"):
            name = one.name if one.part == "model" else f"{one.part}.{one.name}"
            (tensors if one.name in part.tensors() else left)[name] = None
        elif not isinstance(part, ModulePart) and not isinstance(part, OptimizerPart):
            wholes[f"{one.part}.{one.name}"] = None
    them = "it" if len(wholes) == 1 else "them"
    texts = {
        f"{_count(tensors)} {'keeps' if len(tensors) == 1 else 'keep'} the script's values": tensors,
        f"as the script made {them}": wholes,
        "left out of the checkpoint": left,
    }
    return "".join(f"; {text}: {_listed([*names])}" for text, names in texts.items() if names)


def _count(names: Collection[str]) -> str:
    return "1 tensor" if len(names) == 1 else f"{len(names)} tensors"


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def told_names(renamed: Mapping[str, Mapping[str, str]]) -> str:
    """Return what to add to the line of a resume about the names that `rename=` has changed."""
    pairs = [f"{old} -> {new}" for names in renamed.values() for old, new in names.items()]
    return f"; {_count(pairs)} renamed: {_listed(pairs)}" if pairs else ""
