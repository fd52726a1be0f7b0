"""What follows from commands about turns: sending, steps, pauses, confirmations, ends.

The part of `decide` in which people talk over their agents; pure like the rest of it. The tables
in `docs/turns.md` say what each way to overlap leads to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import takewhile
from typing import TypeAlias, assert_never

from turnkeeper.runtime import InvariantViolation

from ._owner import Decision, Owner, Stamp, StartTurn, StopTurn, TurnEffect
from ._text import storable
from .commands import (
    BeginStep,
    CancelTurn,
    Confirm,
    EndTurn,
    OnOverlap,
    Pause,
    Recover,
    RepairView,
    Resume,
    Send,
    Sent,
    Stream,
    TurnAppend,
)
from .errors import (
    ConversationNotFound,
    MessageIdConflict,
    NotConfirmable,
    QueueFull,
    StaleTurn,
    TurnInProgress,
    TurnPaused,
)
from .events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationEvent,
    CondensationRequestEvent,
    ConfirmationGivenEvent,
    ConversationErrorEvent,
    Event,
    ForkedFromEvent,
    LoggedEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    PausedEvent,
    ResumedEvent,
    RetractionEvent,
    StatusChangedEvent,
    SystemPromptEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    UserRejectEvent,
)
from .status import AgentExecutionStatus
from .turns import RunningTurn, content_digest

__all__ = [
    "TurnCommand",
    "check_running",
    "decide_fork",
    "decide_turn",
    "error_event",
    "first_prompt",
]

TurnCommand: TypeAlias = (
    Send
    | TurnAppend
    | Stream
    | BeginStep
    | EndTurn
    | CancelTurn
    | Pause
    | Resume
    | Confirm
    | RepairView
    | Recover
)


def decide_turn(owner: Owner, command: TurnCommand, stamp: Stamp) -> Decision:
    match command:
        case Send():
            return _send(owner, command, stamp)
        case TurnAppend():
            return _turn_append(owner, command)
        case Stream():
            check_running(owner, command.turn_id, command.epoch)
            return Decision(is_answer_over=command.is_first, streamed=command.text)
        case BeginStep():
            return _begin_step(owner, command, stamp)
        case EndTurn():
            return _end_turn(owner, command, stamp)
        case CancelTurn():
            return _cancel_turn(owner, command, stamp)
        case Pause():
            return _pause(owner, stamp)
        case Resume():
            return _resume(owner, stamp)
        case Confirm():
            return _confirm(owner, command, stamp)
        case RepairView():
            return _repair_view(owner, command, stamp)
        case Recover():
            return _recover(owner, command, stamp)
        case _:
            assert_never(command)


# --- chat messages -------------------------------------------------------------------------------


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
        if turns.is_paused:
            return _queue(owner, command, stamp)
        return _begin_with(owner, command, stamp, ())
    match command.on_overlap or owner.policy.on_overlap:
        case "reject":
            raise TurnInProgress(owner.conversation_id, running.turn_id)
        case "queue":
            return _queue(owner, command, stamp, overlapped="queue")
        case "steer":
            return _queue(owner, command, stamp, overlapped="steer", steers=running.turn_id)
        case "interrupt":
            return _interrupt_with(owner, running, command, stamp)
        case "rollback":
            why = f"rolled back by chat message {command.message_id}"
            before = _roll_back(owner, running, stamp, why)
            if before is None:
                return _interrupt_with(owner, running, command, stamp)
            return _begin_with(owner, command, stamp, before, overlapped="rollback")
        case unreachable:
            assert_never(unreachable)


def _interrupt_with(owner: Owner, running: RunningTurn, command: Send, stamp: Stamp) -> Decision:
    why = f"interrupted by chat message {command.message_id}"
    before = _interrupt(owner, running, stamp, why)
    return _begin_with(owner, command, stamp, before, overlapped="interrupt")


def _begin_with(
    owner: Owner,
    command: Send,
    stamp: Stamp,
    before: tuple[Event, ...],
    *,
    overlapped: OnOverlap | None = None,
) -> Decision:
    """Start a new message's own turn, after the events `before` that make room for it."""
    running = owner.state.turns.running
    before = (*first_prompt(owner, stamp), *before)
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
        reply=Sent(command.message_id, seq, turn_id, overlapped=overlapped),
        effects=(*stop, StartTurn(turn_id)),
        is_answer_over=True,
    )


