"""Collects the state of a training into trees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ..files import codec
from ..files.codec import Encoded
from ..files.container_copies import copied
from ..files.strict_json import Json
from .models import ModulePart
from .optimizers import OptimizerPart
from .other_parts import PositionPart, StatefulPart
from .part import NAMERS, Part, Trees
from .parts import Parts

_NONE: Mapping[str, Any] = MappingProxyType({})
_FLEETING = frozenset({"gradients", "used", "left_out", "syncs", "zeroed", "present"})


def collect(parts: Parts) -> tuple[Trees, dict[str, Json]]:
    """Return the trees of all parts, with the live tensors, and a description of each part."""
    trees = _collected(parts, parts.in_collecting_order, is_all=parts.saves_all, has_aliases=True)
    if parts.saves_all:
        _mark_frozen(parts, trees)
    return trees, {name: {"kind": kind} for name, kind in parts.kinds_of_all().items()}


def look(parts: Parts) -> Trees:
    """Return the trees of this process's parts, without the position in the data."""
    return _collected(
        parts, [part for part in parts.in_collecting_order if not isinstance(part, PositionPart)]
    )


def notes(parts: Parts) -> list[str]:
    """Return what a resume from the last `collect` would not restore."""
    return [*parts.aliases.notes, *(text for part in parts.all for text in part.outgrown())]


def _collected(
    parts: Parts, chosen: Sequence[Part], *, is_all: bool = True, has_aliases: bool = False
) -> Trees:
    # The script's state_dict may draw, and a save must leave every generator as it was.
    streams = parts.position.streams
    generators = streams.read()
    parts.position.show_held()
    try:
        collected = [(part, part.collect() if is_all else part.collect_of_rank()) for part in chosen]
        if not has_aliases:
            return _encoded(collected)
        # Other threads of the script may change them: what is saved and its aliases are of one moment.
        contents = copied(parts.aliases.contents())
        trees = _encoded(collected, contents)
        if found := parts.aliases.collect(contents, partial(_made_by_parts, parts, trees)):
            trees["rank"].json["position"]["aliases"] = found
        return trees
    finally:
        streams.write(generators)


def encoded(chosen: Iterable[Part]) -> Trees:
    """Return the encoded trees of some parts."""
    return _encoded((part, part.collect()) for part in chosen)


def _encoded(
    collected: Iterable[tuple[Part, Mapping[str, Any]]], contents: Mapping[str, Any] = _NONE
) -> Trees:
    """Return the encoded trees of parts; `contents`: what to save instead of what container parts hold."""
    trees: Trees = {}
    for part, own in collected:
        for stem, tree in own.items():
            memo = part.memos.setdefault(stem, {})
            found = codec.encode({part.name: contents.get(part.name, tree)}, NAMERS.get(stem, ".".join), memo)
            if stem in trees:
                merge(trees[stem], found)
            else:
                # Its JSON may be that of a group, which the next encoding uses again.
                trees[stem] = replace(found, json={**found.json})
    return trees


def merge(into: Encoded, more: Encoded) -> None:
    """Add the parts of one tree to another."""
    into.json.update(more.json)
    into.tensors.update(more.tensors)
    into.aliases.update(more.aliases)
    into.key += more.key


def split(parts: Parts, trees: Trees) -> tuple[Trees, dict[str, Encoded]]:
    """Return the trees without what is divided among processes, and the files that this process writes."""
    if not parts.is_divided:
        return trees, {}
    owned = owners(parts, {stem: tree.json for stem, tree in trees.items()})
    return parts.sharding.split(trees, owned, _of_stages(parts, trees), leads=parts.leads())


def _of_stages(parts: Parts, trees: Trees) -> dict[str, dict[str, bool]]:
    """Return, by tree, the tensors of stages, and whether this process is the first on its disk with them."""
    led = parts.led_on_disk()
    shared = {stem: tree.json for stem, tree in trees.items() if stem != "rank"}
    return {
        stem: {
            name: led[part] for part in json.keys() & led.keys() for name in codec.tensor_names(json[part])
        }
        for stem, json in shared.items()
    }


