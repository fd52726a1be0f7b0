"""The mailbox: bounds, order, lanes, and senders that wait for room."""

import asyncio
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.runtime import (
    Actor,
    Backoff,
    DeadLetter,
    MailboxFull,
    MailboxSettings,
    NotDelivered,
    Runtime,
    Supervision,
)
from turnkeeper.runtime._mailbox import SPARE_LANES_MAX
from turnkeeper.runtime.testing import VirtualClock, settle

from .actors import Add, Counter, Fail, Get, Run, block

pytestmark = pytest.mark.anyio

SMALL = MailboxSettings(capacity=2)


def logging_actor(log: list[Any]) -> Callable[[], Counter]:
    return lambda: Counter(log)


async def test_a_sender_waits_for_room_and_is_admitted_in_its_turn() -> None:
    log: list[object] = []
    async with Runtime() as runtime:
        ref = runtime.spawn(logging_actor(log), name="counter", mailbox=SMALL)
        gate = await block(ref)
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(ref.tell, number)
                await settle()
            assert ref._cell.depth == 2
            gate.set()
        await ref.ask(Get())
    assert log == [0, 1, 2, 3, 4, 5]


async def test_no_sender_overtakes_one_that_waits_for_room() -> None:
    log: list[object] = []
    async with Runtime() as runtime:
        settings = MailboxSettings(capacity=1)
        ref = runtime.spawn(logging_actor(log), name="counter", mailbox=settings)
        gate = await block(ref)
        await ref.tell("first")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.tell, "second")
            await settle()
            ref._cell.mail.popleft()  # room, but nobody was admitted yet
            tasks.start_soon(ref.tell, "third")
            await settle()
            assert len(ref._cell.waiting or ()) == 2
            ref._cell.admit()
            gate.set()
        await ref.ask(Get())
    assert log == ["second", "third"]


async def test_reject_refuses_with_the_capacity() -> None:
    async with Runtime() as runtime:
        mailbox = MailboxSettings(capacity=2, overflow="reject")
        ref = runtime.spawn(Counter, name="counter", mailbox=mailbox)
        gate = await block(ref)
        await ref.tell(Add())
        await ref.tell(Add())
        with pytest.raises(MailboxFull) as full:
            await ref.tell(Add())
        assert full.value.capacity == 2
        with pytest.raises(MailboxFull):
            await ref.ask(Get())
        gate.set()
        await settle()
        assert await ref.ask(Get()) == 2


async def test_drop_oldest_makes_each_drop_a_dead_letter() -> None:
    log: list[object] = []
    async with Runtime() as runtime:
        mailbox = MailboxSettings(capacity=2, overflow="drop_oldest")
        ref = runtime.spawn(logging_actor(log), name="counter", mailbox=mailbox)
        gate = await block(ref)
        with runtime.events.subscribe(DeadLetter) as letters:
            for number in range(4):
                await ref.tell(number)
            assert [(await anext(letters)).message for _ in range(2)] == [0, 1]
        gate.set()
    assert log == [2, 3]


async def test_drop_oldest_hands_an_ask_back_to_its_asker() -> None:
    async with Runtime() as runtime:
        mailbox = MailboxSettings(capacity=1, overflow="drop_oldest")
        ref = runtime.spawn(Counter, name="counter", mailbox=mailbox)
        gate = await block(ref)

        async def ask() -> None:
            with pytest.raises(NotDelivered):
                await ref.ask(Get())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await settle()
            await ref.tell(Add())
        gate.set()


async def test_tell_nowait_raises_where_tell_would_wait() -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter", mailbox=MailboxSettings(capacity=1))
        gate = await block(ref)
        ref.tell_nowait(Add())
        with pytest.raises(MailboxFull):
            ref.tell_nowait(Add())
        ref.tell_nowait("urgent", control=True)
        gate.set()
        await settle()
        ref.tell_nowait(Add())
        assert await ref.ask(Get()) == 2


async def test_control_goes_first_and_each_lane_keeps_its_order() -> None:
    log: list[object] = []
    async with Runtime() as runtime:
        ref = runtime.spawn(logging_actor(log), name="counter")
        gate = await block(ref)
        await ref.tell("a")
        await ref.tell("A", control=True)
        await ref.tell("b")
        await ref.tell("B", control=True)
        gate.set()
    assert log == ["A", "B", "a", "b"]


