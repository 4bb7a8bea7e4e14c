"""The streams, events and graphs of modeled devices, and dice that decide when their work is done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Work = Callable[[], object]


class Stream:
    """Work that is done in order, but nobody knows when."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        gpu = present()
        self.device = gpu.device(device)
        self.work: deque[Item] = deque()
        self.done: list[str] = []
        """The names of what has been done."""
        self.captured: list[Item] | None = None
        """What a graph that is being captured consists of."""
        self.kept: list[Any] = []
        """The memory of that graph."""
        with gpu.lock:
            gpu.streams.append(self)

    def wait_event(self, event: Event) -> None:
        # An event that was never recorded keeps nobody waiting.
        if event.mark is not None:
            present().queue(Item("wait", lambda: None, event.mark), self)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        present().forbid_in_captures("cudaStreamSynchronize")
        present().run_until(lambda: not self.work)


class Event:
    """A place in the work of a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.mark: _Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        gpu = present()
        # As one: who waits for a mark that is in no queue yet would wait for ever.
        with gpu.lock:
            self.mark = _Mark()
            gpu.queue(Item("event", self.mark.end), stream or gpu.stream())

    def query(self) -> bool:
        gpu = present()
        gpu.forbid_in_captures("cudaEventQuery")
        gpu.run_some()
        return self.mark is None or self.mark.is_over

    def synchronize(self) -> None:
        gpu = present()
        # The driver makes a context for the thread's device, whatever the event's is.
        gpu.contexts.add(gpu.current_device())
        gpu.forbid_in_captures("cudaEventSynchronize")
        mark = self.mark
        gpu.run_until(lambda: mark is None or mark.is_over)


class _Mark:
    def __init__(self) -> None:
        self.is_over = False

    def end(self) -> None:
        self.is_over = True


class Item:
    def __init__(
        self, name: str, run: Work, waits_for: _Mark | None = None, engine: tuple[int, str] | None = None
    ) -> None:
        self.name = name
        self.run = run
        self.waits_for = waits_for
        self.engine = engine
        self.ticket = 0

    def is_ready(self) -> bool:
        return self.waits_for is None or self.waits_for.is_over


class Graph:
    """The work of a captured step."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.is_invalid = False

    def replay(self) -> None:
        gpu = present()
        for item in self.items:
            gpu.queue(Item(item.name, item.run, engine=item.engine), gpu.stream())


class Dice:
    """Seeded choices. One of Python's generators would be found, and asked to be saved with the training."""

    def __init__(self, seed: int) -> None:
        self._state = seed * 0x9E3779B97F4A7C15 % 2**64
        self.randrange(1)

    def randrange(self, count: int) -> int:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 33) % count

    def random(self) -> float:
        return self.randrange(1 << 30) / (1 << 30)

    def choice(self, items: Sequence[Any]) -> Any:
        return items[self.randrange(len(items))]


