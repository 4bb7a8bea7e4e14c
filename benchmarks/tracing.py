"""What a trace costs a training: the same steps with one and without, in turns.

python -m benchmarks.tracing --quick             # one pair of each
python -m benchmarks.tracing                     # seven pairs; half an hour and more, mostly the transformer
python -m benchmarks.tracing --from FILE.json    # show a stored result again
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from resumable import RunState
from resumable.trace.tracer import EVERY, Trace

from . import machine
from .contenders import quiet
from .training import Gpt

README = Path(__file__).with_name("README.md")
_TURN = 10
"""So many steps are taken without a trace, then with one: what slows the machine slows both."""
_LOOKS = 2
"""So many looks at the parts each epoch has: at its last step, which is the hundredth, and at its end."""
_seconds = time.thread_time

Made = tuple[nn.Module, torch.Tensor, torch.Tensor]


@dataclass
class Result:
    """What was measured, as it is stored: by training, a figure of each pair."""

    machine: dict[str, str]
    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    seconds: float = 0.0


def _perceptron() -> Made:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return model, torch.randn(128, 256), torch.randint(0, 10, (128,))


def _convolutions() -> Made:
    layers: list[nn.Module] = []
    for inside, outside in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inside, outside, 3, 2, 1), nn.BatchNorm2d(outside), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return model, torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))


def _transformer() -> Made:
    tokens = torch.randint(0, 8192, (2, 64))
    return Gpt(256, 12, 8192), tokens, tokens


def _many() -> Made:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(500)))
    return model, torch.randn(16, 32), torch.randint(0, 32, (16,))


TRAININGS: dict[str, Callable[[], Made]] = {
    "perceptron, 256 to 256 to 10": _perceptron,
    "convolutions, 128 x 3 x 32 x 32": _convolutions,
    "transformer, 11.8 M": _transformer,
    "1,000 tensors": _many,
}


class Script:
    """A training with AdamW, of which one can ask for some steps."""

    def __init__(self, make: Callable[[], Made], run: Path, trace: Path | None) -> None:
        torch.manual_seed(0)
        self.model, x, y = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        rows = TensorDataset(x, y)
        loader = DataLoader(rows, len(x), sampler=RandomSampler(rows, num_samples=len(x) * EVERY))
        with quiet():
            self.state = RunState.load(
                run, model=self.model, optimizer=self.optimizer, loader=loader, trace=trace, progress=False
            )
        self._steps = self._endless()

    def _endless(self) -> Iterator[None]:
        for _ in self.state.epochs(1 << 30):
            for x, y in self.state.batches():
                loss = functional.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
                self.optimizer.zero_grad()
                torch.autograd.backward(loss)
                self.optimizer.step()
                self.state.note(loss=loss)
                yield

    def take(self, count: int) -> float:
        """Take so many steps, and return the processor's seconds for them."""
        start = _seconds()
        for _ in range(count):
            next(self._steps)
        return _seconds() - start


class Clock:
    """The time that is spent in a trace, in place."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("digest_of_batch", "note", "boundary", "_record"), 0.0)
        for name in self.seconds:
            setattr(Trace, name, self._timed(name, getattr(Trace, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = _seconds()
            try:
                return method(*args, **options)
            finally:
                self.seconds[name] += _seconds() - start

        return timed

    def read(self) -> tuple[float, float]:
        """Return the seconds for all boundaries but for the looks at the parts, and those for the looks."""
        *often, looks = self.seconds.values()
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        return sum(often) - looks, looks


def measure(make: Callable[[], Made], folder: Path, pairs: int, clock: Clock) -> dict[str, list[float]]:
    """Return the figures of each pair, which is an epoch."""
    plain = Script(make, folder / "plain", None)
    traced = Script(make, folder / "traced", folder / "steps.jsonl")
    found: dict[str, list[float]] = {name: [] for name in ("plain", "traced", "boundary", "look")}
    for number in range(-1, pairs):
        clock.read()
        seconds = [0.0, 0.0]
        for turn in range(EVERY // _TURN):
            for index in (0, 1) if turn % 2 else (1, 0):
                seconds[index] += (plain, traced)[index].take(_TURN)
        often, looks = clock.read()
        if number >= 0:
            figures = (seconds[0] / EVERY, seconds[1] / EVERY, often / EVERY, looks / _LOOKS)
            for name, figure in zip(found, figures, strict=True):
                found[name].append(figure)
    return found


def show(result: Result) -> str:
    """Return the table."""
    lines = [*(f"- {name}: {value}" for name, value in result.machine.items()), ""]
    lines += [
        "| | a step, ms | with a trace / without | of it in the trace | a boundary, us | a look, ms |",
        "| - | -: | -: | -: | -: | -: |",
    ]
    for name, figures in result.figures.items():
        ratios = sorted(b / a for a, b in zip(figures["plain"], figures["traced"], strict=True))
        step, boundary, look = (statistics.median(figures[key]) for key in ("plain", "boundary", "look"))
        ratio = statistics.median(figures["traced"]) / step
        share = (boundary + _LOOKS * look / EVERY) / step
        spread = f"({ratios[len(ratios) // 4]:.3f}..{ratios[-1 - len(ratios) // 4]:.3f})"
        lines.append(
            f"| {name} | {step * 1e3:.2f} | {ratio:.3f} {spread} | {share:.2%} | {boundary * 1e6:.0f} | "
            f"{look * 1e3:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one pair")
    parser.add_argument("--only", nargs="*", help="such trainings as have one of these words in their name")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), metavar="FOLDER")
    parser.add_argument("--from", type=Path, dest="source", metavar="FILE", help="show a stored result again")
    parser.add_argument("--readme", action="store_true", help="put the table into benchmarks/README.md")
    arguments = parser.parse_args()
    if arguments.source:
        result = Result(**json.loads(arguments.source.read_text()))
    else:
        result = _measured(1 if arguments.quick else 7, arguments.only or [""])
        out = README.parent / "results" if arguments.readme else arguments.out
        out.mkdir(parents=True, exist_ok=True)
        (out / "trace-cpu.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    print(show(result))
    if arguments.readme:
        marked = re.compile(r"(<!-- trace: .*? -->\n).*?(<!-- trace ends -->)", re.DOTALL)
        page = README.read_text()
        README.write_text(marked.sub(lambda found: f"{found[1]}\n{show(result)}\n{found[2]}", page))


def _measured(pairs: int, words: list[str]) -> Result:
    torch.set_num_threads(1)
    start, clock = time.perf_counter(), Clock()
    with tempfile.TemporaryDirectory() as folder:
        result = Result(machine.describe(Path(folder), "cpu"))
        for number, (name, make) in enumerate(TRAININGS.items()):
            if any(word in name for word in words):
                result.figures[name] = measure(make, Path(folder, str(number)), pairs, clock)
    result.machine["pairs"] = f"{pairs}, of {EVERY} steps each, in turns of {_TURN}; one thread, its CPU time"
    result.seconds = time.perf_counter() - start
    return result


if __name__ == "__main__":
    main()
