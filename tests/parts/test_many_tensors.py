"""Many small tensors: read together where all are alike, one by one where one is not, with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resumable import RunState
from resumable.errors import StateMismatch


def many(seed: int, like: str) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Module()
    for number in range(40):
        model.register_parameter(f"weight{number}", nn.Parameter(torch.randn(7)))
    others = {
        "plain": torch.randn(3, 4),
        "transposed": torch.randn(4, 3).t(),
        "booleans": torch.randn(5) > 0,
        "complex": torch.randn(5, dtype=torch.complex64),
        "halves": torch.randn(5).half(),
        "empty": torch.randn(0, 3),
        "large": torch.randn(70, 1000),
    }
    model.register_buffer("other", others[like])
    return model


def bits(model: nn.Module) -> list[Any]:
    return [(name, one.stride(), one.tolist()) for name, one in model.state_dict().items()]


@pytest.mark.parametrize("like", ["plain", "transposed", "booleans", "complex", "halves", "empty", "large"])
def test_a_tensor_unlike_the_others_changes_no_bit_of_a_resume(run_dir: Path, like: str) -> None:
    model = many(1, like)
    with RunState.load(run_dir, model=model) as state:
        state.save()
    for seed in (2, 3):
        resumed = many(seed, like)
        places = [one.data_ptr() for one in resumed.parameters()]
        with RunState.load(run_dir, model=resumed) as state:
            state.save()
        assert bits(resumed) == bits(model)
        assert [one.data_ptr() for one in resumed.parameters()] == places


class Tensors:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.held = {f"tensor{number}": torch.randn(7) for number in range(40)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.held = dict(state)


def test_an_object_that_keeps_its_state_gets_tensors_of_their_own(run_dir: Path) -> None:
    first = Tensors(1)
    with RunState.load(run_dir, extra={"tensors": first}) as state:
        state.save()
    for seed in (2, 3):
        resumed = Tensors(seed)
        with RunState.load(run_dir, extra={"tensors": resumed}) as state:
            state.save()
        assert all(torch.equal(one, first.held[name]) for name, one in resumed.held.items())
        sizes = {one.untyped_storage().nbytes() for one in resumed.held.values()}
        assert sizes == {7 * 4}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda one: nn.Parameter(torch.zeros(8)), r"weight3: float32\[7\] in the checkpoint, float32\[8\]"),
        (lambda one: nn.Parameter(one.detach().double()), r"weight3: float32\[7\] .*, float64\[7\]"),
    ],
)
def test_one_other_shape_or_dtype_among_many_is_named(run_dir: Path, change: Any, told: str) -> None:
    with RunState.load(run_dir, model=many(1, "plain")) as state:
        state.save()
    model = many(2, "plain")
    model.weight3 = change(model.weight3)
    before = bits(model)

    with pytest.raises(StateMismatch, match=told):
        RunState.load(run_dir, model=model)
    assert bits(model) == before
