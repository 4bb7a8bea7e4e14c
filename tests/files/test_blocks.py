"""Large files: written and read in blocks by several threads, and every byte of them is verified."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import math
import mmap
import os
import secrets
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resumable import CannotRead, CheckpointDamaged, SaveFailed
from resumable.files import block_queue, disk, file_reader, large_files
from resumable.files.file_reader import Lane, Target
from resumable.files.large_files import Content, Way, Written

PAGE = mmap.PAGESIZE
WAYS: list[Way] = ["uncached", "paced", "direct", "plain"]
DATA = bytes(range(256)) * 40 + b"the end"
"""Several blocks and many pieces, as `small` has them, and a last one that is not whole."""


class Sizes(NamedTuple):
    block: int = 1000
    piece: int = 300
    threads: int = 3


@contextlib.contextmanager
def sized(sizes: Sizes) -> Iterator[None]:
    """Let files be as large as they have to be for blocks and threads, and links be worth it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_files, "BLOCK", sizes.block)
        patch.setattr(file_reader, "_PIECE", sizes.piece)
        patch.setattr(block_queue, "_WRITERS", sizes.threads)
        patch.setattr(file_reader, "_READERS", sizes.threads)
        patch.setattr(file_reader, "_WORTH_A_THREAD", 1)
        patch.setattr(large_files, "_PREALLOCATE", 1)
        patch.setattr(large_files, "_WORTH_A_LINK", 0)
        yield


@pytest.fixture(params=[1, 3], ids=["alone", "threads"])
def small(request: pytest.FixtureRequest) -> Iterator[None]:
    """Have small blocks, and one thread or several."""
    with sized(Sizes(threads=request.param)):
        yield


def in_pages(data: bytes) -> memoryview:
    """Return the bytes in memory that begins a page, as the image does."""
    memory = memoryview(mmap.mmap(-1, max(len(data), 1)))[: len(data)]
    memory[:] = data
    return memory


def put(path: Path, content: Content, way: Way = "paced") -> Written:
    """Write one file."""
    return block_queue.write(path.parent, {path.name: content}, way)[path.name]


