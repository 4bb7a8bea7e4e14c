"""A resumed Trainer beside callbacks that stop it, evaluate, look at the data or train a second model."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from resumable import Run, StateMismatch, UsageError

pytest.importorskip("transformers")

import resumed_trainer as resumed
import tiny_trainer as tiny
from resumed_trainer import assert_same, stopped, trained
from tiny_trainer import Noisy
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from resumable import Unsupported
from resumable.integrations import trainer_refusals, transformers
from resumable.integrations.transformers import resume

pytestmark = resumed.MARKS


@pytest.mark.heavy
def test_data_that_trainer_would_not_skip_is_skipped(tmp_path: Path) -> None:
    assert_same(lambda: tiny.make(tmp_path, ignore_data_skip=True), tmp_path / "run", 2, 2, 3)


@pytest.mark.heavy
def test_trainers_own_checkpoints_stay(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    best = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    trainer = tiny.make(tmp_path, eval_dataset=Noisy(6), **saves, **best)
    # Trainer itself knows of no best checkpoint: the best evaluation had none.
    trainer.args.load_best_model_at_end = True
    trainer._determine_best_metric = lambda **_: False

    resume(trainer, tmp_path / "run", every=1)
    trainer.train()

    assert [one.name for one in (tmp_path / "trainer").glob("checkpoint-*")] == ["checkpoint-9"]
    assert trainer.state.best_model_checkpoint is None


def test_an_evaluation_outside_of_the_training_is_not_saved(tmp_path: Path) -> None:
    goal = {"eval_dataset": Noisy(6), "metric_for_best_model": "loss"}
    trainer = tiny.make(tmp_path, **goal)
    resume(trainer, tmp_path / "run", every=1)

    trainer.evaluate()
    trainer.train()
    trainer.evaluate()

    assert trainer.state.global_step == 9
    assert Run(tmp_path / "run").checkpoints()[-1].about.metrics == {}


class Looks(TrainerCallback):
    """Takes a batch from the loader at each event."""

    def look(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
        assert "input_ids" in next(iter(train_dataloader))

    on_train_begin = on_epoch_begin = on_step_end = look


@pytest.mark.heavy
@pytest.mark.parametrize("workers", [0, 2])
def test_a_callback_may_take_batches_from_the_loader(workers: int, tmp_path: Path) -> None:
    def make() -> Any:
        return tiny.make(tmp_path, callbacks=[Looks()], dataloader_num_workers=workers)

    assert_same(make, tmp_path / "run", 2, 2, 3)


class Stops(TrainerCallback):
    """Stops the training once, as one does whose time is over."""

    def __init__(self, step: int, event: str) -> None:
        self.step = step
        setattr(self, event, self.stop)

    def stop(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


@pytest.mark.parametrize(
    ("data", "event", "places"),
    [
        # The epochs end after 3 steps; those of the stream, which has no length, after 2.
        ("shuffled", "on_step_end", (2, 3)),
        ("shuffled", "on_step_end", (3, 4)),
        ("shuffled", "on_step_end", (5, 6)),
        ("shuffled", "on_epoch_end", (3, 6)),
        ("stream", "on_step_end", (1, 2)),
        ("stream", "on_step_end", (2, 5)),
        ("stream", "on_epoch_end", (2, 4)),
    ],
)
@pytest.mark.quick(7)
def test_a_training_that_a_callback_stops_continues(
    data: str, event: str, places: tuple[int, ...], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"dataset": tiny.Streamed(), "max_steps": 9} if data == "stream" else {}
    alone = tiny.result(trained(tiny.make(tmp_path, **given)))
    for place in places:
        trainer = tiny.make(tmp_path, callbacks=[Stops(place, event)], **given)
        resume(trainer, tmp_path / "run")
        trainer.train()
        assert trainer.state.global_step == place

    assert tiny.result(stopped(lambda: tiny.make(tmp_path, **given), tmp_path / "run")) == alone


@pytest.mark.heavy
def test_a_stop_inside_of_a_window_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    alone = tiny.result(trained(tiny.make(tmp_path)))
    trainer = tiny.make(tmp_path, callbacks=[Stops(4, "on_substep_end")])
    resume(trainer, tmp_path / "run", every=1)
    trainer.train()

    assert tiny.result(stopped(lambda: tiny.make(tmp_path), tmp_path / "run", 2)) == alone


@pytest.mark.heavy
def test_more_steps_continue_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def make(steps: int) -> Any:
        return tiny.make(tmp_path, max_steps=steps, lr_scheduler_type="constant")

    alone = tiny.result(trained(make(9)))
    for steps in (2, 5):
        stopped(lambda steps=steps: make(steps), tmp_path / "run", 1)
    longer = tiny.result(stopped(lambda: make(9), tmp_path / "run", 1))

    assert [longer[name] for name in ("weights", "optimizer", "torch")] == [
        alone[name] for name in ("weights", "optimizer", "torch")
    ]


@pytest.mark.heavy
def test_more_patience_continues_a_training_that_was_stopped_early(tmp_path: Path) -> None:
    def make(patience: int) -> Any:
        goal = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
        given = {"eval_dataset": Noisy(6), "callbacks": [EarlyStoppingCallback(patience)], **goal}
        return tiny.make(tmp_path, learning_rate=0.5, num_train_epochs=9, **given)

    alone = trained(make(9))
    early = stopped(lambda: make(2), tmp_path / "run", 2)
    assert early.state.global_step < alone.state.global_step

    assert tiny.result(stopped(lambda: make(9), tmp_path / "run", 2)) == tiny.result(alone)


def test_another_window_is_refused_in_mid_epoch(tmp_path: Path) -> None:
    trainer = tiny.make(tmp_path)
    resume(trainer, tmp_path / "run", every=1)
    trained(trainer, 3)
    again = tiny.make(tmp_path, gradient_accumulation_steps=3)
    resume(again, tmp_path / "run")

    with pytest.raises(StateMismatch, match="gradient_accumulation_steps=4; now it is 3"):
        again.train()


Pair = namedtuple("Pair", ["steps", "rows"])


class Pairs(Trainer):
    """A Trainer that counts in a namedtuple, and holds much data."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.pair, self.rows, self.seen = Pair(0, [0]), [[row] for row in range(20_000)], [0] * 10_000

    def training_step(self, *args: Any, **given: Any) -> Any:
        self.pair = Pair(self.pair.steps + 1, [*self.pair.rows, self.pair.steps])
        self.seen.append(self.pair.steps)
        return super().training_step(*args, **given)


