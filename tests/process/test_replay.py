"""The command line with real processes: killed at moments that a seed chooses, and broken."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Never

import anyio
import anyio.to_thread
import pytest
from typer.testing import CliRunner, Result

from tests.drawn import drawn
from turnkeeper.actors import SQLiteJournal
from turnkeeper.actors.cli import _app, _replay
from turnkeeper.actors.cli._report import empty_report
from turnkeeper.actors.events import MessageQueuedEvent, encode_event
from turnkeeper.actors.journal import Record
from turnkeeper.actors.recordings.samples import read_samples
from turnkeeper.actors.recordings.transcripts import InputProblem
from turnkeeper.actors.values.text import TEXT_LENGTH_MAX

from .command import COMMAND

pytestmark = pytest.mark.in_parts(4)

BROKEN_WORKER = Path(__file__).parent / "broken_worker.py"
AIRLINE = Path(__file__).parents[3] / "shared" / "data" / "airline_transcripts.json"
BREACHES = ("lost", "duplicated", "out_of_order", "views_diverged")


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(_app.app, [str(argument) for argument in arguments])


def report_of(result: Result) -> dict[str, Any]:
    """The one object on the standard output."""
    report: dict[str, Any] = json.loads(result.stdout)
    return report


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Some of the samples, in a file of a user's own."""
    items = [item for content in read_samples().values() for item in json.loads(content)[:2]]
    file = tmp_path / "chats.json"
    file.write_text(json.dumps(items))
    return file


