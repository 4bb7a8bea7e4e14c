"""What single statements of Python do: what they read, assign, show, and decide, as their source has it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
DECIDING = (ast.If, *LOOPS)
_LEAVING = (ast.Break, ast.Continue, ast.Return)
CLOCKS = {".time", ".perf_counter", ".monotonic", ".time_ns", ".now", "perf_counter", "monotonic"}
SHUFFLES = {"shuffle", "shuffle_", "heappush", "heappop"}
"""What changes its argument in place, by what it has become before."""
RESTORING = {".vars", ".best", ".samples", ".metrics", ".epoch", ".step", ".batch", ".resumed"}
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


def name_of(node: ast.AST) -> str:
    """Return the name that a node reads or assigns; that of an attribute begins with a dot."""
    if isinstance(node, ast.Name):
        return node.id
    return f".{node.attr}" if isinstance(node, ast.Attribute) else ""


def is_for_show(function: str) -> bool:
    words = ("__str__", "__repr__", "summary", "report", "display", "log", "print", "show", "plot")
    return any(word in function.lower() for word in words)


def flattened(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements and those inside them, without those of functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
            inner = (node for node in ast.iter_child_nodes(statement))
            for node in inner:
                if isinstance(node, ast.stmt):
                    yield from flattened([node])
                elif isinstance(node, (ast.ExceptHandler, ast.match_case)):
                    yield from flattened(node.body)


def heads_of(statement: ast.stmt) -> list[ast.AST]:
    """Return the expressions of a statement, without the statements inside it."""
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return []
    others = (ast.stmt, ast.ExceptHandler, ast.match_case)
    return [node for node in ast.iter_child_nodes(statement) if not isinstance(node, others)]


def own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    for head in heads_of(statement):
        yield from ast.walk(head)


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the variables, and the attributes with a dot, that are read."""
    every = [node for root in nodes for node in ast.walk(root)]
    # (the last item is what the same pass has added)
    last = {id(node.value) for node in every if isinstance(node, ast.Subscript) and _is_last(node.slice)}
    every = [node for node in every if id(node) not in last]
    return {name for node in every if (name := name_of(node)) and isinstance(node.ctx, ast.Load)}  # type: ignore[attr-defined]


def _is_last(node: ast.expr) -> bool:
    is_minus = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    return is_minus and isinstance(node.operand, ast.Constant) and node.operand.value == 1  # type: ignore[attr-defined]


def name_called(node: ast.AST) -> str:
    """Return the last name of what is called."""
    return name_of(node.func).removeprefix(".") if isinstance(node, ast.Call) else ""


def is_shown(statement: ast.stmt) -> bool:
    """Whether a statement only shows something."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call):
        return False
    receiver = name_of(call.func.value).lower() if isinstance(call.func, ast.Attribute) else ""
    return name_called(call) in _SHOWS or any(word in receiver for word in _BARS)


def what_grows(statement: ast.stmt) -> ast.AST | None:
    """Return what a statement such as `losses.append(loss)` adds to."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _GROWS:
        return call.func.value
    return None


def targets_of(statement: ast.stmt) -> set[str]:
    """Return what a statement assigns: variables, also those an item of which it assigns, and .attributes."""
    if isinstance(statement, ast.Assign):
        targets = [*statement.targets]
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign, ast.For, ast.AsyncFor)):
        targets = [statement.target]
    else:
        targets = [node.target for node in own_nodes(statement) if isinstance(node, ast.NamedExpr)]
    found = set()
    for target in targets:
        for node in [target, *ast.walk(target)] if isinstance(target, (ast.Tuple, ast.List)) else [target]:
            while isinstance(node, (ast.Subscript, ast.Starred)):
                node = node.value
            found.add(name_of(node))
    return found - {""}


def bases_of(statement: ast.stmt) -> set[str]:
    """Return the variables an item of which a statement assigns."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets = [statement.target] if isinstance(statement, ast.AugAssign) else targets
    return {name_of(target.value) for target in targets if isinstance(target, ast.Subscript)}


def values_of(statement: ast.stmt) -> list[ast.AST]:
    """Return the expressions that a statement makes its targets of."""
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        return [statement.iter]
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return [statement.value] if statement.value else []
    return heads_of(statement)


def used_for_more(statement: ast.stmt, *, is_module: bool) -> set[str]:
    """Return the variables that a statement itself uses for more than for what it assigns or shows."""
    if isinstance(statement, FUNCTIONS):
        # (those of a module are looked at by themselves)
        return set() if is_module else names_in(statement.body)
    if isinstance(statement, (ast.Raise, ast.Assert)):
        return set()
    if is_shown(statement) or what_grows(statement):
        # (what it calls on the way may draw, or train)
        call = statement.value  # type: ignore[attr-defined]
        inner = (node for node in ast.walk(call) if isinstance(node, ast.Call) and node is not call)
        return names_in(node for node in inner if name_called(node) not in _PURE)
    if isinstance(statement, (ast.Expr, ast.Return)):
        return names_in(heads_of(statement))
    if any(name.startswith(".") for name in targets_of(statement)):
        return names_in(values_of(statement))
    calls = (node for node in own_nodes(statement) if isinstance(node, ast.Call))
    return names_in(node for node in calls if name_called(node) not in _PURE)


def decides(statement: ast.If | Loop, mattering: set[str]) -> bool:
    """Whether what depends on a condition, or on how often a loop runs, matters."""
    for inner in flattened([*statement.body, *statement.orelse]):
        targets = targets_of(inner)
        is_effect = isinstance(inner, _LEAVING) or any(name.startswith(".") for name in targets)
        if is_effect or used_for_more(inner, is_module=True) or targets & mattering:
            return True
    return False


def counts_batches(node: ast.expr) -> bool:
    return name_called(node) == "enumerate" and any(
        name_called(inner) == "batches" for inner in ast.walk(node)
    )
