"""The routes of AG-UI 1.0: `HttpAgent({url: "/v1/ag-ui"})` uses the first.

A thread is a conversation, and a run shows a turn to one request. Of a client's messages, only the
newest user message is read, and the answers to calls in `resume`; what it says about the agent or
about tools is ignored.

Each event has an id. A client that was cut off sends the newest id as `Last-Event-ID` to the second
route, and goes on from there, on any node, even after the server was killed. Without an id, that
route streams the newest run from its beginning.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

import anyio
from ag_ui.core import BaseEvent, MessagesSnapshotEvent, RunErrorEvent
from fastapi import APIRouter, Depends, Header
from pydantic import BaseModel, Field
from starlette.responses import Response

from turnkeeper.runtime import TurnkeeperError

from ..conversations.turn import Turn
from ..core.commands import OnOverlap
from ..core.listing import time_us
from ..core.snapshots import Slices
from ..core.transcript import Transcript
from ..errors import ConversationDeleted, EventIdConflict, MessageNotFound
from ..events import (
    FileContent,
    ImageContent,
    LoggedEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    RetractionEvent,
    TextDelta,
    TurnEndedEvent,
    UserMessageEvent,
)
from ..owner.loading import in_slices
from ..values.text import check_text
from .ag_ui import Out, Progress, RunCursor, RunEvents, Show, parse_run_cursor
from .ai_sdk import NAMELESS
from .bodies import PART_RULE, Given, Items, MayByBody
from .faults import PROBLEM, PROBLEMS, invalid_id, unusable
from .names import ID_LENGTH_MAX, Cursor
from .problems import OWN, ProblemRaised, once_it_happened
from .replies import EventStream, Feed, Write, json_slices
from .runs import RUN_ID, run_event_id, run_id_of
from .service import ConversationCaller, Reading
from .wire import sse

__all__ = ["ag_ui"]

ag_ui = APIRouter(prefix="/v1/ag-ui", responses=PROBLEMS)

HERE = "/{conversation_id}"

Item = LoggedEvent | TextDelta
FILE_PARTS = ("image", "audio", "video", "document")


class Source(Given):
    type: Literal["data", "url", "file"]
    value: str
    mime_type: str | None = Field(default=None, alias="mimeType")


class Part(Given):
    type: str
    text: str | None = None
    source: Source | None = None
    metadata: object = None


class Message(Given):
    id: str = Field(max_length=ID_LENGTH_MAX)
    role: Literal["user", "assistant", "tool", "reasoning", "activity"]
    content: str | Items[Part] | dict[str, object] | None = None


class ResumeEntry(Given):
    interrupt_id: str = Field(alias="interruptId")
    status: Literal["resolved", "cancelled"]
    payload: object = None


class ForwardedProps(Given):
    on_overlap: OnOverlap | None = None


class RunInput(Given):
    thread_id: str = Field(alias="threadId")
    run_id: str = Field(alias="runId", min_length=1, max_length=ID_LENGTH_MAX)
    messages: Items[Message]
    resume: Items[ResumeEntry] | None = None
    forwarded_props: ForwardedProps | None = Field(default=None, alias="forwardedProps")
    tools: list[object] | None = None
    context: list[object] | None = None
    state: object = None


Running = Annotated[ConversationCaller, Depends(MayByBody("write", "threadId"))]


@ag_ui.post("", status_code=200, response_class=EventStream, responses={409: PROBLEM})
async def run(caller: Running, body: RunInput) -> Response:
    """Send the newest user message, or the answers to calls, and stream the turn."""
    _check_is_served(body)
    answers = _answers_of(body.resume or ())
    message = None if answers else _newest_message(body.messages)
    if message is not None:
        turn = await _send(caller, message, body)
    else:
        turn = await _answer(caller, answers, body.run_id)
    on_screen = [each.id for each in body.messages]
    answered = tuple(answers)
    with once_it_happened():
        events = await _run_events(
            caller, turn, body.run_id, answered=answered, on_screen=on_screen
        )
    return EventStream(_feed(caller, turn, events))


@ag_ui.get(
    f"{HERE}/connect",
    status_code=200,
    response_class=EventStream,
    responses={204: {}, 410: PROBLEM},
)
async def connect(
    caller: Reading,
    *,
    after: str | None = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Go on with a run after a cursor; without one, stream the newest run from its beginning."""
    cursor = None
    if last_event_id:
        cursor = _cursor_of(last_event_id, header="last-event-id")
    elif after is not None:
        cursor = _cursor_of(after, parameter="after")
    await caller.check_exists()
    newest = await _newest_run(caller)
    if cursor is not None:
        turn = await _turn_of(caller, cursor)
        is_seen = newest is not None and await _is_end(caller, cursor.progress)
        if newest is None or newest[0].message_id == turn.message_id or not is_seen:
            events = await _run_events(caller, turn, cursor.run_id, after=cursor.progress)
            return EventStream(_feed(caller, turn, events))
    if newest is None:
        return Response(status_code=204)
    events = await _run_events(caller, *newest)
    return EventStream(_feed(caller, newest[0], events))


