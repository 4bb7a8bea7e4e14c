"""A training of two processes under Lightning's strategy "ddp", which may send itself a signal.

lightning_processes.py RUN BATCH SIGNAL: RUN may be "none"; rank 0 sends the signal after so many batches.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_training import Case

from resumable import Ranks
from resumable.integrations.lightning import Resumable

EPOCHS = 10


class SignalAfter(pl.Callback):
    """Sends a signal to rank 0; all ranks train slowly enough to agree where they leave."""

    def __init__(self, batch: int, number: int) -> None:
        self._left, self._number = batch, number

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Count a batch."""
        self._left -= 1
        time.sleep(0.05)
        if self._left == 0 and trainer.global_rank == 0:
            os.kill(os.getpid(), self._number)


class Reducing(pl.Callback):
    """Waits for the other ranks where it saves, as Lightning lets it: it calls the hook on each rank."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the sum over the ranks."""
        checkpoint["ranks"] = trainer.strategy.reduce(torch.ones(()), reduce_op="sum")

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Check the sum."""
        assert checkpoint["ranks"] == trainer.world_size


def main(run: str, batch: str, name: str) -> None:
    """Train, and print what each rank ends with."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    callbacks: list[Any] = [SignalAfter(int(batch), signal.Signals[name]), Reducing()]
    if run != "none":
        callbacks.append(Resumable(run, every=1, minimize="val", ranks=Ranks(timeout=20)))
    case = Case(
        callbacks=lambda: callbacks,
        strategy="ddp",
        devices=2,
        accumulate_grad_batches=2,
        max_epochs=EPOCHS,
        val_check_interval=1.0,
    )
    result = case.fit()
    digest = hashlib.sha256(repr((result["metrics"], result["random"][1])).encode())
    for tensor in result["weights"].values():
        digest.update(tensor.numpy().tobytes())
    print(f"rank {case.trainer.global_rank}: {digest.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
