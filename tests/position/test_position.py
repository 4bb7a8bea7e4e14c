"""The loops: what they count, where they continue, when they end."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import Forks
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler, TensorDataset

from resumable import Boundary, ResumableWarning, Run, RunState, StateMismatch, UsageError

Counters = tuple[int, int, int, int]


class Training:
    """A small model, its optimizer, and a state of the run; each is new."""

    seen: Counters
    fed: list[float]

    def __init__(self, run_dir: Path, loader: Any = None, **more: Any) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.loader = numbers() if loader is None else loader
        self.state = RunState.load(
            run_dir, model=self.model, optimizer=self.optimizer, loader=self.loader, **more
        )

    def train(self, batch: Any) -> list[float]:
        self.model(torch.ones(1)).backward()
        self.optimizer.step()
        return batch.flatten().tolist()

    def counters(self) -> Counters:
        return self.state.epoch, self.state.batch, self.state.step, self.state.samples

    def epoch(self) -> list[list[float]]:
        """Train what is left of one epoch, and return what was fed."""
        return [self.train(batch) for batch in self.state.batches()]


def numbers(length: int = 10, batch_size: int | None = 4, **more: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(float(length)), batch_size=batch_size, **more)


class Stream(IterableDataset[torch.Tensor]):
    """An iterable dataset of five numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(5.0))


# What is counted.


def test_counters_say_what_is_done_and_in_the_body_what_is_in_hand(run_dir: Path) -> None:
    training = Training(run_dir)
    seen = []

    for _ in training.state.epochs(2):
        for batch in training.state.batches():
            seen.append(training.counters())
            training.train(batch)
        seen.append(training.counters())

    assert seen[:4] == [(0, 0, 0, 0), (0, 1, 1, 4), (0, 2, 2, 8), (0, 3, 3, 10)]
    assert seen[4:] == [(1, 0, 3, 10), (1, 1, 4, 14), (1, 2, 5, 18), (1, 3, 6, 20)]
    assert training.counters() == (2, 0, 6, 20)


def one_batch(run_dir: Path, loader: DataLoader[Any] | None = None) -> Training:
    """Go on, train until one batch is done or two epochs are, save in its body, and stop."""
    training = Training(run_dir, loader)
    for _ in training.state.epochs(2):
        for batch in training.state.batches():
            training.seen = training.counters()
            training.fed = training.train(batch)
            training.state.save()
            training.state.close()
            return training
    return training


def test_counters_of_a_run_resumed_at_every_batch_are_those_of_a_whole_one(
    run_dir: Path,
) -> None:
    seen = [one_batch(run_dir).seen for _ in range(6)]

    assert seen == [(0, 0, 0, 0), (0, 1, 1, 4), (0, 2, 2, 8), (1, 0, 3, 10), (1, 1, 4, 14), (1, 2, 5, 18)]


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (numbers(10, 4), 10),
        (numbers(10, 4, drop_last=True), 8),
        (numbers(10, None), 10),
        (numbers(10, batch_size=1, batch_sampler=[[0, 1, 2], [3]]), 4),
        (numbers(10, batch_size=1, batch_sampler=[[0, 1, 2], [3]], num_workers=1), 4),
        (numbers(10, 4, num_workers=1, collate_fn=lambda numbers: {"x": [torch.stack(numbers)]}), 10),
        (numbers(10, 4, collate_fn=str), 10),
        (DataLoader(Stream(), 2), 5),
        (DataLoader(Stream(), None), 5),
        (DataLoader(Stream(), None, collate_fn=lambda number: number.expand(3)), 5),
        (DataLoader(Stream(), 5, collate_fn=str), 5),
        (DataLoader(Stream(), 5, collate_fn=lambda numbers: []), 5),
        (numbers(3, batch_size=1, batch_sampler=[[0], [1]], num_workers=1, collate_fn=str), 2),
    ],
)
def test_samples_are_counted_whatever_makes_the_batches(
    run_dir: Path, loader: DataLoader[Any], samples: int
) -> None:
    state = RunState.load(run_dir, loader=loader)

    for _ in state.batches():
        pass

    assert state.samples == samples


@pytest.mark.parametrize("steps_in_a_body", [0, 1, 2])
def test_a_step_is_one_of_the_optimizers_whatever_the_number_of_batches(
    run_dir: Path, steps_in_a_body: int
) -> None:
    training = Training(run_dir)

    for batch in training.state.batches():
        for _ in range(steps_in_a_body):
            training.train(batch)

    assert training.state.step == 3 * steps_in_a_body


