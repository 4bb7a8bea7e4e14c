"""Describes and compares checkpoints for `show` and `diff`: rows as JSON, or as tables."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import printable
from ..files.jsonl import plain
from ..files.strict_json import Json
from ..run.checkpoint import RANKS
from ..run.policy import bytes_of
from . import variables
from .columns import terminal_width
from .contents import PLACE, RANDOM, Contents, Measured, Tensor, generators
from .magnitudes import Distance, Size
from .tables import age, bold, numbers, print_table
from .trees import described

Row = dict[str, Any]
_Item = TypeVar("_Item")

_MOST = 24
"""The lines of one kind that a person reads; more are grouped, or cut."""
_FEW = 8
"""The same for what repeats the names of the model, or is in one variable."""
_LONGEST = 60
_LONG_NUMBER = re.compile(r"\d+\.\d{6,}(?:e[+-]?\d+)?")
_DTYPES = 3
_LARGE = 0.1
"""The share of a checkpoint from which on a variable's is named."""
_PIECE = re.compile(r"\.(?![^\[]*\])|(?=\[)")
"""Where a path goes on: at a dot, or a bracket."""


def facts(held: Contents, measured: Measured, why: str | None) -> Row:
    """Return all facts about one checkpoint."""
    about = held.found.about
    best = about.best and {
        **about.best.goal._asdict(),
        "value": about.best.value,
        "number": about.best.number,
    }
    same = ("number", "run_id", "parent", "saved", "epoch", "batch", "step", "samples", "size")
    return {name: getattr(about, name) for name in same} | {
        "path": str(held.found.path),
        "why": why,
        "boundary": about.boundary.value,
        "metrics": plain(about.metrics),
        "best": best,
        "processes": about.world_size,
        "parts": [_part_row(name, held, measured) for name in about.parts],
        "tensors": [_tensor_row(tensor, measured.sizes[tensor.key]) for tensor in held.tensors],
        "settings": dict(about.built),
        "groups": [*_group_rows(held)],
        "values": dict(_values(held)),
        "variables": [*_variables(held, measured)],
        "random": [*generators(held, measured)],
        "environment": dict(about.environment),
    }


def _tensor_row(tensor: Tensor, size: Size) -> Row:
    same = ("name", "part", "file", "dtype", "shape", "size")
    row = {name: getattr(tensor, name) for name in same}
    return row | {"norm": plain(size.norm), "nan": size.nan, "inf": size.inf}


def _part_row(name: str, held: Contents, measured: Measured) -> Row:
    own = [tensor for tensor in held.tensors if tensor.part == name]
    whole = Size()
    for tensor in own:
        whole.add(measured.sizes[tensor.key])
    return {
        "name": name,
        "kind": str(held.kind_of(name)),
        "tensors": len(own),
        "values": sum(tensor.values for tensor in own),
        "size": sum(tensor.size for tensor in own),
        "norm": plain(whole.norm) if own else None,
    }


def _group_rows(held: Contents) -> Iterator[Row]:
    """Yield the current settings of each group of parameters."""
    for part, value in held.trees.get("optimizer", {}).items():
        groups = value.get("groups") if isinstance(value, dict) else None
        for number, group in enumerate(groups if isinstance(groups, list) else []):
            if isinstance(group, dict):
                names = group.get("params")
                count = len(names) if isinstance(names, list) else None
                settings = {key: one for key, one in group.items() if key != "params"}
                yield {"part": part, "group": number, "parameters": count, "settings": settings}


def _values(held: Contents) -> Iterator[tuple[str, Json]]:
    """Yield the plain values of the parts that nothing else shows; of the ranks, those of the first."""
    first = held.ranks()[:1]
    for place, value in held.leaves().items():
        is_first = not place.stem.startswith(RANKS) or place.stem in first
        is_elsewhere = held.kind_of(place.part) in (*RANDOM, variables.PART)
        if is_first and place.stem != "optimizer" and not is_elsewhere:
            yield place.path, value


