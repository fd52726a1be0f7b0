"""The actor that is running and the asks that it waits for; refuses cycles of asks.

An ask that would wait for its own asker, through however many actors, is refused before it is
sent. Two kinds of cycles are not found, and only a timeout ends them: those through a deferred
reply, since no code can tell which effect will give it; and those through a task that a handler
started outside trio's and anyio's task groups, since no code can tell that the handler waits for
the task.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Protocol

from ._messages import Ask
from .errors import AskCycle

__all__ = ["Party", "current_actor", "forget_wait", "in_effect", "note_wait"]


class Home(Protocol):
    """The runtime of an actor, as one that asks sees it."""

    home: object
    is_in_worker: Callable[[], bool]


class Party(Protocol):
    """An actor, as one that asks and is asked."""

    @property
    def system(self) -> Home: ...

    name: str
    at_rest: bool
    asking: dict[Ask, Party] | None
    """The asks that its handlers wait for, and whom they ask; made at first use."""

    def is_below(self, other: object) -> bool:
        """True if the other is its parent, its parent's parent, and so on."""


current_actor: ContextVar[Party] = ContextVar("turnkeeper_current_actor")
"""The actor on whose behalf this code runs: its handlers, its effects, tasks they started."""

in_effect: ContextVar[bool] = ContextVar("turnkeeper_in_effect", default=False)
"""True in the code of an effect: its actor does not wait for that."""


def note_wait(asker: Party, ask: Ask, target: Party) -> None:
    """Write down that `asker` waits for `target`; raise `AskCycle` if that waits for `asker`."""
    _refuse_cycle(asker, target)
    if asker.asking is None:
        asker.asking = {}
    asker.asking[ask] = target


def forget_wait(asker: Party, ask: Ask) -> None:
    """Take `note_wait` back: the ask has ended."""
    if asker.asking is not None:
        asker.asking.pop(ask, None)


def _refuse_cycle(asker: Party, target: Party) -> None:
    trail: list[tuple[Party, tuple[str, ...]]] = [(target, (asker.name, target.name))]
    seen: set[Party] = set()
    while trail:
        party, path = trail.pop()
        if party is asker:
            raise AskCycle(path)
        if party not in seen:
            seen.add(party)
            trail.extend((each, (*path, each.name)) for each in (party.asking or {}).values())
