"""A turn of model and tools, killed at every step, and what is made of it afterwards.

A step is each boundary at which a process can die and leave something else behind: before and
after each write of the journal, as the model is asked, as a tool begins and as it ends. Killing is
cancelling everything that one `Conversations` runs, while the step hangs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from structlog.testing import capture_logs

from tests.actors.conversations.worlds import brief, log_of, verified
from turnkeeper.actors import (
    Agent,
    ConfirmationPolicy,
    Conversation,
    Journal,
    MemoryJournal,
    MemoryStore,
    ModelRequest,
    ModelResponse,
    OnOverlap,
    ScriptedModel,
    SQLiteJournal,
    TokenUsage,
    ToolAgent,
    ToolCall,
    ToolContext,
    TurnEnd,
    View,
    tool,
)
from turnkeeper.actors.errors import NotConfirmable
from turnkeeper.actors.events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    ObservationEvent,
    UserMessageEvent,
)
from turnkeeper.runtime import Runtime

pytestmark = pytest.mark.costly

Unfinished = Literal["end", "resume"]
Found = list[tuple[TurnEnd, Sequence[str]]]
RESULTS = (ObservationEvent, AgentErrorEvent)


class Death:
    """Comes at one step: everything that takes this or a later one hangs until it is cancelled."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.steps = 0
        self.has_come = anyio.Event()

    async def step(self) -> None:
        self.steps += 1
        if self.at is not None and self.steps >= self.at:
            self.has_come.set()
            await anyio.sleep_forever()


def mortal(journal: Journal, death: Death) -> Journal:
    """A journal that takes a step before and after each write."""
    append = journal.append

    async def append_in_steps(*args: Any, **kwargs: Any) -> Sequence[int]:  # noqa: ANN401 - passed on
        await death.step()
        seqs = await append(*args, **kwargs)
        await death.step()
        return seqs

    journal.append = append_in_steps  # type: ignore[method-assign]
    return journal


class World:
    """What there is outside of the process: it knows which effects there were."""

    def __init__(self, death: Death, *, asks: bool = False) -> None:
        self.death = death
        self.asks = asks
        """The user is asked about every call, and says yes."""
        self.effects: Counter[str] = Counter()

    def agent(self) -> Agent:
        async def charge(amount: int, context: ToolContext) -> str:
            await self.death.step()
            self.effects[context.tool_call_id] += 1
            await self.death.step()
            return f"charged {amount}"

        @tool(idempotent=True)
        async def look(context: ToolContext) -> str:
            await self.death.step()
            self.effects[context.tool_call_id] += 1
            await self.death.step()
            return "seen"

        async def reply(request: ModelRequest) -> ModelResponse:
            await self.death.step()
            return next_response(request.view)

        confirm: ConfirmationPolicy = "always" if self.asks else "never"
        return ToolAgent(ScriptedModel(reply), [charge, look], confirm=confirm)

    def effects_of(self, action: ActionEvent) -> int:
        """How often a call of the log had its effect."""
        return self.effects[action.tool_call_id]

    async def send(self, chat: Conversation) -> TurnEnd:
        """The user sends, answers when asked, and waits for the end of the turn."""
        turn = await chat.send("go", message_id="m")
        async for _, event in chat.events():
            if event.kind == "confirmation_requested" and turn.turn_id == event.turn_id:
                with suppress(NotConfirmable):  # he has, in an earlier life
                    await chat.confirm()
            elif event.kind == "turn_ended" and turn.turn_id == event.turn_id:
                break
        return await turn.end()


def newest_message(view: View) -> str:
    return [event.content for event in view if isinstance(event, UserMessageEvent)][-1]


def next_response(view: View) -> ModelResponse:
    """What the model says; it goes by nothing but the history that it is shown."""
    newest = newest_message(view)
    at = max(n for n, event in enumerate(view) if isinstance(event, UserMessageEvent))
    usage = TokenUsage(input_tokens=1)
    match sum(isinstance(event, RESULTS) for event in view[at:]):
        case 0:
            calls = [ToolCall("charge", {"amount": 5}), ToolCall("look")]
            return ModelResponse("Let me see.", calls, usage)
        case 2:
            return ModelResponse(calls=[ToolCall("look")], usage=usage)
        case _:
            return ModelResponse(f"a({newest})", usage=usage)


