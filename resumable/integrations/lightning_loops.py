"""Moves a `RunState` along with the loops of Lightning's Trainer, and hands them its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import UsageError, warn
from ..state import RunState
from . import lightning_trainer as inside
from .lightning_hooks import Hooks

_ENDLESS = 1 << 62
_END = object()


class Loops:
    """The epochs and batches of a Trainer, and its counters and hooks as a part of the run."""

    def __init__(self, trainer: Any, length: int | None, goal: str | None) -> None:
        self.logged = Logged(trainer)
        self._trainer = trainer
        self._length = length
        """How many batches make an epoch, if that is known."""
        self._goal = goal
        """The metric that decides which checkpoint is the best."""
        self._hooks = Hooks(trainer)
        self._window = trainer.accumulate_grad_batches
        """`accumulate_grad_batches` of the script; a callback may change it from epoch to epoch."""
        self._state: RunState
        self._epochs: Any
        self._fetcher: Fetcher
        self._is_entered = self._has_batches = False
        self._restored: Mapping[str, Any] | None = None
        """The state of a resume, until its first epoch is entered."""
        self._resumed: Mapping[str, Any] | None = None
        """The counters of a resume in mid-epoch, until the first batch."""
        self._before: dict[str, Any] = {}
        self._validated: set[str] = set()
        """The names of the metrics that come from validations."""
        self._is_validated = False
        """Whether there was a validation since the last save with its metrics."""

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of the loops, and what the hooks of callbacks and modules save."""
        # Until the first batch the counters of a resume are not yet where Lightning will have them.
        return {
            "progress": self._resumed or {**inside.read_progress(self._trainer), "window": self._window},
            "hooks": self._hooks.collect(),
            "validated": sorted(self._validated),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        inside.write_progress(self._trainer, saved["progress"])
        if not self._is_entered:
            self._restored = saved
        if not self._has_batches and inside.is_mid_epoch(saved["progress"]):
            self._resumed = saved["progress"]
        self._hooks.restore(saved["hooks"])
        self._validated = set(saved["validated"])

    def begin(self, state: RunState) -> None:
        """Give the Trainer the batches of a run."""
        trainer, self._state = self._trainer, state
        limit = trainer.fit_loop.max_epochs
        self._epochs = state.epochs(_ENDLESS if limit is None or limit < 0 else limit)
        self._fetcher = Fetcher(state, self._length, self._before_batch)
        inside.fetch_from(trainer, self._fetcher)
        if self._resumed is not None:
            inside.enter_mid_epoch(trainer, is_entered=False)
        if self._restored is None:
            # Where Lightning opens the loader, before the first hooks of the training.
            self.enter_epoch()

    def enter_epoch(self) -> None:
        """Enter the epoch at which the training stands, unless it is entered.

        In a resumed training that is after `on_train_start`: what this draws was drawn before.
        """
        if self._is_entered:
            return
        self._is_entered = True
        if self._restored is not None:
            # What `on_train_start` has logged and changed, it had at the first start.
            self._hooks.restore_callbacks(self._restored["hooks"])
            self.logged.write_again()
            self._restored = None
        has_epoch = next(self._epochs, _END) is not _END
        # At the beginning of each later epoch Lightning opens the loader itself.
        if has_epoch and self._trainer.current_epoch == 0:
            iter(self._fetcher)

    def _before_batch(self) -> None:
        if self._resumed is not None:
            # Not earlier: Lightning resets its counters where it enters an epoch.
            inside.write_progress(self._trainer, self._resumed)
            self._restore_window(self._resumed)
            inside.enter_mid_epoch(self._trainer, is_entered=True)
            self._fetcher.fetched = inside.batches_done(self._trainer)
            self._resumed = None
        if not self._has_batches:
            self._has_batches = True
        elif self._is_validated and self._goal:
            self._save()

    def _restore_window(self, saved: Mapping[str, Any]) -> None:
        if self._window == saved["window"]:
            self._trainer.accumulate_grad_batches = saved["accumulate_grad_batches"]
            return
        warn(
            f"the checkpoint in mid-epoch is of accumulate_grad_batches={saved['window']}, and the script "
            f"now has {self._window}: this epoch has other windows than an uninterrupted training. [R28]"
        )

    def epoch_begins(self, start: Callable[[], None]) -> None:
        """Enter an epoch, whose first hooks `start` calls."""
        self.enter_epoch()
        start()

    def epoch_ended(self, finish: Callable[[], None]) -> None:
        """Save after an epoch, whose end `finish` runs."""
        if self._is_broken_off():
            # The next start continues in this epoch, which `finish` counts as done.
            self._save()
            finish()
            return
        finish()
        self._fetcher.close()
        self._check_goal()
        self._save()
        next(self._epochs, _END)

    def _is_broken_off(self) -> bool:
        """Whether a callback other than EarlyStopping has stopped the training in mid-epoch."""
        trainer = self._trainer
        return trainer.should_stop and not inside.has_stopped_early(trainer) and not self._fetcher.done

    def end(self) -> None:
        """Leave the loops after the training."""
        self.enter_epoch()
        self._fetcher.close()
        self._epochs.close()

    def _save(self) -> None:
        metrics = dict(self._trainer.callback_metrics)
        if not self._is_validated:
            # They are of other weights.
            metrics = {name: value for name, value in metrics.items() if name not in self._validated}
        self._is_validated = False
        self._state.save(**(metrics if self._goal is None or self._goal in metrics else {}))

    def _check_goal(self) -> None:
        """Raise UsageError if an epoch with all its hooks has not logged the metric of the best."""
        trainer, goal = self._trainer, self._goal
        is_due = self._validated or not trainer.enable_validation
        if goal and is_due and goal not in trainer.callback_metrics:
            there = ", ".join(sorted(trainer.callback_metrics)) or "none"
            raise UsageError(
                f"{goal!r} is to decide which checkpoint is the best, and the training logs {there}.",
                fix=f"log it by self.log({goal!r}, ...), or give maximize= or minimize= another name.",
            )

    def validation_begins(self) -> None:
        """Remember the metrics that there are before a validation."""
        self._before = dict(self._trainer.callback_metrics)

    def validation_ended(self) -> None:
        """Note which metrics the validation has set."""
        inside.drop_validation_iterator(self._trainer)
        before, self._before = self._before, {}
        now = self._trainer.callback_metrics
        self._validated |= {name for name, value in now.items() if before.get(name) is not value}
        self._is_validated = True


class Logged:
    """What `self.log` has accumulated in this process."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the accumulated values."""
        return inside.read_logged(self._trainer)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the accumulated values."""
        self._saved = saved
        inside.write_logged(self._trainer, saved)

    def write_again(self) -> None:
        """Restore the accumulated values again, for the last time."""
        if self._saved is not None:
            inside.write_logged(self._trainer, self._saved)
            self._saved = None


class Fetcher(inside.Profiled):
    """What the epoch loop asks for its batches, in place of Lightning's own data fetcher."""

    def __init__(self, state: RunState, length: int | None, before_batch: Callable[[], None]) -> None:
        super().__init__()
        self.fetched = 0
        self.length = length
        self._state = state
        self._before_batch = before_batch
        self._batches: Any = None
        self._ahead: _OneAhead | None = None

    @property
    def done(self) -> bool:
        """Whether the batch that was fetched last is the epoch's last."""
        if self._ahead is not None:
            return self._ahead.is_at_end
        return self.length is not None and self.fetched >= self.length

    def __iter__(self) -> Fetcher:
        self.fetched = 0
        if self._batches is None:
            through = self._look_ahead if self.length is None else None
            # A generator expression opens the loop at once, and draws what that draws here.
            self._batches = (batch for batch in self._state.batches(through=through))
        return self

    def __next__(self) -> tuple[Any, int, int]:
        self._before_batch()
        with self.profiled():
            batch = next(self._batches)
        self.fetched += 1
        return batch, self.fetched - 1, 0

    def _look_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._ahead = _OneAhead(batches)
        return self._ahead

    def close(self) -> None:
        """Leave the epoch's batches."""
        if self._batches is not None:
            self._batches.close()
        self._batches = self._ahead = None

    def teardown(self) -> None:
        """Let go of the loader."""
        self.close()


class _OneAhead:
    """The batches of a loader without a length: whether one is the last shows when the next is loaded."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._next = next(batches, _END)

    @property
    def is_at_end(self) -> bool:
        """Whether no batches are left."""
        return self._next is _END

    def __iter__(self) -> _OneAhead:
        return self

    def __next__(self) -> Any:
        if self._next is _END:
            raise StopIteration
        batch, self._next = self._next, next(self._batches, _END)
        return batch
