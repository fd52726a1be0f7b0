"""What `docs/turns.md` says beside its tables: what holds a turn, what comes late, settings."""

from __future__ import annotations

from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from tests.actors.conversations.turn_worlds import (
    USAGE,
    OnceAgent,
    StepAgent,
    brief,
    events_of,
    log_of,
    until,
)
from tests.actors.conversations.worlds import (
    HeldAgent,
    HeldJournal,
    until_passivated,
    verified,
)
from turnkeeper.actors import (
    AgentExecutionStatus,
    Conversation,
    ConversationConfig,
    ImageContent,
    MemoryJournal,
    OnOverlap,
    Proposal,
    ToolCall,
    Turn,
    TurnContext,
    View,
    agent,
)
from turnkeeper.actors.core.condensation import Need
from turnkeeper.actors.errors import (
    ConversationNotFound,
    InvalidInput,
    MessageIdConflict,
    NotConfirmable,
    QueueFull,
    StaleTurn,
    TurnInProgress,
    TurnNotCompleted,
    TurnSuspended,
)
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    CondensationRequestEvent,
    ObservationEvent,
    UserMessageEvent,
    UserRejectEvent,
)
from turnkeeper.actors.models.messages import to_llm_messages
from turnkeeper.actors.values.text import ERROR_LENGTH_MAX
from turnkeeper.runtime import Runtime, TurnkeeperError
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.anyio

S = AgentExecutionStatus
POLICIES: tuple[OnOverlap, ...] = ("queue", "interrupt", "steer", "rollback", "reject")


async def status_of(chat: Conversation) -> AgentExecutionStatus:
    return (await chat.at()).agent_execution_status


# --- what callers get ----------------------------------------------------------------------------


async def test_reply_gives_the_answer_or_says_how_the_turn_ended() -> None:
    steps = StepAgent()
    steps.hold("A writes")
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first = await chat.send("A")
        await steps.reached["A writes"].wait()
        second = await chat.send("B", on_overlap="rollback")

        assert await second.reply() == "B"
        with pytest.raises(TurnNotCompleted) as told:
            await first.reply()
        assert (told.value.outcome, told.value.reply) == ("rolled_back", "half")


