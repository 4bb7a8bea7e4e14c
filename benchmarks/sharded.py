"""What saving and loading a sharded training cost, next to torch's distributed checkpoint.

python -m benchmarks.sharded --quick             # some minutes on two cores
python -m benchmarks.sharded                     # as in benchmarks/README.md
python -m benchmarks.sharded --from FILE.json    # show a stored result again
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from resumable.files import sharded_tensor
from resumable.parts import box_writers, boxes, sharding

from . import machine
from .ranks import Team
from .ratios import middle, quartiles
from .rounds import Figures, Values, in_turns, put_garbage_aside, tell
from .training import Gpt

README = Path(__file__).with_name("README.md")
MESHES = ("fsdp", "hsdp", "tp", "fsdp-tp")
OURS, RAW = "resumable", "raw write"
TORCH_CHECKPOINTING = ("torch_checkpointing", "torch_checkpointing, sync")
DCP = ("dcp.save", "dcp.async_save, thread", "dcp.async_save, process", "DCP, safetensors")
SAVERS = (RAW, *DCP, *TORCH_CHECKPOINTING, OURS)
SIMULATED = (8, 64, 256, 1024)
_seconds = time.perf_counter
_dist: Any = torch.distributed


def shard(model: nn.Module, kind: str) -> None:
    """Shard a GPT over all processes of the group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = _dist.get_world_size()
    shapes = {"tp": (1, size), "fsdp-tp": (size // 2, 2)}
    mesh = init_device_mesh("cpu", shapes.get(kind, (size, 1)), mesh_dim_names=("dp", "tp"))
    blocks: Any = model.blocks
    if "tp" in kind:
        for block in blocks:
            parallelize_module(block, mesh["tp"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    if kind == "tp":
        return
    over = mesh["dp"]
    if kind == "hsdp":
        over = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for block in blocks:
        fully_shard(block, mesh=over)
    fully_shard(model, mesh=over)


def begin(here: Any, kind: str, width: int, folder: Path) -> int:
    """Make a sharded training with moments; return the bytes that this process has of it."""
    end(here)
    torch.manual_seed(0)
    here.model = Gpt(width, 6, 4096)
    shard(here.model, kind)
    # Kernels for several tensors at once cannot take those of two meshes together.
    here.optimizer = torch.optim.AdamW(here.model.parameters(), 1e-6, foreach=False)
    _step(here)
    here.kind, here.folder, here.background = kind, folder, None
    here.size = sum(map(sharded_tensor.size, _tensors(here)))
    put_garbage_aside()
    return int(here.size)


def end(here: Any) -> None:
    """Let go of the training."""
    if getattr(here, "state", None):
        here.state.close()
    for manager in getattr(here, "managers", {}).values():
        manager.close()
    here.managers = {}
    here.state = here.model = here.optimizer = None


def _tensors(here: Any) -> list[torch.Tensor]:
    moments = [value for state in here.optimizer.state.values() for value in state.values()]
    return [*here.model.parameters(), *moments]


def _step(here: Any) -> None:
    for parameter in here.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    here.optimizer.step()


def _dcp_state(here: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(here.model, here.optimizer)
    return {"model": model, "optimizer": optimizer}


def _flat(here: Any) -> dict[str, Any]:
    """Return what a safetensors file can hold: tensors by name."""
    found = {"": _dcp_state(here)}
    while nested := [name for name, value in found.items() if isinstance(value, dict)]:
        for name in nested:
            found |= {f"{name}.{key}".lstrip("."): value for key, value in found.pop(name).items()}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def save(here: Any, name: str, folder: Path) -> tuple[float, float]:
    """Save after a step; return the seconds until the call returned, and until all is durable."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    _step(here)
    if name == OURS and here.state is None:
        from resumable import RunState

        run = here.folder / f"run-{here.kind}"
        here.state = RunState.load(run, model=here.model, optimizer=here.optimizer, keep=1)
        _step(here)
        here.state.save().wait()
        _step(here)
    if name == RAW and here.rank == 0:
        folder.mkdir(parents=True)
    if name.startswith("dcp.async") and here.background is None:
        here.background = _dist.new_group(backend="gloo")
    here.meet()
    started = _seconds()
    wait: Callable[[], object] = _nothing_more
    found: Any = None
    if name == OURS:
        wait = here.state.save().wait
    elif name == RAW:
        _write_raw(folder / str(here.rank), here.size)
    elif name == "dcp.save":
        dcp.save(_dcp_state(here), checkpoint_id=str(folder))
    elif name == "DCP, safetensors":
        writer: Any = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)  # type: ignore[no-untyped-call]
        dcp.save(_flat(here), storage_writer=writer)
    elif name in TORCH_CHECKPOINTING:
        if name not in here.managers:
            here.managers[name] = _manager(is_sync=name.endswith("sync"))
        found = here.managers[name].save(str(folder), {"state": _flat(here)})
        wait = found.result if found is not None else _nothing_more
    else:
        kind = AsyncCheckpointerType.PROCESS if "process" in name else AsyncCheckpointerType.THREAD
        found = dcp.async_save(
            _dcp_state(here),
            checkpoint_id=str(folder),
            process_group=here.background,
            async_checkpointer_type=kind,
        )
        wait = getattr(found, "upload_completion", found).result
    called = _seconds() - started
    wait()
    return called, _seconds() - started


def _nothing_more() -> None: ...


def _manager(*, is_sync: bool) -> Any:
    """Return the manager of torch_checkpointing, with what it needs on a CPU."""
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.staging import CheckpointStagerConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    in_background = AsyncCheckpointSaverConfig(staging_config=staging)
    return CheckpointManager(
        CheckpointManager.Config(
            # Direct writes fail on ext4 here.
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            items={"state": ItemSpec()},
            save=SyncCheckpointSaverConfig() if is_sync else in_background,
        )
    )


def _write_raw(path: Path, size: int) -> None:
    piece = memoryview(bytearray(os.urandom(1 << 20) * 16))
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(fd, 0, size)
    for at in range(0, size, len(piece)):
        os.pwrite(fd, piece[: size - at], at)
    os.fsync(fd)
    os.close(fd)


def load(here: Any, name: str, folder: Path) -> float:
    """Load a checkpoint of any mesh into the live objects of this one; return the seconds."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    if name == OURS and here.state is None:
        from resumable import RunState

        run = here.folder / f"into-{here.kind}"
        here.state = RunState.load(run, model=here.model, optimizer=here.optimizer, keep=1)
    here.meet()
    started = _seconds()
    if name == OURS:
        here.state.restore(str(folder))
    elif name == "DCP, safetensors":
        reader: Any = dcp.HuggingFaceStorageReader(str(folder))  # type: ignore[no-untyped-call]
        dcp.load(_flat(here), storage_reader=reader)
    else:
        state = _dcp_state(here)
        dcp.load(state, checkpoint_id=str(folder))
        set_state_dict(
            here.model,
            here.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
    here.meet()
    return _seconds() - started


def simulate(ranks: int) -> Figures:
    """Plan who writes what of a model with the names and shapes of one with 7 billion parameters."""
    told = [_told(rank, ranks) for rank in range(ranks)]
    text = json.dumps(told[0])
    started = time.process_time()
    sharding.decided(told)
    return {"plan": time.process_time() - started, "table": float(len(text))}


def _told(rank: int, ranks: int) -> Any:
    """Return what a process of an FSDP mesh tells of its boxes."""
    rows = []
    for name, shape in _llama().items():
        each = -(-shape[0] // ranks)
        begin = min(rank * each, shape[0])
        count = min(each, shape[0] - begin)
        mine = [boxes.Box((begin, *[0] * (len(shape) - 1)), (count, *shape[1:]), ())] if count else []
        rows.append([name, [*shape], 4, box_writers.table(mine), [0, "0123456789abcdef", ranks]])
    return [rows, [rank, ranks], [0, "0123456789abcdef", ranks], "", {}, 0]


def _llama() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed.weight": (32000, 4096), "head.weight": (32000, 4096)}
    for layer in range(32):
        for name in ("q", "k", "v", "o"):
            found[f"layers.{layer}.attention.{name}.weight"] = (4096, 4096)
        found |= {f"layers.{layer}.mlp.{name}.weight": (11008, 4096) for name in ("gate", "up")}
        found[f"layers.{layer}.mlp.down.weight"] = (4096, 11008)
        found |= {f"layers.{layer}.norm{number}.weight": (4096,) for number in (1, 2)}
    return found


# Measuring.


def measure(width: int, rounds: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Return all figures: saves, loads from every mesh into every other, memory, the time of a plan."""
    errors: dict[str, dict[str, str]] = {}
    found: dict[str, Any] = {"saves": {}, "loads": {}, "memory": {}, "plan": {}, "errors": errors}
    for kind in MESHES:
        team = Team(ranks)
        size = sum(team.ask(begin, kind, width, folder))
        found["megabytes"] = size / 1e6 if kind == "fsdp" else found["megabytes"]
        found["saves"][kind] = _saves(team, kind, folder, rounds, errors)
        for name in SAVERS[1:]:
            if name not in errors:
                found["memory"].setdefault(kind, {})[name] = _memory(team, kind, name, width, folder)
        team.ask(end)
        team.close()
    for here in MESHES:
        for there in MESHES:
            team = Team(ranks)
            team.ask(begin, there, width, folder)
            found["loads"][f"{here} into {there}"] = _loads(team, here, there, folder, rounds, errors)
            team.ask(end)
            team.close()
    tell("planning")
    found["plan"] = {str(count): simulate(count) for count in SIMULATED}
    return found


def _saves(team: Team, kind: str, folder: Path, rounds: int, errors: Any) -> dict[str, Values]:
    def one(name: str, number: int) -> Figures:
        where = folder / "kept" / f"{kind}-{SAVERS.index(name)}"
        shutil.rmtree(where, ignore_errors=True)
        calls, durables = zip(*team.ask(save, name, where), strict=True)
        return {"call": max(calls), "durable": max(durables)}

    return in_turns(f"saves, {kind}", {n: partial(one, n) for n in SAVERS}, rounds, 600, errors)


def _memory(team: Team, kind: str, name: str, width: int, folder: Path) -> float:
    """Return the most bytes that saving takes beyond the training's, by those of the training."""
    size = sum(team.ask(begin, kind, width, folder))
    before = team.peak(_nothing)
    peak = max(team.peak(save, name, folder / f"memory-{number}") for number in range(2))
    for number in range(2):
        shutil.rmtree(folder / f"memory-{number}", ignore_errors=True)
    return (peak - before) / size


def _nothing(here: Any) -> None:
    # Long enough to be seen.
    time.sleep(0.1)


def _loads(team: Team, here: str, there: str, folder: Path, rounds: int, errors: Any) -> dict[str, Values]:
    saved = {name: folder / "kept" / f"{here}-{SAVERS.index(name)}" for name in SAVERS}
    saved[OURS] = max((folder / f"run-{here}" / "checkpoints").glob("0*"))

    def one(name: str, number: int) -> Figures:
        return {"seconds": max(team.ask(load, name, saved[name]))}

    names = [name for name in ("dcp.save", "DCP, safetensors", OURS) if name not in errors]
    jobs = {name: partial(one, name) for name in names}
    return in_turns(f"loads, {here} into {there}", jobs, rounds, 120, errors)


def pages(result: Mapping[str, Any]) -> str:
    """Return the tables."""
    lines = [f"{result['megabytes']:.0f} MB of weights and moments, {result['ranks']} processes", ""]
    lines += [_row("save", [f"{kind}" for kind in MESHES])]
    for what in ("call", "durable"):
        for name in SAVERS:
            values = [result["saves"][kind].get(name, {}).get(what, []) for kind in MESHES]
            lines.append(_row(f"{what}: {name}", [_seconds_of(some) for some in values]))
    for name in SAVERS[1:]:
        values = [result["memory"].get(kind, {}).get(name) for kind in MESHES]
        lines.append(_row(f"memory: {name}", ["-" if one is None else f"{one:.2f}" for one in values]))
    lines += ["", _row("load", ["dcp", "DCP, safetensors", OURS, "ours / dcp"])]
    for pair, found in result["loads"].items():
        some = [found.get(name, {}).get("seconds", []) for name in ("dcp.save", "DCP, safetensors", OURS)]
        ratio = f"{middle(some[2]) / middle(some[0]):.2f}" if some[0] and some[2] else "-"  # type: ignore[operator]
        lines.append(_row(pair, [*map(_seconds_of, some), ratio]))
    lines += ["", _row("planning", ["seconds of a processor", "bytes from each"])]
    for count, figures in result["plan"].items():
        lines.append(_row(f"{count} processes", [f"{figures['plan']:.2f}", f"{figures['table']:.0f}"]))
    return "\n".join([*lines, *(f"{name}: {text}" for name, text in result["errors"].items())])


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:36}" + "".join(f"{cell:>24}" for cell in cells)


def _seconds_of(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = quartiles(values)
    return f"{middle(values):.3f} ({low:.3f}-{high:.3f})"


def main() -> None:
    """Measure, or read a stored result; show it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smaller state and fewer rounds")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path(), help="the disk to measure (here)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"))
    parser.add_argument("--from", dest="stored", type=Path, metavar="JSON", help="measure nothing")
    arguments = parser.parse_args()
    if arguments.stored:
        print(pages(json.loads(arguments.stored.read_text())))
        return
    warnings.simplefilter("ignore")
    logging.disable()
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=arguments.folder) as folder:
        rounds = 3 if arguments.quick else 5
        result = measure(256 if arguments.quick else 640, rounds, arguments.ranks, Path(folder).absolute())
        result |= {
            "ranks": arguments.ranks,
            "rounds": rounds,
            "machine": machine.describe(Path(folder), "cpu"),
        }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "sharded-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    print(pages(result))


if __name__ == "__main__":
    main()
