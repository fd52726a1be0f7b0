"""Checks a journal against the acknowledgements that it gave: the audit after a replay.

A conversation's receipts hold everything that was acknowledged to its user and its agent as
durable, and the recording of their exchanges. `audit_log` compares one log with them. It is pure,
and trusts nothing that the log's owner reported about itself: it derives order, turns, calls and
views from the events alone. `audit_journal` reads the logs through the journal port, which takes no
ownership.

`Audit` has the counts. Its `problems` describe each broken promise in words, even if no count
exists for it, so an audit `is_clean` only if there are none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from ..core.commands import OnOverlap
from ..core.view import View, ViewFold
from ..errors import ConversationNotFound, CorruptLog
from ..events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationEvent,
    ConversationErrorEvent,
    Event,
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
from ..journal import Journal, LogPages
from .transcripts import RecordedConversation, RecordedStep

__all__ = ["Audit", "Receipts", "audit_journal", "audit_log", "message_id"]


def message_id(conversation_id: str, exchange: int) -> str:
    """Return the id under which a recorded user message is sent, however often it is sent."""
    return f"{conversation_id}/{exchange}"


@dataclass(slots=True)
class Receipts:
    """The acknowledgements of one conversation. Filled while it runs; the audit only reads it.

    Several `senders` send the exchanges in rotation. The messages of one sender keep their order;
    there is no order between messages of different senders.
    """

    conversation_id: str
    recorded: RecordedConversation
    senders: int = 1
    messages: dict[int, int] = field(default_factory=dict)
    """The seq that each sent exchange was acknowledged with, in the order of sending."""
    events: dict[str, int | None] = field(default_factory=dict)
    """The agent's own events by id, each with its seq, or None if the report had no seq."""
    ended: dict[int, str] = field(default_factory=dict)
    """How the turns of exchanges ended, as it was reported to their users."""
    view_ids: tuple[str, ...] | None = None
    """The ids of the owner's own view at the end, if it was asked for."""
    on_overlap: OnOverlap | None = None
    """The policy that every message was sent with; None if the audit is not to hold the log to it.
    """
    cuts_max: int | None = None
    """How often its worker was killed, which bounds how many turns were interrupted by a restart;
    None if that is unknown."""
    is_finished: bool = False
    """True once the user has heard the end of every turn; until then a log may end in a turn."""

    @property
    def acknowledged(self) -> int:
        """Return the number of acknowledgements."""
        return len(self.messages) + len(self.events)


