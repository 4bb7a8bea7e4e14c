"""Finds the tensors and containers in `extra` and `vars` that are one object or share memory."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeGuard

import numpy as np
import torch

from ..files import sharded_tensor
from ..files.strict_json import typed
from .part import Part

Path = tuple[str, ...]
"""The name of a part, and the steps from there."""
Record = Mapping[str, list[Any]]
"""The aliases in a checkpoint, see `Aliases.collect`."""

_PLAIN = {type(None), bool, int, float, complex, str, bytes}
MUTABLE = (dict, list, set, deque, bytearray)
_DEEPEST = 64  # deeper nesting cannot be stored
_MOST = 1 << 26  # bytes of memory that are compared one by one


def is_array(value: Any) -> TypeGuard[torch.Tensor | np.ndarray[Any, Any]]:
    """Whether a value is a tensor or an array."""
    return isinstance(value, (torch.Tensor, np.ndarray))


def children(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the items of a container, each with its step in a path and its key."""
    # Copied in one call: another thread of the script may change it meanwhile.
    if isinstance(value, dict):
        held = value.copy() if type(value) is dict else dict(value.items())
        if not {*map(type, held.values())} <= _PLAIN:
            for number, (key, item) in enumerate(held.items()):
                yield key if type(key) is str and not key.startswith("#") else f"#{number}", key, item
    elif isinstance(value, (list, deque)) or type(value) is tuple:
        items = [*value]
        if not {*map(type, items)} <= _PLAIN:
            for number, item in enumerate(items):
                yield str(number), number, item


