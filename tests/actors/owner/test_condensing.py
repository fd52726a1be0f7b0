"""Condensation beside the loop: messages keep coming while a condenser works."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

from tests.actors.conversations.worlds import HeldAgent, log_of, until_passivated, verified
from turnkeeper.actors import (
    Agent,
    Conversation,
    Conversations,
    Event,
    LoggedEvent,
    MemoryJournal,
    MemoryStore,
    ModelRequest,
    ModelResponse,
    Proposal,
    RollingCondenser,
    ScriptedModel,
    SummarizingCondenser,
    ToolAgent,
    ToolCall,
    TurnContext,
    View,
)
from turnkeeper.actors.core.condensation import Condenser, Need
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.errors import InvalidInput
from turnkeeper.actors.events import (
    AgentMessageEvent,
    CondensationEvent,
    CondensationRequestEvent,
    ConversationErrorEvent,
    ObservationEvent,
    UserMessageEvent,
    decode_event,
)
from turnkeeper.actors.models.base import ContextOverflow

pytestmark = pytest.mark.anyio


async def events_of(journal: MemoryJournal, conversation_id: str) -> list[Event]:
    records = await journal.read(conversation_id, limit=100_000)
    return [decode_event(record.payload) for record in records]


class LongAnswers:
    """A model whose answers alone are over its condenser's limit; the first one waits."""

    def __init__(self) -> None:
        self.asked = 0
        self.is_asked, self.may_answer = anyio.Event(), anyio.Event()

    async def respond(self, _: ModelRequest, __: object) -> ModelResponse:
        self.asked += 1
        self.is_asked.set()
        await self.may_answer.wait()
        return ModelResponse(f"answer {self.asked} {'x' * 4_000}")


class HeldBeforeItsStep:
    """An agent that is held before its only step, and then answers."""

    is_resumable = True

    def __init__(self) -> None:
        self.begun, self.may_begin_step = anyio.Event(), anyio.Event()

    async def run(self, turn: TurnContext) -> None:
        self.begun.set()
        await self.may_begin_step.wait()
        if not turn.has_answered:
            await turn.begin_step()
            await turn.say("answer")


async def reply_after_a_condensed_pause(
    answering: Agent, answer: Callable[[Conversation], Awaitable[None]], *, is_restarted: bool
) -> str:
    """Return the reply of a turn that is paused while `answer` writes an answer.

    A condensation forgets that answer. Then the turn is resumed, by the next process if
    `is_restarted`.
    """
    store = MemoryStore()
    condenser, limits = RollingCondenser(max_tokens=500), Limits(snapshot_events=2)

    def opened() -> Conversations:
        journal = MemoryJournal(store)
        return verified(answering, journal=journal, condenser=condenser, limits=limits)

    async def resumed(chat: Conversation) -> str:
        await chat.resume()
        return await (await chat.turn("A")).reply()

    async with opened() as conversations:
        chat = conversations["c"]
        await chat.send("A", message_id="A")
        await answer(chat)
        async for logged in chat.events():
            if logged.event.kind == "condensation":
                break
        assert [event.kind for event in await chat.view()] == ["user_message"]
        if not is_restarted:
            return await resumed(chat)
        await until_passivated(conversations, "c")  # its snapshot is written by then
    async with opened() as conversations:
        return await resumed(conversations["c"])


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_turn_whose_answer_a_condensation_has_forgotten_is_not_answered_again(
    is_restarted: bool,
) -> None:
    """A pause held the turn's end; without the answer in the view, the model was asked anew."""
    model = LongAnswers()

    async def answer(chat: Conversation) -> None:
        await model.is_asked.wait()
        await chat.pause()
        model.may_answer.set()

    reply = await reply_after_a_condensed_pause(ToolAgent(model), answer, is_restarted=is_restarted)

    assert reply.startswith("answer 1 ")
    assert model.asked == 1


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_forgotten_answer_by_hand_is_not_taken_for_that_of_a_turn_that_was_held(
    is_restarted: bool,
) -> None:
    """After a restart, the turn ended without an answer."""
    held = HeldBeforeItsStep()

    async def answer(chat: Conversation) -> None:
        await held.begun.wait()
        await chat.pause()
        held.may_begin_step.set()
        await chat.append(AgentMessageEvent(content="x" * 4_000))

    reply = await reply_after_a_condensed_pause(held, answer, is_restarted=is_restarted)

    assert reply == "answer"


