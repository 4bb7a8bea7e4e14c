"""What `show` tells of a checkpoint: each figure held against torch, and nothing of a damaged one."""

from __future__ import annotations

import json
import re
from dataclasses import replace
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
from resumable.files import codec
from resumable.run import manifest
from resumable.views import contents

ODD = {
    "half": torch.tensor([1.0, float("nan"), float("inf")], dtype=torch.bfloat16),
    "wide": torch.ones(3, dtype=torch.complex128),
    "none": torch.zeros(0, 3),
    "array": np.arange(3.0),
    "words": np.array(["ab", "c"]),
    "deep": {5: [1, (2, [3])], "big": 2**70},
    "clear\x1b[2J": torch.ones(1),
}


def trained(run_dir: Path, steps: int = 3) -> None:
    """Train a network of two layers; the second save is the best."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with RunState.load(run_dir, **parts, extra={"odd": ODD}, maximize="acc", keep=None) as state:
        for _ in state.steps(steps):
            model(torch.randn(5, 4)).sum().backward()
            optimizer.step()
            scheduler.step()
            state.save(acc=float(state.step == 1))


@pytest.fixture
def run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    trained(run_dir)
    capsys.readouterr()
    return run_dir


def shown(run: Path | str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["show", str(run), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_norms_are_those_that_torch_computes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = Run(run).open(3).read()
    stored = {stem: tree.tensors for stem, tree in codec.from_files(files).items()}

    rows = [row for row in shown(run, capsys)["tensors"] if row["dtype"] == "float32"]

    assert len(rows) > 20
    for row in rows:
        tensor = stored[contents.stem_of(row["file"])][row["name"]].double()
        assert row["norm"] == pytest.approx(float(torch.linalg.vector_norm(tensor)))
        assert (row["shape"], row["size"]) == (list(tensor.shape), tensor.nbytes // 2)


def test_the_json_has_just_the_documented_fields(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = CLI_PAGE.read_text().partition("## `resumable show`")[2].partition("\n## ")[0]
    whole, _, tensor = section.partition("**A tensor**")

    found = shown(run, capsys)

    assert found.keys() == rows_of(whole)
    assert all(row.keys() == rows_of(tensor) for row in found["tensors"])
    assert found["best"] == {"metric": "acc", "maximize": True, "value": 1.0, "number": 1}


def test_what_json_lacks_is_shown_as_what_it_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(run, capsys)

    rows = {row["name"].rpartition(".")[2]: row for row in found["tensors"] if row["part"] == "extra.odd"}
    assert (rows["half"]["dtype"], rows["half"]["nan"], rows["half"]["inf"]) == ("bfloat16", 1, 1)
    assert (rows["wide"]["dtype"], rows["wide"]["shape"]) == ("complex128", [3])
    assert rows["wide"]["norm"] == pytest.approx(3**0.5)
    assert (rows["none"]["shape"], rows["none"]["norm"]) == ([0, 3], 0)
    assert (rows["array"]["dtype"], rows["array"]["norm"]) == ("<f8", pytest.approx(5**0.5))
    assert (rows["words"]["dtype"], rows["words"]["norm"]) == ("<U2", None)
    assert found["values"]["extra.odd.deep.5.0"] == 1
    assert found["values"]["extra.odd.deep.5.1.1"] == [3]


def test_the_settings_of_now_stand_beside_those_of_the_beginning(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = shown(run, capsys)
    main(["show", str(run)])

    assert found["settings"]["optimizer.lr"] == 0.1
    assert found["groups"][0]["settings"]["lr"] == pytest.approx(0.0125)
    assert re.search(r"optimizer, group 0 +lr +0\.0125", capsys.readouterr().out)


@pytest.mark.parametrize("file", ["model.safetensors", "state.json", "ranks/00000.safetensors"])
def test_nothing_is_reported_a_checkpoint_with_a_flipped_bit(
    run: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    [path] = run.glob(f"checkpoints/000003-*/{file}")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    assert main(["show", f"{run}@3"]) == 4

    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"{file} has the digest" in printed.err
    assert shown(run, capsys)["number"] == 2


def test_a_number_that_is_not_there_exits_with_3(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{run}@9"]) == 3
    assert "there are: 1, 2, 3" in capsys.readouterr().err


def test_a_name_that_a_terminal_would_obey_is_escaped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["show", str(run), "--all"])

    printed = capsys.readouterr().out
    assert "clear\\x1b[2J" in printed
    assert "\x1b" not in printed


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("model.safetensors", b'"shape":[8,4]', b'"shape":[4,4]', "does not describe a tensor"),
        ("extra.safetensors", b'"dtype":"U8"', b'"dtype":"X8"', "does not describe a tensor"),
        ("state.json", b'"dtype":"complex128"', b'"dtype":"complex64" ', "is no complex64 of shape"),
        ("state.json", b'["extra.odd.array","<f8",[3]', b'["extra.odd.array","<f8",[4]', "is no <f8 of"),
        ("state.json", b'"optimizer":{', b'"optimizer":[{', "state.json"),
        ("ranks/00000.json", b"{", b"[", "ranks/00000.json"),
    ],
)
def test_what_is_forged_is_named(
    run: Path, file: str, old: bytes, new: bytes, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Run(run).open(3)
    assert old in (found.path / file).read_bytes()
    forge(found, lambda content: content.replace(old, new, 1), file)

    assert main(["show", f"{run}@3"]) == 4
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("file", ["state.json", "manifest.json"])
def test_what_is_nested_too_deeply_is_damaged(
    run: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, deep = Run(run).open(3), json.loads("[" * 500 + "]" * 500)
    if file == "state.json":
        text = json.dumps(deep).encode()
        forge(
            found,
            lambda content: content.replace(b'"extra.odd":', b'"more":' + text + b',"extra.odd":'),
            file,
        )
    else:
        about = replace(found.about, built={"lr": deep})
        (found.path / file).write_bytes(manifest.to_json(about))

    assert main(["show", f"{run}@3"]) == 4
    assert f"{file}: it is nested more than 200 deep" in capsys.readouterr().err


def test_what_is_nested_as_deeply_as_it_can_be_saved_is_shown(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep: Any = 1
    for number in range(36):
        deep = [{number: deep}] if number % 2 else (deep,)
    with RunState.load(run_dir, model=nn.Linear(1, 1), extra={"deep": {"a": deep}}) as state:
        state.save()
    capsys.readouterr()

    assert {"$tuple": [1]} in shown(run_dir, capsys)["values"].values()
    assert main(["diff", str(run_dir), str(run_dir)]) == 0


@pytest.mark.parametrize("depth", ["0", "-1", "deep"])
def test_a_depth_that_gathers_nothing_is_a_usage_error(run: Path, depth: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["show", str(run), f"--depth={depth}"])

    assert ended.value.code == 2
