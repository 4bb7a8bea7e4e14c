"""Which names of a script a loop carries from one pass to the next, as its source has it."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from .flow import Effect, Flow
from .statements import FUNCTIONS, LOOPS, SHUFFLES, Function, Loop, is_for_show, name_called, name_of
from .units import Unit


class Use(Enum):
    """What a loop does with a name from pass to pass."""

    CARRIED = "carried"
    """A pass reads what the one before it has assigned."""
    COUNTED = "counted"
    """It counts the batches of this process: after a resume it begins at 0."""
    KEPT = "kept"
    """No pass assigns it: if it changes, it is changed in place."""
    RESET = "reset"
    """It is carried from batch to batch, and begun anew in every epoch."""
    SHOWN = "shown"
    """It is carried, but only shown: nothing that is trained depends on it."""
    SET = "set"
    """It is set by what does not read it, and read elsewhere."""
    FRESH = "fresh"
    """Every pass assigns it before it reads it."""
    RESTORED = "restored"
    """The script itself puts it back, from what RunState knows."""
    UNKNOWN = "unknown"
    """There is no source to tell."""


class Fact(NamedTuple):
    """What the source says of a name, and the line where it is first assigned (0: nowhere)."""

    use: Use
    line: int


NOBODY_KNOWS = Fact(Use.UNKNOWN, 0)


@lru_cache(maxsize=64)
def _parsed(text: str) -> Script | None:
    try:
        return Script(ast.parse(text), frozenset(re.findall(r"\w+", text)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def script(filename: str) -> Script | None:
    """Return what a file says, if its source can be had: a notebook's cell and standard input count too."""
    lines = linecache.getlines(filename)
    known = _scripts.get(filename)
    # (to join the lines of all files, for every variable in them, would take longer than all the rest)
    if known is None or known[0] is not lines:
        _scripts[filename] = known = lines, _parsed("".join(lines)) if lines else None
    return known[1]


_scripts: dict[str, tuple[list[str], Script | None]] = {}


