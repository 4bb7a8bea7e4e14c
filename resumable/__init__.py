"""Kill a PyTorch training anywhere, start the same command again, and it continues bit for bit."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .boundary import Boundary
from .errors import (
    CannotRead,
    CannotStore,
    CheckpointDamaged,
    CheckpointNotExpected,
    CheckpointNotFound,
    Diverged,
    FormatTooNew,
    NotARun,
    Preempted,
    RankLost,
    RanksDiffer,
    RemoteError,
    ResumableError,
    ResumableWarning,
    RunExists,
    RunInUse,
    SaveFailed,
    StateMismatch,
    Unsupported,
    UsageError,
)
from .run.checkpoint import Checkpoint
from .run.directory import Run
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .determinism import seed_everything as seed_everything
    from .groups import Preempt as Preempt
    from .groups import Ranks as Ranks
    from .groups import Remote as Remote
    from .groups import Trace as Trace
    from .interop.weights import Misfit as Misfit
    from .interop.weights import load_weights as load_weights
    from .saving.writer import PendingSave as PendingSave
    from .session.observer import Unregistered as Unregistered
    from .state import RunState as RunState

# Most of these import torch, which the command line and a mere `import resumable` do not wait for.
_LAZY = {
    "Misfit": ".interop.weights",
    "PendingSave": ".saving.writer",
    "Preempt": ".groups",
    "Ranks": ".groups",
    "Remote": ".groups",
    "RunState": ".state",
    "Trace": ".groups",
    "Unregistered": ".session.observer",
    "load_weights": ".interop.weights",
    "seed_everything": ".determinism",
}

__all__ = [
    "Boundary",
    "CannotRead",
    "CannotStore",
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointNotExpected",
    "CheckpointNotFound",
    "Diverged",
    "FormatTooNew",
    "Misfit",
    "NotARun",
    "PendingSave",
    "Preempt",
    "Preempted",
    "RankLost",
    "Ranks",
    "RanksDiffer",
    "Remote",
    "RemoteError",
    "ResumableError",
    "ResumableWarning",
    "Run",
    "RunExists",
    "RunInUse",
    "RunState",
    "SaveFailed",
    "StateMismatch",
    "Trace",
    "Unregistered",
    "Unsupported",
    "UsageError",
    "load_weights",
    "seed_everything",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Modules are no garbage, and to look for some among all that torch has made takes as long as they do.
    is_enabled = gc.isenabled()
    try:
        gc.disable()
        return getattr(import_module(_LAZY[name], __name__), name)
    finally:
        if is_enabled:
            gc.enable()


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
