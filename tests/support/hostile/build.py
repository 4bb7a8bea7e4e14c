"""Build the hostile checkpoints: `python tests/support/hostile/build.py RUN FOLDER` makes a run of each.

Every run has two checkpoints. The older one is intact; the newer one was made by somebody who means harm,
and who can compute every checksum. A case says in which file the harm lies, or that it is harmless.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

Make = Callable[["Prey"], None]

CALM = "calm"
"""The newer checkpoint is used: what was done to the run does no harm."""
START = "start"
"""No checkpoint is harmed; a start may be refused, with an error of ours, or go on."""


class Case(NamedTuple):
    """One attack: how it is made, and the name that the refusal has to tell (or CALM, or START)."""

    make: Make
    names: str
    saves: bool = False
    """Whether a training is to save in it."""
    skips: str = ""
    """What would read a terabyte, as it was asked to."""


class Prey:
    """A run, of which the newer checkpoint is at hand, and a place outside of it that nobody may touch."""

    def __init__(self, run: Path, outside: Path) -> None:
        self.run = run
        self.outside = outside
        self.found = run / "checkpoints" / "000002-step-00000002"
        self.before = run / "checkpoints" / "000001-step-00000001"

    def put(self, name: str, data: bytes) -> None:
        """Give a file other bytes; what shares it with another checkpoint keeps it."""
        (self.found / name).unlink(missing_ok=True)
        (self.found / name).write_bytes(data)

    def body(self) -> dict[str, Any]:
        """Return what the manifest says."""
        body: dict[str, Any] = json.loads((self.found / "manifest.json").read_bytes())
        del body["checksum"]
        return body

    def manifest(self, rest: bytes) -> None:
        """Write a manifest whose checksum vouches for any bytes."""
        self.put("manifest.json", vouched(rest))

    def says(self, **changes: Any) -> None:
        """Let the manifest say something else."""
        self.manifest(text(self.body() | changes))

    def file(self, name: str, data: bytes, size: Any = None) -> None:
        """Write a file, and let the manifest vouch for it (with another size, if one is given)."""
        if data != b"" or size is None:
            self.put(name, data)
        self.record(name, len(data) if size is None else size, digest(data))

    def record(self, name: str, size: Any, xxh3: Any) -> None:
        """Let the manifest list a file."""
        body = self.body()
        body["files"][name] = {"size": size, "xxh3_128": xxh3}
        self.manifest(text(body))

    def tree(self, name: str) -> Any:
        """Return the content of a file of JSON."""
        return json.loads((self.found / name).read_bytes())

    def content(self, name: str) -> tuple[dict[str, Any], bytes]:
        """Return the header and the data of a file of tensors."""
        data = (self.found / name).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        return json.loads(data[8:end]), data[end:]


def digest(data: bytes) -> str:
    """Return the digest of a small file."""
    return str(xxhash.xxh3_128_hexdigest(data))


def vouched(rest: bytes) -> bytes:
    """Return a text with the checksum of all that follows it."""
    return b'{"checksum": "%s",' % xxhash.xxh3_128_hexdigest(rest).encode() + rest


def text(body: Any) -> bytes:
    """Return what follows the checksum, for any content."""
    return b"\n " + json.dumps(body).encode()[1:]


def header(head: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a file of tensors with any header."""
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def slot(begin: int, end: int, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    """Return the description of a tensor."""
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


MANY = 48 << 20
"""So many bytes of empty lists take more than a gigabyte once they are parsed."""
DEEP = 100_000
HUGE = (-1, 2**31, 2**62, 2**63, 2**64, 10**30, 10**400)


def manifests() -> Iterator[tuple[str, Case]]:
    """Manifests that are no manifests, all of them with a right checksum where they can have one."""
    plain: dict[str, bytes] = {
        "empty": b"",
        "one brace": b"{",
        "no checksum": b"{}",
        "a null": b"null",
        "a byte order mark": b"\xef\xbb\xbf{}",
        "UTF-16": '{"checksum": "0"}'.encode("utf-16"),
        "NUL bytes": b"\0" * 4096,
        "another checksum": b'{"checksum": "%s","a": 1}' % (b"0" * 32),
        "a checksum of letters": b'{"checksum": "%s","a": 1}' % ("é" * 16).encode(),
        "a checksum too long": b'{"checksum": "%s","a": 1}' % (b"0" * 64),
    }
    for name, data in plain.items():
        yield (
            f"manifest, {name}",
            Case(lambda prey, data=data: prey.put("manifest.json", data), "manifest.json"),
        )
    rests: dict[str, Callable[[Prey], bytes]] = {
        "nothing more": lambda _: b"",
        "invalid UTF-8": lambda prey: text(prey.body())[:-1] + b', "a": "\xff"}',
        "a surrogate in UTF-8": lambda prey: text(prey.body())[:-1] + b', "a": "\xed\xa0\x80"}',
        "NUL in it": lambda prey: text(prey.body()) + b"\0",
        "trailing data": lambda prey: text(prey.body()) + b"{}",
        "trailing text": lambda prey: text(prey.body()) + b" x",
        "a raw control character": lambda prey: text(prey.body())[:-1] + b', "a": "\x1b"}',
        "lists without a bottom": lambda _: b'"a":' + b"[" * DEEP + b"]" * DEEP + b"}",
        "objects without a bottom": lambda _: b'"a":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
        "900 lists in each other": lambda prey: text(
            prey.body() | {"built": prey.body()["built"] | {"a": nested(900)}}
        ),
        "a number of 5000 digits": lambda prey: replaced(prey, "step", b"9" * 5000),
        "an infinite number": lambda prey: replaced(prey, "step", b"1e999"),
        "NaN": lambda prey: replaced(prey, "step", b"NaN"),
        "Infinity": lambda prey: replaced(prey, "step", b"-Infinity"),
        "a key twice": lambda prey: text(prey.body())[:-1] + b', "step": 2}',
        "the checksum twice": lambda prey: text(prey.body())[:-1] + b', "checksum": 2}',
        "a key twice, deep inside": lambda prey: replaced(prey, "built", b'{"a": [{"b": 1, "\\u0062": 1}]}'),
        "millions of lists": lambda prey: replaced(prey, "built", b'{"a": [' + b"[]," * (1_100_000) + b"1]}"),
        "millions of objects": lambda prey: replaced(
            prey, "built", b'{"a": [' + b"{}," * (1_100_000) + b"1]}"
        ),
        "millions of keys": lambda prey: replaced(prey, "built", b"{" + keys(1_100_000) + b'"":1}'),
        "300,000 files": lambda prey: replaced(prey, "files", b"{" + files(300_000) + b"}"),
        "10,000 ranks": lambda prey: replaced(prey, "files", b"{" + ranks(10_000) + b"}"),
        "more than any manifest has": lambda prey: replaced(prey, "run_id", b'"' + b"a" * (65 << 20) + b'"'),
        "a list at the top": lambda _: b'"a": 1]',
    }
    for name, rest in rests.items():
        yield f"manifest, {name}", Case(lambda prey, rest=rest: prey.manifest(rest(prey)), "")
    for key in ("number", "parent", "run_id", "step", "files", "built", "format", "world_size", "metrics"):
        yield (
            f"manifest, no {key}",
            Case(lambda prey, key=key: prey.manifest(text(without(prey.body(), key))), ""),
        )
    for key in ("extra", "", "\x1b[2J", "__class__", "$tuple", "\ud800"):
        yield (
            f"manifest, a key {key!a} more",
            Case(lambda prey, key=key: prey.says(**{key: 1}), "manifest.json"),
        )


WRONG = (None, True, -1, 1.0, "1", [], {}, "\x1b]0;owned\x07", 2**63)
FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("epoch", "world_size"), (*WRONG, *HUGE)),
    **dict.fromkeys(("number", "batch", "step", "samples"), (None, True, -1, 1.0, 10**400)),
    "parent": (True, -1, 1.0, "1", [], 10**400),
    "run_id": (None, True, 1, [], {}),
    "saved": (None, 1, [], {}),
    "boundary": (None, 0, "BATCH", "__class__", [], {}),
    "metrics": (
        None,
        [],
        "",
        [["a", 1.0]],
        {"a": 1},
        {"a": True},
        {"a": "1"},
        {"a": "NaN"},
        {"a": None},
        {"a": []},
    ),
    "best": (1, [], {}, "best", {"metric": "a"}),
    "files": (None, [], "", {"model.safetensors": 1}, {"model.safetensors": {}}, {"a.json": {"size": 1}}),
    "parts": (None, [], {"a": 1}, {"a": []}),
    "built": (None, [], 1, ""),
    "environment": (None, [], 1, ""),
    "format": (None, True, 0, -1, "1", 1.0, [], 10**400),
}


