"""The turn table: which turn runs, which chat messages wait, which message ids are known.

A fold of the log, like the view: pure, synchronous, advanced by one event at a time, and only by
the owner of the conversation. It holds the newest `KNOWN_MESSAGES_MAX` message ids; older ones
are in the log, where the owner looks them up before it decides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .events import (
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    Event,
    ForkedFromEvent,
    ImageContent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    PausedEvent,
    ResumedEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
)

__all__ = ["KNOWN_MESSAGES_MAX", "KnownMessage", "RunningTurn", "TurnTable", "content_digest"]

KNOWN_MESSAGES_MAX = 1024


def content_digest(content: str, images: Sequence[ImageContent]) -> str:
    """What makes two chat messages under one id the same message; equal in every process."""
    text = json.dumps([content, [image.url for image in images]])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# The kinds that `fold` has a case for. Most events of a log are of another, and a class that does
# not match costs ten times what a look at the kind does.
_KINDS = frozenset(
    (
        "user_message",
        "message_queued",
        "message_withdrawn",
        "turn_started",
        "turn_ended",
        "confirmation_requested",
        "confirmation_given",
        "paused",
        "resumed",
        "forked_from",
    )
)


@dataclass(frozen=True, slots=True)
class KnownMessage:
    """A chat message that is in the log, or waits there: where, and of which turn."""

    message_id: str
    seq: int
    """Of the first event that carries the message id."""
    turn_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class RunningTurn:
    """The turn that has started and not ended, with its chat messages so far."""

    turn_id: str
    messages: tuple[UserMessageEvent, ...] = ()


@dataclass(slots=True)
class TurnTable:
    """The fold. Readers see `running` and `queued`; only the owner calls `fold`."""

    running: RunningTurn | None = None
    is_paused: bool = False
    """No step begins until it is resumed; a turn that ends, by an interrupt say, ends this too."""
    awaiting: tuple[str, ...] = ()
    """The calls of the running turn that wait for a confirmation; none of them has started."""
    confirmed: tuple[str, ...] = ()
    """The calls that were confirmed during a pause; none of them has started."""
    _queued: dict[str, MessageQueuedEvent] = field(default_factory=dict)
    _known: dict[str, KnownMessage] = field(default_factory=dict)
    _forgotten_max: str = ""

    @property
    def queued(self) -> Mapping[str, MessageQueuedEvent]:
        """The chat messages that wait, by message id, in the order of their turns."""
        return self._queued

    @property
    def is_unfinished(self) -> bool:
        """Whether a crash here would leave something for recovery to end or to start."""
        return self.running is not None or bool(self._queued)

    @property
    def waits_for(self) -> Literal["resume", "confirmation"] | None:
        """What somebody has to say before anything goes on here."""
        if self.is_paused:
            return "resume"
        return "confirmation" if self.awaiting else None

    def find(self, message_id: str) -> KnownMessage | None:
        """The known chat message of this id, if it is among the newest."""
        return self._known.get(message_id)

    def may_have_forgotten(self, message_id: str) -> bool:
        """Whether the log may have this message id though `find` does not.

        Forgotten ids are not above the largest of them; those made here are time-ordered, so a
        new one is.
        """
        return bool(self._forgotten_max) and message_id <= self._forgotten_max

    def fold(self, event: Event, seq: int) -> None:
        """Advance by one event of the log."""
        if event.kind not in _KINDS:
            return
        match event:
            case UserMessageEvent():
                if event.message_id is not None:
                    self._queued.pop(event.message_id, None)
                    self._know(event.message_id, event, seq)
                running = self.running
                if running is None or running.turn_id != event.turn_id:
                    return
                if not event.is_reminder:
                    self.running = RunningTurn(running.turn_id, (*running.messages, event))
            case MessageQueuedEvent():
                self._queued[event.message_id] = event
                self._know(event.message_id, event, seq)
                if event.queued_again:
                    # It was sent before those that have come since, and goes before them.
                    first = sorted(self._queued, key=lambda known: self._known[known].seq)
                    self._queued = {known: self._queued[known] for known in first}
            case MessageWithdrawnEvent():
                self._queued.pop(event.message_id, None)
            case TurnStartedEvent(turn_id=str(turn_id)):
                self.running = RunningTurn(turn_id)
            case TurnEndedEvent():
                self.running = None
                self.is_paused, self.awaiting, self.confirmed = False, (), ()
            case ForkedFromEvent():
                self._queued.clear()  # what waited stays with the conversation it was sent to
            case _:
                self._fold_hold(event)

    def _fold_hold(self, event: Event) -> None:
        match event:
            case ConfirmationRequestedEvent(tool_call_ids=calls):
                self.awaiting = calls
            case ConfirmationGivenEvent(confirmed=confirmed):
                self.confirmed = self.awaiting if confirmed and self.is_paused else ()
                self.awaiting = ()
            case PausedEvent():
                self.is_paused = True
            case ResumedEvent():
                self.is_paused, self.confirmed = False, ()
            case _:
                pass

    def _know(
        self, message_id: str, event: UserMessageEvent | MessageQueuedEvent, seq: int
    ) -> None:
        first = self._known.get(message_id)
        if first is not None:
            seq = first.seq
        self._known[message_id] = KnownMessage(
            message_id, seq, event.turn_id or "", content_digest(event.content, event.images)
        )
        if len(self._known) > KNOWN_MESSAGES_MAX:
            # A message that waits, or may wait again, keeps its entry: what is yet to come of it
            # must find the seq of the first. This one may be just about to join a turn.
            running = self.running.messages if self.running is not None else ()
            kept = {message_id, *(message.message_id for message in running)}
            oldest = next(
                (known for known in self._known if not (known in self._queued or known in kept)),
                None,
            )
            if oldest is not None:
                del self._known[oldest]
                self._forgotten_max = max(self._forgotten_max, oldest)
