"""A look at the script's variables: what of them has changed, as a tree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..objects import contents, kinds, walks
from ..objects.contents import Content, Held, mark
from ..objects.kinds import Step
from ..objects.walks import Met, Node
from . import atoms, columns, constants, libraries, making, signs
from .atoms import Hole
from .columns import Table
from .libraries import Libraries
from .owned import Owned
from .writing import HOOK, WRITERS, Entry, class_name, class_of

_IMMUTABLE = {"tuple", "count", "enum", "method", "partial"}
"""Kinds that cannot be filled in place."""
_NEVER_CHANGED = _IMMUTABLE - {"count"}
"""Kinds whose objects hold the same as long as they are there; few of them have weak references."""
_WITH_STATE = {"object", "library", "network", "list"}
"""Kinds of which not all counts that is in them."""
_MANY = 64
"""A list of more numbers is stored as an array."""
_NUMBERS: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_}


class Namespace(NamedTuple):
    """Variables of the script that belong together: of a module, or of a function that is running."""

    key: str
    """What is the same in another process: "module:train", or "frame:1:main"."""
    variables: dict[str, Any]
    may_be_read: frozenset[str] | None
    """Those that may be read before they are assigned again; None for all."""
    may_be_bound: frozenset[str]
    """Those that a loop of the script assigns, or a function."""
    bind: Callable[[Mapping[str, Any]], None]
    is_cell: bool = False
    """Whether code that comes later may read all of them: another cell of a notebook."""
    places: Callable[[], frozenset[str]] = frozenset
    """Returns where the loop's code stores, as `bytecode.places` says it."""

    def roots(self) -> Iterable[tuple[Step, Any]]:
        """Return the objects among the variables, as roots of a walk."""
        return [
            (Step(self.key, name), one)
            for name, one in self.variables.items()
            if type(one) not in contents.ATOMS and not contents.is_atom(one)
        ]


