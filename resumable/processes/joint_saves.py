"""Saves made by several processes: each writes its files, and a checkpoint counts when all are there."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..errors import RankLost, RanksDiffer, ResumableError
from ..files import codec, large_files
from ..files.large_files import Content, Way, Written
from ..files.strict_json import Json
from ..run import manifest
from ..run.checkpoint import Stage
from ..run.manifest import FileRecord, Manifest
from .ranks import Place, Ranks, told, unpack


class Said(NamedTuple):
    """What a process posts when it begins a save."""

    place: Place
    boundary: str
    layout: str
    """A digest of the tensors' layout in the files that all write; empty if one process writes them."""
    replicas: str
    """A digest of the tensors that should be equal on every rank; empty if that is not checked."""
    about: str | None
    """The manifest, from rank 0, which decides; None from all others."""


class Group:
    """The processes that see the same run directory; the lowest of them makes the checkpoints in it."""

    beside: Sequence[int] = ()
    """The leaders of the other disks without which this one has no whole checkpoint."""

    def __init__(self, rank: int, groups: Sequence[Sequence[int]]) -> None:
        self.leaders = [group[0] for group in groups]
        self.members = next(list(group) for group in groups if rank in group)
        self.leader = self.members[0]
        self.leads = rank == self.leader
        self.index = self.members.index(rank)
        self.outside = sorted(other for group in groups for other in group if other not in self.members)


