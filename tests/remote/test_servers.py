"""The servers and the proxy that other tests rely on do what they are said to do."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT
from proxy import Proxy, Request, Seen
from servers import S3, Place, ProxiedS3

BODY = os.urandom(300_000)


@pytest.fixture(scope="module")
def shelf(s3: S3) -> str:
    """One bucket for all: the first file in a new one takes a while."""
    return s3.bucket()


@pytest.fixture
def bucket(s3: S3, shelf: str) -> str:
    """A bucket with one file in it, that came there without the proxy."""
    s3.admin.put_object(Bucket=shelf, Key="file", Body=BODY)
    return shelf


@contextlib.contextmanager
def asked(server: S3, method: str, bucket: str, **request: Any) -> Iterator[http.client.HTTPConnection]:
    """Send a request that the server will accept on a plain connection, which does nothing twice."""
    name = {"PUT": "put_object", "GET": "get_object"}[method]
    url = server.client().generate_presigned_url(name, Params={"Bucket": bucket, "Key": "file"})
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as line:
        line.request(method, url.removeprefix(server.endpoint), **request)
        yield line


def stored(server: S3, bucket: str, key: str = "file") -> bytes:
    """Return what the server itself has."""
    content: bytes = server.admin.get_object(Bucket=bucket, Key=key)["Body"].read()
    return content


def turned_over(one: bytes, other: bytes) -> int:
    """Count the bits in which two contents of one length differ."""
    assert len(one) == len(other)
    return (int.from_bytes(one, "big") ^ int.from_bytes(other, "big")).bit_count()


def wait_for(proxy: Proxy, count: int) -> None:
    """Return once the proxy has seen so many requests."""
    end = time.monotonic() + 20
    while len(proxy.seen.requests) < count:
        assert time.monotonic() < end, "the proxy was not asked"


def is_running(pid: int) -> bool:
    """Say whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_each_place_begins_empty_and_holds_what_is_written(place: Place) -> None:
    fs, path = place.open()
    assert not fs.exists(path) or fs.find(path) == []
    fs.makedirs(f"{path}/a", exist_ok=True)
    fs.pipe_file(f"{path}/a/b", BODY)
    fs, path = place.open()
    assert fs.cat_file(f"{path}/a/b") == BODY
    assert [each.rpartition("/")[2] for each in fs.find(path)] == ["b"]


@pytest.mark.parametrize("place", ["sftp", "sshfs"], indirect=True)
def test_a_place_of_sftp_says_which_client_it_means(place: Place) -> None:
    fs, path = place.open()
    assert type(fs).__module__ == {"sftp": "fsspec.implementations.sftp", "sshfs": "sshfs.spec"}[place.kind]
    fs.pipe_file(f"{path}/file", BODY)
    assert (Path(path) / "file").read_bytes() == BODY


def test_the_s3_server_refuses_a_wrong_secret(s3: S3) -> None:
    with pytest.raises(Exception, match="SignatureDoesNotMatch"):
        S3(s3.endpoint, secret="wrong").client().list_buckets()


def test_a_server_ends_with_the_process_that_started_it() -> None:
    code = "import servers, time; print(servers.start('/bin/sleep', 60).pid, flush=True); time.sleep(60)"
    env = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        end = time.monotonic() + 20
        while Path(f"/proc/{child}/comm").read_text() != "sleep\n":
            assert time.monotonic() < end, "it did not start"
        os.kill(parent.pid, signal.SIGKILL)
    while is_running(child):
        assert time.monotonic() < end, "the server outlived the process"


def test_what_goes_through_the_proxy_is_counted_and_not_changed(proxied_s3: ProxiedS3, bucket: str) -> None:
    client = proxied_s3.client()
    client.put_object(Bucket=bucket, Key="other", Body=BODY)
    assert client.get_object(Bucket=bucket, Key="other")["Body"].read() == BODY
    assert client.head_object(Bucket=bucket, Key="other")["ContentLength"] == len(BODY)
    seen = proxied_s3.proxy.seen
    assert [(one.method, one.status) for one in seen.requests] == [("PUT", 200), ("GET", 200), ("HEAD", 200)]
    assert (seen.received, seen.sent, seen.struck()) == (len(BODY), len(BODY), [])
    proxied_s3.proxy.forget()
    assert proxied_s3.proxy.seen == Seen([])


@pytest.mark.parametrize(
    ("status", "word"), [(500, b"InternalError"), (503, b"SlowDown"), (403, b"Signature")]
)
def test_a_status_is_answered_and_nothing_done(
    proxied_s3: ProxiedS3, bucket: str, status: int, word: bytes
) -> None:
    proxied_s3.rules.add("status", status=status)
    with asked(proxied_s3, "PUT", bucket, body=b"other") as line:
        answer = line.getresponse()
        assert (answer.status, word in answer.read()) == (status, True)
        # The connection stays, as that of a server does
        line.request("GET", f"/{bucket}")
        assert line.getresponse().status == status
    assert stored(proxied_s3, bucket) == BODY


