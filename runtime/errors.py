"""The five kinds of failure, divided by what the caller can do, and the runtime's own errors.

| base | did it happen? | the caller should |
|---|---|---|
| `Refused` | no | change the request, or try later |
| `OwnershipLost` | no | go to the new owner |
| `Unavailable` | no | try again, under the same id |
| `OutcomeUnknown` | perhaps | send again under the same id, or read back |
| `InvariantViolation` | a bug in turnkeeper | stop |

Every error that leaves turnkeeper is one of these five. Facts are attributes, so that no caller
has to parse text.
"""

from __future__ import annotations


class TurnkeeperError(Exception):
    """The base class of the five kinds of errors; catch one of the kinds, not this."""


class Refused(TurnkeeperError):
    """The request cannot be accepted as it is; nothing happened: change it, or try later."""


class OwnershipLost(TurnkeeperError):
    """Another owner has a newer epoch; nothing happened here: find that owner, or try again."""


class Unavailable(TurnkeeperError):
    """The request cannot be carried out now; nothing happened: send it again under the same id."""


class OutcomeUnknown(TurnkeeperError):
    """The request may have been carried out; send it again under the same id, or read the log."""


class InvariantViolation(TurnkeeperError):
    """A bug in turnkeeper; stop, do not retry."""


class MailboxFull(Refused):
    """The mailbox is full and its `overflow` lets no sender wait; nothing happened."""

    def __init__(self, actor: str, capacity: int) -> None:
        self.actor = actor
        self.capacity = capacity
        super().__init__(
            f"message to {actor} refused: its mailbox holds {capacity} messages already; "
            f"nothing happened; send again later"
        )


class AskCycle(Refused):
    """The ask would have waited for its own asker; nothing happened."""

    def __init__(
        self,
        cycle: tuple[str, ...],
        *,
        attempt: str = "ask",
        advice: str = "tell instead, or ask from an effect",
    ) -> None:
        self.cycle = cycle
        super().__init__(
            f"{attempt} refused: it would wait for itself ({' -> '.join(cycle)}); "
            f"nothing happened; {advice}"
        )


class ActorEnded(Refused):
    """An actor that is ending can start nothing more: no effect, timer, child or watch."""

    def __init__(self, actor: str, attempt: str) -> None:
        self.actor = actor
        self.attempt = attempt
        super().__init__(
            f"{actor} cannot {attempt}: it is ending or has ended; nothing happened; "
            f"do it before the end, or in a successor"
        )


class NotDelivered(Unavailable):
    """The message was not handled and never will be; `message` has it, to be sent elsewhere."""

    def __init__(self, message: object, actor: str, reason: str) -> None:
        self.message = message
        self.actor = actor
        self.reason = reason
        super().__init__(
            f"{type(message).__name__} not delivered to {actor}: {reason}; nothing happened; "
            f"the message is in this error"
        )


class NotStartedInTime(Unavailable):
    """The deadline passed before the actor had started the message; it never will."""

    def __init__(self, message: object, actor: str, timeout_s: float) -> None:
        self.message = message
        self.actor = actor
        self.timeout_s = timeout_s
        super().__init__(
            f"{type(message).__name__} to {actor} was not started within {timeout_s} s; "
            f"nothing happened; send again"
        )


class NotAnsweredInTime(OutcomeUnknown):
    """The deadline passed while the actor handled the message; it goes on, its reply is dropped."""

    def __init__(self, message: object, actor: str, timeout_s: float) -> None:
        self.message = message
        self.actor = actor
        self.timeout_s = timeout_s
        super().__init__(
            f"{type(message).__name__} to {actor} was started but not answered within "
            f"{timeout_s} s; it may yet happen; send again under the same id, or read back"
        )


class ActorFailed(OutcomeUnknown):
    """The actor failed or dropped the message without an answer; `__cause__` says why."""

    def __init__(self, actor: str, found: str) -> None:
        self.actor = actor
        self.found = found
        super().__init__(
            f"no answer from {actor}: {found}; the message may have taken effect; "
            f"send it again under the same id, or read back"
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
