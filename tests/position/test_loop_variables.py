"""Variables of the script that decide how its loop continues, and that no checkpoint has."""

from __future__ import annotations

import signal
import time
import warnings
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import random
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from resumable import RunState
from resumable.errors import ResumableWarning
from resumable.position.script.loop_variables import LoopVariables, glance

Script = Callable[[RunState, Callable[..., torch.Tensor]], None]
LOSSES = [0.5, 0.4, 0.6, 0.3, 0.7, 0.8, 0.9]


class Stopper:
    def __init__(self) -> None:
        self.bad, self.best, self.is_done = 0, 1.0, False

    def step(self, loss: float) -> bool:
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(loss, self.best)
        self.is_done = self.bad > 3
        return self.is_done


@dataclass(slots=True)
class Slotted:
    bad: int = 0

    def step(self, loss: float) -> bool:
        self.bad += loss < 0.5
        return self.bad > 3


class SavedStopper(Stopper):
    def state_dict(self) -> dict[str, Any]:
        return {**vars(self)}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        vars(self).update(saved)


class Trainer:
    def __init__(self, state: RunState) -> None:
        self.state, self.bad, self.shown = state, 0, 0

    def fit(self, step: Callable[..., torch.Tensor]) -> None:
        for epoch in self.state.epochs(4):
            for batch in self.state.batches():
                step(batch)
            self.shown += 1
            self.bad = 0 if LOSSES[epoch] < 0.5 else self.bad + 1
            if self.bad > 3:
                break
            self.state.save()


