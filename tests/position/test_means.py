"""Running means: their values, that a resume continues them bit for bit, and that they stop no device."""

from __future__ import annotations

import io
import math
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import gloo
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from resumable import Ranks, ResumableWarning, RunState, UsageError, progress
from resumable.position import means
from resumable.position.means import Means


class Training:
    """One weight, its optimizer, and a loader of ten numbers in batches of three; each is new."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        numbers = torch.arange(10.0)[:, None] / 7
        loader = DataLoader(numbers, batch_size=3, shuffle=True)  # type: ignore[arg-type]
        self.state = RunState.load(
            run_dir, model=self.model, optimizer=self.optimizer, loader=loader, **options
        )

    def train(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.state.mean(loss=loss, weight=len(batch))
        return loss.detach()


def leg(run_dir: Path, stop: int | None, **options: Any) -> list[float]:
    """Train two epochs, or until so many steps are done; return the mean of each epoch's end."""
    training = Training(run_dir, **options)
    found = []
    with training.state as state:
        for _ in state.epochs(2):
            for batch in state.batches():
                training.train(batch)
                if state.step == stop:
                    state.save().wait()
                    return found
            found.append(state.means["loss"])
            state.save(**state.means)
    return found


@pytest.mark.quick(4)
@pytest.mark.parametrize("stops", [(1, 2), (2, 3), (4, 5), (3, 7)])
def test_means_after_two_resumes_are_those_of_a_run_that_never_stopped(
    run_dir: Path, tmp_path: Path, stops: tuple[int, int]
) -> None:
    straight = leg(tmp_path / "straight", None)

    found = [mean for stop in (*stops, None) for mean in leg(run_dir, stop)]

    assert found == straight


def test_a_mean_is_weighted_by_the_samples(run_dir: Path) -> None:
    training = Training(run_dir)
    losses = []

    for _ in training.state.epochs(1):
        losses = [(training.train(batch).item(), len(batch)) for batch in training.state.batches()]

    total = sum(loss * size for loss, size in losses)
    assert training.state.means["loss"] == pytest.approx(total / 10, rel=1e-15)


def test_each_epoch_begins_without_means_and_the_last_ones_stay_readable(run_dir: Path) -> None:
    training = Training(run_dir)
    at_start = []

    for _ in training.state.epochs(2):
        at_start.append(dict(training.state.means))
        for batch in training.state.batches():
            training.train(batch)

    assert at_start == [{}, {}]
    assert [*training.state.means] == ["loss"]


def test_means_can_be_read_after_a_resume_at_an_epochs_end(run_dir: Path) -> None:
    expected = leg(run_dir, None)[-1]

    for _ in range(2):
        with Training(run_dir).state as state:
            assert state.means["loss"] == expected
            state.save()


def test_passes_over_the_batches_without_epochs_begin_without_means(run_dir: Path) -> None:
    training = Training(run_dir)
    counts = []
    for _ in range(2):
        for batch in training.state.batches():
            training.train(batch)
        training.state.save()
        counts.append(training.state.means._sums["loss"].weight.host)
    training.state.close()
    training = Training(run_dir)

    for batch in training.state.batches():
        training.train(batch)

    assert [*counts, training.state.means._sums["loss"].weight.host] == [10, 10, 10]


def test_in_a_loop_over_steps_means_continue_until_they_are_reset(run_dir: Path) -> None:
    seen = []
    for stop in (3, 5):
        state = RunState.load(run_dir)
        for step in state.steps(stop):
            if step == 2:
                state.means.reset()
            state.mean(step=step)
            seen.append(state.means["step"])
            state.save()
        state.close()

    assert seen == [0, 0.5, 2, 2.5, 3]


def steps_over_an_iterator(run_dir: Path, stop: int) -> list[float]:
    """Train up to a step, over epochs of four batches that the loop asks for itself."""
    training = Training(run_dir)
    found = []
    with training.state as state:
        batches = iter(state.batches())
        for _ in state.steps(stop):
            if (batch := next(batches, None)) is None:
                batches = iter(state.batches())
                batch = next(batches)
            training.train(batch)
            found.append(state.means["loss"])
            state.save()
    return found


def test_means_over_steps_continue_with_an_iterator_made_before_them(run_dir: Path, tmp_path: Path) -> None:
    straight = steps_over_an_iterator(tmp_path / "straight", 10)

    assert [mean for stop in (4, 6, 10) for mean in steps_over_an_iterator(run_dir, stop)] == straight


