"""A batch of commands, from the mailbox to the commit: each with its stamp, then what follows.

The owner (`actor.py`) takes, decides and commits a batch. What is here only holds and splits it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from turnkeeper.runtime import Delivery

from ..core.admission import AdmissionRefused
from ..core.commands import Append, AppendAll, Command, Delete, Query
from ..core.records import encode_record
from ..core.working_state import Decision, Stamp, TurnEffect
from ..events import Event, TextDelta, encode_event
from ..journal import Record, Rejection
from ..values.tables import NO_TABLE

__all__ = ["Decided", "Taken", "between_deletions", "events_of"]


class Taken(Stamp):
    """A command of a batch, and its time and ids."""

    __slots__ = ("command", "delivery")

    def __init__(
        self,
        command: Command | Query,
        now: float,
        next_id: int,
        delivery: Delivery[Command | Query] | None = None,
    ) -> None:
        """`delivery` answers the command's caller; the owner's own commands have none."""
        # Written out, and not through super(): this runs once a command.
        self.now = now
        self.next_id = next_id
        self.known_message = self.known_target = None
        self.known_events = self.known_answers = NO_TABLE
        self.command = command
        self.delivery = delivery


class Decided:
    """All that follows from a batch, in the order of its commands.

    Tuples, not lists: a thousand owners wait with what is here, and Python reuses small tuples that
    were let go, while each list would be a new object for the garbage collector.
    """

    __slots__ = (
        "answers",
        "deliveries",
        "effects",
        "records",
        "rejections",
        "shown",
    )

    def __init__(self) -> None:
        self.records: tuple[Record, ...] = ()
        """The events that the batch appends, encoded."""
        self.shown: tuple[Event | TextDelta, ...] = ()
        """The same events, and the pieces of the running turn's answer between them."""
        self.rejections: tuple[Rejection, ...] = ()
        """The events that admission refused: they are kept before their callers hear of it."""
        self.deliveries: tuple[Delivery[Command | Query], ...] = ()
        self.answers: tuple[object, ...] = ()
        """The answer to each of the deliveries; an error for a command that was refused."""
        self.effects: tuple[TurnEffect, ...] = ()

    @property
    def events(self) -> Iterator[Event]:
        """The events that the batch appends."""
        return (one for one in self.shown if not isinstance(one, TextDelta))

    def add(self, taken: Taken, decision: Decision) -> None:
        """Add the decision on a command."""
        if decision.piece is not None:
            self.shown += (decision.piece,)
        if events := decision.events:
            self.shown += events
            written = zip_longest(events, decision.written)
            self.records += tuple([encode_record(event, json) for event, json in written])
        if decision.effects:
            self.effects += decision.effects
        if taken.delivery is not None:
            self.deliveries += (taken.delivery,)
            self.answers += (decision.reply,)

    def refuse(self, taken: Taken, refusal: Exception) -> None:
        """Add the refusal of a command. Raise it if the command is the owner's own."""
        if taken.delivery is None:
            raise refusal
        self.deliveries += (taken.delivery,)
        self.answers += (refusal,)
        if isinstance(refusal, AdmissionRefused):
            self.rejections += (_rejection(refusal, taken),)


def events_of(command: Command | Query) -> Sequence[Event]:
    """Return the events that a caller appends by this command."""
    match command:
        case Append(event=event):
            return (event,)
        case AppendAll(events=events):
            return events
        case _:
            return ()


def between_deletions(
    deliveries: Sequence[Delivery[Command | Query]],
) -> Iterator[Sequence[Delivery[Command | Query]]]:
    """Split a batch, in its order: each deletion stands alone."""
    begin = 0
    for at, delivery in enumerate(deliveries):
        if isinstance(delivery.message, Delete):
            if begin < at:
                yield deliveries[begin:at]
            yield (delivery,)
            begin = at + 1
    if begin < len(deliveries):
        yield deliveries[begin:]


def _rejection(refusal: AdmissionRefused, stamp: Stamp) -> Rejection:
    violation = refusal.violation
    return Rejection(
        at=stamp.now,
        violation=violation.name,
        # It may quote an id with a NUL, which a database cannot store.
        reason=violation.reason.replace("\0", "\ufffd"),
        payload=encode_event(violation.event),
    )
