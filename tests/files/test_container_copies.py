"""Containers are copied whole, and what was one object in the original is one object in the copy."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import pytest
import torch

from resumable import CannotStore
from resumable.files import codec
from resumable.files.container_copies import copied


def test_what_is_one_object_is_one_copy_and_tensors_stay() -> None:
    tensor, shared = torch.zeros(2), [1]
    values = {"a": {"x": [shared, (shared, tensor)]}, "b": deque([shared], maxlen=3)}

    found: Any = copied(values)

    one = found["b"][0]
    assert one == [1]
    assert one is not shared
    assert found["a"]["x"][0] is one is found["a"]["x"][1][0]
    assert found["a"]["x"][1][1] is tensor
    shared.append(2)
    assert one == [1]


def in_another_order() -> OrderedDict[str, Any]:
    found: OrderedDict[str, Any] = OrderedDict(a=[1], b=2)
    found.move_to_end("a")
    return found


@pytest.mark.parametrize(
    "value",
    [
        *({"a": [], 1: {}}, in_another_order(), defaultdict(list, a=[1]), Counter("abca"), {1, (2, 3)}),
        *(Counter({"a": (1, [2])}), deque([[1], {}], maxlen=2), bytearray(b"ab"), ([1], ({},))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_copy_has_the_type_and_the_content(value: Any) -> None:
    found = copied({"value": value})["value"]

    assert type(found) is type(value)
    assert found == value
    assert found is not value
    if isinstance(value, dict):
        assert [*found] == [*value]
    assert getattr(found, "default_factory", None) is getattr(value, "default_factory", None)
    assert getattr(found, "maxlen", None) == getattr(value, "maxlen", None)


class Own(dict[str, Any]):
    """A dict of a class that cannot be stored."""


def test_what_cannot_be_stored_stays_and_what_holds_itself_does_too() -> None:
    own, inside = Own(a=[1]), list[Any]()
    inside.append(inside)

    found = copied({"own": own, "inside": inside})

    assert found["own"] is own
    assert found["inside"][0] is found["inside"]
    for name, why in (("own", "Own"), ("inside", "holds itself")):
        with pytest.raises(CannotStore, match=why):
            codec.encode(found[name])


def test_what_is_nested_too_deep_is_left_to_be_refused() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]

    found = copied({"deep": deep})["deep"]

    assert found is not deep
    with pytest.raises(CannotStore, match="nested more than 64 deep"):
        codec.encode(found)


@pytest.mark.parametrize("held", [deque, dict, list, set])
def test_a_copy_is_of_one_moment_whatever_another_thread_does(held: type, switching: None) -> None:
    value, over = held(), threading.Event()

    def change() -> None:
        put = (
            value.append
            if hasattr(value, "append")
            else getattr(value, "add", lambda n: value.update({n: n}))
        )
        while not over.is_set():
            for number in range(500):
                put(number)
            value.clear()

    changing = threading.Thread(target=change)
    changing.start()
    try:
        # One by one: so another thread would come in between, if it were not a copy.
        found = [[one for one in copied({"value": [value]})["value"][0]] for _ in range(300)]  # noqa: C416
    finally:
        over.set()
        changing.join()

    assert all(sorted(one) == [*range(len(one))] for one in found)
