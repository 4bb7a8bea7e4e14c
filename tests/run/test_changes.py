"""What has changed since a checkpoint: how each difference is classed, and the table that tells of all."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumable import ResumableWarning, RunState
from resumable.run import changes, history
from resumable.run.changes import CHECKPOINTS, CODES, HARMLESS, MAY, OVERRIDES, WILL, Difference
from resumable.run.environment import describe

# What each difference does, where a GPU is used and where none is.
ENVIRONMENT = [
    ("torch", "2.12.0", "2.13.0", MAY, MAY),
    ("torch", "2.13.0", "2.13.1", MAY, MAY),
    ("torch", "2.13.0+cu126", "2.13.0+cu130", MAY, MAY),
    ("numpy", "2.1.0", "2.2.0", MAY, MAY),
    ("numpy", "1.26.4", "2.26.4", MAY, MAY),
    ("numpy", "2.2.0", "2.2.1", HARMLESS, HARMLESS),
    ("python", "3.11.9", "3.12.0", MAY, MAY),
    ("python", "3.11.4", "3.11.9", HARMLESS, HARMLESS),
    ("platform", "Linux x86_64", "Linux aarch64", MAY, MAY),
    ("cpu", "AVX2", "AVX512", MAY, MAY),
    ("threads", 8, 16, MAY, MAY),
    ("cuda", "12.6", "13.0", MAY, HARMLESS),
    ("cudnn", 90100, 90200, MAY, HARMLESS),
    ("gpus", ["H200"], ["A100"], MAY, MAY),
    ("driver", "550.54.15", "570.1", MAY, HARMLESS),
    ("deterministic", False, True, MAY, MAY),
    ("deterministic", True, False, MAY, MAY),
    ("cudnn_deterministic", False, True, MAY, HARMLESS),
    ("cudnn_benchmark", False, True, MAY, HARMLESS),
    ("tf32", "highest", "high", WILL, MAY),
    ("cudnn_tf32", True, False, WILL, HARMLESS),
    ("git", "0123abc", "4567def", HARMLESS, HARMLESS),
    ("what a newer version notes down", 1, 2, MAY, MAY),
]


@pytest.mark.parametrize(("name", "then", "now", "on_gpu", "without"), ENVIRONMENT)
def test_every_difference_has_its_effect(name: str, then: Any, now: Any, on_gpu: str, without: str) -> None:
    found = [changes.environment_effect(name, then, now, is_on_gpu) for is_on_gpu in (True, False)]

    assert found == [on_gpu, without]


def test_all_that_a_checkpoint_notes_down_has_an_effect() -> None:
    assert describe().keys() == changes._ENVIRONMENT.keys() == {row[0] for row in ENVIRONMENT[:-1]}


SETTINGS = {
    WILL: "optimizer.lr optimizer.D.betas scheduler._schedulers.1.gamma scheduler.fused scaler.scale "
    "loader.batch_size loader.train.drop_last loader.sampler loader.dataset_length loader.num_workers",
    MAY: "optimizer.fused optimizer.G.foreach optimizer.capturable optimizer.differentiable loader.kind",
    HARMLESS: "scheduler.verbose",
}


@pytest.mark.parametrize("effect", SETTINGS)
def test_every_setting_has_its_effect(effect: str) -> None:
    assert {changes.setting_effect(name) for name in SETTINGS[effect].split()} == {effect}


@pytest.mark.parametrize(
    ("then", "now", "named"),
    [
        ({"torch": "2.12"}, {"torch": "2.13"}, [("torch", "2.12", "2.13")]),
        ({"gpus": ["H200"] * 8}, {"gpus": ["A100", "T4"]}, [("gpus", "8 x H200", "1 x A100, 1 x T4")]),
        ({"threads": 1, "numpy": "2"}, {"threads": 1, "numpy": "2"}, []),
        ({"gpus": ["H200"], "cudnn": 9}, {"gpus": [], "cudnn": None}, []),
        ({"gpus": [], "cudnn": None}, {"gpus": ["H200"], "cudnn": 9}, []),
        ({}, {"new in this version": 1}, []),
        ({"gone in this version": 1}, {}, []),
    ],
)
def test_what_both_sides_know_and_is_not_as_it_was_is_named(
    then: dict[str, Any], now: dict[str, Any], named: list[tuple[str, str, str]]
) -> None:
    assert [(row.name, row.then, row.now) for row in changes.of_environment(then, now)] == named


@pytest.mark.parametrize(
    ("then", "now", "effect"),
    [([], [], HARMLESS), (["H200"], ["H200"], MAY), ([], ["H200"], MAY), (["H200"], [], MAY)],
)
def test_a_gpu_on_one_side_counts(then: list[str], now: list[str], effect: str) -> None:
    found = changes.of_environment({"cuda": "12.6", "gpus": then}, {"cuda": "13.0", "gpus": now})

    assert [(row.name, row.effect) for row in found] == [("cuda", effect)]


def test_another_number_of_processes_or_device_is_named() -> None:
    assert changes.of_world(2, 2) == changes.of_devices({"cpu"}, {"cpu"}) == []
    assert changes.of_world(1, 2) == [Difference("world_size", "1", "2", WILL)]
    assert changes.of_devices({"cuda"}, {"cpu"}) == [Difference("device", "cuda", "cpu", WILL)]


def rows(*found: Difference) -> list[dict[str, Any]]:
    """The differences as another process gets them."""
    return [json.loads(json.dumps(one.to_json())) for one in found]


LR = Difference("optimizer.lr", "0.1", "0.05", WILL, used=CHECKPOINTS)
TORCH = Difference("torch", "2.12.0", "2.13.0", MAY)
COMMIT = Difference("git", "0123abc", "4567def", HARMLESS)
WORKERS = Difference("loader.num_workers", "2", "3", HARMLESS, "each sample has its seed", CODES)


def test_the_table_has_all_differences_with_the_worst_first() -> None:
    betas = Difference("optimizer.betas", "(0.9, 0.9)", "(0.5, 0.9)", WILL, used=OVERRIDES)

    text = changes.table("runs/exp has changed", [rows(COMMIT, TORCH, LR, WORKERS, betas)], 0)

    assert text == (
        "runs/exp has changed:\n"
        "  will change bits  optimizer.lr        0.1         -> 0.05        "
        "the checkpoint's is used; the code's with override=['optimizer.lr']\n"
        "  will change bits  optimizer.betas     (0.9, 0.9)  -> (0.5, 0.9)  "
        "the code's is used, as override= says\n"
        "  may change bits   torch               2.12.0      -> 2.13.0\n"
        "  harmless          git                 0123abc     -> 4567def\n"
        "  harmless          loader.num_workers  2           -> 3           "
        "the code's is used; each sample has its seed"
    )


@pytest.mark.parametrize("found", [[], [COMMIT], [COMMIT, WORKERS]])
def test_what_is_harmless_alone_is_not_reported(found: list[Difference]) -> None:
    assert changes.table("it", [rows(*found)], 0) is None


@pytest.mark.parametrize(
    ("of_first", "of_second", "told"),
    [
        ([LR, TORCH], [LR, TORCH], []),
        ([LR], [LR, TORCH], ["torch"]),
        ([TORCH], [LR, COMMIT], ["optimizer.lr", "git"]),
        ([LR], [LR, COMMIT], []),
    ],
)
def test_another_process_tells_only_what_rank_0_has_not_found(
    of_first: list[Difference], of_second: list[Difference], told: list[str]
) -> None:
    text = changes.table("it", [rows(*of_first), rows(*of_second)], 1) or ""

    assert re.findall(r"(?m)(\S+) +\S+ +-> ", text) == told


# A real run.


def training(batch_size: int = 2, lr: float = 0.5) -> dict[str, Any]:
    model = nn.Linear(1, 1)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=lr),
        "loader": DataLoader(TensorDataset(torch.arange(6.0).reshape(6, 1)), batch_size),
    }


def leg(run_dir: Path, **settings: Any) -> list[str]:
    """Resume, train an epoch and save; return what was reported."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResumableWarning)
        with RunState.load(run_dir, **training(**settings)) as state:
            for _ in state.epochs(state.epoch + 1):
                assert len([*state.batches()]) == 6 // settings.get("batch_size", 2)
                state.save()
    return [str(w.message) for w in caught if w.category is ResumableWarning]


