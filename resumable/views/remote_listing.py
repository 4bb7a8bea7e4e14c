"""The checkpoints of a remote as rows, like those of a run."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..errors import CheckpointDamaged, FormatTooNew
from ..files.jsonl import plain
from ..files.threads import in_daemons
from ..remote.run_copy import Remote
from ..run import history
from ..run.manifest import Manifest
from .listing import Listed

Row = dict[str, Any]


def of_remote(remote: Remote, last: int | None) -> Listed:
    """Return the checkpoints of a remote; only the manifests of the `last` ones are read.

    >>> from resumable.remote.storage import Store
    >>> of_remote(Remote(Store("memory://nobody")), None).rows
    []
    """
    files, numbers = remote.files(), remote.numbers()
    wanted = [*numbers][-last:] if last else [*numbers]
    found: dict[int, Row] = {}
    abouts: dict[int, Manifest] = {}
    job = partial(_look, remote, files, numbers, found, abouts)
    if wanted:
        in_daemons(job, wanted, remote.store.at_once)
    newest = max(abouts, default=None)
    best = abouts[newest].best if newest is not None else None
    parents = {number: about.parent for number, about in abouts.items()}
    left = history.abandoned(parents, newest, ()) if newest is not None else set()
    for number, row in found.items():
        row |= {"newest": number == newest, "best": bool(best and best.number == number)}
        row |= {"why": None, "interval": None, "abandoned": number in left, "remote": None}
    size = sum(size for number in numbers for size in files[numbers[number]].values())
    return Listed([found[number] for number in wanted], [], None, None, None, best, size, None)


def _look(
    remote: Remote,
    files: dict[str, dict[str, int]],
    numbers: dict[int, str],
    found: dict[int, Row],
    abouts: dict[int, Manifest],
    number: int,
) -> None:
    name = numbers[number]
    row: Row = {"number": number, "path": None, "size": None, "own": None, "problem": None}
    try:
        about = remote.about(name)[0]
        abouts[number] = about
        row |= _facts(about) | {"path": f"{remote}/checkpoints/{name}"}
        _check(remote, name, about, files[name])
    except (CheckpointDamaged, FormatTooNew) as exc:
        row["problem"] = exc.problem
        abouts.pop(number, None)
    found[number] = row


def _facts(about: Manifest) -> Row:
    same = ("epoch", "batch", "step", "samples", "size", "saved", "parent")
    return {
        **{name: getattr(about, name) for name in same},
        "own": about.size,
        "boundary": about.boundary.value,
        "metrics": plain(about.metrics),
        "elsewhere": len(about.elsewhere),
    }


def _check(remote: Remote, name: str, about: Manifest, there: dict[str, int]) -> None:
    for file, record in about.files.items():
        if there.get(file) != record.size:
            size = f"has {there[file]:,} bytes" if file in there else "is missing"
            raise remote.damaged(name, f"{file} {size}, its manifest says {record.size:,}")