@dataclass(frozen=True, slots=True)
class Audit:
    """The findings. All counts are totals over the audited conversations."""

    conversations: int = 0
    events: int = 0
    turns: int = 0
    acknowledged: int = 0
    """How many chat messages and agent events were acknowledged as durable."""
    found: int = 0
    lost: int = 0
    duplicated: int = 0
    out_of_order: int = 0
    views_checked: int = 0
    views_diverged: int = 0
    calls: int = 0
    calls_answered_once: int = 0
    interrupted: int = 0
    rolled_back: int = 0
    joined: int = 0
    """How many chat messages joined a running turn, and shared its answer."""
    condensations: int = 0
    problems: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """True if no promise was broken."""
        return not self.problems

    def counts(self) -> dict[str, int]:
        """Return all counts by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "problems"}

    @staticmethod
    def total(audits: Iterable[Audit]) -> Audit:
        """Add up the audits of several conversations."""
        counts: Counter[str] = Counter()
        problems: list[str] = []
        for audit in audits:
            counts.update(audit.counts())
            problems.extend(audit.problems)
        return Audit(**counts, problems=tuple(problems))


async def audit_journal(
    journal: Journal, receipts: Iterable[Receipts], *, prefixes_max: int = 100
) -> Audit:
    """Audit each conversation that has receipts, one after the other.

    It holds one log in memory at a time, so `receipts` may be a generator over very many. For each
    log, it rebuilds the view of at most `prefixes_max` prefixes.
    """
    audits = []
    for one in receipts:
        log: list[LoggedEvent] = []
        unreadable: tuple[str, ...] = ()
        try:
            async for records in LogPages(journal, one.conversation_id):
                log.extend(LoggedEvent(r.seq, decode_event(r.payload)) for r in records)
        except ConversationNotFound:
            pass  # an empty log: it has lost whatever there is a receipt for
        except (CorruptLog, ValueError) as error:
            unreadable = (f"conversation {one.conversation_id}: {error}",)
        audit = audit_log(one, log, prefixes_max=prefixes_max)
        audits.append(replace(audit, problems=unreadable + audit.problems))
    return Audit.total(audits)


def audit_log(receipts: Receipts, log: Sequence[LoggedEvent], *, prefixes_max: int = 100) -> Audit:
    """Audit one log. Rebuild the view of at most `prefixes_max` of its prefixes."""
    reading = _Reading(receipts, log)
    reading.check_seqs()
    reading.check_messages()
    reading.check_events()
    reading.check_turns()
    reading.check_policy()
    reading.check_calls()
    reading.check_views(prefixes_max)
    return Audit(
        conversations=1,
        events=len(log),
        acknowledged=receipts.acknowledged,
        problems=tuple(f"conversation {receipts.conversation_id}: {p}" for p in reading.problems),
        condensations=sum(isinstance(event, CondensationEvent) for _, event in log),
        **reading.counts,
    )


class _Reading:
    """One log beside its receipts; each check adds to the counts and to the problems."""

    def __init__(self, receipts: Receipts, log: Sequence[LoggedEvent]) -> None:
        self._receipts = receipts
        self._log = log
        self._exchanges = {
            message_id(receipts.conversation_id, n): n
            for n in range(len(receipts.recorded.exchanges))
        }
        self._steered = {
            event.id: event.steers for _, event in log if isinstance(event, MessageQueuedEvent)
        }
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def _wrong(self, count: str | None, problem: str) -> None:
        if count is not None:
            self.counts[count] += 1
        self.problems.append(problem)

    def check_seqs(self) -> None:
        """Check that seqs rise from 1 without gaps, and that no event is there twice."""
        first_seqs: dict[str, int] = {}
        for position, (seq, event) in enumerate(self._log, 1):
            if seq != position:
                self._wrong("out_of_order", f"seq {seq} is at position {position} of the log")
            first = first_seqs.setdefault(event.id, seq)
            if first != seq:
                self._wrong("duplicated", f"event {event.id} is at seq {first} and at seq {seq}")

    def check_messages(self) -> None:
        """Check that each acknowledged chat message is there once, at its seq, and in order."""
        queued: dict[int, LoggedEvent] = {}
        begun: dict[int, LoggedEvent] = {}
        for logged in self._log:
            event = logged.event
            if not isinstance(event, MessageQueuedEvent | UserMessageEvent):
                continue
            exchange = self._exchanges.get(event.message_id or "")
            if exchange is None:
                self._wrong(None, f"seq {logged.seq}: no user sent message id {event.message_id}")
                continue
            if event.content != self._receipts.recorded.exchanges[exchange].content:
                self._wrong(None, f"seq {logged.seq}: not the text of message {exchange}")
            there = queued if isinstance(event, MessageQueuedEvent) else begun
            other = there.setdefault(exchange, logged)
            if other is not logged:
                what = f"message {exchange} is at seq {other.seq} and at seq {logged.seq}"
                self._wrong("duplicated", what)
            if isinstance(event, UserMessageEvent):
                waited = queued[exchange].event.id if exchange in queued else None
                if event.queued_event_id != waited:
                    what = f"message {exchange} waited as {waited}, and began as if it had not"
                    self._wrong("duplicated", what)
        self._check_sent(begun | queued)
        self._check_order(begun)
        self._check_order(queued)
        if self._receipts.is_finished:
            for exchange in begun | queued:
                if exchange not in begun:
                    self._wrong(None, f"message {exchange} still waits for its turn")
                if exchange not in self._receipts.messages:
                    what = f"message {exchange} is in the log and was never acknowledged"
                    self._wrong(None, what)

    def _check_order(self, exchanges: Iterable[int]) -> None:
        newest: dict[int, int] = {}
        for exchange in exchanges:
            sender = exchange % self._receipts.senders
            before = newest.get(sender, -1)
            if exchange < before:
                what = f"message {exchange} comes after message {before}"
                self._wrong("out_of_order", what)
            newest[sender] = exchange

    def _check_sent(self, first: Mapping[int, LoggedEvent]) -> None:
        for exchange, seq in self._receipts.messages.items():
            if exchange not in first:
                self._wrong("lost", f"message {exchange}, acknowledged at seq {seq}, is lost")
                continue
            self.counts["found"] += 1
            if first[exchange].seq != seq:
                what = f"message {exchange}, acknowledged at seq {seq}, is at {first[exchange].seq}"
                self._wrong("out_of_order", what)

    def check_events(self) -> None:
        """Check that each event that was acknowledged to the agent is there, at its seq."""
        seqs = {event.id: seq for seq, event in reversed(self._log)}
        for event_id, seq in self._receipts.events.items():
            if event_id not in seqs:
                self._wrong("lost", f"event {event_id}, acknowledged at seq {seq}, is lost")
                continue
            self.counts["found"] += 1
            if seq is not None and seqs[event_id] != seq:
                what = f"event {event_id}, acknowledged at seq {seq}, is at {seqs[event_id]}"
                self._wrong("out_of_order", what)

    def check_turns(self) -> None:
        """Check that turns do not overlap, that each ends once, and that each is as recorded."""
        running: str | None = None
        turns: dict[str, list[Event]] = {}
        for seq, event in self._log:
            match event:
                case TurnStartedEvent(turn_id=str(turn_id)):
                    if running is not None:
                        self._wrong(None, f"seq {seq}: a turn starts while turn {running} runs")
                    if turn_id in turns:
                        self._wrong("duplicated", f"seq {seq}: turn {turn_id} starts again")
                    running = turn_id
                    turns[turn_id] = []
                case MessageQueuedEvent() | MessageWithdrawnEvent():
                    pass  # of a turn that is yet to come, or never will
                case Event(turn_id=str(turn_id)):
                    if turn_id == running:
                        turns[turn_id].append(event)
                    else:
                        what = f"seq {seq}: {event.kind} is of turn {turn_id}, which does not run"
                        self._wrong("out_of_order", what)
                    if isinstance(event, TurnEndedEvent):
                        running = None
                case _:
                    pass
        if running is not None and self._receipts.is_finished:
            self._wrong(None, f"turn {running} has not ended")
        self.counts["turns"] = len(turns)
        told = dict(self._receipts.ended)
        for turn_id, events in turns.items():
            self._check_turn(turn_id, events, told)
        for exchange, outcome in told.items():
            self._wrong(None, f"the user of message {exchange} was told {outcome}; it has no turn")

    def _check_turn(self, turn_id: str, events: Sequence[Event], told: dict[int, str]) -> None:
        ended = [event for event in events if isinstance(event, TurnEndedEvent)]
        messages = [event for event in events if isinstance(event, UserMessageEvent)]
        # A message that steers joins the running turn; any other has a turn of its own.
        joined = [message for message in messages[1:] if self._steers(message) == turn_id]
        if not messages or len(joined) < len(messages) - 1:
            self._wrong(None, f"turn {turn_id} has {len(messages)} user messages")
            return
        exchanges = [self._exchanges.get(message.message_id or "") for message in messages]
        known = [exchange for exchange in exchanges if exchange is not None]
        if len(known) < len(exchanges):
            return  # told already
        outcome = ended[0].outcome if ended else None
        what = f"the turn of message {known[0]}"
        self.counts["joined"] += len(joined)
        if outcome == "interrupted":
            self.counts["interrupted"] += 1
        elif outcome == "rolled_back":
            self.counts["rolled_back"] += 1
        elif outcome != "completed" and (ended or self._receipts.is_finished):
            why = [event.error for event in events if isinstance(event, ConversationErrorEvent)]
            self._wrong(None, f"{what} is {outcome}: {', '.join(why)}")
        for exchange in known:
            if exchange in self._receipts.ended and told.pop(exchange, None) != outcome:
                said = self._receipts.ended[exchange]
                told_so = f"the user of message {exchange} was told {said}, it is {outcome}"
                self._wrong(None, told_so)
        recorded = self._receipts.recorded.exchanges
        steps = [step for exchange in known for step in recorded[exchange].steps]
        difference = _difference(steps, events, is_whole=outcome == "completed")
        if difference is not None:
            self._wrong(None, f"{what} is not as recorded: {difference}")

    def _steers(self, message: UserMessageEvent) -> str | None:
        """Return the turn that a queued message was to join."""
        return self._steered.get(message.queued_event_id or "")

    def check_policy(self) -> None:
        """Check that the log has only events that its overlap policy can lead to.

        Messages wait only under `queue` and `steer`, and under `steer` each names the running turn.
        A message cuts a turn off only under `interrupt` and `rollback`, and takes it out of the
        view only under `rollback`.
        """
        policy = self._receipts.on_overlap
        if policy is None:
            return
        running: str | None = None
        taken_back: set[str] = set()
        cuts = 0
        for seq, event in self._log:
            match event:
                case TurnStartedEvent():
                    running = event.turn_id
                case MessageQueuedEvent():
                    if policy not in ("queue", "steer"):
                        self._wrong(None, f"seq {seq}: a message waits, under {policy}")
                    elif event.steers != (running or "" if policy == "steer" else None):
                        what = f"a message steers {event.steers}, under {policy}"
                        self._wrong(None, f"seq {seq}: {what}, while turn {running} runs")
                case TurnEndedEvent(turn_id=turn_id, outcome=outcome):
                    running = None
                    cuts += outcome == "interrupted"
                    if outcome == "rolled_back":
                        taken_back.add(turn_id or "")
                        if policy != "rollback":
                            self._wrong(
                                None, f"seq {seq}: turn {turn_id} is rolled back, under {policy}"
                            )
                case _:
                    pass
        most = self._receipts.cuts_max
        if policy in ("queue", "steer", "reject") and most is not None and cuts > most:
            what = f"more turns were interrupted ({cuts}) than workers were killed ({most})"
            self._wrong(None, f"{what}, under {policy}")
        for kept in View.from_events([event for _, event in self._log]) if taken_back else ():
            if kept.turn_id in taken_back:
                self._wrong(None, f"event {kept.id} of a turn that was rolled back is in the view")

    def check_calls(self) -> None:
        """Check that each call has a unique id, and exactly one result."""
        calls = Counter(e.tool_call_id for _, e in self._log if isinstance(e, ActionEvent))
        answers = Counter(
            e.tool_call_id
            for _, e in self._log
            if isinstance(e, ObservationEvent | AgentErrorEvent | UserRejectEvent)
        )
        self.counts["calls"] = calls.total()
        for call_id, times in calls.items():
            if times > 1:
                self._wrong("duplicated", f"call id {call_id} names {times} calls")
            elif answers[call_id] == 1:
                self.counts["calls_answered_once"] += 1
            elif answers[call_id] or self._receipts.is_finished:
                self._wrong(None, f"call {call_id} has {answers[call_id]} results")
        for call_id in answers:
            if call_id not in calls:
                self._wrong(None, f"there is a result for {call_id}, and no call")

    def check_views(self, prefixes_max: int) -> None:
        """Check that the view kept event by event equals the rebuilt one, at some prefixes."""
        fold = ViewFold()
        events = [event for _, event in self._log]
        stride = len(events) // prefixes_max + 1
        for length, event in enumerate(events, 1):
            fold.fold(event)
            if length % stride == 0 or length == len(events):
                view, rebuilt = fold.snapshot(), View.from_events(events[:length])
                self.counts["views_checked"] += 1
                if view != rebuilt:
                    self._wrong("views_diverged", f"the view after seq {length} is not the rebuilt")
        if self._receipts.view_ids is not None:
            self.counts["views_checked"] += 1
            if self._receipts.view_ids != tuple(event.id for event in View.from_events(events)):
                self._wrong("views_diverged", "the owner's view is not the one of the log")


def _difference(
    steps: Sequence[RecordedStep], events: Sequence[Event], *, is_whole: bool
) -> str | None:
    """Describe how a turn's events differ from the recording; a partial turn must be its start."""
    recorded: list[tuple[str, str, object]] = []
    results: dict[int, str] = {}
    for step in steps:
        for n, call in enumerate(step.calls):
            results[len(recorded)] = call.result
            recorded.append((call.tool_name, "" if n else step.text, call.arguments))
        if not step.calls:
            recorded.append(("", step.text, None))
    position = 0
    positions: dict[str, int] = {}
    found: tuple[str, str, object]
    for event in events:
        match event:
            case ActionEvent():
                found = (event.tool_name, event.text, event.arguments)
                positions[event.tool_call_id] = position
            case AgentMessageEvent(interrupted=True) if not is_whole:
                if position == len(recorded) or not recorded[position][1].startswith(event.content):
                    return f"event {event.id} is not the beginning of what was said"
                continue
            case AgentMessageEvent():
                found = ("", event.content, None)
            case ObservationEvent():
                if results.get(positions.get(event.tool_call_id, -1)) != event.content:
                    return f"event {event.id} is not the recorded result"
                continue
            case AgentErrorEvent() if is_whole:
                return f"event {event.id} is an error in place of a result"
            case _:
                continue
        if position == len(recorded) or recorded[position] != found:
            return f"event {event.id} is not what was said or called next"
        position += 1
    if is_whole and position < len(recorded):
        return f"it ends after {position} of {len(recorded)} texts and calls"
    return None
