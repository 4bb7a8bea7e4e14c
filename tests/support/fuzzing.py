"""Read what a fuzzer makes, guided by what it reaches: `python fuzzing.py TARGET CORPUS -runs=1000`."""

from __future__ import annotations

import json
import random
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

with atheris.instrument_imports(include=["resumable"]):
    from resumable import CannotStore
    from resumable.files import codec, decoder, strict_json, tensor_file
    from resumable.run import manifest

import torch
from hostile import build

MEMORY = 512 << 20
"""So much more than before may be taken for any input."""

Place = tuple[Any, Any]

_VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        0.5,
        -0.0,
        1e308,
        2**31,
        2**53,
        2**63,
        2**64,
        10**400,
        "",
        "a",
        "nan",
        "0x1f",
    ),
    *(
        "\ud800",
        "\x1b",
        "$tensor",
        "C",
        "<f4",
        "|b1",
        "|O8",
        "<U1",
        "U8",
        "F32",
        "BOOL",
        "float32",
        "cpu",
        "cuda:0",
        "00",
        "AAAA",
    ),
    *(
        [],
        {},
        [0, 8],
        [1, 1],
        [[]],
        {"a": 1},
        ["a", {}],
        build.nested(70),
        "model.safetensors",
        "ranks/00000.json",
    ),
    *({tag: []} for tag in decoder._DECODERS),
]
# As texts: what stands in a tree is changed with it.
TEXTS = [json.dumps(value) for value in _VALUES]
TAGS = [*decoder._DECODERS]


def any_value(dice: random.Random) -> Any:
    """Return a value that is right somewhere, or nowhere."""
    return json.loads(dice.choice(TEXTS))


def read_manifest(data: bytes) -> None:
    """Read a manifest whose checksum is right, and write it again."""
    again = manifest.to_json(manifest.from_json(build.vouched(data)))
    # Compared as texts: a metric may be NaN, which equals nothing.
    assert manifest.to_json(manifest.from_json(again)) == again


TENSORS = codec.encode({f"t{n}": torch.zeros(n, dtype=torch.uint8) for n in range(9)}).tensors | {
    "f": torch.ones(2, 3),
    "b": torch.ones(4, dtype=torch.bool),
    "h": torch.ones(4, 8, dtype=torch.uint8),
}


def read_state(data: bytes) -> None:
    """Read a tree, and what it says of tensors, and store what was read."""
    tree = strict_json.parse(data)
    codec.tensor_facts(tree)
    value = codec.decode(tree, TENSORS)
    again = codec.encode(value)
    twice = codec.encode(codec.decode(again.json, again.tensors)).json
    assert unnamed(twice) == unnamed(again.json), f"{again.json!r:.300} comes back as {twice!r:.300}"


def unnamed(tree: Any) -> Any:
    """Return a tree without the names of its tensors, which in a set follow its order."""
    if isinstance(tree, list):
        return [unnamed(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    found = {key: "a name" if key == "$tensor" else unnamed(item) for key, item in tree.items()}
    return {k: sorted(v, key=json.dumps) if k in ("$set", "$frozenset") else v for k, v in found.items()}


def read_header(data: bytes) -> None:
    """Read a file of tensors, and write it again."""
    found = tensor_file.from_safetensors(memoryview(bytearray(data)))
    assert sum(tensor.nbytes for tensor in found.values()) <= len(data)
    again = tensor_file.from_safetensors(memoryview(tensor_file.to_safetensors(found, {})))
    assert {name: (t.dtype, t.shape) for name, t in again.items()} == {
        name: (t.dtype, t.shape) for name, t in found.items()
    }
    assert all(tensor_file.is_equal(found[name], again[name]) for name in found)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "manifest": read_manifest,
    "state": read_state,
    "header": read_header,
}


def one_input(read: Callable[[bytes], None], data: bytes) -> None:
    """Read what was made: it is a value, or an error that says what is wrong."""
    try:
        read(data)
    except (ValueError, CannotStore):
        return


def places(tree: Any) -> list[Place]:
    """Return every place in a tree where something else can be put."""
    found: list[Place] = []
    waiting = [tree]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, (dict, list)):
            items = [*holder.items()] if isinstance(holder, dict) else [*enumerate(holder)]
            found += [(holder, key) for key, _ in items]
            waiting += [item for _, item in items]
    return found


def changed(tree: Any, dice: random.Random) -> Any:
    """Return a tree with something else in one of its places."""
    there = places(tree)
    if not there:
        return any_value(dice)
    holder, key = dice.choice(there)
    kind = dice.randrange(7)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, at = dice.choice(there)
        holder[key] = json.loads(json.dumps(other[at]))
    elif kind == 2:
        holder[key] = {dice.choice(TAGS): holder[key]}
    elif kind == 3 and isinstance(holder[key], (int, float)):
        holder[key] = holder[key] * dice.choice((-1, 2, 0.5, 2**40)) + dice.choice((0, 1, -1))
    elif kind == 4 and isinstance(holder, dict):
        holder[dice.choice(("a", "t1", "f", *TAGS))] = holder.pop(key)
    elif kind == 5 and isinstance(holder, list):
        holder.insert(key, any_value(dice))
    else:
        holder[key] = any_value(dice)
    return tree


def mutated(target: str, data: bytes, most: int, seed: int) -> bytes:
    """Change a tree as a tree, most of the time; else any of the bytes."""
    dice = random.Random(seed)
    start = {"manifest": 0, "state": 0, "header": 8}[target]
    text, rest = data[start:], b""
    if target == "header":
        end = 8 + int.from_bytes(data[:8], "little")
        text, rest = data[8:end], data[end : end + 4096]
    try:
        if dice.random() < 0.3:
            raise ValueError("the bytes")
        tree = json.loads(b"{" + text if target == "manifest" else text)
        for _ in range(dice.choice((1, 1, 2, 4))):
            tree = changed(tree, dice)
        made = json.dumps(tree).encode()
    except (ValueError, RecursionError, OverflowError):
        return bytes(atheris.Mutate(data, most))
    if target == "manifest":
        made = made[1:]
    elif target == "header":
        made = build.header(made, rest)
    return made[:most]


def main() -> None:
    """Fuzz one of the readers."""
    target = sys.argv.pop(1)
    read = TARGETS[target]
    atheris.Setup(
        sys.argv,
        lambda data: one_input(read, data),
        custom_mutator=lambda data, most, seed: mutated(target, data, most, seed),
    )
    # The fuzzer's own limit counts what the process by which it was started has ever taken
    most = MEMORY + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
