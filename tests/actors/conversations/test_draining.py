"""A process that is drained hands its conversations over, and loses nothing on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio.lowlevel
import pytest

from tests.actors.conversations.worlds import HeldAgent, log_of
from turnkeeper.actors import (
    ConversationConfig,
    ConversationInfo,
    Conversations,
    MemoryJournal,
    MemoryStore,
    ModelRequest,
    ModelResponse,
    OnOverlap,
    ScriptedModel,
    ToolAgent,
    ToolCall,
    TurnContext,
)
from turnkeeper.actors.core.admission import AdmissionRefused
from turnkeeper.actors.errors import Draining, InvalidInput, OwnedElsewhere, QueueFull
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    ObservationEvent,
    UserMessageEvent,
)
from turnkeeper.actors.journal import Claim
from turnkeeper.actors.owner.draining import _AT_ONCE_MAX, Drained
from turnkeeper.runtime.testing import VirtualClock, settle

pytestmark = pytest.mark.anyio

GRACE_S = 30.0


class World:
    """A store, and two processes on it: `here` is drained, `there` takes over."""

    def __init__(self, agent: Any, **settings: Any) -> None:  # noqa: ANN401 - any agent and settings
        self.store = MemoryStore()
        self.clock = VirtualClock()
        self.agent = agent
        self.settings = settings
        self.drained: list[Drained] = []

    def process(self) -> Conversations:
        return Conversations(
            self.agent,
            journal=MemoryJournal(self.store),
            ports=self.clock.ports(),
            recover="on_message",
            **self.settings,
        )

    @asynccontextmanager
    async def draining(self, here: Conversations, **options: Any) -> AsyncIterator[None]:  # noqa: ANN401 - those of `drain`
        """Drain in the background; at the end of the block, let the grace pass."""

        async def drain() -> None:
            self.drained.append(await here.drain(GRACE_S, **options))

        async with anyio.create_task_group() as group:
            group.start_soon(drain)
            await settle()
            yield
            await self.clock.advance(GRACE_S + 1)


class ClaimedLater(MemoryJournal):
    """Claims nothing until it is released, so that messages wait for their owner."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.is_released = anyio.Event()

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        await self.is_released.wait()
        return await super().claim(conversation_id, takeover=takeover, any_name=any_name)


class Stepping:
    """A resumable agent of three steps, each of which waits until it is let through."""

    is_resumable = True

    def __init__(self) -> None:
        self.gate = anyio.Semaphore(0)

    async def run(self, turn: TurnContext) -> None:
        said = sum(event.kind == "agent_message" for event in turn.view)
        for n in range(said, 3):
            await turn.begin_step()
            await self.gate.acquire()
            await turn.say(f"{n}")


async def test_a_turn_may_end_within_the_grace_and_a_queued_message_is_answered_elsewhere() -> None:
    held = HeldAgent()
    held.hold("A")
    world = World(held)
    async with world.process() as here:
        await here["c"].send("A")
        async with world.draining(here):
            await here["c"].send("B")
            held.release("A")
        assert await log_of(here["c"], all_kinds=True) == [
            *("started", "u:A", "queued:B", "a:a(A)", "completed"),
        ]
        async with world.process() as there:
            assert await (await there["c"].send("C")).reply() == "a(C)"
            assert await log_of(there["c"]) == ["u:A", "a:a(A)", "u:B", "a:a(B)", "u:C", "a:a(C)"]
    assert world.drained == [Drained(released=1, interrupted=())]


async def test_a_turn_that_outlasts_the_grace_is_interrupted_and_keeps_what_was_said() -> None:
    held = HeldAgent()
    held.hold("stream A")
    world = World(held)
    async with world.process() as here:
        await here["c"].send("stream A")
        await held.reached["stream A"].wait()
        async with world.draining(here):
            pass
        assert (await log_of(here["c"], all_kinds=True))[-1] == "interrupted"
    assert world.drained == [Drained(released=1, interrupted=("c",))]