async def test_a_long_conversation_is_condensed_and_its_view_is_that_of_its_log() -> None:
    journal = MemoryJournal()
    condenser = RollingCondenser(max_size=12, keep_first=2)
    async with verified(
        HeldAgent(), journal=journal, condenser=condenser, system_prompt="Be kind."
    ) as conversations:
        chat = conversations["c"]
        for n in range(40):
            await (await chat.send(f"tool {n}")).reply()

        view = await chat.view()
        events = await events_of(journal, "c")
        assert sum(isinstance(event, CondensationEvent) for event in events) > 5
        assert len(view) < 20
        assert view == View.from_events(events)
        assert view[0].kind == "system_prompt"


class NewestOnly:
    """Summarises all but the newest two events, its own summary among them."""

    def __init__(self, summarize: Callable[[str], Awaitable[str]]) -> None:
        self.summarize = summarize

    def need(self, view: View) -> Need | None:
        return "soft" if len(view) > 3 else None

    async def propose(self, view: View, need: Need) -> Proposal | None:
        forgotten = [event.id for event in view[1:-2]]
        return Proposal(tuple(forgotten), await self.summarize(""))


@pytest.mark.parametrize("is_hard", [True, False])
async def test_a_condenser_that_cannot_meet_its_limit_rests_until_the_view_changes(
    is_hard: bool,
) -> None:
    """As beside a long system prompt. A summary of its own summary was asked for without end."""
    asked: list[str] = []

    async def summarize(history: str) -> str:
        asked.append(history)
        if len(asked) > 50:
            await anyio.sleep_forever()
        return "They said hello to each other."

    journal = MemoryJournal()
    limit = RollingCondenser(max_tokens=20)
    condenser: Condenser = NewestOnly(summarize)
    if is_hard:
        condenser = SummarizingCondenser(summarize, limit)
    async with Conversations(
        HeldAgent(), journal=journal, condenser=condenser, system_prompt="Be kind. " * 20
    ) as conversations:
        for n in range(5):
            await (await conversations["c"].send(f"hello {n}")).reply()
        await anyio.wait_all_tasks_blocked()
        events = await events_of(journal, "c")

    # Each commit changes the view, so how often depends on the order of the tasks.
    assert 0 < len(asked) < 50
    assert sum(isinstance(event, CondensationEvent) for event in events) <= len(asked)


async def test_a_request_is_answered_although_a_summary_gets_no_shorter() -> None:
    """It was refused, so that the request stayed open, and each step waited for its answer."""

    async def summarize(_: str) -> str:
        return "They said hello."

    condenser = SummarizingCondenser(summarize)
    async with verified(HeldAgent(), journal=MemoryJournal(), condenser=condenser) as conversations:
        chat = conversations["c"]
        await (await chat.send("hello")).reply()
        for _ in range(2):
            await chat.append(CondensationRequestEvent())
            await anyio.wait_all_tasks_blocked()
            assert [event.kind for event in await chat.view()] == ["condensation_summary"]
            assert not (await chat.view()).unhandled_condensation_request


