"""The invariants, each with an id and a sentence, and what checks them.

`Oracles` watches the disk before every step, and keeps beside each log a fold of its own and what
everybody was told: acknowledged chat messages, views, ends of turns, events that subscribers saw,
tools that ran. What can only be known in the end is checked in `check_end`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from turnkeeper.runtime.testing import Simulation

from .._memory_journal import MemoryStore
from ..events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    Event,
    ForkedFromEvent,
    LoggedEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    ObservationEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    UserRejectEvent,
    decode_event,
)
from ..journal import StoredRecord
from ..state import ConversationState
from ..view import View
from ._disk import SimulatedJournal, owner_of

__all__ = ["INVARIANTS", "Oracles", "Sending", "ToolLedger"]

INVARIANTS: Final = {
    "L1": "what was acknowledged is in the log, at the seq that was told",
    "L2": "what is in a log never changes and never leaves",
    "L3": "seqs have no gaps, and an event id occurs once",
    "L4": "what was refused is not in the log, and what is in the log was sent",
    "L5": "what was acknowledged before another was first sent comes before it in the log",
    "L6": "a chat message is in the log once, however often it was sent",
    "V1": "every view that anybody saw is the fold of a prefix of its log, and not an old one",
    "V2": "the view kept event by event is the one rebuilt from the log",
    "V3": "a view never has a call without its result behind one with a result, nor a lone result",
    "O1": "an epoch is granted to one owner",
    "O2": "no external effect starts under an owner whose lease ran out and was taken over",
    "O3": "epochs in a log never decrease, and each event is of the newest epoch",
    "T1": "every call gets exactly one result, before anything else is said",
    "T2": "a call starts once",
    "T3": "a turn runs alone, ends once, and everything of it is in between",
    "T4": "a call whose result says that it did not happen was not started",
    "T5": "a result is what the tool returned",
    "T6": "chat messages that wait get their turns in their order",
    "T7": "what is kept of an interrupted answer is what was said of it, and is nowhere else",
    "T8": "a model is not asked while a call is open",
    "T9": "a call that waits for a confirmation does not start without it",
    "T10": "of a turn that was rolled back nothing is left in the view",
    "T11": "a chat message that had joined a turn waits again when that is rolled back",
    "F1": "a fork begins with nothing that runs or waits",
    "C1": "nothing is seen before it is in the log: no event, reply, action or view",
    "S1": "a subscriber sees every event once, in order",
    "E1": "what the sender was told of the end of its turn is what the log says",
    "M2": "every request ends: with an answer, an error, or its node",
    "B1": "queues and buffers stay under their limits",
    "P1": "after the faults have ended, all accepted work is done in bounded time",
    "R1": "a node that is left ends in bounded time, and leaves nothing behind",
}
"""Beside these, the simulator's own: `world`, `deadlock`, `budget`, `orphan`, `harness`."""

_RESULTS = (ObservationEvent, AgentErrorEvent, UserRejectEvent)


@dataclass(slots=True)
class Sending:
    """One chat message, as its sender knows it."""

    conversation_id: str
    message_id: str
    content: str
    sender: str
    number: int
    first_sent_at: int
    """Before which step."""
    attempts: int = 0
    acknowledged_at: int | None = None
    seq: int = 0
    turn_id: str = ""
    refusal: str | None = None
    """Its only attempt was refused: nothing happened, it said."""
    end: tuple[str, str] | None = None
    """The outcome and the reply, as the sender was told."""


@dataclass(slots=True)
class ToolLedger:
    """What tools did outside."""

    started: dict[str, str] = field(default_factory=dict)
    """Each call id, with the node that started it."""
    returned: dict[str, set[str]] = field(default_factory=dict)
    """By call id; an idempotent call may have run more than once."""


