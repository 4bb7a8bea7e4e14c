"""Trees of tensors and plain values, to the files of a checkpoint and back.

Plain values become JSON. A type that JSON lacks becomes an object with one key that begins
with "$", as in `{"$tuple": [1, 2]}`. Tensors go into a safetensors file, and the JSON
refers to them by name. Reading imports nothing and calls nothing by name.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

import torch

from ..errors import CannotStore
from .decoder import Place, decode, tensor_facts
from .encoder import Encoded, Memo, Path, encode, tensor_names
from .strict_json import LONGEST, MOST, Json, is_more_than, parse, typed
from .tensor_file import from_safetensors, to_safetensors
from .tensor_groups import Group
from .tensor_groups import dumps as _dumps

__all__ = [
    "Encoded",
    "Memo",
    "Path",
    "Place",
    "decode",
    "encode",
    "from_files",
    "from_parts",
    "has_one_writer",
    "has_trees",
    "is_frozen",
    "is_tensor_file",
    "joined",
    "rank_of",
    "shard_of",
    "shard_path",
    "stem_of",
    "tensor_facts",
    "tensor_names",
    "to_files",
    "to_groups",
    "to_texts",
    "to_trees",
]

_OF_RANK = re.compile(r"ranks/([0-9]{5})\.(?:json|safetensors)")
_STATE = re.compile(r"state(?:-[0-9]{5})?\.json")
_FROZEN = "-frozen"
_SHARD = re.compile(r"([a-z]{1,32})/shard-([0-9]{5})-model-0000([12])-of-0000([12])\.safetensors")


def _rank_path(rank: int) -> str:
    return f"ranks/{rank:05}"


def rank_of(path: str) -> int | None:
    """Return the rank that a file belongs to; None if all ranks share it."""
    found = _OF_RANK.fullmatch(path)
    return int(found[1]) if found else None


def shard_path(stem: str, rank: int, *, is_frozen: bool = False, has_frozen: bool = False) -> str:
    """Return the file in which a rank writes its boxes of the sharded tensors of a tree.

    Named as torch's distributed checkpoint and transformers look for them.

    >>> shard_path("model", 0)
    'model/shard-00001-model-00001-of-00001.safetensors'
    """
    return f"{stem}/shard-{rank + 1:05}-model-{1 + is_frozen:05}-of-{1 + has_frozen:05}.safetensors"


def shard_of(path: str) -> int | None:
    """Return the rank whose boxes of sharded tensors a file holds; None if it holds whole tensors."""
    found = _SHARD.fullmatch(path)
    return int(found[2]) - 1 if found else None


def has_one_writer(path: str) -> bool:
    """Whether a file is always written by the rank that it belongs to."""
    return rank_of(path) is not None or shard_of(path) is not None or path.startswith("state-")


def has_trees(path: str) -> bool:
    """Whether a file holds trees that several processes may share, by their tensors' files."""
    return _STATE.fullmatch(path) is not None


def to_texts(
    trees: Mapping[str, Encoded], rank: int = 0, leads: Mapping[str, bool] | None = None
) -> dict[str, bytes]:
    """Return the JSON files of a checkpoint. The tree "rank" differs between processes.

    `leads`: the parts that not all processes have, and whether this is the first that does.
    """
    leads = leads or {}
    known = {id(one.json): one for tree in trees.values() for one in tree.key if isinstance(one, Group)}
    shared = {stem: tree.json for stem, tree in trees.items() if stem != "rank"}
    of_all = {
        stem: {part: json for part, json in tree.items() if part not in leads}
        for stem, tree in shared.items()
    }
    texts = {"state.json": _text(of_all, known)}
    if any(leads.values()):
        own = {
            stem: {part: json for part, json in tree.items() if leads.get(part)}
            for stem, tree in shared.items()
        }
        texts[f"state-{rank:05}.json"] = _text(own, known)
    if "rank" in trees:
        texts[f"{_rank_path(rank)}.json"] = _text(trees["rank"].json, known)
    return texts


def to_groups(trees: Mapping[str, Encoded], rank: int = 0) -> dict[str, Encoded]:
    """Return the tensors of each safetensors file; frozen ones have a file of their own, which stays."""
    groups = {}
    for stem, tree in trees.items():
        path = _rank_path(rank) if stem == "rank" else stem
        for suffix, group in _by_change(tree):
            if group.tensors:
                groups[f"{path}{suffix}.safetensors"] = group
    return groups


def _by_change(tree: Encoded) -> list[tuple[str, Encoded]]:
    if not tree.frozen:
        return [("", tree)]
    found = []
    for suffix, takes_frozen in (("", False), (_FROZEN, True)):
        tensors = {name: one for name, one in tree.tensors.items() if (name in tree.frozen) is takes_frozen}
        aliases = {name: first for name, first in tree.aliases.items() if first in tensors}
        found.append((suffix, Encoded({}, tensors, aliases, (*tree.key, tree.frozen))))
    return found


