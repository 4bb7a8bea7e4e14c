"""Faults beneath Python: strace lets a system call of a real process fail, as the kernel would."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Fault(NamedTuple):
    """The n-th call of a name, in each thread, fails; if it persists, all after it too."""

    call: str
    number: int
    error: str
    persists: bool = False

    def __str__(self) -> str:
        return f"{self.call}:error={self.error}:when={self.number}{'+' * self.persists}"


class Line(NamedTuple):
    """A system call as strace writes it down."""

    thread: str
    call: str
    text: str

    @property
    def is_injected(self) -> bool:
        return self.text.endswith("(INJECTED)")


@functools.cache
def why_not() -> str:
    """Return why no process can be traced here; nothing if one can."""
    if sys.platform != "linux" or not shutil.which("strace"):
        return "needs strace (apt-get install strace)"
    child = subprocess.Popen(["sleep", "9"])
    try:
        with attached(child.pid, Path(os.devnull), ["fsync"]):
            return ""
    except AssertionError as exc:
        return f"strace may not look at processes here: {exc}"
    finally:
        child.kill()
        child.wait()


@pytest.fixture
def needs_strace() -> None:
    """Skip where no process can be traced."""
    if reason := why_not():
        pytest.skip(reason)


@contextlib.contextmanager
def attached(pid: int, log: Path, calls: Sequence[str], fault: Fault | None = None) -> Iterator[None]:
    """Write down the calls of a process, and let one fail, while the body runs."""
    options = ["-f", "-y", "-s", "0", "-o", str(log), "-e", f"trace={','.join(calls)}"]
    options += ["-e", f"inject={fault}"] if fault else []
    strace = subprocess.Popen(["strace", *options, "-p", str(pid)], stderr=subprocess.PIPE, text=True)
    try:
        assert strace.stderr
        said = strace.stderr.readline()
        assert " attached" in said, said
        yield
    finally:
        strace.terminate()
        strace.communicate()


def lines(log: Path) -> list[Line]:
    """Return what strace wrote down; a call that another thread has interrupted is one line."""
    found: list[Line] = []
    begun: dict[str, str] = {}
    for line in log.read_text(errors="replace").splitlines():
        thread, text = line.split(maxsplit=1)
        if text.endswith("<unfinished ...>"):
            begun[thread] = text.removesuffix("<unfinished ...>")
            continue
        text = re.sub(r"^<\.\.\. \w+ resumed>", lambda _, thread=thread: begun.pop(thread, ""), text)
        if match := re.match(r"\w+(?=\()", text):
            found.append(Line(thread, match[0], text))
    return found


def counts(found: Sequence[Line], about: Path) -> dict[str, int]:
    """Return how often one thread makes each call, up to the last about this folder."""
    seen: Counter[tuple[str, str]] = Counter()
    most: dict[str, int] = {}
    for line in found:
        seen[line.thread, line.call] += 1
        if str(about) in line.text:
            most[line.call] = max(most.get(line.call, 0), seen[line.thread, line.call])
    return most


class Child:
    """A process forked from this warm one, which waits for a word before each of its next steps.

    They talk through a socket: a test may let every `write` and `read` fail.
    """

    def __init__(self, body: Callable[[Child], None]) -> None:
        self._ours, theirs = socket.socketpair()
        self.status: int | None = None
        with warnings.catch_warnings():
            # Newer Pythons warn of threads, of which the test runner may have some; the child uses none.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            self._ours.close()
            self._ours = theirs
            self._run(body)
        theirs.close()
        self._ours.settimeout(60)

    def _run(self, body: Callable[[Child], None]) -> None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                body(self)
        except BaseException:
            # By itself it may begin with a cause that was never raised.
            self.tell(f"Traceback of the process:\n{traceback.format_exc()}")
        finally:
            os._exit(0)

    def tell(self, what: Any) -> None:
        """Tell the parent something, and wait for its word."""
        self.note(what)
        self._ours.recv(1)

    def note(self, what: Any) -> None:
        """Tell the parent something, and continue."""
        self._ours.sendall(json.dumps(what).encode() + b"\n")

    def notes(self) -> list[Any]:
        """Return all that the child has noted, when it has ended."""
        with self._ours.makefile() as told:
            found = [json.loads(line) for line in told]
        self.status = os.waitpid(self.pid, 0)[1]
        return found

    def heard(self) -> Any:
        """Return what the child tells next; AssertionError with its traceback if it has failed."""
        text = b""
        while not text.endswith(b"\n"):
            more = self._ours.recv(1 << 16)
            assert more, f"the process has ended: {os.waitpid(self.pid, 0)[1]:#x}"
            text += more
        said = json.loads(text)
        assert not (isinstance(said, str) and said.startswith("Traceback")), said
        return said

    def go(self) -> None:
        """Let it make the next step."""
        self._ours.send(b".")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def open_files() -> Counter[str]:
    """Return what this process has open."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        # The folder that was just listed is not open any more
        with contextlib.suppress(FileNotFoundError):
            found[re.sub(r"[0-9]+", "", os.readlink(f"/proc/self/fd/{name}"))] += 1
    return found


def frames(error: BaseException) -> str:
    """Return where an error was raised, in one line."""
    found = traceback.extract_tb(error.__traceback__)
    return " > ".join(f"{Path(one.filename).name}:{one.name}" for one in found)


def path_of(line: Line) -> str:
    """Return the file that a call was given a descriptor of."""
    return line.text.partition("<")[2].partition(">")[0]
