"""The tables of `docs/turns.md`, row by row: each is played as it says, and compared cell by cell.

A row is a test of its own, read from the page; so the page cannot say what is not so.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Literal

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from tests.actors.conversations.test_turns_crash import APPENDS_MAX, FailingMemoryJournal, Fails
from tests.actors.conversations.turn_worlds import (
    HALF,
    OnceAgent,
    StepAgent,
    brief,
    events_of,
    log_of,
    until,
)
from tests.actors.conversations.worlds import WatchedJournal, verified
from tests.actors.core.turn_laws import LogReader
from tests.drawn import drawn
from turnkeeper.actors import (
    Conversation,
    MemoryJournal,
    OnOverlap,
    Proposal,
    TextDelta,
    ToolCall,
    Turn,
    TurnContext,
    View,
)
from turnkeeper.actors.core.commands import Propose
from turnkeeper.actors.errors import NotConfirmable, NotReplaceable, TurnInProgress
from turnkeeper.actors.events import (
    ActionEvent,
    CondensationRequestEvent,
    ObservationEvent,
    UserMessageEvent,
)
from turnkeeper.actors.journal import Record
from turnkeeper.runtime import Refused, Unavailable
from turnkeeper.runtime.testing import settle

pytestmark = pytest.mark.costly

PAGE = Path(__file__).parents[3] / "docs" / "turns.md"

Row = dict[str, str]


def _rows(heading: str) -> list[Row]:
    """The rows of the first table below a heading, by the names of their columns."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.split(f"# {heading}\n", 1)[1]
    section = re.split(r"^#", section, maxsplit=1, flags=re.MULTILINE)[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]
    head, _, *rows = cells
    return [dict(zip(head, row, strict=True)) for row in rows]


def _params(*headings: str) -> list[object]:
    return [
        pytest.param(heading.strip("`"), row, id=f"{heading.strip('`')}: {row['A']}")
        for heading in headings
        for row in _rows(heading)
    ]


SCRIPTS = {
    "thinks": "",
    "thinks, and C has joined it": "calls",
    "thinks, and a condensation has forgotten a part of it": "call call",
    "writes": "",
    "runs two tools": "calls",
    "is paused": "calls",
    "waits for a confirmation": "asks",
    "has been confirmed while it was paused": "asks",
    "has answered": "",
}


class Scene:
    """A conversation whose first turn, of chat message A, stands somewhere."""

    def __init__(self, chat: Conversation, agent: StepAgent) -> None:
        self.chat = chat
        self.agent = agent
        self.others: list[Turn] = []
        self.held_by: list[str] = []
        """What has to be said before A goes on."""
        self.tried: dict[str, tuple[OnOverlap | None, str | None]] = {}
        self.seqs: dict[str, int] = {}
        """The messages that were acknowledged."""

    async def send(
        self, name: str, *, on_overlap: OnOverlap | None = None, replaces: str | None = None
    ) -> Turn:
        self.tried[name] = on_overlap, replaces
        turn = await self.chat.send(name, message_id=name, on_overlap=on_overlap, replaces=replaces)
        assert self.seqs.setdefault(name, turn.seq) == turn.seq
        return turn

    async def answered(self, name: str) -> Turn:
        turn = await self.send(name)
        await turn.end()
        return turn

    async def begun(self, name: str, point: str = "thinks") -> Turn:
        self.agent.hold(f"{name} {point}")
        turn = await self.send(name)
        await self.agent.reached[f"{name} {point}"].wait()
        return turn

    async def paused(self) -> None:
        await self.chat.pause()
        self.held_by = ["resume"]

    async def forget(self, begin: int, end: int) -> None:
        view = await self.chat.view()
        proposal = Proposal(tuple(event.id for event in view[begin:end]), None)
        assert await self.chat._ref.ask(Propose(1, proposal, view))

    async def bring_to(self, where: str) -> Turn:
        chat, agent = self.chat, self.agent
        point = {"writes": "A writes", "runs two tools": "A calls", "is paused": "A calls"}.get(
            where, "A thinks"
        )
        if where == "has answered":
            point = "A answered"
        if where.startswith("thinks, and C"):
            point = "A thinks 1"
            agent.hold("A calls")
        if where.startswith("thinks, and a"):
            point = "A thinks 2"
        agent.hold(point)
        if SCRIPTS[where] == "asks":
            agent.held.clear()
        turn = await self.send("A")
        match where:
            case "is paused":
                await agent.reached[point].wait()
                await chat.pause()
                agent.release()
                await until(chat, "observation", times=2)
                self.held_by = ["resume"]
            case "waits for a confirmation":
                await until(chat, "confirmation_requested")
                self.held_by = ["confirm"]
            case "has been confirmed while it was paused":
                await until(chat, "confirmation_requested")
                await chat.pause()
                await chat.confirm()
                self.held_by = ["resume"]
            case "thinks, and C has joined it":
                await agent.reached["A calls"].wait()
                self.others.append(await self.send("C", on_overlap="steer"))
                agent.held.pop("A calls").set()
                await agent.reached[point].wait()
            case "thinks, and a condensation has forgotten a part of it":
                await agent.reached[point].wait()
                await self.forget(1, 3)
            case _:
                await agent.reached[point].wait()
        return turn

    async def go_on(self) -> None:
        self.agent.release()
        for what in self.held_by:
            await (self.chat.resume() if what == "resume" else self.chat.confirm())


async def _told(turn: Turn | None) -> str:
    """What a caller gets who waits for this turn's end."""
    if turn is None:
        return "—"
    end = await turn.end()
    said = "…" if end.reply == HALF else end.reply
    return f"{end.outcome}: {said}" if said else end.outcome


def _answer(turn: Turn) -> str:
    words: list[str] = [turn.overlapped or "at once"]
    if turn.waits_for is not None:
        words.append(f"waits for {turn.waits_for}")
    return ", ".join(words)


OVERLAPS: Sequence[OnOverlap] = ("queue", "interrupt", "steer", "rollback", "reject")


async def overlap(
    on_overlap: OnOverlap,
    where: str,
    *,
    replaces: str | None = None,
    journal: MemoryJournal | None = None,
    scenes: list[Scene] | None = None,
) -> Row:
    agent = StepAgent({"A": SCRIPTS[where]})
    async with verified(agent, journal=journal or MemoryJournal()) as conversations:
        scene = Scene(conversations["c"], agent)
        if scenes is not None:
            scenes.append(scene)
        first = await scene.bring_to(where)
        agent.hold("B thinks")
        second = None
        try:
            second = await scene.send("B", on_overlap=on_overlap, replaces=replaces)
            answer = _answer(second)
        except TurnInProgress:
            answer = "TurnInProgress"
        except NotReplaceable as refused:
            answer = f"NotReplaceable: {refused.reason}"
        view = brief(*await scene.chat.view())
        if second is None or second.overlapped in ("queue", "steer"):
            await scene.go_on()
        else:
            agent.release()
        told = [await _told(first), await _told(second)]
        for other in scene.others:
            await other.end()
        return {
            "A": where,
            "send of B": answer,
            "the log": await log_of(scene.chat),
            "the view at once": view,
            "A's caller": told[0],
            "B's caller": told[1],
        }


@pytest.mark.parametrize(("on_overlap", "row"), _params(*(f"`{policy}`" for policy in OVERLAPS)))
async def test_what_a_message_does_that_comes_while_a_turn_runs(
    on_overlap: OnOverlap, row: Row
) -> None:
    assert await overlap(on_overlap, row["A"]) == row


# --- editing and resending -----------------------------------------------------------------------

EDITING = ("While the turn of A runs", "After the turn of A, or before it")
BEFORE_REJECT = ("queue", "interrupt", "steer", "rollback")


@pytest.mark.parametrize("row", _rows(EDITING[0]), ids=lambda row: row["A"])
@pytest.mark.parametrize("on_overlap", BEFORE_REJECT)
async def test_what_a_message_does_that_replaces_one_whose_turn_runs(
    on_overlap: OnOverlap, row: Row
) -> None:
    assert await overlap(on_overlap, row["A"], replaces="A") == row


