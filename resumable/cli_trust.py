"""The commands that tell whether a run can be trusted: verify."""

from __future__ import annotations

import argparse
from typing import Any

from .command import CODES, add, add_run, print_json, print_problems, row_of, run_at
from .errors import CheckpointDamaged
from .policy import bytes_of


def declare(commands: Any) -> None:
    """Declare them."""
    summary = "read every byte of a run and say whether it is as it was written"
    sub = add(commands, "verify", _verify, summary, "resumable verify runs/exp")
    add_run(sub)
    sub.add_argument(
        "--pin", action="store_true", help="print of each a digest of its content: RunState.load(expect=...)"
    )


def _verify(given: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    run = run_at(given.run)
    for number in run.numbers():
        if not (row := row_of(run, number, verify=True, pin=given.pin)):
            continue
        rows.append({key: row[key] for key in ("number", "path", "size", "problem", "pin") if key in row})
        if not given.json:
            state = "damaged" if row["problem"] else f"intact   {bytes_of(row['size'])}"
            state += f"  {row['pin']}" if row.get("pin") else ""
            print(f"checkpoint {number:>6}  {state}", flush=True)
    if given.json:
        print_json(rows)
    else:
        print_problems(rows)
    return CODES[CheckpointDamaged] if any(row["problem"] for row in rows) else 0
