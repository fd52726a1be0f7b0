"""The five kinds of failure, divided by what the caller can do, and the runtime's own errors.

| base | what happened | the caller should |
|---|---|---|
| `Refused` | nothing | change the request, or try later |
| `OwnershipLost` | nothing | go to the new owner |
| `Unavailable` | nothing | try again, under the same id |
| `OutcomeUnknown` | perhaps everything, perhaps nothing | send again under the same id, or read back |
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
