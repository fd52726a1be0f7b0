"""What follows from a command: the second of the actor's five moves, as a pure function.

`decide(owner, command, stamp)` reads the working state and returns a `Decision`: events, a reply,
effects. It changes nothing, draws no id, reads no clock. `Owner.apply` folds a decision into the
working state. A command is all or nothing: where `decide` raises, nothing was folded.

Every list of events that leaves here has passed admission in its order, so folding cannot fail.
What follows from commands about turns is in `_turn_rules.py`.
"""

from __future__ import annotations

from ._owner import Decision, Owner, Stamp
from ._turn_rules import decide_turn, error_event, first_prompt
from .admission import AdmissionRefused, Appended, Duplicate
from .commands import (
    Append,
    AppendAll,
    Command,
    Delete,
    DropOverdue,
    GetView,
    Propose,
    ProposeFailed,
    Query,
    Retract,
)
from .condensers import check_proposal
from .errors import EventIdConflict, MessageIdConflict, NotAppendable, NothingToRetract
from .events import (
    CondensationEvent,
    CondensationRequestEvent,
    ConversationErrorEvent,
    LLMConvertibleEvent,
    RetractionEvent,
    SystemPromptEvent,
    TaskListUpdatedEvent,
    UnknownEvent,
    UserMessageEvent,
)

__all__ = ["decide"]

# What a caller may put into a log by hand. Turns, retractions and forks are the owner's to write.
_APPENDABLE = (
    LLMConvertibleEvent,
    CondensationRequestEvent,
    TaskListUpdatedEvent,
    ConversationErrorEvent,
    UnknownEvent,
)


def decide(owner: Owner, command: Command | Query, stamp: Stamp) -> Decision:
    """What follows from this command in this state. Raises a `Refused` where nothing does."""
    match command:
        case Append():
            decision = _append(owner, command, stamp)
        case AppendAll():
            decision = _append_all(owner, command, stamp)
        case Retract():
            decision = _retract(owner, command, stamp)
        case Propose():
            decision = _propose(owner, command, stamp)
        case ProposeFailed():
            error = error_event(stamp, None, command.error, command.detail)
            decision = Decision(events=(error,) if command.epoch == owner.epoch else ())
        case GetView():
            decision = Decision(reply=owner.state.view)
        case Delete() | DropOverdue():
            decision = Decision()  # what is parked is the loop's to answer
        case _:
            decision = decide_turn(owner, command, stamp)
    violation = owner.state.admission.check(decision.events)
    if violation is not None:
        raise AdmissionRefused(owner.conversation_id, violation)
    return decision


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
    before = () if isinstance(event, SystemPromptEvent) else first_prompt(owner, stamp)
    reply = Appended(owner.state.seq + len(before) + 1)
    return Decision(events=(*before, event), reply=reply)


def _append_all(owner: Owner, command: AppendAll, stamp: Stamp) -> Decision:
    events = command.events
    if not events:
        return Decision(reply=Appended(owner.state.seq))
    looked_up = stamp.known_event
    for event in events:
        known = owner.recent.get(event.id)
        if known is None and looked_up is not None and looked_up.event.id == event.id:
            known = looked_up
        if known is not None:
            # They go into the log in one commit: where the first is, all of them are.
            if known.event != events[0]:
                raise EventIdConflict(owner.conversation_id, {event.id: known.seq})
            return Decision(reply=Duplicate(known.seq + len(events) - 1))
        is_chat_message = isinstance(event, UserMessageEvent) and (
            event.message_id is not None or event.queued_event_id is not None
        )
        if is_chat_message or not isinstance(event, (*_APPENDABLE, RetractionEvent)):
            raise NotAppendable(owner.conversation_id, type(event).__name__)
    before = first_prompt(owner, stamp)
    reply = Appended(owner.state.seq + len(before) + len(events))
    return Decision(events=(*before, *events), reply=reply)


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
