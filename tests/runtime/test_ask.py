"""Every ask ends: by a reply, an error, the message handed back, or its deadline."""

import asyncio
from collections.abc import Mapping, Sequence

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.runtime import (
    Actor,
    ActorFailed,
    MailboxSettings,
    Message,
    NotAnsweredInTime,
    NotDelivered,
    NotStartedInTime,
    OutcomeUnknown,
    Runtime,
    Unavailable,
)
from turnkeeper.runtime._messages import Ask
from turnkeeper.runtime.testing import VirtualClock, settle

from .actors import Add, Counter, Get, Run, SyncCounter, block

pytestmark = pytest.mark.anyio


async def test_a_deadline_before_the_start_means_that_nothing_happened() -> None:
    clock = VirtualClock()
    log: list[object] = []
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")
        gate = await block(ref)

        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(NotStartedInTime) as late:
                    await ref.ask(Run(note), timeout=5.0)
                assert isinstance(late.value, Unavailable)
                assert late.value.timeout_s == 5.0

            async def note(_: Actor) -> None:
                log.append("handled")

            tasks.start_soon(ask)
            await clock.advance(5.0)
        gate.set()
        await ref.ask(Get())

    assert log == [], "what was never started in time is skipped"


async def test_a_deadline_after_the_start_means_that_it_may_have_happened() -> None:
    clock = VirtualClock()
    log: list[object] = []
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        gate = anyio.Event()

        async def slow(_: Actor) -> None:
            await gate.wait()
            log.append("handled to the end")

        async def ask() -> None:
            with pytest.raises(NotAnsweredInTime) as late:
                await ref.ask(Run(slow), timeout=5.0)
            assert isinstance(late.value, OutcomeUnknown)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await clock.advance(4.9)
            assert len(runtime._system.clock._deadlines) == 1
            await clock.advance(0.2)
        gate.set()
        await ref.ask(Get())

    assert log == ["handled to the end"]


async def test_deadlines_expire_in_the_order_of_time_whatever_the_timeout() -> None:
    clock = VirtualClock()
    expired: list[float] = []
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        gate = await block(ref)

        async def ask(timeout: float) -> None:
            with pytest.raises(NotStartedInTime):
                await ref.ask(Get(), timeout=timeout)
            expired.append(clock.monotonic() - 1_000.0)

        async with anyio.create_task_group() as tasks:
            for timeout in (3.0, 1.0, 2.0, 1.0, 3.0):
                tasks.start_soon(ask, timeout)
            await clock.advance(10.0)
        gate.set()

    assert expired == [1.0, 1.0, 2.0, 3.0, 3.0]


async def test_a_timeout_value_that_nobody_uses_any_more_is_forgotten() -> None:
    clock = VirtualClock()
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        for number in range(50):
            await ref.ask(Get(), timeout=1.0 + number / 100)
        await clock.advance(10.0)
        assert runtime._system.clock._deadlines == {}


async def test_answered_asks_do_not_pile_up_until_their_deadline() -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        for _ in range(100):
            await ref.ask(Get(), timeout=60.0)
        assert len(runtime._system.clock._deadlines[60.0].asks) <= 1


async def test_answered_asks_do_not_pile_up_behind_a_slow_one() -> None:
    clock = VirtualClock()
    async with Runtime(ports=clock.ports()) as runtime:
        slow = runtime.spawn(Counter, name="slow")
        fast = runtime.spawn(SyncCounter, name="fast")
        other = runtime.spawn(Counter, name="other")
        gate = await block(slow)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ignore_failure, slow, 60.0)
            await settle()
            for _ in range(5_000):
                await fast.ask(Get(), timeout=60.0)
            for _ in range(5_000):
                await other.ask(Get(), timeout=60.0)
            assert len(runtime._system.clock._deadlines[60.0].asks) <= 2_048
            gate.set()


async def ignore_failure(ref: object, timeout: float) -> None:
    await ref.ask(Get(), timeout=timeout)  # type: ignore[attr-defined]


