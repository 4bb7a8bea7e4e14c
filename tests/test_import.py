"""What other tools have saved goes on here as it would have gone on there, and what is left out is told."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import processes
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim import lr_scheduler

from resumable import ResumableWarning, Run, RunState, StateMismatch, Unsupported, load_weights
from resumable.cli.app import main
from resumable.interop import importing, other_tools

FOREIGN = Path(__file__).parent / "foreign"


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loader() -> Any:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(16, 3, generator=generator), torch.randn(16, 1, generator=generator)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), batch_size=4)


@dataclass
class Training:
    """A script, with the parts that it makes and how it loads what its tool has saved."""

    model: Any
    optimizer: Any
    scheduler: Any = None
    extra: Any = None
    every_step: bool = False

    def parts(self) -> dict[str, Any]:
        found = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**found, "extra": self.extra}

    def step(self, batch: Any) -> None:
        nn.functional.mse_loss(self.model(batch[0]), batch[1]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler and self.every_step:
            self.scheduler.step()

    def end_epoch(self) -> None:
        if self.scheduler and not self.every_step:
            self.scheduler.step()

    def theirs(self, epochs: range) -> None:
        for _ in epochs:
            for batch in loader():
                self.step(batch)
            self.end_epoch()

    def ours(self, run: Path, total: int, **how: Any) -> RunState:
        with RunState.load(run, **self.parts(), loader=loader(), **how) as state:
            for _ in state.epochs(total):
                for batch in state.batches():
                    self.step(batch)
                self.end_epoch()
                state.save()
        return state


def tensors(one: Any) -> Iterator[torch.Tensor]:
    if isinstance(one, torch.Tensor):
        yield one
    elif isinstance(one, (dict, list, tuple)):
        for value in one.values() if isinstance(one, dict) else one:
            yield from tensors(value)


def assert_same(one: Training, other: Training) -> None:
    for name in ("model", "optimizer", "scheduler"):
        if (first := getattr(one, name)) is not None:
            ours, theirs = first.state_dict(), getattr(other, name).state_dict()
            pairs = [*zip(tensors(ours), tensors(theirs), strict=True)]
            assert all(torch.equal(*pair) for pair in pairs)
            assert str(ours) == str(theirs)


def run_import(*arguments: object) -> int:
    return main(["import", *map(str, arguments)])


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert run_import(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def sgd(lr: float = 0.1) -> Training:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    return Training(model, optimizer, lr_scheduler.MultiStepLR(optimizer, [2, 4]))


def adamw(every_step: bool = False) -> Training:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Training(model, optimizer, lr_scheduler.StepLR(optimizer, 2, 0.5), every_step=every_step)


def save_imagenet(path: Path, made: Training, **more: Any) -> Path:
    """Save as the imagenet example of torch does."""
    states = {
        "state_dict": nn.DataParallel(made.model).state_dict(),
        "optimizer": made.optimizer.state_dict(),
    }
    states["scheduler"] = made.scheduler.state_dict()
    torch.save({"epoch": 3, "arch": "net", "best_acc1": torch.tensor(71.5), **states, **more}, path)
    return path


@pytest.fixture
def imagenet(tmp_path: Path) -> Path:
    there = sgd()
    there.theirs(range(3))
    return save_imagenet(tmp_path / "checkpoint.pth.tar", there)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_the_imagenet_examples_goes_on_as_it_would_have(
    make: Callable[[], Training], tmp_path: Path, run_dir: Path
) -> None:
    there = make()
    there.theirs(range(3))
    assert run_import(run_dir, save_imagenet(tmp_path / "checkpoint.pth.tar", there)) == 0
    there.theirs(range(3, 7))

    assert make().ours(run_dir, 4).epoch == 4
    make().ours(run_dir, 6)
    (here := make()).ours(run_dir, 7)

    assert_same(here, there)
    assert main(["verify", str(run_dir)]) == 0


def lightning(name: str) -> tuple[Path, Callable[[], Training]]:
    return FOREIGN / "lightning" / name, adamw


def load_lightning(path: Path, into: Training) -> None:
    found = torch.load(path, weights_only=True)
    into.model.load_state_dict({name.removeprefix("net."): t for name, t in found["state_dict"].items()})
    into.optimizer.load_state_dict(found["optimizer_states"][0])
    into.scheduler.load_state_dict(found["lr_schedulers"][0])


def load_accelerate(path: Path, into: Training) -> None:
    load_weights(into.model, path / "model.safetensors")
    into.optimizer.load_state_dict(torch.load(path / "optimizer.bin"))
    into.scheduler.load_state_dict(torch.load(path / "scheduler.bin"))


def hugging_face() -> Training:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

    model = Model()
    named = [*model.named_parameters()]
    groups = [
        {"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.0},
        {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, fused=True)
    schedule = lr_scheduler.LambdaLR(optimizer, partial(falling, 16))
    return Training(model, optimizer, schedule, every_step=True)


def falling(total: int, step: int) -> float:
    return max(0.0, 1 - step / total)


def load_trainer(path: Path, into: Training) -> None:
    load_weights(into.model, path / "model.safetensors")
    into.optimizer.load_state_dict(torch.load(path / "optimizer.pt"))
    into.scheduler.load_state_dict(torch.load(path / "scheduler.pt"))


@pytest.mark.parametrize(
    ("source", "make", "load", "epoch"),
    [
        ("lightning/middle.ckpt", adamw, load_lightning, 1),
        ("lightning/epoch=0.ckpt", adamw, load_lightning, 1),
        ("lightning/fitted.ckpt", adamw, load_lightning, 2),
        ("accelerate", lambda: adamw(every_step=True), load_accelerate, 0),
        ("transformers/checkpoint-4", hugging_face, load_trainer, 1),
        ("transformers/checkpoint-8", hugging_face, load_trainer, 2),
    ],
)
def test_what_a_tool_has_saved_goes_on_as_with_torchs_own_calls(
    source: str,
    make: Callable[[], Training],
    load: Callable[[Path, Training], None],
    epoch: int,
    run_dir: Path,
) -> None:
    load(FOREIGN / source, there := make())
    there.theirs(range(epoch, epoch + 3))
    assert run_import(run_dir, FOREIGN / source) == 0

    for ahead in (1, 2, 3):
        here = make()
        assert here.ours(run_dir, epoch + ahead).epoch == epoch + ahead

    assert_same(here, there)


@pytest.mark.parametrize("wrap", [copy.deepcopy, torch.optim.swa_utils.AveragedModel])
def test_timms_goes_on_with_its_average(wrap: Callable[[Any], Any], run_dir: Path) -> None:
    found = torch.load(path := FOREIGN / "timm" / "checkpoint-2.pth.tar", weights_only=False)
    there, here = (
        Training(model := net(), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)) for _ in range(2)
    )
    here.extra = {"ema": wrap(net())}
    there.model.load_state_dict(found["state_dict"])
    there.optimizer.load_state_dict(found["optimizer"])
    there.theirs(range(3, 5))
    assert run_import(run_dir, path) == 0

    allow = ["extra.ema.n_averaged"]
    here.ours(run_dir, 4, allow=allow)
    here.ours(run_dir, 5)

    assert_same(here, there)
    average = here.extra["ema"].state_dict().values()
    expected = found["state_dict_ema"].values()
    assert all(any(torch.equal(one, other) for other in average) for one in expected)


class GPT(nn.Module):
    """A model with a head that is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.block(self.embed(tokens))))


