"""Weights from elsewhere: all that fit or none, whatever wraps them, and nothing in a file can do harm."""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import io
import json
import os
import pickle
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from counted import Tally
from forgery import forge
from torch import nn

from resumable import (
    CannotRead,
    CheckpointDamaged,
    CheckpointNotExpected,
    CheckpointNotFound,
    Misfit,
    ResumableError,
    Run,
    RunState,
    StateMismatch,
    Unsupported,
    UsageError,
    load_weights,
)
from resumable.interop import zip_archive
from resumable.interop.torch_file import TorchFile
from resumable.run import manifest

safe = pytest.mark.proves("safe")


def net(outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs))


def same(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return [*ours] == [*theirs] and all(map(torch.equal, ours.values(), theirs.values()))


def look(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture
def run(run_dir: Path) -> tuple[Run, nn.Module]:
    """A run with two checkpoints, the first of which is the best, and the model of the second."""
    model = net()
    model[0].requires_grad_(False)
    with RunState.load(run_dir, model=model, minimize="loss") as state:
        for step in state.steps(2):
            with torch.no_grad():
                model[2].weight.mul_(2)
            state.save(loss=step)
    return state.run, model


@pytest.mark.parametrize("where", ["", "newest", "checkpoints/000002-step-00000002"])
def test_the_weights_of_a_run_and_of_a_checkpoint_are_loaded(run: tuple[Run, nn.Module], where: str) -> None:
    fresh = net()

    assert not load_weights(fresh, run[0].path / where)
    assert same(fresh, run[1])


def test_of_a_run_the_newest_that_is_intact_is_taken(run: tuple[Run, nn.Module]) -> None:
    fresh, newest = net(), run[0].open(2).path
    (newest / "model.safetensors").write_bytes(b"")

    with pytest.warns(UserWarning, match="skipped"):
        load_weights(fresh, run[0].path)
    with pytest.raises(CheckpointDamaged):
        load_weights(fresh, newest)

    assert torch.equal(fresh[2].weight, run[1][2].weight / 2)


WRAPPED = [
    *("", "module.", "_orig_mod.", "model.", "module._orig_mod.", "_orig_mod.module."),
    *("model.module.", "module._orig_mod.model.", "model._orig_mod.module."),
]


@pytest.mark.parametrize("name", ["there.pt", "there.safetensors"])
@pytest.mark.parametrize("prefix", WRAPPED)
def test_a_prefix_does_not_count(tmp_path: Path, prefix: str, name: str) -> None:
    there, fresh = net(), net()
    save = torch.save if name.endswith(".pt") else safetensors.torch.save_file
    save({prefix + key: value for key, value in there.state_dict().items()}, tmp_path / name)

    assert not load_weights(fresh, tmp_path / name)
    assert same(fresh, there)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner
        self.head = nn.Linear(2, 1)


def test_a_prefix_does_not_count_in_the_model_either(tmp_path: Path) -> None:
    there, fresh = Wrapper(net()), Wrapper(nn.DataParallel(net()))
    torch.save(nn.DataParallel(there).state_dict(), tmp_path / "there.pt")

    assert not load_weights(nn.DataParallel(fresh), tmp_path / "there.pt")
    assert same(fresh.model.module, there.model)
    assert same(fresh.head, there.head)


def test_names_that_would_be_the_same_without_a_prefix_stay_apart(tmp_path: Path) -> None:
    layer = nn.Linear(1, 1)
    torch.save({"model.weight": torch.ones(1, 1), "module.weight": torch.zeros(1, 1)}, tmp_path / "a.pt")

    with pytest.raises(StateMismatch, match=r"module\.weight: only in the file"):
        load_weights(layer, tmp_path / "a.pt")


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
@pytest.mark.quick(3)
def test_the_weights_in_a_checkpoint_of_another_person_are_found(tmp_path: Path, key: str) -> None:
    there, fresh = net(), net()
    optimizer = torch.optim.AdamW(there.parameters())
    there(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    told = {
        key: there.state_dict(),
        "optimizer": optimizer.state_dict(),
        "args": argparse.Namespace(lr=0.1, sizes=[1, 2]),
        "milestones": collections.Counter([1, 1]),
        "best": torch.tensor(1.0),
        "step": 2**40,
        "shape": torch.Size([1, 2]),
        "rest": [None, True, 0.5, -1, 300, (), (1, 2, 3, 4), {"a": set()}],
    }
    torch.save(told, tmp_path / "there.pt")

    load_weights(fresh, tmp_path / "there.pt")

    assert same(fresh, there)


ENDLESS: dict[str, Any] = {}
ENDLESS["model"] = ENDLESS


@pytest.mark.parametrize(
    "content", [[1], {"epoch": 1}, {"model": {}, "state_dict": {}}, {0: torch.ones(1)}, ENDLESS]
)
def test_what_holds_no_weights_is_said_to(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "there.pt")

    with pytest.raises(Unsupported, match="no dict of tensors"):
        load_weights(net(), tmp_path / "there.pt")


def test_all_that_does_not_fit_is_reported_at_once_and_nothing_is_touched(tmp_path: Path) -> None:
    there, here = nn.Sequential(*net(), nn.Linear(2, 7)), nn.ModuleList([*net(5), nn.ReLU(), nn.Linear(1, 1)])
    before = look(here)
    torch.save(there.state_dict(), tmp_path / "there.pt")

    with pytest.raises(StateMismatch) as told:
        load_weights(here, tmp_path / "there.pt")

    assert "4.weight: missing in the file, float32[1, 1]" in str(told.value)
    assert "3.weight: only in the file, float32[7, 2]" in str(told.value)
    assert "2.bias: float32[2] in the file, float32[5] in the model" in str(told.value)
    assert all(torch.equal(before[name], value) for name, value in here.state_dict().items())


def test_what_fits_is_loaded_and_what_does_not_is_returned(tmp_path: Path) -> None:
    there, here = nn.Sequential(*net(), nn.Linear(2, 7)), nn.ModuleList([*net(5), nn.ReLU(), nn.Linear(1, 1)])
    torch.save(there.state_dict(), tmp_path / "there.pt")

    misfit = load_weights(here, tmp_path / "there.pt", strict=False)

    assert same(here[0], there[0])
    assert same(here[1], there[1])
    assert isinstance(misfit, Misfit)
    assert {*misfit.missing} == {"4.weight", "4.bias"}
    assert misfit.unexpected == {"3.weight": "float32[7, 2]", "3.bias": "float32[7]"}
    assert {*misfit.reshaped} == {"2.weight", "2.bias"}


def test_weights_without_anything_that_fits_are_an_error_in_any_case(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "there.pt")

    with pytest.raises(StateMismatch, match="nothing in"):
        load_weights(net(), tmp_path / "there.pt", strict=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


def test_a_tensor_with_two_names_needs_only_one_of_them(tmp_path: Path) -> None:
    there, fresh = Tied(), Tied()
    safetensors.torch.save_file({"embed.weight": there.embed.weight}, tmp_path / "one.safetensors")

    assert not load_weights(fresh, tmp_path / "one.safetensors")
    assert torch.equal(fresh.head.weight, there.embed.weight)


def test_the_other_name_of_a_tied_tensor_is_known_where_they_are_not_tied(tmp_path: Path) -> None:
    there, fresh = Tied(), Tied()
    fresh.head.weight = nn.Parameter(torch.zeros(3, 2))
    safetensors.torch.save_model(there, str(tmp_path / "one.safetensors"))

    assert not load_weights(fresh, tmp_path / "one.safetensors")
    assert torch.equal(fresh.head.weight, there.embed.weight)
    assert torch.equal(fresh.embed.weight, there.embed.weight)


def test_two_values_for_one_tensor_do_not_fit(tmp_path: Path) -> None:
    torch.save({"embed.weight": torch.ones(3, 2), "head.weight": torch.zeros(3, 2)}, tmp_path / "two.pt")

    with pytest.raises(StateMismatch, match=r"head\.weight: another value than embed\.weight"):
        load_weights(Tied(), tmp_path / "two.pt")
    model = Tied()
    assert load_weights(model, tmp_path / "two.pt", strict=False).reshaped.keys() == {"head.weight"}
    assert torch.equal(model.head.weight, torch.ones(3, 2))


def test_another_dtype_becomes_that_of_the_model(tmp_path: Path) -> None:
    there, fresh = net(), net()
    torch.save(there.half().state_dict(), tmp_path / "half.pt")

    load_weights(fresh, tmp_path / "half.pt")

    assert fresh[0].weight.dtype == torch.float32
    assert torch.equal(fresh[0].weight, there[0].weight.float())


class Choosy(nn.Module):
    error: type[BaseException] = ArithmeticError

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.last = nn.Linear(1, 1)

    def _load_from_state_dict(self, *_: Any) -> None:
        raise self.error("not these")


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
def test_a_model_that_refuses_in_the_middle_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    monkeypatch.setattr(Choosy, "error", error)
    model = nn.Sequential(nn.Linear(2, 2), Choosy())
    torch.save(nn.Sequential(nn.Linear(2, 2), Choosy()).state_dict(), tmp_path / "there.pt")
    before = look(model)

    with pytest.raises(error):
        load_weights(model, tmp_path / "there.pt")

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@safe
@pytest.mark.parametrize("name", ["there.pt", "there.safetensors"])
def test_a_file_may_be_expected_to_have_a_certain_content(tmp_path: Path, name: str) -> None:
    there, fresh, before = net(), net(), net()
    before.load_state_dict(fresh.state_dict())
    save = torch.save if name.endswith(".pt") else safetensors.torch.save_file
    save(there.state_dict(), tmp_path / name)
    told = subprocess.run(["sha256sum", tmp_path / name], capture_output=True, text=True, check=True).stdout

    with pytest.raises(CheckpointNotExpected):
        load_weights(fresh, tmp_path / name, expect=f"sha256:{'0' * 64}")
    assert same(fresh, before)
    load_weights(fresh, tmp_path / name, expect=f"sha256:{told.split()[0]}")
    assert same(fresh, there)


@safe
def test_a_checkpoint_may_be_expected_to_have_a_certain_content(run: tuple[Run, nn.Module]) -> None:
    fresh = net()
    load_weights(fresh, run[0].path, expect=run[0].open(2).pin())

    assert same(fresh, run[1])
    with pytest.raises(CheckpointNotExpected):
        load_weights(net(), run[0].path, expect=run[0].open(1).pin())


def test_what_cannot_be_meant_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="remote"):
        load_weights(net(), "s3://bucket/exp")
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module"):
        load_weights({"a": net()}, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expect="):
        load_weights(net(), tmp_path, expect="abc")


def test_what_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        load_weights(net(), tmp_path / "there.pt")
    with pytest.raises(CheckpointNotFound):
        load_weights(net(), tmp_path)
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    with pytest.raises(CannotRead, match="cannot be read"):
        load_weights(net(), tmp_path / "loop.pt")


@pytest.mark.parametrize("outputs", [2, 4])
def test_a_model_without_memory_is_refused(tmp_path: Path, outputs: int) -> None:
    torch.save(nn.Linear(3, outputs, bias=False).state_dict(), tmp_path / "weights.pt")
    with torch.device("meta"):
        model = nn.Linear(3, outputs, bias=False)

    with pytest.raises(UsageError, match=r"weight is on the meta device, .*\n.*to_empty"):
        load_weights(model, tmp_path / "weights.pt")


def test_of_several_models_none_is_chosen(run_dir: Path) -> None:
    with RunState.load(run_dir, model={"a": net(), "b": net()}) as state:
        state.save()

    with pytest.raises(Unsupported, match=r"2 models: model\.a, model\.b"):
        load_weights(net(), run_dir)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
]


def opened(content: bytes) -> TorchFile:
    """Return what lies in a file, from memory."""
    data = memoryview(bytearray(content))
    return TorchFile(len(data), lambda begin, end: data[begin:end])


def saved(value: Any) -> bytes:
    memory = io.BytesIO()
    torch.save(value, memory)
    return memory.getvalue()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_and_layout_are_those_that_torch_reads(dtype: torch.dtype) -> None:
    plain = torch.randint(0, 2, (4, 6)).to(dtype)
    tensors = {"plain": plain, "turned": plain.T, "part": plain[1:3, ::2], "number": plain[2, 2]}
    content = saved(
        {
            **tensors,
            "none": plain[:0],
            "empty": torch.zeros(0, 2).to(dtype),
            "parameter": nn.Parameter(plain, requires_grad=False),
        }
    )

    file, expected = opened(content), torch.load(io.BytesIO(content), weights_only=True)

    found = {name: file.tensor(stored) for name, stored in file.content.items()}
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert found[name].stride() == value.stride()
        assert (
            found[name]
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(value.contiguous().view(-1).view(torch.uint8))
        )
    assert found["plain"].data_ptr() == found["turned"].data_ptr()


def test_the_sizes_of_a_file_beyond_4_gib_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(io.BytesIO(saved({"a": torch.arange(5)}))) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    # From that size on numbers stand in other places.
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 3)

    assert opened(zipped(entries)).content["a"].shape == (5,)


class Call:
    """What a pickle is to call, and with what."""

    def __init__(self, what: Any, *arguments: Any) -> None:
        self.call = what, arguments

    def __reduce__(self) -> Any:
        return self.call


class Memory:
    """What a pickle says of the memory of a tensor."""

    def __init__(self, kind: Any, key: Any, count: Any) -> None:
        self.said = "storage", kind, key, "cpu", count


class Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.said if isinstance(value, Memory) else None


def pickled(value: Any, protocol: int = 2) -> bytes:
    memory = io.BytesIO()
    Pickler(memory, protocol).dump(value)
    return memory.getvalue()


def zipped(
    entries: dict[str, bytes],
    change: Callable[[list[zipfile.ZipInfo]], None] = lambda _: None,
    method: int = 0,
) -> bytes:
    """Return an archive, of which `change` may change the directory."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", method) as target:
        for name, content in entries.items():
            target.writestr(zipfile.ZipInfo(name), content, method)
        change(target.infolist())
    return memory.getvalue()


def of_pickle(code: bytes, **entries: bytes) -> bytes:
    return zipped({"a/data.pkl": code, **{f"a/data/{name}": data for name, data in entries.items()}})


def tensor(
    shape: Any = (2,),
    stride: Any = (1,),
    begin: Any = 0,
    memory: Any = None,
    *rest: Any,
    content: bytes = b"\0" * 8,
) -> bytes:
    """Return an archive with a tensor that is said to be so, in the memory of eight bytes."""
    memory = memory or Memory(torch.FloatStorage, "0", 2)
    made = Call(torch._utils._rebuild_tensor_v2, memory, begin, shape, stride, False, None, *rest)
    return of_pickle(pickled({"weight": made}), **{"0": content})


def change_of(**facts: Any) -> Callable[[list[zipfile.ZipInfo]], None]:
    def change(entries: list[zipfile.ZipInfo]) -> None:
        for name, value in facts.items():
            setattr(entries[1], name, value)

    return change


def an_archive(*change: Any) -> bytes:
    return zipped({"a/data.pkl": pickled({"a": 1}), "a/data/0": b"12345678"}, *change)


HOSTILE = {
    "runs a command": (of_pickle(pickled({"w": Call(os.system, "touch harm")})), "asks for posix.system"),
    "names a command": (of_pickle(pickled({"w": os.system})), "asks for posix.system"),
    "evaluates": (of_pickle(pickled({"w": Call(eval, "1")})), "eval"),
    "unpickles a class": (of_pickle(b"\x80\x02c__main__\nNet\n)\x81."), "__main__.Net"),
    "imports": (of_pickle(pickled({"w": Call(__import__, "harm")})), "__import__"),
    "torch.load in it": (of_pickle(b"\x80\x02ctorch\nload\n)R."), "torch.load"),
    "4 GB of bytearray": (of_pickle(pickled({"w": Call(bytearray, 4 * 10**9)})), "bytearray"),
    "calls a storage": (of_pickle(b"\x80\x02ctorch\nFloatStorage\nK\x01\x85R."), "with what no state dict"),
    "calls an OrderedDict with items": (
        of_pickle(b"\x80\x02ccollections\nOrderedDict\n]\x85R."),
        "with what no",
    ),
    "protocol 4": (of_pickle(pickled({"w": 1}, 4)), "protocol 4"),
    "extension codes": (of_pickle(b"\x80\x02\x82\x01."), "0x82"),
    "instance of old": (of_pickle(b"\x80\x02(ios\nsystem\n."), "0x69"),
    "10^12 elements of one": (tensor((10**6, 10**6), (0, 0)), "stands for only 2 stored"),
    "65 dimensions": (tensor((1,) * 65, (1,) * 65), "65 dimensions"),
    "beyond its memory": (tensor((3,)), "does not lie in the memory"),
    "beyond by its stride": (tensor((2,), (2,)), "does not lie in the memory"),
    "begins beyond": (tensor((1,), (1,), 2), "does not lie in the memory"),
    "before its memory": (tensor((1,), (1,), -1), "shape that is none"),
    "negative stride": (tensor((2,), (-1,), 1), "shape that is none"),
    "huge": (tensor((2**62,), (1,)), "shape that is none"),
    "of too huge": (tensor((0, 2**500), (1, 1)), "shape that is none"),
    "true as a length": (tensor((True,), (1,)), "shape that is none"),
    "a length that is a list": (tensor(([],), (1,)), "shape that is none"),
    "none of too many": (tensor((0, 2**61, 2**61), (1, 1, 1)), "too many or too long"),
    "none beyond its memory": (tensor((0,), (1,), 3), "does not lie in the memory"),
    "another count of strides": (tensor((1, 1), (1,)), "no shape"),
    "a list as its shape": (tensor([2], (1,)), "no shape"),
    "conjugate": (tensor((2,), (1,), 0, None, {"conj": True}), "conjugate"),
    "another memory": (tensor((2,), (1,), 0, Memory(torch.FloatStorage, "../0", 2)), "has not the 8 bytes"),
    "more memory": (tensor((2,), (1,), 0, Memory(torch.FloatStorage, "0", 2**40)), "has not the"),
    "another width": (tensor((1,), (1,), 0, Memory(torch.DoubleStorage, "0", 2)), "has not the 16 bytes"),
    "memory of no type": (tensor((2,), (1,), 0, Memory(torch.UntypedStorage, "0", 8)), "no dtype"),
    "memory of a dtype": (tensor((2,), (1,), 0, Memory(torch.float32, "0", 2)), "a storage is none"),
    "memory of a class": (
        of_pickle(b"\x80\x02((X\x07\0\0\0storageX\x01\0\0\0xX\x01\0\0\x000NK\x01tQ."),
        "none",
    ),
    "a text for a call": (of_pickle(b"\x80\x02X\x01\0\0\0x)R."), "cannot be called"),
    "items of a text": (of_pickle(b"\x80\x02X\x01\0\0\0xK\x01K\x01s."), "has no place"),
    "attributes of a number": (of_pickle(b"\x80\x02K\x01}b."), "attributes"),
    "appends to a dict": (of_pickle(b"\x80\x02}K\x01a."), "no list"),
    "a list as a key": (of_pickle(b"\x80\x02}]K\x01s."), "has no place"),
    "an empty stack": (of_pickle(b"\x80\x02."), "pickle is none"),
    "no mark": (of_pickle(b"\x80\x02K\x01t."), "pickle is none"),
    "no end": (of_pickle(b"\x80\x02K\x01"), "pickle is none"),
    "no name": (of_pickle(b"\x80\x02cos"), "pickle is none"),
    "a memo that was not made": (of_pickle(b"\x80\x02h\x07."), "pickle is none"),
    "a text longer than all": (of_pickle(b"\x80\x02X\xff\xff\xff\xffx."), "pickle is none"),
    "no utf-8": (of_pickle(b"\x80\x02X\x01\0\0\0\xff."), "pickle is none"),
    "half of a surrogate pair": (of_pickle(b"\x80\x02X\x03\0\0\0\xed\xa0\x80."), "pickle is none"),
    "a backslash in a name": (of_pickle(b"\x80\x02cos\\q\nsystem\n)R."), "is none|asks for"),
    "ten million digits": (of_pickle(b"\x80\x02L" + b"1" * 10_000_000 + b"L\n."), "pickle is none"),
    "takes more than there is": (of_pickle(b"\x80\x02K\x01\x86."), "pickle is none"),
    "200,000 lists in each other": (
        of_pickle(b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b"."),
        "no dict",
    ),
    "17 MB of pickle": (of_pickle(b"\x80\x02" + b"]" * (17 << 20)), "17,825,794 bytes"),
    "packed": (zipped({"a/data.pkl": b"\0" * (32 << 20)}, method=zipfile.ZIP_DEFLATED), "is packed"),
    "said to be larger": (an_archive(change_of(file_size=1 << 30)), "is packed"),
    "larger than all": (
        an_archive(change_of(file_size=1 << 30, compress_size=1 << 30)),
        "does not lie in it",
    ),
    "encrypted": (an_archive(change_of(flag_bits=1)), "is packed"),
    "overlapping": (an_archive(change_of(header_offset=0)), "overlap"),
    "elsewhere": (an_archive(change_of(header_offset=3)), "no entry"),
    "far away": (an_archive(change_of(header_offset=1 << 40)), "no entry"),
    "one name twice": (an_archive(change_of(filename="a/data.pkl", orig_filename="a/data.pkl")), "same name"),
    **{
        f"the name {name}": (zipped({"a/data.pkl": pickled({}), name: b""}), "cannot be the name")
        for name in ("../x", "/etc/x", "a/../../x", "a\\x", "a//x", "a/./x")
    },
    "two pickles": (zipped({"a/data.pkl": pickled({}), "b/data.pkl": pickled({})}), "has not made"),
    "no pickle": (zipped({"a/x": b""}), "has not made"),
    "big-endian": (zipped({"a/data.pkl": pickled({}), "a/byteorder": b"big"}), "another order"),
    "something after it": (an_archive() + b"x", "does not end as"),
    "a comment": (an_archive()[:-2] + b"\1\0x", "does not end as"),
    "something before it": (b"PK" + an_archive(), "does not begin as"),
    "the end alone": (b"PK", "does not end as"),
    "a bare pickle": (pickled({"w": Call(os.system, "touch harm")}), "before torch 1.6"),
    "text": (b"hello", "neither"),
    "nothing": (b"", "neither"),
}


@contextlib.contextmanager
def little_memory(most: int) -> Iterator[None]:
    """Let the process have just so many bytes more than it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@safe
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which can limit the memory of a process")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    content, why = HOSTILE[name]
    path = tmp_path / "there.pt"
    path.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(1, 2, bias=False)

    with little_memory(300 << 20), pytest.raises((Unsupported, CheckpointDamaged), match=why) as told:
        load_weights(model, path)

    assert str(path) in str(told.value)
    assert [*tmp_path.iterdir()] == [path]


@safe
def test_a_boolean_that_is_none_is_refused(tmp_path: Path) -> None:
    made = tensor((8, 1), (1, 1), 0, Memory(torch.BoolStorage, "0", 8), content=b"\7" * 8)
    (tmp_path / "there.pt").write_bytes(made)

    with pytest.raises(CheckpointDamaged, match="boolean"):
        load_weights(nn.Linear(1, 8, bias=False), tmp_path / "there.pt")


@safe
def test_an_archive_of_more_entries_than_make_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zip_archive, "_MOST_DIRECTORY", 200)

    opened(of_pickle(pickled({})))
    with pytest.raises(ValueError, match="directory of"):
        opened(of_pickle(pickled({}), a=b"", b=b"", c=b""))


@safe
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "there.pt")

    with pytest.raises(Unsupported, match="not a regular file"):
        load_weights(net(), tmp_path / "there.pt")


