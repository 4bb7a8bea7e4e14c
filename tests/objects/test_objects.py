"""Walks through objects: each is found by its path, and shows whether it has changed."""

from __future__ import annotations

import array
import collections
import datetime
import functools
import itertools
import random
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from resumable.objects import own, walks
from resumable.objects.contents import digest, mark
from resumable.objects.kinds import Step, content

ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3), st.binary(max_size=3)
)
KEYS = st.one_of(st.text(max_size=3), st.integers(-3, 3), st.booleans(), st.floats(allow_nan=False))


class Own:
    """An object of the script's, with attributes and a slot."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)


class Slotted:
    __slots__ = ("left", "right")


class Row(NamedTuple):
    left: Any
    right: Any


class Hostile:
    """What runs code of its own wherever Python lets it."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    def __refuse(self, *_: Any) -> Any:
        raise AssertionError("asked")

    __eq__ = __hash__ = __iter__ = __len__ = __repr__ = __getitem__ = __bool__ = __refuse  # type: ignore[assignment]


class HostileList(list):  # type: ignore[type-arg]
    __iter__ = __len__ = __getitem__ = copy = Hostile.__len__  # type: ignore[assignment]


class HostileDict(dict):  # type: ignore[type-arg]
    __iter__ = __len__ = __getitem__ = copy = items = keys = values = Hostile.__len__  # type: ignore[assignment]


class HostileTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:  # type: ignore[override]
        raise AssertionError(f"called {function}")


def slotted(left: Any, right: Any) -> Slotted:
    """Return one of which a slot may be empty."""
    made = Slotted()
    made.left = left
    if right is not None:
        made.right = right
    return made


GRAPHS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=3).map(collections.deque),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict),
        st.builds(Own, a=inner, b=inner),
        st.builds(slotted, inner, inner),
        st.builds(Row, inner, inner),
        st.builds(functools.partial, st.just(len), inner, key=inner),
        inner.map(lambda one: types.SimpleNamespace(x=one)),
        inner.map(lambda one: lambda: one),
    ),
    max_leaves=24,
)


@given(GRAPHS, st.data())
@settings(max_examples=300, deadline=None)
def test_each_object_is_found_by_its_path(graph: Any, data: st.DataObject) -> None:
    roots = [(Step("", "first"), graph), (Step("", "again"), [graph])]
    nodes = [*walks.walk(roots)]

    # In a cycle, and by two ways, too.
    if lists := [node.value for node in nodes if node.kind == "list"]:
        data.draw(st.sampled_from(lists)).append(data.draw(st.sampled_from(nodes)).value)
    nodes, finder = [*walks.walk(roots)], walks.Finder(roots)

    assert len({id(node.value) for node in nodes}) == len(nodes)
    assert all(finder.find(node.path) is node.value for node in nodes)


def changes(value: Any) -> list[Callable[[], object]]:
    """Return calls that change an object itself, each in another way."""
    if type(value) in (list, collections.deque):
        return [lambda: value.append(0), lambda: value.append([])]
    if isinstance(value, dict):
        return [lambda: value.update({"another": 0}), lambda: value.update({"another": []})]
    if isinstance(value, (Own, types.SimpleNamespace)):
        return [lambda: setattr(value, "x", object()), lambda: setattr(value, "y", 1)]
    return [lambda: setattr(value, "left", object())] if type(value) is Slotted else []


@given(GRAPHS, st.data())
@settings(max_examples=300, deadline=None)
def test_a_change_shows_in_the_object_itself_and_in_no_other(graph: Any, data: st.DataObject) -> None:
    nodes = [*walks.walk([(Step("", "root"), graph)])]
    before = walks.met(nodes)
    assert {at: one.content for at, one in walks.met(nodes).items()} == {
        at: one.content for at, one in before.items()
    }
    if not (ways := [(node, change) for node in nodes for change in changes(node.value)]):
        return

    node, change = data.draw(st.sampled_from(ways))
    change()

    after = walks.met(nodes)
    assert [at for at in after if after[at].content != before[at].content] == [id(node.value)]


@given(ATOMS, ATOMS)
def test_atoms_have_one_mark_only_if_they_are_equal_bit_for_bit(one: Any, other: Any) -> None:
    is_same = type(one) is type(other) and repr(one) == repr(other)

    assert (mark(one) == mark(other)) is is_same
    assert (digest([one, 1]) == digest([other, 1])) is is_same
    assert (mark((one, (2,))) == mark((other, (2,)))) is is_same


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, True), (1, 1.0), (0.0, -0.0), (-1, -2), (np.float32(1), np.float64(1)), (1 << 70, 1), ("a", b"a")],
)
def test_what_python_takes_for_equal_or_hashes_alike_differs(one: Any, other: Any) -> None:
    assert mark(one) != mark(other)
    for items in (
        lambda x: [x],
        lambda x: [x, "text"],
        lambda x: [x, object],
        lambda x: {"key": x},
        lambda x: (x,),
    ):
        assert content(items(one)) != content(items(other))


