"""Values that only the functions of a script read and write, and elements that it assigns."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resumable import ResumableWarning, RunState

Step = Callable[[Any], float]
Script = Callable[[RunState, Step], None]

rates = [0.9]
scale, count, last = 1.0, 0, 0.0
total, number = 0.0, 0
epoch, limit = 0, 3
seen = {"bad": 0}
tables: dict[int, torch.Tensor] = {}
memory = torch.zeros(10)
buffer = torch.zeros(3)
ring = [0.0] * 10
large = np.zeros(100_000)


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Give the variables of this module their first values."""
    global scale, count, last, total, number
    scale, count, last, total, number = 1.0, 0, 0.0, 0.0, 0
    rates[:], ring[:] = [0.9], [0.0] * 10
    seen["bad"] = 0
    tables.clear()
    memory.zero_()
    buffer.zero_()
    large[:] = 0


def run(run_dir: Path, script: Script, **more: Any) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Any) -> float:
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 1)) * x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    with RunState.load(run_dir, model=model, optimizer=optimizer, progress=False, **more) as state:
        script(state, step)


def rate() -> float:
    rates.append(0.9 * rates[-1])
    return rates[-2]


def decayed() -> float:
    global scale
    scale = 0.9 * scale
    return scale


def counted() -> int:
    global count
    count += 1
    return count


def remember(loss: float) -> None:
    global last
    last = 0.9 * last + 0.1 * loss


def remembered() -> float:
    return last


def doubled() -> float:
    return 2 * decayed()


def is_bad(loss: float) -> bool:
    seen["bad"] += loss > 0
    return seen["bad"] > 9


def put(at: int, loss: float) -> None:
    memory[at] = loss


def a_list_of_functions(state: RunState, step: Step) -> None:
    for _ in state.steps(4):
        step(rate())
        state.save()


def a_global_of_functions(state: RunState, step: Step) -> None:
    for _ in state.steps(4):
        step(decayed())
        state.save()


def a_global_two_calls_deep(state: RunState, step: Step) -> None:
    for _ in state.steps(4):
        x = torch.ones(1) * doubled()
        step(x)
        state.save()


def a_count_of_functions(state: RunState, step: Step) -> None:
    for _ in state.steps(4):
        if counted() % 3 == 0:
            step(2)
        state.save()


def what_one_writes_and_another_reads(state: RunState, step: Step) -> None:
    for _ in state.steps(4):
        loss = step(remembered())
        remember(loss + 1)
        state.save()


def a_dict_of_functions(state: RunState, step: Step) -> None:
    for _ in state.steps(4):
        if is_bad(step(1)):
            break
        state.save()


def a_closure(state: RunState, step: Step) -> None:
    def make() -> Callable[[], float]:
        weight = 1.0

        def following() -> float:
            nonlocal weight
            weight *= 0.9
            return weight

        return following

    following = make()
    for _ in state.steps(4):
        step(following())
        state.save()


class Trainer:
    def __init__(self, state: RunState, step: Step) -> None:
        self.state, self.step = state, step
        self.weight, self.passes = 1.0, 0
        self.history: list[float] = []

    def fit(self) -> None:
        for _ in self.state.steps(4):
            self.train()
            self.state.save()

    def train(self) -> None:
        self.weight *= 0.9
        loss = self.step(self.weight)
        self.passes += 1
        self.log(loss)

    def log(self, loss: float) -> None:
        self.history.append(loss)
        if self.passes % 2 == 0:
            print(self.passes, sum(self.history) / len(self.history))


def a_method(state: RunState, step: Step) -> None:
    Trainer(state, step).fit()


def an_object(state: RunState, step: Step) -> None:
    trainer = Trainer(state, step)
    for _ in state.steps(4):
        trainer.train()
        state.save()


def what_a_function_is_given(state: RunState, step: Step) -> None:
    weight = 1.0
    for _ in state.steps(4):
        step(torch.ones(1) * weight)
        weight *= 0.9
        state.save()


def what_a_function_is_given_by_name(state: RunState, step: Step) -> None:
    def train(epoch: int, weight: float = 1.0) -> None:
        print(epoch)
        step(weight)

    weight, passes = 1.0, 0
    for _ in state.steps(4):
        train(passes, weight=weight)
        weight *= 0.9
        passes += 2
        state.save()


def a_rate_set_by_hand(state: RunState, step: Step) -> None:
    group, lr = {"lr": 0.1}, 0.1
    for _ in state.steps(4):
        step(1)
        lr *= 0.9
        group["lr"] = lr
        state.save()