def gpt() -> Training:
    model = GPT()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return Training(model, torch.optim.AdamW(groups, lr=0.01))


def train_gpt(made: Training, step: int) -> None:
    tokens = (torch.arange(6) + step) % 7
    for group in made.optimizer.param_groups:
        group["lr"] = 0.01 / (1 + step)
    made.optimizer.zero_grad()
    nn.functional.cross_entropy(made.model(tokens), tokens.roll(1)).backward()
    made.optimizer.step()


def save_nanogpt(path: Path, made: Training, step: int) -> Path:
    weights = {f"_orig_mod.{name}": value for name, value in made.model.state_dict().items()}
    best, args = torch.tensor(1.25), {"n_layer": 1}
    rest = {"model_args": args, "iter_num": step, "best_val_loss": best, "config": {"lr": 0.01}}
    torch.save({"model": weights, "optimizer": made.optimizer.state_dict(), **rest}, path)
    return path


def test_nanogpts_goes_on_step_by_step(tmp_path: Path, run_dir: Path) -> None:
    there = gpt()
    for step in range(5):
        train_gpt(there, step)
    assert run_import(run_dir, save_nanogpt(tmp_path / "ckpt.pt", there, 5)) == 0
    for step in range(5, 11):
        train_gpt(there, step)

    for total in (7, 9, 11):
        here = gpt()
        with RunState.load(run_dir, **here.parts(), minimize="val_loss", every=1) as state:
            for step in state.steps(total):
                train_gpt(here, step)

    assert_same(here, there)
    assert state.best == 1.25
    assert here.model.head.weight is here.model.embed.weight


