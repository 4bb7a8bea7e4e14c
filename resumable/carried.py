"""Which names of a script a loop carries from one pass to the next, as its source has it."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


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


class _Flow:
    """What a body reads before it assigns it (exposed), and what it assigns: at all, and on every path."""

    def __init__(self, script: Script) -> None:
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
        if isinstance(node, _LOOPS):
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
        elif isinstance(node, _FUNCTIONS):
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
            if name := _name(node.target):
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
        if name := _name(node):
            is_stored = isinstance(node.ctx, ast.Store)  # type: ignore[attr-defined]
            self.store(name) if is_stored else self.read(name)
        if isinstance(node, ast.Call):
            if _called(node) in _SHUFFLES:
                self.stored |= {name for argument in node.args if (name := _name(argument))}
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            for exposed, stored, definite in self._script.effects(called):
                for name in exposed:
                    self.read(name)
                self.stored |= stored
                self.definite |= definite

    def _comprehension(self, node: ast.expr) -> None:
        inner = _Flow(self._script)
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


_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))


def _name(node: ast.AST) -> str:
    """Return the name that a node reads or assigns; that of an attribute begins with a dot."""
    if isinstance(node, ast.Name):
        return node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) else ""


_Effect = tuple[set[str], set[str], set[str]]


class Script:
    """The source of one file."""

    def __init__(self, tree: ast.Module, words: frozenset[str]) -> None:
        self._tree = tree
        self._words = words
        self._effects: dict[ast.AST, _Effect] = {}
        self._flows: dict[ast.AST, _Flow] = {}
        self._units: dict[ast.AST, _Unit] = {}
        self._facts: dict[tuple[Any, ...], Fact | None] = {}

    @cached_property
    def _functions(self) -> list[Function]:
        return [node for node in ast.walk(self._tree) if isinstance(node, _FUNCTIONS)]

    def effects(self, called: str) -> list[_Effect]:
        """Return what a function of the file does to names that are not its own."""
        return [self.effect(node) for node in self._by_name.get(called, ())]

    @cached_property
    def _by_name(self) -> dict[str, list[Function]]:
        found: dict[str, list[Function]] = {}
        for node in self._functions:
            found.setdefault(node.name, []).append(node)
        return found

    def effect(self, node: Function | ast.Lambda) -> _Effect:
        """Return the names not its own that a function reads first, assigns, and assigns on every path."""
        if node not in self._effects:
            self._effects[node] = set(), set(), set()  # (for one that calls itself)
            flow = self._flow(node)
            declared = {name for one in ast.walk(node) if isinstance(one, _DECLARED) for name in one.names}
            arguments = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
            own = {name for name in flow.stored | arguments if not name.startswith(".")} - declared
            self._effects[node] = flow.exposed - own, flow.stored - own, flow.definite - own
        return self._effects[node]

    def _flow(self, node: ast.AST) -> _Flow:
        """Return the flow through one pass of a loop, or one call of a function."""
        if node not in self._flows:
            self._flows[node] = flow = _Flow(self)
            if isinstance(node, _LOOPS):
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

    def _unit_of(self, function: tuple[str, int] | None) -> _Unit | None:
        if function is None:
            return self._unit(self._tree)
        return next((self._unit(node) for node in self._functions if _is_at(node, *function)), None)

    def _unit(self, node: ast.AST) -> _Unit:
        if node not in self._units:
            self._units[node] = _Unit(node.body, is_module=node is self._tree)  # type: ignore[attr-defined]
        return self._units[node]

    def _use(self, unit: _Unit, name: str, loops: Sequence[Loop]) -> Use:
        storing = [loop for loop in loops if name in self._flow(loop).stored]
        is_read_elsewhere = unit.is_module and self._is_read_in_a_function(name)
        matters = is_read_elsewhere or unit.matters(name)
        if unit.restores(name):
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

    def _is_read_in_a_function(self, name: str) -> bool:
        return any(name in self.effect(node)[0] and not _is_for_show(node.name) for node in self._functions)

    def attribute(self, name: str, kinds: Sequence[str]) -> Fact | None:
        """Return what is done with an attribute of a class of these names; None: nothing here."""
        # (a project has hundreds of files, and an attribute is named in a few of them)
        if name not in self._words:
            return None
        key = name, *kinds, None
        if key not in self._facts:
            self._facts[key] = self._fact_of_attribute(name, kinds)
        return self._facts[key]

    def _fact_of_attribute(self, name: str, kinds: Sequence[str]) -> Fact | None:
        dotted = f".{name}"
        uses = {*self._uses_in_methods(dotted, kinds), *self._uses_outside(dotted)}
        line = min((line for line in self._lines_of_attribute(name)), default=0)
        matters = self._attribute_matters(name)
        if not uses:
            return Fact(Use.KEPT if matters else Use.SHOWN, line) if line else None
        if any(unit.restores(dotted) for unit in map(self._unit, (self._tree, *self._functions))):
            return Fact(Use.RESTORED, line)
        if Use.RESET in uses:
            return Fact(Use.RESET, line)
        use = Use.CARRIED if Use.CARRIED in uses else Use.SET
        return Fact(use if matters else Use.SHOWN, line)

    def _methods(self, kinds: Sequence[str]) -> Iterator[Function]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ClassDef) and node.name in kinds:
                yield from (one for one in node.body if isinstance(one, _FUNCTIONS))

    def _uses_in_methods(self, dotted: str, kinds: Sequence[str]) -> Iterator[Use]:
        for method in self._methods(kinds):
            flow = self._flow(method)
            if dotted not in flow.stored or method.name in _MAKERS:
                continue
            if dotted in flow.exposed or dotted not in flow.definite:
                yield Use.CARRIED
            else:
                yield Use.RESET if any(word in method.name for word in _RESETS) else Use.SET

    def _uses_outside(self, dotted: str) -> Iterator[Use]:
        """Yield how the loops of the file's functions, and its own, assign an attribute of another object."""
        for node in (self._tree, *self._functions):
            for loop in self._unit(node).loops_at(0):
                flow = self._flow(loop)
                if dotted in self._unit(node).foreign and dotted in flow.stored:
                    is_carried = dotted in flow.exposed or dotted not in flow.definite
                    yield Use.CARRIED if is_carried else Use.SET

    def _lines_of_attribute(self, name: str) -> Iterator[int]:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
                yield node.lineno
            elif isinstance(node, ast.AnnAssign) and _name(node.target) == name:
                # (a field of a dataclass)
                yield node.lineno

    def _attribute_matters(self, name: str) -> bool:
        units = [self._unit(node) for node in self._functions if not _is_for_show(node.name)]
        return any(unit.reads_attribute(name) for unit in (self._unit(self._tree), *units))


