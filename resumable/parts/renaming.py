"""Renames tensors and modules of a checkpoint (`rename=`) before it is compared with the script."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ..errors import StateMismatch, UsageError, did_you_mean
from ..files import codec
from ..files.strict_json import Json

Trees = Mapping[str, dict[str, Json]]
"""The JSON of a checkpoint's parts, by tree."""
Live = Mapping[str, Mapping[str, Tensor]]
"""By tree and name in the file: live tensors."""
_BY_NAME = ("weights", "values", "buffers", "own_buffers", "gradients")
_NAMES = ("frozen", "used")
_MODULES = ("syncs", "buckets")


class Names:
    """The names of a checkpoint's model, and what they become."""

    def __init__(self, rename: Mapping[str, str], there: Iterable[str], part: str = "") -> None:
        self.all = [*there]
        """The names in the checkpoint."""
        # The longest first: a tensor's own name goes before that of its module.
        self._pairs = sorted((_within(part, self.all, *pair) for pair in rename.items()), key=_length)
        self.new = {name: new for name in self.all if (new := self.of(name)) != name}
        """By the name in the checkpoint: the new one."""
        known = {*self.all}
        if both := [(name, new) for name, new in self.new.items() if new in known]:
            old, new = both[0]
            raise StateMismatch(
                f"rename= gives {old} of the checkpoint the name {new}, which is another tensor there.",
                fix="rename to a name that the checkpoint does not have, in the script too.",
            )
        if len({*self.new.values()}) < len(self.new):
            new, several = _first_twice(self.new)
            raise StateMismatch(
                f"rename= gives {' and '.join(several)} of the checkpoint one name: {new}.",
                fix="give each a name of its own.",
            )

    def of(self, name: str) -> str:
        """Return the new name of a tensor or a module, or the same."""
        for old, new in self._pairs:
            # A name that begins with the new one has been renamed: the checkpoint is of a later start.
            if _is_in(name, old) and not (_is_in(name, new) and _is_in(new, old)):
                return ".".join(filter(None, (new, name.removeprefix(old).lstrip("."))))
        return name

    def finds(self, old: str, new: str, part: str = "") -> bool:
        """Whether the checkpoint has tensors of the old name, or already of the new one."""
        old, new = _within(part, self.all, old, new)
        return any(_is_in(name, old) or _is_in(name, new) for name in self.all)


def _within(part: str, names: Sequence[str], old: str, new: str) -> tuple[str, str]:
    """Return the pair without the name of the part in front, if the names in the part have none."""
    front = f"{part}."
    if not part or not old.startswith(front) or any(_is_in(name, old) for name in names):
        return old, new
    return old.removeprefix(front), new.removeprefix(front)


