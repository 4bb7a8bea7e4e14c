"""What the checkpoints of other tools hold, in our terms: parts, place, metric, and what has no place here.

Pure decisions on plain values; how they are read stands in `importing`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..boundary import Boundary
from ..errors import Unsupported, UsageError
from ..run.manifest import Goal
from .torch_file import Other

Tree = dict[str, Any]


class Left(NamedTuple):
    """Something that is not carried over, and why."""

    name: str
    what: str
    why: str


@dataclass(slots=True)
class Foreign:
    """A checkpoint of another tool, in our terms."""

    tool: str
    parts: Tree = field(default_factory=dict)
    """By the name of the part: what its state_dict was."""
    origins: dict[str, str] = field(default_factory=dict)
    """By the name of the part: what it is called where it comes from."""
    epoch: int = 0
    step: int | None = None
    boundary: Boundary = Boundary.EPOCH
    goal: Goal | None = None
    value: float | None = None
    """The best so far, if that is known."""
    is_best: bool = False
    """Whether this checkpoint is known to be the one that has it."""
    notes: list[str] = field(default_factory=list)
    """How it was understood, where that could be otherwise."""
    left: list[Left] = field(default_factory=list)

    def leave(self, name: str, value: Any, why: str) -> None:
        """Note that something is not carried over."""
        self.left.append(Left(name, described(value), why))


RANDOM = "random generators: other numbers are drawn from here on"
LOADER = "the place in the data: the epoch's data begin anew"
_SETTINGS = "a setting, which belongs to the script"
OBJECT = "an object of a class; such are never made of a file"
_UNKNOWN = "no part of a training that is known; --part {0}=extra.NAME or {0}=vars.NAME carries it over"


def described(value: Any) -> str:
    """Return what a value is, in a few words.

    >>> described({"lr": 0.1}), described([1, 2]), described(7)
    ('a dict of 1', 'a list of 2', '7')
    """
    if type(value) is Other:
        return value.name
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return f"a {type(value).__name__} of {len(value)}"
    if is_tensor(value):
        return "a tensor"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor."""
    return isinstance(value, torch.Tensor)


def of_dict(content: Any, renamed: Mapping[str, str]) -> Foreign:
    """Return what a dict of `torch.save` holds; `renamed` says which part is under which key."""
    if type(content) is not dict or not {*map(type, content)} <= {str}:
        raise Unsupported(
            f"it holds {described(content)}, and no dict of a training's state by names.",
            fix=_conversion(content if type(content) is Other else None),
        )
    if content and all(map(is_tensor, content.values())) and not renamed:
        raise Unsupported(
            "it holds weights only, and nothing else of a training.",
            fix="start a training from them: resumable.load_weights(model, PATH).",
        )
    found = Foreign(_tool(content))
    rest = take_parts(found, content, renamed)
    counts = {key: _number(value) for key, value in rest.items()}
    _READERS[found.tool](found, rest, counts)
    count_steps(found)
    for key, value in rest.items():
        if value is not None:
            found.leave(key, value, _why(key, value))
    return found


def _tool(content: Tree) -> str:
    keys = content.keys()
    if {"state_dict", "pytorch-lightning_version"} <= keys or {"state_dict", "optimizer_states"} <= keys:
        return "Lightning"
    if {"model", "iter_num"} <= keys:
        return "nanoGPT"
    if {"arch", "state_dict", "version"} <= keys:
        return "timm"
    if {"arch", "state_dict"} <= keys:
        return "the imagenet example"
    if {"model", "optimizer", "epoch", "args"} <= keys:
        return "torchvision's references"
    return "torch.save"


def take_parts(found: Foreign, content: Tree, renamed: Mapping[str, str]) -> Tree:
    """Put each part where it belongs; return the rest."""
    if unknown := renamed.keys() - content.keys():
        raise UsageError(
            f"--part names {', '.join(sorted(unknown))}, and there is no such key in what is to be imported.",
            fix=f"name one of: {', '.join(map(str, content))}.",
        )
    rest: Tree = {}
    slots: dict[str, dict[str, Any]] = {}
    for key, value in content.items():
        if key in renamed:
            if renamed[key]:
                _put(found, renamed[key], key, value)
        elif slot := _slot(key, value):
            many = value if slot != "scaler" and type(value) is list else [value]
            for number, one in enumerate(many):
                slots.setdefault(slot, {})[key if len(many) == 1 else f"{key}.{number}"] = one
        else:
            rest[key] = value
    for slot, trees in slots.items():
        for name, (key, value) in zip(_names(slot, [*trees]), trees.items(), strict=True):
            _put(found, name, key, value)
    return rest


