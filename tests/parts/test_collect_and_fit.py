"""A checkpoint goes into the live objects whole or not at all, and what does not fit is named."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from resumable import CannotStore, ResumableWarning, RunState, StateMismatch, UsageError
from resumable.parts.parts import SLOTS, Parts
from resumable.position.position import Position


class Net(nn.Module):
    """A backbone and a head."""

    def __init__(self, seed: int = 0, classes: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Linear(3, 3)
        self.head = nn.Linear(3, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(inputs))
        return out


def _adam(model: nn.Module, lr: float = 0.5, **options: Any) -> torch.optim.Adam:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr, **options)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()


def _save(run_dir: Path, model: nn.Module, **parts: Any) -> torch.optim.Adam:
    optimizer = _adam(model)
    with RunState.load(run_dir, model=model, optimizer=optimizer, **parts) as state:
        _train(model, optimizer)
        state.save()
    return optimizer


def _message(run_dir: Path, **parts: Any) -> str:
    with pytest.raises(StateMismatch) as caught:
        RunState.load(run_dir, **parts)
    return str(caught.value)


@pytest.mark.proves("never a silent change")
def test_all_that_does_not_fit_is_named_at_once_with_shapes(run_dir: Path) -> None:
    model: Any = Net()
    model.tied = nn.Linear(3, 3)
    model.tied.weight = model.backbone.weight
    model.gone = nn.Linear(1, 1, bias=False)
    _save(run_dir, model)
    model = Net(classes=5)
    model.tied = nn.Linear(3, 3)
    model.added = nn.Parameter(torch.zeros(4))
    model.head.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    model.backbone.bias.requires_grad_(False)

    message = _message(run_dir, model=model, optimizer=torch.optim.Adam(model.parameters()))

    for line in (
        "model.gone.weight: missing in the code, float32[1, 1]",
        "model.added: new in the code, float32[4]",
        "model.head.weight: float32[2, 3] in the checkpoint, float32[5, 3] in the code",
        "model.head.bias: float32[2] in the checkpoint, float64[2] in the code",
        "model.backbone.weight = tied.weight: one tensor only in the checkpoint",
        "model.backbone.bias.requires_grad: frozen in the code now, not so before",
        "optimizer.gone.weight: missing in the code (parameter group 0)",
        "optimizer.tied.weight: new in the code (parameter group 0)",
    ):
        assert f"\n  {line}\n" in message
    assert "allow=['model.added', 'model.backbone.bias.requires_grad'," in message


def test_weights_that_are_tied_only_in_the_code_are_named(run_dir: Path) -> None:
    model: Any = Net()
    model.other = nn.Linear(3, 3)
    _save(run_dir, model)
    model = Net()
    model.other = nn.Linear(3, 3)
    model.other.weight = model.backbone.weight

    assert "model.backbone.weight = other.weight: one tensor only in the code" in _message(
        run_dir, model=model, optimizer=_adam(model)
    )


@pytest.mark.parametrize(
    "allow",
    [
        ["model.head.*"],
        ["head.*"],
        ["model.head.weight", "model.head.bias"],
        ["head.weight", "*.bias"],
        ["model"],
    ],
)
def test_what_is_allowed_stays_as_the_script_made_it(run_dir: Path, allow: list[str]) -> None:
    saved = Net()
    moments = _save(run_dir, saved).state[saved.backbone.weight]["exp_avg"]
    for seed in (1, 2):
        model, fresh = Net(seed, classes=5), Net(seed, classes=5)
        optimizer = _adam(model)
        RunState.load(run_dir, model=model, optimizer=optimizer, allow=allow).close()

        assert torch.equal(model.backbone.weight, saved.backbone.weight)
        assert torch.equal(model.head.weight, fresh.head.weight)
        assert torch.equal(optimizer.state[model.backbone.weight]["exp_avg"], moments)
        assert model.head.weight not in optimizer.state


@pytest.mark.parametrize("allow", [["model.head.weight"], ["backbone.*"], ["optimizer.*"], ["scheduler"]])
def test_only_what_is_named_is_allowed(run_dir: Path, allow: list[str]) -> None:
    _save(run_dir, Net())
    model = Net(1, classes=5)
    before = copy.deepcopy(model.state_dict())

    with pytest.raises(StateMismatch, match=r"model\.head\.bias"):
        RunState.load(run_dir, model=model, optimizer=_adam(model), allow=allow)

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_unfreezing_that_is_allowed_keeps_the_weights(run_dir: Path) -> None:
    saved = Net()
    saved.backbone.requires_grad_(False)
    _save(run_dir, saved)
    model = Net(1)
    RunState.load(
        run_dir, model=model, optimizer=(optimizer := _adam(model)), allow=["backbone.*", "optimizer.*"]
    ).close()

    assert torch.equal(model.backbone.weight, saved.backbone.weight)
    assert model.backbone.weight.requires_grad
    assert len(optimizer.state) == 2


def test_parts_that_are_missing_or_new_are_named_and_left_out_if_allowed(run_dir: Path) -> None:
    saved = Net()
    _save(run_dir, saved, extra={"old": {"a": 1}})
    model, fresh = Net(1), {"b": 2}
    parts: dict[str, Any] = {"model": model, "optimizer": _adam(model), "extra": {"new": fresh}}

    message = _message(run_dir, **parts)
    RunState.load(run_dir, **parts, allow=["extra.*"]).close()

    assert "extra.old: in the checkpoint, but not given to RunState" in message
    assert "extra.new: given to RunState, but not in the checkpoint" in message
    assert fresh == {"b": 2}
    assert torch.equal(model.head.weight, saved.head.weight)


def test_a_scheduler_of_another_class_is_refused(run_dir: Path) -> None:
    def stages(optimizer: Any, second: Any) -> Any:
        first = lr_scheduler.ConstantLR(optimizer, 0.5, 2)
        return lr_scheduler.SequentialLR(optimizer, [first, second(optimizer)], [2])

    model = Net()
    optimizer = _adam(model)
    scheduler = stages(optimizer, lambda o: lr_scheduler.StepLR(o, 2))
    with RunState.load(run_dir, model=model, optimizer=optimizer, scheduler=scheduler) as state:
        state.save()
    optimizer = _adam(model)
    scheduler = stages(optimizer, lambda o: lr_scheduler.ExponentialLR(o, 0.5))

    assert (
        "scheduler: SequentialLR(ConstantLR, StepLR) in the checkpoint, "
        "SequentialLR(ConstantLR, ExponentialLR) in the code"
    ) in _message(run_dir, model=model, optimizer=optimizer, scheduler=scheduler)


def test_a_scheduler_may_keep_functions_of_torchs(run_dir: Path) -> None:
    class Annealing(lr_scheduler.ExponentialLR):
        """What SWALR was like in older versions."""

        def __init__(self, optimizer: Any) -> None:
            self.anneal = swa_utils.SWALR._cosine_anneal
            super().__init__(optimizer, 0.5)

    for _ in range(3):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = lr_scheduler.ChainedScheduler([Annealing(optimizer)])
        with RunState.load(run_dir, model=model, optimizer=optimizer, scheduler=scheduler) as state:
            _train(model, optimizer, 1)
            scheduler.step()
            state.save()

    assert scheduler.get_last_lr() == [0.5 * 0.5**3]


def test_a_setting_of_many_numbers_comes_back_without_being_compared(run_dir: Path) -> None:
    for value in (1.0, 2.0, 3.0):
        model = Net()
        group = {"params": list(model.parameters()), "per_row": torch.full((2,), value)}
        optimizer = torch.optim.SGD([group], lr=0.5)
        with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
            state.save()

    assert optimizer.param_groups[0]["per_row"].tolist() == [1.0, 1.0]


def test_the_users_own_scheduler_may_be_renamed(run_dir: Path) -> None:
    class Warmup(lr_scheduler.ExponentialLR):
        """A subclass of a scheduler."""

    class Renamed(Warmup):
        """The same."""

    for kind in (Warmup, Renamed, Warmup):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = kind(optimizer, 0.5)
        with RunState.load(run_dir, model=model, optimizer=optimizer, scheduler=scheduler) as state:
            _train(model, optimizer, 1)
            scheduler.step()
            state.save()

    assert scheduler.get_last_lr() == [0.5 * 0.5**3]


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.5, total_iters=2), lr_scheduler.LambdaLR(o, lambda n: 0.5**n)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.5)], o
    ),
}


def _curve(run_dir: Path, kind: str, lrs: list[float], **options: Any) -> list[float]:
    """Train for two steps with each of the learning rates, and return those that were used."""
    curve = []
    for lr in lrs:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        scheduler = SCHEDULES[kind](optimizer)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        with RunState.load(run_dir, **parts, **options) as state:
            if scheduler:
                assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
            for _ in range(2):
                curve.append(optimizer.param_groups[0]["lr"])
                _train(model, optimizer, 1)
                if scheduler:
                    scheduler.step()
            state.save()
    return curve


@pytest.mark.quick(6)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_checkpoints_learning_rate_wins_and_one_warning_says_so(run_dir: Path, kind: str) -> None:
    expected = _curve(run_dir / "straight", kind, [0.5] * 4)
    begun = _curve(run_dir, kind, [0.5])

    with pytest.warns(ResumableWarning) as caught:
        resumed = _curve(run_dir, kind, [0.25] * 3)

    assert begun + resumed == expected
    assert [str(w.message) for w in caught if w.category is ResumableWarning] == [
        f"{run_dir} has changed since checkpoint {number}:\n  will change bits  optimizer.lr  0.5  -> 0.25  "
        "the checkpoint's is used; the code's with override=['optimizer.lr']"
        for number in (1, 2, 3)
    ]


@pytest.mark.quick(6)
@pytest.mark.parametrize("kind", SCHEDULES)
def test_an_overridden_learning_rate_scales_the_whole_schedule(run_dir: Path, kind: str) -> None:
    expected = _curve(run_dir / "straight", kind, [0.5] * 4)
    begun = _curve(run_dir, kind, [0.5])

    with pytest.warns(ResumableWarning, match="0.5  -> 0.25  the code's is used, as over") as caught:
        resumed = _curve(run_dir, kind, [0.25] * 3, override=["optimizer.lr"])

    assert begun + resumed == expected[:2] + [lr / 2 for lr in expected[2:]]
    assert [w.category for w in caught].count(ResumableWarning) == 1


def test_a_learning_rate_of_the_code_needs_no_scheduler_to_be_left(run_dir: Path) -> None:
    _curve(run_dir, "exponential", [0.5])
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)

    with pytest.warns(ResumableWarning, match="the code's is used, as override= says"):
        RunState.load(
            run_dir, model=model, optimizer=optimizer, allow=["scheduler"], override=["optimizer.lr"]
        ).close()

    assert optimizer.param_groups[0]["lr"] == 0.25 * 0.5 * 0.5


def _all(change: bool = False) -> dict[str, Any]:
    model = Net()
    optimizer = _adam(model, betas=(0.5, 0.9) if change else (0.9, 0.9), weight_decay=0.25 if change else 0.5)
    first = lr_scheduler.StepLR(optimizer, 7 if change else 5)
    second = lr_scheduler.ExponentialLR(optimizer, 0.25 if change else 0.5)
    milestones = [9 if change else 8]
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": lr_scheduler.SequentialLR(optimizer, [first, second], milestones),
        "scaler": torch.amp.GradScaler("cpu", init_scale=32.0 if change else 64.0),
    }


CHANGES = {
    "optimizer.betas": ("(0.9, 0.9)", "(0.5, 0.9)"),
    "optimizer.weight_decay": ("0.5", "0.25"),
    "scheduler._milestones": ("[8]", "[9]"),
    "scheduler._schedulers.0.step_size": ("5", "7"),
    "scheduler._schedulers.1.gamma": ("0.5", "0.25"),
    "scaler.scale": ("64.0", "32.0"),
}


def _settings(parts: dict[str, Any]) -> list[Any]:
    group, scheduler = parts["optimizer"].param_groups[0], parts["scheduler"].state_dict()
    inner = scheduler["_schedulers"]
    found = [group["betas"], group["weight_decay"], scheduler["_milestones"]]
    return [*found, inner[0]["step_size"], inner[1]["gamma"], parts["scaler"].get_scale()]


@pytest.mark.proves("never a silent change")
def test_every_setting_that_changed_is_named_once_and_the_checkpoint_wins(run_dir: Path) -> None:
    with RunState.load(run_dir, **_all()) as state:
        state.save()
    for _ in range(2):
        parts = _all(change=True)
        with pytest.warns(ResumableWarning) as caught, RunState.load(run_dir, **parts) as state:
            state.save()

        (text,) = [str(w.message) for w in caught]
        rows = [re.split("  +", line.strip()) for line in text.splitlines()[1:]]
        assert [(name, (then, now)) for _, name, then, now, _ in rows] == [
            (name, (then, f"-> {now}")) for name, (then, now) in CHANGES.items()
        ]
        assert [note for *_, note in rows] == [
            f"the checkpoint's is used; the code's with override=['{name}']" for name in CHANGES
        ]
        assert _settings(parts) == _settings(_all())


def test_every_setting_can_be_overridden_and_the_next_resume_is_quiet(run_dir: Path) -> None:
    with RunState.load(run_dir, **_all()) as state:
        state.save()
    with pytest.warns(ResumableWarning) as caught:
        state = RunState.load(
            run_dir, **_all(change=True), override=["optimizer.*", "scheduler.*", "scaler.*"]
        )
    state.save()
    state.close()

    (text,) = [str(w.message) for w in caught]
    assert text.count("the code's is used, as override= says") == len(CHANGES)
    for _ in range(2):
        parts = _all(change=True)
        RunState.load(run_dir, **parts, override=["optimizer.betas"]).close()

        assert _settings(parts) == _settings(_all(change=True))


@pytest.mark.parametrize("override", ["optimizer.lrr", "model.weight", "lr", "scheduler.gamma"])
def test_an_override_that_names_no_setting_is_refused(run_dir: Path, override: str) -> None:
    model = Net()

    with pytest.raises(UsageError, match=rf"override='{override}' names no setting(?s:.*)optimizer\.lr"):
        RunState.load(run_dir, model=model, optimizer=_adam(model), override=[override])

    assert not run_dir.exists()


class Extra:
    """A part that takes its state, and then may refuse it."""

    def __init__(self, value: float) -> None:
        self.value = torch.tensor(value)
        self.errors: Iterator[BaseException | None] = iter([])

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if error := next(self.errors, None):
            raise error


def _everything(seed: int) -> dict[str, Any]:
    model: Any = Net(seed)
    model.register_buffer("cache", torch.full((seed + 1,), float(seed)), persistent=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5))
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(seed + 1):
        _train(model, optimizer, 1)
        scheduler.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=float(2**seed))
    extra: dict[str, Any] = {
        "first": Extra(seed),
        "dict": {"seed": [seed], 3: torch.full((2,), float(seed))},
        "numpy": np.random.default_rng(seed),
        "module": nn.Linear(1, 1),
        "torch": torch.Generator().manual_seed(seed),
        "last": Extra(seed),
    }
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "extra": extra}


def _save_everything(run_dir: Path) -> None:
    parts = _everything(0)
    with RunState.load(run_dir, **parts) as state:
        parts["model"].head.requires_grad_(False)
        parts["extra"]["module"].eval()
        parts["model"].register_buffer("made", torch.ones(2), persistent=False)
        state.vars["a"] = 1
        state.save()


def _look(parts: dict[str, Any]) -> str:
    """Return all that can be seen of the parts and of the generators, as text."""
    torch.set_printoptions(precision=17)
    model, extra = parts["model"], parts["extra"]
    flags = [p.requires_grad for p in model.parameters()], [m.training for m in model.modules()]
    seen = [model.state_dict(), dict(model.named_buffers()), flags, parts["optimizer"].state_dict()]
    seen += [parts["scheduler"].state_dict(), parts["scaler"].state_dict(), extra["dict"]]
    seen += [
        extra["first"].value,
        extra["last"].value,
        extra["module"].state_dict(),
        extra["module"].training,
    ]
    seen += [extra["numpy"].bit_generator.state, extra["torch"].get_state().tolist()]
    seen += [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    return repr(seen)


@pytest.mark.quick(3)
@pytest.mark.proves("all or nothing")
@pytest.mark.filterwarnings("ignore:(?s).* has changed since .*scaler.scale")
@pytest.mark.parametrize("place", ["model", "optimizer", "scheduler", "scaler", "first", "last"])
@pytest.mark.parametrize("error", [ValueError("not this"), KeyboardInterrupt()])
def test_a_load_that_fails_anywhere_leaves_everything_as_it_was(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    _save_everything(run_dir)
    parts = _everything(1)
    live = parts["extra"][place] if place in parts["extra"] else parts[place]
    _fail_once_loaded(monkeypatch, live, error)
    before, value = _look(parts), parts["optimizer"].param_groups[0]["lr"]

    with pytest.raises(
        (StateMismatch, KeyboardInterrupt), match=r"^$|refused its state: ValueError: not this"
    ):
        RunState.load(run_dir, **parts)

    assert _look(parts) == before
    assert parts["optimizer"].param_groups[0]["lr"] is value


def _fail_once_loaded(monkeypatch: pytest.MonkeyPatch, live: Any, error: BaseException) -> None:
    load = type(live).load_state_dict
    failures = iter([error])

    def fail(self: Any, state: Any, *args: Any) -> None:
        load(self, state, *args)
        for failure in failures if self is live else ():
            raise failure

    monkeypatch.setattr(type(live), "load_state_dict", fail)


@pytest.mark.filterwarnings("ignore:(?s).* has changed since .*scaler.scale")
def test_a_part_that_refuses_its_own_state_stops_no_other_rollback(run_dir: Path) -> None:
    _save_everything(run_dir)
    parts = _everything(1)
    parts["extra"]["first"].errors = iter([None, ValueError("its own")])
    parts["extra"]["last"].errors = iter([ValueError("the checkpoint's")])
    before = _look(parts)

    with pytest.raises(StateMismatch, match=r"extra\.last refused its state: ValueError: the checkpoint's"):
        RunState.load(run_dir, **parts)

    assert _look(parts) == before


def test_going_back_that_fails_keeps_the_variables_and_the_place(run_dir: Path) -> None:
    extra = Extra(0.0)
    with RunState.load(run_dir, extra={"it": extra}) as state:
        for _ in state.steps(2):
            state.vars["n"] = state.step
            state.save()
        extra.errors = repeat(ValueError("not this"))
        for _ in range(2):
            with pytest.raises(StateMismatch):
                state.restore(1)

            assert (state.vars, state.step) == ({"n": 1}, 2)


def test_what_cannot_be_stored_is_named_by_its_path(run_dir: Path) -> None:
    model = Net()
    with (
        RunState.load(run_dir, model=model, extra={"it": {"a": {"b": print}}}) as state,
        pytest.raises(CannotStore, match=r"extra\.it\.a\.b is a function"),
    ):
        state.save()

    assert not list((run_dir / "checkpoints").glob("*"))


def test_a_setting_that_cannot_be_stored_is_named_at_the_first_save(run_dir: Path) -> None:
    class Schedule:
        """A schedule that holds a function."""

        def __init__(self) -> None:
            self.inner = lambda step: 1.0

        def __call__(self, step: int) -> float:
            return self.inner(step)

    model = Net()
    optimizer = _adam(model)
    scheduler = lr_scheduler.LambdaLR(optimizer, Schedule())
    state = RunState.load(run_dir, model=model, optimizer=optimizer, scheduler=scheduler)

    with pytest.raises(CannotStore, match=r"scheduler\.lr_lambdas\.0\.inner is a function"):
        state.save()


def test_a_part_that_does_not_exist_cannot_be_put_back(run_dir: Path) -> None:
    with RunState.load(run_dir, model={"G": Net(), "D": Net()}) as state:
        state.save()

        with pytest.raises(
            UsageError, match=r"there is no part 'E'\.\nFix: the parts are: model\.G, model\.D"
        ):
            state.restore("newest", only="E")


@pytest.mark.parametrize(("only", "expected"), [("extra.a", [1, 9]), ("extra", [1, 1]), ("extra.ab", [9, 1])])
def test_one_part_or_all_of_a_slot_can_be_put_back(run_dir: Path, only: str, expected: list[int]) -> None:
    extra: dict[str, dict[str, int]] = {"a": {"n": 1}, "ab": {"n": 1}}
    with RunState.load(run_dir, extra=extra) as state:
        state.save()
        for _ in range(2):
            extra["a"]["n"] = extra["ab"]["n"] = 9
            state.restore("newest", only=only)

            assert [extra["a"]["n"], extra["ab"]["n"]] == expected


def _change_buffer(parts: dict[str, Any]) -> None:
    parts["model"].cache = parts["model"].cache + 1


def _replace_vars(parts: dict[str, Any]) -> None:
    parts["extra"]["dict"]["seed"] = [9]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda parts: parts["scheduler"].step(), "optimizer, scheduler"),
        (_change_buffer, "model"),
        (_replace_vars, "extra.dict"),
        (lambda parts: parts["extra"]["numpy"].random(), "extra.numpy"),
        (lambda parts: parts["model"].head.eval(), "model"),
    ],
)
def test_a_part_that_changes_after_the_save_of_its_body_is_named(
    run_dir: Path, change: Callable[[dict[str, Any]], Any], named: str
) -> None:
    parts = _everything(0)

    def train(state: RunState) -> None:
        for _ in state.steps(4):
            _train(parts["model"], parts["optimizer"], 1)
            state.save()
            change(parts)

    with RunState.load(run_dir, **parts) as state, pytest.warns(ResumableWarning) as caught:
        train(state)

    assert [str(w.message).partition(" changed after save")[0] for w in caught] == [named]


def test_a_part_that_is_only_read_after_the_save_is_not_named(run_dir: Path) -> None:
    parts = _everything(0)
    with RunState.load(run_dir, **parts) as state:
        for _ in state.steps(2):
            _train(parts["model"], parts["optimizer"], 1)
            state.save()
            parts["model"](torch.ones(1, 3))
            parts["extra"]["dict"][3] = parts["extra"]["dict"][3].clone()


def test_one_metric_alone_decides_what_is_best(run_dir: Path) -> None:
    with pytest.raises(UsageError, match="both maximize='a' and minimize='b' are given"):
        RunState.load(run_dir, maximize="a", minimize="b")


@pytest.mark.parametrize("total", [-1, 1.5, "3", True])
def test_a_total_has_to_be_a_count(run_dir: Path, total: Any) -> None:
    with RunState.load(run_dir) as state, pytest.raises(UsageError, match=f"total={total!r} is not a count"):
        next(iter(state.steps(total)))


def test_a_warning_that_is_an_error_comes_before_anything_is_touched(run_dir: Path) -> None:
    _save_everything(run_dir)
    parts = _everything(1)
    before = _look(parts)

    for _ in range(2):
        with pytest.raises(ResumableWarning, match=r"scaler\.scale  1\.0  -> 2\.0"):
            RunState.load(run_dir, **parts)

    assert _look(parts) == before


class Spread(nn.Linear):
    """A module with a parameter that only its own method knows."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.far = [nn.Parameter(torch.zeros(1, device="meta"))]

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        yield from super().named_parameters(*args, **kwargs)
        yield "far", self.far[0]


def test_a_device_that_only_a_models_own_method_knows_is_in_use() -> None:
    parts = Parts({**dict.fromkeys(SLOTS), "model": Spread()}, {}, Position({}))

    assert parts.devices_in_use() == {"cpu", "meta"}


@pytest.mark.parametrize("keyword", ["allow", "override"])
def test_one_string_is_not_read_letter_by_letter(run_dir: Path, keyword: str) -> None:
    with pytest.raises(UsageError, match=f"{keyword}='model.head.*' is not a list of names"):
        RunState.load(run_dir, **{keyword: "model.head.*"})

    assert not run_dir.exists()