async def edit(
    where: str, *, journal: MemoryJournal | None = None, scenes: list[Scene] | None = None
) -> Row:
    """Bring A to where the table says, send B in its place, and see everything end."""
    agent = StepAgent({"C": "calls" if "join" in where else ""})
    async with verified(agent, journal=journal or MemoryJournal()) as conversations:
        scene = Scene(conversations["c"], agent)
        if scenes is not None:
            scenes.append(scene)
        others: list[Turn] = []
        match where:
            case "has ended":
                first = await scene.answered("A")
            case "has ended, and C has been answered before it":
                others.append(await scene.answered("C"))
                first = await scene.answered("A")
            case "has ended, and C has been answered since":
                first = await scene.answered("A")
                others.append(await scene.answered("C"))
            case "has ended, and C is being answered":
                first = await scene.answered("A")
                others.append(await scene.begun("C"))
            case "has ended, C is being answered, and D waits":
                first = await scene.answered("A")
                others += [await scene.begun("C"), await scene.send("D")]
            case "has ended, and the conversation is paused":
                first = await scene.answered("A")
                await scene.paused()
            case "has ended, the conversation is paused, and C waits":
                first = await scene.answered("A")
                await scene.paused()
                others.append(await scene.send("C"))
            case "waits for the turn of C, and D waits behind it":
                others.append(await scene.begun("C"))
                first = await scene.send("A")
                others.append(await scene.send("D"))
            case "waits to join the turn of C":
                others.append(await scene.begun("C", "calls"))
                first = await scene.send("A", on_overlap="steer")
            case _:
                raise AssertionError(where)
        agent.hold("B thinks")
        second = await scene.send("B", on_overlap="interrupt", replaces="A")
        answer, view = _answer(second), brief(*await scene.chat.view())
        await scene.go_on()
        told = [await _told(first), await _told(second)]
        for other in others:
            await other.end()
        return {
            "A": where,
            "send of B": answer,
            "the log": await log_of(scene.chat),
            "the view at once": view,
            "A's caller": told[0],
            "B's caller": told[1],
        }


@pytest.mark.parametrize("row", _rows(EDITING[1]), ids=lambda row: row["A"])
async def test_what_a_message_does_that_replaces_one_before(row: Row) -> None:
    assert await edit(row["A"]) == row


async def bring_to_refusal(scene: Scene, where: str) -> None:
    chat, agent = scene.chat, scene.agent
    match where:
        case "was never sent":
            await scene.answered("C")
        case "has joined the turn of C":
            await scene.begun("C", "calls")
            second = await scene.send("A", on_overlap="steer")
            agent.release()
            await second.end()
        case "was replaced":
            await scene.answered("A")
            await (await scene.send("C", replaces="A")).end()
        case "waited, and was replaced":
            await scene.begun("C")
            await scene.send("A")
            await scene.send("D", replaces="A")
        case "waited, and was withdrawn":
            await scene.begun("C")
            await (await scene.send("A")).cancel()
        case "was rolled back":
            await scene.begun("A")
            agent.hold("C thinks")
            await scene.send("C", on_overlap="rollback")
        case "was taken back":
            await scene.answered("A")
            await chat.undo()
        case "has ended, and a part of its turn is condensed":
            await scene.answered("A")
            await scene.answered("C")
            await scene.forget(1, 3)
        case "has ended, and a part of a later turn is condensed":
            await scene.answered("A")
            await scene.answered("C")
            await scene.forget(3, 4)
        case "was appended by hand":
            await chat.append(UserMessageEvent(content="A", message_id="A"))
        case "has ended, and what was appended by hand holds on to its turn":
            turn = await scene.answered("A")
            call = ActionEvent(
                tool_call_id="k", tool_name="t", llm_response_id="r", turn_id=turn.turn_id
            )
            await chat.append_all([call, ObservationEvent(tool_call_id="k", content="seen")])
        case "runs, and `reject` is chosen":
            await scene.begun("A")
        case "has ended, C is being answered, and `reject` is chosen":
            await scene.answered("A")
            await scene.begun("C")
        case "has ended, the conversation is paused, and the queue is full":
            await scene.answered("A")
            await chat.pause()
            await scene.send("C")
        case _:
            raise AssertionError(where)


