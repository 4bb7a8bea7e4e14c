"""A disk that loses its power in the middle of a save, really: nothing that was saved is lost."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import chosen
import pytest
import tiny
import victims
from counted import Tally
from victims import Aim, Chain, Tell

from resumable import ResumableError, ResumableWarning
from resumable.files import large_files
from resumable.run import environment

pytestmark = [pytest.mark.heavy, pytest.mark.proves("durable")]

_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN
_NO_LOG_FLUSH = struct.pack("I", 2)  # what is in memory is lost, as it is by a power cut

_FORMATS = {"ext4": ("64M", "mkfs.ext4", "-q", "-F"), "xfs": ("300M", "mkfs.xfs", "-q", "-f")}


class Disk:
    """A file system in a file, of which the power can be cut."""

    def __init__(self, folder: Path, kind: str) -> None:
        size, *make = _FORMATS[kind]
        self.path = folder / kind
        self.path.mkdir()
        image = folder / f"{kind}.image"
        self._kind, self._device = kind, ""
        if not shutil.which(make[0]):
            pytest.skip(f"a power cut needs {make[0]}")
        _call("truncate", "-s", size, str(image))
        _call(*make, str(image))
        try:
            self._device = _attach(image)
            self.switch_on()
        except subprocess.CalledProcessError as exc:
            self.close()
            pytest.skip(f"a power cut needs a disk of its own, which cannot be mounted here: {exc.stderr}")

    def switch_on(self) -> None:
        _call("mount", "-t", self._kind, self._device, str(self.path))

    def cut(self) -> None:
        """What was not flushed is lost, and from now on every call fails."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, _NO_LOG_FLUSH)
        finally:
            os.close(fd)

    def switch_off(self) -> None:
        _call("umount", str(self.path))
        # A test beside this one may have a namespace with a copy of the mount: the dead disk would be the one
        # that is mounted again.
        end = time.monotonic() + 90
        while self._is_in_use() and time.monotonic() < end:
            time.sleep(0.05)

    def _is_in_use(self) -> bool:
        try:
            os.close(os.open(self._device, os.O_RDONLY | os.O_EXCL))
        except OSError as exc:
            if exc.errno != errno.EBUSY:
                raise
            return True
        return False

    def close(self) -> None:
        if os.path.ismount(self.path):
            _call("umount", "--lazy", str(self.path))
        if self._device:
            _call("losetup", "--detach", self._device)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _attach(image: Path, tries: int = 20) -> str:
    for left in reversed(range(tries)):
        try:
            return _call("losetup", "--find", "--show", str(image))
        except subprocess.CalledProcessError:
            # Another process was quicker, or the kernel has a device for which nobody made a file yet.
            if not left:
                raise
            free = _call("losetup", "--find")
            if not os.path.exists(free):
                os.mknod(free, 0o60660, os.makedev(7, int(free.removeprefix("/dev/loop"))))
            time.sleep(0.05)
    raise AssertionError


@pytest.fixture
def disk_of(tmp_path: Path) -> Iterator[Callable[[str], Disk]]:
    if sys.platform != "linux" or os.geteuid():
        pytest.skip("a power cut needs Linux, and root: a disk is mounted")
    disks: list[Disk] = []

    def make(kind: str) -> Disk:
        disks.append(Disk(tmp_path, kind))
        return disks[-1]

    yield make
    for disk in disks:
        disk.close()


class _OnDisk(Chain):
    """What goes wrong after the cut must be told as this library tells things."""

    def _go_on(self, tell: Tell) -> None:
        if self._keep is None:
            # What flushes the history would make the rename before it durable too.
            (self.run_dir / "history.jsonl").mkdir(parents=True, exist_ok=True)
            warnings.filterwarnings("ignore", r".*history\.jsonl cannot be", ResumableWarning)
        try:
            super()._go_on(tell)
        except (ResumableError, ResumableWarning) as exc:
            tell(f"told {time.monotonic()} {type(exc).__name__}")


def _cut_in_mid_save(chain: Chain, disk: Disk, dice: random.Random, aim: Aim) -> None:
    victim = chain.start()
    aim.wait(victim, dice)
    began = time.monotonic()
    disk.cut()
    if dice.random() < 0.3:
        # What the training says of a disk that is gone
        victim.wait_for("told")
    victim.kill()
    aim.hit(victim)
    early = [line for line in victim.said if line.startswith("told") and float(line.split()[1]) < began]
    victim.said += [f"bad: {line}, before the cut" for line in early]
    chain.found["told"] += any(line.startswith("told") for line in victim.said)
    disk.switch_off()
    disk.switch_on()
    chain.ended(victim)


@pytest.mark.parametrize("kind", _FORMATS)
@pytest.mark.parametrize("keep", [1, 3, None])
def test_what_was_saved_before_a_power_cut_is_there_after_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    disk_of: Callable[[str], Disk],
    tally: Tally,
    times: int,
    kind: str,
    keep: int | None,
) -> None:
    monkeypatch.setattr(large_files, "_WORTH_A_LINK", 0)
    if keep == 3:
        monkeypatch.setattr(large_files, "BLOCK", 1024)
        monkeypatch.setattr(large_files, "_PREALLOCATE", 1)
    tiny.load(tmp_path / "warm")[1].close()
    environment.attempt()
    disk = disk_of(kind)
    count, dice = 34 * times, chosen.dice()
    chain: Chain = _OnDisk(disk.path / "exp", keep)
    aims = [Aim("found", "save 1 "), Aim("save 1 ", "save 2 ")]
    # Else no cut came in the middle of anything
    minimums = {".stage": count // 20, "told": count // 20}
    for number in victims.tries(count, chain.found, minimums, chain.bad):
        if chain.is_over():
            chain = chain.another(disk.path / f"exp-{number}")
        chain.way = dice.choice(["paced", "direct", "plain"])
        _cut_in_mid_save(chain, disk, dice, dice.choice(aims))
    tally("power cuts", number + 1, chain.bad)