async def test_answered_asks_leave_nothing_behind_if_each_has_a_timeout_of_its_own() -> None:
    clock = VirtualClock()
    async with Runtime(ports=clock.ports()) as runtime:
        ref, busy = (runtime.spawn(Counter, name=name) for name in ("counter", "busy"))
        gate = await block(busy)
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                with pytest.raises(NotStartedInTime):
                    await busy.ask(Get(), timeout=60.0)

            tasks.start_soon(wait)
            await settle()
            for number in range(5_000):
                await ref.ask(Get(), timeout=60.0 + number / 1_000)
            assert len(runtime._system.clock._heap) <= 2_048
            assert len(runtime._system.clock._deadlines) <= 2_048
            await clock.advance(61.0)
        gate.set()


async def test_a_deadline_counts_the_wait_for_room_in_the_mailbox() -> None:
    clock = VirtualClock()
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(Counter, name="counter", mailbox=MailboxSettings(capacity=1))
        gate = await block(ref)
        await ref.tell(Add())

        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(NotStartedInTime):
                    await ref.ask(Get(), timeout=1.0)

            tasks.start_soon(ask)
            await settle()
            assert ref._cell.waiting
            await clock.advance(1.0)
            assert not ref._cell.waiting, "it leaves no trace among those who wait for room"
        gate.set()
        assert await ref.ask(Get()) == 1


async def test_an_ask_cancelled_before_its_start_is_never_handled() -> None:
    log: list[object] = []
    async with Runtime() as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")
        gate = await block(ref)

        async def note(_: Actor) -> None:
            log.append("handled")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.ask, Run(note))
            await settle()
            tasks.cancel_scope.cancel()
        gate.set()
        await ref.ask(Get())

    assert log == []


async def test_an_ask_cancelled_after_its_start_is_handled_to_the_end() -> None:
    log: list[object] = []
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        gate, begun = anyio.Event(), anyio.Event()

        async def slow(_: Actor) -> None:
            begun.set()
            await gate.wait()
            log.append("handled")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.ask, Run(slow))
            await begun.wait()
            tasks.cancel_scope.cancel()
        gate.set()
        await ref.ask(Get())

    assert log == ["handled"]


async def test_a_child_that_asks_a_stopping_parent_hears_so_at_once() -> None:
    heard: list[BaseException] = []

    class Child(Actor):
        def __init__(self, parent: object) -> None:
            self.parent = parent

        async def on_stop(self) -> None:
            try:
                await self.parent.ask(Get())  # type: ignore[attr-defined]
            except NotDelivered as error:
                heard.append(error)

    class Parent(Counter):
        async def on_start(self) -> None:
            self.context.spawn(lambda: Child(self.context.ref), name="child")

    async with Runtime() as runtime:
        ref = runtime.spawn(Parent, name="parent")
        await ref.ask(Get())
        await ref.stop()
    assert len(heard) == 1


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("when", ["before", "while it cleans up", "deferred"])
async def test_an_actor_below_that_asks_one_that_restarts_hears_so_at_once(
    when: str, depth: int
) -> None:
    """The restart waits for the handler, which would wait for the restart."""
    clock = VirtualClock()
    heard: list[tuple[type, float]] = []
    kept: list[object] = []
    begun, may_ask, may_fail = anyio.Event(), anyio.Event(), anyio.Event()

    class Above(Actor):
        async def receive(self, message: object) -> object:
            match message:
                case "begin":
                    await spawn_below(self, depth)
                case "fail":
                    await may_fail.wait()
                    raise ValueError
                case Get() if when == "deferred":
                    kept.append(self.context.defer())
            return "handled"

    async def spawn_below(actor: Actor, levels: int) -> None:
        ref = actor.context.spawn(Counter, name="below")
        if levels > 1:
            await ref.tell(Run(lambda below: spawn_below(below, levels - 1)))
        else:
            await ref.tell(Run(ask_above))

    async def ask_above(_: Actor) -> None:
        begun.set()
        await may_ask.wait()
        with pytest.raises((NotDelivered, ActorFailed)) as refused:
            await above.ask(Get())
        heard.append((refused.type, clock.monotonic()))

    async with Runtime(ports=clock.ports(), stop_s=10.0) as runtime:
        above = runtime.spawn(Above, name="above")
        await above.tell("begin")
        await begun.wait()
        steps: Mapping[str, Sequence[str | anyio.Event]] = {
            "before": ("fail", may_ask, may_fail),
            "while it cleans up": ("fail", may_fail, may_ask),
            "deferred": (may_ask, "fail", may_fail),
        }
        for each in steps[when]:
            if isinstance(each, str):
                await above.tell(each)
            else:
                each.set()
            await settle()
        failed_at = clock.monotonic()
        for _ in range(40):
            await clock.advance(1.0)
        assert await above.ask(Run(ask_above)) == "handled"

    assert heard == [(ActorFailed if when == "deferred" else NotDelivered, failed_at)]