async def send_and_die(journal: Journal, world: World, unfinished: Unfinished) -> bool:
    """Have one chat message answered, as far as death lets it. Whether it came."""
    open_conversations = partial(
        verified, journal=mortal(journal, world.death), unfinished=unfinished
    )
    # What a killed owner says of it is no news here, and to print it takes as long as ten turns.
    with capture_logs(), anyio.CancelScope() as process:

        async def kill() -> None:
            await world.death.has_come.wait()
            process.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(kill)
            async with (
                # Whoever is killed is given no time to finish what it is at.
                Runtime(drain_s=0.0, stop_s=0.0) as runtime,
                open_conversations(world.agent(), runtime=runtime) as conversations,
            ):
                await world.send(conversations["c"])
            group.cancel_scope.cancel()
    return process.cancelled_caught


async def check(
    journal: Journal, world: World, unfinished: Unfinished
) -> tuple[TurnEnd, Sequence[str]]:
    """Open what is left, send the same again, and look at all that came of it."""
    world.death.at = None
    async with verified(world.agent(), journal=journal, unfinished=unfinished) as conversations:
        chat = conversations["c"]
        ended = await world.send(chat)
        await check_log(chat, world, unfinished)
        if not world.asks:
            assert await (await chat.send("on")).reply() == "a(on)"
        return ended, await log_of(chat)


async def check_log(chat: Conversation, world: World, unfinished: Unfinished) -> None:
    logged = [one async for one in chat.events(live=False)]
    events = [one.event for one in logged]
    assert [one.seq for one in logged] == list(range(1, len(logged) + 1))
    assert [e.content for e in events if isinstance(e, UserMessageEvent)] == ["go"]

    actions = [event for event in events if isinstance(event, ActionEvent)]
    results = [event for event in events if isinstance(event, RESULTS)]
    assert Counter(a.tool_call_id for a in actions) == Counter(r.tool_call_id for r in results)
    by_call = {result.tool_call_id: result for result in results}
    for action in actions:
        result, effects = by_call[action.tool_call_id], world.effects_of(action)
        if action.tool_name == "look" and unfinished == "resume":
            assert (result.content, effects >= 1) == ("seen", True)
        elif isinstance(result, ObservationEvent):
            assert effects == 1
        else:
            assert result.may_have_happened
            assert effects <= 1
    assert world.effects.total() == sum(map(world.effects_of, actions))

    # What each model call took is in the log with what it answered.
    state = await chat.at(None)
    answers = [event for event in events if isinstance(event, AgentMessageEvent)]
    responses = {action.llm_response_id for action in actions}
    said = [answer for answer in answers if not answer.interrupted]
    assert state.metrics.llm_call_count == len(responses) + len(said)
    if unfinished == "resume":
        assert [answer.content for answer in answers] == ["a(go)"]
        assert len(actions) == 3


DONE = ["u:go", "call", "call", "result", "result", "call", "result", "a:a(go)"]


async def sweep(unfinished: Unfinished, *, asks: bool = False) -> Found:
    """Kill at each step in turn, until there is none left to be killed at."""
    found: Found = []
    for at in range(1, 100):
        store, world = MemoryStore(), World(Death(at), asks=asks)
        if not await send_and_die(MemoryJournal(store), world, unfinished):
            return found
        found.append(await check(MemoryJournal(store), world, unfinished))
    raise AssertionError("there is no end to it")


async def test_a_turn_that_is_killed_at_any_step_is_resumed_to_its_end() -> None:
    found = await sweep("resume")

    assert len(found) > 20
    for ended, log in found:
        assert (ended.outcome, ended.reply) == ("completed", "a(go)")
        assert [one.replace("no result", "result") for one in log[:8]] == DONE


async def test_a_turn_that_is_killed_at_any_step_is_ended_where_it_stood() -> None:
    found = await sweep("end")

    assert len(found) > 20
    assert {ended.outcome for ended, _ in found} == {"completed", "interrupted"}
    for ended, log in found:
        mine = [one.replace("no result", "result") for one in log[: log.index("u:on")]]
        assert mine == DONE[: len(mine)]
        assert mine == DONE or ended.outcome == "interrupted"


