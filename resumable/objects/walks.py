"""The walk through all that some roots reach, and paths that lead to the same places in another process."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .contents import Content, content
from .kinds import Kind, Step, children, kind_of

Path = tuple[Step, ...]
Roots = Iterable[tuple[Step, Any]]


class Node(NamedTuple):
    """An object that a walk has met, and how it came there first."""

    value: Any
    kind: Kind
    step: Step
    owner: Node | None

    @property
    def path(self) -> Path:
        """The steps from a root; the first is the root's own."""
        steps, node = [self.step], self.owner
        while node is not None:
            steps.append(node.step)
            node = node.owner
        return tuple(reversed(steps))

    def __str__(self) -> str:
        return text(self.path)


def text(path: Path) -> str:
    """Return a path as code has it.

    >>> text((Step("", "trainer"), Step("attribute", "history"), Step("item", 3), Step("key", "loss")))
    "trainer.history[3]['loss']"
    """
    return "".join(map(str, path))


def walk(roots: Roots, is_leaf: Callable[[Node], bool] = lambda _: False) -> Iterator[Node]:
    """Yield each object that the roots reach once, the nearest first; a leaf's own objects are left out."""
    # With the objects themselves: one that is made for the walk must not give its address to another.
    seen: dict[int, Any] = {}
    waiting: deque[tuple[Any, Step, Node | None]] = deque((value, step, None) for step, value in roots)
    while waiting:
        value, step, owner = waiting.popleft()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        node = Node(value, kind_of(value), step, owner)
        yield node
        if not is_leaf(node):
            waiting.extend((child, way, node) for way, child in children(value, node.kind))


class Finder:
    """Finds objects by their paths; each object on the way is looked into once."""

    def __init__(self, roots: Roots) -> None:
        self._roots = dict(roots)
        self._inside: dict[int, tuple[Any, dict[Step, Any]]] = {}

    def find(self, path: Sequence[Step]) -> Any:
        """Return the object at the end of a path; KeyError if there is none."""
        found = self._roots[path[0]]
        for step in path[1:]:
            if id(found) not in self._inside:
                self._inside[id(found)] = found, dict(children(found))
            found = self._inside[id(found)][1][step]
        return found


class Met(NamedTuple):
    """An object as a walk has met it: where, of which class, and with which content."""

    path: Path
    of: type
    kind: Kind
    content: Content
    reference: weakref.ref[Any] | None

    def is_of(self, value: Any) -> bool:
        """Whether it is this object, and not another at the address of one that is gone."""
        return type(value) is self.of and (self.reference is None or self.reference() is value)


def met(nodes: Iterable[Node], content_of: Callable[[Node], Content] | None = None) -> dict[int, Met]:
    """Return the objects of a walk by their identity, as they are now, without keeping them."""
    content_of = content_of or (lambda node: content(node.value, node.kind))
    return {
        id(one.value): Met(one.path, type(one.value), one.kind, content_of(one), _weak(one.value))
        for one in nodes
    }


def _weak(value: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(value)
    except TypeError:
        return None
