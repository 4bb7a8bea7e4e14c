"""The fence guards what only hooked steps change, and holds those steps back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from resumable.saving.fence import Fence


class Own(torch.optim.SGD):
    """A user's own optimizer, which writes in its step alone."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class TwoSteps(torch.optim.SGD):
    """A user's own optimizer, which also writes where no hook is called."""

    def first_step(self) -> None: ...


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes or [(3,), (2, 2)]]


def step(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def is_guarded(fence: Fence, tensors: list[Any]) -> bool:
    """Whether all of them are guarded; it is the same for all."""
    guarded = fence.guarded()
    answers = {tensor.data_ptr() in guarded for tensor in tensors}
    assert len(answers) == 1
    return answers.pop()


def test_what_a_hooked_step_changes_is_guarded() -> None:
    parameters = weights()
    optimizer = torch.optim.Adam(parameters)
    fence = Fence([optimizer])
    step(optimizer, parameters)

    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert is_guarded(fence, [*parameters, *moments])


def test_what_else_there_is_is_not_guarded() -> None:
    parameters, others = weights(), [torch.ones(3), torch.zeros(0), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD(parameters)
    fence = Fence([optimizer])
    step(optimizer, parameters)

    assert not is_guarded(fence, others)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_nothing_is_guarded_without_a_step_since_the_last_question(is_wanted: bool) -> None:
    parameters = weights()
    optimizer = torch.optim.SGD(parameters)
    fence = Fence([optimizer])
    step(optimizer, parameters)
    fence.guarded(is_wanted)

    assert not is_guarded(fence, parameters)
    step(optimizer, parameters)
    assert is_guarded(fence, parameters)


@pytest.mark.parametrize("kind", [Own, TwoSteps])
def test_a_users_own_optimizer_is_trusted_if_only_its_step_can_write(kind: Any) -> None:
    parameters = weights()
    optimizer = kind(parameters)
    fence = Fence([optimizer])
    step(optimizer, parameters)

    assert is_guarded(fence, parameters) is (kind is Own)


@pytest.mark.parametrize("method", ["train", "eval"])
def test_an_optimizer_that_switches_its_parameters_is_not_trusted(method: str) -> None:
    parameters = weights()
    optimizer = torch.optim.SGD(parameters)
    setattr(optimizer, method, lambda: None)
    fence = Fence([optimizer])
    step(optimizer, parameters)

    assert not is_guarded(fence, parameters)


@pytest.mark.parametrize("kind", [TwoSteps, torch.optim.SGD])
def test_what_another_has_and_did_not_step_is_not_guarded(kind: Any) -> None:
    alone, shared = weights((3,)), weights((2,))
    first, second = torch.optim.SGD([*alone, *shared]), kind(shared)
    fence = Fence([first, second])
    step(first, [*alone, *shared])

    guarded = fence.guarded()
    assert alone[0].data_ptr() in guarded
    assert shared[0].data_ptr() not in guarded


def test_a_graph_that_is_captured_ends_the_trust_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = weights()
    optimizer = torch.optim.SGD(parameters)
    fence = Fence([optimizer])
    waited: list[int] = []
    fence.shut(lambda: waited.append(1))
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_initialized", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        step(optimizer, parameters)

    assert waited == [], "waiting ends the capture"
    assert not is_guarded(fence, parameters)
    step(optimizer, parameters)
    assert not is_guarded(fence, parameters)


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_waits_before_it_writes_and_before_its_closure(with_closure: bool) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    fence = Fence([optimizer])
    seen: list[Any] = []
    fence.shut(lambda: seen.append(parameter.tolist()))

    def closure() -> float:
        seen.append("closure")
        parameter.grad = torch.ones(2)
        return 0.0

    parameter.grad = torch.ones(2)
    optimizer.step(closure if with_closure else None)  # type: ignore[arg-type]

    assert seen == [[1.0, 1.0], "closure"][: 1 + with_closure]
    assert parameter.tolist() == [0.0, 0.0]
