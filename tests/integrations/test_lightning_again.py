"""One Trainer of Lightning that is used again: a second fit, a fit after an error, validate around it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

pl = pytest.importorskip("lightning.pytorch")

from lightning_training import Case, Noisy, Stopped, assert_same, loader  # noqa: E402

from resumable import Preempt, Preempted, Run, UsageError  # noqa: E402
from resumable.integrations.lightning import Resumable  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*smaller than the logging interval"),
]


def fit_again(case: Case) -> Any:
    case.trainer.fit(case.model, loader(), DataLoader(Noisy(4), 2))
    return case.result()["weights"]


def places(run_dir: Path) -> list[tuple[int, int]]:
    return [(one.about.epoch, one.about.step) for one in Run(run_dir).checkpoints()]


def once(hook: str, count: int, act: Callable[[], None]) -> Any:
    """Return a callback that acts in the `count`-th call of a hook, and never again."""
    callback, calls = pl.Callback(), list[int]()

    def called(*_: Any, **__: Any) -> None:
        calls.append(0)
        if len(calls) == count:
            act()

    setattr(callback, hook, called)
    return callback


def fail() -> None:
    raise Stopped


def test_a_second_fit_continues_the_training(run_dir: Path) -> None:
    plain = Case(max_epochs=3).plain()
    case = Case(max_epochs=1)
    case.fit(Resumable(run_dir, keep=None))

    case.trainer.fit_loop.max_epochs = 3

    assert_same(fit_again(case), plain["weights"])
    assert places(run_dir) == [(1, 6), (2, 12), (3, 18)]


@pytest.mark.heavy
def test_a_fit_after_a_preemption_continues_in_mid_epoch(run_dir: Path) -> None:
    plain, case = Case().plain(), Case()
    kill = once("on_train_batch_end", 4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted):
        case.fit(Resumable(run_dir, preempt=Preempt(on_preempt="raise")), kill)

    assert_same(fit_again(case), plain["weights"])


@pytest.mark.quick(3)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_start", "on_train_epoch_end"])
def test_a_fit_after_one_that_failed_continues_from_its_last_save(hook: str, run_dir: Path) -> None:
    plain, case = Case().plain(), Case()
    with pytest.raises(Stopped):
        case.fit(Resumable(run_dir, every=1), once(hook, 2, fail))

    assert_same(fit_again(case), plain["weights"])


@pytest.mark.heavy
@pytest.mark.parametrize("hook", ["setup", "on_sanity_check_start", "on_fit_start", "on_train_start"])
def test_a_fit_after_one_that_failed_before_it_trained_starts_fresh(hook: str, run_dir: Path) -> None:
    case = Case()
    with pytest.raises(Stopped):
        case.fit(Resumable(run_dir, keep=None), once(hook, 1, fail))

    fit_again(case)

    assert places(run_dir) == [(1, 6), (2, 12), (3, 18)]


def test_a_fit_after_one_that_failed_without_a_save_is_refused(run_dir: Path) -> None:
    case = Case()
    with pytest.raises(Stopped):
        case.fit(Resumable(run_dir), once("on_train_batch_end", 2, fail))

    with pytest.raises(UsageError, match="has trained 2 batches already"):
        fit_again(case)


@pytest.mark.heavy
@pytest.mark.parametrize("limit", [1.0, 0])
def test_validate_works_before_and_after_a_fit(limit: float, run_dir: Path) -> None:
    case = Case(max_epochs=1, limit_val_batches=limit)
    case.fit(Resumable(run_dir))
    case.trainer.limit_val_batches = 1.0
    validation = DataLoader(Noisy(4), 2)

    case.trainer.validate(case.model, validation)
    case.trainer.fit_loop.max_epochs = 2
    fit_again(case)
    case.trainer.validate(case.model, validation)

    assert places(run_dir)[-1] == (2, 12)


def test_the_trainer_has_its_own_loop_and_loader_after_a_fit(run_dir: Path) -> None:
    case = Case(max_epochs=1)
    case.fit(Resumable(run_dir))

    loop = case.trainer.fit_loop
    assert "run" not in vars(loop)
    assert loop._data_source.dataloader.__self__ is loop._data_source