def test_to_go_back_puts_the_means_back(run_dir: Path) -> None:
    training = Training(run_dir)
    state = training.state
    for _ in state.epochs(1):
        for batch in state.batches():
            training.train(batch)
            if state.step == 2:
                state.save()
                kept = state.means["loss"]
        if state.step == 4:
            state.restore("newest")
            assert state.means["loss"] == kept
            break


def test_to_go_back_without_the_data_keeps_only_means_of_this_epoch(run_dir: Path) -> None:
    training = Training(run_dir)
    state = training.state
    seen = []
    for epoch in state.epochs(2):
        for batch in state.batches():
            training.train(batch)
            if (epoch, state.batch) in ((0, 2), (1, 1)):
                state.restore("newest", skip=True)
                seen.append([*state.means])
            elif epoch == 0:
                state.save()

    assert seen == [["loss"], []]


def test_a_mean_after_the_save_of_the_same_batch_is_warned_of(run_dir: Path) -> None:
    state = RunState.load(run_dir)
    steps = state.steps(2)
    next(steps)
    state.save()
    state.mean(loss=1)

    with pytest.warns(ResumableWarning, match="means changed after save"):
        next(steps)


@pytest.mark.parametrize(
    "value",
    [2, 2.0, np.float32(2), np.array([2]), torch.tensor(2), torch.tensor([2.0], requires_grad=True)],
    ids=str,
)
def test_a_value_is_a_number_of_any_kind(value: Any) -> None:
    found = Means()

    found.add({"loss": value}, weight=value)

    assert dict(found) == {"loss": 2.0}


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"loss": torch.zeros(3)}, r"3 values.*\nFix: .*weight=len\(values\)"),
        ({"loss": "2"}, "'2', which is not a number"),
        ({"loss": None}, "not a number"),
        ({"loss": 1j}, "not a number"),
        ({"loss": 1, "weight": -1}, "weight=-1"),
        ({"loss": 1, "weight": math.nan}, "weight=nan"),
        ({}, "was given no values"),
    ],
)
def test_what_is_no_mean_is_refused_by_name(run_dir: Path, values: dict[str, Any], match: str) -> None:
    with RunState.load(run_dir) as state, pytest.raises(UsageError, match=match):
        state.mean(**values)

    assert dict(state.means) == {}


def test_a_mean_that_is_not_there_is_a_key_error_with_the_names() -> None:
    found = Means()
    found.add({"loss": 1.0})

    assert found.get("accuracy") is None
    with pytest.raises(KeyError, match="no mean 'accuracy' in this epoch yet; there are: loss"):
        found["accuracy"]


def test_a_mean_begun_in_inference_mode_continues_outside_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # As of a tensor on a GPU, whose sum stays there.
    monkeypatch.setattr(means, "_number", lambda name, value: value)
    found = Means()
    with torch.inference_mode():
        found.add({"loss": torch.tensor(1.0)})
    found.add({"loss": torch.tensor(3.0)})

    assert found["loss"] == 2.0


def test_a_pair_of_float32_is_as_exact_as_twice_the_bits() -> None:
    pair, terms = torch.zeros(2), torch.rand(20_000, generator=torch.Generator().manual_seed(0))

    for term in terms:
        means._add_to_pair(pair, term)

    exact = math.fsum(terms.tolist())
    assert pair.double().sum().item() == pytest.approx(exact, rel=1e-12)
    assert terms.cumsum(0)[-1].item() != pytest.approx(exact, rel=1e-12)


def test_sums_on_a_device_come_back_as_they_were() -> None:
    found = Means()
    found.begin(3)
    found._sums["loss"] = means._Mean()
    found._sums["loss"].add(torch.tensor(1 / 3), 3.0)
    saved = found.collect()
    means.check(saved)
    other = Means()

    other.restore(saved)

    assert dict(other) == dict(found)
    assert other.collect()["epoch"] == 3


