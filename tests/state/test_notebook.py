"""A notebook: the stop button ends the cell in good order, and the cell run again continues."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = [
    pytest.mark.heavy,
    # Of the client's own.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SETUP = """
import os, pathlib, sys, time
sys.path.insert(0, {root!r})
import torch
from resumable import RunState
torch.set_num_threads(1)
pathlib.Path("pid").write_text(str(os.getpid()))

def train(run_dir, pace=0.0):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    loader = torch.utils.data.DataLoader(torch.randn(24, 4), batch_size=4, shuffle=True)
    state = RunState.load(run_dir, model=model, optimizer=optimizer, loader=loader, minimize="loss")
    for epoch in state.epochs(4):
        for batch in state.batches():
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            state.show(loss=loss)
            pathlib.Path("step").write_text(str(state.step))
            time.sleep(pace)
        state.save(loss=loss.detach())
    state.close()
    return state.resumed, [tensor.view(torch.int32).tolist() for tensor in model.state_dict().values()]
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Any]:
    """A notebook's kernel, in which cells are run."""
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=120,
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    with client.setup_kernel():
        yield client


def run(client: Any, code: str) -> list[Any]:
    """Run a cell; return its outputs."""
    cell = nbformat.v4.new_code_cell(code)
    client.nb.cells.append(cell)
    client.execute_cell(cell, len(client.nb.cells) - 1)
    outputs: list[Any] = cell.outputs
    return outputs


def printed(outputs: list[Any]) -> str:
    return "".join(one.text for one in outputs if one.output_type == "stream" and one.name == "stdout")


def press_stop(folder: Path, step: int) -> threading.Thread:
    """Press the stop button once the training is at a step."""

    def press() -> None:
        end = time.monotonic() + 60
        while not (folder / "step").exists() or int((folder / "step").read_text() or 0) < step:
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(int((folder / "pid").read_text()), signal.SIGINT)

    thread = threading.Thread(target=press, daemon=True)
    thread.start()
    return thread


def test_a_cell_that_is_stopped_and_run_again_ends_with_the_same_bits(kernel: Any, tmp_path: Path) -> None:
    run(kernel, SETUP.format(root=str(ROOT)))
    (whole,) = [one.data["text/plain"] for one in run(kernel, "train('whole')") if "execution_count" in one]
    (tmp_path / "step").unlink()

    for stop_at in (4, 9):
        thread = press_stop(tmp_path, stop_at)
        *_, stopped = run(kernel, "_ = train('stopped', 0.1)")
        thread.join(60)
        assert (stopped.output_type, stopped.ename) == ("error", "KeyboardInterrupt")
        place = r"checkpoint \d: epoch \d, batch \d/6, step \d+"
        assert re.fullmatch(
            rf"SIGINT: stopped is saved, {place}; run the cell again to go on", stopped.evalue
        )
    again = run(kernel, "train('stopped')")

    assert re.search(r"^resumed stopped from checkpoint", printed(again), re.MULTILINE)
    (resumed,) = [one.data["text/plain"] for one in again if "execution_count" in one]
    assert whole.split() == ["(False,", *resumed.split()[1:]]
    assert resumed.split()[0] == "(True,"


def test_a_cell_shows_one_bar_of_text_that_stays_when_it_is_finished(kernel: Any, tmp_path: Path) -> None:
    run(kernel, SETUP.format(root=str(ROOT)))
    outputs = run(kernel, "_ = train('shown')")
    bars = [one.data["text/plain"] for one in outputs if one.output_type == "display_data"]
    names = run(kernel, "RunState.load('shown', minimize='loss', allow=['*']).run")

    assert printed(outputs) == "shown is empty: starting fresh\n"
    assert len(bars) == 1
    assert re.fullmatch(r"epoch 4/4 100% ━{20}  00:0\d  saved 4  loss \d\.\d+", bars[0])
    assert "<Run shown: 4 checkpoints, newest 4>" in str(names)


LOOP = """
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
state = RunState.load('cells', model=model, loader=torch.arange(24.0).view(6, 4).split(1), minimize='loss')
best, history = 9e9, []
for epoch in state.epochs(3):
    for number, batch in enumerate(state.batches()):
        loss = model(batch).sum()
        history.append(round(loss.item(), 4))
        if history[-1] < best:
            best, best_at = history[-1], (epoch, number)
        pathlib.Path('step').write_text(str(state.step + len(history)))
        time.sleep(PACE)
    last = state.epoch
    state.save(loss=loss.detach())
state.close()
"""


def test_what_cells_read_later_comes_back_to_a_kernel_that_was_restarted(kernel: Any, tmp_path: Path) -> None:
    show = "[best, best_at, history, last, number]"
    run(kernel, SETUP.format(root=str(ROOT)))
    run(kernel, LOOP.replace("PACE", "0").replace("'cells'", "'whole'"))
    (whole,) = [one.data["text/plain"] for one in run(kernel, show)]
    (tmp_path / "step").unlink()

    for stop_at in (8, 14, None):
        thread = press_stop(tmp_path, stop_at) if stop_at else None
        *_, last = run(kernel, LOOP.replace("PACE", "0.1" if stop_at else "0"))
        if thread:
            thread.join(60)
            assert last.ename == "KeyboardInterrupt"
            kernel.km.restart_kernel(now=True)
            kernel.kc.wait_for_ready()
            run(kernel, SETUP.format(root=str(ROOT)))
    (resumed,) = [one.data["text/plain"] for one in run(kernel, show)]
    assert resumed == whole
    # The run is complete: no body runs again.
    run(kernel, "del best, best_at, history, last, number")
    told = run(kernel, LOOP.replace("PACE", "0"))
    (again,) = [one.data["text/plain"] for one in run(kernel, show)]

    assert again == whole
    assert not [one for one in told if one.output_type == "stream" and one.name == "stderr"]
