"""In what `diff` says that two checkpoints differ: no more and no less than what was changed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forgery import forge
from places import CLI_PAGE
from tables import rows_of
from torch import nn

from resumable import Run, RunState
from resumable.cli.app import main


class Training:
    """A model of which most is frozen, its optimizer, and a dict."""

    def __init__(self, lr: float = 0.1) -> None:
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(400, 700).requires_grad_(False), nn.Linear(700, 2)
        self.model = nn.ModuleDict({"body": self.body, "head": self.head})
        self.optimizer = torch.optim.SGD(self.head.parameters(), lr=lr)
        self.extra: dict[str, Any] = {
            "more": {},
            "ema": {"head": torch.ones(4)},
            "flags": {"on": True},
        }

    def save(self, run_dir: Path) -> None:
        with RunState.load(
            run_dir, model=self.model, optimizer=self.optimizer, extra=self.extra, keep=None, resume="never"
        ) as state:
            state.save()


@pytest.fixture
def pair(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Two runs with one checkpoint each, the second of which is changed first."""

    def make(change: Callable[[Training], object] = lambda _: None, lr: float = 0.1) -> tuple[str, str]:
        first, second = Training(), Training(lr)
        change(second)
        first.save(tmp_path / "a")
        second.save(tmp_path / "b")
        return str(tmp_path / "a"), str(tmp_path / "b")

    return make


Pair = Callable[..., tuple[str, str]]