class _Shadow:
    """One log, as it was last seen, with a fold of its own."""

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.records: list[StoredRecord] = []
        self.events: list[Event] = []
        self.state = ConversationState(conversation_id=conversation_id, admission="observe")
        self.views: dict[tuple[str, ...], int] = {(): 0}
        """Each view there ever was, with the last seq that it was the view at."""
        self.view_ids: list[tuple[str, ...]] = [()]
        self.calls: dict[str, int] = {}
        self.unconfirmed: set[str] = set()
        self.epoch = 0


class Oracles:
    """All that is known, and what must hold of it."""

    def __init__(self, simulation: Simulation, store: MemoryStore, *, queued_max: int) -> None:
        self.simulation = simulation
        self.tools = ToolLedger()
        self.sendings: dict[str, Sending] = {}
        self.streamed: dict[str, set[str]] = {}
        """By turn: all that its agent streamed, each attempt as far as it had got."""
        self.said: dict[str, int] = {}
        """By event id: the seq that the agent was told."""
        self.last_writer: SimulatedJournal | None = None
        """Whose write has just landed; whoever acts on it takes it away."""
        self._store = store
        self._queued_max = queued_max
        self._shadows: dict[str, _Shadow] = {}
        self._acknowledged: dict[str, list[tuple[int, int]]] = {}

    def broken(self, invariant: str, detail: str) -> None:
        self.simulation.broken(invariant, f"{INVARIANTS[invariant]}: {detail}")

    # --- before every step -----------------------------------------------------------------------

    def observe(self) -> None:
        """Look at what has been written since the last step."""
        for conversation_id, log in self._store.logs().items():
            shadow = self._shadows.get(conversation_id)
            if shadow is None:
                shadow = self._shadows[conversation_id] = _Shadow(conversation_id)
            records = log.records
            known = len(shadow.records)
            if len(records) < known or (known and records[known - 1] is not shadow.records[-1]):
                self.broken("L2", f"{conversation_id} at seq {known}")
                return
            for record in records[known:]:
                self._grew(shadow, record, log.epoch)

    def _grew(self, shadow: _Shadow, record: StoredRecord, epoch: int) -> None:
        name = shadow.conversation_id
        if record.seq != len(shadow.records) + 1:
            self.broken("L3", f"seq {record.seq} of {name} is at {len(shadow.records) + 1}")
        event = decode_event(record.payload, kind=record.kind)
        if record.epoch < shadow.epoch or record.epoch > epoch:
            self.broken(
                "O3", f"epoch {record.epoch} of {name} after {shadow.epoch}, newest {epoch}"
            )
        shadow.epoch = record.epoch
        shadow.records.append(record)
        shadow.events.append(event)
        shadow.state.fold(event)
        view = tuple(e.id for e in shadow.state.view)
        shadow.views[view] = record.seq
        shadow.view_ids.append(view)
        self.simulation.note(f"{name}[{record.seq}] e{record.epoch} {brief(event)}")
        self._check_view(shadow, record.seq)
        self.last_writer = owner_of(self._store, name)
        match event:
            case ActionEvent():
                shadow.calls[event.tool_call_id] = record.seq
            case ConfirmationRequestedEvent(tool_call_ids=calls):
                shadow.unconfirmed.update(calls)
            case ConfirmationGivenEvent(confirmed=True):
                shadow.unconfirmed.clear()
            case TurnEndedEvent(outcome="rolled_back", turn_id=turn_id):
                if any(e.turn_id == turn_id for e in shadow.state.view):
                    self.broken("T10", f"{name}[{record.seq}] turn {turn_id}")
            case _:
                pass
        self._mark(event)
        # What a rollback puts back into the queue had its place there before.
        waiting = [q for q in shadow.state.turns.queued.values() if not q.queued_again]
        if len(waiting) > self._queued_max:
            self.broken("B1", f"{len(waiting)} chat messages wait in {name}")

    def _mark(self, event: Event) -> None:
        match event:
            case AgentErrorEvent(may_have_happened=True):
                self.simulation.mark("orphan call resolved")
            case TurnEndedEvent():
                self.simulation.mark(f"turn {event.outcome}")
            case MessageQueuedEvent(steers=str()):
                self.simulation.mark("steered")
            case _ if event.kind in _MARKED_KINDS:
                self.simulation.mark(event.kind)
            case _:
                pass

    def _check_view(self, shadow: _Shadow, seq: int) -> None:
        called = {e.tool_call_id for e in shadow.state.view if isinstance(e, ActionEvent)}
        answered = {e.tool_call_id for e in shadow.state.view if isinstance(e, _RESULTS)}
        still_open = shadow.state.admission.open_calls.keys()
        if answered - called or not called - answered <= still_open:
            self.broken("V3", f"{shadow.conversation_id} at {seq}")

    # --- as it happens ---------------------------------------------------------------------------

    def head(self, conversation_id: str) -> int:
        return len(self._store.log(conversation_id).records)

    def floor(self, conversation_id: str, journal: SimulatedJournal) -> int:
        """The seq that a view read there from now on must have reached; 0: it may be an old one."""
        if owner_of(self._store, conversation_id) is not journal:
            return 0
        return max((seq for _, seq in self._acknowledged.get(conversation_id, ())), default=0)

    def acknowledged(self, sending: Sending, seq: int, turn_id: str, *, is_duplicate: bool) -> None:
        """The sender was told that its chat message is durable."""
        self.observe()
        name = sending.conversation_id
        log = self._store.log(name).records
        if not 0 < seq <= len(log):
            self.broken("C1", f"{sending.message_id} is said to be at seq {seq} of {name}")
            return
        event = decode_event(log[seq - 1].payload)
        if getattr(event, "message_id", None) != sending.message_id:
            self.broken("L1", f"{sending.message_id} is not at seq {seq} of {name}: {event.kind}")
        if sending.seq not in (0, seq):
            self.broken("L1", f"{sending.message_id} was at seq {sending.seq}, and is at {seq}")
        if is_duplicate:
            self.simulation.mark("dedupe hit")
        if sending.acknowledged_at is None:
            sending.acknowledged_at = self.simulation.steps
            self._acknowledged.setdefault(name, []).append((self.simulation.steps, seq))
        sending.seq, sending.turn_id = seq, turn_id

    def saw_event(self, conversation_id: str, logged: LoggedEvent, who: str) -> None:
        """Somebody was given an event."""
        log = self._store.log(conversation_id).records
        seq, event = logged
        if not 0 < seq <= len(log) or log[seq - 1].event_id != event.id:
            self.broken("C1", f"{who} saw {event.kind} at seq {seq} of {conversation_id}")

    def saw_view(self, conversation_id: str, view: View, who: str, *, floor: int) -> None:
        """Somebody was given a view."""
        self.observe()
        shadow = self._shadows.get(conversation_id)
        ids = tuple(event.id for event in view)
        newest = None if shadow is None else shadow.views.get(ids)
        if newest is None:
            self.broken("V1", f"{who} saw {len(ids)} events of {conversation_id}, never a view")
        elif newest < floor:
            self.broken(
                "V1", f"{who} saw the view of {conversation_id} at {newest}, before {floor}"
            )

    def asks_model(self, conversation_id: str, view: View) -> None:
        """A model is asked."""
        called = {e.tool_call_id for e in view if isinstance(e, ActionEvent)}
        answered = {e.tool_call_id for e in view if isinstance(e, _RESULTS)}
        if called - answered:
            self.broken("T8", f"{conversation_id}: {sorted(called - answered)}")

    def saw_fork(self, fork_id: str) -> None:
        """A conversation was forked, and nobody has sent to the fork."""
        self.observe()
        shadow = self._shadows.get(fork_id)
        forked = [] if shadow is None else shadow.events
        state = ConversationState(admission="observe")
        begins = max(
            (n for n, event in enumerate(forked) if isinstance(event, ForkedFromEvent)), default=0
        )
        epoch = None if shadow is None else shadow.records[begins].epoch
        for n, event in enumerate(forked):
            assert shadow is not None, "it has events"
            if n <= begins or shadow.records[n].epoch == epoch:
                state.fold(event)
        if state.turns.is_unfinished:
            self.broken("F1", fork_id)

    def starts_tool(
        self,
        conversation_id: str,
        call_id: str,
        journal: SimulatedJournal,
        *,
        is_idempotent: bool,
    ) -> None:
        """A tool begins to act outside."""
        self.observe()
        if call_id in self.tools.started and not is_idempotent:
            self.broken("T2", f"call {call_id} on {self.tools.started[call_id]}, then on "
                        f"{journal.node}")  # fmt: skip
        self.tools.started[call_id] = repr(journal.node)
        self.simulation.mark("tool started")
        shadow = self._shadows.get(conversation_id)
        if shadow is None or call_id not in shadow.calls:
            self.broken("C1", f"call {call_id} starts, and its action is not in the log")
        elif call_id in shadow.unconfirmed:
            self.broken("T9", f"call {call_id} of {conversation_id}")
        owner = owner_of(self._store, conversation_id)
        if owner is not journal and (journal, conversation_id) not in journal.lost_by_force:
            self.broken("O2", f"call {call_id} of {conversation_id} starts on {journal.node}, and "
                        f"{owner and owner.node} owns it")  # fmt: skip

    # --- in the end ------------------------------------------------------------------------------

    def check_end(self) -> None:
        """All that must hold when everything has been done."""
        self.observe()
        for shadow in self._shadows.values():
            self._check_log(shadow)
        for sending in self.sendings.values():
            self._check_sending(sending)
        self._check_order()

    def _check_log(self, shadow: _Shadow) -> None:
        name = shadow.conversation_id
        events = shadow.events
        seen: set[str] = set()
        for seq, event in enumerate(events, 1):
            if event.id in seen:
                self.broken("L3", f"event {event.id} twice in {name}, again at seq {seq}")
            seen.add(event.id)
        if tuple(e.id for e in View.from_events(events)) != shadow.view_ids[-1]:
            self.broken("V2", f"the view of {name} is not the rebuilt one")
        if shadow.state.turns.is_unfinished:
            self.broken("P1", f"{name} has unfinished turns in the end")
        _Turns(self, name).check(events)

    def _check_sending(self, sending: Sending) -> None:
        name, message_id = sending.conversation_id, sending.message_id
        shadow = self._shadows.get(name)
        events = [] if shadow is None else shadow.events
        found = [
            (seq, event)
            for seq, event in enumerate(events, 1)
            if getattr(event, "message_id", None) == message_id
        ]
        kept = [f for f in found if isinstance(f[1], MessageQueuedEvent) and not f[1].queued_again]
        begun = [f for f in found if isinstance(f[1], UserMessageEvent)]
        if len(kept) > 1 or (not kept and len(begun) > 1):
            self.broken("L6", f"{message_id} is in {name} at {[seq for seq, _ in found]}")
        if sending.acknowledged_at is not None and not (found and found[0][0] == sending.seq):
            self.broken("L1", f"{message_id}, acknowledged at {sending.seq} of {name}")
        if sending.refusal is not None and found:
            self.broken("L4", f"{message_id} is at {found[0][0]} of {name}, was {sending.refusal}")
        for seq, event in found:
            content = getattr(event, "content", sending.content)
            if content != sending.content:
                self.broken("L4", f"{message_id} at {seq} of {name} has another content")
        if sending.end is not None:
            self._check_told(sending, events, begun)

    def _check_told(
        self, sending: Sending, events: Sequence[Event], begun: Sequence[tuple[int, Event]]
    ) -> None:
        assert sending.end is not None, "checked by the caller"
        outcome, reply = sending.end
        if not begun:
            is_withdrawn = any(
                isinstance(e, MessageWithdrawnEvent) and e.message_id == sending.message_id
                for e in events
            )
            if outcome != "withdrawn" or not is_withdrawn:
                self.broken("E1", f"{sending.message_id} was told {outcome}, and never began")
            return
        turn_ids = {event.turn_id for _, event in begun}
        ends = [e for e in events if isinstance(e, TurnEndedEvent) and e.turn_id in turn_ids]
        if not any(e.outcome == outcome for e in ends):
            self.broken(
                "E1", f"{sending.message_id} was told {outcome}; {[e.outcome for e in ends]}"
            )
        said = [e.content for e in events
                if isinstance(e, AgentMessageEvent) and e.turn_id in turn_ids]  # fmt: skip
        if reply and reply not in said:
            self.broken("E1", f"{sending.message_id} was told {reply!r}, and {said} was said")
        # What was said before it had joined is no answer to it.
        answers = [
            e.content
            for e in events[begun[-1][0] :]
            if isinstance(e, AgentMessageEvent) and e.turn_id in turn_ids
        ]
        if outcome == "completed" and answers and reply != answers[-1]:
            self.broken("E1", f"{sending.message_id} was told {reply!r}, last was {answers[-1]!r}")

    def _check_order(self) -> None:
        for name in self._shadows:
            sent = [s for s in self.sendings.values()
                    if s.conversation_id == name and s.acknowledged_at is not None]  # fmt: skip
            sent.sort(key=lambda s: s.seq)
            # Walked from the last: nobody before it may have been sent first after its answer.
            earliest_answer, whose = float("inf"), ""
            for sending in reversed(sent):
                if sending.first_sent_at > earliest_answer:
                    self.broken("L5", f"{sending.message_id} of {name} is before {whose}")
                assert sending.acknowledged_at is not None, "filtered above"
                if sending.acknowledged_at < earliest_answer:
                    earliest_answer, whose = sending.acknowledged_at, sending.message_id


