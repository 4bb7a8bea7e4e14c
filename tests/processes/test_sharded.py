"""Sharded trainings: FSDP2, HSDP and tensor parallelism, resumed on the same mesh and on any other."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import shutil
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import forgery
import format_reader
import gloo
import pytest
import sharded_training
import torch
from counted import Tally
from grouped import grouped
from sharded_training import MESHES, Net, Tokens, differing, make, read_by_dcp, run, values
from torch import Tensor

from resumable import (
    CannotStore,
    CheckpointDamaged,
    Ranks,
    ResumableError,
    Run,
    RunState,
    Unsupported,
    UsageError,
    load_weights,
)
from resumable.cli.app import main
from resumable.files import large_files, tensor_file
from resumable.files.sharded_tensor import local
from resumable.parts.models import ModulePart
from resumable.run import manifest
from resumable.run.checkpoint import Checkpoint
from resumable.trace import digest

pytestmark = pytest.mark.skipif(not sharded_training.CAN_SHARD, reason=sharded_training.WHY_NOT)
SHARDED = [kind for kind in MESHES if kind not in ("plain", "ddp")]
_QUICK = ("fsdp-2", "fsdp-tp")
TWICE = [kind if kind in _QUICK else pytest.param(kind, marks=pytest.mark.heavy) for kind in SHARDED]


@pytest.mark.heavy
@pytest.mark.proves("exact")
@pytest.mark.parametrize("kind", TWICE)
def test_a_sharded_training_killed_three_times_ends_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    whole = values(run(kind, tmp_path / "whole", 7, tmp_path))

    for seed, step in enumerate((2, 5, 6)):
        run(kind, tmp_path / "exp", 7, tmp_path, seed=seed, dies=step)
    ended = values(run(kind, tmp_path / "exp", 7, tmp_path, seed=4))

    for now, then in zip(ended, whole, strict=True):
        assert differing(now["ended"], then["ended"]) == []
        assert differing(now["own"], then["own"]) == []
        shares = 1 + max(one["share"] for one in ended)
        assert now["samples"] == then["samples"] == 7 * 2 * shares
        assert now["seen"] == then["seen"][-len(now["seen"]) :]
        assert now["drawn"].tobytes() == then["drawn"].tobytes()


@pytest.mark.heavy
@pytest.mark.parametrize("here", MESHES)
def test_every_mesh_continues_from_every_other(tmp_path: Path, here: str) -> None:
    saved = values(run(here, tmp_path / "exp", 3, tmp_path))

    for there in MESHES:
        copy = shutil.copytree(tmp_path / "exp", tmp_path / there)
        for one in values(run(there, copy, 3, tmp_path, seed=1)):
            assert differing(one["begun"], saved[0]["ended"]) == [], there


@pytest.mark.heavy
def test_another_number_of_shares_gives_each_sample_once(tmp_path: Path) -> None:
    seen: list[list[Any]] = []
    for kind, until in (("fsdp-2", 2), ("fsdp-3", 3), ("fsdp-tp", 100)):
        ended = values(run(kind, tmp_path / "exp", until, tmp_path, epochs=1, numbered=True))
        shares = {one["share"]: one["seen"] for one in ended}
        if kind == "fsdp-tp":
            # Those of a group of tensor parallelism have read the same.
            assert all(one["seen"] == shares[one["share"]] for one in ended)
        seen += [batch for batches in shares.values() for batch in batches]

    assert sorted(number for batch in seen for number in batch) == [*range(24)]


def _draws(rank: int, run_dir: Path, kind: str) -> tuple[int, bytes]:
    model, optimizer, share = make(kind, 3)
    # Every process seeds for itself, and a resume gives it back the state of its share.
    torch.manual_seed(rank)
    drawn = b""
    with RunState.load(run_dir, model=model, optimizer=optimizer, allow=["loader"]) as state:
        for _ in state.steps(state.step + 1):
            drawn = torch.rand(3).numpy().tobytes()
    return share[0], drawn


@pytest.mark.heavy
def test_generators_go_with_the_share_of_the_data(tmp_path: Path) -> None:
    run("fsdp-2", tmp_path / "exp", 2, tmp_path, torch=True)

    two = dict(values(gloo.run(2, _draws, tmp_path / "exp", "fsdp-2", folder=tmp_path)))
    four = values(gloo.run(4, _draws, tmp_path / "exp", "fsdp-tp", folder=tmp_path))
    wide = values(gloo.run(4, _draws, tmp_path / "exp", "hsdp", folder=tmp_path))

    assert len({*two.values()}) == 2
    assert {*four} == {*two.items()}
    assert len({*wide}) == 4
    assert {*two.items()} <= {*wide}


def _names_after_an_evaluation(rank: int) -> tuple[bool, bool]:
    model, optimizer, _ = make("fsdp-2", 0)
    sharded_training.evaluate(model, torch.zeros(2, 5, dtype=torch.int64))
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    shown = {id(p) for module in model.modules() for p in module._parameters.values()}
    known = {id(p) for p in ModulePart("model", model, "model").parameters().values()}
    return trained <= shown, trained <= known


def test_parameters_after_an_evaluation_are_those_of_the_optimizer(tmp_path: Path) -> None:
    for is_so, is_known in values(gloo.run(2, _names_after_an_evaluation, folder=tmp_path)):
        assert not is_so
        assert is_known


def _odd(size: int) -> torch.nn.Module:
    model = torch.nn.Linear(10, 5)
    model.register_buffer("waves", torch.randn(2, 3, dtype=torch.complex128))
    model.register_buffer("mask", torch.rand(7) < 0.5)
    model.register_buffer("nothing", torch.zeros(0, 4))
    model.eighth = torch.nn.Parameter(torch.randn(16, 3).to(torch.float8_e5m2), requires_grad=False)
    model.brain = torch.nn.Parameter(torch.randn(9, 2).to(torch.bfloat16))
    if size > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (size,))
        for name in ("weight", "brain"):
            live = getattr(model, name)
            sharded = distribute_tensor(live.detach(), mesh, [Shard(live.dim() - 1)])
            setattr(model, name, torch.nn.Parameter(sharded))
        model.mask = distribute_tensor(model.mask, mesh, [Shard(0)])
    return model


def _saves_odd(rank: int, run_dir: Path, size: int, seed: int) -> dict[str, bytes]:
    torch.manual_seed(seed)
    model = _odd(size)
    with RunState.load(run_dir, model=model) as state:
        state.save().wait()
    wholes = {name: sharded_training.gathered(one) for name, one in model.state_dict().items()}
    return {name: bytes(tensor_file.as_bytes(one)) for name, one in wholes.items()}


@pytest.mark.heavy
def test_tensors_of_any_dtype_stand_beside_sharded_ones(tmp_path: Path) -> None:
    saved = values(gloo.run(2, _saves_odd, tmp_path / "exp", 2, 0, folder=tmp_path))[0]

    for seed, size in enumerate((2, 3, 1, 2), 1):
        for found in values(gloo.run(size, _saves_odd, tmp_path / "exp", size, seed, folder=tmp_path)):
            assert found == saved


OPTIMIZERS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "fused": lambda params: torch.optim.AdamW(params, 1e-2, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, torch.tensor(1e-2), amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9),
    "Muon": lambda params: torch.optim.Muon(params, 1e-2),
}
WAYS = ["mixed precision", "offloaded", "activations made again", "compiled"]


def _in_some_way(rank: int, run_dir: Path, way: str, steps: int, seed: int) -> list[bytes]:
    """Train under `fully_shard` with one of its options, or with one of the optimizers."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    # Muon takes matrices only, and no dimension that cannot be halved.
    has_bias = way != "Muon"
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(8, 14, bias=has_bias), torch.nn.ReLU(), torch.nn.Linear(14, 6, bias=has_bias)
    )
    options: dict[str, Any] = {}
    if way == "activations made again":
        model[0] = checkpoint_wrapper(model[0])  # type: ignore[no-untyped-call]
    if way == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if way == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    mesh = init_device_mesh("cpu", (2,))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, **options)
    model = torch.compile(model, backend="eager") if way == "compiled" else model
    optimizer = OPTIMIZERS.get(way, OPTIMIZERS["momentum"])([*model.parameters()])
    state = RunState.load(run_dir, model=model, optimizer=optimizer, ranks=Ranks(timeout=20))
    for _ in state.steps(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).float().square().mean().backward()
        optimizer.step()
        state.save().wait()
    state.close()
    moments = [value for of_one in optimizer.state.values() for value in of_one.values()]
    return [bytes(tensor_file.as_bytes(local(one))) for one in (*model.state_dict().values(), *moments)]


