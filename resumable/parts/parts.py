"""All parts of one training, in the order in which they are restored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from operator import attrgetter
from typing import Any

import torch

from ..errors import CannotStore, Unsupported, UsageError, did_you_mean
from ..files import codec
from ..files.sharded_tensor import is_sharded
from ..files.strict_json import Json
from ..loaders import wrappers
from ..loaders.generators import rng
from ..position.position import Position
from ..run import changes
from . import sharded
from .aliases import Aliases
from .models import ModulePart
from .module_walk import parameters_of
from .optimizers import OptimizerPart
from .other_parts import ContainerPart, GeneratorPart, LoaderPart, PositionPart, RandomPart, make
from .part import Part
from .sharding import Deal, Disk, Sharding, Stage
from .slots import named, refuse_foreign_optimizers

SLOTS = ("model", "optimizer", "scheduler", "scaler", "extra")


class Parts:
    """The parts of one training, and questions about all of them."""

    def __init__(
        self,
        slots: Mapping[str, Any],
        variables: dict[str, Any],
        position: Position,
        per_rank: AbstractSet[str] = frozenset(),
        rank: int | None = None,
        script: Sequence[Part] = (),
    ) -> None:
        self.position = position
        self.rank = rank
        self.saves_all = True
        """Whether this process saves the state that all ranks share; it always saves its own."""
        self.models: list[ModulePart] = []
        found = None if slots["scaler"] is not None else _scaler_of(slots["optimizer"])
        slots = slots if found is None else {**slots, "scaler": found}
        made = {slot: self._made(slot, slots[slot], per_rank) for slot in SLOTS}
        # Each place in the order prevents a wrong restore.
        early: list[Part] = [
            *made["model"],  # before the optimizer, whose state goes by the names of the parameters
            *made["optimizer"],  # before the scheduler, whose state it would overwrite
            *made["scheduler"],
            *made["scaler"],
            *sorted(made["extra"], key=_is_generator),  # generators last: restoring the others may draw
            ContainerPart("vars", variables, "rank"),
            *script,
        ]
        self.aliases = Aliases(early)
        place = partial(LoaderPart, is_saved=self.aliases.holds)
        self.all: Sequence[Part] = [
            *early,
            PositionPart("position", position, "rank"),  # before the generators: making an iterator draws
            *starmap(place, position.loaders.items()),
            RandomPart("random", self._mesh),  # last: any of the above may have drawn
        ]
        self.optimizers = [part for part in self.all if isinstance(part, OptimizerPart)]
        inner = [one for one in self.optimizers if any(other.steps_by(one.live) for other in self.optimizers)]
        self.found: AbstractSet[str] = {
            *(part.name for part in (*inner, *script)),
            *(["scaler"] if found is not None else []),
        }
        """The parts that were found in those given: they may be missing from a checkpoint."""
        trained_by = [one for one in self.optimizers if one.stem == "optimizer"]
        others = [part.live for part in made["extra"] if not isinstance(part, OptimizerPart)]
        refuse_foreign_optimizers(self.models, trained_by, others)
        self._has_sharded = any(map(is_sharded, self._tensors().values()))
        self.stages: Mapping[str, Sequence[int]] = {}
        """The ranks of each part that only some of the processes have: the stages of a pipeline."""
        self._kinds_of_stages: Mapping[str, str] = {}
        self.sharding = Sharding(rank)
        self._disk: Disk | None = None
        self.in_collecting_order = sorted(self.all, key=has_no_generator)
        """The parts with random generators first, because collecting the others may draw."""
        position.train_on(self.devices_in_use)
        self.settings = {
            f"{part.name}.{key}": value
            for part in self.all
            if part.built
            for key, value in _storable(part.built).items()
        }

    def _made(self, slot: str, given: Any, per_rank: AbstractSet[str]) -> list[Part]:
        stem = slot if slot in ("model", "optimizer") else "extra"
        made = [
            make(name, live, "rank" if _is_of_rank(name, live, per_rank) else stem, self.models, self.rank)
            for name, live in named(slot, given).items()
        ]
        self.models += [part for part in made if isinstance(part, ModulePart)]
        return made

    def note_stages(self, ranks: Mapping[str, Sequence[int]], kinds: Mapping[str, str]) -> None:
        """Note which ranks have the parts that not all have, and the kinds of those parts."""
        self.stages, self._kinds_of_stages = ranks, kinds

    @property
    def is_divided(self) -> bool:
        """Whether the processes hold parts of the model: shards or stages."""
        return self._has_sharded or bool(self.stages)

    @property
    def elsewhere(self) -> AbstractSet[str]:
        """The parts that only other processes have."""
        return self.stages.keys() - self.kinds().keys()

    def join(self, *, saves_all: bool, deal: Deal, disk: Disk | None = None) -> None:
        """Note the role of this process among the ranks, and agree on who writes what is divided.

        `disk`: None if all see the same one.
        """
        self.saves_all = saves_all or self.is_divided
        self._disk = disk
        if self.is_divided and self.rank is not None:
            data_rank = sharded.data_rank(self._modules())
            self.sharding.meet(self._tensors(), self._stage(), data_rank, deal, disk)
            if known := self.sharding.data_rank:
                self.position.join(known[1])

    def _stage(self) -> Stage:
        models = [part.name for part in self.models if part.name in self.stages]
        led = tuple(f"{name}." for name, leads in self.led().items() if leads)
        built = {path: value for path, value in self.settings.items() if path.startswith(led)}
        return Stage(" ".join(models), self.stages, built)

    def led(self) -> dict[str, bool]:
        """Return the parts of stages in this process, and whether it is the first that has them."""
        own = [part.name for part in self.all if part.name in self.stages and part.stem != "rank"]
        return {name: self.stages[name][0] == self.rank for name in own}

    def led_on_disk(self) -> dict[str, bool]:
        """Return the parts of stages in this process, and whether it is the first on its disk with them."""
        there = self._disk.ranks if self._disk else None
        first = {
            name: next(rank for rank in self.stages[name] if there is None or rank in there)
            for name in self.led()
        }
        return {name: rank == self.rank for name, rank in first.items()}

    def leads(self) -> bool:
        """Return whether this process is the first of those that see its disk."""
        return self.rank == min(self._disk.ranks) if self._disk else not self.rank

    def hides_gradients(self) -> bool:
        """Whether gradients have been summed up that no save can read."""
        return self._has_sharded and sharded.hides_gradients(self._modules())

    def refuse_hidden_gradients(self) -> None:
        """Raise Unsupported for gradients that no save can read."""
        if self.hides_gradients():
            raise Unsupported(
                "gradients are being accumulated without being reduced (set_requires_gradient_sync(False)), "
                "and torch keeps them where no save can read them.",
                fix="call save() after the step, or accumulate with reduction. Nothing was written.",
            )

    def _modules(self) -> Iterator[torch.nn.Module]:
        for part in self.models:
            yield from part.live.modules()

    @property
    def data_rank(self) -> int:
        """Which share of the data this process trains on."""
        known = self.sharding.data_rank
        return known[0] if known else self.rank or 0

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{part.name}/{name}": tensor
            for part in (*self.models, *self.optimizers)
            for name, tensor in part.tensors().items()
        }

    def _mesh(self) -> Any:
        """Return the mesh of a sharded tensor; None if there is none."""
        sharded: Iterator[Any] = filter(is_sharded, self._tensors().values())
        return next((one.device_mesh for one in sharded), None)

    def devices_in_use(self) -> set[str]:
        """Return the devices of the models' and optimizers' parameters."""
        parameters = self.parameters()
        if parameters and all(map(attrgetter("is_cpu"), parameters)):
            # To ask each of ten thousand for its device takes twice as long.
            parameters = parameters[:1]
        found = {*map(attrgetter("device"), parameters)}
        for part in self.optimizers:
            found |= {p.device for group in part.live.param_groups for p in group["params"]}
        return {*map(str, found)}

    def has_dropout_in_cudnn(self) -> bool:
        """Whether cuDNN draws the dropout of a recurrent layer: its state cannot be read."""
        modules = [module for part in self.models for module in part.live.modules()]
        recurrent = [m for m in modules if isinstance(m, torch.nn.RNNBase) and m.dropout and m.num_layers > 1]
        return torch.backends.cudnn.enabled and any(p.is_cuda for m in recurrent for p in m.parameters())

    def size(self) -> int:
        """Return the approximate size of a checkpoint's tensors in bytes, without calling any state_dict."""
        return sum(part.size() for part in self.models) + sum(part.size() for part in self.optimizers)

    def size_here(self) -> int:
        """Return the approximate bytes of them that this process writes, if it writes what is not sharded."""
        return int(self.size() * self.sharding.share)

    def written_in_forward(self) -> set[int]:
        """Return the addresses of the parameters that a forward pass writes to."""
        modules = [module for part in self.models for module in part.live.modules()]
        limited = [module for module in modules if getattr(module, "max_norm", None) is not None]
        return {parameter.data_ptr() for module in limited for parameter in module.parameters(recurse=False)}

    def differing(self) -> set[int]:
        """Return the addresses of the buffers in shared models that each rank has for itself."""
        return {buffer.data_ptr() for part in self.models for buffer in part.own_buffers().values()}

    def told(self) -> dict[str, tuple[str, str]]:
        """Return, by part, its kind, and a text that is equal on two ranks only if its tensors are alike."""
        files = ("model", "optimizer")
        return {part.name: (part.kind, part.outline() if part.stem in files else "") for part in self.all}

    def kinds(self) -> dict[str, str]:
        """Return the kind of each part of this process."""
        return {part.name: part.kind for part in self.all}

    def kinds_of_all(self) -> dict[str, str]:
        """Return the kind of each part of any process."""
        return {**self._kinds_of_stages, **self.kinds()}

    def given(self) -> list[Any]:
        """Return the live objects of all parts."""
        return [part.live for part in self.all]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of the models; one that is shared comes several times."""
        return [one for part in self.models for one in parameters_of(part.live)]

    def trained(self) -> list[str]:
        """Return the parts that a step of an optimizer changes."""
        kinds = (ModulePart, OptimizerPart)
        return [part.name for part in self.all if isinstance(part, kinds) and part.stem != "extra"]

    def note_steps(self, step: int) -> None:
        """Mark the optimizers that made steps before this process started, if the first made `step`.

        Otherwise torch warns of a scheduler that steps before its optimizer, after a resume at an epoch's
        last batch.
        """
        for number, part in enumerate(self.optimizers if step else ()):
            if number == 0 or part.live.state:
                part.note_step()

    def stepped(self, optimizer: Any) -> list[str]:
        """Note that an optimizer has made a step; return the names of those that step by it."""
        outer = []
        for part in self.optimizers:
            if part.live is optimizer:
                part.gradients.stepped()
            elif part.steps_by(optimizer):
                part.gradients.stepped()
                outer.append(part.name)
        return outer

    def note_captured(self, name: str) -> None:
        """Note that a captured graph replays an optimizer's steps, with gradients of its own."""
        for part in self.optimizers:
            if part.name == name:
                part.gradients.note_captured()

    @contextmanager
    def where_a_body_ended(self, has_ended: bool) -> Iterator[None]:
        """Collect for a save at the end of a loop body, or in the middle of one."""
        for part in self.optimizers:
            part.gradients.begin_save(has_body_ended=has_ended)
        try:
            yield
        finally:
            for part in self.optimizers:
                part.gradients.end_save()

    def check_patterns(self, override: Sequence[str]) -> None:
        """Raise UsageError for an override that names no setting of any part."""
        known = [path for path in self.settings if not path.endswith(".frozen")]
        others = tuple(f"{name}." for name in self.elsewhere)
        for pattern in override:
            if pattern == "best" or pattern.startswith(others) or f"{pattern}.".startswith("script."):
                continue
            if not any(changes.is_named(path, [pattern]) for path in known):
                raise UsageError(
                    f"override={pattern!r} names no setting.{did_you_mean(pattern, known)}",
                    fix=f"the settings are: {', '.join(sorted(known))}.",
                )

    def names(self, wanted: str) -> list[str]:
        """Return the parts that `wanted` names: one part, or all of a slot."""
        names = [part.name for part in self.all if not part.is_last]
        found = [name for name in names if name == wanted or name.startswith(f"{wanted}.")]
        if not found:
            raise UsageError(f"there is no part {wanted!r}.", fix=f"the parts are: {', '.join(names)}.")
        return found

    def names_but_data(self) -> list[str]:
        """Return all parts except the position in the data and the random generators."""
        return [part.name for part in self.all if has_no_generator(part)]

    def schedules(self) -> Iterator[tuple[Part, OptimizerPart]]:
        """Yield the schedulers, each with the optimizer that it changes."""
        for optimizer in self.optimizers:
            for part in self.all:
                is_scheduler = part.name.startswith("scheduler")
                if is_scheduler and getattr(part.live, "optimizer", None) is optimizer.live:
                    yield part, optimizer


