"""What this library costs a training of each framework, and its saves next to the framework's own.

python -m benchmarks.frameworks --quick             # one round of each, small
python -m benchmarks.frameworks                     # five rounds
python -m benchmarks.frameworks --from FILE.json    # show a stored result again
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

from resumable import RunState

from . import machine

README = Path(__file__).with_name("README.md")
WAYS = ("alone", "with us, no save", "own saves", "our saves")
_WARM = 10
"""Steps at the beginning that do not count."""


@dataclass(frozen=True)
class Plan:
    """One training: how long, how large, where, and in which way."""

    way: str
    steps: int
    width: int
    saves: int
    folder: Path

    @property
    def every(self) -> int:
        """After how many steps a save is due."""
        return max(1, (self.steps - _WARM) // (self.saves + 1))

    @property
    def due(self) -> int | None:
        """After how many steps one of our saves is due; None for no saves."""
        return self.every if self.way == "our saves" else None


@dataclass
class Result:
    """What was measured, as it is stored: by training and framework, each way's seconds by round."""

    machine: dict[str, str]
    figures: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    saves: dict[str, int] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)


class Rows(Dataset[Any]):
    """Random rows, each with a label."""

    def __init__(self, count: int, width: int) -> None:
        self.rows = torch.randn(256, width)
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.rows[index % 256], "labels": torch.tensor(index % 2)}


class Net(nn.Module):
    """Linear layers, in the form that Trainer expects."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.head(self.layers(x)), labels)}


def _made(plan: Plan) -> tuple[Net, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = Net(plan.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, optimizer, DataLoader(Rows(8 * plan.steps, plan.width), batch_size=8, shuffle=True)


def accelerate(plan: Plan) -> None:
    """Train as Accelerate's tutorial does."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*_made(plan))

    def step(batch: Any) -> None:
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    _loop(plan, (model, optimizer, loader), step, lambda: accelerator.save_state(str(plan.folder / "own")))


def fabric(plan: Plan) -> None:
    """Train as Fabric's tutorial does."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer, loader = _made(plan)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        fabric.backward(model(**batch)["loss"])
        optimizer.step()

    own = {"model": model, "optimizer": optimizer}
    _loop(plan, (model, optimizer, loader), step, lambda: fabric.save(plan.folder / "own.ckpt", own))


def _loop(
    plan: Plan, parts: tuple[Any, Any, Any], step: Callable[[Any], None], save: Callable[[], Any]
) -> None:
    model, optimizer, loader = parts
    if plan.way in ("alone", "own saves"):
        for number, batch in enumerate(loader, 1):
            step(batch)
            if plan.way == "own saves" and number % plan.every == 0 and number // plan.every <= plan.saves:
                save()
        return
    given = {"model": model, "optimizer": optimizer, "loader": loader}
    with RunState.load(plan.folder / "run", **given, every=plan.due, keep=1, progress=False) as state:
        for _ in state.epochs(1):
            for batch in state.batches():
                step(batch)


def lightning(plan: Plan) -> None:
    """Train with Lightning's Trainer."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from resumable.integrations.lightning import Resumable

    model, optimizer, loader = _made(plan)

    class Module(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer

    callbacks: list[Any] = []
    if plan.way == "own saves":
        callbacks.append(ModelCheckpoint(plan.folder / "own", every_n_train_steps=plan.every))
    elif plan.way != "alone":
        callbacks.append(Resumable(plan.folder / "run", every=plan.due, keep=1))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = plan.way == "own saves"
    Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, **quiet).fit(Module(), loader)


