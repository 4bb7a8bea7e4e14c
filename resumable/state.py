"""`RunState`: what a script sees of its training."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch

from . import options
from .errors import Diverged, Preempted, RemoteError, UsageError, warn
from .files import pin
from .position import spikes
from .position.counted_loops import Batches, Enumerated
from .position.means import Means
from .position.prefetching import Through
from .position.spikes import Spikes
from .run import markup
from .run.directory import Run
from .saving.writer import PendingSave
from .session.loops import Loops
from .session.observer import Unregistered, audit
from .session.session import Session, told
from .trace import tracer
from .views import report
from .views.report import Report


class RunState:
    """A whole training as one object: it saves it, and puts it back.

    `RunState.load(...)` makes it.

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

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "a RunState is not made by its constructor.",
            fix="write RunState.load(run_dir, ...): it begins the training, or resumes it.",
        )

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
        # All arguments, by name: they are listed once, in the signature above.
        given = {name: value for name, value in locals().items() if name != "cls"}
        state = super().__new__(cls)
        state._bind(Session.load(options.check(given)))
        return state

    def _bind(self, session: Session) -> None:
        self._session, self._loops = session, Loops(session)
        self._training, self._saving = session.training, session.saving
        self._position = session.training.position
        self._is_calm = True
        self._first_look: Mapping[str, Any] | None = None

    @property
    def run(self) -> Run:
        """The run directory."""
        return self._training.run

    @property
    def resumed(self) -> bool:
        """Whether this training goes on from a checkpoint."""
        self._position.before_loop.was_read(may_begin_loop=False)
        return self._session.has_resumed

    @property
    def vars(self) -> dict[str, Any]:
        """Your own small values: saved and restored with everything else.

        Assigning a dict replaces the contents; what you later add to that dict itself is not saved.
        """
        self._position.was_read(is_counter=False)
        return self._training.variables

    @vars.setter
    def vars(self, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping):
            raise UsageError(
                f"state.vars is a dict, and {type(values).__name__} was assigned to it.",
                fix='write state.vars["name"] = value, or assign a dict.',
            )
        # The same dict stays: the parts that are saved hold it.
        values = dict(values)
        self._training.variables.clear()
        self._training.variables.update(values)

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
        if self._session.has_resumed or self._position.streams.has_trained:
            raise UsageError(
                f"this training has begun already: it stands at {', '.join(self._session.resuming.place())}.",
                fix="call begin_at() at the first start only: if not state.resumed: ...",
            )
        self._position.begin_at(options.count("epoch", epoch), options.count("step", step))

    def epochs(self, total: int) -> Iterator[int]:
        """Loop over the epochs that are left of `total`, which counts those done before."""
        return self._loops.epochs(total)

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
        return self._loops.batches(loader, device, through)

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
        return self._loops.steps(total)

    def save(self, **metrics: Any) -> PendingSave:
        """Save everything; return at once, while the checkpoint is written in the background.

        The keywords are metrics, for ever. In the body of a loop the batch (or step) in hand counts as
        done, so call it after `optimizer.step()`; after the loop over an epoch's batches, the epoch does.
        What goes wrong in the background is raised by the next call.
        """
        session = self._session
        session.refuse_closed()
        session.warnings.look_at_place(metrics)
        handle = session.save("called", metrics)
        if session.trace:
            session.trace.saved(self._position.metrics)
            # Where no loop of ours runs, a save is the only boundary that there is.
            if self._position.is_outside() and (due := session.trace.boundary()):
                session.leave(due, due.leaves or signal.SIGTERM)
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
        self._session.refuse_closed()
        started, expect = time.perf_counter(), pin.checked(expect)
        if skip and only is not None:
            raise UsageError(
                f"restore(only={only!r}) leaves the place in the data as it is, so there is nothing to skip.",
                fix="leave out skip=True, or only=.",
            )
        self._saving.settle()
        self._training.meet()
        chosen = self._session.resuming.go_back(which, only, skip, expect)
        if only is None:
            self._session.went_back()
        what, way = (f"put back {only} of", "from") if only else ("went back in", "to")
        line = self._session.resuming.line(what, chosen, started, way)
        self._training.print(line + ("; the batches since are left out" if skip else ""))

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
        self._session.refuse_closed()
        options.count("limit", limit)
        value = spikes.number("loss", loss)
        if not spikes.is_spike(value, spikes.number("above", above)):
            self._is_calm = True
            return False
        self._saving.settle()
        self._training.meet()
        newest = self._training.crew.ranks.first("spiked()", lambda: self.run.highest() or 0, is_due=True)
        count = self._position.spikes.lately(newest, limit)
        where = f"the loss is {value:.4g} at epoch {self.epoch}, batch {self.batch}, step {self.step}"
        if count >= limit:
            raise Diverged(
                f"{where}, and {self.run} has gone back {count} times already (limit={limit}).",
                fix="look at the data there, lower the learning rate, or go on from an earlier checkpoint: "
                "resume=NUMBER.",
            )
        chosen = self._session.resuming.go_back_from_spike(where, not self._is_calm)
        self._session.went_back()
        self._position.spikes, self._is_calm = Spikes(count + 1, newest), False
        self._training.print(
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
        if self._session.trace:
            self._session.trace.note(values)

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
        self._session.refuse_closed()
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
        if self._training.goal is None:
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
        look = audit("survey").take(self._training.parts, sys._getframe(1))
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
        return report.write([self.run], path)[0] if self._training.crew.is_first else None

    def wait(self) -> None:
        """Wait until the last save is durable; raise what went wrong with it."""
        self._saving.wait()

    def close(self) -> None:
        """Wait for the last save, and let go of the run; the parts stay as they are.

        In a forked process it does nothing: the run is its parent's.
        """
        self._session.close()

    def __enter__(self) -> RunState:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        how = "closed" if error is None else told(error)
        if isinstance(error, Preempted):
            how = error.problem.partition(":")[0]
        try:
            self._session.close(how)
        except RemoteError as exc:
            if error is None:
                raise
            # Else nobody would see what has ended the training.
            warn(exc.problem)

    def _repr_html_(self) -> str:
        return f"{markup.tag('code', repr(self))}{self.run._repr_html_()}"

    def __repr__(self) -> str:
        epoch, batch, step = self._position.stands_at()
        return f"<RunState {self.run}: epoch {epoch}, batch {batch}, step {step}>"

    @property
    def run_id(self) -> str | None:
        """What tells this run from all others; known once it has been loaded or saved."""
        return self._training.crew.run_id
