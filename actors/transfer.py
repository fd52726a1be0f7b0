"""Conversations out of a journal and into another, as JSON Lines.

Owns the format. An export is one header line, then for each conversation a line of its own, its
records in order, and its rejected events:

    {"turnkeeper_export": 1}
    {"conversation": "alice", "head": 2, "is_unfinished": false}
    {"seq": 1, "event_id": "0199…", "kind": "user_message", "message_id": "m1", "event": {…}}
    {"seq": 2, "event_id": "0199…", "kind": "agent_message", "event": {…}}
    {"rejected_at": 1759400000.0, "violation": "…", "reason": "…", "event": {…}}

It promises to lose nothing that a conversation is made of: ids, order, kinds, and each event byte
for byte (`"event"` is the stored JSON itself; where it is not one line of UTF-8,
`"event_base64"`). Exporting what was imported gives the same lines. What belongs to the store and
not to the conversation stays behind: epochs, times of writing, snapshots, and that forks share
their prefix.

Both directions run beside whoever uses the journals; an export gives each conversation as of the
moment it comes to it. An import that was interrupted is run again, and goes on where it was.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from turnkeeper.runtime import OwnershipLost, Ports

from ._records import record_of
from .errors import ConversationExists, ConversationNotFound, ImportRefused
from .events import (
    ActionEvent,
    AgentMessageEvent,
    Event,
    ImageContent,
    ObservationEvent,
    SystemPromptEvent,
    UserMessageEvent,
)
from .journal import Claim, ConversationInfo, Journal, Record, Rejection, StoredRecord
from .recorded import RecordedConversation, RecordedExchange

__all__ = ["Imported", "expire", "export_lines", "import_lines", "import_recorded"]

_FORMAT = 1
_PAGE = 256


def _no_progress(_done: int, _of: int) -> None:
    return


async def export_lines(
    journal: Journal,
    conversation_ids: Sequence[str] | None = None,
    *,
    on_progress: Callable[[int, int], None] = _no_progress,
) -> AsyncIterator[str]:
    """The lines of an export, without their ends; of all conversations unless some are named.

    `on_progress` is told how many conversations are done, and of how many. Raises
    `ConversationNotFound` for a name that is not there, and `CorruptLog`.
    """
    yield _dump({"turnkeeper_export": _FORMAT})
    if conversation_ids is None:
        infos: Sequence[ConversationInfo] = await journal.list()
    else:
        infos = [await journal.info(name) for name in conversation_ids]
    for done, listed in enumerate(infos):
        on_progress(done, len(infos))
        try:
            info = await journal.info(listed.conversation_id)
        except ConversationNotFound:
            continue  # deleted since it was listed
        async for line in _export_one(journal, info):
            yield line
    on_progress(len(infos), len(infos))


async def _export_one(journal: Journal, info: ConversationInfo) -> AsyncIterator[str]:
    name = info.conversation_id
    yield _dump({"conversation": name, "head": info.head, "is_unfinished": info.is_unfinished})
    after = 0
    while after < info.head:
        page = await journal.read(name, after=after, limit=min(_PAGE, info.head - after))
        for record in page:
            yield _record_line(record)
        after += len(page)
    for rejection in await journal.rejections(name):
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


# A quote inside a string of the facts is escaped, so this stands where the event begins, only.
_EVENT = ',"event":'


def _with_event(facts: dict[str, Any], payload: bytes) -> str:
    """A line that ends in the stored JSON as it is, or in base64 where that is not possible."""
    try:
        text = payload.decode()
        is_plain = len(text.splitlines()) == 1
        json.loads(text)
    except ValueError:
        is_plain, text = False, ""
    if is_plain:
        return f"{_dump(facts)[:-1]}{_EVENT}{text}}}"
    return _dump({**facts, "event_base64": base64.b64encode(payload).decode()})


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import brought in."""

    conversations: int
    records: int
    """Those that were not there yet."""


async def import_lines(
    journal: Journal,
    lines: Iterable[str],
    *,
    on_progress: Callable[[int, int], None] = _no_progress,
) -> Imported:
    """Bring an export into a journal.

    `on_progress` is told the conversation and the line that are being read. Raises
    `ImportRefused` with the line that is wrong; what came before it is in. Raises
    `ConversationExists` where the journal has another conversation of a name.
    """
    reader = _Lines(lines)
    reader.expect_header()
    conversations = records = 0
    while (header := reader.next_conversation()) is not None:
        conversations += 1
        on_progress(conversations, reader.number)
        records += await _import_one(journal, reader, header)
    return Imported(conversations, records)


async def _import_one(journal: Journal, reader: _Lines, header: dict[str, Any]) -> int:
    name, head, is_unfinished = header["conversation"], header["head"], header["is_unfinished"]
    claim = await journal.claim(name)
    if claim.head > head:
        raise ConversationExists(name, claim.head)
    at = added = 0
    for batch in reader.records(head):
        known = batch[: max(claim.head - at, 0)]
        if known:
            await _compare(journal, name, at, known, claim.head)
        if rest := batch[len(known) :]:
            await journal.append(
                name,
                rest,
                epoch=claim.epoch,
                expected_seq=at + len(known) + 1,
                is_unfinished=is_unfinished,
            )
        at += len(batch)
        added += len(rest)
    there = list(await journal.rejections(name))
    rejections = [rejection for rejection in reader.rejections() if rejection not in there]
    if rejections:
        await journal.reject(name, rejections)
    return added