def fields() -> Iterator[tuple[str, Case]]:
    """Manifests of which one field is not what it has to be."""
    for key, values in FIELDS.items():
        for value in dict.fromkeys(map(json.dumps, values)):
            shown = value if len(value) < 40 else f"{value[:20]}... ({len(value)})"
            found = json.loads(value)
            if isinstance(found, int) and key != "format" and 0 < found < 2**128 and type(found) is int:
                # A count that is possible, but not that of this folder, or of this checkpoint.
                continue
            yield (
                f"manifest, {key} = {shown}",
                Case(lambda prey, k=key, v=found: prey.says(**{k: v}), "manifest.json"),
            )
    yield "manifest, format 3", Case(lambda prey: prey.says(format=3), "format 3")
    yield "manifest, data_ranks", Case(lambda prey: prey.says(data_ranks=[0] * 3), "data ranks")
    yield "manifest, data_ranks of text", Case(lambda prey: prey.says(data_ranks=["0"]), "int")
    yield "manifest, format 10^18", Case(lambda prey: prey.says(format=10**18), "format 1000")
    for key in ("number", "step"):
        yield f"manifest, {key} of another", Case(lambda prey, k=key: prey.says(**{k: 7}), "manifest.json")
    for world in (2, 10**6, 2**62):
        yield f"manifest, world_size {world}", Case(lambda prey, w=world: prey.says(world_size=w), START)
    yield (
        "manifest, a part that it lacks",
        Case(lambda prey: prey.says(parts=prey.body()["parts"] | {"model.b": {"kind": "module"}}), "model.b"),
    )
    for value in ({"$tensor": "x"}, {"$int": "g"}, {"$eval": "1"}, {"$ndarray": ["a", "<f8", [2**40], "C"]}):
        yield f"manifest, built {value}", Case(lambda prey, v=value: builds(prey, v), "the setting")
    for value in (5, None, [], {}, {"a": "\x1b[2J"}, "\x1b[2J", nested(400), 10**400):
        shown = json.dumps(value)[:30]
        environment = {"torch": value, "numpy": value, "python": value, "gpus": value, "cpu": value}
        yield (
            f"manifest, an environment of {shown}",
            Case(lambda prey, v=environment: prey.says(environment=prey.body()["environment"] | v), START),
        )
    for word in ("\x1b[2J", "\x1b]0;owned\x07", "\u202egnp.exe", "a\rb", "\ud800", "\x9b2J", "a\nb"):
        yield f"manifest, metric {word!a}", Case(lambda prey, w=word: prey.says(metrics={w: 1.0}), CALM)
        yield f"manifest, saved {word!a}", Case(lambda prey, w=word: prey.says(saved=w), CALM)
        yield f"manifest, run_id {word!a}", Case(lambda prey, w=word: prey.says(run_id=w), START)
    for saved in ("0001-01-01T00:00:00", "9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+23:59", "now"):
        yield f"manifest, saved {saved}", Case(lambda prey, s=saved: prey.says(saved=s), CALM)
    yield (
        "manifest, metrics without end",
        Case(lambda prey: prey.says(metrics={f"m{i}": 1.0 for i in range(20_000)}), CALM),
    )


