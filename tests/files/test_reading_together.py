"""Several files that are read together: who shares the work, what is reported, and in how many calls."""

from __future__ import annotations

import errno
import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resumable import CannotRead, CheckpointDamaged
from resumable.files import file_reader, large_files
from resumable.files.file_reader import Lane, Scan, Target

FILES = {"first": bytes(range(250)) * 13, "empty": b"", "last": bytes(range(199)) * 21}


@pytest.fixture(autouse=True, params=[1, 3], ids=["one thread", "three threads"])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_files, "BLOCK", 1000)
    monkeypatch.setattr(file_reader, "_PIECE", 300)
    monkeypatch.setattr(file_reader, "_READERS", request.param)
    monkeypatch.setattr(file_reader, "_WORTH_A_THREAD", 1)


@pytest.fixture
def files(tmp_path: Path) -> list[tuple[Scan, str]]:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    return [(Scan(name, len(data), rows(data)), large_files.digest(data)) for name, data in FILES.items()]


def rows(data: bytes, width: int = 17) -> list[Target]:
    begins = range(40, len(data) - 90, width)
    return [Target(at, at + width, memoryview(bytearray(width))) for at in begins]


def is_filled(files: list[tuple[Scan, str]]) -> bool:
    return all(
        target.memory == FILES[one.name][target.begin : target.end]
        for one, _ in files
        for target in one.targets
    )


def again(files: list[tuple[Scan, str]], digests: list[list[bytes]]) -> list[tuple[Scan, list[bytes]]]:
    return [(one, own) for (one, _), own in zip(files, digests, strict=True)]


def test_files_give_together_what_each_gives_alone(tmp_path: Path, files: list[tuple[Scan, str]]) -> None:
    digests = file_reader.scan_files(tmp_path, files)
    assert is_filled(files)
    assert digests == [file_reader.scan(tmp_path, one.name, one.size, expected) for one, expected in files]

    for one, _ in files:
        for target in one.targets:
            target.memory[:] = bytes(len(target.memory))  # type: ignore[arg-type, index]
    file_reader.scan_files_again(tmp_path, again(files, digests))
    assert is_filled(files)


@pytest.mark.parametrize("name", ["first", "last"])
@pytest.mark.parametrize(
    "read",
    [
        lambda folder, files, _: file_reader.scan_files(folder, files),
        lambda folder, files, digests: file_reader.scan_files_again(folder, again(files, digests)),
    ],
    ids=["first pass", "second pass"],
)
def test_a_flipped_byte_is_reported_of_the_file_that_has_it(
    tmp_path: Path, files: list[tuple[Scan, str]], name: str, read: Callable[..., object]
) -> None:
    digests = file_reader.scan_files(tmp_path, files)
    data = bytearray(FILES[name])
    data[2500] ^= 4
    (tmp_path / name).write_bytes(data)

    with pytest.raises(CheckpointDamaged, match=f"{name} has"):
        read(tmp_path, files, digests)


@pytest.mark.parametrize("most", [1, 7, 18, 299])
def test_rows_are_filled_by_a_disk_that_gives_a_part_at_a_time(
    tmp_path: Path, files: list[tuple[Scan, str]], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real = file_reader._preadv

    def sparing(fd: int, buffers: list[memoryview], at: int) -> int:
        found, left = [], most
        for buffer in buffers:
            found.append(buffer[:left])
            left -= found[-1].nbytes
        return real(fd, found, at)

    monkeypatch.setattr(file_reader, "_preadv", sparing)
    file_reader.scan_files(tmp_path, files)
    assert is_filled(files)


def test_a_hasher_gets_the_bytes_in_order(tmp_path: Path, files: list[tuple[Scan, str]]) -> None:
    hashers = [hashlib.sha256() for _ in files]
    hashed = [
        (one._replace(also=hasher), expected) for (one, expected), hasher in zip(files, hashers, strict=True)
    ]

    file_reader.scan_files(tmp_path, hashed)

    assert [one.digest() for one in hashers] == [hashlib.sha256(data).digest() for data in FILES.values()]


def test_an_error_of_a_taker_keeps_its_words(tmp_path: Path, files: list[tuple[Scan, str]]) -> None:
    def full(lane: Lane, at: int, piece: memoryview) -> None:
        raise CannotRead("there is no room on the device.", fix="wait.")

    one = files[0][0]._replace(targets=[Target(0, 10, None, full)])
    with pytest.raises(CannotRead, match="no room on the device"):
        file_reader.scan_files(tmp_path, [(one, files[0][1]), *files[1:]])


def interrupted(real: Callable[[Any], None], calls: Iterator[int]) -> Callable[[Any], None]:
    def call(thread: Any) -> None:
        if next(calls) == 1:
            raise KeyboardInterrupt
        real(thread)

    return call


@pytest.mark.parametrize("method", ["start", "join"])
@pytest.mark.parametrize("small", [3], indirect=True)
def test_after_an_interrupt_no_thread_reads_on(
    tmp_path: Path, files: list[tuple[Scan, str]], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    real, running = file_reader._preadv, threading.active_count()

    def slow(fd: int, buffers: list[memoryview], at: int) -> int:
        # The others are still at work when the interrupt comes.
        time.sleep(0.001 if threading.current_thread() is threading.main_thread() else 0.05)
        return real(fd, buffers, at)

    monkeypatch.setattr(file_reader, "_preadv", slow)
    monkeypatch.setattr(
        threading.Thread, method, interrupted(getattr(threading.Thread, method), iter(range(9)))
    )
    with pytest.raises(KeyboardInterrupt):
        file_reader.scan_files(tmp_path, files)

    assert threading.active_count() == running


@pytest.mark.parametrize("small", [3], indirect=True)
def test_an_interrupt_comes_before_the_error_of_another_thread(
    tmp_path: Path, files: list[tuple[Scan, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, main_reads = threading.active_count(), threading.Event()

    def failing(fd: int, buffers: list[memoryview], at: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            main_reads.wait(20)
            raise OSError(errno.EIO, "Input/output error")
        main_reads.set()
        while threading.active_count() > running:
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(file_reader, "_preadv", failing)
    with pytest.raises(KeyboardInterrupt):
        file_reader.scan_files(tmp_path, files)


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("small", [3], indirect=True)
def test_files_are_read_where_threads_cannot_be_started(
    tmp_path: Path, files: list[tuple[Scan, str]], monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real, calls = threading.Thread.start, iter(range(9))

    def refused(thread: threading.Thread) -> None:
        if next(calls) >= most:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    file_reader.scan_files(tmp_path, files)
    assert is_filled(files)