def transformers(plan: Plan) -> None:
    """Train with the Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    from resumable.integrations.transformers import resume

    model, optimizer, loader = _made(plan)
    arguments = TrainingArguments(
        output_dir=str(plan.folder / "own"),
        per_device_train_batch_size=8,
        num_train_epochs=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="steps" if plan.way == "own saves" else "no",
        save_steps=plan.every,
        save_total_limit=1,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    trainer = Trainer(model, arguments, train_dataset=loader.dataset, optimizers=(optimizer, scheduler))
    if plan.way in ("with us, no save", "our saves"):
        resume(trainer, plan.folder / "run", every=plan.due, keep=1)
    trainer.train()


FRAMEWORKS = {
    "Accelerate": accelerate,
    "Fabric": fabric,
    "Lightning": lightning,
    "Transformers": transformers,
}


def _seconds(train: Callable[[Plan], None], plan: Plan) -> float:
    """Return the time from the tenth step to the end of the training, with all saves done."""
    marks: list[float] = []
    hook = register_optimizer_step_post_hook(lambda *_: marks.append(time.perf_counter()))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train(plan)
        os.sync()
        return time.perf_counter() - marks[_WARM]
    finally:
        hook.remove()


def measure(trainings: dict[str, tuple[int, int, int]], rounds: int, only: list[str], result: Result) -> None:
    """Measure all ways in turns, each round begun by another; the first round warms up."""
    for name, (steps, width, saves) in trainings.items():
        result.saves[name], result.steps[name] = saves, steps
        figures = result.figures[name] = {}
        for framework in only:
            found = figures[framework] = {way: [] for way in WAYS}
            for number in range(-1, rounds):
                for way in [*WAYS[number % 4 :], *WAYS[: number % 4]]:
                    with tempfile.TemporaryDirectory(dir=".", prefix=".benchmark-") as folder:
                        plan = Plan(way, steps, width, saves, Path(folder).resolve())
                        seconds = _seconds(FRAMEWORKS[framework], plan)
                    if number >= 0:
                        found[way].append(seconds)


def show(result: Result) -> str:
    """Return the table."""
    lines = [*(f"- {name}: {value}" for name, value in result.machine.items())]
    for name, figures in result.figures.items():
        lines += [
            "",
            f"{name}:",
            "",
            "| | a step, ms | with us / alone | lost to a save of its own, ms | to one of ours, ms | ratio |",
            "| - | -: | -: | -: | -: | -: |",
        ]
        for framework, found in figures.items():
            alone, ours, own_saves, our_saves = (found[way] for way in WAYS)
            step = statistics.median(alone) / (result.steps[name] - _WARM)
            ratio = statistics.median(b / a for a, b in zip(alone, ours, strict=True))
            own = statistics.median(b - a for a, b in zip(alone, own_saves, strict=True))
            our = statistics.median(b - a for a, b in zip(ours, our_saves, strict=True))
            each = 1e3 / result.saves[name]
            lines.append(
                f"| {framework} | {step * 1e3:.2f} | {ratio:.3f} | {own * each:.0f} | {our * each:.0f} | "
                f"{our / own:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, small")
    parser.add_argument("--only", nargs="+", choices=tuple(FRAMEWORKS), default=list(FRAMEWORKS))
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), metavar="FOLDER")
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help="show a stored result again")
    parser.add_argument("--readme", action="store_true", help="put the table into benchmarks/README.md")
    arguments = parser.parse_args()
    if arguments.source:
        result = Result(**json.loads(arguments.source.read_text()))
    else:
        result = _measured(arguments.quick, arguments.only)
        out = README.parent / "results" if arguments.readme else arguments.out
        out.mkdir(parents=True, exist_ok=True)
        (out / "frameworks-cpu.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    print(show(result))
    if arguments.readme:
        marked = re.compile(r"(<!-- frameworks: .*? -->\n).*?(<!-- frameworks ends -->)", re.DOTALL)
        page = README.read_text()
        README.write_text(marked.sub(lambda found: f"{found[1]}\n{show(result)}\n{found[2]}", page))


def _measured(quick: bool, only: list[str]) -> Result:
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    large = (40, 256, 2) if quick else (40, 2000, 3)
    trainings = {
        "Steps of a small model": (60 if quick else 1000, 64, 2),
        f"{large[1] ** 2 * 24 / 1e6:.0f} MB of weights and moments": large,
    }
    result = Result(machine.describe(Path(), "cpu"))
    measure(trainings, 1 if quick else 5, only, result)
    return result


if __name__ == "__main__":
    main()
