"""Safetensors files: the same to us and to the safetensors library, and nothing else is taken for one."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from resumable.files import codec, safetensors_header, tensor_file
from resumable.files.safetensors_header import SIZES, header_size

STORED = list(tensor_file.DTYPES)


def content(tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str] | None = None) -> bytearray:
    """Return the bytes of a file of ours."""
    return tensor_file.to_safetensors(tensors, aliases or {})


def read(data: bytes) -> dict[str, torch.Tensor]:
    """Return what we make of the bytes of a file."""
    return tensor_file.from_safetensors(memoryview(bytearray(data)))


def made(header: Any, body: bytes = b"") -> bytes:
    """Return a file with a header of one's own."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def samples(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return tensors of a dtype, of every shape that is easy to get wrong."""
    size = 6 * dtype.itemsize
    raw = torch.arange(size, dtype=torch.uint8) if dtype != torch.bool else torch.arange(size).eq(3)
    matrix = raw.view(torch.uint8).view(dtype).reshape(2, 3)
    return {
        "matrix": matrix,
        "scalar": matrix[1, 1],
        "empty": matrix[:0],
        "transposed": matrix.t(),
        "sliced": matrix[:, ::2],
        "expanded": matrix[:1].expand(4, 3),
        "single": matrix[:1, ::2][:, :1],
        "deep": matrix.reshape(1, 2, 1, 3, 1),
    }


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether both hold the same names, dtypes, shapes and bits."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype
        and one[name].shape == other[name].shape
        and torch.equal(bits(one[name]), bits(other[name]))
        for name in one
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_the_safetensors_library_reads_what_we_write(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content(samples(dtype)))
    assert equal(safetensors.torch.load_file(path), samples(dtype))


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_we_read_what_the_safetensors_library_writes(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    written = {name: tensor.clone().contiguous() for name, tensor in samples(dtype).items()}
    safetensors.torch.save_file(written, path, metadata={"format": "pt"})
    assert equal(read(path.read_bytes()), written)


def test_no_dtype_that_safetensors_knows_is_stored_as_mere_bytes() -> None:
    known = {dtype for code, dtype in safetensors.torch._TYPES.items() if code != "F4"}
    assert known <= tensor_file.DTYPES.keys()


# The oldest torch that the tests run with lacks it.
PACKED_DTYPES = [getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name)]


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(7))


def test_a_tied_model_is_loaded_strictly_by_the_safetensors_library(tmp_path: Path) -> None:
    model, fresh = _Tied(), _Tied()
    path = tmp_path / "model.safetensors"
    encoded = codec.encode(model.state_dict())
    path.write_bytes(content(encoded.tensors, encoded.aliases))
    assert safetensors.torch.load_model(fresh, path, strict=True) == (set(), [])
    assert equal(fresh.state_dict(), model.state_dict())


def test_tied_names_stand_in_the_metadata_and_cannot_replace_the_format(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content({"weight": torch.ones(2)}, {"tied": "weight", "format": "weight"}))
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"tied": "weight", "format": "pt"}


def test_every_tensor_begins_at_a_multiple_of_its_element() -> None:
    tensors = {str(dtype): samples(dtype)["single"] for dtype in reversed(STORED)}
    data = content({**tensors, "wide": torch.ones(1, dtype=torch.complex128)})
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[str(d)]["data_offsets"][0] % d.itemsize == 0 for d in STORED)


@pytest.mark.parametrize("dtype", [*STORED, torch.complex128, *PACKED_DTYPES], ids=str)
def test_what_is_copied_into_the_views_of_a_layout_is_the_file(dtype: torch.dtype) -> None:
    tensors = samples(dtype)
    planned = tensor_file.layout(tensors, {"tied": "matrix"})
    memory = torch.zeros(planned.size, dtype=torch.uint8)
    memory.numpy()[: len(planned.header)] = bytearray(planned.header)

    views = planned.views(memory)
    for slot, view in zip(planned.slots, views, strict=True):
        view.copy_(tensors[slot.name])

    assert memory.numpy().tobytes() == content(tensors, {"tied": "matrix"})
    assert equal({slot.name: view for slot, view in zip(planned.slots, views, strict=True)}, tensors)
    assert all(view.data_ptr() == memory.data_ptr() + slot.begin for slot, view in filled(planned, views))


