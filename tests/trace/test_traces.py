"""Traces, read as the trainings went, and where two of them part."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from places import CLI_PAGE
from tables import rows_of

from resumable import FormatTooNew, UsageError
from resumable.cli.app import main
from resumable.trace import trace_file
from resumable.trace.trace_file import At, Record


def batch(number: int, digest: str = "", why: str = "boundary", **more: Any) -> Record:
    """Return the record of one batch of the first epoch, as a training that steps at every batch has it."""
    return Record(At("batch", 0, number, number), why, [digest or f"b{number}"], **more)


def start(**parts: Any) -> Record:
    return Record(At("outside", 0, 0, 0), "start", parts=parts)


def resumed(number: int, why: str = "resumed", **more: Any) -> Record:
    return Record(At("batch", 0, number, number), why, **more)


def write(path: Path, *records: Record) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{trace_file.to_line(record)}\n" for record in records))
    return str(path)


def closed(number: int, **parts: Any) -> Record:
    return Record(At("outside", 0, 0, number), "closed", parts=parts)


def digests(records: Sequence[Record]) -> list[str]:
    return [digest for record in records for digest in record.batches]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    records = [
        start(model={"weight": "a1"}),
        batch(1, noted={"loss": 0.1, "name": 'a "b"\n\u2028', "batch": "#ff"}),
        batch(2, parts={"model": "c", "random": {"torch": "d"}}, more={"format": 1}),
        Record(At("epoch", 1, 0, 2), "boundary"),
    ]

    assert trace_file.read(write(tmp_path / "a.jsonl", *records)) == records


def test_half_a_line_is_no_record(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.jsonl", start(), batch(1), batch(2)))
    path.write_bytes(path.read_bytes()[:-9])

    assert digests(trace_file.read(path)) == ["b1"]


def test_what_was_done_again_counts_as_it_was_done_last(tmp_path: Path) -> None:
    first = [start(), batch(1), batch(2), batch(3)]
    path = write(tmp_path / "a.jsonl", *first, resumed(1), batch(2, "c2"), resumed(2), batch(3, "d3"))

    assert digests(trace_file.read(path)) == ["b1", "c2", "d3"]


def test_a_start_begins_the_trace_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", start(), batch(1), start(), batch(1, "c1"))

    assert digests(trace_file.read(path)) == ["c1"]


def test_a_resume_at_an_epochs_end_keeps_that_epoch(tmp_path: Path) -> None:
    end = Record(At("epoch", 1, 0, 2), "boundary")
    again = Record(At("outside", 1, 0, 2), "resumed")
    later = Record(At("batch", 1, 1, 3), "boundary", ["b3"])
    path = write(tmp_path / "a.jsonl", start(), batch(1), batch(2), end, later, again)

    assert trace_file.read(path) == [start(), batch(1), batch(2), end, again]


@pytest.mark.parametrize("text", ["no JSON", "[1]", "{}", '{"at":{"kind":"batch"},"why":"x"}', '{"at":1}'])
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.jsonl", batch(1)))
    path.write_text(f"{path.read_text()}{text}\n")

    with pytest.raises(UsageError, match=r"a\.jsonl: line 2 is no record of a trace\."):
        trace_file.read(path)


def test_a_trace_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", batch(1, more={"format": 2}))

    with pytest.raises(FormatTooNew, match="is a trace of format 2; this version of resumable reads 1"):
        trace_file.read(path)


# What a line can be added to.


@pytest.mark.parametrize("torn", [b"", b'{"at":{"ki', b"\0" * 70_000, b"x" * 200_000])
def test_what_a_kill_has_torn_is_taken_away_before_a_line_is_added(torn: bytes, tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.jsonl", start(), batch(1)))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)

    os.close(trace_file.open_to_add(path))

    assert path.read_bytes() == whole


@pytest.mark.parametrize("name", ["train.py", "folder", "folder/a.jsonl", "/dev/null"])
def test_what_is_no_trace_is_refused_and_stays_as_it_is(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").joinpath("a.jsonl").symlink_to(tmp_path / "train.py")

    with pytest.raises(UsageError, match=r"Fix: give the path of a"):
        trace_file.open_to_add(tmp_path / name)

    assert (tmp_path / "train.py").read_text() == "import torch"


# Where two trainings part.

TEN = [start(model={"w": "0"}), *(batch(number) for number in range(1, 11))]


def diff(
    tmp_path: Path, one: Sequence[Record], other: Sequence[Record], capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Return what the command prints."""
    words = [write(tmp_path / name, *some) for name, some in (("a.jsonl", one), ("b.jsonl", other))]
    code = main(["diff", "--trace", *words])
    lines = capsys.readouterr().out.splitlines()
    assert code == (0 if lines[0].startswith("equal: ") else 1)
    return lines


