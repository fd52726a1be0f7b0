"""The journal commands' access to a journal: they open, read and write it, and show progress."""

from __future__ import annotations

import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from turnkeeper.runtime import OwnershipLost, Ports

from ..core.listing import ListedConversation, page_of
from ..core.records import decode_record
from ..errors import (
    ConversationExists,
    ConversationNotFound,
    CorruptLog,
    EventIdConflict,
    ImportRefused,
    InvalidInput,
    MessageIdConflict,
    OwnedElsewhere,
)
from ..events import Event, LoggedEvent
from ..journal import READ_PAGE, ConversationInfo, Deletion, Journal, ListQuery, Rejection
from ..journals.files import Verification, check_event, check_folds, check_listing
from ..journals.files import reindex as reindex_journal
from ..journals.files import verify_logs as verify_journal
from ..journals.postgres.journal import PostgresJournal
from ..journals.sqlite.journal import SQLiteJournal
from ..journals.transfer import (
    LINE_LENGTH_MAX,
    delete_unchanged,
    export_lines,
    has_records,
    import_parts,
)
from ..owner.loading import load_state
from ..recordings.importing import import_recorded
from ..recordings.peers import PEERS, read_peer
from ..recordings.transcripts import Parsed, parse_recorded
from ._error_lines import error_line
from ._exits import handling_signals
from ._naming import conversation_names

__all__ = [
    "LEASE_S",
    "DeleteResult",
    "ImportResult",
    "delete_all",
    "export",
    "export_chats",
    "export_to",
    "import_all",
    "is_other_file",
    "is_url",
    "list_all",
    "list_rows",
    "list_to_write",
    "open_journal",
    "progress",
    "read",
    "read_view",
    "reindex",
    "rejections",
    "vacuum",
    "verify_logs",
    "was_url",
    "write_whole",
]


_URLS = ("postgresql://", "postgres://")
LEASE_S = 15.0
"""The lease of a process in a database, by default."""
_OWNER_WAIT_S = 1.0
"""Seconds that a command waits for another process to close a file, before it gives up."""
CHATS_BYTES_MAX = 1 << 30
"""The largest size of a file of recorded chats, which is read into memory as a whole."""
_EXPORT_BEGINS = b'{"turnkeeper_export"'
_SQLITE_BEGINS = b"SQLite format 3\0"

OnProgress = Callable[[int, int], None]


def is_url(db: str) -> bool:
    return db.startswith(_URLS)


def was_url(path: Path) -> bool:
    """True if this was given as a URL, in quotes or not: a path keeps one slash of two.

    It may hold a password, so it is not to be quoted.
    """
    return len(path.parts) > 1 and path.parts[0].endswith(":")


def is_other_file(db: str) -> bool:
    """True if there is a file at this path that is no SQLite database."""
    if is_url(db) or not Path(db).is_file():
        return False
    with suppress(OSError), Path(db).open("rb") as file:
        return file.read(len(_SQLITE_BEGINS)) not in (b"", _SQLITE_BEGINS)
    return False


def open_journal(
    db: str,
    schema: str,
    *,
    read_only: bool,
    search: bool = False,
    address: str | None = None,
    lease_s: float = LEASE_S,
    owner_wait_s: float = _OWNER_WAIT_S,
) -> SQLiteJournal | PostgresJournal:
    """Return the journal at this path or URL, not entered yet.

    `search`: keep an index of words, or, with `read_only`, search the index if there is one.
    `address` and `lease_s`: for a database, this process's address and lease. `owner_wait_s`: for a
    file, how long entering waits for another process to close it.
    """
    if not is_url(db):
        return SQLiteJournal(db, read_only=read_only, search=search, owner_wait_s=owner_wait_s)
    return PostgresJournal(
        db, schema=schema, read_only=read_only, search=search, address=address, lease_s=lease_s
    )


@contextmanager
def progress(noun: str) -> Iterator[OnProgress]:
    """Show a progress bar on standard error if that is a terminal, and clear it at the end."""
    console = Console(stderr=True)
    bar = Progress(
        MofNCompleteColumn(),
        TextColumn(noun),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=None)

        def on_progress(done: int, of: int) -> None:
            bar.update(task, completed=done, total=of)

        yield on_progress


