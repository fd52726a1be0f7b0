"""Sessions for the OpenAI Agents SDK: its own `Runner`, runs at once on one session, crashes.

The SDK runs on asyncio alone, and so do the tests that use its `Runner`; those of the session by
itself run on both backends.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import agents
import anyio
import anyio.lowlevel
import pytest
from agents import (
    Agent,
    ModelResponse,
    Runner,
    RunResult,
    RunState,
    SQLiteSession,
    Usage,
    function_tool,
)
from agents.items import TResponseInputItem, TResponseStreamEvent
from agents.memory import Session, SessionSettings
from agents.models.chatcmpl_converter import Converter
from agents.models.interface import Model
from agents.testing import ModelCall, ModelStep, ScriptedModel, assistant_message, function_call

from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    SQLiteJournal,
    TurnContext,
    agent,
)
from turnkeeper.actors.blocking import Blocking
from turnkeeper.actors.core.admission import AdmissionRefused
from turnkeeper.actors.errors import JournalOutcomeUnknown, JournalUnavailable
from turnkeeper.actors.events import (
    ActionEvent,
    LLMConvertibleEvent,
    ObservationEvent,
    UserMessageEvent,
)
from turnkeeper.actors.integrations.openai_agents import (
    ForeignLoop,
    OutsideTurn,
    RunsOverlap,
    TurnkeeperSession,
    _inside,
)
from turnkeeper.actors.journal import READ_BYTES, Listing, Record, StoredRecord
from turnkeeper.actors.models.messages import to_llm_messages
from turnkeeper.runtime import AskCycle

from ..conversations.worlds import WatchedJournal, brief, verified

pytestmark = [pytest.mark.costly, pytest.mark.in_parts(2)]

agents.set_tracing_disabled(disabled=True)
PAGE = Path(__file__).parents[3] / "docs" / "openai-agents.md"
asyncio_only = pytest.mark.parametrize(
    "anyio_backend", [pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio")]
)

Item = TResponseInputItem


def user(text: str) -> Item:
    return {"role": "user", "content": text}


def said(text: str) -> Item:
    message = assistant_message(text).model_dump(exclude_unset=True)
    return cast("Item", message)


def call(call_id: str, arguments: str = "{}", name: str = "look") -> Item:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def result(call_id: str, output: str = "seen") -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


ANY_ITEMS = cast(
    "list[Item]",
    [
        user("Where is 📦?"),
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "this"},
                {"type": "input_image", "detail": "auto", "image_url": "data:image/png;base64,AA"},
                {"type": "input_file", "file_id": "f"},
            ],
        },
        {"role": "developer", "content": "Be kind."},
        {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"n": [1, 2.5]}},
        call("c1", '{"q": "half an emoji: \\ud83d"}'),
        call("c2", "not JSON"),
        result("c1", "a\x00b \ud83d"),
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text"}]},
        {"type": "item_of_next_year", "nested": {"deep": [None, True, {"": "\u2028"}]}},
        said("done"),
    ],
)


@agent
async def nobody(turn: TurnContext) -> None:
    raise AssertionError(f"no chat message is sent here, and {turn.message} came")


@asynccontextmanager
async def opened(journal: MemoryJournal | SQLiteJournal) -> AsyncIterator[Conversations]:
    async with verified(nobody, journal=journal) as conversations:
        yield conversations


def short(item: Mapping[str, Any]) -> str:
    """An item in one word or two."""
    match item:
        case {"role": str(role), "content": str(text)}:
            return f"{role[0]}:{text}"
        case {"role": str(role), "content": [{"text": str(text)}, *_]}:
            return f"{role[0]}:{text}"
        case {"call_id": str(call_id)}:
            return f"{'result' if 'output' in item else 'call'} {call_id}"
        case _:
            return str(item["type"])


class StrictModel(Model):
    """Calls a tool for each question, side by side, then answers; refuses what the APIs refuse.

    Between the two steps of a run it lets the others on.
    """

    def __init__(self, calls: int = 2) -> None:
        self.calls = calls
        self.seen: list[list[str]] = []

    async def get_response(self, *args: object, **given: object) -> ModelResponse:
        items = _input(*args, **given)
        self.seen.append([short(item) for item in items])
        refuse_malformed(items)
        await anyio.lowlevel.checkpoint()
        question = next(item for item in reversed(items) if item.get("role") == "user")["content"]
        if items[-1].get("role") == "user":
            output: list[Any] = [
                function_call("look", {"at": question}, call_id=f"{question}/{n}")
                for n in range(self.calls)
            ]
        else:
            output = [assistant_message(f"answer to {question}")]
        return ModelResponse(output=output, usage=Usage(), response_id=None)

    def stream_response(self, *_: object, **__: object) -> AsyncIterator[TResponseStreamEvent]:
        raise NotImplementedError


def _input(*args: object, **given: object) -> list[Any]:
    """What a model is shown, however the runner passes it."""
    return cast("list[Any]", given["input"] if "input" in given else args[1])


def refuse_malformed(items: Sequence[Any]) -> None:
    """Raise where the chat API answers 400: calls are followed by their results, and by no else."""
    opened: list[str] = []
    for message in Converter.items_to_messages(list(items)):
        found = cast("Mapping[str, Any]", message)
        if found["role"] == "tool":
            assert found["tool_call_id"] in opened, f"a result without its call: {found}"
            opened.remove(found["tool_call_id"])
        else:
            assert not opened, f"no results for {opened} before {found['role']}"
            opened = [one["id"] for one in found.get("tool_calls") or ()]
    assert not opened, f"no results for {opened}"


@function_tool
async def look(at: str) -> str:
    await anyio.lowlevel.checkpoint()
    return f"seen {at}"


def of_run(question: str, calls: int = 2) -> list[str]:
    """The items of one whole run."""
    ids = [f"{question}/{n}" for n in range(calls)]
    answers = [f"call {at}" for at in ids] + [f"result {at}" for at in ids]
    return [f"u:{question}", *answers, f"a:answer to {question}"]


async def at_once(*calls: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async with anyio.create_task_group() as group:
        for one in calls:
            group.start_soon(one)


# --- the SDK's runner -------------------------------------------------------------------------


@asyncio_only
async def test_two_runs_at_once_on_the_sdks_own_session_are_torn_into_each_other(
    tmp_path: Path,
) -> None:
    """What the session here is for. Of 0.24; where this fails, the docs have to follow."""
    reads, both_have_read, both_have_asked = 0, anyio.Event(), anyio.Event()

    class ReadAtOnce(SQLiteSession):
        """Lets neither run go on before both have read the history."""

        async def get_items(self, *args: Any, **given: Any) -> list[Item]:  # noqa: ANN401 - its own
            nonlocal reads
            items = await super().get_items(*args, **given)
            reads += 1
            if reads == 2:
                both_have_read.set()
            await both_have_read.wait()
            return items

    class AskedAtOnce(StrictModel):
        """Answers neither run before both have asked."""

        async def get_response(self, *args: object, **given: object) -> ModelResponse:
            response = await super().get_response(*args, **given)
            if len(self.seen) == 2:
                both_have_asked.set()
            await both_have_asked.wait()
            return response

    model = AskedAtOnce()
    sdk_agent = Agent(name="support", model=model, tools=[look])
    session = ReadAtOnce("alice", tmp_path / "sdk.db")

    async def run(question: str) -> None:
        await Runner.run(sdk_agent, question, session=session)

    await at_once(lambda: run("q1"), lambda: run("q2"))
    kept = [short(item) for item in await session.get_items()]
    # Nobody can say which batch this is: called again, it is added again.
    await session.add_items([said("again")])
    await session.add_items([said("again")])
    repeated = [short(item) for item in await session.get_items(limit=2)]
    session.close()

    assert repeated == ["a:again", "a:again"]
    assert sorted(kept[:2]) == ["u:q1", "u:q2"]
    assert sorted(kept) == sorted(of_run("q1") + of_run("q2"))
    # Neither was shown the other's question, though both are one conversation.
    assert sorted(model.seen[:2]) == [["u:q1"], ["u:q2"]]


@asyncio_only
async def test_runs_at_once_on_one_session_come_one_after_another_and_see_each_other() -> None:
    model = StrictModel()
    sdk_agent = Agent(name="support", model=model, tools=[look])
    async with opened(MemoryJournal()) as conversations:

        async def run(question: str) -> None:
            async with TurnkeeperSession("alice", conversations) as session:
                done = await Runner.run(sdk_agent, question, session=session)
                assert done.final_output == f"answer to {question}"

        await at_once(*(lambda q=f"q{n}": run(q) for n in range(5)))
        kept = [short(item) for item in await TurnkeeperSession("alice", conversations).get_items()]

        whole = [item for n in range(5) for item in of_run(f"q{n}")]
        assert kept == whole
        assert model.seen[-1] == whole[:-1]
        assert [brief(event) for event in await conversations["alice"].view()][:6] == [
            "u:q0",
            "call",
            "result",
            "call",
            "result",
            "a:answer to q0",
        ]
        refuse_malformed(await TurnkeeperSession("alice", conversations).get_items())


@asyncio_only
async def test_streamed_runs_keep_their_turns() -> None:
    def respond(called: ModelCall) -> list[Any]:
        refuse_malformed(called.input)
        if called.input[-1].get("role") == "user":
            question = called.input[-1]["content"]
            return [function_call("look", {"at": question}, call_id=f"{question}/0")]
        return [assistant_message("done")]

    sdk_agent = Agent(
        name="support", model=ScriptedModel([ModelStep.respond(respond)] * 4), tools=[look]
    )
    async with opened(MemoryJournal()) as conversations:

        async def run(question: str) -> None:
            async with TurnkeeperSession("alice", conversations) as session:
                streamed = Runner.run_streamed(sdk_agent, question, session=session)
                async for _ in streamed.stream_events():
                    pass

        await at_once(lambda: run("q1"), lambda: run("q2"))

        kept = await TurnkeeperSession("alice", conversations).get_items()
        assert [short(item) for item in kept] == [
            "u:q1", "call q1/0", "result q1/0", "a:done",
            "u:q2", "call q2/0", "result q2/0", "a:done",
        ]  # fmt: skip


class PayingModel(StrictModel):
    """Asks to pay where it is asked to, and answers all else."""

    async def get_response(self, *args: object, **given: object) -> ModelResponse:
        items = _input(*args, **given)
        self.seen.append([short(item) for item in items])
        refuse_malformed(items)
        output: list[Any] = [assistant_message(f"after {short(items[-1])}")]
        if short(items[-1]) == "u:pay":
            output = [function_call("pay", {}, call_id="p")]
        return ModelResponse(output=output, usage=Usage(), response_id=None)


@function_tool(needs_approval=True)
async def pay() -> str:
    return "paid"


@asyncio_only
async def test_the_sdks_own_session_tears_an_approved_call_from_its_result(tmp_path: Path) -> None:
    sdk_agent = Agent(name="support", model=PayingModel(), tools=[pay])
    session = SQLiteSession("alice", tmp_path / "sdk.db")

    waiting = await Runner.run(sdk_agent, "pay", session=session)
    await Runner.run(sdk_agent, "hello", session=session)
    state = waiting.to_state()
    state.approve(waiting.interruptions[0])
    await Runner.run(sdk_agent, state, session=session)

    with pytest.raises(AssertionError, match="no results for"):
        await Runner.run(sdk_agent, "and now?", session=session)
    session.close()


@asyncio_only
@pytest.mark.parametrize("is_one_turn", [False, True])
async def test_a_call_approved_turns_later_has_its_result_behind_it(*, is_one_turn: bool) -> None:
    """A conversation goes on while a call waits, and what the model is shown is never malformed."""
    sdk_agent = Agent(name="support", model=PayingModel(), tools=[pay])
    async with opened(MemoryJournal()) as conversations:
        session = TurnkeeperSession("alice", conversations)

        async def run(given: str | RunState[Any]) -> RunResult:
            if is_one_turn:
                return await Runner.run(sdk_agent, given, session=session)
            async with session:
                return await Runner.run(sdk_agent, given, session=session)

        async def talk() -> None:
            waiting = await run("pay")
            await run("hello")
            state = waiting.to_state()
            state.approve(waiting.interruptions[0])
            await run(state)
            await run("and now?")

        if is_one_turn:
            async with session:
                await talk()
        else:
            await talk()

        assert [short(item) for item in await session.get_items()] == [
            "u:pay", "call p", "result p", "u:hello", "a:after u:hello", "a:after result p",
            "u:and now?", "a:after u:and now?",
        ]  # fmt: skip
        assert [brief(event) for event in await conversations["alice"].view()] == [
            "u:pay", "u:hello", "a:after u:hello", "call", "result", "a:after result p",
            "u:and now?", "a:after u:and now?",
        ]  # fmt: skip


@asyncio_only
@pytest.mark.parametrize("given", ["q", []])
async def test_a_run_without_a_turn_is_refused_before_its_model_is_asked(
    given: str | list[Item],
) -> None:
    model = StrictModel()
    async with opened(MemoryJournal()) as conversations:
        session = TurnkeeperSession("alice", conversations)

        with pytest.raises(OutsideTurn, match="async with TurnkeeperSession"):
            await Runner.run(Agent(name="support", model=model), given, session=session)

        assert model.seen == []
        assert await session.get_items() == []
        assert (await conversations.list()).rows == []


@asyncio_only
async def test_two_runs_at_once_in_one_turn_are_refused() -> None:
    sdk_agent = Agent(name="support", model=StrictModel(), tools=[look])
    async with (
        opened(MemoryJournal()) as conversations,
        TurnkeeperSession("alice", conversations) as session,
    ):
        overlaps: list[BaseException] = []

        async def run(question: str) -> None:
            try:
                await Runner.run(sdk_agent, question, session=session)
            except RunsOverlap as error:
                overlaps.append(error)

        await at_once(lambda: run("q1"), lambda: run("q2"))

        assert len(overlaps) == 1
        assert "a turn of its own" in str(overlaps[0])


@asyncio_only
async def test_a_session_of_the_same_conversation_inside_its_own_turn_is_refused() -> None:
    """A tool that runs an agent on the conversation that it was called in would wait for ever."""
    met: list[str] = []
    async with opened(MemoryJournal()) as conversations:

        @function_tool(name_override="look")
        async def ask_again(at: str) -> str:
            try:
                async with TurnkeeperSession("alice", conversations):
                    return at
            except AskCycle as error:
                met.append(str(error))
                return "refused"

        sdk_agent = Agent(name="support", model=StrictModel(calls=1), tools=[ask_again])
        async with TurnkeeperSession("alice", conversations) as session:
            await Runner.run(sdk_agent, "q", session=session)

        assert len(met) == 1
        async with TurnkeeperSession("alice", conversations):
            pass  # it is free again
        assert _inside.get() == ()


# --- the session by itself ----------------------------------------------------------------------


class CountingJournal(WatchedJournal):
    commits = 0

    async def before_append(self, records: Sequence[Record]) -> None:
        del records
        self.commits += 1


async def test_a_turn_reads_only_what_is_new() -> None:
    reads: list[int] = []

    class Counting(MemoryJournal):
        async def read(
            self,
            conversation_id: str,
            *,
            after: int = 0,
            limit: int = 512,
            bytes_max: int = READ_BYTES,
        ) -> Sequence[StoredRecord]:
            records = await super().read(
                conversation_id, after=after, limit=limit, bytes_max=bytes_max
            )
            reads.append(len(records))
            return records

    async with Conversations(nobody, journal=Counting()) as conversations:
        for n in range(20):
            async with TurnkeeperSession("c", conversations) as session:
                await session.add_items([user(f"{n} {m}") for m in range(10)])
                assert len(await session.get_items()) == 10 * (n + 1)
            if n == 3:
                # What comes past the session is read too.
                await conversations["c"].append(UserMessageEvent(content="by hand"))
            reads.clear()
        async with TurnkeeperSession("c", conversations) as session:
            assert len(await session.get_items()) == 200
        assert sum(reads) < 5

        # Begun anew under its name, it has nothing of what was deleted.
        await conversations.delete("c")
        async with TurnkeeperSession("c", conversations) as session:
            assert await session.get_items() == []
            await session.add_items([user("anew")])
        async with TurnkeeperSession("c", conversations) as session:
            assert [short(item) for item in await session.get_items()] == ["u:anew"]


async def test_a_conversation_begun_anew_as_long_as_the_one_before_is_told_from_it() -> None:
    async with opened(MemoryJournal()) as conversations:
        for text in ("a", "b"):
            async with TurnkeeperSession("c", conversations) as session:
                assert await session.get_items() == []
                await session.add_items([user(text)])
            kept = TurnkeeperSession("c", conversations)
            assert [short(item) for item in await kept.get_items()] == [f"u:{text}"]
            await conversations.delete("c")


async def test_all_items_are_replaced_in_one_commit() -> None:
    async with opened(journal := CountingJournal()) as conversations:
        async with TurnkeeperSession("c", conversations) as session:
            await session.add_items([user("a"), call("1"), result("1"), said("b")])
            commits = journal.commits
            await session.replace_items([user("all of it"), said("in short")])
            assert journal.commits == commits + 1
            assert [short(item) for item in await session.get_items()] == [
                "u:all of it",
                "a:in short",
            ]
        view = await conversations["c"].view()
        assert [brief(event) for event in view] == ["u:all of it", "a:in short"]


async def test_the_sdks_compaction_replaces_the_newest_items_in_one_commit() -> None:
    async with (
        opened(journal := CountingJournal()) as conversations,
        TurnkeeperSession("c", conversations) as session,
    ):
        await session.add_items([user("a"), said("b"), user("c"), said("d")])
        snapshot = await session._get_compaction_snapshot(3)
        assert [short(item) for item in snapshot.items] == ["a:b", "u:c", "a:d"]
        assert not snapshot.complete
        commits = journal.commits
        assert await snapshot.replace_suffix(1, [user("c and d")])
        assert journal.commits == commits + 1
        assert [short(i) for i in await session.get_items()] == ["u:a", "a:b", "u:c and d"]
        # It was taken before that change.
        assert not await snapshot.replace_suffix(1, [user("late")])
        assert not await snapshot.replace_suffix(3, [user("nothing")])

        whole = await session._get_compaction_snapshot(
            2, prune_prefix=lambda item: short(item) == "u:a"
        )
        assert await whole.replace_suffix(1, [said("e")])
        assert [short(item) for item in await session.get_items()] == ["a:b", "a:e"]


@asyncio_only
@pytest.mark.parametrize("settings", [SessionSettings(limit=2), {"limit": 2}])
async def test_settings_are_taken_as_by_the_sdks_own_session(settings: Any) -> None:  # noqa: ANN401 - both forms
    own = SQLiteSession("c", session_settings=settings)
    async with opened(MemoryJournal()) as conversations:
        session = TurnkeeperSession("c", conversations, session_settings=settings)
        assert session.session_settings == own.session_settings
        async with session:
            for one in (own, session):
                await one.add_items([user("a"), said("b"), user("c")])
            for limit in (None, 0, 1, 5):
                assert await session.get_items(limit) == await own.get_items(limit)
    with pytest.raises(TypeError):
        TurnkeeperSession("c", conversations, session_settings={"limits": 2})
    own.close()


@asyncio_only
async def test_a_foreign_loop_is_told_what_to_do() -> None:
    async with opened(MemoryJournal()) as conversations:
        session = TurnkeeperSession("c", conversations)

        def run_sync() -> None:
            loop = asyncio.new_event_loop()  # the SDK would make one, and leave it open
            asyncio.set_event_loop(loop)
            with closing(loop):
                Runner.run_sync(Agent(name="a", model=ScriptedModel([])), "hi", session=session)

        async def enter() -> None:
            async with session:
                raise AssertionError

        for use in (run_sync, partial(anyio.run, enter)):
            with pytest.raises(ForeignLoop, match="run_sync"):
                await anyio.to_thread.run_sync(use)


def test_a_script_runs_through_the_blocking_way_in(tmp_path: Path) -> None:
    conversations = Conversations(nobody, journal=SQLiteJournal(tmp_path / "chats.db"))
    support = Agent(name="a", model=ScriptedModel([[assistant_message("Order 7.")]]))

    async def ask(text: str) -> object:
        async with TurnkeeperSession("alice", conversations) as session:
            return (await Runner.run(support, text, session=session)).final_output

    with Blocking(conversations) as blocking:
        assert blocking(ask, "Which one?") == "Order 7."


async def test_it_is_a_session_as_the_sdk_asks_for_one() -> None:
    async with opened(MemoryJournal()) as conversations:
        assert isinstance(TurnkeeperSession("alice", conversations), Session)


async def test_items_of_any_type_come_back_as_they_were_given_over_a_restart(
    tmp_path: Path,
) -> None:
    async with (
        opened(SQLiteJournal(tmp_path / "chats.db")) as conversations,
        TurnkeeperSession("alice", conversations) as session,
    ):
        await session.add_items(ANY_ITEMS[:5])
        await session.add_items(ANY_ITEMS[5:])
        assert await session.get_items() == ANY_ITEMS
        cast("dict[str, str]", (await session.get_items())[0])["role"] = "changed"
        assert await session.get_items() == ANY_ITEMS

    async with opened(SQLiteJournal(tmp_path / "chats.db")) as conversations:
        session = TurnkeeperSession("alice", conversations)
        assert await session.get_items() == ANY_ITEMS
        assert await session.get_items(limit=3) == ANY_ITEMS[-3:]
        assert await session.get_items(limit=0) == []
        assert await session.get_items(limit=1_000) == ANY_ITEMS
        limited = TurnkeeperSession(
            "alice", conversations, session_settings=SessionSettings(limit=2)
        )
        assert await limited.get_items() == ANY_ITEMS[-2:]
        assert await limited.get_items(limit=3) == ANY_ITEMS[-3:]


async def test_what_maps_is_an_ordinary_conversation_for_the_model_and_for_readers() -> None:
    async with opened(MemoryJournal()) as conversations:
        async with TurnkeeperSession("alice", conversations) as session:
            await session.add_items(ANY_ITEMS)

        view = list(await conversations["alice"].view())
        assert [brief(event) for event in view] == [
            "u:Where is 📦?",
            "u:this",
            "call",
            "result",
            "call",
            "result",
            "a:done",
        ]
        image, action, observation, malformed = view[1], view[2], view[3], view[4]
        assert isinstance(image, UserMessageEvent)
        assert [one.url for one in image.images] == ["data:image/png;base64,AA"]
        assert isinstance(action, ActionEvent)
        assert isinstance(observation, ObservationEvent)
        assert (action.tool_name, action.provider_call_id) == ("look", "c1")
        assert observation.tool_call_id == action.tool_call_id
        assert isinstance(malformed, ActionEvent)
        assert malformed.malformed_arguments == "not JSON"
        to_llm_messages(await conversations["alice"].view())


async def test_the_same_call_id_in_two_turns_is_two_calls() -> None:
    """Many providers count from zero in each response."""
    async with opened(MemoryJournal()) as conversations:
        for text in ("one", "two"):
            async with TurnkeeperSession("alice", conversations) as session:
                await session.add_items([user(text), call("0"), result("0", text), said(text)])

        view = await conversations["alice"].view()
        assert [event.content for event in view if isinstance(event, ObservationEvent)] == [
            "one",
            "two",
        ]
        assert len({event.tool_call_id for event in view if isinstance(event, ActionEvent)}) == 2


async def test_a_second_result_of_a_call_is_kept_and_not_shown() -> None:
    items = [call("0"), result("0", "one"), result("0", "two"), result("nowhere")]
    async with opened(MemoryJournal()) as conversations:
        async with TurnkeeperSession("alice", conversations) as session:
            await session.add_items(items)
            assert await session.get_items() == items
        view = [brief(event) for event in await conversations["alice"].view()]
        assert view == ["call", "result"]


@pytest.mark.parametrize("content", [object(), float("nan"), [float("-inf")]])
async def test_adding_is_all_or_nothing(content: object) -> None:
    unkeepable = cast("Item", {"role": "user", "content": content})
    async with opened(MemoryJournal()) as conversations:
        async with TurnkeeperSession("alice", conversations) as session:
            with pytest.raises(ValueError, match="JSON object"):
                await session.add_items([user("one"), unkeepable])
            assert await session.get_items() == []
            await session.add_items([user("one")])
        assert await session.get_items() == [user("one")]


class FailingJournal(WatchedJournal):
    """Fails one append: before it is written, or after, so that its outcome is unknown."""

    fails: str = ""

    async def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
        listing: Listing | None = None,
    ) -> Sequence[int]:
        fails, self.fails = self.fails, ""
        if fails == "unavailable":
            raise JournalUnavailable("no disk; nothing was written")
        seqs = await super().append(
            conversation_id,
            records,
            epoch=epoch,
            expected_seq=expected_seq,
            is_unfinished=is_unfinished,
            listing=listing,
        )
        if fails == "unknown":
            raise JournalOutcomeUnknown("the connection went away around a commit")
        return seqs

    async def before_append(self, records: Sequence[Record]) -> None:
        return


@pytest.mark.parametrize("fails", ["unavailable", "unknown"])
@pytest.mark.parametrize("is_repeated", [True, False])
async def test_adding_again_after_a_failure_adds_once(fails: str, *, is_repeated: bool) -> None:
    journal = FailingJournal()
    async with opened(journal) as conversations:
        async with TurnkeeperSession("alice", conversations) as session:
            await session.add_items([user("one")])
            journal.fails = fails

            with pytest.raises((JournalUnavailable, JournalOutcomeUnknown)):
                await session.add_items([call("0"), result("0")])
            if is_repeated:
                await session.add_items([call("0"), result("0")])
            await session.add_items([said("two")])

            is_there = is_repeated or fails == "unknown"
            expected = [user("one"), *([call("0"), result("0")] if is_there else []), said("two")]
            assert await session.get_items() == expected
        assert await session.get_items() == expected
        view = [brief(event) for event in await conversations["alice"].view()]
        assert view == ["u:one", *(["call", "result"] if is_there else []), "a:two"]


async def test_the_same_items_twice_are_two_where_nothing_failed() -> None:
    async with (
        opened(MemoryJournal()) as conversations,
        TurnkeeperSession("alice", conversations) as session,
    ):
        await session.add_items([user("again")])
        await session.add_items([user("again")])
        assert await session.get_items() == [user("again"), user("again")]


async def test_calls_at_once_in_one_turn_come_one_after_another() -> None:
    async with opened(journal := MemoryJournal()) as conversations:
        popped: list[Item | None] = []

        async def pop() -> None:
            popped.append(await session.pop_item())

        async with TurnkeeperSession("alice", conversations) as session:
            added = [user(str(n)) for n in range(5)]
            async with anyio.create_task_group() as group:
                for item in [*added, user("again"), user("again")]:
                    group.start_soon(session.add_items, [item])
                    group.start_soon(session.get_items)
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(pop)
            kept = await session.get_items()

        assert len(kept) == 4
        assert sorted(map(short, [*kept, *cast("list[Item]", popped)])) == [
            *map(short, added),
            *["u:again"] * 2,
        ]
        async with opened(journal) as reopened:
            assert await TurnkeeperSession("alice", reopened).get_items() == kept


async def test_a_compaction_replaces_nothing_if_the_items_change_beside_it() -> None:
    async with (
        opened(MemoryJournal()) as conversations,
        TurnkeeperSession("alice", conversations) as session,
    ):
        await session.add_items([user("a"), said("b"), user("c")])
        snapshot = await session._get_compaction_snapshot(2)
        replaced: list[bool] = []

        async def compact() -> None:
            replaced.append(await snapshot.replace_suffix(0, [user("in short")]))

        async with anyio.create_task_group() as group:
            group.start_soon(session.pop_item)
            group.start_soon(compact)
        left = [short(item) for item in await session.get_items()]
        # Either comes first: trio draws it.
        assert (replaced, left) in [([False], ["u:a", "a:b"]), ([True], ["u:a"])]


async def test_a_call_that_outlives_its_turn_writes_nothing_into_the_next_one() -> None:
    journal = HeldJournal()
    async with opened(journal) as conversations, anyio.create_task_group() as group:
        refused: list[OutsideTurn] = []

        async def add_late() -> None:
            try:
                await session.add_items([user("late")])
            except OutsideTurn as error:
                refused.append(error)

        async with TurnkeeperSession("alice", conversations) as session:
            journal.holds = True
            group.start_soon(session.add_items, [user("one")])
            await journal.reached.wait()
            group.start_soon(add_late)  # waits for the call before it
            await anyio.wait_all_tasks_blocked()
        journal.released.set()
        async with TurnkeeperSession("alice", conversations) as following:
            await following.add_items([user("two")])
            await anyio.wait_all_tasks_blocked()
            kept = await following.get_items()

    assert len(refused) == 1
    assert [short(item) for item in kept] == ["u:one", "u:two"]


@pytest.mark.parametrize("fails", ["unavailable", "unknown"])
async def test_popping_again_after_a_failure_pops_once(fails: str) -> None:
    journal = FailingJournal()
    async with (
        opened(journal) as conversations,
        TurnkeeperSession("alice", conversations) as session,
    ):
        await session.add_items([user("one"), said("two")])
        journal.fails = fails

        with pytest.raises((JournalUnavailable, JournalOutcomeUnknown)):
            await session.pop_item()
        assert await session.pop_item() == said("two")

        assert await session.get_items() == [user("one")]


async def test_a_change_that_was_refused_is_decided_anew() -> None:
    """What it would take out of the view is not what it would have taken before."""
    async with (
        opened(MemoryJournal()) as conversations,
        TurnkeeperSession("alice", conversations) as session,
    ):
        alice = conversations["alice"]
        await session.add_items([said("one")])
        (shown,) = await alice.view()
        other = ActionEvent(tool_call_id="c", tool_name="look", llm_response_id="r")
        await alice.append(other)

        with pytest.raises(AdmissionRefused, match="a call is open"):
            await session.pop_item()
        await alice.append(ObservationEvent(tool_call_id="c", content="seen"))
        await alice.retract([shown.id])

        assert await session.pop_item() == said("one")
        assert await session.get_items() == []


class HeldJournal(WatchedJournal):
    """Holds the next append until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.released = anyio.Event(), anyio.Event()
        self.holds = False

    async def before_append(self, records: Sequence[Record]) -> None:
        if self.holds:
            self.holds = False
            self.reached.set()
            await self.released.wait()


