"""A reader of checkpoints that was written from docs/format.md alone: nothing here imports resumable.

That it reads what the library writes says that the page is enough to write another one.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import deserialize

NAME = re.compile(r"[0-9]{6,15}-step-[0-9]{8,}")
SHARD = re.compile(
    r"(model|optimizer|extra)/shard-[0-9]{5}-model-0000(1-of-0000[12]|2-of-00002)\.safetensors"
)
BLOCK = 16 << 20
DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BOOL": "?", "C64": "<c8"},
    **{f"{kind}{bits}": f"<{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)},
}
KEYS = {
    *("format", "number", "parent", "run_id", "saved", "boundary", "epoch", "batch", "step", "samples"),
    *("metrics", "best", "world_size", "files", "parts", "built", "environment"),
}


class Damaged(Exception):
    """A checkpoint is not as it was written."""


def unsealed(data: bytes) -> dict[str, Any]:
    """Return the object of a sealed JSON file, or raise Damaged."""
    match = re.match(rb'\{"checksum": "([0-9a-f]{32})",', data)
    if not match or xxhash.xxh3_128_hexdigest(data[match.end() :]) != match[1].decode():
        raise Damaged("the checksum is not that of the text")
    return parsed(data)


def parsed(data: bytes) -> Any:
    return json.loads(data.decode(), object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise Damaged("a key is there twice")
    return dict(pairs)


def _refuse(text: str) -> Any:
    raise Damaged(f"{text} is no number")


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _refuse(text)


def digest(data: bytes) -> str:
    if len(data) <= BLOCK:
        return xxhash.xxh3_128_hexdigest(data)
    blocks = (data[at : at + BLOCK] for at in range(0, len(data), BLOCK))
    return xxhash.xxh3_128_hexdigest(b"".join(xxhash.xxh3_128_digest(block) for block in blocks))


def checkpoints(run: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, the newest first."""
    found = [path for path in (run / "checkpoints").iterdir() if NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.split("-")[0]), reverse=True)


def newest(run: Path) -> tuple[Path, dict[str, Any]]:
    """Return the newest checkpoint that verifies, and its manifest."""
    for folder in checkpoints(run):
        try:
            return folder, verified(folder)
        except (Damaged, OSError):
            continue
    raise Damaged(f"{run} has no checkpoint that is intact")