async def test_a_turn_that_waits_for_room_keeps_a_summary_that_takes_the_place_of_one_event() -> (
    None
):
    """The owner counted events alone, found no fewer, and made room without the summary."""
    asked: list[str] = []

    async def summarize(history: str) -> str:
        asked.append(history)
        return "They wrote a lot. " * (200 if len(asked) == 1 else 5)

    condenser = SummarizingCondenser(summarize, RollingCondenser(max_tokens=1_000, keep_first=0))
    seen: list[list[str]] = []

    class Looking:
        async def run(self, turn: TurnContext) -> None:
            view = await turn.begin_step()
            seen.append([event.kind for event in view])
            await turn.say("a")

    async with verified(Looking(), journal=MemoryJournal(), condenser=condenser) as conversations:
        chat = conversations["c"]
        for length in (3_900, 200, 2_000):
            await (await chat.send("h" * length)).reply()

    assert seen[1:] == [
        ["condensation_summary", "agent_message", "user_message"],
        ["condensation_summary", "user_message"],
    ]
    assert len(asked) == 2


async def test_a_turn_that_its_model_refused_gets_room_although_a_summary_gets_no_shorter() -> None:
    """The summary took its own place, and the model was sent as long a view as it had refused."""

    async def summarize(_: str) -> str:
        return "They said hello."

    shown: list[list[str]] = []

    def answer(request: ModelRequest) -> str:
        shown.append([event.kind for event in request.view])
        if len(shown) == 2:
            raise ContextOverflow("m", "too long")
        return "a"

    agent, condenser = ToolAgent(ScriptedModel(answer)), SummarizingCondenser(summarize)
    async with verified(agent, journal=MemoryJournal(), condenser=condenser) as conversations:
        chat = conversations["c"]
        await (await chat.send("hello")).reply()
        await chat.append(CondensationRequestEvent())
        await anyio.wait_all_tasks_blocked()
        assert await (await chat.send("now")).reply() == "a"

    assert shown[1:] == [["condensation_summary", "user_message"], ["user_message"]]


async def test_a_request_is_answered_by_a_condensation() -> None:
    journal = MemoryJournal()
    async with verified(
        HeldAgent(), journal=journal, condenser=RollingCondenser()
    ) as conversations:
        chat = conversations["c"]
        for n in range(10):
            await (await chat.send(str(n))).end()
        before = len(await chat.view())

        await chat.append(CondensationRequestEvent())
        async for logged in chat.events():
            if isinstance(logged.event, CondensationEvent):
                break

        assert len(await chat.view()) < before


class Summarizing:
    """Puts a summary in the place of the first events, once there is a request."""

    def need(self, view: View) -> Need | None:
        return "soft" if view.unhandled_condensation_request else None

    async def propose(self, view: View, need: Need) -> Proposal:
        return Proposal(tuple(event.id for event in view[:2]), "so far")


async def test_an_event_under_the_id_of_a_summary_is_refused() -> None:
    """It was taken, and from then on no condenser could forget either of them."""
    journal = MemoryJournal()
    async with verified(HeldAgent(), journal=journal, condenser=Summarizing()) as conversations:
        chat = conversations["c"]
        for n in range(4):
            await (await chat.send(str(n))).end()
        await chat.append(CondensationRequestEvent())
        async for logged in chat.events():
            if isinstance(logged.event, CondensationEvent):
                break
        summary = (await chat.view())[0]
        assert summary.kind == "condensation_summary"

        for append in (chat.append, lambda event: chat.append_all([event])):
            with pytest.raises(InvalidInput, match="is the id of a summary; nothing was written"):
                await append(UserMessageEvent(id=summary.id, content="mine"))


class SlowCondenser:
    """Proposes to forget what it was shown first, when the test lets it."""

    def __init__(self) -> None:
        self.shown: list[int] = []
        self.asked = anyio.Event()
        self.go_on = anyio.Event()

    def need(self, view: View) -> Need | None:
        return "soft" if len(view) >= 8 else None

    async def propose(self, view: View, need: Need) -> Proposal | None:
        self.shown.append(len(view))
        self.asked.set()
        await self.go_on.wait()
        return Proposal(tuple(event.id for event in view[2:6]), f"{need} summary")


