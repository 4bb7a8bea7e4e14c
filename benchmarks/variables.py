"""What the script's own variables cost the training: the first head of a loop, and a look at each save.

python -m benchmarks.variables                # two minutes on two cores; let nothing else run meanwhile
python -m benchmarks.variables --epochs 20    # more looks
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .table import aligned

_KEPT: Mapping[str, tuple[str, str]] = {
    "two variables": ("best, history = 9.0, []", "history.append(loss.item())"),
    "1,000 variables": (
        "globals().update({f'number_{n}': n for n in range(500)} | {f'list_{n}': [n] for n in range(500)})",
        "number_1 += 1",
    ),
    "3 million integers": ("numbers = [*range(3_000_000)]", ""),
    "100,000 objects": ("objects = [Thing(n) for n in range(100_000)]", ""),
    "100,000 objects, all changed": (
        "objects = [Thing(n) for n in range(100_000)]",
        "for one in objects: one.n += 1",
    ),
    "a deque of 100,000 transitions": (
        "replay = deque((np.zeros(4) + n, n % 3, 0.5 * n, np.ones(4), False) for n in range(100_000))",
        "replay.append(replay.popleft())",
    ),
    "17 GB of mapped tokens": (
        "open('tokens', 'wb').truncate(17 << 30); tokens = np.memmap('tokens', np.uint16, 'r')",
        "",
    ),
    "1.3 million tuples in a dataset": (
        "loader.dataset.rows = [(n, n + 1) for n in range(1_300_000)]",
        "",
    ),
    "4,500 functions": (
        "exec(''.join(f'def function_{n}(x): return x + {n}\\n' for n in range(4_500)))",
        "",
    ),
}
"""By name: what a script makes before its loop, and what its epochs change."""
_SCRIPT = """
import json, sys
from collections import deque
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from resumable import RunState
torch.set_num_threads(1)
class Thing:
    def __init__(self, n):
        self.n, self.name, self.weight, self.next = n, 'a', 0.5, None
class Data(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((8,), index / 64)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(Data(), batch_size=16, shuffle=True)
BEFORE
state = RunState.load('run', model=model, optimizer=optimizer, loader=loader, quiet=True, every=None, keep=1)
for epoch in state.epochs(EPOCHS):
    for batch in state.batches():
        loss = (model(batch) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    CHANGE
    state.save()
state.close()
"""
_TIMED = """
import atexit, functools, json, runpy, sys, time
from resumable.variables.variables import Variables
taken = {'head': [], 'look': []}
def timed(name):
    call = getattr(Variables, name)
    @functools.wraps(call)
    def found(*args, **kwargs):
        begun = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            taken[name].append(1000 * (time.thread_time() - begun))
    setattr(Variables, name, found)
timed('head')
timed('look')
runpy.run_path('train.py', run_name='__main__')
print(json.dumps(taken))
"""


def main() -> None:
    """Measure each script in a process of its own; print a table."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.variables",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=tuple(_KEPT), default=tuple(_KEPT))
    given = parser.parse_args()
    rows = []
    for name in given.only:
        taken = _taken(*_KEPT[name], given.epochs)
        looks = sorted(taken["look"][1:])
        rows.append([name, *(f"{ms:.2f}" for ms in (taken["head"][0], looks[len(looks) // 2], looks[-1]))])
    print(aligned(["a script with", "first head, ms", "look, ms", "longest"], rows))


def _taken(before: str, change: str, epochs: int) -> dict[str, list[float]]:
    """Return the milliseconds of CPU time that each head and each look of a script has taken."""
    script = _SCRIPT.replace("BEFORE", before).replace("CHANGE", change or "pass")
    with tempfile.TemporaryDirectory(prefix="variables-") as folder:
        (Path(folder) / "train.py").write_text(script.replace("EPOCHS", str(epochs)))
        # What is installed is none of the script's own code.
        timed = Path(folder) / "site-packages" / "timed.py"
        timed.parent.mkdir()
        timed.write_text(_TIMED)
        command = [sys.executable, "-W", "ignore", str(timed)]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