NAMES = (
    *(
        "../../../outside/secret",
        "/etc/passwd",
        "a/../b.json",
        "..\\..\\secret",
        "C:\\secret.json",
        "//host/x.json",
    ),
    *(
        "",
        ".",
        "..",
        "a\0.json",
        "a\n.json",
        "a" * 300 + ".json",
        "\u202enosj.a.json",
        "a\u200b.json",
        "e\u0301.json",
    ),
    *(
        "\u00e9.json",
        "State.json",
        "STATE.JSON",
        "con",
        "nul.json ",
        "state.json.",
        ".state.json",
        "~/.ssh/id.json",
    ),
    *(
        "manifest.json",
        "ranks/../state.json",
        "ranks/../../x.json",
        "ranks/00000",
        "ranks//00000.json",
        "ranks/0.json",
    ),
    *(
        "ranks/000000.json",
        "ranks/00000.json/x",
        "ranks/\u0661\u0661\u0661\u0661\u0661.json",
        "pushing.json\0",
        "$(id).json",
    ),
    *(
        "%2e%2e/secret.json",
        "state.json\u2028",
        "model.pt",
        "model.pkl",
        "a-frozen-frozen.json",
        "\ud800.json",
        "-rf.json",
    ),
)
STRANGE = (
    "nul.json",
    "con.json",
    "aux.safetensors",
    "rank.json",
    "rank.safetensors",
    "x-frozen.json",
    "model.json",
)


def names() -> Iterator[tuple[str, Case]]:
    """Names of files that lead elsewhere, or that no file of ours has."""
    for name in NAMES:
        shown = name if len(name) < 40 else f"{name[:10]}..."
        yield (
            f"name {shown!a}",
            Case(lambda prey, n=name: prey.record(n, 6, digest(b"secret")), "manifest.json"),
        )
    for name in STRANGE:
        yield f"unasked {name}", Case(lambda prey, n=name: prey.file(n, b"{}"), name.partition(".")[0])
    yield "unasked rank", Case(lambda prey: prey.file("ranks/00001.json", b"{}"), START)
    yield "no state", Case(lambda prey: drop(prey, "state.json"), "state.json")
    yield "no rank", Case(lambda prey: drop(prey, "ranks/00000.json"), "ranks/00000.json")
    yield "no tensors", Case(lambda prey: drop(prey, "model.safetensors"), "state.json")
    yield "no files", Case(lambda prey: prey.says(files={}), "state.json")


def objects() -> Iterator[tuple[str, Case]]:
    """Things in place of files."""
    kinds: dict[str, Callable[[Path, Prey], object]] = {
        "a link to a twin inside": lambda path, _: linked(path, path.rename(path.with_name("twin"))),
        "a link to a twin outside": lambda path, prey: linked(path, moved(path, prey.outside / "twin")),
        "a link to a secret": lambda path, prey: linked(path, prey.outside / "secret"),
        "a link to itself": lambda path, _: linked(path, path),
        "a link to nothing": lambda path, _: linked(path, Path("/nonexistent/file")),
        "a link to zeros without end": lambda path, _: linked(path, Path("/dev/zero")),
        "a link to this process's memory": lambda path, _: linked(path, Path("/proc/self/mem")),
        "a pipe": lambda path, _: replaced_by(path, os.mkfifo),
        "a folder": lambda path, _: replaced_by(path, os.mkdir),
        "a socket": lambda path, _: replaced_by(path, bound),
        "nothing": lambda path, _: path.unlink(),
        "an empty file": lambda path, _: replaced_by(path, Path.touch),
        "a byte less": lambda path, _: rewritten(path, path.read_bytes()[:-1]),
        "a byte more": lambda path, _: rewritten(path, path.read_bytes() + b"\0"),
        "a terabyte of nothing": lambda path, _: sparse(path, 1 << 40),
        "a device": lambda path, _: replaced_by(path, lambda p: os.mknod(p, 0o020666, os.makedev(1, 5))),
        "the file of another": lambda path, prey: rewritten(path, of_another(path, prey)),
    }
    for name in (
        "model.safetensors",
        "model-frozen.safetensors",
        "state.json",
        "ranks/00000.json",
        "manifest.json",
    ):
        for kind, make in kinds.items():
            if kind == "the file of another" and name == "model-frozen.safetensors":
                continue
            if kind == "a device" and not can_make_devices():
                continue
            yield (
                f"{name} is {kind}",
                Case(lambda prey, n=name, m=make: ignore(m(prey.found / n, prey)), name),
            )
    for name in ("model.safetensors", "state.json"):
        for size in (-1, 0, 1, 2**31, 2**62, 2**63, 10**30):
            yield f"{name} is said to have {size}", Case(lambda prey, n=name, s=size: sized(prey, n, s), "")
        yield (
            f"{name} is a terabyte, as it says",
            Case(lambda prey, n=name: terabyte(prey, n), name, skips="verify"),
        )
        for claim in ("", "0" * 31, "0" * 33, "G" * 32, "\x1b[2J", None, 5, [], {}):
            yield (
                f"{name} has the digest {claim!a}",
                Case(lambda prey, n=name, c=claim: prey.record(n, (prey.found / n).stat().st_size, c), ""),
            )
    yield "state.json is a hard link to a twin outside", Case(hard_link, CALM)
    yield "a file that nobody lists", Case(lambda prey: prey.put("notes.txt", b"mine"), CALM)
    yield "a pipe that nobody lists", Case(lambda prey: os.mkfifo(prey.found / "pipe"), CALM)
    yield "a link that nobody lists", Case(lambda prey: (prey.found / "away").symlink_to("/"), CALM)
    for name in ("checkpoint", "checkpoint, relative"):
        yield (
            f"the {name} is a link",
            Case(lambda prey, n=name: away(prey, prey.found, "relative" in n), START),
        )
    yield "the ranks are a link", Case(lambda prey: away(prey, prey.found / "ranks"), "ranks")
    yield "the ranks are a file", Case(lambda prey: a_file(prey.found / "ranks"), "ranks")
    yield "the ranks are a pipe", Case(lambda prey: a_pipe(prey.found / "ranks"), "ranks")


