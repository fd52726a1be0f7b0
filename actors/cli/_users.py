"""The users of a replay, as pure state machines, and the plan that is drawn from a seed.

A `User` plays one recorded conversation from the user's side. Reports from the worker go in,
orders to the worker come out; a `User` never waits and does no I/O. Acknowledgements go into its
receipts, for the audit. A worker may die between any two reports: `orders_for_new_worker` returns
the orders that the next worker needs. They repeat earlier orders under the same message ids, so
nothing that the dead worker had written is written twice.

An overlapping message is sent before the previous message is answered. To ensure this, the agent
waits at a step that the seed chose, until the overlapping message was accepted or refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..core.commands import OnOverlap
from ..recordings.audit import Receipts
from ..recordings.transcripts import RecordedConversation
from ._protocol import Accepted, Ended, Held, Logged, Order, Part, Refused, Release, Send

if TYPE_CHECKING:
    from random import Random

__all__ = ["Kill", "User", "plan_kills", "plan_users"]

# A kill comes some lines after an acknowledgement, so it may also fall between a call and its
# result.
_LINES_BEFORE_KILL_MAX = 20


class Kill(NamedTuple):
    """The moment of a kill, measured by progress instead of time."""

    acknowledged: int
    """After this many acknowledged chat messages…"""
    lines: int
    """…and this many further lines."""


@dataclass(slots=True)
class User:
    """One recorded user. `note` and `orders_for_new_worker` are its only writers."""

    part: Part
    on_overlap: OnOverlap
    overlapping: frozenset[int]
    receipts: Receipts
    rejected: int = 0
    overlapped: int = 0
    """The number of chat messages sent before the answer to the one before."""
    problems: list[str] = field(default_factory=list)
    _next: int = 0
    _is_in_flight: bool = False
    """True if the next message was sent, and was not accepted or refused yet."""
    _is_refused: bool = False
    """True if the next message was refused; it is sent again when the running turn has ended."""
    _is_given_up: bool = False
    _held: set[int] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        """True once every message was accepted and every turn has ended."""
        return self._is_given_up or len(self.receipts.ended) == len(self.part.recorded.exchanges)

    def orders_for_new_worker(self) -> Sequence[Order]:
        """Return the orders for a new worker: for all exchanges that have not ended, and the next.

        Call it before `note` gets the worker's first report: a recovered turn may be held at once.
        """
        self._held.clear()
        open_ones = [n for n in self.receipts.messages if n not in self.receipts.ended]
        if self._is_in_flight:
            open_ones.append(self._next)
            # The dead worker may have written it, so a duplicate breaks no promise.
            self._is_refused = False
        return [*map(self._send, open_ones), *self._send_next()]

    def note(self, report: Accepted | Refused | Logged | Held | Ended) -> Sequence[Order]:
        """Process a report about this conversation; return the orders that follow."""
        match report:
            case Logged():
                known = self.receipts.events.setdefault(report.event_id, report.seq)
                if known != report.seq:
                    self._wrong(
                        f"event {report.event_id} was reported at seq {known} and at {report.seq}"
                    )
                return ()
            case Accepted():
                return [*self._accepted(report), *self._send_next()]
            case Refused():
                return [*self._refused(report), *self._send_next()]
            case Held(exchange=exchange):
                self._held.add(exchange)
                if self._is_awaited(exchange + 1):
                    return [*self._send_next()]
                return [*self._release(exchange)]
            case Ended(exchange=exchange, outcome=outcome):
                told = self.receipts.ended.setdefault(exchange, outcome)
                if told != outcome:
                    self._wrong(f"the turn of message {exchange} ended {told}, then {outcome}")
                self.receipts.is_finished = self.is_done and not self._is_given_up
                return [*self._send_next()]

    def _is_awaited(self, exchange: int) -> bool:
        """True until this overlapping message has been accepted or refused for the first time."""
        is_refused = self._is_refused and exchange == self._next
        is_answered = exchange in self.receipts.messages or is_refused or self._is_given_up
        return exchange in self.overlapping and not is_answered

    def _accepted(self, report: Accepted) -> Iterator[Order]:
        exchange, seq = report.exchange, report.seq
        if self._is_in_flight and exchange == self._next:
            if self._is_refused and report.is_duplicate:
                self._wrong(f"message {exchange} was refused, but was written")
            self.receipts.messages[exchange] = seq
            self._next += 1
            self._is_in_flight = self._is_refused = False
            yield from self._release(exchange - 1)
        elif not report.is_duplicate or seq != self.receipts.messages[exchange]:
            known = self.receipts.messages[exchange]
            self._wrong(f"message {exchange}, known at seq {known}, was written again at {seq}")

    def _refused(self, report: Refused) -> Iterator[Order]:
        exchange = report.exchange
        self.rejected += 1
        self._is_in_flight = False
        if exchange == 0 or exchange - 1 in self.receipts.ended:
            self._is_given_up = True
            self._wrong(f"message {exchange} was refused, and no turn ran: {report.why}")
            return
        self._is_refused = True
        yield from self._release(exchange - 1)

    def _send_next(self) -> Iterator[Order]:
        if self._is_in_flight or self._is_given_up or self._next == self._length:
            return
        before = self._next - 1
        if before >= 0 and before not in self.receipts.ended:
            if self._is_refused or self._next not in self.overlapping:
                return
            # Who cuts a turn off waits until there is something of it; all others talk at once, so
            # that several of their messages queue up.
            if self.on_overlap in ("interrupt", "rollback") and before not in self._held:
                return
            self.overlapped += 1
        self._is_in_flight = True
        yield self._send(self._next)

    def _send(self, exchange: int) -> Order:
        return Send(
            conversation=self.part.conversation, exchange=exchange, on_overlap=self.on_overlap
        )

    def _release(self, exchange: int) -> Iterator[Order]:
        if exchange in self._held:
            self._held.remove(exchange)
            yield Release(conversation=self.part.conversation, exchange=exchange)

    @property
    def _length(self) -> int:
        return len(self.part.recorded.exchanges)

    def _wrong(self, problem: str) -> None:
        self.problems.append(f"conversation {self.part.conversation}: {problem}")


def plan_users(
    recorded: Sequence[tuple[str, RecordedConversation, OnOverlap]],
    *,
    overlap: float,
    random: Random,
) -> Sequence[User]:
    """Return a user for each conversation id; the share `overlap` of their messages overlaps."""
    candidates = [
        (conversation, n) for conversation, one, _ in recorded for n in range(1, len(one.exchanges))
    ]
    chosen = random.sample(candidates, round(overlap * len(candidates)))
    overlapping: dict[str, set[int]] = {}
    for conversation, n in chosen:
        overlapping.setdefault(conversation, set()).add(n)
    users = []
    for conversation, one, on_overlap in recorded:
        numbers = sorted(overlapping.get(conversation, ()))
        held = {n - 1: random.randrange(max(1, len(one.exchanges[n - 1].steps))) for n in numbers}
        users.append(
            User(
                part=Part(conversation=conversation, recorded=one, held=held),
                on_overlap=on_overlap,
                overlapping=frozenset(numbers),
                receipts=Receipts(conversation, one, on_overlap=on_overlap),
            )
        )
    return users


def plan_kills(kills: int, users: Sequence[User], random: Random) -> Sequence[Kill]:
    """Plan the kills, spread over all messages of the users."""
    messages = sum(len(user.part.recorded.exchanges) for user in users)
    return sorted(
        Kill(random.randint(1, messages), random.randint(0, _LINES_BEFORE_KILL_MAX))
        for _ in range(kills)
    )
