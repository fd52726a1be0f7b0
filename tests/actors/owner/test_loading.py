"""A long log is read and folded page by page, and errors are told as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import anyio
import pytest

from turnkeeper.actors import MemoryJournal
from turnkeeper.actors.core.records import encode_record, events_of_kinds
from turnkeeper.actors.core.turn_table import TURN_KINDS
from turnkeeper.actors.errors import CorruptLog
from turnkeeper.actors.events import (
    ActionEvent,
    AgentMessageEvent,
    CondensationEvent,
    Event,
    MessageQueuedEvent,
    ObservationEvent,
    PausedEvent,
    TurnStartedEvent,
    UserMessageEvent,
)
from turnkeeper.actors.journal import READ_BYTES, READ_PAGE, Record, StoredRecord
from turnkeeper.actors.owner.loading import fold_log, load_state, load_turns
from turnkeeper.actors.values.frozen import FrozenObject
from turnkeeper.actors.values.upcasters import UPCASTERS, Upcasters
from turnkeeper.runtime import Unavailable

pytestmark = pytest.mark.anyio

LENGTH = 2 * READ_PAGE + 10


class Watched(MemoryJournal):
    """Says when a page is asked for; from a given place on, reading fails, or finds damage."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.fails_after = self.damaged_from = LENGTH + 1

    async def read(
        self,
        conversation_id: str,
        *,
        after: int = 0,
        limit: int = READ_PAGE,
        bytes_max: int = READ_BYTES,
    ) -> Sequence[StoredRecord]:
        self.seen.append(f"read after {after}")
        if after >= self.fails_after:
            raise Unavailable("the disk is away")
        records = await super().read(conversation_id, after=after, limit=limit, bytes_max=bytes_max)
        return [
            record if record.seq < self.damaged_from else record._replace(payload=b"{")
            for record in records
        ]


@pytest.fixture
async def journal() -> AsyncIterator[Watched]:
    records = [encode_record(UserMessageEvent(content=f"{n}")) for n in range(LENGTH)]
    async with Watched() as journal:
        claim = await journal.claim("c")
        await journal.append("c", records, epoch=claim.epoch, expected_seq=1, is_unfinished=False)
        yield journal


async def test_a_page_is_folded_before_the_next_one_is_asked_for(journal: Watched) -> None:
    def fold(event: Event) -> None:
        assert isinstance(event, UserMessageEvent)
        if int(event.content) % READ_PAGE == 0:
            journal.seen.append(f"fold {event.content}")

    await fold_log(journal, "c", 0, LENGTH, fold)

    assert journal.seen == [
        "read after 0",
        "fold 0",
        f"read after {READ_PAGE}",
        f"fold {READ_PAGE}",
        f"read after {2 * READ_PAGE}",
        f"fold {2 * READ_PAGE}",
    ]


async def test_other_tasks_run_while_a_page_is_folded(journal: Watched) -> None:
    steps, most = 0, 0

    async def count() -> None:
        nonlocal steps
        while True:
            steps += 1
            await anyio.lowlevel.checkpoint()

    def fold(_: Event) -> None:
        nonlocal most
        most = max(most, steps)

    async with anyio.create_task_group() as group:
        group.start_soon(count)
        await fold_log(journal, "c", 0, LENGTH, fold)
        group.cancel_scope.cancel()
    assert most >= LENGTH // 100


@pytest.mark.parametrize("at", [0, READ_PAGE, 2 * READ_PAGE])
async def test_a_read_that_fails_is_raised_as_it_is_wherever_it_comes(
    journal: Watched, at: int
) -> None:
    journal.fails_after = at

    with pytest.raises(Unavailable, match="the disk is away"):
        await load_state(journal, "c", LENGTH)


