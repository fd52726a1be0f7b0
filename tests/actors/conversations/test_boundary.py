"""Bad input is refused at the boundary, before anything is opened or written."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from tests.actors.conversations.worlds import HeldAgent, log_of, verified
from turnkeeper.actors import (
    Agent,
    ConfirmRisky,
    Conversation,
    ConversationConfig,
    Conversations,
    Event,
    FileContent,
    MemoryJournal,
    ModelRequest,
    Proposal,
    RollingCondenser,
    ScriptedModel,
    SQLiteJournal,
    SummarizingCondenser,
    Tool,
    ToolAgent,
    ToolResult,
    TurnContext,
    View,
    agent,
    tool,
)
from turnkeeper.actors.core.admission import AdmissionRefused
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import (
    InvalidConversationId,
    InvalidInput,
    NotAppendable,
)
from turnkeeper.actors.events import (
    AgentMessageEvent,
    ImageContent,
    ObservationEvent,
    UserMessageEvent,
    decode_event,
)
from turnkeeper.actors.gateway import app
from turnkeeper.actors.journals.transfer import import_lines
from turnkeeper.actors.models.messages import to_llm_messages
from turnkeeper.actors.values.type_names import a_type
from turnkeeper.runtime import NotDelivered, Ports, Runtime

pytestmark = pytest.mark.anyio


def _message(**fields: str) -> UserMessageEvent:
    ports = Ports()
    now = datetime.fromtimestamp(ports.now(), UTC)
    own: dict[str, Any] = {"id": ports.ids.new(), "timestamp": now, "content": "A", **fields}
    return UserMessageEvent(**own)


def _of_kind(kind: str) -> Event:
    """An event of a kind that no version here knows."""
    own = {"kind": kind, "id": Ports().ids.new(), "timestamp": "2026-01-01T00:00:00Z"}
    return decode_event(json.dumps(own))


BAD_INPUT: dict[str, Callable[[Conversations], Awaitable[object]]] = {
    "empty message id": lambda cs: cs["c"].send("A", message_id=""),
    "message id that is no text": lambda cs: cs["c"].send("A", message_id=7),  # type: ignore[arg-type]
    "message id with a line end": lambda cs: cs["c"].send("A", message_id="a\n"),
    "event id with a control": lambda cs: cs["c"].append(_message(id="a\x01")),
    "appended message id with a control": lambda cs: cs["c"].append(_message(message_id="a\x85")),
    "kind with a control": lambda cs: cs["c"].append(_of_kind("a\x01")),
    "kind of 300 characters": lambda cs: cs["c"].append_all([_of_kind("k" * 300)]),
    "retracted id that is half an emoji": lambda cs: cs["c"].retract(["\ud83d"]),
    "call id that is half an emoji": lambda cs: cs["c"].answer({"\ud83d": True}),
    "content that is no text": lambda cs: cs["c"].send(None),  # type: ignore[arg-type]
    "half an emoji": lambda cs: cs["c"].send("\ud83d"),
    "unknown on_overlap": lambda cs: cs["c"].send("A", on_overlap="sometimes"),  # type: ignore[arg-type]
    "no event": lambda cs: cs["c"].append("A"),  # type: ignore[arg-type]
    "negative seq": lambda cs: cs["c"].at(-1),
}


@pytest.mark.parametrize("name", ["", "x" * 257, "a\0b", "a\nb", "a/b", ".", "..", "\ud83d"])
async def test_no_conversation_begins_under_an_odd_id(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        parent = conversations["c"]
        await (await parent.send("A")).end()

        with pytest.raises(InvalidConversationId) as refused:
            await conversations[name].send("A")
        assert refused.value.conversation_id == name
        with pytest.raises(InvalidConversationId):
            await parent.fork(name)
        assert [row.conversation_id for row in (await conversations.list()).rows] == ["c"]
    warned = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert not warned, "the caller was told, and there is nothing to do for an operator"


@pytest.mark.parametrize("what", BAD_INPUT)
async def test_bad_input_is_refused_at_the_boundary_and_hurts_no_neighbour(what: str) -> None:
    held = HeldAgent()
    held.hold("good")
    async with verified(held, journal=MemoryJournal()) as conversations:
        turn = await conversations["c"].send("good")

        with pytest.raises(InvalidInput):
            await BAD_INPUT[what](conversations)

        held.release("good")
        assert await turn.reply() == "a(good)"
        assert await log_of(conversations["c"]) == ["u:good", "a:a(good)"]


async def test_a_refused_id_with_a_nul_is_kept_with_its_reason_and_hurts_no_turn() -> None:
    held = HeldAgent()
    held.hold("good")
    async with verified(held, journal=MemoryJournal()) as conversations:
        conversation = conversations["c"]
        turn = await conversation.send("good")
        asked = _message()
        result = ObservationEvent(
            id=asked.id, timestamp=asked.timestamp, tool_call_id="a\0b", content="late"
        )

        with pytest.raises(AdmissionRefused):
            await conversation.append(result)
        with pytest.raises(AdmissionRefused):
            await conversation.retract(["a\0b"])

        held.release("good")
        assert await turn.reply() == "a(good)"
        assert ["a\ufffdb" in one.reason for one in await conversation.rejections()] == [True] * 2


async def test_invalid_settings_are_refused_before_anything_is_opened() -> None:
    for conversation_id in ("", "x" * 257, "\ud83d"):
        async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
            with pytest.raises(InvalidInput):
                conversations[conversation_id]
            with pytest.raises(InvalidInput):
                conversations["c"].events(after=-1)
    with pytest.raises(InvalidInput, match="on_overlap"):
        verified(HeldAgent(), journal=MemoryJournal(), on_overlap="never")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="use @agent"):
        verified(lambda turn: None, journal=MemoryJournal())  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="async def"):
        agent(lambda turn: None)  # type: ignore[arg-type,return-value]


class ProposesOnly:
    """A condenser without `need`."""

    async def propose(self, _: View, __: str) -> Proposal | None:
        return None


@pytest.mark.parametrize("journal", ["chats.db", Path("chats.db"), None])
async def test_what_is_no_journal_or_model_is_refused_with_the_names_of_some(
    journal: object,
) -> None:
    with pytest.raises(InvalidInput, match=r'such as SQLiteJournal\("chats\.db"\)'):
        verified(HeldAgent(), journal=journal)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r'such as OpenAIChatModel\("name"\)'):
        ToolAgent(journal)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda what: verified(HeldAgent(), journal=MemoryJournal(), condenser=what),
            r"Rolling.*`need\(view\)` and `async propose\(view, need\)`",
        ),
        (
            lambda _: verified(HeldAgent(), journal=MemoryJournal(), condenser=ProposesOnly()),  # type: ignore[arg-type]
            "`need",
        ),
        (
            lambda _: verified(HeldAgent(), journal=MemoryJournal(), condenser=RollingCondenser),  # type: ignore[arg-type]
            "condenser is the class RollingCondenser; it takes an object of it",
        ),
        (lambda _: ToolAgent(ScriptedModel), "model is the class ScriptedModel; it takes an obj"),  # type: ignore[arg-type]
        (lambda _: ScriptedModel("Hello."), r'script is a str; it takes a list .* \["Hello\."\]'),
        (lambda _: ScriptedModel(None), "script is a NoneType; it takes a list"),  # type: ignore[arg-type]
        (lambda _: ScriptedModel(b"Hi"), "script is a bytes; it takes a list"),  # type: ignore[arg-type]
        (lambda _: ScriptedModel({"a": 1}), "script is a dict; it takes a list"),
        (SummarizingCondenser, r"`summarizing_condenser\(model, window_tokens=200_000\)`"),
        (MemoryJournal, r"it takes a MemoryStore, .* use SQLiteJournal"),
        (lambda what: ToolAgent(ScriptedModel([]), what), "a list of tools"),
        # A generator would be used up by the check of its names, and no call would be asked about.
        (lambda model: ToolAgent(model, confirm=(n for n in "")), "a list of tool names"),  # type: ignore[arg-type]
        (lambda model: ToolAgent(model, confirm=True), "confirm is True; it takes"),  # type: ignore[arg-type]
        (lambda model: ToolAgent(model, confirm="add"), "confirm is 'add'; it takes"),
        (lambda model: ToolAgent(model, "read_file"), "tools is 'read_file'; it takes a list"),  # type: ignore[arg-type]
        (lambda what: Tool("add", "Add.", {}, what), "it takes a function"),
        (lambda what: Tool("add", "Add.", what, print), "it takes a mapping"),
    ],
)
def test_what_is_no_condenser_store_tool_or_function_is_refused_with_what_to_give(
    make: Callable[[Any], object], said: str
) -> None:
    with pytest.raises(InvalidInput, match=said):
        make(ScriptedModel([]))


@pytest.mark.parametrize("before", [math.nan, "yesterday", None, True])
async def test_what_is_no_time_deletes_nothing_and_is_refused(before: object) -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        with pytest.raises(InvalidInput, match=r"before is .*; it takes seconds since 1970"):
            await conversations.expire(before=before)  # type: ignore[arg-type]


async def test_uses_that_would_wait_for_ever_or_mislead_are_refused_with_what_to_write() -> None:
    conversations = verified(HeldAgent(), journal=MemoryJournal())
    with pytest.raises(RuntimeError, match=r"not open; use `async with .* or `with Blocking"):
        conversations["c"]
    async with conversations:
        turn = await conversations["c"].send("A")
        with pytest.raises(TypeError, match=r"use `await turn\.reply\(\)`"):
            await turn  # type: ignore[misc]
        with pytest.raises(TypeError, match=r"use `await conversations\.list\("):
            _ = "c" in conversations
        with pytest.raises(TypeError, match=r"await conversations\.list\(\)\)\.rows"):
            list(conversations)
        with pytest.raises(TypeError, match=r"await conversations\.list\(\)\)\.rows"):
            _ = [row async for row in conversations]
        await turn.end()
    with pytest.raises(RuntimeError, match="are closed; make new"):
        conversations["c"]
    with pytest.raises(RuntimeError, match="are closed; make new"):
        await conversations.delete("c")


class Silent:
    async def run(self, turn: TurnContext) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("use", "argument", "said"),
    [
        (lambda c: c["a"].events(after="1"), "after", "a str; it takes a whole number"),
        (lambda c: c["a"].follow(after=1.5), "after", "a float; it takes a whole number"),
        (lambda c: c["a"].at("1"), "at", "a str; it takes a whole number"),
        (lambda c: c["a"].at(True), "at", "a bool; it takes a whole number"),
        (lambda c: c["a"].answer(["call"]), "answers", "not a list"),
        (lambda c: c.list(limit="5"), "limit", "a str; it takes a whole number"),
        (lambda c: c.list(label="ab"), "label", "a pair of a name and a value"),
        (lambda c: c.list(label={"a": "b"}), "label", "a pair of a name and a value"),
        (lambda c: c.search("word", label="ab"), "label", "a pair of a name and a value"),
        (lambda c: c.list(status=5), "status", "an int; it takes a str"),
        (lambda c: c["a"].expecting(seq="1").send("A"), "seq", "a str; it takes a whole number"),
        (lambda c: c["a"].fork("b", at="1"), "at", "a str; it takes a whole number"),
        (lambda c: c["a"].interrupt(c["a"]), "turn_id", "a Conversation; it takes a str"),
        (lambda c: c["a"].undo(5), "turn_id", "an int; it takes a str"),
        (lambda c: c["a"].undo("\ud800"), "turn_id", "a lone surrogate"),
        (lambda c: c["a"].retract_turn(["turn"]), "turn_id", "a list; it takes a str"),
    ],
)
async def test_an_argument_of_another_type_is_refused_with_the_type_that_it_takes(
    use: Callable[[Any], Any], argument: str, said: str
) -> None:
    async with verified(HeldAgent(), journal=MemoryJournal(search=True)) as opened:
        await (await opened["a"].send("A")).end()
        with pytest.raises(InvalidInput, match=said) as refused:
            await use(opened)
        assert refused.value.argument == argument


def test_a_class_is_not_taken_for_an_object_of_it() -> None:
    journal: Any = MemoryJournal
    silent: Any = Silent
    with pytest.raises(InvalidInput, match="it takes a journal"):
        Conversations(HeldAgent(), journal=journal)
    with pytest.raises(InvalidInput, match="agent is the class Silent"):
        Conversations(silent, journal=MemoryJournal())


def test_a_runtime_is_no_other_thing() -> None:
    runtime: Any = Runtime
    with pytest.raises(InvalidInput, match=r"^runtime is .*; it takes a Runtime, or None"):
        Conversations(HeldAgent(), journal=MemoryJournal(), runtime=runtime)


async def test_a_caller_cannot_pretend_that_a_message_was_queued() -> None:
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        with pytest.raises(NotAppendable):
            await conversations["c"].append(
                UserMessageEvent(content="A", message_id="a", queued_event_id="q")
            )


async def test_a_chat_message_by_hand_is_not_of_a_turn_that_does_not_run() -> None:
    """Sent again under its id, it gave a turn whose end never came."""
    held = HeldAgent()
    async with verified(held, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        ended = await chat.send("A")
        await ended.end()
        held.hold("B")
        running = await chat.send("B")
        for turn_id in (ended.turn_id, "no turn"):
            with pytest.raises(NotAppendable):
                await chat.append(UserMessageEvent(content="C", message_id="c", turn_id=turn_id))

        await chat.append(UserMessageEvent(content="C", message_id="c", turn_id=running.turn_id))
        joined = await chat.send("C", message_id="c")
        await running.cancel()
        assert (await joined.end()).outcome == "interrupted"


async def test_a_conversation_begins_with_its_system_prompt_also_by_append() -> None:
    async with verified(
        HeldAgent(), journal=MemoryJournal(), system_prompt="Be kind."
    ) as conversations:
        chat = conversations["c"]
        assert (await chat.append(UserMessageEvent(content="A"))).seq == 2
        assert await log_of(chat) == ["system_prompt", "u:A"]


@asynccontextmanager
async def conversations(agent: Agent) -> AsyncIterator[Conversations]:
    async with Conversations(agent, journal=MemoryJournal(), verify="always") as opened:
        yield opened


async def kinds(conversation: Conversation) -> list[str]:
    return [logged.event.kind async for logged in conversation.events(live=False)]


@agent
async def echo(turn: TurnContext) -> None:
    await turn.begin_step()
    await turn.say(turn.message.content)


class Particular(AgentMessageEvent):
    """An event of an application's own."""

    mood: object = None


