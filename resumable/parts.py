"""The kinds of objects that a training is made of: how each is read and put back."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import codec, rng
from .codec import Encoded
from .errors import UsageError

Tree = dict[str, Any]
Place = codec.Place


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


class Saved:
    """What a checkpoint holds of one part."""

    def __init__(self, trees: Mapping[str, Encoded], part: str) -> None:
        self._trees = trees
        self._part = part

    def view(self, stem: str) -> Any:
        """Return the tree; its tensors share the checkpoint's memory."""
        tree = self._trees[stem]
        return codec.decode(tree.json[self._part], tree.tensors)

    def copy(self, stem: str, place: Place) -> Any:
        """Return the tree with tensors of its own, on the devices that `place` names."""
        tree = self._trees[stem]
        return codec.decode(tree.json[self._part], tree.tensors, place)


def same_device(_: codec.Path, device: str) -> torch.device:
    """Place a tensor on the device that it came from, or on the CPU if this process has none such."""
    kind, _, index = device.partition(":")
    backend = getattr(torch, kind, None)
    if kind == "cpu" or backend is None or int(index or 0) >= backend.device_count():
        return torch.device("cpu")
    return torch.device(device)


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One thing that a checkpoint and a live object do not agree on."""

    part: str
    name: str
    text: str

    def matches(self, pattern: str) -> bool:
        """Whether the pattern names it: with the part (model.head.*), without it (head.*), or the part alone."""
        wholes = (self.part, f"{self.part}.{self.name}", f"model.{self.name}", self.name)
        return any(fnmatchcase(whole, pattern) for whole in wholes)


class Part:
    """One object of a training. `built` is how the script made it, before anything was restored."""

    kind = "state"

    def __init__(self, name: str, live: Any, stem: str = "extra") -> None:
        self.name = name
        self.live = live
        self.stem = stem
        self.built: dict[str, Any] = {}

    def collect(self) -> dict[str, Any]:
        """Return its trees, by the file that they belong to."""
        raise NotImplementedError

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield why `saved` could not be put into the live object."""
        yield from ()

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Put `saved` into the live object, but for the `unfit` names and the settings where the code wins."""
        raise NotImplementedError


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

    def _split(self, trees: Callable[[str], Any]) -> tuple[dict[str, Tensor], Tree]:
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
    if then is None or now is None:
        where = "new in the code" if then is None else "missing in the code"
        return f"{where}, {shape(now if then is None else then)}"
    if nn.parameter.is_lazy(now) or (then.shape == now.shape and then.dtype == now.dtype):
        return None
    return f"{shape(then)} in the checkpoint, {shape(now)} in the code"


def shape(tensor: Tensor | None) -> str:
    assert tensor is not None
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _ties(tensors: Mapping[str, Tensor]) -> set[frozenset[str]]:
    places: dict[Any, set[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not nn.parameter.is_lazy(tensor):
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device)
            places.setdefault(place, set()).add(name)
    return {frozenset(names) for names in places.values() if len(names) > 1}


class OptimizerPart(Part):
    """An optimizer, whose state goes by the names of the parameters, not by their order."""

    kind = "optimizer"

    def __init__(
        self,
        name: str,
        live: torch.optim.Optimizer,
        stem: str = "extra",
        modules: Sequence[ModulePart] = (),
    ) -> None:
        super().__init__(name, live, stem)
        self._model_parts = modules
        self.built = _settings_of_groups(live.param_groups)

    def names(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        known: dict[int, str] = {}
        for part in self._model_parts:
            prefix = part.name.partition(".")[2]
            for name, parameter in part.parameters().items():
                known.setdefault(id(parameter), f"{prefix}.{name}" if prefix else name)
        return [
            [
                known.get(id(parameter)) or _own_name(group, number, index)
                for index, parameter in enumerate(group["params"])
            ]
            for number, group in enumerate(self.live.param_groups)
        ]

    def collect(self) -> dict[str, Any]:
        """Return the groups by names, and the state by what it is (exp_avg) and then by names."""
        state = self.live.state_dict()
        groups = []
        state_by_key: dict[str, dict[str, Any]] = {}
        on_host = set()
        others = dict(state["state"])
        for group, live, names in zip(
            state["param_groups"], self.live.param_groups, self.names(), strict=True
        ):
            groups.append({"params": names} | {k: v for k, v in group.items() if k not in _NAMES})
            for index, parameter, name in zip(group["params"], live["params"], names, strict=True):
                for key, value in others.pop(index, {}).items():
                    state_by_key.setdefault(key, {})[name] = value
                    if isinstance(value, Tensor) and value.is_cpu and not parameter.is_cpu:
                        on_host.add(key)
        rest = {k: v for k, v in state.items() if k not in ("state", "param_groups")}
        return {
            self.stem: {
                "groups": groups,
                "state": state_by_key,
                "others": others,
                "rest": rest,
                "on_host": sorted(on_host),
            }
        }

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield the parameters that are in another group, or in none."""
        then = [set(group["params"]) for group in saved.view(self.stem)["groups"]]
        now = [set(names) for names in self.names()]
        if len(then) != len(now):
            text = f"{len(then)} parameter groups in the checkpoint, {len(now)} in the code"
            yield Difference(self.name, "groups", text)
            return
        for number, (before, after) in enumerate(zip(then, now, strict=True)):
            for name in sorted(before ^ after):
                where = "missing in the code" if name in before else "new in the code"
                yield Difference(self.name, name, f"{where} (parameter group {number})")

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Load the state by name, each tensor with its own dtype and layout."""
        named = self.names()
        parameters = {
            name: parameter
            for group, names in zip(self.live.param_groups, named, strict=True)
            for name, parameter in zip(names, group["params"], strict=True)
        }
        tree = saved.copy(self.stem, self._placer(saved.view(self.stem)["on_host"], parameters))
        was = self.live.param_groups
        indices = self.live.state_dict()["param_groups"]
        groups = [
            _merged_group(then, now, code_wins) | {"params": index["params"]}
            for then, now, index in zip(tree["groups"], was, indices, strict=True)
        ]
        state: dict[Any, dict[str, Any]] = dict(tree["others"])
        by_parameter: dict[str, dict[str, Any]] = {}
        for index, names in zip(indices, named, strict=True):
            for position, name in zip(index["params"], names, strict=True):
                mine = {k: v[name] for k, v in tree["state"].items() if name in v}
                if mine and name not in unfit:
                    state[position] = by_parameter[name] = mine
        self.live.load_state_dict({**tree["rest"], "state": state, "param_groups": groups})
        self._keep_types(by_parameter, parameters)
        _keep_identity(was, self.live.param_groups)

    def _placer(self, on_host: list[str], parameters: Mapping[str, Tensor]) -> Place:
        def place(path: codec.Path, device: str) -> torch.device:
            if path[0] != "state" or path[2] not in parameters:
                return same_device(path, device)
            # `step` stays on the CPU unless the optimizer itself wants it elsewhere.
            if path[1] in on_host or (path[1] == "step" and device == "cpu"):
                return torch.device("cpu")
            return parameters[path[2]].device

        return place

    def _keep_types(self, saved: Mapping[str, Tree], parameters: Mapping[str, Tensor]) -> None:
        # load_state_dict casts the state to the parameter's dtype: moments kept in fp32 for bf16 weights lose bits.
        for name, then in saved.items():
            now = self.live.state[parameters[name]]
            for key in then.keys() & now.keys():
                if _device(now[key]) == _device(then[key]):
                    now[key] = then[key]


_NAMES = ("params", "param_names")


def _own_name(group: Tree, number: int, index: int) -> str:
    if "param_names" in group:
        return str(group["param_names"][index])
    return f"group{number}.{index}"


def _device(value: Any) -> torch.device | None:
    return value.device if isinstance(value, Tensor) else None


def _settings_of_groups(groups: Sequence[Tree]) -> Tree:
    found: Tree = {}
    for key in {key: None for group in groups for key in group}:
        if key not in (*_NAMES, "initial_lr"):
            # A scheduler changes `lr` as soon as it is made; `initial_lr` is what the script said.
            source = "initial_lr" if key == "lr" else key
            values = [_plain(group.get(source, group.get(key))) for group in groups]
            found[key] = values[0] if values.count(values[0]) == len(values) else values
    return found


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _merged_group(then: Tree, now: Tree, code_wins: AbstractSet[str]) -> Tree:
    # What a newer torch has added to the groups is only in `now`.
    merged = {**now, **then, **{key: now[key] for key in code_wins if key in now}}
    if "lr" in code_wins and then.get("initial_lr"):
        # The same point of the schedule, with the code's learning rate.
        merged["initial_lr"] = now["initial_lr"]
        merged["lr"] = then["lr"] / then["initial_lr"] * now["initial_lr"]
    return {key: value for key, value in merged.items() if key not in _NAMES}


def _keep_identity(was: Sequence[Tree], now: Sequence[Tree]) -> None:
    # A captured CUDA graph reads the learning rate from the very tensor that it was captured with.
    for before, after in zip(was, now, strict=True):
        for key, value in before.items():
            if isinstance(value, Tensor) and isinstance(after[key], Tensor):
                after[key] = value.copy_(after[key])


class StatefulPart(Part):
    """Anything with `state_dict` and `load_state_dict`: schedulers, scalers, the user's own."""

    def __init__(self, name: str, live: Any, stem: str = "extra") -> None:
        super().__init__(name, live, stem)
        if not name.startswith("extra"):
            self.built = _settings(self._state(), "")

    def _state(self) -> Any:
        state = self.live.state_dict()
        return _without_torch_functions(state) if isinstance(state, dict) else state

    def collect(self) -> dict[str, Any]:
        """Return what its own `state_dict` says."""
        return {self.stem: self._state()}

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Give it to its own `load_state_dict`."""
        state = saved.copy(self.stem, same_device)
        if code_wins:
            _overlay(state, self._state(), code_wins, "")
        # A scaler that is switched off has nothing to say, and one that is on refuses nothing.
        if state or not isinstance(self.live, torch.amp.GradScaler):
            self.live.load_state_dict(state)


def _without_torch_functions(state: Tree) -> Tree:
    # Some schedulers keep a function of torch's own among their state; their constructor sets it again.
    kept: Tree = {}
    for key, value in state.items():
        if callable(value) and (getattr(value, "__module__", None) or "").startswith("torch."):
            continue
        kept[key] = value
        if key == "_schedulers":
            kept[key] = [_without_torch_functions(inner) for inner in value]
    return kept


def _settings(state: Any, prefix: str) -> Tree:
    found: Tree = {}
    for key, value in state.items() if isinstance(state, dict) else ():
        if key == "_schedulers":
            for number, inner in enumerate(value):
                found |= _settings(inner, f"{prefix}_schedulers.{number}.")
        elif not key.startswith("_") and key not in ("last_epoch", "base_lrs"):
            found[prefix + key] = _plain(value)
    return found


def _overlay(then: Tree, now: Tree, code_wins: AbstractSet[str], prefix: str) -> None:
    for key in then.keys() & now.keys():
        if key == "_schedulers":
            for number, (before, after) in enumerate(zip(then[key], now[key], strict=False)):
                _overlay(before, after, code_wins, f"{prefix}_schedulers.{number}.")
        elif prefix + key in code_wins or (key == "base_lrs" and key in code_wins):
            then[key] = now[key]


class GeneratorPart(Part):
    """A random generator of the user's own."""

    kind = "generator"

    def collect(self) -> dict[str, Any]:
        """Return its state."""
        return {self.stem: rng.read(self.live)}

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield that it is of another algorithm now."""
        if isinstance(self.live, np.random.Generator):
            then = saved.view(self.stem)["bit_generator"]
            if then != (now := rng.read(self.live)["bit_generator"]):
                yield Difference(self.name, "", f"{then} in the checkpoint, {now} in the code")

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Put it into its saved state."""
        rng.write(self.live, saved.view(self.stem))


