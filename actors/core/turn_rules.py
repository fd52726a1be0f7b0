"""The decisions on commands about turns: sending, steps, pauses, confirmations, ends.

A part of `decide`, and as pure. The tables in `docs/turns.md` show the outcome of each case. Most
functions here add events to a `Draft`; those that return a `Decision` end it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal, TypeAlias, TypedDict, TypeGuard, assert_never, get_args

from turnkeeper.runtime import InvariantViolation

from ..errors import (
    AnswerTooLong,
    ContentTooLong,
    ConversationNotFound,
    Draining,
    EventIdConflict,
    FileTooLarge,
    InvalidInput,
    MessageIdConflict,
    MessageNotFound,
    MetadataTooLong,
    NotConfirmable,
    NotReplaceable,
    QueueFull,
    StaleTurn,
    TooManyFiles,
    TurnInProgress,
    TurnPaused,
)
from ..events import (
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationEvent,
    CondensationRequestEvent,
    ConfirmationGivenEvent,
    ConversationChangedEvent,
    ConversationErrorEvent,
    Event,
    FileContent,
    ForkedFromEvent,
    ImageContent,
    LoggedEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    PausedEvent,
    ResumedEvent,
    RetractionEvent,
    StatusChangedEvent,
    StepUnfinishedEvent,
    SystemPromptEvent,
    TextDelta,
    TokenUsage,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    UserRejectEvent,
    is_seen_by_model,
)
from ..values.frozen import FrozenObject, check_json
from ..values.text import hold_back_half
from .commands import (
    Answer,
    BeginStep,
    CancelTurn,
    EndTurn,
    Expected,
    Interrupt,
    Leave,
    NoteRequest,
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
from .limits import Limits
from .status import AgentExecutionStatus
from .turn_table import KnownMessage, RunningTurn, TurnTable, message_digest
from .working_state import (
    Asked,
    Decision,
    Draft,
    Stamp,
    StartTurn,
    StopTurn,
    TurnEffect,
    WorkingState,
)

__all__ = [
    "TurnCommand",
    "add_error",
    "add_owner",
    "begin_log",
    "check_running",
    "decide_fork",
    "decide_piece",
    "decide_request",
    "decide_turn",
    "first_reply",
    "is_chat_message",
    "message_that_cut",
]

TurnCommand: TypeAlias = (
    Send
    | TurnAppend
    | Stream
    | NoteRequest
    | BeginStep
    | EndTurn
    | CancelTurn
    | Interrupt
    | Pause
    | Resume
    | Answer
    | RepairView
    | Recover
    | Leave
)


def decide_turn(working: WorkingState, command: TurnCommand, stamp: Stamp) -> Decision:
    """Return the decision on a command about turns. Raise a `Refused` if it is refused."""
    draft = Draft(working, stamp)
    match command:
        case Send():
            return _send(draft, command)
        case TurnAppend():
            return _turn_append(draft, command)
        case Stream():
            return _stream(draft, command)
        case NoteRequest():
            return decide_request(working, command, stamp.now)
        case BeginStep():
            return _begin_step(draft, command)
        case EndTurn():
            return _end_turn(draft, command)
        case CancelTurn():
            return _cancel_turn(draft, command)
        case Interrupt():
            return _interrupt_turn(draft, command)
        case Pause():
            return _pause(draft)
        case Resume():
            return _resume(draft)
        case Answer():
            return _answer(draft, command)
        case RepairView():
            return _repair_view(draft, command)
        case Recover():
            return _recover(draft, command)
        case Leave():
            return _leave(draft)
        case _:
            assert_never(command)


# --- chat messages -------------------------------------------------------------------------------


def _send(draft: Draft, command: Send) -> Decision:
    """Decide if a chat message begins a turn, waits for its turn, or is refused."""
    working = draft.working
    turns = working.state.turns
    # Before overlap and limits: a message that the log has gets the same answer, whatever else has
    # changed since.
    if (known := _find_known(draft, command)) is not None:
        return Decision(reply=Sent(command.message_id, known.seq, known.turn_id, is_duplicate=True))
    if working.draining == "refuse":
        raise Draining(working.conversation_id)
    _check_limits(working, command)
    running = turns.running
    if command.replaces is not None:
        return _replace(draft, command, command.replaces)
    if running is None:
        begin_log(draft, command.expected)
        if turns.is_paused or working.draining:
            return _queue(draft, command)
        return _begin_with(draft, command)
    match command.on_overlap or working.settings.on_overlap:
        case "reject":
            raise TurnInProgress(working.conversation_id, running.turn_id)
        case "queue":
            return _queue(draft, command, overlapped="queue")
        case "steer":
            return _queue(draft, command, overlapped="steer", steers=running.turn_id)
        case "interrupt":
            return _interrupt_with(draft, running, command)
        case "rollback":
            if not _roll_back(draft, running, _cut_by("rolled back", command.message_id)):
                return _interrupt_with(draft, running, command)
            return _begin_with(draft, command, overlapped="rollback")
        case unreachable:
            assert_never(unreachable)


def _find_known(draft: Draft, command: Send) -> KnownMessage | None:
    """Return the message if the log has it.

    Raises `EventIdConflict` if another event has its event id, and `MessageIdConflict` if its
    message id is known with other content.
    """
    working, stamp = draft.working, draft.stamp
    carried = _find_carried(draft, command.event_id)
    if carried is not None and getattr(carried.event, "message_id", None) != command.message_id:
        raise EventIdConflict(working.conversation_id, {carried.event.id: carried.seq})
    known = working.state.turns.find(command.message_id) or stamp.known_message
    if known is not None:
        if known.digest != message_digest(command):
            raise MessageIdConflict(working.conversation_id, command.message_id, known.seq)
        if not known.turn_id:
            raise MessageIdConflict(
                working.conversation_id, command.message_id, known.seq, has_turn=False
            )
    return known


def _find_carried(draft: Draft, event_id: str | None) -> LoggedEvent | None:
    """Return the event of this id, which a sender chose, if the log has it."""
    if event_id is None:
        return None
    return draft.working.find_event(event_id, draft.stamp)


def first_reply(
    sent: Sent,
    event_id: str,
    before: Iterable[Event],
    waiting: tuple[MessageQueuedEvent, TurnTable] | None,
) -> Sent:
    """Return the reply that the first `Send` of a chat message got, read from the log.

    `event_id`: the first event with its message id. `before`: the events just before that, as far
    back as their commit goes. `waiting`: that first event, if the message had to wait, and the turn
    table before it.
    """
    overlapped: OnOverlap | None = None
    for event in before:
        if isinstance(event, TurnEndedEvent) and message_that_cut(event) == sent.message_id:
            overlapped = "rollback" if event.outcome == "rolled_back" else "interrupt"
    if waiting is None:
        return replace(sent, event_id=event_id, overlapped=overlapped)
    message, turns = waiting
    if turns.running is not None:
        overlapped = "steer" if message.steers == turns.running.turn_id else "queue"
    return replace(sent, event_id=event_id, overlapped=overlapped, waits_for=turns.waits_for)


_Cut: TypeAlias = Literal["interrupted", "rolled back", "replaced"]
"""The fate of a turn that a chat message has ended."""


def _cut_by(cut: _Cut, message_id: str) -> str:
    """Return the detail of the turn's end, which `message_that_cut` reads."""
    return f"{cut} by chat message {message_id}"


