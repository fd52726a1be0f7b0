"""Promises that were broken once, by programs as users write them."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Literal, cast

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.actors import (
    ActionEvent,
    Agent,
    AgentMessageEvent,
    CondensationEvent,
    Conversation,
    ConversationConfig,
    Conversations,
    ConversationsClosed,
    Event,
    InvalidInput,
    MemoryJournal,
    Proposal,
    ToolCall,
    Turn,
    TurnContext,
    TurnSuspended,
    UserMessageEvent,
    View,
    agent,
)
from turnkeeper.runtime import Actor, Message, NotDelivered, Runtime, Supervision
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio


class Explode(Message[None]):
    """Makes its actor fail once the gate is open."""


class Exploding(Actor[Explode]):
    def __init__(self, gate: anyio.Event) -> None:
        self._gate = gate

    async def receive(self, message: Explode) -> None:
        await self._gate.wait()
        raise ValueError("mine alone")


async def test_mail_that_waits_for_an_actor_that_fails_too_often_is_refused_with_that() -> None:
    gate = anyio.Event()
    async with Runtime() as runtime:
        region = runtime.region(
            "exploding", lambda _: Exploding(gate), supervision=Supervision(restarts_max=0)
        )
        heard: list[BaseException] = []

        async def ask() -> None:
            try:
                await region["key"].ask(Explode())
            except Exception as error:  # noqa: BLE001 - whatever comes is looked at
                heard.append(error)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(ask)
            await settle()
            gate.set()
    told = sorted(type(error).__name__ for error in heard)
    assert told == ["ActorFailed", "TooManyRestarts", "TooManyRestarts"]
    assert all(isinstance(error.__cause__, ValueError) for error in heard)


# --- agents -------------------------------------------------------------------------------------


@asynccontextmanager
async def conversations(agent: Agent) -> AsyncIterator[Conversations]:
    async with Conversations(agent, journal=MemoryJournal(), verify="always") as opened:
        yield opened


async def kinds(conversation: Conversation) -> list[str]:
    return [logged.event.kind async for logged in conversation.events(live=False)]


async def test_a_turn_whose_agent_uses_another_turn_fails_and_does_not_hang() -> None:
    class Shared:
        """Keeps what is of one turn in itself, and serves several."""

        turn: TurnContext

        async def run(self, turn: TurnContext) -> None:
            self.turn = turn
            if turn.conversation_id == "first":
                await other_has_ended.wait()
            await self.turn.say("hello")

    other_has_ended = anyio.Event()
    async with conversations(Shared()) as opened:
        first = await opened["first"].send("?")
        await settle()
        await (await opened["second"].send("?")).reply()
        other_has_ended.set()
        with anyio.fail_after(5):
            end = await first.end()
    assert end.outcome == "failed"
    assert end.detail.startswith("StaleTurn")


class Swallowing:
    """Asks for a confirmation, takes the end of its run for a mishap, and goes on regardless."""

    is_resumable = True

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.heard: list[str] = []
        self.runs = 0

    async def run(self, turn: TurnContext) -> None:
        self.runs += 1

        async def delete(action: ActionEvent) -> str:
            self.ran.append(f"run {self.runs}")
            return action.tool_name

        if not turn.open_calls:
            with suppress(TurnSuspended):
                await turn.propose_calls([ToolCall("delete")], needs_confirmation=True)
            for go_on in (
                lambda: turn.run_calls(tuple(turn.open_calls.values()), delete),
                lambda: turn.say("done already"),
                lambda: turn.writer()("done"),
                turn.begin_step,
            ):
                try:
                    await go_on()
                except TurnSuspended as error:
                    self.heard.append(type(error).__name__)
            return
        await turn.run_calls(tuple(turn.open_calls.values()), delete)
        await turn.say("done")


async def test_an_agent_that_swallows_the_end_of_its_run_runs_nothing_unconfirmed() -> None:
    agent = Swallowing()
    async with conversations(agent) as opened:
        conversation = opened["it"]
        turn = await conversation.send("?")
        await settle()
        assert agent.ran == []
        assert agent.heard == ["TurnSuspended"] * 4
        await conversation.confirm()
        assert await turn.reply() == "done"
        assert agent.ran == ["run 2"]
        assert await kinds(conversation) == [
            "turn_started",
            "user_message",
            "action",
            "confirmation_requested",
            "confirmation_given",
            "observation",
            "agent_message",
            "turn_ended",
        ]


async def test_a_run_that_goes_on_after_it_was_held_does_not_end_the_turn_of_the_next_one() -> None:
    is_resumed, may_answer = anyio.Event(), anyio.Event()

    class Late:
        is_resumable = True
        runs = 0

        async def run(self, turn: TurnContext) -> None:
            self.runs += 1
            if self.runs > 1:
                is_resumed.set()
                await may_answer.wait()
                await turn.say("from the second run")
                return
            await held.wait()
            with suppress(TurnSuspended):
                await turn.begin_step()
            await is_resumed.wait()
            raise ValueError("too late to fail this turn")

    held = anyio.Event()
    async with conversations(Late()) as opened:
        conversation = opened["it"]
        turn = await conversation.send("?")
        await conversation.pause()
        held.set()
        await settle()
        await conversation.resume()
        await settle()
        may_answer.set()
        assert await turn.reply() == "from the second run"


@pytest.mark.parametrize("piece", [None, 5, b"x"])
async def test_a_piece_that_is_no_text_is_refused_and_the_turn_can_be_ended(
    piece: Any,  # noqa: ANN401 - of a wrong type
) -> None:
    refused = anyio.Event()

    @agent
    async def streaming(turn: TurnContext) -> None:
        write = turn.writer()
        await write("said")
        with pytest.raises(InvalidInput):
            await write(piece)
        refused.set()
        await anyio.sleep_forever()

    async with conversations(streaming) as opened:
        turn = await opened["it"].send("?")
        await refused.wait()
        assert await turn.cancel()
        assert (await turn.end()).reply == "said"


async def test_what_brings_its_pieces_without_waiting_holds_nobody_up() -> None:
    began = anyio.Event()

    @agent
    async def endless(turn: TurnContext) -> None:
        write = turn.writer()
        began.set()
        for _ in range(10_000):
            await write("x")
        await turn.say("nobody could interrupt this")

    async with conversations(endless) as opened:
        turn = await opened["it"].send("?")
        await began.wait()
        await turn.cancel()
        assert set((await turn.end()).reply) <= {"x"}


@pytest.mark.parametrize("returned", [None, 5, ["a result"]])
async def test_a_runner_that_returns_no_result_answers_its_call_with_an_error(
    returned: Any,  # noqa: ANN401 - of a wrong type
) -> None:
    results: list[Any] = []  # logged events; which, is what is tested

    @agent
    async def calling(turn: TurnContext) -> None:
        async def run(action: ActionEvent) -> Any:  # noqa: ANN401 - of a wrong type
            return "fine" if action.tool_name == "good" else returned

        results.extend(await turn.call_tools([ToolCall("bad"), ToolCall("good")], run))
        await turn.say("done")

    async with conversations(calling) as opened:
        assert await (await opened["it"].send("?")).reply() == "done"
    bad, good = (logged.event for logged in results)
    assert bad.is_error
    assert type(returned).__name__ in bad.content
    assert good.content == "fine"


async def test_what_a_model_calls_is_written_down_however_odd_it_is() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5_000):
        deep = {"deeper": deep}
    odd = [
        ToolCall("half \ud83d", {}, provider_call_id="half \ud83d"),
        ToolCall("deep", deep),
        ToolCall("unread", malformed_arguments="half \ud83d"),
    ]

    @agent
    async def calling(turn: TurnContext) -> None:
        async def run(action: ActionEvent) -> str:
            return action.malformed_arguments or action.tool_name

        await turn.call_tools(odd, run)
        await turn.say("done")

    async with conversations(calling) as opened:
        assert await (await opened["it"].send("?")).reply() == "done"


# --- the boundary -------------------------------------------------------------------------------


@agent
async def echo(turn: TurnContext) -> None:
    await turn.begin_step()
    await turn.say(turn.message.content)


class Particular(AgentMessageEvent):
    """An event of an application's own."""

    mood: object = None


