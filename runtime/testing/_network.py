"""A simulated network between nodes: delay, loss, duplication and partitions.

1. Owns what happens between two nodes: whether a request arrives, when, how often, and whether its
   answer does.
2. All of it is drawn from the tape; the boring choice is a request that arrives once, at once. A
   partition, in one direction or in both, loses the requests and answers that set out or arrive
   between the call that makes it and the one that heals it.
3. It keeps no order: a later request may arrive first.
4. A request is a task of the world's while it is under way, and a task of its target once it has
   arrived. Cancelling a caller does not call its request back.
5. A crash of the sender leaves requests that are under way; one of the target loses them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import anyio

from .._backend import OneShot
from .._supervision import check_number, check_seconds
from ..errors import OutcomeUnknown, TurnkeeperError
from ._simulation import Node, NodeCrashed, Simulation

__all__ = ["NetworkTimeout", "SimulatedNetwork"]

T = TypeVar("T")


class NetworkTimeout(OutcomeUnknown):
    """No answer came over the network in time. The request may have taken effect."""

    def __init__(self, source: str, target: str, timeout_s: float) -> None:
        super().__init__(
            f"no answer from node {target} to node {source} within {timeout_s} s; "
            "it may have happened; send again under the same id, or read back"
        )
        self.source = source
        self.target = target
        self.timeout_s = timeout_s


class SimulatedNetwork:
    """Carries requests between the nodes of one simulation, which are named.

    Each request and each answer is lost with the probability `loss`, arrives twice with the
    probability `duplication`, and takes up to `delay_s_max` virtual seconds.
    """

    def __init__(
        self,
        simulation: Simulation,
        *,
        delay_s_max: float = 0.1,
        loss: float = 0.05,
        duplication: float = 0.05,
    ) -> None:
        check_seconds("delay_s_max", delay_s_max)
        check_number("loss", loss, "a share, from 0 to 1", most=1)
        check_number("duplication", duplication, "a share, from 0 to 1", most=1)
        self._simulation = simulation
        self._delay_s_max = delay_s_max
        self._loss = loss
        self._duplication = duplication
        self._cut: dict[tuple[str, str], None] = {}

    # --- partitions ------------------------------------------------------------------------------

    def cut(self, source: str, target: str) -> None:
        """Lose everything from `source` to `target`, in this direction alone."""
        if (source, target) not in self._cut:
            self._cut[source, target] = None
            self._simulation.note(f"the network from {source} to {target} is cut")

    def partition(self, one: str, other: str) -> None:
        """Lose everything between two nodes, in both directions."""
        self.cut(one, other)
        self.cut(other, one)

    def heal(self) -> None:
        """End all partitions."""
        if self._cut:
            self._cut.clear()
            self._simulation.note("the network is healed")

    # --- requests --------------------------------------------------------------------------------

    def send(self, source: str, target: str, handle: Callable[[Node], Awaitable[object]]) -> None:
        """Have `handle(node)` run in the node named `target`: once, twice, later or never.

        It runs in the incarnation that is there when it arrives. Its result is dropped, and so is
        an error of the five kinds; any other error is a finding.
        """
        for _ in range(self._copies(source, target)):
            self._simulation.start_soon(self._carry, source, target, partial(_drop, handle))

    async def call(
        self,
        source: str,
        target: str,
        handle: Callable[[Node], Awaitable[T]],
        *,
        timeout_s: float,
    ) -> T:
        """Return the first answer of `handle(node)`, which runs in the node named `target`.

        Raises what `handle` raises, and `NetworkTimeout` if no answer has come within `timeout_s`
        virtual seconds. The request may run twice, and may still run after that.
        """
        answer: OneShot[T] = OneShot()
        for _ in range(self._copies(source, target)):
            self._simulation.start_soon(
                self._carry, source, target, partial(self._answer, source, target, handle, answer)
            )
        with anyio.move_on_after(timeout_s):
            return await answer.wait()
        raise NetworkTimeout(source, target, timeout_s)

    async def _answer(
        self,
        source: str,
        target: str,
        handle: Callable[[Node], Awaitable[T]],
        answer: OneShot[T],
        node: Node,
    ) -> None:
        try:
            value = await handle(node)
        except Exception as error:  # noqa: BLE001 - carried to the caller
            arrived = partial(answer.fail, error)
        else:
            arrived = partial(answer.set, value)
        for _ in range(self._copies(target, source)):
            self._simulation.start_soon(self._carry_answer, target, source, arrived)

    # --- the way ---------------------------------------------------------------------------------

    def _copies(self, source: str, target: str) -> int:
        """Draw how many copies of a request set out."""
        simulation = self._simulation
        if (source, target) in self._cut:
            simulation.mark("network cut")
            return 0
        if simulation.chance("network loses", self._loss):
            simulation.mark("network loss")
            simulation.note(f"lost on the way from {source} to {target}")
            return 0
        if simulation.chance("network doubles", self._duplication):
            simulation.mark("network duplicate")
            simulation.note(f"doubled on the way from {source} to {target}")
            return 2
        return 1

    async def _carry(
        self, source: str, target: str, deliver: Callable[[Node], Awaitable[None]]
    ) -> None:
        await self._simulation.delay("network", 0.5, self._delay_s_max)
        node = self._simulation.nodes.get(target)
        if node is None or (source, target) in self._cut:
            return
        with suppress(NodeCrashed):
            await node.call(partial(deliver, node))

    async def _carry_answer(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        await self._simulation.delay("network", 0.5, self._delay_s_max)
        if (source, target) not in self._cut:
            arrive()


async def _drop(handle: Callable[[Node], Awaitable[object]], node: Node) -> None:
    with suppress(TurnkeeperError):
        await handle(node)
