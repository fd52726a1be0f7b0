"""The journal in memory: for tests, for experiments, and as the simplest form of the port.

A `MemoryStore` plays the disk: it outlives the journals that are entered over it. Each
`MemoryJournal` plays a process. Nothing survives the end of the real process.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Self, cast

import anyio.lowlevel

from turnkeeper.runtime import Ports
from turnkeeper.runtime.lowlevel import OneShot, home_check, pausing

from ..errors import (
    ConversationDeleted,
    ConversationExists,
    ConversationNotFound,
    EventIdConflict,
    Fenced,
    InvalidInput,
    JournalRefused,
    OwnedElsewhere,
    RecordNotFound,
    SearchIsOff,
)
from ..journal import (
    LISTED_KINDS,
    READ_BYTES,
    Claim,
    ConversationInfo,
    Deletion,
    FoundMessage,
    Listing,
    ListPage,
    ListQuery,
    ListRow,
    Record,
    Rejection,
    SearchPage,
    SearchQuery,
    Snapshot,
    StoredRecord,
    fitting,
)
from ..values.tables import NO_TABLE
from ..values.text import check_bool
from ..values.type_names import a_type
from ..values.words import words_of
from .shared.append_rules import (
    check_append,
    check_deletion,
    check_epoch,
    check_ids,
    check_place,
    check_snapshot_epoch,
    telling_seq,
)
from .shared.limits import (
    check_asked,
    check_new_name,
    check_page,
    check_records,
    check_settings,
    check_snapshot,
    checked_rejections,
)
from .shared.list_pages import ListKey, bare_listing, drive_of, fill_page, is_surely_stale
from .shared.searching import (
    LEFT,
    Candidate,
    Said,
    fill_search_page,
    find_said,
    found_message,
    left_ids,
    message_number,
)

_NO_LISTING = Listing(0)
_payload_of = attrgetter("payload")


@dataclass(slots=True, eq=False)
class _Log:
    epoch: int = 0
    owner: MemoryJournal | None = None
    # Made at the first record: a name whose conversation was deleted keeps its log for the epoch.
    records: list[StoredRecord] | tuple[()] = ()
    seq_by_event_id: dict[str, int] = field(default_factory=lambda: NO_TABLE)
    seq_by_message_id: dict[str, int] = field(default_factory=lambda: NO_TABLE)
    is_unfinished: bool = False
    updated_at: float = 0.0
    rejections: Sequence[Rejection] = ()
    snapshot: Snapshot | None = None
    listing: Listing = _NO_LISTING
    prefix: tuple[tuple[_Log, int], ...] = ()
    """The logs that a fork's first records come from, nearest first, each with its last seq."""

    @property
    def forked_at(self) -> int:
        """The last seq of a fork's prefix; 0 for a log that is no fork."""
        return self.prefix[0][1] if self.prefix else 0

    def has(self, record: Record) -> bool:
        """True if the log has this record; false for another one under its event id."""
        seq = self.seq_by_event_id.get(record.event_id)
        return seq is not None and self.records[seq - 1][2:] == record

    def known(self, records: Sequence[Record]) -> tuple[dict[str, int], dict[str, int]]:
        """Return the event ids and the message ids of these records that the log has."""
        events = {
            record.event_id: self.seq_by_event_id[record.event_id]
            for record in records
            if record.event_id in self.seq_by_event_id
        }
        messages = {
            record.message_id: self.seq_by_message_id[record.message_id]
            for record in records
            if record.message_id is not None and record.message_id in self.seq_by_message_id
        }
        return events, messages

    def add(
        self,
        records: Sequence[Record],
        *,
        is_unfinished: bool,
        listing: Listing | None,
        now: float,
    ) -> Sequence[int]:
        if not self.records:
            self.records, self.seq_by_event_id, self.seq_by_message_id = [], {}, {}
        first = len(self.records) + 1
        if listing is not None:
            self.listing = listing
        elif not self.listing.active_us:
            self.listing = bare_listing(round(now * 1_000_000))
        for seq, record in enumerate(records, first):
            self.records.append(
                StoredRecord(
                    seq,
                    self.epoch,
                    record.event_id,
                    record.kind,
                    record.payload,
                    record.message_id,
                )
            )
            self.seq_by_event_id[record.event_id] = seq
            if record.message_id is not None:
                self.seq_by_message_id[record.message_id] = seq
        self.is_unfinished = is_unfinished
        self.updated_at = max(self.updated_at, now)
        return range(first, first + len(records))


