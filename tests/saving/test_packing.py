"""Where small tensors lie on the GPU is planned once, for as long as it is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from resumable.files.codec import Encoded
from resumable.saving import gpu_copies
from resumable.saving.gpu_packing import Plan, ToPack
from resumable.saving.snapshot import Snapshot
from tests.support import accelerator
from tests.support.accelerator import Accelerator
from tests.support.gpu_training import Training, held, set_to


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """A modeled GPU, where twelve numbers are a large tensor."""
    accelerator.make_small(monkeypatch)
    with accelerator.installed(monkeypatch) as gpu:
        yield gpu


class Growing(Training):
    """A training whose buffer may be another one in the next save."""

    key = "key"

    def take(self) -> Snapshot:
        tensors = {"weight": self.weight, "buffer": self.buffer}
        return self.image.take({"file": Encoded({}, tensors, {}, (self.key,))})


def saved(training: Training) -> tuple[float, float]:
    """Have the training write a step and its buffer, and return what a save holds."""
    training.step()
    training.write(training.buffer)
    taken = training.take()
    training.step()
    return held(taken)


def plan_of(training: Training) -> object:
    """Return the plan of the last save."""
    return training.image._buffers[training.weight.device]._plan


def test_a_plan_serves_all_saves_of_the_same_tensors(gpu: Accelerator) -> None:
    training = Training(gpu)
    training.buffer = gpu.put(torch.zeros(5))
    assert saved(training) == (2, 3)
    plan = plan_of(training)
    assert plan

    assert [saved(training) for _ in range(3)] == [(5, 6), (8, 9), (11, 12)]
    # Other memory of a tensor needs no other plan.
    training.buffer = gpu.put(torch.zeros(5))
    assert saved(training) == (14, 15)
    assert plan_of(training) is plan


@pytest.mark.parametrize("kind", ["transposed", "longer", "shorter", "halved"])
def test_another_kind_of_tensor_has_another_plan(gpu: Accelerator, kind: str) -> None:
    training = Growing(gpu)
    training.buffer = gpu.put(torch.zeros(2, 3))
    assert saved(training) == (2, 3)
    plan = plan_of(training)
    shape = {"longer": (7, 3), "shorter": (1, 3), "halved": (2, 3)}.get(kind, (3, 2))
    other = gpu.put(torch.zeros(shape, dtype=torch.half if kind == "halved" else torch.float32))
    training.buffer = other.t() if kind == "transposed" else other
    training.key = "key" if kind == "transposed" else kind
    training.step()
    gpu.launch("kernel", lambda: set_to(other, 70))
    found = training.take().tensors("file")

    assert found["buffer"].unique().tolist() == [70]
    assert found["buffer"].shape == training.buffer.shape
    assert plan_of(training) is not plan


def test_a_plan_with_samples_is_not_that_without(gpu: Accelerator) -> None:
    training = Training(gpu)
    saved(training)
    plan = plan_of(training)
    training.take().tensors("file")
    # Without a step in between nothing is guarded, and nothing has a sample.
    taken = training.take()
    training.write(training.weight)

    assert taken.tensors("file")["weight"].unique().tolist() == [4]
    assert plan_of(training) is not plan


def test_a_plan_with_fewer_samples_is_another(gpu: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_copies, "_SAMPLES", 10)
    training = Growing(gpu)
    for size, expected in ((100, (2, 3)), (27, (5, 6))):
        training.weight, training.key = gpu.put(torch.zeros(size)), f"{size}"
        training.optimizer.param_groups[0]["params"] = [training.weight]
        assert saved(training) == expected


def test_rows_of_two_files_are_apart_where_numbers_would_lie_across() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    place = 16 - memory.data_ptr() % 16
    views = [
        memory[place + 14 : place + 16].view(torch.half),
        memory[place + 16 : place + 24].view(torch.float),
    ]
    sources = [torch.ones(1, dtype=torch.half), torch.full([2], 3.0)]
    to_pack = ToPack(views, sources, [], 0)
    plan = Plan.planned(to_pack, lambda size: torch.zeros(size, dtype=torch.uint8))
    assert plan
    plan.fill(to_pack)
    for host, device in plan.rows:
        host.copy_(device)

    assert [one.tolist() for one in views] == [[1], [3, 3]]
