"""Resumes the `Trainer` of transformers: `resume(trainer, run_dir)` before `trainer.train()`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import transformers
from accelerate.data_loader import DataLoaderDispatcher
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from ..errors import Unsupported, UsageError
from ..loaders.prepared import is_prepared
from ..state import RunState
from .trainer_progress import Counters, Progress


def resume(trainer: Any, run_dir: str | os.PathLike[str], **options: Any) -> None:
    """Let `trainer.train()` continue from the newest intact checkpoint in `run_dir`, and save there.

    `options` are those of `RunState.load`, such as `every="10 min"`. The model, the optimizer, the scheduler,
    the scaler, the loader and the progress of the Trainer are given by themselves.
    """
    _refuse_own_parts(options)
    _refuse_missing(trainer)
    _refuse_unsupported(trainer)
    _Resumed(trainer, run_dir, _with_goal(trainer.args, options))


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
_OURS = ("model", "optimizer", "scheduler", "scaler", "loader")


class _Resumed:
    """The methods that replace those of one Trainer, around them."""

    def __init__(self, trainer: Any, run_dir: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self._trainer, self._run_dir, self._options = trainer, run_dir, options
        self._plain: dict[str, Callable[..., Any]] = {name: getattr(trainer, name) for name in _WRAPPED}
        for name in _WRAPPED:
            setattr(trainer, name, getattr(self, name))
        # First, so that the other callbacks see what was restored.
        trainer.callback_handler.callbacks.insert(0, _Events(self))

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **given: Any) -> Any:
        """Train, and let go of the run in the end."""
        if resume_from_checkpoint:
            raise UsageError(
                f"train() was given resume_from_checkpoint, but {os.fspath(self._run_dir)} is restored: "
                "the one would undo what the other has restored.",
                fix="call trainer.train() without it. To begin with the weights of a checkpoint of Trainer's "
                "own, load the model from there.",
            )
        _refuse_unsupported(self._trainer)
        with contextlib.ExitStack() as self._closing:
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
        self.batches = Batches(self._prepared[1])
        self.state = self.batches.state = self._load()
        self._epochs: Iterator[int] | None = None
        self._evaluated: dict[str, float] = {}
        # Kept in a cycle with the Trainer, the loop's workers would take seconds to end.
        self._closing.callback(self.batches.forget)
        self._trainer.callback_handler.train_dataloader = self.batches
        self._skips = not self.progress.is_finished(max_steps)
        return (self.progress.epochs_done if self._skips else epochs), 0

    def _load(self) -> RunState:
        trainer, options = self._trainer, dict(self._options)
        extra = {"trainer": self.progress, "trainer_counters": Counters(self.progress)}
        extra |= options.pop("extra", None) or {}
        if trainer.args.world_size > 1:
            options["per_rank"] = [*options.get("per_rank", ()), "trainer_counters"]
            # Trainer's arithmetic is that of this number of processes.
            options.setdefault("elastic", False)
        parts = {"optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
        parts |= {"scaler": trainer.accelerator.scaler, "loader": self._loader}
        state = RunState.load(self._run_dir, model=self._prepared[0], **parts, extra=extra, **options)
        return self._closing.enter_context(state)

    def _prepare_for_training(self, *_: Any) -> Any:
        """Return the model, and the batches in place of the loader."""
        return self._prepared[0], self.batches

    def begin_epoch(self) -> None:
        """Begin the body of an epoch, if it is the first; the others begin where the one before ends."""
        if self._epochs is None:
            self._epochs = self.state.epochs(self._total)
            next(self._epochs, None)

    def _run_epoch(self, *args: Any, **given: Any) -> None:
        """Run the rest of an epoch."""
        self._skips, is_resumed = False, self._skips
        with contextlib.ExitStack() as skipping:
            if is_resumed and (done := self.state.batch):
                given |= {"resume_from_checkpoint": self._run_dir, "steps_trained_in_current_epoch": done}
                given["epochs_trained"] = given["epoch"]
                # Trainer calls these two to skip what is done: nothing here is read twice.
                skipping.enter_context(_replaced(transformers.trainer, _SKIPS, lambda batches, _: batches))
                skipping.enter_context(_replaced(self._trainer, "_load_rng_state", lambda _: None))
            self.progress.has_trained = not is_resumed
            self._plain["_run_epoch"](*args, **given)
        if not self._trainer.control.should_training_stop:
            self._end_epoch()

    def _end_epoch(self) -> None:
        assert self._epochs
        next(self._epochs, None)

    def _maybe_log_save_evaluate(self, loss: Any, norm: Any, *args: Any, **given: Any) -> None:
        """Log, save and evaluate; save what was evaluated."""
        rate = given.pop("learning_rate", None)
        # An epoch that is resumed behind its last batch ends with the values of that.
        norm, rate = self.progress.last_step(norm, rate)
        self._evaluated = {}
        self._plain["_maybe_log_save_evaluate"](loss, norm, *args, learning_rate=rate, **given)
        if self._evaluated and self._goal():
            self.state.save(**self._evaluated)

    def _goal(self) -> Any:
        return self._options.get("maximize") or self._options.get("minimize")

    def evaluated(self, metrics: dict[str, Any]) -> None:
        """Note metrics of an evaluation."""
        self._evaluated |= {name: value for name, value in metrics.items() if _is_metric(name, value)}

    def _finalize_training(self, *args: Any, **given: Any) -> Any:
        """Save the end of the training, and let Trainer finish."""
        if self._epochs is not None:
            self.state.save()
            self._end_epoch()
        trainer = self._trainer
        if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is None:
            trainer.state.best_model_checkpoint = None if self.state.best is None else str(self.state.run)
        return self._plain["_finalize_training"](*args, **given)

    def _load_best_model(self) -> None:
        """Load the model of the best checkpoint."""
        if self.state.best is None:
            self._plain["_load_best_model"]()
        else:
            self.state.restore("best", only="model")


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

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._resumed.progress.has_trained = True

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._resumed.batches.end()
        self._resumed.progress.epochs_done += 1

    def on_evaluate(self, *_: Any, **given: Any) -> None:
        self._resumed.evaluated(given["metrics"])


class Batches:
    """What Trainer loops over in place of its loader: the rest of each epoch's batches."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.state: Any = None
        self._loop: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Trainer asks for a whole window at once: that is no prefetcher for the loop to look for.
        through = None if is_prepared(self._loader) else _as_they_are
        loop: Iterator[Any] = iter(self.state.batches(through=through))
        self._loop = loop
        return loop

    def forget(self) -> None:
        """Let go of the loop."""
        self._loop = None

    def end(self) -> None:
        """End the loop of an epoch: Trainer does not ask for more than the batches that it counts."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        if has_length(self._loader) and self.state.batch + 1 >= len(self._loader):
            next(loop, None)
        loop.close()


def _as_they_are(batches: Iterator[Any]) -> Iterator[Any]:
    return batches


@contextlib.contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _is_metric(name: str, value: Any) -> bool:
    is_time = name == "epoch" or name.endswith(("_runtime", "_per_second", "_time"))
    return isinstance(value, (int, float)) and not is_time


def _with_goal(args: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, with the metric that decides which model Trainer takes for the best."""
    metric = args.metric_for_best_model
    if metric is None or options.get("maximize") or options.get("minimize"):
        return options
    goal = "maximize" if args.greater_is_better else "minimize"
    return {**options, goal: metric if metric.startswith("eval_") else f"eval_{metric}"}


