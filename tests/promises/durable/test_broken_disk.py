"""A disk that breaks, beneath a real file system: a failed flush is final, and what is listed can be read."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import injection
import pytest
from counted import Tally
from injection import Child, needs_strace  # noqa: F401 (a fixture)
from tiny import Training, assert_goes_on, load, save_next

from resumable import CannotRead, CheckpointDamaged, ResumableWarning, Run, RunState, SaveFailed

pytestmark = [
    pytest.mark.proves("durable"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"),
]

MAKE = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q"], "btrfs": ["mkfs.btrfs", "-q"]}


class Disk:
    """A file system on a disk in memory, which answers with errors while there is a file that says so."""

    def __init__(self, kind: str, folder: Path, share: int = 100) -> None:
        self.folder, self.path = folder, folder / "mounted"
        self.run_dir = self.path / "exp"
        self._share = share
        self._image = folder / "disk"
        self._breaks = {way: folder / f"breaks-{way}" for way in ("pwrite", "pread")}
        options = [option for way in self._breaks for option in self._option(way)]
        server = ["nbdkit", "--exit-with-parent", "--filter=error", "memory", "512M", *options]
        # Where there is no file of that name, the whole folder would be covered
        self._image.touch()
        self._server = subprocess.Popen(
            ["nbdfuse", str(self._image), "[", *server, "]"], stderr=subprocess.DEVNULL
        )
        try:
            self._wait()
            _do(*MAKE[kind], str(self._image))
            self.path.mkdir()
            _mount_or_skip(self._image, self.path)
        except BaseException:
            self.close()
            raise

    def _option(self, way: str) -> list[str]:
        return [
            f"error-{way}=EIO",
            f"error-{way}-rate={self._share}%",
            f"error-{way}-file={self._breaks[way]}",
        ]

    def _wait(self) -> None:
        for _ in range(3000):
            if self._image.stat().st_size:
                return
            if self._server.poll() is not None:
                pytest.skip("needs nbdfuse, which ends here at once: no FUSE, or no right to it")
            time.sleep(0.01)
        raise AssertionError("nbdfuse has made no disk in 30 s")

    def breaks(self, way: str) -> None:
        self._breaks[way].touch()

    def heals(self) -> None:
        for path in self._breaks.values():
            path.unlink(missing_ok=True)

    def remount(self) -> None:
        """Forget what is in memory."""
        _do("umount", str(self.path))
        if refusal := _mount(self._image, self.path):
            raise AssertionError(f"what the disk has left cannot be mounted: {refusal}")

    def close(self) -> None:
        self.heals()
        subprocess.run(["umount", "--lazy", str(self.path)], capture_output=True, check=False)
        self._server.terminate()
        self._server.wait()


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)


def _mount(image: Path, path: Path, tries: int = 20) -> str:
    """Mount a disk; return why that cannot be done, if it cannot."""
    for _ in range(tries):
        command = ["mount", "-o", "loop", str(image), str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        # Another process may have been quicker to take the same loop device
        if done.returncode and "loop device" in done.stderr:
            time.sleep(0.05)
            continue
        break
    return done.stderr.strip() if done.returncode else ""


def _mount_or_skip(image: Path, path: Path) -> None:
    if refusal := _mount(image, path):
        pytest.skip(f"needs a loop mount: {refusal}")


KINDS = ("ext4", "xfs", "btrfs")


def _make(kind: str, folder: Path, share: int = 100) -> Disk:
    needed = ["nbdkit", "nbdfuse", MAKE[kind][0]]
    if lacking := [name for name in needed if not shutil.which(name)]:
        pytest.skip(f"needs {', '.join(lacking)} (apt-get install nbdkit libnbd-bin xfsprogs btrfs-progs)")
    if not Path("/dev/fuse").exists():
        pytest.skip("needs /dev/fuse")
    folder.mkdir(exist_ok=True)
    return Disk(kind, folder, share)


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with contextlib.closing(_make(request.param, tmp_path)) as made:
        yield made


def _begin(disk: Disk) -> tuple[Training, RunState]:
    training, state = load(disk.run_dir)
    for loss in (1.0, 5.0):
        save_next(training, state, loss)
    return training, state


@pytest.mark.quick(3)
def test_what_the_disk_did_not_take_is_never_reported_durable(disk: Disk) -> None:
    training, state = _begin(disk)
    disk.breaks("pwrite")

    for number in (3, 4):
        there = rf"{disk.run_dir}/checkpoints/\.stage-00000{number}-"
        with pytest.raises(
            SaveFailed, match=rf"(?s)could not be written: .*Input/output error: '{there}.*Fix: mend"
        ):
            save_next(training, state, 0.5)

    disk.heals()
    assert state.run.numbers() == [1, 2]
    save_next(training, state, 0.4)
    state.close()
    # What is in the page cache is not what is on the disk after a flush that has failed.
    disk.remount()
    assert Run(disk.run_dir).numbers() == [5]
    assert_goes_on(disk.run_dir, 5)


@pytest.mark.usefixtures("needs_strace")
def test_a_failed_flush_is_the_last_call_for_its_file_but_for_its_removal(disk: Disk) -> None:
    log = disk.folder / "log"
    with Child(lambda child: _save_twice(child, disk.run_dir)) as child:
        assert child.heard() == "ready"
        disk.breaks("pwrite")
        with injection.attached(child.pid, log, ["fsync", "fdatasync", "rename", "openat"]):
            child.go()
            assert "Input/output error" in child.heard()
            disk.heals()
            child.go()
            assert child.heard() == [1, 2, 4][2:]

    found = injection.lines(log)
    failed = [injection.path_of(line) for line in found if line.call == "fsync" and " = -1 EIO" in line.text]
    assert len(failed) == 1
    later = found[[injection.path_of(line) for line in found].index(failed[0]) + 1 :]
    stage = failed[0].partition("/.stage-")[2].partition("/")[0]
    assert [line for line in later if stage in line.text and "O_DIRECTORY" not in line.text] == []
    assert any(line.call == "rename" and "/.stage-000004-" in line.text for line in later)


def _save_twice(child: Child, run_dir: Path) -> None:
    training, state = load(run_dir)
    for loss in (1.0, 5.0):
        save_next(training, state, loss)
    child.tell("ready")
    try:
        save_next(training, state, 0.5)
    except SaveFailed as error:
        child.tell(str(error))
    save_next(training, state, 0.4)
    state.close()
    child.tell(state.run.numbers())


# On some file systems the names are still known, and each checkpoint is told to be skipped
@pytest.mark.filterwarnings("ignore:.*It is skipped:resumable.ResumableWarning")
def test_an_unreadable_disk_is_not_taken_for_a_fresh_start(disk: Disk) -> None:
    _begin(disk)[1].close()
    disk.remount()
    disk.breaks("pread")

    with pytest.raises((CannotRead, CheckpointDamaged), match=r"(?s)Input/output error.*Fix: ") as failed:
        load(disk.run_dir)

    assert str(disk.run_dir) in str(failed.value)
    disk.heals()
    assert_goes_on(disk.run_dir, 2)


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fails_at_times_keeps_all_reported_durable(
    tmp_path: Path, kind: str, times: int, tally: Tally
) -> None:
    count, bad = 3 * times, []
    for turn in range(count):
        with contextlib.closing(_make(kind, tmp_path / str(turn), share=(2, 10, 40)[turn % 3])) as disk:
            durable, text = _train_on(disk)
            disk.heals()
            disk.remount()
            steps = [found.about.step for found in Run(disk.run_dir).checkpoints()]
            if durable > max(steps, default=0):
                bad.append(f"{turn}: {durable} was durable, {steps} are there: {text}")
            assert_goes_on(disk.run_dir, max(steps, default=0))
    tally("disks that fail now and then", count, bad)


def _train_on(disk: Disk) -> tuple[int, str]:
    """Train six steps on a disk that fails; return the last that was durable, and what was reported."""
    training, state = load(disk.run_dir)
    durable, told = 0, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResumableWarning)
        save_next(training, state, 1.0)
        durable = 1
        disk.breaks("pwrite")
        for step in range(2, 7):
            try:
                save_next(training, state, 1 / step)
                durable = step
            except SaveFailed as error:
                told.append(str(error))
        state.close()
    return durable, "\n".join(told)


@pytest.fixture
def quota(tmp_path: Path) -> Iterator[Path]:
    """A folder that takes 300 kB, on a disk that has room for more."""
    image, path = tmp_path / "image", tmp_path / "mounted"
    if not shutil.which("mkfs.btrfs"):
        pytest.skip("needs mkfs.btrfs (apt-get install btrfs-progs)")
    path.mkdir()
    with open(image, "wb") as file:
        file.truncate(200 << 20)
    _do("mkfs.btrfs", "-q", str(image))
    _mount_or_skip(image, path)
    for command in ("quota enable .", "subvolume create mine", "qgroup limit 300K mine"):
        subprocess.run(["btrfs", *command.split()], cwd=path, check=True, capture_output=True)
    yield path / "mine"
    _do("umount", "--lazy", str(path))


# The links for people are the first to find no room
@pytest.mark.filterwarnings("ignore:.*Disk quota exceeded:resumable.ResumableWarning")
def test_a_quota_that_is_used_up_costs_the_save_and_is_reported_as_one(quota: Path) -> None:
    training, state = load(quota / "exp", keep=9)
    with pytest.raises(
        SaveFailed, match=r"(?s)Disk quota exceeded.* bytes to write\..*within the quota of"
    ) as failed:
        _save_often(training, state, quota)
    assert str(quota) in str(failed.value)

    done = state.step
    subprocess.run(["btrfs", "qgroup", "limit", "none", str(quota)], check=True, capture_output=True)
    save_next(training, state, 0.1)
    state.close()
    assert [found.about.step for found in Run(quota / "exp").checkpoints()] == [*range(1, done), done + 1]
    assert_goes_on(quota / "exp", done + 1, keep=9)


def _save_often(training: Training, state: RunState, path: Path) -> None:
    for _ in range(7):
        save_next(training, state, 1.0)
        # What is used is counted when it is written
        _do("btrfs", "filesystem", "sync", str(path))
