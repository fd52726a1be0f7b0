"""What follows from a command: the second of the actor's five moves, as a pure function.

`decide(owner, command, stamp)` reads the working state and returns a `Decision`: events, a reply,
effects. It changes nothing, draws no id, reads no clock. `Owner.apply` folds a decision into the
working state. A command is all or nothing: where `decide` raises, nothing was folded.

Every list of events that leaves here has passed admission in its order, so folding cannot fail.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import assert_never

from turnkeeper.runtime import InvariantViolation, format_id

from ._text import storable
from .admission import AdmissionRefused, Appended, Duplicate
from .commands import (
    Append,
    CancelTurn,
    Command,
    DropOverdue,
    EndTurn,
    GetView,
    OnOverlap,
    Propose,
    ProposeFailed,
    Query,
    Recover,
    Retract,
    Send,
    Sent,
    Stream,
    TurnAppend,
)
from .condensers import check_proposal
from .errors import (
    EventIdConflict,
    MessageIdConflict,
    NotAppendable,
    NothingToRetract,
    QueueFull,
    StaleTurn,
    TurnInProgress,
)
from .events import (
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationEvent,
    CondensationRequestEvent,
    ConversationErrorEvent,
    Event,
    ForkedFromEvent,
    LLMConvertibleEvent,
    LoggedEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    RetractionEvent,
    SystemPromptEvent,
    TaskListUpdatedEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UnknownEvent,
    UserMessageEvent,
)
from .state import ConversationState
from .turns import KnownMessage, RunningTurn, content_digest

__all__ = [
    "Decision",
    "Owner",
    "Policy",
    "Stamp",
    "StartTurn",
    "StopTurn",
    "TurnEffect",
    "decide",
    "decide_fork",
]

RECENT_EVENTS_MAX = 256

# What a caller may put into a log by hand. Turns, retractions and forks are the owner's to write.
_APPENDABLE = (
    LLMConvertibleEvent,
    CondensationRequestEvent,
    TaskListUpdatedEvent,
    ConversationErrorEvent,
    UnknownEvent,
)


@dataclass(slots=True)
class Stamp:
    """What comes with a command: its time, its ids, and what the log knows beyond our memory."""

    at: datetime
    next_id: int
    """The first of a block of ids that is this command's alone."""
    known_message: KnownMessage | None = None
    known_event: LoggedEvent | None = None

    def new_id(self) -> str:
        taken, self.next_id = self.next_id, self.next_id + 1
        return format_id(taken)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the application chose for a conversation."""

    on_overlap: OnOverlap = "queue"
    queued_messages_max: int = 256
    system_prompt: str | None = None


@dataclass(frozen=True, slots=True)
class StartTurn:
    """Run the agent for this turn."""

    turn_id: str


@dataclass(frozen=True, slots=True)
class StopTurn:
    """Cancel the agent of this turn, and do not wait for it."""

    turn_id: str


TurnEffect = StartTurn | StopTurn


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from one command."""

    events: tuple[Event, ...] = ()
    reply: object = None
    effects: tuple[TurnEffect, ...] = ()
    is_answer_over: bool = False
    """The running turn's answer is in the log, or begins anew: what was streamed of it goes."""
    streamed: str = ""
    """The next piece of the running turn's answer."""


@dataclass(slots=True)
class Owner:
    """The working state of the newest owner. Only `decide` and the owner's loop see it.

    Invariant: `state` is the fold of the log and of what this batch has decided; when the commit
    fails, it is thrown away with the actor.
    """

    conversation_id: str
    epoch: int
    policy: Policy
    state: ConversationState = field(default_factory=ConversationState)
    streamed: list[str] = field(default_factory=list)
    """What the running turn's model has said and not finished; in memory only."""
    recent: dict[str, LoggedEvent] = field(default_factory=dict)
    """The newest `RECENT_EVENTS_MAX` events by id; older ones are looked up in the journal."""

    def apply(self, decision: Decision) -> None:
        """Fold what was decided."""
        for event in decision.events:
            self.state.fold(event)
            self.remember(event, self.state.seq)
        if decision.is_answer_over:
            self.streamed.clear()
        if decision.streamed:
            self.streamed.append(decision.streamed)

    def remember(self, event: Event, seq: int) -> None:
        """Keep an event among the recent ones."""
        self.recent[event.id] = LoggedEvent(seq, event)
        if len(self.recent) > RECENT_EVENTS_MAX:
            del self.recent[next(iter(self.recent))]


