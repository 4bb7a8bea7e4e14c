"""Reads the files and folders of other tools: nothing in them is made, and nothing outside them is read."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import CheckpointNotFound, Unsupported, UsageError
from ..files import large_files, strict_json
from ..files.strict_json import typed
from ..remote import url
from ..run import manifest
from ..run.manifest import Goal
from . import other_tools
from .other_tools import LOADER, RANDOM, Foreign, Tree
from .pickle_values import Objects, plain
from .torch_file import Stored, TorchFile
from .weights import of_safetensors, opened, telling
from .zip_archive import refused

_ROOM = 64 << 20
_LONGEST = 64 << 20
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def look(source: str, renamed: Mapping[str, str]) -> Foreign:
    """Return what a file or a folder of another tool holds, in our terms, with its tensors."""
    if url.is_url(source):
        raise UsageError(f"{url.shown(source)} is an address.", fix="fetch it first, and give the file.")
    place = Path(os.path.realpath(source))
    if place.is_dir():
        return _of_folder(place, renamed)
    if place.suffix == ".safetensors":
        raise Unsupported(
            f"{source} holds weights only, and nothing else of a training.",
            fix=f"start a training from them: resumable.load_weights(model, {source!r}).",
        )
    content = _content(place, 0)
    with telling(place):
        return other_tools.of_dict(content, renamed)


def _content(place: Path, flags: int) -> Any:
    with telling(place), opened(place, flags) as fd:
        size = os.fstat(fd).st_size
        read = partial(large_files.read_range, fd)
        start = bytes(read(0, min(size, 2)))
        if start[:1] == b"\x80":
            raise Unsupported(
                "it is a bare pickle, as torch.save wrote them before torch 1.6.",
                fix="convert it: torch.save(torch.load(PATH, map_location='cpu', weights_only=True), NEW). "
                "If it holds objects, and you trust who made it: weights_only=False. Then import NEW.",
            )
        if start != b"PK":
            raise refused("it is no archive of torch.save")
        file = TorchFile(size, read, Objects)
        return _Tensors(file, 2 * size + _ROOM).put_into(plain(file.content))


class _Tensors:
    """The tensors of a file, each read once, wherever it stands."""

    def __init__(self, file: TorchFile, room: int) -> None:
        self._file = file
        self._room = room
        self._made: dict[Stored, Any] = {}

    def put_into(self, tree: Any) -> Any:
        kind = type(tree)
        if kind is Stored:
            return self._tensor(tree)
        if kind is dict:
            return {key: self.put_into(value) for key, value in tree.items()}
        return kind(map(self.put_into, tree)) if kind in (list, tuple) else tree

    def _tensor(self, stored: Stored) -> Any:
        if stored not in self._made:
            # Many can lie in the same memory, each in another way, and each would be written by itself.
            self._room -= math.prod(stored.shape) * stored.dtype.itemsize
            if self._room < 0:
                raise refused("its tensors stand for more than twice the bytes that the file has")
            self._made[stored] = self._file.tensor(stored)
        return self._made[stored]


def _of_folder(folder: Path, renamed: Mapping[str, str]) -> Foreign:
    with telling(folder):
        names = sorted(os.listdir(folder))
    _refuse_folder(folder, names)
    if "trainer_state.json" in names:
        return _of_trainer(folder, names, renamed)
    if "optimizer.bin" in names or any(name.startswith("random_states_") for name in names):
        return _of_accelerate(folder, names, renamed)
    inner = [name for name in names if re.fullmatch(r"(checkpoint|epoch|step)[-_][0-9]+", name)]
    where = f" It holds {', '.join(inner[:9])}: give one of these." if inner else ""
    raise CheckpointNotFound(
        f"{folder} is no checkpoint of Accelerate or of the HF Trainer.{where}",
        fix="give the folder that has optimizer.bin or optimizer.pt in it, or a file of torch.save.",
    )


def _refuse_folder(folder: Path, names: list[str]) -> None:
    if manifest.NAME in names or "run.json" in names:
        raise UsageError(
            f"{folder} was written by resumable.", fix="give it to RunState as it is, or `resumable push` it."
        )
    for pattern, what, how in _SPLIT:
        if any(re.fullmatch(pattern, name) for name in names):
            raise Unsupported(f"{folder} is split over processes ({what}).", fix=how)


_MERGE = "merge it first, with what made it, and import what that writes"
_SPLIT = (
    (
        r"zero_to_fp32\.py|global_step[0-9]+",
        "DeepSpeed",
        f"{_MERGE}: its zero_to_fp32.py does that for weights.",
    ),
    (
        r"pytorch_model_fsdp.*|optimizer_[0-9]+",
        "FSDP",
        f"{_MERGE}: `accelerate merge-weights` does that for weights.",
    ),
    (
        r".*\.distcp|\.metadata",
        "torch.distributed.checkpoint",
        f"{_MERGE}: `python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR FILE`.",
    ),
)


def _of_trainer(folder: Path, names: list[str], renamed: Mapping[str, str]) -> Foreign:
    """A checkpoint of the HF Trainer; its `epoch` is a number of epochs with a fraction."""
    found = Foreign("the HF Trainer")
    stems = {"optimizer.pt": "optimizer", "scheduler.pt": "scheduler", "scaler.pt": "scaler"}
    content = {"model": _weights(folder, names, "model", "pytorch_model")}
    content |= {stem: _content(folder / name, _NO_LINK) for name, stem in stems.items() if name in names}
    for key, value in other_tools.take_parts(found, content, renamed).items():
        found.leave(key, value, "nothing of it is known")
    with telling(folder / "trainer_state.json"):
        state: Tree = typed(dict, _json(folder / "trainer_state.json"))
        _take_progress(found, state)
        _take_best(found, state)
    for name in names:
        if re.fullmatch(r"rng_state.*\.pth", name):
            found.left.append(other_tools.Left(name, "a file", RANDOM))
        elif name not in stems and re.fullmatch(r".*\.(pt|pth|pkl)|training_args\.bin", name):
            found.left.append(
                other_tools.Left(name, "a file", "objects of classes; such are never made of a file")
            )
    return found


def _take_progress(found: Foreign, state: Mapping[str, Any]) -> None:
    found.step, epoch = typed(int, state.get("global_step")), state.get("epoch") or 0
    if not isinstance(epoch, (int, float)) or not 0 <= epoch < 1 << 62 or not 0 <= found.step < 1 << 62:
        raise ValueError(f"{epoch} epochs and {found.step} steps are no progress")
    whole = round(epoch) if abs(epoch - round(epoch)) < 1e-6 else math.floor(epoch)
    found.epoch = int(whole)
    if abs(epoch - whole) >= 1e-6:
        found.notes.append(f"it stands at epoch {epoch:.2f}: epoch {found.epoch} begins anew")


def _take_best(found: Foreign, state: Mapping[str, Any]) -> None:
    """The file says the best value, and not of what: the history of evaluations does."""
    best, history = state.get("best_metric"), state.get("log_history")
    if not isinstance(best, (int, float)) or abs(best) > 1e300 or type(history) is not list:
        return
    rows = [row for row in history if type(row) is dict]
    names = [key for row in rows for key, value in row.items() if key.startswith("eval_") and value == best]
    if not names:
        found.leave("best_metric", best, "nothing tells of what: --maximize NAME or --minimize NAME does")
        return
    values = [row[names[0]] for row in rows if type(row.get(names[0])) in (int, float)]
    # (of all that were evaluated it is the highest, or the lowest)
    known = best == max(values) if min(values) < max(values) else other_tools.is_maximal(names[0])
    if known is None:
        found.leave(
            "best_metric", best, "nothing tells whether more is better: --maximize or --minimize does"
        )
        return
    found.goal, found.value = Goal(names[0], maximize=known), float(best)
    found.is_best = state.get("best_global_step") == state["global_step"]


def _of_accelerate(folder: Path, names: list[str], renamed: Mapping[str, str]) -> Foreign:
    """A folder of `save_state`; it says nothing of epochs."""
    found = Foreign("Accelerate")
    content: Tree = {}
    for number in _numbers(names) or [""]:
        content[f"model{number}"] = _weights(folder, names, f"model{number}", f"pytorch_model{number}")
    for name in names:
        stem = name.partition(".")[0]
        if re.fullmatch(r"(optimizer|scheduler)(_[0-9]+)?\.bin|scaler\.pt", name) or stem in renamed:
            content[stem] = _content(folder / name, _NO_LINK)
        elif re.fullmatch(r"random_states_[0-9]+\.pkl", name):
            found.left.append(other_tools.Left(name, "a file", RANDOM))
        elif re.fullmatch(r"(sampler|dl_state_dict).*\.bin", name):
            found.left.append(other_tools.Left(name, "a file", LOADER))
        elif re.fullmatch(r"custom_checkpoint_[0-9]+\.pkl", name):
            why = f"nothing tells what it is: --part {stem}=extra.NAME carries it over"
            found.left.append(other_tools.Left(name, "a file", why))
    for key, value in other_tools.take_parts(found, content, renamed).items():
        found.leave(key, value, "nothing of it is known")
    found.notes.append("nothing tells how many epochs were done: they count from 0 (--epoch N)")
    other_tools.count_steps(found)
    return found


def _numbers(names: list[str]) -> list[str]:
    """Return what stands behind `model` in the names of the models: nothing, _1, _2."""
    pattern = re.compile(r"(?:model|pytorch_model)(_[0-9]+)?\.(?:safetensors|bin)(?:\.index\.json)?")
    return sorted({match[1] or "" for match in map(pattern.fullmatch, names) if match})


def _weights(folder: Path, names: list[str], *stems: str) -> Tree:
    """Return the weights in a folder, of one file or of several that an index names."""
    for stem in stems:
        for suffix in ("safetensors", "bin"):
            name = f"{stem}.{suffix}"
            if name in names:
                return dict(_tensors(folder, name))
            if f"{name}.index.json" in names:
                return dict(_of_index(folder, names, f"{name}.index.json"))
    but = " but those of an adapter" if any(name.startswith("adapter_model") for name in names) else ""
    raise CheckpointNotFound(
        f"{folder} holds no weights{but}: no {stems[0]}.safetensors.",
        fix="give a folder that was saved with the model.",
    )


def _of_index(folder: Path, names: list[str], index: str) -> Iterator[tuple[str, Any]]:
    with telling(folder / index):
        files = typed(dict, typed(dict, _json(folder / index)).get("weight_map"))
        if lacking := {*files.values()} - {*names}:
            # (a name with a slash in it is none of them)
            raise ValueError(f"there is no {', '.join(map(str, sorted(lacking, key=str)))}")
    for file in sorted({*files.values()}):
        for name, tensor in _tensors(folder, file):
            if files.get(name) == file:
                yield name, tensor


def _tensors(folder: Path, name: str) -> Iterator[tuple[str, Any]]:
    if not name.endswith(".safetensors"):
        content = _content(folder / name, _NO_LINK)
        if not other_tools.is_state_dict(content):
            raise Unsupported(f"{folder / name} holds no weights by names.", fix="save it as .safetensors.")
        yield from content.items()
        return
    with telling(folder / name), opened(folder / name, _NO_LINK) as fd:
        found = of_safetensors(os.fstat(fd).st_size, partial(large_files.read_range, fd))
        yield from found.take([*found.shapes]).items()


def _json(place: Path) -> Any:
    with telling(place), opened(place, _NO_LINK) as fd:
        if (size := os.fstat(fd).st_size) > _LONGEST:
            raise ValueError(f"it has {size:,} bytes; at most {_LONGEST:,} make sense")
        text = str(large_files.read_range(fd, 0, size), "utf-8")
        if strict_json.is_more_than(1_000_000, text):
            raise ValueError("it has more than 1,000,000 lists, objects and keys")
        try:
            # (a loss may be NaN)
            return json.loads(text)
        except RecursionError as exc:
            raise ValueError("it is nested too deeply") from exc
