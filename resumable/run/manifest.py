"""The manifest of a checkpoint, to and from JSON, with a version check."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..boundary import Boundary
from ..errors import FormatTooNew
from ..files import strict_json
from ..files.strict_json import Json, check_types, typed

FORMAT = 1
"""The version of the on-disk format in which this library writes what is not sharded."""

NEWEST = 2
"""The newest version that it reads; sharded checkpoints have it."""

NAME = "manifest.json"
"""The name of the manifest, which is written last: a checkpoint without it is damaged."""

FILE_NAME = re.compile(
    r"(?:[a-z]{1,32}(?:-frozen)?|ranks/[0-9]{5})\.(?:json|safetensors)"
    r"|state-[0-9]{5}\.json"
    r"|(?:model|optimizer|extra)/shard-[0-9]{5}-model-0000(?:1-of-0000[12]|2-of-00002)\.safetensors"
)
"""The only names that files of a checkpoint can have; none leads out of its folder."""


class FileRecord(NamedTuple):
    """The size and the hash of a file as it was written."""

    size: int
    xxh3_128: str
    blocks: tuple[str, ...] = ()
    """The hashes of its blocks, for a file that may be read in part."""


class Goal(NamedTuple):
    """The metric that decides what is best, and its direction."""

    metric: str
    maximize: bool

    def __str__(self) -> str:
        return f"{'maximize' if self.maximize else 'minimize'}={self.metric!r}"


NO_CHECKPOINT = 0
"""The number of the best if the value is that of a training that began without this library."""


class Best(NamedTuple):
    """The best value so far and the save number that has it."""

    goal: Goal
    value: float
    number: int
    since: int = 0
    """How many saves with that metric have followed without being better."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The facts about one checkpoint. `parent` is the checkpoint before it in the training."""

    number: int
    parent: int | None
    run_id: str
    saved: str
    boundary: Boundary
    epoch: int
    batch: int
    step: int
    samples: int
    metrics: Mapping[str, float]
    best: Best | None
    files: Mapping[str, FileRecord]
    parts: Mapping[str, Json]
    built: Json
    environment: Mapping[str, Json]
    world_size: int = 1
    data_ranks: tuple[int, ...] = ()
    """The share of the data of each process; empty if each has its own."""
    elsewhere: Mapping[str, FileRecord] = field(default_factory=dict)
    """The files that lie on other disks, if this one has only a part of the checkpoint."""
    is_first_part: bool = True
    """Whether the files that all parts have count as those of this one."""

    def whole(self) -> Manifest:
        """Return the manifest that it has where all files are together."""
        return replace(self, files={**self.files, **self.elsewhere}, elsewhere={}, is_first_part=True)

    def rank_for(self, rank: int, count: int, data_rank: int) -> int | None:
        """Return the rank whose own state one of `count` processes takes over; None if there is none.

        On another mesh that is a rank with the same share of the data, `data_rank`.
        """
        if not self.data_ranks:
            return data_rank if data_rank < self.world_size else None
        if count == self.world_size and self.data_ranks[rank] == data_rank:
            return rank
        return self.data_ranks.index(data_rank) if data_rank in self.data_ranks else None

    @property
    def data_size(self) -> int:
        """The number of shares into which the data was dealt out."""
        return max(self.data_ranks, default=self.world_size - 1) + 1

    @property
    def size(self) -> int:
        """The bytes of all files together."""
        return sum([file.size for file in self.files.values()])


def to_json(about: Manifest) -> bytes:
    """Return the text of a manifest."""
    body = {
        "number": about.number,
        "parent": about.parent,
        "run_id": about.run_id,
        "saved": about.saved,
        "boundary": about.boundary.value,
        "epoch": about.epoch,
        "batch": about.batch,
        "step": about.step,
        "samples": about.samples,
        "metrics": {name: _number_out(value) for name, value in about.metrics.items()},
        "best": about.best and _best_out(about.best),
        "world_size": about.world_size,
        **({"data_ranks": [*about.data_ranks]} if about.data_ranks else {}),
        "files": {name: _file_out(file) for name, file in about.files.items()},
        **(_elsewhere_out(about) if about.elsewhere else {}),
        "parts": dict(about.parts),
        "built": about.built,
        "environment": dict(about.environment),
    }
    is_sharded = any(file.blocks for file in (*about.files.values(), *about.elsewhere.values()))
    return seal(body, NEWEST if is_sharded else None)


