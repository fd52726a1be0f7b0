"""Conversations: the way in. Opens the journal, runs the actors, hands out handles.

`async with Conversations(agent, journal=...)` owns a region of conversation actors and the
subscriptions to them. It promises:

1. A chat message is durable when `send` returns, and in the log once, however often it is sent
   under one `message_id`, over restarts too.
2. Chat messages of one conversation are answered one turn at a time; what happens to one that
   comes while a turn runs is `on_overlap`.
3. On entering, what a crash left unfinished is ended, its open calls are answered, and queued
   chat messages get their turns.
4. `events` gives every event of the log from a seq on, in order, without a gap or a repeat.

It does not promise that a tool call which was open when its process stopped did not happen: its
result says that it may have.

Handles and turns are plain values: keep them, copy them, drop them. All of it belongs to one
event loop. Cancelling a call here never half-does it: a chat message whose `send` was cancelled
is either in the log or not, and sending it again under its id finds out which.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

import anyio
import structlog

from turnkeeper.runtime import (
    Directive,
    NotDelivered,
    OutcomeUnknown,
    OwnershipLost,
    Ports,
    Refused,
    Region,
    Runtime,
    Supervision,
    TurnkeeperError,
    Unavailable,
)

from ._conversation import ConversationActor, Setup, Verify
from ._loading import load_state
from ._owner import Owner, Policy, Stamp, Unfinished
from ._records import record_of
from ._subscriptions import EventReader, Subscriptions
from ._text import check_id, check_text
from ._turn_rules import decide_fork
from ._waits import Waits, turn_of
from .admission import Appended, Duplicate
from .agents import Agent
from .commands import (
    Append,
    AppendAll,
    CancelTurn,
    Command,
    Confirm,
    Delete,
    GetView,
    OnOverlap,
    Pause,
    Query,
    Resume,
    Retract,
    Send,
    Sent,
    check_overlap,
)
from .condensers import Condenser, NoCondenser
from .errors import (
    ConversationDeleted,
    ConversationNotFound,
    ConversationsClosed,
    InvalidInput,
    TurnNotCompleted,
)
from .events import (
    AgentMessageEvent,
    Event,
    ForkedFromEvent,
    ImageContent,
    LoggedEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    TextDelta,
    TurnEndedEvent,
    UserMessageEvent,
)
from .journal import ConversationInfo, Deletion, Journal, Rejection
from .state import ConversationState
from .turns import KNOWN_MESSAGES_MAX
from .view import View

__all__ = ["Conversation", "ConversationConfig", "Conversations", "Turn", "TurnEnd"]

RECOVERIES_AT_ONCE_MAX = 256
OWNERS_ENDING_MAX = 2
"""How many owners may fail or stop under one that waits, before it is told why."""
REFUSE_S = 1.0
"""How long a conversation is refused whose owner failed too often. Every one of them comes to that
in an outage of the journal, and would be out for so much longer."""

SUPERVISION = Supervision(
    rules=(
        # Fenced, or not ours: never started again by itself; the next message may try.
        (OwnershipLost, Directive.STOP),
        # A log that cannot be opened as it is cannot be opened by trying harder.
        (Refused, Directive.STOP),
    )
)
"""What becomes of an owner that failed: another is made, from the journal, but for these."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ConversationConfig:
    """What is particular to one conversation; None: as for all of them."""

    agent: Agent | None = None
    system_prompt: str | None = None
    """Takes effect where a conversation begins."""
    on_overlap: OnOverlap | None = None


