"""The weights of a model from elsewhere, to begin another training with: all that fit, or none."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import (
    CannotRead,
    CheckpointDamaged,
    CheckpointNotFound,
    ResumableError,
    StateMismatch,
    Unsupported,
    UsageError,
)
from ..files import codec, disk, large_files, pin, safetensors_header, tensor_file
from ..files.large_files import Target
from ..files.pin import Pin
from ..files.strict_json import LONGEST, Json, parse, typed
from ..files.tensor_file import Slot
from ..parts import models
from ..parts.models import ModulePart
from ..parts.part import shape
from ..remote import url
from ..run import manifest
from ..run.checkpoint import Checkpoint, open_checkpoint
from ..run.directory import Run
from .torch_file import Stored, TorchFile
from .zip_archive import Read, refused

Weights = Mapping[str, Tensor]

_NAMES = ("state_dict", "model_state_dict", "model")
_DEEPEST = 4
_STATE = "state.json"


@dataclass(frozen=True, slots=True)
class Misfit:
    """What weights and a model do not agree on: names, and what shapes there are."""

    missing: Mapping[str, str]
    """What the model has and the file lacks; it stays as it was."""
    unexpected: Mapping[str, str]
    """What the file has and the model lacks; it is left out."""
    reshaped: Mapping[str, str]
    """What has another shape in the file; it stays as it was."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        kinds = {"missing in the file": self.missing, "only in the file": self.unexpected}
        rows = [f"  {name}: {what}, {text}" for what, found in kinds.items() for name, text in found.items()]
        return "\n".join([*rows, *(f"  {name}: {text}" for name, text in self.reshaped.items())])


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    strict: bool = True,
    *,
    expect: str | None = None,
) -> Misfit:
    """Load a model's weights: of a checkpoint, a run (its newest intact one), a .safetensors or a .pt file.

    Names fit whatever wraps the model, here or there: "module.", "_orig_mod." and "model." in front of them
    do not count. All is read and checked before the model is touched. What does not fit is an error that
    names all of it; with `strict=False` it is returned instead, and the rest is loaded. Another dtype is
    converted to the model's. `expect`: the only content to load ("sha256:..."), as `Checkpoint.pin()`
    or, of a file, sha256sum tells it.

    >>> there = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> torch.save({"state_dict": torch.nn.DataParallel(there).state_dict()}, "there.pt")
    >>> here = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 5))
    >>> load_weights(here, "there.pt", strict=False).reshaped["1.bias"]
    'float32[1] in the file, float32[5] in the model'
    >>> torch.equal(here[0].weight, there[0].weight)
    True
    """
    expect = pin.checked(expect)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{model!r:.100} is no model.", fix="give it the torch.nn.Module to load into.")
    part = ModulePart("model", model, "model")
    live = part.collect()["model"]
    # (torch copies into it without an error, and nothing is there)
    if nowhere := [name for name, value in live.items() if value.is_meta]:
        raise UsageError(
            f"{nowhere[0]} is on the meta device, where nothing has a content.",
            fix="give the model memory first: model.to_empty(device=...).",
        )
    fitting, misfit = _read(path, expect, live)
    if misfit and strict:
        raise StateMismatch(
            f"{os.fspath(path)} does not fit the model:\n{misfit}",
            fix="make the model as it was, or load what fits, and see what does not: strict=False.",
        )
    if live and not fitting:
        raise StateMismatch(
            f"nothing in {os.fspath(path)} fits the model:\n{misfit}",
            fix="look at the names: most likely this is another model.",
        )
    _put_in(part, fitting)
    return misfit


def _put_in(part: ModulePart, fitting: Weights) -> None:
    bare = models.bare_name(part.live)
    state = part.live.state_dict(keep_vars=True)
    own = {name: fitting[bare(name)] for name in state if bare(name) in fitting}
    before = {}
    if not part.is_torchs_own():
        # Its code may refuse in the middle, when some of it has been loaded.
        before = {name: value.detach().clone() for name, value in state.items() if name in own}
    try:
        part.live.load_state_dict(own, strict=False)
    except BaseException:
        with torch.no_grad():
            for name, value in before.items():
                state[name].copy_(value)
        raise


class Found(NamedTuple):
    """The tensors of a file, of which none has been read yet."""

    shapes: Weights
    """By name, a tensor without content: most of a file may be of no use."""
    take: Callable[[Collection[str]], Weights]
    """What reads those that are named."""


