"""The copies behind a fence, in pieces that the image's thread and a step that waits take in turns."""

from __future__ import annotations

import bisect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from .condition import ConditionWithoutLock
from .gpu_copies import Copy

CopyAll = Callable[[Sequence[Copy]], None]

_LONGEST = 16 << 20
_PATIENCE = 0.1
"""Seconds in which a step has mostly copied what it has in hand."""


class Pieces:
    """What is still to be copied, in the order of the files; every thread that waits for it may help.

    A step that waited for another thread alone would wait for that thread's turn on a busy core, too. There
    is no lock: the handler of a signal may interrupt a step at any line, and wait for the save.
    """

    def __init__(self, copies: Sequence[Copy], size: int, changed: ConditionWithoutLock) -> None:
        self._pieces = [*_cut(copies, size)]
        self._next = iter(range(len(self._pieces)))
        self._is_copied = bytearray(len(self._pieces))
        self._copying: dict[object, int] = {}
        """The calls that may be copying, and the thread of each."""
        self._changed = changed
        self._places: dict[str, list[tuple[int, int]]] = {}
        for number, piece in enumerate(self._pieces):
            for copy in piece:
                self._places.setdefault(copy.path, []).append((copy.begin, number + 1))

    def are_of(self, path: str) -> bool:
        """Return whether some of a file is in them."""
        return path in self._places

    def needed(self, path: str, end: int) -> int:
        """Return how many pieces have to be copied until the first `end` bytes of a file are there."""
        places = self._places.get(path, [])
        count = bisect.bisect_left(places, (end, 0))
        return places[count - 1][1] if count else 0

    def copied(self) -> int:
        """Return how many pieces are copied of which all before are copied, too."""
        first = self._is_copied.find(0)
        return len(self._is_copied) if first < 0 else first

    def help(self, copy: CopyAll) -> None:
        """Copy for a step, which would change the tensors; return when no thread copies any more."""
        self._copy(self._next, copy)
        while not self._changed.wait_for(lambda: self._is_over() and not self._copying, _PATIENCE):
            self._forget_interrupted()

    def _forget_interrupted(self) -> None:
        # A KeyboardInterrupt may end a step in the very line that notes its end.
        for call, thread in [*self._copying.items()]:
            frame = sys._current_frames().get(thread)
            while frame and frame.f_code is not Pieces._copy.__code__:
                frame = frame.f_back
            if frame is None:
                self._copying.pop(call, None)

    def finish(self, copy: CopyAll) -> None:
        """Copy until all is copied, or stopped; steps may help."""
        self._copy(self._next, copy)
        while not self._changed.wait_for(self._is_over, _PATIENCE):
            # The handler of a signal may have interrupted a step, and wait for this save. What the step
            # copies stays as it is until it has returned, so that both copy the same.
            self._copy(range(len(self._is_copied)), copy)

    def _is_over(self) -> bool:
        return not self._pieces or 0 not in self._is_copied

    def _copy(self, numbers: Iterable[int], copy: CopyAll) -> None:
        me = object()
        try:
            # Before it looks at the pieces: whoever waits for all threads looks at the pieces first.
            self._copying[me] = threading.get_ident()
            for number in numbers:
                pieces = self._pieces
                if pieces and not self._is_copied[number]:
                    copy(pieces[number])
                    self._is_copied[number] = True
                    self._changed.notify_all()
        finally:
            self._copying.pop(me, None)
            self._changed.notify_all()

    def stop(self) -> None:
        """Let no thread begin another piece; return when none copies any more.

        The main thread is not waited for if it seems to be interrupted: by a handler that waits for this.
        """
        # They kept the sources alive, too, even if the training has dropped them.
        self._pieces = []
        self._changed.notify_all()
        if not self._changed.wait_for(lambda: not self._copying, _PATIENCE):
            self._changed.wait_for(lambda: {*self._copying.values()} <= {threading.main_thread().ident})


def _cut(copies: Sequence[Copy], size: int) -> Iterator[list[Copy]]:
    """Yield the copies in pieces of about `size` bytes; a large tensor is in several of them."""
    piece: list[Copy] = []
    room = size
    for copy in copies:
        for part in _parts(copy):
            piece.append(part)
            room -= part.view.nbytes
            if room <= 0:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def _parts(copy: Copy) -> Iterator[Copy]:
    if copy.view.nbytes <= _LONGEST:
        yield copy
        return
    width = copy.view.element_size()
    view, source = copy.view.view(-1), copy.source.view(-1)
    for at in range(0, len(view), _LONGEST // width):
        end = at + _LONGEST // width
        yield Copy(copy.path, copy.name, copy.begin + at * width, view[at:end], source[at:end])
