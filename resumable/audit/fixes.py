"""Says where the script can keep what a resume would lose."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..objects import contents, kinds

_SLOTS: tuple[tuple[str, type], ...] = (
    ("optimizer", torch.optim.Optimizer),
    ("scheduler", LRScheduler),
    ("scaler", torch.amp.GradScaler),
    ("model", torch.nn.Module),
)
_IN_A_VARIABLE = "keep what it counts in a variable of the script, and make it again from that in each body"
_WITH_STATE = "give its class a state_dict() and a load_state_dict(), and name it in extra="
_OF_LOST = (
    ("made before the loop", f"loop over state.batches(); else {_IN_A_VARIABLE}"),
    ("made in the loop", "make it before the loop"),
    ("the loop has imported it", "import it first in the script"),
    ("behind the yield", "do it before the yield"),
    ("in an object of a library", "keep it in a variable of the script, and set it from there in each body"),
    ("an iterator", _IN_A_VARIABLE),
    ("a generator", _IN_A_VARIABLE),
)


def of_lost(why: str) -> str:
    """Return what to do about a variable that no checkpoint can have.

    >>> of_lost("a function that was made in the loop")
    'make it before the loop'
    """
    return next((fix for part, fix in _OF_LOST if part in why), _WITH_STATE)


def of_value(code: str, value: Any) -> str:
    """Return where an object or a value can be kept; `code` is the expression for it.

    >>> of_value("ema.decay", 0.9), of_value("order", [3, 1])
    ('state.vars["decay"]', 'extra={"order": order}')
    """
    words = re.findall(r"[^\W\d]\w*", code)
    leaf = words[-1] if words else "state"
    for slot, base in _SLOTS:
        if isinstance(value, base):
            return f"{slot}={code}"
    if contents.is_atom(value) or kinds.kind_of(value) in ("tensor", "array", "enum"):
        return f'state.vars["{leaf}"]'
    return f'extra={{"{leaf}": {code}}}'


def counted(count: int, what: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "tensor"), counted(3, "tensor")
    ('1 tensor', '3 tensors')
    """
    return f"{count:,} {what}" + "s" * (count != 1)