def _variables(held: Contents, measured: Measured) -> Iterator[Row]:
    """Yield what the variables hold on the first rank that has them, and on how many others it differs."""
    tensors = {(tensor.stem, tensor.name): tensor for tensor in held.tensors}
    looks = {stem: held.trees[stem].get(variables.PART) for stem in held.ranks()}
    ranks = {stem: [*variables.rows(look)] for stem, look in looks.items() if look}

    def content(stem: str, row: variables.Row) -> object:
        return row.kind, row.value, measured.sizes.get((stem, f"{variables.PART}.{row.path}"))

    found = {stem: {row.path: content(stem, row) for row in some} for stem, some in ranks.items()}
    first = {row.path: (stem, row) for stem in reversed(ranks) for row in reversed(ranks[stem])}
    for stem, row in reversed(first.values()):
        tensor = tensors.get((stem, f"{variables.PART}.{row.path}"))
        yield {
            "name": row.path,
            "of": row.root,
            "kind": f"{row.kind} {_shape(tensor.shape)} {tensor.dtype}" if tensor else row.kind,
            "value": None if tensor else row.value,
            "size": tensor.size if tensor else len(json.dumps(row.value)) * (row.value is not None),
            "is_left_alone": row.is_constant,
            "norm": plain(measured.sizes[tensor.key].norm) if tensor else None,
            "differs_on": sum(one.get(row.path) != found[stem][row.path] for one in found.values()),
        }


def print_facts(told: Row, depth: int | None, all_of_it: bool) -> None:
    """Print all facts about one checkpoint."""
    _print_head(told)
    _print_parts(told)
    _print_tensors(told, depth, all_of_it)
    _print_variables(told, all_of_it)
    _print_settings(told)
    places = [one["name"] for one in told["parts"] if one["kind"] == PLACE]
    rows = [
        [name, _shown(value)]
        for name, value in told["values"].items()
        if all_of_it or not _is_dull(name, value, told["settings"], places)
    ]
    _print_section("values", rows, (0, 1), all_of_it)
    if all_of_it:
        rows = [[str(one["rank"] or 0), one["name"], one["kind"], one["state"]] for one in told["random"]]
        _print_section("random generators", [["rank", "name", "kind", "state"], *rows], (1, 2, 3), True)
    _print_section("environment", [*_set(told["environment"])], (0, 1), True)


def _print_head(told: Row) -> None:
    best = told["best"]
    metrics = [numbers(told["metrics"])] if told["metrics"] else []
    if best:
        holder = f"checkpoint {best['number']}" if best["number"] else "before this run"
        metrics += [f"best {best['metric']} {best['value']:.4g} ({holder})"]
    where = {"batch": "in mid-epoch", "epoch": "at the end of an epoch", "step": "between two steps"}
    position = [
        f"epoch {told['epoch']}, batch {told['batch']}, step {told['step']}, {told['samples']:,} samples"
    ]
    position += [where[told["boundary"]]] if told["boundary"] in where else []
    saved = told["saved"].replace("T", " ").replace("+00:00", " UTC")
    rows = [
        ["path", told["path"]],
        ["saved", f"{saved}, {age(told['saved'])}" + (f": {told['why']}" if told["why"] else "")],
        ["position", ": ".join(position)],
        ["metrics", "; ".join(metrics)],
        ["parent", "none" if told["parent"] is None else f"checkpoint {told['parent']}"],
        ["size", bytes_of(told["size"])],
    ]
    print(bold(f"checkpoint {told['number']}"))
    print_table([row for row in rows if row[1]], (0, 1), "  ")


def _print_parts(told: Row) -> None:
    rows = []
    for one in told["parts"]:
        cells = ["", "", "", ""]
        if one["tensors"]:
            norm = None if one["kind"] in (*RANDOM, PLACE) else one["norm"]
            cells = [str(one["tensors"]), f"{one['values']:,}", bytes_of(one["size"]), _number(norm)]
        rows.append([one["name"], one["kind"], *cells])
    _print_section("parts", [["name", "kind", "tensors", "values", "size", "norm"], *rows], (0, 1), True)


def _print_tensors(told: Row, depth: int | None, all_of_it: bool) -> None:
    kinds = {one["name"]: one["kind"] for one in told["parts"]}
    hidden = (*RANDOM, variables.PART, *([] if all_of_it else [PLACE]))
    named = [
        (row["part"], row["name"], row) for row in told["tensors"] if kinds.get(row["part"]) not in hidden
    ]
    for part, gathered in _by_part(named, kinds, depth, all_of_it):
        rows = [_tensor_cells(name, rows) for name, rows in gathered.items()]
        head = ["", "", "shape", "dtype", "size", "norm", ""]
        _print_section(f"tensors of {part or 'no part'}", [head, *rows], (0, 2, 3, 6), all_of_it)


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


def _print_variables(told: Row, all_of_it: bool) -> None:
    rows = [row for row in told["variables"] if all_of_it or row["kind"] != variables.KEYS]
    alone = [] if all_of_it else [row for row in rows if row["is_left_alone"]]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row not in alone:
            groups.setdefault(row["name"] if all_of_it else row["of"], []).append(row)
    cells = [_variable_cells(group, told["size"]) for group in groups.values()]
    if alone:
        size = bytes_of(sum(row["size"] for row in alone))
        names = ", ".join(dict.fromkeys(row["of"] for row in alone))
        cells.append(["", "left alone", size, _cut(names), ""])
    _print_section("variables", [["name", "kind", "size", "value", ""], *cells], (0, 1, 3, 4), all_of_it)


