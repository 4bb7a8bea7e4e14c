"""The tensors of a checkpoint, verified, each to where it belongs."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CannotRead, CheckpointDamaged
from ..files import codec, disk, pin, tensor_file
from ..files import large_files as blocks
from ..files.codec import Encoded
from ..files.large_files import Lane, Target
from ..files.strict_json import LONGEST, Json
from ..files.tensor_file import Slot
from ..progress import Told
from ..run.checkpoint import Checkpoint
from .part import same_device

Live = Mapping[str, Mapping[str, Tensor]]
"""By tree and name in the file: the tensors of the training that a checkpoint's can be read into."""


class _Wanted(NamedTuple):
    slot: Slot
    device: torch.device
    live: Tensor | None = None


Take = Callable[[Lane, int, memoryview], None]
Show = Callable[[str, int], contextlib.AbstractContextManager[Told | None]]
"""What shows how much has been read of so many bytes, and gives what is to be told of it."""

_cuda: Any = torch.cuda
_HOST = torch.device("cpu")
_SMALL = 64 << 10  # tensors of fewer bytes are read together
_ROOM = 4 << 20


@dataclass(slots=True)
class _File:
    path: str
    size: int
    blocks: list[bytes] = field(default_factory=list)
    identity: tuple[int, ...] = ()
    in_place: dict[str, tuple[Slot, Tensor]] = field(default_factory=dict)


