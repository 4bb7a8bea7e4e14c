"""What was imported from another tool, in the terms of the live parts: names, order, and what it lacks.

An import knows no code. Its optimizers go by the numbers of their parameters, as torch's own do, and a
part is of no kind. Here, where the live objects are, it becomes a checkpoint like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ..files import codec, tensor_file
from ..files.strict_json import Json, typed
from ..parts.models import ModulePart
from ..parts.optimizers import OptimizerPart
from ..parts.part import Difference, Part, Saved, shape
from ..parts.reading import Reading
from ..run.manifest import Manifest
from .weights import pairs

KIND = "imported"
"""The kind of a part that another tool has saved."""


def is_imported(about: Manifest) -> bool:
    """Whether a checkpoint was imported."""
    return any(part.get("kind") == KIND for part in about.parts.values())


def origin(about: Manifest) -> str:
    """Return what a checkpoint was imported from, as people call it."""
    return next((str(p["from"]) for p in about.parts.values() if p.get("kind") == KIND and "from" in p), "")


def adopt(reading: Reading, live: Sequence[Part], processes: int) -> None:
    """Turn what was read of an imported checkpoint into what the live parts would have saved.

    ValueError if it is nothing that an import writes.
    """
    if not is_imported(reading.about):
        return
    parts, built = dict(reading.about.parts), dict(reading.about.built)
    for part in live:
        if parts.get(part.name, {}).get("kind") != KIND:
            continue
        parts[part.name] = {**parts[part.name], "kind": part.kind}
        reading.apart(part.name)
        if isinstance(part, ModulePart):
            _adopt_module(reading, part)
            built[f"{part.name}.frozen"] = codec.encode(part.built["frozen"]).json
        elif isinstance(part, OptimizerPart):
            _name_parameters(reading, part)
            reading.misfits += _misfits(reading, part)
        elif isinstance(part.live, LRScheduler):
            reading.misfits += _of_another_schedule(reading, part)
    given = {part.name: part for part in live}
    # Weights that begin anew are no training that goes on.
    reading.lacking = [n for n, p in given.items() if n not in parts and not n.startswith("model")]
    reading.about = replace(reading.about, parts=parts, built=built, world_size=processes)
    reading.is_heir = False


def _adopt_module(reading: Reading, part: ModulePart) -> None:
    rest = reading.trees["extra"].json
    now = part.collect()
    if part.stem == "model":
        live, flags = now["model"], now["extra"]
        weights, values = typed(dict, reading.trees["model"].json[part.name]), typed(dict, rest[part.name])
    else:
        live, flags = now[part.stem]["weights"], now[part.stem]
        both = typed(dict, rest[part.name])
        weights = {name: value for name, value in both.items() if _is_tensor(value)}
        values = {name: value for name, value in both.items() if name not in weights}
    tensors = reading.trees["model" if part.stem == "model" else "extra"].tensors
    weights = _tied(_named(weights, [*live]), live, tensors)
    own = {"values": values, "buffers": {}, "eval": flags["eval"], "frozen": flags["frozen"]}
    if part.stem == "model":
        reading.trees["model"].json[part.name], rest[part.name] = weights, own
    else:
        rest[part.name] = {"weights": weights, **own}


def _is_tensor(value: Json) -> bool:
    return isinstance(value, dict) and value.keys() == {"$tensor"}


def _named(found: Mapping[str, Json], live: Sequence[str]) -> dict[str, Json]:
    """Return what was found by the live names: what wraps a model, there or here, does not count."""
    known = pairs([*found], live)
    if len(known) < len(live):
        prefix = _prefix([*found], live)
        inner = {name.removeprefix(prefix): name for name in found if name.startswith(prefix)}
        other = {name: inner[there] for name, there in pairs([*inner], live).items()}
        known = max(known, other, key=len)
    used = {*known.values()}
    rest = {name: value for name, value in found.items() if name not in used}
    named = {name: found[there] for name, there in known.items()}
    return named | {name: value for name, value in rest.items() if name not in named}


def _prefix(found: Sequence[str], live: Sequence[str]) -> str:
    """Return what stands before the names of a model that another module holds.

    >>> _prefix(["net.0.weight", "net.0.bias", "loss.weight"], ["0.weight", "0.bias"])
    'net.'
    """
    counts: dict[str, int] = {}
    names = {*live}
    for name in found:
        words = name.split(".")
        for at in range(1, len(words)):
            if ".".join(words[at:]) in names:
                prefix = ".".join(words[:at]) + "."
                counts[prefix] = counts.get(prefix, 0) + 1
    return max(counts, key=lambda prefix: counts[prefix], default="")


def _tied(
    found: dict[str, Json], live: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Json]:
    """Return the weights with what is one tensor in the model as one: others keep one name, or copies."""
    names_of: dict[Any, list[str]] = {}
    for name, tensor in live.items():
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device
        names_of.setdefault(place if tensor.numel() else name, []).append(name)
    for names in names_of.values():
        there = [found[name] for name in names if name in found]
        if len(names) > 1 and there and all(_are_equal(there[0], other, tensors) for other in there[1:]):
            found |= dict.fromkeys(names, there[0])
    return found


def _are_equal(one: Json, other: Json, tensors: Mapping[str, Tensor]) -> bool:
    return one == other or tensor_file.is_equal(codec.decode(one, tensors), codec.decode(other, tensors))


def _name_parameters(reading: Reading, part: OptimizerPart) -> None:
    """Give the numbers of an imported optimizer's parameters the names that they have here."""
    tree = typed(dict, reading.trees[part.stem].json[part.name])
    groups = typed(list, tree["groups"])
    names: dict[str, str] = {}
    for group, live in zip(groups, part.names(), strict=False):
        names |= dict(zip(typed(list, group["params"]), live, strict=False))
    for group in groups:
        # (one that is too many keeps its number, and is told by it)
        group["params"] = [names.get(number, f"parameter {number}") for number in group["params"]]
    tree["state"] = {
        key: {names.get(number, f"parameter {number}"): value for number, value in typed(dict, of).items()}
        for key, of in typed(dict, tree["state"]).items()
    }
    tree["on_host"] = []


