"""Draining: a process that is about to leave hands its conversations over to others.

Every owner reads the switch when it decides (from then on it starts no turn) and when it ends (then
it releases its conversation). `hand_over` ends the owners, those at rest first.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from sys import float_info
from typing import get_args

import anyio.lowlevel

from turnkeeper.runtime import Ports, Region, TurnkeeperError
from turnkeeper.runtime.lowlevel import task_group

from ..core.commands import Command, Leave, Query
from ..core.working_state import WhileDraining
from ..errors import Draining, InvalidInput
from ..log_lines import log_unavailable
from ..values.text import check_number
from .subscriptions import Subscriptions

__all__ = ["Drain", "Drained", "check_drain", "hand_over"]

_LOOK_S = 0.1
"""The pause between two looks for conversations that have come to rest."""
_AT_ONCE_MAX = 256


@dataclass(frozen=True, slots=True)
class Drained:
    """The fate of the conversations that were active when a process was drained."""

    released: int
    """How many were released: another process can claim them at once."""
    interrupted: Sequence[str]
    """The conversations whose turn was interrupted at the end of the grace period."""


@dataclass(slots=True)
class Drain:
    """The switch that all owners of a `Conversations` read. It cannot be turned off."""

    messages: WhileDraining | None = None
    """The fate of new chat messages; None while the process is not draining."""
    until: float = inf
    """The end of the grace period, by `loop_time` of the ports."""
    active: set[str] = field(default_factory=set)
    """The conversations that were active since it began."""
    interrupted: set[str] = field(default_factory=set)
    """Each owner adds its own, once `Leave` is committed: the call that asked for it may have been
    cancelled, and the next one would not be told."""
    are_all_told: bool = False
    """True once each owner was told to leave, or had left; after a cancellation, the region goes on
    to stop, and answers no further `Leave`."""
    # Held by the call that hands over. A second one, beside it, would tell owners to leave that
    # have left, and take that for turns that it could not end.
    handing_over: anyio.Lock = field(default_factory=lambda: anyio.Lock(fast_acquire=True))

    def begin(self, messages: WhileDraining, *, until: float) -> None:
        """Begin to drain, or shorten the grace period."""
        self.messages = messages
        self.until = min(self.until, until)


def check_drain(grace_s: float, messages: str) -> None:
    """Raise `InvalidInput` if an argument of `drain` is invalid."""
    if messages not in get_args(WhileDraining):
        raise InvalidInput(f'messages is {messages!r}; it takes "queue" or "refuse"')
    check_number("grace_s", grace_s, "seconds from 0 on", least=0, most=float_info.max)


async def hand_over(
    region: Region[Command | Query], subscriptions: Subscriptions, drain: Drain, ports: Ports
) -> Drained:
    """End all owners, at the latest at the end of the grace period, and then the live readers.

    A second call waits for the first, which heeds the grace period of both, and returns the same.
    """
    async with drain.handing_over:
        drain.active.update(region.active)
        if not drain.are_all_told:
            await _tell_all(region, drain, ports)
            drain.are_all_told = True
        await region.stop("its process was drained", refusal=Draining)
        subscriptions.end_live()
        return Drained(len(drain.active), tuple(sorted(drain.interrupted)))


async def _tell_all(region: Region[Command | Query], drain: Drain, ports: Ports) -> None:
    """Wait for owners to come to rest while the grace lasts, and tell the others to leave."""
    while True:
        await _at_once(region.passivate, region.active)
        left_s = drain.until - ports.loop_time()
        if left_s <= 0 or not region.active:
            break
        await ports.sleep(min(_LOOK_S, left_s))
        drain.active.update(region.active)

    async def leave(conversation_id: str) -> None:
        try:
            await region[conversation_id].ask(Leave(), control=True)
        except TurnkeeperError as error:
            log_unavailable("turn not ended", error, conversation=conversation_id)

    await _at_once(leave, region.active)


async def _at_once(do: Callable[[str], Awaitable[object]], keys: Sequence[str]) -> None:
    """Await `do` for each of these keys, at most `_AT_ONCE_MAX` at a time."""
    left = iter(keys)

    async def work() -> None:
        for key in left:
            await do(key)
            await anyio.lowlevel.checkpoint()  # nothing was awaited for one that is not at rest

    # Not a task for each key: to start those of 50,000 conversations stops the loop for seconds.
    async with task_group() as group:
        for _ in keys[:_AT_ONCE_MAX]:
            group.start_soon(work)
