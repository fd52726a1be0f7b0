"""`turnkeeper show` reads a journal that it does not own, and says clearly what it cannot read."""

import json
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from rich.cells import cell_len
from typer.testing import CliRunner, Result

from tests.browser.stories import Story
from turnkeeper.actors import (
    Conversations,
    Event,
    ImageContent,
    ModelResponse,
    ScriptedModel,
    SQLiteJournal,
    TokenUsage,
    ToolAgent,
    ToolCall,
    TurnContext,
    agent,
)
from turnkeeper.actors.cli._app import app
from turnkeeper.actors.cli._asking import without_password
from turnkeeper.actors.cli._show import said_by
from turnkeeper.actors.events import (
    ActionEvent,
    AgentErrorEvent,
    AgentMessageEvent,
    CondensationEvent,
    ConfirmationGivenEvent,
    ConfirmationRequestedEvent,
    ConversationErrorEvent,
    MessageQueuedEvent,
    ObservationEvent,
    RetractionEvent,
    StepFinishedEvent,
    SystemPromptEvent,
    TurnEndedEvent,
    TurnStartedEvent,
    UserMessageEvent,
    UserRejectEvent,
    decode_event,
    encode_event,
)
from turnkeeper.actors.journal import Record, Rejection
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
        claim = await journal.claim(name, any_name=True)
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
def db(tmp_path: Path) -> Path:
    """A file with a name that no new conversation can have."""
    path = tmp_path / "chats.db"

    async def fill() -> None:
        await write(path, "alice", records_of(CHAT), unfinished=False)
        await write(path, "bob\x1b[2J", records_of(CHAT[:2]), unfinished=True)

    anyio.run(fill)
    return path


