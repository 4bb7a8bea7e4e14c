"""All that a pickle says comes back as plain values or as names, and no file of anybody's can do harm."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from proofs import Tally

from resumable import CheckpointDamaged, CheckpointNotFound, ResumableError, Unsupported, UsageError
from resumable.interop import pickle_values
from resumable.interop.other_files import look
from resumable.interop.pickle_values import Objects, plain
from resumable.interop.torch_file import Other, Stored, TorchFile

safe = pytest.mark.proves("safe")
FOREIGN = Path(__file__).parent / "foreign"


def saved(content: Any) -> bytearray:
    torch.save(content, stream := io.BytesIO())
    return bytearray(stream.getvalue())


def opened(whole: bytearray) -> Any:
    return plain(TorchFile(len(whole), lambda begin, end: memoryview(whole)[begin:end], Objects).content)


def back(content: Any) -> Any:
    return opened(saved({"it": content}))["it"]


class Thing:
    """An object of a class, with attributes."""

    def __init__(self) -> None:
        self.inner = [1]


class Things(list[Any]):
    """A list of a class of its own."""


class Named(dict[str, Any]):
    """A dict of a class of its own."""


VALUES: list[Any] = [
    *(None, True, -5, 1 << 80, 2.5, float("inf"), "é", b"a\xff", b"", 1 + 2j, (), (1, (2,)), [[1], []]),
    *({1, 2}, frozenset({"a"}), {"a": {1: 2, None: 3, 2.5: 4}}, collections.Counter({3: 1})),
    *(collections.deque([1, 2], 5), collections.deque([1]), torch.Size([2, 3]), torch.bfloat16),
    *(torch.device("cuda:1"), torch.device("cpu")),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_plain_value_comes_back_as_it_was(value: Any) -> None:
    found = back(value)

    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("dtype", ["?", "b", "<u2", ">i4", "<i8", "<f2", "<f8", ">f4", "<c16"])
def test_numbers_and_arrays_of_numpy_come_back(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)

    for value in (array, np.asfortranarray(array), array[0, 1], array[:0]):
        found = back(value)
        assert (type(found), found.dtype, found.shape) == (type(value), value.dtype, value.shape)
        assert np.array_equal(found, value)


def test_a_boolean_that_is_neither_is_not_made() -> None:
    made = pickle_values.Object("numpy.core.multiarray _reconstruct", ())
    made.state = (1, (2,), pickle_values.Object("numpy dtype", ("b1", False, True)), False, b"\x01\x02")

    assert plain(made) == Other("numpy.core.multiarray._reconstruct")


def test_dicts_of_other_kinds_come_back_as_dicts() -> None:
    assert back(collections.OrderedDict(a=1)) == {"a": 1}
    assert back(collections.defaultdict(list, {"a": 1})) == {"a": 1}


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (argparse.Namespace(lr=0.1), "argparse.Namespace"),
        (Thing(), "test_pickled.Thing"),
        (Things([1, 2]), "test_pickled.Things"),
        (Named(a=1), "test_pickled.Named"),
        (Thing, "test_pickled.Thing"),
        (torch.nn.functional.relu, "torch.nn.functional.relu"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (Path("a"), "pathlib.PosixPath"),
        (np.array([Thing()], object), "numpy._core.multiarray._reconstruct"),
        (np.datetime64("2020-01-01"), "numpy._core.multiarray.scalar"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_an_object_comes_back_as_its_name(value: Any, name: str) -> None:
    assert back([value, 1])[0].name.replace("numpy.core", "numpy._core").endswith(name.rpartition(".")[2])
    assert type(back(value)) is Other


def test_tensors_come_back_unread_and_those_that_are_tied_as_one() -> None:
    value = torch.arange(4.0)

    found = back({"a": value, "b": value, "part": value[1:], "p": torch.nn.Parameter(value)})

    assert {*map(type, found.values())} == {Stored}
    assert found["a"] == found["b"] == found["p"] != found["part"]


def test_what_is_no_plain_key_is_left_out_with_its_value() -> None:
    assert back({"a": 1, (1, 2): 2, Thing: 3}) == {"a": 1}


class Evil:
    """What would run a command, if it were unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/resumable-was-here",)


