"""The script's variables in a checkpoint, by the paths that code has for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from ..files import codec
from ..files.strict_json import Json, typed
from ..objects.kinds import Step
from .trees import described, stored, walked

PART = "script"
"""The name of the part that has them, and its kind."""

KEYS = ".keys()"
"""The end of the path, and the kind, of a row that says in which order the keys of a dict are."""

_PLACE = {"kind", "class", "at", "constant"}
_STORED = ("array", "tensor", "state", "of_itself", "bytes", "count", "member", "view", "digest")
_MOST = 5
_Item = tuple[str, str, Json]
"""Path, kind and value."""


class Row(NamedTuple):
    """A plain value or a tensor in the variables, or what holds others."""

    root: str
    """The variable that it hangs on, or what the loop has changed in one."""
    path: str
    kind: str
    value: Json = None
    """As a tree has it; None for what holds others."""
    is_constant: bool = False
    """Whether the loop leaves it alone: it is there to see whether the next start makes the same."""

    @property
    def tensor(self) -> str | None:
        """The name of its tensor in the file."""
        return next((one.name for one in stored(self.value)), None)


def told(look: Json, script: str) -> str:
    """Return which variables come back, as the line of a resume has it; nothing if none do.

    >>> ema = {"kind": "object", "class": "train:EMA", "at": [["frame:0:main", "ema"]], "set": [["n", 3]]}
    >>> told({"namespaces": [["frame:0:main", [["best", 0.5]]]], "entries": [ema]}, "train.py")
    '; of train.py: best, ema'
    """
    changed = [one["at"][0] for one in look["entries"] if "at" in one and one.keys() - _PLACE]
    behind = sum(key.startswith("loader:") for key, _ in changed)
    names = [name for _, variables in look["namespaces"] for name, _ in variables]
    names = [*dict.fromkeys([*names, *(name for key, name in changed if not key.startswith("loader:"))])]
    if len(names) > _MOST + 1:
        names[_MOST:] = [f"and {len(names) - _MOST} more"]
    objects = f"{behind} object{'s' * (behind > 1)} changed in place" if behind else ""
    text = ", ".join(names) + (f" (+ {objects})" if names and objects else objects)
    return f"; of {script}: {text}" if text else ""


def rows(look: Json) -> Iterator[Row]:
    """Yield all that a stored look holds; ValueError if it is none.

    >>> seen = {"kind": "dict", "class": "builtins:dict", "at": [["frame:0:main", "seen"]], "set": [["a", 1]]}
    >>> for row in rows({"namespaces": [["frame:0:main", [["best", 0.5]]]], "entries": [seen]}):
    ...     print(row.path, row.kind, row.value)
    best float 0.5
    seen dict None
    seen['a'] int 1
    """
    there = set[str]()
    try:
        for row in _Look(look).rows():
            # Only a forged one has a path twice.
            path = row.path if row.path not in there else f"{row.path} #{len(there)}"
            there.add(path)
            yield row._replace(path=path)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError) as exc:
        raise ValueError(f"the variables of the script are not as a checkpoint has them: {exc!r}") from exc


def leaves(look: Json) -> Iterator[tuple[str, Json]]:
    """Yield the plain values of a stored look by their paths, and of what holds others the kind."""
    for row in rows(look):
        is_whole = row.value is None or row.tensor
        yield f"{PART}.{row.path}", row.kind if is_whole else row.value


def tensor_names(look: Json) -> dict[str, str]:
    """Return the path of each tensor in a stored look, by its name in the file."""
    # One that is met twice has the first path.
    return {row.tensor: f"{PART}.{row.path}" for row in reversed([*rows(look)]) if row.tensor}


def differing(then: Json, now: Json) -> list[str]:
    """Return the variables in which two stored looks differ; all of the script's if only their tensors do."""
    one, other = (
        {row.path: (row.root, row.kind, None if row.tensor else json.dumps(row.value)) for row in rows(look)}
        for look in (then, now)
    )
    paths = [path for path in dict.fromkeys([*one, *other]) if one.get(path) != other.get(path)]
    return [*dict.fromkeys((one.get(path) or other[path])[0] for path in paths)] or [
        "variables of the script"
    ]