def first_prompt(owner: Owner, stamp: Stamp) -> tuple[SystemPromptEvent, ...]:
    """A conversation begins with its system prompt, if the application has one."""
    prompt = owner.policy.system_prompt
    if owner.state.seq or prompt is None:
        return ()
    return (SystemPromptEvent(id=stamp.new_id(), timestamp=stamp.at, content=prompt),)


def _queue(
    owner: Owner,
    command: Send,
    stamp: Stamp,
    *,
    overlapped: OnOverlap | None = None,
    steers: str | None = None,
) -> Decision:
    turns = owner.state.turns
    if len(turns.queued) >= owner.policy.queued_messages_max:
        raise QueueFull(owner.conversation_id, owner.policy.queued_messages_max)
    turn_id = stamp.new_id()
    queued = MessageQueuedEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        turn_id=turn_id,
        message_id=command.message_id,
        content=command.content,
        images=command.images,
        steers=steers,
    )
    seq = owner.state.seq + 1
    sent = Sent(command.message_id, seq, turn_id, overlapped=overlapped, waits_for=turns.waits_for)
    return Decision(events=(queued,), reply=sent)


def _joining(waiting: MessageQueuedEvent, turn_id: str, stamp: Stamp) -> UserMessageEvent:
    """A chat message that has waited becomes one of this turn."""
    return UserMessageEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        turn_id=turn_id,
        content=waiting.content,
        images=waiting.images,
        message_id=waiting.message_id,
        queued_event_id=waiting.id,
    )


# --- steps ---------------------------------------------------------------------------------------


def _begin_step(owner: Owner, command: BeginStep, stamp: Stamp) -> Decision:
    """Between two steps of the running turn; the reply is whether the next one begins now."""
    running = check_running(owner, command.turn_id, command.epoch)
    turns = owner.state.turns
    if turns.waits_for is not None:
        return _suspend(owner, running, reply=False)
    if owner.state.admission.open_calls:
        return Decision(reply=True)
    # Not past one that steers a turn which has ended: it came before, and gets the next turn.
    first = takewhile(
        lambda waiting: waiting.steers in (None, running.turn_id), turns.queued.values()
    )
    joining = tuple(
        _joining(waiting, running.turn_id, stamp)
        for waiting in first
        if waiting.steers == running.turn_id
    )
    return Decision(events=joining, reply=True)


def _suspend(owner: Owner, running: RunningTurn, *, reply: object) -> Decision:
    """The turn is held: its agent ends its run here, or waits where it cannot be run again."""
    if not owner.policy.is_resumable:
        raise TurnPaused(owner.conversation_id, running.turn_id)
    return Decision(reply=reply, is_suspended=True)


def _turn_append(owner: Owner, command: TurnAppend) -> Decision:
    check_running(owner, command.turn_id, command.epoch)
    first = owner.state.seq + 1
    # What a response says with its calls is in the first of them.
    says = any(isinstance(event, AgentMessageEvent | ActionEvent) for event in command.events)
    return Decision(
        events=command.events,
        reply=tuple(LoggedEvent(first + n, event) for n, event in enumerate(command.events)),
        is_answer_over=says,
        is_suspended=command.suspends,
    )


def _repair_view(owner: Owner, command: RepairView, stamp: Stamp) -> Decision:
    """A model refused the history as malformed: forget what tears it, and ask for less of it."""
    check_running(owner, command.turn_id, command.epoch)
    shown = {event.id for event in owner.state.view}
    broken = tuple(event_id for event_id in command.broken if event_id in shown)
    events: tuple[Event, ...] = (
        error_event(stamp, command.turn_id, "MalformedHistory", command.detail),
    )
    if broken:
        forgotten = CondensationEvent(
            id=stamp.new_id(), timestamp=stamp.at, forgotten_event_ids=broken
        )
        events = (*events, forgotten)
    request = CondensationRequestEvent(
        id=stamp.new_id(), timestamp=stamp.at, turn_id=command.turn_id
    )
    return Decision(events=(*events, request), reply=bool(broken))


# --- pauses and confirmations --------------------------------------------------------------------


def _pause(owner: Owner, stamp: Stamp) -> Decision:
    """From here on no step begins; what is being said or done is not disturbed."""
    turns = owner.state.turns
    if not owner.state.seq:
        raise ConversationNotFound(owner.conversation_id)
    if turns.is_paused:
        return Decision(reply=False)
    turn_id = turns.running.turn_id if turns.running is not None else None
    paused = PausedEvent(id=stamp.new_id(), timestamp=stamp.at, turn_id=turn_id)
    return Decision(events=(paused,), reply=True)


