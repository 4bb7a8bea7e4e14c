"""The Trainer of transformers, stopped and continued: bit for bit what it does when left alone."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from resumable import Preempt, Preempted, Run, Unsupported, UsageError
from resumable.run.manifest import Goal

pytest.importorskip("transformers")

import gloo
import resumed_trainer as resumed
import tiny_trainer as tiny
from resumed_trainer import assert_same, stopped, trained
from tiny_trainer import Noisy
from transformers import EarlyStoppingCallback, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from resumable.integrations import trainer_refusals
from resumable.integrations import transformers as ours

pytestmark = resumed.MARKS
offline = resumed.offline
BATCHES, WINDOW = 11, 4


def left_alone(make: Callable[[], Any]) -> dict[str, Any]:
    return tiny.result(trained(make()))


class Lengths(Noisy):
    """Sequences of several lengths."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = super().__getitem__(index)
        length = 3 + int(self.tokens[index][0]) % 6
        return {**{name: one[:length] for name, one in found.items()}, "length": length}


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(one["input_ids"]) for one in samples)

    def pad(tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tokens, (0, longest - len(tokens)))

    return {name: torch.stack([pad(one[name]) for one in samples]) for name in ("input_ids", "labels")}


def by_length() -> dict[str, Any]:
    sampling = {"train_sampling_strategy": "group_by_length", "length_column_name": "length"}
    return {"dataset": Lengths(), "data_collator": padded, "remove_unused_columns": False, **sampling}


def evaluated(every: str = "steps", **more: Any) -> dict[str, Any]:
    goal = {"metric_for_best_model": "loss", "eval_dataset": Noisy(6)}
    return {"eval_strategy": every, "eval_steps": 2, **goal, **more}


def stopping_early() -> dict[str, Any]:
    rate = {"learning_rate": 0.5, "num_train_epochs": 9, "callbacks": [EarlyStoppingCallback(2)]}
    return evaluated(**rate) | {"eval_steps": 1}


CASES: dict[str, tuple[Callable[[], dict[str, Any]], tuple[int, ...]]] = {
    # 11 batches an epoch, 4 a window: the third window of each epoch is shorter.
    "dropout and shuffled": (dict, (2, 2, 3)),
    "the epoch's end": (dict, (4, 4, 2)),
    "no accumulation": (lambda: {"gradient_accumulation_steps": 1, "num_train_epochs": 2}, (2, 9, 5, 5)),
    "workers": (lambda: {"dataloader_num_workers": 2}, (2, 2, 3)),
    "by length": (by_length, (2, 2, 3)),
    "in order": (lambda: {"train_sampling_strategy": "sequential"}, (2, 2, 3)),
    "max_steps": (lambda: {"max_steps": 5}, (2, 2)),
    "a broken epoch": (lambda: {"num_train_epochs": 1.5}, (2, 2)),
    "evaluated by steps": (evaluated, (2, 2, 3)),
    "evaluated by epochs": (
        lambda: evaluated("epoch", logging_strategy="epoch", eval_on_start=True),
        (2, 2, 3),
    ),
    # A stop after each step, and so in the middle of its patience.
    "stopped early": (stopping_early, (2, 2, 2, 2, 2)),
    "plateau": (
        lambda: evaluated(lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0}),
        (2, 2, 3),
    ),
    "noise in the embeddings": (lambda: {"neftune_noise_alpha": 5.0}, (2, 2, 3)),
    "tokens counted": (lambda: {"label_smoothing_factor": 0.1}, (2, 2, 3)),
    "iterable": (lambda: {"dataset": tiny.Streamed(), "max_steps": 9}, (2, 2, 3)),
    "iterable in workers": (
        lambda: {"dataset": tiny.Streamed(), "max_steps": 9, "dataloader_num_workers": 2},
        (2, 2, 3),
    ),
}


@pytest.mark.quick(16)
@pytest.mark.parametrize("case", CASES)
def test_a_trainer_that_is_stopped_ends_with_the_same_bits(case: str, tmp_path: Path) -> None:
    changed, stops = CASES[case]

    assert_same(lambda: tiny.make(tmp_path, **changed()), tmp_path / "run", *stops)