def message_that_cut(ended: TurnEndedEvent) -> str | None:
    """Return the message id of the chat message that ended the turn; None if none did."""
    for cut in get_args(_Cut):
        head = _cut_by(cut, "")
        if ended.detail is not None and ended.detail.startswith(head):
            return ended.detail.removeprefix(head)
    return None


def _check_limits(working: WorkingState, command: Send) -> None:
    """Raise the error of the limit that the chat message goes beyond, if any."""
    limits = working.state.limits
    if len(command.content) > limits.content_length_max:
        name, found = working.conversation_id, len(command.content)
        raise ContentTooLong(name, found, limits.content_length_max)
    if command.metadata:  # most messages have none
        _check_metadata(working.conversation_id, command.metadata, limits)
    if len(command.files) > limits.files_max:
        raise TooManyFiles(working.conversation_id, len(command.files), limits.files_max)
    for file in command.files:
        if file.size > limits.file_bytes_max:
            raise FileTooLarge(working.conversation_id, file.size, limits.file_bytes_max)


def _check_metadata(conversation_id: str, metadata: FrozenObject, limits: Limits) -> None:
    depth_max, digits_max = limits.metadata_depth_max, limits.metadata_digits_max
    try:
        check_json(metadata, depth_max=depth_max, digits_max=digits_max)
    except InvalidInput as error:
        error.argument = "metadata"
        raise
    length = len(json.dumps(metadata, ensure_ascii=False))
    if length > limits.metadata_length_max:
        raise MetadataTooLong(conversation_id, length, limits.metadata_length_max)