def show(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


def test_a_conversation_that_waits_is_listed_with_the_calls_that_wait(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"

    async def pay(order: int) -> str:
        """Pay an order back."""
        return "paid"

    async def fill() -> None:
        asked = ModelResponse("", [ToolCall("pay", {"order": 7}), ToolCall("pay", {"order": 8})])
        asking = ToolAgent(ScriptedModel([asked] * 2), [pay], confirm="always")
        async with Conversations(asking, journal=SQLiteJournal(path)) as conversations:
            for name in ("alice", "bob"):
                await conversations[name].send("Pay them back")
                async for _, event in conversations[name].events():
                    if event.kind == "confirmation_requested":
                        break
            await conversations["bob"].pause()

    anyio.run(fill)

    lines = show(path).stdout.splitlines()
    assert lines[2::2] == ["  waiting for confirmation of pay, pay", "  paused"]


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


def test_a_long_name_does_not_push_the_other_rows_out_of_sight(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"

    async def fill() -> None:
        async with Conversations(quiet, journal=SQLiteJournal(path)) as conversations:
            for name in ("alice", "b" * 200):
                await (await conversations[name].send("Hello")).end()

    anyio.run(fill)
    head, alice, _, longest, _ = show(path).stdout.splitlines()
    assert max(len(head), len(alice)) <= 80
    assert longest.startswith("b" * 200 + "       4")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--match", "nowhere"], "no such conversations"),
        (["alice", "--match", "nowhere"], "no such events"),
        (["alice", "--view", "--match", "nowhere"], "no such events"),
        (["alice", "--rejected"], "admission refused no event of alice"),
    ],
)
def test_it_says_that_it_found_nothing(db: Path, arguments: list[str], said: str) -> None:
    result = show(db, *arguments)

    assert (result.exit_code, result.stdout) == (0, f"{said}\n")
    json.loads(show(db, *arguments, "--json").stdout)  # which says it by an empty list


def test_a_rejection_is_shown_as_one_and_not_as_an_error() -> None:
    rejected = UserRejectEvent(tool_call_id="c", content="not on Friday")

    assert said_by(rejected)[1:] == ("rejected", "not on Friday")


def test_the_list_as_json_is_one_object(db: Path) -> None:
    listed = json.loads(show(db, "--json").stdout)

    assert [c["conversation"] for c in listed["conversations"]] == ["alice", "bob\x1b[2J"]
    assert [c["events"] for c in listed["conversations"]] == [12, 2]
    assert [c["is_unfinished"] for c in listed["conversations"]] == [False, True]


def test_a_conversation_reads_as_a_chat(db: Path) -> None:
    day, *shown = show(db, "alice").stdout.splitlines()
    lines = [re.sub(r" \d\d:\d\d:\d\d ", " ", " ".join(line.split())) for line in shown]

    assert day == f"{CHAT[0].timestamp:%Y-%m-%d}, times in UTC"
    assert shown[0].startswith(f"  1  {CHAT[0].timestamp:%H:%M:%S}  system     Be kind.")
    assert not any(line.endswith(" ") for line in shown)
    assert lines[:8] == [
        "1 system Be kind.",
        "2 turn started",
        "3 user Where is it?",
        "[image data:x]",
        "4 call Let me see.",
        "find(order=7, fast=true)",
        "5 queued And mine?",
        f"6 result {'x' * 54}",
    ]
    assert any(line.endswith("… (and 1,400 characters)") for line in lines)
    assert "8 condensed 2 events leave the view: they spoke" in lines
    assert "9 error no result" in lines
    assert "11 failure RateLimited: wait" in lines
    assert lines[-1] == "12 turn interrupted (by n)"
    assert "7 step model call, 5 tokens in, 0 out" in lines


@pytest.mark.parametrize(
    ("event", "shown"),
    [
        (ConfirmationRequestedEvent(turn_id="t", tool_call_ids=("a", "b")), "2 calls to confirm"),
        (ConfirmationGivenEvent(turn_id="t", confirmed=True), "confirmed"),
        (
            ConfirmationGivenEvent(turn_id="t", confirmed=True, rejected=("a",)),
            "confirmed, 1 rejected",
        ),
        (ConfirmationGivenEvent(turn_id="t", confirmed=False), "rejected"),
        (
            StepFinishedEvent(
                turn_id="t",
                usage=TokenUsage(model="m", input_tokens=8_000, output_tokens=2, latency_s=0.5),
            ),
            "m, 8,000 tokens in, 2 out, 0.50 s",
        ),
        (RetractionEvent(retracted_event_ids=("a", "b")), "2 events taken out of the view"),
    ],
)
def test_what_a_turn_does_is_said_in_words(event: Event, shown: str) -> None:
    assert said_by(event)[2] == shown
    assert said_by(event, is_whole=True)[2].split("\n")[0] == shown


def test_results_of_calls_that_ran_side_by_side_name_their_calls(tmp_path: Path) -> None:
    """They come in any order; the result of a call that ran alone needs no name."""
    path = tmp_path / "calls.db"

    def call(tool_call_id: str, response_id: str, tool_name: str = "find") -> Event:
        return ActionEvent(
            turn_id="t", tool_call_id=tool_call_id, tool_name=tool_name, llm_response_id=response_id
        )

    def result(tool_call_id: str) -> Event:
        return ObservationEvent(turn_id="t", tool_call_id=tool_call_id, content=tool_call_id)

    log = (
        TurnStartedEvent(turn_id="t"),
        UserMessageEvent(turn_id="t", content="Where?", message_id="m"),
        *(call("a", "r"), call("b", "r"), call("c", "r", "n" * 5_000)),
        AgentErrorEvent(turn_id="t", tool_call_id="b", content="none"),
        UserRejectEvent(turn_id="t", tool_call_id="c", content="no"),
        result("a"),
        *(call("d", "s"), result("d")),
    )
    anyio.run(partial(write, path, "alice", records_of(log), unfinished=True))

    said = [line[15:] for line in show(path, "alice").stdout.splitlines()]
    assert [line for line in said if line.startswith(("error", "rejected", "result"))] == [
        "error      find (seq 4): none",
        f"rejected   {'n' * 54}",
        "result     find (seq 3): a",
        "result     d",
    ]
    assert f"           {'n' * 10}… (and 4,936 characters) (seq 5): no" in said
    assert "result     find (seq 3): a" in show(path, "alice", "--tail", "3").stdout


def test_a_whole_event_has_its_fields_after_the_words_and_none_that_is_empty() -> None:
    step = StepFinishedEvent(turn_id="t", usage=TokenUsage(input_tokens=5))
    assert said_by(step, is_whole=True) == (
        "dim",
        "step",
        'model call, 5 tokens in, 0 out\nusage={"input_tokens": 5}',
    )
    assert said_by(TurnStartedEvent(turn_id="t"), is_whole=True) == ("dim", "turn", "started")


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


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://ann:secret@db:5432/chats", "postgresql://ann@db:5432/chats"),
        ("postgresql://ann@db/chats", "postgresql://ann@db/chats"),
        ("postgresql://:secret@db/chats", "postgresql://@db/chats"),
        ("postgresql://db/chats?user=ann&password=secret", "postgresql://db/chats?user=ann&"),
        ("postgresql://db/chats?password=secret&user=ann", "postgresql://db/chats?user=ann"),
        ("postgresql://db/chats?sslpassword=secret", "postgresql://db/chats?"),
        ("postgres1://ann:secret@db/chats", "postgres1://ann@db/chats"),
        ("Postgresql//ann:secret@db/chats", "Postgresql//ann@db/chats"),
        ("//ann:secret@db/chats", "//ann@db/chats"),
        ("'postgresql://ann:secret@db/chats'", "'postgresql://ann@db/chats'"),
        (" postgres_://ann:secret@db/chats", " postgres_://ann@db/chats"),
        ("jdbc:postgresql://ann:secret@db/chats", "jdbc:postgresql://ann@db/chats"),
        ("URL=postgresql://ann:secret@db/chats", "URL=postgresql://ann@db/chats"),
        ("folder//chats@home.db", "folder//chats@home.db"),
        ("folder//ann:chats@home.db", "folder//ann:chats@home.db"),
    ],
)
def test_a_url_is_shown_with_its_user_and_without_any_password(url: str, shown: str) -> None:
    """A command that a message names is to be typed as it is, so it names the user."""
    assert without_password(url) == shown


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