def _resume(owner: Owner, stamp: Stamp) -> Decision:
    turns = owner.state.turns
    if not turns.is_paused:
        return Decision(reply=False)
    running = turns.running
    turn_id = running.turn_id if running is not None else None
    resumed = ResumedEvent(id=stamp.new_id(), timestamp=stamp.at, turn_id=turn_id)
    if running is None:
        return _then_next_queued(owner, (resumed,), stamp, (), reply=True)
    if turns.awaiting:
        return Decision(events=(resumed,), reply=True)
    return _go_on(owner, running, (resumed,), stamp, unstarted=turns.confirmed)


def _confirm(owner: Owner, command: Confirm, stamp: Stamp) -> Decision:
    """The calls that wait for it are confirmed and run, or are answered as rejected."""
    turns = owner.state.turns
    running = turns.running
    if running is None or not turns.awaiting:
        raise NotConfirmable(owner.conversation_id)
    if command.tool_call_ids not in (None, frozenset(turns.awaiting)):
        raise NotConfirmable(owner.conversation_id, turns.awaiting)
    given = ConfirmationGivenEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        turn_id=running.turn_id,
        confirmed=command.confirmed,
    )
    events: tuple[Event, ...] = (given,)
    # Somebody may have appended the result of one of them by hand.
    unanswered = tuple(c for c in turns.awaiting if c in owner.state.admission.open_calls)
    if not command.confirmed:
        why = command.reason or "the user rejected this call"
        events = (given, *_rejected(unanswered, running.turn_id, stamp, why))
    if turns.is_paused:
        return Decision(events=events, reply=True)
    unstarted = unanswered if command.confirmed else ()
    return _go_on(owner, running, events, stamp, unstarted=unstarted)


def _go_on(
    owner: Owner,
    running: RunningTurn,
    events: tuple[Event, ...],
    stamp: Stamp,
    *,
    unstarted: tuple[str, ...],
) -> Decision:
    """After these events nothing holds the running turn: its agent goes on, if it can."""
    if owner.agent_of == running.turn_id:
        return Decision(events=events, reply=True)
    if owner.policy.is_resumable:
        start = StartTurn(running.turn_id, unstarted)
        return Decision(events=events, reply=True, effects=(start,))
    why = "its agent's process stopped, and it cannot be run again on a turn that has begun"
    answered = [event.tool_call_id for event in events if isinstance(event, UserRejectEvent)]
    ended = (*events, *_interrupt(owner, running, stamp, why, answered=answered))
    return _then_next_queued(owner, ended, stamp, (), reply=True)


# --- ends ----------------------------------------------------------------------------------------


def _end_turn(owner: Owner, command: EndTurn, stamp: Stamp) -> Decision:
    running = check_running(owner, command.turn_id, command.epoch)
    if owner.state.turns.waits_for is not None:
        return _suspend(owner, running, reply=False)
    why = "the agent ended its turn without a result for this call"
    events = _close(owner, running, stamp, why)
    if command.error is not None:
        events = (*events, error_event(stamp, running.turn_id, command.error, command.detail))
    if command.is_stuck:
        stuck = StatusChangedEvent(
            id=stamp.new_id(),
            timestamp=stamp.at,
            turn_id=running.turn_id,
            status=AgentExecutionStatus.STUCK,
        )
        events = (*events, stuck)
    ended = TurnEndedEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        turn_id=running.turn_id,
        outcome="completed" if command.error is None else "failed",
        detail=None if command.error is None else f"{command.error}: {command.detail}",
    )
    return _then_next_queued(owner, (*events, ended), stamp, (), reply=True)


def _cancel_turn(owner: Owner, command: CancelTurn, stamp: Stamp) -> Decision:
    turns = owner.state.turns
    running = turns.running
    if running is not None and (
        running.turn_id == command.turn_id
        or any(message.message_id == command.message_id for message in running.messages)
    ):
        events = _interrupt(owner, running, stamp, "cancelled by its caller")
        return _then_next_queued(owner, events, stamp, (StopTurn(running.turn_id),), reply=True)
    if command.message_id in turns.queued:
        withdrawn = MessageWithdrawnEvent(
            id=stamp.new_id(),
            timestamp=stamp.at,
            turn_id=command.turn_id,
            message_id=command.message_id,
        )
        return Decision(events=(withdrawn,), reply=True)
    return Decision(reply=False)


