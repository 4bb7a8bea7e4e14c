"""One object stays one object: what is trained, shared or viewed is so again after a resume."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forgery import forge
from torch import nn

from resumable import CheckpointDamaged, ResumableWarning, Run, RunState, StateMismatch


def _resumed(start: Callable[[Path, int], Any], run_dir: Path) -> None:
    """Train 6 steps at once, and in three starts, and compare what each returns."""
    expected = start(run_dir / "whole", 6)
    parts = [start(run_dir / "parts", total) for total in (2, 4, 6)]
    assert parts[-1] == expected


def _temperature(where: str, run: Path, total: int) -> Any:
    torch.manual_seed(0)
    model, own = nn.Linear(4, 1), {"log_alpha": torch.zeros(1, requires_grad=True)}
    optimizer = torch.optim.Adam([*model.parameters(), own["log_alpha"]], lr=0.125)
    leaf = optimizer.param_groups[0]["params"][-1]
    extra = {"own": own} if where == "extra" else None
    with RunState.load(run, model=model, optimizer=optimizer, extra=extra, progress=False) as state:
        if where == "vars":
            own = state.vars
            own.setdefault("log_alpha", leaf)
        for _ in state.steps(total):
            loss = model(torch.randn(3, 4)).square().mean() * own["log_alpha"].exp() - own["log_alpha"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state.save()
        assert own["log_alpha"] is leaf
    return leaf.tolist(), model.weight.tolist()


@pytest.mark.parametrize("where", ["extra", "vars"])
def test_a_leaf_that_the_optimizer_has_is_trained_on(run_dir: Path, where: str) -> None:
    _resumed(lambda run, total: _temperature(where, run, total), run_dir)


@pytest.mark.parametrize(
    "make", [lambda t: t.requires_grad_(), nn.Parameter, lambda t: nn.Parameter(t, False)]
)
def test_a_tensor_that_training_made_is_what_it_was(run_dir: Path, make: Any) -> None:
    for start in range(3):
        with RunState.load(run_dir) as state:
            own = state.vars.setdefault("own", {"t": make(torch.zeros(2))})
            state.save()

        expected = make(torch.zeros(2))
        assert type(own["t"]) is type(expected), start
        assert (own["t"].requires_grad, own["t"].is_leaf) == (expected.requires_grad, True)


def test_a_tensor_of_a_model_comes_back_as_that_very_tensor(run_dir: Path) -> None:
    for count in range(3):
        model = nn.BatchNorm1d(4)
        with RunState.load(run_dir, model=model) as state:
            if not count:
                own = {"w": model.weight, "mean": model.running_mean, "half": model.weight.data[2:]}
                state.vars.update(own, all=model.weight.data)
            model(torch.randn(3, 4))
            model.weight.data += 1
            state.save()

            assert state.vars["w"] is model.weight
            assert state.vars["mean"] is model.running_mean
            assert state.vars["half"].tolist() == [count + 2.0] * 2
            assert state.vars["all"].data_ptr() == model.weight.data_ptr()
            assert not state.vars["all"].requires_grad


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("where", ["extra", "vars"])
def test_a_view_of_a_saved_tensor_stays_a_view(run_dir: Path, is_first: bool, where: str) -> None:
    for count in range(3):
        live: dict[str, Any] = {}
        with RunState.load(run_dir, extra={"own": live}) as state:
            if not count:
                whole = torch.zeros(3, 4)
                views = {"view": whole[1], "column": (whole.t()[2],)}
                live.update({**views, "whole": whole} if is_first else {"whole": whole, **views})
                if where == "vars":
                    state.vars["whole"] = live.pop("whole")
            whole = (live if where == "extra" else state.vars)["whole"]
            whole += 1
            live["view"][0] += 10
            state.save()

        expected = torch.full((3, 4), count + 1.0)
        expected[1, 0] += 10 * (count + 1)
        assert torch.equal(whole, expected)
        assert torch.equal(live["view"], expected[1])
        assert torch.equal(live["column"][0], expected[:, 2])


def test_one_container_at_several_places_stays_one(run_dir: Path) -> None:
    for count in range(3):
        own: dict[str, Any] = {}
        with RunState.load(run_dir, extra={"own": own}) as state:
            if not count:
                log, by, array = [], {"n": [0]}, np.zeros(2)
                own.update(log=log, by=by, again=(log, {"deep": by}), array=array)
                state.vars.update(log=log, by=by, array=array, raw=bytearray(b"a"))
                state.vars["pair"] = [state.vars["raw"], {3: log}]
            own["log"].append(count)
            own["by"]["n"].append(count)
            own["array"] += 1
            state.vars["raw"] += b"a"
            state.save()

            assert own["again"][0] is own["log"] is state.vars["log"] is state.vars["pair"][1][3]
            assert own["again"][1]["deep"] is own["by"] is state.vars["by"]
            assert own["array"] is state.vars["array"]
            assert state.vars["raw"] is state.vars["pair"][0]

    assert (own["log"], own["by"]) == ([0, 1, 2], {"n": [0, 0, 1, 2]})
    assert (own["array"].tolist(), bytes(state.vars["raw"])) == ([3.0, 3.0], b"aaaa")


def test_a_container_that_became_another_does_not_come_back_as_one(run_dir: Path) -> None:
    for count in range(3):
        log: list[int] = []
        own = {"a": log, "b": log}
        with RunState.load(run_dir, extra={"own": own}) as state:
            if not count:
                own["b"] = []
            own["a"].append(count)
            state.save()

        assert own == {"a": list(range(count + 1)), "b": []}
        assert own["a"] is log


def test_the_scripts_tensors_stay_the_ones_that_others_hold(run_dir: Path) -> None:
    for count in range(3):
        buffer = torch.zeros(4)
        average, array = torch.zeros(2), np.zeros(2)
        own = {"average": average, "part": buffer[:2], "array": array, "grown": torch.zeros(1)}
        with RunState.load(run_dir, extra={"own": own}) as state:
            average += 1
            buffer += 1
            array += 1
            own["grown"] = torch.cat([own["grown"], torch.ones(1)])
            state.save()

        assert own["average"] is average
        assert own["array"] is array
        assert average.tolist() == array.tolist() == own["part"].tolist() == [count + 1.0] * 2
        assert buffer[:2].tolist() == [count + 1.0] * 2
        assert own["grown"].tolist() == [0.0] + [1.0] * (count + 1)


def test_two_buffers_that_change_places_are_not_mixed_up(run_dir: Path) -> None:
    for count in range(3):
        front, back = torch.zeros(2), torch.ones(2)
        own = {"front": front, "back": back}
        with RunState.load(run_dir, extra={"own": own}) as state:
            own["front"], own["back"] = own["back"], own["front"]
            own["front"] += 2
            state.save()

        held = (own["front"], own["back"])
        assert [it is front for it in held] == [count % 2 == 1, count % 2 == 0]
        assert [it.tolist()[0] for it in held] == [[3.0, 0.0], [2.0, 3.0], [5.0, 2.0]][count]


def test_what_the_training_replaced_is_not_written_into_the_scripts_data(run_dir: Path) -> None:
    for count in range(3):
        data, model = torch.arange(8.0), nn.Linear(2, 1)
        own = {"last": data[:4], "best": model.weight}
        with RunState.load(run_dir, model=model, extra={"own": own}) as state:
            if not count:
                own["best"] = torch.full_like(model.weight, 7.0)
            own["last"] = data[4:] + 1
            state.save()
            weight = model.weight.tolist()
        assert torch.equal(data, torch.arange(8.0))
        assert own["best"].tolist() == [[7.0, 7.0]]
        assert weight != [[7.0, 7.0]]


class Refusing:
    """A part that does not take its state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("not this")