SLOT = slot(0, 4)
HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "a length of 0": header(b""),
    "a length of 2^63": header({}, length=2**63),
    "a length of 2^64-1": header({}, length=2**64 - 1),
    "a length of 100,000,001": header({}, length=100_000_001),
    "a length of one more": header({}, length=3),
    "blanks alone": header(b" " * 64),
    "no JSON": header(b"{" * 100),
    "no text": header(b"\xff" * 64),
    "a list": header([]),
    "a null": header(b"null"),
    "a byte order mark": header(b"\xef\xbb\xbf{}"),
    "lists without a bottom": header(b"[" * DEEP + b"]" * DEEP),
    "objects without a bottom": header(b'{"a":' * DEEP),
    "900 lists in each other": header(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"),
    "millions of lists": header(b'{"a":[' + b"[]," * (4_100_000) + b"1]}"),
    "a tensor beyond the file": header({"a": slot(0, 1 << 40)}, b"1234"),
    "a tensor of another size": header({"a": slot(0, 4, [1 << 40])}, b"1234"),
    "a shape that overflows": header({"a": slot(0, 4, [2**32, 2**32, 4])}, b"1234"),
    "a shape that overflows to 4": header({"a": slot(0, 4, [2**63 + 2, 2])}, b"1234"),
    "nothing times 2^62": header({"a": slot(0, 0, [0, 2**62, 2**62])}),
    "nothing times 2^63": header({"a": slot(0, 0, [2**63, 0])}),
    "an end before its begin": header({"a": slot(4, 0, [4])}, b"1234"),
    "a negative begin": header({"a": slot(-4, 0)}, b"1234"),
    "negative lengths": header({"a": slot(0, 4, [-2, -2])}, b"1234"),
    "a begin of 2^64": header({"a": slot(2**64, 2**64 + 4, [4])}, b"1234"),
    "fractions": header({"a": slot(0, 4, [4.0])}, b"1234"),
    "truths": header({"a": slot(0, 1, [True])}, b"1"),
    "1000 dimensions": header({"a": slot(0, 1, [1] * 1000)}, b"1"),
    "65 dimensions": header({"a": slot(0, 1, [1] * 65)}, b"1"),
    "an overlap": header({"a": slot(0, 4), "b": slot(2, 6)}, b"123456"),
    "twice the same bytes": header({"a": SLOT, "b": SLOT}, b"1234"),
    "a gap": header({"a": slot(0, 2), "b": slot(4, 6)}, b"123456"),
    "bytes before the first": header({"a": slot(2, 4)}, b"1234"),
    "bytes after the last": header({"a": SLOT}, b"12345678"),
    "bytes that are missing": header({"a": SLOT}, b"123"),
    "a name twice": header(b'{"a":%s,"a":%s}' % ((json.dumps(SLOT).encode(),) * 2), b"1234"),
    "an unknown dtype": header({"a": slot(0, 4, dtype="X32")}, b"1234"),
    "a dtype of Python's": header({"a": slot(0, 8, [1], dtype="O")}, b"\0" * 8),
    "a dtype that is a list": header({"a": slot(0, 4, dtype=["U8"])}, b"1234"),
    "half a byte": header({"a": slot(0, 1, [2], dtype="F4")}, b"1"),
    "a boolean of 7": header({"a": slot(0, 4, dtype="BOOL")}, b"\0\1\7\0"),
    "a large one with a boolean of 7": header({"a": slot(0, 1 << 17, dtype="BOOL")}, b"\7" * (1 << 17)),
    "metadata that is a list": header({"__metadata__": [], "a": SLOT}, b"1234"),
    "an entry that is a list": header({"a": [1, 2, 3]}, b""),
    "an entry with more": header({"a": SLOT | {"x": 1}}, b"1234"),
    "an entry with less": header({"a": {"dtype": "U8", "shape": [4]}}, b"1234"),
    "three offsets": header({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 4]}}, b"1234"),
    "a name with a control character": header({"\x1b[2J": slot(2, 4)}, b"1234"),
    "names that are not those of the tree": header({"../../x": SLOT}, b"1234"),
    "a name of a megabyte": header({"a" * (1 << 20): SLOT}, b"1234"),
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "a zip": b"PK\x03\x04" + b"\0" * 60,
}


