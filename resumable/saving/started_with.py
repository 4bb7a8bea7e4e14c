"""The settings that a process started with, small enough for the history, without secrets."""

from __future__ import annotations

import json

import torch

from ..files.strict_json import Json
from ..training import Training


def started_with(training: Training) -> dict[str, Json]:
    """Return the settings of the parts and of the saves, the seed, and the sizes of the models."""
    options, parts = training.options, training.parts
    sizes = {
        f"{model.name}.parameters": sum(one.numel() for one in model.live.parameters())
        for model in parts.models
    }
    found = {
        **sizes,
        **dict([*parts.settings.items()][:_MOST]),
        "seed": torch.initial_seed(),
        "every": str(options.rules) or None,
        "keep": options.keep and options.keep.told(),
        "processes": training.crew.ranks.size,
    }
    return {name: value for name, value in found.items() if len(json.dumps(value)) <= _LONGEST}


_MOST, _LONGEST = 200, 200