def test_of_several_optimizers_the_first_one_is_counted(run_dir: Path) -> None:
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    state = RunState.load(
        run_dir, model={"a": models[0], "b": models[1]}, optimizer={"a": first, "b": second}
    )

    first.step(), second.step(), second.step()

    assert state.step == 1


def test_a_state_without_optimizers_counts_no_steps_of_its_own(run_dir: Path) -> None:
    assert RunState.load(run_dir, optimizer={}).step == 0


# epochs() and its total.


def test_the_total_of_epochs_counts_those_done_before(run_dir: Path) -> None:
    done = []
    for total in (1, 3, 4):
        training = Training(run_dir)
        for epoch in training.state.epochs(total):
            done.append(epoch)
            training.epoch()
            training.state.save()
        training.state.close()

    assert done == [0, 1, 2, 3]


@pytest.mark.quick(2)
@pytest.mark.parametrize("loop", ["epochs", "steps"])
def test_a_loop_of_a_finished_run_returns_at_once_and_says_so(
    run_dir: Path, capsys: pytest.CaptureFixture[str], loop: str
) -> None:
    for _ in range(3):
        training = Training(run_dir, {})
        capsys.readouterr()
        for _ in getattr(training.state, loop)(2):
            training.train(torch.ones(1))
            training.state.save()
        training.state.close()

    assert capsys.readouterr().out == f"{run_dir} is complete: 2 of 2 {loop} are done\n"
    assert training.state.step == 2


@pytest.mark.parametrize("total", [-1, 1.5, "3", True])
def test_a_total_that_is_no_count_is_a_usage_error(run_dir: Path, total: Any) -> None:
    state = RunState.load(run_dir)

    for loop in (state.epochs, state.steps):
        with pytest.raises(UsageError, match="is not a count"):
            next(loop(total))


@pytest.mark.parametrize("saves_inside", [True, False])
def test_after_an_early_stop_a_resume_continues_with_the_next_epoch(
    run_dir: Path, saves_inside: bool
) -> None:
    epochs = []
    for _ in range(3):
        training = Training(run_dir)
        for epoch in training.state.epochs(10):
            epochs.append(epoch)
            training.epoch()
            if saves_inside:
                training.state.save()
            break
        if not saves_inside:
            training.state.save()
        training.state.close()

    assert epochs == [0, 1, 2]


# steps().


def test_steps_without_an_optimizer_counts_its_bodies_over_resumes(run_dir: Path) -> None:
    seen = []
    for _ in range(4):
        state = RunState.load(run_dir, every=None)
        for step in state.steps(5):
            seen.append((step, state.step))
            if step % 2:
                state.save()
                break
        state.close()

    assert seen == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (4, 4)]


def test_steps_counts_what_the_optimizer_does_and_stays_exact_over_resumes(run_dir: Path) -> None:
    seen = []
    for _ in range(4):
        training = Training(run_dir, loader={})
        for step in training.state.steps(5):
            training.train(torch.ones(1))
            seen.append((step, training.state.step))
            training.state.save()
            if step in (1, 2):
                break
        training.state.close()

    assert seen == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert Run(run_dir).open(5).about.step == 5


def test_a_step_that_the_scaler_skips_is_still_one_body(run_dir: Path) -> None:
    steps = []
    for _ in range(3):
        training = Training(run_dir, loader={}, scaler=(scaler := torch.amp.GradScaler("cpu")))
        for step in training.state.steps(4):
            steps.append(step)
            factor = float("inf") if step == 1 else 1.0
            scaler.scale(training.model(torch.ones(1)) * factor).sum().backward()
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
            training.state.save()
            if step in (1, 2):
                break
        training.state.close()

    assert steps == [0, 1, 2, 3]
    assert training.state.step == 4


def test_two_optimizer_steps_in_a_body_of_steps_are_one_step(run_dir: Path) -> None:
    training = Training(run_dir, loader={})
    bodies = []

    for step in training.state.steps(5):
        training.train(torch.ones(1)), training.train(torch.ones(1))
        bodies.append((step, training.state.step))

    assert bodies == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert training.state.step == 5


