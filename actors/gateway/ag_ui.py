"""A turn as a run of AG-UI 1.0, which a client can leave at any event and go on with. Pure.

A run shows a turn to one request. It begins with a snapshot of the transcript, which replaces the
client's screen; after it come the turn's own events. The run ends with the turn, or when calls wait
for the user; the request that answers them begins another run.

Each event goes out with a cursor, which says how much of the run a client has once it got the
event. A cursor holds places in the log and, for an open text, its length and digest. No stream
keeps state in memory: any process that reads the log can go on from a cursor, even after the
process that wrote the stream was killed. If the model has begun its answer anew since, and the new
text begins with the client's, the run goes on behind that; otherwise it replaces the screen. Events
without a cursor only open again what the client has already.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote, unquote

from ag_ui.core import (
    PROTOCOL_VERSION,
    BaseEvent,
    CustomEvent,
    Interrupt,
    MessagesSnapshotEvent,
    RunErrorEvent,
    RunFinishedCancelledOutcome,
    RunFinishedEvent,
    RunFinishedInterruptOutcome,
    RunFinishedOutcome,
    RunFinishedSuccessOutcome,
    RunStartedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallResultEvent,
    ToolCallStartEvent,
)

from ..core.listing import time_us
from ..core.snapshots import SLICE_EVENTS, Slices
from ..core.transcript import Transcript
from ..events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    Event,
    LoggedEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    ObservationEvent,
    RetractionEvent,
    TextDelta,
    TurnEndedEvent,
    UserMessageEvent,
    UserRejectEvent,
)
from ..values.text import storable
from .ag_ui_messages import AnswerCount, ag_ui_messages, answer_id, arguments_of
from .names import Cursor, parse_cursor

__all__ = ["Out", "Progress", "RunCursor", "RunEvents", "Show", "parse_run_cursor"]

QUEUED = "turnkeeper.queued"
DIGEST_BYTES = 8
ANSWER_SCHEMA = {
    "type": "object",
    "properties": {"approved": {"type": "boolean"}, "reason": {"type": "string"}},
    "required": ["approved"],
}
"""The JSON schema of a client's answer to a call that waits."""

