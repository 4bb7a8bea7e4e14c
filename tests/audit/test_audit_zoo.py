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
    "accumulation_counter": ("state", "pending"),
    "attack_until_a_deadline": ("repeat: clock", "the time"),
    "augmenter_forgotten": ("randomness", "dice"),
    "batch_ahead": ("state", "x"),
    "batch_generator_forgotten": ("randomness", "picker"),
    "channels_last_at_the_first_start": ("state", "0.weight"),
    "critic_forgotten": ("state", "critic"),
    "curriculum_forgotten": ("data", "curriculum.level"),
    "dropout_with_its_own_generator": ("randomness", "masks"),
    "ema_forgotten": ("state", "ema"),
    "fewer_threads_after_a_resume": ("numbers", "threads"),
    "files_shuffled_in_place": ("data", "dataset.names"),
    "group_added_after_load": ("script", "optimizer"),
    "hard_examples_forgotten": ("data", "weights"),
    "head_reset_after_load": ("state", "head"),
    "hidden_state_forgotten": ("state", "hidden"),
    "iterator_by_hand": ("script", "loader"),
    "learning_rate_by_hand": ("state", "rate"),
    "loss_read_after_the_loop": ("state", "loss"),
    "loss_weights_from_history": ("state", "history"),
    "mixup_generator_forgotten": ("randomness", "mixup_rng"),
    "module_counts_calls": ("state", "calls"),
    "momentum_queue_forgotten": ("state", "queue"),
    "noise_generator_forgotten": ("randomness", "noise"),
    "nondeterministic_scatter": ("repeat: operation", "an operation"),
    "numpy_unseeded": ("repeat: numpy", "NumPy's generator"),
    "python_random_unseeded": ("repeat: python", "Python's generator"),
    "replay_forgotten": ("state", "replay"),
    "running_mean_is_no_buffer": ("state", "running_mean"),
    "sampler_counts_by_itself": ("data", "rounds"),
    "sanity_check_after_resume": ("randomness", "torch's generator"),
    "scaler_forgotten": ("state", "scaler"),
    "scheduler_after_load": ("state", "scheduler"),
    "scheduler_forgotten": ("state", "scheduler"),
    "second_optimizer_forgotten": ("state", "head_optimizer"),
    "seed_from_the_time": ("repeat: clock", "the time"),
    "seeded_at_the_first_batch": ("randomness", "torch's generator"),
    "set_epoch_by_own_count": ("data", "passes"),
    "set_epoch_too_late": ("data", "sampler.epoch"),
    "set_order": ("repeat: hash", "set of strings"),
    "settings_in_a_named_tuple": ("state", "settings"),
    "split_by_a_fresh_generator": ("repeat: system", "splitter"),
    "state_dict_leaves_out": ("state", "loss_scale.seen"),
    "temperature_in_no_part": ("state", "log_temperature"),
    "torch_unseeded": ("repeat: torch", "torch's generator"),
    "validation_every_so_often": ("randomness", "since_validation"),
    "warmup_by_hand": ("state", "updates"),
    "worker_seeded_by_the_time": ("repeat: clock", "the time"),
}
"""What is wrong with each, and what the diagnosis has to name."""

NOTED = {"average_only_at_the_end": "averaged", "patience_in_a_variable": "main.epochs_without"}
"""What is lost, but no training depends on it within the steps of an audit."""

UNNAMED = {"accumulation_by_enumerate": "state"}
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


@pytest.mark.sampled(48)
@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_script_is_diagnosed_by_its_class_and_by_name(
    name: str, forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = None if name in NOT_IN_FORKS else forks

    _is_diagnosed(ZOO / "broken" / f"{name}.py", *BROKEN[name], start)


@pytest.mark.parametrize("name", sorted(NOTED))
def test_what_no_training_depends_on_is_a_note(
    name: str, forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    verdict = audit([sys.executable, str(ZOO / "broken" / f"{name}.py")], start=forks)

    assert verdict.is_exact, verdict.findings
    assert NOTED[name] in [one.name for one in verdict.lost if one.weight == "note"]


@pytest.mark.parametrize("name", sorted(UNNAMED))
def test_what_cannot_be_put_back_is_not_named(
    name: str, forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    first = audit([sys.executable, str(ZOO / "broken" / f"{name}.py")], start=forks).findings[0]

    assert (first.kind, list(first.names)) == (UNNAMED[name], [])


@pytest.mark.sampled(16)
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


@pytest.mark.sampled(24)
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
def test_where_no_batch_can_be_given_after_a_resume_the_data_are_said_to_differ(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = ZOO / "broken" / "sampler_counts_by_itself.py"

    (found,) = audit([sys.executable, str(script)], at=[10], start=forks).findings

    # In mid-epoch the sampler has its count of the next epoch, so that to put it back proves nothing.
    assert found.kind == "data"


def test_every_broken_script_is_in_the_table() -> None:
    assert {script.stem for script in (ZOO / "broken").glob("*.py")} == {*BROKEN, *NOTED, *UNNAMED}
    assert {script.stem for script in (ZOO / "real" / "broken").glob("*.py")} == REAL.keys()