class AnotherAdam(torch.optim.Adam):
    """An optimizer of the user's, which leaves the work to torch's."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_an_optimizer_whose_step_calls_another_makes_one_step(run_dir: Path) -> None:
    model = nn.Linear(2, 1)
    # Torch puts its hooks around the step of a class as the first object of that class is made
    torch.optim.Adam(model.parameters())
    optimizer = AnotherAdam(model.parameters())
    with RunState.load(run_dir, model=model, optimizer=optimizer, loader=torch.ones(6, 2).split(2)) as state:
        for x in state.batches():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        assert state.step == 3


# batches().


def test_the_length_of_batches_is_that_of_the_epoch_however_many_are_done(run_dir: Path) -> None:
    lengths = []
    for _ in range(3):
        state = Training(run_dir, numbers(10, 4, drop_last=True)).state
        lengths.append(len(state.batches()))
        state.close()
        one_batch(run_dir, numbers(10, 4, drop_last=True))

    assert lengths == [2, 2, 2]


def test_the_length_of_batches_stays_the_same_in_the_loop_and_after_it(run_dir: Path) -> None:
    training = Training(run_dir)
    for _ in training.state.epochs(1):
        batches = training.state.batches()
        lengths = [len(batches), *(len(batches) for _ in batches), len(batches)]

    assert lengths == [3] * 5


# enumerate().


def indexed(training: Training, **options: Any) -> list[tuple[int, int]]:
    """Train what is left of one epoch; return the indices, and what `state.batch` was beside each."""
    found = []
    for index, batch in training.state.enumerate(**options):
        found.append((index, training.state.batch))
        training.train(batch)
    return found


def test_enumerate_continues_with_the_index_in_the_epoch_after_each_resume(run_dir: Path) -> None:
    seen = []
    for _ in range(4):
        training = Training(run_dir, numbers(10))
        for _ in training.state.epochs(2):
            for index, batch in training.state.enumerate():
                seen.append((training.state.epoch, index))
                training.train(batch)
                training.state.save()
                training.state.close()
                break
            if training.state._session._is_closed:
                break

    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0)]


def test_enumerate_counts_from_start_and_knows_the_length(run_dir: Path) -> None:
    training = Training(run_dir)

    assert indexed(training, start=1) == [(1, 0), (2, 1), (3, 2)]
    assert len(training.state.enumerate()) == 3


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"through": lambda batches: [*batches]}])
def test_enumerate_takes_what_batches_takes(run_dir: Path, options: dict[str, Any]) -> None:
    one_batch(run_dir)
    one_batch(run_dir)

    assert indexed(Training(run_dir), **options) == [(2, 2)]


def test_batches_of_a_stream_have_no_length(run_dir: Path) -> None:
    with pytest.raises(TypeError, match="has no len"):
        len(RunState.load(run_dir, loader=DataLoader(Stream())).batches())


def test_batches_twice_in_one_epoch_is_a_usage_error(run_dir: Path) -> None:
    training = Training(run_dir)

    for _ in training.state.epochs(1):
        training.epoch()
        with pytest.raises(UsageError, match="looped over already"):
            training.epoch()


def test_without_epochs_the_next_loop_is_the_next_epoch(run_dir: Path) -> None:
    seen = []
    for _ in range(3):
        training = Training(run_dir)
        for _ in range(2):
            training.epoch()
            training.state.save()
            seen.append((training.state.epoch, training.state.samples))
        training.state.close()

    assert seen == [(1, 10), (2, 20), (3, 30), (4, 40), (5, 50), (6, 60)]
    assert [found.about.epoch for found in Run(run_dir).checkpoints()] == [4, 5, 6]


def test_without_epochs_a_save_in_the_second_loader_repeats_nothing(run_dir: Path) -> None:
    fed = []
    for _ in range(3):
        training = Training(run_dir, {"train": numbers(4, 2), "val": numbers(3, 1)})
        fed += [training.train(batch) for batch in training.state.batches("train")]
        for batch in training.state.batches("val"):
            fed.append(batch.tolist())
            training.state.save()
            break
        training.state.close()

    assert fed == [[0, 1], [2, 3], [0], [1], [2]]


@pytest.mark.parametrize(("which", "what"), [(None, "needs one loader"), ("other", "is no loader 'other'")])
def test_batches_without_the_name_of_one_loader_is_a_usage_error(
    run_dir: Path, which: Any, what: str
) -> None:
    with pytest.raises(UsageError, match="was given none"):
        RunState.load(run_dir).batches()
    state = RunState.load(run_dir, loader={"train": numbers(), "val": numbers()})
    with pytest.raises(UsageError, match="this DataLoader was not given to RunState, which was given: train"):
        state.batches(numbers())

    with pytest.raises(UsageError, match=f"{what}; RunState was given: train, val"):
        state.batches(which)


def test_a_loader_is_found_by_its_name_and_by_itself(run_dir: Path) -> None:
    loaders = {"train": numbers(10), "val": numbers(3)}
    state = RunState.load(run_dir, loader=loaders)

    assert len(state.batches("val")) == len(state.batches(loaders["val"])) == 1
    assert len(RunState.load(run_dir, loader=loaders["train"]).batches()) == 3


@pytest.mark.parametrize("loader", [3, nn.Linear(1, 1)])
def test_what_cannot_be_looped_over_is_a_usage_error(run_dir: Path, loader: Any) -> None:
    with pytest.raises(UsageError, match=r"loader is .*, which cannot be looped over"):
        RunState.load(run_dir, loader=loader)


# Leaving a loop.


def test_after_a_break_the_epoch_is_done(run_dir: Path) -> None:
    fed = []
    for _ in range(3):
        training = Training(run_dir)
        for _ in training.state.epochs(9):
            for batch in training.state.batches():
                fed.append(training.train(batch))
                if training.state.batch == 1:
                    break
            training.state.save()
            break
        training.state.close()

    assert fed == [[0, 1, 2, 3], [4, 5, 6, 7]] * 3
    assert [found.about.epoch for found in Run(run_dir).checkpoints()] == [1, 2, 3]


def test_a_batch_that_was_not_trained_before_the_break_is_not_counted(run_dir: Path) -> None:
    training = Training(run_dir)

    for batch in training.state.batches():
        if training.state.batch == 2:
            break
        training.train(batch)

    assert training.counters() == (1, 2, 2, 8)


def interrupted(training: Training, fed: list[list[float]], at: int, *, is_trained: bool = True) -> None:
    for _ in training.state.epochs(2):
        for batch in training.state.batches():
            if training.state.batch == at and not is_trained:
                raise KeyboardInterrupt
            fed.append(training.train(batch))
            if training.state.batch == at:
                raise KeyboardInterrupt


@pytest.mark.parametrize("is_handled", [True, False])
def test_a_save_after_an_interrupt_continues_with_the_next_batch(run_dir: Path, is_handled: bool) -> None:
    fed: list[list[float]] = []
    for at in range(2):
        training = Training(run_dir)
        try:
            interrupted(training, fed, at)
        except KeyboardInterrupt:
            if not is_handled:
                with pytest.warns(ResumableWarning, match="that is not a boundary.*R10"):
                    training.state.save()
        if is_handled:
            training.state.save()
        training.state.close()
    fed += Training(run_dir).epoch()

    assert fed == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_after_an_interrupt_the_same_object_continues_the_epoch(run_dir: Path) -> None:
    training = Training(run_dir)
    fed: list[list[float]] = []

    for at in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            interrupted(training, fed, at)
    for _ in training.state.epochs(1):
        fed += training.epoch()

    assert fed == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert training.counters() == (1, 0, 3, 10)


def test_an_interrupt_before_the_step_leaves_the_batch_to_be_trained(run_dir: Path) -> None:
    fed: list[list[float]] = []
    for at in (1, 2):
        training = Training(run_dir)
        with pytest.raises(KeyboardInterrupt):
            interrupted(training, fed, at, is_trained=False)
        training.state.save()
        training.state.close()
    fed += Training(run_dir).epoch()

    assert fed == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [c.about.samples for c in Run(run_dir).checkpoints()] == [4, 8]


def test_an_iterator_kept_through_an_interrupt_disturbs_nothing(
    run_dir: Path,
) -> None:
    training = Training(run_dir)
    for _ in training.state.epochs(1):
        kept = iter(training.state.batches())
        training.train(next(kept))
        break

    fed = []
    for _ in training.state.epochs(1):
        for batch in training.state.batches():
            fed.append(training.train(batch))
            assert next(kept, None) is None

    assert fed == [[4, 5, 6, 7], [8, 9]]
    assert training.counters() == (1, 0, 3, 10)


@pytest.mark.filterwarnings("ignore:next.. took")
def test_an_iterator_of_an_epoch_that_is_over_is_refused(run_dir: Path) -> None:
    training = Training(run_dir)
    kept = []

    for _ in training.state.epochs(2):
        kept.append(iter(training.state.batches()))
        training.train(next(kept[-1]))
    later = iter(training.state.batches())
    training.train(next(later))
    kept[0].close()

    for iterator in kept:
        with pytest.raises(UsageError, match="in a later epoch"):
            next(iterator)
    assert training.counters() == (2, 0, 3, 8)
    assert len(list(later)) == 2


# restore() inside the loops.


def restoring(run_dir: Path, how: str) -> tuple[list[Counters], Training]:
    """Go back to epoch 1 once, from the middle of epoch 2, and return what was seen in the bodies."""
    training = Training(run_dir, minimize="loss", keep=None)
    seen = []
    for epoch in training.state.epochs(4):
        for batch in training.state.batches():
            seen.append(training.counters())
            training.train(batch)
            if epoch == 2 and len(seen) == 8:
                training.state.restore("best")
                if how == "break":
                    break
        training.state.save(loss=epoch if len(seen) != 8 else 9)
    return seen, training


@pytest.mark.parametrize("how", ["go on", "break"])
def test_a_restore_inside_the_loops_continues_from_there(run_dir: Path, how: str) -> None:
    seen, training = restoring(run_dir, how)

    assert seen[6:8] == [(2, 0, 6, 20), (2, 1, 7, 24)]
    assert seen[8:10] == [(1, 0, 3, 10), (1, 1, 4, 14)]
    assert len(seen) == 8 + 9
    assert training.counters() == (4, 0, 12, 40)


def test_a_run_that_went_back_resumes_on_its_new_branch(run_dir: Path) -> None:
    _, training = restoring(run_dir, "go on")
    training.state.close()

    for _ in range(2):
        state = Training(run_dir, minimize="loss", keep=None).state
        state.close()

    assert (state.epoch, state.step) == (4, 12)
    assert [c.about.parent for c in Run(run_dir).checkpoints()] == [None, 1, 1, 3, 4, 5]


def test_a_restore_inside_steps_continues_from_the_restored_step(run_dir: Path) -> None:
    training = Training(run_dir, loader={})
    seen = []

    for step in training.state.steps(4):
        seen.append(step)
        training.train(torch.ones(1))
        if len(seen) in (3, 5):
            training.state.restore(1)
        elif step == 0:
            training.state.save()

    assert seen == [0, 1, 2, 1, 2, 1, 2, 3]


def test_a_restore_of_the_model_alone_leaves_the_loops_where_they_are(run_dir: Path) -> None:
    training = Training(run_dir)
    seen = []

    for batch in training.state.batches():
        seen.append(training.counters())
        training.train(batch)
        training.state.save()
        training.state.restore("newest", only="model")

    assert seen == [(0, 0, 0, 0), (0, 1, 1, 4), (0, 2, 2, 8)]


# Where a checkpoint stands.


@pytest.mark.filterwarnings("ignore:the loop over batches was left right after save")
def test_a_checkpoint_says_at_which_boundary_it_was_taken(run_dir: Path) -> None:
    training = Training(run_dir, keep=None)
    state = training.state

    state.save()
    for _ in state.epochs(1):
        state.save()
        for batch in state.batches():
            training.train(batch)
            state.save()
            break
        state.save()
    for _ in state.steps(2):
        state.save()
    state.close()

    found = [checkpoint.about.boundary for checkpoint in Run(run_dir).checkpoints()]
    assert found == [Boundary.OUTSIDE, Boundary.BATCH, Boundary.BATCH, Boundary.EPOCH, Boundary.STEP]


def test_a_save_in_an_epoch_over_another_loader_says_that_it_is_done(run_dir: Path) -> None:
    epochs = []
    for _ in range(3):
        training = Training(run_dir, loader={})
        for epoch in training.state.epochs(9):
            epochs.append(epoch)
            training.train(torch.ones(1))
            training.state.save()
            break
        training.state.close()

    assert epochs == [0, 1, 2]


# Other data than before.


def save_in_epoch(run_dir: Path, loader: DataLoader[Any], batches: int) -> None:
    training = Training(run_dir, loader)
    for batch in training.state.batches():
        training.train(batch)
        if training.state.batch == batches - 1:
            training.state.save()
            break
    training.state.close()


CHANGED = [
    (numbers(10, 5), "loader.batch_size: 4 in the checkpoint, 5 in the code"),
    (numbers(11, 4), "loader.dataset_length: 10 in the checkpoint, 11 in the code"),
    (
        numbers(10, 4, shuffle=True),
        "loader.sampler: SequentialSampler in the checkpoint, RandomSampler in",
    ),
    (numbers(10, 4, drop_last=True), "loader.drop_last: False in the checkpoint, True in the code"),
]


@pytest.mark.parametrize(("loader", "text"), CHANGED)
@pytest.mark.quick(2)
def test_other_data_in_mid_epoch_does_not_fit(run_dir: Path, loader: DataLoader[Any], text: str) -> None:
    save_in_epoch(run_dir, numbers(), 1)
    save_in_epoch(run_dir, numbers(), 2)

    with pytest.raises(StateMismatch, match=text):
        Training(run_dir, loader)
    assert Training(run_dir).epoch() == [[8, 9]]


def test_other_data_in_mid_epoch_can_be_allowed_and_begins_the_epoch_again(run_dir: Path) -> None:
    save_in_epoch(run_dir, numbers(), 1)
    save_in_epoch(run_dir, numbers(), 2)

    for _ in range(2):
        with pytest.warns(ResumableWarning, match=r"batch_size +4 +-> 5  the code's is used"):
            training = Training(run_dir, numbers(10, 5), allow=["loader"], every=None)
        assert training.epoch() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
        training.state.close()


@pytest.mark.quick(4)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [2, 5])
def test_after_batches_of_another_size_the_next_epoch_has_its_order(
    run_dir: Path, workers: int, stop: int
) -> None:
    def shuffled(size: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return numbers(22, size, shuffle=True, generator=generator, num_workers=workers)

    plain = shuffled(4)
    expected = [[value for batch in plain for value in batch.tolist()] for _ in range(2)]
    seen: list[list[float]] = [[], []]
    for size, batches in ((4, stop), (3, 1), (3, 99)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResumableWarning)
            training = Training(run_dir, shuffled(size), allow=["loader.batch_size"])
        for epoch in training.state.epochs(2):
            for batch in training.state.batches():
                seen[epoch] += training.train(batch)
                batches -= 1
                if not batches:
                    break
            if not batches:
                break
        training.state.save(), training.state.close()

    assert seen == expected


def test_other_data_at_the_epochs_end_is_a_warning_once(run_dir: Path) -> None:
    save_in_epoch(run_dir, numbers(), 3)
    training = Training(run_dir)
    training.epoch(), training.state.save(), training.state.close()

    with pytest.warns(ResumableWarning, match=r"will .*loader\.batch_size +4 +-> 5  the code's is used"):
        changed = Training(run_dir, numbers(10, 5))
    changed.epoch(), changed.state.save(), changed.state.close()
    quiet = Training(run_dir, numbers(10, 5))

    assert quiet.epoch() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_generator_that_only_the_code_has_does_not_fit_unless_allowed(run_dir: Path) -> None:
    save_in_epoch(run_dir, numbers(10, 4, shuffle=True), 1)
    save_in_epoch(run_dir, numbers(10, 4, shuffle=True), 2)
    loader = numbers(10, 4, shuffle=True, generator=torch.Generator())

    with pytest.raises(StateMismatch, match=r"loader\.\S*generator: a random generator in the checkpoint or"):
        Training(run_dir, loader)
    assert Training(run_dir, loader, allow=["loader.*"]).state.batch == 2


@pytest.mark.parametrize(
    ("indices", "text"),
    [([1, 2, 3], "it has 1 batches now, and 2 were drawn"), (range(8), "batch 2 is of other samples now")],
)
def test_an_order_that_cannot_be_drawn_again_is_named(run_dir: Path, indices: Any, text: str) -> None:
    save_in_epoch(run_dir, numbers(sampler=SubsetRandomSampler(range(2, 10))), 1)
    save_in_epoch(run_dir, numbers(sampler=SubsetRandomSampler(range(2, 10))), 2)

    training = Training(run_dir, numbers(sampler=SubsetRandomSampler(indices)))
    with pytest.raises(StateMismatch, match=text):
        training.epoch()


def small(loader: Any = None) -> dict[str, Any]:
    model = torch.nn.Linear(1, 1)
    data = DataLoader(TensorDataset(torch.arange(6.0).reshape(6, 1)), batch_size=2, shuffle=True)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": loader or data,
    }


def step(parts: dict[str, Any], batch: torch.Tensor) -> None:
    parts["optimizer"].zero_grad()
    parts["model"](batch).sum().backward()
    parts["optimizer"].step()


def train_on(parts: dict[str, Any]) -> None:
    for (batch,) in parts["loader"]:
        step(parts, batch)


def test_a_loader_trained_from_directly_is_refused_at_its_second_batch(run_dir: Path) -> None:
    parts = small()
    with RunState.load(run_dir, **parts, every=None) as state:
        for _ in state.epochs(1):
            with pytest.raises(UsageError, match=r"not in a loop over state\.batches\(\)"):
                train_on(parts)
            assert state.step == 1
            with pytest.raises(UsageError, match=r"not in a loop over state\.batches\(\)"):
                state.save()

    assert not Run(run_dir).numbers()


@pytest.mark.parametrize("given", [(), ("loader",)])
def test_steps_inside_an_epoch_do_not_end_the_epochs_body(run_dir: Path, given: tuple[str, ...]) -> None:
    parts = small()
    for name in {"loader"} - {*given}:
        del parts[name]
    for resumed in (0, 1, 2):
        with RunState.load(run_dir, **parts) as state:
            assert state.epoch == resumed
            for epoch in state.epochs(resumed + 1):
                for _ in state.steps(3 * (epoch + 1)):
                    step(parts, torch.ones(1))
                state.save()

    assert [c.about.boundary.value for c in Run(run_dir).checkpoints()] == ["epoch"] * 3


def drawn(state: RunState, parts: dict[str, Any], leave_after: int) -> list[float]:
    """Train on one epoch's batches, drawing at its top and after each; leave both loops after some."""
    numbers = []
    for _ in state.epochs(1):
        torch.rand(2)
        for (batch,) in state.batches():
            step(parts, batch)
            numbers.append(torch.rand(1).item())
            if len(numbers) == leave_after:
                break
        if len(numbers) == leave_after:
            break
    return numbers