def nodes(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    """Yield the tensors, arrays and mutable containers in a value, entering each container once."""
    if is_array(value) or isinstance(value, MUTABLE):
        yield path, value
        if id(value) in seen:
            return
        seen.add(id(value))
    if len(path) <= _DEEPEST:
        for step, _, item in children(value):
            yield from nodes(item, (*path, step), seen)


def fill(target: Any, content: Any) -> None:
    """Replace the content of a mutable container."""
    target.clear()
    (target.extend if isinstance(target, (list, deque, bytearray)) else target.update)(content)


def check(saved: Any) -> None:
    """Raise ValueError unless `saved` is a record that `Aliases.collect` could have returned."""
    for kind, rows in typed(dict, saved).items():
        if kind not in _KINDS:
            raise ValueError(f"{kind!r:.200} is not a kind of alias in this format")
        for row in typed(list, rows):
            if kind == "views":
                path, base, *places, is_tracked = typed(list, row)
                paths, numbers = [path, base], [n for place in places for n in typed(list, place)]
                typed(bool, is_tracked)
                if len(places) != 4 or len(places[0]) != 1 or any(typed(int, n) < 0 for n in numbers):
                    raise ValueError(f"{row!r:.200} is no view")
            else:
                paths = typed(list, row) if kind in ("same", "kept") else [row]
                if (kind == "same" and not paths) or (kind == "kept" and len(paths) != 2):
                    raise ValueError(f"{row!r:.200} are not the paths of {kind}")
            for path in paths:
                if not typed(list, path) or any(type(step) is not str for step in path):
                    raise ValueError(f"{path!r:.200} is no path")


_KINDS = ("same", "kept", "leaves", "parameters", "views")


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """The memory of a tensor or an array."""

    begin: int
    end: int
    start: int
    """The address of its first element."""
    width: int
    strides: Sequence[int]
    path: Path
    value: Any


def _place(path: Path, value: Any) -> _Place | None:
    if sharded_tensor.is_sharded(value):
        # Views of those are not known.
        return None
    try:
        if isinstance(value, torch.Tensor):
            start, width = value.data_ptr(), value.element_size()
            strides = [step * width for step in value.stride()]
        else:
            start, width, strides = value.ctypes.data, value.itemsize, value.strides
    except (RuntimeError, NotImplementedError):
        # Sparse and nested tensors have no address; the save refuses them.
        return None
    if 0 in value.shape or not start:
        return None
    spans = [step * (length - 1) for step, length in zip(strides, value.shape, strict=True)]
    begin = start + sum(span for span in spans if span < 0)
    end = start + sum(span for span in spans if span > 0) + width
    return _Place(begin, end, start, width, strides, path, value)


def _groups(named: Sequence[tuple[Path, Any]], count: int) -> Iterator[list[_Place]]:
    """Yield the values that share a stretch of memory, if one of the first `count` is among them.

    A value that lies there alone is yielded only if it is a view, whose base is then not among the values.
    """
    # Vectorized: comparing ten thousand tensors one by one would make the training wait.
    begins, ends = _stretches([value for _, value in named])
    order = np.argsort(begins, kind="stable")
    reach = np.maximum.accumulate(ends[order])
    starts = np.flatnonzero(np.r_[True, begins[order][1:] >= reach[:-1]]).tolist()
    numbers = order.tolist()
    for first, last in zip(starts, [*starts[1:], len(numbers)], strict=True):
        members = numbers[first:last]
        is_alone = len(members) == 1 and getattr(named[members[0]][1], "_base", None) is None
        if not is_alone and min(members) < count:
            places = [_place(*named[number]) for number in members]
            yield [place for place in places if place]


def _stretches(values: Sequence[Any]) -> tuple[Any, Any]:
    begins, ends = np.zeros((2, len(values)), dtype=np.int64)
    for number, value in enumerate(values):
        value = sharded_tensor.local(value)
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.is_contiguous():
            begins[number] = begin = value.data_ptr()
            ends[number] = begin + value.nbytes
        elif place := _place((), value):
            begins[number], ends[number] = place.begin, place.end
    return begins, ends


def _is_within(inner: _Place, outer: _Place) -> bool:
    """Whether `inner` can be made as a view of `outer`."""
    if not all(isinstance(place.value, torch.Tensor) for place in (inner, outer)):
        return False
    one, other = inner.value, outer.value
    # A view of every second element lacks the others.
    is_dense = other.numel() * other.element_size() == outer.end - outer.begin
    return one.dtype == other.dtype and is_dense and outer.begin <= inner.begin and inner.end <= outer.end


def _overlap(one: _Place, other: _Place) -> bool:
    """Whether two values share an element."""
    if one.end <= other.begin or other.end <= one.begin:
        return False
    begin, end = min(one.begin, other.begin), max(one.end, other.end)
    if end - begin > _MOST:
        return True
    marks = [_mark(place, begin, end) for place in (one, other)]
    return bool((marks[0] & marks[1]).any())


def _mark(place: _Place, begin: int, end: int) -> Any:
    marks = np.zeros(end - begin, dtype=bool)
    shape, strides = (*place.value.shape, place.width), (*place.strides, 1)
    np.ndarray(shape, bool, marks, place.start - begin, strides)[...] = True
    return marks


def _is_written(value: Any) -> bool:
    """Whether a value may have been written to in place, so that it matters what shares its memory."""
    return not isinstance(value, torch.Tensor) or (not value.is_inference() and value._version > 0)


def _has_other_owner(value: Any) -> bool:
    """Whether a tensor was written to and is a view of one that the script still holds."""
    if not isinstance(value, torch.Tensor) or value._base is None:
        return False
    return _is_written(value) and sys.getrefcount(value._base) > _references_of_a_view()


@lru_cache
def _references_of_a_view() -> int:
    """Return how many references a tensor has that only a view keeps alive: versions of torch differ."""
    view = torch.zeros(2)[:1]
    return sys.getrefcount(view._base)


class Aliases:
    """The tensors and containers in `extra` and `vars`, and the tensors that the script made before."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.containers = [part for part in parts if part.is_container]
        self._owners = {part.name: part for part in parts if not part.is_container}
        self._scripts: dict[Path, weakref.ref[Any]] = {}
        """The tensors and arrays that the script made before it passed the parts, by their paths then."""
        for path, value in [*self._values(), *self._foreign()]:
            if is_array(value):
                self._scripts[path] = weakref.ref(value)
        self.notes: list[str] = []
        """The aliases that the last `collect` found and a resume does not restore."""

    def contents(self) -> dict[str, Any]:
        """Return what each container part holds, by its name."""
        return {part.name: part.collect()[part.stem] for part in self.containers}

    def _values(self, contents: Mapping[str, Any] | None = None) -> Iterator[tuple[Path, Any]]:
        seen: set[int] = set()
        for name, content in (self.contents() if contents is None else contents).items():
            yield from nodes(content, (name,), seen)

    def _foreign(self) -> Iterator[tuple[Path, Any]]:
        # No other part has the parameters of an optimizer that is not torch's.
        for name, part in self._owners.items():
            is_torchs = isinstance(part.live, (torch.nn.Module, torch.optim.Optimizer))
            groups = () if is_torchs else getattr(part.live, "param_groups", ())
            for number, group in enumerate(groups):
                for index, value in enumerate(group.get("params", ())):
                    yield (name, f"group{number}.{index}"), value

    def owned(self) -> dict[Path, torch.Tensor]:
        """Return the live tensors of all models and optimizers."""
        return {
            (part.name, name): tensor
            for part in self._owners.values()
            for name, tensor in part.tensors().items()
        }

    def script(self, path: Path) -> Any:
        """Return the tensor that the script had at a path when it passed the parts, if it is still alive."""
        found = self._scripts.get(path)
        return found and found()

    def is_scripts(self, value: Any) -> bool:
        """Whether the script made a value before it passed the parts."""
        return any(found() is value for found in self._scripts.values())

    def holds(self, value: Any) -> bool:
        """Whether a value is a tensor or container in `extra` or `vars`."""
        return any(one is value for _, one in self._values())

    def collect(
        self, contents: Mapping[str, Any], others: Callable[[], Mapping[str, Sequence[torch.Tensor]]]
    ) -> Record | None:
        """Return the relations of the tensors and containers; None if there are none.

        `contents`: what each container part holds, as it is saved. `others`: by part, the tensors that other
        parts save and may replace in a restore.

        `same`: the paths of one object, starting with its path in a model or an optimizer. `kept`: the path
        of a tensor that the script made, and its path when the script passed it. `leaves`: tensors that
        require gradients. `parameters`: tensors that are parameters. `views`: path, path of the base,
        offset, shape, strides, strides of the base, whether gradients flow.
        """
        self.notes = []
        values = [*self._values(contents)]
        paths: dict[int, list[Path]] = {}
        for path, value in values:
            paths.setdefault(id(value), []).append(path)
        arrays = {id(value): value for _, value in values if is_array(value)}
        if not arrays and all(len(places) == 1 for places in paths.values()):
            return None
        owned: dict[int, tuple[Path, torch.Tensor]] = {}
        for path, tensor in self.owned().items() if arrays else ():
            owned.setdefault(id(tensor), (path, tensor))
        origins = {id(live): path for path, found in self._scripts.items() if (live := found()) is not None}
        for key in arrays.keys() & owned.keys():
            paths[key].insert(0, owned[key][0])
        own = {key: value for key, value in arrays.items() if key not in owned}
        trained = [key for key, value in own.items() if is_trained(value)]
        return {
            "same": [[*map(list, places)] for places in paths.values() if len(places) > 1],
            "kept": [[[*paths[key][0]], [*origins[key]]] for key in own if key in origins],
            "leaves": [[*paths[key][0]] for key in trained],
            "parameters": [
                [*paths[key][0]] for key, value in own.items() if isinstance(value, torch.nn.Parameter)
            ],
            "views": [*self._views(paths, own, owned, origins, others() if own else {})],
        }

    def _views(
        self,
        paths: Mapping[int, Sequence[Path]],
        own: Mapping[int, Any],
        owned: Mapping[int, tuple[Path, torch.Tensor]],
        origins: Mapping[int, Path],
        others: Mapping[str, Sequence[torch.Tensor]],
    ) -> Iterator[list[Any]]:
        named = [(paths[key][0], value) for key, value in own.items()]
        named += owned.values()
        named += [((name,), value) for name, values in others.items() for value in values]
        for group in _groups(named, len(own)) if own else ():
            # Values that the script makes again share memory again.
            fixed = [place for place in group if id(place.value) in owned or id(place.value) in origins]
            foreign = [place for place in group if place.path[0] in others]
            made = [place for place in group if id(place.value) in own and place not in foreign]
            for place in sorted(made, key=lambda place: place.begin - place.end):
                is_kept = place in fixed
                among = [one for one in fixed if id(one.value) in owned] if is_kept else fixed
                base = next((one for one in among if _is_within(place, one)), None)
                if base:
                    yield _view(place, base)
                elif not is_kept:
                    self._note(place, [*fixed, *foreign])
                    fixed.append(place)

    def _note(self, place: _Place, others: Sequence[_Place]) -> None:
        name = ".".join(place.path)
        # If neither is ever written to, a copy is as good.
        among = [one for one in others if _is_written(place.value) or _is_written(one.value)]
        shared = ", ".join(".".join(one.path) for one in among if _overlap(place, one))
        if shared or _has_other_owner(place.value):
            what = f"shares memory with {shared}" if shared else "is a view of a tensor that is not saved"
            self.notes.append(
                f"{name} {what}; after a resume it is a separate copy, and writes to one no longer change "
                f"the other. Save the whole and take the view from it, or store {name} as a clone(). [R16]"
            )


def _view(place: _Place, base: _Place) -> list[Any]:
    live, whole = place.value, base.value
    offset = (live.data_ptr() - whole.data_ptr()) // live.element_size()
    shapes = [[offset], [*live.shape], [*live.stride()], [*whole.stride()]]
    return [[*place.path], [*base.path], *shapes, bool(live.requires_grad and not live.is_leaf)]


def is_trained(value: Any) -> bool:
    """Whether a value is a leaf tensor that requires gradients."""
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad
