"""Events, states and receipts as the JSON of the wire. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime

from ..core.listing import ListedConversation
from ..core.search import SearchHit
from ..core.state import Folded
from ..core.steps import Step
from ..events import Event, ForkedFromEvent, LoggedEvent, TextDelta, encode_event
from ..journal import Deletion, Rejection
from ..values.text import storable
from .names import Cursor
from .problems import Problem

__all__ = [
    "Json",
    "Rename",
    "brief_json",
    "conversation_json",
    "deletion_json",
    "erasure_json",
    "event_json",
    "exported_line",
    "logged_json",
    "piece_json",
    "rejection_json",
    "row_json",
    "sse",
    "state_json",
    "step_json",
]

Json = dict[str, object]
Rename = Callable[[str], str | None]
"""Returns the id on the wire of a stored conversation; None if the client may not know of it."""


def sse(data: object, *, event: str | None = None, cursor: Cursor | None = None) -> bytes:
    """Return one server-sent event. JSON has no line ends, so its data is one line."""
    lines = [] if event is None else [f"event: {event}"]
    if cursor is not None:
        lines.append(f"id: {cursor}")
    lines.append(f"data: {json.dumps(data, separators=(',', ':'))}")
    return ("\n".join(lines) + "\n\n").encode()


def event_json(event: Event, rename: Rename) -> Json:
    """Return an event as it is stored, but with the id of a fork's parent as on the wire."""
    return _event_json(encode_event(event), event, rename)


def _event_json(encoded: bytes, event: Event, rename: Rename) -> Json:
    value: Json = json.loads(encoded)
    if isinstance(event, ForkedFromEvent):
        value["conversation_id"] = rename(event.conversation_id)
    return value


def exported_line(line: str, rename: Rename) -> str:
    """Return a line of an export, without a fork's parent that the client may not know of."""
    if '"kind":"forked_from"' not in line:
        return line
    record = json.loads(line)
    event = record.get("event")
    if record.get("kind") != "forked_from" or not event or rename(event["conversation_id"]):
        return line
    event["conversation_id"] = ""
    return json.dumps(record, separators=(",", ":"))


def logged_json(logged: LoggedEvent, rename: Rename) -> Json:
    """Return an event with its place in the log."""
    return sized_json(logged, rename)[0]


def sized_json(logged: LoggedEvent, rename: Rename) -> tuple[Json, int]:
    """Return an event with its place in the log, and the bytes of its JSON."""
    encoded = encode_event(logged.event)
    value: Json = {
        "seq": logged.seq,
        "cursor": str(Cursor.of(logged)),
        "event": _event_json(encoded, logged.event, rename),
    }
    return value, len(encoded)


def brief_json(value: Json, length: int) -> Json:
    """Return an event with its long texts and lists cut; `cut` has their true lengths, by path."""
    cut: dict[str, int] = {}

    def brief(value: object, path: str) -> object:
        match value:
            case str() if len(value) > length:
                cut[path] = len(value)
                return value[:length]
            case list() if len(value) > length:
                cut[path] = len(value)
                return [brief(each, f"{path}.{n}") for n, each in enumerate(value[:length])]
            case list():
                return [brief(each, f"{path}.{n}") for n, each in enumerate(value)]
            case dict():
                return {
                    name: brief(each, f"{path}.{name}" if path else name)
                    for name, each in value.items()
                }
            case _:
                return value

    shown = brief(value, "")
    assert isinstance(shown, dict), shown
    return {**shown, "cut": cut} if cut else shown


def piece_json(piece: TextDelta) -> Json:
    """Return a piece of an answer that is being written."""
    return {**piece._asdict(), "text": storable(piece.text)}


