"""The clients of a stress run and their messages, as a pure state machine driven by a seed.

Chat messages arrive at a rate, as from independent people (a Poisson process), even while no worker
runs. Time and the worker's reports go in; orders to the worker come out. Each conversation has
several senders. A sender sends its next message when the previous one is acknowledged, so its
messages have an order. The latency of a message counts from when it was due until it is durable or
refused, so an outage adds to the latency of every message that was due during it. After a refusal,
the latency of the repeated message is counted separately.

A worker may die between any two reports. `orders_for_new_worker` returns the orders that the next
worker needs: it sends unacknowledged messages again under their message ids, and also acknowledged
ones whose turns have not ended, to hear how they end. Acknowledgements go into the receipts, for
the audit.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import cycle
from random import Random

from ..core.commands import OnOverlap
from ..recordings.audit import Receipts
from ..recordings.transcripts import RecordedConversation
from ._protocol import Accepted, Ended, Logged, Order, Refused, Send, Unserved

__all__ = ["ON_OVERLAP", "RESEND_S", "RESEND_S_MAX", "Crowd"]

ON_OVERLAP: Sequence[OnOverlap] = ("queue", "interrupt", "steer", "rollback", "reject")
"""Conversation by conversation."""

RESEND_S = 0.1
RESEND_S_MAX = 5.0
"""Seconds before a client repeats a message that was refused or could not be served. They double
each time; otherwise repeated messages would keep new ones from being served."""

_RECENT_MAX = 64
_PROBLEMS_MAX = 1_000
_NOTHING = RecordedConversation(item=1, exchanges=())


@dataclass(slots=True)
class _Message:
    """A chat message, from when it is due until its turn has ended."""

    chat: _Chat
    number: int
    due: float
    is_known: bool = False
    """True if an earlier worker may have written it: then a duplicate breaks no promise."""
    is_refused: bool = False
    was_refused: bool = False
    is_waiting: bool = False
    """True if it will be sent again a little later."""
    resends: int = 0
    resend_at: float = 0.0


@dataclass(slots=True)
class _Chat:
    """One conversation as its clients see it."""

    receipts: Receipts
    on_overlap: OnOverlap
    sent: list[int]
    """The number of messages of each sender so far."""
    in_flight: dict[int, deque[_Message]] = field(default_factory=dict)
    """By sender: the message that was sent and not acknowledged, and those that are due after
    it."""
    open: dict[int, _Message] = field(default_factory=dict)
    """By number: the messages that were sent and whose turn has not ended."""


class Crowd:
    """All clients. `take_due`, `note` and `orders_for_new_worker` are its only writers."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        senders: int,
        overlap: float,
        rate: float,
        duration_s: float,
        random: Random,
    ) -> None:
        self._senders = senders
        self._overlap = overlap
        self._rate = rate
        self._duration_s = duration_s
        self._random = random
        self._chats = [
            _Chat(Receipts(name, _NOTHING, senders, on_overlap=policy), policy, [0] * senders)
            for name, policy in zip(names, cycle(ON_OVERLAP), strict=False)
        ]
        self._by_name = dict(zip(names, self._chats, strict=True))
        self._pack: list[_Chat] = []
        self._recent: deque[_Chat] = deque(maxlen=_RECENT_MAX)
        self._resends: list[tuple[float, int, _Message]] = []
        self._resend_count = 0
        self._next_arrival: float | None = random.expovariate(rate)
        self.sent = 0
        self.overlapped = 0
        self.rejected = 0
        self.acknowledged = 0
        self.logged = 0
        self.ended = 0
        self.unserved: Counter[str] = Counter()
        """The number of orders that could not be served and were repeated, by error."""
        self.latencies = array("d")
        """Seconds until each message was durable or refused, in order."""
        self.problems: list[str] = []

    @property
    def open(self) -> int:
        """The number of chat messages that have arrived and whose turns have not ended."""
        return self.sent - self.ended

    @property
    def is_done(self) -> bool:
        """True once all chat messages have arrived and every turn has ended."""
        return self._next_arrival is None and not self.open

    @property
    def next_due(self) -> float | None:
        """The time of the next order that does not depend on a report; None if there is none."""
        times = [self._resends[0][0]] if self._resends else []
        if self._next_arrival is not None:
            times.append(self._next_arrival)
        return min(times, default=None)

    @property
    def used(self) -> Sequence[Receipts]:
        """Return the receipts of all conversations that got a message."""
        return [chat.receipts for chat in self._chats if any(chat.sent)]

    def exchanges(self, conversation: str) -> int:
        """Return the largest number of exchanges of one conversation."""
        return max(self._by_name[conversation].sent) * self._senders

    def stop(self) -> None:
        """Stop the arrival of chat messages."""
        self._next_arrival = None

    def take_due(self, now: float) -> Sequence[Order]:
        """Return the orders that are due by now. Time begins at 0 and never steps back."""
        orders: list[Order] = []
        while self._next_arrival is not None and self._next_arrival <= now:
            orders += self._arrive(self._next_arrival)
            self._next_arrival += self._random.expovariate(self._rate)
            if self._next_arrival >= self._duration_s:
                self._next_arrival = None
        while self._resends and self._resends[0][0] <= now:
            message = heappop(self._resends)[2]
            message.is_waiting = False
            orders.append(_send(message))
        return orders

    def orders_for_new_worker(self) -> Sequence[Order]:
        """Return the orders for a new worker: every message sent whose turn has not ended."""
        self._resends.clear()
        orders = []
        for chat in self._chats:
            for message in chat.open.values():
                message.is_known, message.is_refused, message.is_waiting = True, False, False
                orders.append(_send(message))
        return orders

    def note(
        self, report: Accepted | Refused | Unserved | Logged | Ended, now: float
    ) -> Sequence[Order]:
        """Process a report about a conversation; return the orders that follow."""
        chat = self._by_name[report.conversation]
        match report:
            case Logged():
                self._on_logged(chat, report)
                return ()
            case Accepted():
                return [*self._on_accepted(chat, report, now)]
            case Refused(exchange=number):
                self._on_refused(chat.open[number], now)
                return ()
            case Unserved(exchange=number):
                self.unserved[report.error] += 1
                chat.open[number].is_known = True
                self._send_later(chat.open[number], now)
                return ()
            case Ended():
                self._on_ended(chat, report)
                return ()

    def _arrive(self, at: float) -> Iterator[Order]:
        """Add one chat message, from a sender and to a conversation that the seed draws."""
        chat = self._draw_chat()
        sender = self._random.randrange(self._senders)
        number = sender + self._senders * chat.sent[sender]
        chat.sent[sender] += 1
        self.sent += 1
        chat.receipts.is_finished = False
        message = _Message(chat, number, at)
        if sender in chat.in_flight:
            chat.in_flight[sender].append(message)
        else:
            chat.in_flight[sender] = deque((message,))
            yield self._begin(message)

    def _draw_chat(self) -> _Chat:
        """Draw a conversation with a running turn for the overlapping share; else take the next."""
        if self._random.random() < self._overlap:
            running = [chat for chat in self._recent if chat.open]
            if running:
                return self._random.choice(running)
        if not self._pack:
            self._pack = self._random.sample(self._chats, len(self._chats))
        chat = self._pack.pop()
        self._recent.append(chat)
        return chat

    def _begin(self, message: _Message) -> Order:
        self.overlapped += bool(message.chat.open)
        message.chat.open[message.number] = message
        return _send(message)

    def _on_logged(self, chat: _Chat, report: Logged) -> None:
        events = chat.receipts.events
        known = events.setdefault(report.event_id, report.seq)
        if known != report.seq:
            what = f"event {report.event_id} was reported at seq {known} and at {report.seq}"
            self._wrong(chat, what)
        self.logged += 1

    def _on_accepted(self, chat: _Chat, report: Accepted, now: float) -> Iterator[Order]:
        number, seq = report.exchange, report.seq
        messages = chat.receipts.messages
        if number in messages:
            if not report.is_duplicate or seq != messages[number]:
                known = messages[number]
                what = f"message {number}, known at seq {known}, was reported again at seq {seq}"
                self._wrong(chat, what)
            return
        message = chat.open[number]
        if report.is_duplicate and not message.is_known:
            was = "was refused" if message.is_refused else "was sent for the first time"
            self._wrong(chat, f"message {number} {was}, and was in the log already")
        messages[number] = seq
        self.acknowledged += 1
        self.latencies.append(now - message.due)
        sender = number % self._senders
        waiting = chat.in_flight[sender]
        waiting.popleft()
        if waiting:
            if message.was_refused:
                waiting[0].due = max(waiting[0].due, now)
            yield self._begin(waiting[0])
        else:
            del chat.in_flight[sender]

    def _on_refused(self, message: _Message, now: float) -> None:
        self.rejected += 1
        message.is_refused = message.was_refused = True
        self.latencies.append(now - message.due)
        self._send_later(message, now)
        message.due = message.resend_at

    def _on_ended(self, chat: _Chat, report: Ended) -> None:
        number = report.exchange
        told = chat.receipts.ended.setdefault(number, report.outcome)
        if told != report.outcome:
            self._wrong(chat, f"the turn of message {number} ended {told}, then {report.outcome}")
        if chat.open.pop(number, None) is not None:
            self.ended += 1
        chat.receipts.is_finished = not chat.open and not chat.in_flight

    def _send_later(self, message: _Message, now: float) -> None:
        if not message.is_waiting:
            message.is_waiting = True
            message.resend_at = now + min(RESEND_S * 2**message.resends, RESEND_S_MAX)
            message.resends += 1
            self._resend_count += 1  # breaks ties, so that messages are never compared
            heappush(self._resends, (message.resend_at, self._resend_count, message))

    def _wrong(self, chat: _Chat, problem: str) -> None:
        if len(self.problems) < _PROBLEMS_MAX:
            self.problems.append(f"conversation {chat.receipts.conversation_id}: {problem}")


def _send(message: _Message) -> Order:
    return Send(
        conversation=message.chat.receipts.conversation_id,
        exchange=message.number,
        on_overlap=message.chat.on_overlap,
    )
