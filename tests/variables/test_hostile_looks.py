"""A checkpoint of somebody else's changes nothing that the loop of a script does not store."""

from __future__ import annotations

import array
import enum
import os
import tempfile
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from places import DATA

from resumable.objects import kinds, own, walks
from resumable.objects.kinds import content
from resumable.variables.looks import Namespace, class_name
from resumable.variables.owned import Owned
from resumable.variables.putting import Putting

SECTIONS = dict(one.split("\n", 1) for one in (DATA / "hostile.txt").read_text().split("\n## ")[1:])
TOOLS = {
    one.__name__: one
    for one in (array, enum, os, tempfile, torch, OrderedDict, defaultdict, deque, NamedTuple)
}
SCRIPT: dict[str, Any] = {**TOOLS, "np": np, "called": [], "__name__": "script"}
exec(SECTIONS["script"], SCRIPT)


def attribute(name: str) -> list[Any]:
    """Return the step to an attribute."""
    return ["attribute", name]


def there(variable: str, *path: list[Any], **more: Any) -> dict[str, Any]:
    """Return an entry of an object that is there."""
    found = SCRIPT["variables"]()[variable]
    for _, name in path:
        found = getattr(found, name)
    path = (["module:train", variable], *path)
    return {"kind": kinds.kind_of(found), "class": class_name(type(found)), "at": [*path], **more}


def new(kind: str, named: str = "builtins:object", /, **more: Any) -> dict[str, Any]:
    """Return an entry of an object that is made."""
    return {"kind": kind, "class": named, **more}


def instance(of: str) -> list[dict[str, Any]]:
    """Return the entries of an object of a class of the script."""
    return [new("object", f"script:{of}", of={"entry": 1}, set=[]), there(of)]


def deep(depth: int) -> Any:
    """Return a tuple that deep."""
    return (deep(depth - 1),) if depth else 1


def cases(section: str, **given: Any) -> dict[str, Any]:
    """Return what the lines of a section say, by their names."""
    helpers = {"attribute": attribute, "there": there, "new": new, "instance": instance, "deep": deep}
    rows = (line.split(": ", 1) for line in SECTIONS[section].splitlines() if line)
    found = {
        name: eval(text, {"torch": torch, "np": np, "FIRST": {"entry": 0}, **helpers, **given})
        for name, text in rows
    }
    return {name: one if isinstance(one, list) else [one] for name, one in found.items()}


TEXTS = {
    "text": "rm",
    "bytes": b"rm",
    "a path": {"atom": ["PosixPath", "/"]},
    "a pair": ("rm", 1),
    "NumPy's": np.str_("rm"),
}
NAMES = ("__class__", "__dict__", "__init__", "__code__", "__globals__", "a b", 3, None)
OTHERS = [
    there("helper"),
    new("dict", "builtins:dict", set=[]),
    new("object", of={"entry": 4}, set=[]),
    there("Hashed"),
]
CASES: dict[str, tuple[list[Any], list[Any]]] = {
    **{
        f"{what} in {where}": (one, [])
        for what, text in TEXTS.items()
        for where, one in cases("taking", one=text).items()
    },
    **{f"{name} as {what}": (one, []) for name in NAMES for what, one in cases("named", name=name).items()},
    **{f"best is {name}": (one, [["best", {"entry": 0}]]) for name, one in cases("made").items()},
    **{f"filled with {name}": ([*one, *OTHERS], []) for name, one in cases("filled").items()},
    **{f"{name} is bound": ([], [[name, 1]]) for name in ("system", "texts", "plain", "__builtins__", "a b")},
}


def put(entries: list[Any], rows: list[Any], script: Namespace) -> str:
    """Put what a checkpoint says back; return what of it is refused."""
    try:
        putting = Putting({"namespaces": [["module:train", rows]], "entries": entries})
    except ValueError as exc:
        return str(exc)
    putting.put([script], Owned())
    return "".join(putting.problems)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Return the variables of the script, whose loop assigns `best` and stores under one name."""
    monkeypatch.setattr(own, "is_own_class", lambda kind: kind in SCRIPT["OWN"])
    held, places = SCRIPT["variables"](), frozenset({".stored", "['stored']"})
    return Namespace("module:train", held, None, frozenset({"best"}), held.update, places=lambda: places)


def state(script: Namespace) -> list[Any]:
    """Return all that the variables of a script reach."""
    nodes = ((str(one), content(one.value)) for one in walks.walk(script.roots()))
    return [{name: id(one) for name, one in script.variables.items()}, *nodes]


@pytest.mark.parametrize("name", CASES)
def test_what_a_hostile_checkpoint_says_is_refused_by_name_and_nothing_is_applied(
    name: str, script: Namespace
) -> None:
    before = state(script)

    assert put(*CASES[name], script)
    assert state(script) == before
    assert SCRIPT["called"] == []


def test_one_wrong_entry_keeps_all_others_from_being_applied(script: Namespace) -> None:
    before, right = state(script), there("numbers", items=[2], maxlen=None)

    assert "entry 1" in put([right, {"kind": "list"}], [["best", 1]], script)
    assert state(script) == before


def test_text_comes_back_where_the_loop_stores_it_and_no_code_of_a_class_runs(script: Namespace) -> None:
    entries = [
        there("plain", set=[["stored", "new"]]),
        new("object", "script:Careful", of={"entry": 3}, set=[["n", 2]]),
        there("plain", attribute("items"), set=[["stored", "new"]]),
        there("Careful"),
    ]
    assert put(entries, [["best", {"entry": 1}]], script) == ""

    plain = script.variables["plain"]
    assert (plain.stored, plain.items) == ("new", {"a": "b", "stored": "new"})
    assert vars(script.variables["best"]) == {"n": 2}
    assert SCRIPT["called"] == []
