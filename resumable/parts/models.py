"""Models: parameters and buffers under bare names, whatever they are wrapped in."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Unsupported, UsageError, warn
from ..files import large_files, tensor_file
from ..loaders import wrappers
from . import ddp_buckets
from .part import Difference, Part, Saved, same_device, shape


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DataParallel, DistributedDataParallel, torch.compile and Fabric's wrapper."""
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
    return wrappers.attribute_of(module)


def bare_name(root: nn.Module) -> Callable[[str], str]:
    """Return the function that takes the wrappers inside `root` out of a name."""
    return _bare_name(root.named_modules(remove_duplicate=False))


def _bare_name(walked: Iterable[tuple[str, nn.Module]]) -> Callable[[str], str]:
    wrapped = [
        f"{name}.{attribute}." if name else f"{attribute}."
        for name, module in walked
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
        self._wrapped = live
        self._named_orders: dict[str, tuple[list[Tensor], list[str]]] = {}
        self._refuse_split()
        self._refuse_lazy()
        self.built = {"frozen": self._frozen()}
        self._buffers_of_the_script = self._buffers().keys()
        self._given = self._shapes()

    def _shapes(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return the shapes of the tensors that have to be the same at a resume."""
        persistent = {
            f"{name}.{leaf}" if name else leaf: buffer
            for name, module in self._modules()
            for leaf, buffer in module._buffers.items()
            if buffer is not None and leaf not in module._non_persistent_buffers_set
        }
        return {
            name: (live.shape, live.dtype) for name, live in (*self._named_parameters(), *persistent.items())
        }

    def outgrown(self) -> Iterator[str]:
        """Yield that it has other tensors than it was given with."""
        now = self._shapes()
        if names := [name for name in {**self._given, **now} if self._given.get(name) != now.get(name)]:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            yield (
                f"{self.name} has changed since it was given to RunState ({', '.join(names[:3])}{more}: "
                "new, gone or of another shape). A resume will be refused, because the script builds the "
                "original model. Build it before RunState.load as it is to be trained; only a buffer with "
                "persistent=False, and a tensor in state.vars or in a dict in extra=, may come, go and grow."
            )

    def is_torchs_own(self) -> bool:
        """Whether no module in it has a way of its own to save or to load."""
        return all(map(_is_torchs_own, self.live.modules()))

    def is_filled_in_place(self) -> bool:
        """Whether its state_dict names the very tensors that it uses."""
        tensors = self.live.state_dict(keep_vars=True).values() if self.is_torchs_own() else ()
        plain = (type(value) in (Tensor, nn.Parameter) and not value.is_neg() for value in tensors)
        return self.is_torchs_own() and all(plain)

    def size(self) -> int:
        """Return the bytes of its parameters and buffers."""
        return sum(tensor.nbytes for tensor in (*self.live.parameters(), *self.live.buffers()))

    def _refuse_split(self) -> None:
        walked = [self._wrapped.named_modules(), self.live.named_parameters(), self.live.named_buffers()]
        for path, value in chain(*walked):
            refuse_split(f"{self.name}.{path}" if path else self.name, value)

    def _refuse_lazy(self) -> None:
        for name, tensor in [*self.parameters().items(), *self._buffers().items()]:
            if tensor is not None and nn.parameter.is_lazy(tensor):
                raise UsageError(
                    f"{self.name}.{name} has no shape yet.",
                    fix="run one batch through the model first.",
                )

    def collect(self) -> dict[str, Any]:
        """Return the weights, which any tool can read, and apart from them what is only for us."""
        bare = bare_name(self.live)
        state = {bare(name): value for name, value in self._state().items()}
        values: dict[str, Any] = {}
        if not {*map(type, state.values())} <= {Tensor, nn.Parameter} or _EXTRA in "".join(state):
            values = {name: value for name, value in state.items() if not _is_weight(name, value)}
        weights = {name: value for name, value in state.items() if name not in values} if values else state
        rest = {
            "values": values,
            # Not persistent does not mean constant.
            "buffers": {name: buffer for name, buffer in self._buffers().items() if name not in state},
            "eval": [name for name, module in dict(self._modules()).items() if not module.training],
            "frozen": self._frozen(),
        }
        if found := self._orders():
            rest["buckets"] = found
        if self.stem == "model":
            return {"model": weights, "extra": rest, **self.differing()}
        return {self.stem: {"weights": weights, **rest}, **self.differing()}

    @property
    def rest_stem(self) -> str:
        """The tree for what is not a weight."""
        return "extra" if self.stem == "model" else self.stem

    def outline(self) -> str:
        """Return how many tensors it has, and a digest of their names and shapes."""
        tensors = {**self.parameters(), **self._buffers()}
        texts = [f"{name} {value is not None and shape(value)}" for name, value in tensors.items()]
        return f"{len(tensors)} tensors ({large_files.digest(' '.join(texts).encode())[:8]})"

    def differing(self) -> dict[str, Any]:
        """Return what each rank has for itself: small buffers, and whether they are soon to be rank 0's."""
        if self.rank is None:
            return {}
        # After a pass with no_sync() it does not broadcast them before the next one.
        syncs = {path: bool(ddp.require_forward_param_sync) for path, ddp in self._replicas().items()}
        # (rank 0's too: where no disk is shared, those with the weights are of whoever leads on a node)
        return {"rank": {"own_buffers": self.own_buffers(), "syncs": syncs}}

    def own_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that can differ by rank: statistics of batches, and what is small."""
        # DistributedDataParallel makes them rank 0's before the next forward pass in training, but an
        # evaluation may come first.
        kinds = nn.modules.batchnorm._NormBase
        bare = bare_name(self.live)
        return {
            bare(f"{name}.{leaf}" if name else leaf): buffer
            for name, module in self.live.named_modules()
            for leaf, buffer in module._buffers.items()
            if buffer is not None and (isinstance(module, kinds) or buffer.nbytes <= _SMALL)
        }

    def _split(self, trees: Callable[[str], Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        rest = trees(self.rest_stem)
        return (trees("model") if self.stem == "model" else rest["weights"]), rest

    def _modules(self) -> list[tuple[str, nn.Module]]:
        # A wrapper has the name of what it wraps, which comes after it.
        bare = bare_name(self._wrapped)
        return [(bare(name), module) for name, module in self._wrapped.named_modules()]

    def _buffers(self) -> dict[str, Tensor | None]:
        return {
            f"{name}.{leaf}" if name else leaf: buffer
            for name, module in self._modules()
            for leaf, buffer in module._buffers.items()
        }

    def _replicas(self) -> dict[str, nn.Module]:
        wrapper = nn.parallel.DistributedDataParallel
        return {name: module for name, module in self._modules() if isinstance(module, wrapper)}

    def _orders(self) -> dict[str, list[str]]:
        orders = {path: ddp_buckets.layout(replica) for path, replica in self._replicas().items()}
        return {path: self._names_of(path, order) for path, order in orders.items() if order}

    def _names_of(self, path: str, order: list[Tensor]) -> list[str]:
        # It stays for the rest of the training, and ten thousand names take a while.
        if path not in self._named_orders or self._named_orders[path][0] is not order:
            names = {id(parameter): name for name, parameter in self._named_parameters()}
            self._named_orders[path] = order, [names[id(parameter)] for parameter in order]
        return self._named_orders[path][1]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their bare names; a tied one has several."""
        return dict(self._named_parameters())

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        # In one walk: torch's own takes a new one for every question, and each takes longer than the answer.
        walked = [*self.live.named_modules(remove_duplicate=False)]
        bare = _bare_name(walked)
        for path, module in walked:
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    yield bare(f"{path}.{leaf}" if path else leaf), parameter

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers by their bare names."""
        buffers = {name: buffer for name, buffer in self._buffers().items() if buffer is not None}
        return {**self.parameters(), **buffers}

    def name_in_optimizers(self, name: str) -> str:
        """Return the name under which an optimizer keeps the state of a parameter."""
        prefix = self.name.partition(".")[2] if self.name.startswith("model") else self.name
        return f"{prefix}.{name}" if prefix else name

    def _state(self) -> dict[str, Any]:
        is_own = type(self.live).state_dict is nn.Module.state_dict and "state_dict" not in vars(self.live)
        # The parameters themselves: a view of each would have to be made, ten thousand times.
        state: dict[str, Any] = self.live.state_dict(keep_vars=True) if is_own else self.live.state_dict()
        return state

    def _frozen(self) -> list[str]:
        return [name for name, parameter in self._named_parameters() if not parameter.requires_grad]

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield the names that are missing, new, of another shape, tied or frozen otherwise."""
        (then, rest_then), (now, rest_now) = self._split(saved.view), self._split(self.collect().__getitem__)
        weights_then, weights_now = then, now
        if [*then] == [*now] and all(map(operator.is_, then.values(), now.values())):
            # What is to be filled is what there is; ten thousand comparisons would find nothing.
            then = now = {}
        for name in {**then, **now}:
            if text := _compared(then.get(name), now.get(name)):
                yield Difference(self.name, name, text)
        for name in sorted(rest_then["values"].keys() ^ rest_now["values"].keys()):
            where = "missing" if name in rest_then["values"] else "new"
            yield Difference(self.name, name, f"{where} in the code")
        # Under names of their own: who allows one of these still gets the tensors.
        for names in _ties(then) ^ _ties(now):
            if names <= then.keys() & now.keys():
                where = "checkpoint" if names in _ties(then) else "code"
                yield Difference(self.name, " = ".join(sorted(names)), f"one tensor only in the {where}")
        for name in sorted(set(built["frozen"]) ^ set(self.built["frozen"])):
            if name in weights_then and name in weights_now:
                state = "frozen" if name in self.built["frozen"] else "trained"
                text = f"{state} in the code now, not so before"
                yield Difference(self.name, f"{name}.requires_grad", text)

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Copy the weights into the live tensors, and set the flags."""
        rest = saved.copy(self.rest_stem, same_device)
        weights = saved.view("model") if self.stem == "model" else rest["weights"]
        then = {**weights, **rest["values"]}
        bare = bare_name(self.live)
        state = self._state()
        size = len(state)
        for name in list(state):
            # What is the live tensor itself is filled later.
            if bare(name) in unfit or then[bare(name)] is state[name]:
                del state[name]
            else:
                state[name] = then[bare(name)]
        if len(state) == size:
            self.live.load_state_dict(state)
        elif state:
            self.live.load_state_dict(state, strict=False)
        self._restore_buffers(rest["buffers"], unfit)
        self._forget_buffers(rest["buffers"].keys() | then.keys() | unfit)
        if self.stem != "rank":
            self._restore_own(saved.of_rank(), unfit)
        for name, module in self._modules():
            module.training = name not in rest["eval"]
        for name, parameter in self.parameters().items():
            if name not in unfit and f"{name}.requires_grad" not in unfit:
                parameter.requires_grad_(name not in rest["frozen"])
        if not unfit:
            self._restore_orders(rest.get("buckets", {}))

    def _restore_orders(self, saved: Mapping[str, list[str]]) -> None:
        for path, replica in self._replicas().items():
            parameters = self.parameters()
            order = [parameters[name] for name in saved[path]] if path in saved else None
            if not ddp_buckets.restore(replica, order):
                warn(
                    f"{self.name}: DistributedDataParallel is made otherwise than it was, or this torch "
                    f"({torch.__version__}) cannot let it sum the gradients in the order that it had then: "
                    "with three or more processes, results may differ from an uninterrupted run's in their "
                    "last bits."
                )

    def _restore_buffers(self, saved: Mapping[str, Tensor | None], unfit: AbstractSet[str]) -> None:
        modules = dict(self._modules())
        device = next((tensor.device for tensor in self.live.parameters()), None)
        for name, value in saved.items():
            owner, _, leaf = name.rpartition(".")
            if owner in modules and name not in unfit:
                _restore_buffer(modules[owner], leaf, value, device)

    def _restore_own(self, own: Mapping[str, Any], unfit: AbstractSet[str]) -> None:
        self._restore_buffers(own.get("own_buffers", {}), unfit)
        replicas = self._replicas()
        for path, syncs in own.get("syncs", {}).items():
            if path in replicas:
                replicas[path].require_forward_param_sync = syncs

    def _forget_buffers(self, saved: AbstractSet[str]) -> None:
        # What was made after the checkpoint was.
        modules = dict(self._modules())
        for name in self._buffers().keys() - saved - self._buffers_of_the_script:
            owner, _, leaf = name.rpartition(".")
            delattr(modules[owner], leaf)


def _restore_buffer(module: nn.Module, leaf: str, value: Tensor | None, device: torch.device | None) -> None:
    live = module._buffers.get(leaf)
    if value is None or live is None or _compared(value, live):
        if value is not live:
            # Made, dropped or grown during the training.
            fresh = value if value is None else value.to(device or value.device)
            module.register_buffer(leaf, fresh, persistent=False)
    elif not tensor_file.is_equal(value, live):
        # (an expanded mask could not be written to)
        with torch.no_grad():
            live.copy_(value)


def refuse_split(name: str, value: Any) -> None:
    """Raise Unsupported for what each process holds only a share of."""
    marks = _MARKS_OF_TENSORS if isinstance(value, Tensor) else _MARKS
    found = _splitter(type(value).__mro__)
    found = found or next((marks[mark] for mark in marks if mark in getattr(value, "__dict__", ())), None)
    if found:
        is_engine = found == "DeepSpeed"
        tool = "the engine's own save_checkpoint" if is_engine else "torch.distributed.checkpoint"
        raise Unsupported(
            f"{name} is split over the processes ({found}); this version knows only what each of them "
            "holds whole.",
            fix=f"use DistributedDataParallel where the model fits on each device, or save with {tool}.",
        )


@lru_cache
def _splitter(kinds: tuple[type, ...]) -> str | None:
    # By name: who has one of these has imported it, and nobody else should have to.
    modules = [f"{kind.__module__}." for kind in kinds]
    starts = [start for start in _SPLITTERS for module in modules if module.startswith(start)]
    return _SPLITTERS[starts[0]] if starts else None


_SPLITTERS = {
    "torch.distributed.fsdp.": "FSDP",
    "torch.distributed.tensor.": "DTensor",
    "torch.distributed._shard.": "ShardedTensor",
    "torch.distributed.optim.zero_redundancy_optimizer.": "ZeroRedundancyOptimizer",
    # (its kernels and optimizers for one device are in deepspeed.ops)
    "deepspeed.runtime.": "DeepSpeed",
    "deepspeed.inference.": "DeepSpeed",
    "deepspeed.moe.": "DeepSpeed",
}
_MARKS = {"_is_fsdp_managed_module": "FSDP"}
_MARKS_OF_TENSORS = {"_is_flat_param": "FSDP", "ds_id": "DeepSpeed"}

_SMALL = 256 << 10  # larger ones are tables and masks, which nobody changes
_EXTRA = "_extra_state"
_OWN = (
    *("state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict"),
    *("get_extra_state", "set_extra_state"),
)
_HOOKS = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def _is_torchs_own(module: nn.Module) -> bool:
    if vars(module).keys() & {*_OWN}:
        return False
    # (not __module__: functools.wraps gives a method that of the one it replaces)
    scopes = (getattr(getattr(type(module), name), "__globals__", {}) for name in _OWN)
    return all(scope.get("__name__", "").startswith("torch.nn.") for scope in scopes) and not any(
        getattr(module, hooks, None) for hooks in _HOOKS
    )


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
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device)
            places.setdefault(place, set()).add(name)
    return {frozenset(names) for names in places.values() if len(names) > 1}