def elements_that_are_assigned(state: RunState, step: Step) -> None:
    memory = torch.zeros(10)
    for number in state.steps(4):
        loss = step(1 + memory.mean())
        memory[state.step % 10] = loss + number
        state.save()


def elements_of_a_large_array(state: RunState, step: Step) -> None:
    memory, position = np.zeros(100_000), 0
    for _ in state.steps(4):
        memory[position] = step(1 + memory.mean()) + 1
        position = (position + 1) % 100_000
        state.save()


def elements_of_a_list(state: RunState, step: Step) -> None:
    memory = [0.0] * 10
    for number in state.steps(4):
        loss = step(1 + sum(memory))
        memory[state.step % 10] = loss + number
        state.save()


def elements_that_a_function_assigns(state: RunState, step: Step) -> None:
    for number in state.steps(4):
        loss = step(1 + memory.mean())
        put(state.step % 10, loss + number)
        state.save()


class Replay:
    def __init__(self) -> None:
        self.values, self.at = np.zeros(8), 0

    def add(self, value: float) -> None:
        self.values[self.at] = value
        self.at = (self.at + 1) % 8

    def sample(self) -> float:
        return float(self.values[np.random.randint(8)])

    def begin(self) -> None:
        self.at = 0


def elements_of_a_replay_buffer(state: RunState, step: Step) -> None:
    replay = Replay()
    for _ in state.steps(4):
        replay.add(step(1 + replay.sample()) + 1)
        state.save()


def slices_that_are_assigned(state: RunState, step: Step) -> None:
    memory, position = torch.zeros(8), 0
    for _ in state.steps(4):
        memory[position : position + 2] = step(1 + memory.mean()) + 1
        position = (position + 2) % 8
        state.save()


WARNED: dict[Script, str] = {
    a_list_of_functions: "^rates controls",
    a_global_of_functions: "^scale controls",
    a_global_two_calls_deep: "^scale controls",
    a_count_of_functions: "^count controls",
    what_one_writes_and_another_reads: "^last controls",
    a_dict_of_functions: r"^seen\['bad'\] controls",
    a_closure: r"^following\.weight controls",
    a_method: r"^self\.weight controls",
    an_object: r"^trainer\.weight controls",
    what_a_function_is_given: "^weight controls",
    what_a_function_is_given_by_name: "^weight controls",
    a_rate_set_by_hand: "^lr controls",
    elements_that_are_assigned: "^memory controls",
    elements_of_a_large_array: "memory",
    elements_of_a_list: "^memory controls",
    elements_that_a_function_assigns: "^memory controls",
    elements_of_a_replay_buffer: r"^replay\.values controls",
    slices_that_are_assigned: "^memory controls",
}


@pytest.mark.parametrize("script", WARNED, ids=lambda script: script.__name__)
def test_a_value_of_functions_and_an_element_are_warned_of_by_name(run_dir: Path, script: Script) -> None:
    with pytest.warns(ResumableWarning, match=WARNED[script]) as told:
        run(run_dir, script)

    assert not [one for one in told if "passes" in str(one.message) or "history" in str(one.message)]


def mean_of(loss: float) -> float:
    global total, number
    total += loss
    number += 1
    if number % 2 == 0:
        print(total / number)
    return total / number


def set_epoch(now: int) -> None:
    global epoch
    epoch = now


def of_epoch() -> float:
    return 1.0 if epoch < limit else 0.5


def table(length: int) -> torch.Tensor:
    if length not in tables:
        tables[length] = torch.arange(float(length))
    return tables[length]


def begin() -> None:
    global scale
    scale = 1.0


def restore(state: RunState) -> None:
    global scale
    scale = state.vars.get("scale", 1.0)


def what_a_function_only_shows(state: RunState, step: Step) -> None:
    for _ in state.steps(4):
        print(mean_of(step(1)))
        state.save()


def is_due() -> bool:
    global count
    count += 1
    if count % 2 == 0:
        print(count)
        return True
    return False


def what_a_function_returns_to_show_something(state: RunState, step: Step) -> None:
    for _ in state.steps(4):
        loss = step(1)
        if is_due():
            print(loss)
        state.save()


def what_a_function_sets(state: RunState, step: Step) -> None:
    for now in state.steps(5):
        set_epoch(now)
        step(of_epoch())
        state.save()


def what_a_function_keeps_for_speed(state: RunState, step: Step) -> None:
    for now in state.steps(4):
        step(table(now + 1).mean() + 1)
        state.save()


