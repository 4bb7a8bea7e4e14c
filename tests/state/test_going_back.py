"""Going back: to an earlier checkpoint, from a spike of the loss, and when patience ends."""

from __future__ import annotations

import math
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gloo
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import Diverged, Ranks, ResumableWarning, Run, RunState, UsageError

EPOCHS = 3
Where = tuple[str, int, int]
"""The place in the loops, the epoch and the batch."""


class Noisy(Dataset[torch.Tensor]):
    """Seventeen samples with noise from Python's, numpy's and torch's generators."""

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(3) + random.random() + np.random.rand() + index


def loader(workers: int = 0, **more: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), 3, shuffle=True, num_workers=workers, **more)


LOADERS: dict[str, Callable[[], Any]] = {
    "in process": loader,
    "workers": lambda: loader(2),
    "persistent workers": lambda: loader(2, persistent_workers=True),
    "two loaders": lambda: {"a": loader(), "b": DataLoader(Noisy(), 1, shuffle=True, num_workers=1)},
}


class Training:
    """All objects of one training, and a state of the run that is loaded; each is new."""

    def __init__(self, run_dir: Path, seed: int, make: Callable[[], Any] = loader, **more: Any) -> None:
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.noise = np.random.default_rng(seed)
        more = {"keep": None, "every": None, "minimize": "loss", "extra": {"noise": self.noise}, **more}
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.state = RunState.load(run_dir, **parts, loader=make(), **more)
        # What is drawn between the load and the loops does not count.
        torch.rand(seed), random.random(), self.noise.random()

    def backward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch * self.noise.random()).square().mean()
        loss.backward()
        return loss

    def step(self) -> None:
        self.optimizer.step(), self.optimizer.zero_grad(), self.scheduler.step()

    def batches(self) -> Iterator[Any]:
        if len(self.state._position.loaders) == 1:
            return iter(self.state.batches())
        return (torch.cat(pair) for pair in zip(*map(self.state.batches, "ab"), strict=False))


def script(training: Training, every: int, back: Callable[[Where], bool]) -> None:
    """Train to the end, with a step every few batches and a save after each; `back` may go back anywhere."""
    state = training.state
    for epoch in state.epochs(EPOCHS):
        torch.rand(2), training.noise.random()
        last = -1
        for batch in training.batches():
            last = state.batch
            training.backward(batch)
            if last % every == every - 1:
                training.step()
            state.save(loss=1 if (epoch, last) == (0, 1) else 2)
            if back(("body", epoch, last)):
                break
        else:
            torch.rand(3)
            if back(("validation", epoch, last)):
                continue
            training.scheduler.step()
            state.save(loss=2)
            back(("rest", epoch, last))
    state.close()


def made_since(run_dir: Path, number: int) -> list[Any]:
    """Return what all later checkpoints hold, to the last byte."""
    found = [one for one in Run(run_dir).checkpoints() if one.about.number > number]
    for one in found:
        one.verify()
    return [(one.about.number, one.about.parent, one.about.best, one.about.files) for one in found]


def compare(run_dir: Path, way: list[tuple[Where, Any]], make: Callable[[], Any], every: int = 1) -> None:
    """Go back at some places, and compare with a fresh training resumed from there each time."""
    copies: list[tuple[Path, Any, int]] = []

    def back(where: Where) -> bool:
        state = training.state
        if not way or way[0][0] != where:
            return False
        _, which = way.pop(0)
        state.wait()
        copy = run_dir.with_name(f"copy-{len(copies)}")
        shutil.copytree(run_dir, copy, symlinks=True)
        *before, which = which if isinstance(which, tuple) else (which,)
        copies.append((copy, which, max(state.run.numbers())))
        for one in (*before, which):
            state.restore(one)
        return True

    training = Training(run_dir, 1, make)
    script(training, every, back)

    assert not way
    copy, which, number = copies[-1]
    script(Training(copy, 2, make, resume=which), every, lambda _: False)
    assert made_since(run_dir, number) == made_since(copy, number) != []


PLACES: list[Where] = [("body", 0, 2), ("body", 1, 0), ("body", 1, 5), ("validation", 1, 5), ("rest", 1, 5)]


