"""A folder on any filesystem that fsspec knows: every call has a deadline, and is tried again."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import RemoteError
from ..files import disk
from . import etag, failures, filesystem, url
from .deadline import Meter, Moved, Request
from .filesystem import PIECE

T = TypeVar("T")

PART = 6 << 20
"""Larger files are sent in parts of so many bytes, several at once."""

AT_ONCE = 4
"""How many requests are on their way at once."""


class _Spoilt(OSError):
    """A file there has other bytes than it should have."""


class Store:
    """A folder on a filesystem that fsspec knows, such as `s3://bucket/exp`.

    A call that does not move for `patience` seconds is given up; what may be better a little later is tried
    again, ever more slowly, for so long. Then RemoteError says why, without any secret.

    >>> store = Store("memory://example/store")
    >>> store.write("run.json", b"{}")
    >>> store.sizes(), store.read("run.json", limit=100)
    ({'run.json': 2}, b'{}')
    """

    def __init__(self, place: str, options: Mapping[str, Any] | None = None, patience: float = 60) -> None:
        url.check(place)
        self.url = url.shown(place)
        """Its address, as it may be shown."""
        self._given = place
        self._patience = patience
        self._options = dict(options or {})
        self._secrets = url.secrets_in(place, self._options)
        self._guard = threading.Lock()
        self._found: tuple[Any, str] | None = None
        self._pending: set[Request] = set()
        self._is_abandoned = False
        self.trouble: str | None = None
        """What went wrong with the last try, while it is tried again."""
        self._torn: set[str] = set()
        """The files of which an upload has not ended well."""
        self._tells_nothing: set[bool] = set()
        """Whether checksums of files in parts, or of others, were seen to be none of the content."""

    def __str__(self) -> str:
        return self.url

    def with_patience(self, patience: float) -> Store:
        """Return another way to the same folder."""
        return Store(self._given, self._options, patience)

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the files in a folder and below it, by their names from there, with their sizes."""
        # Nobody there yet is an empty folder.
        with contextlib.suppress(FileNotFoundError):
            return self._insist(f"{self._shown(folder)} cannot be listed", lambda: self._sizes(folder))
        return {}

    def _sizes(self, folder: str) -> dict[str, int]:
        fs, root = self._filesystem()
        top = _join(root, folder)
        fs.invalidate_cache()
        if filesystem.is_objects(fs):
            found = self._call("find", top, detail=True)
            infos = [*found.values()]
        else:
            # (find() takes a folder that cannot be read for an empty one)
            infos = [*self._walk(top, _DEPTH)]
        # Each filesystem has its own idea of what a whole path begins with.
        start = fs._strip_protocol(top).strip("/") + "/"
        names = {info["name"].strip("/"): info.get("size") for info in infos if info["type"] == "file"}
        return {
            name[len(start) :]: size
            for name, size in names.items()
            if name.startswith(start) and isinstance(size, int)
        }

    def _walk(self, folder: str, depth: int) -> Iterator[dict[str, Any]]:
        for info in self._call("ls", folder, detail=True):
            if info["type"] != "directory":
                yield info
            elif depth > 1:
                # (one that somebody removes meanwhile is no reason to take all for gone)
                with contextlib.suppress(FileNotFoundError):
                    yield from self._walk(info["name"], depth - 1)

    def read(self, name: str, limit: int) -> bytes | None:
        """Return the content of a small file, None if it is not there; RemoteError if it has more bytes."""

        def job() -> bytes:
            size = self._info(name)["size"]
            if size > limit:
                raise RemoteError(
                    f"{self._shown(name)} has {size:,} bytes; at most {limit:,} make sense.",
                    fix="look at who wrote it; nothing of it was read.",
                )
            return bytes(self._range(name, 0, size)) if size else b""

        with contextlib.suppress(FileNotFoundError):
            return self._insist(f"{self._shown(name)} cannot be read", job)
        return None

    def read_range(self, name: str, begin: int, end: int) -> bytes | memoryview:
        """Return some bytes of a file."""
        return self._insist(
            f"{self._shown(name)} cannot be read", lambda: self._range(name, begin, end), is_due=True
        )

    def _range(self, name: str, begin: int, end: int) -> bytes | memoryview:
        size, path = end - begin, self._path(name)
        on_its_way = min(AT_ONCE * size, AT_ONCE * PIECE)
        fs, _ = self._filesystem()
        if filesystem.is_async(fs) and filesystem.has_bodies(fs):
            room, meter = memoryview(bytearray(size)), Meter(lambda size: None, size)
            request = Request(meter)
            request.begin_in_loop(filesystem.fill(fs, path, begin, room, meter), fs.loop)
            came, found = self._wait_for(request, on_its_way), room
        else:
            found = self._call("cat_file", path, start=begin, end=end, on_its_way=on_its_way)
            came = len(found)
        if came != size:
            raise OSError(errno.EIO, f"{came:,} bytes came instead of {size:,}")
        return found

    @property
    def at_once(self) -> int:
        """How many calls may be on their way at once: clients with one connection mix them up."""
        return AT_ONCE if filesystem.is_async(self._opened()) else 1

    def can_read_ranges(self) -> bool:
        """Whether several may read a file at once, each a part, as fast as one could read all."""
        return filesystem.is_objects(self._opened())

    def fetch(self, name: str, path: Path, size: int, moved: Moved) -> None:
        """Copy a whole file of that size to a local path."""

        def job() -> None:
            fs, _ = self._filesystem()
            # (one that is longer than it says must not fill the disk)
            with _counting(moved, size) as meter:
                if filesystem.is_async(fs):
                    self._call("get_file", self._path(name), str(path), meter=meter)
                else:
                    self._do(partial(filesystem.stream_in, fs, self._path(name), path, meter), meter)

        def unless_full() -> OSError | None:
            try:
                job()
            except OSError as exc:
                if exc.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # The disk here, for who reads takes no room there: no reason to try that again.
                return exc
            return None

        if full := self._insist(f"{self._shown(name)} cannot be read", unless_full, is_due=True):
            raise full

    def write(self, name: str, data: bytes) -> None:
        """Write a small file: it is there as a whole or not at all."""

        def job() -> None:
            fs, _ = self._filesystem()
            self._make_folder(name)
            if not filesystem.renames(fs):
                self._call("pipe_file", self._path(name), data)
                return
            folder, _, last = name.rpartition("/")
            # (always the same name: what a kill leaves is written over by the next try)
            fresh = _join(folder, f".{last}.part")
            self._call("pipe_file", self._path(fresh), data)
            self._flush(fresh)
            self._call("mv", self._path(fresh), self._path(name))
            self._flush(name)

        self._insist(f"{self._shown(name)} cannot be written", job, is_due=True)

    def send(self, path: Path, name: str, moved: Moved) -> None:
        """Copy a local file, and look whether it has arrived as it is."""
        size = os.path.getsize(path)
        part = _part(size)

        def job() -> None:
            if name in self._torn:
                # What is left of the last try would be kept, and paid for.
                self._end_uploads(name)
            self._torn.add(name)
            self._make_folder(name)
            with _counting(moved, size) as meter:
                fs, _ = self._filesystem()
                if filesystem.is_async(fs):
                    how, moving = filesystem.in_parts(fs, part, AT_ONCE), min(size, AT_ONCE * part)
                    self._call("put_file", str(path), self._path(name), meter=meter, on_its_way=moving, **how)
                else:
                    self._do(partial(filesystem.stream_out, path, fs, self._path(name), meter), meter)
                self._flush(name)
                try:
                    self._check_sent(path, name, size, part)
                except _Spoilt:
                    # The next push would take it for what it should be: it has the right size.
                    self._call("rm_file", self._path(name))
                    raise
            self._torn.discard(name)

        self._insist(f"{self._shown(name)} cannot be written", job, is_due=True)

    def copy(self, source: str, name: str, path: Path) -> bool:
        """Copy a file there, in a store of objects, else return False. `path` has the same content here."""
        try:
            if not self.can_read_ranges():
                # Nothing there would tell that the source has been damaged since.
                return False
            self._call("cp_file", self._path(source), self._path(name))
            size = os.path.getsize(path)
            self._check_sent(path, name, size, _part(size))
        except Exception:
            # Whatever it is (the source may be gone by now): to send it is as good.
            self._refuse_abandoned()
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file; one that is not there is as good."""
        with contextlib.suppress(FileNotFoundError):
            self._insist(
                f"{self._shown(name)} cannot be removed", lambda: self._call("rm_file", self._path(name))
            )

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder, where there are folders."""
        # What else lies in it is not ours, and an empty folder does no harm.
        with contextlib.suppress(Exception):
            if not filesystem.is_objects(self._opened()):
                self._call("rmdir", self._path(name))

    def end_uploads(self, folder: str) -> int:
        """End the uploads to a folder that a killed process has begun; nobody else would; return how many."""
        problem = f"what was left in {self._shown(folder)} cannot be tidied"
        return self._insist(problem, lambda: self._end_uploads(f"{folder}/"), is_due=True)

    def _end_uploads(self, start: str) -> int:
        fs, _ = self._filesystem()
        if not hasattr(fs, "list_multipart_uploads") or not hasattr(fs, "split_path"):
            return 0
        bucket, key, _ = fs.split_path(self._path(start))
        try:
            answer = self._call("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=key)
        except PermissionError:
            # Who may not see them may well be allowed all the rest.
            return 0
        mine = [one for one in answer.get("Uploads") or [] if one["Key"].startswith(key)]
        for one in mine:
            which = {"Bucket": bucket, "Key": one["Key"], "UploadId": one["UploadId"]}
            with contextlib.suppress(FileNotFoundError, PermissionError):
                self._call("call_s3", "abort_multipart_upload", **which)
        return len(mine)

    def is_abandoned(self) -> bool:
        """Whether it was given up."""
        return self._is_abandoned

    def abandon(self) -> None:
        """End what is on its way, and begin nothing any more."""
        with self._guard:
            self._is_abandoned = True
            pending = [*self._pending]
        for call in pending:
            call.give_up(CancelledError())

    def close(self) -> None:
        """End its connection, if it has one of its own; the next call makes another one."""
        if (found := self._found) and not filesystem.is_async(found[0]):
            self._throw_away()

    def _opened(self) -> Any:
        """Return the filesystem, for what is not tried again itself."""
        return self._insist(f"{self.url} cannot be reached", self._filesystem)[0]

    def _filesystem(self) -> tuple[Any, str]:
        if (found := self._found) is None:
            from fsspec import get_filesystem_class

            # Before the clock runs: from a slow disk it may take longer than a remote has to answer.
            get_filesystem_class(self._given.partition("://")[0])
            # Some connect when they are made, which may hang as any other call.
            made = self._do(self._make, None)
            with self._guard:
                found = self._found = self._found or made
        return found

    def _make(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        # One of our own: a connection that hangs is thrown away with it.
        try:
            options = filesystem.without_tries(self._given, self._options)
            found: tuple[Any, str] = url_to_fs(self._given, **options, skip_instance_cache=True)
        except FileNotFoundError as exc:
            # (a file with a key, say) Else it would look as if nothing were there yet.
            raise PermissionError(f"{exc}") from None
        return found

    def _path(self, name: str) -> str:
        return _join(self._filesystem()[1], name)

    def _shown(self, name: str) -> str:
        return _join(self.url, name) if name else self.url

    def _make_folder(self, name: str) -> None:
        fs, _ = self._filesystem()
        # In a store of objects there are none: it would make the bucket.
        if not filesystem.is_objects(fs):
            self._call("makedirs", self._path(name).rpartition("/")[0], exist_ok=True)

    def _info(self, name: str) -> dict[str, Any]:
        path = self._path(name)
        self._filesystem()[0].invalidate_cache()
        found: dict[str, Any] = self._call("info", path)
        return found

    def _flush(self, name: str) -> None:
        fs, _ = self._filesystem()
        if filesystem.protocol(fs) == "file":
            path = Path(fs._strip_protocol(self._path(name)))
            with disk.joined(path):
                pass
            disk.flush_folder(path.parent)

    def _check_sent(self, path: Path, name: str, size: int, part: int) -> None:
        info = self._info(name)
        if info["size"] != size:
            raise OSError(errno.EIO, f"{info['size']:,} bytes have arrived instead of {size:,}")
        told = etag.told(info)
        if told is None or told.is_of_parts in self._tells_nothing:
            return
        if told.digest == etag.of(path, part if told.is_of_parts else None):
            return
        self._read_back(path, name, size)
        # The bytes are right: this store (one that encrypts, say) means something else by it.
        self._tells_nothing.add(told.is_of_parts)

    def _read_back(self, path: Path, name: str, size: int) -> None:
        with open(path, "rb") as file:
            for at in range(0, size, PIECE):
                if file.read(PIECE) != self._range(name, at, min(at + PIECE, size)):
                    raise _Spoilt(errno.EIO, "other bytes have arrived than were sent")

    def _insist(self, problem: str, job: Callable[[], T], *, is_due: bool = False) -> T:
        """Return what the job returns; try again while that may help. What `is_due` has to be there."""
        began, delay = time.monotonic(), _FIRST_DELAY
        while True:
            try:
                self._refuse_abandoned()
                found = job()
                self.trouble = None
                return found
            except (RemoteError, KeyboardInterrupt):
                raise
            except FileNotFoundError as exc:
                if is_due:
                    raise self._error(problem, exc) from None
                raise
            except Exception as exc:
                self._refuse_abandoned()
                left = began + self._patience - time.monotonic()
                if failures.is_final(exc) or left < delay:
                    # (the cause may have a secret in its text)
                    raise self._error(problem, exc) from None
                self.trouble = failures.text(exc, self._secrets)
                self._reconnect()
            # Many that were refused at one time are not to come back at one time.
            self._sleep(delay * _DICE.uniform(0.5, 1))
            delay = min(2 * delay, _LONGEST_DELAY)

    def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._is_abandoned:
            time.sleep(min(left, 0.1))

    def _refuse_abandoned(self) -> None:
        if self._is_abandoned:
            raise RemoteError(f"{self.url} was given up.", fix="the next start goes on with it.")

    def _error(self, problem: str, exc: BaseException) -> RemoteError:
        error = RemoteError(f"{problem}: {failures.text(exc, self._secrets)}.", fix=failures.advice(exc))
        error.is_final = failures.is_final(exc)
        return error

    def _call(
        self, name: str, *args: Any, meter: Meter | None = None, on_its_way: int = 0, **kwargs: Any
    ) -> Any:
        # (of what is moved at one stroke nobody hears before all of it has moved)
        fs, _ = self._filesystem()
        if meter:
            kwargs["callback"] = meter.callback()
        if not filesystem.is_async(fs):
            return self._do(partial(getattr(fs, name), *args, **kwargs), meter, on_its_way)
        request = Request(meter)
        request.begin_in_loop(getattr(fs, f"_{name}")(*args, **kwargs), fs.loop)
        return self._wait_for(request, on_its_way)

    def _do(self, job: Callable[[], Any], meter: Meter | None, on_its_way: int = 0) -> Any:
        request = Request(meter)
        request.begin_in_thread(job)
        return self._wait_for(request, on_its_way)

    def _wait_for(self, request: Request, on_its_way: int) -> Any:
        with self._guard:
            self._pending.add(request)
        try:
            self._refuse_abandoned()
            return request.wait(self._patience * (1 + on_its_way / _SLOWEST))
        except BaseException as exc:
            if request.is_pending():
                request.give_up(exc)
                self._throw_away()
            raise
        finally:
            with self._guard:
                self._pending.discard(request)

    def _reconnect(self) -> None:
        # A client with one connection would find it closed for ever. (others make theirs as they need them)
        if (found := self._found) and not filesystem.is_objects(found[0]):
            self._throw_away()

    def _throw_away(self) -> None:
        with self._guard:
            found, self._found = self._found, None
        # What still hangs in it ends with its connection.
        with contextlib.suppress(Exception):
            if found:
                found[0].client.close()


@contextlib.contextmanager
def _counting(moved: Moved, size: int) -> Iterator[Meter]:
    meter = Meter(moved, size)
    try:
        yield meter
        meter.fill()
    except BaseException:
        meter.undo()
        raise


def _part(size: int) -> int:
    return max(PART, -(-size // _MOST_PARTS))


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if name and folder else folder or name


_DEPTH = 5
_SLOWEST = 16 << 20
"""So many bytes at least are to move in the time of one patience."""
# Python's own generator is the training's: a draw here would give it other numbers.
_DICE = random.SystemRandom()
_FIRST_DELAY = 0.5
_LONGEST_DELAY = 30.0
_MOST_PARTS = 9000
