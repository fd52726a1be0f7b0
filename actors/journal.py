"""The journal port: the durable store of all logs, as the conversation actors see it.

A journal stores encoded records and never interprets them. It promises:

1. `append` is atomic, and durable when it returns: all of its records or none.
2. An append has three outcomes: committed (it returns), refused (`Refused` or `OwnershipLost`:
   nothing was written), unknown (`OutcomeUnknown`: send the same ids again). `Unavailable` means
   that nothing was written and that the same append may be tried again.
3. An append is accepted only from the newest epoch and only at the expected seq. Both are checked
   in the transaction that writes, so two owners can never interleave one log.
4. An append whose records are all in the log already, with the same content, returns their seqs,
   whatever its epoch. If the log has another record under one of their ids, 3 and 5 decide.
5. Event ids and message ids are unique in a conversation, including a fork's prefix. An append
   that repeats some of them is refused with their seqs. Its neighbours in the same commit are not
   affected.
6. Seqs start at 1 and have no gaps. A record that `read` has returned never changes.
7. After an I/O error in a commit the journal is closed for writing in this process; reads go on.

It does not promise an order between conversations. Any number of tasks of one event loop may call
it at once. Cancelling a caller of `append` does not cancel the append, which finishes by itself.

`turnkeeper.actors.journals.contract` holds the suite that every journal passes. Authors of another
journal inherit it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, Self

from .errors import ConversationDeleted

__all__ = [
    "Claim",
    "ConversationInfo",
    "Deletion",
    "FoundMessage",
    "Journal",
    "ListOrder",
    "ListPage",
    "ListQuery",
    "ListRow",
    "Listing",
    "LogPages",
    "Record",
    "Rejection",
    "SearchPage",
    "SearchQuery",
    "Snapshot",
    "StoredRecord",
]

READ_PAGE = 1024
"""The records that are read at once: a page holds up other reads for a few milliseconds."""

READ_BYTES = 4 << 20
"""The bytes of a page, unless its reader says otherwise: the page ends with the record with which
its payloads have as many, even if its `limit` allows more. But its first two records are always in
it: a reader that begins with a record that it knows, to see whether the log is still the same,
reads on."""


class Record(NamedTuple):
    """One event, encoded, on its way into a log."""

    event_id: str
    kind: str
    payload: bytes
    """The event's JSON, UTF-8."""
    message_id: str | None = None
    """Set on the first event that carries this chat message's id, and only on that one."""


class StoredRecord(NamedTuple):
    """One event as the log has it."""

    seq: int
    epoch: int
    event_id: str
    kind: str
    payload: bytes
    message_id: str | None = None


class Claim(NamedTuple):
    """The new owner's epoch, and the seq that the log ends at."""

    epoch: int
    head: int


class ConversationInfo(NamedTuple):
    """The facts about a conversation that the journal has without reading its log."""

    conversation_id: str
    head: int
    epoch: int
    is_unfinished: bool
    """True if the last append said so: its owner has a turn to end or a message to answer, and
    does not wait for a person's decision."""
    updated_at: float
    """The time of its last record: seconds since the Unix epoch, UTC.

    It never falls while the log grows: if the clock was set back, it stays.
    """

    def is_unchanged_since(self, listed: ConversationInfo) -> bool:
        """Return True if no record was written since it was listed.

        The head alone does not tell: the conversation may have been deleted since, and another one
        begun under its id may be as long.
        """
        return (self.head, self.updated_at) == (listed.head, listed.updated_at)


LISTED_KINDS = frozenset(
    (
        "turn_started",
        "turn_ended",
        "user_message",
        "message_queued",
        "message_withdrawn",
        "confirmation_requested",
        "confirmation_given",
        "paused",
        "resumed",
        "status_changed",
        "retraction",
        "forked_from",
        "conversation_changed",
    )
)
"""The kinds of records that are appended together with a new listing. A listing is stale if such a
record has come after it: then old code wrote the record, or a caller that keeps no listings."""

LISTING_AGE_MAX = 1_024
"""A listing is stale if this many records have come after it, of whatever kinds. Owners write it
again long before that. So a reader looks at the kinds of at most this many records."""

ListOrder = Literal["id", "created", "activity"]
"""By id; by creation, oldest first; by activity, newest first."""

AT_REST = ("idle", "finished")
"""The statuses of most conversations, which have no index of their own."""


