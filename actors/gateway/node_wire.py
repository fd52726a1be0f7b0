"""The messages between nodes, as JSON: commands, and their replies or errors.

The set is closed: a command goes by its name, and each of its fields is rebuilt by its own
constructor, which checks it as if a caller in this process had passed it. An error goes as the
names of its classes, its text and its facts; the receiver raises the first class that it knows. No
code is ever sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TypeVar, cast

from turnkeeper.runtime import OutcomeUnknown, TurnkeeperError

from ..core.admission import AdmissionRefused, Appended, Duplicate, Violation
from ..core.commands import (
    Answer,
    Append,
    AppendAll,
    Behalf,
    CancelTurn,
    Change,
    Delete,
    Expected,
    FromOutside,
    Interrupt,
    Pause,
    Resume,
    Retract,
    Send,
    Sent,
    Undo,
)
from ..errors import InvalidInput
from ..events import (
    Event,
    FileContent,
    ImageContent,
    TextDelta,
    UserMessageEvent,
    decode_event,
    encode_event,
)
from ..journal import Deletion
from ..owner.nodes import Passed
from ..values.frozen import FrozenObject

__all__ = [
    "decode_ask",
    "decode_line",
    "decode_reply",
    "encode_ask",
    "encode_error",
    "encode_line",
    "encode_reply",
]

R = TypeVar("R")
Json = dict[str, object]

_COMMANDS: Mapping[str, type[FromOutside[object]]] = {
    each.__name__: cast("type[FromOutside[object]]", each)
    for each in (
        Answer,
        Append,
        AppendAll,
        CancelTurn,
        Change,
        Delete,
        Interrupt,
        Pause,
        Resume,
        Retract,
        Send,
        Undo,
    )
}


def _to_bytes(value: object) -> bytes:
    # A lone surrogate is sent unchanged: only the owner decides what is invalid.
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _from_bytes(data: bytes) -> Json:
    """Return the JSON object. Raises `ValueError` if the bytes are not one."""
    try:
        value = json.loads(data.decode("utf-8", "surrogatepass"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not an object")  # noqa: TRY004 - the one error of what cannot be read
    return value


def _event_json(event: Event) -> object:
    return json.loads(encode_event(event))


def _event(value: object) -> Event:
    return decode_event(json.dumps(value))


# --- commands -------------------------------------------------------------------------------------


def encode_ask(conversation_id: str, command: FromOutside[R]) -> bytes:
    """Encode a command to a conversation. Raises `InvalidInput` if JSON cannot hold it."""
    said: Json = {"conversation_id": conversation_id, "command": type(command).__name__}
    try:
        for field in fields(command):
            value = getattr(command, field.name)
            # What is left at None goes unsaid, since an older process may not know the field. The
            # fields that are not in the constructor are computed from the others.
            if field.init and not (value is None and field.default is None):
                said[field.name] = _out(value)
        return _to_bytes(said)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("the command holds a value that JSON cannot hold") from error


def _out(value: object) -> object:
    match value:
        case Event():
            return _event_json(value)
        case ImageContent() | FileContent():
            return value.model_dump(mode="json")
        case Expected():
            given = {field.name: getattr(value, field.name) for field in fields(value)}
            return {name: _out(one) for name, one in given.items() if one is not None}  # as above
        case Behalf():
            return {**asdict(value), "scopes": list(value.scopes)}
        case tuple():
            return [_out(one) for one in value]
        case _:
            return value


def decode_ask(data: bytes) -> tuple[str, FromOutside[object]]:
    """Return a command and the id of its conversation.

    Raises `ValueError` if it cannot be read; the subclass `InvalidInput` means an error of its
    caller.
    """
    said = _from_bytes(data)
    conversation_id, name = said.pop("conversation_id", None), said.pop("command", None)
    if not isinstance(conversation_id, str) or not isinstance(name, str):
        raise ValueError("no command to a conversation")  # noqa: TRY004 - as above
    made = _COMMANDS.get(name)
    if made is None:
        raise ValueError("a command that is not known here")
    known = {field.name for field in fields(made)}
    if not known.issuperset(said):
        # It comes from a newer process, and this one would not do what the field asks for.
        raise ValueError("a command with a field that is not known here")
    build = cast("Callable[..., FromOutside[object]]", made)
    try:
        return conversation_id, build(**{key: _field(key, value) for key, value in said.items()})
    except (TypeError, AttributeError, KeyError, RecursionError) as error:
        raise ValueError("a field of the command has the wrong type") from error


def _field(name: str, value: object) -> object:
    """Return a field's value as commands take it; a name means the same in all commands."""
    if value is None:
        return None
    make = _FIELDS.get(name)
    return value if make is None else make(value)


def _tuple_of(make: Callable[[object], object]) -> Callable[[object], object]:
    def made(value: object) -> object:
        if not isinstance(value, list):
            raise TypeError
        return tuple(map(make, value))

    return made


def _same(value: object) -> object:
    return value


def _expected(value: object) -> Expected:
    said = dict(cast("Json", value))
    behalf = said.pop("behalf", None)
    if behalf is not None:
        facts = dict(cast("Json", behalf))
        facts["scopes"] = _tuple_of(_same)(facts["scopes"])
        behalf = Behalf(**facts)  # type: ignore[arg-type]  # checked by its constructor
    return Expected(**said, behalf=behalf)  # type: ignore[arg-type]  # as well


