"""One operation of torch done a second time, which leaves no trace in the training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from ..loaders import rng

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""What an operation is called with: in order, and by name."""

_OF_TORCH = ("aten", "prims", "torchvision")
_SILENT = ("profiler", "prim", "c10d", "_c10d_functional", "_c10d_functional_autograd", "inductor")
# What lies in new memory means nothing, and a cuDNN RNN draws from a generator that is one of its tensors.
_LEFT_ALONE = ("empty", "_empty", "new_empty", "resize", "_resize", "set_", "record_stream", "_cudnn_rnn")
# The rest of what these return is work space, some of which nobody has written to.
_FIRST_ONLY = (
    "_scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "_embedding_bag",
    "_ctc_loss",
)
# Written to, which their schemas do not say.
_HIDDEN = ("running_mean", "running_var")
_ALIGNMENT = 64


class Kind(NamedTuple):
    """What can be said of an operation from its schema."""

    name: str
    can_be_repeated: bool
    is_foreign: bool
    draws: bool
    written: tuple[tuple[int, str], ...]
    """Where the tensors are that it writes to and does not return."""
    is_first_only: bool

    def results(self, returned: Any, given: Given) -> list[Tensor]:
        """Return the tensors that hold what the operation has worked out."""
        found = tree_leaves(returned)[: 1 if self.is_first_only else None]
        # (bytes beside another result are work space of cuDNN and oneDNN)
        kept = [one for i, one in enumerate(found) if i == 0 or _dtype(one) != torch.uint8]
        args, kwargs = given
        into = [args[i] if i < len(args) else kwargs.get(name) for i, name in self.written]
        return [one for one in (*kept, *tree_leaves(into)) if isinstance(one, Tensor)]


@cache
def kind(func: OpOverload) -> Kind:
    """Return what can be said of an operation."""
    schema = func._schema
    library, _, name = schema.name.partition("::")
    returned: set[str] = set().union(*(one.alias_info.before_set for one in schema.returns if one.alias_info))
    writes = [
        (i, argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.name in _HIDDEN or _is_written(argument.alias_info, returned)
    ]
    is_view = any(one.alias_info and not one.alias_info.is_write for one in schema.returns)
    has_tensors = bool(writes) or any("Tensor" in str(one.type) for one in schema.returns)
    # Elements on their own have no order in which they could be done.
    is_plain = is_view or not {torch.Tag.pointwise, torch.Tag.inplace_view}.isdisjoint(func.tags)
    is_left = library not in _OF_TORCH or name.startswith(_LEFT_ALONE)
    return Kind(
        schema.name,
        can_be_repeated=has_tensors and not is_plain and not is_left,
        is_foreign=library not in (*_OF_TORCH, *_SILENT),
        draws=torch.Tag.nondeterministic_seeded in func.tags
        or any(argument.name == "generator" for argument in schema.arguments),
        written=tuple(writes),
        is_first_only=name.startswith(_FIRST_ONLY) and "backward" not in name,
    )


def _is_written(alias: Any, returned: set[str]) -> bool:
    return alias is not None and alias.is_write and not alias.before_set & returned


def twins(given: Given) -> Given:
    """Return what an operation is called with, in memory of its own.

    All of it: some operations write to what their schema says they only read. Views of one piece of memory
    stay so, and each begins as far from a multiple of 64 bytes as its original: kernels add in another
    order where that is not so.
    """
    tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
    ends: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        begin, end = _extent(tensor)
        low, high = ends.get(key := _memory(tensor), (begin, end))
        ends[key] = min(low, begin), max(high, end)
    copies: dict[int, tuple[Tensor, int]] = {}

    def twin(tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
        if (key := _memory(tensor)) not in copies:
            copies[key] = _copy(tensor, *ends[key])
        copied, began = copies[key]
        offset = (_extent(tensor)[0] - began) // tensor.itemsize
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(copied.untyped_storage(), offset, tensor.size(), tensor.stride())

    twinned: Given = tree_map_only(Tensor, twin, given)
    return twinned


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return from which to which byte of its memory a tensor lies."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return begin, begin
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (steps + 1) * tensor.itemsize


def _copy(tensor: Tensor, low: int, high: int) -> tuple[Tensor, int]:
    """Return a copy of some bytes of a tensor's memory, and which byte of that it would begin at."""
    source = _bytes(tensor, low, high)
    room = torch.empty(high - low + _ALIGNMENT, dtype=torch.uint8, device=tensor.device)
    shift = (source.data_ptr() - room.data_ptr()) % _ALIGNMENT
    room[shift : shift + high - low].copy_(source)
    return room, low - shift


def _bytes(tensor: Tensor, low: int, high: int) -> Tensor:
    # (a view as bytes is refused where a size of 1 has an odd stride)
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), low, (high - low,), (1,))


def are_plain(leaves: Sequence[Any]) -> bool:
    """Whether all tensors are just numbers in memory, and no CUDA graph is being recorded."""
    tensors = [one for one in leaves if isinstance(one, Tensor)]
    if any(one.is_cuda for one in tensors) and torch.cuda.is_current_stream_capturing():
        return False
    return all(
        one.layout is torch.strided
        and not one.is_meta
        and not one.is_quantized
        and not one.is_nested
        and not one.is_conj()
        and not one.is_neg()
        and not one._is_zerotensor()
        for one in tensors
    )


def are_same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors have the same bits, NaN and the sign of zero too."""
    return all(map(_is_same, ones, others))


def _is_same(one: Tensor, other: Tensor) -> bool:
    if not are_plain([one, other]):
        return True
    return one.size() == other.size() and torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    in_order = tensor.detach().contiguous()
    return _bytes(in_order, *_extent(in_order))


def _dtype(value: object) -> torch.dtype | None:
    return value.dtype if isinstance(value, Tensor) else None


class Generators:
    """The random generators that an operation may draw from, as they stand."""

    def __init__(self, given: Given) -> None:
        self._own = [one for one in tree_leaves(given) if isinstance(one, torch.Generator)]
        self._states = self._read()

    def _read(self) -> tuple[Mapping[str, Any], list[Any]]:
        return rng.collect(), [rng.read(one) for one in self._own]

    def _write(self, states: tuple[Mapping[str, Any], list[Any]]) -> None:
        rng.restore(states[0])
        for generator, state in zip(self._own, states[1], strict=True):
            rng.write(generator, state)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Let them stand here once more, and then where they are now."""
        now = self._read()
        self._write(self._states)
        try:
            yield
        finally:
            self._write(now)


def strictly(func: OpOverload, given: Given) -> Any:
    """Do an operation where torch may only do what repeats itself; a NotRepeatable if it refuses."""
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    # (torch.use_deterministic_algorithms would change the settings of the compiler, too)
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        return func(*given[0], **given[1])
    except RuntimeError as exc:
        # As an error and not as a warning: torch shows those when the call of the script returns that led
        # here, where nothing can take them back.
        is_refusal = "determinis" in str(exc) and WORKSPACE not in str(exc)
        raise NotRepeatable if is_refusal else exc from exc
    finally:
        torch._C._set_deterministic_algorithms(was_on, warn_only=only_warned)


WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""The variable without which older versions of torch refuse each product of matrices on CUDA, which does
repeat itself with it."""


class NotRepeatable(Exception):
    """Torch has no deterministic implementation of an operation."""
