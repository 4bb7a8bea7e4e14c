"""The loaders of the matrix: tables of what makes the noise, and of what makes the batches."""

from __future__ import annotations

import itertools
import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

SAMPLES, BATCH = 26, 4
"""Seven batches an epoch, the last one short."""

Draw = Callable[[], list[float]]
RNG = np.random.default_rng(9)


# Noise: a sample is its index and three numbers.


def new_seed() -> int:
    """Return another seed for each object of each start, so that nothing comes back by luck."""
    return random.getrandbits(31)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(new_seed())


def silence() -> list[float]:
    return [0.0, 0.0, 0.0]


def python() -> list[float]:
    return [random.random(), random.gauss(0, 1), random.gauss(0, 1)]


def numpy() -> list[float]:
    return [np.random.rand(), np.random.randn(), np.random.randn()]


def of_torch() -> list[float]:
    return [torch.rand(()).item(), *torch.randn(2).tolist()]


def all_three() -> list[float]:
    """Of normal numbers, Python and NumPy keep the second of each pair for later."""
    return [random.gauss(0, 1), float(np.random.randn()), torch.randn(()).item()]


def seeding() -> list[float]:
    """Seed and set the generators of a worker now and then."""
    if (at := random.randrange(8)) == 0:
        random.seed(at), np.random.seed(at), torch.manual_seed(at)
    elif at == 1:
        random.setstate(random.Random(at).getstate())
        np.random.set_state(np.random.RandomState(at).get_state())
    return all_three()


def of_the_module() -> list[float]:
    return [RNG.random(), RNG.normal(), RNG.random()]


def of_the_worker() -> list[float]:
    info = get_worker_info()
    return [info.id, info.seed % 1009 / 1009, 0.0] if info else [-1.0, 0.0, 0.0]


class Own:
    """One generator in an attribute."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(new_seed())

    def __call__(self) -> list[float]:
        return [self.rng.random(), self.rng.normal(), float(self.rng.integers(9))]


class Nested:
    """Generators nested as transforms nest them."""

    def __init__(self) -> None:
        crop, flip = random.Random(new_seed()), np.random.RandomState(new_seed())
        self.transforms: Any = [{"crop": crop}, (flip, generator())]

    def __call__(self) -> list[float]:
        crop, (flip, jitter) = self.transforms[0]["crop"], self.transforms[1]
        return [crop.gauss(0, 1), flip.randn(), torch.rand((), generator=jitter).item()]


class Late:
    """A generator that the first sample makes."""

    rng: np.random.Generator | None = None

    def __call__(self) -> list[float]:
        if self.rng is None:
            info = get_worker_info()
            self.rng = np.random.default_rng(info.seed if info else 7)
        return [self.rng.random(), self.rng.normal(), random.random()]


def reseed(worker_id: int) -> None:
    info = get_worker_info()
    random.seed(worker_id), np.random.seed(info.seed % 2**32)
    info.dataset.noise.rng = np.random.default_rng([info.seed, worker_id])


def with_noise(samples: Any, noise: Draw) -> torch.Tensor:
    stacked = torch.stack(samples) if isinstance(samples, list) else samples
    return stacked + torch.tensor([0.0, *noise()])


def closure() -> Callable[[Any], torch.Tensor]:
    rng = random.Random(new_seed())
    return lambda samples: with_noise(samples, lambda: [rng.random(), rng.gauss(0, 1), 0.0])


class Noise(NamedTuple):
    """What makes the noise of a sample, and settings of the loader; made again in each start."""

    of_a_sample: Callable[[], Draw]
    settings: Callable[[], dict[str, Any]] = dict


NOISE = {
    "silence": Noise(lambda: silence),
    "python": Noise(lambda: python),
    "numpy": Noise(lambda: numpy),
    "torch": Noise(lambda: of_torch),
    "all-three": Noise(lambda: all_three),
    "seeding": Noise(lambda: seeding),
    "own": Noise(Own),
    "nested": Noise(Nested),
    "late": Noise(Late),
    "module": Noise(lambda: of_the_module),
    "worker": Noise(lambda: of_the_worker),
    "collate": Noise(lambda: silence, lambda: {"collate_fn": partial(with_noise, noise=all_three)}),
    "own-collate": Noise(lambda: silence, lambda: {"collate_fn": closure()}),
    "partial-collate": Noise(lambda: python, lambda: {"collate_fn": partial(with_noise, noise=Nested())}),
    "reseeded": Noise(Own, lambda: {"worker_init_fn": reseed}),
}


# Datasets.


class Images(Dataset[torch.Tensor]):
    """Samples of a map-style dataset."""

    def __init__(self, noise: Draw = all_three, length: int = SAMPLES) -> None:
        self.noise, self.length = noise, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 10, *self.noise()])


class ManyAtOnce(Images):
    """Samples that are loaded by the batch."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        shared = random.random()
        return [torch.tensor([index + shared, *self.noise()]) for index in indices]


