"""The scripts in examples/, and how each is made small."""

from __future__ import annotations

from typing import NamedTuple

from places import ROOT

EXAMPLES = ROOT / "examples"


class Size(NamedTuple):
    """How an example is made small, and how many steps its optimizers then make."""

    arguments: tuple[str, ...]
    steps: int
    edge: int | None = None
    """Of two kills the first comes after this step, where chance would hardly meet a place that matters."""


SIZES = {
    "classifier.py": Size(("--epochs=2", "--samples=600"), 24),
    "gpt.py": Size(("--steps=40",), 40),
    "gan.py": Size(("--epochs=2",), 48),
    "finetune.py": Size(("--epochs=3",), 140),
    "distributed.py": Size(("--epochs=3",), 30),
    "fsdp.py": Size(("--epochs=1",), 32),
    "with_fabric.py": Size(("--epochs=2",), 100),
    # After an epoch that has ended in the middle of an accumulation window, with a step
    "with_accelerate.py": Size(("--epochs=2",), 26, edge=14),
    # After an epoch whose last window was shorter
    "with_trainer.py": Size(("--epochs=2",), 40, edge=20),
    # After an epoch that has ended in the middle of an accumulation window, with a step
    "with_lightning.py": Size(("--epochs=3",), 39, edge=13),
}
NEEDS = {
    "with_fabric.py": "lightning_fabric",
    "with_accelerate.py": "accelerate",
    "with_trainer.py": "transformers",
    "with_lightning.py": "lightning.pytorch",
}
"""What is no part of this library, and may not be there."""
