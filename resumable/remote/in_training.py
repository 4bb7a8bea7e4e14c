"""Pulls checkpoints from the remote when a training starts, and pushes its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from ..errors import CheckpointDamaged, CheckpointNotFound, RemoteError, warn
from ..options import Copied
from ..processes.crew import Crew
from ..progress import Progress
from ..run.directory import Run
from ..run.history_writer import History
from ..run.manifest import Best, Goal
from ..run.resume_choice import Which, is_number
from . import pull, url
from .background import Pusher, cause
from .push import summary
from .run_copy import Remote
from .storage import Store


class Copies:
    """The copies of a run's checkpoints in a remote folder, as all processes of a training see them."""

    def __init__(
        self,
        run: Run,
        crew: Crew,
        copied: Copied,
        goal: Goal | None,
        progress: Progress,
        tell: Callable[[str, str], object],
    ) -> None:
        self.numbers: Mapping[int, str] = {}
        self._run = run
        self._crew = crew
        self._copied = copied
        self._goal = goal
        self._progress = progress
        self._tell = tell
        self._store = Store(copied.place, copied.options)
        self._remote = Remote(self._store)
        self._pusher: Pusher | None = None
        self._pulled: list[tuple[int, int, float]] = []

    def __str__(self) -> str:
        return str(self._remote)

    def told(self) -> dict[str, str]:
        """Return the address and which checkpoints are pushed, for the history."""
        return {"url": str(self), "push": self._copied.push}

    def are_cached(self) -> bool:
        """Return whether the run directory is only a cache of the remote."""
        return self._run.path == url.cache_folder(self._copied.place).absolute()

    def look(self, resume: Which) -> None:
        """List the checkpoints there; if there are none here, this becomes the run that is there."""
        if resume == "never" or not ((isinstance(resume, str) and resume in _WORDS) or is_number(resume)):
            return
        run_id, numbers = self._crew.ranks.first("the remote", self._look)
        self.numbers = dict(numbers)
        if self.numbers:
            self._crew.count_from(max(self.numbers))
            self._crew.ranks.each("the run's id", lambda: self._adopt(str(run_id)))

    def _look(self) -> tuple[str | None, list[tuple[int, str]]]:
        is_empty = self._run.highest() is None
        # With a checkpoint to resume from here, a remote that does not answer must not delay the training.
        remote = self._remote if is_empty else Remote(self._store.with_patience(_QUICK))
        line = f"waiting for {self} to list its checkpoints"
        waits = threading.Timer(_A_LONG_WAIT, self._progress.print, [line])
        waits.daemon = True
        waits.start()
        try:
            run_id, numbers = remote.whose()
        except (RemoteError, CheckpointDamaged) as exc:
            if is_empty:
                raise RemoteError(
                    f"{self._run} is empty, and it is unknown what {self} has of it: {exc.problem}",
                    fix=f"{exc.fix.rstrip('.')}. Or say resume='never' to start fresh without asking.",
                ) from None
            # The push fails for the same cause: it is reported once.
            hope = "It is tried again; until then nothing is pushed. What is there was not looked at."
            self._tell(f"{exc.problem} {hope}", cause(exc.problem))
            return None, []
        finally:
            waits.cancel()
            remote.store.close()
        here = self._run.known_id()
        if numbers and here not in (None, run_id):
            self._tell(
                f"{self} holds another run ({run_id}) than {self._run} ({here}): nothing is taken from it.",
                "looking",
            )
            return run_id, []
        return run_id, [*numbers.items()]

    def _adopt(self, run_id: str) -> None:
        if self._crew.leads and self._run.highest() is None:
            self._run.acquire()
            pull.adopt(self._run, run_id)

    def pull(self, number: int) -> None:
        """Pull a checkpoint into the run."""
        with contextlib.suppress(CheckpointDamaged, CheckpointNotFound):
            # It may be intact on this node and lost on another.
            found = self._run.open(number)
            found.verify()
            if not found.about.elsewhere:
                return
        name, started = self.numbers[number], time.perf_counter()
        if self._store.is_abandoned():
            # The last pull was interrupted, in a notebook for example.
            self._store = Store(self._copied.place, self._copied.options)
            self._remote = Remote(self._store)
        about = self._remote.about(name)[0]
        with self._progress.moving(f"pulling checkpoint {number}", about.size) as moved:
            self._store.interruptible(lambda: pull.pull(self._remote, name, self._run, moved))
        seconds = time.perf_counter() - started
        self._pulled.append((number, about.size, seconds))
        if self._crew.is_first:
            self._progress.print(summary(f"pulled checkpoint {number} from {self}", about.size, seconds))

    def best(self, above: int) -> int | None:
        """Return the number of the best checkpoint there, according to the newest above a number."""
        return self._remote.best(self.numbers, above)

    def start(self, history: History, best: Best | None) -> None:
        """Start pushing, where this process's disk has something to push, once the run is locked."""
        for number, size, seconds in self._pulled:
            history.pulled(number, str(self), size=size, seconds=seconds)
        self._pulled.clear()
        if self._pusher is None and self._crew.pushes and self._crew.run_id:
            # With a connection of its own: a pull must not wait for a push.
            self._pusher = Pusher(
                self._run,
                Remote(Store(self._copied.place, self._copied.options)),
                self._copied.push,
                self._copied.keep,
                self._goal,
                history=history,
                progress=self._progress,
                tell=self._tell,
                seen=self._seen,
                commits=self._crew.is_first,
            )
            self._pusher.start(self._crew.run_id, best)

    def _seen(self, number: int) -> None:
        # Several processes count from the number that they agreed on at the start.
        if self._crew.ranks.is_alone:
            self._crew.count_from(number)

    def saved(self, number: int, best: Best | None) -> None:
        """Push a new checkpoint, which is durable here."""
        if self._pusher:
            self._pusher.saved(number, best)

    def pinned(self) -> set[int]:
        """Return the checkpoints that must not be pruned here yet."""
        return self._pusher.pinned() if self._pusher else set()

    def close(self) -> None:
        """Wait until everything is pushed; RemoteError says what is missing."""
        self._store.close()
        if self._pusher:
            self._pusher.close(self._copied.patience)

    def close_after(self, failed: type[BaseException] | None) -> None:
        """Close when the last save has ended, with this error or with none."""
        if failed and not issubclass(failed, Exception):
            # After one interrupted wait, do not begin another.
            self.leave()
            return
        try:
            self.close()
        except RemoteError as exc:
            if failed is None:
                raise
            # Raised here, it would hide that a save has failed.
            warn(exc.problem)

    def hand_over(self) -> None:
        """Stop at once, because another training of this process takes over."""
        self._store.close()
        if self._pusher:
            self._pusher.hand_over()

    def leave(self) -> None:
        """Stop at once, and warn of what is missing there."""
        self._store.close()
        if self._pusher:
            self._pusher.leave()


_QUICK = 5.0
_A_LONG_WAIT = 3.0
_WORDS = ("auto", "must", "newest", "latest", "last", "best")
