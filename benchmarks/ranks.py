"""What several processes cost: a save on the training thread, messages, writing by all, loading by all.

python -m benchmarks.ranks --quick             # under a minute on two cores
python -m benchmarks.ranks                     # as in benchmarks/README.md
python -m benchmarks.ranks --from FILE.json    # show a stored result again
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from . import files, machine
from .alone import memory
from .apart import CONTEXT
from .contenders import CONTENDERS, Contender, Resumable, Wait, quiet
from .ratios import middle, quartiles
from .rounds import Failed, Figures, Values, in_turns, put_garbage_aside, reason_of, tell
from .training import Gpt, Training, bytes_of, digest, tensors_of

README = Path(__file__).with_name("README.md")
_LIMIT = 90.0
_LOOK_SECONDS = 0.005
_PIECE = 16 << 20
_seconds = time.perf_counter
_dist: Any = torch.distributed


# The processes of one training.


class Here:
    """One of the processes, as its jobs see it, and what they keep in it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        # The default group stays free: what saves in the background by collectives may have it.
        self.group: Any = _dist.new_group(backend="gloo")
        self.training: Training
        self.contenders: dict[str, Contender] = {}
        self.counts: Counts | None = None

    def meet(self) -> float:
        """Wait for the others; return the time."""
        _dist.barrier(self.group)
        return _seconds()


class Team:
    """The processes of one training: all do the jobs that they are given, and answer by rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._is_broken = False
        pairs = [CONTEXT.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pairs]
        self._processes = [
            CONTEXT.Process(target=_serve, args=(theirs, rank, size))
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        port = self._connections[0].recv()
        for ours in self._connections[1:]:
            ours.send(port)

    def ask(
        self, job: Callable[..., Any], *arguments: Any, look: Callable[[], object] | None = None
    ) -> list[Any]:
        """Let all do a job; return what each answers, or raise what the first has met.

        `look` is called every few milliseconds in the meantime.
        """
        if self._is_broken:
            raise Failed("a process of this training did not answer before")
        for ours in self._connections:
            ours.send((job, arguments))
        answers: dict[Connection, Any] = {}
        end = time.monotonic() + _LIMIT
        while len(answers) < self.size:
            waiting = [ours for ours in self._connections if ours not in answers]
            ready: list[Any] = connection.wait(waiting, _LOOK_SECONDS if look else 1.0)
            answers |= {ours: _received(ours) for ours in ready}
            if look:
                look()
            if time.monotonic() > end:
                self._is_broken = True
                raise Failed(f"it took longer than {_LIMIT:.0f} s")
        found = [answers[ours] for ours in self._connections]
        for answer in found:
            if isinstance(answer, Failed):
                self._is_broken |= str(answer) == _DIED
                raise answer
        return found

    def peak(self, job: Callable[..., Any], *arguments: Any) -> int:
        """Let all do a job; return the most bytes that they have together and no file backs."""
        seen: list[int] = []
        pids = [process.pid or 0 for process in self._processes]
        self.ask(job, *arguments, look=lambda: seen.append(sum(map(memory, pids))))
        return max(seen)

    def close(self) -> None:
        """End the processes."""
        for ours in self._connections:
            ours.close()
        for process in self._processes:
            process.join(5)
        for process in self._processes:
            process.kill()
            process.join()


def _received(ours: Any) -> Any:
    try:
        return ours.recv()
    except (EOFError, ConnectionError):
        return Failed(_DIED)


_DIED = "its process died"


@contextmanager
def _teams(*sizes: int) -> Iterator[dict[int, Team]]:
    with ExitStack() as stack:
        teams = {}
        for size in sizes:
            teams[size] = Team(size)
            stack.callback(teams[size].close)
        yield teams


def _serve(theirs: Connection, rank: int, size: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    # As many as there are cores would be more than there are, times the processes.
    torch.set_num_threads(1)
    wait = timedelta(seconds=60)
    port = 0 if rank == 0 else theirs.recv()
    store = _dist.TCPStore("127.0.0.1", port, size, rank == 0, timeout=wait, wait_for_workers=False)
    if rank == 0:
        theirs.send(store.port)
    _dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
    here = Here(rank, size)
    while True:
        try:
            job, arguments = theirs.recv()
        except EOFError:
            break
        try:
            theirs.send(job(here, *arguments))
        except Exception as exc:
            theirs.send(Failed(reason_of(exc)))
    # The store is in rank 0: it stays until the others have had their say.
    close_contenders(here)
    if rank == 0:
        time.sleep(0.2)


# The trainings and what saves them.


def gpt(width: int, here: Here) -> Training:
    """Return a training of 592 tensors: 148 parameters of a GPT of this width, and AdamW."""
    model = Gpt(width, 12, 4096)
    return _training(here, model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True))


def tiny(count: int, here: Here) -> Training:
    """Return a training of so many tensors of 256 bytes: half of them parameters, half momentum."""
    model = nn.Module()
    for index in range(count // 2):
        model.register_parameter(f"tensor{index:05}", nn.Parameter(torch.randn(64)))
    return _training(here, model, torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9, fused=True))


def _training(here: Here, model: nn.Module, optimizer: torch.optim.Optimizer) -> Training:
    """Return a training whose step is some work, an all-reduce as DDP's, and the optimizer's step."""
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    left, right, gradient = torch.rand(512, 512), torch.rand(512, 512), torch.rand(1 << 14)

    def step() -> None:
        torch.mm(left, right)
        # One that is late keeps all others here.
        _dist.all_reduce(gradient.fill_(1.0), group=here.group)
        optimizer.step()

    return Training({"model": model, "optimizer": optimizer}, step)


class Ours(Resumable):
    """This library, of which rank 0 writes what all share."""

    write_by = "one"

    def prepare(self) -> None:
        """Bind the parts to a run that all processes share."""
        from resumable import Ranks, RunState

        with quiet():
            self.run_state = RunState.load(
                self.folder.parent / "run", keep=None, ranks=Ranks(write=self.write_by), **self.parts
            )


class OursByAll(Ours):
    """The same, written by all."""

    write_by = "all"


class Alone(Ours):
    """The same by a process that knows nothing of the others, among as many: what is the machine's share."""

    def prepare(self) -> None:
        """Bind the parts to a run of its own."""
        from resumable import RunState
        from resumable.processes import ranks

        known = ranks.of_this_training
        ranks.of_this_training = lambda: (0, 1)
        try:
            with quiet():
                self.run_state = RunState.load(self.folder / "run", keep=None, **self.parts)
        finally:
            ranks.of_this_training = known


