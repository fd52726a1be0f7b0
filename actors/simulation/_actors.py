"""The actor world: two actors, and senders that hurry, wait for room, and leave.

This world has no conversations. It checks the promises of the runtime that they rely on, in runs
that are much shorter. One actor takes a message at a time, the other several at once. A run draws
how many messages may wait, how long each takes and whether it fails, which senders give up and
when, and whether an actor is stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from typing import Literal, get_args

import anyio

from turnkeeper.runtime import (
    Actor,
    ActorFailed,
    Backoff,
    DeadLetter,
    Delivery,
    MailboxSettings,
    Message,
    NotAnsweredInTime,
    NotDelivered,
    NotStartedInTime,
    Ref,
    Refused,
    Runtime,
    Subscription,
    Supervision,
)
from turnkeeper.runtime.testing import Node, Simulation

from ._oracles import INVARIANTS

__all__ = ["ActorWorld"]

_SENDERS = 3
_SENDS = 5
"""Together fewer than 16: after that many, a tell yields to other tasks."""
_DONE_S = 120.0
_RESTARTS_MAX = 100
_BATCH_MAX = 3

_Takes = Literal["no time", "a while", "a failure", "a refusal"]
_How = Literal["told", "asked", "asked with a deadline", "told before others"]


class WorkFails(Exception):
    """A handler raises."""


class _WorkRefused(Refused):
    """A handler refuses."""


@dataclass(frozen=True)
class _Work(Message[int]):
    """A message; its number is also the answer."""

    number: int
    takes: _Takes
    is_control: bool


class _Single(Actor[_Work]):
    """Takes one message at a time."""

    def __init__(self, office: _Office) -> None:
        self._office = office

    def receive(self, message: _Work) -> object:
        self._office.begins([message])
        return self._office.work(message)


class _Batching(Actor[_Work]):
    """Takes several messages at once."""

    batch_max = _BATCH_MAX

    def __init__(self, office: _Office) -> None:
        self._office = office

    async def receive_batch(self, deliveries: Sequence[Delivery[_Work]]) -> None:
        self._office.begins([delivery.message for delivery in deliveries])
        for delivery in deliveries:
            try:
                delivery.reply(await self._office.work(delivery.message))
            except _WorkRefused as refusal:
                delivery.fail(refusal)


class ActorWorld:
    """One run of the world: an actor of each kind, each in its own process."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    async def play(self) -> None:
        """Run both actors side by side, and check what they promise."""
        async with anyio.create_task_group() as group:
            for name, kind in (("n1", _Batching), ("n2", _Single)):
                group.start_soon(_Office(self._simulation, name, kind).play)


