"""A real standby that is promoted without the newest commits, and the old primary that comes back.

The servers are real ones, so this takes seconds; `test_lost_commits` has the cases one by one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress

import anyio
import anyio.lowlevel
import anyio.to_thread
import psycopg
import pytest

from turnkeeper.actors import Conversation, Conversations, PostgresJournal, TurnContext, agent
from turnkeeper.actors.errors import ConversationDeleted
from turnkeeper.actors.events import UserMessageEvent
from turnkeeper.runtime import OutcomeUnknown, OwnershipLost, Unavailable

from .... import postgres

pytestmark = pytest.mark.costly


@agent
async def echo(turn: TurnContext) -> str:
    return f"You said: {turn.message.content}"


async def said(chat: Conversation, text: str) -> None:
    """Send a message, under the same id until it is answered.

    If it is taken for one that is lost a moment later, its turn is deleted.
    """
    with anyio.fail_after(60):
        while True:
            with suppress(Unavailable, OutcomeUnknown, OwnershipLost, ConversationDeleted):
                turn = await chat.send(text, message_id=text)
                assert await turn.reply() == f"You said: {text}"
                return


async def can_write(journal: PostgresJournal, name: str) -> None:
    """Wait for the new primary: owners that fail again and again are not started for a while."""
    with anyio.fail_after(60):
        while True:
            with suppress(Unavailable, OutcomeUnknown):
                await journal.claim(name)
                return
            await anyio.lowlevel.checkpoint()


async def messages(chat: Conversation) -> list[str | None]:
    with anyio.fail_after(60):
        while True:
            with suppress(Unavailable, ConversationDeleted):
                log = [one.event async for one in chat.events(live=False)]
                return [one.message_id for one in log if isinstance(one, UserMessageEvent)]


async def to_its_end(reader: AsyncIterator[object]) -> None:
    async for _ in reader:
        pass


async def test_a_promoted_standby_s_log_goes_on_alone_and_all_who_know_more_are_told() -> None:
    with postgres.own_pair() as pair:
        do = anyio.to_thread.run_sync

        def journal(address: str) -> PostgresJournal:
            return PostgresJournal(pair.both, address=address, lease_s=6.0, poll_s=1.0)

        journals = journal("here"), journal("there")
        async with (
            Conversations(echo, journal=journals[0]) as here,
            Conversations(echo, journal=journals[1]) as there,
        ):
            chat, quiet = here["c"], there["d"]
            await said(chat, "kept")
            await said(quiet, "kept")
            await do(pair.wait_for_copy)
            await do(pair.stop, "standby", "fast")
            await said(chat, "lost")
            await said(here["begun"], "lost")
            head = (await chat.at()).view.seq
            seen = there["c"].events(live=True)
            while (await anext(seen)).seq < head:
                pass
            await do(pair.stop, "primary", "immediate")
            await do(pair.start, "standby")
            await do(pair.promote)
            for each, name in zip(journals, "xy", strict=True):
                await can_write(each, name)

            # Under its old id, the lost message is a new one, once its owner has looked.
            with anyio.fail_after(60):
                while "lost" not in await messages(chat):
                    await said(chat, "lost")
            await said(chat, "more")
            await said(quiet, "more")

            assert await messages(chat) == ["kept", "lost", "more"]
            assert await messages(quiet) == ["kept", "more"]
            assert not (await here.list(prefix="begun")).rows
            # If it reads while no server answers, it is told of that instead.
            with anyio.fail_after(60), pytest.raises((ConversationDeleted, Unavailable)):
                await to_its_end(seen)

            # The old primary comes back, and the machines go to it: it is a log of its own.
            await do(pair.start, "primary")
            with psycopg.connect(pair.standby, autocommit=True) as admin:
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
                )
            with anyio.fail_after(60):
                while "more" in await messages(chat):
                    await anyio.lowlevel.checkpoint()
            assert await messages(chat) == ["kept", "lost"]
