"""Optimizers: their state is stored by the names of the parameters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from ..files import large_files, sharded_tensor
from ..files.codec import Path, Place
from .gradients import Gradients
from .models import ModulePart
from .part import Difference, Part, Saved, kind_of, plain, same_device, shape
from .sharded import refuse_split

Tree = dict[str, Any]


class OptimizerPart(Part):
    """An optimizer. Its state is stored by the names of the parameters, not by their order."""

    def __init__(
        self,
        name: str,
        live: torch.optim.Optimizer,
        stem: str = "extra",
        modules: Sequence[ModulePart] = (),
        rank: int | None = None,
    ) -> None:
        super().__init__(name, live, stem, rank)
        self.kind = kind_of(live, "optimizer")
        self._model_parts = modules
        refuse_split(name, live)
        for parameter_name, parameter in self.parameters().items():
            refuse_split(f"{name}: {parameter_name}", parameter)
        self.gradients = Gradients(live)
        self.built = settings_of_groups(live.param_groups)
        self._given = self._sizes()
        self._inner = [*inner_optimizers(live).values()]
        self._with_its_groups = [one for one in self._inner if _are_same(one.param_groups, live.param_groups)]

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.live.param_groups]

    def outgrown(self) -> Iterator[str]:
        """Yield that its groups or their parameters have changed since the script passed it."""
        then, now = self._given, self._sizes()
        if then != now:
            yield (
                f"{self.name} has {sum(now)} parameters in {len(now)} groups, and had {sum(then)} in "
                f"{len(then)} when it was given to RunState. A resume will be refused, because the "
                "script builds the optimizer as it was then. Make all groups before RunState.load; of those "
                "not yet to be trained, set requires_grad_(False), which a resume restores. [R15]"
            )

    def is_torchs_own(self) -> bool:
        """Whether its class is torch's and its state has no hooks."""
        is_hooked = any(getattr(self.live, hooks, None) for hooks in _HOOKS)
        is_own = type(self.live).__module__.startswith("torch.optim.")
        return is_own and not is_hooked and vars(self.live).keys().isdisjoint(_STATE)

    def is_on_device(self) -> bool:
        """Whether some of its parameters are not in host memory."""
        return not all(p.is_cpu for group in self.live.param_groups for p in group["params"])

    def size(self) -> int:
        """Return the bytes of its state."""
        values = [value for state in self.live.state.values() for value in state.values()]
        return sum([value.nbytes for value in values if isinstance(value, Tensor)])

    def outline(self) -> str:
        """Return the number of its parameters, and a hash of their names by group."""
        names, _, _ = self._named()
        return f"{sum(map(len, names))} parameters ({large_files.digest(repr(names).encode())[:8]})"

    def _named(self) -> tuple[list[list[str]], dict[str, Tensor], set[str]]:
        """Return the names of the parameters by group, the parameters by name, and which no model has."""
        known: dict[int, str] = {}
        for part in self._model_parts:
            prefix = part.prefix_in_optimizers
            for name, parameter in part.parameters().items():
                known.setdefault(id(parameter), prefix + name)
        names: list[list[str]] = []
        parameters: dict[str, Tensor] = {}
        loose = set()
        for number, group in enumerate(self.live.param_groups):
            names.append([])
            for index, parameter in enumerate(group["params"]):
                name = known.get(id(parameter), "")
                if not name:
                    name = _own_name(group, number, index)
                    loose.add(name)
                names[-1].append(name)
                parameters[name] = parameter
        return names, parameters, loose

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by their names."""
        return self._named()[1]

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by their names."""
        return self.parameters()

    def values_by_name(self, tree: Mapping[str, Any]) -> list[Any]:
        """Return the parts of its tree that are ordered by the names of its parameters."""
        by_key = tree.get("state")
        state = [*by_key.values()] if isinstance(by_key, dict) else []
        return [*state, tree.get("gradients"), tree.get("loose")]

    def steps_by(self, optimizer: Any) -> bool:
        """Whether it makes its steps by this optimizer, which its `state_dict()` leaves out."""
        return any(one is optimizer for one in self._inner)

    def note_step(self) -> None:
        """Note that it has made a step, which torch checks when a scheduler steps."""
        self.live._opt_called = True

    def collect(self) -> dict[str, Any]:
        """Return the groups with names, and the state by key, such as exp_avg, and then by name."""
        state = self.live.state_dict()
        groups = []
        state_by_key: dict[str, dict[str, Any]] = {}
        on_host = set()
        others = dict(state["state"])
        named, parameters, loose = self._named()
        for group, live, names in zip(state["param_groups"], self.live.param_groups, named, strict=True):
            groups.append({"params": names} | {k: v for k, v in group.items() if k not in _NAMES})
            for index, parameter, name in zip(group["params"], live["params"], names, strict=True):
                for key, value in others.pop(index, {}).items():
                    state_by_key.setdefault(key, {})[name] = value
                    if isinstance(value, Tensor) and value.is_cpu and not parameter.is_cpu:
                        on_host.add(key)
        rest = {k: v for k, v in state.items() if k not in ("state", "param_groups")}
        gradients = self._gradients(parameters)
        of_rank = {} if self.rank is None else _of_rank(gradients)
        gradients = {name: one for name, one in gradients.items() if name not in of_rank}
        return {
            **({"rank": {"gradients": of_rank}} if self.rank is not None and of_rank else {}),
            self.stem: {
                "groups": groups,
                "state": state_by_key,
                "others": others,
                "rest": rest,
                "on_host": sorted(on_host),
                # No other part saves them, such as a temperature.
                "loose": {name: value for name, value in parameters.items() if name in loose},
                "gradients": gradients,
                "used": [name for name in self.gradients.used if name in gradients],
                "left_out": self.gradients.has_left_out,
                "zeroed": self.gradients.collect(),
                "present": self.gradients.present(parameters) if self.rank is None else "",
            },
        }

    def differing(self) -> dict[str, Any]:
        """Return the gradients of this rank, which DDP has not reduced yet."""
        if self.rank is None or not (gradients := _of_rank(self._gradients(self.parameters()))):
            return {}
        return {"rank": {"gradients": gradients}}

    def _gradients(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        pending = self.gradients.pending(parameters, is_alone=self.rank is None)
        return {name: _grad_out(gradient) for name, gradient in pending.items()}

    def _saved_gradients(self, saved: Saved, tree: Tree | None = None) -> dict[str, Any]:
        of_rank = {} if self.stem == "rank" else saved.of_rank().get("gradients", {})
        return {**(tree or saved.view(self.stem))["gradients"], **of_rank}

    def with_gradients(self, saved: Saved) -> set[Tensor]:
        """Return the parameters whose gradients are in the checkpoint."""
        kept = self._saved_gradients(saved)
        return {parameter for name, parameter in self.parameters().items() if name in kept}

    def forget_gradients(self, kept: AbstractSet[Tensor]) -> None:
        """Drop the gradients of all other parameters."""
        for parameter in self.parameters().values():
            if parameter in kept:
                continue
            if parameter.grad is not None and self.gradients.is_captured:
                # The graph adds to this memory, whoever has it.
                parameter.grad.zero_()
            else:
                parameter.grad = None

    def hold(self) -> Callable[[], None]:
        """Return a function that restores the gradients and removes settings that were added since."""
        groups = [(group, {*group}) for group in self.live.param_groups]
        gradients = [(p, p.grad) for group, _ in groups for p in group["params"]]

        def put_back() -> None:
            for group, (_, keys) in zip(self.live.param_groups, groups, strict=True):
                for key in group.keys() - keys:
                    del group[key]
            for parameter, gradient in gradients:
                parameter.grad = gradient

        return put_back

    def differences(self, saved: Saved, built: Mapping[str, Any]) -> Iterator[Difference]:
        """Yield the parameters that are in another group, or in none."""
        now, parameters, loose = self._named()
        tree = saved.view(self.stem)
        for name in tree["loose"].keys() & loose:
            was, is_now = shape(tree["loose"][name]), shape(parameters[name])
            if was != is_now:
                yield Difference(self.name, name, f"{was} in the checkpoint, {is_now} in the code")
        then = [group["params"] for group in tree["groups"]]
        if len(then) != len(now):
            # Under the name "", because it can only be allowed as a whole.
            text = f"{len(then)} parameter groups in the checkpoint, {len(now)} in the code"
            yield Difference(self.name, "", text)
            return
        for number, (before, after) in enumerate(zip(then, now, strict=True)):
            for name in sorted(set(before) ^ set(after)):
                where = "missing in the code" if name in before else "new in the code"
                yield Difference(self.name, name, f"{where} (parameter group {number})")
        if isinstance(self.live, torch.optim.LBFGS) and then != now and sorted(then[0]) == sorted(now[0]):
            # LBFGS keeps its state for all parameters in one flat tensor.
            yield Difference(self.name, "", "the parameters are in another order, on which LBFGS depends")

    def resized(self, saved: Saved, then: int, now: int) -> Iterator[Difference]:
        """Yield that the checkpoint has accumulated gradients, which each process has for itself."""
        if _of_rank(self._saved_gradients(saved)).keys() - {*saved.view(self.stem).get("used", ())}:
            text = f"summed up by {then} processes, each for itself; there are {now} in the code"
            yield Difference(self.name, "gradients", text)

    def restore(self, saved: Saved, unfit: AbstractSet[str], code_wins: AbstractSet[str]) -> None:
        """Load the state by name, each tensor with its own dtype and layout."""
        named, parameters, loose = self._named()
        tree = saved.copy(self.stem, self._placer(saved.view(self.stem)["on_host"], parameters))
        was = self.live.param_groups
        live = {key: dict(one) for key, one in self.live.state.items() if isinstance(one, dict)}
        now = self.live.state_dict()
        indices = now["param_groups"]
        groups = [
            _merged_group(then, now, code_wins) | {"params": index["params"]}
            for then, now, index in zip(tree["groups"], was, indices, strict=True)
        ]
        state: dict[Any, dict[str, Any]] = dict(tree["others"])
        by_parameter: dict[str, dict[str, Any]] = {}
        for index, names in zip(indices, named, strict=True):
            for position, name in zip(index["params"], names, strict=True):
                mine = {k: v[name] for k, v in tree["state"].items() if name in v}
                if name in unfit:
                    # Some optimizers make this state in their constructor only.
                    mine = now["state"].get(position, {})
                if mine:
                    state[position] = by_parameter[name] = mine
        try:
            self.live.load_state_dict({**tree["rest"], "state": state, "param_groups": groups})
            self._keep_types(by_parameter, parameters)
        finally:
            for before, after in zip(was, self.live.param_groups, strict=True):
                _keep_memory(before, after)
            for key, before in live.items():
                if isinstance(after := self.live.state.get(key), dict):
                    _keep_memory(before, after, _is_like_on_gpu)
        for inner in self._with_its_groups:
            inner.param_groups = self.live.param_groups
        with torch.no_grad():
            for name in tree["loose"].keys() & loose - unfit:
                parameters[name].copy_(tree["loose"][name])
        # Checkpoints of older versions have neither.
        self.gradients.restore(tree.get("zeroed", 0), has_left_out=tree.get("left_out", False))
        gradients = {} if "gradients" in unfit else self._saved_gradients(saved, tree)
        found = {parameters[n]: _grad_in(gradients[n]) for n in gradients.keys() & parameters.keys() - unfit}
        self.gradients.put_in({parameter: one.to(parameter.device) for parameter, one in found.items()})
        present = zip(parameters.items(), tree.get("present", ""), strict=False)
        self.gradients.put_in_zeros(
            p for (name, p), is_there in present if is_there == "1" and p.grad is None
        )

    def _placer(self, on_host: list[str], parameters: Mapping[str, Tensor]) -> Place:
        def place(path: Path, device: str) -> torch.device:
            if path[0] != "state" or path[2] not in parameters:
                return same_device(path, device)
            # `step` stays on the CPU unless the optimizer itself wants it elsewhere.
            if device == "cpu" and (path[1] in on_host or path[1] == "step"):
                return torch.device("cpu")
            return parameters[path[2]].device

        return place

    def _keep_types(self, saved: Mapping[str, Tree], parameters: Mapping[str, Tensor]) -> None:
        # load_state_dict casts to the parameter's dtype, and fp32 moments of bf16 weights would lose bits.
        for name, then in saved.items():
            now = self.live.state[parameters[name]]
            for key in then.keys() & now.keys():
                if getattr(now[key], "device", None) == getattr(then[key], "device", None):
                    now[key] = then[key]


def inner_optimizers(live: Any) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers in the attributes of one whose `state_dict()` does not know of them."""
    is_plain = isinstance(live, torch.optim.Optimizer) and _has_plain_state(live)
    found = {}
    for name, value in vars(live).items() if is_plain else ():
        several = isinstance(value, (list, tuple))
        for number, one in enumerate(value if several else [value]):
            if isinstance(one, torch.optim.Optimizer) and one.state is not live.state:
                found[f"{name}.{number}" if several else name] = one
    return found


def _has_plain_state(live: torch.optim.Optimizer) -> bool:
    return type(live).state_dict is torch.optim.Optimizer.state_dict and "state_dict" not in vars(live)


def _are_same(groups: Sequence[Tree], others: Sequence[Tree]) -> bool:
    return len(groups) == len(others) and all(map(operator.is_, groups, others))


def _of_rank(gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Return the gradients that each process has for itself: those of sharded parameters are reduced."""
    return {name: one for name, one in gradients.items() if not sharded_tensor.is_sharded(one)}


def _grad_out(gradient: Tensor) -> Any:
    if gradient.layout != torch.sparse_coo:
        return gradient
    gradient = gradient.coalesce()
    return {"indices": gradient.indices(), "values": gradient.values(), "size": gradient.shape}


def _grad_in(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    content = saved["indices"], saved["values"], saved["size"]
    return torch.sparse_coo_tensor(*content, is_coalesced=True, check_invariants=True)


_NAMES = ("params", "param_names")
_HOOKS = (
    *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)
_STATE = ("state_dict", "load_state_dict")


def _own_name(group: Tree, number: int, index: int) -> str:
    if "param_names" in group:
        return str(group["param_names"][index])
    return f"group{number}.{index}"


def settings_of_groups(groups: Sequence[Tree]) -> Tree:
    """Return the settings with which the groups of an optimizer were made."""
    by_key: dict[str, list[Any]] = {key: [] for group in groups for key in group}
    for group in map(plain, groups):
        # A scheduler changes `lr` in its constructor; `initial_lr` is the script's value.
        given = group | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})
        for key, values in by_key.items():
            values.append(given.get(key))
    return {
        key: values[0] if values.count(values[0]) == len(values) else values
        for key, values in by_key.items()
        if key not in (*_NAMES, "initial_lr")
    }


