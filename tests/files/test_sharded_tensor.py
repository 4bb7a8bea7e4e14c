"""Sharded tensors in a tree: what the JSON says of them, and the names of their files."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from resumable.errors import CannotStore
from resumable.files import codec, sharded_tensor


class DTensor(torch.Tensor):
    """What torch shows of a tensor of four rows, of which two are here."""

    __module__ = "torch.distributed.tensor"
    placements = ("Shard(0)",)
    device_mesh = "two processes"

    @property
    def shape(self) -> Any:
        return torch.Size([4, *self.to_local().shape[1:]])

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def _sharded(dtype: torch.dtype = torch.float32) -> Any:
    return torch.ones(2, 3, dtype=dtype).as_subclass(DTensor)


def test_the_whole_shape_of_a_sharded_tensor_is_in_the_json() -> None:
    memo: codec.Memo = {}
    tree = {"sharded": _sharded(), "plain": torch.zeros(2)}

    first = codec.encode({"model": tree}, memo=memo)
    again = codec.encode({"model": tree}, memo=memo)

    assert first.json["model"] == {
        "sharded": {"$tensor": ["model.sharded", {"shape": [4, 3], "elements": "float32"}]},
        "plain": {"$tensor": "model.plain"},
    }
    assert first.json == again.json
    assert again.key == codec.encode({"model": tree}, memo=memo).key
    assert first.tensors["model.sharded"] is tree["sharded"]
    assert sharded_tensor.size(tree["sharded"]) == 24
    assert sharded_tensor.place(tree["sharded"]) == tree["sharded"].to_local().data_ptr()


def test_a_sharded_tensor_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(CannotStore, match=r"sharded tensor of dtype torch\.complex128"):
        codec.encode({"one": _sharded(torch.complex128)})


def test_a_tensor_of_another_shape_than_the_whole_is_refused() -> None:
    tree = {"one": {"$tensor": ["one", {"shape": [4, 3]}]}}

    assert codec.decode(tree, {"one": torch.zeros(4, 3)})["one"].shape == (4, 3)
    other = {"one": {"$tensor": ["one", {"shape": [4, 3], "elements": "int8"}]}}
    with pytest.raises(ValueError, match="should be of 'int8'"):
        codec.decode(other, {"one": torch.zeros(4, 3)})
    with pytest.raises(ValueError, match="should have"):
        codec.decode(tree, {"one": torch.zeros(2, 3)})


def test_what_is_empty_here_is_tied_to_nothing() -> None:
    one, other = (torch.zeros(0, 3).as_subclass(DTensor) for _ in range(2))

    assert sharded_tensor.identity(one) != sharded_tensor.identity(other)
    assert sharded_tensor.identity(one) == sharded_tensor.identity(one)


def test_a_file_of_shards_is_known_by_its_name() -> None:
    path = codec.shard_path("optimizer", 11, is_frozen=True, has_frozen=True)

    assert path == "optimizer/shard-00012-model-00002-of-00002.safetensors"
    assert (codec.shard_of(path), codec.stem_of(path)) == (11, "optimizer")
    assert codec.is_frozen(path)
    assert codec.has_one_writer(path)
    assert not codec.is_frozen(codec.shard_path("optimizer", 11))
    assert codec.stem_of("optimizer") == "optimizer"