def state_json(state: Folded, rename: Rename) -> Json:
    """Return the state of a conversation at one seq."""
    turns = state.turns
    running = turns.running
    return {
        "seq": state.seq,
        "status": state.agent_execution_status.value.lower(),
        "running": None
        if running is None
        else {
            "turn_id": running.turn_id,
            "message_ids": [message.message_id for message in running.messages],
        },
        "queued": [event_json(message, rename) for message in turns.queued.values()],
        "waits_for": turns.waits_for,
        "awaiting": list(turns.awaiting),
        "open_calls": [action.tool_call_id for action in state.pending_actions],
        "iteration": state.iteration,
        "tasks": [task.model_dump(mode="json") for task in state.task_list],
        "metrics": asdict(state.metrics),
    }


def step_json(step: Step) -> Json:
    """Return a model call. The model saw the view as it is at `view_seq`."""
    request = step.request
    return {
        "seq": step.seq,
        "turn_id": step.turn_id,
        "outcome": step.outcome,
        "ended_at": step.ended_at.isoformat(),
        "view_seq": step.view_seq,
        "model": step.model,
        "response_id": step.response_id,
        "usage": step.usage.model_dump(mode="json"),
        "request": None if request is None else request.model_dump(mode="json"),
    }


def conversation_json(state: Folded, local_id: str) -> Json:
    """Return a conversation's details, and its current state in brief."""
    details = state.details
    return {
        "id": local_id,
        "title": details.title,
        "labels": dict(details.labels),
        "owner": details.owner,
        "head": state.seq,
        "status": state.agent_execution_status.value.lower(),
        "queued": len(state.turns.queued),
        "waits_for": state.turns.waits_for,
    }


def row_json(row: ListedConversation, rename: Rename, *, shows_address: bool) -> Json:
    """Return a row of a list of conversations."""
    parent = None
    if row.forked_from is not None and (parent_id := rename(row.forked_from[0])) is not None:
        parent = {"id": parent_id, "seq": row.forked_from[1]}
    return {
        "id": rename(row.conversation_id),
        "title": row.title,
        "owner": row.owner,
        "labels": dict(row.labels),
        "created_at": None if row.created_at is None else _time(row.created_at),
        "active_at": _time(row.active_at),
        "updated_at": _time(row.updated_at),
        "head": row.head,
        "status": row.status,
        "queued": row.queued,
        "waits_for": row.waits_for,
        "waiting_calls": list(row.waiting_calls),
        "last_message": row.last_message,
        "last_by": row.last_by,
        "forked_from": parent,
        "is_stale": row.is_stale,
        "owned": row.owned,
        "address": row.address if shows_address else "",
    }


def hit_json(hit: SearchHit, rename: Rename) -> Json:
    """Return a message that a search has found."""
    return {
        "conversation_id": rename(hit.conversation_id),
        "seq": hit.seq,
        "event_id": hit.event_id,
        "by": hit.by,
        "author": hit.author,
        "said_at": _time(hit.said_at),
        "snippet": hit.snippet,
        "left_view": hit.left_view,
    }


def time_json(seconds: float | None) -> str | None:
    """Return a time in the format of event times; None if it is not known."""
    return None if seconds is None else _time(seconds)


def _time(seconds: float) -> str:
    """Return a time in the format of event times."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def rejection_json(rejection: Rejection) -> Json:
    """Return an event that admission refused."""
    return {
        "at": rejection.at,
        "violation": rejection.violation,
        "reason": rejection.reason,
        "event": json.loads(rejection.payload),
    }


def deletion_json(deletion: Deletion, rename: Rename) -> Json:
    """Return the receipt of a deletion; forks of others are counted, not named."""
    renamed = [rename(fork) for fork in deletion.forks]
    forks = [fork for fork in renamed if fork is not None]
    return {
        "kept": deletion.kept,
        "forks": forks,
        "forks_of_others": len(deletion.forks) - len(forks),
        "is_erased": deletion.is_erased,
    }


def erasure_json(
    receipts: Mapping[str, Deletion], left: Mapping[str, Problem], rename: Rename
) -> Json:
    """Return the receipts of an erasure, and why each other conversation was not deleted."""
    return {
        "receipts": {rename(name): deletion_json(one, rename) for name, one in receipts.items()},
        "left": {rename(name): problem.type for name, problem in left.items()},
    }