def test_a_loop_entered_again_after_a_resume_continues_with_its_numbers(run_dir: Path) -> None:
    torch.manual_seed(0)
    parts = small()
    expected = drawn(RunState.load(run_dir / "straight", **parts), parts, leave_after=9)

    torch.manual_seed(0)
    parts = small()
    with RunState.load(run_dir / "left", **parts) as state:
        seen = drawn(state, parts, leave_after=1)
        state.save()
    torch.manual_seed(7)
    parts = small()
    with RunState.load(run_dir / "left", **parts) as state:
        seen += drawn(state, parts, leave_after=1)
        torch.rand(5)
        seen += drawn(state, parts, leave_after=9)

    assert seen == expected


@pytest.mark.parametrize("loop", [lambda s: s.epochs(1), lambda s: s.steps(1), lambda s: s.batches()])
def test_a_closed_state_does_not_loop(run_dir: Path, loop: Any) -> None:
    state = RunState.load(run_dir, **small())
    state.close()

    with pytest.raises(UsageError, match="has been closed"):
        list(loop(state))


def test_epochs_left_after_the_batches_continue_with_the_next_epoch(run_dir: Path) -> None:
    parts = small()
    with RunState.load(run_dir, **parts) as state:
        for _ in range(2):
            for _ in state.epochs(3):
                for (batch,) in state.batches():
                    step(parts, batch)
                break
        seen = [(epoch, len([step(parts, b) for (b,) in state.batches()])) for epoch in state.epochs(3)]

    assert seen == [(2, 3)]


