"""Each error of the library and a warning, made to happen: the examples of docs/errors.md."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import Preempt, Ranks, ResumableError, Run, RunState, load_weights
from resumable import errors as kinds
from resumable.files import strict_json

EXP = "runs/exp"


def examples() -> dict[str, str]:
    """Return for each error and for the warning, by its name, a message that the library gives."""
    here = os.getcwd()
    found = {}
    for kind, provoke in PROVOKE.items():
        with tempfile.TemporaryDirectory() as folder, _quiet():
            os.chdir(folder)
            try:
                found[kind.__name__] = _plain(_message(kind, provoke), folder)
            finally:
                os.chdir(here)
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _message(kind: type[Exception], provoke: Callable[[], str | None]) -> str:
    try:
        told = provoke()
    except kind as error:
        return str(error)
    if told is None:
        raise AssertionError(f"{provoke.__name__} raises no {kind.__name__} any more")
    return told


def _plain(text: str, folder: str) -> str:
    """Return a message without what differs from one time to the next."""
    text = text.replace(f"file://{folder}", "file:///mnt").replace(f"{folder}/", "")
    text = re.sub(r"process \d+ on [\w-]+(\.\w[\w-]*)*", "process 4711 on node7", text)
    # A process may be killed before or after the other has heard of its step.
    text = re.sub(r"(?<=heard of at epoch 0, batch 0, step )1\b", "0", text)
    text = re.sub(r"(?<=\.stage-\d{6}-)[0-9a-f]{8}\b", "5e7c415b", text)
    return re.sub(r"\b[0-9a-f]{64}\b", lambda match: "000..." if int(match[0], 16) == 0 else "3d7...", text)


def _parts(outputs: int = 2) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, outputs))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def _saved(count: int = 1) -> None:
    with RunState.load(EXP, **_parts()) as state:
        for _ in state.steps(count):
            state.save().wait()


def _usage() -> None:
    RunState.load(EXP, **_parts(), every="10 mins", keep=0)


def _not_a_run() -> None:
    Path(EXP).parent.mkdir()
    Path(EXP).write_text("notes")
    RunState.load(EXP, **_parts())


def _in_use() -> str:
    _saved()
    with RunState.load(EXP, **_parts()):
        return _in_children(1, lambda rank: RunState.load(EXP, **_parts()))[0]


def _exists() -> None:
    _saved(3)
    RunState.load(EXP, **_parts(), resume="never")


def _not_found() -> None:
    _saved(2)
    RunState.load(EXP, **_parts(), resume=41)


def _damaged() -> None:
    _saved()
    file = Path(EXP, "best" if Path(EXP, "best").exists() else "newest", "model.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    RunState.load(EXP, **_parts(), resume=1)


def _not_expected() -> None:
    _saved()
    RunState.load(EXP, **_parts(), resume=1, expect="sha256:" + "0" * 64)


def _cannot_read() -> None:
    _saved()
    found = Run(EXP).checkpoints()[-1]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        found.verify()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _too_new() -> None:
    _saved()
    file = Path(EXP, "run.json")
    file.write_bytes(strict_json.seal({**strict_json.unseal(file.read_bytes()), "format": 3}))
    RunState.load(EXP, **_parts())


def _mismatch() -> None:
    _saved()
    RunState.load(EXP, **_parts(outputs=3))


def _cannot_store() -> None:
    RunState.load(EXP, **_parts(), extra={"schedule": {"warmup": print}}).save()


def _unsupported() -> None:
    torch.save({"model": nn.Linear(2, 4)}, "whole-model.pt")
    load_weights(nn.Linear(2, 4), "whole-model.pt")


def _ranks_differ() -> str:
    return _in_children(2, _train_apart)[0]


def _train_apart(rank: int) -> None:
    state = RunState.load(EXP, **_parts(), ranks=Ranks(timeout=20))
    for _ in state.steps(2 if rank else 1):
        pass
    state.save().wait()
    dist.barrier()


def _rank_lost() -> str:
    return _in_children(2, _train_and_die)[0]


def _train_and_die(rank: int) -> None:
    state = RunState.load(EXP, **_parts(), ranks=Ranks(timeout=3))
    for _ in state.steps(1):
        pass
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    state.save().wait()


def _step(images: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(images).square().mean().backward()
    optimizer.step()


def _preempted() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=2)
    parts = _parts()
    with RunState.load(EXP, **parts, loader=loader, preempt=Preempt(on_preempt="raise")) as state:
        for _ in state.epochs(4):
            for (images,) in state.batches():
                _step(images, **parts)
                if state.step == 6:
                    os.kill(os.getpid(), signal.SIGTERM)


def _save_failed() -> None:
    with RunState.load(EXP, **_parts()) as state:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
        try:
            state.save().wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _remote() -> None:
    Path("backup/exp").mkdir(parents=True)
    Path("backup/exp/run.json").write_text("{}")
    RunState.load(EXP, **_parts(), remote=Path("backup/exp").absolute().as_uri())


def _diverged() -> None:
    with RunState.load(EXP, **_parts()) as state:
        for _ in state.steps(1):
            state.spiked(torch.tensor(float("nan")))


def _warned() -> None:
    warnings.simplefilter("error", kinds.ResumableWarning)
    model, temperatures = nn.Linear(1, 1), iter([1.0, 0.9])
    with RunState.load(EXP, model=model) as state:
        for _ in state.steps(2):
            model(torch.ones(1)).div(next(temperatures)).backward()
            state.save()


PROVOKE: dict[type[Exception], Callable[[], str | None]] = {
    kinds.UsageError: _usage,
    kinds.NotARun: _not_a_run,
    kinds.RunInUse: _in_use,
    kinds.RunExists: _exists,
    kinds.CheckpointNotFound: _not_found,
    kinds.CheckpointDamaged: _damaged,
    kinds.CheckpointNotExpected: _not_expected,
    kinds.CannotRead: _cannot_read,
    kinds.FormatTooNew: _too_new,
    kinds.StateMismatch: _mismatch,
    kinds.CannotStore: _cannot_store,
    kinds.Unsupported: _unsupported,
    kinds.RanksDiffer: _ranks_differ,
    kinds.RankLost: _rank_lost,
    kinds.Preempted: _preempted,
    kinds.SaveFailed: _save_failed,
    kinds.RemoteError: _remote,
    kinds.Diverged: _diverged,
    kinds.ResumableWarning: _warned,
}


def _in_children(size: int, body: Callable[[int], object]) -> list[str]:
    """Return what each process of a group printed, by the error that ended it."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    processes = [
        context.Process(target=_told, args=(rank, size, pipes[rank][1], body)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    told = []
    for ours, _ in pipes:
        with contextlib.suppress(EOFError):
            told.append(ours.recv())
    for process in processes:
        process.join()
    return told


def _told(rank: int, size: int, answer: Any, body: Callable[[int], object]) -> None:
    if size > 1:
        dist.init_process_group("gloo", f"file://{os.getcwd()}/store", rank=rank, world_size=size)
    try:
        body(rank)
    except ResumableError as error:
        answer.send(str(error))
    # What the training has left behind is not to be closed in good order
    os._exit(0)


if __name__ == "__main__":
    for name, message in examples().items():
        print(f"--- {name}\n{message}")
