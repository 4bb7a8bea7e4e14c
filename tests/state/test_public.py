"""The public names, frozen: adding, renaming or removing one is a decision, not an accident."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import resumable
from resumable import PendingSave, Run, RunState

NAMES = [
    "Boundary",
    "CannotRead",
    "CannotStore",
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointNotExpected",
    "CheckpointNotFound",
    "Diverged",
    "FormatTooNew",
    "Misfit",
    "NotARun",
    "PendingSave",
    "Preempt",
    "Preempted",
    "RankLost",
    "Ranks",
    "RanksDiffer",
    "Remote",
    "RemoteError",
    "ResumableError",
    "ResumableWarning",
    "Run",
    "RunExists",
    "RunInUse",
    "RunState",
    "SaveFailed",
    "StateMismatch",
    "Trace",
    "Unregistered",
    "Unsupported",
    "UsageError",
    "load_weights",
    "seed_everything",
]

PARTS = ["model", "optimizer", "scheduler", "scaler", "loader", "extra"]
OPTIONS = [
    *("maximize", "minimize", "keep", "every", "resume", "allow", "override", "rename", "expect"),
    *("preempt", "remote", "ranks", "trace", "sample_seeds", "variables", "progress", "quiet"),
]


def members(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_the_public_names_are_just_these() -> None:
    assert sorted(resumable.__all__) == NAMES
    assert {name for name in dir(resumable) if not name.startswith("_")} == set(NAMES)


def test_the_members_of_the_public_classes_are_just_these() -> None:
    assert members(RunState) == {
        *("load", "save", "restore", "wait", "close", "epochs", "batches", "enumerate", "steps"),
        *("spiked", "patience", "report", "note", "check", "mean", "begin_at", "print", "show"),
        *(
            "run",
            "epoch",
            "batch",
            "step",
            "samples",
            "best",
            "metrics",
            "means",
            "vars",
            "run_id",
            "resumed",
        ),
    }
    assert members(PendingSave) == {"wait", "wait_unless_told"}
    assert members(Run) == {
        *("check", "names", "numbers", "open", "path_of", "checkpoints", "choose"),
        *("acquire", "release", "wait_until_free"),
        *("identity", "point", "prune", "added", "best", "highest", "holds", "holds_more_than"),
        *("known_id", "adopt", "take_in", "remove_pulls", "remove"),
    }


def test_load_takes_the_parts_the_options_and_where_to_begin() -> None:
    loaded = list(inspect.signature(RunState.load).parameters)

    assert loaded == ["run_dir", *PARTS, *OPTIONS]


def test_every_public_method_is_documented() -> None:
    undocumented = [
        f"{kind.__name__}.{name}"
        for kind in (RunState, Run, PendingSave)
        for name in members(kind)
        if not inspect.getdoc(getattr(kind, name))
    ]

    assert not undocumented


def loaded_modules(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_importing_the_package_imports_neither_torch_nor_numpy() -> None:
    assert not loaded_modules("import resumable") & {"torch", "numpy"}


@pytest.mark.nightly
def test_a_plain_training_waits_for_no_remote_no_trace_and_no_report(tmp_path: Path) -> None:
    found = loaded_modules(f"""
import os, torch
from resumable import RunState
os.chdir({str(tmp_path)!r})
with RunState.load("exp", model=torch.nn.Linear(2, 1), quiet=True) as state:
    state.save()
""")

    rare = {"remote.in_training", "trace.tracer", "views.report", "processes.joint"}
    assert not found & {"statistics", "fractions", *(f"resumable.{name}" for name in rare)}


@pytest.mark.heavy
@pytest.mark.parametrize("state", ["enable", "disable"])
@pytest.mark.parametrize("name", ["RunState", "Trace"])
def test_the_garbage_collector_is_left_as_the_script_has_set_it(state: str, name: str) -> None:
    code = f"""
import gc, torch, resumable
gc.{state}()
resumable.{name}
print(gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == [str(state == "enable")]


@pytest.mark.heavy
def test_importing_the_package_starts_no_thread_and_takes_no_signal() -> None:
    code = """
import signal, threading
before = signal.getsignal(signal.SIGTERM)
import resumable.state, resumable.cli.app
assert threading.active_count() == 1
assert signal.getsignal(signal.SIGTERM) is before
"""

    assert "resumable.state" in loaded_modules(code)
