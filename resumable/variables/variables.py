"""The variables of a training's script: `head` at a loop's head, `look` at a save, `load` at a resume."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import CodeType, FrameType, FunctionType, MappingProxyType, ModuleType
from typing import Any, NamedTuple

from ..files.threads import no_garbage_collection
from ..objects import own, walks
from ..objects.contents import Content, content, mark
from ..objects.walks import Met
from . import signs
from .holds import Hold
from .looks import Look, Namespace
from .owned import Owned
from .passes import Loaders, Pass
from .putting import Putting
from .script import ahead, bytecode, enumerates, frames

_PACKAGE = __name__.partition(".")[0]
_STARTED = time.time()
_ASKING = frozenset({"batches", "enumerate", "next"})
"""What code names that asks for batches."""


class _Running(NamedTuple):
    """A namespace of a frame that is running, or of a module."""

    namespace: Namespace
    identity: int
    """That of the frame, or of the module's variables."""
    head: int | None
    """Where the frame is, as an offset in its code."""
    code: CodeType | None
    number: int | None = None
    """How many frames of the script are around it."""


class _Base(NamedTuple):
    """A namespace as the loop began."""

    frame: int
    """The identity of the frame, or of the module's variables."""
    marks: Mapping[str, Any]
    met: Mapping[int, Met]
    heads: frozenset[int]
    """Where the loops are, as offsets in the code of the frame."""
    code: CodeType | None
    is_late: bool
    """Whether there were other namespaces as the loops began, and this one was not."""

    def is_of(self, running: _Running, *, is_innermost: bool) -> bool:
        """Whether it is of this frame: one that is at the same head again, and not in a loop, is another."""
        if self.frame != running.identity:
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

    def __init__(self, owned: Callable[[], Owned] = Owned, loaders: Callable[[], Loaders] = dict) -> None:
        """`loaders`: returns the objects behind each loader that are looked at, by the loader's name."""
        self._owned, self._loaders = owned, loaders
        self._passes: dict[str, Pass] = {}
        """Of each loader the pass that began last."""
        self._bases: dict[str, _Base] = {}
        self._putting: Putting | None = None
        self._hold: Hold | None = None
        self._digests: dict[int, str] = {}
        """Of what the loop leaves alone, by identity."""
        self._heads = _Head(), _Head()
        """The two that came last."""
        self._restored: set[tuple[str, str]] = set()
        """The variables that were put back once: they are stored even if they change no more."""
        self._numbers: dict[str, list[int]] = {}
        """What each `enumerate` around the batches of a loader gives next, by the loader's name."""
        self.lost: list[tuple[str, str]] = []
        """What the last look could not store: where it is, and why."""

    def head(self, *, is_due: bool) -> tuple[list[str], list[str]]:
        """Note what the variables are before a loop, and put back what was loaded.

        `is_due`: whether no body was handed out since the load. Return the variables that were bound, and
        what cannot be put back.
        """
        stack = frames.own_frames(sys._getframe(1))
        self._begin(stack)
        if is_due and self._putting is not None:
            return self._put_back(self._putting, stack)
        self._putting = self._hold = None
        self._numbers = {}
        return [], []

    @no_garbage_collection()
    def _begin(self, stack: list[FrameType]) -> None:
        owned, running, is_first = self._owned(), [*self._running(stack)], not self._bases
        here = {one.namespace.key for one in running}
        # A function that is not running any more has ended, unless it is a generator.
        for key, one in [*self._bases.items()]:
            if key not in here and one.code is not None and not frames.is_generator(one.code):
                del self._bases[key]
        for it in running:
            # Those around it are where they were when they called it.
            base = self._bases.get(it.namespace.key)
            if base is not None and not base.is_of(it, is_innermost=it.number == len(stack) - 1):
                del self._bases[it.namespace.key]
        known = self._known()
        marks = {
            one.namespace.key: {name: mark(value) for name, value in one.namespace.variables.items()}
            for one in running
        }
        self._heads = self._heads[1], _Head(marks, _insides(one.namespace for one in running))
        for it in running:
            key, heads = it.namespace.key, frozenset(() if it.head is None else (it.head,))
            base = self._bases.get(key)
            if base is not None:
                self._bases[key] = base._replace(heads=base.heads | heads)
                continue
            look = Look(owned, {})
            nodes = walks.walk(it.namespace.roots(), look.is_leaf)
            # One that is known by the address of another that is gone is new.
            new = (one for one in nodes if not ((was := known.get(id(one.value))) and was.is_of(one.value)))
            met = walks.met([one for one in new if not owned.name(one.value)], look.content_of)
            self._bases[key] = _Base(it.identity, marks[key], met, heads, it.code, not is_first)
            # An object that is new may have the identity of one that is gone.
            self._digests.clear()
            known |= met

    @no_garbage_collection()
    def look(self) -> dict[str, Any]:
        """Return what has changed since the loop began."""
        if not self._bases:
            return {"namespaces": [], "entries": []}
        look, rows = Look(self._owned(), self._known()), []
        running = [*self._running(frames.own_frames(sys._getframe(1)))]
        found = [
            one.namespace
            for one in running
            if (base := self._bases.get(one.namespace.key)) and base.frame == one.identity
        ]
        look.changes(root for one in found for root in one.roots())
        for namespace in found:
            base = self._bases[namespace.key]
            changed = (
                (name, one)
                for name, one in namespace.variables.items()
                if self._is_stored(namespace, base, name, one, look)
            )
            rows.append([namespace.key, look.bound(changed, self._remade(namespace))])
            look.lost += self._begun_before(namespace, base)
        look.lost += self._imported(running)
        look.keep_constants(self._digests)
        self.lost = look.lost
        passes = {name: entries for name, one in self._passes.items() if (entries := one.changed(look))}
        return {"namespaces": rows, "entries": look.entries, "passes": passes}

    def numbers(self, loops: Mapping[str, Iterator[Any]], asking: CodeType) -> dict[str, list[int]]:
        """Return what each `enumerate` around loops gives next; `asking`: the code that asks them."""
        here: FrameType | None = sys._getframe(1)
        if not loops or not enumerates.may_be_around(frames.own_frames(here)):
            return {}
        while here is not None and here.f_code is not asking:
            here = here.f_back
        found = {name: enumerates.around(one, here and here.f_back) for name, one in loops.items()}
        return {name: [*map(enumerates.index_of, around)] for name, around in found.items() if around}

    def renumber(self, loader: str, loop: Iterator[Any], asked_by: FrameType) -> list[str]:
        """Let each `enumerate` around a loop go on where it was; return what cannot."""
        numbers = self._numbers.pop(loader, [])
        around = enumerates.around(loop, asked_by) if numbers else []
        is_set = len(around) == len(numbers) and all(map(enumerates.set_index, around, numbers))
        return (
            []
            if is_set
            else [f"the index of enumerate() around the batches of {loader}: it is not where it was"]
        )

    def _begun_before(self, namespace: Namespace, base: _Base) -> Iterator[tuple[str, str]]:
        """Yield the iterators that were there before the loop, and may be asked in it."""
        for name, one in namespace.variables.items():
            may_be_read = namespace.may_be_read is None or name in namespace.may_be_read
            if may_be_read and base.marks.get(name) == mark(one) and (what := signs.begun(one)):
                yield name, f"{what} that was made before the loop"

    def _imported(self, running: Iterable[_Running]) -> Iterator[tuple[str, str]]:
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
        if namespace.may_be_read is not None and name not in namespace.may_be_read:
            return False
        if type(value) is float and _STARTED - 1 <= value <= time.time() + 1:
            # A time of this process.
            return False
        is_same = base.marks.get(name, ()) == mark(value) and look.is_known(value)
        return not is_same or (namespace.key, name) in self._restored

    def load(self, tree: Mapping[str, Any]) -> None:
        """Take what a look has stored; the next heads put it back."""
        self._putting, self._hold = Putting(tree), None
        self._passes = {name: Pass.loaded(entries) for name, entries in tree.get("passes", {}).items()}
        self._numbers = {name: [*one] for name, one in tree.get("numbers", {}).items()}

    def pass_begins(self, loader: str) -> None:
        """Note with what a pass over a loader begins."""
        namespace = self._of_loader(loader)
        self._passes[loader] = Pass.begun(namespace, self._owned(), self._known())

    def pass_goes_on(self, loader: str) -> tuple[Callable[[], object], list[str]]:
        """Put what is behind a loader back as its pass began, since the order is drawn from it again.

        Return a function that puts it back as it is now, and what cannot be put back.
        """
        namespace, owned = self._of_loader(loader), self._owned()
        hold, problems = Hold([namespace], owned), list[str]()
        if (begun := self._passes.get(loader)) is not None:
            namespaces = self._namespaces(frames.own_frames(sys._getframe(1)))
            problems = begun.put_back(namespaces, owned)
        self._passes[loader] = Pass.begun(namespace, owned, self._known())
        return partial(hold.put_back, [], ()), problems

    def may_ask_again(self) -> bool:
        """Whether batches may be asked for in the running body, in what is left of it."""
        stack = frames.own_frames(sys._getframe(1))
        codes = [code for _, held in _modules(stack) for code in _codes_in(held)]
        keys = {id(module): f"module:{name}" for name, module in _modules(stack)}
        for number, frame in reversed([*enumerate(stack)]):
            key = _key_of(frame, number) if frames.is_function(frame) else keys[id(frame.f_globals)]
            if ahead.may_name(frame, heads := self._heads_in(key), _ASKING, codes):
                return True
            if heads:
                return False
        return True

    def _of_loader(self, loader: str) -> Namespace:
        return _of_objects(f"loader:{loader}", self._loaders().get(loader, {}))

    @no_garbage_collection()
    def _put_back(self, putting: Putting, stack: list[FrameType]) -> tuple[list[str], list[str]]:
        owned, namespaces = self._owned(), self._namespaces(stack)
        if self._hold is not None:
            self._hold.put_back(namespaces, putting.lacking())
            namespaces = self._namespaces(stack)
        for begun in self._passes.values():
            begun.find(namespaces, owned)
        names = putting.put(namespaces, owned)
        if self._hold is None:
            # As they are now, with what was bound.
            self._hold = Hold(self._namespaces(stack), owned)
        self._restored |= putting.bound
        return names, putting.problems

    def _known(self) -> dict[int, Met]:
        return {at: met for base in self._bases.values() for at, met in base.met.items()}

    def _namespaces(self, stack: list[FrameType]) -> list[Namespace]:
        return [one.namespace for one in self._running(stack)]

    def _running(self, stack: list[FrameType]) -> Iterator[_Running]:
        """Yield each namespace of the running frames, and of the modules."""
        tops = {id(one.f_globals): one for one in stack if not frames.is_function(one)}
        modules = [(f"module:{name}", module) for name, module in _modules(stack)]
        functions = [
            (_key_of(one, number), number, one) for number, one in enumerate(stack) if frames.is_function(one)
        ]
        keys = [key for key, module in modules if id(module) in tops] + [key for key, _, _ in functions]
        inner = next((key for key in reversed(keys) if self._heads_in(key)), "")
        for key, number, one in functions:
            live = _live(one, self._heads_in(key), is_inner=key == inner)
            yield _Running(_of_frame(key, one, live), id(one), one.f_lasti, one.f_code, number)
        for key, module in modules:
            top = tops.get(id(module))
            live_at_top = _live(top, self._heads_in(key), is_inner=key == inner) if top else None
            of_module = _of_module(key, module, top, live_at_top, stack)
            yield _Running(of_module, id(module), top and top.f_lasti, None)
        for loader, objects in self._loaders().items():
            yield _Running(_of_objects(f"loader:{loader}", objects), 0, None, None)

    def _heads_in(self, key: str) -> frozenset[int]:
        return self._bases[key].heads if key in self._bases else frozenset()