def filled(
    planned: tensor_file.Layout, views: list[torch.Tensor]
) -> list[tuple[tensor_file.Slot, torch.Tensor]]:
    """Return the slots that have bytes, with their views."""
    return [(slot, view) for slot, view in zip(planned.slots, views, strict=True) if view.numel()]


def test_a_layout_depends_on_names_shapes_dtypes_and_ties_alone() -> None:
    one = tensor_file.layout({"a": torch.zeros(2), "b": torch.zeros(3)}, {})
    assert tensor_file.layout({"a": torch.ones(2), "b": torch.ones(3)}, {}) == one
    for other in (
        tensor_file.layout({"a": torch.zeros(1, 2), "b": torch.zeros(3)}, {}),
        tensor_file.layout({"a": torch.zeros(2).int(), "b": torch.zeros(3)}, {}),
        tensor_file.layout({"a": torch.zeros(2), "c": torch.zeros(3)}, {}),
        tensor_file.layout({"a": torch.zeros(2), "b": torch.zeros(3)}, {"c": "a"}),
    ):
        assert other != one


def test_the_tensors_of_a_row_share_its_memory() -> None:
    tensors = {
        "wide": torch.arange(4.0).reshape(2, 2),
        "scalar": torch.tensor(7.0),
        "none": torch.zeros(0, 3),
        "whole": torch.arange(3, dtype=torch.int32),
        "mask": torch.tensor([True, False]),
        "last": torch.zeros(2, 0, dtype=torch.bool),
        "bytes": torch.arange(3, dtype=torch.uint8),
    }
    planned, data = tensor_file.layout(tensors, {}), content(tensors)
    slots = [slot for slot in planned.slots if slot.name != "wide"]

    row = tensor_file.from_row(memoryview(data)[slots[0].begin :], slots)

    found = {slot.name: tensor for slot, tensor in zip(slots, row, strict=True)}
    assert equal(found, {name: tensor for name, tensor in tensors.items() if name != "wide"})
    found["whole"].fill_(-1)
    assert equal(read(data), {**tensors, "whole": torch.full((3,), -1, dtype=torch.int32)})


def test_where_the_tensors_lie_is_known_from_the_header_alone() -> None:
    tensors = samples(torch.float64) | {"mask": torch.ones(3, dtype=torch.bool)}
    data = content(tensors, {"tied": "matrix"})
    start = header_size(data[:8], len(data))

    slots = tensor_file.read_header(memoryview(data)[:start], len(data))

    assert slots == tensor_file.layout(tensors, {"tied": "matrix"}).slots
    assert {slot.name: slot[1:3] for slot in slots} == {n: (t.dtype, t.shape) for n, t in tensors.items()}
    for slot in slots:
        assert data[slot.begin : slot.end] == bytes(tensor_file.as_bytes(tensors[slot.name]))


@pytest.mark.parametrize(("claimed", "size"), [(93, 100), (2**64 - 1, 100), (1, 8), (2**63, 2**26)])
def test_a_header_is_never_larger_than_its_file(claimed: int, size: int) -> None:
    with pytest.raises(ValueError, match="the header is longer than the file"):
        header_size(struct.pack("<Q", claimed) + b"{}", size)
    assert header_size(struct.pack("<Q", size - 8), size) == size


@pytest.mark.parametrize("size", [0, 7, 9, 2**62])
def test_a_file_of_another_size_than_its_header_says_is_refused(size: int) -> None:
    header = made({"a": entry()})
    assert tensor_file.read_header(header, len(header) + 8)
    with pytest.raises(ValueError, match=r"does not begin where|belong to no tensor"):
        tensor_file.read_header(header, len(header) + size)