@pytest.mark.heavy
@pytest.mark.proves("exact")
@pytest.mark.parametrize("way", [*WAYS, *OPTIMIZERS])
def test_every_way_to_shard_a_model_is_exact(tmp_path: Path, way: str) -> None:
    if way == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    whole = values(gloo.run(2, _in_some_way, tmp_path / "whole", way, 4, 0, folder=tmp_path))

    for seed, steps in enumerate((2, 3)):
        values(gloo.run(2, _in_some_way, tmp_path / "exp", way, steps, seed, folder=tmp_path))
    ended = values(gloo.run(2, _in_some_way, tmp_path / "exp", way, 4, 9, folder=tmp_path))

    assert ended == whole


def _averaged(rank: int, run_dir: Path, steps: int, seed: int) -> list[bytes]:
    """Train with an average in a model of its own, and one in a dict."""
    torch.set_num_threads(1)
    model, optimizer, _ = make("fsdp-2", seed)
    average, _, _ = make("fsdp-2", seed)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = {name: p.detach().clone() for name, p in trained.items()}
    state = RunState.load(run_dir, model=model, optimizer=optimizer, extra={"average": average, "kept": kept})
    for _ in state.steps(steps):
        optimizer.zero_grad()
        model(torch.randint(13, (2, 5))).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.2)
            for name, mean in kept.items():
                mean.lerp_(trained[name], 0.1)
        state.save().wait()
    state.close()
    return [local(one).numpy().tobytes() for one in (*average.state_dict().values(), *kept.values())]


