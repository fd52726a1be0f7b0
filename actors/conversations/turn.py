"""The turn of one chat message: await its reply, iterate over it, cancel it.

A turn is a plain value and outlives restarts of the owner: it is followed in the log, from the
event with which the chat message was acknowledged.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, NoReturn

from turnkeeper.runtime import NotDelivered, OutcomeUnknown, OwnershipLost, Region, Unavailable

from ..core.commands import CancelTurn, Command, Expected, GetView, OnOverlap, Query, Sent
from ..errors import (
    ConversationDeleted,
    ConversationNotFound,
    ConversationsClosed,
    MessageNotFound,
    NotThisLog,
    NotYours,
    OwnedElsewhere,
    TurnNotCompleted,
)
from ..events import (
    AgentMessageEvent,
    ConversationChangedEvent,
    Event,
    ForkedFromEvent,
    LoggedEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    TextDelta,
    TurnEndedEvent,
    UserMessageEvent,
)
from ..owner.actor import Setup
from ..owner.event_reader import EventReader
from ..owner.nodes import ask_owner
from ..owner.wait_graph import turn_of

__all__ = ["Turn", "TurnAccess", "TurnEnd", "find_turn"]

OWNERS_ENDING_MAX = 2
"""How many owners may fail or stop while a turn is awaited; the next failure is raised to the
task that awaits the turn."""

_NOTHING_TO_NOTE: Final = nullcontext()
# Events are sorted out by kind before any `isinstance`, which pydantic makes slow.
_WATCHED_KINDS: Final = frozenset({
    "user_message", "message_queued", "message_withdrawn", "forked_from", "agent_message",
    "turn_ended",
})  # fmt: skip
"""The kinds of events that may say where a chat message is, or how its turn ended."""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a turn ended.

    `reply`: the last message that the agent said in the turn; empty if there is none. `detail`:
    why the turn did not complete; if it failed, this begins with the name of the error.
    """

    outcome: Literal["completed", "interrupted", "failed", "rolled_back", "withdrawn"]
    reply: str
    detail: str


