"""An error is shown at the user's line."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import RunState, UsageError, load_weights


def _files(error: BaseException) -> list[str]:
    return [Path(line.filename).name for line in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize(
    "call",
    [
        lambda path: RunState.load(path, keep=0),
        lambda path: [*RunState.load(path).epochs(-1)],
        lambda path: RunState.load(path).mean(),
        lambda path: load_weights(path, path),
    ],
)
def test_an_error_has_one_line_of_the_library(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError) as short:
        call(tmp_path / "exp")
    monkeypatch.setenv("RESUMABLE_FULL_TRACEBACK", "1")
    with pytest.raises(UsageError) as full:
        call(tmp_path / "other")

    assert len(_files(short.value)) - _files(short.value).count("test_tracebacks.py") == 1
    line = traceback.extract_tb(short.value.__traceback__)[-1].line
    assert line == "raise error  # RESUMABLE_FULL_TRACEBACK=1 shows where"
    assert len(_files(full.value)) > len(_files(short.value))


def test_a_type_error_inside_a_call_stays_what_it_is(tmp_path: Path) -> None:
    class Odd(nn.ReLU):
        def state_dict(self, *_: Any, **__: Any) -> Any:
            return self.train(1, 2, 3)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="takes from 1 to 2 positional") as found:
        RunState.load(tmp_path, extra={"it": Odd()}).save()
    assert _files(found.value)[-1] == "test_tracebacks.py"


class Broken(Dataset[int]):
    """A dataset whose samples cannot be read."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise OSError("the disk is gone")


def test_an_error_of_the_script_keeps_its_lines(tmp_path: Path) -> None:
    loader: DataLoader[int] = DataLoader(Broken())
    with RunState.load(tmp_path, loader=loader) as state, pytest.raises(OSError, match="gone") as found:
        next(iter(state.batches()))

    assert _files(found.value)[-1] == "test_tracebacks.py"


def test_a_part_that_refuses_its_state_keeps_its_lines(tmp_path: Path) -> None:
    class Refusing(nn.ReLU):
        def load_state_dict(self, *_: Any, **__: Any) -> Any:
            raise ValueError("not mine")

    RunState.load(tmp_path, extra={"it": Refusing()}).save().wait()

    with pytest.raises(ValueError, match="refused its state") as found:
        RunState.load(tmp_path, extra={"it": Refusing()})
    assert found.value.__cause__ is not None
    assert _files(found.value.__cause__)[-1] == "test_tracebacks.py"
