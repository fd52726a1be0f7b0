"""Failures: who decides, what is restarted, in which order, how often, and after how long."""

import contextlib
import enum
import random
import types
from collections.abc import Awaitable, Callable, Generator
from contextvars import copy_context
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkeeper.runtime import (
    Actor,
    ActorFailed,
    Backoff,
    Directive,
    Failure,
    NotDelivered,
    Ref,
    Runtime,
    Stopped,
    Stuck,
    Supervision,
    Terminated,
    TooManyRestarts,
)
from turnkeeper.runtime._inside import run_inside
from turnkeeper.runtime._supervision import RestartLog, leaves
from turnkeeper.runtime.lowlevel import is_interruption
from turnkeeper.runtime.testing import Probe, VirtualClock, settle

from .actors import Add, Block, Counter, Fail, Get, Run, block

NOW = Backoff(first_s=0.0)
AT_ONCE = Supervision(backoff=NOW)


class TestPure:
    def test_the_first_rule_that_matches_decides(self) -> None:
        supervision = Supervision(
            rules=((LookupError, Directive.STOP), (KeyError, Directive.RESUME)),
            otherwise=Directive.ESCALATE,
        )
        assert supervision.directive(KeyError()) is Directive.STOP
        assert supervision.directive(ValueError()) is Directive.ESCALATE

    def test_rules_look_inside_groups_however_deep(self) -> None:
        supervision = Supervision(rules=((KeyError, Directive.STOP),))
        nested = ExceptionGroup("a", [OSError(), ExceptionGroup("b", [KeyError()])])
        assert supervision.directive(nested) is Directive.STOP
        assert supervision.directive(ExceptionGroup("a", [OSError()])) is Directive.RESTART

    @pytest.mark.parametrize(
        ("rules", "said"),
        [
            ((KeyError, Directive.STOP), r"rules has <class 'KeyError'>; it takes pairs"),
            (((KeyError,),), r"rules has \(<class 'KeyError'>,\); it takes pairs"),
            ((("KeyError", Directive.STOP),), r"rules has \('KeyError', .*; it takes pairs"),
            (((KeyError, "stop"),), r"the directive of a rule is 'stop'; it takes one of"),
        ],
    )
    def test_rules_that_could_not_decide_are_refused_when_they_are_written(
        self, rules: tuple[tuple[type[BaseException], Directive], ...], said: str
    ) -> None:
        with pytest.raises(TypeError, match=said):
            Supervision(rules=rules)

    def test_several_types_can_share_a_rule(self) -> None:
        several: Any = (KeyError, OSError)
        supervision = Supervision(rules=((several, Directive.STOP),))
        assert supervision.directive(OSError()) is Directive.STOP

    def test_otherwise_is_a_directive(self) -> None:
        stop: Any = "stop"
        with pytest.raises(TypeError, match=r"otherwise is 'stop'; it takes one of Directive\."):
            Supervision(otherwise=stop)

    @given(
        gaps=st.lists(st.floats(0.0, 20.0), max_size=40),
        most=st.integers(0, 5),
        window=st.floats(0.1, 30.0),
    )
    def test_intensity_is_otps_arithmetic(
        self, gaps: list[float], most: int, window: float
    ) -> None:
        log = RestartLog(Supervision(restarts_max=most, window_s=window))
        times: list[float] = []
        for gap in gaps:
            now = (times[-1] if times else 0.0) + gap
            times.append(now)
            in_window = sum(1 for time in times if time >= now - window)
            assert log.count_restart(now) == (in_window > most)

    @given(attempt=st.integers(0, 5_000), seed=st.integers())
    def test_backoff_grows_to_its_bound_and_jitters_by_its_share(
        self, attempt: int, seed: int
    ) -> None:
        backoff = Backoff(first_s=0.1, factor=2.0, max_s=5.0, jitter=0.25)
        plain = min(0.1 * 2.0 ** min(attempt, 64), 5.0)
        delay = backoff.delay_s(attempt, random.Random(seed))
        assert plain * 0.75 <= delay <= plain * 1.25

    @pytest.mark.parametrize(("first_s", "delay_s"), [(0.1, 5.0), (0.0, 0.0)])
    @pytest.mark.parametrize("factor", [2**16, 1e200, 10**400])
    def test_backoff_may_grow_beyond_all_numbers(
        self, factor: float, first_s: float, delay_s: float
    ) -> None:
        backoff = Backoff(first_s=first_s, factor=factor, max_s=5.0, jitter=0.0)
        assert backoff.delay_s(64, random.Random(0)) == delay_s

    def test_backoff_starts_over_after_a_quiet_period(self) -> None:
        supervision = Supervision(backoff=Backoff(first_s=1.0, jitter=0.0, reset_s=60.0))
        log = RestartLog(supervision)
        draw = random.Random(0)
        assert [log.next_delay_s(0.0, draw), log.next_delay_s(1.0, draw)] == [1.0, 2.0]
        assert log.next_delay_s(62.0, draw) == 4.0, "59 s after the last restart took effect"
        assert log.next_delay_s(66.0 + 60.1, draw) == 1.0


