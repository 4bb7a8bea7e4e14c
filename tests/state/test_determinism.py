"""Seeds and flags: the same numbers in every start, on every rank, in every worker."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from resumable import ResumableWarning, RunState, UsageError, determinism, seed_everything


@pytest.fixture
def _flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test sets is as it was afterwards."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


def drawn() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def test_a_seed_draws_what_it_drew_by_hand() -> None:
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    by_hand = drawn()

    assert seed_everything(7) == 7
    assert drawn() == by_hand


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"])
def test_ranks_draw_the_same_unless_each_is_to_have_its_own(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    same, own = [], []
    for rank in range(3):
        monkeypatch.setenv(variable, str(rank))
        same.append(seed_everything(7))
        own.append((seed_everything(7, per_rank=True), *drawn()))

    assert same == [7, 7, 7]
    assert all(len({7, *values}) >= 3 for values in zip(*own, strict=True))


def test_a_seed_of_a_rank_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")

    assert seed_everything(7, per_rank=True) == 3678938535
    assert seed_everything(8, per_rank=True) == 3621179899


@pytest.mark.parametrize("seed", [-1, 2**32, 1.0, "7", True, None])
def test_what_is_no_seed_is_refused_and_changes_nothing(seed: Any) -> None:
    before = torch.get_rng_state()

    with pytest.raises(UsageError, match=f"seed={seed!r} is not an int from 0 to 4294967295"):
        seed_everything(seed, deterministic=True)

    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("_flags")
def test_deterministic_sets_the_flags_and_a_later_seed_leaves_them() -> None:
    torch.backends.cudnn.benchmark = True

    seed_everything(7, deterministic=True)
    seed_everything(8)

    found = determinism.settings()
    assert (found["deterministic"], found["deterministic_warn_only"]) == (True, False)
    assert (found["cudnn_deterministic"], found["cudnn_benchmark"]) == (True, False)
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.usefixtures("_flags")
def test_what_then_has_nothing_that_repeats_itself_is_an_error() -> None:
    seed_everything(7, deterministic=True)

    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))


@pytest.mark.usefixtures("_flags")
def test_a_workspace_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")

    seed_everything(7, deterministic=True)

    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


@pytest.mark.usefixtures("_flags")
def test_to_choose_it_after_cuda_was_used_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)

    told = r"CUDA was in use before CUBLAS_WORKSPACE_CONFIG was set.* torch up to about 2\.9 raises"
    with pytest.warns(ResumableWarning, match=told):
        determinism.make_deterministic()

    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_the_settings_are_json_and_start_no_device() -> None:
    was_started = torch.cuda.is_initialized()
    found = determinism.settings()

    assert json.loads(json.dumps(found)) == found
    assert found["threads"] == torch.get_num_threads()
    assert found["PYTHONHASHSEED"] == os.environ.get("PYTHONHASHSEED")
    assert torch.cuda.is_initialized() == was_started


class Drawn(Dataset[Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(drawn(), dtype=torch.float64)


def test_workers_draw_the_same_each_time_and_not_what_another_one_draws() -> None:
    def load() -> Tensor:
        seed_everything(7)
        return torch.cat([*DataLoader(Drawn(), batch_size=4, num_workers=2)])

    first = load()

    assert torch.equal(load(), first)
    assert all(len(column.unique()) == 8 for column in first.T)


def draw_in_a_loop_of_its_own(run_dir: Path, numbers: dict[str, float]) -> RunState:
    with RunState.load(run_dir, extra={"numbers": numbers}) as state:
        seed_everything(7)
        numbers[str(len(numbers))] = torch.rand(()).item()
        state.save()
    return state


def test_to_seed_a_run_that_was_resumed_is_reported(run_dir: Path) -> None:
    draw_in_a_loop_of_its_own(run_dir, {})

    for _ in range(2):
        with pytest.warns(ResumableWarning, match=r"seed_everything\(7\) comes after .* was resumed"):
            state = draw_in_a_loop_of_its_own(run_dir, {})
        seed_everything(8)  # Which is no longer its business
        assert state.resumed


def test_to_seed_in_the_loops_or_after_a_run_is_not(run_dir: Path) -> None:
    for total in (1, 2, 3):
        with RunState.load(run_dir) as state:
            for epoch in state.epochs(total):
                seed_everything(epoch)
                state.save()
        seed_everything(7)
