"""A stress worker that dies by itself: `mortal_worker.py POINT NTH HOW BACKEND`.

As it passes the named POINT for the NTH time it does HOW to itself: `kill` (SIGKILL), or `break`:
from then on no file can be written beyond its first pages. The points are wrapped around the
production code here, so that it needs none.
"""

import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from turnkeeper.actors import PostgresJournal, RollingCondenser, SQLiteJournal
from turnkeeper.actors.agents.turn_context import TurnContext
from turnkeeper.actors.cli import stress_worker
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.journal import Journal
from turnkeeper.actors.owner import actor
from turnkeeper.actors.owner.actor import ConversationActor

LEASE_S = 1.0
SNAPSHOT_EVENTS = 12
FILE_BYTES = 16_384

P = ParamSpec("P")
T = TypeVar("T")

Point = Callable[[], None]


def before(function: Callable[P, T], reach: Point) -> Callable[P, T]:
    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        reach()
        return function(*args, **kwargs)

    return wrapped


def after(function: Callable[P, T], reach: Point) -> Callable[P, T]:
    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        result = function(*args, **kwargs)
        reach()
        return result

    return wrapped


def after_awaiting(function: Callable[P, Awaitable[T]], reach: Point) -> Callable[P, Awaitable[T]]:
    @wraps(function)
    async def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        result = await function(*args, **kwargs)
        reach()
        return result

    return wrapped


JOURNALS = (SQLiteJournal, PostgresJournal)

# Any: it wraps whatever it is given.
POINTS: Mapping[str, tuple[Callable[[Any, Point], Any], tuple[object, ...], str]] = {
    "before an append": (before, JOURNALS, "append"),
    "after an append, before its publication": (after_awaiting, JOURNALS, "append"),
    "after the answers, before the effects": (after, (ConversationActor,), "_answer"),
    "after the effects have started": (after, (ConversationActor,), "_start_effects"),
    "after a claim, before the log is read": (after_awaiting, JOURNALS, "claim"),
    "after the log is read": (after_awaiting, (actor,), "load_state"),
    "before a snapshot": (before, JOURNALS, "write_snapshot"),
    "after a snapshot": (after_awaiting, JOURNALS, "write_snapshot"),
    "before a tool call": (before, (TurnContext,), "_run_call"),
    "in a tool call": (after_awaiting, (stress_worker._Answerer,), "_pause"),
    "after a tool call": (after_awaiting, (TurnContext,), "_run_call"),
    "before a condensation is told": (after_awaiting, (RollingCondenser,), "propose"),
}
"""Beside the journals' own failpoints, which are in the thread that writes."""

JOURNAL_POINTS: Mapping[str, str] = {
    "before a commit": "begin",
    "after a commit, before it is acknowledged": "committed",
}


def main(point: str, nth: int, how: str, backend: str) -> None:
    left = nth

    def reach() -> None:
        nonlocal left
        left -= 1
        if not left:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            # Python ignores the signal that comes with it, so each write fails with an error.
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))

    def failpoint(boundary: str) -> None:
        if boundary == JOURNAL_POINTS.get(point):
            reach()

    def open_journal(db: str) -> Journal:
        if stress_worker.is_postgres(db):
            return PostgresJournal(db, lease_s=LEASE_S, failpoint=failpoint)
        return SQLiteJournal(db, failpoint=failpoint)

    if point in POINTS:
        wrap, places, name = POINTS[point]
        for place in places:
            setattr(place, name, wrap(getattr(place, name), reach))
    stress_worker.main(backend, open_journal, Limits(snapshot_events=SNAPSHOT_EVENTS))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
