"""Kill a PyTorch training anywhere, start the same command again, and it goes on bit for bit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .boundary import Boundary
from .checkpoint import Checkpoint
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
from .run import Run

if TYPE_CHECKING:
    from .determinism import seed_everything as seed_everything
    from .state import RunState as RunState
    from .unregistered import Unregistered as Unregistered
    from .weights import Misfit as Misfit
    from .weights import load_weights as load_weights
    from .writer import PendingSave as PendingSave

__version__ = "0.1.0.dev0"

# These import torch, which the command line and a mere `import resumable` do not wait for.
_LAZY = {
    "Misfit": ".weights",
    "PendingSave": ".writer",
    "RunState": ".state",
    "Unregistered": ".unregistered",
    "load_weights": ".weights",
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
    "Preempted",
    "RankLost",
    "RanksDiffer",
    "RemoteError",
    "ResumableError",
    "ResumableWarning",
    "Run",
    "RunExists",
    "RunInUse",
    "RunState",
    "SaveFailed",
    "StateMismatch",
    "Unregistered",
    "Unsupported",
    "UsageError",
    "load_weights",
    "seed_everything",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
