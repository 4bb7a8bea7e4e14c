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
    """Reads a generator, and finds what has changed since the last look."""

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


class _InMemory(_Reader):
    """Reads a global generator where it lies in memory: this is done with every batch."""

    pieces: tuple[str, ...]

    def __init__(self) -> None:
        self._last = self.values()
        super().__init__(self._read)

    def values(self) -> tuple[Any, ...] | None:
        """Return the values of the pieces; None where it is unknown how they lie in memory."""
        raise NotImplementedError

    def read_slowly(self) -> Pieces:
        """Return what its library says."""
        raise NotImplementedError

    def _read(self) -> Pieces:
        values = self.values()
        return self.read_slowly() if values is None else dict(zip(self.pieces, values, strict=True))

    def changes(self) -> Pieces:
        """Return the pieces that have changed since the last call."""
        last, self._last = self._last, self.values()
        if last is None or self._last is None:
            self.seen = self.seen if last is None else dict(zip(self.pieces, last, strict=True))
            return super().changes()
        if last == self._last:
            return {}
        both = zip(self.pieces, last, self._last, strict=True)
        return {piece: now for piece, before, now in both if now != before}


def merged(states: Mapping[str, Pieces], changes: Mapping[str, Pieces]) -> States:
    """Return a copy of the states with the changes in it."""
    return {**states, **{name: {**states.get(name, {}), **pieces} for name, pieces in changes.items()}}


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


class _Python(_InMemory):
    pieces = ("words", "place", "gauss")

    def __init__(self) -> None:
        # `getstate` makes a tuple of 625 numbers. CPython has them behind the object's head.
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
        address = id(self._generator) + object.__basicsize__
        self._place, self._words = ctypes.c_int.from_address(address), _Words.from_address(address + 4)
        has_room = type(self._generator).__basicsize__ >= object.__basicsize__ + 4 + _WORDS
        self._is_seen = has_room
        self._is_seen = has_room and self._read() == _read_python()
        super().__init__()

    def values(self) -> tuple[Any, ...] | None:
        return (self._words.raw, self._place.value, self._generator.gauss_next) if self._is_seen else None

    def read_slowly(self) -> Pieces:
        return _read_python()


def _read_python() -> Pieces:
    _, words, gauss = random.getstate()
    return {"words": np.array(words[:-1], dtype=np.uint32).tobytes(), "place": words[-1], "gauss": gauss}


def _write_python(pieces: Mapping[str, Any]) -> None:
    words = np.frombuffer(pieces["words"], dtype=np.uint32).tolist()
    random.setstate((3, (*words, pieces["place"]), pieces["gauss"]))


def _global_bits() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


class _Numpy(_InMemory):
    """Numpy's global generator, whose `get_state` takes longer than all the others together."""

    pieces = ("state", "words", "place", "has_gauss", "gauss")

    def __init__(self) -> None:
        self._bits: Any = None
        self._fields: tuple[Any, ...] = ()
        """The words, and the number that is kept for the next randn(), in memory; none: unknown."""
        super().__init__()

    def values(self) -> tuple[Any, ...] | None:
        if _global_bits() is not self._bits:
            self._bits = _global_bits()
            self._fields = _fields(*_find_numpy(self._bits))
        if not self._fields:
            return None
        words, place, has_gauss, gauss = self._fields
        # Without "state" the merged pieces would keep the state of another kind of generator.
        return None, words.raw, place.value, has_gauss.value, gauss.value

    def read_slowly(self) -> Pieces:
        return _read_numpy()


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


class _Torch(_InMemory):
    pieces = ("head", "words", "tail")

    def __init__(self) -> None:
        self._whole = b""
        self._cut: tuple[Any, ...] = ()
        self._kind = ctypes.c_char * torch.default_generator.get_state().nbytes
        super().__init__()

    def values(self) -> tuple[Any, ...] | None:
        state = torch.default_generator.get_state()
        # numpy() and tobytes() would take four times as long.
        whole = self._kind.from_address(state.data_ptr()).raw
        if whole != self._whole:
            self._whole, self._cut = whole, _cut(whole)
        return self._cut

    def read_slowly(self) -> Pieces:
        return _read_torch()


def _cut(state: bytes) -> tuple[bytes, ...]:
    return state[: _TORCH_WORDS.start], state[_TORCH_WORDS], state[_TORCH_WORDS.stop :]


def _read_torch() -> Pieces:
    return dict(zip(_Torch.pieces, _cut(torch.get_rng_state().numpy().tobytes()), strict=True))


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