class TurnAccess:
    """A turn's access to its conversation: follows the log, waits, cancels."""

    def __init__(
        self,
        conversation_id: str,
        region: Region[Command | Query],
        setup: Setup,
        expected: Expected | None,
        check_user: Callable[[], Awaitable[None]],
    ) -> None:
        self.conversation_id = conversation_id
        self.check_user = check_user
        """`Conversation.check_user` of the handle that the turn comes from."""
        self._region = region
        self._ref = region[conversation_id]
        self._setup = setup
        self._expected = expected

    def follow(self, seq: int, *, pieces: bool = False) -> EventReader:
        """Read the events from `seq` on, and then live; `seq` must be in the log.

        The reader starts another owner whenever the one here ends, and raises the reason if none
        can be started. If another process owns the conversation, it follows that owner.
        """
        return self._setup.subscriptions.read(
            self.conversation_id,
            after=seq - 1,
            live=True,
            known_seq=seq,
            on_owner_ended=self._ensure_owner,
            pieces=pieces,
        )

    def read_back(self, seq: int) -> EventReader:
        """Read the events from `seq` to the end of the log; `seq` must be in the log."""
        return self._setup.subscriptions.read(
            self.conversation_id, after=seq - 1, live=False, known_seq=seq
        )

    async def _ensure_owner(self) -> None:
        """Start an owner here unless there is one. Raises the reason if there can be none."""
        for _ in range(OWNERS_ENDING_MAX):
            try:
                if (here := self._setup.node_link.here) is not None:
                    await here.check_owner(self.conversation_id)
                await self._ref.ask(GetView())
            except NotDelivered:
                if self._setup.subscriptions.is_closing:
                    # No other owner will start, so there is nothing to wait for.
                    raise ConversationsClosed(self.conversation_id) from None
                # The owner is stopping: wait until it has ended. There was no await since the ask
                # failed, so this call cannot stop a newer owner.
                await self._region.stop_actor(self.conversation_id)
            except OwnedElsewhere:
                raise  # another claim would be refused too
            except (Unavailable, OutcomeUnknown, OwnershipLost):
                pass  # the owner failed with the ask in its mailbox; ask the next one
            else:
                return
        await self._ref.ask(GetView())

    @property
    def is_inside_a_turn(self) -> bool:
        """True if the calling task runs in an unfinished turn of the same `Conversations`."""
        inside = turn_of.get(None)
        return (
            inside is not None
            and inside.wait_graph is self._setup.wait_graph
            and not inside.is_over
        )

    def note_waiting(self) -> AbstractContextManager[None]:
        """While inside, note that the calling turn, if any, waits for this conversation.

        Raises `AskCycle` if that wait would never end.
        """
        if not self.is_inside_a_turn:
            return _NOTHING_TO_NOTE
        return self._setup.wait_graph.wait(turn_of.get(), self.conversation_id)

    async def cancel(self, sent: Sent) -> bool:
        """Interrupt this chat message's turn, or withdraw the message while it waits."""
        asked = self._expected or Expected()
        expected = self._expected
        if sent.event_id is not None and asked.seq is None:
            # A log that was begun anew may have a chat message of the same id, under another event
            # id. If the caller's handle expects an event, that one is of this log, and is enough.
            expected = replace(asked, seq=sent.seq, event_id=sent.event_id)
        command = CancelTurn(sent.message_id, sent.turn_id, expected=expected)
        try:
            return await ask_owner(self._ref, self.conversation_id, command, self._setup.node_link)
        except NotYours:  # a kind of ConversationNotFound
            raise
        except (ConversationNotFound, NotThisLog) as error:
            if asked.seq is not None or (asked.exists and isinstance(error, ConversationNotFound)):
                raise
            return False  # the turn's log was deleted


class _TurnWatch:
    """Finds the events of a log that belong to a chat message's turn, and the turn's end.

    The `UserMessageEvent` of a chat message names the turn that answers it; before that event, the
    message waits in the queue. The first event to look at is the one with which the chat message
    was acknowledged; if the log has another event there, `ConversationDeleted` is raised. A log
    that was begun anew may have a chat message of the same id there, but under another event id.
    """

    def __init__(self, conversation_id: str, sent: Sent) -> None:
        self.end: TurnEnd | None = None
        self.turn_id = sent.turn_id
        self.event_id = sent.event_id
        self._conversation_id = conversation_id
        self._message_id = sent.message_id
        self._is_first = True
        self._has_begun = False
        self._reply = ""

    def look_at(self, event: Event) -> bool:
        """Take in the next event; return True if it belongs to the turn."""
        if self._is_first:
            is_other = self.event_id is not None and event.id != self.event_id
            if is_other or getattr(event, "message_id", None) != self._message_id:
                raise ConversationDeleted(self._conversation_id)
            self._is_first, self.event_id = False, event.id
        if event.kind not in _WATCHED_KINDS:
            return event.turn_id == self.turn_id
        # The commonest first: a pydantic class that does not match takes long to say so.
        match event:
            case UserMessageEvent(message_id=self._message_id, turn_id=str(joined)):
                self.turn_id, self._has_begun = joined, True
            case AgentMessageEvent(turn_id=self.turn_id, content=content):
                self._reply = content
            case TurnEndedEvent(turn_id=self.turn_id):
                self.end = TurnEnd(event.outcome, self._reply, event.detail or "")
            case MessageQueuedEvent(message_id=self._message_id, turn_id=str(waits)):
                # The message waits, or waits again because the turn that it had joined was rolled
                # back.
                self.turn_id, self._has_begun, self._reply = waits, False, ""
            case MessageWithdrawnEvent(message_id=self._message_id):
                by = event.replaced_by
                why = "cancelled by its caller" if by is None else f"replaced by chat message {by}"
                self.end = TurnEnd("withdrawn", "", why)
            case ForkedFromEvent() if not self._has_begun:
                # Do not name its id: not every reader of this conversation may know it.
                why = "it waits in the conversation that this one was forked from"
                self.end = TurnEnd("withdrawn", "", why)
            case _:
                return event.turn_id == self.turn_id
        return True


