"""Which operations of a training give other numbers when they are done again."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from . import replay
from .replay import Generators, Given, Kind

DIFFERED = "gave other numbers when it was done twice on the same input"
CHANGED = "torch has a deterministic algorithm for it, which is off and gives other numbers"
REFUSED = "torch has no deterministic implementation of it"

_SUREST = (DIFFERED, CHANGED, REFUSED)
_MOST_LINES = 100_000


class Operation(NamedTuple):
    """An operation that may not repeat itself, and the line of the script that it belongs to."""

    name: str
    why: str
    where: str
    times: int


class Inspection(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does the operations of this thread twice, those of backward too, and notes whose bits differ.

    The training goes on with what came the first time, and its random generators stand where they would.
    Of each kind of operation torch is asked, too, whether it repeats itself. Left alone are views, operations
    on single elements (there is no order in which to do them), and those that are not torch's own:
    what else they do is not known. What `torch.compile` has made is not looked into.

    >>> places, values = torch.tensor([0, 0]), torch.ones(2)
    >>> inspection = Inspection()
    >>> inspection.begin()
    >>> sums = torch.zeros(2).put_(places, values)
    >>> [(found.name, found.why) for found in inspection.end()]
    [('aten::put_', 'torch has no deterministic implementation of it')]
    """

    # Without this torch refuses flex_attention, torch.cond and their like in a mode.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left_alone: set[str] = set()
        """The operations that are not torch's, and those that could not be done twice."""
        self._tallies: dict[tuple[str, str], Counter[str]] = {}
        self._strictly: dict[Hashable, str] = {}
        self._lines = _Lines()
        # Torch is asked by a flag of the whole process: what another thread did meanwhile (backward has one
        # for each device) would raise there.
        self._alone = threading.RLock()
        self._process = os.getpid()
        self._is_over = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile what it would compile without this."""
        return True

    def begin(self) -> None:
        """Look at what this thread does from here on."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> list[Operation]:
        """Look no more; return what was found, the surest first, then the most frequent."""
        self._is_over = True
        # They are a stack: if somebody's was begun after this one, theirs would be taken away.
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        found = [_operation(*key, times) for key, times in self._tallies.items()]
        return sorted(found, key=lambda operation: (_SUREST.index(operation.why), -operation.times))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type[Tensor]], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = args, kwargs or {}
        # (a worker that loads is forked with this in place, and would be slow for all its life)
        if self._is_over or os.getpid() != self._process or not isinstance(func, OpOverload):
            return func(*given[0], **given[1])
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            # A tensor that is made of tensors works by operations on these, and those are seen.
            return NotImplemented
        self._lines.note()
        kind = replay.kind(func)
        if kind.is_foreign:
            self.left_alone.add(kind.name)
        if not kind.can_be_repeated or not replay.are_plain(tree_leaves(given)):
            return func(*given[0], **given[1])
        with self._alone:
            return self._do_twice(func, kind, given)

    def _do_twice(self, func: OpOverload, kind: Kind, given: Given) -> Any:
        asked = _asked(func, given)
        try:
            twins = replay.twins(given)
            for_torch = None if asked in self._strictly else replay.twins(given)
        except RuntimeError:  # there is no memory for them
            self.left_alone.add(kind.name)
            return func(*given[0], **given[1])
        generators = Generators(given) if kind.draws else None
        returned = func(*given[0], **given[1])
        results = kind.results(returned, given)
        whys = []
        with generators.again() if generators else nullcontext():
            if self._differs(func, kind, results, twins):
                whys.append(DIFFERED)
        if for_torch:
            with generators.again() if generators else nullcontext():
                self._strictly[asked] = self._ask(func, kind, results, for_torch)
        if self._strictly[asked]:
            whys.append(self._strictly[asked])
        if whys:
            self._tallies.setdefault((kind.name, self._lines.current()), Counter()).update(whys)
        return returned

    def _differs(self, func: OpOverload, kind: Kind, results: list[Tensor], twins: Given) -> bool:
        try:
            again = func(*twins[0], **twins[1])
            return not replay.are_same(results, kind.results(again, twins))
        except RuntimeError:
            self.left_alone.add(kind.name)
            return False

    def _ask(self, func: OpOverload, kind: Kind, results: list[Tensor], twins: Given) -> str:
        try:
            strict = replay.strictly(func, twins)
            return "" if replay.are_same(results, kind.results(strict, twins)) else CHANGED
        except replay.NotRepeatable:
            return REFUSED
        except RuntimeError as exc:
            # (a product of matrices is as deterministic as the rest, and was looked at)
            self.left_alone |= {kind.name} if replay.WORKSPACE not in str(exc) else set()
            return ""


def _asked(func: OpOverload, given: Given) -> Hashable:
    """Return what torch's answer depends on; not numbers: an optimizer has others at each step."""
    leaves = tree_leaves(given)
    tensors = [(one.device.type, one.dtype, one.shape) for one in leaves if isinstance(one, Tensor)]
    return func, *tensors, *(one for one in leaves if isinstance(one, (bool, str)))


def _operation(name: str, where: str, times: Counter[str]) -> Operation:
    why = next(why for why in _SUREST if times[why])
    return Operation(name, why, where, times[why])


class _Lines:
    """Which line of the script an operation belongs to; one of backward to the line of its forward."""

    def __init__(self) -> None:
        self._of_nodes: dict[int, str] = {}
        self._last = -1

    def note(self) -> None:
        """Note the line that has just made a node of the graph, if one has."""
        number = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if number == self._last or torch._C._current_autograd_node() is not None:
            return
        if len(self._of_nodes) >= _MOST_LINES:
            self._of_nodes.clear()
        self._last = number
        self._of_nodes[number - 1] = line()

    def current(self) -> str:
        """Return the line that the operation in hand belongs to."""
        node = torch._C._current_autograd_node()
        if node is None:
            return line()
        known = self._of_nodes.get(node._sequence_nr())
        return f"the backward of {known}" if known else "in backward"


def line() -> str:
    """Return the innermost line that is neither torch's, ours nor Python's own: "train.py:31"."""
    frame = sys._getframe(1)
    while not _is_of_script(frame.f_code.co_filename):
        if not frame.f_back:
            return "in backward"
        frame = frame.f_back
    return f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"


_PACKAGES = [*{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}]
_PYTHON = sysconfig.get_path("stdlib")
_PASSED = [str(Path(torch.__file__).parent), str(Path(__file__).parent.parent)]


@cache
def _is_of_script(file: str) -> bool:
    if file.startswith(("<frozen", "<eval_with_key>")) or any(_is_in(file, folder) for folder in _PASSED):
        return False
    return any(_is_in(file, folder) for folder in _PACKAGES) or not _is_in(file, _PYTHON)


def _is_in(file: str, folder: str) -> bool:
    return file.startswith(folder + os.sep)


@cache
def _shown(file: str) -> str:
    """Return a file as it would be imported, or as it was started: the shortest that says which it is."""
    roots = [root for root in (*sys.path, os.getcwd()) if root and _is_in(file, root)]
    return file[len(max(roots, key=len)) + 1 :] if roots else file