def decide(owner: Owner, command: Command | Query, stamp: Stamp) -> Decision:
    """What follows from this command in this state. Raises a `Refused` where nothing does."""
    match command:
        case Send():
            decision = _send(owner, command, stamp)
        case Append():
            decision = _append(owner, command, stamp)
        case Retract():
            decision = _retract(owner, command, stamp)
        case TurnAppend():
            decision = _turn_append(owner, command)
        case Stream():
            _check_running(owner, command.turn_id, command.epoch)
            decision = Decision(is_answer_over=command.is_first, streamed=command.text)
        case EndTurn():
            decision = _end_turn(owner, command, stamp)
        case CancelTurn():
            decision = _cancel_turn(owner, command, stamp)
        case Propose():
            decision = _propose(owner, command, stamp)
        case ProposeFailed():
            error = _error(stamp, None, command.error, command.detail)
            decision = Decision(events=(error,) if command.epoch == owner.epoch else ())
        case Recover():
            decision = _recover(owner, command, stamp)
        case GetView():
            decision = Decision(reply=owner.state.view)
        case DropOverdue():
            decision = Decision()  # what is parked is the loop's to answer
        case _:
            assert_never(command)
    violation = owner.state.admission.check(decision.events)
    if violation is not None:
        raise AdmissionRefused(owner.conversation_id, violation)
    return decision


def _send(owner: Owner, command: Send, stamp: Stamp) -> Decision:
    turns = owner.state.turns
    # A known message comes before overlap and limits: the same content is the same message,
    # whatever else holds now.
    known = turns.find(command.message_id) or stamp.known_message
    if known is not None:
        if known.digest != content_digest(command.content, command.images):
            raise MessageIdConflict(owner.conversation_id, command.message_id, known.seq)
        return Decision(reply=Sent(command.message_id, known.seq, known.turn_id, is_duplicate=True))
    running = turns.running
    if running is None:
        return _begin_with(owner, command, stamp, ())
    match command.on_overlap or owner.policy.on_overlap:
        case "reject":
            raise TurnInProgress(owner.conversation_id, running.turn_id)
        case "queue":
            return _queue(owner, command, stamp)
        case "interrupt":
            why = f"interrupted by chat message {command.message_id}"
            return _begin_with(owner, command, stamp, _interrupt(owner, running, stamp, why))
        case unreachable:
            assert_never(unreachable)


def _begin_with(owner: Owner, command: Send, stamp: Stamp, before: tuple[Event, ...]) -> Decision:
    """Start a new message's own turn, after the events `before` that make room for it."""
    running = owner.state.turns.running
    before = (*_prompt(owner, stamp), *before)
    turn_id = stamp.new_id()
    started = TurnStartedEvent(id=stamp.new_id(), timestamp=stamp.at, turn_id=turn_id)
    message = UserMessageEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        turn_id=turn_id,
        content=command.content,
        images=command.images,
        message_id=command.message_id,
    )
    seq = owner.state.seq + len(before) + 2
    stop = (StopTurn(running.turn_id),) if running is not None else ()
    return Decision(
        events=(*before, started, message),
        reply=Sent(command.message_id, seq, turn_id),
        effects=(*stop, StartTurn(turn_id)),
        is_answer_over=True,
    )


def _prompt(owner: Owner, stamp: Stamp) -> tuple[SystemPromptEvent, ...]:
    """A conversation begins with its system prompt, if the application has one."""
    prompt = owner.policy.system_prompt
    if owner.state.seq or prompt is None:
        return ()
    return (SystemPromptEvent(id=stamp.new_id(), timestamp=stamp.at, content=prompt),)


