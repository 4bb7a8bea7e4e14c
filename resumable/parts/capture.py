"""Live objects to one tree and back, in the right order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from ..errors import CannotRead, CannotStore, ResumableError, StateMismatch, UsageError
from ..files import codec, tensor_file
from ..files.codec import Encoded
from ..files.strict_json import Json
from ..files.threads import no_garbage_collection
from ..loaders import rng, wrappers
from ..loaders.dataloader import LoaderSource
from ..position.loader_position import LoaderPosition
from ..position.position import Position
from ..run import changes
from ..run.manifest import Manifest
from . import aliases, other_parts
from .models import ModulePart
from .optimizers import OptimizerPart
from .part import Difference, Part, Saved, clones, same_device
from .reading import Reading

Trees = dict[str, Encoded]
"""What a checkpoint holds, by the file it lies in: model, optimizer, extra, rank."""

Versions = dict[str, tuple[Mapping[str, torch.Tensor], Mapping[str, int | None]]]
"""By tree: the live tensors, and the counts of their changes, by name."""

_States = tuple[
    Mapping[str, Any],
    Sequence[tuple[rng.Generator, Any]],
    Sequence[tuple[LoaderPosition, Mapping[str, Any]]],
]

_FLEETING = frozenset({"gradients", "used", "syncs", "zeroed"})

SLOTS = ("model", "optimizer", "scheduler", "scaler", "extra")


class _RandomPart(Part):
    kind = "random"

    def collect(self) -> dict[str, Any]:
        return {self.stem: rng.collect()}

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        rng.restore(rng.moved(saved.view(self.stem), saved.moved(self.stem)))


class _PositionPart(Part):
    kind = "position"

    def collect(self) -> dict[str, Any]:
        return {self.stem: self.live.collect()}

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        state = saved.copy(self.stem, same_device)
        for states in (state.get("body_start"), *state.get("loop_ends", ())):
            if states:
                states["global"] = rng.moved(states["global"], saved.moved(self.stem))
        self.live.restore(state, unfit)

    def resized(self, saved: Saved, then: int, now: int) -> Iterator[Difference]:
        for name, at in saved.view(self.stem).get("iterables", {}).items():
            if at["batch"]:
                text = f"in mid-epoch, looped over by each of {then} processes for itself, and {now} now"
                yield Difference(self.name, name, text)


class _LoaderPart(_PositionPart):
    def __init__(self, name: str, live: LoaderPosition) -> None:
        super().__init__(name, live, "rank")
        self.built = live.source.settings()
        self.keeps: Callable[[Any], bool] = lambda _: False
        """Whether an object is saved with the training."""

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        self.live.restore(saved.copy(self.stem, same_device), unfit)

    def effects(self, saved: Saved) -> dict[str, tuple[str, str]]:
        try:
            effects: dict[str, tuple[str, str]] = self.live.source.effects(saved.view(self.stem)["source"])
            return effects
        except KeyError:
            return {}

    def resized(self, saved: Saved, then: int, now: int) -> Iterator[Difference]:
        for text in self.live.resized(saved.view(self.stem), then, now):
            yield Difference(self.name, "", text)

    def differences(self, saved: Saved, built: Mapping[str, Json]) -> Iterator[Difference]:
        for name, text in self.live.differences(saved.view(self.stem)):
            # One that grew in the training may be as long again when the loop over the batches begins.
            is_grown = name == "dataset_length" and built.get(name) == self.live.source.settings().get(name)
            is_checked = bool(saved.view(self.stem)["source"].get("lengths"))
            yield Difference(self.name, name, text, is_open=is_grown and is_checked)

    def outgrown(self) -> Iterator[str]:
        if isinstance(source := self.live.source, LoaderSource):
            at = {"is_under_way": self.live.is_under_way()}
            if text := source.outgrown(self.keeps, **at):
                yield f"{self.name}: {text}"


def _is_generator(part: Part) -> bool:
    return isinstance(part, other_parts.GeneratorPart)


def _has_no_generator(part: Part) -> bool:
    return not isinstance(part, (other_parts.GeneratorPart, _PositionPart, _RandomPart))


class Capture:
    """All parts of one training."""

    def __init__(
        self,
        slots: Mapping[str, Any],
        variables: dict[str, Any],
        position: Position,
        per_rank: AbstractSet[str] = frozenset(),
        rank: int | None = None,
    ) -> None:
        self._position = position
        self._rank = rank
        self.saves_all = True
        """Whether this process saves what all processes share; its own it saves in any case."""
        modules: list[ModulePart] = []
        made: dict[str, list[Part]] = {}
        for slot in SLOTS:
            stem = slot if slot in ("model", "optimizer") else "extra"
            made[slot] = [
                other_parts.make(name, live, "rank" if _is_of_rank(name, live, per_rank) else stem, modules)
                for name, live in named(slot, slots[slot]).items()
            ]
            modules += [part for part in made[slot] if isinstance(part, ModulePart)]
        # The order of the restore; every arrow is a bug that somebody had.
        self._parts: list[Part] = [
            *made["model"],  # -> optimizer: its state goes by the names of the model's parameters
            *made["optimizer"],  # -> scheduler: one that is loaded first would be overwritten
            *made["scheduler"],
            *made["scaler"],
            *sorted(made["extra"], key=_is_generator),  # the user's generators last: the others may draw
            other_parts.ContainerPart("vars", variables, "rank"),
            _PositionPart("position", position, "rank"),  # -> random: making an iterator draws
            *(_LoaderPart(name, loader) for name, loader in position.loaders.items()),
            _RandomPart("random", None, "rank"),  # last: any of the above may have drawn
        ]
        for part in self._parts:
            if part.stem != "rank":
                part.rank = rank
        self._aliases = aliases.Aliases(self._parts)
        for part in self._parts:
            if isinstance(part, _LoaderPart):
                part.keeps = self._aliases.holds
        position.train_on(self.devices_in_use)
        self._memos: dict[tuple[str, str], codec.Memo] = {}
        self.settings = {
            f"{part.name}.{key}": value
            for part in self._parts
            for key, value in _storable(part.built).items()
        }

    def all_parts(self) -> Sequence[Part]:
        """Return the parts, in the order of the restore."""
        return self._parts

    def collect(self) -> tuple[Trees, dict[str, Json]]:
        """Return the trees of all parts, still with the live tensors, and what each part is."""
        # Somebody's state_dict may draw, and taking a checkpoint leaves every generator as it was:
        # they are read first and put back last.
        states = self._read_generators()
        self._position.show_held()
        try:
            trees = self._encoded(sorted(self._parts, key=_has_no_generator), self.saves_all)
            if found := self._aliases.collect(partial(self._made_by_parts, trees)):
                trees["rank"].json["position"]["aliases"] = found
        finally:
            _write_generators(states)
        if self.saves_all:
            self._set_apart_what_is_frozen(trees)
        return trees, {name: {"kind": kind} for name, kind in self.kinds().items()}

    def _made_by_parts(self, trees: Trees) -> dict[str, list[torch.Tensor]]:
        """Return the tensors in the state of the parts that may make new ones when they are restored."""
        return {
            part.name: [trees[part.stem].tensors[name] for name in codec.tensor_names(json)]
            for part in self._parts
            if isinstance(part, (other_parts.StatefulPart, OptimizerPart))
            if (json := trees[part.stem].json.get(part.name) if part.stem in trees else None)
        }

    def notes(self) -> list[str]:
        """Return what a resume from the last `collect` would not restore."""
        return [*self._aliases.notes, *(text for part in self._parts for text in part.outgrown())]

    def look(self) -> Trees:
        """Return the trees of the parts that this process has, but for where it stands in the data."""
        states = self._read_generators()
        self._position.show_held()
        try:
            chosen = [part for part in self._parts if not isinstance(part, _PositionPart)]
            return self._encoded(sorted(chosen, key=_has_no_generator))
        finally:
            _write_generators(states)

    def _encoded(self, chosen: Sequence[Part], is_all: bool = True) -> Trees:
        trees: Trees = {}
        for part in chosen:
            for stem, tree in (part.collect() if is_all else part.collect_of_rank()).items():
                memo = self._memos.setdefault((part.name, stem), {})
                encoded = codec.encode({part.name: tree}, NAMERS.get(stem, ".".join), memo)
                merge(trees.setdefault(stem, Encoded({}, {}, {})), encoded)
        return trees

    def _set_apart_what_is_frozen(self, trees: Trees) -> None:
        frozen = {
            part.name_in_optimizers(name)
            for part in self._parts
            if isinstance(part, ModulePart) and part.stem == "model"
            for name in trees["extra"].json[part.name]["frozen"]
        }
        if frozen and (there := trees["model"].tensors.keys()) - frozen:
            trees["model"].frozen = frozenset(frozen & there)

    def live(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors that a checkpoint's can be read into, by tree and name in the file."""
        chosen = [
            part
            for part in self._parts
            if isinstance(part, (ModulePart, OptimizerPart)) and part.is_filled_in_place()
        ]
        trees = self._encoded(chosen)
        for part in chosen:
            tree = trees[part.rest_stem if isinstance(part, ModulePart) else part.stem]
            for name in _not_filled(part, tree):
                tree.tensors.pop(name, None)
        # What each rank has for itself is rank 0's too, which must not come in its place at the end.
        own = set() if self._rank is None else self.differing()
        return {
            stem: {name: tensor for name, tensor in tree.tensors.items() if tensor.data_ptr() not in own}
            for stem, tree in trees.items()
            if stem != "rank"
        }

    def devices_in_use(self) -> set[str]:
        """Return the devices of what is trained."""
        modules = [part.live.parameters() for part in self._parts if isinstance(part, ModulePart)]
        groups = [group["params"] for live in self.optimizers() for group in live.param_groups]
        return {str(tensor.device) for tensors in (*modules, *groups) for tensor in tensors}

    def has_dropout_in_cudnn(self) -> bool:
        """Whether cuDNN draws the dropout of a recurrent layer, whose state cannot be read."""
        modules = [m for part in self._parts if isinstance(part, ModulePart) for m in part.live.modules()]
        recurrent = [m for m in modules if isinstance(m, torch.nn.RNNBase) and m.dropout and m.num_layers > 1]
        return torch.backends.cudnn.enabled and any(p.is_cuda for m in recurrent for p in m.parameters())

    def size(self) -> int:
        """Return about how many bytes the tensors of a checkpoint take, without asking every part."""
        return sum(part.size() for part in self._parts if isinstance(part, (ModulePart, OptimizerPart)))

    def written_in_forward(self) -> set[int]:
        """Return the addresses of the parameters that a forward pass writes to."""
        modules = [part.live for part in self._parts if isinstance(part, ModulePart)]
        limited = (m for live in modules for m in live.modules() if getattr(m, "max_norm", None) is not None)
        return {parameter.data_ptr() for module in limited for parameter in module.parameters(recurse=False)}

    def differing(self) -> set[int]:
        """Return the addresses of the tensors of shared parts that each rank has for itself."""
        modules = [part for part in self._parts if isinstance(part, ModulePart)]
        return {buffer.data_ptr() for part in modules for buffer in part.own_buffers().values()}

    def orders(self, trees: Trees) -> dict[str, Json]:
        """Return in which order the gradients of each model are summed, as the trees have it."""
        there = trees["extra"].json if "extra" in trees else {}
        found = {name: tree.get("buckets") for name, tree in there.items() if isinstance(tree, dict)}
        return {name: order for name, order in found.items() if order}

    def sum_in_order(self, trees: Trees, orders: Mapping[str, Json]) -> None:
        """Let the trees have rank 0's order: gradients that are summed in different ones are mixed up."""
        for name, order in orders.items():
            trees["extra"].json[name]["buckets"] = order

    def note_steps(self, step: int) -> None:
        """Let torch know which optimizers have made steps before this process, if the first made so many.

        Else it warns of a scheduler that comes before its optimizer, after a resume at an epoch's last batch.
        """
        optimizers = [part for part in self._parts if isinstance(part, OptimizerPart)]
        for number, part in enumerate(optimizers if step else ()):
            if number == 0 or part.live.state:
                part.live._opt_called = True

    def outlines(self) -> dict[str, str]:
        """Return what tells whether the models and optimizers of two processes have the same tensors."""
        return {part.name: part.outline() for part in self._parts if part.stem in ("model", "optimizer")}

    def kinds(self) -> dict[str, str]:
        """Return what kind of object each part is."""
        return {part.name: part.kind for part in self._parts}

    def optimizers(self) -> list[Any]:
        """Return the live optimizers."""
        return [part.live for part in self._parts if isinstance(part, OptimizerPart)]

    def given(self) -> list[Any]:
        """Return the live objects of all parts."""
        return [part.live for part in self._parts]

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters of the models."""
        for part in self._parts:
            if isinstance(part, ModulePart):
                yield from part.live.parameters()

    def check_patterns(self, override: Sequence[str]) -> None:
        """Raise UsageError for an override that names no setting of any part."""
        known = [path for path in self.settings if not path.endswith(".frozen")]
        for pattern in override:
            if pattern != "best" and not any(changes.is_named(path, [pattern]) for path in known):
                raise UsageError(
                    f"override={pattern!r} names no setting.",
                    fix=f"the settings are: {', '.join(sorted(known))}.",
                )

    def forget_gradients(self, trees: Trees) -> None:
        """Drop the gradients that the trees do not hold: they belong to a step that was gone back behind."""
        optimizers = [part for part in self._parts if isinstance(part, OptimizerPart)]
        kept = set().union(*(part.with_gradients(Saved(trees, part.name)) for part in optimizers))
        for part in optimizers:
            part.forget_gradients(kept)

    @contextmanager
    def where_a_body_ended(self, has_ended: bool) -> Iterator[None]:
        """Collect what a save needs, where a body has ended or in the middle of one."""
        gradients = [part.gradients for part in self._parts if isinstance(part, OptimizerPart)]
        for one in gradients:
            one.has_body_ended = has_ended
        try:
            yield
        finally:
            for one in gradients:
                one.has_body_ended = None

    def hold_gradients(self) -> Callable[[], None]:
        """Return what gives parameters the gradients of a resumed window again, if the script drops them."""
        held = [part.gradients.hold() for part in self._parts if isinstance(part, OptimizerPart)]

        def put_back() -> None:
            for put_in in held:
                put_in()

        return put_back

    def hold_settings(self) -> Callable[[], None]:
        """Remember the small parts, and return what puts back those that have changed since."""
        small = [part for part in self._parts if _is_small(part)]
        states = self._read_generators()
        then = self._encoded(small)
        then = {stem: replace(tree, tensors=clones(tree.tensors)) for stem, tree in then.items()}
        _write_generators(states)
        owned = {id(tensor) for tensor in self._aliases.owned().values()}
        containers = [part for part in self._parts if part.is_container]
        fields = [part.fields() for part in containers if isinstance(part, other_parts.DataclassPart)]
        groups = [group for live in self.optimizers() for group in getattr(live, "param_groups", ())]
        held = [aliases.held(part.collect()[part.stem], owned) for part in containers]
        held += [aliases.held(_settings_of(group)) for group in groups]
        settings = [_settings_of(group) for group in groups]

        def put_back() -> None:
            states = self._read_generators()
            now = self._encoded(small)
            for part in small:
                if not _is_as_before(part.name, then[part.stem], now[part.stem]):
                    _restore(part, Saved(then, part.name), set(), set())
            for owner, name, value in [one for each in fields for one in each]:
                setattr(owner, name, value)
            for group, before in zip(groups, settings, strict=True):
                group.update(before)
            for put_in in held:
                put_in()
            _write_generators(states)

        return put_back

    def changed_models(self) -> Callable[[], list[str]]:
        """Begin to look at the models, and return what says which of them have been changed since."""
        models = {part.name: part for part in self._parts if isinstance(part, ModulePart)}
        then = {name: _counts(part.tensors()) for name, part in models.items()}
        return lambda: [name for name, part in models.items() if _counts(part.tensors()) != then[name]]

    def changed_settings(self) -> Callable[[], list[str]]:
        """Begin to look at the optimizers' settings, and return what says which have been changed since."""
        groups = [
            (part.name, group)
            for part in self._parts
            if isinstance(part, OptimizerPart)
            for group in getattr(part.live, "param_groups", ())
        ]
        then = [_cloned(_settings_of(group)) for _, group in groups]

        def changed() -> list[str]:
            found = {
                f"{name}.{key}"
                for (name, group), before in zip(groups, then, strict=True)
                for key, value in _settings_of(group).items()
                if key not in before or not _is_equal(value, before[key])
            }
            return sorted(found)

        return changed

    def stepped(self, name: str) -> None:
        """Note that an optimizer has made a step."""
        for part in self._parts:
            if isinstance(part, OptimizerPart) and part.name == name:
                part.gradients.stepped()

    def note_captured(self, name: str) -> None:
        """Note that an optimizer's steps are replayed, and use the gradients that are made with them."""
        for part in self._parts:
            if isinstance(part, OptimizerPart) and part.name == name:
                part.gradients.is_captured = True

    def gradients(self) -> list[tuple[int, int]]:
        """Return what tells, without reading it, that a gradient has changed."""
        optimizers = [part.live for part in self._parts if isinstance(part, OptimizerPart)]
        parameters = [p for live in optimizers for group in live.param_groups for p in group["params"]]
        return [(id(p.grad), p.grad._version) for p in parameters if p.grad is not None]

    def trained(self) -> list[str]:
        """Return the parts that an optimizer's step changes."""
        return [
            part.name
            for part in self._parts
            if isinstance(part, (ModulePart, OptimizerPart)) and part.stem != "extra"
        ]

    @no_garbage_collection()
    def changed_since(self, versions: Versions, held: Held) -> list[str]:
        """Return the parts that are not any more what they were when they were held."""
        now, about = self.collect()
        still = {stem for stem, seen in versions.items() if _is_untouched(*seen, now[stem])}
        return [
            name
            for name in about
            if about[name]["kind"] != "position"
            and any(_has_changed(name, stem, versions, held, now, stem in still) for stem in held.trees)
        ]

    def changes(
        self,
        built: Mapping[str, Json],
        unfit: Mapping[str, AbstractSet[str]],
        trees: Trees,
        override: Sequence[str],
    ) -> list[changes.Difference]:
        """Return the settings that the script makes otherwise than when the run was built."""
        effects = {
            f"{part.name}.{setting}": effect
            for part in self._parts
            if isinstance(part, _LoaderPart)
            for setting, effect in part.effects(Saved(trees, part.name)).items()
        }
        left_out = tuple(f"{part}." for part, names in unfit.items() if "" in names)

        def used(path: str) -> str:
            if changes.is_named(path, override):
                return changes.OVERRIDES
            # No checkpoint can say how data is loaded, whether a scaler is on, or what `allow` left out.
            is_the_codes = path.startswith(("loader", *left_out)) or path.endswith(".enabled")
            return changes.CODES if is_the_codes else changes.CHECKPOINTS

        return [
            changes.of_setting(
                path,
                codec.decode(built[path], {}),
                codec.decode(self.settings[path], {}),
                used(path),
                effects.get(path),
            )
            for path in self.settings
            if path in built and built[path] != self.settings[path] and not path.endswith(".frozen")
        ]

    def devices(self, trees: Trees) -> tuple[set[str], set[str]]:
        """Return the kinds of devices that the models were on, and are on; the CPU counts only alone."""
        modules = [part.live for part in self._parts if isinstance(part, ModulePart) and part.stem == "model"]
        if not modules or "model" not in trees:
            return set(), set()
        facts = codec.tensor_facts(trees["model"].json).values()
        then = {str(about["device"]).partition(":")[0] for about in facts if "device" in about}
        tensors = (tensor for live in modules for tensor in (*live.parameters(), *live.buffers()))
        now = {tensor.device.type for tensor in tensors} - {"cpu"}
        return then or {"cpu"}, now or {"cpu"}

    @no_garbage_collection()
    def check(
        self,
        reading: Reading,
        allow: Sequence[str],
        only: Collection[str] | None = None,
    ) -> dict[str, set[str]]:
        """Return what does not fit but is allowed, by part; StateMismatch for all the rest at once."""
        trees, about = reading.trees, reading.about
        found = [
            d
            for d in self._differences(trees, about)
            if (only is None or d.part in only)
            and not (d.is_open and not any(d.matches(pattern) for pattern in allow))
        ]
        refused = [d for d in found if not any(d.matches(pattern) for pattern in allow)]
        if refused:
            raise _mismatch(refused)
        unfit: dict[str, set[str]] = {}
        loaders = {part.name for part in self._parts if isinstance(part, _LoaderPart)}
        for difference in found:
            # A loader that is allowed as a whole begins the epoch's data anew.
            is_whole = difference.part in loaders & {*allow}
            unfit.setdefault(difference.part, set()).add("" if is_whole else difference.name)
        # A weight that starts anew has no use for the moments of the one before it.
        anew = {
            part.name_in_optimizers(name)
            for part in self._parts
            if isinstance(part, ModulePart)
            for name in unfit.get(part.name, ())
        }
        for part in self._parts:
            if isinstance(part, OptimizerPart) and anew:
                unfit.setdefault(part.name, set()).update(anew)
        return unfit

    def _differences(self, trees: Trees, about: Manifest) -> Iterator[Difference]:
        live = {part.name: part for part in self._parts}
        for name in sorted(about.parts.keys() - live.keys()):
            yield Difference(name, "", "in the checkpoint, but not given to RunState")
        for name, part in live.items():
            kind = about.parts.get(name, {}).get("kind")
            if kind is None:
                yield Difference(name, "", "given to RunState, but not in the checkpoint")
            elif kind != part.kind:
                yield Difference(name, "", f"{kind} in the checkpoint, {part.kind} in the code")
            elif stem := _lacks(part, trees):
                there, here = ("for each rank", "once") if stem != "rank" else ("once", "for each rank")
                yield Difference(name, "", f"saved {there} in the checkpoint, {here} in the code (per_rank=)")
            else:
                built = {
                    path.removeprefix(f"{name}."): codec.decode(value, {})
                    for path, value in about.built.items()
                    if path.startswith(f"{name}.")
                }
                yield from _told(part, Saved(trees, name), built)
                then, now = about.world_size, self._position.processes
                if then != now:
                    yield from part.resized(Saved(trees, name), then, now)

    @no_garbage_collection()
    @torch.inference_mode(False)  # (what is made there cannot be trained on)
    def restore(
        self,
        reading: Reading,
        unfit: Mapping[str, AbstractSet[str]],
        overridden: Collection[str] = (),
        only: Collection[str] | None = None,
        each: Callable[[str, Callable[[], None]], None] = lambda _, do: do(),
    ) -> None:
        """Put what was read into the live objects: all of them, or none if one of them refuses.

        `unfit` names stay as they are; for the `overridden` settings the script's value stays. `each`
        does what it is given in every process, and raises what one of them refuses in all.
        """
        chosen = [
            part
            for part in self._parts
            if "" not in unfit.get(part.name, ()) and (only is None or part.name in only)
        ]
        code_wins = self._code_wins(overridden)
        # The counters of the position come last and refuse nothing, so they need no way back.
        late = [part for part in self._parts if isinstance(part, (_PositionPart, _RandomPart))]
        early = [part for part in chosen if part not in late]
        restoring = aliases.Restoring(self._aliases, chosen, reading.trees)
        for part in chosen:
            if unfit.get(part.name):
                reading.apart(part.name)
        # Its code may look at the weights, and it may refuse: so they have to be there, and a way back too.
        is_early = any(not part.is_torchs_own() for part in chosen)
        states = self._read_generators()
        held = [part.hold() for part in chosen if isinstance(part, OptimizerPart)]
        others = [part for part in self._parts if part not in late and not part.is_container]
        before = _copied(self._encoded(others), reading, is_early)
        _write_generators(states)

        def put_in(some: Sequence[Part]) -> None:
            for number, part in enumerate(some):
                if not part.is_torchs_own():
                    reading.fill([part.name for part in some[:number]])
                _restore(part, restoring.saved(part.name), unfit.get(part.name, set()), code_wins[part.name])
            self._set_last_lr(code_wins)

        try:
            each("the restore", lambda: put_in(early))
            each("the restore of the position", lambda: put_in([p for p in chosen if p in late]))
        except BaseException:
            restoring.undo()
            for put_back in held:
                put_back()
            for part in others:
                # One that refuses even its own state must not keep the others from theirs.
                with contextlib.suppress(StateMismatch):
                    _restore(part, Saved(before, part.name), set(), set())
            _write_generators(states)
            raise
        if reading.is_heir and only is None:
            self._begin_own_streams()
        try:
            each("the tensors", lambda: reading.fill([part.name for part in chosen]))
        except (Exception, KeyboardInterrupt) as exc:
            raise _half_filled(exc) from exc

    def _begin_own_streams(self) -> None:
        """Draw what rank 0 does not draw, in a process that has no state of its own in the checkpoint."""
        seed = f"{torch.initial_seed()}/{self._rank}/{self._position.step}"
        rng.begin_anew(seed)
        for part in self._parts:
            if isinstance(part, other_parts.GeneratorPart):
                rng.begin_own(part.live, f"{seed}/{part.name}")
        self._position.begin_own_streams(seed)

    def _read_generators(self) -> _States:
        own = [part.live for part in self._parts if _is_generator(part)]
        loaders = [part.live for part in self._parts if isinstance(part.live, LoaderPosition)]
        return (
            rng.collect(),
            [(generator, rng.read(generator)) for generator in own],
            [(loader, loader.generators.read()) for loader in loaders],
        )

    def names(self, wanted: str) -> list[str]:
        """Return the parts that `wanted` means: one by its whole name, or all of a slot."""
        names = [part.name for part in self._parts if not isinstance(part, (_PositionPart, _RandomPart))]
        found = [name for name in names if name == wanted or name.startswith(f"{wanted}.")]
        if not found:
            raise UsageError(f"there is no part {wanted!r}.", fix=f"the parts are: {', '.join(names)}.")
        return found

    def names_but_data(self) -> list[str]:
        """Return all parts but where the data and the random generators stand."""
        return [part.name for part in self._parts if _has_no_generator(part)]

    def _code_wins(self, overridden: Collection[str]) -> dict[str, set[str]]:
        wins: dict[str, set[str]] = {}
        for part in self._parts:
            prefix = f"{part.name}."
            keys = {path.removeprefix(prefix) for path in overridden if path.startswith(prefix)}
            wins[part.name] = keys & part.built.keys()
        for scheduler, optimizer in self._schedules():
            if "lr" in wins[optimizer.name]:
                wins[scheduler.name].add("base_lrs")
        return wins

    def _schedules(self) -> Iterator[tuple[Part, Part]]:
        for optimizer in self._parts:
            for part in self._parts:
                steps = part.name.startswith("scheduler") and getattr(part.live, "optimizer", None)
                if isinstance(optimizer, OptimizerPart) and steps is optimizer.live:
                    yield part, optimizer

    def _set_last_lr(self, code_wins: Mapping[str, AbstractSet[str]]) -> None:
        for scheduler, optimizer in self._schedules():
            if "base_lrs" in code_wins[scheduler.name]:
                scheduler.live._last_lr = [group["lr"] for group in optimizer.live.param_groups]