def changed_by_force(event: Event, name: str, value: object) -> Event:
    """Return the event, checked by pydantic and then changed past it."""
    object.__setattr__(event, name, value)
    return event


@pytest.mark.parametrize(
    "event",
    [
        AgentMessageEvent.model_construct(content=5),
        AgentMessageEvent.model_construct(),
        AgentMessageEvent(content="fine").model_copy(update={"content": None}),
        Particular(content="fine"),
        Particular(content="fine", mood=object()),
        UserMessageEvent.model_construct(content="fine", images=("no image",)),
        # These differ from what pydantic lets through only when they are read again.
        AgentMessageEvent(content="fine").model_copy(update={"timestamp": datetime(2025, 1, 1)}),  # noqa: DTZ001
        copy(AgentMessageEvent.model_construct(content="fine", timestamp=datetime(2025, 1, 1))),  # noqa: DTZ001
        UserMessageEvent.model_construct(
            content="fine", images=(ImageContent.model_construct(url=5),)
        ),
        AgentMessageEvent.model_construct(content="fine", kind="observation"),
        changed_by_force(AgentMessageEvent(content="fine"), "content", 5),
        changed_by_force(AgentMessageEvent(content="fine"), "timestamp", "today"),
    ],
)
async def test_an_event_that_could_not_be_read_again_is_refused_alone(event: Event) -> None:
    async with conversations(echo) as opened:
        conversation = opened["it"]
        turn = await conversation.send("a")
        with pytest.raises(InvalidInput):
            await conversation.append(event)
        with pytest.raises(InvalidInput):
            await conversation.append_all([AgentMessageEvent(content="fine"), event])
        assert await turn.reply() == "a"
        assert await kinds(conversation) == [
            "turn_started",
            "user_message",
            "agent_message",
            "turn_ended",
        ]


