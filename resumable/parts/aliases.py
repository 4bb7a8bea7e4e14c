"""Which tensors and containers of `extra` and `vars` are one object, and how to restore them as one."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch

from ..errors import warn
from ..files.codec import Encoded
from ..files.strict_json import typed
from ..files.tensor_file import is_equal
from .part import Part, Saved, same_device

Path = tuple[str, ...]
"""The name of a part, and the steps from there."""
Record = Mapping[str, list[Any]]
"""What a checkpoint says of them, see `Aliases.collect`."""

_PLAIN = {type(None), bool, int, float, complex, str, bytes}
_MUTABLE = (dict, list, set, deque, bytearray)
_DEEPEST = 64  # what is nested deeper cannot be stored
_MOST = 1 << 26  # elements of a memory that is looked at one by one


def _is_array(value: Any) -> TypeGuard[torch.Tensor | np.ndarray[Any, Any]]:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _children(value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the items of a container: the step of each in a path, its key, and itself."""
    if isinstance(value, dict):
        if not {*map(type, value.values())} <= _PLAIN:
            for number, (key, item) in enumerate(value.items()):
                yield key if type(key) is str and not key.startswith("#") else f"#{number}", key, item
    elif (isinstance(value, (list, deque)) or type(value) is tuple) and not {*map(type, value)} <= _PLAIN:
        for number, item in enumerate(value):
            yield str(number), number, item


