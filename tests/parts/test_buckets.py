"""Gradients are summed in the same order after a resume, so that the sums are rounded the same."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gloo
import pytest
import torch
from torch import Tensor, nn
from torch.distributed import BuiltinCommHookType, HashStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from resumable.files import codec
from resumable.parts import ddp_buckets
from resumable.parts.models import ModulePart
from resumable.parts.part import Saved

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without processes")

STEPS = 5


class Net(nn.Module):
    """Layers that take several buckets; two of them can swap places from one step to the next."""

    def __init__(self, swaps: bool = False, unused: bool = False, mixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 120)
        self.middle = nn.ModuleList(nn.Linear(120, 120) for _ in range(3))
        self.last = nn.Linear(120, 3)
        self.swaps, self.step = swaps, 0
        if unused:
            self.unused = nn.Linear(4, 4)
        if mixed:
            self.middle[1].double()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        for layer in reversed(self.middle) if self.swaps and self.step % 2 else self.middle:
            hidden = torch.tanh(layer(hidden.to(layer.weight.dtype)))
        out: Tensor = self.last(hidden.float())
        return out


class Training:
    """A model in DDP and its optimizer, as a new process makes them."""

    def __init__(self, net: dict[str, Any], ddp: dict[str, Any], prepare: Callable[[Any], None]) -> None:
        self.model = Net(**net)
        self.ddp = DistributedDataParallel(self.model, bucket_cap_mb=0.05, **ddp)
        prepare(self.ddp)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.part = ModulePart("model", self.ddp, "model")

    def train(self, rank: int, begin: int, end: int, window: int) -> list[str]:
        hashes = []
        for step in range(begin, end):
            self.model.step = step
            for micro in range(window):
                seed = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
                with self.ddp.no_sync() if micro < window - 1 else contextlib.nullcontext():
                    self.ddp(torch.randn(4, 20, generator=seed)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            content = b"".join(parameter.detach().numpy().tobytes() for parameter in self.model.parameters())
            hashes.append(hashlib.sha256(content).hexdigest())
        return hashes

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        trees = {stem: codec.encode({"model": tree}) for stem, tree in self.part.collect().items()}
        return copy.deepcopy(trees), copy.deepcopy(self.optimizer.state_dict())

    def load(self, saved: tuple[dict[str, Any], dict[str, Any]]) -> None:
        trees, optimizer = saved
        self.part.restore(Saved(trees, "model"), set(), set())
        self.optimizer.load_state_dict(copy.deepcopy(optimizer))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Any], None], int, int]] = {
    # what the model is, how DDP is made, what is done with it then, batches a step, from which step on
    "plain": ({}, {}, lambda ddp: None, 1, 1),
    "accumulating": ({}, {}, lambda ddp: None, 2, 1),
    "views": ({}, {"gradient_as_bucket_view": True}, lambda ddp: None, 1, 1),
    # What the first step was like, nothing tells
    "static": ({}, {"static_graph": True}, lambda ddp: None, 1, 2),
    "static, unused": ({"unused": True}, {"static_graph": True}, lambda ddp: None, 1, 2),
    "unused": ({"unused": True}, {"find_unused_parameters": True}, lambda ddp: None, 1, 1),
    "another order at each step": ({"swaps": True}, {}, lambda ddp: None, 1, 1),
    "two dtypes": ({"mixed": True}, {}, lambda ddp: None, 1, 1),
    "a hook": ({}, {}, lambda ddp: ddp.register_comm_hook(None, fp16_compress_hook), 1, 1),
    "torch's hook": (
        {},
        {},
        lambda ddp: ddp._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS),
        1,
        1,
    ),
}
FORGETS = "forgets"


def _shuffled(ddp: DistributedDataParallel) -> list[Tensor]:
    parameters = [*ddp.parameters()]
    return parameters[1::2] + parameters[::2]


def _run(rank: int, names: Sequence[str]) -> dict[str, list[list[str]]]:
    """Return what each training was like: straight, stopped three times, and gone back to."""
    found = {}
    for name in names:
        *made, window, first = CASES[name.removesuffix(FORGETS).strip()]
        straight = Training(*made).train(rank, 0, STEPS, window)
        found[name] = [straight, hashes := []]
        saved = []
        for end in (first, first + 1, first + 2, STEPS):
            training = Training(*made)
            if saved:
                training.load(saved[-1])
            hashes += training.train(rank, len(hashes), end, window)
            saved.append(training.save())
            if name.endswith(FORGETS):
                saved[-1][0]["extra"].json["model"].pop("buckets", None)
        if not name.endswith(FORGETS):
            # Into a training that has come to another order by itself.
            training = Training(*made)
            ddp_buckets.restore(training.ddp, _shuffled(training.ddp))
            training.train(rank, 0, 2, window)
            training.load(saved[1])
            found[name].append(straight[: first + 1] + training.train(rank, first + 1, STEPS, window))
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[gloo.Ended]:
    names = [*CASES, f"plain {FORGETS}", f"static {FORGETS}"]
    return gloo.run(4, _run, names, folder=tmp_path_factory.mktemp("ranks"), limit=90)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.heavy
def test_four_processes_that_were_stopped_are_exact(ended: list[gloo.Ended], name: str) -> None:
    for rank in ended:
        assert rank.error is None
        straight, *stopped = rank.value[name]
        assert stopped == [straight, straight]


@pytest.mark.parametrize("name", ["plain", "static"])
@pytest.mark.heavy
def test_who_forgets_the_order_rounds_otherwise(ended: list[gloo.Ended], name: str) -> None:
    # Were this to hold no more, torch would not need us; the tests above would say nothing.
    straight, *stopped = ended[0].value[f"{name} {FORGETS}"]

    assert all(hashes[0] == straight[0] and hashes != straight for hashes in stopped)


@pytest.fixture
def _alone() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def _steps(ddp: DistributedDataParallel, count: int) -> None:
    for _ in range(count):
        ddp(torch.ones(2, 20)).sum().backward()


def _names(ddp: DistributedDataParallel) -> list[str] | None:
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    order = ddp_buckets.layout(ddp)
    return None if order is None else [names[id(parameter)] for parameter in order]


@pytest.mark.usefixtures("_alone")
def test_the_order_is_that_of_the_first_backward_and_stays() -> None:
    ddp = DistributedDataParallel(Net(swaps=True))
    assert _names(ddp) is None
    _steps(ddp, 1)
    first = _names(ddp)
    _steps(ddp, 1)
    ddp.module.step = 1
    _steps(ddp, 3)

    assert first
    assert first[0].startswith("last.")
    assert first[-1].startswith("first.")
    assert _names(ddp) == first


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("before", [0, 1, 4])
def test_an_order_is_taken_up_at_any_time(static: bool, before: int) -> None:
    ddp = DistributedDataParallel(Net(), static_graph=static, bucket_cap_mb=0.05)
    _steps(ddp, before)
    for order in (_shuffled(ddp), [*ddp.parameters()], _shuffled(ddp)):
        ddp.zero_grad()
        assert ddp_buckets.restore(ddp, order)
        assert ddp_buckets.layout(ddp) == order
        _steps(ddp, 3)

        assert ddp.module.last.bias.grad.tolist() == [6.0, 6.0, 6.0]


@pytest.mark.usefixtures("_alone")
def test_an_order_of_this_process_alone_is_not_that_of_all() -> None:
    ddp = DistributedDataParallel(Net())
    for backwards, is_kept in ((1, False), (2, True)):
        _steps(ddp, backwards)
        reducer, order = ddp.reducer, ddp_buckets.layout(ddp)
        assert ddp_buckets.restore(ddp, order)

        assert (ddp.reducer is reducer) is is_kept


def _in_use(ddp: Any) -> str:
    ddp.logger.set_runtime_stats_and_log()
    return str(ddp._get_ddp_logging_data().get("rebuilt_bucket_sizes"))


@pytest.mark.usefixtures("_alone")
def test_where_the_last_bucket_is_the_small_one_it_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_SET_LAST_BUCKET_CAP", "1")
    made = DistributedDataParallel(Net(), bucket_cap_mb=0.05)
    _steps(made, 3)
    for _ in range(2):
        again = DistributedDataParallel(Net(), bucket_cap_mb=0.05)
        names = dict(again.module.named_parameters())
        assert ddp_buckets.restore(again, [names[name] for name in _names(made) or []])
        _steps(again, 3)

        assert _in_use(again) == _in_use(made)
        assert _names(again) == _names(made)
        made = again


@pytest.mark.usefixtures("_alone")
def test_sparse_gradients_stay_sparse() -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(5, 20, sparse=True), nn.Linear(20, 3)))
    assert ddp_buckets.restore(ddp, [*ddp.parameters()][::-1])
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor([1, 3])).sum().backward()

        assert ddp.module[0].weight.grad.is_sparse
        assert ddp.module[1].bias.grad.tolist() == [2.0, 2.0, 2.0]


MISFITS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "other parameters": ({}, lambda ddp: ddp.module.last.bias.requires_grad_(False)),
    "an order that never changes": ({"find_unused_parameters": True}, lambda ddp: None),
    "a torch that has not even this": ({}, lambda ddp: vars(ddp).update(_ddp_init_helper=None)),
    "a torch that has not the last of it": ({}, lambda ddp: vars(ddp).update(_comm_hooks=[None])),
}


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("kind", MISFITS)
def test_what_cannot_take_up_an_order_stays_as_it_is(kind: str) -> None:
    options, change = MISFITS[kind]
    ddp = DistributedDataParallel(Net(), **options)
    order, reducer = _shuffled(ddp), ddp.reducer
    change(ddp)

    assert not ddp_buckets.restore(ddp, order)
    assert ddp.reducer is reducer
    assert ddp_buckets.layout(ddp) is None
    if kind != "other parameters":
        _steps(ddp, 3)


@pytest.mark.usefixtures("_alone")
def test_what_was_frozen_since_has_no_place_in_an_order() -> None:
    ddp = DistributedDataParallel(Net())
    _steps(ddp, 3)
    ddp.module.first.weight.requires_grad_(False)

    assert ddp_buckets.layout(ddp) is None


@pytest.mark.usefixtures("_alone")
def test_no_order_is_reported_by_a_torch_that_does_not_note_it() -> None:
    ddp = DistributedDataParallel(Net())
    _steps(ddp, 3)
    ddp._get_ddp_logging_data = dict

    assert ddp_buckets.layout(ddp) is None
    ddp.logger = None
    assert ddp_buckets.layout(ddp) is None