async def test_an_image_that_is_none_is_refused() -> None:
    async with conversations(echo) as opened:
        urls: Any = ["https://example.com/a.png"]
        with pytest.raises(InvalidInput, match="ImageContent"):
            await opened["it"].send("look", images=urls)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((5, "text/plain", b""), "name is an int; it takes a str"),
        (("a.txt", None, b""), "media_type is a NoneType; it takes a str"),
        (("a.txt", "text/plain", "a text"), "content is a str; it takes bytes"),
    ],
)
def test_what_is_no_part_of_a_file_is_refused_with_what_to_give(parts: Any, said: str) -> None:  # noqa: ANN401 - any
    with pytest.raises(InvalidInput, match=said):
        FileContent.with_bytes(*parts)


@pytest.mark.parametrize(
    ("part", "fields", "said"),
    [
        (FileContent, {"name": 5, "media_type": "a/b"}, "name is an int; it takes a str"),
        (FileContent, {"name": "a"}, "media_type is missing; FileContent takes name, media_type"),
        (FileContent, {"name": "a", "media_type": "a/b", "data": 5}, "data is an int; it takes"),
        (ImageContent, {"url": None}, "url is a NoneType; it takes a str"),
        (ImageContent, {"url": "half \ud83d"}, "url is invalid: .* valid string"),
        (ImageContent, {"address": "a"}, "url is missing; ImageContent takes url"),
        (ImageContent, {"url": "a", "alt": "b"}, "alt is unknown; ImageContent takes url"),
    ],
)
def test_a_part_of_a_message_with_wrong_fields_is_refused_with_those_it_has(
    part: Any,  # noqa: ANN401 - either class
    fields: dict[str, object],
    said: str,
) -> None:
    with pytest.raises(InvalidInput, match=said):
        part(**fields)