def _key_of(frame: FrameType, number: int) -> str:
    return f"frame:{number}:{frames.name_of(frame)}"


def _insides(namespaces: Iterable[Namespace]) -> dict[int, Content]:
    """Return the contents of objects that hold something which no checkpoint can have."""
    values = (value for one in namespaces for value in one.variables.values())
    return {id(value): content(value) for value in values if signs.inside(value)}


def _live(frame: FrameType, heads: frozenset[int], *, is_inner: bool) -> frozenset[str]:
    """Return the variables that a resume may read: it begins at the head of the inner loop.

    The functions around that loop go on where they have called it.
    """
    here = bytecode.live_before(frame.f_code)
    at_heads = frozenset[str]().union(*(here.get(at, ()) for at in heads))
    return at_heads if is_inner else at_heads | bytecode.live_after(frame.f_code, frame.f_lasti)


def _of_frame(key: str, frame: FrameType, live: frozenset[str]) -> Namespace:
    code = frame.f_code
    inner = {*code.co_cellvars, *code.co_freevars, *frames.code_names(frame)}
    may_bind = bytecode.assigned_in_loops(code)
    return Namespace(
        key, _kept(frames.variables(frame)), live | inner, may_bind, lambda values: frames.bind(frame, values)
    )


def _of_module(
    key: str,
    held: dict[str, Any],
    top: FrameType | None,
    live: frozenset[str] | None,
    stack: list[FrameType],
) -> Namespace:
    codes = {*_codes_in(held), *(one.f_code for one in stack if one.f_globals is held)}
    may_bind = frozenset().union(
        *map(bytecode.assigned_globals, codes), *map(bytecode.assigned_inside, codes)
    )
    if top is not None:
        may_bind |= bytecode.assigned_in_loops(top.f_code)
        live = (live or frozenset()) | frozenset(frames.code_names(top)).union(
            *(code.co_names for code in codes - {top.f_code})
        )
    return Namespace(key, _kept(dict(held)), live, may_bind, held.update)


