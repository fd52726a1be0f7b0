"""Finding what runs, interrupting it, and taking the newest turn back."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from tests.actors.conversations.stores import KINDS, SHARED, store
from tests.actors.conversations.turn_worlds import StepAgent, brief, events_of, log_of, until
from tests.actors.conversations.worlds import verified
from turnkeeper.actors import Conversation, MemoryJournal, Proposal
from turnkeeper.actors.core.commands import Propose
from turnkeeper.actors.errors import (
    ConversationNotFound,
    MessageNotFound,
    NothingToRetract,
    NotRetractable,
    TurnInProgress,
)
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    SystemPromptEvent,
    ThinkingBlock,
    UserMessageEvent,
)

pytestmark = pytest.mark.anyio


# --- looking -------------------------------------------------------------------------------------


async def test_a_conversation_that_does_not_exist_is_not_made_by_looking_at_it() -> None:
    journal = MemoryJournal()
    async with verified(StepAgent(), journal=journal) as conversations:
        chat = conversations["c"]
        assert not await chat.exists()
        for look in (chat.running, chat.queued, chat.interrupt, chat.undo):
            with pytest.raises(ConversationNotFound):
                await look()
        with pytest.raises(ConversationNotFound):
            await chat.turn("A")
        assert not conversations._open_region().active
        assert not await journal.list()
        await (await chat.send("A")).end()
        assert await chat.exists()
        await conversations.delete("c")
        assert not await chat.exists()


@pytest.mark.parametrize("kind", KINDS)
async def test_what_runs_and_what_waits_can_be_taken_hold_of(kind: str, tmp_path: Path) -> None:
    agent = StepAgent({"A": "calls"})
    with store(kind, tmp_path) as opens:
        async with verified(agent, journal=opens()) as conversations:
            chat = conversations["c"]
            agent.hold("A calls", "B thinks")
            sent = await chat.send("A", message_id="A")
            await agent.reached["A calls"].wait()
            await chat.send("B", message_id="B")
            await chat.send("C", message_id="C")

            running = await chat.running()
            assert running is not None
            assert (running.turn_id, running.message_id, running.seq) == (sent.turn_id, "A", 2)
            assert [message.content for message in await chat.queued()] == ["B", "C"]
            assert await (await chat.turn("C")).cancel()
            assert [message.content for message in await chat.queued()] == ["B"]

            agent.held.pop("A calls").set()
            assert await running.reply() == "A"
            await agent.reached["B thinks"].wait()
            running = await chat.running()
            assert running is not None
            assert running.message_id == "B"
            assert not await chat.queued()
            agent.release()
            await running.end()
            assert await chat.running() is None


async def test_a_turn_is_found_by_its_message_id_wherever_the_message_has_gone() -> None:
    agent = StepAgent({"A": "calls"})
    async with verified(agent, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        agent.hold("A calls", "A thinks 1", "B thinks", "D thinks")
        first = await chat.send("A", message_id="A")
        await agent.reached["A calls"].wait()
        second = await chat.send("B", message_id="B", on_overlap="steer")

        waits = await chat.turn("B")
        assert waits.is_duplicate
        assert (waits.turn_id, waits.seq) == (second.turn_id, second.seq)
        assert await waits.find_end() is None

        agent.held.pop("A calls").set()
        await agent.reached["A thinks 1"].wait()
        joined = await chat.turn("B")
        assert joined.turn_id == first.turn_id != second.turn_id, "what send told was a forecast"

        await chat.send("D", message_id="D", on_overlap="rollback")
        again = await chat.turn("B")
        assert again.turn_id not in (first.turn_id, second.turn_id)
        ended = await (await chat.turn("A")).find_end()
        assert ended is not None
        assert ended.outcome == "rolled_back"

        agent.release()
        assert await waits.reply() == await again.reply() == "B"
        answered = await chat.turn("B")
        ended = await answered.find_end()
        assert ended is not None
        assert (answered.turn_id, ended.reply) == (again.turn_id, "B")


async def test_a_message_that_no_turn_answers_is_not_found() -> None:
    async with verified(StepAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.append(UserMessageEvent(content="by hand", message_id="H"))
        for message_id in ("H", "nobody's"):
            with pytest.raises(MessageNotFound) as caught:
                await chat.turn(message_id)
            assert caught.value.message_id == message_id


async def test_a_held_turn_is_found_running_with_what_it_waits_for() -> None:
    agent = StepAgent({"A": "asks"})
    async with verified(agent, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        await until(chat, "confirmation_requested")
        running = await chat.running()
        assert running is not None
        assert (running.turn_id, running.waits_for) == (turn.turn_id, "confirmation")
        await chat.interrupt()
        assert await chat.running() is None


@pytest.mark.parametrize("kind", SHARED)
async def test_it_is_found_also_if_another_process_owns_the_conversation(
    kind: str, tmp_path: Path
) -> None:
    agent = StepAgent()
    with store(kind, tmp_path) as opens:
        async with (
            verified(agent, journal=opens()) as owner,
            verified(StepAgent(), journal=opens(), recover="on_message") as other,
        ):
            agent.hold("A thinks")
            sent = await owner["c"].send("A", message_id="A")
            await owner["c"].send("B", message_id="B")
            await agent.reached["A thinks"].wait()

            chat = other["c"]
            assert await chat.exists()
            running = await chat.running()
            assert running is not None
            assert running.turn_id == sent.turn_id
            assert [message.message_id for message in await chat.queued()] == ["B"]
            assert (await chat.turn("A")).turn_id == sent.turn_id
            assert not other._open_region().active, "looking has started an owner"
            agent.release()
            assert await (await chat.turn("B")).reply() == "B"


# --- interrupting --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_an_interrupt_ends_the_turn_that_runs_and_no_later_one(
    kind: str, tmp_path: Path
) -> None:
    agent = StepAgent()
    with store(kind, tmp_path) as opens:
        async with verified(agent, journal=opens()) as conversations:
            chat = conversations["c"]
            agent.hold("A writes", "B writes")
            first, second = await chat.send("A"), await chat.send("B")
            await agent.reached["A writes"].wait()

            assert await chat.interrupt(first.turn_id)
            assert (await first.end()).outcome == "interrupted"
            await agent.reached["B writes"].wait()
            assert not await chat.interrupt(first.turn_id), "a late press has hit the next turn"
            assert await second.find_end() is None
            assert await chat.interrupt()
            assert not await chat.interrupt()
            log = "started uA qB a… interrupted started uB a… interrupted"
            assert await log_of(chat) == log


async def test_an_interrupt_ends_a_turn_that_is_held() -> None:
    agent = StepAgent({"A": "asks", "B": "asks"})
    async with verified(agent, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await until(chat, "confirmation_requested")
        await chat.pause()
        assert await chat.interrupt()
        assert await log_of(chat) == "started uA call asked paused not-run interrupted"


# --- taking back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_undo_takes_the_newest_turn_out_of_the_view_and_returns_its_messages(
    kind: str, tmp_path: Path
) -> None:
    agent = StepAgent({"B": "calls"})
    with store(kind, tmp_path) as opens:
        async with verified(agent, journal=opens()) as conversations:
            chat = conversations["c"]
            await (await chat.send("A")).end()
            agent.hold("B calls")
            second = await chat.send("B")
            await agent.reached["B calls"].wait()
            await chat.send("C", on_overlap="steer")
            with pytest.raises(TurnInProgress, match="undo refused") as refused:
                await chat.undo()
            assert refused.value.turn_id == second.turn_id
            agent.release()
            await second.end()

            assert [message.content for message in await chat.undo()] == ["B", "C"]
            assert brief(*await chat.view()) == "uA aA"
        async with verified(agent, journal=opens()) as conversations:
            chat = conversations["c"]
            assert [message.content for message in await chat.undo()] == ["A"]
            assert brief(*await chat.view()) == ""
            with pytest.raises(NothingToRetract):
                await chat.undo()
            assert (await log_of(chat)).endswith("completed retracted retracted")


@pytest.mark.parametrize("kind", KINDS)
async def test_undo_of_a_named_turn_takes_back_no_other_one(kind: str, tmp_path: Path) -> None:
    agent = StepAgent({"B": "call"})
    with store(kind, tmp_path) as opens:
        async with verified(agent, journal=opens()) as conversations:
            chat = conversations["c"]
            first = await chat.send("A")
            await first.end()
            agent.hold("B calls")
            second = await chat.send("B")
            await agent.reached["B calls"].wait()
            with pytest.raises(TurnInProgress):
                await chat.undo(second.turn_id)
            agent.release()
            await second.end()

            with pytest.raises(NotRetractable, match="take back the later turns first") as refused:
                await chat.undo(first.turn_id)
            assert refused.value.reason == "not_newest"
            with pytest.raises(NothingToRetract):
                await chat.undo("unknown")

            assert [message.content for message in await chat.undo(second.turn_id)] == ["B"]
            with pytest.raises(NothingToRetract):
                await chat.undo("unknown")
            assert brief(*await chat.view()) == "uA aA"


@pytest.mark.parametrize("kind", KINDS)
async def test_undo_of_a_turn_that_was_taken_back_returns_the_same_and_writes_nothing(
    kind: str, tmp_path: Path
) -> None:
    """A client whose reply was lost asks again: at once, after a restart, or in a later turn."""
    agent = StepAgent({"B": "calls"})
    with store(kind, tmp_path) as opens:
        async with verified(agent, journal=opens()) as conversations:
            chat = conversations["c"]
            await (await chat.send("A")).end()
            agent.hold("B calls")
            second = await chat.send("B")
            await agent.reached["B calls"].wait()
            await chat.send("C", on_overlap="steer")
            agent.release()
            await second.end()

            told = await chat.undo(second.turn_id)

            assert [message.content for message in told] == ["B", "C"]
            assert await chat.undo(second.turn_id) == told
            fork = await chat.fork("copy")
            assert await fork.undo(second.turn_id) == told
        agent = StepAgent()
        async with verified(agent, journal=opens()) as conversations:
            chat = conversations["c"]
            length = len(await events_of(chat))
            assert await chat.undo(second.turn_id) == told
            assert len(await events_of(chat)) == length

            agent.hold("D thinks")
            later = await chat.send("D")
            await agent.reached["D thinks"].wait()
            assert await chat.undo(second.turn_id) == told
            agent.release()
            await later.end()
            assert await chat.undo(second.turn_id) == told
            assert brief(*await chat.view()) == "uA aA uD aD"


async def test_undo_of_a_turn_that_left_the_view_otherwise_returns_its_messages() -> None:
    """Replaced or retracted, it is out of the view, as asked. Condensed, it was not taken back."""
    async with verified(StepAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        replaced = await chat.send("A", message_id="A")
        await replaced.end()
        await (await chat.send("B", replaces="A")).end()
        condensed = await chat.send("C")
        await condensed.end()
        await _forget(chat, 2, 4, None)
        newest = await chat.send("D")
        await newest.end()
        assert brief(*await chat.view()) == "uB aB uD aD"
        length = len(await events_of(chat))

        assert [message.content for message in await chat.undo(replaced.turn_id)] == ["A"]
        with pytest.raises(NothingToRetract):
            await chat.undo(condensed.turn_id)
        assert len(await events_of(chat)) == length


async def _forget(chat: Conversation, begin: int, end: int, summary: str | None) -> None:
    view = await chat.view()
    ids = tuple(event.id for event in view[begin:end])
    assert await chat._ref.ask(Propose(1, Proposal(ids, summary), view))


@pytest.mark.parametrize(
    ("begin", "end", "summary"),
    [
        (3, 5, None),  # a call of the newest turn with its result
        (2, 5, "told"),  # its beginning
        (1, 6, "told"),  # all of it; what is left is the turn before, and a part of that is gone
    ],
)
async def test_undo_leaves_a_turn_of_which_a_part_is_condensed(
    begin: int, end: int, summary: str | None
) -> None:
    journal = MemoryJournal()
    agent = StepAgent({"B": "call"})
    async with verified(agent, journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        await (await chat.send("B")).end()
        assert brief(*await chat.view()) == "uA aA uB call result aB"
        await _forget(chat, begin, end, summary)
        length = len(await events_of(chat))

        if (begin, end) == (2, 5):
            # No chat message of the turn is left, and the turn before has a summary behind it.
            assert brief(*await chat.view()) == "uA aA condensation_summary aB"
        with pytest.raises(NotRetractable) as caught:
            await chat.undo()
        assert caught.value.reason == "condensed"
        assert len(await events_of(chat)) == length
    async with verified(agent, journal=journal) as conversations:
        with pytest.raises(NotRetractable):
            await conversations["c"].undo()


async def test_undo_takes_a_turn_that_stands_behind_a_summary() -> None:
    agent = StepAgent({"B": "call"})
    async with verified(agent, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        await (await chat.send("B")).end()
        await _forget(chat, 0, 2, "A was answered")
        assert [message.content for message in await chat.undo()] == ["B"]
        assert brief(*await chat.view()) == "condensation_summary"


async def test_undo_leaves_a_turn_that_is_tied_to_events_appended_by_hand() -> None:
    """A tool loop that begins in a turn and goes on by hand is whole, or it is not there."""
    async with verified(StepAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        await turn.end()
        call = ActionEvent(
            tool_call_id="k",
            tool_name="t",
            llm_response_id="r",
            thinking=(ThinkingBlock(thinking="hm"),),
            turn_id=turn.turn_id,
        )
        await chat.append(call)
        with pytest.raises(NotRetractable) as caught:
            await chat.undo()
        assert caught.value.reason == "by_hand"


async def test_undo_leaves_alone_what_stands_beside_the_turn() -> None:
    async with verified(
        StepAgent(), journal=MemoryJournal(), system_prompt="be kind"
    ) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        await chat.append(AgentMessageEvent(content="by hand"))
        await chat.undo()
        assert brief(*await chat.view()) == "system_prompt aby hand"


@pytest.mark.parametrize("goes_first", [False, True])
async def test_undo_leaves_a_system_prompt_that_was_appended_with_the_turns_id(
    goes_first: bool,
) -> None:
    """As an edit of the chat message does. If it goes first, a summary may come after it."""
    async with verified(StepAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        for text in ("A", "B"):
            await (await chat.send(text)).end()
        turn_id = (await chat.view())[-1].turn_id
        prompt = SystemPromptEvent(content="be kind", goes_first=goes_first, turn_id=turn_id)
        await chat.append(prompt)
        assert [message.content for message in await chat.undo()] == ["B"]
        view = [event for event in await chat.view() if event.turn_id == turn_id]
        assert view == [prompt]


async def test_a_rollback_leaves_a_system_prompt_that_was_appended_with_the_turns_id() -> None:
    agent = StepAgent()
    agent.hold("A thinks")
    async with verified(agent, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        await agent.reached["A thinks"].wait()
        prompt = SystemPromptEvent(content="be kind", turn_id=turn.turn_id)
        await chat.append(prompt)
        await (await chat.send("B", on_overlap="rollback")).end()
        assert (await turn.end()).outcome == "rolled_back"
        assert [event for event in await chat.view() if event.turn_id == turn.turn_id] == [prompt]


async def test_the_code_on_the_page_about_turns_does_what_the_page_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "turns.md").read_text(encoding="utf-8")
    codes = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program: dict[str, Callable[[Conversation], Awaitable[None]]] = {}
    for name, code in zip(("edit", "take hold"), codes, strict=True):
        exec(f"async def run(chat):\n{indent(code, '    ')}", made := dict[str, Any]())
        program[name] = made["run"]
    agent = StepAgent()
    async with verified(agent, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        other = conversations["d"]
        await (await other.send("Where is order 7?", message_id="m1")).end()
        await program["edit"](other)
        edited = await (await other.turn("m2")).end()
        assert edited.reply == "Where is order 8?"
        assert len(await other.view()) == 2

        agent.hold("A writes", "B writes")
        await chat.send("A", message_id="A")
        await agent.reached["A writes"].wait()
        await chat.send("B")
        await chat.send("C")

        await program["take hold"](chat)

        assert capsys.readouterr().out == "being answered: A\n"
        assert not await chat.queued()
        assert (await log_of(chat)).startswith("started uA qB qC a… interrupted started uB w")
