"""`resumable push` and `pull`, and what `ls` says of a remote: in this process, and as people type it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import WARM, Life
from grouped import grouped
from places import CLI_PAGE
from servers import S3, Place

from resumable import RemoteError, RunState
from resumable.cli.app import main
from resumable.files.lock import Lock
from resumable.remote.run_copy import Remote
from resumable.remote.storage import Store
from resumable.run import history, manifest
from resumable.run.directory import Run
from resumable.run.history_writer import History

Captured = pytest.CaptureFixture[str]


def train(folder: Path, *values: float, **more: Any) -> Path:
    """Make a run with a checkpoint for each value of a metric."""
    with RunState.load(
        folder, model=torch.nn.Linear(2, 2), maximize="acc", keep=None, **grouped(**more)
    ) as state:
        for value in values:
            state.save(acc=value)
    return folder


@pytest.fixture
def run(run_dir: Path, capsys: Captured) -> Path:
    """A run with three checkpoints, the second of which is the best."""
    train(run_dir, 0.5, 0.9, 0.1)
    capsys.readouterr()
    return run_dir


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """Where a remote of files lies."""
    return tmp_path / "remote" / "exp"


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A run directory that does not exist yet, on another machine."""
    return tmp_path / "elsewhere" / "exp"


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but for locks, with its content."""
    paths = (path for path in folder.rglob("*") if path.is_file() and ".lock" not in path.name)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def checkpoints(folder: Path) -> dict[str, bytes]:
    """The files of the checkpoints of a run or of its remote."""
    return files(folder / "checkpoints")


def moved(printed: str) -> list[tuple[str, int]]:
    """The lines of what was moved: the first words, and the number of the checkpoint."""
    return [
        (found[1], int(found[2]))
        for found in re.finditer(r"^(.*?)checkpoint ([0-9]+)", printed, re.MULTILINE)
    ]


def damage(folder: Path, number: int, name: str = "model.safetensors") -> None:
    [path] = folder.glob(f"checkpoints/{number:06}-*/{name}")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_push_copies_the_newest_and_the_best(run: Path, there: Path, capsys: Captured) -> None:
    assert main(["push", str(run), f"file://{there}"]) == 0

    printed = capsys.readouterr().out
    assert moved(printed) == [("pushed ", 3), ("pushed ", 2)]
    assert re.search(rf"^pushed checkpoint 3 to file://{there}: \S+ k?B in .* s \(.*B/s\)$", printed, re.M)
    assert checkpoints(there) == {k: v for k, v in checkpoints(run).items() if not k.startswith("000001")}
    words = {
        word: manifest.unseal((there / f"{word}.json").read_bytes())["number"] for word in ("newest", "best")
    }
    assert words == {"newest": 3, "best": 2}


@pytest.mark.parametrize(("which", "numbers"), [("all", [3, 2, 1]), ("best", [2]), ("1", [1])])
def test_push_copies_what_is_named(
    run: Path, there: Path, capsys: Captured, which: str, numbers: list[int]
) -> None:
    assert main(["push", str(run), f"file://{there}", "--which", which]) == 0

    assert moved(capsys.readouterr().out) == [("pushed ", number) for number in numbers]
    assert [*Remote(Store(f"file://{there}")).numbers()] == numbers[::-1]


def test_a_second_push_sends_nothing(run: Path, there: Path, capsys: Captured) -> None:
    main(["push", str(run), f"file://{there}"])
    before = files(there), (run / "history.jsonl").read_bytes()
    capsys.readouterr()

    assert main(["push", str(run), f"file://{there}"]) == 0

    assert moved(capsys.readouterr().out) == [("", 3), ("", 2)]
    assert (files(there), (run / "history.jsonl").read_bytes()) == before


def test_push_never_prunes_the_remote(run: Path, there: Path) -> None:
    main(["push", str(run), f"file://{there}", "--which", "all"])
    shutil.rmtree(next(run.glob("checkpoints/000001-*")))

    main(["push", str(run), f"file://{there}"])

    assert [*Remote(Store(f"file://{there}")).numbers()] == [1, 2, 3]


def test_pull_brings_the_newest_and_the_training_continues_with_it(
    run: Path, there: Path, fresh: Path, capsys: Captured
) -> None:
    main(["push", str(run), f"file://{there}"])
    capsys.readouterr()

    assert main(["pull", str(fresh), f"file://{there}"]) == 0

    assert moved(capsys.readouterr().out) == [("pulled ", 3), ("pulled ", 2)]
    assert checkpoints(fresh) == checkpoints(there)
    assert (fresh / "newest").resolve() == Run(fresh).open(3).path
    with RunState.load(fresh, resume="must", model=torch.nn.Linear(2, 2), maximize="acc") as state:
        assert state.run_id == Run(run).known_id()
        assert state.best == 0.9
        state.save(acc=0.2)
    assert main(["verify", str(fresh), "--all"]) == 0


@pytest.mark.parametrize(("which", "number"), [("best", 2), ("1", 1)])
def test_pull_brings_what_is_named(
    run: Path, there: Path, fresh: Path, capsys: Captured, which: str, number: int
) -> None:
    main(["push", str(run), f"file://{there}", "--which", "all"])
    capsys.readouterr()

    assert main(["pull", str(fresh), f"file://{there}", "--which", which]) == 0

    assert moved(capsys.readouterr().out) == [("pulled ", number)]
    Run(fresh).open(number).verify()


def test_pull_says_what_is_here_already_and_replaces_what_is_damaged(
    run: Path, there: Path, capsys: Captured
) -> None:
    main(["push", str(run), f"file://{there}", "--which", "all"])
    before = checkpoints(run)
    damage(run, 2)
    capsys.readouterr()

    assert main(["pull", str(run), f"file://{there}", "--which", "3"]) == 0
    assert main(["pull", str(run), f"file://{there}", "--which", "best"]) == 0

    printed = capsys.readouterr()
    assert moved(printed.out) == [("", 3), ("pulled ", 2)]
    assert "checkpoint 3 is in " in printed.out
    assert "has the digest" in printed.err
    assert f"It is taken from file://{there}." in printed.err
    assert "ResumableWarning" not in printed.err
    assert checkpoints(run) == before
    assert (run / "best").resolve() == Run(run).open(2).path


def test_pull_takes_an_older_one_where_the_newest_is_damaged(
    run: Path, there: Path, fresh: Path, capsys: Captured
) -> None:
    main(["push", str(run), f"file://{there}", "--which", "all"])
    damage(there, 3)
    damage(there, 2, "manifest.json")
    capsys.readouterr()

    assert main(["pull", str(fresh), f"file://{there}"]) == 0

    printed = capsys.readouterr()
    assert moved(printed.out) == [("pulled ", 1)]
    assert printed.err.count("is damaged") == 2
    assert Run(fresh).numbers() == [1]


def test_pull_exits_with_4_where_all_are_damaged(
    run: Path, there: Path, fresh: Path, capsys: Captured
) -> None:
    main(["push", str(run), f"file://{there}", "--which", "3"])
    damage(there, 3)

    assert main(["pull", str(fresh), f"file://{there}"]) == 4
    assert main(["pull", str(fresh), f"file://{there}", "--which", "3"]) == 4

    assert "none of the 1 checkpoints" in capsys.readouterr().err
    assert Run(fresh).numbers() == []


def test_pull_leaves_an_intact_one_alone_where_the_remotes_is_damaged(
    run: Path, there: Path, capsys: Captured
) -> None:
    main(["push", str(run), f"file://{there}"])
    damage(there, 3, "manifest.json")
    capsys.readouterr()

    assert main(["pull", str(run), f"file://{there}"]) == 0

    assert moved(capsys.readouterr().out) == [("", 3)]


def test_push_leaves_out_what_is_damaged_here_and_exits_with_4(
    run: Path, there: Path, capsys: Captured
) -> None:
    damage(run, 3)
    damage(run, 1, "manifest.json")

    assert main(["push", str(run), f"file://{there}"]) == 4
    assert main(["push", str(run), f"file://{there}", "--which", "all"]) == 4
    assert main(["push", str(run), f"file://{there}", "--which", "3"]) == 4

    printed = capsys.readouterr()
    assert moved(printed.out) == [("pushed ", 2), ("", 2)]
    assert "has the digest" in printed.err
    assert [*Remote(Store(f"file://{there}")).numbers()] == [2]


def test_a_run_without_anything_readable_cannot_be_pushed(run: Path, there: Path) -> None:
    for number in (1, 2, 3):
        damage(run, number, "manifest.json")

    assert main(["push", str(run), f"file://{there}"]) == 4
    assert not there.exists()


def test_a_dry_run_says_what_it_would_do_and_writes_nothing(
    run: Path, there: Path, fresh: Path, capsys: Captured
) -> None:
    before = files(run)
    assert main(["push", str(run), f"file://{there}", "--dry-run"]) == 0
    assert not there.exists()
    assert not (run / ".push.lock").exists()
    assert files(run) == before

    main(["push", str(run), f"file://{there}", "--which", "2"])
    (there / next(iter(checkpoints(there)))).parent.mkdir(exist_ok=True)
    before = files(there)
    capsys.readouterr()
    assert main(["push", str(run), f"file://{there}", "--dry-run"]) == 0
    assert main(["pull", str(fresh), f"file://{there}", "--dry-run"]) == 0

    assert moved(capsys.readouterr().out) == [("would push ", 3), ("", 2), ("would pull ", 2)]
    assert files(there) == before
    assert not fresh.exists()


def test_a_dry_run_refuses_another_run_too(run: Path, there: Path, fresh: Path) -> None:
    main(["push", str(run), f"file://{there}"])
    train(fresh, 0.3)

    assert main(["push", str(fresh), f"file://{there}", "--dry-run"]) == 6
    assert main(["pull", str(fresh), f"file://{there}", "--dry-run"]) == 6


def test_another_run_is_refused_by_its_id_and_nothing_is_touched(
    run: Path, there: Path, fresh: Path, capsys: Captured
) -> None:
    main(["push", str(run), f"file://{there}"])
    train(fresh, 0.3)
    before = files(there), checkpoints(fresh)

    assert main(["push", str(fresh), f"file://{there}"]) == 6
    assert main(["pull", str(fresh), f"file://{there}"]) == 6

    error = capsys.readouterr().err
    assert error.count("holds another run") == 2
    assert str(Run(run).known_id()) in error
    assert (files(there), checkpoints(fresh)) == before


def test_a_run_of_damaged_manifests_is_known_by_its_run_json(run: Path, there: Path, fresh: Path) -> None:
    main(["push", str(run), f"file://{there}"])
    train(fresh, 0.3)
    damage(fresh, 1, "manifest.json")
    damage(run, 3, "manifest.json")
    for number in (1, 2):
        shutil.rmtree(next(run.glob(f"checkpoints/{number:06}-*")))

    assert main(["pull", str(fresh), f"file://{there}"]) == 6
    assert main(["pull", str(run), f"file://{there}"]) == 0

    Run(run).open(3).verify()


def test_pull_makes_a_run_of_a_start_that_has_saved_nothing(run: Path, there: Path, fresh: Path) -> None:
    main(["push", str(run), f"file://{there}"])
    empty = Run(fresh)
    empty.acquire()
    empty.identity()
    empty.release()

    assert main(["pull", str(fresh), f"file://{there}"]) == 0

    assert Run(fresh).identity() == Run(run).known_id()


def test_pull_refuses_a_checkpoint_of_another_branch(
    run: Path, there: Path, fresh: Path, capsys: Captured
) -> None:
    main(["push", str(run), f"file://{there}", "--which", "2"])
    main(["pull", str(fresh), f"file://{there}"])
    main(["push", str(run), f"file://{there}"])
    with RunState.load(fresh, resume="must", model=torch.nn.Linear(2, 2), maximize="acc") as state:
        state.save(acc=0.7)
    assert Run(fresh).numbers() == [2, 3]
    before = checkpoints(fresh)

    assert main(["pull", str(fresh), f"file://{there}"]) == 6

    assert "another checkpoint 3" in capsys.readouterr().err
    assert checkpoints(fresh) == before


def test_pull_refuses_a_number_that_is_here_under_another_name(
    run: Path, there: Path, capsys: Captured
) -> None:
    main(["push", str(run), f"file://{there}"])
    [path] = run.glob("checkpoints/000003-*")
    path.rename(path.with_name("000003-step-00000009"))

    assert main(["pull", str(run), f"file://{there}"]) == 6
    assert "another checkpoint 3" in capsys.readouterr().err


def forge(folder: Path, number: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Write another manifest, sealed as ours are."""
    [path] = folder.glob(f"checkpoints/{number:06}-*/manifest.json")
    body = manifest.unseal(path.read_bytes())
    change(body)
    path.write_bytes(manifest.seal(body))