def to_files(trees: Mapping[str, Encoded]) -> dict[str, bytes | bytearray]:
    """Return the content of every file of a checkpoint."""
    groups = to_groups(trees).items()
    return {**to_texts(trees), **{path: to_safetensors(g.tensors, g.aliases) for path, g in groups}}


def from_files(files: Mapping[str, memoryview]) -> dict[str, Encoded]:
    """Return the trees that `to_files` was given; their tensors share the files' memory."""
    tensors = {path: from_safetensors(data) for path, data in files.items() if is_tensor_file(path)}
    return from_parts(to_trees({p: data for p, data in files.items() if p not in tensors}), tensors)


def is_tensor_file(path: str) -> bool:
    """Return whether a file of a checkpoint holds tensors; the others are JSON."""
    return path.endswith(".safetensors")


def is_frozen(path: str) -> bool:
    """Return whether a file of a checkpoint holds frozen tensors."""
    return path.endswith((f"{_FROZEN}.safetensors", "-00002-of-00002.safetensors"))


def to_trees(texts: Mapping[str, bytes | memoryview], rank: int = 0) -> dict[str, dict[str, Json]]:
    """Return the JSON of the trees, from the JSON files of a checkpoint."""
    path = f"{_rank_path(rank)}.json"
    if missing := {"state.json", path} - texts.keys():
        raise ValueError(f"there is no {' and no '.join(sorted(missing))}")
    shared = {name: text for name, text in texts.items() if has_trees(name)}
    if unknown := texts.keys() - shared.keys() - {path}:
        raise ValueError(f"nothing says what {', '.join(sorted(unknown))} is")
    trees = joined({name: _parsed(name, text) for name, text in shared.items()})
    if "rank" in trees:
        raise ValueError("state.json holds what differs by rank")
    return {**trees, "rank": _parsed(path, texts[path])}


def _parsed(path: str, text: bytes | memoryview) -> dict[str, Json]:
    with _naming(path):
        return typed(dict, parse(text))


def joined(files: Mapping[str, Mapping[str, Json]]) -> dict[str, dict[str, Json]]:
    """Return the trees of the files that `has_trees`: with the stages of a pipeline there are several."""
    found: dict[str, dict[str, Json]] = {}
    for path, trees in files.items():
        with _naming(path):
            for stem, tree in trees.items():
                there = found.setdefault(stem, {})
                if twice := there.keys() & typed(dict, tree).keys():
                    raise ValueError(f"{', '.join(sorted(twice))} is in another file, too")
                there |= tree
    return found


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    try:
        yield
    except ValueError as exc:
        raise ValueError(f"{path}: {exc}") from exc


def from_parts(
    trees: Mapping[str, dict[str, Json]], tensors: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, Encoded]:
    """Return the trees of a checkpoint, from their JSON and the tensors of its other files."""
    found: dict[str, dict[str, torch.Tensor]] = {stem: {} for stem in trees}
    for path, there in tensors.items():
        own = found.get(stem_of(path))
        if own is None:
            raise ValueError(f"nothing says what {path} is")
        if twice := own.keys() & there.keys():
            raise ValueError(f"{', '.join(sorted(twice))} is in two files")
        own |= there
    return {stem: Encoded(tree, found[stem], {}) for stem, tree in trees.items()}


def stem_of(path: str) -> str:
    """Return the tree whose tensors a file holds."""
    if "." not in path:
        return path
    if rank_of(path) is not None:
        return "rank"
    if found := _SHARD.fullmatch(path):
        return found[1]
    stem = path.removesuffix(".safetensors").removesuffix(_FROZEN)
    return "" if stem == "rank" else stem


def _text(tree: Json, known: Mapping[int, Group]) -> bytes:
    text = _dumped(tree, known)
    # Refuse here what no load would read.
    if len(text) > LONGEST or is_more_than(MOST, text):
        raise CannotStore(
            f"the plain values of this checkpoint are {len(text):,} characters of JSON; at most {LONGEST:,} "
            f"can be read again, with at most {MOST:,} lists, dicts and keys.",
            fix="keep what is many in tensors or numpy arrays. Nothing was written.",
        )
    return text.encode()


def _dumped(tree: Json, known: Mapping[int, Group]) -> str:
    """Return a tree as text, with the texts of the groups that were encoded before."""
    if known and type(tree) is dict and len(tree) <= _WIDEST:
        items = (f"{_dumps(key)}:{_dumped(value, known)}" for key, value in tree.items())
        return f"{{{','.join(items)}}}"
    group = known.get(id(tree))
    return group.text() if group else _dumps(tree)


_WIDEST = 100
"""Encoding the items of wider dicts one by one takes longer than the groups in them save."""
