"""The runs of AG-UI that the chat messages of a conversation, and answers to calls, came with.

A run id comes with one chat message, or with the answers to the calls that wait. The first event
that carries these has an id that follows from the run id, and the log has each event id once. So of
two inputs with one run id, the second is refused when it is decided, whichever process each of them
reached.
"""

from __future__ import annotations

import hashlib

from ..events import Event, MessageQueuedEvent, UserMessageEvent

__all__ = ["RUN_ID", "run_event_id", "run_id_of"]

RUN_ID = "run_id"
"""The key, in a chat message's metadata, of the run that it came with."""


def run_event_id(run_id: str) -> str:
    """Return the id of the event that carries the input of a run into the log.

    It is less than all ids that are drawn, so these are still taken for new without a look into
    the log.
    """
    return f"0-{hashlib.sha256(run_id.encode('utf-8', 'surrogatepass')).hexdigest()}"


def run_id_of(event: Event) -> str | None:
    """Return the run that a chat message came with; None if it came in another way."""
    if not isinstance(event, UserMessageEvent | MessageQueuedEvent):
        return None
    run_id = event.metadata.get(RUN_ID)
    return run_id if isinstance(run_id, str) and run_id else None
