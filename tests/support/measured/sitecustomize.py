"""What Python imports first where coverage is measured: a fork beside other threads measures nothing."""

import os
import sys
import threading

_has_threads = False


def _look() -> None:
    global _has_threads
    _has_threads = threading.active_count() > 1


def _measure_nothing() -> None:
    # The tracer has a lock for each call: what another thread had locked nobody would ever free here.
    coverage = sys.modules.get("coverage")
    if _has_threads and coverage and (measuring := coverage.Coverage.current()):
        measuring.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_look, after_in_child=_measure_nothing)