async def test_a_cancelled_waiting_sender_leaves_no_trace() -> None:
    log: list[object] = []
    async with Runtime() as runtime:
        settings = MailboxSettings(capacity=1)
        ref = runtime.spawn(logging_actor(log), name="counter", mailbox=settings)
        gate = await block(ref)
        await ref.tell("kept")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.tell, "cancelled")
            await settle()
            assert ref._cell.waiting
            tasks.cancel_scope.cancel()
        assert not ref._cell.waiting
        gate.set()
        await ref.ask(Get())
    assert log == ["kept"]


class TestNativeCancellation:
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    async def test_a_sender_cancelled_while_it_is_admitted_takes_its_message_back(self) -> None:
        log: list[object] = []
        async with Runtime() as runtime:
            ref = runtime.spawn(
                logging_actor(log), name="counter", mailbox=MailboxSettings(capacity=1)
            )
            gate = await block(ref)
            await ref.tell("first")
            cancelled = asyncio.create_task(ref.tell("cancelled"))
            await settle()
            third = asyncio.create_task(ref.tell("third"))
            await settle()
            cell = ref._cell
            cell.mail.popleft()
            cell.admit()  # the wake-up of the first sender is on the way ...
            cancelled.cancel()  # ... when it is cancelled

            with pytest.raises(asyncio.CancelledError):
                await cancelled
            await third
            gate.set()
            await ref.ask(Get())
        assert log == ["third"]


async def test_mail_keeps_its_order_through_a_restart() -> None:
    log: list[object] = []
    async with Runtime(supervision=Supervision(backoff=Backoff(first_s=0.0))) as runtime:
        ref = runtime.spawn(logging_actor(log), name="counter")
        gate = await block(ref)
        for number in range(10):
            await ref.tell(number)
            if number == 4:
                await ref.tell(Fail(ValueError()))
        gate.set()
        await ref.ask(Get())
    assert log == list(range(10))


async def test_mail_sent_during_backoff_waits_under_the_mailboxs_own_policy() -> None:
    log: list[object] = []
    clock = VirtualClock()
    slow = Supervision(backoff=Backoff(first_s=10.0, jitter=0.0))
    async with Runtime(ports=clock.ports(), supervision=slow) as runtime:
        mailbox = MailboxSettings(capacity=2, overflow="reject")
        ref = runtime.spawn(logging_actor(log), name="counter", mailbox=mailbox)
        await ref.tell(Fail(ValueError()))
        await settle()

        await ref.tell("one")
        await ref.tell("two")
        with pytest.raises(MailboxFull):
            await ref.tell("three")
        assert log == []
        await clock.advance(10.0)
        assert log == ["one", "two"]


async def test_a_flood_does_not_starve_the_neighbours() -> None:
    handled_before: list[int] = []

    class Sink(Actor):
        def __init__(self) -> None:
            self.handled = 0

        def receive(self, _: object) -> None:
            self.handled += 1

    sink = Sink()
    async with Runtime() as runtime:
        flooded = runtime.spawn(
            lambda: sink, name="flooded", mailbox=MailboxSettings(capacity=2_000)
        )
        neighbour = runtime.spawn(Counter, name="neighbour")
        await neighbour.ask(Get())
        for _ in range(1_000):
            flooded.tell_nowait(None)
        await neighbour.ask(Get())
        handled_before.append(sink.handled)
    assert sink.handled == 1_000
    assert handled_before[0] <= 4 * 32, "the neighbour had its turn after a few slices of the flood"


@pytest.mark.parametrize(
    ("handler_s", "messages"),
    [(0.0, 256), (0.0001, 32), (0.0009, 16)],
    ids=["they take no time", "they take 2 ms after 20", "they take 2 ms after 3"],
)
async def test_other_tasks_run_after_2_ms_but_not_for_fewer_messages_than_16(
    anyio_backend_name: str, handler_s: float, messages: int
) -> None:
    """Callers that are answered together send together, and a journal commits that together."""
    clock = VirtualClock()
    handled = 0
    handled_before: list[int] = []

    class Sink(Actor):
        def receive(self, _: object) -> None:
            nonlocal handled
            handled += 1
            clock.jump(handler_s)

    async with Runtime(ports=clock.ports()) as runtime:
        sinks = [runtime.spawn(Sink, name=f"sink {number}") for number in range(2_000)]
        for sink in sinks:
            sink.tell_nowait(None)
        while handled < len(sinks):
            handled_before.append(handled)
            await anyio.lowlevel.checkpoint()
    rounds = [after - before for before, after in pairwise(handled_before) if after > before]
    # The first may be shorter; and trio, which shuffles, may run two between two looks here.
    assert {size % messages for size in rounds[1:]} == {0}
    assert max(rounds[1:]) <= messages * (2 if anyio_backend_name == "trio" else 1)


