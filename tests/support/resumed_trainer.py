"""Trains a Trainer of transformers alone, and stopped and resumed, and compares the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import tiny_trainer as tiny
from tiny_trainer import Stopped

from resumable import Run
from resumable.integrations.transformers import resume

LETTERS = "abcdefghijklmn"
# What these packages say of themselves, and of each other.
MARKS = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep away from the hub, and forget what Accelerate shares in a process."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def trained(trainer: Any, stop: int | None = None) -> Any:
    """Train, until an exception stops the process after some steps if that is wanted."""
    hook = tiny.kill_after_steps(stop) if stop else None
    try:
        trainer.train()
    except Stopped:
        assert stop
    finally:
        if hook:
            hook.remove()
    return trainer


def stopped(make: Callable[[], Any], run: Path, *stops: int, **options: Any) -> Any:
    """Return the Trainer that has trained to the end, after others that were stopped after some steps."""
    for stop in (*stops, None):
        trainer = make()
        resume(trainer, run, **{"every": 1, **options})
        trained(trainer, stop)
    return trainer


def assert_same(make: Callable[[], Any], run: Path, *stops: int, **options: Any) -> Any:
    """Compare a training that is stopped with one that is left alone, and return its last Trainer."""
    alone = tiny.result(trained(make()))
    trainer = stopped(make, run, *stops, **options)
    assert tiny.result(trainer) == alone
    for checkpoint in Run(run).checkpoints():
        checkpoint.verify()
    return trainer


def tokenizer() -> Any:
    """Return a tokenizer of single letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    made = Tokenizer(models.WordLevel(words, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)
