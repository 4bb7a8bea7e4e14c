"""Reads and restores the generators of a worker; with each batch only what changed is sent."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from . import rng, search

Pieces = dict[str, Any]
"""One generator's state, cut where it mostly changes: the words of a Mersenne twister stay for 624 draws."""

States = dict[str, Pieces]
"""By generator: python, numpy, torch, and those of the user's own by their paths."""

_WORDS = 624 * 4
_Words = ctypes.c_char * _WORDS


def read(own: Mapping[str, rng.Generator]) -> States:
    """Return the states of the generators of this process."""
    found = {"python": _read_python(), "numpy": _read_numpy(), "torch": _read_torch()}
    return {**found, **{f"own.{path}": _read_own(generator) for path, generator in own.items()}}


class Watch:
    """Reports what has changed in the generators of this process.

    A generator is reported after its first draw: first its whole state, then the pieces that changed.
    """

    def __init__(self, own: Mapping[str, rng.Generator], is_global: bool = True) -> None:
        self._readers: dict[str, _Reader] = {}
        if is_global:
            self._readers = {"python": _Python(), "numpy": _Numpy(), "torch": _Torch()}
        self._reported: set[str] = set()
        self._own: dict[str, rng.Generator] = {}
        self.add(own)

    def add(self, own: Mapping[str, rng.Generator], is_new: bool = False) -> None:
        """Watch these too, also in place of others; `is_new`: they have been drawn from already."""
        for path, generator in own.items():
            if self._own.get(path) is not generator and not _is_on_gpu(generator):
                name, self._own[path] = f"own.{path}", generator
                self._readers[name] = reader = _Reader(partial(_read_own, generator))
                if is_new:
                    reader.seen = {"state": None}

    def states(self) -> States:
        """Return the states of all of them."""
        return {name: reader.read() for name, reader in self._readers.items()}

    def changes(self) -> States:
        """Return what has changed since the last call."""
        found: States = {}
        for name, reader in self._readers.items():
            if changed := reader.changes():
                if name not in self._reported:
                    self._reported.add(name)
                    changed = reader.read()
                found[name] = changed
        return found


class _Reader:
    """Reads a generator, and finds what has changed since the last look.

    Those of the global generators compare piece by piece by hand: this is done with every batch.
    """

    def __init__(self, read: Callable[[], Pieces]) -> None:
        self.read = read
        self.seen = read()
        """Its state at the last look."""

    def changes(self) -> Pieces:
        """Return the pieces that have changed since the last call."""
        now, seen = self.read(), self.seen
        changed = {piece: value for piece, value in now.items() if not rng.is_same(value, seen.get(piece))}
        if changed:
            self.seen = now
        return changed


def merged(states: Mapping[str, Pieces], changes: Mapping[str, Pieces]) -> States:
    """Return a copy of the states with the changes in it."""
    found = {name: {**pieces} for name, pieces in states.items()}
    merge(found, changes)
    return found


def merge(states: States, changes: Mapping[str, Pieces]) -> None:
    """Put the changes into the states."""
    for name, pieces in changes.items():
        states.setdefault(name, {}).update(pieces)


def differences(then: Mapping[str, Pieces], now: Mapping[str, Pieces]) -> States:
    """Return the pieces that have changed."""
    return {
        name: {
            piece: value
            for piece, value in pieces.items()
            if piece not in then.get(name, {}) or not rng.is_same(value, then[name][piece])
        }
        for name, pieces in now.items()
    }


def renamed(states: States, now: Collection[str]) -> States:
    """Return states by the paths of `now`, under which the generators of the user's own are found."""
    own = {path.removeprefix("own."): pieces for path, pieces in states.items() if path not in _WRITERS}
    new = {f"own.{path}": pieces for path, pieces in search.renamed(own, now).items()}
    return {**{name: pieces for name, pieces in states.items() if name in _WRITERS}, **new}


def restore(states: Mapping[str, Pieces], root: object) -> list[str]:
    """Put the generators of this process, and those that hang off `root`, into these states.

    Return the paths at which there is no generator, and none could be made.
    """
    lost = []
    own = search.find(root)
    for name, pieces in states.items():
        if name in _WRITERS:
            _WRITERS[name](pieces)
            continue
        path = name.removeprefix("own.")
        if found := own.get(path) or search.plant(root, path, pieces["state"]):
            rng.write(found, pieces["state"])
        else:
            lost.append(path)
    return lost


class _Python(_Reader):
    def __init__(self) -> None:
        # `getstate` makes a tuple of 625 numbers. CPython has them behind the object's head.
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
        address = id(self._generator) + object.__basicsize__
        self._place, self._words = ctypes.c_int.from_address(address), _Words.from_address(address + 4)
        has_room = type(self._generator).__basicsize__ >= object.__basicsize__ + 4 + _WORDS
        self._is_seen = has_room and self._read_memory() == _read_python()
        super().__init__(self._read_memory if self._is_seen else _read_python)

    def _read_memory(self) -> Pieces:
        gauss = self._generator.gauss_next
        return {"words": self._words.raw, "place": self._place.value, "gauss": gauss}

    def changes(self) -> Pieces:
        if not self._is_seen:
            return super().changes()
        found: Pieces = {}
        seen = self.seen
        if (words := self._words.raw) != seen["words"]:
            seen["words"] = found["words"] = words
        if (place := self._place.value) != seen["place"]:
            seen["place"] = found["place"] = place
        if (gauss := self._generator.gauss_next) != seen["gauss"]:
            seen["gauss"] = found["gauss"] = gauss
        return found


def _read_python() -> Pieces:
    _, words, gauss = random.getstate()
    return {"words": np.array(words[:-1], dtype=np.uint32).tobytes(), "place": words[-1], "gauss": gauss}