class Listing(NamedTuple):
    """The facts of a conversation that lists show without its log: a function of it up to `seq`.

    The journal stores `payload` unread; the rest is what it filters and sorts by.
    """

    seq: int
    owner: str = ""
    """The user whose conversation it is."""
    status: str = ""
    created_us: int = 0
    active_us: int = 0
    labels: Mapping[str, str] = {}
    payload: str = ""
    """JSON."""


class ListQuery(NamedTuple):
    """Which conversations, in which order, and how many at once."""

    limit: int
    after: Sequence[str | int] | None = None
    """The `next` of the page before."""
    prefix: str = ""
    """The beginning of their ids."""
    owner: str | None = None
    status: str | None = None
    label: tuple[str, str] | None = None
    order: ListOrder = "id"
    scan_max: int = 1_000
    """The most rows to look at, if no index has exactly the wanted ones."""


class ListRow(NamedTuple):
    """One conversation of a page."""

    conversation_id: str
    head: int
    updated_us: int
    listing: Listing
    """If its seq is 0, only the time of activity is known."""
    is_stale: bool
    """True if the log has gone on since the listing in a way that may have changed it."""
    owned: Literal["here", "elsewhere", "none"]
    """The process that owns the log: this one, another one that is alive, or none."""
    address: str = ""
    """The address of the other process, as its lease has it."""


class ListPage(NamedTuple):
    """Some conversations, and the place to go on from."""

    rows: Sequence[ListRow]
    next: Sequence[str | int] | None
    """None: there are no more."""
    is_complete: bool = True
    """False if `scan_max` rows were looked at before the page was full."""


class SearchQuery(NamedTuple):
    """Which words, in whose conversations, and how many messages at once."""

    words: Sequence[str]
    """Each must be in the message; as `values.words.find_words` gives them."""
    limit: int
    begins: str = ""
    """The beginning of one more word that must be in the message; empty: none."""
    after: int | None = None
    """The `next` of the page before."""
    prefix: str = ""
    """The beginning of the conversations' ids."""
    owner: str | None = None
    label: tuple[str, str] | None = None
    scan_max: int = 1_000
    """The most messages to look at, if no index has exactly the wanted ones."""
    status: str | None = None
    """The status of the conversations, as in `ListQuery`."""


class FoundMessage(NamedTuple):
    """A chat message that a search has found."""

    conversation_id: str
    seq: int
    event_id: str
    by: Literal["user", "agent"]
    author: str | None
    """The user who sent it, if the application has said so."""
    at_us: int
    snippet: str
    """Up to 200 characters around one of the words; empty if the record is damaged."""
    left_view: Literal["", "condensed", "retracted"]
    """The way in which it has left the view of the conversation, if it has."""


class SearchPage(NamedTuple):
    """Some messages, the newest first, and the place to go on from."""

    rows: Sequence[FoundMessage]
    next: int | None
    """None: there are no more."""
    is_complete: bool = True
    """False if the page ended before it was full: `scan_max` messages were looked at, or those on
    it have 16 MiB."""
    complete_to_us: int | None = None
    """The index has all that was written before this time; None: all that is written."""


class Deletion(NamedTuple):
    """The outcome of deleting a conversation."""

    kept: int
    """The number of records, from the first on, that stay because forks begin with them."""
    forks: Sequence[str]
    """The conversations that need them."""
    is_erased: bool
    """True if the other records are gone from the journal's files too, and not just unreachable."""


class Rejection(NamedTuple):
    """An event that admission refused, kept so that nothing is lost without a trace."""

    at: float
    violation: str
    reason: str
    payload: bytes


class Snapshot(NamedTuple):
    """Folds written down at a seq. It is a cache, discarded whenever it does not fit."""

    seq: int
    version: str
    payload: bytes