_CURSOR = re.compile(
    r"(?P<origin>\d+\.[^/@]+)@(?P<us>-?\d{1,18})/(?P<run>[^/]+)/(?P<seq>\d{1,16})\.(?P<part>[0-3])"
    r"/(?:(?P<length>\d{1,16})\.(?P<digest>[0-9a-f]{16}))?(?P<stale>!?)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Progress:
    """How much of a run a client has."""

    seq: int
    """The last event of the log that it has completely."""
    part: int = 0
    """How many parts it has of the next event, if that is a call: its text, start, arguments."""
    text: tuple[int, str] | None = None
    """The length, in code points, and the digest of the text that is open."""
    is_stale: bool = False
    """True if it still shows something outdated, and gets a snapshot next."""


@dataclass(frozen=True, slots=True)
class RunCursor:
    """The progress of a client in a run, for any process that reads the log."""

    origin: Cursor
    """The first event of the chat message that the run is about."""
    origin_us: int
    """The time of that event, in microseconds. Its id follows from the run id, so a log that was
    begun anew may have it at the same seq."""
    run_id: str
    progress: Progress

    def __str__(self) -> str:
        progress = self.progress
        text = "" if progress.text is None else f"{progress.text[0]}.{progress.text[1]}"
        stale = "!" if progress.is_stale else ""
        run_id = quote(self.run_id, safe="")
        origin = f"{self.origin}@{self.origin_us}"
        return f"{origin}/{run_id}/{progress.seq}.{progress.part}/{text}{stale}"


def parse_run_cursor(given: str) -> RunCursor | None:
    """Return the cursor that a client sent; None if it is not one."""
    found = _CURSOR.fullmatch(given.strip())
    origin = None if found is None else parse_cursor(found["origin"])
    if found is None or origin is None or origin.event_id is None:
        return None
    text = None if found["length"] is None else (int(found["length"]), found["digest"])
    progress = Progress(int(found["seq"]), int(found["part"]), text, bool(found["stale"]))
    run_id = unquote(found["run"], errors="replace")
    return RunCursor(origin, int(found["us"]), run_id, progress)


class _OpenText:
    """The part of an answer's text that the client has."""

    def __init__(
        self, message_id: str, said: str = "", *, mark: tuple[int, str] | None = None
    ) -> None:
        self.message_id = message_id
        self.mark = (0, "")
        self._pieces: list[str] | None = None
        """None if another stream wrote the text: then only its length and digest are known."""
        self._hash = hashlib.blake2b(digest_size=DIGEST_BYTES)
        if mark is not None:
            self.mark = mark
        else:
            self._pieces = []
            self.add(said)

    @property
    def length(self) -> int:
        return self.mark[0]

    def add(self, text: str) -> None:
        assert self._pieces is not None, "the digest is known, not the text"
        self._pieces.append(text)
        self._hash.update(text.encode("utf-8", "surrogatepass"))
        self.mark = (self.length + len(text), self._hash.hexdigest())

    def is_begin_of(self, text: str) -> bool:
        """True if `text` begins with this text."""
        return len(text) >= self.length and self.as_in(text).mark == self.mark

    def as_in(self, text: str) -> _OpenText:
        """Return the beginning of `text` that is as long as this text."""
        return _OpenText(self.message_id, text[: self.length])

    def may_begin_with(self, text: str) -> bool:
        """True if `text` is shorter, and this text may begin with it."""
        if len(text) >= self.length:
            return False
        return self._pieces is None or "".join(self._pieces).startswith(text)


@dataclass(frozen=True, slots=True)
class Out:
    """An event for the client, and the progress of a client that got it."""

    event: BaseEvent
    progress: Progress | None
    """None if the event only opens again what the client has already."""


@dataclass(frozen=True, slots=True)
class Show:
    """Asks for the transcript: give it to `RunEvents.show`, then go on."""

    seq: int
    is_needed: bool = True
    """False if the screen need be replaced only if something on it was taken back meanwhile."""
    before: int | None = None
    """If set, only the events between `seq` and this one may have taken something back: if none of
    them has, nothing need be shown."""


Output: TypeAlias = Iterator[Out | Show]


class RunEvents:
    """Converts the events and pieces of a turn, in order from its chat message on, into a run."""

    def __init__(
        self,
        thread_id: str,
        run_id: str,
        message_id: str,
        *,
        head: int,
        awaiting: Collection[str],
        after: Progress | None,
        answered: Collection[str] = (),
        on_screen: Sequence[str] | None = None,
    ) -> None:
        """Make the run for a chat message.

        `head`, `awaiting`: the end of the log, and the calls that wait there. `after`: the progress
        of a client that comes back. `answered`: the calls whose answers begin the run. `on_screen`:
        the ids of the messages that the client shows; None if that is not known.
        """
        self.run_id = run_id
        self.origin: Cursor | None = None
        """The cursor of the chat message; None before the first event."""
        self.origin_us = 0
        self.has_ended = False
        self._thread_id = thread_id
        self._message_id = message_id
        self._head = head
        self._awaiting = frozenset(awaiting)
        self._after = after
        self._answered = frozenset(answered)
        """Calls whose answers were not read from the log yet; nothing is written until they are."""
        self._on_screen = on_screen
        self._is_ordered = False
        self._seq = 0
        """The seq of the newest event that was taken."""
        self._part = 0
        self._is_stale = False
        """True if something that the client may show was taken back."""
        self._turn_id: str | None = None
        """None while the message waits."""
        self._count = AnswerCount()
        self._retracted: Collection[str] = ()
        """The turn's events that were taken back before they were shown."""
        self._requested: Sequence[str] = ()
        self._text: _OpenText | None = None
        self._attempt = (0, 0)
        self._heard: list[str] | None = None
        """The text of a new attempt while it is shorter than the text shown; None otherwise."""
        self._early: list[TextDelta] = []
        """The pieces of the open answer that came before the client's place in the log."""

    def take(self, item: LoggedEvent | TextDelta) -> Output:
        """Yield the outputs for the next event or piece of the turn."""
        if isinstance(item, TextDelta):
            if self._answered or item.turn_id != self._turn_id:
                return
            self._early.append(item)
            # The pieces of another process may come later than the client got their event, at
            # another node or before it was cut off.
            if self._after is None or self._seq >= self._after.seq:
                yield from self._catch_up()
            return
        yield from self._start(item)
        self._follow_message(item.event)
        if self._answered:
            yield from self._await_answers(item)
        elif self._after is not None and item.seq <= self._after.seq:
            if isinstance(item.event, AgentMessageEvent | ActionEvent | TurnEndedEvent):
                self._early.clear()  # they are of the answer that the client has
            yield from self._pass(item)
        else:
            if self._after is None and item.seq > self._seq + 1:
                # What came between may be a retraction.
                yield Show(self._seq, is_needed=False, before=item.seq)
            yield from self._catch_up()
            part, self._part = self._part, 0
            yield from self._take_event(item, part)
            if self._is_stale and not self.has_ended:
                yield Show(item.seq)
        self._seq = item.seq
        if self._early and self._after is not None and item.seq == self._after.seq:
            yield from self._catch_up()

    def end(self) -> Output:
        """Yield the end of a run whose chat message will not be answered here."""
        if not self.has_ended:
            yield self._finished(RunFinishedCancelledOutcome(), self._seq)

    def show(self, asked: Show, transcript: Transcript) -> Iterator[Out | None]:
        """Yield the snapshot that was asked for; None wherever other tasks may run."""
        yield from self._learn(asked.seq, transcript)
        if self._after is not None:
            after, self._after = self._after, None
            self._part = after.part
            if after.text is not None and self._turn_id is not None:
                self._text = _OpenText(self._answer_id, mark=after.text)
                opened = TextMessageStartEvent(message_id=self._answer_id, role="assistant")
                yield Out(opened, None)
                self._heard = []
        self._is_stale = transcript.retracted_at > asked.seq
        # A call that the client has begun to read is completed first.
        if asked.is_needed or (self._is_stale and self._part < 2):  # noqa: PLR2004 - of an action
            yield from self._end_text()
            yield from self._snapshots(asked.seq, transcript)
            self._is_stale = False
            self._part = 0  # the text of the next call has left the screen, and is shown again

    def _snapshots(self, seq: int, transcript: Transcript) -> Iterator[Out | None]:
        waiting = [
            logged.event
            for logged in transcript.waiting
            if getattr(logged.event, "message_id", None) == self._message_id
        ]
        messages = yield from ag_ui_messages(transcript, until=seq, waiting=waiting)
        ids = [message.id for message in messages]
        if not self._is_ordered and not _is_shown_in_order(self._on_screen, ids):
            # Clients append messages that are new to them; an empty screen puts them in order.
            progress = Progress(self._seq, is_stale=True)
            yield Out(MessagesSnapshotEvent(messages=[]), progress)
        # While the run's own message waits, it is shown before messages whose turns come first.
        self._is_ordered, self._on_screen = not waiting, None
        # Each message was checked when it was made: the event would check all of them at once.
        yield Out(MessagesSnapshotEvent.model_construct(messages=messages), Progress(seq))

    def _learn(self, seq: int, transcript: Transcript) -> Slices[None]:
        """Count the turn's answers up to a seq, and note which of its events were taken back."""
        self._count = AnswerCount()
        retracted: list[str] = []
        for count, (seq_of_event, event) in enumerate(transcript.log, 1):
            if count % SLICE_EVENTS == 0:
                yield
            if event.turn_id != self._turn_id:
                continue
            if seq_of_event <= seq and isinstance(event, AgentMessageEvent | ActionEvent):
                self._count.number(event)
            if transcript.is_retracted(event.id):
                retracted.append(event.id)
        self._retracted = frozenset(retracted)

    # --- the frame of the run --------------------------------------------------------------------

    def _start(self, first: LoggedEvent) -> Output:
        if self.origin is not None:
            return
        self.origin = Cursor(first.seq, first.event.id)
        self.origin_us = time_us(first.event)
        self._seq = first.seq - 1
        if self._after is not None:
            yield Out(self._started(), None)
        elif not self._answered:
            yield Out(self._started(), Progress(self._seq))

    def _started(self) -> RunStartedEvent:
        return RunStartedEvent(
            thread_id=self._thread_id, run_id=self.run_id, protocol_version=PROTOCOL_VERSION
        )

    def _finished(self, outcome: RunFinishedOutcome, seq: int) -> Out:
        self.has_ended = True
        event = RunFinishedEvent(thread_id=self._thread_id, run_id=self.run_id, outcome=outcome)
        return Out(event, Progress(seq))

    def _follow_message(self, event: Event) -> None:
        """Note the turn that the chat message has joined."""
        match event:
            case UserMessageEvent(message_id=self._message_id):
                self._turn_id = event.turn_id
            case MessageQueuedEvent(message_id=self._message_id):
                self._turn_id = None
                self._early.clear()  # the turn that they are of was rolled back
            case ConfirmationRequestedEvent(tool_call_ids=call_ids):
                self._requested = call_ids
            case _:
                pass

    def _await_answers(self, item: LoggedEvent) -> Output:
        given = isinstance(item.event, ConfirmationGivenEvent)
        if given and self._answered <= set(self._requested):
            self._answered = frozenset()
            yield Out(self._started(), Progress(item.seq, is_stale=True))
            yield Show(item.seq)

    def _pass(self, item: LoggedEvent) -> Output:
        """Skip an event that the client has, unless the run ends with it."""
        event = item.event
        is_end = isinstance(event, TurnEndedEvent) and event.turn_id == self._turn_id
        if is_end or isinstance(event, MessageWithdrawnEvent) or self._is_held(item):
            yield from self._come_back()
            yield from self._take_event(item, 0)

    def _come_back(self) -> Output:
        """Open again what a client has that comes back."""
        if self._after is not None:
            yield Show(self._after.seq, is_needed=self._after.is_stale)

    def _catch_up(self) -> Output:
        """Open again what the client has, and go on with the pieces that came before its place."""
        yield from self._come_back()
        early, self._early = self._early, []
        for piece in early:
            yield from self._take_piece(piece)

    def _is_held(self, item: LoggedEvent) -> bool:
        """True if this event made calls wait for the user, and they still do."""
        event = item.event
        if not isinstance(event, ConfirmationRequestedEvent) or event.turn_id != self._turn_id:
            return False
        return item.seq > self._head or self._awaiting == frozenset(event.tool_call_ids)

    # --- events ----------------------------------------------------------------------------------

    def _take_event(self, item: LoggedEvent, part: int) -> Output:
        event, seq = item.event, item.seq
        match event:
            case MessageQueuedEvent(message_id=self._message_id):
                if event.queued_again:
                    yield Show(seq)
                value = {"messageId": self._message_id}
                yield Out(CustomEvent(name=QUEUED, value=value), Progress(seq))
            case MessageWithdrawnEvent(message_id=self._message_id):
                yield Show(seq)
                yield self._finished(RunFinishedCancelledOutcome(), seq)
            case UserMessageEvent(is_reminder=False) | RetractionEvent():
                yield Show(seq)
            case ActionEvent() if part >= 2:  # noqa: PLR2004 - the client has begun to read it
                yield from self._call(event, seq, part)
            case _ if event.turn_id != self._turn_id:
                pass
            case AgentMessageEvent() | ActionEvent() if event.id in self._retracted:
                self._count.number(event)
                if self._text is not None:
                    yield Show(seq)
            case _ if event.id in self._retracted:
                pass
            case AgentMessageEvent(content=content):
                yield from self._say(content, is_message=True)
                yield self._text_end(Progress(seq))
                self._count.number(event)
            case ActionEvent():
                yield from self._call(event, seq, part)
            case ObservationEvent() | AgentErrorEvent() | UserRejectEvent():
                result = ToolCallResultEvent(
                    message_id=event.id,
                    tool_call_id=event.tool_call_id,
                    content=storable(event.content),
                    role="tool",
                )
                yield Out(result, Progress(seq))
            case ConfirmationRequestedEvent() if self._is_held(item):
                yield self._finished(_interrupts(event.tool_call_ids), seq)
            case TurnEndedEvent():
                yield from self._end(event, seq)
            case _:
                pass

    def _call(self, action: ActionEvent, seq: int, part: int) -> Output:
        if self._count.begins(action) and part < 1:
            yield from self._say(action.text, is_message=False)
            if self._text is not None:
                yield self._text_end(Progress(self._seq, part=1))
        call_id = action.tool_call_id
        parent = answer_id(action.turn_id or action.id, self._count.number(action))
        start = ToolCallStartEvent(
            tool_call_id=call_id, tool_call_name=action.tool_name, parent_message_id=parent
        )
        yield Out(start, Progress(self._seq, part=2) if part < 2 else None)  # noqa: PLR2004 - as above
        if part < 3:  # noqa: PLR2004 - the number of an action's parts
            arguments = ToolCallArgsEvent(tool_call_id=call_id, delta=arguments_of(action))
            yield Out(arguments, Progress(self._seq, part=3))
        yield Out(ToolCallEndEvent(tool_call_id=call_id), Progress(seq))

    def _end(self, ended: TurnEndedEvent, seq: int) -> Output:
        if self._text is not None:
            # The model wrote this text, but never finished the answer: the log does not have it.
            yield Show(seq)
        match ended.outcome:
            case "completed":
                yield self._finished(RunFinishedSuccessOutcome(), seq)
            case "interrupted" | "rolled_back":
                yield self._finished(RunFinishedCancelledOutcome(), seq)
            case "failed":
                self.has_ended = True
                failed = RunErrorEvent(message="the turn failed", code="turn-failed")
                yield Out(failed, Progress(seq))

    # --- the text of an answer -------------------------------------------------------------------

    @property
    def _answer_id(self) -> str:
        """The id of the answer that comes next."""
        assert self._turn_id is not None
        return answer_id(self._turn_id, self._count.count)

    def _take_piece(self, piece: TextDelta) -> Output:
        attempt = (piece.epoch, piece.attempt)
        if piece.answer != self._count.count or attempt < self._attempt or self._part:
            return
        if attempt > self._attempt:
            self._attempt, self._heard = attempt, []
        if self._text is None:
            self._heard = None
            yield self._text_start()
        assert self._text is not None
        if self._heard is None:
            # The part of a piece that the client has already is left out.
            length = self._text.length
            new = piece.text[length - piece.offset :] if piece.offset <= length else ""
        else:
            self._heard.append(piece.text)
            new = "".join(self._heard)
            if self._text.may_begin_with(new):
                return
            yield from self._compare(new)
            new = new[self._text.length :]
        if new:
            yield self._add(new)

    def _compare(self, text: str) -> Output:
        """Keep the text shown if this text begins with it; otherwise take it back."""
        assert self._text is not None
        if self._text.is_begin_of(text):
            self._text = self._text.as_in(text)
        else:
            yield Show(self._seq)
            yield self._text_start()
        self._heard = None

    def _say(self, content: str, *, is_message: bool) -> Output:
        """Show the whole text of an answer; earlier pieces may have shown its beginning."""
        content = storable(content)
        if self._text is not None:
            if content:
                yield from self._compare(content)
            else:
                yield Show(self._seq)
        if self._text is None and (content or is_message):
            yield self._text_start()
        if self._text is not None and (new := content[self._text.length :]):
            yield self._add(new)

    def _text_start(self) -> Out:
        self._text = _OpenText(self._answer_id)
        return Out(
            TextMessageStartEvent(message_id=self._answer_id, role="assistant"), self._in_text()
        )

    def _add(self, text: str) -> Out:
        assert self._text is not None
        self._text.add(text)
        event = TextMessageContentEvent(message_id=self._text.message_id, delta=text)
        return Out(event, self._in_text())

    def _in_text(self) -> Progress:
        assert self._text is not None
        return Progress(self._seq, text=self._text.mark)

    def _text_end(self, progress: Progress) -> Out:
        assert self._text is not None
        ended = TextMessageEndEvent(message_id=self._text.message_id)
        self._text, self._heard, self._attempt = None, None, (0, 0)
        return Out(ended, progress)

    def _end_text(self) -> Iterator[Out]:
        """End a text that is about to be taken back."""
        if self._text is not None:
            attempt = self._attempt
            yield self._text_end(Progress(self._seq, is_stale=True))
            self._attempt = attempt


def _is_shown_in_order(on_screen: Sequence[str] | None, ids: Sequence[str]) -> bool:
    """True if one snapshot puts these messages in order on a client with this screen."""
    if on_screen is None:
        return False
    kept = set(ids)
    known = [message_id for message_id in on_screen if message_id in kept]
    return known == list(ids[: len(known)])


def _interrupts(call_ids: Sequence[str]) -> RunFinishedInterruptOutcome:
    return RunFinishedInterruptOutcome(
        interrupts=[
            Interrupt(
                id=call_id,
                reason="tool_call",
                tool_call_id=call_id,
                response_schema=ANSWER_SCHEMA,
            )
            for call_id in call_ids
        ]
    )
