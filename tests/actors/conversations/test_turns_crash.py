"""The process dies, or the journal fails, at any append of a scenario: the log goes on from there.

The scenario has all that turns can do: a tool, a message that joins, one that overlaps, a pause, a
confirmation. Its appends are counted, and each is the last one, once, written and not written.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import anyio
import anyio.lowlevel
import pytest
from structlog.testing import capture_logs

from tests.actors.conversations.turn_worlds import StepAgent, events_of
from tests.actors.conversations.worlds import verified
from tests.actors.core.turn_laws import POLICIES, LogReader
from tests.drawn import drawn
from turnkeeper.actors import (
    Conversations,
    MemoryJournal,
    OnOverlap,
    SQLiteJournal,
    Turn,
    View,
)
from turnkeeper.actors.errors import (
    ConversationNotFound,
    JournalOutcomeUnknown,
    JournalUnavailable,
    NotConfirmable,
    TurnInProgress,
)
from turnkeeper.actors.journal import Listing, Record
from turnkeeper.runtime import OutcomeUnknown, Unavailable

pytestmark = [pytest.mark.costly, pytest.mark.usefixtures("silence")]


@pytest.fixture
def silence() -> Iterator[None]:
    """Hundreds of failures are the point here; each would be told with its whole traceback."""
    with capture_logs():
        yield


When = Literal["before", "after"]
APPENDS_MAX = 40
SHARE = 5
"""Of the appends of each scenario, about 25, so many are drawn; all of them by `make sweep`."""


class Fails:
    """Fails the append of a number, before it is written or after; then it is dead, or is not."""

    def __init__(self, *, at: int, when: When, dies: bool) -> None:
        self.at = at
        self.when = when
        self.dies = dies
        self.appends = 0
        self.died = anyio.Event()

    @property
    def is_over(self) -> bool:
        """Whether the append that was to fail has been made."""
        return self.appends >= self.at

    async def append(self, write: Callable[[], Awaitable[Sequence[int]]]) -> Sequence[int]:
        self.appends += 1
        if self.died.is_set():
            raise JournalUnavailable("the process is dead")
        if self.appends != self.at:
            return await write()
        if self.when == "after":
            await write()
        if self.dies:
            self.died.set()
        if self.when == "after":
            raise JournalOutcomeUnknown("the line was lost behind the write")
        raise JournalUnavailable("nothing was written")


class FailingMemoryJournal(MemoryJournal):
    fails: Fails | None = None

    async def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
        listing: Listing | None = None,
    ) -> Sequence[int]:
        async def write() -> Sequence[int]:
            return await super(FailingMemoryJournal, self).append(
                conversation_id,
                records,
                epoch=epoch,
                expected_seq=expected_seq,
                is_unfinished=is_unfinished,
                listing=listing,
            )

        return await (write() if self.fails is None else self.fails.append(write))


class FailingSQLiteJournal(SQLiteJournal):
    fails: Fails | None = None

    async def append(
        self,
        conversation_id: str,
        records: Sequence[Record],
        *,
        epoch: int,
        expected_seq: int,
        is_unfinished: bool,
        listing: Listing | None = None,
    ) -> Sequence[int]:
        async def write() -> Sequence[int]:
            return await super(FailingSQLiteJournal, self).append(
                conversation_id,
                records,
                epoch=epoch,
                expected_seq=expected_seq,
                is_unfinished=is_unfinished,
                listing=listing,
            )

        return await (write() if self.fails is None else self.fails.append(write))


FailingJournal = FailingMemoryJournal | FailingSQLiteJournal


class Client:
    """Talks to one conversation, and knows what was acknowledged. Sends again what was not."""

    def __init__(self, conversations: Conversations, seqs: dict[str, int]) -> None:
        self._chat = conversations["c"]
        self._seqs = seqs
        self.turns: dict[str, Turn] = {}

    async def send(self, name: str, on_overlap: OnOverlap) -> None:
        turn = await self._again(
            lambda: self._chat.send(name, message_id=name, on_overlap=on_overlap)
        )
        assert self._seqs.setdefault(name, turn.seq) == turn.seq, "acknowledged at another seq"
        self.turns[name] = turn

    async def _again(self, ask: Callable[[], Awaitable[Turn]]) -> Turn:
        try:
            return await ask()
        except (Unavailable, OutcomeUnknown):
            return await ask()

    async def hold(self, do: Callable[[], Awaitable[object]]) -> None:
        try:
            await do()
        except (NotConfirmable, ConversationNotFound):
            return
        except (Unavailable, OutcomeUnknown):
            await self.hold(do)

    async def talk(self, agent: StepAgent, on_overlap: OnOverlap) -> None:
        """The scenario: A calls two tools, C joins it, B overlaps and asks; pauses between."""
        chat = self._chat
        steps: list[Callable[[], Awaitable[object]]] = [
            lambda: self.send("A", "queue"),
            lambda: self.send("C", "steer"),
            lambda: self._release(agent, "A calls"),
            lambda: self._overlap(on_overlap),
            lambda: self.hold(chat.pause),
            lambda: self._release(agent, "A thinks 1"),
            lambda: self.hold(chat.resume),
        ]
        agent.hold("A calls", "A thinks 1")
        for step in steps:
            await step()
            await _settle()
        await self.finish(agent)

    async def _overlap(self, on_overlap: OnOverlap) -> None:
        try:
            await self.send("B", on_overlap)
        except TurnInProgress:
            assert on_overlap == "reject"

    async def _release(self, agent: StepAgent, point: str) -> None:
        agent.held.pop(point).set()

    async def finish(self, agent: StepAgent) -> None:
        """Everything is sent again, and whatever is held goes on, until all has ended."""
        agent.release()
        for name in ("A", "C", "B"):
            await self.send(name, "queue")
        async with anyio.create_task_group() as group:
            for turn in self.turns.values():
                group.start_soon(turn.end)
            while (await self._chat.at()).turns.has_open_turns:
                await self.hold(self._chat.resume)
                await self.hold(self._chat.confirm)
                await _settle()


async def _settle() -> None:
    """Let everybody else come as far as they can; with a memory journal, that is all the way."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


