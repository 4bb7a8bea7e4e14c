"""Makes a checkpoint of ours of what another tool has saved; what has no place in it is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ..boundary import Boundary
from ..errors import CannotStore, RunExists, SaveFailed, Unsupported
from ..files import codec, large_files
from ..files.codec import Encoded
from ..files.large_files import Content
from ..files.strict_json import Json
from ..files.tensor_file import to_safetensors
from ..parts import capture
from ..parts.capture import Trees
from ..parts.optimizers import settings_of_groups
from ..parts.other_parts import settings
from ..run import environment
from ..run.checkpoint import Checkpoint, Stage
from ..run.directory import Run
from ..run.history import History
from ..run.manifest import Best, FileRecord, Goal, Manifest
from ..run.policy import counted
from . import other_tools as foreign
from .adopting import KIND
from .other_files import look
from .other_tools import Foreign, Left, Tree
from .torch_file import Other

NUMBER = 1
"""The save number of what is imported: a run begins with it."""


@dataclass(frozen=True, slots=True)
class Import:
    """A checkpoint that is ready to be written."""

    foreign: Foreign
    trees: Trees
    parts: Mapping[str, Json]
    built: Mapping[str, Json]

    @property
    def number(self) -> int:
        """The save number that it gets: a run begins with it."""
        return NUMBER

    def best(self) -> Best | None:
        """Return the best so far, if it is known what it is of."""
        goal, value = self.foreign.goal, self.foreign.value
        return Best(goal, value, NUMBER) if goal and value is not None else None

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return how many tensors each part has, and how many bytes they take."""
        found = {}
        for part in self.foreign.parts:
            names = {
                (stem, name)
                for stem, tree in self.trees.items()
                for name in codec.tensor_names(tree.json.get(part, {}))
            }
            found[part] = len(names), sum(self.trees[stem].tensors[name].nbytes for stem, name in names)
        return found


def read(
    source: str,
    renamed: Mapping[str, str],
    epoch: int | None = None,
    step: int | None = None,
    goal: Goal | None = None,
) -> Import:
    """Return what another tool has saved as a checkpoint of ours, which is not written yet.

    `epoch`, `step` and `goal` are what the caller knows better than the file.
    """
    found = look(source, renamed)
    if epoch is not None:
        found.epoch = epoch
        found.notes = [note for note in found.notes if "--epoch" not in note]
    if step is not None:
        found.step = step
        found.notes = [note for note in found.notes if "--step" not in note]
    if goal is not None:
        _take_goal(found, goal)
    if found.value is not None and not math.isfinite(found.value):
        found.goal = found.value = None
    if not any(name.partition(".")[0] == "model" for name in found.parts):
        raise Unsupported(
            f"nothing in {source} is a model: {_listed(found)}.",
            fix="say under which key its state_dict is: --part KEY=model.",
        )
    if not any(name.partition(".")[0] == "optimizer" for name in found.parts):
        found.notes.append("there is no state of an optimizer: it begins anew")
    if found.goal and found.value is not None and not found.is_best:
        found.notes.append(
            f"the file does not say whether the best {found.goal.metric} is this checkpoint's: "
            "restore('best') takes this one until a save is better"
        )
    found.notes.append(
        "the script's generators draw other numbers from here on, and the epoch's data begin anew"
    )
    return _made(found, source)


def _listed(found: Foreign) -> str:
    return ", ".join(f"{left.name} ({left.what})" for left in found.left[:9]) or "it is empty"


def _take_goal(found: Foreign, goal: Goal) -> None:
    """Give the best of the file, whatever it calls it, the name that the script will use."""
    if found.value is None:
        numbers = [left for left in found.left if left.name.startswith(("best_", "metric"))]
        for left in numbers[:1]:
            with suppress(ValueError):
                found.value = float(left.what)
                found.left.remove(left)
    found.goal = goal


def _made(found: Foreign, source: str) -> Import:
    trees: Trees = {}
    built: dict[str, Json] = {}
    _add(trees, "extra", {})
    values = {name: found.parts.pop(name) for name in [*found.parts] if name.startswith("vars.")}
    kept = {name.partition(".")[2]: _storable(found, name, value) for name, value in values.items()}
    variables = {name: value for name, value in kept.items() if value is not None}
    for name, tree in [*found.parts.items()]:
        built |= _add_part(trees, found, name, tree)
    parts: dict[str, Json] = {
        name: {"kind": KIND, "from": source, "key": found.origins[name], "tool": found.tool}
        for name in found.parts
    }
    _add(trees, "rank", {"vars": variables, "position": _position(found)})
    parts |= {"vars": {"kind": "container"}, "position": {"kind": "position"}}
    return Import(found, trees, parts, built)