# What counts the batches by itself.


@pytest.mark.parametrize(
    ("cut", "text"),
    [
        (lambda batches: islice(batches, 2), r"cut by islice\(\), which counts from 0 again"),
        (lambda batches: zip(batches, range(2), strict=False), r"cut by zip\(\), which counts from 0 again"),
        (cycle, r"repeated by itertools\.cycle\(\)"),
    ],
)
def test_a_loop_that_is_cut_by_a_counter_of_pythons_is_reported(run_dir: Path, cut: Any, text: str) -> None:
    training = Training(run_dir)

    with pytest.warns(ResumableWarning, match=f"{text}.*R07"):
        next(cut(training.state.batches()))


def one_ahead(batches: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    waiting = next(batches)
    for batch in batches:
        yield waiting, False
        waiting = batch
    yield waiting, True


def test_a_generator_one_batch_ahead_is_reported_at_the_second_batch(run_dir: Path) -> None:
    training = Training(run_dir)
    ahead = one_ahead(iter(training.state.batches()))

    with pytest.warns(
        ResumableWarning, match=r"one_ahead\(\) has asked for two batches.*through=one_ahead.*R06"
    ):
        next(ahead)


def test_a_list_of_all_batches_is_reported_at_the_first_step(run_dir: Path) -> None:
    training = Training(run_dir)
    batches = list(training.state.batches())

    with pytest.warns(ResumableWarning, match="all batches of the epoch were asked for before the first"):
        training.train(batches[0])
    training.train(batches[1])


def test_a_break_after_a_save_in_a_body_is_told_at_the_epochs_end(run_dir: Path) -> None:
    training = Training(run_dir)
    epochs = training.state.epochs(2)

    next(epochs)
    for batch in training.state.batches():
        training.train(batch)
        training.state.save()
        break
    with pytest.warns(ResumableWarning, match=r"left right after save.*\[R02, docs/guide/inexact\.md#r02\]"):
        next(epochs)


@pytest.mark.parametrize("loop", ["epochs", "steps"])
def test_a_break_right_after_a_save_is_warned_of_as_the_run_is_closed(run_dir: Path, loop: str) -> None:
    training = Training(run_dir, {})
    for number in getattr(training.state, loop)(5):
        training.train(torch.ones(2))
        training.state.save()
        if number == 2:
            break

    with pytest.warns(ResumableWarning, match=rf"trains on, with {loop[:-1]} 3\. .* top of the body"):
        training.state.close()


@pytest.mark.parametrize("end", ["the last body", "an exception", "caught at once", "at the top"])
def test_nothing_is_warned_of_where_a_saved_loop_ends_otherwise(run_dir: Path, end: str) -> None:
    training = Training(run_dir, {})
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "this script keeps gradients")
    inside = contextlib.suppress(KeyError) if end == "caught at once" else contextlib.nullcontext()
    with contextlib.suppress(KeyError), training.state, inside:
        for epoch in training.state.epochs(3):
            if end == "at the top" and epoch == 1:
                break
            training.train(torch.ones(2))
            training.state.save()
            if end in ("an exception", "caught at once"):
                raise KeyError
            if end == "the last body" and epoch == 2:
                break


