"""Exporting and importing conversations loses nothing, and says where a file is wrong."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tests.actors.conversations.worlds import HeldAgent
from turnkeeper.actors import Conversations, ConversationState, MemoryJournal, SQLiteJournal
from turnkeeper.actors.core.details import Details
from turnkeeper.actors.core.limits import Limits
from turnkeeper.actors.core.records import decode_record, encode_record
from turnkeeper.actors.errors import (
    ContentTooLong,
    ConversationDeleted,
    ConversationExists,
    ConversationNotFound,
    CorruptLog,
    ImportRefused,
    InvalidConversationId,
)
from turnkeeper.actors.events import AgentMessageEvent, ConversationChangedEvent, UserMessageEvent
from turnkeeper.actors.journal import (
    READ_BYTES,
    READ_PAGE,
    Deletion,
    Journal,
    Listing,
    Record,
    Rejection,
    StoredRecord,
)
from turnkeeper.actors.journals import transfer
from turnkeeper.actors.journals.contract import make_record, read_all
from turnkeeper.actors.journals.transfer import delete_unchanged, export_lines, import_lines
from turnkeeper.actors.recordings.importing import import_recorded
from turnkeeper.actors.recordings.transcripts import parse_recorded
from turnkeeper.actors.values.frozen import FrozenObject

PAYLOADS = (
    b'{"kind":"user_message","content":"Gr\xc3\xbc\xc3\x9fe, \xf0\x9f\x90\xa2"}',
    b'{"number": 1.0, "text": "spaces, \\u00e9scapes and ,\\"event\\": inside"}',
    b"no json at all",
    b"{}\n{}",
    b"\xff\xfe",
    b"",
    b'"\xe2\x80\xa8"',  # a line separator, which some tools take for the end of a line
    b'{"image":"' + b"A" * 50_000 + b'"}',
    b"{}\n",  # its line end would end the line of the export
)


async def write(
    journal: Journal, name: str, records: Sequence[Record], *, is_unfinished: bool = False
) -> None:
    claim = await journal.claim(name)
    await journal.append(
        name,
        records,
        epoch=claim.epoch,
        expected_seq=claim.head + 1,
        is_unfinished=is_unfinished,
    )


async def fill(journal: Journal) -> None:
    records = [
        Record(f'e,"event":{number}', "note", payload, f"m{number}" if number % 2 else None)
        for number, payload in enumerate(PAYLOADS)
    ]
    await write(journal, 'alice,"event":', records, is_unfinished=True)
    await write(journal, "bob", [make_record(f"b{number}") for number in range(600)])
    rejections = [
        Rejection(4e9 + 0.1, "v", "r", b'{"x": 1}'),
        Rejection(4e9 + 0.2, "v", "r", b"\xff"),
    ]
    await journal.reject("bob", rejections, epoch=(await journal.claim("bob")).epoch)


async def lines_of(journal: Journal, names: Sequence[str] | None = None) -> list[str]:
    return [line async for line in export_lines(journal, names)]


@pytest.fixture
async def exported() -> list[str]:
    async with MemoryJournal() as journal:
        await fill(journal)
        return await lines_of(journal)


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[SQLiteJournal]:
    async with SQLiteJournal(tmp_path / "chats.db") as journal:
        yield journal


async def test_what_is_imported_is_exported_as_the_same_lines(
    journal: SQLiteJournal, exported: list[str]
) -> None:
    done = await import_lines(journal, (f"{line}\n" for line in exported))

    assert (done.conversations, done.records) == (2, len(PAYLOADS) + 600)
    assert await lines_of(journal) == exported
    assert [one.payload for one in await journal.read('alice,"event":')] == list(PAYLOADS)
    assert dict(await journal.find_messages('alice,"event":', ["m1", "m2"])) == {"m1": 2}
    assert (await journal.info('alice,"event":')).is_unfinished


class Counting(MemoryJournal):
    """A journal that notes how many records each append has."""

    def __init__(self) -> None:
        super().__init__()
        self.appended: list[int] = []

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
        self.appended.append(len(records))
        return await super().append(
            conversation_id,
            records,
            epoch=epoch,
            expected_seq=expected_seq,
            is_unfinished=is_unfinished,
            listing=listing,
        )


async def test_an_import_appends_a_bounded_number_of_bytes_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It read 256 records at once, which were more than a database takes if they had files."""
    monkeypatch.setattr(transfer, "_APPENDED_BYTES", 100)
    async with MemoryJournal() as journal, Counting() as other:
        payloads = [b'"%s"' % (b"x" * size) for size in (10, 20, 100, 500, 1, 1)]
        await write(journal, "c", [Record(f"c{n}", "note", one) for n, one in enumerate(payloads)])
        lines = await lines_of(journal)

        await import_lines(other, lines)

        assert other.appended == [3, 1, 2]
        assert await lines_of(other) == lines