def _is_small(part: Part) -> bool:
    large = (ModulePart, OptimizerPart, other_parts.GeneratorPart, _PositionPart, _RandomPart)
    return not isinstance(part, large) and not part.is_container


def _is_as_before(name: str, then: Encoded, now: Encoded) -> bool:
    if then.json.get(name) != now.json.get(name):
        return False
    names = codec.tensor_names(then.json.get(name))
    return all(tensor_file.is_equal(then.tensors[key], now.tensors[key]) for key in names)


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    kinds = (bool, int, float, str, tuple, torch.Tensor)
    return {key: value for key, value in group.items() if isinstance(value, kinds)}


def _cloned(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in settings.items()
    }


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and bool(one == other)


def _write_generators(states: _States) -> None:
    everywhere, own, loaders = states
    rng.restore(everywhere)
    for generator, state in own:
        rng.write(generator, state)
    for loader, by_path in loaders:
        loader.generators.write(by_path)


def merge(into: Encoded, more: Encoded) -> None:
    """Add the parts of one tree to another."""
    into.json.update(more.json)
    into.tensors.update(more.tensors)
    into.aliases.update(more.aliases)
    into.key += more.key


def without_fleeting(tree: Json) -> Json:
    """Return the tree of a part without what is state only until it is used up."""
    # zero_grad() after a save loses nothing, and an evaluation only tells DDP to broadcast buffers again.
    return {k: v for k, v in tree.items() if k not in _FLEETING} if isinstance(tree, dict) else tree


