"""What is copied from a GPU is what there was at the save, however late the GPU is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from resumable import SaveFailed
from resumable.files import tensor_file
from resumable.files.codec import Encoded
from resumable.saving import gpu_copies, snapshot
from resumable.saving.gpu_buffers import Buffers
from resumable.saving.gpu_copies import Copy, Transfer
from resumable.saving.image import Image
from resumable.saving.snapshot import Snapshot
from tests.support import accelerator
from tests.support.accelerator import Accelerator, Stream
from tests.support.gpu_training import Training, held, set_to


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Accelerator]]:
    """Puts in a GPU, whose tensors are small: sixty-four bytes cross the bus at a time."""
    accelerator.make_small(monkeypatch)
    with accelerator.installed(monkeypatch):
        yield accelerator.replace
        assert 0 not in accelerator.the_accelerator().contexts, "that GPU is used for nothing here"


KINDS: list[Callable[[int], Tensor]] = [
    lambda n: torch.zeros(n),
    lambda n: torch.zeros(n, dtype=torch.bfloat16),
    lambda n: torch.zeros(n, dtype=torch.int64),
    lambda n: torch.zeros(n, dtype=torch.bool),
    lambda n: torch.zeros(n, dtype=torch.complex64),
    lambda n: torch.zeros(n, 3).t(),
    lambda n: torch.tensor(0.0),
    lambda n: torch.zeros(n, 2, 2, 2).to(memory_format=torch.channels_last),
]


class Scene:
    """Tensors on a GPU that is busy with writing them, and their places in host memory."""

    def __init__(self, gpu: Accelerator, tensors: Mapping[str, Tensor], guarded: float = 0.5) -> None:
        self.gpu = gpu
        self.tensors = {name: gpu.put(tensor) for name, tensor in tensors.items()}
        layout = tensor_file.layout(tensors, {})
        memory = torch.empty(layout.size, dtype=torch.uint8, pin_memory=True).fill_(1)
        self.views = dict(zip([s.name for s in layout.slots], layout.views(memory), strict=True))
        self.copies = [
            Copy("file", slot.name, slot.begin, self.views[slot.name], self.tensors[slot.name])
            for slot in layout.slots
        ]
        self.guarded = {n for n, t in self.tensors.items() if gpu.dice.random() < guarded}
        self.buffers = Buffers(gpu.training_device)
        self.expected: dict[str, Tensor] = {}

    def write(self, names: Any) -> None:
        """Have the training write new values, as a kernel does: some time later, and untold."""
        for name in names:
            live = self.tensors[name]
            value = self.gpu.dice.randrange(2 if live.dtype == torch.bool else 100)
            self.gpu.launch("kernel", lambda live=live, value=value: set_to(live, value))
            if name not in self.expected:
                self.expected[name] = torch.full(live.shape, value).to(live.dtype)

    def transfer(self) -> Transfer:
        places = {self.tensors[name].data_ptr() for name in self.guarded}
        return Transfer(self.gpu.training_device, self.copies, places, self.buffers)

    def wrong(self) -> list[str]:
        return [n for n, view in self.views.items() if not tensor_file.is_equal(view, self.expected[n])]


def random_scene(gpu: Accelerator) -> Scene:
    dice = gpu.dice
    tensors = {
        f"t{i}": dice.choice(KINDS)(dice.choice([1, 3, 8, 30, 90])) for i in range(1 + dice.randrange(8))
    }
    scene = Scene(gpu, tensors)
    scene.write(scene.tensors)
    return scene


@pytest.mark.parametrize("seed", range(30))
def test_the_file_holds_what_the_stream_had(gpus: Callable[[int], Accelerator], seed: int) -> None:
    gpu = gpus(seed)
    scene = random_scene(gpu)
    # The bools were made into real ones before the training wrote to them here
    scene.copies = [Copy(c.path, c.name, c.begin, c.view, scene.tensors[c.name]) for c in scene.copies]
    transfer = scene.transfer()
    scene.write(scene.tensors.keys() - scene.guarded)
    queue = threading.Thread(target=_queue_late, args=(transfer, gpu.dice.choice([0, 0.002])))
    queue.start()
    transfer.hold_back()
    scene.write(scene.tensors)
    transfer.wait()
    queue.join()

    assert scene.wrong() == []
    gpu.finish()
    assert scene.wrong() == []
    assert not any(copy.has_another_content() for copy in transfer.guarded)


def _queue_late(transfer: Transfer, seconds: float) -> None:
    time.sleep(seconds)
    transfer.queue()


def side(gpu: Accelerator, scene: Scene) -> list[str]:
    """Return what a transfer has done on a stream of its own."""
    transfer = scene.transfer()
    transfer.queue()
    transfer.wait()
    assert len(gpu.streams) == 2
    gpu.finish()
    return gpu.streams[1].done


def test_what_lies_between_is_not_written(gpus: Callable[[int], Accelerator]) -> None:
    gpu = gpus(0)
    tensors = {"a": torch.zeros(3), "large": torch.zeros(20), "b": torch.zeros(3)}
    scene = Scene(gpu, tensors, guarded=0)
    scene.write(scene.tensors)
    scene.copies = [copy for copy in scene.copies if copy.name != "large"]

    assert side(gpu, scene) == ["wait", "copy_ 12", "add_", "copy_ 12", "add_", "event"]
    assert scene.views["large"].view(torch.uint8).unique().tolist() == [1]


@pytest.mark.parametrize("room", [0, 40, 200])
def test_a_save_takes_no_memory_that_the_device_lacks(gpus: Callable[[int], Accelerator], room: int) -> None:
    for size in (3, 100):
        gpu = gpus(0)
        training = Training(gpu, size)
        gpu.memory.leave(room)
        for _ in range(3):
            training.step()
            weight = training.value
            training.write(training.buffer)
            buffer = training.value
            taken = training.take()
            training.write(training.buffer)
            training.step()

            assert held(taken) == (weight, buffer)


@pytest.mark.quick(2)
@pytest.mark.parametrize("is_guarded", [True, False])
def test_steps_on_another_stream_are_awaited(gpus: Callable[[int], Accelerator], is_guarded: bool) -> None:
    for seed in range(40):
        gpu = gpus(seed)
        training = Training(gpu)
        stream = Stream(gpu.training_device)
        gpu.finish()
        if not is_guarded:
            training.image._fence.distrust()
        with gpu.on_stream(stream):
            training.step()
            training.write(training.buffer)
            buffer = training.value
            training.step()

        assert held(training.take()) == (training.value, buffer)


def test_small_tensors_of_any_dtype_keep_their_bits(gpus: Callable[[int], Accelerator]) -> None:
    gpu = gpus(0)
    kinds = [kind for kind in tensor_file.DTYPES if kind != torch.bool]
    scene = Scene(gpu, {str(kind): torch.zeros(2).to(kind) for kind in kinds}, guarded=1)
    scene.expected = {name: tensor.cpu() for name, tensor in scene.tensors.items()}
    side(gpu, scene)

    assert scene.wrong() == []


class OnOther(Tensor):
    """A tensor of an accelerator that is not CUDA's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if func.__name__ == "__get__" and name in ("is_cpu", "is_cuda"):
            return False
        return super().__torch_function__(func, types, args, kwargs or {})