def _put(found: Foreign, name: str, key: str, value: Any) -> None:
    slot, _, rest = name.partition(".")
    is_named = bool(rest) and "." not in rest
    if slot not in SLOTS or (slot in ("extra", "vars") and not is_named) or (rest and not is_named):
        raise UsageError(
            f"{name!r} names no part.",
            fix=f"name one of {', '.join(SLOTS[:4])}, or one of several, such as model.G; or extra.NAME.",
        )
    if name in found.parts:
        raise UsageError(
            f"{found.origins[name]} and {key} would both be {name}.", fix=f"give another: --part {key}=NAME."
        )
    found.parts[name], found.origins[name] = value, key


SLOTS = ("model", "optimizer", "scheduler", "scaler", "extra", "vars")


def _names(slot: str, keys: list[str]) -> list[str]:
    if slot == "ema":
        return ["extra.ema"] if len(keys) == 1 else [f"extra.{key.replace('.', '_')}" for key in keys]
    return [slot] if len(keys) == 1 else [f"{slot}.{_word(slot, key)}" for key in keys]


def _word(slot: str, key: str) -> str:
    """Return what one of several is called.

    >>> _word("optimizer", "optimizer_states.1"), _word("model", "model"), _word("model", "netG")
    ('1', '0', 'netG')
    """
    if not key.startswith((slot, "lr_scheduler")):
        return key.replace(".", "_")
    number = re.search(r"[0-9]+$", key)
    return number[0] if number else key.removeprefix(slot).strip("_.").replace(".", "_") or "0"


def _slot(key: str, value: Any) -> str | None:
    """Return which part of a training stands under a key."""
    if type(value) is list and value and len({_slot(key, one) for one in value}) == 1:
        return _slot(key, value[0])
    if type(value) is not dict:
        return next((slot for slot, keys in _ESSENTIAL.items() if type(value) is Other and key in keys), None)
    if {"state", "param_groups"} <= value.keys():
        return "optimizer"
    if {"scale", "_growth_tracker"} <= value.keys():
        return "scaler"
    if "last_epoch" in value or "_schedulers" in value:
        return "scheduler"
    if _is_random(key) or not is_state_dict(value):
        return None
    return "ema" if "ema" in key.lower() else "model"


