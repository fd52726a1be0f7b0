"""How assistant messages were lost elsewhere, when turns overlapped: here, for every policy.

A gateway kept a list of messages for each turn and one cursor for what had been stored. Turns that
overlapped, a history that grew shorter, and a history that was split each lost messages for good,
or stored them twice. Here each is played step by step, and again over a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import anyio
import pytest

from tests.actors.conversations.turn_worlds import StepAgent, brief, events_of, log_of
from tests.actors.conversations.worlds import WatchedJournal, verified
from tests.actors.core.turn_laws import POLICIES, LogReader
from turnkeeper.actors import (
    Conversation,
    MemoryJournal,
    ModelRequest,
    OnOverlap,
    Proposal,
    ScriptedModel,
    Turn,
    View,
)
from turnkeeper.actors.agents.tool_agent import ToolAgent
from turnkeeper.actors.core.commands import Propose
from turnkeeper.actors.errors import TurnInProgress
from turnkeeper.actors.events import LLMConvertibleEvent
from turnkeeper.actors.journal import Record
from turnkeeper.actors.models.base import MalformedHistory
from turnkeeper.runtime import Unavailable

pytestmark = pytest.mark.anyio


async def seen_by_models(chat: Conversation) -> str:
    """The events of the log that the model sees, or has seen."""
    return brief(*(e for e in await events_of(chat) if isinstance(e, LLMConvertibleEvent)))


async def check_log(chat: Conversation) -> None:
    events = await events_of(chat)
    LogReader(events).check()
    assert await chat.view() == View.from_events(events)


async def check_over_a_restart(journal: MemoryJournal, name: str = "c") -> None:
    """Another process has the same log and view, and the next turn goes on from there."""
    async with verified(StepAgent(), journal=journal, recover="on_message") as conversations:
        chat = conversations[name]
        before, view = await log_of(chat), brief(*await chat.view())
    steps = StepAgent()
    async with verified(steps, journal=journal) as conversations:
        chat = conversations[name]
        assert await log_of(chat) == before
        assert await (await chat.send("Z")).reply() == "Z"
        assert steps.shown == [f"{view} uZ"]
        assert await log_of(chat) == f"{before} started uZ aZ completed"
        await check_log(chat)


# --- 1. a second message while the first is answered ---------------------------------------------

EXPECTED: dict[OnOverlap, str] = {
    "queue": "uA aA uB call result aB",
    "interrupt": "uA a… uB call result aB",
    "rollback": "uA a… uB call result aB",
    "steer": "uA aA uB call result aB",
    "reject": "uA aA",
}


@pytest.mark.parametrize("on_overlap", POLICIES)
async def test_a_second_message_while_the_first_is_answered(on_overlap: OnOverlap) -> None:
    """A's model has written half of its answer when B comes, and is let go when B has been sent."""
    journal, steps = MemoryJournal(), StepAgent({"B": "call"})
    steps.hold("A writes")
    async with verified(steps, journal=journal) as conversations:
        chat = conversations["c"]
        first = await chat.send("A")
        await steps.reached["A writes"].wait()
        turns = [first]
        if on_overlap == "reject":
            with pytest.raises(TurnInProgress):
                await chat.send("B", on_overlap=on_overlap)
        else:
            turns.append(await chat.send("B", on_overlap=on_overlap))
        steps.release()
        for turn in turns:
            await turn.end()

        assert await seen_by_models(chat) == EXPECTED[on_overlap]
        if on_overlap == "queue":
            assert steps.shown[1] == "uA aA uB", "B's model was not given the answer to A"
        if on_overlap == "rollback":
            assert brief(*await chat.view()) == "uB call result aB"
        await check_log(chat)
    await check_over_a_restart(journal)


async def test_a_second_message_steers_the_first_and_both_get_one_answer() -> None:
    journal, steps = MemoryJournal(), StepAgent({"A": "call"})
    steps.hold("A thinks")
    async with verified(steps, journal=journal) as conversations:
        chat = conversations["c"]
        first = await chat.send("A")
        await steps.reached["A thinks"].wait()
        second = await chat.send("B", on_overlap="steer")
        steps.release()

        assert await first.reply() == await second.reply() == "A+B"
        assert await seen_by_models(chat) == "uA call result uB aA+B"
        await check_log(chat)
    await check_over_a_restart(journal)


# --- 2. a history that grows shorter before the next append --------------------------------------


async def _forget(chat: Conversation, count: int) -> None:
    """Have the first events of the view condensed, as a condenser does, at any time."""
    view = await chat.view()
    ids = tuple(event.id for event in view[:count])
    epoch = (await chat._setup.journal.read(chat.conversation_id, after=0))[-1].epoch
    assert await chat._ref.ask(Propose(epoch, Proposal(ids, "what was before"), view))


async def _talk(chat: Conversation, count: int) -> None:
    for n in range(count):
        await (await chat.send(str(n))).end()


async def _overlap(
    chat: Conversation, steps: StepAgent, on_overlap: OnOverlap, *, forgets: int
) -> list[Turn]:
    """A is being answered; the history grows shorter; B comes; A is let go."""
    steps.hold("A writes")
    turns = [await chat.send("A")]
    await steps.reached["A writes"].wait()
    await _forget(chat, forgets)
    try:
        turns.append(await chat.send("B", on_overlap=on_overlap))
    except TurnInProgress:
        assert on_overlap == "reject"
    steps.release()
    for turn in turns:
        await turn.end()
    return turns