@safe
def test_what_would_run_a_command_is_only_a_name(tmp_path: Path) -> None:
    found = back({"evil": Evil(), "lr": 0.1})

    assert found == {"evil": Other(f"{os.name}.system"), "lr": 0.1}
    assert not Path("/tmp/resumable-was-here").exists()


@safe
def test_a_list_that_stands_in_many_places_does_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pickle_values, "_MOST", 10_000)
    inner: list[Any] = [1]
    for _ in range(40):
        inner = [inner] * 10

    with pytest.raises(Unsupported, match="more than 10,000 values"):
        back(inner)


@safe
def test_what_holds_itself_is_cut_off() -> None:
    inner: list[Any] = []
    inner.append(inner)

    found, depth = back(inner), 0
    while type(found) is list:
        found, depth = found[0], depth + 1

    assert (found.name, depth) == ("what is nested more than 48 deep", 48)


def archive(code: bytes, **others: bytes) -> bytearray:
    with zipfile.ZipFile(stream := io.BytesIO(), "w") as file:
        file.writestr("archive/data.pkl", code)
        for name, content in others.items():
            file.writestr(f"archive/data/{name}", content)
    return bytearray(stream.getvalue())


@safe
@pytest.mark.parametrize(
    "code",
    [
        b"\x80\x02]q\x00(cos\nsystem\nX\x02\x00\x00\x00id\x85R0e.",
        b"\x80\x02(1.",
        b"\x80\x020.",
        b"\x80\x02}K\x01}s.",
        b"\x80\x02}X\x01\x00\x00\x00ab.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02K\x01)R.",
        b"\x80\x02ccollections\nOrderedDict\n](K\x01eh\x85R.",
        b"\x80\x02ccollections\nOrderedDict\n]K\x01a\x85R.",
        b"\x80\x02cnumpy\ndtype\n]\x85R.",
        b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00O8\x85R.",
        b"\x80\x02ctorch\nSize\nX\x01\x00\x00\x00a\x85R.",
        b"\x80\x02c__builtin__\nset\n](]e\x85R.",
        b"\x80\x02ccollections\nCounter\n}X\x01\x00\x00\x00a]s\x85R.",
        b"\x80\x02ccollections\ndeque\n)J\xff\xff\xff\xff\x86R.",
        b"\x80\x02ctorch\ndevice\nX\x04\x00\x00\x00cudaJ\x00\x00\x00\x7f\x86R.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf-8\x86R.",
        b"\x80\x02c__builtin__\ncomplex\nX\x01\x00\x00\x00a\x85R.",
        b"\x80\x02(cnumpy.core.multiarray\n_reconstruct\n)R(K\x01)K\x01K\x01K\x01tb.",
        b"\x80\x04\x95.",
        b"\x80\x02\x95.",
    ],
    ids=range(21),
)
def test_a_pickle_made_by_hand_is_a_name_or_an_error(code: bytes) -> None:
    with contextlib.suppress(ValueError, ResumableError):
        found = opened(archive(code))
        assert type(found) in (Other, list, dict, torch.Size, torch.device)


@safe
def test_corrupted_trees_are_values_or_errors_of_ours(tally: Tally, nightly: bool) -> None:
    with zipfile.ZipFile(FOREIGN / "lightning" / "middle.ckpt") as file:
        code = file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))
    draw, bad, count = random.Random(0), [], 100_000 if nightly else 3000
    for _ in range(count):
        changed = bytearray(code)
        for _ in range(draw.choice((1, 1, 2, 5))):
            changed[draw.randrange(len(code))] = draw.randrange(256)
        try:
            plain(Objects(memoryview(changed), lambda *_: Stored("a", torch.float32, 0, (1,), (1,))).run())
        except (ValueError, ResumableError):
            pass
        except BaseException as exc:
            bad.append(repr(exc))

    tally("corrupted trees of other tools", count, bad)
    assert not bad


@safe
def test_many_views_of_one_memory_do_not_fill_the_disk(tmp_path: Path) -> None:
    memory = torch.zeros(64 << 10)
    views = {str(at): memory[at : at + (32 << 10)] for at in range(1200)}
    torch.save({"model": views, "iter_num": 1}, tmp_path / "c.pt")

    with pytest.raises(Unsupported, match="more than twice the bytes"):
        look(str(tmp_path / "c.pt"), {})


def trainer(folder: Path, **files: Any) -> Path:
    """Return a copy of a checkpoint of the HF Trainer with other files in it."""
    folder.mkdir()
    for path in (FOREIGN / "transformers" / "checkpoint-4").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(json.dumps(content))
    return folder


