"""The runs of AG-UI that the chat messages of a conversation came with.

A run id comes with one chat message. To hold a new one against all that the log has, each request
would read the whole log; so what was read is kept, of the conversations that were asked for last,
and each request reads on from there.

A conversation that was deleted and begun again is another log. So each request reads the event that
was read last again, and begins anew if another one is there.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from ..conversations.conversation import Conversation
from ..errors import ConversationNotFound
from ..events import Event, LoggedEvent, MessageQueuedEvent, UserMessageEvent

__all__ = ["RUN_ID", "Runs", "run_id_of"]

RUN_ID = "run_id"
"""The name in a chat message's metadata of the run that it came with."""
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
    """The runs of one log, as far as it was read. One request at a time has it."""

    seq: int = 0
    event_id: str = ""
    messages: dict[str, str | None] = field(default_factory=dict)
    """The message that each run came with."""

    def fold(self, logged: LoggedEvent) -> bool:
        """Take in an event; return False if it shows that this is another log."""
        if logged.seq == self.seq:
            return logged.event.id == self.event_id
        self.seq, self.event_id = logged.seq, logged.event.id
        if (run_id := run_id_of(logged.event)) is not None:
            self.messages.setdefault(run_id, getattr(logged.event, "message_id", None))
        return True


class Runs:
    """The runs of the conversations that were asked for last."""

    def __init__(self) -> None:
        self._read: OrderedDict[str, _Read] = OrderedDict()

    async def message_of(self, conversation: Conversation, run_id: str) -> str | None:
        """Return the id of the chat message that a run came with; None if the log has no such."""
        name = conversation.conversation_id
        # Taken out: a request that comes meanwhile reads for itself.
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
        """Read the log on to its end; return False if it is another one by now."""
        is_empty = True
        async for logged in conversation.events(after=max(read.seq - 1, 0), live=False):
            is_empty = False
            if not read.fold(logged):
                return False
        return not (is_empty and read.seq)
