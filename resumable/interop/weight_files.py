"""The tensors in a checkpoint, a .safetensors or a .pt file, by name and read only if they are wanted."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import (
    CannotRead,
    CheckpointDamaged,
    CheckpointNotFound,
    ResumableError,
    Unsupported,
    UsageError,
)
from ..files import codec, disk, file_reader, pin, safetensors_header, tensor_file
from ..files.file_reader import Target
from ..files.pin import Pin
from ..files.strict_json import LONGEST, Json, parse, typed
from ..files.tensor_file import Slot
from ..parts import box_reading
from ..parts.box_reading import Wanted
from ..remote import url
from ..run import address, manifest
from ..run.checkpoint import Checkpoint, open_checkpoint
from ..run.directory import Run
from .torch_file import Stored, TorchFile
from .zip_archive import Read, refused

T = TypeVar("T")
Weights = Mapping[str, Tensor]

_NAMES = ("state_dict", "model_state_dict", "model")
_DEEPEST = 4


class Found(NamedTuple):
    """The tensors of a file, none of them read yet."""

    shapes: Weights
    """By name, each on the meta device: most of a file may be of no use."""
    take: Callable[[Collection[str]], Weights]
    """Reads those with these names."""


Use = Callable[[Found], T]
"""Takes what it wants of a file. It may be called again, for an older checkpoint if one is damaged."""


def read(path: str | os.PathLike[str], expect: str | None, use: Use[T]) -> T:
    """Return what `use` makes of a checkpoint, a run's newest intact one, or a file of another tool."""
    if url.is_url(path):
        raise UsageError(
            f"{url.shown(str(path))} is a remote folder.",
            fix="bring it here first: resumable pull RUN REMOTE.",
        )
    # runs/exp/best is a symbolic link.
    given, word = address.named(os.fspath(path))
    place = Path(os.path.realpath(given))
    if not word and os.path.lexists(place / manifest.NAME):
        return _of_checkpoint(open_checkpoint(place), expect, use)
    if place.is_dir():
        run = Run(given)
        if run.highest() is None:
            raise CheckpointNotFound(
                f"{place} is neither a run with checkpoints nor a checkpoint.",
                fix="name a run, a checkpoint (runs/exp/best), or a .safetensors or .pt file.",
            )
        chosen = run.choose(word or "must", lambda found: _of_checkpoint(found, expect, use))
        assert chosen is not None
        return chosen[1]
    with _errors_that_name(place), _opened(place) as fd:
        return _of_file(place, fd, expect, use)


def _of_checkpoint(found: Checkpoint, expect: str | None, use: Use[T]) -> T:
    pinned = found.begin_pin() if expect else None
    with damage_in(found):
        used = use(_model_of(found, pinned))
    # The files of the model are verified by now.
    for file in found.about.files:
        if (
            pinned
            and not codec.has_trees(file)
            and not (codec.is_tensor_file(file) and codec.stem_of(file) == "model")
        ):
            found.scan_file(file, pinned)
    pin.refuse_others(expect, str(pinned), found.path)
    return used


@contextlib.contextmanager
def damage_in(found: Checkpoint) -> Iterator[None]:
    """Call a checkpoint damaged if the body finds that its content makes no sense."""
    try:
        yield
    except ResumableError:
        raise
    except ValueError as exc:
        raise disk.damaged(found.path, f"its content is not a checkpoint's: {exc}") from exc


def _model_of(found: Checkpoint, pinned: Pin | None) -> Found:
    tree = typed(dict, state(found, pinned).get("model", {}))
    if len(tree) != 1:
        raise Unsupported(
            f"{found} holds {len(tree)} models: {', '.join(sorted(tree)) or 'none'}.",
            fix="to take one of several, give all to RunState and call restore(PATH, only='model.NAME').",
        )
    ((name, json),) = tree.items()
    return of_part(found, "model", name, json, pinned)


