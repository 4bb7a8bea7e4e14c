"""A checkpoint as docs/format.md describes it, read by what was written from that page alone."""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import format_reader
import numpy as np
import pytest
import tiny
import torch
from forgery import forge
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import Run, RunState
from resumable.run import manifest

VALUES: dict[str, Any] = {
    "plain": [None, True, 3, 0.5, "text", {"a": [1]}],
    "numbers": [2**70, -(2**53) - 1, float("inf"), complex(1, -2)],
    "bytes": [b"\x00\xff", bytearray(b"ab")],
    "lists": [(1, (2,)), {1, 2}, frozenset({3}), deque([1, 2], 5)],
    "dicts": [{1: "a", "$b": 2}, OrderedDict(b=1, a=2), Counter(a=2)],
    "default": defaultdict(int, a=1),
    "surrogate": ["\ud800", {"\udfff": 1}],
    "numpy": [
        np.float32(0.5),
        np.bool_(True),
        np.str_("a\x00"),
        np.bytes_(b"b"),
        np.datetime64("2026-01-01"),
    ],
}
ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "c": np.arange(6.0).reshape(2, 3),
    "f": np.asfortranarray(np.arange(6, dtype="<i2").reshape(2, 3)),
    "empty": np.zeros((0, 2), "<f4"),
    "bool": np.array([True, False]),
    "scalar": np.array(3.0),
}


class Tied(nn.Module):
    """Two names for one tensor, one that is not trained, and one that takes more than a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("large", torch.randn(4_400_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, which its tests leave as it was."""
    return tmp_path_factory.mktemp("runs") / "exp"


@pytest.fixture(scope="module")
def trained(run: Path) -> dict[str, Any]:
    """What was trained, with two checkpoints in `run`, the newest in mid-epoch."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=2, shuffle=True)
    tensors = {
        "bf16": torch.randn(3).bfloat16(),
        "turned": torch.randn(2, 3).T,
        "complex": torch.ones(1) * 1j,
    }
    extra = {"values": VALUES, "arrays": ARRAYS, "tensors": tensors}
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "extra": extra}
    with RunState.load(run, **parts, minimize="loss") as state:
        for _ in state.epochs(1):
            for (x,) in state.batches():
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if state.batch in (0, 2):
                    state.save(loss=loss.detach()).wait()
                if state.batch == 2:
                    parts["weights"] = {k: v.clone() for k, v in model.state_dict().items()}
                    parts["random"] = random.getstate()
                    return parts
    raise AssertionError("the third batch never came")


def test_a_reader_made_from_the_page_finds_the_weights_and_moments(
    trained: dict[str, Any], run: Path
) -> None:
    folder, about = format_reader.newest(run)
    trees = format_reader.trees(folder)

    assert (about["number"], about["parent"], about["epoch"], about["batch"]) == (2, 1, 0, 3)
    for name, value in trained["weights"].items():
        assert np.array_equal(trees["model"]["model"][name], value.numpy()), name
    (group,) = trees["optimizer"]["optimizer"]["groups"]
    moments = trees["optimizer"]["optimizer"]["state"]["exp_avg"]
    assert group["lr"] == 0.1
    assert group["betas"] == (0.9, 0.999)
    assert moments["second.bias"].shape == (4,)
    assert {*group["params"]} >= {*moments}


def test_a_reader_made_from_the_page_reads_every_kind_of_value(trained: dict[str, Any], run: Path) -> None:
    trees = format_reader.trees(format_reader.newest(run)[0])
    values, arrays = trees["extra"]["extra.values"], trees["extra"]["extra.arrays"]

    assert repr(values) == repr(VALUES)
    assert {name: [*map(type, held)] for name, held in values.items() if name != "default"} == {
        name: [*map(type, held)] for name, held in VALUES.items() if name != "default"
    }
    for name, array in ARRAYS.items():
        assert np.array_equal(arrays[name], array), name
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
    held, tensors = trees["extra"]["extra.tensors"], trained["extra"]["tensors"]
    assert np.array_equal(held["turned"], tensors["turned"].numpy())
    assert np.array_equal(held["complex"], tensors["complex"].numpy())
    assert held["bf16"] == tensors["bf16"].view(torch.uint8).numpy().tobytes()


def test_a_reader_made_from_the_page_knows_where_the_training_stood(
    trained: dict[str, Any], run: Path
) -> None:
    own = format_reader.rank(format_reader.newest(run)[0])
    generator = own["random"]["python"]

    assert own["position"]["step"] == own["loader"]["batch"] == 3
    assert own["loader"]["source"]["samples"] == own["position"]["samples"] == 6
    assert (generator["version"], tuple(generator["words"]), generator["gauss"]) == trained["random"]


@pytest.mark.usefixtures("trained")
def test_a_reader_made_from_the_page_notices_damage(run: Path) -> None:
    newest, about = format_reader.newest(run)
    for name in ["manifest.json", *about["files"]]:
        good = (newest / name).read_bytes()
        (newest / name).write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        found, _ = format_reader.newest(run)
        (newest / name).write_bytes(good)

        assert found == format_reader.checkpoints(run)[1], name


@pytest.mark.parametrize(
    "splits", [{}, {"split": {"n": 10, "fractions": [0.8, 0.2], "seed": 1, "digest": "ab43"}}]
)
def test_the_splits_of_an_earlier_version_are_ignored(tmp_path: Path, splits: dict[str, Any]) -> None:
    def add(content: bytes) -> bytes:
        tree = json.loads(content)
        assert "splits" not in tree["position"]
        tree["position"]["splits"] = splits
        return json.dumps(tree).encode()

    training, state = tiny.load(tmp_path / "exp")
    with state:
        tiny.save_next(training, state, 1.0)
    forge(Run(tmp_path / "exp").open(1), add, "ranks/00000.json")
    beside = manifest.seal({"splits": splits})
    (tmp_path / "exp" / "splits.json").write_bytes(beside)

    tiny.assert_goes_on(tmp_path / "exp", 1)

    assert (tmp_path / "exp" / "splits.json").read_bytes() == beside


def test_the_reader_is_made_without_the_library() -> None:
    text = Path(format_reader.__file__).read_text()

    assert "import resumable" not in text
    assert "from resumable" not in text
