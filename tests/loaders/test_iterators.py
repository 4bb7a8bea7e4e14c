"""What is used of torch's loader beyond its public side is still there, and used in one place alone."""

from __future__ import annotations

import ast
import inspect
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver as python_forkserver
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from resumable import RunState, Unsupported
from resumable.loaders.workers import forkserver
from resumable.loaders.workers.drawn import Drawn
from resumable.loaders.workers.order import Generators, Order
from resumable.loaders.workers.shelter import sheltered
from resumable.loaders.workers.torch_iterators import (
    ATTRIBUTES,
    METHODS,
    Workers,
    stand_in,
)
from resumable.loaders.workers.worker import Worker

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

PACKAGE = ROOT / "resumable"
ITERATOR: Any = _MultiProcessingDataLoaderIter
CHANGED = f"torch {torch.__version__} has another loader, and torch_iterators.py has to follow it"


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


class Log:
    """Takes the events of an iterator."""

    def order_begins(self) -> None: ...

    def batches_begin(self) -> None: ...

    def came_out(self, stamped: Any, number: int | None, worker: int | None) -> None: ...


def opened(loader: DataLoader[Any]) -> Workers:
    order = Order(loader, Generators(loader, {}), Drawn())
    worker = Worker(loader, None, {}, {}, is_seeded=False)
    return Workers(stand_in(loader, loader.dataset, order, worker), order, 0, Log())


OR_MORE = ("_process_data", "_try_get_data")
"""What may be given one thing more."""


def test_torch_still_has_all_that_is_used_of_it() -> None:
    instance = iter(DataLoader(Numbers(), num_workers=1))
    missing = [name for name in METHODS if not inspect.isfunction(getattr(ITERATOR, name, None))]
    missing += [name for name in ATTRIBUTES if name not in vars(instance)]
    ended = opened(DataLoader(Numbers(), num_workers=1))
    ended.end()
    replaced = {name for name in METHODS if name in vars(Workers) or name in vars(ended)}

    assert not missing, f"{CHANGED}: it has no {', '.join(missing)} any more"
    assert replaced == set(METHODS), "what torch_iterators.py replaces is not what it says it does"
    for name, parameters in {
        "_reset": ["self", "loader", "first_iter"],
        "_try_put_index": ["self"],
        "_process_data": ["self", "data"],
        "_get_data": ["self"],
        "_try_get_data": ["self"],
        "_next_data": ["self"],
    }.items():
        taken = list(inspect.signature(getattr(ITERATOR, name)).parameters)
        assert taken[: len(parameters)] == parameters, f"{CHANGED}: {name} takes {taken}"
        assert len(taken) <= len(parameters) + (name in OR_MORE), f"{CHANGED}: {name} takes {taken}"


def test_torch_does_no_more_for_a_batch_than_is_done_here() -> None:
    done = {"_sampler_iter", "_reset", "_next_data", "_num_yielded"}
    label = {"torch", "autograd", "profiler", "record_function", "_profile_name"}
    of_streams = {"_dataset_kind", "_DatasetKind", "Iterable", "_IterableDataset_len_called"}
    in_warning = {"_dataset", "_num_workers", "warnings", "warn"}
    names = {*_BaseDataLoaderIter.__next__.__code__.co_names}

    assert names <= done | label | of_streams | in_warning, f"{CHANGED}: it has other names"


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_have_torchs_label_in_a_profile(run_dir: Path, workers: int) -> None:
    loader = DataLoader(Numbers(), 2, num_workers=workers)
    with RunState.load(run_dir, loader=loader, every=None, quiet=True) as state:
        batches = iter(state.batches())
        next(batches)
        with torch.profiler.profile() as profile:
            next(batches)
        next(batches)

    labels = [event for event in profile.key_averages() if event.key.startswith("enumerate(DataLoader)#")]
    assert [event.count for event in labels] == [1]


