"""A folder on a real filesystem: what arrives is what was sent, or there is an error that says why."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from servers import S3, Place, ProxiedS3, Sftp
from test_remote import a_place, a_shelf  # noqa: F401 (pytest finds fixtures here)

from resumable import RemoteError
from resumable.remote import connection
from resumable.remote.storage import Store

ALL = pytest.mark.parametrize("place", ["memory", "file", "s3", "sftp", "sshfs"], indirect=True)
WITH_FOLDERS = pytest.mark.parametrize("place", ["memory", "file", "sftp", "sshfs"], indirect=True)
BODY = os.urandom(300_000)
LARGE = os.urandom(18 << 20)
HIDDEN = "hidden-from-all"


def nowhere(size: int) -> None:
    """Take no note of what is moved."""


@pytest.fixture
def there(place: Place) -> Store:
    """The store at a place."""
    return Store(place.url, place.options())


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A local file."""
    path = tmp_path / "here"
    path.write_bytes(BODY)
    return path


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A local file that is sent in parts."""
    path = tmp_path_factory.mktemp("large") / "here"
    path.write_bytes(LARGE)
    return path


class Broken:
    """A fresh folder in a bucket, reached through a proxy."""

    def __init__(self, server: ProxiedS3, bucket: str, folder: str) -> None:
        self.server, self.bucket, self.folder = server, bucket, folder
        self.rules, self.proxy = server.rules, server.proxy

    def store(self, patience: float = 60, **options: Any) -> Store:
        return Store(f"s3://{self.bucket}/{self.folder}", self.server.options(**options), patience=patience)

    def put(self, name: str, content: bytes) -> None:
        self.server.admin.put_object(Bucket=self.bucket, Key=f"{self.folder}/{name}", Body=content)

    def holds(self, name: str) -> bytes:
        found = self.server.admin.get_object(Bucket=self.bucket, Key=f"{self.folder}/{name}")
        content: bytes = found["Body"].read()
        return content

    def names(self) -> list[str]:
        found = self.server.admin.list_objects_v2(Bucket=self.bucket, Prefix=f"{self.folder}/")
        return [each["Key"].partition("/")[2] for each in found.get("Contents", [])]

    def uploads(self, prefix: str = "") -> list[str]:
        found = self.server.admin.list_multipart_uploads(Bucket=self.bucket, Prefix=prefix)
        return [each["Key"] for each in found.get("Uploads", [])]

    def begin_upload(self, key: str) -> None:
        self.server.admin.create_multipart_upload(Bucket=self.bucket, Key=key)

    def at_once(self) -> int:
        return max(self.proxy.seen.uploads_at_once().values(), default=0)


@pytest.fixture
def broken(proxied_s3: ProxiedS3, shelf: str) -> Broken:
    """A place that fails as a test says."""
    return Broken(proxied_s3, shelf, uuid.uuid4().hex)


# What is written is there.


@ALL
def test_nothing_is_an_empty_folder_and_a_missing_file_is_none(there: Store) -> None:
    assert there.sizes() == there.sizes("some/folder") == {}
    assert there.read("some/file", 100) is None
    there.remove("some/file")
    there.remove_folder("some")
    assert there.end_uploads("some") == 0


@ALL
def test_what_is_written_is_listed_and_read_and_replaced(there: Store) -> None:
    for content in (b"one", b"other", b""):
        there.write("run.json", content)
        assert there.read("run.json", 5) == content
    there.write("checkpoints/a/file", b"12")
    there.write("checkpoints/a/ranks/file", b"1234")
    assert there.sizes("checkpoints") == {"a/file": 2, "a/ranks/file": 4}
    assert there.sizes("checkpoints/a/ranks") == {"file": 4}
    assert there.sizes() == {"run.json": 0, "checkpoints/a/file": 2, "checkpoints/a/ranks/file": 4}


@ALL
def test_a_file_that_is_larger_than_makes_sense_is_not_read(there: Store) -> None:
    there.write("run.json", b"123")
    with pytest.raises(RemoteError, match=r"run\.json has 3 bytes; at most 2 make sense"):
        there.read("run.json", 2)


@ALL
def test_a_file_is_sent_and_read_in_pieces(there: Store, here: Path) -> None:
    sent: list[int] = []
    there.send(here, "a/ranks/file", sent.append)
    assert there.read_range("a/ranks/file", 0, len(BODY)) == BODY
    assert there.read_range("a/ranks/file", 1000, 200_000) == BODY[1000:200_000]
    assert sum(sent) == len(BODY)


@ALL
def test_an_empty_file_is_one_too(there: Store, tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    there.send(tmp_path / "here", "a/file", nowhere)
    assert there.sizes("a") == {"file": 0}
    assert there.read("a/file", 0) == b""


@ALL
@pytest.mark.quick(2)
def test_a_file_of_several_parts_arrives_as_it_is(there: Store, large: Path) -> None:
    told: list[int] = []
    there.send(large, "a/file", told.append)
    assert sum(told) == len(LARGE)
    assert len(told) > 2 or there.at_once == 1
    assert there.sizes("a") == {"file": len(LARGE)}
    assert there.read_range("a/file", 0, len(LARGE)) == LARGE


@ALL
def test_what_is_sent_replaces_what_was_there(there: Store, here: Path) -> None:
    there.write("a/file", b"x" * 400_000)
    there.send(here, "a/file", nowhere)
    assert there.read("a/file", len(BODY)) == BODY


@ALL
def test_a_file_is_copied_there_where_it_has_an_etag(there: Store, here: Path, place: Place) -> None:
    tag = there.send(here, "a/file", nowhere)
    assert (tag is not None) is (place.kind == "s3")
    is_copied = there.copy("a/file", tag, "b/ranks/file", len(BODY)) if tag else None
    assert there.sizes("b") == ({"ranks/file": len(BODY)} if is_copied else {})
    assert there.copy("a/missing", "tag", "b/missing", len(BODY)) is None


@ALL
def test_what_is_removed_is_gone_and_so_is_its_folder(there: Store) -> None:
    there.write("a/file", b"1")
    there.write("a/other", b"1")
    there.remove("a/file")
    there.remove_folder("a")
    assert there.sizes("a") == {"other": 1}
    there.remove("a/other")
    there.remove_folder("a")
    assert there.sizes() == {}


@ALL
@pytest.mark.quick(2)
def test_what_is_missing_where_it_has_to_be_is_an_error(there: Store) -> None:
    with pytest.raises(RemoteError, match=r"a/file cannot be read: ") as raised:
        there.read_range("a/file", 0, 3)
    assert raised.value.is_final


@WITH_FOLDERS
def test_what_a_killed_write_has_left_is_written_over(there: Store, place: Place) -> None:
    there.write("a/.run.json.part", b"half")
    there.write("a/run.json", b"whole")
    assert there.read("a/run.json", 5) == b"whole"
    assert (".run.json.part" in there.sizes("a")) is (place.kind == "memory")


@WITH_FOLDERS
def test_only_a_limited_depth_of_folders_are_looked_at(there: Store) -> None:
    there.write("a/b/c/d/file", b"1")
    there.write("a/b/c/d/e/file", b"1")
    assert there.sizes() == {"a/b/c/d/file": 1}


def test_what_is_no_file_is_not_listed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"1")
    assert Store(f"file://{tmp_path}").sizes() == {"file": 1}


def test_a_folder_that_goes_while_it_is_listed_does_not_hide_the_others(tmp_path: Path) -> None:
    class Vanishing(MemoryFileSystem):  # type: ignore[misc]
        protocol = "vanishing"

        def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
            if path.endswith("/b"):
                raise FileNotFoundError(path)
            return super().ls(path, detail=detail, **kwargs)

    fsspec.register_implementation("vanishing", Vanishing, clobber=True)
    there = Store(f"vanishing://{tmp_path.name}-vanishing")
    for folder in "abc":
        there.write(f"{folder}/file", b"1")
    assert there.sizes() == {"a/file": 1, "c/file": 1}


# What arrives.


@pytest.mark.heavy
def test_a_part_that_is_damaged_on_the_way_is_refused_and_sent_again(broken: Broken, large: Path) -> None:
    broken.rules.add("flip-request", method="PUT", path="partNumber=2", count=1)
    broken.store().send(large, "file", nowhere)
    assert broken.holds("file") == large.read_bytes()
    assert len(broken.proxy.seen.struck()) == 1


@pytest.mark.heavy
@pytest.mark.parametrize("is_large", [False, True])
def test_what_is_damaged_on_the_way_each_time_does_not_arrive(
    broken: Broken, here: Path, large: Path, is_large: bool
) -> None:
    broken.rules.add("flip-request", method="PUT")
    with pytest.raises(RemoteError, match="file cannot be written"):
        broken.store(patience=2).send(large if is_large else here, "file", nowhere)
    assert broken.names() == []


@pytest.mark.heavy
def test_a_file_that_is_shorter_than_it_was_sent_is_an_error(broken: Broken, here: Path) -> None:
    with pytest.raises(RemoteError, match=r"3 bytes have arrived instead of 300,000"):
        broken.store(patience=4).send(here, "file", lambda size: broken.put("file", b"123"))


def test_a_file_that_was_written_since_it_was_sent_is_not_copied(broken: Broken, here: Path) -> None:
    there = broken.store()
    assert (tag := there.send(here, "a", nowhere))
    broken.put("a", BODY[::-1])
    assert there.copy("a", tag, "b", len(BODY)) is None


@pytest.mark.heavy
def test_a_file_in_parts_is_copied_and_a_copy_of_the_copy_too(broken: Broken, large: Path) -> None:
    there = broken.store()
    tag, names = there.send(large, "a", nowhere), "abc"
    for source, name in itertools.pairwise(names):
        assert tag
        tag = there.copy(source, tag, name, len(LARGE))
        assert broken.holds(name) == LARGE


class Telling(MemoryFileSystem):  # type: ignore[misc]
    """A filesystem whose methods a test replaces."""

    protocol = "telling"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]


@pytest.fixture
def telling() -> type[Telling]:
    fsspec.register_implementation("telling", Telling, clobber=True)
    return Telling


@pytest.mark.heavy
def test_less_than_was_asked_for_is_an_error(telling: type[Telling]) -> None:
    there = Store("telling://exp", patience=2)
    there.write("file", b"123")
    with pytest.raises(RemoteError, match="file cannot be read: 2 bytes came instead of 9"):
        there.read_range("file", 1, 10)


# Trouble on the way.

FAULTS = [
    {"fault": "status", "status": 500},
    {"fault": "status", "status": 503},
    {"fault": "reset"},
    {"fault": "reset-request"},
    {"fault": "reset-answer"},
    {"fault": "lose-answer"},
    {"fault": "truncate-answer"},
    {"fault": "flip-request"},
]


@pytest.mark.quick(6)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault.values())))
def test_a_file_gets_there_in_spite_of_what_goes_wrong_once(
    broken: Broken, here: Path, fault: dict[str, Any]
) -> None:
    told: list[int] = []
    broken.rules.add(**fault, method="PUT", count=1)
    broken.store().send(here, "file", told.append)
    assert broken.holds("file") == BODY
    assert sum(told) == len(BODY)
    assert broken.at_once() == 1
    assert broken.proxy.seen.struck() or fault["fault"] in ("reset-answer", "truncate-answer")


@pytest.mark.heavy
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault.values())))
def test_a_file_in_parts_gets_there_in_spite_of_what_goes_wrong_once(
    broken: Broken, large: Path, fault: dict[str, Any]
) -> None:
    told: list[int] = []
    broken.rules.add(**fault, path="file", after=2, count=1)
    broken.store().send(large, "file", told.append)
    assert broken.holds("file") == LARGE
    assert sum(told) == len(LARGE)
    assert broken.at_once() == 1
    assert broken.uploads(f"{broken.folder}/") == []


@pytest.mark.parametrize("fault", [f for f in FAULTS if "request" not in str(f["fault"])], ids=str)
@pytest.mark.quick(3)
def test_a_file_is_read_in_spite_of_what_goes_wrong_once(broken: Broken, fault: dict[str, Any]) -> None:
    there = broken.store()
    broken.put("file", BODY)
    broken.rules.add(**fault, method="GET", count=1)
    assert there.read("file", len(BODY)) == BODY
    broken.rules.add(**fault, method="GET", count=1)
    assert there.read_range("file", 0, len(BODY)) == BODY
    broken.rules.add(**fault, method="GET", count=1)
    assert there.sizes() == {"file": len(BODY)}
    assert len(broken.proxy.seen.struck()) == 3


@pytest.mark.heavy
@pytest.mark.parametrize("method", ["PUT", "HEAD", "GET"])
def test_what_stalls_is_an_error_as_soon_as_the_patience_is_over(
    broken: Broken, here: Path, method: str
) -> None:
    there = broken.store(patience=1)
    broken.put("other", BODY)
    broken.rules.add("stall", method=method)
    began = time.monotonic()
    call = (
        partial(there.read, "other", 1 << 20)
        if method == "GET"
        else partial(there.send, here, "file", nowhere)
    )
    with pytest.raises(
        RemoteError, match=r"cannot be (written|read): nothing has moved for 1(\.1)? s"
    ) as raised:
        call()
    assert time.monotonic() - began < 10
    assert not raised.value.is_final


@pytest.mark.heavy
def test_a_part_that_stalls_is_an_error_and_nothing_arrives_later(broken: Broken, large: Path) -> None:
    there = broken.store(patience=1)
    broken.rules.add("stall", method="PUT", path="partNumber=2")
    with pytest.raises(RemoteError, match="nothing has moved for"):
        there.send(large, "file", nowhere)
    end = time.monotonic() + 20
    while any(one.ended is None for one in broken.proxy.seen.of("PUT")):
        assert time.monotonic() < end, "the upload goes on"
    broken.rules.clear()
    assert broken.names() == []
    while not broken.names():
        # On a busy machine a second may be too short for what does not stall
        with contextlib.suppress(RemoteError):
            there.send(large, "file", nowhere)
    assert broken.holds("file") == LARGE
    assert broken.at_once() == 1
    assert broken.uploads(f"{broken.folder}/") == []


@pytest.mark.heavy
def test_a_remote_that_is_gone_and_comes_back_is_waited_for(broken: Broken) -> None:
    broken.proxy.close()
    back = threading.Timer(1, broken.proxy.open)
    back.start()
    broken.store().write("file", b"1")
    back.join()
    assert broken.holds("file") == b"1"


def test_a_remote_that_is_gone_is_an_error(broken: Broken) -> None:
    broken.proxy.close()
    with pytest.raises(RemoteError, match=r"file cannot be written: .*(.|\n)*whether it can be reached"):
        broken.store(patience=1).write("file", b"1")


def test_what_needs_a_person_is_not_tried_again(broken: Broken) -> None:
    broken.rules.add("status", status=403)
    with pytest.raises(RemoteError, match=r"cannot be written: (.|\n)*look at .*the credentials") as raised:
        broken.store().write("file", b"1")
    assert raised.value.is_final
    assert len(broken.proxy.seen.requests) == 1


@pytest.mark.heavy
def test_a_bucket_is_never_made(broken: Broken, here: Path) -> None:
    broken.bucket = f"missing-{uuid.uuid4().hex[:12]}"
    there = broken.store()
    # The server of the tests makes one for a file, others refuse it
    there.write("file", b"1")
    there.send(here, "file", nowhere)
    broken.server.remove(broken.bucket)
    assert {one.path.partition("?")[0].count("/") for one in broken.proxy.seen.of("PUT")} == {3}


# Secrets.


def told_by(error: BaseException) -> str:
    """Return all that anybody could see of an error."""
    return f"{error} {error!r} {error.args} {''.join(traceback.format_exception(error))}"


def test_a_wrong_secret_is_an_error_at_once_which_does_not_tell_it(s3: S3, shelf: str) -> None:
    there = Store(f"s3://{shelf}/exp", s3.options(secret=HIDDEN))
    with pytest.raises(RemoteError, match="cannot be listed") as raised:
        there.sizes()
    assert raised.value.is_final
    assert HIDDEN not in told_by(raised.value)
    with pytest.raises(RemoteError, match="cannot be read"):
        there.read("run.json", 100)


def test_what_an_error_of_a_filesystem_tells_is_reported_without_secrets(
    telling: type[Telling], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(f"{HIDDEN} at http://h/f?X-Signature=abcdef&x=1 of {HIDDEN}2 is\nrefused.")

    monkeypatch.setattr(telling, "ls", fail)
    there = Store(f"telling://ann:{HIDDEN}@exp?a={HIDDEN}2", {"password": HIDDEN})
    with pytest.raises(RemoteError) as raised:
        there.sizes()
    assert raised.value.problem == (
        "telling://ann@exp cannot be listed: *** at http://h/f?*** of ***2 is refused."
    )
    assert HIDDEN not in told_by(raised.value)
    assert "abcdef" not in told_by(raised.value)


def test_what_the_interrupt_key_interrupts_is_interrupted(
    telling: type[Telling], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(telling, "ls", fail)
    with pytest.raises(KeyboardInterrupt):
        Store("telling://exp").sizes()


def test_an_error_known_only_by_the_name_of_its_class_is_final_by_that(
    telling: type[Telling], monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoCredentialsError(Exception):
        pass

    def fail(*args: Any, **kwargs: Any) -> None:
        raise NoCredentialsError("there are none")

    monkeypatch.setattr(telling, "ls", fail)
    with pytest.raises(RemoteError, match="there are none") as raised:
        Store("telling://exp").sizes()
    assert raised.value.is_final


# Sftp.


@pytest.fixture
def silent() -> Iterator[int]:
    """A server that accepts a connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.heavy
