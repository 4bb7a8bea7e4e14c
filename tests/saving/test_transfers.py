"""What is copied from a GPU is what there was at the save, however late the GPU is."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from resumable import SaveFailed
from resumable.files import tensor_file
from resumable.files.codec import Encoded
from resumable.saving import gpu_copies, snapshot
from resumable.saving.gpu_copies import Buffers, Copy, Transfer
from resumable.saving.image import Image
from resumable.saving.snapshot import Snapshot


class Stream:
    """Work that is done in order, but nobody knows when."""

    def __init__(self, device: object = None) -> None:
        self.work: deque[tuple[str, Callable[[], object], Event | None]] = deque()
        self.done: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    def wait_event(self, event: Event) -> None:
        # An event that was never recorded keeps nobody waiting
        if event.is_recorded:
            self.work.append(("wait", lambda: None, event))


class Event:
    def __init__(self, blocking: bool = False) -> None:
        self.is_recorded = self.is_over = False

    def record(self, stream: Stream | None = None) -> None:
        self.is_recorded = True
        (stream or the_gpu().stream).work.append(("event", self._end, None))

    def _end(self) -> None:
        self.is_over = True

    def synchronize(self) -> None:
        assert the_gpu().has_device, "this thread works with the first device, and creates a context on it"
        the_gpu().run_until(lambda: self.is_over or not self.is_recorded)


class Driver:
    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:  # noqa: N802
        return 0

    def cudaHostUnregister(self, place: int) -> int:  # noqa: N802
        return 0


class OnGpu(Tensor):
    """A tensor of a GPU that is not there: what is done to it is done later."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return the_gpu().call(func, args, kwargs or {})


class Gpu:
    """A GPU for machines without one: what is queued runs in any order that its streams allow."""

    device = torch.device("cuda", 0)

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.training = Stream()
        self.streams = [self.training]
        self.current = threading.local()
        self.lock = threading.RLock()
        self.room = 1 << 40
        """The most bytes that a tensor that is made on the device can have."""
        self.free = 1 << 40
        """The bytes that are free when the training is at its peak."""
        self.haste = self.dice.choice([0.1, 0.5, 0.9])
        """How much likelier than the others the training's stream is to run."""

    @property
    def has_device(self) -> bool:
        """Whether this thread has said which device it works with."""
        return getattr(self.current, "has_device", False)

    @contextmanager
    def at(self) -> Iterator[None]:
        before, self.current.has_device = self.has_device, True
        yield
        self.current.has_device = before

    @property
    def stream(self) -> Stream:
        return getattr(self.current, "stream", self.training)

    def new_stream(self, device: object = None) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current.stream = self.stream, stream
        try:
            yield
        finally:
            self.current.stream = before

    def launch(self, name: str, work: Callable[[], object]) -> None:
        with self.lock:
            self.stream.work.append((name, work, None))

    def run_until(self, is_over: Callable[[], bool]) -> None:
        while True:
            with self.lock:
                if is_over():
                    return
                assert self.run_one(), "everybody waits for somebody"

    def run_one(self) -> bool:
        ready = [s for s in self.streams if s.work and (s.work[0][2] is None or s.work[0][2].is_over)]
        if not ready:
            return False
        chosen = self.dice.choice(ready)
        if self.training in ready and self.dice.random() < self.haste:
            chosen = self.training
        name, work, _ = chosen.work.popleft()
        with torch._C.DisableTorchFunctionSubclass():
            work()
        chosen.done.append(name)
        return True

    def finish(self) -> None:
        self.run_until(lambda: not any(stream.work for stream in self.streams))

    def tensor(self, content: Tensor) -> Any:
        return content.clone(memory_format=torch.preserve_format).as_subclass(OnGpu)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.__name__
        if name == "__get__" and func.__self__.__name__ in ("is_cuda", "is_cpu", "device"):
            device = vars(args[0]).get("elsewhere", self.device)
            return {"is_cuda": True, "is_cpu": False, "device": device}[func.__self__.__name__]
        if name == "cpu":
            self.run_until(lambda: not self.stream.work)
        with torch._C.DisableTorchFunctionSubclass():
            if name == "cpu":
                return args[0].clone().as_subclass(Tensor)
            if name.endswith("copy_") or name in ("add_", "fill_"):
                # What is written is known to have been written at once, whenever it comes to be.
                torch.autograd.graph.increment_version(args[0])
                self.launch(_name(args[0], name), lambda: func(*_bare(args), **kwargs))
                if type(args[0]) is Tensor and not kwargs.get("non_blocking"):
                    self.run_until(lambda: not self.stream.work)
                return args[0]
            if name in ("clone", "ne") and args[0].nbytes > self.room:
                raise torch.OutOfMemoryError("no room")
            if name in ("clone", "ne", "cat"):
                # Of what is there now it has only the shape
                made = func(*args, **kwargs).fill_(1)
                self.launch(name, lambda: made.data.copy_(func(*_bare(args), **kwargs)))
                return made.as_subclass(OnGpu)
            return _wrapped(func(*args, **kwargs))