VALUES = {
    "array": (lambda: np.arange(4.0), lambda one: one.__setitem__(1, 5)),
    "a view's strides": (lambda: np.arange(4.0)[::2], lambda one: one.__setitem__(1, 5)),
    "an array of objects": (lambda: np.array([1, [2]], object), lambda one: one.__setitem__(0, 5)),
    "tensor": (lambda: torch.arange(4.0), lambda one: one[1].fill_(5)),
    "tensor through data": (lambda: torch.arange(4.0), lambda one: one.data[1].fill_(5)),
    "zero's sign": (lambda: torch.zeros(2), lambda one: one.neg_()),
    "gradients of it": (lambda: torch.zeros(2), lambda one: one.requires_grad_()),
    "sparse": (lambda: torch.eye(2).to_sparse(), lambda one: one.mul_(2)),
    "random": (lambda: random.Random(3), lambda one: one.random()),
    "numpy's generator": (lambda: np.random.default_rng(3), lambda one: one.random()),
    "numpy's old generator": (lambda: np.random.RandomState(3), lambda one: one.rand()),
    "torch's generator": (lambda: torch.Generator(), lambda one: torch.rand(1, generator=one)),
    "count": (lambda: itertools.count(3), next),
    "bytearray": (lambda: bytearray(b"abc"), lambda one: one.__setitem__(1, 5)),
    "array of bytes": (lambda: array.array("h", [1, 2]), lambda one: one.append(5)),
    "set": (lambda: {1, "a"}, lambda one: one.add(2)),
    "counter": (lambda: collections.Counter("aab"), lambda one: one.update("a")),
    "length of a deque": (lambda: collections.deque([1], 2), lambda one: one.append(2)),
    "order of a dict": (lambda: {"a": 1, "b": 2}, lambda one: one.update(a=one.pop("a"))),
    "factory": (lambda: collections.defaultdict(int), lambda one: setattr(one, "default_factory", list)),
    "class of an object": (lambda: Own(a=1), lambda one: setattr(one, "__class__", Hostile)),
    "mode of a network": (lambda: nn.Linear(1, 1), lambda one: one.eval()),
    "attribute of a network": (lambda: nn.Linear(1, 1), lambda one: setattr(one, "scale", 2)),
    "parameter of a network": (lambda: nn.Linear(1, 1), lambda one: setattr(one, "weight", None)),
    "hook of a network": (lambda: nn.Linear(1, 1), lambda one: one.register_forward_hook(print)),
    "default": (lambda: eval("lambda x=1: x"), lambda one: setattr(one, "__defaults__", (2,))),
    "attribute of a class": (lambda: type("New", (), {"best": 1}), lambda one: setattr(one, "best", 2)),
    "many items": (lambda: dict.fromkeys(range(9000)), lambda one: one.update({7: 1})),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_change_of_what_is_no_container_shows(name: str) -> None:
    make, change = VALUES[name]
    one = make()
    before = content(one)
    assert content(one) == before

    change(one)

    assert content(one) != before


def test_only_what_has_changed_of_an_object_is_named() -> None:
    one = Own(patience=5, best=0.5, history=[])
    before = content(one)
    one.best, one.new = 0.6, 1
    one.history.append(1)

    now, then = content(one).held["attribute"].marks(), before.held["attribute"].marks()
    assert content(one).whole == before.whole
    assert [name for name in now if now[name] != then.get(name)] == ["best", "new"]


def test_the_order_of_attributes_does_not_count_and_each_bit_of_their_values_does() -> None:
    one, before = Own(a=1, b=0.0, c=[1]), content(Own(a=1, b=0.0, c=None))
    one.c = None
    assert content(one) == before

    for name, value in (("a", True), ("a", 1.0), ("b", -0.0), ("c", ())):
        other = Own(a=1, b=0.0, c=None)
        setattr(other, name, value)
        assert content(other) != before, (name, value)
    del one.a
    one.a = int("1")
    assert list(vars(one)) == ["b", "c", "a"]
    assert content(one) == before


def test_no_code_of_an_object_runs() -> None:
    tensor = torch.zeros(2).as_subclass(HostileTensor)
    held = [Hostile(), HostileList([[1]]), HostileDict(a=[1]), type("Class", (), {"held": Hostile()}), tensor]
    roots = [(Step("", "held"), held)]
    nodes = [*walks.walk(roots)]

    assert len(walks.met(nodes)) == len(nodes) > 6
    assert all(walks.Finder(roots).find(node.path) is node.value for node in nodes)


def test_a_path_reads_as_code() -> None:
    own_ = Own(history=[{}, {"loss": []}], model=nn.Sequential(nn.Linear(1, 1)))
    found = {str(node): node for node in walks.walk([(Step("", "run"), own_)])}

    assert {"run", "run.history[1]['loss']", "run.model.0.weight"} <= found.keys()


def test_a_hook_is_found_by_its_place_among_the_hooks() -> None:
    def network() -> nn.Module:
        made = nn.Linear(1, 1)
        made.register_forward_hook(lambda *_, seen=[]: seen.append(1))
        made.weight.register_hook(lambda grad, seen=[]: seen.append(1))
        return made

    one, other = network(), network()
    nodes = [*walks.walk([(Step("", "net"), one)])]

    seen = [node for node in nodes if node.value == []]
    assert len(seen) == 2
    finder = walks.Finder([(Step("", "net"), other)])
    assert all(finder.find(node.path) == [] for node in seen)


def test_what_a_function_keeps_is_found_and_a_librarys_class_is_not_entered() -> None:
    def function(x: Any, kept: list[int] = [1], *, named: list[int] = [2]) -> Any:  # noqa: B006
        return inside, x, kept, named

    inside = [3]
    function.calls = [4]  # type: ignore[attr-defined]
    found = [node.value for node in walks.walk([(Step("", "f"), [function, Own.__init__, nn.Linear])])]

    assert [one for one in ([1], [2], [3], [4]) if one in found] == [[1], [2], [3], [4]]
    assert not [one for one in found if isinstance(one, type)] or found.count(nn.Linear) == 1
    assert len(found) < 12


def test_a_leaf_is_yielded_and_not_entered() -> None:
    data = Own(samples=[[1], [2]])
    nodes = [*walks.walk([(Step("", "data"), data)], lambda node: node.kind == "list")]

    assert [node.kind for node in nodes] == ["object", "list", "class"]


def test_an_object_at_the_address_of_one_that_is_gone_is_another() -> None:
    one, other = Own(), Own()
    (met,) = [row for row in walks.met(walks.walk([(Step("", "x"), one)])).values() if row.of is Own]

    assert met.is_of(one)
    assert not met.is_of(other)


def test_a_walk_keeps_nothing_alive() -> None:
    one = Own(a=[Own()])
    found = walks.met(walks.walk([(Step("", "x"), one)]))

    assert sys.getrefcount(one) == 2
    assert len(found) == 4


def test_code_is_whose_file_it_is_in() -> None:
    script = types.ModuleType("resumable.of_mine")
    exec(compile("class A:\n    def f(self): pass\ndef g(): pass", "/home/me/train.py", "exec"), vars(script))
    script.A.__module__, cell = "gone", compile("1", "<ipython-input-3>", "exec")

    assert own.is_own_class(Own)
    assert own.is_own_class(script.A)
    assert own.is_own_code(script.g.__code__)
    assert own.is_own_code(cell)
    for kind in (nn.Linear, np.ndarray, datetime.date, pytest.Item, walks.Node, threading.Thread, int):
        assert not own.is_own_class(kind)
    assert not own.is_own_code(nn.Linear.forward.__code__)
    assert not own.is_own_module(sys)
    assert own.is_own_module(sys.modules[__name__])
    assert not own.is_own_module(None)


def test_an_array_that_only_a_file_can_change_is_known_by_its_place(tmp_path: Path) -> None:
    np.arange(1000, dtype=np.int32).tofile(tmp_path / "tokens")
    whole = np.memmap(tmp_path / "tokens", np.int32, "r")

    assert content(whole[100:]) == content(whole[100:])
    assert content(whole[100:200]) != content(whole[200:300])
    assert b"tokens" not in repr(content(np.arange(3))).encode()
    assert str(tmp_path / "tokens") in repr(content(whole[5:]))


def test_containers_that_other_threads_change_are_walked() -> None:
    held: dict[int, list[int]] = {}
    done = threading.Event()

    def change() -> None:
        for number in itertools.count():
            held[number % 500] = [number]
            held.pop((number * 7) % 500, None)
            if done.is_set():
                return

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(200):
            assert walks.met(walks.walk([(Step("", "held"), held)]))
    finally:
        done.set()
        thread.join()


def test_hooks_that_torch_registers_late_are_no_change_and_those_of_the_script_are() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = content(network[0])

    nn.utils.parametrizations.weight_norm(other := nn.Linear(2, 2))
    (torchs,) = other._load_state_dict_pre_hooks.values()
    network[0]._load_state_dict_pre_hooks[7] = torchs
    assert content(network[0]) == before

    network[0].register_load_state_dict_pre_hook(lambda *_: None)
    assert content(network[0]) != before