def test_each_part_and_what_is_left_out_is_told(
    imagenet: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(capsys, run_dir, imagenet)

    assert (found["tool"], found["epoch"], found["number"]) == ("the imagenet example", 3, 1)
    parts = {one["part"]: (one["from"], one["tensors"]) for one in found["parts"]}
    assert parts == {"model": ("state_dict", 4), "optimizer": ("optimizer", 4), "scheduler": ("scheduler", 0)}
    assert [one["name"] for one in found["left_out"]] == ["arch"]
    assert found["best"] == {"metric": "acc1", "maximize": True, "value": 71.5}
    assert any("other numbers" in note for note in found["notes"])


def test_what_is_lacking_is_told_by_the_line_and_is_no_error(
    imagenet: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_import(run_dir, imagenet)
    here = sgd()
    here.extra = {"patience": {}}
    capsys.readouterr()

    here.ours(run_dir, 4, maximize="acc1")

    line = capsys.readouterr().out.splitlines()[0]
    assert "epoch 3, step 0, best acc1 71.5" in line
    assert "has no extra.patience, no place in the data, no random generators: these begin" in line


def test_a_part_that_the_script_does_not_have_is_an_error_as_ever(imagenet: Path, run_dir: Path) -> None:
    run_import(run_dir, imagenet)
    (here := sgd()).scheduler = None

    with pytest.raises(StateMismatch, match="scheduler: in the checkpoint, but not given"):
        here.ours(run_dir, 4)

    here.ours(run_dir, 4, allow=["scheduler"])


def test_moments_that_do_not_fit_their_parameters_are_named(imagenet: Path, run_dir: Path) -> None:
    run_import(run_dir, imagenet)
    here = sgd()
    parameters = [*here.model.parameters()]
    here.optimizer = torch.optim.SGD([parameters[2], *parameters[:2], parameters[3]], 0.1, momentum=0.9)
    here.scheduler = lr_scheduler.MultiStepLR(here.optimizer, [2, 4])
    before = copy.deepcopy(here.model.state_dict())

    with pytest.raises(StateMismatch, match=r"2\.weight: momentum_buffer is float32\[4, 3\]") as caught:
        here.ours(run_dir, 4)

    assert "go by the order" in str(caught.value)
    assert all(map(torch.equal, before.values(), here.model.state_dict().values()))


def test_an_optimizer_of_fewer_parameters_does_not_fit(imagenet: Path, run_dir: Path) -> None:
    run_import(run_dir, imagenet)
    here = sgd()
    here.optimizer = torch.optim.SGD([*here.model.parameters()][:3], 0.1, momentum=0.9)
    here.scheduler = lr_scheduler.MultiStepLR(here.optimizer, [2, 4])

    with pytest.raises(StateMismatch, match=r"optimizer\.parameter 3: missing in the code"):
        here.ours(run_dir, 4)


def test_the_state_of_another_schedule_is_refused(imagenet: Path, run_dir: Path) -> None:
    run_import(run_dir, imagenet)
    here = sgd()
    here.scheduler = lr_scheduler.StepLR(here.optimizer, 2)

    with pytest.raises(StateMismatch, match="another kind of schedule: milestones only in the checkpoint"):
        here.ours(run_dir, 4)


@pytest.mark.filterwarnings("ignore::resumable.ResumableWarning")
def test_settings_that_the_script_has_changed_are_told_and_can_win(imagenet: Path, run_dir: Path) -> None:
    run_import(run_dir, imagenet)
    first, second = sgd(0.2), sgd(0.2)

    with pytest.warns(ResumableWarning, match=r"optimizer\.lr +0\.1 +-> 0\.2 +the checkpoint's is used"):
        RunState.load(run_dir, **first.parts()).close()
    RunState.load(run_dir, **second.parts(), override=["optimizer.lr"]).close()

    assert first.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.02)


def test_a_best_of_another_name_is_forgotten_aloud(imagenet: Path, run_dir: Path, tmp_path: Path) -> None:
    run_import(run_dir, imagenet)
    run_import(tmp_path / "named", imagenet, "--maximize", "val_acc")

    with pytest.warns(ResumableWarning, match=r"maximize='acc1'.*is forgotten.*--maximize val_acc"):
        state = RunState.load(run_dir, **sgd().parts(), maximize="val_acc")
    state.close()
    with RunState.load(tmp_path / "named", **sgd().parts(), maximize="val_acc") as named:
        assert (state.best, named.best) == (None, 71.5)


def test_going_back_to_an_import_begins_the_epochs_data_anew(imagenet: Path, run_dir: Path) -> None:
    run_import(run_dir, imagenet)
    here = sgd()
    with RunState.load(run_dir, **here.parts(), loader=loader()) as state:
        seen: list[torch.Tensor] = []
        for _ in state.epochs(4):
            for number, batch in state.enumerate():
                seen.append(batch[0])
                here.step(batch)
                if len(seen) == 3:
                    state.restore(1)
                    break
                assert number < 4

    assert len(seen) == 7
    assert torch.equal(seen[0], seen[3])
    there = sgd()
    there.theirs(range(4))
    assert torch.equal(here.model[0].weight, there.model[0].weight)


def test_names_that_another_module_put_in_front_do_not_count(tmp_path: Path, run_dir: Path) -> None:
    there = sgd()
    there.theirs(range(1))
    weights = {f"net.{name}": value for name, value in there.model.state_dict().items()}
    save_imagenet(tmp_path / "c.pt", there, state_dict={**weights, "loss.weight": torch.ones(1)})
    run_import(run_dir, tmp_path / "c.pt")

    with pytest.raises(StateMismatch, match=r"model\.loss\.weight: missing in the code"):
        RunState.load(run_dir, **sgd().parts())
    RunState.load(run_dir, **(here := sgd()).parts(), allow=["model.loss.weight"]).close()

    assert_same(here, there)


class Twice(nn.Module):
    """A model in which one name is the end of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.net = nn.Parameter(torch.zeros(2)), nn.Module()
        self.net.a = nn.Parameter(torch.zeros(2))


def test_a_name_without_its_front_is_not_taken_for_another(tmp_path: Path, run_dir: Path) -> None:
    weights = {"net.a": torch.ones(2), "net.net.a": torch.full((2,), 2.0)}
    torch.save({"model": weights, "iter_num": 1}, tmp_path / "c.pt")
    run_import(run_dir, tmp_path / "c.pt")

    RunState.load(run_dir, model=(model := Twice())).close()

    assert (model.a.tolist(), model.net.a.tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_the_names_on_disk_are_bare(imagenet: Path, run_dir: Path) -> None:
    run_import(run_dir, imagenet)

    found = safetensors.torch.load_file(run_dir / "newest" / "model.safetensors")

    assert found.keys() == net().state_dict().keys()


@pytest.mark.parametrize("kept", ["both", "embed", "head"])
def test_what_is_tied_in_the_script_may_be_there_once_or_twice(
    kept: str, tmp_path: Path, run_dir: Path
) -> None:
    there = gpt()
    train_gpt(there, 0)  # (the learning rate is the script's own there)
    weights = {name: value.clone() for name, value in there.model.state_dict().items()}
    for name in {"both": [], "embed": ["head.weight"], "head": ["embed.weight"]}[kept]:
        del weights[name]
    torch.save(
        {"model": weights, "optimizer": there.optimizer.state_dict(), "iter_num": 1}, tmp_path / "c.pt"
    )
    run_import(run_dir, tmp_path / "c.pt")

    RunState.load(run_dir, **(here := gpt()).parts(), allow=[]).close()

    assert_same(here, there)


def test_several_models_and_optimizers_get_the_names_that_are_given(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = {name: adamw() for name in "GD"}
    for at, made in enumerate(two.values()):
        made.theirs(range(at + 1))
    states = {f"net{name}": made.model.state_dict() for name, made in two.items()}
    states |= {f"opt{name}": made.optimizer.state_dict() for name, made in two.items()}
    torch.save({**states, "epoch": 2, "seen": 7, "it": 8}, tmp_path / "gan.pt")
    named = [f"--part={key}{name}={slot}.{name}" for name in "GD" for key, slot in _KEYS.items()]

    found = told(capsys, run_dir, tmp_path / "gan.pt", *named, "--part=seen=vars.seen", "--epoch", "2")

    assert (found["step"], found["left_out"]) == (8, [])
    here = {name: adamw() for name in "GD"}
    parts = {slot: {n: getattr(made, slot) for n, made in here.items()} for slot in ("model", "optimizer")}
    with RunState.load(run_dir, **parts) as state:
        assert (state.vars, state.epoch) == ({"seen": 7}, 2)
    for name, made in here.items():
        made.scheduler = None
        assert_same(made, two[name])


_KEYS = {"net": "model", "opt": "optimizer"}


def test_a_scaler_goes_on(tmp_path: Path, run_dir: Path) -> None:
    there = sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    state = {"MixedPrecision": {**scaler.state_dict(), "scale": 64.0, "_growth_tracker": 3}}
    run_import(run_dir, save_imagenet(tmp_path / "c.pt", there, **state))

    with RunState.load(run_dir, **sgd().parts(), scaler=scaler):
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (64.0, 3)


def test_what_a_schedule_has_moved_is_no_setting_that_the_script_has_changed(
    tmp_path: Path, run_dir: Path
) -> None:
    def made() -> Training:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        cycle = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=90)
        warm = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 1, 2)
        return Training(model, optimizer, {"cycle": cycle, "warm": warm})

    there = made()
    for _ in range(3):
        there.optimizer.step()
        for schedule in there.scheduler.values():
            schedule.step()
    states = {name: schedule.state_dict() for name, schedule in there.scheduler.items()}
    optimizer = there.optimizer.state_dict()
    torch.save({"model": there.model.state_dict(), "optimizer": optimizer, **states}, tmp_path / "it.pt")
    run_import(run_dir, tmp_path / "it.pt", "--part=cycle=scheduler.cycle", "--part=warm=scheduler.warm")

    with RunState.load(run_dir, **made().parts()) as state:
        assert state.resumed


@pytest.mark.parametrize(
    ("keys", "epoch", "step", "note"),
    [
        ({"epochs": 90, "steps": 9000}, 0, 12, "how many epochs were done"),
        ({"epoch": 3, "step": 2}, 3, 2, "say --step 12"),
    ],
)
def test_what_the_training_is_to_last_is_not_what_is_done(
    tmp_path: Path,
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    keys: Any,
    epoch: int,
    step: int,
    note: str,
) -> None:
    there = Training(net(), None)
    there.optimizer = torch.optim.Adam(there.model.parameters())
    there.theirs(range(3))
    states = {"model": there.model.state_dict(), "optimizer": there.optimizer.state_dict()}
    torch.save({**states, **keys}, tmp_path / "it.pt")

    found = told(capsys, run_dir, tmp_path / "it.pt")

    assert (found["epoch"], found["step"]) == (epoch, step)
    assert any(note in line for line in found["notes"])


def test_a_dry_run_writes_nothing(imagenet: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_import(run_dir, imagenet, "--dry-run") == 0

    out = capsys.readouterr().out
    assert out.startswith(f"would import {imagenet} (the imagenet example) as checkpoint 1 of {run_dir}")
    assert "  model      from state_dict  4 tensors, 84 B\n" in out
    assert not run_dir.exists()


def test_a_run_with_checkpoints_is_not_imported_into(
    imagenet: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (run_import(run_dir, imagenet), run_import(run_dir, imagenet)) == (0, 1)

    assert "holds 1 checkpoint already" in capsys.readouterr().err
    assert Run(run_dir).numbers() == [1]


def test_the_history_tells_where_a_run_comes_from(
    imagenet: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_import(run_dir, imagenet)
    capsys.readouterr()

    main(["ls", str(run_dir), "--json"])

    found = json.loads(capsys.readouterr().out)
    assert found["checkpoints"][0]["why"] == f"imported from {imagenet}"
    assert found["attempts"][0]["ended"] == "imported"


class Odd:
    """Not anything that could be carried over."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("key", ["state_dict", "optimizer"])
def test_a_model_or_an_optimizer_that_is_an_object_is_refused_with_what_converts_it(
    key: str, tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_imagenet(tmp_path / "c.pt", made := sgd())
    save_imagenet(path, made, **{key: made.model if key == "state_dict" else made.optimizer})

    assert run_import(run_dir, path) == 1

    err = capsys.readouterr().err
    assert f"{key} in it is an object (torch." in err
    snippet = err.partition("installed:\n")[2].partition("\nand")[0]
    exec(textwrap.dedent(snippet), {"PATH": path, "NEW": tmp_path / "new.pt"})
    assert run_import(run_dir, tmp_path / "new.pt") == 0


def test_a_whole_model_is_refused_with_what_converts_it(tmp_path: Path, run_dir: Path) -> None:
    torch.save(net(), tmp_path / "model.pt")

    with pytest.raises(Unsupported, match=r"it holds torch\.nn\.modules\.container\.Sequential") as caught:
        importing.read(str(tmp_path / "model.pt"), {})

    assert "found.state_dict()" in caught.value.fix


def test_objects_beside_the_training_are_left_out_and_named(
    tmp_path: Path, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = sgd()
    schedule = {**made.scheduler.state_dict(), "anneal": Odd()}
    path = save_imagenet(tmp_path / "c.pt", made, args=Namespace(lr=1), scheduler=schedule, odd=[Odd()])

    left = {one["name"]: one["what"] for one in told(capsys, run_dir, path)["left_out"]}

    assert left["args"] == "argparse.Namespace"
    assert left["scheduler.anneal"].endswith("Odd")
    assert left["odd"] == "a list of 1"
    RunState.load(run_dir, **sgd().parts()).close()


def test_importing_unpickles_nothing(imagenet: Path, run_dir: Path) -> None:
    seen: list[str] = []
    sys.addaudithook(lambda event, _: seen.append(event) if event.startswith("pickle.") else None)
    for source in (imagenet, FOREIGN / "lightning" / "middle.ckpt", FOREIGN / "accelerate"):
        run_import(run_dir.with_name(source.name), source)
        RunState.load(run_dir.with_name(source.name), model=net(), allow=["*"]).close()

    assert not seen


def train_in_several(rank: int, run_dir: Path, epochs: int) -> Any:
    """Train an epoch from the import in one of several processes; return where it began and what it has."""
    made = adamw()
    made.model = nn.parallel.DistributedDataParallel(made.model)
    torch.manual_seed(rank)
    with RunState.load(run_dir, **made.parts(), loader=loader(), timeout=20) as state:
        begun = state.epoch, state.step, [t.tolist() for t in tensors(made.optimizer.state_dict())]
        drawn = torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(rank)))
        for _ in state.epochs(epochs):
            for batch in state.batches():
                made.step(batch)
            made.end_epoch()
            state.save()
    return begun, [t.tolist() for t in tensors(made.model.state_dict())], drawn


@pytest.mark.parametrize(("is_last", "epoch"), [(True, 1), (False, 0)])
def test_an_epoch_of_lightnings_is_done_when_its_last_batch_is(is_last: bool, epoch: int) -> None:
    found = torch.load(FOREIGN / "lightning" / "epoch=0.ckpt", weights_only=True)
    loop = found["loops"]["fit_loop"]
    loop["epoch_progress"]["current"]["processed"] = 0
    loop["epoch_loop.batch_progress"]["is_last_batch"] = is_last

    assert other_tools.of_dict(found, {}).epoch == epoch


@pytest.mark.heavy
def test_several_processes_go_on_from_one_import(tmp_path: Path, run_dir: Path) -> None:
    assert run_import(run_dir, FOREIGN / "lightning" / "epoch=0.ckpt") == 0
    load_lightning(FOREIGN / "lightning" / "epoch=0.ckpt", there := adamw())
    there.theirs(range(1, 3))

    for epochs in (2, 3):
        found = processes.run(2, train_in_several, run_dir, epochs, folder=tmp_path)
        assert "instead of" not in "".join(one.printed for one in found)
        (begun, weights, drawn), other = (one.value for one in found)
        assert (begun, weights, drawn) == other
        # (the generators are the script's until its loop begins)
        assert (begun[0], drawn) == (epochs - 1, True)

    for mine, theirs in zip(weights, tensors(there.model.state_dict()), strict=True):
        torch.testing.assert_close(torch.tensor(mine), theirs)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tool", "package"),
    [("lightning", "pytorch_lightning"), ("accelerate", "accelerate"), ("transformers", "transformers")],
)
def test_what_the_tools_save_today_is_what_is_stored(tool: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    make = FOREIGN / "make.py"
    subprocess.run(
        [sys.executable, str(make), "--into", str(tmp_path), tool], check=True, capture_output=True
    )

    names = {
        "lightning": ["middle.ckpt", "epoch=0.ckpt", "fitted.ckpt"],
        "transformers": ["checkpoint-4", "checkpoint-8"],
    }
    for name in names.get(tool, [""]):
        fresh, stored = (importing.read(str(where / tool / name), {}) for where in (tmp_path, FOREIGN))
        assert fresh.sizes() == stored.sizes()
        assert (fresh.foreign.epoch, fresh.foreign.step) == (stored.foreign.epoch, stored.foreign.step)
        assert (fresh.foreign.goal, fresh.foreign.notes) == (stored.foreign.goal, stored.foreign.notes)
