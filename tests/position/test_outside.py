"""DataLoaders that the script iterates over by itself, beside the loops over `state.batches()`."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from resumable import ResumableWarning, RunState, UsageError
from resumable.loaders.workers import torch_iterators

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


@pytest.fixture(autouse=True)
def _no_other_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test has left open knows of no loader here."""
    if torch_iterators._torchs:
        monkeypatch.setattr(DataLoader, "_get_iterator", torch_iterators._torchs[0])
    monkeypatch.setattr(torch_iterators, "_torchs", [])
    monkeypatch.setattr(torch_iterators, "_owners", [])


EPOCHS = 3
Seen = list[Any]


class Noisy(Dataset[torch.Tensor]):
    """Samples that each draw from two generators of their worker."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2) + random.random()


class NoisyStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(2) for _ in range(4))


def persistent(dataset: Any = None, **more: Any) -> DataLoader[Any]:
    how: dict[str, Any] = {"batch_size": 2, "num_workers": 1, "persistent_workers": True, **more}
    return DataLoader(dataset or Noisy(), **how)


class Stopped(Exception):
    """The training is killed here."""


class Training:
    """One start of a script that trains, and validates with loaders of its own."""

    def __init__(self, run_dir: Path, *validate: DataLoader[Any], **given: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        data = TensorDataset(torch.randn(12, 2))
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(data, batch_size=4, shuffle=True)
        self.validate = validate
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader, **given}
        self.state = RunState.load(run_dir, **parts)

    def step(self, batch: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(batch).square().sum().backward()
        self.optimizer.step()

    def look(self) -> Seen:
        return [batch.tolist() for loader in self.validate for batch in loader]

    def told(self) -> Any:
        return self.model[0].weight.tolist(), torch.get_rng_state().sum().item()


Script = Callable[[Training, Seen], None]


def every_epoch(training: Training, seen: Seen) -> None:
    for epoch in training.state.epochs(EPOCHS):
        for (batch,) in training.state.batches():
            training.step(batch)
        seen.append((epoch, training.look(), training.told()))
        training.state.save().wait()
        stop_at(training, epoch)


def every_second_batch(training: Training, seen: Seen) -> None:
    for epoch in training.state.epochs(EPOCHS):
        for (batch,) in training.state.batches():
            training.step(batch)
            looked = training.look() if training.state.batch % 2 else []
            seen.append((epoch, training.state.batch, looked, training.told()))
            training.state.save().wait()
            stop_at(training, (epoch, training.state.batch))


def left_early(training: Training, seen: Seen) -> None:
    for epoch in training.state.epochs(EPOCHS):
        for (batch,) in training.state.batches():
            training.step(batch)
        for batch in training.validate[0]:
            seen.append((epoch, batch.tolist(), training.told()))
            break
        training.state.save().wait()
        stop_at(training, epoch)


def sanity_first(training: Training, seen: Seen) -> None:
    training.look()
    every_epoch(training, seen)


def made_late(training: Training, seen: Seen) -> None:
    for epoch in training.state.epochs(EPOCHS):
        for (batch,) in training.state.batches():
            training.step(batch)
        training.validate = training.validate or (persistent(),)
        seen.append((epoch, training.look(), training.told()))
        training.state.save().wait()
        stop_at(training, epoch)


def stop_at(training: Training, place: Any) -> None:
    if STOPS and STOPS[0] == place:
        STOPS.pop(0)
        raise Stopped


STOPS: list[Any] = []


def chain(run_dir: Path, script: Script, make: Callable[[], list[DataLoader[Any]]], *stops: Any) -> Seen:
    """Start the script again each time it was stopped, in what might be a process of its own."""
    seen: Seen = []
    STOPS[:] = stops
    for number in range(len(stops) + 1):
        training = Training(run_dir, *make())
        with training.state as state:
            assert state.resumed == bool(number)
            try:
                script(training, seen)
            except Stopped:
                continue
    return seen


@pytest.mark.parametrize("dataset", [Noisy, NoisyStream])
@pytest.mark.parametrize(
    ("script", "stops"),
    [
        (every_epoch, (0, 1)),
        (every_epoch, (1, 2)),
        (every_second_batch, ((0, 0), (0, 1))),
        (every_second_batch, ((0, 2), (1, 1))),
        (left_early, (0, 1)),
        (sanity_first, (0, 1)),
    ],
)
@pytest.mark.quick(12)
def test_validation_with_persistent_workers_is_exact_after_two_resumes(
    tmp_path: Path, script: Script, stops: Any, dataset: Any
) -> None:
    def make() -> list[DataLoader[Any]]:
        return [persistent(dataset())]

    straight = chain(tmp_path / "straight", script, make)

    assert chain(tmp_path / "stopped", script, make, *stops) == straight


def test_validation_with_persistent_workers_is_that_of_the_plain_script(tmp_path: Path) -> None:
    seen = chain(tmp_path / "run", every_epoch, lambda: [persistent()])

    training = Training(tmp_path / "other", persistent())
    training.state.close()
    plain: Seen = []
    for epoch in range(EPOCHS):
        for (batch,) in training.loader:
            training.step(batch)
        plain.append((epoch, training.look(), training.told()))
    assert seen == plain


@pytest.mark.heavy
def test_two_persistent_loaders_and_one_with_new_workers_are_exact(tmp_path: Path) -> None:
    def make() -> list[DataLoader[Any]]:
        return [
            persistent(),
            persistent(NoisyStream()),
            persistent(batch_size=3, persistent_workers=False),
            persistent(shuffle=True),
        ]

    straight = chain(tmp_path / "straight", every_epoch, make)

    assert chain(tmp_path / "stopped", every_epoch, make, 0, 1) == straight


@pytest.mark.heavy
def test_a_persistent_loader_made_in_the_loops_is_exact_after_two_resumes(tmp_path: Path) -> None:
    straight = chain(tmp_path / "straight", made_late, list)

    assert chain(tmp_path / "stopped", made_late, list, 0, 1) == straight


def test_another_number_of_workers_leaves_the_training_exact(tmp_path: Path) -> None:
    workers = iter((2, 1, 2))
    straight = chain(tmp_path / "straight", every_epoch, lambda: [persistent()])

    stopped = chain(tmp_path / "stopped", every_epoch, lambda: [persistent(num_workers=next(workers))], 0, 1)

    assert [told for *_, told in stopped] == [told for *_, told in straight]


def test_a_restore_takes_the_validation_back_too(run_dir: Path) -> None:
    training = Training(run_dir, persistent(), keep=None)
    seen: Seen = []
    with training.state as state:
        for epoch in state.epochs(EPOCHS):
            for (batch,) in state.batches():
                training.step(batch)
            seen.append((epoch, training.look(), training.told()))
            state.save()
            if len(seen) in (2, 4):
                state.restore(1)
    assert [epoch for epoch, *_ in seen] == [0, 1, 1, 2, 1, 2][: len(seen)]
    assert seen[1] == seen[2] == seen[4]
    assert seen[3] == seen[5]


def test_a_persistent_loader_that_began_before_the_load_is_warned_of(run_dir: Path) -> None:
    loader = persistent()
    list(loader)

    with pytest.warns(ResumableWarning, match=r"was iterated before RunState\.load.*R21"):
        training = Training(run_dir, loader)

    training.state.close()


def test_loaders_that_look_alike_are_warned_of_if_only_one_had_begun(run_dir: Path) -> None:
    training = Training(run_dir, *(loaders := [persistent(), persistent()]))
    with training.state as state:
        list(loaders[0])
        state.save()

    training = Training(run_dir, *(loaders := [persistent(), persistent()]))
    with training.state, pytest.warns(ResumableWarning, match="2 DataLoaders over Noisy .* look alike"):
        list(loaders[1])


def test_torch_makes_its_iterators_itself_after_close(run_dir: Path) -> None:
    torchs, loader = DataLoader._get_iterator, persistent()
    before = {**vars(loader)}
    training = Training(run_dir, loader)
    assert DataLoader._get_iterator is not torchs
    list(training.loader)

    training.state.close()

    assert DataLoader._get_iterator is torchs
    assert vars(loader) == before


def test_workers_end_when_the_script_drops_its_loader(run_dir: Path) -> None:
    training = Training(run_dir, persistent())
    with training.state:
        training.look()
        iterator: Any = training.validate[0]._iterator
        (worker,) = iterator._workers
        del iterator

        training.validate = ()

        worker.join(10)
        assert not worker.is_alive()


def test_copies_of_a_loader_are_loaders_of_their_own(run_dir: Path) -> None:
    training = Training(run_dir, persistent())
    with training.state:
        for loader in (training.loader, training.validate[0]):
            copies = [copy.copy(loader), pickle.loads(pickle.dumps(loader))]
            copies[0].collate_fn = lambda samples: "other"
            assert list(copies[0])[:1] == ["other"]
            assert len(list(copies[1])) == 3


# Loaders that were given, and are iterated directly.


def two(run_dir: Path) -> tuple[Training, DataLoader[Any]]:
    other = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    main = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=4, shuffle=True)
    return Training(run_dir, loader={"main": main, "other": other}), other


@pytest.mark.heavy
def test_a_given_loader_cycled_beside_another_is_refused_by_name(run_dir: Path) -> None:
    training, other = two(run_dir)
    with training.state as state:
        for _ in state.epochs(1):
            by_hand = iter(other)
            for (batch,) in state.batches("main"):
                with pytest.raises(UsageError, match=r"loader\.other was given(?s:.*)batches\('other'\)"):
                    next(by_hand)
                training.step(batch)


def test_a_given_loader_asked_by_hand_in_steps_is_refused_by_name(run_dir: Path) -> None:
    training, other = two(run_dir)
    by_hand = iter(other)
    with training.state as state:
        for _ in state.steps(1):
            with pytest.raises(UsageError, match=r"loader\.other was given"):
                next(by_hand)
            training.step(torch.ones(1, 2))


def evaluated(training: Training, seen: Seen) -> None:
    next(iter(training.loader))
    for epoch in training.state.epochs(EPOCHS):
        next(iter(training.loader))
        for (batch,) in training.state.batches():
            training.step(batch)
            (sample,) = next(iter(training.loader))
            seen.append((epoch, training.state.batch, sample.tolist(), training.told()))
            training.state.save().wait()
            stop_at(training, (epoch, training.state.batch))
        seen.append([batch.tolist() for (batch,) in training.loader])


def test_a_given_loader_may_be_inspected_and_evaluated_exactly(tmp_path: Path) -> None:
    straight = chain(tmp_path / "straight", evaluated, list)

    assert chain(tmp_path / "stopped", evaluated, list, (0, 1), (1, 2)) == straight


# Loaders that were not given, and are trained from.


@pytest.mark.parametrize("workers", [0, 1])
def test_a_save_in_a_pass_over_a_loader_that_was_not_given_is_reported(run_dir: Path, workers: int) -> None:
    other = DataLoader(Noisy(), 2, num_workers=workers)
    training = Training(run_dir, loader=None)
    with training.state as state:
        batches = iter(other)
        for _ in state.steps(2):
            training.step(next(batches))
            if state.step == 2:
                with pytest.warns(ResumableWarning, match="over Noisy was not given to RunState.*R20"):
                    state.save()


@pytest.mark.filterwarnings("ignore:random changed after save")
def test_a_save_in_a_validation_and_one_behind_a_pass_are_not_reported(run_dir: Path) -> None:
    other = DataLoader(Noisy(), 2)
    training = Training(run_dir, loader=None)
    with training.state as state:
        for _ in state.epochs(2):
            for x in other:
                training.step(x)
            for _ in other:
                state.save()
