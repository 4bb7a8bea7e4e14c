"""Running means of a loop's values, such as its loss: exact over a resume, without waiting for a device."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..files.strict_json import Json, typed

Gather = Callable[[Json], Sequence[Json]]
"""Gives a value to all processes of the training, and returns what each of them gave."""


class Means(Mapping[str, float]):
    """The running means of the epoch in hand, by name.

    Reading one waits for the device that its values are on; adding to one does not.

    >>> means = Means()
    >>> means.add({"loss": 2.0}, weight=3)
    >>> means.add({"loss": torch.tensor(4.0)}, weight=1)
    >>> means
    <Means loss 2.5>
    >>> dict(means)
    {'loss': 2.5}
    """

    def __init__(self) -> None:
        self._gather: Gather = lambda own: [own]
        self.version = 0
        """A count of the changes."""
        self._epoch: int | None = None
        self._sums: dict[str, _Mean] = {}
        self._copy: _Copy | None = None
        self._shown = ""

    def gather_with(self, gather: Gather) -> None:
        """Exchange the sums with the other processes by this function."""
        self._gather = gather

    def add(self, values: Mapping[str, Any], weight: Any = 1) -> None:
        """Add a value to each of these means, with the same weight."""
        weight = _number("weight", weight)
        if not isinstance(weight, Tensor) and not 0 <= weight < math.inf:
            raise UsageError(
                f"weight={weight} is not a weight.", fix="give how many samples the value is the mean of."
            )
        numbers = {name: _number(name, value) for name, value in values.items()}
        self.version += 1
        # A sum that is made in inference mode could not be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for name, value in numbers.items():
                self._sums.setdefault(name, _Mean()).add(value, weight)

    def begin(self, epoch: int) -> None:
        """Forget the means of any other epoch."""
        if epoch != self._epoch:
            self.forget()
            self._epoch = epoch

    def reset(self, *names: str) -> dict[str, float]:
        """Return these means, or all of them, and forget them; in a loop over steps nothing else does.

        Args:
            *names: The means to forget; without one, all.

        >>> means = Means()
        >>> means.add({"loss": 2.0, "accuracy": 0.5})
        >>> means.reset("loss")
        {'loss': 2.0}
        >>> dict(means)
        {'accuracy': 0.5}
        """
        means = {name: self[name] for name in names or self}
        self.forget(*names)
        return means

    def forget(self, *names: str) -> None:
        """Forget these means, or all of them, without reading them."""
        for name in names or [*self._sums]:
            del self._sums[name]
        self.version += 1
        self._copy, self._shown = None, ""

    def reduced(self) -> dict[str, float]:
        """Return the means over all processes of the training; each of them has to call this.

        A process that has added nothing to a mean has no part in it.
        """
        totals: dict[str, list[float]] = {}
        for told in self._gather({name: mean.totals() for name, mean in [*self._sums.items()]}):
            for name, (total, weight) in told.items():
                sums = totals.setdefault(name, [0.0, 0.0])
                sums[0] += total
                sums[1] += weight
        return {name: _ratio(*sums) for name, sums in totals.items()}

    def glance(self) -> str:
        """Return the means as text, without waiting: those on a device may be of an earlier glance."""
        if self._copy is None or self._copy.is_ready():
            self._shown = self._copy.text() if self._copy else self._shown
            self._copy = _Copy({**self._sums})
            if self._copy.is_on_host:
                self._shown, self._copy = self._copy.text(), None
        return self._shown

    def collect(self) -> dict[str, Any]:
        """Return the sums for a checkpoint."""
        return {"epoch": self._epoch, "sums": {name: mean.collect() for name, mean in [*self._sums.items()]}}

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Restore the sums of a checkpoint; one of an earlier version has none."""
        self.forget()
        self._epoch = saved["epoch"] if saved else None
        self._sums = {name: _Mean.of(sums) for name, sums in saved["sums"].items()} if saved else {}

    def go_back(self, saved: Mapping[str, Any] | None) -> None:
        """Restore those sums of a checkpoint that belong to the epoch in hand."""
        epoch = self._epoch
        self.restore(saved)
        if epoch is not None:
            self.begin(epoch)

    def __getitem__(self, name: str) -> float:
        if name not in self._sums:
            there = ", ".join(self._sums) or "none"
            raise KeyError(f"no mean {name!r} in this epoch yet; there are: {there}")
        return _ratio(*self._sums[name].totals())

    def __iter__(self) -> Iterator[str]:
        return iter([*self._sums])

    def __len__(self) -> int:
        return len(self._sums)

    def __contains__(self, name: object) -> bool:
        return name in self._sums

    def __repr__(self) -> str:
        return f"<Means {_text(self)}>".replace(" >", ">")