def _merged_group(then: Tree, now: Tree, code_wins: AbstractSet[str]) -> Tree:
    # Settings that a newer torch has added are only in `now`.
    merged = {**now, **then, **{key: now[key] for key in code_wins if key in now}}
    if "lr" in code_wins and then.get("initial_lr"):
        # The same point of the schedule, with the code's learning rate.
        merged["initial_lr"] = now.get("initial_lr", now["lr"])
        merged["lr"] = then["lr"] / then["initial_lr"] * merged["initial_lr"]
    return {key: value for key, value in merged.items() if key not in _NAMES}


@torch.no_grad()
def _keep_memory(
    before: Tree, after: Tree, fits: Callable[[Tensor, Tensor], bool] = lambda one, other: True
) -> None:
    # A captured CUDA graph reads and writes the tensors that it was captured with.
    for key in before.keys() & after.keys():
        value, new = before[key], after[key]
        both = isinstance(value, Tensor) and isinstance(new, Tensor) and value is not new
        if both and fits(value, new):
            after[key] = value.copy_(new)


def _is_like_on_gpu(one: Tensor, other: Tensor) -> bool:
    facts = [(t.shape, t.dtype, t.device, t.layout, t.is_inference()) for t in (one, other)]
    return one.is_cuda and one.layout == torch.strided and facts[0] == facts[1]
