"""Extras of every kind are put back in place, and what cannot be is refused when RunState is made."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from resumable import CannotStore, RunState, StateMismatch, Unsupported, UsageError
from resumable.parts.part import same_device


def _save(run_dir: Path, extra: Any) -> None:
    with RunState.load(run_dir, extra={"it": extra}) as state:
        state.save()


def _numpy(bits: Any) -> Callable[[int], Any]:
    return lambda seed: np.random.Generator(bits(seed))


GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    **{
        bits.__name__: (_numpy(bits), lambda generator: [*generator.normal(size=3), generator.integers(9)])
        for bits in (
            np.random.PCG64,
            np.random.PCG64DXSM,
            np.random.MT19937,
            np.random.Philox,
            np.random.SFC64,
        )
    },
    "RandomState": (np.random.RandomState, lambda generator: [*generator.randn(3), generator.randint(9)]),
    "Random": (random.Random, lambda generator: [generator.gauss(0, 1) for _ in range(3)]),
    "torch": (torch.Generator().__class__, lambda generator: torch.randn(3, generator=generator).tolist()),
}


def _generator(kind: str, seed: int) -> Any:
    return torch.Generator().manual_seed(seed) if kind == "torch" else GENERATORS[kind][0](seed)


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_draws_on_as_if_never_stopped(run_dir: Path, kind: str) -> None:
    draw = GENERATORS[kind][1]
    straight = _generator(kind, 0)
    expected = [draw(straight) for _ in range(3)]
    found = []
    for seed in range(3):
        generator = _generator(kind, seed)
        with RunState.load(run_dir, extra={"it": generator}) as state:
            found.append(draw(generator))
            state.save()

    assert found == expected


def test_another_bit_generator_is_refused_and_left_as_it_is_if_allowed(run_dir: Path) -> None:
    _save(run_dir, np.random.Generator(np.random.PCG64(0)))
    live = np.random.Generator(np.random.Philox(5))

    with pytest.raises(StateMismatch, match=r"extra\.it: PCG64 in the checkpoint, Philox in the code"):
        _save(run_dir, live)
    RunState.load(run_dir, extra={"it": live}, allow=["extra.it"]).close()

    assert live.random() == np.random.Generator(np.random.Philox(5)).random()


CONTAINERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "dict": (dict, {"a": 1, 2: (3, None), "nested": {"tensor": [1.5]}}),
    "OrderedDict": (OrderedDict, OrderedDict([("z", 1), ("a", 2)])),
    "defaultdict": (lambda: defaultdict(list), defaultdict(list, {"a": [1, 2]})),
    "Counter": (Counter, Counter({"a": 3, "b": 0, "c": -2})),
    "list": (list, [1, "two", [3.0], None]),
    "set": (set, {1, "two", (3, 4)}),
    "deque": (lambda: deque(maxlen=3), deque([1, 2, 3], maxlen=3)),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_is_filled_again_in_place(run_dir: Path, kind: str) -> None:
    make, content = CONTAINERS[kind]
    _save(run_dir, content)
    for _ in range(2):
        live = make()
        (live.add if kind == "set" else live.update if hasattr(live, "keys") else live.append)(
            {"stale": 9} if hasattr(live, "keys") else "stale"
        )
        again = live
        _save(run_dir, live)

        assert again is live
        assert type(live) is type(content)
        assert live == content
        assert list(live) == list(content) or kind == "set"


def test_a_tensor_in_a_container_comes_back_in_its_layout(run_dir: Path) -> None:
    _save(run_dir, {"t": torch.arange(6.0).reshape(2, 3).t()})
    for _ in range(2):
        live: dict[str, Any] = {}
        _save(run_dir, live)

        assert live["t"].stride() == (1, 3)
        assert live["t"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]


def test_a_list_does_not_become_the_keys_of_a_dict(run_dir: Path) -> None:
    _save(run_dir, {"a": 1})
    live = ["kept"]

    with pytest.raises(StateMismatch, match=r"extra\.it: dict in the checkpoint, list in the code"):
        _save(run_dir, live)

    assert live == ["kept"]


@dataclass
class Inner:
    """Counters inside others."""

    patience: int = 0
    history: list[float] = field(default_factory=list)


@dataclass
class Outer:
    """The user's own counters."""

    best: float = float("inf")
    inner: Inner = field(default_factory=Inner)
    queue: Tensor | None = None
    later: Any = None