class _Parts(TypedDict):
    """The fields that all events of one chat message share; its id is passed beside them."""

    content: str
    images: tuple[ImageContent, ...]
    replaces: str | None
    author: str | None
    metadata: FrozenObject
    files: tuple[FileContent, ...]


def _parts(message: Send | MessageQueuedEvent | UserMessageEvent) -> _Parts:
    """Return the parts of a chat message, for its next event.

    A message that waits has two events, and one more each time it waits again. A part that is
    missing here would be lost on that way.
    """
    return {
        "content": message.content,
        "images": message.images,
        "replaces": message.replaces,
        "author": message.author,
        "metadata": message.metadata,
        "files": message.files,
    }


def _interrupt_with(draft: Draft, running: RunningTurn, command: Send) -> Decision:
    _interrupt(draft, running, _cut_by("interrupted", command.message_id))
    return _begin_with(draft, command, overlapped="interrupt")


def _begin_with(
    draft: Draft,
    command: Send,
    *,
    overlapped: OnOverlap | None = None,
    place: int | None = None,
) -> Decision:
    """Start a new message's own turn, after the events of the draft.

    While the process is drained, the message waits for the next owner instead, at `place` (see
    `_queue`).
    """
    running = draft.working.state.turns.running
    stop = (StopTurn(running.turn_id),) if running is not None else ()
    if draft.working.draining:
        queued = _queue(draft, command, overlapped=overlapped, place=place, ends_hold=True)
        return draft.decision(queued.reply, effects=stop, is_answer_over=True)
    _add_changed_prompt(draft)
    turn_id = draft.stamp.new_id()
    draft.add(TurnStartedEvent, turn_id=turn_id)
    draft.add(
        UserMessageEvent,
        id=command.event_id or draft.stamp.new_id(),
        turn_id=turn_id,
        message_id=command.message_id,
        **_parts(command),
    )
    return draft.decision(
        Sent(
            command.message_id,
            draft.seq,
            turn_id,
            overlapped=overlapped,
            event_id=draft.events[-1].id,
        ),
        effects=(*stop, StartTurn(turn_id)),
        is_answer_over=True,
    )


def _replace(draft: Draft, command: Send, target_id: str) -> Decision:
    """Retract the turn of the replaced message and all later turns, and begin the new one's.

    If the replaced message still waits, withdraw it; the new one takes its place in the queue.
    """
    working, state = draft.working, draft.working.state
    name, turns = working.conversation_id, state.turns
    running = turns.running
    if running is not None and (command.on_overlap or working.settings.on_overlap) == "reject":
        raise TurnInProgress(name, running.turn_id)
    target = turns.find(target_id) or draft.stamp.known_target
    if target is None:
        raise MessageNotFound(name, target_id, to_replace=True)
    if (waiting := turns.queued.get(target_id)) is not None:
        draft.add(
            MessageWithdrawnEvent,
            turn_id=waiting.turn_id,
            message_id=target_id,
            replaced_by=command.message_id,
        )
        overlapped: OnOverlap | None = None
        if running is not None:
            overlapped = "steer" if waiting.steers == running.turn_id else "queue"
        return _queue(
            draft,
            command,
            overlapped=overlapped,
            steers=waiting.steers,
            place=target.place,
            is_exchanged=True,
        )
    _retract_from(draft, target_id, _cut_by("replaced", command.message_id))
    if running is None and turns.is_paused:
        return _queue(draft, command, place=target.place)
    overlapped = None if running is None else "rollback"
    return _begin_with(draft, command, overlapped=overlapped, place=target.place)


