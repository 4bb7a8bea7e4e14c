"""What is brought from a remote is what was pushed, or it is refused by name and nothing is there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Place, ProxiedS3
from test_remote import a_place, a_shelf, about_of, commit, nowhere, sealed  # noqa: F401 (fixtures too)

from resumable import CheckpointDamaged, FormatTooNew, RemoteError, SaveFailed
from resumable.remote import pull
from resumable.remote.push import push
from resumable.remote.run_copy import Remote
from resumable.remote.storage import Store
from resumable.run import manifest
from resumable.run.checkpoint import Checkpoint
from resumable.run.directory import Run

ALL = pytest.mark.parametrize("place", ["memory", "file", "s3", "sftp", "sshfs"], indirect=True)
BOTH = pytest.mark.parametrize("place", ["memory", "s3"], indirect=True)
NAME = "000001-step-00000010"
CONTENTS = {
    "model.safetensors": bytes(range(256)) * 1000,
    "state.json": b"state",
    "ranks/00000.json": b"",
    "ranks/00000.safetensors": b"rank" * 1000,
}


@pytest.fixture
def run(run_dir: Path) -> Iterator[Run]:
    """An empty run."""
    made = Run(run_dir)
    made.acquire()
    yield made
    made.release()


@pytest.fixture
def source(tmp_path: Path) -> Run:
    """The run that the remote is a copy of."""
    made = Run(tmp_path / "source")
    commit(made, 1, CONTENTS)
    return made


@pytest.fixture
def remote(place: Place, source: Run) -> Remote:
    """A remote with one checkpoint."""
    made = Remote(Store(place.url, place.options()))
    made.claim("a1b2")
    push(made, source.open(1), nowhere)
    return made


def again(remote: Remote) -> Remote:
    """Return the same remote with nothing remembered."""
    return Remote(remote.store)


def is_as_it_was(found: Checkpoint) -> bool:
    """Say whether a checkpoint in a run has all that was pushed, and nothing else is there."""
    found.verify()
    files = {path.relative_to(found.path).as_posix() for path in found.path.rglob("*") if path.is_file()}
    folder = sorted(path.name for path in found.path.parent.iterdir())
    return files == {*CONTENTS, manifest.NAME} and folder == [found.path.name]


def spoilt(content: bytes) -> bytes:
    """Return a content with one bit turned over."""
    return content[:-1] + bytes([content[-1] ^ 4])


def refused(remote: Remote, run: Run, problem: str, kind: type[Exception] = CheckpointDamaged) -> None:
    """Pull in vain: what is wrong is said, and nothing is there."""
    with pytest.raises(kind) as raised:
        pull.pull(again(remote), NAME, run, nowhere)
    assert problem in str(raised.value)
    assert f"{remote}/checkpoints/{NAME}" in str(raised.value)
    assert run.numbers() == []
    assert not (run.path.parent / "x").exists()


@pytest.mark.quick(3)
@ALL
def test_what_is_pulled_is_what_was_pushed(run: Run, remote: Remote, source: Run) -> None:
    told: list[int] = []
    found = pull.pull(remote, NAME, run, told.append)
    assert is_as_it_was(found)
    assert run.numbers() == [1]
    assert found.about == source.open(1).about
    assert sum(told) == found.about.size
    assert (found.path / manifest.NAME).read_bytes() == (source.open(1).path / manifest.NAME).read_bytes()


@pytest.mark.quick(4)
@BOTH
@pytest.mark.parametrize("file", [*CONTENTS])
def test_a_file_that_is_missing_is_named(run: Run, remote: Remote, file: str) -> None:
    remote.store.remove(f"checkpoints/{NAME}/{file}")
    refused(remote, run, f"{file} is missing")


@pytest.mark.quick(4)
@BOTH
@pytest.mark.parametrize("file", [*CONTENTS])
def test_a_file_of_another_size_is_named(run: Run, remote: Remote, file: str) -> None:
    remote.store.write(f"checkpoints/{NAME}/{file}", CONTENTS[file] + b"x")
    size = len(CONTENTS[file])
    refused(remote, run, f"{file} has {size + 1:,} bytes, its manifest says {size:,}")


@pytest.mark.quick(7)
@ALL
@pytest.mark.parametrize("file", [name for name, content in CONTENTS.items() if content])
def test_a_file_with_a_bit_turned_over_is_named(run: Run, remote: Remote, file: str) -> None:
    remote.store.write(f"checkpoints/{NAME}/{file}", spoilt(CONTENTS[file]))
    refused(remote, run, f"{file} has the digest ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "manifest.json: its checksum does not match"),
        (spoilt(manifest.to_json(about_of(1))), "manifest.json: its checksum does not match"),
        (sealed(2), "manifest.json is the one of 000002-step-00000020"),
        (sealed(1, step=20), "manifest.json is the one of 000001-step-00000020"),
        (sealed(1, run_id="c3d4"), "it is of another run (c3d4) than the others (a1b2)"),
        (
            manifest.strict_json.seal({"format": 1, "a": [[]]}).replace(b"[[]]", b"[" * 99_999),
            "does not match",
        ),
        (sealed(1, files={"../x": {"size": 1, "xxh3_128": "0"}}), "'../x' cannot be the name of a file"),
        (sealed(1, files={"/tmp/x": {"size": 1, "xxh3_128": "0"}}), "'/tmp/x' cannot be the name of"),
        (sealed(1, files={"..\\x": {"size": 1, "xxh3_128": "0"}}), "cannot be the name of a file"),
        (sealed(1, files={"ranks/../../x.json": {"size": 1, "xxh3_128": "0"}}), "cannot be the name of"),
        (sealed(1, files={"manifest.json": {"size": 1, "xxh3_128": "0"}}), "cannot be the name of a file"),
        (sealed(1, files={"x.json": {"size": -1, "xxh3_128": "0"}}), "-1 stands where a count belongs"),
        (sealed(1, files={"x.json": {"size": 10**18, "xxh3_128": "0"}}), "x.json is missing"),
    ],
)
def test_a_manifest_that_is_not_this_checkpoints_is_refused(
    run: Run, remote: Remote, text: bytes, problem: str
) -> None:
    remote.store.write(f"checkpoints/{NAME}/manifest.json", text)
    refused(remote, run, problem)


def test_a_manifest_of_a_newer_version_is_refused_as_that(run: Run, remote: Remote) -> None:
    remote.store.write(f"checkpoints/{NAME}/manifest.json", manifest.strict_json.seal({"format": 99}))
    refused(remote, run, "it was written in format 99", FormatTooNew)


def test_a_manifest_that_is_too_large_is_not_read(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "place" / "checkpoints" / NAME
    folder.mkdir(parents=True)
    with open(folder / "manifest.json", "wb") as file:
        file.truncate(100 << 20)
    remote = Remote(Store(f"file://{tmp_path}/place"))
    refused(remote, run, "manifest.json has 104,857,600 bytes; at most 67,108,864 make sense", RemoteError)


@pytest.mark.parametrize("file", ["../../../x", "ranks/../../../../x", "..\\x", "x y.json", "notes.txt"])
def test_what_else_lies_there_is_not_brought(run: Run, tmp_path: Path, source: Run, file: str) -> None:
    class Listed(Store):
        """A store with a name in its listing that none has."""

        def sizes(self, folder: str = "") -> dict[str, int]:
            return {**super().sizes(folder), file: 1}

    remote = Remote(Listed(f"file://{tmp_path}/place"))
    push(remote, source.open(1), nowhere)
    assert is_as_it_was(pull.pull(remote, NAME, run, nowhere))


@pytest.mark.parametrize("name", ["../source/checkpoints/000001-step-00000010", "..", ""])
def test_a_name_that_leads_elsewhere_is_refused(run: Run, tmp_path: Path, source: Run, name: str) -> None:
    with pytest.raises(CheckpointDamaged):
        pull.pull(Remote(Store(f"file://{tmp_path}/place")), name, run, nowhere)
    assert run.numbers() == []


def test_a_remote_without_a_name_is_that_of_its_checkpoints(run: Run, remote: Remote) -> None:
    remote.store.remove("run.json")
    assert is_as_it_was(pull.pull(remote, NAME, run, nowhere))


# On the way.


@pytest.fixture
def broken(proxied_s3: ProxiedS3, shelf: str, source: Run) -> Remote:
    """A remote with one checkpoint behind the proxy."""
    made = Remote(Store(f"s3://{shelf}/{uuid.uuid4().hex}", proxied_s3.options()))
    made.claim("a1b2")
    push(made, source.open(1), nowhere)
    proxied_s3.proxy.forget()
    return made


@pytest.mark.heavy
@pytest.mark.parametrize(
    "fault",
    [
        {"fault": "status", "status": 500},
        {"fault": "reset-answer"},
        {"fault": "truncate-answer"},
        {"fault": "flip-answer"},
    ],
    ids=lambda fault: fault["fault"],
)
def test_what_goes_wrong_once_on_the_way_costs_a_second_try(
    run: Run, broken: Remote, proxied_s3: ProxiedS3, fault: dict[str, Any]
) -> None:
    proxied_s3.rules.add(**fault, method="GET", path="model.safetensors", count=1)
    told: list[int] = []
    assert is_as_it_was(pull.pull(broken, NAME, run, told.append))
    assert len(proxied_s3.proxy.seen.struck()) == 1
    assert sum(told) == source_size(run)


def source_size(run: Run) -> int:
    return sum(map(len, CONTENTS.values()))


@pytest.mark.heavy
def test_what_is_other_each_time_is_damaged(run: Run, broken: Remote, proxied_s3: ProxiedS3) -> None:
    proxied_s3.rules.add("flip-answer", method="GET", path="model.safetensors")
    refused(broken, run, "model.safetensors has the digest")


def test_a_remote_that_goes_away_is_an_error_and_the_next_pull_continues(
    run: Run, broken: Remote, proxied_s3: ProxiedS3
) -> None:
    proxied_s3.rules.add("status", status=403, path="state.json")
    with pytest.raises(RemoteError, match=r"state\.json cannot be read"):
        pull.pull(broken, NAME, run, nowhere)
    assert run.numbers() == []
    proxied_s3.rules.clear()
    proxied_s3.proxy.forget()
    told: list[int] = []
    assert is_as_it_was(pull.pull(broken, NAME, run, told.append))
    assert proxied_s3.proxy.seen.of("GET", "model.safetensors") == []
    assert sum(told) == source_size(run)


@pytest.mark.quick(2)
@pytest.mark.parametrize("place", ["memory", "s3"], indirect=True)
def test_what_an_ended_pull_has_left_is_looked_at_before_it_is_believed(
    run: Run, remote: Remote, source: Run
) -> None:
    remote.store.remove(f"checkpoints/{NAME}/state.json")
    remote.store.write(f"checkpoints/{NAME}/state.json", spoilt(CONTENTS["state.json"]))
    refused(remote, run, "state.json has the digest")
    (stage,) = run.folder.glob(".pull-*")
    (stage / "model.safetensors").write_bytes(spoilt(CONTENTS["model.safetensors"]))
    (run.folder / ".pull-000009-0123abcd").mkdir()
    (run.folder / ".pull-mine").mkdir()
    remote.store.write(f"checkpoints/{NAME}/state.json", CONTENTS["state.json"])
    found = pull.pull(remote, NAME, run, nowhere)
    (run.folder / ".pull-mine").rmdir()
    assert is_as_it_was(found)


CHILD = """
import json, sys
from resumable.remote import pull
from resumable.remote.push import push
from resumable.remote.run_copy import Remote
from resumable.run.directory import Run
from resumable.remote.storage import Store
place, options, name, folder = json.loads(sys.argv[1])
run = Run(folder)
run.acquire()
pull.pull(Remote(Store(place, options)), name, run, lambda size: print(size, flush=True))
"""


@pytest.mark.parametrize("place", ["file", "s3"], indirect=True)
@pytest.mark.heavy
def test_a_killed_pull_leaves_nothing_half_and_the_next_continues(
    run_dir: Path, tmp_path: Path, source: Run, place: Place
) -> None:
    contents = {name: os.urandom(9 << 20) for name in ("model.safetensors", "optimizer.safetensors")}
    found = commit(source, 2, {**contents, "state.json": b"state"})
    remote = Remote(Store(place.url, place.options()))
    push(remote, found, nowhere)
    about = json.dumps([place.url, place.options(), found.path.name, str(run_dir)])
    moved = []
    for lines in (1, 2, 4, 3):
        command = [sys.executable, "-c", CHILD, about]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout
            moved.append([int(child.stdout.readline()) for _ in range(lines)])
            os.kill(child.pid, signal.SIGKILL)
        assert Run(run_dir).numbers() in ([], [2])
        assert not [path for path in (run_dir / "checkpoints").iterdir() if path.name[0] != "."]
    run = Run(run_dir)
    run.acquire()
    told: list[int] = []
    pulled = pull.pull(remote, found.path.name, run, told.append)
    run.release()
    pulled.verify()
    assert {path.name for path in pulled.path.iterdir()} == {*contents, "state.json", manifest.NAME}
    assert [path.name for path in run.folder.iterdir()] == [found.path.name]
    # What was there whole was reported at one stroke
    assert told[0] == 9 << 20
    assert sum(told) == found.about.size


# The run here.


@BOTH
def test_a_damaged_checkpoint_is_replaced(run: Run, remote: Remote) -> None:
    here = commit(run, 1, CONTENTS)
    (here.path / "state.json").write_bytes(spoilt(b"state"))
    assert run.best(None) is None
    assert is_as_it_was(pull.pull(remote, NAME, run, nowhere))
    assert run.numbers() == [1]
    run.open(1).verify()


def test_a_damaged_checkpoint_stays_where_the_remote_has_nothing_better(run: Run, remote: Remote) -> None:
    here = commit(run, 1, CONTENTS)
    (here.path / "state.json").write_bytes(spoilt(b"state"))
    remote.store.write(f"checkpoints/{NAME}/state.json", spoilt(CONTENTS["state.json"]))
    with pytest.raises(CheckpointDamaged, match="has the digest"):
        pull.pull(remote, NAME, run, nowhere)
    assert (here.path / "state.json").read_bytes() == spoilt(b"state")
    assert run.numbers() == [1]


def test_what_is_intact_here_is_not_fetched(run: Run, remote: Remote) -> None:
    here = commit(run, 1, CONTENTS)
    (here.path / "state.json").write_bytes(spoilt(b"state"))
    remote.store.write(f"checkpoints/{NAME}/model.safetensors", spoilt(CONTENTS["model.safetensors"]))

    assert is_as_it_was(pull.pull(remote, NAME, run, nowhere))
    run.open(1).verify()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one MB."""
    if sys.platform != "linux":
        pytest.skip("tmpfs is Linux's")
    path = tmp_path / "disk"
    path.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m,nr_inodes=200", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(["mount", *options], check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.mark.parametrize("place", ["file", "s3"], indirect=True)