def test_a_command_to_copy_is_quoted_for_the_shell(db: Path) -> None:
    spaced = db.rename(db.with_name("my chats.db"))

    assert f"`turnkeeper show '{spaced}'` lists" in show(spaced, "carol").stderr


def test_a_name_that_is_no_text_names_no_conversation(db: Path) -> None:
    result = show(db, os.fsdecode(b"\xff"))

    assert result.exit_code == 2
    assert "there is no conversation \\udcff in " in result.stderr


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "no such file; nothing was created"),
        (b"", "is an empty file; nothing was changed"),
        (b"dear diary" * 500, "it is not a turnkeeper journal; nothing was changed"),
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
            await journal.reject("alice", [rejection], epoch=(await journal.claim("alice")).epoch)

    anyio.run(refuse)
    lines = show(db, "alice", "--rejected").stdout.splitlines()
    assert lines == [
        "2096-10-02 07:06:40Z  unmatched_tool_result: no call \\x1b[1m9",
        '    {"id": "9"}',
    ]
    (as_json,) = json.loads(show(db, "alice", "--rejected", "--json").stdout)["rejected"]
    assert (as_json["violation"], as_json["event"]) == ("unmatched_tool_result", '{"id": "9"}')
    said = show(db, "bob\x1b[2J", "--rejected").stdout
    assert said == "admission refused no event of bob\\x1b[2J\n"


# --- a part of it --------------------------------------------------------------------------------


def seqs(result: Result) -> list[int]:
    """The seqs of the events that a chat begins its lines with."""
    assert result.exit_code == 0, result.stderr
    return [int(found) for found in re.findall(r"^ *(\d+)  \d\d:", result.stdout, re.MULTILINE)]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--limit", "2"], [1, 2]),
        (["--tail", "2"], [11, 12]),
        (["--tail", "99"], [*range(1, 13)]),
        (["--at", "3"], [1, 2, 3]),
        (["--at", "12", "--tail", "1"], [12]),
        (["--at", "4", "--tail", "1"], [4]),
        (["--match", "WHERE"], [3]),
        (["--match", "order"], [4]),
        (["--match", "turn", "--limit", "1"], [2]),
        (["--match", "x" * 1_000], [6]),
        (["--match", "[31m"], [10]),
        (["--match", "no such word"], []),
    ],
)
def test_a_part_of_a_chat_is_shown(db: Path, options: list[str], found: list[int]) -> None:
    assert seqs(show(db, "alice", *options)) == found
    as_json = json.loads(show(db, "alice", "--json", *options).stdout)
    assert [event["seq"] for event in as_json["events"]] == found


