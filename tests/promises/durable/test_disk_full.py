"""A real disk that fills up in mid-save: nothing that was saved is lost, and the training continues."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from resumable import ResumableWarning, Run, RunState, SaveFailed

PAGE = 4096


class Disk:
    """A file system of a few MB, of which one file of the test's own takes what it is told to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_dir = path / "exp"

    def free(self) -> int:
        return os.statvfs(self.path).f_bavail * PAGE

    def free_names(self) -> int:
        return os.statvfs(self.path).f_favail

    def fill(self, leave: int) -> None:
        with open(self.path / "others", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, self.free() - leave // PAGE * PAGE)

    def fill_names(self, leave: int) -> None:
        (self.path / "names").mkdir()
        for number in range(self.free_names() - leave):
            (self.path / "names" / str(number)).symlink_to("x")

    def make_room(self) -> None:
        for path in [*self.path.glob("others"), *self.path.glob("names/*"), *self.path.glob("names")]:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if sys.platform != "linux":
        pytest.skip("tmpfs is Linux's")
    path = tmp_path / "disk"
    path.mkdir()
    options = ["-t", "tmpfs", "-o", "size=6m,nr_inodes=200", "tmpfs", str(path)]
    mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.strip()}")
    yield Disk(path)
    subprocess.run(["umount", "--lazy", str(path)], check=True)


class Training:
    """Three files of tensors and random numbers, 1.2 MB a save."""

    def __init__(self, run_dir: Path, keep: int = 2) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(256, 256), nn.Dropout(), nn.Linear(256, 128))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.state = RunState.load(
            run_dir,
            model=self.model,
            optimizer=self.optimizer,
            extra={"mine": {"t": torch.ones(999)}},
            keep=keep,
            every=None,
        )

    def train(self, steps: int = 1) -> None:
        for _ in self.state.steps(self.state.step + steps):
            self.model(torch.randn(4, 256)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def save(self) -> int:
        self.train()
        saved = self.state.save()
        saved.wait()
        return saved.number

    def size(self) -> int:
        run = self.state.run
        return run.open(run.numbers()[-1]).about.size

    def weights(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.model.state_dict().values()]


def _uninterrupted(run_dir: Path, steps: int) -> list[torch.Tensor]:
    with (training := Training(run_dir)).state:
        training.train(steps)
        return training.weights()


def _intact(run_dir: Path) -> list[int]:
    run = Run(run_dir)
    for found in run.checkpoints():
        found.verify()
    names = [found.path.name for found in run.checkpoints()]
    assert sorted(os.listdir(run.folder)) == names
    return run.numbers()


def _goes_on(disk: Disk, training: Training, keep: int) -> None:
    """Train on without a save, save once there is room, and continue twice as if nothing had been."""
    with training.state:
        training.train(2)
        disk.make_room()
        assert training.save() == 4
        assert _intact(disk.run_dir) == [2, 4][-keep:]
    ours = []
    for steps in (8, 10):
        with (training := Training(disk.run_dir, keep)).state as state:
            assert state.resumed
            training.train(steps - state.step)
            state.save()
            ours = training.weights()
    assert all(map(torch.equal, ours, _uninterrupted(disk.path.parent / "other", 10)))


@pytest.mark.quick(6)
@pytest.mark.proves("durable")
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("share", [0, 0.1, 0.4, 0.8, 0.97, 0.99, 0.995])
def test_a_full_disk_costs_the_save_but_not_those_before_it(disk: Disk, keep: int, share: float) -> None:
    training = Training(disk.run_dir, keep)
    numbers = [training.save(), training.save()]
    disk.fill(leave=int(share * training.size()))
    before = disk.free()

    with pytest.raises(SaveFailed) as failed:
        training.save()

    assert _intact(disk.run_dir) == numbers[-keep:]
    assert disk.free() == before
    there = f"No space left on device: '{disk.run_dir}/checkpoints/.stage-000003-"
    room = rf"There were 1,[0-9]{{3}},[0-9]{{3}} bytes to write, and {before:,} are free"
    assert re.search(rf"(?s){there}.*{room}\..*make room", str(failed.value))
    _goes_on(disk, training, keep)


@pytest.mark.proves("durable")
@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("names", range(9))
@pytest.mark.quick(3)
def test_a_disk_that_takes_no_more_files_does_too(disk: Disk, keep: int, names: int) -> None:
    training = Training(disk.run_dir, keep)
    numbers = [training.save(), training.save()]
    disk.fill_names(leave=names)

    with pytest.raises(SaveFailed, match=r"(?s)No space left on device: .*bytes to write, and .*make room"):
        training.save()

    assert _intact(disk.run_dir) == numbers[-keep:]
    assert disk.free_names() == names
    _goes_on(disk, training, keep)


def test_the_error_comes_at_the_next_call_and_only_once(disk: Disk) -> None:
    with (training := Training(disk.run_dir)).state as state:
        training.save()
        disk.fill(leave=0)
        state.save()

        with pytest.raises(SaveFailed, match=r"checkpoint 2 \(step 1\) could not be written"):
            state.save()

        disk.make_room()
        assert training.save() == 3
    assert _intact(disk.run_dir) == [1, 3]


def test_save_after_save_on_a_full_disk_fails_alike_and_leaves_nothing(disk: Disk) -> None:
    training = Training(disk.run_dir)
    training.save()
    disk.fill(leave=300_000)
    before = disk.free(), disk.free_names()

    for _ in range(5):
        with pytest.raises(SaveFailed, match="No space left on device"):
            training.save()
        assert (disk.free(), disk.free_names()) == before

    disk.make_room()
    with training.state:
        assert training.save() == 7
    assert _intact(disk.run_dir) == [1, 7]


def test_a_disk_that_is_too_small_for_two_keeps_the_one_it_has(disk: Disk) -> None:
    with (training := Training(disk.run_dir, keep=1)).state:
        training.save()
        disk.fill(leave=training.size() // 2)
        for _ in range(2):
            with pytest.raises(SaveFailed, match="No space left on device"):
                training.save()
    assert _intact(disk.run_dir) == [1]


def test_a_run_that_cannot_even_begin_leaves_nothing_half_written(disk: Disk) -> None:
    disk.run_dir.mkdir()
    disk.fill(leave=0)

    with pytest.raises(
        SaveFailed, match=r"(?s)exp cannot be written: .*No space left on device.*room on the disk"
    ):
        Training(disk.run_dir)

    assert [path.name for path in disk.run_dir.iterdir() if path.name != ".lock"] == []
    disk.make_room()
    with (training := Training(disk.run_dir)).state:
        assert training.save() == 1
    assert _intact(disk.run_dir) == [1]


def test_a_disk_without_room_for_what_is_kept_is_named_at_the_start(disk: Disk) -> None:
    disk.fill(leave=1_000_000)

    with pytest.warns(ResumableWarning, match=r"exp: a checkpoint takes about \d+ kB; 3 and .*are free"):
        training = Training(disk.run_dir, keep=3)

    training.state.close()


def test_and_when_the_optimizer_has_its_state_and_when_it_continues(disk: Disk) -> None:
    disk.fill(leave=3_000_000)
    with (training := Training(disk.run_dir, keep=3)).state:
        with pytest.warns(ResumableWarning, match=r"a checkpoint takes about 1\.\d+ MB; 3 and the one being"):
            training.train()
        training.save()

    with pytest.warns(ResumableWarning, match=r"need 4\.\d+ MB, 1\.\d+ MB of it are there already"):
        Training(disk.run_dir, keep=3).state.close()
