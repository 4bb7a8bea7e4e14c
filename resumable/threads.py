"""Work beside the training."""

from __future__ import annotations

import os
import sys
import threading


def yield_to_training() -> None:
    """Let this thread, and those that it starts, run when the training leaves a processor idle."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