async def _compare(
    journal: Journal, name: str, after: int, records: Sequence[Record], head: int
) -> None:
    """What is there already has to be the same."""
    found = await journal.read(name, after=after, limit=len(records))
    if [(one.event_id, one.payload) for one in found] != [
        (one.event_id, one.payload) for one in records
    ]:
        raise ConversationExists(name, head)


class _Lines:
    """An export, line by line, with one line looked at ahead."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
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
            case {"conversation": str(), "head": int(), "is_unfinished": bool()}:
                self._advance()
                return line
            case _:
                raise self._refusal("a conversation should begin here")

    def records(self, head: int) -> Iterator[list[Record]]:
        """The records of the conversation that has begun, some at a time."""
        batch: list[Record] = []
        for seq in range(1, head + 1):
            line = self._ahead or {}
            match line:
                case {"seq": int(found), "event_id": str(event_id), "kind": str(kind)} if (
                    found == seq
                ):
                    batch.append(
                        Record(event_id, kind, self._payload(line), line.get("message_id"))
                    )
                case _:
                    raise self._refusal(f"the record with seq {seq} of {head} should be here")
            self._advance()
            if len(batch) == _PAGE:
                yield batch
                batch = []
        if batch:
            yield batch

    def rejections(self) -> Iterator[Rejection]:
        while True:
            line = self._ahead or {}
            match line:
                case {"rejected_at": float(at), "violation": str(violation), "reason": str(reason)}:
                    yield Rejection(at, violation, reason, self._payload(line))
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
        text = text.rstrip("\r\n")
        try:
            line = json.loads(text)
        except ValueError as error:
            raise self._refusal(f"not JSON ({error})") from error
        if not isinstance(line, dict):
            raise self._refusal("not a JSON object")
        if "event" in line:
            _, found, rest = text.partition(_EVENT)
            # As it was written; but a tool may have written the line anew.
            line["event"] = (rest[:-1] if found else _dump(line["event"])).encode()
        self._ahead = line

    def _refusal(self, found: str) -> ImportRefused:
        return ImportRefused(self.number, found)


# --- recorded chats -------------------------------------------------------------------------------


async def import_recorded(
    journal: Journal,
    conversation_id: str,
    recorded: RecordedConversation,
    *,
    ports: Ports | None = None,
) -> Imported:
    """Write a recorded chat (see `recorded`) as a new conversation, in one commit.

    Each call gets an id of its own; the provider's is kept beside it. Raises
    `ConversationExists`.
    """
    ports = ports or Ports()
    claim = await journal.claim(conversation_id)
    if claim.head:
        raise ConversationExists(conversation_id, claim.head)
    events = list(_events_of(recorded, ports))
    if events:
        await _append_all(journal, conversation_id, claim, events)
    return Imported(1, len(events))


async def _append_all(
    journal: Journal, conversation_id: str, claim: Claim, events: Sequence[Event]
) -> None:
    await journal.append(
        conversation_id,
        [record_of(event) for event in events],
        epoch=claim.epoch,
        expected_seq=1,
        is_unfinished=False,
    )


def _events_of(recorded: RecordedConversation, ports: Ports) -> Iterator[Event]:
    facts = _Facts(ports)
    if recorded.system_prompt is not None:
        yield SystemPromptEvent(content=recorded.system_prompt, **facts())
    for text in recorded.opening:
        yield AgentMessageEvent(content=text, **facts())
    for exchange in recorded.exchanges:
        yield from _exchange(exchange, facts, ports)


class _Facts:
    """What every event has."""

    def __init__(self, ports: Ports) -> None:
        self._ids = ports.ids
        self._at = datetime.fromtimestamp(ports.now(), UTC)

    def __call__(self) -> dict[str, Any]:
        return {"id": self._ids.new(), "timestamp": self._at}


def _exchange(exchange: RecordedExchange, facts: _Facts, ports: Ports) -> Iterator[Event]:
    yield UserMessageEvent(
        content=exchange.content,
        images=tuple(ImageContent(url=url) for url in exchange.images),
        message_id=ports.ids.new(),
        **facts(),
    )
    for step in exchange.steps:
        if not step.calls:
            yield AgentMessageEvent(content=step.text, **facts())
            continue
        response_id = ports.ids.new()
        call_ids = [ports.ids.new() for _ in step.calls]
        for number, (call, call_id) in enumerate(zip(step.calls, call_ids, strict=True)):
            yield ActionEvent(
                tool_call_id=call_id,
                provider_call_id=call.provider_call_id,
                tool_name=call.tool_name,
                arguments=call.arguments,
                llm_response_id=response_id,
                text="" if number else step.text,
                **facts(),
            )
        for call, call_id in zip(step.calls, call_ids, strict=True):
            yield ObservationEvent(tool_call_id=call_id, content=call.result, **facts())


# --- retention ------------------------------------------------------------------------------------


async def expire(
    journal: Journal,
    *,
    before: float,
    on_progress: Callable[[int, int], None] = _no_progress,
) -> Sequence[str]:
    """Delete the conversations whose last record was written before this time; whole ones only.

    Those that another process owns, and those that go on meanwhile, stay. Gives the names of
    what was deleted.
    """
    old = [info for info in await journal.list() if info.updated_at < before]
    deleted: list[str] = []
    for done, info in enumerate(old):
        on_progress(done, len(old))
        try:
            claim = await journal.claim(info.conversation_id)
            if claim.head == info.head:
                await journal.delete(info.conversation_id, epoch=claim.epoch)
                deleted.append(info.conversation_id)
        except (OwnershipLost, ConversationNotFound):
            continue
    on_progress(len(old), len(old))
    return deleted