async def test_messages_are_answered_while_a_condenser_works_and_its_proposal_still_holds() -> None:
    journal, condenser = MemoryJournal(), SlowCondenser()
    async with verified(HeldAgent(), journal=journal, condenser=condenser) as conversations:
        chat = conversations["c"]
        for n in range(4):
            await (await chat.send(str(n))).end()
        await condenser.asked.wait()

        assert await (await chat.send("meanwhile")).reply() == "a(meanwhile)"
        condenser.go_on.set()
        async for logged in chat.events():
            if isinstance(logged.event, CondensationEvent):
                break

        events = await events_of(journal, "c")
        view = await chat.view()
        assert view == View.from_events(events)
        assert [event.kind for event in view][:3] == [
            "user_message",
            "agent_message",
            "condensation_summary",
        ]
        assert "u:meanwhile" in await log_of(chat)


class BrokenCondenser(SlowCondenser):
    async def propose(self, view: View, need: Need) -> Proposal | None:
        self.shown.append(len(view))
        raise ConnectionError("no model")


async def test_a_condenser_that_raises_is_written_down_and_tried_again_later() -> None:
    journal, condenser = MemoryJournal(), BrokenCondenser()
    async with verified(HeldAgent(), journal=journal, condenser=condenser) as conversations:
        chat = conversations["c"]
        for n in range(6):
            await (await chat.send(str(n))).end()

        kinds = [event.kind for event in await events_of(journal, "c")]
        assert kinds.count("conversation_error") == len(condenser.shown)
        assert len(set(condenser.shown)) == len(condenser.shown)
        assert len(condenser.shown) >= 2


class GreedyCondenser(SlowCondenser):
    """Would tear a call from its result."""

    async def propose(self, view: View, need: Need) -> Proposal | None:
        self.shown.append(len(view))
        at = next(n for n, event in enumerate(view) if event.kind == "action")
        return Proposal((view[at].id,))


async def test_a_condenser_whose_need_is_none_of_the_three_is_written_down_and_not_asked() -> None:
    """Each commit condensed what could be forgotten, as if there were always a need."""

    class Wrong(SlowCondenser):
        def need(self, view: View) -> Need | None:
            return len(view) > 100  # type: ignore[return-value]

    journal, condenser = MemoryJournal(), Wrong()
    async with verified(HeldAgent(), journal=journal, condenser=condenser) as conversations:
        await (await conversations["c"].send("hello")).reply()
        await anyio.wait_all_tasks_blocked()
        events = await events_of(journal, "c")

    errors = [event for event in events if isinstance(event, ConversationErrorEvent)]
    assert errors[0].detail == 'its need is a bool; it is "soft", "hard" or None'
    assert not condenser.shown


async def test_a_proposal_that_would_tear_a_call_from_its_result_is_refused() -> None:
    journal, condenser = MemoryJournal(), GreedyCondenser()
    async with verified(HeldAgent(), journal=journal, condenser=condenser) as conversations:
        chat = conversations["c"]
        for n in range(4):
            await (await chat.send(f"tool {n}")).end()

        assert condenser.shown
        events = await events_of(journal, "c")
        assert not any(isinstance(event, CondensationEvent) for event in events)
        assert await chat.view() == View.from_events(events)


async def test_a_refused_proposal_is_told_once_for_each_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Changing(GreedyCondenser):
        async def propose(self, view: View, need: Need) -> Proposal | None:
            if len(self.shown) < 4:
                return await super().propose(view, need)
            self.shown.append(len(view))
            return Proposal((view[0].id, view[-1].id), "all that was said")

    journal, condenser = MemoryJournal(), Changing()
    async with verified(HeldAgent(), journal=journal, condenser=condenser) as conversations:
        for n in range(8):
            await (await conversations["c"].send(f"tool {n}")).end()
        await anyio.wait_all_tasks_blocked()

    assert len(condenser.shown) > 6
    told = [record.message for record in caplog.records if "proposal" in record.message]
    assert len(told) == len(set(told)) < len(condenser.shown)
    for reason in ("a cut after the last event", "have gaps between them"):
        assert sum(reason in line for line in told) == 1
    assert all("tool 0" not in line and "all that was said" not in line for line in told)