def _of_objects(key: str, objects: Mapping[str, Any]) -> Namespace:
    return Namespace(key, dict(objects), frozenset(), frozenset(), lambda values: None)


def _kept(variables: dict[str, Any]) -> dict[str, Any]:
    """Return the variables that are the script's: not Python's, and no object of this package."""
    return {
        name: one
        for name, one in variables.items()
        if not (name.startswith("__") and name.endswith("__"))
        and own.module_of(type(one)).partition(".")[0] != _PACKAGE
    }


def _codes_in(held: Mapping[str, Any]) -> Iterator[CodeType]:
    """Yield the code of the functions of a module, and of those of its classes."""
    for one in [*held.values()]:
        inside = own.namespace(one).values() if type(one) is type and own.is_own_class(one) else (one,)
        for function in map(own.unwrapped, inside):
            if type(function) is FunctionType:
                yield function.__code__


def _modules(stack: list[FrameType]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the modules of the script with their variables, those of the frames first."""
    found: dict[str, dict[str, Any]] = {}
    for frame in stack:
        if not any(one is frame.f_globals for one in found.values()):
            # A script that runs another one by exec() has given it its own name.
            name = str(frame.f_globals.get("__name__", ""))
            found[f"{name}:{len(found)}" if name in found else name] = frame.f_globals
    for name in _own_modules(len(sys.modules), next(reversed(sys.modules))):
        if (module := sys.modules.get(name)) is not None:
            found.setdefault(name, vars(module))
    yield from found.items()


@lru_cache(1)
def _own_modules(count: int, last: str) -> list[str]:
    """Return the names of the script's modules, as long as no other is imported."""
    return [
        name
        for name, module in [*sys.modules.items()]
        if type(module) is ModuleType and own.is_own_module(module) and module.__name__ == name
    ]