class MemoryStore:
    """The logs that the journals over this store share."""

    def __init__(self) -> None:
        self._logs: dict[str, _Log] = {}
        self._waiting: dict[str, list[OneShot[None]]] = {}

    def log(self, conversation_id: str) -> _Log:
        """Return the log of this name; one that is not kept yet if the store has none."""
        return self._logs.get(conversation_id) or _Log()

    def kept_log(self, conversation_id: str) -> _Log:
        return self._logs.setdefault(conversation_id, self.log(conversation_id))

    def written_log(self, conversation_id: str) -> _Log:
        log = self._logs.get(conversation_id)
        if log is None or not log.records:
            raise ConversationNotFound(conversation_id)
        return log

    def logs(self) -> Mapping[str, _Log]:
        return self._logs

    def replace(self, conversation_id: str, log: _Log) -> None:
        self._logs[conversation_id] = log
        self.moved(conversation_id)

    def moved(self, conversation_id: str) -> None:
        """Wake all tasks that wait for this log."""
        for one_shot in self._waiting.pop(conversation_id, ()):
            one_shot.set(None)

    async def wait_for_move(self, conversation_id: str) -> None:
        moved: OneShot[None] = OneShot()
        self._waiting.setdefault(conversation_id, []).append(moved)
        try:
            await moved.wait()
        finally:
            if moved in (waiting := self._waiting.get(conversation_id, [])):
                waiting.remove(moved)

    def wake_all(self) -> None:
        """Wake every task that waits, since a journal was left."""
        for conversation_id in list(self._waiting):
            self.moved(conversation_id)


