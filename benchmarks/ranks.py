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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from .rounds import Failed, Figures, Values, in_turns, put_garbage_aside, reason_of, tell
from .table import middle, quartiles
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
        from resumable import RunState

        with quiet():
            self.run_state = RunState.load(
                self.folder.parent / "run", keep=None, write=self.write_by, **self.parts
            )


class OursByAll(Ours):
    """The same, written by all."""

    write_by = "all"


OURS: dict[str, type[Contender]] = {'write="one"': Ours, 'write="all"': OursByAll}
ONE, ALL = OURS
PEERS = ("dcp.save", "dcp.async_save", "dcp.async_save, thread")


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
    kinds = CONTENDERS | OURS
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
    if here.rank == 0:
        if isinstance(contender, Ours):
            contender.tidy()
        else:
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
    from resumable import line

    kind: Any = line.Line
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
    jobs = {}
    for size, team in teams.items():
        tell(f"{state}: {size} ranks")
        names = [*OURS] if size > 1 else [ONE]
        about = team.ask(make_training, make, names, folder / str(size))[0]
        # What takes milliseconds wants more than a few.
        saves = 8 if about["bytes"] < _SMALL else 1
        jobs |= {_named(size, name): partial(_turn, team, name, saves, _steps_for(team, name)) for name in names}
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
    return math.ceil(1.5 * (figures["durable"] - figures["call"]) / step) + 2


def _turn(team: Team, name: str, saves: int, count: int, number: int) -> Figures:
    saved = _of_all(team.ask(save, name, saves))
    return saved | _of_all(team.ask(train, name, saves, count, number))


def _of_all(found: Sequence[Figures], of_rank: Sequence[str] = ("call", "cpu")) -> Figures:
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
    loads = {f"{size} ranks": partial(_load, team) for size, team in teams.items()}
    result.figures[LOADING] = in_turns(
        LOADING, loads, result.settings["rounds"], math.inf, result.errors
    )


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
        parts += [f"**A save of {_described(result, state)}**, milliseconds:", _times(result, state, THREAD)]
    parts += ["**What several processes add** to the same save of one, in the same round:", _added(result)]
    parts += ["**Messages** of a steady save, by rank:", _counted(result)]
    parts += [
        f"**Written by one, by all, and by others**: {_described(result, WIDE)}, milliseconds:",
        _times(result, WIDE, WRITING),
        'The same, over `write="one"` by as many ranks in the same round:',
        _ratios(result),
    ]
    parts += ["**Loading** the same by all ranks, milliseconds:", _times(result, LOADING, LOADS)]
    parts += [_goals(result), _failures(result)]
    return "\n\n".join(part for part in parts if part)


THREAD = {
    "call": "call, rank 0",
    "call_others": "call, slowest other",
    "cpu": "its CPU, rank 0",
    "cpu_others": "its CPU, others",
    "durable": "until durable",
    "lost": "training lost",
    "nothing": "lost by nothing",
}
WRITING = {key: THREAD[key] for key in ("call", "call_others", "durable", "lost", "nothing")}
LOADS = {"read": "every rank reads", "broadcast": "rank 0 reads and broadcasts", "restore": "`restore()`"}


def _about(result: Result) -> str:
    lines = [f"- {what}: {value}" for what, value in result.machine.items()]
    rounds = result.settings["rounds"]
    lines.append(f"- {rounds} rounds in turns, gloo, one thread a rank, {result.seconds:.0f} s in all")
    return "\n".join(lines)


def _described(result: Result, state: str) -> str:
    about = result.states[state]
    size = about["bytes"]
    told = f"{size / 1e6:,.0f} MB" if size > 5e6 else f"{size / about['tensors']:.0f} B each"
    return f"{about['tensors']:,.0f} tensors ({told})"


def _times(result: Result, state: str, columns: Mapping[str, str]) -> str:
    rows = [
        [who, *(_time(values.get(column)) for column in columns)]
        for who, values in result.figures[state].items()
        if columns.keys() & values.keys()
    ]
    return _table(["", *columns.values()], rows)


def _added(result: Result) -> str:
    rows = []
    for who in result.figures[FEW]:
        if who != ALONE:
            cells = [
                _time(added(result, state, who, column))
                for column in ("cpu", "call", "durable")
                for state in _SAME
            ]
            rows.append([who, *cells])
    told = [_described(result, state).partition(" (")[0] for state in _SAME]
    heads = [f"{what}, {count}" for what in ("CPU of the call", "call", "until durable") for count in told]
    return _table(["rank 0, ms more than 1 rank", *heads], rows)


ALONE = "1 rank"
_SAME = (FEW, MANY)


def added(result: Result, state: str, who: str, column: str) -> list[float]:
    """Return, round by round, what a figure is more than that of one rank."""
    of_state = result.figures[state]
    pairs = zip(of_state[who][column], of_state[ALONE][column], strict=True)
    return [there - alone for there, alone in pairs]


def _counted(result: Result) -> str:
    rows = []
    for who in result.figures[f"{FEW}: messages"]:
        cells = []
        for rank in ("", "_others"):
            for column in ("messages", "bytes", "polls"):
                values = [result.figures[f"{state}: messages"][who][column + rank][0] for state in _SAME]
                cells.append(" / ".join(f"{value:,.0f}" for value in values))
        rows.append([who, *cells])
    few, many = (f"{result.states[state]['tensors']:,.0f}" for state in _SAME)
    heads = [f"{rank}: {what}" for rank in ("rank 0", "others") for what in ("messages", "bytes", "polls")]
    return _table([f"{few} / {many} tensors", *heads], rows)