def test_draws_before_the_first_next_by_hand_are_reported(run_dir: Path) -> None:
    training = Training(run_dir)
    batches = iter(training.state.batches())
    torch.rand(1)

    with pytest.warns(ResumableWarning, match=r"drawn before next\(\) is called"):
        next(batches)


def test_a_save_in_an_inner_loop_over_batches_is_reported(run_dir: Path) -> None:
    training = Training(run_dir, {"a": numbers(4, 2), "b": numbers(4, 2)})

    for pair in zip(training.state.batches("a"), training.state.batches("b"), strict=False):
        training.train(pair[0])
        training.state.save()
    for batch in training.state.batches("a"):
        training.train(batch)
        for inner in training.state.batches("b"):
            training.train(inner)
            with pytest.warns(ResumableWarning, match="what is left of the inner loop.*R01"):
                training.state.save()
            break
        break


class GoesBack(Dataset[int]):
    """A dataset that restores the run as one of its samples is loaded, once."""

    state: Any = None

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        if index == 5 and (state := self.state):
            self.state = None
            state.restore("newest")
        return index


def go_back_in_a_sample(run_dir: Path, seen: list[int]) -> None:
    data = GoesBack()
    with RunState.load(run_dir, loader=DataLoader(data, 1), every=None, quiet=True) as state:
        for _ in state.epochs(2):
            for batch in state.batches():
                seen.append(int(batch))
                if seen == [0, 1]:
                    state.save().wait()
                    data.state = state


def test_a_batch_whose_loading_moves_the_training_is_not_handed_out(run_dir: Path) -> None:
    seen: list[int] = []

    with pytest.raises(UsageError, match="looped over already"):
        go_back_in_a_sample(run_dir, seen)
    assert seen == [0, 1, 2, 3, 4]


LEFT_OPEN = """
import sys, torch
from torch.utils.data import DataLoader
from resumable import RunState
model = torch.nn.Linear(1, 1)
with RunState.load(sys.argv[1], model=model, loader=DataLoader(torch.zeros(9, 1))) as state:
    batches = iter(state.batches())
    for _ in state.steps(2):
        next(batches)
"""


def test_an_iterator_that_is_there_at_the_scripts_end_says_nothing(run_dir: Path, forks: Forks) -> None:
    done = forks.run(["-c", LEFT_OPEN, run_dir], Path.cwd()).checked()

    assert "Exception ignored" not in done.err
