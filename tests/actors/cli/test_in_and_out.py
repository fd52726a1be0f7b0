"""Conversations of other programs come in, and go out, through the command line."""

from __future__ import annotations

import io
import json
import os
import shutil
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from agents.memory import SQLiteSession
from typer.testing import CliRunner, Result

from turnkeeper.actors.cli import main
from turnkeeper.actors.cli._app import app
from turnkeeper.actors.cli._journal_jobs import _opened_whole

PEERS = Path(__file__).parents[1] / "recordings" / "peers"
SYSTEM = {"role": "system", "content": "You look up orders."}


def run(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert "Traceback" not in result.output
    return result


def chats(db: Path) -> dict[str, list[dict[str, Any]]]:
    """What `export --to openai` writes, by conversation."""
    result = run("export", db, "--to", "openai")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {line["id"]: line["messages"] for line in lines}


def call(call_id: str, order: int) -> dict[str, object]:
    function = {"name": "look_up", "arguments": json.dumps({"order": order})}
    return {"id": call_id, "type": "function", "function": function}


def answer(call_id: str, content: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


ORDERS: list[dict[str, Any]] = [
    {"role": "user", "content": "Where are orders 7 and 8?"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [call("call_1", 7), call("call_2", 8)],
    },
    answer("call_1", "order 7 is on its way"),
    answer("call_2", "order 8 is on its way"),
    {"role": "assistant", "content": "Both are on their way. Zoë, 日本."},
]


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "chats.db"


@pytest.fixture
def hermes(tmp_path: Path) -> Path:
    path = tmp_path / "state.db"
    with closing(sqlite3.connect(path)) as database:
        database.executescript((PEERS / "hermes.sql").read_text())
    return path


@pytest.fixture
def openhands(tmp_path: Path) -> Path:
    path = tmp_path / "conversations"
    shutil.copytree(PEERS / "openhands", path)
    return path


def sessions(path: Path, **items: Sequence[object]) -> Path:
    """Make sessions of the OpenAI Agents SDK with the SDK itself."""

    async def make() -> None:
        for session_id, of_session in items.items():
            session = SQLiteSession(session_id, path)
            await session.add_items(list(of_session))  # type: ignore[arg-type]
            session.close()

    anyio.run(make)
    return path


ITEMS: Sequence[object] = [
    {"role": "user", "content": "Where are orders 7 and 8?"},
    {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "two calls"}],
    },
    {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
    },
    {
        "type": "function_call",
        "call_id": "call_1",
        "name": "look_up",
        "arguments": '{"order": 7}',
    },
    {
        "type": "function_call",
        "call_id": "call_2",
        "name": "look_up",
        "arguments": '{"order": 8}',
    },
    {"type": "function_call_output", "call_id": "call_2", "output": "order 8 is on its way"},
    {"type": "function_call_output", "call_id": "call_1", "output": "order 7 is on its way"},
    {"role": "assistant", "content": "Both are on their way. Zoë, 日本."},
]


# --- in ------------------------------------------------------------------------------------------


def test_sessions_of_the_agents_sdk_come_in_with_calls_pictures_and_names(
    tmp_path: Path, db: Path
) -> None:
    picture = [
        {"type": "input_text", "text": "And this?"},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
    ]
    path = sessions(
        tmp_path / "sessions.db",
        **{"user-1": ITEMS, "user-2": [{"role": "user", "content": picture}]},
    )
    before = path.read_bytes()

    result = run("import", db, "--from", "openai-agents", path)

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "2 conversations imported, 8 new events\n"
    said, asked, *results, last = ORDERS
    assert chats(db) == {
        "user-1": [
            said,
            {"role": "assistant", "content": "Let me see."},
            {**asked, "content": None},
            *results,
            last,
        ],
        "user-2": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "And this?"},
                    {
                        "type": "image_url",
                        "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="},
                    },
                ],
            }
        ],
    }
    assert path.read_bytes() == before