def _misfits(reading: Reading, part: OptimizerPart) -> Iterator[Difference]:
    """Yield the state that has not the shape of its parameter: they are in another order, or others."""
    state = Saved(reading.trees, part.name).view(part.stem)["state"]
    parameters = part.parameters()
    told: set[str] = set()
    for key, by_name in state.items():
        for name in by_name.keys() & parameters.keys() - told if key in _SHAPED else ():
            value, parameter = by_name[name], parameters[name]
            if isinstance(value, Tensor) and value.numel() > 1 and value.shape != parameter.shape:
                told.add(name)
                text = (
                    f"{key} is {shape(value)} in the checkpoint, the parameter {shape(parameter)} in the code"
                )
                yield Difference(part.name, name, f"{text} (imported optimizers go by the order)")


# What torch's optimizers keep for each element of a parameter.
_SHAPED = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg"),
    *("acc_delta", "sum", "prev", "step_size", "ax"),
}


def _of_another_schedule(reading: Reading, part: Part) -> Iterator[Difference]:
    """Yield what tells that a schedule is of another class: torch would load it all the same."""
    then = Saved(reading.trees, part.name).view(part.stem)
    now = part.live.state_dict()
    there, here = ({k for k in tree if not k.startswith("_")} - _VARYING for tree in (typed(dict, then), now))
    if there != here:
        text = f"{_list(there - here)} only in the checkpoint, {_list(here - there)} only in the code"
        yield Difference(part.name, "", f"the state of another kind of schedule: {text}")


def _list(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


# What some versions of torch keep and others do not.
_VARYING = {"verbose", "default_min_lr", "mode_worse", "anneal_func", "scale_fn"}