def state(found: Checkpoint, pinned: Pin | None = None) -> dict[str, dict[str, Json]]:
    """Return the trees of a checkpoint's parts as JSON."""
    files = {file: about.size for file, about in found.about.files.items() if codec.has_trees(file)}
    if "state.json" not in files or max(files.values()) > LONGEST:
        raise ValueError("there is no state.json, or a much too long one")
    return codec.joined({file: typed(dict, parse(found.read_file(file, pinned))) for file in files})


def of_part(found: Checkpoint, stem: str, name: str, json: Json, pinned: Pin | None = None) -> Found:
    """Return the tensors of a part with this tree; to take some verifies all of the files that hold it."""
    found.refuse_part()
    of_stem = [
        path for path in found.about.files if codec.is_tensor_file(path) and codec.stem_of(path) == stem
    ]
    shards = [path for path in of_stem if codec.shard_of(path) is not None]
    paths = [path for path in of_stem if path not in shards]
    files = {file: found.read_header(file) for file in paths}
    slots = {
        file: tensor_file.read_header(head, found.about.files[file].size) for file, head in files.items()
    }
    empty = {slot.name: _without_content(slot) for of_file in slots.values() for slot in of_file}
    sharded = _Sharded(found, shards, json) if shards else None
    if sharded:
        empty |= sharded.empty

    def decoded(tensors: Weights) -> Weights:
        weights = typed(dict, codec.decode(json, tensors))
        if not {*map(type, weights.values())} <= {Tensor} or not {*map(type, weights)} <= {str}:
            raise ValueError(f"what it holds of {name} are not tensors by name")
        return weights

    def take(names: Collection[str]) -> Weights:
        wanted = {stored for name in names for stored in codec.tensor_names([json.get(name, json)])}
        taken = dict(empty)
        for file, head in files.items():
            taken |= _verified(found, file, head, [s for s in slots[file] if s.name in wanted], pinned)
        if sharded:
            taken |= sharded.take(wanted, pinned)
        return decoded(taken)

    return Found(decoded(empty), take)


class _Sharded:
    """The tensors of a part that are in the files of several processes, each a box of them."""

    def __init__(self, found: Checkpoint, paths: Sequence[str], json: Json) -> None:
        self._found = found
        facts = codec.tensor_facts(json)
        known = frozenset(codec.tensor_names(json))
        self._files = [box_reading.opened(found, path, known) for path in paths]
        self.empty: Weights = {}
        for stored in [one for file in self._files for one in file.stored if one.name in known]:
            shape = tuple(facts.get(stored.name, {}).get("shape", stored.slot.shape))
            self.empty[stored.name] = _without_content(stored.slot._replace(shape=shape))

    def take(self, names: Collection[str], pinned: Pin | None) -> Weights:
        """Return some of them as a whole, after what is read is verified."""
        wanted = {
            name: Wanted(name, torch.empty(one.shape, dtype=one.dtype, device="cpu"), is_live=False)
            for name, one in self.empty.items()
            if name in names
        }
        for file in self._files:
            of_file = [(wanted[one.name], one) for one in file.stored if one.name in wanted]
            pieces = [piece for one, stored in of_file for piece in one.pieces(stored)]
            if pinned:
                box_reading.take(self._found.read_file(file.path, pinned), pieces)
            else:
                box_reading.read(file, pieces, reads=lambda _: True)
        for one in wanted.values():
            one.refuse_gap()
        return {name: one.tensor for name, one in wanted.items()}


def _verified(
    found: Checkpoint, file: str, header: memoryview, slots: Sequence[Slot], pinned: Pin | None
) -> Weights:
    """Return some tensors of a file, in memory of their own, after all of it is verified."""
    again = memoryview(bytearray(len(header)))
    places = [memoryview(bytearray(slot.end - slot.begin)) for slot in slots]
    targets = [Target(0, len(header), again)]
    targets += [Target(s.begin, s.end, place) for s, place in zip(slots, places, strict=True) if place.nbytes]
    also = pinned.file(file) if pinned else None
    size, digest, _ = found.about.files[file]
    file_reader.scan(found.path, file, size, digest, targets, also=also)
    if again != header:
        raise ValueError(f"{file} has changed while it was read")
    return {s.name: tensor_file.from_row(place, [s])[0] for s, place in zip(slots, places, strict=True)}