def test_a_session_that_was_cut_off_comes_in_with_what_is_missing_said(
    tmp_path: Path, db: Path
) -> None:
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    path = sessions(tmp_path / "sessions.db", cut=[*ITEMS[:6], search])
    result = run("import", db, "--from", "openai-agents", path)
    assert result.exit_code == 0
    assert result.stderr == (f"left out:\n  {path}, conversation cut: 1 of web_search_call\n")
    missing, found = chats(db)["cut"][-2:]
    assert missing["content"].startswith("no result: none was recorded")
    assert (missing["tool_call_id"], found["tool_call_id"]) == ("call_1", "call_2")


def test_hermes_sessions_come_in_as_hermes_goes_on_with_them(hermes: Path, db: Path) -> None:
    result = run("import", db, "--from", "hermes", hermes)

    assert result.exit_code == 0
    assert result.stdout == "2 conversations imported, 13 new events\n"
    assert result.stderr == f"left out:\n  {hermes}, conversation empty: it has no messages\n"
    found = chats(db)
    *orders, picture, last = found["20261122_101500_ab12cd"]
    assert orders == [SYSTEM, *ORDERS]
    assert picture["content"][1]["image_url"]["url"].startswith("data:image/png")
    assert last["content"] == "I cannot read it."
    assert [one["content"] for one in found["telegram:42"]] == [
        "[summary] They greeted.",
        "Understood.",
        "Bye",
        "Bye.",
    ]


@pytest.mark.parametrize("is_parent", [True, False])
def test_an_openhands_folder_comes_in_and_so_does_one_of_such(
    openhands: Path, db: Path, is_parent: bool
) -> None:
    (folder,) = openhands.iterdir()
    result = run("import", db, "--from", "openhands", openhands if is_parent else folder)
    assert (result.exit_code, result.stderr) == (0, "")
    assert chats(db) == {
        folder.name: [
            SYSTEM,
            *ORDERS,
            {"role": "user", "content": "And 9?"},
            {"role": "assistant", "content": None, "tool_calls": [call("call_3", 9)]},
            answer("call_3", "Error executing tool 'look_up': no such order"),
            {"role": "assistant", "content": "There is no order 9."},
        ]
    }


def test_of_an_openhands_conversation_with_branches_the_one_it_stands_on_comes_in(
    openhands: Path, db: Path
) -> None:
    """As OpenHands has it: the second question was asked anew, and answered otherwise."""
    (folder,) = openhands.iterdir()
    events = sorted((folder / "events").iterdir())
    first_answer = json.loads(events[6].read_text())
    asked_anew = {
        **json.loads(events[7].read_text()),
        "id": "11111111-aaaa",
        "parent_id": first_answer["id"],
    }
    asked_anew["llm_message"]["content"][0]["text"] = "And 10?"
    (folder / "events" / "event-00011-11111111-aaaa.json").write_text(json.dumps(asked_anew))
    state = json.loads((folder / "base_state.json").read_text())
    state["leaf_event_id"] = asked_anew["id"]
    (folder / "base_state.json").write_text(json.dumps(state))

    assert run("import", db, "--from", "openhands", folder).exit_code == 0
    (found,) = chats(db).values()
    assert found == [SYSTEM, *ORDERS, {"role": "user", "content": "And 10?"}]