def _retract_from(draft: Draft, message_id: str, why: str) -> None:
    """Take the turn of this message and all later turns out of the view; end the one that runs.

    Raises `NotReplaceable`.
    """
    working, state = draft.working, draft.working.state
    name, running, view = working.conversation_id, state.turns.running, state.view
    at = next((n for n, e in enumerate(view) if getattr(e, "message_id", None) == message_id), None)
    if at is None:
        raise NotReplaceable(name, message_id, "not_in_view")
    if not is_chat_message(view[at]):
        raise NotReplaceable(name, message_id, "by_hand")
    if any(is_chat_message(event) and event.turn_id == view[at].turn_id for event in view[:at]):
        raise NotReplaceable(name, message_id, "joined")
    if state.is_condensed_from(at):
        raise NotReplaceable(name, message_id, "condensed")
    of_turns = [e.id for e in view[at:] if e.turn_id and not isinstance(e, SystemPromptEvent)]
    if not _take_out(draft, of_turns, running, why):
        raise NotReplaceable(name, message_id, "by_hand")


def begin_log(draft: Draft, expected: Expected | None) -> None:
    """If the log is empty, begin it with the system prompt and the conversation's user."""
    prompt = draft.working.settings.system_prompt
    if not draft.working.state.seq and prompt is not None:
        draft.add(SystemPromptEvent, content=prompt)
    add_owner(draft, expected)


def add_owner(draft: Draft, expected: Expected | None) -> None:
    """If the log is empty, write the conversation's user beside its first events."""
    if not draft.working.state.seq and expected is not None and expected.owner is not None:
        draft.add(ConversationChangedEvent, owner=expected.owner)


def _add_changed_prompt(draft: Draft) -> None:
    """Before a turn, put the application's system prompt in the place of another one."""
    settings, state = draft.working.settings, draft.working.state
    prompt = settings.system_prompt
    if prompt is None or settings.prompt_policy == "pinned" or not state.seq:
        return
    first = state.view[:1]
    if not any(isinstance(event, SystemPromptEvent) and event.content == prompt for event in first):
        draft.add(SystemPromptEvent, content=prompt, goes_first=True)


def _queue(
    draft: Draft,
    command: Send,
    *,
    overlapped: OnOverlap | None = None,
    steers: str | None = None,
    place: int | None = None,
    is_exchanged: bool = False,
    ends_hold: bool = False,
) -> Decision:
    """Queue a new message.

    `place`: the seq that orders it in the queue; by default its own. `is_exchanged`: it replaces a
    queued message, so the queue does not grow. `ends_hold`: this decision ends the turn that ran,
    so no pause or confirmation of that turn keeps the message waiting.
    """
    working = draft.working
    turns = working.state.turns
    again = sum(event.kind == "message_queued" for event in draft.events)  # by a rollback
    if len(turns.queued) + again >= working.settings.queued_messages_max and not is_exchanged:
        raise QueueFull(working.conversation_id, working.settings.queued_messages_max)
    turn_id = draft.stamp.new_id()
    draft.add(
        MessageQueuedEvent,
        id=command.event_id or draft.stamp.new_id(),
        turn_id=turn_id,
        message_id=command.message_id,
        steers=steers,
        place=place,
        **_parts(command),
    )
    return draft.decision(
        Sent(
            command.message_id,
            draft.seq,
            turn_id,
            overlapped=overlapped,
            waits_for=None if ends_hold else turns.waits_for,
            event_id=draft.events[-1].id,
        )
    )


def _join(draft: Draft, waiting: MessageQueuedEvent, turn_id: str) -> None:
    """Let a chat message that has waited join this turn."""
    draft.add(
        UserMessageEvent,
        turn_id=turn_id,
        message_id=waiting.message_id,
        queued_event_id=waiting.id,
        **_parts(waiting),
    )


# --- steps ---------------------------------------------------------------------------------------


def _begin_step(draft: Draft, command: BeginStep) -> Decision:
    """Decide if the next step of the running turn begins now, which is the reply."""
    working = draft.working
    running = check_running(working, command.turn_id, command.epoch)
    turns = working.state.turns
    if turns.waits_for is not None or (working.draining and working.hands_turns_over):
        return _suspend(working, running)
    if not working.state.admission.open_calls:
        for waiting in turns.queued.values():
            if waiting.steers is None:
                continue
            if waiting.steers != running.turn_id:
                # It steers a turn that has ended, so the next turn is its own. No later message may
                # overtake it.
                break
            _join(draft, waiting, running.turn_id)
    return draft.decision(reply=True)


