"""Optimizers and gradient scalers are put back exactly, their state by the names of the parameters."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from resumable import RunState, StateMismatch, Unsupported

Make = Callable[[nn.Module], Any]


def _net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _train(model: nn.Module, optimizers: Any, steps: Iterable[int]) -> None:
    for step in steps:
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        model(inputs).square().sum().backward()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()


def _resumed(run_dir: Path, make: Make, build: Callable[[int], nn.Module] = _net) -> tuple[nn.Module, Any]:
    """Train three times for two steps, each time with new objects."""
    for resume in range(3):
        model = build(resume)
        optimizer = make(model)
        with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
            _train(model, optimizer, range(2 * resume, 2 * resume + 2))
            state.save()
    return model, optimizer


def _assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, then), now in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(then, now), name


class Held:
    """A parameter of no module."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = nn.Parameter(tensor)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor.data.copy_(state["tensor"])


class FloatMomentum(torch.optim.Optimizer):
    """Momentum in float32 whatever the weights are, and a state that belongs to no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.scale = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict["scale"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "scale"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.scale *= 0.9
        self.state["whole"]["steps"] = self.state["whole"].get("steps", 0) + 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            momentum = state.get("momentum", torch.zeros_like(parameter, dtype=torch.float32))
            state["momentum"] = momentum * 0.9 + parameter.grad.float() / 3
            parameter.sub_((0.01 * self.scale * state["momentum"]).to(parameter.dtype))


def test_moments_are_named_after_their_parameters_in_the_file(run_dir: Path) -> None:
    _, optimizer = _resumed(run_dir, lambda m: torch.optim.Adam(m.parameters()))

    found = load_file(run_dir / "newest" / "optimizer.safetensors")

    assert {"exp_avg.0.weight", "exp_avg_sq.2.bias", "step.2.weight"} <= found.keys()
    momentum = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"]
    assert torch.equal(found["exp_avg.0.weight"], momentum)


def test_reordered_parameters_still_get_their_own_moments(run_dir: Path) -> None:
    straight = _net()
    _train(straight, torch.optim.Adam(straight.parameters(), foreach=False), range(6))
    orders = iter([1, -1, 1])

    def make(model: nn.Module) -> torch.optim.Adam:
        return torch.optim.Adam(list(model.parameters())[:: next(orders)], foreach=False)

    resumed, _ = _resumed(run_dir, make)

    _assert_equal(straight, resumed)


def test_float32_moments_of_bfloat16_weights_keep_their_bits(run_dir: Path) -> None:
    def build(seed: int) -> nn.Module:
        return _net(seed).bfloat16()

    def train(model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
        for step in steps:
            inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            model(inputs.bfloat16()).square().sum().backward()
            optimizer.step()

    straight = build(0)
    expected = FloatMomentum(straight.parameters())
    train(straight, expected, range(6))
    for resume in range(3):
        model = build(resume)
        optimizer = FloatMomentum(model.parameters())
        with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
            train(model, optimizer, range(2 * resume, 2 * resume + 2))
            state.save()

    _assert_equal(straight, model)
    for then, now in zip(straight.parameters(), model.parameters(), strict=True):
        assert optimizer.state[now]["momentum"].dtype == torch.float32
        assert torch.equal(expected.state[then]["momentum"], optimizer.state[now]["momentum"])


def test_state_that_belongs_to_no_parameter_comes_back(run_dir: Path) -> None:
    _, optimizer = _resumed(run_dir, lambda m: FloatMomentum(m.parameters()))

    assert optimizer.state["whole"] == {"steps": 6}
    assert optimizer.scale == 1.0 * 0.9 * 0.9 * 0.9 * 0.9 * 0.9 * 0.9


def test_the_state_of_a_live_optimizer_does_not_outlive_going_back(run_dir: Path) -> None:
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        state.save()
        for _ in range(2):
            _train(model, optimizer, range(2))
            state.restore("newest")

            assert not optimizer.state


def test_two_optimizers_can_share_one_model(run_dir: Path) -> None:
    def make(model: Any) -> list[Any]:
        return [torch.optim.Adam(model[0].parameters()), torch.optim.SGD(model[2].parameters(), momentum=0.9)]

    straight = _net()
    _train(straight, make(straight), range(6))
    for resume in range(3):
        model = _net(resume)
        optimizers = make(model)
        with RunState.load(run_dir, model=model, optimizer=dict(zip("ab", optimizers, strict=True))) as state:
            _train(model, optimizers, range(2 * resume, 2 * resume + 2))
            state.save()

    _assert_equal(straight, model)


def test_a_module_in_extra_has_moments_of_its_own(run_dir: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, nn.Module, Any]:
        torch.manual_seed(seed)
        model, other = nn.ModuleDict({"head": nn.Linear(3, 3)}), nn.Linear(3, 3)
        return model, other, torch.optim.Adam([*other.parameters(), *model.parameters()])

    model, other, optimizer = build(0)
    _train(nn.Sequential(model["head"], other), optimizer, range(2))
    moments = [copy.deepcopy(state["exp_avg"]) for state in optimizer.state.values()]
    with RunState.load(run_dir, model=model, optimizer=optimizer, extra={"head": other}) as state:
        state.save()
    for seed in (1, 2):
        model, other, optimizer = build(seed)
        RunState.load(run_dir, model=model, optimizer=optimizer, extra={"head": other}).close()

        for then, now in zip(moments, optimizer.state.values(), strict=True):
            assert torch.equal(then, now["exp_avg"])


def test_parameters_of_no_module_go_by_their_place_in_the_optimizer(run_dir: Path) -> None:
    for seed in range(3):
        held = Held(torch.full((2,), float(seed + 1)))
        optimizer = torch.optim.SGD([held.tensor], lr=0.125, momentum=0.5)
        with RunState.load(run_dir, optimizer=optimizer, extra={"held": held}) as state:
            held.tensor.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.save()

    saved = load_file(run_dir / "newest" / "optimizer.safetensors")
    assert sorted(saved) == ["loose.group0.0", "momentum_buffer.group0.0"]
    assert saved["momentum_buffer.group0.0"].tolist() == [2.125, 2.125]
    assert held.tensor.tolist() == [0.171875, 0.171875]


def test_a_trained_parameter_of_no_part_comes_back(run_dir: Path) -> None:
    for expected in (0.875, 0.75, 0.625):
        model, temperature = _net(), nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.125)
        with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
            temperature.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.save()

        assert temperature.tolist() == [expected] * 3
    optimizer = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(4))], lr=0.125)
    with pytest.raises(StateMismatch, match=r"optimizer.group0.4: float32\[3\] in the checkpoint"):
        RunState.load(run_dir, model=model, optimizer=optimizer)


def test_parameters_that_the_optimizer_knows_by_name_go_by_it(run_dir: Path) -> None:
    for order in (1, -1, -1):
        named = {"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(3))}
        optimizer = torch.optim.SGD(list(named.items())[::order], lr=0.1, momentum=0.9)
        with RunState.load(run_dir, optimizer=optimizer) as state:
            sum(parameter.sum() for parameter in named.values()).backward()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            state.save()

    for parameter in named.values():
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.full_like(parameter, 2.71))


def test_a_setting_that_the_checkpoint_lacks_stays_as_in_the_code(run_dir: Path) -> None:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    del optimizer.param_groups[0]["fused"]
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        state.save()
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        RunState.load(run_dir, model=model, optimizer=optimizer).close()

        assert optimizer.param_groups[0]["fused"] is True


def test_another_number_of_groups_is_refused_and_starts_fresh_if_allowed(run_dir: Path) -> None:
    model = _net()
    optimizer = torch.optim.Adam(model.parameters())
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        _train(model, optimizer, range(2))
        state.save()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.Adam(groups)

    with pytest.raises(StateMismatch, match="optimizer: 1 parameter groups in the checkpoint, 2 in the code"):
        RunState.load(run_dir, model=model, optimizer=optimizer)
    RunState.load(run_dir, model=model, optimizer=optimizer, allow=["optimizer"]).close()

    assert not optimizer.state
    assert len(optimizer.param_groups) == 2


def test_a_parameter_in_another_group_is_named_and_only_it_starts_fresh(run_dir: Path) -> None:
    def make(model: Any, split: int) -> torch.optim.Adam:
        parameters = list(model.parameters())
        return torch.optim.Adam([{"params": parameters[:split]}, {"params": parameters[split:]}])

    model = _net()
    optimizer = make(model, 2)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        _train(model, optimizer, range(2))
        state.save()
    optimizer = make(model, 3)

    with pytest.raises(StateMismatch, match=r"2\.weight: new in the code \(parameter group 0\)"):
        RunState.load(run_dir, model=model, optimizer=optimizer)
    RunState.load(run_dir, model=model, optimizer=optimizer, allow=["optimizer.2.weight"]).close()

    assert model[2].weight not in optimizer.state
    assert len(optimizer.state) == 3


def test_an_optimizer_of_another_class_is_refused(run_dir: Path) -> None:
    model = _net()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.1)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        _train(model, optimizer, range(2))
        state.save()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(StateMismatch, match="optimizer: Adam in the checkpoint, SGD in the code"):
        RunState.load(run_dir, model=model, optimizer=optimizer)

    assert not optimizer.state
    assert "betas" not in optimizer.param_groups[0]


def test_lbfgs_refuses_parameters_in_another_order(run_dir: Path) -> None:
    model = _net()
    with RunState.load(run_dir, model=model, optimizer=torch.optim.LBFGS(model.parameters())) as state:
        state.save()

    with pytest.raises(StateMismatch, match="another order, on which LBFGS depends"):
        RunState.load(run_dir, model=model, optimizer=torch.optim.LBFGS(list(model.parameters())[::-1]))


@pytest.mark.parametrize("kind", ["Adam", "Adagrad", "SGD"])
def test_a_reshaped_weight_that_is_allowed_starts_with_fresh_moments(run_dir: Path, kind: str) -> None:
    options = {"lr": 0.1, "momentum": 0.9} if kind == "SGD" else {"lr": 0.1}
    model = _net()
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        _train(model, optimizer, range(2))
        state.save()
    kept = copy.deepcopy(optimizer.state[model[0].weight])
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 7))
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    fresh = copy.deepcopy(optimizer.state[model[2].weight])
    RunState.load(run_dir, model=model, optimizer=optimizer, allow=["model.2.*"]).close()

    assert _same(optimizer.state[model[0].weight], kept)
    assert _same(optimizer.state[model[2].weight], fresh)
    _train(model, optimizer, range(2, 4))


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def _scaled(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, loss: float
) -> None:
    optimizer.zero_grad()
    total: Tensor = model(torch.ones(1, 3)).sum() * loss
    scaler.scale(total).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("losses", [[], [1.0, 1.0, 1.0], [1.0, float("inf")], [float("inf")]])
def test_a_scaler_continues_from_its_scale_and_its_growth(run_dir: Path, losses: list[float]) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.SGD, torch.amp.GradScaler]:
        model = _net(seed)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
        return model, torch.optim.SGD(model.parameters(), lr=0.1), scaler

    straight, optimizer, expected = make(0)
    for loss in losses * 3:
        _scaled(straight, optimizer, expected, loss)
    for resume in range(3):
        model, optimizer, scaler = make(resume)
        with RunState.load(run_dir, model=model, optimizer=optimizer, scaler=scaler) as state:
            for loss in losses:
                _scaled(model, optimizer, scaler, loss)
            state.save()

    _assert_equal(straight, model)
    assert scaler.state_dict() == expected.state_dict()


@pytest.mark.parametrize("enabled", [(True, False, False), (False, True, True), (True, False, True)])
def test_a_scaler_may_be_switched_on_and_off(run_dir: Path, enabled: tuple[bool, ...]) -> None:
    model = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    was = enabled[0]
    for on in enabled:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=on)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            state = RunState.load(run_dir, model=model, optimizer=optimizer, scaler=scaler)
        rows = [re.split("  +", str(w.message).splitlines()[-1].strip()) for w in told]
        changed = ["will change bits", "scaler.enabled", f"{was}", f"-> {on}", "the code's is used"]
        assert rows == [changed] * (was is not on)
        was = on
        with state:
            _scaled(model, optimizer, scaler, 1.0)
            state.save()

        assert scaler.is_enabled() is on
        assert scaler.get_scale() == (64.0 if on else 1.0)


@gloo.alone
def test_an_optimizer_of_partial_sums_is_refused(run_dir: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    tensor = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Partial()])
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1)), nn.Parameter(tensor)], 0.1)

    with pytest.raises(Unsupported, match=r"extra\.it: group0\.1 is placed as Partial"):
        RunState.load(run_dir, extra={"it": optimizer})
