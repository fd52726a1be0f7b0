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
from .sqlite.verify import (
    CheckListing,
    CheckRecord,
    CheckSnapshot,
    LogCheck,
    Problem,
    Verification,
    verify,
)

__all__ = [
    "CheckListing",
    "CheckRecord",
    "CheckSnapshot",
    "LogCheck",
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


def check_folds(conversation_id: str, snapshot: Snapshot) -> LogCheck:
    """Return the check of whether a snapshot equals the folds of its log.

    The owner that wrote it may have had any `Limits`. A snapshot of another version is not a
    problem: every reader ignores it.
    """
    return _FoldsCheck(conversation_id, snapshot)


class _FoldsCheck:
    def __init__(self, conversation_id: str, snapshot: Snapshot) -> None:
        self._conversation_id = conversation_id
        self._kept = Folded.from_snapshot(snapshot)
        self._load = None if self._kept is None else ColdLoad()

    def add(self, record: StoredRecord) -> None:
        if self._load is not None:
            try:
                self._load.fold(decode_record(self._conversation_id, record).event)
            except CorruptLog:
                self._load = None  # reported as a problem of the log

    def end(self) -> str | None:
        if self._load is None:
            return None
        folded, _ = self._load.finish()
        agrees = self._kept is not None and folded.agrees_with(self._kept)
        return None if agrees else "its snapshot is not the folds of its log"


def check_listing(conversation_id: str, listing: Listing) -> LogCheck:
    """Return the check of whether a listing equals the fold of its log up to there."""
    return _ListingCheck(conversation_id, listing)


class _ListingCheck:
    def __init__(self, conversation_id: str, listing: Listing) -> None:
        self._listing = listing
        self._log = ListingOfLog(conversation_id)

    def add(self, record: StoredRecord) -> None:
        self._log.add((record,))

    def end(self) -> str | None:
        found = self._log.listing
        return (
            None
            if found in (None, self._listing)
            else "its row in lists is not the fold of its log"
        )


@runtime_checkable
class _HasTables(Protocol):
    """A journal whose tables are looked at too: PostgreSQL's."""

    async def words_of(self, conversation_id: str) -> LogWords | None: ...
    async def words_of_none(self) -> Sequence[int]: ...
    async def records_of_none(self) -> Sequence[int]: ...


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
    PostgreSQL the search index is compared with the logs, as far as they have been indexed, and it
    finds records that belong to no conversation.
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
    if isinstance(journal, _HasTables):
        found = [
            f"log {log} has words in the index, but no conversation"
            for log in await journal.words_of_none()
        ]
        found += [
            f"log {log} belongs to no conversation: the row with its name is missing"
            for log in await journal.records_of_none()
        ]
        problems += [Problem(None, 0, one) for one in found]
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
        count = 0
        problems: list[Problem] = []
        words: LogWords | None = None
        checks: list[tuple[int, LogCheck]] = []
        try:
            # Read before the records: later records may not be in this reading of the index.
            if isinstance(journal, _HasTables):
                words = await journal.words_of(name)
            snapshot = await journal.read_snapshot(name)
            if snapshot is not None and self.snapshot is not None:
                checks.append((snapshot.seq, self.snapshot(name, snapshot)))
            if listing is not None and listing.seq and self.listing is not None:
                checks.append((listing.seq, self.listing(name, listing)))
            async for page in LogPages(journal, name):
                count += len(page)
                for record in page:
                    problems += self._problems_of(name, record, words)
                    for upto, check in checks:
                        if record.seq <= upto:
                            check.add(record)
        except CorruptLog as error:
            # The rest of the log was not compared with anything.
            problems.append(Problem(name, error.seq, error.found))
            return _Checked(count, problems)
        except ConversationNotFound:
            return _Checked(None, ())  # deleted meanwhile
        if words is not None and (at := words.end()) is not None:
            problems.append(Problem(name, at[0], at[1]))
        for upto, check in checks:
            if (found := check.end()) is not None:
                problems.append(Problem(name, upto, found))
        return _Checked(count, problems)

    def _problems_of(
        self, name: str, record: StoredRecord, words: LogWords | None
    ) -> Iterator[Problem]:
        """Yield the problems of a record, and its differences from the search index."""
        if words is not None and (found := words.add(record)) is not None:
            yield Problem(name, record.seq, found)
        if self.record is not None and (found := self.record(name, record)) is not None:
            yield Problem(name, record.seq, found)


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
