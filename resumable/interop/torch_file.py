"""A file of `torch.save`, read without unpickling it: only tensors and plain values, and nothing is called.

The file is a zip archive: a pickle, which says how the tensors are put together, and the memory of each.
A pickle is a program. This reader knows the few instructions that a state dict is made of, and what it is
told to call it only looks up in a table of its own; everything else is refused by name.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..files.tensor_file import DTYPES, refuse_no_booleans, viewed
from ..files.threads import no_garbage_collection
from .zip_archive import Archive, Read, refused

_MOST_PICKLE = 16 << 20
_MOST_DIMENSIONS = 64
_LONGEST_LINE = 1000
_MOST = 1 << 62


class Stored(NamedTuple):
    """A tensor that has not been read yet."""

    entry: str
    dtype: torch.dtype
    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class TorchFile:
    """The content of a file; ValueError if it is damaged, Unsupported if it holds more than plain values."""

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
        self.content: Any = _Machine(self._stored).run(bytes(archive.content(found[0])))
        """What was saved; tensors are `Stored`, and what is neither a tensor nor a plain value is `Other`."""

    def tensor(self, stored: Stored) -> torch.Tensor:
        """Read a tensor; tensors that share memory in the file share it here."""
        if stored.entry not in self._memory:
            self._memory[stored.entry] = self._archive.content(stored.entry)
        memory = self._memory[stored.entry]
        if not memory.nbytes:
            return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        refuse_no_booleans(flat, stored.dtype)
        return viewed(flat, stored.dtype).as_strided(stored.shape, stored.stride, stored.begin)

    def _stored(self, storage: Storage, dtype: torch.dtype, begin: Any, shape: Any, stride: Any) -> Stored:
        """Return a tensor whose shape and place make sense; nothing is allocated."""
        entry = f"{self._folder}/data/{storage.key}"
        if self._archive.sizes.get(entry) != storage.size:
            raise ValueError(f"{entry} in it has not the {storage.size:,} bytes that the pickle says")
        if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
            raise ValueError("a tensor in it has no shape")
        numbers = (begin, *shape, *stride)
        if not {*map(type, numbers)} <= {int} or not 0 <= min(numbers) <= max(numbers) < _MOST:
            raise ValueError("a tensor in it has a shape that is none")
        # 0 * 2**63 is 0, but torch overflows on the way.
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
    """A value that is neither a tensor nor plain; only the name of its class is known."""

    name: str


class Global(NamedTuple):
    """What a pickle asks for by name; it is never imported."""

    name: str


class Storage(NamedTuple):
    """Memory that tensors are views of."""

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
_DTYPES = {str(dtype).replace(".", " "): dtype for dtype in (*DTYPES, torch.complex128)}
_DICT = "collections OrderedDict"
_OTHERS = {
    *("torch Size", "torch device", "collections Counter", "argparse Namespace"),
    *("__builtin__ set", "builtins set"),
}
_TENSORS = {"torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3"}
_PARAMETER = "torch._utils _rebuild_parameter"
_KNOWN = {_DICT, *_STORAGES, *_DTYPES, *_OTHERS, *_TENSORS, _PARAMETER}


class _Code(io.BytesIO):
    """A pickle without long lines: Python takes hours to read a number of a million digits."""

    def readline(self, size: int | None = -1, /) -> bytes:
        return super().readline(_LONGEST_LINE)


class _Machine:
    """A pickle of protocol 2, followed instruction by instruction; it makes dicts, lists and plain values."""

    def __init__(self, make: _Make) -> None:
        self._make = make
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    @no_garbage_collection()
    def run(self, code: bytes) -> Any:
        """Return what the pickle makes; ValueError if it makes no sense."""
        try:
            for instruction, argument, _ in pickletools.genops(_Code(code)):
                if instruction.name not in _INSTRUCTIONS:
                    known = f"0x{ord(instruction.code):02x} ({instruction.name})"
                    raise refused(f"its pickle has the instruction {known}, which no state dict needs")
                _INSTRUCTIONS[instruction.name](self, argument)
            (found,) = self._stack
        # A Warning is raised where users turn warnings into errors, as for a name with a backslash.
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, Warning) as exc:
            raise ValueError(f"its pickle is none: {exc!r:.200}") from exc
        return found

    def protocol(self, number: int) -> None:
        if number != 2:
            raise refused(f"its pickle is of protocol {number}, and torch.save writes 2")

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def text(self, text: str) -> None:
        # UnicodeEncodeError, a ValueError, for half of a surrogate pair, which no terminal could print.
        text.encode()
        self.push(text)

    def name(self, name: str) -> None:
        if name not in _KNOWN:
            raise refused(
                f"its pickle asks for {name.replace(' ', '.')}, which no state dict of tensors needs"
            )
        self.push(Global(name))

    def put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def get(self, place: int) -> None:
        self.push(self._memo[place])

    def top(self, count: int) -> list[Any]:
        """Take some values from the stack."""
        if len(self._stack) < count:
            raise ValueError("it takes what is not there")
        found = self._stack[-count:]
        del self._stack[-count:]
        return found

    def items(self) -> list[Any]:
        """Take the values above the last mark."""
        place = len(self._stack) - 1
        while self._stack[place] is not _MARK:
            place -= 1
        found = self._stack[place + 1 :]
        del self._stack[place:]
        return found

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError("it appends to what is no list")
        target += items

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        keys = items[::2]
        if type(target) is not dict or not {*map(type, keys)} <= {str, int}:
            raise ValueError("it puts into a dict what has no place there")
        target.update(zip(keys, items[1::2], strict=True))

    def build(self) -> None:
        # The attributes of an OrderedDict, such as _metadata, and those of a Namespace are left out.
        self._stack.pop()
        if not isinstance(self._stack[-1], (dict, Other)):
            raise ValueError("it gives attributes to what has none")

    def persistent(self) -> None:
        kind, of, key, _, count = self._stack.pop()
        if kind != "storage" or type(key) is not str or type(count) is not int or of.name not in _STORAGES:
            raise ValueError("a storage is none")
        dtype = _STORAGES[of.name]
        self.push(Storage(key, dtype, count * (dtype.itemsize if dtype else 1)))

    def call(self) -> None:
        """Push what stands for the result of a call; nothing is called."""
        what, arguments = self.top(2)
        if type(arguments) is not tuple or type(what) is not Global:
            raise ValueError("it calls what cannot be called")
        name = what.name
        if name == _DICT and not arguments:
            self.push({})
        elif name in _OTHERS:
            self.push(Other(name))
        elif name == _PARAMETER and isinstance(arguments[0], Stored):
            self.push(arguments[0])
        elif name in _TENSORS and type(arguments[0]) is Storage:
            self.push(self._tensor(name, *arguments))
        else:
            called = name.replace(" ", ".")
            raise refused(f"its pickle calls {called} with what no state dict of tensors has")

    def _tensor(
        self, name: str, storage: Storage, begin: Any, shape: Any, stride: Any, _: Any, __: Any, *rest: Any
    ) -> Stored:
        dtype, more = storage.dtype, [*rest]
        if name.endswith("_v3"):
            dtype = _DTYPES[more.pop(0).name]
        if dtype is None:
            raise ValueError("a tensor has no dtype")
        if any(more):
            raise refused("it holds a tensor that is kept as the conjugate or the negative of another")
        return self._make(storage, dtype, begin, shape, stride)


_INSTRUCTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine.protocol,
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), _Machine.push),
    "BINUNICODE": _Machine.text,
    "GLOBAL": _Machine.name,
    "MARK": lambda m, _: m.push(_MARK),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "TUPLE": lambda m, _: m.push(tuple(m.items())),
    "TUPLE1": lambda m, _: m.push(tuple(m.top(1))),
    "TUPLE2": lambda m, _: m.push(tuple(m.top(2))),
    "TUPLE3": lambda m, _: m.push(tuple(m.top(3))),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "APPEND": lambda m, _: m.append(m.top(1)),
    "APPENDS": lambda m, _: m.append(m.items()),
    "EMPTY_DICT": lambda m, _: m.push({}),
    "SETITEM": lambda m, _: m.set_items(m.top(2)),
    "SETITEMS": lambda m, _: m.set_items(m.items()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.persistent(),
    # To make an object of a class (NEWOBJ) is a call too.
    **dict.fromkeys(("REDUCE", "NEWOBJ"), lambda m, _: m.call()),
    "STOP": lambda m, _: None,
}
"""All that a state dict needs, by their names in pickletools."""
