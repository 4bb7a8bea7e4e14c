"""What `prune` removes, and what it never does."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from forks import Forks
from places import CLI_PAGE
from tables import rows_of

from resumable import Run, RunState
from resumable.cli.app import main


@pytest.fixture
def run(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A run of six checkpoints, where the second is the best, and the fourth continues from the third."""
    training, state = tiny.load(run_dir, keep=None)
    with state:
        for loss in (3.0, 1.0, 2.5, 2.0, 2.2):
            tiny.save_next(training, state, loss)
        state.restore(3)
        tiny.save_next(training, state, 2.4)
    capsys.readouterr()
    return run_dir


def damage(run: Path, number: int, name: str = "model.safetensors") -> None:
    [path] = run.glob(f"checkpoints/{number:06}-*/{name}")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    # What is shared stays whole in the others
    path.unlink()
    path.write_bytes(data)


def pruned(run: Path, *words: str, code: int = 0) -> list[int]:
    """Return what is there after the command."""
    assert main(["prune", str(run), *words]) == code
    return Run(run).numbers()


@pytest.mark.quick(9)
@pytest.mark.parametrize(
    ("words", "left"),
    [
        (["--keep", "1"], [2, 6]),
        (["--keep", "3"], [2, 4, 5, 6]),
        (["--keep-best", "2"], [2, 4, 6]),
        (["--keep-best", "9"], [1, 2, 3, 4, 5, 6]),
        (["--keep-every", "2"], [2, 4, 6]),
        (["--keep-every", "3 steps", "--keep", "2"], [2, 3, 5, 6]),
        (["--abandoned"], [1, 2, 3, 6]),
        (["--abandoned", "--keep", "2"], [2, 3, 6]),
        (["--damaged"], [1, 2, 3, 4, 5, 6]),
    ],
)
def test_what_is_asked_for_stays_and_goes(run: Path, words: list[str], left: list[int]) -> None:
    assert pruned(run, *words) == left
    tiny.assert_all_verify(Run(run))


def test_a_dry_run_says_all_of_it_and_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pruned(run, "--keep", "1", "--dry-run") == [1, 2, 3, 4, 5, 6]

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines if "go" in line and len(line) > 4 and line[0].isdigit()][:4] == [
        "1",
        "3",
        "4",
        "5",
    ]
    assert "Nothing was changed." in " ".join(lines[-1])


def test_after_a_prune_the_run_resumes_and_its_links_lead_somewhere(run: Path) -> None:
    pruned(run, "--keep", "1")

    assert os.path.realpath(run / "newest") == str(Run(run).path_of(6))
    assert os.path.realpath(run / "best") == str(Run(run).path_of(2))
    tiny.assert_goes_on(run, 4, keep=None)
    assert main(["ls", str(run)]) == 0


def test_a_damaged_newest_goes_and_the_links_lead_to_what_is_there(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run, 6)
    damage(run, 2)

    assert pruned(run, "--damaged") == [1, 3, 4, 5]

    assert os.path.realpath(run / "newest") == str(Run(run).path_of(5))
    # Of those that are left, 4 has the lowest loss.
    assert os.path.realpath(run / "best") == str(Run(run).path_of(4))
    assert main(["verify", str(run), "--all"]) == 0


def test_what_is_damaged_stays_unless_its_removal_was_asked_for(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run, 6)
    damage(run, 1, "manifest.json")

    assert pruned(run, "--keep", "1") == [1, 2, 5, 6]
    assert [line.split()[-2:] for line in capsys.readouterr().out.splitlines() if "damaged" in line] == [
        ["stays", "damaged"],
        ["stays", "damaged"],
    ]


def test_the_newest_intact_one_stays_however_many_newer_ones_look_well(run: Path) -> None:
    for number in (4, 5, 6):
        damage(run, number)

    assert pruned(run, "--keep", "1") == [2, 3, 4, 5, 6]
    assert pruned(run, "--damaged", "--keep", "1") == [2, 3]


def test_where_none_is_intact_nothing_goes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(1, 7):
        damage(run, number)

    assert pruned(run, "--damaged", code=4) == [1, 2, 3, 4, 5, 6]
    assert "none of the 6 checkpoints" in capsys.readouterr().err


def test_the_number_of_a_newest_that_went_does_not_come_again(run: Path) -> None:
    damage(run, 6)
    pruned(run, "--damaged")

    for number in (7, 8):
        training, state = tiny.load(run, keep=None)
        with state:
            tiny.save_next(training, state, 3.0)
        assert Run(run).numbers()[-1] == number
    tiny.assert_all_verify(Run(run))


