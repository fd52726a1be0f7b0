"""The system prompt of a conversation that has begun, when the application has another one."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import pytest

from tests.actors.conversations.turn_worlds import StepAgent
from tests.actors.conversations.worlds import verified
from turnkeeper.actors import (
    Conversation,
    ConversationConfig,
    Conversations,
    MemoryStore,
    ToolAgent,
)
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import LLMConvertibleEvent, SystemPromptEvent, decode_event
from turnkeeper.actors.journals.memory import MemoryJournal
from turnkeeper.actors.models.messages import to_llm_messages
from turnkeeper.actors.models.scripted import ScriptedModel

pytestmark = pytest.mark.anyio


def _agent() -> tuple[ToolAgent, ScriptedModel]:
    model = ScriptedModel(lambda _: "yes")
    return ToolAgent(model), model


async def _prompts(chat: Conversation) -> list[tuple[int, str]]:
    """The prompts of the log, with the seqs of the turns that they come right before."""
    found = []
    kinds = {logged.seq: logged.event async for logged in chat.events(live=False)}
    for seq, event in kinds.items():
        if isinstance(event, SystemPromptEvent):
            assert seq == 1 or kinds[seq + 1].kind == "turn_started"
            found.append((seq, event.content))
    return found


async def _shown(chat: Conversation) -> list[str]:
    return [event.content for event in await chat.view() if isinstance(event, SystemPromptEvent)]


async def test_a_changed_prompt_takes_the_place_of_the_one_before_it_at_the_next_turn() -> None:
    store = MemoryStore()
    for prompt, heads in (("be kind", [1]), ("be brief", [1, 7]), ("be brief", [1, 7])):
        agent, model = _agent()
        async with verified(
            agent, journal=MemoryJournal(store), system_prompt=prompt
        ) as conversations:
            chat = conversations["c"]
            await (await chat.send("A")).reply()

            assert [seq for seq, _ in await _prompts(chat)] == heads
            assert await _shown(chat) == [prompt]
            (request,) = model.requests
            messages = to_llm_messages(request.view)
            assert [m["content"] for m in messages if m["role"] == "system"] == [prompt]
            assert messages[0]["role"] == "system"
            assert (await chat.at(6)).view[0] == (await chat.at(1)).view[0]


async def test_a_pinned_conversation_keeps_its_prompt() -> None:
    store = MemoryStore()
    for prompt in ("be kind", "be brief"):
        agent, _ = _agent()
        async with verified(
            agent, journal=MemoryJournal(store), system_prompt=prompt, prompt_policy="pinned"
        ) as conversations:
            chat = conversations["c"]
            await (await chat.send("A")).reply()
            assert await _prompts(chat) == [(1, "be kind")]
            assert await _shown(chat) == ["be kind"]


async def test_a_turn_that_is_resumed_keeps_its_prompt_and_a_queued_one_starts_with_the_new() -> (
    None
):
    store = MemoryStore()
    steps = StepAgent()
    steps.hold("A thinks")
    with anyio.CancelScope() as process:
        async with verified(
            steps, journal=MemoryJournal(store), system_prompt="old"
        ) as conversations:
            chat = conversations["c"]
            await chat.send("A")
            await chat.send("B", message_id="B")
            await steps.reached["A thinks"].wait()
            process.cancel()
    steps = StepAgent()
    steps.hold("A thinks")
    async with verified(
        steps, journal=MemoryJournal(store), system_prompt="new", unfinished="resume"
    ) as conversations:
        chat = conversations["c"]
        await steps.reached["A thinks"].wait()
        assert await _shown(chat) == ["old"]
        steps.release()
        await (await chat.send("B", message_id="B")).reply()

        assert await _shown(chat) == ["new"]
        assert [text for _, text in await _prompts(chat)] == ["old", "new"]


async def test_a_prompt_that_the_application_adds_later_goes_before_all_else() -> None:
    """And one that it has no more stays: it may be another program that opens the journal."""
    store = MemoryStore()
    first: list[LLMConvertibleEvent] = []
    for prompt, shown in ((None, []), ("be kind", ["be kind"]), (None, ["be kind"])):
        agent, _ = _agent()
        async with verified(
            agent, journal=MemoryJournal(store), system_prompt=prompt
        ) as conversations:
            chat = conversations["c"]
            await (await chat.send("A")).reply()
            assert await _shown(chat) == shown
            first.append((await chat.view())[0])
    assert [event.kind for event in first] == ["user_message", "system_prompt", "system_prompt"]


async def test_a_prompt_that_was_appended_in_the_middle_stays_where_it_is() -> None:
    store = MemoryStore()
    for prompt in ("be kind", "be brief"):
        agent, _ = _agent()
        async with verified(
            agent, journal=MemoryJournal(store), system_prompt=prompt
        ) as conversations:
            chat = conversations["c"]
            await (await chat.send("A")).reply()
            if prompt == "be kind":
                await chat.append(SystemPromptEvent(content="it is late"))
    async with verified(_agent()[0], journal=MemoryJournal(store)) as conversations:
        assert await _shown(conversations["c"]) == ["be brief", "it is late"]


async def test_one_conversation_may_have_another_prompt_than_the_rest() -> None:
    configured: Mapping[str, ConversationConfig] = {"c": ConversationConfig(system_prompt="new")}
    store = MemoryStore()
    for configure in (None, lambda name: configured.get(name, ConversationConfig())):
        agent, _ = _agent()
        async with verified(
            agent, journal=MemoryJournal(store), system_prompt="old", configure=configure
        ) as conversations:
            for name in ("c", "d"):
                await (await conversations[name].send("A")).reply()
    async with verified(_agent()[0], journal=MemoryJournal(store)) as conversations:
        assert await _shown(conversations["c"]) == ["new"]
        assert await _shown(conversations["d"]) == ["old"]


def test_a_prompt_that_an_older_version_wrote_stands_where_it_came() -> None:
    event = decode_event(
        b'{"kind":"system_prompt","id":"e1","timestamp":"2025-01-01T00:00:01Z","turn_id":null,'
        b'"content":"be kind"}'
    )
    assert isinstance(event, SystemPromptEvent)
    assert not event.goes_first


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidInput, match="prompt_policy is 'newest'"):
        Conversations(_agent()[0], journal=MemoryJournal(), prompt_policy="newest")  # type: ignore[arg-type]
