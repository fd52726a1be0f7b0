"""An operator's tools for a journal: verify it, repair it.

`verify` and `repair` work on a file and block their caller. `verify` runs beside the processes that
use the file; `repair` needs the file to itself. `verify_logs` reads any journal through its port.
Returning free space to the disk and deleting are methods of the journal (`SQLiteJournal.vacuum`,
`Journal.delete`). Moving conversations between journals is in `transfer`.

A verification always checks checksums and chains. Pass it `check_folds` and `check_event` to check
the meaning of the records too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from ..core.records import decode_record
from ..core.state import ColdLoad, Folded
from ..errors import ConversationNotFound, CorruptLog
from ..journal import READ_PAGE, Journal, Listing, ListQuery, LogPages, Snapshot, StoredRecord
from .listings import ListingOfLog, reindex
from .shared.searching import LogWords
from .sqlite.repair import Loss, Repair, repair
from .sqlite.verify import CheckListing, CheckRecord, CheckSnapshot, Problem, Verification, verify

__all__ = [
    "CheckListing",
    "CheckRecord",
    "CheckSnapshot",
    "Loss",
    "Problem",
    "Repair",
    "Verification",
    "check_event",
    "check_folds",
    "check_listing",
    "reindex",
    "repair",
    "verify",
    "verify_logs",
]


def check_event(conversation_id: str, record: StoredRecord) -> str | None:
    """Return the problem if a record does not hold an event of its kind, or None."""
    try:
        decode_record(conversation_id, record)
    except CorruptLog as error:
        return error.found
    return None


def check_folds(
    conversation_id: str, snapshot: Snapshot, records: Iterator[StoredRecord]
) -> str | None:
    """Return the problem if a snapshot does not equal the folds of its log, or None.

    A snapshot of another version is not a problem: every reader ignores it.
    """
    kept = Folded.from_snapshot(snapshot)
    if kept is None:
        return None
    load = ColdLoad()
    try:
        for record in records:
            load.fold(decode_record(conversation_id, record).event)
    except CorruptLog:
        return None  # reported as a problem of the log
    folded, _ = load.finish()
    return None if folded == kept else "its snapshot is not the folds of its log"


def check_listing(
    conversation_id: str, listing: Listing, records: Iterator[StoredRecord]
) -> str | None:
    """Return the problem if a listing does not equal the fold of its log up to there, or None."""
    log = ListingOfLog(conversation_id)
    log.add(list(records))
    found = log.listing
    return None if found in (None, listing) else "its row in lists is not the fold of its log"


@runtime_checkable
class _HasWords(Protocol):
    """A journal whose search index is compared with the logs too."""

    async def words_of(self, conversation_id: str) -> LogWords | None: ...
    async def words_of_none(self) -> Sequence[int]: ...


async def verify_logs(
    journal: Journal,
    *,
    check_listing: CheckListing | None = None,
    check_snapshot: CheckSnapshot | None = None,
    check_record: CheckRecord | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> Verification:
    """Check every log of a journal by reading it, beside the processes that use it.

    `check_snapshot`, `check_record`, `check_listing` and `on_progress` are as for `verify`. In
    PostgreSQL the search index is compared with the logs, as far as they have been indexed.
    """
    checks = _Checks(check_listing, check_snapshot, check_record)
    infos = await journal.list()
    listings, stale = await _listings(journal)
    checked: dict[str, _Checked] = {}
    for done, info in enumerate(infos):
        on_progress(done, len(infos))
        name = info.conversation_id
        checked[name] = await checks.check(journal, name, listings.get(name))
    # The parts of a log are read one after the other. If it was deleted and begun anew in between,
    # they do not fit each other. So a log with a problem is read again, and that reading counts.
    suspects = [name for name, one in checked.items() if one.problems]
    if suspects:
        listings, _ = await _listings(journal)
        for name in suspects:
            checked[name] = await checks.check(journal, name, listings.get(name))
    problems = [problem for one in checked.values() for problem in one.problems]
    if isinstance(journal, _HasWords):
        found_none = "log {} has words in the index, but no conversation"
        problems += [
            Problem(None, 0, found_none.format(log)) for log in await journal.words_of_none()
        ]
    on_progress(len(infos), len(infos))
    there = [one.records for one in checked.values() if one.records is not None]
    return Verification(len(there), sum(there), tuple(problems), stale)


class _Checked(NamedTuple):
    """One reading of a log."""

    records: int | None
    """How many could be read; None if there is no such log any more."""
    problems: Sequence[Problem]


@dataclass(frozen=True, slots=True)
class _Checks:
    """The further checks of a verification."""

    listing: CheckListing | None
    snapshot: CheckSnapshot | None
    record: CheckRecord | None

    async def check(self, journal: Journal, name: str, listing: Listing | None) -> _Checked:
        """Read a log and the data derived from it, and compare them."""
        records: list[StoredRecord] = []
        problems: list[Problem] = []
        words: LogWords | None = None
        try:
            # Read before the records: later records may not be in this reading of the index.
            if isinstance(journal, _HasWords):
                words = await journal.words_of(name)
            snapshot = await journal.read_snapshot(name)
            async for page in LogPages(journal, name):
                records += page
        except CorruptLog as error:
            problems.append(Problem(name, error.seq, error.found))
            snapshot = words = None
        except ConversationNotFound:
            return _Checked(None, ())  # deleted meanwhile
        if words is not None:
            problems += _problems_of_words(name, words, records)
        for record in records:
            found = self.record(name, record) if self.record else None
            if found is not None:
                problems.append(Problem(name, record.seq, found))
        if snapshot is not None and self.snapshot is not None:
            found = self.snapshot(name, snapshot, iter(records[: snapshot.seq]))
            if found is not None:
                problems.append(Problem(name, snapshot.seq, found))
        if listing is not None and listing.seq and self.listing is not None:
            found = self.listing(name, listing, iter(records[: listing.seq]))
            if found is not None:
                problems.append(Problem(name, listing.seq, found))
        return _Checked(len(records), problems)


def _problems_of_words(
    name: str, words: LogWords, records: Sequence[StoredRecord]
) -> Iterator[Problem]:
    """Yield the differences between a search index and its log; the log decides."""
    for record in records:
        if (found := words.add(record)) is not None:
            yield Problem(name, record.seq, found)
    if (at := words.end()) is not None:
        yield Problem(name, at[0], at[1])


async def _listings(journal: Journal) -> tuple[Mapping[str, Listing], tuple[str, ...]]:
    """Return the listings of a journal by conversation, and the names of those that are stale."""
    listings: dict[str, Listing] = {}
    stale: list[str] = []
    query = ListQuery(READ_PAGE)
    while True:
        page = await journal.page(query)
        for row in page.rows:
            listings[row.conversation_id] = row.listing
            if row.is_stale:
                stale.append(row.conversation_id)
        if page.next is None:
            return listings, tuple(stale)
        query = query._replace(after=page.next)