@safe
def test_torch_unpickles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there, fresh = net(), net()
    torch.save(there.state_dict(), tmp_path / "there.pt")
    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.delattr(module, name)

    load_weights(fresh, tmp_path / "there.pt")

    assert same(fresh, there)


@safe
@pytest.mark.parametrize("name", ["short", "long", "overlapping", "sizes", "negative", "metadata"])
def test_a_safetensors_file_that_is_none_is_damaged(tmp_path: Path, name: str) -> None:
    whole = safetensors.torch.save({"a": torch.ones(2), "b": torch.ones(2)})
    bad = {
        "short": whole[:-1],
        "long": b"\xff" * 8 + whole[8:],
        "overlapping": whole.replace(b"[8,16]", b"[0,16]"),
        "sizes": whole.replace(b'"shape":[2]', b'"shape":[3]'),
        "metadata": whole.replace(b'"a":{', b'"__metadata__":{'),
        "negative": whole.replace(b"[0,8]", b"[-8,8]"),
    }[name]
    assert bad != whole
    (tmp_path / "a.safetensors").write_bytes(bad)

    with pytest.raises(CheckpointDamaged):
        load_weights(net(), tmp_path / "a.safetensors")


@safe
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which can limit the memory of a process")
@pytest.mark.parametrize("name", ["weight", "other"])
def test_a_tensor_of_a_terabyte_that_does_not_fit_is_not_read(tmp_path: Path, name: str) -> None:
    header = {
        name: {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]},
        "bias": {"dtype": "U8", "shape": [1], "data_offsets": [1 << 40, (1 << 40) + 1]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + (1 << 40) + 1)
    model = nn.Linear(1, 1)

    with little_memory(300 << 20):
        misfit = load_weights(model, path, strict=False)

    assert [*misfit.reshaped, *misfit.unexpected] == [name]
    assert model.bias.item() == 0


