"""The copies behind a fence, in pieces that the image's thread and a step that waits take in turns."""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from .gpu_copies import Copy

_LONGEST = 16 << 20
_PATIENCE = 0.1
"""Seconds in which a step has mostly copied what it has in hand."""


class Pieces:
    """What is still to be copied, in the order of the files; every thread that waits for it may help.

    A step that waited for another thread alone would wait for that thread's turn on a busy core, too.
    """

    def __init__(self, copies: Sequence[Copy], size: int, changed: threading.Condition) -> None:
        self._pieces = [*_cut(copies, size)]
        self._left = deque(range(len(self._pieces)))
        self._in_hand: dict[int, int] = {}
        """By thread: the piece that it copies, unless another has taken it over."""
        self._copying: set[int] = set()
        """The threads that are copying."""
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
        return min((*self._left, *self._in_hand.values()), default=len(self._pieces))

    def help(self, copy: Callable[[Sequence[Copy]], None]) -> None:
        """Copy for a step, which would change the tensors; return when no thread copies any more."""
        is_done = False
        while not is_done:
            while self._copy_next(copy):
                pass
            with self._changed:
                # One that fails in another thread comes back.
                self._changed.wait_for(lambda: self._left or not self._copying)
                is_done = not self._left

    def finish(self, copy: Callable[[Sequence[Copy]], None]) -> None:
        """Copy until all is copied, or stopped; steps may help."""
        is_done = False
        while not is_done:
            while self._copy_next(copy):
                pass
            with self._changed:
                if not self._changed.wait_for(lambda: self._left or not self._in_hand, _PATIENCE):
                    # The handler of a signal may have interrupted a step, and wait for this save. What the
                    # step has in hand stays as it is until it has returned.
                    self._left.extend(sorted(self._in_hand.values()))
                    self._in_hand.clear()
                is_done = not self._left

    def _copy_next(self, copy: Callable[[Sequence[Copy]], None]) -> bool:
        me = threading.get_ident()
        try:
            with self._changed:
                if not self._left:
                    return False
                # In this order: an interrupt may come in between, and must lose no piece.
                self._in_hand[me] = self._left[0]
                self._copying.add(me)
                piece = self._pieces[self._left.popleft()]
            copy(piece)
            with self._changed:
                self._in_hand.pop(me, None)
                self._copying.discard(me)
                self._changed.notify_all()
        except BaseException:
            self._give_back(me)
            raise
        return True

    def _give_back(self, thread: int) -> None:
        with self._changed:
            number = self._in_hand.pop(thread, None)
            self._copying.discard(thread)
            if number is not None and number not in self._left:
                self._left.appendleft(number)
            self._changed.notify_all()

    def stop(self) -> None:
        """Let no thread begin another piece; return when none copies any more."""
        with self._changed:
            self._left.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._in_hand)
            self._left.clear()
            # They kept the sources alive, even if the training has dropped them.
            self._pieces = []


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
