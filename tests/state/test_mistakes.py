"""Some eighty mistakes, each with all that a user sees of it: tests/data/mistakes.txt.

`python tests/state/test_mistakes.py` writes that file: read the difference as one who made the mistake.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent.parent / "data" / "mistakes.txt"

BEGIN = """
import os, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from resumable import Preempt, Ranks, Remote, Run, RunState, load_weights
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self, width=1, head="fc"):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.add_module(head, nn.Linear(2, width))
        self.head = head
    def forward(self, x):
        return getattr(self, self.head)(self.body(x))
dataset = TensorDataset(torch.ones(6, 2))
loader = DataLoader(dataset, 2)
def train(steps, width=1, head="fc", lr=0.1, **more):
    model = Net(width, head)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    with RunState.load("runs/exp", model=model, optimizer=optimizer, every=None, **more) as state:
        for step in state.steps(steps):
            optimizer.zero_grad()
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            state.save(loss=step)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
"""

MISTAKES = textwrap.dedent("""
    # An object in the wrong slot.
    RunState("runs/exp", model=model)
    RunState.load("runs/exp", model=model.state_dict())
    RunState.load("runs/exp", model=[model])
    RunState.load("runs/exp", model=Net)
    RunState.load("runs/exp", model="model.pt")
    RunState.load("runs/exp", model=optimizer, optimizer=model)
    RunState.load("runs/exp", model=model, optimizer=model.parameters())
    RunState.load("runs/exp", model=model, optimizer=optimizer.state_dict())
    RunState.load("runs/exp", model=model, optimizer=scheduler)
    RunState.load("runs/exp", scheduler=optimizer)
    RunState.load("runs/exp", scaler=scheduler)
    RunState.load("runs/exp", model=Net(), optimizer=optimizer)
    RunState.load("runs/exp", loader=dataset)
    RunState.load("runs/exp", loader=[loader, loader])
    RunState.load("runs/exp", loader=iter(loader))
    RunState.load("runs/exp", loader=10)
    RunState.load("runs/exp", extra={"lr": 0.1})
    RunState.load("runs/exp", extra=scheduler)
    RunState.load("runs/exp", extra={"a.b": {}})
    # Arguments that no call takes.
    RunState.load("runs/exp", model, optimizer)
    RunState.load("runs/exp", model=model, optimiser=optimizer)
    RunState.load(model=model)
    RunState.load("runs/exp").save({"loss": 1})
    RunState.load("runs/exp").epochs()
    RunState.load("runs/exp").steps(1, 2)
    Run()
    load_weights(model)
    # The wrong loader in a loop.
    RunState.load("runs/exp", loader=loader).batches("train")
    RunState.load("runs/exp", loader={"train": loader, "val": loader}).batches("trian")
    RunState.load("runs/exp", loader={"train": loader, "val": loader}).batches()
    RunState.load("runs/exp", loader=loader).batches(10)
    RunState.load("runs/exp", loader=loader).batches(dataset)
    RunState.load("runs/exp", loader=loader).batches(DataLoader(dataset))
    RunState.load("runs/exp").batches()
    RunState.load("runs/exp").batches(model)
    list(RunState.load("runs/exp").epochs("3"))
    state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader); \
[(model(x).sum().backward(), optimizer.step()) for epoch in state.epochs(1) for (x,) in loader]
    state = RunState.load("runs/exp", model=model, optimizer=optimizer, loader=loader, every=None); \
[(model(x).sum().backward(), optimizer.step()) for (x,) in loader]
    # Words that are nearly right.
    RunState.load("runs/exp", resume="bset")
    RunState.load("runs/exp", resume=1.5)
    RunState.load("runs/exp", resume="must")
    RunState.load("runs/exp", remote=Remote("s3://bucket/exp", push="latest"))
    RunState.load("runs/exp", remote=Remote("s3://bucket/exp", push="best"))
    RunState.load("runs/exp", remote="s3:/bucket/exp")
    RunState.load("runs/exp", remote="sftps://host/exp")
    RunState.load("runs/exp", remote="file://backup")
    RunState.load("s3:/bucket/exp")
    RunState.load("runs/exp", preempt=Preempt(on_preempt="exti"))
    RunState.load("runs/exp", preempt=Preempt(signals=["SIGTREM"]))
    RunState.load("runs/exp", preempt=Preempt(signals=["SIGKILL"]))
    RunState.load("runs/exp", preempt="3h50m")
    RunState.load("runs/exp", ranks=Ranks(write="al"))
    RunState.load("runs/exp", extra={"sampler": {}}, ranks=Ranks(per_rank=["smapler"]))
    RunState.load("runs/exp", every="often")
    RunState.load("runs/exp", keep=0)
    RunState.load("runs/exp", maximize="acc", minimize="loss")
    RunState.load("runs/exp", minimize="val_acc").save(valacc=0.5).wait()
    RunState.load("runs/exp").save(loss="low")
    RunState.load("runs/exp").mean()
    RunState.load("runs/exp").patience(3)
    # A checkpoint that does not fit.
    train(2); train(3, width=4)
    train(2); RunState.load("runs/exp", model=model)
    RunState.load("runs/exp", extra={"seen": {}}, loader={"train": loader}).save().wait(); \