class Conversations:
    """All conversations of one journal, in one event loop. Enter it before use."""

    def __init__(
        self,
        agent: Agent,
        *,
        journal: Journal,
        runtime: Runtime | None = None,
        system_prompt: str | None = None,
        on_overlap: OnOverlap = "queue",
        queued_messages_max: int = 256,
        condenser: Condenser | None = None,
        idle_s: float | None = 300.0,
        active_max: int | None = None,
        recover: Literal["on_enter", "on_message"] = "on_enter",
        unfinished: Unfinished = "end",
        configure: Callable[[str], ConversationConfig] | None = None,
        verify: Verify = "off",
        park_s: float = 30.0,
        name: str = "conversations",
        ports: Ports | None = None,
    ) -> None:
        """Nothing is opened yet. Raises `InvalidInput`.

        `unfinished`: what becomes of a turn that a crash cut off: "end" it as interrupted, or
        "resume" it, which takes an agent that can be run again on a turn that has begun; tools run
        again only where they are declared idempotent. `configure`: what is particular to the
        conversation of this id, asked each time it is opened.

        `runtime`: run in this one; otherwise in one of its own, which ends with it. `idle_s`:
        seconds after which an idle conversation is passivated (None: never). `active_max`: how
        many may be active before the least recently used idle one is passivated. `verify`: how
        often, after a commit, a view is rebuilt from its log on the side and compared; the
        rebuilding costs a reading of the log. `park_s`: how long a result that came before its
        call may be parked. `name`: of the region, where several share a runtime.
        """
        if not 0 < queued_messages_max < KNOWN_MESSAGES_MAX:
            raise InvalidInput(
                f"queued_messages_max is {queued_messages_max}; it takes 1 to "
                f"{KNOWN_MESSAGES_MAX - 1}"
            )
        check_overlap(on_overlap)
        _check_agent(agent)
        _check_system_prompt(system_prompt)
        check_id("name", name)
        if recover not in ("on_enter", "on_message"):
            raise InvalidInput(f'recover is {recover!r}; it takes "on_enter" or "on_message"')
        if verify not in get_args(Verify):
            raise InvalidInput(
                f"verify is {verify!r}; it takes one of {', '.join(get_args(Verify))}"
            )
        if unfinished not in get_args(Unfinished):
            raise InvalidInput(f'unfinished is {unfinished!r}; it takes "end" or "resume"')
        self._configure = configure
        self._journal = journal
        self._given_runtime = runtime
        self._ports = ports if ports is not None else runtime.ports if runtime else Ports()
        self._recover = recover
        self._name = name
        self._idle_s = idle_s
        self._active_max = active_max
        self._setup = Setup(
            agent=agent,
            journal=journal,
            subscriptions=Subscriptions(journal),
            waits=Waits(),
            condenser=condenser if condenser is not None else NoCondenser(),
            policy=Policy(
                on_overlap=on_overlap,
                queued_messages_max=queued_messages_max,
                system_prompt=system_prompt,
                unfinished=unfinished,
                is_resumable=_is_resumable(agent),
            ),
            verify=verify,
            park_s=park_s,
            ports=self._ports,
        )
        self._exit_stack = AsyncExitStack()
        self._is_entered = False
        self._is_closing = False
        self._region: Region[Command | Query] | None = None

    async def __aenter__(self) -> Self:
        if self._is_entered:
            raise RuntimeError("conversations are entered once; make new ones for the same journal")
        self._is_entered = True
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._journal)
            runtime = self._given_runtime
            if runtime is None:
                runtime = await stack.enter_async_context(Runtime(ports=self._ports))
            self._region = runtime.region(
                self._name,
                self._make_owner,
                supervision=SUPERVISION,
                idle_s=self._idle_s,
                active_max=self._active_max,
                refuse_s=REFUSE_S,
            )
            # From the last to the first: nobody is called back to life, all stop, readers end.
            stack.callback(self._setup.subscriptions.close)
            stack.push_async_callback(self._region.stop, "its conversations are closing")
            stack.callback(self._begin_closing)
            if self._recover == "on_enter":
                await self._recover_unfinished(self._region)
            self._exit_stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._region = None
        await self._exit_stack.aclose()

    def _begin_closing(self) -> None:
        self._is_closing = True
        self._setup.subscriptions.begin_closing()

    def _make_owner(self, conversation_id: str) -> ConversationActor:
        # In a runtime that goes on, a handle that was kept still reaches the region.
        if self._is_closing:
            raise ConversationsClosed(conversation_id)
        setup = self._setup
        if self._configure is not None:
            setup = _configured(setup, self._configure(conversation_id))
        return ConversationActor(conversation_id, setup)

    async def _recover_unfinished(self, region: Region[Command | Query]) -> None:
        """Open what the last process left unfinished; opening a conversation recovers it."""
        limit = anyio.Semaphore(RECOVERIES_AT_ONCE_MAX)

        async def recover(conversation_id: str) -> None:
            async with limit:
                try:
                    await region[conversation_id].ask(GetView())
                except TurnkeeperError as error:
                    # It stays as it is in the journal, and whoever sends to it gets this error;
                    # the others are not held up.
                    _log.warning(
                        "recovery failed",
                        conversation=conversation_id,
                        kind=type(error).__name__,
                        error=str(error),
                    )

        async with anyio.create_task_group() as group:
            for info in await self._journal.list(only_unfinished=True):
                group.start_soon(recover, info.conversation_id)

    def __getitem__(self, conversation_id: str) -> Conversation:
        """A handle; the conversation begins with its first chat message."""
        return Conversation(conversation_id, self._open_region(), self._setup)

    def _open_region(self) -> Region[Command | Query]:
        if self._region is None:
            raise RuntimeError("conversations are not open; use `async with Conversations(...)`")
        return self._region

    async def list(self) -> Sequence[ConversationInfo]:
        """All conversations in the journal, by id, without opening them."""
        return await self._journal.list()

    async def delete(self, conversation_id: str) -> Deletion:
        """Delete a conversation, its log and all that is kept beside it.

        A turn that runs is cut off; who reads events or waits for a turn gets
        `ConversationDeleted`. A chat message that is sent meanwhile is either in the log that is
        deleted, or begins a new conversation. What forks need of the log stays, and the answer says
        so. Raises `ConversationNotFound`, and `OwnedElsewhere`; after `OutcomeUnknown`, delete it
        again.
        """
        deletion = await self._delete(conversation_id, Delete())
        assert deletion is not None, "a deletion without a condition"
        return deletion

    async def expire(self, *, before: float) -> Sequence[str]:
        """Delete what was last written before this time (seconds since the epoch, UTC), as a whole.

        What another process owns, and what goes on meanwhile, stays. Gives the ids of what was
        deleted.
        """
        deleted: list[str] = []
        for info in await self._journal.list():
            if info.updated_at < before:
                with suppress(OwnershipLost, ConversationNotFound):
                    if await self._delete(info.conversation_id, Delete(head=info.head)) is not None:
                        deleted.append(info.conversation_id)
        return deleted

    async def _delete(self, conversation_id: str, command: Delete) -> Deletion | None:
        check_id("conversation id", conversation_id)
        region = self._open_region()
        await self._journal.info(conversation_id)  # what is not there is not made for this
        return await region[conversation_id].ask(command)


