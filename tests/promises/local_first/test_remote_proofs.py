"""However often pushing is killed, and however bad the line is: what a remote lists is complete."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from grouped import grouped
from proxy import Proxy
from servers import S3, ProxiedS3

from resumable import Run, RunState
from resumable.remote import storage
from resumable.run import environment, manifest

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]
KILLS, SEEDS = 25, 4
MEGABYTES = 12
FAULTS = ("status", "status", "reset", "reset-answer", "lose-answer", "truncate-answer", "reset-request")


class Shelf:
    """A prefix of a bucket, seen past everything that is tested."""

    def __init__(self, server: S3) -> None:
        self.server = server
        self.bucket = server.bucket()
        self._seen: set[tuple[str, str]] = set()

    @property
    def options(self) -> dict[str, Any]:
        return {"remote": f"s3://{self.bucket}/exp", "remote_options": self.server.options()}

    def files(self) -> dict[str, dict[str, str]]:
        """Return the files of each checkpoint's folder, by name, with their ETags."""
        found: dict[str, dict[str, str]] = {}
        pages = self.server.admin.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self.bucket, Prefix="exp/checkpoints/"):
            for one in page.get("Contents", ()):
                name, _, file = one["Key"].removeprefix("exp/checkpoints/").partition("/")
                found.setdefault(name, {})[file] = one["ETag"]
        return found

    def content(self, name: str, file: str) -> bytes:
        key = f"exp/checkpoints/{name}/{file}"
        content: bytes = self.server.admin.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return content

    def verified(self) -> list[int]:
        """Return the numbers of the checkpoints that are listed, each byte of which was looked at."""
        numbers = []
        for name, files in self.files().items():
            if "manifest.json" in files:
                about = manifest.from_json(self.content(name, "manifest.json"))
                for file, record in about.files.items():
                    self._verify(name, file, files[file], record)
                numbers.append(about.number)
        return sorted(numbers)

    def _verify(self, name: str, file: str, tag: str, record: Any) -> None:
        # What has the name and the tag of a file that was looked at is that file
        if (f"{name}/{file}", tag) not in self._seen:
            content = self.content(name, file)
            digest = xxhash.xxh3_128(content).hexdigest()
            assert (len(content), digest) == (record.size, record.xxh3_128), f"{name}/{file}"
            self._seen.add((f"{name}/{file}", tag))

    def torn(self) -> int:
        """Return how many checkpoints are there in part, and so not there."""
        return sum("manifest.json" not in files for files in self.files().values())

    def uploads(self) -> list[Any]:
        """Return the uploads that were begun and not ended."""
        found: list[Any] = self.server.admin.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        return found


@pytest.fixture
def shelf(s3: S3) -> Iterator[Shelf]:
    made = Shelf(s3)
    yield made
    s3.remove(made.bucket)


def made(megabytes: float = MEGABYTES) -> torch.nn.Sequential:
    """Return a model of which a part is in a file of its own, that stays as it is and is copied there."""
    model = torch.nn.Sequential(torch.nn.Linear(1000, int(250 * megabytes)), torch.nn.Linear(1000, 500))
    model[1].requires_grad_(False)
    return model


def load(run_dir: Path, options: dict[str, Any], megabytes: float = MEGABYTES) -> RunState:
    return RunState.load(run_dir, model=made(megabytes), **grouped(push="all", **options))


def train(model: torch.nn.Sequential) -> None:
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.add_(random.random())


def go_on(run_dir: Path, options: dict[str, Any], pipe: int) -> None:
    """Save once more, tell that pushing has begun, and wait for its end."""
    storage.PART = 5 << 20
    model = made()
    state = RunState.load(run_dir, model=model, **grouped(push="all", **options))
    for _ in state.steps(state.step + 1):
        train(model)
        state.save().wait()
        os.write(pipe, b".")
    state.close()


