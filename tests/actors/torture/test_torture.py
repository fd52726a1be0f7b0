"""The torture finds nothing at a sound gateway, and each planted fault."""

from __future__ import annotations

from typing import cast

import anyio
import pytest

from tests.actors.gateway.worlds import BOUND_S, served
from tests.drawn import drawn
from turnkeeper.actors import Agent, Conversations, MemoryJournal, gateway
from turnkeeper.actors.core import turn_rules
from turnkeeper.actors.torture import torture
from turnkeeper.actors.torture.checker import Verdict, check
from turnkeeper.actors.torture.exchanges import Site
from turnkeeper.actors.torture.history import Protocol
from turnkeeper.actors.torture.server import Server
from turnkeeper.actors.torture.torture import Plan, Torture
from turnkeeper.runtime import Ports

from .faults import AGENTS, ENGINES, WIRES, Wire, echo

pytestmark = [pytest.mark.costly, pytest.mark.in_parts(3)]

PLAN = Plan(seed=5, users=5, messages=8)


async def tortured(
    agent: Agent,
    plan: Plan = PLAN,
    *,
    fault: str | None = None,
    path: str = "",
    give_up_s: float | None = None,
) -> Verdict:
    """Torture a gateway; return the verdict."""
    with anyio.fail_after(3 * BOUND_S):
        async with Conversations(agent, journal=MemoryJournal()) as conversations:
            app: object = gateway.app(conversations)
            if fault is not None:
                app = Wire(cast("gateway.Gateway", app), fault)
            async with served(cast("gateway.Gateway", app)) as address:
                torture = Torture(plan, Site(address + path), give_up_s=give_up_s)
                await torture.run()
    assert not torture.unread
    return check(torture.history.records)


@pytest.mark.parametrize("protocol", ["own", "ai-sdk", "ag-ui"])
async def test_nothing_is_found_at_a_sound_gateway(protocol: Protocol) -> None:
    verdict = await tortured(echo(), Plan(seed=5, users=5, messages=8, protocols=(protocol,)))

    assert verdict.findings == ()
    assert verdict.totals["known"] > 20
    assert verdict.totals["unknown"] > 0
    assert verdict.totals["answered"] > 0


async def test_nothing_is_found_at_a_server_without_a_log() -> None:
    """The last answer of a conversation tells what its model saw; no other route is asked."""
    plan = Plan(seed=5, users=5, messages=8, protocols=("ai-sdk",), has_log=False)

    verdict = await tortured(echo(), plan, path="/v1/ai-sdk/chat")

    assert verdict.findings == ()
    assert "read" not in verdict.totals
    assert verdict.totals["answered"] > 30


class StartsSlowly(Server):
    """Is up after an hour, by a clock that is moved."""

    late_s = 0.0
    is_ours = False

    async def start(self) -> None:
        self.late_s += 3_600.0


async def test_the_time_of_a_run_begins_when_its_servers_are_up() -> None:
    """Machines of a busy computer took most of a short run to start."""

    def now() -> float:
        return anyio.current_time() + server.late_s

    with anyio.fail_after(3 * BOUND_S):
        async with (
            Conversations(echo(), journal=MemoryJournal()) as conversations,
            served(gateway.app(conversations)) as address,
        ):
            ports, site = Ports(monotonic=now), Site(address)
            server = StartsSlowly(site, ports)
            plan = Plan(seed=5, users=2, seconds=3_600.0, messages=2)
            run = Torture(plan, site, server=server, ports=ports)
            assert run.progress == 0.0
            await run.run()

    assert run.history.counts["acknowledged"] > 0


# --- that it bites -------------------------------------------------------------------------------

ENDLESS = {
    "some messages in the queue get no turn",
    "the chat's stream does not finish",
    "a run does not finish",
}
"""With these faults an answer never comes; the first attempt shows each of them."""


def give_up_s(fault: str) -> float | None:
    """Return how long to wait for an answer; beside a heavy load one took above three seconds."""
    return 3.0 if fault in ENDLESS else None


@pytest.fixture
def _waits_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask the server to hold an answer back for a second at most, as for some no answer comes."""
    monkeypatch.setattr(torture, "WAIT_S", 1)


@pytest.mark.sweep
@pytest.mark.usefixtures("_waits_shortly")
@pytest.mark.parametrize("fault", drawn(sorted(AGENTS), 1))
async def test_a_faulty_agent_is_found_out(fault: str) -> None:
    make, expected = AGENTS[fault]

    verdict = await tortured(make())

    assert expected in [finding.fault for finding in verdict.findings]


@pytest.mark.sweep
@pytest.mark.usefixtures("_waits_shortly")
@pytest.mark.parametrize("fault", drawn(sorted(WIRES), 1))
async def test_a_fault_on_the_wire_is_found_out(fault: str) -> None:
    """In one run perhaps no request that is changed would have told anything else."""
    _, expected, protocol = WIRES[fault]

    found: list[str] = []
    for seed in range(5, 11):
        plan = Plan(seed=seed, users=5, messages=8, protocols=(cast("Protocol", protocol),))
        verdict = await tortured(echo(), plan, fault=fault, give_up_s=give_up_s(fault))
        if found := [finding.fault for finding in verdict.findings]:
            break

    assert expected in found


@pytest.mark.sweep
@pytest.mark.usefixtures("_waits_shortly")
@pytest.mark.parametrize("fault", drawn(sorted(ENGINES), 1))
async def test_a_fault_in_the_engine_is_found_out(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one run perhaps no three messages wait at once, and the fault does nothing."""
    next_queued, expected = ENGINES[fault]
    monkeypatch.setattr(turn_rules, "_then_next_queued", next_queued)

    found: list[str] = []
    for seed in range(5, 11):
        plan = Plan(seed=seed, users=5, messages=8)
        verdict = await tortured(echo(), plan, give_up_s=give_up_s(fault))
        if found := [finding.fault for finding in verdict.findings]:
            break

    assert expected in found
