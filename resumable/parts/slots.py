"""Checks that each slot of `RunState.load` was given an object of its kind, and names the parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..errors import UsageError
from ..loaders import kinds, wrappers
from ..loaders.generators import search
from .models import ModulePart
from .optimizers import OptimizerPart, inner_optimizers

_EXPECTED = {
    "model": "a torch.nn.Module",
    "optimizer": "an optimizer, such as one of torch.optim",
    "scheduler": "a scheduler, such as one of torch.optim.lr_scheduler",
    "scaler": "a torch.amp.GradScaler",
}


def named(slot: str, given: Any) -> dict[str, Any]:
    """Return the parts of a slot by name: a single object has the name of the slot."""
    if given is None:
        return {}
    is_single = not isinstance(given, Mapping) or isinstance(given, nn.Module)
    if is_single or (slot in _EXPECTED and kinds.is_state_dict(given)):
        if slot == "extra":
            raise UsageError(
                f"extra is {kinds.described(given)}; each extra part needs a name.",
                fix='write extra={"name": part}.',
            )
        return _with_inner({slot: _bare(slot, given)})
    for name in given:
        if not isinstance(name, str) or not name or "." in name or not name.isprintable():
            raise UsageError(
                f"{name!r} cannot name a part of {slot}.",
                fix="use printable text without a dot, which joins the names of parts and tensors.",
            )
    return _with_inner({f"{slot}.{name}": _bare(slot, live) for name, live in given.items()})


def _with_inner(given: dict[str, Any]) -> dict[str, Any]:
    """Return these parts, and before each optimizer those by which it steps and whose state it leaves out."""
    found: dict[str, Any] = {}
    for name, live in given.items():
        for attribute, inner in inner_optimizers(live).items():
            known = next((other for other, one in given.items() if one is inner), f"{name}.{attribute}")
            found.setdefault(known, inner)
        found.setdefault(name, live)
    return found


def _bare(slot: str, live: Any) -> Any:
    # A model stays in its wrappers, which have a state of their own.
    return wrappers.inside(live) if slot in ("optimizer", "scheduler") else live


def refuse_others(name: str, live: Any) -> None:
    """Raise UsageError for an object that does not belong in the slot that it was given to."""
    slot = name.partition(".")[0]
    if slot not in _EXPECTED:
        return
    has_state = hasattr(live, "state_dict") and hasattr(live, "load_state_dict")
    found = kinds.slots_of(live)
    is_of_slot = isinstance(live, nn.Module) is (slot == "model") and not isinstance(live, type)
    if has_state and is_of_slot and (slot in found or not found):
        return
    raise UsageError(
        f"{name} is {kinds.described(live)}, and should be {_EXPECTED[slot]}.", fix=_fix(slot, live, found)
    )


def _fix(slot: str, live: Any, found: Sequence[str]) -> str:
    if found:
        return f"give this object as {found[0]}=, and {slot}= {_EXPECTED[slot]}."
    if kinds.is_state_dict(live):
        return f"give the object itself, not its state_dict(): {slot}={slot}."
    if isinstance(live, type):
        return f"give an object of the class: {slot}={live.__name__}(...)."
    if isinstance(live, (list, tuple)):
        return f"give one alone ({slot}={slot}), or several by name: {slot}={{'a': ..., 'b': ...}}."
    return f"give {slot} such an object or a dict of named ones; everything else goes into extra={{...}}."


def refuse_foreign_optimizers(
    models: Sequence[ModulePart], optimizers: Sequence[OptimizerPart], others: Iterable[Any] = ()
) -> None:
    """Raise UsageError if the optimizers train copies of the models, or other models.

    `others`: the other objects that were given, whose tensors are trained on purpose too.

    Copies in another dtype, and tensors that are no nn.Parameter, are trained on purpose (master weights).
    """
    given = [model.parameters().values() for model in models]
    own = {id(parameter): parameter for parameters in given for parameter in parameters}
    trained = [one for part in optimizers for one in part.parameters().values()]
    if not own or not trained or any(id(one) in own for one in trained):
        return
    if {one.dtype for one in trained} <= {one.dtype for one in own.values()} and all(
        isinstance(one, nn.Parameter) for one in trained
    ):
        if {id(one) for one in search.inside([*others], Tensor)} & {*map(id, trained)}:
            return
        names = ", ".join(part.name for part in optimizers)
        raise UsageError(
            f"{names} trains {len(trained)} parameters, and none of them belongs to "
            f"{', '.join(model.name for model in models)}.",
            fix="make the optimizer of the parameters of the model that you give: after the model is made, "
            "copied or loaded, not before. If it trains something else, give that too, as extra={...}.",
        )