class JointSaves:
    """The saves of a training of several processes. They talk through the store, in the background."""

    def __init__(self, ranks: Ranks, group: Group) -> None:
        self._ranks = ranks
        self.group = group
        self._posted: dict[int, list[str]] = {}
        self._verdicts: deque[str] = deque()
        self._failed: list[Stage] = []
        """Stages that could not be removed because another process still wrote in them."""

    def commit(
        self,
        number: int,
        said: Said,
        replicas: Mapping[str, str],
        folder: Path,
        files: Mapping[str, Content],
        shared: Mapping[str, int],
        way: Way,
    ) -> tuple[Manifest | None, dict[str, Written]]:
        """Write this process's files; return once the checkpoint is durable, or raise what all raise.

        Return the manifest, if this process leads, and the files that it wrote.
        `shared` has the sizes of the files that several processes write, `replicas` the digests of the
        tensors that should be equal on every rank.
        """
        self._forget(number)
        stage = about = None
        try:
            stage = Stage(folder, number, said.place[2], self._come(number, said, replicas))
            self._remove_failed()
            if self.group.leads:
                with stage.making(shared):
                    about, written = self._lead(number, stage, files, way)
            else:
                written = self._follow(number, stage, files)
        except BaseException as exc:
            self.fail(number, exc)
            self._failed += [stage] if stage and self.group.leads else []
            if not self._ranks.is_first and not isinstance(exc, RankLost):
                self._hear_verdict(number, exc)
            raise
        if self._ranks.is_first:
            self._ranks.post(_key(number, "verdict/0"), {"ok": True})
        else:
            self._hear_verdict(number)
        return about, stage.published(written)

    def _remove_failed(self) -> None:
        # All processes have begun the next save or have left, so none writes there any more.
        while self._failed:
            self._failed.pop().remove()

    def fail(self, number: int, error: BaseException) -> None:
        """Tell the others that this checkpoint will not be made."""
        name = "verdict/0" if self._ranks.is_first else "fault"
        # Others that cannot be reached find out by themselves.
        with contextlib.suppress(RankLost):
            self._ranks.raise_once(_key(number, name), told(self._ranks.rank, error))

    def first_said(self, number: int) -> Said:
        """Return what rank 0 posted for a save."""
        (found,) = self._wait(number, "said", [0], is_due=True)
        return _said(found)

    def heard(self, number: int) -> Manifest:
        """Return rank 0's manifest of a save, without the files, which are not written yet."""
        text = self.first_said(number).about
        assert text is not None
        return manifest.from_json(text.encode())

    def check_disk(self, folder: Path) -> None:
        """Raise RanksDiffer unless all processes see what rank 0 writes into the folder."""
        name = self._ranks.first("a look at the disk", lambda: _probe(folder))
        try:
            self._ranks.each("the look at the disk", lambda: self._see(folder, name))
        finally:
            if self._ranks.is_first:
                (folder / name).unlink(missing_ok=True)

    def _see(self, folder: Path, name: str) -> None:
        end = time.monotonic() + min(_AGREES_LATE, self._ranks.timeout / 2)
        # A network disk may show a new name only after some seconds.
        while not (folder / name).exists():
            if time.monotonic() > end:
                person, first = self._ranks.person(self._ranks.rank), self._ranks.person(0)
                raise RanksDiffer(
                    f"{person} does not see what {first} writes into {folder}.",
                    fix="put the run on a disk that all processes share, or say Ranks(shared=False): then "
                    "each node keeps a full copy of every checkpoint on its own disk.",
                )
            time.sleep(_LOOKS_AGAIN)

    def close(self) -> None:
        """Wait for the others to leave: the store, with the last verdict, may end with this process."""
        ranks = self._ranks
        end = time.monotonic() + min(_LEAVES_LATE, ranks.timeout)
        while ranks.is_first and any(ranks.reason_to_leave(rank) is None for rank in range(1, ranks.size)):
            if time.monotonic() > end or ranks.trouble:
                break
            time.sleep(_LOOKS_AGAIN)
        self._remove_failed()

    def _come(self, number: int, said: Said, replicas: Mapping[str, str]) -> str:
        """Meet the others at this save; RanksDiffer if their place or their tensors differ."""
        ranks = self._ranks
        self._post_own(number, "said", list(said))
        ranks.post("news", [number, ranks.rank, said.place[2]])
        if not ranks.is_first:
            if self.first_said(number).replicas != said.replicas:
                self._post_own(number, "replicas", dict(replicas))
            (token,) = self._wait(number, "token", [0])
            return str(token)
        for rank, other in enumerate(self._wait(number, "said", range(ranks.size), is_due=True)):
            problem = _differing(said, rank, _said(other))
            if problem is None and said.replicas != _said(other).replicas:
                (theirs,) = self._wait(number, "replicas", [rank])
                problem = _diverged(replicas, rank, theirs)
            if problem:
                fix = "make the same on every rank: model and data, and save() at the same place."
                raise ranks.in_trouble(RanksDiffer(f"{_what(number)}: {problem}.", fix=fix))
        token = secrets.token_hex(4)
        self._post_own(number, "token", token)
        return token

    def _lead(
        self, number: int, stage: Stage, files: Mapping[str, Content], way: Way
    ) -> tuple[Manifest, dict[str, Written]]:
        about = self.heard(number)
        self._post_own(number, "stage", way)
        if self.group.outside:
            self._send(number, files)
        written = stage.write(files, way)
        found = [_to_json(files, written), *self._fetch(number, stage)]
        others = [rank for rank in self.group.members if rank != self.group.leader]
        found += self._wait(number, "wrote", others)
        records = _records(found)
        if self.group.beside:
            about = self._with_others(number, about, records)
        about = stage.close(about, records)
        self._publish(number, stage, about)
        return about, written

    def _with_others(self, number: int, about: Manifest, records: Mapping[str, FileRecord]) -> Manifest:
        """Add the files of the disks that hold the rest."""
        own = {path: list(record) for path, record in records.items() if codec.shard_of(path) is not None}
        self._post_own(number, "shards", own)
        elsewhere = {
            path: FileRecord(size, digest, tuple(blocks))
            for of_one in self._wait(number, "shards", self.group.beside)
            for path, (size, digest, blocks) in of_one.items()
        }
        return replace(about, elsewhere=elsewhere, is_first_part=self._ranks.is_first)

    def _follow(self, number: int, stage: Stage, files: Mapping[str, Content]) -> dict[str, Written]:
        # The way that the leader writes: if each process tried the disk, they would all do so at once.
        (way,) = self._wait(number, "stage", [self.group.leader])
        if self.group.outside:
            self._send(number, files)
        try:
            written = stage.write(files, way)
            stage.flush()
        except OSError as exc:
            raise exc if isinstance(exc, ResumableError) else stage.failed(exc) from exc
        self._post_own(number, "wrote", _to_json(files, written))
        return written

    def _send(self, number: int, files: Mapping[str, Content]) -> None:
        """Send this rank's own files to the processes that do not see this disk."""
        own = {
            path: content
            for path, content in files.items()
            if codec.has_one_writer(path) and codec.shard_of(path) is None
        }
        for path, content in own.items():
            self._posted[number] += self._ranks.post_bytes(_key(number, path), bytes(content.whole()))
        self._post_own(number, "sent", [*own])

    def _fetch(self, number: int, stage: Stage) -> list[Json]:
        found = []
        for paths in self._wait(number, "sent", self.group.outside):
            files = {path: Content(self._ranks.bytes_of(_key(number, path))) for path in paths}
            found.append(_to_json(files, stage.write(files)))
        return found

    def _publish(self, number: int, stage: Stage, about: Manifest) -> None:
        if len(self.group.leaders) > 1:
            # Published on no node before it is complete on all.
            self._post_own(number, "ready", True)
            if self._ranks.is_first:
                self._wait(number, "ready", self.group.leaders)
                self._post_own(number, "publish", True)
            self._wait(number, "publish", [0])
        stage.publish(about)
        if len(self.group.leaders) > 1:
            self._post_own(number, "done", True)
            if self._ranks.is_first:
                self._wait(number, "done", self.group.leaders)

    def _hear_verdict(self, number: int, cause: BaseException | None = None) -> None:
        (found,) = self._ranks.wait({0: _key(number, "verdict/0")}, _what(number))
        unpack(found, cause)

    def _forget(self, number: int) -> None:
        """Delete the keys of saves that all ranks have ended; after a failure one may be two behind."""
        while len(self._posted) > 2:
            self._ranks.forget(self._posted.pop(min(self._posted)))
        # Verdicts stay longer, since a rank may read one late.
        self._verdicts.append(_key(number, "verdict/0" if self._ranks.is_first else "fault"))
        if len(self._verdicts) > _KEPT and self._ranks.is_first:
            self._ranks.forget([self._verdicts.popleft()])
        self._posted[number] = []

    def _post_own(self, number: int, name: str, value: Json) -> None:
        key = _key(number, f"{name}/{self._ranks.rank}")
        self._posted[number].append(key)
        self._ranks.post(key, value)

    def _wait(self, number: int, name: str, ranks: Iterable[int], *, is_due: bool = False) -> list[Json]:
        keys = {rank: _key(number, f"{name}/{rank}") for rank in ranks}
        # Rank 0 posts the verdict, so it watches for faults; all others watch for the verdict.
        unless = _key(number, "fault" if self._ranks.is_first else "verdict/0")
        return self._ranks.wait(keys, _what(number), is_due=is_due, unless=unless) if keys else []