class _Fitting(NamedTuple):
    tensors: Weights
    misfit: Misfit


def _fitting(found: Found, live: Weights) -> _Fitting:
    """Return what fits, read, by the names in the model."""
    known, misfit = _matched(found.shapes, live)
    taken = found.take({*known.values()})
    tensors = {name: taken[there] for name, there in known.items()}
    untied = _untied(tensors, live)
    rest = {name: value for name, value in tensors.items() if name not in untied}
    return _Fitting(rest, replace(misfit, reshaped={**misfit.reshaped, **untied}))


def _matched(found: Weights, live: Weights) -> tuple[dict[str, str], Misfit]:
    """Return which name in the file is which in the model, and what does not fit."""
    known = _pairs([*found], [*live])
    reshaped = {
        name: f"{shape(found[there])} in the file, {shape(live[name])} in the model"
        for name, there in known.items()
        if found[there].shape != live[name].shape
    }
    # A tensor with several names needs to be there under one of them.
    places = {_place(live[name]) for name in known}
    missing = {
        name: shape(value)
        for name, value in live.items()
        if name not in known and (not value.numel() or _place(value) not in places)
    }
    used = {*known.values()}
    unexpected = {name: shape(value) for name, value in found.items() if name not in used}
    known = {name: there for name, there in known.items() if name not in reshaped}
    return known, Misfit(missing, unexpected, reshaped)


def _place(value: Tensor) -> Any:
    return value.data_ptr(), value.shape, value.stride(), value.device


def _untied(fitting: Weights, live: Weights) -> dict[str, str]:
    """Return what is one tensor in the model and has several values in the file: it would get the last."""
    first: dict[Any, str] = {}
    found = {}
    for name, value in fitting.items():
        other = first.setdefault(_place(live[name]), name) if value.numel() else name
        if other != name and not tensor_file.is_equal(fitting[other], value):
            found[name] = f"another value than {other} in the file, the same tensor in the model"
    return found


def _pairs(there: Sequence[str], here: Sequence[str]) -> dict[str, str]:
    """Return for each name in a model that in the file: the same, or the one that is the same when bare.

    >>> _pairs(["module._orig_mod.0.bias", "n"], ["0.bias"])
    {'0.bias': 'module._orig_mod.0.bias'}
    """
    found = {name: name for name in {*here} & {*there}}
    # Where several names would be the same, none of them is.
    count = Counter(map(_bare, here)), Counter(map(_bare, there))
    by_bare = {_bare(name): name for name in there}
    for name in here:
        bare = _bare(name)
        other = by_bare.get(bare)
        if name not in found and other and count[0][bare] == count[1][bare] == 1:
            found[name] = other
    return {name: found[name] for name in here if name in found}


def _bare(name: str) -> str:
    # (those of wrappers stand where the wrapped module does, "model" is what people call theirs)
    inner = [word for word in name.split(".") if word not in ("module", "_orig_mod")]
    return ".".join(itertools.dropwhile(lambda word: word == "model", inner))


def _read(path: str | os.PathLike[str], expect: str | None, live: Weights) -> _Fitting:
    if url.is_url(path):
        raise UsageError(
            f"{url.shown(str(path))} is a remote folder.",
            fix="bring it here first: resumable pull RUN REMOTE.",
        )
    # (runs/exp/best is a symbolic link)
    place = Path(os.path.realpath(path))
    if os.path.lexists(place / manifest.NAME):
        return _of_checkpoint(open_checkpoint(place), expect, live)
    if place.is_dir():
        run = Run(path)
        if run.highest() is None:
            raise CheckpointNotFound(
                f"{place} is neither a run with checkpoints nor a checkpoint.",
                fix="name a run, a checkpoint (runs/exp/best), or a .safetensors or .pt file.",
            )
        chosen = run.choose("must", lambda found: _of_checkpoint(found, expect, live))
        assert chosen is not None
        return chosen[1]
    return _of_file(place, expect, live)


def _of_checkpoint(found: Checkpoint, expect: str | None, live: Weights) -> _Fitting:
    pinned = found.begin_pin() if expect else None
    try:
        fitting = _of_model(found, pinned, live)
    except ResumableError:
        raise
    except ValueError as exc:
        raise disk.damaged(found.path, f"its content is not a checkpoint's: {exc}") from exc
    for file in found.about.files:
        if pinned and file != _STATE and not _is_of_model(file):
            found.scan_file(file, pinned)
    pin.refuse_others(expect, str(pinned), found.path)
    return fitting


