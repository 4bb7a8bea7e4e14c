"""An error is shown at the user's line."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import Run, RunState, UsageError, load_weights


def _files(error: BaseException) -> list[str]:
    return [Path(line.filename).name for line in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize(
    "call",
    [
        lambda path: RunState.load(path, keep=0),
        lambda path: RunState.load(path).batches(10),
        lambda path: [*RunState.load(path).epochs(-1)],
        lambda path: [*RunState.load(path).steps(-1)],
        lambda path: RunState.load(path).mean(),
        lambda path: setattr(RunState.load(path), "vars", 3),
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
    assert len(_files(full.value)) > len(_files(short.value))


def test_the_line_of_the_library_in_a_traceback_says_how_to_see_the_others(tmp_path: Path) -> None:
    for call in (RunState.load(tmp_path).mean, RunState.load(tmp_path).epochs(-1).__next__):
        with pytest.raises(UsageError) as found:
            call()
        line = traceback.extract_tb(found.value.__traceback__)[-1].line
        assert line == "raise error  # RESUMABLE_FULL_TRACEBACK=1 shows where"


def test_a_cause_inside_the_library_is_shown_only_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = RunState.load(tmp_path)
    with pytest.raises(UsageError) as short:
        state.save(loss=torch.ones(3))
    monkeypatch.setenv("RESUMABLE_FULL_TRACEBACK", "1")
    with pytest.raises(UsageError) as full:
        state.save(loss=torch.ones(3))

    assert "RuntimeError" not in "".join(traceback.format_exception(short.value))
    assert isinstance(short.value.__context__, RuntimeError)
    assert "RuntimeError" in "".join(traceback.format_exception(full.value))


def test_arguments_that_do_not_fit_are_told_at_the_line_of_the_call(tmp_path: Path) -> None:
    load: Any = RunState.load
    with pytest.raises(UsageError, match=r"no argument modle=\. Did you mean model=\?") as found:
        load(tmp_path, modle=nn.ReLU())

    assert _files(found.value) == ["test_tracebacks.py", "tracebacks.py"]


def test_a_type_error_inside_a_call_stays_what_it_is(tmp_path: Path) -> None:
    class Odd(nn.ReLU):
        def state_dict(self, *_: Any, **__: Any) -> Any:
            return self.train(1, 2, 3)  # type: ignore[call-arg]

    with pytest.raises(TypeError, match="takes from 1 to 2 positional") as found:
        RunState.load(tmp_path, extra={"it": Odd()}).save()
    assert _files(found.value)[-1] == "test_tracebacks.py"


class Ones(Dataset[torch.Tensor]):
    """Four samples."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2)


class Broken(Dataset[int]):
    """A dataset whose samples cannot be read."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        raise OSError("the disk is gone")


def test_a_loop_over_the_loader_itself_is_told_at_its_line(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer, loader = torch.optim.SGD(model.parameters()), DataLoader(Ones())
    with RunState.load(tmp_path, model=model, optimizer=optimizer, loader=loader) as state:
        for _ in state.epochs(1):
            batches = iter(loader)
            model(next(batches)).sum().backward()
            optimizer.step()
            with pytest.raises(UsageError, match="takes its batches from the loader itself") as found:
                next(batches)
            break

    assert _files(found.value) == ["test_tracebacks.py", "torch_iterators.py"]


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


def test_a_method_is_documented_and_found_as_it_was_written() -> None:
    assert RunState.save.__doc__
    assert RunState.save.__globals__["__name__"] == "resumable.state"
    assert Run.open.__name__ == "open"