LEGACY = [
    {"role": "user", "content": "Where is order 7?"},
    {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "look_up", "arguments": '{"order": 7}'},
    },
    {"role": "function", "name": "look_up", "content": "on its way"},
    {"role": "assistant", "content": "It is on its way."},
]


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (json.dumps(LEGACY), "chat-1"),
        ("\n".join(map(json.dumps, LEGACY)), "chat-1"),
        (json.dumps([LEGACY]), "chat-1"),
        (json.dumps([{"id": "order/7", "messages": LEGACY}]), "chat-1"),
        (json.dumps([{"id": "order-7", "messages": LEGACY}]), "order-7"),
        (json.dumps({"conversation_id": "c", "id": 5, "messages": LEGACY}), "c"),
        (json.dumps({"id": 5, "messages": LEGACY}), "5"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--from", "openai"]])
def test_chats_come_in_as_lists_lines_and_records_with_ids_and_legacy_functions(
    tmp_path: Path, db: Path, content: str, name: str, options: list[str]
) -> None:
    file = tmp_path / "chat.json"
    file.write_text(content)
    result = run("import", db, file, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    assert chats(db) == {
        name: [
            LEGACY[0],
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call("function_call_2", 7)],
            },
            answer("function_call_2", "on its way"),
            LEGACY[3],
        ]
    }


# --- what cannot be used -------------------------------------------------------------------------


def test_a_bad_conversation_is_told_by_its_place_and_the_others_come_in(
    tmp_path: Path, hermes: Path, openhands: Path, db: Path
) -> None:
    path = sessions(
        tmp_path / "sessions.db",
        bad=[
            {"role": "user", "content": "hi"},
            {"type": "function_call_output", "call_id": "x", "output": "y"},
        ],
        good=ITEMS,
        worse=[{"role": "user", "content": "hi"}],
    )
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE agent_messages SET message_data = '{' WHERE session_id = 'worse'")
    with closing(sqlite3.connect(hermes)) as database, database:
        database.execute("UPDATE messages SET tool_calls = '[{' WHERE id = 2")
    (folder,) = openhands.iterdir()
    events = sorted((folder / "events").iterdir())
    events[3].write_text("{")
    (folder / "base_state.json").unlink()

    agents = run("import", db, "--from", "openai-agents", path, tmp_path / "none.db")
    assert agents.exit_code == 2
    assert agents.stdout == "1 conversation imported, 7 new events\n"
    *places, missing = agents.stderr.splitlines()[1:]
    assert places == [
        (
            f"  {path}, conversation bad, row 2: a result without its call: no open call has the "
            "id 'x'"
        ),
        f"  {path}, conversation worse, row 11, role: a string is needed, found null",
    ]
    assert missing == f"  {tmp_path / 'none.db'}: there is no such file"
    told = run("import", db, "--from", "hermes", hermes)
    assert told.exit_code == 2
    assert "conversation 20261122_101500_ab12cd, row 2, tool_calls: a list is needed" in told.stderr
    assert told.stdout == "1 conversation imported, 4 new events\n"
    told = run("import", db, "--from", "openhands", folder)
    assert told.exit_code == 2
    assert f"conversation {folder.name}, {events[3].name}" in told.stderr
    assert sorted(chats(db)) == ["good", "telegram:42"]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("hermes", "it is not a SQLite database"),
        ("openai-agents", "it is not a SQLite database"),
        ("openhands", "a folder is needed"),
    ],
)
def test_what_is_of_another_program_is_told_in_a_line_and_makes_no_journal(
    tmp_path: Path, db: Path, source: str, told: str
) -> None:
    file = tmp_path / "other"
    file.write_text("dear diary" * 200)
    result = run("import", db, "--from", source, file)
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 2
    assert not db.exists()


def test_a_database_of_one_program_is_not_read_as_anothers(
    tmp_path: Path, hermes: Path, db: Path
) -> None:
    result = run("import", db, "--from", "openai-agents", hermes)
    assert result.exit_code == 2
    assert "it has no table agent_messages and no table agent_sessions" in result.stderr
    path = sessions(tmp_path / "sessions.db", one=ITEMS)
    result = run("import", db, "--from", "hermes", path)
    assert "it has no table messages and no table sessions" in result.stderr


def test_a_conversation_that_is_there_already_is_left_as_it_is(hermes: Path, db: Path) -> None:
    run("import", db, "--from", "hermes", hermes)
    before = chats(db)
    again = run("import", db, "--from", "hermes", hermes)
    assert again.exit_code == 2
    assert again.stdout == "0 conversations imported, 0 new events\n"
    assert again.stderr.count(" exists already and ends at seq ") == len(before)
    assert chats(db) == before


