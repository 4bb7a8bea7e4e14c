"""Changes since a checkpoint was made, and their effect on the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ..files.strict_json import Json

WILL, MAY, HARMLESS = "will change bits", "may change bits", "harmless"
EFFECTS = WILL, MAY, HARMLESS

CHECKPOINTS, CODES, OVERRIDES = "checkpoint", "code", "override"
"""Whose value of a setting is used: the checkpoint's, or the code's, always or by `override=`."""


class Difference(NamedTuple):
    """A change since the checkpoint was made."""

    name: str
    then: str
    now: str
    effect: str
    """One of EFFECTS: its effect on the numbers, if the current value is used."""
    note: str = ""
    """The consequence, in words."""
    used: str = ""
    """Whose value is used, if there is a choice."""

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON.

        >>> Difference("torch", "2.12.0", "2.13.0", MAY).to_json()["now"]
        '2.13.0'
        """
        return self._asdict()


def of_setting(name: str, then: Any, now: Any, used: str, known: tuple[str, str] | None = None) -> Difference:
    """Return the change of a setting since the run was built.

    `known` is the effect and the note where more than the name tells them.

    >>> of_setting("optimizer.lr", 0.1, 0.05, CHECKPOINTS).effect
    'will change bits'
    """
    effect, note = known or (setting_effect(name), "")
    return Difference(name, _shown(then), _shown(now), effect, note, used)


def setting_effect(name: str) -> str:
    """Return the effect of a changed setting of this name, such as "optimizer.lr".

    >>> setting_effect("optimizer.fused")
    'may change bits'
    """
    # Any other setting changes the training: batches, steps, schedules, scales.
    return _SETTINGS.get((name.partition(".")[0], name.rpartition(".")[2]), WILL)


_SETTINGS = {
    # The same arithmetic by other kernels, which may round and sum differently.
    ("optimizer", "foreach"): MAY,
    ("optimizer", "fused"): MAY,
    ("optimizer", "capturable"): MAY,
    ("optimizer", "differentiable"): MAY,
    # It only prints.
    ("scheduler", "verbose"): HARMLESS,
    # The same sums in another order.
    ("model", "sharding"): MAY,
    # A loader of another class may still give the same batches: a wrapper, a subclass.
    ("loader", "kind"): MAY,
}


def of_world(then: int, now: int) -> list[Difference]:
    """Return the change of the number of processes, whose gradients are averaged.

    >>> [row.effect for row in of_world(2, 4)]
    ['will change bits']
    """
    return [Difference("world_size", str(then), str(now), WILL)] if then != now else []


def of_devices(then: set[str], now: set[str]) -> list[Difference]:
    """Return the change to another type of device, which has other kernels for everything.

    >>> [(row.then, row.now) for row in of_devices({"cuda"}, {"cpu"})]
    [('cuda', 'cpu')]
    """
    if then == now:
        return []
    return [Difference("device", ", ".join(sorted(then)), ", ".join(sorted(now)), WILL)]


_UNKNOWN: tuple[Any, ...] = (None, [])
"""Values in the description of a process that has not used a GPU."""