@pytest.mark.parametrize(
    "event",
    [
        AgentMessageEvent.model_construct(content=5),
        AgentMessageEvent.model_construct(),
        AgentMessageEvent(content="fine").model_copy(update={"content": None}),
        Particular(content="fine"),
        Particular(content="fine", mood=object()),
        UserMessageEvent.model_construct(content="fine", images=("no image",)),
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
    "wrong",
    [
        {"recover": "on_entry"},
        {"verify": "on"},
        {"system_prompt": 5},
        {"system_prompt": "half \ud83d"},
        {"name": 5},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_setting_is_refused_before_anything_is_opened(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Conversations(echo, journal=MemoryJournal(), **wrong)


async def test_a_configuration_that_is_none_is_refused_with_that() -> None:
    configured = {"other": ConversationConfig(system_prompt=cast("str", 5))}

    def configure(conversation_id: str) -> ConversationConfig:
        return cast("ConversationConfig", configured.get(conversation_id))

    async with Conversations(echo, journal=MemoryJournal(), configure=configure) as opened:
        with pytest.raises(InvalidInput, match="ConversationConfig"):
            await opened["it"].send("?")
        with pytest.raises(InvalidInput, match="system_prompt"):
            await opened["other"].send("?")


class Proposing:
    """A condenser that proposes what it is told to."""

    def __init__(self, propose: Callable[[View], Any]) -> None:
        self._propose = propose

    def need(self, view: View) -> Literal["soft"] | None:
        return "soft" if len(view) > 1 else None

    async def propose(self, view: View, need: object) -> Any:  # noqa: ANN401 - wrong ones
        return self._propose(view)


@pytest.mark.parametrize(
    "propose",
    [
        lambda _: 5,
        lambda _: Proposal(cast("Any", 5)),
        lambda _: Proposal(cast("Any", (5,))),
        lambda view: Proposal((view[0].id,), cast("Any", 5)),
    ],
)
async def test_a_proposal_that_is_none_is_written_down_as_the_condensers_failure(
    propose: Callable[[View], Any],
) -> None:
    async with Conversations(echo, journal=MemoryJournal(), condenser=Proposing(propose)) as opened:
        for _ in range(8):
            assert await (await opened["it"].send("a")).reply() == "a"
        assert "conversation_error" in await kinds(opened["it"])


async def test_half_a_character_in_a_summary_is_mended() -> None:
    def propose(view: View) -> Proposal:
        return Proposal(tuple(event.id for event in view), "half \ud83d")

    async with Conversations(
        echo, journal=MemoryJournal(), condenser=Proposing(propose), verify="always"
    ) as opened:
        assert await (await opened["it"].send("a")).reply() == "a"
        assert await (await opened["it"].send("b")).reply() == "b"
        await settle()
        summaries = [
            logged.event.summary
            async for logged in opened["it"].events(live=False)
            if isinstance(logged.event, CondensationEvent)
        ]
    assert summaries
    assert set(summaries) == {"half �"}


# --- leaving ------------------------------------------------------------------------------------


async def test_an_actor_that_is_found_after_its_runtime_was_left_is_stopped_at_once() -> None:
    async with Runtime() as runtime:
        region = runtime.region("late", lambda _: Exploding(anyio.Event()))
    with pytest.raises(NotDelivered):
        await region["key"].ask(Explode())
    with anyio.fail_after(5):
        await region.stop_actor("key")


async def test_whoever_looks_for_an_owner_while_it_is_left_hears_that() -> None:
    @agent
    async def thinking(turn: TurnContext) -> None:
        await anyio.sleep_forever()

    async with AsyncExitStack() as stack:
        opened = await stack.enter_async_context(conversations(thinking))
        turn = await opened["it"].send("?")
        await settle()
        await stack.aclose()
        with anyio.fail_after(5), pytest.raises(ConversationsClosed):
            await turn.end()

    heard: list[str] = []

    async def wait(turn: Turn) -> None:
        with anyio.fail_after(5):
            try:
                await turn.end()
            except ConversationsClosed as error:
                heard.append(type(error).__name__)

    async with anyio.create_task_group() as tasks:
        for moment in range(12):
            async with conversations(thinking) as opened:
                turn = await opened["it"].send("?")
                for _ in range(4):
                    tasks.start_soon(wait, turn)
                for _ in range(moment):
                    await anyio.lowlevel.checkpoint()
    assert len(heard) == 48


async def test_a_generator_that_is_streamed_and_left_half_way_is_closed() -> None:
    began, closed = anyio.Event(), anyio.Event()

    async def pieces() -> AsyncIterator[str]:
        try:
            while True:
                began.set()
                yield "x"
        finally:
            closed.set()

    @agent
    async def streaming(turn: TurnContext) -> None:
        await turn.stream(pieces())

    async with conversations(streaming) as opened:
        turn = await opened["it"].send("?")
        await began.wait()
        await turn.cancel()
        with anyio.fail_after(5):
            await closed.wait()
