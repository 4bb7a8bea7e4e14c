"""Finds sums in the script's own variables, which a resume in mid-epoch begins from 0 again."""

from __future__ import annotations

import dis
import math
from types import CodeType, FrameType
from typing import Any

import torch

from . import script_frames
from .loops import variables_of

_NUMBERS = (int, float)


class RunningSums:
    """The variables that were 0 or empty where a resumed loop over batches began, and that it changes."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        """Those that have only the rest of the epoch in them."""
        self.is_looking = False
        """Whether the next batch that is asked for shows which variables the loop changes."""
        self._is_due = False
        self._code: CodeType | None = None
        self._names: list[str] = []

    def resumed(self) -> None:
        """Note that an epoch is resumed in the middle."""
        self.lost, self.is_looking, self._is_due = [], False, True

    def forget(self) -> None:
        """Note that another epoch begins."""
        self.lost, self.is_looking, self._is_due = [], False, False

    def begin(self, asked_by: FrameType, *, is_over: bool) -> None:
        """Look at the script as it asks for the first batch; `is_over`: there is none left."""
        if not self._is_due:
            return
        self._is_due = False
        frame = _of_script(asked_by)
        if _is_comprehension(frame):
            self.lost = ["the comprehension over the batches"]
            return
        assigned, read = _summed_up_in(frame)
        zero = {name: value for name, value in variables_of(frame).items() if _is_zero(value)}
        self._names = sorted(
            name for name, value in zero.items() if name in (assigned if type(value) in _NUMBERS else read)
        )
        self._code, self.is_looking = frame.f_code, not is_over
        if is_over:
            self.lost = [*map(repr, self._names)]

    def end(self) -> None:
        """Note that the loop has ended: where it had no batch left, it has changed nothing."""
        if self.is_looking:
            self.is_looking, self.lost = False, [*map(repr, self._names)]

    def go_on(self, asked_by: FrameType) -> None:
        """Look at the script again as it asks for the second batch."""
        self.is_looking = False
        frame = _of_script(asked_by)
        if frame.f_code is self._code:
            now = variables_of(frame)
            values = {name: now.get(name, 0) for name in self._names}
            self.lost = [repr(n) for n, value in values.items() if not _is_zero(value) and not _is_one(value)]


def _of_script(frame: FrameType) -> FrameType:
    """Return the frame of the script that asks, beneath those of tqdm and the like."""
    return next(script_frames.of_script(frame), frame)


def _is_comprehension(frame: FrameType) -> bool:
    """Whether the batches are looped over in a list comprehension or a generator expression."""
    if frame.f_code.co_name in ("<genexpr>", "<listcomp>"):
        return True
    # From Python 3.12 a list comprehension has no frame of its own.
    for one in dis.get_instructions(frame.f_code):
        if one.offset > frame.f_lasti and one.opname == "LIST_APPEND":
            return True
        if one.offset > frame.f_lasti and one.opname.startswith("JUMP_BACKWARD"):
            return False
    return False


def _summed_up_in(frame: FrameType) -> tuple[set[str], set[str]]:
    """Return the variables that the body of the loop assigns, and those that it reads."""
    code = [*dis.get_instructions(frame.f_code)]
    ends = [one.argval for one in code if one.offset == frame.f_lasti and one.opname == "FOR_ITER"]
    body = [one for one in code if frame.f_lasti < one.offset < (ends or [math.inf])[0]]
    return _names(body, "STORE_"), _names(body, "LOAD_")


def _names(code: list[dis.Instruction], kind: str) -> set[str]:
    found: set[str] = set()
    for one in code:
        if kind in one.opname:
            found.update(one.argval if isinstance(one.argval, tuple) else (str(one.argval),))
    return found


def _is_zero(value: Any) -> bool:
    if type(value) is torch.Tensor:
        return value.numel() == 1 and not value.requires_grad and not value.is_meta and not value.any()
    return type(value) in (*_NUMBERS, list) and not value


def _is_one(value: Any) -> bool:
    """Whether it counts the batches, which is mostly for what is printed."""
    return type(value) is int and value == 1
