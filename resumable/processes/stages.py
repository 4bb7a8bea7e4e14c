"""The parts that only some of the processes have: the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

Told = Mapping[str, Sequence[str]]
"""By part of a process: its kind, and what it holds."""


def ranks_of(told: Sequence[Told]) -> dict[str, list[int]]:
    """Return the ranks that have each part, given the parts of every rank.

    >>> ranks_of([{"model.first": ["module", ""]}, {"model.last": ["module", ""]}])
    {'model.first': [0], 'model.last': [1]}
    """
    found: dict[str, list[int]] = {}
    for rank, parts in enumerate(told):
        for name in parts:
            found.setdefault(name, []).append(rank)
    return found


def differences(told: Sequence[Told]) -> Iterator[str]:
    """Yield what differs between processes with the same models, or under one name."""
    models = [frozenset(name for name in parts if name.partition(".")[0] == "model") for parts in told]
    for name, ranks in ranks_of(told).items():
        first, lacks = ranks[0], {*range(len(told))}.difference(ranks)
        kind, holds = told[first][name]
        stages = {models[rank] for rank in ranks}
        for rank in sorted(rank for rank in lacks if models[rank] in stages):
            yield from _line(f"the part {name}", (first, kind), (rank, None))
        for rank in ranks:
            yield from _line(f"the part {name}", (first, kind), (rank, told[rank][name][0]))
            yield from _line(f"what {name} holds", (first, holds), (rank, told[rank][name][1]))


def _line(what: str, *two: tuple[int, str | None]) -> Iterator[str]:
    (first, one), (rank, other) = sorted(two)
    if one != other:
        yield f"{what} is {one!r} on rank {first} and {other!r} on rank {rank}"