@pytest.mark.parametrize(
    "saved",
    [
        {"epoch": "1", "sums": {}},
        {"epoch": None, "sums": {"loss": [1.0, None, 1.0]}},
        {"epoch": None, "sums": {"loss": [1.0, None, 1, None]}},
        {"epoch": None, "sums": {"loss": [1.0, torch.zeros(3), 1.0, None]}},
        {"epoch": None, "sums": {"loss": [1.0, torch.zeros(1, dtype=torch.long), 1.0, None]}},
    ],
)
def test_what_is_no_sum_in_a_checkpoint_is_refused(saved: Any) -> None:
    with pytest.raises(ValueError, match=r"is no running mean|stands where int belongs"):
        means.check(saved)


def test_the_bar_over_the_batches_shows_the_means(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_EVERY_LINE", 0.0)
    with RunState.load(run_dir, loader=torch.ones(3), progress=True) as state:
        for _ in state.epochs(1):
            for batch in state.batches():
                state.mean(loss=batch)

    assert re.search(r"batch 2/3, .*loss 1\b", terminal.getvalue())


# On a GPU.


@pytest.mark.cuda
def test_to_add_and_to_glance_wait_for_no_gpu(run_dir: Path) -> None:
    found, loss = Means(), torch.ones((), device="cuda", requires_grad=True)
    found.add({"loss": loss * 2}, weight=3)
    found.glance()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            found.add({"loss": loss * 2}, weight=3)
            found.add({"masked": loss}, weight=loss.detach())
            found.glance()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()

    assert found.glance().startswith("loss 2")
    assert dict(found) == {"loss": 2.0, "masked": 1.0}


@pytest.mark.cuda
def test_means_on_a_gpu_after_two_resumes_are_those_of_a_whole_run(run_dir: Path) -> None:
    def leg(run_dir: Path, stop: int) -> list[Any]:
        with RunState.load(run_dir) as state:
            for step in state.steps(stop):
                state.mean(loss=torch.full((), 1 / (step + 3), device="cuda"), weight=step + 1)
                state.save()
            sums = state.means._sums["loss"]
            assert sums.sum.part is not None
            assert sums.sum.part.is_cuda
            return [sums.sum.part.item(), state.means["loss"]]

    for stop in (2, 5, 9):
        found = leg(run_dir, stop)

    assert found == leg(run_dir.with_name("straight"), 9)


# Of several processes.


def summed(rank: int, run_dir: Path, stop: int | None) -> Any:
    """Give each process values of its own: rank 0 ones, rank 1 twos and one more name."""
    with RunState.load(run_dir, ranks=Ranks(timeout=20)) as state:
        for step in state.steps(4):
            state.mean(loss=rank + 1, weight=1 + 2 * rank)
            if rank:
                state.mean(only=5)
            if step == stop:
                state.save()
                return None
        return dict(state.means), state.means.reduced()


def values(found: list[gloo.Ended]) -> list[Any]:
    for one in found:
        if one.error:
            raise AssertionError(one.printed) from one.error
    return [one.value for one in found]


@pytest.mark.heavy
def test_means_of_all_processes_are_the_same_in_each_after_two_resumes(tmp_path: Path) -> None:
    for stop in (0, 2):
        gloo.run(2, summed, tmp_path / "run", stop, folder=tmp_path)
    found = values(gloo.run(2, summed, tmp_path / "run", None, folder=tmp_path))

    assert [own for own, _ in found] == [{"loss": 1}, {"loss": 2, "only": 5}]
    assert [of_all for _, of_all in found] == 2 * [{"loss": 1.75, "only": 5}]


def grown(rank: int, run_dir: Path) -> Any:
    with RunState.load(run_dir, ranks=Ranks(timeout=20)) as state:
        return state.means.reduced()


@pytest.mark.heavy
def test_more_processes_than_before_count_no_sum_twice(tmp_path: Path) -> None:
    gloo.run(2, summed, tmp_path / "run", 0, folder=tmp_path)

    found = values(gloo.run(3, grown, tmp_path / "run", folder=tmp_path))

    assert found == 3 * [{"loss": 1.75, "only": 5}]


def test_fewer_processes_than_before_are_warned_that_sums_are_lost(tmp_path: Path) -> None:
    gloo.run(2, summed, tmp_path / "run", 0, folder=tmp_path)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* has changed since checkpoint")
        warnings.filterwarnings("error", message="state.means lacks what 1 of the 2 processes")
        with pytest.raises(ResumableWarning, match=r"lacks what 1 of the 2 processes have .*R28"):
            RunState.load(tmp_path / "run")