async def test_a_turn_that_can_be_resumed_stops_at_its_next_step_and_goes_on_elsewhere() -> None:
    agent = Stepping()
    world = World(agent, unfinished="resume")
    async with world.process() as here, world.process() as there:
        await here["c"].send("go")
        await settle()
        async with world.draining(here):
            agent.gate.release()
            await world.clock.advance(1.0)
            assert await log_of(here["c"], all_kinds=True) == ["started", "u:go", "a:0"]
            # It was released before the grace is over.
            turn = await there["c"].send("go on", on_overlap="queue")
            for _ in range(5):
                agent.gate.release()
            await turn.end()
        assert (await log_of(there["c"]))[:4] == ["u:go", "a:0", "a:1", "a:2"]
    assert world.drained == [Drained(released=1, interrupted=())]


async def test_a_step_that_outlasts_the_grace_leaves_no_trace_and_is_asked_again() -> None:
    agent = Stepping()
    world = World(agent, unfinished="resume")
    async with world.process() as here:
        await here["c"].send("go")
        await settle()
        async with world.draining(here):
            pass
        assert await log_of(here["c"], all_kinds=True) == ["started", "u:go"]
        async with world.process() as there:
            turn = await there["c"].send("and then", on_overlap="steer")
            for _ in range(6):
                agent.gate.release()
            await turn.end()
            assert "a:2" in await log_of(there["c"])
    assert world.drained == [Drained(released=1, interrupted=())]


async def test_idle_conversations_are_released_first() -> None:
    held = HeldAgent()
    held.hold("A")
    world = World(held)
    async with world.process() as here, world.process() as there:
        await here["busy"].send("A")
        await (await here["idle"].send("B")).reply()
        with pytest.raises(OwnedElsewhere):
            await there["idle"].send("C")
        async with world.draining(here):
            assert await (await there["idle"].send("C")).reply() == "a(C)"
            with pytest.raises(OwnedElsewhere):
                await there["busy"].send("C")


def busy() -> Callable[[str], ConversationConfig]:
    """Give conversation `busy` an agent that does not end: it keeps the drain going."""
    held = HeldAgent()
    held.hold("busy")
    return lambda name: ConversationConfig(agent=held if name == "busy" else None)


async def test_many_conversations_are_released_without_a_task_for_each() -> None:
    """To start the tasks of 50,000 conversations stopped the event loop for four seconds."""
    many = 2 * _AT_ONCE_MAX
    tasks: list[int] = []

    async def watch() -> None:
        while True:
            tasks.append(len(anyio.get_running_tasks()))
            await anyio.lowlevel.checkpoint()

    async with Conversations(HeldAgent(), journal=MemoryJournal()) as conversations:
        for number in range(many):
            await conversations[f"c{number}"].append(UserMessageEvent(content="hello"))
        await settle()
        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await anyio.lowlevel.checkpoint()
            drained = await conversations.drain(0.0)
            group.cancel_scope.cancel()

    assert drained.released == many
    assert max(tasks) < tasks[0] + many


async def test_a_paused_turn_is_released_at_once_as_it_is() -> None:
    agent = Stepping()
    world = World(agent, configure=busy())
    async with world.process() as here, world.process() as there:
        await here["c"].send("go")
        await settle()
        await here["c"].pause()
        agent.gate.release()
        await settle()
        before = await log_of(here["c"], all_kinds=True)
        await here["busy"].send("busy")
        await settle()
        async with world.draining(here):
            with pytest.raises(OwnedElsewhere):
                await there["busy"].resume()
            for _ in range(2):
                agent.gate.release()
            await there["c"].resume()
            await settle()
            log = await log_of(there["c"], all_kinds=True)
            assert log[: len(before)] == before
            assert log[-1] == "completed"


async def test_confirming_and_interrupting_work_during_the_grace() -> None:
    ran: list[int] = []

    async def refund(order: int) -> str:
        """Refund an order."""
        ran.append(order)
        return "refunded"

    def answer(request: ModelRequest) -> ModelResponse:
        if isinstance(request.view[-1], UserMessageEvent):
            return ModelResponse(calls=[ToolCall("refund", {"order": 7})])
        return ModelResponse("Done.")

    agent = ToolAgent(ScriptedModel(answer), [refund], confirm=["refund"])
    world = World(agent, configure=busy())
    async with world.process() as here:
        turn = await here["c"].send("a refund")
        await here["busy"].send("busy")
        await settle()
        async with world.draining(here):
            assert ran == []
            await here["c"].confirm()
            assert (await turn.end()).outcome == "completed"
            assert ran == [7]
            assert await here["busy"].interrupt()
            assert (await log_of(here["busy"], all_kinds=True))[-1] == "interrupted"
    assert world.drained[0].interrupted == ()


