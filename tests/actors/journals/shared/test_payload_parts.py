"""Large parts are cut out of a payload and put back byte for byte."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkeeper.actors.journals.shared.payload_parts import PART_BYTES_MIN, join, split

LONG = b"x" * PART_BYTES_MIN

pieces = st.sampled_from([LONG, LONG[1:], b'"', b"\\", b'\\"', b"{", b":", b"\n", "ü".encode()])


@given(st.lists(pieces, max_size=12).map(b"".join))
def test_whatever_is_split_is_joined_again(payload: bytes) -> None:
    kept, places, parts = split(payload)
    assert join(kept, places, dict(parts).__getitem__) == payload


def test_each_long_string_of_a_json_text_is_a_part() -> None:
    text = {"a": LONG.decode(), "b": "short", "c": [LONG.decode() + '"\\é', LONG.decode()]}
    payload = json.dumps(text).encode()

    kept, places, parts = split(payload)

    assert json.loads(kept) == {"a": "", "b": "short", "c": ["", ""]}
    assert len(parts) == 3
    assert len(dict(parts)) == 2  # equal parts have one digest
    assert join(kept, places, dict(parts).__getitem__) == payload


def test_what_is_long_without_a_long_string_stays_whole() -> None:
    payload = json.dumps(["short"] * 20_000).encode()
    kept, _, parts = split(payload)
    assert (kept, list(parts)) == (payload, [])


def test_a_string_that_never_ends_is_looked_at_once() -> None:
    """Else each of its quotes would be tried to the end, and this test would not."""
    payload = b'\\"' * 200_000
    kept, _, parts = split(payload)
    assert (kept, list(parts)) == (payload, [])


@pytest.mark.parametrize("places", ["", "{}x", "[1]", '[["a", 1]]', '[[0, "zz"]]', "null"])
def test_places_that_are_none_are_an_error(places: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        join(b"{}", places, lambda _: b"")
