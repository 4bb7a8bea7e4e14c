"""What a run of Lightning's Trainer holds, where it saves and leaves, and what is refused."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

pl = pytest.importorskip("lightning.pytorch")

import pytorch_lightning  # noqa: E402
from lightning.pytorch.callbacks import (  # noqa: E402
    BackboneFinetuning,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402
from lightning_training import (  # noqa: E402
    BATCHES,
    STOPS,
    Case,
    Model,
    Steps,
    StopIn,
    Stopped,
    assert_same,
    loader,
)

from resumable import Preempt, Preempted, ResumableWarning, Run, Unsupported, UsageError  # noqa: E402
from resumable.integrations import lightning_trainer  # noqa: E402
from resumable.integrations.lightning import Resumable  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*num_workers"),
    pytest.mark.filterwarnings("ignore:.*`dataloader_iter`"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


def saved(run_dir: Path) -> list[Any]:
    return [one.about for one in Run(run_dir).checkpoints()]


@pytest.mark.heavy
def test_a_training_with_the_callback_is_the_one_without_it(run_dir: Path) -> None:
    case = Case(stops=())

    assert_same(case.resumed(run_dir), case.plain())


@pytest.mark.heavy
def test_a_training_of_the_package_pytorch_lightning_resumes_too(run_dir: Path) -> None:
    class Other(Steps, pytorch_lightning.LightningModule):
        pass

    case = Case(Other, package=pytorch_lightning)

    assert_same(case.resumed(run_dir), case.plain())


@pytest.mark.heavy
def test_a_finished_training_trains_no_more_and_has_its_last_weights(run_dir: Path) -> None:
    case = Case(stops=())
    finished = case.resumed(run_dir)

    again = case.fit(Resumable(run_dir))

    assert not case.model.seen
    assert_same(again["weights"], finished["weights"])


@pytest.mark.heavy
def test_more_epochs_continue_a_finished_training(run_dir: Path) -> None:
    Case(stops=()).resumed(run_dir)
    longer = Case(max_epochs=5)

    assert_same(longer.fit(Resumable(run_dir))["weights"], longer.plain()["weights"])


@pytest.mark.heavy
def test_a_training_that_was_stopped_early_stays_stopped(run_dir: Path) -> None:
    def stopping() -> list[Any]:
        return [EarlyStopping("val", patience=0, min_delta=9)]

    case = Case(callbacks=stopping, max_epochs=9, val_check_interval=1.0, stops=STOPS[:2])
    plain = case.plain()

    assert_same(case.resumed(run_dir), plain)
    assert_same(case.fit(Resumable(run_dir))["weights"], plain["weights"])
    assert not case.model.seen


class Wall(pl.Callback):  # type: ignore[misc]
    """Asks the Trainer to stop after so many batches, as a callback does that looks at the time."""

    def __init__(self, batches: int) -> None:
        self._left = batches

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._left -= 1
        trainer.should_stop = trainer.should_stop or self._left == 0


@pytest.mark.heavy
@pytest.mark.parametrize("stops", [(3, 2, 4), (6, 1, 5), (2, 12)])
def test_a_training_stopped_by_a_callback_continues_at_the_next_start(
    stops: tuple[int, ...], run_dir: Path
) -> None:
    case = Case(limit_val_batches=0)
    plain = case.plain()

    for batches in stops:
        case.fit(Resumable(run_dir), Wall(batches))
        assert len(case.model.seen) == batches

    assert_same({**case.fit(Resumable(run_dir)), "lines": 0, "seen": 0}, {**plain, "lines": 0, "seen": 0})


def test_a_validation_at_such_a_stop_leaves_the_place_in_the_epoch(run_dir: Path) -> None:
    case = Case(val_check_interval=1.0, max_epochs=2)

    case.fit(Resumable(run_dir, minimize="val"), Wall(4))

    assert [one.step for one in saved(run_dir)] == [4]
    case.fit(Resumable(run_dir, minimize="val"))
    assert sorted(case.model.seen)[0] == (0, 4)
    assert saved(run_dir)[-1].step == 2 * BATCHES


def test_a_training_stopped_early_in_mid_epoch_stays_stopped(run_dir: Path) -> None:
    def stopping() -> list[Any]:
        return [EarlyStopping("val", patience=0, min_delta=9)]

    case = Case(callbacks=stopping, max_epochs=9, val_check_interval=2, stops=())
    case.resumed(run_dir)
    case.fit(Resumable(run_dir))

    assert not case.model.seen


def test_another_window_of_gradients_in_mid_epoch_is_named(run_dir: Path) -> None:
    with pytest.raises(Stopped):
        Case(accumulate_grad_batches=4).fit(Resumable(run_dir, every=1), StopIn("on_train_batch_end", 5))
    case = Case(accumulate_grad_batches=3)

    with pytest.warns(ResumableWarning, match="of accumulate_grad_batches=4, and the script now has 3"):
        case.fit(Resumable(run_dir))

    assert case.trainer.accumulate_grad_batches == 3


@pytest.mark.heavy
def test_model_checkpoint_keeps_the_same_files_beside_it(run_dir: Path, tmp_path: Path) -> None:
    kept = {}
    for name in "plain", "resumed":
        folder = tmp_path / name
        one = lambda: [ModelCheckpoint(folder, "{step}", "val", save_top_k=2)]  # noqa: B023, E731
        case = Case(callbacks=one, enable_checkpointing=True)
        case.plain() if name == "plain" else case.resumed(run_dir, keep=None)
        kept[name] = sorted(path.name for path in folder.iterdir())

    assert kept["plain"] == kept["resumed"]


def test_a_save_comes_after_each_epoch_and_each_validation_of_the_metric(run_dir: Path) -> None:
    Case(stops=(), max_epochs=2).resumed(run_dir, every=None, keep=None, minimize="val")

    assert [one.step for one in saved(run_dir)] == [2, 4, 6, 8, 10, 12]


@pytest.mark.heavy
def test_the_best_checkpoint_is_the_one_with_the_best_metric(run_dir: Path) -> None:
    case = Case(max_epochs=2)
    case.resumed(run_dir, keep=None, minimize="val")

    values = {one.number: one.metrics["val"] for one in saved(run_dir) if "val" in one.metrics}
    best = min(values, key=lambda number: (values[number], number))
    assert (run_dir / "best").samefile(Run(run_dir).open(best).path)


def test_a_metric_that_is_never_logged_is_refused_at_the_end_of_the_epoch(run_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"'vall' is to decide .* logs largest, loss"):
        Case().fit(Resumable(run_dir, minimize="vall"))


@pytest.mark.quick(3)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_start", "on_train_epoch_end"])
def test_a_signal_saves_and_leaves_with_the_code_of_the_signal(hook: str, run_dir: Path) -> None:
    class Killed(StopIn):
        def _count(self, trainer: Any, *_: Any) -> None:
            try:
                super()._count(trainer)
            except Stopped:
                os.kill(os.getpid(), signal.SIGTERM)

    case = Case()
    plain = case.plain()
    with pytest.raises(SystemExit) as left:
        case.fit(Resumable(run_dir), Killed(hook, 1))
    case.model.trainer = None

    assert left.value.code == 128 + signal.SIGTERM
    assert saved(run_dir)[-1].step == {"on_train_batch_end": 1, "on_validation_start": 2}.get(hook, BATCHES)
    assert_same(case.fit(Resumable(run_dir))["weights"], plain["weights"])


def test_a_signal_raises_preempted_where_that_is_asked_for(run_dir: Path) -> None:
    killed = StopIn("on_train_batch_end", 1)
    killed.on_train_batch_end = lambda *_: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[method-assign]

    with pytest.raises(Preempted):
        Case().fit(Resumable(run_dir, preempt=Preempt(on_preempt="raise")), killed)


class Iterating(Model):
    def training_step(self, dataloader_iter: Any) -> Any:
        return None


class Pretrained(Model):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net


REFUSED = {
    "takes dataloader_iter": Case(Iterating),
    "a dict of loaders": Case(loader=lambda: {"a": loader(), "b": loader()}),
    "a CombinedLoader of loaders": Case(loader=lambda: CombinedLoader([loader(), loader()], "min_size")),
    "reload_dataloaders_every_n_epochs makes": Case(reload_dataloaders_every_n_epochs=1),
    "val_check_interval is a time": Case(val_check_interval=timedelta(minutes=1)),
    "LearningRateFinder": Case(callbacks=lambda: [LearningRateFinder()]),
    "BaseFinetuning": Case(Pretrained, callbacks=lambda: [BackboneFinetuning()]),
    "StochasticWeightAveraging": Case(callbacks=lambda: [StochasticWeightAveraging(0.1)]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_not_exact_is_refused_by_name(why: str, run_dir: Path) -> None:
    with pytest.raises(Unsupported, match=why):
        REFUSED[why].fit(Resumable(run_dir))

    assert not run_dir.exists()


def test_two_of_these_callbacks_are_refused(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="two callbacks"):
        Case(callbacks=lambda: [Resumable("elsewhere")]).fit(Resumable(run_dir))

    assert not run_dir.exists()


@pytest.mark.heavy
def test_processes_that_are_spawned_are_refused_by_name(run_dir: Path) -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="forked or spawned"):
        Case(strategy="ddp_spawn", devices=1).fit(Resumable(run_dir))


def test_a_strategy_that_splits_the_model_is_refused_by_name(run_dir: Path) -> None:
    class FSDPStrategy(pl.strategies.SingleDeviceStrategy):
        pass

    with pytest.raises(Unsupported, match="FSDPStrategy"):
        Case(strategy=FSDPStrategy("cpu")).fit(Resumable(run_dir))


def test_a_checkpoint_of_lightning_besides_the_run_is_refused(run_dir: Path, tmp_path: Path) -> None:
    case = Case()
    case.fit()
    case.trainer.save_checkpoint(tmp_path / "one.ckpt")

    with pytest.raises(UsageError, match="ckpt_path="):
        Case(max_epochs=4).fit(Resumable(run_dir), ckpt_path=tmp_path / "one.ckpt", weights_only=False)


@pytest.mark.parametrize(
    ("options", "why"), [({"model": 1}, "takes no model"), ({"evry": 1}, "no option evry")]
)
def test_options_are_checked_where_the_callback_is_made(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        Resumable("runs/exp", **options)


def test_this_release_has_the_private_names_in_use() -> None:
    assert not lightning_trainer.missing(pl.Trainer(logger=False, enable_checkpointing=False))


@pytest.mark.parametrize(
    ("where", "names", "gone"),
    [
        ("PRIVATE", ("fit_loop._gone",), r"fit_loop\._gone"),
        ("PRIVATE_OF_MODULES", ("loops.fetchers._Gone",), r"loops\.fetchers\._Gone"),
        ("PRIVATE_OF_OBJECTS", {"Metric": ("_gone",)}, r"Metric\._gone"),
    ],
)
def test_a_private_name_that_a_release_lacks_is_named(
    where: str, names: Any, gone: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning_trainer, where, names)

    with pytest.raises(Unsupported, match=f"lacks .*{gone}"):
        Case().fit(Resumable(run_dir))


@pytest.mark.heavy
def test_an_attribute_that_no_hook_saves_is_named(run_dir: Path) -> None:
    class Forgetful(Model):
        factor = 1.0

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.factor *= 0.9
            return self.factor * super().training_step(batch, batch_idx)

    with pytest.warns(ResumableWarning, match="Forgetful.factor changes"):
        Case(Forgetful).fit(Resumable(run_dir, every=1))


@pytest.mark.heavy
def test_what_is_in_extra_is_saved_too(run_dir: Path) -> None:
    kept = {"batches": 0}

    class Counting(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            kept["batches"] += 1

    case = Case(callbacks=lambda: [Counting()], stops=STOPS[:1])
    case.resumed(run_dir, extra={"kept": kept})

    assert kept == {"batches": 3 * BATCHES}


@pytest.mark.heavy
def test_hooks_of_an_epoch_that_has_begun_are_not_called_again(run_dir: Path) -> None:
    begun: list[int] = []

    class Beginning(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            begun.append(trainer.current_epoch)

    Case(callbacks=lambda: [Beginning()], stops=STOPS[:2]).resumed(run_dir)

    assert begun == [0, 1, 2]
