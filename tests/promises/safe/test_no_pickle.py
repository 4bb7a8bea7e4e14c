"""Saving and loading unpickle nothing, run nothing and open nothing outside the run directory."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import Forks

SCRIPT = """
import os, re, sys, random
from pathlib import Path
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from resumable import RunState

run_dir = Path(sys.argv[1])
events = []
FORBIDDEN = ("pickle.find_class", "marshal.", "exec", "compile", "os.system", "os.exec", "os.posix_spawn",
             "subprocess.", "ctypes.", "socket.connect", "import")

def build():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    return dict(
        model=model, optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
        scaler=torch.amp.GradScaler("cpu"),
        loader=DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=2, shuffle=True),
        extra={"noise": np.random.default_rng(0), "dice": random.Random(0), "torch": torch.Generator(),
               "plain": {"a": (1, {2}, float("nan"), np.arange(3)), 1: b"x"}},
    )

def train(stop):
    with RunState.load(run_dir, **parts) as state:
        for _ in state.epochs(2):
            for (batch,) in state.batches():
                loss = parts["model"](batch).square().mean()
                parts["optimizer"].zero_grad(); loss.backward()
                parts["optimizer"].step(); parts["scheduler"].step()
                if state.step == stop:
                    state.save(loss=loss.item()).wait()
                    return
            state.save(loss=loss.item())

parts = build(); train(3)          # everything that is imported once is imported now
parts = build(); train(5)
parts = build()

def listen(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, Path)) or event.startswith(FORBIDDEN):
        # (a folder above the run is opened to flush its names, and read by nobody)
        is_folder = event == "open" and bool(arguments[2] & os.O_DIRECTORY)
        if not (is_folder and arguments[1] is None and run_dir.resolve().is_relative_to(arguments[0])):
            events.append((event, str(arguments[0])))

def unpickle(*_, **__):
    print("FORBIDDEN unpickle")

# The hook sees only what unpickles an object by its name.
import pickle
pickle.load = pickle.loads = pickle.Unpickler = torch.load = unpickle
pickle.dump = pickle.dumps = pickle.Pickler = torch.save = unpickle
sys.addaudithook(listen)
train(None)
for event, what in list(events):
    inside = event == "open" and Path(what).resolve().is_relative_to(run_dir.resolve())
    # (what the process and its machine are called is read from the system)
    known = what.endswith((".git/HEAD",)) or "/.git/" in what or what.startswith("/proc/")
    # (opened in a folder of the run, which was opened before)
    known |= re.fullmatch(r"ranks|[0-9a-z-]+\\.(json|safetensors)", what) is not None
    if not inside and not known:
        print("FORBIDDEN", event, what)
print("seen", sum(event == "open" for event, _ in events))
"""


@pytest.mark.proves("safe")
def test_saving_and_loading_unpickle_nothing_and_stay_in_the_run(forks: Forks, tmp_path: Path) -> None:
    printed = forks.run(["-c", SCRIPT, tmp_path / "exp"], tmp_path).checked().out

    assert "FORBIDDEN" not in printed, printed
    # The hook is on: it has seen the files of the run.
    assert int(printed.split()[-1]) > 10