@pytest.mark.heavy
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("which", ["best", 1, 6, 7])
def test_going_back_trains_what_a_process_resumed_from_there_trains(
    run_dir: Path, where: Where, which: Any
) -> None:
    if which in (6, 7) and where[1] == 0:
        which = "newest"

    compare(run_dir, [(where, which)], LOADERS["in process"])


@pytest.mark.heavy
@pytest.mark.filterwarnings("ignore:this epoch was resumed in the middle")
@pytest.mark.parametrize("kind", [*LOADERS][1:])
@pytest.mark.parametrize(("where", "which"), [(("body", 1, 2), 3), (("rest", 1, 5), 9), (("body", 1, 5), 7)])
def test_the_same_with_workers_and_with_two_loaders(
    run_dir: Path, kind: str, where: Where, which: int
) -> None:
    compare(run_dir, [(where, which)], LOADERS[kind])


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["in process", "persistent workers"])
def test_the_same_when_it_goes_back_again_and_again(run_dir: Path, kind: str) -> None:
    way: list[tuple[Where, Any]] = [
        (("body", 1, 3), 3),
        (("body", 0, 4), "best"),
        (("rest", 0, 5), 5),
        (("validation", 1, 5), "newest"),
        (("body", 2, 1), 2),
    ]

    compare(run_dir, way, LOADERS[kind])


@pytest.mark.parametrize("which", [1, 2, 3, 4, 6])
@pytest.mark.heavy
def test_the_same_in_the_middle_of_an_accumulation(run_dir: Path, which: int) -> None:
    compare(run_dir, [(("body", 1, 1), which)], loader, every=3)


@pytest.mark.heavy
def test_going_back_twice_in_a_row_is_going_back_to_the_second(run_dir: Path) -> None:
    compare(run_dir, [(("body", 1, 2), (2, "newest", 4))], loader)


def test_a_save_right_after_going_back_is_the_same_checkpoint_again(run_dir: Path) -> None:
    training, pairs = Training(run_dir, 1), []
    for _ in training.state.epochs(2):
        for batch in training.batches():
            training.backward(batch), training.step()
            first = training.state.save()
            if training.state.step in (2, 5) and len(pairs) < 3:
                training.state.restore(first.number - 1)
                pairs.append((first.number - 1, training.state.save().number))
    training.state.close()

    run = Run(run_dir)
    assert len(pairs) == 3
    for then, again in pairs:
        assert run.open(again).about.parent == then
        assert run.open(again).about.files == run.open(then).about.files


def nano(training: Training, total: int, back: Callable[[int], bool]) -> list[float]:
    """Train as nanoGPT does: batches are drawn at random."""
    drawn = []
    for step in training.state.steps(total):
        batch = torch.randn(2, 3) + np.random.rand()
        drawn.append(batch[0, 0].item())
        training.backward(batch), training.step()
        if back(step):
            continue
        training.state.save()
    training.state.close()
    return drawn


def test_going_back_in_steps_trains_what_a_resumed_process_trains(
    run_dir: Path,
) -> None:
    training, copy, turns = Training(run_dir, 1, dict), run_dir.with_name("copy"), [3, 4, 5]

    def back(step: int) -> bool:
        if step not in turns:
            return False
        turns.remove(step)
        training.state.wait(), shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run_dir, copy, symlinks=True)
        training.state.restore(2)
        return True

    nano(training, 7, back)
    nano(Training(copy, 2, dict, resume=2), 7, lambda _: False)

    number = max(Run(copy).numbers()) - 5
    assert made_since(run_dir, number) == made_since(copy, number) != []


# restore(skip=True): the training goes back, and the data do not.


Seen = list[tuple[int, int, int, list[list[float]]]]


def skipping(training: Training, seen: Seen, at: tuple[int, int] | None, which: Any, stop: Any) -> None:
    """Train with a save in each body, leave out the data at one place, and stop at another."""
    state = training.state
    for epoch in state.epochs(EPOCHS):
        for batch in training.batches():
            seen.append((epoch, state.batch, state.step, batch.tolist()))
            training.backward(batch), training.step()
            if (epoch, state.batch) == at:
                at = None
                state.restore(which, skip=True)
                continue
            state.save()
            if (epoch, state.batch) == stop:
                state.close()
                return
    state.close()


