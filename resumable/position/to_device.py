"""Copies batches to a device, the next one while the training works on this one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any

import torch

from ..errors import UsageError


class ToDevice:
    """Batches on a device, the next one copied while the training works on this one.

    With `ahead` the loader is asked for the next batch, and its copy begins, before this one is handed out.

    >>> batches = iter([{"x": torch.ones(2), "name": "a"}])
    >>> next(ToDevice("cpu", ahead=True)(batches))
    {'x': tensor([1., 1.]), 'name': 'a'}
    """

    def __init__(self, device: str | int | torch.device, ahead: bool) -> None:
        self._device = _checked(device)
        self._ahead = ahead

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, each with its tensors on the device."""
        begun = self._begun(batches)
        for copies in _one_ahead(begun) if self._ahead else begun:
            yield copies.hand_out()

    def _begun(self, batches: Iterator[Any]) -> Iterator[_Copies]:
        kind = _CopiesBeside if self._device.type in _WITH_STREAMS else _Copies
        for batch in batches:
            copies = kind(batch, self._device)
            try:
                yield copies
            finally:
                # Before the loader continues, or is left: it may fill the same memory again, or free it.
                copies.wait()


_WITH_STREAMS = ("cuda", "xpu")
_PLAIN = {type(None), bool, int, float, str, bytes}


def _checked(given: str | int | torch.device) -> torch.device:
    advice = 'write device="cuda" if torch.cuda.is_available() else "cpu"'
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as exc:
        raise UsageError(f"device={given!r} is no device that torch knows here.", fix=f"{advice}.") from exc
    # Some kinds (meta, xla) have no module of their own to ask.
    backend = getattr(torch, device.type, None)
    if backend and (device.index or 0) >= (count := backend.device_count()):
        raise UsageError(
            f"device={str(given)!r} is not there: this process sees {count} devices of its kind.",
            fix=f"{advice}.",
        )
    if device.type in _WITH_STREAMS and device.index is None:
        # Asked for once: a thread that loops over the batches has a current device of its own.
        return torch.device(device.type, getattr(torch, device.type).current_device())
    return device


def _one_ahead(items: Iterator[_Copies]) -> Iterator[_Copies]:
    item = next(items, None)
    while item:
        try:
            following = next(items, None)
        except Exception:
            # The batch that failed is the next one; its turn has not come.
            yield item
            raise
        yield item
        item = following


class _Copies:
    """The copies of one batch's tensors, made on the training's own stream."""

    def __init__(self, batch: Any, device: torch.device) -> None:
        self._device = device
        self._seen: dict[int, tuple[Any, Any]] = {}
        self._batch = self._move(batch)

    def hand_out(self) -> Any:
        """Return the batch, for the training to use from now on."""
        return self._batch

    def wait(self) -> None:
        """Wait until nothing reads the loader's memory any more."""

    def _copy(self, value: Any) -> Any:
        return value.to(self._device)

    def _move(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) not in self._seen:
            # Keep the value itself: an object made at every access would leave its id to the next one.
            self._seen[id(value)] = value, self._moved(value)
        return self._seen[id(value)][1]

    def _moved(self, value: Any) -> Any:
        # Of the class: a named tuple's field or a column of a table may be called "to" as well.
        if callable(getattr(type(value), "to", None)):
            return self._copy(value)
        items: Mapping[Any, Any] = {}
        if isinstance(value, Mapping):
            items = self._changed(dict(value.items()))
        elif isinstance(value, (list, tuple)):
            items = self._changed(dict(enumerate(value)))
        elif not _is_dataclass(value):
            return value
        attributes = self._changed(_attributes(value))
        if not items and not attributes:
            return value
        try:
            return _made_again(value, items, attributes)
        except Exception as exc:
            raise UsageError(
                f"a {type(value).__name__} in the batch cannot be made again with other tensors: {exc!r}.",
                fix="give its class a method to(device) that returns the batch on that device.",
            ) from exc

    def _changed(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        return {key: moved for key, value in values.items() if (moved := self._move(value)) is not value}


class _CopiesBeside(_Copies):
    """The copies of one batch's tensors, made on a stream beside the training's."""

    def __init__(self, batch: Any, device: torch.device) -> None:
        self._backend: Any = getattr(torch, device.type)
        self._side = _side_stream(device)
        self._sources: list[torch.Tensor] = []
        self._copied: list[torch.Tensor] = []
        super().__init__(batch, device)
        self._done = self._side.record_event()

    def hand_out(self) -> Any:
        """Return the batch; the training's stream waits for the copies, this process does not."""
        training = self._backend.current_stream(self._device)
        training.wait_event(self._done)
        for tensor in self._copied:
            # Else the next copies are given its memory while the training's queue still has to read it.
            tensor.record_stream(training)
        return self._batch

    def wait(self) -> None:
        """Wait until the copies are done; until then the sources stay."""
        self._done.synchronize()

    def _copy(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or not value.is_cpu:
            # Its allocations are unknown, so they cannot be recorded: copy it on the training's stream.
            return super()._copy(value)
        # Not pin_memory(): that refuses an expanded tensor.
        source = value if value.is_pinned() else torch.empty_like(value, pin_memory=True).copy_(value)
        with self._backend.stream(self._side):
            copied = source.to(self._device, non_blocking=True)
        self._sources.append(source)
        self._copied.append(copied)
        return copied


@cache
def _side_stream(device: torch.device) -> Any:
    # One for all epochs: memory that was allocated on a stream is not reused on any other.
    return getattr(torch, device.type).Stream(device)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _attributes(value: Any) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(value)] if _is_dataclass(value) else []
    names = (*fields, *getattr(value, "__dict__", {}))
    return {name: getattr(value, name) for name in names if isinstance(name, str) and hasattr(value, name)}


def _made_again(value: Any, items: Mapping[Any, Any], attributes: Mapping[str, Any]) -> Any:
    made: Any
    if isinstance(value, tuple):
        content = [items.get(number, item) for number, item in enumerate(value)]
        made = getattr(type(value), "_make", type(value))(content)
        attributes = {**_attributes(value), **attributes}
    elif isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        made = type(value)({**value, **items})  # type: ignore[call-arg]
    else:
        made = copy.copy(value)
        for key, item in items.items():
            made[key] = item
    for name, item in attributes.items():
        # Not setattr: a dataclass may be frozen.
        object.__setattr__(made, name, item)
    return made
