"""A world of turns without any I/O: commands in any order, and the laws that hold after each.

`Turns` stands where the actor does: it decides, folds, and keeps the runs of agents that the
effects start. A move is a name and a number; what it cannot do where things stand, it leaves. So
any list of moves is a history, and what hypothesis shrinks is one too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import strategies as st

from turnkeeper.actors import AgentExecutionStatus as Status
from turnkeeper.actors.core.admission import AdmissionRefused
from turnkeeper.actors.core.commands import (
    Answer,
    Append,
    BeginStep,
    CancelTurn,
    Command,
    EndTurn,
    Interrupt,
    NoteRequest,
    OnOverlap,
    Pause,
    Propose,
    Recover,
    RepairView,
    Resume,
    Retract,
    Send,
    Sent,
    Stream,
    TurnAppend,
    Undo,
)
from turnkeeper.actors.core.condensation import Proposal, find_runs
from turnkeeper.actors.core.decide import decide
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.core.turn_table import RunningTurn
from turnkeeper.actors.core.view import View
from turnkeeper.actors.core.working_state import (
    ConversationSettings,
    Decision,
    Stamp,
    StopTurn,
    WorkingState,
)
from turnkeeper.actors.errors import (
    ConversationNotFound,
    MessageNotFound,
    NotConfirmable,
    NothingToRetract,
    NotReplaceable,
    NotRetractable,
    NotWhileTurnRuns,
    QueueFull,
    StaleTurn,
    TurnInProgress,
    TurnPaused,
)
from turnkeeper.actors.events import (
    RESULT_CLASSES,
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationEvent,
    ConfirmationRequestedEvent,
    Event,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    ObservationEvent,
    RetractionEvent,
    StepFinishedEvent,
    StepRequest,
    StepUnfinishedEvent,
    SystemPromptEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    UserRejectEvent,
)
from turnkeeper.runtime import format_id

_BEGIN = 1_700_000_000.0
_AT_REST = (Status.IDLE, Status.FINISHED, Status.ERROR, Status.STUCK)
POLICIES: tuple[OnOverlap, ...] = ("queue", "interrupt", "steer", "rollback", "reject")
QUEUE_MAX = 3

Move = tuple[str, int]


@dataclass(eq=False)
class Run:
    """One run of the agent on one turn."""

    turn_id: str
    epoch: int
    unstarted: set[str]
    is_over: bool = False
    held: Command | None = None
    """What it said during a pause, where it cannot be run again: it waits for the answer."""


@dataclass
class Turns:
    """One conversation's owner, the runs that it started, and all that was ever logged."""

    settings: ConversationSettings
    working: WorkingState = field(init=False)
    events: list[Event] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    sent: dict[str, tuple[Send, Sent]] = field(default_factory=dict)
    started: set[str] = field(default_factory=set)
    """The calls that an agent has begun to run."""
    answered: list[dict[str, bool | str]] = field(default_factory=list)
    """The answers that calls which waited for a confirmation have got."""
    rejected: set[str] = field(default_factory=set)
    asked: StepRequest | None = None
    """What its model was asked in the step that has not ended."""
    attempt: int = 0
    """How often the answer that is not in the log yet has begun."""
    said: list[str] = field(default_factory=list)
    """What was streamed of the answer that is not in the log yet."""
    by_hand: bool = False
    """Calls and results are appended by hand, too: admission may then refuse a chat message."""
    ids: int = 0

    def __post_init__(self) -> None:
        self.settings = replace(self.settings, queued_messages_max=QUEUE_MAX)
        self.working = WorkingState("c", 1, self.settings)

    # --- what the actor does ---------------------------------------------------------------------

    def new_stamp(self) -> Stamp:
        self.ids += 1
        return Stamp(_BEGIN + self.ids, self.ids << 32)

    def new_id(self) -> str:
        return format_id(self.new_stamp().next_id)

    def stamp(self, turn_id: str | None) -> dict[str, Any]:
        at = self.new_stamp()
        return {"id": at.new_id(), "timestamp": at.at, "turn_id": turn_id}

    def do(self, command: Command, run: Run | None = None) -> object:
        """As the actor does it: decide, fold, start effects; raises what the command is refused."""
        working = self.working
        before = working.state.to_snapshot()
        try:
            decision = decide(working, command, self.new_stamp())
        except AdmissionRefused:
            assert working.state.to_snapshot() == before, "a refused command has changed something"
            is_idle = working.state.turns.running is None
            may_be = Send | Resume if is_idle else TurnAppend
            if self.by_hand and isinstance(command, may_be | Append | Retract):
                raise
            raise AssertionError("admission refuses what the rules themselves decided") from None
        except TurnPaused:
            assert working.state.turns.waits_for is not None
            assert not self.settings.is_resumable
            assert run is not None
            run.held = command
            return None
        except Exception:
            assert working.state.to_snapshot() == before, "a refused command has changed something"
            raise
        self._look_at(command, decision)
        working.apply(decision)
        self.events += decision.events
        self._start(decision, run)
        turns = working.state.turns
        if turns.waits_for is None:
            self._decide_held()
        if turns.queued and turns.running is None and not isinstance(command, Recover):
            self.do(Recover())
        self.check()
        return decision.reply

    def _start(self, decision: Decision, run: Run | None) -> None:
        if decision.is_suspended:
            assert run is not None, "only a run of an agent is suspended"
            assert self.settings.is_resumable, "nobody would run it again"
            run.is_over = True
        for effect in decision.effects:
            running = self.working.state.turns.running
            if isinstance(effect, StopTurn):
                for one in self.runs:
                    one.is_over |= one.turn_id == effect.turn_id
            else:
                assert running is not None
                assert effect.turn_id == running.turn_id, "a turn starts that does not run"
                assert self.working.state.turns.waits_for is None, "a turn starts that is held"
                is_again = any(one.turn_id == effect.turn_id for one in self.runs)
                assert self.settings.is_resumable or not is_again, "it cannot be run again"
                self.runs.append(Run(effect.turn_id, self.working.epoch, set(effect.unstarted)))
                open_calls = set(self.working.state.admission.open_calls)
                assert not set(effect.unstarted) & self.started
                assert set(effect.unstarted) <= open_calls or self.by_hand

    def _decide_held(self) -> None:
        for run in self.runs:
            if run.held is not None and not run.is_over:
                held, run.held = run.held, None
                try:
                    self.do(held, run)
                except StaleTurn:
                    run.is_over = True
                else:
                    run.is_over |= isinstance(held, EndTurn) and run.held is None

    def _look_at(self, command: Command, decision: Decision) -> None:
        """What must be so of a decision, given the state before it."""
        turns = self.working.state.turns
        unstarted = {*turns.awaiting, *turns.confirmed}
        shown = {event.id for event in self.working.state.view}
        said = self.said
        if isinstance(command, Stream):
            self._look_at_piece(command, decision)
        if isinstance(command, NoteRequest):
            self.asked = command.request
        for event in decision.events:
            match event:
                case UserRejectEvent(tool_call_id=call_id):
                    assert call_id not in self.started, "it says not run, and it has run"
                case AgentErrorEvent(tool_call_id=call_id):
                    assert call_id not in unstarted, "it may have run, and cannot have"
                case CondensationEvent(forgotten_event_ids=gone):
                    assert shown.issuperset(gone), "it forgets what is not there"
                case AgentMessageEvent(interrupted=True, content=content):
                    assert content == "".join(said)
                    self.said, self.attempt = [], 0
                case AgentMessageEvent() | ActionEvent() if event.turn_id is not None:
                    self.said, self.attempt = [], 0
                case StepFinishedEvent():
                    self.asked = None
                case StepUnfinishedEvent(request=request):
                    assert request == self.asked, "not what the model was asked"
                    self.asked = None
                case TurnEndedEvent():
                    assert not self.said, "what was said of an answer is lost"
                    assert self.asked is None, "what the model was asked is lost"
                    self.attempt = 0
                case _:
                    pass

    def _look_at_piece(self, command: Stream, decision: Decision) -> None:
        if command.is_first or not self.attempt:
            self.said, self.attempt = [], self.attempt + 1
        answers = {
            event.llm_response_id if isinstance(event, ActionEvent) else event.id
            for event in self.events
            if isinstance(event, ActionEvent | AgentMessageEvent)
            and event.turn_id == command.turn_id
        }
        offset = len("".join(self.said))
        assert decision.piece == (
            *(self.working.epoch, command.turn_id, len(answers), self.attempt),
            *(offset, command.text),
        )
        self.said = [*self.said, command.text]

    # --- the laws --------------------------------------------------------------------------------

    def check(self) -> None:
        """Whatever must hold now, from the log alone and of the owner's memory beside it."""
        working, state = self.working, self.working.state
        turns = state.turns
        running = turns.running
        assert state.seq == len(self.events)
        assert working.partial_answer.text == "".join(self.said)
        assert (working.asked and working.asked.request) == self.asked
        assert turns.has_open_turns == (running is not None or bool(turns.queued))
        if running is None:
            assert not turns.awaiting
            assert not turns.confirmed
            may_wait = turns.is_paused or state.admission.open_calls
            assert not turns.queued or may_wait, "a message waits, and nothing runs"
            assert self.by_hand or not state.admission.open_calls, "a call is open, no turn runs"
        else:
            alive = [run for run in self.runs if not run.is_over and run.epoch == working.epoch]
            alive = [run for run in alive if run.turn_id == running.turn_id]
            assert len(alive) <= 1, "two agents run on one turn"
            assert bool(alive) == (working.agent_of == running.turn_id)
            if turns.waits_for is None:
                assert alive, "a turn runs, and no agent runs on it"
            assert not any(message.is_reminder for message in running.messages)
        held_calls = {*turns.awaiting, *turns.confirmed}
        assert not held_calls & self.started, "a call runs that waits for its confirmation"
        assert not turns.confirmed or turns.is_paused
        assert not self.rejected & self.started, "a call runs that was rejected"
        if not self.by_hand:
            assert held_calls <= set(state.admission.open_calls)
        self._check_status()

    def _check_status(self) -> None:
        turns, status = self.working.state.turns, self.working.state.agent_execution_status
        assert turns.is_paused == (status is Status.PAUSED)
        if not turns.is_paused:
            assert bool(turns.awaiting) == (status is Status.WAITING_FOR_CONFIRMATION)
            if turns.running is None:
                assert status in _AT_REST
            elif not turns.awaiting:
                assert status is Status.RUNNING

    def check_log(self) -> None:
        """The whole log, read by a reader that trusts nothing but its events."""
        LogReader(self.events, by_hand=self.by_hand).check()
        prompts = [n for n, event in enumerate(self.events) if isinstance(event, SystemPromptEvent)]
        assert prompts == ([0] if self.events and self.settings.system_prompt else [])
        state, broken = Folded.from_events(self.events)
        assert not broken, "enforcement finds something in a log of our own"
        assert state == self.working.state, "the owner's state is not the fold of its log"
        assert self.working.state.view == View.from_events(self.events)
        restored = Folded.from_snapshot(self.working.state.to_snapshot())
        assert restored == self.working.state, "a snapshot does not give the state back"
        first: dict[str, int] = {}
        for seq, event in enumerate(self.events, 1):
            message_id = getattr(event, "message_id", None)
            if message_id is not None:
                first.setdefault(message_id, seq)
        for message_id, (_, sent) in self.sent.items():
            assert first[message_id] == sent.seq, "not the seq of the first event"
        carried = [encode_record(event).message_id for event in self.events]
        ids = [message_id for message_id in carried if message_id is not None]
        assert len(ids) == len(set(ids)), "the journal would refuse this message id"

    # --- moves -----------------------------------------------------------------------------------

    def play(self, moves: Sequence[Move]) -> None:
        for name, n in moves:
            MOVES[name](self, n)
        self.check_log()

    def _send(self, n: int) -> None:
        on_overlap = (*POLICIES, None)[n % 6]
        running = self.working.state.turns.running
        if n % 7 == 0 and self.sent:
            self._send_again(n, on_overlap)
            return
        message_id = f"m{len(self.sent)}"
        send = Send(message_id, message_id, on_overlap=on_overlap)
        took = on_overlap or self.settings.on_overlap
        is_whole = self.working.state.running_turn_events() is not None and not self.by_hand
        length, waiting = len(self.events), len(self.working.state.turns.queued)
        try:
            sent = self.do(send)
        except TurnInProgress:
            assert took == "reject"
            assert running is not None
            return
        except QueueFull:
            assert waiting >= QUEUE_MAX
            return
        except AdmissionRefused:
            return
        assert isinstance(sent, Sent)
        self.sent[message_id] = send, sent
        turns = self.working.state.turns
        if running is None:
            assert sent.overlapped is None
        elif took == "rollback":
            assert sent.overlapped == "rollback" or not is_whole
        else:
            assert sent.overlapped == took
        if sent.overlapped in ("interrupt", "rollback"):
            assert turns.running is not None
            assert running is not None
            assert turns.running.turn_id == sent.turn_id
            self._check_made_room(length, sent.overlapped, running)
        if message_id in turns.queued:
            assert waiting < QUEUE_MAX
            assert sent.waits_for == turns.waits_for
            steered = running.turn_id if running is not None and took == "steer" else None
            assert turns.queued[message_id].steers == steered

    def _check_made_room(self, length: int, overlapped: str, running: RunningTurn) -> None:
        """What an interrupt or a rollback has written, from the seq that the log ended at."""
        written = self.events[length:]
        ended = next(event for event in written if isinstance(event, TurnEndedEvent))
        rolled_back = overlapped == "rollback"
        assert ended.outcome == ("rolled_back" if rolled_back else "interrupted")
        if rolled_back:
            left = [event for event in self.working.state.view if event.turn_id == ended.turn_id]
            assert not left, "what was rolled back is in the view"
            assert not self._forgotten(running.turn_id), "a summary tells of what was taken back"
            again = [event.message_id for event in written if isinstance(event, MessageQueuedEvent)]
            assert again == [message.message_id for message in running.messages[1:]]
            assert set(again) <= set(self.working.state.turns.queued)

    def _send_again(self, n: int, on_overlap: OnOverlap | None) -> None:
        send, sent = list(self.sent.values())[n % len(self.sent)]
        length = len(self.events)
        again = self.do(replace(send, on_overlap=on_overlap))
        assert isinstance(again, Sent)
        assert again.is_duplicate
        assert again.seq == sent.seq
        assert len(self.events) == length

    def _replace(self, n: int) -> None:
        """A message replaces one that was sent before, wherever that has gone."""
        if not self.sent:
            return
        ids = list(self.sent)
        target = ids[-1 - n // 6 % min(len(ids), 4)] if n < 54 else "never sent"
        on_overlap = (*POLICIES, None)[n % 6]
        state = self.working.state
        before, turns = state.view, state.turns
        running, queued, was_paused = turns.running, list(turns.queued), turns.is_paused
        steers = turns.queued[target].steers if target in queued else None
        message_id = f"m{len(self.sent)}"
        send = Send(message_id, message_id, on_overlap=on_overlap, replaces=target)
        length = len(self.events)
        try:
            sent = self.do(send)
        except TurnInProgress:
            assert running is not None
            assert (on_overlap or self.settings.on_overlap) == "reject"
        except QueueFull:
            assert was_paused
            assert running is None
            assert target not in queued
            assert len(queued) >= QUEUE_MAX
        except MessageNotFound:
            assert target == "never sent"
        except NotReplaceable as refused:
            self._check_not_replaceable(target, refused.reason)
        else:
            assert isinstance(sent, Sent)
            self.sent[message_id] = send, sent
            assert (on_overlap or self.settings.on_overlap) != "reject" or running is None
            if target in queued:
                queued[queued.index(target)] = message_id
                assert list(self.working.state.turns.queued) == queued, "not in the other's place"
                assert self.working.state.turns.queued[message_id].steers == steers
                assert self.working.state.turns.running == running
                assert self.working.state.view == before
                return
            self._check_replaced(target, before, running, length)
            if running is None and was_paused:
                assert sent.waits_for == "resume"
                assert next(iter(self.working.state.turns.queued)) == message_id
            else:
                now = self.working.state.turns.running
                assert now is not None
                assert [message.message_id for message in now.messages] == [message_id]
                assert sent.overlapped == (None if running is None else "rollback")
                again = [] if running is None else [m.message_id for m in running.messages[1:]]
                assert set(self.working.state.turns.queued) == {*queued, *again}
            return
        assert len(self.events) == length

    def _check_not_replaceable(self, target: str, reason: str) -> None:
        said = [e for e in self.events if isinstance(e, UserMessageEvent) and not e.is_reminder]
        message = next((event for event in said if event.message_id == target), None)
        assert target in self.sent, "what was never sent is not found"
        in_view = {event.id for event in self.working.state.view}
        match reason:
            case "not_in_view":
                assert message is None or message.id not in in_view
            case "joined":
                assert message is not None
                first = next(event for event in said if event.turn_id == message.turn_id)
                assert first is not message
            case "condensed":
                assert any(isinstance(event, CondensationEvent) for event in self.events)
            case _:
                assert self.by_hand

    def _check_replaced(
        self, target: str, before: View, running: RunningTurn | None, length: int
    ) -> None:
        """Nothing is left of the turns from the target's on; all else is as it was."""
        at = next(n for n, e in enumerate(before) if getattr(e, "message_id", None) == target)
        gone = {event.turn_id for event in before[at:] if event.turn_id is not None}
        assert gone.isdisjoint(event.turn_id for event in before[:at]), "not the turn's first"
        view = self.working.state.view
        left = [event for event in view if event.turn_id in gone]
        assert not left, "what was replaced is in the view"
        stays = [event for event in before if event.turn_id not in gone]
        assert list(view[: len(stays)]) == stays, "what was not replaced is gone"
        for turn_id in gone:
            assert turn_id is not None
            assert not self._forgotten(turn_id), "a summary tells of what was replaced"
        ended = [e for e in self.events[length:] if isinstance(e, TurnEndedEvent)]
        assert [(e.turn_id, e.outcome) for e in ended] == (
            [] if running is None else [(running.turn_id, "rolled_back")]
        )

    def _pause(self, _: int) -> None:
        if self.working.state.seq:
            was_paused = self.working.state.turns.is_paused
            assert self.do(Pause()) is not was_paused
            assert self.working.state.turns.is_paused

    def _resume(self, _: int) -> None:
        turns = self.working.state.turns
        was_paused, running, confirmed = turns.is_paused, turns.running, turns.confirmed
        try:
            assert self.do(Resume()) is was_paused
        except AdmissionRefused:
            return
        assert not turns.is_paused
        self._check_gone_on(running, confirmed)

    def _check_gone_on(self, running: RunningTurn | None, unstarted: Sequence[str]) -> None:
        """The turn that was held goes on, if its agent can, and knows what it may run."""
        turns = self.working.state.turns
        if running is not None and self.settings.is_resumable:
            assert turns.running == running
            if turns.waits_for is None and unstarted:
                open_calls = self.working.state.admission.open_calls
                assert self.runs[-1].unstarted.issuperset(c for c in unstarted if c in open_calls)

    def _confirm(self, n: int) -> None:
        turns = self.working.state.turns
        awaiting, was_paused, running = turns.awaiting, turns.is_paused, turns.running
        answers: dict[str, bool | str]
        if n < 36:
            answers = dict.fromkeys(awaiting, n % 2 == 0)
            command = Answer(n % 2 == 0)
        else:
            answers = {c: (True, "no", False)[(n + at) % 3] for at, c in enumerate(awaiting)}
            command = Answer(answers)
        try:
            assert self.do(command)
        except NotConfirmable:
            assert not awaiting
            return
        assert awaiting
        assert not turns.awaiting
        self.answered.append(answers)
        confirmed = tuple(call for call, answer in answers.items() if answer is True)
        self._check_gone_on(running, confirmed)
        assert self.rejected.isdisjoint(confirmed)
        self.rejected.update(set(answers).difference(confirmed))
        if was_paused and turns.is_paused:
            assert turns.confirmed == confirmed

    def _answer_again(self, n: int) -> None:
        """The same answers once more, or nearly the same: some time after they were given."""
        awaiting = self.working.state.turns.awaiting
        if awaiting:
            for wrong in ({*awaiting, "another call"}, set(awaiting[1:])):
                self._check_not_confirmable(Answer(dict.fromkeys(wrong, True)))
        if not self.answered:
            return
        answers = dict(self.answered[n // 4 % len(self.answered)])
        length = len(self.events)
        if n % 4 == 0:
            assert self.do(Answer(answers)) is False
        else:
            last = list(answers)[-1]
            if n % 4 == 1 and isinstance(answers[last], str):
                answers[last] = "for another reason"
                if not self.is_seen_rejected(last):
                    return  # the reason has left the view
            elif n % 4 == 1:
                del answers[last]
            elif n % 4 == 2:
                answers[last] = answers[last] is not True
            else:
                answers["another call"] = True
            self._check_not_confirmable(Answer(answers))
        assert len(self.events) == length

    def _check_not_confirmable(self, command: Answer) -> None:
        try:
            self.do(command)
        except NotConfirmable:
            return
        raise AssertionError("other answers than those that were given, or to other calls")

    def is_seen_rejected(self, tool_call_id: str) -> bool:
        return any(
            isinstance(event, UserRejectEvent) and event.tool_call_id == tool_call_id
            for event in self.working.state.view
        )

    def _cancel(self, n: int) -> None:
        if not self.sent:
            return
        send, sent = list(self.sent.values())[n % len(self.sent)]
        turns = self.working.state.turns
        is_queued = send.message_id in turns.queued
        running = turns.running
        joined = running is not None and send.message_id in {
            message.message_id for message in running.messages
        }
        done = self.do(CancelTurn(send.message_id, sent.turn_id))
        assert done == (is_queued or joined)
        if is_queued:
            assert send.message_id not in turns.queued
        if joined:
            assert running is not None
            ended = [e for e in self.events if isinstance(e, TurnEndedEvent)]
            assert (ended[-1].turn_id, ended[-1].outcome) == (running.turn_id, "interrupted")

    def _crash(self, n: int) -> None:
        """The process dies; another opens the log, and recovers as `on_start` does.

        Now and then with another agent, which can be run again where the first could not, or not.
        """
        if n % 4 == 0:
            self.settings = replace(self.settings, is_resumable=not self.settings.is_resumable)
        state, broken = Folded.from_events(self.events)
        assert not broken
        assert state == self.working.state
        self.working = WorkingState("c", self.working.epoch + 1, self.settings, state)
        self.said, self.attempt, self.asked = [], 0, None
        is_held = state.turns.waits_for is not None
        if (state.turns.has_open_turns and not is_held) or n % 2:
            length = len(self.events)
            self.do(Recover())
            if is_held:
                assert len(self.events) == length
                assert self.working.agent_of is None
        else:
            self.check()

    def _condense(self, n: int) -> None:
        view = self.working.state.view
        cuts = view.manipulation_indices
        if n % 2:
            # The longest run that may be forgotten: older steps of the running turn among them.
            spans = [
                (begin, end)
                for begin, end in combinations(cuts, 2)
                if not any(event.id in view.protected for event in view[begin:end])
            ]
            begin, end = max(spans, key=lambda span: span[1] - span[0], default=(0, 0))
        else:
            begin, end = sorted((cuts[n % len(cuts)], cuts[n // 3 % len(cuts)]))
        # Every other time a run that may be forgotten, else one that may be refused.
        runs = [view[begin:end]] if n % 2 else find_runs(view, 0, len(view))
        for run in runs[-1:]:
            ids = tuple(event.id for event in run)
            summary = "short" if n % 3 else None
            self.do(Propose(self.working.epoch, Proposal(ids, summary), view))

    def _retract(self, n: int) -> None:
        turn_ids = {event.turn_id: None for event in self.working.state.view if event.turn_id}
        if turn_ids and not self.working.state.admission.open_calls:
            turn_id = list(turn_ids)[n % len(turn_ids)]
            running = self.working.state.turns.running
            if running is not None and turn_id == running.turn_id:
                with pytest.raises(NotWhileTurnRuns):
                    self.do(Retract(turn_id=turn_id))
                return
            with suppress(AdmissionRefused):  # it may hold on to what was appended by hand
                self.do(Retract(turn_id=turn_id))

    def _interrupt(self, n: int) -> None:
        running = self.working.state.turns.running
        turn_ids = [event.turn_id for event in self.events if isinstance(event, TurnStartedEvent)]
        turn_id = turn_ids[-1 - n // 2 % len(turn_ids)] if turn_ids and n % 2 else None
        is_meant = running is not None and turn_id in (None, running.turn_id)
        length = len(self.events)
        assert self.do(Interrupt(turn_id)) is is_meant
        if not is_meant:
            assert len(self.events) == length
            return
        ended = [event for event in self.events[length:] if isinstance(event, TurnEndedEvent)]
        assert running is not None
        assert [(event.turn_id, event.outcome) for event in ended] == [
            (running.turn_id, "interrupted")
        ]

    def _undo(self, number: int) -> None:
        state = self.working.state
        running = state.turns.running
        said = [e for e in state.view if isinstance(e, UserMessageEvent) and not e.is_reminder]
        said = [event for event in said if event.turn_id is not None]
        newest = said[-1].turn_id if said else None
        named = (None, newest, said[0].turn_id if said else None, "unknown")[number % 4]
        length = len(self.events)
        try:
            messages = self.do(Undo(named))
        except ConversationNotFound:
            assert not length
        except TurnInProgress:
            assert running is not None
        except NothingToRetract:
            assert newest is None or named == "unknown"
        except NotRetractable as refused:
            if refused.reason == "not_newest":
                assert named in {event.turn_id for event in said} - {newest}
            elif refused.reason == "by_hand":
                assert self.by_hand
            else:
                assert any(isinstance(event, CondensationEvent) for event in self.events)
        else:
            assert running is None
            assert newest is not None
            assert named in {None, newest}
            assert messages == tuple(event for event in said if event.turn_id == newest)
            assert not [event for event in self.working.state.view if event.turn_id == newest]
            assert [event.kind for event in self.events[length:]] == ["retraction"]
            assert not self._forgotten(newest), "a summary tells of what was taken back"
            return
        assert len(self.events) == length

    def _forgotten(self, turn_id: str) -> list[str]:
        """The events of a turn that a condensation has forgotten."""
        forgotten = {
            event_id
            for event in self.events
            if isinstance(event, CondensationEvent)
            for event_id in event.forgotten_event_ids
        }
        return [
            event.id for event in self.events if event.turn_id == turn_id and event.id in forgotten
        ]

    # --- what agents do --------------------------------------------------------------------------

    def _run(self) -> Run | None:
        alive = [run for run in self.runs if not run.is_over and run.epoch == self.working.epoch]
        return alive[-1] if alive and alive[-1].held is None else None

    def _append(self, run: Run, *events: Event, suspends: bool = False, ends: bool = False) -> None:
        try:
            is_held = self.working.state.turns.waits_for is not None
            self.do(TurnAppend(run.turn_id, run.epoch, events, suspends, ends), run)
            run.is_over |= ends and not is_held
        except AdmissionRefused:
            return  # a call was opened by hand

    def _agent(self, n: int) -> None:
        """The run that goes on does something; which, is in the number."""
        run = self._run()
        if run is None:
            return
        mine = [e for e in self.working.state.admission.open_calls.values() if e.turn_id]
        if mine and n % 5 == 4:
            self._begin_step(run)  # of an agent that does not wait for its calls
            return
        if mine:
            self._answer(run, mine[n % len(mine)])
            return
        match n % 8:
            case 0 | 6:
                self._begin_step(run)
            case 7:
                request = StepRequest(view_seq=self.working.state.view.seq, model=f"m{n}")
                self.do(NoteRequest(run.turn_id, run.epoch, request), run)
            case 1:
                said = AgentMessageEvent(**self.stamp(run.turn_id), content=f"said {n}")
                ends = n // 8 % 2 == 1
                self._append(run, said, StepFinishedEvent(**self.stamp(run.turn_id)), ends=ends)
            case 2:
                self._call(run, 1 + n // 6 % 3, asks=False)
            case 3:
                self._call(run, 1 + n // 6 % 2, asks=self.settings.is_resumable)
            case 4:
                self.do(Stream(run.turn_id, run.epoch, "…", is_first=n // 8 % 2 == 0), run)
            case _:
                note = UserMessageEvent(
                    **self.stamp(run.turn_id),
                    content="try another way",
                    is_reminder=True,
                )
                self._append(run, note)

    def _begin_step(self, run: Run) -> None:
        turns = self.working.state.turns
        is_held = turns.waits_for is not None
        begins = self.do(BeginStep(run.turn_id, run.epoch), run)
        assert (begins is True) == (not is_held), "a step begins in a turn that is held"
        if not is_held and not self.working.state.admission.open_calls:
            steered = [waiting.steers for waiting in turns.queued.values() if waiting.steers]
            assert steered[:1] != [run.turn_id], "who steers this turn first has not joined it"
        assert not is_held or run.is_over or run.held

    def _call(self, run: Run, calls: int, *, asks: bool) -> None:
        response_id = self.new_id()
        actions = [
            ActionEvent(
                **self.stamp(run.turn_id),
                tool_call_id=self.new_id(),
                tool_name="look",
                llm_response_id=response_id,
            )
            for _ in range(calls)
        ]
        calls_made = tuple(action.tool_call_id for action in actions)
        if not asks:
            length = len(self.events)
            self._append(run, *actions)
            if len(self.events) > length:
                self.started.update(calls_made)
            return
        requested = ConfirmationRequestedEvent(**self.stamp(run.turn_id), tool_call_ids=calls_made)
        self._append(run, *actions, requested, suspends=True)

    def _answer(self, run: Run, action: ActionEvent) -> None:
        self.started.add(action.tool_call_id)
        result = ObservationEvent(
            **self.stamp(run.turn_id),
            tool_call_id=action.tool_call_id,
            content="seen",
        )
        self._append(run, result)

    def _end(self, n: int) -> None:
        run = self._run()
        if run is not None:
            error = None if n % 3 else "RuntimeError"
            is_stuck = n % 3 == 0 and n % 2 == 0
            is_held = self.working.state.turns.waits_for is not None
            done = self.do(EndTurn(run.turn_id, run.epoch, error, is_stuck=is_stuck), run)
            assert (done is True) == (not is_held), "a turn ends while it is held"
            run.is_over |= done is True

    def _repair(self, n: int) -> None:
        run = self._run()
        if run is not None and not self.working.state.admission.open_calls:
            self.do(RepairView(run.turn_id, run.epoch, ("gone",) * (n % 2), "no"), run)

    def _late(self, n: int) -> None:
        """A run that is over says something all the same, as libraries do."""
        running = self.working.state.turns.running
        late = [
            run
            for run in self.runs
            if running is None or run.turn_id != running.turn_id or run.epoch != self.working.epoch
        ]
        if not late:
            return
        run = late[n % len(late)]
        said = AgentMessageEvent(**self.stamp(run.turn_id), content="late")
        commands: list[Command] = [
            TurnAppend(run.turn_id, run.epoch, (said,)),
            Stream(run.turn_id, run.epoch, "late"),
            BeginStep(run.turn_id, run.epoch),
            EndTurn(run.turn_id, run.epoch),
            RepairView(run.turn_id, run.epoch, (), "late"),
        ]
        try:
            self.do(commands[n % len(commands)], run)
        except StaleTurn:
            return
        raise AssertionError("what came late was taken")

    def _append_by_hand(self, n: int) -> None:
        if not self.by_hand:
            return
        open_calls = self.working.state.admission.open_calls
        event: Event
        if open_calls:
            call_id = list(open_calls)[n % len(open_calls)]
            event = ObservationEvent(**self.stamp(None), tool_call_id=call_id, content="by hand")
        elif n % 2:
            event = UserMessageEvent(**self.stamp(None), content="by hand")
        else:
            event = ActionEvent(
                **self.stamp(None),
                tool_call_id=self.new_id(),
                tool_name="by hand",
                llm_response_id=self.new_id(),
            )
            if self.working.state.turns.running is not None:
                with pytest.raises(NotWhileTurnRuns):
                    self.do(Append(event))
                return
        self.do(Append(event))


MOVES: dict[str, Callable[[Turns, int], None]] = {
    "send": Turns._send,
    "agent": Turns._agent,
    "end": Turns._end,
    "pause": Turns._pause,
    "resume": Turns._resume,
    "confirm": Turns._confirm,
    "cancel": Turns._cancel,
    "crash": Turns._crash,
    "late": Turns._late,
    "condense": Turns._condense,
    "retract": Turns._retract,
    "replace": Turns._replace,
    "answer again": Turns._answer_again,
    "interrupt": Turns._interrupt,
    "undo": Turns._undo,
    "repair": Turns._repair,
    "by hand": Turns._append_by_hand,
}
OFTEN = ("send", "send", "replace", "agent", "agent", "agent", "end", "confirm", "resume")

moves = st.lists(
    st.tuples(st.sampled_from((*OFTEN, *MOVES)), st.integers(0, 55)), min_size=5, max_size=60
)
conversation_settings = st.builds(
    ConversationSettings,
    on_overlap=st.sampled_from(POLICIES),
    unfinished=st.sampled_from(["end", "resume"]),
    is_resumable=st.booleans(),
    system_prompt=st.sampled_from([None, "be kind"]),
)


class LogReader:
    """Reads a log from its first event, and works turns, calls and messages out from it."""

    def __init__(self, events: Sequence[Event], *, by_hand: bool = False) -> None:
        self._events = events
        self._by_hand = by_hand
        self._running: str | None = None
        self._turns: set[str] = set()
        self._open: dict[str, ActionEvent] = {}
        self._queued: dict[str, MessageQueuedEvent] = {}
        self._first: dict[str, int] = {}
        """The seq at which each message came first; if it replaces another, the seq of that."""
        self._exchanged: tuple[str, MessageQueuedEvent] | None = None

    def check(self) -> None:
        for seq, event in enumerate(self._events, 1):
            self._read_turn(event)
            self._read_call(event)
            self._read_message(event, seq)

    def _read_turn(self, event: Event) -> None:
        match event:
            case TurnStartedEvent(turn_id=str(turn_id)):
                assert self._running is None, "a turn starts while another runs"
                assert turn_id not in self._turns, "a turn starts twice"
                self._running = turn_id
                self._turns.add(turn_id)
            case MessageQueuedEvent() | MessageWithdrawnEvent():
                pass
            case TurnEndedEvent(turn_id=turn_id):
                assert turn_id == self._running, "a turn ends that does not run"
                assert self._by_hand or not self._open, "a turn ends with a call open"
                self._running = None
            case Event(turn_id=str(turn_id)):
                is_result = self._by_hand and isinstance(event, RESULT_CLASSES)
                assert turn_id == self._running or is_result, "of a turn that does not run"
            case _:
                pass

    def _read_call(self, event: Event) -> None:
        match event:
            case ActionEvent(tool_call_id=call_id):
                self._open[call_id] = event
            case RetractionEvent():
                assert not self._open, "a retraction while a call is open"
            case Event() if isinstance(event, RESULT_CLASSES):
                assert self._open.pop(event.tool_call_id, None), "a result for no open call"
            case UserMessageEvent() | AgentMessageEvent():
                assert not self._open, "a message between a call and its result"
            case _:
                pass

    def _read_message(self, event: Event, seq: int) -> None:
        if self._exchanged is not None:
            (message_id, withdrawn), self._exchanged = self._exchanged, None
            assert isinstance(event, MessageQueuedEvent), "withdrawn, and not replaced"
            assert (event.message_id, event.replaces) == (message_id, withdrawn.message_id)
            assert event.steers == withdrawn.steers
        match event:
            case MessageQueuedEvent(message_id=message_id):
                assert message_id not in self._queued
                assert event.queued_again == (message_id in self._first)
                if event.place is not None:
                    assert event.place == self._first[event.replaces or ""], "not the target's"
                    seq = event.place
                self._first.setdefault(message_id, seq)
                self._queued[message_id] = event
            case MessageWithdrawnEvent(message_id=message_id):
                withdrawn = self._queued.pop(message_id)
                if event.replaced_by is not None:
                    self._exchanged = event.replaced_by, withdrawn
            case UserMessageEvent(message_id=str(message_id)):
                waited = self._queued.pop(message_id, None)
                if waited is None:
                    assert message_id not in self._first, "a chat message twice"
                    self._first[message_id] = seq
                    return
                assert event.replaces == waited.replaces
                assert event.queued_event_id == waited.id
                if event.turn_id == waited.turn_id:
                    # Its own turn: nobody who waited longer waits still.
                    mine = self._first[message_id]
                    assert all(self._first[other] > mine for other in self._queued)
                else:
                    assert waited.steers == event.turn_id, "it joins a turn that it does not steer"
                    before = [
                        other
                        for other, one in self._queued.items()
                        if one.steers is not None and self._first[other] < self._first[message_id]
                    ]
                    assert not before, f"it joins before {before}, which came first and steer too"
            case _:
                pass
