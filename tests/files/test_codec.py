"""Trees of tensors and plain values: to files and back as they were, or an error that names the path."""

from __future__ import annotations

import copy
import enum
import functools
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resumable.boundary import Boundary
from resumable.errors import CannotStore
from resumable.files import codec, decoder, tensor_file

CPU = torch.device("cpu")
PLACES = [None, lambda path, device: CPU]


def files_of(tree: Any) -> dict[str, bytes]:
    """Return the files of a checkpoint that holds `tree`, both shared and by rank."""
    trees = {"extra": codec.encode({"value": tree}), "rank": codec.encode({"value": tree})}
    return {name: bytes(content) for name, content in codec.to_files(trees).items()}


def read(files: dict[str, bytes], place: codec.Place | None = None) -> Any:
    """Return what the files hold, by rank."""
    trees = codec.from_files({name: memoryview(bytearray(data)) for name, data in files.items()})
    shared, by_rank = (codec.decode(trees[s].json, trees[s].tensors, place) for s in ("extra", "rank"))
    assert picture(shared) == picture(by_rank)
    return by_rank["value"]


def there_and_back(tree: Any, place: codec.Place | None = None) -> Any:
    """Return the tree after two trips through files."""
    return read(files_of(read(files_of(tree), place)), place)


def picture(value: Any) -> Any:
    """Return what tells two trees apart: types, values, bits, order where there is one."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        live = value.resolve_conj().resolve_neg()
        return kind, live.dtype, live.shape, bits(live)
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, value.dtype.str, value.shape, value.tobytes("A"), value.flags.fnc
    if isinstance(value, complex):
        return kind, picture(value.real), picture(value.imag)
    if isinstance(value, float):
        return kind, "nan" if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, dict):
        factory = getattr(value, "default_factory", None)
        return kind, factory, [(picture(key), picture(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return kind, sorted(map(picture, value), key=repr)
    if isinstance(value, (list, tuple, deque)):
        return kind, getattr(value, "maxlen", None), [picture(item) for item in value]
    return kind, value


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor, row after row."""
    flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def layout(tensor: torch.Tensor) -> list[int]:
    """Return the strides that mean something: those of more than one element."""
    if not tensor.numel():
        return []
    return [step for step, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]