@dataclass(frozen=True)
class Frozen:
    """Nobody can set this field."""

    count: int = 0


@dataclass
class HoldsFrozen:
    """Nor the one in this."""

    frozen: Frozen = field(default_factory=Frozen)


@dataclass
class Renamed:
    """What became of Inner."""

    patience: int = 3
    past: int = 4


def test_a_dataclass_and_those_inside_it_are_set_again_in_place(run_dir: Path) -> None:
    _save(run_dir, Outer(0.5, Inner(3, [0.25]), torch.ones(2)))
    for _ in range(2):
        live = Outer()
        inner = live.inner
        _save(run_dir, live)

        assert live.inner is inner
        assert (live.best, inner) == (0.5, Inner(3, [0.25]))
        assert torch.equal(live.queue, torch.ones(2))  # type: ignore[arg-type]


def test_a_dataclass_that_was_replaced_by_its_like_is_saved_as_it_is_now(run_dir: Path) -> None:
    live = Outer()
    with RunState.load(run_dir, extra={"it": live}) as state:
        live.inner = Inner(9)
        state.save()
    for _ in range(2):
        live = Outer()
        _save(run_dir, live)

        assert live.inner == Inner(9)


def test_a_field_that_is_missing_or_new_is_named_and_can_be_allowed(run_dir: Path) -> None:
    _save(run_dir, Inner(8, [0.5]))
    live = Renamed()

    with pytest.raises(StateMismatch, match=r"(?s)it\.history: missing in the code.*it\.past: new in the"):
        _save(run_dir, live)
    assert live == Renamed(3, 4)
    RunState.load(run_dir, extra={"it": live}, allow=["extra.it.history", "extra.it.past"]).close()

    assert live == Renamed(8, 4)


def test_a_dataclass_that_comes_into_a_field_later_cannot_be_stored(run_dir: Path) -> None:
    live = Outer()
    with RunState.load(run_dir, extra={"it": live}) as state:
        live.later = Inner()

        with pytest.raises(CannotStore, match=r"extra\.it\.later is of type"):
            state.save()


def test_a_dataclass_that_leaves_its_field_cannot_be_stored(run_dir: Path) -> None:
    live: Any = Outer()
    with RunState.load(run_dir, extra={"it": live}) as state:
        live.inner = None

        with pytest.raises(CannotStore, match=r"extra\.it\.inner was a dataclass .* is None now"):
            state.save()


class Tracker:
    """The user's own object, with the protocol that torch has."""

    def __init__(self) -> None:
        self.shadow: Any = {"n": 0, "mean": torch.zeros(2)}

    def state_dict(self) -> Any:
        return self.shadow

    def load_state_dict(self, state: Any) -> None:
        self.shadow = state


@pytest.mark.parametrize("content", [{"n": 4, "mean": torch.ones(2)}, [1, 2], None, 7])
def test_any_object_with_a_state_dict_is_asked_for_it(run_dir: Path, content: Any) -> None:
    tracker = Tracker()
    tracker.shadow = content
    _save(run_dir, tracker)
    for _ in range(2):
        live = Tracker()
        _save(run_dir, live)

        assert str(live.shadow) == str(content)


def test_an_object_that_is_no_container_any_more_is_refused(run_dir: Path) -> None:
    _save(run_dir, {"n": 1})

    with pytest.raises(StateMismatch, match=r"extra\.it: container in the checkpoint, state in the code"):
        _save(run_dir, Tracker())


@pytest.mark.parametrize(
    "extra",
    [3, 0.5, "text", None, print, Frozen(), HoldsFrozen(), Frozen, (1, 2), object(), random.SystemRandom()],
)
def test_what_cannot_be_put_back_in_place_is_refused_at_once(run_dir: Path, extra: Any) -> None:
    with pytest.raises(UsageError, match=r"extra\.it is a .*, which cannot be put back in place"):
        RunState.load(run_dir, extra={"it": extra})


