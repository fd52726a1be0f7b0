"""Forks and deletion: logs share prefixes, and a deletion keeps the records that a fork needs.

A fork names the log that has its last shared record. A deletion separates a name from its log, and
`erasure` removes the records afterwards. All functions here run in the writer's transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import (
    ConversationDeleted,
    ConversationExists,
    ConversationNotFound,
    RecordNotFound,
)
from ...journal import Claim, Listing, Record
from ..shared.append_rules import Append, check_deletion
from .erasure import begin_erasure, needed
from .listings import erase_listing
from .log import (
    empty_tail,
    find_events,
    find_record,
    find_renamed,
    fork_seal,
    log_of,
    prefix_of,
    records_of,
)
from .writer import SQLiteWriter

_FORKS_OF = """
    WITH RECURSIVE descendant (log) AS (
        SELECT log FROM fork WHERE parent = ?
        UNION SELECT f.log FROM fork f JOIN descendant d ON f.parent = d.log
    )
    SELECT name FROM conversation JOIN descendant USING (log) ORDER BY name
"""


def fork(
    writer: SQLiteWriter,
    name: str,
    fork_name: str,
    at: int,
    records: Sequence[Record],
    *,
    is_unfinished: bool,
    at_event_id: str | None,
    listing: Listing | None,
) -> Claim:
    """Begin a conversation with the records of another up to `at`."""
    parent = writer.load(name)
    if parent is None or not parent.head:
        raise ConversationNotFound(name)
    record = find_record(writer.connection, parent, at)
    if record is None:
        raise RecordNotFound(name, at, parent.head)
    if at_event_id is not None:
        ids = find_events(writer.connection, parent, [at_event_id])
        if ids.get(at_event_id) != at:
            raise ConversationDeleted(name)
    shared = log_of(writer.connection, parent, at)
    prefix = (
        (shared, at),
        *(
            (log, upto)
            for log, upto in prefix_of(writer.connection, parent)
            if log != shared and upto < at
        ),
    )
    found = writer.load(fork_name) or find_renamed(writer.connection, fork_name, writer.now_us)
    if found is not None and found.head:
        if prefix_of(writer.connection, found) == prefix:
            upto = min(at + len(records), found.head)
            own = records_of(writer.connection, found, at, upto)
            if [stored[2:] for stored in own] == list(records):
                return Claim(found.epoch, found.head)  # sent again
        raise ConversationExists(fork_name, found.head)
    child = found or empty_tail(fork_name, 0, 0, writer.now_us)
    child.last, child.tip = record
    child.head = child.forked_at = at
    child.prefix = prefix
    # Above its parent's too, so that epochs never fall within a log.
    child.epoch = max(child.epoch, parent.epoch) + 1
    writer.store(child)
    writer.connection.execute(
        "INSERT INTO fork VALUES (?, ?, ?, ?)",
        (child.log, shared, at, fork_seal(child.log, shared, at)),
    )
    begins = Append(
        fork_name,
        records,
        epoch=child.epoch,
        expected_seq=at + 1,
        is_unfinished=is_unfinished,
        listing=listing,
    )
    writer.begin_fork(child, begins)
    return Claim(child.epoch, at + len(records))


def delete(writer: SQLiteWriter, name: str, epoch: int) -> tuple[int, Sequence[str], Sequence[int]]:
    """Delete a conversation; return how many records stay, the forks they serve, and its logs.

    From now on the records cannot be reached, and `erase_slice` has to remove them: first those of
    its own log, then those of deleted logs that it was forked from.
    """
    tail = writer.load(name)
    if tail is None:
        raise ConversationNotFound(name)
    check_deletion(name, epoch=epoch, found_epoch=tail.epoch, head=tail.head)
    forks = [row[0] for row in writer.connection.execute(_FORKS_OF, (tail.log,))]
    kept = needed(writer.connection, tail.log)
    logs = (tail.log, *(log for log, _ in prefix_of(writer.connection, tail)))
    writer.connection.execute("DELETE FROM snapshot WHERE log = ?", (tail.log,))
    erase_listing(writer.connection, tail.number)
    # The name keeps its row, with a higher epoch and another log.
    rest = empty_tail(name, tail.incarnation + 1, tail.epoch + 1, writer.now_us)
    rest.number = tail.number
    writer.store(rest)
    begin_erasure(writer.connection, tail.log, tail.last, tail.head)
    writer.is_erasing = True
    return kept, forks, logs