async def find_turn(access: TurnAccess, message_id: str, seq: int) -> Turn:
    """Return the turn of the chat message whose first event is at `seq`.

    Raises `MessageNotFound` if no turn answers it.
    """
    watch = _TurnWatch(access.conversation_id, Sent(message_id, seq, ""))
    async for logged in access.read_back(seq):
        watch.look_at(logged.event)
        if watch.end is not None or not watch.turn_id:
            break
    if not watch.turn_id:
        raise MessageNotFound(access.conversation_id, message_id)
    sent = Sent(message_id, seq, watch.turn_id, is_duplicate=True, event_id=watch.event_id)
    return Turn(access, sent)


class _TurnFollower(AsyncIterator[LoggedEvent | TextDelta]):
    """The iterator of a turn, for one task and one pass."""

    def __init__(self, access: TurnAccess, sent: Sent) -> None:
        self._access = access
        self._sent = sent
        self._watch = _TurnWatch(access.conversation_id, sent)
        self._reader = access.follow(sent.seq, pieces=True)
        self._user_may_have_changed = False
        """True if the conversation may have been given to another user since the last check."""
        self._has_ended: bool | None = None
        """True if the turn had ended before the first item; looked at inside another turn alone."""

    async def __anext__(self) -> LoggedEvent | TextDelta:
        if self._watch.end is not None:
            raise StopAsyncIteration
        access = self._access
        if self._has_ended is None:
            # As in `Turn.end`: a turn that has ended needs no wait, so it closes no circle of them.
            ended = None
            if access.is_inside_a_turn:
                ended = await _find_end(access, self._sent, access.read_back(self._sent.seq))
            self._has_ended = ended is not None
        with _NOTHING_TO_NOTE if self._has_ended else access.note_waiting():
            while True:
                if self._user_may_have_changed:
                    await access.check_user()
                    self._user_may_have_changed = False
                try:
                    item = await self._reader.next_item(self._watch.turn_id)
                except StopAsyncIteration:
                    raise ConversationsClosed(access.conversation_id) from None
                if isinstance(item, TextDelta):
                    return item
                event = item.event
                if event.kind == "conversation_changed":
                    assert isinstance(event, ConversationChangedEvent), event
                    self._user_may_have_changed |= event.owner is not None
                if self._watch.look_at(event):
                    return item


async def _find_end(access: TurnAccess, sent: Sent, events: EventReader) -> TurnEnd | None:
    """Return how the turn of a chat message ended; None if these events do not tell."""
    watch = _TurnWatch(access.conversation_id, sent)
    async for logged in events:
        watch.look_at(logged.event)
        if watch.end is not None:
            return watch.end
    return None


