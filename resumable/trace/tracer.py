"""The tracer: at every boundary it writes hashes that show whether two trainings do the same."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..boundary import Due
from ..errors import Once, UsageError
from ..files import codec
from ..files.strict_json import Json
from ..files.threads import no_garbage_collection
from ..parts.collect import look, without_fleeting
from ..parts.part import NAMERS, Trees
from ..parts.parts import Parts
from ..position.position import Position
from ..run import environment
from ..views.trees import leaves
from . import digest, trace_file
from .pending import Late
from .trace_file import At, Record

EVERY = 100
"""The default number of steps between two hashes of the parts."""

_TENTH = 10
"""At the end of an epoch the parts are hashed too, at most once in a tenth of that many steps."""

_LATE = 8
"""The most records that wait for a GPU: to ask it at once would stall it."""

_WHOLE = 1 << 16
"""The most elements that are hashed as a whole where each one counts, as in the state of a generator."""

_DIGEST = "#"
"""The prefix of a hash that stands for a noted value that is not a number."""


class Trace:
    """Writes a line for each boundary: hashes of batches, noted values and, at intervals, hashes of parts."""

    def __init__(self, path: Path, parts: Parts, position: Position, every: int = EVERY) -> None:
        self._lines = _Lines(path)
        self._parts = parts
        self._position = position
        self._every = every
        self._noted: dict[str, Any] = {}
        self._step_then, self._epoch_then = 0, -1
        self._seen: At | None = None
        self._has_begun = self._is_over = False
        self._once = Once()
        position.handed.watch(self.digest_of_batch)
        # A script may not call close().
        self._end = weakref.finalize(self, _end, os.getpid(), self._lines)

    def digest_of_batch(self, batch: Any) -> Any:
        """Return the hash of a batch, or a value that is pending on a GPU."""
        try:
            return digest.soon(batch, digest.MOST)
        except Exception as exc:
            # A batch can be any object, and must not end the training.
            self._warn_of_unseen("the batches", type(batch), exc)
            return digest.of(type(batch).__qualname__)

    def note(self, values: Mapping[str, Any]) -> None:
        """Write these at the next boundary: numbers as they are, other values as hashes."""
        for name, value in values.items() if not self._is_over else ():
            try:
                self._noted[name] = _noted(value)
            except Exception as exc:
                self._warn_of_unseen(f"note({name}=...)", type(value), exc)

    def saved(self, metrics: Mapping[str, float]) -> None:
        """Note the metrics of a save."""
        self.note(metrics)

    def begin(self, *, is_resumed: bool) -> None:
        """Write where the training begins."""
        self._lines.open()
        self._has_begun = True
        self._write("resumed" if is_resumed else "start", is_full=True)

    def went_back(self) -> None:
        """Write that the training was restored to an earlier boundary."""
        self._has_begun = True
        self._noted = {}
        self._position.handed.take()
        self._write("restored", is_full=False)

    def boundary(self) -> Due | None:
        """Write the boundary at which the training is; return what is due there."""
        if self._is_over:
            return None
        self._write_boundary(is_full=False)
        return None

    def _write_boundary(self, *, is_full: bool) -> At:
        if not self._has_begun:
            # A RunState that was made without load() has not announced its start.
            self._has_begun = True
            self._put_down(Record(here(self._position), "start"))
        return self._write("boundary", is_full=is_full)

    def _write(self, why: str, *, is_full: bool) -> At:
        at = here(self._position)
        batches = self._position.handed.take()
        noted, self._noted = self._noted, {}
        is_due = self._is_due(at, why)
        if is_full or (is_due and why == "boundary"):
            self._put_down(replace(self._record(at, why, batches), noted=noted))
            if is_full or at.kind == "epoch":
                self._seen = at
        else:
            self._put_down(Record(at, why, batches, noted))
        return at

    def _is_due(self, at: At, why: str) -> bool:
        if not self._every:
            return False
        if not self._position.counts_steps and at.kind != "step":
            # Without steps, count batches; anything as rare as an epoch is always due.
            return at.kind != "batch" or at.batch % self._every == 0
        # Not the remainder: a batch may have several steps. Not the steps since the last hash: a resume would
        # begin to count at another place.
        before, self._step_then = self._step_then, at.step
        is_due = at.step // self._every != before // self._every
        if why != "boundary":
            # The beginning of a resumed epoch is not known, so its end is always hashed.
            self._epoch_then = -1
        elif at.kind == "epoch":
            tenth = max(1, self._every // _TENTH)
            before, self._epoch_then = self._epoch_then, at.step
            is_due |= at.step // tenth != before // tenth
        return is_due

    def _write_end(self, at: At) -> None:
        # Even if the last batch was hashed: with another interval it was not.
        is_due = self._every and (self._seen is None or self._seen[1:] != at[1:])
        parts = self._record(at, trace_file.CLOSED, []).parts if is_due else {}
        # Random numbers drawn after the end of the training are no part of it.
        parts = {part: found for part, found in parts.items() if part != trace_file.RANDOM}
        if parts or self._noted:
            self._put_down(Record(at, trace_file.CLOSED, noted=self._noted, parts=parts))

    def _record(self, at: At, why: str, batches: list[str]) -> Record:
        begins = why not in ("boundary", trace_file.CLOSED)
        more = {"format": trace_file.FORMAT, "environment": environment.describe()} if begins else {}
        try:
            parts = self._parts_by_name() if begins else self._digests()
        except Exception as exc:
            self._warn_of_unseen("the parts", None, exc)
            parts = {}
        return Record(at, why, batches, parts=parts, more=more)

    def _warn_of_unseen(self, what: str, kind: type | None, exc: Exception) -> None:
        of_kind = f" ({kind.__module__}.{kind.__qualname__})" if kind else ""
        text = f"the trace cannot tell {what}{of_kind} apart: {type(exc).__name__}: {exc}"
        self._once.warn(text, about=what)

    @no_garbage_collection()
    @torch.inference_mode(False)
    def _digests(self) -> dict[str, Any]:
        """Return a hash of each part, and of each of the process's generators."""
        looks: dict[str, _Look] = {}
        generators: dict[str, _Look] = {}
        for stem, tree in look(self._parts).items():
            whole = digest.MOST if stem in ("model", "optimizer") else _WHOLE
            for part, values in tree.json.items():
                if part != trace_file.RANDOM:
                    looks.setdefault(part, _Look(whole)).add(without_fleeting(values), tree.tensors)
                    continue
                for name, state in values.items():
                    generators.setdefault(name, _Look(whole)).add(state, tree.tensors)
        found: dict[str, Any] = {part: look.digest() for part, look in looks.items()}
        return {**found, trace_file.RANDOM: {name: look.digest() for name, look in generators.items()}}

    @no_garbage_collection()
    @torch.inference_mode(False)
    def _parts_by_name(self) -> dict[str, Any]:
        """Return each value and a hash of each tensor: at the start, only some of them may differ."""
        trees = look(self._parts)
        found: dict[str, Any] = {}
        for part in dict.fromkeys(part for tree in trees.values() for part in tree.json):
            of_tensors = {name: digest.of(live, _WHOLE) for name, live in tensors_of(trees, part)}
            found[part] = {**plain(trees, part), **of_tensors}
        return found

    def _put_down(self, record: Record) -> None:
        if self._is_over:
            return
        try:
            self._lines.put(record)
        except OSError as exc:
            self._give_up(exc)

    def _give_up(self, exc: OSError) -> None:
        # The training does not depend on its trace.
        self._is_over = True
        self._position.handed.watch(None)
        self._noted = {}
        self._lines.drop()
        self._once.warn(
            f"{self._lines.path} cannot be written any more: {exc.strerror or exc}. The training continues, "
            "and its trace ends here."
        )

    def close(self, *, is_at_end: bool = False) -> None:
        """Write what is left, and at the end of a training hash the parts again."""
        if is_at_end and self._has_begun and not self._is_over:
            # In a body of epochs() that has looped over something else, the boundary is unknown. Suppress
            # warnings too: one that is turned into an error would leave the run locked.
            with contextlib.suppress(UsageError, Warning):
                self._write_end(here(self._position))
        try:
            self._lines.close()
        except OSError as exc:
            self._give_up(exc)
        self._end.detach()
        self._is_over = True
        self._position.handed.watch(None)