async def test_what_a_cancelled_call_had_on_its_way_is_seen_by_the_next_turn() -> None:
    journal = HeldJournal()
    async with opened(journal) as conversations:
        journal.holds = True
        async with (
            TurnkeeperSession("alice", conversations) as session,
            anyio.create_task_group() as group,
        ):
            group.start_soon(session.add_items, [user("one")])
            await journal.reached.wait()
            group.cancel_scope.cancel()

        seen: list[Item] = []

        async def next_turn() -> None:
            async with TurnkeeperSession("alice", conversations) as following:
                seen.extend(await following.get_items())
                await following.add_items([said("two")])

        async with anyio.create_task_group() as group:
            group.start_soon(next_turn)
            await anyio.wait_all_tasks_blocked()
            assert seen == []
            journal.released.set()

        assert seen == [user("one")]
        assert await session.get_items() == [user("one"), said("two")]


async def test_popped_items_leave_the_session_and_the_view_and_stay_in_the_log() -> None:
    async with opened(MemoryJournal()) as conversations:
        items = [user("one"), call("0"), call("1"), result("0"), result("1"), said("two")]
        async with TurnkeeperSession("alice", conversations) as session:
            assert await session.pop_item() is None
            await session.add_items(items)
            assert [await session.pop_item() for _ in range(2)] == [items[5], items[4]]
            assert await session.get_items() == items[:4]
            view = await conversations["alice"].view()
            assert [brief(event) for event in view] == ["u:one", "call", "result"]
            # The call is open again, and takes another result.
            await session.add_items([result("1", "other")])
            assert await session.get_items() == [*items[:4], result("1", "other")]

            await session.clear_session()
            await session.clear_session()

            assert await session.get_items() == []
            assert list(await conversations["alice"].view()) == []
            await session.add_items([user("anew")])
        assert await session.get_items() == [user("anew")]
        log = [logged.event async for logged in conversations["alice"].events(live=False)]
        assert sum(isinstance(event, LLMConvertibleEvent) for event in log) == 9