def _is_in(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def _length(pair: tuple[str, str]) -> int:
    return -len(pair[0])


def _first_twice(new: Mapping[str, str]) -> tuple[str, list[str]]:
    by_new: dict[str, list[str]] = {}
    for old, name in new.items():
        by_new.setdefault(name, []).append(old)
    return next((name, old) for name, old in by_new.items() if len(old) > 1)


def refuse_unknown(rename: Mapping[str, str], names: Mapping[str, Names]) -> None:
    """Raise UsageError for a rename of what the checkpoint never had."""
    for old, new in rename.items():
        if names and not any(found.finds(old, new, part) for part, found in names.items()):
            known = {
                name.rsplit(".", depth)[0] for one in names.values() for name in one.all for depth in (0, 1)
            }
            raise UsageError(
                f"rename= names {old!r}, and the checkpoint has neither that nor {new!r}."
                + did_you_mean(old, sorted(known)),
                fix="give the name that a tensor or a module has in the checkpoint; `resumable show RUN` "
                "lists them.",
            )


class Renamed(NamedTuple):
    """The trees of a checkpoint under new names."""

    trees: dict[str, dict[str, Json]]
    new: Mapping[str, Mapping[str, str]]
    """By part: the new names of tensors."""
    tensors: Mapping[str, set[str]]
    """By tree: the names in the files of the tensors that go by another name now."""

    def without_others(self, live: Live) -> Live:
        """Return the live tensors to read into, without those of a name that another tensor had."""
        return {
            stem: {name: one for name, one in tree.items() if name not in others} if others else tree
            for stem, tree in live.items()
            for others in [self.tensors.get(stem)]
        }


def renamed(
    rename: Mapping[str, str], prefixes: Mapping[str, str], optimizers: Collection[str], trees: Trees
) -> Renamed:
    """Return the trees under the names that the script has.

    `prefixes`: the models of the script, and how the names of their parameters begin in `optimizers`.
    """
    same: dict[str, dict[str, Json]] = {stem: dict(tree) for stem, tree in trees.items()}
    if not rename:
        return Renamed(same, {}, {})
    names = {part: Names(rename, _names_of(part, trees), part) for part in prefixes}
    refuse_unknown(rename, {part: found for part, found in names.items() if found.all})
    in_optimizers = {
        prefixes[part] + old: prefixes[part] + new
        for part, found in names.items()
        for old, new in found.new.items()
    }
    tensors: dict[str, set[str]] = {}
    for stem, tree in same.items():
        for part, json in tree.items():
            if not isinstance(json, dict):
                continue
            if part in names:
                tree[part] = _model(stem, json, names[part], partial(_note, tensors, stem))
            elif part in optimizers:
                tree[part] = _optimizer(json, in_optimizers, partial(_note, tensors, stem))
            elif "aliases" in json:
                tree[part] = {**json, "aliases": _paths(json["aliases"], names)}
    return Renamed(same, {part: found.new for part, found in names.items() if found.new}, tensors)


def _note(tensors: dict[str, set[str]], stem: str, item: Json) -> None:
    tensors.setdefault(stem, set()).update(codec.tensor_names(item))


def _names_of(part: str, trees: Trees) -> list[str]:
    """Return the names of the tensors and values of a model."""
    weights = trees.get("model", {}).get(part)
    rest = [tree.get(part) for stem, tree in trees.items() if stem != "model"]
    dicts = [weights, *(json.get(key) for json in rest if isinstance(json, dict) for key in _BY_NAME)]
    return [*dict.fromkeys(name for one in dicts if isinstance(one, dict) for name in one)]


def _model(stem: str, json: dict[str, Json], names: Names, note: Callable[[Json], None]) -> dict[str, Json]:
    if stem == "model":
        return _keys(json, names.new, note)
    found = {**json}
    for key, value in json.items():
        if key in _BY_NAME and isinstance(value, dict):
            found[key] = _keys(value, names.new, note)
        elif key in _NAMES and isinstance(value, list):
            found[key] = [names.new.get(name, name) for name in value]
        elif key == "eval" and isinstance(value, list):
            found[key] = [_module(names, name) for name in value]
        elif key in _MODULES and isinstance(value, dict):
            found[key] = {_module(names, path): _listed(one, names.new) for path, one in value.items()}
    return found


def _module(names: Names, path: str) -> str:
    # A module without tensors, such as a dropout, has only its own name.
    return names.of(path) if path and names.new else path


def _optimizer(
    json: dict[str, Json], new: Mapping[str, str], note: Callable[[Json], None]
) -> dict[str, Json]:
    found = {**json}
    if isinstance(groups := json.get("groups"), list):
        found["groups"] = [{**one, "params": _listed(one.get("params"), new)} for one in groups]
    if isinstance(state := json.get("state"), dict):
        found["state"] = {
            key: _keys(one, new, note) if isinstance(one, dict) else one for key, one in state.items()
        }
    if isinstance(gradients := json.get("gradients"), dict):
        found["gradients"] = _keys(gradients, new, note)
    if "used" in json:
        found["used"] = _listed(json["used"], new)
    return found


def _keys(json: dict[str, Json], new: Mapping[str, str], note: Callable[[Json], None]) -> dict[str, Json]:
    for name in json.keys() & new.keys():
        note(json[name])
    return {new.get(name, name): item for name, item in json.items()}


def _listed(json: Json, new: Mapping[str, str]) -> Json:
    return [new.get(name, name) for name in json] if isinstance(json, list) else json


def _paths(json: Json, names: Mapping[str, Names]) -> Json:
    """Return the aliases with the paths of the tensors that were renamed."""
    if isinstance(json, dict):
        return {key: _paths(one, names) for key, one in json.items()}
    if not isinstance(json, list):
        return json
    if len(json) == 2 and isinstance(json[0], str) and json[0] in names:
        return [json[0], names[json[0]].new.get(json[1], json[1])]
    return [_paths(one, names) for one in json]
