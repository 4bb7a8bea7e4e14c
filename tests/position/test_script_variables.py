"""Values that decide how a script's loop continues, and that no checkpoint has, are warned of by name."""

from __future__ import annotations

import copy
import re
import signal
import sys
import textwrap
import warnings
from argparse import Namespace
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, Sampler

from resumable import ResumableWarning, RunState
from resumable.position.script.loop_variables import LoopVariables

__all__ = ["AveragedModel", "Counter", "Namespace", "copy", "defaultdict", "deque", "perf_counter"]
"""What the scripts below use."""

LOSSES = [0.5, 0.4, 0.6, 0.3, 0.7, 0.8, 0.9]


class Stopper:
    def __init__(self) -> None:
        self.bad, self.best, self.is_done = 0, 1.0, False

    def step(self, loss: float) -> bool:
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(loss, self.best)
        self.is_done = self.bad > 3
        return self.is_done


@dataclass(slots=True)
class Slotted:
    bad: int = 0

    def step(self, loss: float) -> bool:
        self.bad += loss < 0.5
        return self.bad > 3


class Settings(NamedTuple):
    temperature: float = 1.0
    epochs: int = 0


@dataclass(frozen=True)
class Frozen:
    temperature: float = 1.0


def cooled(frozen: Frozen) -> Frozen:
    return Frozen(frozen.temperature * 0.9)


class Trainer:
    def __init__(self, step: Callable[[Any], float]) -> None:
        self.step, self.weight, self.passes = step, 1.0, 0
        self.history: list[float] = []

    def fit(self, state: RunState) -> None:
        for _ in state.steps(4):
            self.train()
            state.save()

    def train(self) -> None:
        self.weight *= 0.9
        self.history.append(self.step(self.weight))
        self.passes += 1
        if self.passes % 2 == 0:
            print(self.passes, sum(self.history) / len(self.history))


class Replay:
    def __init__(self) -> None:
        self.values, self.at = np.zeros(8), 0

    def add(self, value: float) -> None:
        self.values[self.at] = value
        self.at = (self.at + 1) % 8

    def sample(self) -> float:
        return float(self.values[np.random.randint(8)])


class Normalized:
    """A loss that is divided by a mean of those before."""

    def __init__(self) -> None:
        self.mean = torch.zeros(1)

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss / (1 + self.mean.sum())


