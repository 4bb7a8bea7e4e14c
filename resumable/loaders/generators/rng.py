"""Reads, restores and seeds the random generators of this process."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from . import code_names, sharded_rng, stages

Generator = code_names.Generator
GENERATORS = code_names.GENERATORS
is_generator = code_names.is_generator
_BACKENDS = ("cuda", "xpu", "mps")
"""The kinds of devices that torch itself has; one kind of another package may be beside them."""
_GPU_STATE = 16  # bytes: a seed and an offset


def collect(devices: bool = True) -> dict[str, Any]:
    """Return the state of every global generator, as plain values, arrays and tensors.

    Devices that this process has not used are not touched: asking must not create a context. Without
    `devices` theirs are left out, unless loaders too draw on one (`torch.set_default_device`).
    """
    found: dict[str, Any] = {
        "python": _python_out(random.getstate()),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if devices or _default_device() != "cpu":
        found |= read_devices()
        if (tracked := sharded_rng.read()) is not None:
            found["sharded"] = tracked
    return found


def restore(state: Mapping[str, Any]) -> None:
    """Restore what `collect` returned, except for devices that this process does not have."""
    random.setstate(_python_in(state["python"]))
    np.random.set_state(state["numpy"])
    # torch reads from where the memory of a view begins, which is not where the view does.
    torch.set_rng_state(state["torch"].clone())
    for name in _backends():
        _write_devices(name, state.get(name, []))
    sharded_rng.write(state.get("sharded", {}))


def is_same(one: Any, other: Any) -> bool:
    """Whether two states are equal.

    >>> is_same(collect(), collect())
    True
    """
    if type(one) in code_names.PLAIN and type(one) is type(other):
        # First, as the pieces of a global generator are compared with every batch.
        return bool(one == other)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(is_same(value, other[key]) for key, value in one.items())
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def digest(states: Any) -> str:
    """Return a digest of states that `read` or `collect` returned, or of containers of them."""
    found = xxhash.xxh3_128()
    for path, value in _leaves("", states):
        content = value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        found.update(path.encode() + b"\0" + content)
    return found.hexdigest()


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in sorted(value.items()):
            yield from _leaves(f"{path}/{name}", inner)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _leaves(f"{path}/{number}", inner)
    else:
        yield path, value.tolist() if isinstance(value, np.ndarray) else value


def seed_all(number: int) -> None:
    """Seed all global generators; those of a device that is not in use yet get it when it is."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def seed_one(generator: Generator, text: str) -> None:
    """Seed one generator with the number of a text."""
    if stages.is_stage(generator):
        # Its seed has to be the same on all ranks, which share the shards.
        return
    number = seed_of(text)
    if isinstance(generator, random.Random):
        generator.seed(number)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(number).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(number % 2**32)
    else:
        generator.manual_seed(number)