def forked(run_dir: Path, options: dict[str, Any], kill_after: float | None) -> tuple[float, int]:
    """Go on in a process of its own, which is killed so long after its first save; return how it ended."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reader)
        with contextlib.suppress(BaseException):
            try:
                go_on(run_dir, options, writer)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
        os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 1) == b".", "it has ended before its first save"
        began = time.perf_counter()
        if kill_after is not None:
            time.sleep(kill_after)
            os.kill(child, signal.SIGKILL)
    finally:
        status = os.waitpid(child, 0)[1]
        os.close(reader)
    return time.perf_counter() - began, status


@pytest.mark.proves("local first")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(1, SEEDS))]
)
def test_a_killed_push_lists_only_what_is_complete_and_is_finished_later(
    shelf: Shelf, tmp_path: Path, seed: int
) -> None:
    import s3fs  # noqa: F401

    environment.attempt()
    chance = random.Random(seed)
    status = forked(tmp_path / "run", shelf.options, None)[1]
    assert status == 0
    assert shelf.verified() == [1]

    killed = torn = 0
    highest = 1
    # Without the first one, which begins with a bucket that is not there yet.
    timed = [forked(tmp_path / "run", shelf.options, None) for _ in range(3)]
    assert [status for _, status in timed] == [0, 0, 0]
    seconds = min(seconds for seconds, _ in timed)
    for _ in range(KILLS):
        _, status = forked(tmp_path / "run", shelf.options, chance.uniform(0, seconds))
        killed += os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or status == 0
        numbers = shelf.verified()
        assert numbers[-1] >= highest, "what was there is gone"
        highest = numbers[-1]
        torn += shelf.torn()

    # What else the machine does decides how many: a push that takes less than the one that was timed ends.
    assert killed > KILLS * 0.4
    assert torn > KILLS * 0.1, "too few of them were in the middle of a checkpoint"
    _, status = forked(tmp_path / "run", shelf.options, None)
    newest = Run(tmp_path / "run").numbers()
    assert status == 0
    assert shelf.verified() == newest
    assert shelf.torn() == 0
    assert shelf.uploads() == []
    shutil.rmtree(tmp_path / "run")
    _, status = forked(tmp_path / "run", shelf.options, None)
    assert status == 0
    assert shelf.verified()[-1] == newest[-1] + 1


@pytest.mark.proves("local first")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_all_checkpoints_arrive_though_three_of_ten_requests_fail(
    proxied_s3: ProxiedS3, shelf: Shelf, tmp_path: Path, seed: int
) -> None:
    torch.manual_seed(seed)
    with load(tmp_path / "run", {"keep": None}, megabytes=0.1) as state:
        for _ in state.steps(25):
            state.save().wait()
    _break(proxied_s3.proxy, 0.3, seed)

    options = {"remote": f"s3://{shelf.bucket}/exp", "remote_options": proxied_s3.options()}
    load(tmp_path / "run", {"keep": None, "remote_keep": None, **options}, megabytes=0.1).close()

    seen = proxied_s3.proxy.seen
    assert len(seen.struck()) > 0.2 * len(seen.requests)
    assert {one.fault for one in seen.struck()} == {*FAULTS}
    assert shelf.verified() == Run(tmp_path / "run").numbers() == [*range(1, 26)]
    assert shelf.torn() == 0
    assert max(seen.uploads_at_once().values()) == 1


def _break(proxy: Proxy, rate: float, seed: int) -> None:
    left = 1.0
    for number, fault in enumerate(FAULTS):
        # Of those that the rules before it let pass
        share = rate / len(FAULTS)
        proxy.rules.add(fault, rate=share / left, seed=seed * 100 + number, status=(500, 503)[number % 2])
        left -= share


@pytest.mark.proves("local first")
def test_a_remote_that_comes_back_has_all_of_a_training_in_the_end(
    proxied_s3: ProxiedS3, shelf: Shelf, tmp_path: Path
) -> None:
    options = {"remote": f"s3://{shelf.bucket}/exp", "remote_options": proxied_s3.options()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with load(tmp_path / "run", {"keep": None, "remote_keep": None, **options}, megabytes=0.1) as state:
            for step in state.steps(30):
                if step == 10:
                    proxied_s3.proxy.close()
                if step == 20:
                    proxied_s3.proxy.open()
                state.save().wait()

    assert shelf.verified() == [*range(1, 31)]
    history = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    pushed = [line["number"] for line in map(json.loads, history) if line.get("event") == "push"]
    assert sorted(pushed) == [*range(1, 31)]
