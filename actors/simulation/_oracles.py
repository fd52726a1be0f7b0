"""The invariants, each with an id and a sentence, and what checks them.

`Oracles` watches every write to the disk. Beside each log it keeps its own fold, and everything
that clients were told: acknowledged chat messages, views, ends of turns, events that subscribers
saw, tools that ran. Invariants that can only be decided at the end are checked in `check_end`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from operator import is_not
from typing import Final

from turnkeeper.runtime.testing import Simulation

from ..core.state import Folded
from ..core.turn_table import RunningTurn
from ..core.view import View
from ..core.working_state import WhileDraining
from ..errors import CondenserTooSlow
from ..events import (
    RESULT_CLASSES,
    RESULT_KINDS,
    SEEN_KINDS,
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationEvent,
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    ConversationErrorEvent,
    Event,
    LoggedEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    ObservationEvent,
    RetractionEvent,
    StepFinishedEvent,
    StepUnfinishedEvent,
    SystemPromptEvent,
    TextDelta,
    TurnEndedEvent,
    UserMessageEvent,
    UserRejectEvent,
    decode_event,
)
from ..journal import LISTED_KINDS, Listing, Record, Snapshot, StoredRecord
from ._disk import Disk, SimulatedJournal, owner_of

__all__ = ["INVARIANTS", "Oracles", "PlainView", "Sending", "ShownAnswer", "ToolLedger"]

INVARIANTS: Final = {
    "L1": "every acknowledged event is in the log, at the seq that its sender was given",
    "L2": "an event in a log never changes and never leaves it",
    "L3": "seqs have no gaps, and an event id occurs once",
    "L4": "an event that was refused is not in the log, and every event in the log was sent",
    "L5": "if an event was acknowledged before another was first sent, the log has it first",
    "L6": "a chat message is in the log once, however often it was sent",
    "L7": "an event that admission refused is kept among the rejections",
    "V1": "every view that was shown is the fold of a prefix of its log, and not an old one",
    "V2": "the view kept event by event is the same as the view rebuilt from the log",
    "V3": "in a view every result has its call, and every call has its result or is still open",
    "V4": "a view begins with the newest system prompt of its log, and has no other",
    "V5": "a turn starts under its process's system prompt, or under the pinned one",
    "V6": "a second, plain set of rules computes the same view from the log",
    "V7": "loading a log takes out of the view the events that break a property, and no others",
    "V8": "a snapshot gives back the folds of its log",
    "A1": "an actor handles messages in the order in which they were sent, control messages first",
    "A2": "a message is not handled if its sender was told so, or left before handling began",
    "A3": "a message that was taken is handled once, with its own answer, or is a dead letter",
    "O1": "each epoch is granted to only one owner",
    "O2": "no external effect starts under an owner whose lease ran out and was taken over",
    "O3": "epochs in a log never decrease, and each event is of the newest epoch",
    "T1": "every call gets exactly one result, before anything else is said",
    "T2": "a call starts once",
    "T3": "a turn runs alone and ends once, and all its events are between its start and its end",
    "T4": "a call whose result says that it did not happen was not started",
    "T5": "a result is what the tool returned",
    "T6": "chat messages that wait get their turns in their order",
    "T7": "the kept part of an interrupted answer is a beginning of what was streamed, kept once",
    "T8": "a model is not asked while a call is open",
    "T9": "a call that waits for a confirmation does not start without it",
    "T10": "a turn that was rolled back leaves nothing in the view",
    "T11": "a chat message that had joined a turn waits again when the turn is rolled back",
    "T12": "no step begins during a pause",
    "T13": "no agent runs for a turn that ended in the batch that began it",
    "T14": "the agent of a turn that has ended, or was deleted, is cancelled",
    "T15": "turns that were replaced or taken back leave nothing in the view",
    "T16": "a call that was confirmed starts, unless its turn or its owner ends before",
    "F1": "a fork begins with no running turn and no waiting message",
    "C1": "nothing is seen before it is in the log: no event, reply, action or view",
    "C2": "a follower gets an answer from its beginning, without a gap",
    "C3": "pieces, put together, are the beginning of their answer, and without faults all of it",
    "M1": "the view at the seq that a step names is the one that its model was given",
    "D1": "a reader is told of a deletion only when it is durable",
    "S1": "a subscriber sees every event once, in order",
    "S2": "a conversation's row in lists is the fold of its log, and never stale",
    "E1": "the sender is told the same end of its turn as the log has",
    "E2": "a message whose cancellation was confirmed is withdrawn, or its turn interrupted",
    "E3": "a turn whose agent raised is not reported as completed",
    "H1": "a process that drains starts no turn, and takes no message if it refuses them",
    "H2": "a process that is drained finishes in bounded time, and so do its readers",
    "H3": "a process that was drained has released the conversations that it wrote to meanwhile",
    "M2": "every request ends with an answer, an error, or the end of its node",
    "M3": "a turn may wait for another conversation, unless that conversation waits for it",
    "B1": "queues and buffers stay under their limits",
    "P1": "after the faults have ended, all accepted work is done in bounded time",
    "P2": "work that a crash left unfinished is taken up when the next process begins",
    "P3": "without faults no owner stops while a turn runs",
    "P4": "the journal knows if a conversation has work to do",
    "R1": "a node that is left ends in bounded time, and leaves nothing behind",
}
"""Besides these, the simulator's own: `world`, `deadlock`, `budget`, `orphan`, `harness`."""

_CANCELLED_WITHIN_S = 5.0


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
    replaces: str | None = None
    """The message that it replaces."""
    attempts: int = 0
    acknowledged_at: int | None = None
    seq: int = 0
    turn_id: str = ""
    refusal: str | None = None
    """Its only attempt was refused, with an error that says that nothing happened."""
    is_dropped: bool = False
    """Its sender has given up, and the outcome of its attempts is unknown."""
    end: tuple[str, str] | None = None
    """The outcome and the reply that the sender was told."""
    is_cancelled: bool = False
    """A cancellation was confirmed."""
    is_gone: bool = False
    """Its conversation was deleted, so its outcome is unknown."""

    @property
    def is_acknowledged(self) -> bool:
        return self.acknowledged_at is not None


@dataclass(slots=True)
class ToolLedger:
    """The calls that tools carried out outside."""

    started: dict[str, str] = field(default_factory=dict)
    """Each call id, with the node that started it."""
    returned: dict[str, set[str]] = field(default_factory=dict)
    """By call id; an idempotent call may have run more than once."""


