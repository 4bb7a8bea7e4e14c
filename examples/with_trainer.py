"""The Trainer of transformers: its own loop, our parts and batches (pip install transformers accelerate).

python examples/with_trainer.py runs/trainer
"""

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from resumable import RunState

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("run", nargs="?", default="runs/trainer", help="the run directory")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--text", type=Path, default=Path(__file__).parent.parent / "docs" / "guide.md")
parser.add_argument("--device", default="auto", help="auto or cpu")
args = parser.parse_args()


class Resume(TrainerCallback):
    """What Trainer takes for its loader, and what puts a training back before its first step.

    Trainer's own checkpoints are off (save_strategy="no"), and `train()` gets no resume_from_checkpoint.
    """

    told = ("global_step", "epoch", "best_metric", "log_history", "total_flos", "num_input_tokens_seen")
    since_log = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "current_flos")

    def __init__(self, trainer: Trainer, run_dir: str, loader: DataLoader, **options: Any) -> None:
        self.trainer, self.run_dir, self.loader, self.options = trainer, run_dir, loader, options
        if len(loader) % trainer.args.gradient_accumulation_steps:
            # Of an epoch that is gone on with, it would not know which window is the last and shorter one.
            raise ValueError("gradient_accumulation_steps has to divide the number of batches of an epoch")
        trainer.get_train_dataloader = lambda: self
        trainer.add_callback(self)

    def on_train_begin(self, args: TrainingArguments, *_: Any, **parts: Any) -> None:
        trainer, loader, extra = self.trainer, self.loader, {"trainer": self}
        made = {"model": trainer.model_wrapped, "optimizer": parts["optimizer"]}
        made |= {"scheduler": parts["lr_scheduler"], "scaler": trainer.accelerator.scaler}
        self.state = RunState.load(self.run_dir, **made, loader=loader, extra=extra, **self.options)
        self.epochs = self.state.epochs(int(args.num_train_epochs))

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Give Trainer what is left of an epoch, whichever Trainer itself takes it for."""
        for _ in self.epochs:
            # Of an epoch whose batches are all done, Trainer has nothing to do either
            if self.state.batch < len(self.loader):
                yield from self.state.batches(device=self.trainer.args.device)
                return

    def on_step_end(self, args: TrainingArguments, state: Any, *_: Any, **__: Any) -> None:
        state.epoch = state.global_step * args.gradient_accumulation_steps / len(self.loader)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.state.save()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        next(self.epochs, None)
        self.state.close()

    def state_dict(self) -> dict[str, Any]:
        """Return how far Trainer has come, and what its next line in the log will be made of."""
        told = {name: getattr(self.trainer.state, name) for name in self.told}
        return {"told": told, "since_log": {name: getattr(self.trainer, name) for name in self.since_log}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self.trainer.state).update(saved["told"])
        vars(self.trainer).update(saved["since_log"])


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
config = GPT2Config(**size, bos_token_id=None, eos_token_id=None, loss_type="ForCausalLM")
trainer = Trainer(
    GPT2LMHeadModel(config),
    TrainingArguments(
        output_dir=f"{args.run}/trainer",
        num_train_epochs=args.epochs,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        warmup_steps=10,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        use_cpu=args.device == "cpu",
    ),
    train_dataset=pieces,
)
loading = {"batch_size": 8, "num_workers": 2, "drop_last": True, "collate_fn": trainer.data_collator}
loader = DataLoader(pieces, shuffle=True, **loading)
resume = Resume(trainer, args.run, loader, every=7)
trainer.train()

weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in trainer.model.state_dict().values())
print("weights", hashlib.sha256(weights).hexdigest()[:16])
