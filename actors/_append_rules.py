"""An append as a job, and what can stand against it, in the order in which every journal looks.

Ids that are all in the log already are answered before this, whatever the epoch. Then ownership
comes first, since a rival's ids are nobody's business; then ids that are known; then the place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ._job_thread import Job
from .errors import EventIdConflict, Fenced, MessageIdConflict
from .journal import Record


class Append(Job[Sequence[int]]):
    """Records on their way into one log."""

    __slots__ = ("conversation_id", "epoch", "expected_seq", "is_unfinished", "records")

    def __init__(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
    ) -> None:
        size = 0
        for record in records:
            size += len(record.payload)
        super().__init__(len(records), size)
        self.conversation_id = conversation_id
        self.records = records
        self.epoch = epoch
        self.expected_seq = expected_seq
        self.is_unfinished = is_unfinished


def check_append(
    conversation_id: str,
    records: Sequence[Record],
    *,
    epoch: int,
    expected_seq: int,
    found_epoch: int,
    head: int,
    known_events: Mapping[str, int],
    known_messages: Mapping[str, int],
) -> None:
    """Raise what stands against this append, if anything; the known ids are those of the log."""
    fenced = Fenced(
        conversation_id,
        epoch=epoch,
        expected_seq=expected_seq,
        found_epoch=found_epoch,
        head=head,
    )
    # Epoch 0 is that of a conversation which nobody has claimed.
    if epoch != found_epoch or not epoch:
        raise fenced
    if known_events:
        raise EventIdConflict(conversation_id, known_events)
    if expected_seq != head + 1:
        raise fenced
    check_ids(conversation_id, records, expected_seq, known_messages)


def check_snapshot_epoch(
    conversation_id: str, seq: int, *, epoch: int, found_epoch: int, head: int
) -> None:
    """Raise where the record that a snapshot ends with is of a later epoch than its writer knows.

    It has seen another log then, which was deleted; this one has begun anew under the name.
    """
    if found_epoch > epoch:
        raise Fenced(
            conversation_id, epoch=epoch, expected_seq=seq, found_epoch=found_epoch, head=head
        )


def check_ids(
    conversation_id: str,
    records: Sequence[Record],
    first_seq: int,
    known_messages: Mapping[str, int],
) -> None:
    """Raise where an id comes twice, or a message id is known."""
    event_ids: dict[str, int] = {}
    message_ids = dict(known_messages)
    for seq, record in enumerate(records, first_seq):
        if record.event_id in event_ids:
            raise EventIdConflict(conversation_id, {record.event_id: event_ids[record.event_id]})
        event_ids[record.event_id] = seq
        if record.message_id is not None:
            if record.message_id in message_ids:
                raise MessageIdConflict(
                    conversation_id, record.message_id, message_ids[record.message_id]
                )
            message_ids[record.message_id] = seq
