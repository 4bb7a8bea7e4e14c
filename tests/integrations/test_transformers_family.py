"""What is built on the Trainer of transformers: PEFT's models, and the SFTTrainer of TRL."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import accelerate
import tiny_trainer as tiny
from tiny_trainer import Noisy, Stopped

from resumable.integrations.transformers import resume

# What these packages say of themselves, and of each other.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("error::resumable.ResumableWarning"),
]
LETTERS = "abcdefghijklmn"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def assert_same(make: Callable[[], Any], run: Path, *stops: int) -> None:
    alone = make()
    alone.train()
    expected = tiny.result(alone)
    for stop in (*stops, 0):
        trainer = make()
        resume(trainer, run, every=1)
        hook = tiny.kill_after_steps(stop)
        try:
            trainer.train()
        except Stopped:
            assert stop
        hook.remove()
    assert tiny.result(trainer) == expected


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


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    made = Tokenizer(models.WordLevel(words, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


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
        return trl.SFTTrainer(tiny.model(), args, processing_class=tokenizer(), **given)

    assert_same(make, tmp_path / "run", 2, 2, 3)