@pytest.mark.heavy
@pytest.mark.proves("exact")
def test_averages_are_resumed_in_shards(tmp_path: Path) -> None:
    whole = values(gloo.run(2, _averaged, tmp_path / "whole", 5, 0, folder=tmp_path))

    for seed, steps in enumerate((2, 3)):
        values(gloo.run(2, _averaged, tmp_path / "exp", steps, seed, folder=tmp_path))
    ended = values(gloo.run(2, _averaged, tmp_path / "exp", 5, 9, folder=tmp_path))

    assert ended == whole


def _in_windows(rank: int, run_dir: Path, kind: str, stop: int, seed: int, reduces: bool) -> Any:
    """Step after every third batch; save and stop after `stop` batches."""
    torch.set_num_threads(1)
    model, optimizer, share = make(kind, seed)
    sampler: Any = torch.utils.data.DistributedSampler(Tokens(), share[1], share[0])
    loader = torch.utils.data.DataLoader(Tokens(), 1, sampler=sampler)
    state = RunState.load(run_dir, model=model, optimizer=optimizer, loader=loader)
    told = ""
    for number, batch in enumerate(state.batches(), state.batch):
        if not reduces:
            model.set_requires_gradient_sync(number % 3 == 2)  # type: ignore[operator]
        model(batch).square().mean().backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        if number + 1 == stop:
            try:
                state.save().wait()
            except Unsupported as exc:
                told = str(exc)
            break
    found = sharded_training.local(model, optimizer)
    state.close()
    return told or found


@pytest.mark.heavy
@pytest.mark.proves("exact")
@pytest.mark.parametrize("kind", ["fsdp-2", "tp"])
def test_a_window_of_accumulation_is_resumed_in_shards(tmp_path: Path, kind: str) -> None:
    whole = values(gloo.run(2, _in_windows, tmp_path / "whole", kind, 9, 0, True, folder=tmp_path))

    for seed, stop in enumerate((4, 8)):
        values(gloo.run(2, _in_windows, tmp_path / "exp", kind, stop, seed, True, folder=tmp_path))
    ended = values(gloo.run(2, _in_windows, tmp_path / "exp", kind, 9, 7, True, folder=tmp_path))

    for now, then in zip(ended, whole, strict=True):
        assert differing(now, then) == []


@pytest.mark.heavy
def test_gradients_that_are_not_reduced_yet_are_refused(tmp_path: Path) -> None:
    told = values(gloo.run(2, _in_windows, tmp_path / "exp", "fsdp-2", 4, 0, False, folder=tmp_path))
    at_a_step = values(gloo.run(2, _in_windows, tmp_path / "exp", "fsdp-2", 6, 0, False, folder=tmp_path))

    assert all("set_requires_gradient_sync" in one and "after the step" in one for one in told)
    assert all(isinstance(one, dict) for one in at_a_step)


def _closes_in_a_window(rank: int, run_dir: Path) -> list[str]:
    """Make a step, sum up gradients without reducing them, and close; return the warnings."""
    torch.set_num_threads(1)
    model, optimizer, _ = make("fsdp-2", 0)
    state = RunState.load(run_dir, model=model, optimizer=optimizer)
    for is_reduced in (True, False):
        model.set_requires_gradient_sync(is_reduced)  # type: ignore[operator]
        model(torch.arange(5).view(1, 5)).square().mean().backward()
        if is_reduced:
            optimizer.step()
            optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        state.close()
    return [str(one.message) for one in told]


