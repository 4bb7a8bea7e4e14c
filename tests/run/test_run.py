"""A run directory: which checkpoint is meant, what is damaged, what is pruned, and what is never touched."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from resumable import (
    Boundary,
    CheckpointDamaged,
    CheckpointNotFound,
    FormatTooNew,
    NotARun,
    ResumableWarning,
    RunExists,
    RunInUse,
    SaveFailed,
    UsageError,
)
from resumable.files.large_files import Content
from resumable.run import checkpoint, manifest
from resumable.run.catalog import Catalog
from resumable.run.checkpoint import Checkpoint
from resumable.run.directory import Run
from resumable.run.manifest import Best, Goal, Manifest
from resumable.run.policy import Every, Keep

GOAL = Goal("loss", maximize=False)


def _about(number: int, best: int | None = None, step: int | None = None, **metrics: float) -> Manifest:
    return Manifest(
        number=number,
        parent=None,
        run_id="a1b2",
        saved="2026-01-01T00:00:00+00:00",
        boundary=Boundary.STEP,
        epoch=0,
        batch=0,
        step=number * 10 if step is None else step,
        samples=0,
        metrics=metrics,
        best=None if best is None else Best(GOAL, 0.5, best),
        files={},
        parts={},
        built={},
        environment={},
    )


def _commit(run: Run, number: int, *args: Any, **metrics: float) -> Checkpoint:
    contents = {"model.safetensors": b"weights %d" % number, "ranks/00000.json": b"rank %d" % number}
    files = {name: Content(content) for name, content in contents.items()}
    return checkpoint.commit(run.folder, _about(number, *args, **metrics), files)[0]


@pytest.fixture
def run(run_dir: Path) -> Iterator[Run]:
    """A run with the checkpoints 1, 2 and 3, of which 2 is the best."""
    run = Run(run_dir)
    run.acquire()
    for number, best in ((1, 1), (2, 2), (3, 2)):
        _commit(run, number, best)
    yield run
    run.release()


def _choose(run: Run, which: Any) -> tuple[int, bytes] | None:
    """Return the number and the weights of what is chosen, having gone through the door."""
    run.check(which)
    found = run.choose(which, Checkpoint.read)
    if found is None:
        return None
    chosen, files = found
    return chosen.about.number, bytes(files["model.safetensors"])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _break(run: Run, *numbers: int) -> None:
    for number in numbers:
        _flip(run.open(number).path / "model.safetensors")


def _failing(error: int, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(error, os.strerror(error), "/a/random/name")

    for name in names:
        monkeypatch.setattr(os, name, fail)


# Choosing


@pytest.mark.parametrize("which", ["auto", "must", "newest", "latest", "last", 3, "3", "000003"])
def test_the_newest_is_chosen_by_each_of_its_names(run: Run, which: Any) -> None:
    assert _choose(run, which) == (3, b"weights 3")


@pytest.mark.parametrize("which", ["best", 2, "2"])
def test_another_one_is_chosen_by_its_merit_or_number(run: Run, which: Any) -> None:
    assert _choose(run, which) == (2, b"weights 2")


@pytest.mark.parametrize("kind", [str, Path])
def test_a_checkpoint_is_chosen_by_its_path_or_a_link_to_it(run: Run, kind: Callable[[Path], Any]) -> None:
    run.point("best", run.open(2).path)

    assert _choose(run, kind(run.open(1).path)) == (1, b"weights 1")
    assert _choose(run, kind(run.path / "best")) == (2, b"weights 2")
    assert run.choose(kind(run.path / "best"), Checkpoint.verify) == (run.open(2), None)


def test_a_checkpoint_of_another_run_is_chosen_by_its_path(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "runs" / "other")

    assert _choose(other, run.open(2).path) == (2, b"weights 2")
    assert other.numbers() == []


def test_a_copied_checkpoint_is_chosen_by_its_path(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.open(2).path, tmp_path / "to keep")

    assert _choose(run, tmp_path / "to keep") == (2, b"weights 2")


def test_the_newest_is_the_highest_number_even_where_its_step_is_lower(run: Run) -> None:
    _commit(run, 4, step=5)

    assert _choose(run, "auto") == (4, b"weights 4")


@pytest.mark.parametrize("which", ["auto", "never"])
def test_an_empty_run_is_a_fresh_start(run_dir: Path, which: str) -> None:
    assert _choose(Run(run_dir), which) is None
    run_dir.mkdir(parents=True)
    assert _choose(Run(run_dir), which) is None


def test_checkpoints_are_listed_oldest_first_by_number(run: Run) -> None:
    _commit(run, 1_000_000)
    _commit(run, 20)

    assert run.numbers() == [1, 2, 3, 20, 1_000_000]
    assert [found.about.number for found in run.checkpoints()] == run.numbers()


def test_a_listing_leaves_out_what_is_damaged_and_opens_the_rest(run: Run) -> None:
    _flip(run.open(2).path / "manifest.json")

    assert [found.about.number for found in run.checkpoints()] == [1, 3]


# What cannot be meant


@pytest.mark.parametrize("which", [7, "7", 0, -1])
def test_a_number_that_is_not_there_names_the_ones_that_are(run: Run, which: Any) -> None:
    with pytest.raises(
        CheckpointNotFound, match=rf"no checkpoint {which} in {run.path}; there are: 1, 2, 3\."
    ):
        _choose(run, which)


@pytest.mark.parametrize("which", ["newset", "runs/nowhere", "", Path("nowhere"), "step 12"])
def test_an_unknown_word_lists_the_known_ones(run: Run, which: Any) -> None:
    kind = CheckpointNotFound if "nowhere" in str(which) else UsageError
    with pytest.raises(kind, match=r"is neither a known word nor .*\nFix: say 'auto'"):
        _choose(run, which)


@pytest.mark.parametrize("which", [True, False, None, 1.0, ["auto"]])
def test_what_is_no_word_number_or_path_is_refused(run: Run, which: Any) -> None:
    with pytest.raises(UsageError, match=r"does not say where to continue from"):
        _choose(run, which)


@pytest.mark.parametrize("which", ["must", "best", "latest", 3, "newset", None])
def test_what_is_seen_to_be_wrong_is_refused_before_anything_is_made(run_dir: Path, which: Any) -> None:
    with pytest.raises((CheckpointNotFound, UsageError)):
        Run(run_dir).check(which)

    assert not run_dir.parent.exists()


def test_a_mistyped_directory_suggests_the_one_beside_it(run: Run, tmp_path: Path) -> None:
    run.identity()
    (tmp_path / "runs" / "exq").mkdir()

    with pytest.raises(CheckpointNotFound, match=f"exq holds no checkpoint. Did you mean {run.path}?"):
        Run(tmp_path / "runs" / "exq").check("must")
    with pytest.raises(CheckpointNotFound, match=rf"exp2 does not exist. Did you mean {run.path}?"):
        Run(tmp_path / "runs" / "exp2").check("must")


@pytest.mark.parametrize("path", ["runs", "runs/exp/checkpoints", "runs/exp/newest"])
def test_a_folder_above_or_inside_a_run_suggests_that_run(run: Run, tmp_path: Path, path: str) -> None:
    run.identity()
    run.point("newest", run.path_of(1))

    with pytest.raises(CheckpointNotFound, match=f"holds no checkpoint. Did you mean {run.path}?"):
        Run(tmp_path / path).check("must")


def test_a_run_that_lost_its_checkpoints_is_no_fresh_start(run: Run) -> None:
    run.check("must")
    shutil.rmtree(run.folder)

    with pytest.raises(CheckpointNotFound, match="holds no checkpoint"):
        run.choose("must", Checkpoint.read)


@pytest.mark.parametrize("place", ["runs", "runs/exp", "runs/exp/checkpoints"])
def test_a_file_in_place_of_a_folder_is_not_a_run(tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("mine")

    with pytest.raises(NotARun, match=rf"{tmp_path / place} is not a folder\.\nFix: give the run a dir"):
        Run(tmp_path / "runs" / "exp").check("auto")

    assert (tmp_path / place).read_text() == "mine"


def test_never_refuses_a_run_that_is_there(run: Run) -> None:
    with pytest.raises(RunExists, match=r"exp holds 3 checkpoints, and resume='never'"):
        run.check("never")


def test_best_without_a_metric_says_how_to_have_one(run_dir: Path) -> None:
    run = Run(run_dir)
    _commit(run, 1)

    with pytest.raises(CheckpointNotFound, match=r"is known to be the best.\nFix: say which metric decides"):
        _choose(run, "best")


# Very many


@pytest.fixture
def many(run_dir: Path) -> Iterator[Run]:
    """A run with the checkpoints 1 to 50, which it has listed; the loss is best at 20."""
    run = Run(run_dir)
    run.acquire()
    for number in range(1, 51):
        _commit(run, number, loss=abs(number - 20) / 2)
    assert run.best(GOAL) == Best(GOAL, 0.0, 20)
    yield run
    run.release()


def _save(run: Run, keep: Keep | None = None, **metrics: float) -> int:
    number = (run.highest() or 0) + 1
    _commit(run, number, **metrics)
    run.added(_about(number, **metrics))
    best = run.best(GOAL)
    run.prune(keep, [best and best.number])
    return number


def test_a_run_that_is_a_link_to_a_folder_elsewhere_is_that_run(run: Run, tmp_path: Path) -> None:
    (tmp_path / "here").symlink_to(run.path)
    linked = Run(tmp_path / "here")

    assert _choose(linked, "auto") == _choose(run, "auto") == (3, b"weights 3")
    assert linked.identity() == linked.identity() == run.identity()


def test_a_name_that_is_old_leads_through_no_link(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, names = run.open(1).path, run.names()
    path.rename(tmp_path / "mine")
    path.symlink_to(tmp_path / "mine")
    monkeypatch.setattr(Catalog, "names", lambda _: names)

    with pytest.raises(CheckpointDamaged, match="000001-step-00000010 is damaged: it is a symbolic link"):
        run.open(1)
    with pytest.warns(ResumableWarning, match="checkpoint 1 in .* could not be pruned: it is a symbolic"):
        run.prune(Keep(1), [2])

    assert (tmp_path / "mine" / "model.safetensors").read_bytes() == b"weights 1"


def test_a_file_or_a_link_with_the_name_of_a_checkpoint_is_none(run: Run) -> None:
    (run.folder / "000008-step-00000080").touch()
    (run.folder / "000009-step-00000090").symlink_to(run.open(1).path)
    (run.folder / "1000000-step-10000000").symlink_to("nowhere")
    (run.folder / "mine\n000010-step-00000100").mkdir()
    (run.folder / "zzz").mkdir()

    assert (run.numbers(), run.highest(), run.path_of(9)) == ([1, 2, 3], 3, None)
    assert [run.holds_more_than(count) for count in (2, 3)] == [True, False]
    assert _choose(run, "auto") == (3, b"weights 3")


def test_the_best_is_opened_again_once_its_manifest_has_changed(many: Run) -> None:
    _flip(many.open(20).path / "manifest.json")
    assert many.best(GOAL) == Best(GOAL, 0.5, 19)

    shutil.rmtree(many.folder / "000019-step-00000190")
    assert many.best(GOAL) == Best(GOAL, 0.5, 21)


def test_the_best_follows_what_is_saved_and_what_is_pruned(many: Run) -> None:
    _save(many, loss=-2.0)
    _save(many, loss=-2.0)
    assert many.best(GOAL) == Best(GOAL, -2.0, 51)

    many.prune(Keep(1), [])
    assert many.best(GOAL) == Best(GOAL, -2.0, 52)
    assert many.best(Goal("loss", maximize=True)) == Best(Goal("loss", maximize=True), -2.0, 52)
    assert many.best(None) is None


def test_a_newer_manifest_hides_the_best(many: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", manifest.NEWEST + 1)
    _commit(many, 51)
    monkeypatch.undo()

    for goal in (GOAL, GOAL, None):
        with pytest.raises(FormatTooNew, match="000051-step-00000510 cannot be read"):
            many.best(goal)


# Damage


def _swap(path: Path) -> None:
    """Exchange a file with that of the checkpoint before."""
    other = Path(str(path).replace("000003-step-00000030", "000002-step-00000020"))
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _socket_at(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


def _in_place(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def _link_to_a_copy(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved").name)


DAMAGES: Mapping[str, Callable[[Path], object]] = {
    "flipped": _flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "emptied": lambda path: os.truncate(path, 0),
    "extended": lambda path: os.truncate(path, path.stat().st_size + 1),
    "missing": Path.unlink,
    "link": _link_to_a_copy,
    "pipe": _in_place(os.mkfifo),
    "folder": _in_place(Path.mkdir),
    "socket": _socket_at,
}
NAMES = ("model.safetensors", "ranks/00000.json", "manifest.json")


@pytest.mark.proves("noticed")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damage_is_named_and_the_newest_intact_one_is_used(
    run: Run, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object], name: str
) -> None:
    path = run.open(3).path
    monkeypatch.chdir(path)  # A socket's path must be short
    damage(path / name)

    for _ in range(2):
        with pytest.warns(ResumableWarning, match=f"{path.name} is damaged: {name}.* It is skipped"):
            assert _choose(run, "auto") == (2, b"weights 2")
    with pytest.raises(CheckpointDamaged, match=f"{path.name} is damaged: {name}"):
        _choose(run, 3)
    assert _choose(run, 2) == (2, b"weights 2")


@pytest.mark.proves("noticed")
@pytest.mark.parametrize("name", NAMES)
def test_each_flipped_bit_and_each_missing_end_of_a_file_is_found(run: Run, name: str) -> None:
    path = run.open(3).path / name
    whole = path.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << position % 8
        for content in (flipped, whole[:position]):
            path.write_bytes(content)
            with pytest.raises(CheckpointDamaged, match=f"000003-step-00000030 is damaged: {name}"):
                run.open(3).read()
    path.write_bytes(whole)
    assert _choose(run, "auto") == (3, b"weights 3")


@pytest.mark.proves("noticed")
def test_a_file_of_another_checkpoint_is_damage_in_both(run: Run) -> None:
    _swap(run.open(3).path / "model.safetensors")

    with pytest.warns(ResumableWarning, match=r"000000[23]0 is damaged: model") as warned:
        assert _choose(run, "auto") == (1, b"weights 1")

    assert [str(w.message).partition(" is damaged")[0][-8:] for w in warned] == ["00000030", "00000020"]


def test_checkpoints_that_exchanged_their_whole_content_are_damaged(run: Run) -> None:
    newest, before = run.open(3).path, run.open(2).path
    newest.rename(run.folder / "aside")
    before.rename(newest)
    (run.folder / "aside").rename(before)

    with pytest.warns(ResumableWarning, match=r"manifest.json is the one of 00000[23]-step-000000[23]0\."):
        assert _choose(run, "auto") == (1, b"weights 1")
    with pytest.raises(CheckpointDamaged, match=r"manifest.json is the one of 000002-step-00000020"):
        _choose(run, 3)


def test_every_checkpoint_that_is_skipped_is_named(run: Run) -> None:
    _break(run, 2, 3)

    with pytest.warns(ResumableWarning) as warned:
        assert _choose(run, "must") == (1, b"weights 1")

    assert len(warned) == 2


@pytest.mark.proves("noticed")
@pytest.mark.parametrize("which", ["auto", "must"])
def test_a_run_of_only_damaged_checkpoints_is_an_error_and_no_fresh_start(run: Run, which: str) -> None:
    _break(run, 1, 2, 3)

    with (
        pytest.warns(ResumableWarning),
        pytest.raises(
            CheckpointDamaged,
            match=r"none of the 3 checkpoints in .* is intact\. Of the last .*\nFix: look at them",
        ),
    ):
        _choose(run, which)


def test_a_run_whose_manifests_are_all_gone_is_no_fresh_start(run: Run) -> None:
    for number in run.numbers():
        (run.open(number).path / "manifest.json").unlink()

    with (
        pytest.warns(ResumableWarning, match=r"manifest.json is missing"),
        pytest.raises(CheckpointDamaged, match="none of the 3"),
    ):
        _choose(run, "auto")


def test_what_the_reader_finds_damaged_is_skipped_too(run: Run) -> None:
    def read(found: Checkpoint) -> int:
        if found.about.number > 1:
            raise CheckpointDamaged("its tree makes no sense.", fix="")
        return found.about.number

    with pytest.warns(ResumableWarning, match=r"its tree makes no sense. It is skipped"):
        found = run.choose("auto", read)

    assert found == (run.open(1), 1)


@pytest.mark.parametrize("which", ["best", 2])
def test_the_one_that_was_asked_for_is_not_replaced_by_another(run: Run, which: Any) -> None:
    _break(run, 2)

    with pytest.raises(
        CheckpointDamaged, match=r"00000020 is damaged: model.*\nFix: resume='auto' continues"
    ):
        _choose(run, which)


@pytest.mark.parametrize("which", ["auto", "must", "best", 4])
def test_a_newer_format_is_not_skipped(run: Run, monkeypatch: pytest.MonkeyPatch, which: Any) -> None:
    monkeypatch.setattr(manifest, "FORMAT", manifest.NEWEST + 1)
    _commit(run, 4, best=4)
    monkeypatch.undo()

    with pytest.raises(FormatTooNew, match=r"00000040 cannot be read.*\nFix: upgrade"):
        _choose(run, which)


# Owning a run


def test_a_run_that_is_owned_is_refused_to_others_until_it_is_released(run: Run) -> None:
    with pytest.raises(RunInUse, match=f"{run.path} is being written by this process"):
        Run(run.path).acquire()

    run.acquire()
    run.release()
    run.release()
    other = Run(run.path)
    other.acquire()
    other.release()


def test_a_read_only_run_says_so_at_the_start(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(errno.EROFS, monkeypatch, "mkdir")

    with pytest.raises(SaveFailed, match=r"exp cannot be written: \[Errno 30\] Read-only.*\nFix: mend the"):
        Run(run_dir).acquire()


@pytest.fixture
def littered(run: Run) -> tuple[Run, list[str]]:
    """A run with all that a killed process can leave, and all that looks a little like it."""
    run.release()
    shutil.copytree(run.open(1).path, run.folder / ".stage-000004-0123abcd")
    shutil.copytree(run.open(1).path, run.folder / ".trash-000001-0123abcd")
    (run.folder / ".trash-1234567-0123abcd" / "ranks").mkdir(parents=True)
    (run.path / ".newest-0123abcd").symlink_to("nowhere")
    (run.path / ".best-0123abcd").symlink_to("checkpoints")
    (run.path / ".run.json-0123abcd").write_text("half")
    mine = [
        *(
            "notes.txt",
            "tensorboard/events",
            "run.json.bak",
            ".newest",
            ".newest-0123abcde",
            ".other-0123abcd",
        ),
        *("checkpoints/notes.txt", "checkpoints/mine/model.safetensors", "checkpoints/.stage-mine"),
        *("checkpoints/.stage-000004-0123ABCD/state.json", "checkpoints/stage-000004-0123abcd/state.json"),
        *("checkpoints/000009-step-00000090.bak/state.json", "checkpoints/.trash-00001-0123abcd/state.json"),
    ]
    for name in mine:
        (run.path / name).parent.mkdir(exist_ok=True)
        (run.path / name).write_text("mine")
    return run, mine


def test_what_killed_saves_left_is_removed_and_nothing_else(littered: tuple[Run, list[str]]) -> None:
    run, mine = littered
    debris = {".stage-000004-0123abcd", ".trash-000001-0123abcd", ".trash-1234567-0123abcd"}
    debris |= {".newest-0123abcd", ".best-0123abcd", ".run.json-0123abcd"}
    before = set(run.path.rglob("*"))

    run.acquire()

    gone = before - set(run.path.rglob("*"))
    assert {path for path in gone if path.parent in (run.path, run.folder)} == {
        path for path in before if path.name in debris
    }
    assert all((run.path / name).read_text() == "mine" for name in mine)
    assert [run.open(number).verify() for number in run.numbers()] == [None] * 3


def test_prune_touches_no_unknown_name(littered: tuple[Run, list[str]]) -> None:
    run, mine = littered
    run.acquire()

    run.prune(Keep(1), [])

    assert run.numbers() == [3]
    assert all((run.path / name).read_text() == "mine" for name in mine)


def test_debris_with_a_file_of_the_users_in_it_stays_whole_and_is_named(run: Run) -> None:
    run.release()
    stage = run.folder / ".stage-000004-0123abcd"
    shutil.copytree(run.open(1).path, stage)
    (stage / "notes.txt").write_text("mine")
    before = sorted(stage.rglob("*"))

    with pytest.warns(ResumableWarning, match=f"left in {stage} could not be removed: .*holds notes.txt"):
        run.acquire()

    assert sorted(stage.rglob("*")) == before


def test_a_link_with_the_name_of_debris_is_removed_and_not_followed(run: Run, tmp_path: Path) -> None:
    run.release()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").touch()
    (run.folder / ".trash-000001-0123abcd").symlink_to(tmp_path / "mine")

    run.acquire()

    assert not os.path.lexists(run.folder / ".trash-000001-0123abcd")
    assert (tmp_path / "mine" / "model.safetensors").exists()


# Its name


def test_a_run_keeps_the_id_of_its_first_start(run_dir: Path) -> None:
    run_dir.mkdir(parents=True)
    first = Run(run_dir).identity()

    assert Run(run_dir).identity() == first
    assert Run(run_dir).identity() == first
    about = manifest.unseal((run_dir / "run.json").read_bytes())
    assert about.keys() == {"run_id", "created"}
    assert datetime.fromisoformat(about["created"]).tzinfo is not None


@pytest.mark.parametrize("damage", [_flip, Path.unlink, lambda path: path.write_bytes(manifest.seal({}))])
def test_an_id_that_is_damaged_or_gone_is_found_again_in_the_checkpoints(
    run: Run, recwarn: pytest.WarningsRecorder, damage: Callable[[Path], object]
) -> None:
    path = run.path / "run.json"
    run.identity()
    damage(path)
    was_there = path.exists()

    assert [run.identity(), run.identity()] == ["a1b2", "a1b2"]

    assert [str(w.message) for w in recwarn] == [f"{path} is damaged and written again"] * was_there


def test_a_pipe_in_place_of_the_id_does_not_hang(run: Run) -> None:
    os.mkfifo(run.path / "run.json")

    with pytest.warns(ResumableWarning, match=r"run.json is damaged and written again"):
        assert run.identity() == "a1b2"


def test_an_id_in_a_newer_format_stays_as_it_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT", manifest.NEWEST + 1)
    run.identity()
    monkeypatch.undo()
    before = (run.path / "run.json").read_bytes()

    with pytest.raises(FormatTooNew, match=r"run.json cannot be read: .*\nFix: upgrade"):
        run.identity()

    assert (run.path / "run.json").read_bytes() == before


# Links


def test_a_link_leads_people_to_a_checkpoint_and_follows_the_newest(run: Run) -> None:
    for number in (1, 3):
        run.point("newest", run.open(number).path)

        assert (run.path / "newest" / "model.safetensors").read_bytes() == b"weights %d" % number
        assert not os.path.isabs(os.readlink(run.path / "newest"))


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_what_a_user_keeps_as_best_is_left_alone(run: Run, make: Callable[[Path], object]) -> None:
    make(run.path / "best")
    before = os.lstat(run.path / "best")

    run.point("best", run.open(1).path)

    assert os.lstat(run.path / "best") == before


def test_a_disk_without_links_costs_one_warning(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _failing(errno.EPERM, monkeypatch, "symlink")

    with pytest.warns(
        ResumableWarning, match=r"best could not be made \(Operation not permitted\)"
    ) as warned:
        assert [run.point("best", run.open(number).path) for number in (1, 2)] == [None, None]

    assert len({str(warning.message) for warning in warned}) == 1
    assert not os.path.lexists(run.path / "best")


# Pruning


def _left(run: Run, keep: int | None, *protect: int | None) -> list[int]:
    run.prune(None if keep is None else Keep(keep), protect)
    for number in run.numbers():
        run.open(number).verify()
    assert sorted(os.listdir(run.folder)) == [run.open(number).path.name for number in run.numbers()]
    return run.numbers()


@pytest.mark.proves("durable")
def test_the_newest_and_the_protected_stay_and_are_intact(run: Run) -> None:
    assert _left(run, None) == [1, 2, 3]
    assert _left(run, 3) == [1, 2, 3]
    assert _left(run, 1, 2, None) == [2, 3]
    assert _left(run, 1) == [3]
    assert _left(run, 1) == [3]


def test_damaged_checkpoints_are_pruned_as_others_are(run: Run) -> None:
    (run.open(2).path / "manifest.json").unlink()
    _break(run, 1)

    assert _left(run, 1) == [3]


def test_the_rules_of_what_stays_hold_save_after_save(run_dir: Path) -> None:
    run, keep = Run(run_dir), Keep(2, best=2, every=Every(steps=40))
    run.acquire()

    for number in range(1, 14):
        _commit(run, number, loss=(number - 5) ** 2)
        run.added(_about(number, loss=(number - 5) ** 2))
        run.prune(keep, [], GOAL)

    assert run.numbers() == [4, 5, 8, 12, 13]
    assert _left_by(Run(run_dir), keep) == [4, 5, 8, 12, 13]
    run.release()


def _left_by(run: Run, keep: Keep) -> list[int]:
    run.prune(keep, [], GOAL)
    return run.numbers()


def test_several_best_are_found_again_by_a_process_that_has_not_saved_them(many: Run) -> None:
    assert _left_by(Run(many.path), Keep(1, best=3)) == [19, 20, 21, 50]


def test_a_damaged_one_is_never_the_best_nor_of_an_epoch_or_a_day(run: Run) -> None:
    _flip(run.open(1).path / "manifest.json")

    assert _left_by(Run(run.path), Keep(1, best=3, every=Every(seconds=1, epochs=1))) == [2, 3]
    assert _left_by(Run(run.path), Keep(1, every=Every(seconds=86400))) == [2, 3]


def test_a_time_that_is_none_in_a_manifest_counts_for_no_day(run: Run) -> None:
    shutil.rmtree(run.open(1).path)
    about = replace(_about(1), saved="long ago")
    checkpoint.commit(run.folder, about, {})
    run.added(about)

    assert _left_by(run, Keep(1, every=Every(seconds=1))) == [2, 3]


@pytest.mark.parametrize("name", ["notes.txt", "ranks/plot.png", "model.json/"])
def test_a_checkpoint_with_something_of_the_users_in_it_is_not_pruned(run: Run, name: str) -> None:
    path = run.open(1).path
    (path / name).mkdir() if name.endswith("/") else (path / name).write_text("mine")

    with pytest.warns(ResumableWarning, match=f"checkpoint 1 in {run.path} could not be pruned: .*{name}"):
        run.prune(Keep(1), [])

    assert run.numbers() == [1, 3]
    run.open(1).verify()
    assert (path / name).exists()


def test_what_a_linked_checkpoint_leads_to_stays(run: Run, tmp_path: Path) -> None:
    other = Run(tmp_path / "runs" / "other")
    _commit(other, 1)
    (other.folder / "000007-step-00000070").symlink_to(run.open(3).path)

    assert other.numbers() == [1]
    other.prune(Keep(1), [])

    run.open(3).verify()


@pytest.mark.parametrize("name", ["rename", "unlink", "rmdir"])
def test_a_refused_prune_costs_one_warning(run: Run, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _failing(errno.EACCES, monkeypatch, name)

    with pytest.warns(ResumableWarning, match=r"2 in .* could not be pruned: Permission denied$") as warned:
        run.prune(Keep(1), [1])

    assert len(warned) == 1
    assert 3 in run.numbers()
    run.open(3).verify()


def test_what_is_pruned_is_never_half_there_under_its_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, list[int]]] = []

    def watch(name: str, call: Callable[..., Any]) -> None:
        def watched(*args: Any) -> Any:
            events.append((name, run.numbers()))
            return call(*args)

        monkeypatch.setattr(os, name, watched)

    for name in ("rename", "fsync", "unlink"):
        watch(name, getattr(os, name))
    run.prune(Keep(2), [])

    # The flush before the first file goes: after a power cut the name could otherwise be back.
    assert events[:2] == [("rename", [1, 2, 3]), ("fsync", [2, 3])]
    assert events[2:] == [("unlink", [2, 3])] * 3