FOREIGN = ("names that are not those of the tree", "a name of a megabyte")


def headers() -> Iterator[tuple[str, Case]]:
    """Files of tensors that are none, or not those that the tree names."""
    for name, data in HEADERS.items():
        told = "state.json" if name in FOREIGN else "model.safetensors"
        yield f"header, {name}", Case(lambda prey, d=data: prey.file("model.safetensors", d), told)
    for name, change in {
        "shapes exchanged": lambda head: swapped(head, "shape"),
        "a tensor more": lambda head: head | {"more": slot(0, 0)},
        "another dtype": lambda head: {
            k: v | {"dtype": "I32"} if "dtype" in v else v for k, v in head.items()
        },
        "flat": lambda head: {k: v | {"shape": flat(v)} if "shape" in v else v for k, v in head.items()},
    }.items():
        yield f"header, {name}", Case(lambda prey, c=change: reheaded(prey, c), START)
    yield "header, 20,000 tensors", Case(lambda prey: prey.file("model.safetensors", crowd(20_000)), "")
    yield "header, a terabyte, as it says", Case(vast, START, skips="verify")
    for name in ("optimizer.safetensors", "ranks/00000.safetensors", "model-frozen.safetensors"):
        yield f"{name} that lies", Case(lambda prey, n=name: prey.file(n, HEADERS["an overlap"]), name)


