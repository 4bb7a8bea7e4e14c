"""Lightning's Trainer with its own loop, which a callback resumes exactly (pip install lightning).

python examples/with_lightning.py runs/lightning
"""

import argparse
import hashlib

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable.integrations.lightning import Resumable

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", nargs="?", default="runs/lightning", help="the run directory")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
args = parser.parse_args()


class Images(Dataset):
    """Images of noise, each shifted at random; the label is whether the image is bright."""

    def __init__(self, count: int, seed: int) -> None:
        self.images = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        return image.roll(int(torch.randint(4, ()))), (image.mean() > 0).long()


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("val_acc", (self.net(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


seed_everything(0)
model = Classifier()
trainer = Trainer(
    max_epochs=args.epochs,
    accelerator=args.device,
    accumulate_grad_batches=4,
    val_check_interval=0.5,
    log_every_n_steps=1,
    logger=False,
    enable_checkpointing=False,
    callbacks=[EMAWeightAveraging(decay=0.99), Resumable(args.run, every=5, maximize="val_acc")],
)
loader = DataLoader(Images(1000, seed=1), batch_size=20, shuffle=True, num_workers=2)
trainer.fit(model, loader, DataLoader(Images(200, seed=2), batch_size=50))

weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in model.state_dict().values())
print("weights", hashlib.sha256(weights).hexdigest()[:16])