class Queues:
    """The work of some devices. Threads begin with the first; trainings here use the last."""

    def __init__(self, seed: int, count: int) -> None:
        self.dice = Dice(seed)
        self.lock = threading.RLock()
        self.count = count
        self.streams: list[Stream] = []
        self.contexts: set[int] = set()
        """The devices that this process has used."""
        self.captures: list[Graph] = []
        self.haste = self.dice.choice([0, 0.2, 0.5, 0.9])
        """How likely the training's stream is to run when others could."""
        self.eagerness = self.dice.choice([0, 0, 0.3])
        """How likely something runs before anybody waits for it."""
        self._tickets = 0
        self._mine = threading.local()
        self._defaults: dict[int, Stream] = {}

    def device(self, given: Any = None) -> torch.device:
        """Return a device with its number."""
        if given is None or isinstance(given, int):
            return torch.device("cuda", self.current_device() if given is None else given)
        given = torch.device(given)
        return torch.device("cuda", self.current_device() if given.index is None else given.index)

    @property
    def training_device(self) -> torch.device:
        return torch.device("cuda", self.count - 1)

    @property
    def training(self) -> Stream:
        """The stream in which the training works, if it says nothing else."""
        return self._default(self.training_device)

    def _default(self, device: torch.device) -> Stream:
        with self.lock:
            if device.index not in self._defaults:
                self._defaults[device.index] = Stream(device)
            return self._defaults[device.index]

    def current_device(self) -> int:
        return getattr(self._mine, "device", 0)

    def set_device(self, device: Any) -> None:
        self._mine.device = self.device(device).index

    @contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before = self.current_device()
        if device is not None:
            self.set_device(device)
        try:
            yield
        finally:
            self._mine.device = before

    def stream(self, device: Any = None) -> Stream:
        """Return this thread's current stream on a device."""
        device = self.device(device)
        current: dict[int, Stream] = getattr(self._mine, "streams", {})
        return current.get(device.index) or self._default(device)

    @contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = getattr(self._mine, "streams", {})
        self._mine.streams = {**before, stream.device.index: stream}
        try:
            with self.on_device(stream.device):
                yield
        finally:
            self._mine.streams = before

    def launch(self, name: str, work: Work, device: Any = None) -> None:
        """Queue work on this thread's current stream, as a kernel does."""
        self.queue(Item(name, work), self.stream(device or self.training_device))

    def queue(self, item: Item, stream: Stream) -> None:
        self.contexts.add(stream.device.index)
        with self.lock:
            if stream.captured is not None:
                stream.captured.append(item)
                return
            self._tickets += 1
            item.ticket = self._tickets
            stream.work.append(item)
            if self.dice.random() < self.eagerness:
                self.run_some()

    def run_some(self) -> None:
        """Run as much as the dice want."""
        with self.lock:
            while self.dice.random() < 0.5 and self.run_one():
                pass

    def run_until(self, is_over: Callable[[], bool]) -> None:
        while True:
            with self.lock:
                if is_over():
                    return
                assert self.run_one(), "everybody waits for somebody"

    def run_one(self) -> bool:
        """Run the first work of some stream that has any and need not wait."""
        heads = [(s, s.work[0]) for s in self.streams if s.work and s.work[0].is_ready()]
        # A copy engine takes what has come to it first.
        first: dict[Any, int] = {}
        for _, item in heads:
            if item.engine:
                first[item.engine] = min(item.ticket, first.get(item.engine, item.ticket))
        ready = [s for s, item in heads if not item.engine or item.ticket == first[item.engine]]
        if not ready:
            return False
        others = [stream for stream in ready if stream is not self.training]
        is_hasty = self.training in ready and self.dice.random() < self.haste
        chosen = self.training if is_hasty or not others else self.dice.choice(others)
        item = chosen.work.popleft()
        with torch._C._DisableTorchDispatch(), torch.no_grad():  # type: ignore[attr-defined]
            item.run()
        chosen.done.append(item.name)
        return True

    def synchronize(self, device: Any = None) -> None:
        """Wait for all streams of a device."""
        index = self.device(device).index
        self.forbid_in_captures("cudaDeviceSynchronize")
        self.run_until(lambda: not any(s.work for s in self.streams if s.device.index == index))

    def finish(self) -> None:
        """Run all that is queued anywhere."""
        self.run_until(lambda: not any(stream.work for stream in self.streams))

    @contextmanager
    def capture(self, graph: Graph, capture_error_mode: str = "global", **_: Any) -> Iterator[None]:
        stream = Stream(self.training_device)
        stream.captured = graph.items
        if capture_error_mode == "global":
            self.captures.append(graph)
        try:
            with self.on_stream(stream):
                yield
        finally:
            self.captures = [one for one in self.captures if one is not graph]
            stream.captured = None
        if graph.is_invalid:
            raise RuntimeError("operation failed due to a previous error during capture")

    def is_capturing(self) -> bool:
        stream = getattr(self._mine, "streams", {}).get(self.current_device())
        return stream is not None and stream.captured is not None

    def forbid_in_captures(self, name: str) -> None:
        """Spoil the captures that run, unless this thread has said that it knows what it does."""
        if not getattr(self._mine, "is_relaxed", False):
            for graph in self.captures:
                graph.is_invalid = True

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:  # noqa: N802
        self._mine.is_relaxed = True


_present: list[Any] = []


def present() -> Any:
    """Return the devices that are there."""
    return _present[-1]


def become_present(devices: Queues) -> None:
    """Put these devices in place of those that are there."""
    _present[:] = [devices]
