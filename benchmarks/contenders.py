"""The contenders, each used as its documentation says.

To add one: a subclass of `Contender` in this file, and its name in CONTENDERS.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from . import files
from .training import Parts, tensors_of

Wait = Callable[[], object]
"""Returns when the save is durable, and raises what went wrong."""


class Contender:
    """Saves the parts of a training into a folder, and loads them back into the same objects."""

    name: ClassVar[str]
    about: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    """The modules that it imports."""
    distribution: ClassVar[str] = "torch"
    is_async: ClassVar[bool] = False
    """Whether the training goes on while it saves."""

    def __init__(self, parts: Parts, folder: Path, device: str) -> None:
        folder.mkdir(parents=True)
        self.parts, self.folder, self.device = parts, folder, device
        self.path = folder / "0"
        """The newest save, a file or a folder."""
        self._number = 0
        self._background = ThreadPoolExecutor(1)
        self.prepare()

    def prepare(self) -> None:
        """Make what is made once in a training."""

    def write(self, path: Path) -> Wait | None:
        """Write the state to a path where nothing is; return what waits for it, None if it is there."""
        raise NotImplementedError

    def read(self, path: Path) -> None:
        """Put the state back into the live objects."""
        raise NotImplementedError

    def save(self) -> Wait:
        """Save under a fresh name and make it durable, which few libraries do, where the save is done."""
        self._number += 1
        self.path = self.folder / str(self._number)
        wait = self.write(self.path)
        if wait is None:
            files.flush(self.path)
            return _nothing
        return self._background.submit(_flush_after, wait, self.path).result

    def load(self) -> None:
        """Load the newest save."""
        self.read(self.path)

    def tidy(self) -> None:
        """Remove what was saved before, outside of any measurement."""
        for path in self.folder.iterdir():
            files.remove(path)

    def close(self) -> None:
        """Let go of everything."""
        self._background.shutdown()

    def state(self) -> dict[str, Any]:
        """Return the state of every part."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def apply(self, state: Mapping[str, Any]) -> None:
        """Give every part its state."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def _nothing() -> None: ...


def _flush_after(wait: Wait, path: Path) -> None:
    wait()
    files.flush(path)


class Resumable(Contender):
    """This library; nothing is flushed for it."""

    name = "resumable"
    about = "`save()`, `restore()`"
    needs = ("resumable.state",)
    distribution = "torch-resumable"
    is_async = True

    def prepare(self) -> None:
        """Bind the parts to a run."""
        from resumable import RunState

        known = {name: part for name, part in self.parts.items() if name in ("model", "optimizer")}
        extra = {name: part for name, part in self.parts.items() if name not in known}
        with quiet():
            self.run_state = RunState.load(self.folder, extra=extra or None, keep=None, **known)

    def save(self) -> Wait:
        """Save."""
        saved = self.run_state.save()
        self.path = saved.path
        return saved.wait

    def load(self) -> None:
        """Go back to the newest checkpoint, which is verified on the way."""
        with quiet():
            self.run_state.restore("newest")

    def tidy(self) -> None:
        """Keep the newest, of which the next may link what did not change."""
        from resumable.run.policy import Keep

        self.run_state.run.prune(Keep(1), ())

    def close(self) -> None:
        """Close the run."""
        self.run_state.close()
        super().close()


class TorchSave(Contender):
    """What most scripts do."""

    name = "torch.save"
    about = "`torch.save`, fsync; `torch.load`, `load_state_dict`"

    def write(self, path: Path) -> None:
        """Save one file."""
        torch.save(self.state(), path)

    def read(self, path: Path) -> None:
        """Load it."""
        self.apply(torch.load(path, weights_only=True))


class TorchSaveTuned(Contender):
    """The same with the options that make it fast."""

    name = "torch.save, tuned"
    about = "no crc32, pinned copies from the GPU, fsync; `torch.load(mmap=True)`, every page touched"
    needs = ("torch.utils.serialization.config",)

    def write(self, path: Path) -> None:
        """Save one file."""
        from torch.utils.serialization import config

        options: Any = config
        with options.patch({"save.compute_crc32": False, "save.use_pinned_memory_for_d2h": True}):
            torch.save(self.state(), path)

    def read(self, path: Path) -> None:
        """Map the file; an optimizer keeps mapped tensors, of which nothing has been read yet."""
        self.apply(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
        for tensor in tensors_of(self.parts):
            if tensor.device.type == "cpu":
                tensor.detach().reshape(-1).view(torch.uint8)[::4096].sum()


class Safetensors(Contender):
    """One file of tensors, plain values beside it; copied straight into the live tensors."""

    name = "safetensors"
    about = "`save_file`, fsync; `safe_open`, `copy_` into the live tensors"
    needs = ("safetensors.torch",)
    distribution = "safetensors"

    def write(self, path: Path) -> None:
        """Save a folder."""
        from safetensors.torch import save_file

        path.mkdir()
        tensors: dict[str, torch.Tensor] = {}
        plain = _without_tensors(self.state(), "", tensors)
        save_file(tensors, path / "tensors.safetensors")
        (path / "plain.json").write_text(json.dumps(plain))

    def read(self, path: Path) -> None:
        """Copy; what json made of the plain values is not put back, which is to its advantage."""
        from safetensors import safe_open

        live: dict[str, torch.Tensor] = {}
        _without_tensors(self.state(), "", live)
        json.loads((path / "plain.json").read_text())
        with safe_open(path / "tensors.safetensors", "pt", device=self.device) as file, torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(file.get_tensor(name))


def _without_tensors(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a tree's plain values; its tensors go into the dict under their paths."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return None
    if isinstance(value, Mapping):
        return {str(key): _without_tensors(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
    return value


class Dcp(Contender):
    """torch.distributed.checkpoint with one process."""

    name = "dcp.save"
    about = "`torch.distributed.checkpoint.save`; `load` in place"
    needs = ("torch.distributed.checkpoint",)

    def prepare(self) -> None:
        """Make the group of one process that async_save asks for."""
        distributed: Any = importlib.import_module("torch.distributed")
        if not distributed.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo"
            distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)

    def write(self, path: Path) -> Wait | None:
        """Save a folder."""
        _dcp().save(self.state(), checkpoint_id=path)
        return None

    def read(self, path: Path) -> None:
        """Load into the live tensors, then the plain values."""
        state = self.state()
        _dcp().load(state, checkpoint_id=path)
        self.apply(state)


def _dcp() -> Any:
    return importlib.import_module("torch.distributed.checkpoint")


class DcpAsync(Dcp):
    """Its background save as it comes."""

    name = "dcp.async_save"
    about = "`async_save` as it comes"
    is_async = True

    def write(self, path: Path) -> Wait:
        """Save in the background."""
        saved: Any = _dcp().async_save(self.state(), checkpoint_id=path)
        return partial(saved.result)


class DcpThread(Dcp):
    """Its background save at its best: staged in the background too, into memory that is kept."""

    name = "dcp.async_save, thread"
    about = "`async_save`, staging in the background into kept memory (pinned on a GPU), a thread writes"
    is_async = True
    kind: ClassVar[str] = "THREAD"

    def prepare(self) -> None:
        """Make the stager, and wait for it before the optimizer writes, as nothing else does."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().prepare()
        on_gpu = self.device == "cuda"
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=True,
                use_async_staging=True,
                use_non_blocking_copy=on_gpu,
            )
        )
        self._staged: Wait = _nothing
        optimizer = self.parts.get("optimizer")
        self._hook = optimizer and optimizer.register_step_pre_hook(lambda *_: self._await_staging())

    def _await_staging(self) -> None:
        staged, self._staged = self._staged, _nothing
        staged()

    def write(self, path: Path) -> Wait:
        """Save in the background."""
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

        saved = _dcp().async_save(
            self.state(),
            checkpoint_id=path,
            async_stager=self.stager,
            async_checkpointer_type=AsyncCheckpointerType[self.kind],
        )
        if not isinstance(saved, AsyncSaveResponse):
            return partial(saved.result)
        self._staged = saved.staging_completion.result
        return saved.upload_completion.result

    def close(self) -> None:
        """Take the hook away, and let go of the memory."""
        if self._hook:
            self._hook.remove()
        self.stager.close()
        super().close()


