"""Trainings that an old script has begun: what continues them ends with the bits of the old script."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch
from places import DOCS
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from resumable import CheckpointNotFound, Run, RunState, UsageError
from resumable.run.manifest import Best, Goal

EPOCHS = 3
BATCHES = 4
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Shuffled:
    """An iterable that keeps no position, and shuffles with a generator of its own."""

    def __init__(self) -> None:
        self.order = torch.Generator().manual_seed(5)

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        for some in torch.randperm(8, generator=self.order).split(2):
            yield [X[some]]

    def __len__(self) -> int:
        return BATCHES


class Stream(IterableDataset[list[torch.Tensor]]):
    """A stream without a state."""

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return ([row] for row in X)


class Training:
    """What the old script and the new one have in common; `kind` says how the order is drawn."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(1)
        self.kind = kind
        # Where the order comes from the global generator, nothing else may draw from it.
        drops = nn.Identity() if kind in ("global", "seeded each epoch") else nn.Dropout(0.5)
        self.model = nn.Sequential(nn.Linear(4, 6), drops, nn.Linear(6, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.loader = self._loader()
        self.losses: list[float] = []

    def _loader(self) -> Any:
        data = TensorDataset(X)
        if self.kind in ("sampler", "workers"):
            sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=3)
            return DataLoader(data, 2, sampler=sampler, num_workers=2 if self.kind == "workers" else 0)
        if self.kind == "generator":
            return DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(4))
        if self.kind == "iterable":
            return Shuffled()
        return DataLoader(Stream(), 2) if self.kind == "stream" else DataLoader(data, 2, shuffle=True)

    def generator(self) -> torch.Generator:
        """Return the generator that the order is drawn from."""
        own = getattr(self.loader, "order", None) or getattr(self.loader, "generator", None)
        return own or torch.default_generator

    def begin_epoch(self, epoch: int) -> None:
        """Run the first lines of an epoch's body."""
        if isinstance(getattr(self.loader, "sampler", None), DistributedSampler):
            self.loader.sampler.set_epoch(epoch)
        if self.kind == "seeded each epoch":
            torch.manual_seed(100 + epoch)

    def step(self, x: torch.Tensor) -> None:
        loss = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def result(self) -> list[Any]:
        moments = [value for part in self.optimizer.state.values() for value in part.values()]
        tensors = [*self.model.state_dict().values(), *moments]
        return [self.losses, [tensor.tolist() for tensor in tensors], torch.get_rng_state().tolist()]


def old_script(kind: str, epoch: int = EPOCHS, batch: int = 0) -> tuple[Training, dict[str, Any]]:
    """Train without this library up to a batch; return the training and the checkpoint of the script."""
    training, order = Training(kind), None
    for at in range(EPOCHS):
        order = training.generator().get_state()
        training.begin_epoch(at)
        for number, (x,) in enumerate(training.loader):
            if (at, number) == (epoch, batch):
                break
            training.step(x)
            if (at, number + 1) == (epoch, batch) == (epoch, BATCHES):
                break
        if at == epoch:
            break
    parts = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    return training, {**parts, "rng": torch.get_rng_state(), "order": order}


class Stop(Exception):
    pass


def new_script(
    training: Training, run: Path, old: dict[str, Any], at: tuple[int, int], stop: int | None = None
) -> Training:
    """Continue where the old script has stopped, and stop after so many steps, which are saved."""
    parts = {"model": training.model, "optimizer": training.optimizer, "loader": training.loader}
    with RunState.load(run, **parts, every=1) as state:
        if not state.resumed:
            training.model.load_state_dict(old["model"])
            training.optimizer.load_state_dict(old["optimizer"])
            torch.set_rng_state(old["rng"])
            if training.kind in ("generator", "global", "iterable"):
                training.generator().set_state(old["order"])
            state.begin_at(epoch=at[0], batch=at[1], step=at[0] * BATCHES + at[1])
        for epoch in state.epochs(EPOCHS):
            training.begin_epoch(epoch)
            for (x,) in state.batches():
                if len(training.losses) == stop:
                    raise Stop
                training.step(x)
    return training


