"""A callback with which Lightning's Trainer resumes bit for bit."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..errors import Unsupported, UsageError
from ..groups import Preempt, Ranks
from ..state import RunState
from . import lightning_trainer as inside
from .lightning_loops import Loops

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_FOUND = [name for name in _PACKAGES if name in sys.modules]
_FOUND += [name for name in _PACKAGES if find_spec(name.partition(".")[0])]
_Callback: Any = import_module([*_FOUND, *_PACKAGES][0]).Callback


_OF_EACH_RANK = ("lightning", "logged")
"""Lightning calls the hooks that save on every rank, and they may wait there for the other ranks."""


class Resumable(_Callback):
    """Saves a training of Lightning's Trainer into a run directory, and resumes it from there exactly.

    `Trainer(callbacks=[Resumable("runs/exp", every="10 min")])`. It saves at the end of each epoch, with
    `maximize=` or `minimize=` also after each validation, and as `every=` says. The metrics of a save are
    `trainer.callback_metrics`.

    Args:
        run_dir: The run directory, or a remote address.
        extra: As in `RunState.load`: what the training needs besides the Trainer's own parts.
        ranks, preempt: As in `RunState.load`.
        progress: Whether to show a bar of this library beside the Trainer's.
        **options_of_load: Other options of `RunState.load`, such as `every=` or `keep=`.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        extra: Mapping[str, Any] | None = None,
        ranks: Ranks | None = None,
        preempt: Preempt | None = None,
        progress: bool = False,
        **options_of_load: Any,
    ) -> None:
        _check_options(options_of_load)
        self.state: RunState | None = None
        """The run of this training, from `on_train_start` on."""
        self._extra = dict(extra or {})
        ranks, self._preempt = ranks or Ranks(), preempt or Preempt()
        ranks = replace(ranks, per_rank=[*ranks.per_rank, *_OF_EACH_RANK])
        self._options = {"run_dir": run_dir, "progress": progress, "ranks": ranks, **options_of_load}
        self._loops: Loops | None = None
        self._replaced = ExitStack()
        """Puts back what `setup` has replaced in the Trainer."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace the Trainer's loop and loader for one `fit`, which then loads the run before it trains."""
        self._replaced.close()
        if stage == "fit" and not trainer.fast_dev_run:
            _refuse(trainer)
            self._replaced.enter_context(inside.unopened_loader(trainer, _refuse_loaders))
            self._replaced.enter_context(inside.wrapped(trainer, "run", partial(self._run, trainer)))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Put the Trainer's own loop and loader back."""
        self._replaced.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Put the Trainer's own loop and loader back after an error."""
        self._replaced.close()

    def _run(self, trainer: Any, run: Callable[[], None]) -> None:
        loader, length = inside.prepare_loader(trainer)
        if loader is None:
            # There is nothing to train, and the Trainer says so.
            run()
            return
        _refuse_late(trainer)
        loops = Loops(trainer, length, self._options.get("maximize") or self._options.get("minimize"))
        with self._load(trainer, loader, loops) as self.state:
            _refuse_used(trainer, self.state)
            self._follow(trainer, self.state, run, loops)

    def _load(self, trainer: Any, loader: Any, loops: Loops) -> RunState:
        return RunState.load(
            model=trainer.model,
            optimizer=_named(inside.optimizers(trainer)),
            scheduler=_named([config.scheduler for config in trainer.lr_scheduler_configs]),
            scaler=getattr(trainer.precision_plugin, "scaler", None),
            loader=loader,
            extra={**self._extra, "lightning": loops, "logged": loops.logged},
            preempt=self._preempt,
            **{"variables": False, **self._options},
        )

    def _follow(self, trainer: Any, state: RunState, run: Callable[[], None], loops: Loops) -> None:
        if "SIGTERM" in self._preempt.signals:
            inside.leave_signals(trainer)
        state._session.saving.goal_metric.is_late = True
        loops.begin(state)
        self._loops = loops
        try:
            with (
                inside.wrapped(trainer, "on_advance_start", loops.epoch_begins),
                inside.wrapped(trainer, "on_advance_end", loops.epoch_ended),
            ):
                run()
        finally:
            # A `validate` after the training is none of it.
            self._loops = None
        loops.end()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Remember the metrics that there are before a validation."""
        if self._loops:
            self._loops.validation_begins()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note the metrics of a validation, for the next save."""
        if self._loops:
            self._loops.validation_ended()


def _named(parts: Sequence[Any]) -> Any:
    """Return one part as it is, several by their numbers, and none as None."""
    return {str(n): part for n, part in enumerate(parts)} if len(parts) > 1 else next(iter(parts), None)