def _variable_cells(rows: Sequence[Row], whole: int) -> list[str]:
    if len(rows) == 2 and " of " not in rows[0]["kind"]:
        # One attribute or item has changed.
        rows = rows[1:]
    size = sum(row["size"] for row in rows)
    share = f" ({100 * size / whole:.0f} %)" if size > _LARGE * whole else ""
    several = max(row["differs_on"] for row in rows)
    plain = [(row, str(row["name"]).removeprefix(row["of"])) for row in rows[1:] if row["value"] is not None]
    inside = [
        f"{step.strip('.')}={_shown(row['value'])}" if not step[1:-1].isdigit() else _shown(row["value"])
        for row, step in plain[:_FEW]
        if len(_PIECE.findall(step)) == 1
    ]
    value = ", ".join(inside)
    if len(rows) == 1 and rows[0]["kind"] != "deleted":
        norm = rows[0]["norm"]
        value = f"norm {_number(norm)}" if norm is not None else _shown(rows[0]["value"])
    differs = f"differs on {several} other rank{'s' * (several > 1)}" if several else ""
    return [rows[0]["name"], rows[0]["kind"], bytes_of(size) + share, _cut(value), differs]


def _print_settings(told: Row) -> None:
    built = told["settings"]
    _print_section("settings, as the script made the parts", [*_set(built)], (0, 1), True)
    rows = [
        [f"{group['part']}, group {group['group']}", name, _shown(value)]
        for group in told["groups"]
        for name, value in group["settings"].items()
        # What still is as it was made stands above.
        if value is not None and value != built.get(f"{group['part']}.{name.removeprefix('initial_')}")
    ]
    _print_section("settings, as the training changed them", rows, (0, 1, 2), True)


def _set(values: Mapping[str, Json]) -> Iterator[list[str]]:
    return ([name, _shown(value)] for name, value in values.items() if value not in (None, []))


def _is_dull(name: str, value: Json, settings: Mapping[str, Json], places: Sequence[str]) -> bool:
    """Whether a value is empty, a setting, in one of the parts with the place, or internal to its part."""
    part, _, rest = name.partition(".")
    is_inner = rest.startswith(("_", "settings.", "source.")) and rest not in _TELLING
    return value in (None, [], {}) or is_inner or part in places or settings.get(name) == value


_TELLING = ("_last_lr",)


def print_differences(found: Row, kinds: Mapping[str, Json], depth: int | None, all_of_it: bool) -> None:
    """Print in what two checkpoints differ; `kinds` are the kinds of the parts of the first."""
    whom = zip("AB", (found["before"], found["after"]), strict=True)
    rows = [[f"{side} checkpoint {one['number']}", f"step {one['step']}", one["path"]] for side, one in whom]
    print_table(rows, (0, 2))
    if found["equal"]:
        print(
            f"\nequal: {found['compared']} tensors to the last bit, all values, settings and the environment"
        )
        return
    print(f"\n{found.get('differing', len(found['tensors'])):,} of {found['compared']:,} tensors differ")
    if lines := found.get("lines"):
        print("\n".join(lines), "(--all has the details)")
    named = [(row["part"], row["name"], row) for row in found["tensors"]]
    for part, gathered in _by_part(named, kinds, depth, all_of_it):
        are_sizes = kinds.get(part) not in RANDOM
        rows = [_pair_cells(name, some, are_sizes) for name, some in gathered.items()]
        head = ["", "", "values that differ", "largest", "relative", ""]
        title = "variables" if part == variables.PART else part or "no part"
        _print_section(f"tensors of {title}", [head, *rows], (0, 5), all_of_it)
    for kind in ("part", "setting", "variable", "value", "environment"):
        changes = [change for change in found["changes"] if change["kind"] == kind]
        cells = (
            _variable_changes(changes)
            if kind == "variable" and not all_of_it
            else map(_change_cells, changes)
        )
        _print_section(kind if kind == "environment" else f"{kind}s", [*cells], (0, 1, 2, 3), all_of_it)


