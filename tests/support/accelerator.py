"""A model of CUDA devices: their memory is host memory, and what they are given to do is done late.

A tensor is on a device if its storage lies in that device's memory; to torch's own code it is a tensor of
the CPU, so that autograd, optimizers and modules work as they are. A dispatch mode, entered in every
thread, queues what is called with such tensors. What is queued runs when somebody waits, in an order that
seeded dice choose among all that streams, events and the copy engines allow.

Not modeled: time, copies between processes, events and forks inside a captured graph, autocast, and what
the CPU cannot compute.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from resumable.files import file_reader, threads
from resumable.parts import device_lanes, places
from resumable.position import to_device
from resumable.saving import gpu_buffers, gpu_copies, host_memory
from tests.support.device_memory import HostMemory, Memory
from tests.support.device_streams import Event, Graph, Item, Queues, Stream, become_present, present

_aten: Any = torch.ops.aten
_own_device: Any = torch._C.TensorBase.device  # type: ignore[attr-defined]
_READS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return the_accelerator().call(func, args, kwargs or {})


class Accelerator(Queues):
    """Some devices for machines without any."""

    def __init__(self, seed: int, count: int = 2) -> None:
        super().__init__(seed, count)
        self.memories = [Memory() for _ in range(count)]
        self.pinned = HostMemory()
        self.pins = 0
        self.blocking_copies: list[int] = []
        """The sizes of those that were made from or to memory that is not pinned, or waited for."""
        self.generators = [torch.Generator() for _ in self.memories]

    @property
    def memory(self) -> Memory:
        """The memory of the device that trains."""
        return self.memories[-1]

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:  # noqa: N802
        self.contexts.add(self.current_device())
        self.forbid_in_captures("cudaHostRegister")
        self.pinned.registered[place] = place + size
        return 0

    def cudaHostUnregister(self, place: int) -> int:  # noqa: N802
        self.contexts.add(self.current_device())
        self.pinned.registered.pop(place, None)
        return 0

    def index_of(self, tensor: Tensor) -> int | None:
        """Return the number of the device that a tensor is on; None for the host."""
        if _own_device.__get__(tensor).type != "cpu" or tensor.layout != torch.strided:
            return None
        place = tensor.data_ptr() or tensor.untyped_storage().data_ptr()
        return next((n for n, memory in enumerate(self.memories) if memory.holds(place)), None)

    def device_of(self, tensor: Tensor) -> torch.device:
        index = self.index_of(tensor)
        own: torch.device = _own_device.__get__(tensor)
        return own if index is None else torch.device("cuda", index)

    def named(self, device: torch.device) -> torch.device:
        """Return a device with its number, if it has one."""
        return self.device(device) if device.type == "cuda" else device

    def put(self, content: Tensor, device: Any = None) -> Tensor:
        """Return a copy on a device, which has long been made."""
        with torch._C._DisableTorchDispatch(), torch.no_grad():  # type: ignore[attr-defined]
            made = self._empty_like(
                content, self.device(self.training_device if device is None else device).index
            )
            return made.copy_(content)

    def _empty_like(self, like: Tensor, index: int | None, pin: bool = False) -> Tensor:
        """Return a new tensor in the memory of a device, or of the host."""
        if index is None and not pin:
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        with self.lock:
            if index is None:
                self.pins += 1
                return self.pinned.empty_like(like)
            self.contexts.add(index)
            stream = self.stream(index)
            try:
                return self.memories[index].empty_like(like, stream)
            except torch.OutOfMemoryError:
                # torch gives back what it keeps for later, and tries again.
                self.run_until(lambda: not any(s.work for s in self.streams if s.device.index == index))
                self.memories[index].forget_free()
                return self.memories[index].empty_like(like, stream)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        index = self.index_of(tensor)
        assert index is not None, "a tensor of the host"
        self.memories[index].note_use(tensor, stream)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do what torch was called to do, now or later."""
        if func is _aten.is_pinned.default:
            return self.pinned.is_pinned(args[0])
        if func is _aten._pin_memory.default or kwargs.get("pin_memory"):
            return self._pinned(func, args, kwargs)
        target = kwargs.get("device")
        indices = {self.index_of(tensor) for tensor in _tensors((args, kwargs))} - {None}
        if target is not None and target.type == "cuda":
            indices.add(self.device(target).index)
        if not indices:
            return func(*args, **kwargs)
        if func in (_aten._to_copy.default, _aten.copy_.default):
            return (self._to if func is _aten._to_copy.default else self._copy)(*args, **kwargs)
        if func is _aten._foreach_copy_.default and not _are_alike(self, args):
            for to, of in zip(args[0], args[1], strict=True):
                self._copy(to, of, *args[2:])
            return None
        if func in _READS:
            self.stream(min(indices)).synchronize()
            return func(*args, **kwargs)
        if _is_view(func):
            return func(*args, **kwargs)
        assert len(indices) == 1, f"{func} of tensors on several devices: {indices}"
        return self._kernel(func, args, kwargs, indices.pop())

    def _pinned(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        kwargs = {**kwargs, "pin_memory": False, "device": torch.device("cpu")}
        like = args[0] if func is _aten._pin_memory.default else func(*args, **kwargs)
        return self._empty_like(like, None, pin=True).copy_(like)

    def _kernel(self, func: Any, args: Any, kwargs: Any, index: int) -> Any:
        device, name = torch.device("cuda", index), func._schema.name.removeprefix("aten::")
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if torch.Tag.nondeterministic_seeded in func.tags:
            # The numbers that are drawn depend on the host alone: it counts what it gives the device to draw.
            assert func._schema.name.endswith("_"), f"{func} is not modeled"
            assert self.stream(device).captured is None, f"{func} in a graph is not modeled"
            drawn = torch.empty(args[0].shape, dtype=args[0].dtype)
            func(drawn, *args[1:], **{**kwargs, "generator": self.generators[index]})
            place = self._raw(args[0])
            self.launch(name, lambda: place.copy_(drawn), device)
            return args[0]
        later = partial(func, *_mapped(self._operand, args), **_mapped(self._operand, kwargs))
        written = [number for number, arg in enumerate(func._schema.arguments) if _is_written(arg)]
        if written and all(one.alias_info for one in func._schema.returns):
            self.launch(name, later, device)
            if "out" in kwargs:
                return kwargs["out"]
            return args[written[0]] if func._schema.returns else None
        if func is _aten.empty_like.default or func is _aten.empty.memory_format:
            return self._empty_like(later(), index)
        shapes = func(*_mapped(_on_meta, args), **_mapped(_on_meta, _with_meta(kwargs)))
        outputs = _mapped(lambda like: self._empty_like(like, index), shapes)
        places = [self._raw(output) for output in _tensors(outputs)]

        def run() -> None:
            for place, output in zip(places, _tensors(later()), strict=True):
                place.copy_(output)

        self.launch(name, run, device)
        if (stream := self.stream(device)).captured is not None:
            stream.kept.append(outputs)
        return outputs

    def _operand(self, tensor: Tensor) -> Tensor:
        if self.index_of(tensor) is not None:
            return self._raw(tensor)
        assert not tensor.dim(), "a tensor of the host among those of a device"
        return tensor.clone()

    @contextmanager
    def leaving(self, leaves: bool) -> Iterator[None]:
        """Let a conversion of a tensor to the CPU, which torch believes it is on, be one to the host."""
        self._mine.leaves = leaves
        try:
            yield
        finally:
            self._mine.leaves = False

    def _to(self, source: Tensor, **given: Any) -> Tensor:
        if source.layout == torch.sparse_coo:
            parts = [self._to(one, device=given["device"]) for one in (source._indices(), source._values())]
            return torch.sparse_coo_tensor(*parts, source.shape, check_invariants=False)
        device = given.pop("device", None) or self.device_of(source)
        if device.type == "cpu" and not getattr(self._mine, "leaves", False):
            # What torch takes for the tensor's own device.
            device = self.device_of(source)
        non_blocking = given.pop("non_blocking", False)
        like = _aten._to_copy.default(_on_meta(source), **{**given, "device": torch.device("meta")})
        made = self._empty_like(like, None if device.type == "cpu" else self.device(device).index)
        return self._copy(made, source, non_blocking)

    def _copy(self, to: Tensor, of: Tensor, non_blocking: bool = False) -> Tensor:
        there, here = self.index_of(to), self.index_of(of)
        index = here if there is None else there
        assert index is not None
        stream = self.stream(index)
        if there is not None and here is not None:
            if there != here:
                stream.wait_stream(self.stream(here))
            places = self._raw(to), self._raw(of)
            self.queue(Item("copy_", lambda: places[0].copy_(places[1])), stream)
            if there != here:
                self.stream(here).wait_stream(stream)
            return to
        host = to if there is None else of
        is_pinned = self.pinned.is_pinned(host)
        if is_pinned:
            self.pinned.note_use(host, stream)
        # What is not pinned is read before the driver returns.
        places = self._raw(to), self._raw(of) if is_pinned or of is not host else of.detach().clone()
        engine = index, "to the host" if there is None else "to the device"
        self.queue(Item(f"copy_ {to.nbytes}", lambda: places[0].copy_(places[1]), engine=engine), stream)
        if not (non_blocking and is_pinned):
            self.blocking_copies.append(to.nbytes)
        if not non_blocking or (there is None and not is_pinned):
            stream.synchronize()
        return to

    def _raw(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same memory; if that has an allocator, it may be used again."""
        for memory in (*self.memories, self.pinned):
            if memory.holds(tensor.data_ptr()):
                return memory.alias(tensor)
        return tensor.detach()


def _mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(change, one) for one in value)
    if isinstance(value, dict):
        return {key: _mapped(change, one) for key, one in value.items()}
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(found.append, value)
    return found


def _are_alike(gpu: Accelerator, args: Any) -> bool:
    return len({gpu.index_of(tensor) for tensor in _tensors(args)}) == 1


def _is_written(argument: Any) -> bool:
    return bool(argument.alias_info and argument.alias_info.is_write)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(one.alias_info and not one.alias_info.is_write for one in returns)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _with_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs


def the_accelerator() -> Accelerator:
    """Return the one that is there."""
    found: Accelerator = present()
    return found


def replace(seed: int, count: int = 2) -> Accelerator:
    """Put another one in place of the one that is there, as a start in a new process does."""
    gpu = Accelerator(seed, count)
    become_present(gpu)
    for cache in (gpu_buffers.side_stream, device_lanes._side_stream, to_device._side_stream):
        cache.cache_clear()
    torch.cuda.default_generators = tuple(gpu.generators)
    return gpu


@contextmanager
def installed(patch: pytest.MonkeyPatch, seed: int = 0, count: int = 2) -> Iterator[Accelerator]:
    """Let torch and the library find it wherever they look for CUDA."""
    run = threading.Thread.run

    def run_in_mode(thread: threading.Thread) -> None:
        # Any thread may do what is queued, and how a sum is split among processors changes its bits.
        torch.set_num_threads(1)
        with _Mode():
            run(thread)

    def to(tensor: Tensor, *args: Any, **given: Any) -> Tensor:
        gpu = the_accelerator()
        if gpu.index_of(tensor) is None:
            return original_to(tensor, *args, **given)  # type: ignore[no-any-return]
        is_copy = given.pop("copy", False)
        device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **given)
        device = tensor.device if device is None else gpu.named(device)
        is_laid_out = layout is None or tensor.is_contiguous(memory_format=layout)
        if (device, dtype or tensor.dtype, is_laid_out, is_copy) == (
            tensor.device,
            tensor.dtype,
            True,
            False,
        ):
            return tensor
        given = {"dtype": dtype, "device": device, "non_blocking": non_blocking, "memory_format": layout}
        with gpu.leaving(device.type == "cpu"):
            return _aten._to_copy(tensor, **given)  # type: ignore[no-any-return]

    def on_host(name: str) -> Any:
        original = getattr(Tensor, name)

        def checked(tensor: Tensor, *args: Any, **given: Any) -> Any:
            if the_accelerator().index_of(tensor) is not None:
                raise TypeError(f"can't do {name} of a tensor on {tensor.device}")
            return original(tensor, *args, **given)

        return checked

    original_to: Any = Tensor.to
    of_tensors = {
        "device": property(lambda tensor: the_accelerator().device_of(tensor)),
        "is_cuda": property(lambda tensor: the_accelerator().index_of(tensor) is not None),
        "is_cpu": property(lambda tensor: the_accelerator().device_of(tensor).type == "cpu"),
        "to": to,
        "cpu": lambda tensor: tensor.to("cpu"),
        "cuda": lambda tensor, device=None: tensor.to(the_accelerator().device(device)),
        "numpy": on_host("numpy"),
        "tolist": lambda tensor: original_tolist(tensor.cpu()),
        "record_stream": lambda tensor, stream: the_accelerator().record_stream(tensor, stream),
    }
    original_tolist = Tensor.tolist
    of_cuda = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: len(the_accelerator().memories),
        "current_device": lambda: the_accelerator().current_device(),
        "set_device": lambda device: the_accelerator().set_device(device),
        "device": lambda device: the_accelerator().on_device(device),
        "stream": lambda stream: the_accelerator().on_stream(stream),
        "current_stream": lambda device=None: the_accelerator().stream(device),
        "synchronize": lambda device=None: the_accelerator().synchronize(device),
        "get_device_name": lambda index=None: "a model",
        "default_generators": (),
        "get_rng_state": lambda device=None: _generator(device).get_state(),
        "set_rng_state": lambda state, device=None: _generator(device).set_state(state),
        "cudart": the_accelerator,
        "mem_get_info": lambda device=None: _memory(device).info(),
        "memory_reserved": lambda device=None: _memory(device).reserved,
        "memory_allocated": lambda device=None: _memory(device).allocated,
        "max_memory_allocated": lambda device=None: _memory(device).peak,
        "is_current_stream_capturing": lambda: the_accelerator().is_capturing(),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": lambda graph, **given: the_accelerator().capture(graph, **given),
    }
    for name, value in of_tensors.items():
        patch.setattr(Tensor, name, value, raising=False)
    for name, value in of_cuda.items():
        patch.setattr(torch.cuda, name, value, raising=False)
    patch.setattr(threads, "_driver", the_accelerator)
    patch.setattr(threading.Thread, "run", run_in_mode)
    gpu, processors = replace(seed, count), torch.get_num_threads()
    torch.set_num_threads(1)
    with _Mode():
        yield gpu
    torch.set_num_threads(processors)
    # Memory that was dropped is unregistered with this driver.
    collect()


def collect() -> None:
    """Let go of what is dropped; a thread that has just come to its end may still hold it."""
    for thread in threading.enumerate():
        if thread.name.startswith("resumable-"):
            thread.join(10)
    gc.collect()


def make_small(patch: pytest.MonkeyPatch) -> None:
    """Let saves and loads treat a few numbers as a large tensor, which is copied in many pieces."""
    for name, value in {"_SMALL": 48, "_PIECE": 64, "_STAGED": 64, "_SAMPLES": 3}.items():
        patch.setattr(gpu_copies, name, value)
    patch.setattr(host_memory, "_REGISTERED", 4096)
    patch.setattr(file_reader, "_PIECE", 256)
    patch.setattr(places, "_SMALL", 48)
    patch.setattr(device_lanes, "_ROOM", 256)


def _memory(device: Any) -> Memory:
    gpu = the_accelerator()
    gpu.contexts.add(gpu.device(device).index)
    return gpu.memories[gpu.device(device).index]


def _generator(device: Any) -> torch.Generator:
    gpu = the_accelerator()
    return gpu.generators[gpu.device(device).index]