async def test_a_proposal_that_the_conversation_has_outrun_is_not_told_as_a_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    journal, condenser = MemoryJournal(), SlowCondenser()
    async with verified(HeldAgent(), journal=journal, condenser=condenser) as conversations:
        chat = conversations["c"]
        for n in range(4):
            await (await chat.send(str(n))).end()
        await condenser.asked.wait()
        await chat.undo()
        condenser.go_on.set()
        await anyio.wait_all_tasks_blocked()
        assert "condensation" not in [event.kind for event in await chat.view()]

    assert "proposal" not in caplog.text


# --- while a turn runs ----------------------------------------------------------------------------


class BusyModel:
    """Asks for calls step after step, then answers; keeps what each request was shown."""

    def __init__(self, steps: int, *, calls: int = 3) -> None:
        self.steps = steps
        self.calls = calls
        self.shown: list[View] = []
        self.overflows = 0
        """The requests that it will refuse for their length."""

    async def respond(self, request: ModelRequest, write: object) -> ModelResponse:
        if self.overflows:
            self.overflows -= 1
            raise ContextOverflow("m", "too long")
        self.shown.append(request.view)
        done = sum(1 for view in self.shown if view[-1].kind != "user_message")
        if request.view[-1].kind == "user_message" and not self._is_question(request.view):
            return ModelResponse("earlier answer")
        if done < self.steps:
            return ModelResponse(calls=[ToolCall("look", {"n": done}) for _ in range(self.calls)])
        return ModelResponse("answer")

    def _is_question(self, view: View) -> bool:
        return "THE QUESTION" in contents(view)


def contents(view: View) -> list[str]:
    return [event.content for event in view if isinstance(event, UserMessageEvent)]


def looking(length: int) -> Callable[[int], Awaitable[str]]:
    async def look(n: int) -> str:
        """Look."""
        return str(n % 10) * length

    return look


async def test_every_request_of_a_long_turn_has_its_question() -> None:
    model = BusyModel(47)
    async with verified(
        ToolAgent(model, [looking(10)]),
        journal=MemoryJournal(),
        condenser=RollingCondenser(),
        system_prompt="Be kind.",
    ) as conversations:
        chat = conversations["c"]
        for n in range(3):
            await (await chat.send(f"earlier {n}")).end()
        model.shown.clear()
        end = await (await chat.send("THE QUESTION")).end()

        assert end.reply == "answer"
        assert len(model.shown) == 48
        assert all("THE QUESTION" in contents(view) for view in model.shown)
        assert all(view[0].kind == "system_prompt" for view in model.shown)
        assert len(model.shown[-1]) < 200, "it was never condensed"
        kinds = [event.kind for event in await events_of_chat(chat)]
        assert "condensation" in kinds


async def events_of_chat(chat: Conversation) -> list[Event]:
    return [logged.event async for logged in chat.events(live=False)]


async def test_a_response_with_more_calls_than_the_tail_keeps_its_question_and_its_results() -> (
    None
):
    model = BusyModel(1, calls=40)
    async with verified(
        ToolAgent(model, [looking(5)]),
        journal=MemoryJournal(),
        condenser=RollingCondenser(max_size=24, keep_first=1),
    ) as conversations:
        chat = conversations["c"]
        await (await chat.send("earlier")).end()
        end = await (await chat.send("THE QUESTION")).end()

        assert end.reply == "answer"
        shown = model.shown[-1]
        assert "THE QUESTION" in contents(shown)
        assert sum(event.kind == "observation" for event in shown) == 40


async def test_where_nothing_can_be_forgotten_results_are_shortened_and_the_log_keeps_them() -> (
    None
):
    model = BusyModel(1)
    async with verified(
        ToolAgent(model, [looking(20_000)]),
        journal=MemoryJournal(),
        condenser=RollingCondenser(max_tokens=8_000),
    ) as conversations:
        chat = conversations["c"]
        end = await (await chat.send("THE QUESTION")).end()

        assert end.reply == "answer"
        results = [event for event in model.shown[-1] if isinstance(event, ObservationEvent)]
        assert len(results) == 3
        assert sum(len(result.content) for result in results) < 32_000
        logged = [e for e in await events_of_chat(chat) if isinstance(e, ObservationEvent)]
        assert [len(event.content) for event in logged] == [20_000] * 3
        assert await chat.view() == View.from_events(await events_of_chat(chat))


