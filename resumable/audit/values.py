"""Writes values that no part holds in one process, and restores them in another."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..files import codec, tensor_file
from ..files.strict_json import Json
from ..objects import kinds, walks
from ..objects.contents import Content, mark
from ..objects.walks import Finder, Met, Node
from ..variables.looks import Entry, Look, class_name
from ..variables.putting import Putting, path_of
from .survey import WITH_ATTRIBUTES, Item, Survey


def write(survey: Survey, names: Iterable[str], path: Path) -> None:
    """Write the values of these names, as far as they can be stored."""
    trees: dict[str, Json] = {}
    tensors: dict[str, torch.Tensor] = {}
    met = walks.met(survey.nodes, survey.look.content_of)
    for number, name in enumerate(names):
        if name in survey.items:
            try:
                tree = codec.encode(_tree(survey, survey.items[name], met), partial(_numbered, number))
            except Exception:  # an object of a library may raise anything, and not all values can be stored
                continue
            trees[name] = tree.json
            tensors |= {
                one: tree.tensors[tree.aliases.get(one, one)] for one in codec.tensor_names(tree.json)
            }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".safetensors").write_bytes(tensor_file.to_safetensors(tensors, {}))
    path.write_text(json.dumps(trees))


def _numbered(number: int, path: codec.Path) -> str:
    return ".".join((str(number), *path))


def _tree(survey: Survey, item: Item, met: Mapping[int, Met]) -> dict[str, Any]:
    """Return what a look would store if only this item had changed."""
    changed = {id(one.value): Content(()) for one in item.nodes}
    if item.owner is not None and item.owner.kind in WITH_ATTRIBUTES:
        changed[id(item.owner.value)] = _but(met[id(item.owner.value)].content, item, item.owner)
    known = {**met, **{at: met[at]._replace(content=one) for at, one in changed.items()}}
    look = Look(survey.owned, known)
    rows: list[Any] = []
    if item.owner is None:
        rows = [[item.step.how, look.bound([(item.step.name, item.value)])]]
    for node in [*([item.owner] if item.owner is not None else []), *item.nodes]:
        look.value(node.value, str(node))
    return {"namespaces": rows, "entries": look.entries}


def _but(content: Content, item: Item, owner: Node) -> Content:
    """Return the content of an object with another value of one attribute."""
    if content.items is None:
        return Content(())
    is_named = owner.kind in ("object", "library")
    key = mark(item.step.name if is_named else tuple(item.step))
    return content._replace(items={**content.items, key: (type(item.value), None)})


def put_back(survey: Survey, names: Iterable[str], path: Path) -> None:
    """Restore the values of these names that exist and were written."""
    if not path.exists():
        return
    trees = json.loads(path.read_text())
    data = memoryview(bytearray(path.with_suffix(".safetensors").read_bytes()))
    tensors = tensor_file.from_safetensors(data)
    finder = Finder(root for one in survey.namespaces for root in one.roots())
    for name in filter(trees.__contains__, names):
        # If it cannot be put back, the trial shows that it has not helped.
        with contextlib.suppress(Exception):
            tree: dict[str, Any] = codec.decode(trees[name], tensors)
            tree["entries"] = [_findable(one, finder) for one in tree["entries"]]
            Putting(tree).put(survey.namespaces, survey.owned)


def _findable(entry: Entry, finder: Finder) -> Entry:
    """Let an object be made where another one is now."""
    if "at" not in entry:
        return entry
    with contextlib.suppress(KeyError):
        live = finder.find(path_of(entry))
        if (class_name(type(live)), kinds.kind_of(live)) == (entry["class"], entry["kind"]):
            return entry
    return {name: one for name, one in entry.items() if name != "at"}