def _told(part: Part, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
    try:
        yield from part.differences(saved, built)
    except (KeyError, IndexError, TypeError, AttributeError) as exc:
        # The bytes are as they were written, but it was not us who wrote them.
        yield Difference(part.name, "", f"its state in the checkpoint is not that of a {part.kind}: {exc!r}")


class Image(Protocol):
    """The copies that a save has made of the tensors, by the paths of their files."""

    def paths(self) -> Iterable[str]:
        """Return the paths of the files."""

    def tensors(self, path: str) -> dict[str, torch.Tensor]:
        """Return the tensors of a file, by their names."""


class Held:
    """What a save saw: the trees, and the image of their tensors."""

    def __init__(self, trees: Trees, taken: Image) -> None:
        self.trees = trees
        self._taken = taken
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}

    def tensor(self, stem: str, name: str) -> torch.Tensor | None:
        """Return a tensor as it was taken; None where other processes have it, or a part of it."""
        if stem not in self._tensors:
            paths = [path for path in self._taken.paths() if codec.stem_of(path) == stem]
            self._tensors[stem] = {n: t for path in paths for n, t in self._taken.tensors(path).items()}
        return self._tensors[stem].get(name)


def _is_of_rank(name: str, live: Any, per_rank: AbstractSet[str]) -> bool:
    # What each rank draws is its own, even where all of them were seeded alike.
    return name in per_rank or (name.startswith("extra.") and rng.is_generator(live))


