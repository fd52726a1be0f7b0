"""Regions: one activation per key, passivation that loses nothing, failures counted per key."""

import gc
import random
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from turnkeeper.runtime import (
    Actor,
    ActorFailed,
    Backoff,
    DeadLetter,
    Directive,
    Failure,
    MailboxSettings,
    Message,
    NotDelivered,
    OwnershipLost,
    RegionOverflow,
    Runtime,
    Supervision,
    Terminated,
    TooManyRestarts,
    Unavailable,
    add_actor,
)
from turnkeeper.runtime._incarnation import Incarnation
from turnkeeper.runtime._region import ORDERED_AT_ONCE, Region
from turnkeeper.runtime.testing import Probe, VirtualClock, settle

from .actors import Add, Block, Counter, Fail, Get, Run, block

pytestmark = pytest.mark.anyio

NOW = Backoff(first_s=0.0)


def counters(_: str) -> Counter:
    return Counter()


async def test_a_stampede_activates_its_actor_once() -> None:
    made: list[str] = []

    class Slow(Counter):
        async def on_start(self) -> None:
            made.append(self.context.key)
            await anyio.lowlevel.checkpoint()

    async with Runtime() as runtime:
        region = runtime.region("slow", lambda _: Slow())
        async with anyio.create_task_group() as tasks:
            for _ in range(200):
                tasks.start_soon(region["key"].tell, Add())
        assert await region["key"].ask(Get()) == 200
    assert made == ["key"]


async def test_known_keys_cost_nothing_until_their_first_message() -> None:
    async with Runtime() as runtime:
        region = runtime.region("counters", counters)
        refs = [region[str(number)] for number in range(1_000)]
        assert list(region.active) == []
        await refs[7].tell(Add())
        assert list(region.active) == ["7"]


async def test_idle_actors_are_passivated_after_their_time_and_come_back() -> None:
    clock = VirtualClock()
    log: list[str] = []

    class Logged(Counter):
        async def on_start(self) -> None:
            log.append(f"+{self.context.key}")

        async def on_stop(self) -> None:
            log.append(f"-{self.context.key}")

    async with Runtime(ports=clock.ports()) as runtime:
        region = runtime.region("logged", lambda _: Logged(), idle_s=60.0)
        ref = region["a"]
        await ref.tell(Add())
        await clock.advance(40.0)
        await region["b"].tell(Add())
        await clock.advance(1.0)
        assert await ref.ask(Get()) == 1, "which is a use of it"
        await clock.advance(58.0)
        assert list(region.active) == ["a", "b"]
        await clock.advance(3.0)
        assert list(region.active) == []
        assert await ref.ask(Get()) == 0, "a new incarnation, by the same ref"
    assert log == ["+a", "+b", "-b", "-a", "+a", "-a"]


async def test_many_that_are_idle_at_once_go_without_stopping_the_loop() -> None:
    """Also not by their number squared: the first key of a dict is behind all deleted ones."""
    clock = VirtualClock()
    keys = [str(number) for number in range(2 * ORDERED_AT_ONCE + 1)]
    ordered: list[int] = []

    async with Runtime(ports=clock.ports()) as runtime:
        region = runtime.region("counters", counters, idle_s=60.0)
        for key in keys:
            await region[key].tell(Add())
        await settle()
        assert isinstance(region._idle, OrderedDict)
        sweep = region._sweep

        def sweep_and_count() -> None:
            before = len(region._idle)
            sweep()
            ordered.append(before - len(region._idle))

        region._sweep = sweep_and_count  # type: ignore[method-assign]
        await clock.advance(61.0)

        assert list(region.active) == []
    # The first alarm was armed before, with the sweep itself.
    assert ordered == [ORDERED_AT_ONCE, 1]