class Turn:
    """The turn of one chat message; it outlives restarts of the conversation's owner.

        turn = await conversations["alice"].send("Where is my order?")
        async for item in turn:      # its events, and pieces of its answer while they are written
            ...
        print(await turn.reply())    # or: await turn.end(), await turn.cancel()

    Cancelling one of these waits does not end the turn; `cancel` does. Any number of tasks may
    await one turn and iterate over it at once; each iteration is for one task.
    """

    def __init__(self, access: TurnAccess, sent: Sent) -> None:
        self._access = access
        self._sent = sent

    def __repr__(self) -> str:
        sent = self._sent
        return (
            f"<Turn {sent.turn_id} of conversation {self._access.conversation_id!r}, "
            f"message {sent.message_id} at seq {sent.seq}>"
        )

    @property
    def message_id(self) -> str:
        return self._sent.message_id

    @property
    def turn_id(self) -> str:
        """The id of the turn, as it was known when the chat message was sent or looked up.

        It may change as long as the chat message waits: the message may join another turn, or wait
        again under another id. `conversation.turn(message_id)` looks up the current one.
        """
        return self._sent.turn_id

    @property
    def seq(self) -> int:
        """The seq of the first event that carries the message id."""
        return self._sent.seq

    @property
    def is_duplicate(self) -> bool:
        """True if the log had this chat message already, or if the turn was looked up."""
        return self._sent.is_duplicate

    @property
    def overlapped(self) -> OnOverlap | None:
        """The policy that was applied to the turn that ran when this was sent; None if none ran."""
        return self._sent.overlapped

    @property
    def waits_for(self) -> Literal["resume", "confirmation"] | None:
        """The user's decision that the running turn waited for when this was sent or looked up."""
        return self._sent.waits_for

    async def reply(self) -> str:
        """Wait for the turn to complete, and return the last message that the agent said in it.

        Raises `TurnNotCompleted`, which has the text said so far, if the turn ends in another way,
        and the errors of `end`.
        """
        end = await self.end()
        if end.outcome != "completed":
            raise TurnNotCompleted(
                self._access.conversation_id,
                self.turn_id,
                end.outcome,
                end.detail,
                end.reply,
            )
        return end.reply

    async def end(self) -> TurnEnd:
        """Wait until the turn has ended, and return how.

        If the owner fails, the next owner ends the turn; if another process has taken over, the
        turn is followed there. Raises the reason if there can be no owner (`Unavailable`,
        `CorruptLog`), and `ConversationsClosed` if the `Conversations` close: the chat message
        is in the log, and its turn ends when the conversation is next opened. Raises
        `ConversationDeleted`, and `AskCycle` if this turn cannot end before the calling turn does.
        """
        access = self._access
        ended = None
        if access.is_inside_a_turn:
            # A turn that has ended needs no wait, so it cannot close a circle of waits. The wait
            # below can.
            ended = await self.find_end()
        if ended is None:
            with access.note_waiting():
                ended = await _find_end(access, self._sent, access.follow(self.seq))
        if ended is None:
            raise ConversationsClosed(access.conversation_id)
        return ended

    async def find_end(self) -> TurnEnd | None:
        """Return how the turn ended, or None if it has not ended yet; it only reads.

        Raises `ConversationDeleted`.
        """
        return await _find_end(self._access, self._sent, self._access.read_back(self.seq))

    def __aiter__(self) -> AsyncIterator[LoggedEvent | TextDelta]:
        """Iterate over the turn's events, with the pieces of its answer (`TextDelta`) between them.

        It begins with the chat message and stops at the turn's end. Every event comes once and in
        order, even if the turn began long ago. Pieces come live, from an owner in this process or
        in one that it can ask; the first one has all that was said of the answer so far. Cancelling
        a wait of the iteration loses nothing. Raises as `end` does, and `NotYours` if the turn
        comes from a handle that expects an owner, and the conversation was given to another user
        meanwhile.
        """
        return _TurnFollower(self._access, self._sent)

    if not TYPE_CHECKING:  # else type checkers would report a turn that is not awaited

        def __await__(self) -> NoReturn:
            raise TypeError(
                "a Turn cannot be awaited; use `await turn.reply()` for its answer, or "
                "`await turn.end()` for how it ended"
            )

    async def cancel(self) -> bool:
        """Interrupt the turn, or withdraw its chat message while it waits.

        It is durable when this returns, and the text said so far is kept. Returns False if the turn
        had ended already, or was deleted; so it may be called again, after `OutcomeUnknown` too.
        Raises the errors of `Conversation.expecting` if the handle was made by it.
        """
        return await self._access.cancel(self._sent)
