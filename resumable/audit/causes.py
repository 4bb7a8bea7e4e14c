"""Finds out why a script is not repeatable, by removing its possible causes in turn."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..files.strict_json import Json
from . import diagnosis, naming
from .diagnosis import REPEAT, Finding, Unlike
from .trials import Trial, Trials, stilled


@dataclass(frozen=True, slots=True)
class _Cause:
    """A possible reason why a script is not repeatable, and how it is removed."""

    because: str
    fix: str
    environment: Mapping[str, str] = field(default_factory=dict)
    plan: Mapping[str, Json] = field(default_factory=dict)
    without: str = ""
    """Describes a start without it."""


_SEED = "call resumable.seed_everything(0) first in the script"
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")

CAUSES = {
    **{
        word: _Cause(f"{name} generator is not seeded", _SEED, stilled(word), {}, f"{name} generator seeded")
        for word, name in (("torch", "torch's"), ("python", "Python's"), ("numpy", "NumPy's"))
    },
    "system": _Cause(
        "a generator is seeded by the operating system: default_rng(), random.Random() or os.urandom",
        "give it a seed, as in numpy.random.default_rng(0)",
        stilled("system"),
        without="the system's random bytes the same",
    ),
    "hash": _Cause(
        "the order of a set of strings is used, which is another one in each process",
        "sort what comes from a set: sorted(names). Or start Python with PYTHONHASHSEED=0",
        {"PYTHONHASHSEED": "0"},
        without="PYTHONHASHSEED=0",
    ),
    "clock": _Cause(
        "the time takes part in it",
        "take seeds from an argument, and decide by counts and not by the clock",
        stilled("clock"),
        without="the clock the same",
    ),
    "benchmark": _Cause(
        "torch.backends.cudnn.benchmark chooses another algorithm each time",
        "torch.backends.cudnn.benchmark = False",
        stilled("benchmark"),
        without="cudnn.benchmark off",
    ),
    "operation": _Cause(
        "an operation is not deterministic",
        "call resumable.seed_everything(0, deterministic=True) first in the script",
        plan={"deterministic": True},
        without="deterministic operations",
    ),
    "threads": _Cause(
        "sums are divided among threads in another way each time",
        "torch.set_num_threads(1), or start with OMP_NUM_THREADS=1",
        _ONE_THREAD,
        without="one thread",
    ),
}
"""The causes by their words."""

UNKNOWN = _Cause(
    "nothing that was tried makes it repeat itself",
    "look for what reads the time, the system or files that change, and for threads that share a generator",
)

_RARE = _Cause(
    "too rarely to find out why by trying",
    "look for threads that race: workers that share something, operations that add in any order",
)


def why(made: Trials, straight: Trial, unlike: Unlike) -> Finding:
    """Return in what a script is not repeatable, and why."""
    spread = _spread(made)
    tries = _Tries(made, spread)
    found = [] if spread.is_rare else tries.that_help([*_likely_first(straight, unlike)])
    causes, operations = [CAUSES[word] for word in found], list[str]()
    if not found or {"operation", "threads"} & {*found}:
        operations = _operations(made)
    if not found and not spread.is_rare and _stands_elsewhere(unlike, "torch"):
        # torch.seed() asks the operating system, which cannot be replaced.
        found, causes = ["torch"], [CAUSES["torch"]]
    if not found:
        causes = [_RARE if spread.is_rare else UNKNOWN]
        operations = operations if spread.is_rare or "operation" in tries.failed else []
    first = unlike.first
    return Finding(
        REPEAT,
        naming.of(first),
        unlike.one.at,
        f"without any stop, {naming.of(first)} is {_often(spread)}, first {_when(unlike)}: "
        + " and ".join(cause.because for cause in causes)
        + ("" if found else _possible(operations, tries)),
        cause=", ".join(found) or "unknown",
        names=[*operations, *_generators(unlike, found)],
        fix="; ".join(dict.fromkeys(cause.fix for cause in causes)),
        evidence=diagnosis.evidence(unlike),
        rank=unlike.rank,
    )


def _often(spread: _Spread) -> str:
    if spread.starts - spread.others == 1:
        return "not the same each time"
    return f"another one in {spread.others} of {spread.starts} starts"


def _possible(operations: Sequence[str], tries: _Tries) -> str:
    """Return the operations that may be the cause, because no run without them succeeded."""
    if not operations:
        return ""
    names = naming.joined([*dict.fromkeys(one.partition(" (")[0] for one in operations)])
    fails = "; with deterministic ones the script fails" if "operation" in tries.failed else ""
    return f" (it may be an operation: {names}{fails})"


def of_refused(made: Trials, straight: Trial) -> Finding | None:
    """Return the operations that torch refuses to run deterministically, if that ended a trial."""
    said = straight.attempts[-1].error
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
    # A generator that differs but is not used is no cause.
    yield from [*of_numbers, *unseeded, *others] if is_numbers_only else [*unseeded, *others, *of_numbers]


def _has_benchmark(straight: Trial) -> bool:
    # A script may turn it on after RunState.load.
    settings: list[Mapping[str, Any]] = [record.more.get("settings", {}) for record in straight.records]
    return any("benchmark" in name and value for one in settings for name, value in one.items())


def _stands_elsewhere(unlike: Unlike, word: str) -> bool:
    one, other = (record.parts.get("random", {}) for record in (unlike.one, unlike.other))
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    names = [name for name in one if name.partition(".")[0] == word]
    return any(_digest(one[name]) != _digest(other.get(name)) for name in names)


def _digest(value: Json) -> Json:
    return value["digest"] if isinstance(value, dict) and "digest" in value else value


class _Spread(NamedTuple):
    """How many unchanged starts were made, and how many differed from the most frequent outcome."""

    starts: int
    others: int

    @property
    def is_rare(self) -> bool:
        """Whether starts differ so rarely that equal ones prove nothing."""
        return self.others < _OTHERS

    @property
    def needed(self) -> int:
        """How many starts without a cause must be equal so that 3 % in all are equal by chance."""
        # One less of both, since few starts prove little.
        often = (self.others - 1) / (self.starts - 1)
        return 1 + math.ceil(math.log(0.03 / len(CAUSES)) / math.log(1 - often))


_OTHERS = 3
"""How many starts must differ before causes are tried."""
_FEWEST, _MOST = 4, 9
"""How many starts are made of a script that always differs, and of one that rarely does."""


def _spread(made: Trials) -> _Spread:
    """Return how often starts of the script differ, including those made before."""
    plain = [one for one in made.made if len(one.attempts) == 1]
    for _ in range(_MOST - len(plain)):
        spread = _spread_of(plain)
        if spread.starts >= _FEWEST and spread.others == spread.starts - 1:
            break
        if not (once_more := made.straight("once more")).attempts[-1].has_failed:
            plain.append(once_more)
    return _spread_of(plain)


def _spread_of(trials: Sequence[Trial]) -> _Spread:
    alike = Counter[int]()
    for trial in trials:
        alike[next(n for n, one in enumerate(trials) if one is trial or _are_alike(one, trial))] += 1
    return _Spread(len(trials), len(trials) - max(alike.values()))


def _are_alike(one: Trial, other: Trial) -> bool:
    return diagnosis.first_unlike(one, other) is None


class _Tries:
    """Starts the script without some of the causes."""

    def __init__(self, made: Trials, spread: _Spread) -> None:
        self._made = made
        self._spread = spread
        self.failed: set[str] = set()
        """The causes without which the script fails."""

    def that_help(self, words: Sequence[str]) -> list[str]:
        """Return the first cause without which runs are equal, or the set of causes that must go together."""
        for word in words:
            if self._repeats([word]):
                return [word]
        needed = [word for word in words if word not in self.failed]
        if len(needed) < 2 or not self._repeats(needed):
            return []
        # Two starts nearly always suffice to see that a cause was needed.
        least = self._least_of(needed, 2)
        return least if self._repeats(least) else self._least_of(needed, self._spread.needed)

    def _least_of(self, words: Sequence[str], starts: int) -> list[str]:
        needed = [*words]
        for word in words:
            rest = [one for one in needed if one != word]
            if rest and self._repeats(rest, starts):
                needed = rest
        return needed

    def _repeats(self, words: Sequence[str], starts: int = 0) -> bool:
        environment, plan = _without(words)
        name = f"with {naming.joined([CAUSES[word].without for word in words])}"
        first = None
        for _ in range(starts or self._spread.needed):
            trial = self._made.straight(name, environment, plan)
            if not trial.boundaries() or trial.attempts[-1].has_failed:
                # Up to its failure it may well be equal each time.
                self.failed |= {*words} if len(words) == 1 else set()
                return False
            if first and not _are_alike(first, trial):
                return False
            first = first or trial
        return True


def _without(words: Iterable[str]) -> tuple[dict[str, str], dict[str, Json]]:
    """Return the environment and the plan of a start without these causes."""
    environment: dict[str, str] = {}
    plan: dict[str, Json] = {}
    for word in words:
        environment |= CAUSES[word].environment
        plan |= CAUSES[word].plan
    # One variable lists everything that is held still.
    if kinds := [word for word in words if "RESUMABLE_STILL" in CAUSES[word].environment]:
        environment |= stilled(*kinds)
    return environment, plan


def _operations(made: Trials) -> list[str]:
    """Return the operations without a deterministic implementation in torch, each with its line."""
    # Without it older versions of torch refuse each product of matrices on CUDA.
    workspace = {"CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8")}
    trial = made.straight("naming operations", workspace, {"inspects": True, "deterministic": False})
    every = (one.more.get("operations", ()) for records in trial.ranks for one in records)
    return [*dict.fromkeys(name for names in every for name in names)]


def _generators(unlike: Unlike, causes: Sequence[str]) -> list[str]:
    """Return the generators of the script that differ from the beginning."""
    seen = [record.more.get("unregistered", {}) for record in (unlike.one, unlike.other)]
    own = [
        f"{name} ({about['kind']})"
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
    globals_ = [naming.generator(word) for word in ("python", "numpy", "torch") if word in causes]
    return [*globals_, *(own + parts if "system" in causes or "clock" in causes else [])]