# --- out, and in again ---------------------------------------------------------------------------


def test_what_goes_out_for_openai_comes_in_again_as_it_was(
    hermes: Path, openhands: Path, tmp_path: Path, db: Path
) -> None:
    run("import", db, "--from", "hermes", hermes)
    run("import", db, "--from", "openhands", openhands)
    file = tmp_path / "out.jsonl"
    result = run("export", db, "--to", "openai", "-o", file)
    assert result.stdout == f"3 conversations, 24 events, written to {file}\n"

    other = tmp_path / "other.db"
    assert run("import", other, file).exit_code == 0
    assert chats(other) == chats(db)


def test_what_goes_out_for_openhands_comes_in_again_as_it_was(
    hermes: Path, openhands: Path, tmp_path: Path, db: Path
) -> None:
    """That OpenHands itself reads these files was tried with its package; it is not installed."""
    run("import", db, "--from", "hermes", hermes)
    run("import", db, "--from", "openhands", openhands)
    folder = tmp_path / "out"
    result = run("export", db, "--to", "openhands", "-o", folder)
    assert result.stdout == f"3 conversations, 24 events, written to {folder}\n"

    other = tmp_path / "other.db"
    assert run("import", other, "--from", "openhands", folder).exit_code == 0
    assert sorted(map(json.dumps, chats(other).values())) == sorted(
        map(json.dumps, chats(db).values())
    )


def test_the_files_for_openhands_have_the_fields_of_its_own(
    openhands: Path, tmp_path: Path, db: Path
) -> None:
    """Each file is compared with the one that OpenHands itself wrote for the same event."""
    run("import", db, "--from", "openhands", openhands)
    out = tmp_path / "out"
    run("export", db, "--to", "openhands", "-o", out)
    theirs, ours = (
        [json.loads(file.read_text()) for file in sorted(folder.glob("*/events/event-*"))]
        for folder in (openhands, out)
    )
    assert len(theirs) == len(ours) == 11
    before = None
    for one, other in zip(theirs, ours, strict=True):
        if one["kind"] == "AgentErrorEvent":
            assert other["kind"] == "ObservationEvent"  # it came in as a result
        else:
            assert (other["kind"], other["source"]) == (one["kind"], one["source"])
            assert set(other) - {"parent_id"} <= set(one) | {"parent_id"}
        assert other["parent_id"] == before
        before = other["id"]


def test_folders_are_not_mixed_with_what_is_there(db: Path, hermes: Path, tmp_path: Path) -> None:
    run("import", db, "--from", "hermes", hermes)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    result = run("export", db, "--to", "openhands", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "not an empty folder; nothing was done" in result.stderr
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["mine"]
    result = run("export", db, "--to", "openhands")
    assert "name one with --output" in result.stderr


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("options", [(), ("--to", "openai")])
def test_a_pipe_is_written_to_and_not_replaced_by_a_file(
    db: Path, hermes: Path, tmp_path: Path, options: Sequence[str]
) -> None:
    """So was a device: `--to openai -o /dev/null` of root made /dev/null a file."""
    run("import", db, "--from", "hermes", hermes)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        result = run("export", db, *options, "-o", pipe)
        assert (result.exit_code, pipe.is_fifo()) == (0, True), result.stderr
        assert os.read(reader, 1 << 20).decode() == run("export", db, *options).stdout
    finally:
        os.close(reader)
    assert sorted(tmp_path.glob("pipe*")) == [pipe]


@pytest.mark.parametrize("options", [(), ("--to", "openai")])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_to_a_file_is_written_through_and_not_replaced(
    db: Path, hermes: Path, tmp_path: Path, options: Sequence[str], *, is_there: bool
) -> None:
    """`-o /dev/stdout` of root, with standard output in a file, made /dev/stdout a file."""
    run("import", db, "--from", "hermes", hermes)
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder / "file")
    if is_there:
        link.write_text("before")

    result = run("export", db, *options, "-o", link, "--yes")

    assert (result.exit_code, link.is_symlink()) == (0, True), result.stderr
    assert link.read_text() == run("export", db, *options).stdout
    assert [file.name for file in folder.iterdir()] == ["file"]


