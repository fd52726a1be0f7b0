"""Conversations at work, with any of their tasks cancelled at any await: no promise is broken.

On asyncio every task of the loop is cancelled natively, those of the runtime, of owners and agents
too; on both backends each task of the application is cancelled by its scope, the one that holds the
`Conversations` too. Each time all ends, and another process finds all that was acknowledged, once,
in logs that are whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias

import anyio
import pytest

from tests.actors.conversations.turn_worlds import StepAgent, events_of
from tests.actors.conversations.worlds import verified
from tests.actors.core.turn_laws import LogReader
from tests.drawn import drawn
from tests.stepping import HUNG_S, Place, Steps, places_of, run_cancelling
from turnkeeper.actors import Conversation, Conversations, MemoryJournal, OnOverlap, Turn, View
from turnkeeper.actors.core.condensation import RollingCondenser
from turnkeeper.actors.errors import ConversationDeleted, ConversationNotFound
from turnkeeper.actors.events import MessageQueuedEvent, UserMessageEvent
from turnkeeper.runtime import TurnkeeperError

pytestmark = pytest.mark.costly

SHARE = 40

Operation: TypeAlias = Callable[[], Coroutine[Any, Any, object]]
StartAll: TypeAlias = Callable[[list[Operation]], Awaitable[None]]


class World:
    """A journal, what was acknowledged from it, and what was begun."""

    def __init__(self) -> None:
        self.journal = MemoryJournal()
        self.acknowledged: dict[tuple[str, str], int] = {}
        """The seq of each chat message, by conversation and message id."""
        self.begun = self.ended = 0
        self.deleting = False

    async def serve(self, start_all: StartAll) -> None:
        agent = StepAgent({"A": "call", "B": "calls call", "D": "call"})
        async with verified(
            agent, journal=self.journal, condenser=RollingCondenser(max_size=8)
        ) as conversations:
            operations = self.operations(conversations)
            await start_all([self.counted(operation) for operation in operations])

    def counted(self, operation: Operation) -> Operation:
        async def run() -> None:
            self.begun += 1
            try:
                await operation()
            except TurnkeeperError:
                pass  # as what it needs was cut off, or not there yet
            finally:
                self.ended += 1

        return run

    def operations(self, conversations: Conversations) -> list[Operation]:
        chat, held, gone = (conversations[name] for name in ("c", "held", "gone"))

        async def talk(text: str, on_overlap: OnOverlap) -> None:
            turn = await self.send(chat, text, on_overlap)
            _ = [item async for item in turn]

        async def withdraw() -> None:
            turn = await self.send(chat, "W", "queue")
            await turn.cancel()
            await turn.end()

        async def hold() -> None:
            await self.send(held, "D", "queue")
            await held.pause()
            await self.send(held, "E", "steer")
            await held.resume()

        async def look() -> None:
            await self.send(chat, "L", "queue")
            await chat.view()
            fork = await chat.fork("fork")
            await (await self.send(fork, "F", "steer")).end()

        async def delete() -> None:
            await (await gone.send("G")).end()
            self.deleting = True
            await conversations.delete("gone")

        return [
            lambda: talk("A", "queue"),
            lambda: talk("B", "steer"),
            lambda: talk("C", "interrupt"),
            lambda: talk("R", "rollback"),
            withdraw,
            hold,
            look,
            delete,
        ]

    async def send(self, chat: Conversation, text: str, on_overlap: OnOverlap) -> Turn:
        turn = await chat.send(text, message_id=text, on_overlap=on_overlap)
        self.acknowledged[chat.conversation_id, text] = turn.seq
        return turn

    async def check(self) -> None:
        """Look at all of it as another process would."""
        assert self.begun == self.ended, "a call did not end"
        async with verified(StepAgent(), journal=self.journal) as conversations:
            for info in (await conversations.list()).rows:
                chat = conversations[info.conversation_id]
                if info.conversation_id == "gone" and self.deleting:
                    continue  # it may be gone or not
                if (await chat.at()).turns.waits_for == "resume":
                    await chat.resume()
                assert await (await chat.send("Z")).reply() == "Z"
                LogReader(events := await events_of(chat)).check()
                assert await chat.view() == View.from_events(events)
                for (name, text), seq in self.acknowledged.items():
                    if name == info.conversation_id:
                        event = events[seq - 1]
                        assert isinstance(event, UserMessageEvent | MessageQueuedEvent)
                        assert event.message_id == text, "an acknowledged message is lost"
                        assert (await chat.send(text, message_id=text)).is_duplicate
            if self.deleting:
                with suppress(ConversationNotFound, ConversationDeleted):
                    await conversations.delete("gone")


# --- natively ------------------------------------------------------------------------------------


def run_natively(at: Place | None) -> list[int]:
    world = World()

    async def start_all(operations: list[Operation]) -> None:
        await asyncio.wait([asyncio.create_task(operation()) for operation in operations])

    steps = run_cancelling(lambda: world.serve(start_all), at)
    asyncio.run(asyncio.wait_for(world.check(), HUNG_S))
    return steps


# anyio's own: a task of its groups that is cancelled natively before its first step.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.sweep
def test_whatever_task_is_cancelled_natively_no_promise_is_broken() -> None:
    broken: dict[Place, str] = {}
    for at in drawn(places_of(run_natively(None)), SHARE):
        try:
            run_natively(at)
        except Exception as error:  # noqa: BLE001 - all are told together
            broken[at] = repr(error)[:300]
    assert broken == {}


# --- by scopes -----------------------------------------------------------------------------------


def run_scoped(at: Place | None, backend: str) -> list[int]:
    world, steps = World(), Steps(at)

    async def start_all(operations: list[Operation]) -> None:
        async with anyio.create_task_group() as group:
            for operation in operations:
                group.start_soon(steps.run, operation())

    async def main() -> None:
        with anyio.fail_after(HUNG_S):
            await steps.run(world.serve(start_all))
            await world.check()

    anyio.run(main, backend=backend)
    return steps.counts


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_whatever_call_is_cancelled_by_its_scope_no_promise_is_broken(backend: str) -> None:
    broken: dict[Place, str] = {}
    for at in drawn(places_of(run_scoped(None, backend)), SHARE):
        try:
            run_scoped(at, backend)
        except Exception as error:  # noqa: BLE001 - all are told together
            broken[at] = repr(error)[:300]
    assert broken == {}