@pytest.mark.parametrize(
    ("slot", "given"),
    [
        ("model", torch.optim.SGD([nn.Parameter(torch.ones(1))])),
        ("model", [nn.Linear(1, 1)]),
        ("model", {"a": None}),
        ("optimizer", nn.Linear(1, 1)),
        ("optimizer", [torch.optim.SGD([nn.Parameter(torch.ones(1))])]),
        ("scheduler", "cosine"),
        ("scaler", random.Random(0)),
    ],
)
def test_an_object_in_the_wrong_slot_is_refused_at_once(run_dir: Path, slot: str, given: Any) -> None:
    parts: dict[str, Any] = {slot: given}

    with pytest.raises(UsageError, match=rf"{slot}(\.a)? is .*, and should be an? .*\.\nFix: give .*{slot}"):
        RunState.load(run_dir, **parts)


@pytest.mark.parametrize("name", ["", "a.b", 3])
def test_a_name_that_looks_like_another_is_refused(run_dir: Path, name: Any) -> None:
    with pytest.raises(UsageError, match="cannot name a part of extra"):
        RunState.load(run_dir, extra={name: {}})


@pytest.mark.parametrize(
    ("device", "expected"), [("cpu", "cpu"), ("cuda:99", "cpu"), ("xpu:99", "cpu"), ("toaster:0", "cpu")]
)
def test_a_device_that_is_not_here_becomes_the_cpu(device: str, expected: str) -> None:
    assert same_device((), device) == torch.device(expected)


def test_a_function_of_torchs_in_an_extra_is_refused_and_not_dropped(run_dir: Path) -> None:
    class Held:
        def state_dict(self) -> dict[str, Any]:
            return {"activation": nn.functional.relu}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError("nothing was saved")

    with pytest.raises(CannotStore, match=r"extra\.held\.activation is a function"):
        RunState.load(run_dir, extra={"held": Held()}).save()


def test_a_view_of_the_scripts_data_is_not_written_to(run_dir: Path) -> None:
    data = torch.arange(8.0)
    with RunState.load(run_dir) as state:
        state.vars["next"] = data[:4]
        state.save()
        for _ in range(2):
            state.vars["next"] = data[4:]
            state.restore("newest")

            assert torch.equal(state.vars["next"], torch.arange(4.0))
            assert torch.equal(data, torch.arange(8.0))


@pytest.mark.parametrize("slot", ["optimizer", "extra"])
def test_an_optimizer_of_an_engine_is_refused_and_its_schedule_is_not(run_dir: Path, slot: str) -> None:
    class ZeRO(Tracker):
        __module__ = "deepspeed.runtime.zero.stage3"
        param_groups = ()

    class WarmupLR(Tracker):
        __module__ = "deepspeed.runtime.lr_schedules"

    given = {"it": ZeRO()} if slot == "extra" else ZeRO()
    with pytest.raises(Unsupported, match=r"is split over the processes \(DeepSpeed\)") as caught:
        RunState.load(run_dir, **{slot: given})
    assert "save_checkpoint" in caught.value.fix
    for _ in range(2):
        RunState.load(run_dir, scheduler=WarmupLR()).close()


def test_an_optimizer_of_a_tensor_in_an_extra_container_is_taken(run_dir: Path) -> None:
    image = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([image], lr=0.1)

    with RunState.load(run_dir, model=nn.Linear(2, 2), optimizer=optimizer, extra={"x": {"x": image}}):
        pass
    with pytest.raises(UsageError, match="none of them belongs to model"):
        RunState.load(run_dir, model=nn.Linear(2, 2), optimizer=optimizer, extra={"x": {"x": torch.ones(2)}})


def test_named_parts_come_in_any_mapping(run_dir: Path) -> None:
    for steps in (1, 2):
        seen = {"count": 0}
        models = MappingProxyType({"a": nn.Linear(2, 2)})
        with RunState.load(run_dir, model=models, extra=MappingProxyType({"seen": seen})) as state:
            seen["count"] += 1
            state.save()
        assert seen == {"count": steps}
