"""Readable names for what differs between two records."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..files.strict_json import Json
from ..trace.trace_file import Difference

_GENERATORS = {"python": "Python's generator", "numpy": "NumPy's generator", "torch": "torch's generator"}
_PLACE = {
    "boundary": "the boundary",
    "epoch": "the epoch",
    "batch": "the batch's number",
    "step": "the step",
    "samples": "the count of the samples",
    "length": "where the training ends",
}


def of(found: Difference) -> str:
    """Return a readable name for what differs.

    >>> from resumable.trace.trace_file import At
    >>> at = At("batch", 0, 8, 8)
    >>> of(Difference(at, "optimizer", "exp_avg.layer2.weight", None, None))
    'optimizer exp_avg of layer2.weight'
    >>> of(Difference(at, "optimizer", "groups.0.lr", 0.1, 0.2))
    'optimizer lr of group 0'
    >>> of(Difference(at, "optimizer.G", "G.exp_avg.G.0.weight", None, None))
    'optimizer.G exp_avg of G.0.weight'
    >>> of(Difference(at, "random", "numpy.state.key", None, None))
    "NumPy's generator"
    """
    part, name = found.part, found.name
    # Of one among several its parts' names begin with its own.
    name = name.removeprefix(f"{part.partition('.')[2]}.") if "." in part else name
    if part == "batches":
        return "the batch"
    if part == "noted":
        return f"noted {name}"
    if part == "random":
        return generator(name)
    if part == "position":
        return _PLACE.get(name, f"the {name.replace('.', ' ')}")
    if part.startswith("optimizer"):
        return f"{part} {_of_optimizer(name)}".rstrip()
    return f"{part} {name}".rstrip()


def _of_optimizer(name: str) -> str:
    if group := re.fullmatch(r"groups\.(\d+)\.(\w+)", name):
        return f"{group[2]} of group {group[1]}"
    kind, _, parameter = name.partition(".")
    return f"{kind} of {parameter}" if parameter else kind


def generator(name: str) -> str:
    """Return a readable name for a global generator, given its name in a record."""
    word, _, rest = name.partition(".")
    return _GENERATORS.get(word, f"the generator of {word}:{rest}" if rest else f"the generator of {word}")


def unseeded(names: Sequence[str]) -> str:
    """Return a note that generators are not seeded, and that it does not matter.

    >>> unseeded(["NumPy's generator"])
    "NumPy's generator is not seeded; nothing that was trained depends on it"
    """
    verb, them = ("is", "it") if len(names) == 1 else ("are", "them")
    return f"{joined(names)} {verb} not seeded; nothing that was trained depends on {them}"


def joined(names: Sequence[str]) -> str:
    """Return names joined by commas and "and".

    >>> joined(["a"]), joined(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def values(found: Difference) -> str:
    """Return both values if they are plain and short, or an empty text."""
    one, other = (shown(value) for value in (found.before, found.after))
    if one and one == other:
        one, other = repr(found.before), repr(found.after)
    return f"{one} and {other}" if one and other else ""


def shown(value: Json) -> str:
    """Return the text of a plain value; an empty one for a tensor or a long value."""
    if isinstance(value, dict) or (isinstance(value, str) and value.startswith("#")):
        return ""
    # JSON has no number for these; they are stored as text.
    is_plain = isinstance(value, str) and value in ("inf", "-inf", "nan")
    text = f"{value:.6g}" if isinstance(value, float) else str(value) if is_plain else repr(value)
    return text if len(text) <= 40 else ""
