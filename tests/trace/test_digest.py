"""What has other bits has another digest, and to make one leaves no trace in what it is made from."""

from __future__ import annotations

import array
import copy
import datetime
import enum
import gc
import random
import resource
import time
import warnings
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from resumable.trace import digest

X = torch.arange(6.0).reshape(2, 3)


class Pair(NamedTuple):
    """What a dataset may return."""

    x: torch.Tensor
    y: int


@dataclass(slots=True)
class Slotted:
    """An object without a dict."""

    x: torch.Tensor
    name: str = ""


class Private:
    """One whose attribute lies under another name than the class says."""

    __slots__ = ("__x",)

    def __init__(self, x: int) -> None:
        self.__x = x


class Whole:
    """A plain object."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Colour(enum.Enum):
    """Something named."""

    RED = 1
    BLUE = 2


class Sides(enum.Flag):
    """Something of which there may be none, or several."""

    LEFT = 1
    RIGHT = 2
    TOP = 4


class Moved(list[int]):
    """A list with something besides."""


def moved(place: int) -> Moved:
    found = Moved([1])
    found.place = place  # type: ignore[attr-defined]
    return found


def ordered(*keys: str) -> OrderedDict[str, int]:
    found = OrderedDict.fromkeys(sorted(keys), 1)
    for key in keys:
        found.move_to_end(key)
    return found


def sparse(value: float) -> torch.Tensor:
    return torch.sparse_coo_tensor([[0], [2]], [value], (1, 3), check_invariants=True)


def compressed(value: float) -> torch.Tensor:
    with warnings.catch_warnings():
        # Torch calls them a beta
        warnings.simplefilter("ignore")
        return (X * value).to_sparse_csr()


def ragged(*lengths: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.ones(length) for length in lengths], layout=torch.jagged)


OTHERS: list[tuple[str, Any, Any]] = [
    ("a number", X, X + torch.eye(2, 3)),
    ("the sign of zero", torch.zeros(2), -torch.zeros(2)),
    ("the bits of nan", *(torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (-1, -2))),
    ("a shape", X, X.reshape(3, 2)),
    ("a dtype", X.int(), X.int().view(torch.float32)),
    ("where the list ends", [X[0], [X[1]]], [X[0], X[1], []]),
    ("a list or a tuple", [X], (X,)),
    ("a key", {"a": X}, {"b": X}),
    ("the order of keys", {"a": X, "b": X}, {"b": X, "a": X}),
    ("the order of an OrderedDict", ordered("a", "b"), ordered("b", "a")),
    ("a number of Python", 1, 2),
    ("a number or a truth", 1, True),
    ("a number or its text", 1, "1"),
    ("many digits", 10**5000, 10**5000 + 1),
    ("a float's sign", 0.0, -0.0),
    ("half of a complex number", 1j, 2j),
    ("a text", "a", "b"),
    ("half a character", "\udc80", "\udc81"),
    ("bytes", b"a", b"b"),
    ("a bytearray", bytearray(b"a"), bytearray(b"b")),
    ("a memoryview", memoryview(b"a"), memoryview(b"b")),
    ("an array", array.array("i", [1]), array.array("i", [2])),
    ("a long list", [*range(9999)], [*range(9998), 0]),
    ("a list of numbers and texts", [1, "a"], [1, "b"]),
    ("numpy", np.arange(3), np.arange(3) + 1),
    ("numpy's dtype", np.arange(3), np.arange(3.0)),
    ("numpy's byte order", np.ones(3, "<i4"), np.ones(3, ">i4")),
    ("numpy's objects", np.array(["a", None], object), np.array(["b", None], object)),
    ("the shape of numpy's objects", np.array([["a"]], object), np.array(["a"], object)),
    ("numpy's records", np.array([(1, 2.0)], "i4,f8"), np.array([(1, 3.0)], "i4,f8")),
    ("numpy's texts", np.array(["a"]), np.array(["b"])),
    ("numpy's numbers", np.float64(1), np.float64(2)),
    ("a number or numpy's", 1.0, np.float64(1)),
    ("a named tuple", Pair(X, 1), Pair(X, 2)),
    ("a dataclass with slots", Slotted(X), Slotted(X + 1)),
    ("a hidden slot", Private(1), Private(2)),
    ("an object", Whole(x=X), Whole(x=X + 1)),
    ("an object in another", Whole(x=Whole(y=1)), Whole(x=Whole(y=2))),
    ("what a list has besides", moved(1), moved(2)),
    ("a packed sequence", pack_sequence([X, X]), pack_sequence([X, X + 1])),
    ("a sparse tensor", sparse(1.0), sparse(2.0)),
    ("a compressed one", compressed(1.0), compressed(2.0)),
    ("a ragged tensor", ragged(1, 3), ragged(2, 2)),
    ("bfloat16", X.bfloat16(), (X + 1).bfloat16()),
    ("an eighth of a float", X.to(torch.float8_e4m3fn), (X + 1).to(torch.float8_e4m3fn)),
    ("complex numbers", X + 1j, X + 2j),
    ("conjugate numbers", (X + 1j).conj(), X + 1j),
    ("a set", {1, 2}, {1, 3}),
    ("a deque", deque([1]), deque([2])),
    ("a Counter", Counter(a=1), Counter(a=2)),
    ("a date", datetime.date(2026, 1, 1), datetime.date(2026, 1, 2)),
    ("a path", PurePosixPath("a"), PurePosixPath("b")),
    ("an Enum", Colour.RED, Colour.BLUE),
    ("no flag", Sides(0), None),
    ("a flag or none", Sides(0), Sides.LEFT),
    ("two flags", Sides.LEFT | Sides.RIGHT, Sides.LEFT | Sides.TOP),
    ("a function", len, repr),
    ("a class", int, str),
    ("a dtype of torch", torch.float32, torch.float64),
    ("nothing", None, False),
]


@pytest.mark.parametrize(("one", "other"), [case[1:] for case in OTHERS], ids=[case[0] for case in OTHERS])
@pytest.mark.parametrize("most", [None, digest.MOST])
def test_what_is_not_the_same_has_another_digest(one: Any, other: Any, most: int | None) -> None:
    assert digest.of([one], most) != digest.of([other], most)
    assert digest.of([one], most) == digest.of([one], most)
    assert digest.of([other], most) == digest.of([other], most)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [X.clone(), {"y": [1, "a"]}],
        lambda: Whole(x=X.clone(), path=Path("a")),
        lambda: torch.arange(6.0).reshape(3, 2).T.contiguous(),
        lambda: X.clone().requires_grad_(),
        lambda: np.float32(1),
    ],
)
def test_what_is_made_again_has_the_same_digest(make: Callable[[], Any]) -> None:
    assert digest.of(make()) == digest.of(make())


@pytest.mark.parametrize("count", [12, 600_000])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.uint16, torch.bfloat16, torch.bool, torch.complex128, torch.float8_e5m2]
)
def test_how_a_tensor_lies_in_memory_does_not_count(count: int, dtype: torch.dtype) -> None:
    plain = torch.randint(0, 2, (2, count // 2), dtype=torch.uint8).to(dtype)
    spread = plain.t().contiguous().t()

    assert not spread.is_contiguous()
    assert digest.of(spread, digest.MOST) == digest.of(plain, digest.MOST)
    assert digest.of(spread) == digest.of(plain)


@pytest.mark.parametrize("shape", [(1024, 1024), (1000, 999), (64, 3, 64, 64)])
def test_of_a_large_tensor_not_only_a_few_columns_are_looked_at(shape: tuple[int, ...]) -> None:
    changed = torch.zeros(shape)
    plain = digest.of(changed, digest.MOST)

    seen = []
    for column in range(0, shape[-1], 11):
        changed[..., column] = 1
        seen.append(digest.of(changed, digest.MOST) != plain)
        changed[..., column] = 0

    assert sum(seen) > len(seen) / 4


def test_of_a_tensor_that_is_not_large_every_number_counts() -> None:
    plain = torch.zeros(4, 16_000)

    for index in (0, 1, 7777, 63_999):
        changed = plain.clone()
        changed.view(-1)[index] = 1
        assert digest.of(changed, digest.MOST) != digest.of(plain, digest.MOST)


@pytest.mark.parametrize(
    "large", [torch.zeros(2, 1).expand(2, 1 << 34), np.broadcast_to(np.zeros((2, 1)), (2, 1 << 34))]
)
def test_an_expanded_tensor_is_not_made_whole(large: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    assert digest.of(large, digest.MOST)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


def test_nothing_of_a_batch_is_kept_alive() -> None:
    batch = [torch.zeros(500_000), Whole(x=torch.zeros(3))]
    known = [weakref.ref(item) for item in batch]

    digest.of(batch, digest.MOST)
    gc.disable()
    try:
        del batch
        assert [ref() for ref in known] == [None, None]
    finally:
        gc.enable()


class Lazy(Mapping[str, Any]):
    """A batch that draws when it is looked into."""

    def __init__(self) -> None:
        self.calls = 0

    def __getitem__(self, key: str) -> Any:
        self.calls += 1
        return random.random()

    def __iter__(self) -> Iterator[str]:
        self.calls += 1
        return iter("ab")

    def __len__(self) -> int:
        self.calls += 1
        return 2


class LazyList(list[int]):
    """The same as a list."""

    calls = 0

    def __iter__(self) -> Iterator[int]:
        LazyList.calls += 1
        return iter([int(random.random() * 100)])

    def __len__(self) -> int:
        LazyList.calls += 1
        return 7


class LazyDict(dict[str, int]):
    """The same as a dict."""

    def items(self) -> Any:
        LazyList.calls += 1
        return [("a", random.random())]


def test_an_iterator_is_not_asked_for_anything() -> None:
    batch = {"rest": iter([1, 2]), "made": (n for n in [1, 2]), "zipped": zip([1], [2], strict=True)}

    digest.of(batch)

    assert [next(batch[name]) for name in batch] == [1, 1, (1, 2)]


def test_no_code_of_the_script_is_run() -> None:
    lazy, state = Lazy(), random.getstate()

    assert digest.of([lazy, LazyList([1]), LazyDict(a=1)]) == digest.of([lazy, LazyList([1]), LazyDict(a=1)])
    assert (lazy.calls, LazyList.calls, random.getstate()) == (0, 0, state)


def test_an_image_that_was_not_read_yet_stays_unread(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    images = [pillow.fromarray(np.full((4, 4, 3), value, np.uint8)) for value in (1, 2)]
    images[0].save(tmp_path / "one.png")

    with pillow.open(tmp_path / "one.png") as image:
        digest.of(image)
        assert image.tile
    assert digest.of(images[0]) != digest.of(images[1])
    assert digest.of(images[0]) == digest.of(images[0].copy())


def test_what_leads_to_itself_comes_to_an_end() -> None:
    whole = Whole()
    whole.others = [Whole(back=whole, number=number) for number in range(9)]  # type: ignore[attr-defined]
    whole.others.append(whole)  # type: ignore[attr-defined]

    assert digest.of(whole, digest.MOST) == digest.of(whole, digest.MOST)


def crowd(count: int, last: int = 0) -> list[Whole]:
    """Return objects of which each leads to all."""
    found = [Whole(number=number) for number in range(count - 1)] + [Whole(number=last)]
    for one in found:
        one.others, one.peers = found, {*found}  # type: ignore[attr-defined]
    return found


def test_objects_that_all_lead_to_each_other_are_digested_once() -> None:
    start = time.monotonic()

    assert digest.of(crowd(24)) == digest.of(crowd(24)) != digest.of(crowd(24, last=1))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("most", [None, digest.MOST])
def test_one_that_is_there_twice_is_two_equal_ones(most: int | None) -> None:
    def one() -> Whole:
        return Whole(x=X, deep=[[[[*range(20)], {"a": X}]]])

    same, others = one(), crowd(5)

    assert digest.of([same, {"again": same}], most) == digest.of([one(), {"again": one()}], most)
    assert digest.of([others, others], most) == digest.of([others, copy.deepcopy(others)], most)


def test_of_many_objects_no_number_of_a_tensor_is_left_out() -> None:
    batch = [Whole(x=torch.zeros(2), y=[Whole(), Whole()]) for _ in range(5000)]
    plain = digest.of(batch)

    batch[-1].x[1] = 1  # type: ignore[attr-defined]

    assert digest.of(batch) != plain


def test_a_digest_of_many_tensors_sees_each_of_them() -> None:
    tensors = [torch.zeros(3), torch.zeros(()), torch.zeros(5000), torch.zeros(2, dtype=torch.float8_e5m2)]
    plain = digest.of_tensors("x", tensors, 1024, 1024)

    for tensor in tensors:
        tensor.fill_(1)
        assert digest.of_tensors("x", tensors, 1024, 1024) != plain
        tensor.fill_(0)
    assert digest.of_tensors("y", tensors, 1024, 1024) != plain
    assert digest.of_tensors("x", tensors, 1024, 1024) == plain


def test_the_order_of_a_set_does_not_count() -> None:
    one, other = set[int](), set[int]()
    for number in (0, 8):
        one.add(number)
    for number in (8, 0):
        other.add(number)

    assert [*one] != [*other]
    assert digest.of(one) == digest.of(other)


@pytest.mark.cuda
def test_on_a_gpu_a_digest_is_that_of_the_same_numbers_on_the_host() -> None:
    batch = {"x": torch.randn(300, 400), "y": torch.arange(9), "z": torch.randn(5, 7).t(), "name": "a"}
    there = {key: item.cuda() if isinstance(item, torch.Tensor) else item for key, item in batch.items()}
    late = digest.soon(there, digest.MOST)
    there["x"].zero_()

    assert not isinstance(late, str)
    assert late.value() == digest.of(batch, digest.MOST)
    tensors = [item for item in batch.values() if isinstance(item, torch.Tensor)]
    on_gpu = digest.of_tensors("", [tensor.cuda() for tensor in tensors], 1024, 1024)
    assert not isinstance(on_gpu, str)
    assert on_gpu.value() == digest.of_tensors("", tensors, 1024, 1024)
