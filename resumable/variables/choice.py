"""Which variables come back, as `variables=`, `override=` and `allow=` name them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from ..errors import UsageError, did_you_mean
from ..objects import walks
from ..objects.kinds import Step
from .looks import Namespace
from .writing import Entry

_BEHIND = "loader:"
_PLACE = ("kind", "class", "at")


class Choice(NamedTuple):
    """The names and patterns of the three."""

    variables: Sequence[str] = ("*",)
    override: Sequence[str] = ()
    allow: Sequence[str] = ()

    def of(self, namespace: Namespace) -> Namespace:
        """Return a namespace with those of its variables that come back."""
        if self.variables == ("*",):
            return namespace
        held = {name: one for name, one in namespace.variables.items() if self._has(namespace.key, name)}
        return namespace._replace(variables=held)

    def without(self, look: Mapping[str, Any], wins: Collection[str]) -> Mapping[str, Any]:
        """Return a stored look without what is left out, and what `wins` names: that stays the script's."""
        if wins:
            # What refers to an object of the script still finds it.
            look = _without(
                look, lambda at: is_named(_text(at), wins), lambda one: {key: one[key] for key in _PLACE}
            )
        if self.variables != ("*",):
            hole = {"hole": "variables= leaves it out"}
            look = _without(look, lambda at: not self._has(*at[0]), lambda _: hole)
        return look

    def leaves(self, look: Mapping[str, Any], pattern: str) -> bool:
        """Whether a stored look has something that a pattern of `override=` leaves to the script."""
        return self.without(look, [pattern]) != self.without(look, ())

    def refuse_unknown(
        self, look: Mapping[str, Any], override: Collection[str], known: Collection[str]
    ) -> None:
        """Raise UsageError for a pattern that names none of the known variables of a stored look."""
        for pattern in wins(look, override) if known else ():
            if not self.leaves(look, pattern):
                raise UsageError(
                    f"override={pattern!r} names no saved variable.{did_you_mean(pattern, known)}",
                    fix=f"the checkpoint has: {', '.join(sorted(known))}.",
                )

    def _has(self, key: str, name: str) -> bool:
        """Whether a variable comes back: as the last pattern says that matches, or it is behind a loader."""
        found = [one for one in self.variables if fnmatchcase(name, one.removeprefix("-"))]
        return key.startswith(_BEHIND) or (bool(found) and not found[-1].startswith("-"))


ALL = Choice()


def is_named(path: str, patterns: Collection[str]) -> bool:
    """Return whether patterns name a variable, or what it hangs on.

    >>> [is_named("ema.shadow['w']", [one]) for one in ("script.ema", "script.*", "script.em", "ema")]
    [True, True, False, False]
    """
    whole = f"script.{path}"
    return any(
        whole == one or whole.startswith((f"{one}.", f"{one}[")) or fnmatchcase(whole, one)
        for one in patterns
    )


def wins(look: Mapping[str, Any], override: Collection[str]) -> list[str]:
    """Return the patterns of `override=` that no start before this look was given: each counts once."""
    return sorted({*override} - {*look.get("overridden", ())})


def _text(at: Sequence[Any]) -> str:
    return walks.text(tuple(Step(*one) for one in at))


def _without(
    look: Mapping[str, Any], is_left: Callable[[Sequence[Any]], bool], instead: Callable[[Entry], Entry]
) -> dict[str, Any]:
    entries = [instead(one) if "at" in one and is_left(one["at"]) else one for one in look["entries"]]
    rows = [[key, [row for row in rows if not is_left([[key, row[0]]])]] for key, rows in look["namespaces"]]
    return {**look, "namespaces": rows, "entries": entries}
