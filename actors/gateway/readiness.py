"""Readiness: whether another node should get the requests instead of this one.

A node is unready only if another may do better: it is draining, is not open yet, is out of threads,
or may not write although the database answers. A database that does not answer is away for all
nodes: this one stays ready, and its requests get 503 with `Retry-After`.
"""

from __future__ import annotations

import anyio

from turnkeeper.runtime import DaemonThreads, TurnkeeperError

from ..journal import ListQuery
from .problems import OWN, Problem
from .service import Service

__all__ = ["find_unreadiness"]

ANSWER_S = 2.0
"""Within how many seconds the database must answer, or count as away."""


async def find_unreadiness(service: Service) -> Problem | None:
    """Return why another node should get the requests; None if this one is ready."""
    conversations = service.conversations
    if service.streams.is_draining or conversations.is_draining:
        return OWN["draining"]
    if not conversations.is_open:
        return OWN["not-open"]
    threads = conversations.runtime.ports.blocking
    if isinstance(threads, DaemonThreads) and threads.is_exhausted:
        return OWN["out-of-threads"]
    if service.is_read_only or conversations.journal.is_lease_valid():
        return None
    try:
        with anyio.move_on_after(ANSWER_S):
            await conversations.journal.page(ListQuery(1))
            return OWN["not-writing"]
    except TurnkeeperError:
        pass
    return None