PLACES = [(0, 1), (1, 3), (1, BATCHES), (2, 2)]
KINDS = ["sampler", "generator", "global", "seeded each epoch", "iterable", "stream", "workers"]


@pytest.mark.filterwarnings("ignore:.*keeps no position, so:UserWarning")
@pytest.mark.filterwarnings("ignore:.*generators .torch. that all code draws from:UserWarning")
@pytest.mark.parametrize("stops", [(), (1, 2), (0, 4)], ids=str)
@pytest.mark.parametrize("at", PLACES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick(40)
def test_what_an_old_script_began_ends_with_its_bits(
    kind: str, at: tuple[int, int], stops: tuple[int, ...], run_dir: Path
) -> None:
    whole, _ = old_script(kind)
    begun, old = old_script(kind, *at)
    losses = begun.losses

    for stop in (*stops, None):
        training = Training(kind)
        with suppress(Stop):
            new_script(training, run_dir, old, at, stop)
        losses += training.losses

    assert losses == whole.losses
    assert training.result()[1:] == whole.result()[1:]


@pytest.mark.filterwarnings("ignore:.*generators .torch. that all code draws from:UserWarning")
@pytest.mark.parametrize("kind", ["sampler", "generator", "global"])
@pytest.mark.quick(2)
def test_a_save_before_the_loop_keeps_the_place_and_the_generators(kind: str, run_dir: Path) -> None:
    whole, _ = old_script(kind)
    begun, old = old_script(kind, 1, 2)
    for is_first in (True, False):
        training = Training(kind)
        parts = {"model": training.model, "optimizer": training.optimizer, "loader": training.loader}
        with RunState.load(run_dir, **parts) as state:
            if is_first:
                training.model.load_state_dict(old["model"])
                training.optimizer.load_state_dict(old["optimizer"])
                torch.set_rng_state(old["rng"])
                if kind != "sampler":
                    training.generator().set_state(old["order"])
                state.begin_at(epoch=1, batch=2, step=6)
            state.save().wait()
            assert (state.epoch, state.batch, state.step) == (1, 2, 6)

    training = new_script(Training(kind), run_dir, old, (1, 2))

    assert begun.losses + training.losses == whole.losses
    assert training.result()[1:] == whole.result()[1:]


def test_what_the_first_lines_of_the_epoch_draw_does_not_count(run_dir: Path) -> None:
    seen = []
    with RunState.load(run_dir, loader=DataLoader(TensorDataset(X), 2)) as state:
        state.begin_at(epoch=1, batch=3)
        then = torch.get_rng_state()
        for _ in state.epochs(2):
            torch.rand(3)
            for _ in state.batches():
                seen.append(torch.get_rng_state())

    assert len(seen) == 1
    assert torch.equal(seen[0], then)


class Counted(TensorDataset):
    loaded = 0

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        return super().__getitem__(index)


def test_no_sample_before_the_batch_is_loaded(run_dir: Path) -> None:
    data = Counted(X)
    with RunState.load(run_dir, loader=DataLoader(data, 2)) as state:
        state.begin_at(batch=3, samples=6)
        assert [batch[0].tolist() for batch in state.batches()] == [X[6:].tolist()]
        assert state.samples == 8

    assert data.loaded == 2


class Stateful:
    """A loader that keeps its own place."""

    at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        # As some do, it begins again after its last batch.
        self.at %= 4
        while self.at < 4:
            self.at += 1
            yield X[self.at - 1]

    def __len__(self) -> int:
        return 4

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("stops", [(None,), (1, None), (1, 1, None)], ids=str)
def test_a_loader_with_a_state_continues_where_the_script_has_put_it(
    stops: tuple[int | None, ...], run_dir: Path
) -> None:
    seen = []
    for stop in stops:
        loader = Stateful()
        with suppress(Stop), RunState.load(run_dir, loader=loader, every=1) as state:
            if not state.resumed:
                loader.load_state_dict({"at": 1})
                state.begin_at(batch=1)
            for _ in state.epochs(2):
                for batch in state.batches():
                    if stop == 0:
                        raise Stop
                    stop = stop and stop - 1
                    seen.append((state.epoch, state.batch, batch.tolist()))

    places = [(0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert seen == [(epoch, batch, X[batch].tolist()) for epoch, batch in places]


def test_a_loader_with_a_state_is_at_its_end_after_the_last_batch(run_dir: Path) -> None:
    loader = Stateful()
    with suppress(Stop), RunState.load(run_dir, loader=loader) as state:
        loader.load_state_dict({"at": 3})
        state.begin_at(batch=3)
        for _ in state.batches():
            state.save().wait()
            raise Stop

    with RunState.load(run_dir, loader=Stateful()) as state:
        assert [len([*state.batches()]) for _ in state.epochs(2)] == [0, 4]


@pytest.mark.parametrize("is_seeded", [False, True])
def test_an_order_from_the_global_generator_warns_unless_the_body_sets_it(
    is_seeded: bool, run_dir: Path
) -> None:
    loader = DataLoader(TensorDataset(X), 2, shuffle=True)
    _, old = old_script("global", 1, 1)
    with RunState.load(run_dir, loader=loader) as state, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.set_rng_state(old["rng"])
        state.begin_at(epoch=1, batch=1)
        torch.rand(1)
        for epoch in state.epochs(2):
            if is_seeded:
                torch.manual_seed(epoch)
            assert len([*state.batches()]) == 3

    assert ["that all code draws from" in str(one.message) for one in seen] == [True] * (not is_seeded)


def test_a_second_begin_at_is_refused(run_dir: Path) -> None:
    with RunState.load(run_dir, loader=DataLoader(TensorDataset(X), 2)) as state:
        state.begin_at(epoch=1, batch=3)
        with pytest.raises(UsageError, match=r"(?s)begun already: it stands at epoch 1.*once"):
            state.begin_at(epoch=2)
        assert (state.epoch, state.batch) == (1, 3)


def test_a_batch_behind_the_end_is_refused(run_dir: Path) -> None:
    with RunState.load(run_dir, loader=DataLoader(TensorDataset(X), 2)) as state:
        with pytest.raises(UsageError, match=r"batch=5\) is behind the end .* has 4 batches"):
            state.begin_at(batch=5)
        assert (state.epoch, state.batch) == (0, 0)


def test_a_batch_behind_an_end_that_only_the_loop_finds_is_refused(run_dir: Path) -> None:
    with RunState.load(run_dir, loader=DataLoader(Stream(), 2)) as state:
        state.begin_at(batch=5)
        with pytest.raises(UsageError, match="has 4 batches"):
            list(state.batches())


@pytest.mark.parametrize("loaders", [None, {"a": [1, 2], "b": [3]}])
def test_a_batch_of_no_one_loader_is_refused(loaders: Any, run_dir: Path) -> None:
    with (
        RunState.load(run_dir, loader=loaders) as state,
        pytest.raises(UsageError, match=r"needs one loader; RunState was given: (none|a, b)"),
    ):
        state.begin_at(batch=1)


def test_the_best_value_from_before_is_to_be_beaten(run_dir: Path) -> None:
    for loss, best in [(0.5, 0.25), (0.3, 0.25), (0.1, 0.1)]:
        with RunState.load(run_dir, minimize="loss", keep=1) as state:
            if not state.resumed:
                state.begin_at(step=7, best=0.25)
            assert state.best == 0.25
            state.save(loss=loss).wait()
            assert state.best == best

    assert (run_dir / "best").resolve().name == "000003-step-00000007"
    Run(run_dir).open(3).verify()


def test_a_best_value_from_before_has_no_checkpoint_to_go_back_to(run_dir: Path) -> None:
    with RunState.load(run_dir, minimize="loss") as state:
        state.begin_at(best=0.25)
        state.save(loss=0.5).wait()
        assert not (run_dir / "best").exists()
        with pytest.raises(CheckpointNotFound, match=r"the best loss so far, 0.25, is from before .* began"):
            state.restore("best")
        state.save(loss=0.2).wait()
        state.restore("best")

    assert state.best == 0.2


def test_patience_counts_from_the_best_value_from_before(run_dir: Path) -> None:
    with RunState.load(run_dir, minimize="loss") as state:
        state.begin_at(best=0.25)
        state.save(loss=0.5).wait()
        assert not state.patience(2)
        state.save(loss=0.5).wait()
        assert state.patience(2)


@pytest.mark.parametrize("best", [float("inf"), float("nan")])
def test_a_best_value_that_is_not_finite_is_none_yet(best: float, run_dir: Path) -> None:
    with RunState.load(run_dir, minimize="loss") as state:
        state.begin_at(step=1, best=best)
        assert state.best is None
        state.save().wait()
        state.save(loss=0.5).wait()

    assert state.best == 0.5
    Run(run_dir).open(2).verify()


def test_a_best_value_needs_a_metric(run_dir: Path) -> None:
    with RunState.load(run_dir) as state, pytest.raises(UsageError, match="has no metric"):
        state.begin_at(best=0.25)


def test_automatic_saves_count_from_the_step_that_the_training_begins_at(run_dir: Path) -> None:
    with RunState.load(run_dir, every=3) as state:
        state.begin_at(step=7)
        for _ in state.steps(11):
            pass

    assert [checkpoint.about.step for checkpoint in Run(run_dir).checkpoints()] == [10, 11]


def test_the_lines_on_the_page_continue_an_old_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "migrating.md").read_text()
    (lines,) = re.findall(r"^```py\n(.*?begin_at.*?)^```", page, re.S | re.M)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1, "batch": 3}
    torch.save({**old, "step": 7, "best_acc": 0.5, "rng": torch.get_rng_state()}, "checkpoint.pth.tar")
    scope: dict[str, Any] = {"torch": torch, "model": model, "optimizer": optimizer, "evaluate": lambda: 0.4}
    scope["train"] = lambda *_: optimizer.step()

    exec(lines, {**scope, "data": TensorDataset(X, X)})

    last = Run("runs/exp").checkpoints()[-1].about
    assert (last.epoch, last.step) == (3, 7 + 1 + BATCHES)
    assert last.best == Best(Goal("acc", maximize=True), 0.5, 0, since=2)


def _stateful() -> Any:
    data = pytest.importorskip("torchdata.stateful_dataloader")
    torch.manual_seed(0)
    return data.StatefulDataLoader(torch.arange(12), 2, shuffle=True)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_the_loader_of_torchdata_continues_its_epoch(run_dir: Path) -> None:
    whole, loader = [], _stateful()
    for epoch in range(3):
        for number, batch in enumerate(loader):
            whole.append(batch.tolist())
            if (epoch, number) == (1, 2):
                old, now = loader.state_dict(), torch.get_rng_state()
    began = old["_sampler_iter_state"]["sampler_iter_state"]["generator"]

    seen: list[Any] = []
    for stop in (2, 3, 100):
        loader, last = _stateful(), len(seen) + stop
        with suppress(Stop), RunState.load(run_dir, loader=loader, every=1) as state:
            if not state.resumed:
                loader.sampler.generator.set_state(began)
                torch.set_rng_state(now)
                state.begin_at(epoch=1, batch=3)
            for _ in state.epochs(3):
                for batch in state.batches():
                    if len(seen) == last:
                        raise Stop
                    seen.append(batch.tolist())

    assert seen == whole[9:]


def _on_all(rank: int, run: Path) -> tuple[list[Any], list[Any]]:
    data = TensorDataset(torch.arange(24))
    sampler = DistributedSampler(data, num_replicas=2, rank=rank, seed=3)
    loader = DataLoader(data, 2, sampler=sampler)
    whole: list[Any] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        whole += [batch[0].tolist() for batch in loader]
    seen: list[Any] = []
    for stop in (1, 3, 100):
        last = len(seen) + stop
        with suppress(Stop), RunState.load(run, loader=loader, every=1) as state:
            if not state.resumed:
                state.begin_at(batch=4, samples=16)
            for epoch in state.epochs(2):
                sampler.set_epoch(epoch)
                for (batch,) in state.batches():
                    if len(seen) == last:
                        raise Stop
                    seen.append(batch.tolist())
            assert state.samples == 48
    return seen, whole[4:]


@pytest.mark.heavy
def test_each_of_several_processes_skips_its_own_share(run_dir: Path) -> None:
    for ended in gloo.run(2, _on_all, run_dir, folder=run_dir.parent):
        assert ended.value is not None, ended
        assert ended.value[0] == ended.value[1]
