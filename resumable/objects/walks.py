"""The walk through all that some roots reach, and paths that lead to the same places in another process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from . import own
from .contents import Content
from .kinds import Inside, Kind, Step, look_into, row_of

Path = tuple[Step, ...]
Place = tuple[Step, Any]
"""A step, and the place that it goes on from; None for a root's."""
Roots = Iterable[tuple[Step, Any]]


class Node:
    """An object that a walk has met, and how it came there first."""

    __slots__ = ("_inside", "_look", "_place", "how", "is_own", "kind", "name", "owner", "value")

    def __init__(self, value: Any, how: str = "", name: Any = "", owner: Node | None = None) -> None:
        """`how`, `name`: the last step to it; the root's own if it is a root."""
        self.value, self.how, self.name, self.owner = value, how, name, owner
        self.kind, self._look, self.is_own = row_of(type(value))
        self._place: Place | None = None
        self._inside: Inside | None = None

    @property
    def place(self) -> Place:
        """The last step to it, and those before."""
        if self._place is None:
            self._place = Step(self.how, self.name), self.owner and self.owner.place
        return self._place

    @property
    def path(self) -> Path:
        """The steps from a root; the first is the root's own."""
        return path_of(self.place)

    def inside(self) -> Inside:
        """Return what is in it: looked into once, as long as the walk is there."""
        if self._inside is None:
            self._inside = self._look(self.value)
        return self._inside

    def __str__(self) -> str:
        return text(self.path)


def path_of(place: Place) -> Path:
    """Return the steps from a root to a place."""
    steps = []
    while place is not None:
        step, place = place
        steps.append(step)
    return tuple(reversed(steps))


def text(path: Path) -> str:
    """Return a path as code has it.

    >>> text((Step("", "trainer"), Step("attribute", "history"), Step("item", 3), Step("key", "loss")))
    "trainer.history[3]['loss']"
    """
    return "".join(map(str, path))


def walk(roots: Roots, is_leaf: Callable[[Node], bool] = lambda _: False) -> Iterator[Node]:
    """Yield each object that the roots reach once, the nearest first; a leaf's own objects are left out."""
    # The nodes keep the objects: one that is made for the walk must not give its address to another.
    nodes, seen = list[Node](), set[int]()
    for (how, name), value in roots:
        if id(value) not in seen:
            seen.add(id(value))
            nodes.append(Node(value, how, name))
    for node in nodes:
        yield node
        if not is_leaf(node):
            for how, name, value in node.inside().children():
                if id(value) not in seen:
                    seen.add(id(value))
                    nodes.append(Node(value, how, name, node))
            if node.is_own and id(of := type(node.value)) not in seen:
                seen.add(id(of))
                nodes.append(Node(of, "__class__", "__class__", node))
        node._inside = None


class Finder:
    """Finds objects by their paths; each object on the way is looked into once."""

    def __init__(self, roots: Roots) -> None:
        self._roots = dict(roots)
        self._inside: dict[int, tuple[Any, dict[Step, Any]]] = {}

    def find(self, path: Sequence[Step]) -> Any:
        """Return the object at the end of a path; KeyError if there is none."""
        found = self._roots[path[0]]
        for step in path[1:]:
            if step.how == "__class__":
                found = type(found)
                continue
            if id(found) not in self._inside:
                inside = {Step(how, name): one for how, name, one in look_into(found).children()}
                self._inside[id(found)] = found, inside
            found = self._inside[id(found)][1][step]
        return found


class Met(NamedTuple):
    """An object as a walk has met it: where, of which class, and with which content."""

    place: Place
    of: type
    kind: Kind
    content: Content | None
    """None if it is not known, as if it had changed."""
    reference: weakref.ref[Any] | None

    @property
    def path(self) -> Path:
        """The steps to it from a root."""
        return path_of(self.place)

    def is_of(self, value: Any) -> bool:
        """Whether it is this object, and not another at the address of one that is gone."""
        # The class of an object may be another one now.
        return type(value) is self.of if self.reference is None else self.reference() is value


def met(
    nodes: Iterable[Node],
    content_of: Callable[[Node], Content | None] = lambda node: look_into(node.value).content(),
) -> dict[int, Met]:
    """Return the objects of a walk by their identity, as they are now, without keeping them."""
    found = {}
    for it in nodes:
        of = type(it.value)
        reference = weakref.ref(it.value) if _has_weakrefs(of) else None
        found[id(it.value)] = Met(it.place, of, it.kind, content_of(it), reference)
    return found


@own.by_class
def _has_weakrefs(of: type) -> bool:
    return bool(type.__dict__["__weakrefoffset__"].__get__(of))
