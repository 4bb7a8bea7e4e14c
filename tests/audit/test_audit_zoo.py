"""Broken scripts of strangers are diagnosed, by class and by name, and correct ones give no alarm."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from forks import Forks
from places import DATA

from resumable.audit import trials
from resumable.audit.audit import audit
from resumable.audit.diagnosis import Finding

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

ZOO = DATA / "zoo"
BROKEN = {
    "channels_last_at_the_first_start": ("state", "0.weight"),
    "dataset_remembers_in_a_worker": ("data", "the batch"),
    "fewer_threads_after_a_resume": ("numbers", "threads"),
    "group_added_after_load": ("script", "optimizer"),
    "iterator_by_hand": ("script", "loader"),
    "levels_of_a_generator": ("state", "noise_levels"),
    "loader_in_a_cycle": ("data", "batches"),
    "log_beside_its_file": ("state", "log.lines"),
    "nondeterministic_scatter": ("repeat: operation", "an operation"),
    "numpy_unseeded": ("repeat: numpy", "NumPy's generator"),
    "seed_from_the_time": ("repeat: clock", "the time"),
    "set_order": ("repeat: hash", "set of strings"),
    "split_by_a_fresh_generator": ("repeat: system", "seeded by the operating system"),
    "torch_unseeded": ("repeat: torch", "torch's generator"),
    "worker_seeded_by_the_time": ("repeat: clock", "the time"),
    "python_random_in_a_dataset": ("repeat: python", "Python's generator"),
}
"""What is wrong with each, and what the diagnosis has to name."""

WITHOUT = {
    "curriculum_forgotten": ("data", "curriculum.level"),
    "ema_forgotten": ("state", "ema"),
    "learning_rate_by_hand": ("state", "rate"),
    "noise_generator_forgotten": ("randomness", "noise"),
    "patience_in_a_variable": ("", "epochs_without"),
    "second_optimizer_forgotten": ("state", "head_optimizer"),
    "mean_that_decides_the_rate": ("state", "losses_m"),
}
"""What is wrong with each without its variables, which a checkpoint has."""

RESTORED = {
    *WITHOUT,
    "accumulation_by_enumerate",
    "augmenter_forgotten",
    "dropout_with_its_own_generator",
    "files_shuffled_in_place",
    "mixup_generator_forgotten",
    "replay_forgotten",
    "running_mean_is_no_buffer",
    "sampler_counts_by_itself",
    "scheduler_after_load",
    "seeded_at_the_first_batch",
    "set_epoch_too_late",
    "settings_in_a_named_tuple",
    "state_dict_leaves_out",
    "temperature_in_no_part",
    "validation_every_so_often",
    "accumulation_of_a_library",
    "average_that_teaches",
    "batch_ahead_and_a_count",
    "environment_forgotten",
    "generator_of_the_environment",
    "hidden_state_of_an_epoch",
    "optimizer_of_the_critic",
    "rate_of_a_plateau",
    "scheduler_in_a_function",
}
"""What is exact since a checkpoint has the variables of a script."""

SCRIPTS = {path.stem: path for path in [*ZOO.glob("broken/*.py"), *ZOO.glob("real/broken/*.py")]}

CORRECT = sorted([*(ZOO / "correct").glob("*.py"), *(ZOO / "real" / "correct").glob("*.py")])

NOT_IN_FORKS = {"set_order"}
"""What is another in every process, but not in every fork of one: it shows in the audit's own three."""


def _said(finding: Finding) -> str:
    return "\n".join([finding.what, finding.text, *finding.names])


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_script_is_diagnosed_by_its_class_and_by_name(
    name: str, forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = None if name in NOT_IN_FORKS else forks

    _is_diagnosed(SCRIPTS[name], *BROKEN[name], start)


@pytest.mark.parametrize("name", sorted(RESTORED))
def test_a_script_that_forgets_its_variables_is_exact(
    name: str, forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    verdict = audit([sys.executable, str(SCRIPTS[name])], start=forks)

    assert verdict.is_exact, verdict.findings
    assert not verdict.lost


@pytest.mark.parametrize("name", sorted(WITHOUT))
def test_without_its_variables_it_is_diagnosed_by_its_class_and_by_name(
    name: str, forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESUMABLE_VARIABLES", "0")
    kind, named = WITHOUT[name]

    if kind:
        _is_diagnosed(SCRIPTS[name], kind, named, forks)
    else:
        verdict = audit([sys.executable, str(SCRIPTS[name])], start=forks)
        assert verdict.is_exact, verdict.findings
        assert any(named in one.name for one in verdict.lost)


def _is_diagnosed(script: Path, kind: str, named: str, start: trials.Start | None) -> None:
    first = audit([sys.executable, str(script)], start=start).findings[0]

    assert ": ".join(filter(None, (first.kind, first.cause))) == kind, _said(first)
    assert re.search(rf"\b{re.escape(named)}\b", _said(first)), _said(first)


@pytest.mark.parametrize("script", CORRECT, ids=lambda script: script.stem)
def test_a_correct_script_gives_no_alarm(
    script: Path, forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    verdict = audit([sys.executable, str(script)], start=forks)

    assert verdict.is_exact, verdict.findings
    assert len(verdict.stops) >= 2


def test_every_broken_script_is_in_the_table() -> None:
    assert SCRIPTS.keys() == BROKEN.keys() | RESTORED
