"""`RunState`: the loops, `save`, `restore`; the only module that knows all the others."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from . import determinism, options
from .boundary import Due
from .errors import Diverged, Preempted, RemoteError, UsageError, warn
from .files import pin
from .files.strict_json import Json
from .loaders import doubts, rng
from .observer import Unregistered, audit, observer
from .options import Copied
from .parts import capture
from .parts.capture import Capture
from .position import last_batch, spikes
from .position.loader_position import Hooks, LoaderPosition, Through
from .position.loop_variables import LoopGenerators, LoopVariables
from .position.means import Means
from .position.position import Batches, Enumerated, Position
from .position.prefetch import ToDevice
from .position.spikes import Spikes
from .processes.ranks import of_this_training
from .processes.roles import Crew
from .processes.signals import Signals
from .progress import Progress
from .remote import url
from .remote.in_training import Copies
from .resuming import Resuming
from .run import changes, html
from .run.directory import Run, Which
from .run.history import History
from .run.policy import Every, Keep, counted
from .run.splits import split
from .saving.autosave import Autosave
from .saving.fence import is_capturing, untraced
from .saving.saver import Saving, end
from .saving.unhooked import NotGiven, Unseen
from .saving.writer import PendingSave
from .trace import tracer
from .views import report
from .views.report import Report

_open_runs: weakref.WeakValueDictionary[Path, RunState] = weakref.WeakValueDictionary()
_written: weakref.WeakValueDictionary[Path, Run] = weakref.WeakValueDictionary()
_PATIENCE = 30.0
"""So long another thread may take to let go of a run whose state it has dropped."""


class RunState:
    """A whole training as one object: it saves it, and puts it back.

    Begin with `RunState.load(...)`. One that was made without it only trains where the run is empty.

    The parts exist, on their devices and wrapped, before they are given. Each of model,
    optimizer, scheduler, scaler and loader is one object or a dict of named ones. `extra` is
    a dict of anything with `state_dict` and `load_state_dict`, of random generators, dicts
    and dataclasses. `keep` is how many of the newest checkpoints stay (None: all), or a dict such as
    {"newest": 3, "best": 2, "every": "1000 steps"}; the best one, by the metric to `maximize` or to
    `minimize`, always does.

    `every`: when the loops save by themselves ("10 min", 500 steps, "2 epochs", "1 %" of the time, or a
    list: whichever comes first); `mtbf`: the mean time between failures, for the interval that loses the
    least. `save_on`: the signals at which the loops save and leave; `on_preempt`: whether they "exit" with
    128 + the signal, or "raise" Preempted; `max_time`: how long until they leave by themselves ("3h50m").
    `progress`: whether bars are shown (None: at a terminal and in a notebook). `sample_seeds`: whether each
    sample has its own seed.

    `remote`: an address such as "s3://bucket/exp" to which checkpoints are copied in the background, and from
    which they come back where the run directory has none; `push`: which of them ("best", the "newest" and
    the best, "all"), `remote_keep`: which stay there; `push_timeout`: how long `close()` waits for it;
    `remote_options`: what fsspec's filesystem is given. A `run_dir` that is such an address is one that is
    kept in a local cache.

    In a training of several processes each makes its own, once torch.distributed is initialised.
    `per_rank` names parts of `extra` that each keeps for itself; `timeout` (in seconds) is how long one
    waits for another; `elastic`: whether their number may change; `shared`: whether all see the same
    disk; `write`: whether "one" of them or "all" write what all have; `check_replicas`: whether each
    save compares that.

    `trace`: a file to which a line is written at each boundary, with a digest of the batch and what `note`
    was given, and every `trace_every` steps one of each part: `resumable diff --trace` compares two such.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with RunState.load("runs/exp", model=model, optimizer=optimizer, minimize="loss") as state:
    ...     for step in state.steps(3):
    ...         loss = model(torch.ones(2)).square().sum()
    ...         optimizer.zero_grad()
    ...         loss.backward()
    ...         optimizer.step()
    ...         _ = state.save(loss=loss.detach())
    runs/exp is empty: starting fresh
    >>> with RunState.load("runs/exp", model=model, optimizer=optimizer, minimize="loss") as state:
    ...     state.step  # doctest: +ELLIPSIS
    resumed runs/exp from checkpoint 3: epoch 0, step 3, best loss ... s)
    3
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        extra: dict[str, Any] | None = None,
        maximize: str | None = None,
        minimize: str | None = None,
        keep: int | Mapping[str, Any] | None = 3,
        every: Any = None,
        mtbf: Any = None,
        save_on: Sequence[str] = options.SAVE_ON,
        on_preempt: str = "exit",
        max_time: Any = None,
        progress: bool | None = None,
        remote: str | None = None,
        push: str = "newest",
        remote_keep: int | Mapping[str, Any] | None = 3,
        push_timeout: Any = "5 min",
        remote_options: Mapping[str, Any] | None = None,
        sample_seeds: bool = False,
        per_rank: Sequence[str] = (),
        timeout: float = 60,
        elastic: bool = True,
        shared: bool = True,
        write: str = "one",
        check_replicas: bool = False,
        trace: str | os.PathLike[str] | None = None,
        trace_every: int = tracer.EVERY,
    ) -> None:
        self._goal = options.goal(maximize, minimize)
        folder, remote = _places(run_dir, remote)
        self.run = Run(folder)
        """The run directory."""
        self._vars: dict[str, Any] = {}
        self._resumed = False
        self._progress = shown = Progress(progress, is_first=of_this_training()[0] == 0)
        self._position = at = _position(loader, extra, sample_seeds, shown)
        late, all_write = options.seconds("timeout", timeout), options.write(write)
        self._crew = crew = Crew(self.run, late, at.stands_at, is_shared=shared, all_write=all_write)
        at.processes = crew.ranks.size
        at.means.gather, shown.means = partial(_gather, crew), at.means.glance
        slots = dict(zip(capture.SLOTS, (model, optimizer, scheduler, scaler, extra), strict=True))
        self._capture = Capture(slots, self._vars, at, _of_each_rank(per_rank, extra), crew.rank)
        kept = options.keep(keep, self._goal)
        self._alike = {"keep": kept and kept.told(), "elastic": elastic, "check_replicas": check_replicas}
        self._checks_replicas = check_replicas and not crew.ranks.is_alone
        copied = options.copied(remote, push, remote_keep, push_timeout, remote_options, self._goal)
        self._furnish(kept, copied, elastic)
        self._raises, self._how = options.on_preempt(on_preempt), "closed"
        self._watch(options.save_on(save_on), *options.when(every, mtbf, max_time))
        self._hooks = self._count_steps(optimizer)
        traced = trace, options.count("trace_every", trace_every)
        self._trace = observer(self._capture, at, crew.rank, *traced, run=self.run.path, given=run_dir)

    def _furnish(self, keep: Keep | None, copied: Copied | None, is_elastic: bool) -> None:
        self._is_closed, self._is_prepared, self._is_calm = False, False, True
        generators = LoopGenerators(partial(_generators, self._capture, self._position))
        self._loop: tuple[LoopVariables, LoopGenerators] | None
        self._loop = LoopVariables(self._capture.given), generators
        self._process = os.getpid()
        self._has_begun = False
        self._first_look: Mapping[str, Any] | None = None
        once, run, crew = self._position.once, self.run, self._crew
        self._copies = copied and Copies(run, crew, copied, self._goal, self._progress, once.warn)
        where = run, crew, self._capture, self._position, self._goal, self._progress, self._copies
        self._saving = Saving(*where, keep=keep, checks_replicas=self._checks_replicas, once=once)
        self._resuming = Resuming(*where, self._saving, is_elastic=is_elastic)
        # One that is dropped without close() must not lock its run for the rest of the process.
        what = os.getpid(), self._saving.history, run, self._position, self._copies
        self._dropped = weakref.finalize(self, _end, *what)

    def _watch(self, save_on: Sequence[signal.Signals], rules: Every, limit: float | None) -> None:
        self._signals = Signals(save_on, is_told=self._crew.is_first)
        self._autosave = Autosave(self._crew.ranks, self._signals, self._saving.pace, rules, limit)

    @classmethod
    def load(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        extra: dict[str, Any] | None = None,
        maximize: str | None = None,
        minimize: str | None = None,
        keep: int | Mapping[str, Any] | None = 3,
        every: Any = None,
        mtbf: Any = None,
        save_on: Sequence[str] = options.SAVE_ON,
        on_preempt: str = "exit",
        max_time: Any = None,
        progress: bool | None = None,
        remote: str | None = None,
        push: str = "newest",
        remote_keep: int | Mapping[str, Any] | None = 3,
        push_timeout: Any = "5 min",
        remote_options: Mapping[str, Any] | None = None,
        sample_seeds: bool = False,
        per_rank: Sequence[str] = (),
        timeout: float = 60,
        elastic: bool = True,
        shared: bool = True,
        write: str = "one",
        check_replicas: bool = False,
        trace: str | os.PathLike[str] | None = None,
        trace_every: int = tracer.EVERY,
        resume: str | int | os.PathLike[str] = "auto",
        allow: Sequence[str] = (),
        override: Sequence[str] = (),
        expect: str | None = None,
    ) -> RunState:
        """Bind the parts and go on from a checkpoint, or start fresh; one line says which.

        `resume`: "auto" (the newest intact checkpoint, or fresh where there is none), "must" (or an error),
        "never" (an error where there is a checkpoint), "best", a save number, or a checkpoint's path.
        `allow`: names that may be missing, new or of another shape; patterns such as "model.head.*" too.
        `override`: settings for which the script's value wins, such as "optimizer.lr"; with a scheduler
        that remembers where it started, that scales the whole schedule.
        `expect`: the only content to go on from, as `Checkpoint.pin()` or `resumable verify --pin` tells it
        ("sha256:..."): for a checkpoint that others may have written to. There has to be one then.
        The environment variables RESUMABLE_RUN_DIR, RESUMABLE_RESUME, RESUMABLE_REMOTE and RESUMABLE_TRACE
        (empty: none) override the arguments.
        """
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        data = {"loader": loader, "extra": extra, "sample_seeds": sample_seeds, "per_rank": per_rank}
        saves = {"maximize": maximize, "minimize": minimize, "keep": keep, "write": write, "shared": shared}
        when = {"every": every, "mtbf": mtbf, "save_on": save_on, "on_preempt": on_preempt}
        copies = {"remote": remote, "push": push, "remote_keep": remote_keep, "push_timeout": push_timeout}
        shows = {"remote_options": remote_options, "max_time": max_time, "progress": progress, "trace": trace}
        rest = {"timeout": timeout, "elastic": elastic, "check_replicas": check_replicas}
        given = {**parts, **data, **saves, **when, **copies, **shows, **rest, "trace_every": trace_every}
        how = os.environ.get("RESUMABLE_RESUME") or resume, allow, override, expect
        return cls(run_dir, **given)._load_or_close(*how)

    def _load_or_close(self, *how: Any) -> RunState:
        try:
            self._load(*how)
            self._position.outside.look()
            self._position.before_loop.begin(is_resumed=self._resumed)
            return self
        except BaseException:
            self.close()
            raise

    def _load(self, resume: Which, allow: Sequence[str], override: Sequence[str], expect: str | None) -> None:
        started, expect, self._has_begun = time.perf_counter(), pin.checked(expect), True
        resume = pin.due(resume, expect)
        allow, override = options.patterns("allow", allow), options.patterns("override", override)
        facts: dict[str, Json] = {"resume": str(resume), "allow": [*allow], "override": [*override]}
        facts["expect"] = expect
        facts["remote"] = self._copies and str(self._copies)
        self._crew.is_copied = self._copies is not None
        self._meet(facts, lambda: self.run.check(resume, self._crew.is_copied))
        self._resuming.warn_of_dropout()
        self._warn_of_loaders()
        ranks = self._crew.ranks
        self._position.seed = ranks.first("the seed of the samples", lambda: self._position.seed)
        ranks.each("the arguments", lambda: self._check_arguments(resume, override))
        if self._copies:
            if self._copies.are_cached():
                self._print(f"{self._copies} is kept in {self.run}")
            self._copies.look(resume)
            self._crew.is_copied = bool(self._copies.numbers)
        if ranks.first("the run", lambda: os.path.exists(self.run.path)):
            self._own_run()
        found, skipped = self._resuming.choose_first(resume, expect)
        if skipped:
            self._print(f"{self.run}: {skipped}")
        if found is None:
            self._own_run()
            self._position.streams.begin()
            self._saving.note_start({})
            self._saving.warn_of_room(self._capture.size())
            self._print(f"{self.run}: starting fresh" if skipped else f"{self.run} is empty: starting fresh")
            self._trace_begins()
            return
        fit = self._resuming.fit(*found, allow, override)
        self._own_run()
        self._resuming.go_on(*found, fit)
        self._go_on()
        self._resumed = self._is_prepared = True
        determinism.hold(self, str(self.run))
        self._saving.note_start({"changed": [one.to_json() for one in fit.differences]})
        # What was pruned may be in a remote under its number: the next save must not take its place there.
        self._crew.count_from(ranks.first("the numbers", lambda: self._saving.history.highest))
        self._saving.warn_of_room(found[0].about.size)
        self._saving.prepare()
        self._trace_begins()
        line = self._resuming.line("resumed", found[0], started, "from")
        resized = changes.resized(found[1].about.world_size, ranks.size)
        self._print(line + resized)

    def _went_back(self) -> None:
        self._go_on()
        self._position.before_loop.forget()
        if self._trace:
            self._trace.went_back()

    def _warn_of_loaders(self) -> None:
        for loader in self._position.loaders.values():
            for text in doubts.of(loader.source.loader):
                self._saving.once.warn(text)

    def _trace_begins(self) -> None:
        if self._trace:
            self._trace.begin(is_resumed=self._resumed)

    def _check_arguments(self, resume: Which, override: Sequence[str]) -> None:
        self._capture.check_patterns(override)
        if self._crew.leads:
            self.run.check(resume, self._copies is not None)

    def _go_on(self) -> None:
        self._autosave.saved(self._position.step, self._position.epoch)
        self._progress.go_to(epochs=self._position.epoch, steps=self._position.step)

    def _print(self, line: str) -> None:
        if self._crew.is_first:
            self._progress.print(line)

    @property
    def resumed(self) -> bool:
        """Whether this training goes on from a checkpoint."""
        self._position.before_loop.was_read(may_begin_loop=False)
        return self._resumed

    @property
    def vars(self) -> dict[str, Any]:
        """Your own small values: saved and restored with everything else.

        Assigning a dict replaces the contents; what you later add to that dict itself is not saved.
        """
        self._position.was_read(is_counter=False)
        return self._vars

    @vars.setter
    def vars(self, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping):
            raise UsageError(
                f"state.vars is a dict, and {type(values).__name__} was assigned to it.",
                fix='write state.vars["name"] = value, or assign a dict.',
            )
        # The same dict stays: the parts that are saved hold it.
        values = dict(values)
        self._vars.clear()
        self._vars.update(values)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that the last `save` was given; of several processes, those that rank 0 gave."""
        self._saving.hear_first()
        return self._position.metrics

    @property
    def means(self) -> Means:
        """What `mean` was given in this epoch so far, averaged: `means["loss"]`, `save(**means)`.

        It can be read in the epoch's body and after it, until the next one begins. Of several processes each
        has its own; `means.reduced()`, called by all, returns those over all processes.
        """
        return self._position.means

    @property
    def epoch(self) -> int:
        """Epochs done; in the body of `epochs()`, the index of the one in hand."""
        self._position.was_read()
        return self._position.epochs_done()

    @property
    def batch(self) -> int:
        """Batches of this epoch done; in the body of `batches()`, the index of the one in hand."""
        self._position.was_read()
        return self._position.batch

    @property
    def step(self) -> int:
        """Steps done: those of the first optimizer; in `steps()`, its bodies.

        Where no optimizer is given, or the first has no hooks, each batch of the outermost loop over
        `batches()` is a step.
        """
        self._position.was_read()
        return self._position.step

    @property
    def samples(self) -> int:
        """Samples trained on, over all epochs."""
        self._position.was_read()
        return self._position.samples

    @property
    def best(self) -> float | None:
        """The best value so far of the metric to maximize or minimize."""
        self._saving.hear_first()
        return self._saving.best.value if self._saving.best else None

    def begin_at(self, *, epoch: int = 0, step: int = 0) -> None:
        """Count on from a training that was saved without this library.

        At the first start, before the loop, after the old checkpoint was loaded into the parts.

        >>> with RunState.load("runs/migrated") as state:
        ...     if not state.resumed:
        ...         state.begin_at(epoch=3, step=300)
        ...     for epoch in state.epochs(4):
        ...         print(epoch, state.step)
        runs/migrated is empty: starting fresh
        3 300
        """
        if self._resumed or self._position.streams.has_trained:
            raise UsageError(
                f"this training has begun already: it stands at {', '.join(self._resuming.place())}.",
                fix="call begin_at() at the first start only: if not state.resumed: ...",
            )
        self._position.begin_at(options.count("epoch", epoch), options.count("step", step))

    def split(
        self, n: int, fractions: Sequence[float], name: str = "split", seed: int = 0
    ) -> list[list[int]]:
        """Deal `n` indices at random to parts of these sizes; the run remembers, and deals them so for ever.

        The loaders are made of it, so it may be asked before anything is loaded.

        >>> train, test = RunState("runs/divided").split(10, [0.8, 0.2])
        >>> len(train), len(test), RunState("runs/divided").split(10, [0.8, 0.2]) == [train, test]
        (8, 2, True)
        """
        return split(self.run.path, n, fractions, name, seed)

    def epochs(self, total: int) -> Iterator[int]:
        """Loop over the epochs that are left of `total`, which counts those done before."""
        self._begin_training()
        if self._resumed and self._position.epoch >= options.count("total", total):
            self._print(f"{self.run} is complete: {self._position.epoch} of {total} epochs are done")
        epochs = self._position.epochs(options.count("total", total), self._epoch_ended)
        with self._progress.loop("epochs", total, self._position.epoch):
            yield from self._watched(epochs)

    def batches(
        self,
        loader: Any = None,
        *,
        device: str | int | torch.device | None = None,
        through: Through | None = None,
    ) -> Batches:
        """Loop over the batches that are left of this epoch; of several loaders, name one or pass it.

        `len()` of what is returned is the length of the whole epoch, as that of the loader is.
        `loader` may also be an iterable, or a function that returns an iterator, that was not given before.
        `device`: the batches come on this device, the next one copied while the training has this one.
        `through`: what gets the iterator of the batches and returns an iterable of the same ones (a thread
        that loads ahead): a batch counts when it comes out of that.
        """
        self._begin_training()
        name = self._loader_name(loader)
        loads_ahead = self._position.at(name).keeps_draws = through is not None
        if device is not None:
            ahead = self._position.at(name).source.can_load_ahead()
            loads_ahead |= ahead
            through = _both(through, ToDevice(device, ahead))
        at = self._position.at(name)
        begin, end = partial(self._batches_begin, name, at), partial(self._batches_end, at)
        hooks = Hooks(begin, partial(self._batch_ended, name, at), end)
        return self._position.batches(name, hooks, through, loads_ahead)

    def enumerate(
        self,
        loader: Any = None,
        *,
        device: str | int | torch.device | None = None,
        through: Through | None = None,
        start: int = 0,
    ) -> Enumerated:
        """Loop over the batches that are left of this epoch, each with its index in the epoch.

        Like `enumerate(state.batches())`, but the index is right after a resume in mid-epoch too. The
        arguments are those of `batches()`; `start` is the index of the epoch's first batch.

        >>> with RunState.load("runs/indexed", loader=torch.arange(4.0).split(2)) as state:
        ...     for index, batch in state.enumerate():
        ...         print(index, batch.tolist())
        runs/indexed is empty: starting fresh
        0 [0.0, 1.0]
        1 [2.0, 3.0]
        """
        return Enumerated(self.batches(loader, device=device, through=through), start)

    def steps(self, total: int) -> Iterator[int]:
        """Loop over the steps that are left of `total`; each body is one, however often optimizers step."""
        self._begin_training()
        if self._resumed and self._position.step >= options.count("total", total):
            self._print(f"{self.run} is complete: {self._position.step} of {total} steps are done")
        steps = self._position.steps(options.count("total", total), self._step_ended)
        with self._progress.loop("steps", total, self._position.step):
            yield from self._watched(steps)

    def _watched(self, loop: Iterator[int]) -> Iterator[int]:
        self._loop_begins()
        try:
            yield from loop
            self.wait()
        finally:
            self._loop_ends()

    def _loop_begins(self) -> None:
        if self._position.is_outside():
            self._position.outside.begin_loop()
            self._position.accelerate.begin_loop()
            self._position.before_loop.end()
        determinism.let_go(self)
        self._signals.begin()
        self._saving.pace.begin()

    def _loop_ends(self) -> None:
        self._signals.end()

    def _batches_begin(self, name: str, at: LoaderPosition) -> None:
        self._loop_begins()
        self._position.accelerate.begin(name, at, self._position.processes)
        self._find_unseen_steps()
        self._progress.begin_batches(at, at.length(), at.done)

    def _batches_end(self, at: LoaderPosition) -> None:
        self._progress.end_batches(at)
        self._position.accelerate.end(at)
        self._loop_ends()

    def _loader_name(self, loader: Any) -> str:
        loaders = self._position.loaders
        found = [
            name
            for name, position in loaders.items()
            if loader is None or loader is position.source.loader or name == f"loader.{loader}"
        ]
        if len(found) == 1:
            return found[0]
        if not isinstance(loader, (str, DataLoader, type(None))):
            return self._position.find(loader)
        there = ", ".join(name.removeprefix("loader.") for name in loaders) or "none"
        if isinstance(loader, DataLoader):
            raise UsageError(
                f"this DataLoader was not given to RunState, which was given: {there}.",
                fix="give it to RunState (loader=...), which then keeps its position; loop over a loader to "
                "validate with as it is.",
            )
        raise UsageError(
            f"batches() needs one loader; RunState was given: {there}.",
            fix="give RunState the loader (loader=...), or name one of several: batches('train').",
        )

    def save(self, **metrics: Any) -> PendingSave:
        """Save everything; return at once, while the checkpoint is written in the background.

        The keywords are metrics, for ever. In the body of a loop the batch (or step) in hand counts as
        done, so call it after `optimizer.step()`; after the loop over an epoch's batches, the epoch does.
        What goes wrong in the background is raised by the next call.
        """
        self._begin_training()
        if any(loader.is_interrupted() for loader in self._position.loaders.values()):
            self._saving.once.warn(
                "saved while handling an exception that left the loop over the batches: that is not a "
                "boundary, and a resume will not be bit for bit what an uninterrupted run does."
            )
        self._position.was_saved()
        self._warn_at_save(metrics)
        handle = self._save("called", metrics)
        if self._trace:
            self._trace.saved(self._position.metrics)
        # Where no loop of ours runs, a save is the only boundary that there is.
        if self._trace and self._position.is_outside() and (due := self._trace.boundary()):
            self._leave(due, due.leaves or signal.SIGTERM)
        return handle

    def _warn_at_save(self, metrics: Mapping[str, Any]) -> None:
        if self._position.streams.has_late_read():
            self._saving.once.warn(
                "random numbers were drawn between reading state.step (or another counter) and the loop that "
                "begins with it: after a resume these draws differ, because the generators are put back at "
                "the first such read. Read the counters in the head of the loop only, or use state.steps()."
            )
        if self._position.streams.has_unseen_loop():
            self._saving.once.warn(
                "this script reads neither state.step (or another counter) nor state.vars, so that RunState "
                "does not see where its loop begins: a resume puts the random generators back in load, and "
                "what is drawn between load and the loop differs. Begin the loop with a counter, as in "
                "range(state.step, total)."
            )
        if self._position.is_in_inner_loop():
            self._saving.once.warn(
                "save() in a loop over batches that runs in the body of another such loop counts the outer "
                "batch as done: a resume goes on with the next one, and loses the rest of the inner loop. "
                "Call save() in the outer loop, after the inner one."
            )
        if unlooped := self._position.unlooped():
            names = ", ".join(name.removeprefix("loader.") for name in unlooped)
            self._saving.once.warn(
                f"save() in the body of epochs() says that the epoch is finished, and {names} has not been "
                "looped over in it: a resume begins the next epoch. If it is due in this epoch, call save() "
                "in or after its loop."
            )
        is_used = metrics or any(isinstance(one, ReduceLROnPlateau) for one in self._capture.given())
        if is_used and self._position.sums.lost and not self._position.means:
            names = ", ".join(self._position.sums.lost)
            self._saving.once.warn(
                f"this epoch was resumed in the middle, so that {names} covers only the rest of it, and so "
                "does what is computed from that. Average with state.mean(loss=loss) in the loop, and "
                "save(**state.means) after it. If it is only shown, nothing is lost."
            )

    def _warn_of_variables(self) -> None:
        if self._loop is None:
            return
        variables, generators = self._loop
        try:
            changed, moved = variables.changed(), generators.moved()
        except Exception as exc:
            # An object of the script may raise anything when it is looked at.
            self._loop = None
            self._saving.once.warn(
                f"the variables of this loop cannot be inspected ({exc!r}), so RunState does not warn of "
                "those that are in no checkpoint."
            )
            return
        if changed:
            names, is_one = ", ".join(changed), len(changed) == 1
            self._saving.once.warn(
                f"{names} {'controls' if is_one else 'control'} this loop and "
                f"{'changes' if is_one else 'change'} as it runs, but no checkpoint has "
                f"{'it' if is_one else 'them'}: a resume starts from the values assigned before the loop. "
                "Keep such values in state.vars, or pass their object in extra={...}. If they only affect "
                "what is shown, nothing is lost."
            )
        if moved:
            self._saving.once.warn(
                f"this loop draws from random generators that are in no checkpoint ({', '.join(moved)}): "
                "after a resume they draw different numbers. Give them to RunState: extra={...}, by names of "
                "your choice."
            )

    def _save(self, why: str, metrics: Mapping[str, Any] | None = None) -> PendingSave:
        self._meet({})
        self._not_given.look()
        self._warn_of_variables()
        with self._capture.where_a_body_ended(why != "called"):
            handle = self._saving.save(why, metrics, self._own_run, self._autosave.chosen)
        self._autosave.saved(*self._saving.stood_at)
        return handle

    def restore(
        self,
        which: str | int | os.PathLike[str],
        only: str | None = None,
        *,
        skip: bool = False,
        expect: str | None = None,
    ) -> None:
        """Go back to a checkpoint ("best", "newest", a save number, a path) and go on from there.

        A loop over `batches()` that is running ends, and `epochs()` goes on with the epoch gone back to.
        With `only`, such as "model", just that part is put back, and the training stands where it stood.
        With `skip`, all goes back but the place in the data and the random generators: the batches since the
        checkpoint, the one in hand too, are not trained again, and the loop goes on with the next one.
        `expect`, as in `load`, is the only content to go back to.
        """
        self._refuse_closed()
        started, expect = time.perf_counter(), pin.checked(expect)
        if skip and only is not None:
            raise UsageError(
                f"restore(only={only!r}) leaves the place in the data as it is, so there is nothing to skip.",
                fix="leave out skip=True, or only=.",
            )
        self._saving.settle()
        self._meet({})
        chosen = self._resuming.go_back(which, only, skip, expect)
        if only is None:
            self._has_begun = True
            self._went_back()
        what, way = (f"put back {only} of", "from") if only else ("went back in", "to")
        line = self._resuming.line(what, chosen, started, way)
        self._print(line + ("; the batches since are left out" if skip else ""))

    def spiked(self, loss: Any, above: float = math.inf, limit: int = 3) -> bool:
        """Whether the loss is not finite or above a bound; if so, the training has gone back already.

        It goes back to the newest intact checkpoint, as `restore` with `skip` does, and leaves out the
        batches since. If the first loss after that spikes again, to the one before it. After `limit` times
        Diverged is raised; `limit` saves after the last time, all are forgotten. To be asked of every
        batch; of several processes all give the same loss (all_reduce it first).

        >>> losses = iter([0.9, math.nan, 0.8, 0.7])
        >>> with RunState.load("runs/spiky") as state:
        ...     for step in state.steps(3):
        ...         if state.spiked(next(losses), above=20):
        ...             continue
        ...         _ = state.save()
        runs/spiky is empty: starting fresh
        the loss is nan at epoch 0, batch 0, step 1: went back in runs/spiky to checkpoint 1 (step 1); \
