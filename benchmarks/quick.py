"""Compare this library's ratios with the stored ones; exit with 1 if one is worse by more than the noise.

scripts/bench            # under 3 minutes on two cores; let nothing else run meanwhile
scripts/bench --store    # measure, and store the ratios and the machine
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import compare, machine
from .ratios import OURS, batch, best_limit, fresh, pairs
from .rounds import Values
from .scenarios import Result, Settings, measure
from .table import aligned

STORED = Path(__file__).with_name("results") / "quick-cpu.json"
SCENARIOS = ("fresh", "start", "batches", "saves", "lost", "small", "busy", "listing")
SETTINGS = Settings(
    size=100,
    device="cpu",
    rounds=7,
    budget=12.0,
    small=10_000,
    checkpoints=1_000,
    contenders=(OURS, "torch.save"),
    others=(2,),
)


def main(arguments: Sequence[str] | None = None, settings: Settings = SETTINGS) -> int:
    """Measure, and compare or store; return the exit status."""
    given = _arguments(arguments)
    if not given.store and not given.stored.exists():
        print(f"{given.stored} does not exist. Fix: store the ratios of now with --store", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    logging.disable()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=given.folder) as folder:
        found = measured(settings, Path(folder).resolve())
        found["machine"] = machine.describe(Path(folder), settings.device)
    print(f"measured in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if given.store:
        given.stored.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    return report(json.loads(given.stored.read_text()), found)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", action="store_true", help="store what is measured; compare nothing")
    parser.add_argument("--folder", type=Path, default=Path(), help="the disk to measure (here)")
    parser.add_argument("--stored", type=Path, default=STORED, help=f"the stored ratios ({STORED.name})")
    return parser.parse_args(arguments)


def measured(settings: Settings, folder: Path) -> dict[str, Any]:
    """Return the ratios of this run, and why one could not be measured."""
    result = Result({})
    result.settings = {"size": settings.size, "contenders": list(settings.contenders)}
    measure(settings, folder, result, SCENARIOS)
    ratios = {what: found for what, ratio in RATIOS.items() if (found := ratio(result))}
    return {"ratios": ratios, "errors": result.errors}


def report(stored: Mapping[str, Any], found: Mapping[str, Any]) -> int:
    """Print the stored ratios and those of now; return 1 if one is worse or missing."""
    rows = compare.compare(stored["ratios"], found["ratios"])
    print(aligned(["ratio, less is better", "stored", "now", "noise", ""], [_cells(row) for row in rows]))
    for name, reasons in found["errors"].items():
        print("\n".join(f"{name}: {what}: {reason}" for what, reason in reasons.items()))
    if others := list(compare.differences(stored["machine"], found["machine"])):
        print("The stored ratios are of another machine, and say less about this one:", *others, sep="\n  ")
    return int(compare.has_failed(rows))


def _cells(row: compare.Row) -> list[str]:
    known, now = ("-" if value is None else f"{value:.3f}" for value in (row.stored, row.now))
    return [row.what, known, now, f"{row.noise:.0%}", row.verdict]


# Each of them grows when this library becomes slower, whatever the machine does to both.


def _next_to_torch(key: str, result: Result) -> list[float]:
    ours, torchs = (result.contenders.get(name, {}).get(key, []) for name in SETTINGS.contenders)
    return pairs(ours, torchs)


def _lost(result: Result) -> list[float]:
    # Of differences of times the median is a sound base, a single one is not.
    ours, torchs = (result.contenders.get(name, {}).get("lost", []) for name in SETTINGS.contenders)
    return pairs(ours, [statistics.median(torchs)] * len(ours)) if torchs else []


def _next_to_raw(key: str, way: str, result: Result) -> list[float]:
    return pairs(result.contenders.get(OURS, {}).get(key, []), best_limit(result, way))


def _batch(setup: str, figure: str, result: Result) -> list[float]:
    return pairs(*batch(result, setup, figure))


def _started(kind: str, figure: str, base: str, result: Result) -> list[float]:
    found: Values = result.start.get(kind, {})
    return pairs(found.get(figure, []), found.get(base, []))


def _busy(result: Result) -> list[float]:
    return [ratio for values in result.busy.values() for ratio in values["ratio"]]


def _listed(what: str, result: Result) -> list[float]:
    return pairs(result.listing.get(f"{what}_many", []), result.listing.get(f"{what}_few", []))


RATIOS: Mapping[str, Callable[[Result], list[float]]] = {
    "until durable / raw write": partial(_next_to_raw, "durable", "write"),
    "call / torch.save": partial(_next_to_torch, "call"),
    "training time lost / torch.save": _lost,
    "training time lost, cores busy / torch.save": _busy,
    "load / raw read": partial(_next_to_raw, "load", "read"),
    "load in a fresh process / raw read": fresh,
    "small tensors: save / torch.save": partial(_next_to_torch, "tensors_durable"),
    "small tensors: call / torch.save": partial(_next_to_torch, "tensors_call"),
    "small tensors: load / torch.load": partial(_next_to_torch, "tensors_load"),
    "small parameters: save / torch.save": partial(_next_to_torch, "parameters_durable"),
    "small parameters: call / torch.save": partial(_next_to_torch, "parameters_call"),
    "small parameters: load / torch.load": partial(_next_to_torch, "parameters_load"),
    "a batch, nothing drawn / plain loader": partial(_batch, "0 workers, nothing drawn", "main"),
    "a batch, numbers drawn / plain loader": partial(_batch, "0 workers, numbers drawn", "main"),
    "a batch, 2 workers / plain loader": partial(_batch, "2 workers, numbers drawn", "batch"),
    "a run begins / torch.load": partial(_started, "fresh", "load", "torch_load"),
    "a run resumes / torch.load": partial(_started, "resume", "load", "torch_load"),
    "import RunState / import torch": partial(_started, "resume", "import", "torch"),
    "many checkpoints: a run opens / few": partial(_listed, "load"),
    "many checkpoints: a save / few": partial(_listed, "save"),
}


if __name__ == "__main__":
    sys.exit(main())
