"""The routes of the AI SDK's chat: `DefaultChatTransport({api: "/v1/ai-sdk/chat"})` uses them.

A client may leave at any chunk and resume: the running turn is streamed from its beginning with the
same id, which replaces the message that the client has. The client's `stop()` only closes the
stream; the third route interrupts the turn.

Of an assistant message that a client sends, only the answers to calls are read: their ids, yes or
no, and the reason. Its arguments and results are ignored.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.responses import Response

from turnkeeper.runtime import TurnkeeperError

from ..conversations.conversation import Conversation
from ..conversations.turn import Turn
from ..core.commands import OnOverlap
from ..errors import ConversationNotFound, MessageIdConflict, MessageNotFound
from ..events import (
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    FileContent,
    LoggedEvent,
    MessageQueuedEvent,
    TextDelta,
    UserMessageEvent,
)
from ..values.text import check_text
from .ai_sdk import NAMELESS, TurnChunks, is_client_id, next_version
from .bodies import PART_RULE, Given, Items, MayByBody
from .faults import PROBLEMS, invalid_id, unusable
from .names import ID_LENGTH_MAX
from .replies import EventStream, Feed, Write, json_reply
from .service import ConversationCaller, Reading, Writing
from .wire import sse

__all__ = ["ai_sdk"]

ai_sdk = APIRouter(prefix="/v1/ai-sdk/chat", responses=PROBLEMS)

HERE = "/{conversation_id}"
HEADERS = {"x-vercel-ai-ui-message-stream": "v1"}
Item = LoggedEvent | TextDelta


class Approval(Given):
    id: str
    approved: bool | None = None
    reason: str | None = None


class Part(Given):
    type: str
    text: str | None = None
    url: str | None = None
    media_type: str | None = Field(default=None, alias="mediaType")
    filename: str | None = None
    state: str | None = None
    approval: Approval | None = None


class Message(Given):
    id: str = Field(max_length=ID_LENGTH_MAX)
    role: Literal["user", "assistant"]
    parts: Items[Part] = Field(max_length=10_000)


class ChatBody(Given):
    id: str
    messages: Items[Message] = Field(min_length=1)
    trigger: Literal["submit-message", "regenerate-message"] = "submit-message"
    message_id: str | None = Field(default=None, alias="messageId")
    """With `regenerate-message`: the assistant message that is to be regenerated, if named."""
    on_overlap: OnOverlap | None = None


Chatting = Annotated[ConversationCaller, Depends(MayByBody("write", "id"))]


@ai_sdk.post("", status_code=200, response_class=EventStream)
async def chat(caller: Chatting, body: ChatBody) -> Response:
    """Send the newest message, or the answers to calls, and stream the turn."""
    newest = body.messages[-1]
    if newest.role == "user":
        return EventStream(_feed(caller, await _send(caller, newest, body)), HEADERS)
    answers = _answers_of(newest)
    await caller.check_exists()
    # Looked up first, so that nothing is written if the message belongs to no turn here.
    turn = await _turn_of_answers(caller, newest.id)
    await caller.conversation.answer(answers)
    return EventStream(_feed(caller, turn, has_begun=True, answered=frozenset(answers)), HEADERS)


async def _send(caller: ConversationCaller, message: Message, body: ChatBody) -> Turn:
    """Send a message, or the next version of one that was edited or needs a new answer."""
    if not is_client_id(message.id):
        raise invalid_id(pointer="#/messages")
    content, files = _content_of(message)
    conversation = caller.conversation

    async def send(message_id: str, replaces: str | None) -> Turn:
        return await conversation.send(
            content,
            files=files,
            message_id=message_id,
            on_overlap=body.on_overlap,
            replaces=replaces,
            author=caller.author,
        )

    # Sent first, since most messages are new: the log is searched only for a known one.
    with suppress(MessageIdConflict):
        turn = await send(message.id, None)
        if not turn.is_duplicate:
            return turn
    versions = await _versions(conversation, message.id)
    if not versions:
        return await send(message.id, None)  # known, but no turn answers it: report the conflict
    *earlier, newest = versions
    if body.trigger == "regenerate-message":
        # The reply to the same request was lost: it asks for another answer in place of an earlier
        # one than the newest, or of one that is not there yet.
        named = body.message_id
        is_repeat = named != newest.turn_id and named in {turn.turn_id for turn in earlier}
        if is_repeat or await newest.find_end() is None:
            return newest
    else:
        with suppress(MessageIdConflict):  # known already, unless its content differs
            return await send(newest.message_id, earlier[-1].message_id if earlier else None)
    return await send(next_version(newest.message_id), newest.message_id)


async def _versions(conversation: Conversation, client_id: str) -> list[Turn]:
    """Return the turns of all versions of a message in the log, oldest first."""
    found: list[Turn] = []
    looked_for = client_id
    while True:
        try:
            found.append(await conversation.turn(looked_for))
        except (ConversationNotFound, MessageNotFound):
            return found
        looked_for = next_version(looked_for)


@ai_sdk.get(f"{HERE}/stream", status_code=200, response_class=EventStream, responses={204: {}})
async def resume_stream(caller: Reading) -> Response:
    """Stream the running turn from its beginning; 204 if none runs."""
    try:
        turn = await caller.conversation.running()
    except ConversationNotFound:
        turn = None  # clients resume before the first message too
    if turn is None:
        return Response(status_code=204)
    return EventStream(_feed(caller, turn, has_begun=True), HEADERS)


class StopBody(Given):
    message_id: str | None = Field(default=None, alias="messageId")


@ai_sdk.post(f"{HERE}/stop")
async def stop(caller: Writing, body: StopBody) -> Response:
    """Interrupt the running turn; `messageId` is the assistant message that the user saw."""
    return json_reply({"changed": await caller.conversation.interrupt(body.message_id)})


# --- reading what a client sends -----------------------------------------------------------------


def _content_of(message: Message) -> tuple[str, list[FileContent]]:
    texts, files = [], []
    for part in message.parts:
        if part.type == "text" and part.text is not None:
            texts.append(part.text)
        elif part.type == "file" and (file := _file_of(part)) is not None:
            files.append(file)
        else:
            raise unusable(PART_RULE, pointer="#/messages")
    return "\n".join(texts), files


def _file_of(part: Part) -> FileContent | None:
    """Return the file of a part; None if it has neither bytes nor a web address."""
    name, media_type, url = part.filename or NAMELESS, part.media_type or "", part.url or ""
    check_text("the address of a file", url)
    head, _, data = url.partition(",")
    if head.startswith("data:") and head.endswith(";base64"):
        return FileContent(name=name, media_type=media_type, data=data)
    if url.startswith(("https://", "http://")):
        return FileContent(name=name, media_type=media_type, url=url)
    return None


def _answers_of(message: Message) -> dict[str, bool | str]:
    """Return the answers of a client to the calls that wait in its newest step."""
    starts = [n for n, part in enumerate(message.parts) if part.type == "step-start"]
    answers: dict[str, bool | str] = {}
    for part in message.parts[starts[-1] if starts else 0 :]:
        approval = part.approval
        if part.state == "approval-responded" and approval and approval.approved is not None:
            answer = approval.approved or approval.reason or False
            if answers.setdefault(approval.id, answer) != answer:
                raise unusable("must not answer a call in two ways", pointer="#/messages")
    if not answers:
        raise unusable("must have answers to the calls that wait", pointer="#/messages")
    return answers


async def _turn_of_answers(caller: ConversationCaller, turn_id: str) -> Turn:
    """Return the turn of an assistant message, running or ended."""
    running = await caller.conversation.running()
    if running is not None and running.turn_id == turn_id:
        return running
    async for logged in caller.conversation.events(live=False):
        event = logged.event
        if isinstance(event, UserMessageEvent) and event.turn_id == turn_id and event.message_id:
            return await caller.conversation.turn(event.message_id)
    said = "the newest must have the id of an answer of this conversation"
    raise unusable(said, pointer="#/messages")


# --- streaming a turn ----------------------------------------------------------------------------


def _feed(
    caller: ConversationCaller,
    turn: Turn,
    *,
    has_begun: bool = False,
    answered: frozenset[str] = frozenset(),
) -> Feed:
    """Return a feed that writes a turn as a stream; if calls were `answered`, from there on.

    `has_begun`: do not say that the message waits, as it once did. A client that resumes would add
    a message to its screen, under an id of its own, for a `start` that names none.
    """

    async def feed(write: Write) -> None:
        streams = caller.service.streams
        if streams.is_draining or streams.is_full:
            why = "draining" if streams.is_draining else "overloaded"
            await write(sse({"type": "error", "errorText": why}))
            await write(b"data: [DONE]\n\n")
            return
        with streams.opened():
            try:
                await _Writing(caller, write, answered, has_begun=has_begun).write_turn(turn)
            except TurnkeeperError as error:
                problem = caller.service.told(error)[0]
                await write(sse({"type": "error", "errorText": problem.name}))
            await write(b"data: [DONE]\n\n")

    return feed


class _Writing:
    """One stream of a turn."""

    def __init__(
        self,
        caller: ConversationCaller,
        write: Write,
        answered: frozenset[str],
        *,
        has_begun: bool,
    ) -> None:
        self._conversation = caller.conversation
        self._streams = caller.service.streams
        self._write = write
        self._unanswered = answered
        """Calls whose answers were not read from the log yet. Until they are, nothing is written,
        since the client has it already."""
        self._says_queued = not has_begun
        """True until it has said that the message waits."""

    async def write_turn(self, turn: Turn) -> None:
        """Wait until the turn has begun, then write it from its beginning."""
        items: AsyncIterator[Item] = aiter(turn)
        begun = await self._first_of(turn, items)
        if begun is None:
            return
        first = await self._first_message_of(turn, begun)
        chunks = TurnChunks(begun.event.turn_id or turn.turn_id)
        if first == turn.message_id:
            await self._put(chunks, begun)
        else:
            # If the message was steered into a turn that another began, the whole turn is shown.
            items = aiter(await self._conversation.turn(first))
        while not chunks.has_ended:
            item = await self._next(items)
            if item is None:
                return
            await self._put(chunks, item)
            if isinstance(item, LoggedEvent) and isinstance(item.event, ConfirmationRequestedEvent):
                # Answered meanwhile, perhaps long ago: then there is nothing to wait for.
                awaiting = (await self._conversation.at()).turns.awaiting
                if set(awaiting) == set(item.event.tool_call_ids):
                    for chunk in chunks.hold():
                        await self._write(sse(chunk))
                    return

    async def _first_message_of(self, turn: Turn, begun: LoggedEvent) -> str:
        """Return the id of the message that began the turn that this message joined."""
        if begun.seq == turn.seq:
            return turn.message_id  # a message that joins another's turn was queued first
        running = (await self._conversation.at(begun.seq)).turns.running
        first = running.messages[0].message_id if running and running.messages else None
        return first or turn.message_id

    async def _first_of(self, turn: Turn, items: AsyncIterator[Item]) -> LoggedEvent | None:
        """Return the event with which the message joined its turn; None if it never does.

        A turn that was rolled back before the client came is passed over: the message left it.
        """
        while True:
            item = await self._next(items)
            match item:
                case None:
                    return None
                case LoggedEvent(event=UserMessageEvent(message_id=turn.message_id)):
                    if not await self._has_left(turn, item):
                        return item
                case LoggedEvent(event=MessageQueuedEvent()) if self._says_queued:
                    self._says_queued = False
                    await self._write(sse({"type": "start"}))
                    waits = {"messageId": turn.message_id}
                    await self._write(sse({"type": "data-queue", "data": waits, "transient": True}))
                case _:
                    pass

    async def _has_left(self, turn: Turn, joined: LoggedEvent) -> bool:
        """True if the message has left the turn that it joined with this event."""
        if not turn.is_duplicate or joined.seq == turn.seq:
            return False  # sent just now, or the turn is its own from the beginning
        now = await self._conversation.turn(turn.message_id)
        return now.turn_id != joined.event.turn_id

    async def _next(self, items: AsyncIterator[Item]) -> Item | None:
        """Return the next event or piece; None if the message was withdrawn."""
        while True:
            try:
                item = await self._streams.until_beat(anext(items))
            except StopAsyncIteration:
                await self._write(sse({"type": "abort", "reason": "withdrawn"}))
                return None
            if item is not None:
                return item
            await self._write(b":\n\n")

    async def _put(self, chunks: TurnChunks, item: Item) -> None:
        written = list(chunks.take(item))
        if self._unanswered:
            if isinstance(item, LoggedEvent) and isinstance(item.event, ConfirmationGivenEvent):
                requested = {chunk["approvalId"] for chunk in written}
                if self._unanswered <= requested:
                    self._unanswered = frozenset()
                    await self._write(sse({"type": "start", "messageId": chunks.turn_id}))
            return
        if written:
            await self._write(b"".join(map(sse, written)))
        if isinstance(item, TextDelta):
            await self._streams.gather_pieces()