def trees() -> Iterator[tuple[str, Case]]:
    """Trees of values that are none: sizes, references, kinds, depth."""
    values: dict[str, Any] = {
        "a tensor that is not there": {"$tensor": "missing"},
        "a tensor without a name": {"$tensor": []},
        "a tensor of a list": {"$tensor": [["a"], {}]},
        "a tensor of a number": {"$tensor": 5},
        "an array of a list": {"$ndarray": [["a"], "<f8", [1], "C"]},
        "an array without anything": {"$ndarray": []},
        "a huge array": {"$ndarray": ["head.bias", "<f8", [2**40], "C"]},
        "an array that overflows": {"$ndarray": ["head.bias", "<f8", [2**62, 8], "C"]},
        "an array of objects": {"$ndarray": ["head.bias", "|O8", [1], "C"]},
        "an unknown kind": {"$eval": "__import__('os').system('id')"},
        "a kind of Python's": {"$builtins.eval": "1"},
        "two kinds": {"$tuple": [], "$list": []},
        "a kind with a control character": {"$\x1b[2J": 1},
        "a dtype of objects": {"$numpy": ["|O8", "00" * 8]},
        "a dtype with a control character": {"$numpy": ["\x1b[2J", "00" * 8]},
        "a text that no number is": {"$int": "__import__"},
        "a float in words": {"$float": "1e999"},
        "no base64": {"$bytes": "!!!!"},
        "base64 with a tail": {"$bytes": "YQ==YQ=="},
        "a factory of Python's": {"$defaultdict": ["eval", []]},
        "a deque of length -1": {"$deque": [-1, []]},
        "a deque of length 10^30": {"$deque": [10**30, []]},
        "a set of the same": {"$set": [1, 1]},
        "a set of lists": {"$set": [[1]]},
        "a dict of pairs of one": {"$dict": [[1]]},
        "a dtype of torch that is none": {"$torch.dtype": "load"},
        "a device that is none": {"$torch.device": "cuda:9999999999999"},
        "a boundary that is none": {"$Boundary": "__class__"},
        "a text that is no hex": {"$str": "zz"},
        "a size of fractions": {"$torch.Size": [1.5]},
        "strides that reserve a terabyte": {"$tensor": ["head.bias", {"stride": [2**40]}]},
        "strides of 0": {"$tensor": ["head.bias", {"stride": [0]}]},
        "negative strides": {"$tensor": ["head.bias", {"stride": [-1]}]},
        "another dtype": {"$tensor": ["head.bias", {"dtype": "float64"}]},
        "a dtype that cannot be": {"$tensor": ["head.bias", {"dtype": "quint4x2"}]},
        "a device of nobody's": {"$tensor": ["head.bias", {"device": "nn:0"}]},
        "more than a tensor has": {"$tensor": ["head.bias", {"pickle": "gASV"}]},
        "900 lists in each other": nested(900),
        "300 tuples in each other": nested(300, lambda inner: {"$tuple": [inner]}),
        "70 lists in each other": nested(70),
        "900 texts in each other": nested(900, lambda inner: {"$numpy.str_": inner}),
        "900 objects in each other": nested(450, lambda inner: {"a": [inner]}),
    }
    for name, value in values.items():
        yield f"tree, {name}", Case(lambda prey, v=value: planted(prey, "state.json", v), "state.json")
        yield (
            f"rank's tree, {name}",
            Case(lambda prey, v=value: planted(prey, "ranks/00000.json", v), "ranks"),
        )
    texts: dict[str, bytes] = {
        "lists without a bottom": b'{"model":' + b"[" * DEEP + b"]" * DEEP + b"}",
        "objects without a bottom": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        "millions of lists": b'{"model":[' + b"[]," * (MANY // 3) + b"1]}",
        "millions of objects": b'{"model":[' + b"{}," * 4_100_000 + b"1]}",
        "millions of keys": b'{"model":{' + keys(4_100_000) + b'"":1}}',
        "a number of 5000 digits": b'{"model":' + b"9" * 5000 + b"}",
        "a number that is infinite": b'{"model":1e999}',
        "NaN": b'{"model":NaN}',
        "a key twice": b'{"model":{},"model":{}}',
        "a byte order mark": b"\xef\xbb\xbf{}",
        "invalid UTF-8": b'{"model":"\xff"}',
        "a list": b"[]",
        "a null": b"null",
        "nothing": b"",
        "NUL": b"\0" * 100,
        "nothing in it": b"{}",
        "the tree of a rank": b'{"rank":{}}',
        "a tree that is a list": b'{"model":[]}',
        "a pickle": b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    }
    for name, data in texts.items():
        for file in ("state.json", "ranks/00000.json"):
            yield f"{file}, {name}", Case(lambda prey, f=file, d=data: prey.file(f, d), "")


MEANT: dict[str, Any] = {
    "a million hex digits": {"$int": "f" * 1_000_000},
    "base64 of a megabyte": {"$bytes": base64.b64encode(bytes(1 << 20)).decode()},
    "a lone surrogate": "\ud800",
    "a control character": "\x1b[2J",
}


def meanings() -> Iterator[tuple[str, Case]]:
    """Trees that can be read, and that are not those of this training."""
    places = (
        *(
            ("ranks/00000.json", part, key)
            for part in ("random", "position")
            for key in (None, "epoch", "spikes")
        ),
        *(
            ("ranks/00000.json", "position", key)
            for key in ("batch", "step", "metrics", "boundary", "iterables")
        ),
        *(("ranks/00000.json", "random", key) for key in ("torch", "python", "numpy")),
        ("ranks/00000.json", "vars", None),
        *(("state.json", "model", key) for key in (None, "model")),
        *(("state.json", "optimizer", key) for key in (None, "optimizer")),
        *(("state.json", "extra", key) for key in (None, "extra.seen", "model")),
    )
    wrong = (None, 5, -1, "x", [], {}, [[1, 2]], {"a": {"b": 1}}, {"$bytes": "AAAA"}, 1e300, *MEANT.values())
    for (file, part, key), (number, value) in itertools.product(places, enumerate(wrong)):
        name = f"{file}: {part}{'.' if key else ''}{key or ''} means {number}"
        yield name, Case(lambda prey, f=file, p=part, k=key, v=value: means(prey, f, p, k, v), START)


LINES = {
    "a line of 4 MB": b'{"event":"' + b"a" * (4 << 20) + b'"}\n',
    "a line without end": b"[" * (1 << 20),
    "lists without a bottom": b"[" * DEEP + b"]" * DEEP + b"\n",
    "900 lists in each other": b'{"event":' + b"[" * 900 + b"]" * 900 + b"}\n",
    "millions of lists": b'{"a":[' + b"[]," * (4_100_000) + b"1]}\n",
    "no text": b"\xff\xfe" * 1000 + b"\n",
    "NUL": b"\0" * 4096,
    "other kinds": b'[]\n1\nnull\n"a"\n{}\n{"event":5}\n{"event":{}}\n{"event":[]}\n',
    **{
        f"a start of {number}": json.dumps(
            {"event": "start", "time": "2026-07-30T12:00:00+00:00", "host": "h", "pid": 1, "attempt": 1}
            | more
        ).encode()
        + b"\n"
        for number, more in enumerate(
            (
                *({"attempt": n} for n in (-1, 2**63, 10**400, int("9" * 4300))),
                *({"host": h} for h in ("\x1b[2J", 5, [], {}, "\ud800", "\u202e", "a\nb")),
                *({"pid": p} for p in ("\x1b[2J", [], {"a": 1}, 10**400)),
                *({"time": t} for t in ("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59")),
                *(
                    {"boot": 5},
                    {"boot": []},
                    {"previous": []},
                    {"previous": {"attempt": 1, "how": "\x1b[2J"}},
                ),
                *({"remote": r} for r in (5, [], {"url": "\x1b[2J", "push": "all"}, {"url": 5})),
                *({"from": f} for f in ("\x1b[2J", [], {}, 10**400)),
            )
        )
    },
    **{
        f"a save of {number}": json.dumps(
            {"event": "save", "attempt": 1, "number": 2, "parent": 1, "superseded": False, "why": None} | more
        ).encode()
        + b"\n"
        for number, more in enumerate(
            (
                *({"number": n} for n in (-1, 2**63, 10**400, True, "2", None)),
                *({"parent": n} for n in (2, -1, 10**400, "1", [])),
                *({"attempt": n} for n in (-1, 10**400, "1")),
                *({"why": w} for w in ("\x1b[2J", 5, [], {"a": "\x1b"}, "a\nb")),
                *({"interval": w} for w in ("\x1b[2J", 5, [], {"seconds": "x"})),
                *({"durable": w} for w in ("x", -1, 1e308, 10**400, [])),
                *({"lost": w, "durable": 1} for w in ("x", 1e308, 10**400, [])),
            )
        )
    },
    "ends": b"".join(
        json.dumps({"event": "end", "attempt": 1, "how": how}).encode() + b"\n"
        for how in ("", "\n", "\x1b[2J", "\u2028", 5, None, [])
    ),
    "pushes": b"".join(
        json.dumps({"event": "push", "number": 2, "to": "s3://b/\x1b[2J", "removed": removed}).encode()
        + b"\n"
        for removed in ([], [[]], [10**400], ["x"], None, {})
    ),
}


def runs() -> Iterator[tuple[str, Case]]:
    """What lies beside the checkpoints: the run's id, its history, its lock, its links."""
    for name, data in LINES.items():
        yield (
            f"history, {name}",
            Case(lambda prey, d=data: ignore((prey.run / "history.jsonl").write_bytes(d)), CALM),
        )
    ids = ("", "{}", "\0" * 100, "[" * DEEP)
    for number, body in enumerate(ids):
        yield (
            f"run.json, text {number}",
            Case(lambda prey, b=body: ignore((prey.run / "run.json").write_text(b)), START),
        )
    for number, rest in enumerate(
        (
            b"",
            b'"format": 1}',
            b'"format": 3, "run_id": "a"}',
            b'"format": 1, "run_id": 5}',
            b'"format": 1, "run_id": []}',
            b'"format": 1, "run_id": "\\u001b[2J"}',
            b'"format": 1, "run_id": "\\ud800"}',
            b'"format": 1, "run_id": "../../outside"}',
            b'"format": 1, "run_id": "' + b"a" * (1 << 20) + b'"}',
            b'"format": 1, "a": [' + b"[]," * (1_100_000) + b"1]}",
        )
    ):
        yield (
            f"run.json, sealed {number}",
            Case(lambda prey, r=rest: ignore((prey.run / "run.json").write_bytes(vouched(r))), START),
        )
    for name in (
        "history.jsonl",
        "run.json",
        ".lock",
        ".push.lock",
        "best",
        "newest",
    ):
        for kind, make in BESIDE.items():
            yield f"{name} is {kind}", Case(lambda prey, n=name, m=make: beside(prey, n, m), START)
    yield "the checkpoints are a file", Case(lambda prey: a_file(prey.run / "checkpoints"), START)
    yield "the checkpoints are a pipe", Case(lambda prey: a_pipe(prey.run / "checkpoints"), START)
    yield (
        "the checkpoints are a link to themselves",
        Case(
            lambda prey: (
                shutil.rmtree(prey.run / "checkpoints"),
                os.symlink("checkpoints", prey.run / "checkpoints"),
            )[1],
            START,
        ),
    )
    for name in ("000009-step-00000009", "9" * 200 + "-step-00000009", "000009-step-" + "9" * 200):
        yield (
            f"an empty checkpoint {name[:20]} ({len(name)})",
            Case(lambda prey, n=name: os.mkdir(prey.run / "checkpoints" / n), START),
        )
    for name in (".stage-000001-00000000", ".trash-000001-00000000", ".pull-000001-00000000"):
        yield (
            f"{name} leads away",
            Case(lambda prey, n=name: os.symlink(prey.outside, prey.run / "checkpoints" / n), CALM),
        )
        yield f"{name} holds a way out", Case(lambda prey, n=name: debris(prey, n), CALM)
    for name in (".run.json-00000000", ".newest-00000000"):
        yield f"{name} leads away", Case(lambda prey, n=name: os.symlink(prey.outside, prey.run / n), CALM)


BESIDE: dict[str, Callable[[Path, Prey], object]] = {
    "a link to a secret": lambda path, prey: linked(path, prey.outside / "secret"),
    "a link to a new file outside": lambda path, prey: linked(path, prey.outside / "new"),
    "a link to itself": lambda path, _: linked(path, path),
    "a link to a folder outside": lambda path, prey: linked(path, prey.outside),
    "a pipe": lambda path, _: replaced_by(path, os.mkfifo),
    "a folder": lambda path, _: replaced_by(path, os.mkdir),
    "a terabyte of nothing": lambda path, _: sparse(path, 1 << 40),
    "a hard link to a secret": lambda path, prey: (
        path.unlink(missing_ok=True),
        os.link(prey.outside / "secret", path),
    ),
}


def cases(*, is_all: bool = True) -> dict[str, Case]:
    """Return the attacks by name: all of them, or those of each kind that differ most."""
    beside = ((name, case._replace(saves=True)) for name, case in runs())
    groups = {
        manifests(): 1,
        fields(): 1,
        names(): 2,
        objects(): 3,
        headers(): 2,
        trees(): 3,
        meanings(): 8,
        beside: 3,
    }
    found = dict(
        itertools.chain(*(itertools.islice(g, 0, None, 1 if is_all else n) for g, n in groups.items()))
    )
    return {name.replace("/", "|")[:120]: case for name, case in found.items()}


def build(template: Path, folder: Path, case: Case) -> Prey:
    """Make the run of one attack in a folder, from a run that is intact."""
    folder.mkdir(parents=True)
    outside = folder / "outside"
    shutil.copytree(template, folder / "exp", symlinks=True, copy_function=_linked_or_copied)
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    prey = Prey(folder / "exp", outside)
    case.make(prey)
    return prey


def _linked_or_copied(source: str, target: str) -> None:
    # What is in a checkpoint nobody writes to; what lies beside them a start may.
    (os.link if "checkpoints" in source else shutil.copy)(source, target)


# How they are made.


def ignore(_: object) -> None:
    """Have no use for what was returned."""


def nested(depth: int, wrap: Callable[[Any], Any] = lambda inner: [inner]) -> Any:
    """Return a value that deep."""
    value: Any = 1
    for _ in range(depth):
        value = wrap(value)
    return value


def without(body: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a manifest that lacks a key."""
    return {k: v for k, v in body.items() if k != key}


def replaced(prey: Prey, key: str, raw: bytes) -> bytes:
    """Return the text of the manifest with any bytes in the place of a value."""
    return text(prey.body() | {key: "HERE"}).replace(b'"HERE"', raw)


def keys(count: int) -> bytes:
    """Return many keys, all of them different."""
    return b"".join(b'"%07x":1,' % number for number in range(count))


def files(count: int) -> bytes:
    """Return many files with names that files have."""
    letters = (bytes(word) for word in itertools.product(b"abcdefghijklmnopqrst", repeat=5))
    rows = (b'"%s.json":{"size":0,"xxh3_128":""}' % word for word in itertools.islice(letters, count))
    return b",".join(rows)


def ranks(count: int) -> bytes:
    """Return the files of many ranks."""
    return b",".join(b'"ranks/%05d.json":{"size":0,"xxh3_128":""}' % number for number in range(count))


def builds(prey: Prey, value: Any) -> None:
    """Let the manifest say of every setting that it was built so."""
    prey.says(built=dict.fromkeys(prey.body()["built"], value))


def drop(prey: Prey, name: str) -> None:
    """Let the manifest not know of a file."""
    prey.says(files=without(prey.body()["files"], name))


def linked(path: Path, to: Path) -> None:
    """Make a link in place of a file."""
    path.unlink(missing_ok=True)
    path.symlink_to(to)


def moved(path: Path, to: Path) -> Path:
    """Move a file out of the run."""
    return Path(shutil.move(path, to))


def replaced_by(path: Path, make: Callable[[Any], object]) -> None:
    """Make something else in place of a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)


def bound(path: Path) -> None:
    """Make a socket, whose path must be short."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def rewritten(path: Path, data: bytes) -> None:
    """Put other bytes into a new file of that name."""
    path.unlink()
    path.write_bytes(data)


def sparse(path: Path, size: int) -> None:
    """Make a file of that size that takes no room."""
    replaced_by(path, Path.touch)
    os.truncate(path, size)


def terabyte(prey: Prey, name: str) -> None:
    """Make a file that large, and let the manifest say so."""
    sparse(prey.found / name, 1 << 40)
    sized(prey, name, 1 << 40)


def vast(prey: Prey) -> None:
    """Make a file of one tensor that large, all of it a hole."""
    start = header({"a": slot(0, 1 << 40)})
    rewritten(prey.found / "model.safetensors", start)
    os.truncate(prey.found / "model.safetensors", len(start) + (1 << 40))
    sized(prey, "model.safetensors", len(start) + (1 << 40))


def of_another(path: Path, prey: Prey) -> bytes:
    """Return the file of that name of the older checkpoint."""
    return (prey.before / path.relative_to(prey.found)).read_bytes()


def can_make_devices() -> bool:
    """Whether this process may make a device."""
    return os.geteuid() == 0 and sys.platform == "linux"


def sized(prey: Prey, name: str, size: int) -> None:
    """Let the manifest claim another size of a file."""
    prey.record(name, size, prey.body()["files"][name]["xxh3_128"])


def hard_link(prey: Prey) -> None:
    """Let a file be one that also lies elsewhere: by its bytes it cannot be told apart."""
    twin = prey.outside / "twin"
    shutil.copy(prey.found / "state.json", twin)
    (prey.found / "state.json").unlink()
    os.link(twin, prey.found / "state.json")


def away(prey: Prey, folder: Path, is_relative: bool = False) -> None:
    """Move a folder out of the run, and leave a link that leads to it."""
    target = prey.outside / folder.name
    folder.rename(target)
    folder.symlink_to(os.path.relpath(target, folder.parent) if is_relative else target)


def a_file(path: Path) -> None:
    """Put a file in place of a folder."""
    shutil.rmtree(path)
    path.touch()


def a_pipe(path: Path) -> None:
    """Put a pipe in place of a folder."""
    shutil.rmtree(path)
    os.mkfifo(path)


def beside(prey: Prey, name: str, make: Callable[[Path, Prey], object]) -> None:
    """Put something beside the checkpoints."""
    make(prey.run / name, prey)


def debris(prey: Prey, name: str) -> None:
    """Leave what a killed save leaves, with a link in it that leads out."""
    folder = prey.run / "checkpoints" / name
    folder.mkdir()
    (folder / "state.json").symlink_to(prey.outside / "secret")
    (folder / "ranks").symlink_to(prey.outside)


def swapped(head: dict[str, Any], key: str) -> dict[str, Any]:
    """Exchange what the header says of the first and the last tensor."""
    names = [name for name in head if name != "__metadata__"]
    first, last = names[0], names[-1]
    return head | {first: head[first] | {key: head[last][key]}, last: head[last] | {key: head[first][key]}}


def flat(entry: dict[str, Any]) -> list[int]:
    """Return the shape of a tensor of the same bytes with one dimension."""
    length = 1
    for count in entry["shape"]:
        length *= count
    return [length]


def reheaded(prey: Prey, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Give the model's file another header."""
    head, data = prey.content("model.safetensors")
    prey.file("model.safetensors", header(change(head), data))


def crowd(count: int) -> bytes:
    """Return a file of very many tensors that have no bytes."""
    empty = json.dumps(slot(0, 0))
    return header(("{" + ",".join(f'"{n:x}":{empty}' for n in range(count)) + "}").encode())


def planted(prey: Prey, file: str, value: Any) -> None:
    """Put a value into every part of a tree."""
    tree = prey.tree(file)
    if file == "state.json":
        tree["extra"]["extra.seen"] = value
    else:
        tree["vars"] = value
    prey.file(file, json.dumps(tree).encode())


def means(prey: Prey, file: str, part: str, key: str | None, value: Any) -> None:
    """Put a value where another one is meant."""
    tree = prey.tree(file)
    holder, last = (tree, part) if key is None else (tree[part], key)
    holder[last] = value
    prey.file(file, json.dumps(tree).encode())


def main(template: str, folder: str) -> None:
    """Make all of them, from an intact run whose steps 1 and 2 were saved."""
    for number, (name, case) in enumerate(cases().items()):
        build(Path(template), Path(folder) / f"{number:04}", case)
        print(f"{number:04}  {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
