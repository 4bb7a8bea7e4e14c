"""A training that is killed and resumes: the proof on your own machine, and the documentation's example."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ..files import codec, tensor_file
from ..state import RunState
from ..terminal import TERMINAL

EPOCHS = 4
KILL_AT = (29, 44)
"""Steps at which the training is killed: each in mid-epoch, some way after a save of that epoch."""


class Shapes(Dataset[tuple[torch.Tensor, int]]):
    """Noisy pictures of bars, upright or lying, moved at random each time they are read."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.zeros(1, 16, 16)
        image[:, 6:9, 2:14] = 1.0
        label = index % 2
        moved = torch.roll(image, int(torch.randint(-4, 5, ())), dims=1)
        return (moved.mT if label else moved) + 0.5 * torch.randn(1, 16, 16), label


def train(run_dir: Path) -> None:
    """Train to the end, from wherever the run in `run_dir` stands."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 2)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    scaler = torch.amp.GradScaler("cpu")
    loader = DataLoader(Shapes(), batch_size=32, shuffle=True)

    state = RunState.load(
        run_dir,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        loader=loader,
        minimize="loss",
    )
    for _ in state.epochs(EPOCHS):
        for images, labels in state.batches():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            if state.step % 5 == 0:
                state.save()
            print("step", state.step, flush=True)
            # The parent answers, or kills this process just here.
            sys.stdin.readline()
        scheduler.step()
        state.save(loss=loss.detach())
    state.close()
    states = [part.state_dict() for part in (model, optimizer, scheduler, scaler)]
    print("digest", _digest({"states": states, "next": torch.rand(4)}), flush=True)


def _digest(tree: object) -> str:
    encoded = codec.encode(tree)
    hasher = xxhash.xxh3_128(repr(encoded.json).encode())
    for tensor in encoded.tensors.values():
        hasher.update(tensor_file.as_bytes(tensor))
    return hasher.hexdigest()


def _start(run_dir: Path, kill_at: int | None = None) -> str | None:
    """Run the training in a child process; return its digest, or None if it was killed on the way."""
    command = [sys.executable, "-m", "resumable.cli.demo", str(run_dir)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as child:
        assert child.stdin
        assert child.stdout
        for line in child.stdout:
            word, _, value = line.strip().partition(" ")
            if word == "digest":
                return value
            if word == "step" and int(value) == kill_at:
                child.kill()
                child.wait()
                TERMINAL.recover()
                print(f"   killed (SIGKILL) at step {value}", flush=True)
                return None
            if word == "step":
                print(file=child.stdin, flush=True)
            else:
                _print(line)
    raise RuntimeError(f"{' '.join(command)} ended with exit code {child.returncode}")


def _print(line: str) -> None:
    width = shutil.get_terminal_size().columns
    print(textwrap.fill(line, width, initial_indent="   ", subsequent_indent="     "), flush=True)


class Digests(NamedTuple):
    """All that each of the two trainings has ended with."""

    straight: str | None
    killed: str | None


def show(folder: Path | None = None) -> Digests:
    """Train once without a stop and once killed twice, and print what happens."""
    with tempfile.TemporaryDirectory(prefix="resumable-demo-") as temporary:
        where = folder or Path(temporary)
        print("A conv net with dropout, augmentation, AMP and a schedule is trained, 64 steps.\n")
        print("1. never stopped")
        straight = _start(where / "straight")
        print(f"   digest {straight}\n")
        print("2. killed twice, and each time the same command again")
        for step in KILL_AT:
            _start(where / "killed", kill_at=step)
        killed = _start(where / "killed")
        print(f"   digest {killed}\n")
    if straight != killed:
        print("NOT equal: please report this, with the output of `python -m torch.utils.collect_env`.")
    else:
        print("Equal, bit for bit: weights, optimizer, schedule, scaler, and random numbers.")
    if folder:
        print(f"Look at it: resumable ls {where / 'killed'}")
    return Digests(straight, killed)


if __name__ == "__main__":
    train(Path(sys.argv[1]))
