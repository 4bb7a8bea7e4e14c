"""Generators that data draw from and that hang in modules and classes: named in code, held by no object."""

from __future__ import annotations

import importlib
import random
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import module_rng
import numpy as np
import pytest
import torch
from module_rng import jitter
from stopping import differences
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from resumable import RunState
from resumable.loaders.generators import rng, search

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:loader keeps no position"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]

NUMPY = np.random.default_rng(0)
AUGMENT: Any = None


class Augment:
    """An object of a module, with a generator of its own."""

    def __init__(self) -> None:
        self.own = random.Random(0)

    def __call__(self) -> float:
        return self.own.random()


def begin() -> None:
    """Stand where a process stands that has just started."""
    global NUMPY, AUGMENT
    NUMPY, AUGMENT = np.random.default_rng(0), Augment()
    Classy.own = np.random.default_rng(0)
    module_rng.Blur.own.seed(0)
    module_rng.begin()


def directly() -> float:
    return NUMPY.normal()


def by_a_helper() -> float:
    return sum([jitter() + directly() for _ in range(2)])


def of_another_module() -> float:
    return module_rng.NUMPY.normal() + torch.rand((), generator=module_rng.TORCH).item()


def by_an_object() -> float:
    return AUGMENT() + module_rng.SEVERAL["flip"][0].random()


def by_a_class() -> float:
    return module_rng.Blur()()


def made_late() -> float:
    return module_rng.late()


class Data(Dataset[torch.Tensor]):
    """Samples with noise."""

    def __init__(self, noise: Callable[[], float]) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.noise()]) / 6


class Classy(Data):
    """Samples with noise of generators that their class and their module have."""

    own = np.random.default_rng(0)

    def __init__(self) -> None:
        pass

    @staticmethod
    def noise() -> float:
        return Classy.own.normal() + NUMPY.normal()