def _nodes(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    """Yield the tensors, arrays and mutable containers in a value; the items of each container once."""
    if _is_array(value) or isinstance(value, _MUTABLE):
        yield path, value
        if id(value) in seen:
            return
        seen.add(id(value))
    if len(path) <= _DEEPEST:
        for step, _, item in _children(value):
            yield from _nodes(item, (*path, step), seen)


def held(value: Any, but: AbstractSet[int] = frozenset()) -> Callable[[], None]:
    """Remember what is in a value, and return what puts it back into the very same objects.

    `but`: the identities of tensors that are left alone.

    >>> own = {"seen": [1]}
    >>> put_back = held(own)
    >>> own["seen"].append(2)
    >>> put_back()
    >>> own
    {'seen': [1]}
    """
    live = {id(one): one for _, one in _nodes(value, (), set()) if id(one) not in but}
    then = [
        (one, one.detach().clone() if isinstance(one, torch.Tensor) else copy(one)) for one in live.values()
    ]

    def put_back() -> None:
        for one, before in then:
            _put_back(one, before)

    return put_back


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy(value)


def _put_back(live: Any, before: Any) -> None:
    if isinstance(live, torch.Tensor):
        if live.shape == before.shape and not is_equal(live.detach(), before):
            with torch.no_grad():
                live.copy_(before)
    elif isinstance(live, np.ndarray):
        live[...] = before
    elif isinstance(live, (list, bytearray)):
        live[:] = before
    elif isinstance(live, deque):
        live.clear()
        live.extend(before)
    else:
        live.clear()
        live.update(before)


def check(saved: Any) -> None:
    """Raise ValueError unless it is what `Aliases.collect` returns."""
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
    """Where in memory a tensor or an array lies."""

    device: str
    begin: int
    end: int
    path: Path
    value: Any


def _place(path: Path, value: Any) -> _Place | None:
    try:
        if isinstance(value, torch.Tensor):
            begin, width, lengths = value.data_ptr(), value.element_size(), value.shape
            strides, device = [step * width for step in value.stride()], str(value.device)
        else:
            begin, width, lengths = value.ctypes.data, value.itemsize, value.shape
            strides, device = list(value.strides), "cpu"
    except (RuntimeError, NotImplementedError):
        # (sparse and nested ones have no place; the save refuses them)
        return None
    if 0 in lengths or not begin:
        return None
    spans = [step * (length - 1) for step, length in zip(strides, lengths, strict=True)]
    first = begin + sum(span for span in spans if span < 0)
    return _Place(device, first, begin + sum(span for span in spans if span > 0) + width, path, value)


def _groups(named: Sequence[tuple[Path, Any]], count: int) -> Iterator[list[_Place]]:
    """Yield those that lie in one stretch of memory, if one of the first `count` is among them.

    One that lies there alone is yielded only if it is a view: of something that is not here.
    """
    # All at once: one by one, ten thousand tensors would keep the training waiting.
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
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and value.is_contiguous():
            begins[number] = begin = value.data_ptr()
            ends[number] = begin + value.nbytes
        elif place := _place((), value):
            begins[number], ends[number] = place.begin, place.end
    return begins, ends


def _size(place: _Place) -> int:
    return place.begin - place.end


def _is_within(inner: _Place, outer: _Place) -> bool:
    """Whether one can be made as a view of the other."""
    if not all(isinstance(place.value, torch.Tensor) for place in (inner, outer)):
        return False
    one, other = inner.value, outer.value
    # (a view of every second element has no place for the others)
    is_dense = other.numel() * other.element_size() == outer.end - outer.begin
    return one.dtype == other.dtype and is_dense and outer.begin <= inner.begin and inner.end <= outer.end


def _overlap(one: _Place, other: _Place) -> bool:
    """Whether an element of one is an element of the other."""
    if one.end <= other.begin or other.end <= one.begin:
        return False
    begin, end = min(one.begin, other.begin), max(one.end, other.end)
    if end - begin > _MOST:
        return True
    marks = [_mark(place, begin, end) for place in (one, other)]
    return bool((marks[0] & marks[1]).any())


def _mark(place: _Place, begin: int, end: int) -> Any:
    is_tensor, value = isinstance(place.value, torch.Tensor), place.value
    width = value.element_size() if is_tensor else value.itemsize
    steps = [step * width for step in value.stride()] if is_tensor else value.strides
    marks = np.zeros(end - begin, dtype=bool)
    start = (value.data_ptr() if is_tensor else value.ctypes.data) - begin
    shape, strides = (*value.shape, width), (*steps, 1)
    np.ndarray(shape, bool, marks, start, strides)[...] = True
    return marks


def _is_written(value: Any) -> bool:
    """Whether it may have been written to in place: then it matters who else has its memory."""
    return not isinstance(value, torch.Tensor) or (not value.is_inference() and value._version > 0)


def _has_other_owner(value: Any) -> bool:
    """Whether a tensor is a view of one that the script holds, and that was written to."""
    if not isinstance(value, torch.Tensor) or value._base is None:
        return False
    # (the view itself, and the argument of getrefcount)
    return _is_written(value) and sys.getrefcount(value._base) > 2


class Aliases:
    """The tensors and containers of `extra` and `vars` that are the same, and those that the script made."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.containers = [part for part in parts if part.is_container]
        self._owners = {part.name: part for part in parts if not part.is_container}
        self._scripts: dict[Path, weakref.ref[Any]] = {}
        """The tensors and arrays that the script made before it gave the parts."""
        for path, value in [*self._values(), *self._foreign()]:
            if _is_array(value):
                self._scripts[path] = weakref.ref(value)
        self.notes: list[str] = []
        """What the last `collect` found that a resume does not restore."""

    def _values(self) -> Iterator[tuple[Path, Any]]:
        seen: set[int] = set()
        for part in self.containers:
            yield from _nodes(part.collect()[part.stem], (part.name,), seen)

    def _foreign(self) -> Iterator[tuple[Path, Any]]:
        # Not every optimizer is one of torch's. Nobody else restores the parameters of the others.
        for name, part in self._owners.items():
            groups = () if part.tensors() else getattr(part.live, "param_groups", ())
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
        """Return the tensor that the script had at a path when it gave the parts, while there is one."""
        found = self._scripts.get(path)
        return found and found()

    def is_scripts(self, value: Any) -> bool:
        """Whether the script made it before it gave the parts."""
        return any(found() is value for found in self._scripts.values())

    def holds(self, value: Any) -> bool:
        """Whether a tensor or a container is one of those in `extra` and `vars`."""
        return any(one is value for _, one in self._values())

    def collect(self, others: Callable[[], Mapping[str, Sequence[torch.Tensor]]] = dict) -> Record | None:
        """Return how the tensors and containers are related; None where there is nothing to tell.

        `others`: the tensors that other parts save and may make anew, by part.

        `same`: the paths of one object, that of a model or an optimizer first. `kept`: the path of a tensor
        that the script made, and the path where it was then. `leaves` and `parameters`: tensors that require
        gradients, and those that are parameters. `views`: path, path of the base, offset, shape, strides,
        strides of the base, whether gradients flow.
        """
        self.notes = []
        values = [*self._values()]
        paths: dict[int, list[Path]] = {}
        for path, value in values:
            paths.setdefault(id(value), []).append(path)
        arrays = {id(value): value for _, value in values if _is_array(value)}
        if not arrays and all(len(places) == 1 for places in paths.values()):
            return None
        owned: dict[int, tuple[Path, torch.Tensor]] = {}
        for path, tensor in self.owned().items() if arrays else ():
            owned.setdefault(id(tensor), (path, tensor))
        origins = {id(live): path for path, found in self._scripts.items() if (live := found()) is not None}
        for key in arrays.keys() & owned.keys():
            paths[key].insert(0, owned[key][0])
        own = {key: value for key, value in arrays.items() if key not in owned}
        trained = [key for key, value in own.items() if _is_trained(value)]
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
            # What the script makes again shares memory again.
            fixed = [place for place in group if id(place.value) in owned or id(place.value) in origins]
            foreign = [place for place in group if place.path[0] in others]
            made = [place for place in group if id(place.value) in own and place not in foreign]
            for place in sorted(made, key=_size):
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
        # What nobody writes to can as well be a copy.
        among = [one for one in others if _is_written(place.value) or _is_written(one.value)]
        if shared := [".".join(one.path) for one in among if _overlap(place, one)]:
            self.notes.append(
                f"{name} shares memory with {', '.join(shared)}; after a resume it is a separate copy, and "
                "writes to one no longer change the other. Save the whole tensor once and take the parts "
                f"from it where they are used, or store {name} as a clone()."
            )
        elif _has_other_owner(place.value):
            self.notes.append(
                f"{name} is a view of a tensor that is not saved; after a resume it is a separate copy, and "
                "writes to one no longer change the other. Keep the whole "
                f"tensor in state.vars or extra= and take the view from it, or store {name} as a clone()."
            )


def _view(place: _Place, base: _Place) -> list[Any]:
    live, whole = place.value, base.value
    offset = (live.data_ptr() - whole.data_ptr()) // live.element_size()
    shapes = [[offset], [*live.shape], [*live.stride()], [*whole.stride()]]
    return [[*place.path], [*base.path], *shapes, bool(live.requires_grad and not live.is_leaf)]


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad


def _is_made_again(live: Any, then: Any) -> bool:
    """Whether the values of one can be copied into the other."""
    if type(live) in (torch.Tensor, torch.nn.Parameter) and isinstance(then, torch.Tensor):
        is_alike = (live.shape, live.dtype) == (then.shape, then.dtype) and live.layout == torch.strided
        # (an expanded one has several elements at one place)
        is_spread = any(
            length > 1 and not step for length, step in zip(live.shape, live.stride(), strict=True)
        )
        return is_alike and not is_spread and not live.is_inference()
    if isinstance(live, np.ndarray) and isinstance(then, np.ndarray):
        return (live.shape, live.dtype) == (then.shape, then.dtype) and live.flags.writeable
    return False


class Restoring:
    """The containers of a checkpoint on their way into the live ones; `undo` takes all of it back."""

    def __init__(self, aliases: Aliases, parts: Sequence[Part], trees: Mapping[str, Encoded]) -> None:
        self._aliases = aliases
        self._parts = [part for part in parts if part.is_container]
        self._trees = trees
        self._then: dict[Path, Any] = {}
        self._live: dict[Path, Any] = {}
        self._made: dict[Path, Any] = {}
        self._taken: set[int] = set()
        """The live containers that have been filled."""
        self._undo: list[Callable[[], object]] = []
        self._same: dict[Path, list[Path]] = {}
        self._record: Record | None = None

    def saved(self, part: str) -> Saved:
        """Return what the checkpoint holds of a part."""
        return Saved(self._trees, part, self)

    def _prepare(self) -> None:
        record: Record | None = self.saved("position").view("rank").get("aliases")
        rows = record or {}
        self._record = record
        self._kept = {tuple(path): tuple(origin) for path, origin in rows.get("kept", ())}
        self._leaves, self._parameters = (
            {*map(tuple, rows.get(kind, ()))} for kind in ("leaves", "parameters")
        )
        self._views = {tuple(path): rest for path, *rest in rows.get("views", ())}
        self._owned = self._aliases.owned()
        for part in self._parts:
            then = self.saved(part.name).copy(part.stem, same_device)
            self._index(then, part.collect()[part.stem], (part.name,))
        for places in rows.get("same", ()):
            paths = [*map(tuple, places)]
            # (nothing but this library says so, and it names only what is of one type)
            if len({type(self._then[path]) for path in paths if path in self._then}) == 1:
                self._same |= dict.fromkeys(paths, paths)

    def _index(self, then: Any, live: Any, path: Path) -> None:
        self._then[path], self._live[path] = then, live
        for step, key, item in _children(then):
            if isinstance(then, dict):
                there = live.get(key) if isinstance(live, dict) else None
            else:
                there = live[key] if type(live) is type(then) and key < len(live) else None
            self._index(item, there, (*path, step))

    def into(self, part: Part) -> Any:
        """Return what the checkpoint has of a part, in the live objects wherever they fit."""
        if not self._then:
            self._prepare()
        return self._rebuilt((part.name,))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set a field of an object."""
        before = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put every object back as it was."""
        while self._undo:
            self._undo.pop()()

    def _rebuilt(self, path: Path) -> Any:
        then = self._then[path]
        if _is_array(then):
            return self._array(path)
        if isinstance(then, _MUTABLE):
            return self._container(path)
        if type(then) is tuple:
            return tuple(self._items(path, then))
        return then

    def _items(self, path: Path, then: Any) -> Iterator[Any]:
        steps = {key: (*path, step) for step, key, _ in _children(then)}
        for key, item in then.items() if isinstance(then, dict) else enumerate(then):
            yield self._rebuilt(steps[key]) if key in steps else item

    def _all_of(self, path: Path) -> list[Path]:
        return self._same.get(path, [path])

    def _container(self, path: Path) -> Any:
        paths = self._all_of(path)
        if paths[0] in self._made:
            return self._made[paths[0]]
        then = self._then[path]
        lives = (self._live.get(place) for place in paths)
        target = next((it for it in lives if type(it) is type(then) and id(it) not in self._taken), then)
        self._taken.add(id(target))
        self._made[paths[0]] = target
        if isinstance(then, dict):
            content: Any = dict(zip(then, self._items(path, then), strict=True))
        else:
            content = then.copy() if isinstance(then, (set, bytearray)) else [*self._items(path, then)]
        if target is then:
            _fill(target, content)
        else:
            self.fill(target, content)
        return target

    def fill(self, target: Any, content: Any) -> None:
        """Give a live container another content."""
        before = target.copy()
        self._undo.append(lambda: _fill(target, before))
        _fill(target, content)

    def _array(self, path: Path) -> Any:
        paths = self._all_of(path)
        owned = self._owned.get(paths[0])
        if owned is not None and _is_like(owned, self._then[path]):
            return owned
        first = next((place for place in paths if place in self._then), path)
        if first not in self._made:
            self._made[first] = self._array_at(first, paths)
        return self._made[first]

    def _array_at(self, path: Path, paths: Sequence[Path]) -> Any:
        then = self._then[path]
        script = self._aliases.script(self._kept[path]) if path in self._kept else None
        if path in self._views and (view := self._view(path, *self._views[path])) is not None:
            # (with a tensor of the model the script's own view of it is filled)
            return script if script is not None and script.data_ptr() == view.data_ptr() else view
        live = next((it for place in paths if (it := self._live.get(place)) is not None), None)
        if script is not None and _is_made_again(script, then):
            self._copy(script, then)
            if isinstance(script, torch.Tensor) and script.is_leaf:
                self._set_requires_grad(script, path in self._leaves)
            return script
        if self._holds_gradients(live) and _is_made_again(live, then):
            self._copy(live, then)
            return live
        if path in self._parameters:
            return torch.nn.Parameter(then, requires_grad=path in self._leaves)
        return then.requires_grad_() if path in self._leaves else then

    def _holds_gradients(self, live: Any) -> bool:
        """Whether it is trained, and the place of what was saved: others may have it too."""
        if not _is_trained(live) and not isinstance(live, torch.nn.Parameter):
            # (another tensor may be a view of the script's data, which must not be written to)
            return False
        is_owned = any(tensor is live for tensor in self._owned.values())
        return self._record is None or not (is_owned or self._aliases.is_scripts(live))

    def _view(self, path: Path, base: Any, *about: Any) -> torch.Tensor | None:
        (offset,), shape, strides, steps, tracks = about
        whole: Any = self._owned.get(tuple(base))
        if whole is None and tuple(base) in self._then:
            whole = self._array(tuple(base))
        if not isinstance(whole, torch.Tensor) or whole.dtype != self._then[path].dtype:
            return None
        if [*whole.stride()] != steps:
            warn(
                f"{'.'.join(path)} was a view of {'.'.join(base)}, which is laid out in another way now; it "
                "comes back as a separate copy. Give that tensor the memory format that it had."
            )
            return None
        with torch.set_grad_enabled(tracks):
            source = whole if tracks else whole.detach()
            return source.as_strided(shape, strides, source.storage_offset() + offset)

    def _copy(self, live: Any, then: Any) -> None:
        if isinstance(live, np.ndarray):
            before = live.copy()
            self._undo.append(lambda: np.copyto(live, before))
            np.copyto(live, then)
            return
        with torch.no_grad():
            kept = live.detach().clone()
            self._undo.append(torch.no_grad()(lambda: live.copy_(kept)))
            live.copy_(then)

    def _set_requires_grad(self, live: torch.Tensor, value: bool) -> None:
        if live.requires_grad != value:
            self._undo.append(lambda: live.requires_grad_(not value))
            live.requires_grad_(value)


def _is_like(live: torch.Tensor, then: Any) -> bool:
    return isinstance(then, torch.Tensor) and (live.shape, live.dtype) == (then.shape, then.dtype)


def _fill(target: Any, content: Any) -> None:
    target.clear()
    (target.extend if isinstance(target, (list, deque, bytearray)) else target.update)(content)