class Counting(Images):
    """Samples that depend on how many this copy of the dataset has given."""

    given = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.given += 1
        return super().__getitem__(index) + self.given

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]


def shard(length: int) -> range:
    """Return the part of this worker; the first one's is the smallest."""
    info = get_worker_info()
    if info is None:
        return range(length)
    cuts = [length * i * (i + 1) // (info.num_workers * (info.num_workers + 1)) for i in range(9)]
    return range(cuts[info.id], cuts[info.id + 1])


class Stream(IterableDataset[torch.Tensor]):
    """A stream without a state."""

    def __init__(self, noise: Draw = all_three, length: int = SAMPLES) -> None:
        self.noise, self.length = noise, length

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in self.order():
            yield torch.tensor([index / 10, *self.noise()])

    def order(self) -> Iterable[int]:
        return shard(self.length)


class OrderedAtOnce(Stream):
    """A stream that draws its order in iter(), not with its first sample."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        indices = random.sample([*self.order()], len([*self.order()]))
        return (torch.tensor([index / 10, *self.noise()]) for index in indices)


class Endless(Stream):
    def order(self) -> Iterable[int]:
        info = get_worker_info()
        return itertools.count(info.id, info.num_workers) if info else itertools.count()


class Buffered(Stream):
    """A stream behind a shuffle buffer, which draws from Python's generator."""

    rng: Any = random

    def order(self) -> Iterator[int]:
        buffer: list[int] = []
        for index in shard(self.length):
            buffer.append(index)
            if len(buffer) > 5:
                yield buffer.pop(self.rng.randrange(len(buffer)))
        self.rng.shuffle(buffer)
        yield from buffer


class OwnBuffered(Buffered):
    def __init__(self, noise: Draw) -> None:
        super().__init__(noise)
        self.rng = random.Random(new_seed())


class DrawsAtItsEnd(Stream):
    """A stream that draws after its last sample."""

    def order(self) -> Iterator[int]:
        yield from shard(self.length)
        self.noise()


class Stateful(Stream):
    """A stream whose dataset knows where it is, and how often it has been read."""

    at, passes = 0, 0

    def order(self) -> Iterator[int]:
        mine = shard(self.length)
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1] + 100 * self.passes
        self.at, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.passes = state["at"], state["passes"]


