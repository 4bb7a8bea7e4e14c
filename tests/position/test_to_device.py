"""Batches come whole, in order and on the device, and never a moment too early."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from resumable import UsageError
from resumable.position.to_device import ToDevice
from tests.support import accelerator
from tests.support.accelerator import Accelerator, Stream

ZERO = torch.zeros(1)
Edge = namedtuple("Edge", ["source", "to"])


class Batch(dict[str, Any]):
    """A user's own kind of dict, with something beside its items."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Attributes(dict[str, Any]):
    """The dict whose items are its attributes as well, as everybody has it."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Pair(tuple[Any, ...]):
    """A tuple of the user's own."""


class Fresh(UserDict[str, Any]):
    """A mapping that makes a tensor of a length at every access, until it is given one."""

    def __getitem__(self, key: str) -> Tensor:
        value = self.data[key]
        return value if isinstance(value, Tensor) else torch.ones(value)


@dataclasses.dataclass
class Open:
    x: Tensor = ZERO


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    length: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", len(self.x))


class Graph:
    """What is not ours to look into, with a way of its own to a device."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


class Image(Tensor):
    """A tensor of a class of the user's own."""


def named_batch(x: Tensor) -> Batch:
    batch = Batch("first")
    batch["x"] = x
    return batch


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda batch: batch),
    "list": (lambda x: [1, x], lambda batch: batch[1]),
    "tuple": (lambda x: ("a", x), lambda batch: batch[1]),
    "named tuple": (lambda x: Edge(1, x), lambda batch: batch.to),
    "tuple subclass": (lambda x: Pair([x]), lambda batch: batch[0]),
    "torch's own tuple": (lambda x: torch.max(x[None], 0), lambda batch: batch.values),
    "dict": (lambda x: {"n": 1, "x": x}, lambda batch: batch["x"]),
    "nested": (lambda x: {"a": [({"x": x}, None)]}, lambda batch: batch["a"][0][0]["x"]),
    "OrderedDict": (lambda x: OrderedDict(a=1, x=x, b=2), lambda batch: batch["x"]),
    "defaultdict": (lambda x: defaultdict(list, x=x), lambda batch: batch["x"]),
    "UserDict": (lambda x: UserDict(x=x), lambda batch: batch["x"]),
    "read-only": (lambda x: MappingProxyType({"x": x}), lambda batch: batch["x"]),
    "dict subclass": (named_batch, lambda batch: batch["x"]),
    "attribute dict, item": (lambda x: Attributes(x=x), lambda batch: batch["x"]),
    "attribute dict, attribute": (lambda x: Attributes(x=x), lambda batch: batch.x),
    "dataclass": (Open, lambda batch: batch.x),
    "frozen dataclass": (Frozen, lambda batch: batch.x),
    "packed sequence": (lambda x: pack_sequence([x]), lambda batch: batch.data),
    "object with to": (Graph, lambda batch: batch.x),
}


def moved(batch: Any, device: str = "meta") -> Any:
    return next(ToDevice(device, ahead=False)(iter([batch])))


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_tensor_is_moved_wherever_it_is_and_its_container_kept(kind: str) -> None:
    make, look = CONTAINERS[kind]
    batch = make(torch.ones(3))

    found = moved(batch)

    assert type(found) is type(batch)
    assert look(found).is_meta
    assert look(found).shape == (3,)
    assert not look(batch).is_meta, "the loader's own batch was changed"


def test_a_container_keeps_what_else_it_holds() -> None:
    batch = named_batch(torch.ones(2))

    assert moved(batch).name == "first"
    assert list(moved(OrderedDict(a=1, x=torch.ones(2), b=2))) == ["a", "x", "b"]
    assert moved(defaultdict(list, x=torch.ones(2)))["new"] == []
    assert moved(Frozen(torch.ones(2))).length == 2