def _queue(owner: Owner, command: Send, stamp: Stamp) -> Decision:
    if len(owner.state.turns.queued) >= owner.policy.queued_messages_max:
        raise QueueFull(owner.conversation_id, owner.policy.queued_messages_max)
    turn_id = stamp.new_id()
    queued = MessageQueuedEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        turn_id=turn_id,
        message_id=command.message_id,
        content=command.content,
        images=command.images,
    )
    return Decision(events=(queued,), reply=Sent(command.message_id, owner.state.seq + 1, turn_id))


def _append(owner: Owner, command: Append, stamp: Stamp) -> Decision:
    event = command.event
    known = owner.recent.get(event.id) or stamp.known_event
    if known is not None:
        if known.event != event:
            raise EventIdConflict(owner.conversation_id, {event.id: known.seq})
        return Decision(reply=Duplicate(known.seq))
    if not isinstance(event, _APPENDABLE):
        raise NotAppendable(owner.conversation_id, type(event).__name__)
    if isinstance(event, UserMessageEvent) and event.queued_event_id is not None:
        raise NotAppendable(owner.conversation_id, "queued UserMessageEvent")
    if isinstance(event, UserMessageEvent) and event.message_id is not None:
        message = owner.state.turns.find(event.message_id) or stamp.known_message
        if message is not None:
            raise MessageIdConflict(owner.conversation_id, event.message_id, message.seq)
    before = () if isinstance(event, SystemPromptEvent) else _prompt(owner, stamp)
    reply = Appended(owner.state.seq + len(before) + 1)
    return Decision(events=(*before, event), reply=reply)


def _retract(owner: Owner, command: Retract, stamp: Stamp) -> Decision:
    event_ids = command.event_ids
    if command.turn_id is not None:
        event_ids = tuple(e.id for e in owner.state.view if e.turn_id == command.turn_id)
    if not event_ids:
        raise NothingToRetract(owner.conversation_id, command.turn_id)
    retraction = RetractionEvent(
        id=stamp.new_id(), timestamp=stamp.at, retracted_event_ids=event_ids
    )
    return Decision(events=(retraction,), reply=Appended(owner.state.seq + 1))


def _turn_append(owner: Owner, command: TurnAppend) -> Decision:
    _check_running(owner, command.turn_id, command.epoch)
    first = owner.state.seq + 1
    says = any(isinstance(event, AgentMessageEvent) for event in command.events)
    return Decision(
        events=command.events,
        reply=tuple(LoggedEvent(first + n, event) for n, event in enumerate(command.events)),
        is_answer_over=says,
    )


def _end_turn(owner: Owner, command: EndTurn, stamp: Stamp) -> Decision:
    running = _check_running(owner, command.turn_id, command.epoch)
    why = "the agent ended its turn without a result for this call"
    events = _close(owner, running, stamp, why)
    if command.error is not None:
        events = (*events, _error(stamp, running.turn_id, command.error, command.detail))
    ended = TurnEndedEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        turn_id=running.turn_id,
        outcome="completed" if command.error is None else "failed",
        detail=None if command.error is None else f"{command.error}: {command.detail}",
    )
    return _then_next_queued(owner, (*events, ended), stamp, ())


def _cancel_turn(owner: Owner, command: CancelTurn, stamp: Stamp) -> Decision:
    running = owner.state.turns.running
    if running is not None and running.turn_id == command.turn_id:
        events = _interrupt(owner, running, stamp, "cancelled by its caller")
        return _then_next_queued(owner, events, stamp, (StopTurn(running.turn_id),), reply=True)
    if command.message_id in owner.state.turns.queued:
        withdrawn = MessageWithdrawnEvent(
            id=stamp.new_id(),
            timestamp=stamp.at,
            turn_id=command.turn_id,
            message_id=command.message_id,
        )
        return Decision(events=(withdrawn,), reply=True)
    return Decision(reply=False)


def _propose(owner: Owner, command: Propose, stamp: Stamp) -> Decision:
    if command.proposal is None or command.epoch != owner.epoch:
        return Decision(reply=False)
    plan = check_proposal(command.proposal, command.shown, owner.state.view)
    if isinstance(plan, str):
        return Decision(reply=False)
    condensation = CondensationEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        forgotten_event_ids=plan.forgotten_event_ids,
        summary=plan.summary,
        summary_offset=plan.summary_offset,
    )
    return Decision(events=(condensation,), reply=True)


