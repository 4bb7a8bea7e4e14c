"""One object of a training, as the rest of the library sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from ..files import codec
from ..files.codec import Encoded, Place

Trees = dict[str, Encoded]
"""The content of a checkpoint, by the file that it belongs to: model, optimizer, extra, rank."""

_HOST = torch.device("cpu")


def _model_name(path: codec.Path) -> str:
    return ".".join(path).removeprefix("model.")


def _optimizer_name(path: codec.Path) -> str:
    # optimizer.D / state / exp_avg / layer1.weight -> D.exp_avg.layer1.weight
    part = path[0].removeprefix("optimizer").lstrip(".")
    rest = path[2:] if path[1] == "state" else path[1:]
    return ".".join([part, *rest] if part else rest)


NAMERS: dict[str, Callable[[codec.Path], str]] = {
    "model": _model_name,
    "optimizer": _optimizer_name,
}
"""By tree: the function that names a tensor in its file by its path."""


class Saved:
    """The state of one part in a checkpoint."""

    def __init__(
        self,
        trees: Mapping[str, Encoded],
        part: str,
        views: dict[str, dict[str, Any]] | None = None,
        restoring: Any = None,
    ) -> None:
        self._trees = trees
        self._part = part
        # The trees that are decoded already, by file and part; each is decoded once.
        self._views: dict[str, dict[str, Any]] = {} if views is None else views
        self.restoring = restoring
        """Restores the containers of all parts, see `containers.Restoring`."""

    def view(self, stem: str) -> Any:
        """Return the decoded tree, for reading only; its tensors share the checkpoint's memory."""
        views = self._views.setdefault(stem, {})
        if self._part not in views:
            tree = self._trees[stem]
            views[self._part] = codec.decode(tree.json[self._part], tree.tensors)
        return views[self._part]

    def moved(self, stem: str) -> Mapping[str, str]:
        """Return the device of this process for each device of the process that saved."""
        return self._trees[stem].moved

    def of_rank(self) -> Any:
        """Return a copy of this rank's own state of a shared part."""
        tree = self._trees.get("rank")
        if tree is None or self._part not in tree.json:
            return {}
        return codec.decode(tree.json[self._part], tree.tensors, same_device, tree.kept)

    def copy(self, stem: str, place: Place) -> Any:
        """Return the tree with tensors of its own, on the devices that `place` names."""
        tree = self._trees[stem]
        json, is_by_device = tree.json[self._part], place is same_device

        def place_here(path: codec.Path, device: str) -> torch.device:
            return place(path, tree.moved.get(device, device))

        placed = place_here if tree.moved else place
        return codec.decode(json, tree.tensors, placed, tree.kept, is_by_device=is_by_device)


def same_device(_: codec.Path, device: str) -> torch.device:
    """Return the device that a tensor was saved from, or the CPU if this process has no such device."""
    if device == "cpu":
        return _HOST
    kind, *index = device.split(":")
    backend = getattr(torch, kind, None)
    if kind == "cpu" or backend is None or int(index[0] if index else 0) >= backend.device_count():
        return _HOST
    return torch.device(device)


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, each as a number if it is a tensor with one element."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in settings.items()
    }


def shape(tensor: torch.Tensor) -> str:
    """Return the dtype and shape of a tensor as text.

    >>> shape(torch.zeros(2, 3))
    'float32[2, 3]'
    """
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class Difference(NamedTuple):
    """A difference between a checkpoint and a live object."""

    part: str
    name: str
    text: str
    is_open: bool = False
    """Whether it may still disappear before the training depends on it; it is an error only then."""

    def matches(self, pattern: str) -> bool:
        """Whether the pattern names it: model.head.*, head.*, or the whole part."""
        wholes = (self.part, f"{self.part}.{self.name}", f"model.{self.name}", self.name)
        return pattern in wholes or any(fnmatchcase(whole, pattern) for whole in wholes)


def kind_of(live: Any, otherwise: str) -> str:
    """Return the class name of a torch object, whose state fits no other class; else `otherwise`."""
    if not type(live).__module__.startswith("torch."):
        return otherwise
    inner = ", ".join(kind_of(scheduler, otherwise) for scheduler in getattr(live, "_schedulers", ()))
    return type(live).__name__ + (f"({inner})" if inner else "")


class Part:
    """One object of a training. `built` holds its settings as the script made them, before any restore."""

    kind = "state"
    is_container = False
    """Whether its tree consists of the script's own containers and tensors."""
    is_last = False
    """Whether it is restored after all that may refuse, so that it needs no undo."""

    def __init__(self, name: str, live: Any, stem: str = "extra", rank: int | None = None) -> None:
        self.name = name
        self.live = live
        self.stem = stem
        self.built: dict[str, Any] = {}
        self.rank = None if stem == "rank" else rank
        """This process's rank if the part is shared by several ranks."""
        self.memos: dict[str, codec.Memo] = {}
        """What the encoder knows of its trees from the last time, by their file."""

    @property
    def rest_stem(self) -> str:
        """The tree for everything that is not a weight of a model."""
        return self.stem

    def collect_of_rank(self) -> dict[str, Any]:
        """Return the trees that no other rank saves: all of them, or only what differs by rank."""
        return self.collect() if self.stem == "rank" else self.differing()

    def outline(self) -> str:
        """Return a text that is the same on two ranks only if their tensors are alike."""
        return ""

    def differing(self) -> dict[str, Any]:
        """Return this rank's own state of a shared part."""
        return {}

    def collect(self) -> dict[str, Any]:
        """Return its trees, by the file that they belong to."""
        raise NotImplementedError

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors that it restores in place, by name."""
        return {}

    def outgrown(self) -> Iterator[str]:
        """Yield the changes since the script passed it that would make a resume fail."""
        yield from ()

    def is_torchs_own(self) -> bool:
        """Whether a restore runs only code of torch and of this library."""
        return True

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield the reasons why `saved` cannot be restored into the live object."""
        yield from ()

    def resized(self, saved: Saved, then: int, now: int) -> Iterator[Difference]:
        """Yield the state that another number of processes cannot use."""
        yield from ()

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Restore the live object, except for `unfit` names and the settings where the code wins."""
        raise NotImplementedError