class Captioned(ImageContent):
    caption: str = "a caption"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"images": [ImageContent.model_construct(url=5)]}, "url is an int; it takes a str"),
        (
            {"images": [ImageContent(url="a").model_copy(update={"url": "\ud800"})]},
            "url is invalid",
        ),
        ({"images": [ImageContent.model_construct()]}, "url is missing"),
        ({"images": [Captioned(url="a")]}, "caption is unknown; ImageContent takes url"),
        ({"files": [FileContent.model_construct(name="a")]}, "media_type is missing"),
        (
            {"files": [FileContent.model_construct(name="a", media_type="a/b", data=5)]},
            "data is an int; it takes a str",
        ),
    ],
)
async def test_a_part_that_was_made_past_its_checks_is_refused_and_hurts_nothing(
    fields: Any,  # noqa: ANN401 - of `send`
    said: str,
) -> None:
    async with conversations(echo) as opened:
        with pytest.raises(InvalidInput, match=said):
            await opened["it"].send("look", **fields)
        assert await (await opened["it"].send("a")).reply() == "a"


@pytest.mark.parametrize("files", [["a.txt"], "a.txt", FileContent.with_bytes("a", "b/c", b"")])
async def test_files_that_are_none_are_refused_with_how_to_write_them(files: object) -> None:
    given: Any = files
    async with conversations(echo) as opened:
        with pytest.raises(InvalidInput, match=r"a list of FileContent, such as \["):
            await opened["it"].send("look", files=given)