class _Look:
    def __init__(self, look: Json) -> None:
        self._look, self._entries = look, typed(list, look["entries"])
        self._owners: dict[str, str] = {}
        """By name: the namespace of the first variable of that name."""
        self._paths = {n: self._path(one["at"]) for n, one in enumerate(self._entries) if "at" in one}

    def rows(self) -> Iterator[Row]:
        for key, variables in self._look["namespaces"]:
            for name, value in variables:
                path = self._path([[key, name]])
                yield from (Row(path, *one) for one in self._value(path, value))
        for number, entry in enumerate(self._entries):
            if "at" in entry:
                yield from self._changed(self._paths[number], entry)
        for loader, entries in self._look.get("passes", {}).items():
            for row in _Look({"namespaces": [], "entries": entries}).rows():
                root, path = (f"{one}, as a pass over {loader} begins" for one in row[:2])
                yield row._replace(root=root, path=path)
        for loader, numbers in self._look.get("numbers", {}).items():
            yield Row(path := f"enumerate({loader})", path, "enumerate", numbers)
        for one, other in self._look.get("shared", ()):
            yield Row(other, other, "the same as", one)

    def _path(self, at: Json) -> str:
        (key, name), *steps = at
        is_first = self._owners.setdefault(name, key) == key
        where = "" if is_first else f"{key.rpartition(':')[2]}: "
        return f"{where}{name}{''.join(str(Step(*one)) for one in steps)}"

    def _changed(self, path: str, entry: Json) -> Iterator[Row]:
        """Yield what the loop has changed in an object that was there before."""
        if not entry.keys() - _PLACE and "constant" not in entry:
            return
        yield from (Row(path, *one, is_constant="constant" in entry) for one in self._content(path, entry))
        yield from (Row(path, path + self._step(entry, key), "deleted") for key in entry.get("gone", ()))
        if "order" in entry:
            yield Row(path, path + KEYS, KEYS, entry["order"])

    def _value(self, path: str, value: Json) -> Iterator[_Item]:
        match value:
            case {"entry": int(number)} if number in self._paths:
                if self._paths[number] != path:
                    yield path, "the same as", self._paths[number]
            case {"entry": int(number)}:
                self._paths[number] = path
                yield from self._content(path, self._entries[number])
            case {"atom": [str(kind), given]}:
                yield path, kind, given
            case {"$numpy": _}:
                number = codec.decode(value, {})
                yield path, type(number).__name__, number.item()
            case dict():
                yield path, next(iter(value)).removeprefix("$"), value
            case _:
                yield path, type(value).__name__, value

    def _content(self, path: str, entry: Json) -> Iterator[_Item]:
        """Yield an object and all that is in it."""
        for name, kind in (("owned", "the same as"), ("hole", "not in the checkpoint")):
            if name in entry:
                yield path, kind, entry[name]
                return
        digest, kept = entry.get("constant", (None, None))
        entry = {**entry, **(kept or ({"digest": digest} if digest else {}))}
        kind = _kind(entry)
        leaves = [leaf for name in _STORED if name in entry for leaf in walked(entry[name], "")]
        if [where for where, _ in leaves] != [""]:
            yield path, kind, None
        yield from ((f"{path}.{where}" if where else path, kind, value) for where, value in leaves)
        for inner, one in self._inside(path, entry):
            yield from self._value(inner, one)

    def _inside(self, path: str, entry: Json) -> Iterator[tuple[str, Json]]:
        """Yield what an object holds, each with its path."""
        items = entry.get("items", [])
        if isinstance(items, list):
            yield from ((f"{path}[{number}]", one) for number, one in enumerate(items))
        else:
            yield f"{path}[:]", items
        for key, one in (*entry.get("set", ()), *entry.get("data", ())):
            yield path + self._step(entry, key), one
        yield from ((f"{path}{Step(how, name)}", one) for how, name, one in entry.get("steps", ()))
        for number, one in enumerate(entry.get("columns", ())):
            # A list, or a dict with an array and with how it is meant.
            yield f"{path}[:, {number}]", one.get("numbers", one.get("at")) if isinstance(one, dict) else one
        yield from ((f"{path}.pools[{number}]", one) for number, one in enumerate(entry.get("pools", ())))
        yield from ((f"{path}.{name}", entry[name]) for name in ("self", "factory") if name in entry)
        if "inherited" in entry:
            yield from self._inside(path, {"kind": "dict", **entry["inherited"]})

    def _step(self, entry: Json, key: Json) -> str:
        if entry["kind"] != "dict":
            return f".{key}"
        match key:
            case {"entry": int(number)}:
                return f"[{self._paths.get(number, f'object {number}')}]"
            case {"atom": [_, given]}:
                return f"[{described(given)}]"
        return f"[{described(key)}]"


def _kind(entry: Json) -> str:
    """Return what an object is: its class, and how many it holds."""
    count: Json = None
    first: Json
    of = entry["class"].rpartition(":")[2].rpartition(".")[2]
    match entry:
        case {"columns": [first, *_]}:
            first = first.get("numbers", first.get("at")) if isinstance(first, dict) else first
            count = first["$ndarray"][2][0] if isinstance(first, dict) else len(first)
        case {"items": {"$ndarray": [_, _, [count], _]}}:
            pass
        case {"items": list(held)} | {"is_all": True, "kind": "dict", "set": list(held)}:
            count = len(held)
    text = of if count is None else f"{of} of {count:,}"
    text += "" if entry.get("maxlen") is None else f", maxlen {entry['maxlen']}"
    return text + ", requires_grad" * bool(entry.get("requires_grad"))
