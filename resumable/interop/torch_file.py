"""A file of `torch.save`, read without unpickling it: the tensors in it, and nothing is called by name.

The file is a zip archive: a pickle, which says how the tensors are put together, and the memory of each.
A pickle is a program. This reader knows the few instructions that a state dict is made of, and what it is
told to call it only looks up in a table of its own; everything else is refused by name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from ..files.tensor_file import DTYPES, refuse_no_booleans, viewed
from ..files.threads import no_garbage_collection
from .zip_archive import Archive, Read, refused

_MOST_PICKLE = 16 << 20
_MOST_DIMENSIONS = 64
_MOST = 1 << 62


class Stored(NamedTuple):
    """A tensor that has not been read yet."""

    entry: str
    dtype: torch.dtype
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class TorchFile:
    """What lies in a file; ValueError if it is damaged, Unsupported if it is not plain tensors and values."""

    def __init__(self, size: int, read: Read) -> None:
        self._archive = archive = Archive(size, read)
        found = [name for name in archive.sizes if name.partition("/")[2] == "data.pkl"]
        if len(found) != 1:
            raise refused("it is a zip archive that torch.save has not made")
        self._folder = found[0].partition("/")[0]
        if archive.sizes[found[0]] > _MOST_PICKLE:
            raise refused(
                f"its pickle has {archive.sizes[found[0]]:,} bytes; at most {_MOST_PICKLE:,} make sense"
            )
        order = f"{self._folder}/byteorder"
        if order in archive.sizes and (
            archive.sizes[order] > 6 or bytes(archive.content(order)) != b"little"
        ):
            raise refused("the bytes of its numbers are in another order than this machine's")
        self._memory: dict[str, memoryview] = {}
        self.content: Any = Machine(archive.content(found[0]), self._stored).run()
        """What was saved; tensors are `Stored`, and what is neither they nor a plain value is `Other`."""

    def tensor(self, stored: Stored) -> torch.Tensor:
        """Read a tensor; those that share memory in the file do so here."""
        if stored.entry not in self._memory:
            self._memory[stored.entry] = self._archive.content(stored.entry)
        memory = self._memory[stored.entry]
        if not memory.nbytes:
            return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        refuse_no_booleans(flat, stored.dtype)
        return viewed(flat, stored.dtype).as_strided(stored.shape, stored.stride, stored.begin)

    def _stored(self, storage: Storage, dtype: torch.dtype, begin: Any, shape: Any, stride: Any) -> Stored:
        """Return a tensor, of which nothing has been allocated before its shape is known to make sense."""
        entry = f"{self._folder}/data/{storage.key}"
        if self._archive.sizes.get(entry) != storage.size:
            raise ValueError(f"{entry} in it has not the {storage.size:,} bytes that the pickle says")
        if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
            raise ValueError("a tensor in it has no shape")
        numbers = (begin, *shape, *stride)
        if not {*map(type, numbers)} <= {int} or not 0 <= min(numbers) <= max(numbers) < _MOST:
            raise ValueError("a tensor in it has a shape that is none")
        # Nothing times 2**63 is nothing, but torch cannot count to it.
        if len(shape) > _MOST_DIMENSIONS or math.prod(max(length, 1) for length in shape) >= _MOST:
            raise ValueError(f"a tensor in it has {len(shape)} dimensions, too many or too long ones")
        count, room = math.prod(shape), storage.size // dtype.itemsize
        last = begin + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
        if begin > room or (count and last >= room):
            raise ValueError(
                f"a tensor of the shape {[*shape]} does not lie in the memory that it is said to"
            )
        if count > room:
            raise refused(f"a tensor of the shape {[*shape]} stands for only {room:,} stored elements")
        return Stored(entry, dtype, begin, shape, stride)


class Other(NamedTuple):
    """A value that is no tensor and nothing plain: only what it is called is known of it."""

    name: str


class Global(NamedTuple):
    """What a pickle asks for by its name, and does not get."""

    name: str


class Storage(NamedTuple):
    """Memory that tensors lie in."""

    key: str
    dtype: torch.dtype | None
    size: int


_Make = Callable[[Storage, torch.dtype, Any, Any, Any], Stored]
_MARK = object()
_STORAGES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
    "torch ComplexFloatStorage": torch.complex64,
    "torch ComplexDoubleStorage": torch.complex128,
    "torch.storage UntypedStorage": None,
}
DTYPES_BY_NAME = {str(dtype).replace(".", " "): dtype for dtype in (*DTYPES, torch.complex128)}
_DICT = "collections OrderedDict"
_OTHERS = {
    *("torch Size", "torch device", "collections Counter", "argparse Namespace"),
    *("__builtin__ set", "builtins set"),
}
_REBUILDS = {
    *("torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"),
    "torch._utils _rebuild_parameter",
}
_KNOWN = {_DICT, *_STORAGES, *DTYPES_BY_NAME, *_OTHERS, *_REBUILDS}


class Machine:
    """A pickle of protocol 2, followed instruction by instruction; it makes dicts, lists and plain values."""

    instructions: ClassVar[Mapping[int, Callable[[Any], Any]]]

    def __init__(self, code: memoryview, make: _Make) -> None:
        self._code = bytes(code)
        self._at = 0
        self._make = make
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    @no_garbage_collection()
    def run(self) -> Any:
        """Return what the pickle makes; ValueError if it makes no sense."""
        try:
            while (code := self.byte()) != _STOP:
                if code not in self.instructions:
                    raise refused(f"its pickle has the instruction 0x{code:02x}, which no state dict needs")
                self.instructions[code](self)
            (found,) = self.stack
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error) as exc:
            raise ValueError(f"its pickle is none: {exc!r:.200}") from exc
        return found

    def byte(self) -> int:
        self._at += 1
        return self._code[self._at - 1]

    def take(self, form: str) -> Any:
        (found,) = struct.unpack_from(form, self._code, self._at)
        self._at += struct.calcsize(form)
        return found

    def _bytes(self, count: int) -> bytes:
        found = self._code[self._at : self._at + count]
        if len(found) != count:
            raise ValueError("it ends early")
        self._at += count
        return found

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def protocol(self) -> None:
        if (found := self.byte()) != 2:
            raise refused(f"its pickle is of protocol {found}, and torch.save writes 2")

    def number(self, form: str) -> None:
        self.push(self.take(form))

    def long(self) -> None:
        self.push(int.from_bytes(self._bytes(self.byte()), "little", signed=True))

    def text(self) -> None:
        self.push(str(self._bytes(self.take("<I")), "utf-8"))

    def global_(self) -> None:
        end = self._code[self._at : self._at + 1000].split(b"\n", 2)
        if len(end) < 3:
            raise ValueError("a name does not end")
        self._bytes(len(end[0]) + len(end[1]) + 2)
        name = f"{end[0].decode()} {end[1].decode()}"
        if not self.is_known(name):
            raise refused(
                f"its pickle asks for {name.replace(' ', '.')}, which no state dict of tensors needs"
            )
        self.push(Global(name))

    def is_known(self, name: str) -> bool:
        """Whether a state dict may ask for this; nothing is ever got."""
        return name in _KNOWN

    def items(self) -> list[Any]:
        """Take what lies above the last mark."""
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
        found = self.stack[place + 1 :]
        del self.stack[place:]
        return found

    def tuple_of(self, count: int) -> None:
        self.push(tuple(self.pop_items(count)))

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError("it appends to what is no list")
        target += items

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        keys = items[::2]
        if type(target) is not dict or not {*map(type, keys)} <= {str, int}:
            raise ValueError("it puts into a dict what has no place there")
        target.update(zip(keys, items[1::2], strict=True))

    def pop_items(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("it takes what is not there")
        found = self.stack[-count:]
        del self.stack[-count:]
        return found

    def build(self) -> None:
        # (the attributes of an OrderedDict, such as _metadata, and those of a Namespace)
        self.stack.pop()
        if not isinstance(self.stack[-1], (dict, Other)):
            raise ValueError("it gives attributes to what has none")

    def persistent(self) -> None:
        kind, of, key, _, count = self.stack.pop()
        if kind != "storage" or type(key) is not str or type(count) is not int or of.name not in _STORAGES:
            raise ValueError("a storage is none")
        dtype = _STORAGES[of.name]
        self.push(Storage(key, dtype, count * (dtype.itemsize if dtype else 1)))

    def reduce(self) -> None:
        arguments, what = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple or type(what) is not Global:
            raise ValueError("it calls what cannot be called")
        self.push(self.called(what.name, arguments))

    def called(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Return what stands for the result of a call that is not made."""
        if name == _DICT and not arguments:
            return {}
        if name in _OTHERS:
            return Other(name)
        if name == "torch._utils _rebuild_parameter" and isinstance(arguments[0], Stored):
            return arguments[0]
        if name in _REBUILDS and type(arguments[0]) is Storage:
            storage, begin, shape, stride, _, _, *rest = arguments
            dtype = DTYPES_BY_NAME[rest.pop(0).name] if name.endswith("_v3") else storage.dtype
            if dtype is None:
                raise ValueError("a tensor has no dtype")
            if any(rest):
                raise refused("it holds a tensor that is kept as the conjugate or the negative of another")
            return self._make(storage, dtype, begin, shape, stride)
        raise refused(f"its pickle calls {name.replace(' ', '.')} with what no state dict of tensors has")


