"""The Trainer of transformers, and one line (pip install transformers accelerate).

python examples/with_trainer.py runs/trainer
"""

import argparse
import hashlib
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from resumable.integrations.transformers import resume

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", nargs="?", default="runs/trainer", help="the run directory")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "docs" / "guarantees.md")
parser.add_argument("--device", default="auto", help="auto or cpu")
args = parser.parse_args()


class Pieces(Dataset):
    """Pieces of a text, each from a place near its own that is drawn again in every epoch."""

    def __init__(self, text: str, length: int = 64) -> None:
        self.characters = sorted(set(text))
        self.data = torch.tensor([self.characters.index(one) for one in text[:20_000]])
        self.length = length

    def __len__(self) -> int:
        return len(self.data) // self.length - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = index * self.length + int(torch.randint(self.length, ()))
        piece = self.data[start : start + self.length]
        return {"input_ids": piece, "labels": piece}


torch.manual_seed(0)
pieces = Pieces(args.text.read_text())
size = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": len(pieces.characters)}
config = GPT2Config(**size, bos_token_id=None, eos_token_id=None)
trainer = Trainer(
    GPT2LMHeadModel(config),
    TrainingArguments(
        output_dir=f"{args.run}/trainer",
        num_train_epochs=args.epochs,
        # The epoch's last window has one batch.
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=10,
        logging_steps=5,
        dataloader_num_workers=2,
        save_strategy="no",
        report_to="none",
        use_cpu=args.device == "cpu",
    ),
    train_dataset=pieces,
)
resume(trainer, args.run, every=7)
trainer.train()

weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in trainer.model.state_dict().values())
print("weights", hashlib.sha256(weights).hexdigest()[:16])