# --- reading what a client sends -----------------------------------------------------------------


def _check_is_served(body: RunInput) -> None:
    """Refuse the parts of the protocol that this server would otherwise silently ignore."""
    if body.tools:
        raise unusable("must be empty: tools run on the server", pointer="#/tools")
    if body.context:
        said = "must be empty: the agent reads nothing but the conversation"
        raise unusable(said, pointer="#/context")
    if body.state not in (None, {}):
        said = "must be empty: no state is shared with the client"
        raise unusable(said, pointer="#/state")


def _newest_message(messages: Sequence[Message]) -> Message:
    for message in reversed(messages):
        if message.role == "user":
            return message
    raise unusable("must have a user message, unless there is `resume`", pointer="#/messages")


def _answers_of(entries: Sequence[ResumeEntry]) -> dict[str, bool | str]:
    """Return the answers of a client to the calls that wait."""
    answers: dict[str, bool | str] = {}
    for entry in entries:
        payload = entry.payload if isinstance(entry.payload, dict) else {}
        approved, reason = payload.get("approved"), payload.get("reason")
        answer: bool | str
        if entry.status == "cancelled":
            answer = False
        elif isinstance(approved, bool) and isinstance(reason, str | None):
            answer = approved or reason or False
        else:
            said = (
                "each payload must have `approved`, true or false; it may have a `reason`, a text"
            )
            raise unusable(said, pointer="#/resume")
        if answers.setdefault(entry.interrupt_id, answer) != answer:
            raise unusable("must not answer a call in two ways", pointer="#/resume")
    return answers


def _content_of(message: Message) -> tuple[str, list[ImageContent], list[FileContent]]:
    if isinstance(message.content, str):
        return message.content, [], []
    texts, images, files = [], [], []
    for part in message.content if isinstance(message.content, list) else ():
        source = part.source
        if part.type == "text" and part.text is not None:
            texts.append(part.text)
        elif part.type not in FILE_PARTS or source is None or not _is_usable(source):
            raise unusable(PART_RULE, pointer="#/messages")
        elif part.type == "image" and source.mime_type is None:
            images.append(ImageContent(url=source.value))
        else:
            files.append(_file_of(part, source))
    return "\n".join(texts), images, files


def _is_usable(source: Source) -> bool:
    check_text("the address of a file", source.value)
    if source.type == "data":
        return source.mime_type is not None
    return source.type == "url" and source.value.startswith(("https://", "http://"))


def _file_of(part: Part, source: Source) -> FileContent:
    name = part.metadata.get("name") if isinstance(part.metadata, dict) else None
    media_type = source.mime_type or "application/octet-stream"
    is_data = source.type == "data"
    return FileContent(
        name=name if isinstance(name, str) else NAMELESS,
        media_type=media_type,
        data=source.value if is_data else None,
        url=None if is_data else source.value,
    )


def _cursor_of(given: str, **place: str) -> RunCursor:
    cursor = parse_run_cursor(given)
    if cursor is None:
        raise unusable("must be the id of an event of a run, as received", **place)
    return cursor


# --- finding the turn of a run -------------------------------------------------------------------