def _variable_changes(changes: Sequence[Row]) -> Iterator[list[str]]:
    """Yield a line for each change in a variable, or one for all of them."""
    groups: dict[str, list[Row]] = {}
    for row in changes:
        if not row["name"].endswith(variables.KEYS):
            groups.setdefault(_PIECE.split(row["name"])[0], []).append(row)
    for name, of in groups.items():
        if len(of) <= _FEW:
            yield from map(_change_cells, of)
            continue
        first = _change_cells(of[0]) if of[0]["name"] == name else [name, "", "", ""]
        rest = of[1:] if of[0]["name"] == name else of
        words = {"differ": None, "only in A": "after", "only in B": "before"}
        counts = {word: sum(row["missing"] == side for row in rest) for word, side in words.items()}
        yield [*first[:3], ", ".join(f"{count:,} {word}" for word, count in counts.items() if count)]


def _pair_cells(name: str, rows: Sequence[Row], are_sizes: bool) -> list[str]:
    far = Distance()
    for row in rows:
        far.add(row["distance"] or Distance())
    are_numbers = are_sizes and far.before.is_known and far.before.count
    words = dict.fromkeys(_what(row) for row in rows if row["what"] != "changed")
    if far.not_finite:
        words[f"{far.not_finite:,} no longer finite"] = None
    return [
        name,
        f"{len(rows)} tensors" if len(rows) > 1 else "",
        f"{far.changed:,} of {far.before.count:,}" if far.before.count else "",
        _number(far.most) if are_numbers else "",
        _number(far.relative) if are_numbers else "",
        ", ".join(words),
    ]


def _what(row: Row) -> str:
    before, after = row["before"], row["after"]
    if before is None or after is None:
        return "only in A" if before else "only in B"
    if row["what"] == "other dtype":
        return f"{before['dtype']} -> {after['dtype']}"
    return f"{_shape(before['shape'])} -> {_shape(after['shape'])}"


def _change_cells(row: Row) -> list[str]:
    sides = ("before", "after")
    then, now = ("-" if row["missing"] == side else _shown(row[side]) for side in sides)
    if then == now:
        then, now = (_shown(row[side], is_short=False) for side in sides)
    return [row["name"], then, f"-> {now}", row["effect"] or ""]


def _by_part(
    named: Sequence[tuple[str, str, _Item]], kinds: Mapping[str, Json], depth: int | None, all_of_it: bool
) -> Iterator[tuple[str, dict[str, list[_Item]]]]:
    """Yield each part with its items, grouped by how their names begin; those of no part come last."""
    parts = {part for part, _, _ in named}
    for part in sorted(parts, key=[*kinds, *sorted(parts - kinds.keys())].index):
        own = [(name.removeprefix(f"{part}."), item) for of, name, item in named if of == part]
        most = _MOST if kinds.get(part) == "module" else _FEW
        yield part, _gathered(own, depth, all_of_it, most)


def _gathered(
    named: Sequence[tuple[str, _Item]], depth: int | None, all_of_it: bool, most: int
) -> dict[str, list[_Item]]:
    """Return items by how their names begin: as deep as still gives few lines."""
    paths = [[met.start() for met in _PIECE.finditer(name)] for name, _ in named]
    deepest = max(map(len, paths), default=0) + 1

    def grouped(deep: int) -> list[str]:
        return [
            name[: ends[deep - 1]] + ("[*]" if name[ends[deep - 1]] == "[" else ".*")
            if len(ends) >= deep
            else name
            for ends, (name, _) in zip(paths, named, strict=True)
        ]

    if all_of_it:
        depth = deepest
    if depth is None:
        depth = next((deep for deep in range(deepest, 0, -1) if len({*grouped(deep)}) <= most), 1)
    found: dict[str, list[_Item]] = {}
    first: dict[str, str] = {}
    for short, (name, item) in zip(grouped(depth), named, strict=True):
        found.setdefault(short, []).append(item)
        first.setdefault(short, name)
    return {first[short] if len(items) == 1 else short: items for short, items in found.items()}


def _print_section(
    title: str, rows: Sequence[Sequence[str]], to_the_left: Sequence[int], all_of_it: bool
) -> None:
    has_head = bool(rows) and (not rows[0][0] or rows[0][0] in ("name", "rank"))
    if len(rows) <= has_head:
        return
    print(f"\n{bold(printable(title, but=''))}")
    most = len(rows) if all_of_it else _MOST + has_head
    print_table(rows[:most], to_the_left, "  ", has_head=has_head, width=terminal_width())
    if len(rows) > most:
        print(f"  ... and {len(rows) - most:,} more: --all")


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _number(value: float | str | None) -> str:
    return "" if value is None else f"{float(value):.4g}"


def _shown(value: Json, is_short: bool = True) -> str:
    text = value if isinstance(value, str) else described(value)
    if is_short and not isinstance(value, str):
        text = _LONG_NUMBER.sub(lambda match: f"{float(match[0]):.6g}", text)
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
