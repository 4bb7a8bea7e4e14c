"""How the work of saving and loading gets along with the rest of the process."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator


def yield_to_training() -> None:
    """Let this thread, and those that it starts, run when the training leaves a processor idle."""
    if sys.platform == "linux":
        # (a sandbox may forbid it)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python from looking for garbage meanwhile.

    Thousands of small objects come and go; that makes it look at every object of the process, again
    and again, which takes longer than all the rest.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
