"""Records a training at every boundary, and stops it where the plan of an audit says so."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
from collections.abc import Iterator, Mapping
from typing import IO, Any

import torch

from .. import determinism
from ..boundary import Due
from ..errors import UsageError
from ..files import tensor_file
from ..files.strict_json import Json
from ..files.threads import no_garbage_collection
from ..parts.collect import collect
from ..parts.parts import Parts
from ..position.position import Position
from ..session.observer import AUDIT, sentence
from ..trace import digest
from ..trace.trace_file import At, Record, path_of
from ..trace.tracer import EVERY, Trace, here, is_place, plain, tensors_of
from . import fixes, operations, survey

_LOADER = ("batch", "is_over", "generators")
"""The entries of a loader's position that are equal in a training that was never stopped."""


def _read(plan: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(plan)
        return {"trace": found["trace"], "left": found["left"], "steps": found["steps"], **found}
    except (ValueError, TypeError, KeyError) as exc:
        raise UsageError(
            f"the environment variable {AUDIT} is {plan!r:.80}, which is no plan of an audit.",
            fix=f"unset {AUDIT}: `resumable audit -- COMMAND` sets it by itself.",
        ) from exc


def _follow(run_dir: str | os.PathLike[str]) -> None:
    # Two runs would share one directory, and their boundaries could not be told apart.
    _followed.setdefault(os.path.abspath(run_dir))
    if len(_followed) > 1:
        first, second = map(os.path.relpath, _followed)
        raise UsageError(
            f"an audit follows one run, and the script has begun {first} and now {second}.",
            fix="audit each by itself, with a script or an argument that trains only one of them.",
        )


_followed: dict[str, None] = {}
"""The run directories that the script has given."""


class Audit(Trace):
    """Records, at each boundary, all that a resume has to restore and all that no part holds."""

    @classmethod
    def follow(
        cls, plan: str, parts: Parts, position: Position, rank: int, run_dir: str | os.PathLike[str]
    ) -> Audit:
        """Return an audit that follows a plan; `run_dir` is the run directory in the script's arguments."""
        read = _read(plan)
        if path_of(read["left"], rank).exists():
            # A script that catches SystemExit, or a launcher that replaces a process that has left, must not
            # train beyond the stop.
            os._exit(128 + signal.SIGTERM)
        _follow(run_dir)
        return cls(read, parts, position, rank)

    def __init__(self, plan: dict[str, Any], parts: Parts, position: Position, rank: int) -> None:
        path = path_of(plan["trace"], rank)
        super().__init__(path, parts, position, EVERY)
        self._samples = path.with_suffix(".samples")
        self._left = path_of(plan["left"], rank)
        self._leaves: float | None = plan.get("leaves")
        self._stop: list[Json] | None = plan.get("stop")
        self._most: int = plan["steps"]
        self._count, self._ends, self._is_between_epochs = 0, 0, True
        self._unseen = ""
        self._operations = operations.watch() if plan.get("inspects") else None
        if plan.get("deterministic"):
            determinism.make_deterministic()
        self._limit: float | None = plan.get("limit")
        _end_after(self._limit)

    def digest_of_batch(self, batch: Any) -> Any:
        """Return the digest of all its bits; for an object that has none, what a trace records."""
        try:
            return digest.of(batch)
        except Exception as exc:
            # A batch can be any object. The verdict mentions that it was not compared completely.
            kind = type(batch)
            self._unseen = f"{kind.__module__}.{kind.__qualname__}: {type(exc).__name__}: {exc}"
            return super().digest_of_batch(batch)

    def begin(self, *, is_resumed: bool) -> None:
        """Record where the training begins, and where its first body begins."""
        super().begin(is_resumed=is_resumed)
        self._position.handed.call_at_body(self._body_begins)

    def _body_begins(self) -> None:
        handed = self._position.handed.peek()
        self._write("first", is_full=True)
        self._position.handed.repeat(handed)

    def boundary(self) -> Due | None:
        """Record the boundary, and leave where the plan says so."""
        at = self._write_boundary(is_full=True)
        if at.kind == "epoch":
            # Changes of an epoch's first lines are recorded before its first batch.
            self._position.handed.call_at_body(self._body_begins)
        # An epoch without a counted batch counts once: its inner loop is the script's own.
        self._count += at.kind != "epoch" or self._is_between_epochs
        self._is_between_epochs = at.kind == "epoch"
        self._ends += at.kind == "epoch"
        if not (self._is_enough(at) if self._stop is None else [*at] == self._stop):
            return None
        self._left.touch()
        _end_after(self._leaves)
        return Due("audit", signal.SIGTERM)

    def _is_enough(self, at: At) -> bool:
        """Whether a training has run long enough; it should include two ends of epochs if they are near."""
        if self._count < self._most:
            return False
        most = 3 if self._ends else 1.5
        is_in_epoch = at.kind == "batch" or (at.kind == "epoch" and self._ends < _ENDS)
        return not is_in_epoch or self._count >= most * self._most

    def saved(self, metrics: Mapping[str, float]) -> None:
        """Ignore the metrics: the position has them."""

    def close(self, *, is_at_end: bool = False) -> None:
        """Record which operations were not deterministic."""
        if self._operations is not None:
            found, self._operations = [*self._operations], None
            self._put_down(Record(here(self._position), "end", more={"operations": found}))
        if not self._left.exists():
            # A process that has left should end now.
            faulthandler.cancel_dump_traceback_later()
        super().close()

    @no_garbage_collection()
    @torch.inference_mode(False)
    def _record(self, at: Any, why: str, batches: list[str]) -> Record:
        kinds = self._parts.kinds()
        with open(self._samples, "ab") as file:
            parts = whole(self._parts, file)
        seen = survey.take(self._parts)
        told = {n: {**one._asdict(), "fix": sentence(one.fix)} for n, one in seen.items()}
        more: dict[str, Any] = {"unregistered": told, "settings": determinism.settings()}
        if why == "boundary" and (lost := survey.unstorable(self._parts)):
            more["unstorable"] = [[name, cause, fixes.of_lost(cause)] for name, cause in dict(lost).items()]
        if self._unseen:
            more["unseen"] = self._unseen
        if why != "boundary":
            more["kinds"] = kinds
        return Record(at, why, batches, parts=parts, more=more)


_ENDS = 2
"""How many ends of epochs a run should include, unless that takes too long."""


def _end_after(seconds: float | None) -> None:
    if seconds:
        # This prints the stacks of all threads, and exits with 1.
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def whole(parts: Parts, samples: IO[bytes]) -> dict[str, Json]:
    """Return all values of all parts by name; write samples of the tensors to the file."""
    trees, about = collect(parts)
    values: dict[str, Json] = {}
    # What is stored of the script's variables depends on the place; the survey compares their values.
    for part in (one for one in about if about[one]["kind"] != "script"):
        found = {**plain(trees, part), **_tensors(tensors_of(trees, part), samples)}
        values[part] = _of_place(found) if is_place(about[part]) else found
    return values


def _of_place(found: dict[str, Json]) -> dict[str, Json]:
    kept = ("epoch", "batch", "step", "samples", "metrics", *_LOADER)
    return {name: value for name, value in found.items() if name.partition(".")[0] in kept}


def _tensors(found: Iterator[tuple[str, torch.Tensor]], file: IO[bytes]) -> dict[str, Json]:
    """Return the digest of each tensor, and where its sample lies, which shows how far it is from another."""
    told: dict[str, Json] = {}
    for name, tensor in found:
        live = tensor.detach().cpu()
        part = tensor_file.as_bytes(digest.sample(live, digest.MOST))
        begin = file.tell()
        file.write(part)
        told[name] = {
            "digest": digest.of(live),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": [*tensor.shape],
            # Kernels may add in another order on another layout.
            **({} if tensor.is_contiguous() else {"layout": [*tensor.stride()]}),
            "sample": [begin, begin + len(part)],
        }
    return told
