"""Recorded conversations in the OpenAI chat format, read into exchanges that can be replayed.

A file is a JSON list, or JSON Lines; each item is a list of messages, or an object that has them
under `messages` or `traj`, and may have its name under `id`, `conversation_id` or `session_id`. A
list of messages, or lines of messages, are one conversation. The older form of tool calls
(`function_call`, and results with the role `function`) is read too. An item that cannot be used is
left out and reported as an `InputProblem` that names file, item, message and field; other items are
still read. Items and messages are counted from 1; the number of a JSON Lines item is its line.

Providers reuse call ids within one conversation. Results are matched with the calls that are open,
so a reused id does no harm; it is kept as `provider_call_id` only.

This module is pure: it does not read files or wait.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from pydantic import BaseModel, ConfigDict

from ..values.frozen import FrozenObject

__all__ = [
    "InputProblem",
    "NamedMessages",
    "Parsed",
    "RecordedCall",
    "RecordedConversation",
    "RecordedExchange",
    "RecordedStep",
    "parse_messages",
    "parse_recorded",
]


_EXPORT_BEGINS = b'{"turnkeeper_export"'


class Recorded(BaseModel):
    """A part of a recording: a frozen value that can be sent as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RecordedCall(Recorded):
    """A tool call with its result."""

    provider_call_id: str
    tool_name: str
    arguments: FrozenObject
    result: str


class RecordedStep(Recorded):
    """One answer of the model: a text, or calls with the text beside them."""

    text: str
    calls: tuple[RecordedCall, ...] = ()


class RecordedExchange(Recorded):
    """A user's message, and everything that the agent did until the user wrote again."""

    content: str
    images: tuple[str, ...] = ()
    steps: tuple[RecordedStep, ...] = ()


class RecordedConversation(Recorded):
    """One item of a file."""

    item: int
    name: str | None = None
    """The name that the recording gives it, if it does."""
    system_prompt: str | None = None
    opening: tuple[str, ...] = ()
    """The agent's messages before the first user message."""
    exchanges: tuple[RecordedExchange, ...]


class InputProblem(Recorded):
    """The reason why a file or an item cannot be used."""

    file: str
    place: str | None = None
    """The place in a recording whose parts have names of their own."""
    item: int | None = None
    message: int | None = None
    field: str | None = None
    found: str

    def __str__(self) -> str:
        """Return the place, then the problem."""
        places = [self.file] if self.place is None else [self.file, self.place]
        if self.item is not None:
            places.append(f"item {self.item}")
        if self.message is not None:
            places.append(f"message {self.message}")
        if self.field is not None:
            places.append(self.field)
        return f"{', '.join(places)}: {self.found}"


class Parsed(NamedTuple):
    """The conversations and the problems of one file."""

    conversations: tuple[RecordedConversation, ...]
    problems: tuple[InputProblem, ...]
    left_out: tuple[str, ...] = ()
    """The parts that were left out of otherwise usable conversations."""


class NamedMessages(NamedTuple):
    """The messages of one conversation of another program, each with its place there."""

    name: str
    messages: Sequence[Mapping[str, object]]
    places: Sequence[str]


def parse_recorded(content: bytes, file: str) -> Parsed:
    """Read a file's content; `file` only names it in the problems."""
    conversations: list[RecordedConversation] = []
    problems: list[InputProblem] = []
    try:
        if content.startswith(_EXPORT_BEGINS):
            _unusable("it is an export of turnkeeper; `turnkeeper export --to openai` writes chats")
        items = list(_items(content, is_lines=file.endswith((".jsonl", ".ndjson"))))
        if not items:
            _unusable("there is no conversation in it")
    except _Unusable as unusable:
        return Parsed((), (unusable.problem(file),))
    for number, item in items:
        try:
            conversations.append(_Reader(number, item).read())
        except _Unusable as unusable:
            problems.append(unusable.problem(file, number))
    return Parsed(tuple(conversations), tuple(problems))


def parse_messages(chats: Sequence[NamedMessages], file: str) -> Parsed:
    """Read conversations whose messages come from another program's `file`, which is only named."""
    conversations: list[RecordedConversation] = []
    problems: list[InputProblem] = []
    for number, chat in enumerate(chats, 1):
        try:
            read = _Reader(number, list(chat.messages)).read()
        except _Unusable as unusable:
            at = unusable.message
            place = f"conversation {chat.name}"
            place += "" if at is None else f", {chat.places[at - 1]}"
            problem = unusable.problem(file)
            problems.append(problem.model_copy(update={"place": place, "message": None}))
        else:
            conversations.append(read.model_copy(update={"name": chat.name}))
    return Parsed(tuple(conversations), tuple(problems))


class _Unusable(Exception):
    """Raised to leave out the item, or the file if no item is named."""

    def __init__(self, found: str, message: int | None, field: str | None) -> None:
        super().__init__(found)
        self.found = found
        self.message = message
        self.field = field

    def problem(self, file: str, item: int | None = None) -> InputProblem:
        return InputProblem(
            file=file, item=item, message=self.message, field=self.field, found=self.found
        )


