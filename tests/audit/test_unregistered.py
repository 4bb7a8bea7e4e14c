"""What is in no part: found, and named with its fix."""

from __future__ import annotations

import inspect
import random
import runpy
import weakref
from collections import deque
from collections.abc import Callable
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
    ("faces.py", ', "D": optimizer_d', "optimizer_d", "optimizer=optimizer_d"),
    ("faces.py", '"G": net_g, ', "net_g", "model=net_g"),
    ("game.py", '"memory": memory, ', "memory.memory", 'extra={"memory": memory.memory}'),
    ("game.py", '"env": env, ', "env.rng", 'extra={"rng": env.rng}'),
    ("diffusion.py", '"ema": ema_unet, ', "main.ema_unet.shadow_params", ""),
    (
        "diffusion.py",
        '"noise": noise_generator, ',
        "main.noise_generator",
        'extra={"noise_generator": noise_generator}',
    ),
]


@pytest.fixture
def here(is_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a script, with its variables in its checkpoints or not."""
    monkeypatch.chdir(tmp_path)
    load: Any = RunState.load
    monkeypatch.setitem(inspect.unwrap(load.__func__).__kwdefaults__, "variables", is_on)
    return tmp_path


@pytest.mark.quick(5)
@pytest.mark.filterwarnings(
    "ignore:an optimizer", "ignore:a scheduler", "ignore:this loop draws", "ignore:.* has weights that change"
)
@pytest.mark.parametrize(("shape", "line", "name", "fix"), FORGOTTEN)
@pytest.mark.parametrize("is_on", [True, False])
def test_what_a_script_forgets_is_lost_without_its_variables_only(
    shape: str,
    line: str,
    name: str,
    fix: str,
    is_on: bool,
    here: Path,
) -> None:
    text = (SHAPES / shape).read_text()
    assert line in text
    (here / shape).write_text(text.replace(line, ""))

    lost = {one.name: one.fix for one in runpy.run_path(str(here / shape), run_name="__main__")["lost"]}

    assert (not lost) if is_on else (fix in lost[name])


def checked(
    run_dir: Path, training: Callable[[nn.Module], object], **options: Any
) -> dict[str, Unregistered]:
    """Train three steps, and return what a check finds after the last, by name."""
    model = options.pop("model", None) or nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"every": None, "variables": False, **options}
    with RunState.load(run_dir, model=model, optimizer=optimizer, **options) as state:
        for _ in state.steps(3):
            training(model)
            optimizer.step()
            found = state.check()
    return {one.name.rpartition("checked.")[2]: one for one in found if one.name != "checked._"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 1)
        self.calls = 0
        self.mean = torch.zeros(1)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.mean = 0.9 * self.mean + x.mean()
        return self.body(x - self.mean) / self.calls


def test_what_a_module_counts_is_reported_and_its_weights_are_not(run_dir: Path) -> None:
    found = checked(run_dir, lambda model: model(torch.randn(3, 2)).sum().backward(), model=Net())

    assert found.keys() == {"model.calls", "model.mean"}


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


def test_what_no_checkpoint_can_have_is_lost_with_the_variables_too(run_dir: Path) -> None:
    prompts = iter("abcdef")
    seen = []

    found = checked(run_dir, lambda _: seen.append(next(prompts)), variables=True)

    ((name, one),) = found.items()
    assert name.endswith("prompts")
    assert one.kind == "an iterator that was made before the loop"
    assert "state.batches()" in one.fix


class Left:
    """What draws as it is asked for its state."""

    def __init__(self) -> None:
        self.kept = 0

    def state_dict(self) -> dict[str, Any]:
        torch.rand(3)
        return {"n": self.kept}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.kept = saved["n"]


@pytest.mark.parametrize("is_on", [True, False])
def test_a_look_changes_no_generator_and_calls_no_property(run_dir: Path, is_on: bool) -> None:
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
    with RunState.load(run_dir, extra={"left": Left()}, variables=is_on, every=None) as state:
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

    with RunState.load(run_dir, variables=False) as state:
        assert not any(is_alive_after_a_look(state) for _ in state.steps(2))


def test_a_save_does_not_warn_of_what_a_check_has_returned(run_dir: Path) -> None:
    with RunState.load(run_dir, variables=True) as state:
        prompts = iter("abcdef")
        for _ in state.steps(2):
            next(prompts)
            lost = state.check()
            with pytest.warns(ResumableWarning, match="(?s)R11.*prompts: an iterator") as caught:
                state.save()
            break

    assert "lost" not in str(caught[0].message)
    assert lost


def test_it_is_reported_in_one_line_what_is_true_and_what_to_do() -> None:
    one = Unregistered("ema.shadow", "3 tensors", 'extra={"ema": ema}')

    assert str(one) == (
        "ema.shadow (3 tensors) changes, and no part holds it: a resume would lose it. "
        'Fix: RunState.load(..., extra={"ema": ema})'
    )
