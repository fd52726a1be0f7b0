"""The items of a mailbox: messages in their envelopes, orders, and the handle to a late answer.

Owns the end of an ask. It ends exactly once: by a reply, an error, its deadline, or because its
asker has left. Later answers have no effect. A tell is a plain tuple, because a mailbox holds a
great many of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeAlias

from typing_extensions import TypeVar

from ._backend import OneShot
from .errors import ActorFailed, NotAnsweredInTime, NotDelivered, NotStartedInTime

__all__ = ["Ask", "Delivery", "Firing", "Item", "Message", "Order", "OrderKind", "Tell"]

R = TypeVar("R")
# Any: an actor that does not name its messages is not checked for them.
M_co = TypeVar("M_co", covariant=True, default=Any)


class Message(Generic[R]):
    """The base of messages that are asked; its parameter is the type of the answer.

    Write frozen dataclasses: `@dataclass(frozen=True) class Get(Message[int])`. Then
    `await ref.ask(Get())` is an `int` to the type checker. A message that is only told needs no
    base.
    """

    __slots__ = ()

    may_be_lost: ClassVar[bool] = False
    """True if its loss does no harm, such as that of a piece of an answer: as a dead letter, it is
    counted and published, but not logged."""


Tell: TypeAlias = tuple[object, float, object]
"""A told message: the message, the time at which it was sent, the trace that it belongs to."""


class Ask(OneShot[Any]):
    """A message, and the asker that waits for its answer."""

    value: Any
    # Set when the clock is armed, and read when it expires.
    timeout_s: float
    deadline: float

    __slots__ = ("actor", "deadline", "is_started", "message", "sent_at", "timeout_s", "trace")

    def __init__(self, message: object, actor: str, sent_at: float, trace: object) -> None:
        # Written out, and not through super(): this runs once per ask.
        self.is_done = False
        self.value = self.error = self.waker = None
        self.message = message
        self.actor = actor
        self.sent_at = sent_at
        self.trace = trace
        self.is_started = False

    def abandon(self) -> None:
        """Drop the ask: its asker has gone. If it has not been started yet, it is skipped."""
        self.is_done = True

    def expire(self) -> None:
        """Fail the ask: its deadline has passed."""
        late = NotAnsweredInTime if self.is_started else NotStartedInTime
        self.fail(late(self.message, self.actor, self.timeout_s))

    def return_to_sender(self, reason: str, cause: BaseException | None = None) -> None:
        """Give the asker its message back: it will not be handled."""
        error = NotDelivered(self.message, self.actor, reason)
        error.__cause__ = cause
        self.fail(error)


class Firing:
    """A timer's message; not handled if the timer was cancelled after it fired."""

    __slots__ = ("_when_taken", "is_due", "message", "sent_at")

    def __init__(
        self, message: object, sent_at: float, when_taken: Callable[[], None] | None
    ) -> None:
        self.message = message
        self.sent_at = sent_at
        self.is_due = True
        self._when_taken = when_taken

    def take(self) -> bool:
        """Take the message; True if it is to be handled, which it is at most once."""
        if not self.is_due:
            return False
        self.is_due = False
        when_taken, self._when_taken = self._when_taken, None  # its timer refers to this
        if when_taken is not None:
            when_taken()
        return True


class OrderKind(Enum):
    """The orders that a cell obeys; the set is closed."""

    STOP = "stop for good"
    FAIL = "fail with an error"
    HOLD = "end the incarnation and wait for the supervisor"
    PASSIVATE = "leave the directory if idle"


@dataclass(slots=True)
class Order:
    """An order of the runtime to an actor; it goes before all messages."""

    kind: OrderKind
    error: BaseException | None = None
    reason: str = ""
    given_by: object = None
    """The incarnation that an order to fail is meant for."""
    patient_until: float | None = None
    """When, by the loop's clock, handlers of the actor and of those below it are cancelled."""


Item: TypeAlias = Tell | Ask | Firing | Order


class Loop(Protocol):
    """The part of the runtime's world that a dropped delivery needs."""

    call_soon: Callable[[Callable[[], None]], bool]


class Debtor(Protocol):
    """The incarnation that owes the answer to a deferred ask."""

    @property
    def name(self) -> str: ...

    @property
    def system(self) -> Loop: ...

    def defer(self, ask: Ask) -> None: ...

    def note_answered(self, ask: Ask) -> None: ...


class Delivery(Generic[M_co]):
    """One message, and the means to answer it, now or after the handler has returned.

    If the delivery is dropped without an answer, the asker gets `ActorFailed`. Answering never
    raises and never waits, even if the asker has gone or has been answered already. Answer in the
    loop, not from another thread.
    """

    __slots__ = ("_ask", "_debtor", "message")

    def __init__(self, debtor: Debtor, message: M_co, ask: Ask | None) -> None:
        self.message = message
        self._debtor = debtor
        self._ask = ask

    def reply(self, value: object) -> None:
        """Answer the asker with this value."""
        if (ask := self._ask) is not None:
            self._ask = None
            ask.set(value)
            self._debtor.note_answered(ask)

    def fail(self, error: BaseException) -> None:
        """Answer the asker with exactly this error."""
        if (ask := self._ask) is not None:
            self._ask = None
            ask.fail(error)
            self._debtor.note_answered(ask)

    def defer(self) -> None:
        """Note that the answer, if it is still owed, comes after the handler has returned."""
        if (ask := self._ask) is not None and not ask.is_done:
            self._debtor.defer(ask)

    def __del__(self) -> None:
        # It may run in any thread, so the rest is left to the loop. It is needed even if the asker
        # has left: the actor may still have the ask on its list of deferred ones.
        if (ask := self._ask) is not None:
            self._debtor.system.call_soon(partial(_fail_dropped, self._debtor, ask))


def _fail_dropped(debtor: Debtor, ask: Ask) -> None:
    ask.fail(ActorFailed(debtor.name, "it dropped the message without an answer"))
    debtor.note_answered(ask)