def _show_nothing(what: str, size: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


class Reading:
    """A checkpoint that is verified. What belongs into live tensors is not there before `fill`.

    Twice reading what a live tensor is to hold is the price for leaving all of them alone until it is
    certain that every byte is intact and every part has taken its state. Where a content is expected, all
    is read once, into memory of its own: the second time it could be another, and the digests of the blocks
    can be forged.
    """

    def __init__(
        self,
        found: Checkpoint,
        live: Live,
        rank: int = 0,
        show: Show = _show_nothing,
        expect: str | None = None,
        used: Collection[str] = (),
    ) -> None:
        self.about = found.about
        self._found = found
        self._folder = found.path
        self._pin = found.begin_pin() if expect else None
        self._number = found.about.number
        self._show = show
        self._live = live
        self._files: dict[str, _File] = {}
        self._kept: dict[str, set[str]] = {}
        self.is_heir = rank >= found.about.world_size
        """Whether there was no such rank: what only one rank has is that of rank 0."""
        rank = 0 if self.is_heir else rank
        others = {path for path in found.about.files if codec.rank_of(path) not in (None, rank)}
        records = {path: record for path, record in found.about.files.items() if path not in others}
        texts = {path: self._text(found, path) for path in records if not codec.is_tensor_file(path)}
        trees = codec.to_trees(texts, rank)
        self._used = {*used, *(str(tensor.device) for tree in live.values() for tensor in tree.values())}
        self._moved = _moved_trees(trees, self._used, is_alone=found.about.world_size == 1)
        own = self._moved.get("rank", {})
        self.without_device = sorted(there for there, here in own.items() if here == "cpu")
        """The devices of the process that saved for which this process has none of its own."""
        if len(self.without_device) == len(own):
            # It works on the CPU now, which `Capture.devices` tells.
            self.without_device = []
        tensors = {}
        large = {path: record for path, record in records.items() if codec.is_tensor_file(path)}
        size = sum(size for size, _ in large.values())
        with self._show(f"reading checkpoint {self._number}", size) as told:
            for path, (size, digest) in large.items():
                tensors[path] = self._read(path, size, digest, trees.get(codec.stem_of(path)), told)
        # Each rank looks at its own; those of ranks that are no more nobody else would.
        for path in sorted(others) if rank == 0 or self._pin else ():
            found.scan_file(path, self._pin)
        pin.refuse_others(expect, str(self._pin), found.path)
        self.trees: dict[str, Encoded] = codec.from_parts(trees, tensors)
        """What the checkpoint holds; a tensor that is to be filled is the live one."""
        for stem, tree in self.trees.items():
            tree.kept = frozenset(self._kept.get(stem, ()))
            tree.moved = self._moved.get(stem, {})

    def _text(self, found: Checkpoint, path: str) -> memoryview:
        # What it takes in memory is many times that; what there is of a file that has holes is much less.
        if (size := found.about.files[path].size) > LONGEST:
            # (unless it is not even that long)
            blocks.read_start(self._folder, path, size, 0)
            raise disk.damaged(self._folder, f"{path} has {size:,} bytes; at most {LONGEST:,} make sense")
        return found.read_file(path, self._pin)

    def _read(self, path: str, size: int, digest: str, tree: Json, told: Told | None) -> dict[str, Tensor]:
        file = self._files[path] = _File(path, size)
        with contextlib.suppress(OSError):
            file.identity = blocks.identity(os.stat(self._folder / path))
        try:
            header = self._found.read_header(path)
            slots = tensor_file.read_header(header, size)
            facts = codec.tensor_facts(tree)
        except CheckpointDamaged:
            raise
        except ValueError as exc:
            raise disk.damaged(self._folder, f"{path}: {exc}") from exc
        live = self._live.get(codec.stem_of(path), {})
        here = self._moved.get(codec.stem_of(path), {})
        fresh = []
        for slot in slots:
            about = facts.get(slot.name, {})
            there = str(about.get("device", "cpu"))
            device = same_device((), here.get(there, there))
            if about.keys() <= {"device"} and _fits(slot, device, live.get(slot.name)):
                if self._pin:
                    fresh.append(_Wanted(slot, _HOST))
                else:
                    file.in_place[slot.name] = slot, live[slot.name]
            else:
                # (a device that this training does not use may be somebody else's)
                fresh.append(_Wanted(slot, device if str(device) in self._used else _HOST))
        places = _Places(fresh)
        again = memoryview(bytearray(len(header)))
        targets = _telling([*_of_all([Target(0, len(header), again), *places.targets], size)], told)
        also = self._pin.file(path) if self._pin else None
        file.blocks = _on_lanes(
            places.devices,
            lambda lane: blocks.scan(self._folder, path, size, digest, targets, lane, also),
        )
        if again != header:
            raise disk.damaged(self._folder, f"{path} has changed while it was read")
        self._kept.setdefault(codec.stem_of(path), set()).update(places.large_names(), file.in_place)
        try:
            made = places.tensors()
        except ValueError as exc:
            raise disk.damaged(self._folder, f"{path}: {exc}") from exc
        return made | {name: tensor for name, (_, tensor) in file.in_place.items()}

    def written(self) -> dict[str, blocks.Written]:
        """Return what the checkpoint's tensor files were written as."""
        return {
            file.path: blocks.Written(self._folder / file.path, file.size, file.blocks, file.identity)
            for file in self._files.values()
        }

    def names_in_place(self, stem: str) -> set[str]:
        """Return the tensors of a tree that are to be filled."""
        files = (file for path, file in self._files.items() if codec.stem_of(path) == stem)
        return {name for file in files for name in file.in_place}

    def apart(self, part: str) -> None:
        """Read the tensors of a part into memory of their own instead of into the live ones."""
        for file, names in self._of_parts([part]):
            slots = [file.in_place.pop(name)[0] for name in names]
            places = _Places([_Wanted(slot, _HOST) for slot in slots])
            self._read_again(file, places.targets, places.devices)
            tree = self.trees[codec.stem_of(file.path)]
            tree.tensors.update(places.tensors())
            tree.kept -= {*names}

    def fill(self, parts: Collection[str]) -> None:
        """Read the tensors of some parts into the live ones."""
        chosen = [*self._of_parts(parts)]
        size = sum(file.in_place[name][1].nbytes for file, names in chosen for name in names)
        with self._show(f"putting checkpoint {self._number} in its place", size) as told:
            for file, names in chosen:
                pairs = [file.in_place.pop(name) for name in names]
                places = _Places([_Wanted(slot, live.device, live) for slot, live in pairs])
                self._read_again(file, _telling(places.targets, told), places.devices)
                places.move()

    def _of_parts(self, parts: Collection[str]) -> Iterator[tuple[_File, list[str]]]:
        for file in self._files.values():
            json = self.trees[codec.stem_of(file.path)].json
            names = {name for part in parts if part in json for name in codec.tensor_names(json[part])}
            if there := [name for name in file.in_place if name in names]:
                yield file, there

    def _read_again(self, file: _File, targets: Sequence[Target], devices: Collection[torch.device]) -> None:
        _on_lanes(
            devices,
            lambda lane: blocks.scan_again(self._folder, file.path, file.size, file.blocks, targets, lane),
        )


def _telling(targets: Sequence[Target], told: Told | None) -> Sequence[Target]:
    """Return the targets such that somebody is told of what they take."""
    if told is None:
        return targets
    return [target._replace(take=partial(_take, told, target.take)) for target in targets]


def _of_all(targets: Sequence[Target], size: int) -> Iterator[Target]:
    """Yield the targets and, for what lies between them in a file of `size`, some that take nothing."""
    end = 0
    for target in [*targets, Target(size, size, None)]:
        if end < target.begin:
            yield Target(end, target.begin, None)
        yield target
        end = target.end


def _take(told: Told, take: Take | None, lane: Lane, at: int, piece: memoryview) -> None:
    if take:
        take(lane, at, piece)
    told(piece.nbytes)


def moved(saved: Collection[str], used: Collection[str]) -> dict[str, str]:
    """Return which device of a process stands for one of the process that saved, of those on an accelerator.

    >>> moved({"cpu", "cuda:0"}, {"cuda:3"})
    {'cuda:0': 'cuda:3'}
    """
    theirs, ours = (sorted({*devices} - {"cpu"}, key=_by_index) for devices in (saved, used))
    if {*theirs} <= {*ours}:
        return {}
    # The parts of a model that is spread over several keep their order; what has no place is for the host.
    return dict(zip(theirs, [*ours, *["cpu"] * len(theirs)], strict=False))


def _by_index(device: str) -> tuple[str, int]:
    kind, _, index = device.partition(":")
    return kind, int(index or 0)


def _moved_trees(
    trees: Mapping[str, Json], used: Collection[str], *, is_alone: bool
) -> dict[str, dict[str, str]]:
    """Return, by tree, which device of this process stands for one of the process that saved.

    What is trained decides: all else follows it, or stays where it was.
    """
    if not used:
        return {}
    trained = {device for stem in ("model", "optimizer") if stem in trees for device in _devices(trees[stem])}
    own = _own_devices(trees["rank"]) or (trained if is_alone else set())
    found = {}
    for stem, tree in trees.items():
        theirs = own if stem == "rank" else trained
        # What another rank had on a GPU of its own may be on somebody else's here.
        found[stem] = moved(theirs if is_alone else theirs | _devices(tree), used)
    return found


def _own_devices(tree: Json) -> set[str]:
    """Return the devices that the process used whose tree it is; older versions did not say."""
    at = tree.get("position")
    found = at.get("devices") if isinstance(at, dict) else None
    return {str(device) for device in found} if isinstance(found, list) else set()


def _devices(tree: Json) -> set[str]:
    return {str(about["device"]) for about in codec.tensor_facts(tree).values() if "device" in about}


def _fits(slot: Slot, device: torch.device, live: Tensor | None) -> bool:
    return (
        live is not None
        and live.device == device
        and (live.dtype, tuple(live.shape)) == (slot.dtype, slot.shape)
        and live.is_contiguous()
        and live.numel() > 0
        and live.device.type in ("cpu", "cuda")
        # (not every byte is a boolean, and a complex tensor may stand for its conjugate)
        and live.dtype != torch.bool
        and not live.is_complex()
        and not live.is_inference()
    )


class _Places:
    """Where tensors of one file are read to: a large one to its own memory, small ones together."""

    def __init__(self, wanted: Sequence[_Wanted]) -> None:
        self.devices = {want.device for want in wanted if want.device.type == "cuda"}
        self._large: list[tuple[Slot, Tensor]] = []
        self._rows: list[tuple[Sequence[_Wanted], memoryview]] = []
        self.targets: list[Target] = []
        row: list[_Wanted] = []
        for want in sorted(wanted, key=lambda want: want.slot.begin):
            is_large = want.slot.end - want.slot.begin >= _SMALL and want.device.type in ("cpu", "cuda")
            if row and (is_large or row[-1].slot.end != want.slot.begin):
                self._add_row(row)
                row = []
            if is_large:
                self._add_large(want)
            else:
                row.append(want)
        if row:
            self._add_row(row)

    def _add_row(self, row: Sequence[_Wanted]) -> None:
        begin, end = row[0].slot.begin, row[-1].slot.end
        memory = memoryview(bytearray(end - begin))
        self.targets.append(Target(begin, end, memory))
        self._rows.append((row, memory))

    def _add_large(self, want: _Wanted) -> None:
        slot = want.slot
        tensor = _room_for(want) if want.live is None else want.live
        if want.live is not None:
            # Else neither autograd nor a save on its way would know that it is written to.
            torch.autograd.graph.increment_version(tensor)
        flat = tensor.detach().view(-1).view(torch.uint8)
        self._large.append((slot, tensor))
        if tensor.is_cpu:
            array: Any = flat.numpy()
            self.targets.append(Target(slot.begin, slot.end, memoryview(array)))
        else:
            self.targets.append(Target(slot.begin, slot.end, None, partial(_send, flat)))

    def large_names(self) -> set[str]:
        """Return the tensors that have memory of their own."""
        return {slot.name for slot, _ in self._large}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name, when they have been read."""
        for slot, tensor in self._large:
            tensor_file.refuse_no_booleans(tensor.view(-1).view(torch.uint8), slot.dtype)
        found = {slot.name: tensor for slot, tensor in self._large}
        for row, memory in self._rows:
            for want, tensor in zip(row, _in_row(row, memory), strict=True):
                found[want.slot.name] = tensor if want.device == _HOST else tensor.to(want.device)
        return found

    @torch.no_grad()
    def move(self) -> None:
        """Copy what was read together into the live tensors."""
        for row, memory in self._rows:
            lives = [want.live for want in row if want.live is not None]
            torch._foreach_copy_(lives, _in_row(row, memory))


def _room_for(want: _Wanted) -> Tensor:
    try:
        return tensor_file.empty(want.slot, want.device)
    except RuntimeError as exc:
        # (torch tells so of no room, in host memory and on a device)
        raise CannotRead(
            f"there is no room on {want.device} for the {want.slot.end - want.slot.begin:,} bytes of "
            f"{want.slot.name}.",
            fix="see what else uses that memory (a training that still runs?), and start again; nothing says "
            "that the checkpoint is damaged.",
        ) from exc


def _in_row(row: Sequence[_Wanted], memory: memoryview) -> list[Tensor]:
    return tensor_file.from_row(memory, [want.slot for want in row])


def _send(to: Tensor, lane: Lane, at: int, piece: memoryview) -> None:
    assert isinstance(lane, _DeviceLane)
    lane.send(to[at : at + piece.nbytes])


class _DeviceLane(Lane):
    """Two pinned buffers: while one crosses the bus, the other is read into."""

    def __init__(self) -> None:
        self._buffers = [
            torch.empty(_ROOM, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)
        ]
        self._sent: list[tuple[torch.device, torch.cuda.Event] | None] = [None, None]
        self._turn = 0

    def room(self) -> memoryview:
        self._turn = 1 - self._turn
        if sent := self._sent[self._turn]:
            device, event = sent
            # A thread's device is the first one until it is set: waiting there would create a context on it.
            with torch.cuda.device(device):
                event.synchronize()
        array: Any = self._buffers[self._turn].numpy()
        return memoryview(array)

    def send(self, to: Tensor) -> None:
        """Begin to copy what was read into the room to its place."""
        stream = _side_stream(to.device)
        with torch.cuda.device(to.device), torch.cuda.stream(stream):
            to.copy_(self._buffers[self._turn][: to.numel()], non_blocking=True)
            event = _cuda.Event()
            event.record(stream)
        self._sent[self._turn] = to.device, event


@functools.cache
def _side_stream(device: torch.device) -> Any:
    # torch deals out the same 32 streams in turn: new ones for each load would soon be the user's.
    return _cuda.Stream(device)


def _on_lanes(devices: Collection[torch.device], scan: Callable[[Callable[[], Lane]], Any]) -> Any:
    # The streams of the lanes know nothing of what the training's have still to do, nor these of them.
    for device in devices:
        torch.cuda.synchronize(device)
    try:
        return scan(_DeviceLane if devices else Lane)
    finally:
        # After a failure too: what is still on its way would overwrite what is put back.
        for device in devices:
            torch.cuda.synchronize(device)