@pytest.mark.heavy
def test_a_trainer_that_derives_from_it_is_continued(tmp_path: Path) -> None:
    given = {"kind": Seq2SeqTrainer, "args_class": Seq2SeqTrainingArguments}

    assert_same(lambda: tiny.make(tmp_path, **given), tmp_path / "run", 2, 3)


def test_a_trainer_that_is_never_stopped_is_not_changed(tmp_path: Path) -> None:
    assert_same(lambda: tiny.make(tmp_path), tmp_path / "run", every=None)


@pytest.mark.heavy
@pytest.mark.parametrize("case", ["in order", "max_steps", "stopped early"])
def test_a_complete_training_that_is_started_again_makes_no_step(case: str, tmp_path: Path) -> None:
    def make() -> Any:
        return tiny.make(tmp_path, **CASES[case][0]())

    done = tiny.result(assert_same(make, tmp_path / "run", every=None))

    again = make()
    ours.resume(again, tmp_path / "run")
    again.training_step = None
    again.train()

    assert tiny.result(again) == done


class Unprepared(Trainer):
    """A Trainer with a loader of torch that Accelerate has not prepared."""

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, 2, shuffle=True)


@pytest.mark.heavy
def test_a_loader_that_is_not_prepared_is_continued(tmp_path: Path) -> None:
    assert_same(lambda: tiny.make(tmp_path, kind=Unprepared), tmp_path / "run", 2, 2, 3)


@pytest.mark.quick(3)
@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_signal_leaves_after_the_step_and_the_rest_follows(step: int, tmp_path: Path) -> None:
    # 3 and 6 are the last steps of epochs: the end of the first is not known to be quick, so it is left out.
    def make() -> Any:
        return tiny.make(tmp_path, logging_strategy="epoch")

    alone, trainer = left_alone(make), make()
    ours.resume(trainer, tmp_path / "run", preempt=Preempt(on_preempt="raise"))
    hook = tiny.signal_after_steps(step)
    with pytest.raises(Preempted):
        trainer.train()
    hook.remove()

    assert trainer.state.global_step == step
    assert tiny.result(stopped(make, tmp_path / "run", 1)) == alone


@pytest.mark.heavy
def test_more_epochs_continue_a_complete_training(tmp_path: Path) -> None:
    stopped(lambda: tiny.make(tmp_path, num_train_epochs=1), tmp_path / "run")

    longer = stopped(lambda: tiny.make(tmp_path, num_train_epochs=2), tmp_path / "run", 1)

    assert longer.state.global_step == 6


@pytest.mark.heavy
def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path: Path) -> None:
    best = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.2}

    trainer = assert_same(lambda: tiny.make(tmp_path, **evaluated(**best)), tmp_path / "run", 2, 2, 3)

    best_saved = Run(tmp_path / "run").best(Goal("eval_loss", maximize=False))
    assert best_saved
    assert best_saved.value == trainer.state.best_metric


@pytest.mark.heavy
def test_the_best_is_loaded_without_a_checkpoint_of_trainers_own(tmp_path: Path) -> None:
    def make(saves: str) -> Any:
        best = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
        trainer = tiny.make(tmp_path / saves, **evaluated(**best, learning_rate=0.2))
        trainer.args.save_strategy = saves
        return trainer

    alone = left_alone(lambda: make("steps"))
    trainer = stopped(lambda: make("no"), tmp_path / "run", 2, 3)

    assert tiny.result(trainer)["weights"] == alone["weights"]
    assert not [*(tmp_path / "no").rglob("checkpoint-*")]


