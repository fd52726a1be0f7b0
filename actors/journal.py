"""The journal port: the durable store of all logs, as the conversation actors see it.

A journal keeps encoded records and knows nothing of what they mean. It promises:

1. `append` is atomic, and durable when it returns: all of its records or none.
2. An append has three outcomes: committed (it returns), refused (`Refused` or `OwnershipLost`:
   nothing was written), unknown (`OutcomeUnknown`: send the same ids again). `Unavailable` means
   that nothing was written and that the same append may be tried again.
3. An append is accepted only from the newest epoch and only at the expected seq; both are
   checked in the transaction that writes. So two owners can never interleave one log.
4. An append whose event ids are all in the log already returns their seqs, whatever its epoch.
5. Event ids, and message ids, are unique in a conversation, a fork's prefix included. An append
   that repeats some of them is refused with the seqs they have; its neighbours in the same commit
   are not touched.
6. Seqs start at 1 and have no gaps. What `read` returns never changes.
7. After an I/O error in a commit the journal is closed for writing in this process; reads go on.

It does not promise an order between conversations. Any number of tasks of one event loop may call
it at once. Cancelling a caller of `append` leaves the append to finish by itself.

`tests/contract` holds the suite that every journal passes; whoever writes another inherits it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

__all__ = [
    "Claim",
    "ConversationInfo",
    "Deletion",
    "Journal",
    "Record",
    "Rejection",
    "Snapshot",
    "StoredRecord",
]


@dataclass(frozen=True, slots=True)
class Record:
    """One event, encoded, on its way into a log."""

    event_id: str
    kind: str
    payload: bytes
    """The event's JSON, UTF-8."""
    message_id: str | None = None
    """Set on the first event that carries this chat message's id, and only on that one."""


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One event as the log has it."""

    seq: int
    epoch: int
    event_id: str
    kind: str
    payload: bytes
    message_id: str | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """What opening a conversation as its owner gives: the new epoch, and where the log ends."""

    epoch: int
    head: int


@dataclass(frozen=True, slots=True)
class ConversationInfo:
    """What the journal knows of a conversation without reading its log."""

    conversation_id: str
    head: int
    epoch: int
    is_unfinished: bool
    """It has an unfinished turn or queued chat messages; its owner said so with its last append."""
    updated_at: float
    """When its last record was written: seconds since the epoch, UTC."""


@dataclass(frozen=True, slots=True)
class Deletion:
    """What deleting a conversation left behind."""

    kept: int
    """So many records, from the first on, stay because forks begin with them."""
    forks: Sequence[str]
    """The conversations that need them."""
    is_erased: bool
    """What does not stay is gone from the store's files too, and not only out of reach."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """An event that admission refused, kept so that nothing is lost without a trace."""

    at: float
    violation: str
    reason: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Folds written down at a seq; a cache, thrown away whenever it does not fit."""

    seq: int
    version: str
    payload: bytes


class Journal(Protocol):
    """The port. Enter it before use; leaving it waits for what was appended."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    def is_lease_valid(self, *, since: float | None = None) -> bool:
        """Whether this process may still start effects, by its monotonic clock, with a margin.

        With `since`, a moment of that clock: whether it could all the time from then on. A lease
        that ran out and was renewed does not bring back what was claimed before.
        """

    async def claim(self, conversation_id: str, *, takeover: bool = False) -> Claim:
        """Take the next epoch of a conversation, which is made if it is not there.

        Returns after every append of an older epoch has either landed or been shut out for good.
        Raises `OwnedElsewhere` while another process that owns it is alive, unless `takeover`.
        """

    def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
    ) -> Awaitable[Sequence[int]]:
        """Write records at `expected_seq` (the seq of the first) and on; returns their seqs.

        Zero records are a `ValueError`. `is_unfinished` is stored beside the log in the same
        transaction, for `list`.
        """

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512
    ) -> Sequence[StoredRecord]:
        """At most `limit` records with a seq above `after`, in order; empty at the end.

        Needs no ownership. Raises `ConversationNotFound`, and `CorruptLog` at a record that
        is not what was written.
        """

    async def info(self, conversation_id: str) -> ConversationInfo:
        """Raises `ConversationNotFound`; a conversation without records counts as not there."""

    async def list(self, *, only_unfinished: bool = False) -> Sequence[ConversationInfo]:
        """All conversations that have records, by id, without reading their logs."""

    async def find_events(
        self, conversation_id: str, event_ids: Sequence[str]
    ) -> Mapping[str, int]:
        """The seq of each of these event ids that the log has."""

    async def find_messages(
        self, conversation_id: str, message_ids: Sequence[str]
    ) -> Mapping[str, int]:
        """The seq of the first record of each of these message ids that the log has."""

    async def reject(self, conversation_id: str, rejections: Sequence[Rejection]) -> None:
        """Keep rejected events, durably, beside the log; they go by age."""

    async def rejections(self, conversation_id: str) -> Sequence[Rejection]:
        """The rejected events that are kept, oldest first."""

    async def write_snapshot(self, conversation_id: str, snapshot: Snapshot, *, epoch: int) -> None:
        """Keep a snapshot; an older one of this conversation may go.

        `epoch` is the newest that its writer knows of. A record at its seq that is of a later one
        belongs to another log, which has begun anew under this name: `Fenced`.
        """

    async def read_snapshot(self, conversation_id: str) -> Snapshot | None:
        """The newest snapshot that is undamaged, or None."""

    async def fork(
        self,
        conversation_id: str,
        fork_id: str,
        *,
        at: int,
        records: Sequence[Record],
        is_unfinished: bool,
    ) -> Claim:
        """Begin conversation `fork_id` with the records of another up to `at`, then `records`.

        One transaction, however long the prefix, which is shared and not copied; the other
        conversation is only read. The caller owns the fork. Raises `ConversationNotFound`,
        `RecordNotFound` when there is none at `at`, and `ConversationExists` when the fork has
        records already, unless those are just these (so after `OutcomeUnknown`, fork again).
        """

    async def delete(self, conversation_id: str, *, epoch: int) -> Deletion:
        """Delete a conversation with all that is kept beside its log; only its owner may.

        Its name keeps the epoch, so that a conversation of that name begins above it.
        """

    async def wait_for_more(self, conversation_id: str, *, after: int) -> None:
        """Return when a log does not end at `after`, whichever process has written or deleted.

        What is not there ends at 0.
        """
