"""Saves and restores what Lightning's callbacks, modules and data modules save by their own hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..position.script import unsaved_weights

_PACKAGES = ("lightning", "pytorch_lightning")


class Hooks:
    """The `state_dict` and `on_save_checkpoint` hooks of everything that a Trainer holds."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        module = trainer.lightning_module
        if type(module).on_save_checkpoint.__module__.partition(".")[0] not in _PACKAGES:
            unsaved_weights.saves_itself(module)

    def collect(self) -> dict[str, Any]:
        """Return what the hooks return, and what they add to a checkpoint of Lightning."""
        trainer, data = self._trainer, self._trainer.datamodule
        states = {one.state_key: one.state_dict() for one in trainer.callbacks}
        given = self._checkpoint()
        seen = {**given}
        for one in trainer.callbacks:
            one.on_save_checkpoint(trainer, trainer.lightning_module, seen)
        trainer.lightning_module.on_save_checkpoint(seen)
        return {
            "callbacks": {key: state for key, state in states.items() if state},
            "datamodule": data.state_dict() if data is not None else {},
            "added": {key: v for key, v in seen.items() if key not in given or v is not given[key]},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Give the hooks what they have saved, in Lightning's own order."""
        trainer, data = self._trainer, self._trainer.datamodule
        checkpoint = {**self._checkpoint(), **saved["added"]}
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
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "state_dict": trainer.lightning_module.state_dict(),
            "callbacks": {},
            "loops": {},
            "optimizer_states": [],
            "lr_schedulers": [],
        }