def test_a_disk_without_room_says_so_before_anything_is_brought(
    disk: Path, place: Place, source: Run
) -> None:
    remote = Remote(Store(place.url, place.options()))
    found = commit(source, 2, {"model.safetensors": bytes(2 << 20)})
    push(remote, found, nowhere)
    run = Run(disk / "exp")
    run.acquire()
    with pytest.raises(SaveFailed, match=r"takes 2\.1 MB; .* are free for .*exp(.|\n)*make room there"):
        pull.pull(remote, found.path.name, run, nowhere)
    run.release()
    assert [*run.path.glob("checkpoints/*")] == []


@pytest.mark.heavy
@pytest.mark.parametrize("place", ["file", "s3"], indirect=True)
def test_a_disk_that_fills_up_says_so_and_the_next_pull_continues(
    disk: Path, place: Place, source: Run
) -> None:
    remote = Remote(Store(place.url, place.options()))
    found = commit(source, 2, {"model.safetensors": os.urandom(300_000), "state.json": os.urandom(300_000)})
    push(remote, found, nowhere)
    run = Run(disk / "exp")
    run.acquire()

    def fill(size: int) -> None:
        free = os.statvfs(disk).f_bavail * 4096
        with open(disk / "others", "ab") as others:
            # What is reported has come, and is not written yet
            os.posix_fallocate(others.fileno(), 0, max(free - 400_000, 1))

    with pytest.raises(SaveFailed, match=r"could not be written to .*No space left on device"):
        pull.pull(remote, found.path.name, run, fill)
    assert run.numbers() == []
    os.unlink(disk / "others")
    # There is room for what is missing, but not for all of it once more
    with open(disk / "others", "wb") as others:
        os.posix_fallocate(others.fileno(), 0, os.statvfs(disk).f_bavail * 4096 - 400_000)
    told: list[int] = []
    pull.pull(remote, found.path.name, run, told.append).verify()
    run.release()
    assert told[0] == 300_000
    assert run.numbers() == [2]


def test_a_run_that_cannot_be_written_is_named(run: Run, remote: Remote) -> None:
    run.folder.write_bytes(b"")
    with pytest.raises(SaveFailed, match=rf"{NAME} could not be written to .*exp: "):
        pull.pull(remote, NAME, run, nowhere)


def test_a_disk_that_fails_at_the_end_is_named_and_the_next_pull_continues(
    run: Run, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def failing(source: Path, target: Path) -> None:
        if Path(target).name == NAME:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", failing)
        with pytest.raises(SaveFailed, match=rf"{NAME} could not be written to .*exp: .*Input/output error"):
            pull.pull(remote, NAME, run, nowhere)
    assert run.numbers() == []
    assert is_as_it_was(pull.pull(remote, NAME, run, nowhere))
