"""The audit finds each thing that can be wrong with a journal, and nothing in one that is right."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest

from turnkeeper.actors import Event, LoggedEvent, MemoryJournal, OnOverlap
from turnkeeper.actors.events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    ConversationErrorEvent,
    MessageQueuedEvent,
    ObservationEvent,
    RetractionEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    encode_event,
    is_seen_by_model,
)
from turnkeeper.actors.journal import Record
from turnkeeper.actors.recordings.audit import Audit, Receipts, audit_journal, audit_log, message_id
from turnkeeper.actors.recordings.transcripts import parse_recorded

E = TypeVar("E", bound=Event)

MESSAGES = [
    {"role": "user", "content": "Where is my order?"},
    {
        "role": "assistant",
        "content": "One moment.",
        "tool_calls": [
            {"id": "c", "function": {"name": "find", "arguments": '{"n": 1}'}},
            {"id": "d", "function": {"name": "track", "arguments": '{"n": 2}'}},
        ],
    },
    {"role": "tool", "tool_call_id": "c", "content": "found"},
    {"role": "tool", "tool_call_id": "d", "content": "tracked"},
    {"role": "assistant", "content": "It is on its way."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "Tomorrow."},
    {"role": "user", "content": "Thanks"},
]
RECORDED = parse_recorded(json.dumps([MESSAGES]).encode(), "a.json").conversations[0]


def play(*, is_queued: bool = False) -> list[Event]:
    """The events that a right owner writes for the recording."""
    events: list[Event] = []
    if is_queued:
        events += [_queued(n) for n in range(len(RECORDED.exchanges))]
    for n, exchange in enumerate(RECORDED.exchanges):
        turn = f"turn-{n}"
        events.append(TurnStartedEvent(id=f"start-{n}", turn_id=turn))
        events.append(
            UserMessageEvent(
                id=f"user-{n}",
                turn_id=turn,
                content=exchange.content,
                message_id=message_id("a-1", n),
                queued_event_id=f"queued-{n}" if is_queued else None,
            )
        )
        for s, step in enumerate(exchange.steps):
            name = f"{n}-{s}"
            for c, call in enumerate(step.calls):
                events.append(
                    ActionEvent(
                        id=f"action-{name}-{c}",
                        turn_id=turn,
                        tool_call_id=f"call-{name}-{c}",
                        provider_call_id=call.provider_call_id,
                        tool_name=call.tool_name,
                        arguments=call.arguments,
                        llm_response_id=f"response-{name}",
                        text="" if c else step.text,
                    )
                )
            for c, call in enumerate(step.calls):
                events.append(
                    ObservationEvent(
                        id=f"result-{name}-{c}",
                        turn_id=turn,
                        tool_call_id=f"call-{name}-{c}",
                        content=call.result,
                    )
                )
            if not step.calls:
                events.append(AgentMessageEvent(id=f"say-{name}", turn_id=turn, content=step.text))
        events.append(TurnEndedEvent(id=f"end-{n}", turn_id=turn, outcome="completed"))
    return events


def _queued(n: int) -> MessageQueuedEvent:
    return MessageQueuedEvent(
        id=f"queued-{n}",
        turn_id=f"turn-{n}",
        message_id=message_id("a-1", n),
        content=RECORDED.exchanges[n].content,
    )


def number(events: Sequence[Event]) -> list[LoggedEvent]:
    return [LoggedEvent(seq, event) for seq, event in enumerate(events, 1)]


def receipts_of(events: Sequence[Event]) -> Receipts:
    """What users and agent are told while these events are written."""
    receipts = Receipts("a-1", RECORDED, is_finished=True)
    for seq, event in reversed(number(events)):
        if isinstance(event, UserMessageEvent | MessageQueuedEvent):
            n = int(str(event.message_id).rpartition("/")[2])
            receipts.messages[n] = seq
        elif isinstance(event, AgentMessageEvent | ObservationEvent):
            receipts.events[event.id] = seq
        elif isinstance(event, ActionEvent):
            receipts.events[event.id] = None
        elif isinstance(event, TurnEndedEvent):
            receipts.ended[int(str(event.turn_id)[5:])] = event.outcome
    return receipts


def at(events: Sequence[Event], event_id: str) -> int:
    return next(n for n, event in enumerate(events) if event.id == event_id)


def changed(event: E, **fields: object) -> E:
    return event.model_copy(update=fields)


@pytest.mark.parametrize("is_queued", [False, True])
def test_a_right_log_is_counted_and_clean(is_queued: bool) -> None:
    events = play(is_queued=is_queued)

    audit = audit_log(receipts_of(events), number(events))

    assert audit.problems == ()
    assert audit.is_clean
    assert audit == Audit(
        conversations=1,
        events=len(events),
        turns=3,
        acknowledged=9,
        found=9,
        views_checked=len(events),
        calls=2,
        calls_answered_once=2,
    )


# --- several senders, and those who steer --------------------------------------------------------


def test_two_senders_have_no_order_among_each_other_and_one_sender_has() -> None:
    events = play()
    parts = [
        [event for event in events if event.turn_id == f"turn-{n}"]
        for n in range(len(RECORDED.exchanges))
    ]
    swapped = [*parts[1], *parts[0], *parts[2]]
    receipts = receipts_of(swapped)

    receipts.senders = 2
    assert audit_log(receipts, number(swapped)).is_clean

    receipts.senders = 1
    audit = audit_log(receipts, number(swapped))
    assert audit.problems == ("conversation a-1: message 0 comes after message 1",)
    assert audit.out_of_order == 1


def steer(joined_turn: str | None) -> list[Event]:
    """Message 1 was sent to steer turn 0, and is answered in that one."""
    events = [
        changed(event, turn_id="turn-0") if event.turn_id == "turn-1" else event
        for event in play()
        if event.id not in {"end-0", "start-1"}
    ]
    queued = _queued(1)
    events.insert(at(events, "say-0-1"), changed(queued, steers=joined_turn))
    return [
        changed(event, queued_event_id=queued.id) if event.id == "user-1" else event
        for event in events
    ]


def test_a_message_that_steers_is_answered_in_the_turn_that_it_joined() -> None:
    events = steer("turn-0")
    receipts = receipts_of(events)
    receipts.ended = {0: "completed", 1: "completed", 2: "completed"}

    assert audit_log(receipts, number(events)).is_clean

    receipts.ended[1] = "interrupted"
    (told,) = audit_log(receipts, number(events)).problems
    assert told.endswith("the user of message 1 was told interrupted, it is completed")


@pytest.mark.parametrize("joined", [None, "turn-2"])
def test_a_message_in_a_turn_that_it_did_not_steer_is_told(joined: str | None) -> None:
    events = steer(joined)

    problems = audit_log(receipts_of(events), number(events)).problems

    assert "conversation a-1: turn turn-0 has 2 user messages" in problems


def test_what_was_said_to_one_who_steered_is_compared_too() -> None:
    events = [event for event in steer("turn-0") if event.id != "say-1-0"]
    receipts = receipts_of(events)
    receipts.ended = {0: "completed", 1: "completed", 2: "completed"}

    (told,) = audit_log(receipts, number(events)).problems

    assert told.endswith(
        "the turn of message 0 is not as recorded: it ends after 3 of 4 texts and calls"
    )


def test_a_turn_that_was_rolled_back_ended_as_it_may() -> None:
    events = [
        changed(event, outcome="rolled_back") if event.id == "end-1" else event for event in play()
    ]

    audit = audit_log(receipts_of(events), number(events))

    assert (audit.problems, audit.interrupted, audit.rolled_back) == ((), 0, 1)


# --- what each overlap policy may lead to --------------------------------------------------------


def end_as(outcome: str, *, retracts: bool = False) -> list[Event]:
    """Turn 1 ends like this; all that the model saw of it is retracted, or nothing."""
    seen = tuple(e.id for e in play() if e.turn_id == "turn-1" and is_seen_by_model(e))
    events = [changed(e, outcome=outcome) if e.id == "end-1" else e for e in play()]
    if retracts:
        gone = RetractionEvent(id="gone", turn_id="turn-1", retracted_event_ids=seen)
        events.insert(at(events, "end-1"), gone)
    return events


OF_POLICIES: dict[str, tuple[list[Event], dict[OnOverlap, str | None]]] = {
    "a message waits": (
        play(is_queued=True),
        {
            "queue": None,
            "steer": "seq 1: a message steers None, under steer, while turn None runs",
            "interrupt": "seq 1: a message waits, under interrupt",
            "rollback": "seq 1: a message waits, under rollback",
            "reject": "seq 1: a message waits, under reject",
        },
    ),
    "a message joins": (
        steer("turn-0"),
        {
            "steer": None,
            "queue": "seq 7: a message steers turn-0, under queue, while turn turn-0 runs",
            "interrupt": "seq 7: a message waits, under interrupt",
        },
    ),
    "a turn is cut off": (
        end_as("interrupted"),
        {
            "interrupt": None,
            "rollback": None,
            "queue": "more turns were interrupted (1) than workers were killed (0), under queue",
            "steer": "more turns were interrupted (1) than workers were killed (0), under steer",
            "reject": "more turns were interrupted (1) than workers were killed (0), under reject",
        },
    ),
    "a turn is rolled back": (
        end_as("rolled_back", retracts=True),
        {
            "rollback": None,
            "interrupt": "seq 13: turn turn-1 is rolled back, under interrupt",
            "steer": "seq 13: turn turn-1 is rolled back, under steer",
        },
    ),
    "a turn is said to be rolled back": (
        end_as("rolled_back"),
        {"rollback": "event user-1 of a turn that was rolled back is in the view"},
    ),
}


@pytest.mark.parametrize("what", OF_POLICIES)
def test_what_a_policy_cannot_lead_to_is_told(what: str) -> None:
    events, told = OF_POLICIES[what]
    for policy, problem in told.items():
        receipts = receipts_of(events)
        receipts.ended = {0: "completed", 1: receipts.ended.get(1, "completed"), 2: "completed"}
        receipts.on_overlap, receipts.cuts_max = policy, 0

        problems = audit_log(receipts, number(events)).problems

        assert problems[:1] == ((f"conversation a-1: {problem}",) if problem else ()), policy


def test_a_turn_that_a_kill_may_have_cut_off_is_right_under_every_policy() -> None:
    receipts = receipts_of(end_as("interrupted"))
    receipts.on_overlap, receipts.cuts_max = "queue", 1

    assert audit_log(receipts, number(end_as("interrupted"))).is_clean


# --- what can be wrong ---------------------------------------------------------------------------

Breakage = Callable[[list[Event]], Iterator[Event]]


def drop(event_id: str) -> Breakage:
    return lambda events: (event for event in events if event.id != event_id)


def repeat(event_id: str, **fields: object) -> Breakage:
    def broken(events: list[Event]) -> Iterator[Event]:
        for event in events:
            yield event
            if event.id == event_id:
                yield changed(event, **fields)

    return broken


def replace(event_id: str, **fields: object) -> Breakage:
    return lambda events: (
        changed(event, **fields) if event.id == event_id else event for event in events
    )


def move_to_end(event_id: str) -> Breakage:
    def broken(events: list[Event]) -> Iterator[Event]:
        moved = events.pop(at(events, event_id))
        yield from [*events, moved]

    return broken


@pytest.mark.parametrize(
    ("broken", "count", "told"),
    [
        (drop("user-2"), "lost", "message 2, acknowledged at seq 14, is lost"),
        (drop("say-0-1"), "lost", "event say-0-1, acknowledged at seq 7, is lost"),
        (drop("action-0-0-1"), "lost", "event action-0-0-1, acknowledged at seq None, is lost"),
        (repeat("say-1-0"), "duplicated", "event say-1-0 is at seq 11 and at seq 12"),
        (
            repeat("user-1", id="user-1-again"),
            "duplicated",
            "message 1 is at seq 10 and at seq 11",
        ),
        (
            repeat("action-0-0-1", id="again"),
            "duplicated",
            "call id call-0-0-1 names 2 calls",
        ),
        (
            repeat("start-1", id="again"),
            "duplicated",
            "seq 10: turn turn-1 starts again",
        ),
        (
            replace("user-1", queued_event_id="queued-1"),
            "duplicated",
            "message 1 waited as None, and began as if it had not",
        ),
        (drop("start-0"), "out_of_order", "message 0, acknowledged at seq 2, is at 1"),
        (drop("end-0"), "out_of_order", "event say-1-0, acknowledged at seq 11, is at 10"),
        (
            move_to_end("say-1-0"),
            "out_of_order",
            "seq 15: agent_message is of turn turn-1, which does not run",
        ),
    ],
)
def test_what_is_lost_doubled_or_moved_is_counted_and_told(
    broken: Breakage, count: str, told: str
) -> None:
    events = play()
    receipts = receipts_of(events)

    audit = audit_log(receipts, number(list(broken(events))))

    assert audit.counts()[count] >= 1
    assert f"conversation a-1: {told}" in audit.problems


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (drop("end-2"), "turn turn-2 has not ended"),
        (drop("end-0"), "seq 8: a turn starts while turn turn-0 runs"),
        (drop("result-0-0-1"), "call call-0-0-1 has 0 results"),
        (repeat("result-0-0-1", id="again"), "call call-0-0-1 has 2 results"),
        (
            replace("result-0-0-0", tool_call_id="call-9"),
            "there is a result for call-9, and no call",
        ),
        (replace("user-1", message_id="b-1/1"), "seq 10: no user sent message id b-1/1"),
        (replace("user-1", content="Why?"), "seq 10: not the text of message 1"),
        (
            replace("result-0-0-0", content="nothing"),
            (
                "the turn of message 0 is not as recorded: event result-0-0-0 is not the recorded "
                "result"
            ),
        ),
        (
            replace("say-0-1", content="It is lost."),
            (
                "the turn of message 0 is not as recorded: event say-0-1 is not what was said or "
                "called next"
            ),
        ),
        (
            repeat("say-0-1", id="again"),
            (
                "the turn of message 0 is not as recorded: event again is not what was said or "
                "called next"
            ),
        ),
        (
            drop("say-0-1"),
            "the turn of message 0 is not as recorded: it ends after 2 of 3 texts and calls",
        ),
        (
            replace("end-1", outcome="interrupted"),
            "the user of message 1 was told completed, it is interrupted",
        ),
        (replace("end-1", outcome="failed"), "the turn of message 1 is failed: "),
    ],
)
def test_what_has_no_count_of_its_own_is_told_all_the_same(broken: Breakage, told: str) -> None:
    events = play()
    receipts = receipts_of(events)

    audit = audit_log(receipts, number(list(broken(events))))

    assert f"conversation a-1: {told}" in audit.problems


def test_a_message_that_never_got_its_turn_is_told() -> None:
    events = [*play(is_queued=True)[:-3]]
    receipts = receipts_of(events)

    audit = audit_log(receipts, number(events))

    assert audit.problems == ("conversation a-1: message 2 still waits for its turn",)


def test_messages_that_changed_places_are_out_of_order() -> None:
    events = play()
    receipts = receipts_of(events)
    receipts.messages = dict(
        zip(receipts.messages, sorted(receipts.messages.values()), strict=True)
    )
    first, second = at(events, "start-0"), at(events, "start-1")
    third = at(events, "start-2")
    swapped = [*events[second:third], *events[first:second], *events[third:]]

    audit = audit_log(receipts, number(swapped))

    assert "conversation a-1: message 0 comes after message 1" in audit.problems
    assert audit.out_of_order >= 1


def test_a_gap_in_the_seqs_is_out_of_order() -> None:
    events = play()
    log = [LoggedEvent(seq + (seq > 4), event) for seq, event in number(events)]

    audit = audit_log(receipts_of(events), log)

    assert "conversation a-1: seq 6 is at position 5 of the log" in audit.problems


def test_an_interrupted_turn_holds_the_beginning_of_what_was_recorded() -> None:
    events = play()
    cut = at(events, "say-0-1")
    events[cut] = AgentMessageEvent(
        id="partial", turn_id="turn-0", content="It is on", interrupted=True
    )
    events[cut + 1] = TurnEndedEvent(id="end-0", turn_id="turn-0", outcome="interrupted")
    events[cut - 1] = AgentErrorEvent(
        id="no-result", turn_id="turn-0", tool_call_id="call-0-0-1", content="interrupted"
    )

    right = audit_log(receipts_of(events), number(events))
    wrong = audit_log(
        receipts_of(events), number(list(replace("partial", content="They are")(events)))
    )

    assert right.problems == ()
    assert right.interrupted == 1
    assert right.calls_answered_once == 2
    assert wrong.problems == (
        (
            "conversation a-1: the turn of message 0 is not as recorded: event partial is not the "
            "beginning of what was said"
        ),
    )


def test_the_views_of_the_owner_and_of_the_log_are_compared() -> None:
    events = play()
    receipts = receipts_of(events)
    seen = [
        event.id for event in events if not isinstance(event, TurnStartedEvent | TurnEndedEvent)
    ]

    receipts.view_ids = tuple(seen)
    same = audit_log(receipts, number(events))
    receipts.view_ids = tuple(seen[1:])
    other = audit_log(receipts, number(events))

    assert same.views_diverged == 0
    assert same.views_checked == len(events) + 1
    assert other.views_diverged == 1
    assert other.problems == ("conversation a-1: the owner's view is not the one of the log",)


def test_a_run_that_was_stopped_may_end_in_the_middle_and_may_lose_nothing() -> None:
    events = play()[: at(play(), "result-0-0-1")]
    receipts = receipts_of(events)
    receipts.is_finished = False

    whole = audit_log(receipts, number(events))
    short = audit_log(receipts, number(events[:-1]))

    assert whole.problems == ()
    assert short.lost == 1


def test_why_a_turn_failed_is_told() -> None:
    events = play()
    end = at(events, "end-1")
    events[end] = TurnEndedEvent(id="end-1", turn_id="turn-1", outcome="failed")
    events.insert(
        end, ConversationErrorEvent(id="error", turn_id="turn-1", error="RateLimited", detail="")
    )

    audit = audit_log(receipts_of(events), number(events))

    assert audit.problems == ("conversation a-1: the turn of message 1 is failed: RateLimited",)


# --- from a journal ------------------------------------------------------------------------------


async def write(journal: MemoryJournal, events: Sequence[Event]) -> None:
    claim = await journal.claim("a-1")
    records = [Record(event.id, event.kind, encode_event(event)) for event in events]
    await journal.append("a-1", records, epoch=claim.epoch, expected_seq=1, is_unfinished=False)


@pytest.mark.anyio
async def test_a_journal_is_audited_conversation_by_conversation() -> None:
    events = play()
    missing = Receipts("never-written", RECORDED, messages={0: 1})

    async with MemoryJournal() as journal:
        await write(journal, events)
        audit = await audit_journal(journal, [receipts_of(events), missing])

    assert (audit.conversations, audit.acknowledged, audit.found, audit.lost) == (2, 10, 9, 1)
    assert audit.problems == (
        "conversation never-written: message 0, acknowledged at seq 1, is lost",
    )


@pytest.mark.anyio
async def test_a_record_that_cannot_be_read_is_a_loss() -> None:
    events = play()

    async with MemoryJournal() as journal:
        await write(journal, events[:-1])
        claim = await journal.claim("a-1")
        await journal.append(
            "a-1",
            [Record("end-2", "turn_ended", b'{"kind": "turn_ended"}')],
            epoch=claim.epoch,
            expected_seq=len(events),
            is_unfinished=False,
        )
        audit = await audit_journal(journal, [receipts_of(events)])

    assert not audit.is_clean
    assert audit.problems[0].startswith("conversation a-1: 1 validation error")
