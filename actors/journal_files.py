"""What an operator does to a journal: verify it, repair it.

`verify` and `repair` are for a file and run in the caller's thread; the first reads beside whoever
uses it, the second needs it to itself. `verify_logs` reads any journal through its port. Giving
room back and deleting are methods of the journal (`SQLiteJournal.vacuum`, `Journal.delete`), and
moving conversations between journals is in `transfer`.

Checksums and chains are the journal's own and always checked. `check_folds` and `check_event` look
at what the records mean, and are given to a verification by those who want that too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ._records import logged_event
from ._sqlite_repair import Loss, Repair, repair
from ._sqlite_verify import CheckRecord, CheckSnapshot, Problem, Verification, verify
from .errors import ConversationNotFound, CorruptLog
from .journal import Journal, Snapshot, StoredRecord
from .state import ColdLoad, ConversationState

__all__ = [
    "CheckRecord",
    "CheckSnapshot",
    "Loss",
    "Problem",
    "Repair",
    "Verification",
    "check_event",
    "check_folds",
    "repair",
    "verify",
    "verify_logs",
]

_PAGE = 512


def check_event(conversation_id: str, record: StoredRecord) -> str | None:
    """What is wrong with a record that holds no event, or not the one that it is named as."""
    try:
        logged_event(conversation_id, record)
    except CorruptLog as error:
        return error.found
    return None


def check_folds(
    conversation_id: str, snapshot: Snapshot, records: Iterator[StoredRecord]
) -> str | None:
    """What is wrong with a snapshot that is not the folds of its log.

    One of another version is ignored by everybody, and so it is here.
    """
    kept = ConversationState.from_snapshot(snapshot, conversation_id=conversation_id)
    if kept is None:
        return None
    load = ColdLoad()
    try:
        for record in records:
            load.fold(logged_event(conversation_id, record).event)
    except CorruptLog:
        return None  # found as such
    folded, _ = load.finish()
    return None if folded == kept else "its snapshot is not the folds of its log"


async def verify_logs(
    journal: Journal,
    *,
    check_snapshot: CheckSnapshot | None = None,
    check_record: CheckRecord | None = None,
    on_progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> Verification:
    """Check every log of a journal by reading it, beside whoever uses it."""
    problems: list[Problem] = []
    seen = conversations = 0
    infos = await journal.list()
    for done, info in enumerate(infos):
        on_progress(done, len(infos))
        name = info.conversation_id
        records: list[StoredRecord] = []
        try:
            snapshot = await journal.read_snapshot(name)
            while page := await journal.read(name, after=len(records), limit=_PAGE):
                records += page
        except CorruptLog as error:
            problems.append(Problem(name, error.seq, error.found))
            snapshot = None
        except ConversationNotFound:
            continue  # deleted meanwhile
        conversations += 1
        seen += len(records)
        for record in records:
            found = check_record(name, record) if check_record else None
            if found is not None:
                problems.append(Problem(name, record.seq, found))
        if snapshot is not None and check_snapshot is not None:
            found = check_snapshot(name, snapshot, iter(records[: snapshot.seq]))
            if found is not None:
                problems.append(Problem(name, snapshot.seq, found))
    on_progress(len(infos), len(infos))
    return Verification(conversations, seen, tuple(problems))