class MemoryJournal:
    """The journal in memory, for tests and experiments; its logs end with the process.

    Give it to `Conversations`, which enters it. If it is entered again, it still has its logs.
    """

    def __init__(
        self,
        store: MemoryStore | None = None,
        *,
        address: str = "another memory journal",
        search: bool = False,
        rejection_age_s_max: float = 30 * 86_400.0,
        ports: Ports | None = None,
    ) -> None:
        """Make a journal over `store`, or over a new store.

        Journals over one store share its logs, as processes share a file. `address`: the name under
        which another journal sees this one as the owner of a conversation. `search`: allow searches
        for words of chat messages. `rejection_age_s_max`: how long refused messages are kept.
        `ports`: the clock by which it dates them. Raises `InvalidInput`.
        """
        check_settings(locals())
        if store is not None and not isinstance(store, MemoryStore):
            raise InvalidInput(
                f"store is {a_type(store)}; it takes a MemoryStore, which journals in this process "
                'share; to keep conversations in a file, use SQLiteJournal("chats.db")'
            )
        self._store = store or MemoryStore()
        self._address = address
        self._is_searching = search
        self._rejection_age_s_max = rejection_age_s_max
        self._ports = ports or Ports()
        self._entered = 0
        """How many users have entered this journal and not left; the last to leave closes it."""
        self._is_home: Callable[[], bool] = lambda: False
        """True in the event loop in which it was entered: the callers that it wakes run there."""
        self._pause: Callable[[], Awaitable[object]] = anyio.lowlevel.checkpoint
        """A checkpoint; once entered, that of the running loop, which costs less."""

    async def __aenter__(self) -> Self:
        if not self._entered:
            self._is_home = home_check()
            self._pause = pausing()
        self._entered += 1
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._entered -= 1
        self._store.wake_all()

    @property
    def _is_entered(self) -> bool:
        return self._entered > 0

    def is_lease_valid(self, *, since: float | None = None) -> bool:  # noqa: ARG002 - it has no end
        return self._is_entered

    def watch_lease(self, on_loss: Callable[[], None]) -> None:
        """Do nothing: this lease has no end."""

    async def claim(
        self, conversation_id: str, *, takeover: bool = False, any_name: bool = False
    ) -> Claim:
        self._refuse_if_left()
        check_bool("takeover", takeover)
        await check_new_name(self, conversation_id, any_name=any_name)
        log = self._store.kept_log(conversation_id)
        owner = log.owner
        if owner is not None and self._is_rival(owner) and not takeover:
            raise OwnedElsewhere(f"conversation {conversation_id}", owner._address)  # noqa: SLF001 - of this class
        log.owner = self
        log.epoch += 1
        claim = Claim(log.epoch, len(log.records))
        await self._pause()
        return claim

    def _is_rival(self, owner: MemoryJournal | None) -> bool:
        """True if the owner of a log is another journal, and alive."""
        return owner is not None and owner is not self and owner.is_lease_valid()

    def _check_owner(self, conversation_id: str, log: _Log, epoch: int, seq: int) -> None:
        """Raise `Fenced` if this epoch was released, or another journal has it."""
        if epoch == log.epoch and log.owner is not self:
            raise Fenced(
                conversation_id,
                epoch=epoch,
                expected_seq=seq,
                found_epoch=epoch,
                head=len(log.records),
                holder=log.owner._address if log.owner else "",  # noqa: SLF001 - of this class
            )

    async def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
        listing: Listing | None = None,
    ) -> Sequence[int]:
        if not records:
            raise ValueError("an append of zero records")
        check_asked(conversation_id)
        check_records(records)
        self._refuse_if_left()
        log = self._store.log(conversation_id)
        events, messages = log.known(records)
        seqs: Sequence[int]
        if events and all(log.has(record) for record in records):
            seqs = [events[record.event_id] for record in records]
        else:
            self._check_owner(conversation_id, log, epoch, expected_seq)
            check_append(
                conversation_id,
                records,
                epoch=epoch,
                expected_seq=expected_seq,
                found_epoch=log.epoch,
                head=len(log.records),
                known_events=events,
                known_messages=messages,
            )
            seqs = log.add(
                records, is_unfinished=is_unfinished, listing=listing, now=self._ports.now()
            )
            self._store.moved(conversation_id)
        # A checkpoint after the write, as with a disk: a caller cancelled here has written.
        await self._pause()
        return seqs

    async def read(
        self,
        conversation_id: str,
        *,
        after: int = 0,
        limit: int = 512,
        bytes_max: int = READ_BYTES,
    ) -> Sequence[StoredRecord]:
        self._refuse_if_left()
        check_asked(conversation_id)
        check_page(after, limit, bytes_max)
        records = self._store.written_log(conversation_id).records[after : after + limit]
        await self._pause()
        return records[: fitting(map(len, map(_payload_of, records)), bytes_max)]

    async def info(self, conversation_id: str) -> ConversationInfo:
        self._refuse_if_left()
        check_asked(conversation_id)
        info = _info(conversation_id, self._store.written_log(conversation_id))
        await self._pause()
        return info

    async def list(self) -> Sequence[ConversationInfo]:
        self._refuse_if_left()
        infos = [
            _info(conversation_id, log)
            for conversation_id, log in sorted(self._store.logs().items())
            if log.records
        ]
        await self._pause()
        return infos

    async def page(self, query: ListQuery) -> ListPage:
        self._refuse_if_left()
        drive = drive_of(query)
        found: list[tuple[ListRow, tuple[str | int, ...]]] = []
        for name, log in self._store.logs().items():
            listing = log.listing
            if (
                log.records
                and (drive == "all" or listing.owner == query.owner)
                and (drive != "status" or listing.status == query.status)
                and (
                    drive != "label"
                    or query.label is None
                    or listing.labels.get(query.label[0]) == query.label[1]
                )
                and (query.order != "id" or name.startswith(query.prefix))
            ):
                found.append((self._row(name, log), _key(name, listing, query)))
        is_newest_first = query.order == "activity"
        # All keys of one order have the same type.
        found.sort(key=lambda one: cast("Any", one[1]), reverse=is_newest_first)

        def fetch(after: ListKey | None, limit: int) -> Sequence[tuple[ListRow, ListKey]]:
            if after is None:
                return found[:limit]
            place = cast("Any", tuple(after))
            behind = [
                one for one in found if (one[1] < place if is_newest_first else one[1] > place)
            ]
            return behind[:limit]

        page = fill_page(query, fetch)
        await self._pause()
        return page

    def _row(self, name: str, log: _Log) -> ListRow:
        is_stale = is_surely_stale(log.listing, len(log.records))
        if is_stale is None:
            behind = log.records[log.listing.seq :]
            is_stale = any(record.kind in LISTED_KINDS for record in behind)
        owned: Literal["here", "elsewhere", "none"] = "none"
        address = ""
        if log.owner is self:
            owned = "here"
        elif log.owner is not None and self._is_rival(log.owner):
            owned, address = "elsewhere", log.owner._address  # noqa: SLF001 - of this class
        updated_us = round(log.updated_at * 1_000_000)
        return ListRow(name, len(log.records), updated_us, log.listing, is_stale, owned, address)

    async def search(self, query: SearchQuery) -> SearchPage:
        self._refuse_if_left()
        self._refuse_if_search_is_off()
        matching = [one for one in _messages(self._store.logs()) if _is_match(one, query)]

        def find(after: int | None, limit: int) -> Sequence[Candidate]:
            below = [one for one in matching if after is None or one.number < after]
            return [
                Candidate(one.number, one.name, _is_shown(one.log.listing, query), one)
                for one in below[:limit]
            ]

        def show(wanted: Sequence[Candidate]) -> Sequence[tuple[FoundMessage, int]]:
            return [(_shown(query, one.place), len(one.place.record.payload)) for one in wanted]

        page = fill_search_page(query, find, show, None)
        await self._pause()
        return page

    async def index(self) -> None:
        """Do nothing: a search here reads each message, without an index."""
        self._refuse_if_left()
        self._refuse_if_search_is_off()
        await self._pause()

    def _refuse_if_search_is_off(self) -> None:
        if not self._is_searching:
            raise SearchIsOff("this memory journal")

    async def write_listing(self, conversation_id: str, listing: Listing, *, epoch: int) -> None:
        self._refuse_if_left()
        log = self._store.written_log(conversation_id)
        _check_log("listing", conversation_id, log, listing.seq, epoch)
        if log.listing.seq <= listing.seq:
            log.listing = listing
        await self._pause()

    async def find_abandoned(self) -> Sequence[ConversationInfo]:
        self._refuse_if_left()
        infos = [
            _info(conversation_id, log)
            for conversation_id, log in sorted(self._store.logs().items())
            if log.records and log.is_unfinished and not self._is_rival(log.owner)
        ]
        await self._pause()
        return infos

    async def find_events(
        self, conversation_id: str, event_ids: Sequence[str]
    ) -> Mapping[str, int]:
        self._refuse_if_left()
        check_asked(conversation_id, event_ids)
        seqs = self._store.written_log(conversation_id).seq_by_event_id
        found = {event_id: seqs[event_id] for event_id in event_ids if event_id in seqs}
        await self._pause()
        return found

    async def find_messages(
        self, conversation_id: str, message_ids: Sequence[str]
    ) -> Mapping[str, int]:
        self._refuse_if_left()
        check_asked(conversation_id, message_ids)
        seqs = self._store.written_log(conversation_id).seq_by_message_id
        found = {message_id: seqs[message_id] for message_id in message_ids if message_id in seqs}
        await self._pause()
        return found

    async def reject(
        self, conversation_id: str, rejections: Sequence[Rejection], *, epoch: int
    ) -> None:
        self._refuse_if_left()
        check_asked(conversation_id)
        checked = checked_rejections(rejections)
        oldest = self._ports.now() - self._rejection_age_s_max
        log = self._store.log(conversation_id)
        self._check_owner(conversation_id, log, epoch, len(log.records) + 1)
        check_epoch(conversation_id, epoch=epoch, found_epoch=log.epoch, head=len(log.records))
        kept = [one for one in log.rejections if one.at >= oldest]
        log.rejections = sorted((*kept, *checked), key=lambda one: one.at)
        await self._pause()

    async def rejections(self, conversation_id: str) -> Sequence[Rejection]:
        self._refuse_if_left()
        check_asked(conversation_id)
        rejections = tuple(self._store.log(conversation_id).rejections)
        await self._pause()
        return rejections

    async def write_snapshot(self, conversation_id: str, snapshot: Snapshot, *, epoch: int) -> None:
        self._refuse_if_left()
        check_asked(conversation_id)
        check_snapshot(snapshot)
        log = self._store.written_log(conversation_id)
        self._check_owner(conversation_id, log, epoch, snapshot.seq)
        _check_log("snapshot", conversation_id, log, snapshot.seq, epoch)
        log.snapshot = snapshot
        await self._pause()

    async def read_snapshot(self, conversation_id: str) -> Snapshot | None:
        self._refuse_if_left()
        check_asked(conversation_id)
        snapshot = self._store.written_log(conversation_id).snapshot
        await self._pause()
        return snapshot

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
        if not records:
            raise ValueError("a fork without records of its own")
        check_asked(conversation_id)
        check_records(records)
        self._refuse_if_left()
        await check_new_name(self, fork_id)
        parent = self._store.written_log(conversation_id)
        if not 1 <= at <= len(parent.records):
            raise RecordNotFound(conversation_id, at, len(parent.records))
        if at_event_id not in (None, parent.records[at - 1].event_id):
            raise ConversationDeleted(conversation_id)
        child = self._store.log(fork_id)
        logs = ((parent, at), *parent.prefix)
        bases = (*(upto for _, upto in parent.prefix), 0)
        prefix = tuple(
            (log, min(upto, at)) for (log, upto), base in zip(logs, bases, strict=True) if base < at
        )
        if child.records:
            own = [stored[2:] for stored in child.records[at : at + len(records)]]
            if child.prefix != prefix or own != list(records):
                raise ConversationExists(fork_id, len(child.records))
        else:
            shared = list(parent.records[:at])
            begun = _Log(max(child.epoch, parent.epoch) + 1, self, shared)
            begun.prefix = prefix
            begun.seq_by_event_id = {record.event_id: record.seq for record in shared}
            begun.seq_by_message_id = {
                record.message_id: record.seq for record in shared if record.message_id is not None
            }
            events, messages = begun.known(records)
            if events:
                raise EventIdConflict(fork_id, events)
            check_ids(fork_id, records, at + 1, messages)
            begun.add(records, is_unfinished=is_unfinished, listing=listing, now=self._ports.now())
            self._store.replace(fork_id, begun)
            child = begun
        claim = Claim(child.epoch, len(child.records))
        await self._pause()
        return claim

    async def delete(self, conversation_id: str, *, epoch: int) -> Deletion:
        self._refuse_if_left()
        check_asked(conversation_id)
        log = self._store.written_log(conversation_id)
        self._check_owner(conversation_id, log, epoch, len(log.records) + 1)
        check_deletion(conversation_id, epoch=epoch, found_epoch=log.epoch, head=len(log.records))
        needed = {
            name: upto
            for name, fork in sorted(self._store.logs().items())
            for of, upto in fork.prefix
            if of is log
        }
        deletion = Deletion(max(needed.values(), default=0), tuple(needed), is_erased=True)
        self._store.replace(conversation_id, _Log(log.epoch + 1, self))
        await self._pause()
        return deletion

    async def release(self, conversation_id: str, *, epoch: int) -> None:
        self._refuse_if_left()
        check_asked(conversation_id)
        log = self._store.log(conversation_id)
        if log.owner is self and log.epoch == epoch:
            log.owner = None
        await self._pause()

    async def wait_for_more(self, conversation_id: str, *, after: int) -> None:
        check_asked(conversation_id)
        while len(self._store.log(conversation_id).records) == after:
            self._refuse_if_left()
            await self._store.wait_for_move(conversation_id)

    def _refuse_if_left(self) -> None:
        if not self._is_entered:
            raise JournalRefused("this memory journal is not open; nothing was done")
        if not self._is_home():
            raise RuntimeError(
                "the memory journal was called from another thread than its event loop's, or in "
                "another event loop than the one it was entered in; nothing was done; in other "
                "threads, and in loops that run there, use runtime.portal()"
            )