def _name(target: Any, name: str) -> str:
    return f"{name} {target.nbytes}" if type(target) is Tensor else name


def _bare(args: Any) -> Any:
    # `.data` has a count of its own
    if isinstance(args, Tensor):
        return args.data
    return [_bare(arg) for arg in args] if isinstance(args, (list, tuple)) else args


def _wrapped(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.as_subclass(OnGpu)
    return tuple(map(_wrapped, found)) if isinstance(found, (list, tuple)) else found


_gpus: list[Gpu] = []


def the_gpu() -> Gpu:
    return _gpus[-1]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Gpu]]:
    """Puts in a GPU, whose tensors are small: sixty-four bytes cross the bus at a time."""
    empty, zeros = torch.empty, torch.zeros

    def on_gpu(make: Any) -> Any:
        def made(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            made = make(*args, device=None if device == Gpu.device else device, **kwargs)
            if device == Gpu.device and made.nbytes > the_gpu().room:
                raise torch.OutOfMemoryError("no room")
            return made.as_subclass(OnGpu) if device == Gpu.device else made

        return made

    monkeypatch.setattr(torch, "empty", on_gpu(empty))
    monkeypatch.setattr(torch, "zeros", on_gpu(zeros))
    monkeypatch.setattr(torch.cuda, "device", lambda device: the_gpu().at() if _gpus else nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: the_gpu().on(stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: the_gpu().stream)
    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (the_gpu().free, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: the_gpu().new_stream())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(gpu_copies, "_SMALL", 48)
    monkeypatch.setattr(gpu_copies, "_PIECE", 64)
    monkeypatch.setattr(gpu_copies, "_STAGED", 64)
    monkeypatch.setattr(gpu_copies, "_SAMPLES", 3)

    def make(seed: int = 0) -> Gpu:
        gpu_copies.side_stream.cache_clear()
        _gpus.append(Gpu(seed))
        return _gpus[-1]

    yield make
    _gpus.clear()
    # Memory that a test has dropped is unregistered with this driver.
    gc.collect()
    gpu_copies.side_stream.cache_clear()


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

    def __init__(self, gpu: Gpu, tensors: Mapping[str, Tensor], guarded: float = 0.5) -> None:
        self.gpu = gpu
        self.tensors = {name: gpu.tensor(tensor) for name, tensor in tensors.items()}
        layout = tensor_file.layout(tensors, {})
        memory = torch.full((layout.size,), 1, dtype=torch.uint8)
        self.views = dict(zip([s.name for s in layout.slots], layout.views(memory), strict=True))
        self.copies = [
            Copy("file", slot.name, slot.begin, self.views[slot.name], self.tensors[slot.name])
            for slot in layout.slots
        ]
        self.guarded = {n for n, t in self.tensors.items() if gpu.dice.random() < guarded}
        self.buffers = Buffers(Gpu.device)
        self.expected: dict[str, Tensor] = {}

    def write(self, names: Any) -> None:
        """Have the training write new values, as a kernel does: some time later, and untold."""
        for name in names:
            live = self.tensors[name]
            value = self.gpu.dice.randrange(2 if live.dtype == torch.bool else 100)
            self.gpu.launch("kernel", lambda live=live, value=value: _set(live, value))
            if name not in self.expected:
                self.expected[name] = torch.full(live.shape, value).to(live.dtype)

    def transfer(self) -> Transfer:
        places = {self.tensors[name].data_ptr() for name in self.guarded}
        return Transfer(Gpu.device, self.copies, places, self.buffers)

    def wrong(self) -> list[str]:
        return [n for n, view in self.views.items() if not tensor_file.is_equal(view, self.expected[n])]


def _set(live: Tensor, value: int) -> None:
    live.data.copy_(torch.full(live.shape, value))


def random_scene(gpu: Gpu) -> Scene:
    dice = gpu.dice
    tensors = {
        f"t{i}": dice.choice(KINDS)(dice.choice([1, 3, 8, 30, 90])) for i in range(dice.randrange(1, 9))
    }
    scene = Scene(gpu, tensors)
    scene.write(scene.tensors)
    return scene


@pytest.mark.parametrize("seed", range(60))
def test_the_file_holds_what_there_was_in_the_streams_order(gpus: Callable[[int], Gpu], seed: int) -> None:
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


def test_without_holding_back_the_stand_in_has_new_values_in_the_file(gpus: Callable[[int], Gpu]) -> None:
    found = 0
    for seed in range(20):
        scene = Scene(gpus(seed), {"large": torch.zeros(200)}, guarded=1)
        scene.write(["large"])
        transfer = scene.transfer()
        transfer.queue()
        scene.write(["large"])
        transfer.wait()
        found += bool(scene.wrong())
        assert bool(scene.wrong()) is (not transfer.guarded or transfer.guarded[0].has_another_content())

    assert found > 5


def test_only_who_wants_the_copy_waits_for_the_gpu(gpus: Callable[[int], Gpu]) -> None:
    gpu = gpus(0)
    scene = random_scene(gpu)
    transfer = scene.transfer()
    transfer.queue()
    transfer.hold_back()
    assert not any(stream.done for stream in gpu.streams)

    transfer.wait()
    assert any(name == "event" for name in gpu.streams[1].done)


def side(gpu: Gpu, scene: Scene) -> list[str]:
    """Return what a transfer has done on a stream of its own."""
    transfer = scene.transfer()
    transfer.queue()
    transfer.wait()
    assert len(gpu.streams) == 2
    gpu.finish()
    return gpu.streams[1].done


@pytest.mark.parametrize("guarded", [0, 1])
def test_copies_are_made_in_pieces_with_a_kernel_after_each(gpus: Callable[[int], Gpu], guarded: int) -> None:
    gpu = gpus(0)
    scene = Scene(gpu, {"a": torch.zeros(40), "b": torch.zeros(14)}, guarded)
    scene.write(scene.tensors)

    done = side(gpu, scene)

    assert done == [
        "wait",
        *["copy_ 64", "add_"] * 2,
        *["copy_ 32", "add_"],
        *["copy_ 56", "add_"],
        *["copy_ 32", "add_"] * guarded,  # the samples of both, each in a slot of 16 bytes
        "event",
    ]
    assert scene.wrong() == []


def test_small_tensors_cross_the_bus_together(gpus: Callable[[int], Gpu]) -> None:
    gpu = gpus(0)
    scene = Scene(gpu, {f"t{i}": torch.zeros(5) for i in range(3)} | {"flag": torch.zeros(2) > 0}, guarded=1)
    scene.write(["t0", "t1", "t2", "flag"])
    scene.copies = [Copy(c.path, c.name, c.begin, c.view, scene.tensors[c.name]) for c in scene.copies]

    assert side(gpu, scene) == ["wait", "copy_ 62", "add_", "event"]
    assert scene.wrong() == []


def test_what_lies_between_is_not_written(gpus: Callable[[int], Gpu]) -> None:
    gpu = gpus(0)
    tensors = {"a": torch.zeros(3), "large": torch.zeros(20), "b": torch.zeros(3)}
    scene = Scene(gpu, tensors, guarded=0)
    scene.write(scene.tensors)
    scene.copies = [copy for copy in scene.copies if copy.name != "large"]

    assert side(gpu, scene) == ["wait", "copy_ 12", "add_", "copy_ 12", "add_", "event"]
    assert scene.views["large"].view(torch.uint8).unique().tolist() == [1]


def test_only_what_is_guarded_and_large_stays_where_it_is(gpus: Callable[[int], Gpu]) -> None:
    gpu = gpus(0)
    tensors = {
        "large": torch.zeros(30),
        "small": torch.zeros(2),
        "laid out": torch.zeros(9, 3, 2, 2).to(memory_format=torch.channels_last),
        "in large rows": torch.zeros(2, 40).t().contiguous().t(),
    }
    scene = Scene(gpu, tensors)
    scene.guarded = {*tensors}

    assert [copy.name for copy in scene.transfer().guarded] == ["large", "laid out"]
    assert [name for name, _, _ in gpu.training.work].count("copy_") == 1


@pytest.mark.parametrize("seed", range(5))
def test_without_room_on_the_device_what_is_not_guarded_is_copied_at_once(
    gpus: Callable[[int], Gpu], seed: int
) -> None:
    gpu = gpus(seed)
    scene = Scene(gpu, {"a": torch.zeros(40), "b": torch.zeros(30), "c": torch.zeros(2)})
    scene.write(scene.tensors)
    gpu.room = 100
    transfer = scene.transfer()
    scene.write(scene.tensors.keys() - scene.guarded)
    transfer.queue()
    transfer.hold_back()
    scene.write(scene.tensors)
    transfer.wait()

    assert scene.wrong() == []


@pytest.mark.parametrize("room", [0, 40, 200])
def test_a_save_takes_no_memory_that_the_device_lacks(gpus: Callable[[int], Gpu], room: int) -> None:
    for size in (3, 100):
        gpu = gpus(0)
        training = Training(gpu, size)
        gpu.room = room
        for _ in range(3):
            training.step()
            weight = training.value
            training.write(training.buffer)
            buffer = training.value
            taken = training.take()
            training.write(training.buffer)
            training.step()

            assert held(taken) == (weight, buffer)


@pytest.mark.parametrize("is_laid_out", [True, False])
def test_no_clone_takes_memory_that_the_training_needs_at_its_peak(
    gpus: Callable[[int], Gpu], is_laid_out: bool
) -> None:
    gpu = gpus(0)
    tensor = torch.zeros(40, 3, 2, 2)
    scene = Scene(gpu, {"a": tensor.to(memory_format=torch.channels_last) if is_laid_out else tensor}, 0)
    for room, expected in ((3000, 0), (2000, tensor.nbytes), (3000, 0)):
        gpu.free = room
        scene.expected.clear()
        scene.write(["a"])
        transfer = scene.transfer()

        assert transfer.waited_for == expected
        transfer.queue()
        transfer.wait()
        assert scene.wrong() == []


def test_a_script_that_resets_the_peak_does_not_hide_it(
    gpus: Callable[[int], Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = gpus(0)
    gpu.free = 2000
    buffers = Buffers(Gpu.device)
    before = buffers.room()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 10)

    assert buffers.room() == before


def test_all_saves_use_the_same_stream_and_buffers(
    gpus: Callable[[int], Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = gpus(0)
    training = Training(gpu)
    training.buffer = gpu.tensor(torch.zeros(3))
    made: list[Any] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **given: made.append(args) or empty(*args, **given))
    for _ in range(40):
        training.step()
        held(training.take())

    assert len(gpu.streams) == 2
    on_device = [args for args in made if args[0] != 0]
    assert len(on_device) == 1 + 1, "what is packed, and the samples in host memory"


@pytest.mark.parametrize("is_guarded", [True, False])
def test_steps_on_a_stream_of_their_own_are_waited_for(gpus: Callable[[int], Gpu], is_guarded: bool) -> None:
    for seed in range(40):
        gpu = gpus(seed)
        training = Training(gpu)
        stream = gpu.new_stream()
        gpu.finish()
        if not is_guarded:
            training.image._fence.distrust()
        with gpu.on(stream):
            training.step()
            training.write(training.buffer)
            buffer = training.value
            training.step()

        assert held(training.take()) == (training.value, buffer)


def test_small_tensors_of_any_dtype_are_copied_as_bits(
    gpus: Callable[[int], Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = gpus(0)
    kinds = [kind for kind in tensor_file.DTYPES if kind != torch.bool]
    scene = Scene(gpu, {str(kind): torch.zeros(2).to(kind) for kind in kinds}, guarded=1)
    dtypes: set[torch.dtype] = set()
    copy = torch._foreach_copy_

    def spied(to: Any, of: Any) -> None:
        dtypes.update(one.dtype for one in (*to, *of))
        assert len({one.dtype for one in (*to, *of)}) == 1, "which takes a call for each"
        copy(to, of)

    monkeypatch.setattr(torch, "_foreach_copy_", spied)
    scene.expected = {name: tensor.as_subclass(Tensor).clone() for name, tensor in scene.tensors.items()}
    side(gpu, scene)

    assert scene.wrong() == []
    assert dtypes == {torch.uint8, torch.int16, torch.int32, torch.int64}


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
    gpus: Callable[[int], Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = random_scene(gpus(0))
    transfer = scene.transfer()
    monkeypatch.setattr(gpu_copies, "_pieces", lambda to, of: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        transfer.queue()

    transfer.hold_back()


class Training:
    """A parameter on the GPU and an optimizer whose step writes to it, as a kernel does."""

    def __init__(self, gpu: Gpu, size: int = 100) -> None:
        self.gpu = gpu
        self.weight = gpu.tensor(torch.zeros(size))
        self.buffer = gpu.tensor(torch.zeros(size))
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        self.optimizer.param_groups[0]["params"] = [self.weight]
        self.image = Image([self.optimizer])
        self.value = 0
        self.step()

    def write(self, tensor: Tensor) -> None:
        self.value += 1
        self.gpu.launch("kernel", lambda value=self.value: _set(tensor, value))

    def step(self) -> None:
        for hook in [*self.optimizer._optimizer_step_pre_hooks.values()]:
            hook(self.optimizer, (), {})
        self.write(self.weight)
        for hook in [*self.optimizer._optimizer_step_post_hooks.values()]:
            hook(self.optimizer, (), {})

    def take(self) -> Snapshot:
        self.image.catch_up()
        tensors = {"weight": self.weight, "buffer": self.buffer}
        return self.image.take({"file": Encoded({}, tensors, {}, ("key",))})


def held(taken: Snapshot) -> tuple[float, float]:
    found = taken.tensors("file")
    assert all(len(tensor.unique()) == 1 for tensor in found.values())
    return found["weight"][0].item(), found["buffer"][0].item()


@pytest.mark.parametrize("seed", range(25))
def test_an_image_of_a_gpu_holds_what_there_was_while_the_training_continues(
    gpus: Callable[[int], Gpu], seed: int
) -> None:
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


def test_what_is_written_around_the_fence_on_a_gpu_is_never_in_a_file_unreported(
    gpus: Callable[[int], Gpu],
) -> None:
    told = 0
    for seed in range(75):
        training = Training(gpus(seed))
        before = training.value
        taken = training.take()
        training.write(training.weight)
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
    gpus: Callable[[int], Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "Transfer", Gone)
    training = Training(gpus(0))
    training.buffer.elsewhere = torch.device("cuda", 1)
    taken = training.take()
    training.step()

    with pytest.raises(SaveFailed, match="the device is gone"):
        taken.tensors("file")
