"""`RunState`: the loops, `save`, `restore`; the only module that knows all the others."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader

from . import (
    arguments,
    blocks,
    capture,
    checkpoint,
    codec,
    disk,
    environment,
    policy,
    rng,
)
from .capture import Capture, Change, Held, Trees
from .checkpoint import Checkpoint
from .crew import Crew
from .errors import (
    FormatTooNew,
    ResumableError,
    SaveFailed,
    StateMismatch,
    UsageError,
    warn,
)
from .image import Image, Taken, WrittenAround
from .loader_position import Through
from .loading import Reading
from .manifest import Best, Manifest
from .position import Batches, Position
from .prefetch import ToDevice
from .run import Run
from .sealed import Json
from .sources import Source
from .threads import no_garbage_collection
from .writer import PendingSave, Writer

_open_runs: weakref.WeakValueDictionary[Path, RunState] = weakref.WeakValueDictionary()


class RunState:
    """A whole training as one object: it saves it, and puts it back.

    The parts exist, on their devices and wrapped, before they are given. Each of model,
    optimizer, scheduler, scaler and loader is one object or a dict of named ones. `extra` is
    a dict of anything with `state_dict` and `load_state_dict`, of random generators, dicts
    and dataclasses. `keep` is how many of the newest checkpoints stay (None: all); the best one,
    by the metric to `maximize` or to `minimize`, always does.

    In a training of several processes each makes its own, once torch.distributed is initialised.
    `per_rank` names parts of `extra` that each keeps for itself; `timeout` (in seconds) is how long one
    waits for another; `elastic`: whether their number may change; `shared`: whether all see the same
    disk; `write`: whether "one" of them or "all" write what all have; `check_replicas`: whether each
    save compares that.

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
        keep: int | None = 3,
        sample_seeds: bool = False,
        per_rank: Sequence[str] = (),
        timeout: float = 60,
        elastic: bool = True,
        shared: bool = True,
        write: str = "one",
        check_replicas: bool = False,
    ) -> None:
        self._goal = arguments.goal(maximize, minimize)
        self._keep = arguments.keep(keep)
        self.run = Run(os.environ.get("RESUMABLE_RUN_DIR") or run_dir)
        """The run directory."""
        self.vars: dict[str, Any] = {}
        """Your own small values: they are saved and put back with the rest."""
        self._metrics: dict[str, float] = {}
        self.resumed = False
        """Whether this training goes on from a checkpoint."""
        generators = {n: g for n, g in capture.named("extra", extra).items() if rng.is_generator(g)}
        patience, all_write = arguments.seconds("timeout", timeout), arguments.write(write)
        self._position = Position(capture.named("loader", loader), generators, sample_seeds)
        place = self._position.stands_at
        self._crew = Crew(self.run, patience, place, is_shared=shared, all_write=all_write)
        self._position.processes = self._crew.ranks.size
        parts = model, optimizer, scheduler, scaler, extra
        slots = dict(zip(capture.SLOTS, parts, strict=True))
        own = arguments.per_rank(per_rank, capture.named("extra", extra))
        self._capture = Capture(slots, self.vars, self._position, own, self._crew.rank)
        self._is_elastic = elastic
        self._checks_replicas = check_replicas and not self._crew.ranks.is_alone
        self._unheard: int | None = None
        """The save of which this process has not heard yet what rank 0 gave as metrics."""
        self._failed, self._reason = 0, "it has closed its RunState"
        self._built = self._capture.settings
        self._best: Best | None = None
        self._parent: int | None = None
        self._number = 0
        self._after_save: _AfterSave | None = None
        self._warned: set[str] = set()
        self._writer = Writer()
        self._image = Image(self._capture.optimizers(), self._capture.written_in_forward)
        self._is_prepared = False
        self._way: blocks.Way = "paced"
        self._written: Mapping[str, blocks.Written] = {}
        self._is_closed = False
        self._hooks = self._count_steps(optimizer)
        # One that is dropped without close() must not lock its run for the rest of the process.
        weakref.finalize(self, self.run.release)

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
        keep: int | None = 3,
        sample_seeds: bool = False,
        per_rank: Sequence[str] = (),
        timeout: float = 60,
        elastic: bool = True,
        shared: bool = True,
        write: str = "one",
        check_replicas: bool = False,
        resume: str | int | os.PathLike[str] = "auto",
        allow: Sequence[str] = (),
        override: Sequence[str] = (),
    ) -> RunState:
        """Bind the parts and go on from a checkpoint, or start fresh; one line says which.

        `resume`: "auto" (the newest intact checkpoint, or fresh where there is none), "must" (or an error),
        "never" (an error where there is a checkpoint), "best", a save number, or a checkpoint's path.
        `allow`: names that may be missing, new or of another shape; patterns such as "model.head.*" too.
        `override`: settings for which the script's value wins, such as "optimizer.lr"; with a scheduler
        that remembers where it started, that scales the whole schedule.
        The environment variables RESUMABLE_RUN_DIR and RESUMABLE_RESUME override the arguments.
        """
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        data = {"loader": loader, "extra": extra, "sample_seeds": sample_seeds, "per_rank": per_rank}
        saves = {"maximize": maximize, "minimize": minimize, "keep": keep, "write": write, "shared": shared}
        checks = {"timeout": timeout, "elastic": elastic, "check_replicas": check_replicas}
        state = cls(run_dir, **parts, **data, **saves, **checks)  # type: ignore[arg-type]
        try:
            state._load(os.environ.get("RESUMABLE_RESUME") or resume, allow, override)
        except BaseException:
            state.close()
            raise
        return state

    def _load(
        self, resume: str | int | os.PathLike[str], allow: Sequence[str], override: Sequence[str]
    ) -> None:
        started = time.perf_counter()
        allow, override = arguments.patterns("allow", allow), arguments.patterns("override", override)
        facts = {"resume": str(resume), "allow": [*allow], "override": [*override]}
        self._meet(facts, lambda: self.run.check(resume))
        ranks = self._crew.ranks
        self._position.seed = ranks.first("the seed of the samples", lambda: self._position.seed)
        ranks.each("the arguments", lambda: self._check_arguments(resume, override))
        if ranks.first("the run", self.run.path.exists):
            self._own_run()
        found = self._crew.choose(resume, self._read)
        if found is None:
            self._own_run()
            self._print(f"{self.run} is empty: starting fresh")
            return
        chosen, reading = found
        if not ranks.is_alone:
            orders = ranks.first("the order of the sums", lambda: self._capture.orders(reading.trees))
            self._capture.sum_in_order(reading.trees, orders)
        fit = ranks.each("what does not fit", lambda: self._fit(chosen, reading, allow, override))
        # Before anything is touched: where warnings are errors, this ends the load.
        texts = ranks.agree("what has changed", lambda: self._changed(fit, chosen.about))
        ranks.each("telling it", lambda: self._tell(texts))
        self._own_run()
        self._capture.restore(reading, fit.unfit, fit.overridden, each=ranks.each)
        self._go_on_from(chosen, fit.best, reading)
        self.resumed = self._is_prepared = True
        self._prepare()
        line = self._resumed_line("resumed", chosen, time.perf_counter() - started)
        self._print(line + self._resized(chosen.about))

    def _check_arguments(self, resume: str | int | os.PathLike[str], override: Sequence[str]) -> None:
        self._capture.check_patterns(override)
        if self._crew.leads:
            self.run.check(resume)

    def _fit(
        self, chosen: Checkpoint, reading: Reading, allow: Sequence[str], override: Sequence[str]
    ) -> _Fit:
        unfit = self._capture.check(reading.trees, chosen.about, allow)
        best = self._checked_best(chosen, override)
        changes = self._capture.changes(chosen.about.built, unfit, reading.trees)
        overridden = [change for change in changes if change.matches(override)]
        return _Fit(unfit, best, changes, overridden)

    @no_garbage_collection()
    @torch.inference_mode(False)
    def _read(self, found: Checkpoint) -> Reading:
        then, now = found.about.world_size, self._crew.ranks.size
        if then != now and not self._is_elastic:
            raise StateMismatch(
                f"{found} was made by {then} processes; there are {now} now, and elastic=False.",
                fix=f"start {then} processes, or let the number change: elastic=True.",
            )
        try:
            reading = Reading(found, self._capture.live(), self._crew.ranks.rank)
            capture.check_readable(reading.trees)
            held = {name for tree in reading.trees.values() for name in tree.json}
            if lacking := found.about.parts.keys() - held:
                raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
        except (ValueError, KeyError, TypeError) as exc:
            if isinstance(exc, ResumableError):
                raise
            raise disk.damaged(found.path, f"its content is not a checkpoint's: {exc}") from exc
        return reading

    def _go_on_from(self, chosen: Checkpoint, best: Best | None, reading: Reading) -> None:
        self._best, self._unheard = best, None
        self._metrics = dict(chosen.about.metrics)
        self._parent = chosen.about.number if self._is_ours(chosen) else None
        self._written = reading.written() if self._is_ours(chosen) else {}
        self._position.hold()

    def _is_ours(self, chosen: Checkpoint) -> bool:
        return chosen.path.resolve().parent == self.run.folder.resolve()

    def _checked_best(self, chosen: Checkpoint, override: Sequence[str]) -> Best | None:
        # The save number of another run's best means nothing here.
        best = chosen.about.best if self._is_ours(chosen) else None
        if best and best.number not in self.run.numbers():
            self._warn(f"checkpoint {best.number}, the best, is not there any more; it is forgotten.")
            best = None
        if self._goal is None or (best and best.goal == self._goal):
            return best
        if best is None or "best" in override:
            return self.run.best(self._goal)
        raise StateMismatch(
            f"this run has been tracking {best.goal}, the code says {self._goal}.",
            fix=f"say {best.goal} again, or start to track the new one with override=['best'].",
        )

    def _changed(self, fit: _Fit, about: Manifest) -> list[str]:
        overridden = fit.overridden
        codes = [change for change in fit.changes if change.is_the_codes and change not in overridden]
        kept = [change for change in fit.changes if change not in (*overridden, *codes)]
        # What the run is built with from here on: where the checkpoint won, that is not the code's.
        self._built = {**self._built, **{change.path: about.built[change.path] for change in kept}}
        texts = [f"{change}; the code wins, as override= says." for change in overridden]
        if codes:
            texts.append(f"{'; '.join(map(str, codes))}. The code wins.")
        if kept:
            paths = [change.path for change in kept]
            texts.append(
                f"{'; '.join(map(str, kept))}. The checkpoint wins. For the code's: override={paths}"
            )
        if drift := environment.differences(about.environment, environment.describe()):
            texts.append(f"{'; '.join(drift)}: results may differ from an uninterrupted run's.")
        return texts

    def _tell(self, texts: Sequence[Sequence[str]]) -> None:
        # Once for all processes, but what only some of them meet is theirs to tell.
        for text in texts[self._crew.ranks.rank]:
            if self._crew.is_first or text not in texts[0]:
                self._warn(text)

    def _resized(self, about: Manifest) -> str:
        then, now = about.world_size, self._crew.ranks.size
        if then == now:
            return ""
        new = ", ".join(map(str, range(then, now)))
        streams = f"; rank {new} begins random streams of its own" if new else ""
        some = "1 process" if now == 1 else f"{now} processes"
        return f"; {some} instead of {then}: what is left of the epoch is divided anew{streams}"

    def _print(self, line: str) -> None:
        if self._crew.is_first:
            print(line, flush=True)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last save; of several processes, those that rank 0 gave."""
        self._hear_first()
        return self._metrics

    @property
    def epoch(self) -> int:
        """Epochs done; in the body of `epochs()`, the index of the one in hand."""
        return self._position.epoch

    @property
    def batch(self) -> int:
        """Batches of this epoch done; in the body of `batches()`, the index of the one in hand."""
        return self._position.batch

    @property
    def step(self) -> int:
        """Optimizer steps done. A hook counts them; of several optimizers, those of the first."""
        return self._position.step

    @property
    def samples(self) -> int:
        """Samples trained on, over all epochs."""
        return self._position.samples

    @property
    def best(self) -> float | None:
        """The best value so far of the metric to maximize or minimize."""
        self._hear_first()
        return self._best.value if self._best else None

    def epochs(self, total: int) -> Iterator[int]:
        """Loop over the epochs that are left of `total`, which counts those done before."""
        self._refuse_closed()
        if self.resumed and self.epoch >= arguments.count("total", total):
            self._print(f"{self.run} is complete: {self.epoch} of {total} epochs are done")
        yield from self._position.epochs(arguments.count("total", total), self._body_ended)
        self.wait()

    def batches(
        self,
        loader: Any = None,
        *,
        device: str | int | torch.device | None = None,
        through: Through | None = None,
    ) -> Batches:
        """Loop over the batches that are left of this epoch; of several loaders, name one or pass it.

        `loader` may also be an iterable, or a function that returns an iterator, that was not given before.
        `device`: the batches come on this device, the next one copied while the training has this one.
        `through`: what gets the iterator of the batches and returns an iterable of the same ones (a thread
        that loads ahead): a batch counts when it comes out of that.
        """
        self._refuse_closed()
        name = self._loader_name(loader)
        loads_ahead = through is not None
        if device is not None:
            ahead = self._position.at(name).source.can_load_ahead()
            loads_ahead |= ahead
            through = _both(through, ToDevice(device, ahead))
        return self._position.batches(name, self._body_ended, through, loads_ahead)

    def steps(self, total: int) -> Iterator[int]:
        """Loop over the steps that are left of `total`; each body is one optimizer step."""
        self._refuse_closed()
        if self.resumed and self.step >= arguments.count("total", total):
            self._print(f"{self.run} is complete: {self.step} of {total} steps are done")
        yield from self._position.steps(arguments.count("total", total), self._body_ended)
        self.wait()

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
        self._refuse_closed()
        self._meet({})
        number = self._crew.next_number(self._number)
        try:
            self._wait_for_the_one_before()
        except BaseException as exc:
            self._crew.skip(number, exc)
            raise
        try:
            return self._save(number, arguments.numbers(metrics))
        except BaseException as exc:
            self._crew.fail(number, exc)
            raise

    def _save(self, number: int, values: dict[str, float]) -> PendingSave:
        self._own_run()
        self._warn_of_mid_body()
        self._warn_of_no_goal(values)
        # What the last one saw is in the memory that this one takes.
        self._after_save = None
        # (save() may be called where a model is evaluated)
        with no_garbage_collection(), torch.inference_mode(False):
            trees, parts = self._capture.collect()
            groups = codec.to_groups(trees, self._crew.ranks.rank)
            if self._checks_replicas:
                self._crew.compare(groups, self._capture.differing())
            mine = self._crew.share(self._image.sizes(groups), self._image.headers)
            taken = self._image.take(groups, mine)
        about = self._describe(number, values, parts)
        before = self._best, self._parent, self._metrics
        self._number = self._parent = number
        if self._crew.is_first:
            self._best, self._metrics = about.best, values
        else:
            self._unheard = number
        self._after_save = _AfterSave(
            number, self.step, self._position.body(), capture.versions(trees), Held(trees, taken)
        )
        path = self.run.folder / checkpoint.name(number, about.step)
        return self._writer.submit(number, path, lambda: self._commit(about, trees, taken, before))

    def _wait_for_the_one_before(self) -> None:
        started = time.perf_counter()
        try:
            self._writer.wait()
        except WrittenAround as exc:
            # It cannot happen again in this process, and would end each start at the same save.
            self._warn(str(exc))
        waited = time.perf_counter() - started
        if waited > _A_LONG_WAIT and "waited" not in self._warned:
            self._warned.add("waited")
            warn(
                f"save() has waited {waited:.1f} s for the save before it: {self.run} is written more "
                "slowly than saves follow each other. Save less often, or to a faster disk."
            )

    def _prepare(self) -> None:
        """Get the memory for the first save, and try the disk, before they are needed."""
        size = self._capture.size() if self._capture.saves_all else 0
        if self._crew.writers > 1:
            # (shares are of whole blocks)
            size = size // self._crew.writers + blocks.BLOCK
        if size >= _WORTH_PREPARING and not self._is_closed:
            self._image.reserve(size + size // 1000, self._try_disk)

    def _try_disk(self, scratch: memoryview) -> None:
        if self.run.path.is_dir() and self._crew.leads:
            # (a save has more use for the disk)
            self._way = blocks.fastest_way(
                self.run.path, scratch, lambda: not self._number and not self._is_closed
            )

    def _describe(self, number: int, metrics: Mapping[str, float], parts: Mapping[str, Json]) -> Manifest:
        assert self.run_id is not None
        return Manifest(
            number=number,
            parent=self._parent,
            run_id=self.run_id,
            saved=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            metrics=metrics,
            best=policy.update_best(self._best, self._goal, metrics, number),
            files={},
            parts=parts,
            built=self._built,
            environment=environment.describe(),
            world_size=self._crew.ranks.size,
            **self._position.counters(),
        )

    def _commit(
        self,
        about: Manifest,
        trees: Trees,
        taken: Taken,
        before: tuple[Best | None, int | None, dict[str, float]],
    ) -> None:
        files = taken.contents(self._written)
        for path, text in codec.to_texts(trees, self._crew.ranks.rank).items():
            if self._crew.leads or codec.rank_of(path) is not None:
                files[path] = blocks.Content(text)
        try:
            if self._crew.leads:
                about = self._crew.decided(about.number) or about
                with self.run.adding(about):
                    self._written = self._crew.commit(about, files, self._way)
            else:
                self._written = self._crew.commit(about, files, self._way)
        except BaseException:
            # A flush can fail after the rename: then the checkpoint is there all the same.
            if about.number not in self.run.numbers():
                self._failed, self._unheard = about.number, None
                self._best, self._parent, self._metrics = before
            raise
        if self._crew.leads:
            self._tidy_after(about)

    def _tidy_after(self, about: Manifest) -> None:
        self.run.point("newest", self.run.path_of(about.number))
        if about.best:
            self.run.point("best", self.run.path_of(about.best.number))
        if self._keep is not None and self.run.holds_more_than(self._keep):
            self._prune(self._keep, about.best)

    def _prune(self, keep: int, best: Best | None) -> None:
        try:
            protected = [found.number for found in (best, self.run.best(self._goal)) if found]
        except FormatTooNew as exc:
            # Which of them is the best cannot be told, so all of them stay.
            self._warn(f"nothing was pruned: {exc.problem}")
        else:
            self.run.prune(keep, protected)

    def restore(self, which: str | int | os.PathLike[str], only: str | None = None) -> None:
        """Go back to a checkpoint ("best", "newest", a save number, a path) and go on from there.

        With `only`, such as "model", just that part is put back, and the training stands where it stood.
        """
        self._refuse_closed()
        started, ranks = time.perf_counter(), self._crew.ranks
        self._writer.wait()
        self._image.settle()
        self._meet({})
        ranks.agree(f"restore({str(which)!r})", lambda: None, is_due=True)
        names = None if only is None else self._capture.names(only)
        found = self._crew.choose("must" if which == "auto" else which, self._read)
        if found is None:
            raise UsageError(
                f"restore({which!r}) names no checkpoint.",
                fix="say 'best', 'newest', a save number or a checkpoint's path.",
            )
        chosen, reading = found
        unfit = ranks.each(
            "what does not fit", lambda: self._capture.check(reading.trees, chosen.about, (), names)
        )
        self._capture.restore(reading, unfit, only=names, each=ranks.each)
        if names is None:
            self._after_save = None
            self._capture.forget_gradients(reading.trees)
            self._go_on_from(chosen, self._checked_best(chosen, ["best"]), reading)
        what = f"put back {only} of" if only else "went back in"
        self._print(self._resumed_line(what, chosen, time.perf_counter() - started))

    def wait(self) -> None:
        """Wait until the last save is durable; raise what went wrong with it."""
        self._writer.wait()

    def close(self) -> None:
        """Wait for the last save, and let go of the run; the parts stay as they are."""
        if self._is_closed:
            return
        self._is_closed = True
        for hook in self._hooks:
            hook.remove()
        self._position.close()
        try:
            self._writer.wait()
        finally:
            try:
                self._hear_first()
                self._crew.leave(self._reason)
            finally:
                # An interrupted wait leaves the writer at work: nobody else may begin until it has ended.
                if not self._writer.is_busy():
                    self._after_save = None
                    self._image.close()
                    self.run.release()

    def __enter__(self) -> RunState:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._reason = f"{type(error).__name__}: {error}"
        self.close()

    def __repr__(self) -> str:
        return f"<RunState {self.run}: epoch {self.epoch}, batch {self.batch}, step {self.step}>"

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
        goal = {
            "the goal": str(self._goal),
            "keep": self._keep,
            "elastic": self._is_elastic,
            "check_replicas": self._checks_replicas,
        }
        self._crew.meet({**goal, **parts, **facts}, check)
        self._capture.saves_all = self._crew.saves_all or self._checks_replicas

    def _own_run(self) -> None:
        # In a notebook a cell runs again: the new object takes over from the one that it replaces.
        path = self.run.path.resolve()
        if (older := _open_runs.get(path)) and older is not self:
            older.close()
        self._crew.own_still()
        _open_runs[path] = self

    def _hear_first(self) -> None:
        """Take over what rank 0 gave as metrics at the last save: it decides for all."""
        if self._unheard is not None:
            number, self._unheard = self._unheard, None
            # (of what went wrong the next call tells)
            with contextlib.suppress(ResumableError):
                about = self._crew.decided(number)
                if about and self._failed != number:
                    self._metrics, self._best = dict(about.metrics), about.best

    def _count_steps(self, optimizer: Any) -> list[Any]:
        hooks = []
        for number, (name, live) in enumerate(capture.named("optimizer", optimizer).items()):
            if hasattr(live, "register_step_post_hook"):
                stepped = partial(self._stepped, name, number == 0)
                hooks.append(live.register_step_post_hook(lambda *_, stepped=stepped: stepped()))
                self._position.counts_steps |= number == 0
        self._position.gradients = self._capture.gradients
        return hooks

    def _stepped(self, name: str, is_first: bool) -> None:
        self._position.count_step(name, is_first)
        if not self._is_prepared:
            # Before its first step most optimizers have no state.
            self._is_prepared = True
            self._prepare()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise UsageError(
                f"this RunState of {self.run} has been closed, or another has taken its place.",
                fix="go on with the newer one, or make one with RunState.load(...).",
            )

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn(text)

    def _warn_of_mid_body(self) -> None:
        if any(loader.is_interrupted() for loader in self._position.loaders.values()):
            self._warn(
                "saved while handling an exception that left the loop over the batches: that is not a "
                "boundary, and a resume will not be bit for bit what an uninterrupted run does."
            )

    def _warn_of_no_goal(self, metrics: Mapping[str, float]) -> None:
        if metrics and self._goal and self._goal.metric not in metrics and self._best is None:
            self._warn(
                f"save() was given {', '.join(metrics)}, but {self._goal} says which checkpoint is the best."
            )

    def _body_ended(self) -> None:
        """Look whether a part has changed since the save in this body: a resume would lose the change."""
        self._crew.ranks.refuse_trouble()
        saved, self._after_save = self._after_save, None
        if saved is None or saved.body != self._position.body() or "lost" in self._warned:
            return
        # A fused optimizer changes tensors without counting it, so steps are looked at too.
        stepped = self._capture.trained() if self.step > saved.step else []
        # (what went wrong with the image the writer tells)
        changed = []
        with contextlib.suppress(SaveFailed):
            changed = self._capture.changed_since(saved.versions, saved.held)
        if changed := [*dict.fromkeys([*stepped, *changed])]:
            self._warned.add("lost")
            self._warn(
                f"{', '.join(changed)} changed after save() in the same body: a resume from checkpoint "
                f"{saved.number} would not have the change. Call save() last in the body."
            )

    def _resumed_line(self, what: str, chosen: Checkpoint, seconds: float) -> str:
        facts = [f"epoch {self.epoch}"]
        if self.batch:
            lengths = [len(source) for source in self._sized_loaders()]
            facts.append(f"batch {self.batch}" + (f"/{lengths[0]}" if len(lengths) == 1 else ""))
        facts.append(f"step {self.step}")
        if self._best:
            facts.append(f"best {self._best.goal.metric} {self._best.value:.4g}")
        where = f"{self.run} from" + ("" if self._is_ours(chosen) else f" {chosen.path},")
        return f"{what} {where} checkpoint {chosen.about.number}: {', '.join(facts)} ({seconds:.1f} s)"

    def _sized_loaders(self) -> Iterator[Source]:
        for position in self._position.loaders.values():
            with contextlib.suppress(TypeError):
                len(position.source)
                yield position.source


def _both(first: Through | None, second: Through) -> Through:
    return second if first is None else lambda batches: second(iter(first(batches)))


@dataclass(frozen=True, slots=True)
class _Fit:
    """What a checkpoint and the script do not agree on, and may."""

    unfit: dict[str, set[str]]
    best: Best | None
    changes: Sequence[Change]
    overridden: Sequence[Change]


@dataclass(frozen=True, slots=True)
class _AfterSave:
    """What a save saw, to be compared with what there is when its body ends."""

    number: int
    step: int
    body: Any
    versions: capture.Versions
    held: Held


_A_LONG_WAIT = 0.5
_WORTH_PREPARING = 64 << 20
