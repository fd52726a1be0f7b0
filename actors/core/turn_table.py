"""The turn table: the running turn, the chat messages that wait, the message ids that are known.

It is a fold of the log, like the view: pure, synchronous, advanced by one event at a time, and only
by the owner of the conversation. It holds the newest message ids, up to a bound; the owner looks
older ones up in the log before it decides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, Self

from ..events import (
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    Event,
    FileContent,
    ImageContent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    PausedEvent,
    ResumedEvent,
    UserMessageEvent,
)
from ..values.tables import NO_TABLE, end_alike

__all__ = [
    "TURN_KINDS",
    "DigestedMessage",
    "KnownMessage",
    "RunningTurn",
    "TurnTable",
    "message_digest",
]


def _rank(message_id: str) -> tuple[int, str]:
    """Order ids by their length first: "m9" comes before "m10", and both before an id made here.

    So ids that an application counts up are known to be new, and its short ids, such as those of a
    log from another program, make no id look old that is made here.
    """
    return len(message_id), message_id


class DigestedMessage(Protocol):
    """The parts of a chat message that its digest covers, as it is sent and in the log."""

    @property
    def content(self) -> str: ...
    @property
    def images(self) -> Sequence[ImageContent]: ...
    @property
    def replaces(self) -> str | None: ...
    @property
    def author(self) -> str | None: ...
    @property
    def files(self) -> Sequence[FileContent]: ...


def message_digest(message: DigestedMessage) -> str:
    """Return a digest of a chat message; the same in every process.

    Two messages under one id are the same message if their digests are equal. Their metadata does
    not count.
    """
    has_more = message.images or message.files
    if not has_more and message.replaces is None and message.author is None:
        # Nearly all are a text alone. As JSON, it would take three times as long.
        return _digest(message.content, b"text")
    return _digest(json.dumps(_digested_parts(message)))


def _digest(text: str, kind: bytes = b"") -> str:
    """Return a digest of the text. Those of different kinds are different."""
    return hashlib.blake2b(text.encode(), digest_size=16, person=kind).hexdigest()


def _digested_parts(message: DigestedMessage) -> Sequence[object]:
    parts: list[object] = [message.content, [image.url for image in message.images]]
    # Nothing is added for what a message does not have, so that a new field changes no digest.
    if message.replaces is not None:
        parts.append(message.replaces)
    if message.author is not None:
        parts.append({"author": message.author})
    if message.files:
        parts.append({"files": [_file_digest(file) for file in message.files]})
    return parts


def _file_digest(file: FileContent) -> Sequence[str | None]:
    data = None if file.data is None else _digest(file.data)
    return [file.name, file.media_type, data, file.url]


TURN_KINDS = frozenset(
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
"""The kinds that `TurnTable.fold` has a case for. Most events of a log are of other kinds."""


class KnownMessage(NamedTuple):
    """A chat message that is in the log, with its place and its turn."""

    message_id: str
    seq: int
    """The seq of the first event that carries the message id."""
    turn_id: str
    digest: str
    place: int
    """The seq that orders it among those that wait: its own, or that of the message it replaces."""

    @classmethod
    def of(cls, message_id: str, seq: int, event: UserMessageEvent | MessageQueuedEvent) -> Self:
        """Return the message of this event, which is the first that carries its id, at `seq`."""
        digest = message_digest(event)
        place = event.place if isinstance(event, MessageQueuedEvent) else None
        return cls(message_id, seq, event.turn_id or "", digest, seq if place is None else place)


@dataclass(frozen=True, slots=True)
class RunningTurn:
    """The turn that has started and not ended, with its chat messages so far."""

    turn_id: str
    messages: tuple[UserMessageEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """The answer to a call that waited for a confirmation."""

    seq: int
    """The seq of the event that answers it, and all calls that waited with it."""
    is_confirmed: bool


@dataclass(slots=True)
class TurnTable:
    """The fold. Readers see `running` and `queued`; only the owner calls `fold`."""

    running: RunningTurn | None = None
    is_paused: bool = False
    """True if no step begins until `resume`; the end of the turn, as by an interrupt, ends it too.
    """
    awaiting: tuple[str, ...] = ()
    """The calls of the running turn that wait for a confirmation; none of them has started."""
    confirmed: tuple[str, ...] = ()
    """The calls that were confirmed during a pause; none of them has started."""
    answers: dict[str, AnsweredCall] = field(default_factory=lambda: NO_TABLE)
    """The newest calls that waited for a confirmation and got it, or were rejected."""
    _queued: dict[str, MessageQueuedEvent] = field(default_factory=lambda: NO_TABLE)
    _known: dict[str, tuple[int, str, str, int]] = field(default_factory=lambda: NO_TABLE)
    """The newest messages: the fields of each `KnownMessage` behind its id. Plain tuples, since a
    snapshot may hold a thousand, and pydantic makes them in half the time."""
    _forgotten_max: str = ""
    """The highest id that was let go, in the order of `_rank`."""

    @property
    def queued(self) -> Mapping[str, MessageQueuedEvent]:
        """The chat messages that wait, by message id, in the order of their turns."""
        return self._queued

    @property
    def has_open_turns(self) -> bool:
        """True if a turn runs or a chat message waits, even for a person's decision."""
        return self.running is not None or bool(self._queued)

    @property
    def has_work(self) -> bool:
        """True if the owner has work that does not wait for a person's decision."""
        # Read twice in each commit, most of them without a turn.
        if self.running is None and not self._queued:
            return False
        return self.waits_for is None

    @property
    def waits_for(self) -> Literal["resume", "confirmation"] | None:
        """The user's decision that has to come before the turn goes on."""
        if self.is_paused:
            return "resume"
        return "confirmation" if self.awaiting else None

    def find(self, message_id: str) -> KnownMessage | None:
        """Return the chat message of this id, if it is among the newest."""
        known = self._known.get(message_id)
        return None if known is None else KnownMessage(message_id, *known)

    def find_answers(self, tool_call_ids: Collection[str]) -> Mapping[str, bool]:
        """Return the calls that were answered together with these, and if they were confirmed."""
        seqs = {a.seq for call, a in self.answers.items() if call in tool_call_ids}
        return {call: a.is_confirmed for call, a in self.answers.items() if {a.seq} == seqs}

    def may_know(self, message_id: str) -> bool:
        """True if the log may have this message id."""
        return message_id in self._known or self.may_have_forgotten(message_id)

    def may_have_forgotten(self, message_id: str) -> bool:
        """True if the log may have this message id although `find` does not.

        No id that was let go ranks above `_forgotten_max`. The ids made here are time-ordered and
        all of one length, so a new one ranks above it.
        """
        return bool(self._forgotten_max) and _rank(message_id) <= _rank(self._forgotten_max)

    def agrees_with(self, other: TurnTable) -> bool:
        """True if both may be of one log, each with a bound of its own on the ids that it holds."""
        mine, its = (
            replace(table, answers=NO_TABLE, _known=NO_TABLE, _forgotten_max="")
            for table in (self, other)
        )
        return (
            mine == its
            and end_alike([*self.answers.items()], [*other.answers.items()])
            and self._lacks_only_forgotten(other)
            and other._lacks_only_forgotten(self)
        )

    def _lacks_only_forgotten(self, other: TurnTable) -> bool:
        """True if this table holds each message of the other, or may have let it go."""
        return all(
            self._known[known] == of_other
            if known in self._known
            else self.may_have_forgotten(known)
            for known, of_other in other._known.items()
        )

    def fold(self, event: Event, seq: int, *, known_max: int) -> None:
        """Advance by one event of the log; hold the newest `known_max` message ids, and answers."""
        # Matched by kind: a pydantic class that does not match costs ten times as much.
        match event.kind:
            case "user_message":
                assert isinstance(event, UserMessageEvent), event.kind
                if (message_id := event.message_id) is not None:
                    self._queued.pop(message_id, None)
                    self._know(message_id, event, seq, known_max)
                running = self.running
                if running is None or running.turn_id != event.turn_id:
                    return
                if not event.is_reminder:
                    self.running = RunningTurn(running.turn_id, (*running.messages, event))
            case "turn_started":
                if event.turn_id is not None:
                    self.running = RunningTurn(event.turn_id)
            case "turn_ended":
                self.running = None
                self.is_paused, self.awaiting, self.confirmed = False, (), ()
            case "message_queued":
                assert isinstance(event, MessageQueuedEvent), event.kind
                if self._queued is NO_TABLE:
                    self._queued = {}
                self._queued[event.message_id] = event
                self._know(event.message_id, event, seq, known_max)
                if event.queued_again or event.place is not None:
                    # It goes before the messages that came after it was first sent, or after the
                    # message that it replaces.
                    in_order = sorted(self._queued, key=self._place_of)
                    self._queued = {known: self._queued[known] for known in in_order}
            case "message_withdrawn":
                assert isinstance(event, MessageWithdrawnEvent), event.kind
                self._queued.pop(event.message_id, None)
            case "forked_from":
                self._queued.clear()  # queued messages stay with the conversation they were sent to
            case _:
                self._fold_hold(event, seq, known_max)

    def _fold_hold(self, event: Event, seq: int, known_max: int) -> None:
        match event:
            case ConfirmationRequestedEvent(tool_call_ids=calls):
                self.awaiting = calls
            case ConfirmationGivenEvent(rejected=rejected):
                if self.answers is NO_TABLE:
                    self.answers = {}
                for call in self.awaiting:
                    is_confirmed = event.confirmed and call not in rejected
                    self.answers[call] = AnsweredCall(seq, is_confirmed)
                    if len(self.answers) > known_max:
                        del self.answers[next(iter(self.answers))]
                if event.confirmed and self.is_paused:
                    self.confirmed = tuple(c for c in self.awaiting if c not in rejected)
                self.awaiting = ()
            case PausedEvent():
                self.is_paused = True
            case ResumedEvent():
                self.is_paused, self.confirmed = False, ()
            case _:
                pass

    def _place_of(self, message_id: str) -> int:
        _, _, _, place = self._known[message_id]
        return place

    def _know(
        self,
        message_id: str,
        event: UserMessageEvent | MessageQueuedEvent,
        seq: int,
        known_max: int,
    ) -> None:
        known = KnownMessage.of(message_id, seq, event)
        if (first := self.find(message_id)) is not None:
            known = known._replace(seq=first.seq, place=first.place)
        if self._known is NO_TABLE:
            self._known = {}
        self._known[message_id] = known[1:]
        if len(self._known) > known_max:
            # A message that waits, or may wait again, keeps its entry: its later events must find
            # the seq of its first. This message may be about to join a turn.
            running = self.running.messages if self.running is not None else ()
            kept = {message_id, *(message.message_id for message in running)}
            oldest = next(
                (known for known in self._known if not (known in self._queued or known in kept)),
                None,
            )
            if oldest is not None:
                del self._known[oldest]
                self._forgotten_max = max(self._forgotten_max, oldest, key=_rank)