@pytest.mark.heavy
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(("at", "which"), [((0, 3), 1), ((1, 0), 3), ((1, 3), 7), ((1, 5), 6)])
def test_skipped_data_are_not_trained_and_all_other_data_are(
    run_dir: Path, kind: str, at: tuple[int, int], which: int
) -> None:
    seen: Seen = []
    skipping(Training(run_dir, 1, LOADERS[kind]), seen, at, which, None)

    expected = [(epoch, batch) for epoch in range(EPOCHS) for batch in range(6)]
    assert [(epoch, batch) for epoch, batch, *_ in seen] == expected
    place = expected.index(at)
    assert [step for *_, step, _ in seen[place:]] == [place, *range(which, 18 - place - 1 + which)]
    assert len({str(batch) for *_, batch in seen}) == 18


@pytest.mark.heavy
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("stop", [(1, 3), (1, 5), (2, 1)])
def test_a_training_that_left_out_data_resumes_bit_for_bit(
    run_dir: Path, kind: str, stop: tuple[int, int]
) -> None:
    straight, whole, parts = run_dir.with_name("straight"), [], []
    skipping(Training(straight, 1, LOADERS[kind]), whole, (1, 2), 4, None)

    skipping(Training(run_dir, 1, LOADERS[kind]), parts, (1, 2), 4, stop)
    skipping(Training(run_dir, 2, LOADERS[kind]), parts, None, None, None)

    assert parts == whole
    assert made_since(run_dir, 0) == made_since(straight, 0)


def test_a_save_in_the_body_that_went_back_stands_behind_its_batch(run_dir: Path) -> None:
    numbers = []
    for seed in (1, 2, 3):
        training = Training(run_dir, seed, lambda: DataLoader(torch.arange(18.0).reshape(6, 3), 1))
        for _ in training.state.epochs(1):
            for batch in training.batches():
                numbers.append(batch[0, 0].item() / 3)
                training.state.save()
                training.state.restore("newest", skip=True)
                training.state.save()
                if training.state.batch % 2:
                    break
            break
        training.state.close()

    assert numbers == [0, 1, 2, 3, 4, 5]
    assert [one.about.samples for one in Run(run_dir).checkpoints()[::2]] == [1, 2, 3, 4, 5, 6]


def test_samples_and_steps_gone_back_behind_do_not_count(run_dir: Path) -> None:
    training = Training(run_dir, 1)
    counted = []
    for batch in training.batches():
        counted.append((training.state.batch, training.state.step, training.state.samples))
        training.backward(batch), training.step()
        if training.state.batch == 0:
            training.state.save()
        if training.state.batch == 2:
            training.state.restore("newest", skip=True)

    assert counted == [(0, 0, 0), (1, 1, 3), (2, 2, 6), (3, 1, 3), (4, 2, 6), (5, 3, 9)]


def test_after_a_break_the_batch_that_was_left_out_does_not_come_again(run_dir: Path) -> None:
    training, places = Training(run_dir, 1), []
    for _ in training.state.epochs(2):
        for batch in training.batches():
            places.append((training.state.epoch, training.state.batch))
            training.backward(batch), training.step(), training.state.save()
            if len(places) == 3:
                training.state.restore(1, skip=True)
                break
        if len(places) == 3:
            break
    for _ in training.state.epochs(1):
        places += [(0, training.state.batch) for _ in training.batches()]

    assert places == [(0, number) for number in range(6)]


def failing(training: Training, batch: Any, places: list[int]) -> None:
    places.append(training.state.batch)
    if len(places) == 3:
        raise FloatingPointError
    training.backward(batch), training.step(), training.state.save()


def test_after_an_error_that_left_the_batches_the_failed_one_is_skipped(run_dir: Path) -> None:
    training, places = Training(run_dir, 1), []
    for _ in training.state.epochs(1):
        try:
            for batch in training.batches():
                failing(training, batch, places)
        except FloatingPointError:
            training.state.restore("newest", skip=True)

    assert places == [0, 1, 2, 3, 4, 5]
    assert training.state.step == 5


