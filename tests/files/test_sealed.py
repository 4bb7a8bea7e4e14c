"""JSON that is read strictly, and that vouches for its own bytes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from resumable.files import strict_json

numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
bodies = st.dictionaries(st.text().filter(lambda key: key != "checksum"), values, min_size=1, max_size=4)

TEXT = strict_json.seal({"number": 1, "name": "é", "list": [True, None, 0.5]})


def vouched(rest: bytes) -> bytes:
    """Return a text with a right checksum, whatever else is wrong with it."""
    return f'{{"checksum": "{xxhash.xxh3_128_hexdigest(rest)}",'.encode() + rest


@settings(deadline=None, database=None)
@given(bodies)
def test_what_was_sealed_is_unsealed_as_it_was(body: dict[str, Any]) -> None:
    once = strict_json.unseal(strict_json.seal(body))
    assert strict_json.unseal(strict_json.seal(once)) == body


def _endless() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [math.nan], {"a": -math.inf}, _endless()])
def test_what_could_not_be_read_again_is_not_sealed(value: Any) -> None:
    with pytest.raises(ValueError, match=r"JSON compliant|Circular"):
        strict_json.seal({"a": 1, "b": value})


@pytest.mark.parametrize("body", [{"a": {1}}, {"a": b"b"}, {(1,): 1}])
def test_what_json_does_not_have_is_not_sealed(body: Any) -> None:
    with pytest.raises(TypeError):
        strict_json.seal(body)


def test_a_sealed_text_is_plain_json_with_its_checksum_first() -> None:
    assert list(strict_json.parse(TEXT)) == ["checksum", "number", "name", "list"]


@pytest.mark.parametrize("bit", range(8))
def test_no_flipped_bit_is_accepted(bit: int) -> None:
    for position in range(len(TEXT)):
        damaged = bytearray(TEXT)
        damaged[position] ^= 1 << bit
        with pytest.raises(ValueError, match="checksum"):
            strict_json.unseal(bytes(damaged))


def test_no_truncated_text_is_accepted() -> None:
    for length in range(len(TEXT)):
        with pytest.raises(ValueError, match="checksum"):
            strict_json.unseal(TEXT[:length])


@pytest.mark.parametrize("rest", [b"\n", b" ", b"\0", b"}"])
def test_no_byte_may_follow(rest: bytes) -> None:
    with pytest.raises(ValueError, match="checksum"):
        strict_json.unseal(TEXT + rest)


HOSTILE = {
    "nothing": b"",
    "a key twice": b'{"a": 1, "a": 1}',
    "a key twice, deep inside": b'[{"a": {"b": 1, "\\u0062": 2}}]',
    "a key twice, and colons in texts": b'{"a": 1, "a": ":", "b": "::"}',
    "a key twice, and devices": b'{"a": {"b": "cuda:0"}, "a": "cuda:cuda:"}',
    "a key twice in what another hides": b'{"a": {"b": 1, "b": 2}, "a": {"b": 1, "c": 2}}',
    "a key twice, and spaces": b'{"a" : 1, "a" : 2}',
    "NaN": b"[NaN]",
    "Infinity": b"[Infinity]",
    "-Infinity": b"[-Infinity]",
    "an infinite number": b"[1e999]",
    "a negative infinite number": b"[-1e999]",
    "lists without a bottom": b"[" * 200_000,
    "objects without a bottom": b'{"a":' * 200_000,
    "nested too deeply": b"[" * 100_000 + b"]" * 100_000,
    "a number of very many digits": b"9" * 1_000_000,
    "no UTF-8": b'"\xff"',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "a byte order mark": b"\xef\xbb\xbf1",
    "two values": b"1 2",
    "other quotes": b"{'a': 1}",
    "a comma too many": b"[1,]",
    "a raw line break in a string": b'"\n"',
    "a number with a zero before it": b"01",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
}


def test_colons_in_texts_and_keys_are_no_keys_that_come_twice() -> None:
    value = {"a": "cuda:0", "cuda:": [":", {"b:": "cuda:cuda:", "c": [{"d": 1}, []]}], "e": {}}

    assert strict_json.parse(json.dumps(value).encode()) == value


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (many reasons, one kind)
        strict_json.parse(text)
    with pytest.raises(ValueError):  # noqa: PT011
        strict_json.parse(memoryview(text))


@pytest.mark.parametrize("rest", [b"", b"}", b'"checksum": 1}', b'"a": NaN}', b'"a": 1} x', b"\xff"])
def test_a_right_checksum_does_not_excuse_what_is_no_json(rest: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        strict_json.unseal(vouched(rest))


@settings(deadline=None, database=None)
@given(st.binary() | st.text(alphabet='[]{}":,-0123456789.eE tfnu\\').map(str.encode))
def test_parsing_never_raises_anything_but_value_errors(text: bytes) -> None:
    try:
        value = strict_json.parse(text)
    except ValueError:
        return
    assert isinstance(value, (dict, list, str, int, float, bool, type(None)))


@pytest.mark.parametrize(("kind", "value"), [(int, True), (float, 1), (dict, []), (str, None), (bool, 0)])
def test_typed_takes_no_other_type(kind: type, value: Any) -> None:
    with pytest.raises(ValueError, match=f"stands where {kind.__name__} belongs"):
        strict_json.typed(kind, value)


def test_a_message_does_not_repeat_a_value_of_any_length() -> None:
    with pytest.raises(ValueError, match="belongs") as caught:
        strict_json.typed(int, "x" * 1_000_000)
    assert len(str(caught.value)) < 300