@pytest.fixture(autouse=True)
def _pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's steps take time only to be looked at."""
    monkeypatch.setattr(_app, "_DEMO_PACE_S", 0.0)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Workers of the kind that the test is parametrized with."""
    kind: str = request.param
    monkeypatch.setattr(_app, "WORKER", (sys.executable, "-P", str(BROKEN_WORKER), kind))
    return kind


# --- a worker that is killed ---------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("policy", "seed"),
    drawn([("queue", 1), ("interrupt", 2), ("reject", 3), ("steer", 4), ("rollback", 5)], 2),
)
def test_everything_acknowledged_is_found_once_and_in_order_after_kills(
    chats: Path, tmp_path: Path, policy: str, seed: int
) -> None:
    options = ["--overlap", "0.6", "--kills", "3", "--policy", policy, "--seed", str(seed)]

    result = run("replay", chats, "--db", tmp_path / "chats.db", *options, "--json")

    report = report_of(result)
    assert report["broken"] == []
    assert result.exit_code == 0
    assert report["kills"] == 3
    assert report["turns"] + report["joined"] == report["sent"] == 67
    assert report["acknowledged"] == report["found"] > report["sent"]
    assert [report[breach] for breach in BREACHES] == [0, 0, 0, 0]
    assert report["calls"] == report["calls_answered_once"] > 0
    assert report["views_checked"] > report["events"]
    assert (report["rejected"] > 0) == (policy == "reject")
    assert report["interrupted"] > 0


@pytest.mark.parametrize("policy", ["steer", "rollback"])
def test_without_kills_a_policy_does_to_turns_that_run_just_what_it_says(
    chats: Path, policy: str
) -> None:
    options = ["--overlap", "1", "--conversations", "6", "--policy", policy, "--seed", "1"]

    report = report_of(run("replay", chats, *options, "--json"))

    assert report["broken"] == []
    assert report["overlapped"] > 0
    assert report["interrupted"] == 0
    assert report["rolled_back"] == (report["overlapped"] if policy == "rollback" else 0)
    assert (report["joined"] > 0) == (policy == "steer")
    assert report["turns"] + report["joined"] == report["sent"]


def test_a_replay_without_kills_says_and_calls_all_that_was_recorded(chats: Path) -> None:
    report = report_of(run("replay", chats, "--overlap", "1", "--json"))

    items = json.loads(chats.read_text())
    messages = [message for item in items for message in item["messages"]]
    calls = sum(len(message.get("tool_calls", ())) for message in messages)
    said = sum(m["role"] == "assistant" and "tool_calls" not in m for m in messages)
    others = sum(message["role"] in ("user", "system") for message in messages)
    assert report["calls"] == calls
    assert report["acknowledged"] == others + said + 2 * calls
    assert report["interrupted"] == 0
    assert report["broken"] == []


def test_kills_come_even_when_there_is_hardly_anything_to_kill(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff" + b"n" * 250)
    file = tmp_path / name
    file.write_text('[[{"role": "user", "content": "Hello"}]]')
    db = tmp_path / "chats.db"

    report = report_of(run("replay", file, file, "--db", db, "--kills", "3", "--json"))

    assert (report["kills"], report["acknowledged"], report["broken"]) == (3, 2, [])
    listed = json.loads(run("show", db, "--json").stdout)["conversations"]
    assert len({info["conversation"] for info in listed}) == 2


def test_a_second_replay_into_the_same_journal_is_a_run_of_its_own(
    chats: Path, tmp_path: Path
) -> None:
    db = tmp_path / "chats.db"
    first = run("replay", chats, "--db", db, "--conversations", "2", "--json")
    second = run("replay", chats, "--db", db, "--conversations", "3", "--json")

    listed = json.loads(run("show", db, "--json").stdout)["conversations"]

    assert (first.exit_code, second.exit_code) == (0, 0)
    assert [info["conversation"] for info in listed] == [
        "chats-1",
        "chats-1-run2",
        "chats-2",
        "chats-2-run2",
        "chats-3-run2",
    ]


def test_what_others_left_unfinished_in_the_journal_is_left_to_them(
    chats: Path, tmp_path: Path
) -> None:
    db = tmp_path / "chats.db"
    waiting = MessageQueuedEvent(turn_id="t", message_id="m", content="Anybody there?")

    async def leave_unfinished() -> None:
        async with SQLiteJournal(db) as journal:
            claim = await journal.claim("alice")
            record = Record(waiting.id, waiting.kind, encode_event(waiting), "m")
            await journal.append(
                "alice", [record], epoch=claim.epoch, expected_seq=1, is_unfinished=True
            )

    anyio.run(leave_unfinished)
    result = run("replay", chats, "--db", db, "--conversations", "2", "--kills", "1")

    assert result.exit_code == 0, result.output
    (alice, *_) = json.loads(run("show", db, "--json").stdout)["conversations"]
    assert (alice["conversation"], alice["events"], alice["epoch"]) == ("alice", 1, 1)


@pytest.mark.slow
@pytest.mark.skipif(not AIRLINE.exists(), reason="the recorded data is not part of the project")
@pytest.mark.parametrize("policy", ["queue", "interrupt", "reject", "steer", "rollback"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_two_hundred_recorded_conversations_survive_five_kills(
    tmp_path: Path, policy: str, seed: int
) -> None:
    options = ["--overlap", "0.5", "--kills", "5", "--policy", policy, "--seed", str(seed)]

    result = run("replay", AIRLINE, "--db", tmp_path / "chats.db", *options, "--json")

    report = report_of(result)
    assert report["broken"] == []
    assert (report["conversations"], report["sent"], report["kills"]) == (200, 1_490, 5)
    assert report["turns"] + report["joined"] == 1_490
    assert [report[breach] for breach in BREACHES] == [0, 0, 0, 0]
    assert report["calls"] == report["calls_answered_once"]


# --- the demo, and that it can fail --------------------------------------------------------------


def test_the_demo_accounts_for_everything_in_eighty_columns() -> None:
    result = run("demo", "--seed", "1")

    assert result.exit_code == 0, result.output
    assert result.stderr.count("worker killed (SIGKILL") == 3
    assert result.stderr.count("worker started again") == 3
    assert "Everything acknowledged is there, once and in order." in result.stdout
    assert max(map(len, result.output.splitlines())) <= 80
    header, *lines = result.stdout.splitlines()[:-2]
    rows = {line.rsplit(maxsplit=6)[0].strip(): line.split()[-1] for line in lines}
    assert header.split() == ["queue", "interrupt", "steer", "rollback", "reject", "all"]
    assert int(rows["conversations"]) >= 45
    assert int(rows["condensations"]) > 0
    assert int(rows["… rolled back"]) > 0
    assert int(rows["… joined by a further message"]) > 0
    assert rows["events acknowledged"] == rows["… found"]
    assert rows["tool calls"] == rows["… with exactly one result"]


@pytest.mark.parametrize("broken", ["eager"], indirect=True)
def test_the_demo_fails_when_the_journal_acknowledges_what_is_not_durable(broken: str) -> None:
    result = run("demo", "--seed", "1", "--json")

    report = report_of(result)
    assert result.exit_code == 1
    assert report["lost"] > 0
    assert report["acknowledged"] == report["found"] + report["lost"]
    assert any(line.endswith("is lost") for line in report["broken"])


@pytest.mark.parametrize("broken", ["repeating"], indirect=True)
def test_a_broken_promise_is_told_in_words(chats: Path, broken: str) -> None:
    result = run("replay", chats, "--conversations", "2")

    assert result.exit_code == 1
    assert "NOT as promised" in result.stdout
    assert "conversation chats-1: message 0 is at seq 3 and at seq" in result.stdout


# --- input that cannot be used -------------------------------------------------------------------


def test_what_cannot_be_used_is_told_and_the_rest_is_played(tmp_path: Path) -> None:
    hello = {"role": "user", "content": "Hello"}
    (tmp_path / "some.json").write_text(json.dumps([[hello], [{"content": "?"}], [hello, hello]]))
    (tmp_path / "lines.jsonl").write_text(f'{json.dumps({"traj": [hello]})}\n{{"traj": \n')
    (tmp_path / "not.json").write_text("hello")
    files = [tmp_path / name for name in ("some.json", "lines.jsonl", "not.json", "none.json")]

    result = run("replay", *files, "--json")

    report = report_of(result)
    assert result.exit_code == 2
    assert (report["conversations"], report["sent"], report["broken"]) == (3, 4, [])
    places = [(Path(p["file"]).name, p["item"], p["message"]) for p in report["problems"]]
    assert places == [
        ("some.json", 2, 1),
        ("lines.jsonl", 2, None),
        ("not.json", None, None),
        ("none.json", None, None),
    ]
    assert "this cannot be used:\n" in result.stderr
    assert f"  {files[0]}, item 2, message 1, role: a message without a role\n" in result.stderr
    assert f"  {files[3]}: cannot be read: No such file or directory\n" in result.stderr


def test_a_message_that_no_user_can_send_is_told_and_the_rest_is_played(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    chats = [[{"role": "user", "content": "a" * length}] for length in (TEXT_LENGTH_MAX + 1, 1)]
    file.write_text(json.dumps(chats))

    result = run("replay", file, "--json")

    report = report_of(result)
    assert (result.exit_code, report["stopped"], report["sent"]) == (2, None, 1)
    assert "1 conversation, 1 chat message, seed " in result.stderr
    assert f"{file}, item 1: a user message of 8,388,609 characters" in result.stderr


def test_a_broken_promise_weighs_more_than_unusable_input() -> None:
    problem = InputProblem(file="a.json", found="it is empty")
    report = empty_report([problem])

    assert report.exit_status == 2
    assert replace(report, broken=["lost"]).exit_status == 1
    assert replace(report, stopped="why").exit_status == 1
    assert replace(report, problems=[]).exit_status == 0


def test_nothing_to_play_is_told_also_as_json(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("[]")

    result = run("replay", file, "--json")

    assert result.exit_code == 2
    assert report_of(result)["problems"][0]["found"] == "there is no conversation in it"
    assert result.stderr.endswith("turnkeeper: there is nothing to play\n")


def test_only_the_first_problems_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps([7] * 50))

    lines = run("replay", file).stderr.splitlines()

    assert lines[20] == f"  {file}, item 20: a conversation is needed, found a number"
    assert lines[21] == "  … and 30 more"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--db", "no/such/x.db"], "no/such/x.db cannot be written: there is no folder no/such"),
        (["--db", "postgresql://me:secret@h/d"], "takes the path of a file, and not a URL"),
        (["--db", "'postgresql://me:secret@h/d'"], "takes the path of a file, and not a URL"),
        (["--overlap", "1.5"], "--overlap"),
        (["--kills", "-1"], "--kills"),
        (["--policy", "shout"], "'shout' is not one of"),
        (["--conversations", "0"], "--conversations"),
    ],
)
def test_an_option_that_cannot_be_meant_is_told_before_anything_runs(
    chats: Path, options: Sequence[str], told: str
) -> None:
    result = run("replay", chats, *options)

    assert result.exit_code == 2
    assert told in result.stderr
    assert "secret" not in result.stderr
    assert result.stdout == ""


def test_a_file_that_is_no_journal_is_never_written_to(chats: Path, tmp_path: Path) -> None:
    db = tmp_path / "notes.db"
    db.write_text("dear diary" * 500)

    result = run("replay", chats, "--db", db)

    assert result.exit_code == 2
    assert "it is not a turnkeeper journal; nothing was changed" in result.stderr
    assert db.read_text() == "dear diary" * 500


def test_the_command_says_which_extra_it_needs() -> None:
    program = (
        "import sys; sys.modules['rich'] = None\nfrom turnkeeper.actors.cli import main\nmain()"
    )
    process = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )

    assert process.returncode == 1
    assert process.stderr == (
        "the turnkeeper command needs its extra: pip install 'turnkeeper[cli]'\n"
    )


# --- a worker that ends by itself ----------------------------------------------------------------


@pytest.mark.parametrize("broken", ["mortal"], indirect=True)
def test_a_worker_that_dies_by_itself_is_told_with_what_survives(
    chats: Path, tmp_path: Path, broken: str
) -> None:
    result = run("replay", chats, "--db", tmp_path / "chats.db", "--json")

    report = report_of(result)
    assert result.exit_code == 1
    assert report["stopped"].startswith("the worker ended by itself with status -9")
    assert report["stopped"].endswith("the disk is on fire")
    assert report["acknowledged"] == report["found"] > 0
    assert report["broken"] == []


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["/nowhere/python"], "turnkeeper: the worker cannot be started: "),
        (
            [sys.executable, "-c", "raise SystemExit('no room')"],
            "turnkeeper: the worker ended by itself with status 1\n  no room\n",
        ),
        (
            [sys.executable, "-c", """print('{"kind": "ready"}\\n{"kind": "vie', end="")"""],
            "turnkeeper: the worker ended by itself with status 0\n",
        ),
    ],
)
def test_a_worker_that_cannot_start_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, chats: Path, command: Sequence[str], told: str
) -> None:
    monkeypatch.setattr(_app, "WORKER", command)

    result = run("replay", chats)

    assert result.exit_code == 1
    assert told in result.stderr
    assert result.stderr.endswith("turnkeeper: nothing had been acknowledged\n")
    assert "Traceback" not in result.output


def test_a_worker_without_a_thread_to_wait_for_it_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, chats: Path
) -> None:
    """In Python 3.11 asyncio starts a thread for it, and there may be none left."""

    async def open_process(*_: object, **__: object) -> Never:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("anyio.open_process", open_process)

    result = run("replay", chats)

    assert result.exit_code == 1
    assert "turnkeeper: the worker cannot be started: can't start new thread" in result.stderr
    assert "Traceback" not in result.output


def use_stubborn_worker(monkeypatch: pytest.MonkeyPatch, report: str) -> None:
    """Have a worker that makes this report, and then does nothing until it is killed."""
    program = f"import signal; print({report!r}, flush=True); signal.pause()"
    monkeypatch.setattr(_app, "WORKER", (sys.executable, "-c", program))
    monkeypatch.setattr(_replay, "STOP_GRACE_S", 0.2)


def test_a_worker_that_will_not_stop_is_killed(
    monkeypatch: pytest.MonkeyPatch, chats: Path
) -> None:
    use_stubborn_worker(monkeypatch, '{"kind": "views", "event_ids": {}}')

    result = run("replay", chats)

    assert result.exit_code == 1
    assert "turnkeeper: the worker did not stop within 0.2 s, and was killed" in result.stderr


def test_a_worker_that_says_nothing_more_is_lost(
    monkeypatch: pytest.MonkeyPatch, chats: Path
) -> None:
    use_stubborn_worker(monkeypatch, '{"kind": "ready"}')
    monkeypatch.setattr(_replay, "SILENCE_S_MAX", 0.25)

    result = run("replay", chats, "--pace", "0.25")

    assert result.exit_code == 1
    assert "turnkeeper: the worker has said nothing for 0.5 s" in result.stderr


@pytest.mark.parametrize("command", ["demo", "replay", "stress"])
def test_a_journal_that_is_owned_elsewhere_is_refused_before_anything_runs(
    chats: Path, tmp_path: Path, command: str
) -> None:
    """The worker had to fail first, with the status of a broken promise."""
    db = tmp_path / "chats.db"
    files = [chats] if command == "replay" else []

    async def run_while_it_is_owned() -> Result:
        async with SQLiteJournal(db, address="the shop"):
            return await anyio.to_thread.run_sync(partial(run, command, *files, "--db", db))

    result = anyio.run(run_while_it_is_owned)

    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"turnkeeper: journal {db} is owned by the shop, which is alive; ")
    assert line.endswith("if it hangs, kill it: all that it has acknowledged stays")


@pytest.mark.parametrize("broken", ["taken"], indirect=True)
def test_a_journal_that_another_process_takes_before_the_worker_is_left_alone(
    chats: Path, broken: str
) -> None:
    result = run("replay", chats)

    assert result.exit_code == 1
    assert "the worker failed: OwnedElsewhere: " in result.stderr
    assert "is owned by the shop" in result.stderr
    assert "stop that process first" in result.stderr
    assert result.stderr.endswith("turnkeeper: nothing had been acknowledged\n")


@pytest.mark.parametrize(
    ("how", "status", "name"),
    [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, -signal.SIGTERM, "SIGTERM")],
)
def test_a_signal_stops_the_worker_and_accounts_for_what_was_acknowledged(
    chats: Path, tmp_path: Path, how: signal.Signals, status: int, name: str
) -> None:
    db = tmp_path / "chats.db"
    command = [*COMMAND, "replay", str(chats), "--db", str(db), "--pace", "0.3", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        while "acknowledged" not in process.stderr.readline():
            pass

        process.send_signal(how)
        stdout, stderr = process.communicate()

    report = json.loads(stdout)
    assert process.returncode == status
    assert f"turnkeeper: stopped by {name}" in stderr
    assert "Traceback" not in stderr
    assert report["stopped"] == f"stopped by {name}"
    assert report["acknowledged"] == report["found"] > 0
    assert report["broken"] == []
    # The worker has gone, too: the journal can be owned again at once.
    again = run("replay", chats, "--db", db, "--conversations", "1")
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize("command", ["demo", "replay", "stress"])
def test_a_signal_that_ends_a_run_leaves_nothing_among_the_temporary_files(
    chats: Path, tmp_path: Path, command: str
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    arguments = {"demo": [], "replay": [str(chats), "--pace", "1"], "stress": ["--rate", "50"]}
    with subprocess.Popen(
        [*COMMAND, command, *arguments[command]],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not any(temporary.iterdir()):
            assert process.poll() is None

        process.send_signal(signal.SIGTERM)
        process.communicate()

    assert process.returncode == -signal.SIGTERM
    assert list(temporary.iterdir()) == []
