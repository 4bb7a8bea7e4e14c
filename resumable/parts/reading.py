"""Reads and verifies a checkpoint, each tensor into its final memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointDamaged
from ..files import codec, disk, file_reader, pin, tensor_file
from ..files import large_files as blocks
from ..files.codec import Encoded
from ..files.file_reader import Scan, Target
from ..files.strict_json import LONGEST, Json
from ..files.tensor_file import Slot, Slots
from ..progress import Told
from ..run.checkpoint import Checkpoint
from . import box_reading, huge_pages
from .device_lanes import on_lanes
from .devices import moved_trees
from .part import Saved, Trees, same_device
from .places import HOST, Places, Wanted, all_fit, fits, on_host, room_for
from .renaming import Renamed, renamed
from .sharded_reading import Live, ShardedTensors

Show = Callable[[str, int], contextlib.AbstractContextManager[Told | None]]
"""Shows a progress bar for a number of bytes, and returns a function that advances it."""


@dataclass(slots=True)
class _File:
    """A file with tensors, and what is read of it."""

    path: str
    stem: str
    size: int
    blocks: list[bytes] = field(default_factory=list)
    identity: tuple[int, ...] = ()
    slots: Slots = field(default_factory=Slots)
    in_place: dict[str, tuple[Slot, Tensor]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    """The tensors that are read as a whole."""

    def take(self, names: Sequence[str]) -> Places:
        """Return places for tensors that are read in place, which is done once."""
        if len(names) == len(self.slots):
            # In the order of the file.
            lives = [live for _, live in self.in_place.values()]
            if all(map(attrgetter("is_cpu"), lives)):
                self.in_place = {}
                return on_host(self.slots, lives)
        pairs = [self.in_place.pop(name) for name in names]
        return Places([Wanted(slot, live.device, live) for slot, live in pairs])


class _Planned(NamedTuple):
    """A file to be read: what is in it, and where it goes."""

    file: _File
    header: memoryview
    again: memoryview
    """The memory for the header that is verified."""
    places: Places
    shared: Sequence[Slot]
    """The tensors of which this process wants boxes."""


def _show_nothing(what: str, size: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


_keep_names = partial(renamed, {}, {}, ())


class Reading:
    """A verified checkpoint. The live tensors have their old values until `fill`.

    Tensors that are restored in place are read twice: the live ones are not touched before every byte is
    verified and every part has accepted its state. If a content hash is expected, everything is read only
    once, into new memory: the second read could return other bytes, because the hashes of the blocks can
    be forged.
    """

    def __init__(
        self,
        found: Checkpoint,
        live: Live,
        rank: int | None = 0,
        show: Show = _show_nothing,
        expect: str | None = None,
        used: Collection[str] = (),
        now: Trees | None = None,
        alike: Callable[[Mapping[str, Json]], Live] = lambda _: {},
        elsewhere: Collection[str] = (),
        renames: Callable[[Mapping[str, dict[str, Json]]], Renamed] = _keep_names,
    ) -> None:
        self.about = found.about
        self.now: Trees = now or {}
        """The encoded parts of the training whose tensors are in `live`."""
        self.built: dict[str, Any] = {}
        """The settings that the run was built with, once `decode` has decoded them."""
        self._views: dict[str, dict[str, Any]] = {}
        self._found, self._folder = found, found.path
        self._pin = found.begin_pin() if expect else None
        self._number, self._show = found.about.number, show
        self._files: dict[str, _File] = {}
        self._kept: dict[str, set[str]] = {}
        self.is_heir = rank is None
        """Whether the checkpoint has no state of this rank; the state of rank 0 is used instead."""
        rank, others, texts = rank or 0, [], {}
        for path in found.about.files:
            if codec.rank_of(path) not in (None, rank):
                others.append(path)
            elif not codec.is_tensor_file(path):
                texts[path] = self._text(found, path)
            elif codec.shard_of(path) is None:
                self._files[path] = _File(path, codec.stem_of(path), found.about.files[path].size)
        trees = {
            stem: {part: json for part, json in tree.items() if part not in elsewhere}
            for stem, tree in codec.to_trees(texts, rank).items()
        }
        names = renames(trees)
        trees, self.renamed = names.trees, names.new
        """By part: the names in the checkpoint that are others in the script."""
        self._used = {*used, *_devices_of(live)}
        self._facts = dict(_decoded(trees, codec.tensor_facts))
        self._moved = moved_trees(trees, self._facts, self._used, is_alone=found.about.world_size == 1)
        self.without_device = _without_device(self._moved.get("rank", {}))
        """The devices of the process that saved that have no counterpart in this process."""
        self._live = live = names.without_others(live)
        self._sharded = ShardedTensors(found, live, alike(trees), self._pin, rank)
        tensors = self._read_all(trees)
        # Each rank verifies its own files; rank 0 also verifies those of ranks that no longer exist.
        for path in sorted(others) if rank == 0 or self._pin else ():
            found.scan_file(path, self._pin)
        pin.refuse_others(expect, str(self._pin), found.path)
        self.trees: dict[str, Encoded] = codec.from_parts(trees, tensors)
        """The content of the checkpoint; a tensor to be filled in place is the live one."""
        for stem, tree in self.trees.items():
            tree.kept = frozenset(self._kept.get(stem, ()))
            tree.moved = self._moved.get(stem, {})

    def _read_all(self, trees: Mapping[str, Json]) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of each file, and by their tree those that are sharded there or here."""
        files = [*self._files.values()]
        planned = [*map(self._plan, files)]
        huge_pages.ask([tensor for one in planned for tensor in one.places.new])
        with self._show(f"reading checkpoint {self._number}", sum([file.size for file in files])) as told:
            self._scan(planned, told)
        tensors = {one.file.path: self._taken(one) for one in planned}
        for stem in self._sharded.stems():
            whole = {name for file in self._files.values() if file.stem == stem for name in file.names}
            tensors[stem] = self._sharded.read(stem, trees.get(stem, {}), whole, self._place_of)
            self._kept.setdefault(stem, set()).update(tensors[stem])
        return tensors

    def _place_of(
        self, stem: str, slot: Slot, about: Mapping[str, Json], live: Tensor | None
    ) -> tuple[Tensor, bool]:
        """Return where to read a whole tensor, and whether that is the live one."""
        there = str(about.get("device", "cpu"))
        device = same_device((), self._moved.get(stem, {}).get(there, there))
        if live is not None and fits(slot, device, live) and not self._pin:
            return live, True
        return room_for(Wanted(slot, device if str(device) in self._used else HOST)), False

    def _text(self, found: Checkpoint, path: str) -> memoryview:
        # Check the size first: parsed JSON is many times larger, and a sparse file can claim any size.
        if (size := found.about.files[path].size) > LONGEST:
            # A file that is shorter than the manifest says is reported as such.
            file_reader.read_start(self._folder, path, size, 0)
            raise disk.damaged(self._folder, f"{path} has {size:,} bytes; at most {LONGEST:,} make sense")
        return found.read_file(path, self._pin)

    def _plan(self, file: _File) -> _Planned:
        path, size = file.path, file.size
        with contextlib.suppress(OSError):
            file.identity = blocks.identity(os.stat(self._folder / path))
        try:
            header = self._found.read_header(path)
            slots = file.slots = tensor_file.read_header(header, size)
        except CheckpointDamaged:
            raise
        except ValueError as exc:
            raise disk.damaged(self._folder, f"{path}: {exc}") from exc
        places, shared = self._sorted(file, slots, self._facts.get(file.stem, {}))
        file.names = {*slots.names}.difference([slot.name for slot in shared])
        return _Planned(file, header, memoryview(bytearray(len(header))), places, shared)

    def _scan(self, planned: Sequence[_Planned], told: Told | None) -> None:
        """Read and verify the files together."""
        files = []
        for one in planned:
            path = one.file.path
            targets = [Target(0, len(one.header), one.again), *one.places.targets]
            also = self._pin.file(path) if self._pin else None
            files.append((Scan(path, one.file.size, targets, also, told), self.about.files[path].xxh3_128))
        digests = on_lanes(
            {device for one in planned for device in one.places.devices},
            lambda lane: file_reader.scan_files(self._folder, files, lane),
        )
        for one, of_file in zip(planned, digests, strict=True):
            one.file.blocks = of_file
            if one.again != one.header:
                raise disk.damaged(self._folder, f"{one.file.path} has changed while it was read")

    def _taken(self, planned: _Planned) -> dict[str, Tensor]:
        """Return the tensors of a file that was read, by name."""
        file, places, shared = planned.file, planned.places, planned.shared
        if shared:
            cut = box_reading.cut(self._found, file.path, file.blocks, planned.header, shared)
            self._sharded.cut(file.stem, cut)
        self._kept.setdefault(file.stem, set()).update(file.names)
        try:
            made = places.tensors()
        except ValueError as exc:
            raise disk.damaged(self._folder, f"{file.path}: {exc}") from exc
        made.update(zip(file.in_place, map(itemgetter(1), file.in_place.values()), strict=True))
        return made

    def _sorted(
        self, file: _File, slots: Slots, facts: Mapping[str, Mapping[str, Json]]
    ) -> tuple[Places, list[Slot]]:
        """Return places for what is read into new memory, and what is sharded; note what is read in place."""
        live = self._live.get(file.stem, {})
        is_plain = not (facts or self._pin or self._sharded.has_models())
        lives = [*map(live.get, slots.names)] if is_plain else []
        if is_plain and {*map(type, lives)} <= {type(None)}:
            return on_host(slots), []
        if is_plain and all_fit(lives, slots):
            file.in_place = dict(zip(slots.names, zip(slots, lives, strict=True), strict=True))
            return Places(()), []
        fresh, shared = self._sorted_one_by_one(file, slots, facts)
        return Places(fresh), shared

    def _sorted_one_by_one(
        self, file: _File, slots: Sequence[Slot], facts: Mapping[str, Mapping[str, Json]]
    ) -> tuple[list[Wanted], list[Slot]]:
        live = self._live.get(file.stem, {})
        here = self._moved.get(file.stem, {})
        devices: dict[str, torch.device] = {}
        fresh = []
        shared = []
        for slot in slots:
            about = facts.get(slot.name, {})
            if self._sharded.like(file.stem, slot.name, slot.shape) is not None:
                shared.append(slot)
                continue
            there = str(about.get("device", "cpu"))
            if there not in devices:
                devices[there] = same_device((), here.get(there, there))
            device = devices[there]
            if about.keys() <= {"device"} and fits(slot, device, live.get(slot.name)):
                if self._pin:
                    fresh.append(Wanted(slot, HOST))
                else:
                    file.in_place[slot.name] = slot, live[slot.name]
            else:
                # Another process may use the devices that this training does not use.
                fresh.append(Wanted(slot, device if str(device) in self._used else HOST))
        return fresh, shared

    def written(self) -> dict[str, blocks.Written]:
        """Return the hashes and identities of the checkpoint's tensor files."""
        return {
            file.path: blocks.Written(self._folder / file.path, file.size, file.blocks, file.identity)
            for file in self._files.values()
        } | self._sharded.written

    def decode(self) -> None:
        """Decode every tree and setting, once; ValueError for one that cannot be decoded."""
        for path, setting in self.about.built.items():
            try:
                # Most are numbers and texts.
                self.built[path] = codec.decode(setting, {}) if type(setting) in (list, dict) else setting
            except ValueError as exc:
                raise ValueError(f"manifest.json: the setting {path} cannot be decoded: {exc}") from exc
        for part, new in self.renamed.items():
            if isinstance(frozen := self.built.get(f"{part}.frozen"), list):
                self.built[f"{part}.frozen"] = [new.get(name, name) for name in frozen]
        for stem, view in _decoded(self.trees, lambda tree: codec.decode(tree.json, tree.tensors)):
            # A forged tree can decode to any type: its parts are then missing.
            self._views[stem] = view if type(view) is dict else {}

    def saved(self, part: str, restoring: Any = None) -> Saved:
        """Return the checkpoint's state of a part."""
        return Saved(self.trees, part, self._views, restoring)

    def forget_view(self, stem: str, part: str) -> None:
        """Decode a part again when it is next used, after a change of its tree."""
        self._views.get(stem, {}).pop(part, None)

    def names_in_place(self, stem: str) -> set[str]:
        """Return the names of a tree's tensors that are to be filled in place."""
        whole = {name for file in self._files.values() if file.stem == stem for name in file.in_place}
        return whole | self._sharded.names_in_place(stem)

    def apart(self, part: str) -> None:
        """Read the tensors of a part into new memory instead of the live tensors."""
        for file, names in self._of_parts([part]):
            slots = [file.in_place.pop(name)[0] for name in names]
            places = on_host(slots)
            self._read_again([(file, places)], f"reading {part} of checkpoint {self._number}")
            tree = self.trees[file.stem]
            tree.tensors.update(places.tensors())
            tree.kept -= {*names}
            self.forget_view(file.stem, part)
        self._sharded.apart(self.trees, part)
        for stem in self._sharded.stems():
            self.forget_view(stem, part)

    def fill(self, parts: Collection[str]) -> None:
        """Read the tensors of some parts into the live tensors."""
        chosen = [*self._of_parts(parts)]
        filled = [(file, file.take(names)) for file, names in chosen]
        self._read_again(filled, f"putting checkpoint {self._number} in its place")
        for _, places in filled:
            places.move()
        self._sharded.fill(self.trees, parts)

    def _of_parts(self, parts: Collection[str]) -> Iterator[tuple[_File, list[str]]]:
        for file in self._files.values():
            json = self.trees[file.stem].json if file.in_place else {}
            there = [*file.in_place]
            # Most often all parts are chosen, and to look for ten thousand names takes a while.
            if not json.keys() <= {*parts}:
                names = {name for part in parts if part in json for name in codec.tensor_names(json[part])}
                there = [name for name in there if name in names]
            if there:
                yield file, there

    def _read_again(self, filled: Sequence[tuple[_File, Places]], what: str) -> None:
        scans = [Scan(file.path, file.size, places.targets) for file, places in filled]
        with self._show(what, sum([scan.size_of_blocks() for scan in scans])) as told:
            again = [
                (scan._replace(told=told), file.blocks) for scan, (file, _) in zip(scans, filled, strict=True)
            ]
            on_lanes(
                {device for _, places in filled for device in places.devices},
                lambda lane: file_reader.scan_files_again(self._folder, again, lane),
            )


def _decoded(trees: Mapping[str, Any], decode: Callable[[Any], Any]) -> Iterator[tuple[str, Any]]:
    """Yield what is made of each tree; ValueError names the file whose tree is wrong."""
    for stem, tree in trees.items():
        try:
            yield stem, decode(tree)
        except ValueError as exc:
            where = "ranks" if stem == "rank" else "state.json"
            raise ValueError(f"{where}: its tree {stem!r} cannot be decoded: {exc}") from exc


def _devices_of(live: Live) -> set[str]:
    tensors = [one for tree in live.values() for one in tree.values()]
    # Most are in host memory, and to ask each of ten thousand for its device takes twice as long.
    on_host = {str(HOST)} if any(one.is_cpu for one in tensors) else set()
    return on_host | {str(one.device) for one in tensors if not one.is_cpu}


def _without_device(moved: Mapping[str, str]) -> list[str]:
    found = sorted(there for there, here in moved.items() if here == "cpu")
    # A process that works on the CPU only is reported as a change of devices.
    return [] if len(found) == len(moved) else found
