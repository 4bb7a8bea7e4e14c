"""Random generators continue where they stood: a save leaves them alone, and a load restores them last."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator, Mapping
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
from resumable.loaders.generators import rng, search


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


def test_putting_back_one_part_touches_no_generator(run_dir: Path) -> None:
    own, straight = Own(), Own()
    with RunState.load(run_dir, model=nn.Linear(1, 1), extra=_parts(own)) as state:
        state.save()
        for _ in range(2):
            _seed(5)
            state.restore("newest", only="model")
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


def test_a_device_that_is_not_used_yet_is_not_asked(
    devices: list[torch.Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

    assert "cuda" not in rng.collect()
    assert "mps" not in rng.collect(devices=False)


def test_the_state_of_a_device_that_is_gone_is_left_out(
    devices: list[torch.Generator], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = rng.collect()
    before = devices[1].manual_seed(7).get_state()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rng.restore(state)

    assert torch.equal(devices[1].get_state(), before)


class Holder:
    """An object that holds things."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


def test_generators_are_found_where_they_hang() -> None:
    own = Own()
    root = Holder(
        dataset=Holder(own=own), transforms=[{"flip": own.python}], seeds=(own.torch, "text", torch.ones(3))
    )
    root.dataset.root = root

    found = search.find(root)

    assert found == {
        "dataset.own.python": own.python,
        "dataset.own.numpy": own.numpy,
        "dataset.own.legacy": own.legacy,
        "seeds.0": own.torch,
    }


def test_a_generator_with_several_ways_to_it_is_found_once() -> None:
    generator = random.Random(0)

    assert search.find([generator, generator, {"again": generator}]) == {"0": generator}


def test_a_generator_itself_is_found_without_a_path() -> None:
    assert list(search.find(random.Random(0))) == [""]


@pytest.mark.parametrize("length", [200, 300], ids=["searched", "too long"])
@pytest.mark.parametrize("held", [deque, dict, list, SimpleNamespace])
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
        found = [search.find({"changing": value, "own": own}) for _ in range(300)]
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


def test_what_is_too_deep_or_too_long_is_not_searched() -> None:
    generator = random.Random(0)
    deep: Any = generator
    for _ in range(17):
        deep = [deep]

    assert search.find(deep) == {}
    assert search.find([generator, *range(256)]) == {}
    assert search.find(Holder(own=generator, **{f"a{number}": 0 for number in range(256)})) == {}


def test_the_generator_of_the_operating_system_has_no_state_to_find() -> None:
    assert search.find(Holder(source=random.SystemRandom(), own=(own := random.Random(0)))) == {"own": own}


FLIP = random.Random(1)


def collated(samples: list[Any], flip: random.Random = FLIP, *, own: Any = None) -> list[Any]:
    return [*samples, flip.random()]


def closed_over(generator: Any) -> Any:
    later: Any

    def transform(value: float) -> Any:
        return generator.random() + value or later

    if generator is None:
        later = 1
    return transform


class Method:
    """An object whose method is handed on alone."""

    def __init__(self) -> None:
        self.own = random.Random(0)

    def transform(self, value: float) -> float:
        return value + self.own.random()


def test_generators_are_found_behind_functions() -> None:
    one, two, method = random.Random(1), np.random.default_rng(2), Method()
    bound = partial(partial(sorted, key=one), two)
    root = {"closure": closed_over(one), "method": method.transform, "bound": bound, "function": collated}

    found = search.find(root)

    assert found == {
        "closure.generator": one,
        "method.__self__.own": method.own,
        "bound.args.0": two,
        "function.__defaults__.0": FLIP,
    }


def test_generators_are_found_in_keywords_and_attributes_of_functions() -> None:
    one, two = random.Random(1), random.Random(2)

    def transform(*, own: random.Random = one) -> float:
        return own.random()

    transform.other = two  # type: ignore[attr-defined]

    assert search.find(transform) == {"__kwdefaults__.own": one, "other": two}
    assert search.find(partial(collated, own=two)) == {
        "func.__defaults__.0": FLIP,
        "keywords.own": two,
    }


def test_a_reader_finds_a_generator_that_takes_the_place_of_another() -> None:
    root: Any = {"one": {"own": random.Random(0)}, "two": [random.Random(1)]}
    reader = search.Reader(root)
    for number in range(20):
        if number == 9:
            root["one"] = {"own": random.Random(2)}
        if number == 14:
            root["two"][0] = np.random.default_rng(3)
        if number == 18:
            root["two"].clear()
        root["one"]["own"].random()

        states = {path: rng.read(generator) for path, generator in search.find(root).items()}
        assert rng.is_same(reader.read(), states)


