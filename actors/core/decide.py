"""The decision on a command: the second of the actor's five moves, as a pure function.

`decide(working, command, stamp)` reads the working state and returns a `Decision`: events, a reply,
effects. It changes nothing, draws no id, reads no clock. `WorkingState.apply` folds a decision into
the working state. A command is all or nothing: if `decide` raises, nothing was folded.

Every list of events that leaves here has passed admission in its order, so folding cannot fail.
The decisions on commands about turns are in `turn_rules.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from ..errors import (
    ConversationNotFound,
    EventIdConflict,
    InvalidInput,
    LabelTooLong,
    MessageIdConflict,
    NotAppendable,
    NothingToRetract,
    NotRetractable,
    NotThisLog,
    NotWhileTurnRuns,
    NotYours,
    TooManyLabels,
    TurnInProgress,
)
from ..events import (
    RESULT_CLASSES,
    ActionEvent,
    AgentMessageEvent,
    CondensationEvent,
    CondensationRequestEvent,
    ConversationChangedEvent,
    ConversationErrorEvent,
    Event,
    LLMConvertibleEvent,
    RetractionEvent,
    SystemPromptEvent,
    TaskListUpdatedEvent,
    UnknownEvent,
    UserMessageEvent,
)
from ..values.frozen import FrozenObject, check_json
from .admission import AdmissionRefused, Appended, Duplicate, appended
from .commands import (
    Append,
    AppendAll,
    Change,
    Command,
    Delete,
    DropOverdue,
    Expected,
    FromOutside,
    GetView,
    Propose,
    ProposeFailed,
    ProposeLate,
    Query,
    Retract,
    Undo,
)
from .condensation import CondensationPlan, check_proposal, make_room
from .listing import time_us
from .state import Folded
from .turn_rules import (
    TurnCommand,
    add_error,
    add_owner,
    begin_log,
    decide_turn,
    is_chat_message,
)
from .view import SUMMARY_SUFFIX, View
from .working_state import Decision, Draft, Stamp, WorkingState

__all__ = ["decide"]

# The events that a caller may append by hand. Only the owner writes turns, retractions and forks.
_APPENDABLE = (
    LLMConvertibleEvent,
    CondensationRequestEvent,
    TaskListUpdatedEvent,
    ConversationErrorEvent,
    UnknownEvent,
)
_APPENDABLE_TOGETHER = (*_APPENDABLE, RetractionEvent)


def decide(working: WorkingState, command: Command | Query, stamp: Stamp) -> Decision:
    """Return the decision on this command in this state. Raises a `Refused` if it is refused."""
    if isinstance(command, FromOutside) and command.expected is not None:
        _check_expected(working, command.expected, stamp)
    # The commonest come first: a class that does not match costs as much as a call.
    if isinstance(command, Append):
        decision = _append(working, command, stamp)
    elif isinstance(command, TurnCommand):
        decision = decide_turn(working, command, stamp)
    else:
        decision = _decide_other(working, command, stamp)
    if decision.events:
        _check_each(working, decision.events)
        violation = working.state.admission.check(decision.events)
        if violation is not None:
            raise AdmissionRefused(working.conversation_id, violation)
    return decision


def _decide_other(
    working: WorkingState,
    command: AppendAll
    | Change
    | Retract
    | Undo
    | Propose
    | ProposeFailed
    | ProposeLate
    | Delete
    | DropOverdue
    | Query,
    stamp: Stamp,
) -> Decision:
    match command:
        case AppendAll():
            return _append_all(working, command, stamp)
        case Change():
            return _change(working, command, stamp)
        case Retract():
            return _retract(working, command, stamp)
        case Undo():
            return _undo(working, command, stamp)
        case Propose():
            return _propose(working, command, stamp)
        case ProposeFailed():
            draft = Draft(working, stamp)
            if command.epoch == working.epoch:
                add_error(draft, None, command.error, command.detail)
            return draft.decision()
        case GetView():
            return Decision(reply=working.state.view)
        case Delete() | DropOverdue() | ProposeLate():
            return Decision()  # the actor carries these out itself
        case _:
            assert_never(command)


def _check_expected(working: WorkingState, expected: Expected, stamp: Stamp) -> None:
    """Raise unless this is the conversation that the command is meant for."""
    name, state = working.conversation_id, working.state
    if not state.seq:
        if expected.begins_nothing:
            raise ConversationNotFound(name)
        return
    # Checked first, so that nothing about another user's conversation is revealed.
    if expected.owner is not None and expected.owner != state.details.owner:
        raise NotYours(name)
    if expected.seq is None:
        return
    if expected.event_id is None:
        is_there = expected.seq <= state.seq
    else:
        known = working.find_event(expected.event_id, stamp)
        is_there = (
            known is not None
            and known.seq == expected.seq
            and expected.at_us in {None, time_us(known.event)}
        )
    if not is_there:
        raise NotThisLog(name, expected.seq)


def _check_each(working: WorkingState, events: Sequence[Event]) -> None:
    """Raise `InvalidInput` if an event's arguments are no JSON, or if its id is a summary's."""
    for event in events:
        if event.kind == "action" and isinstance(event, ActionEvent):
            limits = working.state.limits
            depth_max, digits_max = limits.arguments_depth_max, limits.arguments_digits_max
            check_json(event.arguments, depth_max=depth_max, digits_max=digits_max)
        if event.id.endswith(SUMMARY_SUFFIX):
            _check_is_no_summary(working, event.id)


def _check_is_no_summary(working: WorkingState, event_id: str) -> None:
    # With two events under one id in the view, no proposal could forget either of them.
    if any(shown.id == event_id for shown in working.state.view):
        raise InvalidInput(
            f"append refused on conversation {working.conversation_id}: {event_id} is the id of a "
            "summary; nothing was written; give the event an id of its own",
            argument="an event id",
            rule="an event must not have the id of a summary",
        )


def _append(working: WorkingState, command: Append, stamp: Stamp) -> Decision:
    event, event_id = command.event, command.event.id
    known = working.find_event(event_id, stamp)
    if known is not None:
        if known.event != event:
            raise EventIdConflict(working.conversation_id, {event_id: known.seq})
        return Decision(reply=Duplicate(known.seq))
    if not isinstance(event, _APPENDABLE):
        raise NotAppendable(working.conversation_id, type(event).__name__)
    if event.kind == "user_message" and isinstance(event, UserMessageEvent):
        if event.queued_event_id is not None:
            raise NotAppendable(working.conversation_id, "queued UserMessageEvent")
        if event.replaces is not None:
            raise NotAppendable(working.conversation_id, "UserMessageEvent that replaces another")
        if event.message_id is not None:
            message = working.state.turns.find(event.message_id) or stamp.known_message
            if message is not None:
                raise MessageIdConflict(working.conversation_id, event.message_id, message.seq)
            running = working.state.turns.running
            if event.turn_id not in {None, None if running is None else running.turn_id}:
                # Its sender would wait for the end of a turn that never ends, or ended before.
                raise NotAppendable(
                    working.conversation_id, "UserMessageEvent of a turn that does not run"
                )
    _check_leaves_turn_alone(working, (event,))
    if seq := working.state.seq:  # the log has begun, so no first events go with this one
        return Decision((event,), appended(seq + 1), (command.written,))
    draft = Draft(working, stamp)
    _begin_log_before(draft, event, command.expected)
    draft.extend((event,), (command.written,))
    return draft.decision(Appended(draft.seq))


def _append_all(working: WorkingState, command: AppendAll, stamp: Stamp) -> Decision:
    events = command.events
    if not events:
        return Decision(reply=Appended(working.state.seq))
    known = [logged for event in events if (logged := working.find_event(event.id, stamp))]
    if known:
        # It is a duplicate only if the log has all of the events, in this order: some may have been
        # appended without the others, or together with other events.
        in_order = sorted(known, key=lambda logged: logged.seq)
        if [logged.event for logged in in_order] != list(events):
            seqs = {logged.event.id: logged.seq for logged in in_order}
            raise EventIdConflict(working.conversation_id, seqs)
        return Decision(reply=Duplicate(in_order[-1].seq))
    for event in events:
        is_sent = (
            event.kind == "user_message"
            and isinstance(event, UserMessageEvent)
            and (event.message_id, event.queued_event_id, event.replaces) != (None, None, None)
        )
        if is_sent or not isinstance(event, _APPENDABLE_TOGETHER):
            raise NotAppendable(working.conversation_id, type(event).__name__)
    _check_leaves_turn_alone(working, events)
    if seq := working.state.seq:  # as in `_append`
        return Decision(events, appended(seq + len(events)), command.written)
    draft = Draft(working, stamp)
    _begin_log_before(draft, events[0], command.expected)
    draft.extend(events, command.written)
    return draft.decision(Appended(draft.seq))


def _begin_log_before(draft: Draft, event: Event, expected: Expected | None) -> None:
    """Begin the log if it is empty; without a system prompt if `event` is one."""
    if isinstance(event, SystemPromptEvent):
        add_owner(draft, expected)
    else:
        begin_log(draft, expected)


def _change(working: WorkingState, command: Change, stamp: Stamp) -> Decision:
    """Write a change of the title, labels or user; the model and the turns notice nothing."""
    if not working.state.seq:
        raise ConversationNotFound(working.conversation_id)
    event = ConversationChangedEvent(
        id=command.change_id or stamp.new_id(),
        timestamp=stamp.at,
        title=command.title,
        labels=command.labels,
        owner=command.owner,
    )
    known = working.find_event(event.id, stamp)
    if known is not None:
        if known.event != event.model_copy(update={"timestamp": known.event.timestamp}):
            raise EventIdConflict(working.conversation_id, {event.id: known.seq})
        return Decision(reply=Duplicate(known.seq))
    _check_labels(working, event)
    return Decision(events=(event,), reply=Appended(working.state.seq + 1))


def _check_labels(working: WorkingState, event: ConversationChangedEvent) -> None:
    """Raise `LabelTooLong` or `TooManyLabels` if the labels go beyond a limit."""
    limits = working.state.limits
    for name, value in event.labels.items():
        for text, length_max in (
            (name, limits.label_name_length_max),
            (value, limits.label_value_length_max),
        ):
            if isinstance(text, str) and len(text) > length_max:
                raise LabelTooLong(working.conversation_id, len(text), length_max)
    if len(working.state.details.fold(event).labels) > limits.labels_max:
        raise TooManyLabels(working.conversation_id, limits.labels_max)


def _retract(working: WorkingState, command: Retract, stamp: Stamp) -> Decision:
    event_ids = command.event_ids
    if command.turn_id is not None:
        event_ids = tuple(e.id for e in working.state.view if e.turn_id == command.turn_id)
    if not event_ids:
        raise NothingToRetract(working.conversation_id, command.turn_id)
    draft = Draft(working, stamp)
    draft.add(RetractionEvent, retracted_event_ids=event_ids)
    _check_leaves_turn_alone(working, draft.events)
    return draft.decision(Appended(draft.seq))


def _undo(working: WorkingState, command: Undo, stamp: Stamp) -> Decision:
    state = working.state
    if not state.seq:
        raise ConversationNotFound(working.conversation_id)
    running = state.turns.running
    if running is not None:
        raise TurnInProgress(working.conversation_id, running.turn_id, "undo")
    turn_ids = [event.turn_id for event in state.view if is_chat_message(event)]
    turn_id = turn_ids[-1] if turn_ids else None
    if turn_id is None or command.turn_id not in {None, *turn_ids}:
        raise NothingToRetract(working.conversation_id, command.turn_id)
    if command.turn_id not in {None, turn_id}:
        raise NotRetractable(working.conversation_id, command.turn_id, "not_newest")
    of_turn = {
        at: event
        for at, event in enumerate(state.view)
        if event.turn_id == turn_id and not isinstance(event, SystemPromptEvent)
    }
    if state.is_condensed_from(min(of_turn)):
        raise NotRetractable(working.conversation_id, turn_id, "condensed")
    draft = Draft(working, stamp)
    draft.add(RetractionEvent, retracted_event_ids=tuple(event.id for event in of_turn.values()))
    if state.admission.check(draft.events) is not None:
        raise NotRetractable(working.conversation_id, turn_id, "by_hand")
    return draft.decision(tuple(event for event in of_turn.values() if is_chat_message(event)))


def _check_leaves_turn_alone(working: WorkingState, events: Sequence[Event]) -> None:
    """Raise `NotWhileTurnRuns` if these events, which no agent appends, would break a running turn.

    A call without its result would keep the turn's own events out of the log. A retraction could
    take the turn's chat message from its next model call. An answer with its turn id would be taken
    for its agent's.
    """
    running = working.state.turns.running
    if running is None:
        return
    answered = {event.tool_call_id for event in events if isinstance(event, RESULT_CLASSES)}
    retracted: set[str] = set()
    for event in events:
        if isinstance(event, ActionEvent) and event.tool_call_id not in answered:
            raise NotWhileTurnRuns(working.conversation_id, running.turn_id, "append of a call")
        is_answer = isinstance(event, ActionEvent | AgentMessageEvent)
        if is_answer and event.turn_id == running.turn_id:
            raise NotWhileTurnRuns(working.conversation_id, running.turn_id, "append of its answer")
        if isinstance(event, RetractionEvent):
            retracted.update(event.retracted_event_ids)
    if retracted and any(
        event.id in retracted and event.turn_id == running.turn_id for event in working.state.view
    ):
        raise NotWhileTurnRuns(working.conversation_id, running.turn_id, "retraction")


def _propose(working: WorkingState, command: Propose, stamp: Stamp) -> Decision:
    view = working.state.view
    if command.epoch != working.epoch:
        return Decision(reply=False)
    plan: CondensationPlan | str | None = None
    if command.proposal is not None:
        plan = check_proposal(command.proposal, command.shown, view)
    has_request = view.unhandled_condensation_request
    # A turn that its model refused as too long needs room: an answer to its request is not enough.
    is_enough = has_request and not working.state.is_turn_too_long
    is_useful = isinstance(plan, CondensationPlan) and (plan.shrinks or is_enough)
    if not is_useful and command.need == "hard" and _waits_for_room(working.state, command.shown):
        plan = make_room(view)
    if not isinstance(plan, CondensationPlan):
        return Decision(reply=False)
    draft = Draft(working, stamp)
    draft.add(
        CondensationEvent,
        forgotten_event_ids=plan.forgotten_event_ids,
        summary=plan.summary,
        summary_offset=plan.summary_offset,
        shortened=FrozenObject(plan.shortened),
    )
    return draft.decision(reply=plan.shrinks or has_request)


def _waits_for_room(state: Folded, shown: View) -> bool:
    """True if the running turn waits for a shorter view, and the condenser saw the present view.

    A condensation request that was appended by hand may stay unanswered. The turn's own request, or
    a limit that the view is over, may not.
    """
    if state.turns.running is None or not state.view.is_unchanged_since(shown):
        return False
    return state.is_turn_too_long or not state.view.unhandled_condensation_request
