"""The servers and the proxy that other tests rely on do what they are said to do."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from places import SUPPORT
from proxy import Proxy, Request, Seen
from servers import S3, Place, ProxiedS3, Sftp, held_ports

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


def test_a_client_of_sftp_is_chosen_only_for_a_while(sftp: Sftp) -> None:
    before = fsspec.get_filesystem_class("sftp")
    with sftp.through("paramiko"):
        assert fsspec.get_filesystem_class("sftp").__module__ == "fsspec.implementations.sftp"
    assert fsspec.get_filesystem_class("sftp") is before


def test_the_s3_server_refuses_a_wrong_secret(s3: S3) -> None:
    with pytest.raises(Exception, match="SignatureDoesNotMatch"):
        S3(s3.endpoint, secret="wrong").client().list_buckets()


def test_the_s3_server_writes_a_key_only_once_where_that_is_asked(s3: S3) -> None:
    bucket = s3.bucket()
    s3.admin.put_object(Bucket=bucket, Key="file", Body=b"1", IfNoneMatch="*")
    with pytest.raises(Exception, match="PreconditionFailed"):
        s3.admin.put_object(Bucket=bucket, Key="file", Body=b"2", IfNoneMatch="*")
    s3.remove(bucket)
    assert bucket not in [each["Name"] for each in s3.admin.list_buckets()["Buckets"]]


def test_a_held_port_is_only_for_a_server_that_says_so() -> None:
    with held_ports(1, pair=10_000) as ports, socket.socket() as server, socket.socket() as other:
        assert ports[2] == ports[1] + 10_000
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", ports[0]))
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", ports[0]))


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


def test_a_body_in_chunks_goes_through(proxied_s3: ProxiedS3, bucket: str) -> None:
    pieces = iter([BODY[100_000:], BODY[:100_000]])
    chunked = {"Transfer-Encoding": "chunked"}
    with asked(proxied_s3, "PUT", bucket, body=pieces, headers=chunked, encode_chunked=True) as line:
        assert line.getresponse().status == 200
    assert stored(proxied_s3, bucket) == BODY[100_000:] + BODY[:100_000]


def test_a_checksum_that_follows_the_body_goes_through(proxied_s3: ProxiedS3, bucket: str) -> None:
    def trail(params: dict[str, Any], **_: Any) -> None:
        params["context"]["checksum"]["request_algorithm"]["in"] = "trailer"

    client = proxied_s3.client()
    client.meta.events.register("before-call.s3.PutObject", trail)
    client.put_object(Bucket=bucket, Key="other", Body=BODY)
    assert stored(proxied_s3, bucket, "other") == BODY
    assert proxied_s3.proxy.seen.received > len(BODY)


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


def test_who_waits_to_send_its_body_is_answered_too(proxied_s3: ProxiedS3, bucket: str) -> None:
    proxied_s3.rules.add("status", status=503)
    with pytest.raises(Exception, match="SlowDown"):
        proxied_s3.client().put_object(Bucket=bucket, Key="file", Body=b"other")
    assert [one.received for one in proxied_s3.proxy.seen.struck("status")] == [0]


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


def test_the_server_sees_that_a_bit_was_turned_over(proxied_s3: ProxiedS3, bucket: str) -> None:
    proxied_s3.rules.add("flip-request")
    with pytest.raises(Exception, match=r"BadDigest|SHA256Mismatch"):
        proxied_s3.client().put_object(Bucket=bucket, Key="file", Body=BODY[::-1])
    assert stored(proxied_s3, bucket) == BODY


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


def test_a_slow_body_comes_piece_by_piece_and_is_whole(proxied_s3: ProxiedS3, bucket: str) -> None:
    proxied_s3.rules.add("slow", speed=20_000, count=1)
    proxied_s3.rules.add("slow", speed=3_000_000)
    with asked(proxied_s3, "GET", bucket) as line:
        assert line.getresponse().read(1000) == BODY[:1000]
        assert proxied_s3.proxy.seen.sent < len(BODY) // 2
    for method, body in (("PUT", BODY[::-1]), ("GET", None)):
        with asked(proxied_s3, method, bucket, body=body) as line:
            assert line.getresponse().read() == (b"" if body else BODY[::-1])
    assert [one.fault for one in proxied_s3.proxy.seen.requests] == ["slow"] * 3


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


def test_a_rate_strikes_the_same_requests_each_time(proxied_s3: ProxiedS3) -> None:
    struck = []
    for _ in range(2):
        proxied_s3.proxy.forget()
        proxied_s3.rules.clear()
        proxied_s3.rules.add("status", rate=0.3, seed=1)
        line = http.client.HTTPConnection("127.0.0.1", proxied_s3.port)
        for _ in range(60):
            line.request("GET", "/")
            line.getresponse().read()
        line.close()
        struck.append([one.fault for one in proxied_s3.proxy.seen.requests])
    assert struck[0] == struck[1]
    assert 5 < struck[0].count("status") < 40


def test_a_fault_that_does_not_exist_is_refused(proxied_s3: ProxiedS3) -> None:
    with pytest.raises(ValueError, match="explode"):
        proxied_s3.rules.add("explode")


def test_a_closed_proxy_refuses_and_an_opened_one_is_back_at_its_port(
    proxied_s3: ProxiedS3, bucket: str
) -> None:
    with asked(proxied_s3, "GET", bucket) as line:
        assert line.getresponse().read() == BODY
        proxied_s3.proxy.close()
        with pytest.raises(ConnectionError):
            line.sock.sendall(b"GET / HTTP/1.1\r\n\r\n") or line.sock.recv(1) or _refused()
    with pytest.raises(ConnectionRefusedError), asked(proxied_s3, "GET", bucket):
        pass
    proxied_s3.proxy.open()
    with asked(proxied_s3, "GET", bucket) as line:
        assert line.getresponse().read() == BODY


def test_two_uploads_of_one_file_at_once_are_seen(proxied_s3: ProxiedS3, bucket: str) -> None:
    proxied_s3.rules.add("stall", method="PUT")
    with asked(proxied_s3, "PUT", bucket, body=BODY):
        wait_for(proxied_s3.proxy, 1)
        with asked(proxied_s3, "PUT", bucket, body=BODY):
            wait_for(proxied_s3.proxy, 2)
            assert proxied_s3.proxy.seen.uploads_at_once() == {f"/{bucket}/file": 2}


def test_the_parts_of_one_upload_are_one_and_an_upload_after_another_is_not_at_once() -> None:
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


def test_s3fs_gets_through_what_ends(proxied_s3: ProxiedS3, bucket: str) -> None:
    proxied_s3.rules.add("status", status=503, method="PUT", count=1)
    proxied_s3.rules.add("reset", method="GET", path="other", count=1)
    fs = fsspec.filesystem("s3", **proxied_s3.options())
    fs.pipe_file(f"{bucket}/other", BODY)
    assert fs.cat_file(f"{bucket}/other") == BODY
    assert [one.fault for one in proxied_s3.proxy.seen.struck()] == ["status", "reset"]


def test_an_upload_that_was_given_up_is_over_when_it_is_tried_again(
    proxied_s3: ProxiedS3, bucket: str
) -> None:
    proxied_s3.rules.add("stall", method="PUT", count=1)
    with asked(proxied_s3, "PUT", bucket, body=BODY):
        wait_for(proxied_s3.proxy, 1)
    for _ in range(3):
        with asked(proxied_s3, "PUT", bucket, body=BODY) as line:
            assert line.getresponse().status == 200
    assert proxied_s3.proxy.seen.uploads_at_once() == {f"/{bucket}/file": 1}


def test_two_threads_may_ask_one_proxy(proxied_s3: ProxiedS3) -> None:
    found: list[Seen] = []
    threads = [threading.Thread(target=lambda: found.append(proxied_s3.proxy.seen)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Seen([])] * 8


def _refused() -> None:
    raise ConnectionError