class _Message(NamedTuple):
    number: int
    name: str
    log: _Log
    record: StoredRecord
    said: Said
    left: int


def _messages(logs: Mapping[str, _Log]) -> list[_Message]:
    """Return the chat messages of all logs, each in the log it was written to, the newest first."""
    found: list[_Message] = []
    for name, log in logs.items():
        own = log.records[log.forked_at :]
        left: dict[str, int] = {}
        for record in own:
            if record.kind in LEFT:
                for event_id in left_ids(record.kind, record.payload):
                    left[event_id] = max(left.get(event_id, 0), LEFT[record.kind])
        for record in own:
            said = find_said(record.kind, record.payload)
            if said is not None:
                number = message_number(said.at_us, record.seq)
                how = left.get(record.event_id, 0)
                found.append(_Message(number, name, log, record, said, how))
    found.sort(key=lambda one: (one.number, one.name))
    last = -1
    for at, one in enumerate(found):
        last = max(last + 1, one.number)
        found[at] = one._replace(number=last)
    return found[::-1]


def _is_match(one: _Message, query: SearchQuery) -> bool:
    if query.owner not in {None, one.log.listing.owner}:
        return False
    words = words_of(one.said.text)
    return set(query.words).issubset(words) and (
        not query.begins or any(word.startswith(query.begins) for word in words)
    )


