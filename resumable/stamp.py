"""What the generators of a worker have become with each batch: only what changed is told."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from . import rng

Pieces = dict[str, Any]
"""One generator's state, cut where it mostly changes: the words of a Mersenne twister stay for 624 draws."""

States = dict[str, Pieces]
"""By generator: python, numpy, torch, and those of the user's own by their paths."""

_WORDS = 624 * 4


def read(own: Mapping[str, rng.Generator]) -> States:
    """Return what the generators of this process are now."""
    found = {"python": _Python().read(), "numpy": _read_numpy(), "torch": _read_torch()}
    return {**found, **{f"own.{path}": _read_own(generator) for path, generator in own.items()}}


class Watch:
    """The generators of this process: what has changed of them since it was last asked.

    A generator that has not been drawn from is never told of. The first time it is told of as a whole.
    """

    def __init__(self, own: Mapping[str, rng.Generator], is_global: bool = True) -> None:
        self._readers: dict[str, Callable[[], Pieces]] = {}
        if is_global:
            self._readers = {"python": _Python().read, "numpy": _Numpy().read, "torch": _read_torch}
        self._seen = {name: read() for name, read in self._readers.items()}
        self._told: set[str] = set()
        self._own: dict[str, rng.Generator] = {}
        self.add(own)

    def add(self, own: Mapping[str, rng.Generator], is_new: bool = False) -> None:
        """Watch these too, and those in the place of others; one that is new has been drawn from."""
        for path, generator in own.items():
            if self._own.get(path) is not generator:
                name, self._own[path] = f"own.{path}", generator
                self._readers[name] = partial(_read_own, generator)
                self._seen[name] = {"state": None} if is_new else self._readers[name]()

    def states(self) -> States:
        """Return what all of them are now."""
        return {name: read() for name, read in self._readers.items()}

    def changes(self) -> States:
        """Return what has changed since the last call."""
        found: States = {}
        for name, read in self._readers.items():
            now, seen = read(), self._seen[name]
            changed = {piece: value for piece, value in now.items() if not is_same(seen.get(piece), value)}
            if changed:
                self._seen[name] = now
                found[name] = changed if name in self._told else now
                self._told.add(name)
        return found


def merged(states: Mapping[str, Pieces], changes: Mapping[str, Pieces]) -> States:
    """Return the states with the changes in them; those that were given stay as they are."""
    return {**states, **{name: {**states.get(name, {}), **pieces} for name, pieces in changes.items()}}


def differences(then: Mapping[str, Pieces], now: Mapping[str, Pieces]) -> States:
    """Return the pieces that are not what they were."""
    return {
        name: {
            piece: value
            for piece, value in pieces.items()
            if piece not in then.get(name, {}) or not is_same(then[name][piece], value)
        }
        for name, pieces in now.items()
    }


def restore(states: Mapping[str, Pieces], root: object) -> list[str]:
    """Put the generators of this process, and those that hang off `root`, into these states.

    Return the paths where there is none, and none could be made.
    """
    lost = []
    own = rng.find(root)
    for name, pieces in states.items():
        if name in _WRITERS:
            _WRITERS[name](pieces)
            continue
        path = name.removeprefix("own.")
        if found := own.get(path) or rng.plant(root, path, pieces["state"]):
            rng.write(found, pieces["state"])
        else:
            lost.append(path)
    return lost


def is_same(then: Any, now: Any) -> bool:
    """Whether two states are equal, with arrays in them or not."""
    if isinstance(now, dict):
        return isinstance(then, dict) and all(is_same(then.get(key), now[key]) for key in now)
    if isinstance(now, np.ndarray):
        return np.array_equal(then, now)
    return bool(then == now)


class _Python:
    def __init__(self) -> None:
        self._first: tuple[int, ...] = ()
        self._words = b""

    def read(self) -> Pieces:
        _, words, gauss = random.getstate()
        # New words come all at once: while the first four stand, the others do.
        if words[:4] != self._first:
            self._first = words[:4]
            self._words = np.array(words[:-1], dtype=np.uint32).tobytes()
        return {"words": self._words, "place": words[-1], "gauss": gauss}


def _write_python(pieces: Mapping[str, Any]) -> None:
    words = np.frombuffer(pieces["words"], dtype=np.uint32).tolist()
    random.setstate((3, (*words, pieces["place"]), pieces["gauss"]))


def _global_bits() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


class _Numpy:
    """Numpy's global generator, whose `get_state` takes longer than all the others together."""

    def __init__(self) -> None:
        self._bits: Any = None
        self._address = 0
        self._raw = b""
        self._state: Pieces = {}

    def read(self) -> Pieces:
        if _global_bits() is not self._bits:
            self._find()
        raw = ctypes.string_at(self._address, _WORDS + 4) if self._address else b""
        # A number kept for the next call of randn() can go without the words moving.
        if not raw or raw != self._raw or self._state["has_gauss"]:
            self._raw, self._state = raw, _read_numpy()
        return self._state

    def _find(self) -> None:
        self._bits, self._address = _global_bits(), 0
        state = self._bits.state
        if state["bit_generator"] == "MT19937":
            address = self._bits.ctypes.state_address
            address = getattr(address, "value", address)
            inside = state["state"]
            expected = inside["key"].tobytes() + int(inside["pos"]).to_bytes(4, "little")
            # Another layout than words and then the place: the slow way is right too.
            if ctypes.string_at(address, _WORDS + 4) == expected:
                self._address = address


def _read_numpy() -> Pieces:
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return {"state": state, "has_gauss": True}
    rest = {name: state[name] for name in ("has_gauss", "gauss")}
    words = state["state"]["key"].tobytes()
    # (without a state of its kind, that of another kind before it would stand)
    return {"state": None, "words": words, "place": int(state["state"]["pos"]), **rest}


def _write_numpy(pieces: Mapping[str, Any]) -> None:
    if pieces["state"] is not None:
        np.random.set_state(pieces["state"])
        return
    key = np.frombuffer(pieces["words"], dtype=np.uint32)
    inside = {"key": key, "pos": pieces["place"]}
    rest = {name: pieces[name] for name in ("has_gauss", "gauss")}
    np.random.set_state({"bit_generator": "MT19937", "state": inside, **rest})


# Where torch's state has its words; should that change, only more would be told than is needed.
_TORCH_WORDS = slice(24, 24 + 624 * 8)


def _read_torch() -> Pieces:
    state = torch.get_rng_state().numpy().tobytes()
    head, tail = state[: _TORCH_WORDS.start], state[_TORCH_WORDS.stop :]
    return {"head": head, "words": state[_TORCH_WORDS], "tail": tail}


def _write_torch(pieces: Mapping[str, Any]) -> None:
    state = bytearray(pieces["head"] + pieces["words"] + pieces["tail"])
    torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))


_WRITERS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "python": _write_python,
    "numpy": _write_numpy,
    "torch": _write_torch,
}


def _read_own(generator: rng.Generator) -> Pieces:
    state = rng.read(generator)
    # A tensor would go to the other process through shared memory, and be pinned on its way.
    return {"state": state.numpy() if isinstance(state, torch.Tensor) else state}