async def test_a_turn_waits_for_the_one_before_it_in_the_order_they_came() -> None:
    order: list[int] = []
    async with opened(MemoryJournal()) as conversations:

        async def turn(n: int) -> None:
            async with TurnkeeperSession("alice", conversations) as session:
                order.append(n)
                await session.add_items([user(str(n))])
                await anyio.lowlevel.checkpoint()
                await session.add_items([said(str(n))])

        async with anyio.create_task_group() as group:
            for n in range(20):
                group.start_soon(turn, n)
                await anyio.wait_all_tasks_blocked() if n == 0 else None

        kept = await TurnkeeperSession("alice", conversations).get_items()
        texts = [short(item)[2:] for item in kept]
        assert texts == [str(n) for n in order for _ in range(2)]


async def test_a_turn_that_fails_or_is_cancelled_lets_the_next_one_in() -> None:
    async with opened(MemoryJournal()) as conversations:
        with pytest.raises(RuntimeError):
            async with TurnkeeperSession("alice", conversations):
                raise RuntimeError
        with anyio.CancelScope() as scope:
            async with TurnkeeperSession("alice", conversations):
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        held = TurnkeeperSession("alice", conversations)
        async with held, anyio.create_task_group() as group:
            # Its wait is cancelled before its turn has come.
            group.start_soon(TurnkeeperSession("bob", conversations).__aenter__)
            group.cancel_scope.cancel()
        async with TurnkeeperSession("alice", conversations) as session:
            await session.add_items([user("one")])
        assert await session.get_items() == [user("one")]


