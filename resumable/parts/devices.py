"""Maps the devices of the process that saved to those of this process."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..files.strict_json import Json

Facts = Mapping[str, Mapping[str, Json]]
"""What the JSON of a tree says of its tensors, by name."""


def moved(saved: Collection[str], used: Collection[str]) -> dict[str, str]:
    """Return the device of this process for each device of the process that saved, if they differ.

    >>> moved({"cpu", "cuda:0"}, {"cuda:3"})
    {'cuda:0': 'cuda:3'}
    """
    if {*saved} - {"cpu"} <= {*used}:
        return {}
    # A model that is spread over several devices keeps their order; surplus devices become the CPU.
    theirs, ours = (sorted({*devices} - {"cpu"}, key=_by_index) for devices in (saved, used))
    return dict(zip(theirs, [*ours, *["cpu"] * len(theirs)], strict=False))


def _by_index(device: str) -> tuple[str, int]:
    kind, _, index = device.partition(":")
    return kind, int(index or 0)


def moved_trees(
    trees: Mapping[str, Json], facts: Mapping[str, Facts], used: Collection[str], *, is_alone: bool
) -> dict[str, dict[str, str]]:
    """Return, by tree, the device of this process for each device of the process that saved.

    The model and the optimizer decide: everything else follows them, or stays on its device.
    `facts`: by tree, what its JSON says of its tensors.
    """
    if not used:
        return {}
    trained = {device for stem in ("model", "optimizer") for device in _devices(facts.get(stem, {}))}
    own = _own_devices(trees["rank"]) or (trained if is_alone else set())
    found = {}
    for stem in trees:
        theirs = own if stem == "rank" else trained
        # Another rank's GPU may be in use by a third process here.
        found[stem] = moved(theirs if is_alone else theirs | _devices(facts[stem]), used)
    return found


def _own_devices(tree: Json) -> set[str]:
    """Return the devices that the saving process used; older versions did not store them."""
    at = tree.get("position")
    found = at.get("devices") if isinstance(at, dict) else None
    return {str(device) for device in found} if isinstance(found, list) else set()


def _devices(facts: Facts) -> set[str]:
    return {str(about["device"]) for about in facts.values() if "device" in about}
