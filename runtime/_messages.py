"""What lies in a mailbox: messages in their envelopes, and the handle a batch handler gets.

Owns the fate of one question: an ask ends exactly once, by a reply, an error, its deadline or
its asker's leaving, and everything that comes later changes nothing. A tell is a plain tuple,
because a mailbox holds a great many of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

from typing_extensions import TypeVar

from ._backend import OneShot
from .errors import ActorFailed, NotAnsweredInTime, NotDelivered, NotStartedInTime

if TYPE_CHECKING:
    from ._cell import Cell

__all__ = ["Ask", "Delivery", "Firing", "Item", "Message", "Order", "Tell"]

R = TypeVar("R")
# Any: whoever does not say which messages an actor takes is not checked for it.
M_co = TypeVar("M_co", covariant=True, default=Any)


class Message(Generic[R]):
    """The base of messages that are asked, which says what the answer is.

    Write frozen dataclasses: `@dataclass(frozen=True) class Get(Message[int])`. Then
    `await ref.ask(Get())` is an `int` to the type checker. What is only told needs no base.
    """

    __slots__ = ()


Tell: TypeAlias = tuple[object, float, object]
"""A message that nobody waits for; when it was sent; the trace it belongs to."""


class Ask(OneShot[Any]):
    """A message, and the asker that waits for its answer."""

    # Set when the clock is armed, and read when it expires.
    timeout_s: float
    deadline: float

    __slots__ = ("actor", "deadline", "is_started", "message", "sent_at", "timeout_s", "trace")

    def __init__(self, message: object, actor: str, sent_at: float, trace: object) -> None:
        # Written out, and not through super(): this runs once per ask.
        self.is_done = False
        self.value = self.error = self.wake = None
        self.message = message
        self.actor = actor
        self.sent_at = sent_at
        self.trace = trace
        self.is_started = False

    def abandon(self) -> None:
        """The asker has gone. Not started yet, it is skipped; started, its reply is dropped."""
        self.is_done = True

    def expire(self) -> None:
        """The deadline has passed."""
        late = NotAnsweredInTime if self.is_started else NotStartedInTime
        self.fail(late(self.message, self.actor, self.timeout_s))

    def return_to_sender(self, reason: str) -> None:
        """It will not be handled: the asker gets the message back."""
        self.fail(NotDelivered(self.message, self.actor, reason))


class Firing:
    """A timer's message. Asked at the last moment whether the timer still stands."""

    __slots__ = ("_when_taken", "is_due", "message", "sent_at")

    def __init__(
        self, message: object, sent_at: float, when_taken: Callable[[], None] | None
    ) -> None:
        self.message = message
        self.sent_at = sent_at
        self.is_due = True
        self._when_taken = when_taken

    def take(self) -> bool:
        """Whether to handle it; it is handled once."""
        if not self.is_due:
            return False
        self.is_due = False
        if self._when_taken is not None:
            self._when_taken()
        return True


@dataclass(slots=True)
class Order:
    """What the runtime itself tells an actor: it goes before all messages."""

    kind: str
    error: BaseException | None = None
    reason: str = ""


Item: TypeAlias = Tell | Ask | Firing | Order


class Delivery(Generic[M_co]):
    """One message as a batch handler sees it, and the way to answer it.

    It may be kept and answered after the handler has returned. Dropped without an answer, its
    asker gets `ActorFailed`. Answering never raises and never waits, also when the asker is gone
    or has been answered already. Answer in the loop, not from a thread.
    """

    __slots__ = ("_ask", "_cell", "message")

    def __init__(self, cell: Cell, message: M_co, ask: Ask | None) -> None:
        self.message = message
        self._cell = cell
        self._ask = ask

    @property
    def expects_reply(self) -> bool:
        """Whether somebody still waits for the answer."""
        return self._ask is not None and not self._ask.is_done

    def reply(self, value: object) -> None:
        if (ask := self._ask) is not None:
            self._ask = None
            ask.set(value)
            self._cell.is_answered(ask)

    def fail(self, error: BaseException) -> None:
        """The asker gets exactly this error."""
        if (ask := self._ask) is not None:
            self._ask = None
            ask.fail(error)
            self._cell.is_answered(ask)

    def __del__(self) -> None:
        # Runs wherever the last reference goes, in a thread too: hence through the loop.
        ask = self._ask
        if ask is not None and not ask.is_done:
            self._cell.system.call_soon(_Forgotten(self._cell, ask))


class _Forgotten:
    __slots__ = ("_ask", "_cell")

    def __init__(self, cell: Cell, ask: Ask) -> None:
        self._cell = cell
        self._ask = ask

    def __call__(self) -> None:
        self._ask.fail(ActorFailed(self._cell.name, "it dropped the message without an answer"))
        self._cell.is_answered(self._ask)