def _is_of_model(file: str) -> bool:
    return codec.is_tensor_file(file) and codec.stem_of(file) == "model"


def _of_model(found: Checkpoint, pinned: Pin | None, live: Weights) -> _Fitting:
    """Read what fits of the files that have the model; all of them are verified."""
    tree = typed(dict, state(found, pinned).get("model", {}))
    if len(tree) != 1:
        raise Unsupported(
            f"{found} holds {len(tree)} models: {', '.join(sorted(tree)) or 'none'}.",
            fix="to take one of several, give all to RunState and call restore(PATH, only='model.NAME').",
        )
    ((name, json),) = tree.items()
    return _fitting(of_part(found, "model", name, json, pinned), live)


def state(found: Checkpoint, pinned: Pin | None = None) -> dict[str, Json]:
    """Return the trees of a checkpoint's parts, whose tensors have not been read."""
    if _STATE not in found.about.files or found.about.files[_STATE].size > LONGEST:
        raise ValueError(f"there is no {_STATE}, or a much too long one")
    return typed(dict, parse(found.read_file(_STATE, pinned)))


def of_part(found: Checkpoint, stem: str, name: str, json: Json, pinned: Pin | None = None) -> Found:
    """Return the tensors of a part by name, by its tree; all of the files that they lie in are verified."""
    paths = [path for path in found.about.files if codec.is_tensor_file(path) and codec.stem_of(path) == stem]
    files = {file: found.read_header(file) for file in paths}
    slots = {
        file: tensor_file.read_header(head, found.about.files[file].size) for file, head in files.items()
    }
    empty = {slot.name: _without_content(slot) for of_file in slots.values() for slot in of_file}

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
        return decoded(taken)

    return Found(decoded(empty), take)


def _verified(
    found: Checkpoint, file: str, header: memoryview, slots: Sequence[Slot], pinned: Pin | None
) -> Weights:
    """Return some tensors of a file, in memory of their own, when all of it has been verified."""
    again = memoryview(bytearray(len(header)))
    places = [memoryview(bytearray(slot.end - slot.begin)) for slot in slots]
    targets = [Target(0, len(header), again)]
    targets += [Target(s.begin, s.end, place) for s, place in zip(slots, places, strict=True) if place.nbytes]
    also = pinned.file(file) if pinned else None
    large_files.scan(found.path, file, *found.about.files[file], targets, also=also)
    if again != header:
        raise ValueError(f"{file} has changed while it was read")
    return {s.name: tensor_file.from_row(place, [s])[0] for s, place in zip(slots, places, strict=True)}


def _without_content(slot: Slot) -> Tensor:
    return tensor_file.empty(slot, torch.device("meta"))


def _of_file(place: Path, expect: str | None, live: Weights) -> _Fitting:
    with telling(place), opened(place) as fd:
        return _of_descriptor(place, fd, expect, live)


@contextlib.contextmanager
def telling(place: Path) -> Iterator[None]:
    """Raise what goes wrong with a file of somebody else's as one of our errors, which names it."""
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


def _of_descriptor(place: Path, fd: int, expect: str | None, live: Weights) -> _Fitting:
    size = os.fstat(fd).st_size
    # In private memory: what is hashed has to be what is used.
    whole = large_files.read_range(fd, 0, size) if expect else None
    if whole is not None:
        pin.refuse_others(expect, pin.of_bytes(whole), place)

    def read(begin: int, end: int) -> memoryview:
        return large_files.read_range(fd, begin, end) if whole is None else whole[begin:end]

    found = (of_safetensors if place.suffix == ".safetensors" else _of_torch)(size, read)
    return _fitting(found, live)


@contextlib.contextmanager
def opened(place: Path, flags: int = 0) -> Iterator[int]:
    """Open a regular file of somebody else's."""
    # NONBLOCK: a pipe must not hang the load.
    flags |= os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    fd = os.open(place, flags)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise refused("it is not a regular file")
        yield fd
    finally:
        os.close(fd)


def of_safetensors(size: int, read: Read) -> Found:
    """Return what lies in a safetensors file."""
    header = read(0, safetensors_header.header_size(read(0, min(size, 8)), size))
    slots = {slot.name: slot for slot in tensor_file.read_header(header, size)}
    # Of tied tensors only one is stored; the metadata has the other names.
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
