"""Fast time travel: the state at any seq, and the outline of a log, for logs of any length.

A state is folded from the nearest snapshot below it. The journal keeps one snapshot of a
conversation, near its end. This module keeps more in memory, evenly over the log, for the
conversations that were read last. It promises:

1. `at` returns what `Conversation.at` returns.
2. Work that was cancelled is not lost: the next request goes on from the snapshots it has made.
3. The snapshots of a conversation take at most `SNAPSHOT_BYTES_MAX`: beyond that, every second one
   is dropped, and new ones are kept at twice the distance.

Other tasks run after each slice of the work: one long log does not hold up the other requests.

A conversation that was deleted and begun again has a different log. So each request reads the event
at the snapshot's seq again, and drops everything if a different event is there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import anyio

from ..conversations.conversations import Conversations
from ..core.records import decode_record
from ..core.snapshots import SLICE_EVENTS
from ..core.state import Folded
from ..errors import ConversationDeleted, CorruptLog, InvalidInput
from ..events import LoggedEvent
from ..journal import READ_PAGE, Journal, Snapshot, StoredRecord
from ..owner.loading import in_slices
from .outline import Outline

__all__ = ["Damage", "Histories", "LogRows", "decoded"]

CONVERSATIONS_MAX = 4
EVERY = 256
SNAPSHOT_BYTES_MAX = 64 << 20


class Damage(NamedTuple):
    """A record that cannot be read."""

    seq: int
    found: str


class LogRows:
    """Iterate over the records after `after` up to a seq, in pages, and go on after damaged ones.

    It holds nothing open, so an iteration may end at any point. Raises `ConversationDeleted` if
    another log has begun under the name meanwhile.
    """

    def __init__(
        self,
        journal: Journal,
        conversation_id: str,
        *,
        after: int,
        upto: int,
        after_id: str | None = None,
    ) -> None:
        """`after_id` is the id of the event at `after`, if it is known."""
        self._journal = journal
        self._conversation_id = conversation_id
        self._after = after
        self._after_id = after_id or None
        self._upto = upto

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[StoredRecord] | Damage:
        limit = min(READ_PAGE, self._upto - self._after)
        while limit > 0:
            try:
                page = await self._page(limit)
            except CorruptLog as error:
                before = error.seq - self._after - 1
                if 0 < before < limit:
                    limit = before  # first the records before the damage
                elif limit > 1 and before:
                    limit = 1
                else:
                    self._after += 1
                    self._after_id = None
                    return Damage(self._after, error.found)
            else:
                if not page:
                    break
                self._after, self._after_id = page[-1].seq, page[-1].event_id
                return page
        raise StopAsyncIteration

    async def _page(self, limit: int) -> Sequence[StoredRecord]:
        """Read on, beginning with the event at `_after` once more."""
        again = 0 if self._after_id is None else 1
        page = await self._journal.read(
            self._conversation_id, after=self._after - again, limit=limit + again
        )
        if again and (not page or page[0].event_id != self._after_id):
            raise ConversationDeleted(self._conversation_id)
        return page[again:]


def decoded(conversation_id: str, record: StoredRecord) -> LoggedEvent | Damage:
    """Return the event of a record, or the damage if it cannot be read."""
    try:
        return decode_record(conversation_id, record)
    except CorruptLog as error:
        return Damage(error.seq, error.found)


@dataclass(slots=True)
class _Kept:
    """The snapshots, the newest state and the outline of one conversation."""

    every: int = EVERY
    snapshots: dict[int, tuple[Snapshot, str]] = field(default_factory=dict)
    """Snapshots by seq, in order, each with the id of the event at that seq."""
    bytes: int = 0
    asked_last: tuple[Folded, str] | None = None
    """The state that was asked for last, and the id of the event at its seq. Never changed."""
    outline: Outline = field(default_factory=Outline)

    def keep(self, snapshot: Snapshot, event_id: str) -> None:
        if snapshot.seq in self.snapshots:
            return  # another request has kept one meanwhile
        self.snapshots[snapshot.seq] = (snapshot, event_id)
        self.bytes += len(snapshot.payload)
        while self.bytes > SNAPSHOT_BYTES_MAX and len(self.snapshots) > 1:
            self.every *= 2
            for seq in [seq for seq in self.snapshots if seq % self.every]:
                self.bytes -= len(self.snapshots.pop(seq)[0].payload)


class Histories:
    """Snapshots and outlines of the conversations that were read last; for reading routes only."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def _of(self, conversation_id: str) -> _Kept:
        kept = self._kept.pop(conversation_id, None) or _Kept()
        self._kept[conversation_id] = kept
        while len(self._kept) > CONVERSATIONS_MAX:
            self._kept.popitem(last=False)
        return kept

    async def at(self, conversation_id: str, seq: int | None, *, parameter: str = "at") -> Folded:
        """Return the state at a seq, or at the end of the log. Raises as `Conversation.at`.

        `parameter`: the part of the address that gave the seq, for the error.
        """
        journal = self._conversations.journal
        head = (await journal.info(conversation_id)).head
        if seq is None:
            seq = head
        if not 0 <= seq <= head:
            said = f"seq {seq} of {conversation_id} is not in 0..{head}"
            rule = f"{parameter} must be 0 to {head}"
            raise InvalidInput(said, argument=parameter, rule=rule)
        kept = self._of(conversation_id)
        event_id = await self._event_id(conversation_id, seq)
        if kept.asked_last is not None:
            state, known_id = kept.asked_last
            if state.seq == seq and known_id == event_id:
                return state
        found = await self._from_snapshot(conversation_id, kept, seq)
        if found is None:
            # The journal's own snapshot is nearer, or the log holds events that admission refuses.
            found = await self._conversations[conversation_id].at(seq)
        kept.asked_last = (found, event_id)
        return found

    async def _event_id(self, conversation_id: str, seq: int) -> str:
        if seq == 0:
            return ""
        page = await self._conversations.journal.read(conversation_id, after=seq - 1, limit=1)
        return page[0].event_id if page else ""

    async def _from_snapshot(self, conversation_id: str, kept: _Kept, seq: int) -> Folded | None:
        """Return the state folded from the nearest snapshot kept here, and keep more on the way.

        Returns None if `Conversation.at` has to be used.
        """
        journal = self._conversations.journal
        own = max((at for at in kept.snapshots if at <= seq), default=0)
        snapshot, own_id = kept.snapshots.get(own, (None, ""))
        stored = await journal.read_snapshot(conversation_id)
        if stored is not None and own < stored.seq <= seq:
            return None
        state = Folded()
        if snapshot is not None:
            restored = None
            if await self._event_id(conversation_id, own) == own_id:
                restored = await in_slices(Folded.restoring(snapshot))
            if restored is None:
                # Another request may have found the same meanwhile, and begun anew.
                if self._kept.get(conversation_id) is kept:
                    del self._kept[conversation_id]
                return None
            state = restored
        state.watch()
        async for page in LogRows(journal, conversation_id, after=own, upto=seq, after_id=own_id):
            if isinstance(page, Damage):
                raise CorruptLog(conversation_id, page.seq, page.found)
            for record in page:
                state.fold(decode_record(conversation_id, record).event)
                if state.seq % SLICE_EVENTS == 0:
                    await anyio.lowlevel.checkpoint()
                if state.seq % kept.every == 0 and state.seq not in kept.snapshots:
                    if not state.end_watch():
                        return None
                    kept.keep(await in_slices(state.writing_snapshot()), record.event_id)
                    state.watch()
        return state if state.seq == seq and state.end_watch() else None

    async def outline(self, conversation_id: str) -> Outline:
        """Return the outline of the whole log. Raises `ConversationNotFound`."""
        journal = self._conversations.journal
        head = (await journal.info(conversation_id)).head
        kept = self._of(conversation_id)
        outline = kept.outline
        seq, event_id = outline.newest
        if outline.head > head or await self._event_id(conversation_id, seq) != event_id:
            outline = kept.outline = Outline()
        after = outline.head
        after_id = outline.newest[1] if outline.newest[0] == after else None
        async for page in LogRows(
            journal, conversation_id, after=after, upto=head, after_id=after_id
        ):
            for found in (page,) if isinstance(page, Damage) else page:
                # Another request may have folded this record into the same outline meanwhile.
                if found.seq == outline.head + 1:
                    self._fold(conversation_id, outline, found)
                    if found.seq % SLICE_EVENTS == 0:
                        await anyio.lowlevel.checkpoint()
        return outline

    @staticmethod
    def _fold(conversation_id: str, outline: Outline, found: StoredRecord | Damage) -> None:
        if isinstance(found, StoredRecord):
            read = decoded(conversation_id, found)
            if isinstance(read, LoggedEvent):
                outline.fold(read)
                return
            found = read
        outline.fold_damage(found.seq, found.found)
