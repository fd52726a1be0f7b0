"""Streams that answer one message, the same for all chat protocols."""

from __future__ import annotations

from typing import Protocol

from .exchanges import Broken, CutOff, Reply, ServerSent
from .history import Closed, Opened
from .rooms import Room, clean

__all__ = ["Folded", "read_stream"]


class Folded(Protocol):
    """An answer that is assembled from the events of a stream."""

    @property
    def end(self) -> str | None:
        """The word with which the stream has ended; None if it has not."""

    def take(self, sent: ServerSent) -> None:
        """Take in what comes next."""


async def read_stream(room: Room, reply: Reply, answer: Folded) -> bool:
    """Read a stream, and note how it ended; return True if it was not cut."""
    number = room.history.next_stream()
    room.history.add(Opened(stream=number, room=room.number))
    closed = Closed(stream=number, how="cut")
    try:
        async for sent in reply.events():
            answer.take(sent)
        closed = Closed(stream=number, how="ended", why=answer.end)
    except CutOff:
        return False
    except Broken as error:
        closed = Closed(stream=number, how="broken", why=clean(str(error)))
        return False
    finally:
        # Even if this is cancelled, which is a cut as well.
        room.history.add(closed)
    return True
