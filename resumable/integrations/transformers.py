"""Resumes the `Trainer` of transformers: `resume(trainer, run_dir)` before `trainer.train()`."""

from __future__ import annotations

import contextlib
import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import transformers
from accelerate.data_loader import DataLoaderDispatcher
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from ..errors import StateMismatch, Unsupported, UsageError
from ..groups import Ranks
from ..state import RunState
from ..tracebacks import short
from . import trainer_refusals as refusals
from .trainer_progress import Counters, Progress


@short
def resume(trainer: Any, run_dir: str | os.PathLike[str], **options: Any) -> None:
    """Let `trainer.train()` continue from the newest intact checkpoint in `run_dir`, and save there.

    The model, the optimizer, the scheduler, the scaler, the loader and the progress of the Trainer are given
    by themselves.

    Args:
        trainer: A `Trainer` of transformers, or of a class that derives from it.
        run_dir: The run directory, or a remote address.
        **options: Those of `RunState.load`, such as `every="10 min"`. `progress` is False by default, since
            the Trainer has a bar.
    """
    refusals.refuse_options(run_dir, options)
    refusals.refuse_missing(trainer, _WRAPPED, _SKIPS)
    if isinstance(getattr(trainer.train, "__self__", None), _Resumed):
        raise UsageError(
            "resume() was called for this Trainer before.",
            fix="call it once; make another Trainer for another run.",
        )
    refusals.refuse_unsupported(trainer)
    _Resumed(trainer, run_dir, {"progress": False, **_with_goal(trainer.args, options)})


_WRAPPED = (
    "train",
    "set_initial_training_values",
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "_maybe_log_save_evaluate",
    "_finalize_training",
    "_load_best_model",
)
"""The methods of a Trainer that are replaced on the one instance."""
_SKIPS = "skip_first_batches"
"""The function of `transformers.trainer` by which Trainer begins in the middle of an epoch."""
_SYNCS = "SyncRefModelCallback"
"""The callback of TRL that trains a second model, `ref_model`, toward the first."""