def told(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main(["diff", *runs, "--json"])
    printed = capsys.readouterr().out
    found: dict[str, Any] = json.loads(printed[printed.index("{") :])
    assert code == (0 if found["equal"] else 1)
    return found


def test_what_was_saved_twice_is_equal(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    runs = pair()

    assert told(runs, capsys)["equal"]
    assert main(["diff", *runs]) == 0
    assert "equal: 8 tensors to the last bit" in capsys.readouterr().out


def test_one_bit_of_one_tensor_is_reported_and_nothing_else(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    def flip(training: Training) -> None:
        training.head.weight.data.view(torch.int32)[1, 5] ^= 1

    found = told(pair(flip), capsys)

    [row] = found["tensors"]
    assert (row["name"], row["part"], row["what"], row["changed"]) == ("head.weight", "model", "changed", 1)
    assert 0 < row["largest"] < 1e-8
    assert 0 < row["relative"] < 1e-7
    assert found["changes"] == []


def test_how_far_a_tensor_has_moved_is_what_torch_computes(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = torch.zeros(700, 400)
    moved[3:600] = torch.randn(597, 400) * 1e-3
    before = Training().body.weight.detach()

    def move(training: Training) -> None:
        training.body.weight.data += moved

    [row] = told(pair(move), capsys)["tensors"]

    gap = (before + moved).double() - before.double()
    assert row["name"] == "body.weight"
    assert row["changed"] == int((before + moved != before).sum())
    assert row["largest"] == float(gap.abs().max())
    assert row["relative"] == pytest.approx(float(gap.norm() / before.double().norm()))


def test_missing_new_reshaped_and_recast_tensors_are_reported_as_such(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(training: Training) -> None:
        training.extra["ema"] = {"head": torch.ones(5), "tail": torch.ones(1)}
        training.head.bias.data = training.head.bias.data.double()

    runs = pair(change)
    found = told(runs, capsys)

    assert {row["name"]: row["what"] for row in found["tensors"]} == {
        "extra.ema.head": "other shape",
        "extra.ema.tail": "new",
        "head.bias": "other dtype",
    }
    assert [row["what"] for row in told((runs[1], runs[0]), capsys)["tensors"]].count("missing") == 1
    main(["diff", *runs])
    printed = capsys.readouterr().out
    assert re.search(r"head +4 -> 5\n", printed)
    assert re.search(r"tail +only in B\n", printed)
    assert re.search(r"head.bias +float32 -> float64\n", printed)


def test_a_setting_is_reported_with_what_it_does(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(pair(lr=0.05), capsys)

    rows = {row["name"]: row for row in found["changes"]}
    assert rows["optimizer.lr"] == {
        "kind": "setting",
        "name": "optimizer.lr",
        "before": 0.1,
        "after": 0.05,
        "missing": None,
        "effect": "will change bits",
    }
    assert (rows["optimizer.groups.0.lr"]["kind"], found["tensors"]) == ("value", [])


@pytest.mark.parametrize("now", [1, 1.0, "True", None, [True]])
def test_a_plain_value_that_python_takes_for_equal_is_another(
    pair: Pair, now: object, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(training: Training) -> None:
        training.extra["flags"]["on"] = now

    [row] = told(pair(change), capsys)["changes"]

    assert (row["name"], row["before"], row["after"]) == ("extra.flags.on", True, now)


def test_a_value_that_one_has_not_is_missing_there(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    def change(training: Training) -> None:
        training.extra["flags"]["more"] = None

    [row] = told(pair(change), capsys)["changes"]

    assert (row["name"], row["missing"], row["after"]) == ("extra.flags.more", "before", None)


def test_the_environment_is_compared(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    torch.use_deterministic_algorithms(True)
    first = pair()[0]
    torch.use_deterministic_algorithms(False)
    again = Path(first).with_name("c")
    Training().save(again)

    [row] = told((first, str(again)), capsys)["changes"]

    assert (row["kind"], row["name"], row["effect"]) == ("environment", "deterministic", "may change bits")


def test_what_was_frozen_since_is_the_same_tensor(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    def thaw(training: Training) -> None:
        training.body.requires_grad_(True)

    assert told(pair(thaw), capsys)["tensors"] == []


def test_files_of_one_digest_are_not_read_and_all_others_are(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = pair(lambda training: training.head.bias.data.zero_())
    [equal], [other] = (
        Path(runs[1]).glob(f"checkpoints/*/{name}.safetensors") for name in ("model-frozen", "model")
    )
    for path, code in ((equal, 1), (other, 4)):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert main(["diff", f"{runs[0]}@1", f"{runs[1]}@1"]) == code
    assert "model.safetensors has the digest" in capsys.readouterr().err


def test_a_tensor_that_is_in_two_files_is_refused(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = pair()
    found = Run(second).open(1)
    forge(
        found, lambda content: content.replace(b'"body.weight"', b'"head.weight"'), "model-frozen.safetensors"
    )

    assert main(["diff", f"{first}@1", f"{second}@1"]) == 4
    assert "in another file, too" in capsys.readouterr().err


def test_two_checkpoints_of_one_run_and_a_copied_folder_can_be_compared(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = pair()
    shutil.copytree(f"{first}/newest/", tmp_path / "copied")

    assert told((f"{first}@1", str(tmp_path / "copied")), capsys)["equal"]


def test_the_json_has_just_the_documented_fields(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    section = CLI_PAGE.read_text().partition("## `resumable diff`")[2].partition("\n## ")[0]
    whole, _, tensor = section.rpartition("| field |")

    found = told(pair(lambda training: training.head.bias.data.zero_(), lr=0.2), capsys)

    inner = {*found["before"], *found["changes"][0]}
    assert found.keys() <= rows_of(whole)
    assert inner <= {*re.findall(r"`(\w+)`", whole)}
    assert all(row.keys() == rows_of(tensor) for row in found["tensors"])


def test_a_long_array_is_compared_to_its_end(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    def change(training: Training) -> None:
        training.extra["more"]["words"] = np.array(["abc"] * 100_000)

    _, second = pair(change)
    again = Path(second).with_name("c")
    training = Training()
    change(training)
    training.extra["more"]["words"][90_000] = "abd"
    training.save(again)

    [row] = told((second, str(again)), capsys)["tensors"]
    assert (row["name"], row["changed"], row["largest"]) == ("extra.more.words", 1, None)


def test_random_states_and_the_place_take_a_line_each(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), 2, shuffle=True)
    with RunState.load(run_dir, loader=loader, keep=None) as state:
        for _ in state.epochs(2):
            for _ in state.batches():
                if state.batch == 1:
                    state.save()
    pages = []
    for words in ([], ["--all"]):
        assert main(["diff", f"{run_dir}@1", f"{run_dir}@2", *words]) == 1
        pages.append(capsys.readouterr().out)

    assert "\nrandom states differ\n" in pages[0]
    assert "\nthe place in the data differs: epoch 0 -> 1, batch 2 (--all has the details)\n" in pages[0]
    assert not re.search("tensors of (random|loader|position)|fingerprint", pages[0])
    assert "tensors of random" in pages[1]
    assert re.search(r"position\.epoch +0 +-> 1", pages[1])


@pytest.mark.parametrize(("lr", "shown"), [(1 / 3, "0.333333\n"), (0.1 + 1e-12, "0.100000000001")])
def test_numbers_have_six_digits_unless_they_would_look_equal(
    pair: Pair, capsys: pytest.CaptureFixture[str], lr: float, shown: str
) -> None:
    main(["diff", *pair(lr=lr)])

    assert re.search(rf"optimizer\.groups\.0\.lr +0\.1 +-> {shown}", capsys.readouterr().out)