class PlainView:
    """The ids of a view, computed by simple rules without the code of the production fold."""

    def __init__(self) -> None:
        self.ids: tuple[str, ...] = ()
        self._prompts: set[str] = set()

    def fold(self, event: Event) -> None:
        """Advance by one event of the log."""
        match event.kind:
            case "condensation":
                assert isinstance(event, CondensationEvent), event.kind
                self._remove(event.forgotten_event_ids)
                at = event.summary_offset
                if event.summary is not None and at is not None:
                    self.ids = (*self.ids[:at], f"{event.id}-summary", *self.ids[at:])
            case "retraction":
                assert isinstance(event, RetractionEvent), event.kind
                self._remove(event.retracted_event_ids)
            case "system_prompt":
                assert isinstance(event, SystemPromptEvent), event.kind
                kept = self.ids
                if event.goes_first:
                    kept = kept[1:] if kept and kept[0] in self._prompts else kept
                    self.ids = (event.id, *kept)
                else:
                    self.ids = (*kept, event.id)
                self._prompts.add(event.id)
            case kind if kind in SEEN_KINDS:
                self.ids = (*self.ids, event.id)
            case _:
                pass

    def _remove(self, event_ids: Sequence[str]) -> None:
        self.ids = tuple([each for each in self.ids if each not in event_ids])