@pytest.mark.heavy
def test_named_tuples_and_long_lists_continue(tmp_path: Path) -> None:
    trainer = stopped(lambda: tiny.make(tmp_path, kind=Pairs), tmp_path / "run", 2, 2, 3)

    assert trainer.pair == Pair(33, [0, *range(33)])
    assert isinstance(trainer.pair, Pair)
    assert trainer.seen[-33:] == [*range(1, 34)]
    assert len(trainer.rows) == 20_000


def test_data_that_stays_as_it_is_is_not_saved(tmp_path: Path) -> None:
    trainer = tiny.make(tmp_path, kind=Pairs)
    resume(trainer, tmp_path / "run")
    trainer.train()

    saved = b"".join(Run(tmp_path / "run").checkpoints()[-1].read().values())
    assert b"seen" in saved
    assert b"rows" not in saved


def test_a_trainer_that_is_dropped_frees_its_model(tmp_path: Path) -> None:
    trainer = tiny.make(tmp_path)
    resume(trainer, tmp_path / "run")
    trainer.train()
    model = weakref.ref(trainer.model)
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert model() is None
    finally:
        gc.enable()


def test_trainers_batches_can_be_copied(tmp_path: Path) -> None:
    loader = tiny.make(tmp_path).get_train_dataloader()

    assert len(copy.copy(transformers._Batches(loader))) == 11


def test_resume_refuses_an_option_that_it_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no evry="):
        resume(tiny.make(tmp_path), tmp_path / "run", evry=1)
    with pytest.raises(UsageError, match="every"):
        resume(tiny.make(tmp_path), tmp_path / "run", every="ten minutes")


def test_a_complete_training_leaves_the_arguments_as_they_were(tmp_path: Path) -> None:
    for _ in range(2):
        trainer = tiny.make(tmp_path, eval_dataset=Noisy(6), eval_on_start=True)
        resume(trainer, tmp_path / "run")
        trainer.train()

    assert trainer.args.eval_on_start


def test_a_release_without_the_function_that_skips_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(trainer_refusals.its_module, "skip_first_batches")

    with pytest.raises(Unsupported, match=r"has no trainer\.skip_first_batches"):
        resume(tiny.make(tmp_path), tmp_path / "run")


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("error::resumable.ResumableWarning")
def test_a_reference_model_that_is_synced_continues(tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    dice = random.Random(0)

    def text() -> str:
        return " ".join(dice.choices(resumed.LETTERS, k=3))

    rows = [{"prompt": text(), "chosen": text(), "rejected": text()} for _ in range(12)]
    dataset = datasets.Dataset.from_list(rows)

    def make() -> Any:
        synced = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
        args = trl.DPOConfig(
            output_dir=str(tmp_path / "trl"),
            num_train_epochs=2,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=2,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            max_length=8,
            gradient_checkpointing=False,
            **synced,
        )
        torch.manual_seed(0)
        models = {"model": tiny.model(), "ref_model": tiny.model()}
        return trl.DPOTrainer(
            **models, args=args, train_dataset=dataset, processing_class=resumed.tokenizer()
        )

    alone = trained(make())
    trainer = stopped(make, tmp_path / "run", 3, 4)

    assert tiny.result(trainer) == tiny.result(alone)
    assert tiny.digest(trainer.ref_model.state_dict()) == tiny.digest(alone.ref_model.state_dict())
