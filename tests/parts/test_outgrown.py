"""What grows in mid-training comes back exactly, or is named at the first save that sees it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import ResumableWarning, RunState, StateMismatch


class Net(nn.Module):
    """A backbone, a head, and a buffer that may grow."""

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(2, 2), nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(1), persistent=persistent)


def _grow(model: Net) -> None:
    model.seen = torch.cat([model.seen, torch.ones(1)])


def _add(model: Net) -> None:
    model.adapter = nn.Linear(1, 1)


def _drop(model: Net) -> None:
    del model.head


def _widen(model: Net) -> None:
    model.head.weight.data = torch.zeros(1, 3)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (_grow, "seen"),
        (_widen, "head.weight"),
        (_add, "adapter.weight, adapter.bias"),
        (_drop, "head.weight, head.bias"),
    ],
)
@pytest.mark.parametrize("slot", ["model", "extra"])
def test_a_model_that_changes_in_mid_training_is_named_once(
    run_dir: Path, change: Callable[[Net], None], names: str, slot: str
) -> None:
    model = Net()
    given: Any = model if slot == "model" else {"net": model}
    with RunState.load(run_dir, **{slot: given}) as state:
        state.save().wait()
        change(model)
        with pytest.warns(ResumableWarning, match=rf"{slot}.* has changed .*\({names}: new, gone or"):
            state.save().wait()
        state.save()

    given = Net() if slot == "model" else {"net": Net()}
    with pytest.raises(StateMismatch):
        RunState.load(run_dir, **{slot: given})


def _complex(model: Net) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().to(torch.complex64))


@pytest.mark.parametrize("change", [_grow, _widen, _add, _complex])
@pytest.mark.parametrize("slot", ["model", "extra"])
def test_a_change_after_equal_saves_is_named(run_dir: Path, change: Callable[[Net], None], slot: str) -> None:
    model = Net()
    given: Any = model if slot == "model" else {"net": model}
    with RunState.load(run_dir, **{slot: given}) as state:
        for _ in range(3):
            state.save().wait()
        change(model)
        with pytest.warns(ResumableWarning, match=rf"{slot}.* has changed since it was given.*R15"):
            state.save().wait()


def test_a_group_that_is_added_in_mid_training_is_named_once(run_dir: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.5)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        state.save().wait()
        optimizer.add_param_group({"params": [*model.backbone.parameters()]})
        with pytest.warns(ResumableWarning, match=r"has 4 parameters in 2 groups, and had 2 in 1 when"):
            state.save().wait()
        state.save()

    model = Net()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.5)
    with pytest.raises(StateMismatch, match="2 parameter groups in the checkpoint, 1 in the code") as caught:
        RunState.load(run_dir, model=model, optimizer=optimizer)
    assert caught.value.fix.startswith("make all groups before RunState.load (at a learning rate of 0, or")


@pytest.mark.filterwarnings("ignore:.* has changed since checkpoint")
def test_a_run_with_an_added_group_continues_with_all_made_before(run_dir: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.head.parameters(), lr=0.5)
    with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
        optimizer.add_param_group({"params": [*model.backbone.parameters()], "lr": 0.25})
        _step(model, optimizer)
        with pytest.warns(ResumableWarning, match="had 2 in 1 when"):
            state.save().wait()
    expected = [optimizer.state[parameter]["exp_avg"].tolist() for parameter in model.parameters()]

    for _ in range(2):
        model = Net()
        optimizer = torch.optim.Adam(model.head.parameters(), lr=0.5)
        optimizer.add_param_group({"params": [*model.backbone.parameters()], "lr": 0.0})
        with RunState.load(run_dir, model=model, optimizer=optimizer) as state:
            found = [optimizer.state[parameter]["exp_avg"].tolist() for parameter in model.parameters()]
            assert found == expected
            assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
            state.save()


def _step(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.head(model.backbone(torch.ones(3, 2))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _unfreezing(run: Path, total: int) -> list[float]:
    """Train as the warning advises: all groups from the start, one of them frozen at first."""
    torch.manual_seed(0)
    model = Net()
    model.backbone.requires_grad_(False)
    groups = [{"params": [*model.head.parameters()]}, {"params": [*model.backbone.parameters()]}]
    optimizer = torch.optim.Adam(groups, lr=0.125)
    with RunState.load(run, model=model, optimizer=optimizer, progress=False) as state:
        for step in state.steps(total):
            if step == 3:
                model.backbone.requires_grad_(True)
            optimizer.zero_grad()
            model.head(model.backbone(torch.randn(3, 2))).square().mean().backward()
            optimizer.step()
        state.save()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def test_groups_that_are_frozen_at_first_continue_exactly(run_dir: Path) -> None:
    expected = _unfreezing(run_dir / "whole", 6)
    assert [_unfreezing(run_dir / "parts", total) for total in (2, 4, 6)][-1] == expected


def test_tensors_that_may_grow_come_back_without_a_warning(run_dir: Path) -> None:
    for count in range(3):
        model, own = Net(persistent=False), {"seen": torch.zeros(1)}
        with warnings.catch_warnings(), RunState.load(run_dir, model=model, extra={"own": own}) as state:
            warnings.simplefilter("error")
            _grow(model)
            own["seen"] = torch.cat([own["seen"], torch.ones(1)])
            own["seen"].resize_(len(own["seen"]) + 1)[-1] = 5.0
            state.vars["seen"] = torch.cat([state.vars.get("seen", torch.zeros(1)), torch.ones(1)])
            state.save()

        expected = [0.0] + [1.0] * (count + 1)
        assert model.seen.tolist() == state.vars["seen"].tolist() == expected
        assert own["seen"].tolist() == [0.0] + [1.0, 5.0] * (count + 1)


class Items(Dataset[torch.Tensor]):
    """A dataset to which the training adds."""

    def __init__(self) -> None:
        self.items = [float(number) for number in range(8)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.items[index])


Grow = Callable[[Items, int], None]


def _nothing(data: Items, epoch: int) -> None:
    pass


def _by_epoch(data: Items, epoch: int) -> None:
    data.items[:] = [float(number) for number in range(8 + 3 * epoch)]


def _three_more(data: Items, epoch: int) -> None:
    data.items += [50.0 + epoch] * 3


def _collecting(
    run: Path,
    stop: int | None,
    *,
    keeps: bool,
    begin: Grow = _nothing,
    mid: Grow = _nothing,
    end: Grow = _nothing,
    **how: Any,
) -> list[list[float]]:
    """Loop over three epochs of data that grows; a negative stop is one at an epoch's end."""
    torch.manual_seed(0)
    data, fed = Items(), []
    loader = DataLoader(data, batch_size=2, shuffle=True)
    extra = {"items": data.items} if keeps else None
    with RunState.load(run, loader=loader, extra=extra, progress=False, **how) as state:
        for epoch in state.epochs(3):
            begin(data, epoch)
            for batch in state.batches():
                fed.append(batch.tolist())
                if state.batch == 1:
                    mid(data, epoch)
                if len(fed) == stop:
                    state.save().wait()
                    return fed
            end(data, epoch)
            if stop == -epoch - 1:
                state.save().wait()
                return fed
    return fed


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("keeps", "changes"),
    [(True, {"end": _three_more}), (True, {"begin": _by_epoch}), (False, {"begin": _by_epoch})],
)
@pytest.mark.parametrize("stops", [(2, 3), (6, 5), (-1, -2), (6, -2)])
def test_a_dataset_that_grows_between_epochs_continues_exactly(
    run_dir: Path, keeps: bool, changes: dict[str, Grow], stops: tuple[int, int]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the loop was left by a break right after save")
        expected = _collecting(run_dir / "whole", None, keeps=keeps, **changes)
        fed = []
        for stop in (*stops, None):
            fed += _collecting(run_dir / "parts", stop, keeps=keeps, **changes)

    assert fed == expected


def test_a_dataset_that_grows_unsaved_is_named_at_the_first_save(run_dir: Path) -> None:
    with pytest.warns(ResumableWarning, match=r"loader: the dataset has 11 items, and had 8 before"):
        _collecting(run_dir, -1, keeps=False, end=_three_more)
    with pytest.warns(ResumableWarning, match="has 8 items, as the script makes it, and had 11 at the"):
        _collecting(run_dir, 1, keeps=False)


def test_in_mid_epoch_a_dataset_that_lacks_what_was_added_is_refused(run_dir: Path) -> None:
    _collecting(run_dir, 6, keeps=False, end=_three_more)
    for _ in range(2):
        with pytest.raises(StateMismatch, match=r"has 8 items\. It had 11 when this epoch's order") as caught:
            _collecting(run_dir, None, keeps=False)
    assert "allow=['loader']" in caught.value.fix

    fed = _collecting(run_dir, None, keeps=False, allow=["loader"])
    assert sorted(number for batch in fed[:4] for number in batch) == Items().items


def test_a_dataset_that_grows_in_mid_epoch_is_named_at_the_first_save(run_dir: Path) -> None:
    with pytest.warns(ResumableWarning, match=re.escape("Add items only after the loop over the batches")):
        _collecting(run_dir, 3, keeps=True, mid=_three_more)
    for _ in range(2):
        with pytest.raises(StateMismatch, match=r"has 11 items\. It had 8 when this epoch's order"):
            _collecting(run_dir, None, keeps=True)
