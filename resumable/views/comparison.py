"""In what two checkpoints differ: tensors, plain values, settings, the environment."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ..files import disk, file_reader
from ..files.strict_json import Json
from ..progress import Told
from ..run import changes
from ..run.checkpoint import RANKS, Checkpoint
from .contents import Contents, Key, Tensor, scan
from .magnitudes import Distance, distance_of


class Pair(NamedTuple):
    """A tensor in both checkpoints; None where one has no tensor of that name."""

    key: Key
    before: Tensor | None
    after: Tensor | None
    distance: Distance | None = None
    """None if they cannot be compared number by number."""

    @property
    def part(self) -> str:
        """The part that it belongs to."""
        either = self.before or self.after
        assert either
        return either.part

    @property
    def what(self) -> str:
        """How they differ: changed, missing, new, or of another dtype or shape."""
        if self.before is None or self.after is None:
            return "missing" if self.before else "new"
        if self.before.dtype != self.after.dtype:
            return "other dtype"
        return "changed" if self.before.shape == self.after.shape else "other shape"


class Change(NamedTuple):
    """A value that differs; MISSING where one checkpoint has none."""

    kind: str
    """One of "part", "setting", "value", "environment"."""
    name: str
    before: Json
    after: Json
    effect: str | None = None
    """What it does to the numbers, if that is known."""


MISSING = {"$missing": None}


@dataclass(frozen=True, slots=True)
class Comparison:
    """In what two checkpoints differ."""

    count: int
    """How many tensors were compared."""
    pairs: Sequence[Pair]
    changes: Sequence[Change]

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.pairs or self.changes)


def size_to_read(before: Contents, after: Contents) -> int:
    """Return how many bytes a comparison reads."""
    shared = _unchanged_files(before, after)
    return sum(one.found.about.files[file].size for one in (before, after) for file in {*one.heads} - shared)


def compare(before: Contents, after: Contents, told: Told | None = None) -> Comparison:
    """Return in what two checkpoints differ; files with the same digest in both manifests are not read."""
    shared = _unchanged_files(before, after)
    tensors = [{tensor.key: tensor for tensor in one.tensors} for one in (before, after)]
    keys = [*dict.fromkeys([*tensors[0], *tensors[1]])]
    pairs = [Pair(key, tensors[0].get(key), tensors[1].get(key)) for key in keys]
    fit = {pair.key: pair for pair in pairs if pair.what == "changed"}
    distances = _distances(before, after, fit, shared, told)
    found = [pair._replace(distance=distances.get(pair.key)) for pair in pairs]
    differ = [pair for pair in found if pair.what != "changed" or (pair.distance and pair.distance.changed)]
    return Comparison(len(pairs), differ, [*_changes(before, after)])


def _unchanged_files(before: Contents, after: Contents) -> set[str]:
    then, now = before.found.about.files, after.found.about.files
    return {file for file in before.heads if then[file] == now.get(file)}


def _distances(
    before: Contents, after: Contents, fit: Mapping[Key, Pair], shared: set[str], told: Told | None
) -> dict[Key, Distance]:
    for file in {*after.heads} - shared:
        # Verified as a whole first. Below it is read again, piece by piece: a committed file stays as it is.
        after.found.scan_file(file, told=told)
    found: dict[Key, Distance] = {}
    guard = threading.Lock()
    with contextlib.ExitStack() as stack:
        opened = {file: stack.enter_context(_opened(after.found, file)) for file in {*after.heads} - shared}

        def take(tensor: Tensor, at: int, piece: memoryview) -> None:
            pair = fit.get(tensor.key)
            if pair is None or pair.after is None:
                return
            begin = pair.after.begin + at
            other = file_reader.read_range(opened[pair.after.file], begin, begin + piece.nbytes)
            distance = distance_of(piece, other, tensor.dtype, tensor.width)
            with guard:
                found[tensor.key].add(distance)

        found |= {key: Distance() for key in fit}
        for file in {*before.heads} - shared:
            scan(before, file, take, told)
    return found


@contextlib.contextmanager
def _opened(found: Checkpoint, file: str) -> Iterator[int]:
    with disk.opened(found.path, file) as opened:
        yield opened.fileno()


def _changes(before: Contents, after: Contents) -> Iterator[Change]:
    then, now = before.found.about, after.found.about
    kinds = [{name: one.kind_of(name) for name in one.found.about.parts} for one in (before, after)]
    for name, one, other in _unequal(*kinds):
        yield Change("part", name, one, other)
    for name, one, other in _unequal(then.built, now.built):
        yield Change("setting", name, one, other, changes.setting_effect(name))
    for name, one, other in _unequal({"processes": then.world_size}, {"processes": now.world_size}):
        yield Change("setting", name, one, other, changes.WILL)
    for place, one, other in _unequal(before.leaves(), after.leaves()):
        yield Change("value", f"{_rank(place.stem)}{place.path}", one, other)
    is_on_gpu = bool(then.environment.get("gpus") or now.environment.get("gpus"))
    for name, one, other in _unequal(then.environment, now.environment):
        effect = changes.environment_effect(name, one, other, is_on_gpu)
        yield Change("environment", name, one, other, effect)


def _rank(stem: str) -> str:
    return f"rank {int(stem.removeprefix(RANKS))}: " if stem.startswith(RANKS) else ""


_Name = TypeVar("_Name")


def _unequal(then: Mapping[_Name, Json], now: Mapping[_Name, Json]) -> Iterator[tuple[_Name, Json, Json]]:
    for name in dict.fromkeys([*then, *now]):
        one, other = then.get(name, MISSING), now.get(name, MISSING)
        # By their JSON: to Python 1, 1.0 and True are equal.
        if one is not other and json.dumps(one, sort_keys=True) != json.dumps(other, sort_keys=True):
            yield name, one, other
