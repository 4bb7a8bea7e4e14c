"""Arguments of users, checked before anything is read or written."""

from __future__ import annotations

import operator
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, TypeVar, get_args

from . import intervals
from .errors import UsageError, did_you_mean
from .groups import ON_SIGNALS, Preempt, Ranks, Remote, Trace
from .run.manifest import Goal
from .run.policy import Every, Keep, Push


class Options(NamedTuple):
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
    quiet: bool
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
    rename: Mapping[str, str]
    expect: str | None
    variables: Sequence[str]
    """Which of the script's own variables come back: names and patterns, with a minus those that do not."""

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
        rules=intervals.every(given["every"]) or Every(),
        saves_at_end=given["every"] is not None,
        is_default_rule=given["every"] is EVERY,
        limit=None if preempt.max_time is None else intervals.seconds("max_time", preempt.max_time),
        save_on=signals(preempt.signals),
        raises=on_preempt(preempt.on_preempt),
        progress=given["progress"],
        quiet=given["quiet"],
        remote=remote.url,
        # Check without a remote too: RESUMABLE_REMOTE may name one only where the job runs.
        push=_push(remote.push, decides),
        remote_keep=keep(remote.keep, decides, "Remote.keep"),
        push_timeout=intervals.seconds("Remote.timeout", remote.timeout),
        remote_options=_remote_options(remote.options),
        sample_seeds=given["sample_seeds"],
        per_rank=per_rank(ranks.per_rank, names),
        timeout=intervals.seconds("Ranks.timeout", ranks.timeout),
        is_elastic=ranks.elastic,
        is_shared=ranks.shared,
        all_write=write(ranks.write),
        checks_replicas=ranks.check_replicas,
        trace=trace.file and os.path.expanduser(trace.file),
        trace_every=count("Trace.every", trace.every),
        resume=os.environ.get("RESUMABLE_RESUME") or given["resume"],
        allow=patterns("allow", given["allow"]),
        override=patterns("override", given["override"]),
        rename=rename(given["rename"]),
        expect=given["expect"],
        variables=variables(given["variables"]),
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


def variables(given: Any) -> tuple[str, ...]:
    """Return which variables come back; what is only left out is left out of all.

    >>> variables(["-buffer"]), variables(False)
    (('*', '-buffer'), ())
    """
    if os.environ.get("RESUMABLE_VARIABLES") == "0" or given is False:
        return ()
    found = ("*",) if given is True else patterns("variables", given, "-buffer")
    return ("*", *found) if found and found[0].startswith("-") else found


def rename(given: Any) -> Mapping[str, str]:
    """Return the names of the checkpoint, with those of the script."""
    given = {} if given is None else given
    if not isinstance(given, Mapping) or {*map(type, (*given, *given.values()))} - {str}:
        raise UsageError(
            f"rename={given!r:.200} does not map names to names.",
            fix="give the checkpoint's name and the script's: rename={'fc': 'head'}.",
        )
    if both := [name for name in given.values() if name and name in given]:
        raise UsageError(
            f"rename= has {both[0]!r} as an old name and as a new one: at the next start nothing would tell "
            "which of them the checkpoint has.",
            fix="rename to a name that the old model does not have.",
        )
    return dict(given)


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
    if intervals.is_whole_number(given):
        return Keep(given)
    if isinstance(given, Mapping) and given and given.keys() <= {"newest", "best", "every"}:
        newest, best, every = given.get("newest", 1), given.get("best", 1), given.get("every")
        if intervals.is_whole_number(newest) and intervals.is_whole_number(best):
            _check_best(given, goal, name)
            rules = None if every is None else intervals.multiples(f"{name}['every']", every)
            return Keep(newest, best, rules)
    raise UsageError(
        f"{name}={given!r} does not say how many checkpoints stay.",
        fix="give a whole number from 1, or None to keep all, or the like of "
        f"{name.rpartition('.')[2]}={{'newest': 3, 'best': 2, 'every': '1000 steps'}}.",
    )


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
    raise UsageError(problem + did_you_mean(value, known), fix=fix)


def per_rank(given: Any, names: Iterable[str]) -> set[str]:
    """Return the full names of the extra parts that differ by process."""
    found, names = {f"extra.{name}" for name in patterns("per_rank", given, "name")}, [*names]
    if unknown := found - {*names}:
        raise UsageError(
            f"per_rank names {', '.join(sorted(unknown))}, which was not given to RunState."
            + "".join(did_you_mean(name, names) for name in sorted(unknown)[:1]),
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
        what = "is no signal here" if found is None else "no process can catch"
        likely = did_you_mean(name, signal.Signals.__members__) if found is None else ""
        raise UsageError(
            f"signals= names {name!r}, which {what}.{likely}",
            fix=f"give names such as signals={ON_SIGNALS!r}, or () for none.",
        )
    return found


def on_preempt(value: Any) -> bool:
    """Return whether a preempted training raises instead of exiting."""
    fix = "give 'exit', or 'raise': then Preempted is raised."
    return (
        _one_of(("exit", "raise"), value, f"on_preempt={value!r} does not say how to leave.", fix) == "raise"
    )
