"""Random generators continue where they stood: a save leaves them alone, and a load restores them last."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import CannotStore, RunState, StateMismatch
from resumable.loaders.generators import rng, search, worker_rng


def _draw() -> list[float]:
    # An odd number of normal ones: the generators keep the other half of the pair.
    numbers = [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand()]
    return [*numbers, *torch.randn(3).tolist(), *torch.randperm(4).tolist()]


class Own:
    """Generators of the user's, one of each library."""

    def __init__(self, seed: int = 0) -> None:
        self.python = random.Random(seed)
        self.numpy = np.random.default_rng(seed)
        self.legacy = np.random.RandomState(seed)
        self.torch = torch.Generator().manual_seed(seed)

    def draw(self) -> list[float]:
        numbers = [self.python.gauss(0, 1), self.numpy.normal(), self.legacy.randn()]
        return [*numbers, *torch.randn(3, generator=self.torch).tolist()]


class Drawing:
    """An object that draws whenever it is asked for its state, and whenever it is given one."""

    def __init__(self, own: Own) -> None:
        self.own = own
        self.state: Any = {}

    def state_dict(self) -> Any:
        _draw()
        self.own.draw()
        return self.state

    def load_state_dict(self, state: Any) -> None:
        _draw()
        self.own.draw()


def _parts(own: Own) -> dict[str, Any]:
    # Generators before and after the one that draws.
    return {
        "python": own.python,
        "numpy": own.numpy,
        "it": Drawing(own),
        "legacy": own.legacy,
        "torch": own.torch,
    }


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def test_all_generators_draw_on_as_if_never_stopped(run_dir: Path) -> None:
    _seed(0)
    own = Own()
    expected = [_draw() + own.draw() for _ in range(4)]
    found = []
    for resume in range(4):
        _seed(resume)
        own = Own(resume)
        with RunState.load(run_dir, extra=_parts(own)) as state:
            for _ in range(state.step, 1):
                found.append(_draw() + own.draw())
                state.save()

    assert found == expected


def test_saving_touches_no_generator_even_if_a_state_dict_draws(run_dir: Path) -> None:
    own, straight = Own(), Own()
    with RunState.load(run_dir, extra=_parts(own)) as state:
        _seed(5)
        state.save()
        state.save().wait()
        found = _draw() + own.draw()
    _seed(5)

    assert found == _draw() + straight.draw()


def test_a_save_that_fails_touches_no_generator(run_dir: Path) -> None:
    own, straight = Own(), Own()
    parts = _parts(own)
    parts["it"].state = {"no place for": print}
    _seed(5)
    with RunState.load(run_dir, extra=parts) as state, pytest.raises(CannotStore):
        state.save()
    found = _draw() + own.draw()
    _seed(5)

    assert found == _draw() + straight.draw()


def test_a_load_that_is_refused_touches_no_generator(run_dir: Path) -> None:
    class Refusing(Drawing):
        def load_state_dict(self, state: Any) -> None:
            super().load_state_dict(state)
            raise ValueError("not this")

    with RunState.load(run_dir, extra=_parts(Own(9))) as state:
        state.save()
    own, straight = Own(), Own()
    _seed(5)
    with pytest.raises(StateMismatch, match=r"extra\.it refused its state"):
        RunState.load(run_dir, extra={**_parts(own), "it": Refusing(own)})
    found = _draw() + own.draw()
    _seed(5)

    assert found == _draw() + straight.draw()


class Noise(Dataset[float]):
    """Numbers from a generator of the dataset's own."""

    def __init__(self, bits: type[np.random.BitGenerator]) -> None:
        self.own = np.random.Generator(bits(0))

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        return self.own.random()


def _loaders(seed: int, bits: type[np.random.BitGenerator]) -> dict[str, DataLoader[float]]:
    generator = torch.Generator().manual_seed(seed)
    first = DataLoader(Noise(np.random.PCG64), shuffle=True, generator=generator)
    return {"first": first, "second": DataLoader(Noise(bits))}


def test_a_load_that_a_loader_refuses_touches_no_generator_of_another(run_dir: Path) -> None:
    with RunState.load(run_dir, loader=_loaders(1, np.random.PCG64)) as state:
        state.save()
    loaders = _loaders(2, np.random.Philox)
    before = loaders["first"].generator.get_state()

    with pytest.raises(StateMismatch, match=r"loader\.second"):
        RunState.load(run_dir, loader=loaders)

    assert torch.equal(loaders["first"].generator.get_state(), before)


def test_saving_touches_no_generator_of_a_loader(run_dir: Path) -> None:
    loader = _loaders(1, np.random.PCG64)["first"]
    own = Own()
    own.torch = loader.generator
    with RunState.load(run_dir, loader=loader, extra={"it": Drawing(own)}) as state:
        state.save()
    loaded = _loaders(2, np.random.PCG64)["first"]
    with RunState.load(run_dir, loader=loaded, extra={"it": Drawing(Own())}) as state:
        next(state.epochs(1))

    for generator in (loader.generator, loaded.generator):
        assert torch.equal(generator.get_state(), torch.Generator().manual_seed(1).get_state())