@pytest.mark.parametrize("on_overlap", ["queue", "steer", "interrupt", "rollback"])
async def test_each_overlapping_message_waits_for_the_next_owner(
    on_overlap: OnOverlap,
) -> None:
    held = HeldAgent()
    held.hold("A")
    world = World(held)
    async with world.process() as here:
        await here["c"].send("A")
        await held.reached["A"].wait()
        async with world.draining(here):
            await here["c"].send("B", message_id="b", on_overlap=on_overlap)
            await settle()
            assert held.turns == ["A"]
            assert (await here["c"].send("B", message_id="b")).is_duplicate
        assert held.turns == ["A"]
        async with world.process() as there:
            assert await (await there["c"].send("C")).reply() == "a(C)"
            assert (await log_of(there["c"]))[-4:] == ["u:B", "a:a(B)", "u:C", "a:a(C)"]


@pytest.mark.parametrize(
    "how", [{"on_overlap": "interrupt"}, {"on_overlap": "rollback"}, {"replaces": "a"}]
)
async def test_a_message_that_ends_a_paused_turn_waits_for_no_resume(
    how: dict[str, Any],
) -> None:
    """Its turn waits for the next owner. The pause has ended with the turn that was paused."""
    held = HeldAgent()
    held.hold("A")
    world = World(held)
    async with world.process() as here:
        await here["c"].send("A", message_id="a")
        await here["c"].pause()
        await here["busy"].send("A")
        async with world.draining(here):
            told = [await here["c"].send("B", message_id="b", **how) for _ in range(2)]
            assert [(turn.waits_for, turn.is_duplicate) for turn in told] == [
                (None, False),
                (None, True),
            ]
            assert told[0].overlapped == told[1].overlapped


async def test_a_message_that_replaces_another_waits_in_the_place_of_that() -> None:
    """Found by the owner world: it waited behind those that had come after the one it replaces."""
    held = HeldAgent()
    held.hold("A")
    world = World(held)
    async with world.process() as here:
        await here["c"].send("A", message_id="a")
        await here["c"].send("B")
        async with world.draining(here):
            await here["c"].send("A, really", replaces="a")
        async with world.process() as there:
            assert await (await there["c"].send("C")).reply() == "a(C)"
            said = [line for line in await log_of(there["c"]) if line.startswith("u:")]
            assert said == ["u:A", "u:A, really", "u:B", "u:C"]


async def test_what_a_rollback_puts_back_takes_up_room_in_the_queue() -> None:
    """The message of the rollback has to wait itself: with the other, the queue was too long."""
    stepping = Stepping()
    world = World(stepping, queued_messages_max=1)
    async with world.process() as here:
        await here["c"].send("A")
        await here["c"].send("B", on_overlap="steer")
        stepping.gate.release()
        await settle()
        assert await here["c"].queued() == ()  # it has joined the turn
        async with world.draining(here):
            with pytest.raises(QueueFull):
                await here["c"].send("C", on_overlap="rollback")
            assert await log_of(here["c"]) == ["u:A", "a:0", "u:B"]


async def test_messages_are_refused_if_so_chosen_and_a_known_one_is_still_known() -> None:
    held = HeldAgent()
    held.hold("A")
    world = World(held)
    async with world.process() as here:
        await here["c"].send("A", message_id="a")
        async with world.draining(here, messages="refuse"):
            with pytest.raises(Draining, match="conversation c"):
                await here["c"].send("B")
            assert (await here["c"].send("A", message_id="a")).is_duplicate
        assert "u:B" not in await log_of(here["c"])