class _Look:
    """The values and tensors of one part that are hashed while the training waits."""

    def __init__(self, whole: int) -> None:
        self._whole = whole
        self._values: list[Json] = []
        self._tensors: list[torch.Tensor] = []

    def add(self, values: Json, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add a tree of the part."""
        names: list[str] = []
        self._values += [_without_tensors(values, names), names]
        self._tensors += [tensors[name] for name in names]

    def digest(self) -> str | Late:
        """Return the hash of the part, with a sample of each large tensor."""
        return digest.of_tensors(json.dumps(self._values), self._tensors, digest.MOST, self._whole)


class _Lines:
    """The file of a trace, and the records that still wait for a GPU."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None
        self._waiting: deque[Record] = deque()

    def open(self) -> int:
        """Return the descriptor of the file, opened to append lines."""
        if self._fd is None:
            self._fd = trace_file.open_to_add(self.path)
        return self._fd

    def put(self, record: Record) -> None:
        """Write a record, or the records whose values are ready."""
        if self._waiting or _late(record):
            self._waiting.append(record)
            self._put_out(_LATE)
        else:
            self._add(record)

    def _put_out(self, most: int) -> None:
        while self._waiting and (
            len(self._waiting) > most or all(late.is_there() for late in _late(self._waiting[0]))
        ):
            self._add(_there(self._waiting.popleft()))

    def _add(self, record: Record) -> None:
        rest = memoryview(f"{trace_file.to_line(record)}\n".encode())
        while rest.nbytes:
            # Unbuffered: a buffer would be lost with the process, and written twice by a forked one.
            rest = rest[os.write(self.open(), rest) :]

    def close(self) -> None:
        """Write what is left."""
        try:
            # A GPU that has failed raises its own error elsewhere.
            with contextlib.suppress(RuntimeError):
                self._put_out(0)
        finally:
            self.drop()

    def drop(self) -> None:
        """Close the file without writing what is left."""
        self._waiting.clear()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _end(process: int, lines: _Lines) -> None:
    # Not in a forked child.
    if process == os.getpid():
        with contextlib.suppress(OSError, UsageError):
            lines.close()


def _late(record: Record) -> list[Late]:
    values = (*record.batches, *record.noted.values(), *record.parts.values())
    return [value for value in values if isinstance(value, Late)]


def _there(record: Record) -> Record:
    return replace(
        record,
        batches=[_of_late(value) for value in record.batches],
        noted={name: _of_noted(value) for name, value in record.noted.items()},
        parts={name: _of_late(value) for name, value in record.parts.items()},
    )


def _of_late(value: Any) -> Any:
    return value.value() if isinstance(value, Late) else value


def _of_noted(value: Any) -> Any:
    found = _of_late(value)
    return f"{_DIGEST}{found}" if found is not value and isinstance(found, str) else found


def here(position: Position) -> At:
    """Return the boundary at which a training is."""
    at = position.counters()
    return At(at["boundary"].value, at["epoch"], at["batch"], at["step"])


def is_place(about: Json) -> bool:
    """Return whether a part is the position in the data; its other values differ between equal trainings."""
    return isinstance(about, dict) and about["kind"] == "position"


def tensors_of(trees: Trees, part: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and the tensors of a part."""
    for stem, tree in trees.items():
        prefix = "" if stem in NAMERS else f"{part}."
        for name in codec.tensor_names(without_fleeting(tree.json.get(part))):
            yield name.removeprefix(prefix), tree.tensors[name]


def plain(trees: Trees, part: str) -> dict[str, Json]:
    """Return the plain values of a part, by name."""
    return {
        name: value
        for tree in trees.values()
        if part in tree.json
        for name, value in leaves(without_fleeting(tree.json[part]))
        # Without gradients, a rank has an empty dict of its own.
        if name or value != {}
    }


def _without_tensors(tree: Json, names: list[str]) -> Json:
    """Return a tree without its tensors, and append their names to `names`."""
    if isinstance(tree, dict):
        if (about := tree.get("$tensor") or tree.get("$ndarray")) is not None:
            # Without the device: it makes no difference.
            names.append(about if isinstance(about, str) else about[0])
            return None
        return {key: _without_tensors(value, names) for key, value in tree.items()}
    return [_without_tensors(value, names) for value in tree] if isinstance(tree, list) else tree


def _noted(value: Any) -> Any:
    """Return a number or a text as it is, another value as a hash, or a pending value of a GPU."""
    if isinstance(value, torch.Tensor) and value.is_cuda and value.numel() == 1:
        return Late([value], lambda copies: _number(copies[0]))
    if isinstance(value, (torch.Tensor, np.generic, np.ndarray)):
        value = _number(value)
    if isinstance(value, (int, float, str, bool, type(None))):
        return value
    found = digest.soon(value, digest.MOST)
    return f"{_DIGEST}{found}" if isinstance(found, str) else found


def _number(value: Any) -> Any:
    is_one = (value.numel() if isinstance(value, torch.Tensor) else value.size) == 1
    found = value.item() if is_one else value
    return value if isinstance(found, complex) else found


def path_of(given: str | os.PathLike[str], rank: int | None, run: Path) -> Path:
    """Return the path of a process's trace: those of other ranks are beside rank 0's.

    If RESUMABLE_TRACE gives several runs of one process the same path, theirs are numbered.
    """
    # A script may change its working directory; its trace stays where it was.
    path = trace_file.path_of(given, rank or 0).absolute()
    runs = _runs.setdefault(path, [])
    if run not in runs:
        runs.append(run)
    number = runs.index(run) + 1
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


_runs: dict[Path, list[Path]] = {}