async def _send(caller: ConversationCaller, message: Message, body: RunInput) -> Turn:
    if not message.id:
        raise invalid_id(pointer="#/messages")
    content, images, files = _content_of(message)
    props = body.forwarded_props
    try:
        return await caller.conversation.send(
            content,
            images=images,
            files=files,
            message_id=message.id,
            author=caller.author,
            on_overlap=None if props is None else props.on_overlap,
            metadata={RUN_ID: body.run_id},
            event_id=run_event_id(body.run_id),
        )
    except EventIdConflict as error:
        raise ProblemRaised(OWN["run-id-conflict"]) from error


async def _answer(caller: ConversationCaller, answers: dict[str, bool | str], run_id: str) -> Turn:
    """Answer the calls that wait, and return their turn, running or ended."""
    await caller.check_exists()
    try:
        await caller.conversation.answer(answers, event_id=run_event_id(run_id))
    except EventIdConflict as error:
        raise ProblemRaised(OWN["run-id-conflict"]) from error
    with once_it_happened():
        return await _turn_of_answers(caller, answers)


async def _turn_of_answers(caller: ConversationCaller, answers: dict[str, bool | str]) -> Turn:
    calls, message_id = set(answers), None
    async for logged in caller.conversation.events(live=False):
        event = logged.event
        if isinstance(event, UserMessageEvent) and event.message_id and not event.is_reminder:
            message_id = event.message_id
        elif calls <= set(getattr(event, "tool_call_ids", ())):
            break
    assert message_id is not None, "calls were answered in a turn without a chat message"
    return await caller.conversation.turn(message_id)


async def _newest_run(caller: ConversationCaller) -> tuple[Turn, str] | None:
    """Return the newest turn, or that of a waiting message, and the run that it came with."""
    newest: UserMessageEvent | MessageQueuedEvent | None = None
    async for logged in caller.conversation.events(live=False):
        event = logged.event
        has_begun = isinstance(event, UserMessageEvent) and event.turn_id and event.message_id
        if has_begun or (isinstance(event, MessageQueuedEvent) and newest is None):
            assert isinstance(event, UserMessageEvent | MessageQueuedEvent), event.kind
            newest = event
    if newest is None or newest.message_id is None:
        return None
    try:
        turn = await caller.conversation.turn(newest.message_id)
    except MessageNotFound:
        return None  # the message waits in the conversation that this one was forked from
    return turn, run_id_of(newest) or newest.message_id


async def _turn_of(caller: ConversationCaller, cursor: RunCursor) -> Turn:
    """Return the turn of a cursor. Raises a problem if the log has another event there."""
    origin = await caller.find(cursor.origin)
    if origin is None or time_us(origin.event) != cursor.origin_us:
        raise ProblemRaised(OWN["gone"])
    message_id = getattr(origin.event, "message_id", None)
    if not isinstance(message_id, str):
        raise ProblemRaised(OWN["gone"])
    return await caller.conversation.turn(message_id)


async def _is_end(caller: ConversationCaller, progress: Progress) -> bool:
    """True if a client with this progress has seen the end of its run's turn."""
    newest = await caller.find(Cursor(progress.seq))
    return newest is not None and isinstance(newest.event, TurnEndedEvent | MessageWithdrawnEvent)


# --- streaming a run -----------------------------------------------------------------------------


async def _run_events(
    caller: ConversationCaller,
    turn: Turn,
    run_id: str,
    *,
    after: Progress | None = None,
    answered: Sequence[str] = (),
    on_screen: Sequence[str] | None = None,
) -> RunEvents:
    # For the run of a message that was sent just now, the log ends with that message.
    head = turn.seq
    awaiting: Sequence[str] = ()
    if turn.is_duplicate:
        state = await caller.at()
        head, awaiting = state.seq, state.turns.awaiting
    return RunEvents(
        caller.local_id,
        run_id,
        turn.message_id,
        head=head,
        awaiting=awaiting,
        after=after,
        answered=answered,
        on_screen=on_screen,
    )