def test_no_device_is_started(run_dir: Path) -> None:
    kinds = rng.collect().keys()
    for _ in range(3):
        with RunState.load(run_dir, model=nn.Linear(1, 1)) as state:
            state.save()

    assert rng.collect().keys() == kinds
    assert torch.cuda.is_initialized() == ("cuda" in kinds)  # type: ignore[no-untyped-call]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """Two CUDA devices and an Apple one, as far as random numbers go."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(generators[:2]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: generators[index].set_state(state))
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(torch.mps, "get_rng_state", generators[2].get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", generators[2].set_state)
    return generators


def test_the_generators_of_all_devices_in_use_come_back(devices: list[torch.Generator]) -> None:
    for _ in range(2):
        state = rng.collect()
        expected = [torch.rand(2, generator=generator).tolist() for generator in devices]
        rng.restore(state)

        assert [torch.rand(2, generator=generator).tolist() for generator in devices] == expected


def test_the_generators_of_another_packages_devices_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    backend = SimpleNamespace(
        device_count=lambda: 2,
        get_rng_state=lambda number: generators[number].get_state(),
        set_rng_state=lambda state, number: generators[number].set_state(state),
    )
    monkeypatch.setattr(torch, "npu", backend, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="npu"))
    for _ in range(2):
        state = rng.collect()
        expected = [torch.rand(2, generator=generator).tolist() for generator in generators]
        rng.restore(rng.moved(state, {"npu:0": "npu:0"}))

        assert [torch.rand(2, generator=generator).tolist() for generator in generators] == expected


def test_generators_are_read_where_torch_says_that_there_is_no_accelerator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", none)
    assert rng.read_devices() == {}


def test_generators_are_read_where_torch_cannot_tell_its_default_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown() -> None:
        raise AttributeError("'NoneType' object has no attribute 'device'")

    monkeypatch.setattr(torch, "get_default_device", unknown)
    assert rng.collect(devices=False).keys() == {"python", "numpy", "torch"}


class Holder:
    """An object that holds things."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


@pytest.mark.parametrize(("held", "length"), [(deque, 200), (dict, 300), (SimpleNamespace, 200)])
def test_what_another_thread_changes_meanwhile_is_searched(held: type, length: int, switching: None) -> None:
    value, own, over = held(), random.Random(0), threading.Event()

    def change() -> None:
        while not over.is_set():
            for number in range(length):
                _put(value, number)
            _clear(value)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        found = [search.find({"changing": value, "own": own}) for _ in range(100)]
        assert [*search.overlong(search.walk(value))] == []
    finally:
        over.set()
        changing.join()

    assert all(one["own"] is own for one in found)


def _put(held: Any, number: int) -> None:
    if isinstance(held, SimpleNamespace):
        setattr(held, f"a{number}", [])
    elif isinstance(held, dict):
        held[number] = []
    else:
        held.append([])


def _clear(held: Any) -> None:
    vars(held).clear() if isinstance(held, SimpleNamespace) else held.clear()


# Wherever the data hold a generator, it continues.


def closed_over(own: random.Random) -> Callable[[], float]:
    return lambda: own.random()


class Method:
    """An object whose method is handed on alone."""

    def __init__(self) -> None:
        self.own = random.Random(0)

    def transform(self, value: float) -> float:
        return value + self.own.random()


def test_generators_are_found_behind_functions() -> None:
    one, two, method, flip = random.Random(1), np.random.default_rng(2), Method(), random.Random(3)

    def collated(samples: list[Any], flip: random.Random = flip) -> list[Any]:
        return samples

    def unset() -> Any:
        return later

    bound = partial(partial(sorted, key=one), two)
    root = {
        "unset": unset,
        "closure": closed_over(one),
        "method": method.transform,
        "bound": bound,
        "function": collated,
    }

    found = search.find(root)

    assert found == {
        "closure.own": one,
        "method.__self__.own": method.own,
        "bound.args.0": two,
        "function.__defaults__.0": flip,
    }
    later = flip
    assert search.find({"unset": unset}) == {"unset.later": flip}


def by_default(own: random.Random, *, by_name: bool) -> Callable[[], float]:
    def draw(given: random.Random = own) -> float:
        return given.random()

    def draw_by_name(*, given: random.Random = own) -> float:
        return given.random()

    return draw_by_name if by_name else draw


class Transform:
    """A generator in a slot, behind a method."""

    __slots__ = ("own", "unset")

    def __init__(self, own: random.Random) -> None:
        self.own = own

    def draw(self) -> float:
        return self.own.random()


def nested(own: random.Random) -> Callable[[], float]:
    kept = [{"flip": deque([(own, "text", torch.ones(2))])}]
    holder = Holder(kept=kept)
    holder.itself = holder
    return partial(lambda holder: holder.kept[0]["flip"][0][0].random(), holder)


PLACES: dict[str, Callable[[random.Random], Callable[[], float]]] = {
    "closure": closed_over,
    "default": partial(by_default, by_name=False),
    "default by name": partial(by_default, by_name=True),
    "method of a slot": lambda own: Transform(own).draw,
    "its own method": lambda own: own.random,
    "nested": nested,
    "argument": lambda own: partial(random.Random.random, own),
    "keyword": lambda own: partial(lambda *, given: given.random(), given=own),
}


class Noisy(Dataset[float]):
    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> float:
        return self.draw()


def in_three_starts(run_dir: Path, make: Callable[[int], Callable[[], float]]) -> list[float]:
    seen = []
    for seed, stop in enumerate((1, 3, 5)):
        with RunState.load(run_dir, loader=DataLoader(Noisy(make(seed)))) as state:
            for batch in state.batches():
                seen.append(batch.item())
                if len(seen) == stop:
                    state.save()
                    break
    return seen


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.quick(3)
def test_a_generator_continues_wherever_the_data_hold_it(run_dir: Path, name: str) -> None:
    own = random.Random(0)
    expected = [own.random() for _ in range(5)]

    assert in_three_starts(run_dir, lambda seed: PLACES[name](random.Random(seed))) == expected


KINDS: list[Callable[[int], Any]] = [
    random.Random,
    np.random.RandomState,
    lambda seed: np.random.RandomState(np.random.PCG64(seed)),
    lambda seed: torch.Generator().manual_seed(seed),
    *(lambda seed, bits=bits: np.random.Generator(bits(seed)) for bits in rng._BIT_GENERATORS.values()),
]


class Late:
    """Makes its generator with the first sample, and keeps it under the number of the worker."""

    def __init__(self, kind: Callable[[int], Any], seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.own: dict[int, Any] = {}

    def __call__(self) -> float:
        if -1 not in self.own:
            self.own[-1] = self.kind(self.seed)
        own = self.own[-1]
        if isinstance(own, torch.Generator):
            return torch.randn((), generator=own).item()
        return float(own.gauss(0, 1) if isinstance(own, random.Random) else own.normal())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(3)
def test_a_generator_of_any_kind_that_is_made_late_continues(run_dir: Path, kind: Any) -> None:
    draw = Late(kind, 0)
    expected = [draw() for _ in range(5)]

    assert in_three_starts(run_dir, partial(Late, kind)) == expected


class Seeded(Dataset[float]):
    """Data that draws from a generator of its own."""

    def __init__(self) -> None:
        self.own = random.Random(0)

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        return self.own.random()


class Reseeding:
    """A part whose `state_dict` gives the data another generator."""

    def __init__(self, data: Seeded) -> None:
        self.data = data

    def state_dict(self) -> dict[str, Any]:
        self.data.own = random.Random(9)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing to restore."""


