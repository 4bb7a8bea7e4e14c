"""A thread that talks to the store of torch.distributed, so that a silent store blocks no one for ever."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from datetime import timedelta
from typing import Any, TypeVar

import torch

from ..errors import RankLost, Unsupported

T = TypeVar("T")
Store = Any
Question = Callable[[Store], Any]

_PAUSE = 0.02


def shared_store() -> Store:
    """Return the store that the processes of this training met through."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    if store is None:
        raise Unsupported(
            "the processes of this training have no store in common (the backend is MPI).",
            fix="initialise torch.distributed with gloo or nccl.",
        )
    return store


def _own_connection(store: Store, timeout: float) -> Store:
    # A client is locked while it waits; with one each, neither the training nor this thread blocks the other.
    distributed: Any = torch.distributed
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    if isinstance(store, distributed.TCPStore):
        wait = timedelta(seconds=timeout)
        return distributed.TCPStore(store.host, store.port, None, False, wait, wait_for_workers=False)
    return store


class _Door:
    """Where rank 0 gives the others the token of this session, each in answer to a random word.

    The store may be older than the session: torchrun's agent keeps it over a restart, with everything that
    the ended processes wrote.
    """

    def __init__(self, shared: Store, name: str) -> None:
        self._shared = shared
        self._name = name
        self._seen = 0
        self._waiting: set[int] = set()

    def ask(self, until: float) -> str:
        """Return rank 0's answer; NoAnswer if there is none in time."""
        word = secrets.token_hex(8)
        number = self._shared.add(f"{self._name}/asked", 1)
        self._shared.set(f"{self._name}/word/{number}", word)
        # Not get(), which locks the training's own client while it waits.
        while not self._shared.check([f"{self._name}/to/{word}"]):
            if time.monotonic() > until:
                raise NoAnswer
            time.sleep(_PAUSE)
        return str(self._shared.get(f"{self._name}/to/{word}").decode())

    def answer(self, token: str) -> None:
        """Answer all that asked since the last call; answers to words of ended processes are never read."""
        asked = self._shared.add(f"{self._name}/asked", 0)
        self._waiting |= {*range(self._seen + 1, asked + 1)}
        self._seen = asked
        for number in sorted(self._waiting):
            key = f"{self._name}/word/{number}"
            if self._shared.check([key]):
                self._shared.set(f"{self._name}/to/{self._shared.get(key).decode()}", token)
                self._waiting.remove(number)


class Line:
    """A thread that asks the store one question after the other, and calls `beat` in between.

    If `beat` returns True it is called again soon.
    """

    def __init__(self, timeout: float, name: str, offered: str | None, every: float, beat: Question) -> None:
        self._timeout = timeout
        self._every = every
        # A weak reference: a RunState dropped without close() must not be kept alive by its heartbeat.
        self._beat = weakref.WeakMethod(beat)
        self._questions: queue.SimpleQueue[tuple[Question, Future[Any]] | None] = queue.SimpleQueue()
        self._open: Future[Store] = Future()
        self._door: _Door | None = None
        self._is_hurried = False
        self._is_gone: BaseException | None = None
        """The error that ended the connection to the store."""
        # A daemon: the interpreter must not wait at exit for a store that does not answer.
        self._thread = threading.Thread(
            target=self._run, args=(name, offered), name="resumable-ranks", daemon=True
        )
        self._thread.start()

    def _run(self, name: str, offered: str | None) -> None:
        try:
            store = self._connected(name, offered)
        except BaseException as exc:
            self._open.set_exception(exc)
            return
        self._open.set_result(store)
        due = 0.0
        while not self._is_gone:
            if self._is_hurried or time.monotonic() >= due:
                self._is_hurried, found = False, Future[Any]()
                due = time.monotonic() + self._every
                if (beat := self._beat()) is None:
                    return
                self._answer(beat, store, found)
                del beat
                if not found.exception() and found.result():
                    due = time.monotonic() + _PAUSE
            pause = due - time.monotonic()
            if (door := self._door) and offered:
                self._answer(lambda _: door.answer(offered), store, Future())
                pause = min(pause, _PAUSE)
            with contextlib.suppress(queue.Empty):
                asked = self._questions.get(timeout=max(0.0, pause))
                if asked is None:
                    return
                self._answer(asked[0], store, asked[1])
        with contextlib.suppress(queue.Empty):
            while asked := self._questions.get_nowait():
                asked[1].set_exception(self._is_gone)

    def _answer(self, question: Question, store: Store, answer: Future[Any]) -> None:
        try:
            answer.set_result(question(store))
        except BaseException as exc:
            # Torch would log pages about it at every further question.
            self._is_gone = exc
            answer.set_exception(exc)

    def _connected(self, name: str, offered: str | None) -> Store:
        shared = shared_store()
        door = _Door(shared, name)
        if offered is None:
            return self._prefixed(shared, door.ask(time.monotonic() + self._timeout))
        store = self._prefixed(shared, offered)
        # Keys that all processes read exist before the others arrive.
        for key in ("trouble", "news"):
            store.set(key, "")
        self._door = door
        return store

    def shut_door(self) -> None:
        """Stop answering: all processes of the session have arrived."""
        self._door = None

    def _prefixed(self, shared: Store, token: str) -> Store:
        distributed: Any = torch.distributed
        return distributed.PrefixStore(f"resumable/{token}", _own_connection(shared, self._timeout))

    def wait_open(self) -> bool:
        """Wait for the session to open; return whether it did within the timeout."""
        try:
            self._open.result(self._timeout + _GRACE)
        except NoAnswer:
            return False
        except Exception as exc:
            raise _gone(exc) from exc
        return True

    def ask(self, question: Callable[[Store], T]) -> T:
        """Return the store's answer; RankLost if there is none."""
        answer: Future[T] = Future()
        self._questions.put((question, answer))
        try:
            if self._is_gone:
                raise self._is_gone
            return answer.result(self._timeout)
        except NoAnswer as exc:
            self._is_gone = exc
            raise RankLost(
                f"the store of torch.distributed has not answered for {self._timeout:g} s: the process that "
                "keeps it (torchrun's agent, or else rank 0) has ended or is stopped.",
                fix=START_AGAIN,
            ) from exc
        except Exception as exc:
            raise _gone(exc) from exc

    def hurry(self) -> None:
        """Call `beat` at once, without waiting for it."""
        self._is_hurried = True
        self._questions.put((lambda _: None, Future()))

    def close(self) -> None:
        """Stop the thread."""
        self._questions.put(None)
        self._thread.join(_GRACE)


def _gone(cause: BaseException) -> RankLost:
    what = str(cause).partition("\n")[0].rstrip(".")
    return RankLost(
        f"the store of torch.distributed cannot be reached any more ({what}): the process that keeps it "
        "(torchrun's agent, or else rank 0) has ended.",
        fix=START_AGAIN,
    )


_GRACE = 0.5
START_AGAIN = (
    "see what the other processes said last, and start the training again: nothing on disk was harmed, and "
    "the run continues from its newest checkpoint."
)