@pytest.mark.parametrize("seq", [3, READ_PAGE + 3, LENGTH - 1])
async def test_damage_is_raised_as_it_is_and_before_an_error_of_the_page_behind_it(
    journal: Watched, seq: int
) -> None:
    journal.damaged_from = seq
    journal.fails_after = READ_PAGE * (1 + seq // READ_PAGE)

    with pytest.raises(CorruptLog) as damaged:
        await load_state(journal, "c", LENGTH)
    assert damaged.value.seq == seq


async def test_a_log_that_ends_too_soon_is_damaged(journal: Watched) -> None:
    with pytest.raises(CorruptLog, match="the record is missing"):
        await load_state(journal, "c", LENGTH + 1)


async def test_a_log_whose_condensation_tore_a_response_is_read_once_more_and_enforced(
    journal: Watched,
) -> None:
    """The view that is left shows nothing of it: the call that was kept has its result."""
    calls = [
        ActionEvent(
            tool_call_id=name, tool_name="t", arguments=FrozenObject({}), llm_response_id="r"
        )
        for name in ("gone", "kept")
    ]
    results = [ObservationEvent(tool_call_id=call.tool_call_id, content="42") for call in calls]
    torn = CondensationEvent(forgotten_event_ids=(calls[0].id, results[0].id))
    added: list[Event] = [*calls, *results, torn]
    end = LENGTH + len(added)
    journal.damaged_from = end + 1
    await journal.append(
        "c",
        [encode_record(event) for event in added],
        epoch=(await journal.claim("c")).epoch,
        expected_seq=LENGTH + 1,
        is_unfinished=False,
    )

    state, removed = await load_state(journal, "c", end)

    assert journal.seen.count("read after 0") == 2
    assert removed == (calls[1].id, results[1].id)
    assert len(state.view) == LENGTH


@pytest.mark.parametrize("is_sound", [True, False])
async def test_only_a_log_that_breaks_a_rule_is_read_once_more_and_enforced(
    journal: Watched, *, is_sound: bool
) -> None:
    journal.damaged_from = LENGTH + 2
    result = ObservationEvent(tool_call_id="of no call", content="42")
    added: Event = UserMessageEvent(content="sound") if is_sound else result
    claim = await journal.claim("c")
    await journal.append(
        "c",
        [encode_record(added)],
        epoch=claim.epoch,
        expected_seq=LENGTH + 1,
        is_unfinished=False,
    )

    state, removed = await load_state(journal, "c", LENGTH + 1)

    assert journal.seen.count("read after 0") == (1 if is_sound else 2)
    assert removed == (() if is_sound else (result.id,))
    assert len(state.view) == LENGTH + is_sound
    assert state.seq == LENGTH + 1


async def test_the_turn_table_alone_is_that_of_the_whole_state(journal: Watched) -> None:
    """From a snapshot or from the log alone; at a message that joins its turn a second time."""
    turn: list[Event] = [
        TurnStartedEvent(turn_id="t1"),
        UserMessageEvent(content="A", message_id="A", turn_id="t1"),
        MessageQueuedEvent(content="B", message_id="B", turn_id="t2"),
        AgentMessageEvent(content="said", turn_id="t1"),
        PausedEvent(),
        MessageQueuedEvent(content="C", message_id="C", turn_id="t3", place=1),
    ]
    epoch = await append(journal, turn)
    end = LENGTH + len(turn)
    middle, _ = await load_state(journal, "c", LENGTH + 3)

    for has_snapshot in (False, True):
        if has_snapshot:
            await journal.write_snapshot("c", middle.to_snapshot(), epoch=epoch)
        for seq in (0, LENGTH, LENGTH + 3, LENGTH + 5, end):
            state, _ = await load_state(journal, "c", seq)
            assert await load_turns(journal, "c", seq) == state.turns

    turns = await load_turns(journal, "c", end)
    assert turns.running is not None
    assert list(turns.queued) == ["C", "B"]
    assert turns.waits_for == "resume"


async def test_the_turn_table_needs_no_event_that_is_of_no_turn(journal: Watched) -> None:
    await append(journal, [AgentMessageEvent(content="said"), PausedEvent()])
    journal.damaged_from = LENGTH + 1

    assert not (await load_turns(journal, "c", LENGTH + 1)).is_paused
    with pytest.raises(CorruptLog) as damaged:
        await load_turns(journal, "c", LENGTH + 2)
    assert damaged.value.seq == LENGTH + 2


async def test_no_turn_table_is_given_of_a_log_that_lacks_a_record(journal: Watched) -> None:
    with pytest.raises(CorruptLog, match="the record is missing"):
        await load_turns(journal, "c", LENGTH + 1)

    records = await journal.read("c", limit=3)
    with pytest.raises(CorruptLog, match="the record is missing") as damaged:
        events_of_kinds(TURN_KINDS, "c", [records[0], records[2]], first_seq=1)
    assert damaged.value.seq == 2


async def test_the_turn_table_has_the_events_that_an_upcaster_makes(
    journal: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kind of their records is none that the turn table looks at."""
    steps = Upcasters({("halted", 1): lambda record: {**record, "kind": "paused"}})
    for name in ("_steps", "kinds"):
        monkeypatch.setattr(UPCASTERS, name, getattr(steps, name))
    paused = encode_record(PausedEvent())
    payload = paused.payload.replace(b'"paused"', b'"halted"')
    await append(journal, [], paused._replace(kind="halted", payload=payload))

    turns = await load_turns(journal, "c", LENGTH + 1)

    assert turns.is_paused
    assert turns == (await load_state(journal, "c", LENGTH + 1))[0].turns


async def append(journal: Watched, events: Sequence[Event], *records: Record) -> int:
    """Append these events, and then these records, to the log of the fixture; return the epoch."""
    added = [*map(encode_record, events), *records]
    claim = await journal.claim("c")
    journal.fails_after = journal.damaged_from = LENGTH + len(added) + 1
    await journal.append(
        "c", added, epoch=claim.epoch, expected_seq=LENGTH + 1, is_unfinished=False
    )
    return claim.epoch
