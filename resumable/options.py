"""Arguments of users, checked before anything is read or written."""

from __future__ import annotations

import math
import operator
import os
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, get_args

from .errors import UsageError
from .groups import ON_SIGNALS, Preempt, Ranks, Remote, Trace
from .run.manifest import Goal
from .run.policy import Every, Keep, Push


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `RunState.load`, checked."""

    run_dir: str | os.PathLike[str]
    parts: Mapping[str, Any]
    """The model, the optimizer, the scheduler, the scaler and the extra parts, by these names."""
    loader: Any
    goal: Goal | None
    keep: Keep | None
    rules: Every
    """When to save automatically."""
    is_default_rule: bool
    """Whether the script has said nothing about when."""
    saves_at_end: bool
    """Whether to save at the end of the loops and at `close()` what was trained since the last save."""
    limit: float | None
    """The seconds after which to leave."""
    save_on: Sequence[signal.Signals]
    raises: bool
    """Whether a preempted training raises Preempted."""
    progress: bool | None
    remote: str | None
    push: Push
    remote_keep: Keep | None
    push_timeout: float
    remote_options: Mapping[str, Any]
    sample_seeds: bool
    per_rank: AbstractSet[str]
    timeout: float
    is_elastic: bool
    is_shared: bool
    all_write: bool
    checks_replicas: bool
    trace: str | os.PathLike[str] | None
    trace_every: int
    resume: str | int | os.PathLike[str]
    allow: Sequence[str]
    override: Sequence[str]
    expect: str | None

    def copied(self, remote: str | None) -> Copied | None:
        """Return the options of the copies in a remote; None without one."""
        if remote is None:
            return None
        return Copied(remote, self.push, self.remote_keep, self.push_timeout, self.remote_options)


def check(given: Mapping[str, Any]) -> Options:
    """Return the arguments of `RunState.load`; UsageError for the first that is wrong."""
    decides = goal(given["maximize"], given["minimize"])
    extra = given["extra"]
    preempt = _group("preempt", given["preempt"], Preempt(), "max_time='23h50m'")
    ranks = _group("ranks", given["ranks"], Ranks(), "timeout=300")
    remote, trace = _remote(given["remote"]), _trace(given["trace"])
    names = [f"extra.{name}" for name in extra] if isinstance(extra, Mapping) else []
    return Options(
        run_dir=given["run_dir"],
        parts={slot: given[slot] for slot in ("model", "optimizer", "scheduler", "scaler", "extra")},
        loader=given["loader"],
        goal=decides,
        keep=keep(given["keep"], decides),
        rules=every(given["every"]) or Every(),
        saves_at_end=given["every"] is not None,
        is_default_rule=given["every"] == EVERY,
        limit=None if preempt.max_time is None else seconds("max_time", preempt.max_time),
        save_on=signals(preempt.signals),
        raises=on_preempt(preempt.on_preempt),
        progress=given["progress"],
        remote=remote.url,
        # Check without a remote too: RESUMABLE_REMOTE may name one only where the job runs.
        push=_push(remote.push, decides),
        remote_keep=keep(remote.keep, decides, "Remote.keep"),
        push_timeout=seconds("Remote.timeout", remote.timeout),
        remote_options=_remote_options(remote.options),
        sample_seeds=given["sample_seeds"],
        per_rank=per_rank(ranks.per_rank, names),
        timeout=seconds("Ranks.timeout", ranks.timeout),
        is_elastic=ranks.elastic,
        is_shared=ranks.shared,
        all_write=write(ranks.write),
        checks_replicas=ranks.check_replicas,
        trace=trace.file,
        trace_every=count("Trace.every", trace.every),
        resume=os.environ.get("RESUMABLE_RESUME") or given["resume"],
        allow=patterns("allow", given["allow"]),
        override=patterns("override", given["override"]),
        expect=given["expect"],
    )


def _group(name: str, given: Any, default: G, example: str) -> G:
    """Return a group of arguments; UsageError for anything else."""
    if given is None:
        return default
    if isinstance(given, type(default)):
        return given
    kind = type(default).__name__
    raise UsageError(f"{name}={given!r} is not a {kind}(...).", fix=f"write {name}={kind}({example}).")


def _remote(given: Any) -> Remote:
    if isinstance(given, str):
        return Remote(given)
    return _group("remote", given, Remote(), "'s3://bucket/exp'")


def _trace(given: Any) -> Trace:
    if isinstance(given, (str, os.PathLike)):
        return Trace(given)
    return _group("trace", given, Trace(), "'trace.jsonl'")


def _remote_options(given: Any) -> Mapping[str, Any]:
    if given is None or isinstance(given, Mapping):
        return given or {}
    raise UsageError(
        "Remote.options is not a dict.",
        fix="give what fsspec's filesystem takes: Remote(..., options={'endpoint_url': '...'}).",
    )


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics as numbers."""
    return {name: _number(name, value) for name, value in metrics.items()}