@pytest.mark.parametrize("forgets", [8, 12], ids=["a part of the past", "all but the running turn"])
@pytest.mark.parametrize("on_overlap", POLICIES)
async def test_a_history_that_grows_shorter_by_condensation_loses_nothing_of_the_log(
    on_overlap: OnOverlap, forgets: int
) -> None:
    journal, steps = MemoryJournal(), StepAgent({"B": "call"})
    async with verified(steps, journal=journal) as conversations:
        chat = conversations["c"]
        await _talk(chat, 6)
        turns = await _overlap(chat, steps, on_overlap, forgets=forgets)

        before = " ".join(f"u{n} a{n}" for n in range(6))
        assert await seen_by_models(chat) == f"{before} {EXPECTED[on_overlap]}"
        if on_overlap == "rollback":
            assert turns[1].overlapped == "rollback"
        await check_log(chat)
    await check_over_a_restart(journal)


@pytest.mark.parametrize("on_overlap", POLICIES)
async def test_a_history_that_a_model_refuses_is_mended_and_nothing_of_the_log_is_lost(
    on_overlap: OnOverlap,
) -> None:
    """The repair is written down in the middle of the turn that another message then overlaps."""
    asked, sent = anyio.Event(), anyio.Event()

    async def answer(request: ModelRequest) -> str:
        newest = brief(request.view[-1])
        if newest == "uA" and not asked.is_set():
            asked.set()
            raise MalformedHistory("scripted", "a result without its call")
        if newest == "uA":
            await sent.wait()
        return newest[1:]

    journal = MemoryJournal()
    model = ScriptedModel(answer)
    async with verified(ToolAgent(model), journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("0")).end()
        turns = [await chat.send("A")]
        await asked.wait()
        async for logged in chat.events():
            if logged.event.kind == "conversation_error":
                break
        try:
            turns.append(await chat.send("B", on_overlap=on_overlap))
        except TurnInProgress:
            assert on_overlap == "reject"
        sent.set()
        for turn in turns:
            await turn.end()

        log = await seen_by_models(chat)
        cut = on_overlap in ("interrupt", "rollback")
        assert log == f"u0 a0 uA{'' if cut else ' aA'}{'' if on_overlap == 'reject' else ' uB aB'}"
        await check_log(chat)
    await check_over_a_restart(journal)


# --- 3. a history that is split after a condensation ---------------------------------------------


@pytest.mark.parametrize("on_overlap", POLICIES)
async def test_a_history_that_is_split_after_a_condensation_goes_on_in_both_parts(
    on_overlap: OnOverlap,
) -> None:
    journal = MemoryJournal()
    steps = StepAgent({"B": "call"})
    async with verified(steps, journal=journal) as conversations:
        chat = conversations["c"]
        await _talk(chat, 4)
        await _forget(chat, 4)
        fork = await chat.fork("fork")
        for one in (chat, fork):
            steps.reached.clear()
            await _overlap(one, steps, on_overlap, forgets=2)

            begins = " ".join(f"u{n} a{n}" for n in range(4))
            assert await seen_by_models(one) == f"{begins} {EXPECTED[on_overlap]}"
            await check_log(one)
    for name in ("c", "fork"):
        await check_over_a_restart(journal, name)


# --- the journal, meanwhile ----------------------------------------------------------------------


class FailsAtFirstAnswer(WatchedJournal):
    """Cannot be reached when A's answer is to be appended, once."""

    failed_at: int | None = None
    appended = 0

    async def before_append(self, records: Sequence[Record]) -> None:
        self.appended += 1
        if self.failed_at is None and any(record.kind == "agent_message" for record in records):
            self.failed_at = self.appended
            raise Unavailable("the journal cannot be reached; nothing was written")


@pytest.mark.parametrize(
    ("on_overlap", "unfinished", "seen"),
    [
        ("queue", "end", "uA uB call result aB"),
        ("steer", "end", "uA uB call result aB"),
        ("queue", "resume", "uA aA uB call result aB"),
        # A's turn is taken up at a step, where B joins it.
        ("steer", "resume", "uA uB aA+B"),
    ],
)
async def test_where_the_answer_cannot_be_written_nothing_later_is_committed_before_it(
    on_overlap: OnOverlap, unfinished: Literal["end", "resume"], seen: str
) -> None:
    """The turn fails loudly, or is taken up and answers again; B comes after either."""
    journal, steps = FailsAtFirstAnswer(), StepAgent({"B": "call"})
    steps.hold("A writes")
    async with verified(steps, journal=journal, unfinished=unfinished) as conversations:
        chat = conversations["c"]
        first = await chat.send("A")
        await steps.reached["A writes"].wait()
        second = await chat.send("B", on_overlap=on_overlap)
        steps.release()

        outcome = "interrupted" if unfinished == "end" else "completed"
        assert (await first.end()).outcome == outcome
        assert await second.reply() == seen.rsplit(maxsplit=1)[-1][1:]
        assert journal.failed_at is not None
        assert await seen_by_models(chat) == seen
        await check_log(chat)
    await check_over_a_restart(journal)
