"""Condensers that raise, propose nonsense, or write too much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, cast

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, log_of, verified
from turnkeeper.actors import (
    Conversation,
    Conversations,
    Event,
    MemoryJournal,
    Proposal,
    RollingCondenser,
    SummarizingCondenser,
    TurnContext,
    View,
    agent,
)
from turnkeeper.actors.core.condensation import Need
from turnkeeper.actors.events import (
    CondensationEvent,
    ConversationErrorEvent,
    ObservationEvent,
)
from turnkeeper.runtime import Failure, Runtime
from turnkeeper.runtime.testing import VirtualClock, settle

pytestmark = pytest.mark.anyio


async def test_a_summary_that_is_too_long_itself_is_not_summarised_without_end() -> None:
    calls = 0

    async def summarize(history: str) -> str:
        nonlocal calls
        calls += 1
        return "s" * 4_000

    condenser = SummarizingCondenser(summarize, RollingCondenser(max_tokens=500, keep_first=0))
    async with verified(HeldAgent(), journal=MemoryJournal(), condenser=condenser) as conversations:
        chat = conversations["c"]
        for n in range(4):
            await (await chat.send(f"{n}" * 1_000)).end()
        log = [event async for _, event in chat.events(live=False)]

    # A few for each of the eight events that the model sees, and none that begets the next.
    assert calls < 30
    # A proposal is refused if the view has moved on meanwhile, and the last may be on its way.
    assert 0 < sum(isinstance(event, CondensationEvent) for event in log) <= calls


async def test_a_summary_that_gets_shorter_by_a_character_is_not_summarised_for_each() -> None:
    lengths = []

    async def summarize(history: str) -> str:
        lengths.append(len(history))
        return "s" * (3_999 - len(lengths))

    condenser = SummarizingCondenser(summarize, RollingCondenser(max_tokens=500, keep_first=0))
    async with verified(HeldAgent(), journal=MemoryJournal(), condenser=condenser) as conversations:
        chat = conversations["c"]
        for n in range(4):
            await (await chat.send(f"{n}" * 1_000)).end()
        await anyio.wait_all_tasks_blocked()

    assert 0 < len(lengths) < 30


class Panic(BaseException):
    """As the extension module of a tokenizer raises it: no `Exception`."""


class NeedRaises:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def need(self, view: View) -> Need | None:
        raise self.error

    async def propose(self, view: View, need: Need) -> Proposal | None:
        raise AssertionError("never asked")


class ProposeRaises(NeedRaises):
    def need(self, view: View) -> Need | None:
        return "soft"

    async def propose(self, view: View, need: Need) -> Proposal | None:
        raise self.error


@pytest.mark.parametrize("raises", [NeedRaises, ProposeRaises])
@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("no tokenizer"),
        Panic("no tokenizer"),
        GeneratorExit("no tokenizer"),
        BaseExceptionGroup("gathered", [ValueError("?"), asyncio.CancelledError()]),
    ],
    ids=repr,
)
async def test_a_condenser_that_raises_is_recorded_and_stops_no_turn(
    raises: type[NeedRaises], error: BaseException
) -> None:
    condenser = raises(error)
    async with verified(HeldAgent(), journal=MemoryJournal(), condenser=condenser) as conversations:
        chat = conversations["c"]
        for text in ("A", "B", "C"):
            assert await (await chat.send(text)).reply() == f"a({text})"

        assert "conversation_error" in await log_of(chat, all_kinds=True)


class Untidy(RollingCondenser):
    """Leaves its task about to be cancelled."""

    async def propose(self, view: View, need: Need) -> Proposal | None:
        cancel_own_task()
        scope = anyio.CancelScope()
        scope.__enter__()
        scope.cancel()
        return await super().propose(view, need)


def cancel_own_task() -> None:
    """Cancel the running task natively, which only asyncio's tasks can be."""
    with suppress(RuntimeError):  # no loop of asyncio runs
        if (task := asyncio.current_task()) is not None:
            task.cancel()


async def test_a_condenser_that_cancels_its_own_task_condenses_and_ends_no_owner() -> None:
    condenser = Untidy(max_size=6, keep_first=1)
    async with verified(echo, journal=MemoryJournal(), condenser=condenser) as conversations:
        with conversations.runtime.events.subscribe(Failure) as failures:
            chat = conversations["c"]
            for text in "ABCDEFG":
                assert await (await chat.send(text)).reply() == text
            await settle()
            assert "condensation" in await kinds(chat)
        assert [failure async for failure in failures] == []


class UntidyFailure(NeedRaises):
    """Fails, and leaves its task about to be cancelled."""

    def need(self, view: View) -> Need | None:
        return "soft"

    async def propose(self, view: View, need: Need) -> Proposal | None:
        cancel_own_task()
        raise self.error


async def test_a_condenser_that_cancels_its_own_task_and_fails_ends_no_owner() -> None:
    condenser = UntidyFailure(ValueError("?"))
    async with verified(echo, journal=MemoryJournal(), condenser=condenser) as conversations:
        with conversations.runtime.events.subscribe(Failure) as failures:
            chat = conversations["c"]
            for text in "AB":
                assert await (await chat.send(text)).reply() == text
            await settle()
            assert "conversation_error" in await kinds(chat)
        assert [failure async for failure in failures] == []


