"""Pipeline parallelism: each process has a stage of the model, under a name of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forgery
import format_reader
import gloo
import pytest
import safetensors.torch
import sharded_training
import torch
from grouped import grouped
from sharded_training import differing, local, values, whole
from torch import Tensor, nn

from resumable import (
    CheckpointDamaged,
    Ranks,
    RanksDiffer,
    Run,
    RunState,
    StateMismatch,
    Unsupported,
    UsageError,
)
from resumable.cli.app import main
from resumable.parts import sharding
from resumable.processes import stages

pytestmark = pytest.mark.skipif(not sharded_training.CAN_SHARD, reason=sharded_training.WHY_NOT)


class First(nn.Module):
    """The first stage, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 10)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.drop(torch.relu(self.up(self.embed(tokens))))


class Last(nn.Module):
    """The last stage, of which a part is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.norm.requires_grad_(False)
        self.head = nn.Linear(10, 13)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden)).clone()


def _loss(made: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(made.flatten(0, 1), target.flatten())


def _made(rank: int, size: int) -> tuple[str, nn.Module, torch.optim.Optimizer, Any, int]:
    """Return the stage of a process by name, its optimizer, the mesh, and its share of the data."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("pipeline", "data"))
    number, share = divmod(rank, size // 2)
    model: nn.Module = (First, Last)[number]()
    if size > 2:
        fully_shard(model, mesh=mesh["data"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return f"stage{number}", model, torch.optim.AdamW(trained, 1e-2 * (1 + number)), mesh, share


def _train(rank: int, run_dir: Path, size: int, until: int, seed: int, dies: bool, **options: Any) -> Any:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    torch.set_num_threads(1)
    torch.manual_seed(seed + rank)
    name, model, optimizer, mesh, share = _made(rank, size)
    data = (torch.arange(96) * 7 % 13).view(24, 4)
    sampler: Any = torch.utils.data.DistributedSampler(data, size // 2, share)
    loader = torch.utils.data.DataLoader(data, 4, sampler=sampler)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    # torch makes a stage of each process of the group.
    group = mesh["pipeline"].get_group()
    stage = PipelineStage(model, int(name[-1]), 2, torch.device("cpu"), group=group)
    pipeline = ScheduleGPipe(stage, n_microbatches=2, loss_fn=_loss)
    state = RunState.load(
        run_dir,
        model={name: model},
        optimizer={name: optimizer},
        scheduler={name: scheduler},
        loader=loader,
        **grouped(timeout=20, **options),
    )
    begun = whole(model, optimizer)
    for epoch in state.epochs(100) if state.step < until else ():
        sampler.set_epoch(epoch)
        for batch in state.batches():
            optimizer.zero_grad()
            if name == "stage0":
                pipeline.step(batch)
            else:
                pipeline.step(target=(batch + 1) % 13, losses=[])
            optimizer.step()
            scheduler.step()
            state.save()
            if state.step == until:
                break
        if state.step == until:
            break
    state.wait()
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    found = {
        "begun": begun,
        "ended": whole(model, optimizer),
        "own": local(model, optimizer),
        "samples": state.samples,
        "rate": optimizer.param_groups[0]["lr"],
        "drawn": torch.rand(4).numpy().tobytes(),
    }
    state.close()
    return found


def _run(folder: Path, run_dir: str, size: int, until: int, seed: int = 0, dies: bool = False) -> Any:
    return gloo.run(size, _train, folder / run_dir, size, until, seed, dies, folder=folder)


@pytest.mark.proves("exact")
@pytest.mark.heavy
@pytest.mark.parametrize("size", [2, 4])
def test_a_pipeline_that_is_killed_three_times_ends_with_the_same_bits(tmp_path: Path, size: int) -> None:
    never = values(_run(tmp_path, "whole", size, 8))

    for seed, until in enumerate((2, 5, 6)):
        ended = _run(tmp_path, "exp", size, until, seed, dies=True)
        assert all(one.value is None for one in ended)
    ended = values(_run(tmp_path, "exp", size, 8, 3))

    for now, then in zip(ended, never, strict=True):
        assert differing(now["ended"], then["ended"]) == []
        assert differing(now["own"], then["own"]) == []
        assert now["samples"] == then["samples"] == 8 * 4 * size // 2
        assert now["drawn"] == then["drawn"]
        assert now["rate"] == then["rate"]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("size", "nodes"),
    [
        (2, [0, 1]),
        pytest.param(4, [0, 0, 1, 1], marks=pytest.mark.heavy),
        pytest.param(4, [0, 1, 0, 1], marks=pytest.mark.heavy),
    ],
)
def test_each_node_keeps_its_stages_on_its_own_disk(tmp_path: Path, size: int, nodes: list[int]) -> None:
    def train(name: str, *args: Any) -> Any:
        env = [{"RESUMABLE_RUN_DIR": str(tmp_path / f"{name}{node}")} for node in nodes]
        return gloo.run(size, _train_apart, "", size, *args, folder=tmp_path, env=env)

    never = values(_run(tmp_path, "whole", size, 8))
    for seed, until in enumerate((2, 5)):
        train("exp", until, seed, True)
    ended = values(train("exp", 8, 3, False))

    for now, then in zip(ended, never, strict=True):
        assert differing(now["own"], then["own"]) == []
        assert now["drawn"] == then["drawn"]
        assert now["rate"] == then["rate"]
    one, other = (Run(str(tmp_path / f"exp{node}")) for node in (0, 1))
    assert all(one.open(number).about.elsewhere for number in one.numbers())
    # All trees are on each disk, and the tensors where they are copied together.
    shutil.copytree(other.folder, one.folder, dirs_exist_ok=True, ignore=lambda *_: ["manifest.json"])
    first, last = _alone(one.path, First, Last)
    for (stage, optimizer), then in zip((first, last), (ended[0], ended[-1]), strict=True):
        assert differing(whole(stage, optimizer), then["ended"]) == []


def _train_apart(rank: int, *args: Any) -> Any:
    return _train(rank, *args, shared=False)


@pytest.fixture(scope="module")
def exp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A run of a pipeline of two processes, and what they held at its end."""
    folder = tmp_path_factory.mktemp("pipeline")
    return folder / "exp", values(_run(folder, "exp", 2, 3))


def _alone(run_dir: Path, *kinds: Any, **options: Any) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    models = {f"stage{number}": kind() for number, kind in enumerate(kinds)}
    made = {
        name: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1.0)
        for name, model in models.items()
    }
    rates = {name: torch.optim.lr_scheduler.StepLR(one, 2) for name, one in made.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        RunState.load(
            run_dir, model=models, optimizer=made, scheduler=rates, allow=["loader"], **grouped(**options)
        ).close()
    return [*zip(models.values(), made.values(), strict=True)]


@pytest.mark.heavy
def test_one_process_continues_with_all_stages(exp: tuple[Path, list[Any]], tmp_path: Path) -> None:
    run_dir, ended = exp

    for (model, optimizer), then in zip(_alone(run_dir, First, Last), ended, strict=True):
        assert differing(whole(model, optimizer), then["ended"]) == []
        assert optimizer.param_groups[0]["lr"] == then["rate"]


@pytest.mark.heavy
def test_stages_move_to_more_processes(exp: tuple[Path, list[Any]], tmp_path: Path) -> None:
    copy = shutil.copytree(exp[0], tmp_path / "exp")
    ended = values(gloo.run(4, _train, copy, 4, 0, 1, False, folder=tmp_path))

    for rank, one in enumerate(ended):
        assert differing(one["begun"], exp[1][rank // 2]["ended"]) == []


def test_a_stage_that_no_process_has_is_named(exp: tuple[Path, list[Any]]) -> None:
    with pytest.raises(StateMismatch, match=r"model\.stage1: in the checkpoint, but not given to RunState"):
        _alone(exp[0], First)


def _overrides(rank: int, run_dir: Path) -> float:
    name, model, optimizer, _, _ = _made(rank, 2)
    optimizer.param_groups[0]["lr"] = 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        RunState.load(
            run_dir,
            model={name: model},
            optimizer={name: optimizer},
            allow=["scheduler*", "loader"],
            override=["optimizer.stage1.lr"],
        ).close()
    return float(optimizer.param_groups[0]["lr"])


def test_the_settings_of_every_stage_are_known(exp: tuple[Path, list[Any]], tmp_path: Path) -> None:
    copy = shutil.copytree(exp[0], tmp_path / "exp")
    assert values(gloo.run(2, _overrides, copy, folder=tmp_path)) == [exp[1][0]["rate"], 0.5 * 0.1]

    about = Run(exp[0]).checkpoints()[-1].about

    assert {path for path in about.built if path.endswith(".lr")} == {
        "optimizer.stage0.lr",
        "optimizer.stage1.lr",
    }
    assert {"model.stage0", "model.stage1", "scheduler.stage1"} <= about.parts.keys()


def test_the_commands_know_every_stage(
    exp: tuple[Path, list[Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(exp[0])]) == 0
    shown = capsys.readouterr().out
    assert "optimizer.stage0" in shown
    assert "stage1.exp_avg_sq.stage1.head.weight" in shown
    assert main(["verify", str(exp[0])]) == 0
    assert main(["diff", str(exp[0]), str(exp[0])]) == 0
    to = tmp_path / "stage.safetensors"
    assert main(["export", str(exp[0]), "--model", "model.stage1", "-o", str(to)]) == 0

    then = exp[1][1]["ended"]
    found = safetensors.torch.load_file(to)
    assert {*found} == {name for name in then if not name.startswith(("exp_avg", "step"))}
    assert all(tensor.numpy().tobytes() == then[name].tobytes() for name, tensor in found.items())


def test_the_page_on_the_format_is_enough_to_read_it(exp: tuple[Path, list[Any]]) -> None:
    folder = Run(exp[0]).checkpoints()[-1].path
    format_reader.verified(folder)
    trees, rates = format_reader.trees(folder), [0.001, 0.002]

    for rank, ended in enumerate(exp[1]):
        for name, value in trees["model"][f"model.stage{rank}"].items():
            assert value.tobytes() == ended["ended"][name].tobytes()
        (group,) = trees["optimizer"][f"optimizer.stage{rank}"]["groups"]
        assert group["lr"] == pytest.approx(rates[rank]) == ended["rate"]


def _twice(text: bytes) -> bytes:
    return text.replace(b'"model.stage1"', b'"model.stage0"')


@pytest.mark.parametrize("change", [_twice, lambda _: b"[]", lambda _: b'{"model":1}', lambda _: b"{"])
def test_trees_of_a_stage_that_make_no_sense_are_damage(
    exp: tuple[Path, list[Any]], tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    copy = shutil.copytree(exp[0], tmp_path / "exp")
    for found in Run(copy).checkpoints():
        forgery.forge(found, change, "state-00001.json")

    with pytest.raises(CheckpointDamaged, match=r"state-00001\.json"):
        _alone(copy, First, Last)
    with pytest.raises(CheckpointDamaged):
        _alone(copy, First, Last, resume=1)


def _refused(rank: int, run_dir: Path, what: str) -> str:
    name, model, optimizer, _, _ = _made(rank % 2, 2)
    given: dict[str, Any] = {"model": {name: model}, "optimizer": {name: optimizer}}
    options: dict[str, Any] = {"timeout": 10}
    if what == "one name":
        given = {"model": model, "optimizer": optimizer}
    elif what == "one optimizer":
        given["optimizer"] = optimizer
    elif what == "a forgotten scheduler" and rank < 2:
        given["scheduler"] = {name: torch.optim.lr_scheduler.StepLR(optimizer, 2)}
    with pytest.raises((RanksDiffer, Unsupported)) as caught:
        RunState.load(run_dir, **given, **grouped(**options))
    return str(caught.value)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("one name", "what model holds is .* on rank 0 and .* on rank 1(.|\n)*names of their own"),
        ("one optimizer", "what optimizer holds is .* on rank 0 and .* on rank 1"),
        ("a forgotten scheduler", "the part scheduler.stage0 is 'StepLR' on rank 0 and None on rank 2"),
    ],
)
def test_processes_that_do_not_agree_on_their_stages_are_refused(
    tmp_path: Path, what: str, told: str
) -> None:
    size = 3 if what == "a forgotten scheduler" else 2
    for text in values(_run_refused(tmp_path, what, size)):
        assert re.search(told, text), text


def _restores_a_stage(rank: int, run_dir: Path) -> str:
    name, model, optimizer, _, _ = _made(rank, 2)
    state = RunState.load(run_dir, model={name: model}, optimizer={name: optimizer}, ranks=Ranks(timeout=30))
    state.save().wait()
    with pytest.raises(UsageError, match=r"there is no part 'model\.stage1'") as caught:
        state.restore("auto", only="model.stage1")
    state.restore("auto", only="model")
    state.close()
    return str(caught.value)


@pytest.mark.heavy
def test_a_stage_that_one_process_lacks_is_an_error_in_all(tmp_path: Path) -> None:
    for text in values(gloo.run(2, _restores_a_stage, tmp_path / "exp", folder=tmp_path, limit=20)):
        assert "the parts are: model.stage0" in text


def _run_refused(folder: Path, what: str, size: int) -> Any:
    return gloo.run(size, _refused, folder / "exp", what, folder=folder)


def test_parts_differ_only_between_stages() -> None:
    module, adam = ("module", "a"), ("AdamW", "b")
    alike = [{"model": module, "optimizer": adam}] * 2
    first = {"model.first": module, "optimizer.first": adam}
    last = {"model.last": module, "optimizer.last": adam}

    assert [*stages.differences(alike)] == []
    assert [*stages.differences([first, last, first, last])] == []
    assert stages.ranks_of([first, last, first])["optimizer.first"] == [0, 2]
    assert [*stages.differences([alike[0], {"model": module}])] == [
        "the part optimizer is 'AdamW' on rank 0 and None on rank 1"
    ]
    assert [*stages.differences([{"model": module}, alike[0]])] == [
        "the part optimizer is None on rank 0 and 'AdamW' on rank 1"
    ]
    assert [*stages.differences([first, {**first, "model.first": ("module", "c")}])] == [
        "what model.first holds is 'a' on rank 0 and 'c' on rank 1"
    ]


def test_the_share_of_the_data_is_that_in_a_stage() -> None:
    def shares(*told: tuple[str, list[Any]]) -> tuple[list[Any], list[int]]:
        answers = sharding.decided([[[], None, peers, stage, {}, 0] for stage, peers in told])
        return [share for _, share, *_ in answers], answers[0][2]

    first, second = [0, "a", 2], [2, "b", 2]
    stages = [("one", []), ("one", []), ("two", []), ("two", [])]
    assert shares(*stages) == ([(0, 2), (1, 2), (0, 2), (1, 2)], [0, 1, 0, 1])
    groups = [("one", first), ("one", first), ("two", second), ("two", second)]
    assert shares(*groups) == ([(0, 1)] * 4, [0] * 4)
    # Nothing tells which processes read the same where stages have other numbers of them.
    assert shares(("one", []), ("two", []), ("two", [])) == ([None] * 3, [])
