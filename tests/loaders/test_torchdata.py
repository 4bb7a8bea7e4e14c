"""What a StatefulDataLoader itself is asked or told, and checkpoints that have its own state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader, sampler

from resumable import ResumableWarning, RunState, StateMismatch, UsageError
from resumable.loaders.workers.torch_iterators import iterates_as_torchdata_does
from resumable.loaders.workers.torchdata import (
    ATTRIBUTES,
    counts_its_samples,
    is_distributed,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

DATA: Any = range(12)


class OwnState:
    """Stands for a loader as earlier versions saved it, by its own state; its class is set by the test."""

    at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 3:
            self.at += 1
            yield torch.tensor([self.at])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def saved_by_its_own_state(run_dir: Path, *, in_mid_epoch: bool) -> None:
    earlier = type("StatefulDataLoader", (OwnState,), {})
    with RunState.load(run_dir, loader=earlier()) as state:
        for _ in state.epochs(1):
            for _ in state.batches():
                if in_mid_epoch:
                    return state.save()
            state.save()
    return None


def test_a_checkpoint_with_the_loaders_own_state_is_refused_in_mid_epoch(run_dir: Path) -> None:
    saved_by_its_own_state(run_dir, in_mid_epoch=True)

    with pytest.raises(StateMismatch, match="saved by an earlier version of resumable, by the loader's own"):
        RunState.load(run_dir, loader=StatefulDataLoader(DATA))


def test_the_epochs_data_starts_again_after_it_if_that_is_allowed(run_dir: Path) -> None:
    saved_by_its_own_state(run_dir, in_mid_epoch=True)

    with RunState.load(run_dir, loader=StatefulDataLoader(DATA), allow=["loader"]) as state:
        assert [int(batch) for batch in state.batches()] == [*DATA]


@pytest.mark.quick(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_nothing_is_left_after_the_last_batch_in_the_loaders_own_state(run_dir: Path, workers: int) -> None:
    earlier = type("StatefulDataLoader", (OwnState,), {})
    with RunState.load(run_dir, loader=earlier(), every=1) as state:
        for _ in state.batches():
            if state.batch == 2:
                state.save()
                break

    seen = []
    for stop in (0, 0, 2, 6, 99):
        loader = StatefulDataLoader(DATA, 4, num_workers=workers)
        with RunState.load(run_dir, loader=loader) as state:
            if not stop:
                state.save()
                continue
            for epoch in state.epochs(3):
                for batch in state.batches():
                    seen.append((epoch, batch.tolist()))
                    if len(seen) == stop:
                        state.save()
                        break
                else:
                    continue
                break

    assert seen == [(epoch, [*range(at, at + 4)]) for epoch in (1, 2) for at in (0, 4, 8)]


def test_an_epoch_begins_after_a_checkpoint_with_the_loaders_own_state(run_dir: Path) -> None:
    saved_by_its_own_state(run_dir, in_mid_epoch=False)

    with RunState.load(run_dir, loader=StatefulDataLoader(DATA)) as state:
        seen = [(epoch, int(batch)) for epoch in state.epochs(2) for batch in state.batches()]

    assert seen == [(1, number) for number in DATA]


def test_a_loader_that_was_put_elsewhere_is_refused(run_dir: Path) -> None:
    loader = StatefulDataLoader(DATA)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())

    with RunState.load(run_dir, loader=loader) as state, pytest.raises(UsageError, match="load_state_dict"):
        next(iter(state.batches()))


def test_a_loader_that_is_asked_for_its_state_is_warned_of_at_a_save(run_dir: Path) -> None:
    loader = StatefulDataLoader(DATA)
    with RunState.load(run_dir, loader=loader) as state:
        for _ in state.batches():
            loader.state_dict()
            with pytest.warns(ResumableWarning, match="begins a pass of its own and draws a seed.*R27"):
                state.save()
            break


def test_a_class_with_an_iter_of_its_own_keeps_its_own_position(run_dir: Path) -> None:
    class Doubled(StatefulDataLoader):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return (2 * batch for batch in super().__iter__())

    with RunState.load(run_dir, loader=Doubled(DATA)) as state:
        assert [int(batch) for batch in state.batches()] == [2 * number for number in DATA]


def test_the_names_of_torchdata_that_are_used_are_there() -> None:
    loader = StatefulDataLoader(DATA)
    missing = [name for name in ATTRIBUTES if name not in vars(loader)]

    assert not missing, f"torchdata's StatefulDataLoader has no {missing} any more"
    assert iterates_as_torchdata_does(loader)
    assert is_distributed(sampler.StatefulDistributedSampler)
    assert counts_its_samples(sampler.StatefulDistributedSampler(DATA, 1, 0))
    assert not counts_its_samples(sampler.RandomSampler(DATA))
