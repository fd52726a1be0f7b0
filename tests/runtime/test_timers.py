"""Timers: once, periodic, keyed, and gone with the actor; and the clock that runs them."""

import gc
import math
import weakref
from functools import partial

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkeeper.runtime import Actor, Backoff, MailboxSettings, Ports, Runtime, Supervision
from turnkeeper.runtime._clock import Clock
from turnkeeper.runtime._messages import Ask
from turnkeeper.runtime.testing import VirtualClock, settle

from .actors import Counter, Fail, Get, Run, block

AT_ONCE = Supervision(backoff=Backoff(first_s=0.0))


@pytest.mark.anyio
async def test_a_timer_sends_its_message_once_when_it_is_due() -> None:
    clock = VirtualClock()
    log: list[object] = []
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")

        async def arm(actor: Actor) -> None:
            actor.context.timers.once(10.0, "due")

        await ref.ask(Run(arm))
        await clock.advance(9.9)
        assert log == []
        await clock.advance(100.0)
        assert log == ["due"]


@pytest.mark.anyio
async def test_a_timer_that_is_never_due_delays_no_other() -> None:
    clock = VirtualClock()
    log: list[object] = []
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")

        async def arm(actor: Actor, delay_s: float) -> None:
            actor.context.timers.once(delay_s, delay_s)

        await ref.ask(Run(partial(arm, delay_s=math.inf)))
        await ref.ask(Run(partial(arm, delay_s=1.0)))
        await clock.advance(1.0)
        await ref.ask(Run(partial(arm, delay_s=10.0)))
        await clock.advance(10.0)
        assert log == [1.0, 10.0]


@pytest.mark.anyio
async def test_a_periodic_timer_goes_on_until_it_is_cancelled() -> None:
    clock = VirtualClock()
    log: list[object] = []
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")

        async def arm(actor: Actor) -> None:
            actor.context.timers.periodic(10.0, "tick", key="ticker")

        async def cancel(actor: Actor) -> None:
            actor.context.timers.cancel("ticker")
            actor.context.timers.cancel("no such timer")

        await ref.ask(Run(arm))
        await clock.advance(35.0)
        assert log == ["tick"] * 3
        await ref.ask(Run(cancel))
        await clock.advance(100.0)
        assert log == ["tick"] * 3


@pytest.mark.anyio
async def test_a_timer_whose_key_cannot_be_one_is_refused_and_never_fires() -> None:
    clock = VirtualClock()
    log: list[object] = []
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")

        async def arm(actor: Actor) -> None:
            with pytest.raises(TypeError, match="unhashable"):
                actor.context.timers.periodic(10.0, "tick", key=["a list"])

        await ref.ask(Run(arm))
        await clock.advance(100.0)
        assert log == []


@pytest.mark.anyio
async def test_a_timer_goes_on_if_its_message_is_dropped_as_the_oldest() -> None:
    clock = VirtualClock()
    log: list[object] = []
    async with Runtime(ports=clock.ports()) as runtime:
        mailbox = MailboxSettings(capacity=1, overflow="drop_oldest")
        ref = runtime.spawn(lambda: Counter(log), name="counter", mailbox=mailbox)

        async def arm(actor: Actor) -> None:
            actor.context.timers.periodic(10.0, "tick")

        await ref.ask(Run(arm))
        gate = await block(ref)
        await clock.advance(15.0)
        await ref.tell("news")
        assert runtime.dead_letters.count == 1
        gate.set()
        await clock.advance(10.0)
        assert log == ["news", "tick"]


@pytest.mark.anyio
async def test_a_periodic_timer_does_not_pile_up_behind_a_slow_handler() -> None:
    clock = VirtualClock()
    log: list[object] = []
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")
        gate, begun = anyio.Event(), anyio.Event()

        async def arm_and_wait(actor: Actor) -> None:
            actor.context.timers.periodic(1.0, "tick")
            begun.set()
            await gate.wait()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.ask, Run(arm_and_wait))
            await begun.wait()
            await clock.advance(50.0)
            assert ref._cell.depth == 1
            gate.set()
        await settle()
        assert log == ["tick"]


@pytest.mark.anyio
async def test_arming_a_key_again_replaces_what_it_held_even_after_it_fired() -> None:
    clock = VirtualClock()
    log: list[object] = []
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")

        async def arm_twice(actor: Actor) -> None:
            actor.context.timers.once(1.0, "old", key="key")
            await clock_task_runs(clock)  # it fires while we are still in the handler
            actor.context.timers.once(1.0, "new", key="key")

        await ref.ask(Run(arm_twice))
        await clock.advance(5.0)
        assert log == ["new"]


