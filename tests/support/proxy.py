"""A test's hand on a proxy that breaks what goes to an S3 server, and what it has seen."""

from __future__ import annotations

import json
import subprocess
import threading
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

OF_THE_REQUEST = ("reset-request", "flip-request")
"""These need a body to break: a request without one is let through."""

FAULTS = (
    "status",  # answer with `status` (and S3's words for it) instead of asking the server
    "reset",  # reset the connection once the head of the request is there
    "reset-answer",  # reset it in the middle of the answer's body
    "lose-answer",  # let the server do it, then reset: the client cannot know
    "stall",  # read no further and never answer; the connection stays open
    "slow",  # pass both bodies on at `speed` bytes a second
    "truncate-answer",  # end the connection in an orderly way in the middle of the answer's body
    "flip-answer",  # turn one bit of the answer's body over
    *OF_THE_REQUEST,  # reset in the middle of the request's body; turn one bit of it over
)


@dataclass
class Rule:
    """What happens to which requests: after the first `after` that match, `count` of them, at `rate`."""

    fault: str
    method: str = ""
    path: str = ""
    after: int = 0
    count: int | None = None
    rate: float = 1.0
    seed: int = 0
    status: int = 503
    at: float = 0.5
    speed: int = 100_000

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ValueError(f"no fault is called {self.fault!r}; there are {', '.join(FAULTS)}")


@dataclass
class Request:
    """One request that the proxy saw; `status` is what the client was answered, 0 if nothing.

    It has `ended` when it was answered (the last piece so far), or when its client was gone.
    """

    method: str
    path: str
    began: float
    ended: float | None = None
    status: int = 0
    fault: str = ""
    received: int = 0
    sent: int = 0


@dataclass
class Seen:
    """What went through the proxy."""

    requests: list[Request] = field(default_factory=list)

    def of(self, method: str = "", path: str = "") -> list[Request]:
        """Return the requests of one method whose path (with its query) holds these words."""
        return [one for one in self.requests if is_meant(one.method, one.path, method, path)]

    def struck(self, fault: str = "") -> list[Request]:
        """Return the requests that a rule has broken."""
        return [one for one in self.requests if one.fault and fault in ("", one.fault)]

    @property
    def received(self) -> int:
        """The bytes of all requests' bodies."""
        return sum(one.received for one in self.requests)

    @property
    def sent(self) -> int:
        """The bytes of all answers' bodies."""
        return sum(one.sent for one in self.requests)

    def uploads_at_once(self) -> dict[str, int]:
        """Return for each key how many uploads of it overlapped at most; the parts of one are one upload."""
        spans: dict[str, dict[Any, list[float]]] = defaultdict(dict)
        for number, one in enumerate(self.requests):
            key, upload = _upload(one, number)
            if upload is None:
                continue
            end = float("inf") if one.ended is None else one.ended
            span = spans[key].setdefault(upload, [one.began, end])
            span[:] = [min(span[0], one.began), max(span[1], end)]
        # What is still on its way of an upload that was aborted stores nothing any more.
        aborted = {
            parse_qs(urlsplit(one.path).query).get("uploadId", [""])[0]: one.began
            for one in self.requests
            if one.method == "DELETE"
        }
        for each in spans.values():
            for upload in each.keys() & aborted.keys():
                each[upload][1] = min(each[upload][1], aborted[upload])
        return {key: _most_at_once(list(each.values())) for key, each in spans.items()}


def _upload(one: Request, number: int) -> tuple[str, Any]:
    url = urlsplit(one.path)
    query = parse_qs(url.query)
    if one.method == "PUT" and "/" in url.path.strip("/"):
        return unquote(url.path), query.get("uploadId", [number])[0]
    if one.method == "POST" and "uploadId" in query:
        return unquote(url.path), query["uploadId"][0]
    # What deletes or lists an upload that somebody left behind is not an upload
    return unquote(url.path), None


def _most_at_once(spans: list[list[float]]) -> int:
    # One that begins in the moment in which another ends comes after it
    moments = sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans])
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most


def is_meant(method: str, path: str, wanted: str, words: str) -> bool:
    """Say whether a request has this method and these words in its path; "" is any."""
    return wanted in ("", method) and words in unquote(path)


class Rules:
    """The faults that a proxy has to make; the first rule that meets a request is the one that counts."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def add(self, fault: str, **which: Any) -> None:
        """Break requests from now on: `add("status", status=503, method="PUT", path="a.bin", count=2)`."""
        self._proxy.ask("add", asdict(Rule(fault, **which)))

    def clear(self) -> None:
        """Break nothing more; what stalls continues stalling."""
        self._proxy.ask("clear")


class Proxy:
    """The test's hand on one of the proxies of a program that `servers.py` has started."""

    # Two threads that ask at the same time would read each other's answers.
    _lock = threading.Lock()

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._number: int = self.ask("begin")
        self.port: int = self.ask("open")
        self.rules = Rules(self)

    def ask(self, command: str, about: Any = None) -> Any:
        """Send one command and return its answer."""
        with self._lock:
            assert self._process.stdin
            assert self._process.stdout
            self._process.stdin.write(json.dumps([getattr(self, "_number", None), command, about]) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, f"the proxy has ended with {self._process.wait()}"
        return json.loads(answer)

    def close(self) -> None:
        """Let the remote be gone: open connections are reset, new ones refused."""
        self.ask("close")

    def open(self) -> None:
        """Let the remote be back, at the same port."""
        self.ask("open")

    @property
    def seen(self) -> Seen:
        """What went through so far, with what is going through now."""
        return Seen([Request(**one) for one in self.ask("seen")])

    def forget(self) -> None:
        """Count from nothing again."""
        self.ask("forget")

    def end(self) -> None:
        """Close it for good."""
        self.ask("end")