RunState.load("runs/exp")
    state = RunState.load("runs/exp", loader=loader, every=None); \
[state.save() for _ in state.batches() if state.batch == 1]; state.close(); \
RunState.load("runs/exp", loader=DataLoader(dataset, 3))
    train(2); train(3, width=4, allow=["fc.*"])
    train(2); train(3, width=4, allow=["fc.*"]); train(4, width=4, allow=["fc.*"])
    train(2); train(3, width=4, allow=["fc.weigth"])
    train(2); train(3, allow=["modle.*"])
    train(2, allow=["modle.*"])
    train(2); train(3, allow="fc.*")
    train(2); train(3, lr=0.5)
    train(2); train(3, lr=0.5, override=["optimizer.rl"])
    train(2); train(3, head="out")
    train(2); train(3, head="out", rename={"fc": "out"})
    train(2); train(3, head="out", rename={"fc": "out"}); train(4, head="out", rename={"fc": "out"})
    train(2); train(3, head="out", rename={"fcc": "out"})
    train(2, rename={"fc": "out", "out": "fc"})
    train(2, rename="fc")
    train(2); train(3, minimize="loss"); train(4, maximize="loss")
    train(2); RunState.load("runs/exp", resume="never")
    train(2); RunState.load("runs/exp", resume=7)
    train(2); RunState.load("runs/epx", resume="must")
    train(2); load_weights(Net(), "runs/exp", rename={"fcc": "fc"})
    train(2); load_weights(Net(head="out"), "runs/exp")
    train(2); load_weights(model.state_dict(), "runs/exp")
    # A run directory that is something else.
    os.makedirs("runs/exp"); open("runs/exp/notes.txt", "w").close(); RunState.load("runs/exp")
    os.mkdir("runs"); open("runs/exp", "w").close(); RunState.load("runs/exp")
    os.environ["HOME"] = os.getcwd(); print(RunState.load("~/exp").run.path == RunState.load("exp").run.path)
    # In silence, and right.
    state = RunState.load("runs/exp"); state.close(); state.close()
    RunState.load("runs/exp").save(loss=torch.tensor(0.5)).wait()
    RunState.load("runs/exp", every="10 mins")
    torch.no_grad()(train)(0)
    train(2, allow=["scaler"]); train(2, allow=["scaler"])
    train(2); load_weights(Net(head="out"), "runs/exp", rename={"fc": "out"})
""").strip()

CODES = [line for line in MISTAKES.splitlines() if not line.startswith("#")]


def _seen(code: str, folder: str) -> str:
    """Return all that a user sees of some code: what is printed, the warnings, the error."""
    output, here, home = io.StringIO(), os.getcwd(), os.environ.get("HOME", "")
    os.chdir(folder)
    scope = {"__name__": "__main__"}
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(output):
            warnings.simplefilter("always")
            exec(compile(f"{BEGIN}\n{code}", "train.py", "exec"), scope)
    except Exception as exc:
        output.write(f"{type(exc).__name__}: {exc}\n")
    finally:
        if "state" in scope:
            scope["state"].close()  # type: ignore[attr-defined]
        os.chdir(here)
        os.environ["HOME"] = home
    told = "".join(f"warning: {one.message}\n" for one in caught) + output.getvalue()
    told = told.replace(os.path.realpath(folder), "/home/me").replace(folder, "/home/me")
    return re.sub(r"\([\d.]+ m?s\)", "(14 ms)", told) or "(nothing)\n"


def _page(seen: dict[str, str]) -> str:
    rows = [
        f"\n{line}\n{'=' * len(line)}\n" if line.startswith("#") else f"\n>>> {line}\n{seen[line]}"
        for line in MISTAKES.splitlines()
    ]
    return "".join(rows).lstrip("\n")


def _golden() -> dict[str, str]:
    entries = re.split(r"^>>> ", GOLDEN.read_text(), flags=re.MULTILINE)[1:]
    found = {}
    for entry in entries:
        code, _, told = entry.partition("\n")
        found[code] = told.partition("\n# ")[0].strip("\n") + "\n"
    return found


@pytest.mark.parametrize("code", CODES)
def test_a_mistake_is_told_as_it_is_written_down(code: str, tmp_path: Path) -> None:
    assert _seen(code, str(tmp_path)) == _golden()[code]


def test_no_mistake_is_written_down_that_is_not_made() -> None:
    assert [*_golden()] == CODES


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))
    torch.set_num_threads(1)
    found = {}
    for one in CODES:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            found[one] = _seen(one, place)
    GOLDEN.write_text(_page(found))