@safe
@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/hostname", "sub/a.safetensors", ".", 3, None]
)
def test_an_index_leads_nowhere_outside_its_folder(name: Any, tmp_path: Path) -> None:
    source = (FOREIGN / "transformers" / "checkpoint-4" / "model.safetensors").read_bytes()
    (tmp_path / "outside.safetensors").write_bytes(source)
    folder = trainer(tmp_path / "c", model__safetensors__index__json={"weight_map": {"net.0.bias": name}})
    (folder / "model.safetensors").unlink()

    with pytest.raises(CheckpointDamaged, match=r"is damaged: (there is no|.* stands where)|unhashable"):
        look(str(folder), {})


@safe
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_a_link_in_a_folder_is_not_followed(name: str, tmp_path: Path) -> None:
    folder = trainer(tmp_path / "c")
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)

    with pytest.raises(ResumableError, match=r"cannot be read: Too many levels of symbolic links"):
        look(str(folder), {})


@safe
@pytest.mark.parametrize(
    "state",
    [
        [],
        {},
        {"global_step": "4"},
        {"global_step": -1},
        {"global_step": 4, "epoch": float("nan")},
        {"global_step": 4, "epoch": 1e300},
        {"global_step": 4, "epoch": [1]},
    ],
    ids=str,
)
def test_a_state_of_a_trainer_that_makes_no_sense_is_damaged(state: Any, tmp_path: Path) -> None:
    folder = trainer(tmp_path / "c", trainer_state__json=state)

    with pytest.raises(CheckpointDamaged):
        look(str(folder), {})


def test_a_file_that_was_cut_short_is_damaged(tmp_path: Path) -> None:
    whole = (FOREIGN / "lightning" / "middle.ckpt").read_bytes()
    (tmp_path / "c.ckpt").write_bytes(whole[:-100])

    with pytest.raises(CheckpointDamaged, match=r"c\.ckpt is damaged"):
        look(str(tmp_path / "c.ckpt"), {})


@pytest.mark.parametrize("is_legacy", [True, False])
def test_a_bare_pickle_is_refused_with_what_converts_it(is_legacy: bool, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    if is_legacy:
        torch.save({"model": {}}, path, _use_new_zipfile_serialization=False)
    else:
        path.write_bytes(pickle.dumps({"model": {}}))

    with pytest.raises(Unsupported, match="bare pickle") as caught:
        look(str(path), {})

    assert "weights_only=True), NEW)" in caught.value.fix


@pytest.mark.parametrize(
    ("names", "kind", "text"),
    [
        (["zero_to_fp32.py"], Unsupported, "DeepSpeed"),
        (["pytorch_model_fsdp_0"], Unsupported, "FSDP"),
        (["__0_0.distcp", ".metadata"], Unsupported, r"torch\.distributed\.checkpoint"),
        (["run.json"], UsageError, "written by resumable"),
        (
            ["checkpoint-500", "checkpoint_7", "x"],
            CheckpointNotFound,
            "It holds checkpoint-500, checkpoint_7",
        ),
        (["optimizer.bin"], CheckpointNotFound, "holds no weights"),
        (["optimizer.bin", "adapter_model.safetensors"], CheckpointNotFound, "but those of an adapter"),
    ],
)
def test_a_folder_that_cannot_be_imported_says_why(
    names: list[str], kind: type[ResumableError], text: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")

    with pytest.raises(kind, match=text):
        look(str(tmp_path), {})


@pytest.mark.parametrize(
    ("source", "kind", "text"),
    [
        ("s3://bucket/c.pt", UsageError, "is an address"),
        ("nothing.pt", CheckpointNotFound, "does not exist"),
        ("w.safetensors", Unsupported, "holds weights only"),
        ("w.pt", Unsupported, "holds weights only"),
        ("list.pt", Unsupported, "it holds a list of 1"),
        ("text.pt", Unsupported, "no archive of torch.save"),
    ],
)
def test_a_source_that_cannot_be_imported_says_why(
    source: str, kind: type[ResumableError], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(1)}, "w.pt")
    torch.save([1], "list.pt")
    Path("text.pt").write_text("hello")
    Path("w.safetensors").write_text("")

    with pytest.raises(kind, match=text):
        look(source, {})