@pytest.mark.parametrize("name", ["../../evil.json", "ranks/../../evil.json"])
def test_a_manifest_that_names_files_elsewhere_is_refused(
    run: Path, there: Path, fresh: Path, capsys: Captured, name: str
) -> None:
    main(["push", str(run), f"file://{there}", "--which", "3"])
    forge(there, 3, lambda body: body["files"].update({name: body["files"].pop("state.json")}))

    assert main(["pull", str(fresh), f"file://{there}"]) == 4

    assert "cannot be the name of a file in a checkpoint" in capsys.readouterr().err
    assert checkpoints(fresh) == {}
    assert not [*fresh.parent.parent.rglob("evil.json")]


def test_a_manifest_of_another_run_is_refused_by_name(
    run: Path, there: Path, fresh: Path, capsys: Captured
) -> None:
    main(["push", str(run), f"file://{there}", "--which", "all"])
    forge(there, 3, lambda body: body.update(run_id="0123456789abcdef"))
    capsys.readouterr()

    assert main(["pull", str(fresh), f"file://{there}"]) == 0

    printed = capsys.readouterr()
    assert "0123456789abcdef" in printed.err
    assert moved(printed.out) == [("pulled ", 2)]


def test_folders_with_other_names_are_not_checkpoints(run: Path, there: Path, capsys: Captured) -> None:
    main(["push", str(run), f"file://{there}", "--which", "3"])
    for name in ("000009-step-1", "..9", "000009-step-00000009 (copy)"):
        shutil.copytree(next(there.glob("checkpoints/000003-*")), there / "checkpoints" / name)
    capsys.readouterr()

    assert main(["pull", str(run), f"file://{there}", "--which", "9"]) == 3

    assert "there are: 3." in capsys.readouterr().err


