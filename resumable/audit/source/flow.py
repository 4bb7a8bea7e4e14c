"""What a body of Python reads before it assigns it, and what it assigns, on some path and on every one."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Protocol

from .statements import FUNCTIONS, LOOPS, SHUFFLES, Function, Loop, name_called, name_of

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))

Effect = tuple[set[str], set[str], set[str]]
"""The names not its own that a function reads first, assigns, and assigns on every path."""


class Effects(Protocol):
    """Who knows what functions do to names that are not their own."""

    def effect(self, node: Function | ast.Lambda) -> Effect:
        """Return what one does."""

    def effects(self, called: str) -> list[Effect]:
        """Return what those of a name do."""


class Flow:
    """What a body reads before it assigns it (exposed), and what it assigns: at all, and on every path."""

    def __init__(self, script: Effects) -> None:
        self._script = script
        self.exposed: set[str] = set()
        self.stored: set[str] = set()
        self.definite: set[str] = set()

    def run(self, statements: Iterable[ast.stmt]) -> bool:
        """Follow the statements; return whether their end is reached."""
        return all(self._statement(statement) for statement in statements)

    def read(self, name: str) -> None:
        """Note that a name is read."""
        if name not in self.definite:
            self.exposed.add(name)

    def store(self, name: str) -> None:
        """Note that a name is assigned."""
        self.stored.add(name)
        self.definite.add(name)

    def _statement(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.If):
            self.expression(node.test)
            return self._either(node.body, node.orelse)
        if isinstance(node, LOOPS):
            # At least one pass is taken for granted: else what a loop leaves behind would look carried.
            self.head(node)
            self.run(node.body)
            self.run(node.orelse)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self.expression(item.context_expr)
                self.expression(item.optional_vars)
            return self.run(node.body)
        elif isinstance(node, _TRIES):
            is_through = self.run(node.body)
            for handler in node.handlers:
                self._either(handler.body, [])
            return self.run([*node.orelse, *node.finalbody]) and is_through
        elif isinstance(node, ast.Match):
            self.expression(node.subject)
            for case in node.cases:
                self._either(case.body, [])
        elif isinstance(node, FUNCTIONS):
            self.store(node.name)
            self._nested(node)
        elif isinstance(node, ast.ClassDef):
            self.store(node.name)
        else:
            self._simple(node)
        return not isinstance(node, (ast.Break, ast.Continue, ast.Return, ast.Raise))

    def _either(self, body: Sequence[ast.stmt], other: Sequence[ast.stmt]) -> bool:
        before, after = set(self.definite), []
        for branch in (body, other):
            self.definite = set(before)
            if self.run(branch):
                after.append(self.definite)
        self.definite = set.intersection(*after) if after else before
        return bool(after)

    def head(self, node: Loop) -> None:
        """Follow what a loop does before its body."""
        if isinstance(node, ast.While):
            self.expression(node.test)
        else:
            self.expression(node.iter)
            self.expression(node.target)

    def _simple(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            self.expression(node.value)
            for target in node.targets:
                self.expression(target)
        elif isinstance(node, ast.AugAssign):
            self.expression(node.value)
            if name := name_of(node.target):
                self.read(name)
            self.expression(node.target)
        elif isinstance(node, ast.AnnAssign):
            self.expression(node.value)
            if node.value:
                self.expression(node.target)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                self.store((alias.asname or alias.name).partition(".")[0])
        else:
            for child in ast.iter_child_nodes(node):
                self.expression(child)

    def expression(self, node: ast.AST | None) -> None:
        """Follow what an expression reads, and a target assigns."""
        if node is None:
            return
        if isinstance(node, _COMPREHENSIONS):
            self._comprehension(node)
            return
        if isinstance(node, ast.Lambda):
            self._nested(node)
            return
        for child in ast.iter_child_nodes(node):
            self.expression(child)
        if name := name_of(node):
            is_stored = isinstance(node.ctx, ast.Store)  # type: ignore[attr-defined]
            self.store(name) if is_stored else self.read(name)
        if isinstance(node, ast.Call):
            if name_called(node) in SHUFFLES:
                self.stored |= {name for argument in node.args if (name := name_of(argument))}
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            for exposed, stored, definite in self._script.effects(called):
                for name in exposed:
                    self.read(name)
                self.stored |= stored
                self.definite |= definite

    def _comprehension(self, node: ast.expr) -> None:
        inner = Flow(self._script)
        for part in node.generators:  # type: ignore[attr-defined]
            inner.expression(part.iter)
            inner.expression(part.target)
            for test in part.ifs:
                inner.expression(test)
        for field in ("key", "value", "elt"):
            inner.expression(getattr(node, field, None))
        for name in inner.exposed:
            self.read(name)

    def _nested(self, node: Function | ast.Lambda) -> None:
        exposed, _, _ = self._script.effect(node)
        for name in exposed:
            self.read(name)