@safe
@pytest.mark.parametrize(
    "text", [b"[]", b'{"model":{"model":[]}}', b'{"model":{"model":{"0.bias":1}}}', b'{"model":[1]}']
)
def test_a_checkpoint_whose_content_is_none_is_damaged(run: tuple[Run, nn.Module], text: bytes) -> None:
    forge(run[0].open(2), lambda _: text, "state.json")

    with pytest.raises(CheckpointDamaged, match="not a checkpoint's"):
        load_weights(net(), run[0].open(2).path)


@safe
def test_a_checkpoint_that_says_nothing_of_its_model_is_damaged(run: tuple[Run, nn.Module]) -> None:
    found = run[0].open(2)
    files = {file: record for file, record in found.about.files.items() if file != "state.json"}
    (found.path / manifest.NAME).write_bytes(manifest.to_json(replace(found.about, files=files)))

    with pytest.raises(CheckpointDamaged, match=r"no state\.json"):
        load_weights(net(), found.path)


def outcome(content: bytes) -> Any:
    """Return a digest of the tensors in a file, or None if it is refused."""
    try:
        file = opened(content)
        found = {name: file.tensor(stored) for name, stored in file.content["model"].items()}
    except (ValueError, Unsupported, KeyError, AttributeError, TypeError):
        return None
    return {name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in found.items()}


