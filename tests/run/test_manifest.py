"""What a checkpoint says about itself: to JSON and back, and nothing else is taken for it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from resumable.boundary import Boundary
from resumable.errors import FormatTooNew
from resumable.files import strict_json
from resumable.run import manifest
from resumable.run.manifest import Best, FileRecord, Goal, Manifest

ABOUT = Manifest(
    number=41,
    parent=40,
    run_id="0123456789abcdef",
    saved="2026-01-02T03:04:05+00:00",
    boundary=Boundary.BATCH,
    epoch=12,
    batch=310,
    step=12400,
    samples=793600,
    metrics={"val_acc": 0.812},
    best=Best(Goal("val_acc", True), 0.812, 41, since=3),
    files={"state.json": FileRecord(7, "a" * 32), "ranks/00000.json": FileRecord(5, "b" * 32)},
    parts={"model": {"kind": "module", "tensors": {"weight": "float32[2]"}}},
    built={"optimizer.lr": 0.1},
    environment={"torch": "2.13.0", "gpus": []},
)
BODY = manifest.unseal(manifest.to_json(ABOUT))


def test_a_manifest_comes_back_as_it_was() -> None:
    once = manifest.from_json(manifest.to_json(ABOUT))
    twice = manifest.from_json(manifest.to_json(once))
    assert once == twice == ABOUT


def test_a_first_checkpoint_without_a_goal_comes_back_as_it_was() -> None:
    about = replace(ABOUT, parent=None, best=None, metrics={}, boundary=Boundary.OUTSIDE)
    assert manifest.from_json(manifest.to_json(about)) == about


@settings(deadline=None, database=None)
@given(st.dictionaries(st.text(), st.floats()))
def test_every_metric_comes_back_bit_for_bit(metrics: dict[str, float]) -> None:
    found = manifest.from_json(manifest.to_json(replace(ABOUT, metrics=metrics))).metrics
    assert list(found) == list(metrics)
    for name, value in metrics.items():
        assert math.isnan(found[name]) if math.isnan(value) else found[name].hex() == value.hex()


def test_a_metric_that_is_a_whole_number_comes_back_as_a_float() -> None:
    found = manifest.from_json(manifest.to_json(replace(ABOUT, metrics={"correct": 7}))).metrics["correct"]
    assert (found, type(found)) == (7.0, float)


def test_a_newer_format_is_named_with_what_to_do() -> None:
    text = strict_json.seal({**BODY, "format": manifest.NEWEST + 1, "unheard of": 1})
    with pytest.raises(FormatTooNew, match=r"in format 3; .* reads up to 2\.\nFix: upgrade resumable,"):
        manifest.from_json(text)


def test_a_damaged_manifest_of_a_newer_format_is_damaged() -> None:
    text = strict_json.seal({**BODY, "format": manifest.NEWEST + 1})
    with pytest.raises(ValueError, match="checksum") as caught:
        manifest.from_json(text.replace(b'"step"', b'"stop"'))
    assert not isinstance(caught.value, FormatTooNew)


@pytest.mark.parametrize("found", [0, -1, True, "1", 1.0, None, [1], 10**400])
def test_what_is_no_format_number_of_ours_is_refused(found: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (many reasons, one kind)
        manifest.from_json(strict_json.seal({"format": found, **BODY}))


def test_a_manifest_without_a_format_number_is_refused() -> None:
    with pytest.raises(ValueError, match="None stands where int belongs"):
        manifest.from_json(strict_json.seal(BODY))


@pytest.mark.parametrize("key", BODY)
def test_no_key_may_be_missing(key: str) -> None:
    with pytest.raises(ValueError, match=rf"it lacks \['{key}'\]"):
        manifest.from_json(manifest.seal({k: v for k, v in BODY.items() if k != key}))


@pytest.mark.parametrize("key", ["", "Number", "number ", "sparse"])
def test_no_key_beyond_the_format_is_taken(key: str) -> None:
    with pytest.raises(ValueError, match=rf"\['{key}'\] beyond the format"):
        manifest.from_json(manifest.seal({**BODY, key: 1}))


COUNTS = ("number", "epoch", "batch", "step", "samples", "world_size")
NO_COUNTS = (True, -1, 1.0, "1", None, [], {})
FILE = {"size": 1, "xxh3_128": "a"}
BEST = {"metric": "loss", "maximize": False, "value": 0.5, "number": 1, "since": 0}
WRONG = [
    *((key, value) for key in COUNTS for value in NO_COUNTS),
    *(("parent", value) for value in NO_COUNTS if value is not None),
    *((key, value) for key in ("run_id", "saved") for value in (None, 1, True, [], {})),
    *(("boundary", value) for value in (None, 1, "", "Batch", "body", [], {}, ["batch"], True)),
    *((key, v) for key in ("metrics", "files", "parts", "built", "environment") for v in (None, [], "", 1)),
    *(("metrics", {"a": v}) for v in (None, True, 1, "NaN", "1", "infinity", " inf", [], {}, 10**400)),
    *(("parts", {"model": value}) for value in (None, [], "module", 1)),
    *(("best", value) for value in ([], {}, "", 0, False, {**BEST, "more": 1}, {"value": 0.5})),
    *(("best", {**BEST, "metric": value}) for value in (None, 1, [])),
    *(("best", {**BEST, "maximize": value}) for value in (None, 1, "true")),
    *(("best", {**BEST, "value": value}) for value in (None, 1, True, "nan", "inf", "0.5")),
    *(("best", {**BEST, key: value}) for key in ("number", "since") for value in NO_COUNTS),
    *(("files", {"state.json": value}) for value in (None, [], 7, {}, {"size": 1}, {**FILE, "more": 1})),
    *(("files", {"state.json": {**FILE, "size": value}}) for value in NO_COUNTS),
    *(("files", {"state.json": {**FILE, "xxh3_128": value}}) for value in (None, 1, [])),
]


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_field_that_cannot_be_meant_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (many reasons, one kind)
        manifest.from_json(manifest.seal({**BODY, key: value}))


NAMES = (
    "manifest.json|../state.json|/etc/passwd.json|ranks/../state.json|./state.json|state.json/|state.json\n"
    "|\nstate.json|state.json\0|ranks\\00000.json|ranks//00000.json|ranks/0.json|ranks/000000.json"
    "|ranks/00000.json/x.json|Ranks/00000.json|ranks/\u0660\u0660\u0660\u0660\u0660.json|.|..|json|.json|state"
    "|-frozen.json|model-.json|model-frozen|model-frozen-frozen.json|ranks/00000-frozen.safetensors|a-b.json"
    "|state.pkl|state.JSON|C:state.json|~/state.json|state.json:x.json|%2e%2e/state.json|\u017ftate.json|"
)


@pytest.mark.parametrize("name", [*NAMES.split("|"), "a" * 33 + ".json"])
def test_no_file_name_leads_out_of_the_folder(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a file"):
        manifest.from_json(manifest.seal({**BODY, "files": {name: FILE}}))


@pytest.mark.parametrize("name", ["model.safetensors", "model-frozen.safetensors", "ranks/00000.safetensors"])
def test_a_file_is_named_by_what_it_holds_and_whether_that_is_trained(name: str) -> None:
    text = manifest.seal({**BODY, "files": {name: FILE}})
    assert manifest.from_json(text).files == {name: FileRecord(1, "a")}


def test_a_manifest_nested_without_a_bottom_is_refused() -> None:
    text = manifest.to_json(ABOUT)
    rest = text[text.index(b"\n") :].replace(b'"optimizer.lr": 0.1', b'"a": ' + b"[" * 10**5 + b"]" * 10**5)
    head = f'{{"checksum": "{xxhash.xxh3_128_hexdigest(rest)}",'.encode()
    with pytest.raises(ValueError, match="nested too deeply"):
        manifest.from_json(head + rest)


def test_a_sharded_checkpoint_says_so_in_its_format() -> None:
    file = FileRecord(40 << 20, "c" * 32, ("d" * 32, "e" * 32, "f" * 32))
    files = {**ABOUT.files, "model/shard-00001-model-00001-of-00001.safetensors": file}
    about = replace(ABOUT, files=files, world_size=4, data_ranks=(0, 0, 1, 1))
    text = manifest.to_json(about)

    assert manifest.from_json(text) == about
    assert manifest.from_json(manifest.to_json(ABOUT)).data_ranks == ()
    assert strict_json.unseal(text)["format"] == manifest.NEWEST
    assert about.data_size == 2
    assert [about.rank_for(rank, 4, rank // 2) for rank in range(4)] == [0, 1, 2, 3]
    assert [about.rank_for(rank, 3, rank) for rank in range(3)] == [0, 2, None]
    assert [ABOUT.rank_for(0, 1, 0), ABOUT.rank_for(1, 2, 1)] == [0, None]


@pytest.mark.parametrize("ranks", [[0], [0, 1, 2], ["0", "1"], {"a": 1}, 5, None])
def test_data_ranks_that_are_not_those_of_the_processes_are_refused(ranks: Any) -> None:
    text = strict_json.seal({"format": 2, **BODY, "world_size": 2, "data_ranks": ranks})

    with pytest.raises(ValueError, match=r"data ranks|stands where"):
        manifest.from_json(text)


SHARD = "model/shard-00002-model-00001-of-00001.safetensors"


def test_a_part_says_what_is_elsewhere() -> None:
    part = replace(ABOUT, elsewhere={SHARD: FileRecord(9, "c" * 32, ("c" * 32,))}, is_first_part=False)
    assert manifest.from_json(manifest.to_json(part)) == part
    whole = part.whole()
    assert whole.files == {**part.files, **part.elsewhere}
    assert (whole.elsewhere, whole.is_first_part) == ({}, True)
    assert part.size == ABOUT.size


def test_a_file_that_is_here_and_elsewhere_is_refused() -> None:
    twice = replace(ABOUT, elsewhere={"state.json": FileRecord(7, "a" * 32)})
    with pytest.raises(ValueError, match=r"says of 'state\.json' that it is here and elsewhere"):
        manifest.from_json(manifest.to_json(twice))