@pytest.mark.heavy
def test_a_close_before_gradients_are_reduced_warns_instead_of_failing(tmp_path: Path) -> None:
    for told in values(gloo.run(2, _closes_in_a_window, tmp_path / "exp", folder=tmp_path)):
        assert any("what was trained since the last save is in no checkpoint" in one for one in told)

    assert not Run(tmp_path / "exp").numbers()


def _refused(rank: int, run_dir: Path, what: str) -> str:
    model, optimizer, _ = make("fsdp-tp", 0)
    sampler: Any = torch.utils.data.DistributedSampler(Tokens())
    loader = torch.utils.data.DataLoader(Tokens(), 1, sampler=sampler)
    given = {"loader": loader} if what == "sampler" else {}
    try:
        state = RunState.load(run_dir, model=model, optimizer=optimizer, **given)
        state.vars["average"] = next(model.parameters()).detach().clone()
        state.save()
    except (UsageError, CannotStore) as exc:
        return f"{exc.problem} {exc.fix}"
    return ""


@pytest.mark.heavy
def test_a_sampler_for_every_process_is_refused_where_some_share_data(tmp_path: Path) -> None:
    told = values(gloo.run(4, _refused, tmp_path / "exp", "sampler", folder=tmp_path))

    for rank, text in enumerate(told):
        assert "of num_replicas=4" in text, rank
        assert "num_replicas=2, rank=" in text


@pytest.mark.heavy
def test_a_sharded_tensor_among_the_variables_is_refused(tmp_path: Path) -> None:
    told = values(gloo.run(4, _refused, tmp_path / "exp", "vars", folder=tmp_path))

    assert all("vars.average is sharded" in text and "extra={...}" in text for text in told)


class _Picky:
    """Refuses its state when it is told to."""

    refuses = False

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise RuntimeError("not this")


def _goes_back(rank: int, run_dir: Path, how: str) -> Any:
    """Go back to the second step after a third one."""
    torch.set_num_threads(1)
    model, optimizer, _ = make("fsdp-2", 0)
    picky = _Picky()
    state = RunState.load(run_dir, model=model, optimizer=optimizer, extra={"picky": picky})
    seen, told = [], ""
    for step in state.steps(3):
        optimizer.zero_grad()
        model(torch.full((2, 5), step + 1)).square().mean().backward()
        optimizer.step()
        seen.append(sharded_training.local(model, optimizer))
        if step == 1:
            state.save().wait()
    picky.refuses = how == "refused"
    try:
        state.restore(1, only="model" if how == "only" else None)
    except ResumableError as exc:
        told = str(exc)
    now = sharded_training.local(model, optimizer)
    state.close()
    weights = [name for name in now if not name.startswith(("exp_", "step."))]
    return told, differing(now, seen[1]), differing(now, seen[2]), weights


@pytest.mark.quick(3)
@pytest.mark.parametrize("how", ["back", "only", "refused"])
def test_a_sharded_training_goes_back_or_stays_as_it_was(tmp_path: Path, how: str) -> None:
    for told, from_second, from_third, weights in values(
        gloo.run(2, _goes_back, tmp_path / "exp", how, folder=tmp_path)
    ):
        if how == "refused":
            assert "refused its state" in told
            assert from_third == []
        elif how == "back":
            assert from_second == []
        else:
            assert {*from_second}.isdisjoint(weights)
            assert {*from_third} <= {*weights}


def _with_other_layers(rank: int, run_dir: Path) -> Any:
    torch.manual_seed(3)
    model = Net(inner=16)
    sharded_training.shard(model, "fsdp-2")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2, foreach=False)
    before = sharded_training.whole(model, optimizer)
    allowed = ["model.up.*", "model.down.weight", "loader"]
    RunState.load(run_dir, model=model, optimizer=optimizer, allow=allowed).close()
    return before, sharded_training.whole(model, optimizer)


@pytest.mark.heavy
def test_what_fits_is_restored_where_a_layer_has_another_shape(tmp_path: Path) -> None:
    saved = values(run("fsdp-2", tmp_path / "exp", 2, tmp_path))[0]["ended"]
    resized = {"up.weight", "up.bias", "down.weight"}

    for before, now in values(gloo.run(2, _with_other_layers, tmp_path / "exp", folder=tmp_path)):
        assert {name for name in before if before[name].tobytes() == now[name].tobytes()} >= resized
        kept = {name for name in now if not any(name.endswith(one) for one in resized)}
        assert all(now[name].tobytes() == saved[name].tobytes() for name in kept)