class Counting(Trainer):
    """A Trainer that keeps sums of its own."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.seen, self.sums = 0, {"train": {"batches": [0]}}

    def training_step(self, *args: Any, **given: Any) -> Any:
        self.seen += 1
        self.sums["train"]["batches"] = [*self.sums["train"]["batches"], self.seen]
        return super().training_step(*args, **given)


@pytest.mark.heavy
def test_what_a_subclass_counts_continues(tmp_path: Path) -> None:
    trainer = stopped(lambda: tiny.make(tmp_path, kind=Counting), tmp_path / "run", 2, 2, 3)

    assert trainer.seen == 3 * BATCHES
    assert trainer.sums["train"]["batches"] == [*range(3 * BATCHES + 1)]


@pytest.mark.heavy
def test_a_checkpoint_never_stands_inside_of_a_window(tmp_path: Path) -> None:
    stopped(lambda: tiny.make(tmp_path), tmp_path / "run", keep=None)

    places = [(one.about.batch, one.about.step) for one in Run(tmp_path / "run").checkpoints()]
    assert places
    assert all(batch % WINDOW == 0 for batch, _ in places), places


def test_train_refuses_a_checkpoint_of_trainers_own(tmp_path: Path) -> None:
    trainer = tiny.make(tmp_path)
    ours.resume(trainer, tmp_path / "run")

    with pytest.raises(UsageError, match="resume_from_checkpoint"):
        trainer.train(resume_from_checkpoint=True)


def test_resume_refuses_the_parts_that_it_takes_from_the_trainer(tmp_path: Path) -> None:
    trainer = tiny.make(tmp_path)

    with pytest.raises(UsageError, match="model="):
        ours.resume(trainer, tmp_path / "run", model=trainer.model)


def test_resume_refuses_a_trainer_that_it_has_already(tmp_path: Path) -> None:
    trainer = tiny.make(tmp_path)
    ours.resume(trainer, tmp_path / "run")

    with pytest.raises(UsageError, match="called for this Trainer before"):
        ours.resume(trainer, tmp_path / "other")


def test_resume_names_what_it_cannot_continue(tmp_path: Path) -> None:
    trainer = tiny.make(tmp_path)
    trainer.args.auto_find_batch_size = True

    with pytest.raises(Unsupported, match="auto_find_batch_size=True"):
        ours.resume(trainer, tmp_path / "run")


def test_a_release_without_what_resume_needs_is_refused_by_name(tmp_path: Path) -> None:
    class Later(Trainer):
        _run_epoch = property()

    with pytest.raises(Unsupported, match="has no _run_epoch"):
        ours.resume(tiny.make(tmp_path, kind=Later), tmp_path / "run")


def test_trainer_has_all_that_is_private_and_used() -> None:
    from transformers import trainer, trainer_callback

    source = Path(trainer.__file__).read_text()
    needed = [*ours._WRAPPED, "_load_rng_state"]
    assert [name for name in needed if not hasattr(Trainer, name)] == []
    assert hasattr(trainer, ours._SKIPS)
    taken = inspect.signature(Trainer._run_epoch).parameters
    assert [name for name in trainer_refusals.EPOCH_ARGUMENTS if name not in taken] == []
    assert hasattr(trainer_callback, "ExportableState")
    # These are set to zero before on_train_begin, and are plain attributes.
    sums = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
    assert [name for name in sums if source.index(f"self.{name} =") > source.index(".on_train_begin(")] == []


@pytest.mark.heavy
def test_a_window_that_an_epoch_has_left_open_continues(tmp_path: Path) -> None:
    # The stream has no length, so that Trainer makes no step with the last 3 of 11 batches.
    def make() -> Any:
        return tiny.make(tmp_path, tiny.Streamed(), max_steps=9)

    assert_same(make, tmp_path / "run", 3, 3, 3, every="1 epochs")


def in_ddp(rank: int, folder: Path, stops: tuple[int | None, ...], data: str) -> dict[str, Any]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HF_HUB_OFFLINE")
    os.environ.update(zip(names, (str(rank), str(rank), "2", "127.0.0.1", "1", "1"), strict=True))
    for stop in stops:
        streamed = {"dataset": tiny.Streamed(44), "accelerator_config": {"dispatch_batches": False}}
        given = streamed | {"max_steps": 9} if data == "iterable" else evaluated()
        trainer = tiny.make(folder, ddp_backend="gloo", **given)
        if stop != 0:
            ours.resume(trainer, folder / "run", every=1)
        trained(trainer, stop)
    return {**tiny.result(trainer), "own": float(trainer._total_loss_scalar)}


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("data", ["shuffled", "iterable"])
def test_two_processes_that_are_stopped_end_with_the_same_bits(data: str, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"folder": tmp_path, "limit": 140}
    alone = gloo.run(2, in_ddp, tmp_path / "alone", (0,), data, **limits)
    again = gloo.run(2, in_ddp, tmp_path / "again", (2, 2, 3, None), data, **limits)

    assert [one.value for one in again] == [one.value for one in alone]
    assert alone[0].value
