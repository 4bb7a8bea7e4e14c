"""The parts of a training that a start, a save and a resume share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import DistributedSampler

from .errors import Once, UsageError
from .files.strict_json import Json
from .loaders.generators import rng
from .options import Options
from .parts.parts import Parts
from .parts.sharding import Disk
from .parts.slots import named
from .parts.watch import Watch
from .position.position import Position
from .processes.alone import Alone
from .processes.crew import Crew
from .processes.ranks import Ranks, of_this_training
from .processes.stages import ranks_of
from .progress import Progress
from .remote import url
from .run.directory import Run
from .run.manifest import Goal
from .variables.choice import Choice
from .variables.part import ScriptPart

if TYPE_CHECKING:
    from .remote.in_training import Copies


class Training(NamedTuple):
    """One training: its run directory, its processes, its parts, its place in the data."""

    options: Options
    run: Run
    crew: Crew
    parts: Parts
    variables: dict[str, Any]
    """`state.vars`."""
    position: Position
    progress: Progress
    copies: Copies | None
    """The copies in a remote, if there are some."""
    script: ScriptPart | None
    """The script's own variables, unless they are left alone."""

    @classmethod
    def of(cls, options: Options) -> Training:
        """Bind everything together; nothing is read or written yet."""
        folder, remote = _places(options)
        run, variables = Run(folder), dict[str, Any]()
        progress = Progress(options.progress, is_first=of_this_training()[0] == 0, is_quiet=options.quiet)
        position = _position(options, progress)
        crew = _crew(options, run, position)
        overridden = [one for one in options.override if one.startswith("script")]
        chosen = Choice(options.variables, overridden, options.allow)
        script = ScriptPart(chosen) if options.variables else None
        parts = Parts(
            options.parts, variables, position, options.per_rank, crew.rank, [script] if script else ()
        )
        if script:
            script.bind(parts)
        position.join(crew.ranks.size)
        position.means.gather_with(partial(_gather, crew))
        progress.goal = options.goal.metric if options.goal else None
        progress.means, progress.step = position.means.glance, lambda: position.stands_at()[2]
        watch = Watch(parts)
        position.watch_parts(
            watch.gradients,
            watch.hold_settings,
            watch.hold_gradients,
        )
        training = cls(options, run, crew, parts, variables, position, progress, None, script)
        return training._replace(copies=training._copies(remote))

    def _copies(self, remote: str | None) -> Copies | None:
        copied = self.options.copied(remote)
        if copied is None:
            return None
        # Not above: most trainings have no remote, and do not wait for what one takes.
        from .remote.in_training import Copies

        return Copies(self.run, self.crew, copied, self.goal, self.progress, self.once.warn)

    @property
    def goal(self) -> Goal | None:
        """The metric that says which checkpoint is the best."""
        return self.options.goal

    @property
    def once(self) -> Once:
        """Gives each warning once."""
        return self.position.once

    @property
    def checks_replicas(self) -> bool:
        """Whether each save compares the tensors that should be the same on every rank."""
        return self.options.checks_replicas and not self.crew.ranks.is_alone

    def print(self, line: str) -> None:
        """Print a line, once for all processes."""
        if self.crew.is_first:
            self.progress.print(line)

    def meet(
        self,
        facts: Mapping[str, Json] | None = None,
        check: Callable[[], None] = lambda: None,
        *,
        is_copied: bool = False,
    ) -> None:
        """Meet the other processes, at the first call; RanksDiffer if their facts differ."""
        self.crew.ranks.refuse_trouble()
        if self.crew.has_met:
            return
        options = self.options
        alike = {
            "the goal": str(options.goal),
            "keep": options.keep and options.keep.told(),
            "elastic": options.is_elastic,
            "check_replicas": options.checks_replicas,
        }
        told = self.crew.meet({**alike, **(facts or {})}, self.parts.told(), check, is_copied=is_copied)
        ranks = ranks_of(told)
        stages = {name: there for name, there in ranks.items() if len(there) < len(told)}
        self.parts.note_stages(stages, {name: told[there[0]][name][0] for name, there in stages.items()})
        crew = self.crew
        disk = Disk(crew.disk, crew.on_disks) if crew.disks > 1 else None
        saves_all = crew.saves_all or self.checks_replicas
        self.parts.join(saves_all=saves_all, deal=crew.ranks.deal, disk=disk)
        if self.parts.is_divided:
            crew.note_set(self.parts.sharding.disks)
            crew.ranks.each("the samplers", self._refuse_other_shares)

    def _refuse_other_shares(self) -> None:
        """Raise UsageError for a sampler that deals out the data to others than the model is made for."""
        known = self.parts.sharding.data_rank
        for name, loader in self.position.loaders.items():
            sampler = getattr(loader.source.loader, "sampler", None)
            if (
                known
                and isinstance(sampler, DistributedSampler)
                and known != (sampler.rank, sampler.num_replicas)
            ):
                rank, count = known
                raise UsageError(
                    f"the sampler of {name} has rank={sampler.rank} of num_replicas={sampler.num_replicas}, "
                    f"and the model is sharded so that this process trains on share {rank} of {count} of the "
                    "data: processes of one group of tensor parallelism must read the same batches.",
                    fix=f"DistributedSampler(..., num_replicas={count}, rank={rank}): the size and the rank "
                    "of the mesh's dimensions for data parallelism.",
                )


def _position(options: Options, progress: Progress) -> Position:
    extra = named("extra", options.parts["extra"])
    own = {name: live for name, live in extra.items() if rng.is_generator(live)}
    loaders = named("loader", options.loader)
    return Position(loaders, own, options.sample_seeds, shows=progress.is_shown)


def _crew(options: Options, run: Run, position: Position) -> Crew:
    ranks = Ranks(options.timeout, position.stands_at)
    if ranks.is_alone:
        return Alone(run, ranks)
    from .processes.joint import Joint

    return Joint(run, ranks, is_shared=options.is_shared, all_write=options.all_write)


def _gather(crew: Crew, own: Json) -> Sequence[Json]:
    if not crew.has_met:
        raise UsageError("the processes have not met yet.", fix="call means.reduced() after RunState.load.")
    return crew.ranks.agree("means.reduced()", lambda: own, is_due=True)


def _places(options: Options) -> tuple[str | os.PathLike[str], str | None]:
    """Return the run directory, and the remote: a run that is given by the latter is kept in a cache."""
    given = os.environ.get("RESUMABLE_RUN_DIR") or options.run_dir
    remote = os.environ.get("RESUMABLE_REMOTE", options.remote) or None
    if not url.is_url(given):
        url.refuse_nearly(given)
        return given, remote
    if remote is not None:
        raise UsageError(
            f"the run directory is {url.shown(str(given))}, and remote= gives another address.",
            fix="give a local run directory and remote=, or the address alone.",
        )
    return url.cache_folder(str(given)), str(given)