def test_a_save_restores_a_generator_that_a_state_dict_replaces(run_dir: Path) -> None:
    data = Seeded()
    extra = {"seeds": Reseeding(data)}
    with RunState.load(run_dir, model=nn.Linear(1, 1), loader=DataLoader(data), extra=extra) as state:
        for seed in (1, 2):
            data.own = random.Random(seed)
            state.save().wait()
            assert data.own.random() == random.Random(seed).random()


class Drawn(Dataset[float]):
    def __init__(self, shared: Holder) -> None:
        self.shared = shared

    def __len__(self) -> int:
        return 3

    def __getitem__(self, _: int) -> float:
        return float(self.shared.own.random())


class Making(Drawn):
    """Data with a state, whose reading makes a generator that other data draw from."""

    def state_dict(self) -> dict[str, int]:
        self.shared.own = self.shared.own or random.Random(0)
        return {}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        pass


def test_a_generator_made_by_another_loaders_state_is_in_the_checkpoint(tmp_path: Path) -> None:
    shared = Holder(own=None)
    loaders = {"first": DataLoader(Making(shared)), "then": DataLoader(Drawn(shared))}
    with RunState.load(tmp_path, loader=loaders, progress=False) as state:
        state.save().wait()
        stood_at = shared.own.getstate()
    for _ in range(2):
        again = Holder(own=None)
        loaders = {"first": DataLoader(Making(again)), "then": DataLoader(Drawn(again))}
        with RunState.load(tmp_path, loader=loaders, progress=False):
            assert again.own.getstate() == stood_at


def test_a_numpy_generator_of_another_kind_for_a_while_is_told_as_it_is() -> None:
    before: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    watch = worker_rng.Watch({})
    states = watch.states()
    try:
        for bits in (np.random.PCG64(1), np.random.MT19937(2), np.random.PCG64(3), np.random.MT19937(4)):
            np.random.set_bit_generator(bits)  # type: ignore[attr-defined]
            np.random.randn()
            states = worker_rng.merged(states, watch.changes())
            expected = [np.random.randn(), np.random.rand()]
            worker_rng.restore(states, None)

            assert [np.random.randn(), np.random.rand()] == expected
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]
