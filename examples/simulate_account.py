"""Simulation of an actor of your own: a bank account that loses money, and the seed that shows it.

It teaches: a world is an `async def` that starts nodes and clients; data that a crash must not
lose lives outside of the node; a campaign runs it one step of one task at a time, under virtual
time, seed after seed; the failure is made smaller and tells its story.

    python examples/simulate_account.py

Needs trio. It plants a bug on purpose, finds it, and shows that the mended actor holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import anyio

from turnkeeper.runtime import Actor, Message, Ports, Ref, Runtime, TurnkeeperError
from turnkeeper.runtime.testing import Node, Simulation, run_campaign, simulate


@dataclass(frozen=True)
class Deposit(Message[int]):
    """Sent again under its id by a client that got no answer."""

    deposit_id: str
    amount: int


@dataclass
class Disk:
    """The deposits that were written, with their ids, in their order. A crash leaves them."""

    written: list[tuple[str, int]] = field(default_factory=list)


class CarelessAccount(Actor[Deposit]):
    """Answers with the balance. It counts a deposit twice that was sent again."""

    def __init__(self, disk: Disk, ports: Ports) -> None:
        self._disk = disk
        self._ports = ports

    async def receive(self, message: Deposit) -> int:
        await self._ports.sleep(0.01)  # the disk takes a while
        self._disk.written.append((message.deposit_id, message.amount))
        await self._ports.sleep(0.01)  # and so does its answer: a crash here is the hard case
        return sum(amount for _, amount in self._disk.written)


class CarefulAccount(CarelessAccount):
    """Counts no deposit that it knows already."""

    async def receive(self, message: Deposit) -> int:
        if any(message.deposit_id == known for known, _ in self._disk.written):
            return sum(amount for _, amount in self._disk.written)
        return await super().receive(message)


@dataclass(frozen=True)
class World:
    """One node that may crash, and two clients that send again until they have an answer."""

    account: type[CarelessAccount]

    async def __call__(self, simulation: Simulation) -> None:
        disk = Disk()
        refs: dict[Node, Ref[Deposit]] = {}

        async def serve(node: Node) -> None:
            async with Runtime(ports=node.ports) as runtime:
                refs[node] = runtime.spawn(lambda: self.account(disk, node.ports), name="account")
                await anyio.sleep_forever()

        async def pay_in(deposit: Deposit) -> None:
            while True:
                node = simulation.nodes["bank"]
                try:
                    await node.call(partial(refs[node].ask, deposit))
                except (TurnkeeperError, KeyError):
                    await anyio.sleep(0.1)  # crashed, or not up yet: the same id once more
                else:
                    simulation.note(f"{deposit.deposit_id} was answered")
                    return

        async def crash() -> None:
            while simulation.chance("crashes", 0.5):
                await simulation.delay("crash", 1.0, 0.05)
                simulation.nodes["bank"].crash()
                simulation.start("bank", serve)

        simulation.start("bank", serve)
        async with anyio.create_task_group() as group:
            group.start_soon(crash)
            for client in ("ann", "bob"):
                group.start_soon(pay_in, Deposit(f"{client}-1", 10))
        paid_in = sum(amount for _, amount in disk.written)
        simulation.require(paid_in == 20, "balance", f"20 were paid in, and {paid_in} are there")


def main() -> None:
    careless, careful = World(CarelessAccount), World(CarefulAccount)
    campaign = run_campaign(careless, seeds=1_000)
    smallest = campaign.failure
    assert smallest is not None, "the planted bug was not found"
    print(f"the careless account: {campaign.runs} runs, and seed {smallest.seed} breaks it")
    print(smallest)
    again = simulate(careless, tape=smallest.tape)
    print(f"played again, it breaks the same: {again.trace == smallest.trace}")
    run_campaign(careful, seeds=300).check()
    print("the careful account: 300 seeds, all invariants held")


if __name__ == "__main__":
    main()
