"""Putting a training where a checkpoint stood: at its start, or when it goes back."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..boundary import Boundary
from ..errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    Diverged,
    ResumableError,
    StateMismatch,
    UsageError,
)
from ..files import disk
from ..files.strict_json import Json
from ..files.threads import no_garbage_collection
from ..parts import aliases, allowed, collect
from ..parts.fit import Plan, devices, fit, orders, sum_in_order
from ..parts.reading import Reading
from ..parts.renaming import renamed
from ..parts.restore import forget_gradients, restore
from ..position import position, spikes
from ..run import changes, environment, history, history_scan
from ..run.checkpoint import Checkpoint
from ..run.manifest import NO_CHECKPOINT, Best
from ..run.resume_choice import Which
from ..saving.saver import Saving
from ..terminal import is_notebook
from ..training import Training
from ..variables import choice
from ..views import variables


class Fit(NamedTuple):
    """How a checkpoint fits the training, as far as differences are allowed."""

    plan: Plan
    best: Best | None
    differences: Sequence[changes.Difference]


class Resuming:
    """Chooses a checkpoint, looks whether it fits, and puts everything back from it."""

    def __init__(self, training: Training, saving: Saving) -> None:
        self._run = training.run
        self._crew = training.crew
        self._parts = training.parts
        self._position = training.position
        self._saving = saving
        self._goal = training.goal
        self._rename = training.options.rename
        self._is_elastic = training.options.is_elastic
        self._progress = training.progress
        self._copies = training.copies
        self._script = training.script
        self._allow: Sequence[str] = ()
        self._chosen: Any = None
        """The checkpoint that the training goes on from."""

    def choose(self, which: Which, expect: str | None = None) -> tuple[Checkpoint, Reading] | None:
        """Return the checkpoint that `which` means, read and verified; None to start fresh.

        One with another content than the expected one is an error, and no older one is looked for.
        """
        return self._crew.choose(which, partial(self._read, expect), self._copies)

    @no_garbage_collection()
    @torch.inference_mode(False)
    def _read(self, expect: str | None, found: Checkpoint) -> Reading:
        then, now = found.about.world_size, self._crew.ranks.size
        if then != now and not self._is_elastic:
            raise StateMismatch(
                f"{found} was made by {then} processes; there are {now} now, and Ranks(elastic=False).",
                fix=f"start {then} processes, or let the number change: Ranks(elastic=True).",
            )
        try:
            trees = collect.in_place(self._parts)
            live, used = collect.live_tensors(self._parts, trees), self._parts.devices_in_use()
            ranks, show = self._crew.ranks, self._progress.reading
            rank = found.about.rank_for(ranks.rank, ranks.size, self._parts.data_rank)
            alike = partial(collect.alike, self._parts)
            elsewhere = self._parts.elsewhere
            prefixes = {part.name: part.prefix_in_optimizers for part in self._parts.models}
            optimizers = [part.name for part in self._parts.optimizers]
            renames = partial(renamed, self._rename, prefixes, optimizers)
            reading = Reading(found, live, rank, show, expect, used, trees, alike, elsewhere, renames)
            reading.decode()
            position.check(_of_position(reading))
            aliases.check(_of_position(reading).get("aliases", {}))
            held = {name for tree in reading.trees.values() for name in tree.json}
            if lacking := found.about.parts.keys() - held - elsewhere:
                raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
        except (ValueError, KeyError, TypeError) as exc:
            if isinstance(exc, ResumableError):
                raise
            raise disk.damaged(found.path, f"its content is not a checkpoint's: {exc}") from exc
        return reading

    def fit(self, chosen: Checkpoint, reading: Reading, allow: Sequence[str], override: Sequence[str]) -> Fit:
        """Return what does not fit the parts and what has changed; nothing has been touched after this."""
        ranks, about = self._crew.ranks, reading.about
        self._allow = allow
        if not ranks.is_alone:
            sum_in_order(reading, ranks.first("the order of the sums", lambda: orders(reading)))

        earlier = ranks.first("what was allowed", lambda: self._allowed_before(allow)) if allow else []

        def look() -> Fit:
            allowed.refuse_unknown(allow, self._parts, reading, {*earlier})
            plan = fit(self._parts, reading, allow, override)
            self._refuse_unknown_variables(plan)
            differences = [
                *plan.changed,
                *changes.of_world(about.world_size, ranks.size),
                *changes.of_devices(*devices(self._parts, reading.trees)),
                *changes.of_environment(about.environment, environment.describe()),
            ]
            return Fit(plan, self._checked_best(chosen, override), differences)

        found = ranks.each("what does not fit", look)
        self._saving.once.warn_of(self._lacking(reading))
        # Before anything is touched: where warnings are errors, this ends the load.
        rows = ranks.agree("what has changed", lambda: [one.to_json() for one in found.differences])
        ranks.each("telling it", lambda: self._tell(rows, chosen))
        # What the run is built with from here on: where the checkpoint won, that is not the code's.
        kept = [row["name"] for own in rows for row in own if row["used"] == changes.CHECKPOINTS]
        self._saving.keep_settings({name: about.built[name] for name in kept if name in about.built})
        return found

    def _refuse_unknown_variables(self, plan: Plan) -> None:
        """Raise UsageError for an override that names no variable which the checkpoint has."""
        look = plan.reading.trees["rank"].json.get(variables.PART)
        if look is not None and self._script is not None:
            known = {f"script.{re.split(r'[.[]', row.root)[0]}" for row in variables.rows(look)}
            self._script.choice.refuse_unknown(look, plan.code_wins.get(variables.PART, ()), known)

    def _allowed_before(self, allow: Sequence[str]) -> list[str]:
        """Return the patterns that named something at an earlier start; all, if that cannot be known."""
        is_known = not self._copies or history.exists(self._run.path)
        return history_scan.allowed(self._run.path) if is_known else [*allow]

    def _lacking(self, reading: Reading) -> Iterator[str]:
        """Yield what the checkpoint lacks, or the machine."""
        for name in self._parts.found - reading.about.parts.keys() - {"script"}:
            what = "a gradient scaler" if name == "scaler" else "another optimizer"
            yield (
                f"the optimizer steps by {what}, which the checkpoint lacks ({name}): it begins as the "
                "script makes it. [R13]"
            )
        if reading.without_device:
            yield (
                f"the training that saved used {', '.join(reading.without_device)}, and this one uses fewer "
                "devices: what is drawn on a device differs. Resume with as many for the same numbers. [R28]"
            )

    def warn_of_dropout(self) -> None:
        """Warn if a resume cannot restore the dropout of a recurrent layer."""
        if self._parts.has_dropout_in_cudnn():
            self._saving.once.warn(
                "cuDNN hides the state of the dropout in nn.LSTM, nn.GRU and nn.RNN, which differs after a "
                "resume. Set torch.backends.cudnn.enabled = False, or give these layers dropout=0. [R18]",
                about="dropout in cuDNN",
            )

    def _tell(self, rows: Sequence[Sequence[Json]], chosen: Checkpoint) -> None:
        title = f"{self._run} has changed since checkpoint {chosen.about.number}"
        if text := changes.table(title, rows, self._crew.ranks.rank):
            self._saving.once.warn(text)

    def _checked_best(self, chosen: Checkpoint, override: Sequence[str]) -> Best | None:
        # The save number of another run's best means nothing here.
        best = chosen.about.best if self._run.holds(chosen) else None
        elsewhere = self._copies.numbers if self._copies else ()
        is_ours = best is not None and best.number != NO_CHECKPOINT
        if best and is_ours and best.number not in self._run.numbers() and best.number not in elsewhere:
            text = f"checkpoint {best.number}, the best, is not there any more; it is forgotten."
            self._saving.once.warn(text)
            best = None
        if self._goal is None or (best and best.goal == self._goal):
            return best
        if best is None or "best" in override:
            return self._run.best(self._goal)
        raise StateMismatch(
            f"this run has been tracking {best.goal}, the code says {self._goal}.",
            fix=f"say {best.goal} again, or start to track the new one with override=['best'].",
        )

    def go_on(self, chosen: Checkpoint, reading: Reading, fit: Fit) -> None:
        """Put everything back at the start."""
        self._chosen = chosen
        before = self._position.streams.read()
        restore(self._parts, fit.plan, before, each=self._crew.ranks.each)
        self._saving.go_on_from(chosen, fit.best, reading)
        self._position.streams.go_on(before)
        self._parts.note_steps(chosen.about.step)
        self._warn_of_lost_sums(chosen)

    def _warn_of_lost_sums(self, chosen: Checkpoint) -> None:
        then, now = chosen.about.world_size, self._crew.ranks.size
        is_finished = chosen.about.boundary is Boundary.EPOCH
        if now < then and self._crew.is_first and self._position.means and not is_finished:
            self._saving.once.warn(
                f"state.means lacks what {then - now} of the {then} processes have summed up so far: until "
                "the next epoch (or means.reset()) its values are those of the others. [R28]"
            )

    def go_back(
        self, which: Which, only: str | None = None, skip: bool = False, expect: str | None = None
    ) -> Checkpoint:
        """Put everything back, or only a part, or all but the place in the data."""
        ranks = self._crew.ranks
        told = f", expect={expect!r}" if expect else ""
        ranks.agree(f"restore({str(which)!r}{told})", lambda: None, is_due=True)
        # Not all processes have the same stages: without this the others would wait for one that raises.
        names = None if only is None else ranks.each("what to restore", lambda: self._parts.names(only))
        if skip:
            ranks.each("the batch in hand", self._position.refuse_to_go_back)
            names = self._parts.names_but_data()
        found = self.choose("must" if which == "auto" else which, expect)
        if found is None:
            raise UsageError(
                f"restore({which!r}) names no checkpoint.",
                fix="say 'best', 'newest', a save number or a checkpoint's path.",
            )
        chosen, reading = found
        plan = ranks.each("what does not fit", lambda: fit(self._parts, reading, only=names))
        restore(self._parts, plan, self._position.streams.read(), each=ranks.each)
        if only is None:
            self._chosen = chosen
            self._saving.late.forget()
            forget_gradients(self._parts, reading)
            self._saving.go_on_from(chosen, self._checked_best(chosen, ["best"]), reading)
            self._saving.history.went_back(self._saving.parent, str(which))
        if skip:
            self._position.go_back(_of_position(reading))
        elif only is None:
            self._position.hold()
        return chosen

    def put_again(self, names: Sequence[str]) -> None:
        """Put parts back a second time, from the checkpoint that the training goes on from."""
        ranks = self._crew.ranks
        reading = ranks.each("the parts again", lambda: self._read(None, self._chosen))
        plan = ranks.each("what does not fit", lambda: fit(self._parts, reading, self._allow, only=names))
        restore(self._parts, plan, self._position.streams.read(), each=ranks.each)

    def go_back_from_spike(self, where: str, is_again: bool) -> Checkpoint:
        """Go back to the newest checkpoint of this branch, or, if that was done just now, behind it."""
        number = self._saving.parent
        if number is not None and is_again:
            # Twice in a row: not only the batches, but the checkpoint may be bad.
            number = self._before(number)
        while number is not None:
            try:
                return self.go_back(number, skip=True)
            except (CheckpointDamaged, CheckpointNotFound) as exc:
                if self._crew.is_first:
                    self._saving.once.warn(f"{exc.problem} It is skipped; an older checkpoint is used.")
                number = self._before(number)
        raise Diverged(
            f"{where}, and {self._run} has no checkpoint to go back to.",
            fix="save before a spike can come; look at the data there, or lower the learning rate.",
        )

    def _before(self, number: int) -> int | None:
        return self._crew.ranks.first("the checkpoint before", lambda: spikes.before(self._run, number))

    def line(self, what: str, chosen: Checkpoint, started: float, way: str, more: str = "") -> str:
        """Return the line that says where the training continues."""
        facts, best = self.place(), self._saving.best
        if best:
            facts.append(f"best {best.goal.metric} {best.value:.4g}")
        where = f"{self._run} {way}" + ("" if self._run.holds(chosen) else f" {chosen.path},")
        seconds = time.perf_counter() - started
        took = f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"
        return f"{what} {where} checkpoint {chosen.about.number}: {', '.join(facts)}{more} ({took})"

    def variables(self, fit: Fit) -> str:
        """Return what to add to the line about the variables of the script."""
        look = fit.plan.reading.trees["rank"].json.get(variables.PART)
        if look is None or self._script is None or self._script not in fit.plan.chosen:
            return ""
        file = getattr(sys.modules.get("__main__"), "__file__", None)
        script = "the notebook" if is_notebook() else os.path.basename(file or "the script")
        wins = choice.wins(look, fit.plan.code_wins[variables.PART])
        left = [one for one in wins if self._script.choice.leaves(look, one)]
        own = f"; the script's own: {', '.join(one.partition('.')[2] or '*' for one in left)}" if left else ""
        return variables.told(self._script.choice.without(look, wins), script) + own

    def told(self, fit: Fit) -> str:
        """Return what to add to the line about names that differ."""
        renamed = allowed.told_names(fit.plan.reading.renamed)
        return renamed + allowed.told(fit.plan.kept, self._parts)

    def place(self) -> list[str]:
        """Return where the training stands, as people read it."""
        at = self._position.counters()
        facts = [f"epoch {at['epoch']}"]
        if at["batch"]:
            found = [loader.length() for loader in self._position.loaders.values()]
            lengths = [length for length in found if length is not None]
            facts.append(f"batch {at['batch']}" + (f"/{lengths[0]}" if len(lengths) == 1 else ""))
            if lengths == [at["batch"]]:
                facts[-1] += " (only the rest of its body is left)"
        return [*facts, f"step {at['step']}"]


def _of_position(reading: Reading) -> Mapping[str, Any]:
    found: Mapping[str, Any] = reading.saved("position").view("rank")
    return found