def is_possible(way: Way) -> bool:
    """Whether this system can write in that way."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            put(Path(folder) / "file", Content(in_pages(bytes(PAGE))), way)
        except OSError:
            return False
    return True


WAYS_HERE = [way for way in WAYS if is_possible(way)]


def failing(code: int) -> Callable[..., Any]:
    """Return a function that always fails."""

    def fail(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def recorded(patch: pytest.MonkeyPatch, module: Any, name: str) -> list[tuple[Any, ...]]:
    """Note the arguments of each call of a function."""
    calls: list[tuple[Any, ...]] = []
    real = getattr(module, name)

    def recording(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return real(*args, **kwargs)

    patch.setattr(module, name, recording)
    return calls


def digest_of(data: bytes) -> str:
    """Return the digest of a file as the format describes it."""
    found = [
        xxhash.xxh3_128(data[at : at + large_files.BLOCK]).digest()
        for at in range(0, len(data), large_files.BLOCK)
    ]
    return (
        xxhash.xxh3_128(b"".join(found)).hexdigest() if len(found) > 1 else xxhash.xxh3_128(data).hexdigest()
    )


# The digest


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 2000, 2001, 10_000])
@pytest.mark.usefixtures("small")
def test_the_digest_of_a_file_is_that_of_its_blocks_digests(tmp_path: Path, size: int) -> None:
    data = secrets.token_bytes(size)

    written = put(tmp_path / "file", Content(data))

    assert large_files.digest(data) == written.digest == digest_of(data)
    assert written[:3] == (tmp_path / "file", size, written.blocks)
    assert len(written.blocks) == max(1, math.ceil(size / 1000))


def test_a_file_of_at_most_sixteen_mebibytes_has_the_plain_digest() -> None:
    data = bytes(16 << 20)
    assert large_files.digest(data) == xxhash.xxh3_128(data).hexdigest()
    whole, rest = xxhash.xxh3_128(data).digest(), xxhash.xxh3_128(b"\0").digest()
    assert large_files.digest(data + b"\0") == xxhash.xxh3_128(whole + rest).hexdigest()


# Writing


@pytest.mark.parametrize("way", WAYS_HERE)
@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 5 * PAGE, 5 * PAGE + 17])
@pytest.mark.parametrize("memory", [bytes, bytearray, in_pages, lambda data: in_pages(b"x" + data)[1:]])
def test_the_bytes_are_the_same_whatever_the_way(
    tmp_path: Path, way: Way, size: int, memory: Callable[[bytes], Any]
) -> None:
    data = secrets.token_bytes(size)
    with sized(Sizes(block=2 * PAGE)):
        written = put(tmp_path / "file", Content(memory(data)), way)

        assert (tmp_path / "file").read_bytes() == data
        assert (written.size, written.digest) == (size, digest_of(data))


def test_only_the_rest_of_a_page_is_written_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[tuple[int, int, bool]] = []
    real = large_files._pwrite

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        passed.append((at, len(data), bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)))
        return real(fd, data, at)

    monkeypatch.setattr(large_files, "_pwrite", pwrite)
    with sized(Sizes(block=2 * PAGE, threads=1)):
        put(tmp_path / "file", Content(in_pages(bytes(3 * PAGE + 5))), "direct")

    assert passed == [(0, 2 * PAGE, True), (2 * PAGE, PAGE, True), (3 * PAGE, 5, False)]


@pytest.mark.parametrize("size", [0, 1, 3 * PAGE, 5 * PAGE + 17])
def test_a_file_is_received_in_pieces_with_the_digest_of_a_written_one(tmp_path: Path, size: int) -> None:
    data = secrets.token_bytes(size)
    with sized(Sizes(block=2 * PAGE)):
        found = large_files.receive(tmp_path / "file", size, lambda begin, end: data[begin:end], PAGE, 2)

        assert (tmp_path / "file").read_bytes() == data
        assert found == digest_of(data)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_part_that_does_not_come_ends_what_is_received(tmp_path: Path, threads: int) -> None:
    has_failed, read = threading.Event(), []

    def part(begin: int, end: int) -> bytes:
        read.append(begin)
        if begin == 1000 * (threads - 1):
            has_failed.set()
            raise RuntimeError("gone")
        has_failed.wait()
        time.sleep(0.5)  # The other thread has the time to note its error, and to go on if it can
        return bytes(end - begin)

    with sized(Sizes()), pytest.raises(RuntimeError, match="gone"):
        large_files.receive(tmp_path / "file", 1_000_000, part, PAGE, threads)

    assert len(read) <= threads


def test_the_whole_content_is_waited_for() -> None:
    waited = list[int]()

    assert Content(DATA, waited.append).whole() == Content(DATA).whole() == DATA
    assert waited == [len(DATA)]


@pytest.mark.parametrize("way", WAYS_HERE)
@pytest.mark.usefixtures("small")
def test_written_only_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    real = large_files._pwrite
    monkeypatch.setattr(large_files, "_pwrite", lambda fd, data, at: real(fd, data[:7], at))

    put(tmp_path / "file", Content(DATA), way)

    assert (tmp_path / "file").read_bytes() == DATA


@pytest.mark.usefixtures("small")
def test_a_file_that_is_there_is_never_written_again(tmp_path: Path) -> None:
    before = put(tmp_path / "parent", Content(b"other"))
    (tmp_path / "file").write_bytes(b"committed")

    for content in (Content(b"other"), Content(b"other", None, before)):
        with pytest.raises(FileExistsError):
            put(tmp_path / "file", content)

    assert (tmp_path / "file").read_bytes() == b"committed"


@pytest.mark.parametrize("way", WAYS_HERE)
@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.usefixtures("small")
def test_a_file_or_share_is_flushed_once_after_its_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way, is_shared: bool
) -> None:
    content, count = Content(DATA), 11
    if is_shared:
        large_files.create(tmp_path / "file", len(DATA))
        content, count = shared(DATA, 2, 5)[1], 3
        # Where a disk cannot reserve, the C library writes to every page, which another may be writing.
        monkeypatch.setattr(os, "posix_fallocate", failing(errno.EIO))
    events: list[str] = []
    write, uncached, fsync = large_files._pwrite, large_files._pwrite_uncached, os.fsync
    monkeypatch.setattr(large_files, "_pwrite", lambda *a: (write(*a), events.append("write"))[0])
    monkeypatch.setattr(large_files, "_pwrite_uncached", lambda *a: (uncached(*a), events.append("write"))[0])
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), events.append("fsync"))[0])

    put(tmp_path / "file", content, way)

    assert events == ["write"] * count + ["fsync"]


class Filling:
    """Memory that is filled only when somebody waits for it."""

    def __init__(self, data: bytes) -> None:
        self.memory = in_pages(bytes(len(data)))
        self.ends: list[int] = []
        self._data, self._guard = data, threading.Lock()

    def ready(self, end: int) -> None:
        with self._guard:
            self.ends.append(end)
            self.memory[:end] = self._data[:end]


@pytest.mark.parametrize("way", WAYS_HERE)
@pytest.mark.parametrize("threads", [1, 3])
def test_no_byte_is_looked_at_before_it_is_there(tmp_path: Path, way: Way, threads: int) -> None:
    data = secrets.token_bytes(7 * PAGE + 11)
    filling = Filling(data)
    with sized(Sizes(block=2 * PAGE, threads=threads)):
        written = put(tmp_path / "file", Content(filling.memory, filling.ready), way)

        assert (tmp_path / "file").read_bytes() == data
        assert written.digest == digest_of(data)
    assert sorted(filling.ends) == [2 * PAGE, 4 * PAGE, 6 * PAGE, len(data)]


ERRORS = [
    OSError(errno.EIO, "broken"),
    SaveFailed("changed", fix="again"),
    ZeroDivisionError(),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("way", WAYS_HERE)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_in_one_thread_ends_the_write_and_nothing_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way, error: BaseException, threads: int
) -> None:
    def ready(end: int) -> None:
        if end == 3 * PAGE:
            raise error
        if end > 3 * PAGE:
            time.sleep(0.002)

    flushed, written = recorded(monkeypatch, os, "fsync"), recorded(monkeypatch, large_files, "_pwrite")
    descriptors, running = os.listdir("/dev/fd"), threading.active_count()
    with sized(Sizes(block=PAGE, threads=threads)), pytest.raises(type(error)) as caught:
        put(tmp_path / "file", Content(in_pages(bytes(200 * PAGE)), ready), way)

    assert caught.value is error
    assert flushed == []
    assert len(written) < 50
    assert (len(os.listdir("/dev/fd")), threading.active_count()) == (len(descriptors), running)


@pytest.mark.usefixtures("small")
def test_a_failed_write_names_it_and_flushes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = recorded(monkeypatch, os, "fsync")
    monkeypatch.setattr(large_files, "_pwrite", failing(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device: '.*weights'"):
        put(tmp_path / "weights", Content(DATA))

    assert flushed == []


@pytest.mark.parametrize("way", WAYS_HERE)
@pytest.mark.usefixtures("small")
def test_a_full_disk_says_so_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    asked = []
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device: '.*weights'"):
        put(tmp_path / "weights", Content(DATA, asked.append), way)

    assert asked == []


def test_a_file_that_could_not_be_made_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        time.sleep(0.1)  # Meanwhile the other thread comes to make the file, too
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    opened = recorded(monkeypatch, os, "open")
    with sized(Sizes(threads=2)), pytest.raises(OSError, match="full"):
        put(tmp_path / "file", Content(DATA))

    assert [path for path, *_ in opened] == [tmp_path / "file"]


@pytest.mark.parametrize("name", ["posix_fallocate", "posix_fadvise"])
@pytest.mark.parametrize("code", [None, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
@pytest.mark.usefixtures("small")
def test_a_disk_or_system_that_cannot_reserve_or_advise_is_written_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int | None
) -> None:
    monkeypatch.setattr(os, name, failing(code)) if code else monkeypatch.delattr(os, name)

    put(tmp_path / "file", Content(DATA), "paced")

    assert (tmp_path / "file").read_bytes() == DATA


# What several write


def shared(data: bytes, *edges: int) -> list[Content]:
    """Return the shares of a file that begin or end at some blocks."""
    cuts = [edge * large_files.BLOCK for edge in (0, *edges)] + [len(data)]
    return [
        Content(in_pages(data[begin:end]), begin=begin, size=len(data))
        for begin, end in itertools.pairwise(cuts)
    ]


@pytest.mark.parametrize("way", WAYS_HERE)
@pytest.mark.parametrize("edges", [(), (1,), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("size", [7 * PAGE, 7 * PAGE + 11, 8 * PAGE])
def test_shares_make_the_same_file(tmp_path: Path, way: Way, edges: tuple[int, ...], size: int) -> None:
    data = secrets.token_bytes(size)
    with sized(Sizes(block=2 * PAGE)):
        if edges:
            large_files.create(tmp_path / "file", size)
        shares = shared(data, *edges)
        found = [put(tmp_path / "file", share, way).blocks for share in reversed(shares)]

        assert (tmp_path / "file").read_bytes() == data
        expected = put(tmp_path / "one", Content(data)).blocks
    assert [*itertools.chain(*reversed(found))] == expected


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize(("way", "module", "name"), [("uncached", os, "pwritev"), ("direct", fcntl, "fcntl")])
def test_a_way_that_the_disk_refuses_falls_back_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way, module: Any, name: str, code: int
) -> None:
    monkeypatch.setattr(module, name, failing(code))

    with sized(Sizes(block=2 * PAGE)):
        written = put(tmp_path / "file", Content(in_pages(bytes(5 * PAGE))), way)

    assert (tmp_path / "file").read_bytes() == bytes(5 * PAGE)
    assert written.way == "paced"
    assert way in large_files.WAYS


@pytest.mark.skipif("direct" not in WAYS_HERE, reason="no O_DIRECT")
def test_a_refused_direct_write_uses_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[int] = []

    def pwrite(fd: int, data: memoryview, at: int) -> int:
        flags.append(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if flags[-1]:
            raise OSError(errno.EINVAL, "unaligned")
        return os.pwrite(fd, data, at)

    monkeypatch.setattr(large_files, "_pwrite", pwrite)

    written = put(tmp_path / "file", Content(in_pages(bytes(PAGE))), "direct")

    assert (written.way, flags) == ("paced", [os.O_DIRECT, 0])


def test_another_error_is_not_taken_for_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", failing(errno.EIO))

    with pytest.raises(OSError, match="Input/output"):
        put(tmp_path / "file", Content(DATA), "uncached")


def test_several_write_their_shares_at_the_same_time_each_in_its_own_way(tmp_path: Path) -> None:
    data = secrets.token_bytes(300 * PAGE + 5)
    with sized(Sizes(block=2 * PAGE)):
        large_files.create(tmp_path / "file", len(data))
        jobs = zip(shared(data, 30, 70, 110), itertools.cycle(WAYS_HERE), strict=False)
        writers = [threading.Thread(target=put, args=(tmp_path / "file", share, way)) for share, way in jobs]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(20)

    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("size", [0, 1, 5000, 1 << 20])
def test_a_created_file_has_size_and_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    asked = recorded(monkeypatch, os, "posix_fallocate")
    before = os.umask(0o027)
    try:
        large_files.create(tmp_path / "file", size)
    finally:
        os.umask(before)

    found = (tmp_path / "file").stat()
    assert (found.st_size, stat.S_IMODE(found.st_mode)) == (size, 0o640)
    assert [(begin, end) for _, begin, end in asked] == [(0, size)] * (size >= 1 << 20)
    with pytest.raises(FileExistsError):
        large_files.create(tmp_path / "file", size)


def test_a_full_disk_says_so_as_the_file_is_created(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left on device: '.*weights'"):
        large_files.create(tmp_path / "weights", 1 << 20)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS], ids=errno.errorcode.get)
def test_a_file_without_room_has_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(code))

    large_files.create(tmp_path / "file", 1 << 20)

    assert (tmp_path / "file").stat().st_size == 1 << 20


@pytest.mark.parametrize("threads", [1, 3])
def test_a_share_is_waited_for_from_its_own_first_byte_on(tmp_path: Path, threads: int) -> None:
    filling = Filling(secrets.token_bytes(5 * PAGE))
    with sized(Sizes(block=2 * PAGE, threads=threads)):
        share = Content(filling.memory, filling.ready, begin=4 * PAGE, size=9 * PAGE)
        large_files.create(tmp_path / "file", 9 * PAGE)
        put(tmp_path / "file", share)

    assert sorted(filling.ends) == [2 * PAGE, 4 * PAGE, 5 * PAGE]
    assert (tmp_path / "file").read_bytes() == bytes(4 * PAGE) + filling.memory


@pytest.mark.usefixtures("small")
def test_a_share_of_another_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    large_files.create(tmp_path / "file", 3000)

    with pytest.raises(SaveFailed, match="3,000 bytes, but this process has a share of 4,000") as told:
        put(tmp_path / "file", Content(b"x" * 1000, begin=1000, size=4000))

    assert "in every process" in told.value.fix
    assert (tmp_path / "file").read_bytes() == bytes(3000)
    with pytest.raises(FileNotFoundError):
        put(tmp_path / "missing", Content(b"x" * 1000, begin=1000, size=4000))


@pytest.mark.parametrize(
    ("begin", "count", "size"),
    [(500, 500, 2000), (0, 500, 2000), (1000, 1001, 2000), (2000, 0, 2000), (-1000, 1000, 2000)],
)
@pytest.mark.usefixtures("small")
def test_only_whole_blocks_can_be_shared(begin: int, count: int, size: int) -> None:
    with pytest.raises(ValueError, match="no whole blocks"):
        Content(bytes(count), begin=begin, size=size)


@pytest.mark.usefixtures("small")
def test_a_share_is_never_taken_for_a_file(tmp_path: Path) -> None:
    before = put(tmp_path / "parent", Content(DATA[:2000]))

    for share in (Content(DATA[:1000], None, before, size=2000), Content(bytes(1000), begin=1000, size=2000)):
        with pytest.raises(FileNotFoundError):
            put(tmp_path / "file", share)

    assert not (tmp_path / "file").exists()


@pytest.mark.usefixtures("small")
def test_a_file_is_not_compared_with_a_share_of_it(tmp_path: Path) -> None:
    large_files.create(tmp_path / "parent", len(DATA))
    before = put(tmp_path / "parent", Content(DATA[:1000], size=len(DATA)))

    written = put(tmp_path / "file", Content(DATA, None, before))

    assert (tmp_path / "file").read_bytes() == DATA
    assert written.digest == digest_of(DATA)


# Several files


@pytest.mark.usefixtures("small")
def test_among_changed_files_the_unchanged_ones_are_links(tmp_path: Path) -> None:
    befores = block_queue.write(tmp_path, {name: Content(DATA) for name in "abcd"})
    (after := tmp_path / "after").mkdir()
    changed = DATA[:-1] + b"!"
    data = {"a": DATA, "b": changed, "c": DATA, "d": changed}

    block_queue.write(after, {name: Content(data[name], None, befores[name]) for name in data})

    assert {name: (after / name).read_bytes() for name in data} == data
    assert [inode(after / name) == inode(tmp_path / name) for name in data] == [True, False, True, False]


def test_a_way_refused_to_two_threads_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def refused(fd: int, data: memoryview, at: int) -> int:
        both.wait(20)
        raise OSError(errno.EOPNOTSUPP, "refused")

    monkeypatch.setattr(large_files, "_pwrite_uncached", refused)
    with sized(Sizes(block=6000, threads=2)):
        written = put(tmp_path / "file", Content(DATA), "uncached")

    assert (tmp_path / "file").read_bytes() == DATA
    assert written.way == "paced"


@pytest.mark.usefixtures("small")
def test_a_file_is_written_where_no_thread_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(block_queue, "_WRITERS", 2)
    monkeypatch.setattr(threading.Thread, "start", refused)
    written = put(tmp_path / "file", Content(DATA))

    assert (tmp_path / "file").read_bytes() == DATA
    assert written.digest == digest_of(DATA)


def test_no_thread_writes_on_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, running = threading.Thread.start, threading.active_count()

    def interrupted(thread: threading.Thread) -> None:
        real(thread)
        signal.raise_signal(signal.SIGINT)

    def slow(fd: int, data: memoryview, at: int) -> int:
        time.sleep(0.05)  # It is still at work when the interrupt comes
        return os.pwrite(fd, data, at)

    monkeypatch.setattr(large_files, "_pwrite", slow)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with sized(Sizes(threads=2)), pytest.raises(KeyboardInterrupt):
        put(tmp_path / "file", Content(DATA))

    assert threading.active_count() == running


# What has not changed


def inode(path: Path) -> int:
    """Return what tells whether two names are of one file."""
    return path.stat().st_ino


@pytest.mark.parametrize("way", WAYS_HERE)
@pytest.mark.parametrize("data", [DATA, DATA[:1000], b"x", b""], ids=len)
@pytest.mark.usefixtures("small")
def test_what_has_not_changed_is_a_link_to_what_was_written_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way, data: bytes
) -> None:
    before = put(tmp_path / "parent", Content(data), way)
    written = recorded(monkeypatch, large_files, "_pwrite")

    after = put(tmp_path / "child", Content(data, None, before), way)
    third = put(tmp_path / "grandchild", Content(data, None, after), way)

    assert inode(tmp_path / "parent") == inode(tmp_path / "child") == inode(tmp_path / "grandchild")
    assert (after, third) == (
        before._replace(path=tmp_path / "child", way=None),
        before._replace(path=tmp_path / "grandchild", way=None),
    )
    assert written == []


@pytest.mark.parametrize("position", [0, 999, 1000, 5500, len(DATA) - 1])
@pytest.mark.usefixtures("small")
def test_one_changed_byte_is_written_into_a_file_of_its_own(tmp_path: Path, position: int) -> None:
    before = put(tmp_path / "parent", Content(DATA))
    data = bytearray(DATA)
    data[position] ^= 1

    after = put(tmp_path / "child", Content(data, None, before))

    assert inode(tmp_path / "parent") != inode(tmp_path / "child")
    assert (tmp_path / "parent").read_bytes() == DATA
    assert (tmp_path / "child").read_bytes() == data
    assert after.digest == digest_of(data) != before.digest


@pytest.mark.parametrize(
    "data", [DATA[:5000], DATA[:3000], DATA[:3999], DATA[:4001], DATA[:1000], b""], ids=len
)
@pytest.mark.usefixtures("small")
def test_content_of_another_length_is_written(tmp_path: Path, data: bytes) -> None:
    before = put(tmp_path / "parent", Content(DATA[:4000]))

    after = put(tmp_path / "child", Content(data, None, before))

    assert (tmp_path / "child").read_bytes() == data
    assert after.digest == digest_of(data)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK], ids=errno.errorcode.get)
@pytest.mark.usefixtures("small")
def test_content_without_a_link_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    before = put(tmp_path / "parent", Content(DATA))
    monkeypatch.setattr(os, "link", failing(code))

    after = put(tmp_path / "child", Content(DATA, None, before))

    assert inode(tmp_path / "parent") != inode(tmp_path / "child")
    assert (tmp_path / "child").read_bytes() == DATA
    assert after[:3] == (tmp_path / "child", *before[1:3])


@pytest.mark.usefixtures("small")
def test_where_the_one_before_was_pruned_the_content_is_written(tmp_path: Path) -> None:
    before = put(tmp_path / "parent", Content(DATA))
    (tmp_path / "parent").unlink()

    put(tmp_path / "child", Content(DATA, None, before))

    assert (tmp_path / "child").read_bytes() == DATA


@pytest.mark.usefixtures("small")
def test_what_is_compared_with_the_last_save_is_waited_for_too(tmp_path: Path) -> None:
    before = put(tmp_path / "parent", Content(DATA))
    filling = Filling(DATA)

    put(tmp_path / "child", Content(filling.memory, filling.ready, before))

    assert inode(tmp_path / "parent") == inode(tmp_path / "child")
    assert {*filling.ends} == {*range(1000, 10_001, 1000), len(DATA)}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("touch", [b"another content", b""])
def test_a_file_that_another_process_has_touched_is_not_shared(tmp_path: Path, touch: bytes) -> None:
    before = put(tmp_path / "parent", Content(DATA))
    with open(tmp_path / "parent", "r+b") as file:
        file.write(touch or DATA)

    put(tmp_path / "child", Content(DATA, None, before))

    assert (tmp_path / "child").read_bytes() == DATA
    assert inode(tmp_path / "parent") != inode(tmp_path / "child")


@pytest.mark.parametrize(("size", "is_shared"), [((1 << 20) - 1, False), (1 << 20, True)])
def test_a_small_file_is_not_shared(tmp_path: Path, size: int, is_shared: bool) -> None:
    data = bytes(size)
    before = put(tmp_path / "parent", Content(data))

    put(tmp_path / "child", Content(data, None, before))

    assert (inode(tmp_path / "parent") == inode(tmp_path / "child")) == is_shared


# Reading


def put_file(folder: Path, data: bytes = DATA) -> tuple[Path, str, int, str]:
    """Write a file, and return what describes it."""
    (folder / "file").write_bytes(data)
    return folder, "file", len(data), digest_of(data)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("data", [b"", b"x", DATA[:1000], DATA[:1001], DATA], ids=len)
def test_what_is_read_is_private_memory_that_the_file_cannot_change(tmp_path: Path, data: bytes) -> None:
    found = file_reader.read(*put_file(tmp_path, data))
    with open(tmp_path / "file", "r+b") as file:
        file.write(b"CHANGED")

    assert found == data
    assert not found.readonly


class Taking:
    """Takes what is read of a range, from several threads, piece by piece."""

    def __init__(self, size: int) -> None:
        self.found = bytearray(size)
        self.times = [0] * size
        self.lanes: set[int] = set()
        self._guard = threading.Lock()

    def take(self, lane: Lane, at: int, piece: memoryview) -> None:
        with self._guard:
            self.found[at : at + len(piece)] = piece
            self.lanes.add(id(lane))
            for number in range(at, at + len(piece)):
                self.times[number] += 1


class SmallLane(Lane):
    def __init__(self) -> None:
        self._few = memoryview(bytearray(7))

    def room(self, size: int) -> memoryview:
        return self._few[:size]


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, str]]]:
    """Draw the size of a file, and ranges of it that do not overlap."""
    size = draw(st.integers(0, 60))
    edges = sorted(draw(st.lists(st.integers(0, size), max_size=10)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    if draw(st.booleans()):
        # Without gaps
        pairs = list(zip([0, *edges], [*edges, size], strict=True))
    kinds = st.sampled_from(["memory", "take", "both"])
    return size, [(begin, end, draw(kinds)) for begin, end in pairs]


sizes = st.builds(Sizes, st.integers(1, 25), st.integers(1, 12), st.integers(1, 3))


def targets_of(wanted: Sequence[tuple[int, int, str]]) -> tuple[list[Target], list[memoryview | Taking]]:
    targets: list[Target] = []
    holders: list[memoryview | Taking] = []
    for begin, end, kind in wanted:
        memory = None if kind == "take" else memoryview(bytearray(end - begin))
        taking = None if kind == "memory" else Taking(end - begin)
        targets.append(Target(begin, end, memory, taking and taking.take))
        holders += [holder for holder in (memory, taking) if holder is not None]
    return targets, holders


def assert_filled(data: bytes, targets: Sequence[Target]) -> None:
    for target in targets:
        expected = data[target.begin : target.end]
        if target.memory is not None:
            assert target.memory == expected
        if target.take is not None:
            taking = target.take.__self__  # type: ignore[attr-defined]
            assert (taking.found, taking.times) == (expected, [1] * len(expected))


@settings(deadline=None, database=None, max_examples=40)
@given(ranges(), sizes, st.sampled_from([Lane, SmallLane]), st.data())
@example((60, [(0, 60, "memory")]), Sizes(25, 12, 1), Lane, None)
@example((60, [(0, 0, "take"), (10, 50, "both"), (50, 50, "memory")]), Sizes(10, 3, 3), SmallLane, None)
def test_every_range_of_a_file_gets_its_bytes_and_gaps_are_verified(
    drawn: tuple[int, list[tuple[int, int, str]]],
    sizes: Sizes,
    lane: type[Lane],
    more: st.DataObject | None,
) -> None:
    (size, wanted), data = drawn, secrets.token_bytes(drawn[0])
    with tempfile.TemporaryDirectory() as name, sized(sizes):
        described = put_file(Path(name), data)
        targets, _ = targets_of(wanted)

        digests = file_reader.scan(*described, targets, lane)

        assert large_files.fold(digests) == digest_of(data)
        assert_filled(data, targets)

        again, _ = targets_of(wanted[1:2] if more else wanted)
        file_reader.scan_again(*described[:3], digests, again, lane)
        assert_filled(data, again)

        if size and more:
            position = more.draw(st.integers(0, size - 1))
            (Path(name) / "file").write_bytes(
                data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :]
            )
            with pytest.raises(CheckpointDamaged, match=r"file has the digest \w+, its manifest says"):
                file_reader.scan(*described, targets_of(wanted)[0], lane)
            if any(begin <= position < end for begin, end, _ in wanted):
                with pytest.raises(CheckpointDamaged, match="file has changed since it was verified"):
                    file_reader.scan_again(*described[:3], digests, targets_of(wanted)[0], lane)


@pytest.mark.usefixtures("small")
def test_two_blocks_that_have_changed_places_are_found(tmp_path: Path) -> None:
    described = put_file(tmp_path)
    (tmp_path / "file").write_bytes(DATA[1000:2000] + DATA[:1000] + DATA[2000:])

    with pytest.raises(CheckpointDamaged, match="file has the digest"):
        file_reader.scan(*described)


READERS: dict[str, Callable[[Path, str, int, str], object]] = {
    "read": file_reader.read,
    "scan": file_reader.scan,
    "scan_again": lambda folder, name, size, digest: file_reader.scan_again(
        folder, name, size, [bytes.fromhex(digest)], [Target(0, size, memoryview(bytearray(size)))]
    ),
    "read_start": lambda folder, name, size, digest: file_reader.read_start(folder, name, size, 3),
}


def link_out(path: Path) -> None:
    (path.parent.parent / "outside").write_bytes(b"content")
    path.symlink_to("../outside")


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda path: path.write_bytes(b"conten"), "file has 6 bytes, its manifest says 7"),
    "extended": (lambda path: path.write_bytes(b"content!"), "file has 8 bytes, its manifest says 7"),
    "emptied": (Path.touch, "file has 0 bytes, its manifest says 7"),
    "missing": (lambda path: None, "file is missing"),
    "link": (link_out, "file cannot be read: .*symbolic links"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "file cannot be read: .*symbolic links"),
    "folder": (Path.mkdir, "file cannot be read: Is a directory"),
    "pipe": (os.mkfifo, "file is not a regular file"),
    "socket": (put_socket, "file cannot be read: No such device"),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(("damage", "problem"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_and_what_to_do_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read: Callable[[Path, str, int, str], object],
    damage: Callable[[Path], object],
    problem: str,
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)  # A socket's path must be short
    damage(Path("file"))
    descriptors = os.listdir("/dev/fd")

    with pytest.raises(CheckpointDamaged, match=rf"(?s)folder is damaged: {problem}.*\nFix: resume='auto'"):
        read(folder, "file", 7, large_files.digest(b"content"))

    assert len(os.listdir("/dev/fd")) == len(descriptors)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_subfolder_that_is_a_link_is_not_followed(
    tmp_path: Path, read: Callable[[Path, str, int, str], object]
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"content")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "ranks").symlink_to("../outside")

    with pytest.raises(CheckpointDamaged, match="folder is damaged: ranks is a symbolic link"):
        read(tmp_path / "folder", "ranks/file", 7, large_files.digest(b"content"))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("read", [file_reader.read, file_reader.scan])
def test_a_file_that_shrinks_meanwhile_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[..., object]
) -> None:
    described = put_file(tmp_path)
    real = file_reader._preadv

    def shrinking(fd: int, buffers: list[memoryview], at: int) -> int:
        os.truncate(tmp_path / "file", 5)
        return real(fd, buffers, at)

    monkeypatch.setattr(file_reader, "_preadv", shrinking)
    with pytest.raises(CheckpointDamaged, match=r"file cannot be read: the file ended \d+ bytes early"):
        read(*described)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("most", [1, 7, 299])
def test_read_only_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    real = file_reader._preadv
    monkeypatch.setattr(file_reader, "_preadv", lambda fd, buffers, at: real(fd, [buffers[0][:most]], at))

    assert file_reader.read(*put_file(tmp_path)) == DATA
    assert file_reader.read_start(tmp_path, "file", len(DATA), 2500) == DATA[:2500]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "code", [errno.EMFILE, errno.EACCES, errno.ENOMEM, errno.EIO], ids=errno.errorcode.get
)
@pytest.mark.parametrize(("module", "name"), [(os, "open"), (file_reader, "_preadv")])
def test_other_errors_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, module: Any, name: str
) -> None:
    described = put_file(tmp_path)
    monkeypatch.setattr(module, name, failing(code))

    with pytest.raises(CheckpointDamaged if code == errno.EIO else CannotRead, match=os.strerror(code)):
        file_reader.read(*described)


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.usefixtures("small")
def test_an_error_of_who_takes_the_bytes_ends_the_reading(tmp_path: Path, error: BaseException) -> None:
    taken = []

    def take(lane: Lane, at: int, piece: memoryview) -> None:
        taken.append(at)
        if at == 3000:
            raise error
        time.sleep(0.002)

    data = DATA * 10
    descriptors, running = os.listdir("/dev/fd"), threading.active_count()
    with pytest.raises(type(error)) as caught:
        file_reader.scan(*put_file(tmp_path, data), [Target(0, len(data), None, take)])

    assert caught.value is error
    assert len(taken) < len(data) // 300 // 2
    assert (len(os.listdir("/dev/fd")), threading.active_count()) == (len(descriptors), running)


@pytest.mark.parametrize("count", [0, 3, 7, 8, 2**62])
def test_the_start_of_a_file_is_never_more_than_the_file(tmp_path: Path, count: int) -> None:
    put_file(tmp_path, b"content")

    assert file_reader.read_start(tmp_path, "file", 7, count) == b"content"[:count]


@pytest.mark.parametrize("read", [READERS["read"], READERS["scan"], READERS["read_start"]])
@pytest.mark.parametrize("size", [0, 6, 8, 2**40, 2**62])
def test_a_size_that_is_only_claimed_takes_no_memory(
    tmp_path: Path, read: Callable[[Path, str, int, str], object], size: int
) -> None:
    put_file(tmp_path, b"content")

    with pytest.raises(CheckpointDamaged, match=rf"file has 7 bytes, its manifest says {size:,}"):
        read(tmp_path, "file", size, large_files.digest(b"content"))


def test_what_is_written_in_one_way_is_read_in_blocks_of_its_true_size(tmp_path: Path) -> None:
    data = in_pages(bytes(large_files.BLOCK) + secrets.token_bytes(70_001))
    for way in WAYS_HERE:
        written = put(tmp_path / way, Content(data), way)
        assert len(written.blocks) == 2
        assert file_reader.read(tmp_path, way, written.size, written.digest) == data
        assert disk.read_small(tmp_path, way) == data
