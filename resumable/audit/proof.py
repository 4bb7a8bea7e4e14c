"""Proves what a resume loses: with its value put back, the difference disappears."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..trace.trace_file import At
from . import diagnosis, losses
from .diagnosis import Leaf, Lost
from .trials import Trial, Trials


def culprits(
    made: Trials, straight: Trial, stops: Sequence[At], ignored: set[Leaf], unsteady: set[str]
) -> tuple[list[Lost], list[Lost]]:
    """Return what a training that differs after the last of these stops has lost, and what else may be lost.

    The training is stopped again, at the last of these places, or at an earlier one if nothing helps there.
    When it is resumed, the values that no part holds are put back as they were: all of them first, then as
    few as are needed.
    """
    boundaries = [*straight.boundaries()]
    others: list[Lost] = []
    for stop in reversed(stops):
        base = made.straight(f"stopped at {stop}", until=stop)
        if stop not in base.boundaries():
            continue
        found = _At(made, straight, base, stop, ignored)
        control = made.resumed("resumed, trained to the end", base, boundaries[-1])
        if not found.is_gone(control):
            suspects = losses.suspects(straight, control, stop, unsteady)
            needed, rest = found.least([one.name for one in suspects], suspects)
            if needed:
                return needed, rest
            # After an epoch's last batch no body follows in which a value could be put back.
            others = others or rest
    return [], others


class _At:
    """Resumes a training from one stop, with values put back."""

    def __init__(self, made: Trials, straight: Trial, base: Trial, stop: At, ignored: set[Leaf]) -> None:
        self._made = made
        self._straight = straight
        self._base = base
        self._stop = stop
        self._ignored = ignored
        self._boundaries = [*straight.boundaries()]

    def is_gone(self, trial: Trial) -> bool:
        """Whether a training reached the end, and equals the one that was never stopped."""
        if self._boundaries[-1] not in trial.boundaries() or trial.attempts[-1].has_hung:
            return False
        return not diagnosis.after_resume(
            self._straight, trial, [self._stop], self._ignored, at_boundaries=True
        )

    def least(self, names: Sequence[str], suspects: Sequence[Lost]) -> tuple[list[Lost], list[Lost]]:
        """Return the fewest suspects whose values have to be put back, and the others."""
        if not names:
            return [], []
        place = self._boundaries.index(self._stop)
        folder = self._base.folder / "values"
        keep = {"at": [*self._stop], "names": [*names], "folder": str(folder)}
        self._made.straight(
            "with their values written down", plan={"keep": keep}, until=self._boundaries[place + 1]
        )

        def helps(some: Sequence[str]) -> bool:
            put = {"names": [*some], "folder": str(folder)}
            name = f"resumed, with {some[0]} put back" if len(some) == 1 else "resumed, with more put back"
            return self.is_gone(self._made.resumed(name, self._base, self._boundaries[-1], {"put": put}))

        needed = {*_least(names, helps)} if helps(names) else set()
        return (
            [one for one in suspects if one.name in needed],
            [one for one in suspects if one.name not in needed],
        )


def _least(
    names: Sequence[str], helps: Callable[[Sequence[str]], bool], known: Sequence[str] = ()
) -> list[str]:
    """Return the fewest names that help, together with those already known to be needed.

    >>> _least("abcdef", lambda some: {*"be"} <= {*some})
    ['b', 'e']
    """
    if known and helps(known):
        return []
    if len(names) == 1:
        return [*names]
    first, second = names[: len(names) // 2], names[len(names) // 2 :]
    of_second = _least(second, helps, [*known, *first])
    return [*_least(first, helps, [*known, *of_second]), *of_second]