@pytest.mark.parametrize(
    "value",
    [
        "text",
        b"bytes",
        3,
        2.5,
        None,
        True,
        np.ones(3),
        {1, 2},
        range(3),
        torch.Size([2]),
        Graph,
        Open,
        deque(),
    ],
    ids=repr,
)
def test_what_has_no_tensor_to_move_is_left_alone(value: Any) -> None:
    batch = {"value": value, "x": torch.ones(2)}

    assert moved(batch)["value"] is value
    assert moved([value])[0] is value


def test_what_is_on_the_device_already_is_the_object_of_the_loader() -> None:
    batch = {"x": torch.ones(2), "rest": [Open(torch.ones(2))]}

    assert moved(batch, "cpu") is batch


def test_a_tensor_that_is_twice_in_a_batch_is_one_tensor_afterwards() -> None:
    x, shared = torch.ones(2), [torch.ones(3)]

    found = moved({"x": x, "same": (x, [x]), "a": shared, "b": shared})

    assert found["x"] is found["same"][0] is found["same"][1][0]
    assert found["a"] is found["b"]


def test_tensors_that_a_mapping_makes_at_each_access_stay_apart() -> None:
    batch = [Fresh(x=length, y=2 * length) for length in range(50)]

    found = moved(batch)

    assert [(len(one["x"]), len(one["y"])) for one in found] == [(n, 2 * n) for n in range(50)]
    assert all(one["x"].is_meta and one["y"].is_meta for one in found)
    assert batch[3].data == {"x": 3, "y": 6}


def test_a_batch_that_cannot_be_made_again_is_named() -> None:
    class Sealed(dict[str, Any]):
        def __setitem__(self, key: str, value: Any) -> None:
            raise TypeError("it is sealed")

    with pytest.raises(
        UsageError, match=r"a Sealed in the batch cannot be made again.*it is sealed"
    ) as error:
        moved(Sealed(x=torch.ones(2)))

    assert "to(device)" in error.value.fix


@pytest.mark.parametrize("device", ["cud", "cuda:-1", None, 1.5, True, "", -1])
def test_what_is_no_device_is_refused_when_it_is_given(device: Any) -> None:
    with pytest.raises(UsageError, match="is no device"):
        ToDevice(device, ahead=True)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), "xpu", "mps"])