class Centered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.center, self.margin = torch.zeros(1), 0.1
        self.mask: torch.Tensor | None = None

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        loss = (out - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * out.mean().detach()
        return loss


class Masked(Centered):
    """Keeps a mask for the length of the batch."""

    def forward(self, out: torch.Tensor) -> torch.Tensor:
        if self.mask is None or len(self.mask) != len(out):
            self.mask = torch.ones(len(out), 1)
        return (out * self.mask).square().mean()


class Average:
    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, one in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * one.detach()


class Numbers(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        self.scale, self.seen = 0.1, 0

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((1,), float(index)) * self.scale

    def harder(self) -> None:
        self.scale = min(0.5, self.scale * 1.5)


class KnowsItself(Numbers):
    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.scale = saved["scale"]


class Weighted(Sampler[int]):
    def __init__(self) -> None:
        self.weights = torch.ones(2)

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter(torch.multinomial(self.weights, 2, True).tolist())


def run(run_dir: Path, source: str, one: Any = None, net: Any = None, **given: Any) -> list[str]:
    """Run a script's text with a state, a model and what trains it; return what it is warned of."""
    model, data, sampler = net or nn.Linear(1, 1), given.pop("data", None) or Numbers(), Weighted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data, batch_size=1, sampler=sampler)

    def train(loss: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def step(x: Any) -> float:
        return train((model(torch.ones(2, 1)) * x).square().mean())

    scope = dict(globals())
    text = textwrap.indent(textwrap.dedent(source), "    ")
    exec(f"def main(state, model, data, sampler, train, step, one):\n{text}", scope)
    parts = {"model": model, "optimizer": optimizer, "progress": False} | given
    if "batches" in source:
        parts["loader"] = loader
    with warnings.catch_warnings(record=True) as told, RunState.load(run_dir, **parts) as state:
        warnings.simplefilter("always")
        scope["main"](state, model, data, sampler, train, step, one)
    return [str(one.message) for one in told if issubclass(one.category, ResumableWarning)]


def steps(before: str, body: str) -> str:
    """Return a script of four steps, each with a save."""
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    return f"{textwrap.dedent(before).strip()}\nfor n in state.steps(4):\n{body}\n    state.save()\n"


def epochs(before: str, batch: str, after: str = "pass") -> str:
    """Return a script of three epochs, each with a save at its end."""
    inner = textwrap.indent(textwrap.dedent(batch).strip(), "        ")
    after = textwrap.indent(textwrap.dedent(after).strip(), "    ")
    loops = "for epoch in state.epochs(3):\n    for x in state.batches():\n"
    return f"{textwrap.dedent(before).strip()}\n{loops}{inner}\n{after}\n    state.save()\n"


DECAYED = """
    global scale
    scale = 1.0
    def decayed():
        global scale
        scale = 0.9 * scale
        return scale
"""
TRAIN = "train(model(x).square().mean())"

WARNED = {
    # variables
    "weight": steps("weight = 1.0", "step(weight); weight *= 0.9"),
    "count, every fourth": steps("count = 0", "count += 2\nif count % 4 == 0:\n    step(2.0)"),
    "bad": steps("bad = 0", "step(1)\nif (bad := bad + 1) > 9:\n    break"),
    "bad, nonlocal": steps("bad = 0\ndef add():\n    nonlocal bad\n    bad += 1",
                           "step(1); add()\nif bad > 9: break"),
    "smooth": steps("smooth = 0.0", "smooth = 0.9 * smooth + step(1); state.save(loss=smooth)"),
    "count": epochs("count = 0", f"count += 1\nif count % 3 == 0:\n    continue\n{TRAIN}"),
    "best": epochs("best = 1.0", TRAIN, "if LOSSES[epoch] < best:\n    best = LOSSES[epoch]; step(2)"),
    "count, in a while loop": """
        count = 0
        while state.epoch < 4:
            for x in state.batches():
                train(model(x).sum())
            count += 1
            if count % 10 == 9:
                step(1)
            state.save()
    """,
    "bad, in a generator": """
        def losses():
            bad = 0
            for epoch in state.epochs(4):
                for x in state.batches():
                    train(model(x).sum())
                bad = 0 if LOSSES[epoch] < 0.5 else bad + 1
                if bad > 3:
                    break
                state.save()
                yield LOSSES[epoch]
        print(sum(losses()))
    """,
    "lr": steps("group, lr = {'lr': 0.1}, 0.1", "step(1); lr *= 0.9; group['lr'] = lr"),
    "weight, by keyword": steps("def add(n, weight=1.0):\n    step(weight)\nweight = 1.0",
                                "add(n, weight=weight); weight *= 0.9"),
    # tensors, containers and their elements
    "hidden": steps("hidden = torch.zeros(2)", "out = torch.tanh(hidden + model(torch.ones(1)))\n"
                    "train(out.sum()); hidden = out.detach()"),
    "hidden, in a tuple": steps("hidden = (torch.zeros(1), 1)", "out = torch.tanh(model(hidden[0]))\n"
                     "train(out.sum()); hidden = out.detach(), hidden[1]"),
    "weights": steps("weights = np.ones(2)", "step(float(weights[0])); weights = weights * 0.9"),
    "mean": steps("mean = torch.zeros(1)", "step(1 + mean); mean.mul_(0.9).add_(1)"),
    "seen['bad']": steps("seen = {'bad': 0}", "step(1); seen['bad'] += 1\nif seen['bad'] > 9:\n    break"),
    "best[0]": steps("best = [1.0]", "step(1)\nif LOSSES[n] < best[0]:\n    best[0] = LOSSES[n]; step(2)"),
    "args.best": steps("args = Namespace(best=1.0)", "step(1)\nif LOSSES[n] < args.best:\n"
                       "    args.best = LOSSES[n]; step(2)"),
    "rates[-1]": steps("rates = [0.9]", "step(rates[-1]); rates.append(0.9 * rates[-1])"),
    "seen": steps("seen = deque()", "seen.append(n / 2); step(seen[0] + 1)"),
    "last": steps("last = deque([torch.zeros(1)] * 3, maxlen=3)",
                  "last.append(torch.full((1,), step(1 + torch.stack([*last]).sum())))"),
    "means['x']": steps("means = defaultdict(float)", "means['x'] = 0.9 * means['x'] + step(1 + means['x'])"),
    "counts['n']": steps("counts = Counter()", "counts['n'] += 2; step(1 / counts['n'])"),
    "memory": steps("memory = torch.zeros(10)", "memory[state.step % 10] = step(1 + memory.mean()) + 1"),
    "memory, a large array": steps("memory, at = np.zeros(100_000), 0",
                                   "memory[at] = step(1 + memory.mean()) + 1; at += 1"),
    "memory, slices": steps("memory, at = torch.zeros(8), 0",
                            "memory[at : at + 2] = step(1 + memory.mean()) + 1; at = (at + 2) % 8"),
    "order": steps("order = np.arange(6)", "np.random.shuffle(order)\nfor at in order:\n    step(float(at))"),
    "order, a list": steps("order = [0.0, 1.0, 2.0, 3.0]",
                           "np.random.shuffle(order)\nfor at in order:\n    step(at)"),
    # objects
    "stopper.best": steps("stopper = Stopper()", "step(1)\nif stopper.step(LOSSES[n]):\n    break"),
    "stopper.bad": steps("stopper = Slotted()", "step(1)\nif stopper.step(LOSSES[n]):\n    break"),
    "Hot.value": steps("class Hot:\n    value = 1.0", "step(Hot.value); Hot.value *= 0.9"),
    "Warm.value": steps("class Hot:\n    value = 1.0\nclass Warm(Hot):\n    pass",
                        "step(Warm.value); Warm.value *= 0.9"),
    "settings.temperature": steps("settings = Settings()", "step(settings.temperature)\n"
                                  "settings = Settings(settings.temperature * 0.9, settings.epochs + 1)"),
    "frozen.temperature": steps("frozen = Frozen()", "step(frozen.temperature); frozen = cooled(frozen)"),
    "normalized.mean": epochs("normalized = Normalized()", "train(normalized(model(x).square().mean()))"),
    "criterion.center": epochs("criterion = Centered()", "train(criterion(model(x)))"),
    "data.scale": epochs("", TRAIN, "data.scale = min(0.5, data.scale * 1.5)"),
    "data.scale, by a method": epochs("", TRAIN, "data.harder()"),
    "sampler.weights": epochs("", TRAIN, "sampler.weights = torch.arange(1.0, 3.0) * (epoch + 1)"),
    # functions and methods
    "scale": steps(DECAYED, "step(decayed())"),
    "scale, two calls deep": steps(f"{DECAYED}\n    def twice():\n        return 2 * decayed()",
                                   "x = torch.ones(1) * twice(); step(x)"),
    "last, in two functions": steps("global last\nlast = 0.0\ndef remember(loss):\n    global last\n"
                                    "    last = 0.9 * last + loss\n"
                   "def remembered():\n    return last", "loss = step(remembered()); remember(loss + 1)"),
    "following.weight": steps(
        """
        def make():
            weight = 1.0
            def following():
                nonlocal weight
                weight *= 0.9
                return weight
            return following
        following = make()
        """, "step(following())"),
    "decayed.calls": steps("def decayed():\n    decayed.calls += 1\n    return 0.9**decayed.calls\n"
                           "decayed.calls = 0", "step(decayed())"),
    "self.weight": "Trainer(step).fit(state)",
    "trainer.weight": steps("trainer = Trainer(step)", "trainer.train()"),
    "replay.values": steps("replay = Replay()", "replay.add(step(1 + replay.sample()) + 1)"),
    # weights and generators
    "average": steps("average = AveragedModel(model)", "step(1); average.update_parameters(model)"),
    "other": steps("other = copy.deepcopy(model)", "step(1)\n"
                   "for one, new in zip(other.parameters(), model.parameters()):\n"
                   "    one.data.mul_(0.9).add_(new.data, alpha=0.1)"),
    "average.shadow": steps("average = Average(model)", "step(1); average.update(model)"),
    "best_weights": steps("best_weights = None", "loss = step(1)\nif loss < state.vars.get('best', 1e9):\n"
                          "    state.vars['best'] = loss; best_weights = copy.deepcopy(model.state_dict())")
    + "assert best_weights\n",
}  # fmt: skip


@pytest.mark.quick(12)
@pytest.mark.parametrize("name", WARNED)
def test_what_a_loop_carries_along_is_warned_of_by_name(run_dir: Path, name: str) -> None:
    text, *_ = run(run_dir, WARNED[name])

    assert re.match(rf"{re.escape(name.partition(',')[0])} (controls this loop|has weights)", text)


QUIET = {
    "shown": steps("total, count, seen = 0.0, 0, []", "total += step(1); count += 1; seen.append(total)\n"
                   "print(total / count, f'{count - 1:.1f}')\nif count % 2 == 0:\n    print(sum(seen))"),
    "clock": steps("began, rate = perf_counter(), -1.0", "step(1); now = perf_counter()\n"
                   "passed = now - began; began = now\nif n > 1:\n"
                   "    rate = passed if rate == -1.0 else 0.9 * rate + 0.1 * passed"),
    "set in each body": epochs("logs, limit = {'loss': 0.0}, 3", f"total = 0.0\nloss = {TRAIN}\n"
                               "if state.batch < limit:\n    total += loss",
                               "logs['loss'] = total\nif logs['loss'] > 1e9:\n    break"),
    "vars": epochs("best, count = state.vars.get('best', 1.0), state.step", f"{TRAIN}; count += 1",
                   "if LOSSES[epoch] < best:\n    best = state.vars['best'] = LOSSES[epoch]"),
    "in vars": steps("seen = state.vars.setdefault('seen', {'bad': 0})", "step(1); seen['bad'] += 1\n"
                     "if seen['bad'] > 9:\n    break"),
    "filled": steps("values, sums = torch.zeros(3), torch.zeros(3)", "sums.zero_()\nfor at in range(3):\n"
                    "    values[at] = step(1); sums[at] += 1\nstep(1 + values.mean() + sums.mean())"),
    "appended": steps("losses = [1.0]", "step(1); losses.append(LOSSES[n])\nif losses[-1] > 5:\n    break"),
    "hidden of one epoch": epochs("pass", TRAIN, "hidden = (torch.zeros(1), 0)\nfor _ in range(2):\n"
                                  "    out = torch.tanh(model(hidden[0])); train(out.sum())\n"
                                  "    hidden = out.detach(), 1"),
    "cache": steps("tables = {}\ndef table(n):\n    if n not in tables:\n        tables[n] = torch.ones(n)\n"
                   "    return tables[n]", "step(table(n + 1).mean())"),
    "begun in each body": steps(f"{DECAYED}\n    def begin():\n        global scale\n        scale = 1.0",
                                "begin()\nfor _ in range(3):\n    step(decayed())"),
    "restored": steps(f"{DECAYED}\n    scale = state.vars.get('scale', 1.0)",
                      "step(decayed()); state.vars['scale'] = scale"),
    "mask": epochs("criterion = Masked()", "train(criterion(model(x)))"),
    "switched": epochs("criterion = Centered()", "criterion.train(); criterion.margin = 0.1 * epoch\n"
                       "train((model(x) - criterion.margin).square().mean())", "criterion.eval()"),
    "data that count": epochs("", f"{TRAIN}; data.seen += len(x)"),
    "data in two modes": epochs("", TRAIN, "data.scale = 0.2\nprint(model(data[0]))\ndata.scale = 0.1"),
    "class of each body": epochs("class Hot:\n    value = 1.0", TRAIN,
                                 "Hot.value = 0.9**epoch; step(Hot.value)"),
    "replaced": epochs("settings = Settings()", TRAIN,
                       "settings = settings._replace(temperature=0.9**epoch); step(settings.temperature)"),
    "frozen teacher": steps("teacher = copy.deepcopy(model).requires_grad_(False)",
                            "step(teacher(torch.ones(1, 1)).item())"),
    "copy of each body": steps("old = copy.deepcopy(model)", "step(1)\n"
                               "old.load_state_dict(model.state_dict()); best = copy.deepcopy(model)"),
    "the model elsewhere": steps("wrapped, live = nn.Sequential(model), model.state_dict()",
                                 "step(1); assert live and wrapped.training"),
    "seeded": steps("noise = torch.Generator()",
                    "noise.manual_seed(n); step(torch.rand(1, generator=noise))"),
    "sweep": """
        best = 1.0
        for seed in range(2):
            with RunState.load(f"{state.run.path}-{seed}") as one:
                for epoch in one.epochs(2):
                    one.save()
                    best = min(best, LOSSES[epoch])
            if best < 0.1:
                break
    """,
}  # fmt: skip


@pytest.mark.parametrize("name", QUIET)
@pytest.mark.quick(3)
def test_what_each_body_makes_or_only_shows_is_not_warned_of(run_dir: Path, name: str) -> None:
    assert run(run_dir, QUIET[name]) == []


def test_what_is_given_or_has_a_state_is_not_warned_of(run_dir: Path) -> None:
    stopper, average = Stopper(), Average(nn.Linear(1, 1))
    noise, rates = np.random.default_rng(0), [0.9]
    for name, given, one, body in (
        ("attributes", vars(stopper), stopper, "step(1)\nif one.step(LOSSES[n]):\n    break"),
        ("weights", average.shadow, average, "step(1); one.update(model)"),
        ("list", rates, rates, "step(one[-1]); one.append(0.9 * one[-1])"),
        ("generator", noise, noise, "step(one.random())"),
    ):
        assert run(run_dir / name, steps("", body), one, extra={"one": given}) == []
    assert run(run_dir / "data", WARNED["data.scale"], data=KnowsItself()) == []


def test_automatic_saves_look_at_the_variables_too(run_dir: Path) -> None:
    source = WARNED["best"].replace("state.save()", "pass")

    assert "best controls this loop" in run(run_dir, source, every=2)[0]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (f"total += {TRAIN}", "total is summed over the epoch and saved as a metric"),
        (f"total += {TRAIN}\nif total > 1e9:\n    break", "total controls this loop"),
    ],
)
def test_a_sum_that_is_only_saved_is_told_to_be_averaged(run_dir: Path, body: str, text: str) -> None:
    body = textwrap.indent(body, "        ")
    source = f"for _ in state.epochs(2):\n    total = 0.0\n    for x in state.batches():\n{body}\n"
    (told,) = run(run_dir, f"{source}    state.save(loss=total / 4)", every=1)

    assert told.startswith(text)


