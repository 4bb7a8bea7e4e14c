"""Run every contender on the same state in turns; print one table of ratios, write it as JSON and a chart.

python -m benchmarks --quick             # a few minutes on two cores
python -m benchmarks                     # 1.5 GB, as in benchmarks/README.md
python -m benchmarks --device cuda
python -m benchmarks --from FILE.json    # show a stored result again
python -m benchmarks --scenarios saves lost --into FILE.json    # a part, added to what the file has
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path

from . import chart, machine, table
from .contenders import CONTENDERS
from .scenarios import SCENARIOS, Result, Settings, measure

README = Path(__file__).with_name("README.md")


def main() -> None:
    """Measure, or read a stored result; show it."""
    arguments = _arguments()
    result = _read(arguments.stored) if arguments.stored else _measured(arguments)
    if arguments.into:
        arguments.into.write_text(json.dumps(asdict(result), indent=1) + "\n")
        return
    print(table.pages(result))
    out = README.parent / "results" if arguments.readme else arguments.out
    out.mkdir(parents=True, exist_ok=True)
    device = result.settings["device"]
    (out / f"{device}.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    try:
        chart.draw(result, out / f"{device}.png")
    except ImportError as exc:
        print(f"no chart: {exc}; pip install matplotlib", file=sys.stderr)
    if arguments.readme:
        _put_into_readme(result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, help="megabytes of weights and moments (1493; quick: 100)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a smaller state and fewer rounds")
    parser.add_argument("--rounds", type=int, help="how often all is repeated (7; quick: 3)")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=tuple(CONTENDERS), default=tuple(CONTENDERS)
    )
    parser.add_argument("--small", type=int, default=10_000, help="how many small tensors")
    parser.add_argument("--checkpoints", type=int, help="how many checkpoints to list (10000; quick: 1000)")
    parser.add_argument("--folder", type=Path, default=Path(), help="the disk to measure (here)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="where JSON and chart go")
    parser.add_argument("--readme", action="store_true", help="put the tables into benchmarks/README.md")
    parser.add_argument(
        "--scenarios", nargs="+", choices=tuple(SCENARIOS), default=tuple(SCENARIOS), help="what to measure"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=float,
        help="megabytes of further states, saved only (100 6000; quick: none)",
    )
    parser.add_argument("--others", nargs="+", type=int, help="other busy processes (0 2 4; quick: 2)")
    parser.add_argument("--into", type=Path, metavar="JSON", help="add to what is there; show nothing")
    parser.add_argument("--from", dest="stored", type=Path, metavar="JSON", help="measure nothing")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder}: there is no such folder")
    return arguments


def _read(stored: Path) -> Result:
    return Result(**json.loads(stored.read_text()))


def _measured(arguments: argparse.Namespace) -> Result:
    warnings.simplefilter("ignore")
    logging.disable()
    quick = arguments.quick
    settings = Settings(
        size=arguments.size or (100 if quick else 1493),
        device=arguments.device,
        rounds=arguments.rounds or (3 if quick else 7),
        budget=4.0 if quick else 600.0,
        small=arguments.small,
        checkpoints=arguments.checkpoints or (1_000 if quick else 10_000),
        contenders=tuple(arguments.only),
        sizes=tuple(arguments.sizes or (() if quick else (100.0, 6000.0))),
        others=tuple((2,) if quick else (0, 2, 4)) if arguments.others is None else tuple(arguments.others),
    )
    is_there = arguments.into and arguments.into.exists()
    result = _read(arguments.into) if is_there else Result({})
    result.settings = {**asdict(settings), "contenders": list(settings.contenders)}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=arguments.folder) as folder:
        measure(settings, Path(folder).resolve(), result, arguments.scenarios)
        result.machine = machine.describe(Path(folder), settings.device)
    result.seconds += time.perf_counter() - start
    return result


def _put_into_readme(result: Result) -> None:
    device = result.settings["device"]
    marked = re.compile(f"(<!-- {device}: .*? -->\n).*?(<!-- {device} ends -->)", re.DOTALL)
    content = f"\n![{device}](results/{device}.png)\n\n{table.pages(result)}\n\n"
    text = README.read_text()
    README.write_text(marked.sub(lambda found: found[1] + content + found[2], text, count=1))


if __name__ == "__main__":
    main()
