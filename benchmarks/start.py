"""What the start of a training costs, in fresh processes: imports, a run that begins, one that resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch

from resumable import RunState

from .contenders import quiet
from .rounds import Failed, Figures, Values, in_turns

_START = "from benchmarks.started import main; main()"


def measure(rounds: int, folder: Path, errors: dict[str, dict[str, str]]) -> dict[str, Values]:
    """Return the figures of each kind of start."""
    folder.mkdir(parents=True)
    _save(folder)
    jobs = {kind: partial(_start, kind, folder) for kind in ("alone", "fresh", "resume")}
    found: dict[str, dict[str, str]] = {}
    taken = in_turns("start", jobs, rounds, 600.0, found)
    for kind, reasons in found.items():
        errors.setdefault("resumable", {})[f"start, {kind}"] = reasons["start"]
    return taken


def _save(folder: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    with quiet(), RunState.load(folder / "resume", model=model, optimizer=optimizer) as state:
        state.save()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "torch.pt")


def _start(kind: str, folder: Path, number: int) -> Figures:
    run = f"fresh-{number}" if kind == "fresh" else "resume"
    done = subprocess.run(
        [sys.executable, "-c", _START, kind, run, "torch.pt"],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Failed(done.stderr.strip().splitlines()[-1])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _environment() -> dict[str, str]:
    # Without bytecode that was stored, an import is mostly the compiler's time.
    known = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return known | {"PYTHONPATH": os.pathsep.join(sys.path)}