class DcpProcess(DcpThread):
    """The same, written by a process."""

    name = "dcp.async_save, process"
    about = "`async_save`, staging in the background into kept shared memory, a process writes"
    kind = "PROCESS"

    def write(self, path: Path) -> Wait:
        """Save in the background; the process, which the first save starts, logs to where stderr is."""
        muted = contextlib.ExitStack()
        muted.enter_context(no_stderr())
        wait = super().write(path)

        def wait_and_unmute() -> None:
            with muted:
                wait()

        return wait_and_unmute


class Snapshot(Contender):
    """torchsnapshot."""

    name = "torchsnapshot"
    about = "`Snapshot.take`, fsync; `restore`"
    needs = ("torchsnapshot",)
    distribution = "torchsnapshot"

    def write(self, path: Path) -> Wait | None:
        """Save a folder."""
        from torchsnapshot import Snapshot as Taken

        Taken.take(str(path), dict(self.parts))
        return None

    def read(self, path: Path) -> None:
        """Load into the live objects."""
        from torchsnapshot import Snapshot as Taken

        Taken(str(path)).restore(dict(self.parts))


class SnapshotAsync(Snapshot):
    """Its background save."""

    name = "torchsnapshot, async"
    about = "`Snapshot.async_take`, fsync in the background; `restore`"
    is_async = True

    def write(self, path: Path) -> Wait:
        """Save in the background."""
        from torchsnapshot import Snapshot as Taken

        return partial(Taken.async_take(str(path), dict(self.parts)).wait)