class Journal(Protocol):
    """The port. Enter it before use; leaving it waits for the appends that were submitted."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    def is_lease_valid(self, *, since: float | None = None) -> bool:
        """Return True if this process may still start effects.

        The lease is judged by the process's monotonic clock, less a margin. With `since`, a moment
        of that clock, return True only if the lease has held ever since then: a lease that ran out
        and was renewed does not revive claims from before.
        """

    def watch_lease(self, on_loss: Callable[[], None]) -> None:
        """Call `on_loss` in this loop each time that this process has lost its lease.

        `is_lease_valid(since=…)` then tells which claims are lost. A loss is noticed when the lease
        runs out or is renewed too late; after a forced takeover, at the next look at the journal.
        One watcher at a time, from entering to leaving.
        """

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        """Take the next epoch of a conversation, creating the conversation if it does not exist.

        Returns after every append of an older epoch has either landed or been shut out for good.
        Raises `OwnedElsewhere` while another process that owns it is alive, unless `takeover`, and
        `InvalidConversationId` for a name that a new conversation cannot have. With `any_name` it
        takes such a name, for the import of a conversation that began elsewhere.
        """

    def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
        listing: Listing | None = None,
    ) -> Awaitable[Sequence[int]]:
        """Write records from `expected_seq` on (the seq of the first) and return their seqs.

        `listing` is stored in the same transaction; None leaves the one before as it is.

        `is_unfinished` is stored in the same transaction (see `ConversationInfo`).

        Raises `Fenced` if the epoch is not the newest or the seq not the next; `EventIdConflict`
        and `MessageIdConflict` for ids that the log has; `Unavailable` and `OutcomeUnknown`; all as
        the head of this module says. Raises `ValueError` for zero records, and `InvalidInput` for
        an id or an event beyond the limits.
        """

    async def read(
        self,
        conversation_id: str,
        *,
        after: int = 0,
        limit: int = 512,
        bytes_max: int = READ_BYTES,
    ) -> Sequence[StoredRecord]:
        """Return a page: at most `limit` records with a seq above `after`, in order.

        Needs no ownership. The page ends sooner once its payloads have `bytes_max` bytes (see
        `READ_BYTES`), so a short page need not be the end of the log, but an empty one is, if
        `limit` is not 0. Raises `ConversationNotFound`, or `CorruptLog` if a record differs from
        the one that was written.
        """

    async def info(self, conversation_id: str) -> ConversationInfo:
        """Return the facts about one conversation.

        Raises `ConversationNotFound`, also for a conversation that was claimed and never written.
        """

    async def list(self) -> Sequence[ConversationInfo]:
        """Return all conversations that have records, sorted by id, without reading their logs."""

    async def page(self, query: ListQuery) -> ListPage:
        """Return a page of the conversations that have records, without reading their logs.

        In the order "id" or "created", successive pages have every conversation that exists
        throughout exactly once; in the order "activity", one that is active meanwhile may be
        missed. A conversation whose first append had no listing is shown as stale.
        """

    async def search(self, query: SearchQuery) -> SearchPage:
        """Return a page of the chat messages that have these words, the newest first.

        The messages that a fork shares with its parent are found in the parent only. Raises
        `SearchIsOff` if this journal was not asked to index.
        """

    async def index(self) -> None:
        """Return once search finds all that was written before this call.

        The journal indexes by itself too, a little later than it writes. Raises `SearchIsOff`.
        """

    async def write_listing(self, conversation_id: str, listing: Listing, *, epoch: int) -> None:
        """Replace a listing that is not newer; `epoch` as for `write_snapshot`.

        Raises `ConversationNotFound`, and `Fenced` if it is of a log that was deleted since and
        begun anew.
        """

    async def find_abandoned(self) -> Sequence[ConversationInfo]:
        """Return the unfinished conversations that no other living process owns, sorted by id.

        Those of this process are among them. Another process may claim one at any time: `claim`
        then raises.
        """

    async def find_events(
        self, conversation_id: str, event_ids: Sequence[str]
    ) -> Mapping[str, int]:
        """Return the seq of each of these event ids that the log has.

        Raises `ConversationNotFound`.
        """

    async def find_messages(
        self, conversation_id: str, message_ids: Sequence[str]
    ) -> Mapping[str, int]:
        """Return the seq of the first record of each of these message ids that the log has.

        Raises `ConversationNotFound`.
        """

    async def reject(
        self, conversation_id: str, rejections: Sequence[Rejection], *, epoch: int
    ) -> None:
        """Keep rejected events durably beside the log, until they are old enough to be dropped.

        Raises `Fenced` unless `epoch` is the conversation's newest, which is checked in the
        transaction that writes.
        """

    async def rejections(self, conversation_id: str) -> Sequence[Rejection]:
        """Return the rejected events that are kept, oldest first; none for an unknown name."""

    async def write_snapshot(self, conversation_id: str, snapshot: Snapshot, *, epoch: int) -> None:
        """Keep a snapshot; an older one of this conversation may be dropped.

        `epoch` is the newest that its writer knows of. Raises `Fenced` if the writer folded a log
        that was deleted since, and a log of later epochs has begun under its name. Raises
        `InvariantViolation` if the log of this epoch has no record at the snapshot's seq.
        """

    async def read_snapshot(self, conversation_id: str) -> Snapshot | None:
        """Return the newest undamaged snapshot, or None. Raises `ConversationNotFound`."""

    async def fork(
        self,
        conversation_id: str,
        fork_id: str,
        *,
        at: int,
        records: Sequence[Record],
        is_unfinished: bool,
        at_event_id: str | None = None,
        listing: Listing | None = None,
    ) -> Claim:
        """Begin conversation `fork_id` with the records of another up to `at`, then `records`.

        This is one transaction, however long the prefix: the prefix is shared, not copied, and the
        other conversation is only read. The caller owns the fork. Raises `ConversationNotFound`,
        `RecordNotFound` if there is no record at `at`, and `ConversationExists` if the fork
        already has records, unless it is this fork (so after `OutcomeUnknown`, fork again, and
        then claim it: another process may own it by now, whose epoch that call returns). With
        `at_event_id`, raises `ConversationDeleted` if another event is at `at`: the log that the
        caller has read was deleted meanwhile, and another one begun under its name.
        """

    async def delete(self, conversation_id: str, *, epoch: int) -> Deletion:
        """Delete a conversation with everything kept beside its log.

        The journal remembers the name and its epoch, so that a new conversation of that name
        begins with a later epoch. Raises `Fenced` unless `epoch` is the conversation's newest, and
        `ConversationNotFound`.
        """

    async def release(self, conversation_id: str, *, epoch: int) -> None:
        """Give a conversation back, so that another process need not wait for the lease's end.

        Does nothing if a later epoch has been claimed. Write nothing under this epoch afterwards: a
        journal that several processes share refuses it.
        """

    async def wait_for_more(self, conversation_id: str, *, after: int) -> None:
        """Return once a log does not end at `after`, whichever process wrote or deleted it.

        A conversation that does not exist ends at 0.
        """


def fitting(sizes: Iterable[int], bytes_max: int) -> int:
    """Return how many records of these sizes are in one page; the sizes are of their payloads."""
    held = count = 0
    for size in sizes:
        if count > 1 and held >= bytes_max:
            break
        held += size
        count += 1
    return count


def may_have_more(page: Sequence[StoredRecord], limit: int, bytes_max: int) -> bool:
    """Return True unless a page, read with these bounds, ended because the log does."""
    if len(page) == limit:
        return True
    return len(page) > 1 and sum(len(record.payload) for record in page) >= bytes_max


class LogPages:
    """Iterate over the records of a log above the seq `after`, by pages.

    `upto`: the last seq; None: to the end of the log. `epoch`: the conversation's when `upto` was
    read as its head. With it, all pages are of one log: the iteration raises `ConversationDeleted`
    if the log has fewer records than that, or one of a later epoch among them, or if a page does
    not follow the one before. Then it was deleted since, and another was begun. `bytes_max`: as in
    `Journal.read`.

    The one way to read a log that may be long. Raises as `Journal.read` does. It holds nothing
    open, so an iteration may be left at any point (an async generator left halfway would wait for
    the garbage collector).
    """

    def __init__(
        self,
        journal: Journal,
        conversation_id: str,
        *,
        after: int = 0,
        upto: int | None = None,
        epoch: int | None = None,
        bytes_max: int = READ_BYTES,
    ) -> None:
        self._bytes_max = bytes_max
        self._journal = journal
        self._conversation_id = conversation_id
        self._after = after
        self._upto = upto
        self._epoch = epoch
        # With an epoch: the last record of the page before. It is read again, since the first
        # records of a log that was begun anew as a fork may have epochs as low.
        self._last: list[StoredRecord] = []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[StoredRecord]:
        limit = READ_PAGE if self._upto is None else min(READ_PAGE, self._upto - self._after)
        if limit <= 0:
            raise StopAsyncIteration
        known = len(self._last)
        page = await self._journal.read(
            self._conversation_id,
            after=self._after - known,
            limit=limit + known,
            bytes_max=self._bytes_max,
        )
        if self._epoch is not None:
            again, page = list(page[:known]), page[known:]
            if again != self._last or not page or page[-1].epoch > self._epoch:
                raise ConversationDeleted(self._conversation_id)
            self._last = list(page[-1:])
        if not page:
            raise StopAsyncIteration
        self._after += len(page)
        return page
