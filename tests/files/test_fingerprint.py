"""A fingerprint is the same again only for the same bits, on the host and where nothing is copied from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from resumable.files import fingerprint, tensor_file

Of = Callable[[Tensor], Any]


def on_host(tensor: Tensor) -> Any:
    """Return the fingerprint that tensors in host memory have."""
    return fingerprint.of([tensor])


def on_device(tensor: Tensor) -> Any:
    """Return the fingerprint that tensors of a GPU have."""
    return [fingerprint.on_device(tensor)]


WAYS = [on_host, on_device]
DTYPES = [*tensor_file.DTYPES, torch.complex128]

numbers = st.lists(st.integers(0, 255), min_size=1, max_size=70)


def same(of: Of, one: Tensor, other: Tensor) -> bool:
    return fingerprint.is_same(of(one), of(other))


def of_bytes(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


@pytest.mark.quick(2)
@pytest.mark.parametrize("of", WAYS)
@settings(max_examples=150, deadline=None)
@given(values=numbers, data=st.data())
def test_a_change_of_any_one_number_is_seen(of: Of, values: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(values) - 1))
    changed = [*values]
    changed[at] ^= data.draw(st.integers(1, 255))

    assert same(of, of_bytes(values), of_bytes(values))
    assert not same(of, of_bytes(values), of_bytes(changed))


@pytest.mark.parametrize("of", WAYS)
@settings(max_examples=150, deadline=None)
@given(numbers.filter(lambda values: len(values) > 1), st.data())
def test_a_swap_is_seen(of: Of, values: list[int], data: st.DataObject) -> None:
    places = st.integers(0, len(values) - 1)
    one, other = data.draw(places), data.draw(places)
    swapped = [*values]
    swapped[one], swapped[other] = values[other], values[one]

    assert same(of, of_bytes(values), of_bytes(swapped)) is (values == swapped)


@pytest.mark.parametrize("of", WAYS)
@pytest.mark.parametrize("pattern", [[1, -2, 1], [1, -1], [1, -3, 3, -1], [1, 0, -2, 0, 1]], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_changes_that_cancel_out_in_a_sum_are_seen(of: Of, pattern: list[int], dtype: torch.dtype) -> None:
    before = torch.full((43,), 9, dtype=dtype)

    for at in range(len(before) - len(pattern) + 1):
        after = before.clone()
        after[at : at + len(pattern)] += torch.tensor(pattern, dtype=dtype)
        assert not same(of, before, after), f"{pattern} at {at}"


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of any dtype with random bits."""
    size = torch.empty(shape, dtype=dtype).nbytes
    top = 2 if dtype == torch.bool else 256
    return torch.randint(0, top, (size,), dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("of", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (), (3,), (5, 7), (4, 4, 2)], ids=str)
def test_a_fingerprint_is_of_all_bits(of: Of, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(dtype, shape)
    flat = tensor.view(-1).view(torch.uint8)
    before = of(tensor.clone())

    assert fingerprint.is_same(before, of(tensor))
    for at in {0, len(flat) // 2, len(flat) - 1}:
        flat[at] ^= 1
        assert not fingerprint.is_same(before, of(tensor)), f"byte {at}"
        flat[at] ^= 1
    assert fingerprint.is_same(before, of(tensor))


@pytest.mark.parametrize("of", WAYS)
def test_what_only_looks_equal_is_another(of: Of) -> None:
    assert not same(of, torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same(of, torch.tensor([torch.nan]), torch.tensor([torch.nan]))


def test_a_long_tensor_is_summed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_AT_A_TIME", 16)
    tensor = torch.zeros(71, dtype=torch.uint8)

    seen = [int(fingerprint.on_device(tensor.index_fill(0, torch.tensor(at), 3))) for at in range(71)]

    assert len({*seen, int(fingerprint.on_device(tensor))}) == 72


def test_another_number_of_tensors_is_another_fingerprint() -> None:
    one, other = torch.ones(3), torch.ones(4)

    assert not fingerprint.is_same(fingerprint.of([one]), fingerprint.of([one, other]))
    assert not fingerprint.is_same(fingerprint.of([other, one]), fingerprint.of([one, other]))
    assert fingerprint.is_same(fingerprint.of([]), fingerprint.of([]))


def test_a_tensor_on_the_host_is_read_whatever_its_layout() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)

    assert fingerprint.is_same(on_host(tensor.t()), on_host(tensor.t().contiguous()))
    assert not fingerprint.is_same(on_host(tensor.t()), on_host(tensor))


def test_what_has_no_fingerprint_is_never_the_same() -> None:
    assert not fingerprint.is_same([None], [None])
    assert not fingerprint.is_same(on_host(torch.ones(2)), on_device(torch.ones(2)))