def test_a_disk_that_fails_proves_nothing_damaged(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run, 4)
    there = os.open

    def failing(path: Any, flags: int, *more: Any, **how: Any) -> int:
        fd = there(path, flags, *more, **how)
        if "000005-" in os.readlink(f"/proc/self/fd/{fd}") and str(path).endswith(".safetensors"):
            os.close(fd)
            raise OSError(errno.EIO, "Input/output error")
        return fd

    monkeypatch.setattr(os, "open", failing)
    # Who looks whether it can open in a folder asks for the function
    monkeypatch.setattr(os, "supports_dir_fd", {failing})

    assert pruned(run, "--damaged", "--abandoned", "--keep", "1", code=1) == [2, 5, 6]
    assert "checkpoint 5 stays" in capsys.readouterr().err


def test_what_may_not_be_emptied_keeps_its_name(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = os.access
    # As for a folder of another user, in one that both may write to
    monkeypatch.setattr(
        os, "access", lambda path, *how, **_: "000001-" not in str(path) and there(path, *how)
    )

    assert pruned(run, "--keep", "1", code=1) == [1, 2, 6]
    assert "not removed: Permission denied" in capsys.readouterr().out
    assert [*run.glob("checkpoints/.*")] == []


def test_the_best_stays_where_the_newest_says_nothing_of_it(run: Path) -> None:
    from resumable.files import strict_json
    from resumable.run import manifest

    path = Run(run).path_of(6)
    assert path
    text = strict_json.unseal((path / manifest.NAME).read_bytes())
    (path / manifest.NAME).write_bytes(strict_json.seal({**text, "best": None}))

    assert pruned(run, "--keep", "1") == [2, 6]


def test_a_run_that_is_trained_is_left_alone(run: Path, tmp_path: Path, forks: Forks) -> None:
    script = f"import signal, resumable; run = resumable.Run({str(run)!r}); run.acquire(); print('ready')"
    training = forks.begin(["-c", f"{script}; signal.pause()"], tmp_path)
    training.wait_for("ready")
    assert pruned(run, "--keep", "1", code=5) == [1, 2, 3, 4, 5, 6]
    assert pruned(run, "--keep", "1", "--dry-run") == [1, 2, 3, 4, 5, 6]
    training.kill()
    training.ended()
    assert pruned(run, "--keep", "1") == [2, 6]


def test_a_folder_with_something_else_in_it_stays_and_says_so(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Run(run).path_of(1)
    assert path
    (path / "notes.txt").write_text("mine")

    assert pruned(run, "--keep", "1", code=1) == [1, 2, 6]
    assert "not removed: it holds notes.txt" in capsys.readouterr().out


def test_files_that_all_share_are_freed_with_the_last_of_them(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Linear(600, 600)
    model.requires_grad_(False)
    with RunState.load(run_dir, model=model, keep=None) as state:
        state.save()
        state.save()
        with torch.no_grad():
            model.weight.zero_()
        state.save()
    capsys.readouterr()

    freed = []
    for keep in ("2", "1"):
        main(["prune", str(run_dir), "--keep", keep, "--json"])
        freed.append(json.loads(capsys.readouterr().out)["freed"])

    assert freed[0] < 600 * 600 * 4 < freed[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "one of --keep N"),
        (["--dry-run"], "one of --keep N"),
        (["--keep", "0"], "--keep 0 keeps nothing"),
        (["--keep-best", "-1"], "--keep-best -1 keeps nothing"),
        (["--keep-every", "often"], "does not say how often"),
        (["--keep-every", "2", "--keep-every", "3 steps"], "one kind of rule twice"),
    ],
)
def test_what_cannot_be_meant_removes_nothing(
    run: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pruned(run, *words, code=2) == [1, 2, 3, 4, 5, 6]
    assert told in capsys.readouterr().err


def test_the_best_cannot_be_kept_where_nothing_says_which_those_are(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunState.load(run_dir, model=torch.nn.Linear(2, 2), keep=None) as state:
        state.save()
        state.save()

    assert pruned(run_dir, "--keep-best", "2", code=2) == [1, 2]
    assert pruned(run_dir, "--keep-best", "1") == [2]


def test_what_a_newer_version_wrote_is_not_judged(run: Path) -> None:
    from resumable.files import strict_json
    from resumable.run import manifest

    path = Run(run).path_of(1)
    assert path
    text = strict_json.unseal((path / manifest.NAME).read_bytes())
    (path / manifest.NAME).write_bytes(strict_json.seal({**text, "format": 99}))

    assert pruned(run, "--damaged", code=4) == [1, 2, 3, 4, 5, 6]


def test_the_json_has_just_the_documented_fields(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, 1, "manifest.json")
    section = CLI_PAGE.read_text().partition("## `resumable prune`")[2].partition("\n## ")[0]

    main(["prune", str(run), "--damaged", "--keep", "2", "--json"])

    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found.keys() == {"run", "dry_run", "freed", "checkpoints"}
    assert all(row.keys() == rows_of(section) for row in found["checkpoints"])
    assert {row["why"] for row in found["checkpoints"]} == {"damaged", "not kept", "kept", "best", "newest"}
