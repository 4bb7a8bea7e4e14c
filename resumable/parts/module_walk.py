"""The modules and tensors of a model, in less time than torch's own generators take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

Modules = Sequence[tuple[str, nn.Module]]
"""Modules by name."""


def walk(module: nn.Module, name: str = "", into: list[tuple[str, nn.Module]] | None = None) -> Modules:
    """Return what `named_modules(remove_duplicate=False)` yields."""
    found = [] if into is None else into
    if type(module).named_modules is not nn.Module.named_modules:
        found += module.named_modules(prefix=name, remove_duplicate=False)
        return found
    found.append((name, module))
    for key, one in module._modules.items():
        if one is not None:
            walk(one, f"{name}.{key}" if name else key, found)
    return found


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return what `parameters()` yields, but a shared one several times."""
    kind = type(module)
    if (kind.parameters, kind.named_parameters) != (nn.Module.parameters, nn.Module.named_parameters):
        return [*module.parameters()]
    return [one for _, inner in walk(module) for one in inner._parameters.values() if one is not None]


def buffers_of(modules: Modules) -> dict[str, Tensor | None]:
    """Return the buffers by name."""
    return {
        f"{name}.{leaf}" if name else leaf: buffer
        for name, module in modules
        for leaf, buffer in module._buffers.items()
    }


def persistent_buffers(modules: Modules) -> dict[str, Tensor]:
    """Return the buffers that must be there in a resume."""
    return {
        f"{name}.{leaf}" if name else leaf: buffer
        for name, module in modules
        for leaf, buffer in module._buffers.items()
        if buffer is not None and leaf not in module._non_persistent_buffers_set
    }


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shapes of the tensors that must be the same in a resume."""
    return dict(zip(tensors, map(attrgetter("shape", "dtype"), tensors.values()), strict=True))