def test_what_is_not_there_exits_with_3(run: Path, there: Path, fresh: Path, capsys: Captured) -> None:
    assert main(["pull", str(fresh), f"file://{there}"]) == 3
    assert not fresh.exists()
    assert main(["push", str(fresh), f"file://{there}"]) == 3
    assert main(["push", str(run), f"file://{there}", "--which", "9"]) == 3
    assert not there.exists()

    assert "holds no checkpoint" in capsys.readouterr().err


def test_without_a_metric_there_is_no_best(run_dir: Path, there: Path, fresh: Path, capsys: Captured) -> None:
    with RunState.load(run_dir, model=torch.nn.Linear(2, 2)) as state:
        state.save()

    assert main(["push", str(run_dir), f"file://{there}", "--which", "best"]) == 3
    assert main(["push", str(run_dir), f"file://{there}"]) == 0
    assert main(["pull", str(fresh), f"file://{there}", "--which", "best"]) == 3
    assert main(["pull", str(fresh), f"file://{there}"]) == 0

    assert "known to be the best" in capsys.readouterr().err
    assert not (there / "best.json").exists()


def test_pull_of_the_newest_says_that_the_best_is_damaged(
    run: Path, there: Path, fresh: Path, capsys: Captured
) -> None:
    main(["push", str(run), f"file://{there}"])
    damage(there, 2)
    capsys.readouterr()

    assert main(["pull", str(fresh), f"file://{there}"]) == 0

    printed = capsys.readouterr()
    assert moved(printed.out) == [("pulled ", 3)]
    assert "000002-step-00000000 is damaged" in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["push", "RUN", "remote"],
        ["push", "s3://bucket/exp", "RUN"],
        ["pull", "memory://one", "memory://other"],
        ["prune", "memory://one", "--keep", "1"],
        ["push", "RUN", "nowhere://bucket/exp"],
    ],
)
def test_addresses_that_cannot_be_meant_are_usage_errors(run: Path, arguments: list[str]) -> None:
    assert main([str(run) if word == "RUN" else word for word in arguments]) == 2