def _key(number: int, name: str) -> str:
    return f"save/{number}/{name}"


def _what(number: int) -> str:
    return f"checkpoint {number} was not made"


def _said(found: Json) -> Said:
    place, *rest = found
    return Said(tuple(place), *rest)


def _differing(first: Said, rank: int, said: Said) -> str | None:
    if (said.place, said.boundary) != (first.place, first.boundary):
        return f"rank 0 stands at {_described(first)}, and rank {rank} at {_described(said)}"
    if said.layout != first.layout:
        return f"the tensors of rank {rank} are not those of rank 0: other names, shapes, or another order"
    return None


def _diverged(first: Mapping[str, str], rank: int, theirs: Mapping[str, str]) -> str:
    names = [name for name in first if theirs.get(name) != first[name]] or sorted(
        theirs.keys() - first.keys()
    )
    more = f", and {len(names) - 1} more" if len(names) > 1 else ""
    return f"on rank {rank} the tensor {names[0]} is not what it is on rank 0{more}"


def _described(said: Said) -> str:
    epoch, batch, step = said.place
    return f"epoch {epoch}, batch {batch}, step {step} ({said.boundary})"


def _to_json(files: Mapping[str, Content], written: Mapping[str, Written]) -> Json:
    return {
        path: [one.size, files[path].begin, [digest.hex() for digest in one.blocks]]
        for path, one in written.items()
    }


def _records(found: Iterable[Json]) -> dict[str, FileRecord]:
    """Return the record of each file, folded from the pieces that the processes wrote."""
    pieces: dict[str, list[tuple[int, int, list[str]]]] = {}
    for of_one in found:
        for path, (size, begin, digests) in of_one.items():
            pieces.setdefault(path, []).append((begin, size, digests))
    records = {}
    for path, parts in sorted(pieces.items()):
        digests = [bytes.fromhex(digest) for _, _, of_part in sorted(parts) for digest in of_part]
        # Another number of processes reads only parts of such a file.
        blocks = tuple(digest.hex() for digest in digests) if codec.shard_of(path) is not None else ()
        records[path] = FileRecord(parts[0][1], large_files.fold(digests), blocks)
    return records


def _probe(folder: Path) -> str:
    path = folder / f".probe-{secrets.token_hex(4)}"
    path.touch()
    return path.name


_LOOKS_AGAIN = 0.02
_LEAVES_LATE = 5
_KEPT = 16
_AGREES_LATE = 10