def test_a_server_that_says_nothing_is_given_up(sftp: Sftp, silent: int) -> None:
    with sftp.through("paramiko"):
        there = Store(f"sftp://ann@127.0.0.1:{silent}/exp", sftp.options(), patience=1)
        began = time.monotonic()
        with pytest.raises(RemoteError, match=r"cannot be listed: nothing has moved"):
            there.sizes()
        with pytest.raises(RemoteError, match=r"cannot be reached: nothing has moved"):
            _ = there.at_once
    assert time.monotonic() - began < 10


def test_a_connection_that_hangs_does_not_keep_who_gives_it_up(sftp: Sftp, silent: int) -> None:
    with sftp.through("paramiko"):
        there = Store(f"sftp://ann@127.0.0.1:{silent}/exp", sftp.options())
        leave = threading.Timer(0.3, there.abandon)
        leave.start()
        with pytest.raises(RemoteError, match="was given up"):
            there.sizes()
        leave.join()


def test_a_key_that_is_missing_does_not_look_like_an_empty_folder(sftp: Sftp, tmp_path: Path) -> None:
    with sftp.through("paramiko"):
        there = Store(sftp.url, {**sftp.options(), "key_filename": str(tmp_path / "none")})
        with pytest.raises(RemoteError, match="cannot be listed") as raised:
            there.sizes()
    assert raised.value.is_final


