"""What does not repeat itself is named, and the training does not notice that anybody has looked."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from resumable.audit import replay
from resumable.audit.nondeterminism import CHANGED, DIFFERED, REFUSED, Inspection, Operation

PLACES = torch.randint(0, 50, (20_000,), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def _not_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


def inspected(work: Callable[[], object]) -> list[Operation]:
    inspection = Inspection()
    inspection.begin()
    try:
        work()
    finally:
        found = inspection.end()
    return found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)
        self.last = nn.Linear(8, 20)

    def forward(self, batch: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(batch.abs().mul(4).long()))
        return self.last(states).flatten(1)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (3, 4, 4)),
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.RReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(32, 20),
    )


def attentive() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (6, 8)), nn.TransformerEncoder(layer, 2), nn.Flatten())


def trained(make: Callable[[], nn.Module], **options: Any) -> list[Tensor]:
    """Return all that three steps leave behind, the generators too."""
    torch.manual_seed(0)
    own = torch.Generator().manual_seed(1)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        scores = model(torch.randn(4, 48, generator=own)) + torch.rand(1)
        functional.cross_entropy(scores, torch.randint(0, 20, (4,))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    left = [*model.state_dict().values(), *average.state_dict().values(), *moments]
    return [*left, torch.get_rng_state(), own.get_state()]


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("make", [convolutional, attentive, Recurrent])
def test_a_training_that_is_inspected_has_the_bits_of_one_that_is_not_and_raises_no_alarm(
    make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    alone, watched = trained(make, **options), list[Tensor]()

    found = inspected(lambda: watched.extend(trained(make, **options)))

    assert found == []
    assert all(map(torch.equal, alone, watched))


@pytest.mark.usefixtures("_two_threads")
def test_an_operation_whose_bits_differ_is_named_with_its_line() -> None:
    values = torch.randn(len(PLACES), 16)

    def work() -> None:
        torch.zeros(50, 16).index_put_((PLACES,), values, accumulate=True)  # here

    assert until_seen(work) == ("aten::index_put_", DIFFERED, here("here"), 1)


@pytest.mark.usefixtures("_two_threads")
def test_one_of_backward_is_named_with_the_line_of_its_forward() -> None:
    rows = torch.randn(50, 16, requires_grad=True)
    factors = torch.randn(len(PLACES), 16)

    def work() -> None:
        picked = rows[PLACES]  # in forward
        picked = picked.detach() * 0 + picked
        (picked * factors).sum().backward()

    assert until_seen(work) == ("aten::index_put", DIFFERED, f"the backward of {here('in forward')}", 1)


def until_seen(work: Callable[[], object]) -> Operation | None:
    """Return what is seen to differ at last: where processors are busy, threads may take turns for long."""
    rounds = (one for _ in range(1000) for one in inspected(work))
    return next((one for one in rounds if one.why == DIFFERED), None)


@pytest.mark.usefixtures("_two_threads")
def test_what_repeats_itself_by_chance_is_named_where_torch_would_do_it_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # (the second time is taken for the same, as it is where threads take turns)
    monkeypatch.setattr(Inspection, "_differs", lambda *_: False)
    values = torch.randn(len(PLACES), 16)

    def work() -> None:
        for _ in range(3):
            torch.zeros(50, 16).index_put_((PLACES,), values, accumulate=True)

    rounds = (one for _ in range(1000) for one in inspected(work))

    assert next(rounds)[:2] == ("aten::index_put_", CHANGED)


def here(mark: str) -> str:
    with open(__file__, encoding="utf-8") as file:
        (number,) = (i for i, line in enumerate(file, 1) if line.endswith(f"  # {mark}\n"))
    return f"test_operations.py:{number}"


def test_what_torch_refuses_is_named_and_neither_shown_nor_raised() -> None:
    def work() -> None:
        for _ in range(3):
            torch.zeros(5).put_(torch.tensor([0, 0]), torch.ones(2))
            values, places = functional.max_pool1d(torch.ones(1, 1, 4), 2, return_indices=True)
            functional.max_unpool1d(values, places, [2])

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        found = inspected(work)

    assert [(one.name, one.why, one.times) for one in found] == [
        ("aten::put_", REFUSED, 3),
        ("aten::max_unpool2d", REFUSED, 3),
    ]
    assert shown == []


@pytest.mark.parametrize("flags", [(False, False), (True, True)])
def test_the_flags_of_the_script_stay_as_they_are(flags: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])
    try:
        inspected(lambda: torch.ones(9).cumsum(0))
        now = torch.are_deterministic_algorithms_enabled()
        only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)

    assert (now, only_warns) == flags


def test_what_a_script_has_asked_torch_to_refuse_is_still_raised() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            inspected(lambda: torch.zeros(5).put_(torch.tensor([0]), torch.ones(1)))
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_operation_of_somebody_else_is_done_once_and_told() -> None:
    done: list[Tensor] = []

    @torch.library.custom_op("tests::keep_a_line", mutates_args=())
    def keep_a_line(value: Tensor) -> Tensor:
        done.append(value)
        return value.clone()

    inspection = Inspection()
    inspection.begin()
    keep_a_line(torch.ones(2))
    found = inspection.end()

    assert (len(done), found, inspection.left_alone) == (1, [], {"tests::keep_a_line"})


def test_a_product_that_torch_refuses_for_want_of_a_variable_is_neither_named_nor_left_alone() -> None:
    def product(value: Tensor) -> Tensor:
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError(
                "not deterministic because it uses CuBLAS: set CUBLAS_WORKSPACE_CONFIG=:4096:8"
            )
        return value * 2

    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("a_product(Tensor value) -> Tensor")
    library.impl("a_product", product, "CPU")
    inspection = Inspection()
    inspection.begin()
    torch.ops.torchvision.a_product(torch.ones(2))
    found = inspection.end()

    assert (found, inspection.left_alone) == ([], set())


def test_the_mode_of_somebody_else_that_is_still_open_stays() -> None:
    seen: list[str] = []

    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    inspection = Inspection()
    inspection.begin()
    with Other():  # type: ignore[no-untyped-call]
        inspection.end()
        seen.clear()
        torch.ones(2)
    inspection.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    assert seen == ["aten.ones.default"]


class Wrapped(Tensor):
    """A tensor that is made of another one."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made = Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = [one.inner if isinstance(one, Wrapped) else one for one in args]
        return func(*inner, **(kwargs or {}))


