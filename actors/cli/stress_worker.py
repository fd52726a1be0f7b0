"""The worker of a stress run: one process that holds all conversations and may be killed any time.

It is started as `python -m turnkeeper.actors.cli.stress_worker BACKEND`, and uses the same protocol
as `worker`. Its agent follows `_script`. If an error allows the caller to repeat the message, the
worker reports it and the client repeats; any other error ends the run.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random

import anyio

from turnkeeper.runtime import (
    MailboxFull,
    OutcomeUnknown,
    OwnershipLost,
    Ports,
    Unavailable,
)
from turnkeeper.runtime.lowlevel import Lateness

from ..agents.turn_context import TurnContext
from ..conversations.conversations import Conversations
from ..core.condensation import RollingCondenser
from ..core.limits import Limits
from ..errors import QueueFull, TurnInProgress
from ..journal import Journal
from ..journals.postgres.journal import PostgresJournal
from ..journals.sqlite.journal import SQLiteJournal
from ..recordings.audit import message_id
from ._protocol import (
    Accepted,
    Ended,
    GetViews,
    Order,
    Ready,
    Refused,
    Report,
    Send,
    StartStress,
    Unserved,
    Vitals,
)
from ._script import exchange
from .worker import perform, serve, views_of

__all__ = ["is_postgres", "main", "memory_max", "open_journal"]

_LEASE_S = 3.0
_VITALS_EVERY_S = 1.0
# Linux counts in KiB, macOS in bytes.
_MEMORY_UNIT = 1 if sys.platform == "darwin" else 1024


def memory_max() -> int:
    """Return the most memory that this process has had, in bytes.

    On Linux, `getrusage` counts the memory of the parent, too: this process had it between its fork
    and its exec.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MEMORY_UNIT


def is_postgres(db: str) -> bool:
    """True if this is the URL of a server instead of a path."""
    return db.startswith(("postgresql://", "postgres://"))


def open_journal(db: str, *, read_only: bool = False) -> Journal:
    """Return the journal at a path or at a server's URL, not entered yet."""
    if is_postgres(db):
        # A short lease: the next worker takes over when the killed worker's lease runs out.
        return PostgresJournal(db, read_only=read_only, lease_s=_LEASE_S)
    return SQLiteJournal(db, read_only=read_only)


class _Answerer:
    """The agent: it follows the script, and draws how long each step takes."""

    def __init__(self, start: StartStress, report: Callable[[Report], None], ports: Ports) -> None:
        self._start = start
        self._report = report
        self._ports = ports
        self._random = Random(start.seed)

    async def run(self, turn: TurnContext) -> None:
        # One message after another; steering messages join while earlier ones are answered.
        answered = 0
        while answered < len(turn.messages):
            _, _, number = (turn.messages[answered].message_id or "").rpartition("/")
            for step in exchange(self._start.seed, turn.conversation_id, int(number)).steps:
                await turn.begin_step()
                await self._pause()
                await perform(turn, step, self._pause, self._report)
            answered += 1

    async def _pause(self) -> None:
        await self._ports.sleep(self._random.uniform(0.0, self._start.pace_s))


class _Desk:
    """Carries out the orders, each in its own task, until they end."""

    def __init__(
        self, start: StartStress, conversations: Conversations, report: Callable[[Report], None]
    ) -> None:
        self._start = start
        self._conversations = conversations
        self._report = report
        # Counted here, since reading the length of ten thousand mailboxes would block the loop.
        self._waiting: Counter[str] = Counter()
        self._lateness = Lateness()

    async def work(self, orders_: AsyncIterator[Order]) -> None:
        async with anyio.create_task_group() as group:
            self._report(Ready())
            group.start_soon(self._lateness.watch)
            group.start_soon(self._keep_reporting)
            async for order in orders_:
                match order:
                    case Send():
                        group.start_soon(self._send, order)
                    case GetViews():
                        self._report_vitals()  # a short run ends before the next are due
                        self._report(await views_of(self._conversations, order.conversations))
                    case _:
                        raise ValueError(f"no order of a stress worker: {order.kind}")
            group.cancel_scope.cancel()

    async def _keep_reporting(self) -> None:
        while True:
            self._report_vitals()
            await anyio.sleep(_VITALS_EVERY_S)

    def _report_vitals(self) -> None:
        self._report(
            Vitals(
                waiting=self._waiting.total(),
                waiting_max=max(self._waiting.values(), default=0),
                memory_max=memory_max(),
                late=tuple(self._lateness.counts),
                late_s_max=self._lateness.longest_s,
            )
        )
        self._lateness.reset()

    @contextmanager
    def _counted(self, name: str) -> Iterator[None]:
        """While inside, a chat message waits in this conversation's mailbox."""
        self._waiting[name] += 1
        try:
            yield
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name]

    async def _send(self, order: Send) -> None:
        name, number = order.conversation, order.exchange
        try:
            with self._counted(name):
                turn = await self._conversations[name].send(
                    exchange(self._start.seed, name, number).content,
                    message_id=message_id(name, number),
                    on_overlap=order.on_overlap,
                )
            self._report(
                Accepted(
                    conversation=name,
                    exchange=number,
                    seq=turn.seq,
                    is_duplicate=turn.is_duplicate,
                )
            )
            end = await turn.end()
        except (TurnInProgress, QueueFull) as refused:
            self._report(Refused(conversation=name, exchange=number, why=str(refused)))
        except (Unavailable, OutcomeUnknown, OwnershipLost, MailboxFull) as error:
            self._report(
                Unserved(
                    conversation=name, exchange=number, error=type(error).__name__, why=str(error)
                )
            )
        else:
            self._report(Ended(conversation=name, exchange=number, outcome=end.outcome))


async def _main(
    report: Callable[[Report], None],
    lines: AsyncIterator[Order],
    journal: Callable[[str], Journal],
    limits: Limits,
) -> None:
    start = await anext(lines)
    if not isinstance(start, StartStress):
        raise TypeError(f"the first order is {start.kind}, not start_stress")
    async with Conversations(
        _Answerer(start, report, Ports()),
        journal=journal(start.db),
        condenser=RollingCondenser(max_size=start.view_events_max),
        limits=limits,
        # Turns that other programs left unfinished are not ended or answered here.
        recover="on_enter" if start.is_own_journal else "on_message",
    ) as conversations:
        await _Desk(start, conversations, report).work(lines)


def main(
    backend: str,
    journal: Callable[[str], Journal] = open_journal,
    limits: Limits = Limits(),
) -> None:
    """Run until the standard input ends; `journal` opens a journal, by its path or URL."""
    serve(partial(_main, journal=journal, limits=limits), backend)


if __name__ == "__main__":
    main(sys.argv[1])