class Replaced(MemoryJournal):
    """A journal in which another process deletes "c" before the read of what follows a seq."""

    at: int | None = None
    begun_anew: Sequence[Record] = ()
    begun_as_fork_of: str | None = None

    async def read(
        self, conversation_id: str, *, after: int = 0, limit: int = 512, bytes_max: int = READ_BYTES
    ) -> Sequence[StoredRecord]:
        if conversation_id == "c" and self.at is not None and after + limit > self.at:
            self.at = None
            await self.delete("c", epoch=(await self.info("c")).epoch)
            if self.begun_as_fork_of is not None:
                await self.fork(
                    self.begun_as_fork_of,
                    "c",
                    at=(await self.info(self.begun_as_fork_of)).head,
                    records=self.begun_anew,
                    is_unfinished=False,
                )
            elif self.begun_anew:
                await write(self, "c", self.begun_anew)
        return await super().read(conversation_id, after=after, limit=limit, bytes_max=bytes_max)


@pytest.mark.parametrize("length", [0, 1, 5])
async def test_a_conversation_that_is_deleted_before_its_first_line_is_left_out(
    length: int,
) -> None:
    """The line about it promised as many records as the log had that was deleted."""
    async with Replaced() as journal, MemoryJournal() as other:
        await write(journal, "c", [make_record(f"c{n}") for n in range(3)])
        await write(journal, "d", [make_record("d")])
        journal.begun_anew, journal.at = [make_record(f"new {n}") for n in range(length)], 0

        done = await import_lines(other, await lines_of(journal))

        assert (done.conversations, done.records) == (1, 1)
        assert await read_all(other, "d") == ["d"]


@pytest.mark.parametrize("length", [0, 1, READ_PAGE + 2])
async def test_an_export_never_goes_on_with_the_log_of_a_later_conversation(length: int) -> None:
    async with Replaced() as journal:
        await write(journal, "c", [make_record(f"c{n}") for n in range(READ_PAGE + 1)])
        journal.begun_anew = [make_record(f"new {n}") for n in range(length)]
        journal.at = READ_PAGE

        with pytest.raises(ConversationDeleted):
            await lines_of(journal)


async def test_an_export_never_goes_on_with_a_fork_that_took_the_name() -> None:
    """Its first records are as old as those of the log that was deleted, and have epochs as low."""
    async with Replaced() as journal:
        await write(journal, "d", [make_record(f"d{n}") for n in range(READ_PAGE + 9)])
        await write(journal, "c", [make_record(f"c{n}") for n in range(READ_PAGE + 1)])
        journal.begun_as_fork_of, journal.begun_anew = "d", [make_record("new")]
        journal.at = READ_PAGE

        with pytest.raises(ConversationDeleted):
            await lines_of(journal, ["c"])


class Rerejected(MemoryJournal):
    """A journal in which "c" is deleted and begun anew before its rejected events are read."""

    async def rejections(self, conversation_id: str) -> Sequence[Rejection]:
        await self.delete("c", epoch=(await self.info("c")).epoch)
        await write(self, "c", [make_record("new")])
        new = Rejection(4e9, "v", "r", b"{}")
        await self.reject("c", [new], epoch=(await self.info("c")).epoch)
        return await super().rejections(conversation_id)