def _recover(owner: Owner, command: Recover, stamp: Stamp) -> Decision:
    events: tuple[Event, ...] = ()
    if command.enforced_away:
        # The view of a log from elsewhere is made a fold of the log again, before anything else.
        forgotten = CondensationEvent(
            id=stamp.new_id(), timestamp=stamp.at, forgotten_event_ids=command.enforced_away
        )
        events = (forgotten,)
    turns = owner.state.turns
    running = turns.running
    if turns.waits_for is not None:
        return Decision(events=events)
    if running is None:
        return _then_next_queued(owner, events, stamp, ())
    if owner.policy.unfinished == "resume" and owner.policy.is_resumable:
        return Decision(events=events, effects=(StartTurn(running.turn_id),))
    interrupted = _interrupt(owner, running, stamp, "its owner stopped")
    return _then_next_queued(owner, (*events, *interrupted), stamp, ())


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


def _interrupt(
    owner: Owner,
    running: RunningTurn,
    stamp: Stamp,
    why: str,
    *,
    answered: Collection[str] = (),
) -> tuple[Event, ...]:
    """End the running turn here and now: open calls answered, what was said kept."""
    ended = TurnEndedEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        turn_id=running.turn_id,
        outcome="interrupted",
        detail=why,
    )
    return (*_close(owner, running, stamp, why, answered=answered), ended)


def _roll_back(
    owner: Owner, running: RunningTurn, stamp: Stamp, why: str
) -> tuple[Event, ...] | None:
    """End the running turn and take it out of the view; None where it is too late for that.

    The chat messages that had joined it wait again, each for a turn of its own.
    """
    in_view = owner.state.running_turn_events()
    if in_view is None:
        return None
    closing = _close(owner, running, stamp, why)
    waiting_again = tuple(
        MessageQueuedEvent(
            id=stamp.new_id(),
            timestamp=stamp.at,
            turn_id=stamp.new_id(),
            message_id=message.message_id,
            content=message.content,
            images=message.images,
            queued_again=True,
        )
        for message in running.messages[1:]
        if message.message_id is not None
    )
    retracted = RetractionEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        turn_id=running.turn_id,
        retracted_event_ids=(*in_view, *(event.id for event in closing)),
    )
    ended = TurnEndedEvent(
        id=stamp.new_id(),
        timestamp=stamp.at,
        turn_id=running.turn_id,
        outcome="rolled_back",
        detail=why,
    )
    events = (*closing, *waiting_again, retracted, ended)
    # What was appended by hand, around the turn, may hold on to a part of it.
    return events if owner.state.admission.check(events) is None else None


def _close(
    owner: Owner,
    running: RunningTurn,
    stamp: Stamp,
    why: str,
    *,
    answered: Collection[str] = (),
) -> tuple[Event, ...]:
    """One observation for each open call, then the unfinished answer, marked as such.

    `answered`: the calls that what comes before this, in the same command, has answered.
    """
    turns = owner.state.turns
    unstarted = {*turns.awaiting, *turns.confirmed}
    answers: list[Event] = []
    for tool_call_id, action in owner.state.admission.open_calls.items():
        if tool_call_id in answered:
            continue
        if tool_call_id in unstarted:
            answers += _rejected((tool_call_id,), action.turn_id, stamp, f"not run: {why}")
            continue
        answer = AgentErrorEvent(
            id=stamp.new_id(),
            timestamp=stamp.at,
            turn_id=action.turn_id,
            tool_call_id=tool_call_id,
            content=f"no result: {why}; the call had started and may have happened",
            may_have_happened=True,
        )
        answers.append(answer)
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


def _rejected(
    tool_call_ids: Iterable[str], turn_id: str | None, stamp: Stamp, why: str
) -> tuple[UserRejectEvent, ...]:
    return tuple(
        UserRejectEvent(
            id=stamp.new_id(),
            timestamp=stamp.at,
            turn_id=turn_id,
            tool_call_id=tool_call_id,
            content=why,
        )
        for tool_call_id in tool_call_ids
    )


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
    message = _joining(waiting, waiting.turn_id, stamp)
    return Decision(
        events=(*events, started, message),
        reply=reply,
        effects=(*effects, StartTurn(waiting.turn_id)),
        is_answer_over=True,
    )


def error_event(
    stamp: Stamp, turn_id: str | None, error: str, detail: str
) -> ConversationErrorEvent:
    return ConversationErrorEvent(
        id=stamp.new_id(), timestamp=stamp.at, turn_id=turn_id, error=error, detail=detail
    )


def check_running(owner: Owner, turn_id: str, epoch: int) -> RunningTurn:
    """The running turn, if it is this one, of this owner; else `StaleTurn`."""
    running = owner.state.turns.running
    if running is None or running.turn_id != turn_id or epoch != owner.epoch:
        raise StaleTurn(owner.conversation_id, turn_id)
    return running
