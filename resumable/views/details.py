"""What `show` and `diff` tell of checkpoints: as JSON for programs, and as text for people."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import reduce
from typing import Any, TypeVar

from ..errors import printable
from ..files.jsonl import plain
from ..files.strict_json import Json
from ..run.checkpoint import RANKS
from ..run.policy import bytes_of
from .comparison import MISSING, Change, Comparison, Pair
from .contents import Contents, Measured, Place, Tensor, described, generators
from .magnitudes import Distance, Size
from .tables import age, numbers, print_table

Row = dict[str, Any]
_Item = TypeVar("_Item")

_MOST = 24
"""So many lines of a kind are read by a person; more are gathered, or cut."""
_FEW = 8
"""Of what repeats the names of the model."""
_LONGEST = 60
_DTYPES = 3


def facts(held: Contents, measured: Measured, why: str | None) -> Row:
    """Return all that is told of one checkpoint."""
    about = held.found.about
    tensors = [_tensor_row(tensor, measured.sizes[tensor.key]) for tensor in held.tensors]
    return {
        "number": about.number,
        "path": str(held.found.path),
        "run_id": about.run_id,
        "parent": about.parent,
        "saved": about.saved,
        "why": why,
        "boundary": about.boundary.value,
        "epoch": about.epoch,
        "batch": about.batch,
        "step": about.step,
        "samples": about.samples,
        "metrics": plain(about.metrics),
        "best": about.best
        and {**asdict(about.best.goal), "value": about.best.value, "number": about.best.number},
        "processes": about.world_size,
        "size": about.size,
        "parts": [
            _part_row(name, str(kind.get("kind")), held, measured) for name, kind in about.parts.items()
        ],
        "tensors": tensors,
        "settings": dict(about.built),
        "groups": [*_groups(held)],
        "values": {place.path: value for place, value in _values(held)},
        "random": [one._asdict() for one in generators(held, measured)],
        "environment": dict(about.environment),
    }


def _tensor_row(tensor: Tensor, size: Size) -> Row:
    return {
        "name": tensor.name,
        "part": tensor.part,
        "file": tensor.file,
        "dtype": tensor.dtype,
        "shape": [*tensor.shape],
        "size": tensor.size,
        "norm": plain(size.norm),
        "nan": size.nan,
        "inf": size.inf,
    }


def _part_row(name: str, kind: str, held: Contents, measured: Measured) -> Row:
    own = [tensor for tensor in held.tensors if tensor.part == name]
    whole = _whole(measured.sizes[tensor.key] for tensor in own)
    return {
        "name": name,
        "kind": kind,
        "tensors": len(own),
        "values": sum(tensor.values for tensor in own),
        "size": sum(tensor.size for tensor in own),
        "norm": plain(whole.norm) if own else None,
    }


def _whole(sizes: Iterable[Size]) -> Size:
    found = Size()
    for size in sizes:
        found.add(size)
    return found


def _groups(held: Contents) -> Iterator[Row]:
    """Yield the settings that the groups of parameters have now."""
    for part, value in held.trees.get("optimizer", {}).items():
        groups = value.get("groups") if isinstance(value, dict) else None
        for number, group in enumerate(groups if isinstance(groups, list) else []):
            if isinstance(group, dict):
                names = group.get("params")
                count = len(names) if isinstance(names, list) else None
                settings = {key: one for key, one in group.items() if key != "params"}
                yield {"part": part, "group": number, "parameters": count, "settings": settings}


def _values(held: Contents) -> Iterator[tuple[Place, Json]]:
    """Yield the plain values of the parts, but for what is told elsewhere; of ranks, those of the first."""
    kinds = {name: about.get("kind") for name, about in held.found.about.parts.items()}
    first = held.ranks()[:1]
    for place, value in held.leaves().items():
        is_first = not place.stem.startswith(RANKS) or place.stem in first
        if is_first and place.stem != "optimizer" and kinds.get(place.part) not in ("random", "generator"):
            yield place, value


def print_facts(told: Row, depth: int | None, all_of_it: bool) -> None:
    """Print all that is told of one checkpoint, for people."""
    _print_head(told)
    _print_parts(told)
    _print_tensors(told, depth, all_of_it)
    _print_settings(told)
    _print_values(told, all_of_it)
    rows = [[str(one["rank"] or 0), one["name"], one["kind"], one["state"]] for one in told["random"]]
    _print_section("random generators", [["rank", "name", "kind", "state"], *rows], (1, 2, 3), all_of_it)
    rows = [[name, _shown(value)] for name, value in told["environment"].items() if value not in (None, [])]
    _print_section("environment", rows, (0, 1), True)


def _print_head(told: Row) -> None:
    best = told["best"]
    line = [numbers(told["metrics"])] if told["metrics"] else []
    if best:
        line += [f"the best {best['metric']}, {best['value']:.4g}, has checkpoint {best['number']}"]
    where = {"batch": "in mid-epoch", "epoch": "an epoch has ended", "step": "between two steps"}
    stands = f"epoch {told['epoch']}, batch {told['batch']}, step {told['step']}, {told['samples']:,} samples"
    rows = [
        ["path", told["path"]],
        [
            "saved",
            f"{_time(told['saved'])}, {age(told['saved'])}" + (f": {told['why']}" if told["why"] else ""),
        ],
        ["position", ": ".join(filter(None, [stands, where.get(told["boundary"])]))],
        ["metrics", "; ".join(line)],
        ["parent", "none" if told["parent"] is None else f"checkpoint {told['parent']}"],
        ["size", bytes_of(told["size"])],
    ]
    print(f"checkpoint {told['number']}")
    print_table([row for row in rows if row[1]], (0, 1), "  ")


def _print_parts(told: Row) -> None:
    head = ["name", "kind", "tensors", "values", "size", "norm"]
    rows = [
        [
            one["name"],
            one["kind"],
            str(one["tensors"] or ""),
            f"{one['values']:,}" if one["tensors"] else "",
            bytes_of(one["size"]) if one["tensors"] else "",
            _number(None if one["kind"] in ("random", "generator") else one["norm"]),
        ]
        for one in told["parts"]
    ]
    _print_section("parts", [head, *rows], (0, 1), True)


def _print_tensors(told: Row, depth: int | None, all_of_it: bool) -> None:
    kinds = {one["name"]: one["kind"] for one in told["parts"]}
    by_part: dict[str, list[Row]] = {}
    for row in told["tensors"]:
        if kinds.get(row["part"]) not in ("random", "generator"):
            by_part.setdefault(row["part"], []).append(row)
    for part in sorted(by_part, key=[*kinds, ""].index):
        named = [(_short(row["name"], part), row) for row in by_part[part]]
        gathered = _gathered(named, depth, all_of_it, _MOST if kinds.get(part) == "module" else _FEW)
        rows = [_tensor_cells(name, rows) for name, rows in gathered.items()]
        title = f"tensors of {part}" if part else "tensors of no part"
        _print_section(
            title, [["", "", "shape", "dtype", "size", "norm", ""], *rows], (0, 2, 3, 6), all_of_it
        )


def _tensor_cells(name: str, rows: Sequence[Row]) -> list[str]:
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    norms = [row["norm"] for row in rows]
    norm = None if None in norms else math.hypot(*map(float, norms))
    odd = {word: sum(row[word] for row in rows) for word in ("nan", "inf")}
    return [
        name,
        f"{len(rows)} tensors" if len(rows) > 1 else "",
        _shape(rows[0]["shape"]) if len(rows) == 1 else "",
        ", ".join(dtypes) if len(dtypes) <= _DTYPES else f"{len(dtypes)} dtypes",
        bytes_of(sum(row["size"] for row in rows)),
        _number(norm),
        ", ".join(f"{count:,} {word}" for word, count in odd.items() if count),
    ]


def _print_settings(told: Row) -> None:
    rows = [[name, _shown(value)] for name, value in told["settings"].items() if value not in (None, [])]
    _print_section("settings, as the script has made the parts", rows, (0, 1), True)
    built, rows = told["settings"], []
    for group in told["groups"]:
        for name, value in group["settings"].items():
            # What has stayed as it was made stands above.
            as_made = built.get(f"{group['part']}.{name.removeprefix('initial_')}")
            if value is not None and as_made != value:
                rows.append([f"{group['part']}, group {group['group']}", name, _shown(value)])
    _print_section("settings, as the training has changed them", rows, (0, 1, 2), True)


def _print_values(told: Row, all_of_it: bool) -> None:
    rows = [
        [name, _shown(value)]
        for name, value in told["values"].items()
        if all_of_it or not _is_dull(name, value, told["settings"])
    ]
    _print_section("values", rows, (0, 1), all_of_it)


def _is_dull(name: str, value: Json, settings: Mapping[str, Json]) -> bool:
    """Whether a value is empty, as it was made, told above, or the bookkeeping of whom it belongs to."""
    part, _, rest = name.partition(".")
    is_inner = rest.startswith(("_", "settings.", "source.")) and rest not in _TELLING
    return value in (None, [], {}) or is_inner or part == "position" or settings.get(name) == value


_TELLING = ("_last_lr", "source.batches", "source.samples")


def differences(then: Contents, now: Contents, found: Comparison) -> Row:
    """Return in what two checkpoints differ."""
    return {
        "before": _whom(then),
        "after": _whom(now),
        "equal": not (found.pairs or found.changes),
        "compared": found.count,
        "tensors": [_pair_row(pair) for pair in found.pairs],
        "changes": [_change_row(change) for change in found.changes],
    }


def _whom(held: Contents) -> Row:
    about = held.found.about
    return {"number": about.number, "path": str(held.found.path), "step": about.step, "run_id": about.run_id}


def _pair_row(pair: Pair) -> Row:
    far = pair.distance
    is_number = far is not None and far.before.is_known
    return {
        "name": pair.key[1],
        "part": pair.part,
        "what": pair.what,
        "before": pair.before and _kind(pair.before),
        "after": pair.after and _kind(pair.after),
        "changed": far and far.changed,
        "largest": plain(far.most) if far and is_number else None,
        "relative": plain(far.relative) if far and is_number else None,
        "not_finite": far.not_finite if far and is_number else None,
    }


def _kind(tensor: Tensor) -> Row:
    return {"dtype": tensor.dtype, "shape": [*tensor.shape]}


def _change_row(change: Change) -> Row:
    sides = {
        side: None if value is MISSING else value
        for side, value in (("before", change.before), ("after", change.after))
    }
    missing = next((side for side in ("before", "after") if getattr(change, side) is MISSING), None)
    return {"kind": change.kind, "name": change.name, **sides, "missing": missing, "effect": change.effect}


def print_differences(
    then: Contents, now: Contents, found: Comparison, depth: int | None, all_of_it: bool
) -> None:
    """Print in what two checkpoints differ, for people."""
    whom = [_whom(held) for held in (then, now)]
    print_table(
        [
            [f"{side} checkpoint {one['number']}", f"step {one['step']}", one["path"]]
            for side, one in zip("AB", whom, strict=True)
        ],
        (0, 2),
    )
    if not (found.pairs or found.changes):
        print(f"\nequal: {found.count} tensors to the last bit, all values, settings and the environment")
        return
    print(f"\n{len(found.pairs):,} of {found.count:,} tensors differ")
    kinds = {name: about.get("kind") for name, about in then.found.about.parts.items()}
    by_part: dict[str, list[Pair]] = {}
    for pair in found.pairs:
        by_part.setdefault(pair.part, []).append(pair)
    for part, pairs in sorted(by_part.items(), key=lambda item: [*kinds, item[0]].index(item[0])):
        named = [(_short(pair.key[1], part), pair) for pair in pairs]
        gathered = _gathered(named, depth, all_of_it, _MOST if kinds.get(part) == "module" else _FEW)
        are_sizes = kinds.get(part) not in ("random", "generator")
        rows = [_pair_cells(name, pairs, are_sizes) for name, pairs in gathered.items()]
        head = ["", "", "values that differ", "largest", "relative", ""]
        _print_section(f"tensors of {part or 'no part'}", [head, *rows], (0, 5), all_of_it)
    for kind, title in (
        ("part", "parts"),
        ("setting", "settings"),
        ("value", "values"),
        ("environment", "environment"),
    ):
        rows = [_change_cells(change) for change in found.changes if change.kind == kind]
        _print_section(title, rows, (0, 1, 2, 3), all_of_it)


def _pair_cells(name: str, pairs: Sequence[Pair], are_sizes: bool) -> list[str]:
    far = reduce(_joined, (pair.distance for pair in pairs if pair.distance), Distance())
    are_numbers = are_sizes and far.before.is_known and far.before.count
    words = dict.fromkeys(_what(pair) for pair in pairs if pair.what != "changed")
    if far.not_finite:
        words[f"{far.not_finite:,} not finite any more"] = None
    return [
        name,
        f"{len(pairs)} tensors" if len(pairs) > 1 else "",
        f"{far.changed:,} of {far.before.count:,}" if far.before.count else "",
        _number(far.most) if are_numbers else "",
        _number(far.relative) if are_numbers else "",
        ", ".join(words),
    ]


def _joined(one: Distance, other: Distance) -> Distance:
    one.add(other)
    return one


def _what(pair: Pair) -> str:
    if pair.before is None or pair.after is None:
        return "only in A" if pair.before else "only in B"
    if pair.what == "other dtype":
        return f"{pair.before.dtype} -> {pair.after.dtype}"
    return f"{_shape(pair.before.shape)} -> {_shape(pair.after.shape)}"


def _change_cells(change: Change) -> list[str]:
    then, now = ("-" if side is MISSING else _shown(side) for side in (change.before, change.after))
    return [change.name, then, f"-> {now}", change.effect or ""]


def _gathered(
    named: Sequence[tuple[str, _Item]], depth: int | None, all_of_it: bool, most: int
) -> dict[str, list[_Item]]:
    """Return items by what their names begin with: as much of it as still gives few lines."""
    paths = [name.split(".") for name, _ in named]
    deepest = max((len(path) for path in paths), default=1)
    if all_of_it:
        depth = deepest
    if depth is None:
        fits = (deep for deep in range(deepest, 0, -1) if len({(*path[:deep],) for path in paths}) <= most)
        depth = next(fits, 1)
    found: dict[str, list[_Item]] = {}
    first: dict[str, str] = {}
    for path, (name, item) in zip(paths, named, strict=True):
        short = ".".join(path[:depth]) + ".*" if len(path) > depth else name
        found.setdefault(short, []).append(item)
        first.setdefault(short, name)
    return {first[short] if len(items) == 1 else short: items for short, items in found.items()}


def _print_section(
    title: str, rows: Sequence[Sequence[str]], to_the_left: Sequence[int], all_of_it: bool
) -> None:
    has_head = bool(rows) and (not rows[0][0] or rows[0][0] in ("name", "rank"))
    if len(rows) <= has_head:
        return
    print(f"\n{printable(title, but='')}")
    most = len(rows) if all_of_it else _MOST + has_head
    print_table(rows[:most], to_the_left, "  ")
    if len(rows) > most:
        print(f"  ... and {len(rows) - most:,} more: --all")


def _short(name: str, part: str) -> str:
    return name.removeprefix(f"{part}.")


def _time(saved: str) -> str:
    return saved.replace("T", " ").replace("+00:00", " UTC")


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _number(value: float | str | None) -> str:
    return "" if value is None else f"{float(value):.4g}"


def _shown(value: Json) -> str:
    text = value if isinstance(value, str) else described(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
