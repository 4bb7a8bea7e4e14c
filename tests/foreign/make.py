"""Makes what lies beside it: small checkpoints, saved by the tools themselves.

    python tests/foreign/make.py [--into FOLDER] [TOOL ...]

It needs pytorch-lightning, accelerate, transformers and timm, in any environment. What was made is
stored, so that the tests need none of them; `versions.json` says what has made it.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).parent


def net() -> nn.Sequential:
    """Return the model that all of them train."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def data() -> torch.utils.data.TensorDataset:
    """Return the data that they train it on."""
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(16, 3, generator=generator), torch.randn(16, 1, generator=generator)
    )


def lightning(folder: Path) -> None:
    """Save with a ModelCheckpoint in the middle of an epoch, at its end, and by hand after the fit."""
    import pytorch_lightning as pl
    from pytorch_lightning.callbacks import ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = net()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    loader = torch.utils.data.DataLoader(data(), batch_size=4)
    where: dict[str, Any] = {"dirpath": folder, "save_top_k": -1}
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(filename="middle", every_n_train_steps=7, **where),
            ModelCheckpoint(filename="{epoch}", monitor="val_loss", mode="min", **where),
        ],
    )
    trainer.fit(Module(width=4), loader, loader)
    (folder / "epoch=1.ckpt").unlink()
    trainer.save_checkpoint(folder / "fitted.ckpt")


def accelerate(folder: Path) -> None:
    """Save with `save_state` after five steps."""
    from accelerate import Accelerator

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(data(), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(torch.optim.swa_utils.AveragedModel(net()))
    for number in range(5):
        x, y = data()[4 * number % 16 : 4 * number % 16 + 4]
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder))


def transformers(folder: Path) -> None:
    """Save with the Trainer, once in the middle of an epoch and once at its end."""
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.net(x)
            return {"loss": nn.functional.mse_loss(out, labels), "logits": out}

    rows = [{"x": x, "labels": y} for x, y in data()]
    given = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="eval_loss",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model=Model(), args=given, train_dataset=rows, eval_dataset=rows).train()
    for number in (2, 6):
        shutil.rmtree(folder / f"checkpoint-{number}")


def timm(folder: Path) -> None:
    """Save with the saver of its training script."""
    from argparse import Namespace

    from timm.utils import CheckpointSaver, ModelEmaV2

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ema = ModelEmaV2(model)
    saver = CheckpointSaver(
        model, optimizer, Namespace(model="net"), model_ema=ema, checkpoint_dir=str(folder), max_history=1
    )
    for epoch in range(3):
        x, y = data()[:]
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
        saver.save_checkpoint(epoch, metric=50.0 + epoch)
    for name in ("last.pth.tar", "model_best.pth.tar"):
        (folder / name).unlink(missing_ok=True)


TOOLS: dict[str, tuple[Callable[[Path], None], str]] = {
    "lightning": (lightning, "pytorch-lightning"),
    "accelerate": (accelerate, "accelerate"),
    "transformers": (transformers, "transformers"),
    "timm": (timm, "timm"),
}


def main(names: list[str]) -> None:
    """Make what the tools that are named save."""
    into = HERE
    if names[:1] == ["--into"]:
        into, names = Path(names[1]), names[2:]
    known = into / "versions.json"
    versions = json.loads(known.read_text()) if known.exists() else {}
    for name in names or TOOLS:
        make, package = TOOLS[name]
        with tempfile.TemporaryDirectory() as scratch:
            make(Path(scratch))
            shutil.rmtree(into / name, ignore_errors=True)
            shutil.copytree(scratch, into / name)
        versions[name] = {package: version(package), "torch": torch.__version__}
    known.write_text(json.dumps(versions, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
