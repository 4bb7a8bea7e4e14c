"""The threads that an iterable starts as it is looped over."""

from __future__ import annotations

import threading

_SERVING = (
    "concurrent.futures.process",
    "multiprocessing",
    "resumable",
    "threading",
    "torch.utils.data",
    "tqdm",
)
"""Whose threads run no code of an iterable: they pass on what processes load, show a bar or save."""


class Started:
    """Finds the threads that are started within its context, and may run an iterable's code."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._before: set[threading.Thread] = set()

    def __enter__(self) -> None:
        self._before = {*threading.enumerate()}

    def __exit__(self, *_: object) -> None:
        new = [thread for thread in threading.enumerate() if thread not in self._before]
        self._before = set()
        self.names += [thread.name for thread in new if _may_load(thread)]


def _may_load(thread: threading.Thread) -> bool:
    own = type(thread).__module__
    # A pool of threads is one of "processes" that are none.
    if own == "multiprocessing.dummy":
        return True
    module = getattr(getattr(thread, "_target", None), "__module__", None) or own
    return not any(f"{module}.".startswith(f"{package}.") for package in _SERVING)
