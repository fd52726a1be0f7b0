"""A batch of commands, from the mailbox to the commit: each with its stamp, then its decision.

The owner (`actor.py`) takes, decides and commits a batch. The functions here only read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from turnkeeper.runtime import Delivery

from ..core.admission import AdmissionRefused
from ..core.commands import Append, AppendAll, Command, Delete, Query
from ..core.records import encode_record
from ..core.working_state import Decision, Stamp
from ..events import Event, encode_event
from ..journal import Record, Rejection
from ..values.tables import NO_TABLE

__all__ = ["Taken", "between_deletions", "events_of", "records_of", "rejections_of"]

_NOTHING = Decision()


class Taken(Stamp):
    """A command of a batch, its time and ids, and, once it is made, the decision on it."""

    __slots__ = ("command", "decision", "delivery", "refusal")

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
        self.decision = _NOTHING
        self.refusal: Exception | None = None
        """The reason if it was refused; then `decision` stays empty."""


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


def records_of(decided: Sequence[Taken]) -> Sequence[Record]:
    """Return the events that the batch appends, encoded, in order.

    A tuple, as the batch: Python keeps small tuples that were let go, and makes new ones of them. A
    list is a new object, and a thousand owners that wait with one lead to a collection of garbage.
    """
    return tuple(
        [
            encode_record(event, written)
            for one in decided
            for event, written in zip_longest(one.decision.events, one.decision.written)
        ]
    )


def rejections_of(decided: Sequence[Taken]) -> Sequence[Rejection]:
    """Return the events that admission refused: they are kept before their callers hear of it."""
    # Mostly none: an empty list would be one object more while the commit is waited for.
    rejections: tuple[Rejection, ...] = ()
    for one in decided:
        if isinstance(one.refusal, AdmissionRefused):
            rejections = (*rejections, _rejection(one.refusal, one))
    return rejections


def _rejection(refusal: AdmissionRefused, stamp: Stamp) -> Rejection:
    violation = refusal.violation
    return Rejection(
        at=stamp.now,
        violation=violation.name,
        # It may quote an id with a NUL, which a database cannot store.
        reason=violation.reason.replace("\0", "\ufffd"),
        payload=encode_event(violation.event),
    )