class Stream(IterableDataset[torch.Tensor]):
    """A stream with noise of a generator that its module has."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(4):
            yield torch.tensor([index, NUMPY.normal()]) / 6


def with_noise(samples: list[torch.Tensor]) -> Any:
    return default_collate(samples) + NUMPY.normal()


def plain() -> Iterator[torch.Tensor]:
    for index in range(3):
        yield torch.tensor([[index, by_a_helper()]]) / 6


def objects(loader: Callable[[], Any]) -> dict[str, Any]:
    begin()
    model = nn.Linear(2, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": loader()}


def train(objects: dict[str, Any], x: torch.Tensor) -> None:
    objects["optimizer"].zero_grad()
    objects["model"](x).square().mean().backward()
    objects["optimizer"].step()


def epochs(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(2):
        for x in state.batches():
            train(objects, x)
            tick(x)


LOADED: dict[str, Callable[..., Any]] = {
    "directly": lambda **how: DataLoader(Data(directly), 2, **how),
    "helper": lambda **how: DataLoader(Data(by_a_helper), 2, shuffle=True, **how),
    "module": lambda **how: DataLoader(Data(of_another_module), 2, **how),
    "object": lambda **how: DataLoader(Data(by_an_object), 2, **how),
    "class": lambda **how: DataLoader(Data(by_a_class), 2, **how),
    "late": lambda **how: DataLoader(Data(made_late), 2, **how),
    "attribute": lambda **how: DataLoader(Classy(), 2, **how),
    "stream": lambda **how: DataLoader(Stream(), 2, **how),
    "collate": lambda **how: DataLoader(torch.ones(4, 2), 2, collate_fn=with_noise, **how),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", LOADED)
@pytest.mark.quick(9)
def test_a_generator_that_code_names_continues_in_this_process(name: str, run_dir: Path) -> None:
    assert differences(run_dir, partial(objects, LOADED[name]), epochs) == []


@pytest.mark.heavy
@pytest.mark.timeout(300)
@pytest.mark.parametrize("persists", [False, True])
@pytest.mark.parametrize("name", ["helper", "module", "late", "attribute", "stream"])
def test_a_generator_that_code_names_continues_in_workers(name: str, persists: bool, run_dir: Path) -> None:
    loader = partial(LOADED[name], num_workers=2, persistent_workers=persists)

    assert differences(run_dir, partial(objects, loader), epochs) == []


def made_as_it_is_drawn() -> Iterator[torch.Tensor]:
    for index in range(3):
        yield torch.tensor([[index, module_rng.late()]]) / 6


def drawing_too(state: RunState, objects: dict[str, Any], tick: Callable[..., None]) -> None:
    for _ in state.epochs(2):
        for x in state.batches():
            train(objects, x)
            tick(x, jitter())


@pytest.mark.parametrize(
    ("function", "loop"), [(plain, epochs), (plain, drawing_too), (made_as_it_is_drawn, epochs)]
)
@pytest.mark.heavy
def test_a_generator_that_the_function_of_a_plain_iterable_names_continues(
    function: Any, loop: Any, run_dir: Path
) -> None:
    assert differences(run_dir, partial(objects, lambda: function), loop) == []


def quiet() -> float:
    return 0.0


def test_a_module_of_the_script_may_have_the_name_of_one_of_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cmd.py").write_text("import random\nrng = random.Random(0)\ndraw = lambda: rng.random()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "cmd", sys)
    monkeypatch.delitem(sys.modules, "cmd")
    cmd: Any = importlib.import_module("cmd")

    assert search.find(cmd.draw) == {"cmd:rng": cmd.rng}


def test_a_generator_is_made_in_a_module_only_where_code_names_it() -> None:
    begin()
    state = rng.read(np.random.default_rng(5))

    assert not search.is_free(Data(quiet), "module_rng:LATE")
    assert not search.is_free(Data(made_late), "module_rng:jitter")
    assert not search.is_free(Data(made_late), "module_rng:late.own")
    assert search.plant(Data(made_late), "module_rng:jitter", state) is None
    assert search.plant(Data(made_late), "module_rng:LATE", state) is module_rng.LATE is not None
    module_rng.begin()


def test_a_checkpoint_without_what_modules_have_continues(run_dir: Path) -> None:
    begin()
    with RunState.load(run_dir, loader=DataLoader(Data(quiet))) as state:
        state.save()
    with RunState.load(run_dir, loader=DataLoader(Data(by_a_helper))) as state:
        assert state.resumed


def importing_late() -> float:
    from dice_late.inner import OWN  # type: ignore[import-not-found]

    return OWN.random()  # type: ignore[no-any-return]


def test_a_module_imported_by_code_that_runs_is_imported_to_plant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dice_late").mkdir()
    for name in ("inner", "other"):
        (tmp_path / "dice_late" / f"{name}.py").write_text("import random\nOWN = random.Random(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    root, state = {"dataset": Data(importing_late)}, rng.read(random.Random(5))
    assert search.find(root) == {}

    assert search.plant(root, "dice_late.other:OWN", state) is None
    assert "dice_late.other" not in sys.modules
    made = search.plant(root, "dice_late.inner:OWN", state)

    assert search.find(root) == {"dice_late.inner:OWN": made}
    del sys.modules["dice_late.inner"], sys.modules["dice_late"]


@pytest.mark.heavy
def test_a_generator_of_a_module_that_is_imported_late_continues(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dice_late").mkdir()
    (tmp_path / "dice_late" / "inner.py").write_text("import random\nOWN = random.Random(0)\n")
    monkeypatch.syspath_prepend(tmp_path)

    def make() -> dict[str, Any]:
        sys.modules.pop("dice_late.inner", None)
        return objects(lambda: DataLoader(Data(importing_late), 2))

    assert differences(run_dir, make, epochs) == []


TRAINED = """
import random
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler
from resumable import RunState

drawn, order = np.random.default_rng(0), random.Random(0)

class Drawn(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([index + float(drawn.random())])

class Shuffled(Sampler):
    def __len__(self):
        return 4

    def __iter__(self):
        return iter(order.sample(range(4), 4))

def main(run, batches, how):
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Drawn(), sampler=Shuffled(), **how)
    with RunState.load(run, model=model, optimizer=optimizer, loader=loader, progress=False) as state:
        for epoch in state.epochs(3):
            for batch in state.batches():
                optimizer.zero_grad()
                model(batch).square().sum().backward()
                optimizer.step()
                state.save().wait()
                if state.step == batches:
                    return model.weight.item()
"""


@pytest.mark.parametrize("how", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("names", [("__main__", "train", "train"), ("train", "__main__", "train")])
@pytest.mark.parametrize("stops", [(1, 7), (4, 8)])
@pytest.mark.quick(12)
def test_a_script_may_run_under_another_name_after_a_resume(
    names: tuple[str, ...],
    stops: tuple[int, ...],
    how: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trained(name: str, run: str, batches: int) -> float:
        module = types.ModuleType(name)
        module.__file__ = str(tmp_path / "train.py")
        monkeypatch.delitem(sys.modules, "train", raising=False)
        monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
        monkeypatch.setitem(sys.modules, name, module)
        exec(TRAINED, vars(module))
        return module.main(tmp_path / run, batches, how)  # type: ignore[no-any-return]

    straight = trained("__main__", "straight", 10)

    resumed = [trained(name, "resumed", at) for name, at in zip(names, (*stops, 10), strict=True)]

    assert resumed[-1] == straight