def _objects(seed: float) -> dict[str, Any]:
    log, tensor = [seed], torch.full((2,), seed)
    return {
        "log": log,
        "again": (log, {"t": tensor, "leaf": torch.full((2,), seed, requires_grad=True)}),
        "view": tensor[:1],
        "array": np.full(2, seed),
        "numbers": {int(seed)},
    }


def test_a_load_that_fails_leaves_every_object_where_it_was(run_dir: Path) -> None:
    with RunState.load(run_dir, extra={"own": _objects(0.0), "refusing": Refusing()}) as state:
        state.save()
    own = _objects(1.0)
    tensors = [own["again"][1]["t"], own["again"][1]["leaf"], own["view"], own["array"]]
    held, seen = [own["log"], own["again"], own["numbers"], *tensors], repr(own)
    for _ in range(2):
        with pytest.raises(StateMismatch, match="not this"):
            RunState.load(run_dir, extra={"own": own, "refusing": Refusing()})

        tensors = [own["again"][1]["t"], own["again"][1]["leaf"], own["view"], own["array"]]
        now = [own["log"], own["again"], own["numbers"], *tensors]
        assert all(one is other for one, other in zip(held, now, strict=True))
        assert repr(own) == seen


def test_views_that_overlap_are_named_at_the_first_save(run_dir: Path) -> None:
    with RunState.load(run_dir) as state:
        whole = torch.zeros(6)
        whole += 1
        state.vars.update(head=whole[:4], tail=whole[2:])
        del whole
        with pytest.warns(
            ResumableWarning, match=r"vars\.tail shares memory with vars\.head.*clone\(\).*R16"
        ):
            state.save()
        state.save()


def test_a_view_of_a_tensor_that_is_not_saved_is_named(run_dir: Path) -> None:
    with RunState.load(run_dir) as state:
        whole = torch.zeros(6)
        state.vars["window"] = whole[:4]
        state.save()
        whole += 1
        with pytest.warns(ResumableWarning, match=r"vars\.window is a view of a tensor that is not saved"):
            state.save()