@pytest.mark.proves("never a silent change")
def test_one_warning_names_all_that_still_differs(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leg(run_dir)
    assert leg(run_dir) == []
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not torch.backends.cudnn.benchmark)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = leg(run_dir, batch_size=3, lr=0.25), leg(run_dir, batch_size=3, lr=0.25)
    finally:
        torch.use_deterministic_algorithms(False)

    (text,) = first
    assert text.startswith(f"{run_dir} has changed since checkpoint 2:\n")
    assert re.findall(r"(?m)^  (.+ bits|harmless) +(\S+) ", text) == [
        (WILL, "optimizer.lr"),
        (WILL, "loader.batch_size"),
        (MAY, "deterministic"),
        ("harmless", "cudnn_benchmark"),
    ]
    (text,) = second
    assert re.findall(r"(?m)^  (.+ bits|harmless) +(\S+) ", text) == [(WILL, "optimizer.lr")]


def test_the_history_keeps_what_had_changed(run_dir: Path) -> None:
    for lr in (0.5, 0.25, 0.5):
        leg(run_dir, lr=lr)

    starts = [line for line in history.read(run_dir) if line["event"] == "start"]
    assert [[row["name"] for row in line.get("changed", [])] for line in starts] == [[], ["optimizer.lr"], []]
    (row,) = starts[1]["changed"]
    assert (row["then"], row["now"], row["effect"], row["used"]) == ("0.5", "0.25", WILL, CHECKPOINTS)


def body(rank: int, run_dir: Path, threads: tuple[int, int]) -> list[str]:
    torch.set_num_threads(threads[rank])
    return leg(run_dir)


@pytest.mark.heavy
def test_each_process_tells_what_only_it_has_found(tmp_path: Path) -> None:
    told = [
        [one.value for one in gloo.run(2, body, tmp_path / "exp", threads, folder=tmp_path / str(n))]
        for n, threads in enumerate([(1, 1), (1, 1), (1, 2), (1, 2)])
    ]

    assert told[0] == told[1] == [[], []]
    for nothing, (text,) in told[2:]:
        assert nothing == []
        assert re.search("may change bits  threads  1  -> 2", text)


@pytest.mark.heavy
def test_what_all_processes_have_found_is_reported_once(tmp_path: Path) -> None:
    gloo.run(2, body, tmp_path / "exp", (1, 1), folder=tmp_path / "2")

    found = gloo.run(3, body, tmp_path / "exp", (1, 1, 1), folder=tmp_path / "3")

    (text,), *others = (one.value for one in found)
    assert others == [[], []]
    assert "will change bits  world_size  2  -> 3" in text