def seed_of(text: str) -> int:
    """Return a number of 63 bits that is always the same for a text.

    >>> seed_of("7/0") == seed_of("7/0") != seed_of("7/1")
    True
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def read(generator: Generator) -> Any:
    """Return the state of one generator."""
    if isinstance(generator, random.Random):
        return _python_out(generator.getstate())
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return stages.read(generator) if stages.is_stage(generator) else generator.get_state()


def write(generator: Generator, state: Any) -> None:
    """Put one generator into a state that `read` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(_python_in(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif stages.is_stage(generator):
        stages.write(generator, state)
    else:
        generator.set_state(torch.as_tensor(state, device="cpu").clone())


def made_for(state: Any) -> Generator:
    """Return a new generator of the kind that a state was read from."""
    if not isinstance(state, Mapping):
        is_for_gpu = torch.as_tensor(state, device="cpu").numel() == _GPU_STATE and torch.cuda.is_available()
        return torch.Generator("cuda" if is_for_gpu else "cpu")
    if "words" in state:
        return random.Random()
    bits = _BIT_GENERATORS[state["bit_generator"]]()
    return np.random.RandomState(bits) if "has_gauss" in state else np.random.Generator(bits)


_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (
        np.random.MT19937,
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.Philox,
        np.random.SFC64,
    )
}


def global_ones() -> set[int]:
    """Return the identities of the generators that `collect` reads."""
    backends = [getattr(torch, name) for name in _BACKENDS]
    devices = [one for backend in backends for one in getattr(backend, "default_generators", ())]
    found = [random.random.__self__, np.random.rand.__self__, torch.default_generator, *devices]  # type: ignore[attr-defined]
    return {id(one) for one in [*found, getattr(torch.mps, "_default_mps_generator", None)]}


def _python_out(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    # 625 words: an array is read and written thirty times faster than a tuple of numbers.
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}


def _python_in(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return state["version"], tuple(state["words"].tolist()), state["gauss"]


def _default_device() -> str:
    # torch 2.6 cannot tell after set_default_device(None), with which it is the CPU again.
    with contextlib.suppress(AttributeError):
        return torch.get_default_device().type
    return "cpu"


def _other_backend() -> str | None:
    """Return the kind of device that another package has registered with torch, such as "npu"."""
    try:
        accelerator = torch.accelerator.current_accelerator()
    except RuntimeError:
        # In torch 2.6, where there is none.
        return None
    is_other = accelerator is not None and accelerator.type not in _BACKENDS
    return accelerator.type if accelerator and is_other and hasattr(torch, accelerator.type) else None


def _backends() -> list[str]:
    return [*_BACKENDS, *filter(None, [_other_backend()])]


def read_devices() -> dict[str, list[torch.Tensor]]:
    """Return the states of the generators on all devices that this process has used."""
    found = {}
    for name in ("cuda", "xpu"):
        backend = getattr(torch, name)
        # Before its first use a backend has no generators, and asking for one would start it.
        if backend.is_initialized():
            found[name] = [generator.get_state() for generator in backend.default_generators]
    if torch.backends.mps.is_available():
        found["mps"] = [torch.mps.get_rng_state()]
    if (other := _other_backend()) and _is_in_use(backend := getattr(torch, other)):
        found[other] = [backend.get_rng_state(number) for number in range(backend.device_count())]
    return found


def _is_in_use(backend: Any) -> bool:
    # Not every package can tell.
    return bool(getattr(backend, "is_initialized", lambda: True)())


def _write_devices(name: str, states: Sequence[torch.Tensor | None]) -> None:
    backend = getattr(torch, name)
    # Without a state nothing is asked: even counting devices loads a driver.
    there = read_devices().get(name, []) if states else []
    for index, state in enumerate(states[: backend.device_count()] if states else ()):
        # Any write makes cuDNN draw a new seed for the dropout of recurrent layers.
        if state is None or (index < len(there) and torch.equal(there[index], state)):
            continue
        if name == "mps":
            backend.set_rng_state(state.clone())
        else:
            backend.set_rng_state(state.clone(), index)


def moved(saved: Mapping[str, Any], devices: Mapping[str, str]) -> dict[str, Any]:
    """Return states that `collect` returned, with those of devices moved to their index in this process.

    >>> one, other = torch.zeros(16), torch.ones(16)
    >>> moved({"cuda": [one, other]}, {"cuda:1": "cuda:0"})["cuda"][0] is other
    True
    """
    return {**saved, **{kind: _renumbered(kind, saved[kind], devices) for kind in _kinds_in(saved)}}


def _kinds_in(saved: Mapping[str, Any]) -> list[str]:
    return [kind for kind, states in saved.items() if isinstance(states, list)]


def _renumbered(kind: str, states: Sequence[Any], devices: Mapping[str, str]) -> list[Any]:
    found: dict[int, Any] = {}
    for number, state in enumerate(states):
        there = f"{kind}:{number}"
        if there not in devices:
            found.setdefault(number, state)
        elif devices[there].startswith(f"{kind}:"):
            found[int(devices[there].partition(":")[2])] = state
    return [found.get(number) for number in range(max(found, default=-1) + 1)]
