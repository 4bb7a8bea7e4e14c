"""A tiny training, every state of which is known: what continues has to be one of them, to the last bit."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import compare
import torch
from grouped import grouped
from sharded_training import gathered, shard

from resumable import Run, RunState

STEPS = 8
DEBRIS = re.compile(r"(\..*)-[0-9a-f]{8}")
"""What a kill leaves behind, and the name that it has without its random end."""


class Model(torch.nn.Module):
    """Most of it is frozen, and so lies in a file that is linked from checkpoint to checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(3, 350).requires_grad_(False)
        self.head = torch.nn.Linear(350, 2)

    def forward(self, batch: torch.Tensor) -> Any:
        return self.head(self.body(batch))


class Training(NamedTuple):
    """What a script has in its hands."""

    model: Model
    optimizer: torch.optim.SGD
    seen: list[float]

    def step(self) -> None:
        loss = self.model(torch.randn(4, 3)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seen.append(loss.item())

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "extra": {"seen": self.seen}}

    def digest(self) -> bytes:
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        tensors = [*map(gathered, [*self.model.state_dict().values(), *momenta]), torch.get_rng_state()]
        return b"".join(t.numpy().tobytes() for t in tensors) + repr(self.seen).encode()


def fresh(*, sharded: bool = False) -> Training:
    """Return the training as every start of its script makes it; all processes train on the same data."""
    torch.manual_seed(0)
    model = Model()
    if sharded:
        shard(model, f"fsdp-{torch.distributed.get_world_size()}")
    return Training(model, torch.optim.SGD(model.head.parameters(), lr=0.01, momentum=0.9), [])


@functools.cache
def uninterrupted() -> list[bytes]:
    """Return what the training is after so many steps, in a loop that knows nothing of this library."""
    # Whoever asks first is in the middle of a training of its own
    with torch.random.fork_rng(devices=[]):
        training = fresh()
        digests = [training.digest()]
        for _ in range(STEPS + 2):
            training.step()
            digests.append(training.digest())
    return digests


def load(run_dir: Path | str, *, sharded: bool = False, **options: Any) -> tuple[Training, RunState]:
    """Start the script: fresh, or from what is there, up to where its loop begins."""
    training = fresh(sharded=sharded)
    state = RunState.load(
        run_dir, **training.parts(), **grouped(**{"minimize": "loss", "keep": 1, **options})
    )
    state._position.streams.put_back()
    return training, state


def save_next(training: Training, state: RunState, loss: float) -> None:
    """Train one step and save it; it is durable when this returns."""
    for _ in state.steps(state.step + 1):
        training.step()
        state.save(loss=loss).wait()


def what_differs(training: Training, step: int) -> str:
    """Return what first differs from the training to which nothing ever happened, after so many steps."""
    now, known = compare.trail_of(step, training.parts(), ["torch"]), fresh()
    for _ in range(step):
        known.step()
    return compare.first(compare.trail_of(step, known.parts(), ["torch"]), now)


def assert_stands_at(training: Training, state: RunState, step: int) -> None:
    """Compare every bit with the training to which nothing ever happened."""
    assert state.step == step
    assert training.digest() == uninterrupted()[step], what_differs(training, step)


def assert_goes_on(run_dir: Path, step: int, **options: Any) -> None:
    """Resume twice in a row, each time from the newest state there is, and verify all of the run."""
    for done in (step, step + 1):
        training, state = load(run_dir, **options)
        with state:
            assert_stands_at(training, state, done)
            assert debris(run_dir) == []
            assert_all_verify(state.run)
            save_next(training, state, 3.0)
            assert_stands_at(training, state, done + 1)
    assert_all_verify(state.run)


def assert_all_verify(run: Run) -> None:
    """Read every byte of every checkpoint that is listed."""
    for number in run.numbers():
        run.open(number).verify()


def debris(run_dir: Path) -> list[Path]:
    """Return what a kill has left."""
    found = [*run_dir.glob("*"), *run_dir.glob("checkpoints/*")]
    return sorted(path for path in found if DEBRIS.fullmatch(path.name))
