"""Models: parameters and buffers under bare names, whatever they are wrapped in."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError, warn
from ..files import large_files, sharded_tensor, tensor_file, tensor_groups
from ..loaders import wrappers
from . import ddp_buckets
from .module_walk import Modules, buffers_of, persistent_buffers, shapes, walk
from .part import Difference, Part, Saved, same_device, shape
from .sharded import hooks_of_torch, refuse_split, reshard


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DataParallel, DistributedDataParallel, torch.compile and Fabric's wrapper."""
    while attribute := _wrapper_attribute(type(module)):
        module = getattr(module, attribute)
    return module


def _found_attribute(kind: type[nn.Module]) -> str | None:
    if issubclass(kind, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module"
    # Importing torch._dynamo takes a second; as long as it is not imported, nothing can be compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo and issubclass(kind, dynamo.OptimizedModule):
        return "_orig_mod"
    return wrappers.attribute_of(kind)


_wrapper_attribute: Callable[[Any], str | None] = cache(_found_attribute)
"""Returns the attribute that holds the module inside a wrapper of a class; None if it is no wrapper."""


def bare_name(root: nn.Module, walked: Modules | None = None) -> Callable[[str], str]:
    """Return a function that removes the wrappers inside `root` from a name; `walked`: all its modules."""
    walked = walk(root) if walked is None else walked
    if not any(map(_wrapper_attribute, {*map(type, dict(walked).values())})):
        return str
    wrapped = []
    for name, module in walked:
        if attribute := _wrapper_attribute(type(module)):
            wrapped.append(f"{name}.{attribute}." if name else f"{attribute}.")
    # The innermost first, so that the prefixes of the others still match.
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

    def __init__(self, name: str, live: nn.Module, stem: str = "extra", rank: int | None = None) -> None:
        super().__init__(name, unwrap(live), stem, rank)
        self._wrapped = live
        self._named_orders: dict[str, tuple[list[Tensor], list[str]]] = {}
        inside = self.live.named_parameters(), self.live.named_buffers()
        for path, value in chain(live.named_modules(), *inside):
            refuse_split(f"{name}.{path}" if path else name, value)
        walked = self._walk()
        parameters, modules = self.parameters(walked), self._modules(walked)
        buffers = buffers_of(modules)
        _refuse_lazy(name, {**parameters, **buffers})
        self.built = {"frozen": self._frozen(walked)}
        if meshes := _meshes(parameters):
            self.built["sharding"] = meshes
        self._buffers_of_the_script = buffers.keys()
        self._given = shapes(parameters), shapes(persistent_buffers(modules))
        self._guard: tensor_groups.Guard | None = None
        """Compares parameters with those that were as the script gave them."""
        self._group_as_given: tensor_groups.Group | None = None
        """What the encoder had of its state_dict when they last were."""

    def outgrown(self) -> Iterator[str]:
        """Yield that its tensors have changed since the script passed it."""
        group = self._encoded_group()
        if group is not None and group is self._group_as_given:
            # The encoder has just found that nothing but the values has changed.
            return
        walked = self._walk()
        parameters, modules = self.parameters(walked), self._modules(walked)
        if self._is_as_given(parameters, modules):
            # Of several processes only one may have encoded it for this save.
            self._group_as_given = group if self.rank is None and self.is_torchs_own() else None
            return
        given = {**self._given[0], **self._given[1]}
        now = {**shapes(parameters), **shapes(persistent_buffers(modules))}
        if names := [name for name in {**given, **now} if given.get(name) != now.get(name)]:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield (
                f"{self.name} has changed since it was given to RunState ({', '.join(names[:3])}{more}: "
                "new, gone or of another shape). A resume will be refused, because the script builds the "
                "original model. Build it before RunState.load as it is to be trained; only a buffer with "
                "persistent=False, and a tensor in state.vars or in a dict in extra=, may change. [R15]"
            )

    def _encoded_group(self) -> tensor_groups.Group | None:
        """Return what the encoder knows of its state_dict."""
        path = (self.name,) if self.stem == "model" else (self.name, "weights")
        return self.memos.get(self.stem, {}).get(path)

    def _is_as_given(self, parameters: Mapping[str, nn.Parameter], modules: Modules) -> bool:
        then, tensors = self._given[0], [*parameters.values()]
        if [*parameters] != [*then] or shapes(persistent_buffers(modules)) != self._given[1]:
            return False
        if self._guard is None or not self._guard(tensors):
            if shapes(parameters) != then:
                return False
            self._guard = tensor_groups.guard_of(tensors)
        return True

    def is_torchs_own(self) -> bool:
        """Whether no module in it has its own way to save or to load."""
        modules = [*self.live.modules()]
        for module in modules:
            if not _OWN.isdisjoint(vars(module)):
                return False
            for hooks in _HOOKS:
                if not hooks_of_torch(getattr(module, hooks, None) or {}):
                    return False
        return all(map(_is_torchs_kind, {*map(type, modules)}))

    def is_filled_in_place(self) -> bool:
        """Whether its state_dict contains the very tensors that it uses."""
        if not self.is_torchs_own():
            return False
        tensors = [*self.live.state_dict(keep_vars=True).values()]
        if not {*map(type, tensors)} <= _PLAIN:
            tensors = [*map(sharded_tensor.local, tensors)]
        return {*map(type, tensors)} <= _PLAIN and not any(map(Tensor.is_neg, tensors))

    def size(self) -> int:
        """Return the bytes of its parameters and buffers."""
        return sum([tensor.nbytes for tensor in (*self.live.parameters(), *self.live.buffers())])

    def collect(self) -> dict[str, Any]:
        """Return the weights, which any tool can read, and separately the rest of the state."""
        walked = self._walk()
        weights, values = self._weights(walked)
        modules = self._modules(walked)
        buffers = buffers_of(modules).items()
        rest = {
            "values": values,
            # A buffer with persistent=False can still change.
            "buffers": {name: one for name, one in buffers if name not in weights and name not in values},
            "eval": [name for name, module in dict(modules).items() if not module.training],
            "frozen": self._frozen(walked),
        }
        if found := self._orders(modules):
            rest["buckets"] = found
        if self.stem == "model":
            return {"model": weights, "extra": rest, **self.differing()}
        return {self.stem: {"weights": weights, **rest}, **self.differing()}

    def _walk(self) -> Modules:
        walked = walk(self.live)
        reshard(walked)
        return walked

    def _weights(self, walked: Modules | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return its state_dict by bare names: the tensors, and the other values."""
        bare = bare_name(self.live, walked)
        state = self._state()
        state = dict(state) if bare is str else {bare(name): value for name, value in state.items()}
        kinds = {*map(type, state.values())} - {Tensor, nn.Parameter}
        if all(map(sharded_tensor.is_sharded_kind, kinds)) and _EXTRA not in "".join(state):
            return state, {}
        values = {name: value for name, value in state.items() if not _is_weight(name, value)}
        return {name: value for name, value in state.items() if name not in values}, values

    @property
    def rest_stem(self) -> str:
        """The tree for everything that is not a weight."""
        return "extra" if self.stem == "model" else self.stem

    def outline(self) -> str:
        """Return the number of its tensors, and a hash of their names and shapes."""
        walked = self._walk()
        tensors = {**self.parameters(walked), **buffers_of(self._modules(walked))}
        texts = [f"{name} {value is not None and _outlined(value)}" for name, value in tensors.items()]
        return f"{len(tensors)} tensors ({large_files.digest(' '.join(texts).encode())[:8]})"

    def differing(self) -> dict[str, Any]:
        """Return the buffers that can differ by rank, and whether DDP will broadcast rank 0's."""
        if self.rank is None:
            return {}
        # After a pass with no_sync(), DDP does not broadcast them before the next pass.
        replicas = _replicas_of(self._modules())
        syncs = {path: bool(ddp.require_forward_param_sync) for path, ddp in replicas.items()}
        # Rank 0's too: without a shared disk, the weights' file is written by the first rank of each node.
        return {"rank": {"own_buffers": self.own_buffers(), "syncs": syncs}}

    def own_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that can differ by rank: batch statistics, and small ones."""
        # DDP broadcasts rank 0's before the next forward pass in training, but an evaluation may come first.
        kinds = nn.modules.batchnorm._NormBase
        bare = bare_name(self.live)
        return {
            bare(f"{name}.{leaf}" if name else leaf): buffer
            for name, module in self.live.named_modules()
            for leaf, buffer in module._buffers.items()
            if buffer is not None and (isinstance(module, kinds) or buffer.nbytes <= _SMALL)
            if not sharded_tensor.is_sharded(buffer)
        }

    def _modules(self, walked: Modules | None = None) -> Modules:
        """Return the modules by their bare names, a wrapper before the module that it wraps."""
        if walked is None or self._wrapped is not self.live:
            walked = walk(self._wrapped)
        bare = bare_name(self._wrapped, walked)
        found: dict[int, tuple[str, nn.Module]] = {}
        for name, module in walked:
            found.setdefault(id(module), (bare(name), module))
        return [*found.values()]

    def _orders(self, modules: Modules) -> dict[str, list[str]]:
        orders = {path: ddp_buckets.layout(replica) for path, replica in _replicas_of(modules).items()}
        return {path: self._names_of(path, order) for path, order in orders.items() if order}

    def _names_of(self, path: str, order: list[Tensor]) -> list[str]:
        # Cached: the order stays the same, and naming ten thousand parameters takes a while.
        if path not in self._named_orders or self._named_orders[path][0] is not order:
            names = {id(parameter): name for name, parameter in self.parameters().items()}
            self._named_orders[path] = order, [names[id(parameter)] for parameter in order]
        return self._named_orders[path][1]

    def parameters(self, walked: Modules | None = None) -> dict[str, nn.Parameter]:
        """Return the parameters by their bare names; a tied parameter has several."""
        walked = self._walk() if walked is None else walked
        bare = bare_name(self.live, walked)
        return {
            bare(f"{path}.{leaf}" if path else leaf): parameter
            for path, module in walked
            for leaf, parameter in module._parameters.items()
            if parameter is not None
        }

    def _frozen(self, walked: Modules) -> list[str]:
        # Only these are named: the names of ten thousand parameters take longer than their flags.
        bare = bare_name(self.live, walked)
        return [
            bare(f"{path}.{leaf}" if path else leaf)
            for path, module in walked
            for leaf, parameter in module._parameters.items()
            if parameter is not None and not parameter.requires_grad
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers by their bare names."""
        walked = self._walk()
        buffers = buffers_of(self._modules(walked))
        return {**self.parameters(walked), **{name: one for name, one in buffers.items() if one is not None}}

    def values_by_name(self, tree: Mapping[str, Any]) -> list[Any]:
        """Return the parts of its tree that are ordered by the names of its tensors."""
        return [tree if self.stem == "model" else tree.get("weights")]

    @property
    def prefix_in_optimizers(self) -> str:
        """The start of the names under which an optimizer keeps the state of the parameters."""
        prefix = self.name.partition(".")[2] if self.name.startswith("model") else self.name
        return f"{prefix}." if prefix else ""

    def _state(self) -> dict[str, Any]:
        is_own = type(self.live).state_dict is nn.Module.state_dict and "state_dict" not in vars(self.live)
        # Detaching ten thousand parameters takes time.
        state: dict[str, Any] = self.live.state_dict(keep_vars=True) if is_own else self.live.state_dict()
        return state

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield the names that are missing, new, or differ in shape, ties or requires_grad."""
        rest = saved.view(self.rest_stem)
        then = saved.view("model") if self.stem == "model" else rest["weights"]
        now, values = self._weights()
        changed = {*built["frozen"]} ^ {*self.built["frozen"]}
        both = [name for name in sorted(changed) if name in then and name in now]
        if any(map(Tensor.is_inference, now.values())) and self.is_torchs_own():
            for name in [name for name in now if name in then and now[name].is_inference()]:
                yield Difference(self.name, name, _INFERENCE)
        if [*then] == [*now] and all(map(operator.is_, then.values(), now.values())):
            # Tensors that are read in place are equal to themselves: skip ten thousand comparisons.
            then = now = {}
        for name in {**then, **now}:
            if text := _compared(then.get(name), now.get(name)):
                yield Difference(self.name, name, text)
        for name in sorted(rest["values"].keys() ^ values.keys()):
            where = "missing" if name in rest["values"] else "new"
            yield Difference(self.name, name, f"{where} in the code")
        # A name for the tie as a whole, so that allowing it still restores the tensors.
        ties = _ties(then)
        for names in ties ^ _ties(now):
            if names <= then.keys() & now.keys():
                where = "checkpoint" if names in ties else "code"
                yield Difference(self.name, " = ".join(sorted(names)), f"one tensor only in the {where}")
        for name in both:
            state = "frozen" if name in self.built["frozen"] else "trained"
            yield Difference(self.name, f"{name}.requires_grad", f"{state} in the code now, not so before")

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Copy the weights into the live tensors, and set the flags."""
        rest = saved.copy(self.rest_stem, same_device)
        weights = saved.view("model") if self.stem == "model" else rest["weights"]
        then = {**weights, **rest["values"]}
        bare = bare_name(self.live)
        state = self._state()
        names = [*map(bare, state)]
        # A tensor that is the live one itself is filled later.
        others = {}
        if not all(map(operator.is_, map(then.get, names), state.values())):
            others = {
                name: then[known]
                for name, known, live in zip(state, names, state.values(), strict=True)
                if known not in unfit and then[known] is not live
            }
        is_whole = len(others) == len(state)
        # Not a dict of our own: torch keeps the versions of the modules with this one.
        state.clear()
        state.update(others)
        if is_whole:
            self.live.load_state_dict(state)
        elif state:
            self.live.load_state_dict(state, strict=False)
        modules = self._modules()
        self._restore_buffers(modules, rest["buffers"], unfit)
        self._forget_buffers(modules, rest["buffers"].keys() | then.keys() | unfit)
        if self.stem != "rank":
            self._restore_own(modules, saved.of_rank(), unfit)
        for name, module in modules:
            module.training = name not in rest["eval"]
        if self._frozen(self._walk()) != rest["frozen"]:
            frozen = {*rest["frozen"]}
            for name, parameter in self.parameters().items():
                if name not in unfit and f"{name}.requires_grad" not in unfit:
                    parameter.requires_grad_(name not in frozen)
        if not unfit:
            self._restore_orders(modules, rest.get("buckets", {}))

    def _restore_orders(self, modules: Modules, saved: Mapping[str, list[str]]) -> None:
        for path, replica in _replicas_of(modules).items():
            parameters = self.parameters()
            order = [parameters[name] for name in saved[path]] if path in saved else None
            if not ddp_buckets.restore(replica, order):
                warn(
                    f"{self.name}: DistributedDataParallel is set up in another way than before, or this "
                    f"torch ({torch.__version__}) cannot restore the order in which it summed the gradients: "
                    "with three or more processes, results may differ in their last bits. [R28]"
                )

    def _restore_buffers(
        self,
        modules: Modules,
        saved: Mapping[str, Tensor | None],
        unfit: AbstractSet[str],
    ) -> None:
        owners = dict(modules)
        device = next((tensor.device for tensor in self.live.parameters()), None)
        for name, value in saved.items():
            owner, _, leaf = name.rpartition(".")
            if owner in owners and name not in unfit:
                _restore_buffer(owners[owner], leaf, value, device)

    def _restore_own(self, modules: Modules, own: Mapping[str, Any], unfit: AbstractSet[str]) -> None:
        self._restore_buffers(modules, own.get("own_buffers", {}), unfit)
        replicas = _replicas_of(modules)
        for path, syncs in own.get("syncs", {}).items():
            if path in replicas:
                replicas[path].require_forward_param_sync = syncs

    def _forget_buffers(self, modules: Modules, saved: AbstractSet[str]) -> None:
        """Delete the buffers that were registered after the checkpoint was made."""
        owners = dict(modules)
        for name in buffers_of(modules).keys() - saved - self._buffers_of_the_script:
            owner, _, leaf = name.rpartition(".")
            delattr(owners[owner], leaf)


def _replicas_of(modules: Modules) -> dict[str, nn.Module]:
    wrapper = nn.parallel.DistributedDataParallel
    return {name: module for name, module in modules if isinstance(module, wrapper)}


def _outlined(tensor: Tensor) -> str:
    return f"{shape(tensor)} in shards" if sharded_tensor.is_sharded(tensor) else shape(tensor)


def _meshes(parameters: Mapping[str, Any]) -> list[str]:
    """Return how parameters are sharded, each way once."""
    found = set()
    for one in parameters.values():
        if sharded_tensor.is_sharded(one):
            ways = [f"{type(p).__name__}({getattr(p, 'dim', '')})" for p in one.placements]
            found.add(f"{', '.join(ways)} over {' x '.join(map(str, one.device_mesh.mesh.shape))}")
    return sorted(found)


def _refuse_lazy(part: str, tensors: Mapping[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and nn.parameter.is_lazy(tensor):
            raise UsageError(f"{part}.{name} has no shape yet.", fix="run one batch through the model first.")


def _restore_buffer(module: nn.Module, leaf: str, value: Tensor | None, device: torch.device | None) -> None:
    live = module._buffers.get(leaf)
    if value is None or live is None or _compared(value, live):
        if value is not live:
            # It was registered, removed or resized during the training.
            fresh = value if value is None else value.to(device or value.device)
            module.register_buffer(leaf, fresh, persistent=False)
    elif not tensor_file.is_equal(value, live):
        # An expanded mask cannot be written to, so it is only copied if it differs.
        with torch.no_grad():
            live.copy_(value)


_INFERENCE = "made in torch.inference_mode(), so nothing can be loaded into it (make it outside)"
_PLAIN = {Tensor, nn.Parameter}
_SMALL = 256 << 10  # larger buffers are tables and masks, which stay the same
_EXTRA = "_extra_state"
_OWN = frozenset(
    {
        *("state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict"),
        *("get_extra_state", "set_extra_state"),
    }
)
_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def _is_torchs_kind(kind: type[nn.Module]) -> bool:
    for name in _OWN:
        # Not __module__, which functools.wraps copies from the method that it replaces.
        scope = getattr(getattr(kind, name), "__globals__", {})
        if not scope.get("__name__", "").startswith("torch.nn."):
            return False
    return True


def _is_weight(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and not name.endswith(_EXTRA)


def _compared(then: Tensor | None, now: Tensor | None) -> str | None:
    if then is None:
        return None if now is None else f"new in the code, {shape(now)}"
    if now is None:
        return f"missing in the code, {shape(then)}"
    if then.shape == now.shape and then.dtype == now.dtype:
        return None
    return f"{shape(then)} in the checkpoint, {shape(now)} in the code"


def _ties(tensors: Mapping[str, Tensor]) -> set[frozenset[str]]:
    places: dict[Any, set[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            places.setdefault(sharded_tensor.identity(tensor), set()).add(name)
    return {frozenset(names) for names in places.values() if len(names) > 1}