@pytest.mark.anyio
async def test_a_handler_that_cannot_be_looked_up_fails_its_actor_alone() -> None:
    class Unready(Actor[object]):
        @property
        def receive(self) -> Callable[[object], object]:
            raise ValueError("not yet")

    stopping = Supervision(otherwise=Directive.STOP)
    async with Runtime() as runtime:
        ref = runtime.spawn(Unready, name="unready", supervision=stopping)
        with pytest.raises(NotDelivered):
            await ref.ask(Get())
        assert await runtime.spawn(Counter, name="counter").ask(Get()) == 0


class Name(str, enum.Enum):  # noqa: UP042 - the format of a StrEnum is its text
    """Text whose format is another: `Name.ONE`."""

    ONE = "one"


@pytest.mark.anyio
async def test_a_child_of_an_actor_named_by_an_enum_is_forgotten_when_it_has_stopped() -> None:
    async def spawn_and_stop(actor: Actor) -> None:
        await actor.context.spawn(Counter, name="child").stop()

    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name=Name.ONE)
        for _ in range(2):
            await ref.ask(Run(spawn_and_stop))


@pytest.mark.anyio
async def test_refs_to_the_key_of_an_enum_and_to_its_text_are_one() -> None:
    async with Runtime() as runtime:
        region = runtime.region("keyed", lambda _: Counter())
        assert {region["one"], region[Name.ONE]} == {region["one"]}


@pytest.mark.anyio
async def test_resume_keeps_the_actor_and_its_state() -> None:
    async with Runtime(supervision=Supervision(otherwise=Directive.RESUME)) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await ref.tell(Add(3))
        with pytest.raises(ActorFailed):
            await ref.ask(Fail(ValueError()))
        assert await ref.ask(Get()) == 3


@pytest.mark.anyio
@pytest.mark.parametrize("is_made", [False, True], ids=["factory", "on_start"])
@pytest.mark.parametrize("is_keyed", [False, True], ids=["alone", "region"])
async def test_a_failed_start_is_restarted_where_failures_are_resumed(
    is_made: bool, is_keyed: bool
) -> None:
    """It has nothing to go on with: tried again at once, for ever, it would take all of the CPU."""
    clock = VirtualClock()
    starts: list[float] = []

    class Broken(Counter):
        async def on_start(self) -> None:
            starts.append(clock.monotonic())
            raise ValueError("broken")

    def make(*_: str) -> Counter:
        if is_made:
            return Broken()
        starts.append(clock.monotonic())
        raise ValueError("broken")

    resume = Supervision(
        otherwise=Directive.RESUME, restarts_max=2, backoff=Backoff(first_s=1.0, jitter=0.0)
    )

    async def use(runtime: Runtime) -> None:
        if is_keyed:
            region = runtime.region("region", make, supervision=resume)
            await region["key"].tell(Add())
        else:
            runtime.spawn_supervisor("resuming", resume).spawn(make, name="actor")
        await settle()
        await clock.advance(60.0)

    if is_keyed:
        async with Runtime(ports=clock.ports()) as runtime:
            await use(runtime)
    else:
        stop = Supervision(otherwise=Directive.STOP)
        async with Runtime(ports=clock.ports(), supervision=stop) as runtime:
            await use(runtime)
    assert [at - starts[0] for at in starts] == [0.0, 1.0, 3.0]


@pytest.mark.anyio
async def test_stop_hands_the_mail_back_and_tells_the_watchers_why() -> None:
    error = ValueError("why")
    notices: Probe[Terminated] = Probe()
    async with Runtime(supervision=Supervision(otherwise=Directive.STOP)) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        ref.watch(runtime.spawn(lambda: notices, name="watcher"))
        gate = await block(ref)
        await ref.tell(Fail(error))

        async def ask() -> None:
            with pytest.raises(NotDelivered):
                await ref.ask(Get())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await settle()
            gate.set()
        (notice,) = await notices.wait_for(1)
    assert notice.ref == ref
    assert notice.error is error


@pytest.mark.anyio
async def test_a_restart_waits_for_its_backoff_and_mail_is_kept() -> None:
    clock = VirtualClock()
    supervision = Supervision(backoff=Backoff(first_s=10.0, factor=3.0, max_s=99.0, jitter=0.0))
    log: list[object] = []
    async with Runtime(ports=clock.ports(), supervision=supervision) as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")
        await ref.tell(Fail(ValueError()))
        await ref.tell("kept")
        await clock.advance(9.9)
        assert log == []
        assert next(runtime.tree().walk()).state == "backing off"
        await clock.advance(0.2)
        assert log == ["kept"]
        await ref.tell(Fail(ValueError()))
        await ref.tell("kept longer")
        await clock.advance(29.0)
        assert log == ["kept"]
        await clock.advance(2.0)
        assert log == ["kept", "kept longer"]