async def test_many_actors_are_stopped_without_stopping_the_loop() -> None:
    active: list[int] = []

    async def watch(region: Region[Any]) -> None:
        while True:
            active.append(len(region.active))
            await anyio.lowlevel.checkpoint()

    async with Runtime() as runtime, anyio.create_task_group() as group:
        region = runtime.region("counters", counters)
        for number in range(4 * ORDERED_AT_ONCE):
            await region[str(number)].tell(Add())
        await settle()
        active.append(len(region.active))
        group.start_soon(watch, region)
        await region.stop()
        active.append(len(region.active))
        group.cancel_scope.cancel()

    assert active[-1] == 0
    # trio runs the tasks of a pass in any order: two parts may come between two looks.
    assert max(before - after for before, after in pairwise(active)) <= 2 * ORDERED_AT_ONCE


async def test_past_active_max_the_one_that_is_idle_longest_goes() -> None:
    async with Runtime() as runtime:
        region = runtime.region("counters", counters, active_max=2)
        for key in ("a", "b"):
            await region[key].ask(Get())
        await region["a"].ask(Get())
        await region["c"].ask(Get())
        await settle()
        assert region.active == ("a", "c")


async def test_when_all_are_busy_active_max_is_exceeded_and_reported_but_never_waited_for() -> None:
    async with Runtime() as runtime:
        region = runtime.region("counters", counters, active_max=1)
        gate = await block(region["busy"])
        with runtime.events.subscribe(RegionOverflow) as overflows:
            assert await region["other"].ask(Get()) == 0
            overflow = await anext(overflows)
        assert (overflow.active, overflow.active_max) == (2, 1)
        gate.set()
        await settle()
        assert len(region.active) == 1, "and it shrinks again"