class FirstAlone(Alone):
    """Rank 0 knows nothing of the others, who save nothing."""


OURS: dict[str, type[Contender]] = {'write="one"': Ours, 'write="all"': OursByAll}
ALONE: dict[str, type[Contender]] = {"rank 0 for itself": FirstAlone, "each for itself": Alone}
ONE, ALL = OURS
CONTROLS = dict(zip(OURS, ALONE, strict=True))
PEERS = ("dcp.save", "dcp.async_save, thread")


def make_training(
    here: Here, make: Callable[[Here], Training], names: Sequence[str], folder: Path
) -> Figures:
    """Make a training, the same on all ranks, and what saves it; return what it is like."""
    close_contenders(here)
    torch.manual_seed(0)
    here.training = make(here)
    if names:
        make_contenders(here, names, folder)
    put_garbage_aside()
    return {
        "bytes": bytes_of(here.training.parts),
        "tensors": len(tensors_of(here.training.parts)),
        "step": here.training.step_seconds,
    }


def make_contenders(here: Here, names: Sequence[str], folder: Path) -> None:
    """Make what saves the training."""
    kinds = CONTENDERS | OURS | ALONE
    for name in names:
        where = folder / _as_path(name) / f"rank{here.rank}"
        here.contenders[name] = kinds[name](here.training.parts, where, "cpu")


def close_contenders(here: Here) -> None:
    """Let go of what saves the training."""
    while here.contenders:
        here.contenders.popitem()[1].close()


