"""States that stand alone over a journal file: the synchronous shell."""

from __future__ import annotations

import errno
import gc
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.actors.core.logs import Maker
from tests.actors.core.test_state import day
from turnkeeper.actors.core.admission import AdmissionRefused, Appended, Duplicate
from turnkeeper.actors.core.records import decode_record, encode_record
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.core.status import AgentExecutionStatus
from turnkeeper.actors.core.view import View
from turnkeeper.actors.errors import (
    ConversationNotFound,
    EventIdConflict,
    Fenced,
    InvalidInput,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
    MessageIdConflict,
)
from turnkeeper.actors.events import (
    AgentMessageEvent,
    CondensationEvent,
    Event,
    ForkedFromEvent,
    MessageQueuedEvent,
    MessageWithdrawnEvent,
    StepFinishedEvent,
    TokenUsage,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    is_seen_by_model,
)
from turnkeeper.actors.journal import Claim, Snapshot
from turnkeeper.actors.journals.sqlite import state as state_module
from turnkeeper.actors.journals.sqlite.journal import SQLiteJournal
from turnkeeper.actors.journals.sqlite.state import ConversationState
from turnkeeper.runtime import Ports


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
            return [decode_record(conversation_id, record).event for record in records]

    return anyio.run(read)


def _write_by_another(folder: Path, conversation_id: str, *events: Event) -> None:
    """Append as another owner does, whatever admission would say."""

    async def write() -> None:
        async with SQLiteJournal(folder / "conversations.db") as journal:
            claim = await journal.claim(conversation_id)
            await journal.append(
                conversation_id,
                [encode_record(event) for event in events],
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
        "from turnkeeper.actors.journals.sqlite.state import ConversationState;"
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
        "from turnkeeper.actors.journals.sqlite.state import ConversationState;"
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
    assert Folded.from_events(_read_by_another(folder, "c")) == (state._folded, ())


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
    replayed, removed = Folded.from_events(log)
    assert removed == ()
    assert replayed == state._folded


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


STARTED = TurnStartedEvent(turn_id="t1")
WAITING = MessageQueuedEvent(turn_id="t2", message_id="b", content="B")
WITHDRAWN = MessageWithdrawnEvent(turn_id="t2", message_id="b")
ENDED = TurnEndedEvent(turn_id="t1", outcome="completed")


@pytest.mark.parametrize(
    ("events", "is_unfinished"),
    [
        ([STARTED], True),
        ([STARTED, ENDED], False),
        ([STARTED, WAITING, ENDED], True),
        ([STARTED, WAITING, WITHDRAWN], True),
        ([STARTED, WAITING, ENDED, WITHDRAWN], False),
    ],
)
def test_the_journal_knows_if_a_turn_runs_or_a_message_waits(
    folder: Path, events: Sequence[Event], is_unfinished: bool
) -> None:
    with ConversationState(persistence_dir=folder, conversation_id="c") as state:
        for event in events:
            state.append_event(event)

    async def unfinished() -> list[str]:
        async with SQLiteJournal(folder / "conversations.db", read_only=True) as journal:
            return [info.conversation_id for info in await journal.find_abandoned()]

    assert anyio.run(unfinished) == ["c"] * is_unfinished


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


def test_a_state_that_is_collected_while_another_one_is_opened_stops_nobody(folder: Path) -> None:
    """The collector may run its finalizer in a thread that holds the lock of the open files."""
    make = Maker()
    state = ConversationState(persistence_dir=folder, conversation_id="c")
    state.append_event(make.user())
    (shared,) = state_module._in_use.values()

    with state_module._in_use_lock:
        del state
        gc.collect()
        assert len(shared.users) == 1
    shared.ended.wait(60)
    assert not state_module._in_use
    _write_by_another(folder, "c", make.agent())


def test_every_wait_for_the_file_of_a_state_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer, may_close = threading.Event(), threading.Event()
    claim, leave = SQLiteJournal.claim, SQLiteJournal._leave

    async def claim_late(self: SQLiteJournal, conversation_id: str) -> Claim:
        assert may_answer.wait(60)
        return await claim(self, conversation_id)

    async def leave_late(self: SQLiteJournal) -> None:
        assert may_close.wait(60)
        await leave(self)

    state = ConversationState(persistence_dir=folder, conversation_id="c")
    event = Maker().user()
    with monkeypatch.context() as patched:
        patched.setattr(SQLiteJournal, "claim", claim_late)
        patched.setattr(state_module, "_CALL_WAIT_S", 0.05)
        with pytest.raises(JournalOutcomeUnknown, match="has not answered"):
            state.append_event(event)
        may_answer.set()
    state.append_event(event)
    assert state.seq == 1

    monkeypatch.setattr(SQLiteJournal, "_leave", leave_late)
    monkeypatch.setattr(state_module, "_CLOSE_WAIT_S", 0.05)
    with pytest.raises(JournalUnavailable, match="not closed yet"):
        state.close()
    may_close.set()
    assert _read_by_another(folder, "c") == [event]


def test_an_error_of_time_that_is_raised_in_the_file_s_thread_comes_through_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder on another machine may raise it: `ETIMEDOUT` is a `TimeoutError` in Python."""
    refused = TimeoutError(errno.ETIMEDOUT, "the other machine does not answer")

    def fail(*_: object, **__: object) -> None:
        raise refused

    with closing(ConversationState(persistence_dir=folder, conversation_id="c")) as state:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "mkdir", fail)
            with pytest.raises(TimeoutError) as raised:
                state.append_event(Maker().user())
        assert raised.value is refused
        state.append_event(Maker().user())


def test_a_thread_that_does_not_start_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "_START_WAIT_S", 0.05)
    ports = Ports(start_thread=lambda _name, _target: None)
    state = ConversationState(persistence_dir=folder, conversation_id="c", ports=ports)
    with pytest.raises(JournalUnavailable, match="no thread could be started"):
        state.append_event(Maker().user())


# --- both in memory and over a file --------------------------------------------------------------


@pytest.fixture(params=["in memory", "over a file"])
def make_state(
    request: pytest.FixtureRequest, folder: Path
) -> Iterator[Callable[..., ConversationState]]:
    states: list[ConversationState] = []

    def make(*events: Event) -> ConversationState:
        if request.param == "in memory":
            state = ConversationState()
        else:
            state = ConversationState(persistence_dir=folder, conversation_id=f"c{len(states)}")
        states.append(state)
        for event in events:
            state.append_event(event)
        return state

    yield make
    for state in states:
        state.close()


def test_the_documented_names_work_as_they_are_written(
    make_state: Callable[..., ConversationState],
) -> None:
    state = make_state()
    state.append_event(UserMessageEvent(content="Hello, agent!"))
    assert len(state.events) == 1
    assert len(state.view) == 1
    assert state.agent_execution_status is AgentExecutionStatus.IDLE
    assert state.iteration == 0
    (message,) = [event.to_llm_message() for event in state.conversation_history]
    assert message == {"role": "user", "content": "Hello, agent!"}
    assert state.metrics.input_tokens == state.metrics.output_tokens == 0
    assert state.metrics.total_cost == state.metrics.llm_call_count == 0
    assert list(state.task_list) == []
    assert not state.pending_actions


def test_the_state_at_a_seq_is_that_of_the_events_so_far(
    make_state: Callable[..., ConversationState],
) -> None:
    log = day()
    state = make_state(*log)
    for seq in range(len(log) + 1):
        past = state.at(seq)
        assert past._folded == Folded.from_events(log[:seq])[0]
        assert list(past.events) == log[:seq]
        assert past.conversation_history == tuple(filter(is_seen_by_model, log[:seq]))
    for beyond in (-1, len(log) + 1):
        with pytest.raises(ValueError, match="seq"):
            state.at(beyond)


def test_the_past_takes_no_appends(make_state: Callable[..., ConversationState]) -> None:
    state = make_state(*day())
    with pytest.raises(JournalRefused, match="nothing was written"):
        state.at(3).append_event(AgentMessageEvent(content="x"))
    assert state.seq == 17


def test_the_state_at_the_present_seq_of_an_unrepaired_log_is_the_state(
    make_state: Callable[..., ConversationState], folder: Path
) -> None:
    make = Maker()
    _write_by_another(folder, "c", make.user(), make.action("c1"), make.user(), make.agent())
    with ConversationState.load(folder, "c") as state:
        assert [event.kind for event in state.view] == ["user_message"] * 2 + ["agent_message"]
        assert state.at(4) == state
        assert state.at(4).view == View.from_events(list(state.events))


# --- saving --------------------------------------------------------------------------------------


def _snapshot_of(folder: Path, conversation_id: str) -> Snapshot | None:
    async def read() -> Snapshot | None:
        async with SQLiteJournal(folder / "conversations.db", read_only=True) as journal:
            return await journal.read_snapshot(conversation_id)

    return anyio.run(read)


def test_saving_a_log_that_needs_a_repair_does_not_hide_the_need(folder: Path) -> None:
    make = Maker()
    _write_by_another(folder, "c", make.user(), make.action("c1"), make.user())
    with ConversationState.load(folder, "c") as state:
        state.save()
    assert _snapshot_of(folder, "c") is None

    with ConversationState.load(folder, "c") as state:
        state.append_event(make.agent())
        state.save()
    assert _snapshot_of(folder, "c") is not None
    log = _read_by_another(folder, "c")
    assert [event.kind for event in log[3:]] == ["condensation", "agent_message"]
    assert Folded.from_events(log) == (state._folded, ())


@pytest.mark.parametrize("saved_at", [1, 4])
def test_saving_an_observed_log_does_not_make_its_violations_count_as_admitted(
    folder: Path, saved_at: int
) -> None:
    """Also if the snapshot is of the sound beginning, and the violations come after it."""
    make = Maker()
    written: list[Event] = [make.user(), make.action("c1"), make.user(), make.agent()]
    with ConversationState(
        persistence_dir=folder, conversation_id="c", admission="observe"
    ) as state:
        for n, event in enumerate(written, 1):
            state.append_event(event)
            if n == saved_at:
                state.save()

    with ConversationState.load(folder, "c") as state:
        assert [event.id for event in state.view] == ["e1", "e3", "e4"]
        state.append_event(make.user("and now?"))
    log = _read_by_another(folder, "c")
    assert [event.kind for event in log[4:]] == ["condensation", "user_message"]
    assert Folded.from_events(log)[1] == ()


# --- closing -------------------------------------------------------------------------------------


def test_a_closed_state_says_that_it_is_closed(folder: Path) -> None:
    state = ConversationState(persistence_dir=folder, conversation_id="c")
    state.append_event(Maker().user())
    state.close()

    assert len(state.view) == 1
    for use in (
        lambda: state.append_event(Maker("x").user()),
        lambda: list(state.events),
        state.save,
        lambda: state.at(1),
    ):
        with pytest.raises(JournalRefused, match="conversation c is closed"):
            use()


def test_a_state_may_be_entered_again_and_inside_itself(folder: Path) -> None:
    make = Maker()
    state = ConversationState(persistence_dir=folder, conversation_id="c")
    for _ in range(2):
        with state:
            with state:
                state.append_event(make.user())
            state.append_event(make.user())
        _write_by_another(folder, "c", make.user())
    with state:
        assert state.append_event(make.user()) == Appended(7)
        assert state.seq == 7


def test_an_event_sent_again_is_known_though_its_id_is_not_the_newest() -> None:
    state = ConversationState()
    later, earlier = Maker("z").user(), Maker("a").user()
    state.append_event(later)
    state.append_event(earlier)

    assert state.append_event(later) == Duplicate(1)
    assert [event.id for event in state.events] == [later.id, earlier.id]


@pytest.mark.parametrize(
    "event",
    [
        UserMessageEvent(content="A").model_copy(update={"images": (5,)}),
        AgentMessageEvent(content="A").model_copy(update={"interrupted": "perhaps"}),
        StepFinishedEvent.model_construct(usage=TokenUsage.model_construct(cost=math.nan)),
    ],
    ids=lambda event: event.kind,
)
def test_an_event_that_could_not_be_read_again_is_refused(tmp_path: Path, event: Event) -> None:
    state = ConversationState(persistence_dir=tmp_path, conversation_id="c")
    with closing(state):
        state.append_event(UserMessageEvent(content="A"))
        with pytest.raises(InvalidInput, match="holds an invalid value"):
            state.append_event(event)
        state.append_event(UserMessageEvent(content="B"))
    state = ConversationState.load(tmp_path, "c")
    with closing(state):
        assert [event.kind for event in state.events] == ["user_message", "user_message"]


def test_a_seq_in_an_event_has_64_bits() -> None:
    with pytest.raises(ValueError, match="less than"):
        ForkedFromEvent(conversation_id="c", seq=10**5000)
    with pytest.raises(ValueError, match="less than"):
        CondensationEvent(forgotten_event_ids=(), summary_offset=10**5000)
