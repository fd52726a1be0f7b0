"""Export conversations from a journal, and import them into another, as JSON Lines.

This module owns the format. An export is one header line, then for each conversation a line about
it, its records in order, and its rejected events:

    {"turnkeeper_export": 1}
    {"conversation": "alice", "head": 2, "is_unfinished": false}
    {"seq": 1, "event_id": "0199…", "kind": "user_message", "message_id": "m1", "event": {…}}
    {"seq": 2, "event_id": "0199…", "kind": "agent_message", "event": {…}}
    {"rejected_at": 1759400000.0, "violation": "…", "reason": "…", "event": {…}}

An export has everything that makes up a conversation: ids, order, kinds, and each event byte for
byte. `"event"` is the stored JSON itself; if that is not one line of UTF-8, there is
`"event_base64"` instead. Exporting an imported conversation gives the same lines, except for the
users of conversations: an import drops these unless `keep_users` is set. An export leaves out what
belongs to the journal and not to the conversation: epochs, times of writing, snapshots, and the
sharing of prefixes between forks.

Both directions run beside the processes that use the journals. An export has each conversation as
of the moment when it read the conversation's head. Run an interrupted import again: it continues.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import (
    ConversationDeleted,
    ConversationExists,
    ConversationNotFound,
    ImportRefused,
)
from ..events import CHANGE_KIND, decode_event
from ..journal import (
    ConversationInfo,
    Deletion,
    Journal,
    LogPages,
    Record,
    Rejection,
    StoredRecord,
)
from ..values.text import check_bool
from .listings import ListingOfLog
from .memory import MemoryJournal
from .shared.limits import PAYLOAD_BYTES_MAX

__all__ = [
    "LINE_LENGTH_MAX",
    "Imported",
    "Unreadable",
    "delete_unchanged",
    "export_lines",
    "has_records",
    "import_lines",
    "import_parts",
]

LINE_LENGTH_MAX = PAYLOAD_BYTES_MAX // 2 * 3
"""The most characters that one line of an import may have."""

_FORMAT = 1
_APPENDED_AT_ONCE = 256
_APPENDED_BYTES = 8 << 20
"""An append ends with the record that brings its payloads to this size: PostgreSQL takes less than
1 GiB in a statement, and files of some MiB are usual."""
_PAGE_BYTES = 512 << 10
"""The bytes of a page of an export: an export that waits for its reader holds one."""
_TIME_MAX = 253_402_300_800.0  # the year 10000


async def export_lines(
    journal: Journal,
    conversation_ids: Sequence[str] | None = None,
    *,
    on_progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> AsyncGenerator[str, None]:
    """Yield the lines of an export, without line ends, of the named conversations or else of all.

    A conversation that is deleted meanwhile is left out. Calls `on_progress` with the numbers of
    conversations: those done, and all. Raises `ConversationNotFound` for an unknown name,
    `ConversationDeleted` if a conversation is deleted when some of its lines have been yielded, and
    `CorruptLog`.
    """
    if conversation_ids is None:
        infos: Sequence[ConversationInfo] = await journal.list()
    else:
        infos = [await journal.info(name) for name in conversation_ids]
    # Yielded only now, so that for an unknown name a caller has not written any line.
    yield _dump({"turnkeeper_export": _FORMAT})
    for done, listed in enumerate(infos):
        on_progress(done, len(infos))
        name, has_begun = listed.conversation_id, False
        try:
            async with aclosing(_export_one(journal, name)) as lines:
                async for line in lines:
                    has_begun = True
                    yield line
        except (ConversationNotFound, ConversationDeleted) as gone:
            if has_begun:
                raise ConversationDeleted(name) from gone
    on_progress(len(infos), len(infos))


async def _export_one(journal: Journal, name: str) -> AsyncGenerator[str, None]:
    info = await journal.info(name)
    # Read first: the pages are checked to be of the log that had this head.
    rejections = await journal.rejections(name)
    pages = LogPages(journal, name, upto=info.head, epoch=info.epoch, bytes_max=_PAGE_BYTES)
    async for page in pages:
        if page[0].seq == 1:
            head, is_unfinished = info.head, info.is_unfinished
            yield _dump({"conversation": name, "head": head, "is_unfinished": is_unfinished})
        for record in page:
            yield _record_line(record)
    for rejection in rejections:
        facts = {
            "rejected_at": float(rejection.at),
            "violation": rejection.violation,
            "reason": rejection.reason,
        }
        yield _with_event(facts, rejection.payload)


def _record_line(record: StoredRecord) -> str:
    facts = {"seq": record.seq, "event_id": record.event_id, "kind": record.kind}
    if record.message_id is not None:
        facts["message_id"] = record.message_id
    return _with_event(facts, record.payload)


# Quotes inside the facts' strings are escaped, so this text occurs only before the event.
_EVENT = ',"event":'


def _with_event(facts: dict[str, Any], payload: bytes) -> str:
    """Return a line that ends with the stored JSON unchanged, or with its base64 if it must."""
    try:
        text = payload.decode()
        is_plain = text.splitlines() == [text]  # a line end behind it would end the line, too
        json.loads(text)
    except (ValueError, RecursionError):
        is_plain, text = False, ""
    if is_plain:
        return f"{_dump(facts)[:-1]}{_EVENT}{text}}}"
    return _dump({**facts, "event_base64": base64.b64encode(payload).decode()})


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Unreadable(NamedTuple):
    """A record whose payload cannot be decoded as an event of its kind."""

    conversation_id: str
    seq: int
    kind: str


@dataclass(frozen=True, slots=True)
class Imported:
    """The outcome of an import."""

    conversations: int
    records: int
    """The number of records that the journal did not have yet."""
    unreadable: tuple[Unreadable, ...] = ()
    """The imported records that cannot be decoded: their logs cannot be opened."""


async def import_lines(
    journal: Journal,
    lines: Iterable[str],
    *,
    keep_users: bool = False,
) -> Imported:
    """Import the `lines` of an export into a journal.

    With `keep_users`, conversations keep their users. Otherwise they have none, since the same
    name may be another person here. Raises `ImportRefused` with the number of a bad line, and
    `InvalidInput` for ids and events that no journal takes. The conversations before that line are
    imported then, and perhaps some records of its own. Raises `InvalidInput` before it reads a line
    if `keep_users` is not a bool.
    Raises `ConversationExists` if the journal has a different conversation of the same name, and
    `EventIdConflict` or `MessageIdConflict` for an id that one conversation has twice.

    A record that cannot be read is imported as it is, since it may be damaged so in the journal
    that it comes from, and the others of its log are worth having. The outcome names it.
    """
    conversations = records = 0
    unreadable: list[Unreadable] = []
    async for part in import_parts(journal, lines, keep_users=keep_users):
        conversations += part.conversations
        records += part.records
        unreadable += part.unreadable
    return Imported(conversations, records, tuple(unreadable))


async def import_parts(
    journal: Journal, lines: Iterable[str], *, keep_users: bool
) -> AsyncIterator[Imported]:
    """Import as `import_lines` does, and yield each part of the outcome once it is written.

    So its caller knows what was imported if it fails.
    """
    check_bool("keep_users", keep_users)
    reader = _Lines(lines, keep_users=keep_users)
    reader.expect_header()
    while (header := reader.next_conversation()) is not None:
        async for part in _import_one(journal, reader, header):
            yield part


async def has_records(lines: Iterable[str]) -> bool:
    """Return True if `import_lines` of these lines writes anything into an empty journal.

    It reads as far as the first records that the import writes at once, and raises the same errors.
    So an import need not make a journal for nothing.
    """
    reader = _Lines(lines, keep_users=False)
    reader.expect_header()
    async with MemoryJournal() as journal:
        while (header := reader.next_conversation()) is not None:
            name = header["conversation"]
            epoch = (await journal.claim(name, any_name=True)).epoch
            for batch in reader.records(header["head"]):
                await journal.append(
                    name, batch, epoch=epoch, expected_seq=1, is_unfinished=header["is_unfinished"]
                )
                return True
            if rejections := list(reader.rejections()):
                await journal.reject(name, rejections, epoch=epoch)
                return True
    return False


async def _import_one(
    journal: Journal, reader: _Lines, header: dict[str, Any]
) -> AsyncIterator[Imported]:
    name, head, is_unfinished = header["conversation"], header["head"], header["is_unfinished"]
    claim = await journal.claim(name, any_name=True)
    if claim.head > head:
        raise ConversationExists(name, claim.head)
    at = 0
    fold = ListingOfLog(name)
    for batch in reader.records(head):
        fold.add(batch)
        known = batch[: max(claim.head - at, 0)]
        if known:
            await _compare(journal, name, at, known, claim.head)
        if rest := batch[len(known) :]:
            await journal.append(
                name,
                rest,
                epoch=claim.epoch,
                expected_seq=at + len(known) + 1,
                listing=fold.listing,
                is_unfinished=is_unfinished,
            )
        yield Imported(0, len(rest), tuple(_unreadable(name, at, batch)))
        at += len(batch)
    there = list(await journal.rejections(name))
    rejections = [rejection for rejection in reader.rejections() if rejection not in there]
    if rejections:
        await journal.reject(name, rejections, epoch=claim.epoch)
    yield Imported(1, 0)


def _unreadable(name: str, after: int, records: Sequence[Record]) -> Iterator[Unreadable]:
    for seq, record in enumerate(records, after + 1):
        try:
            decode_event(record.payload, kind=record.kind)
        except ValueError:
            yield Unreadable(name, seq, record.kind)


async def _compare(
    journal: Journal, name: str, after: int, records: Sequence[Record], head: int
) -> None:
    """Raise `ConversationExists` unless the log's own records equal these."""
    found: list[StoredRecord] = []
    async for page in LogPages(journal, name, after=after, upto=after + len(records)):
        found += page
    if [(one.event_id, one.payload) for one in found] != [
        (one.event_id, one.payload) for one in records
    ]:
        raise ConversationExists(name, head)