class BeginsThere(Stateful):
    """A stream that begins in every epoch where it was put once, as Hugging Face's do."""

    start = 0

    def order(self) -> Iterator[int]:
        mine = shard(self.length)
        for at in range(self.start, len(mine)):
            self.at = at + 1
            yield mine[at]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class ItsOwn(Stateful):
    """A stream that is its own iterator."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> torch.Tensor:
        mine = shard(self.length)
        if self.at == len(mine):
            self.at, self.passes = 0, self.passes + 1
            raise StopIteration
        self.at += 1
        return torch.tensor([mine[self.at - 1] + self.passes, *self.noise()])


class NewEachPass(Stream):
    """A stream that makes a generator as a pass begins."""

    rng: Any = None

    def order(self) -> Iterator[int]:
        info = get_worker_info()
        self.rng = np.random.default_rng(info.seed if info else 0)
        for index in shard(self.length):
            yield index + self.rng.random()


class StatefulIterators(Stream):
    """A stream whose iterators know where they are."""

    def __iter__(self) -> Walk:
        return Walk(self.noise, shard(self.length))


class Walk(Iterator[torch.Tensor]):
    def __init__(self, noise: Draw, mine: Sequence[int]) -> None:
        self.noise, self.mine, self.at = noise, mine, 0

    def __next__(self) -> torch.Tensor:
        if self.at == len(self.mine):
            raise StopIteration
        self.at += 1
        return torch.tensor([self.mine[self.at - 1] / 10, *self.noise()])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


# Samplers.


class PythonBatches(Sampler[list[int]]):
    """Batches of one to six samples; all is drawn as the pass begins."""

    def __iter__(self) -> Iterator[list[int]]:
        left, sizes = random.sample(range(SAMPLES), SAMPLES), random.choices(range(1, 7), k=SAMPLES)
        while left:
            size = sizes.pop()
            yield left[:size]
            left = left[size:]


class LiveBatches(Sampler[list[int]]):
    """Batches that are drawn one at a time, so that what the training drew in between decides too."""

    def __iter__(self) -> Iterator[list[int]]:
        left = [*range(SAMPLES)]
        while left:
            yield [left.pop(np.random.randint(len(left))) for _ in range(min(BATCH, len(left)))]


class OwnOrder(Sampler[int]):
    """An order from a generator of the sampler, drawn as the pass begins."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(new_seed())

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(SAMPLES).tolist()

    def __len__(self) -> int:
        return SAMPLES


class OwnLate(OwnOrder):
    """The same, drawn with each index."""

    def __iter__(self) -> Iterator[int]:
        return (int(self.rng.integers(SAMPLES)) for _ in range(SAMPLES))


class GlobalLate(OwnOrder):
    """Indices that torch's generator draws one by one."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(SAMPLES, ())) for _ in range(SAMPLES))


class StatefulOrder(OwnOrder):
    """An order that depends on how often it was drawn."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter([(index * 7 + self.passes) % SAMPLES for index in range(SAMPLES)])

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


# Iterables that are no DataLoader.


class Permuted:
    """An iterable with a generator of its own."""

    def __init__(self, noise: Draw) -> None:
        self.noise, self.rng = noise, np.random.default_rng(new_seed())

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in self.rng.permutation(6):
            yield torch.tensor([[number / 10, *self.noise()]])


class Ahead(Permuted):
    """One that has loaded three batches more than it has given."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        waiting: list[torch.Tensor] = []
        for batch in super().__iter__():
            waiting.append(batch)
            if len(waiting) > 3:
                yield waiting.pop(0)
        yield from waiting


class Resumable:
    """Batches of an order that is drawn in iter(); its state tells what is left of it."""

    def __init__(self, noise: Draw) -> None:
        self.noise = noise
        self.order: list[int] = []

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self.order:
            self.order = torch.randperm(6).tolist()
        return self.rest()

    def rest(self) -> Iterator[torch.Tensor]:
        while self.order:
            yield torch.tensor([[self.order.pop() / 10, *self.noise()]])

    def state_dict(self) -> dict[str, Any]:
        return {"order": [*self.order]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = list(state["order"])


class BeginsAnew(Resumable):
    """Its order is drawn with its first batch, as MosaicML's is."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from super().__iter__()


class StaysAtItsEnd(Resumable):
    """Once it was put somewhere it continues from there, at its end too; each pass begins with a draw."""

    is_put = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        torch.rand(())
        if not self.is_put:
            self.order = torch.randperm(6).tolist()
        self.is_put = False
        return self.rest()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.is_put = True


class Sticks:
    """Batches that begin where they were put, in every epoch again: Hugging Face's datasets do so."""

    start: Any = None
    state: Any = None

    def __init__(self, noise: Draw) -> None:
        self.noise = noise

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.state = {"at": self.start["at"] if self.start else 0}
        while self.state["at"] < 6:
            self.state["at"] += 1
            yield torch.tensor([[self.state["at"] / 10, *self.noise()]])

    def state_dict(self) -> Any:
        return self.state and dict(self.state)

    def load_state_dict(self, state: Any) -> None:
        self.start = state


def function(noise: Draw) -> Callable[[], Iterator[torch.Tensor]]:
    """Return what makes batches each of which has what was drawn for those before it."""

    def batches() -> Iterator[torch.Tensor]:
        drawn = torch.zeros(3)
        for number in torch.randperm(6):
            drawn = drawn + torch.tensor(noise())
            yield torch.cat([number[None] / 10, drawn])[None]

    return batches


