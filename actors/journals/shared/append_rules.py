"""The rules by which a journal refuses an append, in the order in which every journal applies them.

First, and whatever the epoch, a journal answers an append whose records are all in the log, with
the same content. Then these rules apply. Ownership comes first, so that a fenced owner learns
nothing about a rival's ids; then ids that the log has; then the expected seq.

A journal that several processes write also compares the process that has claimed the epoch. A fork
that is made again, and a database that has lost claims, give an epoch out a second time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turnkeeper.runtime import InvariantViolation

from ...errors import ConversationNotFound, EventIdConflict, Fenced, MessageIdConflict
from ...journal import Listing, Record
from .job_thread import Job
from .limits import check_records

REJECTIONS_DROPPED_MAX = 1_000
"""How many more old rejections than new ones one write removes at most, so that it stays short."""


class Append(Job[Sequence[int]]):
    """An append as a job for the writing thread."""

    __slots__ = (
        "conversation_id",
        "epoch",
        "expected_seq",
        "is_unfinished",
        "listing",
        "records",
    )

    def __init__(  # noqa: PLR0917 - made once an append; Python makes a dict of keywords
        self,
        conversation_id: str,
        records: Sequence[Record],
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,  # noqa: FBT001 - as above
        listing: Listing | None = None,
    ) -> None:
        Job.__init__(self, len(records), check_records(records))  # not by super(), for speed
        self.conversation_id = conversation_id
        self.records = records
        self.epoch = epoch
        self.expected_seq = expected_seq
        self.is_unfinished = is_unfinished
        self.listing = listing


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
    """Raise if a rule forbids this append. The known ids are ids of the append that the log has."""

    def fenced() -> Fenced:
        return Fenced(
            conversation_id,
            epoch=epoch,
            expected_seq=expected_seq,
            found_epoch=found_epoch,
            head=head,
        )

    # A conversation that was never claimed has epoch 0.
    if epoch != found_epoch or not epoch:
        raise fenced()
    if known_events:
        raise EventIdConflict(conversation_id, known_events)
    if expected_seq != head + 1:
        raise fenced()
    check_ids(conversation_id, records, expected_seq, known_messages)


def check_epoch(conversation_id: str, *, epoch: int, found_epoch: int, head: int) -> None:
    """Raise `Fenced` unless the request is from the conversation's newest owner."""
    if epoch != found_epoch or not epoch:
        raise Fenced(
            conversation_id, epoch=epoch, expected_seq=head + 1, found_epoch=found_epoch, head=head
        )


def check_deletion(conversation_id: str, *, epoch: int, found_epoch: int, head: int) -> None:
    """Raise unless there is a log to delete, and the request is from its newest owner."""
    if not head:
        raise ConversationNotFound(conversation_id)
    check_epoch(conversation_id, epoch=epoch, found_epoch=found_epoch, head=head)


def telling_seq(seq: int, *, forked_at: int, head: int) -> int:
    """Return the seq of the record whose epoch tells if a snapshot up to `seq` is of this log.

    A fork's prefix has the epochs of another log, so it is the fork's first own record instead. A
    fork has none only after a repair.
    """
    return min(max(seq, forked_at + 1), head)


def check_snapshot_epoch(
    conversation_id: str, seq: int, *, epoch: int, found_epoch: int, head: int
) -> None:
    """Raise `Fenced` if the record at `telling_seq` has a later epoch than the snapshot's writer.

    Then the writer folded an earlier log of the same name, which was deleted since.
    """
    if found_epoch > epoch:
        raise Fenced(
            conversation_id, epoch=epoch, expected_seq=seq, found_epoch=found_epoch, head=head
        )


def check_place(
    what: str, conversation_id: str, seq: int, *, epoch: int, found_epoch: int, head: int
) -> None:
    """Raise unless the log has the seq of a snapshot or a listing.

    It is `Fenced` if the conversation has a later epoch than its writer knew: then the writer
    folded an earlier log of the same name. Otherwise it is `InvariantViolation`.
    """
    if not 1 <= seq <= head:
        if found_epoch > epoch:
            raise Fenced(
                conversation_id, epoch=epoch, expected_seq=seq, found_epoch=found_epoch, head=head
            )
        raise InvariantViolation(
            f"{what} of conversation {conversation_id} at seq {seq}, which has no record; "
            "nothing was written"
        )


def check_ids(
    conversation_id: str,
    records: Sequence[Record],
    first_seq: int,
    known_messages: Mapping[str, int],
) -> None:
    """Raise if an id occurs twice in the append, or the log has one of its message ids."""
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
