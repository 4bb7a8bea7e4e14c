"""Refuses by name what `resume` cannot do with a Trainer of transformers."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from transformers import trainer as its_module

from .. import options as arguments
from ..errors import Unsupported, UsageError
from ..state import RunState

_OURS = ("model", "optimizer", "scheduler", "scaler", "loader")
EPOCH_ARGUMENTS = ("epoch", "epochs_trained", "resume_from_checkpoint", "steps_trained_in_current_epoch")
"""The arguments of `Trainer._run_epoch` that are read, or given with other values."""


def refuse_options(run_dir: str | os.PathLike[str], options: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that `RunState.load` does not take, or that the Trainer gives."""
    if own := [name for name in _OURS if name in options]:
        raise UsageError(
            f"resume() was given {', '.join(own)}=, which it takes from the Trainer.",
            fix="leave it out; what else is to be saved goes into extra={...}.",
        )
    known = inspect.signature(RunState.load).parameters
    if unknown := [name for name in options if name not in known]:
        raise UsageError(
            f"resume() has no {', '.join(unknown)}=.",
            fix=f"give options of RunState.load: {', '.join(name for name in known if name not in _OURS)}.",
        )
    defaults = {name: one.default for name, one in known.items()}
    arguments.check({**defaults, **options, "run_dir": run_dir})


def refuse_missing(trainer: Any, methods: Sequence[str], skips: str) -> None:
    """Raise Unsupported if this release, or this class, lacks what `resume` continues its loop by."""
    missing = [name for name in (*methods, "_load_rng_state") if not hasattr(trainer, name)]
    if not hasattr(its_module, skips):
        missing.append(f"trainer.{skips}")
    if not missing:
        taken = inspect.signature(trainer._run_epoch).parameters
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values())
        missing = [f"_run_epoch({name}=)" for name in EPOCH_ARGUMENTS if not (takes_all or name in taken)]
    if missing:
        raise Unsupported(
            f"the Trainer of transformers {transformers.__version__} has no {', '.join(missing)}, by which "
            "resume() continues its loop.",
            fix="install a release that docs/tested.md lists, or open an issue that names yours.",
        )


def refuse_unsupported(trainer: Any) -> None:
    """Raise Unsupported for a way of training that `resume` does not continue."""
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
