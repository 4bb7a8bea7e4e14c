"""Groups the arguments that tests vary one by one, as `RunState.load` takes them."""

from __future__ import annotations

from typing import Any

from resumable import Preempt, Ranks, Remote, Trace

_PREEMPT = {"max_time": "max_time", "on_preempt": "on_preempt", "signals": "signals"}
_REMOTE = {"remote": "url", "push": "push", "remote_keep": "keep", "push_timeout": "timeout"} | {
    "remote_options": "options"
}
_RANKS = {name: name for name in ("per_rank", "timeout", "elastic", "shared", "write", "check_replicas")}
_TRACE = {"trace": "file", "trace_every": "every"}


def grouped(**options: Any) -> dict[str, Any]:
    """Return the arguments of `RunState.load`, those of its groups gathered.

    >>> grouped(keep=1, push="all", remote="s3://b/exp")
    {'keep': 1, 'remote': Remote(url='s3://b/exp', push='all', keep=3, timeout='5 min', options={})}
    """
    groups: dict[str, tuple[Any, dict[str, str]]] = {
        "preempt": (Preempt, _PREEMPT),
        "remote": (Remote, _REMOTE),
        "ranks": (Ranks, _RANKS),
        "trace": (Trace, _TRACE),
    }
    for group, (kind, names) in groups.items():
        given = {ours: options.pop(name) for name, ours in names.items() if name in options}
        if given:
            options[group] = kind(**given)
    return options