def ratios(result: Result, who: str, column: str) -> list[float]:
    """Return, round by round, a figure over that of write="one" by as many ranks."""
    of_all = result.figures[WIDE]
    ours = of_all[f"{who.partition(',')[0]}, {ONE}"].get(column, [])
    values = of_all[who].get(column, [])
    if len(ours) != len(values):
        return []
    # Of differences of times the median is a sound base, a single one is not.
    base = [statistics.median(ours)] * len(ours) if column == "lost" and ours else ours
    return [there / one for there, one in zip(values, base, strict=True)]


def _ratios(result: Result) -> str:
    columns = {"call": "call, rank 0", "call_others": "call, slowest other", "durable": "until durable"}
    columns["lost"] = "training lost"
    rows = []
    for who, values in result.figures[WIDE].items():
        memory_of_all = values.get("memory")
        cells = [_ratio(middle(ratios(result, who, column))) for column in columns]
        rows.append([who, *cells, _ratio(middle(memory_of_all or []))])
    return _table(["", *columns.values(), "memory of all / state"], rows)


@dataclass(frozen=True)
class Goal:
    """What is to be reached."""

    what: str
    limit: float
    value: Callable[[Result], float | None]
    is_floor: bool = False


def _grows(who: str) -> Callable[[Result], float | None]:
    def value(result: Result) -> float | None:
        few, many = (middle(added(result, state, who, "cpu")) for state in _SAME)
        return None if few is None or many is None else (many - few) * 1e3

    return value


def _more(what: str) -> Callable[[Result], float | None]:
    def value(result: Result) -> float | None:
        few, many = (result.figures[f"{state}: messages"] for state in _SAME)
        return max(
            many[who][column][0] / few[who][column][0] for who in few for column in (what, f"{what}_others")
        )

    return value


def _over_one(who: str, column: str) -> Callable[[Result], float | None]:
    return lambda result: middle(ratios(result, who, column)) if who in result.figures[WIDE] else None


def _over(who: str, other: str, column: str) -> Callable[[Result], float | None]:
    def value(result: Result) -> float | None:
        ours, theirs = (result.figures[WIDE].get(name, {}).get(column) for name in (who, other))
        pairs = zip(ours or [], theirs or [], strict=False)
        return middle([one / there for one, there in pairs])

    return value


def _loads(who: str) -> Callable[[Result], float | None]:
    def value(result: Result) -> float | None:
        found = result.figures[LOADING][who]
        return middle([b / r for b, r in zip(found["broadcast"], found["read"], strict=True)])

    return value


def _memory_of(who: str) -> Callable[[Result], float | None]:
    return lambda result: middle(result.figures[WIDE].get(who, {}).get("memory", []))


def _goals_of(size: int) -> list[Goal]:
    one, by_all, ranks = _named(size, ONE), _named(size, ALL), f"{size} ranks"
    return [
        Goal(f"{one}: CPU of the call, more by many tensors than by few, ms", 0.3, _grows(one)),
        Goal(f"{by_all}: CPU of the call, more by many tensors than by few, ms", 0.3, _grows(by_all)),
        Goal(f'{ranks}: until durable, write="all" / "one"', 1.0, _over_one(by_all, "durable")),
        Goal(
            f'{ranks}: until durable, write="all" / dcp.save',
            0.5,
            _over(by_all, _named(size, "dcp.save"), "durable"),
        ),
        Goal(f'{ranks}: memory of all / state, write="one"', 1.02, _memory_of(one)),
        Goal(f'{ranks}: memory of all / state, write="all"', 1.02, _memory_of(by_all)),
        Goal(f"{ranks}: a broadcast / all read themselves", 1.0, _loads(_named(size, "loading")), True),
    ]


GOALS = (
    Goal("messages, many tensors / few", 1.0, _more("messages")),
    Goal("bytes of messages, many tensors / few", 1.05, _more("bytes")),
    *_goals_of(2),
    *_goals_of(4),
)


def _goals(result: Result) -> str:
    rows = []
    for goal in GOALS:
        value = goal.value(result)
        sign = "at least" if goal.is_floor else "at most"
        is_met = value is not None and (value >= goal.limit if goal.is_floor else value <= goal.limit)
        told = "not told" if value is None else "met" if is_met else "**not met**"
        rows.append([goal.what, f"{sign} {goal.limit:g}", _ratio(value), told])
    return _table(["goal", "limit", "measured", ""], rows)


def _failures(result: Result) -> str:
    lines = [
        f"- {who}: {what}: {why}" for who, reasons in result.errors.items() for what, why in reasons.items()
    ]
    return "\n".join(["**What does not work:**", "", *lines]) if lines else ""


def _time(values: Sequence[float] | None) -> str:
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
    if not rows:
        return ""
    ruler = ["-", *["-:"] * (len(headings) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, ruler, *rows))


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
        width=arguments.width or (64 if quick else 256),
        wide=arguments.wide or (192 if quick else 512),
        few=min(592, arguments.many),
        many=arguments.many,
        rounds=arguments.rounds or (2 if quick else 5),
    )
    start = _seconds()
    load = f"{os.getloadavg()[0]:.1f} before the first of {SIZES} ranks"
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=arguments.folder) as folder:
        result = measure(settings, Path(folder).resolve())
        result.machine = {**machine.describe(Path(folder), "cpu"), "load": load}
    result.seconds = _seconds() - start
    return result


if __name__ == "__main__":
    main()