def what_a_function_begins_in_each_body(state: RunState, step: Step) -> None:
    for _ in state.steps(4):
        begin()
        for _ in range(3):
            step(decayed())
        state.save()


def what_a_function_restores(state: RunState, step: Step) -> None:
    restore(state)
    for _ in state.steps(4):
        step(decayed())
        state.vars["scale"] = scale
        state.save()


def what_a_function_is_given_to_show(state: RunState, step: Step) -> None:
    def train(passes: int, weight: float) -> None:
        if passes % 2 == 0:
            print(passes)
        step(weight)

    passes = 0
    for _ in state.steps(4):
        train(passes, 1.0)
        passes += 2
        state.save()


def what_a_method_is_given_by_the_state(state: RunState, step: Step) -> None:
    for now in state.steps(4):
        step(0.9**now)
        print(of_epoch(), now)
        state.save()


def elements_that_each_body_fills(state: RunState, step: Step) -> None:
    rewards, values, at = torch.zeros(3), [0.0] * 3, 0
    for _ in state.steps(4):
        at = 0
        for number in range(3):
            rewards[number] = step(1) + number
            values[at] = step(1)
            at = at + 1
        step(1 + rewards.mean() + sum(values[:1]))
        state.save()


def elements_that_a_function_fills(state: RunState, step: Step) -> None:
    for _ in state.steps(4):
        for number in range(10):
            put(number, step(1))
        step(1 + memory.mean())
        state.save()


def elements_of_a_buffer_that_begins_again(state: RunState, step: Step) -> None:
    replay = Replay()
    for _ in state.steps(4):
        replay.begin()
        for _ in range(8):
            replay.add(step(1) + 1)
        step(1 + replay.values.mean())
        state.save()


def elements_of_what_each_body_makes(state: RunState, step: Step) -> None:
    for now in state.steps(4):
        mask = torch.ones(10)
        mask[now % 10] = 0
        step(1 + mask.mean())
        state.save()


def elements_that_are_only_shown(state: RunState, step: Step) -> None:
    losses = torch.zeros(10)
    for now in state.steps(4):
        losses[now % 10] = step(1)
        print(losses.mean().item())
        state.save()


def elements_that_a_long_inner_loop_fills(state: RunState, step: Step) -> None:
    raise NotImplementedError


# Its jumps are so long that they have a prefix.
_LONG = "\n".join(f"            note = {number} + at * {number}" for number in range(100))
exec(
    f"""
def elements_that_a_long_inner_loop_fills(state, step):
    rewards = torch.zeros(3)
    for _ in state.steps(4):
        for at in range(3):
            rewards[at] = float(at)
{_LONG}
        step(rewards.sum())
        state.save()
"""
)


QUIET: list[Script] = [
    what_a_function_only_shows,
    what_a_function_sets,
    what_a_function_returns_to_show_something,
    what_a_function_keeps_for_speed,
    what_a_function_begins_in_each_body,
    what_a_function_restores,
    what_a_function_is_given_to_show,
    what_a_method_is_given_by_the_state,
    elements_that_each_body_fills,
    elements_that_a_function_fills,
    elements_of_a_buffer_that_begins_again,
    elements_of_what_each_body_makes,
    elements_that_are_only_shown,
    elements_that_a_long_inner_loop_fills,
]


@pytest.mark.parametrize("script", QUIET, ids=lambda script: script.__name__)
def test_what_is_shown_set_or_filled_in_each_body_is_not_warned_of(run_dir: Path, script: Script) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumableWarning)
        run(run_dir, script)


@pytest.mark.parametrize("given", ["rates", "replay"])
def test_what_is_given_is_not_warned_of(run_dir: Path, given: str) -> None:
    replay = Replay()

    def script(state: RunState, step: Step) -> None:
        for _ in state.steps(4):
            if given == "rates":
                step(rate())
            else:
                replay.add(step(1 + replay.sample()))
            state.save()

    extra = {"rates": {"rates": rates}, "replay": vars(replay)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumableWarning)
        run(run_dir, script, extra={given: extra[given]})


def with_locals(state: RunState, step: Step) -> None:
    weight, passes, fixed = 1.0, 0, 2.0
    config = locals()
    for now in state.steps(4):
        rate = 0.5**now
        step(rate * fixed)
        weight *= 0.9
        if weight < 0.1:
            break
        passes += 2
        print(passes, len(config))
        state.save()