def _feed(caller: ConversationCaller, turn: Turn, events: RunEvents) -> Feed:
    async def feed(write: Write) -> None:
        streams = caller.service.streams
        if streams.is_draining or streams.is_full:
            why = "draining" if streams.is_draining else "overloaded"
            await write(_frame(RunErrorEvent(message="connect again", code=why)))
            return
        with streams.opened():
            try:
                await _write_run(caller, turn, events, write)
            except TurnkeeperError as error:
                problem = caller.service.told(error)[0]
                # Without an id it is not part of the run, which goes on when the client reconnects.
                origin = events.origin or Cursor(turn.seq, turn.message_id)
                is_over = problem.retry_after_s is None
                over = RunCursor(origin, events.origin_us, events.run_id, Progress(0))
                cursor = over if is_over else None
                await write(
                    _frame(RunErrorEvent(message=problem.detail, code=problem.name), cursor)
                )

    return feed


async def _write_run(
    caller: ConversationCaller, turn: Turn, events: RunEvents, write: Write
) -> None:
    put = partial(_put, caller, events, write)
    streams = caller.service.streams
    items: AsyncIterator[Item] = aiter(turn)
    while not events.has_ended:
        try:
            item = await streams.until_beat(anext(items))
        except StopAsyncIteration:
            await put(events.end())
            return
        if item is None:
            await write(b":\n\n")
        else:
            await put(events.take(item))
            if isinstance(item, TextDelta):
                await streams.gather_pieces()


# Not a function inside `_write_run`: it calls itself, and would be a reference cycle that keeps the
# request.
async def _put(
    caller: ConversationCaller,
    events: RunEvents,
    write: Write,
    outputs: Iterable[Out | Show | None],
) -> None:
    for out in outputs:
        if out is None:
            await anyio.lowlevel.checkpoint()
        elif isinstance(out, Show):
            if await _may_show(caller, out):
                shown = events.show(out, await _transcript(caller, events))
                await _put(caller, events, write, shown)
        else:
            cursor = None if out.progress is None else _cursor(events, out.progress)
            if isinstance(out.event, MessagesSnapshotEvent):
                await write(await in_slices(_snapshot_frame(out.event, cursor)))
            else:
                await write(_frame(out.event, cursor))


async def _may_show(caller: ConversationCaller, asked: Show) -> bool:
    """False if none of the events in question takes something back.

    Only these are read. Condensations and waiting messages often come between the events of a turn,
    and the transcript would be read from the whole log for each.
    """
    if asked.before is None:
        return True
    async for seq, event in caller.conversation.events(after=asked.seq, live=False):
        if seq >= asked.before:
            return False
        if isinstance(event, RetractionEvent):
            return True
    return False


async def _transcript(caller: ConversationCaller, events: RunEvents) -> Transcript:
    """Return the transcript of the run's log. Raises `ConversationDeleted` if there is another."""
    assert events.origin is not None, "a snapshot before the run's first event"
    origin = replace(events.origin, at_us=events.origin_us)
    transcript, is_same = Transcript(), False
    async for logged in caller.conversation.events(live=False):
        transcript.fold(logged)
        is_same = is_same or origin.fits(logged)
    if not is_same:
        raise ConversationDeleted(caller.conversation_id)
    return transcript


def _cursor(events: RunEvents, progress: Progress) -> RunCursor:
    assert events.origin is not None, "an event of the run before its chat message"
    return RunCursor(events.origin, events.origin_us, events.run_id, progress)


def _frame(event: BaseEvent, cursor: RunCursor | None = None) -> bytes:
    """Return a server-sent event; its id is the cursor of a client that got it."""
    return _id_line(cursor) + sse(_json(event))


def _snapshot_frame(event: MessagesSnapshotEvent, cursor: RunCursor | None) -> Slices[bytes]:
    """As `_frame`, in slices."""
    empty = _json(event.model_copy(update={"messages": []}))
    data = yield from json_slices({**empty, "messages": map(_json, event.messages)})
    return b"%bdata: %b\n\n" % (_id_line(cursor), data)


def _id_line(cursor: RunCursor | None) -> bytes:
    return b"" if cursor is None else f"id: {cursor}\n".encode()


def _json(part: BaseModel) -> dict[str, object]:
    return part.model_dump(mode="json", by_alias=True)