def _number(name: str, value: Any) -> float:
    try:
        # float() would take the text of a number.
        return float(value.item() if hasattr(value, "item") else operator.pos(value))
    except (TypeError, ValueError, RuntimeError, OverflowError) as exc:
        raise UsageError(
            f"the metric {name} is not a number: {value!r}.",
            fix="the keywords of save() are metrics; other values go into state.vars or extra={...}.",
        ) from exc


def patterns(name: str, given: Any, example: str = "model.head.*") -> tuple[str, ...]:
    """Return names or patterns; a single string would be iterated letter by letter."""
    if isinstance(given, Iterable) and not isinstance(given, str):
        found = tuple(given)
        if all(isinstance(pattern, str) for pattern in found):
            return found
    meant = given if isinstance(given, str) else example
    raise UsageError(f"{name}={given!r} is not a list of names.", fix=f"write {name}=[{meant!r}].")


def goal(maximize: str | None, minimize: str | None) -> Goal | None:
    """Return the goal that `maximize` or `minimize` names."""
    if maximize is not None and minimize is not None:
        raise UsageError(
            f"both maximize={maximize!r} and minimize={minimize!r} are given.",
            fix="one metric decides which checkpoint is the best: give one of them.",
        )
    for metric in (maximize, minimize):
        if metric is not None and not isinstance(metric, str):
            raise UsageError(
                f"{metric!r} is not the name of a metric.",
                fix="write maximize='val_acc', and save(val_acc=...).",
            )
    if maximize is not None:
        return Goal(maximize, True)
    return None if minimize is None else Goal(minimize, False)


def keep(given: Any, goal: Goal | None, name: str = "keep") -> Keep | None:
    """Return which checkpoints stay; None for all.

    >>> keep({"newest": 3, "every": "1000 steps"}, None)
    Keep(newest=3, best=1, every=Every(seconds=None, steps=1000, epochs=None, budget=None, mtbf=None))
    """
    if given is None:
        return None
    if _is_number(given):
        return Keep(given)
    if isinstance(given, Mapping) and given and given.keys() <= {"newest", "best", "every"}:
        newest, best, every = given.get("newest", 1), given.get("best", 1), given.get("every")
        if _is_number(newest) and _is_number(best):
            _check_best(given, goal, name)
            rules = None if every is None else multiples(f"{name}['every']", every)
            return Keep(newest, best, rules)
    raise UsageError(
        f"{name}={given!r} does not say how many checkpoints stay.",
        fix="give a whole number from 1, or None to keep all, or the like of "
        f"{name.rpartition('.')[2]}={{'newest': 3, 'best': 2, 'every': '1000 steps'}}.",
    )


def multiples(name: str, given: Any) -> Every:
    """Return the multiples whose checkpoints are kept.

    >>> multiples("--keep-every", ["1000 steps", "1 day"])
    Every(seconds=86400.0, steps=1000, epochs=None, budget=None, mtbf=None)
    """
    return _rules(name, given, _MULTIPLES)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and value >= 1 and value is not True


def _check_best(given: Mapping[str, Any], goal: Goal | None, name: str) -> None:
    if given.get("best", 1) > 1 and goal is None:
        raise UsageError(
            f"{name}={dict(given)!r}, but nothing says which checkpoints are the best.",
            fix="name the metric that decides: maximize='val_acc' or minimize='val_loss'.",
        )


def count(name: str, value: Any) -> int:
    """Return a whole number that is not negative."""
    if isinstance(value, int) and value >= 0 and not isinstance(value, bool):
        return value
    raise UsageError(f"{name}={value!r} is not a count.", fix=f"give {name} as a whole number.")


def seconds(name: str, value: Any) -> float:
    """Return a positive time in seconds.

    >>> seconds("max_time", "3h50m"), seconds("max_time", "2-12:00:00"), seconds("max_time", 60)
    (13800.0, 216000.0, 60.0)
    """
    found = _seconds_of(value) if isinstance(value, str) else value
    if isinstance(found, (int, float)) and not isinstance(found, bool) and 0 < found < math.inf:
        return float(found)
    raise UsageError(
        f"{name}={value!r} is not a time.",
        fix=f"give it in seconds, as {name.rpartition('.')[2]}=60, or as '10 min', '3h50m', '3:50:00', "
        "'2-12:00:00'.",
    )


def _seconds_of(text: str) -> float | None:
    text = text.strip()
    if clock := _CLOCK.fullmatch(text):
        days, hours, minutes, rest = (int(part or 0) for part in clock.groups())
        # "3:50" alone is hours to one and minutes to another (and to SLURM).
        is_plain = clock[1] is not None or clock[4] is not None
        return 86400.0 * days + 3600 * hours + 60 * minutes + rest if is_plain else None
    if not _LENGTH.fullmatch(text):
        return None
    found = [(_UNITS.get(unit.lower(), 0), float(number)) for number, unit in _PIECE.findall(text)]
    units = [unit for unit, _ in found]
    # Each of them once and the longest first: what else was written was not meant.
    if 0 in units or units != sorted({*units}, reverse=True):
        return None
    return sum(unit * number for unit, number in found)


