"""The rows of a list as they change, as a stream.

A stream begins with the newest rows of the list, and then has each of them that changes, whichever
process wrote it, and each that comes or goes. It looks at these rows every while, which costs the
journal one page, whatever is written meanwhile. A client that comes back begins anew. A
conversation that is not among them is seen as soon as it is used again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from turnkeeper.runtime import TurnkeeperError

from .problems import problem_of
from .replies import Feed, Write
from .service import Service
from .wire import Json, sse

__all__ = ["feed_changes"]

LOOKS_PER_S_MAX = 100.0
"""How often all streams of a node together look at the journal, or about so."""

Look = Callable[[], Awaitable[list[Json]]]
"""Returns the rows that the list has now."""


def feed_changes(service: Service, look: Look, *, live: bool) -> Feed:
    """Return what writes the rows of a list to a stream, and those that change from then on."""

    async def feed(write: Write) -> None:
        streams = service.streams
        why = "draining" if streams.is_draining else "overloaded" if streams.is_full else ""
        if not why:
            with streams.opened(), streams.changes.opened():
                try:
                    why = await _write_changes(service, look, write, live=live)
                except TurnkeeperError as error:
                    why = problem_of(error)[0].name
        await write(sse({"why": why}, event="end"))

    return feed


async def _write_changes(service: Service, look: Look, write: Write, *, live: bool) -> str:
    """Write the changes until there can be no more; return why."""
    limits, streams, ports = service.limits, service.streams, service.ports
    shown: dict[str, Json] | None = None
    beat_at = ports.monotonic() + limits.heartbeat_s
    while service.conversations.is_open and not streams.is_draining:
        rows = {str(row["id"]): row for row in await look()}
        await _write_difference(shown or {}, rows, write)
        if shown is None:
            await write(sse({"count": len(rows)}, event="caught-up"))
        if not live:
            return "caught-up"
        shown = rows
        await ports.sleep(max(limits.changes_every_s, streams.changes.count / LOOKS_PER_S_MAX))
        if ports.monotonic() >= beat_at:
            beat_at = ports.monotonic() + limits.heartbeat_s
            await write(b":\n\n")
    return "draining" if streams.is_draining else "closing"


async def _write_difference(
    shown: Mapping[str, Json], rows: Mapping[str, Json], write: Write
) -> None:
    for name, row in rows.items():
        if shown.get(name) != row:
            await write(sse(row, event="row"))
    for name in shown:
        if name not in rows:
            await write(sse({"id": name}, event="gone"))
