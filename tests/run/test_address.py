"""What names a checkpoint, in the library as on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from resumable import RunState, load_weights
from resumable.errors import CheckpointNotFound, UsageError
from resumable.run import address


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in which each weight of checkpoint N is N; the second is the best."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(1, 1, bias=False)
    with RunState.load("other", model=model, maximize="acc", keep=None) as state:
        for number, acc in ((1, 0.1), (2, 0.9), (3, 0.5)):
            torch.nn.init.constant_(model.weight, number)
            state.save(acc=acc)
    return tmp_path / "other"


PLACES = [
    ("other", 3),
    ("other@newest", 3),
    ("other@best", 2),
    ("other/best", 2),
    ("other@1", 1),
    ("other/checkpoints/000001-step-00000000", 1),
]


@pytest.mark.parametrize(("place", "number"), PLACES)
def test_a_new_run_begins_from_a_named_checkpoint_of_another(other: Path, place: str, number: int) -> None:
    model = torch.nn.Linear(1, 1, bias=False)

    with RunState.load("fresh", model=model, maximize="acc", resume=place):
        assert model.weight.item() == number


@pytest.mark.parametrize(("place", "number"), PLACES)
def test_weights_are_loaded_from_a_named_checkpoint(other: Path, place: str, number: int) -> None:
    model = torch.nn.Linear(1, 1, bias=False)

    load_weights(model, place)

    assert model.weight.item() == number


@pytest.mark.parametrize("place", ["other@9", "none@best", "none/best"])
def test_a_checkpoint_that_is_not_there_is_not_found(other: Path, place: str) -> None:
    with pytest.raises(CheckpointNotFound):
        RunState.load("fresh", model=torch.nn.Linear(1, 1, bias=False), resume=place)


def test_a_word_that_names_no_checkpoint_is_refused(other: Path) -> None:
    with pytest.raises(UsageError, match="other@41"):
        address.named("other@oldest")


def test_a_folder_may_have_an_at_sign_in_its_name(other: Path) -> None:
    other.rename("exp@2")

    assert address.named("exp@2") == ("exp@2", None)
    assert address.named("exp@2@1") == ("exp@2", "1")