def test_what_torch_does_with_its_private_names_is_what_is_relied_upon() -> None:
    seen: list[Any] = []

    class Watched(_MultiProcessingDataLoaderIter):
        def _process_data(self, data: Any, *worker: int) -> Any:
            seen.append((data, *worker))
            return super()._process_data(data, *worker)  # type: ignore[no-untyped-call]

        def _try_put_index(self) -> None:
            sent = self._send_idx
            super()._try_put_index()
            if self._send_idx > sent:
                seen.append(self._task_info[sent])

    loader: Any = DataLoader(Numbers(), 4, num_workers=2, collate_fn=tuple, prefetch_factor=1)
    batches = list(Watched(loader))
    sent = [found for found in seen if len(found) == 1 and isinstance(found[0], int)]
    given = [found for found in seen if len(found) == 2 or isinstance(found[0], tuple)]

    assert batches == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert sent == [(0,), (1,), (0,)], f"{CHANGED}: _task_info of a batch that was sent"
    assert [data for data, *_ in given] == batches, f"{CHANGED}: what _process_data gets"
    assert [worker for _, *rest in given for worker in rest] in ([], [0, 1, 0]), CHANGED


def test_a_torch_without_one_of_the_names_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ITERATOR.__mro__:
        monkeypatch.delattr(kind, "_try_get_data", raising=False)

    with pytest.raises(Unsupported, match="no _try_get_data any more"):
        opened(DataLoader(Numbers(), num_workers=1))


PRIVATE = {
    name
    for kind in (DataLoader, *ITERATOR.__mro__[:-1])
    for name in vars(kind)
    if name.startswith("_") and not name.startswith("__")
} | set(ATTRIBUTES)


NO_OTHER_NAME = ("torch._ops.", "torch.utils._python_dispatch.", "torch.utils._pytree.")
"""What torch's own documentation has people import for a dispatch mode."""


def private_names(source: str) -> set[str]:
    """Return the private names of torch that a module uses: imported, or of an object other than self."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.ImportFrom, ast.Import)):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [module + alias.name for alias in node.names]
            private = {name for name in names if name.startswith("torch") and "._" in name}
            found |= {name for name in private if not name.startswith(NO_OTHER_NAME)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.utils.data."):
            found |= {node.attr} if node.attr.startswith("_") else set()
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) != "self":
            found |= {node.attr} & PRIVATE
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & PRIVATE
    return found


@pytest.mark.heavy
def test_one_module_alone_uses_private_names_of_torchs_loader() -> None:
    users = {path.stem for path in PACKAGE.rglob("*.py") if private_names(path.read_text())}

    assert users == {"torch_iterators"}


class Telling(Dataset[Any]):
    """A dataset whose samples are the names of what is found as the worker's dataset."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        return found()


