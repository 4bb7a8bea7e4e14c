"""What a metric of torchmetrics has summed up, and whether a script decides anything by it."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from .statements import FUNCTIONS, name_of
from .units import Unit

COUNT = "_update_count"


def is_metric(kinds: Iterable[type]) -> bool:
    """Whether a class, given with all that it is derived from, is a metric of torchmetrics."""
    return any(one.__qualname__ == "Metric" and one.__module__ == "torchmetrics.metric" for one in kinds)


def _is_collection(kinds: Iterable[type]) -> bool:
    return any(one.__qualname__ == "MetricCollection" for one in kinds)


def of(module: Any) -> list[Any]:
    """Return the metrics that are saved as one: a metric itself, those of a collection, or none."""
    if is_metric(type(module).__mro__):
        return [module]
    inner = module.__dict__.get("_modules") if _is_collection(type(module).__mro__) else None
    there = dict.copy(inner).values() if isinstance(inner, dict) else ()
    return [one for one in there if is_metric(type(one).__mro__)]


def lost(metrics: Iterable[Any], *, is_given: bool) -> list[Any]:
    """Return the sums of metrics; of those that are given, what their state_dict leaves out."""
    found = []
    for metric in metrics:
        there = metric.__dict__
        kept = there.get("_persistent", {}) if is_given else {}
        found += [(name, there.get(name)) for name in there.get("_defaults", ()) if not kept.get(name)]
    return found


def is_own(metric: Any, name: str, *, is_given: bool) -> bool:
    """Whether an attribute is one of the sums, or one of those that every metric has."""
    if name == COUNT and is_given:
        # (a running mean is made of it, and no state_dict has it)
        reductions = metric.__dict__.get("_reductions", {}).values()
        return not any(getattr(one, "__name__", "") == "dim_zero_mean" for one in reductions)
    return name.startswith("_") or name in ("update", "compute") or name in metric.__dict__["_defaults"]


def decides(name: str, filenames: Iterable[str]) -> bool:
    """Whether what a metric computes of all that it has seen is used for more than to be shown.

    One that is begun anew now and then does not count: it may be so before each of its uses.
    """
    facts = [_facts("".join(linecache.getlines(filename))) for filename in filenames]
    return any(name in deciding for deciding, _ in facts) and not any(name in reset for _, reset in facts)


@lru_cache(maxsize=64)
def _facts(text: str) -> tuple[set[str], set[str]]:
    """Return the names of the metrics that a script decides by, and of those that it resets."""
    if ".compute()" not in text:
        return set(), set()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return set(), set()
    reset = {*_called(tree, "reset")}
    computed = {*_called(tree, "compute")}
    tree = _Marked().visit(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    units = [Unit(tree.body, is_module=True), *(Unit(node.body, is_module=False) for node in functions)]
    return {name for name in computed if any(unit.matters(f"{name}()") for unit in units)}, reset


def _called(tree: ast.AST, method: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _receiver(node, method)):
            yield name


def _receiver(node: ast.Call, method: str) -> str:
    """Return the last name of the object whose method is called; "" if it is another method."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr != method:
        return ""
    owner = node.func.value
    while isinstance(owner, ast.Subscript):
        owner = owner.value
    return name_of(owner).removeprefix(".")


class _Marked(ast.NodeTransformer):
    """Makes a variable of what a metric computes."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace one call."""
        if name := _receiver(node, "compute"):
            return ast.copy_location(ast.Name(f"{name}()", ast.Load()), node)
        return self.generic_visit(node)