def test_a_part_of_the_list_is_shown(db: Path) -> None:
    def names(*options: str) -> list[str]:
        listed = json.loads(show(db, "--json", *options).stdout)["conversations"]
        assert len(show(db, *options).stdout.splitlines()) >= len(listed) + 1
        return [one["conversation"] for one in listed]

    assert names("--limit", "1") == ["alice"]
    assert names("--match", "BOB") == ["bob\x1b[2J"]
    assert names("--match", "o") == ["bob\x1b[2J"]
    assert names("--match", "carol") == []


def test_conversations_are_found_by_title_label_and_owner(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"

    async def fill() -> None:
        async with Conversations(quiet, journal=SQLiteJournal(path)) as conversations:
            for name in ("a", "b", "c", "d"):
                await (await conversations[name].send("Hello")).end()
            await conversations["a"].change(title="Order 7")
            await conversations["b"].change(labels={"area": "billing"})
            await conversations["c"].change(owner="Zoë")

    anyio.run(fill)
    for word, name in (("ORDER", "a"), ("area=bill", "b"), ("ZOË", "c")):
        (found,) = json.loads(show(path, "--json", "--match", word).stdout)["conversations"]
        assert found["conversation"] == name


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["alice", "--at", "13"], "--at is 13; the log has 12 events"),
        (["alice", "--step", "2"], "--step is 2; the log has 1 model call"),
        (["alice", "--step", "1"], "step 1 does not say which view its model saw"),
        (["alice", "--limit", "1", "--tail", "1"], "--limit and --tail do not go together"),
        (["alice", "--view", "--html", "x.html"], "--view and --html do not go together"),
        (["alice", "--at", "1", "--step", "1"], "--at and --step do not go together"),
        (["--tail", "1"], "name a conversation"),
        (["--html", "x.html"], "name a conversation"),
    ],
)
def test_options_that_cannot_be_met_are_told_in_a_line(
    db: Path, options: list[str], told: str
) -> None:
    result = show(db, *options)
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


# --- the view, and the steps ---------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    """Two turns of a real agent; then the first exchange is forgotten, with a summary."""
    path = tmp_path / "asked.db"
    model = ScriptedModel(
        [
            ModelResponse(
                "It is on its way.",
                usage=TokenUsage(input_tokens=1_200, output_tokens=34, latency_s=1.5, model="m-1"),
                provider_response_id="resp_9",
            ),
            "Tomorrow.",
        ]
    )

    async def fill() -> None:
        async with Conversations(ToolAgent(model), journal=SQLiteJournal(path)) as conversations:
            alice = conversations["alice"]
            await (await alice.send("Where is order 7?")).reply()
            await (await alice.send("When will it be here?")).reply()
            view = (await alice.view())[:2]
            forgotten = tuple(event.id for event in view)
        async with SQLiteJournal(path) as journal:
            claim = await journal.claim("alice")
            condensed = CondensationEvent(
                forgotten_event_ids=forgotten, summary="Order 7 is on its way.", summary_offset=0
            )
            await journal.append(
                "alice",
                records_of([condensed]),
                epoch=claim.epoch,
                expected_seq=claim.head + 1,
                is_unfinished=False,
            )

    anyio.run(fill)
    return path


def said(result: Result) -> list[str]:
    """The lines of a chat: who, and what."""
    assert result.exit_code == 0, result.stderr
    found = re.findall(
        r"^ *\d*  (?:\d\d:\d\d:\d\d|      ) *(\w+) +(.*)$", result.stdout, re.MULTILINE
    )
    return [f"{by} {text}" for by, text in found]