async def test_conversations_do_not_wait_for_each_other() -> None:
    async with opened(MemoryJournal()) as conversations:
        async with (
            TurnkeeperSession("alice", conversations) as alice,
            TurnkeeperSession("bob", conversations) as bob,
        ):
            await alice.add_items([user("one")])
            await bob.add_items([user("two")])
        assert await alice.get_items() == [user("one")]


@pytest.mark.parametrize("use", ["add_items", "pop_item", "clear_session"])
async def test_a_change_outside_a_turn_is_refused(use: str) -> None:
    async with opened(MemoryJournal()) as conversations:
        session = TurnkeeperSession("alice", conversations)
        method = getattr(session, use)
        change = partial(method, [user("x")]) if use == "add_items" else method
        with pytest.raises(OutsideTurn):
            await change()
        async with session:
            pass
        with pytest.raises(OutsideTurn):
            await change()


KILLED = """
import os, signal, sys
import anyio
from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.testing import ScriptedModel, assistant_message, function_call
from turnkeeper.actors import Conversations, SQLiteJournal, agent
from turnkeeper.actors.integrations.openai_agents import TurnkeeperSession

set_tracing_disabled(True)

@agent
async def nobody(turn):
    raise AssertionError

@function_tool
async def look(at: str) -> str:
    if at == "second":
        os.kill(os.getpid(), signal.SIGKILL)
    return "seen"

async def main():
    model = ScriptedModel([
        [function_call("look", {"at": "first"}, call_id="0")],
        [function_call("look", {"at": "second"}, call_id="1")],
    ])
    async with Conversations(nobody, journal=SQLiteJournal(sys.argv[1])) as conversations:
        async with TurnkeeperSession("alice", conversations) as session:
            await Runner.run(Agent(name="a", model=model, tools=[look]), "q1", session=session)

anyio.run(main)
"""


@asyncio_only
async def test_after_a_kill_in_the_middle_of_a_run_the_next_run_goes_on(tmp_path: Path) -> None:
    program = tmp_path / "killed.py"
    program.write_text(KILLED)
    path = tmp_path / "chats.db"
    killed = await anyio.run_process([sys.executable, str(program), str(path)], check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()

    model = StrictModel()
    async with opened(SQLiteJournal(path)) as conversations:
        async with TurnkeeperSession("alice", conversations) as session:
            await Runner.run(
                Agent(name="support", model=model, tools=[look]), "q2", session=session
            )

        # What had been added is there, whole batches of it; what had not is not.
        expected = ["u:q1", "call 0", "result 0", *of_run("q2")]
        assert [short(item) for item in await session.get_items()] == expected
    assert model.seen[0] == ["u:q1", "call 0", "result 0", "u:q2"]


def test_without_the_package_the_import_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "agents.py").write_text("raise ImportError('No module named agents')")
    module = "turnkeeper.actors.integrations.openai_agents"
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import {module}"

    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 1
    assert "install turnkeeper[openai-agents]" in ran.stderr


def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    program, shown = re.findall(r"```(?:python|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)

    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert (ran.stdout, ran.stderr) == (shown, "")
