"""Writes docs/api.md from the signatures and docstrings of the public names.

The source is read, not imported: the frameworks of the integrations need not be installed. Each argument of
a public function has a line of its own below `Args:` in its docstring, each attribute a docstring.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent

CLASSES = {
    "RunState": None,
    "Preempt": None,
    "Remote": None,
    "Ranks": None,
    "Trace": None,
    "Run": ["numbers", "highest", "path_of", "open", "checkpoints"],
    "Checkpoint": ["path", "about", "verify", "pin", "look"],
    "PendingSave": ["number", "path", "wait"],
    "Boundary": None,
    "Misfit": None,
    "Unregistered": None,
}
"""The classes of the package, and which of their members a script uses; None: all public ones."""
RESULTS = [
    ("resumable.position.means", "Means", ["reset", "reduced"]),
    ("resumable.position.counted_loops", "Batches", []),
    ("resumable.position.counted_loops", "Enumerated", []),
    ("resumable.views.report", "Report", ["path"]),
]
"""What methods return and no name of the package leads to."""
FUNCTIONS = ["load_weights", "seed_everything"]
INTEGRATIONS = {"transformers": ["resume"], "lightning": ["Resumable"], "trackers": ["track", "Tracker"]}
INTEGRATED = {"Resumable": ["state"], "Tracker": ["run", "log"]}

HEAD = """# API reference

`scripts/reference` generates this page from the signatures and docstrings. [The guide](guide/README.md) explains; [errors](errors.md) has a page of its own.

