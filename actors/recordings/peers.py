"""Reads conversations of other programs from their own files.

- The OpenAI Agents SDK: the SQLite file of its `SQLiteSession`; each session is a conversation.
- Hermes: its database `state.db`; each session, as Hermes itself goes on with it: without messages
  that were taken back, and with the summary in place of what it has compacted.
- OpenHands: the folder of a conversation, with its `events`, or a folder of such; of a
  conversation with branches, the one that it stands on.

Each conversation is converted to messages of the OpenAI chat format, which `transcripts` reads and
checks. Text, images, calls and results are kept. A part that the format cannot hold is left out and
reported. A call that was cut off gets a result that says so. Files are only read, even while the
program uses them; apart from that, this module is pure.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NoReturn, TypeAlias
from urllib.parse import quote

from .transcripts import InputProblem, NamedMessages, Parsed, parse_messages

__all__ = ["PEERS", "Peer", "read_peer"]

_Message: TypeAlias = Mapping[str, object]

_NO_RESULT: Final = "no result: none was recorded; the call may have happened"
_HERMES_JSON: Final = "\0json:"
_SKIPPED_ITEMS: Final = frozenset({"reasoning"})
"""Items that only their provider can read."""
_SKIPPED_EVENTS: Final = frozenset(
    (
        "Condensation",
        "CondensationRequest",
        "CondensationSummaryEvent",
        "ConversationStateUpdateEvent",
        "HookExecutionEvent",
        "InterruptEvent",
        "LLMCompletionLogEvent",
        "PauseEvent",
        "SecurityAnalysisEvent",
        "StreamingDeltaEvent",
        "TokenEvent",
    )
)
"""Events without any part of the chat; messages that a condensation has forgotten are still
there."""
_ROOT: Final = "__root__"


class _Unreadable(Exception):
    """The reason why a file cannot be used at all."""


@dataclass(slots=True)
class _Chat:
    """The messages of one conversation so far."""

    name: str
    messages: list[dict[str, object]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    def add(self, place: str, **message: object) -> None:
        self.messages.append(message)
        self.places.append(place)

    def add_call(self, place: str, text: str, call: _Message, response: object) -> None:
        """Add a call; those of one response are one message."""
        last = self.messages[-1] if self.messages else {}
        if response is not None and last.get("response") == response:
            calls = last["tool_calls"]
            assert isinstance(calls, list), "a message with a response has calls"
            calls.append(call)
            return
        self.add(place, role="assistant", content=text, tool_calls=[call], response=response)

    def leave_out(self, kind: object) -> None:
        name = kind if isinstance(kind, str) else "a part without a type"
        self.left_out[name] = self.left_out.get(name, 0) + 1


Peer: TypeAlias = Callable[[Path], Iterator[_Chat]]
"""Reads the conversations of one file or folder."""


def read_peer(peer: Peer, path: Path) -> Parsed:
    """Read a file or a folder of another program."""
    file = str(path)
    try:
        chats = list(peer(path))
    except _Unreadable as unreadable:
        return Parsed((), (InputProblem(file=file, found=str(unreadable)),))
    except (OSError, sqlite3.Error) as error:
        found = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        return Parsed((), (InputProblem(file=file, found=found),))
    if not chats:
        return Parsed((), (InputProblem(file=file, found="there is no conversation in it"),))
    named = [
        NamedMessages(chat.name, *_answered(chat.messages, chat.places))
        for chat in chats
        if chat.messages
    ]
    parsed = parse_messages(named, file)
    left_out = [
        f"{file}, conversation {chat.name}: {count} of {kind}"
        for chat in chats
        for kind, count in chat.left_out.items()
    ]
    left_out += [
        f"{file}, conversation {chat.name}: it has no messages"
        for chat in chats
        if not chat.messages
    ]
    return parsed._replace(left_out=tuple(left_out))


def _answered(
    messages: Sequence[_Message], places: Sequence[str]
) -> tuple[Sequence[_Message], Sequence[str]]:
    """Move each result behind the message with its call; add a result for calls without one."""
    results: dict[tuple[int, object], tuple[_Message, str]] = {}
    at_of: dict[object, int] = {}
    strays: set[int] = set()
    for at, message in enumerate(messages):
        for call in _calls(message):
            at_of[call["id"]] = at
        if message["role"] == "tool":
            key = (at_of.get(message.get("tool_call_id"), -1), message.get("tool_call_id"))
            if key[0] < 0 or key in results:
                strays.add(at)  # left where it is: the reader says what is wrong with it
            else:
                results[key] = (message, places[at])
    done: list[tuple[_Message, str]] = []
    for at, message in enumerate(messages):
        if message["role"] == "tool" and at not in strays:
            continue
        done.append((message, places[at]))
        for call in _calls(message):
            missing = {"role": "tool", "tool_call_id": call["id"], "content": _NO_RESULT}
            done.append(results.get((at, call["id"]), (missing, places[at])))
    return [message for message, _ in done], [place for _, place in done]


def _calls(message: _Message) -> Sequence[Mapping[str, object]]:
    calls = message.get("tool_calls")
    return (
        [call for call in calls if isinstance(call, dict) and "id" in call]
        if isinstance(calls, list)
        else ()
    )


def _call(call_id: object, name: object, arguments: object) -> _Message:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def _unreadable(found: str) -> NoReturn:
    raise _Unreadable(found)


# --- from SQLite files ---------------------------------------------------------------------------


def _open(path: Path, *tables: str) -> sqlite3.Connection:
    """Open a database for reading; raise `_Unreadable` unless it has these tables."""
    if not path.is_file():
        _unreadable("there is no such file" if not path.exists() else "it is a folder")
    database = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)
    try:
        rows = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        missing = set(tables) - {name for (name,) in rows}
    except sqlite3.DatabaseError as error:
        database.close()
        raise _Unreadable(f"it is not a SQLite database ({error})") from error
    if missing:
        database.close()
        _unreadable(f"it has no table {' and no table '.join(sorted(missing))}")
    return database


def _loaded(text: object) -> object:
    """Return the value of a JSON text; other text stays as it is, and the reader reports it."""
    try:
        return json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return text


def _openai_agents(path: Path) -> Iterator[_Chat]:
    with closing(_open(path, "agent_sessions", "agent_messages")) as database:
        sessions = database.execute("SELECT session_id FROM agent_sessions ORDER BY created_at, 1")
        for (session_id,) in sessions.fetchall():
            chat = _Chat(str(session_id))
            rows = database.execute(
                "SELECT id, message_data FROM agent_messages WHERE session_id = ? ORDER BY id",
                (session_id,),
            )
            for row, data in rows:
                _add_item(chat, f"row {row}", _loaded(data))
            yield chat


def _add_item(chat: _Chat, place: str, item: object) -> None:
    """Add an item of the Responses API."""
    match item:
        case {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}:
            # Adjacent calls in the session belong to one response, unless a result is between them.
            last = chat.messages[-1] if chat.messages else {}
            response = last.get("response") if last.get("tool_calls") else None
            chat.add_call(place, "", _call(call_id, name, arguments), response or place)
        case {"type": "function_call_output", "call_id": call_id, "output": output}:
            chat.add(place, role="tool", tool_call_id=call_id, content=_parts(chat, output))
        case {"role": role, "content": content}:
            chat.add(place, role=role, content=_parts(chat, content))
        case {"type": kind} if kind in _SKIPPED_ITEMS:
            pass
        case {"type": kind}:
            chat.leave_out(kind)
        case _:
            chat.add(place, role=None)  # the reader says what is wrong with it


def _parts(chat: _Chat, content: object) -> object:
    """Return a content with its parts in the chat format."""
    if not isinstance(content, list):
        return content
    parts: list[object] = []
    for part in content:
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": text}:
                parts.append({"type": "text", "text": text})
            case {"type": "refusal", "refusal": text}:
                parts.append({"type": "text", "text": text})
            case {"type": "input_image", "image_url": str(url)}:
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case {"type": kind}:
                chat.leave_out(kind)
            case _:
                parts.append(part)
    return parts


def _hermes(path: Path) -> Iterator[_Chat]:
    with closing(_open(path, "sessions", "messages")) as database:
        sessions = database.execute(
            "SELECT id, system_prompt FROM sessions ORDER BY started_at, id"
        )
        for session_id, system_prompt in sessions.fetchall():
            chat = _Chat(str(session_id))
            rows = database.execute(
                "SELECT id, role, content, tool_calls, tool_call_id FROM messages "
                "WHERE session_id = ? AND coalesce(active, 1) = 1 ORDER BY id",
                (session_id,),
            ).fetchall()
            if rows and system_prompt:
                chat.add("system_prompt", role="system", content=system_prompt)
            for row, role, content, tool_calls, tool_call_id in rows:
                message: dict[str, object] = {"role": role, "content": _hermes_content(content)}
                if tool_calls:
                    message["tool_calls"] = _loaded(tool_calls)
                if tool_call_id:
                    message["tool_call_id"] = tool_call_id
                chat.add(f"row {row}", **message)
            yield chat


def _hermes_content(content: object) -> object:
    if isinstance(content, str) and content.startswith(_HERMES_JSON):
        return _loaded(content.removeprefix(_HERMES_JSON))
    return "" if content is None else content


# --- from folders --------------------------------------------------------------------------------


def _openhands(path: Path) -> Iterator[_Chat]:
    if not path.is_dir():
        _unreadable("a folder is needed: that of a conversation, or one with such folders")
    folders = [path] if (path / "events").is_dir() else sorted(path.iterdir())
    for folder in folders:
        if (folder / "events").is_dir():
            yield _openhands_chat(folder)


def _openhands_chat(folder: Path) -> _Chat:
    chat = _Chat(folder.name)
    files = sorted(
        (folder / "events").glob("event-*.json"),
        key=lambda file: (len(file.name.split("-")[1]), file.name),
    )
    events = [(file.name, _loaded(file.read_text(encoding="utf-8"))) for file in files]
    for place, event in _branch(events, _leaf(folder)):
        _add_event(chat, place, event)
    return chat


def _leaf(folder: Path) -> object:
    state = folder / "base_state.json"
    loaded = _loaded(state.read_text(encoding="utf-8")) if state.is_file() else None
    return loaded.get("leaf_event_id") if isinstance(loaded, dict) else None


def _branch(events: Sequence[tuple[str, object]], leaf: object) -> Sequence[tuple[str, object]]:
    """Return the events from the root to the leaf; all of them if no leaf is named."""
    place_of = {
        event["id"]: at
        for at, (_, event) in enumerate(events)
        if isinstance(event, dict) and "id" in event
    }
    at = place_of.get(leaf) if isinstance(leaf, str) else None
    if at is None:
        return events
    found: list[tuple[str, object]] = []
    while at is not None and at >= 0:
        found.append(events[at])
        event = events[at][1]
        parent = event.get("parent_id") if isinstance(event, dict) else None
        # An event of the time before branches continues the one before it.
        before = at - 1 if parent is None else place_of.get(parent)
        at = None if parent == _ROOT or before is None or before >= at else before
    return found[::-1]


def _add_event(chat: _Chat, place: str, event: object) -> None:
    fields: Mapping[str, object] = event if isinstance(event, dict) else {}
    match fields:
        case {"kind": "SystemPromptEvent", "system_prompt": {"text": text}}:
            chat.add(place, role="system", content=text)
        case {"kind": "MessageEvent", "llm_message": {"role": role, "content": content}}:
            chat.add(place, role=role, content=_openhands_content(content))
        case {"kind": "ActionEvent", "tool_call": {"id": call_id, "name": name, "arguments": text}}:
            thought = _openhands_text(fields.get("thought"))
            response = fields.get("llm_response_id")
            chat.add_call(place, thought, _call(call_id, name, text), response)
        case {
            "kind": "ObservationEvent",
            "tool_call_id": call_id,
            "observation": {"content": said},
        }:
            chat.add(place, role="tool", tool_call_id=call_id, content=_openhands_text(said))
        case {"kind": "AgentErrorEvent", "tool_call_id": call_id, "error": said}:
            chat.add(place, role="tool", tool_call_id=call_id, content=said)
        case {"kind": "UserRejectObservation", "tool_call_id": call_id}:
            chat.add(
                place, role="tool", tool_call_id=call_id, content=fields.get("rejection_reason")
            )
        case {"kind": kind} if kind in _SKIPPED_EVENTS:
            pass
        case {"kind": kind}:
            chat.leave_out(kind)
        case _:
            chat.add(place, role=None)  # the reader says what is wrong with it


def _openhands_content(content: object) -> object:
    if not isinstance(content, list):
        return content
    parts: list[object] = []
    for part in content:
        match part:
            case {"type": "image", "image_urls": list(urls)}:
                parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
            case {"type": "text", "text": text}:
                parts.append({"type": "text", "text": text})
            case _:
                parts.append(part)
    return parts


def _openhands_text(content: object) -> str:
    """Return the text of a content; an image in it is mentioned."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(
        str(part.get("text", "(an image)")) for part in parts if isinstance(part, dict)
    )


PEERS: Final[Mapping[str, Peer]] = {
    "openai-agents": _openai_agents,
    "hermes": _hermes,
    "openhands": _openhands,
}
"""The programs that can be read, by the names that the command line has for them."""
