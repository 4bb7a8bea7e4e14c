"""A run that has a remote: it comes back from there bit for bit, and no trouble there stops it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gloo
import numpy as np
import pytest
import torch
from grouped import grouped
from servers import S3, Place, ProxiedS3
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resumable import (
    CheckpointDamaged,
    CheckpointNotFound,
    RemoteError,
    ResumableWarning,
    Run,
    RunExists,
    RunState,
)
from resumable.remote.run_copy import Remote
from resumable.remote.storage import Store
from resumable.run import history

EPOCHS, BATCHES = 2, 5
ANYWHERE = pytest.mark.parametrize("place", ["memory", "file", "s3"], indirect=True)
HERE = pytest.mark.parametrize("place", ["file"], indirect=True)


def at(place: Place) -> dict[str, Any]:
    """Return what a run says of its remote."""
    return {"remote": place.url, "remote_options": place.options()}


def there(place: Place) -> list[int]:
    """Return the save numbers on the remote, once every file of them is known to be what it should be."""
    remote = Remote(Store(place.url, place.options()))
    for name in remote.numbers().values():
        about, _ = remote.about(name)
        for file, record in about.files.items():
            content = remote.store.read(f"checkpoints/{name}/{file}", limit=1 << 24)
            assert content is not None
            assert len(content) == record.size
    return [*remote.numbers()]


def damage(checkpoint: Path) -> None:
    """Turn one bit of a checkpoint over."""
    path = next(checkpoint.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """Collect the warnings of all threads."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        # These trainings have loops of their own
        warnings.filterwarnings("ignore", "this script reads neither state.step")
        yield told
        told += [str(each.message) for each in found]


class Augmented(Dataset[Any]):
    """Samples with noise from all three libraries."""

    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(4) * index / 10 + torch.rand(4) + random.random() + float(np.random.rand())