def from_json(data: bytes) -> Manifest:
    """Parse a manifest; ValueError says what is wrong with it."""
    body = unseal(data)
    ranks = typed(list, body.pop("data_ranks", []))
    elsewhere = typed(dict, body.pop("elsewhere", {}))
    is_first_part = typed(bool, body.pop("is_first_part", True))
    missing, unknown = _KEYS - body.keys(), body.keys() - _KEYS
    if missing or unknown:
        raise ValueError(f"it lacks {sorted(missing)} and has {sorted(unknown)} beyond the format")
    check_types(body, _KINDS)
    if ranks and len(ranks) != body["world_size"]:
        raise ValueError(f"it has {len(ranks)} data ranks of {body['world_size']!r:.50} processes")
    check_types(body["parts"], dict.fromkeys(body["parts"], dict))
    if twice := elsewhere.keys() & body["files"].keys():
        raise ValueError(f"it says of {min(twice)!r:.100} that it is here and elsewhere")
    parent, best = body["parent"], body["best"]
    return Manifest(
        number=_whole(body["number"]),
        parent=None if parent is None else _whole(parent),
        run_id=body["run_id"],
        saved=body["saved"],
        boundary=Boundary(body["boundary"]),
        epoch=_whole(body["epoch"]),
        batch=_whole(body["batch"]),
        step=_whole(body["step"]),
        samples=_whole(body["samples"]),
        metrics={k: _number_in(v) for k, v in body["metrics"].items()},
        best=None if best is None else _best_in(best),
        world_size=_whole(body["world_size"]),
        data_ranks=tuple(map(_whole, ranks)),
        files={k: _file_in(k, v) for k, v in body["files"].items()},
        parts=body["parts"],
        built=body["built"],
        environment=body["environment"],
        elsewhere={k: _file_in(k, v) for k, v in elsewhere.items()},
        is_first_part=is_first_part,
    )


def seal(body: Mapping[str, Json], version: int | None = None) -> bytes:
    """Return the text of one of our JSON files, with a checksum and the version of the format."""
    return strict_json.seal({"format": version or FORMAT, **body})


def unseal(data: bytes) -> dict[str, Json]:
    """Return what `seal` was given, if this version of the library can read it."""
    body = strict_json.unseal(data)
    if (found := _whole(body.pop("format", None))) > NEWEST:
        raise FormatTooNew(
            f"it was written in format {found}; this version of resumable reads up to {NEWEST}.",
            fix="upgrade resumable, in the way that you installed it.",
        )
    if not found:
        raise ValueError("there is no format 0")
    return body


def _whole(value: Json) -> int:
    # A number of 400 digits does not fit a float, and sizes are shown as floats.
    if type(value) is int and 0 <= value < 1 << 128:
        return value
    raise ValueError(f"{typed(int, value)!s:.50} stands where a count belongs")


def _number_out(value: float) -> Json:
    return float(value) if math.isfinite(value) else repr(float(value))


def _number_in(value: Json) -> float:
    if value in ("nan", "inf", "-inf"):
        return float(value)
    return typed(float, value)


def _best_out(best: Best) -> Json:
    return {
        "metric": best.goal.metric,
        "maximize": best.goal.maximize,
        "value": float(best.value),
        "number": best.number,
        "since": best.since,
    }


def _best_in(value: Json) -> Best:
    found = typed(dict, value)
    if found.keys() != {"metric", "maximize", "value", "number", "since"}:
        raise ValueError(f"{value!r} does not say what is best")
    check_types(found, {"metric": str, "maximize": bool, "value": float})
    goal = Goal(found["metric"], found["maximize"])
    return Best(goal, found["value"], _whole(found["number"]), _whole(found["since"]))


def _elsewhere_out(about: Manifest) -> dict[str, Json]:
    files = {name: _file_out(file) for name, file in about.elsewhere.items()}
    return {"elsewhere": files, "is_first_part": about.is_first_part}


def _file_out(file: FileRecord) -> Json:
    found: dict[str, Json] = {"size": file.size, "xxh3_128": file.xxh3_128}
    return {**found, "blocks": [*file.blocks]} if file.blocks else found


def _file_in(name: str, value: Json) -> FileRecord:
    if not FILE_NAME.fullmatch(name) or name == NAME:
        raise ValueError(f"{name!r} cannot be the name of a file in a checkpoint")
    is_record = type(value) is dict and value.keys() - {"blocks"} == {"size", "xxh3_128"}
    blocks = value.get("blocks", []) if is_record else []
    is_text = type(blocks) is list and all(type(one) is str for one in blocks)
    if not is_record or type(value["xxh3_128"]) is not str or not is_text:
        raise ValueError(f"{value!r:.200} does not describe a file")
    return FileRecord(_whole(value["size"]), value["xxh3_128"], tuple(blocks))


_KINDS = {
    "run_id": str,
    "saved": str,
    **dict.fromkeys(("metrics", "files", "parts", "built", "environment"), dict),
}
_KEYS = {
    *("number", "parent", "run_id", "saved", "boundary", "epoch", "batch", "step", "samples"),
    *("metrics", "best", "world_size", "files", "parts", "built", "environment"),
}
