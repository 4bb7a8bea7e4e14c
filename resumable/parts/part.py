"""One object of a training, as the rest of the library sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from ..files import codec
from ..files.codec import Encoded, Place


class Saved:
    """What a checkpoint holds of one part."""

    def __init__(self, trees: Mapping[str, Encoded], part: str, restoring: Any = None) -> None:
        self._trees = trees
        self._part = part
        self.restoring = restoring
        """What restores the containers of all parts, see `aliases.Restoring`."""

    def view(self, stem: str) -> Any:
        """Return the tree; its tensors share the checkpoint's memory."""
        tree = self._trees[stem]
        return codec.decode(tree.json[self._part], tree.tensors)

    def moved(self, stem: str) -> Mapping[str, str]:
        """Return which device of this process stands for one of the process that saved."""
        return self._trees[stem].moved

    def of_rank(self) -> Any:
        """Return what only this process has of a part that all share, in tensors that nobody else changes."""
        tree = self._trees.get("rank")
        if tree is None or self._part not in tree.json:
            return {}
        return codec.decode(tree.json[self._part], tree.tensors, same_device, tree.kept)

    def copy(self, stem: str, place: Place) -> Any:
        """Return the tree with tensors that nobody else changes, on the devices that `place` names."""
        tree = self._trees[stem]

        def place_here(path: codec.Path, device: str) -> torch.device:
            return place(path, tree.moved.get(device, device))

        return codec.decode(tree.json[self._part], tree.tensors, place_here, tree.kept)


def same_device(_: codec.Path, device: str) -> torch.device:
    """Place a tensor on the device that it came from, or on the CPU if this process has none such."""
    kind, *index = device.split(":")
    backend = getattr(torch, kind, None)
    if kind == "cpu" or backend is None or int(index[0] if index else 0) >= backend.device_count():
        return torch.device("cpu")
    return torch.device(device)


def plain(value: Any) -> Any:
    """Return a setting as a number where it is a tensor of one."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def shape(tensor: torch.Tensor) -> str:
    """Return the dtype and shape of a tensor, as people write them.

    >>> shape(torch.zeros(2, 3))
    'float32[2, 3]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that a checkpoint and a live object do not agree on."""

    part: str
    name: str
    text: str
    is_open: bool = False
    """Whether it may be gone when the training needs it, so that only then it is an error."""

    def matches(self, pattern: str) -> bool:
        """Whether the pattern names it: model.head.*, head.*, or the whole part."""
        wholes = (self.part, f"{self.part}.{self.name}", f"model.{self.name}", self.name)
        return pattern in wholes or any(fnmatchcase(whole, pattern) for whole in wholes)


def kind_of(live: Any, otherwise: str) -> str:
    """Return what tells a torch object from those of other classes, whose state would not fit it."""
    if not type(live).__module__.startswith("torch."):
        return otherwise
    inner = ", ".join(kind_of(scheduler, otherwise) for scheduler in getattr(live, "_schedulers", ()))
    return type(live).__name__ + (f"({inner})" if inner else "")


class Part:
    """One object of a training. `built` is how the script made it, before anything was restored."""

    kind = "state"
    is_container = False
    """Whether its tree is made of the very containers and tensors that the script has."""

    def __init__(self, name: str, live: Any, stem: str = "extra") -> None:
        self.name = name
        self.live = live
        self.stem = stem
        self.built: dict[str, Any] = {}
        self.rank: int | None = None
        """This process's rank, where others have the same part."""

    def collect_of_rank(self) -> dict[str, Any]:
        """Return what no other process can save: all of it, or what differs by rank."""
        return self.collect() if self.stem == "rank" else self.differing()

    def outline(self) -> str:
        """Return what is another text for other tensors."""
        return ""

    def differing(self) -> dict[str, Any]:
        """Return what this process alone has of a part that all share."""
        return {}

    def collect(self) -> dict[str, Any]:
        """Return its trees, by the file that they belong to."""
        raise NotImplementedError

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors that it restores in place, by name."""
        return {}

    def outgrown(self) -> Iterator[str]:
        """Yield what has changed since it was given, so that a resume would be refused."""
        yield from ()

    def is_torchs_own(self) -> bool:
        """Whether only torch's code, or ours, is called to restore it."""
        return True

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield why `saved` could not be put into the live object."""
        yield from ()

    def resized(self, saved: Saved, then: int, now: int) -> Iterator[Difference]:
        """Yield what `saved` holds that as many processes as there are now cannot go on with."""
        yield from ()

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Put `saved` into the live object, but for `unfit` names and settings where the code wins."""
        raise NotImplementedError


def clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in host memory, made before this function returns.

    >>> live = {"weight": torch.zeros(2)}
    >>> copy = clones(live)
    >>> _ = live["weight"].add_(1)
    >>> copy["weight"]
    tensor([0., 0.])
    """
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