@pytest.mark.parametrize("row", _rows("What is not replaced"), ids=lambda row: row["A"])
async def test_what_is_not_replaced(row: Row) -> None:
    where = row["A"]
    agent = StepAgent({"C": "calls" if "joined" in where else ""})
    async with verified(agent, journal=MemoryJournal(), queued_messages_max=1) as conversations:
        scene = Scene(conversations["c"], agent)
        await bring_to_refusal(scene, where)
        before, view = await log_of(scene.chat), brief(*await scene.chat.view())
        on_overlap: OnOverlap | None = "reject" if "`reject`" in where else None
        with pytest.raises(Refused) as caught:
            await scene.send("B", on_overlap=on_overlap, replaces="A")
        said = type(caught.value).__name__
        if isinstance(caught.value, NotReplaceable):
            said = f"{said}: {caught.value.reason}"
        assert said == row["send of B"]
        assert await log_of(scene.chat) == before
        assert brief(*await scene.chat.view()) == view
        # Its id stays unknown: it may be sent otherwise.
        await scene.chat.resume()
        assert not (await scene.chat.send("B!", message_id="B", on_overlap="rollback")).is_duplicate
        agent.release()


@pytest.mark.sweep
@pytest.mark.parametrize(("table", "row"), _params(*EDITING))
async def test_a_kill_at_any_append_of_an_edit_leaves_a_log_that_goes_on(
    table: str, row: Row
) -> None:
    """Of each row of the tables; then all messages are sent again, as their senders do."""

    async def play(journal: FailingMemoryJournal, scenes: list[Scene]) -> None:
        if table == EDITING[0]:
            await overlap("queue", row["A"], replaces="A", journal=journal, scenes=scenes)
        else:
            await edit(row["A"], journal=journal, scenes=scenes)

    journal = FailingMemoryJournal()
    journal.fails = Fails(at=APPENDS_MAX, when="after", dies=True)
    await play(journal, [])
    for at in drawn(range(1, journal.fails.appends + 1), 2):
        for when in WHEN:
            with anyio.fail_after(60), capture_logs():
                await _kill_and_go_on(play, Fails(at=at, when=when, dies=True), row)


WHEN: Sequence[Literal["before", "after"]] = ("before", "after")
Play = Callable[[FailingMemoryJournal, list[Scene]], Awaitable[None]]


async def _kill_and_go_on(play: Play, fails: Fails, row: Row) -> None:
    journal, scenes = FailingMemoryJournal(), list[Scene]()
    journal.fails = fails
    async with anyio.create_task_group() as group:

        async def live() -> None:
            try:
                await play(journal, scenes)
            except Exception:
                if not fails.died.is_set():
                    raise
            group.cancel_scope.cancel()

        group.start_soon(live)
        await fails.died.wait()
        group.cancel_scope.cancel()
    journal.fails = None
    (scene,) = scenes
    agent = StepAgent(scene.agent._scripts)
    async with verified(agent, journal=journal) as conversations:
        chat = conversations["c"]
        turns = []
        for name, (on_overlap, replaces) in scene.tried.items():
            try:
                turn = await chat.send(
                    name, message_id=name, on_overlap=on_overlap, replaces=replaces
                )
            except NotReplaceable as refused:
                if refused.reason not in row["send of B"]:
                    raise
                continue
            assert scene.seqs.get(name, turn.seq) == turn.seq, "acknowledged at another seq"
            turns.append(turn)
        while (await chat.at()).turns.has_open_turns:
            await chat.resume()
            with suppress(NotConfirmable):
                await chat.confirm()
            await anyio.lowlevel.checkpoint()
        for turn in turns:
            await turn.end()
        events = await events_of(chat)
        LogReader(events).check()
        view = await chat.view()
        assert view == View.from_events(events)
        if "B" in scene.tried and "NotReplaceable" not in row["send of B"]:
            words = brief(*view).split()
            assert "uB" in words
            assert "uA" not in words, "both are in the view"