def test_a_remembered_header_hides_no_other_content() -> None:
    header = bytearray(made({"a": entry()}))
    size = len(header) + 8
    for name in ("a", "b", "a"):
        header[header.index(b'"') + 1] = ord(name)
        assert [slot.name for slot in tensor_file.read_header(header, size)] == [name]
    for at in range(8, len(header)):
        broken = bytearray(header)
        broken[at] = 0
        with pytest.raises(ValueError, match=r"."):
            tensor_file.read_header(broken, size)
    assert [slot.name for slot in tensor_file.read_header(header, size)] == ["a"]


def test_a_dtype_that_this_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    header = made({"of a dtype to come": entry()})
    monkeypatch.setattr(tensor_file, "_DTYPES_BY_CODE", {})

    with pytest.raises(ValueError, match="this version of torch has no "):
        tensor_file.read_header(header, len(header) + 8)


@pytest.mark.parametrize(
    "shapes", [[(7,)] * 3, [()] * 3, [(2, 3)] * 3, [(7,), (2, 3), (), (0, 2)], [(0,)] * 3]
)
def test_tensors_of_a_row_are_copied_into_memory_of_their_own(shapes: list[tuple[int, ...]]) -> None:
    tensors = {str(number): torch.randn(shape) for number, shape in enumerate(shapes)}
    data = memoryview(content(tensors, {}))
    slots = tensor_file.read_header(data[: header_size(data[:8], len(data))], len(data))

    made = tensor_file.copied_from_row(data[slots[0].begin :], slots)
    assert all(torch.equal(one, tensors[name]) for name, one in zip(slots.names, made, strict=True))
    assert all(one.untyped_storage().nbytes() == one.nbytes and one._base is None for one in made)
    assert slots.kinds == [(one.dtype, one.shape) for one in made]
    assert (slots.dtypes, slots.sizes) == ({torch.float32}, [one.nbytes for one in made])


def test_the_sizes_of_the_elements_are_those_of_torch() -> None:
    assert all(SIZES[code] == dtype.itemsize for dtype, code in tensor_file.DTYPES.items())


@pytest.mark.parametrize("spaces", range(8))
def test_a_tensor_at_an_odd_address_is_moved_before_it_is_used(spaces: int) -> None:
    # A vector instruction on it would be a segmentation fault.
    data = made(json.dumps({"a": entry()}).encode() + b" " * spaces, np.ones(2, np.float32).tobytes())
    found = read(data)["a"]
    assert found.data_ptr() % 4 == 0
    assert torch.equal(found, torch.ones(2))


def test_booleans_in_memory_that_are_uninitialized_can_be_read_again() -> None:
    garbage = torch.tensor([0, 1, 7, 255], dtype=torch.uint8).view(torch.bool)
    once = read(content({"mask": garbage}))
    assert torch.equal(bits(once["mask"]), torch.tensor([0, 1, 1, 1], dtype=torch.uint8))
    assert equal(read(content(once)), once)


def test_two_tensors_are_equal_by_their_bits() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert tensor_file.is_equal(nan, nan.clone())
    assert tensor_file.is_equal(torch.ones(2, 3).t(), torch.ones(3, 2))
    assert not tensor_file.is_equal(zero, -zero)
    assert not tensor_file.is_equal(zero, torch.zeros(1, 1))


def entry(**changes: Any) -> dict[str, Any]:
    """Return the description of two floats at the beginning of the file, with changes."""
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


def empty(*shape: Any) -> dict[str, Any]:
    """Return the description of a tensor that has no bytes."""
    return entry(shape=[*shape], data_offsets=[0, 0])


