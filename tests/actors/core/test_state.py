"""The product of all folds of a log."""

from __future__ import annotations

import ast
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

import turnkeeper.actors
from tests.actors.core.logs import Maker
from turnkeeper.actors.core import snapshots
from turnkeeper.actors.core.metrics import Metrics, ModelMetrics
from turnkeeper.actors.core.state import Folded
from turnkeeper.actors.core.status import AgentExecutionStatus
from turnkeeper.actors.events import (
    EVENT_CLASSES,
    Event,
    ForkedFromEvent,
    MessageQueuedEvent,
    StepFinishedEvent,
    Task,
    TaskListUpdatedEvent,
    TokenUsage,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.journal import Snapshot
from turnkeeper.actors.values.upcasters import Upcasters


def _state(*events: Event) -> Folded:
    state = Folded()
    _append(state, *events)
    return state


def _append(state: Folded, *events: Event) -> None:
    for event in events:
        assert state.admission.check((event,)) is None, event
        state.fold(event)


def day() -> list[Event]:
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


def test_each_fold_follows_the_log() -> None:
    state = _state(*day())

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
        by_model={
            "": ModelMetrics(
                input_tokens=20,
                output_tokens=10,
                cached_tokens=6,
                total_cost=0.5,
                llm_call_count=2,
                latency_s=3.0,
            )
        },
    )
    assert state.task_list == (Task(description="find it"),)
    assert state.task_list[0].description == "find it"
    assert not state.task_list[0].done
    assert state.iteration == 0
    assert _state(*day()[:11]).iteration == 2
    assert state.unknown_kinds == {"from_the_future"}
    assert state.turns.running is not None


