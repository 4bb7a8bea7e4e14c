"""Copies of weights, and attributes of models, that change as a training runs and that no checkpoint has."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from resumable import ResumableWarning, RunState

Script = Callable[[Path], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def begun(run_dir: Path, model: nn.Module, **options: Any) -> tuple[RunState, Callable[[], float]]:
    """Return the state of a run, and what trains the model by a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = RunState.load(run_dir, model=model, optimizer=optimizer, progress=False, **options)

    def step() -> float:
        loss = model(torch.ones(3, 2)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return state, step


def blend(into: Any, model: nn.Module) -> None:
    for own, new in zip(into, model.parameters(), strict=True):
        own.data.mul_(0.9).add_(new.data, alpha=0.1)


def an_average_that_is_a_module(run_dir: Path) -> None:
    model = Net()
    average = AveragedModel(model)
    state, step = begun(run_dir, model)
    for _ in state.steps(4):
        step()
        average.update_parameters(model)
        state.save()


def an_average_written_through_data(run_dir: Path) -> None:
    model = Net()
    average = copy.deepcopy(model)
    state, step = begun(run_dir, model)
    for _ in state.steps(4):
        step()
        blend(average.parameters(), model)
        state.save()


class Average:
    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, one in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * one.detach()


def an_average_in_an_object(run_dir: Path) -> None:
    model = Net()
    average = Average(model)
    state, step = begun(run_dir, model)
    for _ in state.steps(4):
        step()
        average.update(model)
        state.save()


def an_average_of_a_trainer(run_dir: Path) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = Net()
            self.average = Average(self.model)
            self.state, self.step = begun(run_dir, self.model)

        def finish_step(self) -> None:
            self.step()
            self.average.update(self.model)

        def fit(self) -> None:
            for _ in self.state.steps(4):
                self.finish_step()
                self.state.save()

    Trainer().fit()


def the_best_weights(run_dir: Path) -> None:
    model, best_weights = Net(), None
    state, step = begun(run_dir, model)
    for _ in state.steps(4):
        loss = step()
        if loss < state.vars.get("best", 1e9):
            state.vars["best"] = loss
            best_weights = copy.deepcopy(model.state_dict())
        state.save()
    assert best_weights is not None


def a_module_that_is_trained_by_hand(run_dir: Path) -> None:
    model, other = Net(), Net()
    state, step = begun(run_dir, model)
    for _ in state.steps(4):
        step()
        with torch.no_grad():
            other.inner.weight += 1
        state.save()


COPIES = {
    an_average_that_is_a_module: "average has weights",
    an_average_written_through_data: "average has weights",
    an_average_in_an_object: r"average\.shadow has weights",
    an_average_of_a_trainer: r"self\.average\.shadow has weights",
    the_best_weights: "best_weights has weights",
    a_module_that_is_trained_by_hand: "other has weights",
}


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x) * min(1.0, self.passes / 10)


