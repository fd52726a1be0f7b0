"""What the tests of conversations share: agents that can be held, and short ways to read a log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import anyio
import anyio.lowlevel

from turnkeeper.actors import (
    Conversation,
    Conversations,
    Event,
    Journal,
    MemoryJournal,
    ToolCall,
    TurnContext,
)
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    LLMConvertibleEvent,
    MessageQueuedEvent,
    ObservationEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.journal import Listing, Record

verified = partial(Conversations, verify="always")
"""Conversations that rebuild every view from its log after each commit, and fail if it differs."""


class HeldAgent:
    """Says `a(<message>)`, and stops on the way wherever the test holds it.

    A chat message that begins with `tool` makes it call a tool, one with `two tools` two side by
    side, one with `stream` makes it stream its answer, one with `fail` makes it raise.
    """

    def __init__(self) -> None:
        self.held: dict[str, anyio.Event] = {}
        self.reached: defaultdict[str, anyio.Event] = defaultdict(anyio.Event)
        self.turns: list[str] = []
        self.views: dict[str, list[str]] = {}

    def hold(self, text: str) -> None:
        """Stop the turn that answers `text` before it says anything, until `release`."""
        self.held[text] = anyio.Event()

    def release(self, text: str) -> None:
        self.held[text].set()

    async def run(self, turn: TurnContext) -> None:
        text = turn.message.content
        self.turns.append(text)
        self.views[text] = [brief(event) for event in turn.view]
        if text.startswith("stream"):
            await turn.stream(self._pieces(text))
            return
        if text.startswith("two tools"):
            await turn.call_tools([ToolCall("look"), ToolCall("look")], self._tool(text))
        elif text.startswith("tool"):
            await turn.call_tools([ToolCall("look", {"at": text})], self._tool(text))
        else:
            await self._stop(text)
        if text.startswith("fail"):
            raise RuntimeError(f"no answer to {text}")
        await turn.say(f"a({text})")

    async def _stop(self, text: str) -> None:
        self.reached[text].set()
        if text in self.held:
            await self.held[text].wait()

    async def _pieces(self, text: str) -> AsyncIterator[str]:
        yield "a("
        await self._stop(text)
        yield f"{text})"

    def _tool(self, text: str) -> Callable[[ActionEvent], Awaitable[str]]:
        async def look(action: ActionEvent) -> str:
            await self._stop(text)
            return f"seen {action.arguments.get('at', '')}"

        return look


class WatchedJournal(MemoryJournal):
    """Lets a test look at each append, hold it, or fail it."""

    async def before_append(self, records: Sequence[Record]) -> None:
        raise NotImplementedError

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
        await self.before_append(records)
        return await super().append(
            conversation_id,
            records,
            epoch=epoch,
            expected_seq=expected_seq,
            is_unfinished=is_unfinished,
            listing=listing,
        )


class HeldJournal(WatchedJournal):
    """Holds its appends while a test says so, so that what comes meanwhile is one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = anyio.Event()
        self.gate.set()

    async def before_append(self, records: Sequence[Record]) -> None:
        await self.gate.wait()


async def until_passivated(conversations: Conversations, name: str) -> None:
    """Until the conversation's actor has let itself be put away; fails where it never does."""
    region = conversations._region
    assert region is not None
    for _ in range(10_000):
        if await region.passivate(name):
            return
        await anyio.lowlevel.checkpoint()
    raise AssertionError(f"{name} is kept active")


async def write_log(journal: Journal, name: str, events: Sequence[Event]) -> None:
    """Write a log at once, as an owner would."""
    await journal.append(
        name,
        [encode_record(event) for event in events],
        epoch=(await journal.claim(name)).epoch,
        expected_seq=1,
        is_unfinished=False,
    )


def brief(event: Event) -> str:
    """An event in one word, as the tables of the documents write it."""
    match event:
        case UserMessageEvent(content=content):
            return f"u:{content}"
        case AgentMessageEvent(content=content, interrupted=True):
            return f"cut:{content}"
        case AgentMessageEvent(content=content):
            return f"a:{content}"
        case ActionEvent():
            return "call"
        case ObservationEvent():
            return "result"
        case AgentErrorEvent():
            return "no result"
        case MessageQueuedEvent(content=content):
            return f"queued:{content}"
        case TurnStartedEvent():
            return "started"
        case TurnEndedEvent(outcome=outcome):
            return outcome
        case _:
            return event.kind


async def log_of(conversation: Conversation, *, all_kinds: bool = False) -> list[str]:
    """The whole log as it is now, in brief; what the model sees, or all kinds."""
    return [
        brief(logged.event)
        async for logged in conversation.events(live=False)
        if all_kinds or isinstance(logged.event, LLMConvertibleEvent)
    ]
