"""What is in no part: found and named in scripts of well-known shapes, each with one thing forgotten."""

from __future__ import annotations

import functools
import random
import runpy
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import DATA
from torch import nn

from resumable import ResumableWarning, RunState, Unregistered

pytestmark = pytest.mark.usefixtures("as_in_a_script")

SHAPES = DATA / "shapes"

FORGOTTEN = [
    ("images.py", "        scheduler=scheduler,\n", "main.scheduler", "scheduler=scheduler"),
    (
        "language.py",
        'best_val_loss = state.vars.get("best_val_loss", 1e9)',
        "best_val_loss",
        'state.vars["best_val_loss"]',
    ),
    ("faces.py", ', "D": optimizer_d', "optimizer_d", 'optimizer={..., "optimizer_d": optimizer_d}'),
    ("faces.py", '"G": net_g, ', "net_g", 'model={..., "net_g": net_g}'),
    ("game.py", '"memory": memory, ', "memory.memory", 'extra={"memory": memory}'),
    ("game.py", '"target": target_net, ', "target_net", 'extra={"target_net": target_net}'),
    ("game.py", '"env": env, ', "env.rng", 'extra={"rng": env.rng}'),
    (
        "diffusion.py",
        '"ema": ema_unet, ',
        "main.ema_unet.shadow_params",
        'extra={"ema_unet": ema_unet}',
    ),
    (
        "diffusion.py",
        '"noise": noise_generator, ',
        "main.noise_generator",
        'extra={"noise_generator": noise_generator}',
    ),
]
WARNED = {"main.ema_unet.shadow_params": r"ema_unet\.shadow_params has weights that change"}
"""What a save warns of too."""
INSTEAD = {'best_val_loss = state.vars.get("best_val_loss", 1e9)': "best_val_loss = 1e9"}


def lost_in(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Unregistered]:
    monkeypatch.chdir(folder)
    found: list[Unregistered] = runpy.run_path(str(path), run_name="__main__")["lost"]
    return [one for one in found if one.weight == "state"]