def _suspend(working: WorkingState, running: RunningTurn) -> Decision:
    """End the agent's run, because the turn is held. Raise `TurnPaused` if it cannot be resumed.

    The reply, False, says that no step begins, and that the turn has not ended.
    """
    if not working.settings.is_resumable:
        raise TurnPaused(working.conversation_id, running.turn_id)
    return Decision(reply=False, is_suspended=True)


_SAYING_KINDS: Final = ("agent_message", "action")


def _turn_append(draft: Draft, command: TurnAppend) -> Decision:
    running = check_running(draft.working, command.turn_id, command.epoch)
    first = draft.seq + 1
    draft.extend(command.events, command.written)
    logged = tuple(LoggedEvent(first + n, event) for n, event in enumerate(command.events))
    if command.ends and draft.working.state.turns.waits_for is None:
        draft.add(TurnEndedEvent, turn_id=running.turn_id, outcome="completed")
        return _then_next_queued(draft, reply=logged)
    # The text that came with the calls of a response is in the first of them.
    says = any(event.kind in _SAYING_KINDS for event in command.events)
    return draft.decision(logged, is_answer_over=says, is_suspended=command.suspends)


def _stream(draft: Draft, command: Stream) -> Decision:
    """Take a piece of the answer that is being written; fail the turn if it gets too long."""
    decision = decide_piece(draft.working, command)
    if decision is None:
        running = check_running(draft.working, command.turn_id, command.epoch)
        return _fail_too_long(draft, running)
    return decision


def decide_piece(working: WorkingState, command: Stream) -> Decision | None:
    """Return the decision on a piece, which has no events; None if the answer gets too long."""
    running = check_running(working, command.turn_id, command.epoch)
    answer, newest = working.partial_answer, working.partial_answer.newest
    attempt = 0 if newest is None else newest.attempt
    before, offset = answer.half, answer.length
    if command.is_first or newest is None:
        attempt, before, offset = attempt + 1, "", 0
    text, half = hold_back_half(before + command.text)
    if offset + len(text) > working.settings.answer_length_max:
        return None
    piece = TextDelta(working.epoch, running.turn_id, working.state.answers, attempt, offset, text)
    return Decision(piece=piece, half=half)


def decide_request(working: WorkingState, command: NoteRequest, now: float) -> Decision:
    """Return the decision on the note of what a model is asked now, which has no events."""
    check_running(working, command.turn_id, command.epoch)
    return Decision(asked=Asked(command.request, now))


def _fail_too_long(draft: Draft, running: RunningTurn) -> Decision:
    working, turn_id = draft.working, running.turn_id
    error = AnswerTooLong(working.conversation_id, turn_id, working.settings.answer_length_max)
    name, detail = type(error).__name__, str(error)
    _close(draft, running, "its agent's answer got too long", outcome="failed")
    add_error(draft, turn_id, name, detail)
    draft.add(TurnEndedEvent, turn_id=turn_id, outcome="failed", detail=f"{name}: {detail}")
    return _then_next_queued(draft, StopTurn(turn_id))


def _repair_view(draft: Draft, command: RepairView) -> Decision:
    """Forget the events that break the history a model refused, and request a condensation."""
    check_running(draft.working, command.turn_id, command.epoch)
    shown = {event.id for event in draft.working.state.view}
    broken = tuple(event_id for event_id in command.broken if event_id in shown)
    add_error(draft, command.turn_id, "MalformedHistory", command.detail)
    if broken:
        draft.add(CondensationEvent, forgotten_event_ids=broken)
    draft.add(CondensationRequestEvent, turn_id=command.turn_id)
    return draft.decision(reply=bool(broken))


# --- pauses and confirmations --------------------------------------------------------------------


def _pause(draft: Draft) -> Decision:
    """Begin no further step; a model call or a tool call that is under way goes on."""
    state = draft.working.state
    if not state.seq:
        raise ConversationNotFound(draft.working.conversation_id)
    if state.turns.is_paused:
        return Decision(reply=False)
    running = state.turns.running
    draft.add(PausedEvent, turn_id=running.turn_id if running is not None else None)
    return draft.decision(reply=True)


