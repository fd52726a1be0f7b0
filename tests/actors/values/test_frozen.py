"""JSON values that cannot be changed, and that JSON gives back exactly."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from turnkeeper.actors.events import UserMessageEvent, decode_event, encode_event
from turnkeeper.actors.values.frozen import FrozenObject

_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=12,
)


def _thawed(value: object) -> object:
    if isinstance(value, dict):
        return {key: _thawed(each) for key, each in value.items()}
    return [_thawed(each) for each in value] if isinstance(value, tuple) else value


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), _json, max_size=4))
def test_what_is_frozen_comes_back_from_json_as_it_was(items: dict[str, object]) -> None:
    frozen = FrozenObject(items)

    assert _thawed(frozen) == items
    assert from_json(to_json(frozen)) == items
    assert json.loads(json.dumps(frozen)) == items
    assert FrozenObject(from_json(to_json(frozen))) == frozen
    assert pickle.loads(pickle.dumps(frozen)) == frozen
    assert hash(FrozenObject(items)) == hash(frozen)


@pytest.mark.parametrize(
    "change",
    [
        lambda o: o.__setitem__("a", 1),
        lambda o: o.__delitem__("a"),
        lambda o: o.clear(),
        lambda o: o.pop("a"),
        lambda o: o.popitem(),
        lambda o: o.setdefault("b", 1),
        lambda o: o.update(a=1),
        lambda o: o.__ior__({"a": 1}),
        lambda o: o["inner"].update(a=1),
        lambda o: o["list"].append(1),
        lambda o: o["list"][0].clear(),
    ],
)
def test_nothing_in_a_frozen_object_can_be_changed(change: Callable[[Any], object]) -> None:
    frozen = FrozenObject({"a": 0, "inner": {"b": 1}, "list": [{"c": 2}]})
    before = json.dumps(frozen)

    with pytest.raises((TypeError, AttributeError)):
        change(frozen)

    assert json.dumps(frozen) == before


def test_a_frozen_object_does_not_follow_what_it_was_made_of() -> None:
    source = {"list": [1, {"deep": [2]}]}
    frozen = FrozenObject(source)

    source["list"].append(3)
    source["list"][1]["deep"].append(4)  # type: ignore[index]

    assert json.dumps(frozen) == '{"list": [1, {"deep": [2]}]}'


def test_copies_of_a_frozen_object_are_itself() -> None:
    frozen = FrozenObject({"a": [1]})

    assert copy.copy(frozen) is frozen
    assert copy.deepcopy(frozen) is frozen


def test_events_without_metadata_share_the_object_that_says_so() -> None:
    made = UserMessageEvent(content="hello", metadata=FrozenObject())
    read = decode_event(encode_event(made))

    assert isinstance(read, UserMessageEvent)
    assert made.metadata == FrozenObject({})
    assert read.metadata is made.metadata


def _nested(depth: int) -> dict[str, object]:
    value: object = "bottom"
    for _ in range(depth - 1):
        value = [value]
    return {"a": value}


@pytest.mark.parametrize(
    "value",
    [
        {"a": math.nan},
        {"a": math.inf},
        {"a": "\ud83d"},
        {"\ud83d": 1},
        {1: 2},
        {"a": {1, 2}},
        {"a": object},
        {"a": b"bytes"},
        {"a": 1 << 9000},
        _nested(102),
        {"a": FrozenObject(_nested(100))},
    ],
    ids=repr,
)
def test_what_json_would_not_give_back_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the kind is the contract
        FrozenObject(value)


def test_what_is_as_deep_and_as_long_as_may_be_can_be_read_back() -> None:
    frozen = FrozenObject({"deep": _nested(98), "long": (1 << 8192) - 1})

    assert FrozenObject(from_json(to_json(frozen))) == frozen
