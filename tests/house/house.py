"""The figures of the project, and the ceilings that `house.json` holds for them.

A figure belongs to a thing (all, a room, a folder, a file, a class) and a measure. A code line is a line with
code: no blank, comment or docstring. Entries of a folder are its modules and inner rooms.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).with_name("house.json")
HOUSE = json.loads(DATA.read_text())
LOOSE = ("test lines", "words of docs")
"""What may be below its ceiling; of all else the ceiling is the figure."""

RISKY = {
    "users of sys._getframe": r"\b_getframe\(",
    "users of dis": r"^\s*(import dis\b|from dis )",
    "users of ast": r"^\s*(import ast\b|from ast )",
    "users of gc.get_objects": r"gc\.get_(objects|referrers)",
    "users of ctypes": r"^\s*(import ctypes\b|from ctypes )",
}
WARNS = r"\b(?:warn|warn_of|warn_once|warnings\.warn)\("
FLAG = re.compile(
    "_*(is|has|have|may|can|was|were|are|will|must|should"
    "|needs|begins|shows|loads|counts|keeps|draws|restores|logs)_"
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COMMENT_OR_TEXT = re.compile(
    r"""#[^\n]*|(\"{3}|'{3})(?:\\.|[^\\])*?\1|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL
)

Figures = Counter[tuple[str, str]]


def count(root: Path) -> Figures:
    """Return all figures of a checkout. A room that is being built is held to the limits alone."""
    figures, package, folders = Figures(), root / "resumable", set[Path]()
    for path in package.rglob("*.py"):
        name, (source, tree) = path.relative_to(package).as_posix(), parsed(path)
        folder = path.parent.relative_to(package).as_posix().replace(".", "(top)")
        room = folder.partition("/")[0]
        folders.add(path.parent)
        figures[folder, "entries"] += 1
        figures[name, "lines of code"] = length = code_lines(source, tree)
        for class_, later, flags in classes(tree):
            figures[f"{name}:{class_}", "attributes"] = later
            figures[f"{name}:{class_}", "flags"] = flags
        if room not in HOUSE["building"]:
            for thing in ("all", room):
                figures[thing, "code lines"] += length
                figures[thing, "files"] += 1
            figures["all", "places that warn"] += len(re.findall(WARNS, source))
            for use in (use for use, pattern in RISKY.items() if re.search(pattern, source, re.MULTILINE)):
                figures[room, use] += 1
    for inner in (folder for folder in folders if package in folder.parent.parents):
        figures[inner.parent.relative_to(package).as_posix(), "entries"] += 1
    for path in (root / "tests").rglob("*.py"):
        with path.open(errors="replace") as file:
            figures["all", "test lines"] += sum(1 for _ in file)
    for path in (root / "README.md", *(root / "docs").rglob("*.md")):
        if "decisions" not in path.relative_to(root).parts:
            figures["all", "words of docs"] += len(path.read_text(errors="replace").split())
    return figures


@functools.cache
def now() -> Figures:
    """Return the figures of this checkout."""
    return count(ROOT)


@functools.cache
def ceilings() -> Figures:
    """Return the ceilings that the house names."""
    rows = [item for section in ("totals", "rooms", "exceptions") for item in HOUSE[section].items()]
    return Figures({(thing, of): row[of] for thing, row in rows for of in row if of != "why"})


def ceiling(thing: str, measure: str) -> int:
    """Return the ceiling of a figure: its own, or the limit of all such things."""
    return ceilings().get((thing, measure), HOUSE["limits"].get(measure, 0))


def said(thing: str, measure: str) -> str:
    """Return a figure beside its ceiling, in words."""
    return f"{thing}: {now()[thing, measure]:,} {measure}, ceiling {ceiling(thing, measure):,}"


def risen() -> list[tuple[str, str]]:
    """Return what is above its ceiling."""
    return [key for key, figure in now().items() if figure > ceiling(*key)]


def fallen() -> list[tuple[str, str]]:
    """Return what is below a ceiling of its own."""
    return [key for key, top in ceilings().items() if now()[key] < top]


@functools.cache
def parsed(path: Path) -> tuple[str, ast.Module]:
    """Return the source of a module, and its tree."""
    source = path.read_text("utf-8")
    return source, ast.parse(source)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements inside a node, those of inner blocks too."""
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for one in getattr(node, block, ()):
            yield one
            yield from statements(one)


def code_lines(source: str, tree: ast.Module) -> int:
    """Return how many lines of a module have code."""
    docs = set[int]()
    for node in (tree, *statements(tree)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docs.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    # Each line of a text is code, also one that is blank or begins with #.
    code = COMMENT_OR_TEXT.sub(lambda it: "" if it[0][0] == "#" else re.sub("[^\n]*", '"', it[0]), source)
    return sum(bool(line.strip(" \t\f\\")) for at, line in enumerate(code.split("\n"), 1) if at not in docs)


def classes(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """Yield each class, and how many attributes it assigns outside `__init__` and has with boolean names."""
    for class_ in (one for one in statements(tree) if isinstance(one, ast.ClassDef)):
        fields = {ast.unparse(one.target) for one in class_.body if isinstance(one, ast.AnnAssign)}
        later = set[str]()
        for method in (one for one in class_.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)):
            assigned = {name for one in statements(method) for name in attributes(one)}
            fields |= assigned
            later |= assigned if method.name != "__init__" else set()
        yield class_.name, len(later), sum(bool(FLAG.match(name)) for name in fields)


def attributes(statement: ast.AST) -> set[str]:
    """Return the attributes of `self` that a statement assigns."""
    targets = [*getattr(statement, "targets", ()), getattr(statement, "target", ast.Pass())]
    stored = [one for target in targets for one in ast.walk(target) if isinstance(one, ast.Attribute)]
    return {one.attr for one in stored if isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self"}
