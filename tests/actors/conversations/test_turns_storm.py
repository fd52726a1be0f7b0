"""Fifty chat messages at once, while a user pauses, confirms and cancels: the laws hold.

What a run does is drawn from its seed; how tasks take turns is the backend's. What is checked is
what must hold whatever came: of the log, of what each caller was told, of what a reader saw.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from tests.actors.conversations.turn_worlds import StepAgent, events_of
from tests.actors.conversations.worlds import verified
from tests.actors.core.turn_laws import POLICIES, LogReader
from turnkeeper.actors import (
    Conversation,
    Event,
    Journal,
    LoggedEvent,
    MemoryJournal,
    OnOverlap,
    SQLiteJournal,
    Turn,
    TurnEnd,
    View,
)
from turnkeeper.actors.errors import NotConfirmable, QueueFull, TurnInProgress
from turnkeeper.actors.events import (
    AgentMessageEvent,
    MessageWithdrawnEvent,
    TurnEndedEvent,
    UserMessageEvent,
)

pytestmark = pytest.mark.costly

MESSAGES = 50
SCRIPTS = ("", "calls", "asks", "call asks calls")


class HastyAgent(StepAgent):
    """Lets others go first now and then, wherever a test could hold it."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__({f"m{n}": draw.choice(SCRIPTS) for n in range(MESSAGES)})
        self._draw = draw

    async def _stop(self, point: str, step: int) -> None:
        for _ in range(self._draw.randrange(4)):
            await anyio.lowlevel.checkpoint()


class Storm:
    """Fifty senders, and a user at the switches."""

    def __init__(
        self, chat: Conversation, draw: random.Random, policies: Sequence[OnOverlap]
    ) -> None:
        self.chat = chat
        self.turns: dict[str, Turn] = {}
        self.ends: dict[str, TurnEnd] = {}
        self.refused: list[str] = []
        self.seen: list[LoggedEvent] = []
        self._draw = draw
        self._policies = policies
        self._senders_left = MESSAGES

    async def run(self) -> None:
        async with anyio.create_task_group() as group:
            reader = anyio.CancelScope()

            async def read() -> None:
                with reader:
                    async for logged in self.chat.events():
                        self.seen.append(logged)

            group.start_soon(read)
            for n in range(MESSAGES):
                group.start_soon(self._send, f"m{n}")
            await self._switch()
            while len(self.seen) < len(await events_of(self.chat)):
                await anyio.lowlevel.checkpoint()
            reader.cancel()

    async def _send(self, name: str) -> None:
        for _ in range(self._draw.randrange(200)):
            await anyio.lowlevel.checkpoint()
        policy = self._draw.choice(self._policies)
        try:
            turn = await self.chat.send(name, message_id=name, on_overlap=policy)
        except (TurnInProgress, QueueFull):
            self.refused.append(name)
        else:
            self.turns[name] = turn
            if self._draw.random() < 0.15:
                await turn.cancel()
            self.ends[name] = await turn.end()
        finally:
            self._senders_left -= 1

    async def _switch(self) -> None:
        """Pause, resume, confirm and reject at random; in the end, let everything go."""
        while self._senders_left:
            for _ in range(self._draw.randrange(6)):
                await anyio.lowlevel.checkpoint()
            if not self.turns:
                continue
            choice = self._draw.random()
            try:
                if choice < 0.15:
                    await self.chat.pause()
                elif choice < 0.5:
                    await self.chat.resume()
                elif choice < 0.9:
                    await self.chat.confirm()
                else:
                    await self.chat.reject("no")
            except NotConfirmable:
                continue


def told_by_log(events: Sequence[Event], message_id: str) -> TurnEnd:
    """What the caller of a message must have been told, worked out from the log."""
    begun = -1
    for n, event in enumerate(events):
        if isinstance(event, UserMessageEvent) and event.message_id == message_id:
            begun = n
        if isinstance(event, MessageWithdrawnEvent) and event.message_id == message_id:
            return TurnEnd("withdrawn", "", "cancelled by its caller")
    turn_id = events[begun].turn_id
    reply = ""
    for event in events[begun:]:
        if isinstance(event, AgentMessageEvent) and event.turn_id == turn_id:
            reply = event.content
        if isinstance(event, TurnEndedEvent) and event.turn_id == turn_id:
            return TurnEnd(event.outcome, reply, event.detail or "")
    raise AssertionError(f"the turn of {message_id} has not ended")


_KINDS: list[tuple[OnOverlap, ...]] = [*((policy,) for policy in POLICIES), POLICIES]


@pytest.mark.parametrize(("seed", "policies"), list(enumerate(_KINDS)), ids=[*POLICIES, "mixed"])
async def test_fifty_at_once_of_every_policy_keep_the_laws(
    seed: int, policies: Sequence[OnOverlap]
) -> None:
    await _storm(MemoryJournal(), seed, policies)


async def test_fifty_at_once_over_a_file_keep_the_laws(tmp_path: Path) -> None:
    await _storm(SQLiteJournal(tmp_path / "chats.db"), len(_KINDS), POLICIES)


async def _storm(journal: Journal, seed: int, policies: Sequence[OnOverlap]) -> None:
    draw = random.Random(seed)
    agent = HastyAgent(draw)
    async with verified(agent, journal=journal, queued_messages_max=40) as conversations:
        chat = conversations["c"]
        storm = Storm(chat, draw, policies)
        with anyio.fail_after(60):
            await storm.run()
        events = await events_of(chat)

        LogReader(events).check()
        assert await chat.view() == View.from_events(events)
        assert [logged.event for logged in storm.seen] == events
        assert [logged.seq for logged in storm.seen] == list(range(1, len(events) + 1))
        assert storm.ends == {name: told_by_log(events, name) for name in storm.turns}
        named = {getattr(event, "message_id", None) for event in events} - {None}
        assert named == set(storm.turns)
        assert len(storm.turns) + len(storm.refused) == MESSAGES
        assert len(agent.ran) == len(set(agent.ran)), "a call ran twice"
        # Something of everything happened, or this shows little.
        if policies == POLICIES:
            outcomes = {end.outcome for end in storm.ends.values()}
            assert outcomes >= {"completed", "interrupted", "rolled_back"}
