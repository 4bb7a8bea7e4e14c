"""At most one save in flight, and its error is never lost."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..processes.crew import SaveSkipped
from ..tracebacks import short_methods
from .save_cost import Waiting


@short_methods
class PendingSave:
    """A save on its way to the disk.

    >>> from resumable import RunState
    >>> with RunState.load("runs/pending") as state:
    ...     saved = state.save()
    runs/pending is empty: starting fresh
    >>> saved.wait()
    >>> saved.number, saved.path.name
    (1, '000001-step-00000000')
    """

    def __init__(self, number: int, path: Path, job: Callable[[], object], waiting: Waiting) -> None:
        self.number = number
        """The save number."""
        self.path = path
        """The checkpoint's folder, once it is durable."""
        self._job = job
        self._waiting = waiting
        self._error: BaseException | None = None
        self._told = False
        # Not a daemon: the interpreter then waits for it at its end.
        self._thread = threading.Thread(target=self._run, name=f"resumable-save-{number}")

    def _start(self) -> None:
        self._thread.start()

    def __repr__(self) -> str:
        return f"<save {self.number}: {'on its way' if self._is_on_its_way() else 'ended'}>"

    def _is_on_its_way(self) -> bool:
        """Whether it is still being written."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._job()
        except BaseException as exc:
            self._error = exc
            _free_frames(exc)
            self._told = isinstance(exc, SaveSkipped)
            if not self._told:
                # A script that ends without close() must not end as if all were well.
                atexit.register(self._tell_at_exit)
        finally:
            # The job holds the host copy of the whole state.
            del self._job

    def wait(self) -> None:
        """Wait until the checkpoint is durable; raise what went wrong."""
        self._join()
        if self._error:
            self._told = True
            atexit.unregister(self._tell_at_exit)
            raise self._error

    def wait_unless_told(self) -> None:
        """Wait until the checkpoint is durable; raise what went wrong, unless it was raised before."""
        self._join()
        if not self._told:
            self.wait()

    def _join(self) -> None:
        # One that has not begun yet is refused then, if the handler of a signal closes the run before.
        if self._is_on_its_way():
            with self._waiting():
                self._thread.join()

    def _tell_at_exit(self) -> None:
        assert self._error is not None
        sys.excepthook(type(self._error), self._error, self._error.__traceback__)


def _free_frames(error: BaseException | None) -> None:
    # The traceback of an error would keep the job's variables, among them the host copy.
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


class Writer:
    """Runs one save after the other, in the background."""

    def __init__(self, waiting: Waiting = contextlib.nullcontext) -> None:
        self._waiting = waiting
        self._pending: PendingSave | None = None
        self._turn = threading.Lock()
        """Held by the thread of a save: the handler of a signal may submit one while another is submitted."""

    def submit(self, number: int, path: Path, job: Callable[[], object]) -> PendingSave:
        """Start `job` in the background, after the one before it; raise what that one met."""
        self.wait()
        # Known before it begins: the handler of a signal that closes the run then waits for it.
        self._pending = pending = PendingSave(number, path, partial(self._in_turn, job), self._waiting)
        pending._start()
        self._pending = pending  # a handler that has waited meanwhile did not wait for it
        return pending

    def _in_turn(self, job: Callable[[], object]) -> None:
        with self._turn:
            job()

    def is_busy(self) -> bool:
        """Whether a save is in flight."""
        return self._pending is not None and self._pending._is_on_its_way()

    def wait(self) -> None:
        """Wait for the save in flight; raise what went wrong, unless it was raised before."""
        if self._pending:
            self._pending.wait_unless_told()
            self._pending = None
