"""Event stream, dead letters, log lines, and the tree."""

import logging
import weakref
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from typing import Any

import anyio
import pytest
import structlog

from turnkeeper.runtime import (
    Actor,
    ActorFailed,
    Backoff,
    DeadLetter,
    Directive,
    EventStream,
    Failure,
    Message,
    Refused,
    Restart,
    Runtime,
    Stopped,
    Supervision,
    TurnkeeperError,
    add_actor,
    bind_log,
)
from turnkeeper.runtime._stats import Stats
from turnkeeper.runtime.testing import VirtualClock, settle

from .actors import Add, Block, Counter, Fail, Get, Run, SyncCounter, block

AT_ONCE = Supervision(backoff=Backoff(first_s=0.0))


@pytest.mark.anyio
async def test_a_subscriber_gets_events_of_its_type_in_order() -> None:
    stream = EventStream()
    with stream.subscribe(int) as numbers, stream.subscribe(object) as everything:
        stream.publish(1)
        stream.publish("text")
        stream.publish(2)
        assert [await anext(numbers) for _ in range(2)] == [1, 2]
        assert [await anext(everything) for _ in range(3)] == [1, "text", 2]
        stream.close()
        assert [event async for event in numbers] == []


@pytest.mark.anyio
async def test_a_second_reader_of_a_subscription_is_refused() -> None:
    stream = EventStream()
    with stream.subscribe(int) as numbers, anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anext, numbers)
            await settle()
            with pytest.raises(RuntimeError, match="another task waits"):
                await anext(numbers)
            stream.publish(1)


def test_what_is_subscribed_to_is_a_type() -> None:
    stream = EventStream()
    for wrong in ("int", 1, list[int]):
        with pytest.raises(TypeError, match="it takes a type"):
            stream.subscribe(wrong)  # type: ignore[arg-type]
    with stream.subscribe(int | str):  # type: ignore[arg-type]
        stream.publish(1)