class _Office:
    """One actor and its senders."""

    def __init__(
        self, simulation: Simulation, name: str, kind: Callable[[_Office], Actor[_Work]]
    ) -> None:
        self._simulation = simulation
        self._name = name
        self._kind = kind
        self._numbers = count(1)
        self._begun: list[_Work] = []
        """The messages that were handled, in that order."""
        self._accepted: set[int] = set()
        """The numbers of the messages that were told, not asked."""
        self._undone: set[int] = set()
        """The numbers of the messages whose senders know that they are not handled."""
        self._dead: list[int] = []
        """The numbers of the dead letters."""

    async def play(self) -> None:
        """Run a node with the actor, and check what it promises."""
        node = self._simulation.start(self._name, self._serve)
        await node.wait_until_ended()
        if node.error is not None:
            self._simulation.broken("world", repr(node.error))
        self._check_order()

    async def _serve(self, node: Node) -> None:
        simulation = self._simulation
        backoff = Backoff(first_s=simulation.pick("backoff", (0.05, 0.0)))
        supervision = Supervision(restarts_max=_RESTARTS_MAX, backoff=backoff)
        mailbox = MailboxSettings(simulation.pick("capacity", (1024, 1, 2, 4)))
        async with Runtime(ports=node.ports, supervision=supervision) as runtime:
            with runtime.events.subscribe(DeadLetter) as letters:
                node.start_soon(partial(self._count, letters))
                ref = runtime.spawn(lambda: self._kind(self), name="worker", mailbox=mailbox)
                async with anyio.create_task_group() as senders:
                    for _ in range(_SENDERS):
                        senders.start_soon(self._send_all, ref)
                    if simulation.chance("is stopped", 0.2):
                        senders.start_soon(self._stop, ref)
                await self._check_handled()

    async def _count(self, letters: Subscription[DeadLetter]) -> None:
        async for letter in letters:
            assert isinstance(letter.message, _Work), letter
            self._dead.append(letter.message.number)

    async def _stop(self, ref: Ref[_Work]) -> None:
        await self._simulation.delay("stop", 1.0, 3.0)
        await ref.stop()

    # --- the senders -----------------------------------------------------------------------------

    async def _send_all(self, ref: Ref[_Work]) -> None:
        for _ in range(_SENDS):
            await self._send(ref)
            await self._simulation.delay("sender rests", 0.3, 1.0)

    async def _send(self, ref: Ref[_Work]) -> None:
        """Send one message, and note what its sender knows about it afterwards."""
        simulation = self._simulation
        how: _How = simulation.pick("how", get_args(_How))
        takes: _Takes = simulation.pick("takes", get_args(_Takes))
        patience_s = simulation.pick("patience", (60.0, 0.3, 0.05))
        number = next(self._numbers)
        work = _Work(number, takes, how == "told before others")
        # Between the number and the call there is no await: messages are numbered as they are sent.
        try:
            with simulation.move_on_after(patience_s) as scope:
                match how:
                    case "told" | "told before others":
                        await ref.tell(work, control=work.is_control)
                        self._accepted.add(number)
                    case "asked":
                        await self._ask(ref, work, None)
                    case _:
                        await self._ask(ref, work, patience_s / 2)
            if scope.cancelled_caught and not self._has_begun(number):
                simulation.mark("a sender left")
                self._undone.add(number)
        except (NotStartedInTime, NotDelivered):
            self._undone.add(number)
        except (NotAnsweredInTime, ActorFailed):
            if not self._has_begun(number):
                self._broken("A2", f"{work} is said to have begun")
        except _WorkRefused:
            pass

    async def _ask(self, ref: Ref[_Work], work: _Work, timeout: float | None) -> None:
        answer = await ref.ask(work, timeout=timeout)
        if answer != work.number:
            self._broken("A3", f"{work} was answered by {answer}")

    # --- the actor -------------------------------------------------------------------------------

    def begins(self, batch: Sequence[_Work]) -> None:
        """Note that these messages are now being handled."""
        for earlier, later in pairwise(batch):
            if later.is_control and not earlier.is_control:
                self._broken("A1", f"{earlier} is before {later} in one batch")
        for work in batch:
            if work.number in self._undone:
                self._broken("A2", f"{work} is handled")
        self._begun += batch

    async def work(self, work: _Work) -> int:
        """Do what the message asks for."""
        match work.takes:
            case "no time":
                pass
            case "a while":
                await self._simulation.delay("work", 0.8, 1.0)
            case "a failure":
                raise WorkFails
            case _:
                raise _WorkRefused
        return work.number

    # --- what must hold --------------------------------------------------------------------------

    def _broken(self, invariant: str, detail: str) -> None:
        self._simulation.broken(invariant, f"{INVARIANTS[invariant]}: {detail}")

    def _has_begun(self, number: int) -> bool:
        return any(work.number == number for work in self._begun)

    async def _check_handled(self) -> None:
        """Wait until every accepted message was handled or became a dead letter."""
        with anyio.move_on_after(_DONE_S):
            while self._accepted - {work.number for work in self._begun} - set(self._dead):
                await self._simulation.sleep(1.0)
            return
        self._broken("A3", f"of {sorted(self._accepted)}, {self._begun} were handled")

    def _check_order(self) -> None:
        for is_control in (False, True):
            numbers = [work.number for work in self._begun if work.is_control is is_control]
            if not _rises(numbers):
                self._broken("A1", f"{numbers}, {is_control = }")
        numbers = [work.number for work in self._begun]
        if len({*numbers, *self._dead}) != len(numbers) + len(self._dead):
            self._broken("A3", f"{numbers} were handled, {self._dead} are dead letters")


def _rises(numbers: Iterable[int]) -> bool:
    return all(earlier < later for earlier, later in pairwise(numbers))