async def _check(conversations: Conversations, seqs: dict[str, int]) -> None:
    chat = conversations["c"]
    events = await events_of(chat)
    LogReader(events).check()
    assert await chat.view() == View.from_events(events)
    first: dict[str, int] = {}
    for seq, event in enumerate(events, 1):
        message_id = getattr(event, "message_id", None)
        if message_id is not None:
            first.setdefault(message_id, seq)
    assert first == seqs
    assert set(seqs) == {"A", "B", "C"}


async def _die_and_go_on(
    journal: FailingJournal,
    fails: Fails,
    on_overlap: OnOverlap,
    unfinished: Literal["end", "resume"],
) -> None:
    """One process that dies at an append, and the next."""
    seqs: dict[str, int] = {}
    agent = StepAgent({"A": "calls", "B": "asks"})
    journal.fails = fails
    async with anyio.create_task_group() as group:

        async def live() -> None:
            async with verified(agent, journal=journal, unfinished=unfinished) as conversations:
                await Client(conversations, seqs).talk(agent, on_overlap)
            group.cancel_scope.cancel()

        group.start_soon(live)
        await fails.died.wait()
        group.cancel_scope.cancel()
    journal.fails = None
    async with verified(agent, journal=journal, unfinished=unfinished) as conversations:
        await Client(conversations, seqs).finish(agent)
        await _check(conversations, seqs)


def _drawn_appends(whole: Fails) -> Sequence[int]:
    """Return the appends to fail at, of those of a scenario in which none failed."""
    assert 10 < whole.appends < APPENDS_MAX
    return drawn(range(1, whole.appends + 1), SHARE)


@pytest.mark.sweep
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("unfinished", ["end", "resume"])
@pytest.mark.parametrize("on_overlap", POLICIES)
async def test_a_crash_at_any_append_leaves_a_log_that_goes_on(
    on_overlap: OnOverlap, unfinished: Literal["end", "resume"], when: When
) -> None:
    whole = Fails(at=APPENDS_MAX, when=when, dies=True)
    await _die_and_go_on(FailingMemoryJournal(), whole, on_overlap, unfinished)

    for at in _drawn_appends(whole):
        fails = Fails(at=at, when=when, dies=True)
        with anyio.fail_after(60):
            await _die_and_go_on(FailingMemoryJournal(), fails, on_overlap, unfinished)
        assert fails.is_over


@pytest.mark.sweep
@pytest.mark.parametrize("unfinished", ["end", "resume"])
async def test_a_crash_at_any_append_to_a_file_leaves_a_log_that_goes_on(
    unfinished: Literal["end", "resume"], tmp_path: Path
) -> None:
    whole = Fails(at=APPENDS_MAX, when="after", dies=True)
    await _die_and_go_on(FailingSQLiteJournal(tmp_path / "whole.db"), whole, "queue", unfinished)

    for at in _drawn_appends(whole):
        fails = Fails(at=at, when="after" if at % 2 else "before", dies=True)
        journal = FailingSQLiteJournal(tmp_path / f"{at}.db")
        with anyio.fail_after(60):
            await _die_and_go_on(journal, fails, POLICIES[at % 5], unfinished)


@pytest.mark.sweep
@pytest.mark.parametrize(("when", "unfinished"), [("before", "end"), ("after", "resume")])
@pytest.mark.parametrize("on_overlap", POLICIES)
async def test_an_append_that_fails_once_leaves_a_log_that_goes_on(
    on_overlap: OnOverlap, unfinished: Literal["end", "resume"], when: When
) -> None:
    async def go_on_after(fails: Fails) -> None:
        seqs: dict[str, int] = {}
        agent = StepAgent({"A": "calls", "B": "asks"})
        journal = FailingMemoryJournal()
        journal.fails = fails
        with anyio.fail_after(60):
            async with verified(agent, journal=journal, unfinished=unfinished) as conversations:
                await Client(conversations, seqs).talk(agent, on_overlap)
                await _check(conversations, seqs)

    whole = Fails(at=APPENDS_MAX, when=when, dies=False)
    await go_on_after(whole)

    for at in _drawn_appends(whole):
        fails = Fails(at=at, when=when, dies=False)
        await go_on_after(fails)
        assert fails.is_over
