"""Ratios of now next to stored ones: what has become worse by more than the noise."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .ratios import quartiles

Ratios = Mapping[str, Sequence[float]]
"""What the rounds gave, by name; of each less is better."""

LEAST = 0.05
"""The least noise: two runs differ by so much, however equal the rounds of each are."""
MISSING, NEW, SAME, WORSE, BETTER = "**not measured**", "new", "", "**worse**", "better"


@dataclass(frozen=True)
class Row:
    """A ratio, stored and now."""

    what: str
    stored: float | None
    now: float | None
    noise: float = 0.0
    """How far two runs of the same code may be apart, over the stored ratio."""

    @property
    def verdict(self) -> str:
        """Say whether the ratio has become worse or better by more than the noise."""
        if self.now is None:
            return MISSING
        if self.stored is None:
            return NEW
        apart = self.now - self.stored
        if abs(apart) <= self.noise * abs(self.stored):
            return SAME
        return WORSE if apart > 0 else BETTER


def compare(stored: Ratios, now: Ratios) -> list[Row]:
    """Return a row for every ratio of either run."""
    return [_row(what, stored.get(what, ()), now.get(what, ())) for what in {**stored, **now}]


def _row(what: str, stored: Sequence[float], now: Sequence[float]) -> Row:
    if not stored or not now:
        known, measured = (statistics.median(values) if values else None for values in (stored, now))
        return Row(what, known, measured)
    noise = max(LEAST, _spread(stored), _spread(now))
    return Row(what, statistics.median(stored), statistics.median(now), noise)


def _spread(values: Sequence[float]) -> float:
    low, high = quartiles(values)
    return (high - low) / abs(statistics.median(values))


def has_failed(rows: Sequence[Row]) -> bool:
    """Return whether a ratio is worse, or was stored and could not be measured."""
    return any(row.verdict in (WORSE, MISSING) for row in rows)


def differences(stored: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Say in what the machine differs from that of the stored figures."""
    for what in {**stored, **now}:
        if stored.get(what) != now.get(what):
            yield f"{what}: {stored.get(what, 'unknown')}; here {now.get(what, 'unknown')}"
