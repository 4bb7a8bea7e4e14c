"""In what two checkpoints differ: tensors, plain values, settings, the environment."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from ..files import disk, file_reader
from ..files.jsonl import plain
from ..files.strict_json import Json
from ..progress import Told
from ..run import changes
from ..run.checkpoint import RANKS, Checkpoint
from ..run.manifest import Manifest
from . import variables
from .contents import PLACE, RANDOM, Contents, Key, Span, Tensor, scan, whole
from .magnitudes import Distance, distance_of

Row = dict[str, Any]
_MISSING = object()
_Name = TypeVar("_Name")


def size_to_read(before: Contents, after: Contents) -> int:
    """Return how many bytes a comparison reads."""
    shared = _unchanged_files(before, after)
    return sum(one.found.about.files[file].size for one in (before, after) for file in {*one.heads} - shared)


def compare(before: Contents, after: Contents, told: Told | None = None) -> Row:
    """Return in what two checkpoints differ, as `diff --json` prints it but for the distances of tensors.

    Files with the same digest in both manifests are not read.
    """
    shared = _unchanged_files(before, after)
    then, now = ({tensor.key: tensor for tensor in one.tensors} for one in (before, after))
    both = {key: (then.get(key), now.get(key)) for key in dict.fromkeys([*then, *now])}
    fit = {key: pair[1] for key, pair in both.items() if pair[1] and _how(*pair) == "changed"}
    distances = _distances(before, after, then, fit, shared, told)
    tensors = [
        _tensor_row(key[1], *pair, distances.get(key))
        for key, pair in both.items()
        if key not in fit or distances[key].changed
    ]
    changes = [*_changes(before, after)]
    return {
        "before": _checkpoint_row(before),
        "after": _checkpoint_row(after),
        "equal": not (tensors or changes),
        "compared": len(both),
        "tensors": tensors,
        "changes": changes,
    }


def _checkpoint_row(held: Contents) -> Row:
    about = held.found.about
    return {"number": about.number, "path": str(held.found.path), "step": about.step, "run_id": about.run_id}


def _how(before: Tensor | None, after: Tensor | None) -> str:
    if before is None or after is None:
        return "missing" if before else "new"
    if before.dtype != after.dtype:
        return "other dtype"
    return "changed" if before.shape == after.shape else "other shape"


def _tensor_row(name: str, before: Tensor | None, after: Tensor | None, distance: Distance | None) -> Row:
    """Return in what a tensor differs; its distance is None if it cannot be compared number by number."""
    known = distance if distance and distance.before.is_known else None
    then, now = (one and {"dtype": one.dtype, "shape": one.shape} for one in (before, after))
    either = before or after
    assert either
    return {
        "name": name,
        "part": either.part,
        "what": _how(before, after),
        "before": then,
        "after": now,
        "changed": distance and distance.changed,
        "largest": known and plain(known.most),
        "relative": known and plain(known.relative),
        "not_finite": known and known.not_finite,
        "distance": distance,
    }


def _unchanged_files(before: Contents, after: Contents) -> set[str]:
    then, now = before.found.about.files, after.found.about.files
    found = {file for file in before.heads if then[file] == now.get(file)}
    several = [
        {span.file for span in one.spans} for one in (*before.tensors, *after.tensors) if len(one.spans) > 1
    ]
    # What is in several files is read in all of them, or in none.
    while partly := [files for files in several if files & found and not files <= found]:
        found = found.difference(*partly)
    return found


def _distances(
    before: Contents,
    after: Contents,
    then: Mapping[Key, Tensor],
    fit: Mapping[Key, Tensor],
    shared: set[str],
    told: Told | None,
) -> dict[Key, Distance]:
    for file in {*after.heads} - shared:
        # Verified as a whole first. Below it is read again, piece by piece: a committed file stays as it is.
        after.found.scan_file(file, told=told)
    found: dict[Key, Distance] = {}
    guard = threading.Lock()
    cut = {key for key, met in fit.items() if not _lie_alike(then[key], met)}
    with contextlib.ExitStack() as stack:
        opened = {file: stack.enter_context(_opened(after.found, file)) for file in {*after.heads} - shared}

        def take(tensor: Tensor, span: Span, at: int, piece: memoryview) -> None:
            if (met := fit.get(tensor.key)) is None or tensor.key in cut:
                return
            there = next(one for one in met.spans if (one.at, one.shape) == (span.at, span.shape))
            begin = there.begin + at
            other = file_reader.read_range(opened[there.file], begin, begin + piece.nbytes)
            distance = distance_of(piece, other, tensor.dtype, tensor.width)
            with guard:
                found[tensor.key].add(distance)

        found |= {key: Distance() for key in fit}
        for file in {*before.heads} - shared:
            scan(before, file, take, told)
    for key in cut:
        one, other = (whole(held, tensor) for held, tensor in ((before, then[key]), (after, fit[key])))
        found[key].add(distance_of(one, other, fit[key].dtype, fit[key].width))
    return found


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    """Whether a tensor is stored in the same boxes in both checkpoints, or in one piece."""
    return {(span.at, span.shape) for span in one.spans} == {(span.at, span.shape) for span in other.spans}


@contextlib.contextmanager
def _opened(found: Checkpoint, file: str) -> Iterator[int]:
    with disk.opened(found.path, file) as opened:
        yield opened.fileno()


def _changes(before: Contents, after: Contents) -> Iterator[Row]:
    """Yield the parts, settings, values and facts about the environment that differ."""
    then, now = before.found.about, after.found.about
    is_on_gpu = bool(then.environment.get("gpus") or now.environment.get("gpus"))
    kinds = [{name: one.kind_of(name) for name in one.found.about.parts} for one in (before, after)]
    for name, one, other in _unequal(*kinds):
        yield _change_row("part", name, one, other)
    for name, one, other in _unequal(then.built, now.built):
        yield _change_row("setting", name, one, other, changes.setting_effect(name))
    for name, one, other in _unequal({"processes": then.world_size}, {"processes": now.world_size}):
        yield _change_row("setting", name, one, other, changes.WILL)
    for place, one, other in _unequal(before.leaves(), after.leaves()):
        if place.part == variables.PART:
            rank = _rank(place.stem) if then.world_size > 1 else ""
            yield _change_row("variable", rank + place.path.removeprefix(f"{variables.PART}."), one, other)
        else:
            yield _change_row("value", f"{_rank(place.stem)}{place.path}", one, other)
    for name, one, other in _unequal(then.environment, now.environment):
        effect = changes.environment_effect(name, one, other, is_on_gpu)
        yield _change_row("environment", name, one, other, effect)


def folded(found: Row, kinds: Mapping[str, Json], before: Manifest, after: Manifest) -> Row:
    """Return differences with a line each for the random states and for the place in the data."""
    hidden = {name: kind for name, kind in kinds.items() if kind in (*RANDOM, PLACE)}
    parts = [row["part"] for row in found["tensors"]]
    parts += [_part_of(row) for row in found["changes"] if row["kind"] == "value"]
    there = {hidden[part] for part in parts if part in hidden}
    lines = ["random states differ"] if there & {*RANDOM} else []
    lines += [_place(before, after)] if PLACE in there else []
    changes = [row for row in found["changes"] if row["kind"] != "value" or _part_of(row) not in hidden]
    metrics = [row for row in found["changes"] if ".metrics." in row["name"] and _part_of(row) == "position"]
    tensors = [row for row in found["tensors"] if row["part"] not in hidden]
    more = {"lines": lines, "differing": len(found["tensors"])}
    return found | {"tensors": tensors, "changes": changes + metrics} | more


def _part_of(row: Row) -> str:
    return str(row["name"].rpartition(": ")[2].partition(".")[0])


def _place(before: Manifest, after: Manifest) -> str:
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in ("epoch", "batch")}
    if all(then == now for then, now in pairs.values()):
        return "the place in the data differs"
    texts = [f"{name} {then}" + f" -> {now}" * (now != then) for name, (then, now) in pairs.items()]
    return f"the place in the data differs: {', '.join(texts)}"


def _change_row(kind: str, name: str, before: Any, after: Any, effect: str | None = None) -> Row:
    missing = "before" if before is _MISSING else "after" if after is _MISSING else None
    then, now = (None if side is _MISSING else side for side in (before, after))
    return {"kind": kind, "name": name, "before": then, "after": now, "effect": effect, "missing": missing}


def _rank(stem: str) -> str:
    return f"rank {int(stem.removeprefix(RANKS))}: " if stem.startswith(RANKS) else ""


def _unequal(then: Mapping[_Name, Json], now: Mapping[_Name, Json]) -> Iterator[tuple[_Name, Any, Any]]:
    for name in dict.fromkeys([*then, *now]):
        one, other = then.get(name, _MISSING), now.get(name, _MISSING)
        # By their JSON: to Python 1, 1.0 and True are equal.
        if _MISSING in (one, other) or json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True):
            yield name, one, other
