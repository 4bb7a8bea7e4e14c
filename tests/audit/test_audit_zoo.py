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
    "augmenter_forgotten": ("randomness", "dice"),
    "channels_last_at_the_first_start": ("state", "0.weight"),
    "curriculum_forgotten": ("data", "curriculum.level"),
    "dropout_with_its_own_generator": ("randomness", "masks"),
    "ema_forgotten": ("state", "ema"),
    "fewer_threads_after_a_resume": ("numbers", "threads"),
    "files_shuffled_in_place": ("data", "dataset.names"),
    "group_added_after_load": ("script", "optimizer"),
    "iterator_by_hand": ("script", "loader"),
    "learning_rate_by_hand": ("state", "rate"),
    "mixup_generator_forgotten": ("randomness", "mixup_rng"),
    "noise_generator_forgotten": ("randomness", "noise"),
    "nondeterministic_scatter": ("repeat: operation", "an operation"),
    "numpy_unseeded": ("repeat: numpy", "NumPy's generator"),
    "replay_forgotten": ("state", "replay"),
    "running_mean_is_no_buffer": ("state", "running_mean"),
    "sampler_counts_by_itself": ("data", "rounds"),
    "scheduler_after_load": ("state", "scheduler"),
    "second_optimizer_forgotten": ("state", "head_optimizer"),
    "seed_from_the_time": ("repeat: clock", "the time"),
    "seeded_at_the_first_batch": ("randomness", "torch's generator"),
    "set_epoch_too_late": ("data", "sampler.epoch"),
    "set_order": ("repeat: hash", "set of strings"),
    "settings_in_a_named_tuple": ("state", "settings"),
    "split_by_a_fresh_generator": ("repeat: system", "splitter"),
    "state_dict_leaves_out": ("state", "loss_scale.seen"),
    "temperature_in_no_part": ("state", "log_temperature"),
    "torch_unseeded": ("repeat: torch", "torch's generator"),
    "validation_every_so_often": ("randomness", "since_validation"),
    "worker_seeded_by_the_time": ("repeat: clock", "the time"),
}
"""What is wrong with each, and what the diagnosis has to name."""

NOTED = "patience_in_a_variable"
"""What is lost, but no training depends on it within the steps of an audit."""

UNNAMED = "accumulation_by_enumerate"
"""What is diagnosed by its class only, since it cannot be put back."""

REAL = {
    "accumulation_of_a_library": ("state", "accelerator.step"),
    "average_that_teaches": ("state", "main.model_ema"),
    "batch_ahead_and_a_count": ("state", "X"),
    "environment_forgotten": ("state", "env.place"),
    "generator_of_the_environment": ("randomness", "_np_random"),
    "hidden_state_of_an_epoch": ("state", "train.hidden"),
    "mean_that_decides_the_rate": ("state", "losses_m"),
    "optimizer_of_the_critic": ("state", "optimizer_d"),
    "python_random_in_a_dataset": ("repeat: python", "Python's generator"),
    "rate_of_a_plateau": ("state", "lr"),
    "scheduler_in_a_function": ("state", "main.scheduler"),
}
"""The same of published scripts that were broken on purpose."""

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

    _is_diagnosed(ZOO / "broken" / f"{name}.py", *BROKEN[name], start)


@pytest.mark.heavy
def test_what_no_training_depends_on_is_a_note(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    verdict = audit([sys.executable, str(ZOO / "broken" / f"{NOTED}.py")], start=forks)

    assert verdict.is_exact, verdict.findings
    assert "main.epochs_without" in [one.name for one in verdict.lost if one.weight == "note"]


@pytest.mark.heavy
def test_what_cannot_be_put_back_is_not_named(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    first = audit([sys.executable, str(ZOO / "broken" / f"{UNNAMED}.py")], start=forks).findings[0]

    assert (first.kind, list(first.names)) == ("state", [])


@pytest.mark.parametrize("name", sorted(REAL))
def test_a_published_script_that_is_broken_is_diagnosed(
    name: str, forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    _is_diagnosed(ZOO / "real" / "broken" / f"{name}.py", *REAL[name], forks)


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
    assert not [one for one in verdict.lost if one.weight == "state"]


@pytest.mark.heavy
def test_a_resume_that_gives_no_batch_has_other_data(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = ZOO / "broken" / "sampler_counts_by_itself.py"

    (found,) = audit([sys.executable, str(script)], at=[10], start=forks).findings

    # In mid-epoch the sampler has its count of the next epoch, so that to put it back proves nothing.
    assert found.kind == "data"


def test_every_broken_script_is_in_the_table() -> None:
    assert {script.stem for script in (ZOO / "broken").glob("*.py")} == {*BROKEN, NOTED, UNNAMED}
    assert {script.stem for script in (ZOO / "real" / "broken").glob("*.py")} == REAL.keys()