def _add_part(trees: Trees, found: Foreign, name: str, tree: Any) -> dict[str, Json]:
    """Put a part into the trees, or tell that it cannot be; return how it was made."""
    slot, origin = name.partition(".")[0], found.origins[name]
    if slot == "model":
        _add_model(trees, name, tree, origin)
        return {}
    if slot == "optimizer" or (type(tree) is dict and {"state", "param_groups"} <= tree.keys()):
        content = _by_number(tree, origin, found)
        _add(trees, "optimizer" if slot == "optimizer" else "extra", {name: content})
        return _settings(name, _as_made(found, content["groups"]))
    kept = _storable(found, name, tree)
    if kept is None:
        del found.parts[name]
        return {}
    _add(trees, "extra", {name: kept})
    made = settings(kept, "") if slot in ("scheduler", "scaler") else {}
    own = {key: value for key, value in made.items() if key.rpartition(".")[2] not in _BY_TRAINING}
    return _settings(name, own)


# What the training has made of it, and no script says.
_BY_TRAINING = {"scale", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i"}


def _as_made(found: Foreign, groups: list[Tree]) -> Tree:
    """Return how an optimizer was made, as far as its state tells."""
    made = settings_of_groups(groups)
    if any({"max_momentum", "base_momentum"} & group.keys() for group in groups):
        # A schedule moves these too, and what they were at first is not kept.
        made.pop("momentum", None)
        made.pop("betas", None)
    if any("initial_lr" not in group for group in groups):
        # Without a scheduler nobody knows what it was at first: some scripts set it in each step.
        made.pop("lr", None)
        rates = ", ".join(
            f"{rate:.4g}" for rate in dict.fromkeys(g["lr"] for g in groups if _is_float(g.get("lr")))
        )
        found.notes.append(
            f"the learning rate goes on from {rates}, whatever the script made the optimizer with"
        )
    return made


def _is_float(value: Any) -> bool:
    return type(value) in (int, float)


def _add(trees: Trees, stem: str, content: Tree) -> None:
    encoded = codec.encode(content, capture.NAMERS.get(stem, ".".join))
    capture.merge(trees.setdefault(stem, Encoded({}, {}, {})), encoded)


def _add_model(trees: Trees, name: str, tree: Any, origin: str) -> None:
    for path, other in foreign.others_in(tree):
        raise foreign.refuse_object(origin, path, other)
    if not foreign.is_state_dict(tree):
        raise Unsupported(
            f"{origin} is {foreign.described(tree)}, and no state_dict of a model.",
            fix="say which key is: --part KEY=model.",
        )
    bare = _bare([*tree])
    weights = {bare.get(key, key): value for key, value in tree.items() if foreign.is_tensor(value)}
    rest = {bare.get(key, key): value for key, value in tree.items() if not foreign.is_tensor(value)}
    _add(trees, "model", {name: weights})
    _add(trees, "extra", {name: rest})


def _bare(names: list[str]) -> dict[str, str]:
    """Return the names without what DataParallel and torch.compile have put in front of all of them."""
    bare = {name: name for name in names}
    while any(bare.values()):
        firsts = {name.partition(".")[0] for name in bare.values()}
        if firsts not in ({"module"}, {"_orig_mod"}) or "" in {n.partition(".")[2] for n in bare.values()}:
            break
        bare = {name: short.partition(".")[2] for name, short in bare.items()}
    return bare


def _by_number(tree: Tree, origin: str, found: Foreign) -> Tree:
    """Return the state of an optimizer as ours, with the parameters' numbers where their names stand."""
    for path, other in foreign.others_in(tree):
        raise foreign.refuse_object(origin, path, other)
    if type(tree) is not dict or not {"state", "param_groups"} <= tree.keys():
        raise _no_state(origin, tree)
    groups, state = tree["param_groups"], tree["state"]
    if type(groups) is not list or type(state) is not dict or not all(type(g) is dict for g in groups):
        raise _no_state(origin, tree)
    numbers: dict[Any, str] = {}
    for group in groups:
        if type(group.get("params")) is not list or not {*map(type, group["params"])} <= {int}:
            raise _no_state(origin, tree)
        # (before torch 1.5 they were addresses; their order has always been that of the parameters)
        numbers |= {number: str(len(numbers) + at) for at, number in enumerate(group["params"])}
    if not {*map(type, state.values())} <= {dict}:
        raise _no_state(origin, tree)
    of_others = [number for number in state if number not in numbers]
    if of_others:
        found.left.append(
            Left(f"{origin}.state", counted(len(of_others), "state"), "of no parameter of its groups")
        )
    by_key: dict[str, Tree] = {}
    for number, values in state.items():
        for key, value in values.items() if number in numbers else ():
            by_key.setdefault(str(key), {})[numbers[number]] = value
    own = [
        {"params": [numbers[number] for number in group["params"]]}
        | {str(key): value for key, value in group.items() if key not in ("params", "param_names")}
        for group in groups
    ]
    empty: Tree = {"others": {}, "rest": {}, "on_host": [], "loose": {}, "gradients": {}}
    return {"groups": own, "state": by_key, **empty}


def _no_state(origin: str, tree: Any) -> Unsupported:
    if type(tree) is Other:
        return foreign.refuse_object(origin, "", tree)
    return Unsupported(
        f"{origin} is {foreign.described(tree)}, and not what an optimizer's state_dict() returns.",
        fix="save what that returns, or leave it out: --part KEY= (nothing).",
    )


def _storable(found: Foreign, name: str, tree: Any) -> Any:
    """Return what of a part can be stored; None, and it is told, if nothing can."""
    for path, other in foreign.others_in(tree):
        found.left.append(Left(f"{found.origins[name]}.{path}".rstrip("."), other.name, foreign.OBJECT))
    kept = foreign.without_others(tree)
    problem = next((path for path, _ in foreign.others_in(kept)), None)
    if problem is not None:
        found.leave(found.origins[name], tree, f"{problem or 'it'} in it is an object of a class")
        return None
    try:
        codec.encode(kept)
    except CannotStore as exc:
        found.leave(found.origins[name], tree, exc.problem)
        return None
    return kept


def _settings(name: str, made: Tree) -> dict[str, Json]:
    found = {}
    for key, value in made.items():
        with suppress(CannotStore):
            encoded = codec.encode(value)
            if not encoded.tensors:
                found[f"{name}.{key}"] = encoded.json
    return found


def _position(found: Foreign) -> Tree:
    counts = {"epoch": found.epoch, "batch": 0, "step": found.step, "samples": 0}
    rest: Tree = {
        "body_start": None,
        "stepped": None,
        "seed": None,
        "splits": {},
        "spikes": [0, 0],
        "iterables": {},
    }
    return {"boundary": found.boundary, **counts, "metrics": _metrics(found), **rest}


def _metrics(found: Foreign) -> dict[str, float]:
    return {found.goal.metric: found.value} if found.goal and found.value is not None else {}


def write(run: Run, made: Import) -> Checkpoint:
    """Write the checkpoint, as the first of a run."""
    refuse_used(run)
    run.acquire()
    try:
        refuse_used(run)
        about = _about(made, run.identity())
        stage = Stage(run.folder, about.number, about.step)
        try:
            with stage.making():
                done = _commit(run, stage, about, made)
        except OSError as exc:
            if isinstance(exc, SaveFailed):
                raise
            raise stage.failed(exc) from exc
        _tell(run, done, made)
        return done
    finally:
        run.release()


def refuse_used(run: Run) -> None:
    """Raise RunExists if there are checkpoints already."""
    if numbers := run.numbers():
        raise RunExists(
            f"{run} holds {len(numbers)} checkpoint{'s' * (len(numbers) != 1)} already.",
            fix="give the import a run directory of its own.",
        )


def _about(made: Import, run_id: str) -> Manifest:
    found = made.foreign
    assert found.step is not None
    return Manifest(
        number=NUMBER,
        parent=None,
        run_id=run_id,
        saved=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        boundary=Boundary(found.boundary),
        epoch=found.epoch,
        batch=0,
        step=found.step,
        samples=0,
        metrics=_metrics(found),
        best=made.best(),
        files={},
        parts=made.parts,
        built=made.built,
        environment={},
    )


def _commit(run: Run, stage: Stage, about: Manifest, made: Import) -> Checkpoint:
    written: dict[str, large_files.Written] = {}
    # One after the other: each is in memory twice while it is written.
    for path, group in codec.to_groups(made.trees).items():
        written |= stage.write({path: Content(to_safetensors(group.tensors, group.aliases))})
    written |= stage.write({path: Content(text) for path, text in codec.to_texts(made.trees).items()})
    about = stage.close(about, {file: FileRecord(one.size, one.digest) for file, one in written.items()})
    with run.adding(about):
        return stage.publish(about)


def _tell(run: Run, done: Checkpoint, made: Import) -> None:
    run.point("newest", done.path)
    if done.about.best:
        run.point("best", done.path)
    history = History(run)
    history.begin(environment.attempt(), None)
    history.saved(NUMBER, f"imported from {next(iter(made.parts.values()))['from']}")
    history.ended("imported", epoch=done.about.epoch, batch=0, step=done.about.step)
