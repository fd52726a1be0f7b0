"""The owner world itself: a few runs try everything, and it raises no false alarm."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, cast

import anyio
import pytest

from turnkeeper.actors.core.commands import Append
from turnkeeper.actors.core.records import encode_record
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    Event,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    TurnStartedEvent,
    decode_event,
)
from turnkeeper.actors.journals.memory import MemoryJournal
from turnkeeper.actors.simulation import Disk, Oracles, silent_logs
from turnkeeper.actors.simulation._disk import LEASE_S
from turnkeeper.actors.simulation._oracles import _are_alike
from turnkeeper.actors.simulation._owner import _AT, _KINDS, _NAME, OwnerWorld, _Effect
from turnkeeper.runtime.testing import Simulation, Tape, simulate


def test_of_three_runs_in_a_row_each_rare_kind_of_command_comes_in_exactly_one() -> None:
    worlds: list[OwnerWorld] = []

    async def draw(simulation: Simulation) -> None:
        worlds.extend(OwnerWorld(simulation, turn) for turn in range(3, 6))

    simulate(draw).check()

    rare = [kind for kind, weights in _KINDS if weights == (0, 0, 2)]
    assert rare
    assert [sum(kind in world._kinds for world in worlds) for kind in rare] == [1] * len(rare)


def test_in_each_state_every_kind_comes_before_any_comes_again() -> None:
    dealt: dict[str, list[str]] = {"at rest": [], "in a turn": []}
    options = ("send", "send", "pause", "fork")

    async def deal(simulation: Simulation) -> None:
        world = OwnerWorld(simulation)
        for _ in range(3 * len(options)):
            for state, found in dealt.items():
                found.append(world._deal("which", options, state))

    run = simulate(deal, seed=1)
    run.check()

    for found in dealt.values():
        for at in range(0, len(found), len(options)):
            assert Counter(found[at : at + len(options)]) == Counter(options)
    drawn = list(dealt.values())
    dealt = {state: [] for state in dealt}
    simulate(deal, tape=run.tape).check()
    assert list(dealt.values()) == drawn, "a tape deals the same"


def test_a_tape_of_zeros_deals_the_plainest_option() -> None:
    async def deal(simulation: Simulation) -> None:
        world = OwnerWorld(simulation)
        assert {world._deal("which", ("send", "fork")) for _ in range(4)} == {"send"}

    with silent_logs():
        simulate(deal, tape=Tape(played={})).check()


def test_an_agent_that_was_cancelled_and_goes_on_here_begins_no_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 1035 of an earlier commit broke T12: its agent had lost its owner in the step before."""
    found: list[bool] = []

    async def begin_steps(simulation: Simulation) -> None:
        world = OwnerWorld(simulation)
        process = world._process
        await process.journal.__aenter__()
        await process.handle()
        monkeypatch.setattr(world.oracles, "waits_for", lambda _: "resume")
        cancelled, running = (_Effect(process, process.handle, "turn t1") for _ in range(2))
        cancelled.cancel()
        for effect in (cancelled, running):
            world._check_step_begins(process, effect)
            found.append(simulation.first_broken is not None)

    simulate(begin_steps, is_told=False)

    assert found == [False, True]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_agent_that_is_cancelled_after_it_proposed_calls_starts_none(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed 15350025 of an earlier commit broke O2: the agent's owner had ended in between."""
    started: list[object] = []

    class Turn:
        async def propose_calls(self, calls: object, *, needs_confirmation: bool) -> list[str]:
            await anyio.lowlevel.checkpoint()
            return ["call"]

        async def run_calls(self, actions: list[str], run: object) -> None:
            await anyio.lowlevel.checkpoint()
            started.extend(actions)

    async def propose(simulation: Simulation) -> None:
        world = OwnerWorld(simulation)
        effect = _Effect(world._process, world._process.handle, "turn t1")

        async def meanwhile(process: object) -> None:
            await anyio.lowlevel.checkpoint()
            if is_cancelled:
                effect.cancel()

        monkeypatch.setattr(world, "meanwhile", meanwhile)
        await world._propose(world._process, effect, cast("Any", Turn()), ())

    simulate(propose, tape=Tape(played={})).check()

    assert started == ([] if is_cancelled else ["call"])


def test_an_agent_that_ends_without_the_calls_that_it_was_to_start_has_had_its_chance() -> None:
    """Seed 15600022 of an earlier commit broke T16: the agent's last act was to end its turn."""

    async def run(turn_id: str, unstarted: tuple[str, ...]) -> None:
        raise NotImplementedError(turn_id, unstarted)

    async def end(simulation: Simulation) -> None:
        world = OwnerWorld(simulation)
        process = world._process
        await process.journal.__aenter__()
        await process.handle()
        world._confirmed = {"given": process.owner, "other": process.owner}
        effect = _Effect(process, partial(run, "t1", ("given",)), "turn t1")
        await world._end_turn(process, effect)
        assert world._confirmed.keys() == {"other"}

    simulate(end).check()


def test_an_agent_that_sees_that_the_lease_has_run_out_fails_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seed 22007488 of an earlier commit broke P1: the owner went on without its agent."""

    async def see(simulation: Simulation) -> None:
        world = OwnerWorld(simulation)
        process = world._process
        await process.journal.__aenter__()
        await process.handle()
        owner = process.owner
        assert owner is not None
        effect = _Effect(process, process.handle, "turn t1")
        effect.turn = cast("Any", object())
        process.effects.append(effect)

        async def step(*_: object) -> None:
            await simulation.sleep(LEASE_S + 1.0)
            owner.check_lease()

        monkeypatch.setattr(world, "_step", step)
        await world._agent(process)

        assert process.owner is None
        assert effect.is_done

    simulate(see, tape=Tape(played={})).check()


def test_messages_wait_for_calls_that_were_appended_by_hand_before_a_drain() -> None:
    """Seed 22006653 of an earlier commit broke P1: nothing answered the call."""

    async def drain(simulation: Simulation) -> None:
        world = OwnerWorld(simulation)
        process = world._process
        await process.journal.__aenter__()
        call = ActionEvent(
            id="e1", timestamp=_AT, tool_call_id="call", tool_name="act", llm_response_id="r1"
        )
        await world._post(process, Append(call))
        process.setup.drain.begin("queue", until=0.0)
        world.oracles.drain_begins(process.journal, "queue")
        await world._send(process)
        assert world.oracles.waiting(_NAME)

        await world._finish()

        assert not world.oracles.waiting(_NAME)

    simulate(drain, tape=Tape(played={})).check()


def test_a_rule_of_turns_and_calls_is_checked_as_each_event_lands() -> None:
    async def world(simulation: Simulation) -> None:
        disk = Disk(simulation)
        Oracles(simulation, disk, queued_max=3)  # it watches the disk, and is not told of an end
        async with MemoryJournal(disk.store) as journal:
            epoch = (await journal.claim("c1")).epoch
            for seq in (1, 2):
                call = ActionEvent(
                    id=f"e{seq}",
                    timestamp=_AT,
                    tool_call_id="call",
                    tool_name="act",
                    llm_response_id="r1",
                )
                await journal.append(
                    "c1",
                    [encode_record(call)],
                    epoch=epoch,
                    expected_seq=seq,
                    is_unfinished=False,
                )

    run = simulate(world, is_told=False)

    assert run.broken is not None
    assert run.broken.invariant == "T1"
    assert "a call id twice" in run.broken.detail


def test_only_what_makes_a_full_queue_longer_is_too_much() -> None:
    """A rollback may fill a queue beyond its limit; then a waiting message may be replaced."""

    def queued(n: int, **facts: Any) -> MessageQueuedEvent:  # noqa: ANN401 - any of its fields
        return MessageQueuedEvent(
            id=f"e{n}",
            timestamp=_AT,
            turn_id=f"t{n}",
            message_id=f"m{n}",
            content=f"say {n}",
            **facts,
        )

    withdrawn = MessageWithdrawnEvent(id="e4", timestamp=_AT, turn_id="t2", message_id="m2")
    found: list[str] = []

    async def world(simulation: Simulation) -> None:
        disk = Disk(simulation)
        oracles = Oracles(simulation, disk, queued_max=1)

        def note(invariant: str, detail: str) -> None:
            found.append(invariant)

        # The log is too odd for other invariants, and only the first report counts.
        oracles.broken = note  # type: ignore[method-assign]
        async with MemoryJournal(disk.store) as journal:
            epoch = (await journal.claim("c1")).epoch

            async def log(seq: int, *events: Event) -> bool:
                """Append the events from this seq on; return True if they are too much."""
                found.clear()
                await journal.append(
                    "c1",
                    [encode_record(event) for event in events],
                    epoch=epoch,
                    expected_seq=seq,
                    is_unfinished=True,
                )
                return "B1" in found

            assert not await log(1, queued(1), queued(2, queued_again=True))
            assert not await log(3, withdrawn, queued(3, replaces="m2", place=2))
            assert await log(5, queued(5))

    simulate(world).check()


def test_a_snapshot_is_compared_with_the_log_as_it_was_at_its_seq() -> None:
    def event(kind: type[Event], n: int, **facts: Any) -> Event:  # noqa: ANN401 - any of its fields
        return kind(id=f"e{n}", timestamp=_AT, turn_id=f"t{n}", **facts)

    def queued(n: int) -> Event:
        return event(MessageQueuedEvent, n, message_id=f"m{n}", content="hello")

    started, said = event(TurnStartedEvent, 2), event(AgentMessageEvent, 3, content="hello")
    log = [queued(1), started, said, queued(4)]
    others = {
        "another message waits": [queued(9)],
        "another turn runs": [queued(1), event(TurnStartedEvent, 9)],
        "the view has another event": [*log[:2], event(AgentMessageEvent, 9, content="hello")],
        "it is beyond the log": [*log, queued(5)],
    }

    def is_wrong(disk: Disk, found: list[str], events: list[Event]) -> bool:
        """Write a snapshot of this log; return True if the oracle says that it is wrong."""
        folded = Folded()
        for each in events:
            folded.fold(each)
        found.clear()
        disk.on_snapshot("c1", folded.to_snapshot())
        return bool(found)

    async def world(simulation: Simulation) -> None:
        disk = Disk(simulation)
        oracles = Oracles(simulation, disk, queued_max=9)
        found: list[str] = []

        def note(invariant: str, detail: str) -> None:
            found.append(invariant)

        # The log is too odd for other invariants, and only the first report counts.
        oracles.broken = note  # type: ignore[method-assign]
        async with MemoryJournal(disk.store) as journal:
            records = [encode_record(each) for each in log]
            epoch = (await journal.claim("c1")).epoch
            await journal.append("c1", records, epoch=epoch, expected_seq=1, is_unfinished=True)

        assert not any(is_wrong(disk, found, log[:seq]) for seq in range(len(log) + 1))
        assert [what for what in others if not is_wrong(disk, found, others[what])] == []

    simulate(world).check()


def test_views_are_alike_if_their_events_are_equal() -> None:
    """M1 compares the view that a model was given with the one that the log shows."""
    said = AgentMessageEvent(id="e1", timestamp=_AT, turn_id="t1", content="hello")
    read = decode_event(encode_record(said).payload, kind=said.kind)
    others = [
        said.model_copy(update={"content": "hello!"}),
        said.model_copy(update={"id": "e2"}),
        TurnStartedEvent(id="e1", timestamp=_AT, turn_id="t1"),
    ]

    assert read is not said
    assert _are_alike([said, said], [read, said])
    assert not _are_alike([said], [])
    assert not _are_alike([said], [said, read])
    assert not any(_are_alike([read], [other]) for other in others)