def test_a_reader_finds_generators_that_are_made_late() -> None:
    root: Any = {"own": None, "late": None}
    reader = search.Reader(root)
    assert reader.read().keys() == set()
    root["own"] = random.Random(0)
    assert reader.read().keys() == {"own"}
    root["late"] = random.Random(1)

    found = [len(reader.read()) for _ in range(30)]

    assert found[0] == found[-1] == 2


class Lazy(Mapping[str, Any]):
    """Data that is read from a disk when it is looked at."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[str]:
        return map(str, range(self.length))

    def __getitem__(self, key: str) -> bytes:
        self.read += 1
        return b"data"


def test_data_that_is_read_when_it_is_looked_at_is_not() -> None:
    lazy = Lazy(2)

    assert search.find({"data": lazy, "own": (own := random.Random(0))}) == {"own": own}
    assert lazy.read == 0


def test_where_there_is_too_much_to_look_at_what_is_near_is_found() -> None:
    many = [[[i, object(), object()] for i in range(250)] for _ in range(50)]

    assert search.find({"many": many, "last": {"own": (own := random.Random(0))}}) == {"last.own": own}


def test_generators_in_slots_queues_and_behind_methods_are_found() -> None:
    class Slotted:
        __slots__ = ("rng", "unset")

    slotted, own = Slotted(), [random.Random(i) for i in range(3)]
    slotted.rng = own[0]

    found = search.find([slotted, deque([own[1]]), own[2].random])

    assert found == {"0.rng": own[0], "1.0": own[1], "2.__self__": own[2]}


GENERATORS: list[Any] = [
    random.Random(5),
    np.random.RandomState(5),
    np.random.RandomState(np.random.PCG64(5)),
    torch.Generator().manual_seed(5),
    *(np.random.Generator(kind(5)) for kind in rng._BIT_GENERATORS.values()),
]


def drawn_from(generator: Any) -> list[float]:
    if isinstance(generator, torch.Generator):
        return torch.randn(3, generator=generator).tolist()
    draw = generator.gauss if isinstance(generator, random.Random) else generator.normal
    return [draw(0, 1) for _ in range(3)]


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda generator: type(generator).__name__)
def test_a_generator_that_is_made_again_continues_as_the_one_that_was_there(generator: Any) -> None:
    drawn_from(generator)
    root = {"dataset": Holder(own=None)}
    for _ in range(2):
        state = rng.read(generator)
        root["dataset"].own = None
        made = search.plant(root, "dataset.own", state)
        assert made is not None
        rng.write(made, state)

        assert made is root["dataset"].own
        assert drawn_from(made) == drawn_from(generator)


STATE = rng.read(random.Random(0))


@pytest.mark.parametrize(
    ("held", "last", "key"),
    [
        ({}, "own", "own"),
        ({"own": None}, "own", "own"),
        ({}, "1", 1),
        ({1: None}, "1", 1),
        ({"1": None}, "1", "1"),
        ({}, "-1", -1),
    ],
)
def test_a_generator_is_put_under_the_very_key_where_it_was(held: Any, last: str, key: Any) -> None:
    root = Holder(rngs=held)
    made = search.plant(root, f"rngs.{last}", STATE)

    assert held == {key: made}
    assert search.find(root) == {f"rngs.{last}": made}


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ({"own": "taken"}, "own"),
        ({"own": 0}, "own"),
        (Holder(own=[]), "own"),
        ([None], "0"),
        (5, "own"),
        ({}, "nothing.own"),
        ({"f": closed_over(None)}, "f.generator"),
        ({"f": partial(collated)}, "f.own"),
    ],
)
def test_a_place_that_is_taken_or_is_nowhere_is_left_as_it_is(root: Any, path: str) -> None:
    before = repr(root)

    assert not search.is_free(root, path)
    assert search.plant(root, path, STATE) is None
    assert repr(root) == before


def test_a_place_that_has_nothing_yet_is_free() -> None:
    assert search.is_free(Holder(own=None), "own")
    assert search.is_free({"dataset": Holder()}, "dataset.own")
    assert search.is_free(partial(collated, samples=None), "keywords.own")


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


def test_a_generator_made_by_the_state_of_another_loader_is_in_that_checkpoint(tmp_path: Path) -> None:
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