_DECLARED = (ast.Global, ast.Nonlocal)
_MAKERS = frozenset({"__init__", "__post_init__", "__new__", "setup", "load_state_dict", "__setstate__"})
_RESETS = ("reset", "clear", "zero")


def _is_at(node: Function, name: str, line: int) -> bool:
    lines = {node.lineno, *(one.lineno for one in node.decorator_list)}
    return node.name == name and line in lines


class _Unit:
    """The statements of a module or a function, without those of the functions inside it."""

    def __init__(self, body: Sequence[ast.stmt], *, is_module: bool) -> None:
        self.is_module = is_module
        self._statements = [*_flattened(body)]

    def first_line(self, name: str) -> int:
        """Return the first line that assigns a variable."""
        stores = (node for node in self._nodes if isinstance(node, ast.Name) and node.id == name)
        return min((node.lineno for node in stores if isinstance(node.ctx, ast.Store)), default=0)

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        return [node for statement in self._statements for node in _own_nodes(statement)]

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
        return [node for node in self._statements if isinstance(node, _LOOPS)]

    def loops_around(self, line: int) -> list[Loop]:
        """Return the loops around a line, the outermost first."""
        return [loop for loop in self._loops if loop.lineno <= line <= (loop.end_lineno or 0)]

    def loops_at(self, line: int) -> list[Loop]:
        """Return the loops around a line; where there is none, all that are in no other."""
        if around := self.loops_around(line):
            return around
        inner = {id(node) for loop in self._loops for node in _flattened(loop.body)}
        return [loop for loop in self._loops if id(loop) not in inner]

    def counting(self, loops: Sequence[Loop]) -> set[str]:
        """Return the names that count the batches of a loop by `enumerate`."""
        return {
            node.target.elts[0].id
            for node in loops
            if isinstance(node, ast.For)
            and isinstance(node.target, ast.Tuple)
            and isinstance(node.target.elts[0], ast.Name)
            and _counts_batches(node.iter)
        }

    @cached_property
    def _loop_targets(self) -> set[str]:
        return {name for loop in self._loops if not isinstance(loop, ast.While) for name in _targets(loop)}

    def restores(self, name: str) -> bool:
        """Whether a variable, or a .attribute, is assigned from what a RunState has, outside of all loops."""
        inner = {id(node) for loop in self._loops for node in _flattened(loop.body)}
        return any(
            name in _targets(statement) and _names_in(_values(statement)) & _RESTORING
            for statement in self._statements
            if id(statement) not in inner
        )

    def is_used(self, name: str) -> bool:
        """Whether a variable is read here at all."""
        return any(isinstance(node, ast.Name) and node.id == name for node in self._nodes)

    def reads_attribute(self, name: str) -> bool:
        """Whether an attribute is read for more than to be shown, to grow, or to be assigned again."""
        for statement in self._statements:
            if _is_shown(statement) or f".{name}" in _targets(statement):
                continue
            grown = _grown(statement)
            for node in _own_nodes(statement):
                is_read = isinstance(node, ast.Attribute) and node.attr == name
                if is_read and isinstance(node.ctx, ast.Load) and node is not grown:  # type: ignore[attr-defined]
                    return True
        return False

    def matters(self, name: str) -> bool:
        """Whether something that is not shown depends on a variable; what a clock says never does."""
        return name in self._mattering and name not in self._clocks

    @cached_property
    def _sources(self) -> dict[str, set[str]]:
        """By variable: those that its value is made of."""
        found: dict[str, set[str]] = {}
        for statement in self._statements:
            read = _names_in(_values(statement))
            for target in _targets(statement):
                if not target.startswith("."):
                    found.setdefault(target, set()).update(read)
            if grown := _name(_grown(statement) or statement):
                found.setdefault(grown, set()).update(read)
        return found

    @cached_property
    def _clocks(self) -> set[str]:
        """The variables that are made of what a clock says, directly or not."""
        found: set[str] = set()
        while True:
            more = {name for name, read in self._sources.items() if read & (found | _CLOCKS)}
            if more <= found:
                return found
            found |= more

    @cached_property
    def _mattering(self) -> set[str]:
        """The variables that something depends on which is more than shown, directly or not."""
        found: set[str] = set()
        for statement in self._statements:
            found |= _used_for_more(statement, is_module=self.is_module)
            if _bases(statement) & self._loop_targets:
                # (an item of another object: the learning rate in a group of an optimizer)
                found |= _names_in(_values(statement))
        while True:
            more = {name for target in found for name in self._sources.get(target, ())}
            for statement in self._statements:
                if isinstance(statement, _DECIDING) and _decides(statement, found):
                    more |= _names_in(_heads(statement))
            if more <= found:
                return found
            found |= more


