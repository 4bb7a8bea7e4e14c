"""The statements of one module or one function: its loops, and what depends on its variables."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cached_property

from .statements import (
    CLOCKS,
    DECIDING,
    LOOPS,
    RESTORING,
    Loop,
    bases_of,
    counts_batches,
    decides,
    flattened,
    heads_of,
    is_shown,
    name_of,
    names_in,
    own_nodes,
    targets_of,
    used_for_more,
    values_of,
    what_grows,
)


class Unit:
    """The statements of a module or a function, without those of the functions inside it."""

    def __init__(self, body: Sequence[ast.stmt], *, is_module: bool) -> None:
        self.is_module = is_module
        self._statements = [*flattened(body)]

    def first_line(self, name: str) -> int:
        """Return the first line that assigns a variable; 0: none does."""
        return self._names.get(name, 0)

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return [node for statement in self._statements for node in own_nodes(statement)]

    @cached_property
    def foreign(self) -> set[str]:
        """The attributes of other objects than `self` that are assigned here."""
        return {
            f".{node.attr}"
            for node in self._nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        }

    @cached_property
    def _loops(self) -> list[Loop]:
        return [node for node in self._statements if isinstance(node, LOOPS)]

    def loops_around(self, line: int) -> list[Loop]:
        """Return the loops around a line, the outermost first."""
        return [loop for loop in self._loops if loop.lineno <= line <= (loop.end_lineno or 0)]

    def loops_at(self, line: int) -> list[Loop]:
        """Return the loops around a line; where there is none, all that are in no other."""
        if around := self.loops_around(line):
            return around
        inner = {id(node) for loop in self._loops for node in flattened(loop.body)}
        return [loop for loop in self._loops if id(loop) not in inner]

    def counting(self, loops: Sequence[Loop]) -> set[str]:
        """Return the names that count the batches of a loop by `enumerate`."""
        return {
            node.target.elts[0].id
            for node in loops
            if isinstance(node, ast.For)
            and isinstance(node.target, ast.Tuple)
            and isinstance(node.target.elts[0], ast.Name)
            and counts_batches(node.iter)
        }

    @cached_property
    def _loop_targets(self) -> set[str]:
        return {name for loop in self._loops if not isinstance(loop, ast.While) for name in targets_of(loop)}

    @cached_property
    def restored(self) -> set[str]:
        """The variables and .attributes that are assigned from what a RunState has, outside of all loops."""
        inner = {id(node) for loop in self._loops for node in flattened(loop.body)}
        return {
            name
            for statement in self._statements
            if id(statement) not in inner and names_in(values_of(statement)) & RESTORING
            for name in targets_of(statement)
        }

    def is_used(self, name: str) -> bool:
        """Whether a variable is named here at all."""
        return name in self._names

    @cached_property
    def _names(self) -> dict[str, int]:
        """By variable: the first line that assigns it, or 0."""
        found: dict[str, int] = {}
        for node in self._nodes:
            if isinstance(node, ast.Name):
                line = node.lineno if isinstance(node.ctx, ast.Store) else 0
                found[node.id] = min(filter(None, (line, found.get(node.id))), default=0)
        return found

    @cached_property
    def attributes_read(self) -> set[str]:
        """The attributes that are read for more than to be shown, to grow, or to be assigned again."""
        found = set()
        for statement in self._statements:
            if is_shown(statement):
                continue
            own, grown = targets_of(statement), what_grows(statement)
            for node in own_nodes(statement):
                is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
                if is_read and node is not grown and (read := name_of(node)) not in own:
                    found.add(read.removeprefix("."))
        return found

    def matters(self, name: str) -> bool:
        """Whether something that is not shown depends on a variable; what a clock says never does."""
        return name in self._mattering and name not in self._clocks

    @cached_property
    def _sources(self) -> dict[str, set[str]]:
        """By variable: those that its value is made of."""
        found: dict[str, set[str]] = {}
        for statement in self._statements:
            read = names_in(values_of(statement))
            for target in targets_of(statement):
                if not target.startswith("."):
                    found.setdefault(target, set()).update(read)
            if grown := name_of(what_grows(statement) or statement):
                found.setdefault(grown, set()).update(read)
        return found

    @cached_property
    def _clocks(self) -> set[str]:
        """The variables that are made of what a clock says, directly or not."""
        found: set[str] = set()
        while True:
            more = {name for name, read in self._sources.items() if read & (found | CLOCKS)}
            if more <= found:
                return found
            found |= more

    @cached_property
    def _mattering(self) -> set[str]:
        """The variables that something depends on which is more than shown, directly or not."""
        found: set[str] = set()
        for statement in self._statements:
            found |= used_for_more(statement, is_module=self.is_module)
            if bases_of(statement) & self._loop_targets:
                # (an item of another object: the learning rate in a group of an optimizer)
                found |= names_in(values_of(statement))
        while True:
            more = {name for target in found for name in self._sources.get(target, ())}
            for statement in self._statements:
                if isinstance(statement, DECIDING) and decides(statement, found):
                    more |= names_in(heads_of(statement))
            if more <= found:
                return found
            found |= more
