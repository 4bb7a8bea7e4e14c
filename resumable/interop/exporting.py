"""The weights of a checkpoint as other tools read them: safetensors, torch.save, a Hugging Face folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..errors import CannotStore, ResumableError, SaveFailed, UsageError
from ..files import codec, disk, tensor_file
from ..files.strict_json import Json, typed
from ..run import manifest
from ..run.checkpoint import Checkpoint
from . import weight_files

_TORCH = (".pt", ".pth", ".bin")
_SAFE = ".safetensors"
INDEX = f"model{_SAFE}.index.json"
_OURS = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors|model\.safetensors\.index\.json")


@dataclass(frozen=True, slots=True)
class Model:
    """A model's weights, verified, in memory."""

    name: str
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    """The plain values in its state_dict."""
    left: tuple[str, ...]
    """The names of what is neither a tensor nor a plain value, and is left out."""

    def tied(self) -> dict[str, str]:
        """Return the names that share a tensor with an earlier name, each with that name."""
        first: dict[Any, str] = {}
        names = {name: first.setdefault(_place(name, value), name) for name, value in self.tensors.items()}
        return {name: kept for name, kept in names.items() if name != kept}

    def apart(self) -> dict[str, Tensor]:
        """Return each tensor under the first of its names."""
        tied = self.tied()
        return {name: tensor for name, tensor in self.tensors.items() if name not in tied}


def _place(name: str, tensor: Tensor) -> Any:
    return (tensor.data_ptr(), tensor.dtype, tensor.shape) if tensor.numel() else name


class File(NamedTuple):
    """A file that was written."""

    path: str
    size: int


def read(found: Checkpoint, name: str | None) -> Model:
    """Return a model of a checkpoint, or the weights of an extra part, verified."""
    with weight_files.damage_in(found):
        trees = weight_files.state(found)
        models, extra = typed(dict, trees.get("model", {})), typed(dict, trees.get("extra", {}))
        chosen = _chosen(found, models, extra, name)
        if chosen in models:
            tensors, rest = models[chosen], typed(dict, extra.get(chosen, {}))
            stem, values = "model", rest.get("values", rest) if "eval" in rest else rest
        else:
            stem, rest = "extra", extra[chosen]
            tensors, values = rest.get("weights", rest), rest.get("values", {})
        named = weight_files.of_part(found, stem, chosen, typed(dict, tensors))
        plain, left = _plain(typed(dict, values))
        return Model(chosen, named.take([*named.shapes]), plain, left)


def _chosen(
    found: Checkpoint, models: Mapping[str, Json], extra: Mapping[str, Json], name: str | None
) -> str:
    there = [*models, *(part for part, tree in extra.items() if part not in models and _has_weights(tree))]
    if name is None and len(models) == 1:
        return next(iter(models))
    named = [part for part in there if name and part in (name, f"model.{name}", f"extra.{name}")]
    if len(named) != 1:
        listed = ", ".join(sorted(there)) or "none"
        what = f"has no {name}" if name else f"holds {len(models)} models"
        raise UsageError(f"{found} {what}; there are: {listed}.", fix="name one of these: --model NAME.")
    return named[0]


def _has_weights(tree: Json) -> bool:
    if not isinstance(tree, dict):
        return False
    inner = tree.get("weights", tree)
    found = inner.values() if isinstance(inner, dict) else ()
    return bool(found) and all(isinstance(value, dict) and "$tensor" in value for value in found)


def _plain(values: Mapping[str, Json]) -> tuple[dict[str, Any], tuple[str, ...]]:
    left = tuple(name for name, value in values.items() if any(codec.tensor_names([value])))
    return {name: codec.decode(value, {}) for name, value in values.items() if name not in left}, left


