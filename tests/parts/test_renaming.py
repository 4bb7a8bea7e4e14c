"""`rename=`: a checkpoint's names and the script's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resumable import RunState, StateMismatch, load_weights


class Net(nn.Module):
    """A body, and a head by any name."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.add_module(head, nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
        self.head_name = head

    def forward(self, x: torch.Tensor) -> Any:
        return self.get_submodule(self.head_name)(self.body(x))


class Wrapped(Net):
    """A net whose head has been put into another module."""

    def __init__(self, head: str) -> None:
        super().__init__(head)
        self.fc = nn.ModuleDict({"inner": self.get_submodule(head)})
        self.head_name = "fc.inner"


def _trained(
    run_dir: Path, head: str, steps: int, kind: type[Net] = Net, **options: Any
) -> list[torch.Tensor]:
    """Train up to a step; return the weights, the copy's weights and the moments."""
    torch.manual_seed(steps)
    model, copy = kind(head), kind(head)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "extra": {"ema": copy}}
    with RunState.load(run_dir, **parts, **options) as state:
        for _ in state.steps(steps):
            optimizer.zero_grad()
            model(torch.rand(4, 2)).square().sum().backward()
            optimizer.step()
            copy.load_state_dict(model.state_dict())
            state.save()
    moments = [optimizer.state[one]["exp_avg"] for one in model.parameters()]
    return [*model.state_dict().values(), *copy.state_dict().values(), *moments]


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("rename", [{"fc": "head"}, {"model.fc": "model.head", "extra.ema.fc": "head"}])
def test_a_renamed_module_resumes_bit_for_bit_twice(tmp_path: Path, rename: dict[str, str]) -> None:
    expected = [_trained(tmp_path / "a", "fc", steps) for steps in (2, 4, 6)][-1]

    _trained(tmp_path / "b", "fc", 2)
    _trained(tmp_path / "b", "head", 4, rename=rename)

    assert _same(_trained(tmp_path / "b", "head", 6, rename=rename), expected)


def test_a_module_that_is_wrapped_in_another_is_renamed_once(tmp_path: Path) -> None:
    expected = [_trained(tmp_path / "a", "fc", steps) for steps in (2, 4, 6)][-1]

    _trained(tmp_path / "b", "fc", 2)
    for steps in (4, 6):
        found = _trained(tmp_path / "b", "fc", steps, Wrapped, rename={"fc": "fc.inner"})

    assert _same(found, expected)


def test_two_tensors_cannot_get_one_name(tmp_path: Path) -> None:
    _trained(tmp_path, "fc", 1)

    with pytest.raises(StateMismatch, match="one name"):
        _trained(tmp_path, "head", 2, rename={"fc.0": "head", "fc.1": "head"})


def test_the_weights_of_a_file_are_renamed(tmp_path: Path) -> None:
    there, here = Net("fc"), Net("head")
    torch.save(there.state_dict(), tmp_path / "there.pt")

    assert not load_weights(here, tmp_path / "there.pt", rename={"fc": "head"})
    assert _same([*here.state_dict().values()], [*there.state_dict().values()])


class Two(nn.Module):
    """Two layers, or only the first."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for number in range(count):
            self.add_module(f"l{number}", nn.Linear(2, 2))


def test_a_name_that_the_checkpoint_has_already_is_refused(tmp_path: Path) -> None:
    with RunState.load(tmp_path, model=Two(2)) as state:
        state.save()

    with pytest.raises(StateMismatch, match=r"gives l1\.weight of the checkpoint the name l0\.weight"):
        RunState.load(tmp_path, model=Two(1), rename={"l1": "l0"}, allow=["model.l1.*"])
    with pytest.raises(StateMismatch, match=r"gives l1\.weight of the checkpoint the name l0\.weight"):
        load_weights(Two(1), tmp_path, rename={"l1": "l0"}, strict=False)