@pytest.mark.quick(5)
@pytest.mark.parametrize("shape", sorted(path.name for path in SHAPES.glob("*.py")))
def test_a_script_that_gives_everything_loses_nothing(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not lost_in(SHAPES / shape, tmp_path, monkeypatch)


@pytest.mark.quick(12)
@pytest.mark.filterwarnings(
    "ignore:an optimizer", "ignore:a scheduler", "ignore:this loop draws", "ignore:.* has weights that change"
)
@pytest.mark.parametrize(("shape", "line", "name", "fix"), FORGOTTEN)
def test_what_a_script_forgets_to_give_is_named_with_its_fix(
    shape: str, line: str, name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (SHAPES / shape).read_text()
    assert line in text
    (tmp_path / shape).write_text(text.replace(line, INSTEAD.get(line, "")))

    with pytest.warns(ResumableWarning, match=WARNED[name]) if name in WARNED else nullcontext():
        lost = lost_in(tmp_path / shape, tmp_path, monkeypatch)

    assert lost
    assert (name, fix) in [(one.name, one.fix) for one in lost]
    assert all(name.rpartition(".")[0] in one.name for one in lost)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 1)
        self.calls = 0
        self.mean = torch.zeros(1)
        self.register_buffer("scale", torch.ones(1), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.mean = 0.9 * self.mean + x.mean()
        self.scale += 1
        return self.body(x - self.mean) / self.calls


def checked(run_dir: Path, training: Any, model: nn.Module | None = None, **parts: Any) -> dict[str, Any]:
    """Train three steps, and return what a check finds after each of them, by name."""
    model = model or nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RunState.load(run_dir, model=model, optimizer=optimizer, every=None, **parts) as state:
        for _ in state.steps(3):
            training(model)
            optimizer.step()
            found = state.check()
    return {one.name.partition(".")[2] or one.name: one for one in found if one.weight == "state"}


def test_what_a_module_counts_is_reported_and_its_buffers_are_not(run_dir: Path) -> None:
    net = Net()

    found = checked(run_dir, lambda model: model(torch.randn(3, 2)).sum().backward(), net)

    assert found.keys() == {"calls", "mean"}
    assert found["calls"].fix == 'self.register_buffer("calls", torch.tensor(0)) in Net'


def test_a_generator_of_each_kind_is_found(run_dir: Path) -> None:
    kinds = [torch.Generator(), np.random.default_rng(), np.random.RandomState(), random.Random()]

    def draw(model: nn.Module) -> None:
        torch.rand(1, generator=kinds[0])
        for one in kinds[1:]:
            one.random()  # type: ignore[union-attr]

    found = checked(run_dir, draw)

    assert sorted(one.kind for one in found.values()) == [
        "numpy.random.Generator",
        "numpy.random.RandomState",
        "random.Random",
        "torch.Generator",
    ]


def test_what_is_given_is_not_reported_under_another_name(run_dir: Path) -> None:
    generator, queue, twin = torch.Generator(), deque([0.0]), {"x": torch.zeros(2)}
    other = [generator, queue, twin["x"]]

    def training(model: nn.Module) -> None:
        queue.append(torch.rand(1, generator=generator).item())
        twin["x"] += len(other)
        id(other)

    assert not checked(run_dir, training, extra={"a": generator, "b": queue, "c": twin})


def test_what_every_pass_makes_again_is_not_reported(run_dir: Path) -> None:
    class Drawn:
        def __init__(self, generator: torch.Generator) -> None:
            self.generator = generator
            self.noise = [torch.rand(1, generator=generator)]

    with RunState.load(run_dir) as state:
        for step in state.steps(3):
            generator = torch.Generator().manual_seed(step)
            drawn = Drawn(generator)
            id(drawn.noise)
            found = state.check()

    assert not found


class Left:
    """What its state_dict leaves out is lost."""

    def __init__(self) -> None:
        self.kept = self.left = 0

    def step(self) -> int:
        self.kept += 1
        self.left += 2
        return self.kept + self.left

    def state_dict(self) -> dict[str, Any]:
        torch.rand(3)
        return {"n": self.kept}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.kept = saved["n"]


def test_what_a_state_dict_leaves_out_is_reported(run_dir: Path) -> None:
    left = Left()

    found = checked(run_dir, lambda _: left.step(), extra={"left": left})

    assert found.keys() == {"left"}
    assert "Left.state_dict()" in found["left"].fix


def test_a_look_changes_no_generator_and_calls_no_property(run_dir: Path) -> None:
    class Strange:
        calls = 0

        @property
        def boom(self) -> int:
            Strange.calls += 1
            raise SystemError

        def __getattr__(self, name: str) -> Any:
            Strange.calls += 1
            raise SystemError(name)

        def __eq__(self, other: object) -> bool:
            raise SystemError

        __hash__ = None  # type: ignore[assignment]

    strange, cycle, deep = Strange(), [], []  # type: ignore[var-annotated]
    cycle.append(cycle)
    for _ in range(5000):
        deep = [deep]
    with RunState.load(run_dir, extra={"left": Left()}) as state:
        for _ in state.steps(1):
            before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
            state.check()
            assert torch.equal(before[0], torch.get_rng_state())
            assert random.getstate() == before[1]
            assert (np.random.get_state()[1] == before[2]).all()

    assert Strange.calls == 0
    assert strange is not None


def test_a_look_keeps_nothing_alive(run_dir: Path) -> None:
    class Large:
        pass

    def is_alive_after_a_look(state: RunState) -> bool:
        large = Large()
        state.check()
        alive = weakref.ref(large)
        del large
        return alive() is not None

    with RunState.load(run_dir) as state:
        assert not any(is_alive_after_a_look(state) for _ in state.steps(2))


def test_what_locals_gave_a_script_stays_as_it_was(run_dir: Path) -> None:
    def body(state: RunState, rate: float) -> dict[str, Any]:
        settings = locals()
        state.check()
        return settings

    with RunState.load(run_dir) as state:
        for _ in state.steps(1):
            assert body(state, 0.1)["rate"] == 0.1


def test_an_object_that_is_not_as_it_should_be_hides_no_other(run_dir: Path) -> None:
    broken, generator = nn.Linear(1, 1), torch.Generator()
    broken.__dict__["_modules"] = 3
    broken.__dict__["_parameters"] = [broken]

    found = checked(run_dir, lambda _: (id(broken), torch.rand(1, generator=generator)))

    assert [one.kind for one in found.values()] == ["torch.Generator"]


class Key:
    def __repr__(self) -> str:
        raise AssertionError("the code of the script is not called")


def keyed(run_dir: Path) -> dict[str, Any]:
    model = nn.Linear(2, 1)
    fixed = {parameter: torch.zeros(1) for parameter in model.parameters()}
    clocks = {Key(): 0, (1, "a"): 0}
    generators = {Key(): [random.Random(0)]}

    def training(model: nn.Module) -> None:
        model(torch.ones(3, 2)).sum().backward()
        clocks[next(iter(clocks))] += 1
        next(iter(generators.values()))[0].random()

    id(fixed)
    return checked(run_dir, training, model)


def test_keys_that_are_objects_are_reported_by_their_number(run_dir: Path) -> None:
    found = keyed(run_dir)

    assert {name: one.fix for name, one in found.items()} == {
        "clocks": 'extra={"clocks": clocks}',
        "generators[Key 0][0]": 'extra={"generators": [*generators.values()][0][0]}',
    }


def trained(epoch: int, total: int, state: RunState, model: nn.Module) -> Any:
    total += epoch
    model(torch.randn(3, 2)).sum().backward()
    return state.check()


def test_a_number_that_a_function_is_given_in_each_pass_is_not_reported(run_dir: Path) -> None:
    model = nn.Linear(2, 1)
    with RunState.load(run_dir, model=model) as state:
        for epoch in state.epochs(3):
            found = trained(epoch, 2 * epoch, state, model)

    assert found == []


def test_what_functions_and_arrays_have_in_them_is_looked_at(run_dir: Path) -> None:
    drawn = functools.partial(lambda by, at: by.random(), random.Random(1))
    gathered = np.array([random.Random(2), None], object)

    def noise(_: nn.Module, by: Any = random.Random(3), *, also: Any = random.Random(4)) -> None:  # noqa: B008
        drawn(1), gathered[0].random(), by.random(), also.random()

    found = checked(run_dir, noise)

    assert {name: one.fix for name, one in found.items()} == {
        "noise.by": 'extra={"by": noise.__defaults__[0]}',
        "noise.also": 'extra={"also": noise.__kwdefaults__["also"]}',
        "drawn.args[0]": 'extra={"args": drawn.args[0]}',
        "gathered[0]": 'extra={"gathered": gathered[0]}',
    }


SUMMED = """
import torch, torchmetrics
from torch import nn
from resumable import RunState

torch.manual_seed(0)
model, metric = nn.Linear(2, 1), torchmetrics.MeanMetric()
model.inner = torchmetrics.MeanMetric()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
given = {}
# given
with RunState.load(run, model=model, optimizer=optimizer, extra=given) as state:
    for step in state.steps(6):
        loss = model(torch.ones(1, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metric.update(loss.detach())
        model.inner.update(loss.detach())
        # used
        lost = state.check()
        state.save()
        if step == stop:
            break
print(metric.compute())
found = metric.compute().item(), model.inner.compute().item()
"""
GIVEN = """metric.persistent(True)
model.inner.persistent(True)
given = {"metric": metric}
"""


@pytest.fixture
def summed(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What runs a script with metrics, changed at its two places, and returns its variables."""
    pytest.importorskip("torchmetrics")

    def run(given: str = "", used: str = "", folder: str = "run", stop: int = -1) -> dict[str, Any]:
        script = tmp_path / "script.py"
        script.write_text(SUMMED.replace("# given", given).replace("# used", used))
        variables = {"run": tmp_path / folder, "stop": stop}
        return runpy.run_path(str(script), init_globals=variables, run_name="__main__")

    return run


@pytest.mark.heavy
def test_the_sums_of_a_metric_are_reported_and_not_once_it_is_given(
    summed: Callable[..., dict[str, Any]],
) -> None:
    lost, given = summed()["lost"], summed(GIVEN, folder="other")["lost"]

    assert {one.name.rpartition(".")[0]: (one.weight, one.fix) for one in lost} == {
        "metric": ("note", 'metric.persistent(True), and then RunState.load(..., extra={"metric": metric})'),
        "model.inner": ("note", "model.inner.persistent(True), and then RunState.load"),
    }
    assert not given


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("used", "weight"),
    [
        ("if metric.compute() < 0: break", "state"),
        ("mean = metric.compute(); print(mean)", "note"),
    ],
)
def test_a_metric_that_decides_something_is_graver_than_one_that_is_shown(
    used: str, weight: str, summed: Callable[..., dict[str, Any]]
) -> None:
    lost = summed(used=used)["lost"]

    assert {one.weight for one in lost if one.name.startswith("metric.")} == {weight}


@pytest.mark.heavy
def test_a_metric_given_as_the_fix_says_continues_exactly(
    summed: Callable[..., dict[str, Any]],
) -> None:
    straight = summed(GIVEN)["found"]
    for folder, given in [("as it was", ""), ("mended", GIVEN)]:
        for stop in (1, 3):
            summed(given, folder=folder, stop=stop)
        assert (summed(given, folder=folder)["found"] == straight) is (given == GIVEN)


def test_it_is_reported_in_one_line_what_is_true_and_what_to_do() -> None:
    one = Unregistered("ema.shadow", "3 tensors", "train.py:12", "state", 'extra={"ema": ema}')

    assert str(one) == (
        "ema.shadow (3 tensors, train.py:12) changes, and no part holds it: a resume would lose it. "
        'Fix: RunState.load(..., extra={"ema": ema})'
    )