# The oldest torch that the tests run with lacks them.
NEWER_DTYPES = [getattr(torch, name) for name in ("float8_e8m0fnu",) if hasattr(torch, name)]
PACKED_DTYPES = [getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name)]
DTYPES = [
    *(torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.complex128),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, *NEWER_DTYPES),
]
LAYOUTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t,
    lambda t: t.transpose(0, -1) if t.ndim else t,
    lambda t: t[::2] if t.ndim else t,
    lambda t: t[..., 1:] if t.ndim else t,
    lambda t: t.expand(2, *t.shape),
    lambda t: t.conj() if t.is_complex() else t,
    lambda t: t.conj().imag if t.is_complex() else t,
    lambda t: torch._neg_view(t) if t.dtype in (torch.float32, torch.float64) else t,
    lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()).detach(),
]
NUMPY_DTYPES = [
    *(
        "|b1",
        "|i1",
        "|u1",
        "<i2",
        "<u2",
        "<i4",
        "<u4",
        "<i8",
        "<u8",
        ">i4",
        ">u8",
        "<f2",
        "<f4",
        "<f8",
        ">f4",
    ),
    *("<c8", "<c16", ">c16", "|S1", "|S5", "<M8[s]", "<M8[25ns]", ">M8[D]", "<m8[us]"),
]
ORDERS: list[Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = [
    lambda a: a,
    lambda a: a.T,
    lambda a: np.array(a, order="F"),
    lambda a: a[..., ::2] if a.ndim else a,
]
shapes = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any dtype, bits, shape and layout."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(shapes)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    flat = raw.remainder(2).bool() if dtype == torch.bool else raw.view(dtype)
    return draw(st.sampled_from(LAYOUTS))(flat.reshape(shape))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """Draw an array of any dtype, bits, shape and order."""
    dtype, shape = np.dtype(draw(st.sampled_from(NUMPY_DTYPES))), draw(shapes)
    size = math.prod(shape) * dtype.itemsize
    raw = np.frombuffer(bytearray(draw(st.binary(min_size=size, max_size=size))), np.uint8)
    flat = np.remainder(raw, 2) if dtype.kind == "b" else raw
    return draw(st.sampled_from(ORDERS))(flat.view(dtype).reshape(shape))


texts = st.text(st.characters(), max_size=5) | st.text(st.sampled_from("$a\ud83d\ude00é\0~."), max_size=4)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
devices = st.sampled_from(["cpu", "cpu:0", "cuda", "cuda:7", "meta", "mps:0"]).map(torch.device)
scalars = st.one_of(
    keys,
    st.sampled_from([2**53, 2**53 + 1, -(2**63), -0.0, math.inf, -math.inf]),
    st.complex_numbers(),
    st.binary(max_size=5).map(bytearray),
    st.lists(st.integers(-1, 2**62), max_size=3).map(torch.Size),
    st.sampled_from([*DTYPES, torch.int3, torch.qint8]),
    devices,
    st.sampled_from(Boundary),
    arrays().map(lambda array: array.reshape(-1)[0] if array.size else np.float32(1)),
    texts.map(np.str_),
    st.binary(max_size=4).map(np.bytes_),
)
factories = st.sampled_from([None, bool, int, float, str, list, dict, set, tuple])


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return what draws a container of anything that `inner` draws."""
    lists, dicts = st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)
    return st.one_of(
        lists,
        dicts,
        st.dictionaries(texts, inner, max_size=3),
        lists.map(tuple),
        st.sets(keys, max_size=3),
        st.builds(deque, lists, st.none() | st.integers(3, 5)),
        dicts.map(OrderedDict),
        dicts.map(Counter),
        st.builds(defaultdict, factories, dicts),
        inner.map(lambda value: [value, {"again": value}]),
    )


# Deferred, since the many kinds of scalars would otherwise outnumber the tensors.
trees = st.recursive(st.deferred(lambda: scalars) | tensors() | arrays(), containers, max_leaves=12)


@pytest.mark.heavy
@settings(deadline=None, database=None, max_examples=150)
@given(trees)
@example({1: "int", "1": "text", "$tuple": [1], "__metadata__": torch.ones(1)})
@example([math.nan, -math.nan, -0.0, {math.nan: 1, float("nan"): 2}, {math.nan, float("nan")}])
@example({"\ud83d\ude00": torch.ones(1), "😀": torch.ones(2), "?": torch.ones(3), "??": "\ud83d\ude00"})
@example({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}, "a.b~": torch.ones(3)})
def test_every_tree_comes_back_with_its_values_and_types(tree: Any) -> None:
    for place in PLACES:
        assert picture(there_and_back(tree, place)) == picture(tree)


@settings(deadline=None, database=None)
@given(tensors())
@example(torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last))
@example(torch.arange(24.0).reshape(2, 3, 4).permute(1, 2, 0))
@example(torch.arange(6.0).reshape(2, 3)[:, 1:])
@example(torch.arange(3.0).expand(2, 3))
@example(torch.arange(12.0).as_strided((1, 4, 3), (7, 1, 4)))
def test_a_dense_tensor_comes_back_with_its_strides(tensor: torch.Tensor) -> None:
    found = there_and_back(tensor, PLACES[1])
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    assert layout(found) == layout(tensor if is_dense else tensor.contiguous())


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex32, *PACKED_DTYPES], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_of_a_dtype_that_hardly_anyone_uses_comes_back(dtype: torch.dtype, place: Any) -> None:
    tensor = torch.arange(24, dtype=torch.uint8).view(dtype).reshape(2, -1)
    for live in (tensor, tensor.t(), tensor[0, 0], tensor[:0]):
        assert picture(there_and_back(live, place)) == picture(live)


@pytest.mark.parametrize(
    "value",
    [
        *(np.longdouble("0.1"), np.clongdouble(1 + 2j), np.datetime64("NaT", "s"), np.timedelta64(3, "W")),
        *(
            np.array(["\u00e4", "longer", "\ud800"]),
            np.array([b"a", b""]),
            np.zeros((0, 3), ">f8"),
            np.array(7),
        ),
        *(np.str_(""), np.bytes_(b""), np.str_("\ud83d\ude00"), np.bool_(False)),
    ],
    ids=repr,
)
def test_a_numpy_value_that_is_unlike_the_others_comes_back(value: Any) -> None:
    found = there_and_back(value)
    assert (type(found), found.dtype, found.shape) == (type(value), value.dtype, value.shape)
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "number", [10**5000, -(10**5000), 2**53, -(2**53) - 1], ids=["+", "-", "2**53", "-2**53-1"]
)
def test_a_number_of_any_length_comes_back_even_as_a_key(number: int) -> None:
    tree = {"value": number, number: torch.ones(1), (number,): torch.ones(2)}
    assert picture(there_and_back(tree)) == picture(tree)


def test_a_numpy_array_comes_back_writable_and_apart_from_the_file() -> None:
    encoded = codec.encode(np.zeros(3))
    found = codec.decode(encoded.json, encoded.tensors)
    found += 1
    assert np.array_equal(codec.decode(encoded.json, encoded.tensors), np.zeros(3))


def test_numpy_booleans_that_are_uninitialized_can_be_read_again() -> None:
    garbage = np.array([0, 1, 7, 255], np.uint8).view(bool)
    assert there_and_back(garbage).tobytes() == b"\0\1\1\1"


def test_the_order_of_a_set_does_not_show_in_the_file() -> None:
    one, other = set([0, 8, 16]), set([16, 8, 0])  # noqa: C405 (a display would have one order)
    assert list(one) != list(other)
    assert files_of(one) == files_of(other)


def test_plain_values_are_plain_json() -> None:
    for plain in (
        None,
        True,
        {"lr": 0.1, "step": 3, "name": "é", "flags": [True, None], "nested": {"a": {}}},
    ):
        assert codec.encode(plain).json == plain


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    weight = torch.ones(2, 3)
    encoded = codec.encode({"a": weight, "b": weight.view(2, 3), "c": torch.ones(2, 3), "d": weight.t()})
    found = codec.decode(encoded.json, encoded.tensors, PLACES[1])
    assert (list(encoded.tensors), encoded.aliases) == (["a", "c", "d"], {"b": "a"})
    assert found["a"] is found["b"]
    assert len({found[name].data_ptr() for name in "acd"}) == 3


def test_a_square_matrix_is_not_tied_to_its_transpose() -> None:
    weight = torch.arange(4.0).reshape(2, 2)
    tree = {"a": weight, "b": weight.t()}
    assert picture(there_and_back(tree)) == picture(tree)


def test_without_a_place_tensors_share_the_memory_that_they_were_read_into() -> None:
    encoded = codec.encode({"a": torch.zeros(2)})
    codec.decode(encoded.json, encoded.tensors)["a"].fill_(1)
    assert torch.equal(encoded.tensors["a"], torch.ones(2))


def test_with_a_place_tensors_are_new_and_lie_where_it_says() -> None:
    asked = []

    def place(path: codec.Path, device: str) -> torch.device:
        asked.append((path, device))
        return torch.device("meta")

    encoded = codec.encode({"state": {0: torch.zeros(2), "b": [torch.ones(1).t()]}})
    found = codec.decode(encoded.json, encoded.tensors, place)
    assert asked == [(("state", "0"), "cpu"), (("state", "b", "0"), "cpu")]
    assert found["state"][0].is_meta


def test_the_device_that_a_tensor_came_from_is_handed_to_place() -> None:
    asked: list[str] = []
    json_tree = {"$tensor": ["a", {"device": "cuda:1"}]}
    codec.decode(json_tree, {"a": torch.ones(1)}, lambda path, device: asked.append(device) or CPU)
    assert asked == ["cuda:1"]


def test_tensors_are_named_by_their_paths() -> None:
    tree = {"layer": {"weight": torch.ones(1)}, "list": [torch.ones(2)], "__metadata__": torch.ones(3)}
    assert list(codec.encode(tree).tensors) == ["layer.weight", "list.0", "__metadata__~"]


def test_a_namer_may_give_two_tensors_one_name() -> None:
    tree = [torch.zeros(1), torch.ones(1), torch.ones(2)]
    encoded = codec.encode(tree, lambda path: "same")
    assert list(encoded.tensors) == ["same", "same~", "same~~"]
    assert picture(codec.decode(encoded.json, encoded.tensors)) == picture(tree)


def test_the_names_of_tensors_are_found_in_the_json() -> None:
    dense = torch.ones(2, 2).t()
    encoded = codec.encode({"one": torch.ones(1), "two": [np.ones(2), {1: dense}], "text": ["$tensor", 1]})
    assert list(codec.tensor_names(encoded.json)) == list(encoded.tensors) == ["one", "two.0", "two.1.1"]
    assert [*codec.tensor_names("$tensor"), *codec.tensor_names({"a": 1, "b": [None]})] == []


def test_what_the_json_says_of_its_tensors_is_found_by_their_names() -> None:
    tree = {
        "plain": torch.ones(1),
        "laid out": [torch.ones(2, 3).t(), 1, None, "text"],
        "wide": {1: torch.ones(2, dtype=torch.complex128)},
    }
    assert codec.tensor_facts(codec.encode(tree).json) == {
        "laid out.0": {"stride": [1, 3]},
        "wide.1": {"dtype": "complex128"},
    }
    assert codec.tensor_facts({"$tensor": ["a", {"device": "cuda:1"}]}) == {"a": {"device": "cuda:1"}}


@pytest.mark.parametrize(
    "tree", [None, 1, "$tensor", [], {}, {"$tensor": "a"}, {"$tensor": [[], {}]}, [{"$ndarray": []}]]
)
def test_of_what_is_no_tensor_there_is_nothing_to_say(tree: Any) -> None:
    assert codec.tensor_facts(tree) == {}


@pytest.mark.parametrize("device", ["gpu", "cuda:300", "", "nowhere:1"])
def test_a_device_that_cannot_be_one_is_a_value_error(device: str) -> None:
    with pytest.raises(ValueError, match="is not a device"):
        codec.tensor_facts([{"$tensor": ["a", {"device": device}]}])


def test_tensors_are_copied_but_for_those_that_are_kept() -> None:
    encoded = codec.encode({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2, 3).t()})
    for place, is_kept in ((PLACES[1], True), (lambda path, device: torch.device("meta"), False)):
        found = codec.decode(encoded.json, encoded.tensors, place, {"a", "c"})
        assert [found[name] is encoded.tensors[name] for name in "abc"] == [is_kept, False, False]


class _Color(enum.Enum):
    RED = 1


class _Dict(dict[Any, Any]):
    pass


class _Int(int):
    pass


class _Tensor(torch.Tensor):
    pass


_Pair = namedtuple("_Pair", "a b")


def _itself() -> list[Any]:
    values: list[Any] = []
    values.append({"again": (values,)})
    return values


def _nested(depth: int) -> Any:
    return functools.reduce(lambda inner, _: [inner], range(depth), "bottom")


CANNOT = {
    "a function": (_nested, r"a function \(_nested\)"),
    "a class": (_Dict, r"a class \(_Dict\)"),
    "a partial": (functools.partial(len), "of type functools.partial"),
    "a path": (Path("x"), "of type pathlib"),
    "an object": (object(), "of type builtins.object"),
    "an enum": (_Color.RED, "of type .*_Color"),
    "a dict's subclass": (_Dict(), "of type .*_Dict"),
    "an int's subclass": (_Int(1), "of type .*_Int"),
    "a named tuple": (_Pair(1, 2), "of type .*_Pair"),
    "a range": (range(3), "of type builtins.range"),
    "a module": (torch.nn.Linear(1, 1), "of type torch.*Linear"),
    "a memoryview": (memoryview(b"a"), "of type builtins.memoryview"),
    "a sparse tensor": (torch.eye(2).to_sparse(), "layout torch.sparse_coo"),
    "a meta tensor": (torch.ones(1, device="meta"), "on the meta device"),
    "a lazy parameter": (torch.nn.LazyLinear(1).weight, "has no shape yet"),
    "a tensor's subclass": (torch.ones(1).as_subclass(_Tensor), "of type .*_Tensor"),
    "a tensor that torch cannot copy": (torch.ones(1, dtype=torch.uint8).view(torch.int3), "torch.int3"),
    "an array of objects": (np.array([object()]), "numpy dtype object"),
    "a structured array": (np.zeros(1, [("a", "<i4")]), "numpy dtype"),
    "raw numpy bytes": (np.void(b"abc"), "numpy dtype"),
    "an array's subclass": (np.ma.array([1]), "of type numpy.*MaskedArray"),
    "a defaultdict with a lambda": (defaultdict(lambda: 0), "factory cannot be stored"),
    "what holds itself": (_itself(), "or holds itself"),
    "what is nested too deeply": (_nested(100), "more than 64 deep"),
}


@pytest.mark.parametrize(("value", "problem"), CANNOT.values(), ids=CANNOT)
def test_what_cannot_be_stored_is_an_error_that_names_the_path(value: Any, problem: str) -> None:
    for tree, path in (({"a": [0, value]}, "a.1"), ({"a": {7: (value,)}}, "a.7.0"), ({"$a": value}, r"\$a")):
        with pytest.raises(CannotStore, match=rf"^{path}[. ](.|\n)*{problem}(.|\n)*\nFix: .*\S"):
            codec.encode(tree)


@pytest.mark.filterwarnings("ignore:.*quantized", "ignore:.*prototype")
def test_a_quantized_or_nested_tensor_cannot_be_stored() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for value in (quantized, torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])):
        with pytest.raises(CannotStore, match=rf"^a is a tensor of .* dtype {value.dtype}, which cannot"):
            codec.encode({"a": value})


@pytest.mark.parametrize("key", [_nested, Path("x"), _Int(1), _Color.RED, torch.Generator()])
def test_a_key_that_cannot_be_stored_is_an_error_that_names_the_path(key: Any) -> None:
    with pytest.raises(CannotStore, match=r"^a\.key is "):
        codec.encode({"a": {key: 1}})


def test_what_is_just_not_too_deep_comes_back() -> None:
    assert there_and_back(_nested(64)) == _nested(64)


TENSORS = {
    "f": torch.arange(6.0).reshape(2, 3),
    "u": torch.zeros(2, 4, dtype=torch.uint8),
    "one": torch.zeros(8, dtype=torch.uint8),
    "none": torch.zeros(0, dtype=torch.uint8),
    "b": torch.ones(2, dtype=torch.bool),
    "h": torch.ones(2, dtype=torch.bfloat16),
    "d": torch.zeros(3, 2, dtype=torch.float64),
    "bytes": torch.zeros(3, 1, dtype=torch.uint8),
}
TAGS = list(decoder._DECODERS)
EASY = [None, True, 0, -1, 0.5, "", "a", [], [[]], {}, [1, 2], {"a": 1, "b": 2}, ["f", {}], "f", 10**30]
"""What is wrong after nearly every tag."""

MEANT: dict[str, list[Any]] = {
    "$int": ["a", "f"],
    "$str": [""],
    "$tuple": [[], [[]], [1, 2], ["f", {}]],
    "$set": [[], [1, 2]],
    "$frozenset": [[], [1, 2]],
    "$dict": [[]],
    "$OrderedDict": [[]],
    "$Counter": [[]],
    "$bytes": [""],
    "$bytearray": [""],
    "$numpy.str_": ["", "a", "f"],
    "$tensor": ["f", ["f", {}]],
    "$torch.Size": [[], [1, 2]],
}
"""But not after these."""

# fmt: off
WRONG: dict[str, list[Any]] = {
    "$int": ["0x", "0xg", "1 2", "f f"],
    "$float": ["1", "1.5", "NaN", "infinity", "-nan", " inf", "1_0", "9" * 5000],
    "$str": ["e", "zz", "ff", "eda0"],
    "$complex": [
        [1.0], ["1+2j"], [1.0, 2], [1.0, "2"], [1.0, {"$float": "x"}], [1.0, 2.0, 3.0], {"1": 1, "2": 2},
    ],
    "$tuple": ["abc", {"$tuple": []}, {"$set": [1]}],
    "$set": ["ab", [1, 1], [1, True], [0.0, {"$int": "0x0"}], [{"$dict": []}]],
    "$frozenset": ["ab", [1, 1], {"$set": [1]}, [{"$set": [1]}]],
    "$deque": [
        [None], [None, [], 1], [None, "ab"], [1, [1, 2]], [-1, []], [True, []], ["1", []], [10**30, []],
    ],
    "$dict": [
        "ab", ["ab"], {"ab": 1}, [{"1": 1, "2": 2}],
        [[1]], [[1, 2, 3]], [[1, 2], [1, 3]], [[[], 1]], [[{}, 1]],
    ],
    "$OrderedDict": ["ab", ["ab"], [[1, 2], [True, 3]]],
    "$Counter": ["ab", ["ab"], [[1, 2], [1, 3]]],
    "$defaultdict": [
        ["int"], ["int", [], 1], ["eval", []], [None, []], [[], []], ["int", {}], ["int", [[1, 2], [1, 3]]],
    ],
    "$bytes": ["a===", "YQ", "Y Q==", "\u00e9", "YQ==\n", ["YQ=="]],
    "$bytearray": ["a===", "\u00e9"],
    "$numpy": [
        *([dtype, "00" * 8] for dtype in ("O", "|O8", "O8", "<f4", "f8", "=f8", "<f8,<f8", "<f9")),
        *([dtype, "00" * 8] for dtype in ("|V8", "<b8", "(2,)<f4", "float64", "", None, 8, [])),
        *([dtype, "00" * 8] for dtype in ("<U2", "|S8", "<M8[", "<M8[x]")),
        *(["<f8", content] for content in ("", "00", "00" * 9, "zz" * 8, None, 0, [])),
        ["<U1", "ffffff7f"], ["<U0", ""], ["<U1000000000", ""], ["O", ""],
        ["<f8", "00" * 8, 1], {"<f8": 1, "00" * 8: 2},
    ],
    "$numpy.str_": [{"$bytes": ""}, {"$numpy.str_": 1}, ["a"]],
    "$numpy.bytes_": [{"$bytearray": ""}, {"$str": ""}, [{"$bytes": ""}]],
    "$ndarray": [
        *(["one", dtype, [1], "C"] for dtype in ("O", "|O8", "|V8", "<f8,<f8", "f8", "<f9", None, [], 8)),
        *(["one", "<f8", shape, "C"] for shape in ([2], [0], [-1], [1, -1], [True], ["1"], [1.0], [[1]])),
        *(["one", "<f8", shape, "C"] for shape in ([2**62, 8], [2**63], [2**64 + 1], [1] * 99, [2**60, 0])),
        *(["one", "<f8", shape, "C"] for shape in (1, None, "", "1", {}, {"1": 1})),
        *(["one", "<f8", [1], order] for order in ("A", "K", "c", "", None, 0, [])),
        *([name, "<f8", [1], "C"] for name in ("missing", "", None, 1, [], {}, ["one"])),
        ["none", "<U0", [2**60], "C"], ["none", "|S0", [3], "C"], ["none", "<f8", [0, 2**70], "C"],
        ["one", "|b1", [8], "C"], ["b", "|u1", [2], "C"], ["f", "<f4", [6], "C"], ["h", "<f2", [2], "C"],
        ["one", "<f8", [1]], ["one", "<f8", [1], "C", 1], {"one": 1, "<f8": 2, "[1]": 3, "C": 4},
    ],
    "$tensor": [
        *(["f", about] for about in (None, [], "", "dtype", 0, False, ["dtype"], [["dtype", "float32"]])),
        ["f", {"sparse": 1}], ["f", {"": 1}], ["missing", {}], [[], {}], [None, {}], ["f", {}, {}], ["f"],
        *(["f", {"dtype": name}] for name in ("float64", "int32", "complex128", "", None, [], 1)),
        *(["u", {"dtype": name}] for name in ("float32", "complex128", "quint4x2", "Tensor")),
        *(["bytes", {"dtype": name}] for name in ("uint8", "int8", "bits8", "uint4", "qint8", "int3")),
        ["d", {"dtype": "complex128"}], ["one", {"dtype": "complex128"}],
        *(["f", {"stride": stride}] for stride in ([], [1], [3, 1, 1], [1, 3], [3, 0], [0, 0], [-3, 1])),
        *(["f", {"stride": stride}] for stride in ([2**40, 1], [2**70, 1], [3.0, 1.0], ["3", "1"])),
        *(["f", {"stride": stride}] for stride in (None, 3, "31", [3, True], {"3": 1, "1": 1})),
        *(["f", {"device": name}] for name in ("gpu", "cuda:300", "cuda:128", "cuda:", "nn:0", "CPU")),
        *(["f", {"device": name}] for name in ("", "cpu cpu", "cuda:01", "cuda:" + "9" * 5000, None, [])),
    ],
    "$Boundary": ["BATCH", "Boundary.BATCH", "body"],
    "$torch.Size": ["12", [True], [1.0], ["1"], [None], {"1": 1}],
    "$torch.dtype": ["float", "torch.float32", "Float32", "load", "__name__", ["float32"]],
    "$torch.device": ["gpu", "cuda:300", "cuda:128", "cuda:255", "cuda:", "cpu:0:0", "cuda:0 ", ["cpu"]],
}
# fmt: on
UNKNOWN = ["$", "$$", "$Tuple", "$tuple ", "$type", "$eval", "$numpy.void", "$torch.Tensor", "$json", "$ref"]


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("place", PLACES)
def test_hostile_values_are_value_errors(tag: str, place: Any) -> None:
    meant = list(map(repr, MEANT.get(tag, [])))
    for content in (*WRONG[tag], *(value for value in EASY if repr(value) not in meant)):
        for tree in ({tag: content}, [{"a": {tag: content}}], {"$tuple": [{tag: content}]}):
            assert raises_value_error(tree, place), tree


def raises_value_error(tree: Any, place: codec.Place | None) -> bool:
    """Whether decoding is a ValueError; no other error is let through."""
    try:
        codec.decode(tree, TENSORS, place)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("tag", MEANT)
def test_what_is_left_out_of_the_corpus_is_a_value(tag: str) -> None:
    assert not any(raises_value_error({tag: content}, None) for content in MEANT[tag])


@pytest.mark.parametrize("tag", [*TAGS, *UNKNOWN])
def test_a_tag_stands_alone_and_is_known(tag: str) -> None:
    good = "f" if tag == "$tensor" else []
    for tree in ({tag: good, "a": 1}, {"a": 1, tag: good}, {tag: good, "$": []}, {f"{tag}s": good}):
        with pytest.raises(ValueError, match="is not a kind of value in this format"):
            codec.decode(tree, TENSORS)


@pytest.mark.parametrize("tag", UNKNOWN)
def test_an_unknown_tag_is_refused(tag: str) -> None:
    with pytest.raises(ValueError, match="is not a kind of value in this format"):
        codec.decode({tag: []}, TENSORS)


@pytest.mark.parametrize(
    "wrap",
    [lambda v: [v], lambda v: {"a": v}, lambda v: {"$tuple": [v]}, lambda v: {"$numpy.str_": v}],
)
def test_what_is_nested_without_a_bottom_is_a_value_error(wrap: Callable[[Any], Any]) -> None:
    tree = functools.reduce(lambda inner, _: wrap(inner), range(5000), 0)
    with pytest.raises(ValueError, match=r"nested more than 64 deep|RecursionError"):
        codec.decode(tree, {})


RICH = {
    "plain": [1, -0.5, "text", None, True, 2**70, math.inf, "\ud800"],
    "kinds": [(1, 2), {3}, frozenset({4}), deque([5], 6), {7: 8}, 1j, b"b", bytearray(b"c"), Boundary.STEP],
    "dicts": [OrderedDict(a=1), Counter("ab"), defaultdict(int, {"c": 1})],
    "torch": [
        torch.Size([1]),
        torch.float32,
        CPU,
        torch.ones(2),
        torch.ones(2, 3).t(),
        torch.ones(2, dtype=torch.complex128),
    ],
    "numpy": [
        np.ones((2, 3)),
        np.float32(1),
        np.str_("d"),
        np.bytes_(b"e"),
        np.asfortranarray(np.ones((2, 3))),
        np.ones(3, bool),
    ],
}
ENCODED = codec.encode(RICH)
TENSORS |= ENCODED.tensors
sizes = st.sampled_from([0, 1, 2, 3, 6, 8, -1, 2**31, 2**62, 2**63, 2**70])
words = st.sampled_from(
    [*ENCODED.tensors, *TAGS, "<f8", "|b1", "O", "C", "F", "int", "float32", "cpu", "dtype", "stride"]
)
leaves = st.none() | st.booleans() | sizes | st.floats() | words | st.text(max_size=3)
hostile = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(words | st.text(max_size=2), inner, max_size=2)
        | st.builds(lambda tag, value: {tag: value}, st.sampled_from(TAGS), inner)
    ),
    max_leaves=8,
)


def places_in(tree: Any) -> list[tuple[Any, Any]]:
    """Return every place in a JSON tree where another value can be put."""
    items = list(
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    )
    return [(tree, key) for key, _ in items] + [place for _, value in items for place in places_in(value)]


def decoded_or_value_error(tree: Any) -> None:
    """Fail for any error but a ValueError, which is the same with a place and without."""
    outcomes = {raises_value_error(tree, place) for place in PLACES}
    assert len(outcomes) == 1


@pytest.mark.heavy
@settings(deadline=None, database=None, max_examples=100)
@given(hostile)
def test_any_json_is_a_value_or_a_value_error(tree: Any) -> None:
    decoded_or_value_error(tree)


@settings(deadline=None, database=None, max_examples=100)
@given(st.data())
def test_a_tree_in_which_anything_was_replaced_is_a_value_or_a_value_error(data: st.DataObject) -> None:
    tree = copy.deepcopy(ENCODED.json)
    holder, key = data.draw(st.sampled_from(places_in(tree)))
    holder[key] = data.draw(hostile)
    decoded_or_value_error(tree)


def test_a_tensor_at_an_odd_address_is_moved_before_it_is_used() -> None:
    # A vector instruction on it would be a segmentation fault.
    data = torch.zeros(8 + 64 * 16, dtype=torch.uint8)
    stored = data[8 if data.data_ptr() % 16 == 0 else 0 :][: 64 * 16].view(64, 16)
    found = codec.decode({"$tensor": ["a", {"dtype": "complex128"}]}, {"a": stored})
    assert stored.data_ptr() % 16 == 8
    assert found.data_ptr() % 16 == 0
    assert torch.equal(found, torch.zeros(64, dtype=torch.complex128))


FILES = files_of({"a": torch.ones(2), "b": [1, {"$float": 2.5}], "c": np.ones(2, bool)})


def test_a_checkpoint_has_the_files_that_the_format_names() -> None:
    names = {"state.json", "extra.safetensors", "ranks/00000.json", "ranks/00000.safetensors"}
    assert set(FILES) == names
    assert set(files_of(1)) == {"state.json", "ranks/00000.json"}
    assert list(json.loads(FILES["state.json"])) == ["extra"]


@pytest.mark.parametrize("name", FILES)
def test_no_truncated_file_is_read(name: str) -> None:
    for length in range(len(FILES[name])):
        with pytest.raises(ValueError):  # noqa: PT011
            read({**FILES, name: FILES[name][:length]})


def test_an_empty_file_is_no_file_without_tensors() -> None:
    with pytest.raises(ValueError, match="longer than the file"):
        read({**files_of(1), "extra.safetensors": b""})


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read({other: data for other, data in FILES.items() if other != name})


@pytest.mark.parametrize("name", ["model.safetensors", "ranks/00001.json", "rank.safetensors", "x", ""])
def test_a_file_that_nothing_speaks_of_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match="nothing says what"):
        read({**FILES, name: FILES["extra.safetensors"]})


@pytest.mark.parametrize("name", ["state.json", "ranks/00000.json"])
@pytest.mark.parametrize(
    "text", ["", "[]", "1", '"a"', "null", "[" * 10**5, '{"a":NaN}', '{"a":1,"a":1}', "\0"]
)
def test_a_file_that_is_no_tree_is_a_value_error(name: str, text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read({**FILES, name: text.encode()})


@pytest.mark.parametrize("text", ['{"extra":[]}', '{"extra":1}', '{"extra":{},"rank":{}}', '{"rank":{}}'])
def test_a_tree_that_cannot_be_one_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read({**files_of(1), "state.json": text.encode()})


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_a_file_is_never_another_error(name: str) -> None:
    for position in range(len(FILES[name])):
        for bit in (0, 4, 6):
            damaged = bytearray(FILES[name])
            damaged[position] ^= 1 << bit
            try:
                trees = codec.from_files(
                    {n: memoryview(bytearray(d)) for n, d in {**FILES, name: damaged}.items()}
                )
                for tree in trees.values():
                    codec.decode(tree.json, tree.tensors)
            except ValueError:
                continue


# What the last encoding found


def full_picture(encoded: codec.Encoded) -> Any:
    """Return all of an encoding but its key, and what its files are."""
    tensors = [(name, picture(tensor.data), layout(tensor)) for name, tensor in encoded.tensors.items()]
    return (
        encoded.json,
        [(name, facts[1:], strides) for name, facts, strides in tensors],
        encoded.aliases,
        {path: bytes(data) for path, data in codec.to_files({"extra": encoded}).items()},
    )


def layouts(encoded: codec.Encoded) -> list[tensor_file.Layout]:
    """Return how the tensors lie in their files."""
    groups = codec.to_groups({"extra": encoded}).values()
    return [tensor_file.layout(group.tensors, group.aliases) for group in groups]


class Remembering:
    """Encodes again and again with one memo, and compares each time with an encoding that has none."""

    def __init__(self) -> None:
        self.memo: codec.Memo = {}
        # The tensors of the last one may have another shape by now
        self.layouts: dict[Any, list[tensor_file.Layout]] = {}

    def encode(self, tree: Any, frozen: Callable[[str], bool] = lambda name: False) -> codec.Encoded:
        plain, found = codec.encode(tree), codec.encode(tree, memo=self.memo)
        for encoded in (plain, found):
            encoded.frozen = frozenset(filter(frozen, encoded.tensors))
        assert full_picture(found) == full_picture(plain)
        assert layouts(found) == layouts(plain)
        assert codec.to_texts({"extra": found}) == codec.to_texts({"extra": plain})
        assert codec.encode(tree).key == plain.key
        assert self.layouts.setdefault((found.key, found.frozen), layouts(found)) == layouts(found)
        return found


class Changing:
    """A tree of dicts of tensors, and the tensor in it to which something happens between two saves."""

    def __init__(self) -> None:
        groups = {f"g{i}": {k: torch.randn(2, 2) for k in "abc"} for i in range(3)}
        self.tree: dict[str, Any] = {"number": 1, **groups, "list": [torch.randn(3)]}

    def change(self, kind: str, group: int, key: int, is_before: bool) -> None:
        self.name = f"g{group}"
        self.group: dict[str, Any] = self.tree[self.name]
        tensors = [name for name, value in self.group.items() if isinstance(value, torch.Tensor)]
        self.key = tensors[key % len(tensors)]
        self.tensor: torch.Tensor = self.group[self.key]
        self.other: dict[str, Any] = self.tree[f"g{(group + 1) % 3}"]
        self.is_before = is_before
        CHANGES[kind](self)

    def set(self, value: Any) -> None:
        self.group[self.key] = value

    def set_data(self, value: torch.Tensor) -> None:
        self.tensor.data = value

    def put(self, name: str, value: Any) -> None:
        """Put something at the beginning of the tree or at its end."""
        self.tree.pop(name, None)
        rest = self.tree
        self.tree = {name: value, **rest} if self.is_before else {**rest, name: value}


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda c: None,
    "other values": lambda c: c.tensor.is_floating_point() and c.tensor.data.add_(1),
    "another tensor": lambda c: c.set(torch.randn(2, 2)),
    "another place": lambda c: c.set_data(c.tensor.data.clone()),
    "another shape": lambda c: c.set_data(torch.ones(3, 2, dtype=c.tensor.dtype)),
    "shorter in place": lambda c: c.set_data(c.tensor.data[:1]),
    "flat in place": lambda c: c.set_data(c.tensor.data.reshape(-1)),
    "transposed in place": lambda c: c.set_data(c.tensor.data.t()),
    "another dtype": lambda c: c.set(torch.zeros(2, 2, dtype=torch.int16)),
    "same bytes as numbers": lambda c: (
        c.tensor.dtype == torch.float32 and not c.tensor.is_neg() and c.set(c.tensor.data.view(torch.int32))
    ),
    "a new key": lambda c: c.group.update({f"new{len(c.group)}": torch.randn(1)}),
    "a key renamed": lambda c: c.tree.update(
        {c.name: {("r" if k == c.key else "") + k: v for k, v in c.group.items()}}
    ),
    "another order": lambda c: c.set(c.group.pop(c.key)),
    "a key less": lambda c: len(c.group) > 3 and c.group.pop(c.key),
    "a key with a dollar": lambda c: c.group.update({"$": torch.randn(1)}),
    "a name that is taken": lambda c: c.group.update({"__metadata__": torch.randn(1)}),
    "tied within": lambda c: c.group.update(tied=c.tensor),
    "untied": lambda c: "tied" in c.group and c.group.update(tied=c.group["tied"].detach().clone()),
    "tied across": lambda c: c.other.update(across=c.tensor),
    "a view across": lambda c: c.other.update(view=c.tensor.detach().reshape(-1)),
    "slow at its place": lambda c: c.put("slow", [c.tensor]),
    "slow at its place in another shape": lambda c: c.put("view", [c.tensor.detach().reshape(-1)[:1]]),
    "slow with its name": lambda c: c.put(f"{c.name}.{c.key}", torch.randn(1)),
    "slow with its name no more": lambda c: [c.tree.pop(name) for name in [*c.tree] if "." in name],
    "a boolean": lambda c: c.set(torch.tensor([True, False])),
    "empty": lambda c: c.set(torch.empty(0, 2)),
    "a part that is empty": lambda c: c.group.update(none=c.tensor.detach()[:0]),
    "complex": lambda c: c.set(torch.randn(2, dtype=torch.complex64)),
    "conjugate": lambda c: c.set(torch.randn(2, dtype=torch.complex64).conj()),
    "negative": lambda c: c.tensor.dtype == torch.float32 and c.set(torch._neg_view(c.tensor.detach())),
    "a parameter": lambda c: c.tensor.is_floating_point() and c.set(torch.nn.Parameter(c.tensor.detach())),
    "a number": lambda c: c.group.update(number=7),
    "no number": lambda c: c.group.pop("number", None),
    "twice at one path": lambda c: c.put("twice", {1: c.group, "1": c.group}),
    "once at one path": lambda c: c.put("twice", {1: c.group, "1": {"a": torch.randn(1)}}),
    "not twice": lambda c: c.tree.pop("twice", None),
}
changes = st.tuples(st.sampled_from([*CHANGES]), st.integers(0, 2), st.integers(0, 4), st.booleans())


@pytest.mark.heavy
@settings(deadline=None, database=None, max_examples=100)
@given(st.lists(st.lists(changes, max_size=3), min_size=1, max_size=4), st.sampled_from(["", "g1", "a"]))
def test_a_memo_changes_no_encoding(rounds: list[list[tuple[str, int, int, bool]]], frozen: str) -> None:
    changing, remembering = Changing(), Remembering()
    for changed in ([], [], *rounds, []):
        for kind, group, key, is_before in changed:
            changing.change(kind, group, key, is_before)
        remembering.encode(changing.tree, lambda name: bool(frozen) and frozen in name)


@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    "second", ["nothing", "slow with its name", "not twice", "untied", "transposed in place"]
)
@pytest.mark.parametrize("first", CHANGES)
def test_no_single_change_is_overlooked(first: str, second: str, is_before: bool) -> None:
    changing, remembering = Changing(), Remembering()
    for _ in range(3):
        # The second time it becomes known how to compare it in few calls, the third time it is.
        remembering.encode(changing.tree)
    for kind in (first, "nothing", second, "nothing", "slow with its name no more"):
        changing.change(kind, 1, 1, is_before)
        remembering.encode(changing.tree)


@settings(deadline=None, database=None, max_examples=70)
@given(st.lists(trees, min_size=1, max_size=3))
@example([{"a": {"b": torch.ones(1)}}, {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}])
def test_any_trees_are_encoded_with_a_memo_as_without_one(drawn: list[Any]) -> None:
    memo: codec.Memo = {}
    for tree in (*drawn, *drawn, drawn[-1]):
        plain, found = codec.encode({"value": tree}), codec.encode({"value": tree}, memo=memo)
        assert full_picture(found) == full_picture(plain)
        assert picture(codec.decode(found.json, found.tensors)) == picture({"value": tree})


def test_a_key_tells_names_dtypes_shapes_devices_and_ties_and_nothing_else() -> None:
    weight = torch.ones(4)
    trees: list[dict[str, torch.Tensor]] = [
        {"a": weight, "b": torch.ones(1)},
        {"a": weight, "c": torch.ones(1)},
        {"a": weight, "b": weight},
        {"a": weight.int(), "b": torch.ones(1)},
        {"a": weight.reshape(2, 2), "b": torch.ones(1)},
        {"a": torch.ones(3), "b": torch.ones(1)},
    ]
    assert len({codec.encode(tree).key for tree in trees}) == len(trees)
    assert codec.encode(trees[0]).key == codec.encode({"a": torch.zeros(4), "b": torch.zeros(1)}).key


def no_guards() -> None:
    """Stand for the guards of a torch that wants other arguments."""


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("first", CHANGES)
def test_no_change_is_lost_without_guards(first: str, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._C._dynamo.guards.TensorGuards")
    if there:
        monkeypatch.setattr("torch._C._dynamo.guards.TensorGuards", no_guards, raising=False)
    changing, remembering = Changing(), Remembering()
    for kind in ("nothing", "nothing", "nothing", first, "nothing", "transposed in place"):
        changing.change(kind, 1, 1, True)
        remembering.encode(changing.tree)


def test_the_text_of_many_tensors_is_the_same_again() -> None:
    remembering = Remembering()
    for _ in range(4):
        remembering.encode({"g": {f"p{i}": torch.randn(2) for i in range(200)}})


def test_a_number_in_the_place_of_a_tensor_is_encoded_as_one() -> None:
    remembering = Remembering()
    tree: dict[str, Any] = {"g": {k: torch.zeros(4) for k in "abc"}}
    for _ in range(3):
        remembering.encode(tree)
    tree["g"]["b"] = 7
    assert remembering.encode(tree).json["g"]["b"] == 7


def test_a_tensor_at_the_address_of_a_freed_one_is_another_tensor() -> None:
    remembering = Remembering()
    tree = {"g": {k: torch.zeros(4) for k in "abc"}}
    for _ in range(3):
        remembering.encode(tree)
    there = tree["g"]["b"].data_ptr()
    del tree["g"]["b"]
    kept = []
    while (fresh := torch.full([2, 2], 7.0)).data_ptr() != there and len(kept) < 100:
        kept.append(fresh)
    tree["g"] = {"a": tree["g"]["a"], "b": fresh, "c": tree["g"]["c"]}
    assert remembering.encode(tree).tensors["g.b"] is fresh


@pytest.mark.filterwarnings("ignore:.*prototype", "ignore:.*quantized", "ignore:Sparse")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse(),
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        lambda: torch.ones(2, 2, device="meta"),
        lambda: torch.ones(0, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
        lambda: torch.nn.LazyLinear(1).weight,
        lambda: torch.ones(2, 2).as_subclass(_Tensor),
        lambda: torch.ones(2, 2).to_mkldnn(),
    ],
    ids=["sparse", "csr", "nested", "meta", "empty-meta", "quantized", "lazy", "subclass", "mkldnn"],
)
def test_what_cannot_be_stored_is_not_remembered_away(make: Callable[[], Any]) -> None:
    for before in (torch.ones(2, 2), torch.ones(0)):
        memo: codec.Memo = {}
        group = {"a": before, "b": torch.ones(1)}
        codec.encode({"g": group}, memo=memo)
        group["a"] = make()
        for _ in range(2):
            with pytest.raises(CannotStore, match=r"^g\.a is "):
                codec.encode({"g": group}, memo=memo)
        group["a"] = before
        assert full_picture(codec.encode({"g": group}, memo=memo)) == full_picture(codec.encode({"g": group}))


# What is not trained


def test_what_is_not_trained_has_a_file_of_its_own_and_all_comes_back() -> None:
    body, head = torch.ones(2), torch.zeros(3)
    encoded = codec.encode({"body": body, "again": body, "head": head, "twice": head})
    encoded.frozen = frozenset({"body"})
    rank = codec.encode({})

    files = codec.to_files({"model": encoded, "rank": rank})

    assert [*files] == [
        "state.json",
        "ranks/00000.json",
        "model.safetensors",
        "model-frozen.safetensors",
    ]
    groups = codec.to_groups({"model": encoded})
    assert {path: ([*group.tensors], group.aliases) for path, group in groups.items()} == {
        "model.safetensors": (["head"], {"twice": "head"}),
        "model-frozen.safetensors": (["body"], {"again": "body"}),
    }
    assert [codec.is_frozen(path) for path in groups] == [False, True]
    found = codec.from_files({name: memoryview(bytearray(data)) for name, data in files.items()})["model"]
    assert picture(codec.decode(found.json, found.tensors)) == picture(
        {"body": body, "again": body, "head": head, "twice": head}
    )


@pytest.mark.parametrize("frozen", ["", "a", "ab"])
def test_a_file_without_tensors_is_not_made(frozen: str) -> None:
    encoded = codec.encode({"a": torch.ones(1), "b": torch.ones(2)})
    encoded.frozen = frozenset(frozen)

    names = [*codec.to_groups({"model": encoded, "extra": codec.encode({"n": 1})})]

    assert names == [
        *(["model.safetensors"] if frozen != "ab" else []),
        *(["model-frozen.safetensors"] if frozen else []),
    ]


def test_another_tensor_that_is_frozen_is_another_layout() -> None:
    encoded = codec.encode({"a": torch.ones(1), "b": torch.ones(1)})
    keys = set()
    for frozen in ("", "a", "b"):
        encoded.frozen = frozenset(frozen)
        keys |= {group.key for group in codec.to_groups({"model": encoded}).values()}
    assert len(keys) == 3


def test_a_tensor_that_two_files_hold_is_a_value_error() -> None:
    files = {**FILES, "extra-frozen.safetensors": FILES["extra.safetensors"]}
    with pytest.raises(ValueError, match=r"value\.a, value\.c is in two files"):
        read(files)


@pytest.mark.parametrize(
    "name", ["model-frozen.safetensors", "-frozen.safetensors", "rank-frozen.safetensors"]
)
def test_a_frozen_file_that_nothing_speaks_of_is_a_value_error(name: str) -> None:
    empty = bytes(tensor_file.to_safetensors({}, {}))
    with pytest.raises(ValueError, match="nothing says what"):
        read({**FILES, name: empty})


def test_parts_that_not_all_processes_have_are_in_files_of_their_own() -> None:
    trees = {"model": codec.encode({"model": {"a": 1}, "model.first": {"b": 2}, "model.other": {"c": 3}})}
    trees["rank"] = codec.encode({})

    texts = codec.to_texts(trees, 3, {"model.first": True, "model.other": False})

    found = {path: json.loads(text) for path, text in texts.items()}
    assert found == {
        "state.json": {"model": {"model": {"a": 1}}},
        "state-00003.json": {"model": {"model.first": {"b": 2}}},
        "ranks/00003.json": {},
    }
    assert codec.to_trees(texts, 3)["model"] == {"model": {"a": 1}, "model.first": {"b": 2}}
    assert [path for path in texts if codec.has_trees(path)] == ["state.json", "state-00003.json"]
    assert [path for path in texts if codec.has_one_writer(path)] == ["state-00003.json", "ranks/00003.json"]
    with pytest.raises(ValueError, match=r"state-00001\.json: model\.first is in another file, too"):
        codec.to_trees({**texts, "state-00001.json": texts["state-00003.json"]}, 3)


def small(count: int) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.full((3,), float(number)) for number in range(count)}


def test_a_dict_of_tensors_is_copied_but_for_those_that_are_kept() -> None:
    tensors = small(3)
    json = codec.encode({"group": tensors}).json
    stored = {f"group.{name}": tensor for name, tensor in tensors.items()}

    found = codec.decode(json, stored, lambda _, device: torch.device(device), {"group.t1"})["group"]

    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert [found[name].data_ptr() == tensors[name].data_ptr() for name in tensors] == [False, True, False]


def test_ties_across_and_within_dicts_of_tensors_stay_ties() -> None:
    tensors = small(2)
    one, two = (
        {"a": {"$tensor": "t0"}, "b": {"$tensor": "t1"}},
        {"c": {"$tensor": "t0"}, "d": {"$tensor": "t0"}},
    )

    found = codec.decode({"one": one, "two": two}, tensors, lambda *_: torch.device("cpu"))

    assert found["one"]["a"] is found["two"]["c"] is found["two"]["d"] is not found["one"]["b"]
    assert found["one"]["a"] is not tensors["t0"]


def test_each_tensor_of_a_dict_goes_to_its_own_device() -> None:
    json = {name: {"$tensor": name} for name in ("t0", "t1")}

    def place(path: tuple[str, ...], _: str) -> torch.device:
        return torch.device("meta" if path == ("t1",) else "cpu")

    assert [one.device.type for one in codec.decode(json, small(2), place).values()] == ["cpu", "meta"]


@pytest.mark.parametrize("kept", [(), ("t0", "t1")])
def test_tensors_that_lie_elsewhere_are_not_taken_as_they_are(kept: tuple[str, ...]) -> None:
    json = codec.encode({"a": torch.zeros(1), "b": torch.zeros(1)}).json
    elsewhere = {json["a"]["$tensor"]: torch.zeros(1, device="meta"), json["b"]["$tensor"]: torch.zeros(1)}

    with pytest.raises(ValueError, match="no value"):
        codec.decode(json, elsewhere, lambda path, device: torch.device("cpu"), kept and {*elsewhere})


@pytest.mark.parametrize(
    "item", [{"$tensor": 1}, {"$tensor": "unknown"}, {"$tensor": "t0", "b": 1}, {"$x": 1}]
)
def test_one_wrong_entry_among_plain_tensors_is_refused(item: Any) -> None:
    with pytest.raises(ValueError, match=r"holds something|stands where|not a kind"):
        codec.decode({"first": {"$tensor": "t0"}, "second": item}, small(1))


def test_names_and_facts_are_found_among_plain_tensors() -> None:
    plain = {"a": {"$tensor": "t0"}, "b": {"$tensor": "t1"}}
    mixed = {"c": {"$tensor": "t2"}, "d": {"$tensor": ["t3", {"device": "cuda:0"}]}}

    assert codec.tensor_names([plain, mixed]) == ["t0", "t1", "t2", "t3"]
    assert codec.tensor_facts([plain, mixed]) == {"t3": {"device": "cuda:0"}}