_FIELDS: Mapping[str, Callable[[object], object]] = {
    "event": _event,
    "event_ids": _tuple_of(_same),
    "events": _tuple_of(_event),
    "expected": _expected,
    "files": _tuple_of(FileContent.model_validate),
    "images": _tuple_of(ImageContent.model_validate),
    "labels": lambda value: FrozenObject(cast("Json", value)),
    "metadata": lambda value: FrozenObject(cast("Json", value)),
}


# --- replies --------------------------------------------------------------------------------------


def encode_reply(reply: object) -> bytes:
    """Encode the reply of a command."""
    name = type(reply).__name__
    match reply:
        case Sent() | Appended() | Duplicate():
            said: object = {
                field.name: getattr(reply, field.name)
                for field in fields(reply)
                if field.name != "event_id"  # beside it: an older process does not know it
            }
        case Deletion():
            said = {**reply._asdict(), "forks": list(reply.forks)}
        case tuple():
            said = [_event_json(event) for event in reply]
        case _:
            assert reply is None or isinstance(reply, bool), name
            said = reply
    answer: Json = {"reply": name, "value": said}
    if isinstance(reply, Sent):
        answer["event_id"] = reply.event_id
    return _to_bytes(answer)


def decode_reply(data: bytes) -> object:
    """Return the reply of a command, or raise the error in its place.

    Raises `ValueError` if it cannot be read.
    """
    said = _from_bytes(data)
    try:
        if "error" not in said:
            return _reply(said)
        error = _error(said)
    except (TypeError, AttributeError, KeyError, RecursionError) as unread:
        raise ValueError("a part of the answer has the wrong type") from unread
    try:
        raise error
    finally:
        del error  # its traceback refers to this frame


def _reply(said: Json) -> object:
    value = said.get("value")
    match said.get("reply"):
        case "Sent":
            sent = {**cast("Json", value), "event_id": said.get("event_id")}
            return Sent(**sent)  # type: ignore[arg-type]  # of our own key
        case "Appended":
            return Appended(**cast("dict[str, int]", value))
        case "Duplicate":
            return Duplicate(**cast("dict[str, int]", value))
        case "Deletion":
            return Deletion(**cast("Json", value))  # type: ignore[arg-type]  # of our own key
        case "tuple":
            found = tuple(map(_event, cast("Sequence[object]", value)))
            if not all(isinstance(event, UserMessageEvent) for event in found):
                raise ValueError("events that are not chat messages")
            return found
        case "bool" | "NoneType":
            return value
        case _:
            raise ValueError("a reply that is not known here")


# --- errors ---------------------------------------------------------------------------------------


def encode_error(error: TurnkeeperError) -> bytes:
    """Encode an error that is sent in place of a reply."""
    classes = [kind.__name__ for kind in type(error).__mro__ if issubclass(kind, TurnkeeperError)]
    facts = {
        name: value
        for name, value in vars(error).items()
        if not name.startswith("_") and _is_plain(value)
    }
    said: Json = {"error": classes, "text": str(error), "facts": facts}
    if isinstance(error, AdmissionRefused):
        violation = error.violation
        event = _event_json(violation.event)
        said["violation"] = {"name": violation.name, "event": event, "reason": violation.reason}
    return _to_bytes(said)


def _is_plain(value: object) -> bool:
    match value:
        case str() | int() | float() | bool() | None:
            return True
        case list() | tuple():
            return all(map(_is_plain, value))
        case dict():
            return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
        case _:
            return False


def _errors() -> Mapping[str, type[TurnkeeperError]]:
    """Return the library's own errors by name; applications' errors stay in their process."""
    found: dict[str, type[TurnkeeperError]] = {}
    kinds = [TurnkeeperError]
    while kinds:
        kind = kinds.pop()
        kinds += kind.__subclasses__()
        if kind.__module__.startswith("turnkeeper."):
            found[kind.__name__] = kind
    return found


def _error(said: Json) -> TurnkeeperError:
    names, text, facts = said.get("error"), said.get("text"), said.get("facts")
    if not (isinstance(names, list) and isinstance(text, str) and isinstance(facts, dict)):
        raise ValueError("an error that cannot be read")  # noqa: TRY004 - as above
    known = _errors()
    kind = next((known[name] for name in names if name in known), OutcomeUnknown)
    # Its constructor would build the text from its arguments, but the text is here already.
    error = kind.__new__(kind, text)
    for name, value in facts.items():
        setattr(error, name, tuple(value) if isinstance(value, list) else value)
    if isinstance(error, AdmissionRefused):
        found = cast("Json", said["violation"])
        error.violation = Violation(
            found["name"],  # type: ignore[arg-type]  # of our own key
            _event(found["event"]),
            str(found["reason"]),
        )
    return error


# --- pieces ---------------------------------------------------------------------------------------


def encode_line(item: Passed | TextDelta | None) -> bytes:
    """Encode a line of a stream of pieces; None encodes a heartbeat."""
    match item:
        case TextDelta():
            return _to_bytes({"piece": list(item)}) + b"\n"
        case Passed():
            return _to_bytes({"passed": list(item)}) + b"\n"
        case None:
            return b"{}\n"


def decode_line(line: bytes) -> Passed | TextDelta | None:
    """Decode a line of a stream of pieces. Raises `ValueError` if it cannot be read."""
    match _from_bytes(line):
        case {
            "piece": [
                int(epoch),
                str(turn_id),
                int(answer),
                int(attempt),
                int(offset),
                str(text),
            ]
        }:
            return TextDelta(epoch, turn_id, answer, attempt, offset, text)
        case {"passed": [int(seq), (str() | None) as ended]}:
            return Passed(seq, ended)
        case _:
            return None