_OF_TRAINER = {"model", "optimizer", "scheduler", "scaler", "loader"}


def _check_options(given: Mapping[str, Any]) -> None:
    known = inspect.signature(RunState.load).parameters.keys()
    if taken := sorted(given.keys() & _OF_TRAINER):
        raise UsageError(
            f"Resumable takes no {', '.join(taken)}: it gives RunState those of the Trainer.",
            fix="leave them out; what else the training changes goes into extra={...}.",
        )
    if unknown := sorted(given.keys() - known):
        raise UsageError(
            f"Resumable has no option {', '.join(unknown)}.",
            fix="give it options of RunState.load, such as every=, keep= or maximize=.",
        )


def _refuse(trainer: Any) -> None:
    """Raise Unsupported for what cannot be resumed exactly."""
    if sum(isinstance(one, Resumable) for one in trainer.callbacks) > 1:
        raise UsageError(
            "the Trainer has two callbacks of the kind Resumable.",
            fix="give it one; a copy in a second place is what remote= makes.",
        )
    if lacking := inside.missing(trainer):
        raise Unsupported(
            f"this release of Lightning lacks what Resumable works with: {', '.join(lacking)}.",
            fix="use a release that docs/tested.md names.",
        )
    for is_so, problem, fix in _refused(trainer):
        if is_so:
            raise Unsupported(problem, fix=fix)


def _refuse_late(trainer: Any) -> None:
    """Raise an error for what is known only after the set-up."""
    if trainer.ckpt_path is not None:
        raise UsageError(
            f"fit() loads ckpt_path={str(trainer.ckpt_path)!r}, and Resumable loads its own run.",
            fix="leave ckpt_path out; to begin with the weights of a checkpoint, load them into the model.",
        )
    if inside.takes_iterator(trainer):
        raise Unsupported(
            "training_step() takes dataloader_iter, so it is unknown which batch is trained.",
            fix="let it take a batch: training_step(self, batch, batch_idx).",
        )


def _refuse_used(trainer: Any, state: RunState) -> None:
    """Raise UsageError if the Trainer has trained batches that the run does not have."""
    if not state.resumed and trainer.fit_loop.total_batch_idx >= 0:
        raise UsageError(
            f"the Trainer has trained {trainer.fit_loop.total_batch_idx + 1} batches already, and "
            f"{state.run} has none of them.",
            fix="make the model and the Trainer again, as the script does at its start.",
        )


_STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}
_TUNERS = {"LearningRateFinder", "BatchSizeFinder"}
_REBUILDING = {"BaseFinetuning", "StochasticWeightAveraging", "ModelPruning"}


def _refused(trainer: Any) -> list[tuple[bool, str, str]]:
    strategy = type(trainer.strategy).__name__
    launcher = type(trainer.strategy.launcher).__name__
    kinds = {kind.__name__ for one in trainer.callbacks for kind in type(one).__mro__}
    return [
        (
            strategy not in _STRATEGIES,
            f"Resumable does not know how {strategy} splits or moves the model.",
            'use strategy="auto" on one device, or strategy="ddp".',
        ),
        (
            launcher == "_MultiProcessingLauncher",
            "the processes are forked or spawned, and Lightning ends them without a save.",
            'use strategy="ddp", which starts the script once for each process.',
        ),
        (
            bool(trainer.reload_dataloaders_every_n_epochs),
            "reload_dataloaders_every_n_epochs makes a new loader in mid-training, whose place is unknown.",
            "make one loader, and change its dataset in on_train_epoch_start.",
        ),
        (
            inside.validates_by_time(trainer),
            "val_check_interval is a time, so that the clock decides where a validation is.",
            "give it a number of batches, or a fraction of an epoch.",
        ),
        (
            bool(kinds & _TUNERS),
            "a LearningRateFinder or BatchSizeFinder trains before the training begins, at every start.",
            "find the value in a script of its own, and write it down.",
        ),
        (
            bool(kinds & _REBUILDING),
            f"{', '.join(sorted(kinds & _REBUILDING))} changes the parameters or the schedules in "
            "mid-training, and a resumed script begins with those of the start.",
            "change them by hand between two runs, or freeze by requires_grad; for an average of the weights "
            "use WeightAveraging.",
        ),
    ]


def _refuse_loaders(loader: Any) -> None:
    """Raise Unsupported unless the training has one loader."""
    if isinstance(loader, (list, tuple, dict)) or type(loader).__name__ == "CombinedLoader":
        raise Unsupported(
            f"the training loops over a {type(loader).__name__} of loaders: Lightning draws from all of them "
            "for one batch, and Resumable keeps the place in one.",
            fix="put the datasets into one loader (torch.utils.data.StackDataset, ConcatDataset).",
        )