def test_a_device_that_is_not_there_is_refused_when_it_is_given(
    device: str | torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for backend in (torch.cuda, torch.xpu, torch.mps):
        monkeypatch.setattr(backend, "device_count", lambda: 0)

    with pytest.raises(UsageError, match=r"is not there: this process sees 0 devices") as error:
        ToDevice(device, ahead=True)

    assert "torch.cuda.is_available()" in error.value.fix


class Broken(Exception):
    """What goes wrong in these loaders."""


def loader(log: list[str], count: int, error: BaseException | None = None) -> Iterator[Tensor]:
    try:
        for number in range(count):
            log.append(f"load {number}")
            yield torch.full((2,), float(number))
        if error:
            log.append("break")
            raise error
    finally:
        log.append("closed")


def train(batches: Iterator[Any], log: list[str]) -> None:
    for batch in batches:
        log.append(f"train {int(batch[0])}")


@pytest.mark.parametrize(
    ("ahead", "order"),
    [
        (False, ["load 0", "train 0", "load 1", "train 1", "load 2", "train 2", "closed"]),
        (True, ["load 0", "load 1", "train 0", "load 2", "train 1", "closed", "train 2"]),
    ],
)
def test_the_loader_is_asked_at_most_one_batch_ahead(ahead: bool, order: list[str]) -> None:
    log: list[str] = []

    train(ToDevice("cpu", ahead)(loader(log, 3)), log)

    assert log == order


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("ahead", [False, True])
def test_every_batch_comes_once_and_in_order_and_then_the_end(ahead: bool, count: int) -> None:
    given = list(torch.randn(count, 3))
    batches = ToDevice("cpu", ahead)(iter(given))

    found = list(batches)

    assert [id(batch) for batch in found] == [id(batch) for batch in given]
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_an_error_of_the_loader_comes_when_its_batch_is_asked_for(ahead: bool, count: int) -> None:
    log: list[str] = []
    batches = ToDevice("cpu", ahead)(loader(log, count, Broken("here")))

    found = [int(next(batches)[0]) for _ in range(count)]
    with pytest.raises(Broken, match="here"):
        next(batches)

    assert found == list(range(count))
    with pytest.raises(StopIteration):
        next(batches)


def test_an_error_in_moving_comes_when_its_batch_is_asked_for() -> None:
    class Unmovable:
        def to(self, device: torch.device) -> None:
            raise Broken

    batches = ToDevice("cpu", ahead=True)(iter([torch.ones(1), Unmovable()]))

    assert next(batches).item() == 1.0
    with pytest.raises(Broken):
        next(batches)


def test_an_interrupt_does_not_wait_for_another_step_of_the_training() -> None:
    batches = ToDevice("cpu", ahead=True)(loader([], 1, KeyboardInterrupt()))

    with pytest.raises(KeyboardInterrupt):
        next(batches)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("error", [None, Broken()])
def test_a_loop_that_is_left_half_way_closes_the_loader(ahead: bool, error: Broken | None) -> None:
    log: list[str] = []
    batches = ToDevice("cpu", ahead)(loader(log, 3, error))

    for _ in range(3):
        next(batches)
    del batches

    assert log[-1] == "closed"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    with accelerator.installed(monkeypatch) as gpu, gpu.on_device(gpu.training_device):
        yield gpu


def copies(gpu: Accelerator) -> list[Stream]:
    """Return, for each copy, the stream on which it was or will be made."""
    names = [(stream, [*stream.done, *(item.name for item in stream.work)]) for stream in gpu.streams]
    return [stream for stream, found in names for name in found if name.startswith("copy_")]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("is_pinned", [False, True])
def test_the_training_reads_what_the_loader_gave_however_late_the_gpu_is(
    gpu: Accelerator, ahead: bool, is_pinned: bool
) -> None:
    gpu.haste = gpu.eagerness = 0
    given = torch.arange(24.0).reshape(8, 3)
    batches = (row.pin_memory() if is_pinned else row for row in given)

    read = [batch.clone() for batch in ToDevice("cuda", ahead)(batches)]
    assert not gpu.training.done, "somebody has waited for the training"

    assert torch.equal(torch.stack(read).cpu(), given)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_loader_may_fill_its_pinned_memory_again(gpu: Accelerator, ahead: bool) -> None:
    def same_memory() -> Iterator[Tensor]:
        memory = torch.empty(3, pin_memory=True)
        for number in range(6):
            yield memory.fill_(number)

    read = [batch.clone() for batch in ToDevice("cuda", ahead)(same_memory())]

    assert [int(batch[0]) for batch in read] == list(range(6))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_is_whole_on_whichever_stream_the_training_has_come_to(gpu: Accelerator, ahead: bool) -> None:
    given, read = torch.arange(6.0).reshape(6, 1), []
    batches = ToDevice("cuda", ahead)(iter(given))

    for _ in given:
        with gpu.on_stream(Stream()):
            read.append(next(batches).cpu())

    assert torch.equal(torch.stack(read), given)


@pytest.mark.parametrize(
    "value",
    [
        Graph(torch.ones(2)),
        pack_sequence([torch.ones(2)]),
        torch.eye(2).to_sparse(),
        torch.ones(2).as_subclass(Image),
    ],
    ids=["object", "packed sequence", "sparse", "subclass"],
)
def test_what_is_no_plain_host_tensor_is_copied_on_the_trainings_stream(
    gpu: Accelerator, value: Graph | PackedSequence | Tensor
) -> None:
    for _ in ToDevice("cuda", ahead=True)(iter([{"x": value}])):
        pass

    assert {*copies(gpu)} == {gpu.training}


@pytest.mark.parametrize(
    "x",
    [torch.ones(1, 3).expand(4, 3), torch.arange(6)[::2], torch.eye(3).t(), torch.ones(0), torch.tensor(2)],
)
def test_a_tensor_of_any_layout_can_be_copied(gpu: Accelerator, x: Tensor) -> None:
    read = next(ToDevice("cuda", ahead=False)(iter([x])))

    assert torch.equal(read.cpu(), x)