async def cancel(what: str) -> Row:
    """Cancel what the table says, while A stands where that is."""
    moments: dict[str, tuple[str, OnOverlap | None, str]] = {
        "A, which runs": ("runs two tools", None, "A"),
        "A, which writes, while B waits": ("writes", "queue", "A"),
        "A, which is paused, while B waits": ("is paused", "queue", "A"),
        "A, which waits for a confirmation": ("waits for a confirmation", None, "A"),
        "A, which has ended": ("has answered", None, "A"),
        "B, which waits": ("thinks", "queue", "B"),
        "B, which waits to join A's turn": ("runs two tools", "steer", "B"),
        "B, which has joined A's turn": ("runs two tools", "steer", "B"),
        "B, which waits while A is paused": ("is paused", "queue", "B"),
    }
    where, on_overlap, whose = moments[what]
    agent = StepAgent({"A": SCRIPTS[where]})
    async with verified(agent, journal=MemoryJournal()) as conversations:
        scene = Scene(conversations["c"], agent)
        turns = {"A": await scene.bring_to(where)}
        if on_overlap is not None:
            turns["B"] = await scene.chat.send("B", message_id="B", on_overlap=on_overlap)
        if what == "A, which has ended":
            agent.release()
            await turns["A"].end()
        if what == "B, which has joined A's turn":
            agent.hold("A thinks 1")
            agent.held.pop("A calls").set()
            await agent.reached["A thinks 1"].wait()
        cancelled = await turns[whose].cancel()
        if whose == "A":
            agent.release()
        else:
            await scene.go_on()
        told = [await _told(turns["A"]), await _told(turns.get("B"))]
        return {
            "cancel of": what,
            "the log": await log_of(scene.chat),
            "returns": str(cancelled),
            "A's caller": told[0],
            "B's caller": told[1],
        }


@pytest.mark.parametrize("row", _rows("Cancelling"), ids=lambda row: row["cancel of"])
async def test_what_cancelling_does(row: Row) -> None:
    assert await cancel(row["cancel of"]) == row


async def crash(
    where: str, unfinished: Literal["end", "resume"], agent_class: type[StepAgent]
) -> str:
    """Stop everything while A stands somewhere; the log after another process has gone on."""
    where, _, extra = where.partition(", and ")
    idempotent = extra == "its tool is idempotent"
    journal = MemoryJournal()
    agent = agent_class({"A": SCRIPTS[where]})
    with anyio.CancelScope() as process:
        async with verified(agent, journal=journal) as conversations:
            scene = Scene(conversations["c"], agent)
            await scene.bring_to(where)
            if extra.startswith("B"):
                policy: OnOverlap = "queue" if extra == "B waits" else "steer"
                await scene.chat.send("B", message_id="B", on_overlap=policy)
            process.cancel()
    agent = agent_class({"A": SCRIPTS[where]}, idempotent=idempotent)
    async with verified(agent, journal=journal, unfinished=unfinished) as conversations:
        after = Scene(conversations["c"], agent)
        after.held_by = scene.held_by
        await after.go_on()
        # Sent again, as a caller does who got no answer: the same turns.
        for name in ("A", *("B" for _ in [extra] if extra.startswith("B"))):
            turn = await after.chat.send(name, message_id=name)
            assert turn.is_duplicate
            await turn.end()
        return await log_of(after.chat)


@pytest.mark.parametrize("row", _rows("After a crash"), ids=lambda row: row["A"])
async def test_what_a_crash_leaves_and_what_is_made_of_it(row: Row) -> None:
    assert await crash(row["A"], "end", StepAgent) == row['"end"']
    assert await crash(row["A"], "resume", StepAgent) == row['"resume"']


@pytest.mark.parametrize("row", _rows("An agent that is not resumable"), ids=lambda row: row["A"])
@pytest.mark.parametrize("unfinished", ["end", "resume"])
async def test_an_agent_that_cannot_be_run_again_is_not(
    unfinished: Literal["end", "resume"], row: Row
) -> None:
    assert await crash(row["A"], unfinished, OnceAgent) == row["the log"]