EIGHT = b"\0" * 8
HOSTILE = {
    "nothing": b"",
    "a length that is cut off": b"\0\0\0",
    "a length alone": struct.pack("<Q", 2),
    "a header longer than the file": struct.pack("<Q", 100) + b"{}",
    "a header longer than any memory": struct.pack("<Q", 2**64 - 1) + b"{}",
    "no header": struct.pack("<Q", 0),
    "a header of NUL": made(EIGHT),
    "a header without a bottom": made(b'{"a":' * 100_000),
    "numbers without an end": made(b'{"a":{"dtype":"F32","shape":[' + b"9" * 10**5 + b"]}}"),
    "a name twice": made(
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
        b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "bytes that belong to nothing": made({}, b"\0"),
    "bytes before the first": made({"a": entry(data_offsets=[8, 16])}, EIGHT * 2),
    "bytes after the last": made({"a": entry()}, EIGHT + b"\0"),
    "bytes that are missing": made({"a": entry()}, EIGHT[1:]),
    "bytes between two": made({"a": entry(), "b": entry(data_offsets=[9, 17])}, EIGHT * 2 + b"\0"),
    "bytes of two": made({"a": entry(), "b": entry(data_offsets=[4, 12])}, EIGHT + b"\0" * 4),
    "twice the same bytes": made({"a": entry(), "b": entry()}, EIGHT),
    "an end before its begin": made({"a": entry(data_offsets=[8, 0])}, EIGHT),
    "an empty tensor behind the end": made({"a": entry(shape=[0], data_offsets=[9, 9])}),
    "a bool of 7": made({"a": entry(dtype="BOOL", data_offsets=[0, 2])}, b"\1\7"),
    "more bytes than the shape has": made({"a": entry(shape=[1])}, EIGHT),
    "fewer bytes than the shape has": made({"a": entry(shape=[3])}, EIGHT),
    "no shape, but an object": made({"a": entry(dtype="F64", shape={})}, EIGHT),
    "no shape, but a text": made({"a": entry(dtype="F64", shape="")}, EIGHT),
    "as many dimensions as nobody has": made({"a": entry(shape=[2] + [1] * 64)}, EIGHT),
    "a shape that overflows to 2": made({"a": entry(shape=[2**63 + 1, 2])}, EIGHT),
    "nothing times 2**63": made({"a": empty(0, 2**63)}),
    "nothing times 2**63 after something": made(
        {"a": entry(), "b": entry(shape=[0, 2**63], data_offsets=[8, 8])}, EIGHT
    ),
    "nothing times 2**64": made({"a": empty(2**64, 0)}),
    "nothing times 2**93": made({"a": empty(0, 2**31, 2**31, 2**31)}),
    "nothing times 2**124": made({"a": empty(2**62, 2**62, 0)}),
    **{
        f"{key} = {value!r}": made({"a": entry(**{key: value})}, EIGHT)
        for key, values in {
            "dtype": ("F33", "f32", "", None, 1, [], {}, "F4", "float32"),
            "shape": (None, 2, "2", {}, "", [-2], [-2, -1], [True, 2], [2.0], ["2"], [[2]], {"2": 2}),
            "data_offsets": (None, 8, "08", [], [8], [0, 8, 8], [0, 8.0], [False, 8], {"0": 1}, [-8, 0]),
            "extra": (1,),
        }.items()
        for value in values
    },
    **{f"header {value!r}": made(value) for value in ([], None, 1, "a", [["a", entry()]])},
    **{f"entry {value!r}": made({"a": value}) for value in ([], None, 1, "dtype", {}, ["dtype", "shape"])},
    **{f"metadata {value!r}": made({"__metadata__": value}) for value in ([], None, 1, "a")},
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_value_errors(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (many reasons, one kind)
        read(data)


def test_the_corpus_is_damage_to_a_file_that_is_read() -> None:
    found = read(made({"__metadata__": {}, "a": entry(), "b": empty(3, 0) | {"data_offsets": [8, 8]}}, EIGHT))
    assert equal(found, {"a": torch.zeros(2), "b": torch.zeros(3, 0)})


def test_no_truncated_file_is_read() -> None:
    data = content({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.bool), "c": torch.ones(0)})
    for length in range(len(data)):
        with pytest.raises(ValueError):  # noqa: PT011
            read(data[:length])


def test_a_flipped_bit_is_never_another_error() -> None:
    data = content({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bool), "c": torch.ones(0, 3)})
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            readable_or_value_error(bytes(data))
            data[position] ^= 1 << bit


def readable_or_value_error(data: bytes) -> None:
    """Fail unless the bytes are tensors within them, or a ValueError."""
    try:
        found = read(data)
    except ValueError:
        return
    assert sum(tensor.nbytes for tensor in found.values()) <= len(data)


sizes = st.sampled_from([0, 1, 2, 3, 4, 8, 16, -1, 2**31, 2**63, 2**64, True, 1.0, None, "2"])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*tensor_file.DTYPES.values(), "F4", "", None]),
        "shape": st.lists(sizes, max_size=4),
        "data_offsets": st.lists(sizes, min_size=2, max_size=2),
    }
)
headers = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), entries | st.none() | st.just({}))