async def test_a_model_that_refuses_for_length_gets_shortened_results() -> None:
    model = BusyModel(1)
    async with verified(
        ToolAgent(model, [looking(20_000)]),
        journal=MemoryJournal(),
        condenser=RollingCondenser(),
    ) as conversations:
        chat = conversations["c"]
        turn = await chat.send("THE QUESTION")
        async for item in turn:
            if isinstance(item, LoggedEvent) and item.event.kind == "action":
                model.overflows = 2
        assert (await turn.end()).reply == "answer"
        results = [event for event in model.shown[-1] if isinstance(event, ObservationEvent)]
        assert sum(len(result.content) for result in results) < 20_000


async def test_a_question_that_is_too_long_by_itself_fails_its_turn_and_the_next_goes_on() -> None:
    model = BusyModel(0)
    async with verified(
        ToolAgent(model), journal=MemoryJournal(), condenser=RollingCondenser(max_tokens=100)
    ) as conversations:
        chat = conversations["c"]
        end = await (await chat.send("long " * 200)).end()
        assert end.outcome == "failed"
        assert end.detail.startswith("ContextTooLong: ")
        assert contents(await chat.view()) == ["long " * 200], "its question stays"

        assert (await (await chat.send("short")).end()).reply == "earlier answer"


async def test_a_request_by_hand_that_nothing_answers_forgets_nothing() -> None:
    async with verified(
        HeldAgent(), journal=MemoryJournal(), condenser=RollingCondenser()
    ) as conversations:
        chat = conversations["c"]
        await (await chat.send("1")).end()
        await chat.append(CondensationRequestEvent())
        assert (await (await chat.send("2")).end()).outcome == "completed"
        assert contents(await chat.view()) == ["1", "2"]


class Summary(SlowCondenser):
    """Forgets three events for a summary, as often as the view has more than six."""

    def need(self, view: View) -> Need | None:
        return "soft" if len(view) > 6 else None

    async def propose(self, view: View, need: Need) -> Proposal | None:
        self.shown.append(len(view))
        if len(self.shown) == 1:
            self.asked.set()
            await self.go_on.wait()
        return Proposal(tuple(event.id for event in view[:4]), "summary")


async def test_a_condensation_counts_as_progress_however_many_events_came_meanwhile() -> None:
    journal, condenser = MemoryJournal(), Summary()
    async with verified(HeldAgent(), journal=journal, condenser=condenser) as conversations:
        chat = conversations["c"]
        for n in range(4):
            await (await chat.send(str(n))).end()
        await condenser.asked.wait()
        # One summary for four events: with these, the view will be as long as the one it was shown.
        came = condenser.shown[0] + 3 - len(await chat.view())
        await chat.append_all([AgentMessageEvent(content=str(n)) for n in range(came)])
        condenser.go_on.set()
        with anyio.fail_after(60):
            async for logged in chat.events():
                if isinstance(logged.event, CondensationEvent) and len(await chat.view()) <= 6:
                    break
        assert condenser.shown[1] == condenser.shown[0]


async def test_a_condenser_that_fails_a_hard_need_does_not_keep_its_turn_from_going_on() -> None:
    class Failing(RollingCondenser):
        async def propose(self, view: View, need: Need) -> Proposal | None:
            raise ConnectionError("no model")

    model = BusyModel(1)
    async with verified(
        ToolAgent(model, [looking(20_000)]),
        journal=MemoryJournal(),
        condenser=Failing(max_tokens=8_000),
    ) as conversations:
        chat = conversations["c"]
        assert (await (await chat.send("THE QUESTION")).end()).reply == "answer"
        kinds = [event.kind for event in await events_of_chat(chat)]
        assert "conversation_error" in kinds