@pytest.mark.parametrize("decides", [True, False])
def test_a_variable_of_a_function_that_calls_locals_is_warned_of(run_dir: Path, decides: bool) -> None:
    stop = "\nif weight < 0.1:\n    break" if decides else ""
    body = f"step(0.5**n); weight *= 0.9; passes += 2; print(passes, len(config)){stop}"
    found = run(run_dir, steps("weight, passes = 1.0, 0\nconfig = locals()", body))

    text = "changes" if sys.version_info >= (3, 13) else "RunState cannot see whether it changes"
    assert [one.startswith("weight controls this loop") and text in one for one in found] == [True] * decides


# Attributes of models that each pass changes, and generators.


class Net(nn.Module):
    passes = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mean, self.hidden = nn.Linear(1, 1), torch.zeros(1), torch.zeros(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Counting(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x) * min(1.0, self.passes / 10)


class Centred(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow(x)
        return super().forward(x - self.mean)

    def follow(self, x: torch.Tensor) -> None:
        if self.training:
            self.mean = torch.lerp(self.mean, x.mean(0), 0.1)


class InPlace(Centred):
    def follow(self, x: torch.Tensor) -> None:
        self.mean.lerp_(x.mean(0), 0.1)


class Spiking(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(super().forward(x) + self.hidden)
        self.hidden = hidden.detach()
        return hidden

    def reset(self) -> None:
        self.hidden = torch.zeros(2, 1)


class Noisy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.rand(1, generator=self.noise)


class Told(Counting):
    """Gives its counter to the checkpoint, and keeps the input of each pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.input = x * 2
        return super().forward(self.input)

    def get_extra_state(self) -> int:
        return self.passes

    def set_extra_state(self, state: int) -> None:
        self.passes = state


class Watched(Net):
    """Keeps what each pass has computed for who looks at it, and counts its passes for a log."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        if self.passes % 2 == 0:
            print(f"pass {self.passes}")
        self.hidden = torch.sigmoid(super().forward(x))
        return self.hidden * 2


class Rewinding(Spiking):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.reset()
        return super().forward(x) + super().forward(x)


@pytest.mark.parametrize(
    ("net", "body", "text"),
    [
        (Counting, "", "Counting.passes changes"),
        (Centred, "", "Centred.mean changes"),
        (InPlace, "", "InPlace.mean changes"),
        (Spiking, "", "Spiking.hidden changes"),
        (Noisy, "", "(model.noise)"),
        (Spiking, "; model.reset()", None),
        (Told, "", None),
        (Watched, "", None),
        (Rewinding, "", None),
    ],
)
@pytest.mark.quick(3)
def test_an_attribute_that_a_model_changes_is_warned_of(
    run_dir: Path, net: Any, body: str, text: Any
) -> None:
    found = run(run_dir, steps("", f"step(1){body}"), net=net())

    assert [text in one for one in found] == [True] * bool(text)


def test_a_generator_that_is_in_no_checkpoint_is_warned_of(run_dir: Path) -> None:
    for name, before in (("early", "noise = torch.Generator().manual_seed(0)"), ("late", "noise = None")):
        body = "noise = noise or torch.Generator().manual_seed(0); step(torch.rand(1, generator=noise))"
        (text,) = run(run_dir / name, steps(before, body))
        assert re.search(r"random generators .*\(noise\)", text)


INSTALLED = """
import numpy as np
rng = np.random.default_rng(0)
def smooth(x):
    return jitter(x)
def jitter(x):
    return x + float(rng.normal())
def scaled(x):
    return 2 * x
"""


@pytest.mark.parametrize(("name", "is_warned"), [("smooth", True), ("jitter", True), ("scaled", False)])
def test_a_generator_of_an_installed_helper_is_warned_of(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_warned: bool
) -> None:
    (folder := tmp_path / "site-packages" / "jittering").mkdir(parents=True)
    (folder / "__init__.py").write_text(INSTALLED)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.delitem(sys.modules, "jittering", raising=False)
    source = steps("import jittering", f"x = torch.ones(1); step(jittering.{name}(x))")

    found = run(run_dir, source)
    assert ["(jittering:rng)" in one for one in found] == [True] * is_warned
    given = {"rng": sys.modules["jittering"].rng}  # type: ignore[attr-defined]
    assert run(run_dir / "given", source, extra=given) == []


class Interrupted:
    """Its comparison meets a signal, whose handler raises, or raises by itself."""

    def __init__(self, is_signal: bool) -> None:
        self.is_signal = is_signal

    def look(self, *_: Any) -> Any:
        if self.is_signal:
            signal.raise_signal(signal.SIGALRM)
        raise TimeoutError("by itself")


def _too_late(*_: Any) -> None:
    raise TimeoutError("by a signal")


def test_an_error_in_the_look_is_warned_of_and_one_of_a_signal_is_raised(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGALRM, _too_late)
    try:
        monkeypatch.setattr(LoopVariables, "changed", Interrupted(is_signal=False).look)
        text, *_ = run(run_dir / "itself", WARNED["best"])
        assert "cannot be inspected (TimeoutError('by itself'))" in text
        monkeypatch.setattr(LoopVariables, "changed", Interrupted(is_signal=True).look)
        with pytest.raises(TimeoutError, match="by a signal"):
            run(run_dir / "signal", WARNED["best"])
    finally:
        signal.signal(signal.SIGALRM, before)
