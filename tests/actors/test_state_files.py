"""States that stand alone over a journal file: the synchronous shell."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.actors.logs import Maker
from turnkeeper.actors._records import logged_event, record_of
from turnkeeper.actors._sqlite_journal import SQLiteJournal
from turnkeeper.actors.admission import AdmissionRefused, Appended, Duplicate
from turnkeeper.actors.errors import (
    ConversationNotFound,
    EventIdConflict,
    Fenced,
    JournalOutcomeUnknown,
    JournalRefused,
    MessageIdConflict,
)
from turnkeeper.actors.events import Event, TurnStartedEvent, UserMessageEvent
from turnkeeper.actors.state import ConversationState


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "conversations"


@pytest.fixture
def open_states() -> Iterator[list[ConversationState]]:
    states: list[ConversationState] = []
    yield states
    for state in states:
        state.close()


def _read_by_another(folder: Path, conversation_id: str) -> list[Event]:
    """The log as another reader of the file finds it."""

    async def read() -> list[Event]:
        async with SQLiteJournal(folder / "conversations.db", read_only=True) as journal:
            records = await journal.read(conversation_id)
            return [logged_event(conversation_id, record).event for record in records]

    return anyio.run(read)


def _write_by_another(folder: Path, conversation_id: str, *events: Event) -> None:
    """Append as another owner does, whatever admission would say."""

    async def write() -> None:
        async with SQLiteJournal(folder / "conversations.db") as journal:
            claim = await journal.claim(conversation_id)
            await journal.append(
                conversation_id,
                [record_of(event) for event in events],
                epoch=claim.epoch,
                expected_seq=claim.head + 1,
                is_unfinished=False,
            )

    folder.mkdir(exist_ok=True)
    anyio.run(write)


def test_the_documented_names_work_with_a_folder(folder: Path) -> None:
    with ConversationState(persistence_dir=str(folder), conversation_id="my-task-123") as state:
        state.append_event(UserMessageEvent(content="Hello, agent!"))
        state.save()
    loaded = ConversationState.load(persistence_dir=str(folder), conversation_id="my-task-123")
    with loaded:
        assert loaded == state
        assert [event.to_llm_message()["content"] for event in loaded.conversation_history] == [
            "Hello, agent!"
        ]


def test_each_append_is_durable_when_it_returns(folder: Path) -> None:
    make = Maker()
    with ConversationState(persistence_dir=folder, conversation_id="c") as state:
        for n in range(1, 4):
            assert state.append_event(make.user()) == Appended(n)
            assert len(_read_by_another(folder, "c")) == n


def test_what_a_process_appended_is_there_after_it_was_killed(folder: Path) -> None:
    program = (
        "import os, sys;"
        "from turnkeeper.actors.state import ConversationState;"
        "from turnkeeper.actors.events import UserMessageEvent;"
        "state = ConversationState(persistence_dir=sys.argv[1], conversation_id='c');"
        "state.append_event(UserMessageEvent(content='before the end'));"
        "os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(folder)], check=False)
    assert ended.returncode == -9

    with ConversationState.load(persistence_dir=folder, conversation_id="c") as state:
        assert [event.kind for event in state.events] == ["user_message"]
        assert state.append_event(UserMessageEvent(content="after it")) == Appended(2)


def test_leaving_the_program_waits_for_nothing(folder: Path) -> None:
    program = (
        "import sys;"
        "from turnkeeper.actors.state import ConversationState;"
        "from turnkeeper.actors.events import UserMessageEvent;"
        "state = ConversationState(persistence_dir=sys.argv[1], conversation_id='c');"
        "state.append_event(UserMessageEvent(content='x'))"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == ""


def test_loading_what_is_not_there_raises_and_creates_nothing(folder: Path) -> None:
    with pytest.raises(ConversationNotFound):
        ConversationState.load(persistence_dir=folder, conversation_id="c")
    assert not folder.exists()

    with ConversationState(persistence_dir=folder, conversation_id="c") as state:
        assert state.seq == 0
        assert not folder.exists(), "nothing is made before the first append"
        state.append_event(UserMessageEvent(content="x"))
    with pytest.raises(ConversationNotFound):
        ConversationState.load(persistence_dir=folder, conversation_id="other")
    with pytest.raises(ConversationNotFound):
        _read_by_another(folder, "other")


def test_opening_a_conversation_that_is_there_goes_on_with_it(folder: Path) -> None:
    make = Maker()
    with ConversationState(persistence_dir=folder, conversation_id="c") as state:
        state.append_event(make.user())
        state.append_event(make.action("c1"))
    with ConversationState(persistence_dir=folder, conversation_id="c") as again:
        assert again == state
        with pytest.raises(AdmissionRefused):
            again.append_event(make.user("too early"))
        again.append_event(make.result("c1"))
        assert [event.kind for event in again.view] == ["user_message", "action", "observation"]


def test_states_of_one_process_share_the_file(folder: Path) -> None:
    make = Maker()
    with (
        ConversationState(persistence_dir=folder, conversation_id="a") as a,
        ConversationState(persistence_dir=folder, conversation_id="b") as b,
    ):
        assert a.append_event(make.user("to a")) == Appended(1)
        assert b.append_event(make.user("to b")) == Appended(1)
        assert a.append_event(make.user("to a")) == Appended(2)


def test_what_others_have_written_since_it_was_loaded_is_taken_in_before_an_append(
    folder: Path, open_states: list[ConversationState]
) -> None:
    make = Maker()
    _write_by_another(folder, "c", make.user())
    state = ConversationState.load(persistence_dir=folder, conversation_id="c")
    open_states.append(state)
    _write_by_another(folder, "c", make.action("c1"))
    assert state.seq == 1

    with pytest.raises(AdmissionRefused):
        state.append_event(make.user("too early"))
    assert state.seq == 2
    assert state.append_event(make.result("c1")) == Appended(3)
    assert ConversationState.from_events(_read_by_another(folder, "c")) == (state, ())


def test_of_two_states_of_one_conversation_the_older_is_shut_out_for_good(
    folder: Path, open_states: list[ConversationState]
) -> None:
    make = Maker()
    first = ConversationState(persistence_dir=folder, conversation_id="c")
    open_states.append(first)
    first.append_event(make.user())
    second = ConversationState.load(persistence_dir=folder, conversation_id="c")
    open_states.append(second)
    second.append_event(make.agent())

    for _ in range(2):
        with pytest.raises(Fenced):
            first.append_event(make.user("late"))
    assert second.append_event(make.user("in time")) == Appended(3)
    assert len(_read_by_another(folder, "c")) == 3


def test_a_log_from_elsewhere_is_repaired_before_anything_else_is_appended(folder: Path) -> None:
    make = Maker()
    _write_by_another(folder, "c", make.user(), make.action("c1"), make.user(), make.result("c9"))
    with ConversationState.load(persistence_dir=folder, conversation_id="c") as state:
        assert [event.id for event in state.view] == ["e1", "e3"]
        assert len(_read_by_another(folder, "c")) == 4, "loading only reads"
        state.append_event(make.agent())

    log = _read_by_another(folder, "c")
    assert [event.kind for event in log[4:]] == ["condensation", "agent_message"]
    replayed, removed = ConversationState.from_events(log)
    assert removed == ()
    assert replayed == state


def test_the_same_event_is_in_the_log_once(folder: Path) -> None:
    with ConversationState(persistence_dir=folder, conversation_id="c") as state:
        state.append_event(Maker().user("once", message_id="m1"))
        assert state.append_event(Maker().user("once", message_id="m1")) == Duplicate(1)
        with pytest.raises(EventIdConflict):
            state.append_event(Maker().user("otherwise"))
        with pytest.raises(MessageIdConflict):
            state.append_event(Maker("x").user("once more", message_id="m1"))
        assert state.append_event(Maker("y").user()) == Appended(2), "it is still the owner"


def test_an_append_of_unknown_outcome_is_sent_again_and_is_there_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = SQLiteJournal.append
    fails = [True]

    async def append(journal: SQLiteJournal, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the real one
        seqs = await written(journal, *args, **kwargs)
        if fails.pop():
            raise JournalOutcomeUnknown("the connection went away")
        return seqs

    monkeypatch.setattr(SQLiteJournal, "append", append)
    with ConversationState(persistence_dir=folder, conversation_id="c") as state:
        event = Maker().user()
        with pytest.raises(JournalOutcomeUnknown):
            state.append_event(event)
        assert state.append_event(event) == Duplicate(1)
        monkeypatch.undo()
        assert state.append_event(Maker("x").user()) == Appended(2)
        assert state.seq == 2


def test_a_snapshot_is_a_cache_that_loading_and_looking_back_start_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Maker()
    with ConversationState(persistence_dir=folder, conversation_id="c") as state:
        for _ in range(5):
            state.append_event(make.user())
        state.save()
        for _ in range(3):
            state.append_event(make.agent())

    read_from: list[int] = []
    read = SQLiteJournal.read

    async def reading(journal: SQLiteJournal, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as the real one
        read_from.append(kwargs["after"])
        return await read(journal, *args, **kwargs)

    monkeypatch.setattr(SQLiteJournal, "read", reading)
    with ConversationState.load(persistence_dir=folder, conversation_id="c") as loaded:
        assert loaded == state
        assert read_from[0] == 5
        read_from.clear()
        assert loaded.at(7).seq == 7
        assert read_from == [5]
        assert loaded.at(3).seq == 3
        assert read_from[1] == 0


def test_events_are_read_as_they_are_asked_for(folder: Path) -> None:
    make = Maker()
    log = [make.user(f"{n}") for n in range(6)]
    with ConversationState(persistence_dir=folder, conversation_id="c") as state:
        for event in log:
            state.append_event(event)
        events = state.events
        state.append_event(make.agent())

        assert len(events) == 6
        assert list(events) == log
        assert events[2] == log[2]
        assert events[-1] == log[-1]
        assert list(events[1:4]) == log[1:4]
        assert list(events[::-2]) == log[::-2]
        assert list(events[4:2]) == []
        assert events == log
        with pytest.raises(IndexError):
            events[6]


def test_the_journal_knows_that_a_turn_is_unfinished(folder: Path) -> None:
    with ConversationState(persistence_dir=folder, conversation_id="c") as state:
        state.append_event(TurnStartedEvent(turn_id="t1"))

    async def unfinished() -> list[str]:
        async with SQLiteJournal(folder / "conversations.db", read_only=True) as journal:
            return [info.conversation_id for info in await journal.list(only_unfinished=True)]

    assert anyio.run(unfinished) == ["c"]


def test_saving_what_has_no_folder_is_refused() -> None:
    with pytest.raises(JournalRefused, match="persistence_dir"):
        ConversationState().save()


def test_a_state_that_is_let_go_of_frees_the_file(folder: Path) -> None:
    make = Maker()
    state = ConversationState(persistence_dir=folder, conversation_id="c")
    state.append_event(make.user())
    state.close()
    state.close()
    _write_by_another(folder, "c", make.agent())
    assert len(_read_by_another(folder, "c")) == 2