_DECIDING = (ast.If, *_LOOPS)
_LEAVING = (ast.Break, ast.Continue, ast.Return)
_CLOCKS = {".time", ".perf_counter", ".monotonic", ".time_ns", ".now", "perf_counter", "monotonic"}
_SHUFFLES = {"shuffle", "shuffle_", "heappush", "heappop"}
"""What changes its argument in place, by what it has become before."""
_RESTORING = {".vars", ".best", ".samples", ".metrics", ".epoch", ".step", ".batch", ".resumed"}
_GROWS = {"append", "extend", "add", "appendleft", "update", "insert", "setdefault"}
_SHOWS = {
    *("print", "log", "info", "debug", "warning", "display", "write", "writerow", "flush", "note"),
    *("add_scalar", "add_scalars", "add_image", "add_images", "add_histogram", "add_text", "add_figure"),
    *("set_postfix", "set_postfix_str", "set_description", "set_description_str"),
    *("log_metric", "log_metrics", "log_dict", "log_scalar", "plot", "pprint", "track"),
}
_BARS = ("bar", "tqdm", "progress", "plt", "writer")
_PURE = {
    *("max", "min", "sum", "len", "float", "int", "abs", "round", "sorted", "isinstance", "str", "format"),
    *("bool", "list", "dict", "set", "tuple", "range", "enumerate", "zip", "any", "all", "divmod", "pow"),
    *("repr", "type", "deque", "defaultdict", "item", "mean", "std", "cpu", "detach", "tolist", "numpy"),
    *("time", "perf_counter", "monotonic", "time_ns", "now", "sqrt", "exp", "log", "median", "average"),
    *("size", "numel", "get", "items", "keys", "values", "copy", "join", "split", "isnan", "isfinite"),
    *("isinf", "tensor", "argmax", "eq", "long", "clone", "to", "view", "reshape", "flatten", "ceil"),
    *(
        "floor",
        "check",
        "timedelta",
        "get_last_lr",
        "max_memory_allocated",
        "memory_allocated",
        "lower",
        "log10",
        "log2",
        "stack",
        "cat",
        "norm",
        "element_size",
        "total_seconds",
        "strftime",
    ),
}
"""What is called only for what it returns."""


def _is_for_show(function: str) -> bool:
    words = ("__str__", "__repr__", "summary", "report", "display", "log", "print", "show", "plot")
    return any(word in function.lower() for word in words)


