"""Where small tensors lie on the GPU is planned once, for as long as it is right."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from resumable.files.codec import Encoded
from resumable.saving import gpu_copies, image
from resumable.saving.gpu_packing import Packing
from resumable.saving.host_memory import HostMemory
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


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Packing]:
    """The plans that were made."""
    made: list[Packing] = []
    init = Packing.__init__

    def noted(packing: Packing, *given: Any) -> None:
        init(packing, *given)
        made.append(packing)

    monkeypatch.setattr(Packing, "__init__", noted)
    return made


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


def test_a_plan_serves_all_saves_of_the_same_tensors(gpu: Accelerator, plans: list[Packing]) -> None:
    training = Training(gpu)
    training.buffer = gpu.put(torch.zeros(5))

    assert [saved(training) for _ in range(4)] == [(2, 3), (5, 6), (8, 9), (11, 12)]
    assert len(plans) == 1


def test_other_memory_of_a_tensor_needs_no_other_plan(gpu: Accelerator, plans: list[Packing]) -> None:
    training = Training(gpu)
    training.buffer = gpu.put(torch.zeros(5))
    saved(training)
    training.buffer = gpu.put(torch.zeros(5))

    assert saved(training) == (5, 6)
    assert len(plans) == 1


@pytest.mark.parametrize("kind", ["transposed", "longer", "shorter", "halved"])
def test_another_kind_of_tensor_is_planned_anew(gpu: Accelerator, plans: list[Packing], kind: str) -> None:
    training = Growing(gpu)
    training.buffer = gpu.put(torch.zeros(2, 3))
    assert saved(training) == (2, 3)
    shape = {"longer": (3, 7), "shorter": (3, 1)}.get(kind, (3, 2))
    other = gpu.put(torch.zeros(shape, dtype=torch.half if kind == "halved" else torch.float32))
    training.buffer = other.t()
    training.key = kind if kind != "transposed" else "key"
    training.step()
    gpu.launch("kernel", lambda: set_to(other, 70))
    found = training.take().tensors("file")

    assert found["buffer"].unique().tolist() == [70]
    assert found["buffer"].shape == training.buffer.shape
    assert len(plans) == 2


def test_a_plan_with_samples_is_not_that_without(gpu: Accelerator, plans: list[Packing]) -> None:
    training = Training(gpu)
    saved(training)
    training.take().tensors("file")
    # Without a step in between nothing is guarded, and nothing has a sample.
    taken = training.take()
    training.write(training.weight)

    assert taken.tensors("file")["weight"].unique().tolist() == [4]
    assert len(plans) == 2


def test_a_plan_with_fewer_samples_is_not_that_with_more(
    gpu: Accelerator, plans: list[Packing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_copies, "_SAMPLES", 10)
    training = Growing(gpu)
    for number, size in enumerate((100, 27)):
        training.weight, training.key = gpu.put(torch.zeros(size)), f"{size}"
        training.optimizer.param_groups[0]["params"] = [training.weight]
        assert saved(training) == ((2, 3), (5, 6))[number]

    assert len(plans) == 2


def test_a_plan_keeps_no_memory_of_the_host_that_the_image_has_left(
    gpu: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Growing(gpu)
    training.buffer = gpu.put(torch.zeros(5))
    saved(training)
    memory = training.image._memory
    assert memory
    before, kept = weakref.ref(memory._map), list[bool]()
    del memory

    # What has just come to its end may still have it.
    gpu.finish()
    for thread in threading.enumerate():
        if thread.name == "resumable-image":
            thread.join()
    gc.collect()

    def made(size: int) -> HostMemory:
        kept.append(before() is not None)
        return HostMemory(size)

    monkeypatch.setattr(image, "HostMemory", made)
    training.weight, training.key = gpu.put(torch.zeros(3000)), "longer"
    training.optimizer.param_groups[0]["params"] = [training.weight]

    assert saved(training) == (5, 6)
    assert kept == [False]