def _lacks(part: Part, trees: Trees) -> str | None:
    """Return the tree that should have the part and has not, if so."""
    stem = part.rest_stem if isinstance(part, ModulePart) else part.stem
    return None if stem in trees and part.name in trees[stem].json else stem


def _not_filled(part: Part, tree: Encoded) -> set[str]:
    json = tree.json[part.name]
    # load_state_dict copies what is in the groups; a buffer that is not saved with a model may be read-only.
    others = [json.get(key) for key in ("groups", "others", "rest", "buffers")]
    found = {*codec.tensor_names(others)}
    if isinstance(part, OptimizerPart) and part.is_on_device():
        # Whether it is to stay in host memory depends on more than where it is now.
        names = codec.tensor_names(json["state"])
        found |= {name for name in names if name in tree.tensors and tree.tensors[name].is_cpu}
    return found


def _copied(trees: Trees, reading: Reading, is_all: bool) -> Trees:
    """Return the trees as a way back: with copies, but of what is filled when nobody can refuse any more."""
    copied = {}
    for stem, tree in trees.items():
        left = set() if is_all else tree.tensors.keys() & reading.names_in_place(stem)
        own = {name: tensor for name, tensor in tree.tensors.items() if name not in left}
        tensors = {**clones(own), **{name: tree.tensors[name] for name in left}}
        copied[stem] = replace(tree, tensors=tensors, kept=frozenset(left))
    return copied


