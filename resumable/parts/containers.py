"""Restores the containers of a checkpoint into the live ones, with the aliases that they had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..errors import warn
from .aliases import MUTABLE, Aliases, Path, Record, children, fill, is_array, is_trained
from .copies import clone_nearby
from .part import Part, same_device
from .reading import Reading


def _is_made_again(live: Any, then: Any) -> bool:
    """Whether the values of `then` can be copied into `live`."""
    if type(live) in (torch.Tensor, torch.nn.Parameter) and isinstance(then, torch.Tensor):
        is_alike = (live.shape, live.dtype) == (then.shape, then.dtype) and live.layout == torch.strided
        # An expanded tensor has several elements at one address.
        is_spread = any(
            length > 1 and not step for length, step in zip(live.shape, live.stride(), strict=True)
        )
        return is_alike and not is_spread and not live.is_inference()
    if isinstance(live, np.ndarray) and isinstance(then, np.ndarray):
        return (live.shape, live.dtype) == (then.shape, then.dtype) and live.flags.writeable
    return False


def _item(live: Any, key: Any, kind: Any) -> Any:
    """Return what a live container of a kind has at a key; None if nothing is there."""
    if issubclass(kind, dict):
        return live.get(key) if isinstance(live, dict) else None
    try:
        return live[key] if type(live) is kind else None
    except IndexError:
        return None


class Restoring:
    """Restores the containers of a checkpoint into the live ones; `undo` reverts all of it."""

    def __init__(self, aliases: Aliases, parts: Sequence[Part], reading: Reading) -> None:
        self._aliases = aliases
        self._parts = [part for part in parts if part.is_container]
        self._reading = reading
        self._then: dict[Path, Any] = {}
        self._live: dict[Path, Any] = {}
        self._made: dict[Path, Any] = {}
        self._taken: set[int] = set()
        """The identities of the live containers that have been filled."""
        self._undo: list[Callable[[], object]] = []
        self._same: dict[Path, list[Path]] = {}
        self._record: Record | None = None

    def _prepare(self) -> None:
        record: Record | None = self._reading.saved("position").view("rank").get("aliases")
        rows = record or {}
        self._record = record
        self._kept = {tuple(path): tuple(origin) for path, origin in rows.get("kept", ())}
        self._leaves, self._parameters = (
            {*map(tuple, rows.get(kind, ()))} for kind in ("leaves", "parameters")
        )
        self._views = {tuple(path): rest for path, *rest in rows.get("views", ())}
        for part in self._parts:
            then = self._reading.saved(part.name).copy(part.stem, same_device)
            self._index(then, part.collect()[part.stem], (part.name,))
        for places in rows.get("same", ()):
            paths = [*map(tuple, places)]
            # A record of this library names only values of one type; another's is ignored.
            if len({type(self._then[path]) for path in paths if path in self._then}) == 1:
                self._same |= dict.fromkeys(paths, paths)

    def _index(self, then: Any, live: Any, path: Path) -> None:
        self._then[path], self._live[path] = then, live
        for step, key, item in children(then):
            self._index(item, _item(live, key, type(then)), (*path, step))

    @cached_property
    def _owned(self) -> dict[Path, torch.Tensor]:
        return self._aliases.owned()

    def into(self, part: Part) -> Any:
        """Return the checkpoint's value of a part, in the live objects wherever they fit."""
        if not self._then:
            self._prepare()
        return self._rebuilt((part.name,))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object."""
        before = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put every object back as it was."""
        while self._undo:
            self._undo.pop()()

    def _rebuilt(self, path: Path) -> Any:
        then = self._then[path]
        if is_array(then):
            return self._array(path)
        if isinstance(then, MUTABLE):
            return self._container(path)
        if type(then) is tuple:
            return tuple(self._items(path, then))
        return then

    def _items(self, path: Path, then: Any) -> Iterator[Any]:
        steps = {key: (*path, step) for step, key, _ in children(then)}
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
            fill(target, content)
        else:
            self.fill(target, content)
        return target

    def fill(self, target: Any, content: Any) -> None:
        """Replace the content of a live container."""
        before = target.copy()
        self._undo.append(lambda: fill(target, before))
        fill(target, content)

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
            # The model restores this memory, so the script's own view of it stays.
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
        """Whether `live` is a trained tensor to copy into, because other objects may hold it too."""
        if not is_trained(live) and not isinstance(live, torch.nn.Parameter):
            # Any other tensor may be a view of the script's data, which must not be overwritten.
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
                "comes back as a separate copy. Give that tensor the memory format that it had. [R16]"
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
            kept = clone_nearby(live)
            self._undo.append(torch.no_grad()(lambda: live.copy_(kept)))
            live.copy_(then)

    def _set_requires_grad(self, live: torch.Tensor, value: bool) -> None:
        if live.requires_grad != value:
            self._undo.append(lambda: live.requires_grad_(not value))
            live.requires_grad_(value)


def _is_like(live: torch.Tensor, then: Any) -> bool:
    return isinstance(then, torch.Tensor) and (live.shape, live.dtype) == (then.shape, then.dtype)
