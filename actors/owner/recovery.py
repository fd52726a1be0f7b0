"""Recovery: opens unfinished conversations that no living process works on.

A conversation is unfinished if it has a turn to end or queued chat messages, and does not wait for
a person's decision. It is left so by a process that was killed or that stalled for longer than its
lease, and by an owner here that failed too often. Opening such a conversation recovers it.
`Conversations` looks for them when it is entered, and `RecoveryActor` from then on, so that queued
messages are answered even if no new one comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from turnkeeper.runtime import Actor, Message, OwnershipLost, Region, TurnkeeperError
from turnkeeper.runtime.lowlevel import task_group

from ..core.commands import Command, GetView, Query
from ..journal import Journal
from ..log_lines import log_unavailable

__all__ = ["Look", "Recovery", "RecoveryActor"]

_LOOKS_SKIPPED_MAX = 64
_SHARE_MAX = 0.05
"""The share of the time that looks may take. A journal without an index of unfinished conversations
reads the row of every conversation at each look."""
_PAUSES_MAX = 4
"""The longest pause, as a multiple of the usual one: a look also takes long if it has to wait
for the database."""


@dataclass(frozen=True, slots=True)
class Look(Message[None]):
    """Look for unfinished conversations now."""


@dataclass(slots=True)
class _Backoff:
    """Counts the looks that skip a conversation which could not be opened."""

    skipped_next: int = 1
    skips: int = 1


class Recovery:
    """Finds and opens unfinished conversations; one for each `Conversations`."""

    def __init__(
        self, journal: Journal, region: Region[Command | Query], *, at_once_max: int
    ) -> None:
        self._journal = journal
        self._region = region
        self._at_once_max = at_once_max
        self._failed: dict[str, _Backoff] = {}

    async def find(self) -> set[str]:
        """Return the unfinished conversations that no living process owns."""
        found = {info.conversation_id for info in await self._journal.find_abandoned()}
        for conversation_id in self._failed.keys() - found:
            del self._failed[conversation_id]
        return found

    async def open(self, found: set[str]) -> None:
        """Open the found conversations that are not active here.

        A conversation that cannot be opened stays as it is in the journal, and its senders get the
        error. Later looks try again to open it, less and less often.
        """
        opened = [
            conversation_id
            for conversation_id in sorted(found.difference(self._region.active))
            if self._count_look(conversation_id)
        ]
        if not opened:  # as most looks find
            await anyio.lowlevel.checkpoint()
            return
        limit = anyio.Semaphore(self._at_once_max)
        async with task_group() as group:
            for conversation_id in opened:
                await limit.acquire()
                group.start_soon(self._open, conversation_id, limit)

    def _count_look(self, conversation_id: str) -> bool:
        """Count a look at this conversation; return True if it is to be opened now."""
        backoff = self._failed.get(conversation_id)
        if backoff is None or backoff.skips == 0:
            return True
        backoff.skips -= 1
        return False

    async def _open(self, conversation_id: str, limit: anyio.Semaphore) -> None:
        try:
            await self._region[conversation_id].ask(GetView())
        except OwnershipLost:
            pass  # a rival was faster, and recovers it
        except TurnkeeperError as error:
            backoff = self._failed.setdefault(conversation_id, _Backoff())
            backoff.skips = backoff.skipped_next
            backoff.skipped_next = min(2 * backoff.skipped_next, _LOOKS_SKIPPED_MAX)
            log_unavailable("recovery failed", error, conversation=conversation_id)
        else:
            self._failed.pop(conversation_id, None)
        finally:
            limit.release()


class RecoveryActor(Actor[Look]):
    """Looks for unfinished conversations about every `every_s` seconds, at random intervals."""

    def __init__(self, recovery: Recovery, *, every_s: float) -> None:
        self._recovery = recovery
        self._every_s = every_s

    async def on_start(self) -> None:
        self._wait(0.0)

    async def receive(self, message: Look) -> None:
        del message
        self.context.start_effect(self._look, name="look")

    async def _look(self) -> None:
        ports = self.context.ports
        began_at = ports.loop_time()
        took_s = 0.0  # of one that fails: it may have waited for a database that was away
        try:
            found = await self._recovery.find()
            # Opening them does not count: that is work to be done, however long it takes.
            took_s = ports.loop_time() - began_at
            await self._recovery.open(found)
        except TurnkeeperError as error:
            log_unavailable("search for unfinished conversations failed", error)
        self._wait(took_s)

    def _wait(self, took_s: float) -> None:
        # Random, so that the processes that share a journal do not all look at the same time and
        # claim the same conversations.
        share = self.context.ports.random.uniform(0.75, 1.25)
        rest_s = min(took_s / _SHARE_MAX, _PAUSES_MAX * self._every_s)
        self.context.timers.once(max(share * self._every_s, rest_s), Look(), key="look")