def _takes_weights(rank: int, run_dir: Path) -> dict[str, Any]:
    model, optimizer, _ = make("fsdp-tp", 9)
    load_weights(model, run_dir)
    return sharded_training.whole(model, optimizer)


@pytest.mark.heavy
def test_weights_are_loaded_into_a_sharded_model(tmp_path: Path) -> None:
    saved = values(run("fsdp-3", tmp_path / "exp", 2, tmp_path))[0]["ended"]

    for found in values(gloo.run(4, _takes_weights, tmp_path / "exp", folder=tmp_path)):
        assert differing(found, {name: saved[name] for name in found}) == []


# What the files hold, read by one process.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of four processes that has saved after its second and third step."""
    folder = tmp_path_factory.mktemp("saved")
    ended = values(run("fsdp-tp", folder / "exp", 3, folder))
    return folder / "exp", ended[0]["ended"]


@pytest.fixture
def exp(saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    return shutil.copytree(saved[0], tmp_path / "exp")


def _alone(run_dir: Path, **options: Any) -> tuple[Net, torch.optim.Optimizer]:
    model, optimizer, _ = make("plain", 5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s).*has changed since checkpoint.*world_size")
        RunState.load(
            run_dir, model=model, optimizer=optimizer, allow=["loader"], **grouped(**options)
        ).close()
    return model, optimizer


@pytest.mark.heavy
@pytest.mark.parametrize("is_pinned", [False, True])
def test_one_process_reads_what_four_have_written(
    exp: Path, saved: tuple[Path, dict[str, Any]], is_pinned: bool
) -> None:
    newest = Run(exp).checkpoints()[-1]
    options = {"expect": newest.pin(), "resume": newest.path} if is_pinned else {}

    model, optimizer = _alone(exp, **options)

    assert differing(sharded_training.whole(model, optimizer), saved[1]) == []


@pytest.mark.heavy
def test_what_is_written_has_each_element_once(exp: Path) -> None:
    newest = Run(exp).checkpoints()[-1]

    sizes = [record.size for file, record in newest.about.files.items() if file.startswith("model/")]
    elements = sum(one.numel() for one in Net().state_dict().values()) - 13 * 10  # the head is tied
    headers = [len(newest.read_header(file)) for file in newest.about.files if file.startswith("model/")]
    assert sum(sizes) - sum(headers) == 4 * elements
    # Of the frozen ones, which are replicated for tensor parallelism, two processes have nothing to write.
    assert len(sizes) == 6
    assert newest.about.data_ranks == (0, 0, 1, 1)


def test_the_page_on_the_format_is_enough_to_read_it(exp: Path, saved: tuple[Path, dict[str, Any]]) -> None:
    folder, about = format_reader.newest(exp)
    found = {**format_reader.sharded(folder, "model"), **format_reader.sharded(folder, "optimizer")}

    assert about["data_ranks"] == [0, 0, 1, 1]
    assert {name.rpartition(".")[0] for name in found} >= {"exp_avg.up", "embed", "frozen"}
    for name, value in found.items():
        assert value.tobytes() == saved[1][name].tobytes()


def _flips(found: Checkpoint) -> Iterator[tuple[str, int]]:
    for file, record in found.about.files.items():
        if "shard-" in file:
            yield from ((file, at) for at in {0, 9, record.size // 2, record.size - 1})


@pytest.mark.heavy
@pytest.mark.proves("noticed")
def test_every_flipped_bit_is_named_and_touches_nothing(exp: Path) -> None:
    found = Run(exp).checkpoints()[-1]
    for file, at in _flips(found):
        content = (found.path / file).read_bytes()
        damaged = bytearray(content)
        damaged[at] ^= 4
        (found.path / file).write_bytes(damaged)
        model, optimizer, _ = make("plain", 5)
        before = sharded_training.whole(model, optimizer)

        with pytest.raises(CheckpointDamaged, match=file if at > 7 else "damaged"):
            RunState.load(exp, model=model, optimizer=optimizer, allow=["loader"], resume=found.path)

        assert differing(sharded_training.whole(model, optimizer), before) == []
        (found.path / file).write_bytes(content)
    _alone(exp)


@pytest.mark.proves("noticed")
@pytest.mark.parametrize("name", ["model/shard-00002-model-00001-of-00002", "optimizer/shard-00001"])
def test_a_missing_or_shortened_file_is_named(exp: Path, name: str) -> None:
    found = Run(exp).checkpoints()[-1]
    (file,) = [file for file in found.about.files if file.startswith(name)]
    content = (found.path / file).read_bytes()

    (found.path / file).write_bytes(content[:-1])
    with pytest.raises(CheckpointDamaged, match=file):
        _alone(exp, resume=found.path)
    (found.path / file).unlink()
    with pytest.raises(CheckpointDamaged, match=file):
        _alone(exp, resume=found.path)


def _begins(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    """Change where the boxes of a file begin, without another length of its header."""

    def changed(content: bytes) -> bytes:
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        boxes = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
        change(boxes)
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(boxes, separators=(",", ":"))
        text = json.dumps(header, separators=(",", ":")).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + length :]

    return changed


def _moved(by: int) -> Callable[[dict[str, Any]], None]:
    def move(boxes: dict[str, Any]) -> None:
        boxes["embed.weight"]["saved_offsets"][0] += by

    return move


FORGED: dict[str, Callable[[bytes], bytes]] = {
    "overlap": _begins(_moved(-1)),
    "hole": _begins(_moved(1)),
    "outside": _begins(_moved(1 << 40)),
    "negative": _begins(_moved(-(1 << 40))),
    "no place": _begins(lambda boxes: boxes.pop("embed.weight")),
    "more places": _begins(lambda boxes: boxes.update(more={"saved_offsets": [0]})),
    "no number": _begins(lambda boxes: boxes["embed.weight"].update(saved_offsets=["0", 0])),
}


@pytest.mark.proves("safe")
@pytest.mark.parametrize("kind", FORGED)
def test_boxes_that_do_not_fit_are_damage(exp: Path, kind: str) -> None:
    found = Run(exp).checkpoints()[-1]
    holds = [
        one
        for one in found.about.files
        if one.startswith("model/") and b"embed.weight" in (found.path / one).read_bytes()
    ]
    forgery.forge(found, FORGED[kind], holds[-1])

    with pytest.raises(CheckpointDamaged):
        _alone(exp, resume=found.path)
    for command in ("verify", "show"):
        main([command, f"{exp}@{found.about.number}"])


@pytest.mark.proves("safe")
@pytest.mark.parametrize("lengths", [[1 << 50, 10], [13], [-1, 10], ["13", 10], {"a": 1}, None])
def test_a_shape_that_is_only_claimed_is_damage(exp: Path, lengths: Any) -> None:
    found = Run(exp).checkpoints()[-1]

    def claim(content: bytes) -> bytes:
        state = json.loads(content)
        state["model"]["model"]["embed.weight"]["$tensor"][1]["shape"] = lengths
        return json.dumps(state).encode()

    forgery.forge(found, claim, "state.json")

    with pytest.raises(ResumableError):
        _alone(exp, resume=found.path)


@pytest.mark.parametrize("blocks", [(), ("00",), ("00" * 16,), ("00" * 16,) * 3, ("x",)])
def test_blocks_that_do_not_fit_their_file_are_damage(exp: Path, blocks: tuple[str, ...]) -> None:
    found = Run(exp).checkpoints()[-1]
    file = "model/shard-00001-model-00001-of-00002.safetensors"
    record = found.about.files[file]._replace(blocks=blocks)
    about = replace(found.about, files={**found.about.files, file: record})
    (found.path / manifest.NAME).write_bytes(manifest.to_json(about))

    with pytest.raises(CheckpointDamaged):
        _alone(exp, resume=found.path)


def test_blocks_that_fit_their_file_have_to_fit_its_digest_too(exp: Path) -> None:
    found = Run(exp).checkpoints()[-1]
    file = "model/shard-00001-model-00001-of-00002.safetensors"
    record = found.about.files[file]
    forgery.forge(found, forgery.flip_last, file)
    forged = Run(exp).open(found.about.number)
    record = forged.about.files[file]._replace(xxh3_128=record.xxh3_128)
    about = replace(forged.about, files={**forged.about.files, file: record})
    (found.path / manifest.NAME).write_bytes(manifest.to_json(about))

    with pytest.raises(CheckpointDamaged, match=file):
        _alone(exp, resume=found.path)


@pytest.mark.proves("noticed")
def test_a_header_that_was_another_when_it_was_read_is_damage(
    exp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Checkpoint.read_header

    def exchanged(found: Checkpoint, file: str) -> memoryview:
        header = bytes(real(found, file))
        if file.startswith("optimizer/"):
            one = re.search(rb'"exp_avg\.[^"]+":', header)
            assert one
            other = one[0].replace(b"exp_avg", b"exp_avg_sq")
            header = header.replace(one[0], b"?").replace(other, one[0]).replace(b"?", other)
        return memoryview(header)

    monkeypatch.setattr(Checkpoint, "read_header", exchanged)
    with pytest.raises(CheckpointDamaged, match="optimizer/shard"):
        _alone(exp, resume=Run(exp).checkpoints()[-1].path)


def test_the_commands_read_a_sharded_run(
    exp: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "whole.safetensors"
    numbers = Run(exp).numbers()
    for command in (
        ["ls", f"{exp}"],
        ["verify", f"{exp}", "--all"],
        ["show", f"{exp}"],
        ["diff", f"{exp}@{numbers[0]}", f"{exp}@{numbers[-1]}"],
        ["report", f"{exp}", "-o", f"{tmp_path / 'report.html'}"],
        ["export", f"{exp}", "-o", f"{out}"],
        ["push", f"{exp}", f"file://{tmp_path / 'remote'}"],
        ["pull", f"{tmp_path / 'pulled'}", f"file://{tmp_path / 'remote'}"],
        ["verify", f"{tmp_path / 'pulled'}"],
    ):
        assert main(command) in (0, 1), command

    from safetensors.torch import load_file

    told = capsys.readouterr().out
    assert "embed.weight" in told
    assert "10 x 10" in told
    exported, model = load_file(out), Net()
    assert {*exported} == {*model.state_dict()} - {"head.weight"}
    load_weights(model, exp)
    for weights in (exported, model.state_dict()):
        for name, value in weights.items():
            assert value.numpy().tobytes() == saved[1][name].tobytes()


@pytest.mark.heavy
def test_two_layouts_of_the_same_weights_do_not_differ(
    exp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values(run("fsdp-3", exp, 3, tmp_path, seed=1))
    before, after = Run(exp).numbers()[-2:]

    main(["diff", f"{exp}@{before}", f"{exp}@{after}", "--json"])

    rows = json.loads(capsys.readouterr().out)["tensors"]
    assert [row["name"] for row in rows if row["part"] in ("model", "optimizer") and row["changed"]] == []


@pytest.mark.heavy
def test_torchs_own_reader_reads_it_on_another_mesh(
    exp: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = Run(exp).checkpoints()[-1].path / "model"

    for found in values(gloo.run(3, read_by_dcp, folder, folder=tmp_path)):
        for name, value in found.items():
            assert value.tobytes() == saved[1][name].tobytes()


@pytest.mark.heavy
def test_torch_makes_one_file_of_it(exp: Path, saved: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    folder = Run(exp).checkpoints()[-1].path / "model"
    names = dict.fromkeys({*Net().state_dict()} - {"head.weight"}, 1)
    (tmp_path / "one").mkdir()
    consolidate_safetensors_files(str(folder), str(tmp_path / "one"), names)

    whole: dict[str, Tensor] = {}
    for path in (tmp_path / "one").glob("*.safetensors"):
        whole |= load_file(path)
    for name, value in whole.items():
        assert value.numpy().tobytes() == saved[1][name].tobytes()
    assert {*whole} == {*Net().state_dict()} - {"head.weight"}


def _gpt(kind: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=17, n_positions=8, n_embd=12, n_layer=2, n_head=2, tie_word_embeddings=False
    )
    model = GPT2LMHeadModel(config)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in model.transformer.h:
            fully_shard(block)
        fully_shard(model)
    return model, config


def _saves_gpt(rank: int, run_dir: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model, _ = _gpt("fsdp")
    with RunState.load(run_dir, model=model) as state:
        state.save().wait()
    return {name: sharded_training.gathered(one).numpy() for name, one in model.state_dict().items()}


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_transformers_reads_the_folder_of_a_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import GPT2LMHeadModel

    saved = values(gloo.run(2, _saves_gpt, tmp_path / "exp", folder=tmp_path))[0]
    folder = shutil.copytree(Run(tmp_path / "exp").checkpoints()[-1].path / "model", tmp_path / "hub")
    _, config = _gpt("plain")
    config.save_pretrained(folder)

    model = GPT2LMHeadModel.from_pretrained(folder)

    for name, value in model.state_dict().items():
        assert value.numpy().tobytes() == saved[name].tobytes(), name


# How it goes wrong in the middle of a save.


def _dies_in_a_save(rank: int, run_dir: Path, victim: int, call: int) -> str:
    import os
    import signal

    model, optimizer, _ = make("fsdp-2", 0)
    state = RunState.load(run_dir, model=model, optimizer=optimizer, ranks=Ranks(timeout=8))
    state.save().wait()
    calls, real = [0], os.fsync

    def fsync(fd: int) -> None:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        real(fd)

    for parameter in model.parameters():
        local(parameter.data).add_(1)
    if rank == victim:
        os.fsync = fsync
    try:
        state.save().wait()
    except ResumableError as exc:
        return str(exc)
    return "saved"


@pytest.mark.heavy
@pytest.mark.proves("durable")
@pytest.mark.parametrize(("victim", "call"), [(0, 1), (1, 1), pytest.param(1, 3, marks=pytest.mark.heavy)])
def test_a_process_that_is_killed_in_a_save_leaves_the_one_before(
    tmp_path: Path, victim: int, call: int
) -> None:
    ended = gloo.run(2, _dies_in_a_save, tmp_path / "exp", victim, call, folder=tmp_path)

    assert "rank" in ended[1 - victim].value
    found = Run(tmp_path / "exp").checkpoints()
    assert [one.about.number for one in found] == [1]
    found[0].verify()
    model, _ = _alone(tmp_path / "exp")
    assert torch.equal(model.scale, torch.ones(1))


@pytest.mark.heavy
@pytest.mark.proves("durable")
@pytest.mark.timeout(500)
def test_kills_at_any_moment_leave_a_training_that_ends_with_the_same_bits(
    tmp_path: Path, tally: Tally
) -> None:
    seed = int(os.environ.get("KILLS") or secrets.randbits(32))
    print(f"the moments are those of KILLS={seed}")
    dice, plan = random.Random(seed), {"every": 1, "slow": 0.05}
    whole = values(run("fsdp-2", tmp_path / "whole", 120, tmp_path, **plan))
    began = time.monotonic()
    run("fsdp-2", tmp_path / "one", 1, tmp_path, **plan)
    to_start = time.monotonic() - began

    bad, newest, step, count, went_on = list[str](), 0, 0, 0, 0
    # One life makes 50 steps at most: none gets to the end.
    while step < 50 and count < 20:
        ends = dice.choice([dice.uniform(0.2, to_start), to_start + dice.uniform(0, 2)])
        lives = {rank: ends + dice.uniform(0, 0.1) for rank in dice.choice([[0], [1], [0, 1]])}
        # Before the first save only the script says how a training begins.
        run("fsdp-2", tmp_path / "exp", 120, tmp_path, seed=newest and count, lives=lives, **plan)
        there, count = Run(str(tmp_path / "exp")), count + 1
        try:
            for number in there.numbers():
                there.open(number).verify()
                step = max(step, there.open(number).about.step)
            assert max(there.numbers(), default=0) >= newest
        except (AssertionError, ResumableError) as exc:
            bad.append(f"{count}, {lives}: {exc}")
        went_on += max(there.numbers(), default=0) > newest
        newest = max([newest, *there.numbers()])
    tally("kills of sharded trainings", count, bad)
    ended = values(run("fsdp-2", tmp_path / "exp", 120, tmp_path, seed=99, **plan))
    for now, then in zip(ended, whole, strict=True):
        assert differing(now["ended"], then["ended"]) == []
        assert differing(now["own"], then["own"]) == []
        assert now["drawn"].tobytes() == then["drawn"].tobytes()
    # Else nearly all were killed before their first save.
    assert went_on > 1


def _sampled(rank: int) -> bool:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.arange(4096.0)
    made = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    return torch.equal(digest.sample(made, 16), digest.sample(whole.chunk(2)[rank], 16))


def test_a_trace_and_an_audit_sample_what_is_here_of_a_sharded_tensor(tmp_path: Path) -> None:
    assert values(gloo.run(2, _sampled, folder=tmp_path)) == [True, True]


def _larger(rank: int, run_dir: Path, size: int, seed: int) -> Any:
    """Save, or load, a tensor that is longer than a block in each process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(seed)
    model = torch.nn.Linear(700, 301, bias=False)
    whole = model.weight.detach().clone()
    model.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(seed % 2)]))
    large_files.BLOCK = 4096
    with RunState.load(run_dir, model=model) as state:
        state.save().wait()
    return sharded_training.gathered(model.weight.data).numpy().tobytes()


@pytest.mark.heavy
def test_a_process_reads_and_verifies_the_blocks_that_it_needs(tmp_path: Path) -> None:
    saved = values(gloo.run(3, _larger, tmp_path / "exp", 3, 0, folder=tmp_path))
    for number, size in enumerate((2, 3, 4), 1):
        again = values(gloo.run(size, _larger, tmp_path / "exp", size, number, folder=tmp_path))
        assert {*again} == {*saved}
    found = Run(tmp_path / "exp").checkpoints()[0]
    assert all(len(record.blocks) > 9 for file, record in found.about.files.items() if "shard-" in file)
