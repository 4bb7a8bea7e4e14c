"""What an audited process does: it writes all down at every boundary, and stops where it is told to."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from . import determinism, digest, remedies, tensorfile, tracing, unregistered
from .autosave import Due
from .capture import Capture
from .errors import UsageError
from .operations import Inspection
from .position import Position
from .sealed import Json
from .threads import no_garbage_collection
from .traces import At, Record, path_of
from .tracing import EVERY, Trace, here, is_place, plain, tensors_of

VARIABLE = "RESUMABLE_AUDIT"
"""The environment variable that has the plan of an audited process, as JSON."""

_LOADER = ("batch", "is_over", "generators")
"""What of a loader's place is the same in a training that was never stopped."""


def begin(
    capture: Capture,
    position: Position,
    rank: int | None,
    trace: str | os.PathLike[str] | None,
    every: int,
    *,
    run: Path,
) -> Trace | None:
    """Return what writes down this process's boundaries, if anybody wants that."""
    if plan := os.environ.get(VARIABLE):
        if _left:
            # What catches SystemExit, and begins again in the same process, must not train beyond the stop.
            os._exit(128 + signal.SIGTERM)
        return Audit(_read(plan), capture, position, rank or 0)
    trace = os.environ.get("RESUMABLE_TRACE", trace) or None
    return Trace(tracing.path_of(trace, rank, run), capture, position, every) if trace else None


def _read(plan: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(plan)
        return {"trace": found["trace"], "steps": found["steps"], **found}
    except (ValueError, TypeError, KeyError) as exc:
        raise UsageError(
            f"the environment variable {VARIABLE} is {plan!r:.80}, which is no plan of an audit.",
            fix=f"unset {VARIABLE}: `resumable audit -- COMMAND` sets it by itself.",
        ) from exc


_left: list[At] = []
"""Where this process was stopped."""


class Audit(Trace):
    """A line for each boundary with all that a resume has to bring back, and all that no part holds."""

    def __init__(self, plan: dict[str, Any], capture: Capture, position: Position, rank: int) -> None:
        path = path_of(plan["trace"], rank)
        super().__init__(path, capture, position, EVERY)
        self._samples = path.with_suffix(".samples")
        self._stop: list[Json] | None = plan.get("stop")
        self._most: int = plan["steps"]
        self._count, self._is_between_epochs = 0, True
        self._inspection = Inspection() if plan.get("inspects") else None
        if plan.get("deterministic"):
            determinism.make_deterministic()
        if plan.get("benchmark") is False:
            torch.backends.cudnn.benchmark = False
        self._limit: float | None = plan.get("limit")
        if self._limit:
            # (it prints where all threads stand, and exits with 1)
            faulthandler.dump_traceback_later(self._limit, exit=True, file=2)

    def digest_of_batch(self, batch: Any) -> str:
        """Return the digest of all its bits."""
        return digest.of(batch)

    def begin(self, *, is_resumed: bool) -> None:
        """Write down where the training begins, and again when its first body does."""
        super().begin(is_resumed=is_resumed)
        self._position.body_begins = self._body_begins
        if self._inspection:
            self._inspection.begin()

    def _body_begins(self) -> None:
        handed = self._position.handed
        self._write("first", is_full=True)
        self._position.handed = handed

    def boundary(self) -> Due | None:
        """Write the boundary down, and leave where the plan says so."""
        at = here(self._position)
        self._write("boundary", is_full=True)
        if at.kind == "epoch":
            # What an epoch's first lines change shows before its first batch does.
            self._position.body_begins = self._body_begins
        # (an epoch of which no batch was counted counts itself: its loop is the script's own)
        self._count += at.kind != "epoch" or self._is_between_epochs
        self._is_between_epochs = at.kind == "epoch"
        is_last = self._count >= self._most if self._stop is None else [*at] == self._stop
        _left.append(at) if is_last else None
        return Due("audit", signal.SIGTERM) if is_last else None

    def close(self) -> None:
        """Write down which operations were not deterministic."""
        if self._inspection:
            found = [operation._asdict() for operation in self._inspection.end()]
            self._put_down(Record(here(self._position), "end", more={"operations": found}))
            self._inspection = None
        if self._limit:
            faulthandler.cancel_dump_traceback_later()
        super().close()

    @no_garbage_collection()
    @torch.inference_mode(False)
    def _record(self, at: Any, why: str, batches: list[str], is_full: bool) -> Record:
        kinds = self._capture.kinds()
        with open(self._samples, "ab") as file:
            parts = whole(self._capture, file)
        seen = unregistered.survey(self._capture, sys._getframe())
        told = {n: {**one._asdict(), "fix": remedies.sentence(one.fix)} for n, one in seen.items()}
        more: dict[str, Any] = {"unregistered": told, "settings": determinism.settings()}
        if why != "boundary":
            more["kinds"] = kinds
        return Record(at, why, batches, parts=parts, more=more)


def whole(capture: Capture, samples: IO[bytes]) -> dict[str, Json]:
    """Return all values of all parts by their names; samples of the tensors go into the file."""
    trees, about = capture.collect()
    parts: dict[str, Json] = {}
    for part in about:
        found = {**plain(trees, part), **_tensors(tensors_of(trees, part), samples)}
        parts[part] = _of_place(found) if is_place(about[part]) else found
    return parts


def _of_place(found: dict[str, Json]) -> dict[str, Json]:
    kept = ("epoch", "batch", "step", "samples", "metrics", *_LOADER)
    return {name: value for name, value in found.items() if name.partition(".")[0] in kept}


def _tensors(found: Iterator[tuple[str, torch.Tensor]], file: IO[bytes]) -> dict[str, Json]:
    """Return what tells each tensor apart, and where a sample of it lies, for how far it is from another."""
    told: dict[str, Json] = {}
    for name, tensor in found:
        live = tensor.detach().cpu()
        part = tensorfile.as_bytes(digest.sample(live, digest.MOST))
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
