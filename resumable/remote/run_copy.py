"""A copy of a run in a remote folder: each checkpoint is complete there, or it is not there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..errors import CheckpointDamaged, FormatTooNew, RemoteError, ResumableError
from ..files import disk
from ..files.threads import in_daemons
from ..run import checkpoint, manifest, policy
from ..run.checkpoint import Checkpoint
from ..run.manifest import FILE_NAME, Goal, Manifest
from ..run.policy import Facts, Keep
from .deadline import Moved
from .storage import PART, Store

FOLDER = "checkpoints"
"""What holds the checkpoints, there as here."""

MARK = "pushing.json"
"""The manifest that a checkpoint will have, in a folder that is not complete: whose the files in it are."""


class AnotherRun(RemoteError):
    """A remote folder is another run's: nothing that is done here will ever change that."""


class Sent(NamedTuple):
    """What a push has moved, in bytes: sent from here, and copied from another checkpoint there."""

    sent: int
    copied: int


class Remote:
    """The copy of a run in a remote folder, which looks like the run itself.

    A checkpoint there without its manifest does not exist: the manifest is written when all else has
    arrived, and removed before anything else is.

    >>> remote = Remote(Store("memory://empty"))
    >>> remote.numbers(), remote.run_id()
    ({}, None)
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._manifests: dict[str, Manifest] = {}
        self._points: dict[str, str] = {}

    def __str__(self) -> str:
        return str(self.store)

    def numbers(self) -> dict[int, str]:
        """Return the checkpoints that are complete, oldest first: save numbers, and the folders' names."""
        return _complete(self._look())

    def _look(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for path, size in self.store.sizes(FOLDER).items():
            name, _, file = path.partition("/")
            if checkpoint.NAME.fullmatch(name):
                found.setdefault(name, {})[file] = size
        return found

    def run_id(self) -> str | None:
        """Return what tells the run that is there from all others; None if none is there."""
        text = self.store.read("run.json", _SMALL)
        if text is None:
            return None
        try:
            return str(manifest.unseal(text)["run_id"])
        except FormatTooNew as exc:
            raise FormatTooNew(f"{self}/run.json cannot be read: {exc.problem}", fix=exc.fix) from exc
        except (ValueError, KeyError) as exc:
            raise RemoteError(
                f"{self}/run.json was not written by resumable, or is damaged.",
                fix="give the run a remote folder of its own; nothing in this one was touched.",
            ) from exc

    def claim(self, run_id: str) -> None:
        """Make this the folder of a run; RemoteError if it is another's."""
        self.is_of(run_id)
        if self.run_id() is None:
            self.store.write("run.json", manifest.seal({"run_id": run_id}))
            # Another run may have found nobody there at the same moment.
            self.is_of(run_id)

    def is_of(self, run_id: str) -> bool:
        """Whether this is the folder of a run already; RemoteError if it is another's."""
        found = None
        # (what is damaged there says nothing)
        with contextlib.suppress(CheckpointDamaged):
            found, _ = self.whose()
        if found not in (None, run_id):
            raise AnotherRun(
                f"{self} holds another run ({found}) than this one ({run_id}).",
                fix="give each run a remote folder of its own; nothing in this one was touched.",
            )
        return found is not None

    def begin(self, run_id: str) -> dict[int, str]:
        """Make this the folder of a run, to push to; return its checkpoints as `numbers` does."""
        self.claim(run_id)
        self.try_to_write()
        self.store.end_uploads(FOLDER)
        return self.numbers()

    def whose(self) -> tuple[str | None, dict[int, str]]:
        """Return the id of the run that is there, and its checkpoints as `numbers` does."""
        run_id, numbers = self.run_id(), self.numbers()
        if numbers and run_id is None:
            run_id = self.about(numbers[max(numbers)])[0].run_id
        return run_id, numbers

    def best(self, numbers: Mapping[int, str], above: int = 0) -> int | None:
        """Return the number of the best of these checkpoints, as the newest above a number knows it."""
        for number in sorted(filter(above.__lt__, numbers), reverse=True):
            try:
                best = self.about(numbers[number])[0].best
            except ResumableError:
                # (whoever pulls it is told)
                continue
            if best and best.number in numbers:
                return best.number
        return None

    def try_to_write(self) -> None:
        """Write a small file and remove it: raise what would go wrong with a checkpoint."""
        self.store.write(_PROBE, b"whether this can be written\n")
        self.store.remove(_PROBE)

    def about(self, name: str) -> tuple[Manifest, bytes]:
        """Return what a checkpoint that is there says about itself, and the text of that."""
        text = self.store.read(f"{FOLDER}/{name}/{manifest.NAME}", _LARGEST_MANIFEST)
        if text is None:
            raise self.damaged(name, f"{manifest.NAME} is missing")
        try:
            about = manifest.from_json(text)
        except FormatTooNew as exc:
            raise FormatTooNew(f"{self}/{FOLDER}/{name} cannot be read: {exc.problem}", fix=exc.fix) from exc
        except ValueError as exc:
            raise self.damaged(name, f"{manifest.NAME}: {exc}") from exc
        if name != (right := checkpoint.name(about.number, about.step)):
            raise self.damaged(name, f"{manifest.NAME} is the one of {right}")
        self._manifests[name] = about
        return about, text

    def damaged(self, name: str, problem: str) -> CheckpointDamaged:
        """Return the error that says what is wrong with a checkpoint there."""
        return CheckpointDamaged(
            f"{self}/{FOLDER}/{name} is damaged: {problem}.",
            fix="an older one is used where there is one. This one can be deleted there.",
        )

    def push(self, found: Checkpoint, moved: Moved) -> Sent:
        """Copy a checkpoint there, complete on return; what is there already is not sent again."""
        name, about = found.path.name, found.about
        folder = f"{FOLDER}/{name}"
        text = disk.read_small(found.path, manifest.NAME)
        there = self.store.sizes(folder)
        if self._is_complete(folder, about, text, there):
            moved(about.size)
            return Sent(0, 0)
        # What is damaged here must not be what is left when this machine is gone.
        found.verify()
        kept = self._begin(folder, text, there)
        here = {file: record.size for file, record in about.files.items() if kept.get(file) == record.size}
        moved(sum(here.values()))
        copied = self._copy(found, folder, here.keys(), moved)
        self._send(found, folder, [file for file in about.files if file not in {*here, *copied}], moved)
        self._end(folder, about, text)
        self._manifests[name] = about
        self._remove_of_same_number(name)
        copies = sum(about.files[file].size for file in copied)
        return Sent(about.size - sum(here.values()) - copies, copies)

    def _is_complete(self, folder: str, about: Manifest, text: bytes, there: Mapping[str, int]) -> bool:
        if any(there.get(file) != record.size for file, record in about.files.items()):
            return False
        path = f"{folder}/{manifest.NAME}"
        return there.get(manifest.NAME) == len(text) and self.store.read(path, len(text)) == text

    def missing(self, found: Checkpoint) -> int | None:
        """Return how many bytes of a checkpoint's files a push would have to send; None: it is complete."""
        folder = f"{FOLDER}/{found.path.name}"
        text = disk.read_small(found.path, manifest.NAME)
        there = self.store.sizes(folder)
        if self._is_complete(folder, found.about, text, there):
            return None
        kept = there if self._is_begun(folder, text, there) else {}
        return sum(r.size for file, r in found.about.files.items() if kept.get(file) != r.size)

    def _is_begun(self, folder: str, text: bytes, there: Mapping[str, int]) -> bool:
        return there.get(MARK) == len(text) and self.store.read(f"{folder}/{MARK}", len(text)) == text

    def _begin(self, folder: str, text: bytes, there: Mapping[str, int]) -> Mapping[str, int]:
        """Return which files can stay: those of the same checkpoint, where a push of it was ended."""
        if manifest.NAME in there:
            self.store.remove(f"{folder}/{manifest.NAME}")
        if self._is_begun(folder, text, there):
            return there
        # Of the same size, but of another branch of the training, or who knows whose.
        self._remove_files(folder, there)
        self.store.write(f"{folder}/{MARK}", text)
        return {}

    def _copy(self, found: Checkpoint, folder: str, but: Iterable[str], moved: Moved) -> list[str]:
        """Copy there what another checkpoint there has already; return which files."""
        due = {f: r for f, r in found.about.files.items() if f not in but and r.size >= _WORTH_A_COPY}
        others = [name for name in self.numbers().values() if name != found.path.name] if due else []
        if not others:
            return []
        newest = others[-1]
        with contextlib.suppress(ResumableError):
            source = self._manifests.get(newest) or self.about(newest)[0]
            known = {record: file for file, record in source.files.items()}
            copied = []
            for file, record in due.items():
                path = f"{FOLDER}/{newest}/{known[record]}" if record in known else None
                if path and self.store.copy(path, f"{folder}/{file}", found.path / file):
                    copied.append(file)
                    moved(record.size)
            return copied
        return []

    def _send(self, found: Checkpoint, folder: str, files: Sequence[str], moved: Moved) -> None:
        sizes = {file: found.about.files[file].size for file in files}
        small = [file for file in files if sizes[file] < 2 * PART]

        def send(file: str) -> None:
            self.store.send(found.path / file, f"{folder}/{file}", moved)

        # Each of the large ones is sent in parts, several at once: two of them would only need more memory.
        in_daemons(send, small, min(_SMALL_AT_ONCE, self.store.at_once))
        for file in files:
            if file not in small:
                send(file)

    def _end(self, folder: str, about: Manifest, text: bytes) -> None:
        there = self.store.sizes(folder)
        for file, record in about.files.items():
            if there.get(file) != record.size:
                raise RemoteError(
                    f"{self}/{folder}/{file} has {there.get(file, 'no')} bytes after it was sent; "
                    f"it should have {record.size:,}.",
                    fix="look whether something else writes or deletes there; the next push sends it again.",
                )
        self.store.write(f"{folder}/{manifest.NAME}", text)
        if self.store.read(f"{folder}/{manifest.NAME}", len(text)) != text:
            self.store.remove(f"{folder}/{manifest.NAME}")
            raise RemoteError(
                f"{self}/{folder}/{manifest.NAME} is not as it was written.",
                fix="look whether something else writes there; the next push sends it again.",
            )
        self.store.remove(f"{folder}/{MARK}")

    def _remove_of_same_number(self, name: str) -> None:
        # From a branch of the training that was left: two of one number would be told apart by chance.
        for other, files in self._look().items():
            if other != name and _number(other) == _number(name):
                self._remove(other, files)

    def prune(self, keep: Keep | None, goal: Goal | None, protect: Iterable[int | None]) -> list[int]:
        """Remove all checkpoints but those that `keep` names, and what pushes have left; return which."""
        found = self._look()
        names = _complete(found)
        going = []
        if keep is not None:
            by_name = not keep.every and (goal is None or keep.best == 1)
            facts = [
                _facts(number, name) if by_name else self._facts(number, name)
                for number, name in names.items()
            ]
            going = policy.to_prune(facts, keep, goal, protect)
        for number in going:
            self._remove(names[number], found[names[number]])
        # (one that is newer than all may be on its way from elsewhere)
        for name, files in found.items():
            if manifest.NAME not in files and _ours(files) and _number(name) < max(names, default=0):
                self._remove(name, files)
        return going

    def _facts(self, number: int, name: str) -> Facts:
        # What cannot be read is kept as long as its number says.
        with contextlib.suppress(CheckpointDamaged, FormatTooNew):
            return policy.facts_of(self._manifests.get(name) or self.about(name)[0])
        return _facts(number, name)

    def _remove(self, name: str, files: Iterable[str]) -> None:
        folder = f"{FOLDER}/{name}"
        # First of all: from then on it does not exist.
        self.store.remove(f"{folder}/{manifest.NAME}")
        self._manifests.pop(name, None)
        self._remove_files(folder, files)
        self.store.remove_folder(f"{folder}/{checkpoint.RANKS.rstrip('/')}")
        self.store.remove_folder(folder)

    def _remove_files(self, folder: str, files: Iterable[str]) -> None:
        others = [f"{folder}/{file}" for file in _ours(files) if file not in (MARK, manifest.NAME)]
        in_daemons(self.store.remove, others, self.store.at_once)
        # Last: it says whose the others are.
        if MARK in files:
            self.store.remove(f"{folder}/{MARK}")

    def point_at(self, name: str, newest: int, best: int | None) -> None:
        """Let newest.json and best.json say of a checkpoint that it is that, where it is."""
        for word, number in (("newest", newest), ("best", best)):
            if _number(name) == number:
                self.point(word, name)

    def point(self, word: str, name: str) -> None:
        """Let `word`.json say which checkpoint it is: for people and their tools; nothing here reads it."""
        if self._points.get(word) != name:
            about = {"checkpoint": f"{FOLDER}/{name}", "number": _number(name)}
            self.store.write(f"{word}.json", manifest.seal(about))
            self._points[word] = name


def _complete(found: Mapping[str, Mapping[str, int]]) -> dict[int, str]:
    return {_number(name): name for name in sorted(found, key=_order) if manifest.NAME in found[name]}


def _ours(files: Iterable[str]) -> list[str]:
    return [file for file in files if FILE_NAME.fullmatch(file) or _PART.fullmatch(file)]


def _number(name: str) -> int:
    return _order(name)[0]


def _order(name: str) -> tuple[int, int]:
    number, _, step = name.split("-")
    return int(number), int(step)


def _facts(number: int, name: str) -> Facts:
    return Facts(number, _order(name)[1])


_SMALL = 1 << 20
_LARGEST_MANIFEST = 64 << 20
_PART = re.compile(r"(?:ranks/)?\.[a-z0-9.-]{1,50}\.part")
_PROBE = ".resumable-probe"
_WORTH_A_COPY = 1 << 20
_SMALL_AT_ONCE = 2