@pytest.mark.anyio
async def test_a_subscriber_whose_kind_raises_misses_the_event_and_disturbs_nobody() -> None:
    class Odd(type):
        def __instancecheck__(cls, event: object) -> bool:
            if event is None:
                return False
            raise ValueError("unknown")

    class Kind(metaclass=Odd):
        pass

    async with Runtime(supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        with runtime.events.subscribe(Kind) as odd, runtime.events.subscribe(Failure) as failures:
            with pytest.raises(ActorFailed):
                await ref.ask(Fail(KeyError()))
            assert await ref.ask(Get()) == 0
            assert (await anext(failures)).actor == "counter"
            assert odd.missed == 2, "the failure and the restart"


@pytest.mark.anyio
async def test_a_slow_subscriber_loses_the_oldest_and_is_told_how_many() -> None:
    stream = EventStream()
    with stream.subscribe(int, buffer_max=3) as numbers:
        for number in range(10):
            stream.publish(number)
        assert numbers.missed == 7
        assert [await anext(numbers) for _ in range(3)] == [7, 8, 9]


@pytest.mark.anyio
async def test_a_subscriber_that_waits_is_woken_and_one_that_left_gets_nothing() -> None:
    stream = EventStream()
    got: list[int] = []

    async def read() -> None:
        with stream.subscribe(int) as numbers:
            async for number in numbers:
                got.append(number)
                if number == 2:
                    return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await settle()
        for number in (1, 2, 3):
            stream.publish(number)
            await settle()
    assert got == [1, 2]
    assert stream._subscriptions == ()


@pytest.mark.anyio
async def test_what_happens_to_actors_is_published() -> None:
    async with Runtime(supervision=AT_ONCE) as runtime:
        with runtime.events.subscribe(object) as events:
            ref = runtime.spawn(Counter, name="counter")
            await ref.tell(Fail(ValueError("why")))
            await ref.ask(Get())
            await ref.stop()
            await ref.tell(Add())
            failure, restart, stopped, letter = [await anext(events) for _ in range(4)]
    assert isinstance(failure, Failure)
    assert str(failure.error) == "why"
    assert restart == Restart("counter", 1)
    assert stopped == Stopped("counter", None)
    assert letter == DeadLetter(Add(), "counter", "it has stopped")


@pytest.mark.anyio
async def test_dead_letters_are_all_counted_but_logged_only_so_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    async with Runtime(ports=clock.ports()) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await ref.stop()
        with caplog.at_level(logging.WARNING):
            for _ in range(100):
                await ref.tell(Add())
            logged = len(caplog.records)
            clock.jump(60.0)
            await ref.tell(Add())
        assert runtime.dead_letters.count == 101
        assert runtime.dead_letters.count_by_reason == {"it has stopped": 101}
    assert logged == 10
    assert len(caplog.records) == 12
    assert "90" in caplog.records[10].getMessage()


@pytest.mark.anyio
async def test_a_dead_letter_that_may_be_lost_is_counted_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor do many of them keep one that matters out of the log."""

    class Piece(Add, Message[None]):
        may_be_lost = True

    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await ref.stop()
        with caplog.at_level(logging.WARNING):
            for _ in range(100):
                await ref.tell(Piece())
            await ref.tell(Add())
        assert runtime.dead_letters.count == 101
    (logged,) = caplog.records
    assert "message=Add" in logged.getMessage()


@pytest.mark.anyio
async def test_a_proxy_of_what_is_gone_is_a_dead_letter_like_any_other() -> None:
    message = Counter()
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        gate = await block(ref)
        await ref.tell(weakref.proxy(message))
        del message
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.stop)
            await settle()
            gate.set()
        assert runtime.dead_letters.count == 1


@pytest.mark.anyio
async def test_a_log_line_names_its_actor_and_what_was_bound_without_binding_per_message() -> None:
    records: list[dict[str, Any]] = []

    def keep(_: object, __: str, event: Any) -> str:  # noqa: ANN401 - a structlog processor
        records.append(dict(event))
        raise structlog.DropEvent

    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[add_actor, keep])

    async def say(actor: Actor) -> None:
        bind_log(conversation="c7")
        log.info("inside")

        async def effect() -> None:
            bind_log(turn=3)
            log.info("in effect")

        actor.context.start_effect(effect, name="says")

    async with Runtime() as runtime:
        await runtime.spawn(Counter, name="counter").ask(Run(say))
        await settle()
        await runtime.spawn(SyncCounter, name="other").ask(Get())
        log.info("outside")
    assert records == [
        {"event": "inside", "actor": "counter", "conversation": "c7"},
        {"event": "in effect", "actor": "counter", "conversation": "c7", "turn": 3},
        {"event": "outside"},
    ]


@pytest.mark.anyio
async def test_the_log_of_a_failure_does_not_say_what_was_in_the_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Runtime(supervision=AT_ONCE) as runtime:
        secret_text = "my password is hunter2"

        class Failing(Actor):
            def receive(self, message: object) -> None:
                raise ValueError(f"{len(str(message))} characters")

        ref = runtime.spawn(Failing, name="failing")
        await ref.tell(secret_text)
        await settle()
    assert "ValueError" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.anyio
async def test_no_traceback_is_made_of_a_failure_that_is_not_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[BaseException] = []
    monkeypatch.setattr("turnkeeper.runtime._world.traceback_of", made.append)

    with caplog.at_level(logging.ERROR, "turnkeeper.runtime"):
        async with Runtime(supervision=AT_ONCE) as runtime:
            with runtime.events.subscribe(Failure) as failures:
                ref = runtime.spawn(Counter, name="counter")
                await ref.tell(Fail(ValueError("broken")))
                report = await anext(failures)

    assert isinstance(report.error, ValueError)
    assert made == []


class InvalidName(Refused, ValueError):
    """An error as the library raises it for an invalid argument."""


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "is_spawned", "level"),
    [
        (InvalidName("a slash"), False, logging.INFO),
        (InvalidName("a slash"), True, logging.WARNING),
        (Refused("a damaged log"), False, logging.WARNING),
        (ValueError("a bug"), False, logging.WARNING),
    ],
)
async def test_an_actor_that_refuses_an_invalid_name_has_not_failed_for_its_operator(
    caplog: pytest.LogCaptureFixture, error: Exception, is_spawned: bool, level: int
) -> None:
    class Refusing(Counter):
        async def on_start(self) -> None:
            raise error

    stop = Supervision(rules=((Exception, Directive.STOP),))
    with caplog.at_level(logging.INFO, "turnkeeper.runtime"):
        async with Runtime(supervision=stop) as runtime:
            region = runtime.region("keyed", lambda _: Refusing(), supervision=stop)
            ref = runtime.spawn(Refusing, name="spawned") if is_spawned else region["a/b"]
            with pytest.raises(TurnkeeperError):
                await ref.ask(Get())
            await settle()
    assert [one.levelno for one in caplog.records] == [level]
    assert ("Traceback" in caplog.text) == (level == logging.WARNING)


@pytest.mark.anyio
async def test_the_tree_shows_what_every_actor_is_doing() -> None:
    clock = VirtualClock()

    class Parent(Counter):
        async def on_start(self) -> None:
            self.context.spawn(Counter, name="child")

    async with Runtime(ports=clock.ports(), supervision=AT_ONCE) as runtime:
        parent = runtime.spawn(Parent, name="parent")
        region = runtime.region("region", lambda _: SyncCounter())
        await region["a"].ask(Get())
        await parent.tell(Fail(ValueError()))
        gate = await block(parent)
        await parent.tell(Add())
        await clock.advance(5.0)
        await parent.tell(Add())

        tree = runtime.tree()
        state = {each.name: each for each in tree.walk()}

        assert list(state) == ["parent", "parent/child", "region", "region/a"]
        assert state["parent"].state == "handling a message"
        assert state["parent"].mailbox_depth == 2
        assert state["parent"].oldest_s == 5.0
        assert (state["parent"].failed, state["parent"].restarts) == (1, 1)
        assert state["region/a"].state == "idle"
        assert state["region/a"].handled == 1
        assert {each.kind for each in tree.handling_times} == {"Parent", "Counter", "SyncCounter"}
        assert "2 waiting, the oldest for 5.000 s" in str(tree)
        gate.set()


@pytest.mark.anyio
async def test_a_tree_with_a_limit_leaves_idle_actors_out_first_and_counts_them() -> None:
    async with Runtime() as runtime:
        region = runtime.region("many", lambda _: Counter())
        for number in range(10):
            await region[f"{number}"].ask(Get())
        gate = await block(region["7"])

        async def start_effect(actor: Actor) -> None:  # as a conversation does for a turn
            actor.context.start_effect(gate.wait, name="turn")

        await region["5"].ask(Run(start_effect))

        def shown(limit: int) -> tuple[Sequence[str], int]:
            (many,) = runtime.tree(limit=limit).actors
            return [actor.name for actor in many.children], many.left_out

        assert shown(3) == (["many/5", "many/7", "many/0"], 7)
        assert shown(10) == ([f"many/{number}" for number in range(10)], 0)
        assert "7 of its children left out" in str(runtime.tree(limit=3))
        runtime.spawn(Counter, name="beside")
        assert runtime.tree(limit=1).left_out == 1
        for limit in (0, 1.5):
            with pytest.raises(ValueError, match=f"limit is {limit}; it takes a whole number"):
                runtime.tree(limit=limit)  # type: ignore[arg-type]
        gate.set()


@pytest.mark.anyio
@pytest.mark.parametrize("then_waits", [False, True])
async def test_a_tell_is_as_old_as_it_is_and_not_as_an_earlier_one(*, then_waits: bool) -> None:
    """Tells once shared the time of the first one since a worker had begun to run."""
    clock = VirtualClock()
    forwarded = anyio.Event()

    class Forwarder(Actor[Any]):
        async def receive(self, message: object) -> None:
            await busy.tell(message)
            if then_waits:
                await forwarded.wait()

    async with Runtime(ports=clock.ports()) as runtime:
        busy = runtime.spawn(Counter, name="busy")
        blocked = runtime.spawn(Counter, name="blocked")
        busy_gate = await block(busy)
        gate, last_gate = await block(blocked), anyio.Event()
        await runtime.spawn(Forwarder, name="forwarder").tell(Add())
        await settle()
        await clock.advance(5.0)

        await blocked.tell(Block(last_gate, anyio.Event()))
        await clock.advance(2.0)
        age_of_first = _ages(runtime)["blocked"]
        await blocked.tell(Add())
        gate.set()
        await settle()

        age_of_second = _ages(runtime)["blocked"]
        for each in (last_gate, busy_gate, forwarded):
            each.set()
    assert (age_of_first, age_of_second) == (2.0, 0.0)


@pytest.mark.anyio
async def test_a_tell_sent_under_a_flood_is_as_old_as_it_is() -> None:
    """The worker never rests meanwhile; it only lets other tasks run."""
    clock = VirtualClock()

    class Flooded(Actor[int]):
        async def receive(self, message: int) -> None:
            if message == 1:
                await another.tell(Add())
            if message == 21:
                await blocked.tell(Add())
            clock.jump(1.0)

    async with Runtime(ports=clock.ports()) as runtime:
        blocked = runtime.spawn(Counter, name="blocked")
        gate = await block(blocked)
        another = runtime.spawn(Counter, name="another")
        flooded = runtime.spawn(Flooded, name="flooded")
        for number in range(1, 41):
            flooded.tell_nowait(number)
        await settle()
        age = _ages(runtime)["blocked"]
        gate.set()
    assert age == 20.0


@pytest.mark.anyio
async def test_tells_one_after_the_other_hardly_read_the_clock() -> None:
    """A reading takes a twentieth of the time of a tell; each message has one, when handled."""
    clock = VirtualClock()
    readings = 0

    def read() -> float:
        nonlocal readings
        readings += 1
        return clock.monotonic()

    async with Runtime(ports=replace(clock.ports(), loop_time=read)) as runtime:
        counter = runtime.spawn(SyncCounter, name="counter")
        await counter.ask(Get())
        before = readings
        for _ in range(320):
            await counter.tell(Add())
        assert await counter.ask(Get()) == 320
    assert readings - before < 1.2 * 320


def _ages(runtime: Runtime) -> dict[str, float]:
    return {actor.name: actor.oldest_s for actor in runtime.tree().actors}


@pytest.mark.anyio
async def test_the_tree_is_printed_by_rich() -> None:
    from rich.console import Console

    async with Runtime() as runtime:
        await runtime.spawn(Counter, name="counter").ask(Get())
        console = Console(width=100, file=StringIO())
        console.print(runtime.tree())
        assert isinstance(console.file, StringIO)
        text = console.file.getvalue()
    assert "counter Counter: idle, 1 handled" in text
    assert "p99 ms" in text


def test_quantiles_are_those_of_the_recent_messages() -> None:
    stats = Stats()
    for number in range(1, 1_001):
        stats.record(2 * number / 1_000, 2)  # two messages, each of half that time
    for share in (0.1, 0.5, 0.9, 0.99):
        assert share <= stats.quantile(share) <= share * 1.13
    assert Stats().quantile(0.5) == 0.0
    stats.record(0.0, 1)
    stats.record(1e9, 1)


class BrokenFilter(logging.Filter):
    """A filter of the program's that relies on something that is not there."""

    def filter(self, record: logging.LogRecord) -> bool:
        raise LookupError(f"no request for {record.getMessage()}")


@pytest.mark.anyio
async def test_a_log_that_raises_ends_no_actor_and_says_so_without_a_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It ended the runtime, and every actor with it."""
    log, broken = logging.getLogger("turnkeeper.runtime"), BrokenFilter()
    log.addFilter(broken)
    try:
        async with Runtime() as runtime:
            ended = runtime.spawn(Counter, name="ended")
            await ended.stop()
            await ended.tell(Add())
            failing = runtime.spawn(Counter, name="failing", supervision=AT_ONCE)
            with pytest.raises(ActorFailed):
                await failing.ask(Fail(ValueError("secret")))
            assert await failing.ask(Get()) == 0
            assert await runtime.spawn(Counter, name="other").ask(Get()) == 0
    finally:
        log.removeFilter(broken)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "not logged (LookupError): dead letter",
        "not logged (LookupError): actor failed",
    ]
