"""Saves and restores what Lightning's callbacks, modules and data modules save by their own hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from copy import copy
from typing import Any

from . import lightning_trainer as inside

_ABSENT = object()


class Hooks:
    """The `state_dict` and `on_save_checkpoint` hooks of everything that a Trainer holds."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def collect(self) -> dict[str, Any]:
        """Return what the hooks return, and what they add to a checkpoint of Lightning."""
        trainer, data = self._trainer, self._trainer.datamodule
        given = self._checkpoint()
        seen = _copied(given)
        for one in trainer.callbacks:
            one.on_save_checkpoint(trainer, trainer.lightning_module, seen)
        trainer.lightning_module.on_save_checkpoint(seen)
        return {
            "callbacks": given["callbacks"],
            "datamodule": given.get(type(data).__qualname__, {}) if data is not None else {},
            "added": _added(seen, given),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Give the hooks what they have saved, in Lightning's own order."""
        trainer, data = self._trainer, self._trainer.datamodule
        checkpoint = _merged(self._checkpoint(), saved["added"])
        trainer.lightning_module.on_load_checkpoint(checkpoint)
        if data is not None and saved["datamodule"]:
            data.load_state_dict(saved["datamodule"])
        for one in trainer.callbacks:
            one.on_load_checkpoint(trainer, trainer.lightning_module, checkpoint)
        self.restore_callbacks(saved)

    def restore_callbacks(self, saved: Mapping[str, Any]) -> None:
        """Give the callbacks their states."""
        for one in self._trainer.callbacks:
            if one.state_key in saved["callbacks"]:
                one.load_state_dict(saved["callbacks"][one.state_key])

    def _checkpoint(self) -> dict[str, Any]:
        """Return the checkpoint that Lightning gives to the hooks."""
        trainer, data = self._trainer, self._trainer.datamodule
        states = {one.state_key: one.state_dict() for one in trainer.callbacks}
        checkpoint = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": inside.version(trainer),
            "state_dict": trainer.strategy.lightning_module_state_dict(),
            "loops": inside.loops(trainer),
            "callbacks": {key: state for key, state in states.items() if state},
            "optimizer_states": [trainer.strategy.optimizer_state(one) for one in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }
        if state := trainer.precision_plugin.state_dict():
            checkpoint[type(trainer.precision_plugin).__qualname__] = state
        trainer.precision_plugin.on_save_checkpoint(checkpoint)
        for one in filter(None, (trainer.lightning_module, data)):
            checkpoint |= inside.hyper_parameters(one)
        if data is not None and (state := data.state_dict()):
            checkpoint[type(data).__qualname__] = state
        return checkpoint


def _copied(tree: Any) -> Any:
    """Return the dicts and lists of a tree copied, and its other values as they are."""
    if isinstance(tree, dict):
        # Weights are in a dict with an attribute, the versions of the modules.
        # In one call where it can be: another thread may change the tree meanwhile.
        copied = tree.copy() if type(tree) in (dict, OrderedDict) else copy(tree)
        if type(tree) is OrderedDict:
            vars(copied).update(vars(tree))
        copied.update({key: _copied(value) for key, value in [*copied.items()]})
        return copied
    return [_copied(value) for value in [*tree]] if type(tree) is list else tree


def _added(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the values that are new or replaced in a tree of dicts."""
    added = {}
    for key, value in now.items():
        then = before.get(key, _ABSENT)
        if isinstance(value, dict) and isinstance(then, dict):
            if inner := _added(value, then):
                added[key] = inner
        elif not _is_same(value, then):
            added[key] = value
    return added


def _is_same(now: Any, then: Any) -> bool:
    if isinstance(now, dict) and isinstance(then, dict):
        return now.keys() == then.keys() and all(_is_same(now[key], then[key]) for key in now)
    if type(now) is list and type(then) is list:
        return len(now) == len(then) and all(map(_is_same, now, then))
    return now is then


def _merged(tree: Mapping[Any, Any], added: Mapping[Any, Any]) -> dict[Any, Any]:
    merged = dict(tree)
    for key, value in added.items():
        there: Any = merged.get(key)
        is_inner = isinstance(value, Mapping) and isinstance(there, Mapping)
        merged[key] = _merged(there, value) if is_inner else value
    return merged