@pytest.mark.parametrize("busy_with", ["effect", "deferred reply", "timer", "child"])
async def test_an_actor_that_has_something_going_on_is_not_idle(busy_with: str) -> None:
    clock = VirtualClock()
    gate = anyio.Event()
    kept: list[Any] = []

    class Busy(Counter):
        async def receive(self, message: object) -> object:
            if message == "end":
                for delivery in kept:
                    delivery.reply(None)
                self.context.timers.cancel("timer")
                return None
            if isinstance(message, Start):
                if busy_with == "deferred reply":
                    kept.append(self.context.defer())
                elif busy_with == "timer":
                    self.context.timers.once(1_000.0, "end", key="timer")
                elif busy_with == "child":
                    kept_child.append(self.context.spawn(Counter, name="child"))
                else:
                    self.context.start_effect(gate.wait, name="waits")
            return None

    kept_child: list[Any] = []
    async with Runtime(ports=clock.ports()) as runtime:
        region = runtime.region("busy", lambda _: Busy(), idle_s=10.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(region["a"].ask, Start())
            await clock.advance(100.0)
            assert list(region.active) == ["a"]
            assert await region.passivate("a") is False
            gate.set()
            for child in kept_child:
                await child.stop()
            if busy_with in ("deferred reply", "timer"):
                await region["a"].tell("end")
            await clock.advance(11.0)
            assert list(region.active) == []


async def test_an_actor_whose_deferred_asker_has_left_is_idle_once_it_drops_the_answer() -> None:
    clock = VirtualClock()
    kept: list[Any] = []

    class Deferring(Counter):
        async def receive(self, message: object) -> object:
            kept.append(self.context.defer())
            return None

    async with Runtime(ports=clock.ports()) as runtime:
        region = runtime.region("busy", lambda _: Deferring(), idle_s=10.0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(region["a"].ask, Start())
            await settle()
            tasks.cancel_scope.cancel()
        kept.clear()
        await settle()
        await clock.advance(11.0)
        assert list(region.active) == []


async def test_what_has_ended_leaves_nothing_in_its_runtime() -> None:
    def make_class(number: int) -> type[Actor]:
        class Unstartable(Counter):
            async def on_start(self) -> None:
                raise ValueError(f"number {number}")

        return Unstartable

    async def watch(actor: Actor) -> object:
        watched = runtime.spawn(Counter, name="watched")
        actor.context.watch(watched)
        assert actor.context._life.watches
        await watched.stop()
        return actor.context._life.watches

    stop = Supervision(otherwise=Directive.STOP)
    async with Runtime(supervision=stop) as runtime:
        watcher = runtime.spawn(Counter, name="watcher")
        for number in range(20):
            await runtime.spawn(make_class(number), name="short").tell(Add())
            assert await watcher.ask(Run(watch)) == {}
            await settle()
        gc.collect()
        assert len(runtime.dead_letters.count_by_reason) == 1
        assert len(runtime.tree().handling_times) < 5, "and of a class that is gone"


async def test_each_sender_that_is_refused_has_an_error_of_its_own() -> None:
    async with Runtime() as runtime:
        once = Supervision(restarts_max=0)
        region = runtime.region("keyed", lambda _: Counter(), supervision=once)
        with pytest.raises(ActorFailed):
            await region["a"].ask(Fail(ValueError()))
        await settle()
        lengths: list[int] = []
        for _ in range(3):
            with pytest.raises(TooManyRestarts) as caught:
                await region["a"].ask(Get())
            assert isinstance(caught.value.__cause__, ValueError)
            lengths.append(len(caught.traceback))
        assert len(set(lengths)) == 1, "no one sees the traceback of another"


class Start(Message[None]):
    pass


@pytest.mark.parametrize("error", [Unavailable("it is away"), ValueError("it is away")])
async def test_a_failed_activation_is_heard_by_its_askers_and_its_tells_are_dead_letters(
    error: Exception,
) -> None:
    class Unstartable(Counter):
        async def on_start(self) -> None:
            await anyio.lowlevel.checkpoint()
            raise error

    heard: list[BaseException] = []
    async with Runtime() as runtime:
        region = runtime.region("counters", lambda _: Unstartable())

        async def ask() -> None:
            is_a_kind = isinstance(error, Unavailable)
            with pytest.raises(Unavailable if is_a_kind else NotDelivered) as caught:
                await region["a"].ask(Get())
            assert (caught.value if is_a_kind else caught.value.__cause__) is error
            heard.append(caught.value)

        with runtime.events.subscribe(DeadLetter) as letters:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                tasks.start_soon(ask)
                tasks.start_soon(region["a"].tell, Add(5))
            assert (await anext(letters)).message == Add(5)
    assert len(heard) == 2


async def test_a_key_that_fails_too_often_is_refused_for_a_while_and_the_others_never_notice() -> (
    None
):
    clock = VirtualClock()
    supervision = Supervision(backoff=NOW, restarts_max=2, window_s=30.0)
    notices: Probe[Terminated] = Probe()
    async with Runtime(ports=clock.ports()) as runtime:
        region = runtime.region("counters", counters, supervision=supervision, refuse_s=60.0)
        region["bad"].watch(runtime.spawn(lambda: notices, name="watcher"))
        await region["good"].tell(Add(3))
        for _ in range(3):
            with pytest.raises(ActorFailed):
                await region["bad"].ask(Fail(ValueError()))
        await settle()

        with pytest.raises(TooManyRestarts) as refused:
            await region["bad"].ask(Get())
        assert isinstance(refused.value, Unavailable)
        await region["bad"].tell(Add())
        assert runtime.dead_letters.count == 1
        assert await region["good"].ask(Get()) == 3

        await clock.advance(61.0)
        assert await region["bad"].ask(Get()) == 0, "after a while it may try again"
        assert len(notices.received) == 1


async def test_a_rule_may_stop_a_key_whose_mail_is_handed_back() -> None:
    lost = OwnershipLost("a newer owner is there")
    supervision = Supervision(rules=((OwnershipLost, Directive.STOP),))
    async with Runtime() as runtime:
        region = runtime.region("counters", counters, supervision=supervision)
        gate = await block(region["a"])
        heard: list[BaseException] = []

        async def ask(message: Message[Any], kind: type[BaseException]) -> None:
            with pytest.raises(kind) as caught:
                await region["a"].ask(message)
            heard.append(caught.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, Fail(lost), OwnershipLost)
            await settle()
            tasks.start_soon(ask, Get(), NotDelivered)
            await settle()
            gate.set()
        # Which asker is woken first is not promised.
        assert lost in heard
        assert len(heard) == 2
        assert list(region.active) == []


async def test_mail_that_comes_right_after_the_claim_keeps_the_actor_as_it_is() -> None:
    async with Runtime() as runtime:
        region = runtime.region("counters", counters)
        await region["a"].tell(Add(3))
        await settle()

        region._passivate(region._cells["a"])
        await region["a"].tell(Add(1))

        assert await region["a"].ask(Get()) == 4, "it was not stopped and started in between"


async def test_an_overflow_is_reported_when_it_begins_and_each_time_it_doubles() -> None:
    async with Runtime() as runtime:
        region = runtime.region("counters", counters, active_max=1)
        with runtime.events.subscribe(RegionOverflow) as overflows:
            gates = [await block(region[str(number)]) for number in range(17)]
            assert [(await anext(overflows)).active for _ in range(5)] == [2, 3, 5, 9, 17]
        for gate in gates:
            gate.set()


async def test_the_watchers_of_all_keys_hear_of_the_end_of_their_region() -> None:
    """No actor of a key comes back, whether it was active or not when the region stopped."""
    notices: Probe[Terminated] = Probe()
    async with Runtime() as runtime:
        watcher = runtime.spawn(lambda: notices, name="watcher")
        region = runtime.region("counters", counters)
        await region["active"].ask(Get())
        region["idle"].watch(watcher)
        region["active"].watch(watcher)
        region["unwatched"].watch(watcher)
        region["unwatched"].unwatch(watcher)

        await region.stop()
        region["later"].watch(watcher)
        await settle()

        told = sorted(notice.ref.name for notice in notices.received)
        assert told == ["counters/active", "counters/idle", "counters/later"]
        assert region._watchers == {}


async def test_an_actor_that_is_active_anew_before_its_passivation_is_told_has_not_gone() -> None:
    async with Runtime() as runtime:
        region = runtime.region("counters", counters)
        await region["a"].ask(Get())

        async def send_once_it_is_gone() -> None:
            while "a" in region.active:
                await anyio.lowlevel.checkpoint()
            region["a"].tell_nowait(Add())

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(send_once_it_is_gone)
            await anyio.lowlevel.checkpoint()

            has_gone = await region.passivate("a")

            assert has_gone is ("a" not in region.active)
            tasks.cancel_scope.cancel()


async def test_a_watch_on_a_key_outlives_passivation() -> None:
    notices: Probe[Terminated] = Probe()
    async with Runtime() as runtime:
        region = runtime.region("counters", counters)
        watcher = runtime.spawn(lambda: notices, name="watcher")
        region["a"].watch(watcher)
        await region["a"].ask(Get())
        assert await region.passivate("a") is True
        await settle()
        assert notices.received == []
        await region["a"].ask(Get())
        await region["a"].stop()
        (notice,) = await notices.wait_for(1)
        assert notice.ref == region["a"]


async def test_refs_to_the_same_key_are_equal_and_name_it() -> None:
    async with Runtime() as runtime:
        region = runtime.region("counters", counters)
        before = region["a"]
        await before.ask(Get())
        assert before == region["a"]
        assert hash(before) == hash(region["a"])
        assert before != region["b"]
        assert before.name == "counters/a"


async def test_a_handler_runs_in_the_context_of_its_runtime_not_of_its_first_sender() -> None:
    from contextvars import ContextVar

    variable: ContextVar[str] = ContextVar("variable", default="unset")
    variable.set("as the runtime was entered")

    async def look(_: Actor) -> str:
        return variable.get()

    async with Runtime() as runtime:
        region = runtime.region("counters", counters)
        variable.set("as the sender was")
        assert await region["a"].ask(Run(look)) == "as the runtime was entered"


async def test_variables_that_a_handler_of_a_region_sets_stay_while_the_actor_rests() -> None:
    """A context is only dropped at rest if it can be made again."""
    from contextvars import ContextVar

    own: ContextVar[str] = ContextVar("own", default="unset")
    inherited: ContextVar[str] = ContextVar("inherited")
    inherited.set("of the runtime")

    async def set_own(_: Actor) -> None:
        own.set("by the first message")

    async def set_inherited(_: Actor) -> None:
        inherited.set("by the second message")

    nothing: ContextVar[None] = ContextVar("nothing")

    async def set_to_nothing(_: Actor) -> None:
        nothing.set(None)

    async def look_for_nothing(_: Actor) -> str | None:
        return nothing.get("unset")

    async def look(_: Actor) -> tuple[str, str]:
        return own.get(), inherited.get()

    async with Runtime() as runtime:
        region = runtime.region("counters", counters)
        assert await region["a"].ask(Run(look)) == ("unset", "of the runtime")
        await region["a"].ask(Run(set_own))
        await settle()
        assert await region["a"].ask(Run(look)) == ("by the first message", "of the runtime")
        await region["b"].ask(Run(set_inherited))
        await settle()
        assert await region["b"].ask(Run(look)) == ("unset", "by the second message")
        await region["nothing"].ask(Run(set_to_nothing))
        await settle()
        assert await region["nothing"].ask(Run(look_for_nothing)) is None
        assert await region["c"].ask(Run(look)) == ("unset", "of the runtime")


async def test_a_variable_that_was_set_to_what_it_was_can_be_reset_by_a_later_message() -> None:
    """The actor failed: the token's context was dropped, as its values were as before.

    Another actor, which would have taken the dropped one, keeps its own meanwhile.
    """
    from contextvars import ContextVar, Token

    inherited: ContextVar[str] = ContextVar("inherited")
    inherited.set("of the runtime")
    tokens: list[Token[str]] = []

    async def set_again(_: Actor) -> None:
        tokens.append(inherited.set(inherited.get()))

    async def reset(_: Actor) -> str:
        inherited.reset(tokens.pop())
        return inherited.get()

    async with Runtime() as runtime:
        region = runtime.region("counters", counters)
        await region["a"].ask(Run(set_again))
        await settle()
        gate = await block(region["b"])
        assert await region["a"].ask(Run(reset)) == "of the runtime"
        gate.set()


@pytest.mark.parametrize("name", ["a", "b"])
async def test_an_actor_that_wakes_in_a_dropped_context_is_known_as_the_one_that_runs(
    name: str,
) -> None:
    """The context was dropped by `a`, at rest."""

    async def look(_: Actor) -> object:
        return add_actor(None, "info", {})["actor"]

    async with Runtime() as runtime:
        region = runtime.region("counters", counters)
        await region["a"].ask(Get())
        await settle()
        assert region.spare_contexts
        assert await region[name].ask(Run(look)) == f"counters/{name}"


async def test_an_actor_drops_its_context_once_all_that_it_started_has_ended() -> None:
    gate = anyio.Event()
    lives: list[Incarnation] = []

    async def start(actor: Actor) -> None:
        lives.append(actor.context._life)
        actor.context.start_effect(gate.wait, name="waits")

    async with Runtime() as runtime:
        region = runtime.region("counters", counters)
        await region["a"].ask(Run(start))
        await settle()
        (life,) = lives
        assert life._context is not None

        gate.set()
        await settle()

        assert life._context is None


async def test_a_resident_region_keeps_a_task_for_each_active_key() -> None:
    async with Runtime() as runtime:
        region = runtime.region("counters", counters, resident=True)
        gates = [await block(region[key]) for key in "abc"]
        for gate in gates:
            gate.set()
        assert [await region[key].ask(Get()) for key in "abc"] == [0, 0, 0]
        assert await region.passivate("a") is True
        assert region.active == ("b", "c")


async def test_supervisors_find_the_failures_of_a_region_by_key() -> None:
    async with Runtime() as runtime:
        region = runtime.region("counters", counters)
        with runtime.events.subscribe(Failure) as failures:
            with pytest.raises(ActorFailed):
                await region["a"].ask(Fail(ValueError()))
            assert (await anext(failures)).actor == "counters/a"


class Ledger(Actor):
    """Writes down what it handled, in a book that outlives it."""

    def __init__(self, key: str, book: list[tuple[str, object]], draw: random.Random) -> None:
        self.key = key
        self.book = book
        self.draw = draw

    async def on_start(self) -> None:
        if self.draw.random() < 0.5:
            await anyio.lowlevel.checkpoint()

    async def on_stop(self) -> None:
        for _ in range(self.draw.randrange(4)):
            await anyio.lowlevel.checkpoint()

    async def receive(self, message: object) -> object:
        if self.draw.random() < 0.3:
            await anyio.lowlevel.checkpoint()
        self.book.append((self.key, message))
        return message


class Entry(tuple[int, int], Message[object]):
    __slots__ = ()


def ledgers(book: list[tuple[str, object]], draw: random.Random) -> Callable[[str], Ledger]:
    return lambda key: Ledger(key, book, draw)


@pytest.mark.parametrize("seed", range(100))
async def test_every_message_that_races_with_passivation_is_handled_once(seed: int) -> None:
    """Stress: senders, passivations on request and by size, all by seed; every message counts."""
    draw = random.Random(seed)
    book: list[tuple[str, object]] = []
    sent: list[tuple[str, object]] = []
    keys = "abcd"
    passivated = 0
    async with Runtime() as runtime:
        region = runtime.region(
            "ledgers",
            ledgers(book, draw),
            active_max=draw.choice([1, 2, 10]),
            mailbox=MailboxSettings(capacity=draw.choice([1, 3, 100])),
        )

        async def send(sender: int) -> None:
            refs = {key: region[key] for key in keys}
            for number in range(30):
                key = draw.choice(keys)
                entry = Entry((sender, number))
                sent.append((key, entry))
                if draw.random() < 0.5:
                    await refs[key].tell(entry)
                else:
                    assert await refs[key].ask(entry) == entry
                for _ in range(draw.randrange(5)):
                    await anyio.lowlevel.checkpoint()

        async def passivate() -> None:
            nonlocal passivated
            while len(sent) < 4 * 30:  # a few passivations on any schedule
                passivated += await region.passivate(draw.choice(keys))
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            for sender in range(4):
                tasks.start_soon(send, sender)
            tasks.start_soon(passivate)
        assert runtime.dead_letters.count == 0

    assert Tally(book) == Tally(sent)
    for key in keys:
        for sender in range(4):
            mine = [entry for each, entry in book if each == key and entry[0] == sender]  # type: ignore[index]
            assert mine == sorted(mine), "in the order of their sender"  # type: ignore[type-var]
    assert passivated > 0, "or it shows nothing"


@pytest.mark.parametrize("kind", ["group", "region"])
async def test_a_stop_whose_caller_is_cancelled_goes_on(kind: str) -> None:
    gate = anyio.Event()
    async with Runtime() as runtime:
        refs: list[Any]
        stop: Callable[[], Awaitable[None]]
        if kind == "region":
            region = runtime.region("home", counters)
            refs, stop = [region["first"], region["last"]], region.stop
        else:
            group = runtime.spawn_supervisor("home", Supervision())
            refs = [group.spawn(Counter, name=name) for name in ("first", "last")]
            stop = group.stop
        begun = anyio.Event()
        await refs[0].ask(Get())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refs[1].ask, Block(gate, begun))
            await begun.wait()
            with anyio.CancelScope() as scope:
                scope.cancel()
                await stop()
            assert scope.cancelled_caught
            gate.set()
        await settle()

        assert not runtime.tree().actors
        runtime.spawn(Counter, name="home")
