"""Load a model's weights from a checkpoint or a file: all that fit, or none."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import StateMismatch, UsageError
from ..files import pin, tensor_file
from ..files.sharded_tensor import identity, is_sharded, local
from ..parts import boxes, models
from ..parts.models import ModulePart
from ..parts.part import shape
from . import weight_files
from .weight_files import Found, Weights


@dataclass(frozen=True, slots=True)
class Misfit:
    """In what weights and a model differ: names, with their dtypes and shapes."""

    missing: Mapping[str, str]
    """What the model has and the file lacks; it stays as it was."""
    unexpected: Mapping[str, str]
    """What the file has and the model lacks; it is left out."""
    reshaped: Mapping[str, str]
    """What has another shape in the file; it stays as it was."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped)

    def __str__(self) -> str:
        kinds = {"missing in the file": self.missing, "only in the file": self.unexpected}
        rows = [f"  {name}: {what}, {text}" for what, found in kinds.items() for name, text in found.items()]
        return "\n".join([*rows, *(f"  {name}: {text}" for name, text in self.reshaped.items())])


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    strict: bool = True,
    *,
    expect: str | None = None,
) -> Misfit:
    """Load a model's weights from a checkpoint, a run (its newest intact one), a .safetensors or a .pt file.

    Names fit whatever wraps the model, here or there: "module.", "_orig_mod." and "model." in front of them
    do not count. Everything is read and checked before the model is touched. Another dtype is converted to
    the model's.

    Args:
        model: The module to load into.
        path: A checkpoint's folder, a run directory, a .safetensors file, or a file of `torch.save`.
        strict: Whether what does not fit is an error, which names all of it. With False it is returned, and
            the rest is loaded.
        expect: Load only this content ("sha256:..."), as `Checkpoint.pin()` or, for a file, sha256sum prints
            it.

    >>> there = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> torch.save({"state_dict": torch.nn.DataParallel(there).state_dict()}, "there.pt")
    >>> here = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 5))
    >>> load_weights(here, "there.pt", strict=False).reshaped["1.bias"]
    'float32[1] in the file, float32[5] in the model'
    >>> torch.equal(here[0].weight, there[0].weight)
    True
    """
    expect = pin.checked(expect)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{model!r:.100} is no model.", fix="give it the torch.nn.Module to load into.")
    part = ModulePart("model", model, "model")
    live = part.collect()["model"]
    # torch copies into it without an error, and nothing is there.
    if nowhere := [name for name, value in live.items() if value.is_meta]:
        raise UsageError(
            f"{nowhere[0]} is on the meta device, where nothing has a content.",
            fix="give the model memory first: model.to_empty(device=...).",
        )
    fitting, misfit = weight_files.read(path, expect, partial(_fitting, live=live))
    if misfit and strict:
        raise StateMismatch(
            f"{os.fspath(path)} does not fit the model:\n{misfit}",
            fix="make the model as it was, or load what fits, and see what does not: strict=False.",
        )
    if live and not fitting:
        raise StateMismatch(
            f"nothing in {os.fspath(path)} fits the model:\n{misfit}",
            fix="look at the names: most likely this is another model.",
        )
    _put_in(part, fitting)
    return misfit


def _put_in(part: ModulePart, fitting: Weights) -> None:
    bare = models.bare_name(part.live)
    state = part.live.state_dict(keep_vars=True)
    found = {name: fitting[bare(name)] for name in state if bare(name) in fitting}
    own = {name: value for name, value in found.items() if not is_sharded(state[name])}
    before = {}
    if not part.is_torchs_own():
        # A loader of its own may fail when part of it has been loaded.
        before = {name: value.detach().clone() for name, value in state.items() if name in own}
    try:
        part.live.load_state_dict(own, strict=False)
    except BaseException:
        with torch.no_grad():
            for name, value in before.items():
                state[name].copy_(value)
        raise
    with torch.no_grad():
        for name in found.keys() - own.keys():
            for box in boxes.held(name, state[name]):
                box.of_local(local(state[name])).copy_(box.of_whole(found[name]))


class _Fitting(NamedTuple):
    tensors: Weights
    misfit: Misfit


def _fitting(found: Found, live: Weights) -> _Fitting:
    """Return what fits, read, by the names in the model."""
    known, misfit = _matched(found.shapes, live)
    taken = found.take({*known.values()})
    tensors = {name: taken[there] for name, there in known.items()}
    untied = _untied(tensors, live)
    rest = {name: value for name, value in tensors.items() if name not in untied}
    return _Fitting(rest, replace(misfit, reshaped={**misfit.reshaped, **untied}))


def _matched(found: Weights, live: Weights) -> tuple[dict[str, str], Misfit]:
    """Return which name in the file is which in the model, and what does not fit."""
    known = _pairs([*found], [*live])
    reshaped = {
        name: f"{shape(found[there])} in the file, {shape(live[name])} in the model"
        for name, there in known.items()
        if found[there].shape != live[name].shape
    }
    # A tensor with several names has to be there under one of them.
    places = {_place(live[name]) for name in known}
    missing = {
        name: shape(value)
        for name, value in live.items()
        if name not in known and (not value.numel() or _place(value) not in places)
    }
    used = {*known.values()}
    unexpected = {name: shape(value) for name, value in found.items() if name not in used}
    known = {name: there for name, there in known.items() if name not in reshaped}
    return known, Misfit(missing, unexpected, reshaped)


def _place(value: Tensor) -> Any:
    return identity(value)


def _untied(fitting: Weights, live: Weights) -> dict[str, str]:
    """Return the names of one tensor of the model that have different values in the file."""
    first: dict[Any, str] = {}
    found = {}
    for name, value in fitting.items():
        other = first.setdefault(_place(live[name]), name) if value.numel() else name
        if other != name and not tensor_file.is_equal(fitting[other], value):
            found[name] = f"another value than {other} in the file, the same tensor in the model"
    return found


def _pairs(there: Sequence[str], here: Sequence[str]) -> dict[str, str]:
    """Return the name in the file for each in a model: the same, or the only one that is equal when bare.

    >>> _pairs(["module._orig_mod.0.bias", "n"], ["0.bias"])
    {'0.bias': 'module._orig_mod.0.bias'}
    """
    found = {name: name for name in {*here} & {*there}}
    # If several names have the same bare name, none of them fits by it.
    count = Counter(map(_bare, here)), Counter(map(_bare, there))
    by_bare = {_bare(name): name for name in there}
    for name in here:
        bare = _bare(name)
        other = by_bare.get(bare)
        if name not in found and other and count[0][bare] == count[1][bare] == 1:
            found[name] = other
    return {name: found[name] for name in here if name in found}


def _bare(name: str) -> str:
    # Wrappers name what they wrap so, and people call their own attribute "model".
    inner = [word for word in name.split(".") if word not in ("module", "_orig_mod")]
    return ".".join(itertools.dropwhile(lambda word: word == "model", inner))
