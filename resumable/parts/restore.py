"""Restores a training from a checkpoint: all parts, or none if one of them refuses its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import torch

from ..errors import CannotRead, ResumableError, StateMismatch
from ..files.codec import Encoded
from ..files.threads import no_garbage_collection
from ..loaders.generators import rng
from . import collect
from .containers import Restoring
from .copies import taken
from .fit import Plan
from .other_parts import GeneratorPart
from .part import Part, Saved, Trees
from .parts import Parts
from .reading import Reading

Each = Callable[[str, Callable[[], None]], None]
"""Calls a function on every rank, and raises the error of one rank on all of them."""


@no_garbage_collection()
@torch.inference_mode(False)  # tensors made in inference mode cannot be trained
def restore(parts: Parts, plan: Plan, before: Mapping[str, Any], each: Each = lambda _, do: do()) -> None:
    """Carry out a plan; `before`: the states of all random generators."""
    reading, chosen = plan.reading, plan.chosen
    restoring = Restoring(parts.aliases, chosen, reading)
    for part in chosen:
        if plan.unfit.get(part.name):
            reading.apart(part.name)
    undo = _Undo(parts, plan, before, restoring)

    def put_in(some: Sequence[Part]) -> None:
        for number, part in enumerate(some):
            if part.name in plan.foreign:
                reading.fill([part.name for part in some[:number]])
            saved = reading.saved(part.name, restoring)
            restore_part(part, saved, plan.unfit.get(part.name, set()), plan.code_wins[part.name])
        _set_last_lr(parts, plan)

    try:
        # The counters of the position come last: they refuse nothing, so they need no undo.
        each("the restore", lambda: put_in([part for part in chosen if not part.is_last]))
        each("the restore of the position", lambda: put_in([part for part in chosen if part.is_last]))
    except BaseException as exc:
        if lost := undo():
            raise _half_filled(lost) from exc
        raise
    if reading.is_heir and plan.is_whole:
        _begin_own_streams(parts)
    try:
        each("the tensors", lambda: reading.fill([part.name for part in chosen]))
    except (Exception, KeyboardInterrupt) as exc:
        raise _half_filled(exc) from exc


class _Undo:
    """Puts all objects back into the state that they had before a restore."""

    def __init__(self, parts: Parts, plan: Plan, before: Mapping[str, Any], restoring: Restoring) -> None:
        self._restoring = restoring
        self._streams, self._generators = parts.position.streams, before
        self._groups = [part.hold() for part in parts.optimizers if part in plan.chosen]
        self._others = [part for part in parts.all if not (part.is_last or part.is_container)]
        known = {name for tree in plan.reading.now.values() for name in tree.json}
        others = collect.encoded(part for part in self._others if part.name not in known)
        trees: Trees = {}
        for stem, tree in (*plan.reading.now.items(), *others.items()):
            collect.merge(trees.setdefault(stem, Encoded({}, {}, {})), tree)
        # A foreign part may look at the weights, so these are filled before it can refuse.
        self._before = _copied(trees, plan.reading, is_all=bool(plan.foreign))
        self._streams.write(self._generators)

    def __call__(self) -> StateMismatch | None:
        """Put all back; return the error of a part of torch's own that could not be put back."""
        lost, before = None, self._before()
        self._restoring.undo()
        for put_back in self._groups:
            put_back()
        for part in self._others:
            try:
                restore_part(part, Saved(before, part.name), set(), set())
            except StateMismatch as exc:
                # One of the user's may refuse even its own state. The others get theirs all the same.
                lost = exc if part.is_torchs_own() else lost
        self._streams.write(self._generators)
        return lost


def _copied(trees: Trees, reading: Reading, *, is_all: bool) -> Callable[[], Trees]:
    """Copy the tensors of trees, except those that are filled after the last refusal.

    Return a function that returns the trees with the copies.
    """
    left, copies = {}, {}
    for stem, tree in trees.items():
        left[stem] = set() if is_all else tree.tensors.keys() & reading.names_in_place(stem)
        own = {name: one for name, one in tree.tensors.items() if name not in left[stem]}
        copies[stem] = taken(own)

    def before() -> Trees:
        return {
            stem: replace(tree, tensors={**tree.tensors, **copies[stem]()}, kept=frozenset(left[stem]))
            for stem, tree in trees.items()
        }

    return before


def restore_part(
    part: Part, saved: Saved, unfit: AbstractSet[str] = frozenset(), code_wins: AbstractSet[str] = frozenset()
) -> None:
    """Restore one part; StateMismatch if it refuses its state."""
    try:
        part.restore(saved, unfit, code_wins)
    except Exception as exc:
        raise StateMismatch(
            f"{part.name} refused its state: {type(exc).__name__}: {exc}.",
            fix=f"make {part.name} as it was made when the run was started, or leave it as it is in "
            f"the script with allow=[{part.name!r}]. Every object is as it was before the load.",
        ) from exc


def _set_last_lr(parts: Parts, plan: Plan) -> None:
    for scheduler, optimizer in parts.schedules():
        if "base_lrs" in plan.code_wins[scheduler.name]:
            scheduler.live._last_lr = [group["lr"] for group in optimizer.live.param_groups]


def _begin_own_streams(parts: Parts) -> None:
    """Seed the generators of a rank without state in the checkpoint: it must not draw rank 0's numbers."""
    seed = f"{torch.initial_seed()}/{parts.data_rank}/{parts.position.step}"
    rng.seed_all(rng.seed_of(seed))
    for part in parts.all:
        if isinstance(part, GeneratorPart):
            rng.seed_one(part.live, f"{seed}/{part.name}")
    parts.position.begin_own_streams(seed)


def _half_filled(cause: BaseException) -> BaseException:
    text = "The objects in the script now hold a mixture of what they held and of the checkpoint."
    if not isinstance(cause, Exception):
        return type(cause)(text)
    kind = type(cause) if isinstance(cause, ResumableError) else CannotRead
    problem = cause.problem if isinstance(cause, ResumableError) else f"{type(cause).__name__}: {cause}."
    return kind(
        f"{problem} {text}",
        fix="train and save nothing with these objects: start the script again, and resume='auto' continues "
        "from the newest intact checkpoint.",
    )


def forget_gradients(parts: Parts, reading: Reading) -> None:
    """Drop the gradients that a checkpoint lacks: they belong to a step that was undone."""
    kept = {p for part in parts.optimizers for p in part.with_gradients(reading.saved(part.name))}
    for part in parts.optimizers:
        part.forget_gradients(kept)