def versions(trees: Trees) -> Versions:
    """Return what tells, without reading it, that nobody has written to a tensor since."""
    return {stem: (tree.tensors, _counts(tree.tensors)) for stem, tree in trees.items()}


def _counts(tensors: Mapping[str, torch.Tensor]) -> dict[str, int | None]:
    try:
        return {name: tensor._version for name, tensor in tensors.items()}
    except RuntimeError:
        return {name: _version(tensor) for name, tensor in tensors.items()}


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _is_untouched(before: Mapping[str, torch.Tensor], counts: Mapping[str, int | None], now: Encoded) -> bool:
    """Whether no tensor of a whole tree has been written to or replaced."""
    places = [[*map(torch.Tensor.data_ptr, tensors.values())] for tensors in (before, now.tensors)]
    versions = _counts(now.tensors)
    return (
        [*before] == [*now.tensors]
        and places[0] == places[1]
        and counts == versions
        and None not in counts.values()
    )


def _has_changed(
    part: str, stem: str, versions: Versions, held: Held, now: Trees, is_untouched: bool
) -> bool:
    then = without_fleeting(held.trees[stem].json.get(part))
    if then != without_fleeting(now[stem].json.get(part)):
        return True
    for name in () if is_untouched else codec.tensor_names(then):
        after = now[stem].tensors[name]
        tensors, counts = versions[stem]
        is_same = tensors[name].data_ptr() == after.data_ptr() and counts[name] == _version(after) is not None
        then_tensor = None if is_same else held.tensor(stem, name)
        if then_tensor is not None and not tensor_file.is_equal(then_tensor, after):
            return True
    return False


