"""Run the tests that need a GPU, and measure saves and loads next to others; print a table, write one JSON.

scripts/gpu            # within 9 minutes, where torch sees a GPU
scripts/gpu --tiny     # the same on the CPU, with tiny sizes: shows that the command works, measures nothing
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from .. import machine
from . import page, sections

BUDGET = 520.0
"""Seconds for everything."""
SIZES = {False: {"1.5 GB": 1493.0, "4.3 GB": 4257.0}, True: {"tiny": 4.0}}
"""Megabytes of weights and moments, with and without --tiny."""
SHARE = {"1.5 GB": 0.6, "4.3 GB": 0.9, "tiny": 1.0}
"""How much of the time that is left a size may take."""
TEST_SECONDS = 180.0
"""The most that tests which run side by side may take."""


def main() -> int:
    """Run what was chosen; return 1 if a test failed or a section has no result."""
    arguments = _arguments()
    is_tiny, began = arguments.tiny, time.monotonic()
    if not is_tiny and not torch.cuda.is_available():
        print("torch sees no GPU here. scripts/gpu --tiny runs the same on the CPU.", file=sys.stderr)
        return 2
    result: dict[str, Any] = {"is_tiny": is_tiny, "tests": {}, "sizes": {}}
    with tempfile.TemporaryDirectory(prefix=".gpu-", dir=arguments.folder) as name:
        folder = Path(name).resolve()
        result["machine"] = machine.describe(folder, "cpu" if is_tiny else "cuda")
        if "tests" in arguments.only:
            for names in sections.SIDE_BY_SIDE:
                with ThreadPoolExecutor(len(names)) as pool:
                    found = pool.map(
                        lambda name: sections.tests(name, folder, TEST_SECONDS, is_tiny=is_tiny), names
                    )
                    result["tests"] |= dict(zip(names, found, strict=True))
        if "saves" in arguments.only:
            for label, megabytes in SIZES[is_tiny].items():
                left = SHARE[label] * (BUDGET - (time.monotonic() - began))
                place = folder / label.replace(" ", "-")
                result["sizes"][label] = sections.saves(megabytes, place, left, is_tiny=is_tiny)
    result["seconds"] = round(time.monotonic() - began, 1)
    print(page.text(result))
    _store(result, arguments.out)
    return int(page.has_failed(result))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--only", nargs="+", choices=("tests", "saves"), default=("tests", "saves"))
    parser.add_argument("--folder", type=Path, default=Path(), help="the disk to measure (here)")
    out = Path(os.environ.get("OUT", "runs/gpu"))
    parser.add_argument("--out", type=Path, default=out, help="where the JSON goes ($OUT, or runs/gpu)")
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder}: there is no such folder")
    return arguments


def _store(result: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1) + "\n"
    (out / "gpu.json").write_text(text)
    if result["is_tiny"] or not result["sizes"]:
        return
    stored = page.put_into_readme(result)
    stored.write_text(text)
    # Where the repository itself does not come back from the machine, these do.
    (out / stored.name).write_text(text)
    (out / "benchmarks-README.md").write_text(page.README.read_text())


if __name__ == "__main__":
    sys.exit(main())