class _Lines:
    """Reads an export line by line, with one line of lookahead."""

    def __init__(self, lines: Iterable[str], *, keep_users: bool) -> None:
        self._lines = iter(lines)
        self._keep_users = keep_users
        self.number = 0
        self._ahead: dict[str, Any] | None = None
        self._advance()

    def expect_header(self) -> None:
        version = (self._ahead or {}).get("turnkeeper_export")
        if version != _FORMAT:
            raise self._refusal(
                f"no header of an export of format {_FORMAT}"
                if version is None
                else f"an export of format {version!r}, and this code reads {_FORMAT}"
            )
        self._advance()

    def next_conversation(self) -> dict[str, Any] | None:
        line = self._ahead
        if line is None:
            return None
        match line:
            case {"conversation": str(), "head": int(head), "is_unfinished": bool()} if head >= 0:
                self._advance()
                return line
            case _:
                raise self._refusal("a conversation should begin here")

    def records(self, head: int) -> Iterator[list[Record]]:
        """Yield the records of the current conversation, a batch at a time."""
        batch: list[Record] = []
        size = 0
        for seq in range(1, head + 1):
            line = self._ahead or {}
            match line:
                case {"seq": int(found), "event_id": str(event_id), "kind": str(kind)} if (
                    found == seq and isinstance(line.get("message_id"), str | None)
                ):
                    payload = self._payload(line)
                    if kind == CHANGE_KIND and not self._keep_users:
                        payload = _without_owner(payload)
                    batch.append(Record(event_id, kind, payload, line.get("message_id")))
                    size += len(payload)
                case _:
                    raise self._refusal(f"the record with seq {seq} of {head} should be here")
            self._advance()
            if len(batch) == _APPENDED_AT_ONCE or size >= _APPENDED_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def rejections(self) -> Iterator[Rejection]:
        while True:
            line = self._ahead or {}
            match line:
                case {
                    "rejected_at": int(at) | float(at),
                    "violation": str(violation),
                    "reason": str(reason),
                } if 0 <= at < _TIME_MAX:
                    yield Rejection(float(at), violation, reason, self._payload(line))
                    self._advance()
                case _:
                    return

    def _payload(self, line: dict[str, Any]) -> bytes:
        match line:
            case {"event": bytes(payload)}:
                return payload
            case {"event_base64": str(text)}:
                try:
                    return base64.b64decode(text, validate=True)
                except ValueError as error:
                    raise self._refusal("its event is not base64") from error
            case _:
                raise self._refusal("it has no event")

    def _advance(self) -> None:
        text = next(self._lines, None)
        self.number += 1
        if text is None:
            self._ahead = None
            return
        text = text.rstrip(" \t\r\n")  # `_event_text` needs the line to end with its bracket
        if len(text) > LINE_LENGTH_MAX:
            raise self._refusal(f"more than {LINE_LENGTH_MAX:,} characters")
        try:
            line = json.loads(text)
        except ValueError as error:
            raise self._refusal(f"not JSON ({error})") from error
        except RecursionError:
            raise self._refusal("JSON that is nested too deeply to be read") from None
        if not isinstance(line, dict):
            raise self._refusal("not a JSON object")
        if "event" in line:
            line["event"] = _event_text(text, line).encode()
        self._ahead = line

    def _refusal(self, found: str) -> ImportRefused:
        return ImportRefused(self.number, found)


