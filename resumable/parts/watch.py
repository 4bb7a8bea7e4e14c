"""Notices which parts have changed: since the last save, or since a loop body began."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from ..files import codec, sharded_tensor, tensor_file
from ..files.codec import Encoded
from ..files.strict_json import Json
from ..files.threads import no_garbage_collection
from . import collect
from .aliases import fill, nodes
from .copies import clones
from .models import ModulePart
from .optimizers import OptimizerPart
from .other_parts import DataclassPart
from .part import Part, Saved, Trees
from .parts import Parts, has_no_generator
from .restore import restore_part

Counts = Mapping[str, int | None]


class Snapshot(Protocol):
    """The copies that a save has made of the tensors, by file."""

    def paths(self) -> Iterable[str]:
        """Return the paths of the files."""

    def tensors(self, path: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a file, by name."""


class LastSave:
    """The trees of a save, the snapshot of their tensors, and the versions of the live tensors."""

    def __init__(self, trees: Trees, snapshot: Snapshot) -> None:
        self._trees = trees
        self._snapshot = snapshot
        self._live = {stem: (tree.tensors, _counts(tree.tensors)) for stem, tree in trees.items()}
        self._copies: dict[str, dict[str, torch.Tensor]] = {}

    @no_garbage_collection()
    def changed(self, parts: Parts) -> dict[str, tuple[Json, Json]]:
        """Return the parts whose state differs from the one that was saved, each as JSON then and now."""
        now, about = collect.collect(parts)
        untouched = {stem for stem, seen in self._live.items() if _is_untouched(*seen, now[stem])}
        return {
            name: (self._trees[stem].json.get(name), now[stem].json.get(name))
            for name in about
            if about[name]["kind"] != "position"
            for stem in self._trees
            if self._has_changed(name, stem, now, stem in untouched)
        }

    def _has_changed(self, part: str, stem: str, now: Trees, is_untouched: bool) -> bool:
        then = collect.without_fleeting(self._trees[stem].json.get(part))
        if then != collect.without_fleeting(now[stem].json.get(part)):
            return True
        tensors, versions = self._live[stem]
        for name in () if is_untouched else codec.tensor_names(then):
            after = now[stem].tensors[name]
            if (
                sharded_tensor.place(tensors[name]) == sharded_tensor.place(after)
                and versions[name] == _count(after) is not None
            ):
                continue
            if sharded_tensor.is_sharded(after):
                # Of its boxes another process may have written some.
                return True
            saved = self._copy(stem, name)
            if saved is not None and not tensor_file.is_equal(saved, after):
                return True
        return False

    def _copy(self, stem: str, name: str) -> torch.Tensor | None:
        """Return the saved copy of a tensor; None if other ranks wrote some of it."""
        if stem not in self._copies:
            paths = [path for path in self._snapshot.paths() if codec.stem_of(path) == stem]
            self._copies[stem] = {n: t for path in paths for n, t in self._snapshot.tensors(path).items()}
        return self._copies[stem].get(name)


def _counts(tensors: Mapping[str, torch.Tensor]) -> Counts:
    """Return torch's version counter of each tensor, which every write increments; None if it has none."""
    try:
        return {name: tensor._version for name, tensor in tensors.items()}
    except RuntimeError:
        return {name: _count(tensor) for name, tensor in tensors.items()}


def _count(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_untouched(before: Mapping[str, torch.Tensor], versions: Counts, now: Encoded) -> bool:
    """Whether no tensor of a tree has been written to or replaced."""
    return (
        [*before] == [*now.tensors]
        and [*map(sharded_tensor.place, before.values())]
        == [*map(sharded_tensor.place, now.tensors.values())]
        and versions == _counts(now.tensors)
        and None not in versions.values()
    )


class Watch:
    """Shows which parts have changed, and restores settings, where code may run a second time."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def gradients(self) -> list[tuple[int, int]]:
        """Return the identity and version of each gradient, without reading its values."""
        groups = [group for part in self._parts.optimizers for group in part.live.param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        return [(id(p.grad), p.grad._version) for p in parameters if p.grad is not None]

    def hold_gradients(self) -> Callable[[], None]:
        """Return a function that restores the gradients of a resumed window if the script drops them."""
        held = [part.gradients.hold() for part in self._parts.optimizers]

        def put_back() -> None:
            for put_in in held:
                put_in()

        return put_back

    def hold_settings(self) -> Callable[[], None]:
        """Return a function that restores the small parts that have changed since."""
        parts = self._parts
        small = [part for part in parts.all if _is_small(part)]
        streams = parts.position.streams
        generators = streams.read()
        then = collect.encoded(small)
        then = {stem: replace(tree, tensors=clones(tree.tensors)) for stem, tree in then.items()}
        streams.write(generators)
        owned = {id(tensor) for tensor in parts.aliases.owned().values()}
        containers = [part for part in parts.all if part.is_container]
        fields = [field for part in containers if isinstance(part, DataclassPart) for field in part.fields()]
        groups = [group for part in parts.optimizers for group in part.live.param_groups]
        settings = [_settings_of(group) for group in groups]
        held = [hold(part.collect()[part.stem], owned) for part in containers]
        held += [hold(_settings_of(group)) for group in groups]

        def put_back() -> None:
            generators = streams.read()
            now = collect.encoded(small)
            for part in small:
                if not _is_as_before(part.name, then[part.stem], now[part.stem]):
                    restore_part(part, Saved(then, part.name))
            for owner, name, value in fields:
                setattr(owner, name, value)
            for group, before in zip(groups, settings, strict=True):
                group.update(before)
            for put_in in held:
                put_in()
            streams.write(generators)

        return put_back


def hold(value: Any, but: AbstractSet[int] = frozenset()) -> Callable[[], None]:
    """Copy a value, and return a function that restores it in the same objects.

    `but` holds the identities of tensors that stay as they are.

    >>> own = {"seen": [1]}
    >>> put_back = hold(own)
    >>> own["seen"].append(2)
    >>> put_back()
    >>> own
    {'seen': [1]}
    """
    live = {id(one): one for _, one in nodes(value, (), set()) if id(one) not in but}
    then = [
        (one, one.detach().clone() if isinstance(one, torch.Tensor) else one.copy()) for one in live.values()
    ]

    def put_back() -> None:
        for one, before in then:
            _put_back(one, before)

    return put_back


def _put_back(live: Any, before: Any) -> None:
    if isinstance(live, torch.Tensor):
        if live.shape == before.shape and not tensor_file.is_equal(live.detach(), before):
            with torch.no_grad():
                live.copy_(before)
    elif isinstance(live, np.ndarray):
        live[...] = before
    else:
        fill(live, before)


def _is_small(part: Part) -> bool:
    is_large = isinstance(part, (ModulePart, OptimizerPart))
    return has_no_generator(part) and not is_large and not part.is_container


def _is_as_before(name: str, then: Encoded, now: Encoded) -> bool:
    if then.json.get(name) != now.json.get(name):
        return False
    names = codec.tensor_names(then.json.get(name))
    return all(tensor_file.is_equal(then.tensors[key], now.tensors[key]) for key in names)


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (bool, int, float, str, tuple, torch.Tensor)
    return {key: value for key, value in group.items() if isinstance(value, kinds)}
