"""`turnkeeper show` reads a journal that it does not own, and says clearly what it cannot read."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner, Result

from turnkeeper.actors import (
    Conversations,
    Event,
    ImageContent,
    SQLiteJournal,
    TokenUsage,
    TurnContext,
    agent,
)
from turnkeeper.actors.cli._app import app
from turnkeeper.actors.events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationEvent,
    ConversationErrorEvent,
    MessageQueuedEvent,
    ObservationEvent,
    StepFinishedEvent,
    SystemPromptEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    decode_event,
    encode_event,
)
from turnkeeper.actors.journal import Record, Rejection
from turnkeeper.actors.journals.sqlite import journal as sqlite_journal
from turnkeeper.actors.values.frozen import FrozenObject

CHAT: Sequence[Event] = (
    SystemPromptEvent(content="Be kind."),
    TurnStartedEvent(turn_id="t"),
    UserMessageEvent(
        turn_id="t", content="Where is it?", message_id="m", images=(ImageContent(url="data:x"),)
    ),
    ActionEvent(
        turn_id="t",
        tool_call_id="c",
        tool_name="find",
        arguments=FrozenObject({"order": 7, "fast": True}),
        llm_response_id="r",
        text="Let me see.",
    ),
    MessageQueuedEvent(turn_id="u", message_id="n", content="And mine?"),
    ObservationEvent(turn_id="t", tool_call_id="c", content="x" * 2_000),
    StepFinishedEvent(turn_id="t", usage=TokenUsage(input_tokens=5)),
    CondensationEvent(forgotten_event_ids=("a", "b"), summary="they spoke"),
    AgentErrorEvent(turn_id="t", tool_call_id="c", content="no result"),
    AgentMessageEvent(turn_id="t", content="On its \x1b[31mway\x07 [bold]now", interrupted=True),
    ConversationErrorEvent(turn_id="t", error="RateLimited", detail="wait"),
    TurnEndedEvent(turn_id="t", outcome="interrupted", detail="by n"),
)


async def write(path: Path, name: str, records: Sequence[Record], *, unfinished: bool) -> None:
    async with SQLiteJournal(path) as journal:
        claim = await journal.claim(name)
        await journal.append(
            name,
            records,
            epoch=claim.epoch,
            expected_seq=claim.head + 1,
            is_unfinished=unfinished,
        )


def records_of(events: Sequence[Event]) -> Sequence[Record]:
    return [Record(event.id, event.kind, encode_event(event)) for event in events]


@pytest.fixture
def db(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a name from before control characters in new names were refused."""
    path = tmp_path / "chats.db"

    async def let_pass(*_: object) -> None:
        pass

    async def fill() -> None:
        await write(path, "alice", records_of(CHAT), unfinished=False)
        await write(path, "bob\x1b[2J", records_of(CHAT[:2]), unfinished=True)

    with monkeypatch.context() as before:
        before.setattr(sqlite_journal, "check_new_name", let_pass)
        anyio.run(fill)
    return path