@pytest.mark.parametrize("unfinished", ["end", "resume"])
async def test_a_turn_that_asks_its_user_is_killed_at_any_step(unfinished: Unfinished) -> None:
    found = await sweep(unfinished, asks=True)

    assert len(found) > 20
    assert ("interrupted" in {ended.outcome for ended, _ in found}) == (unfinished == "end")
    for _, log in found:
        mine = [one.replace("no result", "result") for one in log]
        assert mine == DONE[: len(mine)]


async def test_a_turn_that_is_killed_again_while_it_is_resumed_is_resumed_again() -> None:
    for at in range(1, 20, 2):
        for again in (2, 5, 8):
            store, world = MemoryStore(), World(Death(at))
            await send_and_die(MemoryJournal(store), world, "resume")
            world.death = Death(again)
            await send_and_die(MemoryJournal(store), world, "resume")
            ended, _ = await check(MemoryJournal(store), world, "resume")
            assert (ended.outcome, ended.reply) == ("completed", "a(go)")


@pytest.mark.parametrize("unfinished", ["end", "resume"])
async def test_so_it_is_with_a_journal_on_disk(unfinished: Unfinished, tmp_path: Path) -> None:
    for at in range(2, 20, 3):
        path, world = tmp_path / f"{at}.db", World(Death(at))
        assert await send_and_die(SQLiteJournal(path), world, unfinished)
        ended, _ = await check(SQLiteJournal(path), world, unfinished)
        assert ended.outcome == "completed" or unfinished == "end"


async def test_a_resumed_turn_does_not_count_its_model_calls_from_nothing() -> None:
    store, world = MemoryStore(), World(Death())
    calls = 0

    async def always(request: ModelRequest) -> ModelResponse:
        nonlocal calls
        calls += 1
        if calls == 3:
            world.death.at = world.death.steps + 1
            await world.death.step()
        return ModelResponse(calls=[ToolCall("look", {"n": calls})])

    @tool(idempotent=True)
    async def look(n: int) -> str:
        return f"seen {n}"

    def agent() -> ToolAgent:
        return ToolAgent(ScriptedModel(always), [look], max_iterations=5)

    world.agent = agent  # type: ignore[method-assign]  # the same end by another agent
    assert await send_and_die(MemoryJournal(store), world, "resume")
    world.death.at = None
    async with verified(
        agent(), journal=MemoryJournal(store), unfinished="resume"
    ) as conversations:
        ended = await (await conversations["c"].send("go", message_id="m")).end()

    assert ended.detail.startswith("TooManyIterations: no answer after 5 model calls")
    assert calls == 6  # one of them was killed before it had answered


@pytest.mark.parametrize("on_overlap", ["queue", "steer"])
@pytest.mark.parametrize("unfinished", ["end", "resume"])
async def test_a_message_that_was_accepted_during_a_model_call_is_answered_after_the_crash(
    unfinished: Unfinished, on_overlap: OnOverlap
) -> None:
    store, asked = MemoryStore(), anyio.Event()

    async def hang(_: ModelRequest) -> ModelResponse:
        asked.set()
        await anyio.sleep_forever()
        raise AssertionError

    with anyio.CancelScope() as process:
        async with verified(ToolAgent(ScriptedModel(hang)), journal=MemoryJournal(store)) as before:
            await before["c"].send("go")
            await asked.wait()
            await before["c"].send("and", message_id="m", on_overlap=on_overlap)
            process.cancel()

    agent = ToolAgent(ScriptedModel(lambda request: f"a({newest_message(request.view)})"))
    async with verified(agent, journal=MemoryJournal(store), unfinished=unfinished) as after:
        turn = await after["c"].send("and", message_id="m")
        assert turn.is_duplicate
        assert (await turn.end()).reply == "a(and)"
        log = await log_of(after["c"])
        assert log == [brief(event) for event in await after["c"].view()]
    assert (unfinished, on_overlap, log) in [
        ("end", on_overlap, ["u:go", "u:and", "a:a(and)"]),
        ("resume", "queue", ["u:go", "a:a(go)", "u:and", "a:a(and)"]),
        ("resume", "steer", ["u:go", "u:and", "a:a(and)"]),
    ]
