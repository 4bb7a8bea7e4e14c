"""The variables of a training's script: `head` at a loop's head, `look` at a save, `load` at a resume."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FrameType, GeneratorType, MappingProxyType
from typing import Any, NamedTuple

from ..files.threads import no_garbage_collection
from ..objects import kinds, walks
from ..objects.contents import ATOMS, Content, mark
from ..objects.walks import Met, Node
from . import running, signs, starts
from .choice import ALL, Choice
from .holds import Hold
from .looks import Look, Namespace
from .owned import Owned
from .passes import Begun, Passes
from .putting import Putting
from .running import Running
from .script import ahead, asking, bytecode, enumerates, frames
from .starts import Starts

_STARTED = time.time()
_ASKING = frozenset({"batches", "enumerate", "next"})
"""What code names that asks for batches."""
_MAY_BE_LEFT = (
    "this loop may be left by a break or a return behind save() in the same body: a resume from that "
    "checkpoint does not know of it, and trains on. Decide at the top of a body, by a variable that was set "
    "before save(). [R02]"
)
IN_INNER_LOOP = (
    "save() is called in a loop inside of the body: a resume goes on behind that body, and leaves out what "
    "is left of the inner loop. Call save() behind it. [R01]"
)
_COUNTED = (
    "next() asks for the batches in a for loop that counts them by itself: a resume in mid-epoch begins that "
    "loop again, and asks for more than are left. Loop over the batches, and leave the loop by state.batch. "
    "[R07]"
)
_MANY = 100_000
_BEHIND_YIELD = "what it does behind the yield that hands a batch on: a resume leaves that out for this batch"


class _Base(NamedTuple):
    """A namespace as the loop began."""

    frame: int
    """The identity of the frame, or of the module's variables."""
    marks: Mapping[str, Any]
    starts: Starts
    met: Mapping[int, Met]
    heads: frozenset[int]
    """Where the loops are, as offsets in the code of the frame."""
    code: CodeType | None
    is_late: bool
    """Whether there were other namespaces as the loops began, and this one was not."""

    def is_of(self, running: Running, marks: Mapping[str, Any], *, is_innermost: bool) -> bool:
        """Whether it is of this frame: one that is at the same head again, and not in a loop, is another.

        So is one in which a plain value is another that no line of the function assigns.
        """
        fixed = bytecode.never_assigned(running.code) if running.code else ()
        plain = (one for one in fixed if self.marks.get(one, (None,))[0] in ATOMS)
        if self.frame != running.identity or any(
            marks.get(one, self.marks[one]) != self.marks[one] for one in plain
        ):
            return False
        if running.code is None or not is_innermost or running.head not in self.heads:
            return True
        return bytecode.is_in_loop(running.code, running.head)


class _Head(NamedTuple):
    """The variables as they were at a head."""

    marks: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """By namespace, and by name."""
    inside: Mapping[int, Content] = MappingProxyType({})
    """What the objects that no checkpoint can have held then, by their identity."""