@pytest.mark.parametrize(("command", "which"), [("pull", "all"), ("push", "-1"), ("push", "newst")])
def test_only_words_that_are_known_and_numbers_say_which(command: str, which: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "runs/exp", "memory://exp", "--which", which])

    assert ended.value.code == 2


def test_one_process_pushes_a_run_at_a_time(run: Path, there: Path, capsys: Captured) -> None:
    lock = Lock(run / ".push.lock")

    assert main(["push", str(run), f"file://{there}"]) == 5

    lock.release()
    assert "which pushes it" in capsys.readouterr().err
    assert main(["push", str(run), f"file://{there}"]) == 0


def test_a_run_that_is_trained_can_be_pushed_but_not_pulled_into(run: Path, there: Path) -> None:
    trained, before = Run(run), (run / "history.jsonl").read_bytes()
    trained.acquire()

    assert main(["push", str(run), f"file://{there}"]) == 0
    assert main(["pull", str(run), f"file://{there}"]) == 5

    trained.release()
    assert (run / "history.jsonl").read_bytes() == before
    assert main(["push", str(run), f"file://{there}"]) == 0
    assert history.pushed(history.read(run)) == {f"file://{there}": {2, 3}}


def test_the_history_tells_of_a_push_and_of_a_pull(run: Path, there: Path, fresh: Path) -> None:
    main(["push", str(run), f"file://{there}", "--which", "1"])
    main(["pull", str(fresh), f"file://{there}"])

    push, pull = history.read(run)[-1], history.read(fresh)[-1]
    assert (push["event"], push["attempt"], push["number"], push["to"]) == (
        "push",
        None,
        1,
        f"file://{there}",
    )
    assert push["sent"] == Run(run).open(1).about.size
    assert (pull["event"], pull["number"], pull["origin"]) == ("pull", 1, f"file://{there}")
    assert history.attempts(history.read(run))[-1]["ended"] == "closed"