def show(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


def test_a_conversation_is_listed_with_its_status_title_labels_and_owner(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"

    async def fill() -> None:
        async with Conversations(quiet, journal=SQLiteJournal(path)) as conversations:
            chat = conversations["alice"]
            await (await chat.send("Hello")).end()
            await chat.change(title="日本" * 30, labels={"urgent": "", "area": "x"}, owner="al")
            await chat.fork("bob", at=1)
            await conversations["bob"].change(title="two\u202ewords", labels={"a": "b"}, owner="al")

    anyio.run(fill)
    result = show(path)
    assert result.exit_code == 0
    _, alice, about_alice, bob, about_bob = result.stdout.splitlines()
    assert (alice.split()[0], bob.split()[0]) == ("alice", "bob")
    assert about_bob == "  idle  “two\\u202ewords”  a=b  of al"
    assert about_alice.startswith("  finished  “日本")
    assert about_alice.endswith("…")
    assert cell_len(about_alice) <= 80
    (found, _) = json.loads(show(path, "--json").stdout)["conversations"]
    assert (found["status"], found["owner"], found["labels"]) == (
        "finished", "al", {"urgent": "", "area": "x"}
    )  # fmt: skip
    assert not found["is_stale"]


@agent
async def quiet(turn: TurnContext) -> None:
    await turn.say("Hello")


def test_all_conversations_are_listed_with_what_is_known_of_them(db: Path) -> None:
    result = show(db)

    assert result.exit_code == 0
    head, alice, bob = result.stdout.splitlines()
    assert head.split() == ["conversation", "events", "epoch", "last", "written"]
    assert alice.split()[:3] == ["alice", "12", "1"]
    assert "unfinished" not in alice
    assert bob.split()[:3] == ["bob\\x1b[2J", "2", "1"]
    assert bob.endswith("unfinished")


def test_the_list_as_json_is_one_object(db: Path) -> None:
    listed = json.loads(show(db, "--json").stdout)

    assert [c["conversation"] for c in listed["conversations"]] == ["alice", "bob\x1b[2J"]
    assert [c["events"] for c in listed["conversations"]] == [12, 2]
    assert [c["is_unfinished"] for c in listed["conversations"]] == [False, True]


def test_a_conversation_reads_as_a_chat(db: Path) -> None:
    lines = [" ".join(line.split()) for line in show(db, "alice").stdout.splitlines()]

    assert lines[:8] == [
        "1 system Be kind.",
        "2 event turn_started",
        "3 user Where is it?",
        "[image data:x]",
        "4 call Let me see.",
        "find(order=7, fast=true)",
        "5 queued And mine?",
        f"6 result {'x' * 63}",
    ]
    assert any(line.endswith("… (and 1,400 characters)") for line in lines)
    assert "8 condensed 2 events leave the view: they spoke" in lines
    assert "9 error no result" in lines
    assert "11 failure RateLimited: wait" in lines
    assert lines[-1] == "12 turn interrupted (by n)"
    assert any(line.startswith("7 event step_finished") for line in lines)


def test_what_a_chat_holds_cannot_drive_the_terminal(db: Path) -> None:
    stdout = show(db, "alice").stdout

    assert "\x1b" not in stdout
    assert "\x07" not in stdout
    assert "On its \\x1b[31mway\\x07 [bold]now [interrupted]" in stdout


def test_a_conversation_as_json_has_every_event_whole(db: Path) -> None:
    shown = json.loads(show(db, "alice", "--json").stdout)

    assert shown["conversation"] == "alice"
    assert [event.pop("seq") for event in shown["events"]] == list(range(1, 13))
    assert tuple(decode_event(json.dumps(event)) for event in shown["events"]) == CHAT


def test_showing_takes_no_ownership_and_works_beside_a_writer(db: Path) -> None:
    async def show_while_it_is_written() -> tuple[Result, int]:
        async with SQLiteJournal(db) as journal:
            claim = await journal.claim("alice")
            result = await anyio.to_thread.run_sync(show, db, "alice")
            # Still the owner: its epoch has not been shut out.
            await journal.append(
                "alice",
                records_of([TurnStartedEvent(turn_id="v")]),
                epoch=claim.epoch,
                expected_seq=claim.head + 1,
                is_unfinished=False,
            )
            return result, (await journal.info("alice")).epoch - claim.epoch

    result, later_epochs = anyio.run(show_while_it_is_written)

    assert result.exit_code == 0
    assert "On its" in result.stdout
    assert later_epochs == 0


@pytest.mark.parametrize("as_json", [False, True])
def test_an_unknown_conversation_is_told_and_not_made(db: Path, as_json: bool) -> None:
    result = show(db, "carol", *(["--json"] if as_json else []))

    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        f"turnkeeper: there is no conversation carol in {db}; `turnkeeper show {db}` lists the "
        "existing ones\n"
    )
    assert "carol" not in show(db).stdout


def test_a_name_that_is_no_text_names_no_conversation(db: Path) -> None:
    result = show(db, os.fsdecode(b"\xff"))

    assert result.exit_code == 2
    assert "there is no conversation \\udcff in " in result.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no such file; nothing was created"),
        (b"", "is an empty file; nothing was changed"),
        (b"dear diary" * 500, "it is no turnkeeper journal; nothing was changed"),
    ],
)
def test_what_is_no_journal_is_told_in_a_line_and_left_as_it_is(
    tmp_path: Path, content: bytes | None, told: str
) -> None:
    path = tmp_path / "other.db"
    if content is not None:
        path.write_bytes(content)

    result = show(path)

    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert [file.read_bytes() for file in tmp_path.iterdir()] == (
        [] if content is None else [content]
    )


def test_a_log_is_shown_up_to_what_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    broken = Record("broken", "turn_ended", b'{"kind": "turn_ended"}')
    anyio.run(lambda: write(path, "alice", [*records_of(CHAT[:3]), broken], unfinished=False))

    result = show(path, "alice")
    as_json = show(path, "alice", "--json")

    assert "Where is it?" in result.stdout
    assert result.exit_code == as_json.exit_code == 1
    assert result.stderr.startswith("turnkeeper: conversation alice cannot be read at seq 4: ")
    assert as_json.stdout == ""


def test_what_admission_refused_is_shown_with_why(db: Path) -> None:
    async def refuse() -> None:
        async with SQLiteJournal(db) as journal:
            rejection = Rejection(4e9, "unmatched_tool_result", "no call \x1b[1m9", b'{"id": "9"}')
            await journal.reject("alice", [rejection])

    anyio.run(refuse)
    lines = show(db, "alice", "--rejected").stdout.splitlines()
    assert lines == [
        "2096-10-02 07:06:40Z  unmatched_tool_result: no call \\x1b[1m9",
        '    {"id": "9"}',
    ]
    (as_json,) = json.loads(show(db, "alice", "--rejected", "--json").stdout)["rejected"]
    assert (as_json["violation"], as_json["event"]) == ("unmatched_tool_result", '{"id": "9"}')
    assert show(db, "bob\x1b[2J", "--rejected").stdout == ""
