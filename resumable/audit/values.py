"""Writes values that no part holds in one process, and restores them in another."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ..files import codec, tensor_file
from ..files.strict_json import Json
from ..loaders.generators import rng
from . import containers
from .fixes import is_named_tuple
from .registered import TENSORS
from .survey import Item, Survey

_IN_PLACE = (list, dict, set, deque)


def write(survey: Survey, names: Iterable[str], path: Path) -> None:
    """Write the values of these names, as far as they can be stored."""
    trees: dict[str, Json] = {}
    tensors: dict[str, torch.Tensor] = {}
    for number, name in enumerate(names):
        if name in survey.items:
            try:
                tree = codec.encode(_read(survey.items[name].value), partial(_numbered, number))
            except Exception:  # an object of the script may raise anything, and not all values can be stored
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


def put_back(survey: Survey, names: Iterable[str], path: Path) -> None:
    """Restore the values of these names that exist and were written."""
    if not path.exists():
        return
    trees = json.loads(path.read_text())
    data = memoryview(bytearray(path.with_suffix(".safetensors").read_bytes()))
    tensors = tensor_file.from_safetensors(data)
    for name in names:
        if name in trees and name in survey.items:
            try:
                _write(survey.items[name], codec.decode(trees[name], tensors))
            except Exception:  # the trial then shows that it has not helped
                continue


def _read(value: Any) -> dict[str, Any]:
    """Return the storable state of a value."""
    kinds = type(value).__mro__
    if rng.is_generator(value):
        return {"generator": rng.read(value)}
    if nn.Module in kinds:
        return {"tensors": dict(containers.tensors_of(value))}
    if isinstance(value, LRScheduler):
        # It set the rates when it was created, perhaps after they were loaded.
        rates = [group["lr"] for group in value.optimizer.param_groups]
        return {"state": value.state_dict(), "rates": rates}
    if hasattr(type(value), "state_dict"):
        return {"state": value.state_dict()}
    # A named tuple cannot be stored as such; what is restored has the class of what is there.
    return {"value": tuple(value) if is_named_tuple(value) else value}


def _write(item: Item, found: Mapping[str, Any]) -> None:
    value = item.value
    if "generator" in found:
        rng.write(value, found["generator"])
    elif "tensors" in found:
        for name, tensor in containers.tensors_of(value):
            _copy(tensor, found["tensors"][name])
    elif "state" in found:
        value.load_state_dict(found["state"])
        for number, rate in enumerate(found.get("rates", ())):
            value.optimizer.param_groups[number]["lr"] = rate
    else:
        _replace(item, found["value"])


def _replace(item: Item, new: Any) -> None:
    value = item.value
    is_parameter = type(value) in TENSORS and value.requires_grad and value.is_leaf
    if is_parameter or (item.assign is None and type(value) in TENSORS):
        _copy(value, new)
    elif type(value) in _IN_PLACE and type(new) is type(value):
        value.clear()
        value.extend(new) if isinstance(value, (list, deque)) else value.update(new)
    elif item.assign:
        item.assign(tuple.__new__(type(value), new) if is_named_tuple(value) else new)


def _copy(tensor: torch.Tensor, new: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(new)