def _unusable(found: str, *, message: int | None = None, field: str | None = None) -> NoReturn:
    raise _Unusable(found, message, field)


# --- from bytes to items -------------------------------------------------------------------------


class _Broken(NamedTuple):
    """A line that is not JSON; reported as the problem of its item."""

    found: str


def _items(content: bytes, *, is_lines: bool) -> Iterator[tuple[int, object]]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _unusable(f"not UTF-8 text: byte {error.start + 1} cannot be read")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    whole = _Broken("") if is_lines else _loaded(text)
    match whole:
        case list() if _are_messages(whole):
            yield 1, whole
        case list():
            yield from enumerate(whole, 1)
        case dict():
            yield 1, whole
        case _Broken() if is_lines or (lines and isinstance(_loaded(lines[0][1]), list | dict)):
            loaded = [(number, _loaded(line)) for number, line in lines]
            if _are_messages([item for _, item in loaded]):
                yield 1, [item for _, item in loaded]
            else:
                yield from loaded
        case _Broken():
            _unusable(whole.found if lines else "it is empty")
        case _:
            _unusable(f"a list of conversations is needed, found {_name(whole)}")


def _are_messages(items: Sequence[object]) -> bool:
    """True if these are the messages of one conversation."""
    return bool(items) and all(isinstance(item, dict) and "role" in item for item in items)