async def clock_task_runs(clock: VirtualClock) -> None:
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    clock.jump(2.0)
    for _ in range(5):
        await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
async def test_timers_are_gone_with_the_incarnation_that_armed_them() -> None:
    clock = VirtualClock()
    log: list[object] = []
    async with Runtime(ports=clock.ports(), supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")

        async def arm(actor: Actor) -> None:
            actor.context.timers.once(10.0, "stale")
            actor.context.timers.periodic(10.0, "stale too")

        await ref.ask(Run(arm))
        await ref.tell(Fail(ValueError()))
        await clock.advance(100.0)
        assert await ref.ask(Get()) == 0
    assert log == []


class Due:
    """A message that a test can see go."""


@pytest.mark.anyio
@pytest.mark.parametrize("key", [None, "key"])
@pytest.mark.parametrize("ends", ["before it fires", "after it fired", "handled"])
async def test_a_timer_that_is_over_goes_without_the_garbage_collector(
    ends: str, key: str | None
) -> None:
    """A runtime with `freeze_objects` never collects a circle of objects that it has frozen."""
    clock = VirtualClock()
    log: list[object] = []
    gone: list[str] = []

    async def arm(actor: Actor) -> None:
        message = Due()
        weakref.finalize(message, gone.append, "message")
        timer = actor.context.timers.once(1.0, message, key=key)
        if ends == "after it fired":
            await clock.advance(2.0)
        if ends != "handled":
            timer.cancel()

    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")
        gc.collect()
        gc.disable()
        try:
            await ref.ask(Run(arm))
            if ends == "handled":
                await clock.advance(2.0)
            await ref.ask(Get())
            log.clear()
            assert gone == ["message"]
        finally:
            gc.enable()


@pytest.mark.anyio
async def test_a_period_is_longer_than_nothing() -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")

        async def arm(actor: Actor) -> None:
            with pytest.raises(ValueError, match="more than 0"):
                actor.context.timers.periodic(0.0, "tick")

        await ref.ask(Run(arm))


def raise_it(error: Exception) -> None:
    raise error


@given(delays=st.lists(st.floats(0.0, 100.0), max_size=30), cancelled=st.data())
def test_the_clock_runs_what_is_due_in_the_order_of_time(
    delays: list[float], cancelled: st.DataObject
) -> None:
    now = 0.0
    clock = Clock(Ports(loop_time=lambda: now), raise_it)
    ran: list[int] = []
    alarms = [
        clock.call_later(delay, lambda number=number: ran.append(number))  # type: ignore[misc]
        for number, delay in enumerate(delays)
    ]
    gone = cancelled.draw(st.sets(st.integers(0, max(len(delays) - 1, 0))))
    for number in gone:
        if number < len(alarms):
            alarms[number].cancel()
    now = 50.0
    clock._run_due()
    due = [number for number, delay in enumerate(delays) if delay <= 50.0 and number not in gone]
    assert ran == sorted(due, key=lambda number: (delays[number], number))


class Noted:
    """Notes in `ran` when it is woken."""

    def __init__(self, ran: list[float], deadline: float) -> None:
        self._ran = ran
        self._deadline = deadline

    def set_result(self, _: None) -> None:
        self._ran.append(self._deadline)


@given(
    timeouts=st.lists(
        st.tuples(st.floats(0.0, 9.0), st.sampled_from([1.0, 2.0, 5.0])), max_size=30
    ),
    delays=st.lists(st.floats(0.0, 15.0), max_size=10),
)
def test_a_clock_that_is_late_runs_deadlines_and_alarms_in_the_order_of_time(
    timeouts: list[tuple[float, float]], delays: list[float]
) -> None:
    """Asks with the same timeout share one place in the clock; alarms are due between them."""
    now = 0.0
    clock = Clock(Ports(loop_time=lambda: now), raise_it)
    ran: list[float] = []
    for delay in delays:
        clock.call_later(delay, partial(ran.append, delay))
    for sent_at, timeout_s in sorted(timeouts):
        now = sent_at
        ask = Ask(None, "actor", sent_at, None)
        ask.waker = Noted(ran, sent_at + timeout_s)
        clock.arm(ask, timeout_s)
    now = 50.0
    clock._run_due()
    assert ran == sorted((*delays, *(sent_at + timeout_s for sent_at, timeout_s in timeouts)))


def test_cancelled_alarms_do_not_pile_up() -> None:
    clock = Clock(Ports(loop_time=lambda: 0.0), raise_it)
    for _ in range(50_000):
        clock.call_later(1_000.0, lambda: None).cancel()
    assert len(clock._heap) <= 2_048
