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
@pytest.mark.quick(3)
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


SHAPES: dict[str, list[tuple[int, ...]]] = {
    "alike": [(7,)],
    "in rows": [(2, 3)],
    "scalars": [()],
    "others": [(7,), (2, 3), (), (1, 7)],
}


class Tensors:
    def __init__(self, seed: int, shapes: str = "alike") -> None:
        torch.manual_seed(seed)
        of = SHAPES[shapes]
        self.held = {f"tensor{number}": torch.randn(of[number % len(of)]) for number in range(40)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.held = dict(state)


@pytest.mark.parametrize("shapes", SHAPES)
def test_an_object_that_keeps_its_state_gets_tensors_of_their_own(run_dir: Path, shapes: str) -> None:
    first = Tensors(1, shapes)
    with RunState.load(run_dir, extra={"tensors": first}) as state:
        state.save()
    for seed in (2, 3):
        resumed = Tensors(seed, shapes)
        with RunState.load(run_dir, extra={"tensors": resumed}) as state:
            state.save()
        for name, one in resumed.held.items():
            assert torch.equal(one, first.held[name])
            assert one.untyped_storage().nbytes() == one.nbytes
            assert one._base is None


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32], ids=str)
@pytest.mark.parametrize("size", [3, 9000], ids=["small", "large"])
def test_tensors_of_a_rare_dtype_are_no_views_either(run_dir: Path, dtype: torch.dtype, size: int) -> None:
    first = Tensors(1)
    first.held = {name: torch.full((2, size), 1 + 2j, dtype=dtype) for name in "abc"}
    with RunState.load(run_dir, extra={"tensors": first}) as state:
        state.save()
    for seed in (2, 3):
        resumed = Tensors(seed)
        with RunState.load(run_dir, extra={"tensors": resumed}) as state:
            state.save()
        for name, one in resumed.held.items():
            assert one.view(torch.uint8).tolist() == first.held[name].view(torch.uint8).tolist()
            assert not one._is_view()
            assert one.untyped_storage().nbytes() == one.nbytes


class Copying(Tensors):
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, one in self.held.items():
            one.copy_(state[name])


class Refusing:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise ValueError("not this")


@pytest.mark.parametrize("shapes", SHAPES)
def test_a_load_that_a_later_object_refuses_puts_back_many_tensors(run_dir: Path, shapes: str) -> None:
    with RunState.load(run_dir, extra={"a": Tensors(1, shapes), "z": Refusing()}) as state:
        state.save()
    live = Copying(2, shapes)
    before = {name: one.clone() for name, one in live.held.items()}

    with pytest.raises(StateMismatch, match="not this"):
        RunState.load(run_dir, extra={"a": live, "z": Refusing()})
    assert [*live.held] == [*before]
    assert all(torch.equal(one, before[name]) for name, one in live.held.items())


def test_going_back_sets_the_flags_of_many_parameters_again(run_dir: Path) -> None:
    model = many(1, "plain")
    model.weight3.requires_grad_(False)
    with RunState.load(run_dir, model=model) as state:
        state.save().wait()
        model.weight3.requires_grad_(True)
        model.weight4.requires_grad_(False)
        state.restore("newest")
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == ["weight3"]


class Versioned(nn.Linear):
    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("allow", [(), ("model.bias",)])
def test_a_module_is_told_the_version_of_its_state(run_dir: Path, allow: tuple[str, ...]) -> None:
    with RunState.load(run_dir, model=Versioned(2, 2)) as state:
        state.save()
    resumed = Versioned(2, 3 if allow else 2)
    if allow:
        resumed.weight = nn.Parameter(torch.zeros(2, 2))
    RunState.load(run_dir, model=resumed, allow=allow).close()
    assert resumed.seen == 2


with torch.inference_mode():
    INFERENCE = torch.zeros(2, 3)


def stepped(seed: int) -> tuple[nn.Linear, torch.optim.Adam]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_moments_that_lie_in_another_order_come_back_in_that_order(run_dir: Path) -> None:
    model, optimizer = stepped(1)
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.state[model.weight][key] = torch.randn(4, 4).t()
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        state.save()
    for seed in (2, 3):
        again, resumed = stepped(seed)
        with RunState.load(run_dir, model=again, optimizer=resumed) as state:
            state.save()
        moment = resumed.state[again.weight]["exp_avg"]
        assert moment.stride() == (1, 4)
        assert torch.equal(moment, optimizer.state[model.weight]["exp_avg"])
