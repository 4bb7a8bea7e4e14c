"""Random generators go on where they stood: saving does not touch them, and loading puts them back last."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import CannotStore, RunState, StateMismatch, rng


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
            found.append(_draw() + own.draw())
            state.save()

    assert found == expected


def test_saving_touches_no_generator_even_if_a_state_dict_draws(run_dir: Path) -> None:
    own, straight = Own(), Own()
    with RunState(run_dir, extra=_parts(own)) as state:
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
    with RunState(run_dir, extra=parts) as state, pytest.raises(CannotStore):
        state.save()
    found = _draw() + own.draw()
    _seed(5)

    assert found == _draw() + straight.draw()


def test_putting_back_one_part_touches_no_generator(run_dir: Path) -> None:
    own, straight = Own(), Own()
    with RunState(run_dir, model=nn.Linear(1, 1), extra=_parts(own)) as state:
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

    with RunState(run_dir, extra=_parts(Own(9))) as state:
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
    with RunState(run_dir, loader=_loaders(1, np.random.PCG64)) as state:
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
    with RunState(run_dir, loader=loader, extra={"it": Drawing(own)}) as state:
        state.save()
    loaded = _loaders(2, np.random.PCG64)["first"]
    RunState.load(run_dir, loader=loaded, extra={"it": Drawing(Own())}).close()

    for generator in (loader.generator, loaded.generator):
        assert torch.equal(generator.get_state(), torch.Generator().manual_seed(1).get_state())


def test_no_device_is_started(run_dir: Path) -> None:
    for _ in range(3):
        with RunState.load(run_dir, model=nn.Linear(1, 1)) as state:
            state.save()

    assert not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    assert rng.collect().keys() == {"python", "numpy", "torch"}


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

    found = rng.find(root)

    assert found == {
        "dataset.own.python": own.python,
        "dataset.own.numpy": own.numpy,
        "dataset.own.legacy": own.legacy,
        "dataset.own.torch": own.torch,
    }


def test_a_generator_with_several_ways_to_it_is_found_once() -> None:
    generator = random.Random(0)

    assert rng.find([generator, generator, {"again": generator}]) == {"0": generator}


def test_a_generator_itself_is_found_without_a_path() -> None:
    assert list(rng.find(random.Random(0))) == [""]


def test_what_is_too_deep_or_too_long_is_not_searched() -> None:
    generator = random.Random(0)
    deep: Any = generator
    for _ in range(17):
        deep = [deep]

    assert rng.find(deep) == {}
    assert rng.find([generator, *range(256)]) == {}


def test_the_generator_of_the_operating_system_has_no_state_to_find() -> None:
    assert rng.find(Holder(source=random.SystemRandom(), own=(own := random.Random(0)))) == {"own": own}