class _Resumed:
    """The methods that replace those of one Trainer, around them."""

    def __init__(self, trainer: Any, run_dir: str | os.PathLike[str], options: dict[str, Any]) -> None:
        # The Trainer holds this object: held in turn, it would keep the model until a garbage collection.
        self._trainer = weakref.proxy(trainer)
        self._run_dir, self._options = run_dir, options
        self._plain = {name: _weak(getattr(trainer, name)) for name in _WRAPPED}
        self._evaluated: dict[str, float] | None = None
        """The metrics of the evaluations in the call that logs, saves and evaluates; None outside of it."""
        self._forget()
        for name in _WRAPPED:
            setattr(trainer, name, getattr(self, name))
        # First, so that the other callbacks see what was restored.
        trainer.callback_handler.callbacks.insert(0, _Events(self))

    def _forget(self) -> None:
        self._loader: Any = None
        self._prepared: Any = None
        self.progress: Any = None
        self.batches: Any = None
        self.state: Any = None
        self._epochs: Any = None

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **given: Any) -> Any:
        """Train, and close the run at the end."""
        if resume_from_checkpoint:
            raise UsageError(
                f"train() was given resume_from_checkpoint, but {os.fspath(self._run_dir)} is restored: "
                "the one would undo what the other has restored.",
                fix="call trainer.train() without it. To begin with the weights of a checkpoint of Trainer's "
                "own, load the model from there.",
            )
        refusals.refuse_unsupported(self._trainer)
        arguments = self._trainer.args
        with contextlib.ExitStack() as self._closing:
            self._closing.callback(self._forget)
            self._closing.callback(setattr, arguments, "eval_on_start", arguments.eval_on_start)
            return self._plain["train"](None, trial, *args, **given)

    def set_initial_training_values(self, args: Any, loader: Any) -> Any:
        """Note the loader."""
        if args.world_size > 1 and type(loader) is DataLoaderDispatcher:
            raise Unsupported(
                "rank 0 loads the batches of all processes (dispatch_batches), so the others do not know "
                "where they stand in the data.",
                fix="let each load its own: "
                "TrainingArguments(..., accelerator_config={'dispatch_batches': False}).",
            )
        self._loader = loader
        return self._plain["set_initial_training_values"](args, loader)

    def _init_training_state(self, max_steps: int, steps: int, epochs: int, _: Any, trial: Any) -> Any:
        """Prepare the parts, restore them, and return where to begin."""
        if trial is not None:
            raise Unsupported(
                "hyperparameter_search() trains many times, and all trials would continue one run.",
                fix="search without resume(), or make a Trainer and call resume() for each trial.",
            )
        self._plain["_init_training_state"](max_steps, steps, epochs, None, None)
        self._prepared = self._plain["_prepare_for_training"](max_steps, self._loader, None)
        self.progress, self._total = Progress(self._trainer), epochs
        self.batches = _Batches(self._prepared[1])
        self.state = self.batches.state = self._load()
        # Kept in a cycle, the loop's workers would take seconds to end.
        self._closing.callback(self._leave_loops)
        self._is_broken = self.is_between_steps = False
        self._skips = not self.progress.is_finished(max_steps)
        return (self.progress.epochs_done if self._skips else epochs), 0

    def _load(self) -> RunState:
        trainer, options = self._trainer, {"variables": False, **self._options}
        extra = {"trainer": self.progress, "trainer_counters": Counters(self.progress)}
        extra |= _reference(trainer) | (options.pop("extra", None) or {})
        if trainer.args.world_size > 1:
            ranks = options.get("ranks") or Ranks()
            # Trainer's arithmetic is that of this number of processes.
            options["ranks"] = replace(ranks, per_rank=[*ranks.per_rank, "trainer_counters"], elastic=False)
        parts = {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
        parts |= {"scaler": trainer.accelerator.scaler, "loader": self._loader}
        state = RunState.load(self._run_dir, model=self._prepared[0], **parts, extra=extra, **options)
        state._session.saving.goal_metric.is_late = True
        return self._closing.enter_context(state)

    def _prepare_for_training(self, *_: Any) -> Any:
        """Return the model, and the batches in place of the loader."""
        return self._prepared[0], self.batches

    def begin_epoch(self) -> None:
        """Begin the first epoch of this start; each later one begins as the one before it ends."""
        self.is_between_steps = False
        if self._epochs is None:
            self._epochs = self.state.epochs(self._total)
            next(self._epochs, None)

    def _run_epoch(self, *args: Any, **given: Any) -> None:
        """Run the rest of an epoch."""
        self._skips, is_resumed = False, self._skips
        with contextlib.ExitStack() as skipping:
            if is_resumed and (done := self.state.batch):
                self._refuse_other_window()
                given |= {"resume_from_checkpoint": self._run_dir, "steps_trained_in_current_epoch": done}
                given["epochs_trained"] = given["epoch"]
                # Trainer calls these two to skip what is done: nothing here is read twice.
                skipping.enter_context(_replaced(transformers.trainer, _SKIPS, lambda batches, _: batches))
                skipping.enter_context(_replaced(self._trainer, "_load_rng_state", lambda _: None))
                # With it, Trainer would count the windows from the epoch's beginning.
                skipping.enter_context(_replaced(self._trainer.args, "ignore_data_skip", False))
            self.progress.has_trained = not is_resumed
            self._plain["_run_epoch"](*args, **given)
        if not self._trainer.control.should_training_stop:
            next(self._epochs, None)

    def _refuse_other_window(self) -> None:
        saved, now = self.progress.saved_window, self._trainer.args.gradient_accumulation_steps
        if saved != now:
            raise StateMismatch(
                f"the checkpoint stands in mid-epoch, in windows of gradient_accumulation_steps={saved}; "
                f"now it is {now}, and the windows of the rest would begin at other batches.",
                fix=f"finish the epoch with gradient_accumulation_steps={saved}.",
            )

    def end_epoch(self) -> None:
        """End the loop over the batches, unless the training stops and some are left."""
        self._is_broken = self._trainer.control.should_training_stop and not self.batches.is_at_end()
        if not self._is_broken:
            self.batches.end()
            self.progress.epochs_done += 1

    def _leave_loops(self) -> None:
        self.batches.forget()
        if self._epochs is not None:
            self._epochs.close()

    def _maybe_log_save_evaluate(self, loss: Any, norm: Any, *args: Any, **given: Any) -> None:
        """Log, save and evaluate; save what was evaluated."""
        rate = given.pop("learning_rate", None)
        # An epoch that is resumed behind its last batch ends with the values of that.
        norm, rate = self.progress.last_step(norm, rate)
        self._evaluated = {}
        try:
            self._plain["_maybe_log_save_evaluate"](loss, norm, *args, learning_rate=rate, **given)
        finally:
            found, self._evaluated = self._evaluated, None
        if found and self._goal():
            self.state.save(**found)

    def _goal(self) -> Any:
        return self._options.get("maximize") or self._options.get("minimize")

    def evaluated(self, metrics: dict[str, Any]) -> None:
        """Note metrics of an evaluation that the training's loop has made."""
        if self._evaluated is not None:
            self._evaluated |= {name: value for name, value in metrics.items() if _is_metric(name, value)}

    def _finalize_training(self, *args: Any, **given: Any) -> Any:
        """Save the end of the training, and let Trainer finish."""
        if self._epochs is not None:
            self._save_end()
        else:
            # No step is left: the loop ends at once, with the generators as the training left them.
            next(self.state.steps(self.state.step), None)
        state = self._trainer.state
        is_ours = self.state.best is not None and state.best_model_checkpoint is None
        if self._trainer.args.load_best_model_at_end and is_ours:
            # Trainer loads only if it is set; left there, it would delete each checkpoint that it is not.
            state.best_model_checkpoint = str(self.state.run)
        return self._plain["_finalize_training"](*args, **given)

    def _save_end(self) -> None:
        if not self._is_broken:
            self.state.save()
            next(self._epochs, None)
        elif self.is_between_steps:
            self.state.save()
        # Inside of a window, batches in hand are not trained: the checkpoint before stays the newest.
        self._leave_loops()

    def _load_best_model(self) -> None:
        """Load the model of the best checkpoint."""
        if self.state is None or self.state.best is None:
            self._plain["_load_best_model"]()
            return
        self.state.restore("best", only="model")
        state = self._trainer.state
        if state.best_model_checkpoint == str(self.state.run):
            state.best_model_checkpoint = None


class _Events(TrainerCallback):
    """The events of a Trainer that begin and end what is restored and saved."""

    def __init__(self, resumed: _Resumed) -> None:
        self._resumed = resumed

    def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
        # Trainer has just set its counters to zero.
        self._resumed.progress.begin()
        self._evaluates = args.eval_on_start
        args.eval_on_start = self._evaluates and not self._resumed.progress.is_restored

    def on_epoch_begin(self, args: Any, *_: Any, **__: Any) -> None:
        args.eval_on_start = self._evaluates
        self._resumed.begin_epoch()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._resumed.is_between_steps = False

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._resumed.is_between_steps = True
        self._resumed.progress.has_trained = True

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._resumed.end_epoch()

    def on_evaluate(self, *_: Any, **given: Any) -> None:
        self._resumed.evaluated(given["metrics"])


class _Batches:
    """What Trainer loops over in place of its loader: the rest of each epoch's batches."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.state: Any = None
        self._loop: Any = None

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            # A copy asks for it before it has any attribute.
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        loop: Iterator[Any] = iter(self.state.batches())
        self._loop = loop
        return loop

    def forget(self) -> None:
        """Let go of the loop."""
        self._loop = None

    def is_at_end(self) -> bool:
        """Whether the batch in hand is known to be the epoch's last."""
        return bool(has_length(self._loader) and self.state.batch + 1 >= len(self._loader))

    def end(self) -> None:
        """End the loop of an epoch: Trainer does not ask for more than the batches that it counts."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        if self.is_at_end():
            next(loop, None)
        loop.close()


def _weak(method: Any) -> Callable[..., Any]:
    """Return a call of the method that does not keep its object."""
    if not inspect.ismethod(method):
        found: Callable[..., Any] = method
        return found
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **given: Any) -> Any:
        bound = reference()
        assert bound
        return bound(*args, **given)

    return call


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _is_metric(name: str, value: Any) -> bool:
    is_time = name == "epoch" or name.endswith(("_runtime", "_per_second", "_time"))
    return isinstance(value, (int, float)) and not is_time


def _reference(trainer: Any) -> dict[str, Any]:
    """Return the reference model, if a callback of TRL changes it."""
    for one in trainer.callback_handler.callbacks:
        if _SYNCS in (kind.__name__ for kind in type(one).__mro__) and one.ref_model is not None:
            return {"trainer_ref_model": one.ref_model}
    return {}


def _with_goal(args: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, with the metric that decides which model Trainer takes for the best."""
    metric = args.metric_for_best_model
    if metric is None or options.get("maximize") or options.get("minimize"):
        return options
    goal = "maximize" if args.greater_is_better else "minimize"
    return {**options, goal: metric if metric.startswith("eval_") else f"eval_{metric}"}