# What has to be told of as refused, where it is an object, and not as left out.
_ESSENTIAL = {
    "model": ("state_dict", "model_state_dict", "model", "net", "network"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optim", "opt"),
}


def is_state_dict(value: Any) -> bool:
    """Whether it is the state of a module: tensors by name, and few other things."""
    if type(value) is not dict or not {*map(type, value)} <= {str}:
        return False
    others = [name for name, one in value.items() if not is_tensor(one)]
    return len(others) < len(value) and all(name.endswith("_extra_state") for name in others)


def _is_random(key: str) -> bool:
    return bool(re.search(r"rng|random|seed|generator", key, re.IGNORECASE))


def _number(value: Any) -> float | int | None:
    if getattr(value, "shape", None) in ((), (1,)):
        # (of torch or of numpy; a tensor's shape is a tuple too)
        value = value.item()
    # (a longer one is no count, and no float either)
    return value if type(value) is float or (type(value) is int and abs(value) < 1 << 62) else None


def _count(counts: Mapping[str, Any], keys: tuple[str, ...]) -> tuple[str, int] | None:
    for key in keys:
        value = counts.get(key)
        if value is not None and math.isfinite(value) and value == int(value) and 0 <= value < 1 << 62:
            return key, int(value)
    return None


# Not the plurals: many scripts call so what the training is to last.
_EPOCHS = ("epoch", "current_epoch", "cur_epoch", "epoch_num")
_STEPS = ("global_step", "step", "iter_num", "iteration", "iter", "n_iter", "it", "num_updates")


def count_steps(found: Foreign) -> None:
    """Take the steps that the optimizers say they have made, where nothing else tells."""
    counts = [count for tree in found.parts.values() for count in _steps_of(tree)]
    if found.step is None:
        found.step = int(max(counts, default=0))
        if not counts:
            found.notes.append(
                "nothing tells how many optimizer steps were done: they count from 0 (--step N)"
            )
    elif counts and max(counts) != found.step:
        made = int(max(counts))
        found.notes.append(
            f"the file says step {found.step}, and its optimizer has made {made}: if it counts others, "
            f"say --step {made}"
        )


def _steps_of(tree: Any) -> Iterator[float]:
    states = tree.get("state") if type(tree) is dict else None
    for state in states.values() if type(states) is dict else ():
        count = _number(state.get("step")) if type(state) is dict else None
        if count is not None and 0 <= count < 1 << 62:
            yield count


def _take(rest: Tree, *keys: str) -> None:
    for key in keys:
        rest.pop(key, None)


def _of_any(found: Foreign, rest: Tree, counts: Mapping[str, Any]) -> None:
    """A dict of nobody in particular: the keys that people use."""
    if epoch := _count(counts, _EPOCHS):
        key, found.epoch = epoch
        stood = [tree.get("last_epoch") for tree in found.parts.values() if type(tree) is dict]
        if found.epoch + 1 in stood and found.epoch not in stood:
            found.epoch += 1
            found.notes.append(
                f"{key} {epoch[1]} is taken for an index: the scheduler has made {found.epoch}"
            )
        else:
            found.notes.append(
                f"{key} {epoch[1]} is taken for the epochs done; if it is the index of the last one, say "
                f"--epoch {epoch[1] + 1}"
            )
        _take(rest, key)
    else:
        found.notes.append("nothing tells how many epochs were done: they count from 0 (--epoch N)")
    if step := _count(counts, _STEPS):
        found.step = step[1]
        _take(rest, step[0])
    _take_best(found, rest, counts)


def _of_imagenet(found: Foreign, rest: Tree, counts: Mapping[str, Any]) -> None:
    """The imagenet example writes `epoch + 1`: the epochs that are done."""
    if epoch := _count(counts, ("epoch",)):
        found.epoch = epoch[1]
        _take(rest, "epoch")
    _take_best(found, rest, counts)


def _of_index(found: Foreign, rest: Tree, counts: Mapping[str, Any]) -> None:
    """The references of torchvision write the index of the epoch that has just ended."""
    if epoch := _count(counts, ("epoch",)):
        found.epoch = epoch[1] + 1
        _take(rest, "epoch")
    _take_best(found, rest, counts)


def _of_timm(found: Foreign, rest: Tree, counts: Mapping[str, Any]) -> None:
    """In timm's files of version 2, `epoch` is the index of the epoch that has just ended."""
    version = counts.get("version") or 0
    if epoch := _count(counts, ("epoch",)):
        found.epoch = epoch[1] + (version > 1)
        _take(rest, "epoch", "version")
    if "scheduler" not in found.parts:
        found.notes.append(
            "timm keeps no state of its scheduler, which follows from the epoch: scheduler.step(state.epoch)"
        )


def _of_nanogpt(found: Foreign, rest: Tree, counts: Mapping[str, Any]) -> None:
    """nanoGPT saves before it trains on iteration `iter_num`: so many steps are done."""
    found.boundary = Boundary.STEP
    if step := _count(counts, ("iter_num",)):
        found.step = step[1]
        _take(rest, "iter_num")
    found.notes.append(
        "nanoGPT sets the learning rate by itself in each step, and keeps no state of a scaler"
    )
    _take_best(found, rest, counts)


def _of_lightning(found: Foreign, rest: Tree, counts: Mapping[str, Any]) -> None:
    """In Lightning's, `loops` tells how many epochs were done."""
    if epoch := _count(counts, ("epoch",)):
        found.epoch = _epochs_of_lightning(rest.get("loops"), epoch[1], found.notes)
    if step := _count(counts, ("global_step",)):
        many = sum(name.startswith("optimizer") for name in found.parts)
        found.step = step[1] // max(many, 1)
        if many > 1:
            found.notes.append(
                f"global_step {step[1]} counts the steps of {many} optimizers: {found.step} of the first"
            )
    _take_monitored(found, rest.get("callbacks"))
    behind = [
        name
        for name, tree in found.parts.items()
        if name.startswith("scheduler") and tree.get("last_epoch") == found.epoch - 1 and found.epoch
    ]
    if behind:
        found.notes.append(
            f"{', '.join(behind)} stands one step behind the epochs: some versions of Lightning step it "
            "after the save. Call its step() once"
        )
    _take(rest, "epoch", "global_step", "loops", "pytorch-lightning_version", "hparams_name", "callbacks")


def _epochs_of_lightning(loops: Any, index: int, notes: list[str]) -> int:
    try:
        loop = loops["fit_loop"]
        current, batches = loop["epoch_progress"]["current"], loop["epoch_loop.batch_progress"]
        begun, done, is_last = current["ready"], current["processed"], batches["is_last_batch"]
        part = batches["current"]["ready"]
        if not {type(begun), type(done), type(part)} <= {int} or not 0 <= done <= begun < 1 << 62:
            raise ValueError("no counts")
    except (KeyError, TypeError, ValueError):
        notes.append(f"epoch {index} is taken for the epochs done: the file does not tell more")
        return index
    if is_last is True or done == begun:
        return int(begun)
    notes.append(f"{part} batches of epoch {done} were done: it begins anew")
    return int(done)


def _take_monitored(found: Foreign, callbacks: Any) -> None:
    for key, state in callbacks.items() if type(callbacks) is dict else ():
        if type(state) is not dict:
            found.leave(f"callbacks.{key}", state, OBJECT)
            continue
        mode = re.search(r"'mode': '(min|max)'", str(key))
        if mode and type(state.get("monitor")) is str and is_tensor(state.get("best_model_score")):
            if found.goal is None:
                found.goal = Goal(state["monitor"], maximize=mode[1] == "max")
                found.value = _number(state["best_model_score"])
                found.is_best = _number(state.get("current_score")) == found.value
        elif not str(key).startswith("ModelCheckpoint"):
            found.leave(
                f"callbacks.{key}", state, "the state of a callback, which is no part of the training"
            )


_READERS: dict[str, Callable[[Foreign, Tree, Mapping[str, Any]], None]] = {
    "Lightning": _of_lightning,
    "nanoGPT": _of_nanogpt,
    "timm": _of_timm,
    "the imagenet example": _of_imagenet,
    "torchvision's references": _of_index,
    "torch.save": _of_any,
}


def _take_best(found: Foreign, rest: Tree, counts: Mapping[str, Any]) -> None:
    for key in [key for key in rest if key.startswith("best_") and counts[key] is not None]:
        if (is_more_better := is_maximal(key)) is not None and found.goal is None:
            found.goal = Goal(key.removeprefix("best_"), maximize=is_more_better)
            found.value = float(counts[key] or 0)
            rest.pop(key)


def is_maximal(name: str) -> bool | None:
    """Return whether more of a metric is better, by its name; None if that does not tell.

    >>> is_maximal("best_acc1"), is_maximal("best_val_loss"), is_maximal("best_score")
    (True, False, None)
    """
    if re.search(r"loss|err|ppl|perplex|mse|mae|wer|cer|fid|nll|bpb|bpc", name, re.IGNORECASE):
        return False
    if re.search(r"acc|prec|recall|map|auc|f1|iou|dice|psnr|ssim|bleu|rouge|top", name, re.IGNORECASE):
        return True
    return None


def _why(key: str, value: Any) -> str:
    if _is_random(key):
        return RANDOM
    if key == "saver":
        return "which files timm keeps; RunState.load(keep=) says that here"
    if key in _SETTING_KEYS:
        return _SETTINGS
    if key.startswith("best_") or key == "metric":
        return "nothing tells whether more is better: --maximize NAME or --minimize NAME carries it over"
    return OBJECT if type(value) is Other else _UNKNOWN.format(key)


_SETTING_KEYS = {
    *("arch", "args", "config", "cfg", "model_args", "hparams", "hyper_parameters", "opt", "opts", "version"),
    *("hparams_name", "settings", "params", "options", "class_to_idx", "classes"),
}


def others_in(tree: Any, path: str = "") -> Iterator[tuple[str, Other]]:
    """Yield what in a tree is no plain value, with its path."""
    if type(tree) is Other:
        yield path, tree
    elif isinstance(tree, (dict, list, tuple)):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in pairs:
            yield from others_in(value, f"{path}.{key}" if path else str(key))


def without_others(tree: Any) -> Any:
    """Return a tree without those entries of its dicts that are no plain values."""
    if type(tree) is dict:
        return {key: without_others(value) for key, value in tree.items() if type(value) is not Other}
    if type(tree) in (list, tuple):
        return type(tree)(map(without_others, tree))
    return tree


def refuse_object(origin: str, path: str, value: Other) -> Unsupported:
    """Return the error for a model or an optimizer that cannot be told without unpickling."""
    where = f"{origin}.{path}" if path else origin
    return Unsupported(
        f"{where} in it is an object ({value.name}), which only unpickling could make.",
        fix=_conversion(value, origin),
    )


def _conversion(value: Other | None, key: str | None = None) -> str:
    loaded = "found = torch.load(PATH, map_location='cpu', weights_only=False)"
    if key is None:
        whole = "found.state_dict()" if value else "..."
        kept = f"{{'model': {whole}, 'optimizer': ..., 'epoch': ...}}"
    else:
        kept = f"{{**found, {key!r}: found[{key!r}].state_dict()}}"
    return (
        "if you trust who made it, convert it where its classes are installed:\n"
        f"    import torch\n    {loaded}\n    torch.save({kept}, NEW)\nand import NEW."
    )