_CLOCK = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-5]?[0-9])(?::([0-5]?[0-9]))?)?")
_PIECE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*([a-zA-Z]+)\s*")
_LENGTH = re.compile(f"(?:{_PIECE.pattern})+")
_UNITS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}


def every(given: Any) -> Every | None:
    """Parse `every=`: one rule or several; whichever is due first triggers the save.

    >>> every(["500 steps", "10 min", "1 %"])
    Every(seconds=600.0, steps=500, epochs=None, budget=0.01, mtbf=None)
    """
    return None if given is None else _rules("every", given, _RULES)


def _rules(name: str, given: Any, may_be: str) -> Every:
    many = [*given] if isinstance(given, (list, tuple)) else [given]
    found = [_rule(name, one, may_be) for one in many]
    kinds = [kind for kind, _ in found]
    if not found or len({*kinds}) < len(kinds):
        raise UsageError(
            f"{name}={given!r} " + ("gives one kind of rule twice." if found else "is empty."),
            fix=f"give one of each at most: {may_be}.",
        )
    return Every(**dict(found))


def _rule(name: str, given: Any, may_be: str) -> tuple[str, Any]:
    if _is_number(given):
        return "steps", given
    text = given.strip() if isinstance(given, str) else ""
    if (counted := _COUNTED.fullmatch(text)) and int(counted[1]):
        return f"{counted[2]}s", int(counted[1])
    if may_be is _RULES and (share := _SHARE.fullmatch(text)) and 0 < float(share[1]) < 100:
        return "budget", float(share[1]) / 100
    if may_be is _RULES and text.startswith("mtbf ") and (failures := _seconds_of(text[5:])):
        return "mtbf", failures
    if time := _seconds_of(text):
        return "seconds", time
    raise UsageError(f"{name}={given!r} does not say how often.", fix=f"say {may_be}.")


_COUNTED = re.compile(r"([0-9]{1,12})\s*(step|epoch)s?")
_SHARE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*%")
_MULTIPLES = "'1000 steps' (or 1000), '10 epochs', '1 day', or a list of them"
_RULES = (
    "'10 min', '500 steps' (or 500), '2 epochs', '1 %' (of the training's time), 'mtbf 6 h' (the mean time "
    "between failures), or a list of them"
)


EVERY = "10 min"
"""When the loops save if nothing is said."""

G = TypeVar("G")


class Copied(NamedTuple):
    """Options of remote copies: the address, which checkpoints to push and keep, how long to wait."""

    place: str
    push: Push
    keep: Keep | None
    patience: float
    options: Mapping[str, Any]


def _push(value: Any, goal: Goal | None) -> Push:
    if value == "best" and goal is None:
        raise UsageError(
            "push='best', but nothing says which checkpoint is the best.",
            fix="name the metric that decides (maximize='val_acc'), or say push='newest' or 'all'.",
        )
    problem = f"push={value!r} does not say which checkpoints go to the remote."
    found: Any = _one_of(get_args(Push), value, problem, "give 'best', 'newest' or 'all'.")
    push: Push = found
    return push


def write(value: Any) -> bool:
    """Return whether all processes write a share of the common state."""
    fix = "give 'one', or 'all': each process writes its share."
    return (
        _one_of(
            ("one", "all"), value, f"write={value!r} does not say who writes what all processes share.", fix
        )
        == "all"
    )


def _one_of(known: Sequence[str], value: Any, problem: str, fix: str) -> str:
    # Not `in`: an array would be compared item by item.
    if isinstance(value, str) and value in known:
        return value
    raise UsageError(problem, fix=fix)


def per_rank(given: Any, names: Iterable[str]) -> set[str]:
    """Return the full names of the extra parts that differ by process."""
    found = {f"extra.{name}" for name in patterns("per_rank", given, "name")}
    if unknown := found - {*names}:
        raise UsageError(
            f"per_rank names {', '.join(sorted(unknown))}, which was not given to RunState.",
            fix="name parts of extra={...}: Ranks(per_rank=['name']).",
        )
    return found


def signals(given: Any) -> list[signal.Signals]:
    """Return the signals that end a training in good order.

    >>> signals(["SIGTERM"])
    [<Signals.SIGTERM: 15>]
    """
    names = patterns("signals", given, "SIGTERM")
    return [_signal(name) for name in names if name not in ON_SIGNALS or hasattr(signal, name)]


def _signal(name: str) -> signal.Signals:
    found = signal.Signals.__members__.get(name)
    if found is None or name in ("SIGKILL", "SIGSTOP"):
        what = "is no signal here" if found is None else "cannot be noted by any process"
        raise UsageError(
            f"signals= names {name!r}, which {what}.",
            fix=f"give names such as signals={ON_SIGNALS!r}, or () for none.",
        )
    return found


def on_preempt(value: Any) -> bool:
    """Return whether a preempted training raises instead of exiting."""
    fix = "give 'exit', or 'raise': then Preempted is raised."
    return (
        _one_of(("exit", "raise"), value, f"on_preempt={value!r} does not say how to leave.", fix) == "raise"
    )