@pytest.mark.parametrize(
    ("fault", "done"), [("reset", False), ("reset-request", False), ("lose-answer", True)]
)
def test_a_reset_leaves_the_file_as_it_was_and_a_lost_answer_does_not(
    proxied_s3: ProxiedS3, bucket: str, fault: str, done: bool
) -> None:
    proxied_s3.rules.add(fault)
    with pytest.raises(ConnectionError), asked(proxied_s3, "PUT", bucket, body=BODY[::-1]) as line:
        line.getresponse()
    assert stored(proxied_s3, bucket) == (BODY[::-1] if done else BODY)
    (one,) = proxied_s3.proxy.seen.struck(fault)
    assert one.received == {"reset": 0, "reset-request": 150_000, "lose-answer": 300_000}[fault]
    assert one.status == 0


def test_an_answer_is_reset_or_ends_early(proxied_s3: ProxiedS3, bucket: str) -> None:
    proxied_s3.rules.add("reset-answer", count=1)
    proxied_s3.rules.add("truncate-answer", at=0.1)
    with asked(proxied_s3, "GET", bucket) as line, pytest.raises(ConnectionResetError):
        line.getresponse().read()
    with asked(proxied_s3, "GET", bucket) as line, pytest.raises(http.client.IncompleteRead) as caught:
        line.getresponse().read()
    assert caught.value.partial == BODY[:30_000]
    assert [one.sent for one in proxied_s3.proxy.seen.requests] == [150_000, 30_000]


def test_one_bit_is_turned_over_on_the_way_there_or_back(proxied_s3: ProxiedS3, bucket: str) -> None:
    proxied_s3.rules.add("flip-answer", count=1)
    with asked(proxied_s3, "GET", bucket) as line:
        assert turned_over(line.getresponse().read(), BODY) == 1
    # A request without a body has no bit to turn over, and is not counted
    proxied_s3.rules.add("flip-request", count=1, at=0.0)
    for method, body in (("GET", None), ("PUT", BODY)):
        with asked(proxied_s3, method, bucket, body=body) as line:
            assert line.getresponse().status == 200
    assert turned_over(stored(proxied_s3, bucket), BODY) == 1
    assert stored(proxied_s3, bucket)[1:] == BODY[1:]


def test_a_stalled_request_is_not_read_and_ends_with_its_client(proxied_s3: ProxiedS3, bucket: str) -> None:
    proxied_s3.rules.add("stall", method="PUT")
    with asked(proxied_s3, "PUT", bucket, body=BODY) as line:
        line.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            line.getresponse()
        (one,) = proxied_s3.proxy.seen.requests
        assert (one.ended, one.received) == (None, 0)
    end = time.monotonic() + 20
    while proxied_s3.proxy.seen.requests[0].ended is None:
        assert time.monotonic() < end, "the proxy did not see that its client was gone"


def test_a_rule_strikes_only_what_it_names(proxied_s3: ProxiedS3, bucket: str) -> None:
    proxied_s3.rules.add("status", method="GET", path="/a b", after=1, count=2)
    line = http.client.HTTPConnection("127.0.0.1", proxied_s3.port)
    met = []
    for method, path in [("HEAD", "a%20b"), ("GET", "c"), *[("GET", "a%20b")] * 4]:
        line.request(method, f"/{bucket}/{path}")
        met.append(line.getresponse().read() != b"" and proxied_s3.proxy.seen.requests[-1].fault == "status")
    line.close()
    assert met == [False, False, False, True, True, False]
    proxied_s3.rules.clear()
    assert len(proxied_s3.proxy.seen.of("GET", "a b")) == 4


def test_two_uploads_of_one_file_at_once_are_seen(proxied_s3: ProxiedS3, bucket: str) -> None:
    proxied_s3.rules.add("stall", method="PUT")
    with asked(proxied_s3, "PUT", bucket, body=BODY):
        wait_for(proxied_s3.proxy, 1)
        with asked(proxied_s3, "PUT", bucket, body=BODY):
            wait_for(proxied_s3.proxy, 2)
            assert proxied_s3.proxy.seen.uploads_at_once() == {f"/{bucket}/file": 2}


def test_uploads_are_counted_as_at_once_only_where_they_overlap() -> None:
    def upload(method: str, query: str, began: float, ended: float | None) -> Request:
        return Request(method, f"/b/k%20k{query}", began, ended)

    parts = [upload("PUT", f"?partNumber={n}&uploadId=A", 1 + n / 10, 3) for n in range(3)]
    after = [
        upload("POST", "?uploadId=A", 3, 4),
        upload("DELETE", "?uploadId=A", 4, 9),
        upload("PUT", "", 4, 5),
    ]
    assert Seen([*parts, *after]).uploads_at_once() == {"/b/k k": 1}
    assert Seen([*parts, upload("PUT", "?uploadId=A", 1, 2), upload("PUT", "", 2, 4)]).uploads_at_once() == {
        "/b/k k": 2
    }
    # Two that take turns are at once, though no two of their requests are
    turns = [upload("PUT", "?uploadId=A", 1, 2), upload("PUT", "?uploadId=B", 2, 3)]
    assert Seen([*turns, upload("POST", "?uploadId=A", 3, None)]).uploads_at_once() == {"/b/k k": 2}