def verified(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint whose files are all as it says."""
    about = unsealed((folder / "manifest.json").read_bytes())
    if about["format"] > 2:
        raise NotImplementedError(f"format {about['format']}")
    if {*about} - {"checksum", "data_ranks"} != KEYS:
        raise Damaged(f"the manifest has other keys: {sorted({*about} ^ KEYS)}")
    for name, record in about["files"].items():
        is_shard = about["format"] == 2 and SHARD.fullmatch(name)
        if not is_shard and not re.fullmatch(
            r"([a-z]{1,32}(-frozen)?|ranks/[0-9]{5})\.(json|safetensors)|state-[0-9]{5}\.json", name
        ):
            raise Damaged(f"{name} is no name of a file")
        data = (folder / name).read_bytes()
        if is_shard and record["blocks"] != [
            digest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)
        ]:
            raise Damaged(f"the blocks of {name} are not as the manifest says")
        if len(data) != record["size"] or digest(data) != record["xxh3_128"]:
            raise Damaged(f"{name} is not as the manifest says")
    return about


def tensors(folder: Path, stem: str) -> dict[str, Any]:
    """Return the tensors of a file and of its frozen twin, by name; other names of tied ones too."""
    found: dict[str, Any] = {}
    for path in (folder / f"{stem}.safetensors", folder / f"{stem}-frozen.safetensors"):
        if path.exists():
            data = path.read_bytes()
            found |= {name: _array(about) for name, about in deserialize(data)}
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            ties = header.get("__metadata__", {})
            found |= {other: found[first] for other, first in ties.items() if first in found}
    return found


def sharded(folder: Path, stem: str) -> dict[str, Any]:
    """Return the tensors of a tree that are in files of shards, each as a whole."""
    boxes: dict[str, list[tuple[list[int], Any]]] = {}
    for path in sorted((folder / stem).glob("shard-*.safetensors")):
        data = path.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        for name, about in deserialize(data):
            boxes.setdefault(re.sub("~[0-9]+$", "", name), []).append(
                (places[name]["saved_offsets"], _array(about))
            )
    found = {}
    for name, parts in boxes.items():
        ends = [[at + size for at, size in zip(begin, box.shape, strict=True)] for begin, box in parts]
        whole = np.empty([max(sides) for sides in zip(*ends, strict=True)], parts[0][1].dtype)
        for (begin, box), end in zip(parts, ends, strict=True):
            whole[tuple(map(slice, begin, end))] = box
        if whole.size != sum(box.size for _, box in parts):
            raise Damaged(f"the boxes of {name} are not all of it")
        found[name] = whole
    return found


def _array(about: dict[str, Any]) -> Any:
    # Numpy has no BF16 and no F8: those stay bytes
    dtype = DTYPES.get(about["dtype"])
    return np.frombuffer(about["data"], dtype).reshape(about["shape"]) if dtype else bytes(about["data"])


def trees(folder: Path) -> dict[str, Any]:
    """Return every part of a checkpoint, by file and name, as plain data and arrays."""
    found: dict[str, Any] = {}
    for path in folder.glob("state*.json"):
        for stem, parts in parsed(path.read_bytes()).items():
            there = tensors(folder, stem) | sharded(folder, stem)
            found[stem] = found.get(stem, {}) | decoded(parts, there)
    return found


def rank(folder: Path, number: int = 0) -> Any:
    """Return what one process has of its own."""
    stem = f"ranks/{number:05}"
    return decoded(parsed((folder / f"{stem}.json").read_bytes()), tensors(folder, stem))


def decoded(node: Any, named: dict[str, Any]) -> Any:
    """Return what a node of a tree stands for."""
    if isinstance(node, list):
        return [decoded(one, named) for one in node]
    if not isinstance(node, dict):
        return node
    if [key for key in node if key.startswith("$")]:
        (key, value) = next(iter(node.items()))
        return DECODE[key](value, lambda one: decoded(one, named), named)
    return {key: decoded(one, named) for key, one in node.items()}


def _tensor(value: Any, _: Any, named: dict[str, Any]) -> Any:
    name, about = value if isinstance(value, list) else (value, {})
    array = named[name]
    if about.get("dtype"):
        return about["dtype"], array.tobytes()
    return array


def _ndarray(value: Any, _: Any, named: dict[str, Any]) -> Any:
    name, dtype, shape, order = value
    return np.frombuffer(named[name].tobytes(), np.dtype(dtype)).reshape(shape, order=order)


def _pairs(value: Any, inner: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
    return ((inner(key), inner(one)) for key, one in value)


FACTORIES = {kind.__name__: kind for kind in (bool, int, float, str, list, dict, set, tuple)}
DECODE: dict[str, Callable[[Any, Callable[[Any], Any], dict[str, Any]], Any]] = {
    "$tensor": _tensor,
    "$ndarray": _ndarray,
    "$numpy": lambda value, _, named: np.frombuffer(bytes.fromhex(value[1]), np.dtype(value[0]))[0],
    "$numpy.str_": lambda value, inner, _: np.str_(inner(value)),
    "$numpy.bytes_": lambda value, inner, _: np.bytes_(inner(value)),
    "$str": lambda value, _, named: bytes.fromhex(value).decode("utf-8", "surrogatepass"),
    "$int": lambda value, _, named: int(value, 16),
    "$float": lambda value, _, named: float(value),
    "$complex": lambda value, inner, _: complex(*inner(value)),
    "$bytes": lambda value, _, named: base64.b64decode(value),
    "$bytearray": lambda value, _, named: bytearray(base64.b64decode(value)),
    "$tuple": lambda value, inner, _: tuple(inner(value)),
    "$set": lambda value, inner, _: set(inner(value)),
    "$frozenset": lambda value, inner, _: frozenset(inner(value)),
    "$deque": lambda value, inner, _: deque(inner(value[1]), value[0]),
    "$dict": lambda value, inner, _: dict(_pairs(value, inner)),
    "$OrderedDict": lambda value, inner, _: OrderedDict(_pairs(value, inner)),
    "$Counter": lambda value, inner, _: Counter(dict(_pairs(value, inner))),
    "$defaultdict": lambda value, inner, _: defaultdict(
        FACTORIES.get(value[0] or ""), dict(_pairs(value[1], inner))
    ),
    "$torch.Size": lambda value, _, named: tuple(value),
    "$torch.dtype": lambda value, _, named: value,
    "$torch.device": lambda value, _, named: value,
    "$Boundary": lambda value, _, named: value,
}