def _configured(setup: Setup, config: ConversationConfig) -> Setup:
    if not isinstance(config, ConversationConfig):
        raise InvalidInput(f"configure returns a ConversationConfig, and gave {config!r}")
    policy = setup.policy
    _check_system_prompt(config.system_prompt)
    agent = setup.agent if config.agent is None else config.agent
    if config.agent is not None:
        _check_agent(agent)
        policy = replace(policy, is_resumable=_is_resumable(agent))
    if config.system_prompt is not None:
        policy = replace(policy, system_prompt=config.system_prompt)
    if config.on_overlap is not None:
        check_overlap(config.on_overlap)
        policy = replace(policy, on_overlap=config.on_overlap)
    return replace(setup, agent=agent, policy=policy)


def _check_agent(agent: Agent) -> None:
    if not callable(getattr(agent, "run", None)):
        raise InvalidInput(f"an agent has `async run(turn)`, and {agent!r} has not; use @agent")


def _check_system_prompt(system_prompt: str | None) -> None:
    if system_prompt is not None:
        check_text("system_prompt", system_prompt)


def _is_resumable(agent: Agent) -> bool:
    return getattr(agent, "is_resumable", False) is True


class Conversation:
    """A handle to one conversation. Its actor activates with the first message to it."""

    def __init__(self, conversation_id: str, region: Region[Command | Query], setup: Setup) -> None:
        check_id("conversation id", conversation_id)
        self.conversation_id = conversation_id
        self._region = region
        self._ref = region[conversation_id]
        self._setup = setup

    async def send(
        self,
        content: str,
        *,
        images: Sequence[ImageContent] = (),
        message_id: str | None = None,
        on_overlap: OnOverlap | None = None,
    ) -> Turn:
        """Put a chat message into the conversation; it is durable when this returns.

        Sent again under its `message_id`, it gives the same turn and writes nothing. Raises
        `InvalidInput`, `TurnInProgress` (with `on_overlap="reject"`), `QueueFull`,
        `MessageIdConflict` (the id is known with other content), and the journal's own errors;
        after `OutcomeUnknown` or a cancellation, send it again under the same id.
        """
        if message_id is None:
            message_id = self._setup.ports.ids.new()
        send = Send(message_id, content, tuple(images), on_overlap)
        return Turn(self, await self._ref.ask(send))

    async def append(self, event: Event, *, park: bool = False) -> Appended | Duplicate:
        """Put one event into the log, if admission lets it; no turn starts.

        Raises `AdmissionRefused` with the violation; the event is then kept among `rejections`.
        Only what the model sees can be appended, and little else: `NotAppendable`. With `park`, a
        result that comes before its call waits for it in memory, and this with it: not
        acknowledged, for `park_s` at the most, and `ResultNotKept` when the owner stops.
        """
        return await self._ref.ask(Append(event, park))

    async def append_all(self, events: Sequence[Event]) -> Appended | Duplicate:
        """Put several events into the log in one commit, if admission lets all of them.

        As `append`, for what belongs together, retractions too; a chat message has no `message_id`
        here. The same events again are a `Duplicate`. Gives where the last one is; where there are
        none, where the log ends, from the owner: so this process owns the conversation.
        """
        return await self._ref.ask(AppendAll(tuple(events)))

    async def pause(self) -> bool:
        """Begin no further step until `resume`, over restarts too; durable when this returns.

        What a model is saying or a tool is doing goes on, and is kept. Chat messages are taken as
        ever. False: it was paused already. Raises `ConversationNotFound`.
        """
        await self._setup.journal.info(self.conversation_id)
        return await self._ref.ask(Pause())

    async def resume(self) -> bool:
        """Go on where it was paused. False: it was not. Raises `ConversationNotFound`."""
        await self._setup.journal.info(self.conversation_id)
        return await self._ref.ask(Resume())

    async def confirm(self, tool_call_ids: Collection[str] | None = None) -> None:
        """Let the calls run that wait for a confirmation.

        Name those that the user was shown, all of them: then a second click, or sending again
        after `OutcomeUnknown`, never confirms others. Raises `NotConfirmable`.
        """
        named = None if tool_call_ids is None else frozenset(tool_call_ids)
        await self._ref.ask(Confirm(confirmed=True, tool_call_ids=named))

    async def reject(
        self, reason: str = "", *, tool_call_ids: Collection[str] | None = None
    ) -> None:
        """Answer the calls that wait for a confirmation as rejected; the agent sees the reason.

        `tool_call_ids` as for `confirm`. Raises `NotConfirmable`.
        """
        named = None if tool_call_ids is None else frozenset(tool_call_ids)
        await self._ref.ask(Confirm(confirmed=False, reason=reason, tool_call_ids=named))

    async def retract(self, event_ids: Sequence[str]) -> Appended:
        """Take events out of the view, by an event of its own; the log keeps them.

        Raises `AdmissionRefused` where they are not all in the view, a call is open, or it would
        tear what belongs together (a call from its result, a response, a tool loop).
        """
        return await self._ref.ask(Retract(event_ids=tuple(event_ids)))

    async def retract_turn(self, turn_id: str) -> Appended:
        """As `retract`, all that the view still has of a turn."""
        return await self._ref.ask(Retract(turn_id=turn_id))

    async def fork(self, fork_id: str, *, at: int | None = None) -> Conversation:
        """Begin another conversation with this one's log up to the seq `at`, or to its end.

        The log is shared and not copied. A turn that ran there is interrupted in the fork, and its
        open calls are answered as not run; queued chat messages stay here. Raises
        `ConversationNotFound`, `ConversationExists`, and `InvalidInput` where the log has no such
        seq; this conversation is only read.
        """
        setup = self._setup
        fork = Conversation(fork_id, self._region, setup)
        state = await self.at(at)
        # Somebody may have asked for it by this name; an owner without a log makes room.
        await self._region.stop_actor(fork_id)
        owner = Owner(self.conversation_id, 0, setup.policy, state)
        stamp = Stamp(setup.ports.now(), setup.ports.ids.block())
        events = decide_fork(owner, state.seq, stamp)
        await setup.journal.fork(
            self.conversation_id,
            fork_id,
            at=state.seq,
            records=[record_of(event) for event in events],
            is_unfinished=False,
        )
        return fork

    def events(self, *, after: int = 0, live: bool = True) -> EventReader:
        """Every event above the seq `after`, in order, without a gap or a repeat.

        With `live` it goes on until the `Conversations` are left, and waits for a conversation that
        does not exist yet; without, it ends where the log ends and raises `ConversationNotFound`.
        A slow reader reads from the journal and slows nobody. Keeps nothing active; drop it to end
        it.
        """
        if after < 0:
            raise InvalidInput(f"events after seq {after}; seqs begin at 1, so it takes 0 or more")
        return self._setup.subscriptions.read(self.conversation_id, after=after, live=live)

    def follow(self, *, after: int = 0) -> AsyncIterator[LoggedEvent | TextDelta]:
        """As live `events`, with the pieces of answers between them while they are written.

        What a user interface shows of a conversation. Pieces come live, from an owner in this
        process, from the first of an answer to the first that whoever iterates misses.
        """
        if after < 0:
            raise InvalidInput(f"events after seq {after}; seqs begin at 1, so it takes 0 or more")
        return _Follower(
            self._setup.subscriptions.read(
                self.conversation_id, after=after, live=True, deltas=True
            )
        )

    def follow_owner(self, seq: int, *, deltas: bool = False) -> EventReader:
        """The events from `seq` on, which is in the log, for those who wait for what follows.

        An owner that ends is replaced by the next message to it; raises what keeps it from that,
        but follows one in another process.
        """
        return self._setup.subscriptions.read(
            self.conversation_id,
            after=seq - 1,
            live=True,
            known_seq=seq,
            on_owner_ended=self._ensure_owner,
            deltas=deltas,
        )

    def read_back(self, seq: int) -> EventReader:
        """The events from `seq` on, which is in the log, to its end."""
        return self._setup.subscriptions.read(
            self.conversation_id, after=seq - 1, live=False, known_seq=seq
        )

    async def _ensure_owner(self) -> None:
        """See to it that there is an owner here; raises why there cannot be one."""
        for _ in range(OWNERS_ENDING_MAX):
            try:
                await self._ref.ask(GetView())
            except NotDelivered:
                if self._setup.subscriptions.is_closing:
                    # There will be no other, and nobody to say when this one has stopped.
                    raise ConversationsClosed(self.conversation_id) from None
                # The last one is stopping. No await since that was found, so this only waits.
                await self._region.stop_actor(self.conversation_id)
            except (Unavailable, OutcomeUnknown, OwnershipLost):
                pass  # it waited beside what the last owner failed at; the next one is asked
            else:
                return
        await self._ref.ask(GetView())

    @property
    def is_inside_a_turn(self) -> bool:
        """Whether this runs in a turn that still runs, of one of the same `Conversations`."""
        inside = turn_of.get(None)
        return inside is not None and inside.waits is self._setup.waits and not inside.is_over

    def waited_for(self) -> AbstractContextManager[None]:
        """While inside, the turn that this runs in, if any, waits for this; else `AskCycle`."""
        if not self.is_inside_a_turn:
            return nullcontext()
        return self._setup.waits.wait(turn_of.get().conversation_id, self.conversation_id)

    async def view(self) -> View:
        """The view as committed. Raises `ConversationNotFound`, and then creates nothing."""
        await self._setup.journal.info(self.conversation_id)
        return await self._ref.ask(GetView())

    async def at(self, seq: int | None = None) -> ConversationState:
        """The state as it was at `seq`, or is at the end of the log. Opens nothing.

        Raises `ConversationNotFound`, `CorruptLog`, and `InvalidInput` where the log has no such
        seq.
        """
        head = (await self._setup.journal.info(self.conversation_id)).head
        if seq is None:
            seq = head
        if not 0 <= seq <= head:
            raise InvalidInput(
                f"seq {seq} of conversation {self.conversation_id} is not in 0..{head}"
            )
        state, _ = await load_state(self._setup.journal, self.conversation_id, seq)
        return state

    async def rejections(self) -> Sequence[Rejection]:
        """The events that admission refused, oldest first."""
        return await self._setup.journal.rejections(self.conversation_id)

    async def cancel(self, sent: Sent) -> bool:
        """Interrupt this chat message's turn, or withdraw it; False: it had ended already."""
        return await self._ref.ask(CancelTurn(sent.message_id, sent.turn_id))


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a turn ended, and the last that was said in it."""

    outcome: Literal["completed", "interrupted", "failed", "rolled_back", "withdrawn"]
    reply: str
    detail: str


class _TurnWatch:
    """Tells which events of a log belong to a chat message's turn, and when that has ended.

    The turn that answers a chat message is the one that its `UserMessageEvent` names; until there
    is one, what is known is where it waits. The first event that it looks at is the one that the
    chat message was acknowledged with; `ConversationDeleted` where the log has another there.
    """

    def __init__(self, conversation_id: str, sent: Sent) -> None:
        self.end: TurnEnd | None = None
        self.turn_id = sent.turn_id
        self._conversation_id = conversation_id
        self._message_id = sent.message_id
        self._is_first = True
        self._has_begun = False
        self._reply = ""

    def look_at(self, event: Event) -> bool:
        """Take in the next event; whether it belongs to the turn."""
        if self._is_first:
            if getattr(event, "message_id", None) != self._message_id:
                raise ConversationDeleted(self._conversation_id)
            self._is_first = False
        match event:
            case UserMessageEvent(message_id=self._message_id, turn_id=str(joined)):
                self.turn_id, self._has_begun = joined, True
            case MessageQueuedEvent(message_id=self._message_id, turn_id=str(waits)):
                # It waits; once more, where the turn that it had joined was rolled back.
                self.turn_id, self._has_begun, self._reply = waits, False, ""
            case MessageWithdrawnEvent(message_id=self._message_id):
                self.end = TurnEnd("withdrawn", "", "cancelled by its caller")
            case ForkedFromEvent(conversation_id=origin) if not self._has_begun:
                self.end = TurnEnd("withdrawn", "", f"it waits in conversation {origin}")
            case AgentMessageEvent(turn_id=self.turn_id, content=content):
                self._reply = content
            case TurnEndedEvent(turn_id=self.turn_id):
                self.end = TurnEnd(event.outcome, self._reply, event.detail or "")
            case _:
                return event.turn_id == self.turn_id
        return True


class _Follower(AsyncIterator[LoggedEvent | TextDelta]):
    """What `async for … in conversation.follow()` goes over; by one task."""

    def __init__(self, reader: EventReader) -> None:
        self._reader = reader

    async def __anext__(self) -> LoggedEvent | TextDelta:
        return await self._reader.next_item()


class _TurnFollower(AsyncIterator[LoggedEvent | TextDelta]):
    """What `async for … in turn` goes over; by one task, and once."""

    def __init__(self, conversation: Conversation, sent: Sent) -> None:
        self._conversation = conversation
        self._watch = _TurnWatch(conversation.conversation_id, sent)
        self._reader = conversation.follow_owner(sent.seq, deltas=True)

    async def __anext__(self) -> LoggedEvent | TextDelta:
        if self._watch.end is not None:
            raise StopAsyncIteration
        with self._conversation.waited_for():
            while True:
                try:
                    item = await self._reader.next_item()
                except StopAsyncIteration:
                    raise ConversationsClosed(self._conversation.conversation_id) from None
                if isinstance(item, TextDelta):
                    if item.turn_id == self._watch.turn_id:
                        return item
                elif self._watch.look_at(item.event):
                    return item


class Turn:
    """A chat message's turn: to await, to iterate, or to cancel. It outlives restarts."""

    def __init__(self, conversation: Conversation, sent: Sent) -> None:
        self._conversation = conversation
        self._sent = sent

    @property
    def message_id(self) -> str:
        return self._sent.message_id

    @property
    def turn_id(self) -> str:
        return self._sent.turn_id

    @property
    def seq(self) -> int:
        """Of the first event that carries the message id."""
        return self._sent.seq

    @property
    def is_duplicate(self) -> bool:
        """The log had this chat message already."""
        return self._sent.is_duplicate

    @property
    def overlapped(self) -> OnOverlap | None:
        """What became of the turn that ran when this was sent, if one did."""
        return self._sent.overlapped

    @property
    def waits_for(self) -> Literal["resume", "confirmation"] | None:
        """What somebody had to say, when this was sent, before it could get its turn."""
        return self._sent.waits_for

    async def reply(self) -> str:
        """What the agent said last in this turn, once the turn has completed.

        Raises `TurnNotCompleted`, which holds what was said by then, and what `end` raises.
        """
        end = await self.end()
        if end.outcome != "completed":
            raise TurnNotCompleted(
                self._conversation.conversation_id,
                self.turn_id,
                end.outcome,
                end.detail,
                end.reply,
            )
        return end.reply

    async def end(self) -> TurnEnd:
        """Wait until the turn has ended, however it did.

        When its owner fails and another can be started here, that one ends the turn; where another
        process has taken over, it is followed there. When there can be no owner, raises why
        (`Unavailable`, `CorruptLog`), and `ConversationsClosed` when they are left: the chat
        message is in the log, and its turn ends when the conversation is next opened. Raises
        `ConversationDeleted`, and `AskCycle` when awaited inside a turn that this one would have
        to wait for.
        """
        conversation = self._conversation
        ended = None
        if conversation.is_inside_a_turn:
            # What has ended is told, and what would wait for this turn is refused.
            ended = await self._find_end(conversation.read_back(self.seq))
        if ended is None:
            with conversation.waited_for():
                ended = await self._find_end(conversation.follow_owner(self.seq))
        if ended is None:
            raise ConversationsClosed(conversation.conversation_id)
        return ended

    async def _find_end(self, events: EventReader) -> TurnEnd | None:
        watch = _TurnWatch(self._conversation.conversation_id, self._sent)
        async for logged in events:
            watch.look_at(logged.event)
            if watch.end is not None:
                return watch.end
        return None

    def __aiter__(self) -> AsyncIterator[LoggedEvent | TextDelta]:
        """What belongs to this turn, as it comes: events of the log, and what is being said.

        From its chat message to its end, with the pieces of an answer (`TextDelta`) between them.
        Events come all, once, in order, also where the turn began long ago; pieces come live, from
        an owner in this process, and only as long as whoever iterates keeps up. Raises as `end`
        does.
        """
        return _TurnFollower(self._conversation, self._sent)

    async def cancel(self) -> bool:
        """Interrupt the turn, or withdraw its chat message while it waits.

        False: it had ended already. Durable when this returns; what was said is kept.
        """
        return await self._conversation.cancel(self._sent)