def test_the_view_is_shown_as_it_is_and_as_it_was(asked: Path) -> None:
    assert said(show(asked, "alice", "--view")) == [
        "summary Order 7 is on its way.",
        "user When will it be here?",
        "agent Tomorrow.",
    ]
    assert said(show(asked, "alice", "--view", "--at", "7")) == [
        "user Where is order 7?",
        "agent It is on its way.",
        "user When will it be here?",
    ]
    as_json = json.loads(show(asked, "alice", "--view", "--json").stdout)
    assert as_json["at"] == 11
    assert [event["seq"] for event in as_json["view"]] == [None, 7, 8]


def test_a_step_is_shown_with_what_its_model_saw_and_answered(asked: Path) -> None:
    first = show(asked, "alice", "--step", "1")
    facts, *_ = first.stdout.splitlines()
    assert facts == (
        "step 1 of 2, finished, view at seq 2, m-1, 1,200 tokens in, 34 out, 1.5 s, response"
    ) or facts.startswith("step 1 of 2, finished, view at seq 2, m-1, 1,200 tokens in, 34 out")
    assert "response resp_9" in " ".join(first.stdout.split())
    assert said(first) == ["user Where is order 7?", "agent It is on its way."]
    assert said(show(asked, "alice", "--step", "2")) == [
        "user Where is order 7?",
        "agent It is on its way.",
        "user When will it be here?",
        "agent Tomorrow.",
    ]
    as_json = json.loads(show(asked, "alice", "--step", "1", "--json").stdout)
    assert as_json["usage"]["input_tokens"] == 1_200
    assert [event["seq"] for event in as_json["view"]] == [2]
    assert [event["content"] for event in as_json["answer"]] == ["It is on its way."]


# --- the page ------------------------------------------------------------------------------------

HOSTILE = "</div><script>alert(1)</script><img src=http://x/ onerror=alert(2)>&amp;\x1b[31m"


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, list[str]] = {}
        self.text = ""
        self.open: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data if "style" not in self.open else ""


def page_of(db: Path, name: str, *options: str) -> Page:
    file = db.parent / "page.html"
    result = show(db, name, "--html", file, "--yes", *options)
    assert (result.exit_code, result.stdout) == (0, f"written to {file}\n"), result.stderr
    return Page(file.read_text(encoding="utf-8"))


