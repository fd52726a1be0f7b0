"""The worker of a stress run: one process that holds all conversations and may be killed any time.

Started as `python -m turnkeeper.actors.cli.stress_worker BACKEND`; it speaks as `worker` does. Its
agent answers as `_script` says. An error that its caller may answer by sending again is reported as
such, and the client does; any other ends the run.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from random import Random

import anyio

from turnkeeper.runtime import (
    MailboxFull,
    OutcomeUnknown,
    OwnershipLost,
    Ports,
    Runtime,
    Unavailable,
)

from .._postgres_journal import PostgresJournal
from .._sqlite_journal import SQLiteJournal
from ..agents import TurnContext
from ..audit import message_id
from ..condensers import RollingCondenser
from ..conversations import Conversations
from ..errors import QueueFull, TurnInProgress
from ..journal import Journal
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

__all__ = ["is_postgres", "main", "open_journal"]

_LEASE_S = 3.0
_VITALS_EVERY_S = 1.0
# Linux counts in KiB, macOS in bytes.
_MEMORY_UNIT = 1 if sys.platform == "darwin" else 1024


def is_postgres(db: str) -> bool:
    """Whether this names a server, and not a file."""
    return db.startswith(("postgresql://", "postgres://"))


def open_journal(db: str, *, read_only: bool = False) -> Journal:
    """The journal at a path or at a server's URL; not entered yet."""
    if is_postgres(db):
        # A killed worker is taken over when its lease is out, so a short one.
        return PostgresJournal(db, read_only=read_only, lease_s=_LEASE_S)
    return SQLiteJournal(db, read_only=read_only)


class _Answerer:
    """The agent: what it does is in the script; how long it takes is drawn."""

    def __init__(self, start: StartStress, report: Callable[[Report], None], ports: Ports) -> None:
        self._start = start
        self._report = report
        self._ports = ports
        self._random = Random(start.seed)

    async def run(self, turn: TurnContext) -> None:
        # Each message in turn; those who steer join while the ones before are answered.
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
    """Takes the orders, each as a task of its own, until they end."""

    def __init__(
        self, start: StartStress, conversations: Conversations, report: Callable[[Report], None]
    ) -> None:
        self._start = start
        self._conversations = conversations
        self._report = report

    async def work(self, orders_: AsyncIterator[Order], tell_vitals: Callable[[], None]) -> None:
        async def keep_telling() -> None:
            while True:
                tell_vitals()
                await anyio.sleep(_VITALS_EVERY_S)

        async with anyio.create_task_group() as group:
            self._report(Ready())
            group.start_soon(keep_telling)
            async for order in orders_:
                match order:
                    case Send():
                        group.start_soon(self._send, order)
                    case GetViews():
                        self._report(await views_of(self._conversations, order.conversations))
                    case _:
                        raise ValueError(f"no order of a stress worker: {order.kind}")
            group.cancel_scope.cancel()

    async def _send(self, order: Send) -> None:
        name, number = order.conversation, order.exchange
        try:
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
    report: Callable[[Report], None], lines: AsyncIterator[Order], journal: Callable[[str], Journal]
) -> None:
    start = await anext(lines)
    if not isinstance(start, StartStress):
        raise TypeError(f"the first order is {start.kind}, not start_stress")
    async with Runtime() as runtime:

        def tell_vitals() -> None:
            depths = [actor.mailbox_depth for actor in runtime.tree().walk()]
            report(
                Vitals(
                    waiting=sum(depths),
                    waiting_max=max(depths, default=0),
                    active=len(depths),
                    memory_max=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MEMORY_UNIT,
                )
            )

        async with Conversations(
            _Answerer(start, report, runtime.ports),
            journal=journal(start.db),
            runtime=runtime,
            condenser=RollingCondenser(max_size=start.view_events_max),
            # What others left unfinished is not ours to end, and not ours to answer.
            recover="on_enter" if start.is_own_journal else "on_message",
        ) as conversations:
            await _Desk(start, conversations, report).work(lines, tell_vitals)


def main(backend: str, journal: Callable[[str], Journal] = open_journal) -> None:
    """Run until the standard input ends; `journal` opens a journal, by its path or URL."""
    serve(partial(_main, journal=journal), backend)


if __name__ == "__main__":
    main(sys.argv[1])
