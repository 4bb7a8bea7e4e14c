"""Real processes under strace, and what they did to a folder: an operation for each call that changes it.

Nothing of the library is replaced: the kernel's own log of the calls is read. A call in the folder that
is not understood ends the test, for what it does would be missing from every state that is made of the log.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Said = dict[str, Any]
"""What a program has told: it is in the log, between the calls before and after it."""


class Named(NamedTuple):
    """Names that were given and taken away in one step: (folder, name, what it leads to)."""

    changes: tuple[tuple[int, str, int | None], ...]


class Wrote(NamedTuple):
    """Bytes that were written to a file."""

    node: int
    at: int
    data: bytes


class Sized(NamedTuple):
    """A file that was given a size."""

    node: int
    size: int
    only_grows: bool = False


class Flushed(NamedTuple):
    """A file or a folder that was flushed: all that was done to it before `began` (a count) is durable."""

    node: int
    began: int


class Told(NamedTuple):
    """What the program said at this moment."""

    said: Said


Op = Named | Wrote | Sized | Flushed | Told


@dataclass
class Disk:
    """Files, folders and links by their inodes; a folder has entries, a file bytes, a link its target."""

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {0: {}})
    files: dict[int, bytes] = field(default_factory=dict)
    links: dict[int, str] = field(default_factory=dict)

    def copy(self) -> Disk:
        folders = {node: dict(entries) for node, entries in self.folders.items()}
        return Disk(folders, dict(self.files), dict(self.links))

    def change(self, op: Op) -> None:
        """Do what the operation did."""
        if isinstance(op, Named):
            for folder, name, node in op.changes:
                if node is None:
                    self.folders[folder].pop(name, None)
                else:
                    self.folders[folder][name] = node
        elif isinstance(op, Wrote):
            old = self.files[op.node]
            self.files[op.node] = old[: op.at].ljust(op.at, b"\0") + op.data + old[op.at + len(op.data) :]
        elif isinstance(op, Sized):
            old = self.files[op.node]
            size = max(op.size, len(old)) if op.only_grows else op.size
            self.files[op.node] = old[:size].ljust(size, b"\0")

    def at(self, path: str) -> int | None:
        """Return what lies at a path; None if nothing does."""
        node = 0
        for name in filter(None, path.split("/")):
            if name not in self.folders.get(node, {}):
                return None
            node = self.folders[node][name]
        return node

    def walk(self, node: int = 0, path: str = "") -> Iterator[tuple[str, int]]:
        """Yield every path and what lies there, folders before what they hold."""
        for name, inner in sorted(self.folders[node].items()):
            yield path + name, inner
            if inner in self.folders:
                yield from self.walk(inner, f"{path}{name}/")

    def write_to(self, folder: Path) -> None:
        """Make all of it in a folder that does not exist; names of one file stay names of one file."""
        folder.mkdir(parents=True)
        made: dict[int, str] = {}
        for path, node in self.walk():
            target = f"{folder}/{path}"
            if node in self.folders:
                os.mkdir(target)
            elif node in self.links:
                os.symlink(self.links[node], target)
            elif node in made:
                os.link(made[node], target)
            else:
                made[node] = target
                fd = os.open(target, os.O_WRONLY | os.O_CREAT, 0o666)
                os.write(fd, self.files[node])
                os.close(fd)


def disk_of(root: Path) -> Disk:
    """Return what lies in a folder now."""
    disk, known = Disk(), {root.stat().st_ino: 0}
    for folder, folders, files in os.walk(root):
        here = disk.folders[known[os.stat(folder).st_ino]]
        for name in sorted(folders + files):
            found = os.lstat(path := f"{folder}/{name}")
            node = here[name] = known.setdefault(found.st_ino, len(known))
            if stat.S_ISDIR(found.st_mode):
                disk.folders.setdefault(node, {})
            elif stat.S_ISLNK(found.st_mode):
                disk.links[node] = os.readlink(path)
            else:
                disk.files[node] = Path(path).read_bytes()
    return disk


class Traced(NamedTuple):
    """What processes did to a folder: what lay there, the operations, and what was said before and after."""

    before: Disk
    ops: list[Op]
    known: list[Said]

    def after(self, count: int | None = None) -> Disk:
        """Return the disk as processes see it after so many of the operations."""
        disk = self.before.copy()
        for op in self.ops[:count]:
            disk.change(op)
        return disk


Tell = Callable[..., None]
Program = Callable[[int, Tell], Iterator[None]]
"""Called with its rank and how to tell something: what it does after its first `yield` is traced."""


def trace(program: Program, root: Path, logs: Path, delays: Sequence[str] = ("",)) -> Traced:
    """Run the program in processes of its own, one for each of the `delays` that strace shall inject."""
    if not shutil.which("strace"):
        pytest.skip("needs strace (apt-get install strace)")
    logs.mkdir(parents=True)
    children = [_Child(program, rank) for rank in range(len(delays))]
    known = [said for child in children for said in child.until_ready()]
    before = disk_of(root)
    texts = [logs / f"rank-{rank}" for rank in range(len(delays))]
    tracers = [child.attach(text, delay) for child, text, delay in zip(children, texts, delays, strict=True)]
    for child in children:
        child.go()
    ends = [child.wait() for child in children] + [tracer.wait(30) for tracer in tracers]
    if any(ends):
        raise RuntimeError(f"what was traced, or strace, has failed ({ends}); the error is above")
    log = _Log(root, before, [child.pipe for child in children])
    lines = [line for text in texts for line in text.read_text().splitlines()]
    # Of several processes each has a log
    for line in sorted(lines, key=_time):
        log.read(line)
    log.compare_with(disk_of(root))
    return Traced(before, log.ops, known)


def _time(line: str) -> float:
    return float(line.split(maxsplit=2)[1])


class _Child:
    """A process that is ready, waits until it is traced, and continues."""

    def __init__(self, program: Program, rank: int) -> None:
        self._heard, told = os.pipe()
        gate, self._gate = os.pipe()
        self.pipe = f"pipe:[{os.fstat(told).st_ino}]"
        with warnings.catch_warnings():
            # Newer Pythons warn of threads, of which the test runner may have some; the child uses none.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._gate)
                _live(program, rank, told, gate)
            finally:
                os._exit(1)
        os.close(told)
        os.close(gate)

    def until_ready(self) -> list[Said]:
        """Return what it says before it begins."""
        text = b""
        while not text.endswith(_READY):
            if not (more := os.read(self._heard, 1 << 16)):
                raise RuntimeError(f"the program has failed ({self.wait()}); its error is above")
            text += more
        return [json.loads(line) for line in text.removesuffix(_READY).splitlines()]

    def attach(self, log: Path, delay: str) -> subprocess.Popen[bytes]:
        """Let strace follow it, and whatever it starts."""
        inject = ("-e", f"inject={delay}") if delay else ()
        command = ["strace", "-f", "-qq", "-y", "-xx", "-ttt", "-s", "33554432", *inject, "-e"]
        command += [f"trace=!{','.join(_UNSEEN)}", "-o", str(log), "-p", str(self._pid)]
        tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not all(_is_traced(task) for task in Path(f"/proc/{self._pid}/task").iterdir()):
            if tracer.poll() is not None:
                self.kill()
                pytest.skip("needs the right to trace a process of its own (ptrace)")
            time.sleep(0.002)
        return tracer

    def go(self) -> None:
        """Let it do what is traced."""
        # To close it would not do: the processes that were forked later have it open too
        os.write(self._gate, b"!")
        os.close(self._gate)

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def wait(self) -> int:
        """Wait for its end, and return how it ended."""
        with os.fdopen(self._heard, "rb") as pipe:
            pipe.read()
        return os.waitpid(self._pid, 0)[1]


def _live(program: Program, rank: int, told: int, gate: int) -> None:
    def tell(**said: Any) -> None:
        os.write(told, json.dumps(said).encode() + b"\n")

    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (this process ends with it)
    try:
        steps = program(rank, tell)
        next(steps)
        os.write(told, _READY)
        os.read(gate, 1)
        with contextlib.suppress(StopIteration):
            next(steps)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _is_traced(task: Path) -> bool:
    return "TracerPid:\t0\n" not in (task / "status").read_text()


_READY = b"\0ready\n"
_UNSEEN = ("pread64", "preadv", "preadv2", "futex", "brk", "mprotect", "munmap", "madvise", "getrandom",
           "rt_sigprocmask", "rt_sigaction", "clock_nanosleep", "epoll_wait", "poll", "ppoll", "gettid",
           "sendto", "recvfrom", "sendmsg", "recvmsg", "getdents64")  # fmt: skip
"""What changes no disk, and happens often or is long."""

_HARMLESS = {
    "stat", "lstat", "fstat", "newfstatat", "statx", "access", "faccessat", "faccessat2", "readlink",
    "readlinkat", "statfs", "fstatfs", "fadvise64", "sync_file_range", "flock", "close", "getcwd",
    "utimensat", "execve", "readahead",
}  # fmt: skip
"""What changes neither names nor bytes."""

_LINE = re.compile(r"(\d+) +[\d.]+ (\w+)\((.*)\) += (-?\w+|\?)(?:<([^>]*)>)?.*")
_BEGUN = re.compile(r"(\d+) +[\d.]+ (\w+)\((.*) <unfinished \.\.\.>")
_ENDED = re.compile(r"(\d+) +[\d.]+ <\.\.\. (\w+) resumed>(.*)")
_FD = re.compile(r"(\w+)<([^>]*)>(\(deleted\))?")
_TEXT = re.compile(r'"([^"]*)"')


@dataclass
class _Call:
    name: str
    args: str
    result: int
    opened: str
    began: int
    """How many operations there were when it began."""
    node: int | None
    """What its first descriptor led to then."""

    @property
    def texts(self) -> list[bytes]:
        return [_bytes(text) for text in _TEXT.findall(self.args)]

    @property
    def numbers(self) -> list[int]:
        """Return the numbers that follow the last text or descriptor."""
        bare = _FD.sub("", _TEXT.sub("", self.args)).rpartition("]")[2]
        return [int(text, 0) for text in re.findall(r"(?<![\w.])(?:0x[0-9a-f]+|\d+)(?![\w.])", bare)]


def _shown(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text.encode())


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


class _Log:
    """The lines of the log, one after the other, and the disk as it is after each."""

    def __init__(self, root: Path, before: Disk, pipes: Sequence[str]) -> None:
        self._root = str(root.resolve())
        self._hex = _shown(self._root)
        # As strace shows what is not a file it knows
        self._pipes = [shown for pipe in pipes for shown in (pipe, _shown(pipe))]
        self._before, self._disk = before, before.copy()
        self._next = 1 + max([*before.folders, *before.files, *before.links])
        self._open: dict[str, tuple[str, str, int, int | None]] = {}
        self._moving: dict[str, tuple[str, str]] = {}
        self._at: dict[tuple[int, str], list[int]] = {}
        """Where the next write goes, by file and descriptor; -1: to the end."""
        self.ops: list[Op] = []

    def read(self, line: str) -> None:
        """Take in a line."""
        if begun := _BEGUN.fullmatch(line):
            pid, name, args = begun.groups()
            self._open[pid] = name, args, len(self.ops), self._first_node(args)
            if name.startswith("rename") and self._is_ours(args):
                self._moving[pid] = self._two_paths(args)
            return
        if ended := _ENDED.fullmatch(line):
            pid, name, rest = ended.groups()
            # What one does in an exec that another began is no call of its own
            _, args, began, node = self._open.pop(pid, (name, "", len(self.ops), None))
            found = _LINE.fullmatch(f"{pid} 0 {name}({args}{rest}")
            self._moving.pop(pid, None)
        else:
            found, began, node = _LINE.fullmatch(line), len(self.ops), None
        if not found or found[4] in ("?", "-1") or not self._is_ours(found[0]):
            return
        _, name, args, result, opened = found.groups()
        self._take(_Call(name, args, int(result, 0), opened or "", began, node or self._first_node(args)))

    def compare_with(self, real: Disk) -> None:
        """Fail unless what was understood is what is there."""
        ours, theirs = _told(self._disk), _told(real)
        differing = sorted(path for path in {*ours, *theirs} if ours.get(path) != theirs.get(path))
        assert not differing, f"what was traced is not what is on the disk: {differing}"

    def _is_ours(self, text: str) -> bool:
        return self._hex in text or any(pipe in text for pipe in self._pipes)

    def _take(self, call: _Call) -> None:
        if call.name == "write" and any(f"<{pipe}>" in call.args for pipe in self._pipes):
            self.ops.append(Told(json.loads(call.texts[0])))
        elif call.name not in _HARMLESS and not self._is_elsewhere(call):
            take = getattr(self, f"_take_{call.name}", None)
            if take is None:
                raise NotImplementedError(f"a call that nobody understands: {call.name}({call.args:.200})")
            take(call)

    def _is_elsewhere(self, call: _Call) -> bool:
        # The bytes may be about the folder, and go to a terminal.
        found = _FD.match(call.args)
        return re.search("write|read", call.name) is not None and not (
            found and found[2].startswith(self._hex)
        )

    def _add(self, op: Op) -> None:
        self.ops.append(op)
        self._disk.change(op)

    # What lies where.

    def _first_node(self, args: str) -> int | None:
        found = _FD.match(args)
        if not found or not found[2].startswith(self._hex):
            return None
        if found[3]:
            return -1
        path = _bytes(found[2]).decode()
        node = self._disk.at(self._inner(path))
        if node is None:
            # A rename that is on its way may be done already
            for old, new in self._moving.values():
                if path.startswith(f"{new}/"):
                    return self._disk.at(self._inner(old + path[len(new) :]))
        return node

    def _node(self, call: _Call) -> int:
        if call.node is None:
            raise LookupError(f"{call.name} of what is not known: {call.args:.300}")
        return call.node

    def _inner(self, path: str) -> str:
        return path[len(self._root) :]

    def _paths(self, args: str) -> list[str]:
        found, base = [], ""
        for fd, where, _, text in re.findall(r'(\w+)<([^>]*)>(\(deleted\))?|"([^"]*)"', args):
            if fd:
                base = _bytes(where).decode()
            else:
                found.append(os.path.normpath(os.path.join(base, _bytes(text).decode())))
        return found

    def _two_paths(self, args: str) -> tuple[str, str]:
        first, second = self._paths(args)
        return first, second

    def _place(self, path: str) -> tuple[int, str]:
        if not path.startswith(f"{self._root}/"):
            raise LookupError(f"{path} is not below {self._root}")
        folder, _, name = self._inner(path).rpartition("/")
        node = self._disk.at(folder)
        if node not in self._disk.folders:
            raise LookupError(f"the folder of {path} is not known")
        return node, name

    def _new(self, path: str, kind: str, content: Any) -> int:
        node, self._next = self._next, self._next + 1
        # Before, nothing led to it
        for disk in (self._before, self._disk):
            getattr(disk, kind)[node] = copy.copy(content)
        self._add(Named(((*self._place(path), node),)))
        return node

    # The calls.

    def _take_openat(self, call: _Call) -> None:
        path = _bytes(call.opened).decode()
        if not path.startswith(self._root) or call.opened.endswith("(deleted)"):
            return
        node = self._disk.at(self._inner(path))
        if node is None:
            if "O_CREAT" not in call.args:
                raise LookupError(f"{path} was opened, and is not known")
            node = self._new(path, "files", b"")
        elif "O_TRUNC" in call.args:
            self._add(Sized(node, 0))
        self._at[node, str(call.result)] = [-1 if "O_APPEND" in call.args else 0]

    _take_open = _take_creat = _take_openat

    def _fd(self, call: _Call) -> str:
        return call.args.partition("<")[0]

    def _take_write(self, call: _Call) -> None:
        node, position = self._position(call)
        data = b"".join(call.texts)[: call.result]
        at = len(self._disk.files[node]) if position[0] < 0 else position[0]
        self._wrote(node, at, data)
        if position[0] >= 0:
            position[0] += call.result

    _take_writev = _take_write

    def _wrote(self, node: int, at: int, data: bytes) -> None:
        if node != -1:
            self._add(Wrote(node, at, data))

    def _position(self, call: _Call) -> tuple[int, list[int]]:
        node = self._node(call)
        return node, self._at[node, self._fd(call)]

    def _take_read(self, call: _Call) -> None:
        node = self._node(call)
        # What was opened before can be read, and not written
        if (position := self._at.get((node, self._fd(call)))) and position[0] >= 0:
            position[0] += call.result

    _take_readv = _take_read

    def _take_lseek(self, call: _Call) -> None:
        if (position := self._at.get((self._node(call), self._fd(call)))) and position[0] >= 0:
            position[0] = call.result

    def _take_pwrite64(self, call: _Call) -> None:
        self._wrote(self._node(call), call.numbers[-1], b"".join(call.texts)[: call.result])

    def _take_pwritev(self, call: _Call) -> None:
        self._wrote(self._node(call), call.numbers[1], b"".join(call.texts)[: call.result])

    _take_pwritev2 = _take_pwritev

    def _take_ftruncate(self, call: _Call) -> None:
        if (node := self._node(call)) != -1 and len(self._disk.files[node]) != call.numbers[-1]:
            self._add(Sized(node, call.numbers[-1]))

    def _take_fallocate(self, call: _Call) -> None:
        mode, at, size = call.numbers
        if mode:
            raise NotImplementedError(f"fallocate({call.args})")
        self._add(Sized(self._node(call), at + size, only_grows=True))

    def _take_fsync(self, call: _Call) -> None:
        self._add(Flushed(self._node(call), call.began))

    _take_fdatasync = _take_fsync

    def _take_mkdir(self, call: _Call) -> None:
        self._new(self._paths(call.args)[-1], "folders", {})

    _take_mkdirat = _take_mkdir

    def _take_symlink(self, call: _Call) -> None:
        target, *_ = call.texts
        self._new(self._paths(call.args)[-1], "links", target.decode())

    _take_symlinkat = _take_symlink

    def _take_link(self, call: _Call) -> None:
        old, new = self._two_paths(call.args)
        node = self._disk.at(self._inner(old))
        assert node is not None
        self._add(Named(((*self._place(new), node),)))

    _take_linkat = _take_link

    def _take_rename(self, call: _Call) -> None:
        old, new = self._two_paths(call.args)
        node = self._disk.at(self._inner(old))
        if node is None or "RENAME_EXCHANGE" in call.args:
            raise NotImplementedError(f"rename of {old} to {new}")
        self._add(Named(((*self._place(old), None), (*self._place(new), node))))

    _take_renameat = _take_renameat2 = _take_rename

    def _take_unlink(self, call: _Call) -> None:
        self._add(Named(((*self._place(self._paths(call.args)[-1]), None),)))

    _take_unlinkat = _take_rmdir = _take_unlink

    def _take_fcntl(self, call: _Call) -> None:
        if "F_DUPFD" in call.args:
            self._take_dup(call)

    def _take_dup(self, call: _Call) -> None:
        node = self._node(call)
        self._at[node, str(call.result)] = self._at[node, self._fd(call)]

    _take_dup2 = _take_dup3 = _take_dup

    def _take_mmap(self, call: _Call) -> None:
        if "PROT_WRITE" in call.args and "MAP_SHARED" in call.args:
            raise NotImplementedError(f"mmap({call.args})")

    def _take_ioctl(self, call: _Call) -> None:
        if not re.search("TCGETS|FIOCLEX", call.args):
            raise NotImplementedError(f"ioctl({call.args})")


def _told(disk: Disk) -> dict[str, object]:
    return {path: disk.files.get(node, disk.links.get(node)) for path, node in disk.walk()}
