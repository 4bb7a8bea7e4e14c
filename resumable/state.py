"""`RunState`: what a script sees of its training."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, overload

import torch
from typing_extensions import TypeVar

from . import options
from .errors import Preempted, RemoteError, UsageError, warn
from .groups import Every, Keep, Preempt, Ranks, Remote, ResumeWord, Trace
from .position.counted_loops import Batches, Enumerated
from .position.means import Means
from .position.prefetching import Through
from .run import markup
from .run.directory import Run
from .saving.writer import PendingSave
from .session import places
from .session.going_back import GoingBack
from .session.loops import Loops
from .session.observer import Unregistered, audit
from .session.session import Session, told
from .tracebacks import short_methods

if TYPE_CHECKING:
    from .views.report import Report

B = TypeVar("B", default=Any)
"""What a batch is."""
C = TypeVar("C")


class Stateful(Protocol):
    """What has `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over a state."""


@short_methods
class RunState(Generic[B]):
    """A whole training as one object. `RunState.load(...)` makes it.

    With torch.distributed, every process calls `load` after `init_process_group`. The environment variables
    RESUMABLE_RUN_DIR, RESUMABLE_RESUME, RESUMABLE_REMOTE and RESUMABLE_TRACE (empty: none) override its
    arguments.

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
    resumed runs/exp from checkpoint 3: epoch 0, step 3, best loss ... (...s)
    3
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "a RunState is not made by its constructor.",
            fix="write RunState.load(run_dir, ...): it starts the training, or resumes it.",
        )

    @classmethod
    def load(
        cls,
        run_dir: str | os.PathLike[str],
        *,
        model: torch.nn.Module | Mapping[str, torch.nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        scheduler: Stateful | Mapping[str, Stateful] | None = None,
        scaler: Stateful | Mapping[str, Stateful] | None = None,
        loader: Iterable[B] | Mapping[str, Iterable[Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        maximize: str | None = None,
        minimize: str | None = None,
        keep: Keep = 3,
        every: Every = options.EVERY,
        resume: ResumeWord | int | str | os.PathLike[str] = "auto",
        allow: Sequence[str] = (),
        override: Sequence[str] = (),
        rename: Mapping[str, str] | None = None,
        expect: str | None = None,
        preempt: Preempt | None = None,
        remote: str | Remote | None = None,
        ranks: Ranks | None = None,
        trace: str | os.PathLike[str] | Trace | None = None,
        sample_seeds: bool = False,
        variables: bool | Sequence[str] = True,
        progress: bool | None = None,
        quiet: bool = False,
    ) -> RunState[B]:
        """Resume from the newest intact checkpoint, or start fresh; print one line that says which.

        Args:
            run_dir: The run directory, or a remote address, whose run is then kept in a local cache.
            model, optimizer, scheduler, scaler, loader: One object each, or a dict of named ones. They exist
                already, on their devices and wrapped.
            extra: A dict of objects with a `state_dict`, random generators, dicts and dataclasses.
            maximize, minimize: The metric that decides which checkpoint is the best.
            keep: How many of the newest checkpoints to keep (None: all), or a dict such as
                {"newest": 3, "best": 2, "every": "1000 steps"}. The best one is always kept.
            every: When the loops save by themselves: "10 min", 500 (steps), "2 epochs", "1 %" of the time,
                "mtbf 6 h" (as often as pays off if the training fails once in 6 h), or a list of these. They
                also save at their end, and `close()` saves what was trained since; None: only `save()` does.
            resume: "auto", "must" (an error without a checkpoint), "never" (an error with one), "best", a
                save number, or a checkpoint's path.
            allow: Names that may be missing, new or of another shape, such as "model.head.*", and variables
                that may not come back, such as "script.*".
            override: Settings for which the script's value wins: "optimizer.lr" also scales the schedule.
                So does that of a variable, once: "script.best".
            rename: The checkpoint's names and the script's, of tensors or modules: {"fc": "head"}.
            expect: The only content to load, as "sha256:..." from `resumable verify --pin`.
            preempt: When and how to end early: the signals, what follows, the limit of time.
            remote: An address such as "s3://bucket/exp", or a `Remote`: checkpoints are copied there, and
                fetched from there where the run directory has none.
            ranks: How several processes save together.
            trace: A file that gets a line at each boundary, for `resumable diff --trace`; or a `Trace`.
            sample_seeds: Whether each sample gets a seed of its own, whatever worker loads it.
            variables: Whether the script's own variables come back: what the loops change in them is saved,
                and put back where a loop goes on. ["*", "-buffer"] leaves one out, by its name or a pattern.
            progress: Whether to show the progress: bars at a terminal or in a notebook, else lines.
            quiet: Whether to leave out the messages, such as which checkpoint the training continues from.
        """
        # All arguments, by name: they are listed once, in the signature above.
        given = {name: value for name, value in locals().items() if name != "cls"}
        state = super().__new__(cls)
        state._bind(Session.load(options.check(given)))
        return state

    def _bind(self, session: Session) -> None:
        self._session, self._loops, self._going_back = session, Loops(session), GoingBack(session)
        self._training, self._saving = session.training, session.saving
        self._position = session.training.position
        self._first_look: Mapping[str, Any] | None = None

    @property
    def run(self) -> Run:
        """The run directory."""
        return self._training.run

    @property
    def resumed(self) -> bool:
        """Whether this training was resumed from a checkpoint."""
        return self._session.has_resumed

    @property
    def vars(self) -> dict[str, Any]:
        """Your own small values, saved and restored with everything else.

        An assigned dict is copied: what you add to it later is not saved.
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
        # Keep the same dict: the saved parts hold it.
        values = dict(values)
        self._training.variables.clear()
        self._training.variables.update(values)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last `save`; with several processes, those of rank 0."""
        self._saving.hear_first()
        return self._position.metrics

    @property
    def means(self) -> Means:
        """The means of what `mean` was given in this epoch: `means["loss"]`, `save(**means)`.

        They stay until the next epoch begins. Each process has its own; `means.reduced()`, called by all,
        returns those over all processes.
        """
        return self._position.means

    @property
    def epoch(self) -> int:
        """The number of finished epochs; in the body of `epochs()`, the index of the current one."""
        self._position.was_read()
        return self._position.epochs_done()

    @property
    def batch(self) -> int:
        """The number of finished batches of this epoch; in the body of `batches()`, the current index."""
        self._position.was_read()
        return self._position.batch

    @property
    def step(self) -> int:
        """The number of steps of the first optimizer; in `steps()`, of its bodies.

        Without an optimizer, or if the first one has no hooks, each batch of the outermost loop over
        `batches()` is a step.
        """
        self._position.was_read()
        return self._position.step

    @property
    def samples(self) -> int:
        """The number of samples trained on, over all epochs."""
        self._position.was_read()
        return self._position.samples

    @property
    def best(self) -> float | None:
        """The best value so far of the metric to maximize or minimize."""
        self._saving.hear_first()
        return self._saving.best.value if self._saving.best else None

    def begin_at(
        self, *, epoch: int = 0, batch: int = 0, step: int = 0, samples: int = 0, best: float | None = None
    ) -> None:
        """Continue from the checkpoint of a training that was saved without this library.

        Call it at the first start, before the loop, once the old checkpoint is loaded into the parts.

        Args:
            epoch: The number of epochs that are done.
            batch: The number of batches of the next epoch that are done. The loop leaves them out without
                loading them; an iterable that is no DataLoader is run again.
            step: The number of optimizer steps that are done.
            samples: The number of samples that were trained on.
            best: The best value so far of the metric to maximize or minimize; none yet if it is not finite.

        The order of an epoch that was stopped in the middle is drawn again, from a sampler's seed and epoch
        or from its generator: put that generator where it was at the epoch's beginning. All other random
        generators continue as they are. An order from the global generator is warned of.

        >>> loader = torch.utils.data.DataLoader(torch.arange(8), 2)
        >>> with RunState.load("runs/migrated", loader=loader, minimize="loss") as state:
        ...     if not state.resumed:
        ...         state.begin_at(epoch=3, batch=2, step=14, best=0.25)
        ...     for epoch in state.epochs(4):
        ...         for batch in state.batches():
        ...             print(epoch, state.batch, batch.tolist())
        runs/migrated is empty: starting fresh
        3 2 [4, 5]
        3 3 [6, 7]
        >>> state.best
        0.25
        """
        counts = {"epoch": epoch, "batch": batch, "step": step, "samples": samples}
        whole = {name: options.count(name, value) for name, value in counts.items()}
        value = None if best is None else options.numbers({"best": best})["best"]
        self._session.begin_at(**whole, best=value)

    def epochs(self, total: int) -> Iterator[int]:
        """Loop over the epochs that remain of `total`.

        Args:
            total: The number of epochs of the whole training, those done before a resume included.
        """
        return self._loops.epochs(total)

    @overload
    def batches(
        self,
        loader: None = None,
        *,
        device: str | int | torch.device | None = None,
        through: Through | None = None,
    ) -> Batches[B]: ...

    @overload
    def batches(
        self,
        loader: str,
        *,
        device: str | int | torch.device | None = None,
        through: Through | None = None,
    ) -> Batches[Any]: ...

    @overload
    def batches(
        self,
        loader: Iterable[C] | Callable[[], Iterator[C]],
        *,
        device: str | int | torch.device | None = None,
        through: Through | None = None,
    ) -> Batches[C]: ...

    def batches(
        self,
        loader: Any = None,
        *,
        device: str | int | torch.device | None = None,
        through: Through | None = None,
    ) -> Batches[Any]:
        """Loop over the batches that remain of this epoch.

        `len()` is the length of the whole epoch, like that of the loader.

        Args:
            loader: One of several loaders, or its name; also an iterable, or a function that returns an
                iterator, that `load` was not given.
            device: Where the batches are copied, the next one during the training of the current one.
            through: A function that wraps the iterator, such as a thread that prefetches. A batch counts when
                it comes out of what that returns.
        """
        return self._loops.batches(loader, device, through)

    def enumerate(
        self,
        loader: Any = None,
        *,
        device: str | int | torch.device | None = None,
        through: Through | None = None,
        start: int = 0,
    ) -> Enumerated[Any]:
        """Loop over the batches that remain of this epoch, each with its index in the epoch.

        Unlike that of `enumerate(state.batches())`, the index is right after a resume in mid-epoch too.

        Args:
            loader, device, through: As in `batches()`.
            start: The index of the epoch's first batch.

        >>> with RunState.load("runs/indexed", loader=torch.arange(4.0).split(2)) as state:
        ...     for index, batch in state.enumerate():
        ...         print(index, batch.tolist())
        runs/indexed is empty: starting fresh
        0 [0.0, 1.0]
        1 [2.0, 3.0]
        """
        return Enumerated(self.batches(loader, device=device, through=through), start)

    def steps(self, total: int) -> Iterator[int]:
        """Loop over the steps that remain of `total`; each body is one, however often optimizers step.

        Args:
            total: The number of steps of the whole training, those done before a resume included.
        """
        return self._loops.steps(total)

    def save(self, **metrics: Any) -> PendingSave:
        """Save everything; return at once, while the checkpoint is written in the background.

        In the body of a loop the current batch (or step) counts as done, so call it after
        `optimizer.step()`; after the loop over an epoch's batches, the epoch counts as done. An error in the
        background is raised by the next call.

        Args:
            **metrics: Numbers or tensors with one element, such as `loss=loss`. All keywords are metrics.
        """
        session = self._session
        session.refuse_closed()
        places.look(session.training)
        handle = session.save("called", metrics)
        if session.trace:
            session.trace.saved(self._position.metrics)
            # Outside of our loops a save is the only boundary.
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
        """Go back to a checkpoint and train on from there.

        A running loop over `batches()` ends, and `epochs()` continues with the epoch of the checkpoint. In a
        body the script's variables are put back as this is called; what the rest of the body does counts.

        Args:
            which: "best", "newest", a save number or a checkpoint's path.
            only: A part such as "model" to restore alone; the training stays where it is.
            skip: Restore everything but the place in the data and the random generators: the loop continues
                with the next batch, and those since the checkpoint, the current one too, are left out.
            expect: As in `load`, the only content to load.
        """
        self._going_back.restore(which, only, skip, expect)

    def spiked(self, loss: Any, above: float = math.inf, limit: int = 3) -> bool:
        """Whether the loss is not finite or above a bound; if so, the training has gone back already.

        It goes back to the newest intact checkpoint, like `restore(skip=True)`, and leaves out the batches
        since. If the first loss after that spikes again, it goes back to the checkpoint before. Call it for
        every batch; with several processes all pass the same loss (all_reduce it first).

        Args:
            loss: The loss of the batch, a number or a tensor with one element.
            above: The bound above which a loss is a spike.
            limit: Raise Diverged after this many times. After `limit` saves the count starts again.

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
        return self._going_back.if_spiked(loss, above, limit)

    def note(self, **values: Any) -> None:
        """Write values such as the loss into the trace at the next boundary; without a trace, do nothing.

        Args:
            **values: Numbers are written as they are, anything else as a digest.

        >>> with RunState.load("runs/traced", trace="steps.jsonl") as state:
        ...     for step in state.steps(2):
        ...         state.note(loss=1 / (step + 1))
        runs/traced is empty: starting fresh
        """
        if self._session.trace:
            self._session.trace.note(values)

    def mean(self, *, weight: Any = 1, **values: Any) -> None:
        """Add values, such as the loss of a batch, to the running means of the epoch.

        `means` has the result. The sums are saved, so that they are exact after a resume in mid-epoch. Each
        epoch starts with none; a loop over `steps()` outside of `epochs()` keeps them until `means.reset()`.

        Args:
            weight: The number of samples that a value stands for.
            **values: Numbers or tensors with one element. Tensors on a GPU are summed up there, without a
                wait.

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

    def show(self, **values: Any) -> None:
        """Show values, such as the loss, in the bars until the next call.

        Args:
            **values: Numbers, texts, or tensors with one element, read only when the bars are drawn.

        >>> with RunState.load("runs/showing") as state:
        ...     for step in state.steps(2):
        ...         state.show(loss=torch.tensor(0.5), lr=0.1)
        runs/showing is empty: starting fresh
        """
        self._training.progress.show(values)

    def print(self, *values: Any) -> None:
        """Print values above the bars; with several processes only rank 0 prints.

        Args:
            *values: What to print, as for Python's `print`.

        >>> with RunState.load("runs/printing") as state:
        ...     state.print("step", state.step)
        runs/printing is empty: starting fresh
        step 0
        """
        if self._training.crew.is_first:
            print(*values, flush=True)

    def patience(self, saves: int) -> bool:
        """Whether the last saves with the metric to maximize or minimize brought no new best.

        The count is saved and restored.

        Args:
            saves: The number of saves without a new best after which the answer is True.

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
                fix="give RunState.load maximize= or minimize=, and that metric to save().",
            )
        if options.count("saves", saves) == 0:
            raise UsageError("patience(0) waits for nothing.", fix="give it a whole number from 1.")
        self._saving.hear_first()
        return self._saving.best is not None and self._saving.best.since >= saves

    def check(self) -> list[Unregistered]:
        """Return what a resume would lose: what changes, is in no part, and cannot be in a checkpoint.

        Call it at the end of batches or epochs. With `variables=False` it returns what has changed since the
        first call.

        >>> prompts = iter(["a", "b", "c"])
        >>> with RunState.load("runs/checked", every=None, variables=True) as state:
        ...     for step in state.steps(2):
        ...         prompt = next(prompts)
        ...         lost = state.check()
        runs/checked is empty: starting fresh
        >>> for one in lost:
        ...     print(one.name, "is", one.kind)
        prompts is an iterator that was made before the loop
        """
        lost: list[Unregistered]
        self._first_look, lost = audit("survey").check(self._training.parts, self._first_look)
        return lost

    def report(self, path: str | os.PathLike[str] = "report.html") -> Report | None:
        """Write a page about the run, like `resumable report`; a notebook shows the result.

        With several processes rank 0 writes it; the others return None.

        Args:
            path: The file to write.

        >>> with RunState.load("runs/shown") as state:
        ...     _ = state.save(loss=0.5)
        ...     state.report("shown.html")
        runs/shown is empty: starting fresh
        <Report shown.html>
        """
        self.wait()
        # Only here: a training needs no pages.
        from .views import report

        return report.write([self.run], path)[0] if self._training.crew.is_first else None

    def wait(self) -> None:
        """Wait until the last save is durable; raise its error, if any."""
        self._saving.wait()

    def close(self) -> None:
        """Save what was trained since the last save, wait for it, and release the run.

        The parts stay as they are. After a loop that was left in the middle it saves nothing, and warns: a
        resume from there would not be exact. With `every=None` it saves nothing either.

        In a forked process this does nothing: the run belongs to its parent.
        """
        self._session.close()

    def __enter__(self) -> RunState[B]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        is_exit = isinstance(error, SystemExit) and not error.code
        how = "closed" if error is None or is_exit else told(error)
        if isinstance(error, Preempted):
            how = error.problem.partition(":")[0]
        try:
            self._session.close(how)
        except RemoteError as exc:
            if error is None:
                raise
            # Raised, it would hide what has ended the training.
            warn(exc.problem)

    def _repr_html_(self) -> str:
        return f"{markup.tag('code', repr(self))}{self.run._repr_html_()}"

    def __repr__(self) -> str:
        epoch, batch, step = self._position.stands_at()
        return f"<RunState {self.run}: epoch {epoch}, batch {batch}, step {step}>"

    @property
    def run_id(self) -> str | None:
        """The unique name of this run; None before the first load or save."""
        return self._training.crew.run_id