class Relay:
    """Passes connections on to a port, and cuts them."""

    def __init__(self, port: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._to = port
        self._lines: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one, _ = self._server.accept()
                other = socket.create_connection(("127.0.0.1", self._to))
                self._lines += [one, other]
                for ends in ((one, other), (other, one)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)

    def cut(self) -> None:
        """End the connections that there are."""
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        self._lines.clear()

    def close(self) -> None:
        """Let nobody in any more."""
        self._server.close()
        self.cut()


@pytest.mark.quick(2)
@pytest.mark.parametrize("client", ["paramiko", "asyncssh"])
def test_a_connection_that_was_cut_is_made_again(sftp: Sftp, tmp_path: Path, client: str) -> None:
    with sftp.through(client), contextlib.closing(Relay(sftp.port)) as relay:
        place = replace(sftp, port=relay.port, folder=sftp.folder / tmp_path.name)
        there = Store(place.url, place.options(client))
        there.write("file", b"1")
        relay.cut()
        assert there.read("file", 10) == b"1"


# Giving up.


def test_what_is_given_up_ends_at_once_and_begins_nothing_more(broken: Broken, here: Path) -> None:
    there = broken.store()
    broken.rules.add("stall", method="PUT")
    errors: list[BaseException] = []

    def send() -> None:
        try:
            there.send(here, "file", nowhere)
        except RemoteError as exc:
            errors.append(exc)

    thread = threading.Thread(target=send)
    thread.start()
    while not broken.proxy.seen.of("PUT"):
        assert thread.is_alive()
    there.abandon()
    thread.join(20)
    assert "was given up" in str(errors[0])
    with pytest.raises(RemoteError, match="was given up"):
        there.sizes()
    assert there.copy("a", "tag", "b", len(BODY)) is None
    assert broken.names() == []


@pytest.mark.heavy
def test_what_waits_to_try_again_is_given_up_at_once(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_FIRST_DELAY", 59)
    broken.proxy.close()
    there = broken.store()
    leave = threading.Timer(1, there.abandon)
    leave.start()
    began = time.monotonic()
    with pytest.raises(RemoteError, match="was given up"):
        there.sizes()
    leave.join()
    assert time.monotonic() - began < 20


# What killed processes leave.


def test_uploads_that_are_abandoned_are_ended_and_those_of_others_are_not(broken: Broken) -> None:
    mine, other = f"{broken.folder}/checkpoints/1/file", f"{broken.folder}2/checkpoints/1/file"
    beside = f"{broken.folder}/checkpoints2/file"
    for key in (mine, other, beside):
        broken.begin_upload(key)
    assert broken.store().end_uploads("checkpoints") == 1
    assert broken.uploads(f"{broken.folder}/") == [beside]
    assert broken.uploads(f"{broken.folder}2/") == [other]


def test_who_may_not_see_uploads_may_do_all_the_rest(broken: Broken) -> None:
    broken.rules.add("status", status=403, path="?uploads")
    assert broken.store().end_uploads("checkpoints") == 0
