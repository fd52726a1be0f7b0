"""Prints the contents of a journal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.text import Text

from ..core.listing import ListedConversation
from ..events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationEvent,
    ConversationErrorEvent,
    Event,
    LoggedEvent,
    MessageQueuedEvent,
    ObservationEvent,
    SystemPromptEvent,
    TurnEndedEvent,
    UserMessageEvent,
    UserRejectEvent,
)
from ..journal import ConversationInfo, Rejection
from ._display import printable

__all__ = [
    "conversation_json",
    "infos_json",
    "print_event",
    "print_infos",
    "print_rejection",
    "rejection_json",
]

_CALL_LENGTH_MAX = 300
_RESULT_LENGTH_MAX = 600
_INDENT = 17
_WIDTH = 80


def infos_json(
    infos: Sequence[ConversationInfo], rows: Sequence[ListedConversation]
) -> Mapping[str, object]:
    listed = {row.conversation_id: row for row in rows}
    return {
        "conversations": [
            {
                "conversation": info.conversation_id,
                "events": info.head,
                "epoch": info.epoch,
                "is_unfinished": info.is_unfinished,
                "updated_at": _time(info).isoformat(),
                **_listed_json(listed.get(info.conversation_id)),
            }
            for info in infos
        ]
    }


def _listed_json(row: ListedConversation | None) -> Mapping[str, object]:
    if row is None:
        return {}
    return {
        "title": row.title,
        "owner": row.owner,
        "labels": dict(row.labels),
        "status": row.status,
        "queued": row.queued,
        "waits_for": row.waits_for,
        "is_stale": row.is_stale,
    }


def print_infos(
    console: Console, infos: Sequence[ConversationInfo], rows: Sequence[ListedConversation]
) -> None:
    """Print a line for each conversation, never cut, so that a program can read it."""
    listed = {row.conversation_id: row for row in rows}
    width = max([len("conversation"), *(len(printable(i.conversation_id)) for i in infos)])
    console.print(
        Text(f"{'conversation':<{width}}  events  epoch  last written         ", style="bold"),
        soft_wrap=True,
    )
    for info in infos:
        state = "  unfinished" if info.is_unfinished else ""
        line = (
            f"{printable(info.conversation_id):<{width}}  {info.head:>6}  {info.epoch:>5}  "
            f"{_time(info):%Y-%m-%d %H:%M:%S}Z{state}"
        )
        console.print(Text(line), soft_wrap=True)
        about = _about(listed.get(info.conversation_id))
        if about:
            shown = Text(f"  {about}", style="dim")
            shown.truncate(_WIDTH, overflow="ellipsis")
            console.print(shown, soft_wrap=True)


def _about(row: ListedConversation | None) -> str:
    """Return the status, the title, the labels and the owner of a conversation, in one line."""
    if row is None:
        return ""
    waits = f", waits for {row.waits_for}" if row.waits_for else ""
    queued = f", {row.queued} queued" if row.queued else ""
    stale = ", as of earlier" if row.is_stale and row.status else ""
    parts = [f"{row.status.replace('_', ' ')}{waits}{queued}{stale}" if row.status else ""]
    if row.title:
        parts.append(f"“{printable(row.title)}”")
    parts += [printable(f"{name}={value}" if value else name) for name, value in row.labels.items()]
    if row.owner:
        parts.append(f"of {printable(row.owner)}")
    return "  ".join(part for part in parts if part)


def _time(info: ConversationInfo) -> datetime:
    return datetime.fromtimestamp(info.updated_at, UTC)


def conversation_json(conversation_id: str, log: Sequence[LoggedEvent]) -> Mapping[str, object]:
    return {
        "conversation": conversation_id,
        "events": [{"seq": seq, **event.model_dump(mode="json")} for seq, event in log],
    }


def rejection_json(rejection: Rejection) -> Mapping[str, object]:
    return {
        "at": datetime.fromtimestamp(rejection.at, UTC).isoformat(),
        "violation": rejection.violation,
        "reason": rejection.reason,
        "event": rejection.payload.decode(errors="replace"),
    }


def print_rejection(console: Console, rejection: Rejection) -> None:
    """Print a rejected event: its time, the reason, and the start of its payload."""
    at = datetime.fromtimestamp(rejection.at, UTC)
    head = f"{at:%Y-%m-%d %H:%M:%S}Z  {rejection.violation}: {rejection.reason}"
    console.print(Text(printable(head), style="bold"), soft_wrap=True)
    payload = _cut(rejection.payload.decode(errors="replace"), _RESULT_LENGTH_MAX)
    console.print(Text(f"    {printable(payload)}"), soft_wrap=True)


def print_event(console: Console, logged: LoggedEvent) -> None:
    """Print one event of a chat: its seq, its author, and its text."""
    style, author, said = _said(logged.event)
    text = Text(printable(said).rstrip() or "(empty)", style=style)
    lines = text.wrap(console, max(20, console.width - _INDENT))
    for number, line in enumerate(lines):
        head = f"{logged.seq:>5}  {author:<{_INDENT - 8}} " if number == 0 else " " * _INDENT
        console.print(Text(head, style="bold" if style == "" else style) + line, soft_wrap=True)


def _said(event: Event) -> tuple[str, str, str]:
    """Return a style, the author in at most nine letters, and the text."""
    match event:
        case SystemPromptEvent():
            return "dim", "system", event.content
        case UserMessageEvent():
            images = "".join(f"\n[image {_cut(image.url, 80)}]" for image in event.images)
            return "", "user", _signed(event) + images
        case MessageQueuedEvent():
            return "dim", "queued", _signed(event)
        case AgentMessageEvent():
            return "", "agent", event.content + (" [interrupted]" if event.interrupted else "")
        case ActionEvent():
            values = (f"{key}={_compact(value)}" for key, value in event.arguments.items())
            call = _cut(f"{event.tool_name}({', '.join(values)})", _CALL_LENGTH_MAX)
            return "cyan", "call", f"{event.text}\n{call}" if event.text else call
        case ObservationEvent():
            kind = "error" if event.is_error else "result"
            return "cyan", kind, _cut(event.content, _RESULT_LENGTH_MAX)
        case AgentErrorEvent() | UserRejectEvent():
            return "yellow", "error", event.content
        case CondensationEvent():
            forgotten = f"{len(event.forgotten_event_ids)} events leave the view"
            summary = f": {event.summary}" if event.summary else ""
            return "dim", "condensed", forgotten + summary
        case TurnEndedEvent():
            return "dim", "turn", f"{event.outcome}{f' ({event.detail})' if event.detail else ''}"
        case ConversationErrorEvent():
            return "red", "failure", f"{event.error}: {event.detail}"
        case _:
            rest = event.model_dump(mode="json", exclude={"id", "timestamp", "turn_id", "kind"})
            return "dim", "event", " ".join([event.kind, *_fields(rest)])


def _signed(event: UserMessageEvent | MessageQueuedEvent) -> str:
    said = event.content if event.author is None else f"{event.author}: {event.content}"
    return said + "".join(f"\n[file {file.name}]" for file in event.files)


def _fields(rest: Mapping[str, object]) -> Iterator[str]:
    for key, value in rest.items():
        yield f"{key}={_cut(_compact(value), 80)}"


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cut(text: str, length_max: int) -> str:
    if len(text) <= length_max:
        return text
    return f"{text[:length_max]}… (and {len(text) - length_max:,} characters)"