_STOP = ord(".")
Machine.instructions = {
    0x80: Machine.protocol,
    ord("}"): lambda m: m.push({}),
    ord("]"): lambda m: m.push([]),
    ord(")"): lambda m: m.push(()),
    ord("("): lambda m: m.push(_MARK),
    ord("t"): lambda m: m.push(tuple(m.items())),
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.byte()),
    ord("M"): lambda m: m.number("<H"),
    ord("J"): lambda m: m.number("<i"),
    ord("G"): lambda m: m.number(">d"),
    0x8A: Machine.long,
    ord("X"): Machine.text,
    ord("c"): Machine.global_,
    ord("q"): lambda m: m.memo.__setitem__(m.byte(), m.stack[-1]),
    ord("r"): lambda m: m.memo.__setitem__(m.take("<I"), m.stack[-1]),
    ord("h"): lambda m: m.push(m.memo[m.byte()]),
    ord("j"): lambda m: m.push(m.memo[m.take("<I")]),
    ord("a"): lambda m: m.append(m.pop_items(1)),
    ord("e"): lambda m: m.append(m.items()),
    ord("s"): lambda m: m.set_items(m.pop_items(2)),
    ord("u"): lambda m: m.set_items(m.items()),
    ord("b"): lambda m: m.build(),
    ord("Q"): Machine.persistent,
    ord("R"): lambda m: m.reduce(),
    # (what makes an object of a class from its arguments, too, is only looked up)
    0x81: lambda m: m.reduce(),
}
