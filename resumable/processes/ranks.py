"""The ranks of a training, and how they agree through the store of torch.distributed."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import platform
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from .. import errors
from ..errors import RankLost, RanksDiffer, ResumableError
from ..files import disk
from ..files.strict_json import Json
from . import stages
from .store_thread import START_AGAIN, Line

T = TypeVar("T")
Place = tuple[int, int, int]
"""Epoch, batch and step."""

_sessions = 0


def of_this_training() -> tuple[int, int]:
    """Return this process's rank and the number of processes.

    >>> of_this_training()
    (0, 1)
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


class Ranks:
    """The processes of one training, which talk through the store of torch.distributed.

    No collectives are used: a missing process costs the others a timeout, not their lives, and nothing is
    queued on the training's own streams.
    """

    def __init__(self, timeout: float, stands_at: Callable[[], Place]) -> None:
        self.rank, self.size = of_this_training()
        self.is_first = self.rank == 0
        """Whether this is rank 0, which decides."""
        self.is_alone = self.size == 1
        """Whether this is the only process."""
        self.timeout = timeout
        self._stands_at = stands_at
        self.every = min(max(timeout / 30, 0.05), 1.0)
        """The seconds between two looks at what the others posted."""
        self._listener: weakref.WeakMethod[Callable[[Any], bool]] | None = None
        self._line: Line | None = None
        self._turn = 0
        self._turns: dict[int, list[str]] = {}
        """The keys that this process posted in the last turns."""
        self._beats = 0
        self.trouble: ResumableError | None = None
        """The error that a process has reported, if one has."""
        self._people: list[str] = []
        self._has_left = False
        self._process = os.getpid()
        self.saves_begun = 0
        """The number of the last save that this process began."""

    def join(self, facts: Mapping[str, Json], parts: stages.Told) -> Sequence[stages.Told]:
        """Meet the others, and return the parts of each; RanksDiffer if facts or parts differ."""
        if self.is_alone or self._line:
            return [parts]
        global _sessions
        _sessions += 1
        token = secrets.token_hex(8) if self.is_first else None
        self._line = Line(self.timeout, f"resumable/{_sessions}", token, self.every, self._beat)
        if not self._line.wait_open():
            raise RankLost(
                f"rank {self.rank} has waited {self.timeout:g} s for rank 0 to make or load its RunState.",
                fix=_CALL_EVERYWHERE,
            )
        _leave_at_exit(self)
        person = f"process {os.getpid()} on {socket.gethostname()}"
        own: list[Any] = [person, dict(facts), dict(parts)]
        try:
            found = self.agree("RunState", lambda: own, is_due=True)
        finally:
            self._line.shut_door()
        self._people = [person for person, _, _ in found]
        told: list[stages.Told] = [parts for _, _, parts in found]
        _refuse_differing([facts for _, facts, _ in found], stages.differences(told))
        return told

    def listen(self, listener: Callable[[Any], bool]) -> None:
        """Call a method at each look at the others; while it returns True, look again soon."""
        self._listener = weakref.WeakMethod(listener)

    def hurry(self) -> None:
        """Look at what the others posted at once."""
        if self._line:
            self._line.hurry()

    def _beat(self, store: Any) -> bool:
        self._beats += 1
        # The place is read before the saves: the other way round, a save called in between would look as if
        # this rank had left it out.
        place = self._stands_at()
        store.set(f"alive/{self.rank}", json.dumps([self._beats, *place]))
        if text := store.get("trouble"):
            self.trouble = self.trouble or errors.from_json(json.loads(text))
        if text := store.get("news"):
            number, by, step = json.loads(text)
            if number > self.saves_begun and place[2] > step:
                self._tell_trouble(store, _left_out(number, by, step, self.rank, place[2]))
        listener = self._listener() if self._listener else None
        return listener is not None and listener(store)

    def _tell_trouble(self, store: Any, error: ResumableError) -> None:
        # If two ranks meet an error at once, all raise the same one.
        told = store.compare_set("trouble", "", json.dumps(errors.to_json(error)))
        self.trouble = errors.from_json(json.loads(told))

    def refuse_trouble(self) -> None:
        """Raise the error that a process has reported, if one has."""
        if self.trouble:
            raise self.trouble

    def _ask(self, question: Callable[[Any], T]) -> T:
        assert self._line
        try:
            return self._line.ask(question)
        except RankLost as exc:
            self.trouble = self.trouble or exc
            raise

    def in_trouble(self, error: ResumableError) -> ResumableError:
        """Report an error that ends the training; return the one that all raise, which may be another's."""
        self._ask(lambda store: self._tell_trouble(store, error))
        assert self.trouble
        return self.trouble

    def post(self, key: str, value: Json) -> None:
        """Post a value for the others."""
        text = json.dumps(value)
        self._ask(lambda store: store.set(key, text))

    def post_bytes(self, key: str, value: bytes) -> list[str]:
        """Post bytes for the others; return the keys that they are posted under."""
        pieces = [value[at : at + _PIECE] for at in range(0, len(value), _PIECE)]
        keys = [f"{key}/{number}" for number in range(len(pieces))]
        for of_piece, piece in zip(keys, pieces, strict=True):
            self._ask(partial(_set, of_piece, piece))
        self.post(key, keys)
        return [key, *keys]

    def bytes_of(self, key: str) -> bytes:
        """Return bytes posted under a key."""
        return b"".join(bytes(self._ask(partial(_get, of_piece))) for of_piece in self._read(key))

    def forget(self, keys: Collection[str]) -> None:
        """Delete values that no one will read any more."""
        for key in keys:
            self._ask(partial(_delete, key))

    def is_there(self, key: str) -> bool:
        """Whether a value has been posted."""
        return self._ask(lambda store: bool(store.check([key])))

    def raise_once(self, key: str, error: ResumableError) -> None:
        """Post an error, unless one was posted under that key before."""
        text = json.dumps({"error": errors.to_json(error)})
        self._ask(lambda store: store.compare_set(key, "", text))

    def wait(
        self, keys: Mapping[int, str], what: str, *, is_due: bool = False, unless: str | None = None
    ) -> list[Json]:
        """Wait until some ranks have posted, and return what; RankLost names those that have not.

        If it `is_due`, it has to be posted within the timeout; else a process that is alive is waited for. An
        error posted under the key `unless` is raised instead.
        """
        names = [*keys.values()]
        watch, began = _Watch(self, keys, what, is_due), time.monotonic()
        while not self._ask(lambda store: store.check(names)):
            self.refuse_trouble()
            if unless and self.is_there(unless):
                unpack(self._read(unless))
            watch.look()
            # Late by a tenth of the wait at most.
            time.sleep(min(max((time.monotonic() - began) / 10, _SHORTEST), _LONGEST))
        return [self._read(name) for name in names]

    def _read(self, key: str) -> Json:
        return json.loads(self._ask(lambda store: store.get(key)))

    def pulse(self, rank: int) -> list[int] | None:
        """Return a process's last heartbeat: a count, and its epoch, batch and step."""
        return self._read(f"alive/{rank}") if self.is_there(f"alive/{rank}") else None

    def reason_to_leave(self, rank: int) -> str | None:
        """Return why a process has left the training; None if it has not said that it left."""
        return self._read(f"left/{rank}") if self.is_there(f"left/{rank}") else None

    def person(self, rank: int) -> str:
        """Return a rank with its process id and host, as messages name it."""
        return f"rank {rank} ({self._people[rank]})" if self._people else f"rank {rank}"

    def agree(self, what: str, do: Callable[[], T], *, is_due: bool = False) -> list[T]:
        """Do something on every rank; return all results, or raise the same error everywhere."""
        if self.is_alone:
            return [do()]
        self.refuse_trouble()
        self._turn += 1
        key = f"turn/{self._turn}/{what}"
        # All ranks have finished the turn before the last, since they began the last.
        self.forget(self._turns.pop(self._turn - 2, []))
        self._turns[self._turn] = [f"{key}/{self.rank}", *([f"{key}/all"] if self.is_first else [])]
        cause, answer = _attempt(self.rank, do)
        self.post(f"{key}/{self.rank}", answer)
        if is_due:
            self.wait({0: f"{key}/0"}, what, is_due=True)
        if self.is_first:
            of_all = {rank: f"{key}/{rank}" for rank in range(self.size)}
            found = self.wait(of_all, what, is_due=is_due)
            self.post(f"{key}/all", found)
        else:
            (found,) = self.wait({0: f"{key}/all"}, what)
        if cause and not isinstance(cause, ResumableError):
            raise cause
        # An error that ends its process comes first: the others would train on without it.
        for one in sorted(found, key=lambda one: "ends" not in one):
            unpack(one, cause)
        return [one["ok"] for one in found]

    def deal(self, what: str, own: Callable[[], Json], decide: Callable[[list[Json]], list[Json]]) -> Json:
        """Let rank 0 decide from what each rank has, and return its answer for this rank.

        No rank but 0 sees what all have, which would grow with the square of their number.
        """
        if self.is_alone:
            return decide([own()])[0]
        self.refuse_trouble()
        self._turn += 1
        key = f"turn/{self._turn}/{what}"
        self.forget(self._turns.pop(self._turn - 2, []))
        answers = {rank: f"{key}/for/{rank}" for rank in range(self.size)}
        self._turns[self._turn] = [f"{key}/{self.rank}", *(answers.values() if self.is_first else ())]
        cause, told_here = _attempt(self.rank, own)
        self.post(f"{key}/{self.rank}", told_here)
        if self.is_first:
            found = self.wait({rank: f"{key}/{rank}" for rank in range(self.size)}, what)
            _, decided = _attempt(0, lambda: decide([_result(one) for one in found]))
            for rank, answer in answers.items():
                self.post(answer, {"ok": decided["ok"][rank]} if "ok" in decided else decided)
        (answered,) = self.wait({0: answers[self.rank]}, what)
        if cause and not isinstance(cause, ResumableError):
            raise cause
        return _result(answered, cause)

    def first(self, what: str, do: Callable[[], T], *, is_due: bool = False) -> T:
        """Do something on rank 0; return its result on every rank, or raise its error everywhere."""
        if self.is_alone:
            return do()
        found: list[Any] = self.agree(what, lambda: do() if self.is_first else None, is_due=is_due)
        first: T = found[0]
        return first

    def leave(self, reason: str = "it has closed its RunState") -> None:
        """Tell the others that this process leaves the training."""
        # A forked child is not part of the training.
        if self._line and not self._has_left and self._process == os.getpid():
            self._has_left = True
            self.post(f"left/{self.rank}", reason)

    def close(self) -> None:
        """Close the connection to the store."""
        if self._line and self._process == os.getpid():
            self._line.close()

    def each(self, what: str, do: Callable[[], T]) -> T:
        """Do something on every rank; return this rank's result, which need not be JSON."""
        if self.is_alone:
            return do()
        kept: list[T] = []
        self.agree(what, lambda: kept.append(do()))
        return kept[0]


