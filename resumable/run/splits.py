"""Random splits of a dataset, drawn once in a run's life: a resume moves no sample to another part."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ..errors import CheckpointDamaged, FormatTooNew, ResumableError, SaveFailed, StateMismatch, UsageError
from ..files import disk
from ..files.strict_json import Json, typed
from . import manifest

if sys.platform != "win32":
    import fcntl

# Through a link the file would be made elsewhere.
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)

NAME = "splits.json"
"""The file in the run directory."""


def split(
    folder: Path, n: int, fractions: Sequence[float], name: str = "split", seed: int = 0
) -> list[list[int]]:
    """Split `n` indices at random into parts of these sizes, in the same way for the run's whole life.

    >>> split(Path("runs/exp"), 10, [0.8, 0.2], seed=1)
    [[2, 9, 6, 4, 0, 3, 1, 7], [8, 5]]
    """
    _check(n, name, seed)
    lengths = _lengths(n, fractions)
    # numpy promises the same stream in all versions only for this generator.
    order = np.random.RandomState(seed).permutation(n).astype("<i8")
    digest = xxhash.xxh3_128_hexdigest(np.concatenate([np.asarray(lengths, "<i8"), order]).tobytes())
    record = {"n": n, "fractions": [*map(_plain, fractions)], "seed": seed, "digest": digest}
    if name not in (known := records(folder)):
        known = _added(folder, {name: record})
    _compare(folder, name, known[name], record)
    ends = np.cumsum(lengths)[:-1]
    return [part.tolist() for part in np.split(order, ends)]


def records(folder: Path) -> dict[str, Json]:
    """Return the splits of a run, by name."""
    if not os.path.lexists(folder / NAME):
        return {}
    try:
        body = manifest.unseal(disk.read_small(Path(os.path.realpath(folder)), NAME))
        if body.keys() != {"splits"}:
            raise ValueError(f"it has the keys {sorted(body)}")
        return _checked(body["splits"])
    except FormatTooNew as exc:
        raise FormatTooNew(f"{folder / NAME} cannot be read: {exc.problem}", fix=exc.fix) from exc
    except (CheckpointDamaged, ValueError) as exc:
        problem = exc.problem if isinstance(exc, ResumableError) else f"{folder / NAME} is damaged: {exc}."
        raise CheckpointDamaged(
            problem,
            fix="put it back from a copy of the run. Without one delete it, and split with the n, the "
            "fractions and the seed of before: a resume compares that with what the checkpoint knows.",
        ) from exc


def adopt(folder: Path, told: Json) -> None:
    """Adopt the splits of a checkpoint; StateMismatch if the run has different ones."""
    known, told = records(folder), _checked(told)
    for name in told.keys() & known.keys():
        _compare(folder, name, told[name], known[name])
    if told.keys() - known.keys():
        _added(folder, told)


def _added(folder: Path, new: Mapping[str, Json]) -> dict[str, Json]:
    """Write the splits with new names, and return all; if several processes add one, the first wins."""
    with _alone(folder):
        body = {"splits": {**new, **records(folder)}}
        with _writing(folder):
            disk.replace(folder / NAME, manifest.seal(body))
    return {**new, **records(folder)}


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with _writing(folder):
        disk.make_folder(folder)
        fd = os.open(folder / ".splits.lock", os.O_RDWR | os.O_CREAT | _NOFOLLOW, 0o666)
    try:
        if sys.platform != "win32":
            _wait_for(fd)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise SaveFailed(
            f"{folder / NAME} cannot be written: {exc}.",
            fix="mend the cause (room on the disk, permissions), or give another run directory.",
        ) from exc


def _wait_for(fd: int) -> None:
    # Bounded: the holder may have been stopped, and some file systems have no locks.
    end = time.monotonic() + _PATIENCE
    with contextlib.suppress(OSError):
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    break
                time.sleep(0.01)


_PATIENCE = 10.0


def _compare(folder: Path, name: str, then: Mapping[str, Json], now: Mapping[str, Json]) -> None:
    if then == now:
        return
    if _asked(then) == _asked(now):
        raise StateMismatch(
            f"the split {name!r} of {folder} ({_asked(now)}) has the digest {now['digest']}; it was "
            f"{then['digest']} when it was drawn first.",
            fix="go on with the numpy that drew it first, or begin a new run in another directory.",
        )
    raise StateMismatch(
        f"the split {name!r} of {folder} was drawn with {_asked(then)}; now it is {_asked(now)}, and what "
        "was trained on could turn up in another part.",
        fix="split as before, or give another split another name=, or begin a new run in another directory.",
    )


def _asked(record: Mapping[str, Json]) -> str:
    return f"n={record['n']}, {record['fractions']}, seed={record['seed']}"


def _checked(found: Json) -> dict[str, Json]:
    for record in typed(dict, found).values():
        if typed(dict, record).keys() != {"n", "fractions", "seed", "digest"}:
            raise ValueError(f"{record!r:.200} does not describe a split")
        typed(int, record["n"])
        typed(list, record["fractions"])
        typed(int, record["seed"])
        typed(str, record["digest"])
    return dict(found)


def _check(n: Any, name: Any, seed: Any) -> None:
    for what, value, limit in (("n", n, None), ("seed", seed, 1 << 32)):
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < 0 or (limit and value >= limit):
            upto = f" below {limit}" if limit else ""
            raise UsageError(f"{what}={value!r} is not a count.", fix=f"give {what} as a whole number{upto}.")
    if not isinstance(name, str):
        raise UsageError(f"name={name!r} is not a name.", fix="write name='split'.")


def _lengths(n: int, fractions: Sequence[float]) -> list[int]:
    given = [*map(_plain, fractions)]
    are_counts = all(isinstance(one, int) for one in given)
    total = sum(given)
    fits = total == n if are_counts else math.isclose(total, 1)
    if not given or min(given) <= 0 or not fits:
        raise UsageError(
            f"{given} are not the parts of {n}.",
            fix=f"give fractions that sum to 1, as [0.9, 0.1], or counts that sum to {n}.",
        )
    lengths = [int(one) if are_counts else math.floor(n * one) for one in given]
    # As torch's random_split does.
    for at in range(n - sum(lengths)):
        lengths[at % len(lengths)] += 1
    if 0 in lengths:
        raise UsageError(
            f"{given} of {n} are {lengths}: one part has nothing.",
            fix="give that part a larger fraction, or counts.",
        )
    return lengths


def _plain(value: Any) -> int | float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # JSON takes no numpy floats.
        return value if isinstance(value, int) else float(value)
    raise UsageError(f"{value!r} is not a fraction.", fix="give numbers, as [0.9, 0.1].")
