"""What is exported is read by the tools that it is for, and nothing half written has its name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from torch import nn

from resumable import CannotStore, Run, RunState, SaveFailed, UsageError
from resumable.cli.app import main
from resumable.files import disk
from resumable.interop import exporting


class Tied(nn.Module):
    """A model with a tied head, a buffer, a frozen part and a few dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.low = nn.Linear(4, 4).to(torch.bfloat16)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.low.requires_grad_(False)
        self.register_buffer("mask", torch.tensor([True, False]))


@pytest.fixture
def model(run_dir: Path) -> nn.Module:
    model = Tied()
    with RunState.load(run_dir, model=model, maximize="acc") as state:
        state.save(acc=2)
        with torch.no_grad():
            model.head.weight.add_(1)
        state.save(acc=1)
    return model


def export(*arguments: object) -> int:
    return main(["export", *map(str, arguments)])


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    assert export(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name])


def test_a_safetensors_file_is_loaded_by_its_library(model: nn.Module, run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    assert export(f"{run_dir}@newest", "-o", out) == 0

    safetensors.torch.load_model(fresh := Tied(), str(out))
    with safetensors.safe_open(out, "pt") as file:
        about = file.metadata()

    assert_same(fresh.state_dict(), model.state_dict())
    assert about == {"format": "pt", "head.weight": "embed.weight"}


def test_a_pt_file_is_loaded_with_its_ties(model: nn.Module, run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt"
    assert export(run_dir, "-o", out) == 0

    found = torch.load(out, weights_only=True)

    assert_same(found, model.state_dict())
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


@pytest.mark.parametrize(("size", "files"), [("5GB", 1), ("80B", 4), ("1B", 9)])
def test_a_folder_is_in_the_form_of_hugging_face(
    model: nn.Module, run_dir: Path, tmp_path: Path, size: str, files: int
) -> None:
    out = tmp_path / "hf"
    assert export(run_dir, "-o", out, "--max-shard-size", size) == 0

    loaded: dict[str, torch.Tensor] = {}
    for path in sorted(out.glob("*.safetensors")):
        loaded |= safetensors.torch.load_file(path)
    expected = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    assert_same(dict(sorted(loaded.items())), dict(sorted(expected.items())))
    assert len([*out.glob("*.safetensors")]) == files
    if files > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
        assert index["weight_map"].keys() == expected.keys()
        assert (out / f"model-00001-of-{files:05}.safetensors").exists()


@pytest.mark.heavy
def test_a_sharded_folder_is_loaded_by_accelerate(model: nn.Module, run_dir: Path, tmp_path: Path) -> None:
    modeling = pytest.importorskip("accelerate.utils.modeling")
    out = tmp_path / "hf"
    assert export(run_dir, "-o", out, "--max-shard-size", "80B") == 0

    modeling.load_checkpoint_in_model(fresh := Tied(), str(out), strict=False)

    assert_same(fresh.state_dict(), model.state_dict())


def test_the_best_and_any_other_can_be_named(
    model: nn.Module, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [f"{run_dir}@best", f"{run_dir}@1", run_dir / "checkpoints" / "000001-step-00000000"]

    found = [told(capsys, one, "-o", tmp_path / f"{n}.pt") for n, one in enumerate(where)]

    assert [one["number"] for one in found] == [1, 1, 1]
    best = torch.load(tmp_path / "0.pt")
    assert torch.equal(best["head.weight"] + 1, model.head.weight)


def test_of_several_models_one_is_named_and_so_is_an_average(run_dir: Path, tmp_path: Path) -> None:
    two, average = {"G": nn.Linear(1, 1), "D": nn.Linear(2, 2)}, nn.Linear(3, 3)
    with RunState.load(run_dir, model=two, extra={"ema": average, "notes": {}}) as state:
        state.save()

    with pytest.raises(UsageError, match=r"holds 2 models; there are: extra\.ema, model\.D, model\.G"):
        exporting.read(Run(run_dir).open(1), None)
    assert export(run_dir, "-o", tmp_path / "D.pt", "--model", "D") == 0
    assert export(run_dir, "-o", tmp_path / "ema.pt", "--model", "extra.ema") == 0

    assert_same(torch.load(tmp_path / "D.pt"), two["D"].state_dict())
    assert_same(torch.load(tmp_path / "ema.pt"), average.state_dict())


def test_nothing_is_replaced_unless_that_is_said(
    model: nn.Module, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out := tmp_path / "model.pt").write_text("mine")

    assert export(run_dir, "-o", out) == 2
    assert out.read_text() == "mine"
    assert "is there already" in capsys.readouterr().err

    assert export(run_dir, "-o", out, "--force") == 0
    assert torch.load(out).keys() == model.state_dict().keys()


@pytest.mark.parametrize("name", ["", "/model.safetensors", "/model.pt"])
def test_a_checkpoint_is_not_exported_into_one(model: nn.Module, run_dir: Path, name: str) -> None:
    assert export(run_dir, "-o", f"{run_dir}/newest{name}", "--force") == 2
    assert main(["verify", str(run_dir), "--all"]) == 0


def test_a_folder_may_be_the_one_in_hand(
    model: nn.Module, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    assert export(run_dir, "-o", ".") == 0
    assert os.listdir(tmp_path / "here") == ["model.safetensors"]
    assert [*tmp_path.glob(".here-*")] == []


def test_a_folder_keeps_all_but_old_shards(model: nn.Module, run_dir: Path, tmp_path: Path) -> None:
    (out := tmp_path / "hf").mkdir()
    (out / "config.json").write_text("{}")

    assert export(run_dir, "-o", out, "--max-shard-size", "80B") == 0
    assert export(run_dir, "-o", out) == 2
    assert export(run_dir, "-o", out, "--force") == 0

    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "hf"])
def test_what_fails_leaves_nothing_under_the_name(
    name: str, model: nn.Module, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> None:
        raise OSError(28, "No space left on device")

    (there := tmp_path / "out").mkdir()
    monkeypatch.setattr(disk.os, "fsync", fail)
    with pytest.raises(SaveFailed, match="No space left"):
        exporting.write(exporting.read(Run(run_dir).open(2), None), there / name, 1 << 30)

    assert os.listdir(there) == []


def test_a_damaged_checkpoint_is_not_exported(
    model: nn.Module, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / "newest" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-20] ^= 1  # In a weight, which can have any value
    path.write_bytes(content)

    assert export(f"{run_dir}@2", "-o", tmp_path / "m.pt") == 4
    assert told(capsys, run_dir, "-o", tmp_path / "m.pt")["number"] == 1


def test_a_dtype_without_a_place_is_refused_and_a_pt_file_has_it(run_dir: Path, tmp_path: Path) -> None:
    model = nn.ParameterDict({"weight": nn.Parameter(torch.ones(2, dtype=torch.complex128))})
    with RunState.load(run_dir, model=model) as state:
        state.save()
    found = exporting.read(Run(run_dir).open(1), None)

    with pytest.raises(CannotStore, match=r"weight is complex128.*safetensors"):
        exporting.write(found, tmp_path / "m.safetensors", 1 << 30)
    exporting.write(found, tmp_path / "m.pt", 1 << 30)

    assert_same(torch.load(tmp_path / "m.pt"), model.state_dict())
    assert not (tmp_path / "m.safetensors").exists()


class WithState(nn.Linear):
    """A module that keeps more than tensors."""

    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def test_what_is_no_tensor_is_in_a_pt_file_and_mentioned(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunState.load(run_dir, model=WithState(1, 1)) as state:
        state.save()

    export(run_dir, "-o", tmp_path / "m.pt")
    left = told(capsys, run_dir, "-o", tmp_path / "m.safetensors")["left_out"]

    fresh = WithState(1, 1)
    fresh.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    assert (fresh.calls, left) == (3, ["_extra_state"])


def test_a_name_that_says_nothing_is_refused(
    model: nn.Module, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run_dir, "-o", tmp_path / "model.onnx") == 2
    assert "the name model.onnx does not say in which form to export" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        export(run_dir, "-o", tmp_path / "hf", "--max-shard-size", "5 apples")