class Training:
    """A model with its optimizer and a loader with workers; it notes what it has seen."""

    def __init__(self, workers: int = 0) -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loader = DataLoader(Augmented(), 2, shuffle=True, num_workers=workers)
        self.seen: list[float] = []
        self.ended_as = ""

    def load(self, run_dir: Path | str, **options: Any) -> RunState:
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader}
        return RunState.load(run_dir, **parts, minimize="loss", **grouped(**options))

    def learn(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.sum().item())
        loss: torch.Tensor = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def digest(self) -> str:
        tensors = [*self.model.state_dict().values(), torch.get_rng_state()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        draws = f"{random.random()} {np.random.rand()}".encode()
        return hashlib.sha256(b"".join([t.numpy().tobytes() for t in tensors] + [draws])).hexdigest()


def train(run_dir: Path | str, stop_at: int | None = None, workers: int = 2, **options: Any) -> Training:
    """Train to the end, or until so many steps are done: saved in mid-epoch, or after an epoch's batches."""
    training = Training(workers)
    with training.load(run_dir, **options) as state:
        for _epoch in state.epochs(EPOCHS):
            for x in state.batches():
                loss = training.learn(x)
                if stop_at is not None and state.step == stop_at and stop_at % BATCHES:
                    state.save(loss=loss)
                    return training
            state.save(loss=0.0)
            if state.step == stop_at:
                return training
    training.ended_as = training.digest()
    return training


def saved(run_dir: Path, losses: list[float], **options: Any) -> Run:
    """Go on with a run by a step and a save for each loss."""
    training = Training()
    with training.load(run_dir, **options) as state:
        for loss in losses:
            training.learn(torch.ones(2, 4))
            state.save(loss=loss).wait()
    return Run(run_dir)


def step_of(run_dir: Path | str, **options: Any) -> int:
    """Return the step at which a training continues."""
    with Training().load(run_dir, **options) as state:
        return state.step


def events(run_dir: Path, kind: str) -> list[Any]:
    """Return what the history of a run tells of one kind of event."""
    return [line for line in history.read(run_dir) if line["event"] == kind]


def verified(run_dir: Path | str) -> list[int]:
    run = Run(run_dir)
    for number in run.numbers():
        run.open(number).verify()
    return run.numbers()


# A disk that is lost.


@ANYWHERE
@pytest.mark.heavy
def test_a_training_that_loses_its_disk_often_ends_with_the_same_bits(place: Place, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")

    parts = []
    for stop_at in (3, BATCHES, BATCHES + 1, BATCHES + 3, None):
        parts.append(train(tmp_path / "run", stop_at, **at(place)))
        shutil.rmtree(tmp_path / "run")

    assert [batch for part in parts for batch in part.seen] == whole.seen
    assert parts[-1].ended_as == whole.ended_as != ""
    assert verified(tmp_path / "whole")[-1] == 2


@HERE
def test_numbers_continue_above_those_of_the_remote(place: Place, tmp_path: Path) -> None:
    saved(tmp_path / "first", [3.0, 2.0, 1.0], push="all", **at(place))

    saved(tmp_path / "other", [5.0], resume=1, push="all", remote_keep=None, **at(place))

    assert verified(tmp_path / "other") == [1, 4]
    assert there(place) == [1, 2, 3, 4]


# Which of both.


@HERE
def test_a_damaged_newest_is_taken_from_the_remote(place: Place, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", [3.0, 2.0], **at(place))
    damage(run.path_of(2) or tmp_path)

    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResumableWarning)
            assert step_of(tmp_path / "run", **at(place)) == 2
        assert verified(tmp_path / "run") == [1, 2]


@HERE
def test_what_is_newer_here_wins_and_is_pushed(place: Place, tmp_path: Path) -> None:
    saved(tmp_path / "run", [3.0, 2.0], **at(place))
    saved(tmp_path / "run", [1.0])

    assert step_of(tmp_path / "run", **at(place)) == 3
    assert there(place)[-1] == 3
    assert verified(tmp_path / "run") == [1, 2, 3]


@HERE
def test_what_is_newer_there_wins(place: Place, tmp_path: Path) -> None:
    saved(tmp_path / "run", [3.0, 2.0], **at(place))
    shutil.copytree(tmp_path / "run", tmp_path / "old", symlinks=True)
    saved(tmp_path / "run", [1.0], **at(place))

    for _ in range(2):
        assert step_of(tmp_path / "old", **at(place)) == 3
    assert verified(tmp_path / "old") == [1, 2, 3]


@HERE
def test_a_damaged_checkpoint_there_is_named_and_an_older_one_taken(place: Place, tmp_path: Path) -> None:
    saved(tmp_path / "run", [3.0, 2.0], push="all", **at(place))
    damage(next(Path(place.url.removeprefix("file://")).glob("checkpoints/000002-*")))

    with pytest.warns(ResumableWarning, match=r"checkpoints/000002-.* is damaged: .* has the digest"):
        assert step_of(tmp_path / "other", **at(place)) == 1
    assert verified(tmp_path / "other") == [1]


@HERE
def test_the_remote_of_another_run_is_left_alone(place: Place, tmp_path: Path) -> None:
    first = saved(tmp_path / "first", [3.0], **at(place))
    other = saved(tmp_path / "other", [3.0, 2.0])
    before = sorted(Path(place.url.removeprefix("file://")).rglob("*"))

    with (
        heard() as told,
        pytest.raises(RemoteError, match=f"another run .{first.known_id()}. than .*{other.known_id()}"),
    ):
        saved(tmp_path / "other", [1.0], push_timeout=5, **at(place))

    assert "nothing is taken from it" in told[0]
    assert sorted(Path(place.url.removeprefix("file://")).rglob("*")) == before
    assert there(place) == [1]
    assert verified(tmp_path / "other") == [1, 2, 3]


# What is asked for.


@pytest.mark.quick(3)
@HERE
@pytest.mark.parametrize(("resume", "step"), [(1, 1), ("2", 2), ("best", 2), ("must", 3), ("newest", 3)])
def test_each_word_for_a_checkpoint_means_those_of_the_remote_too(
    place: Place, tmp_path: Path, resume: Any, step: int
) -> None:
    saved(tmp_path / "first", [3.0, 1.0, 2.0], push="all", **at(place))

    assert step_of(tmp_path / "other", resume=resume, **at(place)) == step
    assert verified(tmp_path / "other") == [step]


@HERE
def test_a_number_that_no_copy_has_is_not_found(place: Place, tmp_path: Path) -> None:
    saved(tmp_path / "first", [3.0], **at(place))

    with pytest.raises(CheckpointNotFound, match="7"):
        step_of(tmp_path / "other", resume=7, **at(place))
    with pytest.raises(CheckpointNotFound):
        step_of(tmp_path / "other", resume="must", remote=f"{place.url}-empty")


@HERE
def test_never_does_not_ask_the_remote_and_does_not_mix_two_runs(place: Place, tmp_path: Path) -> None:
    saved(tmp_path / "first", [3.0], **at(place))

    training = Training()
    state = training.load(tmp_path / "other", resume="never", push_timeout=5, **at(place))
    assert state.step == 0
    state.save(loss=9.0).wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResumableWarning)
        with pytest.raises(RemoteError, match="holds another run"):
            state.close()

    with pytest.raises(RunExists):
        step_of(tmp_path / "first", resume="never", **at(place))
    assert there(place) == [1]


@HERE
def test_going_back_in_the_training_means_those_of_the_remote_too(place: Place, tmp_path: Path) -> None:
    saved(tmp_path / "first", [1.0, 2.0, 3.0], push="all", **at(place))

    with Training().load(tmp_path / "other", **at(place)) as state:
        state.restore("best")
        assert state.step == 1
    assert verified(tmp_path / "other") == [1, 3]


# An address alone.


@pytest.mark.heavy
@ANYWHERE
def test_a_run_that_is_an_address_is_kept_in_a_cache_that_is_named(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESUMABLE_CACHE", str(tmp_path / "cache"))
    whole = train(tmp_path / "whole")

    for stop_at in (3, 7, None):
        last = train(place.url, stop_at, remote_options=place.options())
        (folder,) = (tmp_path / "cache").iterdir()
        verified(folder)
        shutil.rmtree(tmp_path / "cache")

    assert last.ended_as == whole.ended_as != ""
    assert f"{place.url} is kept in {folder}" in capsys.readouterr().out


@HERE
def test_the_address_may_come_from_the_environment(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "first", [1.0], **at(place))
    monkeypatch.setenv("RESUMABLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RESUMABLE_RUN_DIR", place.url)

    for _ in range(2):
        assert step_of(tmp_path / "other") == 1
    assert not (tmp_path / "other").exists()


# Nobody there.


def nowhere(tmp_path: Path) -> str:
    """Return an address under which nothing can ever be."""
    (tmp_path / "file").touch()
    return f"file://{tmp_path}/file/exp"


def test_an_empty_run_with_an_unreachable_remote_does_not_start_fresh(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match="is empty, and it is unknown what file:///") as caught:
        step_of(tmp_path / "run", remote=nowhere(tmp_path))

    assert "resume='never'" in caught.value.fix
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.heavy
def test_a_run_continues_where_the_remote_cannot_be_looked_at(tmp_path: Path) -> None:
    saved(tmp_path / "run", [2.0])

    with (
        heard() as told,
        pytest.raises(RemoteError, match=r"checkpoints 3, 1 of .* did not get to file://"),
    ):
        saved(tmp_path / "run", [3.0, 2.5], remote=nowhere(tmp_path), keep=1)

    assert [("was not looked at" in each, "nothing is pushed" in each) for each in told] == [(True, True)]
    assert verified(tmp_path / "run") == [1, 3]


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_an_empty_run_waits_a_minute_for_a_remote_that_is_gone(proxied_s3: ProxiedS3, tmp_path: Path) -> None:
    proxied_s3.proxy.close()

    with pytest.raises(RemoteError, match="is empty, and it is unknown what"):
        step_of(tmp_path / "run", remote="s3://bucket/exp", remote_options=proxied_s3.options())


@pytest.mark.parametrize("place", ["s3"], indirect=True)
@pytest.mark.heavy
def test_a_training_over_a_line_that_breaks_ends_as_one_without_a_remote(
    place: Place, proxied_s3: ProxiedS3, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole")
    proxied_s3.rules.add("status", status=500, rate=0.15)
    proxied_s3.rules.add("reset", rate=0.1, seed=1)

    through = {"remote": place.url, "remote_options": proxied_s3.options()}
    training = train(tmp_path / "run", **through)

    assert proxied_s3.proxy.seen.struck()
    assert training.ended_as == whole.ended_as
    assert there(place)[-1] == verified(tmp_path / "run")[-1] == 2


@pytest.mark.heavy
def test_a_wrong_secret_is_an_error_at_once_where_the_run_is_empty(s3: S3, tmp_path: Path) -> None:
    options = s3.options(secret="not-the-secret")

    with pytest.raises(RemoteError, match="it is unknown what") as caught:
        step_of(tmp_path / "run", remote=f"s3://{s3.bucket()}/exp", remote_options=options)

    assert "not-the-secret" not in f"{caught.value} {caught.value!r}"


# Several processes.


def together(
    rank: int, folder: Path, is_shared: bool, losses: list[float], options: dict[str, Any]
) -> tuple[int, list[int], float]:
    """Train on one node, or on one node each; return where it stood at the start, and what is there then."""
    warnings.simplefilter("ignore", ResumableWarning)
    own = folder if is_shared else folder / f"node{rank}"
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"shared": is_shared, "push": "all", "timeout": 20, **options}
    with RunState.load(own, model=model, optimizer=optimizer, minimize="loss", **grouped(**options)) as state:
        began = state.step
        for loss in losses:
            model(torch.ones(2) * (rank + 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.save(loss=loss).wait()
    return began, verified(own), sum(p.sum().item() for p in model.parameters())


def ended(folder: Path, is_shared: bool, losses: list[float], **options: Any) -> list[Any]:
    found = gloo.run(2, together, folder / "run", is_shared, losses, options, folder=folder)
    for one in found:
        if one.error:
            raise AssertionError(f"a rank failed: {one.printed}") from one.error
        assert one.value is not None, f"a rank has ended with {one.exitcode}"
    return [one.value for one in found]


@HERE
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.heavy
def test_each_node_without_a_disk_pulls_the_same_checkpoint_once(
    place: Place, tmp_path: Path, is_shared: bool
) -> None:
    first = ended(tmp_path, is_shared, [1.0, 2.0], **at(place))
    shutil.rmtree(tmp_path / "run")

    for _ in range(2):
        again = ended(tmp_path, is_shared, [], **at(place))

        assert [(began, numbers) for began, numbers, _ in again] == [(2, [2])] * 2
        assert {weights for *_, weights in again} == {weights for *_, weights in first}
    runs = [tmp_path / "run"] if is_shared else [tmp_path / "run" / f"node{rank}" for rank in range(2)]
    for run in runs:
        assert [line["number"] for line in events(run, "pull")] == [2]
        assert events(run, "push") == []
    assert there(place) == [1, 2]


@pytest.mark.heavy
@HERE
def test_only_the_first_process_pushes(place: Place, tmp_path: Path) -> None:
    ended(tmp_path, False, [1.0, 2.0], **at(place))

    pushed = [events(tmp_path / "run" / f"node{rank}", "push") for rank in range(2)]
    assert [{line["number"] for line in each} for each in pushed] == [{1, 2}, set()]
    assert there(place) == [1, 2]


@HERE
@pytest.mark.parametrize("nodes", [(0,), (1,), (0, 1)])
@pytest.mark.heavy
def test_what_is_damaged_on_one_node_is_taken_from_the_remote_by_all(
    place: Place, tmp_path: Path, nodes: tuple[int, ...]
) -> None:
    ended(tmp_path, False, [2.0, 1.0], **at(place))
    for rank in nodes:
        damage(Run(tmp_path / "run" / f"node{rank}").path_of(2) or tmp_path)

    for _ in range(2):
        again = ended(tmp_path, False, [], **at(place))
        assert [(began, numbers) for began, numbers, _ in again] == [(2, [1, 2])] * 2


@pytest.mark.heavy
@HERE
def test_all_processes_take_the_same_older_checkpoint_of_the_remote(place: Place, tmp_path: Path) -> None:
    ended(tmp_path, True, [2.0, 1.0], **at(place))
    shutil.rmtree(tmp_path / "run")
    damage(next(Path(place.url.removeprefix("file://")).glob("checkpoints/000002-*")))

    again = ended(tmp_path, True, [], **at(place))

    assert [(began, numbers) for began, numbers, _ in again] == [(1, [1])] * 2
    with pytest.raises(CheckpointDamaged):
        Run(place.url.removeprefix("file://")).open(2).verify()


# A training that continued elsewhere.


@pytest.mark.heavy
@HERE
def test_the_best_is_the_one_that_the_newest_knows_though_it_is_only_there(
    place: Place, tmp_path: Path
) -> None:
    keeps = {"keep": None, "remote_keep": None, "push": "all", **at(place)}
    saved(tmp_path / "here", [3.0, 2.0], **keeps)
    shutil.copytree(tmp_path / "here", tmp_path / "elsewhere")
    saved(tmp_path / "elsewhere", [5.0, 1.0, 4.0], **keeps)

    for _ in range(2):
        assert step_of(tmp_path / "here", resume="best", **keeps) == 4
    verified(tmp_path / "here")


@HERE
@pytest.mark.parametrize("has_name", [True, False])
def test_a_run_of_damaged_manifests_takes_nothing_of_another_run(
    place: Place, tmp_path: Path, has_name: bool
) -> None:
    saved(tmp_path / "other", [1.0, 2.0], **at(place))
    run = saved(tmp_path / "run", [1.0])
    (run.folder / "000001-step-00000001" / "manifest.json").write_bytes(b"{}")
    if not has_name:
        (run.path / "run.json").unlink()

    with heard() as told:
        if has_name:
            with pytest.raises(CheckpointDamaged, match="none of the 1 checkpoints"):
                step_of(run.path, **at(place))
        else:
            assert run.known_id() is None

    assert any("holds another run" in text for text in told) == has_name
    assert run.numbers() == [1]


@pytest.mark.heavy
def test_who_interrupts_a_pull_that_hangs_does_not_wait_for_it(proxied_s3: ProxiedS3, tmp_path: Path) -> None:
    place = Place("s3", f"s3://{proxied_s3.bucket()}/exp", proxied_s3.options())
    # So large that several threads bring it
    large = {"extra": {"memory": {"filled": torch.ones(24 << 20, dtype=torch.uint8)}}}
    saved(tmp_path / "first", [1.0], **large, **at(place))
    proxied_s3.rules.add("stall", method="GET", path="extra")

    timer = threading.Timer(2, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        step_of(tmp_path / "run", **large, **at(place))
    timer.join()
    assert time.monotonic() - began < 30

    proxied_s3.rules.clear()
    for _ in range(2):
        assert step_of(tmp_path / "run", **large, **at(place)) == 1
    assert verified(tmp_path / "run") == [1]


@pytest.mark.heavy
@HERE
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_lost_its_disk_pulls_what_the_others_have(
    place: Place, tmp_path: Path, lost: int
) -> None:
    first = ended(tmp_path, False, [1.0, 2.0], **at(place))
    shutil.rmtree(tmp_path / "run" / f"node{lost}")

    again = ended(tmp_path, False, [], **at(place))

    assert [began for began, *_ in again] == [2, 2]
    assert {weights for *_, weights in again} == {weights for *_, weights in first}
    pulls = [len(events(tmp_path / "run" / f"node{rank}", "pull")) for rank in range(2)]
    assert pulls == [int(rank == lost) for rank in range(2)]