class Variables:
    """What the loops of ours change in the variables of the script."""

    def __init__(self, owned: Callable[[], Owned] = Owned, choice: Choice = ALL) -> None:
        self._owned, self._choice = owned, choice
        self._passes = Passes()
        self._bases: dict[str, _Base] = {}
        self._putting: Putting | None = None
        self._hold: Hold | None = None
        self._loaded: Mapping[str, Any] = {}
        """What was loaded, until the passes and the numbers of batches are taken from it."""
        self._digests: dict[int, str] = {}
        """Of what the loop leaves alone, by identity."""
        self._heads = _Head(), _Head()
        """The two that came last."""
        self._restored: set[tuple[str, str]] = set()
        """The variables that were put back once: they are stored even if they change no more."""
        self._numbers: dict[str, list[int]] = {}
        """What each `enumerate` around the batches of a loader gives next, by the loader's name."""
        self._starts: Mapping[str, Starts] = {}
        """With what the variables began, as the checkpoint has it, by namespace."""
        self.news: list[str] = []
        """What to print: which variables begin otherwise now, and which takes long."""
        self._slow: list[str] = []
        self.lost: list[tuple[str, str]] = []
        """What the last look could not store: where it is, and why."""

    def head(self, *, is_due: bool) -> tuple[list[str], list[str]]:
        """Note what the variables are before a loop, and put back what was loaded.

        `is_due`: whether no body was handed out since the load. Return the variables that were bound, and
        what cannot be put back.
        """
        stack = frames.own_frames(sys._getframe(1))
        owned = self._owned()
        self._begin(stack, owned)
        if is_due and self._putting is not None:
            return self._put_back(self._putting, stack, owned, is_due=True)
        unmet = self._putting.unmet() if self._putting is not None else []
        self._putting, self._hold, self._loaded = None, None, {}
        self._numbers.clear()
        return [], unmet

    def go_back(self, *, is_due: bool) -> list[str]:
        """Put back what was loaded, in the middle of a body: what the script does behind it counts.

        `is_due`: whether the places in the data go back, too. Return what cannot be put back.
        """
        if self._putting is None:
            return []
        stack = frames.own_frames(sys._getframe(1))
        _, problems = self._put_back(self._putting, stack, self._owned(), is_due=is_due)
        self._putting.leave_what_was_put()
        self._hold = None
        return problems

    @no_garbage_collection()
    def _begin(self, stack: list[FrameType], owned: Owned) -> None:
        found, is_first = [*self._running(stack, owned)], not self._bases
        here = {one.namespace.key for one in found}
        # A function that is not running any more has ended, unless it is a generator.
        for key, one in [*self._bases.items()]:
            if key not in here and one.code is not None and not frames.is_generator(one.code):
                del self._bases[key]
        marks = {
            one.namespace.key: {name: mark(value) for name, value in one.namespace.variables.items()}
            for one in found
        }
        for it in found:
            # Those around it are where they were when they called it.
            key, is_innermost = it.namespace.key, it.number == len(stack) - 1
            base = self._bases.get(key)
            if base is not None and not base.is_of(it, marks[key], is_innermost=is_innermost):
                del self._bases[key]
        known = self._known()
        self._heads = self._heads[1], _Head(marks, _insides(one.namespace for one in found))
        for it in found:
            key, heads = it.namespace.key, frozenset(() if it.head is None else (it.head,))
            base = self._bases.get(key)
            if base is not None:
                self._bases[key] = base._replace(heads=base.heads | heads)
                continue
            look = Look(owned)
            nodes = walks.walk(it.namespace.roots(), look.is_leaf)
            # One that is known by the address of another that is gone is new.
            new = (one for one in nodes if not ((was := known.get(id(one.value))) and was.is_of(one.value)))
            noted = (one for one in new if one.kind == "tensor" or not owned.name(one.value))
            met = walks.met(noted, look.content)
            began = starts.of(it.namespace.variables) if not it.namespace.is_cell else {}
            self._bases[key] = _Base(it.identity, marks[key], began, met, heads, it.code, not is_first)
            # An object that is new may have the identity of one that is gone.
            self._digests.clear()
            known |= met

    @no_garbage_collection()
    def look(self, loops: Mapping[str, Iterator[Any]] = MappingProxyType({})) -> dict[str, Any]:
        """Return what has changed since the loop began.

        `loops`: those over the batches of loaders that are in their middle.
        """
        if not self._bases:
            return {"namespaces": [], "entries": []}
        owned, rows, here = self._owned(), [], sys._getframe(1)
        stack = frames.own_frames(here)
        around = self._around(loops, here, stack)
        waiting = {key: one for some in around.values() for key, one in self._waiting(some)}
        there = [*self._running(stack, owned, waiting)]
        look = Look(owned, self._known().get, running.places(one.namespace for one in there))
        look.lost += [
            (key.rpartition(":")[2], _BEHIND_YIELD)
            for key, one in waiting.items()
            if ahead.runs_behind(one, bytecode.asking(one.f_code, self._heads_in(key)))
        ]
        found = [
            one.namespace
            for one in there
            if (base := self._bases.get(one.namespace.key)) and base.frame == one.identity
        ]
        since = time.thread_time()
        look.changes(root for one in found for root in one.roots())
        if len(look.nodes) > _MANY and not self._slow:
            self._slow.append(_slow(look.nodes, time.thread_time() - since))
            self.news.extend(self._slow)
        for namespace in found:
            base = self._bases[namespace.key]
            changed = (
                (name, one)
                for name, one in namespace.variables.items()
                if self._is_stored(namespace, base, name, one, look)
            )
            # Another cell may read it, but does so in vain if nothing can bring it back.
            later = {*namespace.variables} - (namespace.may_be_read or set()) if namespace.is_cell else set()
            rows.append([namespace.key, look.bound(changed, self._remade(namespace) | later)])
            look.lost += self._begun_before(namespace, base)
        look.lost += self._imported(there)
        look.keep_constants(self._digests)
        self.lost = look.lost
        numbered = ((name, _numbering(some)) for name, some in around.items())
        numbers = {name: [*map(enumerates.index_of, one)] for name, one in numbered if one}
        began = {one.key: starts.read(self._bases[one.key].starts, one.may_be_read) for one in found}
        more = {"passes": self._passes.changed(look), "numbers": numbers, "starts": began}
        return {"namespaces": rows, "entries": look.entries, **more}

    def _around(
        self, loops: Mapping[str, Iterator[Any]], here: FrameType, stack: Sequence[FrameType]
    ) -> dict[str, list[Any]]:
        """Return what asks each loop for batches, where that matters."""
        # A generator that hands batches on waits as its caller saves.
        is_asleep = any(
            one.code is not None and frames.is_generator(one.code) and one.code not in codes
            for codes in [{frame.f_code for frame in stack}]
            for one in self._bases.values()
        )
        if not is_asleep and not any("enumerate" in one.f_code.co_names for one in stack):
            return {}
        return {name: enumerates.around(one, _asking(here, one)) for name, one in loops.items()}

    def _waiting(self, around: Iterable[Any]) -> Iterator[tuple[str, FrameType]]:
        """Yield the frames of the script's generators that wait to be asked for a batch, with their keys."""
        held = [one for one in around if type(one) is GeneratorType and not one.gi_running]
        for frame in (one.gi_frame for one in held if one.gi_frame):
            yield from ((key, frame) for key, base in self._bases.items() if base.frame == id(frame))

    def renumber(self, loader: str, loop: Iterator[Any], asked_by: FrameType) -> list[str]:
        """Let each `enumerate` around a loop go on where it was; return what cannot."""
        numbers = self._numbers.pop(loader, [])
        around = _numbering(enumerates.around(loop, asked_by) if numbers else [])
        is_set = len(around) == len(numbers) and all(map(enumerates.set_index, around, numbers))
        return (
            []
            if is_set
            else [f"the index of enumerate() around the batches of {loader}: it is not where it was"]
        )

    def _begun_before(self, namespace: Namespace, base: _Base) -> Iterator[tuple[str, str]]:
        """Yield the iterators that were there before the loop, and may be asked in it."""
        for name, one in namespace.variables.items():
            if (what := signs.begun(one)) is None or base.marks.get(name) != mark(one):
                continue
            may_be_read = namespace.may_be_read is None or name in namespace.may_be_read
            if may_be_read and not (type(one) is GeneratorType and asking.may_begin_again(one)):
                yield name, f"{what} that was made before the loop"

    def _imported(self, running: Iterable[Running]) -> Iterator[tuple[str, str]]:
        """Yield the modules of the script that the loop has imported, if they keep what functions assign."""
        for it in running:
            base = self._bases.get(it.namespace.key)
            is_imported = (base is None or base.is_late) and it.namespace.key.startswith("module:")
            if is_imported and it.namespace.may_be_bound:
                names = ", ".join(sorted(it.namespace.may_be_bound))
                yield it.namespace.key.partition(":")[2], f"the loop has imported it, and it keeps {names}"

    def _remade(self, namespace: Namespace) -> set[str]:
        """Return the variables that lines between two heads have bound: they run again at a resume."""
        before, last = (one.marks.get(namespace.key, {}) for one in self._heads)
        held, were, inside = namespace.variables, self._heads[1].inside, _insides([namespace])
        return {
            name
            for name, one in last.items()
            if before.get(name, ()) != one and name in held and mark(held[name]) == one
            # An object that counts its lines beside its file is not what those lines make.
            if inside.get(id(held[name])) == were.get(id(held[name]))
        }

    def _is_stored(self, namespace: Namespace, base: _Base, name: str, value: Any, look: Look) -> bool:
        if not namespace.is_cell and namespace.may_be_read is not None and name not in namespace.may_be_read:
            return False
        if type(value) is float and _STARTED - 1 <= value <= time.time() + 1:
            # A time of this process.
            return False
        is_same = base.marks.get(name, ()) == mark(value) and look.is_known(value)
        return not is_same or (namespace.key, name) in self._restored

    def load(self, tree: Mapping[str, Any]) -> None:
        """Take what a look has stored; the next heads put it back."""
        self._putting, self._hold, self._loaded = Putting(tree), None, tree
        self._starts = {} if self._bases else tree.get("starts", {})

    def pass_begins(self, name: str, loader: Any, *, goes_on: bool) -> Begun:
        """Put back what a pass over a loader began with, if it goes on, and what its workers were made of."""
        owned = self._owned()
        namespaces = self._namespaces(frames.own_frames(sys._getframe(1)), owned) if goes_on else None
        return self._passes.begin(name, loader, namespaces, owned, self._known())

    def may_ask_again(self) -> bool:
        """Whether batches may be asked for in the running body, in what is left of it."""
        stack = frames.own_frames(sys._getframe(1))
        codes = [code for _, held in running.modules(stack) for code in running.codes_in(held)]
        for frame, heads in self._innermost_first(stack):
            if ahead.may_name(frame, heads, _ASKING, codes):
                return True
            if heads:
                return False
        return True

    def places(self) -> Iterator[str]:
        """Yield what a resume from where the script saves just now would do otherwise."""
        stack = frames.own_frames(sys._getframe(1))
        for frame, heads in self._innermost_first(stack):
            code, at = frame.f_code, frame.f_lasti
            if heads and ahead.may_leave(code, at, heads):
                yield _MAY_BE_LEFT
            if ahead.is_in_inner_loop(code, at, heads) if heads else bytecode.is_in_loop(code, at):
                yield IN_INNER_LOOP
            if heads:
                return

    def asked(self, asked_by: FrameType) -> Iterator[str]:
        """Yield what a resume does otherwise if a frame asks for batches where it does so just now."""
        frame, heads = next(self._innermost_first(frames.own_frames(asked_by)), (None, frozenset()))
        if frame is asked_by and ahead.is_counted(frame.f_code, frame.f_lasti, heads):
            yield _COUNTED

    def is_last_in_body(self) -> bool:
        """Whether the script has nothing to do in the running body any more."""
        for frame, heads in self._innermost_first(frames.own_frames(sys._getframe(1))):
            if ahead.runs_behind(frame, heads):
                return False
            if heads:
                return True
        return False

    def _innermost_first(self, stack: list[FrameType]) -> Iterator[tuple[FrameType, frozenset[int]]]:
        """Yield each frame with where its loops are that ask ours."""
        keys = {id(module): f"module:{name}" for name, module in running.modules(stack)}
        for number, frame in reversed([*enumerate(stack)]):
            is_function = frames.is_function(frame)
            key = running.key_of(frame, number) if is_function else keys[id(frame.f_globals)]
            yield frame, bytecode.asking(frame.f_code, self._heads_in(key))

    def namespaces(self, owned: Owned) -> list[Namespace]:
        """Return the namespaces of the script as it runs now."""
        return self._namespaces(frames.own_frames(sys._getframe(1)), owned)

    @no_garbage_collection()
    def _put_back(
        self, putting: Putting, stack: list[FrameType], owned: Owned, *, is_due: bool
    ) -> tuple[list[str], list[str]]:
        namespaces = self._namespaces(stack, owned)
        if is_due and self._loaded:
            tree, self._loaded = self._loaded, {}
            self._passes = Passes(tree.get("passes", {}))
            self._numbers.clear()
            self._numbers.update(tree.get("numbers", {}))
        self.news.extend(self._edited(namespaces, putting))
        if self._hold is not None:
            self._hold.put_back(namespaces, owned, putting.lacking())
            namespaces = self._namespaces(stack, owned)
        self._passes.find(namespaces, owned)
        names = putting.put(namespaces, owned, partial(running.functions, stack))
        putting.problems += self._passes.remember_workers(namespaces, owned, self._known())
        if self._hold is None:
            # As they are now, with what was bound.
            self._hold = Hold(self._namespaces(stack, owned), owned)
        self._restored |= putting.bound
        return names, putting.problems

    def _edited(self, namespaces: Sequence[Namespace], putting: Putting) -> Iterator[str]:
        there = {one.key: one for one in namespaces if not one.is_cell}
        for key in self._starts.keys() & there:
            yield from starts.edited(self._starts[key], there[key].variables, putting.names_in(key))
        self._starts = {key: one for key, one in self._starts.items() if key not in there}

    def _known(self) -> dict[int, Met]:
        return {at: met for base in self._bases.values() for at, met in base.met.items()}

    def _namespaces(self, stack: list[FrameType], owned: Owned) -> list[Namespace]:
        return [one.namespace for one in self._running(stack, owned)]

    def _running(
        self, stack: list[FrameType], owned: Owned, waiting: Mapping[str, FrameType] = MappingProxyType({})
    ) -> Iterator[Running]:
        found = running.running(stack, waiting, self._heads_in, owned.loaders)
        return (one._replace(namespace=self._choice.of(one.namespace)) for one in found)

    def _heads_in(self, key: str) -> frozenset[int]:
        return self._bases[key].heads if key in self._bases else frozenset()


def _numbering(around: Iterable[Any]) -> list[enumerate[Any]]:
    return [one for one in around if type(one) is enumerate]


def _asking(here: FrameType | None, loop: Iterator[Any]) -> FrameType | None:
    """Return the frame that is asking a loop for its next batch; None if none is."""
    while here is not None and here.f_code is not type(loop).__next__.__code__:
        here = here.f_back
    return here and here.f_back


def _slow(nodes: Iterable[Node], seconds: float) -> str:
    """Return what to print of a look that takes long: the variable with the most objects."""
    ((name, count),) = Counter(node.path[0].name for node in nodes).most_common(1)
    return (
        f"a look at the {count:,} objects of {name} takes {seconds:.1f} s at each save; where a resume can "
        f'do without them, variables=["*", "-{name}"] leaves them out'
    )


def _insides(namespaces: Iterable[Namespace]) -> dict[int, Content]:
    """Return the contents of objects that hold something which no checkpoint can have."""
    values = (value for one in namespaces for value in one.variables.values())
    return {id(value): kinds.content(value) for value in values if signs.inside(value)}