class _Shadow:
    """One log, as it was last seen, with a separate fold."""

    def __init__(self, oracles: Oracles, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.shown: list[tuple[Event, ...]] = [()]
        """The view at each seq."""
        self.stood: list[tuple[tuple[str, ...], RunningTurn | None]] = [((), None)]
        """The messages that waited, and the turn that ran, at each seq."""
        self.plain_turns = _Turns(oracles, conversation_id, self.shown)
        self.ids: set[str] = set()
        """The ids of all events."""
        self.records: list[StoredRecord] = []
        self.events: list[Event] = []
        self.state = Folded()
        self.plain = PlainView()
        self.view: tuple[Event, ...] = ()
        """The view as it is now."""
        self.view_ids: tuple[str, ...] = ()
        """The ids of its events."""
        self.called: set[str] = set()
        """The calls of the view."""
        self.answered: set[str] = set()
        """The calls that have a result in the view."""
        self.views: dict[tuple[str, ...], int] = {(): 0}
        """Each view that there ever was, with the last seq at which it was the view."""
        self.calls: dict[str, int] = {}
        self.unconfirmed: set[str] = set()
        self.stillborn: set[str] = set()
        """The turns that ended in the very batch that began them."""
        self.said_in_pause: set[str] = set()
        """The responses in which the running turn has said something since it was paused."""
        self.messages: dict[str, list[tuple[int, Event]]] = {}
        """The events that carry each message id, with their seqs."""
        self.epoch = 0
        self.prompts: list[SystemPromptEvent] = []
        """The system prompts of the log, in their order."""


class Oracles:
    """Everything that is known about a run, and the checks of the invariants."""

    def __init__(
        self,
        simulation: Simulation,
        disk: Disk,
        *,
        queued_max: int,
        is_calm: bool = False,
        holds_in_pause: bool = False,
    ) -> None:
        """`is_calm`: there are no faults. `holds_in_pause`: the agent begins no step in a pause."""
        store = disk.store
        self.simulation = simulation
        self.tools = ToolLedger()
        self.sendings: dict[str, Sending] = {}
        self.streamed: dict[str, set[str]] = {}
        """By turn: all that its agent streamed, each attempt as far as it had got."""
        self.asked: dict[tuple[str, int], tuple[Event, ...]] = {}
        """By turn and seq: the view that a model was given."""
        self.said: dict[str, int] = {}
        """By event id: the seq that the agent was told."""
        self.last_writer: SimulatedJournal | None = None
        """The journal whose write has just landed; the world resets this when it acts on it."""
        self.raised: set[str] = set()
        """The turns whose agents raised."""
        self.deleted: Counter[str] = Counter()
        """How often each conversation was deleted."""
        self.is_calm = is_calm
        self._holds_in_pause = holds_in_pause
        self._graves: dict[str, list[_Shadow]] = {}
        """The logs that were deleted, as they were last seen."""
        self._ended_at: dict[tuple[str, str], float] = {}
        """When each turn of each conversation ended."""
        self.prompts: dict[SimulatedJournal, str | None] = {}
        """The system prompt of each process."""
        self.is_pinned = False
        """Conversations keep their prompts."""
        self._draining: dict[SimulatedJournal, WhileDraining] = {}
        """The processes that drain, with what they do about new messages."""
        self._written_while_draining: set[tuple[SimulatedJournal, str]] = set()
        self._handed_over: set[str] = set()
        """The conversations that a drained process released with unfinished work."""
        self.places: set[Hashable] = set()
        """The pairs of neighbouring moments that this run has had."""
        self._moments: dict[str, Hashable] = {}
        self._disk = disk
        self._store = store
        self._queued_max = queued_max
        self._shadows: dict[str, _Shadow] = {}
        self._acknowledged: dict[str, list[tuple[int, int]]] = {}
        self._decoded: dict[bytes, Event] = {}
        store.on_write = self._observe
        disk.on_append = self._asked_to_append
        disk.on_snapshot = self._check_snapshot
        simulation.at_end.append(self._forget)

    def broken(self, invariant: str, detail: str) -> None:
        self.simulation.broken(invariant, f"{INVARIANTS[invariant]}: {detail}")

    def _forget(self) -> None:
        """Drop the logs, and most of what is known about them."""
        for known in (self._shadows, self._graves, self._decoded, self.sendings, self.asked):
            known.clear()
        self._moments.clear()
        self.places = set()  # the world has those that there were
        self._store.forget()

    # --- at every write --------------------------------------------------------------------------

    def _observe(self, conversation_id: str) -> None:
        """Check a write that has just landed."""
        shadow = self._shadows.get(conversation_id)
        if shadow is None:
            shadow = self._shadows[conversation_id] = _Shadow(self, conversation_id)
        log = self._store.log(conversation_id)
        records = log.records
        known = len(shadow.records)
        if known and not records and self._disk.deletions[conversation_id]:
            self._bury(shadow)
            return
        if len(records) < known or (known and records[known - 1] is not shadow.records[-1]):
            self.broken("L2", f"{conversation_id} at seq {known}")
            return
        for record in records[known:]:
            self._grew(shadow, record, log.epoch)
        self._check_listing(shadow, log.listing)
        if records and log.is_unfinished != shadow.state.turns.has_work:
            self.broken("P4", f"{conversation_id}[{len(records)}] {log.is_unfinished}")
        new = shadow.events[known:]
        if new:
            self.last_writer = owner_of(self._store, conversation_id)
            self.simulation.scheduler.looks_at = 0
        ended = {event.turn_id for event in new if event.kind == "turn_ended"}
        if ended:
            started = {event.turn_id for event in new if event.kind == "turn_started"}
            shadow.stillborn.update(turn_id for turn_id in started & ended if turn_id)

    def _check_snapshot(self, name: str, snapshot: Snapshot) -> None:
        """Check a snapshot that is being written."""
        shadow = self._shadows.get(name)
        assert shadow is not None, "its log was written before"
        given, seq = Folded.from_snapshot(snapshot), snapshot.seq
        if given is None:
            self.broken("V8", f"{name}[{seq}] cannot be read")
            return
        if seq > len(shadow.events):
            self.broken("V8", f"{name}[{seq}]: the log has {len(shadow.events)} events")
            return
        queued, running = shadow.stood[seq]
        for found, expected in (
            (tuple(given.turns.queued), queued),
            (given.turns.running, running),
            ([e.id for e in given.view], [e.id for e in shadow.shown[seq]]),
        ):
            if found != expected:
                self.broken("V8", f"{name}[{seq}]: {found}, not {expected}")

    def _check_listing(self, shadow: _Shadow, listing: Listing) -> None:
        """Check the list row after the newest append, which may have left it unchanged."""
        name, head = shadow.conversation_id, len(shadow.records)
        if not head:
            return  # it was claimed, and no list shows it
        if listing.seq == head:
            if listing != shadow.state.listing:
                self.broken("S2", f"{name}[{head}] {listing}, not {shadow.state.listing}")
        elif any(record.kind in LISTED_KINDS for record in shadow.records[listing.seq :]):
            self.broken("S2", f"{name}[{head}] has a row as of {listing.seq}")

    def _bury(self, shadow: _Shadow) -> None:
        """Put a deleted log aside: nothing known about it holds for the next one."""
        name = shadow.conversation_id
        self.simulation.note(f"{name} deleted")
        self.simulation.mark("deletion")
        self.moment(name, "deletion")
        self.deleted[name] += 1
        self._graves.setdefault(name, []).append(shadow)
        epoch = shadow.epoch
        del self._shadows[name]
        self._shadows[name] = buried = _Shadow(self, name)
        buried.epoch = epoch
        self._acknowledged.pop(name, None)
        if (running := shadow.state.turns.running) is not None:
            self._ended_at[name, running.turn_id] = self.simulation.now()
        for sending in self.sendings.values():
            sending.is_gone = sending.is_gone or sending.conversation_id == name

    def _grew(self, shadow: _Shadow, record: StoredRecord, epoch: int) -> None:
        # The checks look at the kind first: a pydantic class that does not match costs ten times as
        # much.
        name, seq, kind = shadow.conversation_id, record.seq, record.kind
        if seq != len(shadow.records) + 1:
            self.broken("L3", f"seq {seq} of {name} is at {len(shadow.records) + 1}")
        # A fork has the records of its parent.
        event = self._decoded.get(record.payload)
        if event is None:
            event = decode_event(record.payload, kind=kind)
            self._decoded[record.payload] = event
        if record.epoch < shadow.epoch or record.epoch > epoch:
            self.broken(
                "O3", f"epoch {record.epoch} of {name} after {shadow.epoch}, newest {epoch}"
            )
        before, shadow.epoch = shadow.epoch, record.epoch
        if event.id in shadow.ids:
            self.broken("L3", f"event {event.id} twice in {name}, again at seq {seq}")
        shadow.ids.add(event.id)
        shadow.records.append(record)
        shadow.events.append(event)
        shadow.state.fold(event)
        turns = shadow.state.turns
        shadow.stood.append((tuple(turns.queued), turns.running))
        shadow.plain.fold(event)
        self._show(shadow, event, kind)
        told = f"{name}[{seq}] e{record.epoch} {brief(event)}"
        self.simulation.note(told)
        message_id = vars(event).get("message_id")
        if message_id is not None:
            shadow.messages.setdefault(message_id, []).append((seq, event))
            self._check_replaced(shadow, event, told)
        self._check_turn(shadow, event, kind, told)
        shadow.plain_turns.check(shadow.events)
        if kind == "turn_started":
            self._check_prompt(shadow, record.epoch)
        self._mark(event, kind)
        self.moment(name, f"{kind} {record.epoch != before}")
        waiting = len(turns.queued)
        if waiting > self._queued_max and kind == "message_queued":
            assert isinstance(event, MessageQueuedEvent), kind
            # What a rollback puts back into the queue had its place there before; what replaces a
            # waiting chat message takes the place of that one.
            last = shadow.events[-2]
            is_exchanged = last.kind == "message_withdrawn" and (
                vars(last).get("message_id") == event.replaces
            )
            if not event.queued_again and not is_exchanged:
                self.broken("B1", f"{waiting} chat messages wait in {name}")

    def _show(self, shadow: _Shadow, event: Event, kind: str) -> None:
        """Take the view after the newest event, and check it if it has changed."""
        seq = len(shadow.events)
        where = f"{shadow.conversation_id}[{seq}]"
        before, view = shadow.view, tuple(shadow.state.admission.events)
        looks_at_prompts = kind == "system_prompt"
        if view != before:
            kept = len(before) if view[: len(before)] == before else 0
            new = view[kept:]
            shadow.view = view
            shadow.view_ids = (*shadow.view_ids[:kept], *[event.id for event in new])
            called, answered = _calls_in(new)
            if kept:
                called, answered = called | shadow.called, answered | shadow.answered
            shadow.called, shadow.answered = called, answered
            self._check_view(shadow, seq)
            if not kept or any(each.kind == "system_prompt" for each in new):
                looks_at_prompts = True
        shadow.shown.append(shadow.view)
        if shadow.view_ids != shadow.plain.ids:
            self.broken("V6", f"{where}: {shadow.view_ids}, not {shadow.plain.ids}")
        shadow.views[shadow.view_ids] = seq
        prompts = shadow.prompts
        if kind == "system_prompt":
            assert isinstance(event, SystemPromptEvent), kind
            if prompts:
                self.simulation.mark("system prompt changed")
            prompts.append(event)
        if prompts and looks_at_prompts:
            shown = [each for each in view if each.kind == "system_prompt"]
            if shown != prompts[-1:] or view[0] is not shown[0]:
                self.broken("V4", f"{where}: {shown}, not {prompts[-1]}")

    def _check_turn(self, shadow: _Shadow, event: Event, kind: str, where: str) -> None:
        """Check what an event does to the running turn and its calls."""
        match kind:
            case "action":
                assert isinstance(event, ActionEvent), kind
                shadow.calls[event.tool_call_id] = len(shadow.events)
            case "confirmation_requested":
                assert isinstance(event, ConfirmationRequestedEvent), kind
                shadow.unconfirmed.update(event.tool_call_ids)
            case "confirmation_given":
                assert isinstance(event, ConfirmationGivenEvent), kind
                if event.confirmed:
                    shadow.unconfirmed.intersection_update(event.rejected)
            case "turn_ended":
                assert isinstance(event, TurnEndedEvent), kind
                self._check_turn_end(shadow, event, where)
            case _:
                pass
        if not shadow.state.turns.is_paused:
            shadow.said_in_pause.clear()
        elif type(event) is ActionEvent:
            shadow.said_in_pause.add(event.llm_response_id)
        elif type(event) is AgentMessageEvent and not event.interrupted:
            shadow.said_in_pause.add(event.id)
        # One response may have been on its way.
        if self._holds_in_pause and len(shadow.said_in_pause) > 1:
            self.broken("T12", where)

    def _check_turn_end(self, shadow: _Shadow, event: TurnEndedEvent, where: str) -> None:
        """Check the end of a turn."""
        name, turn_id = shadow.conversation_id, event.turn_id
        self._ended_at.setdefault((name, turn_id or ""), self.simulation.now())
        if event.outcome == "rolled_back" and any(e.turn_id == turn_id for e in shadow.view):
            self.broken("T10", f"{name}[{len(shadow.events)}] turn {turn_id}")
        if event.outcome == "completed" and turn_id in self.raised:
            self.broken("E3", where)
        if self.is_calm and event.detail == "its owner stopped":
            self.broken("P3", where)

    def _check_replaced(self, shadow: _Shadow, event: Event, where: str) -> None:
        """Check that the view has nothing of the turns after the replaced message."""
        if type(event) not in {UserMessageEvent, MessageQueuedEvent}:
            return
        assert isinstance(event, UserMessageEvent | MessageQueuedEvent), event.kind
        if event.replaces is None:
            return
        self.simulation.mark("message replaced")
        targets = shadow.messages.get(event.replaces, ())
        if not targets:
            self.broken("T15", f"{where}: there is no {event.replaces}")
        begun = [at for at, found in targets if isinstance(found, UserMessageEvent)]
        stands = [found for _, found in targets if not isinstance(found, MessageWithdrawnEvent)]
        joined_or_again = isinstance(event, UserMessageEvent) and event.queued_event_id is not None
        # One that waited again, after its turn was rolled back, has left its place to the new one.
        is_exchanged = not begun or not isinstance(stands[-1], UserMessageEvent)
        if is_exchanged or joined_or_again or getattr(event, "queued_again", False):
            return
        gone = {e.turn_id for e in shadow.events[begun[-1] - 1 : -1]} - {None, event.turn_id}
        if any(e.turn_id in gone for e in shadow.state.view):
            self.broken("T15", where)

    def _check_prompt(self, shadow: _Shadow, epoch: int) -> None:
        """Check the system prompt under which a turn starts."""
        name, prompts = shadow.conversation_id, shadow.prompts
        # The events that a fork shares were granted to no process under its name.
        writer = self._disk.granted.get((name, epoch))
        own = None if writer is None else self.prompts.get(writer)
        if own is None:
            return
        where = f"{name}[{len(shadow.events)}]"
        newest = prompts[-1].content if prompts else None
        if not self.is_pinned and newest != own:
            self.broken("V5", f"{where}: {newest}, not {own}")
        elif self.is_pinned and newest != own:
            self.simulation.mark("pinned prompt kept")
        if self.is_pinned and len(prompts) > 1:
            self.broken("V5", f"{where}: {[prompt.content for prompt in prompts]}")

    # --- drains ----------------------------------------------------------------------------------

    def drain_begins(self, journal: SimulatedJournal, messages: WhileDraining) -> None:
        """Note that a process begins to drain, in this very step."""
        self._draining[journal] = messages

    def _asked_to_append(
        self, journal: SimulatedJournal, name: str, records: Sequence[Record]
    ) -> None:
        """Check an append that a process is about to make."""
        shadow = self._shadows.get(name)
        if name in self._handed_over and any(record.kind == "turn_started" for record in records):
            self._handed_over.discard(name)
            self.simulation.mark("went on after a drain")
        messages = self._draining.get(journal)
        if messages is None:
            return
        self._written_while_draining.add((journal, name))
        for record in records:
            if record.kind == "turn_started":
                self.broken("H1", f"{name}: {journal.node} starts a turn")
            known = () if shadow is None else shadow.messages
            if record.message_id is not None and record.message_id not in known:
                if messages == "refuse":
                    self.broken("H1", f"{name}: {journal.node} takes {record.message_id}")
                self.simulation.mark("message kept while draining")

    def drained(self, journal: SimulatedJournal, *, is_sure: bool) -> None:
        """Check a process that has just been drained; `is_sure`: nothing failed on it."""
        for writer, name in self._written_while_draining:
            if writer is journal and self.is_unfinished(name):
                self._handed_over.add(name)
            if writer is journal and is_sure and owner_of(self._store, name) is journal:
                self.broken("H3", f"{name} is still held on {journal.node}")

    def _mark(self, event: Event, kind: str) -> None:
        match kind:
            case "agent_error":
                assert isinstance(event, AgentErrorEvent), kind
                if event.may_have_happened:
                    self.simulation.mark("orphan call resolved")
            case "turn_ended":
                assert isinstance(event, TurnEndedEvent), kind
                self.simulation.mark(f"turn {event.outcome}")
            case "message_queued":
                assert isinstance(event, MessageQueuedEvent), kind
                if event.steers is not None:
                    self.simulation.mark("steered")
            case "conversation_error":
                assert isinstance(event, ConversationErrorEvent), kind
                self.simulation.mark(kind)
                if event.error == CondenserTooSlow.__name__:
                    self.simulation.mark("condenser too slow")
            case _ if kind in _MARKED_KINDS:
                self.simulation.mark(kind)
            case _:
                pass

    def _check_view(self, shadow: _Shadow, seq: int) -> None:
        called, answered = shadow.called, shadow.answered
        still_open = shadow.state.admission.open_calls.keys()
        if answered - called or not called - answered <= still_open:
            self.broken("V3", f"{shadow.conversation_id} at {seq}")

    # --- the places that a run has reached -------------------------------------------------------

    def moment(self, conversation_id: str, what: str) -> None:
        """Note that something has happened to a conversation, and its state at that time."""
        shadow = self._shadows.get(conversation_id)
        stands: Hashable = None
        if shadow is not None:
            turns = shadow.state.turns
            running = turns.running
            joined = 0 if running is None else len(running.messages)
            waiting, open_calls = len(turns.queued), len(shadow.state.admission.open_calls)
            # Not by `min`, which costs more than all the rest.
            stands = (
                running is not None and (3 if joined > 1 else 1 + joined),
                turns.waits_for,
                2 if waiting > 1 else waiting,
                2 if open_calls > 1 else open_calls,
                bool(shadow.state.condensed_turns),
            )
        now = (what, stands)
        self.places.add((self._moments.get(conversation_id), now))
        self._moments[conversation_id] = now

    def events(self, conversation_id: str) -> Sequence[Event]:
        """Return the events of the log."""
        shadow = self._shadows.get(conversation_id)
        return () if shadow is None else shadow.events

    def state(self, conversation_id: str) -> Folded:
        """Return the folds of the log."""
        shadow = self._shadows.get(conversation_id)
        return Folded() if shadow is None else shadow.state

    def running(self, conversation_id: str) -> RunningTurn | None:
        """Return the turn that runs there."""
        return self.state(conversation_id).turns.running

    def open_calls(self, conversation_id: str) -> AbstractSet[str]:
        """Return the calls there that have no result."""
        return self.state(conversation_id).admission.open_calls.keys()

    def called(self, conversation_id: str) -> AbstractSet[str]:
        """Return all calls there ever were."""
        shadow = self._shadows.get(conversation_id)
        return set() if shadow is None else shadow.calls.keys()

    def waiting(self, conversation_id: str) -> Sequence[str]:
        """Return the ids of the messages that wait there."""
        return tuple(self.state(conversation_id).turns.queued)

    def waits_for(self, conversation_id: str) -> str | None:
        """Return what the conversation waits for: "resume", "confirmation", or nothing."""
        return self.state(conversation_id).turns.waits_for

    def awaiting(self, conversation_id: str) -> Sequence[str]:
        """Return the calls that wait there for a confirmation."""
        return self.state(conversation_id).turns.awaiting

    def is_unfinished(self, conversation_id: str) -> bool:
        """Return True if a turn runs there, or a message waits."""
        return self.state(conversation_id).turns.has_open_turns

    # --- as it happens ---------------------------------------------------------------------------

    def head(self, conversation_id: str) -> int:
        return len(self._store.log(conversation_id).records)

    def floor(self, conversation_id: str, journal: SimulatedJournal) -> int:
        """Return the seq that any view read there from now on must have; 0 if it may be older."""
        if owner_of(self._store, conversation_id) is not journal:
            return 0
        return max((seq for _, seq in self._acknowledged.get(conversation_id, ())), default=0)

    def acknowledged(self, sending: Sending, seq: int, turn_id: str, *, is_duplicate: bool) -> None:
        """Check that a chat message is durable, since its sender has just been told so."""
        name = sending.conversation_id
        if sending.is_gone:
            sending.acknowledged_at = sending.acknowledged_at or self.simulation.steps
            sending.turn_id = turn_id
            return
        shadow = self._shadows.get(name)
        if shadow is None or not 0 < seq <= len(shadow.events):
            self.broken("C1", f"{sending.message_id} is said to be at seq {seq} of {name}")
            return
        event = shadow.events[seq - 1]
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

    def saw_event(self, conversation_id: str, logged: LoggedEvent, who: str) -> int:
        """Check an event that a reader got; return how many deleted logs preceded its log."""
        log = self._store.log(conversation_id).records
        seq, event = logged
        graves = self._graves.get(conversation_id, ())
        if 0 < seq <= len(log) and log[seq - 1].event_id == event.id:
            return len(graves)
        for number, grave in enumerate(graves):
            if seq <= len(grave.events) and grave.events[seq - 1].id == event.id:
                return number
        self.broken("C1", f"{who} saw {event.kind} at seq {seq} of {conversation_id}")
        return 0

    def saw_view(self, conversation_id: str, view: View, who: str, *, floor: int) -> None:
        """Check a view that a reader got."""
        shadow = self._shadows.get(conversation_id)
        ids = tuple([event.id for event in view])
        newest = (None if ids else 0) if shadow is None else shadow.views.get(ids)
        if newest is None and any(
            ids in grave.views for grave in self._graves.get(conversation_id, ())
        ):
            return
        if newest is None:
            self.broken("V1", f"{who} saw {len(ids)} events of {conversation_id}, never a view")
        elif newest < floor:
            self.broken(
                "V1", f"{who} saw the view of {conversation_id} at {newest}, before {floor}"
            )

    def saw_turn(self, conversation_id: str, message_id: str, seq: int, turn_id: str) -> None:
        """Check a turn that was found in the log; without a seq, its message still waits."""
        self.simulation.mark("turn found")
        shadows = [*self._graves.get(conversation_id, ()), self._shadows.get(conversation_id)]
        for shadow in shadows:
            if shadow is not None:
                found = shadow.messages.get(message_id, ())
                is_there = any(event.turn_id == turn_id for _, event in found)
                if is_there and seq in (0, found[0][0]):
                    return
        self.broken("C1", f"{message_id} of {conversation_id} at {seq} in turn {turn_id}")

    def interrupted(self, conversation_id: str, turn_id: str) -> None:
        """Check a turn that a caller interrupted, as the caller was told."""
        self.simulation.mark("interrupted by id")
        shadows = [*self._graves.get(conversation_id, ()), self._shadows.get(conversation_id)]
        ends = [
            event.outcome
            for shadow in shadows
            if shadow is not None
            for event in shadow.events
            if type(event) is TurnEndedEvent and event.turn_id == turn_id
        ]
        if ends != ["interrupted"]:
            self.broken("E2", f"turn {turn_id} of {conversation_id} was interrupted, and {ends}")

    def undone(self, conversation_id: str, message: UserMessageEvent) -> None:
        """Check a chat message whose turn a caller took back, as the caller was told."""
        self.simulation.mark("turn taken back")
        if any(event.turn_id == message.turn_id for event in self.state(conversation_id).view):
            self.broken("T15", f"turn {message.turn_id} of {conversation_id}")

    def agent_begins(self, conversation_id: str, turn_id: str) -> None:
        """Check that an agent is not run for a turn that had ended."""
        shadow = self._shadows.get(conversation_id)
        if shadow is not None and turn_id in shadow.stillborn:
            self.broken("T13", f"turn {turn_id} of {conversation_id}")

    def goes_on(self, conversation_id: str, turn_id: str, journal: SimulatedJournal) -> None:
        """Check that an agent may still go on after a long wait."""
        ended_at = self._ended_at.get((conversation_id, turn_id))
        is_owner = owner_of(self._store, conversation_id) is journal
        if ended_at is None or not is_owner or journal.was_frozen:
            return
        if self.simulation.now() - ended_at > _CANCELLED_WITHIN_S:
            self.broken("T14", f"turn {turn_id} of {conversation_id} ended at {ended_at:.3f}")

    def told_deleted(self, conversation_id: str, reads: int, who: str) -> None:
        """Check that the log is deleted from which this reader saw its last event.

        `reads`: the result of `saw_event`. A reader that has seen nothing yet is not checked: it
        may have begun while the owner was still reporting an earlier, durable deletion.
        """
        if self.deleted[conversation_id] <= reads:
            self.broken("D1", f"{who}, of {conversation_id}")

    def asks_model(self, conversation_id: str, turn_id: str, view: View) -> None:
        """Check the view that a model is given, and keep it for the check at the end."""
        self.asked.setdefault((turn_id, view.seq), tuple(view))
        called, answered = _calls_in(view)
        if called - answered:
            self.broken("T8", f"{conversation_id}: {sorted(called - answered)}")

    def saw_change(self, name: str, seq: int, change_id: str) -> None:
        """Check an acknowledged change, or an acknowledged event of the application."""
        shadow = self._shadows[name]
        if self.deleted[name]:
            return
        found = [event.id for event in shadow.events[seq - 1 : seq]]
        if found != [change_id] or [event.id for event in shadow.events].count(change_id) != 1:
            self.broken("L1", f"{name}[{seq}] is {found}, not change {change_id}")

    def saw_fork(self, fork_id: str) -> None:
        """Check a fork to which no message was sent."""
        shadow = self._shadows.get(fork_id)
        forked = [] if shadow is None else shadow.events
        state = Folded()
        begins = max(
            (n for n, event in enumerate(forked) if event.kind == "forked_from"), default=0
        )
        epoch = None if shadow is None else shadow.records[begins].epoch
        for n, event in enumerate(forked):
            assert shadow is not None, "it has events"
            if n <= begins or shadow.records[n].epoch == epoch:
                state.fold(event)
        if state.turns.has_open_turns:
            self.broken("F1", fork_id)

    def starts_tool(
        self,
        conversation_id: str,
        call_id: str,
        journal: SimulatedJournal,
        *,
        is_idempotent: bool,
    ) -> None:
        """Check that a tool may begin to act outside."""
        if call_id in self.tools.started and not is_idempotent:
            self.broken("T2", f"call {call_id} on {self.tools.started[call_id]}, then on "
                        f"{journal.node}")  # fmt: skip
        self.tools.started[call_id] = repr(journal.node)
        self.simulation.mark("tool started")
        shadow = self._shadows.get(conversation_id)
        graves = self._graves.get(conversation_id, ())
        if any(call_id in grave.calls for grave in graves):
            pass  # deleted a moment ago; its agent is about to be cancelled
        elif shadow is None or call_id not in shadow.calls:
            self.broken("C1", f"call {call_id} starts, and its action is not in the log")
        elif call_id in shadow.unconfirmed:
            self.broken("T9", f"call {call_id} of {conversation_id}")
        owner = owner_of(self._store, conversation_id)
        if owner is not journal and (journal, conversation_id) not in journal.lost_by_force:
            self.broken("O2", f"call {call_id} of {conversation_id} starts on {journal.node}, and "
                        f"{owner and owner.node} owns it")  # fmt: skip
        if shadow is not None and call_id in shadow.plain_turns.denied:
            self.broken("T4", f"call {call_id} of {conversation_id} starts on {journal.node}")

    # --- in the end ------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Check all invariants that must hold when everything is done."""
        for shadow in self._shadows.values():
            self._check_log(shadow)
        for sending in self.sendings.values():
            if not sending.is_gone:
                self._check_sending(sending)
        self._check_order()

    def _check_log(self, shadow: _Shadow) -> None:
        name = shadow.conversation_id
        events = shadow.events
        records = self._store.log(name).records
        if len(records) != len(events) or any(map(is_not, records, shadow.records)):
            self.broken("L2", f"{name} has changed behind its end")
        if tuple([e.id for e in View.from_events(events)]) != shadow.view_ids:
            self.broken("V2", f"the view of {name} is not the rebuilt one")
        if shadow.state.turns.has_open_turns:
            self.broken("P1", f"{name} has unfinished turns in the end")
        shadow.plain_turns.check_end()

    def _check_sending(self, sending: Sending) -> None:
        name, message_id = sending.conversation_id, sending.message_id
        shadow = self._shadows.get(name)
        events = [] if shadow is None else shadow.events
        found = [] if shadow is None else shadow.messages.get(message_id, [])
        kept = [f for f in found if type(f[1]) is MessageQueuedEvent and not f[1].queued_again]
        begun = [f for f in found if f[1].kind == "user_message"]
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
        if sending.is_cancelled and sending.end is not None:
            outcome = sending.end[0]
            if outcome not in ("interrupted", "withdrawn"):
                self.broken("E2", f"{message_id} was cancelled, and {outcome}")
        if sending.end is not None:
            self._check_told(sending, events, begun)

    def _check_told(
        self, sending: Sending, events: Sequence[Event], begun: Sequence[tuple[int, Event]]
    ) -> None:
        assert sending.end is not None, "checked by the caller"
        outcome, reply = sending.end
        # A message that had joined a turn waits again if that is rolled back, and may be withdrawn
        # then.
        waited_from = begun[-1][0] if begun else 0
        if outcome == "withdrawn" and any(
            type(e) is MessageWithdrawnEvent and e.message_id == sending.message_id
            for e in events[waited_from:]
        ):
            return
        if not begun:
            self.broken("E1", f"{sending.message_id} was told {outcome}, and never began")
            return
        turn_ids = {event.turn_id for _, event in begun}
        ends = [e for e in events if type(e) is TurnEndedEvent and e.turn_id in turn_ids]
        if not any(e.outcome == outcome for e in ends):
            self.broken(
                "E1", f"{sending.message_id} was told {outcome}; {[e.outcome for e in ends]}"
            )
        said = [(seq, e.content) for seq, e in enumerate(events, 1)
                if type(e) is AgentMessageEvent and e.turn_id in turn_ids]  # fmt: skip
        if reply and not any(content == reply for _, content in said):
            self.broken("E1", f"{sending.message_id} was told {reply!r}, and {said} was said")
        # What was said before it had joined is no answer to it.
        answers = [content for seq, content in said if seq > begun[-1][0]]
        if outcome == "completed" and answers and reply != answers[-1]:
            self.broken("E1", f"{sending.message_id} was told {reply!r}, last was {answers[-1]!r}")

    def _check_order(self) -> None:
        for name in self._shadows:
            sent = [s for s in self.sendings.values()
                    if s.conversation_id == name and s.acknowledged_at is not None
                    and not s.is_gone]  # fmt: skip
            sent.sort(key=lambda s: s.seq)
            # From the last to the first: no earlier message may have been sent only after its
            # answer.
            earliest_answer, whose = float("inf"), ""
            for sending in reversed(sent):
                if sending.first_sent_at > earliest_answer:
                    self.broken("L5", f"{sending.message_id} of {name} is before {whose}")
                assert sending.acknowledged_at is not None, "filtered above"
                if sending.acknowledged_at < earliest_answer:
                    earliest_answer, whose = sending.acknowledged_at, sending.message_id


class _Turns:
    """The turns and calls of one log, derived from its events alone, as they come."""

    def __init__(self, oracles: Oracles, name: str, shown: Sequence[tuple[Event, ...]]) -> None:
        """`shown`: the view at each seq, up to the event that is checked."""
        self._oracles = oracles
        self._name = name
        self._shown = shown
        self._seq = 0
        self._event: Event | None = None
        self._running: str | None = None
        self._seen: set[str] = set()
        self._calls: dict[str, ActionEvent] = {}
        self._open: dict[str, ActionEvent] = {}
        self._queued: dict[str, MessageQueuedEvent] = {}
        self._said: dict[str, list[str]] = {}
        self._first: dict[str, int] = {}
        self.denied: set[str] = set()
        """The calls whose results say that they did not happen."""
        self._has_just_started = False
        self._is_fork = False
        self._joined: list[str] = []

    def check(self, events: Sequence[Event]) -> None:
        """Check the newest event of the log."""
        event = self._event = events[-1]
        seq = self._seq = len(events)
        kind = event.kind
        self._check_turn(event, kind)
        match kind:
            case "agent_message":
                assert isinstance(event, AgentMessageEvent), kind
                self._check_answer(event)
                self._check_none_open()
            case "user_message":
                assert isinstance(event, UserMessageEvent), kind
                self._check_none_open()
                self._check_begins(event, seq)
            case "action":
                assert isinstance(event, ActionEvent), kind
                call_id = event.tool_call_id
                if call_id in self._calls:
                    self._broken("T1", "a call id twice")
                self._calls[call_id] = self._open[call_id] = event
            case "step_finished" | "step_unfinished":
                assert isinstance(event, StepFinishedEvent | StepUnfinishedEvent), kind
                self._check_step(event)
            case _ if kind in RESULT_KINDS:
                assert isinstance(event, RESULT_CLASSES), kind
                self._check_result(event)
            case _:
                self._check_queue(event, kind, seq)
        self._has_just_started = kind == "turn_started"

    def check_end(self) -> None:
        """Check that no call is left open."""
        # A call that a client appended, in no turn, may stay open: the client answers it.
        left = [call for call, action in self._open.items() if action.turn_id is not None]
        if left:
            self._oracles.broken("T1", f"{self._name}: no result for {left}")

    def _broken(self, invariant: str, detail: str) -> None:
        """Report what is wrong about the event that is being checked."""
        assert self._event is not None, "it is checked"
        where = f"{self._name}[{self._seq}] {brief(self._event)}"
        self._oracles.broken(invariant, f"{where}: {detail}")

    def _check_turn(self, event: Event, kind: str) -> None:
        turn_id = event.turn_id
        if kind == "turn_started" and turn_id is not None:
            if self._running is not None or turn_id in self._seen:
                self._broken("T3", f"turn {self._running} runs, or it did before")
            self._running = turn_id
            self._seen.add(turn_id)
        elif kind in {"message_queued", "message_withdrawn"}:
            pass
        elif turn_id is not None and turn_id != self._running:
            self._broken("T3", f"its turn {turn_id} does not run")
        elif kind == "turn_ended":
            assert isinstance(event, TurnEndedEvent), kind
            self._running = None
            lost = [m for m in self._joined[1:] if m not in self._queued]
            if event.outcome == "rolled_back" and lost:
                self._broken("T11", str(lost))
            self._joined = []
        elif kind == "user_message":
            assert isinstance(event, UserMessageEvent), kind
            if event.message_id is not None:
                self._joined.append(event.message_id)

    def _check_answer(self, event: AgentMessageEvent) -> None:
        pieces = self._oracles.streamed.get(event.turn_id or "", set())
        if not event.interrupted:
            self._said.setdefault(event.turn_id or "", []).append(event.content)
            return
        answers = self._said.get(event.turn_id or "", ())
        is_said = any(answer.startswith(event.content) for answer in answers)
        if is_said or not any(said.startswith(event.content) for said in pieces):
            self._broken("T7", f"{event.content!r} of {sorted(pieces)}")
        self._oracles.simulation.mark("partial answer kept")

    def _check_step(self, event: StepFinishedEvent | StepUnfinishedEvent) -> None:
        if (request := event.request) is None:
            return
        given = self._oracles.asked.get((event.turn_id or "", request.view_seq))
        # A view that was shown is the fold of the log up to there: V2 and V6 see to that.
        seq = request.view_seq
        shown = self._shown[seq] if seq < len(self._shown) else None
        if given is None or shown is None or not _are_alike(given, shown):
            self._broken("M1", f"at {request.view_seq}, not {given}")
        self._oracles.simulation.mark(event.kind)

    def _check_none_open(self) -> None:
        if self._open:
            self._broken("T1", f"while {list(self._open)} have no result")

    def _check_result(self, event: ObservationEvent | AgentErrorEvent | UserRejectEvent) -> None:
        tools = self._oracles.tools
        call_id = event.tool_call_id
        if self._open.pop(call_id, None) is None:
            self._broken("T1", "a result for a call that is not open")
        is_denied = isinstance(event, UserRejectEvent) or (
            isinstance(event, AgentErrorEvent) and not event.may_have_happened
        )
        # In a fork it is true of the fork, whatever the other conversation does.
        if is_denied and not self._is_fork:
            self.denied.add(call_id)
            if call_id in tools.started:
                self._broken("T4", f"it ran on {tools.started[call_id]}")
        if isinstance(event, ObservationEvent) and not event.is_error:
            returned = tools.returned.get(call_id)
            # A result that is too long is cut, which only its beginning tells.
            if returned and not any(text[:100] == event.content[:100] for text in returned):
                self._broken("T5", f"not {sorted(returned)}")

    def _check_queue(self, event: Event, kind: str, seq: int) -> None:
        match kind:
            case "message_queued":
                assert isinstance(event, MessageQueuedEvent), kind
                self._queued[event.message_id] = event
                place = event.place
                is_new = event.replaces is not None and not event.queued_again
                if is_new and place != self._first.get(event.replaces or ""):
                    self._broken("T6", f"it is not in the place of {event.replaces}")
                self._first.setdefault(event.message_id, seq if place is None else place)
            case "message_withdrawn":
                assert isinstance(event, MessageWithdrawnEvent), kind
                self._queued.pop(event.message_id, None)
            case "forked_from":
                self._queued.clear()
                self._is_fork = True
            case _:
                pass

    def _check_begins(self, event: UserMessageEvent, seq: int) -> None:
        """Check that a chat message which waited begins in its turn."""
        message_id = event.message_id
        if message_id is None:
            return
        self._first.setdefault(message_id, seq)
        if event.queued_event_id is not None and message_id not in self._queued:
            self._broken("T6", "it does not wait")
        # One that steers joins a turn out of its order; for a turn of its own it waits.
        if self._has_just_started and message_id in self._queued:
            longest = min(self._queued, key=self._first.__getitem__)
            if longest != message_id:
                self._broken("T6", f"{longest} waited longer")
        self._queued.pop(message_id, None)


_MARKED_KINDS = frozenset(
    {
        "condensation",
        "confirmation_given",
        "confirmation_requested",
        "forked_from",
        "message_withdrawn",
        "paused",
        "resumed",
        "retraction",
        "status_changed",
    }
)


_ANSWERING_KINDS = frozenset({"agent_message", "action", "turn_ended"})
"""The kinds of events that take the place of pieces."""


class ShownAnswer:
    """An answer, assembled by a follower from its pieces alone."""

    def __init__(self, *, is_calm: bool) -> None:
        self.text = ""
        self._newest: TextDelta | None = None
        self.is_calm = is_calm

    def add(self, piece: TextDelta) -> str | None:
        """Show the next piece; return the reason if the piece does not fit."""
        newest, self._newest = self._newest, piece
        if piece.offset:
            is_next = newest is not None and newest[:4] == piece[:4]
            if not is_next or len(self.text) != piece.offset:
                return f"{piece} after {newest}, which makes {self.text!r}"
        elif newest is not None and newest[:3] == piece[:3] and newest.attempt >= piece.attempt:
            return f"{piece} after {newest}, which it does not void"
        self.text = self.text[: piece.offset] + piece.text
        return None

    def see(self, event: Event) -> str | None:
        """Take the next event; return the reason if it differs from the answer shown.

        No two streams begin alike, so a text that begins like the pieces belongs to them. The last
        pieces may be missing if there are faults: the owner may have failed before it passed them
        on, after the commit.
        """
        text, kind = "", event.kind
        if kind in _ANSWERING_KINDS:
            text, self.text, self._newest = self.text, "", None
        if kind != "agent_message" or not text:
            return None
        assert isinstance(event, AgentMessageEvent), kind
        if event.content != text and (self.is_calm or not event.content.startswith(text)):
            began, _, _ = text.partition(":")
            if event.content.startswith(f"{began}:"):
                return f"{text!r} was shown of {brief(event)}"
        return None


def _are_alike(ours: Sequence[Event], others: Sequence[Event]) -> bool:
    """True if these are equal events: as `==` says, which costs pydantic six times as much."""
    return len(ours) == len(others) and all(
        one is other or (type(one) is type(other) and vars(one) == vars(other))
        for one, other in zip(ours, others, strict=True)
    )


def _calls_in(view: Iterable[Event]) -> tuple[set[str], set[str]]:
    """Return the calls of a view, and those that have a result there."""
    called, answered = set(), set()
    for event in view:
        kind = event.kind
        if kind == "action":
            assert isinstance(event, ActionEvent), kind
            called.add(event.tool_call_id)
        elif kind in RESULT_KINDS:
            assert isinstance(event, RESULT_CLASSES), kind
            answered.add(event.tool_call_id)
    return called, answered


def brief(event: Event) -> str:
    """Return an event in a few words."""
    fields = vars(event)
    words = [fields["kind"]]
    for name in ("message_id", "outcome", "interrupted", "content", "detail"):
        value = fields.get(name)
        if value:
            words.append(f"{name}={value!r}" if name != "content" else repr(value[:40])[:40])
    if (call_id := fields.get("tool_call_id")) is not None:
        words.append(f"call={call_id[-8:]}")
    if (turn_id := fields["turn_id"]) is not None:
        words.append(f"turn={turn_id[-8:]}")
    return " ".join(words)