def with_a_generator(noise: Draw) -> Callable[[], Iterator[torch.Tensor]]:
    own = np.random.default_rng(new_seed())

    def batches() -> Iterator[torch.Tensor]:
        for number in own.permutation(6):
            yield torch.tensor([[number / 10 + own.random(), *noise()]])

    return batches


def iterator(noise: Draw) -> Iterator[torch.Tensor]:
    return (torch.tensor([[number / 10, *noise()]]) for number in range(16))


class Background(threading.Thread):
    """The generator that loads in a thread, as everyone copies it."""

    def __init__(self, batches: Iterable[Any]) -> None:
        super().__init__(daemon=True)
        self.queue: queue.Queue[Any] = queue.Queue(2)
        self.batches = batches
        self.start()

    def run(self) -> None:
        for batch in self.batches:
            self.queue.put(batch)
        self.queue.put(None)

    def __iter__(self) -> Background:
        return self

    def __next__(self) -> Any:
        if (batch := self.queue.get()) is None:
            raise StopIteration
        return batch


class DataLoaderX(DataLoader[torch.Tensor]):
    """The loader that everyone copies with it."""

    def __iter__(self) -> Any:
        return Background(super().__iter__())


# Loaders: what makes each, by the family that shares its way to resume.


def on(dataset: Any, batch_size: int | None = BATCH, **settings: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size, **settings)


def shared(noise: Draw, **settings: Any) -> DataLoader[Any]:
    """One generator for the order, for the loader and for the samples."""
    images = Images(noise)
    images.rng = generator()  # type: ignore[attr-defined]
    sampler = RandomSampler(images, generator=images.rng)  # type: ignore[attr-defined]
    return on(images, sampler=sampler, generator=images.rng, **settings)  # type: ignore[attr-defined]


def distributed(noise: Draw, **settings: Any) -> DataLoader[Any]:
    images = Images(noise, 2 * SAMPLES - 1)
    return on(images, sampler=DistributedSampler(images, num_replicas=2, rank=1, seed=3), **settings)


def concatenated(noise: Draw, **settings: Any) -> DataLoader[Any]:
    both = ConcatDataset([Images(noise, 15), Images(noise, 15)])
    return on(Subset(both, range(3, 28)), shuffle=True, **settings)


def torchdata(dataset: Any, **settings: Any) -> DataLoader[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, BATCH, **settings)


def dealt(noise: Draw, **settings: Any) -> DataLoader[Any]:
    """A loader whose sampler counts what it has yielded."""
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    images = Images(noise)
    return torchdata(images, sampler=StatefulDistributedSampler(images, 1, 0), **settings)


def drawn(noise: Draw, **settings: Any) -> DataLoader[Any]:
    """A loader whose sampler draws now and then."""
    from torchdata.stateful_dataloader.sampler import RandomSampler

    images = Images(noise)
    return torchdata(images, sampler=RandomSampler(images, True, 40), **settings)


weighted = partial(WeightedRandomSampler, range(1, SAMPLES + 1), SAMPLES)