def test_of_a_tensor_that_is_made_of_tensors_their_operations_are_seen() -> None:
    wrapped = Wrapped(torch.zeros(5))

    found = inspected(lambda: torch.put(wrapped, torch.tensor([0, 0]), torch.ones(2)))

    assert [one.name for one in found] == ["aten::put"]


class Modes(Dataset[int]):
    """How many modes there are in the process that loads, and whether they do anything."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        sums = torch.zeros(5).put_(torch.tensor([0, 0]), torch.ones(2))
        mode: Any = torch.utils._python_dispatch._get_current_dispatch_mode()
        return len(mode._tallies) + int(sums[0]) - 1


def test_workers_that_load_are_not_inspected() -> None:
    loader = DataLoader(Modes(), num_workers=1, multiprocessing_context="fork")
    batches: list[Tensor] = []

    inspected(lambda: batches.extend(loader))

    assert torch.cat(batches).tolist() == [0, 0]


def test_twins_lie_as_their_originals_do() -> None:
    memory = torch.arange(100.0)
    one, other = memory[3:23:2], memory.as_strided((2, 5), (5, 2), 20)

    (twin, second), _ = replay.twins(((one, other), {}))
    twin += 1

    assert (twin.stride(), second.stride()) == (one.stride(), other.stride())
    assert torch.equal(one + 1, twin)
    assert second[0, 1] == 22  # (which is the last of `one` in both)
    assert not any(a.data_ptr() % 64 - b.data_ptr() % 64 for a, b in [(one, twin), (other, second)])


@pytest.mark.heavy
@pytest.mark.usefixtures("_not_compiled")
def test_what_is_compiled_stays_compiled() -> None:
    compiled: list[object] = []

    def backend(graph: Any, _: object) -> Any:
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda value: value * 2, backend=backend)
    inspected(lambda: double(torch.ones(3)))

    assert len(compiled) == 1
