"""Many small tensors: each save has them as they are, whatever has happened since the last one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resumable import CannotStore, RunState
from resumable.parts import collect


class Experts(nn.Module):
    """Experts of a few parameters each, and a buffer for each."""

    def __init__(self, count: int = 12) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 2) for _ in range(count))
        for number in range(count):
            self.register_buffer(f"seen{number}", torch.zeros(4))


def _weight(model: Experts) -> nn.Parameter:
    return model.experts[5].weight


def _replace(model: Experts) -> None:
    model.experts[5].weight = nn.Parameter(torch.randn(2, 3))


def _give_other_data(model: Experts) -> None:
    _weight(model).data = torch.randn(2, 3)


def _transpose_the_data(model: Experts) -> None:
    _weight(model).data = torch.randn(3, 2).t()


def _set(model: Experts) -> None:
    _weight(model).data.set_(torch.randn(2, 3))


def _change_the_dtype(model: Experts) -> None:
    model.experts[5].double()


def _tie(model: Experts) -> None:
    model.experts[5].weight = model.experts[6].weight


def _share_memory(model: Experts) -> None:
    _weight(model).data = model.experts[6].weight.data


def _replace_a_buffer(model: Experts) -> None:
    model.seen3 = torch.full((4,), 3.0)


def _freeze(model: Experts) -> None:
    _weight(model).requires_grad_(False)


def _let_a_hook_change_values(model: Experts) -> None:
    model.register_state_dict_post_hook(_double)


def _double(model: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state["experts.5.weight"] = state["experts.5.weight"].detach() * 2


def _swap_two_experts(model: Experts) -> None:
    model.experts[1], model.experts[2] = model.experts[2], model.experts[1]


CHANGES = [
    *(_replace, _give_other_data, _transpose_the_data, _set, _change_the_dtype, _tie, _share_memory),
    *(_replace_a_buffer, _freeze, _let_a_hook_change_values, _swap_two_experts),
]


def _saved(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint as any tool reads them."""
    safetensors = pytest.importorskip("safetensors")
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("model*.safetensors"):
        with safetensors.safe_open(file, "pt") as opened:
            metadata = opened.metadata()
            here = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            found |= here | {name: here[first] for name, first in metadata.items() if first in here}
    return found


@pytest.mark.filterwarnings("ignore:.*has changed since it was given")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_save_after_a_change_has_the_changed_state(run_dir: Path, change: Callable[[Any], None]) -> None:
    model = Experts()
    with RunState.load(run_dir, model=model) as state:
        for number in range(6):
            if number == 3:
                change(model)
            with torch.no_grad():
                torch._foreach_add_([one.data for one in model.parameters()], 1.0)
            save = state.save()
            save.wait()
            now, then = model.state_dict(), _saved(save.path)
            assert then.keys() == now.keys()
            assert all(torch.equal(then[name], now[name]) for name in now)


def test_other_groups_of_an_optimizer_are_in_the_next_save(run_dir: Path) -> None:
    model = Experts()
    parameters = [*model.parameters()]
    optimizer = torch.optim.Adam([{"params": parameters[:12]}, {"params": parameters[12:]}], lr=0.1)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        for number in range(4):
            for one in parameters:
                one.grad = torch.ones_like(one)
            optimizer.step()
            optimizer.param_groups[1]["lr"] = number + 1.0
            optimizer.state[parameters[3]]["exp_avg"] = torch.full_like(parameters[3], number)
            state.save().wait()

    other = Experts()
    second = [*other.parameters()]
    fresh = torch.optim.Adam([{"params": second[:12]}, {"params": second[12:]}], lr=0.1)
    with RunState.load(run_dir, model=other, optimizer=fresh):
        assert fresh.param_groups[1]["lr"] == 4.0
        for one, two in zip(parameters, second, strict=True):
            assert torch.equal(fresh.state[two]["exp_avg"], optimizer.state[one]["exp_avg"])
            assert torch.equal(one, two)


def test_containers_that_change_in_place_are_saved_as_they_are(run_dir: Path) -> None:
    memory: dict[str, Any] = {f"m{i}": torch.zeros(3) for i in range(20)}
    with RunState.load(run_dir, extra={"memory": memory}) as state:
        for number in range(4):
            memory["m7"] = torch.full((3,), float(number))
            memory[f"new{number}"] = torch.ones(number + 1)
            memory.pop("m0", None)
            state.save().wait()
        expected = {name: one.clone() for name, one in memory.items()}

    again: dict[str, Any] = {}
    with RunState.load(run_dir, extra={"memory": again}):
        assert [*again] == [*expected]
        assert all(torch.equal(again[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_in_the_place_of_a_plain_one_is_refused(run_dir: Path) -> None:
    values = {"a": torch.zeros(3), "b": torch.zeros(4)}
    with RunState.load(run_dir, extra={"values": values}, every=None) as state:
        for _ in range(3):
            state.save().wait()
        values["b"] = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])

        with pytest.raises(CannotStore, match="a dense tensor"):
            state.save()
        values["b"] = torch.ones(4)


class OneTensor:
    """A part whose whole state is a tensor."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(3)

    def state_dict(self) -> torch.Tensor:
        return self.tensor

    def load_state_dict(self, state: torch.Tensor) -> None:
        self.tensor = state


def test_what_a_save_has_in_hand_does_not_follow_the_next_encoding(run_dir: Path) -> None:
    counter = {"n": 1}
    with RunState.load(run_dir, extra={"a": OneTensor(), "counter": counter}, every=None) as state:
        parts = state._training.parts
        for _ in range(2):
            collect.encoded(parts.all)
        before = collect.encoded(parts.all)["extra"].json
        text = repr(before)
        counter["n"] = 99

        collect.encoded(parts.all)

        assert repr(before) == text