@safe
@pytest.mark.proves("noticed")
def test_no_byte_of_a_file_can_be_another_unnoticed(tally: Tally, times: int) -> None:
    whole = saved({"model": nn.Linear(3, 2).state_dict()})
    expected = outcome(whole)
    bad = []
    flips = [1 << bit for bit in range(8)] if times > 1 else [1, 0xFF]
    for place in range(len(whole)):
        for flip in flips:
            damaged = bytearray(whole)
            damaged[place] ^= flip
            try:
                found = outcome(bytes(damaged))
            except Exception as exc:
                found = exc
            if found not in (None, expected):
                bad.append(f"byte {place} ^ {flip}: {found!r:.200}")

    assert expected
    tally("damaged .pt files", len(whole) * len(flips), bad)


def test_what_reads_an_archive_asks_for_no_byte_outside_it() -> None:
    whole = saved({"a": torch.ones(3)})
    asked: list[tuple[int, int]] = []

    def read(begin: int, end: int) -> memoryview:
        asked.append((begin, end))
        return memoryview(whole)[begin:end]

    for size in range(0, len(whole), 7):
        with contextlib.suppress(ValueError, ResumableError):
            zip_archive.Archive(size, read)

    assert all(0 <= begin <= end <= len(whole) for begin, end in asked)