class TellingStream(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        yield from (found() for _ in range(4))


def found() -> str:
    info = get_worker_info()
    return type(info.dataset).__name__ if info else "none"


def remember(number: int) -> None:
    global remembered
    remembered = found()


remembered = ""


def telling(samples: list[str]) -> list[str]:
    return [remembered, found(), *samples]


@pytest.mark.parametrize("kind", [Telling, TellingStream])
@pytest.mark.parametrize("sample_seeds", [False, True])
def test_the_users_functions_find_their_own_dataset(run_dir: Path, kind: Any, sample_seeds: bool) -> None:
    loader: DataLoader[Any] = DataLoader(
        kind(), 4, num_workers=1, collate_fn=telling, worker_init_fn=remember
    )
    with RunState.load(run_dir, loader=loader, sample_seeds=sample_seeds) as state:
        batches = list(state.batches())

    assert batches == [[kind.__name__] * 6]


SCRIPT = """
import os, signal, sys
from torch.utils.data import DataLoader, Dataset
from resumable import RunState


class Pids(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return os.getpid(), b"x" * 1_000_000


def as_it_is(samples):
    return samples


if __name__ == "__main__":
    method, folder = sys.argv[1:]
    loader = DataLoader(
        Pids(), num_workers=2, prefetch_factor=20, collate_fn=as_it_is, multiprocessing_context=method
    )
    batches = iter(RunState.load(folder, loader=loader).batches())
    print(*(next(batches)[0][0] for _ in range(2)), flush=True)
    signal.pause()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.heavy
def test_workers_with_full_queues_end_when_their_training_is_killed(
    tmp_path: Path, run_dir: Path, method: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, script, method, run_dir]
    errors = (tmp_path / "errors").open("w")
    training = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    assert training.stdout is not None
    with training, errors:
        assert "starting fresh" in training.stdout.readline()
        workers = [os.pidfd_open(int(pid)) for pid in training.stdout.readline().split()]
        training.send_signal(signal.SIGKILL)
    ended = [fd for fd in workers if select.select([fd], [], [], 60)[0]]
    for fd in workers:
        os.close(fd)

    assert len(workers) == 2
    assert ended == workers


class Slow(Numbers):
    """Samples of which the second comes when nobody wants it any more."""

    def __getitem__(self, index: int) -> int:
        time.sleep(60 * index)
        return index


@pytest.mark.heavy
def test_a_thread_that_waits_for_workers_ends_when_they_are_ended() -> None:
    workers = opened(DataLoader(Slow(), 1, num_workers=1))
    found: list[Any] = []
    # One that would be waited for at the end of the process
    thread = threading.Thread(target=lambda: found.extend(workers), daemon=True)
    thread.start()
    while not found:
        time.sleep(0.01)
    workers.end()
    thread.join(timeout=30)

    assert not thread.is_alive()
    assert found == [0]
    assert [*workers] == []


# Signals while workers start.

NOTED = (signal.SIGTERM, signal.SIGINT)


def _blocked() -> set[Any]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_the_signals_stay_blocked_where_the_resource_tracker_has_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource_tracker._resource_tracker, "_fd", None)
    monkeypatch.setattr(resource_tracker._resource_tracker, "_pid", None)
    view = DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")
    before = _blocked()

    with sheltered(view, NOTED):
        kept = multiprocessing.get_context("spawn").Event()
        assert _blocked() >= {*NOTED}

    del kept
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]
    assert _blocked() == before


def test_a_spawned_worker_begins_with_the_signals_blocked() -> None:
    view = DataLoader(Numbers(), num_workers=1, multiprocessing_context="spawn")
    process = multiprocessing.get_context("spawn").Process(
        target=signal.raise_signal, args=(signal.SIGTERM,), daemon=True
    )

    with sheltered(view, NOTED):
        process.start()
        assert process.pid
        os.kill(process.pid, signal.SIGINT)
    process.join()

    assert process.exitcode == 0


def test_workers_of_a_fork_server_and_the_server_outlive_the_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    # What the other tests preload takes seconds
    monkeypatch.setattr(python_forkserver._forkserver, "_preload_modules", [])
    view = DataLoader(Numbers(), num_workers=1, multiprocessing_context="forkserver")

    ended, servers = [], set()
    for _ in range(2):
        with sheltered(view, NOTED):
            context: Any = view.multiprocessing_context
            process = context.Process(target=signal.raise_signal, args=(signal.SIGTERM,), daemon=True)
            process.start()
            servers.add(forkserver._server()._forkserver_pid)  # type: ignore[attr-defined]
        os.kill(max(servers), signal.SIGTERM)
        process.join()
        ended.append(process.exitcode)

    assert ended == [0, 0]
    assert len(servers) == 1
    assert forkserver._server() is not python_forkserver._forkserver


def test_nothing_is_blocked_where_the_training_notes_no_signals() -> None:
    view = DataLoader(Numbers(), num_workers=1, multiprocessing_context="forkserver")
    given, before = view.multiprocessing_context, _blocked()

    with sheltered(view, ()):
        assert _blocked() == before

    assert view.multiprocessing_context is given