def test_a_history_that_cannot_be_written_does_not_stop_a_push(
    run: Path, there: Path, capsys: Captured
) -> None:
    (run / "history.jsonl").unlink()
    (run / "history.jsonl").mkdir()

    assert main(["push", str(run), f"file://{there}"]) == 0
    assert main(["push", str(run), f"file://{there}"]) == 0

    error = capsys.readouterr().err
    assert "history.jsonl cannot be written" in error
    assert "training" not in error


def test_a_run_that_cannot_be_locked_for_its_history_is_pushed_anyway(
    run: Path, there: Path, capsys: Captured
) -> None:
    (run / ".lock").unlink()
    (run / ".lock").mkdir()

    assert main(["push", str(run), f"file://{there}"]) == 0

    assert "not noted in the history" in capsys.readouterr().err
    assert [*Remote(Store(f"file://{there}")).numbers()] == [2, 3]


def test_a_run_whose_push_cannot_be_locked_is_not_pushed(run: Path, there: Path, capsys: Captured) -> None:
    (run / ".push.lock").mkdir()

    assert main(["push", str(run), f"file://{there}"]) == 1

    assert ".push.lock cannot be written" in capsys.readouterr().err
    assert not there.exists()


def test_json_has_just_the_documented_fields(run: Path, there: Path, fresh: Path, capsys: Captured) -> None:
    section = CLI_PAGE.read_text().partition("## `resumable push")[2].partition("\n## ")[0]
    fields = section.partition("With `--json`")[2]
    documented = {
        name for row in re.findall(r"^\| (`.*?) \|", fields, re.M) for name in re.findall(r"`(\w+)`", row)
    }
    damage(run, 1)
    commands = [
        (["push", str(run), "--dry-run"], [(3, "to push"), (2, "to push")]),
        (["push", str(run), "--which", "all"], [(3, "pushed"), (2, "pushed"), (1, "damaged")]),
        (["push", str(run)], [(3, "there"), (2, "there")]),
        (["pull", str(fresh), "--dry-run"], [(3, "to pull"), (2, "to pull")]),
        (["pull", str(fresh)], [(3, "pulled"), (2, "pulled")]),
        (["pull", str(fresh)], [(3, "here"), (2, "here")]),
    ]
    for command, expected in commands:
        capsys.readouterr()
        main([*command, f"file://{there}", "--json"])

        found = json.loads(capsys.readouterr().out)
        assert found.keys() == {"run", "remote", "dry_run", "checkpoints"}
        assert (found["run"], found["remote"]) == (command[1], f"file://{there}")
        assert found["dry_run"] == ("--dry-run" in command)
        assert [(row["number"], row["result"]) for row in found["checkpoints"]] == expected
        assert all(row.keys() == documented for row in found["checkpoints"])
        assert all(f"`{row['result']}`" in section for row in found["checkpoints"])