class Accelerate(Contender):
    """Accelerate."""

    name = "accelerate"
    about = "`save_state`, fsync; `load_state`"
    needs = ("accelerate",)
    distribution = "accelerate"

    def prepare(self) -> None:
        """Tell it the parts."""
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=self.device == "cpu")
        for part in self.parts.values():
            if isinstance(part, (nn.Module, torch.optim.Optimizer)):
                self.accelerator.prepare(part)
            else:
                self.accelerator.register_for_checkpointing(part)

    def write(self, path: Path) -> None:
        """Save a folder."""
        self.accelerator.save_state(str(path))

    def read(self, path: Path) -> None:
        """Load it."""
        self.accelerator.load_state(str(path))


class Fabric(Contender):
    """Lightning Fabric."""

    name = "lightning fabric"
    about = "`Fabric.save`, fsync; `Fabric.load`"
    needs = ("lightning.fabric",)
    distribution = "lightning"

    def prepare(self) -> None:
        """Make it."""
        from lightning.fabric import Fabric as Made

        self.fabric = Made(accelerator=self.device, devices=1)

    def write(self, path: Path) -> None:
        """Save one file."""
        self.fabric.save(path, dict(self.parts))

    def read(self, path: Path) -> None:
        """Load into the live objects."""
        self.fabric.load(path, dict(self.parts))


CONTENDERS: dict[str, type[Contender]] = {
    contender.name: contender
    for contender in (
        Resumable,
        TorchSave,
        TorchSaveTuned,
        Safetensors,
        Dcp,
        DcpAsync,
        DcpThread,
        DcpProcess,
        Snapshot,
        SnapshotAsync,
        Accelerate,
        Fabric,
    )
}


def missing(name: str) -> str | None:
    """Import what a contender needs; return why it cannot be."""
    for module in CONTENDERS[name].needs:
        try:
            importlib.import_module(module)
        except Exception as exc:
            # Not only ImportError: a library that is too old for this torch fails in other ways.
            return f"{type(exc).__name__}: {exc}"
    return None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Print nothing."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def no_stderr() -> Iterator[None]:
    """Let stderr, also of the processes that are started in the meantime, lead nowhere."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
