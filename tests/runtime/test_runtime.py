"""What an actor and its callers can count on, in the ordinary course of things."""

import gc
import traceback
from collections.abc import Sequence

import anyio
import pytest

from turnkeeper.runtime import (
    Actor,
    ActorFailed,
    Delivery,
    Message,
    NotDelivered,
    Refused,
    Runtime,
    Unavailable,
)
from turnkeeper.runtime.lowlevel import OneShot
from turnkeeper.runtime.testing import settle

from .actors import Add, Counter, Fail, Get, SyncCounter, block

pytestmark = pytest.mark.anyio


async def test_an_ask_is_answered_with_what_receive_returns() -> None:
    async with Runtime() as runtime:
        assert await runtime.spawn(Counter, name="counter").ask(Get()) == 0


async def test_tells_are_handled_one_at_a_time_in_the_order_they_were_sent() -> None:
    log: list[object] = []
    async with Runtime() as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")
        for number in range(3_000):
            await ref.tell(Add(number))
        await ref.ask(Get())
    assert log == [Add(number) for number in range(3_000)]


@pytest.mark.parametrize("kind", [Counter, SyncCounter])
async def test_plain_and_async_handlers_are_alike_to_their_callers(kind: type[Actor]) -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(kind, name="counter")
        assert await ref.ask(Get()) == 0
        await ref.tell(Add())
        assert await ref.ask(Get()) == 1
        with pytest.raises(ActorFailed) as failed:
            await ref.ask(Fail(KeyError("why")))
        assert isinstance(failed.value.__cause__, KeyError)
        assert await ref.ask(Get()) == 0, "it was restarted"


async def test_an_error_of_the_five_kinds_reaches_the_asker_as_it_is() -> None:
    error = Unavailable("the disk is gone")
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        with pytest.raises(Unavailable) as caught:
            await ref.ask(Fail(error))
    assert caught.value is error


@pytest.mark.parametrize("kind", [Counter, SyncCounter])
async def test_refused_is_an_answer_and_not_a_failure(kind: type[Actor]) -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(kind, name="counter")
        await ref.tell(Add())
        with pytest.raises(Refused, match="not like that"):
            await ref.ask(Fail(Refused("not like that")))
        assert await ref.ask(Get()) == 1, "it was not restarted"


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("waits_for", ["the loop", "a one-shot"])
async def test_refused_is_an_answer_from_a_handler_that_has_waited_too(
    waits_for: str, *, resident: bool
) -> None:
    opened: OneShot[None] = OneShot()

    class Waiting(Counter):
        async def receive(self, message: object) -> object:
            if isinstance(message, Fail) and waits_for == "the loop":
                await settle()
            elif isinstance(message, Fail):
                await self.context.wait_for(opened)
            return await super().receive(message)

    async with Runtime() as runtime:
        ref = runtime.spawn(Waiting, name="counter", resident=resident)
        await ref.tell(Add())
        await ref.tell(Fail(Refused("not like that")))
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(Refused, match="not like that"):
                    await ref.ask(Fail(Refused("not like that")))

            tasks.start_soon(ask)
            await settle()
            opened.set(None)
        assert await ref.ask(Get()) == 1, "it was not restarted"


class Refusing(Actor):
    def receive(self, message: object) -> object:
        del message
        raise Refused("not like that")


class RefusingLater(Actor):
    async def receive(self, message: object) -> object:
        del message
        raise Refused("not like that")


@pytest.mark.parametrize("kind", [Refusing, RefusingLater])
async def test_refusals_leave_nothing_to_the_garbage_collector(kind: type[Actor]) -> None:
    """The error held the frames that it had passed, one of these the ask, and the ask the error."""
    asks = 20

    async def ask_each() -> int:
        gc.collect()
        for _ in range(asks):
            try:
                await ref.ask(Get())
            except Refused as refusal:
                frames = traceback.extract_tb(refusal.__traceback__)
                assert frames[-1].line == 'raise Refused("not like that")'
        return gc.collect()

    async with Runtime() as runtime:
        ref = runtime.spawn(kind, name="refusing")
        await ask_each()
        gc.disable()
        try:
            assert await ask_each() < asks
        finally:
            gc.enable()


class Batching(Actor):
    batch_max = 3

    def __init__(self) -> None:
        self.batches: list[list[object]] = []
        self.kept: list[Delivery] = []

    async def receive_batch(self, deliveries: object) -> None:
        assert isinstance(deliveries, Sequence)
        self.batches.append([each.message for each in deliveries])
        for each in deliveries:
            match each.message:
                case "keep":
                    self.kept.append(each)
                case "release":
                    for kept in self.kept:
                        kept.reply("late")
                    each.reply(len(self.kept))
                    self.kept.clear()
                case "drop":
                    pass
                case "fail":
                    continue
                case "own error":
                    each.fail(Unavailable("mine"))
                case message:
                    each.reply(message)
        if "fail" in self.batches[-1]:
            raise ValueError("the batch failed")


