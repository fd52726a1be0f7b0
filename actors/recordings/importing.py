"""Recorded chats, written into a journal as conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from turnkeeper.runtime import Ports

from ..core.records import encode_record
from ..errors import ConversationExists
from ..events import (
    ActionEvent,
    AgentMessageEvent,
    Event,
    ImageContent,
    ObservationEvent,
    SystemPromptEvent,
    UserMessageEvent,
)
from ..journal import Claim, Journal
from ..journals.listings import ListingOfLog
from ..journals.transfer import Imported
from .transcripts import RecordedConversation, RecordedExchange

__all__ = ["import_recorded"]


async def import_recorded(
    journal: Journal,
    conversation_id: str,
    recorded: RecordedConversation,
    *,
    ports: Ports | None = None,
) -> Imported:
    """Write a recorded chat (see `transcripts`) as a new conversation, in one commit.

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
    records = [encode_record(event) for event in events]
    log = ListingOfLog(conversation_id)
    log.add(records)
    await journal.append(
        conversation_id,
        records,
        epoch=claim.epoch,
        expected_seq=1,
        listing=log.listing,
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
    """Makes the fields that every event has."""

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
