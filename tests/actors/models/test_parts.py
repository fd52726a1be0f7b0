"""What the adapters share, and how they are imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.actors.models.servers import Answer, AnthropicApi, Api, Call, ChatApi, ResponsesApi
from turnkeeper.actors import ModelResponse
from turnkeeper.actors.models._parsing import SentEvents, explained
from turnkeeper.actors.models._streaming import Reading
from turnkeeper.actors.models.anthropic import _MessageReading
from turnkeeper.actors.models.base import (
    ContextOverflow,
    MalformedHistory,
    ModelError,
    ModelRefusal,
    ModelUnavailable,
)
from turnkeeper.actors.models.openai import _ChatReading, _ResponsesReading

KINDS = (ContextOverflow, MalformedHistory, ModelError, ModelRefusal, ModelUnavailable)

READINGS: list[tuple[Api, Callable[[], Reading]]] = [
    (ChatApi(), lambda: _ChatReading("m", {})),
    (ResponsesApi(), lambda: _ResponsesReading("m", {})),
    (AnthropicApi(), lambda: _MessageReading("m", {})),
]

ANSWERS = [
    Answer(["a", "b"], [Call("look", ["{", "}"])], thinking=[{"data": "x"}]),
    Answer(["a"], ending="length"),
    Answer(["a"], error={"type": "api_error"}),
]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=3,
)


def _places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The path of each part of a JSON value."""
    inner: list[tuple[Any, object]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [path, *(place for key, part in inner for place in _places(part, (*path, key)))]


@given(data=st.data())
def test_whatever_a_server_sends_is_read_or_is_one_of_the_five_failures(
    data: st.DataObject,
) -> None:
    api, make = data.draw(st.sampled_from(READINGS))
    answer = data.draw(st.sampled_from(ANSWERS))
    events = [sent for _, sent, _ in api.events(answer) if not isinstance(sent, str)]
    stream = json.loads(json.dumps(events))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.sampled_from([path for path in _places(stream) if len(path) > 1]))
        at = stream
        for key in place[:-1]:
            at = at[key]
        at[place[-1]] = data.draw(json_values)
        if len(place) == 2 and not isinstance(stream[place[0]], dict):
            stream[place[0]] = {}
    reading = make()
    try:
        for event in stream:
            assert isinstance(reading.take(event), str)
        assert isinstance(reading.response(), ModelResponse)
    except KINDS:
        pass


@given(
    error=json_values | st.dictionaries(st.sampled_from(["message", "type", "code"]), json_values)
)
def test_any_error_is_one_of_the_five_failures(error: object) -> None:
    for status in (None, 400, 401, 404, 413, 418, 422, 429, 500, 999):
        assert isinstance(explained("m", error, status=status), KINDS)


class Chunk(bytes):
    """Bytes from the network that count what they are put behind."""

    copied = 0

    def __radd__(self, before: bytes) -> bytes:
        Chunk.copied += len(before)
        return bytes(before) + bytes(self)


def test_a_long_event_is_not_copied_anew_for_each_of_its_parts() -> None:
    """5 MB in parts of 1,400 bytes took 25 s, in which nothing else ran."""
    sent = SentEvents()
    raw = b"data: " + b"x" * 10_000 + b"\n\n"
    Chunk.copied = 0
    found = [data for n in range(0, len(raw), 10) for data in sent.feed(Chunk(raw[n : n + 10]))]
    assert found == ["x" * 10_000]
    assert Chunk.copied <= len(raw)


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1)),
    end=st.sampled_from(["\n", "\r\n"]),
    sizes=st.lists(st.integers(1, 9), min_size=1),
)
def test_events_are_the_same_in_whatever_portions_they_come(
    texts: list[str], end: str, sizes: list[int]
) -> None:
    stream = "".join(f"event: x{end}data: {text}{end}{end}" for text in texts).encode()
    sent = SentEvents()
    got: list[str] = []
    at = n = 0
    while at < len(stream):
        size = sizes[n % len(sizes)]
        got.extend(sent.feed(stream[at : at + size]))
        at, n = at + size, n + 1
    assert got == texts


def test_an_event_of_several_lines_is_one_and_an_unfinished_one_is_none() -> None:
    sent = SentEvents()
    assert list(sent.feed(b"data: a\ndata:b\n: comment\nid: 7\n\n\n\ndata: c\n")) == ["a\nb"]


def test_a_byte_order_mark_before_the_first_event_is_passed_over_and_no_other() -> None:
    sent = SentEvents()
    stream = b"\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\ndata: c\n\n"
    got = [data for byte in stream for data in sent.feed(bytes((byte,)))]
    assert got == ["a", "c"]


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )


def test_the_package_itself_imports_neither_provider() -> None:
    code = "import sys, turnkeeper.actors; print({'openai', 'anthropic'} & sys.modules.keys())"
    assert _run(code).stdout == "set()\n"


@pytest.mark.parametrize("package", ["openai", "anthropic"])
def test_without_its_package_an_adapter_names_the_extra(package: str) -> None:
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        f"try: import turnkeeper.actors.models.{package}\n"
        "except ImportError as error: print(error)"
    )
    assert f"install turnkeeper[{package}]" in _run(code).stdout