def _resume(draft: Draft) -> Decision:
    turns = draft.working.state.turns
    if not turns.is_paused:
        return Decision(reply=False)
    running = turns.running
    draft.add(ResumedEvent, turn_id=running.turn_id if running is not None else None)
    if running is None:
        if draft.working.state.admission.open_calls:
            return draft.decision(reply=True)  # appended by hand during the pause: as in `_recover`
        return _then_next_queued(draft, reply=True)
    if turns.awaiting:
        return draft.decision(reply=True)
    return _go_on(draft, running, unstarted=turns.confirmed)


def _answer(draft: Draft, command: Answer) -> Decision:
    """Let the calls that wait for a confirmation run, or answer them as rejected; one by one."""
    working = draft.working
    turns = working.state.turns
    running, awaiting = turns.running, turns.awaiting
    carried = _find_carried(draft, command.event_id)
    answers: Mapping[str, object]
    if isinstance(command.answers, Mapping):
        answers = command.answers
        given = draft.stamp.known_answers or turns.find_answers(answers)
        if _has_answers(working, answers, given) and (
            carried is None
            or draft.stamp.known_answers
            or all(turns.answers[c].seq == carried.seq for c in answers)
        ):
            return Decision(reply=False)
    else:
        answers = dict.fromkeys(awaiting, command.answers)
    if carried is not None:
        raise EventIdConflict(working.conversation_id, {carried.event.id: carried.seq})
    if running is None or not awaiting or answers.keys() != set(awaiting):
        raise NotConfirmable(working.conversation_id, awaiting)
    rejected = tuple(c for c in awaiting if answers[c] is not True)
    is_mixed = 0 < len(rejected) < len(awaiting)
    draft.add(
        ConfirmationGivenEvent,
        id=command.event_id or draft.stamp.new_id(),
        turn_id=running.turn_id,
        confirmed=len(rejected) < len(awaiting),
        rejected=rejected if is_mixed else (),
    )
    # The result of one of them may have been appended by hand.
    unanswered = tuple(c for c in awaiting if c in working.state.admission.open_calls)
    for tool_call_id in unanswered:
        if tool_call_id in rejected:
            _reject(draft, tool_call_id, running.turn_id, _reason(answers, tool_call_id))
    if turns.is_paused:
        return draft.decision(reply=True)
    return _go_on(
        draft,
        running,
        unstarted=tuple(c for c in unanswered if c not in rejected),
        answered=rejected,
    )


def _reason(answers: Mapping[str, object], tool_call_id: str) -> str:
    """Return why this call is rejected, as the agent sees it."""
    return str(answers[tool_call_id] or "the user rejected this call")


def _has_answers(
    working: WorkingState, answers: Mapping[str, object], given: Mapping[str, bool]
) -> bool:
    """True if the calls that once waited together, and were `given` answers, got just these."""
    if not given or given != {c: answer is True for c, answer in answers.items()}:
        return False
    # The reasons are in the log; those that have left the view are not compared.
    return all(
        event.content == _reason(answers, event.tool_call_id)
        for event in working.state.view
        if isinstance(event, UserRejectEvent) and event.tool_call_id in answers
    )


def _go_on(
    draft: Draft,
    running: RunningTurn,
    *,
    unstarted: tuple[str, ...],
    answered: Collection[str] = (),
) -> Decision:
    """Let the running turn's agent go on, if it can, because nothing holds the turn any more."""
    working = draft.working
    if working.agent_of == running.turn_id:
        return draft.decision(reply=True)
    if working.settings.is_resumable:
        return draft.decision(reply=True, effects=(StartTurn(running.turn_id, unstarted),))
    why = "its agent's process stopped, and it cannot be run again on a turn that has begun"
    _interrupt(draft, running, why, answered=answered)
    return _then_next_queued(draft, reply=True)


# --- ends ----------------------------------------------------------------------------------------


def _end_turn(draft: Draft, command: EndTurn) -> Decision:
    working = draft.working
    running = check_running(working, command.turn_id, command.epoch)
    if working.state.turns.waits_for is not None:
        return _suspend(working, running)
    why = "the agent ended its turn without a result for this call"
    _close(draft, running, why, outcome="failed")
    if command.error is not None:
        add_error(draft, running.turn_id, command.error, command.detail)
    if command.is_stuck:
        draft.add(StatusChangedEvent, turn_id=running.turn_id, status=AgentExecutionStatus.STUCK)
    draft.add(
        TurnEndedEvent,
        turn_id=running.turn_id,
        outcome="completed" if command.error is None else "failed",
        detail=None if command.error is None else f"{command.error}: {command.detail}",
    )
    return _then_next_queued(draft, reply=True)