class ContainerPart(Part):
    """A dict, list, set or deque of plain values and tensors, filled again in place."""

    kind = "container"

    def collect(self) -> dict[str, Any]:
        """Return the container itself."""
        return {self.stem: self.live}

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Empty it and fill it with what was saved."""
        then = saved.copy(self.stem, same_device)
        self.live.clear()
        if isinstance(self.live, (list, deque)):
            self.live.extend(then)
        else:
            self.live.update(then)


class DataclassPart(Part):
    """A dataclass of plain values, whose fields are set again."""

    kind = "dataclass"

    def collect(self) -> dict[str, Any]:
        """Return the fields, those of dataclasses inside it too."""
        return {self.stem: _fields_out(self.live)}

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Set the fields."""
        _fields_in(self.live, saved.copy(self.stem, same_device))


def _fields_out(live: Any) -> Tree:
    values = {field.name: getattr(live, field.name) for field in dataclasses.fields(live)}
    return {name: _fields_out(v) if _is_dataclass(v) else v for name, v in values.items()}


def _fields_in(live: Any, saved: Tree) -> None:
    for name, value in saved.items():
        if _is_dataclass(inner := getattr(live, name)):
            _fields_in(inner, value)
        else:
            setattr(live, name, value)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def make(name: str, live: Any, stem: str, modules: Sequence[ModulePart]) -> Part:
    """Return the part for a live object; UsageError if nothing could put it back."""
    if isinstance(live, nn.Module):
        return ModulePart(name, live, stem)
    if isinstance(live, torch.optim.Optimizer):
        return OptimizerPart(name, live, stem, modules)
    if isinstance(live, rng.GENERATORS):
        return GeneratorPart(name, live)
    if hasattr(live, "state_dict") and hasattr(live, "load_state_dict"):
        return StatefulPart(name, live)
    if isinstance(live, (dict, list, set, deque)):
        return ContainerPart(name, live)
    if _is_dataclass(live) and not live.__dataclass_params__.frozen:
        return DataclassPart(name, live)
    raise UsageError(
        f"{name} is a {type(live).__name__}, which cannot be put back in place.",
        fix="pass an object with state_dict and load_state_dict, a random generator, a dict or a "
        "dataclass; keep single numbers and strings in state.vars.",
    )
