"""The random numbers of sharded tensors on a GPU, of which torch keeps track in a private object.

The first random operation on a sharded tensor makes that object, and gives every process the generator of
rank 0. An uninterrupted training does so once; a resumed one must have the object before its generators are
restored, or they would be replaced later.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_MODULE = "torch.distributed.tensor._random"


def read() -> dict[str, Tensor] | None:
    """Return the states that torch's tracker keeps beside the generators; None if there is no tracker.

    Only old versions of torch keep any there.

    >>> read() is None
    True
    """
    tracker = getattr(sys.modules.get(_MODULE), "_rng_tracker", None)
    return None if tracker is None else dict(getattr(tracker, "rng_states", {}))


def make(mesh: Any) -> None:
    """Make the tracker for a mesh as torch would, but leave the generators as they are."""
    module: Any = importlib.import_module(_MODULE)
    if module._rng_tracker is not None or mesh.device_type == "cpu":
        return
    kind = module.OffsetBasedRNGTracker
    # torch 2.6 wants the type only.
    takes_mesh = "device_mesh" in inspect.signature(kind).parameters
    module._rng_tracker = kind(mesh if takes_mesh else mesh.device_type, run_state_sync=False)


def write(states: Mapping[str, Tensor]) -> None:
    """Restore what `read` returned, if there is a tracker."""
    tracker = getattr(sys.modules.get(_MODULE), "_rng_tracker", None)
    if tracker is not None and states:
        tracker.rng_states.update({name: state.clone() for name, state in states.items()})