def _cancel_turn(draft: Draft, command: CancelTurn) -> Decision:
    turns = draft.working.state.turns
    running = turns.running
    if running is not None and (
        running.turn_id == command.turn_id
        or any(message.message_id == command.message_id for message in running.messages)
    ):
        _interrupt(draft, running, "cancelled by its caller")
        return _then_next_queued(draft, StopTurn(running.turn_id), reply=True)
    if command.message_id not in turns.queued:
        return Decision(reply=False)
    draft.add(MessageWithdrawnEvent, turn_id=command.turn_id, message_id=command.message_id)
    return draft.decision(reply=True)


def _interrupt_turn(draft: Draft, command: Interrupt) -> Decision:
    running = draft.working.state.turns.running
    if running is None or command.turn_id not in {None, running.turn_id}:
        return Decision(reply=False)
    _interrupt(draft, running, "interrupted by its caller")
    return _then_next_queued(draft, StopTurn(running.turn_id), reply=True)


def _recover(draft: Draft, command: Recover) -> Decision:
    working = draft.working
    if command.enforced_away:
        # Before anything else, the view of a log from elsewhere becomes a fold of the log again.
        draft.add(CondensationEvent, forgotten_event_ids=command.enforced_away)
    turns = working.state.turns
    running = turns.running
    if turns.waits_for is not None:
        return draft.decision()
    if running is None:
        if working.state.admission.open_calls:
            return draft.decision()  # appended by hand; once they are answered, the owner goes on
        return _then_next_queued(draft)
    if working.hands_turns_over:
        starts = () if working.draining else (StartTurn(running.turn_id),)
        return draft.decision(effects=starts)
    _interrupt(draft, running, "its owner stopped")
    return _then_next_queued(draft)


def _leave(draft: Draft) -> Decision:
    """End the running turn, unless it goes on in the next process, or waits for a person."""
    working = draft.working
    turns = working.state.turns
    running = turns.running
    if running is None or turns.waits_for is not None or working.hands_turns_over:
        return Decision()
    _interrupt(draft, running, "its process was drained")
    return _then_next_queued(draft, StopTurn(running.turn_id, is_drained=True))


def decide_fork(working: WorkingState, seq: int, stamp: Stamp, *, owner: str) -> tuple[Event, ...]:
    """Return the first events of a fork of the log of `working`, whose state is the one at `seq`.

    The fork keeps the title and the labels, and belongs to `owner`. A turn that runs in the parent
    is interrupted in the fork; messages that wait in the parent do not wait in the fork.
    """
    draft = Draft(working, stamp)
    draft.add(ForkedFromEvent, conversation_id=working.conversation_id, seq=seq)
    if owner != working.state.details.owner:
        draft.add(ConversationChangedEvent, owner=owner)
    running = working.state.turns.running
    if running is not None:
        why = "the conversation was forked here, and this did not run in the fork"
        _interrupt(draft, running, why)
    return tuple(draft.events)


def _interrupt(
    draft: Draft, running: RunningTurn, why: str, *, answered: Collection[str] = ()
) -> None:
    """End the running turn at once: its open calls are answered, and what was said is kept."""
    _close(draft, running, why, answered=answered)
    draft.add(TurnEndedEvent, turn_id=running.turn_id, outcome="interrupted", detail=why)


def _roll_back(draft: Draft, running: RunningTurn, why: str) -> bool:
    """End the running turn and take it out of the view; False if not all of it can leave."""
    in_view = draft.working.state.running_turn_events()
    if in_view is None:
        return False
    return _take_out(draft, in_view, running, why)