def test_the_page_needs_nothing_else_and_shows_whatever_was_said_as_text(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    events: Sequence[Event] = (
        TurnStartedEvent(turn_id="t"),
        UserMessageEvent(
            turn_id="t", content=HOSTILE, message_id="m", images=(ImageContent(url=HOSTILE),)
        ),
        ActionEvent(
            turn_id="t",
            tool_call_id="c",
            tool_name=HOSTILE,
            arguments=FrozenObject({HOSTILE: HOSTILE}),
            llm_response_id="r",
        ),
        ObservationEvent(turn_id="t", tool_call_id="c", content=HOSTILE),
        StepFinishedEvent(turn_id="t", usage=TokenUsage(model=HOSTILE, latency_s=1.0)),
        ConversationErrorEvent(turn_id="t", error=HOSTILE, detail=HOSTILE),
        TurnEndedEvent(turn_id="t", outcome="failed", detail=HOSTILE),
    )
    anyio.run(lambda: write(path, HOSTILE, records_of(events), unfinished=False))

    page = page_of(path, HOSTILE)

    assert page.open == []
    assert page.tags == {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "section", "div", "span"
    }  # fmt: skip
    assert set(page.attributes) == {
        "lang", "charset", "http-equiv", "content", "name", "class", "style", "title"
    }  # fmt: skip
    assert any(value.startswith("default-src 'none'") for value in page.attributes["content"])
    assert page.text.count("<script>alert(1)</script>") >= 9
    assert "\x1b" not in page.text


def test_the_page_has_each_turn_with_its_events_and_a_bar_for_what_took_time(
    tmp_path: Path,
) -> None:
    path = tmp_path / "chats.db"
    begin = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    def at(seconds: float) -> datetime:
        return begin + timedelta(seconds=seconds)

    events: Sequence[Event] = (
        SystemPromptEvent(content="Be kind.", timestamp=at(-10)),
        TurnStartedEvent(turn_id="t", timestamp=at(0)),
        UserMessageEvent(turn_id="t", content="one", message_id="m", timestamp=at(0)),
        ActionEvent(
            turn_id="t", tool_call_id="c", tool_name="find", llm_response_id="r", timestamp=at(2)
        ),
        StepFinishedEvent(
            turn_id="t", usage=TokenUsage(model="m-1", latency_s=2.0), timestamp=at(2)
        ),
        MessageQueuedEvent(turn_id="u", message_id="n", content="two", timestamp=at(3)),
        ObservationEvent(turn_id="t", tool_call_id="c", content="x" * 900, timestamp=at(7)),
        TurnEndedEvent(turn_id="t", outcome="completed", timestamp=at(10)),
        TurnStartedEvent(turn_id="u", timestamp=at(10)),
        UserMessageEvent(turn_id="u", content="two", message_id="n", timestamp=at(10)),
    )
    anyio.run(lambda: write(path, "alice", records_of(events), unfinished=True))

    page = page_of(path, "alice")

    assert "10 events, 2 turns, from 2026-01-02 03:03:55 to 2026-01-02 03:04:15 UTC" in page.text
    assert "Turn 1 2026-01-02 03:04:05, 10.0 s, completed" in page.text
    assert "Turn 2 2026-01-02 03:04:15, 0 ms, goes on" in page.text
    bars = [value for value in page.attributes["style"] if value.startswith("left")]
    assert bars == [
        "left:0.00%;width:20.00%",
        "left:20.00%;width:50.00%",
        "left:0.00%;width:100.00%",
    ]
    assert "x" * 900 in page.text
    assert [page.text.index(label) for label in ("model m-1", "find", "message waits")] == sorted(
        page.text.index(label) for label in ("model m-1", "find", "message waits")
    )
    assert "Turn 2" not in page_of(path, "alice", "--at", "8").text


def test_the_bar_of_a_call_begins_when_the_user_has_confirmed_it(tmp_path: Path) -> None:
    """A call that was never confirmed has none: it did not run."""
    path, story = tmp_path / "chats.db", Story("alice")
    for call, at in (("confirmed", 0), ("cut off", 10)):
        story.at(at).says(call, "Pay order 7 back.")
        story.add(ActionEvent, tool_call_id=call, tool_name="pay", llm_response_id="r")
        story.asks(call)
        if call == "confirmed":
            story.at(at + 6).confirmed()
            story.at(at + 8).results(call, "paid back")
        else:
            story.at(at + 8).gives_up(call)
        story.ends("completed")
    anyio.run(lambda: write(path, "alice", records_of(story.events), unfinished=False))

    page = page_of(path, "alice")

    bars = [value for value in page.attributes["style"] if value.startswith("left")]
    assert bars == ["left:0.00%;width:75.00%", "left:75.00%;width:25.00%"]


def test_a_file_that_is_there_is_not_replaced_without_being_told_to(db: Path) -> None:
    file = db.parent / "kept.html"
    file.write_text("mine")
    result = show(db, "alice", "--html", file)
    assert result.exit_code == 2
    assert "is there already, and will be replaced; nothing was done" in result.stderr
    assert file.read_text() == "mine"


def test_a_log_that_cannot_be_read_to_its_end_is_drawn_as_far_as_it_can(tmp_path: Path) -> None:
    path, file = tmp_path / "chats.db", tmp_path / "page.html"
    broken = Record("broken", "turn_ended", b'{"kind": "turn_ended"}')
    anyio.run(lambda: write(path, "alice", [*records_of(CHAT[:3]), broken], unfinished=False))
    result = show(path, "alice", "--html", file)
    assert result.exit_code == 1
    assert "Where is it?" in file.read_text()
    assert result.stderr.startswith("turnkeeper: conversation alice cannot be read at seq 4: ")
