"""Dead letters: every message that reached no actor, with the reason.

All are counted and published. The log shows at most ten in ten seconds, and then one line with
the number of those it left out. It shows none of a message that `may_be_lost`. A message that is
handed back inside an error is not a dead letter: its sender knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ._event_stream import EventStream
from ._logger import logger
from ._messages import Message
from ._reports import DeadLetter

__all__ = ["DeadLetters"]

_LOGGED_MAX: Final = 10
_WINDOW_S: Final = 10.0


class DeadLetters:
    """The count of dead letters; subscribe to `DeadLetter` on the event stream to see them."""

    def __init__(self, events: EventStream, now: Callable[[], float]) -> None:
        self.count = 0
        self.count_by_reason: dict[str, int] = {}
        self._events = events
        self.now = now
        self._window_began = float("-inf")
        self._logged = 0
        self._unlogged = 0

    def add(self, message: object, actor: str, reason: str) -> None:
        self.count += 1
        self.count_by_reason[reason] = self.count_by_reason.get(reason, 0) + 1
        self._events.publish(DeadLetter(message, actor, reason))
        kind = type(message)  # a proxy may raise if it is asked for its class
        if not (issubclass(kind, Message) and kind.may_be_lost):
            self._log(kind.__name__, actor, reason)

    def _log(self, kind: str, actor: str, reason: str) -> None:
        """Log the type of the message, never its content."""
        now = self.now()
        if now - self._window_began >= _WINDOW_S:
            if self._unlogged:
                logger.warning("dead letters not logged", count=self._unlogged)
            self._window_began = now
            self._logged = self._unlogged = 0
        if self._logged < _LOGGED_MAX:
            self._logged += 1
            logger.warning("dead letter", message=kind, actor=actor, reason=reason)
        else:
            self._unlogged += 1