def test_after_an_error_that_left_both_loops_nothing_can_be_skipped(run_dir: Path) -> None:
    training, places = Training(run_dir, 1), []
    try:
        for _ in training.state.epochs(1):
            for batch in training.batches():
                failing(training, batch, places)
    except FloatingPointError:
        with pytest.raises(UsageError, match="a batch in hand that was not trained"):
            training.state.restore("newest", skip=True)

    training.state.restore("newest")
    assert training.state.batch == 2


def test_in_steps_skipping_draws_other_batches(run_dir: Path) -> None:
    training, steps = Training(run_dir, 1, dict), []

    def back(step: int) -> bool:
        steps.append(step)
        if len(steps) == 3:
            training.state.restore(1, skip=True)
        return len(steps) == 3

    drawn = nano(training, 4, back)

    assert steps == [0, 1, 2, 1, 2, 3]
    assert len({*drawn}) == 6


def test_a_body_of_steps_that_went_back_to_the_beginning_counts_no_step(run_dir: Path) -> None:
    training, steps = Training(run_dir, 1, dict), []
    training.state.save()
    for step in training.state.steps(2):
        steps.append(step)
        if len(steps) == 1:
            training.state.restore("newest", skip=True)
            training.state.save()

    assert steps == [0, 0, 1]
    assert Run(run_dir).open(2).about.step == 0


def test_one_part_alone_has_nothing_to_skip(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="nothing to skip"):
        Training(run_dir, 1).state.restore("newest", only="model", skip=True)


class OneAhead:
    """The usual prefetcher: it asks for the next batch in another call than for the first."""

    def __init__(self, batches: Any) -> None:
        self.batches = iter(batches)
        self.following = next(self.batches, None)

    def __iter__(self) -> Iterator[Any]:
        while self.following is not None:
            now = self.following
            self.preload()
            yield now

    def preload(self) -> None:
        self.following = next(self.batches, None)


AHEAD: dict[str, Callable[[RunState], Any]] = {
    "through=list": lambda state: state.batches(through=list),
    "through=": lambda state: state.batches(through=OneAhead),
    "around": lambda state: OneAhead(state.batches()),
    "device": lambda state: state.batches(device="cpu"),
}


@pytest.mark.parametrize("kind", AHEAD)
@pytest.mark.parametrize("at", [1, 4, 5])
@pytest.mark.quick(3)
def test_what_was_loaded_ahead_is_not_left_out(run_dir: Path, kind: str, at: int) -> None:
    training, seen = Training(run_dir, 1, lambda: loader(2)), []
    training.state.save()
    for _ in training.state.epochs(2):
        for batch in AHEAD[kind](training.state):
            seen.append(batch.tolist())
            if len(seen) == at + 1:
                training.state.restore(1, skip=True)
                training.state.save()
                continue
            training.backward(batch), training.step()
        training.state.save()
    training.state.close()

    assert len({str(batch) for batch in seen}) == 12
    assert [one.about.samples for one in Run(run_dir).checkpoints()[1:]] == [
        0,
        {1: 11, 4: 2, 5: 0}[at],
        {1: 28, 4: 19, 5: 17}[at],
    ]
    # Of the last batch nobody knows there that it is the last, so a save in its body ends the epoch.
    batch = 0 if (kind, at) == ("around", 5) else at + 1
    assert [one.about.batch for one in Run(run_dir).checkpoints()[1:]] == [batch, 0, 0]


def test_behind_another_thread_it_is_unknown_which_batch_is_in_hand(run_dir: Path) -> None:
    training = Training(run_dir, 1)
    training.state.save()
    with ThreadPoolExecutor(1) as pool:
        for batch in pool.submit(list, training.state.batches()).result():
            with pytest.raises(UsageError, match="unknown which batch is in hand"):
                training.state.restore(1, skip=True)
            training.backward(batch), training.step()

    training.state.restore(1, skip=True)
    assert training.state.step == 0