# When a file of a name is opened, to read or to write, that is refused, or a local folder is removed, or a
# signal comes and the call hangs.
DEADLY = """
import os, shutil, signal, sys, threading
import fsspec
from fsspec.implementations.local import LocalFileSystem
from resumable.cli.app import main

signal.signal(signal.SIGINT, signal.default_int_handler)
how, mode, name = sys.argv[1:4]

class Deadly(LocalFileSystem):
    def open(self, path, given="rb", **more):
        if given == mode and path.endswith(name):
            if how == "refuse":
                raise PermissionError(13, "not allowed")
            if how.startswith("/"):
                shutil.rmtree(how, ignore_errors=True)
            else:
                os.kill(os.getpid(), getattr(signal, how))
                threading.Event().wait()
        return super().open(path, given, **more)

fsspec.register_implementation("file", Deadly, clobber=True)
sys.exit(main(sys.argv[4:]))
"""


def typed(*command: object, **variables: str) -> Life:
    """Run a Python program and return what it has said."""
    return WARM.run(command, Path.cwd(), environment=variables)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name", ["run.json.part", "state.json", "00000.json", "manifest.json.part", "newest.json.part"]
)
def test_a_killed_push_leaves_only_what_is_complete_and_continues(
    run: Path, there: Path, fresh: Path, capsys: Captured, name: str
) -> None:
    done = typed("-c", DEADLY, "SIGKILL", "wb", name, "push", run, f"file://{there}", "--which", "all")
    assert done.code == -9

    remote = Remote(Store(f"file://{there}"))
    for number in remote.numbers():
        assert main(["pull", str(fresh), f"file://{there}", "--which", str(number)]) == 0
    assert main(["push", str(run), f"file://{there}", "--which", "all"]) == 0

    assert checkpoints(there) == checkpoints(run)
    assert [*remote.numbers()] == [1, 2, 3]


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "00000.json"])
def test_a_killed_pull_leaves_no_checkpoint_and_continues(
    run: Path, there: Path, fresh: Path, capsys: Captured, name: str
) -> None:
    main(["push", str(run), f"file://{there}"])

    done = typed("-c", DEADLY, "SIGKILL", "rb", name, "pull", fresh, f"file://{there}")

    assert done.code == -9
    assert Run(fresh).numbers() == []
    assert main(["pull", str(fresh), f"file://{there}"]) == 0
    assert checkpoints(fresh) == checkpoints(there)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("command", "mode"), [("push", "wb"), ("pull", "rb")])
def test_ctrl_c_ends_a_transfer_that_hangs(
    run: Path, there: Path, fresh: Path, command: str, mode: str
) -> None:
    folder = run if command == "push" else fresh
    if command == "pull":
        main(["push", str(run), f"file://{there}"])

    done = typed("-c", DEADLY, "SIGINT", mode, "model.safetensors", command, folder, f"file://{there}")

    assert done.code == 130
    assert done.err == "resumable: interrupted; the same command continues from there.\n"
    assert main([command, str(folder), f"file://{there}"]) == 0


@pytest.mark.quick(2)
@pytest.mark.parametrize(("command", "mode"), [("push", "wb"), ("pull", "rb")])
def test_a_remote_that_refuses_exits_with_6_and_prints_no_json(
    run: Path, there: Path, fresh: Path, command: str, mode: str
) -> None:
    folder = run if command == "push" else fresh
    if command == "pull":
        main(["push", str(run), f"file://{there}"])

    arguments = ["refuse", mode, "state.json", command, folder, f"file://{there}", "--json"]
    done = typed("-c", DEADLY, *arguments)

    assert (done.code, done.out) == (6, "")
    assert "state.json cannot be " in done.err
    assert "not allowed" in done.err
    assert main([command, str(folder), f"file://{there}"]) == 0


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ["run.json.part", "pushing.json.part", "state.json"])
def test_what_the_training_prunes_meanwhile_is_left_out(run: Path, there: Path, name: str) -> None:
    [pruned] = run.glob("checkpoints/000003-*")

    done = typed("-c", DEADLY, pruned, "wb", name, "push", run, f"file://{there}", "--which", "all")

    assert (done.code, done.err) == (0, "")
    assert moved(done.out) == [("pushed ", 2), ("pushed ", 1)]
    assert [*Remote(Store(f"file://{there}")).numbers()] == [1, 2]


