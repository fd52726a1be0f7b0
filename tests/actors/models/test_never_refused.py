"""Nothing that users, tools, models or applications give leads to a request that is refused.

The servers know every rule that the three APIs have published; a history that breaks one of them
would be refused again with every message that follows, so it would end its conversation for good.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import drawn
from tests.actors.core.logs import Maker
from tests.actors.models.asking import LOOK, asking
from tests.actors.models.servers import Answer, Call
from turnkeeper.actors.agents.tool_agent import ToolAgent
from turnkeeper.actors.agents.tools import Tools
from turnkeeper.actors.conversations.conversations import Conversations
from turnkeeper.actors.core.view import View
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import (
    AgentErrorEvent,
    Event,
    FileContent,
    ImageContent,
    ObservationEvent,
    ThinkingBlock,
    UserRejectEvent,
)
from turnkeeper.actors.journals.memory import MemoryJournal
from turnkeeper.actors.models.base import ModelRequest, ToolSpec
from turnkeeper.actors.tool_calls import ToolResult
from turnkeeper.actors.values.frozen import FrozenObject
from turnkeeper.runtime import Backoff, Refused

pytestmark = [pytest.mark.costly, pytest.mark.in_parts(2)]

APIS = ("chat", "responses", "anthropic")
every_api = pytest.mark.parametrize("api", APIS)

BLANKS = ("", " ", "\n\t", "\u00a0", "\u200b", "\x00", "\ufeff", "\u2028")
TEXTS = st.one_of(
    st.sampled_from([*BLANKS, "a", "x" * 3_000, "</tool>", '{"a": 1}', "[DONE]"]),
    st.text(st.characters(codec="utf-8"), max_size=20),
)
IDS = st.one_of(
    st.sampled_from(["c", "c.1", "c 1", "ü", "x" * 65, "x" * 300, "\x00", "toolu_01", "call_1"]),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
)
NAMES = st.one_of(
    st.sampled_from(["look", "a.b", "a_b", "größe", "", "x" * 65, "x" * 66, " ", "-", "\x00"]),
    st.text(st.characters(codec="utf-8"), max_size=8),
)
PNG = "data:image/png;base64,iVBORw0KGgo="
URLS = st.one_of(
    st.sampled_from(
        [
            *(
                "https://example.org/cat.png",
                "HTTP://example.org/a",
                "http://",
                "ftp://a/b",
                "",
                " ",
            ),
            *(
                "file:///etc/passwd",
                "cat.png",
                "javascript:1",
                "https://a b",
                PNG,
                "data:",
                "data:,",
            ),
            *("data:image/png;base64,", "data:image/png;base64,AAAA", "data:text/plain,hi"),
            *("data:image/tiff;base64,SUkqAA==", "data:image/svg+xml,<svg/>", "DATA:image/png,x"),
            *(
                "data:image/jpeg;base64,iVBORw0KGgo=",
                "data:image/gif,GIF89a%00",
                "data:IMAGE/PNG,x",
            ),
        ]
    ),
    st.text(st.characters(codec="utf-8"), max_size=12),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(-1e9, 1e9), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=3),
    ),
    max_leaves=6,
)  # fmt: skip
ARGUMENTS = st.one_of(
    st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), JSON, max_size=3),
    st.sampled_from([{}, {"n": 2**4000}, {"deep": [[[[[[[[0]]]]]]]]}, {"": ""}]),
)
THINKING = st.lists(
    st.one_of(
        st.builds(ThinkingBlock, thinking=TEXTS, signature=st.sampled_from([None, "s"])),
        st.builds(ThinkingBlock, thinking=st.just(""), redacted_data=st.sampled_from([None, "d"])),
    ),
    max_size=2,
).map(tuple)


FILES = st.builds(
    FileContent.with_bytes,
    st.sampled_from(["a.pdf", "ü b.txt", "x"]),
    st.sampled_from(["application/pdf", "text/plain", "application/json", "image/png", "a/b"]),
    st.sampled_from([b"", b"%PDF-1.7 ", b"hello", b" ", b"\xff", b"\x89PNG\r\n\x1a\n"]),
) | st.builds(
    FileContent,
    name=st.just("elsewhere"),
    media_type=st.sampled_from(["application/pdf", "image/png", "text/plain"]),
    url=URLS,
)


@st.composite
def histories(draw: st.DrawFn) -> list[Event]:
    """Whole exchanges, with whatever people, tools and models may have put into them."""
    log: list[Event] = []
    make, used = Maker(), {""}
    if draw(st.booleans()):
        log.append(make.system(draw(TEXTS)))
    for exchange in range(draw(st.integers(1, 3))):
        images = [ImageContent(url=url) for url in draw(st.lists(URLS, max_size=2))]
        files = draw(st.lists(FILES, max_size=2))
        log.append(make.user(draw(TEXTS), images=images, files=files))
        for step in range(draw(st.integers(0, 2))):
            count = draw(st.sampled_from([1, 1, 1, 1, 1, 2, 3, 129]))
            texts, results = draw(TEXTS), []
            thinking = draw(THINKING)
            for n in range(count):
                call_id = draw(IDS) if n < 3 else f"{exchange}-{step}-{n}"
                if call_id in used:
                    call_id = f"{call_id}/{exchange}/{step}/{n}"
                used.add(call_id)
                action = make.action(
                    call_id,
                    f"r{exchange}-{step}",
                    tool_name=draw(NAMES) if n < 3 else "look",
                    arguments=draw(ARGUMENTS) if n < 3 else {},
                    text=texts if n == 0 else "",
                )
                log.append(action.model_copy(update={"thinking": thinking if n == 0 else ()}))
                results.append(_result(draw, make, call_id) if n < 3 else make.result(call_id))
            log += results
        if draw(st.booleans()):
            log.append(make.agent(draw(TEXTS), thinking=draw(THINKING)))
    return log


def _result(draw: st.DrawFn, make: Maker, call_id: str) -> Event:
    kind = draw(st.sampled_from([ObservationEvent, AgentErrorEvent, UserRejectEvent]))
    fields: dict[str, Any] = {"tool_call_id": call_id, "content": draw(TEXTS)}
    if kind is ObservationEvent:
        fields["is_error"] = draw(st.booleans())
    result: Event = kind(**make.stamp(), **fields)
    return result


@every_api
@pytest.mark.parametrize("count", [128, 129, 257])
async def test_a_stored_response_of_many_calls_is_not_refused(api: str, count: int) -> None:
    """More than 128 calls in one message are too many for the chat API."""
    make = Maker()
    calls = [make.action(f"c{n}", text="all at once" if n == 0 else "") for n in range(count)]
    results = [make.result(f"c{n}") for n in reversed(range(count))]
    view = View.from_events([make.user(), *calls, *results])
    async with asking(api) as one:
        assert (await one.ask(request=ModelRequest(view, [LOOK]))).text == "ok"
        if api == "chat":
            sent = one.server.bodies[0]["messages"]
            made = [len(message["tool_calls"]) for message in sent if "tool_calls" in message]
            assert sum(made) == count
            assert max(made) <= 128
            assert [message.get("content") for message in sent].count("all at once") == 1


@every_api
async def test_a_text_or_an_image_of_any_size_is_not_refused(api: str) -> None:
    make = Maker()
    image = ImageContent(url="data:image/png;base64,iVBORw0KGgo" + "A" * 5_300_001)
    log = [
        make.system("s" * 1_048_577),
        make.user("u" * 1_048_577, images=[image]),
        make.action("c"),
        make.result("c", "r" * 1_048_577),
        make.agent("a" * 1_048_577),
        make.user("x" * 10_485_761),
    ]
    async with asking(api) as one:
        assert (await one.ask(request=ModelRequest(View.from_events(log), [LOOK]))).text == "ok"
        said = json.dumps(one.server.bodies[0])
    # Whole, whether in one piece or in several.
    for letter, length in [*((letter, 1_048_577) for letter in "sura"), ("x", 10_485_761)]:
        assert sum(map(len, re.findall(f"{letter}{{100,}}", said))) >= length - 100


@every_api
async def test_an_error_without_a_word_in_a_stored_log_is_not_refused(api: str) -> None:
    """What grep gives without a match, and what a user gives who rejects without a reason."""
    make = Maker()
    failed = ObservationEvent(**make.stamp(), tool_call_id="c", content="", is_error=True)
    rejected = UserRejectEvent(**make.stamp(), tool_call_id="d", content=" ")
    log = [
        make.user(),
        make.action("c"),
        failed,
        make.action("d", "r2"),
        rejected,
        make.system(" "),
    ]
    async with asking(api) as one:
        assert (await one.ask(request=ModelRequest(View.from_events(log), [LOOK]))).text == "ok"


SCHEMA_LEAVES = st.one_of(
    st.booleans(),
    st.sampled_from(
        [
            {}, {"type": "string"}, {"type": "array"}, {"type": ["array", "null"]}, {"type": "any"},
            {"type": "array", "items": [{"type": "string"}]}, {"type": "array", "items": []},
            {"minimum": 1, "exclusiveMinimum": True}, {"exclusiveMaximum": False},
            {"required": True}, {"pattern": "("},
            {"type": "object"}, {"enum": []}, {"enum": [1, "a", None]}, {"const": {"a": [1]}},
            {"type": "objekt"}, {"minLength": -1}, {"minLength": 1.5}, {"items": 3},
            {"$ref": "#/$defs/a"}, {"$ref": "#/nowhere"}, {"title": 3}, {"type": []}, {"anyOf": []},
            {"type": ["string", "string"]}, {"properties": []}, {"default": {"x": "ü"}},
        ]
    ),
)  # fmt: skip
KEYS = st.sampled_from(["a", "b", "a.b", "größe", "", "x y", "x" * 65, "properties", "items"])
SCHEMA_PARTS = st.recursive(
    SCHEMA_LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(KEYS, inner, max_size=3)},
            optional={"additionalProperties": inner, "required": st.lists(KEYS, max_size=2)},
        ),
        *(
            st.fixed_dictionaries({key: st.lists(inner, min_size=1, max_size=2)})
            for key in ("anyOf", "oneOf", "allOf", "prefixItems")
        ),
        st.fixed_dictionaries({"not": inner, "patternProperties": st.dictionaries(KEYS, inner)}),
    ),
    max_leaves=6,
)
SCHEMAS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "object", "object", "array", ["object", "null"]]),
        "properties": st.dictionaries(KEYS, SCHEMA_PARTS, max_size=3),
        "required": st.one_of(st.lists(KEYS, max_size=3), st.just(True)),
        "anyOf": st.lists(SCHEMA_PARTS, max_size=2),
        "oneOf": st.lists(SCHEMA_PARTS, max_size=2),
        "allOf": st.lists(SCHEMA_PARTS, max_size=2),
        "enum": st.just([{}]),
        "$defs": st.fixed_dictionaries({"a": SCHEMA_PARTS}),
        "$ref": st.sampled_from(["#/$defs/a", "#", "#/properties/a", "other.json"]),
        "$schema": st.just("http://json-schema.org/draft-07/schema#"),
    },
)


def _examples(usual: int) -> settings:
    return settings(
        max_examples=usual * 20 if drawn.is_whole() else usual,
        suppress_health_check=list(HealthCheck),
    )


@every_api
def test_no_history_is_refused(api: str) -> None:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(asking(api)) as one,
    ):

        @_examples(30)
        @given(histories(), st.booleans(), st.booleans())
        def fuzz(log: list[Event], has_tools: bool, is_plain: bool) -> None:
            tools = [LOOK] if has_tools else ()
            request = ModelRequest(View.from_events(log), tools, is_plain=is_plain)
            assert portal.call(partial(one.ask, request=request)).text == "ok"

        fuzz()
        assert not one.server.refusals


@every_api
def test_no_tool_that_can_be_made_is_refused(api: str) -> None:
    view = View.from_events([Maker().user()])
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(asking(api)) as one,
    ):

        @_examples(120)
        @given(NAMES, TEXTS, SCHEMAS)
        def fuzz(name: str, description: str, schema: dict[str, Any]) -> None:
            try:
                spec = ToolSpec(name, description, FrozenObject(schema))
                request = ModelRequest(view, [spec, LOOK])
            except InvalidInput:
                return
            assert portal.call(partial(one.ask, request=request)).text == "ok"

        fuzz()
        assert not one.server.refusals
        assert len(one.server.bodies) > 40


# Half an emoji comes from a stream that was cut, a name that is not UTF-8 from a file system.
SAID = st.one_of(TEXTS, st.sampled_from(["\ud800", "a\udc80", "\ud83d\ude00"]))
WRITTEN = st.one_of(
    st.sampled_from(
        ["{}", "", "[]", "null", "{", '{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud800"}']
    ),
    st.sampled_from(["[" * 5_000, '{"a":' * 200 + "1" + "}" * 200, '{"a": %s}' % ("9" * 5_000)]),
)
RETURNED = st.one_of(
    SAID,
    st.builds(ToolResult, SAID, st.booleans(), st.booleans()),
    st.sampled_from([None, float("nan"), float("inf"), b"\xff", {1: 2}, object(), [2**70], {"a"}]),
)


@every_api
def test_a_conversation_goes_on_whatever_is_said_called_and_returned(api: str) -> None:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(asking(api)) as one,
    ):

        @_examples(15)
        @given(
            st.lists(
                st.tuples(SAID, URLS, WRITTEN, NAMES, IDS, RETURNED, SAID), min_size=1, max_size=2
            ),
            SAID,
        )
        def fuzz(turns: Sequence[tuple[Any, ...]], prompt: str) -> None:
            portal.call(_converse, one, turns, prompt)

        fuzz()
        assert not one.server.refusals


async def _converse(one: Any, turns: Sequence[tuple[Any, ...]], prompt: str) -> None:  # noqa: ANN401 - `Asking`
    returned: list[Any] = []

    async def look() -> object:
        value = returned[0]
        if isinstance(value, str) and value in BLANKS:
            raise RuntimeError(value)
        return value

    one.server.replies.clear()
    agent = ToolAgent(
        one.model, Tools(look), attempts_max=1, backoff=Backoff(first_s=0.001, max_s=0.001)
    )
    try:
        conversations = Conversations(agent, journal=MemoryJournal(), system_prompt=prompt)
    except Refused:
        return
    async with conversations:
        for text, url, written, name, call_id, value, said in turns:
            returned[:] = [value]
            calls = [Call("look", ["{}"], "1"), Call(name, [written], call_id)]
            one.server.replies.extend(
                [Answer(calls=calls), Answer([said.encode("utf-8", "replace").decode()])]
            )
            try:
                turn = await conversations["a"].send(text, images=[ImageContent(url=url)])
                await turn.end()
            except (Refused, ValueError):
                continue
        one.server.replies.clear()
        turn = await conversations["a"].send("and now?")
        assert (await turn.end()).outcome == "completed"