@pytest.mark.quick(3)
@pytest.mark.parametrize("at", [1, 2, 4])
def test_in_an_accumulation_the_gradients_of_what_is_left_out_are_gone(run_dir: Path, at: int) -> None:
    def train(training: Training, until: int) -> None:
        for batch in training.batches():
            training.backward(batch)
            if training.state.batch == at:
                training.state.restore(1, skip=True)
            elif training.state.batch % 3 == 2:
                training.step()
            training.state.save()
            if training.state.batch == until:
                break
        training.state.close()

    for folder, until in ((run_dir, 9), (run_dir.with_name("stopped"), at)):
        training = Training(folder, 1)
        training.state.save()
        train(training, until)
    train(Training(run_dir.with_name("stopped"), 2), 9)

    assert made_since(run_dir, 0) == made_since(run_dir.with_name("stopped"), 0)
    assert len(made_since(run_dir, 0)) == 7


def test_the_gradients_of_the_checkpoint_gone_back_to_are_saved_again(run_dir: Path) -> None:
    training, number = Training(run_dir, 1), 0
    for batch in training.batches():
        training.backward(batch)
        if training.state.batch == 1:
            number = training.state.save().number
        elif training.state.batch == 2:
            training.step()
            training.state.restore(number, skip=True)
            training.state.save()
            break
    training.state.close()

    again = Training(run_dir, 2)
    gradients = [[p.grad for p in one.model.parameters()] for one in (training, again)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))  # type: ignore[arg-type]
    assert again.state.batch == 3


# spiked().


def losses(run_dir: Path, given: list[float], **more: Any) -> tuple[list[bool], list[int | None]]:
    """Ask for each loss whether it spiked, and save where it did not; return the answers and the parents."""
    answers = []
    with RunState.load(run_dir, keep=None) as state:
        for _ in state.steps(99):
            answers.append(state.spiked(given[len(answers)], **{"above": 20, **more}))
            if not answers[-1]:
                state.save()
            if len(answers) == len(given):
                break
    return answers, [one.about.parent for one in Run(run_dir).checkpoints()]


