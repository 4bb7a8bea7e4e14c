"""What a training has logged, in a file of its run: a block of rows for each save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..files import jsonl

Row = tuple[int, dict[str, float]]
"""A step, and the values that were logged under it."""


class Curves:
    """The rows that were logged up to where the training stands.

    A block never changes. After the training has gone back, the next block follows the one of the
    checkpoint, so that each checkpoint leads to its own rows, and a resume from any of them finds them.
    """

    def __init__(self, path: Path, end: int) -> None:
        self._path = path
        self.end = end
        """The number of the last block; 0 before the first one."""
        self._blocks = {int(block["block"]): block for block in map(_read, jsonl.read(path))}
        self._new: list[Row] = []

    @property
    def is_lost(self) -> bool:
        """Whether the last block is missing, as on another machine, where the run has come from a remote."""
        return self.end not in (0, *self._blocks)

    def begin(self, step: int) -> int:
        """Begin to log here; return the first step at which the last process may have logged other values."""
        if self.is_lost:
            return step + 1
        newest = max(self._blocks, default=0)
        here, last = ({one["block"] for one in self._back(end)} for end in (self.end, newest))
        first: int = min([step, *(self._blocks[number]["step"] for number in here ^ last)])
        if self.end != newest:
            # A kill may come before the first save of this branch: the next start has to know of it.
            self.branch(first)
        return first

    @property
    def run(self) -> str | None:
        """The id of the run of the tracker that has these rows."""
        named = (block["run"] for block in self._back() if block["run"])
        # A kill before the first save leaves no checkpoint that leads to it.
        return next(named, None) or next((one["run"] for one in self._blocks.values() if one["run"]), None)

    def rows(self) -> list[Row]:
        """Return all rows, oldest first."""
        blocks = reversed([*self._back()])
        return [*((step, values) for block in blocks for step, values in block["rows"]), *self._new]

    def all_of(self, run: str, first: str) -> Iterator[Row]:
        """Yield the rows of all branches in a run of the tracker; `first`: the one that no block names."""
        for number in self._blocks:
            if next((one["run"] for one in self._back(number) if one["run"]), first) == run:
                yield from self._blocks[number]["rows"]

    def next_number(self) -> int:
        """Return the number of the next block."""
        return max((self.end, *self._blocks)) + 1

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row, which the next block will have."""
        self._new.append((step, dict(values)))

    def write(self) -> int:
        """Write the new rows, durably; return the number of the last block."""
        if self._new:
            self._put(self._new[0][0], None)
        return self.end

    def branch(self, step: int, run: str | None = None) -> None:
        """Begin a branch at this step; `run` is the tracker's run that has it, if it is another one."""
        self._put(min([step, *(at for at, _ in self._new)]), run)

    def go_to(self, end: int) -> None:
        """Stand at the end of a block; the rows after it stay in the file, for their own branch."""
        self.write()
        self.end = end

    def _put(self, step: int, run: str | None) -> None:
        number, rows, self._new = self.next_number(), self._new, []
        block = {"block": number, "after": self.end, "step": step, "run": run, "rows": rows}
        jsonl.append(self._path, [block])
        self._blocks[number], self.end = block, number

    def _back(self, end: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield the blocks that lead here, newest first."""
        at = self.end if end is None else end
        while found := self._blocks.get(at):
            yield found
            at = found["after"]


def _read(block: Mapping[str, Any]) -> dict[str, Any]:
    # NaN and infinities are text in the file.
    rows = [(step, {name: float(value) for name, value in row.items()}) for step, row in block["rows"]]
    return {**block, "rows": rows}