def test_nothing_of_another_accelerator_is_copied_by_another_thread() -> None:
    weight = torch.nn.Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([weight])
    image = Image([optimizer], worth_a_fence=0)
    weight.grad = torch.ones(100)
    optimizer.step()
    source = weight.detach().as_subclass(OnOther)
    taken = image.take({"file": Encoded({}, {"weight": source}, {}, ("key",))})
    assert taken._is_complete
    assert torch.equal(taken.tensors("file")["weight"], weight)
    image.close()


def test_an_error_while_it_is_queued_blocks_no_thread(
    gpus: Callable[[int], Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = random_scene(gpus(0))
    transfer = scene.transfer()
    monkeypatch.setattr(gpu_copies, "_pieces", lambda to, of: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        transfer.queue()

    transfer.hold_back()


@pytest.mark.parametrize("seed", range(25))
def test_a_gpu_image_holds_what_there_was(gpus: Callable[[int], Accelerator], seed: int) -> None:
    training = Training(gpus(seed))
    for _ in range(3):
        training.step()
        weight = training.value
        training.write(training.buffer)
        buffer = training.value
        taken = training.take()
        training.write(training.buffer)
        training.step()
        training.write(training.weight)
        training.write(training.buffer)

        assert held(taken) == (weight, buffer)


def queued_after(event: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread of an image wait for the event before it queues the copies."""
    queue = Transfer.queue
    monkeypatch.setattr(Transfer, "queue", lambda transfer: event.wait(20) and queue(transfer))


@pytest.mark.heavy
def test_a_write_around_the_fence_on_a_gpu_is_reported(
    gpus: Callable[[int], Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()
    queued_after(written, monkeypatch)
    told = 0
    for seed in range(75):
        written.clear()
        training = Training(gpus(seed))
        before = training.value
        taken = training.take()
        training.write(training.weight)
        written.set()
        try:
            assert held(taken)[0] == before
            continue
        except SaveFailed:
            told += 1
        training.step()
        before = training.value
        taken = training.take()
        training.write(training.weight)
        assert held(taken)[0] == before

    assert told > 5


class Gone:
    """A device that fails while a step waits, before the copies from the next one are queued."""

    def __init__(self, device: object, copies: object, guarded: object, *_: object, **__: object) -> None:
        self.waited_for = 0
        self.guarded: list[Copy] = []
        self.is_waited_for, self.is_queued = threading.Event(), threading.Event()

    def queue(self) -> None:
        assert self.is_waited_for.wait(20)
        self.is_queued.set()
        raise RuntimeError("the device is gone")

    def hold_back(self) -> None:
        self.is_waited_for.set()
        assert self.is_queued.wait(5), "nobody will ever queue anything here"

    def end(self) -> None:
        self.is_queued.set()


def test_no_step_waits_for_a_device_that_the_copies_never_came_to(
    gpus: Callable[[int], Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "Transfer", Gone)
    gpu = accelerator.replace(0, count=3)
    training = Training(gpu)
    training.buffer = gpu.put(training.buffer.cpu(), 1)
    taken = training.take()
    training.step()

    with pytest.raises(SaveFailed, match="the device is gone"):
        taken.tensors("file")


FROZEN = "model-frozen.safetensors"


class PartlyFrozen(Training):
    """A training with a frozen tensor, which the last two saves had as it is."""

    def __init__(self, gpu: Accelerator) -> None:
        self.frozen = gpu.put(torch.full((60,), 5.0))
        super().__init__(gpu)

    def take(self) -> Snapshot:
        mine = {
            "file": Encoded({}, {"weight": self.weight, "buffer": self.buffer}, {}, ("key",)),
            FROZEN: Encoded({}, {"frozen": self.frozen}, {}, ("other key",)),
        }
        return self.image.take(mine, settled={"file", FROZEN})


@pytest.mark.quick(2)
@pytest.mark.parametrize("thaws", [True, False])
def test_a_write_to_a_frozen_tensor_is_reported(
    gpus: Callable[[int], Accelerator], monkeypatch: pytest.MonkeyPatch, thaws: bool
) -> None:
    written = threading.Event()
    wait = Transfer.wait
    # A step waits until the copies are queued.
    monkeypatch.setattr(Transfer, "wait", lambda transfer: written.wait(20) and wait(transfer))
    told = 0
    for seed in range(40):
        written.clear()
        training = PartlyFrozen(gpus(seed))
        taken = training.take()
        if thaws:
            training.step()
            torch.autograd.graph.increment_version(training.frozen)
        training.write(training.frozen)
        written.set()
        try:
            assert taken.tensors(FROZEN)["frozen"].tolist() == [5.0] * 60
            continue
        except SaveFailed:
            told += 1
        value = training.value
        training.step()
        assert training.weight.data_ptr() in training.image._fence.guarded()
        taken = training.take()
        training.write(training.frozen)
        assert set(taken.tensors(FROZEN)["frozen"].tolist()) == {value}

    assert told == 40 if thaws else told > 5


def test_a_frozen_tensor_of_an_optimizer_is_guarded_by_its_steps(gpus: Callable[[int], Accelerator]) -> None:
    gpu = gpus(0)
    training = PartlyFrozen(gpu)
    training.optimizer.param_groups[0]["params"].append(training.frozen)
    training.step()
    taken = training.take()
    training.step()
    training.write(training.frozen)

    assert taken.tensors(FROZEN)["frozen"].tolist() == [5.0] * 60


@pytest.mark.parametrize("room", [None, 0])
def test_no_copy_is_to_two_parts_of_the_registered_memory(
    gpus: Callable[[int], Accelerator], monkeypatch: pytest.MonkeyPatch, room: int | None
) -> None:
    gpu = gpus(0)
    training = Training(gpu, 3000)
    if room is not None:
        gpu.memory.leave(room)
    training.step()
    training.write(training.buffer)
    assert held(training.take()) == (2, 3)
    parts = [end - begin for begin, end in gpu.pinned.registered.items()]
    assert len(parts) == 6
    assert max(parts) == 4096

    training.step()
    monkeypatch.setattr(gpu_copies, "_cut", lambda to, of: [(to, of)])
    if room is None:
        with pytest.raises(SaveFailed, match="invalid argument"):
            held(training.take())
    else:
        with pytest.raises(RuntimeError, match="invalid argument"):
            training.take()