def size_of(text: str) -> int:
    """Return the bytes that a text such as "5GB" or "500MiB" means.

    >>> size_of("5GB"), size_of("1.5 GiB")
    (5000000000, 1610612736)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(i?)B", text, re.IGNORECASE)
    if not match or (count := float(match[1])) <= 0:
        raise ValueError(f"{text!r} is no size; write it as 5GB or 500MB")
    power = " KMGT".index(match[2].upper() or " ")
    return max(1, int(count * (1024 if match[3] else 1000) ** power))


def kind_of(out: Path) -> str:
    """Return the kind of export that a name means: "safetensors", "torch" or "folder"."""
    if out.is_dir() or not out.suffix:
        return "folder"
    if out.suffix == _SAFE:
        return "safetensors"
    if out.suffix in _TORCH:
        return "torch"
    raise UsageError(
        f"the name {out.name} does not say in which form to export.",
        fix=f"end it with {_SAFE} or {_TORCH[0]}, or give a folder, whose name has no dot in it.",
    )


def check(out: Path, is_forced: bool) -> None:
    """Raise UsageError if something would be replaced, unless that is forced."""
    is_folder = kind_of(out) == "folder"
    if os.path.lexists((out if is_folder else out.parent) / manifest.NAME):
        raise UsageError(f"{out} would be in a checkpoint, and damage it.", fix="give another name.")
    there = [out] if os.path.lexists(out) else []
    if is_folder:
        there = [out / name for name in (os.listdir(out) if out.is_dir() else ()) if _OURS.fullmatch(name)]
    if there and not is_forced:
        raise UsageError(f"{there[0]} is there already.", fix="give another name, or replace it: --force.")


def write(model: Model, out: Path, shard: int) -> list[File]:
    """Write the weights; after a crash, the file or folder is complete or as it was before."""
    kind = kind_of(out)
    try:
        if kind == "folder":
            return _write_folder(model, out, shard)
        with _replacing(out) as fresh:
            if kind == "torch":
                _write_torch(fresh, model)
            else:
                _write_safetensors(fresh, model.apart(), model.tied())
        return [File(str(out), out.stat().st_size)]
    except OSError as exc:
        if isinstance(exc, ResumableError):
            raise
        raise SaveFailed(
            f"{out} could not be written: {exc.strerror}.",
            fix="mend the cause (room on the disk, permissions) and start again; nothing has changed.",
        ) from exc


@contextlib.contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Yield a temporary name to write to, and rename the file when it is durable."""
    fresh = out.with_name(f".{out.name}-{secrets.token_hex(4)}")
    try:
        yield fresh
        os.replace(fresh, out)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    disk.flush_folder(out.parent)


def _write_torch(path: Path, model: Model) -> None:
    with disk.created(path) as fd, open(fd, "wb", closefd=False) as file:
        torch.save({**model.tensors, **model.values}, file)


def write_to(file: BinaryIO, model: Model) -> None:
    """Write the weights to an open file, such as stdout, in the form of safetensors."""
    tensors = model.apart()
    _refuse(tensors)
    _put_safetensors(file, tensors, model.tied())


def _write_safetensors(path: Path, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    _refuse(tensors)
    with disk.created(path) as fd, open(fd, "wb", closefd=False) as file:
        _put_safetensors(file, tensors, tied)


def _put_safetensors(file: BinaryIO, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    planned = tensor_file.layout(tensors, tied)
    file.write(planned.header)
    for slot in planned.slots:
        file.write(tensor_file.as_bytes(tensors[slot.name]))


def _refuse(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in tensor_file.DTYPES or name == "__metadata__":
            what = str(tensor.dtype).removeprefix("torch.")
            raise CannotStore(
                f"{name} is {what}, for which a safetensors file has no place.",
                fix=f"export to a {_TORCH[0]} file instead. Nothing was written.",
            )


def _write_folder(model: Model, out: Path, shard: int) -> list[File]:
    kept = model.apart()
    plan = shards(kept, shard)
    # Beside the target of a link: a rename works only within one file system.
    place = Path(os.path.realpath(out))
    place.parent.mkdir(parents=True, exist_ok=True)
    stage = place.with_name(f".{place.name}-{secrets.token_hex(4)}")
    stage.mkdir()
    try:
        for name, names in plan.items():
            # No tied names: Hugging Face ties weights by its config.
            _write_safetensors(stage / name, {one: kept[one] for one in names}, {})
        if len(plan) > 1:
            disk.write(stage / INDEX, _index(plan, kept))
        disk.flush_folder(stage)
        written = [File(str(out / name), (stage / name).stat().st_size) for name in sorted(os.listdir(stage))]
        _put(stage, place)
    except BaseException:
        with contextlib.suppress(OSError):
            disk.remove(stage, os.listdir(stage))
        raise
    return written


def shards(tensors: Mapping[str, Tensor], most: int) -> dict[str, list[str]]:
    """Return the tensors of each file of a folder, which are filled one after the other.

    >>> shards({name: torch.zeros(2) for name in "abc"}, 16)["model-00002-of-00002.safetensors"]
    ['c']
    """
    files: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if files[-1] and size + tensor.nbytes > most:
            files.append([])
            size = 0
        files[-1].append(name)
        size += tensor.nbytes
    if len(files) == 1:
        return {f"model{_SAFE}": files[0]}
    return {f"model-{at:05}-of-{len(files):05}{_SAFE}": names for at, names in enumerate(files, 1)}


def _index(plan: Mapping[str, list[str]], tensors: Mapping[str, Tensor]) -> bytes:
    where = {name: file for file, names in plan.items() for name in names}
    total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    return (json.dumps({"metadata": total, "weight_map": where}, indent=2, sort_keys=True) + "\n").encode()


def _put(stage: Path, out: Path) -> None:
    """Rename the folder, or move its files into the one that exists."""
    if not os.path.lexists(out):
        os.rename(stage, out)
        disk.flush_folder(out.parent)
        return
    fresh = {*os.listdir(stage)}
    # The index last: until then the old one still leads to complete files.
    for name in sorted(fresh, key=lambda name: name == INDEX):
        os.replace(stage / name, out / name)
    for name in os.listdir(out):
        if _OURS.fullmatch(name) and name not in fresh:
            os.unlink(out / name)
    os.rmdir(stage)
    disk.flush_folder(out)