@pytest.mark.parametrize("options", [(), ("--to", "openai")])
def test_what_is_written_to_a_pipe_comes_in_again_whatever_the_locale_says(
    tmp_path: Path, options: Sequence[str]
) -> None:
    """Where the locale is Latin-1 an export was in Latin-1, and a tick in it was a traceback."""
    chat = [{"role": "user", "content": "né ✓"}, {"role": "assistant", "content": "für ✓"}]
    (tmp_path / "chats.json").write_text(json.dumps(chat), encoding="utf-8")
    first, second = tmp_path / "first.db", tmp_path / "second.db"
    run("import", first, tmp_path / "chats.json")
    latin = CliRunner(charset="latin-1")

    written = latin.invoke(app, ["export", str(first), *options]).stdout_bytes
    (tmp_path / "written.jsonl").write_bytes(written)
    run("import", second, tmp_path / "written.jsonl")

    (row,) = json.loads(run("show", second, "--json").stdout)["conversations"]
    shown = latin.invoke(app, ["show", str(second), row["conversation"], "--json"]).stdout_bytes
    events = json.loads(shown.decode("utf-8"))["events"]
    assert [event["content"] for event in events] == ["né ✓", "für ✓"]


def test_a_character_that_a_terminal_cannot_show_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = [{"role": "user", "content": "né"}, {"role": "assistant", "content": "ja"}]
    (tmp_path / "chats.json").write_text(json.dumps(chat), encoding="utf-8")
    run("import", tmp_path / "chats.db", tmp_path / "chats.json")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    (row,) = json.loads(run("show", tmp_path / "chats.db", "--json").stdout)["conversations"]
    name = row["conversation"]
    monkeypatch.setattr(sys, "argv", ["turnkeeper", "show", str(tmp_path / "chats.db"), name])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 0
    sys.stdout.flush()
    assert b"n\\xe9" in written.getvalue()


def test_of_two_exports_to_one_file_at_once_each_is_whole_when_it_ends(tmp_path: Path) -> None:
    """Both had one draft: the first said that it was done, and the second went on in its file."""
    output = tmp_path / "chats.jsonl"
    beside = tmp_path / "chats.jsonl.part"
    beside.write_text("of another program")
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(_opened_whole(output)).write("first\n" * 10_000)
        second.enter_context(_opened_whole(output)).write("second\n" * 20_000)

        first.close()
        assert output.read_text() == "first\n" * 10_000
        second.close()
        assert output.read_text() == "second\n" * 20_000
    assert beside.read_text() == "of another program"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("letter", ["a", "\N{GRINNING FACE}"])
def test_a_file_may_have_the_longest_name(tmp_path: Path, letter: str) -> None:
    """The draft's name was longer by 14 bytes."""
    output = tmp_path / (letter * (255 // len(letter.encode())))

    with _opened_whole(output) as file:
        file.write("whole")
        assert all(path.name.endswith(".part") for path in tmp_path.iterdir())
    assert output.read_text() == "whole"


def test_a_file_that_is_written_anew_keeps_its_permissions(tmp_path: Path) -> None:
    """One that only its user could read could be read by all after the next export."""
    output = tmp_path / "chats.jsonl"
    output.touch(0o600)

    with _opened_whole(output) as file:
        file.write("private")
        (draft,) = set(tmp_path.iterdir()) - {output}
        assert draft.stat().st_mode & 0o777 == 0o600
    assert output.stat().st_mode & 0o777 == 0o600