class _Turns:
    """Turns and calls of one log, worked out from its events alone."""

    def __init__(self, oracles: Oracles, name: str) -> None:
        self._oracles = oracles
        self._name = name
        self._running: str | None = None
        self._seen: set[str] = set()
        self._calls: dict[str, ActionEvent] = {}
        self._open: dict[str, ActionEvent] = {}
        self._queued: dict[str, MessageQueuedEvent] = {}
        self._said: dict[str, list[str]] = {}
        self._first: dict[str, int] = {}
        self._has_just_started = False
        self._is_fork = False
        self._joined: list[str] = []

    def check(self, events: Sequence[Event]) -> None:
        for seq, event in enumerate(events, 1):
            where = f"{self._name}[{seq}] {brief(event)}"
            self._check_turn(event, where)
            self._check_call(event, where)
            self._check_queue(event, seq, where)
            self._has_just_started = isinstance(event, TurnStartedEvent)
        if self._open:
            self._broken("T1", f"{self._name}: no result for {list(self._open)}")

    def _broken(self, invariant: str, detail: str) -> None:
        self._oracles.broken(invariant, detail)

    def _check_turn(self, event: Event, where: str) -> None:
        match event:
            case TurnStartedEvent(turn_id=str(turn_id)):
                if self._running is not None or turn_id in self._seen:
                    self._broken("T3", f"{where}: turn {self._running} runs, or it did before")
                self._running = turn_id
                self._seen.add(turn_id)
            case MessageQueuedEvent() | MessageWithdrawnEvent():
                pass
            case Event(turn_id=str(turn_id)) if turn_id != self._running:
                self._broken("T3", f"{where}: its turn {turn_id} does not run")
            case TurnEndedEvent():
                self._running = None
                lost = [m for m in self._joined[1:] if m not in self._queued]
                if event.outcome == "rolled_back" and lost:
                    self._broken("T11", f"{where}: {lost}")
                self._joined = []
            case UserMessageEvent(message_id=str(message_id)):
                self._joined.append(message_id)
            case _:
                pass
        if isinstance(event, AgentMessageEvent):
            pieces = self._oracles.streamed.get(event.turn_id or "", set())
            if not event.interrupted:
                self._said.setdefault(event.turn_id or "", []).append(event.content)
                return
            answers = self._said.get(event.turn_id or "", ())
            is_said = any(answer.startswith(event.content) for answer in answers)
            if is_said or not any(said.startswith(event.content) for said in pieces):
                self._broken("T7", f"{where}: {event.content!r} of {sorted(pieces)}")
            self._oracles.simulation.mark("partial answer kept")

    def _check_call(self, event: Event, where: str) -> None:
        tools = self._oracles.tools
        match event:
            case ActionEvent(tool_call_id=call_id):
                if call_id in self._calls:
                    self._broken("T1", f"{where}: a call id twice")
                self._calls[call_id] = self._open[call_id] = event
            case ObservationEvent() | AgentErrorEvent() | UserRejectEvent():
                call_id = event.tool_call_id
                if self._open.pop(call_id, None) is None:
                    self._broken("T1", f"{where}: a result for a call that is not open")
                is_denied = isinstance(event, UserRejectEvent) or (
                    isinstance(event, AgentErrorEvent) and not event.may_have_happened
                )
                # In a fork it is true of the fork, whatever the other conversation did later.
                if is_denied and call_id in tools.started and not self._is_fork:
                    self._broken("T4", f"{where}: it ran on {tools.started[call_id]}")
                if isinstance(event, ObservationEvent) and not event.is_error:
                    returned = tools.returned.get(call_id)
                    # A result that is too long is cut, which only its beginning tells.
                    if returned and not any(text[:100] == event.content[:100] for text in returned):
                        self._broken("T5", f"{where}: not {sorted(returned)}")
            case AgentMessageEvent() | UserMessageEvent():
                if self._open:
                    self._broken("T1", f"{where}: while {list(self._open)} have no result")
            case _:
                pass

    def _check_queue(self, event: Event, seq: int, where: str) -> None:
        match event:
            case MessageQueuedEvent():
                self._queued[event.message_id] = event
                self._first.setdefault(event.message_id, seq)
            case MessageWithdrawnEvent():
                self._queued.pop(event.message_id, None)
            case ForkedFromEvent():
                self._queued.clear()
                self._is_fork = True
            case UserMessageEvent(message_id=str(message_id)):
                self._first.setdefault(message_id, seq)
                if event.queued_event_id is not None and message_id not in self._queued:
                    self._broken("T6", f"{where}: it does not wait")
                # One that steers joins a turn out of its order; for a turn of its own it waits.
                if self._has_just_started and message_id in self._queued:
                    longest = min(self._queued, key=self._first.__getitem__)
                    if longest != message_id:
                        self._broken("T6", f"{where}: {longest} waited longer")
                self._queued.pop(message_id, None)
            case _:
                pass


_MARKED_KINDS = frozenset(
    {
        "condensation",
        "confirmation_given",
        "confirmation_requested",
        "conversation_error",
        "forked_from",
        "message_withdrawn",
        "paused",
        "resumed",
        "retraction",
        "status_changed",
    }
)


def brief(event: Event) -> str:
    """An event in a few words."""
    words = [event.kind]
    for name in ("message_id", "outcome", "interrupted", "content", "detail"):
        value = getattr(event, name, None)
        if value:
            words.append(f"{name}={value!r}" if name != "content" else repr(value)[:40])
    call_id = getattr(event, "tool_call_id", None)
    if call_id is not None:
        words.append(f"call={call_id[-8:]}")
    if event.turn_id is not None:
        words.append(f"turn={event.turn_id[-8:]}")
    return " ".join(words)