| name | is |
|---|---|
{names}
| {errors} | [errors and warnings](errors.md) |
"""  # noqa: E501

Node = ast.ClassDef | ast.FunctionDef
Lines = Iterator[str]


def page() -> str:
    """Return the text of docs/api.md."""
    import resumable

    parts = []
    for name, shown in CLASSES.items():
        if name in resumable.__all__:
            parts.append(_class(getattr(resumable, name).__module__, name, shown))
    for name in FUNCTIONS:
        parts.append(_function(_found(getattr(resumable, name).__module__, name), f"resumable.{name}", 2))
    parts += [_class(*shown) for shown in RESULTS]
    shown = [name for name in [*CLASSES, *FUNCTIONS] if name in resumable.__all__]
    if lacking := sorted({*resumable.__all__} - {*shown, *_errors()}):
        raise SystemExit(f"docs/api.md does not show {lacking}. Fix: name them in scripts/api.py")
    names = "\n".join(_row(name, _summary(getattr(resumable, name))) for name in shown)
    head = HEAD.format(names=names, errors=", ".join(f"`{name}`" for name in _errors()))
    body = "\n".join("\n".join(part) for part in [*parts, _integrations()])
    body = re.sub(r"\n{3,}", "\n\n", body).strip()
    return f"{head}\n{body}\n"


def _errors() -> list[str]:
    from resumable import errors

    kinds = [errors.ResumableError, *errors.ResumableError.__subclasses__(), errors.ResumableWarning]
    return [kind.__name__ for kind in kinds]


def _summary(thing: object) -> str:
    return _marked((inspect.getdoc(thing) or "").partition("\n\n")[0])


def _row(name: str, text: str) -> str:
    return f"| [`{name}`](#{_anchor(name)}) | {text} |"


def _anchor(name: str) -> str:
    return re.sub(r"[^\w-]", "", name.lower())


def _integrations() -> Lines:
    yield "## Integrations\n"
    yield "Each has a module of its own: `from resumable.integrations.lightning import Resumable`.\n"
    for module, names in INTEGRATIONS.items():
        path = f"resumable.integrations.{module}"
        for name in names:
            node = _found(path, name)
            if isinstance(node, ast.ClassDef):
                yield from _class(path, name, INTEGRATED[name], level=3)
            else:
                yield from _function(node, f"{path}.{name}", 3)


def _found(module: str, name: str) -> Node:
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
    (node,) = [node for node in tree.body if isinstance(node, Node) and node.name == name]
    _resolve(module, node)
    return node


def _resolve(module: str, node: Node) -> None:
    """Replace defaults that are names of constants by their values."""
    for function in [one for one in ast.walk(node) if isinstance(one, ast.FunctionDef)]:
        for defaults in (function.args.defaults, function.args.kw_defaults):
            for number, default in enumerate(defaults):
                if isinstance(default, ast.Name | ast.Attribute):
                    value = eval(ast.unparse(default), vars(import_module(module)))
                    defaults[number] = ast.parse(repr(value), mode="eval").body


def _class(module: str, name: str, shown: list[str] | None, level: int = 2) -> Lines:
    node = _found(module, name)
    yield f"{'#' * level} {name}\n"
    text, arguments, example = _doc(node)
    begins = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    yield f"{text}\n"
    if begins and arguments:
        yield from _signature(name, begins[0])
        yield from _arguments(name, begins[0], arguments)
    elif arguments:
        yield from _group(name, node, arguments)
    yield from _example(example)
    fields = [(field, text) for field, _, text in _fields(node) if text and (shown is None or field in shown)]
    yield from _table("attribute", [*fields, *_properties(node, shown)], name)
    for one in _methods(node, shown):
        yield from _function(one, f"{name}.{one.name}", level + 1)


def _group(name: str, node: ast.ClassDef, told: dict[str, str]) -> Lines:
    """Yield the call of a dataclass, and its arguments."""
    taken = [(field, value or "") for field, value, _ in _fields(node)]
    words = [f"{field}={_made(value)}" for field, value in taken]
    yield f"```py\n{name}({', '.join(words)})\n```\n"
    yield from _table(
        "argument", [(word, told.get(field)) for word, (field, _) in zip(words, taken, strict=True)], name
    )


def _made(value: str) -> str:
    """Return a default as a reader would write it."""
    known = {
        "field(default_factory=dict)": "{}",
        "ON_SIGNALS": '("SIGTERM", "SIGUSR1", "SIGINT")',
        "TRACE_EVERY": "100",
    }
    return known.get(value, value)


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield the attributes that are assigned in the class or in `__init__`: name, value, docstring."""
    begins = [one.body for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    for body in [node.body, *begins]:
        for one, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(one, ast.AnnAssign | ast.Assign):
                target = one.target if isinstance(one, ast.AnnAssign) else one.targets[0]
                name = ast.unparse(target).removeprefix("self.")
                if not name.startswith("_") and "." not in name:
                    yield name, one.value and _code(one.value), _text_of(after)


def _code(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if '"' in text else text.replace("'", '"')


def _text_of(node: ast.AST | None) -> str | None:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return inspect.cleandoc(node.value.value) if is_text else None


def _is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(one) == "property" for one in node.decorator_list)


def _public(node: ast.ClassDef, shown: list[str] | None) -> Iterator[ast.FunctionDef]:
    for one in node.body:
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_"):
            # A setter and the overloads of a method have no text of their own.
            marks = [ast.unparse(mark) for mark in one.decorator_list]
            is_beside = any(mark == "overload" or mark.endswith(".setter") for mark in marks)
            if not is_beside and (shown is None or one.name in shown):
                yield one


def _properties(node: ast.ClassDef, shown: list[str] | None) -> Iterator[tuple[str, str]]:
    for one in _public(node, shown):
        if _is_property(one):
            yield one.name, _doc(one)[0]


def _methods(node: ast.ClassDef, shown: list[str] | None) -> list[ast.FunctionDef]:
    return [one for one in _public(node, shown) if not _is_property(one)]


def _doc(node: Node) -> tuple[str, dict[str, str], str]:
    """Return the prose of a docstring, its arguments by name, and its example."""
    doc = ast.get_docstring(node) or ""
    prose, _, example = doc.replace("  # doctest: +ELLIPSIS", "").partition(">>> ")
    found = {}
    for names, text in re.findall(r"^    (\S[^:\n]*): (.*(?:\n        .*)*)", prose, re.MULTILINE):
        for name in names.split(", "):
            found[name.lstrip("*")] = re.sub(r"\s+", " ", text)
    prose = re.sub(r"^Args:\n(?:    .*\n?)*", "", prose, flags=re.MULTILINE)
    return _marked(prose), found, f">>> {example}" if example else ""


def _marked(text: str) -> str:
    text = re.sub(r"``(.*?)``", r"`\1`", text.strip())
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def _function(node: ast.FunctionDef, name: str, level: int) -> Lines:
    text, arguments, example = _doc(node)
    yield f"{'#' * level} {name.removeprefix('resumable.')}\n"
    yield from _signature(name.removeprefix("resumable."), node)
    yield f"{text}\n"
    yield from _arguments(name, node, arguments)
    yield from _example(example)


def _taken(node: ast.FunctionDef) -> list[tuple[str, str | None]]:
    """Return the names of the arguments, with their defaults."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + [*given.defaults]
    pairs = [*zip(plain, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    found = [(one.arg, default and _code(default)) for one, default in pairs]
    found += [(star + one.arg, None) for star, one in (("*", given.vararg), ("**", given.kwarg)) if one]
    return [one for one in found if one[0] not in ("self", "cls", "*_", "**__")]


def _signature(name: str, node: ast.FunctionDef) -> Lines:
    taken = _taken(node)
    first_by_name = node.args.kwonlyargs[0].arg if node.args.kwonlyargs and not node.args.vararg else None
    words = []
    for argument, default in taken:
        words += ["*"] if argument == first_by_name else []
        words.append(argument if default is None else f"{argument}={default}")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    # A type variable says nothing without its class.
    returns = re.sub(r"\[(B|C|Any)\]", "", returns)
    line = f"{name}({', '.join(words)}){returns}"
    if len(line) > 100:
        inner = "\n    ".join(_filled(words))
        line = f"{name}(\n    {inner}\n){returns}"
    yield f"```py\n{line}\n```\n"


def _filled(words: list[str]) -> list[str]:
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > 92:
            lines.append("")
        lines[-1] += f"{word}, "
    return [line.rstrip() for line in lines]


def _arguments(name: str, node: ast.FunctionDef, told: dict[str, str]) -> Lines:
    taken = _taken(node)
    names = {argument.lstrip("*") for argument, _ in taken}
    if wrong := sorted(told.keys() - names):
        raise SystemExit(f"the docstring of {name} has {wrong}, which it does not take. Fix: remove the line")
    rows = [
        (argument if default is None else f"{argument}={default}", told.get(argument.lstrip("*")))
        for argument, default in taken
    ]
    yield from _table("argument", rows, name)


def _table(head: str, rows: list[tuple[str, str | None]], where: str) -> Lines:
    """Yield a table with a row for each; those next to each other with the same text share one."""
    if not rows:
        return
    yield f"| {head} | meaning |\n|---|---|"
    for text, group in groupby(rows, key=lambda row: row[1]):
        names = ", ".join(f"`{name}`" for name, _ in group)
        if not text:
            raise SystemExit(f"{where} has no text for {names}. Fix: a line in the `Args:` of its docstring")
        line = re.sub(r"\s+", " ", text.replace("``", "`")).replace("|", "\\|")
        yield f"| {names} | {line} |"
    yield ""


def _example(example: str) -> Lines:
    if example:
        yield f"```pycon\n{example.rstrip()}\n```\n"