class Script:
    """The source of one file."""

    def __init__(self, tree: ast.Module, words: frozenset[str]) -> None:
        self._tree = tree
        self._words = words
        self._effects: dict[ast.AST, Effect] = {}
        self._flows: dict[ast.AST, Flow] = {}
        self._units: dict[ast.AST, Unit] = {}
        self._facts: dict[tuple[Any, ...], Fact | None] = {}

    @cached_property
    def _functions(self) -> list[Function]:
        return [node for node in ast.walk(self._tree) if isinstance(node, FUNCTIONS)]

    def effects(self, called: str) -> list[Effect]:
        """Return what a function of the file does to names that are not its own."""
        return [self.effect(node) for node in self._by_name.get(called, ())]

    @cached_property
    def _by_name(self) -> dict[str, list[Function]]:
        found: dict[str, list[Function]] = {}
        for node in self._functions:
            found.setdefault(node.name, []).append(node)
        return found

    def effect(self, node: Function | ast.Lambda) -> Effect:
        """Return the names not its own that a function reads first, assigns, and assigns on every path."""
        if node not in self._effects:
            self._effects[node] = set(), set(), set()  # (for one that calls itself)
            flow = self._flow(node)
            declared = {name for one in ast.walk(node) if isinstance(one, _DECLARED) for name in one.names}
            arguments = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
            own = {name for name in flow.stored | arguments if not name.startswith(".")} - declared
            self._effects[node] = flow.exposed - own, flow.stored - own, flow.definite - own
        return self._effects[node]

    def _flow(self, node: ast.AST) -> Flow:
        """Return the flow through one pass of a loop, or one call of a function."""
        if node not in self._flows:
            self._flows[node] = flow = Flow(self)
            if isinstance(node, LOOPS):
                flow.head(node)
            if isinstance(node, ast.Lambda):
                flow.expression(node.body)
            else:
                flow.run(node.body)  # type: ignore[attr-defined]
        return self._flows[node]

    def variable(self, name: str, function: tuple[str, int] | None, line: int) -> Fact:
        """Return what the loops around a line do with a variable of a function, or of the module (None)."""
        unit = self._unit_of(function)
        if unit is None:
            return NOBODY_KNOWS
        loops = unit.loops_at(line)
        key = name, function, *(loop.lineno for loop in loops)
        if key not in self._facts:
            self._facts[key] = Fact(self._use(unit, name, loops), unit.first_line(name))
        return self._facts[key] or NOBODY_KNOWS

    def is_in_a_loop(self, function: tuple[str, int] | None, line: int) -> bool:
        """Whether a line of a function, or of the module, is inside a loop."""
        unit = self._unit_of(function)
        return unit is not None and bool(unit.loops_around(line))

    def of_cell(self, name: str, function: str, line: int) -> Use:
        """Return what a function does with a variable of the one around it."""
        node = next((one for one in self._functions if _is_at(one, function, line)), None)
        exposed, stored, definite = self.effect(node) if node else (set[str](), set[str](), set[str]())
        if name in stored:
            return Use.CARRIED if name in exposed or name not in definite else Use.SET
        return Use.KEPT

    def _unit_of(self, function: tuple[str, int] | None) -> Unit | None:
        if function is None:
            return self._unit(self._tree)
        return next((self._unit(node) for node in self._functions if _is_at(node, *function)), None)

    def _unit(self, node: ast.AST) -> Unit:
        if node not in self._units:
            self._units[node] = Unit(node.body, is_module=node is self._tree)  # type: ignore[attr-defined]
        return self._units[node]

    def _use(self, unit: Unit, name: str, loops: Sequence[Loop]) -> Use:
        storing = [loop for loop in loops if name in self._flow(loop).stored]
        is_read_elsewhere = unit.is_module and name in self._read_in_functions
        matters = is_read_elsewhere or unit.matters(name)
        if name in unit.restored:
            return Use.RESTORED
        if not storing:
            return Use.KEPT if matters or not unit.is_used(name) else Use.SHOWN
        if name in unit.counting(loops):
            return Use.COUNTED if matters else Use.FRESH
        if name in self._flow(storing[0]).exposed:
            return Use.CARRIED if matters else Use.SHOWN
        if any(name in self._flow(loop).exposed for loop in storing[1:]):
            return Use.RESET
        return Use.FRESH

    @cached_property
    def _read_in_functions(self) -> set[str]:
        read = (self.effect(node)[0] for node in self._functions if not is_for_show(node.name))
        return set[str]().union(*read)

    def attribute(self, name: str, kinds: Sequence[str]) -> Fact | None:
        """Return what is done with an attribute of a class of these names; None: nothing here."""
        # (a project has hundreds of files, and an attribute is assigned in a few of them)
        if name not in self._words or name not in self._assigned:
            return None
        key = name, *kinds, None
        if key not in self._facts:
            self._facts[key] = self._fact_of_attribute(name, kinds)
        return self._facts[key]

    def _fact_of_attribute(self, name: str, kinds: Sequence[str]) -> Fact | None:
        dotted = f".{name}"
        uses = {*self._uses_in_methods(dotted, kinds), *self._uses_outside.get(dotted, ())}
        line, matters = self._assigned[name], name in self._mattering
        if not uses:
            return Fact(Use.KEPT if matters else Use.SHOWN, line) if line else None
        if any(dotted in unit.restored for unit in map(self._unit, (self._tree, *self._functions))):
            return Fact(Use.RESTORED, line)
        if Use.RESET in uses:
            return Fact(Use.RESET, line)
        use = Use.CARRIED if Use.CARRIED in uses else Use.SET
        return Fact(use if matters else Use.SHOWN, line)

    @cached_property
    def _assigned(self) -> dict[str, int]:
        """By attribute: the first line that assigns it; 0 if it is only put into another order."""
        found: dict[str, int] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found[node.attr] = min(node.lineno, found.get(node.attr) or node.lineno)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                # (a field of a dataclass)
                found[node.target.id] = min(node.lineno, found.get(node.target.id) or node.lineno)
            elif isinstance(node, ast.Call) and name_called(node) in SHUFFLES:
                for argument in node.args:
                    found.setdefault(name_of(argument).removeprefix("."), 0)
        return found

    @cached_property
    def _methods(self) -> dict[str, list[Function]]:
        """By class: its methods."""
        found: dict[str, list[Function]] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).extend(one for one in node.body if isinstance(one, FUNCTIONS))
        return found

    def _uses_in_methods(self, dotted: str, kinds: Sequence[str]) -> Iterator[Use]:
        for method in (method for kind in kinds for method in self._methods.get(kind, ())):
            flow = self._flow(method)
            if dotted not in flow.stored or method.name in _MAKERS:
                continue
            if dotted in flow.exposed or dotted not in flow.definite:
                yield Use.CARRIED
            else:
                yield Use.RESET if any(word in method.name for word in _RESETS) else Use.SET

    @cached_property
    def _uses_outside(self) -> dict[str, set[Use]]:
        """By .attribute of another object: how the loops of the file's functions, and its own, assign it."""
        found: dict[str, set[Use]] = {}
        for unit in map(self._unit, (self._tree, *self._functions)):
            for flow in map(self._flow, unit.loops_at(0)):
                for dotted in unit.foreign & flow.stored:
                    is_carried = dotted in flow.exposed or dotted not in flow.definite
                    found.setdefault(dotted, set()).add(Use.CARRIED if is_carried else Use.SET)
        return found

    @cached_property
    def _mattering(self) -> set[str]:
        """The attributes that something reads which is more than shown."""
        units = [self._unit(node) for node in self._functions if not is_for_show(node.name)]
        return {name for unit in (self._unit(self._tree), *units) for name in unit.attributes_read}


_DECLARED = (ast.Global, ast.Nonlocal)
_MAKERS = frozenset({"__init__", "__post_init__", "__new__", "setup", "load_state_dict", "__setstate__"})
_RESETS = ("reset", "clear", "zero")


def _is_at(node: Function, name: str, line: int) -> bool:
    lines = {node.lineno, *(one.lineno for one in node.decorator_list)}
    return node.name == name and line in lines