async def test_an_actor_whose_messages_take_long_yields_after_each() -> None:
    clock = VirtualClock()
    order: list[str] = []

    class Slow(Actor):
        def receive(self, message: object) -> None:
            order.append(f"{self.context.name} {message}")
            clock.jump(0.002)

    async with Runtime(ports=clock.ports()) as runtime:
        first = runtime.spawn(Slow, name="first")
        second = runtime.spawn(Slow, name="second")
        for number in range(3):
            await first.tell(number)
        for number in range(3):
            await second.tell(number)
    assert order == [f"{name} {number}" for number in range(3) for name in ("first", "second")]


async def test_an_actor_that_tells_itself_never_waits_for_room() -> None:
    log: list[object] = []
    async with Runtime() as runtime:
        settings = MailboxSettings(capacity=1)
        ref = runtime.spawn(logging_actor(log), name="counter", mailbox=settings)

        async def tell_itself(actor: Actor) -> None:
            for number in range(5):
                await actor.context.ref.tell(number)

        await ref.ask(Run(tell_itself))
        await ref.ask(Get())
    assert log == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(40))
async def test_every_sender_keeps_its_order_whatever_happens_to_the_actor(seed: int) -> None:
    """Seeded: senders, restarts and cancellations mixed."""
    draw = random.Random(seed)
    log: list[tuple[int, int]] = []
    at_once = Supervision(backoff=Backoff(first_s=0.0), restarts_max=10_000)
    async with Runtime(supervision=at_once) as runtime:
        mailbox = MailboxSettings(capacity=draw.choice([1, 2, 5]))
        ref = runtime.spawn(logging_actor(log), name="counter", mailbox=mailbox)
        told: list[tuple[int, int]] = []

        async def send(sender: int) -> None:
            for number in range(20):
                with anyio.CancelScope() as scope:
                    if draw.random() < 0.1:
                        scope.cancel()
                    await ref.tell((sender, number))
                    told.append((sender, number))
                if draw.random() < 0.1:
                    await ref.tell(Fail(ValueError()))
                if draw.random() < 0.3:
                    await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            for sender in range(4):
                tasks.start_soon(send, sender)
        await ref.ask(Get())
    for sender in range(4):
        handled = [number for each, number in log if each == sender]
        assert handled == sorted(set(handled)), "in order, and nothing twice"
        # One that was cancelled may have been handled; one that returned must have been.
        assert {number for each, number in told if each == sender} <= set(handled)


async def test_an_actor_is_at_rest_only_while_it_handles_nothing_and_has_no_mail() -> None:
    async with Runtime() as runtime:
        actors: list[Counter] = []

        def make() -> Counter:
            actors.append(Counter([]))
            return actors[-1]

        def is_at_rest(number: int = 0) -> bool:
            return actors[number].context.is_at_rest

        ref = runtime.spawn(make, name="counter", supervision=Supervision(backoff=Backoff(0.0)))
        await ref.ask(Get())
        await settle()
        assert is_at_rest()

        gate = await block(ref)
        assert not is_at_rest()
        gate.set()
        await settle()
        assert is_at_rest()
        await ref.tell(1)
        assert not is_at_rest()

        await ref.tell(Fail(ValueError("planted")))
        await ref.ask(Get())
        await settle()
        assert is_at_rest(1)
        assert not is_at_rest()


async def test_so_many_lanes_are_kept_for_the_next_actors_and_no_more() -> None:
    """Else a runtime would hold one for each actor that was ever busy at the same time."""
    async with Runtime() as runtime:
        refs = [runtime.spawn(Counter, name=f"{n}") for n in range(SPARE_LANES_MAX + 1)]
        for ref in refs:
            ref.tell_nowait(Add())
        await settle()
        assert [await ref.ask(Get()) for ref in refs] == [1] * len(refs)
        assert len(runtime._system.spare_lanes) == SPARE_LANES_MAX