def test_the_time_of_an_event_is_exact_in_any_year() -> None:
    late = datetime(9000, 1, 1, tzinfo=UTC) + timedelta(microseconds=7)

    state = _state(UserMessageEvent(content="hello", timestamp=late))

    assert state.active_us == (late - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def test_a_condensed_conversation_holds_no_more_than_a_fresh_one_with_the_same_view() -> None:
    """Counted in what a snapshot holds: nothing grows with the log."""

    def snapshot(rounds: int) -> int:
        make = Maker()
        state = Folded()
        for n in range(rounds):
            state.fold(TurnStartedEvent(**make.stamp(), turn_id=f"t{n}"))
            state.fold(make.user(f"{n:06}", message_id=f"m{n:06}", turn_id=f"t{n}"))
            state.fold(make.action(f"c{n:06}", f"r{n:06}"))
            state.fold(make.result(f"c{n:06}"))
            state.fold(TurnEndedEvent(**make.stamp(), turn_id=f"t{n}", outcome="completed"))
            state.fold(make.condense(*list(state.view)[:-1]))
        return len(state.to_snapshot().payload)

    assert snapshot(5_000) < snapshot(2_500) + 1_000


def test_metrics_are_kept_by_model_with_reasoning_and_cache_tokens() -> None:
    make = Maker()
    calls = [
        TokenUsage(model="a", input_tokens=10, reasoning_tokens=3, cost=0.5),
        TokenUsage(model="b", output_tokens=2, cache_written_tokens=7, cost=0.25),
        TokenUsage(model="a", input_tokens=1, reasoning_tokens=1, cost=0.25),
    ]
    state = _state(*(StepFinishedEvent(**make.stamp(), usage=usage) for usage in calls))

    metrics = state.metrics
    assert (metrics.total_cost, metrics.llm_call_count) == (1.0, 3)
    assert (metrics.reasoning_tokens, metrics.cache_written_tokens) == (4, 7)
    assert list(metrics.by_model) == ["a", "b"]
    assert metrics.by_model["a"] == ModelMetrics(
        input_tokens=11, reasoning_tokens=4, total_cost=0.75, llm_call_count=2
    )
    assert Folded.from_snapshot(state.to_snapshot()) == state


# --- forks and retractions ------------------------------------------------------------------------


def test_a_fork_goes_on_from_its_parents_state_and_answers_its_open_calls() -> None:
    make = Maker("f")
    log = day()[:6]
    fork = _state(*log)
    begun: list[Event] = [
        ForkedFromEvent(**make.stamp(), conversation_id="parent", seq=6),
        make.error("c1", "not run here"),
        TurnEndedEvent(**make.stamp(), turn_id="t1", outcome="interrupted"),
    ]
    assert [action.tool_call_id for action in fork.pending_actions] == ["c1"]
    assert fork.admission.check(begun) is None
    _append(fork, *begun)

    assert not fork.pending_actions
    assert fork.agent_execution_status is AgentExecutionStatus.IDLE
    assert Folded.from_events([*log, *begun]) == (fork, ())


def test_a_turn_is_retracted_as_a_whole() -> None:
    log = day()[:12]
    state = _state(*log)
    assert _state(*log[:11]).running_turn_events() == ("e3", "e4", "e5", "e10")

    retraction = Maker("x").retract(*(event.id for event in state.view if event.id != "e1"))
    _append(state, retraction)

    assert list(state.view) == list(_state(*log[:2]).view)
    assert Folded.from_events([*log, retraction]) == (state, ())


def test_a_running_turn_of_which_a_part_is_forgotten_is_not_there_to_be_retracted() -> None:
    make = Maker()
    log: list[Event] = [
        TurnStartedEvent(**make.stamp(), turn_id="t1"),
        make.user(turn_id="t1"),
        make.agent(turn_id="t1"),
    ]
    assert _state(*log).running_turn_events() == ("e2", "e3")
    log.append(make.condense("e2", summary="s", offset=0))
    assert _state(*log).running_turn_events() is None
    assert Folded.from_events(log) == (_state(*log), ())
    log.append(TurnEndedEvent(**make.stamp(), turn_id="t1", outcome="completed"))
    log.append(TurnStartedEvent(**make.stamp(), turn_id="t2"))
    assert _state(*log).running_turn_events() == ()


# --- snapshots ------------------------------------------------------------------------------------


def test_a_state_that_was_restored_goes_on_as_if_it_had_never_stopped() -> None:
    log = day()
    for seq in range(len(log) + 1):
        state = _state(*log[:seq])
        restored = Folded.from_snapshot(state.to_snapshot())
        assert restored == state
        assert restored is not None
        for event in log[seq:]:
            assert restored.admission.check((event,)) is None
            restored.fold(event)
        assert restored == _state(*log)


def test_a_snapshot_holds_the_chat_messages_that_wait() -> None:
    make = Maker()
    waiting = [
        MessageQueuedEvent(**make.stamp(), turn_id=f"t{n}", message_id=f"m{n}", content="x")
        for n in (2, 3)
    ]
    state = _state(
        TurnStartedEvent(**make.stamp(), turn_id="t1"),
        make.user(turn_id="t1", message_id="m1"),
        *waiting,
    )

    restored = Folded.from_snapshot(state.to_snapshot())

    assert restored is not None
    assert list(restored.turns.queued.items()) == [("m2", waiting[0]), ("m3", waiting[1])]


def test_a_snapshot_that_does_not_fit_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = _state(*day()).to_snapshot()
    assert Folded.from_snapshot(snapshot) is not None

    for spoilt in (
        Snapshot(snapshot.seq + 1, snapshot.version, snapshot.payload),
        Snapshot(snapshot.seq, "0;", snapshot.payload),
        Snapshot(snapshot.seq, snapshot.version, snapshot.payload[:-1]),
        Snapshot(snapshot.seq, snapshot.version, b"{}"),
        Snapshot(snapshot.seq, snapshot.version, snapshot.payload[:-1] + b',"more":1}'),
    ):
        assert Folded.from_snapshot(spoilt) is None

    learnt = Upcasters({("from_the_future", 1): lambda record: record})
    monkeypatch.setattr(snapshots, "UPCASTERS", learnt)
    assert Folded.from_snapshot(snapshot) is None, "it passed over what is known now"


def test_the_same_events_give_the_same_snapshot_in_every_process_and_under_every_hash_seed() -> (
    None
):
    program = (
        "import hashlib, sys;"
        "sys.path.insert(0, sys.argv[1]);"
        "from tests.actors.core.test_state import day, _state;"
        "print(hashlib.sha256(_state(*day()).to_snapshot().payload).hexdigest())"
    )
    root = Path(__file__).parents[3]
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
    folder = Path(turnkeeper.actors.__file__).parent
    files = [folder / "events.py", folder / "models" / "messages.py"]
    files += [*(folder / "core").glob("*.py"), *(folder / "values").glob("*.py")]
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
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
        assert not imported & forbidden, file.name


def test_parts_of_events_are_validated() -> None:
    with pytest.raises(ValidationError):
        TaskListUpdatedEvent(tasks=(Task(description="x", done="perhaps"),))  # type: ignore[arg-type]


def test_each_kind_that_a_fold_looks_at_is_a_kind_of_events() -> None:
    """A fold is not called with a kind that is misspelled in its table."""
    looked_at = {kind for _, kinds in Folded.STEPS for kind in kinds}

    assert looked_at <= EVENT_CLASSES.keys()
