"""What is in no part: found and named in scripts of well-known shapes, each with one thing forgotten."""

from __future__ import annotations

import random
import runpy
import sys
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resumable import RunState, Unregistered

SHAPES = Path(__file__).parent / "shapes"

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
INSTEAD = {'best_val_loss = state.vars.get("best_val_loss", 1e9)': "best_val_loss = 1e9"}


def lost_in(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Unregistered]:
    monkeypatch.chdir(folder)
    _forget_other_scripts(monkeypatch)
    found: list[Unregistered] = runpy.run_path(str(path), run_name="__main__")["lost"]
    return [one for one in found if one.weight == "state"]


def _forget_other_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    # The modules of all tests would count as the script's own, and be looked through.
    here = str(Path(__file__).parent)
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(here):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("shape", sorted(path.name for path in SHAPES.glob("*.py")))
def test_a_script_that_gives_everything_loses_nothing(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not lost_in(SHAPES / shape, tmp_path, monkeypatch)


@pytest.mark.parametrize(("shape", "line", "name", "fix"), FORGOTTEN)
def test_what_a_script_forgets_to_give_is_named_with_its_fix(
    shape: str, line: str, name: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (SHAPES / shape).read_text()
    assert line in text
    (tmp_path / shape).write_text(text.replace(line, INSTEAD.get(line, "")))

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
    with RunState.load(run_dir, model=model, optimizer=optimizer, **parts) as state:
        for _ in state.steps(3):
            training(model)
            optimizer.step()
            found = state.check()
    return {one.name.partition(".")[2] or one.name: one for one in found if one.weight == "state"}


def test_what_a_module_counts_is_told_and_its_buffers_are_not(run_dir: Path) -> None:
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


def test_what_is_given_is_not_told_under_another_name(run_dir: Path) -> None:
    generator, queue, twin = torch.Generator(), deque([0.0]), {"x": torch.zeros(2)}
    other = [generator, queue, twin["x"]]

    def training(model: nn.Module) -> None:
        queue.append(torch.rand(1, generator=generator).item())
        twin["x"] += len(other)
        id(other)

    assert not checked(run_dir, training, extra={"a": generator, "b": queue, "c": twin})


def test_what_every_pass_makes_anew_is_not_told(run_dir: Path) -> None:
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


def test_what_a_state_dict_leaves_out_is_told_and_what_it_renames_is_not(run_dir: Path) -> None:
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


def test_a_long_list_is_not_walked_item_by_item(run_dir: Path) -> None:
    class Item:
        label = 0

    items = [Item() for _ in range(100_000)]
    generators = [random.Random() for _ in range(1000)]

    found = checked(run_dir, lambda _: generators[500].random())

    assert len(items) == 100_000
    assert not found


def test_an_object_that_is_not_as_it_should_be_hides_no_other(run_dir: Path) -> None:
    broken, generator = nn.Linear(1, 1), torch.Generator()
    broken.__dict__["_modules"] = 3
    broken.__dict__["_parameters"] = [broken]

    found = checked(run_dir, lambda _: (id(broken), torch.rand(1, generator=generator)))

    assert [one.kind for one in found.values()] == ["torch.Generator"]


def test_dicts_that_a_thread_changes_meanwhile_are_no_error(run_dir: Path) -> None:
    shared: dict[int, int] = {}
    ended = threading.Event()

    def change() -> None:
        while not ended.is_set():
            shared[random.randrange(9)] = 0
            shared.pop(random.randrange(9), None)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        checked(run_dir, lambda _: None)
    finally:
        ended.set()
        thread.join()


def test_what_no_variable_leads_to_is_found_by_its_kind(run_dir: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    hidden = (one.step() for one in iter([scheduler] * 9))
    del scheduler
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        for _ in state.steps(3):
            optimizer.step()
            next(hidden)
            found = state.check()

    assert "StepLR" in [one.kind for one in found if one.weight == "state"]


def test_it_is_told_in_one_line_what_is_true_and_what_to_do() -> None:
    one = Unregistered("ema.shadow", "3 tensors", "train.py:12", "state", 'extra={"ema": ema}')

    assert str(one) == (
        "ema.shadow (3 tensors, train.py:12) changes, and no part holds it: a resume would lose it. "
        'Fix: RunState.load(..., extra={"ema": ema})'
    )
