"""What a training has logged, in a file of its run: a block of rows for each save."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import warn
from ..files import jsonl

Row = tuple[int, dict[str, float]]
"""A step, and the values that were logged under it."""


class _Block(NamedTuple):
    """What is kept in memory of a block: all but its rows."""

    after: int
    step: int
    run: str | None


class Curves:
    """The rows that were logged up to where the training stands.

    A block never changes. After the training has gone back, the next block follows the one of the
    checkpoint, so that each checkpoint leads to its own rows, and a resume from any of them finds them.
    It never stops a training: if the file cannot be written, it warns once and retries at each save.
    """

    def __init__(self, path: Path, end: int) -> None:
        self._path = path
        self.end = end
        """The number of the last block; 0 before the first one."""
        self._blocks = {int(block["block"]): _header(block) for block in self._stored()}
        self._new: list[Row] = []
        self._unwritten: list[dict[str, Any]] = []
        """The blocks that could not be written."""
        self._has_warned = False

    @property
    def is_lost(self) -> bool:
        """Whether the last block is missing, as on another machine, where the run has come from a remote."""
        return self.end not in (0, *self._blocks)

    def begin(self, step: int) -> int:
        """Begin to log here; return the first step at which the last process may have logged other values."""
        if self.is_lost:
            return step + 1
        newest = max(self._blocks, default=0)
        here, last = ({*self._back(end)} for end in (self.end, newest))
        first = min([step, *(self._blocks[number].step for number in here ^ last)])
        if self.end != newest:
            # A kill may come before the first save of this branch: the next start has to know of it.
            self.branch(first)
        return first

    @property
    def run(self) -> str | None:
        """The id of the run of the tracker that has these rows."""
        # A kill before the first save leaves no checkpoint that leads to it.
        numbers = chain(self._back(self.end), self._blocks)
        return next((run for number in numbers if (run := self._blocks[number].run)), None)

    def rows(self) -> list[Row]:
        """Return all rows, oldest first."""
        return [*self._rows_in({*self._back(self.end)}), *self._new]

    def all_of(self, run: str, unnamed: str) -> Iterator[Row]:
        """Yield the rows of all branches in a run of the tracker; `unnamed`: the run that no block names."""
        runs: dict[int, str] = {}
        for number, block in self._blocks.items():
            runs[number] = block.run or runs.get(block.after, unnamed)
        return self._rows_in({number for number, found in runs.items() if found == run})

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
        elif self._unwritten:
            self._append()
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
        self._blocks[number], self.end = _header(block), number
        self._unwritten.append(block)
        self._append()

    def _append(self) -> None:
        try:
            jsonl.append(self._path, self._unwritten)
        except OSError as exc:
            if not self._has_warned:
                self._has_warned = True
                warn(
                    f"{self._path} cannot be written, and each save tries it again: {exc}. The training goes "
                    "on; a resume will not log again what was logged since."
                )
        else:
            self._unwritten = []

    def _stored(self) -> Iterator[Mapping[str, Any]]:
        try:
            yield from jsonl.each(self._path)
        except OSError as exc:
            warn(f"{self._path} cannot be read, so what it has is not logged again: {exc}.")

    def _rows_in(self, numbers: Collection[int]) -> Iterator[Row]:
        for block in chain(self._stored(), self._unwritten):
            if block["block"] in numbers:
                # NaN and infinities are text in the file.
                for step, row in block["rows"]:
                    yield step, {name: float(value) for name, value in row.items()}

    def _back(self, end: int) -> Iterator[int]:
        """Yield the numbers of the blocks that lead to one, newest first."""
        while end in self._blocks:
            yield end
            end = self._blocks[end].after


def _header(block: Mapping[str, Any]) -> _Block:
    return _Block(block["after"], block["step"], block["run"])