class _Watch:
    """Checks, during a wait, whether the processes that are waited for are alive."""

    def __init__(self, ranks: Ranks, keys: Mapping[int, str], what: str, is_due: bool) -> None:
        self._ranks = ranks
        self._missing = dict(keys)
        self._what = what
        self._is_due = is_due
        self._began = self._next = time.monotonic()
        self._pulses: dict[int, tuple[list[int] | None, float]] = {}

    def look(self) -> None:
        """Raise RankLost if some have left, are silent, or are late."""
        now, ranks = time.monotonic(), self._ranks
        if now < self._next:
            return
        self._next = now + min(0.25, ranks.timeout / 10)
        self._missing = {rank: key for rank, key in self._missing.items() if not ranks.is_there(key)}
        for rank in self._missing:
            # What it posted before it left counts.
            if (reason := ranks.reason_to_leave(rank)) and not ranks.is_there(self._missing[rank]):
                self._lose([f"{ranks.person(rank)}, which has left the training: {reason}"], START_AGAIN)
            pulse = ranks.pulse(rank)
            if rank not in self._pulses or self._pulses[rank][0] != pulse:
                self._pulses[rank] = pulse, now
        silent = {rank: now - since for rank, (_, since) in self._pulses.items() if rank in self._missing}
        is_late = self._is_due and now - self._began >= ranks.timeout
        lost = [rank for rank in self._missing if is_late or silent[rank] >= ranks.timeout]
        if lost:
            is_alive = {rank: silent[rank] < ranks.timeout / 2 for rank in lost}
            fix = _CALL_EVERYWHERE if all(is_alive.values()) else START_AGAIN
            self._lose([self._described(rank, is_alive[rank]) for rank in lost], fix)

    def _described(self, rank: int, is_alive: bool) -> str:
        pulse, _ = self._pulses[rank]
        person = self._ranks.person(rank)
        if pulse is None:
            return f"{person}, which was never heard of"
        _, epoch, batch, step = pulse
        where = f"at epoch {epoch}, batch {batch}, step {step}"
        if is_alive:
            return f"{person}, which runs, {where}, but did not come"
        return f"{person}, which has ended or is stopped: it was last heard of {where}"

    def _lose(self, whom: Sequence[str], fix: str) -> None:
        waited = f"{time.monotonic() - self._began:.0f} s"
        raise self._ranks.in_trouble(
            RankLost(
                f"{self._what}: rank {self._ranks.rank} has waited {waited} for {'; '.join(whom)}.", fix=fix
            )
        )


