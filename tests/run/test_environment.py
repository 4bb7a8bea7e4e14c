"""What a checkpoint notes down about where it was made, and what of it is compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import Forks

from resumable.run import environment


def test_the_description_is_json_and_starts_no_device() -> None:
    was_started = torch.cuda.is_initialized()
    found = environment.describe()

    assert json.loads(json.dumps(found)) == found
    assert found["torch"] == torch.__version__
    if not was_started:
        assert (found["gpus"], found["cudnn"], found["driver"]) == ([], None, None)
    assert torch.cuda.is_initialized() == was_started


def test_a_flag_that_results_depend_on_is_in_the_description() -> None:
    before = environment.describe()
    torch.use_deterministic_algorithms(True)
    try:
        now = environment.describe()
    finally:
        torch.use_deterministic_algorithms(False)

    assert (before["deterministic"], now["deterministic"]) == (False, True)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.12  Release\nGCC 1.2 \n", "570.12"),
        ("GCC version:  gcc version 12.3.0 (Ubuntu)\n", None),
        ("", None),
    ],
)
def test_the_driver_is_read_without_touching_the_device(
    tmp_path: Path, text: str, version: str | None
) -> None:
    (tmp_path / "version").write_text(text)

    assert environment.driver(tmp_path / "version") == version


def test_a_machine_without_the_driver_has_none(tmp_path: Path) -> None:
    assert environment.driver(tmp_path / "version") is None


SETTINGS = """
import torch
from resumable.run import environment
before = environment.describe()
torch.backends.fp32_precision = "ieee"
torch.backends.cuda.matmul.fp32_precision = "tf32"
now = environment.describe()
print(before["tf32"], before["cudnn_tf32"], now["tf32"], now["cudnn_tf32"])
"""


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch has no newer settings")
@pytest.mark.heavy
def test_the_newer_settings_of_tf32_are_read_where_the_older_refuse_to_answer(
    forks: Forks, tmp_path: Path
) -> None:
    printed = forks.run(["-c", SETTINGS], tmp_path).checked().out

    assert printed.split() == ["highest", "True", "tf32", "ieee"]


@pytest.mark.parametrize(
    ("files", "commit"),
    [
        ({"HEAD": b"0123abc\n"}, "0123abc"),
        ({"HEAD": b"ref: refs/heads/main\n", "refs/heads/main": b"4567def\n"}, "4567def"),
        ({"HEAD": b"ref: refs/heads/packed\n"}, None),
        ({"HEAD": b"\xff\xfe"}, None),
        ({}, None),
    ],
)
def test_the_commit_of_the_scripts_repository_is_noted_if_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], commit: str | None
) -> None:
    (tmp_path / ".git" / "refs" / "heads").mkdir(parents=True)
    (tmp_path / "scripts").mkdir()
    for name, content in files.items():
        (tmp_path / ".git" / name).write_bytes(content)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "scripts" / "train.py")])

    assert environment.describe()["git"] == commit


@pytest.mark.parametrize("script", ["train.py", ""])
def test_a_script_outside_of_any_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script])

    assert environment.describe()["git"] is None


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, text=True, capture_output=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, of the script that is running."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "train.py").write_text("train()\n")
    git(folder, "init")
    git(folder, "add", "train.py")
    git(folder, "commit", "-m", "first")
    monkeypatch.setattr(sys, "argv", [str(folder / "train.py")])
    for remembered in (environment._is_dirty, environment._git_commit, environment._folder_of):
        remembered.cache_clear()
    return folder


def test_a_start_says_which_process_of_which_program_it_is(repository: Path) -> None:
    found = environment.attempt()

    assert json.loads(json.dumps(found)) == found
    assert (found["pid"], found["argv"]) == (os.getpid(), [str(repository / "train.py")])
    assert (found["git"], found["dirty"]) == (git(repository, "rev-parse", "HEAD"), False)
    assert found["versions"]["torch"] == torch.__version__
    assert len(found["boot"]) == 36


def test_what_is_committed_later_is_not_the_code_that_runs(repository: Path) -> None:
    commit = environment.attempt()["git"]
    git(repository, "commit", "--allow-empty", "-m", "second")

    assert git(repository, "rev-parse", "HEAD") != commit
    assert environment.describe()["git"] == environment.attempt()["git"] == commit


def test_a_script_that_changes_its_folder_is_still_where_it_began(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.chdir(repository)
    environment.attempt()
    monkeypatch.chdir(tmp_path)

    assert environment.describe()["git"] == git(repository, "rev-parse", "HEAD")


def test_a_changed_file_makes_the_repository_dirty_and_a_new_one_does_not(repository: Path) -> None:
    (repository / "notes.txt").write_text("new")
    assert environment.attempt()["dirty"] is False

    environment._is_dirty.cache_clear()
    (repository / "train.py").write_text("train(lr=1)\n")
    assert environment.attempt()["dirty"] is True


def test_to_look_whether_it_is_dirty_takes_no_lock_and_writes_nothing(repository: Path) -> None:
    index = repository / ".git" / "index"
    before = index.read_bytes()
    os.utime(repository / "train.py", (1e9, 1e9))

    assert environment.attempt()["dirty"] is False
    assert index.read_bytes() == before


def test_the_commit_is_found_in_a_worktree_and_among_packed_branches(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(repository, "worktree", "add", str(tmp_path / "tree"))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "tree" / "train.py")])
    commit = git(repository, "rev-parse", "HEAD")
    assert environment.describe()["git"] == commit

    git(repository, "pack-refs", "--all")
    environment._git_commit.cache_clear()
    assert environment.describe()["git"] == commit


def test_where_git_cannot_say_in_time_or_is_not_there_nothing_is_claimed(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment._is_dirty(repository, seconds=0) is None
    assert environment._is_dirty(tmp_path) is None

    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.attempt()["dirty"] is None


def test_a_machine_without_a_boot_id_has_none(tmp_path: Path) -> None:
    assert environment._boot_id(tmp_path / "boot_id") is None