class Look:
    """Encodes what has changed since the loop began, each object once."""

    def __init__(
        self,
        owned: Owned,
        known: Callable[[int], Met | None] = lambda _: None,
        places: Callable[[], frozenset[str]] | None = None,
    ) -> None:
        """`places`: where the code of the script stores; None for anywhere."""
        self._owned, self._known, self._places = owned, known, places
        self._libraries = Libraries(owned, lambda value: not self.is_unchanged(value))
        self._constants: list[Node] = []
        self._same: dict[int, bool] = {}
        """Whether what was there before is as it was then, by identity."""
        self._tables: dict[int, tuple[Any, Table | None]] = {}
        self._numbers: dict[int, int] = {}
        self.entries: list[Entry] = []
        self.objects: list[Any] = []
        """Those of the entries, which keep their identity as long as this lives."""
        self.nodes: list[Node] = []
        """What was looked at."""
        self.lost: list[tuple[str, str]] = []
        """What cannot be stored: where it is, and why."""

    def is_leaf(self, node: Node) -> bool:
        """Whether the objects in an object are of no interest here."""
        value, kind = node.value, node.kind
        if self._owned.name(value) is not None:
            return kind != "tensor" or not kinds.hooks_of(value)
        if kind == "object":
            return signs.among(node.inside().groups["attribute"].values()) is not None
        if kind == "list":
            return self.table(value) is not None
        if kind == "dict" and node.owner and libraries.lacks_some(node.owner.value):
            return bool(node.name == "state")
        if kind == "library" and self._owned.covered(value) is None and not libraries.lacks_some(value):
            return libraries.has_state(value, kind) or not self._libraries.is_open(value)
        return False

    def changes(self, roots: Iterable[tuple[Step, Any]]) -> None:
        """Encode all objects that were there before and have changed."""
        nodes, gone = self.nodes, set[int]()
        for node in walks.walk(roots, self.is_leaf):
            nodes.append(node)
            if node.kind == "tensor" and self._owned.name(node.value):
                self._compare_hooks(node)
            if (met := self._known(id(node.value))) is None:
                continue
            is_another = node.kind in _NEVER_CHANGED and met.content not in (None, self.content(node))
            if is_another or not met.is_of(node.value):
                gone.add(id(node.value))
            elif node.kind not in _IMMUTABLE and self._owned.name(node.value) is None:
                self._same[id(node.value)] = self._is_as_met(met, node)
        if gone:
            self._forget(gone, nodes)
        for node in nodes:
            if node.kind == "library" and self._libraries.has_processes(node.value):
                self.lost.append((str(node), "it works in processes of its own"))
            is_same = self._same.get(id(node.value))
            if is_same is None or (is_same and node.kind not in constants.KINDS) or self._is_in_state(node):
                continue
            if is_same:
                is_constant = constants.is_constant(node) and self._owned.base(node.value) is None
                if is_constant and not libraries.is_inside(_kinds_above(node)):
                    self._constants.append(node)
                continue
            if (
                node.kind == "library"
                and not libraries.has_state(node.value, node.kind)
                and self.is_leaf(node)
            ):
                continue
            where = str(node)
            # Never half an object: its numbers without what is compiled, or without a file.
            if libraries.is_compiled(node.value) or self._libraries.is_half(node.value):
                self.lost.append((where, "it changes with a compiled object, which cannot be filled"))
            elif self._is_foreign(node):
                self.lost.append((where, "other than numbers in an object of a library"))
            elif held := signs.inside(node.value):
                self.lost.append((where, f"it holds {held}"))
            else:
                self._number(node.value, where)

    def _compare_hooks(self, node: Node) -> None:
        met = self.known(node.value)
        if met and met.content and (met.content.held or kinds.hooks_of(node.value)):
            now, then = self.content(node).held, met.content.held
            self.lost += [(f"{node}.{how}", HOOK) for how in {*now, *then} if now.get(how) != then.get(how)]

    def _forget(self, gone: set[int], nodes: Sequence[Node]) -> None:
        """Tell an object that holds a new one, at the address of another that is gone, from what it was."""
        known, changed = self._known, dict[int, Met]()
        for one in nodes:
            children = [child for _, _, child in kinds.look_into(one.value).children()]
            inside = {*map(id, [type(one.value), *children])}
            if (met := self.known(one.value)) is not None and inside & gone:
                self._same |= {id(one.value): False} if id(one.value) in self._same else {}
                changed[id(one.value)] = met._replace(content=met.content and met.content.but(gone))
        self._known = lambda at: changed.get(at) or known(at)

    def keep_constants(self, digests: dict[int, str]) -> None:
        """Note digests of what has not changed, known from earlier looks, and the values of small ones."""
        size = 0
        for node in self._constants:
            value = node.value
            entry = self.entries[self._number(value, str(node))]
            digests.setdefault(id(value), "")
            digests[id(value)] = digests[id(value)] or constants.digest_of(value)
            size += constants.size_of(value)
            entry["constant"] = [digests[id(value)], None]
            if size <= constants.LARGEST:
                # That of some class may be none that can be stored.
                with contextlib.suppress(Hole):
                    entry["constant"][1] = WRITERS[node.kind](self, value, None, str(node))

    def _is_in_state(self, node: Node) -> bool:
        """Whether an object above, which is no part, has this one in its own state."""
        holder = libraries.holder(node)
        is_lacking = node.kind in libraries.OWN or issubclass(type(node.value), torch.nn.Parameter)
        return holder is not None and not is_lacking and self._owned.covered(holder) is None

    def _is_foreign(self, node: Node) -> bool:
        """Whether an object in one of a library may not be filled."""
        if node.kind in ("library", *libraries.OWN) or not libraries.is_inside(_kinds_above(node)):
            return False
        return node.kind not in libraries.FILLED or not libraries.is_data(node.value)

    def known(self, value: Any) -> Met | None:
        """Return an object as it was when the loop began; None if it was not there."""
        met = self._known(id(value))
        return met if met is not None and met.is_of(value) else None

    def is_unchanged(self, value: Any) -> bool:
        """Whether a value is an atom, or an object that was there before with the same content."""
        if contents.is_atom(value) or self._owned.name(value) is not None:
            return True
        if id(value) in self._same:
            return self._same[id(value)]
        met = self.known(value)
        return met is not None and self._is_as_met(met, Node(value))

    def _is_as_met(self, met: Met, node: Node) -> bool:
        return met.content is not None and met.content == self.content(node)

    def content(self, node: Node) -> Content:
        """Return what of an object counts: of one that gives its state that, of long rows their columns."""
        value, kind = node.value, node.kind
        if kind == "tensor" and self._owned.name(value):
            hooks = node.inside().groups.items()
            return Content((), {how: Held(some) for how, some in hooks if how.endswith("_hooks") and some})
        if kind not in _WITH_STATE:
            return node.inside().content()
        if kind == "list":
            table = self.table(value)
            return node.inside().content() if table is None else Content((columns.digest(table),))
        if (covered := self._owned.covered(value)) is not None:
            return node.inside().without(covered).content()
        if libraries.has_state(value, kind):
            return libraries.state_content(value)
        if kind == "library" and libraries.is_compiled(value):
            return libraries.compiled_content(value)
        return node.inside().content()

    def attributes(self, value: Any) -> dict[str, Any]:
        """Return the attributes of an object that nothing else restores."""
        return dict(kinds.look_into(value).without(self._owned.covered(value) or ()).groups["attribute"])

    def table(self, value: Any) -> Table | None:
        """Return the rows of a long list by columns, if they are of one kind."""
        if len(value) < columns.FEWEST:
            return None
        if id(value) not in self._tables:
            self._tables[id(value)] = value, columns.table_of(value)
        return self._tables[id(value)][1]

    def is_known(self, value: Any) -> bool:
        """Whether a value needs no entry of its own: it was there before, and is told by its path."""
        if contents.is_atom(value) or self._owned.name(value) is not None:
            return True
        met = self.known(value)
        return met is not None and (met.kind not in _IMMUTABLE or self._is_as_before(value, met))

    def bound(self, variables: Iterable[tuple[str, Any]], remade: Collection[str] = ()) -> list[list[Any]]:
        """Return variables as a tree has them, without those that cannot be stored.

        `remade`: the variables that the script's lines before an inner loop make again.
        """
        found = []
        for name, one in variables:
            lost = len(self.lost)
            try:
                found.append([name, self.value(one, name)])
            except Hole as hole:
                self.lost.append((name, str(hole)))
            # A network depends on what was trained.
            if name in remade and len(self.lost) > lost and kinds.kind_of(one) != "network":
                del self.lost[lost:]
                self.entries[self._numbers[id(one)]] = {"hole": ""}
        return found

    def value(self, value: Any, where: str) -> Any:
        """Return a value as a tree has it: an atom, or the number of an entry."""
        if contents.is_atom(value):
            return atoms.out(value)
        return {"entry": self._number(value, where)}

    def _number(self, value: Any, where: str) -> int:
        if (number := self._numbers.get(id(value))) is not None:
            return number
        number = self._numbers[id(value)] = len(self.entries)
        self.objects.append(value)
        entry: Entry = {}
        self.entries.append(entry)
        try:
            entry |= self._entry(value, where)
        except (Hole, RecursionError) as hole:
            entry["hole"] = str(hole)
            self.lost.append((where, str(hole)))
        return number

    def _entry(self, value: Any, where: str) -> Entry:
        if (name := self._owned.name(value)) is not None:
            return {"owned": name}
        kind, met = kinds.kind_of(value), self.known(value)
        entry: Entry = {"kind": kind, "class": class_name(type(value))}
        if libraries.is_imported(value):
            raise Hole(f"{value!r}, which the script has imported")
        if met is not None and (kind not in _IMMUTABLE or self._is_as_before(value, met)):
            entry |= {"class": class_name(met.of), "at": [list(step) for step in met.path]}
            if kind in _IMMUTABLE or self.is_unchanged(value):
                return entry
        elif held := signs.live(value) or signs.inside(value):
            raise Hole(held if signs.live(value) else f"it holds {held}")
        elif kind in ("network", "library") and making.can_be_made(value, kind):
            return entry | making.content(self, value, where) | class_of(self, value, where)
        elif kind in ("function", "class", "library", "network"):
            raise Hole(f"a {type(value).__name__} that was made in the loop")
        before = met.content if met is not None and "at" in entry else None
        return entry | WRITERS[kind](self, value, before, where)

    def _is_as_before(self, value: Any, met: Met) -> bool:
        """Whether an object that cannot be filled in place is the same all through."""
        inside = kinds.look_into(value)
        return met.content == inside.content() and all(self.is_known(one) for _, _, one in inside.children())

    def items(self, values: list[Any], where: str) -> Any:
        """Return values as a tree has them; many numbers of one type as an array."""
        types = {*map(type, values)}
        if len(values) > _MANY and len(types) == 1 and (dtype := _NUMBERS.get(next(iter(types)))):
            try:
                return np.array(values, dtype)
            except OverflowError:
                # An integer of more than eight bytes.
                pass
        return [self.value(one, f"{where}[{number}]") for number, one in enumerate(values)]

    def pairs(self, held: Iterable[tuple[Any, Any]], before: Content | None, where: str, how: str) -> Entry:
        """Return the items of a dict, or the attributes of an object: all, or those that have changed."""
        pairs = [*held]
        is_by_name = before is not None and how in before.held and "value" not in before.held
        old = before.marks(how) if before and is_by_name else None
        # A key of another type has no name, and code of its own.
        old = old if kinds.KEYS.issuperset(type(key) for key, _ in pairs) else None
        now = {key for key, _ in pairs} if old is not None else ()
        gone = [key for key in old or () if key not in now]
        old = None if float in map(type, gone) else old
        if old is not None:
            pairs = [(key, one) for key, one in pairs if old.get(key, ()) != mark(one)]
        if before is not None:
            pairs = [(key, one) for key, one in pairs if self._may_be_at(Step(how, key), one, where)]
        entry: Entry = {
            "set": [
                [self.value(key, where), self.value(one, f"{where}{Step(how, key)}")] for key, one in pairs
            ]
        }
        if old is None:
            return entry | {"is_all": True}
        return entry | ({"gone": gone} if gone else {})

    def _may_be_at(self, step: Step, value: Any, where: str) -> bool:
        place = str(step)
        is_right = self._places is None or libraries.may_be_at(place, value, self._places)
        if not is_right:
            self.lost.append((f"{where}{place}", libraries.no_place(value)))
        return is_right


def _kinds_above(node: Node) -> Iterator[str]:
    above = node.owner
    while above is not None:
        yield above.kind
        above = above.owner