def _loaded(text: str) -> object:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        return _Broken(f"not JSON at line {error.lineno} column {error.colno}: {error.msg.lower()}")
    except ValueError as error:
        return _Broken(f"not JSON: {error}")
    except RecursionError:
        return _Broken("not JSON that can be read: nested too deeply")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _name(value: object) -> str:
    """Name the type of a JSON value in JSON's own words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "a list"
        case _:
            return "an object"


# --- from an item to exchanges -------------------------------------------------------------------


class _OpenCall:
    """A call without its result yet, and the number of its message."""

    def __init__(self, message: int, name: str, arguments: FrozenObject) -> None:
        self.message = message
        self.name = name
        self.arguments = arguments
        self.result: str | None = None


class _Reader:
    """Reads one item, message by message."""

    def __init__(self, item: int, value: object) -> None:
        self._item = item
        self._name = _name_of(value)
        self._messages = _messages(value)
        self._system_prompt: str | None = None
        self._opening: list[str] = []
        self._exchanges: list[RecordedExchange] = []
        self._said = ""
        self._calls: dict[str, _OpenCall] = {}

    def read(self) -> RecordedConversation:
        for number, value in enumerate(self._messages, 1):
            message = _Message(number, value)
            match message.role:
                case "tool":
                    self._tool(message)
                    continue
                case "function":
                    self._function(message)
                    continue
                case _:
                    self._close_calls(number)
            match message.role:
                case "system" | "developer":
                    self._system(message)
                case "user":
                    text, images = message.user_content()
                    self._exchanges.append(RecordedExchange(content=text, images=images))
                case "assistant":
                    self._assistant(message)
                case role:
                    message.unusable(f"unknown role {role!r}", field="role")
        self._close_calls(None)
        if not self._exchanges:
            _unusable("there is no user message in it")
        return RecordedConversation(
            item=self._item,
            name=self._name,
            system_prompt=self._system_prompt,
            opening=tuple(self._opening),
            exchanges=tuple(self._exchanges),
        )

    def _system(self, message: _Message) -> None:
        if message.number > 1:
            message.unusable("a system message is only understood as the first message")
        self._system_prompt = message.text()

    def _assistant(self, message: _Message) -> None:
        calls = message.calls()
        text = message.text(may_be_null=bool(calls))
        if calls and not self._exchanges:
            message.unusable("a call before the first user message", field="tool_calls")
        if calls:
            self._said, self._calls = text, calls
        elif not self._exchanges:
            self._opening.append(text)
        else:
            self._add(RecordedStep(text=text))

    def _tool(self, message: _Message) -> None:
        call_id = message.string("tool_call_id")
        call = self._calls.get(call_id)
        if call is None:
            message.unusable(f"a result without its call: no open call has the id {call_id!r}")
        if call.result is not None:
            message.unusable(f"a second result for the call {call_id!r}")
        call.result = message.text()

    def _function(self, message: _Message) -> None:
        """Take a result in the older form, which names its function and has no id."""
        name = message.string("name")
        call = next((call for call in self._calls.values() if call.name == name), None)
        if call is None or call.result is not None:
            message.unusable(f"a result without its call: no function {name!r} was called")
        call.result = message.text()

    def _close_calls(self, number: int | None) -> None:
        """Make a step of the open calls; each of them must have its result."""
        calls = []
        for call_id, call in self._calls.items():
            if call.result is None:
                _unusable(
                    f"the call {call_id!r} has no result "
                    + ("at the end" if number is None else f"before message {number}"),
                    message=call.message,
                    field="tool_calls",
                )
            calls.append(
                RecordedCall(
                    provider_call_id=call_id,
                    tool_name=call.name,
                    arguments=call.arguments,
                    result=call.result,
                )
            )
        if calls:
            self._add(RecordedStep(text=self._said, calls=tuple(calls)))
        self._calls = {}

    def _add(self, step: RecordedStep) -> None:
        last = self._exchanges[-1]
        self._exchanges[-1] = last.model_copy(update={"steps": (*last.steps, step)})


def _name_of(value: object) -> str | None:
    """Return the name that an item gives its conversation."""
    if isinstance(value, dict):
        for field in ("conversation_id", "session_id", "id"):
            match value.get(field):
                case str(name) if name:
                    return name
                case int(number) if not isinstance(number, bool):
                    return str(number)
                case _:
                    pass
    return None


def _messages(value: object) -> Sequence[object]:
    match value:
        case _Broken(found):
            _unusable(found)
        case list():
            return value
        case {"messages": list(messages)}:
            return messages
        case {"messages": found}:
            _unusable(f"a list of messages is needed, found {_name(found)}", field="messages")
        case {"traj": list(messages)}:
            return messages
        case {"traj": found}:
            _unusable(f"a list of messages is needed, found {_name(found)}", field="traj")
        case {"role": _}:
            _unusable("a message where a conversation is needed: put its messages in a list")
        case dict():
            _unusable("an object with neither `messages` nor `traj`")
        case _:
            _unusable(f"a conversation is needed, found {_name(value)}")


class _Message:
    """One message of an item, with readers for its fields."""

    def __init__(self, number: int, value: object) -> None:
        self.number = number
        if not isinstance(value, dict):
            self.unusable(f"a message is an object, found {_name(value)}")
        self._fields: Mapping[str, object] = value
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            self.unusable("text that is not valid Unicode (half of a surrogate pair)")
        except RecursionError:
            self.unusable("nested too deeply")
        if "role" not in value:
            self.unusable("a message without a role", field="role")
        self.role = self.string("role")

    def unusable(self, found: str, *, field: str | None = None) -> NoReturn:
        _unusable(found, message=self.number, field=field)

    def string(self, field: str) -> str:
        value = self._fields.get(field)
        if not isinstance(value, str):
            what = _name(value) if field in self._fields else "nothing"
            self.unusable(f"a string is needed, found {what}", field=field)
        return value

    def text(self, *, may_be_null: bool = False) -> str:
        """Return the content as text, from a string or a list of text parts."""
        if may_be_null and self._fields.get("content") is None:
            return ""
        text, images = self.user_content()
        if images:
            self.unusable("an image is only understood in a user message", field="content")
        return text

    def user_content(self) -> tuple[str, tuple[str, ...]]:
        """Return the text and the URLs of the images."""
        parts = self._fields.get("content")
        if not isinstance(parts, list):
            return self.string("content"), ()
        texts: list[str] = []
        images: list[str] = []
        for number, part in enumerate(parts, 1):
            match part:
                case {"type": "text", "text": str(text)}:
                    texts.append(text)
                case {"type": "image_url", "image_url": {"url": str(url)}}:
                    images.append(url)
                case _:
                    self.unusable(
                        f"part {number} is neither a text nor an image_url", field="content"
                    )
        return "\n".join(texts), tuple(images)

    def calls(self) -> dict[str, _OpenCall]:
        """Return the tool calls by id."""
        values = self._fields.get("tool_calls")
        if values is None:
            return self._function_call()
        if not isinstance(values, list):
            self.unusable(f"a list is needed, found {_name(values)}", field="tool_calls")
        calls: dict[str, _OpenCall] = {}
        for number, value in enumerate(values, 1):
            field = f"tool_calls[{number}]"
            match value:
                case {"id": str(call_id), "function": {"name": str(name), "arguments": str(text)}}:
                    pass
                case _:
                    self.unusable(
                        "a call needs an `id` and a `function` with `name` and `arguments`, all "
                        "strings",
                        field=field,
                    )
            if call_id in calls:
                self.unusable(f"two calls of one message have the id {call_id!r}", field=field)
            arguments = self._arguments(text, f"{field}.function.arguments")
            calls[call_id] = _OpenCall(self.number, name, arguments)
        return calls

    def _function_call(self) -> dict[str, _OpenCall]:
        """Return a call in the older form, with a generated id."""
        found = self._fields.get("function_call")
        if found is None:
            return {}
        match found:
            case {"name": str(name), "arguments": str(text)}:
                pass
            case _:
                self.unusable(
                    "a call needs a `name` and `arguments`, both strings", field="function_call"
                )
        arguments = self._arguments(text, "function_call.arguments")
        return {f"function_call_{self.number}": _OpenCall(self.number, name, arguments)}

    def _arguments(self, text: str, field: str) -> FrozenObject:
        arguments = {} if text == "" else _loaded(text)
        if isinstance(arguments, _Broken):
            self.unusable(f"the arguments are {arguments.found}", field=field)
        if not isinstance(arguments, dict):
            self.unusable(f"the arguments are {_name(arguments)}, not an object", field=field)
        try:
            return FrozenObject(arguments)
        except ValueError as error:
            self.unusable(f"arguments that cannot be stored: {error}", field=field)