# --- reading --------------------------------------------------------------------------------------


async def list_all(db: str, schema: str) -> Sequence[ConversationInfo]:
    async with open_journal(db, schema, read_only=True) as journal:
        return await journal.list()


async def list_rows(db: str, schema: str) -> Sequence[ListedConversation]:
    """Return all conversations as lists show them, by id."""
    rows: list[ListedConversation] = []
    query = ListQuery(READ_PAGE)
    async with open_journal(db, schema, read_only=True) as journal:
        while True:
            page = await journal.page(query)
            rows += page_of(page, query).rows
            if page.next is None:
                return rows
            query = query._replace(after=page.next)


async def rejections(db: str, schema: str, conversation_id: str) -> Sequence[Rejection]:
    """Return the events of a conversation that admission refused."""
    async with open_journal(db, schema, read_only=True) as journal:
        return await journal.rejections(conversation_id)


async def read(
    db: str, schema: str, conversation_id: str
) -> tuple[Sequence[LoggedEvent], str | None]:
    """Return a log as far as it can be read, and the reason if it cannot be read further."""
    log: list[LoggedEvent] = []
    limit = READ_PAGE
    async with open_journal(db, schema, read_only=True) as journal:
        while True:
            try:
                records = await journal.read(conversation_id, after=len(log), limit=limit)
                # One by one, to keep the events before an unreadable one.
                log.extend(decode_record(conversation_id, record) for record in records)
            except CorruptLog as error:
                # Read smaller and smaller pages, to get all whole records before the damage.
                if limit == 1:
                    return log, str(error)
                limit = max(1, limit // 8)
            else:
                if not records:
                    return log, None


async def read_view(db: str, schema: str, conversation_id: str, seq: int) -> Sequence[Event]:
    """Return the view of the model at a seq of the log."""
    async with open_journal(db, schema, read_only=True) as journal:
        state, _ = await load_state(journal, conversation_id, seq)
        return tuple(state.view)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all, as `_opened_whole` does."""
    with _opened_whole(path) as file:
        file.write(text)


@contextmanager
def _opened_whole(path: Path) -> Iterator[TextIO]:
    """Open a file that is written whole or not at all: as a draft, which then replaces the file.

    A symbolic link stays, and the file that it leads to is replaced. A pipe or a device cannot be
    replaced, so it is written to at once. The file keeps its permissions. Each call has a draft of
    its own, so of two that write the same file at once, the later one to end has its file there,
    whole. Only a process that is killed, or a crash of the system, leaves a draft behind.
    """
    is_file = path.is_file() or not path.exists()
    place = Path(os.path.realpath(path)) if is_file else path
    own = f"{Ports().random.getrandbits(32):08x}"
    # Of 60 characters of the name, since a file's name may have 255 bytes.
    draft = place.with_name(f"{place.name[:60]}.{own}.part") if is_file else place
    try:
        with _removed_by_signals(draft) if is_file else nullcontext():
            with draft.open("x" if is_file else "w", encoding="utf-8", newline="\n") as file:
                if is_file and place.exists():
                    shutil.copymode(place, draft)
                yield file
                file.flush()
                if is_file:
                    os.fsync(file.fileno())
            if is_file:
                draft.replace(place)
    except BaseException as error:
        if is_file:
            draft.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename in (None, str(draft)):
                error.filename = str(path)  # the file that the user named, and not the draft
        raise


@contextmanager
def _removed_by_signals(draft: Path) -> Iterator[None]:
    """Remove a draft if a signal ends this process without leaving any block, as Ctrl-C would."""

    def end(number: int, _: object) -> None:
        draft.unlink(missing_ok=True)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    with handling_signals(end):
        yield


async def verify_logs(db: str, schema: str, on_progress: OnProgress) -> Verification:
    async with open_journal(db, schema, read_only=True) as journal:
        return await verify_journal(
            journal,
            check_snapshot=check_folds,
            check_record=check_event,
            check_listing=check_listing,
            on_progress=on_progress,
        )


async def export(
    db: str, schema: str, names: Sequence[str], write: Callable[[str], object]
) -> tuple[int, int]:
    """Export conversations; return the numbers of conversations and of events."""
    conversations = events = 0
    async with open_journal(db, schema, read_only=True) as journal:
        with progress("conversations") as on_progress:
            async for line in export_lines(journal, names or None, on_progress=on_progress):
                write(f"{line}\n")
                conversations += line.startswith('{"conversation":')
                events += line.startswith('{"seq":')
    return conversations, events


async def export_chats(
    db: str, schema: str, names: Sequence[str], take: Callable[[str, Sequence[LoggedEvent]], object]
) -> tuple[int, int]:
    """Hand each of these conversations to a function; return their number and their events'."""
    events = 0
    chosen = names or [info.conversation_id for info in await list_all(db, schema)]
    for name in chosen:
        log, unreadable = await read(db, schema, name)
        if unreadable is not None:
            raise CorruptLog(name, len(log) + 1, "it cannot be read to its end")
        take(name, log)
        events += len(log)
    return len(chosen), events


async def export_to(db: str, schema: str, names: Sequence[str], output: Path) -> tuple[int, int]:
    """Export into a file, which is written whole or not at all; return the same as `export`."""
    with _opened_whole(output) as file:
        return await export(db, schema, names, file.write)


# --- writing --------------------------------------------------------------------------------------


@dataclass(slots=True)
class ImportResult:
    """The outcome of an import."""

    conversations: int = 0
    events: int = 0
    """The events that the journal did not have yet."""
    problems: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Warnings: the parts that were left out of conversations that were imported."""
    unreadable: list[str] = field(default_factory=list)
    """The events that were imported as they are, and cannot be read."""


async def import_all(
    db: str,
    schema: str,
    files: Sequence[Path],
    result: ImportResult,
    *,
    keep_users: bool,
    source: str | None,
) -> None:
    """Import these files; report files that cannot be used as problems.

    `source` is the program that wrote them; by default they are exports or chats. `result` tells of
    what is imported, also if an error ends it before the rest.
    """
    peer = None if source is None else PEERS.get(source)
    if peer is not None:
        parsed = [read_peer(peer, path) for path in files]
        await _import_into(db, schema, files, parsed, result)
        return
    chats: list[Path] = []
    exports: list[Path] = []
    for path in files:
        try:
            # A file is read twice, and opening a pipe without a writer would wait forever.
            if not stat.S_ISREG(path.stat().st_mode):
                result.problems.append(f"{path}: cannot be read: it is not a regular file")
                continue
            with path.open("rb") as file:
                begin = file.read(len(_EXPORT_BEGINS))
        except OSError as error:
            result.problems.append(f"{path}: cannot be read: {error.strerror}")
            continue
        if begin.startswith(_SQLITE_BEGINS):
            found = "it is a SQLite database"
            if source is not None:
                found += f", and --from {source} reads JSON"
            result.problems.append(
                f"{path}: {found}; name the program that wrote it with --from; if it is a journal "
                "of turnkeeper, import what `turnkeeper export` writes of it"
            )
        elif source is None and begin == _EXPORT_BEGINS:
            exports.append(path)
        elif path.stat().st_size > CHATS_BYTES_MAX:
            result.problems.append(
                f"{path}: it has more than {CHATS_BYTES_MAX:,} bytes; split it into several files"
            )
        else:
            chats.append(path)
    # Only for files with something to import is a journal created.
    sound: list[Path] = []
    for path in exports:
        with _noting_problems(path, result), path.open(encoding="utf-8", newline="\n") as lines:
            if await has_records(_tracked(lines, path, lambda _done, _of: None)):
                sound.append(path)
    if sound:
        async with open_journal(db, schema, read_only=False) as journal:
            for path in sound:
                await _import_export(journal, path, result, keep_users=keep_users)
    parsed = [parse_recorded(path.read_bytes(), str(path)) for path in chats]
    await _import_into(db, schema, chats, parsed, result)


async def _import_into(
    db: str, schema: str, files: Sequence[Path], parsed: Sequence[Parsed], result: ImportResult
) -> None:
    """Write what could be read from each file; without any of it, create no journal."""
    _note(parsed, result)
    if any(one.conversations for one in parsed):
        async with open_journal(db, schema, read_only=False) as journal:
            await _import_parsed(journal, files, parsed, result)


@contextmanager
def _noting_problems(path: Path, result: ImportResult) -> Iterator[None]:
    try:
        yield
    except (
        ConversationExists,
        EventIdConflict,
        ImportRefused,
        InvalidInput,
        MessageIdConflict,
        OwnershipLost,
    ) as error:
        result.problems.append(f"{path}: {error_line(error)}")
    except (OSError, UnicodeDecodeError) as error:
        result.problems.append(f"{path}: cannot be read: {error}")


async def _import_export(
    journal: Journal, path: Path, result: ImportResult, *, keep_users: bool
) -> None:
    with (
        _noting_problems(path, result),
        path.open(encoding="utf-8", newline="\n") as lines,
        progress("bytes") as on_progress,
    ):
        tracked = _tracked(lines, path, on_progress)
        async for part in import_parts(journal, tracked, keep_users=keep_users):
            result.conversations += part.conversations
            result.events += part.records
            result.unreadable += [
                f"{path}: {name}, seq {seq}: the record is no {kind} event"
                for name, seq, kind in part.unreadable
            ]


def _tracked(lines: TextIO, path: Path, on_progress: OnProgress) -> Iterator[str]:
    size, at = path.stat().st_size, 0
    # A file without line ends would be read into memory whole.
    while line := lines.readline(LINE_LENGTH_MAX + 1):
        at += len(line.encode())
        on_progress(at, size)
        yield line


def _note(parsed: Sequence[Parsed], result: ImportResult) -> None:
    for one in parsed:
        result.problems += [str(problem) for problem in one.problems]
        result.left_out += one.left_out


async def _import_parsed(
    journal: Journal, files: Sequence[Path], parsed: Sequence[Parsed], result: ImportResult
) -> None:
    """Write the conversations that could be read from each file."""
    found = [(n, one) for n, of_file in enumerate(parsed) for one in of_file.conversations]
    names = conversation_names(found, files)
    with progress("conversations") as on_progress:
        for done, (name, (_, recorded)) in enumerate(zip(names, found, strict=True)):
            on_progress(done, len(found))
            try:
                imported = await import_recorded(journal, name, recorded)
            except (ConversationExists, OwnershipLost) as error:
                result.problems.append(error_line(error))
            else:
                result.conversations += 1
                result.events += imported.records


async def list_to_write(db: str) -> Sequence[ConversationInfo]:
    """Return the conversations of a file; raise if this process cannot write to it now."""
    async with SQLiteJournal(db, owner_wait_s=_OWNER_WAIT_S) as journal:
        return await journal.list()


async def vacuum(db: str) -> int:
    async with SQLiteJournal(db, owner_wait_s=_OWNER_WAIT_S) as journal:
        return await journal.vacuum()


async def reindex(db: str, schema: str) -> tuple[int, Sequence[str]]:
    """Rewrite the listings that are stale; return the same as `files.reindex`."""
    async with open_journal(db, schema, read_only=False) as journal:
        with progress("conversations") as on_progress:
            return await reindex_journal(journal, on_progress=lambda done: on_progress(done, done))


@dataclass(slots=True)
class DeleteResult:
    """The deletions, and the reasons why others were not made."""

    deleted: dict[str, Deletion] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    in_work: str | None = None
    """The conversation whose deletion had begun when all was interrupted."""


async def delete_all(
    db: str, schema: str, infos: Sequence[ConversationInfo], result: DeleteResult
) -> None:
    """Delete these conversations, unless they changed since they were listed.

    `result` tells of those that are done, also if an error or Ctrl-C ends it before the rest.
    """
    if not infos:
        return
    async with open_journal(db, schema, read_only=False) as journal:
        with progress("conversations") as on_progress:
            for done, info in enumerate(infos):
                on_progress(done, len(infos))
                name = result.in_work = info.conversation_id
                try:
                    deletion = await delete_unchanged(journal, info)
                    if deletion is None:
                        result.problems.append(f"{name}: it has new events since it was listed")
                    else:
                        result.deleted[name] = deletion
                except ConversationNotFound:
                    result.problems.append(f"{name}: another process has deleted it")
                except (OwnedElsewhere, CorruptLog) as error:
                    result.problems.append(error_line(error))
                result.in_work = None