async def test_a_message_to_a_new_conversation_is_queued_behind_its_system_prompt() -> None:
    held = HeldAgent()
    held.hold("busy")
    world = World(held, system_prompt="be kind")
    async with world.process() as here:
        await here["c"].send("busy")
        async with world.draining(here):
            await here["new"].send("A")
            kinds = [logged.event.kind async for logged in here["new"].events(live=False)]
            assert kinds == ["system_prompt", "message_queued"]
        async with world.process() as there:
            assert await (await there["new"].send("B")).reply() == "a(B)"
            log = await log_of(there["new"])
            assert log[-4:] == ["u:A", "a:a(A)", "u:B", "a:a(B)"]


@pytest.mark.parametrize("is_alone", [True, False])
async def test_a_message_that_waits_behind_a_call_of_a_caller_gets_its_turn_after_the_result(
    is_alone: bool,
) -> None:
    """No owner could begin: it cannot start the message's turn while that call is open."""
    held = HeldAgent()
    held.hold("A")
    world = World(held)
    call = ActionEvent(tool_call_id="1", tool_name="look", llm_response_id="r")
    result = ObservationEvent(tool_call_id="1", content="seen")
    async with world.process() as here:
        await here["other"].send("A")
        async with world.draining(here):
            await here["c"].append(call)
            turn = await here["c"].send("B")
    async with world.process() as there:
        chat = there["c"]
        assert [message.content for message in await chat.queued()] == ["B"]
        with pytest.raises(AdmissionRefused):
            await chat.send("C")
        if is_alone:
            await chat.append(result)
            await chat.append_all([])
        else:
            held.hold("B")
            await chat.append_all([result, AgentMessageEvent(content="by hand")])
            await held.reached["B"].wait()
            held.release("B")
        again = await chat.send("B", message_id=turn.message_id)
        assert await again.reply() == "a(B)"
        log = ["call", "result", *([] if is_alone else ["a:by hand"]), "u:B", "a:a(B)"]
        assert await log_of(chat) == log


async def test_a_message_in_the_batch_of_a_result_passes_none_that_waits_for_it() -> None:
    held = HeldAgent()
    held.hold("A")
    world = World(held)
    call = ActionEvent(tool_call_id="1", tool_name="look", llm_response_id="r")
    async with world.process() as here:
        await here["other"].send("A")
        async with world.draining(here):
            await here["c"].append(call)
            await here["c"].send("B")
    journal = ClaimedLater(world.store)
    async with Conversations(held, journal=journal, recover="on_message") as there:
        chat = there["c"]
        async with anyio.create_task_group() as group:
            group.start_soon(chat.append, ObservationEvent(tool_call_id="1", content="seen"))
            await settle()
            group.start_soon(chat.send, "C")
            await settle()
            journal.is_released.set()
        await (await chat.send("D")).end()
        assert [line for line in await log_of(chat) if "u:" in line] == ["u:B", "u:C", "u:D"]


async def test_after_it_every_message_is_refused_and_the_readers_have_ended() -> None:
    world = World(HeldAgent())
    async with world.process() as here:
        await (await here["c"].send("A")).reply()
        seen: list[str] = []

        async def read() -> None:
            async for logged in here["c"].events():
                seen.append(logged.event.kind)  # noqa: PERF401 - what was seen before the end counts

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await settle()
            async with world.draining(here):
                pass
        assert seen[-1] == "turn_ended"
        assert here.is_draining
        with pytest.raises(Draining):
            await here["c"].send("B")
        assert (await here["c"].at()).seq == len(seen)


async def test_no_turn_starts_while_it_waits_for_a_look_at_a_journal_that_hangs() -> None:
    class Hanging(MemoryJournal):
        looks = 0

        async def find_abandoned(self) -> Sequence[ConversationInfo]:
            self.looks += 1
            if self.looks > 1:
                with anyio.CancelScope(shield=True):
                    await answers.wait()
            return await super().find_abandoned()

    answers, clock, journal = anyio.Event(), VirtualClock(), Hanging()
    async with Conversations(HeldAgent(), journal=journal, ports=clock.ports()) as here:
        await clock.advance(GRACE_S)
        assert journal.looks == 2
        async with anyio.create_task_group() as group:
            group.start_soon(here.drain, GRACE_S)
            await settle()
            await here["c"].send("A")
            log = await log_of(here["c"], all_kinds=True)
            answers.set()
            await clock.advance(GRACE_S)
        assert log == ["queued:A"]