def _take_out(
    draft: Draft, event_ids: Sequence[str], running: RunningTurn | None, why: str
) -> bool:
    """Take these events out of the view, and with them the turn that runs, which ends.

    The chat messages that had joined it wait again. If an event that was appended by hand is tied
    to what would leave, return False and add nothing.
    """
    trial = Draft(draft.working, draft.stamp)
    if running is not None:
        _close(trial, running, why)
    closing = [event.id for event in trial.events if is_seen_by_model(event)]
    if running is not None:
        _queue_again(trial, running)
    turn_id = None if running is None else running.turn_id
    trial.add(RetractionEvent, turn_id=turn_id, retracted_event_ids=(*event_ids, *closing))
    if running is not None:
        trial.add(TurnEndedEvent, turn_id=turn_id, outcome="rolled_back", detail=why)
    if draft.working.state.admission.check(trial.events) is not None:
        return False
    draft.extend(trial.events)
    return True


def _queue_again(draft: Draft, running: RunningTurn) -> None:
    """Let the chat messages that had joined a turn wait again, each for a turn of its own."""
    for message in running.messages[1:]:
        if message.message_id is not None:
            draft.add(
                MessageQueuedEvent,
                turn_id=draft.stamp.new_id(),
                message_id=message.message_id,
                queued_again=True,
                **_parts(message),
            )


def _close(
    draft: Draft,
    running: RunningTurn,
    why: str,
    *,
    answered: Collection[str] = (),
    outcome: Literal["interrupted", "failed"] = "interrupted",
) -> None:
    """Answer each open call, then keep the unfinished answer, marked as interrupted.

    A model that is being asked is noted last, with this outcome of its step. `answered`: the calls
    that events before this, in the same decision, have answered.
    """
    working = draft.working
    turns = working.state.turns
    unstarted = {*turns.awaiting, *turns.confirmed}
    for tool_call_id, action in working.state.admission.open_calls.items():
        if tool_call_id in answered:
            continue
        if tool_call_id in unstarted:
            _reject(draft, tool_call_id, action.turn_id, f"not run: {why}")
            continue
        draft.add(
            AgentErrorEvent,
            turn_id=action.turn_id,
            tool_call_id=tool_call_id,
            content=f"no result: {why}; the call had started and may have happened",
            may_have_happened=True,
        )
    said = working.partial_answer.text
    if said:
        draft.add(AgentMessageEvent, turn_id=running.turn_id, content=said, interrupted=True)
    if working.asked is not None:
        request, asked_at = working.asked
        draft.add(
            StepUnfinishedEvent,
            turn_id=running.turn_id,
            outcome=outcome,
            usage=TokenUsage(model=request.model, latency_s=max(0.0, draft.stamp.now - asked_at)),
            request=request,
        )


def _reject(draft: Draft, tool_call_id: str, turn_id: str | None, why: str) -> None:
    draft.add(UserRejectEvent, turn_id=turn_id, tool_call_id=tool_call_id, content=why)


def _then_next_queued(draft: Draft, *effects: TurnEffect, reply: object = None) -> Decision:
    """Start the turn of the chat message that waits longest, because no turn runs any more.

    While the process is drained, the message goes on waiting.
    """
    waiting = next(iter(draft.working.state.turns.queued.values()), None)
    if waiting is None or draft.working.draining:
        return draft.decision(reply, effects=effects, is_answer_over=True)
    if waiting.turn_id is None:
        raise InvariantViolation(
            f"queued chat message {waiting.message_id} of conversation "
            f"{draft.working.conversation_id} has no turn id; nothing was written"
        )
    _add_changed_prompt(draft)
    draft.add(TurnStartedEvent, turn_id=waiting.turn_id)
    _join(draft, waiting, waiting.turn_id)
    return draft.decision(
        reply, effects=(*effects, StartTurn(waiting.turn_id)), is_answer_over=True
    )


def add_error(draft: Draft, turn_id: str | None, error: str, detail: str) -> None:
    """Record an error in the log."""
    draft.add(ConversationErrorEvent, turn_id=turn_id, error=error, detail=detail)


def is_chat_message(event: Event) -> TypeGuard[UserMessageEvent]:
    """True if a turn answers this event."""
    return (
        isinstance(event, UserMessageEvent) and event.turn_id is not None and not event.is_reminder
    )


def check_running(working: WorkingState, turn_id: str, epoch: int) -> RunningTurn:
    """Return the running turn, if it is this one, of this owner. Raise `StaleTurn` if it is not."""
    running = working.state.turns.running
    if running is None or running.turn_id != turn_id or epoch != working.epoch:
        raise StaleTurn(working.conversation_id, turn_id)
    return running