def _flattened(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements and those inside them, without those of functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            inner = (node for node in ast.iter_child_nodes(statement))
            for node in inner:
                if isinstance(node, ast.stmt):
                    yield from _flattened([node])
                elif isinstance(node, (ast.ExceptHandler, ast.match_case)):
                    yield from _flattened(node.body)


def _heads(statement: ast.stmt) -> list[ast.AST]:
    """Return the expressions of a statement, without the statements inside it."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return []
    others = (ast.stmt, ast.ExceptHandler, ast.match_case)
    return [node for node in ast.iter_child_nodes(statement) if not isinstance(node, others)]


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    for head in _heads(statement):
        yield from ast.walk(head)


def _names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the variables, and the attributes with a dot, that are read."""
    every = [node for root in nodes for node in ast.walk(root)]
    # (the last item is what the same pass has added)
    last = {id(node.value) for node in every if isinstance(node, ast.Subscript) and _is_last(node.slice)}
    every = [node for node in every if id(node) not in last]
    return {name for node in every if (name := _name(node)) and isinstance(node.ctx, ast.Load)}  # type: ignore[attr-defined]


def _is_last(node: ast.expr) -> bool:
    is_minus = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    return is_minus and isinstance(node.operand, ast.Constant) and node.operand.value == 1  # type: ignore[attr-defined]


def _called(node: ast.AST) -> str:
    """Return the last name of what is called."""
    return _name(node.func).removeprefix(".") if isinstance(node, ast.Call) else ""


def _is_shown(statement: ast.stmt) -> bool:
    """Whether a statement only shows something."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    receiver = _name(call.func.value).lower() if isinstance(call.func, ast.Attribute) else ""
    return _called(call) in _SHOWS or any(word in receiver for word in _BARS)


def _grown(statement: ast.stmt) -> ast.AST | None:
    """Return what a statement such as `losses.append(loss)` adds to."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _GROWS:
        return call.func.value
    return None


def _targets(statement: ast.stmt) -> set[str]:
    """Return what a statement assigns: variables, also those an item of which it assigns, and .attributes."""
    if isinstance(statement, ast.Assign):
        targets = [*statement.targets]
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
        targets = [statement.target]
    else:
        targets = [node.target for node in _own_nodes(statement) if isinstance(node, ast.NamedExpr)]
    found = set()
    for target in targets:
        for node in [target, *ast.walk(target)] if isinstance(target, (ast.Tuple, ast.List)) else [target]:
            while isinstance(node, (ast.Subscript, ast.Starred)):
                node = node.value
            found.add(_name(node))
    return found - {""}


def _bases(statement: ast.stmt) -> set[str]:
    """Return the variables an item of which a statement assigns."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AugAssign) else targets
    return {_name(target.value) for target in targets if isinstance(target, ast.Subscript)}


def _values(statement: ast.stmt) -> list[ast.AST]:
    """Return the expressions that a statement makes its targets of."""
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        return [statement.iter]
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return [statement.value] if statement.value else []
    return _heads(statement)


def _used_for_more(statement: ast.stmt, *, is_module: bool) -> set[str]:
    """Return the variables that a statement itself uses for more than for what it assigns or shows."""
    if isinstance(statement, _FUNCTIONS):
        # (those of a module are looked at by themselves)
        return set() if is_module else _names_in(statement.body)
    if isinstance(statement, (ast.Raise, ast.Assert)):
        return set()
    if _is_shown(statement) or _grown(statement):
        # (what it calls on the way may draw, or train)
        call = statement.value  # type: ignore[attr-defined]
        inner = (node for node in ast.walk(call) if isinstance(node, ast.Call) and node is not call)
        return _names_in(node for node in inner if _called(node) not in _PURE)
    if isinstance(statement, (ast.Expr, ast.Return)):
        return _names_in(_heads(statement))
    if any(name.startswith(".") for name in _targets(statement)):
        return _names_in(_values(statement))
    calls = (node for node in _own_nodes(statement) if isinstance(node, ast.Call))
    return _names_in(node for node in calls if _called(node) not in _PURE)


def _decides(statement: ast.If | Loop, mattering: set[str]) -> bool:
    """Whether what depends on a condition, or on how often a loop runs, matters."""
    for inner in _flattened([*statement.body, *statement.orelse]):
        targets = _targets(inner)
        is_effect = isinstance(inner, _LEAVING) or any(name.startswith(".") for name in targets)
        if is_effect or _used_for_more(inner, is_module=True) or targets & mattering:
            return True
    return False


def _counts_batches(node: ast.expr) -> bool:
    return _called(node) == "enumerate" and any(_called(inner) == "batches" for inner in ast.walk(node))