def _recover(owner: Owner, command: Recover, stamp: Stamp) -> Decision:
    events: tuple[Event, ...] = ()
    if command.enforced_away:
        # The view of a log from elsewhere is made a fold of the log again, before anything else.
        forgotten = CondensationEvent(
            id=stamp.new_id(), timestamp=stamp.at, forgotten_event_ids=command.enforced_away
        )
        events = (forgotten,)
    running = owner.state.turns.running
    if running is not None:
        why = "its owner stopped"
        events = (*events, *_interrupt(owner, running, stamp, why))
    return _then_next_queued(owner, events, stamp, ())


def decide_fork(owner: Owner, seq: int, stamp: Stamp) -> tuple[Event, ...]:
    """How a fork begins, after the log of the conversation `owner` up to `seq`, which is its state.

    What runs there does not run here; what waits there, waits there.
    """
    forked = ForkedFromEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        conversation_id=owner.conversation_id,
        seq=seq,
    )
    running = owner.state.turns.running
    if running is None:
        return (forked,)
    why = "the conversation was forked here, and this did not run in the fork"
    return (forked, *_interrupt(owner, running, stamp, why))


def _interrupt(owner: Owner, running: RunningTurn, stamp: Stamp, why: str) -> tuple[Event, ...]:
    """End the running turn here and now: open calls answered, what was said kept."""
    ended = TurnEndedEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        turn_id=running.turn_id,
        outcome="interrupted",
        detail=why,
    )
    return (*_close(owner, running, stamp, why), ended)


def _close(owner: Owner, running: RunningTurn, stamp: Stamp, why: str) -> tuple[Event, ...]:
    """One observation for each open call, then the unfinished answer, marked as such."""
    answers: list[Event] = [
        AgentErrorEvent(
            id=stamp.new_id(),
            timestamp=stamp.at,
            turn_id=action.turn_id,
            tool_call_id=tool_call_id,
            content=f"no result: {why}; the call had started and may have happened",
            may_have_happened=True,
        )
        for tool_call_id, action in owner.state.admission.open_calls.items()
    ]
    said = storable("".join(owner.streamed))
    if said:
        partial = AgentMessageEvent(
            id=stamp.new_id(),
            timestamp=stamp.at,
            turn_id=running.turn_id,
            content=said,
            interrupted=True,
        )
        answers.append(partial)
    return tuple(answers)


def _then_next_queued(
    owner: Owner,
    events: tuple[Event, ...],
    stamp: Stamp,
    effects: Iterable[TurnEffect],
    *,
    reply: object = None,
) -> Decision:
    """After these events no turn runs: the chat message that waits longest gets its turn."""
    waiting = next(iter(owner.state.turns.queued.values()), None)
    if waiting is None:
        return Decision(events=events, reply=reply, effects=tuple(effects), is_answer_over=True)
    if waiting.turn_id is None:
        raise InvariantViolation(f"queued chat message {waiting.message_id} has no turn id")
    started = TurnStartedEvent(id=stamp.new_id(), timestamp=stamp.at, turn_id=waiting.turn_id)
    message = UserMessageEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        turn_id=waiting.turn_id,
        content=waiting.content,
        images=waiting.images,
        message_id=waiting.message_id,
        queued_event_id=waiting.id,
    )
    return Decision(
        events=(*events, started, message),
        reply=reply,
        effects=(*effects, StartTurn(waiting.turn_id)),
        is_answer_over=True,
    )


def _error(stamp: Stamp, turn_id: str | None, error: str, detail: str) -> ConversationErrorEvent:
    return ConversationErrorEvent(
        id=stamp.new_id(), timestamp=stamp.at, turn_id=turn_id, error=error, detail=detail
    )


def _check_running(owner: Owner, turn_id: str, epoch: int) -> RunningTurn:
    running = owner.state.turns.running
    if running is None or running.turn_id != turn_id or epoch != owner.epoch:
        raise StaleTurn(owner.conversation_id, turn_id)
    return running