def of_environment(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the changes of the environment, as far as both sides know it.

    >>> of_environment({"torch": "2.12.0", "gpus": []}, {"torch": "2.13.0", "gpus": []})[0].effect
    'may change bits'
    """
    is_on_gpu = bool(then.get("gpus") or now.get("gpus"))
    return [
        Difference(
            name, _shown(then[name]), _shown(value), environment_effect(name, then[name], value, is_on_gpu)
        )
        for name, value in now.items()
        if value not in _UNKNOWN and then.get(name) not in _UNKNOWN and then[name] != value
    ]


def environment_effect(name: str, then: Any, now: Any, is_on_gpu: bool) -> str:
    """Return the effect of a change from `then` to `now`.

    >>> environment_effect("python", "3.11.1", "3.11.9", is_on_gpu=True)
    'harmless'
    """
    if name in _HARMLESS_IN_PATCHES and _release(then) == _release(now):
        return HARMLESS
    # A value that a newer version of this library has recorded.
    on_gpu, without = _ENVIRONMENT.get(name, (MAY, MAY))
    return on_gpu if is_on_gpu else without


_ENVIRONMENT = {
    # A release may change kernels, defaults, the order of sums and random streams.
    "torch": (MAY, MAY),
    # NumPy may change the streams of its generators, and its vectorised functions, with a minor release.
    "numpy": (MAY, MAY),
    # `random.shuffle` and others may draw differently in a minor release; `sum` of floats rounds differently
    # from 3.12 on. The order of a set of strings is another in every process, so it is nothing new.
    "python": (MAY, MAY),
    # Another processor family or system has another libm and other vector instructions.
    "platform": (MAY, MAY),
    # The widest vectors that kernels on the CPU use: sums are split by their width.
    "cpu": (MAY, MAY),
    # Sums on the CPU are split among them.
    "threads": (MAY, MAY),
    # cuBLAS, cuDNN and the compiler come with it; what does not use a GPU uses none of them.
    "cuda": (MAY, HARMLESS),
    "cudnn": (MAY, HARMLESS),
    # Another model has other tilings, and the libraries choose other kernels for it.
    "gpus": (MAY, MAY),
    # It compiles what is shipped as an intermediate language.
    "driver": (MAY, HARMLESS),
    # Some operations have two kernels; those that have one are the same either way.
    "deterministic": (MAY, MAY),
    "cudnn_deterministic": (MAY, HARMLESS),
    # It measures which kernel is the fastest, and may find another at each start.
    "cudnn_benchmark": (MAY, HARMLESS),
    # On a GPU factors of matrix products lose 13 bits; on the CPU only where it has such units (AMX).
    "tf32": (WILL, MAY),
    "cudnn_tf32": (WILL, HARMLESS),
    # What a commit changes in the training is in the rest of the table, or cannot be compared at all.
    "git": (HARMLESS, HARMLESS),
}
"""The effect of each change, with a GPU and without one."""

# A patch release fixes bugs, and keeps random streams and results.
_HARMLESS_IN_PATCHES = ("python", "numpy")


def _release(version: Any) -> str:
    # A manifest may hold any value.
    return ".".join(str(version).split(".")[:2])


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return ", ".join(f"{count} x {item}" for item, count in Counter(value).items())
    return str(value)


def is_named(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns matches a setting: "optimizer.lr", "scheduler.*".

    >>> is_named("optimizer.lr", ["*.lr"])
    True
    """
    return name in patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def table(title: str, found: Sequence[Sequence[Json]], rank: int) -> str | None:
    """Return one report of the differences that all processes have found; None if there are none.

    What rank 0 has found too, it tells for all.

    >>> torch, lr = Difference("torch", "2.12", "2.13", MAY), Difference("optimizer.lr", "0.1", "0.05", WILL)
    >>> print(table("runs/exp has changed since checkpoint 41", [[torch.to_json(), lr.to_json()]], rank=0))
    runs/exp has changed since checkpoint 41:
      will change bits  optimizer.lr  0.1   -> 0.05
      may change bits   torch         2.12  -> 2.13
    """
    own = [row for row in found[rank] if rank == 0 or row not in found[0]]
    differences = sorted((Difference(**row) for row in own), key=lambda one: EFFECTS.index(one.effect))
    if all(one.effect == HARMLESS for one in differences):
        return None
    columns = [_padded(column) for column in zip(*map(_cells, differences), strict=True)]
    lines = ["  " + "  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    return "\n".join([f"{title}:", *lines])


def _cells(one: Difference) -> tuple[str, ...]:
    used = {
        CHECKPOINTS: f"the checkpoint's is used; the code's with override=[{one.name!r}]",
        CODES: "the code's is used",
        OVERRIDES: "the code's is used, as override= says",
    }.get(one.used, "")
    note = "; ".join(filter(None, (used, one.note)))
    return one.effect, one.name, one.then, f"-> {one.now}", note


def _padded(column: Sequence[str]) -> list[str]:
    width = min(max(map(len, column)), _WIDEST)
    return [cell.ljust(width) for cell in column]


_WIDEST = 40


def resized(then: int, now: int, shares_then: int, shares_now: int) -> str:
    """Return the addition to the resume line for another number of processes, or of shares of the data.

    >>> resized(2, 1, 2, 1)
    '; 1 process instead of 2: what is left of the epoch is divided again'
    >>> resized(2, 4, 2, 2)
    '; 4 processes instead of 2'
    """
    some = "1 process" if now == 1 else f"{now} processes"
    what = f"; {some} instead of {then}" if then != now else ""
    if shares_then == shares_now:
        return what
    what = what or f"; {shares_now} shares of the data instead of {shares_then}"
    new = ", ".join(map(str, range(shares_then, shares_now)))
    who = "rank" if shares_now == now else "share"
    streams = f"; {who} {new} begins random streams of its own" if new else ""
    return f"{what}: what is left of the epoch is divided again{streams}"