class Centred(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().forward(x - self.mean)


class CentredInPlace(Centred):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        return Net.forward(self, x - self.mean)


class CentredByAMethod(Centred):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow(x)
        return Net.forward(self, x - self.mean)

    def follow(self, x: torch.Tensor) -> None:
        if self.training:
            self.mean = torch.lerp(self.mean, x.mean(0), 0.1)


class Tempered(Net):
    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.temperature


class Remembering(Net):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.zeros(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(super().forward(x) + self.hidden)
        self.hidden = hidden.detach()
        return hidden


def trained_as_it_is(run_dir: Path, model: nn.Module) -> None:
    state, step = begun(run_dir, model)
    for _ in state.steps(4):
        step()
        state.save()


def an_attribute_that_the_loop_changes(run_dir: Path) -> None:
    model = Tempered()
    state, step = begun(run_dir, nn.Sequential(model))
    for _ in state.steps(4):
        step()
        model.temperature *= 0.9
        state.save()


class Spiking(Remembering):
    def reset(self) -> None:
        self.hidden = torch.zeros(3, 1)


def reset_before_the_loop(run_dir: Path) -> None:
    model = Spiking()
    state, step = begun(run_dir, model)
    model.reset()
    for _ in state.steps(4):
        step()
        state.save()


ATTRIBUTES: dict[Script, str] = {
    lambda run_dir: trained_as_it_is(run_dir, Spiking()): r"Spiking\.hidden changes",
    reset_before_the_loop: r"Spiking\.hidden changes",
    lambda run_dir: trained_as_it_is(run_dir, Counting()): r"Counting\.passes changes",
    lambda run_dir: trained_as_it_is(run_dir, Centred()): r"Centred\.mean changes",
    lambda run_dir: trained_as_it_is(run_dir, nn.Sequential(CentredInPlace())): r"InPlace\.mean changes",
    lambda run_dir: trained_as_it_is(run_dir, CentredByAMethod()): r"ByAMethod\.mean changes",
    lambda run_dir: trained_as_it_is(run_dir, Remembering()): r"Remembering\.hidden changes",
    an_attribute_that_the_loop_changes: r"Tempered\.temperature changes",
}


@pytest.mark.parametrize("script", [*COPIES, *ATTRIBUTES])
def test_weights_and_attributes_in_no_checkpoint_are_warned_of_by_name(run_dir: Path, script: Script) -> None:
    with pytest.warns(ResumableWarning, match=(COPIES | ATTRIBUTES)[script]) as told:
        script(run_dir)

    assert len(told) == 1


def an_average_that_is_given(run_dir: Path) -> None:
    model = Net()
    average = AveragedModel(model)
    state, step = begun(run_dir, model, extra={"average": average})
    for _ in state.steps(4):
        step()
        average.update_parameters(model)
        state.save()


def an_average_of_an_object_that_is_given(run_dir: Path) -> None:
    model = Net()
    average = Average(model)
    state, step = begun(run_dir, model, extra={"average": average.shadow})
    for _ in state.steps(4):
        step()
        average.update(model)
        state.save()


def the_best_weights_in_vars(run_dir: Path) -> None:
    model = Net()
    state, step = begun(run_dir, model)
    for _ in state.steps(4):
        loss = step()
        if loss < state.vars.get("best", 1e9):
            state.vars["best"] = loss
            state.vars["weights"] = copy.deepcopy(model.state_dict())
        state.save()


def the_model_itself_in_other_objects(run_dir: Path) -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

    model = Net()
    wrapped, loss, live = nn.Sequential(model), Loss(), model.state_dict()
    trained = [*wrapped.parameters()]
    state, step = begun(run_dir, model)
    for _ in state.steps(4):
        step()
        assert loss.training
        assert live
        assert trained
        state.save()


def what_each_body_makes(run_dir: Path) -> None:
    model = Net()
    state, step = begun(run_dir, model)
    for _ in state.steps(4):
        step()
        gradients = [one.grad for one in model.parameters()]
        weights = {name: one.clone() for name, one in model.state_dict().items()}
        best = copy.deepcopy(model)
        assert gradients
        assert weights
        assert best.training
        state.save()


def a_model_that_is_frozen(run_dir: Path) -> None:
    model, teacher = Net(), Net().requires_grad_(False)
    state, step = begun(run_dir, model)
    for _ in state.steps(4):
        step()
        assert teacher(torch.ones(1, 2)) is not None
        state.save()


class Told(Counting):
    """Gives its counter to the checkpoint, and keeps the input of each pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.input = x * 2
        return super().forward(self.input)

    def get_extra_state(self) -> int:
        return self.passes

    def set_extra_state(self, state: int) -> None:
        self.passes = state


class Caching(Net):
    """Keeps what each pass makes again, and a mask that is made once."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(2)
        self.hidden = super().forward(x * self.mask)
        self.passes += 1
        return self.hidden * 2


class Watched(Net):
    """Keeps what each pass has computed for who looks at it, and counts its passes for a log."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.passes = torch.zeros(3, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes % 2 == 0:
            print(f"pass {self.passes}")
        self.attention = torch.sigmoid(super().forward(x))
        return self.attention * 2

    def map(self) -> torch.Tensor:
        return self.attention.mean(0)

    def extra_repr(self) -> str:
        return f"passes={self.passes}"


class Rotary(Net):
    """Builds its tables when a longer sequence comes."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.turns = 0, 1
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or self.length < self.turns:
            self.length = self.turns
            self.table = torch.cos(torch.arange(self.turns))
        return super().forward(x) * self.table[0]


class Rewinding(Spiking):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rewind()
        return super().forward(x) + super().forward(x)

    def rewind(self) -> None:
        self.reset()


def reset_net(model: nn.Module) -> None:
    for one in model.modules():
        if hasattr(one, "reset"):
            one.reset()


class Accuracy(nn.Module):
    """A metric, whose sums are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def reset(self) -> None:
        self.total.zero_()

    def update(self, value: float) -> None:
        self.total += value


def longer_and_longer(run_dir: Path) -> None:
    model = Rotary()
    state, step = begun(run_dir, model)
    for number in state.steps(4):
        model.turns = number + 1
        step()
        state.save()


def reset_in_each_body(run_dir: Path) -> None:
    model, metric = Spiking(), Accuracy()
    state, step = begun(run_dir, model)
    for _ in state.steps(4):
        model.reset()
        metric.reset()
        for _ in range(3):
            metric.update(step())
        print(metric.total)
        state.save()


def reset_by_a_function(run_dir: Path) -> None:
    model = Spiking()
    state, step = begun(run_dir, nn.Sequential(model))

    def train() -> None:
        reset_net(model)
        step()
        step()

    for _ in state.steps(4):
        train()
        state.save()


def a_network_that_each_body_copies(run_dir: Path) -> None:
    model, old, extractor = Net(), Net(), nn.Sequential(Net(), nn.BatchNorm1d(1)).eval()
    state, step = begun(run_dir, model)
    for _ in state.steps(4):
        old.load_state_dict(model.state_dict())
        step()
        assert old(torch.ones(1, 2)) is not None
        assert extractor(torch.ones(2, 2)) is not None
        state.save()


def networks_that_are_given(run_dir: Path) -> None:
    networks, target = {"G": Net(), "D": Net()}, Net()
    optimizers = {name: torch.optim.SGD(one.parameters(), lr=0.1) for name, one in networks.items()}
    generator, discriminator = networks.values()
    state = RunState.load(
        run_dir, model=networks, optimizer=optimizers, extra={"target": target}, progress=False
    )
    for _ in state.steps(8):
        for one in optimizers.values():
            (generator(torch.ones(1, 2)) + discriminator(torch.ones(1, 2))).sum().backward()
            one.step()
            one.zero_grad()
        blend(target.parameters(), generator)
        state.save()


def the_best_weights_in_a_variable_and_in_vars(run_dir: Path) -> None:
    model = Net()
    state, step = begun(run_dir, model)
    best = state.vars.setdefault("best", copy.deepcopy(model.state_dict()))
    for _ in state.steps(4):
        loss = step()
        if loss < state.vars.get("loss", 1e9):
            state.vars["loss"] = loss
            best = state.vars["best"] = copy.deepcopy(model.state_dict())
        state.save()
    assert best


QUIET: list[Script] = [
    longer_and_longer,
    reset_in_each_body,
    reset_by_a_function,
    lambda run_dir: trained_as_it_is(run_dir, Rewinding()),
    a_network_that_each_body_copies,
    networks_that_are_given,
    the_best_weights_in_a_variable_and_in_vars,
    lambda run_dir: trained_as_it_is(run_dir, Watched()),
    an_average_that_is_given,
    an_average_of_an_object_that_is_given,
    the_best_weights_in_vars,
    the_model_itself_in_other_objects,
    what_each_body_makes,
    a_model_that_is_frozen,
    lambda run_dir: trained_as_it_is(run_dir, Told()),
    lambda run_dir: trained_as_it_is(run_dir, Caching()),
]


@pytest.mark.parametrize("script", QUIET)
def test_what_a_checkpoint_has_or_each_pass_makes_is_not_warned_of(run_dir: Path, script: Script) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumableWarning)
        script(run_dir)


def looked_at(run_dir: Path, kept: list[Any], then: Callable[[], None]) -> None:
    """Save twice in a script that keeps a list, and call something at each event of the look at it."""

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_globals["__name__"].startswith("resumable.position.script"):
            frame.f_trace_opcodes = True
            then()
        return trace

    model = Net()
    state, step = begun(run_dir, model)
    for _ in state.steps(2):
        step()
        assert len(kept)
        before = sys.gettrace()
        sys.settrace(trace)
        state.save()
        sys.settrace(before)


def test_a_list_that_grows_while_it_is_looked_at_is_looked_at_once(run_dir: Path) -> None:
    growing: list[list[float]] = [[]]

    def grow() -> None:
        growing.append([])
        assert len(growing) < 2_000_000

    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumableWarning)
        looked_at(run_dir, growing, grow)


def test_a_list_that_is_huge_costs_no_more_than_a_short_one(run_dir: Path) -> None:
    steps = {10: 0, 200_000: 0}
    for length in steps:

        def count(length: int = length) -> None:
            steps[length] += 1

        looked_at(run_dir / str(length), [0.5] * length, count)

    assert steps[200_000] < steps[10] * 1.1
