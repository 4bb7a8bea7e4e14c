"""The fence guards what only hooked steps change, and holds those steps back."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
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


class Switching(torch.optim.SGD):
    """An optimizer that swaps its parameters for an evaluation, as schedule-free ones do."""

    def __init__(self, parameters: Any, method: str = "eval") -> None:
        super().__init__(parameters)
        setattr(self, method, lambda: None)


class Unhooked(torch.optim.Optimizer):
    """A wrapper that does not call torch's constructor, so that nothing calls its hooks."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes or [(3,), (2, 2)]]


def step(optimizer: Any, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def is_guarded(fence: Fence, tensors: list[Any]) -> bool:
    """Whether all of them are guarded; it is the same for all."""
    guarded = fence.guarded()
    (answer,) = {tensor.data_ptr() in guarded for tensor in tensors}
    return answer


@pytest.mark.parametrize(
    ("kind", "trusted"),
    [
        *((torch.optim.Adam, True), (Own, True), (TwoSteps, False), (Unhooked, False)),
        *((Switching, False), (lambda parameters: Switching(parameters, "train"), False)),
    ],
)
def test_an_optimizer_is_trusted_if_it_writes_in_hooked_steps_alone(kind: Any, trusted: bool) -> None:
    parameters, waits = weights(), list[str]()
    optimizer = kind(parameters)
    fence = Fence([optimizer])
    fence.shut(lambda: waits.append("waited"))
    assert not is_guarded(fence, parameters), "no step has passed"
    step(optimizer, parameters)

    assert bool(waits) is trusted, "to wait for what guards nothing would be in vain"
    moments = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
    assert is_guarded(fence, [*parameters, *moments]) is trusted
    assert not is_guarded(fence, parameters), "no step has passed since"


def past_the_hook(optimizer: Any, parameters: list[nn.Parameter], _: Any) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD.step.__wrapped__(optimizer)  # type: ignore[attr-defined]


def captured(optimizer: Any, parameters: list[nn.Parameter], patch: pytest.MonkeyPatch) -> None:
    with patch.context() as capturing:
        capturing.setattr(torch.cuda, "is_initialized", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        step(optimizer, parameters)


@pytest.mark.parametrize(("stepped", "later"), [(past_the_hook, True), (captured, False)])
def test_a_step_past_the_hook_guards_nothing_and_a_graph_ends_trust(
    monkeypatch: pytest.MonkeyPatch, stepped: Callable[..., None], later: bool
) -> None:
    parameters, waits = weights(), list[str]()
    optimizer = torch.optim.SGD(parameters)
    fence = Fence([optimizer])
    fence.shut(lambda: waits.append("waited"))
    stepped(optimizer, parameters, monkeypatch)

    assert waits == [], "waiting ends a capture"
    assert not is_guarded(fence, parameters)
    step(optimizer, parameters)
    assert is_guarded(fence, parameters) is later


@pytest.mark.parametrize("kind", [TwoSteps, torch.optim.SGD])
def test_a_tensor_of_an_unstepped_optimizer_too_is_not_guarded(kind: Any) -> None:
    alone, shared = weights((3,)), weights((2,))
    first, second = torch.optim.SGD([*alone, *shared]), kind(shared)
    fence = Fence([first, second])
    step(first, [*alone, *shared])

    guarded = fence.guarded()
    assert alone[0].data_ptr() in guarded
    assert shared[0].data_ptr() not in guarded


def test_an_optimizer_distrusted_once_is_never_trusted_again() -> None:
    parameters = weights()
    optimizer = torch.optim.SGD(parameters)
    fence = Fence([optimizer])
    fence.distrust()
    for _ in range(2):
        step(optimizer, parameters)
        assert not is_guarded(fence, parameters)


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_waits_before_it_writes_and_before_its_closure(with_closure: bool) -> None:
    parameter, seen = nn.Parameter(torch.ones(2)), list[Any]()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    fence = Fence([optimizer])
    fence.shut(lambda: seen.append(parameter.tolist()))

    def closure() -> float:
        seen.append("closure")
        return 0.0

    parameter.grad = torch.ones(2)
    optimizer.step(closure if with_closure else None)  # type: ignore[arg-type]

    assert seen == [[1.0, 1.0], "closure"][: 1 + with_closure]
    assert parameter.tolist() == [0.0, 0.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_does_not_wait_for_an_image_of_its_parent() -> None:
    parameters = weights()
    optimizer = torch.optim.SGD(parameters)
    Fence([optimizer]).shut(lambda: os._exit(1))

    if (child := os.fork()) == 0:
        signal.alarm(10)
        try:
            step(optimizer, parameters)
        except BaseException:
            os._exit(2)
        os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
