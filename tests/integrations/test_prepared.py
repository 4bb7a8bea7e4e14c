"""Loaders as Accelerate and Fabric prepare them: the bits of the script without us, whatever stops it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from prepared_training import Stop, Stopped, Training, plain, stopped
from torch.utils.data import DataLoader, Sampler, TensorDataset

from resumable import ResumableWarning, RunState, UsageError
from resumable.errors import Unsupported
from resumable.loaders import prepared

accelerate = pytest.importorskip("accelerate")
fabric = pytest.importorskip("lightning_fabric")

ACCELERATE: dict[str, dict[str, Any]] = {
    "in process": {},
    "seeded": {"use_seedable_sampler": True},
    "seeded, workers": {"use_seedable_sampler": True, "num_workers": 2},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
    "dealt out": {"dispatch_batches": True},
    "stream": {"is_stream": True},
    "stream, worker": {"is_stream": True, "num_workers": 1},
}
FABRIC = {
    name: ACCELERATE[name] for name in ("in process", "workers", "persistent", "stream", "stream, worker")
}
SETUPS = [
    pytest.param("accelerate" if kinds is ACCELERATE else "fabric", options, id=f"{name} {place}")
    for place, kinds in enumerate((ACCELERATE, FABRIC))
    for name, options in kinds.items()
]
STOPS: list[list[Stop]] = [[], [1, 5], [3, 8, 23], [9, 12], [8, 10, 18], ["epoch 0", 14, "epoch 1", 29]]


@pytest.fixture(autouse=True)
def _one_accelerator() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


@pytest.mark.parametrize("stops", STOPS, ids=str)
@pytest.mark.parametrize(("maker", "options"), SETUPS)
@pytest.mark.quick(5)
def test_a_prepared_loader_resumes_with_the_bits_of_the_plain_script(
    maker: str, options: Any, stops: list[Stop], run_dir: Path
) -> None:
    assert stopped(run_dir, stops, maker, **options) == plain(maker, **options)


def shuffled(seed: int, *, is_seeded: bool) -> Any:
    torch.manual_seed(seed)
    loading = accelerate.utils.DataLoaderConfiguration(use_seedable_sampler=is_seeded)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=loading)
    return accelerator.prepare(DataLoader(TensorDataset(torch.arange(12)), shuffle=True))


@pytest.mark.parametrize("is_seeded", [False, True])
def test_the_order_is_restored_where_a_script_seeds_nothing(is_seeded: bool, run_dir: Path) -> None:
    orders = []
    for seed in (1, 2, 3):
        loader = shuffled(seed, is_seeded=is_seeded)
        with RunState.load(run_dir, loader=loader) as state:
            order: list[int] = []
            for (number,) in state.batches():
                order.append(int(number))
                if state.batch in (3, 7):
                    state.save().wait()
                    break
            orders.append(order)
    assert sorted([*orders[0], *orders[1], *orders[2]]) == [*range(12)]


@pytest.mark.parametrize("maker", ["accelerate", "fabric"])
def test_an_epoch_is_counted_once_where_a_resume_finds_no_batch_left(maker: str, run_dir: Path) -> None:
    counts = []
    for stop in (10, None):
        training = Training(maker)
        with RunState.load(run_dir, **training.parts()) as state:
            for _ in state.batches():
                if state.batch + 1 == stop:
                    state.save().wait()
                    break
        counts.append(prepared.Prepared("loader", training.loader).collect()["count"])
    assert counts[1] == 1


def test_state_batches_takes_the_prepared_loader_itself(run_dir: Path) -> None:
    for maker in ("accelerate", "fabric"):
        training = Training(maker)
        with RunState.load(run_dir / maker, **training.parts()) as state:
            assert len(list(state.batches(training.loader))) == 10


@pytest.mark.parametrize("maker", ["accelerate", "fabric"])
def test_a_prepared_loader_that_was_not_given_is_refused(maker: str, run_dir: Path) -> None:
    training = Training(maker)
    with (
        RunState.load(run_dir, model=training.model) as state,
        pytest.raises(UsageError, match="was not given to RunState"),
    ):
        state.batches(training.loader)


def test_what_skip_first_batches_returns_is_refused(run_dir: Path) -> None:
    loader = accelerate.skip_first_batches(Training("accelerate").loader, 3)
    with pytest.raises(UsageError, match=r"skips its first 3 batches\.\n.*prepared loader itself"):
        RunState.load(run_dir, loader=loader)


@pytest.mark.parametrize(("maker", "name"), [("accelerate", "iteration"), ("fabric", "_num_iter_calls")])
def test_a_release_that_has_renamed_what_is_private_is_named(maker: str, name: str, run_dir: Path) -> None:
    loader = Training(maker).loader
    del vars(loader)[name]
    with pytest.raises(Unsupported, match=f"has no {name}"):
        RunState.load(run_dir, loader=loader)


@pytest.mark.parametrize("maker", ["accelerate", "fabric"])
def test_the_functions_that_are_used_are_there(maker: str) -> None:
    loader = Training(maker).loader
    way = prepared.Prepared("loader", loader)._way
    assert hasattr(sys.modules[prepared._kind(loader).__module__], way.uses)
    assert all(name in vars(loader) for name in (way.inside, way.counter, *way.needs))


def test_a_loop_that_is_left_leaves_nothing_in_accelerates_list(run_dir: Path) -> None:
    training = Training("accelerate")
    with RunState.load(run_dir, **training.parts()) as state:
        for _ in state.batches():
            break
    assert training.accelerator.gradient_state.dataloader_references == [None]


def test_a_training_not_prepared_continues_with_a_loader_that_is(run_dir: Path) -> None:
    data = TensorDataset(torch.arange(12))
    with RunState.load(run_dir, loader=DataLoader(data, shuffle=True)) as state:
        for _ in state.epochs(2):
            assert len(list(state.batches())) == 12
            state.save()
    orders = []
    for epoch in (2, 3):
        loader = shuffled(0, is_seeded=True)
        # Of the first such resume: what batches is another object.
        told = pytest.warns(ResumableWarning, match="BatchSampler|sampler") if epoch == 2 else nullcontext()
        with told, RunState.load(run_dir, loader=loader) as state:
            for _ in state.epochs(epoch + 1):
                orders.append([int(number) for (number,) in state.batches()])
                state.save()
    fresh = shuffled(0, is_seeded=True)
    own = [[int(number) for (number,) in fresh] for _ in range(4)]
    assert orders == own[2:]


@pytest.mark.parametrize("batch", [0, 4, 12])
def test_begin_at_continues_a_prepared_loaders_epoch(batch: int, run_dir: Path) -> None:
    own = shuffled(0, is_seeded=True)
    whole = [[int(number) for (number,) in own] for _ in range(3)]
    orders: list[int] = []
    for stop in (2, 9, None):
        with RunState.load(run_dir, loader=shuffled(0, is_seeded=True)) as state:
            if not state.resumed:
                state.begin_at(epoch=1, batch=batch)
            for _ in state.epochs(3):
                for (number,) in state.batches():
                    orders.append(int(number))
                    if len(orders) == stop:
                        state.save().wait()
                        break
                if len(orders) == stop:
                    break
    assert orders == [*whole[1][batch:], *whole[2]]


class ByEpoch(Sampler[int]):
    """Draws its order from the epoch that it is told, as a DistributedSampler does."""

    epoch = 0

    def __len__(self) -> int:
        return 12

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist())


def by_epoch(maker: str) -> Any:
    loader = DataLoader(TensorDataset(torch.arange(12)), 2, sampler=ByEpoch())
    if maker == "fabric":
        return fabric.Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
    return accelerate.Accelerator(cpu=True).prepare(loader)


def orders(epochs: int) -> list[list[int]]:
    """Return the batches of these epochs, one after the other."""
    sampler, found = ByEpoch(), []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        order = [*sampler]
        found += [order[place : place + 2] for place in range(0, 12, 2)]
    return found


@pytest.mark.parametrize("back_at", [8, 11, 14, 18])
@pytest.mark.parametrize("maker", ["accelerate", "fabric"])
def test_going_back_repeats_the_batches_since_the_checkpoint(maker: str, back_at: int, run_dir: Path) -> None:
    seen: list[list[int]] = []
    with RunState.load(run_dir, loader=by_epoch(maker)) as state:
        for _ in state.epochs(4):
            for (batch,) in state.batches():
                seen.append(batch.tolist())
                if len(seen) == 8:
                    state.save()
                if len(seen) == back_at:
                    state.restore(1)
    assert seen == [*orders(4)[:back_at], *orders(4)[8:]]


@pytest.mark.parametrize("is_outside", [False, True])
@pytest.mark.parametrize("maker", ["accelerate", "fabric"])
def test_a_loop_that_an_exception_has_left_continues_where_it_was(
    maker: str, is_outside: bool, run_dir: Path
) -> None:
    seen: list[list[int]] = []
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight])
    weight.grad = torch.zeros(())

    def train(state: RunState, fails: bool) -> None:
        for (batch,) in state.batches():
            if fails and len(seen) == 9:
                raise MemoryError
            optimizer.step()
            seen.append(batch.tolist())

    with RunState.load(run_dir, loader=by_epoch(maker), optimizer=optimizer) as state:
        for fails in (True, False):
            with suppress(MemoryError):
                for _ in state.epochs(3):
                    try:
                        train(state, fails)
                    except MemoryError:
                        if is_outside:
                            raise
                        train(state, False)
    assert seen == orders(3)


def test_a_loader_beside_another_that_ends_first_counts_its_epoch(run_dir: Path) -> None:
    seen = []
    for stop in (6, 9, None):
        with (
            RunState.load(run_dir, loader={"a": by_epoch("fabric"), "b": by_epoch("fabric")}) as state,
            suppress(Stopped),
        ):
            for _ in state.epochs(3):
                for (_,), (batch,) in zip(state.batches("a"), state.batches("b"), strict=False):
                    seen.append(batch.tolist())
                    if len(seen) == stop:
                        state.save().wait()
                        raise Stopped
    assert seen == orders(3)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_stateful_loader_of_accelerate_is_refused_by_name(run_dir: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    loading = accelerate.utils.DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=loading)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(12))))
    with pytest.raises(Unsupported, match="use_stateful_dataloader=True"):
        RunState.load(run_dir, loader=loader)