def _is_generator(part: Part) -> bool:
    return isinstance(part, GeneratorPart)


def has_no_generator(part: Part) -> bool:
    """Whether a part is neither a random generator nor the position in the data."""
    return not isinstance(part, (GeneratorPart, PositionPart, RandomPart))


def _is_of_rank(name: str, live: Any, per_rank: AbstractSet[str]) -> bool:
    # Each rank draws its own numbers, even if all generators were seeded alike.
    return name in per_rank or (name.startswith("extra.") and rng.is_generator(live))


def _scaler_of(optimizer: Any) -> Any:
    """Return the gradient scaler with which Accelerate or Fabric has wrapped an optimizer."""
    # First: for a class that it has not seen, Mapping asks every kind of mapping there is.
    is_one = isinstance(optimizer, torch.optim.Optimizer) or not isinstance(optimizer, Mapping)
    wrapped = [optimizer] if is_one else optimizer.values()
    return next((scaler for live in wrapped if (scaler := wrappers.scaler_of(live)) is not None), None)


def _storable(settings: Mapping[str, Any]) -> dict[str, Json]:
    with contextlib.suppress(CannotStore):
        whole = codec.encode(dict(settings))
        if not whole.tensors and whole.json.keys() == settings.keys():
            return dict(whole.json)
    found = {}
    for key, value in settings.items():
        # A setting that cannot be stored, such as a function, cannot be compared either.
        with contextlib.suppress(CannotStore):
            encoded = codec.encode(value)
            if not encoded.tensors:
                found[key] = encoded.json
    return found
