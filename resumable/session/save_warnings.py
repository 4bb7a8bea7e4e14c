"""What to warn of when `save()` is called: what a resume from that checkpoint would not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..loaders.generators import rng, search
from ..parts.parts import Parts
from ..position.loader_position import LoaderPosition
from ..position.position import Position
from ..position.script import loops
from ..position.script.called import Called
from ..position.script.loop_variables import LoopGenerators, LoopVariables
from ..position.script.unsaved_weights import UnsavedWeights, has_extra_state, modules_of
from ..processes.signals import is_of_a_handler
from ..training import Training


class SaveWarnings:
    """Looks at the script's loops at each save."""

    def __init__(self, training: Training) -> None:
        self._parts, self._position, self._once = training.parts, training.position, training.once
        generators = LoopGenerators(partial(_generators, self._parts, self._position))
        self._loop: tuple[LoopVariables, LoopGenerators, UnsavedWeights] | None
        given = self._parts.given
        self._loop = (
            LoopVariables(given, partial(_loaders, self._position)),
            generators,
            UnsavedWeights(given),
        )
        self._begun: set[str] = set()
        self._called = Called()
        if training.script:
            # What it stores needs no warning.
            self._loop = None

    def begin_loop(self, kind: str) -> None:
        """Look at what the first loop of each kind begins with; the first save is compared with it."""
        if self._loop is None or kind in self._begun:
            return
        self._begun.add(kind)
        with self._looking():
            functions = loops.running(self._called)
            for one in self._loop:
                one.begin(functions)

    def look_at_place(self, metrics: Mapping[str, Any]) -> None:
        """Warn of a `save()` in the script at a place where a resume cannot continue exactly."""
        warn, position = self._once.warn, self._position
        if any(loader.is_interrupted() for loader in position.loaders.values()):
            warn(
                "saved while handling an exception that left the loop over the batches: that is not a "
                "boundary, and a resume will not be bit for bit what an uninterrupted run does."
            )
        position.was_saved()
        if position.streams.has_late_read():
            warn(
                "random numbers were drawn between reading state.step (or another counter) and the loop that "
                "begins with it: after a resume these draws differ, because the generators are put back at "
                "the first such read. Read the counters in the head of the loop only, or use state.steps()."
            )
        if position.streams.has_unseen_loop():
            warn(
                "this script reads neither state.step (or another counter) nor state.vars, so that RunState "
                "does not see where its loop begins: a resume puts the random generators back in load, and "
                "what is drawn between load and the loop differs. Begin the loop with a counter, as in "
                "range(state.step, total)."
            )
        if position.is_in_inner_loop():
            warn(
                "save() in a loop over batches that runs in the body of another such loop counts the outer "
                "batch as done: a resume continues with the next one, and loses the rest of the inner loop. "
                "Call save() in the outer loop, after the inner one."
            )
        if unlooped := position.unlooped():
            names = ", ".join(name.removeprefix("loader.") for name in unlooped)
            warn(
                f"save() in the body of epochs() says that the epoch is finished, and {names} has not been "
                "looped over in it: a resume begins the next epoch. If it is due in this epoch, call save() "
                "in or after its loop."
            )
        is_used = metrics or any(isinstance(one, ReduceLROnPlateau) for one in self._parts.given())
        if is_used and position.sums.lost and not position.means:
            lost = position.sums.lost
            covers = "cover" if len(lost) > 1 else "covers"
            warn(
                f"this epoch was resumed in the middle, so that {', '.join(lost)} {covers} only "
                "the rest of it, and so does what is computed from that. Average with state.mean(loss=loss) "
                "in the loop, and save(**state.means) after it. If it is only shown, nothing is lost."
            )

    def look_at_variables(self) -> None:
        """Warn of variables and random generators that the loop changes and no checkpoint has."""
        if self._loop is None:
            return
        variables, generators, weights = self._loop
        with self._looking():
            functions = loops.running(self._called)
            changed, moved = variables.changed(functions), generators.moved(functions)
            hidden = variables.hidden(functions)
            attributes, copies = weights.changed(functions)
        if self._loop is None:
            return
        summed = [name for name in changed if name in variables.summed(functions)]
        if summed:
            self._warn_of_sums(summed)
        if changed := [name for name in changed if name not in summed]:
            names, is_one = ", ".join(changed), len(changed) == 1
            self._once.warn(
                f"{names} {'controls' if is_one else 'control'} this loop and "
                f"{'changes' if is_one else 'change'} as it runs, but no checkpoint has "
                f"{'it' if is_one else 'them'}: a resume starts from the values assigned before the loop. "
                "Keep such values in state.vars (of a class or a named tuple, its fields), or pass an object "
                "that has state_dict and load_state_dict in extra={...}. If they only affect what is shown, "
                "nothing is lost."
            )
        if hidden:
            names, is_one = ", ".join(hidden), len(hidden) == 1
            self._once.warn(
                f"{names} {'controls' if is_one else 'control'} this loop, and RunState cannot see whether "
                f"{'it changes' if is_one else 'they change'}: before Python 3.13 it does not read the "
                "variables of a function that calls locals() or vars(). If no checkpoint has "
                f"{'it' if is_one else 'them'}, a resume starts from the values assigned before the loop. "
                "Keep such values in state.vars, or call locals() in another function than the loop's."
            )
        if moved:
            self._once.warn(
                f"this loop draws from random generators that are in no checkpoint ({', '.join(moved)}): "
                "after a resume they draw different numbers. Give them to RunState: extra={...}, by names of "
                "your choice."
            )
        if attributes:
            names, is_one = ", ".join(attributes), len(attributes) == 1
            self._once.warn(
                f"{names} {'changes' if is_one else 'change'} as the model is trained, but no checkpoint has "
                f"{'it, since it is' if is_one else 'them, since they are'} neither parameter nor buffer: a "
                "resume starts from the values that __init__ assigns. Register tensors with "
                "register_buffer(), and return other values from get_extra_state(). If they only affect "
                "what is shown, nothing is lost."
            )
        if copies:
            names, is_one = ", ".join(copies), len(copies) == 1
            self._once.warn(
                f"{names} {'has' if is_one else 'have'} weights that change as this loop runs, but no "
                f"checkpoint has {'it' if is_one else 'them'}: a resume starts from the weights before the "
                "loop. Pass a module or an object with state_dict in extra={...}, and keep a copy that the "
                "loop replaces in state.vars."
            )

    def _warn_of_sums(self, names: Sequence[str]) -> None:
        is_one = len(names) == 1
        self._once.warn(
            f"{', '.join(names)} {'is' if is_one else 'are'} summed over the epoch and saved as "
            f"{'a metric' if is_one else 'metrics'}: after a resume in mid-epoch "
            f"{'it covers' if is_one else 'they cover'} only the rest. Average with "
            "state.mean(loss=loss) in the loop, and save(**state.means)."
        )

    def close(self) -> None:
        """Look no more, and keep nothing of the script alive."""
        self._loop, self._called = None, Called()

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Stop looking where an object of the script raises: it may raise anything when it is looked at."""
        try:
            yield
        except Exception as exc:
            if is_of_a_handler(exc):
                raise
            self.close()
            self._once.warn(
                f"the variables of this loop cannot be inspected ({exc!r}), so RunState does not warn of "
                "those that are in no checkpoint."
            )


def _loaders(position: Position) -> list[Any]:
    return [at.source.loader for at in position.loaders.values()]


def _generators(parts: Parts, position: Position) -> list[rng.Generator]:
    """Return the random generators that a checkpoint has, beside the global ones."""
    live = parts.given()
    given = [one for one in live if not isinstance(one, (torch.nn.Module, Position, LoaderPosition))]
    # What has a state of its own has its generators in that.
    given += [module for module in modules_of(live) if has_extra_state(module)]
    return [*position.generators(), *search.find(given).values()]