the batches since are left out (1 of 3 times)
        """
        self._refuse_closed()
        options.count("limit", limit)
        value = spikes.number("loss", loss)
        if not spikes.is_spike(value, spikes.number("above", above)):
            self._is_calm = True
            return False
        self._saving.settle()
        self._meet({})
        newest = self._crew.ranks.first("spiked()", lambda: self.run.highest() or 0, is_due=True)
        count = self._position.spikes.lately(newest, limit)
        where = f"the loss is {value:.4g} at epoch {self.epoch}, batch {self.batch}, step {self.step}"
        if count >= limit:
            raise Diverged(
                f"{where}, and {self.run} has gone back {count} times already (limit={limit}).",
                fix="look at the data there, lower the learning rate, or go on from an earlier checkpoint: "
                "resume=NUMBER.",
            )
        chosen = self._resuming.go_back_from_spike(where, not self._is_calm)
        self._went_back()
        self._position.spikes, self._is_calm = Spikes(count + 1, newest), False
        self._print(
            f"{where}: went back in {self.run} to checkpoint {chosen.about.number} (step {self.step}); the "
            f"batches since are left out ({count + 1} of {limit} times)"
        )
        return True

    def note(self, **values: Any) -> None:
        """Write values such as the loss into the trace, at the next boundary; without a trace, do nothing.

        >>> with RunState.load("runs/traced", trace="steps.jsonl") as state:
        ...     for step in state.steps(2):
        ...         state.note(loss=1 / (step + 1))
        runs/traced is empty: starting fresh
        """
        if self._trace:
            self._trace.note(values)

    def mean(self, *, weight: Any = 1, **values: Any) -> None:
        """Add values, such as the loss of a batch, to the running means of the epoch.

        `weight` is how many samples a value stands for. A value is a number or a tensor with one element; a
        tensor on a GPU is summed up there, and nothing waits for it. `means` has the result. The sums are
        part of each checkpoint: after a resume in mid-epoch they go on, bit for bit. Each epoch begins with
        none; a loop over `steps()` outside of `epochs()` keeps them until `means.reset()`.

        >>> with RunState.load("runs/means", loader=torch.arange(6.0).split(4)) as state:
        ...     for epoch in state.epochs(1):
        ...         for batch in state.batches():
        ...             state.mean(value=batch.mean(), weight=len(batch))
        ...         _ = state.save(**state.means)
        runs/means is empty: starting fresh
        >>> state.metrics
        {'value': 2.5}
        """
        self._refuse_closed()
        if not values:
            raise UsageError("mean() was given no values.", fix="name them: mean(loss=loss, weight=len(x)).")
        self._position.means.add(values, weight)

    def patience(self, saves: int) -> bool:
        """Whether the last `saves` that gave the metric to maximize or minimize were none of them the best.

        The count goes on after a resume, and goes back with `restore`.

        >>> with RunState.load("runs/patient", minimize="loss") as state:
        ...     for epoch in state.epochs(9):
        ...         if state.patience(2):
        ...             break
        ...         _ = state.save(loss=[3, 1, 2, 2, 0][epoch])
        runs/patient is empty: starting fresh
        >>> state.epoch, state.best
        (4, 1.0)
        """
        if self._goal is None:
            raise UsageError(
                "patience() has nothing to count: no metric says which save is the best.",
                fix="give RunState maximize= or minimize=, and that metric to save().",
            )
        if options.count("saves", saves) == 0:
            raise UsageError("patience(0) waits for nothing.", fix="give it a whole number from 1.")
        self._saving.hear_first()
        return self._saving.best is not None and self._saving.best.since >= saves

    def check(self) -> list[Unregistered]:
        """Return what has changed since the first call and is in no part: a resume would lose it.

        To be called at the end of batches, or of epochs. The gravest come first: their `weight` is "state"
        where the training would go on otherwise, "note" where only what is shown may be lost.

        >>> seen = 0
        >>> with RunState.load("runs/checked") as state:
        ...     for step in state.steps(2):
        ...         seen = seen + 2 if seen < 9 else 0
        ...         lost = state.check()
        runs/checked is empty: starting fresh
        >>> for one in lost:
        ...     print(one.name, "in", one.fix)
        seen in state.vars["seen"]
        """
        look = audit("survey").take(self._capture, sys._getframe(1))
        self._first_look = look if self._first_look is None else self._first_look
        lost: list[Unregistered] = audit("survey").changed(self._first_look, look)
        return lost

    def report(self, path: str | os.PathLike[str] = "report.html") -> Report | None:
        """Write a page about the run, as `resumable report` does; a notebook shows what this returns.

        Of several processes rank 0 writes it; the others return None.

        >>> with RunState.load("runs/told") as state:
        ...     _ = state.save(loss=0.5)
        ...     state.report("told.html")
        runs/told is empty: starting fresh
        <Report told.html>
        """
        self.wait()
        return report.write([self.run], path)[0] if self._crew.is_first else None

    def wait(self) -> None:
        """Wait until the last save is durable; raise what went wrong with it."""
        self._saving.wait()

    def close(self) -> None:
        """Wait for the last save, and let go of the run; the parts stay as they are.

        In a forked process it does nothing: the run is its parent's.
        """
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        self._explain(sys.exc_info()[1])
        determinism.let_go(self)
        self._signals.close()
        if self._trace:
            self._trace.close(is_at_end=self._how == "closed" and sys.exc_info()[1] is None)
        for hook in self._hooks:
            hook.remove()
        if sys.exc_info()[1] is None:
            self._position.warn_of_left_after_save()
        self._position.close()
        self._progress.close()
        reason = "it has closed its RunState" if self._how == "closed" else self._how
        self._saving.close(lambda: self._crew.leave(reason), self._how)
        # (what it keeps may lead to the variables of the script)
        self._dropped.detach()
        if sys.exc_info()[1] is None:
            self._signals.pass_on()

    def _explain(self, error: BaseException | None) -> None:
        if error and (text := last_batch.explain(error, self._saving.history, self._position)):
            # (Python 3.10 has no notes)
            error.add_note(text) if hasattr(error, "add_note") else warn(text)

    def __enter__(self) -> RunState:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Preempted):
            self._how = error.problem.partition(":")[0]
        elif error is not None:
            self._how = _told(error)
        try:
            self.close()
        except RemoteError as exc:
            if error is None:
                raise
            # Else nobody would see what has ended the training.
            warn(exc.problem)

    def _repr_html_(self) -> str:
        return f"{html.tag('code', repr(self))}{self.run._repr_html_()}"

    def __repr__(self) -> str:
        epoch, batch, step = self._position.stands_at()
        return f"<RunState {self.run}: epoch {epoch}, batch {batch}, step {step}>"

    @property
    def run_id(self) -> str | None:
        """What tells this run from all others; known once it has been loaded or saved."""
        return self._crew.run_id

    def _meet(self, facts: Mapping[str, Json], check: Callable[[], None] = lambda: None) -> None:
        self._crew.ranks.refuse_trouble()
        if self._crew.has_met:
            return
        parts = {f"the part {name}": kind for name, kind in self._capture.kinds().items()}
        parts |= {f"what {name} holds": outline for name, outline in self._capture.outlines().items()}
        self._crew.meet({"the goal": str(self._goal), **self._alike, **parts, **facts}, check)
        self._capture.saves_all = self._crew.saves_all or self._checks_replicas

    def _own_run(self) -> None:
        # In a notebook a cell runs again: the new object takes over from the one that it replaces.
        path = self.run.path.resolve()
        if (older := _open_runs.get(path)) and older is not self:
            # What the older one has not pushed this one will: nobody has to wait for that.
            if older._copies and self._copies:
                older._copies.hand_over()
            try:
                older.close()
            except RemoteError as exc:
                warn(exc.problem)
        elif older is None and (run := _written.get(path)):
            # The thread that wrote its save was the last to keep it, and is letting go of the run just now.
            run.wait_until_free(_PATIENCE)
        self._crew.own_still()
        _open_runs[path], _written[path] = self, self.run

    def _count_steps(self, optimizer: Any) -> list[Any]:
        hooks = []
        named = capture.named("optimizer", optimizer)
        for number, (name, live) in enumerate(named.items()):
            if hasattr(live, "register_step_post_hook"):
                hook = untraced(_weakly(self._stepped, name, number == 0))
                hooks.append(live.register_step_post_hook(hook))
                self._position.counts_steps |= number == 0
                self._position.streams.has_optimizer = True
        self._position.gradients = self._capture.gradients
        self._position.first_lines.look = self._capture.changed_models
        self._position.before_loop.look_at_models = self._capture.changed_models
        self._position.before_loop.look_at_settings = self._capture.changed_settings
        self._position.streams.hold_settings = self._capture.hold_settings
        self._position.streams.hold_gradients = self._capture.hold_gradients
        self._position.accelerate.optimizers = [*named.values()]
        self._not_given = NotGiven(self._capture.given(), self._capture.parameters)
        # (`untraced` takes a second to import torch's compiler, as the first optimizer of a process has done)
        if "torch._dynamo" in sys.modules:
            hook = untraced(_weakly(self._not_given.stepped))
            hooks.append(register_optimizer_step_post_hook(hook))
        self._first_optimizer = next(iter(named), None)
        self._unseen = Unseen(
            {name: live for name, live in named.items() if hasattr(live, "register_step_post_hook")}
        )
        return hooks

    def _stepped(self, name: str, is_first: bool, optimizer: Any) -> None:
        self._unseen.seen(name)
        if is_capturing():
            self._note_captured(name)
            return
        if _is_inner_step(optimizer, sys._getframe(1)):
            return
        self._capture.stepped(name)
        self._position.count_step(name, is_first)
        if is_first and self._autosave.is_on and self._position.is_step_without_loop():
            self._saving.once.warn(
                "every= and max_time= save only in loops over state.epochs(), state.steps() and "
                "state.batches(), and the optimizer has made two steps outside of them. Loop over "
                "state.steps(total), or leave these options out and call save() yourself.",
                about="a loop that saves nothing",
            )
        if not self._is_prepared:
            # Before its first step most optimizers have no state.
            self._is_prepared = True
            self._saving.prepare()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise UsageError(
                f"this RunState of {self.run} has been closed, or another has taken its place.",
                fix="go on with the newer one, or make one with RunState.load(...).",
            )

    def _begin_training(self) -> None:
        """Raise UsageError where this training would begin anew over the checkpoints of another."""
        self._refuse_closed()
        if not self._has_begun and (held := self._held()):
            raise UsageError(
                f"{held}, and this RunState was not loaded: it would train from the start and prune them.",
                fix="go on from them with RunState.load(...), or give the new training another directory.",
            )
        self._has_begun = True

    def _held(self) -> str | None:
        if count := len(self.run.numbers()):
            return f"{self.run} holds {counted(count, 'checkpoint')}"
        if self._copies and (count := self._copies.count()):
            return f"{self._copies} holds {counted(count, 'checkpoint')}"
        return None

    def _find_unseen_steps(self) -> None:
        for name in self._unseen.stepped():
            self._note_captured(name)

    def _note_captured(self, name: str) -> None:
        self._capture.note_captured(name)
        self._position.before_loop.forget()
        self._position.note_captured(name == self._first_optimizer)

    def _batch_ended(self, name: str, at: LoaderPosition) -> None:
        self._find_unseen_steps()
        has_changed = self._body_ended()
        self._progress.count_batches(at, at.done + 1)
        if self._position.is_between(name):
            self._saving.pace.body_ended()
            is_rest_next = self._position.is_rest_next(name)
            step = self._position.steps_done()
            self._at_boundary(has_changed, step, self.epoch, is_rest_next=is_rest_next)

    def _step_ended(self) -> None:
        has_changed = self._body_ended()
        step = self._position.steps_done()
        self._progress.count("steps", step)
        self._saving.pace.body_ended()
        self._at_boundary(has_changed, step, self.epoch)

    def _epoch_ended(self) -> None:
        has_changed = self._body_ended()
        self._progress.count("epochs", self.epoch + 1)
        self._saving.pace.rest_ended()
        self._at_boundary(has_changed, self.step, self.epoch + 1)
        self._saving.pace.begin()

    def _body_ended(self) -> bool:
        self._crew.ranks.refuse_trouble()
        return bool(self._saving.lost_since())

    def _at_boundary(self, has_changed: bool, step: int, epoch: int, *, is_rest_next: bool = False) -> None:
        """Save, or save and leave, if it is time to."""
        due = self._trace.boundary() if self._trace else None
        due = due or self._autosave.due(
            step, epoch, is_rest_next=is_rest_next, is_saving=self._saving.is_busy
        )
        if due is None:
            return
        # What one process has to save again, all have to.
        is_saved = self._saving.is_saved(self._position.counters()) and not any(
            self._crew.ranks.agree("what has changed since the save", lambda: has_changed)
        )
        if not is_saved:
            self._save(due.why)
        if due.leaves:
            self._leave(due, due.leaves)

    def _leave(self, due: Due, number: signal.Signals) -> None:
        self.wait()
        place = ", ".join(self._resuming.place())
        what = f"{due.why}: {self.run} is saved, checkpoint {self._saving.number}: {place}"
        self._signals.acted_on()
        if self._raises:
            raise Preempted(f"{what}.", fix="leave; the same command goes on from there.", signal=number)
        self._progress.close()
        # (Ctrl-C may have ended the reader of a pipe, such as tee, too)
        with contextlib.suppress(OSError):
            self._print(f"{what}; the same command goes on from there")
        self._how = due.why
        # (a notebook keeps the loop, with its workers, for as long as it keeps the traceback)
        self._position.close(now=True)
        try:
            self.close()
        except RemoteError as exc:
            # The exit code tells the queue to start again: then what is missing is pushed.
            warn(exc.problem)
        raise SystemExit(128 + number)


def _position(loader: Any, extra: Any, sample_seeds: bool, shown: Progress) -> Position:
    own = {n: g for n, g in capture.named("extra", extra).items() if rng.is_generator(g)}
    return Position(capture.named("loader", loader), own, sample_seeds, shows=shown.is_shown)


def _generators(parts: Capture, at: Position) -> list[rng.Generator]:
    """Return the random generators that a checkpoint has, beside the global ones."""
    given = [one for one in parts.given() if not isinstance(one, (torch.nn.Module, Position, LoaderPosition))]
    # What has a state of its own has its generators in that.
    given += [
        one for one in _modules(parts) if type(one).get_extra_state is not torch.nn.Module.get_extra_state
    ]
    return [*at.generators(), *rng.find(given).values()]


def _modules(parts: Capture) -> Iterator[torch.nn.Module]:
    for one in parts.given():
        yield from one.modules() if isinstance(one, torch.nn.Module) else ()


def _gather(crew: Crew, own: Json) -> Sequence[Json]:
    if not crew.has_met:
        raise UsageError("the processes have not met yet.", fix="call means.reduced() after RunState.load.")
    return crew.ranks.agree("means.reduced()", lambda: own, is_due=True)


def _of_each_rank(per_rank: Sequence[str], extra: Any) -> set[str]:
    return options.per_rank(per_rank, capture.named("extra", extra))


def _weakly(method: Callable[..., object], *given: Any) -> Callable[..., None]:
    """Return a hook that does not keep alive what it calls: it hangs on the user's own objects."""
    known = weakref.WeakMethod(method)

    def hook(live: Any, *_: Any) -> None:
        if found := known():
            found(*given, live)

    return hook