def _is_shown(listing: Listing, query: SearchQuery) -> bool:
    return query.status in {None, listing.status} and (
        query.label is None or listing.labels.get(query.label[0]) == query.label[1]
    )


def _shown(query: SearchQuery, one: _Message) -> FoundMessage:
    record = one.record
    return found_message(
        query,
        one.name,
        record.seq,
        record.event_id,
        one.said,
        number=one.number,
        left=one.left,
    )


def _key(name: str, listing: Listing, query: ListQuery) -> tuple[str | int, ...]:
    match query.order:
        case "id":
            return (name,)
        case "created":
            return (listing.created_us, name)
        case "activity":
            return (listing.active_us, name)


def _check_log(what: str, conversation_id: str, log: _Log, seq: int, epoch: int) -> None:
    """Raise unless this snapshot or listing was folded from this log."""
    head = len(log.records)
    check_place(what, conversation_id, seq, epoch=epoch, found_epoch=log.epoch, head=head)
    place = telling_seq(seq, forked_at=log.forked_at, head=head)
    found_epoch = log.records[place - 1].epoch
    check_snapshot_epoch(conversation_id, seq, epoch=epoch, found_epoch=found_epoch, head=head)


def _info(conversation_id: str, log: _Log) -> ConversationInfo:
    return ConversationInfo(
        conversation_id, len(log.records), log.epoch, log.is_unfinished, log.updated_at
    )
