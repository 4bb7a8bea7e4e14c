"""A copy of a run in a remote folder: each checkpoint is complete there, or it is not there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Iterable, Mapping

from ..errors import CheckpointDamaged, FormatTooNew, RemoteError, ResumableError
from ..files.threads import in_daemons
from ..run import checkpoint, manifest, policy
from ..run.manifest import FILE_NAME, FileRecord, Goal, Manifest
from ..run.policy import Facts, Keep
from .storage import Store

FOLDER = "checkpoints"
"""The folder of the checkpoints, there as here."""

MARK = "pushing.json"
"""The manifest that an incomplete checkpoint will have: it tells whose files are in its folder."""


class AnotherRun(RemoteError):
    """The remote folder belongs to another run: no retry will change that."""


class Remote:
    """The copy of a run in a remote folder, which has the layout of the run itself.

    A checkpoint there without its manifest does not exist: the manifest is written when everything else has
    arrived, and removed before anything else is.

    >>> remote = Remote(Store("memory://empty"))
    >>> remote.numbers(), remote.run_id()
    ({}, None)
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.sources: dict[FileRecord, tuple[str, str]] = {}
        """Where this process has put a large file, and with which ETag: the store can copy it from there."""
        self._manifests: dict[str, Manifest] = {}
        self._pointers: dict[str, str] = {}

    def __str__(self) -> str:
        return str(self.store)

    def numbers(self) -> dict[int, str]:
        """Return the complete checkpoints, oldest first: save numbers, and the names of their folders."""
        return _complete(self.files())

    def files(self) -> dict[str, dict[str, int]]:
        """Return the sizes of the files of each checkpoint there, complete or not, by its folder's name."""
        found: dict[str, dict[str, int]] = {}
        for path, size in self.store.sizes(FOLDER).items():
            name, _, file = path.partition("/")
            if checkpoint.NAME.fullmatch(name):
                found.setdefault(name, {})[file] = size
        return found

    def run_id(self) -> str | None:
        """Return the id of the run that has claimed this folder, if one has."""
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
        """Make this the folder of a run; RemoteError if it belongs to another."""
        self.is_of(run_id)
        if self.run_id() is None:
            self.store.write("run.json", manifest.seal({"run_id": run_id}))
            # Another run may have claimed it at the same moment.
            self.is_of(run_id)

    def is_of(self, run_id: str) -> bool:
        """Return whether this is the folder of a run already; RemoteError if it belongs to another."""
        found = None
        # A damaged manifest does not say whose it is.
        with contextlib.suppress(CheckpointDamaged):
            found, _ = self.whose()
        if found not in (None, run_id):
            raise AnotherRun(
                f"{self} holds another run ({found}) than this one ({run_id}).",
                fix="give each run a remote folder of its own; nothing in this one was touched.",
            )
        return found is not None

    def begin(self, run_id: str, *, commits: bool = True) -> dict[int, str]:
        """Claim this folder for a run, and try to write there; return its checkpoints as `numbers` does.

        `commits`: False for a process that pushes only shards, and leaves the rest to another one.
        """
        if not commits:
            self.is_of(run_id)
            return self.numbers()
        self.claim(run_id)
        self.store.write(_PROBE, b"whether this can be written\n")
        self.store.remove(_PROBE)
        self.store.end_uploads(FOLDER)
        return self.numbers()

    def begun(self) -> list[int]:
        """Return the checkpoints of which something is there and not all, newest first."""
        found = self.files().items()
        begun = [_number(name) for name, files in found if MARK in files and manifest.NAME not in files]
        return sorted(begun, reverse=True)

    def whose(self) -> tuple[str | None, dict[int, str]]:
        """Return the id of the run in this folder, and its checkpoints as `numbers` does."""
        run_id, numbers = self.run_id(), self.numbers()
        if numbers and run_id is None:
            run_id = self.about(numbers[max(numbers)])[0].run_id
        return run_id, numbers

    def best(self, numbers: Mapping[int, str], above: int = 0) -> int | None:
        """Return the number of the best of these checkpoints, according to the newest above a number."""
        for number in sorted(filter(above.__lt__, numbers), reverse=True):
            try:
                best = self.about(numbers[number])[0].best
            except ResumableError:
                # A pull of it says what is wrong.
                continue
            if best and best.number in numbers:
                return best.number
        return None

    def about(self, name: str) -> tuple[Manifest, bytes]:
        """Return the manifest of a checkpoint there, parsed and as it was written."""
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
        """Return the error for a damaged checkpoint there."""
        return CheckpointDamaged(
            f"{self}/{FOLDER}/{name} is damaged: {problem}.",
            fix="an older one is used where there is one. This one can be deleted there.",
        )

    def commit(self, name: str, text: bytes) -> None:
        """Write the manifest of a checkpoint whose files have arrived, and remove others of its number."""
        path = f"{FOLDER}/{name}/{manifest.NAME}"
        self.store.write(path, text)
        if self.store.read(path, len(text)) != text:
            self.store.remove(path)
            raise RemoteError(
                f"{self}/{path} is not as it was written.",
                fix="look whether something else writes there; the next push sends it again.",
            )
        self.store.remove(f"{FOLDER}/{name}/{MARK}")
        # From a branch of the training that was left: which of two with one number counts would be chance.
        for other, files in self.files().items():
            if other != name and _number(other) == _number(name):
                self._remove(other, files)

    def uncommit(self, name: str) -> None:
        """Remove the manifest of a checkpoint, if it has one: from then on it does not exist."""
        self.store.remove(f"{FOLDER}/{name}/{manifest.NAME}")
        self._manifests.pop(name, None)

    def prune(
        self,
        keep: Keep | None,
        goal: Goal | None,
        protect: Iterable[int | None],
        due: Container[int] = (),
    ) -> list[int]:
        """Remove the checkpoints that `keep` does not keep, and incomplete ones; return the numbers.

        Those that are `due` may be incomplete.
        """
        found = self.files()
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
        # An incomplete one that is newer than all may be on its way from elsewhere.
        for name, files in found.items():
            is_old = _number(name) < max(names, default=0) and _number(name) not in due
            if manifest.NAME not in files and _ours(files) and is_old:
                self._remove(name, files)
        return going

    def _facts(self, number: int, name: str) -> Facts:
        # One that cannot be read is kept for as long as its number says.
        with contextlib.suppress(CheckpointDamaged, FormatTooNew):
            return policy.facts_of(self._manifests.get(name) or self.about(name)[0])
        return _facts(number, name)

    def _remove(self, name: str, files: Iterable[str]) -> None:
        self.uncommit(name)
        self.remove_files(name, files)
        for folder in checkpoint.FOLDERS:
            self.store.remove_folder(f"{FOLDER}/{name}/{folder.rstrip('/')}")
        self.store.remove_folder(f"{FOLDER}/{name}")

    def remove_files(self, name: str, files: Iterable[str]) -> None:
        """Remove those of the files in a checkpoint's folder that are ours; its manifest is gone already."""
        others = [f"{FOLDER}/{name}/{file}" for file in _ours(files) if file not in (MARK, manifest.NAME)]
        in_daemons(self.store.remove, others, self.store.at_once)
        # Last: it tells whose the other files are.
        if MARK in files:
            self.store.remove(f"{FOLDER}/{name}/{MARK}")

    def point_at(self, name: str, newest: int, best: int | None) -> None:
        """Make newest.json and best.json name a checkpoint, if it is the newest, or the best."""
        for word, number in (("newest", newest), ("best", best)):
            if _number(name) == number:
                self.point(word, name)

    def point(self, word: str, name: str) -> None:
        """Make `word`.json name a checkpoint: for people and their tools; nothing here reads it."""
        if self._pointers.get(word) != name:
            about = {"checkpoint": f"{FOLDER}/{name}", "number": _number(name)}
            self.store.write(f"{word}.json", manifest.seal(about))
            self._pointers[word] = name


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
_PART = re.compile(r"(?:(?:ranks|model|optimizer|extra)/)?\.[a-z0-9.-]{1,50}\.part")
_PROBE = ".resumable-probe"
