"""Finding out why a script does something else each time: its possible causes are taken away in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import diagnosis, naming
from .diagnosis import REPEAT, Finding, Unlike
from .sealed import Json
from .trials import STILLED_BY, Trial, Trials, stilled


@dataclass(frozen=True, slots=True)
class _Cause:
    """What can make a script do something else each time, and how that is taken away."""

    because: str
    fix: str
    environment: Mapping[str, str]
    plan: Mapping[str, Json]
    without: str = ""
    """How the script is started without it."""


_SEED = "call resumable.seed_everything(0) first in the script"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

CAUSES = {
    "torch": _Cause(
        "torch's generator is not seeded", _SEED, stilled("torch"), {}, "torch's generator seeded"
    ),
    "python": _Cause(
        "Python's generator is not seeded", _SEED, stilled("python"), {}, "Python's generator seeded"
    ),
    "numpy": _Cause(
        "NumPy's generator is not seeded", _SEED, stilled("numpy"), {}, "NumPy's generator seeded"
    ),
    "system": _Cause(
        "a generator is seeded by the operating system: default_rng(), random.Random() or os.urandom",
        "give it a seed, as in numpy.random.default_rng(0)",
        stilled("system"),
        {},
        "the system's random bytes the same",
    ),
    "hash": _Cause(
        "the order of a set of strings is used, which is another one in each process",
        "sort what comes from a set: sorted(names). Or start Python with PYTHONHASHSEED=0",
        {"PYTHONHASHSEED": "0"},
        {},
        "PYTHONHASHSEED=0",
    ),
    "clock": _Cause(
        "the time takes part in it",
        "take seeds from an argument, and decide by counts and not by the clock",
        stilled("clock"),
        {},
        "the clock the same",
    ),
    "benchmark": _Cause(
        "torch.backends.cudnn.benchmark chooses another algorithm each time",
        "torch.backends.cudnn.benchmark = False",
        {},
        {"benchmark": False},
        "cudnn.benchmark off",
    ),
    "operation": _Cause(
        "an operation is not deterministic",
        "call resumable.seed_everything(0, deterministic=True) first in the script",
        {},
        {"deterministic": True},
        "deterministic operations",
    ),
    "threads": _Cause(
        "sums are divided among threads in another way each time",
        "torch.set_num_threads(1), or start with OMP_NUM_THREADS=1",
        _ONE_THREAD,
        {},
        "one thread",
    ),
}
"""The word for each cause, and the cause."""

UNKNOWN = _Cause(
    "nothing that was tried makes it repeat itself",
    "look for what reads the time, the system or files that change, and for threads that share a generator",
    {},
    {},
)


def why(made: Trials, straight: Trial, unlike: Unlike) -> Finding:
    """Return what a script that does not repeat itself does otherwise, and why."""
    words = [*_likely_first(straight, unlike)]
    found, operations = _first_that_helps(made, words), []
    if found in (None, "operation", "threads") and "operation" in words[:2]:
        operations = _operations(made)
    if found is None and operations:
        found = "operation"
    if found is None:
        found = _that_help_together(made, words)
    if found is None and _stands_elsewhere(unlike, "torch"):
        # (torch.seed() asks the system where nobody can answer in its place)
        found = "torch"
    causes = [CAUSES[word] for word in found.split(", ")] if found else [UNKNOWN]
    first = unlike.first
    return Finding(
        REPEAT,
        naming.of(first),
        unlike.one.at,
        f"without any stop, {naming.of(first)} is not the same each time, first {_when(unlike)}: "
        + " and ".join(cause.because for cause in causes),
        cause=found or "unknown",
        names=operations or _generators(unlike, found or ""),
        fix="; ".join(dict.fromkeys(cause.fix for cause in causes)),
        evidence=diagnosis.evidence(unlike),
        rank=unlike.rank,
    )


def of_refused(made: Trials, straight: Trial) -> Finding | None:
    """Return which operations torch refuses to do deterministically, if that is what has ended a trial."""
    said = straight.attempts[-1].log.rpartition("\n")[2]
    if "deterministic" not in said or not said.startswith("RuntimeError"):
        return None
    return Finding(
        REPEAT,
        "an operation",
        None,
        f"with deterministic operations the script fails: {said}",
        cause="operation",
        names=_operations(made),
        fix="use others in their place, or leave out --deterministic",
    )


def _when(unlike: Unlike) -> str:
    return "when the training begins" if unlike.one.why != "boundary" else f"at {unlike.one.at}"


def _likely_first(straight: Trial, unlike: Unlike) -> Iterator[str]:
    is_numbers_only = unlike.one.why == "boundary" and unlike.first.part not in (
        "batches",
        "position",
    )
    if _stands_elsewhere(unlike, "torch"):
        yield "torch"
    unseeded = [word for word in ("python", "numpy") if _stands_elsewhere(unlike, word)]
    others = ["system", "hash", "clock"]
    of_numbers = [*(["benchmark"] if _has_benchmark(straight) else []), "operation", "threads"]
    # (a generator that stands elsewhere and is not used is no cause)
    yield from [*of_numbers, *unseeded, *others] if is_numbers_only else [*unseeded, *others, *of_numbers]


def _has_benchmark(straight: Trial) -> bool:
    settings: Mapping[str, Any] = straight.records[0].more.get("settings", {})
    return any("benchmark" in name and value for name, value in settings.items())


def _stands_elsewhere(unlike: Unlike, word: str) -> bool:
    one, other = (record.parts.get("random", {}) for record in (unlike.one, unlike.other))
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    names = [name for name in one if name.partition(".")[0] == word]
    return any(_digest(one[name]) != _digest(other.get(name)) for name in names)


def _digest(value: Json) -> Json:
    return value["digest"] if isinstance(value, dict) and "digest" in value else value


def _first_that_helps(made: Trials, words: Sequence[str]) -> str | None:
    return next((word for word in words if _repeats(made, [word])), None)


def _that_help_together(made: Trials, words: Sequence[str]) -> str | None:
    if not _repeats(made, words):
        return None
    needed = [*words]
    for word in words:
        rest = [one for one in needed if one != word]
        if rest and _repeats(made, rest):
            needed = rest
    return ", ".join(needed)


def _repeats(made: Trials, words: Sequence[str]) -> bool:
    """Whether the script repeats itself without these causes."""
    environment: dict[str, str] = {}
    plan: dict[str, Json] = {}
    for word in words:
        environment |= CAUSES[word].environment
        plan |= CAUSES[word].plan
    if kinds := [word for word in words if word in STILLED_BY]:
        environment |= stilled(*kinds)
    name = f"with {naming.joined([CAUSES[word].without for word in words])}"
    one, other = (made.straight(name, environment, plan) for _ in range(2))
    return bool(one.boundaries()) and diagnosis.first_unlike(one, other) is None


def _operations(made: Trials) -> list[str]:
    """Return the operations that are not deterministic, as one more training has found them."""
    trial = made.straight("naming operations", {}, {"inspects": True, "deterministic": False})
    found = [
        one for records in trial.ranks for record in records for one in record.more.get("operations", ())
    ]
    return [*dict.fromkeys(f"{one['name']} ({one['where']}): {one['why']}" for one in found)]


def _generators(unlike: Unlike, cause: str) -> list[str]:
    """Return the generators of the script that stand elsewhere from the beginning."""
    seen = [record.more.get("unregistered", {}) for record in (unlike.one, unlike.other)]
    own = [
        f"{name} ({about['kind']}, {about['where']})"
        for name, about in seen[0].items()
        if diagnosis.is_generator(about["kind"]) and about["digest"] != seen[1].get(name, about)["digest"]
    ]
    parts = sorted(
        {
            one.part
            for one in unlike.differences
            if one.part.startswith("extra") and _digest(one.before) != _digest(one.after)
        }
    )
    globals_ = [naming.generator(word) for word in ("python", "numpy", "torch") if word in cause.split(", ")]
    return [*globals_, *(own + parts if "system" in cause or "clock" in cause else [])]
