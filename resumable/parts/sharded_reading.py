"""Reads the sharded tensors of a checkpoint, into shards of this process or into whole tensors."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from ..errors import CheckpointDamaged
from ..files import codec, disk, large_files, sharded_tensor
from ..files.codec import Encoded
from ..files.pin import Pin
from ..files.strict_json import Json
from ..files.tensor_file import DTYPES, Slot
from ..run.checkpoint import Checkpoint
from . import box_reading
from .box_reading import BoxFile, Piece, Stored, Wanted

Live = Mapping[str, Mapping[str, Tensor]]
"""By tree and name in the file: live tensors."""

Fill = Callable[[str, Slot, Mapping[str, Json], Tensor | None], tuple[Tensor, bool]]
"""Returns a whole tensor to read into, and whether it is the live one, which has to wait."""


class ShardedTensors:
    """The tensors of a checkpoint that are sharded there or here. The live ones have their old values first.

    `alike`: tensors of the script that others are to be sharded like.
    """

    def __init__(self, found: Checkpoint, live: Live, alike: Live, pin: Pin | None, rank: int) -> None:
        self._found = found
        self._live = live
        self._alike = alike
        self._pin = pin
        self._rank = rank
        """The rank whose file comes first: on the same mesh it has all."""
        self._cut: dict[str, list[BoxFile]] = {}
        self._waiting: list[tuple[str, BoxFile, list[Piece]]] = []
        """By tree: files, and what is to be read of them into live tensors."""
        self._kept: list[tuple[str, Wanted]] = []
        """By tree: live tensors of which something was read already."""
        self.written: dict[str, large_files.Written] = {}
        """The hashes and identities of the files that were read."""

    def has_models(self) -> bool:
        """Whether the script has tensors that others are to be sharded like."""
        return any(self._alike.values())

    def like(self, stem: str, name: str, shape: Sequence[int]) -> Tensor | None:
        """Return the tensor that one of the checkpoint is to be sharded like, if it is."""
        for known in (self._live, self._alike):
            one = known.get(stem, {}).get(name)
            if one is not None and sharded_tensor.is_sharded(one) and tuple(one.shape) == tuple(shape):
                return one
        return None

    def cut(self, stem: str, file: BoxFile) -> None:
        """Take whole tensors of a file, of which this process wants boxes."""
        self._cut.setdefault(stem, []).append(file)

    def stems(self) -> set[str]:
        """Return the trees of which there is something to read."""
        about = self._found.about
        paths = [path for path in (*about.files, *about.elsewhere) if codec.shard_of(path) is not None]
        return {*map(codec.stem_of, paths), *self._cut}

    def read(self, stem: str, tree: Json, whole: Collection[str], fill: Fill) -> dict[str, Tensor]:
        """Read what this process wants of a tree's tensors, whoever wrote them, but for the `whole` ones."""
        paths = [path for path in self._found.about.files if codec.shard_of(path) is not None]
        paths = sorted(
            (path for path in paths if codec.stem_of(path) == stem),
            key=lambda path: (codec.shard_of(path) != self._rank, path),
        )
        try:
            wanted = self._read(stem, tree, {*codec.tensor_names(tree)} - {*whole}, paths, fill)
        except CheckpointDamaged:
            raise
        except ValueError as exc:
            raise disk.damaged(self._found.path, str(exc)) from exc
        return {name: one.tensor for name, one in wanted.items()}

    def _read(
        self, stem: str, tree: Json, lacking: set[str], paths: Sequence[str], fill: Fill
    ) -> dict[str, Wanted]:
        facts, known, wanted = codec.tensor_facts(tree), frozenset(lacking), dict[str, Wanted]()

        def pieces_of(file: BoxFile) -> list[Piece]:
            found: list[Piece] = []
            for stored in file.stored:
                name = stored.name
                if name in known:
                    if name not in wanted:
                        wanted[name] = self._wanted(stem, stored, facts.get(name, {}), fill)
                    found += wanted[name].pieces(stored)
                    if wanted[name].is_covered():
                        lacking.discard(name)
            return found

        for file in self._cut.get(stem, ()):
            self._take(stem, file, pieces_of(file))
        for path in paths:
            if lacking or self._pin:
                file = box_reading.opened(self._found, path, known)
                self._take(stem, file, pieces_of(file))
        if lacking and self._found.about.elsewhere:
            wanted |= self._without_elements(stem, lacking, facts)
        try:
            for one in wanted.values():
                one.refuse_gap()
        except ValueError:
            self._found.refuse_part()
            raise
        self._kept += [(stem, one) for one in wanted.values() if one.kept]
        return wanted

    def _without_elements(
        self, stem: str, names: Collection[str], facts: Mapping[str, Mapping[str, Json]]
    ) -> dict[str, Wanted]:
        """Return the tensors of which neither this process nor any file on this disk has an element."""
        found = {}
        for name in names:
            about = facts.get(name, {})
            like = self.like(stem, name, about.get("shape", ()))
            dtype = next((one for one in DTYPES if str(one) == f"torch.{about.get('elements')}"), None)
            if like is None or dtype is None or sharded_tensor.local(like).numel():
                self._found.refuse_part()
            else:
                found[name] = Wanted(name, box_reading.fresh_like(like, dtype), is_live=False)
        return found

    def _wanted(self, stem: str, stored: Stored, about: Mapping[str, Json], fill: Fill) -> Wanted:
        name, slot = stored.name, stored.slot
        shape = tuple(about.get("shape", slot.shape))
        live = self._live.get(stem, {}).get(name)
        if (like := self.like(stem, name, shape)) is not None:
            is_live = like is live and like.dtype == slot.dtype and not self._pin
            tensor = like if is_live else box_reading.fresh_like(like, slot.dtype)
            return Wanted(name, tensor, is_live=is_live)
        files = self._found.about.files.items()
        room = sum([file.size for path, file in files if codec.stem_of(path) == stem])
        if math.prod(shape) * slot.dtype.itemsize > room:
            raise ValueError(f"{name} has the shape {list(shape)}, for which its files are too small")
        tensor, is_live = fill(stem, slot._replace(name=name, shape=shape), about, live)
        return Wanted(name, tensor, is_live=is_live)

    def _take(self, stem: str, file: BoxFile, pieces: Sequence[Piece]) -> None:
        if self._pin:
            # Read only once: the second time there could be other bytes.
            box_reading.take(self._found.read_file(file.path, self._pin), pieces)
        elif pieces:
            path = self._found.path / file.path
            with contextlib.suppress(OSError):
                seen = large_files.identity(os.stat(path))
                digests = [*file.digests]
                self.written[file.path] = large_files.Written(path, file.size, digests, seen)
            # Of another mesh each process reads nearly all blocks of several files: not twice.
            is_other = codec.shard_of(file.path) not in (None, self._rank)
            left = box_reading.read(
                file, pieces, reads=lambda piece: not piece.wanted.is_live, keeps=is_other
            )
            self._waiting.append((stem, file, left))

    def names_in_place(self, stem: str) -> set[str]:
        """Return the names of a tree's tensors that are to be filled in place."""
        waiting = {piece.wanted.name for there, _, of in self._waiting if there == stem for piece in of}
        return waiting | {one.name for there, one in self._kept if there == stem}

    def fill(self, trees: Mapping[str, Encoded], parts: Collection[str]) -> None:
        """Read the tensors of some parts into the live tensors."""
        for _, file, pieces in self._of_parts(trees, parts):
            for one in {id(piece.wanted): piece.wanted for piece in pieces}.values():
                _note_write(one)
            box_reading.read(file, pieces, reads=lambda _: True)
        for _, one in self._kept_of(trees, parts):
            _note_write(one)
            one.put_in(one.local)

    def apart(self, trees: Mapping[str, Encoded], part: str) -> None:
        """Read the tensors of a part into new memory instead of the live tensors."""
        fresh: dict[tuple[str, str], Wanted] = {}
        for stem, file, pieces in self._of_parts(trees, [part]):
            for live in map(attrgetter("wanted"), pieces):
                if (stem, live.name) not in fresh:
                    fresh[stem, live.name] = Wanted(live.name, _fresh(live.tensor), is_live=False)
            again = [piece._replace(wanted=fresh[stem, piece.wanted.name]) for piece in pieces]
            box_reading.read(file, again, reads=lambda _: True)
        for stem, live in self._kept_of(trees, [part]):
            if (stem, live.name) not in fresh:
                fresh[stem, live.name] = Wanted(live.name, _fresh(live.tensor), is_live=False)
            live.put_in(fresh[stem, live.name].local)
        for (stem, name), one in fresh.items():
            trees[stem].tensors[name] = one.tensor

    def _of_parts(
        self, trees: Mapping[str, Encoded], parts: Collection[str]
    ) -> Iterator[tuple[str, BoxFile, list[Piece]]]:
        """Yield what is to be read into live tensors of some parts, which then waits no longer."""
        for number, (stem, file, pieces) in enumerate(self._waiting):
            names = _names(trees[stem], parts)
            chosen = [piece for piece in pieces if piece.wanted.name in names]
            if chosen:
                left = [piece for piece in pieces if piece.wanted.name not in names]
                self._waiting[number] = stem, file, left
                yield stem, file, chosen

    def _kept_of(self, trees: Mapping[str, Encoded], parts: Collection[str]) -> list[tuple[str, Wanted]]:
        names = {stem: _names(trees[stem], parts) for stem, _ in self._kept}
        chosen = [(stem, one) for stem, one in self._kept if one.name in names[stem]]
        self._kept = [(stem, one) for stem, one in self._kept if one.name not in names[stem]]
        return chosen


def _names(tree: Encoded, parts: Collection[str]) -> set[str]:
    return {name for part in parts if part in tree.json for name in codec.tensor_names(tree.json[part])}


def _note_write(one: Wanted) -> None:
    # Otherwise neither autograd nor a running save would notice the write.
    torch.autograd.graph.increment_version(one.tensor)
    torch.autograd.graph.increment_version(one.local)


def _fresh(tensor: Tensor) -> Tensor:
    if sharded_tensor.is_sharded(tensor):
        return box_reading.fresh_like(tensor, tensor.dtype)
    return torch.empty_like(tensor, requires_grad=False)