@pytest.mark.anyio
async def test_mail_that_waits_is_kept_through_a_restart_without_backoff() -> None:
    log: list[object] = []
    async with Runtime(supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")
        gate = await block(ref)
        for message in (Fail(ValueError()), "kept", "kept, too"):
            await ref.tell(message)
        gate.set()

        # Not asked for: a mailbox that has lost its mail would not answer either.
        await settle()

    assert log == ["kept", "kept, too"]


@pytest.mark.anyio
async def test_an_actor_can_be_stopped_while_it_backs_off() -> None:
    clock = VirtualClock()
    slow = Supervision(backoff=Backoff(first_s=1_000.0, max_s=1_000.0))
    async with Runtime(ports=clock.ports(), supervision=slow) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await ref.tell(Fail(ValueError()))
        await settle()
        await ref.tell(Add())
        await ref.stop()
        assert runtime.dead_letters.count == 1
        with pytest.raises(NotDelivered):
            await ref.ask(Get())


@pytest.mark.anyio
async def test_an_actor_that_fails_while_it_is_told_to_stop_just_stops() -> None:
    async with Runtime(supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        gate, begun = anyio.Event(), anyio.Event()

        async def fail_later(_: Actor) -> None:
            begun.set()
            await gate.wait()
            raise ValueError("too late to matter")

        await ref.tell(Run(fail_later))
        await begun.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.stop)
            await settle()
            gate.set()
        with pytest.raises(NotDelivered):
            await ref.ask(Get())
        assert list(runtime.tree().walk()) == []


@pytest.mark.anyio
async def test_an_actor_that_cannot_start_can_be_stopped_while_it_tries() -> None:
    gate, begun = anyio.Event(), anyio.Event()

    class Slow(Counter):
        async def on_start(self) -> None:
            begun.set()
            await gate.wait()
            raise OSError("no such file")

    async with Runtime(supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(Slow, name="slow")
        await begun.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.stop)
            await settle()
            gate.set()
        assert list(runtime.tree().walk()) == []


@pytest.mark.anyio
async def test_a_nested_supervisor_is_held_and_released_with_its_siblings() -> None:
    log: list[str] = []
    async with Runtime() as runtime:
        together = Supervision(strategy="one_for_all", backoff=NOW)
        outer = runtime.spawn_supervisor("outer", together)
        inner = outer.spawn_supervisor("inner", AT_ONCE)
        nested = inner.spawn(named("nested", log), name="nested")
        beside = outer.spawn(named("beside", log), name="beside")
        for ref in (nested, beside):
            await ref.ask(Get())
        log.clear()
        await beside.tell(Fail(ValueError()))
        for _ in range(5):
            await settle()
        assert await nested.ask(Get()) == 0
        assert log == ["-beside", "-nested", "+nested", "+beside"]


@pytest.mark.anyio
async def test_restart_runs_its_hook_on_the_failed_actor_with_the_error() -> None:
    seen: list[object] = []
    error = ValueError()

    class Hooked(Counter):
        async def on_start(self) -> None:
            seen.append("start")

        async def on_restart(self, found: BaseException) -> None:
            seen.append((self.count, found))

        async def on_stop(self) -> None:
            seen.append("stop")

    async with Runtime(supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(Hooked, name="hooked")
        await ref.tell(Add(2))
        await ref.tell(Fail(error))
        await ref.ask(Get())
    assert seen == ["start", (2, error), "start", "stop"]


@pytest.mark.anyio
async def test_too_many_restarts_fail_the_runtime_when_no_other_supervisor_is_left() -> None:
    supervision = Supervision(backoff=NOW, restarts_max=2, window_s=10.0)
    stopped: list[str] = []

    class Sibling(Counter):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        async def on_stop(self) -> None:
            stopped.append(self.name)

    error = ValueError("again")

    async def run() -> None:
        async with Runtime(supervision=supervision) as runtime:
            for name in ("first", "second"):
                await runtime.spawn(partial(Sibling, name), name=name).ask(Get())
            ref = runtime.spawn(Counter, name="failing")
            for _ in range(3):
                await ref.tell(Fail(error))
            await anyio.sleep_forever()

    with pytest.raises(TooManyRestarts) as caught:
        await run()
    assert caught.value.actor == "failing"
    assert caught.value.restarts_max == 2
    assert caught.value.__cause__ is error
    assert stopped == ["second", "first"], "in reverse order of their start"


@pytest.mark.anyio
async def test_restarts_far_enough_apart_are_never_too_many() -> None:
    clock = VirtualClock()
    supervision = Supervision(backoff=NOW, restarts_max=1, window_s=10.0)
    async with Runtime(ports=clock.ports(), supervision=supervision) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        for _ in range(5):
            await ref.tell(Fail(ValueError()))
            await clock.advance(10.1)
        assert await ref.ask(Get()) == 0


@pytest.mark.anyio
async def test_an_actors_own_supervision_is_counted_apart_and_its_end_is_one_failure() -> None:
    own = Supervision(backoff=NOW, restarts_max=2, window_s=10.0)
    clock = VirtualClock()
    decisions: list[str] = []
    async with Runtime(ports=clock.ports(), supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(Counter, name="counter", supervision=own)
        with runtime.events.subscribe(Failure) as failures:
            for _ in range(3):
                await ref.tell(Fail(ValueError()))
                decisions.append(type((await anext(failures)).error).__name__)
            await settle()
        assert await ref.ask(Get()) == 0, "the third was one failure for the runtime to judge"
        for _ in range(2):
            await ref.tell(Fail(ValueError()))
            assert await ref.ask(Get()) == 0
        assert len(runtime._root._log._times) == 1, "and its own count started over"


class Named(Counter):
    """Writes down its starts and stops."""

    def __init__(self, name: str, log: list[str], *, slow: bool = False) -> None:
        super().__init__()
        self.name = name
        self.journal = log
        self.slow = slow

    async def on_start(self) -> None:
        self.journal.append(f"+{self.name}")
        if self.slow:
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()

    async def on_stop(self) -> None:
        await anyio.lowlevel.checkpoint()
        self.journal.append(f"-{self.name}")


def named(name: str, log: list[str]) -> Callable[[], Named]:
    return lambda: Named(name, log)


async def three(runtime: Runtime, supervision: Supervision, log: list[str]) -> list[Ref]:
    group = runtime.spawn_supervisor("group", supervision)
    refs = [group.spawn(named(name, log), name=name) for name in "abc"]
    for ref in refs:
        await ref.ask(Get())
    log.clear()
    return refs


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("one_for_one", ["-b", "+b"]),
        ("rest_for_one", ["-b", "-c", "+b", "+c"]),
        ("one_for_all", ["-b", "-c", "-a", "+a", "+b", "+c"]),
    ],
)
async def test_a_strategy_says_who_is_restarted_with_the_failed_one(
    strategy: str, expected: list[str]
) -> None:
    log: list[str] = []
    async with Runtime() as runtime:
        refs = await three(runtime, Supervision(strategy=strategy, backoff=NOW), log)  # type: ignore[arg-type]
        await refs[0].tell(Add(1))
        await refs[2].tell(Add(1))
        await refs[1].tell(Fail(ValueError()))
        await refs[1].tell(Add(5))
        assert await refs[1].ask(Get()) == 5, "its own mail was kept"
        for ref in refs:
            await ref.ask(Get())
        # The failed one cleans up at once; the others in reverse order of their start.
        assert log == expected
        log.clear()


@pytest.mark.anyio
async def test_mail_of_the_siblings_is_kept_through_one_for_all() -> None:
    log: list[str] = []
    async with Runtime() as runtime:
        refs = await three(runtime, Supervision(strategy="one_for_all", backoff=NOW), log)
        gate = await block(refs[0])
        await refs[0].tell(Add(7))
        await refs[1].tell(Fail(ValueError()))
        await settle()
        gate.set()
        assert await refs[0].ask(Get()) == 7


@pytest.mark.anyio
async def test_a_group_waits_for_its_backoff_before_anyone_comes_back() -> None:
    clock = VirtualClock()
    log: list[str] = []
    async with Runtime(ports=clock.ports()) as runtime:
        slow = Backoff(first_s=10.0, jitter=0.0)
        refs = await three(runtime, Supervision(strategy="one_for_all", backoff=slow), log)
        await refs[1].tell(Fail(ValueError()))
        await clock.advance(9.0)
        assert log == ["-b", "-c", "-a"]
        assert {each.state for each in runtime.tree().walk()} == {"open", "held"}
        await clock.advance(2.0)
        assert log[3:] == ["+a", "+b", "+c"]


@pytest.mark.anyio
async def test_a_sibling_that_is_still_starting_is_restarted_with_the_group() -> None:
    may_start, may_stop = anyio.Event(), anyio.Event()

    class Slow(Counter):
        async def on_start(self) -> None:
            await may_start.wait()

        async def on_stop(self) -> None:
            await may_stop.wait()

    async with Runtime() as runtime:
        group = runtime.spawn_supervisor("g", Supervision(strategy="one_for_all", backoff=NOW))
        refs = [group.spawn(Counter, name="a"), group.spawn(Slow, name="b")]
        await settle()
        await refs[0].tell(Fail(ValueError()))
        await settle()
        may_start.set()
        await settle()
        assert {each.name: each.state for each in runtime.tree().walk()} == {
            "g": "open",
            "g/a": "held",
            "g/b": "cleaning up",
        }
        may_stop.set()
        with anyio.fail_after(5):
            assert [await ref.ask(Get()) for ref in refs] == [0, 0]


@pytest.mark.anyio
@pytest.mark.parametrize("is_one_stopped", [False, True])
async def test_all_come_back_if_more_of_a_group_fail_while_it_is_held(
    *, is_one_stopped: bool
) -> None:
    async with Runtime() as runtime:
        group = runtime.spawn_supervisor("g", Supervision(strategy="rest_for_one", backoff=NOW))
        a, b, c, d = refs = [group.spawn(Counter, name=name) for name in "abcd"]
        gate = await block(d)
        for ref in (a, b):
            await ref.tell(Fail(ValueError()))
            await settle()
        if is_one_stopped:
            await b.stop()
            refs.remove(b)
        await c.tell(Fail(ValueError()))
        await settle()
        gate.set()
        with anyio.fail_after(5):
            assert [await ref.ask(Get()) for ref in refs] == [0] * len(refs)


@pytest.mark.anyio
async def test_a_group_comes_back_if_its_first_ends_just_as_another_fails() -> None:
    class Stopping(Counter):
        async def on_stop(self) -> None:
            """Takes a step of its own."""

    async def stop_first_and_fail(_: Actor) -> None:
        first._cell.request_stop("it was told to")
        raise ValueError

    async with Runtime() as runtime:
        group = runtime.spawn_supervisor("g", Supervision(strategy="one_for_all", backoff=NOW))
        first, second, third = (group.spawn(Stopping, name=name) for name in "abc")
        await third.tell(Run(stop_first_and_fail))
        await settle()
        with anyio.fail_after(5):
            assert [await ref.ask(Get()) for ref in (second, third)] == [0, 0]


@pytest.mark.anyio
async def test_an_actor_that_fails_while_its_supervisor_fails_comes_back_with_it() -> None:
    may_stop = anyio.Event()

    class Slow(Counter):
        async def on_stop(self) -> None:
            await may_stop.wait()

    rules = ((KeyError, Directive.ESCALATE),)
    async with Runtime(supervision=AT_ONCE) as runtime:
        group = runtime.spawn_supervisor(
            "g", Supervision(rules, strategy="one_for_all", backoff=NOW)
        )
        failing, busy = group.spawn(Counter, name="a"), group.spawn(Counter, name="b")
        gate = await block(busy)
        await failing.tell(Fail(KeyError()))
        await settle()
        late = group.spawn(Slow, name="c")
        await late.tell(Fail(ValueError()))
        await settle()
        gate.set()
        await settle()
        may_stop.set()
        with anyio.fail_after(5):
            assert [await ref.ask(Get()) for ref in (failing, busy, late)] == [0, 0, 0]


@pytest.mark.anyio
async def test_a_key_that_is_refused_comes_back_whole_when_its_region_is_restarted() -> None:
    rules = ((KeyError, Directive.ESCALATE),)
    async with Runtime(supervision=AT_ONCE) as runtime:
        region = runtime.region(
            "r", lambda _: Counter(), supervision=Supervision(rules, restarts_max=0, backoff=NOW)
        )
        await region["a"].tell(Fail(ValueError()))
        await settle()
        with pytest.raises(TooManyRestarts):
            await region["a"].ask(Get())
        await region["b"].tell(Fail(KeyError()))
        await settle()
        gate = await block(region["a"])
        with anyio.fail_after(5):
            await region["a"].tell(Add())
        gate.set()
        assert await region["a"].ask(Get()) == 1


@pytest.mark.anyio
async def test_a_group_whose_restart_fails_is_restarted_again() -> None:
    log: list[str] = []
    failures = 2

    class Reluctant(Named):
        async def on_start(self) -> None:
            nonlocal failures
            await super().on_start()
            if len(self.journal) > 3 and failures:
                failures -= 1
                raise OSError("not yet")

    async with Runtime() as runtime:
        group = runtime.spawn_supervisor(
            "group", Supervision(strategy="one_for_all", backoff=NOW, restarts_max=10)
        )
        first = group.spawn(named("a", log), name="a")
        second = group.spawn(lambda: Reluctant("b", log), name="b")
        third = group.spawn(named("c", log), name="c")
        for ref in (first, second, third):
            await ref.ask(Get())
        await first.tell(Fail(ValueError()))
        for _ in range(20):
            await settle()
        for ref in (first, second, third):
            assert await ref.ask(Get()) == 0
    assert failures == 0


@pytest.mark.anyio
async def test_too_many_restarts_in_a_group_are_its_supervisors_failure() -> None:
    """The children stop in reverse start order, and the supervisor fails upward."""
    log: list[str] = []
    async with Runtime(supervision=AT_ONCE) as runtime:
        once = Supervision(backoff=NOW, restarts_max=0)
        with runtime.events.subscribe(Failure) as failures:
            refs = await three(runtime, once, log)
            await refs[1].tell(Fail(ValueError()))
            await anext(failures)
            upward = await anext(failures)
            for ref in refs:
                assert await ref.ask(Get()) == 0
        assert isinstance(upward.error, TooManyRestarts)
        assert upward.actor == "group"
        assert log == ["-b", "-c", "-a", "+a", "+b", "+c"]


@pytest.mark.anyio
async def test_escalate_makes_the_failure_the_parents_own() -> None:
    error = ValueError("too much for me")

    class Parent(Counter):
        supervision = Supervision(otherwise=Directive.ESCALATE)

        async def on_start(self) -> None:
            self.child = self.context.spawn(Counter, name="child")

    async with Runtime(supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(Parent, name="parent")
        await ref.tell(Add(2))

        async def fail_child(actor: Actor) -> None:
            assert isinstance(actor, Parent)
            await actor.child.tell(Fail(error))

        with runtime.events.subscribe(Failure) as failures:
            await ref.ask(Run(fail_child))
            await anext(failures)
            assert (await anext(failures)).error is error
        assert await ref.ask(Get()) == 0, "the parent was restarted"
        names = [state.name for state in runtime.tree().walk()]
        assert names == ["parent", "parent/child"]


@pytest.mark.anyio
async def test_children_stop_before_their_parent_in_reverse_order_of_start() -> None:
    log: list[str] = []

    class Parent(Named):
        async def on_start(self) -> None:
            for name in "xyz":
                self.context.spawn(named(name, self.journal), name=name)

    async with Runtime() as runtime:
        ref = runtime.spawn(lambda: Parent("parent", log), name="parent")
        await ref.ask(Get())
        await settle()
        assert log == ["+x", "+y", "+z"]
        log.clear()
        await ref.stop()
    assert log == ["-z", "-y", "-x", "-parent"]


@pytest.mark.anyio
async def test_actors_start_in_the_order_in_which_they_were_spawned() -> None:
    log: list[str] = []
    async with Runtime() as runtime:
        for number in range(20):
            runtime.spawn(named(str(number), log), name=str(number))
        await settle()
        assert log == [f"+{number}" for number in range(20)]
        log.clear()
    assert log == [f"-{number}" for number in reversed(range(20))]


@pytest.mark.anyio
async def test_a_failing_effect_fails_its_actor_with_that_error() -> None:
    error = OSError("effect")

    async def effect() -> None:
        raise error

    async def start(actor: Actor) -> None:
        actor.context.start_effect(effect, name="fails")

    async with Runtime(supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await ref.tell(Add())
        with runtime.events.subscribe(Failure) as failures:
            await ref.ask(Run(start))
            assert (await anext(failures)).error is error
        assert await ref.ask(Get()) == 0


@pytest.mark.anyio
@pytest.mark.parametrize("ending", ["restart", "stop", "cancel"])
async def test_effects_are_cancelled_with_their_actor_or_alone(ending: str) -> None:
    ended: list[str] = []

    async def effect() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("ended")

    async def start(actor: Actor) -> object:
        return actor.context.start_effect(effect, name="forever")

    async with Runtime(supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await ref.tell(Add())
        handle = await ref.ask(Run(start))
        await settle()
        assert not handle.is_done  # type: ignore[attr-defined]
        if ending == "restart":
            await ref.tell(Fail(ValueError()))
            assert await ref.ask(Get()) == 0
        elif ending == "stop":
            await ref.stop()
        else:
            handle.cancel()  # type: ignore[attr-defined]
            await settle()
            assert await ref.ask(Get()) == 1, "a cancelled effect is no failure"
        assert ended == ["ended"]
        assert handle.is_done  # type: ignore[attr-defined]


@pytest.mark.anyio
async def test_an_effect_cancelled_before_it_began_never_begins() -> None:
    begun: list[str] = []

    async def effect() -> None:
        begun.append("although it was cancelled")

    async def start(actor: Actor) -> None:
        actor.context.start_effect(effect, name="never").cancel()

    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await ref.ask(Run(start))
        await settle()
        assert next(runtime.tree().walk()).effects == ()
    assert begun == []


@pytest.mark.anyio
async def test_an_effect_that_swallows_its_cancellation_is_given_up_as_stuck() -> None:
    clock = VirtualClock()
    free = anyio.Event()

    async def effect() -> None:
        while not free.is_set():
            try:
                await free.wait()
            except anyio.get_cancelled_exc_class():
                with anyio.CancelScope(shield=True):
                    await free.wait()

    async def start(actor: Actor) -> None:
        actor.context.start_effect(effect, name="stubborn")

    async with Runtime(ports=clock.ports(), kill_s=1.0) as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await ref.ask(Run(start))
        with runtime.events.subscribe(Stuck) as stuck:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ref.stop)
                await clock.advance(1.5)
            assert "stubborn" in (await anext(stuck)).doing
        free.set()


@pytest.mark.anyio
async def test_watching_one_that_is_dead_already_brings_the_notice_at_once() -> None:
    notices: Probe[Terminated] = Probe()
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        await ref.stop()
        ref.watch(runtime.spawn(lambda: notices, name="watcher"))
        await settle()
        assert notices.received == [Terminated(ref, None)]


@pytest.mark.anyio
async def test_a_restart_is_no_death_and_unwatch_takes_it_back() -> None:
    notices: Probe[Terminated] = Probe()
    async with Runtime(supervision=AT_ONCE) as runtime:
        watcher = runtime.spawn(lambda: notices, name="watcher")
        first = runtime.spawn(Counter, name="first")
        second = runtime.spawn(Counter, name="second")
        first.watch(watcher)
        second.watch(watcher)
        await first.tell(Fail(ValueError()))
        await first.ask(Get())
        second.unwatch(watcher)
        with runtime.events.subscribe(Stopped) as stopped:
            await second.stop()
            assert (await anext(stopped)).actor == "second"
        await settle()
        assert notices.received == []
        await first.stop()
        await notices.wait_for(1)


@pytest.mark.anyio
async def test_an_actor_may_stop_itself_after_its_message() -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")

        async def stop(actor: Actor) -> str:
            actor.context.stop()
            return "answered first"

        assert await ref.ask(Run(stop)) == "answered first"
        await settle()
        with pytest.raises(NotDelivered):
            await ref.ask(Get())


@pytest.mark.anyio
async def test_a_name_is_used_once_among_siblings_until_its_actor_has_stopped() -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        with pytest.raises(ValueError, match="already"):
            runtime.spawn(Counter, name="counter")
        await ref.stop()
        assert await runtime.spawn(Counter, name="counter").ask(Get()) == 0


@pytest.mark.anyio
async def test_a_factory_that_raises_is_a_failed_start() -> None:
    tries = 0

    def make() -> Counter:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError("not yet")
        return Counter()

    async with Runtime(supervision=AT_ONCE) as runtime:
        ref = runtime.spawn(make, name="counter")
        with pytest.raises(NotDelivered, match="could not start: OSError; nothing happened"):
            await ref.ask(Get())
        await settle()
        assert await ref.ask(Get()) == 0
    assert tries == 3


class TestInterruptsOnTrio:
    @pytest.fixture
    def anyio_backend(self) -> str:
        return "trio"

    @pytest.mark.anyio
    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
    async def test_interrupts_of_the_program_are_never_caught(
        self, error: type[BaseException]
    ) -> None:
        async def interrupt(_: Actor) -> None:
            raise error

        async def run() -> None:
            async with Runtime(supervision=AT_ONCE) as runtime:
                ref = runtime.spawn(Counter, name="counter")
                await ref.tell(Run(interrupt))
                await anyio.sleep_forever()

        with pytest.raises(error):
            await run()


def close(*_: object) -> None:
    raise GeneratorExit


async def close_later(*_: object) -> None:
    await anyio.lowlevel.checkpoint()
    close()


async def close_one_of_several(*_: object) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(close_later)


class Exiting(Actor):
    """Raises `GeneratorExit`, as code does that throws it into a generator of its own."""

    def __init__(self, where: str) -> None:
        self.where = where
        if where == "while it is made":
            close()

    async def on_start(self) -> None:
        if self.where == "as it starts":
            await close_later()

    async def on_stop(self) -> None:
        if self.where == "as it stops":
            await close_later()

    def receive(self, message: object) -> object:
        match self.where:
            case "in an effect":
                self.context.start_effect(close_later, name="effect")
            case "at once":
                close()
            case "later":
                return close_later()
            case "in a group":
                return close_one_of_several()
            case _:
                pass
        return None


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(
    "where",
    [
        *("while it is made", "as it starts", "at once", "later", "in a group"),
        *("in an effect", "as it stops"),
    ],
)
async def test_a_generator_exit_that_an_actor_raises_is_a_failure_like_any_other(
    where: str, resident: bool
) -> None:
    async with Runtime(supervision=Supervision(otherwise=Directive.STOP)) as runtime:
        with runtime.events.subscribe(Failure) as failures:
            other = runtime.spawn(Counter, name="other")
            ref = runtime.spawn(lambda: Exiting(where), name="exiting", resident=resident)
            with contextlib.suppress(ActorFailed, NotDelivered):
                await ref.ask(Get())
            await settle()
            await ref.stop()
            assert await other.ask(Get()) == 0
            failure = await anext(failures)

    assert failure.actor == "exiting"
    assert all(isinstance(leaf, GeneratorExit) for leaf in leaves(failure.error))


@types.coroutine
def suspend() -> Generator[None, None, None]:
    yield


async def test_the_closing_of_a_coroutine_is_an_interruption_in_each_one_that_waits() -> None:
    found: list[bool] = []

    async def inner(wait: Callable[[], Awaitable[None]]) -> None:
        try:
            await wait()
        except BaseException as error:
            found.append(is_interruption(error))
            raise

    async def outer(wait: Callable[[], Awaitable[None]]) -> None:
        try:
            await run_inside(copy_context(), inner(wait))
        except BaseException as error:
            found.append(is_interruption(error))
            raise

    closed = outer(suspend)
    closed.send(None)
    closed.close()
    assert found == [True, True]
    with pytest.raises(GeneratorExit):
        await outer(close_later)
    assert found[2:] == [False, False]


def test_interrupts_of_the_program_end_the_loop_on_asyncio() -> None:
    async def interrupt(_: Actor) -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        async with Runtime(supervision=AT_ONCE) as runtime:
            ref = runtime.spawn(Counter, name="counter")
            await ref.tell(Run(interrupt))
            await anyio.sleep_forever()

    with pytest.raises(KeyboardInterrupt):
        anyio.run(main)


async def test_an_interrupt_ends_the_program_while_a_parent_waits_for_its_child_to_stop() -> None:
    """That wait is shielded, and no worker runs the child any more: it would never end."""
    begun = anyio.Event()

    class Parent(Actor):
        async def on_start(self) -> None:
            child = self.context.spawn(Counter, name="child")
            await child.tell(Block(anyio.Event(), begun))

    async def interrupt(_: Actor) -> None:
        raise BaseExceptionGroup("as a task group raises it", [SystemExit()])

    async def run() -> None:
        async with Runtime(supervision=AT_ONCE) as runtime, anyio.create_task_group() as tasks:
            parent = runtime.spawn(Parent, name="parent")
            await begun.wait()
            tasks.start_soon(parent.stop)
            await settle()
            await runtime.spawn(Counter, name="other").tell(Run(interrupt))

    with pytest.raises(SystemExit):
        await run()


async def test_children_that_escalate_together_are_one_failure_of_their_supervisor() -> None:
    go = anyio.Event()

    async def fail_together(_: Actor) -> None:
        await go.wait()
        raise ValueError("together")

    async with Runtime(supervision=AT_ONCE) as runtime:
        escalating = Supervision(otherwise=Directive.ESCALATE)
        supervisor = runtime.spawn_supervisor("pair", escalating)
        region = runtime.region("keyed", lambda _: Counter(), supervision=escalating)
        refs = [supervisor.spawn(Counter, name=name) for name in ("first", "second")]
        for ref in (*refs, region["first"], region["second"]):
            await ref.tell(Run(fail_together))
        await settle()
        go.set()
        await settle()

        assert len(runtime._root._log._times) == 2, "one of the supervisor, one of the region"
        for ref in refs:
            assert await ref.ask(Get()) == 0


async def test_a_child_comes_back_if_the_actor_that_it_failed_goes_on_as_it_is() -> None:
    log: list[str] = []
    children: list[Ref] = []

    class Parent(Counter):
        supervision = Supervision(otherwise=Directive.ESCALATE, backoff=Backoff(first_s=0.0))

        async def on_start(self) -> None:
            children.extend(self.context.spawn(named(name, log), name=name) for name in "ab")

    async with Runtime() as runtime:
        resume = Supervision(otherwise=Directive.RESUME)
        await runtime.spawn(Parent, name="parent", supervision=resume).ask(Get())
        for _ in range(2):
            await children[0].tell(Fail(ValueError()))
            await children[0].tell(Add(5))
            with anyio.fail_after(5):
                assert await children[0].ask(Get()) == 5, "a new one, with its mail"
        assert log == ["+a", "+b", "-a", "+a", "-a", "+a"]


async def test_a_child_that_fails_again_and_again_comes_back_after_its_backoff() -> None:
    """Brought back at once, a child that cannot start would take all of the CPU."""
    clock = VirtualClock()
    starts: list[float] = []

    class Child(Counter):
        async def on_start(self) -> None:
            starts.append(clock.monotonic())
            if len(starts) < 4:
                raise ValueError("not yet")

    class Parent(Counter):
        supervision = Supervision(
            otherwise=Directive.ESCALATE, backoff=Backoff(first_s=1.0, jitter=0.0)
        )

        async def on_start(self) -> None:
            self.context.spawn(Child, name="child")

    async with Runtime(ports=clock.ports()) as runtime:
        resume = Supervision(otherwise=Directive.RESUME)
        runtime.spawn(Parent, name="parent", supervision=resume)
        await settle()
        await clock.advance(60.0)
    assert [at - starts[0] for at in starts] == [0.0, 1.0, 3.0, 7.0]


async def test_children_whose_actor_is_resumed_come_back_together() -> None:
    clock = VirtualClock()
    starts: list[float] = []

    class Child(Counter):
        async def on_start(self) -> None:
            starts.append(clock.monotonic())
            if len(starts) <= 2:
                raise ValueError("not yet")

    class Parent(Counter):
        supervision = Supervision(
            otherwise=Directive.ESCALATE, backoff=Backoff(first_s=1.0, jitter=0.0)
        )

        async def on_start(self) -> None:
            for name in ("a", "b"):
                self.context.spawn(Child, name=name)

    async with Runtime(ports=clock.ports()) as runtime:
        resume = Supervision(otherwise=Directive.RESUME)
        runtime.spawn(Parent, name="parent", supervision=resume)
        await settle()
        await clock.advance(60.0)
    assert [at - starts[0] for at in starts] == [0.0, 0.0, 1.0, 1.0]


async def test_leaving_does_not_wait_for_the_backoff_of_a_child_whose_actor_is_resumed() -> None:
    clock = VirtualClock()
    starts: list[float] = []

    class Child(Counter):
        async def on_start(self) -> None:
            starts.append(clock.monotonic())
            raise ValueError("never")

    class Parent(Counter):
        supervision = Supervision(
            otherwise=Directive.ESCALATE, backoff=Backoff(first_s=3_600.0, max_s=3_600.0)
        )

        async def on_start(self) -> None:
            self.context.spawn(Child, name="child")

    async with Runtime(ports=clock.ports()) as runtime:
        resume = Supervision(otherwise=Directive.RESUME)
        runtime.spawn(Parent, name="parent", supervision=resume)
        await settle()
    assert len(starts) == 1


async def test_children_of_an_actor_that_escalate_together_are_one_failure_of_it() -> None:
    go = anyio.Event()

    async def fail_together(_: Actor) -> None:
        await go.wait()
        raise ValueError("together")

    class Parent(Counter):
        supervision = Supervision(otherwise=Directive.ESCALATE)

        async def on_start(self) -> None:
            self.children = [self.context.spawn(Counter, name=name) for name in ("a", "b")]

    parents: list[Parent] = []

    def make() -> Parent:
        parents.append(Parent())
        return parents[-1]

    async with Runtime(supervision=AT_ONCE) as runtime:
        runtime.spawn(make, name="parent")
        await settle()
        for child in parents[0].children:
            await child.tell(Run(fail_together))
        await settle()
        go.set()
        await settle()

        assert len(parents) == 2
        assert len(runtime._root._log._times) == 1