def _as_path(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def _save(here: Here, name: str) -> Wait:
    """Save; return what waits until the save of all is durable."""
    contender = here.contenders[name]
    if isinstance(contender, FirstAlone) and here.rank:
        return _nothing
    if isinstance(contender, Ours):
        return contender.save()
    path = contender.path = contender.folder.parent / "saved"
    written = contender.write(path)
    if here.rank:
        return written or _nothing
    # Its writers flush their files; what lists them, and the folder, nobody does.
    if written is None:
        files.flush(path)
        return _nothing
    return _background.submit(_flush_after, written, path).result


_background = ThreadPoolExecutor(1)


def _flush_after(wait: Wait, path: Path) -> None:
    wait()
    files.flush(path)


def _nothing() -> None: ...


def _tidy(here: Here, name: str) -> None:
    """Remove all but the newest save."""
    here.meet()
    contender = here.contenders[name]
    if isinstance(contender, Ours) and (isinstance(contender, Alone) or here.rank == 0):
        contender.tidy()
    elif here.rank == 0:
        files.remove(contender.path)
    here.meet()


# What is measured: each function is a job of all processes.


def save(here: Here, name: str, saves: int) -> Figures:
    """Save so often, each time a state that differs, and wait; return the medians."""
    found: dict[str, list[float]] = {"call": [], "cpu": [], "durable": []}
    for _ in range(saves):
        here.training.step()
        start, cpu = here.meet(), time.thread_time()
        wait = _save(here, name)
        found["call"].append(_seconds() - start)
        found["cpu"].append(time.thread_time() - cpu)
        wait()
        found["durable"].append(_seconds() - start)
    _tidy(here, name)
    return {column: statistics.median(values) for column, values in found.items()}


def train(here: Here, name: str, saves: int, steps: int, number: int) -> Figures:
    """Return the training time that a save takes, and how far two measurements of nothing differ.

    So many steps with a save that is waited for at their end, and twice without, in another order each round.
    """
    taken = {}
    legs = ["with", "without", "again"]
    for leg in legs[number % 3 :] + legs[: number % 3]:
        start = here.meet()
        for _ in range(saves):
            wait = _save(here, name) if leg == "with" else _nothing
            for _ in range(steps):
                here.training.step()
            wait()
        taken[leg] = (here.meet() - start) / saves
        if leg == "with":
            _tidy(here, name)
    without = (taken["without"] + taken["again"]) / 2
    return {
        "lost": taken["with"] - without,
        "nothing": abs(taken["again"] - taken["without"]),
        "steps": without,
    }


COUNTED = ("messages", "bytes", "polls")


class Counts:
    """A store that counts what is asked of it, but for the signs of life."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.begin()

    def begin(self) -> None:
        """Count from nothing."""
        self.counted = dict.fromkeys(COUNTED, 0)

    def __getattr__(self, name: str) -> Any:
        return partial(self._ask, name)

    def _ask(self, name: str, key: Any, *values: Any) -> Any:
        answer = getattr(self._store, name)(key, *values)
        if name == "check":
            # How often it looks depends on how long it waits.
            self.counted["polls"] += 1
        elif not _is_sign_of_life(name, key):
            said = [key, *values, *([answer] if name == "get" else [])]
            self.counted["messages"] += 1
            self.counted["bytes"] += sum(len(one) if isinstance(one, (str, bytes)) else 8 for one in said)
        return answer


def _is_sign_of_life(name: str, key: str) -> bool:
    return key.startswith(("alive/", "left/")) or (name == "get" and key in ("news", "trouble"))


def count_from_now(here: Here) -> None:
    """Count what the next RunState asks of its store."""
    # A store of torch cannot be wrapped from outside: it is made in C++ and asked from there.
    from resumable.processes import store_thread

    kind: Any = store_thread.Line
    prefixed = kind._prefixed

    def counting(self: Any, store: Any, token: str) -> Any:
        here.counts = Counts(prefixed(self, store, token))
        return here.counts

    kind._prefixed = counting


def messages(here: Here, name: str, saves: int) -> Figures:
    """Return what is asked of the store for a steady save."""
    save(here, name, 3)
    assert here.counts
    here.meet()
    here.counts.begin()
    save(here, name, saves)
    return {what: count / saves for what, count in here.counts.counted.items()}


def take_steps(here: Here, count: int) -> None:
    """Train."""
    here.training.steps(count)


def first_saves(here: Here, name: str, folder: Path, saves: int) -> None:
    """Make what saves the training, and save, training meanwhile."""
    make_contenders(here, [name], folder)
    for _ in range(saves):
        here.training.steps(1)
        wait = _save(here, name)
        here.training.steps(2)
        wait()
        _tidy(here, name)


class Buffers:
    """The files of a checkpoint, and memory for them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self.tensors = [torch.zeros(path.stat().st_size, dtype=torch.uint8) for path in paths]

    def pieces(self) -> Iterator[tuple[Path, int, torch.Tensor]]:
        """Return where to read what."""
        for path, tensor in zip(self.paths, self.tensors, strict=True):
            for begin in range(0, len(tensor), _PIECE):
                yield path, begin, tensor[begin : begin + _PIECE]

    def digest(self) -> str:
        """Return what tells what was read from all else."""
        return "".join(xxhash.xxh3_128_hexdigest(tensor.numpy().data) for tensor in self.tensors)


def _read(path: Path, begin: int, piece: torch.Tensor) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.preadv(descriptor, [piece.numpy().data], begin)
    finally:
        os.close(descriptor)
    return xxhash.xxh3_128_digest(piece.numpy().data)


def load(here: Here, name: str) -> Figures:
    """Read the newest checkpoint on every rank, and on rank 0 to broadcast it; return the times."""
    contender = here.contenders[name]
    assert isinstance(contender, Ours)
    run_state = contender.run_state
    newest = run_state.run.checkpoints()[-1].path
    buffers = Buffers([newest / "model.safetensors", newest / "optimizer.safetensors"])
    for path in buffers.paths:
        files.warm(path)
    found = {}
    for way, read in {"read": _read_by_all, "broadcast": _broadcast}.items():
        for tensor in buffers.tensors:
            tensor.zero_()
        start = here.meet()
        read(here, buffers)
        found[way] = here.meet() - start
        found[f"{way}_digest"] = int(buffers.digest()[:12], 16)
    if found.pop("read_digest") != found.pop("broadcast_digest"):
        raise Failed("what was broadcast is not what was read")
    saved = digest(here.training.parts)
    here.training.step()
    start = here.meet()
    with quiet():
        run_state.restore("newest")
    found["restore"] = here.meet() - start
    if digest(here.training.parts) != saved:
        raise Failed("what is restored is not what was saved, bit for bit")
    return found


def _read_by_all(here: Here, buffers: Buffers) -> None:
    for path, begin, piece in buffers.pieces():
        _read(path, begin, piece)


def _broadcast(here: Here, buffers: Buffers) -> None:
    under_way: Any = None
    for path, begin, piece in buffers.pieces():
        if here.rank == 0:
            # Meanwhile the piece before goes to the others, who do not verify it again.
            _read(path, begin, piece)
        if under_way:
            under_way.wait()
        under_way = _dist.broadcast(piece, 0, group=here.group, async_op=True)
    under_way.wait()


# The scenarios.


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    ranks: tuple[int, ...]
    """How many processes; one is what the others are compared with."""
    few: int
    """Small tensors."""
    many: int
    """The same, many."""
    width: int
    """Of the GPT whose saves are looked at on the training thread."""
    wide: int
    """Of the one whose writing is compared."""
    peers: tuple[str, ...]
    rounds: int
    saves: int
    """In a turn, where one takes milliseconds."""


@dataclass
class Result:
    """What was measured, as it is stored."""

    settings: dict[str, Any]
    machine: dict[str, str] = field(default_factory=dict)
    states: dict[str, Figures] = field(default_factory=dict)
    figures: dict[str, dict[str, Values]] = field(default_factory=dict)
    """By scenario, by who saves."""
    errors: dict[str, dict[str, str]] = field(default_factory=dict)
    seconds: float = 0.0


FEW, MANY, MODEL, WIDE, LOADING = "few tensors", "many tensors", "model", "wide model", "loading"
_SMALL_ONES = (FEW, MANY)
Make = Callable[[Here], Training]


def measure(settings: Settings, folder: Path) -> Result:
    """Measure everything."""
    CONTEXT.set_forkserver_preload(["torch.distributed.checkpoint", "torch._dynamo", "benchmarks.alone"])
    result = Result(asdict(settings))
    small = {FEW: partial(tiny, settings.few), MANY: partial(tiny, settings.many)}
    wide = partial(gpt, settings.wide)
    with _teams(1, *settings.ranks) as teams:
        for state, make in {**small, MODEL: partial(gpt, settings.width)}.items():
            _saving(result, teams, state, make, folder / "saving" / _as_path(state))
    with _teams(*settings.ranks) as teams:
        for state, make in small.items():
            _messages(result, teams, state, make, folder / "messages" / _as_path(state))
    for size in settings.ranks:
        for name in (*OURS, *settings.peers):
            _memory(result, size, name, wide, folder / "memory")
    with _teams(*settings.ranks) as teams:
        _writing(result, teams, wide, folder / "writing")
    return result


def _named(size: int, name: str) -> str:
    return f"{size} ranks, {name}" if size > 1 else "1 rank"


def _saving(result: Result, teams: Mapping[int, Team], state: str, make: Make, folder: Path) -> None:
    """Save a state by one and by several ranks in turns: the training thread, the training, the disk."""
    jobs: dict[str, Callable[[int], Figures]] = {}
    for size, team in teams.items():
        tell(f"{state}: {size} ranks")
        names = [*OURS, *(ALONE if state in _SMALL_ONES else ())] if size > 1 else [ONE]
        about = team.ask(make_training, make, names, folder / str(size))[0]
        saves = result.settings["saves"] if about["bytes"] < _SMALL else 1
        jobs |= {
            _named(size, name): partial(_turn, team, name, saves, _steps_for(team, name)) for name in names
        }
    result.states[state] = about
    result.figures[state] = in_turns(state, jobs, result.settings["rounds"], math.inf, result.errors)
    for team in teams.values():
        team.ask(close_contenders)
    shutil.rmtree(folder)


def _steps_for(team: Team, name: str) -> int:
    """Return how many steps a background write fits into, when all compete for the cores."""
    team.ask(save, name, 1)
    figures = _of_all(team.ask(save, name, 2))
    step = max(one["steps"] for one in team.ask(train, name, 1, 3, 0)) / 3
    return int(1.5 * (figures["durable"] - figures["call"]) / step) + 3


def _turn(team: Team, name: str, saves: int, count: int, number: int) -> Figures:
    saved = _of_all(team.ask(save, name, saves))
    return saved | _of_all(team.ask(train, name, saves, count, number))


def _of_all(found: Sequence[Figures], of_rank: Sequence[str] = ("call", "cpu", "durable")) -> Figures:
    """Return the highest of each figure; of those that are a rank's own, rank 0's and that of the others."""
    highest = {column: max(one[column] for one in found) for column in found[0]}
    for column in of_rank:
        if column in highest and len(found) > 1:
            highest[column] = found[0][column]
            highest[f"{column}_others"] = max(one[column] for one in found[1:])
    return highest


def _messages(result: Result, teams: Mapping[int, Team], state: str, make: Make, folder: Path) -> None:
    tell(f"{state}: messages")
    found = result.figures.setdefault(f"{state}: messages", {})
    for size, team in teams.items():
        team.ask(count_from_now)
        for name in OURS:
            team.ask(make_training, make, [name], folder / str(size))
            counted = _of_all(team.ask(messages, name, 5), COUNTED)
            team.ask(close_contenders)
            found[_named(size, name)] = {column: [value] for column, value in counted.items()}
    shutil.rmtree(folder)


def _memory(result: Result, size: int, name: str, make: Make, folder: Path) -> None:
    """Let a contender save in processes of its own: how much memory they take, all together."""
    who = _named(size, name)
    tell(f"memory: {who}")
    try:
        with _teams(size) as teams:
            team = teams[size]
            about = team.ask(make_training, make, [], folder)[0]
            before = team.peak(take_steps, 5)
            grown = team.peak(first_saves, name, folder, 3) - before
            result.figures.setdefault(WIDE, {})[who] = {"memory": [max(0, grown) / about["bytes"]]}
    except Failed as exc:
        result.errors.setdefault(who, {})["memory"] = str(exc)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _writing(result: Result, teams: Mapping[int, Team], make: Make, folder: Path) -> None:
    """Save one state by all contenders in turns, and load it."""
    jobs: dict[str, Callable[[int], Figures]] = {}
    for size, team in teams.items():
        tell(f"{WIDE}: {size} ranks")
        result.states[WIDE] = team.ask(make_training, make, [], folder / str(size))[0]
        for name in (*OURS, *result.settings["peers"]):
            try:
                team.ask(make_contenders, [name], folder / str(size))
                jobs[_named(size, name)] = partial(_turn, team, name, 1, _steps_for(team, name))
            except Failed as exc:
                result.errors.setdefault(_named(size, name), {})[WIDE] = str(exc)
    # Each takes seconds.
    rounds = min(3, result.settings["rounds"])
    for who, values in in_turns(WIDE, jobs, rounds, math.inf, result.errors).items():
        result.figures.setdefault(WIDE, {}).setdefault(who, {}).update(values)
    loads: dict[str, Callable[[int], Figures]]
    loads = {f"{size} ranks": partial(_load, team) for size, team in teams.items()}
    result.figures[LOADING] = in_turns(LOADING, loads, result.settings["rounds"], math.inf, result.errors)


def _load(team: Team, number: int) -> Figures:
    # The state is then as it was at the save.
    team.ask(save, ONE, 1)
    return _of_all(team.ask(load, ONE))


_SMALL = 5e6


# The result as tables.


def pages(result: Result) -> str:
    """Return everything, as Markdown that is also readable as it is."""
    parts = [_about(result)]
    for state in (FEW, MANY, MODEL):
        parts += [f"**A save of {_described(result, state)}**, milliseconds:", _times(result, state, SAVING)]
    few, many = (f"{result.states[state]['tensors']:,.0f}" for state in _SMALL_ONES)
    parts += [
        "**What several processes add** to a save: milliseconds more than by as many that know nothing of "
        f"each other, in the same round, with {few} and with {many} tensors:",
        _additions(result),
        f"**Messages** of a steady save with {few} and with {many} tensors:",
        _counted(result),
        f"**Written by one, by all, and by others**: {_described(result, WIDE)}, milliseconds:",
        _times(result, WIDE, WRITING),
        'The same, over `write="one"` by as many ranks in the same round:',
        _ratios(result),
        "**Loading** the same by all ranks, milliseconds:",
        _times(result, LOADING, LOADS),
        _goals(result),
        _failures(result),
    ]
    return "\n\n".join(part for part in parts if part)


SAVING = {
    "call": "call, rank 0",
    "call_others": "call, slowest other",
    "cpu": "its CPU, rank 0",
    "cpu_others": "its CPU, others",
    "durable": "until durable, rank 0",
    "durable_others": "until heard, last other",
    "lost": "training lost",
    "nothing": "lost by nothing",
}
_OF_WRITING = ("call", "call_others", "durable", "durable_others", "lost", "nothing")
WRITING = {column: SAVING[column] for column in _OF_WRITING}
LOADS = {"read": "every rank reads", "broadcast": "rank 0 reads and broadcasts", "restore": "`restore()`"}


def _about(result: Result) -> str:
    lines = [f"- {what}: {value}" for what, value in result.machine.items()]
    rounds = result.settings["rounds"]
    lines.append(f"- {rounds} rounds in turns, gloo, one thread a rank, {result.seconds:.0f} s in all")
    return "\n".join(lines)


def _described(result: Result, state: str) -> str:
    about = result.states[state]
    each = about["bytes"] / about["tensors"]
    told = f"{each:.0f} bytes each" if each < 1e3 else f"{about['bytes'] / 1e6:,.0f} MB"
    return f"{about['tensors']:,.0f} tensors, {told}"


def _of(result: Result, scenario: str, who: str, column: str) -> list[float]:
    return result.figures.get(scenario, {}).get(who, {}).get(column, [])


def _times(result: Result, scenario: str, columns: Mapping[str, str]) -> str:
    rows = [
        [who, *(_time(values.get(column, [])) for column in columns)]
        for who, values in result.figures.get(scenario, {}).items()
    ]
    return _table(["", *columns.values()], rows)


def additions(result: Result, state: str, who: str, column: str) -> list[float]:
    """Return, round by round, what a figure is more than that of as many processes each for itself."""
    ranks, _, name = who.partition(", ")
    control = f"{ranks}, {CONTROLS[name]}"
    pairs = zip(_of(result, state, who, column), _of(result, state, control, column), strict=True)
    return [together - alone for together, alone in pairs]


def _ours(result: Result) -> list[str]:
    return [_named(size, name) for size in result.settings["ranks"] for name in OURS]


def _additions(result: Result) -> str:
    columns = {column: SAVING[column] for column in ("call", "cpu", "durable", "lost")}
    rows = []
    for who in _ours(result):
        cells = (additions(result, state, who, column) for column in columns for state in _SMALL_ONES)
        rows.append([who, *map(_time, cells)])
    return _table(["", *(f"{told}: {of}" for told in columns.values() for of in ("few", "many"))], rows)


def _counted(result: Result) -> str:
    columns = [what + rank for rank in ("", "_others") for what in COUNTED]
    rows = []
    for who in _ours(result):
        pairs = [
            [_of(result, f"{state}: messages", who, column) for state in _SMALL_ONES] for column in columns
        ]
        rows.append([who, *(", ".join(f"{of_state[0]:,.0f}" for of_state in pair) for pair in pairs)])
    return _table(
        ["", *(f"{rank}: {what}" for rank in ("rank 0", "highest other") for what in COUNTED)], rows
    )


def ratios(result: Result, who: str, other: str, column: str) -> list[float]:
    """Return, round by round, a figure of the wide model over that of another who saves it."""
    values, base = (_of(result, WIDE, name, column) for name in (who, other))
    if column == "lost" and base:
        # Of differences of times the median is a sound base, a single one is not, and noise is none.
        known = statistics.median(base) > statistics.median(_of(result, WIDE, other, "nothing"))
        base = [statistics.median(base)] * len(values) if known else []
    return [there / one for there, one in zip(values, base, strict=False)]


def _ratios(result: Result) -> str:
    columns = {column: WRITING[column] for column in _OF_WRITING if column != "nothing"}
    rows = []
    for who in result.figures.get(WIDE, {}):
        one = f"{who.partition(', ')[0]}, {ONE}"
        cells = [ratios(result, who, one, column) for column in columns]
        rows.append([who, *(_ratio(middle(cell)) for cell in (*cells, _of(result, WIDE, who, "memory")))])
    return _table(["", *columns.values(), "memory of all / state"], rows)


Rows = Iterator[tuple[str, float, float | None]]
"""What is to be reached, at most, and what was."""


def _goals(result: Result) -> str:
    rows = []
    for what, limit, value in _reached(result):
        told = "not told" if value is None else "met" if value <= limit else "**not met**"
        rows.append([what, f"at most {limit:g}", _ratio(value), told])
    return _table(["goal", "limit", "measured", ""], rows)


def _reached(result: Result) -> Rows:
    for who in _ours(result):
        added = [middle(additions(result, state, who, "cpu")) for state in _SMALL_ONES]
        more = _difference(*added)
        yield f"{who}: CPU of the call, added with many tensors more than with few, ms", 0.5, more
    for what in ("messages", "bytes"):
        yield f"{what} of a save, many tensors / few", 1.02, _growth(result, what)
    for size in result.settings["ranks"]:
        ranks = f"{size} ranks"
        one, by_all, dcp = (_named(size, name) for name in (ONE, ALL, "dcp.save"))
        yield (
            f'{ranks}: until durable, write="all" / "one"',
            1,
            middle(ratios(result, by_all, one, "durable")),
        )
        yield (
            f'{ranks}: until durable, write="all" / dcp.save',
            0.5,
            middle(ratios(result, by_all, dcp, "durable")),
        )
        for who in (one, by_all):
            yield f"{who}: memory of all / state", 1.02, middle(_of(result, WIDE, who, "memory"))
        times = zip(*(_of(result, LOADING, ranks, way) for way in ("read", "broadcast")), strict=True)
        yield f"{ranks}: load, all read / rank 0 broadcasts", 1, middle([all_ / one for all_, one in times])


def _difference(few: float | None, many: float | None) -> float | None:
    return None if few is None or many is None else (many - few) * 1e3


def _growth(result: Result, what: str) -> float | None:
    found = []
    for who in _ours(result):
        for column in (what, f"{what}_others"):
            few, many = (_of(result, f"{state}: messages", who, column) for state in _SMALL_ONES)
            found += [more / less for less, more in zip(few, many, strict=True)]
    return max(found, default=None)


def _failures(result: Result) -> str:
    lines = [
        f"- {who}: {what}: {why}" for who, reasons in result.errors.items() for what, why in reasons.items()
    ]
    return "\n".join(["**What does not work:**", "", *lines]) if lines else ""


def _time(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = quartiles(values)
    return f"{_milli(statistics.median(values))} ({_milli(low)}..{_milli(high)})"


def _milli(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if abs(value) < 0.1 else f"{value:.2f}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruler = ["-", *["-:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, ruler, *rows)) if rows else ""


# The command.


def main() -> None:
    """Measure, or read a stored result; show it."""
    arguments = _arguments()
    result = Result(**json.loads(arguments.stored.read_text())) if arguments.stored else _measured(arguments)
    print(pages(result))
    out = README.parent / "results" if arguments.readme else arguments.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "ranks-cpu.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    if arguments.readme:
        marked = re.compile(r"(<!-- ranks: .*? -->\n).*?(<!-- ranks ends -->)", re.DOTALL)
        text = README.read_text()
        README.write_text(
            marked.sub(lambda found: f"{found[1]}\n{pages(result)}\n\n{found[2]}", text, count=1)
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.ranks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="smaller states and fewer rounds")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="how many (2 4; quick: 2)")
    parser.add_argument("--rounds", type=int, help="how often all is repeated (5; quick: 2)")
    parser.add_argument("--width", type=int, help="of the model (256; quick: 64)")
    parser.add_argument("--wide", type=int, help="of the one that is written by all (512; quick: 192)")
    parser.add_argument("--many", type=int, default=10_000, help="how many small tensors")
    parser.add_argument("--folder", type=Path, default=Path(), help="the disk to measure (here)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="where the JSON goes")
    parser.add_argument("--readme", action="store_true", help="put the tables into benchmarks/README.md")
    parser.add_argument("--from", dest="stored", type=Path, metavar="JSON", help="measure nothing")
    return parser.parse_args()


def _measured(arguments: argparse.Namespace) -> Result:
    quick = arguments.quick
    settings = Settings(
        ranks=tuple(arguments.ranks or ((2,) if quick else (2, 4))),
        few=min(592, arguments.many),
        many=arguments.many,
        width=arguments.width or (64 if quick else 256),
        wide=arguments.wide or (192 if quick else 512),
        peers=PEERS[:1] if quick else PEERS,
        rounds=arguments.rounds or (2 if quick else 5),
        saves=2 if quick else 5,
    )
    start = _seconds()
    load = f"{os.getloadavg()[0]:.1f} before the first process was started"
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=arguments.folder) as folder:
        result = measure(settings, Path(folder).resolve())
        result.machine = {**machine.describe(Path(folder), "cpu"), "load": load}
    result.seconds = _seconds() - start
    return result


if __name__ == "__main__":
    main()