class Deferring(Actor):
    """Keeps every answer, where it outlives the actor; `release` gives them."""

    def __init__(self, kept: list[object] | None = None) -> None:
        self.kept = kept if kept is not None else []

    def receive(self, message: object) -> object:
        match message:
            case "release":
                for delivery in self.kept:
                    delivery.reply("later")  # type: ignore[attr-defined]
            case "fail":
                raise ValueError
            case _:
                self.kept.append(self.context.defer())
        return "ignored when deferred"


class Question(Message[str]):
    pass


async def test_receive_may_defer_its_answer() -> None:
    answers: list[str] = []
    async with Runtime() as runtime:
        ref = runtime.spawn(Deferring, name="deferring")

        async def ask() -> None:
            answers.append(await ref.ask(Question()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await settle()
            assert answers == []
            await ref.tell("release")
    assert answers == ["later"]


@pytest.mark.parametrize("ending", ["restart", "stop"])
async def test_deferred_answers_fail_with_the_actor_that_owes_them(ending: str) -> None:
    kept: list[object] = []
    async with Runtime() as runtime:
        ref = runtime.spawn(lambda: Deferring(kept), name="deferring")

        async def ask() -> None:
            with pytest.raises(ActorFailed, match="before it answered"):
                await ref.ask(Question())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await settle()
            if ending == "restart":
                await ref.tell("fail")
            else:
                await ref.stop()


async def test_asks_answered_inline_let_others_run_now_and_then() -> None:
    steps = 0

    async def count_steps() -> None:
        nonlocal steps
        while True:
            steps += 1
            await anyio.lowlevel.checkpoint()

    async with Runtime() as runtime:
        ref = runtime.spawn(SyncCounter, name="counter")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(count_steps)
            for _ in range(160):
                await ref.ask(Get())
            tasks.cancel_scope.cancel()
    assert steps >= 9


async def test_a_cold_query_is_answered_in_the_askers_own_stack() -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(SyncCounter, name="counter")
        asked = ref.ask(Get())
        with pytest.raises(StopIteration) as answered:
            asked.send(None)  # no step of any other task in between
        assert answered.value.value == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio runs tasks in no order
async def test_an_ask_of_an_actor_at_rest_takes_one_pass_of_the_loop() -> None:
    loop = asyncio.get_running_loop()
    handle: asyncio.Handle
    passes = -1

    def count_pass() -> None:
        nonlocal passes, handle
        passes += 1
        handle = loop.call_soon(count_pass)

    clock = VirtualClock()  # by a real one, a slice on a busy machine may take all of its time
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await ref.ask(Get())  # now its worker is there
        count_pass()
        for _ in range(10):
            await ref.ask(Get())
        handle.cancel()
    assert passes == 10


async def test_an_ask_holds_on_to_nothing_once_it_is_over() -> None:
    ask = Ask("message", "actor", 0.0, None)
    ask.set(1)
    ask.timeout_s = 1.0
    ask.expire()
    ask.return_to_sender("late")
    assert await ask.wait() == 1