async def test_an_export_never_has_the_rejected_events_of_a_later_conversation() -> None:
    async with Rerejected() as journal:
        await write(journal, "c", [make_record(f"c{n}") for n in range(3)])

        assert len(await lines_of(journal)) == 1


@pytest.mark.parametrize("keep_users", [False, True])
async def test_an_import_keeps_users_only_if_asked_to(
    journal: SQLiteJournal, keep_users: bool
) -> None:
    changes = [
        ConversationChangedEvent(title="a title", owner="alice"),
        ConversationChangedEvent(labels=FrozenObject({"project": "x"})),
    ]
    async with MemoryJournal() as other:
        await write(other, "c", [encode_record(change) for change in changes])
        lines = await lines_of(other)

    await import_lines(journal, lines, keep_users=keep_users)
    again = await import_lines(journal, lines, keep_users=keep_users)

    found = Details()
    for record in await journal.read("c"):
        found = found.fold(decode_record("c", record).event)
    assert found == Details("a title", {"project": "x"}, "alice" if keep_users else "")
    assert again.records == 0
    assert (await lines_of(journal) == lines) is keep_users


async def test_each_line_is_one_json_object_that_others_can_read(exported: list[str]) -> None:
    lines = [json.loads(line) for line in exported]
    assert lines[0] == {"turnkeeper_export": 1}
    assert lines[2]["event"] == json.loads(PAYLOADS[0])
    assert all(len(line.splitlines()) == 1 for line in exported)


async def test_lines_written_anew_by_a_tool_are_read_too(
    journal: SQLiteJournal, exported: list[str]
) -> None:
    await import_lines(journal, [json.dumps(json.loads(line)) for line in exported])

    found = await journal.read('alice,"event":')
    assert json.loads(found[0].payload) == json.loads(PAYLOADS[0])
    assert len(await read_all(journal, "bob")) == 600


async def test_blanks_at_the_end_of_a_line_are_no_part_of_its_event(
    journal: SQLiteJournal, exported: list[str]
) -> None:
    """The bracket of the line was taken for a part of the event, which nothing could read then."""
    for end in ("", "\n", "\r\n", " ", "\t \n"):
        await import_lines(journal, [f"{line}{end}" for line in exported])

    assert await lines_of(journal) == exported


async def test_lines_with_their_keys_in_another_order_are_read_too(
    journal: SQLiteJournal,
) -> None:
    """An event was cut at its own key `event`, if the tool had put it before other facts."""
    payload = b'{"arguments":{"date":"1 May","event":"birthday"},"id":"a1"}'
    async with MemoryJournal() as other:
        await write(other, "alice", [Record("a1", "note", payload)])
        epoch = (await other.claim("alice")).epoch
        await other.reject("alice", [Rejection(4e9, "v", "r", payload)], epoch=epoch)
        lines = await lines_of(other)

    # As `jq -cS` writes them, whole numbers without a point.
    values = [json.loads(line, parse_float=lambda at: int(float(at))) for line in lines]
    await import_lines(
        journal, [json.dumps(one, sort_keys=True, separators=(",", ":")) for one in values]
    )

    (found,) = await journal.read("alice")
    (rejection,) = await journal.rejections("alice")
    assert (found.payload, rejection) == (payload, Rejection(4e9, "v", "r", payload))


async def test_some_conversations_are_exported_by_name(journal: SQLiteJournal) -> None:
    await fill(journal)
    lines = await lines_of(journal, ["bob"])
    assert [json.loads(line)["conversation"] for line in lines[1:2]] == ["bob"]
    assert len(lines) == 2 + 600 + 2
    with pytest.raises(ConversationNotFound):
        await lines_of(journal, ["carol"])


async def test_an_export_of_an_unknown_conversation_has_no_line(journal: SQLiteJournal) -> None:
    await fill(journal)

    with pytest.raises(ConversationNotFound):
        await anext(export_lines(journal, ["bob", "carol"]))


