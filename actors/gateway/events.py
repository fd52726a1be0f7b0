"""The events of a conversation: as a stream that a client can resume, and as pages.

A stream continues after its cursor, without a gap or a repeat. Its last event, `end`, says why it
ends. If the event of a cursor is no longer at its seq, since the conversation was deleted and
perhaps begun again, the stream has `gone` and then `end`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from turnkeeper.runtime import TurnkeeperError

from ..errors import ConversationDeleted
from ..events import ConversationChangedEvent, LoggedEvent, TextDelta
from ..journal import READ_BYTES
from ..owner.live_answer import ends_answer
from .frames import Frames
from .names import Cursor
from .problems import OWN, ProblemRaised
from .replies import Feed, Write
from .service import ConversationCaller
from .wire import sized_json, sse

__all__ = ["feed_end", "feed_events", "page_of_events"]

RETRY_MS = 1_000
_HEARTBEAT = b":\n\n"

Item = LoggedEvent | TextDelta


def feed_events(caller: ConversationCaller, cursor: Cursor, *, pieces: bool, live: bool) -> Feed:
    """Return a feed that writes the events after a cursor to a stream."""

    async def feed(write: Write) -> None:
        await write(f"retry: {RETRY_MS}\n\n".encode())
        streams = caller.service.streams
        if streams.is_draining or streams.is_full:
            await _end(write, "draining" if streams.is_draining else "overloaded")
            return
        with streams.opened():
            try:
                why = await _write_events(caller, cursor, write, pieces=pieces, live=live)
            except ConversationDeleted:
                why = "conversation-deleted"
            except TurnkeeperError as error:
                why = caller.service.told(error)[0].name
            if why in ("gone", "conversation-deleted"):
                await write(sse({"cursor": str(cursor)}, event="gone"))
            await _end(write, why)

    return feed


def feed_end(why: str) -> Feed:
    """Return a feed whose stream ends at once, and says why."""

    async def feed(write: Write) -> None:
        await write(f"retry: {RETRY_MS}\n\n".encode())
        await _end(write, why)

    return feed


async def _end(write: Write, why: str) -> None:
    await write(sse({"why": why}, event="end"))


async def _write_events(
    caller: ConversationCaller, cursor: Cursor, write: Write, *, pieces: bool, live: bool
) -> str:
    """Write the events until the stream ends; return why it ends."""
    after = cursor.seq
    is_checked = cursor.event_id is None
    # A bare seq fits a conversation that begins, perhaps as another user's, after the request was
    # let in.
    may_be_anothers = is_checked
    if not is_checked:
        if await caller.find(cursor) is None:
            return "gone"
        # The reader below begins with the cursor's event and checks it again, so the log cannot be
        # replaced unnoticed between this check and the reading.
        after -= 1
    conversation = caller.conversation  # one handle for all frames: making it takes a while
    follower = conversation.follow(after=after) if live and pieces else None
    items: AsyncIterator[Item] | AsyncIterator[LoggedEvent]
    items = follower or conversation.events(after=after, live=live)
    streams, frames = caller.service.streams, caller.service.frames
    is_heard = True
    # Pieces that came before the cursor's event: at the client, it may have replaced them already.
    early: list[TextDelta] = []
    while True:
        try:
            item = await streams.until_beat(anext(items))
        except StopAsyncIteration:
            if not live:
                return "caught-up"
            return "draining" if streams.is_draining else "closing"
        if pieces and conversation.hears_pieces is not is_heard:
            is_heard = not is_heard
            await write(sse({"pieces": is_heard}, event="note"))
        if may_be_anothers and item is not None:
            await conversation.check_user()
            may_be_anothers = False
        if item is None:
            await write(_HEARTBEAT)
        elif isinstance(item, TextDelta) and not is_checked:
            early.append(item)
        elif isinstance(item, TextDelta):
            await write(frames.of_piece(item))
            await streams.gather_pieces()
        elif is_checked:
            if isinstance(item.event, ConversationChangedEvent) and item.event.owner is not None:
                await conversation.check_user()
            if is_heard and follower is not None and follower.is_short_of(item):
                is_heard = False
                await write(sse({"pieces": is_heard}, event="note"))
            frame = frames.of_event(item, caller.rename)
            del item  # not held while the client reads, nor until the next event
            await write(frame)
            del frame
        else:
            if not cursor.fits(item):
                return "gone"
            is_checked = True
            await _write_early(early, item, write, frames)
            early.clear()


async def _write_early(
    early: Sequence[TextDelta], at: LoggedEvent, write: Write, frames: Frames
) -> None:
    """Write the pieces that came before the cursor's event, except those that it replaces."""
    replaced = at.event.turn_id if ends_answer(at) else None
    for piece in early:
        if piece.turn_id != replaced:
            await write(frames.of_piece(piece))


async def page_of_events(
    caller: ConversationCaller, cursor: Cursor, limit: int
) -> dict[str, object]:
    """Return the events after a cursor, and the cursor of the next page if there are more.

    The page ends with the event with which its events have `READ_BYTES`, at least with the first.
    """
    after = cursor.seq
    if cursor.event_id is not None:
        after -= 1
    found: list[dict[str, object]] = []
    is_checked = cursor.event_id is None
    newest = cursor
    has_more = False
    held = 0
    async for logged in caller.conversation.events(after=after, live=False):
        if not is_checked:
            if not cursor.fits(logged):
                raise ProblemRaised(OWN["gone"])
            is_checked = True
        elif len(found) == limit or held >= READ_BYTES:
            has_more = True
            break
        else:
            value, size = sized_json(logged, caller.rename)
            found.append(value)
            held += size
            newest = Cursor.of(logged)
    if not is_checked:
        raise ProblemRaised(OWN["gone"])
    return {"events": found, "cursor": str(newest), "has_more": has_more}