@pytest.mark.parametrize("loss", [20.0, 0, -5.5, torch.tensor(3.0), torch.tensor([2]), np.float32(1)])
def test_a_loss_that_is_finite_and_not_above_the_bound_changes_nothing(
    run_dir: Path, loss: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert losses(run_dir, [loss, loss]) == ([False, False], [None, 1])
    assert capsys.readouterr().out == f"{run_dir} is empty: starting fresh\n"


@pytest.mark.parametrize(
    "loss",
    [math.nan, math.inf, -math.inf, 20.1, torch.tensor(math.nan), torch.tensor(21.0, requires_grad=True)],
)
def test_a_loss_that_is_not_goes_back_and_says_so(
    run_dir: Path, loss: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    number = torch.as_tensor(loss).item()
    assert losses(run_dir, [1, 1, loss, 1]) == ([False, False, True, False], [None, 1, 2])

    line = (
        rf"the loss is {number:.4g} at epoch 0, batch 0, step 2: went back in {run_dir} to checkpoint 2 "
        r"(step 2); the batches since are left out (1 of 3 times)"
    )
    assert capsys.readouterr().out.splitlines()[1:] == [line]


def test_without_a_bound_only_what_is_not_finite_is_a_spike(run_dir: Path) -> None:
    assert losses(run_dir, [1e30, math.inf], above=math.inf)[0] == [False, True]


@pytest.mark.parametrize(
    ("loss", "more", "text"),
    [
        ("1", {"above": "x"}, "above is not a number: 'x'"),
        (None, {}, "loss is not a number: None"),
        (torch.ones(2), {}, "loss is not a number"),
        (1.0, {"above": math.nan}, "above=nan is no bound"),
        (1.0, {"limit": -1}, "limit=-1 is not a count"),
    ],
)
def test_what_is_no_loss_or_no_bound_is_a_usage_error(
    run_dir: Path, loss: Any, more: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        losses(run_dir, [loss], **more)


def test_a_second_spike_at_once_goes_to_the_checkpoint_before(run_dir: Path) -> None:
    _, parents = losses(run_dir, [1, 1, 1, math.nan, math.nan, 1, math.nan, 1], limit=9)

    # 3 is bad, so it goes back to 2; 4 is made there, and after it the spike is of the batch alone.
    assert parents == [None, 1, 2, 2, 4]


def test_the_checkpoint_before_is_on_the_same_branch(run_dir: Path) -> None:
    spikes = [math.nan] * 2
    _, parents = losses(run_dir, [1, 1, 1, *spikes, 1, *spikes, 1, 1, *spikes, math.nan, 1], limit=9)

    # 4 continues from 2; it is bad too, so 5 continues from 2 again; 6 and 5 are bad, so 7 does as well.
    assert parents == [None, 1, 2, 2, 2, 5, 2]


def test_a_checkpoint_that_is_damaged_or_gone_is_passed_over(run_dir: Path) -> None:
    losses(run_dir, [1] * 5)
    with RunState.load(run_dir, keep=None) as state:
        shutil.rmtree(state.run.open(5).path)
        (state.run.open(4).path / "ranks" / "00000.json").write_text("{}")
        with pytest.warns(ResumableWarning, match="It is skipped; an older checkpoint is used") as told:
            assert state.spiked(math.nan)
        assert state.step == 3
        state.save()

    assert len(told) == 2
    # The number of the one that is gone does not come again
    assert Run(run_dir).open(6).about.parent == 3


def test_after_the_limit_it_is_an_error_that_says_where(run_dir: Path) -> None:
    problem = (
        r"the loss is nan at epoch 0, batch 0, step 1, and .*exp has gone back 2 times already \(limit=2\)"
    )

    with pytest.raises(Diverged, match=problem):
        losses(run_dir, [1, 1, *[math.nan] * 3], limit=2)
    with pytest.raises(ArithmeticError, match=r"resume=NUMBER"):
        losses(run_dir, [math.nan], limit=0)


@pytest.mark.parametrize("given", [[math.nan], [1.0, math.nan, math.nan]])
def test_where_there_is_nothing_to_go_back_to_it_is_the_same_error(run_dir: Path, given: list[float]) -> None:
    with pytest.raises(Diverged, match=r"has no checkpoint to go back to.\nFix: save before a spike"):
        losses(run_dir, given)


def test_the_count_continues_after_a_resume(run_dir: Path) -> None:
    for _ in range(2):
        losses(run_dir, [1, math.nan, 1], limit=3)

    assert Run(run_dir).numbers() == [1, 2, 3, 4]
    with pytest.raises(Diverged, match="has gone back 2 times already"):
        losses(run_dir, [math.nan], limit=2)


def test_after_enough_saves_all_spikes_are_forgotten(run_dir: Path) -> None:
    answers, _ = losses(run_dir, [1, *[math.nan, 1, 1] * 9], limit=2)

    assert answers.count(True) == 9
    with pytest.raises(Diverged, match="has gone back 2 times"):
        losses(run_dir, [1, math.nan, 1, math.nan, 1, math.nan], limit=2)


class Poisoned(Noisy):
    """The same samples, some of which are not numbers."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) * (math.nan if index in (4, 11) else 1)


def healthy(training: Training, stop: int | None) -> None:
    for _ in training.state.epochs(2):
        for batch in training.batches():
            if training.state.spiked(training.backward(batch), limit=9):
                continue
            training.step()
            if training.state.batch % 2:
                training.state.save()
            stop = None if stop is None else stop - 1
            if stop == 0:
                training.state.close()
                return
    training.state.close()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [2, 4, 5])
@pytest.mark.quick(3)
def test_a_training_with_bad_data_gets_through_and_resumes_bit_for_bit(
    run_dir: Path, workers: int, stop: int
) -> None:
    def poisoned() -> DataLoader[Any]:
        return DataLoader(Poisoned(), 3, shuffle=True, num_workers=workers)

    def train(folder: Path, seed: int, stop: int | None) -> list[Any]:
        training = Training(folder, seed, poisoned)
        if not training.state.resumed:
            # The first batch may be a bad one
            training.state.save()
        healthy(training, stop)
        assert all(value.isfinite().all() for value in training.model.state_dict().values())
        return [training.state.epoch, training.state.step]

    torch.manual_seed(0)
    expected = train(run_dir.with_name("straight"), 5, None)
    train(run_dir, 5, stop)

    assert train(run_dir, 6, None) == expected
    straight, stopped = made_since(run_dir.with_name("straight"), 0), made_since(run_dir, 0)
    assert straight[-1][-1] == stopped[-1][-1]


# patience().


def patient(run_dir: Path, given: list[Any], **more: Any) -> list[bool]:
    answers = []
    with RunState.load(run_dir, **{"minimize": "loss", **more}) as state:
        for value in given:
            state.save(**({} if value is None else {"loss": value}))
            answers.append(state.patience(2))
    return answers


def test_patience_ends_when_that_many_saves_in_a_row_were_no_better(run_dir: Path) -> None:
    answers = patient(run_dir, [3, 3, None, 2, 5, None, math.nan, 2, 1.5, 9])

    assert answers == [False, False, False, False, False, False, True, True, False, False]


def test_patience_continues_after_a_resume(run_dir: Path) -> None:
    assert patient(run_dir, [2, 3], keep=1) == [False, False]
    assert patient(run_dir, [None], keep=1) == [False]
    assert patient(run_dir, [2.5, 1], keep=1) == [True, False]
    assert [one.about.best for one in Run(run_dir).checkpoints()][-1].since == 0  # type: ignore[union-attr]


def test_patience_goes_back_with_the_training(run_dir: Path) -> None:
    with RunState.load(run_dir, minimize="loss", keep=None) as state:
        for loss in (1, 2, 3):
            state.save(loss=loss)
        answers = [state.patience(2)]
        for which in (2, "best"):
            state.restore(which)
            answers += [state.patience(2), state.patience(1)]

    assert answers == [True, False, True, False, False]


def test_before_any_save_gave_the_metric_patience_has_not_ended(run_dir: Path) -> None:
    assert patient(run_dir, [math.nan, None, math.inf]) == [False, False, False]


def test_patience_without_a_metric_or_with_no_count_is_a_usage_error(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="no metric says which save is the best"):
        patient(run_dir, [1], minimize=None)
    with RunState.load(run_dir, maximize="acc") as state:
        for saves, text in ((0, "waits for nothing"), (-1, "is not a count"), (1.5, "is not a count")):
            with pytest.raises(UsageError, match=text):
                state.patience(saves)  # type: ignore[arg-type]


# Several processes.


def together(rank: int, run_dir: Path) -> Any:
    """Go back from a spike twice, to a checkpoint that is damaged for one of them too; then lose patience."""
    model, own = nn.Linear(2, 2), random.Random(rank)
    answers: list[Any] = []
    with RunState.load(
        run_dir, model=model, extra={"own": own}, minimize="loss", ranks=Ranks(timeout=20)
    ) as state:
        for step in state.steps(4):
            state.vars["mine"] = [rank, step]
            state.save(loss=step if rank == 0 else -step).wait()
        file = run_dir / "newest" / "ranks" / "00001.json"
        torch.distributed.barrier()
        if rank == 0:
            file.write_text("{}")
        torch.distributed.barrier()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            answers += [state.spiked(math.nan), state.step, [*state.vars["mine"]], len(told)]
        answers += [state.spiked(math.inf), state.step, [*state.vars["mine"]]]
        answers += [state.patience(1), state.patience(2)]
        state.save(loss=1)
        answers += [state.patience(2), state.best]
        try:
            state.spiked(math.nan, limit=2)
        except Diverged as exc:
            answers.append(exc.problem.replace(str(run_dir), "it"))
        return answers, own.random() == random.Random(rank).random()


@pytest.mark.heavy
def test_all_processes_go_back_and_lose_patience_together(tmp_path: Path) -> None:
    found = gloo.run(2, together, tmp_path / "run", folder=tmp_path)

    text = "the loss is nan at epoch 0, batch 0, step 2, and it has gone back 2 times already (limit=2)."
    for rank, one in enumerate(found):
        assert one.error is None, one.printed
        first = [True, 3, [rank, 2], 1 - rank]
        second = [True, 2, [rank, 1], True, False, True, 0, text]
        assert one.value == ([*first, *second], True)