def alike(parts: Parts, trees: Mapping[str, Json]) -> dict[str, dict[str, torch.Tensor]]:
    """Return, by tree and name in the file, a tensor of the script that is sharded as one should be."""
    if not parts.is_divided:
        return {}
    found = owners(parts, trees)
    # A tensor in a container is sharded as the one that the script has there.
    for stem, tree in encoded(
        part for part in parts.all if part.is_container and part.stem != "rank"
    ).items():
        found.setdefault(stem, {}).update(tree.tensors)
    return found


def owners(parts: Parts, trees: Mapping[str, Json]) -> dict[str, dict[str, torch.Tensor]]:
    """Return, by tree and name in the file, the parameter or buffer that a tensor belongs to."""
    found: dict[str, dict[str, torch.Tensor]] = {stem: {} for stem in trees}
    both: list[ModulePart | OptimizerPart] = [*parts.models, *parts.optimizers]
    for part in both:
        tree = trees.get(part.stem, {}).get(part.name)
        by_kind = part.values_by_name(tree) if isinstance(tree, dict) else []
        live = part.tensors()
        for values in by_kind:
            for name, item in values.items() if isinstance(values, dict) else ():
                if name in live:
                    found[part.stem].update(dict.fromkeys(codec.tensor_names(item), live[name]))
    return found


def _made_by_parts(parts: Parts, trees: Trees) -> dict[str, list[torch.Tensor]]:
    """Return the tensors of the parts that may make new ones in a restore."""
    return {
        part.name: [trees[part.stem].tensors[name] for name in codec.tensor_names(json)]
        for part in parts.all
        if isinstance(part, (StatefulPart, OptimizerPart))
        if (json := trees[part.stem].json.get(part.name) if part.stem in trees else None)
    }


def _mark_frozen(parts: Parts, trees: Trees) -> None:
    frozen = {
        part.prefix_in_optimizers + name
        for part in parts.models
        if part.stem == "model"
        for name in trees["extra"].json[part.name]["frozen"]
    }
    if frozen and (there := trees["model"].tensors.keys()) - frozen:
        trees["model"].frozen = frozenset(frozen & there)


def without_fleeting(tree: Json) -> Json:
    """Return the tree of a part without the state that is only needed until it is used up."""
    # zero_grad() after a save loses nothing, and an evaluation only makes DDP broadcast buffers again.
    return {k: v for k, v in tree.items() if k not in _FLEETING} if isinstance(tree, dict) else tree


def in_place(parts: Parts) -> Trees:
    """Return the trees of the parts whose tensors a checkpoint can be read into."""
    models = [part for part in parts.models if part.is_filled_in_place()]
    return encoded([*models, *(part for part in parts.optimizers if part.is_torchs_own())])


def live_tensors(parts: Parts, trees: Trees) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors that a checkpoint can be read into, by file and name, of the trees of `in_place`."""
    found = {stem: dict(tree.tensors) for stem, tree in trees.items() if stem != "rank"}
    for part in (*parts.models, *parts.optimizers):
        stem = part.rest_stem
        if stem in found and part.name in trees[stem].json:
            for name in _not_filled(part, trees[stem]):
                found[stem].pop(name, None)
    if parts.rank is None:
        return found
    # Rank 0's file has these tensors too, and its values must not replace this rank's at the end.
    own = parts.differing()
    return {
        stem: {name: tensor for name, tensor in tensors.items() if tensor.data_ptr() not in own}
        for stem, tensors in found.items()
    }


def _not_filled(part: Part, tree: Encoded) -> set[str]:
    json = tree.json[part.name]
    # load_state_dict copies the groups; a buffer that is not saved with its model may be read-only.
    found = {*codec.tensor_names([json.get(key) for key in ("groups", "others", "rest", "buffers")])}
    if isinstance(part, OptimizerPart) and part.is_on_device():
        # A tensor in host memory may move to the device in the restore.
        names = codec.tensor_names(json["state"])
        found |= {name for name in names if name in tree.tensors and tree.tensors[name].is_cpu}
    return found