def _is_inner_step(optimizer: Any, frame: FrameType | None) -> bool:
    """Whether this step of an optimizer was called by another: its class calls super().step()."""
    wrappers = 0
    while frame is not None and wrappers < 2:
        is_wrapper = frame.f_code is _STEP_WRAPPER and frame.f_locals["args"][0] is optimizer
        wrappers, frame = wrappers + is_wrapper, frame.f_back
    return wrappers == 2


_STEP_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__
"""What torch wraps around the step() of every optimizer class: it calls the hooks."""


def _both(first: Through | None, second: Through) -> Through:
    return second if first is None else lambda batches: second(iter(first(batches)))


def _places(run_dir: str | os.PathLike[str], remote: str | None) -> tuple[str | os.PathLike[str], str | None]:
    """Return the run directory, and the remote: a run that is given by the latter is kept in a cache."""
    given = os.environ.get("RESUMABLE_RUN_DIR") or run_dir
    remote = os.environ.get("RESUMABLE_REMOTE", remote) or None
    if not url.is_url(given):
        return given, remote
    if remote is not None:
        raise UsageError(
            f"the run directory is {url.shown(str(given))}, and remote= gives another address.",
            fix="give a local run directory and remote=, or the address alone.",
        )
    return url.cache_folder(str(given)), str(given)


def _end(process: int, history: History, run: Run, at: Position, copies: Copies | None) -> None:
    # (a child that was forked has no part in this)
    if process == os.getpid():
        if copies:
            # (a warning may be an error)
            with contextlib.suppress(Warning):
                copies.leave()
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error and (text := last_batch.explain(error, history, at)):
            with contextlib.suppress(Warning):
                warn(text)
        end(history, run, at, _told(error) if error else "left without close()")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
