"""Reads and restores the stages of a WebDataset that draw an order from a number that they hold.

Such a stage makes a generator from its seed, and from the number of its passes, whenever an epoch begins:
these numbers are its state, as the words of a Mersenne twister are a generator's. All names of webdataset
are here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_NUMBERS = ("seed", "epoch")


def kinds() -> tuple[type, ...]:
    """Return the classes of such stages; none if webdataset has not been imported."""
    filters = sys.modules.get("webdataset.filters")
    shards = sys.modules.get("webdataset.shardlists")
    if filters is None or shards is None:
        return ()
    return filters.FilterFunction, filters.detshuffle, shards.ResampledShards, shards.SimpleShardList


def is_stage(value: object) -> bool:
    """Whether an object is such a stage."""
    return issubclass(type(value), kinds()) and (bool(_numbers(value)) or is_unrepeatable(value))


def _numbers(stage: Any) -> dict[str, Any]:
    held = vars(stage)
    if _is_filter(stage):
        held = stage.kw if _is_shuffle(stage) else {}
    return {name: held[name] for name in _NUMBERS if type(held.get(name)) in (int, float, str)}


def _is_filter(stage: object) -> bool:
    return isinstance(stage, kinds()[:1])


def _is_shuffle(stage: Any) -> bool:
    # A filter may be any object that can be called.
    return getattr(stage.f, "__name__", "") == "_shuffle"


def read(stage: Any) -> dict[str, Any]:
    """Return the numbers that a stage draws from."""
    return _numbers(stage)


def write(stage: Any, state: Mapping[str, Any]) -> None:
    """Restore the numbers of a stage."""
    held = stage.kw if _is_filter(stage) else vars(stage)
    held.update({name: state[name] for name in _NUMBERS if name in state})


def is_unrepeatable(stage: Any) -> bool:
    """Whether a stage draws its order from the clock or from the system's entropy."""
    if not issubclass(type(stage), kinds()):
        return False
    if _is_filter(stage):
        size = stage.args[0] if stage.args else stage.kw.get("bufsize", 1)
        is_seeded = stage.kw.get("seed") is not None or stage.kw.get("rng") is not None or len(stage.args) > 2
        return _is_shuffle(stage) and bool(size) and not is_seeded
    return getattr(stage, "deterministic", True) is False
