"""The rows of a list as they change, as a stream.

A stream begins with the newest rows of the list. Then it has each row that changes, comes or goes,
whichever process wrote it. It reads these rows at intervals, which costs the journal one page each
time, however much is written meanwhile. A client that reconnects begins anew. A conversation that
is not among the newest appears as soon as it is used again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from turnkeeper.runtime import TurnkeeperError

from .replies import Feed, Write
from .service import Service
from .wire import Json, sse

__all__ = ["feed_changes"]

LOOKS_PER_S_MAX = 100.0
"""About how often per second all streams of a node together read the journal."""

Look = Callable[[], Awaitable[list[Json]]]
"""Returns the rows that the list has now."""


def feed_changes(service: Service, look: Look, *, live: bool) -> Feed:
    """Return a feed that writes the rows of a list to a stream, and then those that change."""

    async def feed(write: Write) -> None:
        streams = service.streams
        why = "draining" if streams.is_draining else "overloaded" if streams.is_full else ""
        if not why:
            with streams.opened(), streams.changes.opened():
                try:
                    why = await _write_changes(service, look, write, live=live)
                except TurnkeeperError as error:
                    why = service.told(error)[0].name
        await write(sse({"why": why}, event="end"))

    return feed


async def _write_changes(service: Service, look: Look, write: Write, *, live: bool) -> str:
    """Write the changes until the stream has to end; return why it ends."""
    limits, streams, ports = service.limits, service.streams, service.ports
    shown: dict[str, Json] | None = None
    beat_at = ports.monotonic() + limits.heartbeat_s

    def goes_on() -> bool:
        return service.conversations.is_open and not streams.is_draining

    while goes_on():
        rows = {str(row["id"]): row for row in await look()}
        await _write_difference(shown or {}, rows, write)
        if shown is None:
            await write(sse({"count": len(rows)}, event="caught-up"))
        if not live:
            return "caught-up"
        shown = rows
        pause_s = max(limits.changes_every_s, streams.changes.count / LOOKS_PER_S_MAX)
        look_at = ports.monotonic() + pause_s
        while pause_s > 0 and goes_on():
            await ports.sleep(min(pause_s, limits.heartbeat_s))
            if ports.monotonic() >= beat_at:
                beat_at = ports.monotonic() + limits.heartbeat_s
                await write(b":\n\n")
            pause_s = look_at - ports.monotonic()
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