def _without_content(slot: Slot) -> Tensor:
    return tensor_file.empty(slot, torch.device("meta"))


@contextlib.contextmanager
def _errors_that_name(place: Path) -> Iterator[None]:
    """Raise what goes wrong with a file of another tool as an error of ours that names the file."""
    try:
        yield
    except ResumableError as exc:
        if not isinstance(exc, Unsupported):
            raise
        raise Unsupported(f"{place} is not read: {exc.problem}", fix=exc.fix) from exc
    except ValueError as exc:
        raise CheckpointDamaged(f"{place} is damaged: {exc}.", fix="fetch it again.") from exc
    except FileNotFoundError as exc:
        raise CheckpointNotFound(f"{place} does not exist.", fix="check the path.") from exc
    except OSError as exc:
        raise CannotRead(
            f"{place} cannot be read: {exc.strerror}.", fix="mend the cause and start again."
        ) from exc


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[int]:
    # NONBLOCK: a pipe must not hang the load.
    fd = os.open(place, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise refused("it is not a regular file")
        yield fd
    finally:
        os.close(fd)


def _of_file(place: Path, fd: int, expect: str | None, use: Use[T]) -> T:
    size, read = os.fstat(fd).st_size, partial(file_reader.read_range, fd)
    if expect:
        # In private memory: what is used has to be what was hashed.
        whole = read(0, size)
        pin.refuse_others(expect, pin.of_bytes(whole), place)
        return use(_found_in(place, size, lambda begin, end: whole[begin:end]))
    return use(_found_in(place, size, read))


def _found_in(place: Path, size: int, read: Read) -> Found:
    return (_of_safetensors if place.suffix == ".safetensors" else _of_torch)(size, read)


def _of_safetensors(size: int, read: Read) -> Found:
    header = read(0, safetensors_header.header_size(read(0, min(size, 8)), size))
    slots = {slot.name: slot for slot in tensor_file.read_header(header, size)}
    # Only one of tied tensors is stored; the metadata has the other names.
    also = typed(dict, parse(header[8:])).get("__metadata__", {})
    stored = {name: str(first) for name, first in also.items() if str(first) in slots}
    stored |= {name: name for name in slots}

    def take(names: Collection[str]) -> Weights:
        wanted = [slots[stored] for stored in {stored[name] for name in names}]
        taken = {slot.name: tensor_file.from_row(read(slot.begin, slot.end), [slot])[0] for slot in wanted}
        return {name: taken[stored[name]] for name in names}

    return Found({name: _without_content(slots[first]) for name, first in stored.items()}, take)


def _of_torch(size: int, read: Read) -> Found:
    start = bytes(read(0, min(size, 2)))
    if start == b"\x80\x02":
        raise Unsupported(
            "it is a bare pickle, as torch.save wrote them before torch 1.6.",
            fix="convert it: torch.save(torch.load(PATH, weights_only=True), NEW), with torch 2.10 or newer.",
        )
    if start != b"PK":
        raise refused("it is neither a .safetensors file nor an archive of torch.save")
    file = TorchFile(size, read)
    stored = _state_dict(file.content)
    shapes = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in stored.items()}
    return Found(shapes, lambda names: {name: file.tensor(stored[name]) for name in names})


def _state_dict(content: Any) -> Mapping[str, Stored]:
    for _ in range(_DEEPEST):
        if type(content) is not dict:
            break
        if content and {*map(type, content)} == {str} and {*map(type, content.values())} == {Stored}:
            return content
        inner = [name for name in _NAMES if type(content.get(name)) is dict]
        if len(inner) != 1:
            break
        content = content[inner[0]]
    there = f": {', '.join(map(repr, [*content][:9]))}" if type(content) is dict else ""
    raise Unsupported(
        f"what it holds is no dict of tensors, and not just one under {', '.join(_NAMES)}{there}.",
        fix="save the weights by themselves: torch.save(model.state_dict(), PATH).",
    )
