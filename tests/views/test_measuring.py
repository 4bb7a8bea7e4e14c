"""How large numbers are and how far apart, from their bytes: held against torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from resumable.files import tensor_file
from resumable.views import magnitudes

NUMBERS = [dtype for dtype in tensor_file.DTYPES if dtype != torch.bool]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def raw(tensor: torch.Tensor) -> memoryview:
    return tensor_file.as_bytes(tensor)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


@pytest.mark.parametrize("dtype", NUMBERS, ids=name)
def test_every_pattern_of_bits_is_what_torch_takes_it_for(dtype: torch.dtype) -> None:
    patterns = torch.arange(256 if dtype.itemsize == 1 else 65536, dtype=torch.int32)
    bits = patterns.to(torch.uint8) if dtype.itemsize == 1 else patterns.to(torch.int16)
    values = bits.view(torch.uint8).repeat(dtype.itemsize).view(dtype)

    found = magnitudes.size_of(raw(values), name(dtype), dtype.itemsize)

    expected = wide(values)
    finite = expected[torch.isfinite(expected)]
    assert found.count == values.numel()
    assert found.nan == int(torch.isnan(expected).sum())
    assert found.count - found.nan - found.inf == finite.numel()
    assert found.norm == pytest.approx(float(torch.linalg.vector_norm(finite)), rel=1e-12)


@pytest.mark.parametrize("dtype", NUMBERS, ids=name)
def test_a_distance_is_the_one_that_torch_computes(dtype: torch.dtype) -> None:
    one = (torch.rand(1000) * 4).to(dtype)
    other = one.clone()
    other[::3] = (torch.rand(334) * 4).to(dtype)

    found = magnitudes.distance_of(raw(one), raw(other), name(dtype), dtype.itemsize)

    gap = wide(other) - wide(one)
    assert found.changed == int(wide(one).ne(wide(other)).sum())
    assert found.most == pytest.approx(float(gap.abs().max()), rel=1e-12)
    assert found.relative == pytest.approx(
        float(torch.linalg.vector_norm(gap) / torch.linalg.vector_norm(wide(one)))
    )


def test_a_bit_is_a_difference_where_the_numbers_are_equal() -> None:
    one, other = torch.tensor([0.0, math.nan]), torch.tensor([-0.0, math.nan])
    other.view(torch.int32)[1] += 1

    found = magnitudes.distance_of(raw(one), raw(other), "float32", 4)

    assert (found.changed, found.most, found.relative) == (2, 0.0, 0.0)


def test_what_is_not_finite_does_not_hide_how_far_the_others_are() -> None:
    one = torch.tensor([1.0, math.inf, math.nan, 4.0])
    other = torch.tensor([math.nan, math.inf, 3.0, 4.5])

    found = magnitudes.distance_of(raw(one), raw(other), "float32", 4)

    assert (found.changed, found.most, found.not_finite) == (3, 0.5, 1)
    assert (found.before.nan, found.before.inf) == (1, 1)


def test_what_was_nothing_has_no_relative_distance() -> None:
    found = magnitudes.distance_of(raw(torch.zeros(2)), raw(torch.ones(2)), "float32", 4)

    assert (found.most, found.relative) == (1.0, None)


@pytest.mark.parametrize("array", [np.array(["ab", "c"]), np.array(["2020-01-01"], "M8[D]")])
def test_what_is_no_number_is_compared_bit_by_bit(array: Any) -> None:
    one, other = (memoryview(bytearray(array.tobytes())) for _ in range(2))
    other[0] ^= 1

    found = magnitudes.distance_of(one, other, array.dtype.str, array.itemsize)

    assert (found.changed, found.relative) == (1, None)
    assert magnitudes.size_of(one, array.dtype.str, array.itemsize).norm is None


@pytest.mark.parametrize("dtype", ["O", "|O8", "float4", "<u3", "V8", "i4,i4", "M8[x]", ""])
def test_no_other_dtype_is_made_from_its_name(dtype: str) -> None:
    assert magnitudes.width(dtype) is None
    assert not magnitudes.is_number(dtype)