async def test_a_second_call_shortens_the_grace_and_does_not_lengthen_it() -> None:
    held = HeldAgent()
    held.hold("A")
    world = World(held)
    async with world.process() as here:
        await here["c"].send("A")
        async with anyio.create_task_group() as group:
            group.start_soon(here.drain, 1_000.0)
            await settle()
            group.start_soon(here.drain, 5.0)
            await settle()
            group.start_soon(here.drain, 2_000.0)
            await world.clock.advance(4.0)
            assert (await log_of(here["c"], all_kinds=True))[-1] == "u:A"
            await world.clock.advance(2.0)
            assert (await log_of(here["c"], all_kinds=True))[-1] == "interrupted"


async def test_two_calls_at_once_are_one_drain_with_one_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both told the owners to leave: the log said of turns that had ended that they had not."""
    held = HeldAgent()
    held.hold("A")
    world = World(held)
    names = [f"c{n}" for n in range(20)]
    async with world.process() as here:
        for name in names:
            await here[name].send("A")
        drained: list[Drained] = []

        async def drain(grace_s: float) -> None:
            drained.append(await here.drain(grace_s))

        async with anyio.create_task_group() as group:
            group.start_soon(drain, GRACE_S)
            await settle()
            group.start_soon(drain, 0.0)
            await settle()
            await world.clock.advance(1.0)
        for name in names:
            assert (await log_of(here[name], all_kinds=True))[-1] == "interrupted"
    assert drained == [Drained(released=20, interrupted=tuple(sorted(names)))] * 2
    assert caplog.messages == []


async def test_a_drain_that_is_cancelled_can_be_called_again() -> None:
    held = HeldAgent()
    held.hold("A")
    world = World(held)
    async with world.process() as here:
        await here["c"].send("A")
        with anyio.CancelScope() as calling:
            async with anyio.create_task_group() as group:
                group.start_soon(here.drain, GRACE_S)
                await settle()
                calling.cancel()
        assert here.is_draining
        async with world.draining(here):
            pass
    assert world.drained == [Drained(released=1, interrupted=("c",))]


async def test_a_drain_that_is_cancelled_while_its_owners_end_is_ended_by_the_next_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It told owners that were ending to leave: the log said that their turns had not ended."""
    held = HeldAgent()
    held.hold("A")
    world = World(held)
    names = [f"c{n}" for n in range(20)]
    async with world.process() as here:
        for name in names:
            await here[name].send("A")
        region = here._open_region()
        calling = anyio.CancelScope()

        async def first() -> None:
            with calling:
                await here.drain(0.0)

        async with anyio.create_task_group() as group:
            group.start_soon(first)
            while not region._is_closed:
                await anyio.lowlevel.checkpoint()
            assert region.active
            calling.cancel()
            group.start_soon(here.drain, 0.0)
        drained = await here.drain(0.0)
        for name in names:
            assert (await log_of(here[name], all_kinds=True))[-1] == "interrupted"

    assert drained == Drained(released=20, interrupted=tuple(sorted(names)))
    assert caplog.messages == []


async def test_a_drain_that_is_called_again_tells_of_the_turns_that_the_first_interrupted() -> None:
    """Cancelled while it told the owners to leave, it had not heard from all of them yet."""
    names = [f"c{n}" for n in range(3)]
    for steps in range(1, 1_000):
        held = HeldAgent()
        held.hold("A")
        world = World(held)
        async with world.process() as here:
            for name in names:
                await here[name].send("A")
            async with anyio.create_task_group() as group:
                group.start_soon(here.drain, 0.0)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                are_all_told = here._setup.drain.are_all_told
                group.cancel_scope.cancel()
            drained = await here.drain(0.0)
        assert drained == Drained(released=3, interrupted=tuple(names)), steps
        if are_all_told:
            return
    raise AssertionError("the first drain has not told all owners")


@pytest.mark.parametrize("grace_s", [-1.0, float("inf"), float("nan"), cast("Any", "5")])
async def test_a_grace_that_makes_no_sense_is_refused(grace_s: float) -> None:
    async with World(HeldAgent()).process() as here:
        with pytest.raises(InvalidInput, match="grace_s"):
            await here.drain(grace_s)
        assert not here.is_draining