def with_vars_of_an_object(state: RunState, step: Step) -> None:
    weight, passes = 1.0, 0
    config = vars(Replay())
    for _ in state.steps(4):
        step(weight)
        passes += 2
        print(passes, len(config))
        state.save()


def with_locals_and_nothing_carried(state: RunState, step: Step) -> None:
    config = locals()
    for now in state.steps(4):
        weight = 0.9**now
        print(len(config), step(weight))
        state.save()


def with_locals_and_what_vars_restore(state: RunState, step: Step) -> None:
    best = state.vars.get("best", 9.0)
    config = locals()
    for _ in state.steps(4):
        loss = step(1)
        if loss < best:
            best = loss
            state.vars["best"] = best
        print(len(config))
        state.save()


def test_a_variable_of_a_function_that_calls_locals_is_warned_of(run_dir: Path) -> None:
    expected = "^weight controls this loop, and RunState cannot see whether it changes"
    if sys.version_info >= (3, 13):
        expected = "^weight controls this loop and changes"
    with pytest.warns(ResumableWarning, match=expected) as told:
        run(run_dir, with_locals)

    assert len(told) == 1


@pytest.mark.parametrize(
    "script", [with_vars_of_an_object, with_locals_and_nothing_carried, with_locals_and_what_vars_restore]
)
def test_a_function_that_calls_locals_and_carries_nothing_is_not_warned_of(
    run_dir: Path, script: Script
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumableWarning)
        run(run_dir, script)


def test_the_object_of_a_closure_is_looked_at(run_dir: Path) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.weight = 1.0

        def train(self, state: RunState, step: Step) -> None:
            def closure() -> float:
                self.weight *= 0.9
                return step(self.weight)

            for _ in state.steps(4):
                closure()
                state.save()

    with pytest.warns(ResumableWarning, match=r"weight controls this loop and changes"):
        run(run_dir, Trainer().train)


def test_a_global_of_a_module_in_a_package_is_warned_of(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "schedule.py").write_text(
        "scale = 1.0\n\n\ndef decayed():\n    global scale\n    scale *= 0.9\n    return scale\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    schedule = importlib.import_module("own_package.schedule")

    def script(state: RunState, step: Step) -> None:
        for _ in state.steps(4):
            step(schedule.decayed())
            state.save()

    with pytest.warns(ResumableWarning, match="own_package.schedule:scale controls this loop and changes"):
        run(run_dir, script)


def test_vars_of_an_object_does_not_hide_the_variables(run_dir: Path) -> None:
    def script(state: RunState, step: Step) -> None:
        weight, config = 1.0, vars(Replay())
        for _ in state.steps(4):
            step(weight * len(config))
            weight *= 0.9
            state.save()

    with pytest.warns(ResumableWarning, match="^weight controls this loop and changes"):
        run(run_dir, script)


PACKAGE = """
import numpy as np
import torch
rng = np.random.default_rng(0)
def jitter(x):
    return x + float(rng.normal())
def smooth(x):
    return _inner(x)
def _inner(x):
    return jitter(x)
def scaled(x):
    return 2 * x
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """An installed package with a random generator of its own."""
    (folder := tmp_path / "site-packages" / "jittering").mkdir(parents=True)
    (folder / "__init__.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder.parent)
    import jittering  # type: ignore[import-not-found]

    yield jittering
    del sys.modules["jittering"]


@pytest.mark.parametrize("name", ["jitter", "smooth"])
@pytest.mark.parametrize("is_attribute", [False, True])
def test_a_generator_of_an_installed_helper_is_warned_of(
    run_dir: Path, package: Any, name: str, is_attribute: bool
) -> None:
    function = getattr(package, name)

    def script(state: RunState, step: Step) -> None:
        for _ in state.steps(4):
            x = torch.ones(1)
            step(package.smooth(x) if is_attribute else function(x))
            state.save()

    with pytest.warns(ResumableWarning, match=r"random generators .*\(jittering:rng\)"):
        run(run_dir, script)


@pytest.mark.parametrize("name", ["given", "not drawn from"])
def test_a_generator_of_an_installed_helper_that_is_given_or_rests_is_not_warned_of(
    run_dir: Path, package: Any, name: str
) -> None:
    def script(state: RunState, step: Step) -> None:
        for _ in state.steps(4):
            x = torch.ones(1)
            step(package.smooth(x) if name == "given" else package.scaled(x))
            state.save()

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumableWarning)
        run(run_dir, script, extra={"rng": package.rng} if name == "given" else {})