def check_readable(trees: Trees, built: Mapping[str, Json]) -> None:
    """Raise ValueError unless every value in the trees, and every setting, can be made."""
    for path, setting in built.items():
        try:
            codec.decode(setting, {})
        except ValueError as exc:
            raise ValueError(f"manifest.json: {path} was built of what is no value: {exc}") from exc
    for stem, tree in trees.items():
        try:
            codec.decode(tree.json, tree.tensors)
        except ValueError as exc:
            where = "ranks" if stem == "rank" else "state.json"
            raise ValueError(f"{where}: what it says of {stem} is not that: {exc}") from exc


def _restore(part: Part, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
    try:
        part.restore(saved, unfit, code_wins)
    except Exception as exc:
        raise StateMismatch(
            f"{part.name} refused its state: {type(exc).__name__}: {exc}.",
            fix=f"make {part.name} as it was made when the run was started, or leave it as it is in "
            f"the script with allow=[{part.name!r}]. Every object is as it was before the load.",
        ) from exc


def _half_filled(cause: BaseException) -> BaseException:
    text = "The objects in the script now hold a mixture of what they held and of the checkpoint."
    if not isinstance(cause, Exception):
        return type(cause)(text)
    kind = type(cause) if isinstance(cause, ResumableError) else CannotRead
    problem = cause.problem if isinstance(cause, ResumableError) else f"{type(cause).__name__}: {cause}."
    return kind(
        f"{problem} {text}",
        fix="train and save nothing with these objects: start the script again, and resume='auto' goes on "
        "from the newest intact checkpoint.",
    )


def named(slot: str, given: Any) -> dict[str, Any]:
    """Return the parts of a slot by name: one object has the slot's own."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        if slot == "extra":
            raise UsageError(
                f"extra is a {type(given).__name__}; each extra part needs a name.",
                fix='write extra={"name": part}.',
            )
        return {slot: _bare(slot, given)}
    for name in given:
        if not isinstance(name, str) or not name or "." in name or not name.isprintable():
            raise UsageError(
                f"{name!r} cannot name a part of {slot}.",
                fix="use printable text without a dot, which joins the names of parts and tensors.",
            )
    return {f"{slot}.{name}": _bare(slot, live) for name, live in given.items()}


def _bare(slot: str, live: Any) -> Any:
    # (a model stays in its wrappers, which have a state of their own)
    return wrappers.inside(live) if slot in ("optimizer", "scheduler") else live


def _storable(settings: Mapping[str, Any]) -> dict[str, Json]:
    found = {}
    for key, value in settings.items():
        # A setting that cannot be written down (a function) cannot be compared either.
        with contextlib.suppress(CannotStore):
            encoded = codec.encode(value)
            if not encoded.tensors:
                found[key] = encoded.json
    return found


def _mismatch(refused: Sequence[Difference]) -> StateMismatch:
    lines = [f"  {d.part}{d.name and '.'}{d.name}: {d.text}" for d in refused]
    allow = sorted({f"{d.part}{d.name and '.'}{d.name}" for d in refused})
    first = ""
    if any(" parameter groups in the checkpoint" in d.text for d in refused):
        # After add_param_group in mid-training, to leave the optimizer out would lose its moments.
        first = "make all groups before RunState.load (at a learning rate of 0, or frozen, until they are "
        first += "needed), or "
    return StateMismatch(
        "the checkpoint does not fit the objects in the script:\n" + "\n".join(lines),
        fix=f"{first}undo the change in the script, or go on without what does not fit (it then stays as the "
        f"script made it): allow={allow}. Patterns such as 'model.head.*' work too. Nothing was changed.",
    )


def _model_name(path: codec.Path) -> str:
    return ".".join(path).removeprefix("model.")


def _optimizer_name(path: codec.Path) -> str:
    # optimizer.D / state / exp_avg / layer1.weight -> D.exp_avg.layer1.weight
    part = path[0].removeprefix("optimizer").lstrip(".")
    rest = path[2:] if path[1] == "state" else path[1:]
    return ".".join([part, *rest] if part else rest)


NAMERS: dict[str, Callable[[codec.Path], str]] = {
    "model": _model_name,
    "optimizer": _optimizer_name,
}
"""By tree: what a tensor is called in its file, by its path."""