class Writer:
    """An agent that does in A's turn what a row tells it, a word at a time."""

    is_resumable: ClassVar[bool] = True

    def __init__(self) -> None:
        self.words, self._taken = anyio.create_memory_object_stream[str](100)

    async def run(self, turn: TurnContext) -> None:
        if turn.message.content != "A":
            return
        write, said = turn.writer(), ""
        while True:
            word = await self._taken.receive()
            match word[0], word[1:]:
                case ("+" | "^") as how, text:
                    if how == "^":
                        write, said = turn.writer(), ""
                    text = text.replace("◐", "\ud83d").replace("◑", "\ude00")
                    said += text
                    await write(text)
                case _ if word == "calls":
                    await turn.call_tools([ToolCall("look")], self._look, text=said)
                    write, said = turn.writer(), ""
                case _ if word == "fails":
                    raise RuntimeError("it fails")
                case _:
                    await turn.say(said if word == "says" else "else", ends_turn=True)
                    return

    async def _look(self, action: ActionEvent) -> str:
        return "seen"

    def close(self) -> None:
        self.words.close()
        self._taken.close()


class FailsOnce(WatchedJournal):
    fails = False

    async def before_append(self, records: Sequence[Record]) -> None:
        if self.fails:
            self.fails = False
            raise Unavailable("the journal cannot be reached; nothing was written")


async def write(row: str) -> Row:
    """Play a row word by word, with a reader from the start and one that comes at the dot."""
    agent, journal = Writer(), FailsOnce()
    seen: list[list[str]] = [[], []]

    async with (
        anyio.create_task_group() as readers,
        verified(agent, journal=journal, unfinished="resume") as conversations,
    ):
        chat = conversations["c"]

        async def read(into: list[str], after: int) -> None:
            async for item in chat.follow(after=after):
                if isinstance(item, TextDelta):
                    place = f"{item.epoch}/{item.answer}.{item.attempt}+{item.offset}"
                    into.append(f"{place}:{item.text}")
                else:
                    into.append(brief(item.event))

        turn = await chat.send("A")
        readers.start_soon(read, seen[0], turn.seq)
        await settle()
        for word in row.split():
            match word:
                case "·":
                    readers.start_soon(read, seen[1], (await chat.at()).seq)
                case "qB":
                    await chat.send("B", message_id="B")
                case "interrupt":
                    await chat.send("B", message_id="B", on_overlap="interrupt")
                case "crash":
                    journal.fails = True
                    with pytest.raises(Unavailable):
                        await chat.append(CondensationRequestEvent())
                    await chat.view()
                case _:
                    await agent.words.send(word)
            await settle()
        await turn.end()
        await settle()
        readers.cancel_scope.cancel()
    agent.close()
    all_of_it, middle = (" ".join(filter(None, words)) for words in seen)
    return {"what happens": row, "from the start": all_of_it, "from the dot": middle}


@pytest.mark.parametrize("row", _rows("The pieces of an answer"), ids=lambda r: r["what happens"])
async def test_what_a_reader_gets_of_an_answer_that_is_being_written(row: Row) -> None:
    assert await write(row["what happens"]) == row


# --- the page itself -----------------------------------------------------------------------------


def _tables() -> list[tuple[list[str], str]]:
    """Each table of the page: its lines, and the text of its section before it."""
    tables: list[tuple[list[str], str]] = []
    before: list[str] = []
    lines: list[str] = []
    for line in [*PAGE.read_text(encoding="utf-8").splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
        elif lines:
            tables.append((lines, "\n".join(before)))
            lines = []
        elif line.startswith("## "):
            before = []
        else:
            before.append(line)
    return tables


def _known_tests() -> set[str]:
    return {
        name
        for file in Path(__file__).parents[1].rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", file.read_text(encoding="utf-8"))
    }


def test_each_line_of_the_page_names_a_test_that_exists() -> None:
    """In its own line, or for all lines of a table that a test reads from the page, above it."""
    known = _known_tests()
    tables = _tables()
    assert len(tables) > 9
    for (head, _, *rows), before in tables:
        for row in rows:
            where = row if head.endswith("| test |") else before
            named = re.findall(r"`(test_\w+)`", where)
            assert named, f"a promise without a test is a hope: {row}"
            assert set(named) <= known, row