@pytest.mark.parametrize("on_overlap", POLICIES)
async def test_in_a_paused_conversation_without_a_turn_messages_wait_under_every_policy(
    on_overlap: OnOverlap,
) -> None:
    async with verified(StepAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        assert await chat.pause()

        turns = [await chat.send(name, on_overlap=on_overlap) for name in ("B", "C")]

        assert [(turn.overlapped, turn.waits_for) for turn in turns] == [(None, "resume")] * 2
        assert await log_of(chat) == "started uA aA completed paused qB qC"
        assert await chat.resume()
        assert [await turn.reply() for turn in turns] == ["B", "C"]


async def test_a_pause_ends_though_messages_wait_behind_a_call_of_a_caller() -> None:
    async with verified(StepAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        await chat.pause()
        await chat.append(ActionEvent(tool_call_id="1", tool_name="look", llm_response_id="r"))
        turns = [await chat.send(name) for name in ("B", "C")]

        assert await chat.resume()

        assert not await chat.resume()
        assert await log_of(chat) == "started uA aA completed paused call qB qC resumed"
        await chat.append(ObservationEvent(tool_call_id="1", content="seen"))
        assert [await turn.reply() for turn in turns] == ["B", "C"]
        assert not await chat.rejections()


async def test_a_message_sent_again_has_the_seq_of_its_first_event_wherever_it_has_gone() -> None:
    """It has waited, joined a turn, waited again since that was rolled back, and had its own."""
    steps = StepAgent({"A": "calls"})
    steps.hold("A calls", "A thinks 1", "C thinks")
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await steps.reached["A calls"].wait()
        first = await chat.send("B", message_id="B", on_overlap="steer")
        again: list[Turn] = []

        async def send_again() -> None:
            again.append(await chat.send("B", message_id="B", on_overlap="interrupt"))

        await send_again()
        steps.held["A calls"].set()
        await steps.reached["A thinks 1"].wait()
        await send_again()
        await chat.send("C", on_overlap="rollback")
        await steps.reached["C thinks"].wait()
        await send_again()
        steps.release()
        assert await first.reply() == "B"
        await send_again()

        assert {turn.seq for turn in again} == {first.seq}
        assert all(turn.is_duplicate for turn in again)
        assert [await turn.reply() for turn in again] == ["B"] * 4


@pytest.mark.parametrize("on_overlap", ["queue", "steer", "interrupt", "rollback"])
async def test_a_message_sent_again_is_told_what_the_first_was(on_overlap: OnOverlap) -> None:
    """A client whose reply was lost still learns what its message did to the turn that ran."""
    steps = StepAgent()
    steps.hold("A thinks")
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await steps.reached["A thinks"].wait()
        first = await chat.send("B", message_id="B", on_overlap=on_overlap)
        assert first.overlapped == on_overlap

        now = await chat.send("B", message_id="B")
        steps.release()
        await first.end()
        then = await chat.send("B", message_id="B")

        assert now.is_duplicate
        assert then.is_duplicate
        assert [turn.overlapped for turn in (now, then)] == [on_overlap] * 2


async def test_a_message_in_place_of_another_is_told_the_same_when_sent_again() -> None:
    steps = StepAgent()
    steps.hold("A thinks", "B thinks")
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A", message_id="A")
        await steps.reached["A thinks"].wait()
        await chat.send("D", message_id="D", on_overlap="steer")
        turns: list[Turn] = []
        for _ in range(2):
            turns.append(await chat.send("E", message_id="E", replaces="D"))
            turns.append(await chat.send("B", message_id="B", replaces="A"))
        steps.release()

        assert [turn.overlapped for turn in turns] == ["steer", "rollback"] * 2
        assert [turn.is_duplicate for turn in turns] == [False, False, True, True]


async def test_a_message_that_waits_for_a_decision_is_told_so_when_sent_again() -> None:
    steps = StepAgent()
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        await chat.pause()
        first = await chat.send("B", message_id="B")
        await chat.resume()
        await first.end()

        again = await chat.send("B", message_id="B")

        assert (again.overlapped, again.waits_for) == (None, "resume")
        assert (first.overlapped, first.waits_for) == (None, "resume")


async def test_the_same_message_id_with_other_images_is_refused() -> None:
    shown: list[UserMessageEvent] = []

    @agent
    async def looks(turn: TurnContext) -> None:
        shown.append(turn.message)
        await turn.say(str(to_llm_messages(turn.view)[-1]["content"]))

    picture, other = (ImageContent(url=f"https://example.org/{n}.png") for n in range(2))
    async with verified(looks, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("look", images=[picture], message_id="A")
        reply = await turn.reply()
        again = await chat.send("look", images=[picture], message_id="A")

        assert again.is_duplicate
        assert shown[0].images == (picture,)
        assert picture.url in reply
        for images in ([], [other], [picture, other]):
            with pytest.raises(MessageIdConflict):
                await chat.send("look", images=images, message_id="A")


async def test_an_image_goes_with_a_message_that_waits_joins_and_waits_again() -> None:
    steps = StepAgent({"A": "calls"})
    steps.hold("A calls", "A thinks 1")
    picture = ImageContent(url="https://example.org/a.png")
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await steps.reached["A calls"].wait()
        turn = await chat.send("B", images=[picture], on_overlap="steer")
        steps.held["A calls"].set()
        await steps.reached["A thinks 1"].wait()
        await chat.send("C", on_overlap="rollback")
        await turn.end()

        images = [getattr(event, "images", None) for event in await events_of(chat)]
        # It waits, joins, waits again, and has its own turn.
        assert images.count((picture,)) == 4


async def test_messages_that_steer_count_towards_the_bound() -> None:
    steps = StepAgent()
    steps.hold("A thinks")
    async with verified(steps, journal=MemoryJournal(), queued_messages_max=2) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await chat.send("B", on_overlap="steer")
        await chat.send("C")

        for on_overlap in ("steer", "queue"):
            with pytest.raises(QueueFull):
                await chat.send("D", on_overlap=on_overlap)
        # What makes room for itself is not held up by those that wait.
        assert await (await chat.send("D", on_overlap="interrupt")).reply() == "D"


async def test_messages_that_wait_again_are_not_refused_for_lack_of_room() -> None:
    sent, seen, never = anyio.Event(), anyio.Event(), anyio.Event()

    @agent
    async def stepping(turn: TurnContext) -> None:
        text = turn.message.content
        if text == "A":
            await sent.wait()
            await turn.begin_step()
            await never.wait()
        if text == "F":
            await seen.wait()
        await turn.say(text)

    async with verified(stepping, journal=MemoryJournal(), queued_messages_max=2) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        turns = [await chat.send(text, on_overlap="steer") for text in "BC"]
        sent.set()
        await until(chat, "user_message", times=3)
        turns += [await chat.send(text) for text in "DE"]

        turns.append(await chat.send("F", on_overlap="rollback"))

        assert [message.content for message in await chat.queued()] == list("BCDE")
        with pytest.raises(QueueFull):
            await chat.send("G")
        seen.set()
        assert [await turn.reply() for turn in turns] == list("BCDEF")


@pytest.mark.parametrize("how", ["interrupt", "rollback", "cancel"])
async def test_whatever_an_agent_sends_late_is_refused_as_stale(how: str) -> None:
    refused: list[str] = []
    begun, next_runs, done = anyio.Event(), anyio.Event(), anyio.Event()

    @agent
    async def stubborn(turn: TurnContext) -> None:
        if turn.message.content == "B":
            next_runs.set()
            await done.wait()
            await turn.say("B")
            return
        actions = await turn.propose_calls([ToolCall("look")])
        write = turn.writer()
        begun.set()
        with anyio.CancelScope(shield=True):
            await next_runs.wait()

            async def look(action: ActionEvent) -> str:
                return "late"

            late = {
                "say": turn.say("late"),
                "propose": turn.propose_calls([ToolCall("late")]),
                "result": turn.run_calls(actions, look),
                "remind": turn.remind("late"),
                "step": turn.finish_step(USAGE),
                "begin": turn.begin_step(),
                "condense": turn.condense(),
                "repair": turn.repair_history("late"),
                "stuck": turn.end_as_stuck("late"),
            }
            for what, sends in late.items():
                with pytest.raises(StaleTurn):
                    await sends
                refused.append(what)
            with pytest.raises(StaleTurn):
                _ = turn.view
            with pytest.raises(StaleTurn):
                await write("late")
            done.set()

    async with verified(stubborn, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first = await chat.send("A")
        await begun.wait()
        if how == "cancel":
            await first.cancel()
            second = await chat.send("B")
        else:
            second = await chat.send("B", on_overlap=how)  # type: ignore[arg-type]  # a policy

        assert await second.reply() == "B"
        assert len(refused) == 9
        assert "late" not in str(await events_of(chat))


# --- settings of one conversation ----------------------------------------------------------------


async def test_a_conversation_may_have_its_own_agent_prompt_and_policy() -> None:
    @agent
    async def loud(turn: TurnContext) -> None:
        await turn.say(turn.message.content.upper())

    configs = {
        "loud": ConversationConfig(agent=loud, system_prompt="be loud"),
        "firm": ConversationConfig(on_overlap="reject"),
    }
    asked: list[str] = []

    def configure(conversation_id: str) -> ConversationConfig:
        asked.append(conversation_id)
        return configs.get(conversation_id, ConversationConfig())

    steps = StepAgent()
    async with verified(
        steps,
        journal=MemoryJournal(),
        system_prompt="be kind",
        on_overlap="interrupt",
        configure=configure,
    ) as conversations:
        for name in ("plain", "loud", "firm"):
            await (await conversations[name].send("hello")).end()
        logs = {name: await log_of(conversations[name]) for name in ("plain", "loud", "firm")}
        steps.hold("A thinks")
        for name in ("plain", "firm"):
            await conversations[name].send("A")
        overlapped = (await conversations["plain"].send("B")).overlapped

        assert "aHELLO" in logs["loud"]
        prompts = [(await conversations[name].view())[0] for name in ("plain", "loud")]
        assert [prompt.content for prompt in prompts] == ["be kind", "be loud"]  # type: ignore[attr-defined]  # prompts
        assert overlapped == "interrupt"
        with pytest.raises(TurnInProgress):
            await conversations["firm"].send("B")
        assert sorted(asked) == ["firm", "loud", "plain"]


async def test_a_configuration_that_cannot_be_meant_is_refused_to_whoever_sends() -> None:
    def configure(conversation_id: str) -> ConversationConfig:
        return ConversationConfig(on_overlap="sometimes")  # type: ignore[arg-type]  # the point

    async with verified(StepAgent(), journal=MemoryJournal(), configure=configure) as conversations:
        with pytest.raises(InvalidInput, match="sometimes"):
            await conversations["c"].send("A")


async def test_a_turn_that_was_held_goes_on_with_the_agent_that_its_conversation_has_then() -> None:
    """Which may be one that cannot: then the turn ends, and says so."""
    journal, steps = MemoryJournal(), StepAgent({"A": "asks"})
    async with verified(steps, journal=journal) as conversations:
        first = await conversations["c"].send("A")
        await until(conversations["c"], "confirmation_requested")

    config = ConversationConfig(agent=HeldAgent())
    async with verified(
        steps, journal=journal, recover="on_message", configure=lambda _: config
    ) as conversations:
        chat = conversations["c"]
        await chat.reject("no")
        assert (await (await chat.send("A", message_id=first.message_id)).end()).outcome == (
            "interrupted"
        )
        assert await log_of(chat) == "started uA call asked rejected not-run interrupted"


# --- pausing -------------------------------------------------------------------------------------


async def test_a_pause_takes_effect_between_steps_and_what_was_in_flight_is_kept() -> None:
    steps = StepAgent({"A": "call call"})
    steps.hold("A calls 0")
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        await steps.reached["A calls 0"].wait()

        await chat.pause()
        steps.release()
        await until(chat, "observation")
        await until_passivated(conversations, "c")

        assert await log_of(chat) == "started uA call paused result"
        assert len(steps.shown) == 1, "the model was asked in a turn that is paused"
        await chat.resume()
        assert await turn.reply() == "A"
        assert await log_of(chat) == (
            "started uA call paused result resumed call result aA completed"
        )


async def test_a_pause_during_the_last_answer_holds_the_end_and_the_model_is_not_asked_again() -> (
    None
):
    steps = StepAgent()
    steps.hold("A writes")
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        await steps.reached["A writes"].wait()
        await chat.pause()
        steps.release()
        await until(chat, "agent_message")
        await until_passivated(conversations, "c")
        assert await log_of(chat) == "started uA paused aA"

        await chat.resume()

        assert await turn.reply() == "A"
        assert await log_of(chat) == "started uA paused aA resumed completed"
        assert len(steps.shown) == 1


async def test_pausing_and_resuming_twice_changes_nothing() -> None:
    async with verified(StepAgent(), journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()

        changed = [await chat.resume(), await chat.pause(), await chat.pause()]
        changed += [await chat.resume(), await chat.resume()]

        assert changed == [False, True, False, True, False]
        assert await log_of(chat) == "started uA aA completed paused resumed"


async def test_a_turn_that_is_held_keeps_nothing_active_and_goes_on_after_passivation() -> None:
    steps = StepAgent({"A": "call", "B": "asks"})
    async with verified(steps, journal=MemoryJournal()) as conversations:
        paused, asks = conversations["paused"], conversations["asks"]
        steps.hold("A calls")
        first = await paused.send("A")
        await steps.reached["A calls"].wait()
        await paused.pause()
        steps.release()
        second = await asks.send("B")
        await until(asks, "confirmation_requested")
        for name in ("paused", "asks"):
            await until_passivated(conversations, name)

        async with anyio.create_task_group() as group:
            # Whoever waits for such a turn does not call its owner back either.
            told: list[str] = []

            async def wait(turn: Turn) -> None:
                told.append(await turn.reply())

            group.start_soon(wait, first)
            group.start_soon(wait, second)
            await anyio.wait_all_tasks_blocked()
            for name in ("paused", "asks"):
                await until_passivated(conversations, name)
            await anyio.wait_all_tasks_blocked()
            assert conversations._region is not None
            assert conversations._region.active == ()
            await paused.resume()
            await asks.confirm()

        assert sorted(told) == ["A", "B"]


async def test_an_agent_that_cannot_be_run_again_waits_in_its_place_while_paused() -> None:
    once = OnceAgent({"A": "call"})
    once.hold("A calls", "B answered")
    async with verified(once, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        first = await chat.send("A")
        await once.reached["A calls"].wait()
        await chat.pause()
        second = await chat.send("B", on_overlap="steer")
        once.held["A calls"].set()
        await until(chat, "observation")
        await anyio.wait_all_tasks_blocked()
        assert await log_of(chat) == "started uA call paused qB result"

        await chat.resume()

        # It was not run again, and what steers has joined where it waited.
        assert await first.reply() == await second.reply() == "A+B"
        assert len(once.shown) == 2

        # At its end too.
        third = await chat.send("B")
        await once.reached["B answered"].wait()
        await chat.pause()
        once.release()
        await anyio.wait_all_tasks_blocked()
        assert (await log_of(chat)).endswith("started uB aB paused")
        await chat.resume()
        assert await third.reply() == "B"


async def test_what_an_agent_that_waits_in_its_place_says_is_decided_after_the_pause() -> None:
    once = OnceAgent()
    once.hold("A answered")
    async with verified(once, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await once.reached["A answered"].wait()
        await chat.pause()
        once.release()
        await anyio.wait_all_tasks_blocked()
        assert await log_of(chat) == "started uA aA paused"

        await chat.resume()
        # Not waited for: it would never come if the agent's word were lost.
        await anyio.wait_all_tasks_blocked()
        assert await log_of(chat) == "started uA aA paused resumed completed"


async def test_an_agent_that_waits_in_its_place_hears_that_its_turn_was_ended_there() -> None:
    heard: list[type[BaseException]] = []
    begun, paused = anyio.Event(), anyio.Event()

    @agent
    async def patient(turn: TurnContext) -> None:
        if turn.message.content == "B":
            await turn.say("B")
            return
        begun.set()
        with anyio.CancelScope(shield=True):
            await paused.wait()
            try:
                await turn.begin_step()
            except StaleTurn as stale:
                heard.append(type(stale))
                raise

    async with verified(patient, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        await chat.send("A")
        await begun.wait()
        await chat.pause()
        paused.set()
        await anyio.wait_all_tasks_blocked()

        assert await (await chat.send("B", on_overlap="interrupt")).reply() == "B"
        assert heard == [StaleTurn]


async def test_holding_a_conversation_that_does_not_exist_raises_and_creates_nothing() -> None:
    async with verified(StepAgent(), journal=MemoryJournal()) as conversations:
        nobody = conversations["nobody"]
        for hold in (nobody.pause, nobody.resume):
            with pytest.raises(ConversationNotFound):
                await hold()
        for answer in (nobody.confirm, nobody.reject):
            with pytest.raises((ConversationNotFound, NotConfirmable)):
                await answer()

        assert (await conversations.list()).rows == []


async def test_leaving_while_an_agent_is_at_work_is_not_told_as_its_failure() -> None:
    begun = anyio.Event()

    @agent
    async def polite(turn: TurnContext) -> None:
        try:
            begun.set()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await turn.say("good-bye")

    with capture_logs() as logs:
        async with verified(polite, journal=MemoryJournal()) as conversations:
            await conversations["c"].send("A")
            await begun.wait()

    assert not [line for line in logs if line["event"] == "turn failed"]


@pytest.mark.parametrize("ends_by", ["interrupt", "its answer", "interrupt while it fails"])
async def test_an_agent_that_fails_after_its_turns_end_is_told_in_the_log(ends_by: str) -> None:
    """No event can carry the error, and no line of the log did."""
    begun, failing, journal = anyio.Event(), anyio.Event(), HeldJournal()

    @agent
    async def failing_late(turn: TurnContext) -> None:
        if ends_by == "its answer":
            await turn.say("A", ends_turn=True)
            raise ValueError("after its answer")
        try:
            begun.set()
            await failing.wait()
        finally:
            raise ValueError("in its clean-up")

    with capture_logs() as logs:
        async with verified(failing_late, journal=journal) as conversations:
            turn = await conversations["c"].send("A")
            if ends_by != "its answer":
                await begun.wait()
                if ends_by == "interrupt while it fails":
                    journal.gate = anyio.Event()
                async with anyio.create_task_group() as group:
                    group.start_soon(turn.cancel)
                    await settle()
                    failing.set()
                    await settle()
                    journal.gate.set()
            end = await turn.end()
            await settle()

    assert end.outcome == ("completed" if ends_by == "its answer" else "interrupted")
    (told,) = [line for line in logs if "agent failed" in line["event"]]
    assert (told["conversation"], told["turn"]) == ("c", turn.turn_id)
    assert told["error"] == "ValueError"


class FailingFirst:
    """An agent that can be resumed, and whose first run fails as soon as a test lets it."""

    is_resumable = True

    def __init__(self) -> None:
        self.runs = 0
        self.begun, self.may_fail = anyio.Event(), anyio.Event()

    async def run(self, turn: TurnContext) -> None:
        self.runs += 1
        if self.runs == 1:
            self.begun.set()
            await self.may_fail.wait()
            raise ValueError("in its first run")
        await turn.say("A")


async def test_an_agent_that_fails_during_a_pause_is_told_in_the_log_and_run_again() -> None:
    """The turn went on after the pause as if nothing had been, and nothing told the error."""
    failing = FailingFirst()
    with capture_logs() as logs:
        async with verified(failing, journal=MemoryJournal()) as conversations:
            chat = conversations["c"]
            turn = await chat.send("go")
            await failing.begun.wait()
            await chat.pause()
            failing.may_fail.set()
            await settle()
            await chat.resume()
            assert await turn.reply() == "A"

    assert failing.runs == 2
    (told,) = [line for line in logs if "failed" in line["event"]]
    assert told["event"] == "agent failed in a turn that is held"
    assert (told["turn"], told["error"]) == (turn.turn_id, "ValueError")


async def test_leaving_while_an_answer_is_streamed_warns_of_nothing() -> None:
    """Each such end of a process was told as up to ten dead letters, as if messages were lost."""
    begun = anyio.Event()

    @agent
    async def talker(turn: TurnContext) -> None:
        write = turn.writer()
        try:
            while True:
                await write("word ")
                begun.set()
        finally:
            with suppress(TurnkeeperError), anyio.CancelScope(shield=True):
                for _ in range(5):
                    await write("the rest ")

    with capture_logs() as logs:
        async with Runtime() as runtime:
            async with verified(talker, journal=MemoryJournal(), runtime=runtime) as conversations:
                await conversations["c"].send("A")
                await begun.wait()
            assert runtime.dead_letters.count, "no piece came too late"

    assert not [line for line in logs if line["log_level"] == "warning"]


# --- confirming ----------------------------------------------------------------------------------


async def test_nothing_runs_that_waits_for_a_confirmation() -> None:
    steps = StepAgent({"A": "asks"})
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        await until(chat, "confirmation_requested")
        await until_passivated(conversations, "c")
        assert steps.ran == []

        await chat.confirm()

        assert await turn.reply() == "A"
        assert len(steps.ran) == 1


@pytest.mark.parametrize("confirms", [True, False])
async def test_confirming_runs_the_calls_and_rejecting_answers_them_with_the_reason(
    confirms: bool,
) -> None:
    steps = StepAgent({"A": "asks"})
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        await until(chat, "confirmation_requested")

        await (chat.confirm() if confirms else chat.reject("not on a Sunday"))

        assert await turn.reply() == "A"
        log = await events_of(chat)
        rejected = [event.content for event in log if isinstance(event, UserRejectEvent)]
        assert rejected == ([] if confirms else ["not on a Sunday"])
        assert len(steps.ran) == confirms
        assert brief(*log) == (
            "started uA call asked confirmed result aA completed"
            if confirms
            else "started uA call asked rejected not-run aA completed"
        )


async def test_a_second_answer_to_a_confirmation_is_refused() -> None:
    steps = StepAgent({"A": "asks"})
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        await until(chat, "confirmation_requested")
        await chat.pause()
        await chat.reject("no")

        for answer in (chat.confirm, chat.reject):
            with pytest.raises(NotConfirmable):
                await answer()
        await chat.resume()
        await turn.end()
        with pytest.raises(NotConfirmable):
            await chat.confirm()


async def test_an_agent_that_cannot_be_run_again_cannot_ask_for_a_confirmation() -> None:
    async with verified(OnceAgent({"A": "asks"}), journal=MemoryJournal()) as conversations:
        end = await (await conversations["c"].send("A")).end()

        assert end.outcome == "failed"
        assert "is_resumable" in end.detail
        assert await log_of(conversations["c"]) == "started uA conversation_error failed"


async def test_a_call_that_is_run_again_has_its_own_id_again() -> None:
    journal, steps = MemoryJournal(), StepAgent({"A": "call"}, idempotent=True)
    steps.hold("A calls")
    with anyio.CancelScope() as process:
        async with verified(steps, journal=journal) as conversations:
            turn = await conversations["c"].send("A")
            await steps.reached["A calls"].wait()
            process.cancel()
    steps.release()

    async with verified(steps, journal=journal, unfinished="resume") as conversations:
        chat = conversations["c"]
        await (await chat.send("A", message_id=turn.message_id)).end()
        calls = [e.tool_call_id for e in await events_of(chat) if isinstance(e, ActionEvent)]

    assert steps.ran == calls * 2


# --- what comes together -------------------------------------------------------------------------


async def test_a_turn_that_is_interrupted_in_the_batch_that_began_it_is_never_run() -> None:
    journal, held = HeldJournal(), HeldAgent()
    async with verified(held, journal=journal) as conversations:
        chat = conversations["c"]
        await (await chat.send("first")).end()
        journal.gate = anyio.Event()
        outcomes: dict[str, str] = {}

        async def send(name: str, on_overlap: OnOverlap) -> None:
            turn = await chat.send(name, on_overlap=on_overlap)
            outcomes[name] = (await turn.end()).outcome

        async with anyio.create_task_group() as group:
            group.start_soon(send, "before", "queue")
            await anyio.wait_all_tasks_blocked()
            for name in ("A", "B", "C"):
                group.start_soon(send, name, "interrupt")
                await anyio.wait_all_tasks_blocked()
            journal.gate.set()

        assert outcomes == {
            "before": "interrupted",
            "A": "interrupted",
            "B": "interrupted",
            "C": "completed",
        }
        assert [name for name in held.turns if name in "AB"] == []


async def test_a_pause_that_comes_while_a_step_waits_for_its_condensation_is_heeded() -> None:
    steps, condenses, go_on = StepAgent(), anyio.Event(), anyio.Event()

    class Slow:
        def need(self, view: View) -> Need | None:
            return "hard" if view.unhandled_condensation_request else None

        async def propose(self, view: View, need: Need) -> Proposal | None:
            condenses.set()
            await go_on.wait()
            return Proposal(tuple(event.id for event in view[:2]), None)

    async with verified(steps, journal=MemoryJournal(), condenser=Slow()) as conversations:
        chat = conversations["c"]
        await (await chat.send("A")).end()
        await chat.append(CondensationRequestEvent())
        await condenses.wait()
        turn = await chat.send("B")
        await anyio.wait_all_tasks_blocked()
        await chat.pause()
        go_on.set()
        await until(chat, "condensation")
        await until_passivated(conversations, "c")
        assert len(steps.shown) == 1

        await chat.resume()
        assert await turn.reply() == "B"
        assert steps.shown[1] == "uB"


# --- status --------------------------------------------------------------------------------------


async def test_the_status_is_what_the_table_says_at_each_point() -> None:
    steps = StepAgent({"A": "call asks", "C": "call", "D": "asks"})
    steps.hold("A calls 0", "A writes")
    async with verified(steps, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        statuses: list[AgentExecutionStatus] = []

        async def note() -> None:
            statuses.append(await status_of(chat))

        turn = await chat.send("A")
        await steps.reached["A calls 0"].wait()
        await note()
        await chat.pause()
        await note()
        steps.held["A calls 0"].set()
        await until(chat, "observation")
        await note()  # what was in flight does not overwrite the pause
        assert statuses == [S.RUNNING, S.PAUSED, S.PAUSED]

        statuses.clear()
        await chat.resume()
        await until(chat, "confirmation_requested")
        await note()
        await chat.pause()
        await note()
        await chat.confirm()
        await note()
        await chat.resume()
        await steps.reached["A writes"].wait()
        await note()
        assert statuses == [S.WAITING_FOR_CONFIRMATION, S.PAUSED, S.PAUSED, S.RUNNING]

        statuses.clear()
        await chat.pause()
        steps.release()
        await until(chat, "agent_message")
        await note()
        await chat.resume()
        await turn.end()
        await note()
        await chat.pause()
        await note()
        await chat.resume()
        await note()
        assert statuses == [S.PAUSED, S.FINISHED, S.PAUSED, S.IDLE]

        # Calls that are asked about during a pause: that is what it resumes as.
        statuses.clear()
        steps.hold("D thinks")
        fourth = await chat.send("D")
        await steps.reached["D thinks"].wait()
        await chat.pause()
        steps.release()
        await until(chat, "confirmation_requested", times=2)
        await note()
        await chat.resume()
        await note()
        await chat.reject()
        await fourth.end()
        assert statuses == [S.PAUSED, S.WAITING_FOR_CONFIRMATION]

        statuses.clear()
        await (await chat.send("fails")).end()
        await note()
        steps.hold("C calls")
        third = await chat.send("C")
        await steps.reached["C calls"].wait()
        await note()
        await third.cancel()
        await note()
        assert statuses == [S.ERROR, S.RUNNING, S.IDLE]


async def test_a_turn_that_is_stuck_ends_as_failed_and_the_status_says_stuck() -> None:
    @agent
    async def circular(turn: TurnContext) -> None:
        if turn.message.content == "B":
            await turn.say("B")
            return
        await turn.end_as_stuck("four times the same")

    async with verified(circular, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        end = await (await chat.send("A")).end()

        assert (end.outcome, end.detail) == ("failed", "Stuck: four times the same")
        assert await status_of(chat) == S.STUCK
        assert await (await chat.send("B")).reply() == "B"
        assert await status_of(chat) == S.FINISHED


async def test_what_an_agent_says_of_its_failure_is_cut_as_an_errors_text_is() -> None:
    """A provider may answer with a page, and an agent may repeat a whole file."""

    @agent
    async def verbose(turn: TurnContext) -> None:
        await turn.repair_history("x" * 100_000)
        await turn.end_as_stuck("y" * 100_000)

    async with verified(verbose, journal=MemoryJournal()) as conversations:
        end = await (await conversations["c"].send("A")).end()

        assert end.detail == f"Stuck: {'y' * ERROR_LENGTH_MAX}"
        records = await conversations.journal.read("c")
        assert b"xxx" in b"".join(record.payload for record in records)
        assert max(len(record.payload) for record in records) < 2 * ERROR_LENGTH_MAX


async def test_an_agent_that_goes_on_after_it_was_suspended_cannot_end_its_turn_twice() -> None:
    """It catches what it must not catch. What it then says is of the turn, and is kept."""

    class Deaf(StepAgent):
        async def run(self, turn: TurnContext) -> None:
            try:
                await super().run(turn)
            except TurnSuspended:
                return

    deaf = Deaf({"A": "asks"})
    async with verified(deaf, journal=MemoryJournal()) as conversations:
        chat = conversations["c"]
        turn = await chat.send("A")
        await until(chat, "confirmation_requested")
        await anyio.wait_all_tasks_blocked()
        await chat.confirm()

        assert await turn.reply() == "A"
        assert (await log_of(chat)).count("completed") == 1
        assert isinstance((await chat.view())[-1], AgentMessageEvent)