def _event_text(text: str, line: dict[str, Any]) -> str:
    """Return the event of a line as it was written, unless a tool has reformatted the line."""
    facts, _, rest = text.partition(_EVENT)
    try:
        # If a tool has put the event before other facts, this text is inside the event.
        if json.loads(f"{facts}}}").keys() == line.keys() - {"event"}:
            return rest[:-1]
    except ValueError:
        pass
    return _dump(line["event"])


def _without_owner(payload: bytes) -> bytes:
    """Return a change of a conversation without the user that it names, if it names one."""
    try:
        event = json.loads(payload)
    except (ValueError, RecursionError):
        return payload
    if not isinstance(event, dict) or event.get("owner") is None:
        return payload
    return _dump({**event, "owner": None}).encode()


# --- retention ------------------------------------------------------------------------------------


async def delete_unchanged(journal: Journal, info: ConversationInfo) -> Deletion | None:
    """Delete a conversation; if its records have changed since it was listed, return None instead.

    `info`: from `Journal.list`. Use it only while no `Conversations` use the journal. Raises the
    same errors as `claim` and `delete`.
    """
    claim = await journal.claim(info.conversation_id)
    if not (await journal.info(info.conversation_id)).is_unchanged_since(info):
        return None
    return await journal.delete(info.conversation_id, epoch=claim.epoch)