@settings(deadline=None, database=None)
@given(st.binary(max_size=60) | st.builds(made, headers, st.binary(max_size=16)))
def test_any_bytes_are_tensors_within_them_or_a_value_error(data: bytes) -> None:
    readable_or_value_error(data)


def boxes_of(whole: torch.Tensor, cut: int) -> list[tuple[dict[str, torch.Tensor], dict[str, list[int]]]]:
    """Return a tensor in two files of boxes: the tensors of each, and where they begin."""
    return [({"w": whole[:cut]}, {"w": [0, 0]}), ({"w": whole[cut:]}, {"w": [cut, 0]})]


def box_file(tensors: dict[str, torch.Tensor], begins: dict[str, list[int]]) -> bytes:
    planned = tensor_file.layout(tensors, {}, begins)
    return planned.header + b"".join(bytes(tensor_file.as_bytes(tensors[s.name])) for s in planned.slots)


@pytest.mark.filterwarnings("ignore")
def test_torchs_distributed_checkpoint_reads_files_of_boxes(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    if not hasattr(dcp, "HuggingFaceStorageReader"):
        pytest.skip("this torch reads no such files")
    whole = torch.randn(7, 3)
    for number, (tensors, begins) in enumerate(boxes_of(whole, 4), 1):
        name = f"shard-{number:05}-model-00001-of-00001.safetensors"
        (tmp_path / name).write_bytes(box_file(tensors, begins))
    found = {"w": torch.zeros(7, 3)}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)

    assert torch.equal(found["w"], whole)


def begins_in(data: bytes) -> dict[str, tuple[int, ...]]:
    header = data[: safetensors_header.header_size(data[:8], len(data))]
    return safetensors_header.begins_of(header, safetensors_header.entries_of(header, len(data)))


def test_a_file_of_boxes_says_where_they_begin() -> None:
    tensors, begins = boxes_of(torch.randn(7, 3), 4)[1]
    tensors, begins = tensors | {"scalar": torch.ones(())}, begins | {"scalar": []}

    assert begins_in(box_file(tensors, begins)) == {"w": (4, 0), "scalar": ()}


@pytest.mark.parametrize(
    "begins",
    [
        {},
        {"w": [0]},
        {"w": [0, -1]},
        {"w": [0, 0.5]},
        {"w": [0, True]},
        {"w": "00"},
        {"w": [0, 0], "other": [0]},
    ],
)
def test_a_file_that_says_of_its_boxes_what_cannot_be_is_refused(begins: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"begin|there is no other"):
        begins_in(box_file({"w": torch.ones(2, 3)}, begins))


def test_a_file_of_whole_tensors_is_none_of_boxes() -> None:
    with pytest.raises(ValueError, match="None stands where str belongs"):
        begins_in(bytes(tensor_file.to_safetensors({"w": torch.ones(2)}, {})))