def but(number: int, **changed: Any) -> list[Record]:
    """Return ten boundaries of which one, and what comes after it, is changed."""
    return [batch(at.batch, **changed) if (at := one.at).batch >= number else one for one in TEN]


def test_two_trainings_that_do_the_same_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    looked = [*TEN, batch(11, parts={"model": "a"}), batch(12)]

    assert diff(tmp_path, looked, looked, capsys) == [
        "equal: 13 boundaries, up to step 12 (epoch 0, batch 12); at 2 of them the parts were looked at, "
        "last at step 11 (epoch 0, batch 11)"
    ]


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (TEN, TEN, "batches equal at 11 boundaries, up to step 10 (epoch 0, batch 10)"),
        (
            [start(), batch(1, noted={"loss": 1, "lr": 1}), batch(2, noted={"loss": 2})],
            [start(), batch(1, noted={"loss": 1}), batch(2, noted={"loss": 2, "more": 1})],
            "batches, loss equal at 3 boundaries, up to step 2 (epoch 0, batch 2)",
        ),
        # Looks at the parts, but nowhere both
        (
            [*TEN, batch(11, parts={"model": "a"}), batch(12)],
            [*TEN, batch(11), batch(12, parts={"model": "b"})],
            "batches equal at 13 boundaries, up to step 12 (epoch 0, batch 12)",
        ),
        ([start(model="a")], [start(model="a")], "nothing differs at 1 boundary, up to step 0"),
        (
            [start(model="a"), Record(At("outside", 0, 0, 0), "resumed", parts={"model": "a"})],
            [start(model="a"), Record(At("outside", 0, 0, 0), "resumed", parts={"model": "a"})],
            "nothing differs at 2 boundaries, up to step 0",
        ),
    ],
)
def test_traces_whose_weights_were_not_compared_are_not_called_equal(
    one: list[Record], other: list[Record], alike: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, fix = diff(tmp_path, one, other, capsys)

    assert first == (
        f"weights not compared: {alike}, but at none after they began have both looked at the parts"
    )
    assert fix.startswith("Fix: trace both again more often (Trace(..., every=10))")


@pytest.mark.parametrize(
    "look", [batch(11, parts={"model": "a"}), closed(10, model="a"), resumed(10, parts={"model": {"w": "a"}})]
)
def test_one_look_after_the_start_is_enough_wherever_it_is(
    look: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(tmp_path, [*TEN, look], [*TEN, look], capsys)[0].startswith("equal: 12 boundaries")


def test_what_the_last_look_has_found_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = ([*TEN, closed(10, model=model, optimizer="o")] for model in "ab")

    assert diff(tmp_path, one, other, capsys) == [
        "part at the end, step 10: model differs (looked at now and then: last equal at step 0)",
        "equal before: 11 boundaries, up to step 10 (epoch 0, batch 10)",
    ]


@pytest.mark.parametrize("is_first", [True, False])
def test_how_far_one_continues_after_the_other_has_ended_is_reported(
    is_first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looked = [*TEN[:5], batch(5, parts={"model": "a"})]
    longer = [*looked, *(batch(number) for number in range(6, 9)), closed(8, model="b")]
    both = (longer, looked) if is_first else (looked, longer)

    name = tmp_path / ("a.jsonl" if is_first else "b.jsonl")
    assert diff(tmp_path, *both, capsys)[1:] == [
        f"{name} continues for 3 boundaries more, up to step 8 (epoch 0, batch 8)"
    ]


def test_ranks_are_equal_only_if_all_of_them_were_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looked = [*TEN, batch(11, parts={"model": "a"})]
    for name in "ab":
        write(tmp_path / f"{name}-rank00001.jsonl", *TEN)
    assert diff(tmp_path, looked, looked, capsys)[0].startswith(
        "weights not compared on rank 1: batches equal"
    )

    for name in "ab":
        write(tmp_path / f"{name}-rank00001.jsonl", *looked)
    assert diff(tmp_path, looked, looked, capsys)[0].startswith(
        "equal: 12 boundaries of 2 ranks, up to step 11"
    )


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({}, {"digest": "x"}, "the batch differs"),
        ({"noted": {"loss": 0.5}}, {"noted": {"loss": 0.6}}, "loss 0.5 -> 0.6; the batches are equal"),
        ({"noted": {"x": "#a"}}, {"noted": {"x": "#b"}}, "x differs; the batches are equal"),
        ({"noted": {"x": 0.0}}, {"noted": {"x": -0.0}}, "x 0.0 -> -0.0; the batches are equal"),
        ({"noted": {"x": 1}}, {"noted": {"x": True}}, "x 1 -> True; the batches are equal"),
        (
            {"noted": {"loss": 0.5}},
            {"noted": {"loss": 0.6}, "digest": "x"},
            "the batch differs, loss 0.5 -> 0.6",
        ),
        (
            {"parts": {"model": "a", "optimizer": "a", "extra.ema": "a"}},
            {"parts": {"model": "b", "optimizer": "b", "extra.ema": "a"}},
            "model, optimizer differ (looked at now and then: last equal at step 0); the batches are equal",
        ),
        (
            {"parts": {"random": {"torch": "a", "python": "a"}}},
            {"parts": {"random": {"torch": "b", "python": "a"}}},
            "random (torch) differs (looked at now and then: last equal at step 0); the batches are equal",
        ),
    ],
)
def test_the_first_boundary_at_which_they_part_is_named(
    one: Any, other: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(tmp_path, but(8, **one), but(8, **other), capsys) == [
        f"part at step 8 (epoch 0, batch 8): {told}",
        "equal before: 8 boundaries, up to step 7 (epoch 0, batch 7)",
    ]


def test_at_the_start_what_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = [start(model={"a": 1, "b": 1, "c": 1, "d": 1}, optimizer={"lr": 0.1})]
    other = [start(model={"a": 2, "b": 2, "c": 2, "d": 2}, optimizer={"lr": 0.2})]

    told = "part at the start, step 0: model (a, b, c, ...), optimizer (lr) differ"
    assert diff(tmp_path, one, other, capsys) == [told]


def test_several_batches_of_one_boundary_are_distinguished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def window(*digests: str) -> list[Record]:
        return [start(), Record(At("batch", 0, 2, 1), "boundary", digests)]

    assert diff(tmp_path, window("a", "b"), window("a", "c"), capsys)[0].endswith(": 1 of 2 batches differ")
    assert diff(tmp_path, window("a", "b"), window("c", "d"), capsys)[0].endswith(": the batches differ")
    assert diff(tmp_path, window("a", "b"), window("a"), capsys)[0].endswith(": 2 -> 1 batches")


def test_a_generator_that_was_never_seeded_parts_nothing_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def of(python: str, torch: str) -> list[Record]:
        parts = {"random": {"python": python, "torch": torch}}
        return [start(random={"python.words": python, "torch": "t"}), batch(1, parts=parts)]

    lines = diff(tmp_path, of("a", "t1"), of("b", "t1"), capsys)
    assert lines[0].startswith("equal: 2 boundaries")
    assert lines[1] == "generators that are not seeded alike (where they are used, it shows): python"
    assert diff(tmp_path, of("a", "t1"), of("b", "t2"), capsys)[0].startswith(
        "part at step 1 (epoch 0, batch 1): random (torch) differs"
    )


def test_boundaries_that_only_one_of_them_has_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = [resumed(5), *(batch(number, noted={"more": 1}) for number in range(6, 16))]

    assert "batches equal at 5 boundaries, up to step 10 " in diff(tmp_path, TEN, late, capsys)[0]


def test_what_they_run_on_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def on(version: str) -> list[Record]:
        more = {"environment": {"torch": version, "cuda": None}}
        return [Record(At("outside", 0, 0, 0), "start", more=more), batch(1)]

    assert diff(tmp_path, on("2.12.0"), on("2.13.0"), capsys)[-1] == "environment: torch 2.12.0 -> 2.13.0"


def test_the_rank_that_parts_first_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, changed in (("a", TEN), ("b", but(4, digest="x"))):
        write(tmp_path / f"{name}-rank00001.jsonl", *changed)

    assert diff(tmp_path, TEN, but(8, digest="x"), capsys)[0] == (
        "part at step 4 (epoch 0, batch 4) on rank 1: the batch differs"
    )


@pytest.mark.parametrize("option", ["--all", "--depth=1"])
def test_diff_of_traces_refuses_options_of_checkpoints(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.jsonl", *TEN)

    assert main(["diff", "--trace", option, path, path]) == 2
    assert "--all and --depth are for checkpoints" in capsys.readouterr().err


def test_two_that_have_no_boundary_in_common_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [write(tmp_path / "a.jsonl", *TEN), write(tmp_path / "b.jsonl", resumed(20), batch(21))]

    assert main(["diff", "--trace", *words]) == 2
    assert (
        "have no boundary in common: one goes from step 0 to step 10 (epoch 0, batch 10), "
        "and one goes from step 20 (epoch 0, batch 20) to step 21 (epoch 0, batch 21)."
    ) in capsys.readouterr().err
    assert main(["diff", "--trace", words[0], str(tmp_path / "c.jsonl")]) == 2
    assert "c.jsonl cannot be read: No such file" in capsys.readouterr().err


def test_the_fields_of_the_json_are_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (but(8, noted={"loss": loss}) for loss in (0.5, float("nan")))
    words = [write(tmp_path / "a.jsonl", *one), write(tmp_path / "b.jsonl", *other)]

    assert main(["diff", "--trace", "--json", *words]) == 1
    found = json.loads(capsys.readouterr().out)

    assert found["parted"] == {
        "rank": 0,
        "why": "boundary",
        "at": {"kind": "batch", "epoch": 0, "batch": 8, "step": 8},
        "differences": [{"part": "noted", "name": "loss", "before": 0.5, "after": "nan"}],
    }
    assert (found["equal"], found["compared"], found["last_equal"]["step"]) == (False, 9, 7)
    section = re.split("^##+ ", CLI_PAGE.read_text(), flags=re.MULTILINE)
    [table] = [text for text in section if text.startswith("Where two traces part")]
    assert {*found} == rows_of(table)

    words = [write(tmp_path / "a.jsonl", *TEN), write(tmp_path / "b.jsonl", *TEN, batch(11))]
    assert main(["diff", "--trace", "--json", *words]) == 1
    longer = json.loads(capsys.readouterr().out)
    assert (longer["equal"], longer["parted"], longer["looked"], longer["looked_later"]) == (
        False,
        None,
        1,
        0,
    )
    [further] = longer["further"]
    assert (further["trace"], further["boundaries"], further["last"]["step"]) == (words[1], 1, 11)

    inner = {*found["parted"], *found["parted"]["at"], *found["parted"]["differences"][0], *further}
    assert inner <= {*re.findall(r"`(\w+)`", table)}