class Ask(str, Message[object]):
    __slots__ = ()


async def test_a_batch_takes_what_waits_but_no_more_than_its_bound() -> None:
    actor = Batching()
    async with Runtime() as runtime:
        ref = runtime.spawn(lambda: actor, name="batching")
        async with anyio.create_task_group() as tasks:
            for number in range(7):
                tasks.start_soon(ref.tell, number)
            await settle()
    assert {each for batch in actor.batches for each in batch} == set(range(7))
    assert max(map(len, actor.batches)) == 3


async def test_a_reply_may_be_given_after_the_handler_has_returned() -> None:
    answers: list[object] = []
    async with Runtime() as runtime:
        ref = runtime.spawn(Batching, name="batching")

        async def ask() -> None:
            answers.append(await ref.ask(Ask("keep")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await settle()
            assert answers == []

            assert await ref.ask(Ask("release")) == 1

    assert answers == ["late"]


async def test_a_deferred_reply_that_is_dropped_fails_its_asker() -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(Batching, name="batching")
        with pytest.raises(ActorFailed, match="without an answer"):
            await ref.ask(Ask("drop"))


async def test_a_batch_that_raises_fails_what_it_left_unanswered_and_no_more() -> None:
    outcomes: dict[str, object] = {}
    async with Runtime() as runtime:
        ref = runtime.spawn(Batching, name="batching")
        await ref.ask(Ask("warm"))

        async def ask(text: str) -> None:
            try:
                outcomes[text] = await ref.ask(Ask(text))
            except Exception as error:  # noqa: BLE001 - looked at below
                outcomes[text] = error

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, "own error")
            tasks.start_soon(ask, "fail")
            tasks.start_soon(ask, "drop")
        await ref.ask(Ask("again"))

    assert isinstance(outcomes["own error"], Unavailable)
    assert isinstance(outcomes["fail"], ActorFailed)
    assert isinstance(outcomes["drop"], ActorFailed)


async def test_an_effect_talks_back_and_does_not_hold_its_actor_up() -> None:
    gate = anyio.Event()
    log: list[object] = []

    class Starter(Counter):
        async def receive(self, message: object) -> object:
            if message == "start":

                async def run() -> None:
                    await gate.wait()
                    await self.context.ref.tell(Add(5))

                self.context.start_effect(run, name="adds later")
                return None
            return await super().receive(message)

    async with Runtime() as runtime:
        ref = runtime.spawn(lambda: Starter(log), name="starter")
        await ref.tell("start")
        assert await ref.ask(Get()) == 0
        gate.set()
        await settle()
        assert await ref.ask(Get()) == 5


async def test_leaving_the_runtime_handles_what_is_queued_first() -> None:
    log: list[object] = []
    async with Runtime() as runtime:
        ref = runtime.spawn(lambda: Counter(log), name="counter")
        for number in range(500):
            await ref.tell(Add(number))
    assert len(log) == 500
    assert runtime.left_undone == ()


async def test_a_ref_says_so_when_the_runtime_is_gone() -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
    with pytest.raises(NotDelivered) as caught:
        await ref.ask(Get())
    assert caught.value.message == Get()
    await ref.tell(Add())
    assert runtime.dead_letters.count == 1


async def test_a_region_activates_on_first_message_and_once_per_key() -> None:
    made: list[str] = []

    def make(key: str) -> Counter:
        made.append(key)
        return Counter()

    async with Runtime() as runtime:
        region = runtime.region("counters", make)
        assert made == []
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(region["a"].tell, Add())
                tasks.start_soon(region["b"].tell, Add())
        assert await region["a"].ask(Get()) == 100
        assert await region["b"].ask(Get()) == 100
    assert sorted(made) == ["a", "b"]


async def test_an_ask_whose_actor_stops_first_gets_its_message_back() -> None:
    async with Runtime() as runtime:
        ref = runtime.spawn(Counter, name="counter")
        gate = await block(ref)
        caught: list[NotDelivered] = []

        async def ask() -> None:
            with pytest.raises(NotDelivered) as failed:
                await ref.ask(Get())
            caught.append(failed.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await settle()
            tasks.start_soon(ref.stop)
            await settle()
            gate.set()

    assert caught[0].message == Get()
