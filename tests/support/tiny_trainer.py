"""A small Trainer of transformers, with what makes a resume hard: dropout, augmentation, uneven windows."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCABULARY, LENGTH = 17, 8


class Stopped(BaseException):
    """Ends a training as a kill does: nothing is saved in its course."""


class Noisy(Dataset[Any]):
    """Token sequences of which one token is drawn again at each load."""

    def __init__(self, size: int = 22) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index].clone()
        tokens[int(torch.randint(LENGTH, ()))] = torch.randint(VOCABULARY, ())
        return {"input_ids": tokens, "labels": tokens}


class Streamed(IterableDataset[Any]):
    """Token sequences without a length, some for each worker."""

    def __init__(self, size: int = 22) -> None:
        self.tokens = Noisy(size).tokens

    def __iter__(self) -> Any:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from ({"input_ids": one, "labels": one} for one in self.tokens[first::step])


def model(**changed: Any) -> Any:
    """Return a GPT-2 with some hundred weights."""
    size = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY}
    ends = {"bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(**size, **ends, **changed))


def make(folder: Path, dataset: Any = None, *, kind: Any = Trainer, **changed: Any) -> Any:
    """Return a Trainer; `changed` arguments of TrainingArguments, or of the Trainer itself."""
    torch.manual_seed(0)
    own = (
        "eval_dataset",
        "callbacks",
        "compute_metrics",
        "model",
        "optimizers",
        "data_collator",
        "args_class",
    )
    given = {name: changed.pop(name) for name in own if name in changed}
    arguments = {
        "output_dir": str(folder / "trainer"),
        "num_train_epochs": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = given.pop("args_class", TrainingArguments)(**{**arguments, **changed})
    return kind(given.pop("model", None) or model(), args, train_dataset=dataset or Noisy(), **given)


def kill_after_steps(steps: int) -> Any:
    """Return a handle; the optimizers of this process are stopped by an exception after so many steps."""

    def stop() -> None:
        raise Stopped

    return _after_steps(steps, stop)


def signal_after_steps(steps: int) -> Any:
    """Return a handle; this process sends itself SIGTERM after so many steps of its optimizers."""
    return _after_steps(steps, lambda: os.kill(os.getpid(), signal.SIGTERM))


def _after_steps(steps: int, action: Callable[[], None]) -> Any:
    left = steps

    def count(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            action()

    return register_optimizer_step_post_hook(count)


def result(trainer: Any) -> dict[str, Any]:
    """Return all that has to be the same bit for bit."""
    times = ("runtime", "per_second", "_time")
    log = [
        {name: value for name, value in line.items() if not name.endswith(times)}
        for line in trainer.state.log_history
    ]
    state = trainer.state
    return {
        "weights": digest(trainer.model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "scheduler": trainer.lr_scheduler.state_dict()["last_epoch"],
        "log": log,
        "torch": digest(torch.get_rng_state()),
        "counted": [
            state.global_step,
            state.epoch,
            state.total_flos,
            state.best_metric,
            state.best_global_step,
        ],
    }


def digest(value: Any) -> str:
    """Return a digest of all tensors and numbers in a value."""
    hashed = hashlib.sha256()
    for leaf in _leaves(value):
        hashed.update(
            leaf.cpu().contiguous().numpy().tobytes()
            if isinstance(leaf, torch.Tensor)
            else repr(leaf).encode()
        )
    return hashed.hexdigest()


def _leaves(value: Any) -> Any:
    if isinstance(value, dict):
        value = [one for pair in sorted(value.items(), key=lambda pair: str(pair[0])) for one in pair]
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value