def versions() -> dict[str, str]:
    """Return the versions that must be the same in all processes."""
    from ..version import __version__

    return {
        "resumable": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def by_disk(ranks: Ranks, folder: Path) -> list[list[int]]:
    """Return the ranks in groups that see the same folder, where nodes have disks of their own."""
    token = ranks.first("a token", lambda: secrets.token_hex(8))
    names = [_probe(token, rank) for rank in range(ranks.size)]

    def show() -> None:
        disk.make_folder(folder)
        (folder / names[ranks.rank]).touch()

    ranks.each("a mark on the disk", show)
    seen = ranks.agree("the marks", lambda: [r for r, name in enumerate(names) if (folder / name).exists()])
    (folder / names[ranks.rank]).unlink(missing_ok=True)
    return sorted([*group] for group in {tuple(group) for group in seen})


def _probe(token: str, rank: int) -> str:
    return f".probe-{hashlib.blake2b(f'{token}/{rank}'.encode(), digest_size=4).hexdigest()}"


def _set(key: str, value: bytes, store: Any) -> None:
    store.set(key, value)


def _get(key: str, store: Any) -> Any:
    return store.get(key)


def _delete(key: str, store: Any) -> None:
    store.delete_key(key)


def unpack(found: Json, cause: BaseException | None = None) -> None:
    """Raise the error that another process posted, if it is one."""
    if isinstance(found, dict) and "error" in found:
        raise errors.from_json(found["error"]) from cause


def _result(found: Json, cause: BaseException | None = None) -> Json:
    unpack(found, cause)
    return found["ok"]


def told(rank: int, error: BaseException) -> ResumableError:
    """Return the error that the other processes raise for one that this process met."""
    if not isinstance(error, ResumableError):
        return RankLost(
            f"rank {rank} cannot continue: {type(error).__name__}: {error}.",
            fix="mend that, and start the training again.",
        )
    if rank == 0 or isinstance(error, (RankLost, RanksDiffer)):
        return error
    return type(error)(f"rank {rank}: {error.problem}", fix=error.fix)


def _attempt(rank: int, do: Callable[[], Any]) -> tuple[BaseException | None, Json]:
    try:
        return None, {"ok": do()}
    except BaseException as exc:
        answer: dict[str, Json] = {"error": errors.to_json(told(rank, exc))}
        return exc, answer if isinstance(exc, ResumableError) else {**answer, "ends": True}


def _refuse_differing(facts: Sequence[Mapping[str, Json]], of_parts: Iterable[str]) -> None:
    lines = [
        f"  {name} is {facts[0][name]!r} on rank 0 and {there[name]!r} on rank {rank}"
        for name in facts[0]
        for rank, there in enumerate(facts)
        if there.get(name) != facts[0][name]
    ]
    fix = "start all of them with the same versions and arguments."
    if more := [f"  {line}" for line in of_parts]:
        fix += " The stages of a pipeline need names of their own: model={'stage0': stage}."
    if lines + more:
        raise RanksDiffer("the processes of this training do not agree:\n" + "\n".join(lines + more), fix=fix)


def _left_out(number: int, by: int, step: int, rank: int, now: int) -> RanksDiffer:
    return RanksDiffer(
        f"rank {by} called save() at step {step} (checkpoint {number}), and rank {rank} has gone on to step "
        f"{now} without it.",
        fix="call save() on every rank, not under `if rank == 0:`; only one of them writes what all share.",
    )


def _leave_at_exit(ranks: Ranks) -> None:
    kept = weakref.ref(ranks)

    def leave() -> None:
        if (there := kept()) is not None:
            error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
            # The store may be gone already; then there is no one to tell.
            with contextlib.suppress(RankLost):
                there.leave(f"{type(error).__name__}: {error}" if error else "it has ended")
                there.close()

    atexit.register(leave)


_CALL_EVERYWHERE = (
    "make RunState and call load(), save() and restore() on every rank, not under `if rank == 0:`; where one "
    "is busy for longer (an evaluation), give RunState.load a longer Ranks(timeout=...)."
)
_SHORTEST = 0.0005
_LONGEST = 0.05
_PIECE = 8 << 20