async def kinds(conversation: Conversation) -> list[str]:
    return [logged.event.kind async for logged in conversation.events(live=False)]


@agent
async def echo(turn: TurnContext) -> None:
    await turn.begin_step()
    await turn.say(turn.message.content)


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
        async for logged in opened["it"].events():
            if isinstance(logged.event, CondensationEvent):
                break
    assert isinstance(logged.event, CondensationEvent)
    assert logged.event.summary == "half �"


async def test_what_the_running_turn_protected_is_condensed_once_it_has_ended() -> None:
    said, ended = anyio.Event(), anyio.Event()

    @agent
    async def hold(turn: TurnContext) -> None:
        await turn.begin_step()
        await turn.say("b")
        said.set()
        await ended.wait()

    whole = Proposing(lambda view: Proposal(tuple(event.id for event in view), "all of it"))
    async with Conversations(hold, journal=MemoryJournal(), condenser=whole) as opened:
        turn = await opened["it"].send("a")
        await said.wait()
        await anyio.wait_all_tasks_blocked()
        assert "condensation" not in await kinds(opened["it"])
        ended.set()
        await turn.end()
        await anyio.wait_all_tasks_blocked()
        assert "condensation" in await kinds(opened["it"])


async def whole_log(chat: Conversation) -> list[Event]:
    return [logged.event async for logged in chat.events(live=False)]


async def test_condensing_while_a_step_is_in_flight_comes_after_it_or_before_never_inside() -> None:
    journal, held = MemoryJournal(), HeldAgent()
    async with verified(
        held, journal=journal, condenser=RollingCondenser(max_size=12)
    ) as conversations:
        chat = conversations["c"]
        for n in range(10):
            held.hold(f"two tools {n}")
            turn = await chat.send(f"two tools {n}")
            await held.reached[f"two tools {n}"].wait()
            queued = await chat.send(f"B{n}")
            held.release(f"two tools {n}")
            await turn.end()
            await queued.end()

        view = await chat.view()
        assert view == View.from_events(await whole_log(chat))
        calls = [e.tool_call_id for e in view if e.kind == "action"]  # type: ignore[attr-defined] # an action
        results = [e.tool_call_id for e in view if isinstance(e, ObservationEvent)]
        assert sorted(calls) == sorted(results)


class Late:
    """Waits for its first proposal until it is told; it may take no notice of being cancelled."""

    def __init__(self, *, is_deaf: bool) -> None:
        self._is_deaf = is_deaf
        self.tell = anyio.Event()
        self.asked = 0

    def need(self, view: View) -> Need | None:
        return "hard" if len(view) >= 3 else None

    async def propose(self, view: View, need: Need) -> Proposal | None:
        self.asked += 1
        with anyio.CancelScope(shield=self._is_deaf):
            await self.tell.wait()
        return Proposal((view[0].id,), "late")


@asynccontextmanager
async def condensed_by(condenser: Late, clock: VirtualClock) -> AsyncIterator[Conversations]:
    async with (
        Runtime(ports=clock.ports(), kill_s=1.0) as runtime,
        Conversations(
            echo, journal=MemoryJournal(), condenser=condenser, condense_s=60.0, runtime=runtime
        ) as conversations,
    ):
        yield conversations


@pytest.mark.parametrize("is_deaf", [False, True])
async def test_a_turn_goes_on_without_a_condenser_that_proposes_too_late(*, is_deaf: bool) -> None:
    clock, condenser = VirtualClock(), Late(is_deaf=is_deaf)
    async with condensed_by(condenser, clock) as conversations:
        chat = conversations["c"]
        assert await (await chat.send("A")).reply() == "A"
        turn = await chat.send("B")
        await clock.advance(59.0)
        assert await turn.find_end() is None

        await clock.advance(3.0)
        assert await turn.reply() == "B"
        failed = next(e for e in await whole_log(chat) if isinstance(e, ConversationErrorEvent))
        assert failed.error == "CondenserTooSlow"
        assert "proposed nothing within 60 s" in failed.detail
        assert "condensation" in await kinds(chat)  # the owner has made room itself

        asked, before = condenser.asked, await kinds(chat)
        condenser.tell.set()
        await settle()
        assert condenser.asked == asked
        assert await kinds(chat) == before


async def test_a_proposal_for_a_log_that_was_deleted_is_not_late_for_the_next_one() -> None:
    """Its condenser takes no notice of being cancelled, so its time goes on."""
    clock, condenser = VirtualClock(), Late(is_deaf=True)
    async with condensed_by(condenser, clock) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).reply()
        await chat.send("B")
        await clock.advance(40.0)
        await conversations.delete("c")
        await (await chat.send("C")).reply()
        turn = await chat.send("D")

        await clock.advance(40.0)

        asked, end, found = condenser.asked, await turn.find_end(), await kinds(chat)
        condenser.tell.set()
        assert (asked, end) == (2, None)
        assert "conversation_error" not in found
