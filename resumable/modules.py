"""Models: parameters and buffers under bare names, whatever they are wrapped in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn

from .part import Difference, Part, Saved, shape


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DataParallel, DistributedDataParallel and torch.compile, however nested."""
    while attribute := _wrapper_attribute(module):
        module = getattr(module, attribute)
    return module


def _wrapper_attribute(module: nn.Module) -> str | None:
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    # Importing it costs a second; where it was not imported, nothing can be compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo and isinstance(module, dynamo.OptimizedModule):
        return "_orig_mod"
    return None


def bare_name(root: nn.Module) -> Callable[[str], str]:
    """Return the function that takes the wrappers inside `root` out of a name."""
    wrapped = [
        f"{name}.{attribute}." if name else f"{attribute}."
        for name, module in root.named_modules(remove_duplicate=False)
        if (attribute := _wrapper_attribute(module))
    ]
    # The innermost first: the prefixes of the others are then still as they were.
    wrapped.sort(key=len, reverse=True)

    def bare(name: str) -> str:
        for prefix in wrapped:
            if f"{name}.".startswith(prefix):
                kept = prefix[: prefix[:-1].rfind(".") + 1]
                name = (kept + f"{name}."[len(prefix) :])[:-1]
        return name

    return bare


class ModulePart(Part):
    """A model: parameters and buffers; which are frozen; which modules are in eval mode."""

    kind = "module"

    def __init__(self, name: str, live: nn.Module, stem: str = "extra") -> None:
        super().__init__(name, unwrap(live), stem)
        self.built = {"frozen": self._frozen()}

    def collect(self) -> dict[str, Any]:
        """Return the weights, which any tool can read, and apart from them what is only for us."""
        bare = bare_name(self.live)
        state = {bare(name): value for name, value in self.live.state_dict().items()}
        weights = {name: value for name, value in state.items() if _is_weight(name, value)}
        buffers = {bare(name): buffer for name, buffer in self.live.named_buffers()}
        rest = {
            "values": {name: value for name, value in state.items() if name not in weights},
            # Not persistent does not mean constant.
            "buffers": {name: buffer for name, buffer in buffers.items() if name not in state},
            "eval": [name for name, module in self._modules().items() if not module.training],
            "frozen": self._frozen(),
        }
        if self.stem == "model":
            return {"model": weights, "extra": rest}
        return {self.stem: {"weights": weights, **rest}}

    def _split(self, trees: Callable[[str], Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        rest = trees("extra")
        return (trees("model") if self.stem == "model" else rest["weights"]), rest

    def _modules(self) -> dict[str, nn.Module]:
        bare = bare_name(self.live)
        return {bare(name): module for name, module in self.live.named_modules()}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their bare names; a tied one has several."""
        bare = bare_name(self.live)
        named = self.live.named_parameters(remove_duplicate=False)
        return {bare(name): parameter for name, parameter in named}

    def _frozen(self) -> list[str]:
        return [name for name, value in self.parameters().items() if not value.requires_grad]

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield the names that are missing, new, of another shape, tied or frozen otherwise."""
        (then, _), (now, _) = self._split(saved.view), self._split(self.collect().__getitem__)
        for name in {**then, **now}:
            if text := _compared(then.get(name), now.get(name)):
                yield Difference(self.name, name, text)
        for names in _ties(then) ^ _ties(now):
            if names <= then.keys() & now.keys():
                where = "checkpoint" if names in _ties(then) else "code"
                text = f"one tensor with {', '.join(sorted(names)[1:])} only in the {where}"
                yield Difference(self.name, min(names), text)
        for name in sorted(set(built["frozen"]) ^ set(self.built["frozen"])):
            if name in then and name in now:
                state = "frozen" if name in self.built["frozen"] else "trained"
                yield Difference(self.name, name, f"{state} in the code now, not so before")

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Copy the weights into the live tensors, and set the flags."""
        then, rest = self._split(saved.view)
        bare = bare_name(self.live)
        state = self.live.state_dict()
        for name in list(state):
            if bare(name) in unfit:
                del state[name]
            else:
                state[name] = then[bare(name)] if bare(name) in then else rest["values"][bare(name)]
        if unfit:
            self.live.load_state_dict(state, strict=False)
        else:
            self.live.load_state_dict(state)
        for name, value in rest["buffers"].items():
            self._restore_buffer(name, value)
        for name, module in self._modules().items():
            module.training = name not in rest["eval"]
        for name, parameter in self.parameters().items():
            if name not in unfit:
                parameter.requires_grad_(name not in rest["frozen"])

    def _restore_buffer(self, name: str, value: Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        if (module := self._modules().get(owner)) is None:
            return
        live = module._buffers.get(leaf)
        if live is not None and live.shape == value.shape and live.dtype == value.dtype:
            with torch.no_grad():
                live.copy_(value)
        else:
            # Made during the training, or grown since.
            device = next((tensor.device for tensor in self.live.parameters()), value.device)
            module.register_buffer(leaf, value.to(device, copy=True), persistent=False)


def _is_weight(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and not name.endswith("_extra_state")


def _compared(then: Tensor | None, now: Tensor | None) -> str | None:
    if then is None:
        return None if now is None else f"new in the code, {shape(now)}"
    if now is None:
        return f"missing in the code, {shape(then)}"
    if nn.parameter.is_lazy(now) or (then.shape == now.shape and then.dtype == now.dtype):
        return None
    return f"{shape(then)} in the checkpoint, {shape(now)} in the code"


def _ties(tensors: Mapping[str, Tensor]) -> set[frozenset[str]]:
    places: dict[Any, set[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not nn.parameter.is_lazy(tensor):
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device)
            places.setdefault(place, set()).add(name)
    return {frozenset(names) for names in places.values() if len(names) > 1}