Make = Callable[..., Any]
FAMILIES: dict[str, dict[str, Make]] = {
    "order": {
        "sequential": lambda n, **s: on(Images(n), **s),
        "shuffle": lambda n, **s: on(Images(n), shuffle=True, **s),
        "weighted": lambda n, **s: on(Images(n), sampler=weighted(), **s),
        "subset": lambda n, **s: on(Images(n), sampler=SubsetRandomSampler(range(3, 25)), **s),
        "distributed": distributed,
        "concatenated": concatenated,
    },
    "own-order": {
        "loader-generator": lambda n, **s: on(Images(n), generator=generator(), **s),
        "shuffle-generator": lambda n, **s: on(Images(n), shuffle=True, generator=generator(), **s),
        "shared-generator": shared,
        "weighted-generator": lambda n, **s: on(Images(n), sampler=weighted(generator=generator()), **s),
        "replacement": lambda n, **s: on(
            Images(n), sampler=RandomSampler(Images(n), True, 40, generator()), **s
        ),
        "more-than-all": lambda n, **s: on(
            Images(n), sampler=RandomSampler(Images(n), num_samples=35, generator=generator()), **s
        ),
        "own-order": lambda n, **s: on(Images(n), sampler=OwnOrder(), **s),
        "own-late": lambda n, **s: on(Images(n), sampler=OwnLate(), **s),
        "stateful-order": lambda n, **s: on(Images(n), sampler=StatefulOrder(), **s),
    },
    "batches": {
        "global-late": lambda n, **s: on(Images(n), sampler=GlobalLate(), **s),
        "python-batches": lambda n, **s: on(Images(n), 1, batch_sampler=PythonBatches(), **s),
        "live-batches": lambda n, **s: on(Images(n), 1, batch_sampler=LiveBatches(), **s),
        "no-batches": lambda n, **s: on(Images(n, 7), None, shuffle=True, **s),
        "drop-last": lambda n, **s: on(Images(n), shuffle=True, drop_last=True, **s),
        "even": lambda n, **s: on(Images(n, 24), shuffle=True, **s),
        "few": lambda n, **s: on(Images(n, 9), shuffle=True, **s),
        "many-at-once": lambda n, **s: on(ManyAtOnce(n), shuffle=True, **s),
        "counting": lambda n, **s: on(Counting(n), shuffle=True, **s),
        "sample-seeds": lambda n, **s: on(Images(n), shuffle=True, **s),
        "prefetch-1": lambda n, **s: on(Images(n), shuffle=True, prefetch_factor=1, **s),
        "prefetch-4": lambda n, **s: on(Images(n), shuffle=True, prefetch_factor=4, **s),
        "subclass": lambda n, **s: DataLoaderX(Images(n), BATCH, shuffle=True, **s),
    },
    "streams": {
        "stream": lambda n, **s: on(Stream(n), **s),
        "stream-no-batches": lambda n, **s: on(Stream(n, 9), None, **s),
        "stream-drop-last": lambda n, **s: on(Stream(n), drop_last=True, **s),
        "ordered-at-once": lambda n, **s: on(OrderedAtOnce(n), **s),
        "endless": lambda n, **s: on(Endless(n), **s),
        "buffered": lambda n, **s: on(Buffered(n), **s),
        "own-buffered": lambda n, **s: on(OwnBuffered(n), **s),
        "draws-at-its-end": lambda n, **s: on(DrawsAtItsEnd(n), **s),
        "new-each-pass": lambda n, **s: on(NewEachPass(n), **s),
    },
    "stateful": {
        "stateful-stream": lambda n, **s: on(Stateful(n), **s),
        "stateful-drop-last": lambda n, **s: on(Stateful(n), drop_last=True, **s),
        "stateful-iterators": lambda n, **s: on(StatefulIterators(n), **s),
        "begins-there": lambda n, **s: on(BeginsThere(n), **s),
        "its-own": lambda n, **s: on(ItsOwn(n), **s),
        "torchdata": lambda n, **s: torchdata(Images(n), shuffle=True, **s),
        "torchdata-generator": lambda n, **s: torchdata(
            Images(n), shuffle=True, generator=generator(), snapshot_every_n_steps=3, **s
        ),
        "torchdata-stream": lambda n, **s: torchdata(Stateful(n), **s),
        "torchdata-iterators": lambda n, **s: torchdata(StatefulIterators(n), **s),
        "torchdata-no-state": lambda n, **s: torchdata(Stream(n), **s),
        "torchdata-counting": lambda n, **s: torchdata(Counting(n), shuffle=True, **s),
        "torchdata-dealt": dealt,
        "torchdata-drawn": drawn,
    },
    "plain": {
        "list": lambda n: [*torch.arange(24.0).reshape(6, 1, 4) / 10],
        "iterator": iterator,
        "remade-iterator": iterator,
        "function": function,
        "function-generator": with_a_generator,
        "iterable": Permuted,
        "ahead": Ahead,
        "own-state": Resumable,
        "begins-anew": BeginsAnew,
        "sticks": Sticks,
        "stays-at-its-end": StaysAtItsEnd,
    },
}
LOADERS = {name: make for family in FAMILIES.values() for name, make in family.items()}
FAMILY_OF = {name: family for family, found in FAMILIES.items() for name in found}
