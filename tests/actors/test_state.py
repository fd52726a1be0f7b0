"""The state: the product of all folds, alone and in memory."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import turnkeeper.actors
from tests.actors.logs import Maker
from turnkeeper.actors import _snapshots
from turnkeeper.actors._upcasters import Upcasters
from turnkeeper.actors.errors import JournalRefused
from turnkeeper.actors.events import (
    AgentMessageEvent,
    Event,
    ForkedFromEvent,
    StepFinishedEvent,
    Task,
    TaskListUpdatedEvent,
    TokenUsage,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.journal import Snapshot
from turnkeeper.actors.metrics import Metrics
from turnkeeper.actors.state import ConversationState
from turnkeeper.actors.status import AgentExecutionStatus
from turnkeeper.runtime import InvariantViolation


def _state(*events: Event) -> ConversationState:
    state = ConversationState()
    for event in events:
        state.append_event(event)
    return state


def _day() -> list[Event]:
    """A bit of everything."""
    make = Maker()
    usage = TokenUsage(input_tokens=10, output_tokens=5, cached_tokens=3, cost=0.25, latency_s=1.5)
    return [
        make.system(),
        TurnStartedEvent(**make.stamp(), turn_id="t1"),
        make.user("where is it?", turn_id="t1", message_id="m1"),
        make.action("c1", "r1", turn_id="t1", thinking=True, text="let me see"),
        make.action("c2", "r1", turn_id="t1"),
        make.result("c2"),
        make.error("c1"),
        StepFinishedEvent(**make.stamp(), turn_id="t1", usage=usage),
        TaskListUpdatedEvent(**make.stamp(), tasks=(Task(description="find it"),)),
        make.agent("here", turn_id="t1"),
        StepFinishedEvent(**make.stamp(), turn_id="t1", usage=usage),
        TurnEndedEvent(**make.stamp(), turn_id="t1", outcome="completed"),
        make.unknown(),
        TurnStartedEvent(**make.stamp(), turn_id="t2"),
        make.user("thanks", turn_id="t2", message_id="m2"),
        make.condense("e4", "e5", "e6", "e7", summary="found", offset=2),
        make.action("c3", "r3", turn_id="t2"),
    ]


def test_the_documented_names_work_as_they_are_written() -> None:
    state = ConversationState()
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


def test_each_fold_follows_the_log() -> None:
    state = _state(*_day())

    assert state.seq == 17
    assert [event.id for event in state.view] == ["e1", "e3", "e16-summary", "e10", "e15", "e17"]
    assert [action.tool_call_id for action in state.pending_actions] == ["c3"]
    assert state.agent_execution_status is AgentExecutionStatus.RUNNING
    assert state.metrics == Metrics(
        input_tokens=20,
        output_tokens=10,
        cached_tokens=6,
        total_cost=0.5,
        llm_call_count=2,
        latency_s=3.0,
    )
    assert state.task_list == (Task(description="find it"),)
    assert state.task_list[0].description == "find it"
    assert not state.task_list[0].done
    assert state.iteration == 0
    assert state.at(11).iteration == 2
    assert state.unknown_kinds == {"from_the_future"}
    assert len(state.conversation_history) == 9
    assert state.turns.running is not None


def test_the_state_at_a_seq_is_that_of_the_events_so_far() -> None:
    log = _day()
    state = _state(*log)
    for seq in range(len(log) + 1):
        past = state.at(seq)
        assert past == _state(*log[:seq])
        assert list(past.events) == log[:seq]
        assert past.conversation_history == _state(*log[:seq]).conversation_history
    for beyond in (-1, len(log) + 1):
        with pytest.raises(ValueError, match="seq"):
            state.at(beyond)


def test_the_past_is_not_appended_to() -> None:
    state = _state(*_day())
    with pytest.raises(JournalRefused, match="nothing was written"):
        state.at(3).append_event(AgentMessageEvent(content="x"))
    assert state.seq == 17


def test_a_state_that_only_folds_keeps_no_events_and_says_so() -> None:
    state = ConversationState()
    for event in _day():
        state.fold(event)
    assert state == _state(*_day())
    with pytest.raises(InvariantViolation, match="journal"):
        len(state.events)
    with pytest.raises(InvariantViolation):
        state.append_event(AgentMessageEvent(content="x"))


def test_a_condensed_conversation_holds_no_more_than_a_fresh_one_with_the_same_view() -> None:
    """Counted in what a snapshot holds: nothing grows with the log."""

    def snapshot(rounds: int) -> int:
        make = Maker()
        state = ConversationState()
        for n in range(rounds):
            state.fold(TurnStartedEvent(**make.stamp(), turn_id=f"t{n}"))
            state.fold(make.user(f"{n:06}", message_id=f"m{n:06}", turn_id=f"t{n}"))
            state.fold(make.action(f"c{n:06}", f"r{n:06}"))
            state.fold(make.result(f"c{n:06}"))
            state.fold(TurnEndedEvent(**make.stamp(), turn_id=f"t{n}", outcome="completed"))
            state.fold(make.condense(*list(state.view)[:-1]))
        return len(state.to_snapshot().payload)

    assert snapshot(5_000) < snapshot(2_500) + 1_000


# --- forks and retractions ------------------------------------------------------------------------


def test_a_fork_goes_on_from_its_parents_state_and_answers_its_open_calls() -> None:
    parent = _state(*_day())
    make = Maker("f")
    fork = _state(*_day()[:6])
    begun: list[Event] = [
        ForkedFromEvent(**make.stamp(), conversation_id="parent", seq=6),
        make.error("c1", "not run here"),
        TurnEndedEvent(**make.stamp(), turn_id="t1", outcome="interrupted"),
    ]
    assert fork == parent.at(6)
    assert [action.tool_call_id for action in fork.pending_actions] == ["c1"]
    assert fork.admission.check(begun) is None
    for event in begun:
        fork.append_event(event)

    assert not fork.pending_actions
    assert fork.agent_execution_status is AgentExecutionStatus.IDLE
    assert ConversationState.from_events(fork.events) == (fork, ())
    assert parent == _state(*_day())


def test_a_turn_is_retracted_as_a_whole_and_the_log_keeps_it() -> None:
    log = _day()[:12]
    state = _state(*log)
    before = state.at(2).view
    turn = state.at(11).running_turn_events()
    assert turn == ("e3", "e4", "e5", "e10")

    ids = tuple(event.id for event in state.view if event.id != "e1")
    state.append_event(Maker("x").retract(*ids))

    assert list(state.view) == list(before)
    assert list(state.events)[:12] == log
    assert len(state.conversation_history) == 7
    assert ConversationState.from_events(state.events) == (state, ())


def test_a_running_turn_of_which_a_part_is_forgotten_is_not_there_to_be_retracted() -> None:
    make = Maker()
    state = _state(
        TurnStartedEvent(**make.stamp(), turn_id="t1"),
        make.user(turn_id="t1"),
        make.agent(turn_id="t1"),
    )
    assert state.running_turn_events() == ("e2", "e3")
    state.append_event(make.condense("e2", summary="s", offset=0))
    assert state.running_turn_events() is None
    assert ConversationState.from_events(state.events) == (state, ())
    state.append_event(TurnEndedEvent(**make.stamp(), turn_id="t1", outcome="completed"))
    state.append_event(TurnStartedEvent(**make.stamp(), turn_id="t2"))
    assert state.running_turn_events() == ()


# --- snapshots ------------------------------------------------------------------------------------


def test_a_state_that_was_restored_goes_on_as_if_it_had_never_stopped() -> None:
    log = _day()
    for seq in range(len(log) + 1):
        state = _state(*log[:seq])
        restored = ConversationState.from_snapshot(state.to_snapshot())
        assert restored == state
        assert restored is not None
        for event in log[seq:]:
            assert restored.admission.check((event,)) is None
            restored.fold(event)
        assert restored == _state(*log)


def test_a_snapshot_that_does_not_fit_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = _state(*_day()).to_snapshot()
    assert ConversationState.from_snapshot(snapshot) is not None

    for spoilt in (
        Snapshot(snapshot.seq + 1, snapshot.version, snapshot.payload),
        Snapshot(snapshot.seq, "0;", snapshot.payload),
        Snapshot(snapshot.seq, snapshot.version, snapshot.payload[:-1]),
        Snapshot(snapshot.seq, snapshot.version, b"{}"),
        Snapshot(snapshot.seq, snapshot.version, snapshot.payload[:-1] + b',"more":1}'),
    ):
        assert ConversationState.from_snapshot(spoilt) is None

    learnt = Upcasters({("from_the_future", 1): lambda record: record})
    monkeypatch.setattr(_snapshots, "UPCASTERS", learnt)
    assert ConversationState.from_snapshot(snapshot) is None, "it passed over what is known now"


def test_the_same_events_give_the_same_snapshot_in_every_process_and_under_every_hash_seed() -> (
    None
):
    program = (
        "import hashlib, sys;"
        "sys.path.insert(0, sys.argv[1]);"
        "from tests.actors.test_state import _day, _state;"
        "print(hashlib.sha256(_state(*_day()).to_snapshot().payload).hexdigest())"
    )
    root = Path(__file__).parents[2]
    printed = {
        subprocess.run(
            [sys.executable, "-c", program, str(root)],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(printed) == 1


# --- the core is pure -----------------------------------------------------------------------------


def test_the_core_imports_nothing_that_waits_and_no_clock() -> None:
    """Pure and synchronous: no event loop, no thread, no file, no random number."""
    forbidden = {
        "anyio",
        "asyncio",
        "trio",
        "time",
        "random",
        "uuid",
        "secrets",
        "os.path",
        "sqlite3",
    }
    core = (
        *("_frozen", "_parking", "_properties", "_snapshots", "_ties", "_upcasters", "_wire"),
        *("admission", "condensers", "events", "llm", "metrics", "state", "status", "stuck"),
        *("turns", "view"),
    )
    folder = Path(turnkeeper.actors.__file__).parent
    for name in core:
        tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        imported = {
            module
            for node in ast.walk(tree)
            for module in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert not imported & forbidden, name


def test_parts_of_events_are_validated() -> None:
    with pytest.raises(ValidationError):
        TaskListUpdatedEvent(tasks=(Task(description="x", done="perhaps"),))  # type: ignore[arg-type]
