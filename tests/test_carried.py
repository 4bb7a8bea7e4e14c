"""What a loop carries from pass to pass, told from its source."""

from __future__ import annotations

import textwrap

import pytest

from resumable.audit.source import uses
from resumable.audit.source.uses import Script, Use


def of(text: str, name: str, *, line: int = 0, function: tuple[str, int] | None = None) -> Use:
    script = made(text)
    return script.variable(name, function, line).use


def made(text: str) -> Script:
    script = uses._parsed(textwrap.dedent(text))
    assert script
    return script


LOOP = """
    import random, time
    best, seen, running, history, t0, order = 0, 0, 0, [], 0, [3, 1, 2]
    level, shown, alias = 0, 0, 0
    def curriculum():
        return level
    for epoch in state.epochs(3):
        total = 0
        for i, batch in enumerate(state.batches()):
            loss = model(batch, curriculum())
            total += loss
            seen += 1
            if seen > 10:
                optimizer.step()
            shown += 1
            t0 = time.time() - t0
            print(shown, t0, i)
        random.shuffle(order)
        train(order)
        if total < best:
            best = total
            state.save(loss=best)
        if epoch == 2:
            level = 1
        history.append(total)
        print(history)
"""


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("best", Use.CARRIED),
        ("seen", Use.CARRIED),
        ("level", Use.CARRIED),
        ("order", Use.CARRIED),
        ("shown", Use.SHOWN),
        ("t0", Use.SHOWN),
        ("history", Use.SHOWN),
        ("model", Use.KEPT),
        ("total", Use.FRESH),
        ("loss", Use.FRESH),
        ("batch", Use.FRESH),
        ("epoch", Use.FRESH),
        ("i", Use.FRESH),
    ],
)
def test_a_variable_of_a_script_is_what_its_loop_does_with_it(name: str, use: Use) -> None:
    assert of(LOOP, name) is use


def test_a_running_sum_is_reset_where_the_loop_over_the_batches_runs() -> None:
    assert of(LOOP, "total", line=10) is Use.RESET


def test_a_count_of_the_batches_that_decides_about_a_step_begins_at_0_after_a_resume() -> None:
    text = """
    for i, batch in enumerate(state.batches()):
        if i % 2:
            optimizer.step()
    """

    assert of(text, "i", line=3) is Use.COUNTED


def test_a_variable_that_the_script_takes_from_the_run_is_restored() -> None:
    text = """
    best = state.vars.get("best", 9)
    for step in state.steps(3):
        best = min(best, train())
        stop(best)
    """

    assert of(text, "best") is Use.RESTORED


def test_what_both_branches_assign_is_not_carried() -> None:
    text = """
    for step in state.steps(3):
        if step:
            rate = 1
        else:
            rate = 2
        train(rate)
    """

    assert of(text, "rate") is Use.FRESH


def test_what_only_one_branch_assigns_is_carried() -> None:
    text = """
    for step in state.steps(3):
        if step == 1:
            rate = 1
        train(rate)
    """

    assert of(text, "rate") is Use.CARRIED


def test_a_global_that_a_function_counts_is_carried_by_the_loop_that_calls_it() -> None:
    text = """
    calls = 0
    def train():
        global calls
        calls += 1
        return calls
    for step in state.steps(3):
        optimize(train())
    """

    assert of(text, "calls") is Use.CARRIED


def test_a_variable_of_a_function_is_told_from_its_own_loop() -> None:
    text = """
    def main():
        worse = 0
        for epoch in state.epochs(9):
            worse = worse + 1 if bad() else 0
            if worse > 3:
                break
    """

    assert of(text, "worse", function=("main", 2)) is Use.CARRIED


CLASSES = """
    class Net(Module):
        def __init__(self):
            self.calls = 0
            self.width = 3
            self.meter = 0
        def forward(self, x):
            self.calls += 1
            self.last = x
            return x / self.calls * self.width
        def update(self):
            self.meter += 1
            return self.meter
        def reset(self):
            self.meter = 0
        def set_rate(self, rate):
            self.rate = rate
        def use(self):
            return self.rate
"""


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("calls", Use.CARRIED),
        ("width", Use.KEPT),
        ("meter", Use.RESET),
        ("rate", Use.SET),
        ("last", Use.SHOWN),
    ],
)
def test_an_attribute_is_what_its_class_does_with_it(name: str, use: Use) -> None:
    fact = made(CLASSES).attribute(name, ["Net"])

    assert fact
    assert fact.use is use


def test_an_attribute_that_a_script_raises_now_and_then_is_carried() -> None:
    text = """
    for epoch in state.epochs(3):
        if train(dataset) > 1:
            dataset.level = 2
    class Data:
        def __getitem__(self, index):
            return self.level
    """

    fact = made(text).attribute("level", ["Data"])

    assert fact
    assert fact.use is Use.CARRIED


def test_the_line_is_the_first_that_assigns_it() -> None:
    assert made("import os\nbest = 0\nbest = 1\n").variable("best", None, 0).line == 2


def test_a_file_that_is_no_python_has_no_facts(tmp_path: object) -> None:
    assert uses._parsed("for for") is None
    assert uses.script(f"{tmp_path}/nowhere.py") is None