def check(saved: Any) -> None:
    """Raise ValueError unless it is what `Means.collect` returns."""
    found = typed(dict, saved)
    if found["epoch"] is not None:
        typed(int, found["epoch"])
    for sums in typed(dict, found["sums"]).values():
        hosts, parts = typed(list, sums)[::2], sums[1::2]
        is_whole = len(sums) == 4 and all(type(host) is float for host in hosts)
        if not is_whole or not all(part is None or _is_part(part) for part in parts):
            raise ValueError(f"{sums!r:.200} is no running mean")


def _is_part(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape in ((1,), (2,))


class _Sum:
    """A sum whose terms are on the host or on a device; each stays there until the sum is read."""

    __slots__ = ("host", "part")

    def __init__(self, host: float = 0.0, part: Tensor | None = None) -> None:
        self.host = host
        self.part = part
        """The sum on a device: in float64, or as a high and a low float32 if it has no float64."""
        if part is not None and part.is_cpu:
            self.host, self.part = host + part.double().sum().item(), None

    def add(self, value: float | Tensor) -> None:
        if not isinstance(value, Tensor):
            self.host += value
            return
        if self.part is None:
            self.part = torch.zeros(_parts(value.device), dtype=value.dtype, device=value.device)
        elif self.part.device != value.device:
            self.part = self.part.to(value.device)
        if len(self.part) == 1:
            self.part += value
        else:
            _add_to_pair(self.part, value)

    def total(self) -> float:
        there = 0.0 if self.part is None else self.part.cpu().double().sum().item()
        return self.host + there

    def copied(self) -> _Sum:
        """Return a copy that is on the host as soon as the device has made it."""
        copy = _Sum(self.host)
        if self.part is not None:
            copy.part = self.part.to("cpu", non_blocking=self.part.is_cuda)
        return copy


class _Mean:
    """A weighted sum and the sum of its weights."""

    __slots__ = ("sum", "weight")

    def __init__(self, total: _Sum | None = None, weight: _Sum | None = None) -> None:
        self.sum = total or _Sum()
        self.weight = weight or _Sum()

    @classmethod
    def of(cls, saved: Sequence[Any]) -> _Mean:
        return cls(_Sum(*saved[:2]), _Sum(*saved[2:]))

    def collect(self) -> list[Any]:
        return [self.sum.host, self.sum.part, self.weight.host, self.weight.part]

    def add(self, value: float | Tensor, weight: float | Tensor) -> None:
        device = next((one.device for one in (value, weight) if isinstance(one, Tensor)), None)
        if device is not None:
            value, weight = _widened(value, device), _widened(weight, device)
        self.sum.add(value * weight)
        self.weight.add(weight)

    def totals(self) -> list[float]:
        return [self.sum.total(), self.weight.total()]


class _Copy:
    """The means of a moment, on their way to the host."""

    def __init__(self, sums: Mapping[str, _Mean]) -> None:
        self._sums = {name: _Mean(mean.sum.copied(), mean.weight.copied()) for name, mean in sums.items()}
        parts = [part for mean in sums.values() for part in (mean.sum.part, mean.weight.part)]
        devices = {part.device for part in parts if part is not None and part.is_cuda}
        self._events = [torch.cuda.current_stream(device).record_event() for device in devices]
        self.is_on_host = not self._events

    def is_ready(self) -> bool:
        return all(event.query() for event in self._events)

    def text(self) -> str:
        return _text({name: _ratio(*mean.totals()) for name, mean in self._sums.items()})


def _number(name: str, value: Any) -> float | Tensor:
    """Return a value as a number, or as the tensor that it is where a device would have to be waited for."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError(
            f"mean({name}=...) was given {value.numel()} values.",
            fix=f"give their mean, and how many they are: mean({name}=values.mean(), weight=len(values)).",
        )
    if isinstance(value, Tensor) and not value.is_cpu and not value.is_complex():
        return value.detach().reshape(())
    try:
        # float() alone would also take the text of a number.
        return float(value.item() if hasattr(value, "item") else operator.pos(value))
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        raise UsageError(
            f"mean({name}=...) was given {value!r:.80}, which is not a number.",
            fix="give a number, or a tensor with one element.",
        ) from exc


def _widened(value: float | Tensor, device: torch.device) -> float | Tensor:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, torch.float32 if _parts(device) == 2 else torch.float64)


def _parts(device: torch.device) -> int:
    """Return how many numbers hold a sum on a device: two of 32 bits where it has none of 64."""
    return 2 if device.type in _WITHOUT_FLOAT64 else 1


_WITHOUT_FLOAT64 = ("mps",)


def _add_to_pair(pair: Tensor, value: Tensor) -> None:
    """Add to a high and a low number, so that their sum is exact to twice the bits of one."""
    high, low = pair.clone()
    total = high + value
    rest = total - high
    lost = (high - (total - rest)) + (value - rest) + low
    pair[0] = total + lost
    pair[1] = lost - (pair[0] - total)


def _ratio(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


def _text(means: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in means.items())