def test_a_view_of_a_batch_is_no_reason_to_warn(run_dir: Path) -> None:
    with warnings.catch_warnings(), RunState.load(run_dir) as state:
        warnings.simplefilter("error")
        for _ in state.steps(2):
            batch = torch.randn(4, 3)
            columns = torch.randn(4, 2)
            columns += 1
            state.vars.update(first=batch[0], x=columns[:, 0].clone(), pair=[batch[:, 0], batch[:, 1]])
            state.save()


class Shadow:
    """An average that makes new tensors when it is restored."""

    def __init__(self) -> None:
        self.mean = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


def test_a_tensor_that_another_part_makes_again_is_named(run_dir: Path) -> None:
    shadow, model = Shadow(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    with RunState.load(run_dir, model=model, optimizer=optimizer, extra={"shadow": shadow}) as state:
        for _ in range(2):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
        shadow.mean += 1
        state.vars["mean"] = shadow.mean
        state.vars["momentum"] = optimizer.state[model.weight]["momentum_buffer"]
        with pytest.warns(ResumableWarning) as caught:
            state.save()

    texts = sorted(re.split("[,;]", str(one.message))[0] for one in caught)
    assert texts == [
        "vars.mean shares memory with extra.shadow",
        "vars.momentum shares memory with optimizer",
    ]


def _say(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        tree = json.loads(content)
        change(tree["position"])
        return json.dumps(tree).encode()

    return changed


def test_a_checkpoint_that_says_nothing_of_it_is_read_as_ever(run_dir: Path) -> None:
    def forget(position: dict[str, Any]) -> None:
        del position["aliases"]

    latent, own = nn.Parameter(torch.ones(2)), {"t": torch.ones(2)}
    with RunState.load(run_dir, extra={"own": own}) as state:
        own["latent"], own["again"] = latent, own["t"]
        state.save()
    forge(Run(run_dir).open(1), _say(forget), "ranks/00000.json")
    for _ in range(2):
        fresh = {"t": torch.zeros(2), "latent": nn.Parameter(torch.zeros(2))}
        live = fresh["latent"]
        RunState.load(run_dir, extra={"own": fresh}).close()

        assert fresh["latent"] is live
        assert [fresh[name].tolist() for name in ("t", "again", "latent")] == [[1.0, 1.0]] * 3


@pytest.mark.parametrize(
    "aliases",
    [
        [],
        {"other": []},
        {"same": [[]]},
        {"same": [["vars"]]},
        {"kept": [[["vars"]]]},
        {"leaves": [[1]]},
        {"views": [[["vars", "t"], ["vars"], [0], [2], [1]]]},
        {"views": [[["vars", "t"], ["vars"], [-1], [2], [1], [1], False]]},
    ],
)
def test_what_is_no_record_of_aliases_is_damage(run_dir: Path, aliases: Any) -> None:
    with RunState.load(run_dir) as state:
        state.vars["t"] = torch.ones(2)
        state.save()
    forge(Run(run_dir).open(1), _say(lambda position: position.update(aliases=aliases)), "ranks/00000.json")

    with pytest.raises(CheckpointDamaged):
        RunState.load(run_dir, resume=1)


@pytest.mark.parametrize(
    "aliases",
    [
        {"same": [[["nobody", "weight"], ["vars", "t"], ["vars", "not there"]]]},
        {"kept": [[["vars", "t"], ["vars", "not there"]], [["vars", "u"], ["vars", "u"]]]},
        {"leaves": [["vars", "not there"], ["vars"]], "parameters": [["extra", "none"]]},
        {"views": [[["vars", "t"], ["vars", "not there"], [0], [2], [1], [1], False]]},
        {"same": [[["vars"], ["vars", "t"]]]},
    ],
)
def test_a_record_of_what_is_not_there_changes_nothing(run_dir: Path, aliases: Any) -> None:
    with RunState.load(run_dir) as state:
        state.vars["t"] = torch.ones(2)
        state.save()
    forge(Run(run_dir).open(1), _say(lambda position: position.update(aliases=aliases)), "ranks/00000.json")

    for _ in range(2):
        with RunState.load(run_dir) as state:
            assert state.vars["t"].tolist() == [1.0, 1.0]


def test_a_view_beyond_the_end_of_its_base_is_refused(run_dir: Path) -> None:
    with RunState.load(run_dir) as state:
        state.vars.update(t=torch.ones(2), u=torch.ones(2))
        state.save()
    views = [[["vars", "t"], ["vars", "u"], [0], [2], [1 << 40], [1], False]]
    forge(
        Run(run_dir).open(1),
        _say(lambda position: position.update(aliases={"views": views})),
        "ranks/00000.json",
    )

    with pytest.raises(StateMismatch, match="vars refused its state"):
        RunState.load(run_dir)