def early_stopping_by_hand(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    best, bad = 1.0, 0
    for epoch in state.epochs(6):
        for batch in state.batches():
            step(batch)
        if LOSSES[epoch] < best:
            best, bad = LOSSES[epoch], 0
        else:
            bad += 1
        if bad > 3:
            break
        state.save()


def a_loop_in_a_generator(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    def losses() -> Iterator[float]:
        bad = 0
        for epoch in state.epochs(6):
            for batch in state.batches():
                step(batch)
            bad = 0 if LOSSES[epoch] < 0.5 else bad + 1
            if bad > 3:
                break
            state.save()
            yield LOSSES[epoch]

    print(sum(losses()))


def stopped_by(
    kind: type[Stopper] | type[Slotted],
) -> Script:
    def loop(state: RunState, step: Callable[..., torch.Tensor]) -> None:
        stopper = kind()
        for epoch in state.epochs(4):
            for batch in state.batches():
                step(batch)
            if stopper.step(LOSSES[epoch]):
                break
            state.save()

    loop.__name__ = f"stopped_by_{kind.__name__}"
    return loop


def an_attribute_that_stops(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    stopper = Stopper()
    for epoch in state.epochs(4):
        for batch in state.batches():
            step(batch)
        stopper.step(LOSSES[epoch])
        state.save()
        if stopper.best < 0.2:
            break


def a_trainer(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    Trainer(state).fit(step)


def a_weight_that_decays(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    weight = 1.0
    for _ in state.epochs(4):
        for batch in state.batches():
            loss = step(batch) * weight
            loss.backward()
        weight *= 0.9
        state.save()


def a_list_that_is_sampled(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    seen: deque[float] = deque()
    for number in state.steps(5):
        seen.append(number / 2)
        batch = torch.full((1,), seen[0])
        step(batch).backward()
        state.save()


def a_while_loop(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    count = 0
    while state.epoch < 4:
        for batch in state.batches():
            step(batch)
        count += 1
        if count % 10 == 9:
            step(torch.ones(1))
        state.save()


def a_count_of_batches(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    for _ in state.epochs(4):
        count = 0
        for batch in state.batches():
            step(batch)
            if count == 3:
                step(batch)
            count += batch.shape[0]
            state.save()


def a_count_in_a_condition(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    bad = 0
    for _ in state.epochs(4):
        for batch in state.batches():
            step(batch)
        if (bad := bad + 1) > 9:
            break
        state.save()


def a_count_in_a_function(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    bad = 0

    def count() -> None:
        nonlocal bad
        bad += 1

    for _ in state.epochs(4):
        for batch in state.batches():
            step(batch)
        count()
        if bad > 9:
            break
        state.save()


def a_count_that_evaluates(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    count = 0
    for _ in state.steps(4):
        count += 2
        if count % 4 == 0:
            print(step(torch.ones(1)))
        state.save()


def a_count_that_skips(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    count = 0
    for _ in state.epochs(4):
        for batch in state.batches():
            count += 1
            if count % 3 == 0:
                print("skipped")
                continue
            step(batch)
        state.save()


def a_hidden_state(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    hidden = torch.zeros(2)
    for _ in state.steps(4):
        hidden = torch.tanh(hidden.detach() + step(torch.ones(1)))
        hidden.sum().backward()
        state.save()


def a_metric_that_is_smoothed(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    smooth = 0.0
    for epoch in state.epochs(4):
        for batch in state.batches():
            step(batch)
        smooth = 0.9 * smooth + LOSSES[epoch]
        state.save(loss=smooth)


best_of_all = 1.0


def a_global(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    global best_of_all
    best_of_all = 1.0
    for epoch in state.epochs(5):
        for batch in state.batches():
            step(batch)
        is_best = LOSSES[epoch] < best_of_all
        best_of_all = min(LOSSES[epoch], best_of_all)
        if is_best:
            step(torch.ones(1))
        state.save()


def an_item_of_a_dict(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    seen = {"best": 1.0, "bad": 0}
    for epoch in state.epochs(4):
        for batch in state.batches():
            step(batch)
        seen["bad"] += LOSSES[epoch] < 0.5
        if seen["bad"] > 3:
            break
        state.save()


def a_dict_that_a_function_changes(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    seen = {"bad": 0}

    def is_over() -> bool:
        seen["bad"] += 1
        return seen["bad"] > 9

    for _ in state.epochs(4):
        for batch in state.batches():
            step(batch)
        if is_over() and seen:
            break
        state.save()


def an_item_of_a_list(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    best = [1.0, 0.0]
    for epoch in state.epochs(4):
        for batch in state.batches():
            step(batch)
        if LOSSES[epoch] < best[0]:
            best[0] = LOSSES[epoch]
            step(torch.ones(1))
        state.save()


def a_namespace(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    args = Namespace(best=1.0)
    for epoch in state.epochs(4):
        for batch in state.batches():
            step(batch)
        if LOSSES[epoch] < args.best:
            args.best = LOSSES[epoch]
            step(torch.ones(1))
        state.save()


def an_array(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    weights = np.ones(2)
    for _ in state.steps(4):
        (step(torch.ones(1)) * float(weights[0])).backward()
        weights = weights * 0.9
        state.save()


def a_count_beside_vars(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    bad = 0
    for _ in state.epochs(4):
        for batch in state.batches():
            step(batch)
        state.vars["seen"] = bad = bad + 1
        if bad > 9:
            break
        state.save()


def elements_of_an_array(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    counts = np.ones(3)
    for number in state.steps(4):
        counts[number % 3] += 1
        (step(torch.ones(1)) * float(1 / counts[0])).backward()
        state.save()


def elements_of_a_tensor(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    mean = torch.zeros(1)
    for _ in state.steps(4):
        loss = step(torch.ones(1))
        mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
        (loss - mean).sum().backward()
        state.save()


def what_the_body_before_appended(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    rates = [0.9]
    for _ in state.steps(4):
        step(torch.ones(1) * rates[-1])
        rates.append(0.9 * rates[-1])
        state.save()


def what_some_bodies_append(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    losses = [1.0]
    for number in state.steps(4):
        step(torch.ones(1))
        if number % 2:
            losses.append(LOSSES[number])
        state.save(loss=losses[-1])


DECIDE = {
    a_count_that_evaluates: "count controls",
    a_count_that_skips: "count controls",
    elements_of_an_array: "counts controls",
    elements_of_a_tensor: "mean controls",
    a_count_beside_vars: "bad controls",
    an_item_of_a_dict: r"seen\['bad'\] controls",
    a_dict_that_a_function_changes: r"seen\['bad'\] controls",
    an_item_of_a_list: r"best\[0\] controls",
    what_the_body_before_appended: r"rates\[-1\] controls",
    what_some_bodies_append: r"losses\[-1\] controls",
    a_namespace: r"args\.best controls",
    a_loop_in_a_generator: "bad controls",
    stopped_by(Slotted): r"stopper\.bad controls",
    an_array: "weights controls",
    early_stopping_by_hand: "best controls",
    stopped_by(Stopper): r"stopper\.best controls",
    an_attribute_that_stops: r"stopper\.best controls",
    a_trainer: r"self\.bad controls",
    a_weight_that_decays: "weight controls",
    a_list_that_is_sampled: "seen controls",
    a_while_loop: "count controls",
    a_count_of_batches: "count controls",
    a_count_in_a_condition: "bad controls",
    a_count_in_a_function: "bad controls",
    a_hidden_state: "hidden controls",
    a_metric_that_is_smoothed: "smooth controls",
    a_global: "best_of_all controls",
}


def what_is_only_shown(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    total, count, losses, began = 0.0, 0, [], 0.0
    for epoch in state.epochs(4):
        for batch in state.batches():
            total += step(batch).item()
            count += 1
        losses.append(total)
        mean = total / count
        print(epoch, state.step, mean, count, f"{count - began:.1f}")
        began = float(count)
        state.save()


def what_a_comprehension_reads(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    losses: list[float] = []
    for epoch in state.epochs(4):
        for batch in state.batches():
            step(batch)
        losses.append(LOSSES[epoch])
        mean = sum([loss for loss in losses if loss > 0]) / len(losses)
        print(mean, {key: loss for key, loss in enumerate(losses) if loss})
        state.save()


def what_a_clock_gives(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    began, rate = time.time(), -1.0
    for epoch in state.epochs(4):
        for batch in state.batches():
            step(batch)
        now = time.time()
        passed = now - began
        began = now
        if epoch > 1:
            rate = passed if rate == -1.0 else 0.9 * rate + 0.1 * passed
        if perf_counter() - now > 1e9:
            break
        state.save()


def what_each_body_puts_into_a_dict(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    logs = {"loss": 0.0}
    for epoch in state.epochs(4):
        for batch in state.batches():
            step(batch)
        logs["loss"] = LOSSES[epoch]
        if logs["loss"] > 1e9:
            break
        state.save(**logs)


class Batch:
    def __init__(self, number: int) -> None:
        self.number = number


def what_each_batch_has(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    for epoch in state.epochs(4):
        for batch in state.batches():
            step(batch)
        last = Batch(epoch)
        if last.number > 9:
            break
        state.save()


def what_the_state_keeps_in_a_dict(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    seen = state.vars.setdefault("seen", {"bad": 0})
    for _ in state.epochs(4):
        for batch in state.batches():
            step(batch)
        seen["bad"] += 1
        if seen["bad"] > 9:
            break
        state.save()


def what_the_state_gives(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    best, count = state.vars.get("best", 1.0), state.step
    for epoch in state.epochs(4):
        for batch in state.batches():
            step(batch)
            count += 1
            if count % 2:
                step(batch)
        if LOSSES[epoch] < best:
            best = state.vars["best"] = LOSSES[epoch]
        state.save()


def what_each_body_sets(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    limit = 3
    for epoch in state.epochs(4):
        total = 0.0
        for number, batch in state.enumerate():
            loss = step(batch)
            is_even = number % 2 == 0
            if is_even and number < limit:
                total += loss.item()
        rate = 0.1 * 0.5**epoch
        if total > 0 and rate > 1:
            break
        state.save(loss=total)


def what_with_and_try_leave(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    config, best = locals(), 9.0
    size = len(config)
    for _ in state.epochs(4):
        for batch in state.batches():
            with torch.enable_grad():
                loss = step(batch)
            try:
                value = loss.item()
            except RuntimeError:
                continue
            if value > 1e9:
                break
        with torch.no_grad():
            score = float(random())
        if score > 2:
            break
        state.save()
    assert len(config) == size
    if best < 0.5:
        step(torch.ones(1))


def what_each_body_fills(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    rewards = torch.zeros(3)
    for _ in state.steps(4):
        for number in range(3):
            rewards[number] = step(torch.ones(1)).item()
        (step(torch.ones(1)) * rewards.mean()).backward()
        state.save()


def what_each_body_begins_with_zeros(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    sums, counts = torch.zeros(3), np.zeros(3)
    for _ in state.steps(4):
        sums.zero_()
        counts[:] = 0
        for number in range(3):
            sums[number] += step(torch.ones(1)).item()
            counts[number] += 1
        (step(torch.ones(1)) * sums.mean() * float(counts.mean())).backward()
        state.save()


def when_something_is_shown(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    seen, total, began = 0, 0.0, perf_counter()
    for _ in state.epochs(4):
        for batch in state.batches():
            loss = step(batch)
            seen += 1
            total += loss.item()
            if seen % 2 == 0 and seen > 2:
                print(f"{seen} {total / 2:.3f} {perf_counter() - began:.1f}")
                total = 0.0
                began = perf_counter()
            elif seen == 1:
                print("begins", len(str(seen)))
            state.save()
        if seen % 8 == 0:
            print(seen)


def what_an_inner_loop_leaves(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    for _ in state.epochs(4):
        for batch in state.batches():
            loss = step(batch).item()
        if loss > 1e9:
            break
        state.save(loss=loss)


def what_a_sweep_keeps(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    best = 1.0
    for seed in range(2):
        with RunState.load(f"{state.run.path}-{seed}") as state:
            for epoch in state.epochs(2):
                state.save()
                best = min(best, LOSSES[epoch])
        if best < 0.1:
            break


def what_each_body_appends(state: RunState, step: Callable[..., torch.Tensor]) -> None:
    holder, scores = SimpleNamespace(losses=[1.0]), list[float]()
    for epoch in state.epochs(4):
        for batch in state.batches():
            step(batch)
            scores.append(round(number=LOSSES[epoch], ndigits=1))
        holder.losses.append(LOSSES[epoch])
        if holder.losses[-1] > 5 or scores[-1] > 5:
            break
        state.save(loss=holder.losses[-1])


def run(run_dir: Path, script: Script, **more: Any) -> None:
    loader = DataLoader(torch.arange(4.0).view(4, 1), batch_size=1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        return loss

    with RunState.load(run_dir, model=model, optimizer=optimizer, loader=loader, **more) as state:
        script(state, step)


@pytest.mark.parametrize("script", DECIDE, ids=lambda script: script.__name__)
def test_a_variable_that_decides_is_warned_of_by_name(run_dir: Path, script: Script) -> None:
    with pytest.warns(ResumableWarning, match=DECIDE[script]):
        run(run_dir, script)


SHOWN = [
    *(what_is_only_shown, what_the_state_gives, what_each_body_sets),
    *(what_an_inner_loop_leaves, what_a_sweep_keeps, what_with_and_try_leave),
    *(when_something_is_shown, what_each_body_begins_with_zeros),
    *(what_each_body_fills, what_a_comprehension_reads, what_a_clock_gives),
    what_each_body_appends,
    *(what_each_body_puts_into_a_dict, what_the_state_keeps_in_a_dict, what_each_batch_has),
]


@pytest.mark.parametrize("script", SHOWN, ids=lambda script: script.__name__)
def test_other_variables_are_not_warned_of(run_dir: Path, script: Script) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(run_dir, script)


def test_an_object_that_was_given_is_not_warned_of(run_dir: Path) -> None:
    given = SavedStopper()

    def script(state: RunState, step: Callable[..., torch.Tensor]) -> None:
        stopper = given
        for epoch in state.epochs(4):
            if stopper.step(LOSSES[epoch]):
                break
            state.save()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(run_dir, script, extra={"stopper": given})


def test_an_object_whose_attributes_were_given_is_not_warned_of(run_dir: Path) -> None:
    given = Stopper()

    def script(state: RunState, step: Callable[..., torch.Tensor]) -> None:
        stopper = given
        for epoch in state.epochs(4):
            if stopper.step(LOSSES[epoch]):
                break
            state.save()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(run_dir, script, extra={"stopper": vars(given)})


def test_automatic_saves_look_at_the_variables_too(run_dir: Path) -> None:
    def script(state: RunState, step: Callable[..., torch.Tensor]) -> None:
        best = 1.0
        for epoch in state.epochs(6):
            for batch in state.batches():
                step(batch)
            if LOSSES[epoch] < best:
                best = LOSSES[epoch]

    with pytest.warns(ResumableWarning, match="best controls"):
        run(run_dir, script, every=3)


@pytest.mark.parametrize(
    ("decides", "said"),
    [
        (False, r"^total is summed over the epoch and saved as a metric: .*state\.mean"),
        (True, "^total controls this loop"),
    ],
)
def test_a_sum_that_is_only_saved_is_told_to_be_averaged(run_dir: Path, decides: bool, said: str) -> None:
    def saves(state: RunState, step: Callable[..., torch.Tensor]) -> None:
        for _ in state.epochs(2):
            total = 0.0
            for batch in state.batches():
                total += step(batch).item()
            state.save(loss=total / 4)

    def stops(state: RunState, step: Callable[..., torch.Tensor]) -> None:
        for _ in state.epochs(2):
            total = 0.0
            for batch in state.batches():
                total += step(batch).item()
                if total > 1e9:
                    break
            state.save(loss=total / 4)

    with pytest.warns(ResumableWarning, match=said) as caught:
        run(run_dir, stops if decides else saves, every=1)

    assert len(caught) == 1


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.noise = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x + torch.rand(1, generator=self.noise))


def in_a_variable(state: RunState, model: Any) -> None:
    noise = torch.Generator().manual_seed(0)
    for _ in state.steps(3):
        model(torch.rand(1, generator=noise)).sum().backward()
        state.save()


def in_the_model(state: RunState, model: Any) -> None:
    for _ in state.steps(3):
        model(torch.ones(1)).sum().backward()
        state.save()


dice = np.random.default_rng(0)


def rolled(x: torch.Tensor) -> torch.Tensor:
    return x * dice.random()


def in_a_function(state: RunState, model: Any) -> None:
    for _ in state.steps(3):
        model(rolled(torch.ones(1))).sum().backward()
        state.save()


def made_late(state: RunState, model: Any) -> None:
    noise = None
    for step in state.steps(8):
        if step >= 2:
            noise = noise or torch.Generator().manual_seed(0)
        model(torch.rand(1, generator=noise)).sum().backward()
        state.save()


def seeded_in_each_body(state: RunState, model: Any) -> None:
    noise = torch.Generator()
    for step in state.steps(4):
        noise.manual_seed(step)
        fresh = torch.Generator().manual_seed(step)
        model(torch.rand(1, generator=noise) + torch.rand(1, generator=fresh)).sum().backward()
        state.save()


DRAWN = {
    in_a_variable: r"\(noise\)",
    made_late: r"\(noise\)",
    in_the_model: r"\(model\.noisy\.noise\)",
    in_a_function: r"dice\)",
}


def draw(run_dir: Path, script: Callable[[RunState, Any], None], **extra: Any) -> None:
    noisy = Noisy() if script is in_the_model else nn.Linear(1, 1)
    optimizer = torch.optim.SGD(noisy.parameters(), lr=0.01)
    with RunState.load(run_dir, model=noisy, optimizer=optimizer, extra=extra) as state:

        def model(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            return noisy(x)  # type: ignore[no-any-return]

        script(state, model)


@pytest.mark.parametrize("script", DRAWN, ids=lambda script: script.__name__)
def test_a_generator_that_is_in_no_checkpoint_is_warned_of(run_dir: Path, script: Any) -> None:
    with pytest.warns(ResumableWarning, match=f"random generators .*{DRAWN[script]}"):
        draw(run_dir, script)


def test_a_generator_that_is_given_is_not_warned_of(run_dir: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(run_dir, in_a_function, dice=dice)


def test_a_generator_that_each_body_seeds_is_not_warned_of(run_dir: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(run_dir, seeded_in_each_body)


class Interrupted:
    """Its comparison meets a signal, whose handler raises, or raises by itself."""

    def __init__(self, is_signal: bool) -> None:
        self.is_signal = is_signal

    def look(self, *_: Any) -> Any:
        if self.is_signal:
            signal.raise_signal(signal.SIGALRM)
        raise TimeoutError("by itself")


def _too_late(*_: Any) -> None:
    raise TimeoutError("by a signal")


def test_an_object_that_raises_is_warned_of_and_an_error_of_a_signal_is_raised(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGALRM, _too_late)
    try:
        monkeypatch.setattr(LoopVariables, "changed", Interrupted(is_signal=False).look)
        with pytest.warns(ResumableWarning, match=r"cannot be inspected \(TimeoutError\('by itself'\)\)"):
            run(run_dir / "itself", early_stopping_by_hand)
        monkeypatch.setattr(LoopVariables, "changed", Interrupted(is_signal=True).look)
        with pytest.raises(TimeoutError, match="by a signal"):
            run(run_dir / "signal", early_stopping_by_hand)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["weight", "center", "generator", "copy"])
def test_what_a_loop_computes_is_warned_of_at_the_first_save(run_dir: Path, kind: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, center, generator = 1.0, torch.zeros(2), torch.Generator().manual_seed(0)
    average = torch.optim.swa_utils.AveragedModel(model)
    with RunState.load(run_dir, model=model, optimizer=optimizer, progress=False) as state:
        for step in state.steps(2):
            x = torch.ones(3, 2)
            if kind == "generator":
                x = torch.randn(3, 2, generator=generator)
            (weight * model(x - center)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if kind == "weight":
                weight *= 0.9
            if kind == "center":
                center = 0.9 * center + 0.1 * x.mean(0)
            if kind == "copy":
                average.update_parameters(model)
            if step == 1:
                named = "average" if kind == "copy" else kind
                with pytest.warns(ResumableWarning, match=rf"\b{named}\b"):
                    state.save()


def test_a_tensor_that_moves_to_the_device_of_the_batches_is_not_warned_of(run_dir: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = torch.ones(2)
    with RunState.load(run_dir, model=model, optimizer=optimizer, progress=False) as state:
        for _ in state.steps(2):
            mask = mask.to("meta")
            (model(torch.ones(3, 2)).square().mean() + 0 * len(mask)).backward()
            optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                state.save().wait()


def test_an_object_whose_attributes_are_not_all_named_by_text_is_looked_at() -> None:
    holder = SimpleNamespace(bad=1, __doc__="no value of the loop")
    vars(holder)[0] = 2  # type: ignore[index]

    assert glance("holder", holder) == {"holder.bad": 1, "holder.0": 2}
