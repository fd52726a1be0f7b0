"""The runs of AG-UI that the chat messages of a conversation came with.

A run id comes with one chat message. To check that a run id is new, a request would have to read
the whole log. So the runs found so far are kept, for the conversations that were used last, and
each request reads on from there.

A conversation that was deleted and begun again has a different log. So each request reads the last
event again, and begins anew if a different event is there.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ..conversations.conversation import Conversation
from ..errors import ConversationNotFound
from ..events import Event, LoggedEvent, MessageQueuedEvent, UserMessageEvent

__all__ = ["RUN_ID", "Runs", "run_id_of"]

RUN_ID = "run_id"
"""The key, in a chat message's metadata, of the run that it came with."""
CONVERSATIONS_MAX = 64
RUNS_MAX = 4_096
"""A conversation with more runs is read from its beginning by each request."""


def run_id_of(event: Event) -> str | None:
    """Return the run that a chat message came with; None if it came in another way."""
    if not isinstance(event, UserMessageEvent | MessageQueuedEvent):
        return None
    run_id = event.metadata.get(RUN_ID)
    return run_id if isinstance(run_id, str) and run_id else None


@dataclass(slots=True)
class _Read:
    """The runs of one log, as far as it was read. Only one request at a time uses it."""

    seq: int = 0
    event_id: str = ""
    messages: dict[str, str | None] = field(default_factory=dict)
    """The message that each run came with."""

    def fold(self, logged: LoggedEvent) -> bool:
        """Fold an event; return False if it shows that this is a different log."""
        if logged.seq == self.seq:
            return logged.event.id == self.event_id
        self.seq, self.event_id = logged.seq, logged.event.id
        if (run_id := run_id_of(logged.event)) is not None:
            self.messages.setdefault(run_id, getattr(logged.event, "message_id", None))
        return True


class Runs:
    """The runs of the conversations that were used last."""

    def __init__(self) -> None:
        self._read: OrderedDict[str, _Read] = OrderedDict()

    async def message_of(self, conversation: Conversation, run_id: str) -> str | None:
        """Return the id of the chat message that a run came with; None if the log has none."""
        name = conversation.conversation_id
        # Taken out of the dict: a request that comes meanwhile reads the log itself.
        read = self._read.pop(name, None) or _Read()
        try:
            while not await self._is_read_on(conversation, read):
                read = _Read()
        except ConversationNotFound:
            return None
        if len(read.messages) <= RUNS_MAX:
            self._read[name] = read
        if len(self._read) > CONVERSATIONS_MAX:
            self._read.popitem(last=False)
        return read.messages.get(run_id)

    @staticmethod
    async def _is_read_on(conversation: Conversation, read: _Read) -> bool:
        """Read the rest of the log; return False if it is a different log by now."""
        is_empty = True
        async for logged in conversation.events(after=max(read.seq - 1, 0), live=False):
            is_empty = False
            if not read.fold(logged):
                return False
        return not (is_empty and read.seq)
