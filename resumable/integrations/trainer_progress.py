"""What a Trainer of transformers keeps for itself: counters, sums of losses, its log, its callbacks."""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from transformers import EarlyStoppingCallback
from transformers.trainer_callback import ExportableState

from ..files.container_copies import copied

_STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""What a TrainerState counts; its other fields follow from the arguments."""
_LARGE = 10_000
"""How many values make an attribute data: it has changed if it is another object, or of another length."""


class Progress:
    """How far a Trainer has come: the same in all processes."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved: Mapping[str, Any] | None = None
        self._counters: Mapping[str, Any] = {}
        self._at_begin: dict[str, _Begun] | None = None
        """The trainer's plain attributes as the training began, before anything was restored."""
        self.epochs_done = 0
        self.has_trained = False
        """Whether this epoch has made a step in this process."""
        self._last: tuple[Any, Any] = None, None
        """The norm of the gradients and the learning rate of the last step."""

    @property
    def is_restored(self) -> bool:
        """Whether the training continues from a checkpoint."""
        return self._saved is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the progress."""
        if self._saved and self._at_begin is None:
            return dict(self._saved)
        state = self._trainer.state
        return {
            "epochs_done": self.epochs_done,
            "max_steps": state.max_steps,
            "window": self._trainer.args.gradient_accumulation_steps,
            "last_step": [_number(value) for value in self._last],
            "state": {name: _stored(getattr(state, name)) for name in _STATE},
            "callbacks": [[type(one).__name__, one.state()] for one in self._stateful()],
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take the progress; `begin` restores it."""
        self._saved = saved
        self.epochs_done = saved["epochs_done"]
        self._last = tuple(saved["last_step"])

    @property
    def saved_window(self) -> int | None:
        """The number of batches of a step, as the checkpoint was made."""
        return None if self._saved is None else self._saved["window"]

    def is_finished(self, max_steps: int) -> bool:
        """Whether no step is left, or an EarlyStoppingCallback has stopped the training before the last."""
        if self._saved is None:
            return False
        done: int = self._saved["state"]["global_step"]
        return done >= max_steps or (self._is_stopped_early() and done < self._saved["max_steps"])

    def _is_stopped_early(self) -> bool:
        """Whether an EarlyStoppingCallback has no patience left; what else stops a training may pass."""
        assert self._saved
        saved = dict(map(tuple, self._saved["callbacks"]))
        if not saved[type(self._trainer.control).__name__]["args"]["should_training_stop"]:
            return False
        early = [one for one in self._stateful() if isinstance(one, EarlyStoppingCallback)]
        states = [(one, saved[type(one).__name__]) for one in early if type(one).__name__ in saved]
        counter = "early_stopping_patience_counter"
        return any(state["attributes"][counter] >= one.early_stopping_patience for one, state in states)

    def begin(self) -> None:
        """Restore the progress, as the training begins."""
        own = vars(self._trainer).items()
        self._at_begin = {name: _Begun(value) for name, value in own if _is_large(value) or _is_plain(value)}
        if self._saved is None:
            return
        state = self._trainer.state
        vars(state).update(copy.deepcopy(dict(self._saved["state"])))
        if state.best_model_checkpoint and not os.path.isdir(state.best_model_checkpoint):
            state.best_model_checkpoint = None
        _restore_callbacks(self._stateful(), self._saved["callbacks"])
        if not self.is_finished(self._trainer.state.max_steps):
            self._trainer.control.should_training_stop = False
        for name, value in self._counters.items():
            setattr(self._trainer, name, _merged(getattr(self._trainer, name, None), value))

    def last_step(self, norm: Any, rate: Any) -> tuple[Any, Any]:
        """Return the norm and the learning rate of the last step, which may be one before a resume."""
        self._last = (norm, rate) if self.has_trained else self._last
        return self._last

    def counters(self) -> dict[str, Any]:
        """Return the trainer's plain attributes that have changed since the training began."""
        if (begun := self._at_begin) is None:
            return dict(self._counters)
        return {
            name: _stored(value)
            for name, value in vars(self._trainer).items()
            if not (name in begun and begun[name].is_same(value)) and _is_plain(value)
            # It is set before each window, to 0 where an epoch is resumed behind its last batch.
            if name != "current_gradient_accumulation_steps"
        }

    def load_counters(self, saved: Mapping[str, Any]) -> None:
        """Take the attributes; `begin` restores them."""
        self._counters = saved

    def _stateful(self) -> list[Any]:
        given = [*self._trainer.callback_handler.callbacks, self._trainer.control]
        return [one for one in given if isinstance(one, ExportableState)]


class Counters:
    """What a Trainer and what derives from it have counted: different in each process."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return self._progress.counters()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take the counters."""
        self._progress.load_counters(saved)


def _restore_callbacks(live: list[Any], saved: list[Any]) -> None:
    """Restore each callback from the state of the next one of its class, in place."""
    waiting = defaultdict(list)
    for name, state in saved:
        waiting[name].append(state)
    for one in live:
        if states := waiting[type(one).__name__]:
            state = states.pop(0)
            # TrainerControl has its flags among the arguments.
            given = state["attributes"] or state["args"]
            vars(one).update(copy.deepcopy(dict(given)))


class _Begun:
    """An attribute as the training began."""

    def __init__(self, value: Any) -> None:
        self._is_large = _is_large(value)
        # To copy and compare a data set would stop the training at each save.
        self._value = value if self._is_large else copy.deepcopy(copied({"value": value})["value"])
        self._length = len(value) if self._is_large else 0

    def is_same(self, value: Any) -> bool:
        """Whether the attribute has not changed."""
        if self._is_large:
            return value is self._value and len(value) == self._length
        return _is_same(self._value, value)


def _is_large(value: Any) -> bool:
    return _count(value, _LARGE) >= _LARGE


def _count(value: Any, limit: int) -> int:
    """Return how many values it is made of, or the limit if that is less."""
    if not isinstance(value, (dict, list, tuple)):
        return 1
    found = len(value)
    # Copied in one call, as everywhere here: another thread may change it meanwhile.
    for one in [*value.values()] if isinstance(value, dict) else [*value]:
        if found >= limit:
            return limit
        found += _count(one, limit - found) - 1
    return found


def _is_plain(value: Any) -> bool:
    """Whether a value is made of numbers, strings and tensors alone."""
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and _is_plain(one) for key, one in [*value.items()])
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, [*value]))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _stored(value: Any) -> Any:
    """Return a copy of plain dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: _stored(one) for key, one in [*value.items()]}
    if isinstance(value, (list, tuple)):
        return (tuple if isinstance(value, tuple) else list)(map(_stored, [*value]))
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _merged(live: Any, saved: Any) -> Any:
    """Return the saved value; a dict stays the object that it is, since its class may matter."""
    if isinstance(live, dict) and isinstance(saved, Mapping):
        merged = {key: _merged(live.get(key), one) for key, one in saved.items()}
        live.clear()
        live.update(merged)
        return live
    if isinstance(live, tuple) and hasattr(live, "_fields") and len(live) == len(saved):
        return type(live)(*map(_merged, live, saved))
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        return saved.to(live.device).clone()
    return copy.deepcopy(saved)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