def _write_python(pieces: Mapping[str, Any]) -> None:
    words = np.frombuffer(pieces["words"], dtype=np.uint32).tolist()
    random.setstate((3, (*words, pieces["place"]), pieces["gauss"]))


def _global_bits() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


class _Numpy(_Reader):
    """Numpy's global generator, whose `get_state` takes longer than all the others together."""

    def __init__(self) -> None:
        self._bits: Any = None
        self._fields: tuple[Any, ...] = ()
        """The words, and the number that is kept for the next randn(), in memory; none: unknown."""
        super().__init__(self._read)

    def _find(self) -> tuple[Any, ...]:
        if _global_bits() is not self._bits:
            self._bits = _global_bits()
            self._fields = _fields(*_find_numpy(self._bits))
        return self._fields

    def _read(self) -> Pieces:
        if not (fields := self._find()):
            return _read_numpy()
        words, place, has_gauss, gauss = fields
        rest = {"place": place.value, "has_gauss": has_gauss.value, "gauss": gauss.value}
        # Without "state" the merged pieces would keep the state of another kind of generator.
        return {"state": None, "words": words.raw, **rest}

    def changes(self) -> Pieces:
        fields, seen = self._find(), self.seen
        if not fields or "words" not in seen:
            return super().changes()
        found: Pieces = {}
        if (words := fields[0].raw) != seen["words"]:
            seen["words"] = found["words"] = words
        if (place := fields[1].value) != seen["place"]:
            seen["place"] = found["place"] = place
        if (has_gauss := fields[2].value) != seen["has_gauss"]:
            seen["has_gauss"] = found["has_gauss"] = has_gauss
        if (gauss := fields[3].value) != seen["gauss"]:
            seen["gauss"] = found["gauss"] = gauss
        return found


def _fields(words: int, gauss: int) -> tuple[Any, ...]:
    if not words:
        return ()
    place, kept = ctypes.c_int.from_address(words + _WORDS), ctypes.c_double.from_address(gauss + 8)
    return _Words.from_address(words), place, ctypes.c_int.from_address(gauss), kept


def _find_numpy(bits: Any) -> tuple[int, int]:
    """Return the addresses of the words and of the kept number, if a test value written there is found."""
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return 0, 0
    address = bits.ctypes.state_address
    words = getattr(address, "value", address)
    generator: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
    start, size = id(generator), type(generator).__basicsize__
    raw = ctypes.string_at(start, size)
    # It follows a pointer to the object itself.
    pointers = [at for at in range(0, size - 24, 8) if start < _pointer(raw, at) < start + size]
    try:
        np.random.set_state({**state, "has_gauss": 1, "gauss": _SENTINEL})
        expected = _read_numpy()
        for at in pointers:
            seen = struct.unpack("=i4xd", ctypes.string_at(start + at + 8, 16))
            inside = expected["words"] + expected["place"].to_bytes(4, sys.byteorder)
            if seen == (1, _SENTINEL) and ctypes.string_at(words, _WORDS + 4) == inside:
                return words, start + at + 8
    finally:
        np.random.set_state(state)
    return 0, 0


_SENTINEL = 0.7310585786300049


def _pointer(raw: bytes, at: int) -> int:
    return int.from_bytes(raw[at : at + 8], sys.byteorder)


def _read_numpy() -> Pieces:
    state: Any = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        return {"state": state, "has_gauss": True}
    rest = {name: state[name] for name in ("has_gauss", "gauss")}
    words = state["state"]["key"].tobytes()
    # Without "state" the merged pieces would keep the state of another kind of generator.
    return {"state": None, "words": words, "place": int(state["state"]["pos"]), **rest}


def _write_numpy(pieces: Mapping[str, Any]) -> None:
    if pieces["state"] is not None:
        np.random.set_state(pieces["state"])
        return
    key = np.frombuffer(pieces["words"], dtype=np.uint32)
    inside = {"key": key, "pos": pieces["place"]}
    rest = {name: pieces[name] for name in ("has_gauss", "gauss")}
    np.random.set_state({"bit_generator": "MT19937", "state": inside, **rest})


# The words in torch's state. If torch moves them, more is sent than needed, and nothing is lost.
_TORCH_WORDS = slice(24, 24 + 624 * 8)


class _Torch(_Reader):
    def __init__(self) -> None:
        self._last = b""
        super().__init__(lambda: _cut(_whole()))

    def changes(self) -> Pieces:
        whole = _whole()
        if whole == self._last:
            return {}
        self._last = whole
        seen, self.seen = self.seen, _cut(whole)
        return {piece: value for piece, value in self.seen.items() if value != seen[piece]}


def _whole() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


def _cut(state: bytes) -> Pieces:
    head, tail = state[: _TORCH_WORDS.start], state[_TORCH_WORDS.stop :]
    return {"head": head, "words": state[_TORCH_WORDS], "tail": tail}


def _read_torch() -> Pieces:
    return _cut(_whole())


def _write_torch(pieces: Mapping[str, Any]) -> None:
    state = bytearray(pieces["head"] + pieces["words"] + pieces["tail"])
    torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))


_WRITERS: dict[str, Callable[[Mapping[str, Any]], None]] = {
    "python": _write_python,
    "numpy": _write_numpy,
    "torch": _write_torch,
}


def _is_on_gpu(generator: rng.Generator) -> bool:
    # A worker that was forked can use no GPU: even to read the state of a generator fails.
    return isinstance(generator, torch.Generator) and generator.device.type != "cpu"


def _read_own(generator: rng.Generator) -> Pieces:
    state = rng.read(generator)
    # A tensor would go to the other process through shared memory, and be pinned on its way.
    return {"state": state.numpy() if isinstance(state, torch.Tensor) else state}