async def test_an_interrupted_import_goes_on_where_it_was(
    journal: SQLiteJournal, exported: list[str]
) -> None:
    for end in (5, 100, 400):
        with pytest.raises(ImportRefused):
            await import_lines(journal, exported[:end])

    done = await import_lines(journal, exported)

    assert done.records < 600
    assert await lines_of(journal) == exported
    assert (await import_lines(journal, exported)).records == 0
    assert await lines_of(journal) == exported


@pytest.mark.parametrize("name", ["alice/order-7", "..", "a\tb"])
async def test_a_conversation_keeps_its_name_in_another_journal_though_no_new_one_gets_it(
    name: str,
) -> None:
    async with MemoryJournal() as first, MemoryJournal() as second:
        claim = await first.claim(name, any_name=True)
        record = encode_record(AgentMessageEvent(content="hello"))
        await first.append(name, [record], epoch=claim.epoch, expected_seq=1, is_unfinished=False)

        lines = await lines_of(first)
        await import_lines(second, lines)

        assert await lines_of(second) == lines
        async with Conversations(HeldAgent(), journal=second) as conversations:
            await (await conversations[name].send("hello")).end()
            await conversations.delete(name)
            with pytest.raises(InvalidConversationId):
                await conversations[name].send("hello")


async def test_a_message_that_is_too_long_to_be_sent_is_imported_from_where_it_was_taken() -> None:
    """The limits of messages are those of the `Conversations` that took it."""
    long = "a" * (Limits().content_length_max + 1)
    async with MemoryJournal() as first, MemoryJournal() as second:
        await write(first, "c", [encode_record(UserMessageEvent(content=long))])
        await import_lines(second, await lines_of(first))

        async with Conversations(HeldAgent(), journal=second) as conversations:
            (message,) = await conversations["c"].view()
            assert isinstance(message, UserMessageEvent)
            assert message.content == long
            with pytest.raises(ContentTooLong):
                await conversations["c"].send(long)


async def test_another_conversation_of_that_name_is_not_mixed_up(
    journal: SQLiteJournal, exported: list[str]
) -> None:
    await write(journal, "bob", [make_record("b0"), make_record("other")])
    with pytest.raises(ConversationExists):
        await import_lines(journal, exported)
    assert await read_all(journal, "bob") == ["b0", "other"]


BAD: dict[str, tuple[list[str], int, str]] = {
    "empty": ([], 1, "no header"),
    "no header": (['{"conversation":"c","head":0,"is_unfinished":false}'], 1, "no header"),
    "newer": (['{"turnkeeper_export":2}'], 1, "format 2"),
    "not json": (['{"turnkeeper_export":1}', "{"], 2, "not JSON"),
    "not an object": (['{"turnkeeper_export":1}', "[]"], 2, "not a JSON object"),
    "no conversation": (['{"turnkeeper_export":1}', '{"seq":1}'], 2, "should begin"),
    "cut off": (
        ['{"turnkeeper_export":1}', '{"conversation":"c","head":1,"is_unfinished":false}'],
        3,
        "seq 1 of 1",
    ),
    "gap": (
        [
            '{"turnkeeper_export":1}',
            '{"conversation":"c","head":2,"is_unfinished":false}',
            '{"seq":2,"event_id":"e2","kind":"note","event":{}}',
        ],
        3,
        "seq 1 of 2",
    ),
    "no event": (
        [
            '{"turnkeeper_export":1}',
            '{"conversation":"c","head":1,"is_unfinished":false}',
            '{"seq":1,"event_id":"e1","kind":"note"}',
        ],
        3,
        "no event",
    ),
    "bad base64": (
        [
            '{"turnkeeper_export":1}',
            '{"conversation":"c","head":1,"is_unfinished":false}',
            '{"seq":1,"event_id":"e1","kind":"note","event_base64":"?"}',
        ],
        3,
        "base64",
    ),
    "nested": (
        ['{"turnkeeper_export":1}', "[" * 100_000 + "]" * 100_000],
        2,
        "nested too deeply",
    ),
    "message id": (
        [
            '{"turnkeeper_export":1}',
            '{"conversation":"c","head":1,"is_unfinished":false}',
            '{"seq":1,"event_id":"e1","kind":"note","message_id":7,"event":{}}',
        ],
        3,
        "seq 1 of 1",
    ),
    "head": (
        ['{"turnkeeper_export":1}', '{"conversation":"c","head":-1,"is_unfinished":false}'],
        2,
        "a conversation should begin",
    ),
    "long": (
        ['{"turnkeeper_export":1}', "x" * 2_000_001],
        2,
        "more than 2,000,000 characters",
    ),
}


