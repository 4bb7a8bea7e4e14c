"""Every optimizer and every scheduler that torch has continues bit for bit, however often it is resumed."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from resumable import RunState

BEFORE, AFTER, RESUMES = 3, 5, 2


class Net(nn.Module):
    """Weights of two shapes and a bias, so that factored and plain states both occur."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 3)
        self.two = nn.Linear(3, 2, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.two(torch.tanh(self.one(inputs)))
        return out


class Table(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.table((inputs.flatten() * 100).long().remainder(6))
        return out


class Decay:
    """A schedule with a state of its own, which LambdaLR stores."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.9**self.calls


def _optimizers() -> list[str]:
    kinds = vars(torch.optim).items()
    optimizer = torch.optim.Optimizer
    return sorted(
        n for n, c in kinds if inspect.isclass(c) and issubclass(c, optimizer) and c is not optimizer
    )


def _schedulers() -> list[str]:
    kinds = {**vars(lr_scheduler), **{"SWALR": swa_utils.SWALR}}
    scheduler = lr_scheduler.LRScheduler
    found = (n for n, c in kinds.items() if inspect.isclass(c) and issubclass(c, scheduler))
    return sorted(n for n in found if n not in ("LRScheduler", "_LRScheduler"))


def _sequential(optimizer: Any, milestones: list[int]) -> Any:
    stages = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, stages, milestones)


def _nested(optimizer: Any) -> Any:
    stages = [_sequential(optimizer, [2]), lr_scheduler.ExponentialLR(optimizer, 0.8)]
    with warnings.catch_warnings():
        # torch takes the inner one's first step for a step of the user's
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        return lr_scheduler.SequentialLR(optimizer, stages, [5])


def _chained_sequential(optimizer: Any) -> Any:
    links = [_sequential(optimizer, [3]), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(links, optimizer)


def _chained(optimizer: Any) -> Any:
    links = [lr_scheduler.ConstantLR(optimizer, 0.5, 4), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.ChainedScheduler(links, optimizer)


def _can_cycle(optimizer: Any) -> bool:
    return bool({"momentum", "betas"} & optimizer.defaults.keys())


# The arguments that torch asks for; all others are torch's own defaults.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    **{name: {} for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD")},
    **{name: {} for name in ("NAdam", "RAdam", "RMSprop", "Rprop", "SparseAdam")},
    "LBFGS": {"max_iter": 3, "history_size": 4},
    "SGD": {"momentum": 0.9},
    # The oldest torch that the tests run with lacks it.
    **({"Muon": {}} if hasattr(torch.optim, "Muon") else {}),
}
SCHEDULERS: Mapping[str, Callable[[Any], Any]] = {
    "ChainedScheduler": _chained,
    "ChainedScheduler of a sequential": _chained_sequential,
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 6),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.01, 3, cycle_momentum=_can_cycle(o)),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.2, total_iters=8),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4, 7]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "MultiplicativeLR of an object": lambda o: lr_scheduler.MultiplicativeLR(o, Decay()),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.01, 20, cycle_momentum=_can_cycle(o)),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 20, 2.0),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05, 4),
    "SequentialLR": lambda o: _sequential(o, [5]),
    "SequentialLR in itself": _nested,
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
}


class Trial:
    """One model, optimizer and scheduler, and the curve of their learning rates."""

    def __init__(self, optimizer: str, scheduler: str, options: Mapping[str, Any]) -> None:
        self.model: nn.Module = Table() if optimizer == "SparseAdam" else Net()
        # Muon is for matrices only.
        trained = [p for p in self.model.parameters() if optimizer != "Muon" or p.ndim == 2]
        self.optimizer: Any = getattr(torch.optim, optimizer)(trained, **copy.deepcopy(options))
        self.scheduler: Any = SCHEDULERS[scheduler](self.optimizer)
        self.curve: list[float] = []

    def train(self, steps: range) -> None:
        for step in steps:
            inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            loss = self.optimizer.step(lambda inputs=inputs: self._loss(inputs))
            plateau = isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau)
            self.scheduler.step(*([loss.detach() + step] if plateau else []))
            self.curve.append(float(self.optimizer.param_groups[0]["lr"]))

    def _loss(self, inputs: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(inputs).square().sum()
        loss.backward()
        return loss


def _trials(optimizer: str, options: Mapping[str, Any], seed: int) -> dict[str, Trial]:
    torch.manual_seed(seed)
    return {name.replace(" ", "_"): Trial(optimizer, name, options) for name in SCHEDULERS}


def _open(run_dir: Path, trials: Mapping[str, Trial]) -> RunState:
    return RunState.load(
        run_dir,
        model={name: trial.model for name, trial in trials.items()},
        optimizer={name: trial.optimizer for name, trial in trials.items()},
        scheduler={name: trial.scheduler for name, trial in trials.items()},
    )


def _assert_same(one: Any, other: Any, path: str) -> None:
    assert type(one) is type(other), path
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype, path
        assert one.device == other.device, path
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            _assert_same(one[key], other[key], f"{path}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            _assert_same(left, right, f"{path}.{number}")
    elif not callable(one):
        assert one == other, path


def _resumed(run_dir: Path, optimizer: str, options: Mapping[str, Any]) -> dict[str, Trial]:
    """Train, and stop and continue with new objects again and again."""
    trials = _trials(optimizer, options, seed=1)
    for resume in range(RESUMES + 1):
        with _open(run_dir, trials) as state:
            left = range(state.step, BEFORE + resume * AFTER)
            for trial in trials.values():
                trial.train(left)
            state.save()
        if resume < RESUMES:
            stopped, trials = trials, _trials(optimizer, options, seed=100 + resume)
            for name, trial in stopped.items():
                trials[name].curve = trial.curve
    return trials


def _keeps_base_lrs() -> bool:
    # A bug of torch 2.6: the base_lrs of nested schedules are the tensor lr itself, and follow it.
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=torch.tensor(0.01), foreach=False)
    scheduler = SCHEDULERS["ChainedScheduler of a sequential"](optimizer)
    inner = scheduler._schedulers[0]._schedulers[0]
    before = inner.base_lrs[0].item()
    optimizer.param_groups[0]["lr"].fill_(9.0)
    return bool(inner.base_lrs[0].item() == before)


VARIANTS: list[tuple[str, Mapping[str, Any]]] = [
    *OPTIMIZERS.items(),
    *((name, {"foreach": True}) for name in ("Adam", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD")),
    *((name, {"fused": True}) for name in ("Adam", "AdamW", "Adagrad")),
    ("SGD", {"fused": True, "momentum": 0.9, "nesterov": True}),
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "foreach": True, "maximize": True, "weight_decay": 0.1}),
    *((name, {"amsgrad": True}) for name in ("Adam", "AdamW")),
    ("AdamW", {"fused": True, "amsgrad": True}),
    *(("Adam", {"lr": lr, "foreach": False}) for lr in (torch.tensor(0.01),) if _keeps_base_lrs()),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("LBFGS", {"line_search_fn": "strong_wolfe", "max_iter": 3}),
    *[(name, {"nesterov": False}) for name in ("Muon",) if name in OPTIMIZERS],
]


def _id(variant: Any) -> str:
    return variant if isinstance(variant, str) else ",".join(f"{k}={v}" for k, v in variant.items())


@pytest.mark.proves("exact")
@pytest.mark.parametrize(("optimizer", "options"), VARIANTS, ids=_id)
@pytest.mark.quick(20)
def test_two_resumes_are_exact(run_dir: Path, optimizer: str, options: Mapping[str, Any]) -> None:
    expected = _trials(optimizer, options, seed=1)
    for trial in expected.values():
        trial.train(range(BEFORE + RESUMES * AFTER))

    resumed = _resumed(run_dir, optimizer, options)

    for name, trial in expected.items():
        for part in ("model", "optimizer", "scheduler"):
            then, now = (getattr(t, part).state_dict() for t in (trial, resumed[name]))
            _assert_same(dict(then), dict(now), f"{name}.{part}")
        assert trial.curve == resumed[name].curve, name


def test_no_optimizer_of_torch_is_left_out() -> None:
    assert sorted(OPTIMIZERS) == _optimizers(), "give each new optimizer a line in OPTIMIZERS"


def test_no_scheduler_of_torch_is_left_out() -> None:
    covered = sorted({name.partition(" ")[0] for name in SCHEDULERS})
    assert covered == _schedulers(), "give each new scheduler a line in SCHEDULERS"


def test_the_zoo_would_notice_an_optimizer_that_starts_again(run_dir: Path) -> None:
    trained, fresh = (_trials("Adam", {}, seed=1)["StepLR"] for _ in range(2))
    trained.train(range(2))

    with pytest.raises(AssertionError, match=r"optimizer\.state"):
        _assert_same(trained.optimizer.state_dict(), fresh.optimizer.state_dict(), "optimizer")
