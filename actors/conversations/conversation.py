"""The handle to one conversation: send, read, steer, look back.

A handle is a plain value: keep it, copy it, drop it. Any number of tasks may use it at once, in the
event loop of its `Conversations`.

A call that is cancelled has happened as a whole or not at all. If the owner has not taken its
command from the mailbox yet, the command is dropped; after that it is carried out, and only its
answer is lost. After a cancelled `send`, send again under the same `message_id`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from turnkeeper.runtime import Region

from ..core.admission import Appended, Duplicate
from ..core.commands import (
    Answer,
    Append,
    AppendAll,
    Behalf,
    Change,
    Command,
    Expected,
    FromOutside,
    GetView,
    Interrupt,
    OnOverlap,
    Pause,
    Query,
    Resume,
    Retract,
    Send,
    Sent,
    Undo,
)
from ..core.records import decode_record, encode_record
from ..core.state import Folded
from ..core.steps import Step, step_of
from ..core.turn_rules import decide_fork, first_reply, is_chat_message
from ..core.view import View
from ..core.working_state import Stamp, WorkingState
from ..errors import (
    ConversationExists,
    ConversationNotFound,
    ConversationsClosed,
    CorruptLog,
    InvalidInput,
    JournalUnavailable,
    MessageNotFound,
    NothingToRetract,
    NotRetractable,
    NotYours,
    TurnInProgress,
)
from ..events import (
    Event,
    FileContent,
    ForkedFromEvent,
    ImageContent,
    LoggedEvent,
    MessageQueuedEvent,
    RetractionEvent,
    TextDelta,
    UserMessageEvent,
)
from ..journal import Journal, Listing, LogPages, Rejection
from ..owner.actor import Forking, Setup
from ..owner.event_reader import EventReader
from ..owner.loading import load_state, load_turns
from ..owner.nodes import ask_owner, find_row
from ..values.frozen import FrozenObject
from ..values.text import (
    ID_LENGTH_MAX,
    check_bool,
    check_conversation_id,
    check_id,
    check_short,
    check_text,
    check_whole,
    error_text,
)
from ..values.type_names import a_type
from .turn import Turn, TurnAccess, find_turn

__all__ = ["Conversation", "Follower"]

R = TypeVar("R")
T = TypeVar("T")

_READINGS_MAX = 10
"""How often `at` reads a log for one state, if another owner begins during each reading."""
_LOOKS_MAX = 10
"""How often a fork looks if its name is free, if another owner of it begins after each look."""
_DECIDED_BEFORE_MAX = 3
"""How far before a chat message the end of the turn that it cut off can be: that end, a system
prompt, and the start of its own turn may come before it."""


class Conversation:
    """A handle to one conversation; the first command to it starts its actor.

        alice = conversations["alice"]
        turn = await alice.send("Where is my order?")
        print(await turn.reply())
        async for logged in alice.events(after=0, live=False):
            print(logged.seq, logged.event.kind)

    A handle keeps nothing of the conversation: make as many as you like, and share them among the
    tasks of one event loop. A call that is cancelled has happened as a whole or not at all; see the
    head of this module.
    """

    def __init__(
        self,
        conversation_id: str,
        region: Region[Command | Query],
        setup: Setup,
        expected: Expected | None = None,
    ) -> None:
        check_conversation_id(conversation_id)
        self.conversation_id = conversation_id
        self._region = region
        self._ref = region[conversation_id]
        self._setup = setup
        self._expected = expected

    def __repr__(self) -> str:
        return f"Conversation({self.conversation_id!r})"

    # --- chat messages and their turns -----------------------------------------------------------

    async def send(
        self,
        content: str,
        *,
        images: Sequence[ImageContent] = (),
        message_id: str | None = None,
        on_overlap: OnOverlap | None = None,
        replaces: str | None = None,
        author: str | None = None,
        metadata: Mapping[str, object] | None = None,
        files: Sequence[FileContent] = (),
        event_id: str | None = None,
    ) -> Turn:
        """Send a chat message to the conversation; it is durable when this returns.

        Sending it again under its `message_id` writes nothing and returns the same turn, with the
        same `overlapped` and `waits_for`. So after `OutcomeUnknown` or a cancellation, send it
        again: choose the id yourself, so that you have it then.

        `on_overlap`: the effect on the turn that runs; by default the setting of the conversation.

        `replaces`: the message id of an earlier chat message, which this one edits. All in one
        commit, the earlier message's turn and all later turns leave the view, a turn that runs ends
        as rolled back, and the new message's turn begins. The log keeps everything, and the effects
        of tools are not undone.

        `author`: the application's name for the user who sends it; the model sees it only if the
        agent has `show_author`. `metadata`: JSON that is kept with the message and not shown to the
        model; a repeat under the same `message_id` with other metadata is no conflict, and the
        first is kept. `images`: shown to the model. `files`: documents and the like, which the
        model reads as far as it can.

        `event_id`: a second key besides `message_id`, such as the id of the request that the
        message came with. It is the id of the event that carries the message into the log. Raises
        `EventIdConflict` if that event is in the log and does not carry this message.

        Raises `TurnInProgress` with `on_overlap="reject"`, `QueueFull`, and `MessageIdConflict` if
        the id is known with other content; with `replaces`, `NotReplaceable`, and `MessageNotFound`
        if there is no message of that id. Raises `InvalidInput`; `ContentTooLong` for the text;
        `MetadataTooLong`, `JsonTooDeep` and `JsonNumberTooLong` for the metadata; `TooManyFiles`
        and `FileTooLarge`. Raises `Draining` if `Conversations.drain` was told to refuse messages,
        or its grace period is over. Raises the journal's own errors.
        """
        if message_id is None:
            message_id = self._setup.ports.ids.new()
        send = Send(
            message_id,
            content,
            tuple(images),
            on_overlap,
            replaces,
            author=author,
            metadata=_frozen("metadata", metadata),
            files=tuple(files),
            event_id=event_id,
            expected=self._expected,
        )
        if self._expected is not None and self._expected.begins_nothing:
            await self._journal.info(self.conversation_id)
        watcher = self._setup.watching.watcher
        with watcher.sending(self.conversation_id, message_id) as note:
            sent = await self._ask(send)
            note(sent)
        return self._turn(await self._as_first_answered(sent) if sent.is_duplicate else sent)

    async def turn(self, message_id: str) -> Turn:
        """Return the turn of a chat message that is in the log, running or long ended.

        It only reads the log, whichever process owns the conversation. Raises `MessageNotFound` and
        `ConversationNotFound`.
        """
        check_id("message_id", message_id)
        journal = self._journal
        await journal.info(self.conversation_id)
        found = await journal.find_messages(self.conversation_id, [message_id])
        if message_id not in found:
            raise MessageNotFound(self.conversation_id, message_id)
        return await find_turn(self._turn_access(), message_id, found[message_id])

    async def running(self) -> Turn | None:
        """Return the turn that runs, is paused or waits for a confirmation; None if none does.

        It only reads the log, whichever process owns the conversation. The message id of the turn
        is that of its first chat message. Raises `ConversationNotFound`.
        """
        turns = (await self.at()).turns
        if turns.running is None:
            return None
        for message in turns.running.messages:
            known = None if message.message_id is None else turns.find(message.message_id)
            if known is not None:
                turn_id, waits_for = turns.running.turn_id, turns.waits_for
                found = await self._journal.read(self.conversation_id, after=known.seq - 1, limit=1)
                event_id = found[0].event_id if found else None
                return self._turn(
                    Sent(known.message_id, known.seq, turn_id, True, None, waits_for, event_id)
                )
        return None

    async def queued(self) -> Sequence[MessageQueuedEvent]:
        """Return the chat messages that wait, in the order of their turns. It only reads the log.

        `await (await conversation.turn(message.message_id)).cancel()` withdraws one of them. Raises
        `ConversationNotFound`.
        """
        return tuple((await self.at()).turns.queued.values())

    async def interrupt(self, turn_id: str | None = None) -> bool:
        """End the turn that runs, is paused or waits for a confirmation; durable when this returns.

        The text said so far is kept, open calls are answered, and the next waiting chat message
        gets its turn. Returns False if no turn runs, or if the running turn is not `turn_id`. Pass
        the turn that the user saw, so that a late click does not end the next one. Raises
        `ConversationNotFound`.
        """
        await self._journal.info(self.conversation_id)
        return await self._ask(Interrupt(turn_id, expected=self._expected))

    async def undo(self, turn_id: str | None = None) -> Sequence[UserMessageEvent]:
        """Take the newest turn out of the view, and return its chat messages.

        A turn without a chat message in the view is passed over. The log keeps the turn, and the
        effects of its tools are not undone. Pass the turn that the user saw, so that neither a late
        click nor a repeat takes back another one: if that turn has left the view already, its chat
        messages are returned again and nothing is written. So repeat the call after
        `OutcomeUnknown` or a cancellation. Without `turn_id`, a second call takes out the turn
        before it. Raises `TurnInProgress` while a turn runs, `NotRetractable` if a part of the turn
        is condensed or it is not the newest, `NothingToRetract`, and `ConversationNotFound`.
        """
        await self._journal.info(self.conversation_id)
        try:
            return await self._ask(Undo(turn_id, expected=self._expected))
        except (TurnInProgress, NotRetractable, NothingToRetract):
            taken = () if turn_id is None else await self._taken_back(turn_id)
            if not taken:
                raise
            return taken

    # --- pauses and confirmations ----------------------------------------------------------------

    async def pause(self) -> bool:
        """Begin no further step until `resume`, even after a restart; durable when this returns.

        A running model call or tool goes on, and its result is kept. Chat messages are accepted as
        always. Returns False if the conversation was paused already. Raises `ConversationNotFound`.
        """
        await self._journal.info(self.conversation_id)
        return await self._ask(Pause(expected=self._expected))

    async def resume(self) -> bool:
        """Continue after a pause. Returns False if the conversation was not paused.

        Raises `ConversationNotFound`.
        """
        await self._journal.info(self.conversation_id)
        return await self._ask(Resume(expected=self._expected))

    async def answer(
        self, answers: Mapping[str, bool | str], *, event_id: str | None = None
    ) -> None:
        """Answer the calls that wait for a confirmation, each on its own, in one commit.

        `answers` maps the tool call id of every call that waits to its answer: True runs the call,
        False or a reason rejects it, and the agent sees the reason. Giving the same answers again
        writes nothing, so repeat them after `OutcomeUnknown` or a cancellation; other answers raise
        `NotConfirmable`.

        `event_id`: the id of the event that carries the answers into the log, as for `send`. Raises
        `EventIdConflict` if that event is in the log and carries a message or other answers.
        """
        if not isinstance(answers, Mapping):
            raise InvalidInput(
                "answers takes a mapping from each tool call id to True, False or a reason, not "
                f"{a_type(answers)}",
                argument="answers",
                rule="answers must be an object of the calls that wait",
            )
        await self._ask(Answer(answers, event_id, expected=self._expected))

    async def confirm(self, tool_call_ids: Collection[str] | None = None) -> None:
        """Run the calls that wait for a confirmation: `answer` them all with True.

        Name all calls that the user was shown: then a second click, or a repeat after
        `OutcomeUnknown`, never confirms other calls. Raises `NotConfirmable`.
        """
        named = True if tool_call_ids is None else dict.fromkeys(tool_call_ids, True)
        await self._ask(Answer(named, expected=self._expected))

    async def reject(
        self, reason: str = "", *, tool_call_ids: Collection[str] | None = None
    ) -> None:
        """Answer the calls that wait for a confirmation as rejected; the agent sees the reason.

        `tool_call_ids` as for `confirm`. Raises `NotConfirmable`.
        """
        check_text("reason", reason)
        named = reason if tool_call_ids is None else dict.fromkeys(tool_call_ids, reason)
        await self._ask(Answer(named, expected=self._expected))

    # --- reading ---------------------------------------------------------------------------------

    def events(self, *, after: int = 0, live: bool = True) -> EventReader:
        """Iterate over every event above the seq `after`, in order, without a gap or a repeat.

        With `live`, the iteration continues until the `Conversations` close, and waits for a
        conversation that does not exist yet. Otherwise it stops at the end of the log, and raises
        `ConversationNotFound`. A slow reader reads from the journal, and delays no other reader and
        no sender. Iterate a reader from one task; cancelling its wait loses no event. A reader
        keeps no owner active; drop it to end it. Raises `InvalidInput` for an argument of another
        type.

        With `live` and an `after` beyond the end of the log, the iteration waits until the log has
        grown beyond it, and does not say so. And a seq does not tell a log from one that was begun
        anew under the same id. To continue after a restart, keep the id of the event, too, and read
        from `expecting(seq=seq, event_id=event_id)`, with `after=seq`: then the iteration raises
        `NotThisLog` if the log does not have that event there.
        """
        expected = self._expected_at(after)
        check_bool("live", live)
        return self._setup.subscriptions.read(
            self.conversation_id, after=after, live=live, expected=expected
        )

    def follow(self, *, after: int = 0) -> Follower:
        """Iterate over live `events` from `after` on, with pieces of answers between them.

        Use it in a user interface that shows a conversation. Pieces come live, from an owner in
        this process, or in another one that this process can ask
        (`turnkeeper.actors.gateway.Node`). The first piece that a reader gets of an answer has all
        that was said of it so far, and a reader that falls behind gets the pieces it missed as one.
        The event that carries an answer replaces its pieces, even if some of them did not arrive
        (`is_short_of`). Iterate it from one task; cancelling its wait loses nothing. To continue
        after a restart, see `events`.
        """
        expected = self._expected_at(after)
        return Follower(
            self._setup.subscriptions.read(
                self.conversation_id, after=after, live=True, pieces=True, expected=expected
            )
        )

    def _expected_at(self, after: int) -> Expected | None:
        """Return the event that a reader must find at `after`; None if any log will do."""
        _check_after(after)
        if self._expected is None or self._expected.seq is None:
            return None
        if self._expected.seq != after:
            raise InvalidInput(
                f"after is {after}, and the expected event is at seq {self._expected.seq}; "
                "a reader begins after the event that it expects"
            )
        return self._expected

    @property
    def hears_pieces(self) -> bool:
        """False while `follow` gets no pieces: another process writes them and cannot be reached.

            if not conversation.hears_pieces:
                show("the answer comes as a whole")

        It tells the result of the last attempt of a reader in this process. The events come in
        either case.
        """
        return self._setup.subscriptions.hears_pieces(self.conversation_id)

    async def view(self) -> View:
        """Return the committed view from the owner, which is started if it is not active.

        Raises `ConversationNotFound`, and `OwnedElsewhere` if another process owns the
        conversation; `at` reads the same from the log.
        """
        await self._journal.info(self.conversation_id)
        expected = replace(self._expected or Expected(), exists=True)  # it may be deleted meanwhile
        return await self._ref.ask(GetView(expected=expected))

    async def at(self, seq: int | None = None) -> Folded:
        """Return the state at `seq`, or at the end of the log. It only reads the log.

        It has the `view`, the `turns`, the `agent_execution_status`, the `metrics`, the `task_list`
        and the `seq`.

        Raises `ConversationNotFound`, `CorruptLog`, `InvalidInput` if the log has no such seq, and
        `JournalUnavailable` if another owner began during each of several readings.
        """
        if seq is not None:
            check_whole("at", seq)
        state, _ = await self._read_at(seq, load_state)
        return state

    async def steps(self) -> Sequence[Step]:
        """Return the model calls of the conversation, oldest first.

        Each names what the model was asked: `(await conversation.at(step.view_seq)).view` is the
        view that it saw. Raises `ConversationNotFound`.
        """
        found = [step_of(logged) async for logged in self._whole_log()]
        return [step for step in found if step is not None]

    async def rejections(self) -> Sequence[Rejection]:
        """Return the events that admission refused, oldest first."""
        return await self._journal.rejections(self.conversation_id)

    async def exists(self) -> bool:
        """Return True if the conversation has begun and was not deleted. It starts no owner."""
        try:
            await self._journal.info(self.conversation_id)
        except ConversationNotFound:
            return False
        return True

    # --- events by hand --------------------------------------------------------------------------

    async def append(self, event: Event, *, park: bool = False) -> Appended | Duplicate:
        """Append one event to the log, if admission accepts it; no turn starts.

        Appending the same event again writes nothing and returns `Duplicate`; so repeat it after
        `OutcomeUnknown` or a cancellation. Raises `AdmissionRefused` with the violation; if the
        conversation had begun, the event is then kept among `rejections`. Raises `NotAppendable`
        for an event that only the owner writes, and for a chat message with a `message_id` of a
        turn that does not run.

        With `park`, a tool result that comes before its tool call waits in memory for at most
        `park_s` seconds, and `append` does not return until the result is in the log. It raises
        `ResultNotKept` if the owner stops first. If the same result is appended again meanwhile,
        with `park` or without, that call waits, too; it raises `OutcomeUnknown` if too many wait.
        Raises `InvalidInput` if `park` is not a bool.
        """
        check_bool("park", park)
        return await self._ask(Append(event, park, expected=self._expected))

    async def append_all(self, events: Sequence[Event]) -> Appended | Duplicate:
        """Append several events to the log in one commit, if admission accepts all of them.

        Use it for events that belong together, retractions among them; all else is as in `append`.
        A chat message here must have no `message_id`. Appending the same events again writes
        nothing and returns `Duplicate`. Returns the seq of the last event; without events, the end
        of the log as its owner in this process knows it. Raises `EventIdConflict` if the log has
        only some of the events, or has them in another order. If one of them is parked already, the
        call waits until that one is in the log or refused.
        """
        return await self._ask(AppendAll(tuple(events), expected=self._expected))

    async def retract(self, event_ids: Sequence[str]) -> Appended:
        """Take events out of the view; the log keeps them, and records the retraction.

        Raises `AdmissionRefused` if one of them is not in the view, if a call is open, or if the
        retraction would split a call from its result, or split a response or a tool loop.
        """
        if isinstance(event_ids, str):  # each letter would be an id
            raise InvalidInput("event_ids is a str; it takes a list of event ids")
        return await self._ask(Retract(event_ids=tuple(event_ids), expected=self._expected))

    async def retract_turn(self, turn_id: str) -> Appended:
        """Retract all events of a turn that are still in the view; see `retract`."""
        return await self._ask(Retract(turn_id=turn_id, expected=self._expected))

    # --- the conversation as a whole -------------------------------------------------------------

    async def change(
        self,
        *,
        title: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        owner: str | None = None,
        change_id: str | None = None,
    ) -> Appended | Duplicate:
        """Change the title, the labels, or the user of the conversation, even during a turn.

        Arguments that are left out change nothing. An empty title or owner clears it; a label of
        None is removed, and labels that are not named stay. The model sees none of this. A second
        call with the same `change_id` writes nothing and returns `Duplicate`; with another change
        it raises `EventIdConflict`. Raises `ConversationNotFound`; `TooManyLabels` and
        `LabelTooLong`, by the bounds in `Limits`; and `InvalidInput` for a title of more than 256
        characters, or for control characters.
        """
        change = Change(title, _frozen("labels", labels), owner, change_id, expected=self._expected)
        await self._journal.info(self.conversation_id)
        return await self._ask(change)

    async def fork(
        self, fork_id: str, *, at: int | None = None, owner: str | None = None
    ) -> Conversation:
        """Begin another conversation with this one's log up to the seq `at`, or to its end.

        The fork has the title and the labels that this conversation had at that seq. `owner`: the
        user to whom the fork belongs; without it, it belongs to none. The log is shared and
        not copied. A turn that ran at that seq is interrupted in the fork. Its open calls are
        answered there as ones that may have happened, or as not run if they waited for a
        confirmation. Queued chat messages stay here. If the conversation was paused at that seq and
        no turn ran, the fork begins paused, and `resume` on the fork ends that. This
        conversation is only read, and may go on meanwhile: its log up to `at`, or the part behind
        its snapshot.

        Raises `ConversationNotFound`, `ConversationExists`, `ConversationDeleted` if this one is
        deleted meanwhile, and `InvalidInput` if the log has no such seq. Raises `OwnedElsewhere` or
        `NotDelivered` if an owner that begins a conversation `fork_id` at this moment fails. A
        command of a handle of `fork_id` that comes meanwhile is carried out in the fork.

        With `at`, the call may be made again, as after `OutcomeUnknown` or a cancellation: if the
        conversation `fork_id` is the fork of this log at `at`, and belongs to `owner`, it is
        returned, whatever was written to it since.
        """
        setup = self._setup
        if owner is not None:
            check_short("owner", owner, ID_LENGTH_MAX)
        fork = Conversation(fork_id, self._region, setup)
        journal, is_repeatable = self._journal, at is not None
        head = (await journal.info(self.conversation_id)).head
        if at is None:
            at = head
        else:
            check_whole("at", at)
        if not 1 <= at <= head:
            raise _no_such_seq(self.conversation_id, at, 1, head)
        # This event is read first: the journal refuses the fork if the event is not at `at` any
        # more. So if the fork is made, all later reads were of the same log, even if the
        # conversation is deleted and begun anew meanwhile.
        last = await journal.read(self.conversation_id, after=at - 1, limit=1)
        state = await self.at(at)
        await self.check_user()
        event_id = last[0].event_id if last else None
        working = WorkingState(self.conversation_id, 0, setup.settings, state)
        stamp = Stamp(setup.ports.now(), setup.ports.ids.block())
        events = decide_fork(working, state.seq, stamp, owner=owner or "")
        try:
            async with self._kept_free(fork_id):
                await journal.fork(
                    self.conversation_id,
                    fork_id,
                    at=state.seq,
                    records=[encode_record(event) for event in events],
                    is_unfinished=False,
                    at_event_id=event_id,
                    listing=_listing_after(state, events),
                )
        except ConversationExists:
            with suppress(ConversationNotFound):  # it was deleted meanwhile
                if is_repeatable and await self._is_fork(fork, at, event_id, owner):
                    return fork
            raise
        return fork

    def expecting(
        self,
        *,
        owner: str | None = None,
        exists: bool = False,
        seq: int | None = None,
        event_id: str | None = None,
        at_us: int | None = None,
        behalf: Behalf | None = None,
    ) -> Conversation:
        """Return a handle whose commands are refused unless the conversation is the expected one.

        The conversation's owner checks this when it decides a command, so nothing can change in
        between. Of the calls that only read the log, `events` and `follow` check the event, and
        none checks the user; for that, call `check_user`.

        `owner`: the user to whom it must belong, else `NotYours`. A command that begins the
        conversation gives it to this user, in its first commit. `exists`: a command must not begin
        the conversation, else `ConversationNotFound`. `seq` and `event_id`: the log must have this
        event at this seq, else `NotThisLog`. `at_us`: the time that the event must have, in
        microseconds since 1970, as well: an earlier log may have had the same id, if ids are given.
        `behalf`: the principal for whom the commands are sent; if another process owns the
        conversation, that process authorizes the principal again, else `Forbidden`. Raises
        `InvalidInput` for a value that cannot be expected.
        """
        expected = Expected(owner, exists, seq, event_id, at_us, behalf)
        return Conversation(self.conversation_id, self._region, self._setup, expected)

    async def check_user(self) -> None:
        """Raise `NotYours` if the conversation exists and belongs to another user than expected.

        The expected user is the `owner` given to `expecting`. The call reads one row of the list,
        or the log if that row is stale, and starts no actor.
        """
        if self._expected is None or self._expected.owner is None:
            return
        row = await find_row(self._journal, self.conversation_id)
        if row is None:
            return
        owner = (await self.at()).details.owner if row.is_stale else row.listing.owner
        if owner != self._expected.owner:
            raise NotYours(self.conversation_id)

    @property
    def is_in_own_loop(self) -> bool:
        """True in the event loop that the `Conversations` run in."""
        return self._ref.is_at_home

    # --- inside ----------------------------------------------------------------------------------

    @property
    def _journal(self) -> Journal:
        """The open journal. Raises `ConversationsClosed` once the `Conversations` are closed."""
        if self._setup.subscriptions.is_closed:
            raise ConversationsClosed(self.conversation_id)
        return self._setup.journal

    def _ask(self, command: FromOutside[R]) -> Awaitable[R]:
        if self.conversation_id in self._setup.forking:
            return self._ask_later(command)
        return ask_owner(self._ref, self.conversation_id, command, self._setup.node_link)

    async def _ask_later(self, command: FromOutside[R]) -> R:
        """Ask the owner once no fork is being made under this name."""
        while (forking := self._setup.forking.get(self.conversation_id)) is not None:
            await forking.made.wait()
        return await self._ask(command)

    def _turn(self, sent: Sent) -> Turn:
        return Turn(self._turn_access(), sent)

    def _turn_access(self) -> TurnAccess:
        return TurnAccess(
            self.conversation_id, self._region, self._setup, self._expected, self.check_user
        )

    async def _read_at(
        self, seq: int | None, load: Callable[[Journal, str, int], Awaitable[T]]
    ) -> T:
        """Return what `load` reads of the log up to `seq`, or to its end. Raises as `at` does."""
        info = await self._journal.info(self.conversation_id)
        for _ in range(_READINGS_MAX):
            upto = info.head if seq is None else seq
            if not 0 <= upto <= info.head:
                raise _no_such_seq(self.conversation_id, upto, 0, info.head)
            found: T | CorruptLog
            try:
                found = await load(self._journal, self.conversation_id, upto)
            except CorruptLog as damage:
                found = damage
            before, info = info, await self._journal.info(self.conversation_id)
            if info.epoch == before.epoch:
                if isinstance(found, CorruptLog):
                    raise found
                return found
            # Another owner has begun meanwhile. The conversation may have been deleted and begun
            # anew: then a snapshot of one log and records of another were read.
        raise JournalUnavailable(
            f"conversation {self.conversation_id} got another owner during each of "
            f"{_READINGS_MAX} readings of its log; read again"
        )

    def _whole_log(self) -> EventReader:
        """Iterate over all events, whichever event the handle expects."""
        return self._setup.subscriptions.read(self.conversation_id, after=0, live=False)

    async def _as_first_answered(self, sent: Sent) -> Sent:
        """Return the answer that the first `send` of this chat message got, read from the log."""
        name, events = self.conversation_id, list[Event]()
        after = max(0, sent.seq - 1 - _DECIDED_BEFORE_MAX)
        try:
            async for page in LogPages(self._journal, name, after=after, upto=sent.seq):
                events.extend(decode_record(name, record).event for record in page)
            first = events.pop() if after + len(events) == sent.seq else None
            if (
                isinstance(first, UserMessageEvent | MessageQueuedEvent)
                and first.message_id == sent.message_id
            ):
                waiting = None
                if isinstance(first, MessageQueuedEvent):
                    waiting = (first, await self._read_at(sent.seq - 1, load_turns))
                return first_reply(sent, first.id, events, waiting)
        except (ConversationNotFound, InvalidInput):
            pass
        return sent  # the log has been deleted since, and perhaps begun anew

    async def _taken_back(self, turn_id: str) -> Sequence[UserMessageEvent]:
        """Return a turn's chat messages that were retracted last, if none is in the view any more.

        What a condensation has forgotten counts as in the view: it was not taken back.
        """
        left: dict[str, UserMessageEvent] = {}
        taken: tuple[UserMessageEvent, ...] = ()
        async for logged in self._whole_log():
            event = logged.event
            if is_chat_message(event) and event.turn_id == turn_id:
                left[event.id] = event
            elif isinstance(event, RetractionEvent):
                gone = [left.pop(known) for known in event.retracted_event_ids if known in left]
                taken = tuple(gone) or taken
        return () if left else taken

    @asynccontextmanager
    async def _kept_free(self, fork_id: str) -> AsyncIterator[None]:
        """Keep all commands from beginning a conversation of this name while inside.

        Raises `ConversationExists` if there is one.
        """
        forking = self._setup.forking
        while (other := forking.get(fork_id)) is not None:
            await other.made.wait()
        forking[fork_id] = this = Forking()
        try:
            await self._check_free(fork_id)
            this.is_free = True  # there was no await since no owner was active
            yield
        finally:
            del forking[fork_id]
            this.made.set()

    async def _check_free(self, fork_id: str) -> None:
        for _ in range(_LOOKS_MAX):
            with suppress(ConversationNotFound):
                raise ConversationExists(fork_id, (await self._journal.info(fork_id)).head)
            # An earlier command may have started an owner, which would know nothing of the fork.
            if await self._region.passivate(fork_id):
                return
            try:
                # The owner is at work, perhaps on the conversation's first message. It handles this
                # query after that.
                await self._region[fork_id].ask(GetView(expected=Expected(exists=True)))
            except ConversationNotFound:
                # Work that is left there, such as a parked result, begins no conversation. Once the
                # owner has stopped, another one may have begun: so look again.
                await self._region.stop_actor(fork_id)
        raise JournalUnavailable(
            f"fork to {fork_id} given up: other callers keep starting an owner of {fork_id}; "
            "nothing was written; fork again, or to another name"
        )

    async def _is_fork(
        self, fork: Conversation, at: int, event_id: str | None, owner: str | None
    ) -> bool:
        """Return True if a conversation is the fork of this log at `at`, and belongs to `owner`.

        `event_id`: of this log's event at `at`.
        """
        # Its own events follow the shared ones. If this conversation was deleted and begun anew,
        # the fork of the former one shares other events.
        begins = await self._journal.read(fork.conversation_id, after=at - 1, limit=2)
        match begins:
            case [shared, first] if shared.event_id == event_id:
                own = decode_record(fork.conversation_id, first).event
                return (
                    isinstance(own, ForkedFromEvent)
                    and (own.conversation_id, own.seq) == (self.conversation_id, at)
                    and (await fork.at()).details.owner == (owner or "")
                )
            case _:
                return False


def _no_such_seq(conversation_id: str, seq: int, first: int, head: int) -> InvalidInput:
    return InvalidInput(
        f"seq {seq} of conversation {conversation_id} is not in {first}..{head}",
        argument="at",
        rule=f"at must be {first} to {head}",
    )


def _listing_after(state: Folded, events: Sequence[Event]) -> Listing:
    """Return the listing of a log that these events begin, after those of the state."""
    for event in events:
        state.fold(event)
    return state.listing


class Follower(AsyncIterator[LoggedEvent | TextDelta]):
    """The iterator of `Conversation.follow`, for one task."""

    def __init__(self, reader: EventReader) -> None:
        self._reader = reader

    def is_short_of(self, logged: LoggedEvent) -> bool:
        """Return True if this event carries an answer whose pieces did not all arrive.

        `logged`: the event that the iterator yielded last. Pieces are missing if the owner that
        wrote them ended, or is in another process whose pieces stopped arriving.
        """
        return self._reader.short_seq == logged.seq

    def __anext__(self) -> Awaitable[LoggedEvent | TextDelta]:
        return self._reader.next_item()


def _check_after(after: int) -> None:
    check_whole("after", after)
    if after < 0:
        raise InvalidInput(f"after is {after}; seqs begin at 1, so it takes 0 or more")


def _frozen(what: str, given: Mapping[str, object] | None) -> FrozenObject:
    """Return a frozen copy; raise `InvalidInput` if JSON cannot keep the values exactly."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInput(f"{what} takes a mapping, not {a_type(given)}")
    try:
        return FrozenObject(given)
    except InvalidInput as error:
        error.argument = what
        raise
    except ValueError as error:
        raise InvalidInput(
            f"{what} holds an invalid value: {error_text(error)}",
            argument=what,
            rule=f"{what} must be JSON, in valid Unicode, with finite numbers",
        ) from error