@pytest.mark.parametrize(
    "wrong",
    [
        {"recover": "on_entry"},
        {"verify": "on"},
        {"system_prompt": 5},
        {"system_prompt": "half \ud83d"},
        {"name": 5},
        {"idle_s": math.nan},
        {"active_max": 0},
        {"active_max": math.nan},
        {"answer_length_max": math.nan},
        {"recover_max": math.nan},
        {"park_s": math.nan},
        {"configure": ConversationConfig()},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_setting_is_refused_before_anything_is_opened(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Conversations(echo, journal=MemoryJournal(), **wrong)


def look() -> str:
    """Look."""
    return ""


SWITCHES: dict[str, Callable[[Conversations, Any], object]] = {
    "live": lambda cs, no: cs["c"].events(live=no),
    "park": lambda cs, no: cs["c"].append(_message(), park=no),
    "exists": lambda cs, no: cs["c"].expecting(exists=no),
    "read_only": lambda _, no: SQLiteJournal("never.db", read_only=no),
    "takeover": lambda _, no: SQLiteJournal("never.db", takeover=no),
    "search": lambda _, no: MemoryJournal(search=no),
    "keep_users": lambda _, no: import_lines(MemoryJournal(), [], keep_users=no),
    "unknown": lambda _, no: ConfirmRisky(unknown=no),
    "show_author": lambda _, no: ToolAgent(ScriptedModel(["A"]), show_author=no),
    "tool look: idempotent": lambda _, no: tool(idempotent=no)(look),
    "is_error": lambda _, no: ToolResult("A", is_error=no),
    "may_have_happened": lambda _, no: ToolResult("A", may_have_happened=no),
    "app's read_only": lambda cs, no: app(cs, read_only=no),
    "view's is_plain": lambda _, no: to_llm_messages(View.from_events([]), is_plain=no),
    "view's show_author": lambda _, no: to_llm_messages(View.from_events([]), show_author=no),
    "request's is_plain": lambda _, no: ModelRequest(View.from_events([]), is_plain=no),
    "request's show_author": lambda _, no: ModelRequest(View.from_events([]), show_author=no),
}


@pytest.mark.parametrize("no", ["no", 0, None])
@pytest.mark.parametrize("name", SWITCHES)
async def test_a_switch_takes_nothing_but_true_and_false(name: str, no: Any) -> None:  # noqa: ANN401 - a wrong one
    """A text counted as true: `takeover=os.environ["TAKEOVER"]` took over with "no", too."""
    async with verified(HeldAgent(), journal=MemoryJournal()) as conversations:
        argument = name.rpartition("'s ")[2]

        async def use() -> None:
            used = SWITCHES[name](conversations, no)
            assert isinstance(used, Awaitable)
            await used

        found = f"^{argument} is {a_type(no)}; it takes True or False"
        with pytest.raises(InvalidInput, match=found) as refused:
            await use()
        assert refused.value.argument == argument
        assert not await conversations["c"].exists()


def test_the_error_about_a_bool_that_is_not_ours_says_whose_it_is() -> None:
    """NumPy's is called bool, too."""
    numpys: Any = type("bool", (), {"__module__": "numpy"})()
    with pytest.raises(InvalidInput, match=r"is_error is a numpy\.bool; it takes True or False"):
        ToolResult("A", is_error=numpys)


@pytest.mark.parametrize("limit", [math.nan, -1, "3", True, 2.5, math.inf])
def test_a_limit_that_limits_nothing_is_refused(limit: Any) -> None:  # noqa: ANN401 - a wrong one
    for field in fields(Limits):
        with pytest.raises(InvalidInput, match=f"^{field.name} is {limit!r}"):
            Limits(**{field.name: limit})


async def test_a_configuration_that_is_none_is_refused_with_that() -> None:
    configured = {"other": ConversationConfig(system_prompt=cast("str", 5))}

    def configure(conversation_id: str) -> ConversationConfig:
        return cast("ConversationConfig", configured.get(conversation_id))

    async with Conversations(echo, journal=MemoryJournal(), configure=configure) as opened:
        with pytest.raises(InvalidInput, match="ConversationConfig"):
            await opened["it"].send("?")
        with pytest.raises(InvalidInput, match="system_prompt"):
            await opened["other"].send("?")


async def test_a_configure_that_raises_leaves_the_message_undelivered() -> None:
    def configure(conversation_id: str) -> ConversationConfig:
        raise KeyError(conversation_id)

    async with Conversations(echo, journal=MemoryJournal(), configure=configure) as opened:
        with pytest.raises(NotDelivered, match="could not start: KeyError; nothing happened"):
            await opened["c"].send("?")
        assert not await opened["c"].exists()