@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_line_is_told_by_its_number(
    journal: SQLiteJournal, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, number, text = BAD[bad]
    monkeypatch.setattr(transfer, "LINE_LENGTH_MAX", 2_000_000)
    with pytest.raises(ImportRefused, match=text) as caught:
        await import_lines(journal, lines)
    assert caught.value.line == number
    assert list(await journal.list()) == []


async def test_a_recorded_chat_becomes_a_conversation_whose_view_is_whole(
    journal: SQLiteJournal,
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "here"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "there"},
        {"role": "assistant", "content": "Here."},
    ]
    (recorded,) = parse_recorded(json.dumps([chat]).encode(), "chats.json").conversations

    done = await import_recorded(journal, "c", recorded)

    events = [decode_record("c", record).event for record in await journal.read("c")]
    assert done.records == len(events) == 7
    assert [event.kind for event in events] == [
        "system_prompt",
        "user_message",
        "action",
        "observation",
        "action",
        "observation",
        "agent_message",
    ]
    state = ConversationState()
    for event in events:
        state.append_event(event)
    assert len(state.view) == 7
    assert not state.pending_actions
    with pytest.raises(ConversationExists):
        await import_recorded(journal, "c", recorded)


async def test_a_conversation_that_went_on_since_it_was_listed_is_not_deleted(
    journal: SQLiteJournal,
) -> None:
    for name in ("old", "new"):
        await write(journal, name, [make_record("e1"), make_record("e2")])
    new, old = await journal.list()
    claim = await journal.claim("new")
    await journal.append(
        "new", [make_record("e3")], epoch=claim.epoch, expected_seq=3, is_unfinished=False
    )

    assert await delete_unchanged(journal, old) == Deletion(0, [], is_erased=True)
    assert await delete_unchanged(journal, new) is None

    assert [info.conversation_id for info in await journal.list()] == ["new"]
    assert await read_all(journal, "new") == ["e1", "e2", "e3"]


async def test_a_conversation_that_was_begun_anew_since_it_was_listed_is_not_deleted(
    journal: SQLiteJournal,
) -> None:
    await write(journal, "c", [make_record("e1"), make_record("e2")])
    (listed,) = await journal.list()
    claim = await journal.claim("c")
    await journal.delete("c", epoch=claim.epoch)
    await write(journal, "c", [make_record("e3"), make_record("e4")])

    assert await delete_unchanged(journal, listed) is None

    assert await read_all(journal, "c") == ["e3", "e4"]


@pytest.mark.parametrize(
    ("known", "newer", "is_open"),
    [
        ('"kind":"agent_message"', '"kind":"agent_mood"', True),
        ('"interrupted":false', '"interrupted":false,"mood":"glad"', False),
    ],
    ids=["another kind", "another shape"],
)
async def test_an_event_of_a_newer_version_is_imported_as_it_is(
    known: str, newer: str, *, is_open: bool
) -> None:
    """The view leaves an unknown kind out; a known kind with another shape stops its owner."""
    there, here = MemoryJournal(), MemoryJournal()
    async with Conversations(HeldAgent(), journal=there) as conversations:
        await (await conversations["alice"].send("hello")).end()
    async with there:
        lines = [line.replace(known, newer) async for line in export_lines(there)]
    assert any(newer in line for line in lines)
    async with here:
        await import_lines(here, lines)
        assert [line async for line in export_lines(here)] == lines

    async with Conversations(HeldAgent(), journal=here) as conversations:
        alice = conversations["alice"]
        if is_open:
            assert [event.kind for event in await alice.view()] == ["user_message"]
            assert (await (await alice.send("again")).end()).outcome == "completed"
        else:
            with pytest.raises(CorruptLog):
                await alice.view()
