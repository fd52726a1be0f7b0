"""The five kinds of failure, divided by what the caller can do, and the runtime's own errors.

| base | what happened | the caller should |
|---|---|---|
| `Refused` | nothing | change the request, or try later |
| `OwnershipLost` | nothing | go to the new owner |
| `Unavailable` | nothing | try again, under the same id |
| `OutcomeUnknown` | perhaps it, perhaps nothing | send again under the same id, or read back |
| `InvariantViolation` | a bug of ours | stop |

Every error that leaves turnkeeper is one of these five. Facts are attributes; nobody parses text.
"""

from __future__ import annotations


class TurnkeeperError(Exception):
    """The root of all five kinds; catch one of the kinds, not this."""


class Refused(TurnkeeperError):
    """The request is not acceptable as it is; nothing happened."""


class OwnershipLost(TurnkeeperError):
    """Another owner holds a newer epoch; nothing happened here."""


class Unavailable(TurnkeeperError):
    """It cannot be done now; nothing happened, and the same request may be sent again."""


class OutcomeUnknown(TurnkeeperError):
    """It may have happened; send again under the same id, or read back."""


class InvariantViolation(TurnkeeperError):
    """A bug of ours was caught in the act; whoever sees it must stop, not retry."""


class MailboxFull(Refused):
    """The mailbox has no room and its owner chose not to let senders wait; nothing happened."""

    def __init__(self, actor: str, capacity: int) -> None:
        self.actor = actor
        self.capacity = capacity
        super().__init__(
            f"message to {actor} refused: its mailbox holds {capacity} messages already; "
            f"nothing happened; send again later"
        )


class AskCycle(Refused):
    """This ask would have waited for its own asker; nothing happened."""

    def __init__(self, cycle: tuple[str, ...]) -> None:
        self.cycle = cycle
        super().__init__(
            f"ask refused: it would wait for itself ({' -> '.join(cycle)}); nothing happened; "
            f"tell instead, or ask from an effect"
        )


class NotDelivered(Unavailable):
    """The message was never handled; it is inside, so that it can be sent elsewhere."""

    def __init__(self, message: object, actor: str, reason: str) -> None:
        self.message = message
        self.actor = actor
        self.reason = reason
        super().__init__(
            f"{type(message).__name__} not delivered to {actor}: {reason}; nothing happened; "
            f"the message is in this error"
        )


class NotStartedInTime(Unavailable):
    """The deadline passed before the actor had begun with the message; it never will."""

    def __init__(self, message: object, actor: str, timeout_s: float) -> None:
        self.message = message
        self.actor = actor
        self.timeout_s = timeout_s
        super().__init__(
            f"{type(message).__name__} to {actor} was not started within {timeout_s} s; "
            f"nothing happened; send again"
        )


class NotAnsweredInTime(OutcomeUnknown):
    """The deadline passed while the actor was at it; it is handled to its end, unheard."""

    def __init__(self, message: object, actor: str, timeout_s: float) -> None:
        self.message = message
        self.actor = actor
        self.timeout_s = timeout_s
        super().__init__(
            f"{type(message).__name__} to {actor} was started but not answered within "
            f"{timeout_s} s; it may yet happen; send again under the same id, or read back"
        )


class ActorFailed(OutcomeUnknown):
    """The actor failed, or forgot its answer, while it had the message; `__cause__` says why."""

    def __init__(self, actor: str, found: str) -> None:
        self.actor = actor
        self.found = found
        super().__init__(
            f"no answer from {actor}: {found}; it may have happened; "
            f"send again under the same id, or read back"
        )


class TooManyRestarts(Unavailable):
    """The actor failed more often than its supervision allows; `__cause__` is the last failure."""

    def __init__(self, actor: str, restarts_max: int, window_s: float) -> None:
        self.actor = actor
        self.restarts_max = restarts_max
        self.window_s = window_s
        super().__init__(
            f"{actor} given up: more than {restarts_max} restarts within {window_s} s; "
            f"nothing happened; try again later"
        )


class TooManyThreads(Unavailable):
    """Too many blocking calls were abandoned and are still running; this one was not started."""

    def __init__(self, abandoned: int) -> None:
        self.abandoned = abandoned
        super().__init__(
            f"blocking call not started: {abandoned} abandoned ones are still running; "
            f"nothing happened; try again later"
        )
