"""What is built on the Trainer of transformers: PEFT's models, and the SFTTrainer of TRL."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import resumed_trainer as resumed
import tiny_trainer as tiny
from resumed_trainer import LETTERS, assert_same
from tiny_trainer import Noisy

# What these packages say of themselves, and of each other.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("error::resumable.ResumableWarning"),
]
offline = resumed.offline


@pytest.mark.heavy
def test_adapters_are_continued_and_the_best_loaded(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}

    def make() -> Any:
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
        model = peft.get_peft_model(tiny.model(), lora)
        given = {"model": model, "eval_dataset": Noisy(6), "load_best_model_at_end": True}
        return tiny.make(tmp_path, **given, **best)

    assert_same(make, tmp_path / "run", 2, 2, 3)


@pytest.mark.heavy
def test_trls_sft_trainer_is_continued_with_its_own_counters(tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    dice = random.Random(0)
    texts = [{"text": " ".join(dice.choices(LETTERS, k=dice.randint(3, 7)))} for _ in range(22)]
    dataset = datasets.Dataset.from_list(texts)

    def make() -> Any:
        args = trl.SFTConfig(
            output_dir=str(tmp_path / "trl"),
            num_train_epochs=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            max_length=8,
            gradient_checkpointing=False,
        )
        torch.manual_seed(0)
        given = {"train_dataset": dataset, "eval_dataset": dataset.select(range(4))}
        return trl.SFTTrainer(tiny.model(), args, processing_class=resumed.tokenizer(), **given)

    assert_same(make, tmp_path / "run", 2, 2, 3)