def test_an_interrupt_gives_up_what_is_on_its_way() -> None:
    store = Store("memory://interrupted")

    def job() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            store.read("run.json", 1)

    with pytest.raises(KeyboardInterrupt):
        store.interruptible(job)

    with pytest.raises(RemoteError, match="was given up"):
        store.read("run.json", 1)


@pytest.fixture
def keys(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment in which S3's clients find the server and the credentials."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    return monkeypatch


@pytest.mark.parametrize("place", ["s3"], indirect=True)
@pytest.mark.heavy
def test_a_real_server_gives_back_what_it_was_given(
    run: Path, place: Place, fresh: Path, keys: object
) -> None:
    pushed = typed("-m", "resumable", "push", run, place.url, "--which", "all")
    assert (pushed.code, pushed.err) == (0, "")
    pulled = typed("-m", "resumable", "pull", fresh, place.url, "--which", "best", "--json")

    assert (pulled.code, pulled.err) == (0, "")
    assert json.loads(pulled.out)["checkpoints"][0]["result"] == "pulled"
    assert checkpoints(fresh) == {k: v for k, v in checkpoints(run).items() if k.startswith("000002")}


@pytest.mark.heavy
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_wrong_secret_exits_with_6_and_is_not_shown(
    run: Path, place: Place, keys: pytest.MonkeyPatch
) -> None:
    keys.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLEEXAMPLE")
    keys.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-secret")

    done = typed("-m", "resumable", "push", run, place.url)

    assert done.code == 6
    assert place.url in done.err
    assert "Traceback" not in done.err
    assert "AKIAEXAMPLEEXAMPLE" not in done.out + done.err
    assert "wrong-and-secret" not in done.out + done.err


def marks(printed: str) -> list[str]:
    """The last column of the table that `ls` has printed."""
    return [row.partition("called")[2].strip() for row in printed.partition("\n\n")[0].splitlines()[1:]]


def started(run: Path, push: str, there: list[int], gone: list[int]) -> None:
    """Write a history of a training with a remote, that has pushed and pruned some there."""
    folder = Run(run)
    folder.acquire()
    told = History(folder)
    told.begin({"host": "node7", "pid": 1, "remote": {"url": "s3://bucket/exp", "push": push}}, None)
    for number in there:
        told.pushed(number, "s3://bucket/exp", sent=1, copied=0, seconds=1, removed=gone)
    folder.release()


@pytest.mark.parametrize(
    ("push", "expected"),
    [
        ("newest", ["", "best, not pushed", "newest, not pushed"]),
        ("best", ["", "best, not pushed", "newest"]),
        ("all", ["not pushed", "best, not pushed", "newest, not pushed"]),
    ],
)
def test_ls_knows_which_ones_should_be_there(
    run: Path, capsys: Captured, push: str, expected: list[str]
) -> None:
    started(run, push, there=[], gone=[])

    main(["ls", str(run)])

    assert marks(capsys.readouterr().out) == expected


def test_ls_json_tells_of_the_remote(run: Path, capsys: Captured) -> None:
    main(["ls", str(run), "--json"])
    assert json.loads(capsys.readouterr().out)["remote"] is None

    started(run, "newest", there=[3], gone=[])
    damage(run, 3, "manifest.json")
    main(["ls", str(run), "--json"])

    found = json.loads(capsys.readouterr().out)
    assert found["remote"] == {"url": "s3://bucket/exp", "push": "newest"}
    assert [row["remote"] for row in found["checkpoints"]] == [None, "not pushed", "pushed"]


def test_ls_shows_a_training_with_a_remote_as_it_is(run_dir: Path, there: Path, capsys: Captured) -> None:
    train(run_dir, 0.9, 0.5, remote=f"file://{there}", push="all")
    capsys.readouterr()

    main(["ls", str(run_dir)])

    assert marks(capsys.readouterr().out) == ["best, pushed", "newest, pushed"]


@pytest.mark.parametrize("command", ["push", "pull"])
def test_each_help_page_has_an_example_and_the_exit_codes(command: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])

    page = capsys.readouterr().out
    assert f"resumable {command} runs/exp s3://bucket/exp" in page.partition("example:")[2]
    assert "6 remote" in page.splitlines()[-1]