def _refuse_own_parts(options: dict[str, Any]) -> None:
    if own := [name for name in _OURS if name in options]:
        raise UsageError(
            f"resume() was given {', '.join(own)}=, which it takes from the Trainer.",
            fix="leave it out; what else is to be saved goes into extra={...}.",
        )


def _refuse_missing(trainer: Any) -> None:
    if missing := [name for name in (*_WRAPPED, "_load_rng_state") if not hasattr(trainer, name)]:
        raise Unsupported(
            f"the Trainer of transformers {transformers.__version__} has no {', '.join(missing)}, by which "
            "resume() continues its loop.",
            fix="install a release that docs/tested.md lists, or open an issue that names yours.",
        )
    if hasattr(trainer.train, "__self__") and isinstance(trainer.train.__self__, _Resumed):
        raise UsageError(
            "resume() was called for this Trainer before.",
            fix="call it once; make another Trainer for another run.",
        )


def _refuse_unsupported(trainer: Any) -> None:
    args = trainer.args
    found = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled,
        "DataParallel (several GPUs in one process)": args.n_gpu > 1,
        "tensor, context or sequence parallelism": trainer.accelerator.parallelism_config is not None
        or trainer.is_distributed_loading_by_transformers,
        "auto_find_batch_size=True": args.auto_find_batch_size,
    }
    if there := [name for name, is_there in found.items() if is_there]:
        raise Unsupported(
            f"resume() does not continue a Trainer with {', '.join(there)}: bit for bit it has been tried in "
            "one process, and with DDP.",
            fix="train in one process or under torchrun with DDP, or use Trainer's own checkpoints.",
        )
