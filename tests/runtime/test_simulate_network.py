"""A network between simulated nodes: delay, loss, duplication and partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

import anyio
import pytest

from turnkeeper.runtime import OutcomeUnknown, Refused
from turnkeeper.runtime.testing import (
    Backend,
    NetworkTimeout,
    Node,
    SimulatedNetwork,
    Simulation,
    Tape,
    simulate,
)

BACKENDS: list[Backend] = ["trio", "asyncio"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)


async def _idle(_: Node) -> None:
    await anyio.sleep_forever()


def two_nodes(
    main: Callable[[Simulation, SimulatedNetwork], Awaitable[None]], **options: float
) -> Callable[[Simulation], Awaitable[None]]:
    """Return a world with the nodes a and b."""

    async def world(simulation: Simulation) -> None:
        for name in ("a", "b"):
            simulation.start(name, _idle)
        await anyio.sleep(0.001)
        await main(simulation, SimulatedNetwork(simulation, **options))

    return world


@each_backend
def test_the_boring_network_carries_each_request_once_and_brings_its_answer(
    backend: Backend,
) -> None:
    async def main(simulation: Simulation, network: SimulatedNetwork) -> None:
        served: list[str] = []

        async def serve(node: Node) -> int:
            served.append(node.name)
            return 42

        assert await network.call("a", "b", serve, timeout_s=1.0) == 42
        network.send("a", "b", serve)
        await anyio.sleep(1.0)
        assert served == ["b", "b"]

    simulate(two_nodes(main), tape=Tape(played={}), backend=backend).check()


@each_backend
def test_requests_and_answers_are_lost_doubled_delayed_and_overtaken(backend: Backend) -> None:
    seen: Counter[str] = Counter()

    async def main(simulation: Simulation, network: SimulatedNetwork) -> None:
        arrived: list[int] = []

        def serve(number: int) -> Callable[[Node], Awaitable[None]]:
            async def handle(_: Node) -> None:
                arrived.append(number)

            return handle

        for number in range(5):
            network.send("a", "b", serve(number))
        await anyio.sleep(1.0)
        counts = Counter(arrived)
        seen["lost"] += len(counts) < 5
        seen["doubled"] += any(count == 2 for count in counts.values())
        seen["overtaken"] += arrived != sorted(arrived)
        served_before = len(arrived)
        try:
            await network.call("a", "b", serve(9), timeout_s=0.3)
        except OutcomeUnknown:
            seen["only the answer lost"] += len(arrived) > served_before

    for seed in range(40):
        simulate(two_nodes(main, loss=0.2, duplication=0.2), seed=seed, backend=backend).check()
    assert all(seen[each] for each in ("lost", "doubled", "overtaken", "only the answer lost"))


@each_backend
def test_a_cut_loses_one_direction_and_a_partition_both(backend: Backend) -> None:
    async def main(simulation: Simulation, network: SimulatedNetwork) -> None:
        served: list[str] = []

        async def serve(node: Node) -> str:
            served.append(node.name)
            return node.name

        network.cut("b", "a")
        with pytest.raises(NetworkTimeout, match=r"node b to node a within 1\.0 s"):
            await network.call("a", "b", serve, timeout_s=1.0)
        with pytest.raises(NetworkTimeout):
            await network.call("b", "a", serve, timeout_s=1.0)
        assert served == ["b"]  # the request came through, and its answer did not

        network.heal()
        assert await network.call("b", "a", serve, timeout_s=1.0) == "a"

        served.clear()
        network.partition("a", "b")
        for source, target in (("a", "b"), ("b", "a")):
            with pytest.raises(NetworkTimeout):
                await network.call(source, target, serve, timeout_s=1.0)
        assert served == []

    simulate(two_nodes(main, loss=0.0, duplication=0.0), seed=1, backend=backend).check()


@each_backend
def test_an_error_of_the_handler_comes_back_and_a_crashed_target_answers_nothing(
    backend: Backend,
) -> None:
    async def main(simulation: Simulation, network: SimulatedNetwork) -> None:
        async def refuse(_: Node) -> None:
            raise Refused("not today")

        with pytest.raises(Refused, match="not today"):
            await network.call("a", "b", refuse, timeout_s=1.0)
        network.send("a", "b", refuse)
        simulation.nodes["b"].crash()
        with pytest.raises(NetworkTimeout):
            await network.call("a", "b", refuse, timeout_s=1.0)
        with pytest.raises(NetworkTimeout):
            await network.call("a", "nowhere", refuse, timeout_s=1.0)

    simulate(two_nodes(main), tape=Tape(played={}), backend=backend).check()


@each_backend
def test_a_request_reaches_the_incarnation_that_is_there_when_it_arrives(backend: Backend) -> None:
    async def main(simulation: Simulation, network: SimulatedNetwork) -> None:
        served: list[int] = []

        async def serve(node: Node) -> None:
            served.append(node.incarnation)

        network.send("a", "b", serve)
        simulation.nodes["b"].crash()
        simulation.start("b", _idle)
        await anyio.sleep(1.0)
        assert served == [2]

    played = Tape(played={"network waits": [1], "network waits for": [50]})
    simulate(two_nodes(main), tape=played, backend=backend).check()


def test_an_error_of_a_handler_that_is_no_refusal_is_a_finding() -> None:
    async def main(simulation: Simulation, network: SimulatedNetwork) -> None:
        async def fail(_: Node) -> None:
            raise LookupError("lost")

        network.send("a", "b", fail)
        await anyio.sleep(1.0)

    run = simulate(two_nodes(main), tape=Tape(played={}))

    assert run.broken is not None
    assert "LookupError: lost" in run.broken.detail
